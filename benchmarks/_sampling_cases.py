"""What every engine is asked in the benchmark of sampling, and how its answers are timed."""

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
"""Each is one token of the model that is made."""
DRAFTS = 8
"""Replies to one prompt, where prompts are shared."""


@dataclass(frozen=True)
class Case:
    """`replies` of `new` tokens each to prompts of `length` tokens; `at_once` of them at a time.

    `shared`: eight replies to each prompt, as eight drafts of one question; else one.
    """

    name: str
    length: int
    replies: int
    at_once: int
    new: int
    shared: bool = False

    def texts(self, number: int, words: int) -> list[str]:
        """One text of `words` words a reply. No other round has any of them: what an engine keeps
        of earlier prompts must not help it."""
        rng = random.Random(f"{self.name}/{number}")
        drafts = DRAFTS if self.shared else 1
        made: list[str] = []
        while len(made) < self.replies:
            made += [" ".join(rng.choices(WORDS, k=words))] * drafts
        return made[: self.replies]

    def waves(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """What is asked at once, in turn."""
        for start in range(0, len(texts), self.at_once):
            yield list(texts[start : start + self.at_once])


def cases(short: int, long: int, many: int, alone: int, new: int) -> list[Case]:
    """Short and long prompts, one and `many` at once, with and without shared prompts."""
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
"""The ids of the replies to texts that are asked at once."""


def timed(case: Case, number: int, overhead: int, sample: Sample, group: int | None = None) -> Json:
    """One round: seconds by both clocks and all ids. `overhead` are a prompt's tokens that are no
    words; `group` is a process group whose processor time counts as well."""
    texts = case.texts(number, case.length - overhead)
    start = {name: clock() for name, clock in CLOCKS.items()}
    start["cpu"] += group_seconds(group)
    ids = [reply for wave in case.waves(texts) for reply in sample(case, wave)]
    spent = {name: clock() - start[name] for name, clock in CLOCKS.items()}
    spent["cpu"] += group_seconds(group)
    wrong = {len(reply) for reply in ids} - {case.new}
    if wrong or len(ids) != case.replies:
        raise ValueError(f"{len(ids)} replies, some with {wrong} tokens: the work is not equal")
    return {"wall": spent["wall"], "cpu": spent["cpu"], "ids": ids}


async def replies(model: ChatModel, case: Case, texts: Sequence[str]) -> list[list[int]]:
    """The ids of greedy replies, asked for at once and as an episode asks."""
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
    """The folders in /proc of the living processes of a group; none for None."""
    if group is None:
        return []
    return [p for p in Path("/proc").iterdir() if p.name.isdigit() and _fields(p)[2:3] == [group]]


def group_seconds(group: int | None) -> float:
    """Processor time of a group, its children that have ended included."""
    ticks = sum(sum(_fields(p)[11:15]) for p in processes(group))
    return ticks / os.sysconf("SC_CLK_TCK")


def group_peak(group: int | None) -> int:
    """Bytes: the sum of each process's highest resident set, so shared pages count in each."""
    return sum(_status(p, "VmHWM") for p in processes(group))


def forget_group_peak(group: int | None) -> None:
    """Start new peaks at what is resident now."""
    for process in processes(group):
        (process / "clear_refs").write_text("5")


def _fields(process: Path) -> list[int]:
    """/proc/PID/stat from the state on, which becomes 0; empty for a process that has gone."""
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
