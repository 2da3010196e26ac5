"""The difference of two runs over a suite stays where differences can be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soulkit.eval.suite_contrasts import suite_differences
from soulkit.metrics.comparisons import PairedDifference, paired_difference
from soulkit.tasks.suites import Suite

SUITE = Suite(members=("a", "b"), axes={"X": ("a", "b")}, average="macro")


def difference(*values: float) -> PairedDifference:
    """B minus A in as many clusters, of scores from 0 to 1."""
    keys = {i: i for i in range(len(values))}
    return paired_difference(
        dict.fromkeys(keys, 0.0), dict(enumerate(values)), keys, scale=(0.0, 1.0)
    )


def test_no_interval_is_wider_than_the_scale() -> None:
    parts = {"a": difference(0.0, 1.0), "b": difference(1.0, 0.9)}
    for mean in suite_differences(SUITE, parts, lambda task: 1.0):
        assert mean.paired.difference == pytest.approx(0.725)
        assert mean.paired.ci_high == 1.0 and mean.paired.ci_low is not None
        assert -1.0 <= mean.paired.ci_low < 0.725
    (axis, _) = suite_differences(SUITE, parts, lambda task: None)  # nobody knows the scale
    assert axis.paired.ci_high is not None and axis.paired.ci_high > 1.0
    lost = {**parts, "b": replace(parts["b"], difference=None)}
    (axis, _) = suite_differences(SUITE, lost, lambda task: 1.0)
    assert axis.paired.ci_low is axis.paired.difference is None
    assert (axis.worst, axis.best) == pytest.approx((-0.25, 0.75))
