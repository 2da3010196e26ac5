"""What a run has of what it is to do, and the controls: asked about when all drafts are there.

    episodes.jsonl ──▶ keys and whether each has a score    controls.jsonl ──▶ the controls

Nothing else of an episode is read where nothing is left to play: then the summary that the run
wrote is still its summary. Controls are no part of a run's identity: a run that was finished
without them gets them from the same command with `--controls`. A control that could not be scored
is data like any other, and is asked about again when the run is taken up.
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
from soulkit.runs.records import CONTROLS, load_controls, scored_keys, stream_records
from soulkit.tasks.kit.user_code import or_default
from soulkit.types import ControlRecord, Record, record_key
from soulkit.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What a run has."""

    scored: Mapping[str, bool]
    """Key of an episode → whether it has a score."""
    controls: Sequence[ControlRecord]
    changed: tuple[int, int]
    """When the files of episodes and controls last changed before they were read."""

    def jobs_left(self, work: Sequence[Work], repeats: int) -> list[Job]:
        """The plays that have no scored record yet, in order."""
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
        """Whether there is anything to play or to ask."""
        return bool(self.jobs_left(work, repeats) or self.controls_left(work, repeats))


def resume_state(
    run: Run, work: Sequence[Work], repeats: int, before: ResumeState | None = None
) -> ResumeState:
    """What `run` has of `work`: what it had `before`, where no file has changed since. RunError
    when it holds episodes of other rows."""
    changed = newest_change(run.episodes), newest_change(run.path / CONTROLS)
    if before is not None and before.changed == changed:
        return before
    scored = scored_keys(run.episodes) if has_lines(run.episodes) else {}
    strange = scored.keys() - set(draft_keys(work, repeats))
    if strange:
        raise RunError(
            f"{run.path} holds {len(strange)} episodes of rows that are not evaluated now.",
            "The data files have changed since the run began, and means over both would mix them.",
            "Restore the files, or give another folder with --out.",
        )
    return ResumeState(scored=scored, controls=load_controls(run.path), changed=changed)


def draft_keys(work: Sequence[Work], repeats: int) -> list[str]:
    """The keys of all that an evaluation plays, in order."""
    return [draft_key(e.id, i) for part in work for e in part.examples for i in range(repeats)]


def draft_key(example_id: str, index: int) -> str:
    return record_key(0, example_id, index, "draft")


def finished_summary(
    run: Run, work: Sequence[Work], standing: ResumeState, suite: str
) -> Summary | None:
    """The summary that a run wrote when nothing was left to play; None where it has to be made:
    it is older than the episodes, of another version, or a user's own code has a say in it."""
    if not all(part.task.spec.home.builtin_task for part in work):
        return None
    try:
        written = run.summary_path.stat().st_mtime_ns
        late = max(standing.changed) > written
        line = summary_line(run.path)
    except (OSError, UserError):  # there is none, or none that can be read: it is made anew
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
    """What a run that was begun before still has to do; a finished one says so."""
    if left or controls:
        also = f", controls left to ask about: {controls}" if controls else ""
        return f"resuming {run.path}: {left} of {total} episodes are left to play{also}"
    again = f"soul report {shlex.quote(str(run.path))}"
    return f"{run.path} is finished already: nothing is left to play; see: {again}"


def check_weights(run: Run, version: str) -> None:
    """RunError when the episodes of `run` came from another adapter than that of the hash `version`
    (empty: none), which plays now."""
    played = stream_records(run.episodes, light=True) if has_lines(run.episodes) else ()
    turns = (turn for record in played for trace in record.episode.traces for turn in trace.turns)
    if any(turn.completion.policy != version for turn in turns):
        raise RunError(
            f"{run.path} holds episodes of other adapter weights than those given now.",
            "The adapter was trained further or replaced since, and a mean would mix two models.",
            "Give another folder with --out.",
        )


def is_unbegun(folder: Path, command: str) -> bool:
    """Whether the run in `folder` is one of `command` that ended before anything was played, as
    where a server did not start, and no process works in it."""
    played = any(has_lines(folder / name) for name in ("episodes.jsonl", CONTROLS))
    if played or not is_run(folder) or (folder / CONDITIONS).exists() or is_locked(folder):
        return False
    return bool(read_environment(folder).get("command") == command)


def begun_engine(run: Run) -> Mapping[str, Any]:
    """What the actor of `run` has been sampled by so far: kind, version of vLLM, and its context
    where the model's is longer. Empty for a run that has sampled nothing."""
    if not (_any_line(run.episodes) or _any_line(run.path / SAMPLED)):
        return {}  # files that were opened, and a start that failed, are no beginning
    conditions = Conditions.read(run.path)
    return conditions.engine if conditions else {}


def _any_line(path: Path) -> bool:
    return has_lines(path) and next(lines_in(path), None) is not None


def check_engine(run: Run, engine: Mapping[str, Any]) -> None:
    """RunError when the episodes of `run` were sampled by another engine than `engine` (`kind`,
    `version`, `max_context`); what one of the two does not tell is passed over."""
    begun = begun_engine(run)
    if any(begun[name] != engine[name] for name in begun.keys() & engine.keys()):
        raise RunError(
            f"{run.path} holds episodes sampled by {engine_words(begun)}, not by "
            f"{engine_words(engine)}.",
            "Two engines round differently or cut replies at other lengths, and a mean would mix "
            "what they sampled.",
            f"Go on with --engine {begun['kind']} as it was, or give another folder with --out.",
        )


# -- controls --------------------------------------------------------------------------------------


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
