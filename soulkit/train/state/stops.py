"""Skipped updates, printed lines of a step, early stops, and raising the number of steps.

A single non-finite update may be an accident; several in a row mean that the model or the settings
are broken. The number of consecutive skips is kept in the step line, so a resumed run continues it.
At `MOST_SKIPS` the run saves a checkpoint and stops. It also stops if feedback cannot be used, or
after too many consecutive steps without learning.

`--steps` can be raised during or after a run; no other setting may change. A cosine schedule then
ends at the new last step, and the default warm-up stays as computed from the old number.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from soulkit.errors import RunError, RunStopped, UserError
from soulkit.eval.results.cells import cluster_of
from soulkit.judge.coach import LEAST_DISTINCT
from soulkit.metrics.comparisons import paired_difference
from soulkit.play.plan import pays
from soulkit.reporting import Reporter
from soulkit.runs.folder import (
    Run,
    change_settings,
    is_run,
    plain_config,
    read_config,
    read_environment,
)
from soulkit.runs.records import DEV_EPISODES, DEV_JUDGED, load_records
from soulkit.train.config import TrainConfig
from soulkit.train.rollouts.canaries import FELL
from soulkit.train.rollouts.feedback import feedback_in_vain
from soulkit.train.state.metrics import Alarm, StepLine, read_step_lines

MOST_SKIPS = 5
"""Number of consecutive skipped updates after which a run stops."""


@dataclass(slots=True)
class Skips:
    """Counts skipped updates across the steps of a run."""

    row: int = 0
    """Consecutive skips since the last taken update."""

    @classmethod
    def of(cls, metrics: Path) -> Self:
        """The counter of a run; `metrics` is its metrics file, with the count for a resume."""
        return cls(newest_learned(metrics).learned.skipped_row)

    def another(self) -> bool:
        """Count a skip; returns whether there were too many in a row."""
        self.row += 1
        return self.row >= MOST_SKIPS

    def none(self) -> None:
        """Reset the count after a taken update."""
        self.row = 0


def newest_learned(metrics: Path) -> StepLine:
    """The step line of a run's newest update; empty before the first."""
    lines = reversed(read_step_lines(metrics))
    return next((line for line in lines if line.learned.skipped is not None), StepLine(step=0))


def too_many_skips(line: StepLine) -> UserError | None:
    """The error that stops a run after the step in `line`; None if the run may continue."""
    row, reasons = line.learned.skipped_row, list(line.learned.not_finite.items())
    if row < MOST_SKIPS or not reasons:
        return None
    which, why = reasons[-1]
    return UserError(
        f"{row} updates in a row were skipped; in the last one, update {which} of step "
        f"{line.step}, {why}.",
        "A non-finite number in the weights would break all later steps.",
        "The weights before these updates are saved. Try a smaller --lr, --dtype float32 or a "
        "higher --temperature with another --out. The same command tries one more step and "
        "continues if that works.",
    )


STOP_FLAT = 10
"""Default of --stop-flat if calls cost money."""
BY_DEV_JUDGE = "/dev_judge"
"""Follows the task in the names of dev scores by --dev-judge."""
WAYS = (
    "try more drafts per prompt (--group-size), a higher --temperature, rows of medium difficulty "
    "(if rewards are low: easier rows, or a model warmed up with sft), or a reward with partial "
    "credit"
)


def step_words(line: StepLine) -> str:
    """The main numbers of a step as a short text."""
    shown = {
        "draft": line.rewards.draft, "refined": line.rewards.refined, "gap": line.rewards.loo,
        "loss": line.learned.loss, "kl": line.learned.kl_base,
    }  # fmt: skip
    parts = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
    dev = [f"dev {task} {mean:.3f}" for task, mean in line.dev.items() if mean is not None]
    valid = [f"valid {name} {loss:.3f}" for name, loss in line.valid.items() if loss is not None]
    probe = [f"probe {name} {mean:.3f}" for name, mean in line.probe.items() if mean is not None]
    bits = [] if line.exposure is None else [f"exposure {line.exposure:.2f} bits"]
    return ", ".join(parts + probe + dev + valid + bits)


def step_remarks(line: StepLine) -> list[str]:
    """Remarks about unusable or repetitive feedback, and about skipped updates."""
    # Printed for the first step, and at the end for the whole run.
    alike = alike_feedback(line.feedback.distinct) if line.step == 0 else ""
    skipped = [f"update {which} skipped: {why}; the weights are unchanged"
               for which, why in line.learned.not_finite.items()]  # fmt: skip
    return [*line.feedback.missing.values(), *skipped, *filter(None, [alike])]


def alarm_remark(alarm: Alarm) -> str:
    """The line of an alarm, with advice."""
    meaning = "the judge rewards nonsense replies; check its verdicts"
    if FELL in alarm.why:
        meaning = "drafts of different rows become alike; read some of them"
    return f"canary alarm at step {alarm.words()}: {meaning}"


