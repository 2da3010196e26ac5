"""FANToM under the paper protocol: every form of answer, sets, gold and feedback.

Conformance: FANToM's answers, rewards and break-downs, and where `paper` departs from them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.metrics.text import token_f1
from soulkit.tasks.fantom.task import NO_CHOICE, answer_form, name_list
from soulkit.types import Completion, Episode, Example, Failure, Feedback, Record, Score, unscored
from tests.support.evaluation import FAST, soul, summary
from tests.support.road import (
    NO_ONE,
    batch_values,
    score_text,
    synth,
    synth_examples,
    task_of,
)
from tests.support.servers.openai_server import ScriptedServer
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.fantom.reference import reference_aggregates

CONTEXT = "Ada: Excuse me, the phone.\nBen: Fine.\nBen: I cooked paella.\nCleo: Nice."
BASE = {"context": CONTEXT, "set_id": "0-0-0", "missed_info_accessibility": "inaccessible"}
KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "complete_question": "What does Ada believe?\n(a) She knows of it.\n(b) She does not.",
        "question_type": "tom:belief:inaccessible:multiple-choice",
        "correct_answer": "1",
    },
    "names": {
        "complete_question": "Who knows it?",
        "question_type": "tom:answerability:list",
        "correct_answer": "['Ben', 'Cleo']",
        "wrong_answer": "['Ada']",
    },
    "yes_no": {
        "complete_question": "Does Ada know this? Answer yes or no.",
        "question_type": "tom:info_accessibility:binary",
        "correct_answer": "no",
    },
    "fact": {
        "complete_question": "What did Ben cook?",
        "question_type": "fact",
        "correct_answer": "Ben cooked paella.",
    },
    "belief": {
        "complete_question": "What does Ada believe about what Ben cooked?",
        "question_type": "tom:belief:inaccessible",
        "correct_answer": "Ada does not know what Ben cooked.",
        "wrong_answer": "Ada believes that Ben cooked paella.",
    },
}


def example(form: str, **changes: Any) -> Example:
    return task_of("fantom").example({**BASE, **KINDS[form], **changes})


def score(form: str, inside: str, **changes: Any) -> Score:
    return score_text(task_of("fantom"), example(form, **changes), f"So: <answer>{inside}</answer>")


@pytest.mark.parametrize("form", KINDS)
def test_the_type_says_the_form(form: str) -> None:
    assert answer_form(KINDS[form]["question_type"]) == form
    assert example(form).fields["form"] == form


@pytest.mark.parametrize(
    ("form", "inside", "value", "status"),
    [
        ("choice", "b", 1, "ok"),
        ("choice", "(B)", 1, "ok"),
        ("choice", "b.", 1, "salvaged"),
        ("choice", "(b) She does not.", 1, "salvaged"),
        ("choice", "**b**", 1, "salvaged"),
        ("choice", "a", 0, "ok"),
        ("choice", "She does not.", 0, "malformed"),
        ("choice", "a or b", 0, "malformed"),
        ("names", "Ben, Cleo", 1, "ok"),
        ("names", "cleo and BEN", 1, "ok"),
        ("names", "- Ben\n- Cleo", 1, "ok"),
        ("names", "Those who know it are Ben and also Cleo", 1, "salvaged"),
        ("names", "Ben", 0, "ok"),
        ("names", "Ben, Cleo, but not Ada", 0, "ok"),
        ("names", "nobody", 0, "ok"),
        ("names", "everyone who was there at that time", 0, "malformed"),
        ("yes_no", "No", 1, "ok"),
        ("yes_no", "no.", 1, "ok"),
        ("yes_no", "False", 1, "ok"),
        ("yes_no", "No, she was away.", 1, "salvaged"),
        ("yes_no", "**No**: she was away", 1, "salvaged"),
        ("yes_no", "No\nShe was away.", 1, "salvaged"),
        ("yes_no", "I think no", 1, "salvaged"),
        ("yes_no", "No one knows", 0, "malformed"),
        ("yes_no", "no idea", 0, "malformed"),
        ("yes_no", "She doesn't know it.", 1, "salvaged"),
        ("yes_no", "She did not know", 1, "salvaged"),
        ("yes_no", "Yes", 0, "ok"),
        ("yes_no", "Ada knows it", 0, "salvaged"),
        ("yes_no", "nobody knows it", 0, "malformed"),
        ("yes_no", "not sure", 0, "malformed"),
        ("yes_no", "yes and no", 0, "malformed"),
        ("yes_no", "maybe no", 0, "malformed"),
        ("yes_no", "That is not true", 0, "malformed"),
        ("yes_no", "That isn't false.", 0, "malformed"),
        ("yes_no", "She could not hear it, so no.", 1, "salvaged"),
        ("yes_no", "none", 0, "malformed"),
        ("yes_no", "She knows no one", 0, "malformed"),
        ("fact", "Ben cooked paella", 1, "ok"),
        ("fact", "paella", 0.5, "ok"),
        ("fact", "soup", 0, "ok"),
        ("belief", "Ada does not know what Ben cooked", 1, "ok"),
    ],
)
def test_forms_of_answers(form: str, inside: str, value: float, status: str) -> None:
    grade = score(form, inside)
    assert (grade.value, grade.reward, grade.status) == (value, value, status)
    assert grade.words == inside


def test_what_is_no_answer() -> None:
    for form in KINDS:
        assert score(form, "").status == "malformed" and score(form, "").value == 0
        grade = score_text(task_of("fantom"), example(form), "It is b, no.")
        assert (grade.value, grade.status) == (0, "no_tag")


def test_free_beliefs_are_compared_with_both_answers() -> None:
    grade = score("belief", "She believes that Ben cooked paella.")
    assert grade.metrics == {"nearer_gold": 0.0} and 0 < (grade.value or 0) < 1
    assert score("belief", "Ada does not know that.").metrics == {"nearer_gold": 1.0}
    assert score("belief", "").metrics == {"nearer_gold": 0.0}
    assert score("belief", "x", wrong_answer="").metrics == {"nearer_gold": None}
    assert score("fact", "x").metrics == {}


def test_where_nobody_knows() -> None:
    one = {"correct_answer": [], "wrong_answer": ["Ada", "Ben"]}
    assert score("names", "nobody", **one).value == 1
    assert score("names", "No one.", **one).value == 1
    assert score("names", "Ada", **one).value == 0
    assert score("names", "everybody", **one).value == 0


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [(["Ben"], ["Ben"]), (["Ben"], 3), (["Ben"], None), ([], []), ([], ["Ada"]), ("['Ben']", "[]")],
)
def test_wrong_lists_of_names_are_wrong(gold: Any, wrong: Any) -> None:
    one = example("names", correct_answer=gold, wrong_answer=wrong)
    task = task_of("fantom")
    assert score_text(task, one, task.gold_completion(one)).value == 1
    worse = score_text(task, one, task.wrong_completion(one))
    assert (worse.value, worse.status) == (0, "ok")


@pytest.mark.parametrize(
    ("form", "changes", "why"),
    [
        ("choice", {"correct_answer": 2}, "not the index of an option"),
        ("choice", {"correct_answer": "b"}, "not the index of an option"),
        ("yes_no", {"correct_answer": "error"}, "neither yes nor no"),
        ("names", {"correct_answer": " "}, "blank"),
        ("fact", {"context": ""}, "no conversation"),
        ("fact", {"complete_question": None}, "has no question"),
        ("fact", {"question_type": "riddle"}, "is unknown"),
        ("fact", {"question_type": "riddle:list"}, "is unknown"),
        ("fact", {"question_type": "tom:belief:inaccessible:first"}, "is unknown"),
    ],
)
def test_rows_that_cannot_be_used(form: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        example(form, **changes)


def test_the_headline_is_over_questions_that_are_right_or_wrong() -> None:
    task, rows = task_of("fantom"), whole_sets()
    facts = {task.example(r).id for r in rows if r["question_type"] == "fact"}
    best = task.summarise(records(dict.fromkeys(facts, "<answer>nothing of it</answer>"), rows))
    accuracy, free = best["accuracy"], best["free_f1"]
    assert (accuracy.value, accuracy.unit) == (1.0, "questions") and (free.value or 0) < 1
    assert accuracy.n + free.n == len(rows) and free.n > len(facts), "beliefs in free words, too"
    assert task.headline(records({}, rows)) == 1.0
    wrong = {row_of("names", rows).id: "<answer>nobody</answer>"}
    assert task.summarise(records(wrong, rows))["accuracy"].value == pytest.approx(
        1 - 1 / accuracy.n
    )


def test_a_run_without_choice_questions_says_so_and_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "facts", tmp_path / "page.html"
    with ScriptedServer(answer="<answer>the phone</answer>") as server:
        flags = ("--task", "fantom", "--data", "synth:40", "--where", "question=fact.*")
        assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, *flags,
                    "--out", out, *FAST) == 0  # fmt: skip
    cells = summary(out)["tasks"]["fantom"]
    assert cells["accuracy"]["headline"] and cells["accuracy"]["not_applicable"] == NO_CHOICE
    assert cells["accuracy"]["n"] == 0 and cells["free_f1"]["n_scored"] == 2
    for words in (("report", out), ("report", out, "--format", "md"), ("runs", tmp_path)):
        assert soul(*words) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split()).count(NO_CHOICE) >= 3
    assert "undefined" not in shown and "0/2" not in shown
    assert soul("report", out, "--format", "html", "--out", page) == 0
    assert NO_CHOICE in page.read_text() and "0 of 2 scored" not in page.read_text()
    assert soul("compare", out, out) == 2
    assert NO_CHOICE in capsys.readouterr().err


def test_the_published_mean_holds_the_words_of_facts_too() -> None:
    task = task_of("fantom", "reference")
    rows = [{**BASE, **KINDS["fact"]}, {**BASE, **KINDS["choice"]}]
    halves = [
        Record(key=str(i), task="fantom", example_id=str(i), rollout=0, kind="draft",
               episode=Episode(example_id=str(i), task="fantom"), tags=task.example(row).tags,
               score=Score(value=value, reward=value))
        for i, (row, value) in enumerate(zip(rows, (0.5, 1.0), strict=True))
    ]  # fmt: skip
    assert task.headline(halves) == 0.75 and task_of("fantom").headline(halves) == 1.0


def test_the_actor_is_not_told_the_type() -> None:
    for form in KINDS:
        (segment,) = task_of("fantom").preview(example(form))
        assert "accessible" not in segment.text and CONTEXT in segment.text
    assert "only the letter" in task_of("fantom").preview(example("choice"))[0].text


def test_golds_may_be_lists() -> None:
    lists = {"correct_answer": ["Ben", "Cleo"], "wrong_answer": ["Ada"]}
    task = task_of("fantom")
    inside = "<answer>Ben, Cleo</answer>"
    assert score_text(task, example("names", **lists), inside).value == 1


# -- sets ----------------------------------------------------------------------------------------


def records(answers: dict[str, str], rows: list[dict[str, Any]] | None = None) -> list[Record]:
    """One record a row; `answers` by example id replace the gold's."""
    task = task_of("fantom")
    played = []
    for one in map(task.example, rows or synth("fantom", 40, 2)):
        text = answers.get(one.id, task.gold_completion(one))
        episode = task._episode(one, task.context(one, None), Completion(text=text), 0, "draft")
        score = asyncio.run(task.score(one, episode, NO_ONE))
        played.append(
            Record(key=one.id, task="fantom", example_id=one.id, rollout=0, kind="draft",
                   episode=episode, score=score, cluster=one.cluster, tags=one.tags)
        )  # fmt: skip
    return played


