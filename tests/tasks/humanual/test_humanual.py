"""Humanual: rows, prompts and scores by judges over HTTP, whole runs, both protocols."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.tasks.humanual import judging
from soulkit.tasks.humanual.judging import AXES, two_sided_factor
from soulkit.tasks.humanual.task import field_text, read_comment
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.rewards import canary_texts
from soulkit.types import Example, Feedback, Score
from tests.support.evaluation import examples, soul, summary
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
from tests.support.servers.openai_server import Body, ScriptedServer
from tests.support.table import asked_of, in_turn
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.humanual import reference

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
    (draft, refined), bodies = walked(actor=in_turn(replies), judge=sides(0.5, why), coach=COACHED)
    assert draft.received is not None and draft.received.usable and refined.kind == "refined"
    assert draft.received.dimensions == AXES
    assert len(asked_of(bodies, "judge")) == 2 and draft.score.prompts == refined.score.prompts
    (asked_for,) = (body["messages"][0]["content"] for body in asked_of(bodies, "coach"))
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
    records, _ = walked(actor=tagged(REPLY), judge=sides(0.5), coach=f"Just write: {ORIGINAL}")
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
        "reference", actor=in_turn(replies), judge=sides(0.5, goal=2.0), coach=COACHED,
        auditor=coverage,
    )  # fmt: skip
    assert draft.score.value == pytest.approx(4.5 / 6), "one score may be off its scale"
    assert refined.score.value == 1.0 and refined.score.prompts.keys() >= {"judge_coverage"}
    assert [v.judge for v in (*draft.score.verdicts, *refined.score.verdicts)] == [
        "judge-0", "auditor"]  # fmt: skip
    assert len(asked_of(bodies, "judge")) == len(asked_of(bodies, "auditor")) == 1
    assert ORIGINAL in asked_of(bodies, "coach")[0]["messages"][0]["content"]
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


LONG = "I will think about this for quite some time before I say anything at all "


def evaluated(out: Path, actor: Any, judge: Any, *arguments: object) -> tuple[int, list[Body]]:
    """`soul eval api` by servers, and what the judge was asked."""
    with ScriptedServer(answer=actor) as actors, ScriptedServer(answer=judge) as judges:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actors.base_url, "--out", out,
            "--judge", f"endpoint:j@{judges.base_url}", "--backoff", 0, *arguments,
        )  # fmt: skip
        return code, judges.requests


def test_the_suite_is_the_mean_of_six_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = dict(zip(DOMAINS, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), strict=True))
    by_text = {
        row.fields["prompt"]: score
        for domain, score in scores.items()
        for row in examples(f"humanual_{domain}", 3)
    }

    def judge(body: Body) -> str:
        return sides(by_text.get(fenced(body, "context"), 0.5))

    data = [part for d in DOMAINS for part in ("--data", f"humanual_{d}=synth:3")]
    code, _ = evaluated(tmp_path / "run", tagged(LONG), judge, "--suite", "humanual", *data)
    assert code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "humanual mean (6 of 6) 0.500" in shown and "18/18" in shown
    means = [summary(tmp_path / "run")["tasks"][f"humanual_{d}"]["value"]["mean"] for d in DOMAINS]
    assert means == pytest.approx(list(scores.values()))


REPAIRED = {
    "first-tag-wins": "the last tag decides",
    "unclosed-think-kept": "unclosed thinking is not said",
    "unclosed-tag-kept-in-text": "a mark is no part of what is said",
    "missing-tag-returns-whole-text": "marks that are left over are no part of what is said",
    "per-dimension-score-not-clamped": "a score off its scale is unreadable",
    "nan-score-becomes-full-reward": "a score that is no number is unreadable",
    "judge-failure-becomes-zero": "the episode is unscored",
}
"""Quirk → what `paper` does instead."""
UNUSED: dict[str, Callable[[Any], float]] = {
    "judge_response": reference.judge_response,
    "judge_response_subscores": reference.judge_response_subscores,
}
COUNTED: dict[str, Callable[..., Any]] = {
    "lexical_f1": judging.lexical_f1,
    "length_factor": judging.length_factor,
    "aggregates": reference.reference_aggregates,
}


@conformance("humanual.parse")
def test_parse(vector: Vector) -> None:
    inputs = vector.input
    if vector.family == "tokenize":
        assert_matches({"result": judging.word_tokens(inputs["text"])}, vector.expected)
        return
    actual = field_text(inputs["text"], inputs["field"])
    assert_matches({"result": actual}, vector.expected)


@conformance("humanual.parse")
def test_replies_under_paper(vector: Vector) -> None:
    if vector.family != "extract_field" or vector.input["field"] != "response":
        return
    comment, status = read_comment(vector.input["text"] or "", "paper")
    if comment != vector.expected["result"]:
        assert set(vector.quirks) & set(REPAIRED) and status in ("salvaged", "empty", "ok")
    elif "missing-tag-returns-whole-text" in vector.quirks:
        assert status == "salvaged"


@conformance("humanual.lexical", formula={"aggregates"})
def test_lexical(vector: Vector) -> None:
    arguments = {k: v for k, v in vector.input.items() if k != "fn"}
    assert_matches({"result": COUNTED[vector.family](**arguments)}, vector.expected)


# -- judged --------------------------------------------------------------------------------------


def as_logged(numbers: Mapping[str, Any]) -> dict[str, Any]:
    value = numbers["likeness"]
    names = {"sides_mean": "judge_score", "length_factor": "length_factor",
             "lexical_f1": "lexical_f1"}  # fmt: skip
    sides = {f"{axis}_score": numbers[f"axis/{axis}"] for axis in judging.AXES
             if f"axis/{axis}" in numbers}  # fmt: skip
    parts = {label: numbers[name] for name, label in names.items() if name in numbers}
    logged = {"score": value, "parse_success": bool(sides), **sides, **parts}
    return {**{f"humanual/{name}": number for name, number in logged.items()}, "all/score": value}


@conformance("humanual.judged", formula={"", *UNUSED})
def test_published_numbers(vector: Vector) -> None:
    inputs = vector.input
    if vector.raises:
        with pytest.raises((KeyError, TypeError, ValueError)) as raised:
            published(inputs)
        assert raised.type.__name__ == vector.expected["error"]
        return
    assert_matches(published(inputs), vector.expected)


def published(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if unused := UNUSED.get(inputs.get("fn", "")):
        return {"score": unused(inputs["verdict"])}
    comment, _ = read_comment(inputs["output_text"] or "", "reference")
    verdict = None if inputs["verdict"] == "RAISE" else inputs["verdict"]
    numbers = reference.reference_numbers(verdict, comment, inputs["row"]["completion"])
    return {"reward": numbers["likeness"], "metrics": as_logged(numbers), "generated": comment}


def judged(vector: Vector, protocol: str) -> tuple[Score, int]:
    """The score of a vector's reply by a judge over HTTP, and how often that one was asked."""
    verdict = vector.input["verdict"]
    words = "" if verdict in (None, "RAISE") else json.dumps(verdict)
    one = example(protocol, **vector.input["row"])
    score, requests = scored(vector.input["output_text"] or "", words, one, protocol)
    return score, len(requests)


