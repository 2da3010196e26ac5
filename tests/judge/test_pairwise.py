"""Which of two, in both orders or one, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from soulkit.errors import UnreadableVerdict
from soulkit.judge.pairwise import PairOutcome, judge_pair
from soulkit.models.base import Panel
from soulkit.types import Episode
from tests.support.road import run
from tests.support.servers.openai_server import Body
from tests.support.table import said, table

EPISODE = Episode(example_id="e1", task="t", rollout=2)


def prompt(first: bool) -> str:
    a, b = ("mine", "theirs") if first else ("theirs", "mine")
    return f"A: {a} B: {b}"


def says(verdict: str) -> str:
    return json.dumps({"reasoning": "r", "verdict": verdict})


def asked(
    *answers: Callable[[Any], str] | str, episode: Episode = EPISODE, **panel: Any
) -> PairOutcome:
    """What judges with these answers make of the pair."""

    def judge(body: Body) -> str:
        return said(answers[int(body["model"].removeprefix("judge-"))], body)

    with table(judge=judge, judges=len(answers), panel=Panel(**panel)) as (cast, _):
        outcome: PairOutcome = run(cast, judge_pair(cast, episode, prompt))
        return outcome


def fair(body: Any) -> str:
    return says("A" if "A: mine" in body["messages"][0]["content"] else "B")


def test_a_fair_judge_gives_one_side_the_point_in_both_orders():
    outcome = asked(fair)
    assert outcome.value == 1 and outcome.position_flip == 0
    assert [v.purpose for v in outcome.verdicts] == ["pairwise_first", "pairwise_second"]
    assert [b.verdict for b in outcome.ballots] == ["A", "B"]


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_judge_who_looks_at_the_position_gives_half_a_point_and_flips(side):
    outcome = asked(says(side))
    assert outcome.value == 0.5 and outcome.position_flip == 1


def test_a_tie_is_half_a_point_and_no_flip():
    outcome = asked(says("Tie"))
    assert outcome.value == 0.5 and outcome.position_flip == 0


def test_an_ensemble_is_averaged_and_its_flips_are_a_share():
    outcome = asked(fair, says("A"))
    assert outcome.value == 0.75 and outcome.position_flip == 0.5
    assert {b.judge for b in outcome.ballots} == {"judge-0", "judge-1"}


def test_a_vote_takes_the_commonest_of_each_order():
    assert asked(fair, fair, says("B"), combine="vote").value == 1


def test_one_drawn_order_knows_nothing_of_flips_and_is_the_same_every_time():
    first = asked(fair, orders="seeded")
    assert first.value == 1 and first.position_flip is None and len(first.ballots) == 1
    sides = [
        asked(fair, episode=Episode(example_id=f"e{i}", task="t"), orders="seeded").ballots[0].first
        for i in range(12)
    ]
    assert set(sides) == {True, False}
    assert asked(fair, orders="seeded") == first


def test_repeated_opinions_are_compared_sample_by_sample():
    outcome = asked(fair, samples=3)
    assert len(outcome.ballots) == 6 and len(outcome.flips) == 3


@pytest.mark.parametrize("word", ["C", "a", "tie"])
def test_another_word_is_no_verdict(word):
    with pytest.raises(UnreadableVerdict):
        asked(says(word))
