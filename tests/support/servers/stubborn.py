"""A program with a child that does not end when asked: it listens, says so, and waits.

    stubborn.py PORT

Its child ignores every signal that can be ignored, so that only a kill of the group ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time


def main(port: int) -> None:
    # Before the socket: the child must not keep the port when this process is killed alone.
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    with socket.create_server(("127.0.0.1", port)):
        time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]))
