"""Make rows: generated from a seed, with invented people, or drafted by models.

Generated (`synth: rows:rows`): row i depends only on the seed, so a smaller set is a prefix of a
larger one. Invented people have a writing style (`Voice`): `write` does what `trait` describes.

    HASTY.write("Could you please show me the next step, because I am stuck.")
    → "could u pls show me the next step, bc i am stuck"

Drafted (`drafting: build:drafts`): a task turns recorded conversations into *sketches*. One model
drafts the missing parts, another decides whether to keep each draft (`eval/drafted_rows.py`).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from soulkit.data.files import BadRow, RawRow
from soulkit.errors import ConfigError, UnreadableVerdict
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.tasks.kit.base import Task
from soulkit.text import one_line, words_only

Feature = tuple[str, str, str]
"""Name, question and answer of one feature of style."""

FIRST_NAMES = (
    "Agnes", "Baltasar", "Corin", "Delia", "Elio", "Freya", "Gustav", "Henrike", "Imre", "Jolanda",
    "Kaspar", "Leonie", "Matteo", "Noor", "Orla", "Piotr", "Rhea", "Samir", "Thekla", "Urban",
)  # fmt: skip
FAMILY_NAMES = (
    "Abend", "Brook", "Castell", "Dunne", "Engel", "Ferro", "Grath", "Holm", "Ivers", "Jansky",
    "Klee", "Lund", "Moravec", "Nagy", "Oort", "Pell", "Quist", "Rask", "Stern", "Tamm",
)  # fmt: skip
"""Enough names that rows of two seeds rarely share a person."""

_SHORT = {"you": "u", "your": "ur", "please": "pls", "because": "bc", "thanks": "thx"}


@dataclass(frozen=True, slots=True)
class Voice:
    """One writing style."""

    trait: str
    """Its description, as the end of the sentence `This person ...`."""
    write: Callable[[str], str]
    """Rewrites a plain message (whole sentences, full stops) in this style."""
    features: tuple[Feature, ...]


def _lower(text: str) -> str:
    return text.lower().rstrip(".")


def _hasty(text: str) -> str:
    return re.sub(r"\w+", lambda word: _SHORT.get(word[0], word[0]), _lower(text))


def _loud(text: str) -> str:
    return re.sub(r"\.(?=\s|$)", "!", text)


def _trailing(text: str) -> str:
    return re.sub(r"\.(?=\s|$)", "...", text)


CAPITALS = "Does the user write capitals where they belong?"
STOPS = "How does the user end sentences?"
SHORT_FORMS = "Does the user take short forms and slang?"

_PLAIN = Voice(
    "writes whole sentences with capitals and full stops",
    lambda text: text,
    (
        ("Capitalization Patterns", CAPITALS, "Yes, at every beginning of a sentence."),
        ("Punctuation Usage", STOPS, "With full stops and question marks."),
    ),
)
LOWER = Voice(
    "writes in small letters and leaves out the last full stop",
    _lower,
    (
        ("Capitalization Patterns", CAPITALS, "No, everything is in small letters."),
        ("Punctuation Usage", STOPS, "The last sentence has no full stop."),
    ),
)
HASTY = Voice(
    "writes in a hurry, in small letters and with short forms such as u, pls and thx",
    _hasty,
    (
        ("Capitalization Patterns", CAPITALS, "No, everything is in small letters."),
        ("Use of Slang, Contractions, or Emojis", SHORT_FORMS, "Yes, such as u, pls and thx."),
    ),
)
LOUD = Voice(
    "ends nearly every sentence with an exclamation mark",
    _loud,
    (("Punctuation Usage", STOPS, "With exclamation marks instead of full stops."),),
)
TRAILING = Voice(
    "lets sentences trail off in three dots",
    _trailing,
    (("Punctuation Usage", STOPS, "With three dots instead of a full stop."),),
)
VOICES = (_PLAIN, LOWER, HASTY, LOUD, TRAILING)


Row = dict[str, Any]
Split = Literal["train", "test"]

Numbers = tuple[dict[str, Any], tuple[Any, ...]]
"""The values that fill the text of a generated problem, and its results."""


def rows_by_index(
    key: str, make: Callable[[random.Random, int], Row]
) -> Callable[[int, int], list[Row]]:
    """A task's `rows(n, seed)`: row i depends only on (seed, i)."""

    def rows(n: int, seed: int) -> list[Row]:
        return [make(random.Random(f"{key}/{seed}/{i}"), i) for i in range(n)]

    return rows


MADE = "synth:"
"""Prefix of `synth:N`, which replaces a file name."""
_WHOLE = re.compile(r"-?\d+")
DEFAULT_ROWS, MOST_MADE = 100, 1_000_000


def make_rows(
    task: Task, n: int | None, seed: int, options: Mapping[str, str] | None = None
) -> list[Row]:
    """The first `n` generated rows of a task; ConfigError if the task cannot generate rows.

    `options` are the task's own options, as typed on the command line.
    """
    maker = task.spec.hook(task.name, "synth")
    if maker is None:
        raise ConfigError(
            f"'{task.name}' cannot generate rows.",
            "Its declaration names no function for it ('synth:').",
            "For tasks that can, look for 'synth' in the column rows of: soul tasks list",
        )
    if n is not None and not 1 <= n <= MOST_MADE:
        raise ConfigError(
            f"The number of rows cannot be {n}.",
            f"From 1 to {MOST_MADE:,} rows can be generated.",
            "Give a number in this range.",
        )
    if n is None and not maker.has_default("n"):
        n = DEFAULT_ROWS
    count = {} if n is None else {"n": n}
    made = [*maker.made(Iterable, **count, seed=seed, options=options)]  # type: ignore[type-abstract]
    try:
        rows = [dict(row) for row in made]
        for row in rows:
            json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise maker.wrong(f"A row cannot be written: {one_line(str(error), 80)}.") from error
    return rows


