"""HumanLLM under the paper protocol; the reference protocol has its vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.types import Feedback, Score
from tests.support.road import score_text, synth_examples, task_of
from tests.tasks.humanllm.reference import reformat_history

THINGS = [f"thing number {i}" for i in range(20)]
ROW: dict[str, Any] = {
    "prompt_text": "A baker. History 4: a broom, History 9: soap; History 11: a mop\n"
    "Candidate 1: thing number 0 Candidate 2: thing number 1\nWhich is next?",
    "candidates": THINGS,
    "answer_index": 2,
    "answer_letter": "C",
}


def score(text: str, stop: str = "stop", protocol: str = "paper", **changes: Any) -> Score:
    task = task_of("humanllm", protocol)
    return score_text(task, task.example({**ROW, **changes}), text, stop)


@pytest.mark.parametrize(
    ("answer", "value", "hit", "top"),
    [
        ("C,A,B,D,E", 1.0, 1.0, 1.0),
        ("A,C,B,D,E", 0.5, 1.0, 0.0),
        ("A,B,C,D,E", 1 / 3, 1.0, 0.0),
        ("A,B,D,C,E", 0.25, 1.0, 0.0),
        ("A,B,D,E,C", 0.2, 1.0, 0.0),
        ("A,B,D,E,F", 0.0, 0.0, 0.0),
    ],
)
def test_the_score_is_one_over_the_rank(answer: str, value: float, hit: float, top: float) -> None:
    grade = score(f"Hm. <answer>{answer}</answer>")
    assert grade.value == grade.reward == pytest.approx(value)
    assert (grade.status, grade.words) == ("ok", answer)
    assert grade.metrics == {"hit@5": hit, "top1_acc": top}


@pytest.mark.parametrize(
    "inside",
    [
        "C, H, P, E, Q", " C,H,P,E,Q ", "c,h,p,e,q", "C;H;P;E;Q", "**C,H,P,E,Q**", "C，H，P，E，Q",
        "[C, H, P, E, Q]", "C H P E Q", "C > H > P > E > Q", "C.\nH.\nP.\nE.\nQ.",
        "1. C\n2. H\n3. P\n4. E\n5. Q", "C. thing\nH. thing\nP. thing\nE. thing\nQ. thing",
        "(C), (H), (P), (E), (Q)", "**C**, **H**, **P**, **E**, **Q**", "C,H,P,E,Q,", "`C,H,P,E,Q`",
    ],
)  # fmt: skip
def test_rankings_that_can_be_read_all_the_same(inside: str) -> None:
    grade = score(f"<answer>{inside}</answer>")
    assert (grade.value, grade.words) == (1.0, "C,H,P,E,Q")
    assert grade.status == ("ok" if inside.strip() == "C,H,P,E,Q" else "salvaged")


@pytest.mark.parametrize(
    "inside",
    ["C", "C,H,P,E", "C,H,P,E,Q,D", "C,C,P,E,Q", "C,H,P,E,U", "3,1,13,2,11", "",
     "a teapot, some shoes, the hub, my lamp, one mat", "thing number 2", "X1,X2,X3,X4,X5",
     "C,H,P and then,E,Q"],
)  # fmt: skip
def test_what_is_no_ranking_of_five(inside: str) -> None:
    grade = score(f"<answer>{inside}</answer>")
    assert (grade.value, grade.status, grade.words) == (0.0, "malformed", "")
    assert grade.metrics == {"hit@5": 0.0, "top1_acc": 0.0}


def test_letters_beyond_the_candidates_rank_nothing() -> None:
    few = {"candidates": THINGS[:6]}
    assert score("<answer>C,A,B,D,F</answer>", **few).value == 1
    for protocol in ("paper", "reference"):
        grade = score("<answer>C,A,B,D,G</answer>", protocol=protocol, **few)
        assert (grade.value, grade.status) == (0.0, "malformed")


def test_the_reference_wants_five_different_letters() -> None:
    grade = score("<answer>C,C,P,E,Q</answer>", protocol="reference")
    assert (grade.value, grade.status) == (0.0, "malformed")


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"candidates": None}, {"candidates": []}, {"candidates": THINGS[:4]},
        {"candidates": [*THINGS, "one more"]}, {"answer_index": None}, {"answer_index": -1},
        {"answer_index": 20}, {"prompt_text": None}, {"prompt_text": "  "},
        {"prompt_text": None, "conversations": [{"messages": []}]},
        {"prompt_text": None, "conversations": "[no list"},
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        task_of("humanllm").example({**ROW, **changes})


def test_a_prompt_may_stand_in_a_conversation() -> None:
    task = task_of("humanllm")
    conversation = [{"messages": [{"role": "user", "content": ROW["prompt_text"]}]}]
    plain = task.example(ROW).id
    for form in (conversation, json.dumps(conversation)):
        row = {**ROW, "prompt_text": None, "conversations": form}
        assert task.example(row).id == plain


def test_history_and_candidates_are_shown_once_and_what_follows_them_is_dropped() -> None:
    task = task_of("humanllm")
    text = task.preview(task.example(ROW))[0].text
    assert "A baker.\n" in text and "1. a broom\n2. soap\n3. a mop\n" in text
    assert "A: thing number 0\n" in text and "T: thing number 19\n" in text
    assert text.count("thing number 0") == 1 and "Which is next?" not in text
    assert "History" not in text and "Candidate" not in text


def test_a_row_without_history() -> None:
    task = task_of("humanllm")
    example = task.example({**ROW, "prompt_text": "A baker who is new here."})
    assert "got so far" not in task.preview(example)[0].text
    assert example.tags["history"] == "none"
    assert "hardly any purchases" in task.explain(example, None, None)


def test_a_long_history_loses_its_oldest_entries() -> None:
    task = task_of("humanllm")
    past = ", ".join(f"History {i}: {'very ' * 9}old thing{i}" for i in range(500))
    episode = task.gold(task.example({**ROW, "prompt_text": f"A baker. {past}"}))
    text = episode.traces[0].turns[0].context[0].text
    assert "thing499" in text and "thing0\n" not in text
    assert 2400 <= episode.notes["cut_words"]["history"] <= 2700
    assert text.endswith("<answer>D,A,E,C,B</answer>.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", "x"),
        ("History 7: a; History2: b ,", "History 1: a\nHistory 2: b"),
        ("A cook.\n\nHistory 1: a\nb", "A cook.\nHistory 1: a\nb"),
    ],
)
def test_history_on_lines_of_its_own(text: str, expected: str) -> None:
    assert reformat_history(text) == expected


# -- feedback ------------------------------------------------------------------------------------


def test_feedback_names_nothing_on_offer_and_fits_the_draft() -> None:
    task = task_of("humanllm")
    for example in synth_examples("humanllm", 12):
        gold, wrong = task.gold_completion(example), task.wrong_completion(example)
        second = "<answer>" + ",".join([wrong[8], gold[8], *wrong[10:15].split(",")]) + "</answer>"
        texts = []
        for draft in (gold, second, wrong, "mute", "<answer>A</answer>"):
            grade = score_text(task, example, draft)
            texts.append(task.explain(example, None, grade))
        for text in (*texts, task.explain(example, None, None)):
            feedback = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(example))
            assert not feedback.leak and feedback.blind <= feedback.chance, text
        assert len(set(texts)) == 5


def test_feedback_stands_after_everything_else() -> None:
    task = task_of("humanllm")
    segment = task.context(task.example(ROW), Feedback(text="Mind the days.", author="x"))[0]
    assert segment.bare and segment.text.startswith(segment.bare)
    assert segment.text.endswith("Mind the days.")
