"""Skipped updates, what is said about a step, why a run ends early, and more steps for one.

One update with a number that is not finite may be bad luck; several in a row mean that the model or
the settings are broken. The count of those that follow each other stands in the step's line as long
as it is not 0, so a resumed run continues it. At `MOST_SKIPS` the run stops behind a checkpoint. It
also stops when feedback is of no use, and when so many steps in a row learn nothing.

`--steps` may be raised, whether the run has ended or not; everything else must be as it was. A
cosine schedule then ends at the new last step, and the usual warm-up stays that of the old number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from soulkit.errors import RunError, RunStopped, UserError
from soulkit.judge.coach import LEAST_DISTINCT
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
from soulkit.train.config import TrainConfig
from soulkit.train.rollouts.canaries import FELL
from soulkit.train.rollouts.feedback import feedback_in_vain
from soulkit.train.state.metrics import Alarm, StepLine, read_step_lines

MOST_SKIPS = 5
"""Updates that are skipped one after the other, until a run stops."""


@dataclass(slots=True)
class Skips:
    """Counts skipped updates across the steps of a run."""

    row: int = 0
    """Of them, those since the last update that was taken."""

    @classmethod
    def of(cls, metrics: Path) -> Self:
        """That of a run; `metrics` is its file, which knows the count of one that is taken up."""
        return cls(newest_learned(metrics).learned.skipped_row)

    def another(self) -> bool:
        """Count one; whether there were too many in a row."""
        self.row += 1
        return self.row >= MOST_SKIPS

    def none(self) -> None:
        """An update was taken."""
        self.row = 0


def newest_learned(metrics: Path) -> StepLine:
    """The line of a run's newest step that learned; empty before the first."""
    lines = reversed(read_step_lines(metrics))
    return next((line for line in lines if line.learned.skipped is not None), StepLine(step=0))


def skip_remarks(line: StepLine) -> list[str]:
    """`update 2 of 4 skipped: the loss is nan`, for every update that the step did not take."""
    reasons = line.learned.not_finite.items()
    return [
        f"update {which} skipped: {why}; the weights stay as they were" for which, why in reasons
    ]


def too_many_skips(line: StepLine) -> UserError | None:
    """Why a run stops after the step of `line`; None while it may go on."""
    row, reasons = line.learned.skipped_row, list(line.learned.not_finite.items())
    if row < MOST_SKIPS or not reasons:
        return None
    which, why = reasons[-1]
    return UserError(
        f"{row} updates in a row were skipped; in the last one, update {which} of step "
        f"{line.step}, {why}.",
        "One number in the weights that is not finite would spoil every later one.",
        "The weights so far are kept, without any of it. Try a smaller --lr, --dtype float32 or a "
        "higher --temperature with another --out; the same command takes one more step, and goes "
        "on if that works.",
    )


STOP_FLAT = 10
"""Steps in a row that learn nothing, after which a run ends where calls cost money."""
WAYS = (
    "try more drafts of a prompt (--group-size), a higher --temperature, rows that are neither "
    "always solved nor never (easier ones, or a model warmed up by sft, where rewards are low), or "
    "a reward that also pays for half an answer"
)


def step_words(line: StepLine) -> str:
    """A step in a few words: what a person watches."""
    shown = {
        "draft": line.rewards.draft, "refined": line.rewards.refined, "gap": line.rewards.loo,
        "loss": line.learned.loss, "kl": line.learned.kl_base,
    }  # fmt: skip
    parts = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
    dev = [f"{task} {mean:.3f}" for task, mean in line.dev.items() if mean is not None]
    valid = [f"{name} {loss:.3f}" for name, loss in line.valid.items() if loss is not None]
    probe = [f"{name} {mean:.3f}" for name, mean in line.probe.items() if mean is not None]
    parts += ["probe", *probe] if probe else []
    return " ".join(parts + (["dev", *dev] if dev else []) + (["valid", *valid] if valid else []))


