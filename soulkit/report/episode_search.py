"""Find episodes of a run without holding its file in memory, and the command that shows them."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from soulkit.errors import DataError, RunError, did_you_mean
from soulkit.eval.results.summary import Summary
from soulkit.report.transcript import with_twins
from soulkit.runs.jsonl import (
    EPISODES_SCHEMA,
    has_lines,
    lines_in,
    packed_file,
    placed_objects,
    refuse_other_schema,
)
from soulkit.runs.records import record_of_line
from soulkit.text import one_line
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Kind, Record

HACKED, LEAKED, CUT = "hacked", "leaked", "cut"
MARKS = {
    HACKED: "an auditor says that the actor played to the judge",
    LEAKED: "its feedback gives something away",
    CUT: "words or lines of it were cut",
}
"""What may be asked for beside statuses and reasons, and what it means."""
NEAR = 20_000
"""Ids among which a mistyped one is looked for: more would take seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlace:
    """Where an episode stands in the file, and what became of it."""

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
    """Byte at which its line begins."""
    number: int
    """Its line, counted from 1: the larger, the newer."""

    @property
    def words(self) -> tuple[str, ...]:
        """All that `--status` finds it by."""
        return tuple(filter(None, (self.status, self.reason, *self.marks)))


Places = tuple[EpisodePlace, EpisodePlace | None]
"""A draft and its refined episode, or one episode that stands alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which pairs of a run to show; what is None or False selects nothing away."""

    example: str | None = None
    """An id, or the beginning of one."""
    status: str | None = None
    task: str | None = None
    kind: str | None = None
    step: int | None = None
    worst: bool = False
    """Scored ones, the lowest first."""
    improved: bool = False
    """Pairs whose refined episode scored more than the draft, the largest gain first."""

    @property
    def empty(self) -> bool:
        return self == Selection()


def episode_places(path: Path) -> list[EpisodePlace]:
    """The episodes of the file `path`, the newest last; a replaced one is left out.

    DataError when there is none, or a line holds no record.
    """
    places: dict[str, EpisodePlace] = {}
    for number, (offset, line) in enumerate(placed_objects(path) if has_lines(path) else (), 1):
        place = _place(line, offset, number, path)
        places.pop(place.key, None)  # played again: it is a new one
        places[place.key] = place
    if not places:
        raise DataError(
            f"There are no episodes in '{path}'.",
            "Supervised training keeps some only with --eval-every STEPS and held-out rows, and a "
            "run that was just begun has none yet.",
            "Name the folder of an evaluation or a training; list them with: soul runs",
        )
    return list(places.values())


def _place(line: Mapping[str, Any], offset: int, number: int, path: Path) -> EpisodePlace:
    refuse_other_schema(line, EPISODES_SCHEMA, f"Line {number} of '{path}'")
    if not _usual(line):  # what reads records says in words what is wrong, or reads it after all
        line = asdict(record_of_line(line, path, number))
    score = line["score"]
    return EpisodePlace(
        key=line["key"], task=line["task"], example_id=line["example_id"],
        rollout=line["rollout"], step=line.get("step", 0), kind=line["kind"],
        value=score["value"], status=score.get("status", "ok"), reason=score.get("reason", ""),
        marks=_marks(line), offset=offset, number=number,
    )  # fmt: skip


def _usual(line: Mapping[str, Any]) -> bool:
    """Whether a line has what a place is made of, in the types that are written."""
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
    """Status, reason or mark → episodes, `ok` first, then the commonest."""
    counts = Counter(word for place in places for word in dict.fromkeys(place.words))
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0])))


# -- choosing --------------------------------------------------------------------------------------


def select(places: Sequence[EpisodePlace], wish: Selection, run: Path) -> list[Places]:
    """The pairs that `wish` describes, in its order; else the newest first.

    RunError when there is none, with the nearest id, status or task.
    """
    pairs = with_twins(places)
    if wish.example is not None:
        pairs = _by_example(pairs, wish.example, run)
    if wish.task is not None:
        pairs = [pair for pair in pairs if pair[0].task == wish.task]
        _refuse_none(pairs, f"of the task '{wish.task}'", wish.task, {p.task for p in places}, run)
    if wish.step is not None:
        pairs = [pair for pair in pairs if pair[0].step == wish.step]
        _refuse_none(pairs, f"of step {wish.step}", "", {f"{p.step}" for p in places}, run)
    if wish.kind is not None or wish.status is not None:
        pairs = [pair for pair in pairs if any(_fits(one, wish) for one in pair if one)]
        _refuse_unlike_wish(pairs, wish, places, run)
    return _ordered(pairs, wish, run)


def _fits(place: EpisodePlace, wish: Selection) -> bool:
    if wish.kind is not None and place.kind != wish.kind:
        return False
    return wish.status is None or wish.status in place.words


def _by_example(pairs: list[Places], example: str, run: Path) -> list[Places]:
    """The pairs of one example; the beginning of an id will do where only one id begins so."""
    exact = [pair for pair in pairs if pair[0].example_id == example]
    ids = dict.fromkeys(pair[0].example_id for pair in pairs)
    begun = [name for name in ids if example and name.startswith(example)]
    if exact:
        return exact
    if len(begun) == 1:
        return [pair for pair in pairs if pair[0].example_id == begun[0]]
    if begun:
        raise RunError(
            f"{len(begun)} examples of {run} have ids that begin with '{example}'.",
            "Only one of them can be meant.",
            f"Write more of it: {', '.join(begun[:3])}{' …' if len(begun) > 3 else ''}.",
        )
    raise RunError(
        f"{run} holds no episode of an example '{example}'.",
        f"It holds {len(ids):,} others.",
        f"{_nearest(example, list(ids)[:NEAR])}List some with: soul show {run}",
    )