def split_seed(seed: int, split: Split) -> int:
    """Even seeds for training rows and odd ones for test rows, so that they never overlap."""
    return 2 * seed + (split == "test")


def made_rows(task: Task, source: str, seed: int, split: Split) -> list[RawRow]:
    """The rows of `synth:N` (from `seed`) or `synth:N@SEED`; ConfigError for any other text."""
    number, at, own_seed = source.removeprefix(MADE).partition("@")
    if not number.isdecimal() or not int(number) or (at and not _WHOLE.fullmatch(own_seed)):
        raise ConfigError(
            f"'{source}' does not say how many rows to generate.",
            f"Generated rows are written as {MADE}N.",
            f"For example: --data {task.name}={MADE}2000",
        )
    rows = make_rows(task, int(number), split_seed(int(own_seed) if at else seed, split))
    return [RawRow(row, f"{source}:{i}") for i, row in enumerate(rows, 1)]


S = TypeVar("S", bound=VerdictShape)
NO_FAULT = "none"


class Review(VerdictShape):
    """What a filter says; a task narrows `fault` to `none` and the faults that it asks about."""

    reasoning: str
    fault: str

    @property
    def keeps(self) -> bool:
        return self.fault == NO_FAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A record from which a model can draft rows."""

    key: str
    """Identifies its calls; equal records have equal keys."""
    source: str
    draft: JudgeQuestion[Any]
    review: Callable[[Any], JudgeQuestion[Any]]
    """The filter's question about a draft; the answer is a Review."""
    rows: Callable[[Any], Sequence[Row]]
    private: Callable[[Any], str] = lambda draft: ""
    """Why a draft says who somebody is and is rejected without the filter; empty if it does not."""
    count: int = 1
    published: bool = False
    """Whether the record comes from a published data set. Rows of all other records name their file
    (`origin`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The sketches made from a file, the unusable records, and notes for the user."""

    sketches: tuple[Sketch, ...]
    prompts: Mapping[str, str]
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


def drafts_from(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Drafts:
    """The sketches that `task` makes from a file; ConfigError if models cannot draft its rows.

    `options` are the task's own options, as typed on the command line.
    """
    hook = task.spec.hook(task.name, "drafting")
    if hook is None:
        raise ConfigError(
            f"Models cannot draft rows of '{task.name}'.",
            "Its declaration names no function for it ('drafting:').",
            "Tasks that support it say 'drafted by models' in: soul tasks show TASK",
        )
    return hook.made(Drafts, path, task.prompts, options=options)


def draft_question(
    prompt: str, shape: type[S], problem: Callable[[S], str] = lambda draft: ""
) -> JudgeQuestion[S]:
    """A question to the drafter; asked again if the draft is unreadable or has a `problem`."""
    asked_for = question("draft", prompt, shape, role="drafter")

    def read(text: str) -> S:
        draft = asked_for.read(text)
        if trouble := problem(draft):
            raise UnreadableVerdict(trouble)
        return draft

    return replace(asked_for, read=read)


def review_question(prompt: str, shape: type[Review]) -> JudgeQuestion[Any]:
    """A question to the filter."""
    return question("filter", prompt, shape, role="filter")


def draft_problem(
    what: str, text: str, lengths: range, originals: Sequence[str], most_shared: int
) -> str:
    """The message to the drafter if a description of a person has the wrong length or repeats
    `most_shared` consecutive words from `originals`; empty if it is fine."""
    count = len(text.split())
    if count not in lengths:
        return f"the {what} has {count} words, not {lengths.start} to {lengths.stop - 1}"
    echo = quotation(text, originals, most_shared)
    return f"the {what} repeats the person's own words: “{echo}”" if echo else ""


def quotation(text: str, originals: Sequence[str], words: int) -> str:
    """The first `words` consecutive words of `text` that also occur in one of `originals`; else
    empty.

    Case and punctuation are ignored. A shorter original of at least half that length counts if all
    of it occurs in `text`.
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


# -- slots of a template ---------------------------------------------------------------------------


def draw_slots(rng: random.Random, declared: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a template's slots, drawn in the order of the text table.

    [cello, loom]                  one of them
    {sample: 2, of: [a, b, c]}     several different ones
    {from: 20, to: 90, times: 10}  a number from 200 to 890
    {share: 0.85, of: price}       a share of another slot, rounded; not random
    """
    values: dict[str, Any] = {}
    for name, how in declared.items():
        if not isinstance(how, Mapping):
            values[name] = rng.choice(how)
        elif "sample" in how:
            values[name] = rng.sample(how["of"], how["sample"])
        elif "share" in how:
            values[name] = round(values[how["of"]] * how["share"])
        else:
            values[name] = rng.randrange(how["from"], how["to"]) * how.get("times", 1)
    return values
