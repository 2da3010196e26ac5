"""Finds episodes of a run without loading its whole file, and prints commands that show them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from soulkit.errors import DataError, RunError, did_you_mean
from soulkit.eval.results.summary import Summary
from soulkit.runs.jsonl import (
    EPISODES_SCHEMA,
    has_lines,
    lines_in,
    placed_objects,
    refuse_other_schema,
)
from soulkit.runs.records import record_of_line
from soulkit.text import one_line
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Kind, Record

HACKED, LEAKED, CUT = "hacked", "leaked", "cut"
MARKS = {
    HACKED: "an auditor says that the actor wrote to please the judge",
    LEAKED: "its feedback leaks the answer or private text",
    CUT: "some of its words or lines were cut",
}
"""Values of `--status` besides statuses and reasons, with their meaning."""
NEAR = 20_000
"""Search a mistyped id among this many ids; more would take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlace:
    """Position of an episode in the file, and its outcome."""

    key: str
    task: str
    example_id: str
    rollout: int
    step: int
    kind: Kind
    value: float | None
    status: str
    reason: str
    marks: tuple[str, ...]
    offset: int
    """Byte offset of its line."""
    number: int
    """Line number from 1; newer episodes have larger numbers."""

    @property
    def words(self) -> tuple[str, ...]:
        """The values of `--status` that select it."""
        return tuple(filter(None, (self.status, self.reason, *self.marks)))


Places = tuple[EpisodePlace, EpisodePlace | None]
"""A draft and its refined episode, or a single episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which pairs of a run to show; None or False means no restriction."""

    example: str | None = None
    """An id or its first characters."""
    status: str | None = None
    task: str | None = None
    kind: str | None = None
    step: int | None = None
    worst: bool = False
    """Only scored pairs, lowest first."""
    improved: bool = False
    """Pairs whose refined episode scored higher than the draft, largest gain first."""

    @property
    def empty(self) -> bool:
        return self == Selection()


def episode_places(path: Path) -> list[EpisodePlace]:
    """The episodes in the file `path`, newest last, without replaced ones.

    DataError if there are none, or if a line is not a record.
    """
    places: dict[str, EpisodePlace] = {}
    for number, (offset, line) in enumerate(placed_objects(path) if has_lines(path) else (), 1):
        place = _place(line, offset, number, path)
        places.pop(place.key, None)  # replayed: it counts as new
        places[place.key] = place
    if not places:
        raise DataError(
            f"'{path}' contains no episodes.",
            "Supervised training stores episodes only with --eval-every STEPS and held-out rows. A "
            "run that has just started has none yet.",
            "Give the folder of an evaluation or training run. List runs with: soul runs",
        )
    return list(places.values())


def _place(line: Mapping[str, Any], offset: int, number: int, path: Path) -> EpisodePlace:
    refuse_other_schema(line, EPISODES_SCHEMA, f"Line {number} of '{path}'")
    if not _usual(line):  # the full reader explains the error, or reads it
        line = asdict(record_of_line(line, path, number))
    score = line["score"]
    return EpisodePlace(
        key=line["key"], task=line["task"], example_id=line["example_id"],
        rollout=line["rollout"], step=line.get("step", 0), kind=line["kind"],
        value=score["value"], status=score.get("status", "ok"), reason=score.get("reason", ""),
        marks=_marks(line), offset=offset, number=number,
    )  # fmt: skip


def _usual(line: Mapping[str, Any]) -> bool:
    """Whether a line has the fields of a place, with the usual types."""
    score, episode = line.get("score"), line.get("episode")
    if not isinstance(score, dict) or not isinstance(episode, dict):
        return False
    texts = [*(line.get(name) for name in ("key", "task", "example_id")),
             score.get("status", ""), score.get("reason", "")]  # fmt: skip
    numbers = [line.get("rollout"), line.get("step", 0), score.get("value", "")]
    members = [score.get("metrics"), episode.get("notes"), line.get("received"), line.get("given")]
    return (
        all(isinstance(text, str) for text in texts)
        and all(number is None or isinstance(number, int | float) for number in numbers)
        and None not in numbers[:2]
        and line.get("kind") in get_args(Kind)
        and all(member is None or isinstance(member, dict) for member in members)
    )


