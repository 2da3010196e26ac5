"""ToMi and ParaToMi under the paper protocol; the reference protocol has its vectors.

Hi-ToM under the paper protocol; the reference protocol has its vectors.

Conformance: ParaToMi's answers, rewards and break-downs under the reference protocol.

Conformance: Hi-ToM's answers, rewards and break-downs under the reference protocol.

Explanations: true, short, and useless without the story.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.tom.explain import explain
from soulkit.tasks.tom.generate import StoryTask, synth_rows
from soulkit.types import Episode, Failure, Record, Score, unscored
from tests.support.road import batch_values, score_text, synth_examples, task_of
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.tom.reference import hitom_aggregates, tomi_aggregates

TOMI_ROW = {
    "story": "1 Ada entered the attic.\n2 The hat is in the box.",
    "question": "Where is the hat really?",
    "answer": "box",
    "cands": ["box", "treasure box", "green_bag"],
    "question_type": "reality",
}


def tomi_score(text: str, protocol: str = "paper", **changes: Any) -> Score:
    task = task_of("tomi", protocol)
    return score_text(task, task.example({**TOMI_ROW, **changes}), f"<answer>{text}</answer>")


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("box", "box", 1),
        ("She looks in the BOX.", "box", 1),
        ("treasure box", "box", 0),
        ("box or green bag", "box", 0),
        ("boxes", "box", 0),
        ("treasure box", "treasure box", 1),
        ("the treasure_box", "treasure box", 1),
        ("box", "treasure box", 0),
        ("green bag", "green_bag", 1),
        ("green-bag", "green_bag", 1),
        ("bag", "green_bag", 0),
        ("nowhere", "box", 0),
    ],
)
def test_the_gold_and_no_other_candidate(answer: str, gold: str, value: float) -> None:
    assert tomi_score(answer, answer=gold).value == value


def test_a_candidate_inside_the_gold_is_no_trap() -> None:
    cands = ["box", "treasure box"]
    assert tomi_score("treasure box", answer="treasure box", cands=cands).value == 1
    assert tomi_score("treasure box", "reference", answer="treasure box", cands=cands).value == 0


def test_an_underscore_is_a_blank() -> None:
    changes = {"answer": "green_bag", "cands": ["green_bag", "box"]}
    assert tomi_score("green bag", **changes).value == 1
    assert tomi_score("green bag", "reference", **changes).value == 0


def test_chinese_answers() -> None:
    changes = {"answer": "盒子", "cands": ["盒子", "篮子"]}
    assert tomi_score("在盒子里", **changes).value == 1
    assert tomi_score("在篮子里", **changes).value == 0
    assert tomi_score("在盒子里", "reference", **changes).value == 0


@pytest.mark.parametrize("cands", ["box, treasure box", '["box", "treasure box"]', None, []])
def test_candidates_come_in_many_shapes(cands: Any) -> None:
    assert tomi_score("box", cands=cands).value == 1
    assert tomi_score("the box it is", cands=cands).value == 1
    if cands:
        assert tomi_score("the treasure box", cands=cands).value == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [("box", "no_tag"), ("<answer> </answer>", "malformed"), ("", "empty")],
)
def test_statuses(text: str, status: str) -> None:
    task = task_of("tomi")
    grade = score_text(task, task.example(TOMI_ROW), text)
    assert (grade.value, grade.status) == (0.0, status)


def test_a_story_as_a_list_becomes_lines() -> None:
    task = task_of("paratomi")
    row = {**TOMI_ROW, "story": "['Ada went in', 'Ben left.']", "correct_answer": "box"}
    example = task.example(row)
    assert example.fields["story"] == "Ada went in.\nBen left."
    assert "Ada went in.\nBen left." in task.preview(example)[0].text
    assert example.id == task.example({**row, "story": ["Ada went in", "Ben left."]}).id


def test_only_paratomi_shows_the_candidates() -> None:
    for name, shown in (("paratomi", True), ("tomi", False)):
        row = {**TOMI_ROW, "correct_answer": "box"}
        task = task_of(name)
        text = task.preview(task.example(row))[0].text
        assert ("box, treasure box, green_bag" in text) is shown


def test_the_coach_understands_an_answer_in_a_sentence() -> None:
    for name in ("tomi", "paratomi"):
        task = task_of(name)
        for example in synth_examples(name, 20):
            gold = task.gold_text(example)
            texts = [f"<answer>{t}</answer>" for t in (gold, f"It must be in the {gold}, I think")]
            one, two = (task.explain(example, None, score_text(task, example, t)) for t in texts)
            assert one == two and "fits" in one


def test_an_answer_that_names_two_places_is_no_clear_answer() -> None:
    task = task_of("tomi")
    example = synth_examples("tomi", 1)[0]
    both = " or ".join(example.fields["cands"])
    text = task.explain(example, None, score_text(task, example, f"<answer>{both}</answer>"))
    assert text.startswith("The draft gives no clear answer.")


def test_the_leak_view_always_holds_the_gold() -> None:
    task = task_of("tomi")
    for cands in (["bag"], ["Box", "bag"], None):
        view = task.leak_view(task.example({**TOMI_ROW, "cands": cands}))
        assert view.gold in view.options
        assert len(view.names()) == (2 if cands else 1)


def test_aggregates_skip_what_has_no_result() -> None:
    assert tomi_aggregates([None]) == {}
    assert tomi_aggregates([{}])["accuracy_unknown"] == 0.0


HITOM_ROW = {
    "story": "1 Ada and Ben entered the attic.\n2 The apple is in the red_box.",
    "question": "Where is the apple really?",
    "choices": "A. blue_bag, B. red_box, C. jar, large, D. tin",
    "correct_answer": "red_box",
    "question_order": 0,
    "deception": "False",
}


def hitom_score(text: str, stop: str = "stop", **changes: Any) -> Score:
    task = task_of("hitom")
    return score_text(task, task.example({**HITOM_ROW, **changes}), text, stop)


@pytest.mark.parametrize(
    ("inside", "status"),
    [("B", "ok"), ("b", "ok"), (" B ", "ok"), ("B.", "salvaged"), ("(B)", "salvaged"),
     ("B. red_box", "salvaged")],
)  # fmt: skip
def test_ways_to_be_right(inside: str, status: str) -> None:
    grade = hitom_score(f"I think so. <answer>{inside}</answer>")
    assert (grade.value, grade.status, grade.words) == (1.0, status, "B")


def test_the_last_tag_and_spoken_words_decide() -> None:
    assert hitom_score("<answer>A</answer> or rather <answer>B</answer>").value == 1
    assert hitom_score("<answer>B</answer> or rather <answer>A</answer>").value == 0
    assert hitom_score("maybe <answer>A</answer></think><answer>B</answer>").value == 1
    assert hitom_score("<answer>A</answer><think>or <answer>B</answer>").value == 0


def test_options_may_hold_commas_and_stand_on_lines() -> None:
    assert hitom_score("<answer>C</answer>", correct_answer="jar, large").value == 1
    lines = "A. blue_bag\nB. red_box\nC. jar"
    assert hitom_score("<answer>B</answer>", choices=lines).value == 1


@pytest.mark.parametrize(
    ("text", "stop", "status"),
    [
        ("It is B.", "stop", "no_tag"),
        ("<answer>red_box</answer>", "stop", "malformed"),
        ("<answer></answer>", "stop", "malformed"),
        ("", "stop", "empty"),
        ("  \n", "stop", "empty"),
        ("The apple was", "length", "truncated"),
        ("", "length", "truncated"),
        ("", "content_filter", "refusal"),
        ("<think>so <answer>B</answer>", "length", "truncated"),
    ],
)
def test_the_actors_own_failures_score_the_minimum(text: str, stop: str, status: str) -> None:
    grade = hitom_score(text, stop)
    assert (grade.value, grade.reward, grade.status) == (0.0, 0.0, status)


def test_a_reply_that_ran_into_its_limit_is_no_answer() -> None:
    grade = hitom_score("<answer>B</answer> and then", "length")
    assert (grade.value, grade.status) == (0.0, "truncated")


def test_what_broke_outside_the_actor_is_unscored() -> None:
    import asyncio

    from tests.support.road import NO_ONE

    task = task_of("hitom")
    example = task.example(HITOM_ROW)
    broken = Episode(example_id=example.id, task="hitom", failure=Failure("provider_error", "503"))
    grade = asyncio.run(task.score(example, broken, NO_ONE))
    assert (grade.value, grade.status, grade.reason) == (None, "unscored", "provider_error")


def test_a_gold_that_is_no_option_is_a_bad_row() -> None:
    with pytest.raises(DataError, match="not one of the row's choices"):
        hitom_score("", correct_answer="suitcase")


def test_break_downs_and_clusters() -> None:
    task = task_of("hitom")
    one, two = (task.example({**HITOM_ROW, "question": q}) for q in ("Where?", "Where really?"))
    assert one.tags == {"order": "0", "deception": "False"}
    assert one.cluster == two.cluster and one.id != two.id


def record(story: str, order: int, value: float | None, rollout: int = 0) -> Record:
    score = unscored(Failure("x")) if value is None else Score(value=value, reward=value)
    return Record(
        key=f"{story}{order}{rollout}", task="hitom", example_id=story, rollout=rollout,
        kind="draft", episode=Episode(example_id=story, task="hitom"), score=score, cluster=story,
        tags={"order": str(order)},
    )  # fmt: skip


def test_joint_accuracy_needs_every_order_below() -> None:
    records = [record("s", 0, 1), record("s", 1, 0), record("s", 2, 1)]
    records += [record("t", 0, 1), record("t", 1, 1), record("u", 1, 1)]
    assert batch_values(task_of("hitom"), records) == {
        "joint_order_0": 1.0,
        "joint_order_1": 0.5,
        "joint_order_2": 0.0,
    }


def test_joint_accuracy_with_gaps_repeats_and_kinds() -> None:
    summarise = partial(batch_values, task_of("hitom"))
    assert summarise([record("s", 0, None), record("s", 0, 1)]) == {}, "an unscored part: no joint"
    assert summarise([record("s", 0, 1), record("s", 0, 0)]) == {"joint_order_0": 0.0}
    refined = replace(record("s", 0, 0), kind="refined")
    assert summarise([record("s", 0, 1), refined]) == {"joint_order_0": 1.0}, "drafts alone"
    assert summarise([record("s", 0, 1), record("s", 0, 0, rollout=1)]) == {"joint_order_0": 0.5}
    assert summarise([]) == {} and hitom_aggregates([None]) == {}


def test_the_leak_view_holds_every_option_with_its_letter() -> None:
    task = task_of("hitom")
    for example in synth_examples("hitom", 10):
        view = task.leak_view(example)
        assert len(view.options) == len(view.letters) == 15
        assert view.letter == task.gold_letter(example)
        assert task.gold_completion(example) == f"<answer>{view.letter}</answer>"


@conformance("paratomi.lexical", formula={"aggregates"})
def test_paratomi_aggregates(vector: Vector) -> None:
    assert_matches(tomi_aggregates(vector.input["results"]), vector.expected["result"])


@conformance("hitom.lexical", formula={"aggregates"})
def test_hitom_aggregates(vector: Vector) -> None:
    assert_matches(hitom_aggregates(vector.input["results"]), vector.expected["result"])


STORY = (
    "1 Otto came into the loft.\n2 Mei came into the loft.\n3 The coin lay in the urn.\n"
    "4 The urn stood in the loft.\n5 Mei went out of the loft.\n6 Otto put the coin into the jar."
)


def tomi(question: str, answer: str | None, story: str = STORY, **kw: Any) -> str | None:
    row = {"story": story, "question": question, "cands": ["jar", "urn", "loft"]}
    return explain("tomi", row, answer, **kw)


def test_a_draft_that_took_reality() -> None:
    assert tomi("Where would Mei search for the coin?", "jar") == (
        "The draft follows what really happened, not what Mei could know. Mei did not see the move."
    )


def test_a_correct_draft_hears_a_witness_fact() -> None:
    text = tomi("Where would Otto search for the coin?", "the jar.")
    assert text == "The draft fits what Otto could know. Otto saw the move."
    assert tomi("Where would Otto search for the coin?", "jar", terse=True) == "Otto saw the move."


def test_other_mistakes() -> None:
    assert "took the end" in str(tomi("Where was the coin at first?", "jar"))
    assert "took the start" in str(tomi("Where is the coin now?", "urn"))
    assert "never held" in str(tomi("Where is the coin now?", "loft"))
    assert "no clear answer" in str(tomi("Where is the coin now?", None))


def test_second_order_says_who_missed_what() -> None:
    text = tomi("Where does Otto believe that Mei would search for the coin?", "jar")
    assert text is not None
    assert "last in the room together before the move. Mei did not see it." in text


def test_an_unreadable_story_is_not_explained() -> None:
    assert tomi("Where is the coin now?", "jar", story="1 Otto flew.") is None
    assert tomi("Who has the coin?", "jar") is None


CLAIM = (
    "1 Otto, Mei and Rosa came into the loft.\n2 The coin lay in the teal_urn.\n"
    "3 Otto went out of the loft.\n4 Mei went out of the loft.\n5 Rosa went out of the loft.\n"
    "6 Otto, Mei and Rosa came into the foyer.\n"
    "7 Mei told everyone that the coin was in the teal_jar."
)


def hitom(question: str, answer: str) -> str:
    row = {"story": CLAIM, "question": question, "choices": "A. teal_urn, B. teal_jar, C. teal_tin"}
    return str(explain("hitom", row, answer))


def test_trust_is_explained_by_who_left_when() -> None:
    believes = hitom("Where does Otto believe the coin is?", "A")
    assert "Otto believes Mei in sentence 7, who left later." in believes
    doubts = hitom("Where does Rosa believe the coin is?", "teal_jar")
    assert "The draft follows the talk." in doubts
    assert "Rosa does not believe Mei, who left earlier." in doubts
    deep = hitom("Where does Rosa believe Otto believes Mei believes the coin is?", "B")
    assert "together in sentence 3" in deep or "together in sentence 2" in deep
    assert "Talk changes no thoughts this deep." in deep


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tomi", "paratomi", "hitom"])
def test_no_candidate_and_no_option_letter_is_ever_named(task: StoryTask) -> None:
    for row in synth_rows(task, 300, 5):
        choices = str(row.get("choices", ""))
        options = row.get("cands") or [part.split(". ")[1] for part in choices.split(", ")]
        for answer in (None, *options, "nonsense"):
            text = explain(task, row, answer)
            assert text, row
            plain = text.lower().replace("_", " ")
            assert not any(re.search(rf"\b{o.replace('_', ' ')}\b", plain) for o in options)
            assert not re.search(r"\b[A-Z]\b", text)
            if task == "tomi" and row["order"] <= 1:
                assert len(text.split()) <= 25


def test_a_candidate_object_is_left_unnamed() -> None:
    row = {"story": CLAIM, "question": "Where is the coin now?", "cands": ["coin", "teal_urn"]}
    text = explain("hitom", row, "teal_urn")
    assert text is not None and "coin" not in text and "object" in text


@pytest.mark.parametrize("task", ["tomi", "paratomi", "hitom"])
def test_remarks_about_different_drafts_share_one_fact(task: StoryTask) -> None:
    """The fact depends on the story alone, so it cannot leak through the draft."""
    for row in synth_rows(task, 60, 9):
        fact = explain(task, row, None, terse=True)
        gold = str(row.get("correct_answer", row.get("answer")))
        for answer in (None, gold, "nonsense"):
            assert str(explain(task, row, answer)).endswith(str(fact))
