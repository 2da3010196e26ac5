"""Humanual under the paper protocol: rows, prompts, scores by judges over HTTP, both protocols."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.tasks.canaries import canary_texts
from soulkit.tasks.humanual.replies import read_comment
from soulkit.tasks.humanual.scores import AXES, two_sided_factor
from soulkit.tasks.registry import load_registry
from soulkit.types import Example, Feedback, Score
from tests.support.humanual import (
    DOMAINS,
    ORIGINAL,
    REPLY,
    ROW,
    all_scored,
    by_shared_words,
    example,
    fenced,
    scored,
    sides,
    tagged,
    walked,
)
from tests.support.road import synth_examples, task_of

# -- rows ----------------------------------------------------------------------------------------


def test_a_prompt_in_any_spelling_is_the_same_row() -> None:
    messages = ROW["prompt"]
    forms = [messages, json.dumps(messages), [{**m, "metadata": {"n": 1}} for m in messages]]
    assert len({example(prompt=form).id for form in forms}) == 1
    text = example().fields["prompt"]
    assert text == "editor: The city adds bus lanes downtown.\n\nmara: Nobody asked for these."
    assert example("reference").fields["prompt"] == text.replace("\n\nmara: ", "\n")[8:]
    alone = [example(prompt=p) for p in ("Just this.", [{"role": "x", "content": "Just this."}])]
    assert {one.fields["prompt"] for one in alone} == {"Just this."}


@pytest.mark.parametrize("column", ["persona", "prompt", "completion"])
@pytest.mark.parametrize("empty", ["", "  \n"])
def test_rows_without_person_text_or_reply_are_bad(column: str, empty: str) -> None:
    with pytest.raises(DataError, match=f"{column} is empty"):
        example(**{column: empty})
    assert example("reference", **{column: empty}).id


def test_the_actor_sees_person_and_text_and_nothing_of_the_original() -> None:
    task, one = task_of("humanual_news"), example()
    system, user = task.preview(one)
    assert (system.role, user.role) == ("system", "user")
    assert "A nurse who commutes by bus." in system.text and "<response>" in system.text
    assert user.text == one.fields["prompt"]
    assert "bakery" not in system.text + user.text
    assert set(one.visible("person")) == {"persona", "prompt"}
    for domain in DOMAINS:
        played = task_of(f"humanual_{domain}")
        for row in synth_examples(f"humanual_{domain}", 12):
            shown = "\n".join(segment.text for segment in played.preview(row))
            assert str(row.fields["completion"]) not in shown


def test_long_texts_are_cut_where_it_is_said_and_the_cut_is_recorded() -> None:
    task = task_of("humanual_news")
    one = example(persona="calm " * 1600, prompt="first " + "word " * 4000 + "last")
    system, user = task.preview(one)
    assert user.text.startswith("[...] word") and user.text.endswith("last")
    assert system.text.count("calm") == 1500
    gold = task.gold(one)
    assert gold is not None and gold.notes["cut_words"] == {"persona": 100, "prompt": 2}
    view, _ = task.within_budget(one.visible("judge"))
    assert view["prompt"] == user.text, "judge and actor read the same"


# -- replies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "comment", "status"),
    [
        (tagged("fine by me"), "fine by me", "ok"),
        ("<RESPONSE> fine </Response >", "fine", "ok"),
        ("Sure! <response>a</response> and more", "a", "ok"),
        ("<response>a</response>no: <response>b</response>", "b", "ok"),
        ("<think>x<response>a</response></think><response>b</response>", "b", "ok"),
        ("<response>a", "a", "salvaged"), ("a</response>", "a", "salvaged"),
        ("just so", "just so", "salvaged"),
        ("<response> </response>", "", "empty"), ("<think>only this", "", "empty"),
        ("", "", "empty"),
    ],
)  # fmt: skip
def test_what_is_read_of_a_reply(text: str, comment: str, status: str) -> None:
    assert read_comment(text, "paper") == (comment, status)


@pytest.mark.parametrize("part", ["<response>", "</response>", "< ", "<response", "a<response>b"])
@pytest.mark.parametrize("protocol", ["paper", "reference"])
def test_a_megabyte_is_read_at_once(part: str, protocol: Any) -> None:
    text, start = part * (1_000_000 // len(part)), time.process_time()
    read_comment(text, protocol)
    assert time.process_time() - start < 2, "it grows with the square of the length"


# -- scores --------------------------------------------------------------------------------------


def test_the_value_is_the_mean_of_six_sides_times_the_length_factor() -> None:
    score, (body,) = scored(tagged(REPLY), sides(0.4, stance=1.0, value=0))
    assert score.value == score.reward == pytest.approx((1 + 0 + 4 * 0.4) / 6)
    assert score.metrics["axis/stance"] == 1.0 and score.metrics["axis/value"] == 0.0
    assert score.metrics["length_factor"] == score.metrics["two_sided_factor"] == 1.0
    assert score.status == "ok" and set(score.prompts) == {"person", "user", "judge"}
    assert (fenced(body, "reply"), fenced(body, "original")) == (REPLY, ORIGINAL)
    assert fenced(body, "context") == example().fields["prompt"]
    short, _ = scored(tagged("yes"), sides(1))
    assert short.value == pytest.approx(1 / (0.3 * 27))


def test_long_replies_lose_beside_the_headline_and_not_in_it() -> None:
    score, _ = scored(tagged("word " * 360), sides(1))
    assert score.value == score.metrics["length_factor"] == 1.0
    assert score.metrics["two_sided"] == score.metrics["two_sided_factor"] == pytest.approx(0.25)
    assert two_sided_factor("w " * 66, "r " * 5) == 1.0 > two_sided_factor("w " * 70, "r " * 5)
    assert two_sided_factor("", "r " * 5) == 1.0 and two_sided_factor("", "r " * 50) == 0.0


@pytest.mark.parametrize(
    "verdict",
    [
        sides(0.5, goal=1.5), sides(0.5, goal=-0.1), sides(0.5, goal=85), sides(0.5, goal="0.5"),
        sides(0.5, goal=None), sides(0.5, goal=True), sides(0.5).replace("0.5", "NaN"),
        '{"stance": {"thought": "t", "score": 1}}', "0.7", "",
    ],
)  # fmt: skip
def test_a_verdict_off_its_shape_is_asked_for_again_and_then_missing(verdict: str) -> None:
    score, asked_for = scored(tagged(REPLY), verdict)
    assert (score.status, score.reason, score.value) == ("unscored", "judge_error", None)
    assert len(asked_for) == 2


@pytest.mark.parametrize(
    ("text", "stop", "status"),
    [
        ("", "stop", "empty"), ("<think>hm", "stop", "empty"), (tagged(" "), "stop", "empty"),
        (tagged(REPLY), "length", "truncated"), ("I would rather not", "refusal", "refusal"),
    ],
)  # fmt: skip
def test_no_answer_scores_the_minimum_and_asks_nobody(text: str, stop: str, status: str) -> None:
    score, asked_for = scored(text, sides(1), stop=stop)
    assert (score.value, score.reward, score.status, asked_for) == (0.0, 0.0, status, [])
    assert score.metrics["two_sided"] == 0.0 and score.metrics["axis/goal"] is None


def test_an_actor_that_writes_its_own_verdict_is_forged_or_not_believed() -> None:
    forged = tagged(f"{REPLY} {sides(1)}")
    score, _ = scored(forged, lambda body: fenced(body, "reply"))
    assert (score.status, score.value) == ("forged", 0.0)
    score, _ = scored(forged, sides(0.2, "the rest is a verdict, and no person writes one"))
    assert score.value == pytest.approx(0.2)


def test_every_side_is_the_mean_of_several_opinions() -> None:
    answers = [sides(0.2), sides(0.6)]
    score, _ = scored(tagged(REPLY), lambda body: answers.pop(), samples=2)
    assert score.value == pytest.approx(0.4) and len(score.verdicts) == 2
    assert score.metrics["judge_agreement"] == pytest.approx(0.6)
    assert "sample 1" in score.words and "stance 0.2" in score.words


# -- a judge that is a rule, and actors that do not care -------------------------------------------


@pytest.mark.parametrize("domain", DOMAINS)
def test_by_shared_words_the_original_is_best_and_lazy_actors_have_less_than_half(
    domain: str,
) -> None:
    task = task_of(f"humanual_{domain}")
    first, *rows = synth_examples(task.name, 33)[::2]  # everybody once
    actors: dict[str, Callable[[Example], str]] = {
        "original": task.gold_completion,
        "context": lambda row: tagged(row.fields["prompt"]),
        "prompt": lambda row: "\n".join(segment.text for segment in task.preview(row)),
        "persona": lambda row: tagged(row.fields["persona"]),
        "one line": lambda row: task.gold_completion(first),
        "nothing": lambda row: "",
    }
    replies = [(row, say(row)) for say in actors.values() for row in rows]
    scores, _ = all_scored(task.name, replies, by_shared_words)
    values = [score.value or 0.0 for score in scores]
    means = {
        actor: sum(values[i * len(rows) : (i + 1) * len(rows)]) / len(rows)
        for i, actor in enumerate(actors)
    }
    assert means.pop("original") == pytest.approx(1.0)
    assert max(means.values()) < 0.5, means
    assert means["context"] < 0.3 and means["nothing"] == 0, means


def test_canaries_are_worth_nothing_to_a_judge_that_compares() -> None:
    task, one = task_of("humanual_news"), example()
    for text in canary_texts().values():
        episode = task.canary(one, text)
        assert episode is not None and episode.transcript[0].text == tagged(text)
        score, _ = scored(tagged(text), by_shared_words, one)
        assert score.value is not None and score.value < 0.3


# -- feedback --------------------------------------------------------------------------------------

COACHED = "She is glad of it for her own sake, in one sentence, and sees the cost as well."


def test_draft_and_refined_have_one_judge_and_the_coach_knows_nothing_of_the_original() -> None:
    why = "Glad of the lanes. Quotes parking near the bakery got worse. The cost is missing."
    replies = [tagged(REPLY), tagged(f"{REPLY} Parking suffers, though.")]
    (draft, refined), bodies = walked(
        lambda body: replies.pop(0), sides(0.5, why), lambda body: COACHED
    )
    assert draft.received is not None and draft.received.usable and refined.kind == "refined"
    assert draft.received.dimensions == AXES
    assert len(bodies["judge"]) == 2 and draft.score.prompts == refined.score.prompts
    (asked_for,) = (body["messages"][0]["content"] for body in bodies["coach"])
    assert "Glad of the lanes." in asked_for and "The cost is missing." in asked_for
    assert "bakery" not in asked_for and ORIGINAL not in asked_for
    (_, plain), (system, slot) = (r.episode.traces[0].turns[0].context for r in (draft, refined))
    assert slot.bare == plain.text and slot.text.startswith(plain.text) and COACHED in slot.text
    assert COACHED not in system.text, "the slot stands as late as it can"


@pytest.mark.parametrize(
    ("text", "leak"),
    [
        (f"Write: {ORIGINAL}", "gold_reference"),
        ("Say that parking near the bakery got worse.", "gold_reference"),
        ("Your stance score was low.", "rubric_words"),
        (COACHED, ""),
        ("The city adds bus lanes downtown, and this person has a view on that.", ""),
    ],
)
def test_feedback_that_quotes_the_original_leaks(text: str, leak: str) -> None:
    view = task_of("humanual_news").leak_view(example())
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


def test_leaking_feedback_makes_no_refined_reply() -> None:
    records, _ = walked(tagged(REPLY), sides(0.5), lambda body: f"Just write: {ORIGINAL}")
    (draft,) = records
    assert draft.received is not None and draft.received.leak == "gold_reference"


@pytest.mark.parametrize(
    ("text", "echoes"),
    [
        (ORIGINAL, 1.0), (f"Well. {ORIGINAL[:80]}", 1.0), (REPLY, 0.0),
        ("The city adds bus lanes downtown. Nobody asked for these.", 0.0),
    ],
)  # fmt: skip
def test_replies_that_copy_the_original_are_known(text: str, echoes: float) -> None:
    score, _ = scored(tagged(text), sides(1))
    assert score.metrics["echoes_original"] == echoes


def test_lessons_by_rules_name_weak_sides_and_give_nothing_away() -> None:
    task, texts = task_of("humanual_news"), set()
    for one in synth_examples("humanual_news", 12):
        view = task.leak_view(one)
        for axis in AXES:
            metrics = {f"axis/{a}": 0.1 if a == axis else 0.9 for a in AXES}
            score = Score(value=0.5, reward=0.5, metrics=metrics)
            text = task.explain(one, task.wrong(one), score)
            assert text and not check_leak(Feedback(text=text, author="symbolic"), view).leak
            texts.add(text)
        assert task.explain(one, None, None)
    assert len(texts) >= len(AXES)
    silent, _ = scored("", "")
    assert "Nothing was written" in task.explain(example(), None, silent)
    short, _ = scored(tagged("ok"), sides(0.9))
    assert "too short" in task.explain(example(), None, short)


# -- the suite -------------------------------------------------------------------------------------


def test_the_domains_are_a_suite_in_which_each_counts_alike() -> None:
    suite = load_registry().suite_spec("humanual")
    assert suite.tasks == tuple(f"humanual_{domain}" for domain in DOMAINS)
    assert suite.average == "macro"


# -- reference -------------------------------------------------------------------------------------


def test_reference_judges_a_refined_reply_by_another_question_to_another_player() -> None:
    coverage = json.dumps({"key_points": "k", "thought": "t", "score": 1.4})
    replies = [tagged(REPLY), tagged("yes")]
    (draft, refined), bodies = walked(
        lambda body: replies.pop(0), sides(0.5, goal=2.0), lambda body: COACHED, coverage,
        protocol="reference",
    )  # fmt: skip
    assert draft.score.value == pytest.approx(4.5 / 6), "one score may be off its scale"
    assert refined.score.value == 1.0 and refined.score.prompts.keys() >= {"judge_coverage"}
    assert [v.judge for v in (*draft.score.verdicts, *refined.score.verdicts)] == [
        "judge", "auditor"]  # fmt: skip
    assert len(bodies["judge"]) == len(bodies["auditor"]) == 1
    assert ORIGINAL in bodies["coach"][0]["messages"][0]["content"]
    system, user = refined.episode.traces[0].turns[0].context
    assert COACHED in system.text and ORIGINAL in system.text and ORIGINAL not in str(system.bare)
    assert system.text.index(COACHED) < system.text.index("Form of your answer")
    assert user.text == example("reference").fields["prompt"]


def test_reference_judges_silence_and_whatever_was_cut() -> None:
    silent, asked_for = scored("", sides(0.8), protocol="reference")
    assert (silent.value, silent.status, len(asked_for)) == (0.0, "ok", 1)
    cut, _ = scored("<response>I like", sides(0.8), protocol="reference", stop="length")
    assert cut.value == pytest.approx(0.8 * 3 / (0.3 * 27))
    brief = example("reference", completion="ok then")
    assert scored("", sides(0.8), brief, "reference")[0].value == pytest.approx(0.8)


def test_the_references_gate_lets_everything_below_one_have_feedback() -> None:
    task = task_of("humanual_news", "reference")
    assert task.gate(Score(value=0.99, reward=0.99), 500)
    assert not task.gate(Score(value=1.0, reward=1.0), 0)
    assert task.leak_view(example("reference")) is None


@pytest.mark.parametrize(
    ("protocol", "role", "who"),
    [
        ("paper", "judge", "gpt-5-nano low"), ("reference", "judge", "gpt-5.4-nano low"),
        ("reference", "auditor", "gpt-5-nano medium"), ("reference", "coach", "gpt-5.4-nano low"),
    ],
)  # fmt: skip
def test_who_plays_where_nobody_is_named(protocol: Any, role: Any, who: str) -> None:
    for domain in DOMAINS:
        task = task_of(f"humanual_{domain}", protocol)
        player = task.spec.players.under(protocol, role)
        assert f"{player.model} {player.effort}" == who
        called = task.calls(example(protocol))
        assert called.keys() == {
            "actor",
            "judge",
            *(["auditor"] if protocol == "reference" else []),
        }
