"""MirrorBench as it was published: ten messages, a live assistant, one question, open feedback."""

from __future__ import annotations

import json

import pytest

from soulkit.errors import ConfigError
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.mirrorbench.reference import NEXT
from tests.support.mirrorbench import (
    TURNS,
    asked_of,
    example,
    in_turn,
    mirrorbench,
    played,
    prompt_of,
)

LONG = [
    {"role": role, "content": f"{role} {i}"} for i in range(12) for role in ("user", "assistant")
]


def similar(score: float) -> str:
    return json.dumps({"reasoning": "Too long.", "score": score})


def test_ten_messages_are_played_and_judged_and_the_assistant_is_generated() -> None:
    task = mirrorbench("reference")
    row = example("reference", turns=LONG)
    assert task.calls(row) == {"actor": 5, "judge": 1, "partner": 4}
    (record,), requests = played(task, row, judge=similar(0.7), partner="Fine.")
    assert len(asked_of(requests, "actor")) == 5 and len(asked_of(requests, "partner")) == 4
    last = asked_of(requests, "actor")[-1]["messages"]
    assert last[-1]["content"] == f"AI: Fine.\n\n{NEXT}" and last[1]["content"] == NEXT
    assert "USER: user 11" in prompt_of(asked_of(requests, "partner")[0])
    (judged,) = asked_of(requests, "judge")
    assert "ASSISTANT: assistant 3\nUSER: user 4\n</real" in prompt_of(judged)
    assert record.score.value == 0.7 and "pairwise" not in record.score.metrics
    assert record.score.metrics["num_turn"] == 11


def test_an_opening_assistant_is_generated_too() -> None:
    turns = [{"role": "assistant", "content": "which year"}, {"role": "user", "content": "last"}]
    task = mirrorbench("reference")
    (record,), requests = played(
        task, example("reference", turns=turns), judge=similar(0.1), partner="Which one?"
    )
    assert record.episode.transcript[0].text == "Which one?"
    assert len(asked_of(requests, "partner")) == 1


def test_scores_are_clipped_and_silence_is_judged() -> None:
    task = mirrorbench("reference")
    (record,), _ = played(task, example("reference"), actor="", judge=similar(1.5))
    assert record.score.value == 1.0 and record.episode.stop == "empty"


def test_feedback_below_the_gate_holds_the_real_messages() -> None:
    task, row = mirrorbench("reference"), example("reference")
    actor = in_turn(["hello there", "and so"], then="train?")
    policy = FeedbackPolicy(when="task")
    (draft, refined), requests = played(
        task, row, policy, actor=actor, judge=similar(0.3), coach="Be shorter."
    )
    (prompt,) = map(prompt_of, asked_of(requests, "coach"))
    assert "Too long." in prompt and "hello there" not in prompt and "Lyon" not in prompt
    assert draft.received is not None and draft.received.text.startswith("Be shorter.")
    assert all(turn["content"] in draft.received.text for turn in TURNS if turn["role"] == "user")
    assert draft.received.usable and refined.kind == "refined"
    (alone,), _ = played(task, row, policy, judge=similar(0.4), coach="Be shorter.")
    assert alone.received is None


def test_a_replayed_assistant_is_none_of_it() -> None:
    with pytest.raises(ConfigError, match="no assistant 'replay' under reference"):
        mirrorbench("reference", assistant="replay")


@pytest.mark.parametrize("most", [0, -1])
def test_no_messages_are_no_conversation(most: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot play {most} messages"):
        mirrorbench("reference", reference_messages=most)
