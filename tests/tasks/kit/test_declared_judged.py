"""Tasks without code that a judge scores, dialogues, and the feedback of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.data.files import RawRow
from soulkit.errors import BrokenFile, UnreadableVerdict
from soulkit.models.base import Panel
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.rewards import CANARY_NAMES, canary_episodes
from soulkit.tasks.kit.selfcheck import check_task
from soulkit.types import Example, Record
from tests.support.servers.openai_server import Body
from tests.support.table import asked_of, in_turn, recorded

DIMENSIONS = {"warmth": "Is it warm to {{ friend }}?",
              "tact": {"rubric": "Is it tactful?", "low": 0, "high": 10, "weight": 3}}  # fmt: skip
JUDGED = {"kind": "judged", "prompt": "{{ friend }}: {{ message }}",
          "judge": {"rubric": "A friend is sad.", "dimensions": DIMENSIONS}}  # fmt: skip
ROW = {"friend": "Ada", "message": "I failed.", "reply": "Oh no, come over tonight, please!",
       "background": "Ada studied for three long months.", "human_warmth": 4}  # fmt: skip
TALK = {"kind": "dialogue", "prompt": "You are {{ name }}.", "judge": "Is the customer polite?",
        "dialogue": {"partner": "Policy: {{ policy }}", "turns": 3,
                     "ends": ["goodbye", "/bye[.!]/"]}}  # fmt: skip
CALL = {"name": "Ada", "policy": "No refunds on any sale item", "day": "Friday", "note": "calm"}


def declared(folder: Path, entry: dict[str, Any]) -> Task:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"tasks": {"mine": entry}}, sort_keys=False))
    load_registry.cache_clear()
    return load_registry(path).task("mine")


def row_of(task: Task, row: dict[str, Any]) -> Example:
    loaded = to_examples(task, [RawRow(row, "row")])
    assert not loaded.bad
    return loaded.examples[0]


def part(score: int, reasoning: str = "It is short.") -> dict[str, Any]:
    return {"reasoning": reasoning, "score": score}


def marks(warmth: int, tact: int, reasoning: str = "It is short.") -> str:
    return json.dumps({"warmth": part(warmth, reasoning), "tact": part(tact)})


def one(task: Task, row: dict[str, Any], **players: Any) -> tuple[Record, list[Body]]:
    records, requests = recorded(task, row_of(task, row), **players)
    return records[0], requests


def prompt_of(requests: list[Body], name: str) -> str:
    return "\n".join(str(m["content"]) for m in asked_of(requests, name)[0]["messages"])


# -- judged ----------------------------------------------------------------------------------------


def test_the_score_is_the_weighted_mean_of_the_dimensions(tmp_path: Path) -> None:
    task = declared(tmp_path, JUDGED)
    record, requests = one(task, ROW, actor="I am sorry.", judge=marks(2, 10))
    assert record.score.value == pytest.approx((0.25 + 3 * 1) / 4)
    assert (record.score.metrics["warmth"], record.score.metrics["tact"]) == (2, 10)
    assert task.spec.metric.scales["tact"] == (0, 10)
    prompt = prompt_of(requests, "judge")
    for shown in ("A friend is sad.", "Is it warm to Ada?", "I am sorry.", "Ada: I failed.",
                  "background: Ada studied"):  # fmt: skip
        assert shown in prompt
    assert "human_warmth" not in prompt
    assert "background" not in prompt_of(requests, "actor")


def test_a_rubric_is_a_part_of_the_prompts_hash(tmp_path: Path) -> None:
    hashes = []
    for rubric in ("Is it kind?", "Is it short?"):
        task = declared(tmp_path, {**JUDGED, "judge": rubric})
        record, _ = one(task, ROW, actor="Hm.", judge=json.dumps(part(10)))
        assert record.score.value == 1
        hashes.append(record.score.prompts["judge"])
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("reply", "verdict", "status", "value", "asked"),
    [
        ("", marks(5, 10), "empty", 0.0, 0),
        ("<think>hm</think>", marks(5, 10), "empty", 0.0, 0),
        ("Hi.", "great!", "unscored", None, 2),
        ("Hi.", marks(6, 10), "unscored", None, 2),
    ],
)
def test_failures_of_the_actor_and_of_the_judge(
    tmp_path: Path, reply: str, verdict: str, status: str, value: float | None, asked: int
) -> None:
    record, requests = one(declared(tmp_path, JUDGED), ROW, actor=reply, judge=verdict)
    assert (record.score.status, record.score.value) == (status, value)
    assert len(asked_of(requests, "judge")) == asked
    assert value is not None or record.score.reason == UnreadableVerdict.reason


def test_a_pair_is_judged_in_both_orders(tmp_path: Path) -> None:
    judge = {"rubric": "Which is warmer?", "both_orders": True, "samples": 2}
    task = declared(tmp_path, {**JUDGED, "gold": "reply", "judge": judge})

    def prefer(body: Body) -> str:
        text = str(body["messages"][0]["content"])
        first = text.index("I am sorry.") < text.index("come over tonight")
        return json.dumps({"reasoning": "It is warmer.", "verdict": "A" if first else "Tie"})

    record, requests = one(task, ROW, actor="I am sorry.", judge=prefer)
    assert record.score.value == 0.75 and record.score.metrics["position_flip"] == 1
    example = row_of(task, ROW)
    assert len(asked_of(requests, "judge")) == task.calls(example)["judge"] == task.pair_calls == 4


def test_a_judges_own_prompt_may_name_any_column(tmp_path: Path) -> None:
    judge = {"prompt": "{{ background }} | {{ reply }} | {{ gold }}", "rubric": "Kind?"}
    task = declared(tmp_path, {**JUDGED, "gold": "reply", "judge": judge})
    _, requests = one(task, ROW, actor="Hi.", judge=json.dumps(part(3)))
    prompt = prompt_of(requests, "judge")
    assert prompt.startswith("Ada studied") and "come over tonight" in prompt
    assert "from 1 (worst) to 10 (best)" in prompt, "the form of the answer is added"


# -- dialogues -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begins", "actor", "partner", "seats", "stop"),
    [
        ("partner", ["Hi."] * 3, ["Hello."] * 3, "pa" * 3, "max_turns"),
        ("actor", ["Hi."] * 3, ["Hello."] * 2, "apapa", "max_turns"),
        ("actor", ["Hi.", "GOODBYE then."], ["Hello."] * 2, "apa", "ended"),
        ("partner", ["Hi."] * 3, ["Goodbye? No.", "Bye!"], "pap", "ended"),
        ("actor", ["Hi.", ""], ["Hello."] * 2, "apa", "empty"),
    ],
)
def test_who_begins_and_how_it_ends(
    tmp_path: Path, begins: str, actor: list[str], partner: list[str], seats: str, stop: str
) -> None:
    talk = {**TALK["dialogue"], "begins": begins}  # type: ignore[dict-item]
    task = declared(tmp_path, {**TALK, "dialogue": talk})
    record, requests = one(task, CALL, actor=in_turn(actor), partner=in_turn(partner),
                           judge=json.dumps(part(7)))  # fmt: skip
    assert "".join(line.seat[0] for line in record.episode.transcript) == seats
    assert record.episode.stop == stop and record.score.value == pytest.approx(6 / 9)
    assert record.score.metrics["ended"] == (stop == "ended")
    calls = task.calls(row_of(task, CALL))
    assert len(asked_of(requests, "partner")) <= calls["partner"] == 3 - (begins == "actor")
    assert "No refunds" in prompt_of(requests, "partner")
    assert not any("No refunds" in prompt_of(requests, who) for who in ("actor", "judge"))
    assert "note: calm" in prompt_of(requests, "judge")
    assert asked_of(requests, "actor")[0]["messages"][0]["role"] == "system"


def test_an_actor_that_says_nothing_scores_the_minimum(tmp_path: Path) -> None:
    record, requests = one(declared(tmp_path, TALK), CALL, actor="", partner="Hello.", judge="?")
    assert record.score.value == 0 and record.score.status == "empty"
    assert not asked_of(requests, "judge")


@pytest.mark.parametrize(("last", "value"), [("Friday.", 1), ("Monday.", 0)])
def test_without_a_judge_the_last_line_is_the_answer(
    tmp_path: Path, last: str, value: float
) -> None:
    entry = {**TALK, "judge": None, "gold": "day", "scorer": "contains"}
    del entry["judge"]
    task = declared(tmp_path, entry)
    record, _ = one(task, CALL, actor=in_turn(["Hi.", "Hm.", last]), partner="Hello.")
    assert record.score.value == value and "judge" not in task.calls(row_of(task, CALL))


# -- checks ----------------------------------------------------------------------------------------

PAIR = {**JUDGED, "gold": "reply", "judge": {"rubric": "Kind?", "both_orders": True}}
BY_GOLD = {**{k: v for k, v in TALK.items() if k != "judge"}, "gold": "day"}


@pytest.mark.parametrize(
    ("entry", "row"),
    [
        (JUDGED, ROW), ({**JUDGED, "gold": "reply"}, ROW), ({**JUDGED, "answer": "tag"}, ROW),
        (PAIR, ROW), (TALK, CALL), (BY_GOLD, CALL),
        ({**TALK, "feedback": {"critique": True, "coach": "{{ remarks }} {{ name }}"}}, CALL),
    ],
)  # fmt: skip
def test_the_check_plays_gold_and_wrong(
    tmp_path: Path, entry: dict[str, Any], row: dict[str, Any]
) -> None:
    task = declared(tmp_path, entry)
    loaded = to_examples(task, [RawRow(row, "row")])
    check = check_task(task, loaded)
    assert not (check.gold_fails or check.wrong_passes or check.no_gold)
    assert bool(check.unscored) == (entry is PAIR), "a script cannot know the order of a pair"
    assert not (check.breaks or check.wrong_unread or check.no_wrong), check
    judged = "judge" in task.calls(loaded.examples[0])
    names = [canary.name for canary in canary_episodes(task, loaded.examples)]
    assert names == (list(CANARY_NAMES) if judged else [])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"judge": {"dimensions": {"a": {"rubric": "x", "low": 5}}}}, "low is 5 and high 5"),
        ({"judge": {"rubric": "x", "both_orders": True}}, "needs 'gold'"),
        ({"judge": {"rubric": "x", "both_orders": True}, "gold": "reply",
          "feedback": {"critique": True}}, "needs a judge that rates"),
        ({"judge": {"rubric": "{{ oops"}}, "not valid Jinja"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BrokenFile) as error:
        declared(tmp_path, {**JUDGED, **change})
    assert problem in str(error.value.lines())


# -- feedback --------------------------------------------------------------------------------------

RULES = [{"when": {"outcome": "unread"}, "say": "Say something."},
         {"when": {"tact": "low", "friend": "Ada"}, "say": "Be tactful."},
         {"when": {"outcome": "right"}, "say": "Perfect."}]  # fmt: skip
POLICY = FeedbackPolicy(when="all")


def feedback(task: Task, row: dict[str, Any], **players: Any) -> tuple[str, str, str]:
    """(text, author, leak) of the feedback on a draft; empty without any."""
    received = one(task, row, feedback=POLICY, **players)[0].received
    return (received.text, received.author, received.leak) if received else ("", "", "")


@pytest.mark.parametrize(
    ("keys", "reply", "verdict", "text"),
    [
        ({"rules": RULES}, "", marks(5, 10), "Say something."),
        ({"rules": RULES}, "Hi.", marks(5, 4), "Be tactful."),
        ({"rules": RULES}, "Hi.", marks(5, 10), "Perfect."),
        ({"rules": RULES}, "Hi.", marks(4, 9), ""),
        ({"rules": RULES, "critique": True}, "Hi.", marks(4, 4), "Be tactful."),
        ({"critique": True}, "Hi.", marks(4, 9, "Ada studied for three long months. Cold."),
         "warmth: Cold. tact: It is short."),
        ({"critique": True, "max_words": 3}, "Hi.", marks(4, 9), "warmth: It is [...]"),
        ({}, "Hi.", marks(2, 2), "That was weak. Read the instructions again, and do all "
         "that they ask for."),
    ],
)  # fmt: skip
def test_feedback_without_a_coach(
    tmp_path: Path, keys: dict[str, Any], reply: str, verdict: str, text: str
) -> None:
    task = declared(tmp_path, {**JUDGED, "feedback": keys})
    said, author, leak = feedback(task, ROW, actor=reply, judge=verdict)
    assert (said, leak) == (text, "")
    assert author == ("" if not text else "judge-0" if ": " in text else "symbolic")


def test_a_rule_that_gives_the_gold_away_is_a_leak(tmp_path: Path) -> None:
    rules = [{"say": "Offer that she may come over tonight, please!"}]
    task = declared(tmp_path, {**JUDGED, "gold": "reply", "feedback": {"rules": rules}})
    *_, leak = feedback(task, ROW, actor="Hi.", judge=marks(1, 1))
    assert leak == "gold_reference"


def test_the_coach_reads_the_task_and_what_the_judge_may_tell(tmp_path: Path) -> None:
    task = declared(tmp_path, JUDGED)
    verdict = marks(4, 9, "Ada studied for three long months. Cold.")
    record, requests = one(task, ROW, feedback=POLICY, actor="Hi.", judge=verdict, coach="Warmer!")
    prompt = prompt_of(requests, "coach")
    assert record.received is not None and record.received.text == "Warmer!"
    assert "Ada: I failed." in prompt and "warmth: Cold." in prompt and "studied" not in prompt


def test_the_default_coach_is_the_judge_unless_the_task_has_rules(tmp_path: Path) -> None:
    coaches = [
        declared(tmp_path, {**JUDGED, "feedback": keys}).spec.feedback.coaches
        for keys in ({}, {"rules": RULES}, {"critique": True, "coach": "{{ attempt }}"})
    ]
    assert coaches == [("symbolic", "model"), ("symbolic",), ("symbolic", "model")]


def test_samples_of_the_task_are_asked(tmp_path: Path) -> None:
    task = declared(tmp_path, {**JUDGED, "judge": {**JUDGED["judge"], "samples": 3}})  # type: ignore[dict-item]
    verdicts = in_turn([marks(1, 0), marks(5, 10), marks(3, 5)])
    record, requests = one(task, ROW, actor="Hi.", judge=verdicts, panel=Panel())
    assert len(asked_of(requests, "judge")) == 3 == task.calls(row_of(task, ROW))["judge"]
    assert record.score.value == pytest.approx(0.5)
    assert "judge_agreement" in record.score.metrics