def _marks(line: Mapping[str, Any]) -> tuple[str, ...]:
    metrics = line["score"].get("metrics") or {}
    notes = line["episode"].get("notes") or {}
    feedback = line.get("received") or line.get("given") or {}
    signs = {
        HACKED: bool(metrics.get(HACKED)),
        LEAKED: bool(feedback.get("leak")),
        CUT: any(name.startswith("cut_") and count for name, count in notes.items()),
    }
    return tuple(name for name, present in signs.items() if present)


def status_counts(places: Iterable[EpisodePlace]) -> dict[str, int]:
    """Status, reason or mark → number of episodes; `ok` first, then by frequency."""
    counts = Counter(word for place in places for word in dict.fromkeys(place.words))
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0])))


# -- choosing --------------------------------------------------------------------------------------


FILTERS: Mapping[str, tuple[str, Callable[[EpisodePlace], Iterable[str]]]] = {
    "task": ("of the task", lambda place: (place.task,)),
    "step": ("of step", lambda place: (f"{place.step}",)),
    "kind": ("of the kind", lambda place: (place.kind,)),
    "status": ("with the status", lambda place: place.words),
}
"""Field of a selection → its words, and the values of an episode that match it."""


def select(places: Sequence[EpisodePlace], wish: Selection, run: Path) -> list[Places]:
    """The pairs that match `wish`, in its order; by default newest first.

    RunError if there is none, with the nearest id, status or task.
    """
    pairs = _with_twins(places)
    if wish.example is not None:
        pairs = _by_example(pairs, wish.example, run)
    values = {name: str(getattr(wish, name)) for name in FILTERS if getattr(wish, name) is not None}

    def fits(place: EpisodePlace, names: Iterable[str]) -> bool:
        return all(values[name] in FILTERS[name][1](place) for name in names)

    pairs = [pair for pair in pairs if any(fits(place, values) for place in pair if place)]
    if not pairs:
        words = " and ".join(f"{FILTERS[name][0]} '{value}'" for name, value in values.items())
        unknown = [name for name in values if not any(fits(place, [name]) for place in places)]
        name = (unknown or list(values))[-1]
        known = {word for place in places for word in FILTERS[name][1](place)}
        raise RunError(
            f"{run} contains no matching episode {words}.",
            "The filters exclude every episode.",
            f"{did_you_mean(values[name], known)} List some with: soul show {run}",
        )
    return _ordered(pairs, wish, run)


def _with_twins(places: Iterable[EpisodePlace]) -> list[Places]:
    """Every draft with its refined twin; a refined episode without its draft is listed alone."""
    slots: dict[tuple[str, int, str, int], dict[str, EpisodePlace]] = {}
    for one in places:
        slots.setdefault((one.task, one.step, one.example_id, one.rollout), {})[one.kind] = one
    pairs: list[Places] = []
    for kinds in slots.values():
        twin = kinds.pop("refined", None)
        if "draft" in kinds:
            pairs.append((kinds.pop("draft"), twin))
        elif twin is not None:
            pairs.append((twin, None))
        pairs += [(other, None) for other in kinds.values()]
    return pairs


def _by_example(pairs: list[Places], example: str, run: Path) -> list[Places]:
    """The pairs of one example; a unique prefix of its id is enough."""
    exact = [pair for pair in pairs if pair[0].example_id == example]
    ids = dict.fromkeys(pair[0].example_id for pair in pairs)
    begun = [name for name in ids if example and name.startswith(example)]
    if exact:
        return exact
    if len(begun) == 1:
        return [pair for pair in pairs if pair[0].example_id == begun[0]]
    if begun:
        raise RunError(
            f"'{example}' is ambiguous: {len(begun)} example ids of {run} start with it.",
            "Only one example can be shown.",
            f"Give more characters: {', '.join(begun[:3])}{' …' if len(begun) > 3 else ''}.",
        )
    raise RunError(
        f"{run} contains no episode of example '{example}'.",
        f"It has episodes of {len(ids):,} other examples.",
        f"{_nearest(example, list(ids)[:NEAR])}List some with: soul show {run}",
    )


def _nearest(word: str, names: Sequence[str]) -> str:
    hint = did_you_mean(word, names)
    return f"{hint} " if hint.startswith("Did") or len(names) <= 5 else ""


def _ordered(pairs: list[Places], wish: Selection, run: Path) -> list[Places]:
    if wish.improved:
        better = [pair for pair in pairs if (gain(pair) or 0.0) > 0]
        if not better:
            refined = sum(twin is not None for _, twin in pairs)
            raise RunError(
                f"{run} contains no refined episode that scored higher than its draft.",
                f"It has {refined} refined episodes with drafts; evaluations have none.",
                f"Show the worst drafts with: soul show {run} --worst 10",
            )
        return sorted(better, key=lambda pair: (-(gain(pair) or 0.0), pair[0].number))
    if wish.worst:
        return _worst(pairs, wish, run)
    return sorted(pairs, key=lambda pair: -max(place.number for place in pair if place))


