"""Runs a training on a Ray cluster (`--launcher ray`): its ranks, and the vLLM servers of rank 0.

    soul train ──▶ Ray Train ──▶ a worker per rank ──▶ the same command, as under torchrun
         └───────▶ mailbox ◀───────────┘      output of rank 0, exit codes, signals
    rank 0 ──▶ an actor per server ──▶ supervisor ──▶ vLLM

Ray chooses hosts and GPUs, starts the workers and notices lost ones. A worker runs the command in a
process of its own, so signals, exit codes and output are the same as with the other launchers. Ray
keeps no state of the training: ranks that start again resume from the run folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import ray
from ray import train
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from soulkit import api_keys
from soulkit.errors import ConfigError, RunStopped
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.manager import MEMORY_FLAG
from soulkit.models.vllm.server import (
    START_S,
    ServerDied,
    ServerFailed,
    VllmServer,
    free_port,
    stop_all,
)
from soulkit.text import one_line
from soulkit.train.ranks.launch import (
    FOLDER,
    LAUNCHER,
    LOG_LINES,
    RESUME,
    rank_error,
    rank_to_explain,
    signals_to,
)

if TYPE_CHECKING:
    from soulkit.train.config import TrainConfig

STARTS = 3
"""How often the ranks are started if one is killed or its host is lost. They do not start again
after an error of the program, which would only repeat."""
LOOK_S = 0.3
"""Seconds between looks at a process, or at the mailbox."""
GRACE_S = (25.0, 5.0)
"""Seconds in which rank 0 and the other ranks may end by themselves once one of them has ended."""
CALL_S = 5.0
"""Seconds to wait for the state of a server."""
OWN = ("CUDA_VISIBLE_DEVICES", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables that a process gets from its Ray worker; all others are those of `soul train`."""


class RankEnd(NamedTuple):
    """How a rank ended."""

    host: str
    code: int | None
    """Exit code, minus the number of a signal, or None if `log` is a path that its host lacks."""
    log: tuple[str, ...] = ()
    """Last lines of its output, except of rank 0."""


class RankKilled(RunStopped):
    """A rank was killed, or its host was lost."""


class Mailbox:
    """An actor that `soul train` and the workers write to and read from."""

    def __init__(self) -> None:
        self._output: list[tuple[int, bytes]] = []
        self._signals: list[int] = []
        self._ends: dict[int, RankEnd] = {}
        self._over = 0.0

    def write(self, stream: int, data: bytes) -> None:
        self._output.append((stream, data))

    def look(self, *signals: int) -> tuple[list[tuple[int, bytes]], dict[int, RankEnd]]:
        """Send signals to rank 0; returns its output since the last call, and the ends so far."""
        self._signals += signals
        new, self._output = self._output, []
        return new, self._ends

    def signals(self, rank: int) -> list[int]:
        """All signals for a rank so far."""
        late = self._over and time.monotonic() - self._over > GRACE_S[rank > 0]
        return self._signals * (rank == 0) + [int(signal.SIGKILL)] * bool(late)

    def end(self, rank: int, end: RankEnd) -> None:
        """Record an end. If another rank failed, rank 0 gets SIGTERM and saves a checkpoint, and
        its code does not count."""
        late = self._over and rank == 0 and (end.code or 0) > 0
        self._ends[rank] = end._replace(code=0) if late else end
        if not self._over and (end.code != 0 or rank == 0):
            self._over = time.monotonic()
            self._signals.append(signal.SIGTERM)


class SharedGpus(Backend):
    """Every rank sees the GPUs of all ranks of its host, as under torchrun."""

    share_cuda_visible_devices = True


class Processes(BackendConfig):
    """Ray Train without a process group: the ranks form one themselves."""

    backend_cls = SharedGpus


# --- the ranks ------------------------------------------------------------------------------------


def launch_on_ray(words: Sequence[str], config: TrainConfig, out: Path) -> int:
    """Run `soul WORDS` in all ranks of the training in `out`, and return the exit code of rank 0.

    RunStopped if another rank failed, or if one was killed STARTS times.
    """
    variables = dict(os.environ)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.NamedTemporaryFile(prefix=".soulkit-", dir=out.resolve().parent) as probe,
        tempfile.TemporaryDirectory(prefix="soulkit-ray-", dir="/tmp") as folder,
        connect(num_cpus=max(os.cpu_count() or 1, config.gpus), include_dashboard=False,
                object_store_memory=200 << 20, _temp_dir=folder),
    ):  # fmt: skip
        gpus = ray.cluster_resources().get("GPU", 0) if config.device != "cpu" else 0
        if 0 < gpus < config.gpus:
            sys.stderr.write(f"waiting: the Ray cluster has {gpus:g} of {config.gpus} GPUs\n")
        seen = [os.getcwd(), probe.name]
        job = {"words": [*words], "seen": seen, "environment": ray.put(variables)}
        for left in reversed(range(STARTS)):
            mailbox = ray.remote(num_cpus=0)(Mailbox).remote()
            size = train.ScalingConfig(num_workers=config.training_gpus, use_gpu=gpus > 0)
            trainer = DataParallelTrainer(
                _run_rank, train_loop_config={**job, "mailbox": mailbox},
                backend_config=Processes(), scaling_config=size,
                run_config=train.RunConfig(name="ranks", storage_path=folder),
            )  # fmt: skip
            ends, error, interrupt = _fit(trainer, mailbox)
            try:
                return _exit_code(ends, error)
            except RankKilled as killed:
                if interrupt or not left:
                    raise
                sys.stderr.write(f"{killed.what} All ranks start again, from the checkpoint.\n")
            if 0 not in ends:  # its worker is lost, but it may still save a checkpoint
                time.sleep(GRACE_S[0])
    raise AssertionError("the last start returns or raises")


