"""Episodes → trained token sequences. Nothing the actor emitted is re-tokenised.

A turn is (prompt ids, emitted ids). Two turns share a sequence iff the later prompt starts with
the earlier prompt and emission; where a template breaks that, each turn is a sequence of its own,
and all of them share the rollout. A *copy* is a refined episode whose every prompt is rendered
again with the feedback slot empty; the emitted ids stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from soulkit.types import Episode, Record, Segment, Trace, Turn

Part = Literal["draft", "copy", "refined", "gold"]


class Renders(Protocol):
    """What sequences need of `models.render.Renderer`."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]: ...

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Ids of one sequence, `True` where a token is trained, and the sampler's log-probs there."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    sampler: tuple[float, ...]
    """One per trained token, in order; empty where the sampler gave none."""

    @property
    def n_trained(self) -> int:
        return sum(self.trained)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """What a forward pass depends on."""
        return self.ids, self.trained


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence with its place in the groups."""

    span: Span
    part: Part
    example_id: str
    group: tuple[str, ...]
    """Advantage group: (example, role) for drafts and copies, with `feedback` for refined."""
    rollout: str
    """Sequences of one rollout count once in their group."""
    reward: float | None
    weight: float = 1.0
    """λ of its component. Sequences of weight 0 are neither counted nor computed."""
    advantage: float = 0.0

    @property
    def component(self) -> str:
        return "feedback" if self.part == "refined" else "base"


def spans(turns: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> list[Span]:
    """(prompt ids, emitted ids, log-probs) of one trace's turns, merged where they continue."""
    merged: list[Span] = []
    for prompt, emitted, logprobs in turns:
        head = merged[-1] if merged else None
        if head is not None and tuple(prompt[: len(head.ids)]) == head.ids:
            merged.pop()
            new = tuple(prompt[len(head.ids) :])
            before, trained, sampler = head.ids, head.trained, head.sampler
        else:
            new, before, trained, sampler = tuple(prompt), (), (), ()
        merged.append(
            Span(
                ids=(*before, *new, *emitted),
                trained=(*trained, *(False,) * len(new), *(True,) * len(emitted)),
                sampler=(*sampler, *logprobs),
            )
        )
    return merged


def emitted_spans(trace: Trace) -> list[Span]:
    """The sequences of a trace as they were sampled."""
    turns = (turn.completion for turn in trace.turns)
    return spans((c.prompt_ids, c.token_ids, c.logprobs) for c in turns)


def copied_spans(trace: Trace, renderer: Renders) -> list[Span]:
    """The same emissions under the prompts without feedback; log-probs stay the sampler's."""

    def bare(turn: Turn) -> list[int]:
        return renderer.prompt_ids(renderer.bare(turn.context))

    said = ((bare(turn), turn.completion) for turn in trace.turns)
    return spans((prompt, c.token_ids, c.logprobs) for prompt, c in said)


def sequences_of(
    record: Record, part: Part, renderer: Renders, weight: float = 1.0
) -> Iterator[TrainSequence]:
    """Every trained sequence of one record, as a draft, a copy or a refined rollout."""
    for trace in record.episode.traces:
        found = copied_spans(trace, renderer) if part == "copy" else emitted_spans(trace)
        for span in found:
            if span.n_trained:
                yield TrainSequence(
                    span=span,
                    part=part,
                    example_id=record.example_id,
                    group=_group(record, trace, part),
                    rollout=f"{record.rollout}/{'draft' if part == 'draft' else 'refined'}",
                    reward=record.score.reward,
                    weight=weight,
                )


def _group(record: Record, trace: Trace, part: Part) -> tuple[str, ...]:
    feedback = ("feedback",) if part == "refined" else ()
    return (record.example_id, trace.seat, *feedback)


def gold_spans(episode: Episode, renderer: Renders, encode: EncodeReply) -> list[Span]:
    """The sequences of a scripted episode: replies are tokenised here, as they were never sampled.

    The earlier replies of a dialogue are spliced in as the ids that train them, so that the turns
    share one sequence just as sampled ones do.
    """
    found: list[Span] = []
    for trace in episode.traces:
        replies = [encode(turn.completion.text) for turn in trace.turns]
        turns = []
        for index, turn in enumerate(trace.turns):
            earlier = iter(replies[:index])
            context = [
                Segment(s.role, s.text, s.bare, tuple(next(earlier)))
                if s.role == "assistant"
                else s
                for s in turn.context
            ]
            turns.append((renderer.prompt_ids(context), replies[index], ()))
        found += spans(turns)
    return found


class EncodeReply(Protocol):
    """Text of a reply → its ids with the end-of-turn token."""

    def __call__(self, text: str) -> list[int]: ...
