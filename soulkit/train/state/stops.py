"""Why a run ends before its steps are done: feedback of no use, updates that cannot be taken, steps
that learn nothing."""

from __future__ import annotations

from soulkit.errors import RunStopped
from soulkit.play.costs import pays
from soulkit.train.config import TrainConfig
from soulkit.train.rollouts.feedback import in_vain, newest
from soulkit.train.rollouts.remarks import STOP_FLAT, WAYS, flat_groups
from soulkit.train.state.lines import StepLine
from soulkit.train.state.loop import Loop, Show
from soulkit.train.state.skips import newest_learned, too_many_skips


def with_stops(loop: Loop, show: Show) -> Show:
    """`show`, and the end of a run whose feedback is of no use, whose updates cannot be taken or
    that has learned nothing for so many steps since it was started; what it learned is kept."""
    limit, flat = stop_flat(loop.config), 0

    def report(line: StepLine) -> None:
        nonlocal flat
        show(line)
        stop_after(loop, line)
        flat = flat + 1 if flat_groups(line) and not line.learned.grad_norm else 0
        if limit and flat >= limit and loop.step < loop.config.steps:
            loop.checkpoint()
            raise _flat_for_too_long(loop.config, flat)

    return report


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


def stop_after(loop: Loop, line: StepLine) -> None:
    """Raise why a run ends after the step of `line`, behind a checkpoint of that step."""
    error = in_vain(loop.config.method, line) or too_many_skips(line)
    if error is not None:
        loop.checkpoint()
        raise error


def stop_ended(loop: Loop) -> None:
    """Raise again what ended a run in its last step: there is none left to take."""
    if loop.step == loop.config.steps:
        stop_after(loop, newest(loop.run.metrics))
        stop_after(loop, newest_learned(loop.run.metrics))
