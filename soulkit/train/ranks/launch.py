"""Starts the ranks of a training job on this machine, and checks how a launcher started this one.

`soul train … --gpus N` starts the same command line N times with torch's elastic agent, which sets
RANK, WORLD_SIZE and so on, as torchrun does. Rank 0 has this process's terminal; the others write
log files. Signals go to rank 0 only, which saves a checkpoint and ends the others. There is no
automatic restart: the same command resumes.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import ConfigError, RunStopped
from soulkit.models.local.threads import local_processes

if TYPE_CHECKING:
    from soulkit.train.config import TrainConfig

FOLDER = "SOULKIT_RANKS"
"""Variable with the folder of the ranks' logs; set for ranks that `launch` started."""
LAUNCHER = "SOULKIT_RANKS_PARENT"
"""Variable with the process id of `launch`, which may be gone before its ranks look."""
PARENT = os.getppid()
PID = "0.pid"
"""File in that folder with the process id of rank 0, as soon as it handles signals."""
LOST = 3
"""Exit code of rank 0 under `launch` if another rank ended: `launch` explains it."""
LOG_LINES = 8
"""Last lines shown of the log of a rank that failed."""
NEEDED = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that every launcher sets."""
SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP"))
"""Signals that ask a process to end; Windows has no SIGHUP."""
RESUME = "Run the same command again; it resumes from the newest checkpoint."


# --- how this process was started -----------------------------------------------------------------


def place_in_job() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as a launcher set them."""
    size = int(os.environ.get("WORLD_SIZE") or 1)
    return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)


def check_launched(command: str) -> None:
    """ConfigError if a launcher started this process for a command that runs in one process, or
    did not say which rank it is. Only rank 0 prints it."""
    if (os.environ.get("WORLD_SIZE") or "1") == "1":
        return
    values = {name: os.environ.get(name, "") for name in NEEDED}
    wrong = {name: "is not set" for name, text in values.items() if not text} or {
        name: f"is not a number: '{values[name]}'"
        for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")
        if not values[name].isdecimal()
    }
    if not wrong and int(values["RANK"]) >= int(values["WORLD_SIZE"]):
        wrong = {"RANK": f"is {values['RANK']}, but WORLD_SIZE is {values['WORLD_SIZE']}"}
    for name, how in wrong.items():
        raise ConfigError(
            f"{name} {how}.",
            "Launchers such as torchrun set RANK (0 to WORLD_SIZE - 1) and other variables.",
            "Start it with `soul train … --gpus N` or torchrun, or unset WORLD_SIZE.",
        )
    rank, size = place_in_job()
    if command == "soul train" or size == 1:
        return
    if rank:
        raise SystemExit(2)
    raise ConfigError(
        f"`{command}` runs in one process, but a launcher started {size} (WORLD_SIZE).",
        "Every process would do the same work. Only `soul train METHOD` divides it.",
        f"Run `{command}` without torchrun or srun, or unset WORLD_SIZE.",
    )


def refuse_ranks(config: TrainConfig, command: str) -> None:
    """ConfigError for settings of several ranks where training runs in one process."""
    several = config.training_gpus > 1
    name = f"--gpus {config.gpus}" if several else f"--launcher {config.launcher}"
    if several or config.launcher != "local":
        raise ConfigError(
            f"{name} does not work with {command}.",
            "Only the command `soul train METHOD` starts several processes.",
            f"Leave out {name.split()[0]}, or use `soul train METHOD {name}`.",
        )


def ranks_to_start(config: TrainConfig) -> int:
    """Number of ranks that this process has to start; 0 if it trains itself, alone or as a rank.

    ConfigError if they cannot be started, or if a launcher started another number.
    """
    _, size = place_in_job()
    if size > 1:
        here = local_processes()
        if config.gpus > 1 and config.training_gpus != size:
            raise ConfigError(
                f"--gpus {config.gpus} asks for {config.training_gpus} training processes, but the "
                f"launcher started {size}.",
                "Under torchrun, its --nnodes and --nproc-per-node set their number.",
                "Leave out --gpus.",
            )
        _refuse_missing_gpus(config, here, f"--nproc-per-node {here}")
        return 0
    if config.training_gpus == 1:
        return 0
    _refuse_missing_gpus(config, config.gpus, f"--gpus {config.gpus}")
    return config.training_gpus


