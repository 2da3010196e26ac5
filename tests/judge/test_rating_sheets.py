"""Rating sheets as data: blind cards, attention checks, and orders that balance."""

from __future__ import annotations

import random

from soulkit.judge.rating_sheets import (
    PAIR_SCALE,
    RatingCard,
    RatingScale,
    attention_check,
    blinded,
    exchanged_pairs,
    rater_sheets,
    with_blind_ids,
)
from soulkit.types import Line

GOAL = RatingScale("goal", tuple(str(i) for i in range(-2, 3)), True)
STYLE = RatingScale("style", ("plain", "lively"), False)


def dialogue(example: str = "e", *, pair: bool = False) -> RatingCard:
    lines = (Line("Ana", "Good day to you."), Line("Ben", "And to you."),
             Line("Ana", "one two three four five six seven eight nine ten eleven twelve more"),
             Line("Ben", "Well, goodbye."))  # fmt: skip
    return RatingCard(
        task="talk", cluster=example, example_id=example, setting="Be kind.", seats=("Ana",),
        keys=(f"{example}/0", f"{example}/1") if pair else (f"{example}/0",),
        sides=(lines, lines[:1]) if pair else (lines,),
        scales=(PAIR_SCALE,) if pair else (GOAL, STYLE),
    )  # fmt: skip


def test_a_check_speaks_in_the_last_words_of_whoever_is_rated() -> None:
    check = attention_check(dialogue(), 1, random.Random(0))
    lines = check.sides[0]
    assert [line.seat for line in lines] == ["Ana", "Ben", "Ana", "Ben"]
    assert (lines[0], lines[1], lines[3]) == tuple(dialogue().sides[0][i] for i in (0, 1, 3))
    assert lines[2].text.startswith("one two three") and "twelve …" in lines[2].text
    assert "more" not in lines[2].text
    assert set(check.expected) == {"goal", "style"} and check.keys == ()
    for name, label in check.expected.items():
        assert f"for “{name}” choose {label}" in lines[2].text
    assert check.expected["goal"] in GOAL.labels and check.expected["style"] in STYLE.labels


def test_a_check_on_silence_still_speaks() -> None:
    from dataclasses import replace

    silent = replace(dialogue(), sides=((),), seats=())
    assert "Please answer:" in attention_check(silent, 1, random.Random(0)).sides[0][0].text


def test_half_of_the_pairs_change_sides_and_the_other_half_for_the_next_rater() -> None:
    cards = with_blind_ids([dialogue(f"e{i}", pair=True) for i in range(10)], random.Random(3))
    sheets = rater_sheets(cards, 3, "abcd", 7)
    straight = {card.blind: card.sides for card in cards}
    turned = [{c.blind for c in sheet.cards if c.sides != straight[c.blind]} for sheet in sheets]
    assert len(turned[0]) == 5 and turned[0] == set(exchanged_pairs(cards, 7))
    assert turned[1] == set(straight) - turned[0] and turned[2] == turned[0]
    assert [sheet.name for sheet in sheets] == ["abcd.1", "abcd.2", "abcd.3"]


def test_ids_are_blind_and_tell_the_rows_apart() -> None:
    twice = [dialogue("e1"), dialogue("e1"), dialogue("e2")]
    blind = with_blind_ids(twice, random.Random(5))
    assert len({card.blind for card in blind}) == 3
    assert {len({c.example for c in blind if c.example_id == e}) for e in ("e1", "e2")} == {1}
    assert sorted(c.rollout for c in blind if c.example_id == "e1") == ["1", "2"]
    assert all("e1" not in card.blind and "e2" not in card.blind for card in blind)


def test_names_are_hidden_as_words_in_any_case() -> None:
    assert blinded("Solo, SOLO; soloist", ["solo"]) == "[model], [model]; soloist"


def test_a_scale_knows_its_ends() -> None:
    assert GOAL.ends == (-2.0, 2.0) and STYLE.ends == (0.0, 1.0)
    assert GOAL.grade("-1") == -1.0 and STYLE.grade("plain") == "plain"
