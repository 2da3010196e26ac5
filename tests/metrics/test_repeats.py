"""Statistics of repeats against all subsets, and against simulations whose truth is known."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations, product
from math import comb
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest

from soulkit.eval.results.summary import Summary, summarise
from soulkit.metrics.repeats import SOURCES, needed, repeat_statistics
from soulkit.types import Episode, Failure, Record, Score, Verdict, record_key, unscored
from tests.support.evaluation import api, oracle, soul
from tests.support.servers.openai_server import ScriptedServer

Rows = list[list[float]]


def statistics(rows: Rows, **more: Any) -> dict[str, Any]:
    made = repeat_statistics(rows, [str(i) for i in range(len(rows))], **more)
    whole: dict[str, Any] = made["statistics"]
    return whole


# -- of one row ------------------------------------------------------------------------------------


def test_more_than_a_thousand_repeats_of_a_row_have_a_best_and_a_worst_of_k() -> None:
    """The numbers of subsets are too large for a float."""
    wrong, right, k = 600, 500, 64
    made = statistics([[0.0] * wrong + [1.0] * right] * 2)
    draws = comb(wrong + right, k)
    assert made[f"pass@{k}"]["mean"] == pytest.approx(float(1 - Fraction(comb(wrong, k), draws)))
    assert made[f"pass^{k}"]["mean"] == pytest.approx(float(Fraction(comb(right, k), draws)))


def test_pass_at_k_and_pass_to_the_k_are_means_over_all_subsets() -> None:
    for n, k in ((3, 1), (3, 2), (4, 3), (5, 5)):
        for row in product((0.0, 1.0), repeat=n):
            subsets = [*combinations(row, k)]
            made = statistics([list(row)] * 2)
            assert made[f"pass@{k}"]["mean"] == pytest.approx(fmean(map(max, subsets)))
            if k > 1:
                assert made[f"pass^{k}"]["mean"] == pytest.approx(fmean(map(min, subsets)))


def test_other_scores_have_a_best_and_a_worst_by_their_own_score() -> None:
    row = [0.1, 0.7, 0.4, 0.9]
    made = statistics([row, row], scale=(0.0, 1.0))
    for k in (2, 3, 4):
        subsets = [*combinations(row, k)]
        best, worst = made[f"best of {k} by score"], made[f"worst of {k}"]
        assert best["mean"] == pytest.approx(fmean(map(max, subsets)))
        assert worst["mean"] == pytest.approx(fmean(map(min, subsets)))
    assert not [name for name in made if "pass" in name or "agree" in name]
    on_a_wider_scale = statistics([[0.0, 1.0], [1.0, 1.0]], scale=(-5.0, 5.0))
    assert "pass@2" not in on_a_wider_scale and "best of 2 by score" in on_a_wider_scale


def test_rows_with_too_few_scored_repeats_are_left_out_and_counted() -> None:
    made = statistics([[1.0, 0.0, 1.0], [1.0, 1.0], [0.0], []])
    counts = {name: (one["n_scored"], one["n"]) for name, one in made.items()}
    assert (counts["pass@1"], counts["pass@2"], counts["pass@3"]) == ((3, 4), (2, 4), (1, 4))
    assert made["pass^2"]["mean"] == pytest.approx((1 / 3 + 1) / 2)
    assert counts["agreeing pairs"] == counts["variance between rows"] == (2, 4)
    assert made["agreeing pairs"]["mean"] == pytest.approx((1 / 3 + 1) / 2)


@pytest.mark.parametrize(("answers", "scores", "vote", "agree"), [
    ("AAB", (1, 1, 0), 1.0, 1 / 3),
    ("ABB", (1, 0, 0), 0.0, 1 / 3),
    ("AB", (1, 0), 0.5, 0.0),  # a tie
    ("A__", (1, 0, 0), 1.0, 1 / 3),  # unreadable answers do not vote
    ("__", (0, 0), 0.0, 1.0),
])  # fmt: skip
def test_votes(answers: str, scores: tuple[int, ...], vote: float, agree: float) -> None:
    row, read = [float(x) for x in scores], ["" if a == "_" else a for a in answers]
    made = statistics([row, row], answers=[read, read])
    assert made[f"majority vote of {len(row)}"]["mean"] == pytest.approx(vote)
    assert made["agreeing pairs"]["mean"] == pytest.approx(agree)


# -- simulations with known truth ------------------------------------------------------------------


def lies_near(estimates: list[float], truth: float) -> bool:
    """Whether the mean of estimates is within three standard errors of the truth."""
    return abs(fmean(estimates) - truth) < 3 * stdev(estimates) / len(estimates) ** 0.5


@pytest.mark.parametrize("runs", [12, pytest.param(120, marks=pytest.mark.slow)])
def test_pass_rates_agree_with_a_simulation(runs: int) -> None:
    """Chances of success are Beta(2, 1): E pᵏ = 2/(k + 2), E (1 - p)ᵏ = 2/((k + 1)(k + 2))."""
    rng, k = np.random.default_rng(3), 3
    truth = {f"pass^{k}": 2 / (k + 2), f"pass@{k}": 1 - 2 / ((k + 1) * (k + 2))}
    truth |= {"agreeing pairs": 1 - 2 * (2 / 3 - 1 / 2), "variance between rows": 1 / 4}
    estimates: dict[str, list[float]] = {name: [] for name in truth}
    covered = dict.fromkeys(truth, 0)
    for _ in range(runs):
        chance = rng.beta(2, 1, 80)
        drawn = (rng.random((80, 5)) < chance[:, None]).astype(float)
        rows = [row[: rng.integers(3, 6)].tolist() for row in drawn]  # some repeats are unscored
        made = statistics(rows)
        for name, value in truth.items():
            estimates[name].append(made[name]["mean"])
            covered[name] += made[name]["ci_low"] <= value <= made[name]["ci_high"]
    assert {name: lies_near(estimates[name], value) for name, value in truth.items()
            if name != "variance between rows"} == dict.fromkeys([*truth][:3], True)  # fmt: skip
    assert fmean(estimates["variance between rows"]) == pytest.approx(1 / 4, abs=0.03)
    assert all(n / runs >= (0.88 if runs > 50 else 0.7) for n in covered.values()), covered


@pytest.mark.parametrize(("runs", "n", "m", "true"), [
    (12, 4, 3, (2.0, 1.0, 3.0)),
    pytest.param(100, 4, 3, (2.0, 1.0, 3.0), marks=pytest.mark.slow),
    pytest.param(100, 3, 2, (0.5, 1.0, 1.0), marks=pytest.mark.slow),
])  # fmt: skip
def test_variance_shares_agree_with_a_simulation(
    runs: int, n: int, m: int, true: tuple[float, ...]
) -> None:
    rng, estimates, covered = np.random.default_rng(7), [], np.zeros(3)
    for _ in range(runs):
        shape, (rows, repeats, judges) = (60, n, m), (x**0.5 for x in true)
        opinions = rng.normal(0, rows, (60, 1, 1)) + rng.normal(0, repeats, (60, n, 1))
        opinions = opinions + rng.normal(0, judges, shape)
        scored = rng.random((60, n)) < 0.9
        made = repeat_statistics(
            [row[ok].tolist() for row, ok in zip(opinions.mean(axis=2), scored, strict=True)],
            [str(i) for i in range(60)],
            # The judges rate on another scale than that of the score.
            opinions=[(9 * one[ok] + 5).tolist() for one, ok in zip(opinions, scored, strict=True)],
        )
        estimates.append([*made["variances"].values()])
        for i, name in enumerate(SOURCES):
            share = made["statistics"][f"variance between {name}"]
            covered[i] += share["ci_low"] <= true[i] / sum(true) <= share["ci_high"]
    assert all(lies_near(list(x), t) for x, t in zip(zip(*estimates, strict=True), true,
                                                     strict=True))  # fmt: skip
    assert (covered / runs >= (0.88 if runs > 50 else 0.7)).all(), covered / runs


def test_what_to_buy_reaches_the_width_and_one_less_does_not() -> None:
    made = {"variances": dict(zip(SOURCES, (0.3, 2.0, 4.0), strict=True)),
            "sizes": dict(zip(SOURCES, (50, 3.0, 2.0), strict=True))}  # fmt: skip

    def variance(**changed: float) -> float:
        r, n, m = ({"rows": 50, "repeats": 3.0, "judge samples": 2.0} | changed).values()
        return (0.3 + (2.0 + 4.0 / m) / n) / r

    for part in (0.95, 0.9):
        for name, number in needed(made, part).items():
            assert number is not None
            assert variance(**{name: number}) <= variance() * part**2 + 1e-12
            assert variance(**{name: number - 1}) > variance() * part**2
    assert needed(made, 0.4) == {"rows": 313, "repeats": None, "judge samples": None}


# -- from records ----------------------------------------------------------------------------------


def record(row: int, rollout: int, score: Score, task: str = "sotopia") -> Record:
    name = f"r{row}"
    return Record(
        key=record_key(0, name, rollout, "draft"), task=task, example_id=name, rollout=rollout,
        kind="draft", episode=Episode(example_id=name, task=task), score=score,
    )  # fmt: skip


def summary_of(records: list[Record], **terms: Any) -> Summary:
    return summarise(records, command="", model="", protocol="", seconds=0, cost=None, **terms)


def test_judges_are_read_from_the_verdicts_of_a_panel() -> None:
    rng, records = np.random.default_rng(1), []
    for row in range(40):
        for rollout in range(3):
            rated = 5 + 2 * rng.normal(size=(2, 2)) + rng.normal()
            verdicts = tuple(
                Verdict(judge=judge, purpose="score", sample=sample,
                        said={"a": rated[j, sample], "b": {"score": rated[j, sample]}, "why": "-"})
                for j, judge in enumerate("xy") for sample in range(2)
            )  # fmt: skip
            value = float(rated.mean()) / 10
            records.append(record(row, rollout, Score(value=value, reward=0, verdicts=verdicts)))
    lost = record(0, 0, unscored(Failure("judge_error")))
    made = summary_of([lost, *records[1:]]).repeats["sotopia"]
    assert made["sizes"] == {"rows": 40, "repeats": 119 / 40, "judge samples": 4.0}
    assert made["variances"]["judge samples"] == pytest.approx(0.04, rel=0.2)  # 2² / 10²
    assert made["variances"]["repeats"] == pytest.approx(0.01, rel=0.9)
    assert "majority vote of 3" not in made["statistics"]
    line = json.loads(json.dumps(summary_of(records).to_json()))
    assert Summary.from_json(line).repeats == line["repeats"] != {}


def test_single_episodes_and_training_have_no_repeats() -> None:
    several = [record(i, j, Score(value=1.0, reward=1.0)) for i in range(3) for j in range(2)]
    assert summary_of(several[::2]).repeats == {} == summary_of(several, training=True).repeats
    assert "repeats" not in summary_of(several[::2]).to_json()


def test_the_table_is_in_the_terminal_on_the_page_and_in_json(tmp_path: Path, capfd: Any) -> None:
    right = oracle("tomi", 6)
    turn = iter(range(10_000))

    def answers(body: dict[str, Any]) -> str:
        return right(body) if next(turn) % 3 else "<answer>Z</answer>"

    with ScriptedServer(answer=answers) as server:
        assert api(server.base_url, tmp_path / "run", "--repeats", 3, "--concurrency", 1) == 0
    out = capfd.readouterr().out
    for name in ("pass@3", "pass^3", "majority vote of 3", "agreeing pairs", "variance between re"):
        assert name in out
    assert max(map(len, out.split("repeats: run")[1].splitlines())) <= 80
    assert soul("report", tmp_path / "run", "--format", "html") == 0
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "<td>pass^3</td>" in page
    capfd.readouterr()
    assert soul("report", tmp_path / "run", "--json") == 0
    shown = json.loads(capfd.readouterr().out)["runs"]["run"]["repeats"]["tomi"]["statistics"]
    assert shown["pass@1"]["mean"] == pytest.approx(2 / 3) and shown["pass@1"]["n_scored"] == 6