def alike_feedback(distinct: float | None) -> str:
    """A remark such as `the feedback hardly differs: 0.02 …`; empty if it differs enough."""
    if distinct is None or distinct >= LEAST_DISTINCT:
        return ""
    return (
        f"the feedback hardly differs: {distinct:.2f} different texts per draft, fewer than 1 in "
        f"{1 / LEAST_DISTINCT:.0f}; the same feedback for every draft acts like a fixed prompt, "
        "so try another --coach"
    )


def flat_words(line: StepLine, before: int, stop_flat: int | None) -> str:
    """The remark on a step in which all rollouts of each prompt are equally good, after `before`
    such steps: the first time in full, then a count after 10, 100, ... such steps."""
    text = flat_groups(line)
    if text and not before:
        end = f"the run stops after {stop_flat} such steps in a row" if stop_flat else (
            f"--stop-flat {STOP_FLAT} would stop the run after {STOP_FLAT} such steps in a row"
        )  # fmt: skip
        return f"step {line.step}: {text}; {end} (not repeated for later steps)"
    tenfold = str(before + 1).strip("0") == "1"
    return f"step {line.step}: {before + 1} steps so far had nothing to learn from" if (
        text and tenfold
    ) else ""  # fmt: skip


def flat_total(lines: Sequence[StepLine]) -> str:
    """The number of steps of a whole run with nothing to learn from; empty if at most one."""
    played = [line for line in lines if line.played]
    flat = sum(bool(flat_groups(line)) for line in played)
    return f"{flat} of {len(played)} steps learned nothing from rewards" if flat > 1 else ""


def flat_groups(line: StepLine) -> str:
    """`8 of 8 groups have equal rewards: nothing is learned; try …`; empty if any group differs."""
    learned = line.learned
    groups, single = learned.groups or 0, learned.groups_single or 0
    flat, moved = learned.groups_flat or 0, bool(learned.grad_norm)
    # Under protocol reference a group of one keeps its raw reward, which may move the weights.
    if not groups or single + flat < groups or (single and moved):
        return ""
    what = (
        "equal rewards" if not single else "one rollout or equal rewards" if flat else "one rollout"
    )
    lesson = "nothing is learned from rewards" if moved else "nothing is learned"
    return f"{groups} of {groups} groups have {what}: {lesson}; {WAYS}"


@dataclass(slots=True)
class Stops:
    """Decides the remarks on each step and whether a run stops early: feedback cannot be used,
    updates are skipped, or too many consecutive steps learn nothing."""

    config: TrainConfig
    run: Path = Path()
    flat_total: int = 0
    """Number of steps with nothing to learn from."""
    flat_row: int = 0
    """Current number of consecutive such steps."""

    def remarks(self, line: StepLine) -> list[str]:
        """The remarks on a step. Call it once per step."""
        flat = flat_words(line, self.flat_total, stop_flat(self.config))
        self.flat_total += bool(flat_groups(line))
        return [
            *map(alarm_remark, line.canaries.alarms),
            *(f"step {line.step}: {remark}" for remark in step_remarks(line)),
            *filter(None, [flat]),
        ]

    def after(self, line: StepLine, *, last: bool) -> UserError | None:
        """The error that stops the run after the step in `line`; None if the run may continue."""
        if error := ended_by(self.config.method, line):
            return error
        self.flat_row = self.flat_row + 1 if flat_groups(line) and not line.learned.grad_norm else 0
        if not last and (error := judges_part(self.config, self.run, line)):
            return error
        limit = stop_flat(self.config)
        flat = limit and self.flat_row >= limit and not last
        return _flat_for_too_long(self.config, self.flat_row) if flat else None


def ended_by(method: str, line: StepLine) -> UserError | None:
    """The error if the step in `line` ends the run by itself; else None."""
    return feedback_in_vain(method, line) or too_many_skips(line)


def stop_flat(config: TrainConfig) -> int | None:
    """Number of consecutive steps without learning after which a run stops; None: never."""
    if config.stop_flat is not None:
        return config.stop_flat or None
    return STOP_FLAT if pays(config) else None


def dev_score(dev: Mapping[str, float | None]) -> float | None:
    """Mean over the tasks with a score, by --dev-judge if there is one; None without any."""
    by_task = {task.removesuffix(BY_DEV_JUDGE): dev[task] for task in sorted(dev)}
    scores = [score for score in by_task.values() if score is not None]
    return fmean(scores) if scores else None


