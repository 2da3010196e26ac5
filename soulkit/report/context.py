"""Whether a published figure and a run's were measured the same way: five things have to match.

Protocol, prompts, judge, temperature and rows, each of the task that the figure is about: one run
may have another judge in every task. What a source does not state does not match, so a figure is
comparable only where all five are stated and equal, and nothing else is known to differ. The
prompts of the kit are worded here: a source that states no hashes of them had other prompts.

And a figure stands beside a run only where the run's rows are published ones: the released file's,
an importer's, or those whose hash the source states. Rows that were made here or are a person's own
are another test. A headline that lacks parts has no figure beside it either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from soulkit.eval.cells import Cell, headline
from soulkit.eval.conditions import Conditions, read_conditions
from soulkit.eval.provenance import MADE_HERE, PUBLISHED
from soulkit.report.load import RunData
from soulkit.report.published import CAVEAT, Publication, Stated, published_for
from soulkit.tasks.made import MADE

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


# -- which figures stand beside which runs -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBeside:
    """The published figures that stand beside runs, and what has to be said of them."""

    tables: tuple[Publication, ...] = ()
    footnote: str = ""
    """What differs between their conditions and the runs'; empty without any figure."""
    left_out: str = ""
    """Why there are no figures beside some rows; empty where there are all."""

    @property
    def notes(self) -> list[str]:
        """What stands below the tables, a line each."""
        return [note for note in (self.footnote, self.left_out) if note]


def published_beside(runs: Sequence[RunData]) -> PublishedBeside:
    """The published figures for what was evaluated; means over drafts compare with none."""
    evaluated = [run for run in runs if run.kind == "eval"]
    played = [(task, cells) for run in evaluated for task, cells in run.tasks.items()]
    partial = {task for task, cells in played if not has_published(headline(cells))}
    whole = published_for({task for task, _ in played})
    sides = with_conditions(evaluated) if whole else []
    others = {table.name: other_rows(table, table.figures, sides) for table in whole}
    cut = [
        replace(t, figures={task: row for task, row in t.figures.items()
                            if task not in partial | others[t.name].keys()})
        for t in whole
    ]  # fmt: skip
    tables = tuple(table for table in cut if table.figures)
    return PublishedBeside(
        tables=tables, left_out=left_out_text(others.values()),
        footnote=footnote([(t.title, differences(t, t.figures, sides)) for t in tables]),
    )  # fmt: skip


def has_published(cell: Cell) -> bool:
    """Whether a published figure may stand beside a headline."""
    return not cell.missing and not cell.origin


Sides = Sequence[tuple[RunData, Conditions]]
"""Runs, each with its conditions."""


def with_conditions(runs: Sequence[RunData]) -> Sides:
    """The runs with what their folders tell of their conditions."""
    return [(run, read_conditions(run.path, run.records or None)) for run in runs]


def other_rows(table: Publication, tasks: Iterable[str], sides: Sides) -> dict[str, str]:
    """Those of `tasks` of which a run played other rows than the published ones: task → which."""
    found = {}
    for task in tasks:
        rows = [_other_rows(table, task, side) for run, side in sides if task in run.tasks]
        if names := dict.fromkeys(name for of_run in rows for name in of_run):
            found[task] = ", ".join(names)
    return found


def _other_rows(table: Publication, task: str, run: Conditions) -> list[str]:
    """What a run played instead of published rows; empty for those, and where it is not known."""
    stated, rows = table.stated.rows.get(task), run.rows(task) or {}
    if stated and all(rows.values()) and rows_digest(rows) == stated:
        return []
    origins = run.of_task(task).get("origins")
    if isinstance(origins, Mapping):
        return [str(name) for name in origins if name != PUBLISHED]
    data = run.settings.get("data")
    source = data.get(task, data.get("*")) if isinstance(data, Mapping) else None
    return [MADE_HERE] if str(source).startswith(MADE) else []


def left_out_text(others: Iterable[Mapping[str, str]]) -> str:
    """One line on the tasks that have no published figures beside them, by their rows."""
    tasks = {task: rows for several in others for task, rows in several.items()}
    if not tasks:
        return ""
    listed = ", ".join(f"{task} ({rows})" for task, rows in sorted(tasks.items()))
    return (
        "Published figures stand beside published rows alone, released or imported; these rows are "
        f"others: {listed}."
    )


def footnote(differing: Sequence[tuple[str, str]]) -> str:
    """The one footnote on published figures, from (title of a table, its `differences`); empty
    without any table."""
    parts = [f"{title}: {text}" for title, text in differing if text]
    if not differing:
        return ""
    return " ".join([CAVEAT, *([f"What differs: {'. '.join(parts)}."] if parts else [])])


def differences(table: Publication, tasks: Iterable[str], sides: Sides) -> str:
    """In words why figures of `table` for these tasks may not be compared with the runs'; empty
    where everything matches. What differs between the runs is said of each."""
    texts = []
    for run, side in sides:
        played = [task for task in tasks if task in run.tasks]
        doubts = context_doubts(table, played, side)
        texts.append(doubts_text(doubts, len(played)) if played else "none of its tasks was played")
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{run.name}: {text}" for (run, _), text in zip(sides, texts, strict=True)
                     if text)  # fmt: skip


# -- conditions ----------------------------------------------------------------------------------


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
