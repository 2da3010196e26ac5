"""From judgements to statements: what is read from a verdict, and what a report says of it."""

from __future__ import annotations

import random

import pytest

from soulkit.judge.pairwise import Ballot
from soulkit.judge.reliability import Judgement, PairJudgement, Reliability, Subject, grades_in
from soulkit.types import Score, Verdict


def judged(key: str, judge: str, sample: int, **grades: float | str) -> Judgement:
    return Judgement(key=key, cluster=key, judge=judge, sample=sample, said=grades, asked=1)


def words(key: str, n: int) -> dict[str, Subject]:
    return {key: Subject(words=n, turns=1)}


def score(fields: dict, purpose: str = "score", value: float | None = 0.5) -> Score:
    return Score(
        value=value, reward=value, verdicts=(Verdict(judge="j", purpose=purpose, said=fields),)
    )


def test_numbers_and_labels_are_read_and_prose_is_not():
    fields = {
        "goal": {"score": 7, "reasoning": "r"}, "secret": {"reasoning": "r", "value": -2},
        "rating": 3, "label": "HUMAN", "safe": True, "reasoning": "because", "quotes": ["a"],
        "nested": {"score": {"score": 3}},
    }  # fmt: skip
    assert grades_in(score(fields)) == {
        "headline": 0.5, "goal": 7.0, "secret": -2.0, "rating": 3.0, "label": "HUMAN",
        "safe": "true",
    }  # fmt: skip


def test_other_questions_are_called_by_their_purpose():
    grades = grades_in(score({"risk_level": "low", "reason": "r"}, purpose="audit"))
    assert grades == {"headline": 0.5, "audit/risk_level": "low"}
    assert grades_in(score({}, value=None)) == {}


def test_levels_follow_from_the_values():
    judgements = [
        judged("a", "j", 0, goal=3.0, risk="low"),
        judged("b", "j", 0, goal=1.0, risk="high"),
    ]
    report = Reliability(judgements, {}).report()
    assert report["dimensions"]["goal"]["level"] == "interval"
    assert report["dimensions"]["risk"]["level"] == "nominal"
    assert "length" not in report["dimensions"]["risk"]


def test_a_judge_is_compared_with_itself_and_missing_opinions_are_left_out():
    judgements = [judged(str(i), "j", s, goal=float(i)) for i in range(8) for s in range(3)]
    judgements[5] = Judgement(
        key="1", cluster="1", judge="j", sample=2, problem="mumbled", asked=1, again=1
    )
    report = Reliability(judgements, {}).report()
    cell = report["dimensions"]["goal"]["retest"]["j"]
    assert (
        cell["n"] == 8
        and cell["alpha"]["value"] == pytest.approx(1)
        and cell["trust"] == "reliable"
    )
    assert cell["icc"]["value"] == pytest.approx(1) and cell["icc"]["n"] == 7
    reading = report["reading"]["j"]
    assert reading["unreadable"]["value"] == 1 / 24 and reading["reasons"] == {"mumbled": 1}
    assert reading["asked_again"] == 1 / 24


def test_two_judges_are_compared_on_what_both_rated():
    judgements = [judged(str(i), "a", 0, goal=float(i)) for i in range(9)]
    judgements += [judged(str(i), "b", 0, goal=float(i) + 2) for i in range(7)]
    between = Reliability(judgements, {}).report()["dimensions"]["goal"]["between"]["a and b"]
    assert between["n"] == 7 and between["mean_gap"]["value"] == 2
    assert between["spearman"]["value"] == pytest.approx(1) and between["exact"]["value"] == 0
    # Shifted by two points: the order is the same, and still they do not agree on the values.
    assert between["alpha"]["value"] < 0.7 and between["icc"]["value"] < 0.75


def test_judges_who_share_nothing_have_no_agreement_and_it_says_so():
    judgements = [judged("x", "a", 0, goal=1.0), judged("y", "b", 0, goal=2.0)]
    between = Reliability(judgements, {}).report()["dimensions"]["goal"]["between"]["a and b"]
    assert between["n"] == 0 and between["alpha"]["value"] is None
    assert between["alpha"]["why"] == "no units" and between["trust"] == "not measurable"


def test_a_judge_who_always_says_the_same_is_not_called_reliable():
    judgements = [judged(str(i), "j", s, goal=7.0) for i in range(9) for s in range(2)]
    cell = Reliability(judgements, {}).report()["dimensions"]["goal"]["retest"]["j"]
    assert cell["exact"]["value"] == 1 and cell["alpha"]["value"] is None
    assert cell["trust"] == "not measurable"