def step_remarks(line: StepLine) -> list[str]:
    """Feedback that could not be used or hardly differs, and updates that were not taken."""
    # Said of the first step, and of the whole run at its end.
    alike = alike_feedback(line.feedback.distinct) if line.step == 0 else ""
    return [*line.feedback.missing.values(), *skip_remarks(line), *filter(None, [alike])]


def alarm_remark(alarm: Alarm) -> str:
    """A canary's alarm, and what to do about it."""
    meaning = "the judge can be played; look at its verdicts"
    if FELL in alarm.why:
        meaning = "the drafts of different rows become alike; read some of them"
    return f"canary alarm at step {alarm.words()}: {meaning}"


def alike_feedback(distinct: float | None) -> str:
    """`the feedback hardly differs: 0.02 different texts a draft …`; empty where it does."""
    if distinct is None or distinct >= LEAST_DISTINCT:
        return ""
    return (
        f"the feedback hardly differs: {distinct:.2f} different texts a draft, fewer than 1 in "
        f"{1 / LEAST_DISTINCT:.0f}; what is the same for every draft is a part of the prompt, and "
        "no answer to the draft (--coach names another)"
    )


def flat_words(line: StepLine, before: int, stop_flat: int | None) -> str:
    """What is said of a step in which no rollout is better than another, after `before` such steps
    in this run: the first time all of it, then a count at every tenfold of it."""
    text = flat_groups(line)
    if text and not before:
        end = f"{stop_flat} such steps in a row end the run" if stop_flat else (
            f"--stop-flat {STOP_FLAT} would end the run after {STOP_FLAT} such steps"
        )  # fmt: skip
        return f"step {line.step}: {text}; {end} (said once, then counted)"
    tenfold = str(before + 1).strip("0") == "1"
    return f"step {line.step}: {before + 1} steps so far had nothing to learn from" if (
        text and tenfold
    ) else ""  # fmt: skip


def flat_total(lines: Sequence[StepLine]) -> str:
    """How many steps of a whole run had nothing to learn from; empty where it was one or none."""
    played = [line for line in lines if line.played]
    flat = sum(bool(flat_groups(line)) for line in played)
    return f"{flat} of {len(played)} steps had nothing to learn from rewards" if flat > 1 else ""


def flat_groups(line: StepLine) -> str:
    """`8 of 8 groups have equal rewards: nothing is learned; try …`; empty when one has spread."""
    learned = line.learned
    groups, single = learned.groups or 0, learned.groups_single or 0
    flat, moved = learned.groups_flat or 0, bool(learned.grad_norm)
    # Under protocol reference a group of one keeps its reward: what moved may be that.
    if not groups or single + flat < groups or (single and moved):
        return ""
    what = (
        "equal rewards" if not single else "one rollout or equal rewards" if flat else "one rollout"
    )
    lesson = "nothing is learned from rewards" if moved else "nothing is learned"
    return f"{groups} of {groups} groups have {what}: {lesson}; {WAYS}"


@dataclass(slots=True)
class Stops:
    """Follows the steps of a run since it was started: what is said of them, and why it ends before
    all of them are done: its feedback is of no use, its updates cannot be taken, or so many steps
    in a row have learned nothing."""

    config: TrainConfig
    flat_total: int = 0
    """Steps that had nothing to learn from."""
    flat_row: int = 0
    """Of them, the newest in a row."""

    def remarks(self, line: StepLine) -> list[str]:
        """What to say of a step, each step once."""
        flat = flat_words(line, self.flat_total, stop_flat(self.config))
        self.flat_total += bool(flat_groups(line))
        return [
            *map(alarm_remark, line.canaries.alarms),
            *(f"step {line.step}: {remark}" for remark in step_remarks(line)),
            *filter(None, [flat]),
        ]

    def after(self, line: StepLine, *, last: bool) -> UserError | None:
        """Why the run ends after the step of `line`; None while it may go on."""
        if error := ended_by(self.config.method, line):
            return error
        self.flat_row = self.flat_row + 1 if flat_groups(line) and not line.learned.grad_norm else 0
        limit = stop_flat(self.config)
        flat = limit and self.flat_row >= limit and not last
        return _flat_for_too_long(self.config, self.flat_row) if flat else None