def connect(**settings: Any) -> Any:
    """Context with a connection to the cluster of RAY_ADDRESS, or else to a new one on this host
    with these `settings`, which ends with the context."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # it would upload this folder
    address, handler = os.environ.get("RAY_ADDRESS"), signal.getsignal(signal.SIGTERM)
    context = ray.init(
        address or "local", log_to_driver=False, logging_level=logging.ERROR,
        ignore_reinit_error=True, **({} if address else settings),
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process at once
    return context


def _fit(
    trainer: DataParallelTrainer, mailbox: Any
) -> tuple[dict[int, RankEnd], Exception | None, bool]:
    """Run all ranks, showing the output of rank 0 and passing signals of this process on to it.
    Returns the ends of the ranks, Ray's error, and whether a signal came."""
    errors, waiting, interrupt = list[Exception](), list[int](), False

    def fit() -> None:
        try:
            trainer.fit()
        except Exception as error:  # noqa: BLE001 - `_exit_code` explains it
            errors.append(error)

    thread = threading.Thread(target=fit, daemon=True)  # in the main one Ray handles the signals
    with signals_to(waiting):
        thread.start()
        while True:
            thread.join(LOOK_S)
            running, signals = thread.is_alive(), waiting[:]
            del waiting[: len(signals)]
            output, ends = ray.get(mailbox.look.remote(*signals))
            for stream, data in output:
                os.write(stream, data)
            interrupt = interrupt or bool(signals)
            if not running:
                return ends, errors[0] if errors else None, interrupt


def _exit_code(ends: Mapping[int, RankEnd], error: Exception | None) -> int:
    """The exit code of rank 0 if it has explained itself. RankKilled or RunStopped if not, and
    ConfigError if a host does not see the folders of the run."""
    for rank, end in ends.items():
        if end.code is None:
            raise ConfigError(
                f"Rank {rank} runs on {end.host}, where '{end.log[0]}' does not exist.",
                "All ranks work in the current folder and see the run folder.",
                "Use folders that all hosts of the cluster share.",
            )
    codes = {rank: end.code for rank, end in ends.items() if end.code}
    first = rank_to_explain(codes) if codes else None
    if first is None and (codes or error is None):
        return ends[0].code or 0
    killed = codes.get(first or 0, 0) < 0
    if first in codes and (killed or error is None):
        host, _, log = ends[first]
        failed = rank_error(first, codes[first], host, log, "Its last lines are above.")
    else:
        killed = error is not None and not isinstance(error, train.ControllerError)
        failed = RunStopped("Ray could not run all ranks.", one_line(str(error), 300), RESUME)
    raise RankKilled(*failed.lines()) if killed else failed


