"""The index by hand: similarity, calibration, survey, batches, runs.

Features of a customer's talk, by hand; what needs a word list is None without one.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace

import pytest

from soulkit.tasks.tau_usi.index import (
    DIMENSIONS,
    LISTED,
    SURVEY,
    MeasuredTalk,
    answer_agreement,
    bin_of,
    calibration_error,
    feature_row,
    is_customer_message,
    is_persons_message,
    ordinal,
    read_answers,
    similarity,
    simulation_index,
    split_runs,
    survey_agreement,
    talk_features,
    task_of,
    without_markup,
)

EVERY = [name for names in DIMENSIONS.values() for name in names]
BEST = {key: max(options, key=lambda o: options[o]) for key, options in SURVEY.items()}
WORST = {key: min(options, key=lambda o: options[o]) for key, options in SURVEY.items()}


def talk(value: float = 0.5, success: bool = True, **features: float) -> MeasuredTalk:
    return MeasuredTalk({**dict.fromkeys(EVERY, value), **features}, success)


def test_similarity_is_twice_the_smaller_over_the_sum() -> None:
    assert similarity(1, 3) == 0.5
    assert similarity(0, 0) == 1
    assert similarity(0, 2) == 0
    assert similarity(-1, 3) == 0.5


def test_a_row_holds_shares_in_percent_and_the_rest_as_it_is() -> None:
    row = feature_row([talk(0.25), talk(0.75)])
    assert row["politeness_rate"] == 50 and row["info_frontload"] == 50
    assert row["verbosity_cv"] == row["opening_words"] == row["id_density"] == 0.5
    assert "emotion_rate" not in feature_row([MeasuredTalk({"emotion_rate": None}, True)])


def test_cut_offs_belong_to_the_bin_above() -> None:
    assert [bin_of(x) for x in (0, 0.19, 0.2, 0.4, 0.6, 0.79, 0.8, 1)] == [0, 0, 1, 2, 3, 3, 4, 4]


def test_calibration_weighs_the_bins_by_their_tasks() -> None:
    # Bin 0 has a, b: simulated 1/2, people 0. Bin 4 has c: simulated 0, people 1. e is in no map.
    model = {"a": True, "b": False, "c": False, "e": True}
    people = {"a": False, "b": False, "c": True, "e": False}
    difficulty = {"a": 0.1, "b": 0.15, "c": 0.9, "d": 0.5}
    assert calibration_error(model, people, difficulty) == pytest.approx(2 / 3 * 0.5 + 1 / 3)
    assert calibration_error({"e": True}, people, difficulty) is None


def test_answers_lie_on_the_scale_of_their_question() -> None:
    assert ordinal("efficiency", "Somewhat inefficient") == pytest.approx(1 / 3)
    assert ordinal("question_amount_preference", "Too few") == 0
    assert ordinal("efficiency", "somewhat inefficient") is None
    assert ordinal("reuse", None) is None


def test_agreement_is_over_what_the_person_answered() -> None:
    rng = random.Random(42)
    assert answer_agreement(BEST, BEST, rng) == 100
    assert answer_agreement(WORST, BEST, rng) == pytest.approx(0)
    assert answer_agreement({"reuse": "Yes"}, {"reuse": "Maybe"}, rng) == pytest.approx(75)
    assert answer_agreement({}, BEST, rng) is None


def test_an_answer_that_is_missing_is_drawn_and_the_draw_is_always_the_same() -> None:
    batch = {"retail_1": replace(talk(), answers=BEST), "retail_2": replace(talk(), answers=WORST)}
    silent: dict[str, dict[str, str]] = {"retail_1": {}, "retail_2": {}}
    first = survey_agreement([batch], [silent])
    assert first == survey_agreement([batch], [silent])
    assert first is not None and 0 < first < 100
    assert survey_agreement([batch, {}], [{"retail_1": BEST}, {}]) == 100


def test_people_against_themselves_are_at_a_hundred() -> None:
    people = {"retail_1": talk(0.3, True), "airline_4": talk(0.8, False)}
    result = simulation_index([people], [people] * 3, {"retail_1": 0.9, "airline_4": 0.1})
    assert result is not None
    assert (result.usi, result.spread, result.ece, result.tasks) == (100, 0, 0, 2)
    assert set(result.dimensions.values()) == {100}


def test_the_index_is_the_mean_of_its_terms_and_then_of_the_batches() -> None:
    # One task. The model shows every feature at 1; batch one at 3 (similarity 1/2), batch two at 1.
    model, difficulty = {"retail_1": talk(1, success=True)}, {"retail_1": 0.5}
    batches = [{"retail_1": talk(3, success=True)}, {"retail_1": talk(1, success=False)}]
    result = simulation_index([model], batches, difficulty)
    assert result is not None
    assert result.dimensions == dict.fromkeys(DIMENSIONS, 75)
    first, second = (4 * 50 + 100) / 5, (4 * 100 + 0) / 5
    assert result.usi == pytest.approx((first + second) / 2)
    assert result.spread == pytest.approx(abs(first - second) / 2)
    assert result.ece == 0.5
    with_survey = simulation_index([model], batches, difficulty, survey=40)
    assert with_survey is not None
    assert with_survey.usi == pytest.approx(((4 * 50 + 100 + 40) / 6 + (4 * 100 + 40) / 6) / 2)


def test_only_tasks_on_both_sides_count() -> None:
    model = {"retail_1": talk(1), "retail_9": talk(50)}
    people = {"retail_1": talk(1), "retail_2": talk(70)}
    result = simulation_index(
        [model], [people], {"retail_1": 0.5, "retail_2": 0.5, "retail_9": 0.5}
    )
    assert result is not None and (result.usi, result.tasks) == (100, 1)


def test_without_a_feature_a_task_or_a_difficulty_there_is_no_index() -> None:
    people = {"retail_1": talk(1)}
    lacking = {"retail_1": talk(1, emotion_rate=None)}  # type: ignore[arg-type]
    assert simulation_index([lacking], [people], {"retail_1": 0.5}) is None
    assert simulation_index([{"retail_2": talk(1)}], [people], {"retail_1": 0.5}) is None
    assert simulation_index([people], [people], {"retail_7": 0.5}) is None


def test_rows_of_runs_are_averaged_and_so_are_their_errors() -> None:
    runs = [{"retail_1": talk(1, success=True)}, {"retail_1": talk(3, success=False)}]
    people, difficulty = {"retail_1": talk(2, success=True)}, {"retail_1": 0.5}
    result = simulation_index(runs, [people], difficulty)
    assert result is not None
    assert result.dimensions == dict.fromkeys(DIMENSIONS, 100)  # the mean row is people's
    assert result.ece == 0.5


def test_many_conversations_are_several_runs() -> None:
    few = {f"retail_{i}_{run}": talk() for i in range(20) for run in (1, 2, 3)}
    assert split_runs(few) == [few]
    many = {f"retail_{i}_{run}": talk(run) for i in range(60) for run in (1, 2, 3)}
    runs = split_runs(many)
    assert [len(run) for run in runs] == [60, 60, 60]
    assert set(runs[2]) == {f"retail_{i}" for i in range(60)}
    assert runs[2]["retail_5"].features["emotion_rate"] == 3


def test_task_of_an_instance() -> None:
    assert task_of("retail_12_3") == task_of("retail_12") == "retail_12"
    assert task_of("tool_library_7") == "tool_library_7"
    assert task_of("odd") == "odd"


def test_answers_are_read_from_the_last_object_that_has_any() -> None:
    text = 'Sure: {"efficiency": "About right"} or rather {"efficiency": "Very efficient", "x": 1}'
    assert read_answers(text) == {"efficiency": "Very efficient"}
    assert read_answers('{"efficiency": "very efficient"}') == {}
    assert read_answers('{"efficiency": "About right"') == {}
    assert read_answers("I liked it") == {}
    assert read_answers('<think>{"reuse": "No"}</think>') == {}


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


@pytest.mark.parametrize("part", ["<function=f></function>", "<|think|><|/think|>", "<|tool|>"])
def test_megabytes_of_markup_are_read_at_once(part: str) -> None:
    started = time.process_time()
    assert len(without_markup(part * 200_000)) in (0, len(part) * 200_000)
    assert time.process_time() - started < 5  # a copy of the rest for each would take a minute


def test_messages_that_belong_to_no_talk() -> None:
    for message in ("\\tau 3", "\\reward", "/stop", "look <|survey|>"):
        assert not is_persons_message(message)
    assert is_persons_message("please /stop it")
    assert not is_customer_message(" ###STOP### ") and is_customer_message("thanks ###STOP###")
