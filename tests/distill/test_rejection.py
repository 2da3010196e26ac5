"""Which samples are learned from: the rules alone, without files."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.data.contamination import Passage, shingles
from soulkit.distill.near import near_pairs, row_matches
from soulkit.distill.rejection import Choice, Rules, Sampled, choose_samples, passing, sampled
from soulkit.metrics.diversity import jaccard
from soulkit.types import Completion, Episode, Feedback, Record, Score, Trace, Turn

YES_NO = Rules(high=1.0, low=0.0, binary=True)
GRADED = Rules(high=1.0, low=0.0, binary=False)


def one(row: str, rollout: int, reward: float | None = 1.0, **facts: Any) -> Sampled:
    """A sample; unless told otherwise its reply is like no other's."""
    plain: dict[str, Any] = {"replies": (f"{row}", f"{rollout}"), "tokens": 5}
    return Sampled(f"0/{row}/{rollout}/draft", row, reward, **(plain | facts))


def keys(choice: Choice) -> list[str]:
    return [sample.key for sample in choice.taken]


def test_full_reward_where_a_score_is_yes_or_no() -> None:
    samples = [one("a", 0, 0.0), one("a", 1, 1.0), one("b", 0, 0.5)]
    assert [s.key for s in passing(samples, YES_NO)] == ["0/a/1/draft"]


def test_graded_rewards_must_rise_above_their_prompt() -> None:
    samples = [
        one("hard", 0, 0.1), one("hard", 1, 0.3),
        one("easy", 0, 0.8), one("easy", 1, 0.9), one("easy", 2, 1.0),
        one("flat", 0, 0.2), one("flat", 1, 0.2), one("high", 0, 0.7), one("low", 0, 0.0),
    ]  # fmt: skip
    passed = {s.key for s in passing(samples, GRADED)}
    assert passed == {"0/hard/1/draft", "0/easy/2/draft", "0/high/0/draft"}
    assert len(passing(samples, replace(GRADED, min_reward=0.2))) == 7
    nothing = [one("a", 0, 0.0), one("b", 0, 0.0)]
    assert passing(nothing, GRADED) == []  # all alike, and the least there is


def test_the_best_of_a_prompt_in_the_order_that_is_written_down() -> None:
    samples = [
        one("a", 0, 0.9, tokens=9), one("a", 1, 0.9, tokens=3), one("a", 2, 0.8, tokens=1),
        one("a", 3, 0.9, tokens=3), one("a", 4, 0.9, tokens=1, salvaged=True),
    ]  # fmt: skip
    rules = replace(GRADED, min_reward=0.5, keep_top=3)
    assert keys(choose_samples(samples, rules)) == ["0/a/1/draft", "0/a/3/draft", "0/a/0/draft"]


def test_a_quota_is_spread_over_prompts() -> None:
    samples = [one(row, n) for row in "abcdef" for n in range(3)]
    rules = replace(YES_NO, keep_top=3, quota=4)
    choice = choose_samples(samples, rules)
    assert len(choice.taken) == 4 and len({s.example_id for s in choice.taken}) == 4
    others = choose_samples(samples, replace(rules, seed=1))
    assert {s.example_id for s in others.taken} != {s.example_id for s in choice.taken}
    assert len(choose_samples(samples, replace(rules, quota=None)).taken) == 18


def test_duplicates_of_a_prompt_and_of_its_like() -> None:
    words = ("the", "cat", "sat", "on", "the", "mat", "and", "then", "it", "slept", "for", "hours")
    near = (*words[:-1], "days")
    samples = [
        one("a", 0, replies=words), one("a", 1, replies=words), one("a", 2, replies=near),
        one("a", 3, replies=("no",)), one("b", 0, replies=words), one("c", 0, replies=words),
    ]  # fmt: skip
    choice = choose_samples(samples, replace(YES_NO, keep_top=4), alike={"a": ["b"], "b": ["a"]})
    rows = sorted(s.example_id for s in choice.taken)
    assert choice.duplicates == 3 and rows.count("c") == 1
    assert rows.count("a") + rows.count("b") == 2  # the words once, and "no"
    exact = choose_samples(samples, replace(YES_NO, keep_top=4, near=1.0), alike={"a": ["b"]})
    assert any(s.replies == near for s in exact.taken)


