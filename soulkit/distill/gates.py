"""Gates on a distillation, tested by the ends of intervals as those of `soul compare` are.

TASK/retention>=0.6       at least so much of the expert's gain is kept: the lower end is above
retention>=0.6            the same of every task
mean/retention>=0.8       the mean over the tasks
TASK>=-0.02               generalist minus base, in the headline
TASK/METRIC<=0.05         … in a metric that stands beside it
regressions<=0            so many results at most are surely worse than the base's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soulkit.errors import ConfigError, did_you_mean
from soulkit.eval.gates import (
    ComparisonGate,
    GateResult,
    gate_result,
    parse_gate,
    unseen_interval,
)
from soulkit.metrics.comparisons import PairedDifference
from soulkit.metrics.retention import Retention

KEPT, MEAN, REGRESSIONS = "retention", "mean", "regressions"
RetentionGate = ComparisonGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """What gates may be about."""

    kept: Mapping[str, Retention]
    """Task → what is kept of its expert's gain."""
    macro: Retention
    differences: Mapping[str, Mapping[str, PairedDifference]]
    """Task → metric (empty: the headline) → generalist minus base."""
    regressions: tuple[str, ...]
    spans: Mapping[str, Mapping[str, float]]
    """Task → metric → width of its scale, where there is one."""


def parse_gates(texts: Sequence[str], tasks: Sequence[str]) -> tuple[RetentionGate, ...]:
    """The gates that were written; ConfigError for one about what is not measured."""
    gates = tuple(parse_gate(text) for text in texts)
    targets = [*tasks, MEAN, KEPT, REGRESSIONS]
    for gate in gates:
        alone = gate.target in (KEPT, REGRESSIONS) and gate.metric
        if gate.target not in targets or alone or (gate.target == MEAN and gate.metric != KEPT):
            raise ConfigError(
                f"The gate '{gate.text}' is about '{_about(gate)}', which is not measured here.",
                "A gate names a task with held-out rows, mean/retention, retention or regressions.",
                did_you_mean(gate.target, targets),
            )
    return gates


def _about(gate: RetentionGate) -> str:
    return f"{gate.target}/{gate.metric}" if gate.metric else gate.target


def gate_results(gates: Sequence[RetentionGate], of: Gated) -> tuple[GateResult, ...]:
    """What becomes of each."""
    return tuple(_result(gate, of) for gate in gates)


def _result(gate: RetentionGate, of: Gated) -> GateResult:
    if gate.target == REGRESSIONS:
        number = float(len(of.regressions))
        return gate_result(gate, number, number, number, ", ".join(of.regressions))
    if gate.target == KEPT:
        return _every_task(gate, of.kept)
    if gate.metric == KEPT:
        kept = of.macro if gate.target == MEAN else of.kept.get(gate.target, Retention())
        return _kept(gate, kept)
    paired = of.differences.get(gate.target, {}).get(gate.metric)
    if paired is None:
        return gate_result(gate, None, None, None, "no such difference was measured")
    why = f"{gate.metric or 'headline'}, {paired.n_shared} episodes"
    low, high = paired.ci_low, paired.ci_high
    if paired.difference is not None and paired.method == "no-spread" and paired.n_clusters > 1:
        why = f"{gate.metric or 'headline'}: no spread in {paired.n_clusters} clusters"
        if (span := of.spans.get(gate.target, {}).get(gate.metric)) is not None:
            low, high = unseen_interval(paired.difference, paired.n_clusters, span)
    return gate_result(gate, paired.difference, low, high, why)


def _kept(gate: RetentionGate, kept: Retention) -> GateResult:
    why = kept.why or f"{kept.n_shared} rows"
    return gate_result(gate, kept.ratio, kept.ci_low, kept.ci_high, why)


def _every_task(gate: RetentionGate, kept: Mapping[str, Retention]) -> GateResult:
    """The worst of them: what fails before what is undecided before what passes."""
    order = {"fail": 0, "undecided": 1, "pass": 2}
    results = [(task, _kept(gate, one)) for task, one in kept.items()]
    if not results:
        return gate_result(gate, None, None, None, "no task was measured")
    task, worst = min(results, key=lambda pair: order[pair[1].outcome])
    return GateResult(gate=gate, outcome=worst.outcome, difference=worst.difference,
                      low=worst.low, high=worst.high, why=f"{task}: {worst.why}")  # fmt: skip