def row_of(form: str, rows: list[dict[str, Any]]) -> Example:
    task = task_of("fantom")
    return next(e for e in map(task.example, rows) if e.fields["form"] == form)


def whole_sets() -> list[dict[str, Any]]:
    rows = synth("fantom", 120, 2)
    last = rows[-1]["part_id"]
    return [row for row in rows if row["part_id"] != last]


def test_all_needs_every_question_of_a_set() -> None:
    summarise, rows = partial(batch_values, task_of("fantom")), whole_sets()
    best = summarise(records({}, rows))
    assert (best["set_all"], best["set_all_star"]) == (1, 1) and best["sets"] >= 5
    one = 1 / best["sets"]
    for form, text in (("choice", "x"), ("names", "nobody"), ("yes_no", "x")):
        missed = summarise(records({row_of(form, rows).id: f"<answer>{text}</answer>"}, rows))
        assert missed["set_all"] == pytest.approx(1 - one)
        assert missed["set_all_star"] <= missed["set_all"]


def test_free_beliefs_count_in_the_starred_score_and_facts_in_none() -> None:
    task, rows = task_of("fantom"), whole_sets()
    belief, fact = row_of("belief", rows), row_of("fact", rows)
    wrong = f"<answer>{belief.fields['wrong_answer']}</answer>"
    means = batch_values(task, records({belief.id: wrong, fact.id: "none"}, rows))
    assert means["set_all"] == 1 > means["set_all_star"]