def judges_part(config: TrainConfig, run: Path, line: StepLine) -> RunStopped | None:
    """The error if, over `stop_gap` dev evaluations, the mean score by the training judge rose,
    that by --dev-judge fell, and the difference of the changes, paired by row, has p < 0.05."""
    before = line.step - config.stop_gap * (config.eval_every or 0)
    if not config.dev_judge or not config.stop_gap or before < 0 or not line.dev:
        return None
    changes: list[dict[Hashable, float | None]] = []
    clusters: dict[Hashable, Hashable] = {}
    for file in (DEV_JUDGED, DEV_EPISODES):
        scores: dict[tuple[int, str], float | None] = {}
        for r in load_records(run / file, light=True):
            scores[r.step, r.example_id], clusters[r.example_id] = r.score.value, cluster_of(r)
        ends = {name: (scores.get((before, name)), b) for (step, name), b in scores.items()
                if step == line.step}  # fmt: skip
        changes.append({n: None if a is None or b is None else b - a for n, (a, b) in ends.items()})
    moved = paired_difference(changes[0], changes[1], clusters)
    fall, rise = moved.mean_a or 0.0, moved.mean_b or 0.0
    if not fall < 0 < rise or moved.p is None or moved.p >= 0.05:
        return None
    return RunStopped(
        f"Since step {before} the dev score has risen by {rise:.3f}, but fallen by {-fall:.3f} by "
        f"{config.dev_judge.written()} ({moved.n_shared} rows, p {moved.p:.3f}).",
        f"--stop-gap {config.stop_gap} was given: the model learns to please its judge.",
        "The best weights by --dev-judge are saved: soul eval local --run RUN --checkpoints all. "
        "The same command continues; --stop-gap 0 never stops a run.",
    )


def _flat_for_too_long(config: TrainConfig, flat: int) -> RunStopped:
    said = config.stop_flat is not None
    return RunStopped(
        f"{flat} steps in a row learned nothing: all rollouts of each prompt had equal rewards.",
        f"--stop-flat {flat} was given." if said else
        f"Calls of this run cost money, so --stop-flat defaults to {flat}.",
        f"The weights so far are saved. To get a learning signal, {WAYS}. The same command "
        f"continues for another {flat} steps; --stop-flat 0 never stops a run.",
    )  # fmt: skip


# --- more steps -----------------------------------------------------------------------------------


def steps_before(path: Path) -> int | None:
    """The recorded number of steps of the run in folder `path`; None if there is no run."""
    steps = read_config(path).get("steps") if is_run(path) else None
    return steps if isinstance(steps, int) else None


def with_more_steps(config: TrainConfig, path: Path) -> TrainConfig:
    """`config` for the run in `path`, with the recorded warm-up unless another one is set.

    RunError if --steps is lower than before.
    """
    before = steps_before(path)
    if before is None or before == config.steps:
        return config
    if read_environment(path).get("command") != f"train {config.method}":  # refused anyway
        return config
    if config.steps < before:
        raise RunError(
            f"{path} was started with {before} steps, but now --steps is {config.steps}.",
            "The number of steps of a run can be raised, not lowered.",
            f"Use --steps {before} or more, or another --out.",
        )
    warm_up = read_config(path).get("warmup_steps")
    if warm_up is None or "warmup_steps" in config.model_fields_set:
        return config
    return config.model_copy(update={"warmup_steps": warm_up})


def identity_before(config: TrainConfig, path: Path) -> dict[str, Any]:
    """The settings that identify the run in `path`: `config` with the run's recorded steps."""
    before = steps_before(path)
    return {**config.identity(), **({} if before is None else {"steps": before})}


def take_more_steps(run: Run, config: TrainConfig, reporter: Reporter) -> None:
    """Record a raised number of steps, and print which settings depended on the old one.

    The old summary is renamed, because the run is unfinished until a new one is written.
    """
    before = steps_before(run.path)
    if before is None or before >= config.steps:
        return
    reporter.note(more_steps_words(config, before, run.path))
    if run.summary_path.is_file():
        os.replace(run.summary_path, run.path / f"summary_{before}_steps.json")
    change_settings(run, plain_config(config.identity()), {"steps": [before, config.steps]})


def more_steps_words(config: TrainConfig, before: int, path: Path) -> str:
    """`steps raised from 40 to 80: …`, with the settings that depended on the old number."""
    facts = []
    if config.lr_schedule == "cosine":
        facts.append(
            f"the cosine learning rate now ends at step {config.steps}; steps up to {before} used "
            f"a cosine that ended there"
        )
    if config.warmup_steps:
        facts.append(f"the warm-up stays {config.warmup_steps} steps")
    if any((folder / "ablation.json").is_file() for folder in path.resolve().parents[:2]):
        facts.append("this run is part of a comparison: raise the steps of the others with "
                     "soul train ablate --steps")  # fmt: skip
    told = "; ".join(facts) or "no other setting depends on it"
    return f"steps raised from {before} to {config.steps}: {told}"
