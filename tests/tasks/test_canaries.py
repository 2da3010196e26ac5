"""Every judged task has canaries that a judge would really be shown; no other task has any."""

from __future__ import annotations

import asyncio

import pytest

from soulkit.errors import CallError
from soulkit.models.base import Cast, Panel
from soulkit.tasks.canaries import CANARY_NAMES, canary_episodes, canary_texts, fixed_examples
from tests.support.road import TASKS, makeable, played_by, synth_examples, task_of

MADE = [name for name in TASKS if name in makeable()]


@pytest.mark.parametrize("name", MADE)
def test_the_actor_says_the_text_and_nothing_else(name):
    task = task_of(name)
    for example in synth_examples(name, 12):
        judged = bool(task.calls(example).get("judge"))
        canaries = canary_episodes(task, [example])
        assert [c.name for c in canaries] == (list(CANARY_NAMES) if judged else [])
        for canary in canaries:
            traces = canary.episode.traces
            assert {trace.seat for trace in traces} == set(task.acted_seats(example))
            texts = [turn.completion.text for trace in traces for turn in trace.turns]
            assert texts and all(words_of(canary_texts()[canary.name], text) for text in texts)
            assert all(turn.context for trace in traces for turn in trace.turns)


def words_of(text: str, speech: str) -> bool:
    """Whether a reply, whatever form it has, holds the words of a canary."""
    return " ".join(text.split())[:60] in " ".join(speech.split())


@pytest.mark.parametrize("name", MADE)
def test_the_judge_is_shown_the_text(name):
    task, shown = task_of(name), []
    examples = [e for e in synth_examples(name, 12) if task.calls(e).get("judge")]
    if not examples:
        return

    def listen(body):
        shown.append("\n".join(m["content"] for m in body["messages"]))
        return "mumble"

    async def score(canary):
        with played_by(listen) as judge:
            cast = Cast(actor=judge, judges=(judge,), panel=Panel())
            try:
                await canary.task.score(canary.example, canary.episode, cast)
            finally:
                await judge.model.close()

    for canary in canary_episodes(task, examples[:1]):
        shown.clear()
        with pytest.raises(CallError):  # a mumbling judge: no score, and no number in its place
            asyncio.run(score(canary))
        assert any(words_of(canary_texts()[canary.name], prompt) for prompt in shown)


def test_the_examples_are_the_same_ones_in_any_order():
    rows = synth_examples("tomi", 9)
    assert (
        fixed_examples(rows, 2) == fixed_examples(rows[::-1], 2)
        and len(fixed_examples(rows, 2)) == 2
    )