def test_people_are_a_rater_like_any_other():
    subjects = {str(i): Subject(words=i, turns=1, people={"goal": float(i)}) for i in range(8)}
    judgements = [judged(str(i), "j", s, goal=float(i + s)) for i in range(8) for s in (0, 1)]
    cell = Reliability(judgements, subjects).report()["dimensions"]["goal"]["people"]["j"]
    assert cell["n"] == 8 and cell["mean_gap"]["value"] == 0.5  # the judge's mean opinion


@pytest.mark.slow
def test_agreement_between_judges_is_that_of_single_opinions():
    """Means of four opinions agree far better than the single ones that a run scores with."""
    rng = random.Random(0)
    true = {str(i): rng.gauss(0, 1) for i in range(200)}
    judgements = [
        judged(key, judge, s, goal=value + rng.gauss(0, 1))
        for key, value in true.items() for judge in "ab" for s in range(4)
    ]  # fmt: skip
    subjects = {key: Subject(words=1, turns=1, people={"goal": v}) for key, v in true.items()}
    goal = Reliability(judgements, subjects).report()["dimensions"]["goal"]
    between, people = goal["between"]["a and b"], goal["people"]["a"]
    assert between["alpha"]["value"] == pytest.approx(0.5, abs=0.06)  # means of four: 0.8
    assert people["pearson"]["value"] == pytest.approx(0.5**0.5, abs=0.05)
    assert between["n"] == people["n"] == 200
    low, high = between["alpha"]["ci_low"], between["alpha"]["ci_high"]
    assert 0.1 < high - low < 0.25  # whole episodes are drawn, not their eight hundred opinions


def test_what_rules_decided_says_nothing_about_a_judge():
    """Silent actors score the minimum, whoever judges: that is no agreement of judges."""
    judgements = [
        judged(str(i), "j", s, goal=float((i + s) % 2)) for i in range(10) for s in (0, 1)
    ]
    alone = Reliability(judgements, {}).report()
    silent = [
        Judgement(key=f"s{i}", cluster="c", judge="j", sample=s) for i in (1, 2) for s in (0, 1)
    ]
    mixed = Reliability([*judgements, *silent], {}).report()
    assert mixed["dimensions"] == alone["dimensions"] and mixed["reading"] == alone["reading"]
    assert (mixed["episodes"], mixed["by_rules"]) == (10, 2)


def test_labels_that_spell_numbers_count_and_others_are_counted_out():
    labels = {str(i): str(i) for i in range(8)} | {"8": "n/a", "9": "inf"}
    subjects = {
        k: Subject(words=1, turns=1, people={"goal": v, "gaol": 1.0}) for k, v in labels.items()
    }
    judgements = [judged(key, "j", 0, goal=float(key)) for key in labels]
    report = Reliability(judgements, subjects).report()
    cell = report["dimensions"]["goal"]["people"]["j"]
    assert cell["n"] == 8 and cell["exact"]["value"] == 1 and cell["no_numbers"] == 2
    assert report["unmatched_labels"] == ["gaol"]


def test_length_that_only_follows_turns_is_seen_through():
    subjects, judgements = {}, []
    for i in range(60):
        turns = 1 + i % 6
        subjects[str(i)] = Subject(words=100 * turns + (i * 37) % 90, turns=turns)
        judgements.append(judged(str(i), "j", 0, goal=float(turns)))
    length = Reliability(judgements, subjects).report()["dimensions"]["goal"]["length"]["j"]
    assert length["spearman"]["value"] > 0.9
    assert length["at_equal_turns"]["value"] is None  # the turns explain every point
    assert length["points_per_100_words"]["value"] == pytest.approx(1, abs=0.1)


def test_position_counts_flips_and_the_first_place():
    def pair(i: int, one: str, two: str) -> PairJudgement:
        ballots = (Ballot("j", 0, True, one), Ballot("j", 0, False, two))  # type: ignore[arg-type]
        flip = ballots[0].value != ballots[1].value
        return PairJudgement(key=f"{i}", cluster=f"{i}", judge="j", ballots=ballots, flips=(flip,))

    matches = [pair(0, "A", "B"), pair(1, "A", "A"), pair(2, "Tie", "Tie"), pair(3, "B", "Tie")]
    matches.append(PairJudgement(key="4", cluster="4", judge="j", problem="mumbled"))
    report = Reliability([judged("x", "j", 0, goal=1.0)], {}, matches).report()["position"]["j"]
    assert report["pairs"] == 5 and report["unreadable"] == 1
    assert report["flips"]["value"] == 0.5 and report["flips"]["n"] == 4
    assert report["prefers_first"]["value"] == 3 / 5  # A A A of A B, A A, B
