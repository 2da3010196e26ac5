"""Features of a customer's talk, by hand; what needs a word list is None without one."""

from __future__ import annotations

import re

import pytest

from soulkit.tasks.tau_usi.features import (
    DIMENSIONS,
    LISTED,
    of_model,
    of_person,
    talk_features,
    without_markup,
)

LEXICONS = {
    "politeness_rate": r"\b(please|thanks)\b",
    "ack_only_rate": r"^(ok|yes)[\s.!]*$",
    "id_confuse_rate": r"how can i help",
    "id_density": r"#\w+",
    "uncertainty_rate": r"\bmaybe\b",
    "certainty_rate": r"\bdefinitely\b",
    "pushback_q_rate": r"are you sure",
    "clarify_q_rate": r"what do you mean",
    "info_q_rate": r"how much",
    "emotion_rate": r"\bangry\b",
    "accusation_rate": r"\bfault\b",
    "pivot_rate": r"\binstead\b",
}
COMPILED = {name: re.compile(text) for name, text in LEXICONS.items()}


def test_the_shape_of_a_talk() -> None:
    talk = ["hello there my friend", "ok", "one two three four five \u2014 six"]
    measured = talk_features(talk, {})
    assert measured["short_msg_rate"] == pytest.approx(1 / 3)
    assert measured["formality_rate"] == pytest.approx(1 / 3)
    assert measured["user_words_per_turn"] == 4
    assert measured["opening_words"] == 4
    assert measured["info_frontload"] == pytest.approx(5 / 12)
    # words 4, 1, 7: variance (0 + 9 + 9) / 3 = 6
    assert measured["verbosity_cv"] == pytest.approx(6**0.5 / 4)
    assert measured["repeat_rate"] == 0
    assert {name for name, value in measured.items() if value is None} == set(LISTED)
    assert set(measured) == {name for names in DIMENSIONS.values() for name in names}


def test_three_words_in_a_row_eleven_times_are_repetition() -> None:
    assert talk_features(["I want this"] * 10, {})["repeat_rate"] == 0
    assert talk_features(["I want this"] * 11, {})["repeat_rate"] == 1


def test_rates_are_shares_of_turns_in_any_case() -> None:
    talk = ["PLEASE help, thanks #A1 and #B2", "Yes!", "maybe #c3 instead", "yes it is your FAULT"]
    rates = talk_features(talk, COMPILED)
    assert rates["politeness_rate"] == 0.25
    assert rates["ack_only_rate"] == 0.25
    assert rates["id_density"] == 0.75
    assert rates["uncertainty_rate"] == rates["pivot_rate"] == rates["accusation_rate"] == 0.25
    assert rates["certainty_rate"] == rates["emotion_rate"] == 0


def test_a_turn_is_one_kind_of_question_and_pushing_back_goes_first() -> None:
    talk = ["are you sure? what do you mean, how much?", "what do you mean, how much", "how much?"]
    rates = talk_features(talk, COMPILED)
    assert [rates[q] for q in ("pushback_q_rate", "clarify_q_rate", "info_q_rate")] == [1 / 3] * 3
    two = {name: p for name, p in COMPILED.items() if name != "pushback_q_rate"}
    assert talk_features(talk, two)["info_q_rate"] is None


def test_falling_out_of_the_role_counts_once_a_conversation() -> None:
    assert talk_features(["How can I help you?", "a", "b"], COMPILED)["id_confuse_rate"] == 1
    assert talk_features(["help me"], COMPILED)["id_confuse_rate"] == 0


def test_nothing_said_has_no_features_and_blank_turns_divide_by_nothing() -> None:
    assert talk_features([], COMPILED) == {}
    assert talk_features(["<|think|>a b<|/think|>"], {})["verbosity_cv"] == 0


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("a<|think|>b c<|/think|>d", "ad"),
        ("say <function=f><parameter=k>v</parameter></function> it", "say  it"),
        ("say <function=f> and so on", "say "),
        ("<|tool|>x<|/tool|> y <|tool|>z<|/tool|>", " y "),
        ("open <|think|> stays", "open <|think|> stays"),
    ],
)
def test_markup_is_no_word(text: str, plain: str) -> None:
    assert without_markup(text) == plain


def test_messages_that_belong_to_no_talk() -> None:
    for message in ("\\tau 3", "\\reward", "/stop", "look <|survey|>"):
        assert not of_person(message)
    assert of_person("please /stop it")
    assert not of_model(" ###STOP### ") and of_model("thanks ###STOP###")