def test_sets_with_gaps() -> None:
    task, rows = task_of("fantom"), whole_sets()
    everything = records({}, rows)
    first = everything[0]
    lost = Episode(example_id="x", task="fantom", failure=Failure("provider_error"))
    broken = replace(first, episode=lost, score=unscored(Failure("provider_error")))
    others = {r.cluster for r in everything} - {first.cluster}
    means = batch_values(task, [broken, *everything[1:]])
    alone = batch_values(task, [r for r in everything if r.cluster in others])
    assert means == alone, "the sets of a conversation with a gap are not counted"
    assert batch_values(task, []) == {} and "set_all" not in batch_values(task, everything[:1])


def test_a_free_belief_without_a_wrong_one_decides_no_set() -> None:
    task, rows = task_of("fantom"), whole_sets()
    bare = [{**row, "wrong_answer": ""} for row in rows
            if answer_form(row["question_type"]) == "belief"]  # fmt: skip
    others = [row for row in rows if answer_form(row["question_type"]) != "belief"]
    means = batch_values(task, records({}, [*others, *bare]))
    assert means["set_all"] == 1 and "set_all_star" not in means


def test_a_part_of_a_set_is_no_set_where_the_size_is_known() -> None:
    task, rows = task_of("fantom"), whole_sets()
    best = batch_values(task, records({}, rows))
    assert best["sets_complete"] == best["sets"]
    lost = row_of("yes_no", rows)
    part = [row for row in rows if task.example(row).id != lost.id]
    means = batch_values(task, records({}, part))
    assert means["sets"] == means["sets_complete"] == best["sets"] - 1
    unsized = [{**row, "set_size": None, "set_beliefs": None} for row in part]
    means = batch_values(task, records({}, unsized))
    assert (means["sets"], means["sets_complete"]) == (best["sets"], 0)


