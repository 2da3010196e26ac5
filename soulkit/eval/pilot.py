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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.runner import prepare, run_eval
from soulkit.eval.run.session import pilot_work
from soulkit.metrics.intervals import Estimate, estimate, suite_mean
from soulkit.models.ledger.ledger import Ledger, UsedTokens
from soulkit.play.plan import Pilot, Plan, PlayerLoad, TaskPlan
from soulkit.reporting import Reporter
from soulkit.types import Example

ASKED_AS = {"blind_reader": "judge"}
"""Role in a plan → its role in the ledger, where they differ."""
OTHERS = ""
"""The group of tasks that share one ratio."""
Used = Mapping[tuple[str, str], UsedTokens]
"""(role, example) → what its calls used."""


Amounts = Mapping[tuple[str, str], float]
"""(role in the ledger, quantity of `UsedTokens`) → its amount."""


@dataclass(frozen=True, slots=True)
class PilotRow:
    """One played row: what its calls to servers were planned to use, and what they used."""

    task: str
    cluster: str
    planned: Amounts
    used: Amounts

    @classmethod
    def of(cls, task: str, example: Example, plan: Plan, used: Used) -> PilotRow:
        """The row whose plan is `plan`; `used` has the calls of all rows."""
        mine = {
            (role, name): value or 0.0
            for (role, key), one in used.items() if key == example.id
            for name, value in one._asdict().items()
        }  # fmt: skip
        return cls(task, example.cluster, _planned(plan.asked), mine)


def evaluation_pilot(config: EvalConfig, n: int, out: Path | None, reporter: Reporter) -> Plan:
    """Play `n` rows of an evaluation and return the plan of all its rows, measured on them."""
    if config.ledger != "record":
        raise ConfigError(
            f"--pilot does not work with --ledger {config.ledger}.",
            "The run takes the replies of the pilot from its own ledger.",
            "Leave out --ledger.",
        )
    # A batch can take a day; the pilot is played live, and its ratios also hold for batch prices.
    live = config.model_copy(update={"batch": False, "batch_judges": False})
    run, _ = run_eval(live, out, pilot=n, reporter=reporter)
    config, work = prepare(config, asking=False)
    live = config.model_copy(update={"batch": False, "batch_judges": False})
    with Ledger(run.ledger_path) as ledger:
        used = ledger.used()
    rows = [
        PilotRow.of(part.task.name, example,
                    evaluation_plan(live, [replace(part, examples=(example,))]), used)
        for part in pilot_work(work, n, config.seed) for example in part.examples
    ]  # fmt: skip
    share = len(rows) / max(sum(len(part.examples) for part in work), 1)
    return plan_from_pilot(evaluation_plan(config, work), rows, run.path, share)


# -- from used tokens to a plan --------------------------------------------------------------------


def plan_from_pilot(plan: Plan, rows: Sequence[PilotRow], folder: Path, share: float = 0.0) -> Plan:
    """`plan` scaled by what the played rows used. `share` is their share of all rows that the run
    plays once; 0 if the run draws rows anew."""
    groups = _groups(plan, rows)
    parts: list[Estimate] = []
    tasks: dict[str, TaskPlan] = {}
    for group in dict.fromkeys(groups.values()):
        mine = [row for row in rows if groups[row.task] == group]
        whole = [task for task in plan.tasks if groups[_name(task)] == group]
        ratios = _ratios(mine)
        tasks |= {task.task: _scaled(task, ratios) for task in whole}
        part = _stratum(_planned([one for task in whole for one in task.asked]), mine, share)
        parts += [part] if part is not None else []
    cost = sum(row.used[key] for row in rows for key in row.used if key[1] == "cost")
    scaled = replace(plan, tasks=tuple(tasks[task.task] for task in plan.tasks))
    sums, ends = suite_mean(parts), None
    if sums.ci_low is not None and sums.ci_high is not None and scaled.cost_limit is not None:
        low, high = len(parts) * sums.ci_low, len(parts) * sums.ci_high
        ends = max(low, cost), min(high, scaled.cost_limit)
    played = len({row.task for row in rows})
    pilot = Pilot(rows=len(rows), tasks=played, cost=cost, interval=ends, folder=str(folder))
    return replace(scaled, pilot=pilot)


