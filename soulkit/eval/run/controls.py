"""The controls of a run: asked about when all drafts are there, kept in `controls.jsonl`.

    drafts, all on disk ──▶ what has no score yet is asked about ──▶ controls.jsonl ──▶ calibrated
                                                                                        numbers

They are no part of a run's identity: a run that was finished without them gets them from the same
command with `--controls`, and nothing that is there is played or paid for again. A control that
could not be scored is data like any other, and is asked about again when the run is taken up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.eval.run.run_lock import GroupWriter
from soulkit.play.engine import ControlJob, Engine, ask_control, control_jobs, control_names, gather
from soulkit.play.plan import Work
from soulkit.runs.records import CONTROLS, load_controls
from soulkit.tasks.kit.user_code import or_default
from soulkit.types import ControlRecord, Record, record_key

if TYPE_CHECKING:
    from soulkit.eval.results.summary import Cells

Notice = Callable[[ControlRecord], None]
"""Gets every control as soon as it is scored."""


def controls_left(
    recorded: Iterable[ControlRecord], work: Sequence[Work], repeats: int
) -> list[ControlJob]:
    """The controls of `work` that have no score among those that are `recorded`, in order."""
    done = {control.key for control in recorded if control.score.scored}
    jobs = [job for part in work for job in control_jobs(part, repeats)]
    return [job for job in jobs if job.key not in done]


async def play_controls(
    folder: Path, work: Sequence[Work], left: Sequence[ControlJob], drafts: Mapping[str, Record],
    engine: Callable[[Work], Engine], notice: Notice,
) -> None:  # fmt: skip
    """Ask about the controls that are `left`; `drafts` holds the episodes by their keys.

    Each is on disk soon after it is scored, and all of them on return.
    """
    if not left:
        return
    writer = GroupWriter(folder / CONTROLS)

    async def of_part(part: Work) -> None:
        players = engine(part)

        async def ask(job: ControlJob) -> None:
            draft = drafts.get(record_key(0, job.example.id, job.index, "draft"))
            episode = draft.episode if draft is not None and draft.score.scored else None
            control = await ask_control(job, episode, players.cast)
            writer.add(control)
            notice(control)

        await players.each([job for job in left if job.task is part.task], ask)

    try:
        await gather(of_part(part) for part in work)
    finally:
        await writer.close()


def ordered_controls(
    recorded: Mapping[str, ControlRecord], work: Sequence[Work], repeats: int
) -> list[ControlRecord]:
    """What a run has, by key: of the controls of `work`, in order, then of others that it once
    asked about."""
    keys = [job.key for part in work for job in control_jobs(part, repeats)]
    return [recorded[key] for key in dict.fromkeys([*keys, *recorded]) if key in recorded]


def control_counts(controls: Iterable[ControlRecord]) -> dict[str, dict[str, Any]]:
    """Task → control → `n`, `n_scored`, and `unscored`: reason → how many."""
    groups: dict[str, dict[str, list[ControlRecord]]] = {}
    for control in controls:
        groups.setdefault(control.task, {}).setdefault(control.name, []).append(control)
    return {
        task: {name: _counts(group) for name, group in sorted(names.items())}
        for task, names in sorted(groups.items())
    }


def _counts(controls: Sequence[ControlRecord]) -> dict[str, Any]:
    missing = Counter(c.score.reason or "unknown" for c in controls if not c.score.scored)
    scored = len(controls) - missing.total()
    counts: dict[str, Any] = {"n": len(controls), "n_scored": scored}
    return counts | ({"unscored": dict(sorted(missing.items()))} if missing else {})


def unscored_controls(
    counts: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[str]:
    """A line for each kind of control of which some have no score, of what a summary counts."""
    return [
        f"controls of {task}: {name} {one.get('n_scored', 0)}/{one.get('n', 0)} scored ("
        + ", ".join(f"{reason} {count}" for reason, count in one["unscored"].items()) + ")"
        for task, names in counts.items()
        for name, one in names.items()
        if one.get("unscored")
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedControls:
    """The controls of two runs, by task, where the one may be held against the other."""

    sides: Mapping[str, tuple[Sequence[ControlRecord], Sequence[ControlRecord]]]
    remarks: tuple[str, ...]
    """Tasks whose calibrated numbers are not compared, and why."""


def shared_controls(
    a: Path, b: Path, tasks: Sequence[str], rows: Mapping[str, Container[str]] | None = None
) -> SharedControls:
    """What the runs in two folders have of the same controls. Runs with and without controls may be
    compared: the calibrated numbers are left out, as they are where the prompts differ. With `rows`
    (by task) only controls of these."""
    sides: dict[str, tuple[Sequence[ControlRecord], Sequence[ControlRecord]]] = {}
    reasons: dict[str, list[str]] = {}
    loaded = [
        [c for c in load_controls(run) if rows is None or c.example_id in rows.get(c.task, ())]
        for run in (a, b)
    ]
    for task in tasks:
        one, other = ([c for c in side if c.task == task] for side in loaded)
        prompts = _prompts(one), _prompts(other)
        shared = prompts[0].keys() & prompts[1].keys()
        if one and other and all(prompts[0][name] == prompts[1][name] for name in shared):
            sides[task] = one, other
        elif one or other:
            lone = "A" if one else "B"
            why = "asked with other prompts" if one and other else f"only in {lone}"
            reasons.setdefault(why, []).append(task)
    remarks = (f"controls {why}: not compared ({', '.join(t)})" for why, t in reasons.items())
    return SharedControls(sides, tuple(remarks))


def _prompts(controls: Sequence[ControlRecord]) -> dict[str, dict[str, set[str]]]:
    """Control → template → its hashes; controls without a score say nothing."""
    prompts: dict[str, dict[str, set[str]]] = {}
    for control in controls:
        for template, digest in control.score.prompts.items():
            names = prompts.setdefault(control.name, {})
            names.setdefault(template, set()).add(digest)
    return prompts


def calibration_remarks(work: Sequence[Work], cells: Cells) -> list[str]:
    """A line for each task whose controls left a number undefined, of what a summary holds."""
    lines = []
    for part in work:
        values = {name: cell.mean for name, cell in cells.get(part.task.name, {}).items()}
        said = partial(part.task.calibration_remarks, values)
        nothing: Sequence[str] = ()
        remarks = or_default(part.task, "calibration_remarks", said, nothing)
        lines += [f"{part.task.name}: {'; '.join(remarks)}"] if remarks else []
    return lines


def controls_words(work: Sequence[Work], *, on: bool) -> str:
    """What to say of controls before a run: that there are some, or none; empty where all is
    as one would think."""
    names = control_names(work)
    if names and not on:
        return f"not asked about (--controls): the controls of {names}"
    if on and not names:
        return "--controls changes nothing here: none of these tasks has controls"
    return ""
