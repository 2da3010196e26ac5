"""Gates: limits on the difference between two runs, tested with its confidence interval.

    TASK/METRIC>=-0.2         B - A is at least -0.2: the lower end of its interval is
    TASK/METRIC<=0.05         B - A is at most 0.05: the upper end of its interval is
    SUITE>=-0.01              the same for the mean over a suite

A gate passes only if the whole interval is on the right side of the margin, fails if the whole
interval is on the wrong side, and is undecided otherwise.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from soulkit.errors import ConfigError
from soulkit.metrics.comparisons import PairedDifference

Outcome = Literal["pass", "fail", "undecided"]
_FORM = re.compile(r"\s*(.+?)\s*(>=|<=|>|<)\s*([-+\u2212]?[0-9.]+(?:[eE][-+]?\d+)?)\s*")
_TAIL = 0.025
"""Probability on either side of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class ComparisonGate:
    """One condition on the difference between two runs."""

    text: str
    target: str
    """A task or a suite."""
    metric: str
    """Empty for the headline."""
    sign: str
    """`>=`, `>`, `<=` or `<`."""
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The outcome of a gate."""

    gate: ComparisonGate
    outcome: Outcome
    difference: float | None
    low: float | None
    high: float | None
    why: str = ""
    """The basis of the interval, or why there is none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "gate": self.gate.text, "outcome": self.outcome, "difference": self.difference,
            "ci_low": self.low, "ci_high": self.high, "why": self.why,
        }  # fmt: skip


def parse_gate(text: str) -> ComparisonGate:
    """`TASK/METRIC>=NUMBER` → a gate; ConfigError for anything else."""
    match = _FORM.fullmatch(text)
    margin = _number(match[3]) if match else math.nan
    target, slash, metric = match[1].partition("/") if match else ("", "", "")
    if not match or not target.strip() or not math.isfinite(margin) or (slash and not metric):
        raise ConfigError(
            f"'{text}' is not a valid gate.",
            "A gate is a task or suite, an optional metric (default: the headline), and a limit on "
            "the difference B - A.",
            "Write --gate 'TASK/METRIC>=-0.2', with quotes so that the shell does not interpret >.",
        )
    return ComparisonGate(text.strip(), target.strip(), metric.strip(), match[2], margin)


def _number(text: str) -> float:
    try:
        return float(text.replace("\u2212", "-"))
    except ValueError:
        return math.nan


def gate_result(
    gate: ComparisonGate,
    difference: float | None,
    low: float | None,
    high: float | None,
    why: str = "",
) -> GateResult:
    """Test whether the interval from `low` to `high` is on the right side of the gate's margin."""
    outcome: Outcome = "undecided"
    if low is not None and high is not None:
        outcome = _outcome(gate, low, high)
    return GateResult(
        gate=gate, outcome=outcome, difference=difference, low=low, high=high, why=why
    )


def paired_gate(
    gate: ComparisonGate, paired: PairedDifference, name: str, span: float | None
) -> GateResult:
    """Test a gate on a paired difference in the metric `name`, whose scale is `span` wide. If the
    difference has no spread, its interval comes from `unseen_interval`."""
    why = f"{name}, {paired.n_shared} episodes"
    why += " of one cluster" if paired.n_clusters == 1 else ""
    low, high = paired.ci_low, paired.ci_high
    if low is None and paired.difference is not None and paired.n_clusters > 1:
        why = f"{name}: no spread in {paired.n_clusters} clusters"
        if span is not None and paired.method == "no-spread":
            low, high = unseen_interval(paired.difference, paired.n_clusters, span)
    return gate_result(gate, paired.difference, low, high, why)


def _outcome(gate: ComparisonGate, low: float, high: float) -> Outcome:
    # Mirror `<=` gates so that higher is better.
    upward = gate.sign.startswith(">")
    worst, best, margin = (low, high, gate.margin) if upward else (-high, -low, -gate.margin)
    if worst > margin or (worst == margin and gate.sign.endswith("=")):
        return "pass"
    return "fail" if best < margin else "undecided"


def unseen_interval(difference: float, clusters: int, span: float) -> tuple[float, float]:
    """Interval of a mean difference d that was the same in each of C = `clusters` clusters.

    With probability 1 - 0.025, at most a share q = 1 - 0.025**(1/C) of all clusters differs, each
    by no more than `span`, the width of the scale. The interval is (1 - q) d - q span to
    (1 - q) d + q span.
    """
    share = 1 - _TAIL ** (1 / clusters)
    middle = (1 - share) * difference
    return middle - share * span, middle + share * span
