"""A program with a child that does not end when asked: it listens, says so, and waits.

    stubborn.py PORT

Its child ignores every signal that can be ignored, so that only a kill of the group ends it. They
share memory by a file that neither removes.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time


def memory_file(port: int) -> str:
    return f"/dev/shm/psm_stubborn_{port}"


def main(port: int) -> None:
    with open(memory_file(port), "w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
    # Before the socket: the child must not keep the port when this process is killed alone.
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(600)
    memory.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
