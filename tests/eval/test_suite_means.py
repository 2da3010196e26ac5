"""A run's tasks as a suite: groups, axis means, the suite mean, and what is missing."""

from __future__ import annotations

import math
from statistics import fmean

import pytest

from soulkit.eval.suites import SuiteLine, suite_lines
from soulkit.eval.summary import Cell, Cells
from soulkit.tasks.suites import Suite

SUITE = Suite(
    members=("a", "b", "both", "d"),
    groups={"both": ("c1", "c2")},
    axes={"X": ("a", "both"), "Y": ("b", "d")},
    average="macro",
)
MEANS = {"a": 0.2, "b": 0.4, "c1": 0.5, "c2": 0.9, "d": 0.6}


def cell(mean: float | None, *, n: int = 20, scored: int | None = None, **more: object) -> Cell:
    counted = n if scored is None else scored
    return Cell(
        mean=mean, n=n, n_scored=counted, n_clusters=n, variance=0.01, df=19.0, scale=(0.0, 1.0),
        headline=True, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def played(**changes: Cell | None) -> Cells:
    cells = {name: cell(mean) for name, mean in MEANS.items()} | changes
    return {name: {"value": one} for name, one in cells.items() if one is not None}


def lines(tasks: Cells, suite: Suite = SUITE) -> dict[str, SuiteLine]:
    return {line.name: line for line in suite_lines(suite, tasks, lambda task: (0.0, 1.0))}


def test_lines_stand_in_published_order_with_the_means_behind_them() -> None:
    rows = suite_lines(SUITE, played(), lambda task: None)
    assert [(row.name, row.level) for row in rows] == [
        ("a", "task"), ("b", "task"), ("both", "group"), ("c1", "part"), ("c2", "part"),
        ("d", "task"), ("X", "axis"), ("Y", "axis"), ("all", "suite"),
    ]  # fmt: skip
    assert [row.axis for row in rows[:6]] == ["X", "Y", "X", "X", "X", "Y"]


def test_every_member_counts_alike() -> None:
    rows = lines(played(a=cell(0.2, n=1000)))
    both = fmean((0.5, 0.9))
    assert rows["both"].cell.mean == pytest.approx(both)
    assert rows["X"].cell.mean == pytest.approx(fmean((0.2, both)))
    assert rows["all"].cell.mean == pytest.approx(fmean((0.2, 0.4, both, 0.6)))
    assert (rows["all"].cell.n_scored, rows["all"].cell.n) == (1080, 1080)
    assert rows["all"].coverage == "4 of 4" and rows["all"].missing == ()
    assert rows["all"].cell.worst is None and rows["all"].cell.best is None


def test_tasks_are_strata() -> None:
    """Variances are added: the group's is 0.01 / 2, the suite's the sum of four over 16."""
    rows = lines(played())
    assert rows["both"].cell.variance == pytest.approx(0.01 / 2)
    assert rows["all"].cell.variance == pytest.approx((3 * 0.01 + 0.01 / 2) / 16)
    low, high = rows["all"].cell.ci_low, rows["all"].cell.ci_high
    assert low is not None and high is not None and rows["all"].cell.mean is not None
    assert 0 < low < rows["all"].cell.mean < high < 1
    half = math.sqrt((3 * 0.01 + 0.01 / 2) / 16)
    assert 1.9 * half < (high - low) / 2 < 2.2 * half


def test_without_a_member_there_is_no_average_only_bounds() -> None:
    rows = lines(played(d=None))
    assert rows["X"].cell.mean is not None and rows["X"].cell.worst is None
    for name, known, total in (("Y", 0.4, 2), ("all", 0.2 + 0.4 + 0.7, 4)):
        missing = rows[name].cell
        assert missing.mean is None and missing.ci_low is None
        assert (missing.worst, missing.best) == pytest.approx((known / total, (known + 1) / total))
        assert rows[name].missing == ("d",)
    assert rows["all"].coverage == "3 of 4" and rows["d"].cell == Cell()
    assert (rows["all"].cell.n_scored, rows["all"].cell.n) == (80, 80)


def test_a_group_without_one_of_its_tasks_has_no_mean() -> None:
    rows = lines(played(c2=None))
    assert rows["both"].cell.mean is None and rows["both"].missing == ("c2",)
    assert (rows["both"].cell.worst, rows["both"].cell.best) == pytest.approx((0.25, 0.75))
    assert rows["X"].missing == ("both",)
    assert (rows["X"].cell.worst, rows["X"].cell.best) == pytest.approx((0.225, 0.475))


def test_what_is_unscored_widens_the_bounds_and_leaves_the_mean() -> None:
    lost = cell(0.6, n=20, scored=15, worst=0.45, best=0.7, unscored={"judge_error": 5})
    rows = lines(played(d=lost))
    whole = rows["all"].cell
    assert whole.mean == pytest.approx(fmean((0.2, 0.4, 0.7, 0.6)))
    assert (whole.worst, whole.best) == pytest.approx(
        (fmean((0.2, 0.4, 0.7, 0.45)), fmean((0.2, 0.4, 0.7, 0.7)))
    )
    assert (whole.n_scored, whole.n, whole.unscored) == (95, 100, {"judge_error": 5})
    nothing = lines(played(d=cell(None, scored=0, worst=0.0, best=1.0)))["all"].cell
    assert nothing.mean is None and (nothing.n_scored, nothing.n) == (80, 100)
    assert (nothing.worst, nothing.best) == pytest.approx((1.3 / 4, 2.3 / 4))


def test_what_is_truncated_widens_the_bounds_though_it_is_scored() -> None:
    whole = lines(played(d=cell(0.6, worst=0.6, best=0.9)))["all"].cell
    assert whole.mean is not None and whole.n_scored == whole.n
    assert (whole.worst, whole.best) == pytest.approx((whole.mean, whole.mean + 0.3 / 4))


def test_the_scale_of_the_run_goes_before_the_declared_one() -> None:
    wide = Cell(mean=None, n=3, scale=(-5.0, 5.0), headline=True)
    bounds = lines(played(d=wide))["Y"].cell
    assert (bounds.worst, bounds.best) == pytest.approx((-2.3, 2.7))
    nowhere = suite_lines(SUITE, played(d=None), lambda task: None)[-1].cell
    assert nowhere.mean is None and nowhere.worst is nowhere.best is None


def test_means_of_an_older_summary_have_no_interval() -> None:
    old = {name: {"value": Cell(mean=mean, n=4, n_scored=4)} for name, mean in MEANS.items()}
    rows = lines(old)
    assert rows["all"].cell.mean == pytest.approx(fmean((0.2, 0.4, 0.7, 0.6)))
    assert rows["all"].cell.ci_low is None and rows["all"].cell.variance is None


def test_a_plain_list_has_no_mean() -> None:
    rows = suite_lines(Suite(members=("a", "b")), played(), lambda task: None)
    assert [row.level for row in rows] == ["task", "task"]
