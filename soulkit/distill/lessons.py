"""From an episode to what is learned of it: one conversation for each acted seat and sequence.

A conversation grows while each turn saw what the turn before it saw and said. Where a task shows a
seat something else (a memory, another scene), the turn begins a conversation of its own, in which
earlier replies are context. Every reply keeps the exact ids that the expert emitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.distill.experts import Expert
from soulkit.types import Record, Segment, Trace


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    segment: Segment
    trained: bool

    def as_json(self) -> dict[str, Any]:
        segment = self.segment
        ids = {"token_ids": list(segment.token_ids)} if segment.token_ids else {}
        context = segment.role == "assistant" and not self.trained
        return {
            "role": segment.role, "content": segment.text, **ids,
            **({"trained": False} if context else {}),
        }  # fmt: skip


def lesson_lines(record: Record, expert: Expert) -> Iterator[dict[str, Any]]:
    """The rows of selected.jsonl that one episode makes."""
    for trace in record.episode.traces:
        for messages in lesson_conversations(trace):
            exact = any(message.segment.token_ids for message in messages)
            tokenizer = {"tokenizer": expert.tokenizer_print} if exact else {}
            yield {
                "messages": [message.as_json() for message in messages],
                "data_source": record.task, **tokenizer, "task": record.task,
                "example_id": record.example_id, "rollout": record.rollout, "seat": trace.seat,
                "value": record.score.value, "reward": record.score.reward,
                "expert": expert.weights or expert.model,
            }  # fmt: skip


def lesson_conversations(trace: Trace) -> list[list[Message]]:
    """The turns of one seat as conversations; each reply is learned in exactly one of them."""
    done: list[list[Message]] = []
    for turn in trace.turns:
        context = [_without_feedback(segment) for segment in turn.context]
        head = done[-1] if done and _goes_on(done[-1], context) else None
        if head is None:
            head = []
            done.append(head)
        head += [Message(segment, False) for segment in context[len(head) :]]
        reply = Segment("assistant", turn.completion.text, token_ids=turn.completion.token_ids)
        head.append(Message(reply, True))
    return done


def _goes_on(head: Sequence[Message], context: Sequence[Segment]) -> bool:
    pairs = zip(head, context, strict=False)
    return len(context) >= len(head) and all(_same(m.segment, segment) for m, segment in pairs)


def _same(one: Segment, other: Segment) -> bool:
    exact = bool(one.token_ids and other.token_ids)
    same = one.token_ids == other.token_ids if exact else one.text == other.text
    return one.role == other.role and same


def _without_feedback(segment: Segment) -> Segment:
    text = segment.text if segment.bare is None else segment.bare
    return Segment(segment.role, text, token_ids=segment.token_ids)
