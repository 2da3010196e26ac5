"""`--playable`: which tasks of a suite can be played here, and why the others cannot.

A task is left out where no class plays it, where it has no rows, or where nobody sits in a seat
that its episodes need. What the user named for it in so many words is an error all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from soulkit.errors import ConfigError, DataError
from soulkit.play.gaps import NO_COACH_KEY, key_gaps
from soulkit.play.plan import Work
from soulkit.play.seating import seated
from soulkit.play.settings import PlayConfig
from soulkit.tasks.base import Task
from soulkit.tasks.registry import NotForTraining, Registry

LoadRows = Callable[[Task], Work]
"""A task with its rows; DataError for one that has none."""


def sort_out(
    tasks: Mapping[str, Task], config: PlayConfig, registry: Registry, load: LoadRows,
    *, coached: bool = False, asking: bool = True,
) -> tuple[list[Work], dict[str, str]]:  # fmt: skip
    """(what can be played, task → why it cannot), in the order of `tasks`.

    `coached` says whether feedback is asked for; without `asking` nobody is asked at all, and no
    player is missed. DataError when rows that were named for a very task are of no use.
    """
    tried = {
        name: _work_or_why(task, config, registry, load, coached=coached, asking=asking)
        for name, task in tasks.items()
    }
    work = [one for one in tried.values() if not isinstance(one, str)]
    return work, {name: why for name, why in tried.items() if isinstance(why, str)}


def refuse_nothing(config: PlayConfig, work: Sequence[Work], reasons: Mapping[str, str]) -> None:
    """ConfigError when nothing of the suite is left."""
    if work:
        return
    words = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise ConfigError(
        f"Of the suite '{config.suite}' nothing can be played here.",
        words + ("" if words.endswith(".") else "."),
        "Name rows with --data and players with --judge and --partner; see: soul tasks list",
    )


def left_out_lines(suite: str | None, reasons: Mapping[str, str]) -> list[str]:
    """What is said aloud of every task that is left out."""
    return [f"left out of {suite}: {task}: {why}" for task, why in reasons.items()]


def _work_or_why(
    task: Task, config: PlayConfig, registry: Registry, load: LoadRows, *, coached: bool,
    asking: bool,
) -> Work | str:  # fmt: skip
    if task.spec.rows_only:
        return "this version cannot play it"
    try:
        work = load(task)
    except NotForTraining:
        return "it may be measured with and not trained on"
    except DataError as error:
        if task.name in config.data:
            raise
        return error.what.rstrip(".")
    return (_lacking(work, config, registry, coached=coached) if asking else "") or work


def _lacking(work: Work, config: PlayConfig, registry: Registry, *, coached: bool) -> str:
    """Whose seat is empty, or whose key is not here; empty when everybody is there."""
    seats = seated(config, [work], registry, coached=coached, suite=config.suite)
    if unfilled_roles := sorted(work.roles - seats.filled(work.task.name)):
        return f"nobody plays the {' and the '.join(unfilled_roles)}"
    # A key that the user's own players want is an error; one of the task's players leaves it out.
    named = {gap.name for gap in key_gaps(config)}
    keys = [gap for gap in key_gaps(seats) if gap.name not in named]
    ways = [NO_COACH_KEY for gap in keys if NO_COACH_KEY in gap.way]
    parts = [f"no key in {', '.join(gap.name for gap in keys)}", *dict.fromkeys(ways)]
    return ". ".join(parts) if keys else ""
