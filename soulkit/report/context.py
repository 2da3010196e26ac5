"""Whether a published figure and a run's were measured the same way: five things have to match.

Protocol, prompts, judge, temperature and rows, each of the task that the figure is about: one run
may have another judge in every task. What a source does not state does not match, so a figure is
comparable only where all five are stated and equal, and nothing else is known to differ. The
prompts of the kit are worded here: a source that states no hashes of them had other prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from soulkit.eval.conditions import Conditions
from soulkit.report.published import Publication, Stated

UNSTATED = " unstated"
WORDED_HERE = "prompts worded here"


def rows_digest(rows: Mapping[str, str]) -> str:
    """One hash of a task's rows (example → hash of its row), in whatever order they come."""
    return _digest(rows.items())


def prompts_digest(prompts: Mapping[str, Iterable[str]]) -> str:
    """One hash of a task's prompts (template → its hashes), in whatever order they come."""
    return _digest((name, " ".join(sorted(hashes))) for name, hashes in prompts.items())


def _digest(named: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(named))
    return hashlib.sha256(lines.encode()).hexdigest()


def context_doubts(
    table: Publication, tasks: Iterable[str], conditions: Conditions
) -> dict[str, list[str]]:
    """Why figures of `table` for these tasks may not be compared with the run's.

    Reason → the tasks it holds for; empty: protocol, prompts, judge, temperature and rows are the
    same.
    """
    doubts: dict[str, list[str]] = {}
    for task in tasks:
        known = [table.differs[task]] if task in table.differs else []
        for reason in (*_doubts(table.stated, task, conditions), *known):
            doubts.setdefault(reason, []).append(task)
    return doubts


def doubts_text(doubts: Mapping[str, Sequence[str]], n_tasks: int) -> str:
    """`temperature 1, here 0 (two tasks); the source does not state rows`."""
    unstated = [reason.removesuffix(UNSTATED) for reason in doubts if reason.endswith(UNSTATED)]
    parts = [
        reason if len(tasks) == n_tasks else f"{reason} ({_named(tasks)})"
        for reason, tasks in doubts.items() if not reason.endswith(UNSTATED)
    ]  # fmt: skip
    return "; ".join([*parts, *([f"the source does not state {', '.join(unstated)}"]
                                if unstated else [])])  # fmt: skip


def _named(tasks: Sequence[str]) -> str:
    return ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"


def _doubts(stated: Stated, task: str, run: Conditions) -> list[str]:
    doubts = [
        _unlike("protocol", stated.protocol, _protocol(run, task)),
        _prompts(stated, task, run),
        _judge(stated, task, run),
        _unlike("temperature", _degrees(stated.temperature), _temperature(run, task)),
        _rows(stated, task, run),
    ]
    return [doubt for doubt in doubts if doubt]


def _unlike(what: str, there: str, here: str) -> str:
    """What differs, in words; empty where both are known and equal."""
    if not there:
        return f"{what}{UNSTATED}"
    if not here:
        return f"{what} not recorded here"
    return "" if there == here else f"{what} {there}, here {here}"


def _prompts(stated: Stated, task: str, run: Conditions) -> str:
    there, prompts = stated.prompts.get(task, ""), run.evidence(task).prompts
    if not there:
        return WORDED_HERE
    if not prompts:
        return _unlike("prompts", there, "")
    return "" if prompts_digest(prompts) == there else "other prompts"


def _protocol(run: Conditions, task: str) -> str:
    names = run.evidence(task).protocols or {str(run.settings.get("protocol") or "")}
    return ", ".join(sorted(names))


def _temperature(run: Conditions, task: str) -> str:
    if any("temperature" in one for one in run.dropped(task, "actor") or ()):
        return "refused by the server"
    return _degrees(run.actor(task).get("temperature"))


def _degrees(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ""


def _judge(stated: Stated, task: str, run: Conditions) -> str:
    roles = run.roles(task)
    if roles is not None and "judge" not in roles:
        return ""
    # The run's own list has the judges of all its tasks: it stands in only for a record without
    # players by task.
    judges = run.named(task, "judge") or (run.players or {}).get("judge", ())
    return _unlike("judge", stated.judge(task), ", ".join(str(j.get("model", "")) for j in judges))


def _rows(stated: Stated, task: str, run: Conditions) -> str:
    there, rows = stated.rows.get(task, ""), run.rows(task)
    if not there or rows is None or not all(rows.values()):
        return _unlike("rows", there, "")
    return "" if rows_digest(rows) == there else "other rows"