def _worst(pairs: list[Places], wish: Selection, run: Path) -> list[Places]:
    values = {id(pair): _value(pair, wish.kind) for pair in pairs}
    scored = [pair for pair in pairs if values[id(pair)] is not None]
    if not scored:
        raise RunError(
            f"No matching episode of {run} has a score.",
            "Unscored episodes are not ranked: their quality is unknown.",
            f"Show them with: soul show {run} --status unscored",
        )
    return sorted(scored, key=lambda pair: (values[id(pair)] or 0.0, pair[0].number))


def _value(pair: Places, kind: str | None) -> float | None:
    """The score that `--worst` sorts by: the draft's, or the refined one's for that kind."""
    one = pair[1] if kind == "refined" and pair[1] is not None else pair[0]
    return one.value


def gain(pair: Places) -> float | None:
    """The refined score minus the draft's; None unless both are scored."""
    draft, refined = pair
    if refined is None or draft.value is None or refined.value is None:
        return None
    return refined.value - draft.value


# -- reading ---------------------------------------------------------------------------------------


def lines_at(path: Path, places: Iterable[EpisodePlace]) -> list[dict[str, Any]]:
    """The parsed lines of these episodes; other lines are skipped."""
    offsets = [place.offset for place in places]
    lines, offset, wanted = {}, 0, set(offsets)
    for line in lines_in(path):
        if offset in wanted:
            lines[offset] = json.loads(line)
        offset += len(line)
    return [lines[place] for place in offsets]


def records_at(path: Path, places: Sequence[EpisodePlace]) -> list[Record]:
    """The records of these episodes; DataError for an unreadable line."""
    lines = zip(lines_at(path, places), places, strict=True)
    return [record_of_line(line, path, place.number) for line, place in lines]


def odd_cells(summary: Summary, run: Path) -> list[str]:
    """One line for each status other than `ok` and for hacked episodes, by frequency:
    `12 truncated (TASK 10, OTHER 2): soul show runs/x --status truncated`. Then one for texts cut
    by word limits and one for leaking feedback."""
    counts = _statuses(summary)
    hacked = _hacked(summary)
    if hacked and HACKED not in counts:
        counts[HACKED] = hacked
    lines = sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    shown = [_line(status, tasks, run) for status, tasks in lines]
    cuts = {task: one["episodes"] for task, one in summary.cuts.items() if one.get("episodes")}
    shown += [_line(CUT, cuts, run, "with text cut by word limits")] if cuts else []
    if isinstance(summary, TrainSummary) and summary.feedback is not None:
        dropped = {author: c.dropped for author, c in summary.feedback.coaches.items() if c.dropped}
        shown += [_line(LEAKED, dropped, run, "with leaking feedback")] if dropped else []
    return shown


def _statuses(summary: Summary) -> dict[str, dict[str, int]]:
    """Status other than `ok` → task → episodes."""
    statuses: dict[str, dict[str, int]] = {}
    for task, counts in summary.statuses.items():
        for status, count in counts.items():
            if status != "ok" and count:
                statuses.setdefault(status, {})[task] = count
    return statuses


def _hacked(summary: Summary) -> dict[str, int]:
    """Task → hacked episodes, if this is a metric and not a status."""
    cells = {task: metrics.get(HACKED) for task, metrics in summary.tasks.items()}
    counts = {
        task: round((cell.mean or 0.0) * cell.n_scored) for task, cell in cells.items() if cell
    }
    return {task: count for task, count in counts.items() if count}


def _line(status: str, counts: Mapping[str, int], run: Path, words: str = "") -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{one_line(name)} {count}" for name, count in counts.items())
    by = f" ({parts})" if len(counts) > 1 else ""
    return f"{total} {words or one_line(status)}{by}: {show_command(run, status)}"


def show_command(run: Path, status: str = "") -> str:
    """The shell command that shows episodes of `run`."""
    selector = f" --status {shlex.quote(status)}" if status else ""
    return f"soul show {shell_path(run)}{selector}"


def shell_path(path: Path) -> str:
    """A path, quoted for the shell."""
    return shlex.quote(str(path))
