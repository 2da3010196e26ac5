"""Made rows of choice tasks: varied, and solvable from the row itself."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from soulkit.tasks.alignx import task as alignx
from soulkit.tasks.humanllm import task as humanllm
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.lifechoices import task as lives
from soulkit.tasks.mistakes import task as pupils
from soulkit.tasks.mmtom import task as mmtom
from soulkit.tasks.social_r1 import task as scenes
from soulkit.tasks.social_r1.task import split_prompt
from soulkit.tasks.socsci210 import task as socsci210
from tests.support.road import synth, synth_examples, task_of


@pytest.mark.parametrize("name", ["social_r1", "lifechoices", "mistakes"])
def test_no_letter_is_a_good_guess(name: str) -> None:
    letters = Counter(task_of(name).gold_letter(e) for e in synth_examples(name, 200))
    assert min(letters[x] for x in "ABC") > 30


@pytest.mark.parametrize(
    ("split", "kinds"),
    [
        ("demo", {("demographic",)}),
        ("pair", {("icl_pairs",)}),
        ("ugc", {("ugc",)}),
        ("history16", {("icl_pairs", "ugc")}),
    ],
)
def test_a_split_shows_its_kind_of_evidence(split: str, kinds: set[tuple[str, ...]]) -> None:
    rows = synth(f"alignx_{split}", 30, 0)
    names = ("demographic", "icl_pairs", "ugc")
    assert {tuple(k for k in names if k in row) for row in rows} == kinds
    if split == "history16":
        assert all(row["n_icl"] + row["n_ugc"] == 16 for row in rows)
        assert all(len(row["icl_pairs"]) + len(row["ugc"]) == 16 for row in rows)


def test_the_arbitrary_split_has_every_mixture() -> None:
    live = load_registry().task("alignx_arbitrary")
    mixtures = Counter(
        live.example(row).tags["evidence"] for row in synth("alignx_arbitrary", 100, 0)
    )
    assert len(mixtures) == 7 and "none" not in mixtures


def ends(reply: str, post: str) -> set[tuple[int, int]]:
    """The (axis, end) whose reply to `post` this is."""
    topic = next(t for t in alignx.all_posts() if t.post == post)
    return {
        (i, j)
        for i, axis in enumerate(alignx.axes())
        for j, taste in enumerate(axis)
        if taste.answer(topic) == reply
    }


@pytest.mark.parametrize("task", alignx.TASKS)
def test_the_evidence_of_a_row_decides_it(task: str) -> None:
    for row in synth(task, 60, 1):
        ((axis, end),) = ends(row["chosen"], row["raw_prompt"])
        assert ends(row["rejected"], row["raw_prompt"]) == {(axis, 1 - end)}
        taste = alignx.axes()[axis][end]
        if "demographic" in row:
            assert any(trait in row["demographic"] for trait in taste.traits)
        for pair in row.get("icl_pairs", ()):
            assert ends(pair["chosen"], pair["prompt"]) == {(axis, end)}
            assert pair["prompt"] != row["raw_prompt"], "the answer is not among the examples"
        assert all(item["comment"] in taste.comments for item in row.get("ugc", ()))


def test_no_trait_or_comment_belongs_to_two_tastes() -> None:
    tastes = [taste for axis in alignx.axes() for taste in axis]
    counts = Counter(text for taste in tastes for text in (*taste.traits, *taste.comments))
    assert set(counts.values()) == {1}


def test_one_candidate_continues_the_pursuit_of_the_customer() -> None:
    pursuit = {
        thing: name for name, things in humanllm.TEXTS["pursuits"].items() for thing in things
    }
    assert len(pursuit) == sum(map(len, humanllm.TEXTS["pursuits"].values())), (
        "a thing has one pursuit"
    )
    for row in synth("humanllm", 100, 1):
        head, _, offer = row["prompt_text"].partition("\n")
        bought = [p for thing, p in pursuit.items() if f": {thing}" in head]
        assert len(row["candidates"]) == 20 and len(set(row["candidates"])) == 20
        kinds = Counter(pursuit[thing] for thing in row["candidates"])
        assert set(kinds.values()) == {1} and len(set(bought)) == 1
        gold = row["candidates"][row["answer_index"]]
        assert pursuit[gold] == bought[0] and f": {gold}" not in head
        assert row["answer_letter"] == "ABCDEFGHIJKLMNOPQRST"[row["answer_index"]]
        assert all(f": {thing}" in offer for thing in row["candidates"])


def test_the_place_of_the_gold_is_no_hint() -> None:
    places = Counter(row["answer_index"] for row in synth("humanllm", 400, 0))
    assert len(places) == 20 and max(places.values()) < 45


NUMBER = re.compile(r"they answered (-?\d+)\.")
SCALE = re.compile(r"from (-?\d+) to (-?\d+)")


def test_questions_take_turns_and_letters_are_fair() -> None:
    rows = mmtom.rows(700, 0)
    assert set(Counter(row["question_type"] for row in rows).values()) == {100}
    for kind in mmtom.TYPES:
        letters = Counter(row["answer"] for row in rows if row["question_type"] == kind)
        assert 30 <= letters["a"] <= 70, (kind, letters)


def test_answers_of_a_survey_follow_from_its_row() -> None:
    rows = socsci210.rows(300, 0)
    assert {row["response_type"] for row in rows} == {"ordinal", "binary", "categorical"}
    for row in rows:
        assert row["r_min"] <= row["response"] <= row["r_max"]
        if row["response_type"] == "ordinal":
            assert row["response"] == expected(row)


def expected(row: dict[str, Any]) -> int:
    """The answer, worked out from the prompt alone."""
    text = row["prompt_text"]
    earlier = int(NUMBER.search(text)[1])  # type: ignore[index]
    low, high = map(int, SCALE.search(text).groups())  # type: ignore[union-attr]
    step = re.search(r"is (\d+) points", text)
    size = int(step[1]) if step else 1
    side = 1 if "good experiences" in text else -1 if "how little came of it" in text else 0
    moved = "moves them a step" in text
    return min(max(earlier + side * size * moved, low), high)


def test_a_study_shares_its_texts_and_varies_its_respondents() -> None:
    rows = socsci210.rows(socsci210.PER_STUDY, 7)
    assert len({row["study_id"] for row in rows}) == 1
    assert len({row["outcome_question"] for row in rows}) == 1
    assert len({row["persona"] for row in rows}) == len(rows)


NESTED = "Multiple Choice Question"


# -- what makes a row solvable -------------------------------------------------------------------


def test_scenes_show_the_gold_once_among_different_options() -> None:
    for row in synth("social_r1", 120, 5):
        scene = split_prompt(row["prompt_text"])
        assert len(set(scene.options.values())) == len(scene.options) in (3, 4)
        assert (
            f"{row['answer_letter']}. {scene.options[row['answer_letter']]}" == row["answer_text"]
        )
        assert "{" not in row["prompt_text"] + row["why"]
    assert {row["kind"] for row in synth("social_r1", 12, 5)} == set(scenes.KINDS)


def drives_shown(memory: str, name: str, friend: str) -> list[str]:
    """The drives whose deeds a memory tells, in its order."""
    drives = {}
    for drive, deeds in lives.TEXTS["drives"].items():
        for deed in deeds:
            at = memory.find(deed.format(n=name, f=friend))
            if at >= 0:
                drives[at] = drive
    return [drives[at] for at in sorted(drives)]


def test_the_last_drive_that_a_memory_shows_is_the_gold() -> None:
    for row in synth("lifechoices", 90, 6):
        nested, name = row[NESTED], row["character_name"].split()[0]
        friend = row["input_text"].split(". ")[1].split()[0]
        shown = drives_shown(row["input_text"], name, friend)
        assert len(set(shown)) == (2 if row["kind"] == "changed" else 1)
        gold = nested["Options"]["ABCD".index(nested["Correct Answer"])]
        acts = [s["acts"] for s in lives.TEXTS["situations"] if gold_of(s["acts"], shown[-1], gold)]
        assert acts, f"{gold!r} is what the drive '{shown[-1]}' does"
        assert len(set(nested["Options"])) == 4


def gold_of(acts: dict[str, str], drive: str, gold: str) -> bool:
    """Whether `gold` is what `drive` does, whoever the people are."""
    pieces = [p for p in acts[drive].replace("}", "{").split("{") if len(p) > 1]
    return all(piece in gold for piece in pieces)


def test_every_drive_has_an_act_in_every_situation() -> None:
    assert all(set(s["acts"]) == set(lives.TEXTS["drives"]) for s in lives.TEXTS["situations"])


def test_wrong_rules_lead_to_their_options() -> None:
    for row in synth("mistakes", 240, 7):
        texts = [row[f"Answer{x}Text"] for x in "ABCD"]
        assert len(set(texts)) == 4 and row["TargetOption"] != row["CorrectAnswer"]
        assert row["TargetAnswer"] == row[f"Answer{row['TargetOption']}Text"]
    kinds = {row["MisconceptionId"] // 10 for row in synth("mistakes", 12, 7)}
    assert len(kinds) == len(pupils.TEXTS["problems"])


CHECKED: dict[str, Any] = {
    "Calculates strictly from left to right, whatever the operations are": lambda a, b, c: (
        (a + b) * c
    ),
    "Multiplies the base by the exponent": lambda a, b: a * b,
    "Leaves out the halving when finding the area of a triangle": lambda a, b: a * b,
    "Gives the area where the perimeter is asked for": lambda a, b: a * b,
    "Drops one of two minus signs that follow each other": lambda a, b: a - b,
}


def test_results_follow_from_the_numbers_of_the_question() -> None:
    seen = set()
    for row in synth("mistakes", 400, 7):
        rule = CHECKED.get(row["MisconceptionName"])
        if rule is not None:
            numbers = [int(x) for x in re.findall(r"\d+", row["QuestionText"])]
            assert Fraction(row["TargetAnswer"]) == rule(*numbers)
            seen.add(row["MisconceptionName"])
    assert seen == set(CHECKED)