def test_overlapping_rows_are_never_taken() -> None:
    choice = choose_samples([one("a", 0), one("b", 0), one("b", 1)], YES_NO, overlapping={"b"})
    assert keys(choice) == ["0/a/0/draft"] and choice.overlaps == 2 and choice.passed == 1


@given(st.integers(0, 10_000))
def test_the_order_of_samples_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    samples = [
        one(row, n, rng.choice([None, 0.0, 0.4, 1.0]), replies=(rng.choice("xyz"),) * 2)
        for row in "abcd" for n in range(4)
    ]  # fmt: skip
    rules = replace(GRADED, keep_top=rng.choice([1, 2]), quota=rng.choice([None, 3]))
    alike = {"a": ["b"], "b": ["a"]}
    first = choose_samples(samples, rules, alike=alike)
    rng.shuffle(samples)
    assert choose_samples([*samples, samples[0]], rules, alike=alike) == first


# -- what is known of a record --------------------------------------------------------------------


def record(score: Score, *texts: str, stop: str = "stop", **facts: Any) -> Record:
    turns = tuple(Turn((), Completion(text=t, token_ids=(1, 2), stop_reason=stop)) for t in texts)
    episode = Episode(example_id="a", task="t", traces=(Trace("reader", turns),))
    return Record(
        key="0/a/0/draft", task="t", example_id="a", rollout=0, kind="draft", episode=episode,
        score=score, **facts,
    )  # fmt: skip


FULL = Score(value=1.0, reward=1.0)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (record(FULL, "yes"), ""),
        (record(replace(FULL, status="salvaged"), "yes"), ""),
        (record(replace(FULL, value=None, reward=None, status="unscored"), "yes"), "unscored"),
        (record(replace(FULL, reward=None), "yes"), "unscored"),
        (record(replace(FULL, reward=float("nan")), "yes"), "unscored"),
        (record(replace(FULL, status="forged"), "yes"), "forged"),
        (record(replace(FULL, status="hacked"), "yes"), "hacked"),
        (record(replace(FULL, metrics={"hacked": 1.0}), "yes"), "hacked"),
        (record(replace(FULL, status="truncated"), "yes"), "truncated"),
        (record(FULL, "yes", stop="length"), "truncated"),
        (record(replace(FULL, status="refusal"), "yes"), "refusal"),
        (record(FULL), "empty"),
        (record(FULL, "yes", given=Feedback(text="try again", author="symbolic")), "conditioned"),
    ],
)
def test_what_is_never_learned_from(line: Record, fault: str) -> None:
    known_facts = sampled(line)
    assert known_facts.fault == fault
    assert (known_facts.reward is None) == bool(fault)
    assert choose_samples([known_facts], YES_NO).passed == (not fault)


def test_replies_of_signs_alone_differ() -> None:
    assert sampled(record(FULL, "?!")).replies != sampled(record(FULL, "...")).replies
    assert sampled(record(FULL, "Yes, sir.", "No")).replies == ("yes", "sir", "no")
    assert sampled(record(FULL, "a", "b")).tokens == 4


# -- near texts ------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.sampled_from([0.3, 0.5, 0.8, 0.95, 1.0]))
def test_no_near_pair_is_missed(seed: int, threshold: float) -> None:
    rng = random.Random(seed)
    texts = [tuple(rng.choices("abcd", k=rng.randrange(12))) for _ in range(24)]
    left, right = texts[:14], texts[8:]
    every = {
        (i, j): jaccard(shingles(a), shingles(b))
        for i, a in enumerate(left) for j, b in enumerate(right)
        if a and b and jaccard(shingles(a), shingles(b)) >= threshold
    }  # fmt: skip
    assert {(i, j): share for i, j, share in near_pairs(left, right, threshold)} == every


def passage(source: str, text: str, core: str = "") -> Passage:
    words = tuple(text.split())
    return Passage(source, "t", words, tuple(core.split()) or words, frozenset())


def test_the_same_persona_with_another_question_is_another_row() -> None:
    persona = " ".join(f"word{n}" for n in range(60))
    rows = [passage("1", f"{persona} how do you take your tea", "how do you take your tea")]
    others = [
        passage("2", f"{persona} do you like tea at all", "do you like tea at all"),
        passage("3", f"{persona} how do you take your tea today", "how do you take your tea today"),
        passage("4", f"{persona} how do you take your tea", "how do you take your tea"),
    ]
    matches = [(place, match.kind) for place, match in row_matches(rows, others, 0.75)[0]]
    assert matches == [(2, "exact"), (1, "near")]
