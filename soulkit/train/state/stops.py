"""Why a run ends before its steps are done: feedback of no use, updates that cannot be taken."""

from __future__ import annotations

from soulkit.train.rollouts.feedback import in_vain, newest
from soulkit.train.state.lines import StepLine
from soulkit.train.state.loop import Loop, Show
from soulkit.train.state.skips import newest_learned, too_many_skips


def with_stops(loop: Loop, show: Show) -> Show:
    """`show`, and the end of a run whose feedback is of no use or whose updates cannot be taken;
    what it learned is kept."""

    def report(line: StepLine) -> None:
        show(line)
        stop_after(loop, line)

    return report


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
