"""The ranks of a training job.

Rank 0 runs the whole program: rollouts, judges, records, checkpoints. The other ranks, the
followers, only run the functions marked `on_all_ranks`: when rank 0 calls one, it sends its name
and arguments, and all ranks run it. Every rank has all sequences of a step, so denominators, group
statistics and mini-batches need no exchange. Only packs are divided; gradients, losses and counts
are added up before the optimizer step, which every rank takes. A process alone is rank 0 of 1,
and all of this does nothing.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from soulkit.errors import RunStopped
from soulkit.train.config import TrainConfig, settings_class
from soulkit.train.ranks.launch import place_in_job
from soulkit.train.ranks.watch import start_watch, stop_watch

T = TypeVar("T")
P = ParamSpec("P")

LIMIT = timedelta(minutes=30)
"""Time limit of a collective operation; rank 0 may play rollouts for any time between commands."""
UNLIMITED = timedelta(days=30)
FIRST = "soulkit/first"
"""Key in the store of the job, set when rank 0 joins."""
BUCKET = 1 << 27
"""Most gradients that are added up at once; an adapter of an 8B model has 87 million."""
LEAST_TOKENS = {"cpu": 64, "cuda": 1024}
"""Smallest budget of a pack that is planned for balance, by kind of device."""
EVEN = 1.05
"""Imbalance below which no better plan is looked for."""


class RankError(RunStopped):
    """The ranks of the training disagree."""


class RankLost(RankError):
    """Another rank of the training has ended or does not answer."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """Stands for an object that every rank has, in a command."""

    name: str


@dataclass(frozen=True, slots=True)
class _Settings:
    """A TrainConfig in a command."""

    method: str
    values: dict[str, Any]


@dataclass(eq=False)
class Ranks:
    """The ranks of a job, seen from one of them. `Ranks()` is a process alone."""

    rank: int = 0
    size: int = 1
    sharded: bool = False
    """Whether the weights of the base are split over the ranks, so that every forward pass needs
    all of them."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Name → object that every rank has its own copy of: policy, teacher, optimizer."""
    objects: Any = None
    """Process group for Python objects."""
    commands: Any = None
    """Process group for commands, without a time limit."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int | None = None
    """Thread that runs a command; functions it calls run on all ranks without another one."""
    _broken: bool = False
    _count: int = 0
    """Number of commands so far."""
    _loads: list[list[float]] = field(default_factory=list)

    # -- dividing ----------------------------------------------------------------------------------

    def share(self, packs: Sequence[T], cost: Callable[[T], float]) -> list[T | None]:
        """This rank's part of `packs`. In a sharded job, None stands for an empty forward pass,
        because every rank must take part in as many passes."""
        places, load = divide([cost(pack) for pack in packs], self.size)
        if self.size > 1 and packs:
            self._loads.append(load)
        part: list[T | None] = [packs[i] for i in places[self.rank]]
        most = max(map(len, places)) if self.sharded else 0
        return part + [None] * (most - len(part))

    def best_plan(
        self, plan: Callable[[int], list[T]], budget: int, cost: Callable[[T], float], kind: str
    ) -> list[T]:
        """Of the plans for `budget` tokens a pack, half of that, and so on, the one whose busiest
        rank has least to do. A plan for one process often has one pack, for one rank."""
        best = plan(budget)
        if self.size == 1:
            return best
        costs = [cost(pack) for pack in best]
        even, least = sum(costs) / self.size, max(divide(costs, self.size)[1])
        while least > EVEN * even and budget // 2 >= LEAST_TOKENS[kind]:
            budget //= 2
            packs = plan(budget)
            busiest = max(divide([cost(pack) for pack in packs], self.size)[1])
            if busiest < least:
                best, least = packs, busiest
        return best

    def imbalance(self) -> float | None:
        """Cost of the busiest rank / mean cost, over the passes since the last call; None without
        any, or alone."""
        loads, self._loads = self._loads, []
        total = sum(map(sum, loads))
        return self.size * sum(map(max, loads)) / total if total else None

    # -- exchanging --------------------------------------------------------------------------------

    def add_gradients(self, trained: Sequence[tuple[str, Any]]) -> None:
        """Replace every gradient by its sum over the ranks; those that no rank has stay None.
        FSDP has added up those of split weights."""
        trained = [(name, p) for name, p in trained if not is_split(p)]
        if self.size == 1 or not trained:
            return
        with _exchange():
            device = trained[0][1].device
            there = torch.tensor([p.grad is not None for _, p in trained], device=device)
            dist.all_reduce(there := there.int())
            summed = [p for (_, p), n in zip(trained, there.tolist(), strict=True) if n]
            for bucket in _buckets(summed):
                parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                flat = torch.cat([part.reshape(-1) for part in parts])
                dist.all_reduce(flat)
                for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                    if p.grad is None:
                        p.grad = torch.empty_like(p)
                    p.grad.copy_(part.view_as(p))

    def gather(self, part: T) -> list[T]:
        """`part` of every rank, by rank. Tensors in it must be on the CPU."""
        if self.size == 1:
            return [part]
        every: list[Any] = [None] * self.size
        with _exchange():
            dist.all_gather_object(every, part, group=self.objects)
        return every

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0, except pieces of split weights."""
        with _exchange():
            for tensor in tensors if self.size > 1 else ():
                if not is_split(tensor):
                    dist.broadcast(tensor.data, src=0)

    def same(self, what: str, value: str) -> None:
        """RankError if `value` is not the same on every rank."""
        values = self.gather(value)
        others = [rank for rank, one in enumerate(values) if one != values[0]]
        if others:
            raise RankError(
                f"{what} differ between rank 0 and rank {', '.join(map(str, others))}.",
                f"The hashes are {', '.join(dict.fromkeys(values))}.",
                "Use machines of one kind with the same software, and run the same command again; "
                "it resumes from the newest checkpoint.",
            )

    # -- commands ----------------------------------------------------------------------------------

    @property
    def in_command(self) -> bool:
        """Whether the calling thread runs a command."""
        return self._thread == threading.get_ident()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on all ranks; returns the result of this one."""
        with self._lock:
            self._thread = threading.get_ident()
            try:
                name = f"{function.__module__}:{function.__qualname__}"
                sent = tuple(map(self._packed, args)), {k: self._packed(v) for k, v in
                                                        kwargs.items()}  # fmt: skip
                self._tell((name, self._rates(), *sent))
                return function(*args, **kwargs)
            except BaseException:
                self._broken = True  # the others may wait for this rank
                raise
            finally:
                self._thread = None

    def follow(self) -> None:
        """Run the commands of rank 0 until it stops."""
        self._thread = threading.get_ident()
        while (command := self._tell(None)) is not None:
            name, rates, args, kwargs = command
            for group, rate in zip(self._groups(), rates, strict=True):
                group["lr"] = rate
            module, _, path = name.partition(":")
            function = reduce(getattr, path.split("."), importlib.import_module(module))
            named = {key: self._unpacked(value) for key, value in kwargs.items()}
            function(*map(self._unpacked, args), **named)  # type: ignore[operator]

    def cancel(self) -> None:
        """Tell the other ranks that the result of the running command is not needed any more."""
        self.commands.get_group_store().set(f"cancel {self._count}", "")

    def cancelled(self) -> bool:
        """Whether rank 0 has cancelled the running command."""
        return bool(self.commands.get_group_store().check([f"cancel {self._count}"]))

    def stop(self) -> None:
        """End the followers, unless a failed command may have left them waiting."""
        with self._lock:
            if self.size > 1 and not self._broken:
                self._tell(None)

    def _tell(self, command: Any) -> Any:
        """What rank 0 says."""
        box = [command]
        with _exchange():
            dist.broadcast_object_list(box, src=0, group=self.commands, device=torch.device("cpu"))
        self._count += 1
        return box[0]

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.shared.get("optimizer")
        return optimizer.param_groups if optimizer is not None else []

    def _rates(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def _packed(self, value: Any) -> Any:
        """`value` with names for shared objects, and with its tensors on the CPU."""
        names = {id(one): name for name, one in self.shared.items()}

        def packed(value: Any) -> Any:
            if id(value) in names:
                return _Shared(names[id(value)])
            if isinstance(value, TrainConfig):  # its class may be made for a package's method
                return _Settings(value.method, value.model_dump())
            return value.cpu() if isinstance(value, Tensor) else value

        return _changed(value, packed)

    def _unpacked(self, value: Any) -> Any:
        def unpacked(value: Any) -> Any:
            if isinstance(value, _Shared):
                return self.shared[value.name]
            if isinstance(value, _Settings):
                return settings_class(value.method).model_validate(value.values)
            policy = self.shared.get("policy")
            return value.to(policy.device) if isinstance(value, Tensor) and policy else value

        return _changed(value, unpacked)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to it and to the members of its mappings, tuples and
    dataclasses, but not of lists."""
    new = change(value)
    if new is not value:
        return new
    if type(value) is tuple:
        return tuple(_changed(one, change) for one in value)
    if isinstance(value, dict):
        return {key: _changed(one, change) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        old = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        news = {name: _changed(one, change) for name, one in old.items()}
        changes = {name: one for name, one in news.items() if one is not old[name]}
        return replace(value, **changes) if changes else value
    return value


def is_split(tensor: Any) -> bool:
    """Whether every rank has only a piece of `tensor` (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def divide(costs: Sequence[float], size: int) -> tuple[list[list[int]], list[float]]:
    """The indices for each rank and its load: the dearest first, each to the least loaded rank."""
    places: list[list[int]] = [[] for _ in range(size)]
    load = [0.0] * size
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(size), key=lambda r: (load[r], r))
        places[rank].append(index)
        load[rank] += costs[index]
    return [sorted(one) for one in places], load


def _buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Parts of at most BUCKET weights (or one larger tensor) and of one dtype."""
    bucket: list[Any] = []
    for p in parameters:
        other = bucket and bucket[0].dtype != p.dtype
        if bucket and (other or sum(b.numel() for b in bucket) + p.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(p)
    if bucket:
        yield bucket


@contextmanager
def _exchange() -> Iterator[None]:
    """RankLost for a failed exchange."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch has no narrower class for a lost connection
        raise RankLost(
            "Another rank of this training ended or does not answer.",
            f"torch reports: {str(error).strip().splitlines()[0][:200]}",
            "Its own error says why. The same command resumes from the newest checkpoint.",
        ) from error


# --- this process ---------------------------------------------------------------------------------

_world = Ranks()
_ALONE: ContextVar[Ranks | None] = ContextVar("alone", default=None)


def ranks() -> Ranks:
    """The ranks of this process's job."""
    return _ALONE.get() or _world


@contextmanager
def alone(*, unless_sharded: bool = False) -> Iterator[None]:
    """Context in which this process is alone, for a training within another one."""
    token = _ALONE.set(ranks() if unless_sharded and ranks().sharded else Ranks())
    try:
        yield
    finally:
        _ALONE.reset(token)


def on_all_ranks(function: Callable[P, T]) -> Callable[P, T]:
    """A function that all ranks run when rank 0 calls it. Functions marked like this may call each
    other. Shared objects are sent by name, everything else by value."""

    @wraps(function)
    def together(*args: P.args, **kwargs: P.kwargs) -> T:
        world = ranks()
        if world.size == 1 or world.in_command:
            return function(*args, **kwargs)
        return world.run(function, *args, **kwargs)

    return together


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return place_in_job()[1] > 1


def join() -> Ranks:
    """Join the job that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."""
    global _world
    if _world.size > 1 or not launched():
        return _world
    watched, gpus = start_watch(), torch.cuda.device_count()
    if gpus:  # a launcher may show each process only its own
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or 0) % gpus)
    if not dist.is_initialized():
        store, rank, size = next(
            dist.rendezvous("env://", timeout=UNLIMITED if watched.rank else LIMIT)
        )
        if rank == 0:
            store.set(FIRST, "")
        store.wait([FIRST], UNLIMITED)  # rank 0 may prepare for any time before it joins
        store.set_timeout(LIMIT)
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=LIMIT,
                                store=store, rank=rank, world_size=size)  # fmt: skip
    objects = dist.new_group(backend="gloo", timeout=LIMIT)
    commands = dist.new_group(backend="gloo", timeout=UNLIMITED)
    _world = Ranks(dist.get_rank(), dist.get_world_size(), objects=objects, commands=commands)
    watched.join_ranks()
    return _world


def leave() -> None:
    """End this rank's part in the job."""
    global _world
    if _world.size > 1:
        stop_watch()
        _world = Ranks()
        dist.destroy_process_group()