def _run_rank(job: Mapping[str, Any]) -> None:
    """Run the command as one rank. Ray Train calls this in every worker."""
    here, mailbox, host = train.get_context(), job["mailbox"], socket.gethostname()
    rank, address = here.get_world_rank(), ray.util.get_node_ip_address()
    if missing := [path for path in job["seen"] if not Path(path).exists()]:
        ray.get(mailbox.end.remote(rank, RankEnd(host, None, tuple(missing))))
    address, port = broadcast_from_rank_zero((address, free_port(address)))
    if ray.get(mailbox.look.remote())[1]:  # all workers have looked
        return
    environment = _environment(ray.get(job["environment"])) | {
        "RANK": str(rank), "LOCAL_RANK": str(here.get_local_rank()),
        "WORLD_SIZE": str(here.get_world_size()),
        "LOCAL_WORLD_SIZE": str(here.get_local_world_size()),
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1",
        FOLDER: os.getcwd(), LAUNCHER: str(os.getpid()),  # of this worker
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }  # fmt: skip
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, also for child processes
    child = subprocess.Popen(
        [sys.executable, "-m", "soulkit", *job["words"]], cwd=job["seen"][0], env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = deque[str](maxlen=LOG_LINES)

    def read(stream: int, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            if rank == 0:
                mailbox.write.remote(stream, data)
            else:
                log.extend(data.decode(errors="replace").splitlines())

    assert child.stdout is not None and child.stderr is not None
    pipes = enumerate((child.stdout, child.stderr), 1)
    readers = [threading.Thread(target=read, args=pair) for pair in pipes]
    for reader in readers:
        reader.start()
    count = 0
    while child.poll() is None:
        time.sleep(LOOK_S)
        for number in ray.get(mailbox.signals.remote(rank))[count:]:
            child.send_signal(number)
            count += 1
    for reader in readers:
        reader.join()
    code = child.returncode if child.returncode >= 0 or not count else 128 - child.returncode
    ray.get(mailbox.end.remote(rank, RankEnd(host, code, tuple(log))))


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of `soul train`, with those of this worker that depend on its host."""
    return {**variables, **{name: os.environ[name] for name in OWN if name in os.environ}}


# --- vLLM servers ---------------------------------------------------------------------------------


class ServerActor:
    """Holds one vLLM server and its supervisor, on a host that Ray chose."""

    server: VllmServer | None = None

    def start(
        self, spec: ServerSpec, folder: Path, limit_s: float, variables: Mapping[str, str]
    ) -> dict[str, Any]:
        """Start the server; returns its public attributes."""
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's
        os.environ.update(_environment(variables))
        spec = replace(spec, host=ray.util.get_node_ip_address())
        logs = folder if folder.is_dir() else Path(tempfile.mkdtemp(prefix="soul-vllm-"))
        (self.server,) = VllmServer.start_all([spec], logs, limit_s=limit_s)
        return {name: value for name, value in vars(self.server).items() if name[0] != "_"}

    def ask(self, name: str) -> None:
        """Call a method of the server."""
        if self.server is not None:
            getattr(self.server, name)()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on this host."""
        return function(*args)


class RayServer(VllmServer):
    """A vLLM server on a host that Ray chose. Pushed adapters that the host does not see are copied
    there through Ray's object store."""

    def __init__(self, spec: ServerSpec, folder: Path, limit_s: float) -> None:
        """Start it, once Ray has room for it."""
        kind, _, numbers = spec.device.partition(":")
        gpus = len(numbers.split(",")) if kind == "cuda" else 0.0
        if gpus == 1:  # servers of other models may have the rest of the memory
            gpus = min(float(spec.args.get(MEMORY_FLAG) or 1), 1)
        self._model, self._stopped = spec.model, False
        self._end: Any = None
        self._place = placement_group([{"CPU": 1, **({"GPU": gpus} if gpus else {})}])
        self._actor = ray.remote(ServerActor).options(
            num_cpus=1, num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._place),
            # Ray would kill the supervisor, which then could not end the server.
            runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
        ).remote()  # fmt: skip
        start = self._actor.start.remote
        self.started = start(replace(spec, device=kind), folder, limit_s, dict(os.environ))

    @classmethod
    def start_all(
        cls, specs: Sequence[ServerSpec], folder: Path, *, limit_s: float = START_S,
        watch: Callable[[float, str], None] | None = None,
    ) -> list[VllmServer]:  # fmt: skip
        """As VllmServer.start_all; `limit_s` holds for the wait for GPUs, and for the start."""
        connect()
        folder.mkdir(parents=True, exist_ok=True)  # hosts that see it write their logs there
        begun, servers = time.monotonic(), [cls(spec, folder, limit_s) for spec in specs]
        starts = [one.started for one in servers]
        try:
            while ray.wait(starts, num_returns=len(starts), timeout=1.0)[1]:
                seconds = time.monotonic() - begun
                if watch is not None:
                    watch(seconds, "on hosts that Ray chooses")
                if seconds > 2 * limit_s:
                    raise ServerFailed(
                        f"Ray did not start {len(specs)} vLLM servers within {seconds:.0f} s.",
                        "The GPUs of the cluster may be in use.",
                        "Use a smaller --sampler-gpus, or allow more time (--vllm-start SECONDS).",
                    )
            for one in servers:
                vars(one).update(ray.get(one.started))
                api_keys.remember(one.key)
        except BaseException:
            stop_all(servers)
            raise
        return list[VllmServer](servers)

    def check(self) -> None:
        try:
            with suppress(GetTimeoutError):  # the health check of its address decides
                ray.get(self._actor.ask.remote("check"), timeout=CALL_S)
        except RayActorError as error:
            what = f"The vLLM server of '{self._model}' died."
            why = f"Ray lost it on {self.host}."
            raise ServerDied(what, why, f"Finished work is kept. {RESUME}") from error

    def let_go(self) -> None:
        if ray.is_initialized():  # else the actor has ended with Ray
            self._end = self._end or self._actor.ask.remote("stop")

    def stop(self) -> None:
        self.let_go()
        if self._end is None or not ray.is_initialized():
            return
        try:
            with suppress(RayActorError, GetTimeoutError):
                ray.get(self._end, timeout=60.0)
        finally:
            ray.kill(self._actor)
            remove_placement_group(self._place)

    def send(self, folder: Path) -> None:
        with suppress(RayActorError):  # a lost server has no part in the push
            if ray.get(self._actor.run.remote(_sizes, folder)) != _sizes(folder):
                ray.get(self._actor.run.remote(_write, folder, _stored(folder)))

    def remove(self, folder: Path) -> None:
        with suppress(RayActorError):
            ray.get(self._actor.run.remote(shutil.rmtree, folder, True))


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*")}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


@lru_cache(maxsize=1)
def _stored(folder: Path) -> Any:
    """The files of the newest adapter in the object store."""
    return ray.put({path.name: path.read_bytes() for path in folder.iterdir()})
