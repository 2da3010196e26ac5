"""The prompts of the sampling benchmark and the timing of replies, the same for every engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _processes import CLOCKS, Json

from soulkit.models.base import ChatModel
from soulkit.types import Call, Sampling, Segment

WORDS = ["".join(letters) for letters in itertools.product("abcdefghijklmnop", repeat=3)][:3500]
"""Each word is one token of the benchmark's model."""
DRAFTS = 8
"""Replies per prompt if prompts are shared."""


@dataclass(frozen=True)
class Case:
    """`replies` replies of `new` tokens to prompts of `length` tokens, `at_once` at a time.

    `shared`: eight replies per prompt, like eight drafts of one question; otherwise one.
    """

    name: str
    length: int
    replies: int
    at_once: int
    new: int
    shared: bool = False

    def texts(self, number: int, words: int) -> list[str]:
        """One text of `words` words per reply. Every round has new texts, so that an engine's cache
        of earlier prompts does not help it."""
        rng = random.Random(f"{self.name}/{number}")
        drafts = DRAFTS if self.shared else 1
        made: list[str] = []
        while len(made) < self.replies:
            made += [" ".join(rng.choices(WORDS, k=words))] * drafts
        return made[: self.replies]

    def waves(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """The texts in batches that are sent at once."""
        for start in range(0, len(texts), self.at_once):
            yield list(texts[start : start + self.at_once])


def cases(short: int, long: int, many: int, alone: int, new: int) -> list[Case]:
    """Short and long prompts, one or `many` at once, with and without shared prompts."""
    made = []
    for length in (short, long):
        made += [
            Case(f"{length} tokens, 1 at a time", length, alone, 1, new),
            Case(f"{length} tokens, {many} at once", length, many, many, new),
            Case(f"{length} tokens, {many} at once, {DRAFTS} a prompt", length, many, many, new,
                 shared=True),
        ]  # fmt: skip
    return made


Sample = Callable[[Case, list[str]], list[list[int]]]
"""Samples replies to texts that are sent at once; returns their ids."""


def timed(case: Case, number: int, overhead: int, sample: Sample, group: int | None = None) -> Json:
    """One round: seconds by both clocks, and all ids. `overhead`: tokens in a prompt that are not
    words; the processor time of the process group `group` counts as well."""
    texts = case.texts(number, case.length - overhead)
    start = {name: clock() for name, clock in CLOCKS.items()}
    start["cpu"] += group_seconds(group)
    ids = [reply for wave in case.waves(texts) for reply in sample(case, wave)]
    spent = {name: clock() - start[name] for name, clock in CLOCKS.items()}
    spent["cpu"] += group_seconds(group)
    wrong = {len(reply) for reply in ids} - {case.new}
    if wrong or len(ids) != case.replies:
        raise ValueError(
            f"{len(ids)} replies, some with {wrong} tokens: engines must do equal work"
        )
    return {"wall": spent["wall"], "cpu": spent["cpu"], "ids": ids}


async def replies(model: ChatModel, case: Case, texts: Sequence[str]) -> list[list[int]]:
    """The ids of greedy replies, requested at once in the way that an episode does."""
    sampling = Sampling(max_tokens=case.new, temperature=0.0)
    calls = [Call(role="actor", example_id="x", rollout=number) for number in range(len(texts))]
    waits = [
        model.complete((Segment("user", text),), sampling, call)
        for text, call in zip(texts, calls, strict=True)
    ]
    return [list(reply.token_ids) for reply in await asyncio.gather(*waits)]


def as_json(case: Case) -> Json:
    return asdict(case)


# --- process groups -------------------------------------------------------------------------------


def processes(group: int | None) -> list[Path]:
    """The /proc folders of the running processes of a group; empty for None."""
    if group is None:
        return []
    return [p for p in Path("/proc").iterdir() if p.name.isdigit() and _fields(p)[2:3] == [group]]


def group_seconds(group: int | None) -> float:
    """Processor time of a group, including finished children."""
    ticks = sum(sum(_fields(p)[11:15]) for p in processes(group))
    return ticks / os.sysconf("SC_CLK_TCK")


def group_peak(group: int | None) -> int:
    """Sum of the peak resident sets of all processes in bytes; shared pages count several times."""
    return sum(_status(p, "VmHWM") for p in processes(group))


def forget_group_peak(group: int | None) -> None:
    """Reset the peaks to the memory that is resident now."""
    for process in processes(group):
        (process / "clear_refs").write_text("5")


def _fields(process: Path) -> list[int]:
    """/proc/PID/stat from the state on (replaced by 0); empty if the process has ended."""
    try:
        text = (process / "stat").read_text()
    except OSError:
        return []
    return [0, *map(int, text.rpartition(")")[2].split()[1:])]


def _status(process: Path, name: str) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(n.split()[1]) * 1024 for n in lines if n.startswith(f"{name}:")), 0)