def test_a_set_without_one_of_its_free_beliefs_is_not_starred() -> None:
    task, rows = task_of("fantom"), whole_sets()
    lost = row_of("belief", rows)
    part = [row for row in rows if task.example(row).id != lost.id]
    wrong = {row_of("names", rows).id: "<answer>nobody</answer>"}
    whole, gapped = (batch_values(task, records(wrong, r)) for r in (rows, part))
    assert gapped["sets"] == whole["sets"]
    assert whole["set_all_star"] < 1 == gapped["set_all_star"], "the wrong set has the gap"


def test_sets_are_made_of_drafts() -> None:
    task, rows = task_of("fantom"), whole_sets()
    wrong = {task.example(row).id: "<answer>x</answer>" for row in rows}
    refined = [replace(r, kind="refined", key=f"{r.key}/r") for r in records(wrong, rows)]
    drafts = records({}, rows)
    assert batch_values(task, [*refined, *drafts]) == batch_values(task, drafts)


def test_golds_of_the_whole_conversation_stay_out_of_sets() -> None:
    long = {**BASE, **KINDS["yes_no"], "correct_answer": "no:long"}
    (record,) = records({}, [long])
    assert record.score.value == 1 and "set" not in record.episode.notes


# -- feedback ------------------------------------------------------------------------------------


