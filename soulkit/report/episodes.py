"""Episodes for human eyes: which ones to show, and what of them.

A draft and the refined episode that its feedback led to are one unit, shown side by side. A report
holds at most `CAP` units, taken in turn from every run and task in the order of a hash of their
keys: the same run always shows the same episodes, and nobody has picked them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from soulkit.metrics.intervals import number
from soulkit.report.load import RunData
from soulkit.report.progress import EPISODES
from soulkit.runs.packing import has_lines
from soulkit.runs.records import SAMPLED, SAMPLES, load_records, stream_records
from soulkit.text import one_line, sanitise
from soulkit.types import Feedback, Record

CAP = 200
TEXT_LIMIT = 6000
"""Characters of one text; what is longer ends with a note of how much is left out."""


class Played(Protocol):
    """One play of an example: a record, or what stands for one."""

    @property
    def task(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def example_id(self) -> str: ...
    @property
    def rollout(self) -> int: ...
    @property
    def kind(self) -> str: ...


_T = TypeVar("_T")
_P = TypeVar("_P", bound=Played)
TakeOutcome = Literal["right", "partial", "wrong", "unscored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """One play of an example, ready to print. All texts are sanitised, none is escaped."""

    text: str
    reasoning: str
    score: str
    outcome: TakeOutcome
    status: str
    words: str
    failure: str
    metrics: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """A draft with its feedback and refined twin, or a single episode."""

    run: str
    task: str
    example_id: str
    step: int
    rollout: int
    kind: str
    prompt: str
    gold: str
    gold_label: str
    tags: tuple[tuple[str, str], ...]
    draft: Take
    feedback: str
    feedback_note: str
    refined: Take | None
    improved: bool


def choose(runs: Sequence[RunData], cap: int = CAP) -> tuple[list[ShownEpisode], int]:
    """(the units to show, the number there are), shown in the order of run, task, step, example."""
    groups: dict[tuple[int, str], list[tuple[Record, Record | None]]] = {}
    for index, run in enumerate(runs):
        for pair in with_twins(_readable(run)):
            groups.setdefault((index, pair[0].task), []).append(pair)
    for pairs in groups.values():
        pairs.sort(key=lambda pair: hashlib.sha256(pair[0].key.encode("utf-8", "replace")).digest())
    tagged = [[(index, *pair) for pair in pairs] for (index, _), pairs in sorted(groups.items())]
    picked = list(_in_turn(tagged))[:cap]
    picked.sort(key=lambda p: (p[0], p[1].task, p[1].step, p[1].example_id, p[1].rollout))
    whole = _read_again(runs, picked)
    units = [
        _unit(
            runs[index].name,
            whole.get((index, draft.key), draft),
            refined and whole.get((index, refined.key), refined),
        )
        for index, draft, refined in picked
    ]
    return units, sum(map(len, groups.values()))


def _file(run: RunData) -> Path:
    """Where the episodes of a run stand: those that were played, else how held-out conversations
    were continued."""
    played, samples = run.path / EPISODES, run.path / SAMPLES
    return samples if not run.records and samples.is_file() else played


def _readable(run: RunData) -> Sequence[Record]:
    file = _file(run)
    return load_records(file) if file.name == SAMPLES else run.records


def _read_again(
    runs: Sequence[RunData], picked: Sequence[tuple[int, Record, Record | None]]
) -> dict[tuple[int, str], Record]:
    """The episodes that are shown, by run and key, with what light ones leave out."""
    keys: dict[int, set[str]] = {}
    for index, draft, refined in picked:
        keys.setdefault(index, set()).update(one.key for one in (draft, refined) if one)
    return {
        (index, record.key): record
        for index, names in keys.items()
        if has_lines(file := _file(runs[index]))
        for record in stream_records(file, keys=names)
    }


def _in_turn(groups: Iterable[Sequence[_T]]) -> Iterator[_T]:
    for row in zip_longest(*groups):
        yield from (item for item in row if item is not None)


def with_twins(records: Iterable[_P]) -> list[tuple[_P, _P | None]]:
    """Every draft with its refined twin; a refined episode without its draft stands alone."""
    slots: dict[tuple[str, int, str, int], dict[str, _P]] = {}
    for r in records:
        slots.setdefault((r.task, r.step, r.example_id, r.rollout), {})[r.kind] = r
    pairs: list[tuple[_P, _P | None]] = []
    for kinds in slots.values():
        twin = kinds.pop("refined", None)
        if "draft" in kinds:
            pairs.append((kinds.pop("draft"), twin))
        elif twin is not None:
            pairs.append((twin, None))
        pairs += [(other, None) for other in kinds.values()]
    return pairs


def _unit(run: str, draft: Record, refined: Record | None) -> ShownEpisode:
    feedback = draft.received or draft.given or (refined.given if refined else None)
    before, after = draft.score.value, refined.score.value if refined else None
    return ShownEpisode(
        run=run,
        task=one_line(draft.task),
        example_id=one_line(draft.example_id),
        step=draft.step,
        rollout=draft.rollout,
        kind=draft.kind,
        prompt=clean(draft.prompt),
        gold=clean(draft.gold),
        gold_label="The person wrote" if draft.score.reason == SAMPLED else "Gold answer",
        tags=tuple((one_line(k), one_line(str(v))) for k, v in draft.tags.items()),
        draft=_take(draft),
        feedback=clean(feedback.text) if feedback else "",
        feedback_note=_feedback_note(feedback),
        refined=_take(refined) if refined else None,
        improved=before is not None and after is not None and after > before,
    )


def _feedback_note(feedback: Feedback | None) -> str:
    if feedback is None:
        return ""
    kind = feedback.kind.replace("_", " ")
    leak = f", leaks ({feedback.leak})" if feedback.leak else ""
    return one_line(f"{kind} by {feedback.author}{leak}")


def _take(record: Record) -> Take:
    score, failure = record.score, record.episode.failure
    final = record.episode.final
    return Take(
        text=clean(_spoken(record)),
        reasoning=clean(final.reasoning) if final else "",
        score=number(score.value),
        outcome=outcome(score.value),
        status=one_line(f"{score.status}: {score.reason}" if score.reason else score.status),
        words=clean(score.words),
        failure=clean(failure.detail) if failure and failure.detail != score.words else "",
        metrics=tuple((one_line(k), number(v)) for k, v in score.metrics.items()),
    )


def _spoken(record: Record) -> str:
    """The dialogue when there was one, otherwise the answer."""
    lines = record.episode.transcript
    if len(lines) > 1:
        return "\n\n".join(f"{line.seat}: {line.text}" for line in lines)
    final = record.episode.final
    if final is not None:
        return final.text
    return lines[0].text if lines else ""


def outcome(value: float | None) -> TakeOutcome:
    """`right` is a full score of 1 (or more), `wrong` is 0 (or less), `partial` lies between."""
    if value is None:
        return "unscored"
    return "right" if value >= 1 else "wrong" if value <= 0 else "partial"


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` without control characters, cut at `limit` characters with a note of the rest."""
    safe = sanitise(text).strip()
    if len(safe) <= limit:
        return safe
    return f"{safe[:limit]}\n… {len(safe) - limit:,} more characters in episodes.jsonl"
