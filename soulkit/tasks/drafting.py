"""Rows that one model drafts and another filters: what a task says about them.

Recorded conversations lack something that a row needs: what the person was after, or what other
people would have said in their place. A task whose declaration names `drafting: build:drafts` turns
a file of them into *sketches*. Of each the drafter is asked for what is missing, the filter whether
the whole is fit to be a row, and the rows are made of a draft that is kept. Who asks, in which
order and at what cost is the same for all tasks (`eval/building.py`). Its templates lie in
`prompts/drafting/`: no episode of a row renders them, so the check of a task does not look there.

    def drafts(path: Path, prompts: PromptFolder, *, per_person: int = 3) -> Drafts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from soulkit.data.files import BadRow
from soulkit.errors import ConfigError, UnreadableVerdict
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.tasks.base import Task
from soulkit.tasks.made import Row
from soulkit.text import words_only

S = TypeVar("S", bound=VerdictShape)
KEPT = "none"
"""The fault of a draft that has none."""


class Review(VerdictShape):
    """What a filter says; a task narrows `fault` to `none` and the faults that it asks about."""

    reasoning: str
    fault: str

    @property
    def keeps(self) -> bool:
        return self.fault == KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """One record that rows may be made of."""

    key: str
    """Names its calls; equal records have equal keys."""
    source: str
    """`file:line`."""
    draft: JudgeQuestion[Any]
    """What the drafter is asked."""
    review: Callable[[Any], JudgeQuestion[Any]]
    """What the filter is asked about a draft; its answer is a Review."""
    rows: Callable[[Any], Sequence[Row]]
    """The rows of a draft that was kept."""
    count: int = 1
    """How many they are."""
    published: bool = False
    """Whether the record is one of a published data set. Rows of any other say of which file they
    were made (`origin`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The sketches of a file, the records that can be none, and what the reader should know."""

    sketches: tuple[Sketch, ...]
    prompts: Mapping[str, str]
    """Template name → hash, for every template that is used."""
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


def drafts_of(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Drafts:
    """The sketches that `task` makes of a file; ConfigError for a task that drafts nothing.

    `options` are the task's own, as the command line gives them.
    """
    hook = task.spec.hook(task.name, "drafting")
    if hook is None:
        raise ConfigError(
            f"No model drafts rows of '{task.name}'.",
            "Its declaration names no function that says what is to be drafted ('drafting:').",
            "Tasks that have one say 'drafted by models' in: soul tasks show TASK",
        )
    drafts: Drafts = hook(path, task.prompts, options=options)
    return drafts


def drafted(
    prompt: str, shape: type[S], problem: Callable[[S], str] = lambda draft: ""
) -> JudgeQuestion[S]:
    """A question to the drafter. A draft of which `problem` says something is asked for once more,
    as one that cannot be read is."""
    asked_for = question("draft", prompt, shape, role="drafter")

    def read(text: str) -> S:
        draft = asked_for.read(text)
        if trouble := problem(draft):
            raise UnreadableVerdict(trouble)
        return draft

    return replace(asked_for, read=read)


def reviewed(prompt: str, shape: type[Review]) -> JudgeQuestion[Any]:
    """A question to the filter."""
    return question("filter", prompt, shape, role="filter")


def quotation(text: str, originals: Sequence[str], words: int) -> str:
    """The first run of `words` words of `text` that stands in one of `originals`; empty for none.

    Case and punctuation do not count. An original that is shorter counts whole, from half as many
    words on.
    """
    tokens = words_only(text.casefold()).split()
    for original in originals:
        other = words_only(original.casefold()).split()
        size = min(words, len(other))
        if 2 * size < words:
            continue
        runs = {tuple(other[i : i + size]) for i in range(len(other) - size + 1)}
        for i in range(len(tokens) - size + 1):
            if (run := tuple(tokens[i : i + size])) in runs:
                return " ".join(run)
    return ""