def ended_by(method: str, line: StepLine) -> UserError | None:
    """Why the step of `line` ends a run, whatever came before it."""
    return feedback_in_vain(method, line) or too_many_skips(line)


def stop_flat(config: TrainConfig) -> int | None:
    """After how many steps in a row that learn nothing a run ends; None: after none."""
    if config.stop_flat is not None:
        return config.stop_flat or None
    return STOP_FLAT if pays(config) else None


def _flat_for_too_long(config: TrainConfig, flat: int) -> RunStopped:
    said = config.stop_flat is not None
    return RunStopped(
        f"{flat} steps in a row learned nothing: no rollout of a prompt was better than another.",
        f"--stop-flat {flat} was given." if said else
        f"Calls of this run cost money, and --stop-flat is {flat} where they do.",
        f"The weights so far are kept. To mend it, {WAYS}. The same command goes on for as many "
        "steps; --stop-flat 0 never ends a run.",
    )  # fmt: skip


# --- more steps -----------------------------------------------------------------------------------


def steps_before(path: Path) -> int | None:
    """The steps that the run in folder `path` was to take; None where there is no run."""
    steps = read_config(path).get("steps") if is_run(path) else None
    return steps if isinstance(steps, int) else None


def with_more_steps(config: TrainConfig, path: Path) -> TrainConfig:
    """`config` for the run in `path`: with its warm-up, unless another one was asked for.

    RunError when fewer steps are asked for than the run was begun with.
    """
    before = steps_before(path)
    if before is None or before == config.steps:
        return config
    if read_environment(path).get("command") != f"train {config.method}":  # refused anyway
        return config
    if config.steps < before:
        raise RunError(
            f"{path} was begun with {before} steps, and now --steps is {config.steps}.",
            "The steps of a run can be raised, not lowered.",
            f"Write --steps {before} or more, or give another folder with --out.",
        )
    warm_up = read_config(path).get("warmup_steps")
    if warm_up is None or "warmup_steps" in config.model_fields_set:
        return config
    return config.model_copy(update={"warmup_steps": warm_up})


def identity_before(config: TrainConfig, path: Path) -> dict[str, Any]:
    """What makes the run in `path` this one: the settings of `config`, with its number of steps."""
    before = steps_before(path)
    return {**config.identity(), **({} if before is None else {"steps": before})}


def take_more_steps(run: Run, config: TrainConfig, reporter: Reporter) -> None:
    """Record the new number of steps where it was raised, and say what depended on the old one.

    The old summary moves aside: the run is unfinished until the new one is written.
    """
    before = steps_before(run.path)
    if before is None or before >= config.steps:
        return
    reporter.note(more_steps_words(config, before, run.path))
    if run.summary_path.is_file():
        os.replace(run.summary_path, run.path / f"summary_{before}_steps.json")
    change_settings(run, plain_config(config.identity()), {"steps": [before, config.steps]})


def more_steps_words(config: TrainConfig, before: int, path: Path) -> str:
    """`steps raised from 40 to 80: …`, with what depended on the old number."""
    facts = []
    if config.lr_schedule == "cosine":
        facts.append(
            f"the learning rate follows a cosine that now ends at step {config.steps}; steps up to "
            f"{before} followed one that ended there"
        )
    if config.warmup_steps:
        facts.append(f"the warm-up stays {config.warmup_steps} steps")
    if any((folder / "ablation.json").is_file() for folder in path.resolve().parents[:2]):
        facts.append("this run is part of a comparison: give the others as many steps with "
                     "soul train ablate --steps")  # fmt: skip
    told = "; ".join(facts) or "nothing else depends on their number"
    return f"steps raised from {before} to {config.steps}: {told}"
