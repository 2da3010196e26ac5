"""State of a run to resume, and controls, which are asked after all drafts are played.

    episodes.jsonl ──▶ keys and whether each has a score    controls.jsonl ──▶ the controls

If nothing is left to play, episodes are not read further and the existing summary is used. Controls
are not part of a run's identity: the same command with `--controls` adds them to a finished run.
Unscored controls are kept and asked again when the run is resumed.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import RunError, UserError
from soulkit.eval.results.summary import Summary, summary_line
from soulkit.eval.run.run_lock import GroupWriter, is_locked
from soulkit.models.local.journal import SAMPLED
from soulkit.models.vllm.settings import engine_words
from soulkit.play.engine import (
    ControlJob,
    Engine,
    Job,
    ask_control,
    control_jobs,
    control_names,
    gather,
)
from soulkit.play.plan import Work
from soulkit.runs.conditions import CONDITIONS, Conditions
from soulkit.runs.folder import Run, is_run, read_environment
from soulkit.runs.jsonl import has_lines, lines_in, newest_change
from soulkit.runs.records import CONTROLS, load_controls, scored_drafts, stream_records
from soulkit.tasks.kit.user_code import or_default
from soulkit.types import ControlRecord, Record, record_key
from soulkit.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The recorded episodes and controls of a run."""

    scored: Mapping[str, bool]
    """Key of a draft → whether it and the replies to its feedback have a score."""
    controls: Sequence[ControlRecord]
    changed: tuple[int, int]
    """Last change of the episodes and controls files when they were read."""

    def jobs_left(self, work: Sequence[Work], repeats: int) -> list[Job]:
        """The drafts to play, some again because a score is missing, in order."""
        return [
            Job(part.task, example, index)
            for part in work
            for example in part.examples
            for index in range(repeats)
            if not self.scored.get(draft_key(example.id, index))
        ]

    def controls_left(self, work: Sequence[Work], repeats: int) -> list[ControlJob]:
        return controls_left(self.controls, work, repeats)

    def any_left(self, work: Sequence[Work], repeats: int) -> bool:
        """Whether any episode or control is left."""
        return bool(self.jobs_left(work, repeats) or self.controls_left(work, repeats))


def resume_state(
    run: Run, work: Sequence[Work], repeats: int, before: ResumeState | None = None
) -> ResumeState:
    """The state of `run`; returns `before` if no file has changed since. RunError if the run has
    episodes of rows that are not in `work`."""
    changed = newest_change(run.episodes), newest_change(run.path / CONTROLS)
    if before is not None and before.changed == changed:
        return before
    scored = scored_drafts(run.episodes) if has_lines(run.episodes) else {}
    strange = scored.keys() - set(draft_keys(work, repeats))
    if strange:
        raise RunError(
            f"{run.path} contains {len(strange)} episodes of rows that are no longer in the data.",
            "The data files have changed since the run started, and a mean would mix both.",
            "Restore the files, or choose another folder with --out.",
        )
    return ResumeState(scored=scored, controls=load_controls(run.path), changed=changed)


def draft_keys(work: Sequence[Work], repeats: int) -> list[str]:
    """The keys of all episodes of an evaluation, in order."""
    return [draft_key(e.id, i) for part in work for e in part.examples for i in range(repeats)]


def draft_key(example_id: str, index: int) -> str:
    return record_key(0, example_id, index, "draft")


def finished_summary(
    run: Run, work: Sequence[Work], standing: ResumeState, suite: str
) -> Summary | None:
    """The existing summary of a finished run. None if it has to be made again: it is older than the
    episodes, is from another version, or depends on a user's own code."""
    if not all(part.task.spec.home.builtin_task for part in work):
        return None
    try:
        written = run.summary_path.stat().st_mtime_ns
        late = max(standing.changed) > written
        line = summary_line(run.path)
    except (OSError, UserError):  # missing or unreadable: make it again
        return None
    summary, origin = Summary.from_json(line), line.get("provenance")
    versions = origin.get("versions") if isinstance(origin, dict) else None
    same = (
        not late
        and isinstance(versions, dict)
        and versions.get("soulkit") == __version__
        and summary.n == summary.n_scored == len(standing.scored)
        and summary.controls == control_counts(standing.controls)
        and summary.suite == suite
    )
    return summary if same else None


def resume_text(run: Run, left: int, total: int, controls: int = 0) -> str:
    """The line printed when a run is resumed, or is already finished."""
    if left or controls:
        also = f", controls left: {controls}" if controls else ""
        return f"resuming {run.path}: {left} of {total} episodes left to play{also}"
    again = f"soul report {shlex.quote(str(run.path))}"
    return f"{run.path} is already finished; to see its report: {again}"


def check_weights(run: Run, version: str) -> None:
    """RunError if the episodes of `run` came from a different adapter than the current one, whose
    hash is `version` (empty for none)."""
    played = stream_records(run.episodes, light=True) if has_lines(run.episodes) else ()
    turns = (turn for record in played for trace in record.episode.traces for turn in trace.turns)
    if any(turn.completion.policy != version for turn in turns):
        raise RunError(
            f"{run.path} contains episodes from different adapter weights.",
            "The adapter has been trained further or replaced, and a mean would mix two models.",
            "Choose another folder with --out.",
        )