def _name(task: TaskPlan) -> str:
    """The name of the task without the label of its load."""
    return task.task.partition(" ")[0]


def _groups(plan: Plan, rows: Sequence[PilotRow]) -> dict[str, str]:
    """Task → the group whose ratios it takes: itself with two independent rows, else OTHERS. All
    tasks are one group if OTHERS would have fewer than two rows."""
    names = dict.fromkeys(map(_name, plan.tasks))
    clusters = {name: len({row.cluster for row in rows if row.task == name}) for name in names}
    groups = {name: name if clusters[name] > 1 else OTHERS for name in names}
    rest = [clusters[name] for name, group in groups.items() if group == OTHERS]
    return dict.fromkeys(names, OTHERS) if rest and sum(rest) < 2 else groups


def _planned(asked: Iterable[PlayerLoad]) -> Amounts:
    """The planned amounts of all calls to servers."""
    amounts: dict[tuple[str, str], float] = {}
    for one in asked:
        for key, value in _quantities(one).items() if one.seconds else ():
            amounts[key] = amounts.get(key, 0.0) + value
    return amounts


def _quantities(one: PlayerLoad) -> dict[tuple[str, str], float]:
    values = (one.usual_calls, one.prompt_tokens, one.reply_tokens, one.cost or 0.0, one.seconds)
    role = ASKED_AS.get(one.role, one.role)
    return {(role, name): value for name, value in zip(UsedTokens._fields, values, strict=True)}


def _sum(several: Iterable[Amounts]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for amounts in several:
        for key, value in amounts.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _ratios(rows: Sequence[PilotRow]) -> Amounts:
    """Used over planned; without an entry for what no row was planned to use."""
    used = _sum(row.used for row in rows)
    planned = _sum(row.planned for row in rows)
    return {key: used.get(key, 0.0) / value for key, value in planned.items() if value}


def _scaled(task: TaskPlan, ratios: Amounts) -> TaskPlan:
    """The task's plan with measured calls, tokens, cost and time of players on servers."""
    asked = []
    for one in task.asked:
        calls, prompts, replies, cost, seconds = (
            value * ratios.get(key, 1.0) for key, value in _quantities(one).items()
        )
        changed = replace(
            one, usual_calls=round(calls), prompt_tokens=round(prompts), cost_range=None,
            reply_tokens=round(replies), cost=None if one.cost is None else cost, seconds=seconds,
        )  # fmt: skip
        asked.append(changed if one.seconds else one)
    before, after = (sum(one.seconds for one in loads) for loads in (task.asked, asked))
    chain = task.chain * after / before if before else task.chain
    return replace(task, asked=tuple(asked), chain=chain)


def _stratum(whole: Amounts, rows: Sequence[PilotRow], share: float) -> Estimate | None:
    """The cost of a group of tasks with its variance; None if no played row was to cost money."""
    ratios, planned = _ratios(rows), _sum(row.planned for row in rows)
    costs = {key: cost for key, cost in whole.items() if key[1] == "cost"}
    weights = {key: cost / planned[key] for key, cost in costs.items() if planned.get(key)}
    if not weights:
        return None
    mean = sum(cost * ratios.get(key, 1.0) for key, cost in costs.items())
    errors = (
        sum(w * (row.used.get(key, 0.0) - ratios[key] * row.planned.get(key, 0.0))
            for key, w in weights.items())
        for row in rows
    )  # fmt: skip
    result = estimate([mean + len(rows) * e for e in errors], [row.cluster for row in rows])
    variance = None if result.variance is None else result.variance * (1 - share)
    return replace(result, variance=variance)