def test_advice_from_rules_gives_nothing_away() -> None:
    task = task_of("fantom")
    seen = set()
    for one in synth_examples("fantom", 150):
        drafts = (task.gold_completion(one), task.wrong_completion(one), "", "<answer></answer>")
        scores = [score_text(task, one, draft) for draft in drafts]
        for text in [task.explain(one, None, s) for s in (None, *scores)]:
            checked = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(one))
            assert checked.leak == "", (text, one.fields["complete_question"])
            assert task.gold_text(one).lower() not in text.lower().split()
            seen.add(text)
    assert len(seen) > 40


@pytest.mark.parametrize(
    ("form", "text", "leak"),
    [
        ("choice", "It is option b.", "gold_letter"),
        ("choice", "Think of this: she does not.", "gold_text"),
        ("names", "Do not forget Cleo.", "answerable"),
        ("names", "You forgot Ben.", "gold_text"),
        ("names", "Ada was away.", "answerable"),
        ("yes_no", "The answer is no.", "gold_text"),
        ("fact", "Ben spoke of paella.", "gold_text"),
        ("fact", "Look at what Ben says.", ""),
        ("names", "Count the speaker in.", ""),
    ],
)
def test_what_advice_must_not_say(form: str, text: str, leak: str) -> None:
    view = task_of("fantom").leak_view(example(form))
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


REPAIRED = {
    "empty-gold-list-never-right": "where nobody knows, `nobody` is right; a blank gold is no row",
    "first-tag-wins": "the last tag decides",
    "gold-case-sensitive": "the gold is read in any case of letters",
    "hedge-polarity": "yes and no need no blanks around them, and a hedge is no answer",
    "name-parsing-splits-quotes": "lists of names are read as literals",
    "prefix-polarity": "yes and no are words, not beginnings of words",
    "unclosed-think-kept": "what is thought is no answer",
    "wrong-name-inside-gold": "a longer name is read first, and its words are then spent",
    "salvaged": "an answer with more around it is read",
    "gold-is-no-option": "a gold that is no option's place makes a bad row",
}
"""Quirk → what `paper` does instead; the last two have no slug of their own in the vectors."""


@conformance("fantom.choice")
def test_choice_under_paper(vector: Vector) -> None:
    task, quirks = task_of("fantom"), set(vector.quirks)
    try:
        example = task.example(vector.input["row"])
    except DataError as error:
        if "not the index of an option" in error.what:
            quirks.add("gold-is-no-option")
        assert vector.raises or quirks & set(REPAIRED), vector.note
        return
    score = score_text(task, example, vector.input["output_text"] or "")
    if score.status == "salvaged" and vector.expected["reward"] == 0:
        quirks.add("salvaged")
    if not quirks & set(REPAIRED):
        assert_matches(score.reward, vector.expected["reward"])


@conformance("fantom.lexical", formula={"aggregates"})
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])


@conformance("rows.parse", fns={"fantom.str_to_list", "fantom.f1"})
def test_rows(vector: Vector) -> None:
    inputs = vector.input
    actual = (
        token_f1(inputs["gold"], inputs["pred"])
        if vector.family == "fantom.f1"
        else name_list(inputs["text" if "text" in inputs else "value"])
    )
    assert_matches(actual, vector.expected["result"])
