"""A pilot: play a few rows of a run first, and scale the plan of all rows with what they used.

    plan of all rows × (used by the played rows / planned for the played rows)

The ratio is taken by role, and by task where at least two independent rows were played; the other
tasks share one ratio. The interval of the cost is that of a stratified ratio estimator: the rows of
a task are a random sample, u_i = C + n Σ_r (C_r / X_r) (y_ri − R_r x_ri) is the linearised cost of
row i (C_r planned cost of role r, X_r its planned cost on the n played rows, x_ri and y_ri planned
and used cost of row i, R_r = Σ y_ri / X_r), and its mean is C. The pilot is the start of the run
itself: the same command continues in its folder and asks for none of its replies again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.resume import ResumeState, draft_keys
from soulkit.metrics.intervals import Estimate, estimate, suite_mean
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import control_jobs
from soulkit.play.plan import Pilot, Plan, PlayerLoad, TaskPlan, Work, seconds_of
from soulkit.runs.folder import Run
from soulkit.types import Example

ASKED_AS = {"blind_reader": "judge"}
"""Role in a plan → its role in the ledger, where they differ."""
MOST = 100
"""Played rows per task that a plan is measured on."""
OTHERS = ""
"""The group of tasks that share one ratio."""
QUANTITIES = ("calls", "prompt_tokens", "completion_tokens", "cost")
"""What is measured, with the names of `RoleTotals`."""
Used = Mapping[tuple[str, str], Mapping[str, Any]]
"""(role, example) → `RoleTotals` of its calls."""
Amounts = Mapping[tuple[str, str], float]
"""(role in the ledger, quantity) → its amount."""


@dataclass(frozen=True, slots=True)
class PilotRow:
    """One played row: what its calls to servers were planned to use, and what they used."""

    task: str
    cluster: str
    planned: Amounts
    used: Amounts

    @classmethod
    def of(cls, task: str, example: Example, plan: Plan, used: Used) -> PilotRow:
        """The row whose plan is `plan`; `used` has the calls of all rows by role and example."""
        planned = _planned(plan.asked)
        amounts = {
            (role, name): used[role, example.id][name] or 0.0
            for role, name in planned if (role, example.id) in used
        }  # fmt: skip
        return cls(task, example.cluster, planned, amounts)


def played_rows(
    run: Run, config: EvalConfig, work: Sequence[Work], standing: ResumeState
) -> list[PilotRow]:
    """The rows of `work` whose episodes are all recorded in `run`, up to MOST per task."""
    if not run.ledger_path.is_file():
        return []
    with Ledger(run.ledger_path, "replay") as ledger:
        used = ledger.by_example()
    # Replies by batch cost half; the ratio of live prices holds for batch prices, too.
    live = config.model_copy(update={"batch": False, "batch_judges": False})
    controls, repeats = {control.key for control in standing.controls}, config.repeats
    rows: list[PilotRow] = []
    for part in work:
        singles = (replace(part, examples=(example,)) for example in part.examples)
        done = (one for one in singles if standing.scored.keys() >= {*draft_keys([one], repeats)})
        for one in islice(done, MOST):
            jobs = [job for job in control_jobs(one, repeats) if job.key in controls]
            plan = evaluation_plan(live, [one], jobs)
            rows.append(PilotRow.of(part.task.name, one.examples[0], plan, used))
    return rows


# -- from used tokens to a plan --------------------------------------------------------------------


def plan_from_pilot(plan: Plan, rows: Sequence[PilotRow], folder: Path, share: float = 0.0) -> Plan:
    """`plan` scaled by what the played rows used. `share` is their share of all rows if the run
    plays each row once, else 0."""
    names = {_name(task) for task in plan.tasks}
    rows = [row for row in rows if row.task in names]
    if not rows:
        return plan
    groups = _groups(plan, rows)
    tasks: dict[str, TaskPlan] = {}
    costs: list[Estimate] = []
    for group in dict.fromkeys(groups.values()):
        group_rows = [row for row in rows if groups[row.task] == group]
        whole = [task for task in plan.tasks if groups[_name(task)] == group]
        tasks |= {task.task: _scaled(task, _ratios(group_rows)) for task in whole}
        costs += _cost(_planned(one for task in whole for one in task.asked), group_rows, share)
    scaled = replace(plan, tasks=tuple(tasks[task.task] for task in plan.tasks))
    spent = sum(value for row in rows for (_, name), value in row.used.items() if name == "cost")
    mean, interval = suite_mean(costs), None
    if mean.ci_low is not None and mean.ci_high is not None and scaled.cost_limit is not None:
        low, high = (len(costs) * end for end in (mean.ci_low, mean.ci_high))
        interval = max(low, spent if share else 0.0), min(high, scaled.cost_limit)
    ratios: dict[str, dict[str, float]] = {}
    for (role, name), ratio in _ratios(rows).items():
        if name != "cost":
            ratios.setdefault(role, {})[name.replace("completion", "reply")] = ratio
    return replace(scaled, pilot=Pilot(
        rows=len(rows), tasks=len({row.task for row in rows}), interval=interval, ratios=ratios,
        cost=None if plan.cost is None else spent, folder=str(folder),
    ))  # fmt: skip


def _name(task: TaskPlan) -> str:
    """The name of the task without the label of its load."""
    return task.task.partition(" ")[0]


def _groups(plan: Plan, rows: Sequence[PilotRow]) -> dict[str, str]:
    """Task → the group whose ratios it takes: itself with two independent rows, else OTHERS, which
    also gets the tasks with the fewest rows until it has two."""
    served = {_name(task) for task in plan.tasks if any(one.seconds for one in task.asked)}
    counts = {name: len({row.cluster for row in rows if row.task == name}) for name in served}
    groups, few = dict.fromkeys(map(_name, plan.tasks), OTHERS), list[int]()
    for count, name in sorted((count, name) for name, count in counts.items()):
        if count < 2 or (few and sum(few) < 2):
            few.append(count)
        else:
            groups[name] = name
    return groups


def _planned(loads: Iterable[PlayerLoad]) -> Amounts:
    """The planned amounts of all calls to servers."""
    return _sum(_quantities(one) for one in loads if one.seconds)


def _quantities(one: PlayerLoad) -> Amounts:
    values = (one.usual_calls, one.prompt_tokens, one.reply_tokens, one.cost or 0.0)
    role = ASKED_AS.get(one.role, one.role)
    return {(role, name): value for name, value in zip(QUANTITIES, values, strict=True)}


def _sum(several: Iterable[Amounts]) -> Amounts:
    total: dict[tuple[str, str], float] = defaultdict(float)
    for amounts in several:
        for key, value in amounts.items():
            total[key] += value
    return total


def _ratios(rows: Sequence[PilotRow]) -> Amounts:
    """Used over planned; without an entry for what no row was planned to use."""
    used, planned = _sum(row.used for row in rows), _sum(row.planned for row in rows)
    return {key: used.get(key, 0.0) / value for key, value in planned.items() if value}


def _scaled(task: TaskPlan, ratios: Amounts) -> TaskPlan:
    """The task's plan with measured calls, tokens and cost of players on servers."""
    loads = []
    for one in task.asked:
        calls, prompts, replies, cost = (
            value * ratios.get(key, 1.0) for key, value in _quantities(one).items()
        )
        changed = replace(
            one, usual_calls=round(calls), prompt_tokens=round(prompts),
            reply_tokens=round(replies), seconds=seconds_of(calls, replies),
            cost=None if one.cost is None else cost, cost_range=None,
        )  # fmt: skip
        loads.append(changed if one.seconds else one)
    before, after = (sum(one.seconds for one in several) for several in (task.asked, loads))
    return replace(task, asked=tuple(loads), chain=task.chain * (after / before if before else 1))


def _cost(whole: Amounts, rows: Sequence[PilotRow], share: float) -> Iterator[Estimate]:
    """The cost of a group of tasks with its variance, unless no played row was to cost money."""
    ratios, planned = _ratios(rows), _sum(row.planned for row in rows)
    costs = {key: cost for key, cost in whole.items() if key[1] == "cost"}
    weights = {key: cost / planned[key] for key, cost in costs.items() if planned.get(key)}
    mean = sum(cost * ratios.get(key, 1.0) for key, cost in costs.items())
    errors = (
        sum(w * (row.used.get(key, 0.0) - ratios[key] * row.planned.get(key, 0.0))
            for key, w in weights.items())
        for row in rows
    )  # fmt: skip
    if weights:
        one = estimate([mean + len(rows) * e for e in errors], [row.cluster for row in rows])
        yield replace(one, variance=None if one.variance is None else one.variance * (1 - share))