def is_unbegun(folder: Path, command: str) -> bool:
    """Whether the run in `folder` was made by `command`, ended before any episode was played (for
    example because a server did not start), and is not in use."""
    played = any(has_lines(folder / name) for name in ("episodes.jsonl", CONTROLS))
    if played or not is_run(folder) or (folder / CONDITIONS).exists() or is_locked(folder):
        return False
    return bool(read_environment(folder).get("command") == command)


def begun_engine(run: Run) -> Mapping[str, Any]:
    """The engine that sampled the actor of `run` so far: kind, vLLM version, and the context length
    if it is below the model's. Empty if nothing was sampled."""
    if not (_any_line(run.episodes) or _any_line(run.path / SAMPLED)):
        return {}  # a failed start leaves empty files
    conditions = Conditions.read(run.path)
    return conditions.engine if conditions else {}


def _any_line(path: Path) -> bool:
    return has_lines(path) and next(lines_in(path), None) is not None


def check_engine(run: Run, engine: Mapping[str, Any]) -> None:
    """RunError if the episodes of `run` were sampled by another engine than `engine` (`kind`,
    `version`, `max_context`). Fields that one of them lacks are ignored."""
    begun = begun_engine(run)
    if any(begun[name] != engine[name] for name in begun.keys() & engine.keys()):
        raise RunError(
            f"{run.path} contains episodes sampled by {engine_words(begun)}, not by "
            f"{engine_words(engine)}.",
            "Engines differ in rounding and in reply limits, and a mean would mix their samples.",
            f"Continue with the same engine (--engine {begun['kind']}), or choose another folder "
            "with --out.",
        )


# -- controls --------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from soulkit.eval.results.summary import Cells

Notice = Callable[[ControlRecord], None]
"""Called with every control as soon as it is scored."""


def controls_left(
    recorded: Iterable[ControlRecord], work: Sequence[Work], repeats: int
) -> list[ControlJob]:
    """The controls of `work` without a score in `recorded`, in order."""
    done = {control.key for control in recorded if control.score.scored}
    jobs = [job for part in work for job in control_jobs(part, repeats)]
    return [job for job in jobs if job.key not in done]


async def play_controls(
    folder: Path, work: Sequence[Work], left: Sequence[ControlJob], drafts: Mapping[str, Record],
    engine: Callable[[Work], Engine], notice: Notice,
) -> None:  # fmt: skip
    """Ask the controls in `left`; `drafts` are the episodes by key.

    Each control is written soon after it is scored, and all of them before this returns.
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
    """The recorded controls: those of `work` in order, then others that an earlier start asked."""
    keys = [job.key for part in work for job in control_jobs(part, repeats)]
    return [recorded[key] for key in dict.fromkeys([*keys, *recorded]) if key in recorded]


def control_counts(controls: Iterable[ControlRecord]) -> dict[str, dict[str, Any]]:
    """Task → control → `n`, `n_scored`, and `unscored` (reason → count)."""
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
    """A line for each kind of control that has unscored ones, from the counts of a summary."""
    return [
        f"controls of {task}: {name} {one.get('n_scored', 0)}/{one.get('n', 0)} scored ("
        + ", ".join(f"{reason} {count}" for reason, count in one["unscored"].items()) + ")"
        for task, names in counts.items()
        for name, one in names.items()
        if one.get("unscored")
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class SharedControls:
    """The controls of two runs, by task, if they may be compared."""

    sides: Mapping[str, tuple[Sequence[ControlRecord], Sequence[ControlRecord]]]
    remarks: tuple[str, ...]
    """Tasks whose calibrated metrics are not compared, and why."""


def shared_controls(
    a: Path, b: Path, tasks: Sequence[str], rows: Mapping[str, Container[str]] | None = None
) -> SharedControls:
    """The comparable controls of the runs in two folders. If only one run has controls, or their
    prompts differ, the runs are compared without calibrated metrics. `rows` (by task) limits the
    controls to these rows."""
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
            why = "have different prompts" if one and other else f"exist only in {lone}"
            reasons.setdefault(why, []).append(task)
    remarks = (
        f"controls {why}, so they are not compared ({', '.join(t)})" for why, t in reasons.items()
    )
    return SharedControls(sides, tuple(remarks))


def _prompts(controls: Sequence[ControlRecord]) -> dict[str, dict[str, set[str]]]:
    """Control → template → its hashes."""
    prompts: dict[str, dict[str, set[str]]] = {}
    for control in controls:
        for template, digest in control.score.prompts.items():
            names = prompts.setdefault(control.name, {})
            names.setdefault(template, set()).add(digest)
    return prompts


def calibration_remarks(work: Sequence[Work], cells: Cells) -> list[str]:
    """A line for each task whose controls left a metric undefined."""
    lines = []
    for part in work:
        values = {name: cell.mean for name, cell in cells.get(part.task.name, {}).items()}
        said = partial(part.task.calibration_remarks, values)
        nothing: Sequence[str] = ()
        remarks = or_default(part.task, "calibration_remarks", said, nothing)
        lines += [f"{part.task.name}: {'; '.join(remarks)}"] if remarks else []
    return lines


def controls_words(work: Sequence[Work], *, on: bool) -> str:
    """A note to show before a run if the tasks have controls but these are off, or if controls are
    on but no task has any; else empty."""
    names = control_names(work)
    if names and not on:
        return f"controls are off for {names}; turn them on with --controls"
    if on and not names:
        return "--controls has no effect: none of these tasks has controls"
    return ""
