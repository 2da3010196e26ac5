"""SimulatorArena over HTTP: how a person is played, who sees what, and what becomes of failures.

SimulatorArena's feedback: what a coach hears, what must not be said, rules, refined rollouts.

SimulatorArena by the commands: replies at their limit, real files, a kill, a training run.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.data.files import read_rows
from soulkit.judge.leaks import check_leak
from soulkit.models.base import Panel
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.sim_arena.play import read_utterance
from soulkit.tasks.sim_arena.task import FINAL_DOCUMENT
from soulkit.types import Feedback, Record, Score
from tests.support.arena import (
    FEATURE,
    LESSON,
    PHRASE,
    arena,
    example,
    feature_names,
    purpose,
    record,
    student,
    table,
    verdicts,
    walked,
)
from tests.support.evaluation import records, soul, summary
from tests.support.road import run, synth_examples
from tests.support.servers.answers import answer as by_schema
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.table import asked_of, in_turn

PROTOCOLS = ("paper", "reference")
BOTH = ("sim_math", "sim_doc")
EDIT = "Message: make it warmer"


def texts(outcome: Record) -> list[str]:
    return [line.text for line in outcome.episode.transcript]


def first_prompt(body: Body) -> str:
    return str(body["messages"][0]["content"])


# -- the conversation ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", BOTH)
def test_a_person_has_eight_messages(name: str, protocol: str) -> None:
    (outcome,), requests = walked(name, protocol, actor="Message: Query: more")
    assert outcome.episode.stop == "max_turns" and len(outcome.episode.transcript) == 16
    calls = arena(name, protocol).calls(example(name, protocol))
    assert {role: len(asked_of(requests, role)) for role in ("actor", "partner", "judge")} == calls
    assert calls["partner"] == (9 if name == "sim_doc" else 8)
    assert outcome.score.metrics["turns/ended"] == 0.0


def test_the_assistant_hears_words_without_tags_and_the_task_around_the_first() -> None:
    (outcome,), requests = walked()
    assert texts(outcome) == ["how do i start", "What have you tried?", "ok so step 1",
                              "What have you tried?"]  # fmt: skip
    assert outcome.episode.stop == "terminated" and outcome.score.metrics["turns/ended"] == 1.0
    first, second = (body["messages"] for body in asked_of(requests, "partner"))
    assert [m["role"] for m in second] == ["system", "user", "assistant", "user"]
    assert "Find x if 2x + 3 = 1103." in first[1]["content"]
    assert first[1]["content"].endswith("how do i start")
    assert second[3]["content"] == "ok so step 1"
    (trace,) = outcome.episode.traces
    assert [turn.completion.text for turn in trace.turns][-1] == PHRASE, "it trains with the rest"
    replies = [s.text for s in trace.turns[-1].context if s.role == "assistant"]
    assert replies == ["Query: how do i start", "Response: ok so step 1"], "its own words, tags too"


def test_what_is_said_with_the_last_words_is_heard_and_not_answered() -> None:
    outcome = record(actor=in_turn(["Query: how?", f"Response: thanks!\n{PHRASE}"]))
    assert texts(outcome) == ["how?", "What have you tried?", "thanks!"]
    assert outcome.episode.stop == "terminated"
    assert outcome.score.metrics["turns/messages"] == 2.0


def test_judges_see_no_format_and_each_its_own() -> None:
    _, requests = walked(row=example(human_user_queries=['a "quoted"\nline', "b"]))
    prompts = {purpose(body): first_prompt(body) for body in asked_of(requests, "judge")}
    assert not any(word in text for text in prompts.values() for word in (PHRASE, "Query:"))
    writing, interaction = prompts["writing"], prompts["interaction"]
    assert "Student: “a ”quoted” line”" in writing.replace("’", "”")
    assert "What have you tried?" not in writing and "What have you tried?" in interaction
    assert "What could you take away?" in interaction
    assert "- asks why: Does the student ask why?" in prompts["fulfillment"]
    assert "- short turns: A few words." in prompts["fulfillment"], "what is known of it goes first"


def test_nobody_reads_what_it_may_not() -> None:
    """Neither actor nor assistant sees the person's words, the answer or the judge's columns."""
    secrets = {"sim_math": ["minus three on both", "550"],
               "sim_doc": ["write about lentil", "short, warm", "typos"]}  # fmt: skip
    for name, hidden in secrets.items():
        _, requests = walked(name, actor=in_turn([EDIT, PHRASE]))
        seen = json.dumps([*asked_of(requests, "actor"), *asked_of(requests, "partner")])
        assert not [text for text in hidden if text in seen]
    assert "casual writer" not in json.dumps(asked_of(requests, "partner")), (
        "a profile is the actor's"
    )


# -- the document ----------------------------------------------------------------------------------


def document_partner(text: str) -> Any:
    """An assistant whose final document is `text`."""
    return lambda body: text if "final version" in str(body["messages"][-1]) else "Here: a draft."


def test_the_document_is_one_more_call_and_the_judge_reads_it() -> None:
    (outcome,), requests = walked("sim_doc", actor=in_turn([EDIT, PHRASE]),
                                  partner=document_partner("Soup for all."))  # fmt: skip
    assert outcome.episode.notes[FINAL_DOCUMENT] == "Soup for all."
    assert "Soup for all." not in texts(outcome)
    (request,) = [b for b in asked_of(requests, "judge") if purpose(b) == "document"]
    assert "Soup for all." in first_prompt(request) and "short, warm" in first_prompt(request)
    last = asked_of(requests, "partner")[-1]["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "user"]
    assert outcome.score.metrics["document/rating"] == 8.0


@pytest.mark.parametrize("trouble", ["", "<think>hm</think>"])
def test_a_document_that_fails_leaves_the_conversation_unscored_and_on_record(trouble: str) -> None:
    (outcome,), requests = walked(
        "sim_doc", actor=in_turn([EDIT, PHRASE]), partner=document_partner(trouble)
    )
    assert (outcome.score.value, outcome.score.reason) == (None, "partner_error")
    assert "twice" in outcome.score.words and texts(outcome) == ["make it warmer", "Here: a draft."]
    assert not asked_of(requests, "judge") and len(asked_of(requests, "partner")) == 3


def test_a_server_that_fails_on_the_document_is_no_score_under_either_protocol() -> None:
    def script(_: int, body: Body) -> Fault | None:
        final = "final version" in str(body["messages"][-1])
        return Fault.status_error(500, "overloaded") if final else None

    for protocol in PROTOCOLS:
        outcome = record("sim_doc", protocol, actor=in_turn([EDIT, PHRASE]), script=script)
        assert outcome.score.reason == "partner_error" and len(texts(outcome)) == 2


def test_reference_rates_a_document_that_nobody_asked_for() -> None:
    outcome = record("sim_doc", "reference", actor=PHRASE)
    assert outcome.episode.transcript == () and outcome.score.value == pytest.approx(0.84)


# -- silence, cuts, refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("reply", ["", "<think>what now</think>", PHRASE, "Query:"])
def test_a_person_that_never_says_anything_has_the_minimum_without_a_judge(reply: str) -> None:
    for name in BOTH:
        actor = reply.replace("Query", "Message") if name == "sim_doc" else reply
        (outcome,), requests = walked(name, actor=actor)
        assert (outcome.score.value, outcome.score.reward) == (0.0, 0.0)
        assert outcome.score.status == "empty" and {b["model"] for b in requests} == {"actor"}


def test_silence_after_words_ends_a_conversation_that_is_judged() -> None:
    outcome = record(actor=in_turn(["Query: how?"]))
    assert outcome.episode.stop == "empty" and outcome.score.status == "empty"
    assert outcome.score.value == pytest.approx(0.8)


def test_cut_turns_are_said_and_bound_the_score() -> None:
    (outcome,), _ = walked(actor=student(2), partner="Go on.")
    assert outcome.score.metrics["turns/cut"] == 0.0
    with table(actor="Query: " + "word " * 40) as (cast, _):
        short = replace(cast, actor=replace(
            cast.actor, sampling=replace(cast.actor.sampling, max_tokens=12)))  # fmt: skip
        task, row = arena(), example()

        async def road() -> Score:
            return await task.judged(row, await task.play(row, short, Rollout()), short)

        score = run(cast, road())
    assert score.status == "truncated" and score.metrics["turns/cut"] == 1.0


# -- scores ----------------------------------------------------------------------------------------


def test_the_headline_and_what_stands_beside_it() -> None:
    math = record(judge=verdicts(writing=3.5, interaction=2, fulfillment=["Match", "No Match"]))
    assert math.score.value == pytest.approx((3.5 / 5 + 2 / 5 + 0.5) / 3) == math.score.reward
    metrics = math.score.metrics
    assert (metrics["style/writing"], metrics["style/writing_from_zero"]) == (3.5, 0.625)
    assert metrics["style/interaction_from_zero"] == 0.25 and metrics["features/met"] == 0.5
    shown = {"asks for edits": "Match", "typos": "No Match", "LOWERCASE": "Match"}
    doc = record("sim_doc", judge=verdicts(5, 4, 6, shown))
    assert doc.score.value == pytest.approx((0.6 + 1 + 0.8 + 0.5 + 1) / 5)
    assert doc.score.metrics["features/interaction"] == 1.0, "by name, in any order and case"
    placed = record("sim_doc", "reference", judge=verdicts(5, 4, 6, shown))
    assert placed.score.value == pytest.approx((0.6 + 1 + 0.8 + 0.5 + 1) / 5)
    assert placed.score.metrics["features/writing"] == 0.5, "by place"


@pytest.mark.parametrize(
    "features",
    [
        ["Match"],
        ["Match", "Match", "Match"],
        {"asks why": "Match", "another": "Match"},
        {"asks why": "Match"},
        "Match, Match",
        '{"results": [{"feature_name": "asks why", "analysis": "", "classification": "Match"},'
        ' {"feature_name": "asks why", "analysis": "", "classification": "Match"}]}',
    ],
)
def test_features_that_are_not_all_named_once_leave_it_unscored(features: Any) -> None:
    (outcome,), requests = walked(judge=verdicts(fulfillment=features))
    assert (outcome.score.value, outcome.score.reason) == (None, "judge_error")
    assert len(asked_of(requests, "judge")) == 4, "only what could not be read is asked for again"


@pytest.mark.parametrize("part", ["writing", "interaction", "fulfillment", "document"])
def test_a_part_that_a_judge_owes_is_no_zero(part: str) -> None:
    for bad in ("no verdict", '{"similarity_score": 7, "rating": 11}'):
        outcome = record("sim_doc", judge=verdicts(**{part: bad}))
        assert (outcome.score.value, outcome.score.reason) == (None, "judge_error")
        published = record("sim_doc", "reference", judge=verdicts(**{part: bad}))
        assert published.score.scored and published.score.value is not None
        full = record("sim_doc", "reference").score.value
        assert full is not None and published.score.value < full
        assert published.score.metrics["parts/answered"] == 0.75
        answered = arena("sim_doc", "reference").summarise([published])["parts/answered"]
        assert (answered.value, answered.n_scored) == (0.75, 1)


def test_a_number_off_its_scale_counts_under_reference_and_its_share_stays_a_share() -> None:
    outcome = record(protocol="reference", judge=verdicts(writing=0.5, interaction=9)).score
    assert outcome.value == pytest.approx((0.1 + 1 + 1) / 3)
    assert outcome.metrics["style/writing"] == 0.5
    assert outcome.metrics["style/writing_from_zero"] == 0.0
    assert outcome.metrics["style/interaction_from_zero"] == 1.0


def test_a_row_without_features_has_the_mean_of_what_is_there() -> None:
    bare = example(target_interaction_style_features=None)
    (outcome,), requests = walked(row=bare)
    assert outcome.score.value == pytest.approx((4 / 5 + 3 / 5) / 2)
    assert outcome.score.metrics["parts/share"] == pytest.approx(2 / 3)
    assert "features/met" not in outcome.score.metrics and len(asked_of(requests, "judge")) == 2
    assert arena().calls(bare)["judge"] == 2
    reference = example(protocol="reference", target_interaction_style_features=None)
    (published,), _ = walked(protocol="reference", row=reference)
    assert published.score.value == pytest.approx((4 / 5 + 3 / 5) / 3)


def test_every_part_is_over_the_rows_that_have_it_and_the_headline_over_the_parts() -> None:
    rows = [example(), example(target_interaction_style_features=[]), example(problem="Other")]
    plays = [walked(row=row)[0][0] for row in rows[:2]]
    lost = walked(row=rows[2], judge=verdicts(writing="none"))[0][0]
    metrics = arena().batch_metrics([*plays, lost])
    features = metrics["parts/features_met"]
    assert (features.value, features.n_scored, features.n) == (1.0, 1, 2)
    assert (metrics["parts/style_writing"].n_scored, metrics["parts/style_writing"].n) == (2, 3)
    whole, some = metrics["similarity/all_parts"], metrics["similarity/some_parts"]
    assert (whole.n_scored, whole.n) == (1, 2) and whole.value == pytest.approx(0.8)
    assert (some.n_scored, some.n) == (1, 1) and some.value == pytest.approx(0.7)
    assert arena().headline([*plays, lost]) == pytest.approx((0.8 + 0.6 + 1.0) / 3)
    assert (metrics["similarity"].n_scored, metrics["similarity"].n) == (2, 3)


def test_a_person_that_never_spoke_has_nothing_of_any_part() -> None:
    silent = walked("sim_doc", row=example("sim_doc"), actor=lambda body: "")[0][0]
    assert silent.score.status == "empty"
    spoken = walked("sim_doc", row=example("sim_doc", intent="another"))[0][0]
    alone, both = (arena("sim_doc").headline(rows) for rows in ([spoken], [spoken, silent]))
    assert alone is not None and both == pytest.approx(alone / 2)


def test_two_features_of_one_name_are_two_features() -> None:
    twice = example(target_interaction_style_features=[FEATURE, {**FEATURE}])
    (outcome,), requests = walked(row=twice)
    (request,) = [b for b in asked_of(requests, "judge") if purpose(b) == "fulfillment"]
    assert feature_names(request) == ["asks why", "asks why (2)"]
    assert outcome.score.metrics["features/met"] == 1.0


def test_several_opinions_are_pooled_part_by_part() -> None:
    numbers = iter([1, 5])

    def judge(body: Body) -> str:
        writing = next(numbers) if purpose(body) == "writing" else 4
        return verdicts(writing=writing)(body)

    outcome = record(judge=judge, judges=2, panel=Panel())
    assert outcome.score.metrics["style/writing"] == 3.0
    assert outcome.score.metrics["judge_agreement"] == 0.5


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "text", "ended", "status"),
    [
        ("Response: ok", "ok", False, "ok"),
        ("response: ok", "ok", False, "ok"),
        ("**Response:** ok", "ok", False, "ok"),
        ("<think>Response: no</think>Query: yes", "yes", False, "ok"),
        ("Thought: lost\nQuery: help", "help", False, "salvaged"),
        ("1. Response: step", "step", False, "salvaged"),
        ("just words", "just words", False, "salvaged"),
        ("Response: a\n\nb Query: c", "a\n\nb Query: c", False, "ok"),
        ("terminate conversation", "", True, "ok"),
        ("Response: **Terminate conversation.**", "", True, "ok"),
        ("[terminate conversation]", "", True, "ok"),
        ("Response: thx\nterminate conversation", "thx", True, "ok"),
        ("Response: please do not terminate conversation yet",
         "please do not terminate conversation yet", False, "ok"),
        ("Response:", "", False, "empty"),
        ("  \n", "", False, "empty"),
    ],
)  # fmt: skip
def test_how_a_turn_is_read(reply: str, text: str, ended: bool, status: str) -> None:
    turn = read_utterance(reply, ("Query", "Response"))
    assert (turn.text, turn.ended, turn.status) == (text, ended, status)


@given(st.text(max_size=200))
def test_whatever_is_written_is_read(reply: str) -> None:
    for name in BOTH:
        for protocol in PROTOCOLS:
            turn = arena(name, protocol).read(reply)
            assert not turn.text or turn.status in ("ok", "salvaged")


@pytest.mark.parametrize("part", ["\n", "_ * ", "Query: ", "terminate conversation ", "*"])
def test_long_replies_are_read_at_once(part: str) -> None:
    reply = (part * 1_000_000)[:1_000_000]
    start = time.process_time()
    read_utterance(reply, ("Query", "Response"))
    assert time.process_time() - start < 10, "the time grows with the square of the length"


# -- plans, scripts, rows --------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_a_judge_that_follows_its_schema_alone_is_read(name: str) -> None:
    (outcome,), requests = walked(name, judge=by_schema)
    assert outcome.score.scored and outcome.score.metrics["judge/reasked"] == 0.0
    assert len(asked_of(requests, "judge")) == arena(name).calls(example(name))["judge"]


@pytest.mark.parametrize("name", BOTH)
def test_the_gold_is_what_the_person_wrote(name: str) -> None:
    for row in synth_examples(name, 12):
        episode = arena(name).gold(row)
        assert episode is not None
        spoken = [line.text for line in episode.transcript if line.seat == episode.traces[0].seat]
        assert spoken == row.fields["human_user_queries"][:8]
    assert LESSON["human_user_queries"][0] in arena().gold_text(example())


QUOTE = "oh so minus three on both sides then"


def remarks(task: Any, row: Any, replies: list[str]) -> str:
    text = task.explain(row, task.scripted_talk(row, replies), None)
    assert isinstance(text, str)
    return text


def test_the_coach_hears_the_judges_and_not_the_person() -> None:
    prompts: list[str] = []

    def coach(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return "Write in small letters.\n\nAsk for one step at a time."

    why = f"Far too formal for this student. They write “{QUOTE}”. No doubts show."
    (draft, refined), requests = walked(
        judge=verdicts(writing=2, why=why), coach=coach, feedback=FeedbackPolicy()
    )
    (prompt,) = prompts
    assert "Far too formal for this student." in prompt and "No doubts show." in prompt
    assert QUOTE not in prompt and "550" not in prompt
    assert "how do i start" in prompt, "the attempt"
    assert "the manner of writing: 2.0 on a scale from 1 to 5" in prompt
    assert draft.received is not None and not draft.received.leak
    assert refined.kind == "refined" and refined.score.value == refined.score.reward
    opening = refined.episode.traces[0].turns[0].context[0]
    assert opening.text.endswith("Write in small letters.\n\nAsk for one step at a time.")
    assert opening.bare == draft.episode.traces[0].turns[0].context[0].text
    draft_questions = {purpose(body) for body in asked_of(requests, "judge")}
    assert len(asked_of(requests, "judge")) == 2 * len(draft_questions), "one judge for both"


def test_the_document_of_a_refined_conversation_is_asked_for_and_rated_too() -> None:
    (draft, refined), requests = walked(
        "sim_doc", actor=student(2), coach="Be brief.", feedback=FeedbackPolicy()
    )
    assert {"final_document"} <= set(draft.episode.notes) & set(refined.episode.notes)
    assert len([b for b in asked_of(requests, "judge") if purpose(b) == "document"]) == 2
    assert refined.score.metrics["document/rating"] == 8.0


@pytest.mark.parametrize(
    ("text", "leak"),
    [
        (f"Say something like “{QUOTE}”.", "gold_reference"),
        ("You should arrive at 550 in the end.", "private_text"),
        ("Your similarity score was low.", "rubric_words"),
        ("Write in small letters, leave out full stops, and ask for one step at a time.", ""),
        ("Say that you are stuck where 2x + 3 = 1103 has to be solved.", ""),
    ],
)
def test_what_must_not_be_said_to_the_actor(text: str, leak: str) -> None:
    view = arena().leak_view(example())
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


def test_one_whole_message_is_a_leak_however_long_the_conversation_was() -> None:
    talk = [f"so {n} what should come now with term {n}" for n in range(20)]
    row = example(human_user_queries=[*talk, "lemme check my notes first", "ty so much"])
    for text, leak in [("Say: lemme check my notes first.", "gold_reference"),
                       ("End with ty so much.", ""), ("Check your work first.", "")]:  # fmt: skip
        view = arena().leak_view(row)
        assert check_leak(Feedback(text=text, author="coach"), view).leak == leak, text


LONG = "Response: " + "so I was thinking about this for quite some time and now " * 3


@pytest.mark.parametrize(
    ("replies", "remark"),
    [
        (["how do i start", PHRASE], "not in the form"),
        (["Query: how do i even start here", ""], "held nothing"),
        ([PHRASE], "Nothing was said"),
        (["Query: how", LONG, LONG.upper()], "far longer"),
        (["Query: go", "Response: ok", PHRASE], "far shorter"),
        (["Query: Where do I begin?", "Response: I see it.", PHRASE], "seldom begins a message"),
        (["Query: same words again here", "Response: same words again here"], "came twice"),
        ([f"Query: {i} what would you do at this point" for i in range(8)], "never ended"),
    ],
)
def test_rules_remark_on_the_draft(replies: list[str], remark: str) -> None:
    text = remarks(arena(), example(), replies)
    assert remark in text
    assert not check_leak(Feedback(text=text, author="symbolic"), arena().leak_view(example())).leak


def test_a_message_of_nothing_but_marks_is_remarked_on_at_once() -> None:
    task, row = arena(), example()
    start = time.process_time()
    text = remarks(task, row, ["Query: " + "!" * 300_000 + "a", PHRASE])
    # A search that tries every mark anew takes a quarter of an hour for this one.
    assert time.process_time() - start < 5
    assert "ends messages with a mark" not in text
    assert "seldom ends a message" in remarks(task, row, ["Query: help me (now!)", PHRASE])


def test_rules_remark_on_a_copied_problem_and_an_early_end() -> None:
    problem = "A garden is four metres longer than it is wide and its fence is long."
    row = example(problem=problem, human_user_queries=["a b c d e"] * 6)
    text = remarks(arena(), row, [f"Query: {problem}", PHRASE])
    assert "copied what lies before" in text and "content far sooner" in text


def test_the_reference_gives_nobody_feedback() -> None:
    task = arena(protocol="reference")
    for value in (0.0, 0.5, 1.0):
        assert not task.gate(Score(value=value, reward=value), 0)
        assert arena().gate(Score(value=value, reward=value), 0) == (value < 1.0)


def test_a_judge_that_quotes_the_person_in_part_is_not_passed_on() -> None:
    seen: list[str] = []

    def coach(body: Body) -> str:
        seen.append(str(body["messages"][0]["content"]))
        return "Be brief."

    short = {**LESSON, "human_user_queries": ["thx mate", "lemme try again"]}
    row = arena().example(short)
    judge = verdicts(why="The real one says thx mate. Warmer in tone.")
    walked(row=row, judge=judge, coach=coach, feedback=FeedbackPolicy())
    assert "Warmer in tone." in seen[0] and "thx mate" not in seen[0]
    assert record().score.scored


DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere") / "simulatorarena"
LESSONS = DATA / "math_tutoring_annotations_redacted_for_benchmarking.json"
DOCUMENTS = DATA / "document_creation_annotations_for_benchmarking.json"
real = pytest.mark.skipif(
    not DOCUMENTS.is_file(), reason="no original files ($SOULKIT_TEST_DATA names their folder)"
)


def everybody(actor: Callable[[Body], str], judge: Callable[[Body], str] | None = None) -> Any:
    """Actor, assistant, judge and coach behind one address, told apart by their names."""
    score = judge or verdicts(writing=4, interaction=3)

    def answer(body: Body) -> str:
        match str(body["model"]):
            case "partner":
                return "Tell me more."
            case "coach":
                return "Write in small letters. Stop soon."
            case "judge":
                return score(body)
        return actor(body)

    return answer


def evaluated(out: Path, name: str, data: object, url: str, *arguments: object) -> int:
    players = [option for role in ("partner", "judge")
               for option in (f"--{role}", f"endpoint:{role}@{url}")]  # fmt: skip
    return soul(
        "eval", "api", "--model", "m", "--base-url", url, "--task", name, "--data",
        f"{name}={data}", "--out", out, "--backoff", "0", *players, *arguments,
    )  # fmt: skip


def likeness(prompt: str) -> float:
    """Which share of all words that the student or the program wrote both of them wrote."""
    real, program = (
        set(
            re.findall(
                r"\w+", " ".join(re.findall(r"^Student: (.*)", part, re.MULTILINE)).casefold()
            )
        )
        for part in re.findall(r"<(?:real|program) \w+>\n(.*?)\n</", prompt, re.DOTALL)
    )
    return len(real & program) / len(real | program)


@pytest.mark.slow
@real
def test_the_real_documents_are_played_and_resumed(tmp_path: Path) -> None:
    out, rows = tmp_path / "run", tmp_path / "doc.jsonl"
    assert soul("data", "import", "sim_doc", DOCUMENTS, "-o", rows) == 0
    broken = [True]

    def judge(body: Body) -> str:
        name = purpose(body)
        lost = broken[0] and name == "document" and "email" in str(body["messages"])
        return "" if lost else verdicts()(body)

    with ScriptedServer(answer=everybody(student(3), judge)) as server:
        assert evaluated(out, "sim_doc", rows, server.base_url) == 1
        lost = [r for r in records(out) if not r.score.scored]
        assert len(lost) >= 17 and {r.score.reason for r in lost} == {"judge_error"}
        assert all(r.episode.notes["final_document"] == "Tell me more." for r in lost)
        broken[0], before = False, len(server.requests)
        assert evaluated(out, "sim_doc", rows, server.base_url) == 0
        questions = [b for b in server.requests if b["model"] == "judge"]
        again = [b for b in server.requests[before:] if b["model"] != "judge"]
    assert not again, "what was said stays said, the document included"
    assert len({str(b["messages"][0]) for b in questions}) == 3 * 51, "no row has features"
    report = summary(out)["tasks"]["sim_doc"]
    assert report["value"]["mean"] == pytest.approx((0.8 + 4 / 5 + 3 / 5) / 3)
    assert report["similarity/some_parts"]["n"] == 51 and "similarity/all_parts" not in report
    similarity = report["similarity"]
    assert similarity["mean"] is None and "parts/features_writing" not in report
    assert set(similarity["missing"]) == {"writing features", "interaction features"}


@pytest.mark.slow
@real
def test_the_real_lessons_are_played_and_their_people_are_known_again(tmp_path: Path) -> None:
    """With stand-ins for the problems, which the release lacks; the judge counts words."""
    lessons = restored(tmp_path)
    rows = tmp_path / "math.jsonl"
    assert soul("data", "import", "sim_math", lessons, "-o", rows) == 2, "one begins blank"
    people = {r["problem"]: r["human_user_queries"] for r in map(json.loads, rows.open())}

    def itself(body: Body) -> str:
        opening = str(body["messages"][1]["content"])
        messages = next(m for problem, m in people.items() if problem in opening)
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        return f"Query: {messages[spoken]}" if spoken < len(messages) else PHRASE

    def judge(body: Body) -> str:
        grade = 1 + 4 * likeness(str(body["messages"][0]["content"]))
        return verdicts(writing=grade, interaction=grade)(body)

    means = {}
    for name, actor in (("itself", itself), ("other", student(3))):
        with ScriptedServer(answer=everybody(actor, judge)) as server:
            assert evaluated(tmp_path / name, "sim_math", rows, server.base_url) == 0
        assert len(records(tmp_path / name)) == 49
        means[name] = summary(tmp_path / name)["tasks"]["sim_math"]["value"]["mean"]
    assert means["itself"] > 0.9 > means["other"] + 0.1


def restored(folder: Path) -> Path:
    """The redacted lessons with a stand-in for each problem beside them."""
    lessons = [row.fields for row in read_rows(LESSONS)[0]]
    for number, lesson in enumerate(lessons):
        place = folder / "MATH" / str(lesson["question_location"])
        place.parent.mkdir(parents=True, exist_ok=True)
        stand_in = {"problem": f"Stand-in number {number}.", "solution": "Not known."}
        place.write_text(json.dumps(stand_in))
    path = folder / LESSONS.name
    path.write_text(json.dumps(lessons))
    return path


# -- training --------------------------------------------------------------------------------------