def is_read(vector: Vector) -> bool:
    """Whether a judge's words hold six numbers; a yes is none."""
    verdict = vector.input["verdict"]
    if vector.raises or not isinstance(verdict, dict):
        return False
    numbers = [verdict[axis]["score"] for axis in judging.AXES]
    return all(isinstance(n, int | float) and not isinstance(n, bool) and n == n for n in numbers)


@conformance("humanual.judged", fns={""})
def test_judged_over_http(vector: Vector) -> None:
    """A judge that cannot be read scores nothing in any protocol; all else is the reference's."""
    score, calls = judged(vector, "reference")
    if not is_read(vector):
        assert (score.status, score.reason, calls) == ("unscored", "judge_error", 2)
        return
    numbers = {"likeness": score.value, **score.metrics}
    assert calls == 1 and score.reward == score.value
    assert_matches(as_logged(numbers), vector.expected["metrics"])


@conformance("humanual.judged", fns={""})
def test_judged_under_paper(vector: Vector) -> None:
    try:
        score, calls = judged(vector, "paper")
    except DataError:
        why = ("empty", "JSON object")
        assert any(word in vector.note for word in why), "nothing to answer, nothing to compare"
        return
    repaired = set(vector.quirks) & set(REPAIRED)
    if score.status == "empty":
        assert (score.reward, calls) == (0.0, 0) and not (vector.input["output_text"] or "").strip()
    elif score.status == "unscored":
        assert calls == 2 and (repaired or not is_read(vector))
    elif not repaired or score.status == "salvaged":
        assert_matches(score.reward, vector.expected["reward"])
    assert all(0 <= n <= 1 for n in score.metrics.values() if n is not None)
