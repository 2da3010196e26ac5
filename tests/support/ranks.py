"""Worlds of several ranks, in processes of this machine."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from soulkit.train.ranks.follower import follow, leading
from soulkit.train.ranks.launch import LAUNCHER
from tests.support.resuming import fork_context


@dataclass(frozen=True)
class Ended:
    """What became of a world."""

    result: Any
    """What the function returned on rank 0; None if it raised."""
    codes: list[int | None]
    """Exit code of every rank; None if it had to be killed."""
    errors: list[str]
    """What every rank wrote to stdout and stderr."""
    seconds: float


def run_ranks(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, limit: float = 300
) -> Ended:
    """Call `function` on rank 0 of a world of `size` processes; the others follow it."""
    context, started = fork_context(), time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    receive, send = context.Pipe(duplex=False)
    logs = [folder / f"rank{rank}.txt" for rank in range(size)]
    processes = [
        context.Process(target=_live, args=(rank, size, port, log, send, function, args))
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.start()
    send.close()
    try:
        result = receive.recv() if receive.poll(limit) else None
    except EOFError:  # all ranks have ended
        result = None
    for process in processes:
        process.join(max(started + limit - time.monotonic(), 0.1))
    codes, seconds = [process.exitcode for process in processes], time.monotonic() - started
    for process in processes:
        process.kill()
    return Ended(result, codes, [log.read_text() for log in logs], seconds)


def _live(
    rank: int, size: int, port: int, log: Path, send: Any, function: Callable[..., Any], args: Any
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, LAUNCHER: os.getppid()}  # fmt: skip
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    if rank:
        follow()
        return
    with leading():
        result = function(*args)
    send.send(result)