def _nearest(word: str, names: Sequence[str]) -> str:
    hint = did_you_mean(word, names)
    return f"{hint} " if hint.startswith("Did") or len(names) <= 5 else ""


def _refuse_unlike_wish(
    pairs: Sequence[Places], wish: Selection, places: Sequence[EpisodePlace], run: Path
) -> None:
    if wish.status is None:
        _refuse_none(pairs, f"of the kind '{wish.kind}'", wish.kind or "",
                     {p.kind for p in places}, run)  # fmt: skip
    else:
        kind = f" and the kind '{wish.kind}'" if wish.kind else ""
        _refuse_none(pairs, f"with the status '{wish.status}'{kind}", wish.status,
                     set(status_counts(places)), run)  # fmt: skip


def _refuse_none(
    pairs: Sequence[Places], what: str, word: str, names: Iterable[str], run: Path
) -> None:
    if not pairs:
        raise RunError(
            f"{run} holds no episode {what} that fits.",
            "There would be nothing to show.",
            f"{did_you_mean(word, names)} List some with: soul show {run}",
        )


def _ordered(pairs: list[Places], wish: Selection, run: Path) -> list[Places]:
    if wish.improved:
        better = [pair for pair in pairs if (gain(pair) or 0.0) > 0]
        if not better:
            refined = sum(twin is not None for _, twin in pairs)
            raise RunError(
                f"{run} holds no refined episode that scored more than its draft.",
                f"There are {refined} refined episodes with their drafts; an evaluation has none.",
                f"Look at the drafts with: soul show {run} --worst 10",
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
            f"Of {run} no episode that fits has a score.",
            "What is unscored is not the worst: nobody knows what it would have scored.",
            f"Look at them with: soul show {run} --status unscored",
        )
    return sorted(scored, key=lambda pair: (values[id(pair)] or 0.0, pair[0].number))


def _value(pair: Places, kind: str | None) -> float | None:
    """The score that `--worst` goes by: that of the draft, unless the refined ones are meant."""
    one = pair[1] if kind == "refined" and pair[1] is not None else pair[0]
    return one.value


def gain(pair: Places) -> float | None:
    """The refined episode's score less its draft's; None unless both are scored."""
    draft, refined = pair
    if refined is None or draft.value is None or refined.value is None:
        return None
    return refined.value - draft.value


# -- reading ---------------------------------------------------------------------------------------


def lines_at(path: Path, places: Iterable[EpisodePlace]) -> list[dict[str, Any]]:
    """The lines of these episodes as they stand in the file, parsed."""
    if packed_file(path).is_file():
        places = list(places)
        lines = _packed_lines(path, {place.offset for place in places})
        return [lines[place.offset] for place in places]
    with path.open("rb") as stream:
        parsed: list[dict[str, Any]] = []
        for place in places:
            stream.seek(place.offset)
            parsed.append(json.loads(stream.readline()))
        return parsed


def _packed_lines(path: Path, offsets: Collection[int]) -> dict[int, dict[str, Any]]:
    """Offset → the parsed line there; the others are passed over."""
    lines, offset = {}, 0
    for line in lines_in(path):
        if offset in offsets:
            lines[offset] = json.loads(line)
        offset += len(line)
    return lines


def records_at(path: Path, places: Sequence[EpisodePlace]) -> list[Record]:
    """The records of these episodes; DataError for a line that cannot be read."""
    lines = zip(lines_at(path, places), places, strict=True)
    return [record_of_line(line, path, place.number) for line, place in lines]


def odd_cells(summary: Summary, run: Path) -> list[str]:
    """A line for every status other than `ok` and for hacked ones, the commonest first:
    `12 truncated (TASK 10, OTHER 2): soul show runs/x --status truncated`. Then one for texts that
    budgets cut, and one for feedback that leaked."""
    counts = _statuses(summary)
    hacked = _hacked(summary)
    if hacked and HACKED not in counts:
        counts[HACKED] = hacked
    lines = sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    shown = [_line(status, tasks, run) for status, tasks in lines]
    cuts = {task: one["episodes"] for task, one in summary.cuts.items() if one.get("episodes")}
    shown += [_line(CUT, cuts, run, "with words cut by budgets")] if cuts else []
    if isinstance(summary, TrainSummary) and summary.feedback is not None:
        dropped = {author: c.dropped for author, c in summary.feedback.coaches.items() if c.dropped}
        shown += [_line(LEAKED, dropped, run, "feedback leaked")] if dropped else []
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
    """Task → episodes of which an auditor says so, where it is a metric and no status."""
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
    """The command that shows episodes of `run`, as a shell reads it."""
    selector = f" --status {shlex.quote(status)}" if status else ""
    return f"soul show {shell_path(run)}{selector}"


def shell_path(path: Path) -> str:
    """A path as a shell reads it."""
    return shlex.quote(str(path))