def _refuse_missing_gpus(config: TrainConfig, number: int, option: str) -> None:
    """ConfigError unless this machine has `number` GPUs, or the processes use the CPU."""
    import torch

    if config.device == "cpu":
        return
    if config.device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device {config.device} does not work with {option}.",
            "Each process needs its own GPU: process i of a machine uses cuda:i.",
            "Leave out --device, and choose GPUs with CUDA_VISIBLE_DEVICES.",
        )
    gpus = torch.cuda.device_count()
    if number > gpus != 1 or (number > gpus and "WORLD_SIZE" not in os.environ):
        raise ConfigError(
            f"{option} needs {number} GPUs, but this machine has {gpus or 'none'}.",
            "Each process needs its own GPU.",
            f"Use {gpus}, or --device cpu for {number} processes on the CPU."
            if gpus > 1
            else f"Leave it out, or use --device cpu for {number} processes on the CPU.",
        )


# --- starting ranks -------------------------------------------------------------------------------


def launch(words: Sequence[str], number: int) -> int:
    """Run `soul WORDS` in `number` ranks and return the exit code of rank 0.

    RunStopped if a rank ended without an explanation of its own.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder = Path(tempfile.mkdtemp(prefix="soul-ranks-"))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            _start(words, number, folder)
        except BaseException as error:  # noqa: BLE001 - raised or explained below
            ended.append(error)

    os.environ |= {FOLDER: str(folder), LAUNCHER: str(os.getpid())}
    logging.disable(logging.ERROR)  # the agent reports what `launch` explains
    try:
        _wait(threading.Thread(target=run, daemon=True), folder / PID)
    finally:
        logging.disable(logging.NOTSET)
        del os.environ[FOLDER], os.environ[LAUNCHER]
    error = ended[0] if ended else None
    if error is not None and not isinstance(error, ChildFailedError):
        raise error
    failures = error.failures if error is not None else {}
    rank = rank_to_explain({rank: one.exitcode for rank, one in failures.items()})
    if rank is not None and rank in failures:
        raise _explanation(rank, failures[rank], folder)
    shutil.rmtree(folder, ignore_errors=True)
    return failures[0].exitcode if 0 in failures else 0


def _start(words: Sequence[str], number: int, folder: Path) -> None:
    """Start the ranks, and return when all have ended; ChildFailedError if one has failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=number, max_restarts=0, monitor_interval=0.1,
        run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(str(folder), dict.fromkeys(range(1, number), Std.ALL)),
    )  # fmt: skip
    elastic_launch(config, sys.executable)("-m", "soulkit", *words)


def _wait(agent: threading.Thread, pid_file: Path) -> None:
    """Run `agent`, passing signals of this process on to rank 0.

    In the main thread the agent would handle them itself, and end all ranks after 30 seconds, even
    during a checkpoint.
    """
    waiting: list[int] = []
    with signals_to(waiting):
        agent.start()
        while agent.is_alive():
            agent.join(0.1)
            if waiting and pid_file.is_file() and (pid := pid_file.read_text().strip()):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), waiting.pop(0))


@contextmanager
def signals_to(waiting: list[int]) -> Iterator[None]:
    """Add signals that end a process to `waiting` instead, unless they are ignored."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: waiting.append(n))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rank_to_explain(codes: Mapping[int, int]) -> int | None:
    """The rank that ended a job in which `codes` lists the exit codes of the ranks that failed (a
    signal is negative); None if rank 0 has printed its own error."""
    first = codes.get(0, 0)
    others = {r: code for r, code in codes.items() if r and code not in (LOST, -signal.SIGTERM)}
    killed = [rank for rank, code in others.items() if code < 0]
    # The agent sends SIGTERM to rank 0 when another rank fails, which may save a checkpoint.
    because = first == LOST or (first == 1 and killed) or (first == 128 + signal.SIGTERM and others)
    return None if first > 0 and not because else next(iter([*killed, *others, 0]))


def _explanation(rank: int, failure: Any, folder: Path) -> RunStopped:
    """The error that names the rank that ended first. Prints the last lines of its log."""
    log = next(folder.glob(f"*/attempt_0/{rank}/stderr.log"), None)
    lines = log.read_text(errors="replace").splitlines() if log else []
    if not lines:
        shutil.rmtree(folder, ignore_errors=True)
    where = f"{socket.gethostname()} (process {failure.pid})"
    return rank_error(rank, failure.exitcode, where, lines, f"Its log is {log}.")


def rank_error(rank: int, code: int, where: str, lines: Sequence[str], log: str) -> RunStopped:
    """The error about a rank that failed. Prints the last `lines` of its log."""
    for line in lines[-LOG_LINES:]:
        sys.stderr.write(f"[rank {rank}] {line}\n")
    if code == LOST:
        how = "lost the connection to another rank"
    else:
        by = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
        how = f"was ended by {by}" if code < 0 else f"ended with exit code {code}"
    why = log if lines else "It wrote no error message."
    out_of_memory = " Often its memory ran out." * (code == -signal.SIGKILL)
    return RunStopped(f"Rank {rank} on {where} {how}.", f"{why}{out_of_memory}", RESUME)
