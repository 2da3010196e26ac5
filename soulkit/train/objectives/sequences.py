"""Episodes → trained token sequences. Nothing the actor emitted is re-tokenised.

A turn is (prompt ids, emitted ids). Two turns share a sequence iff the later prompt starts with
the earlier prompt and emission; where a template breaks that, each turn is a sequence of its own,
and all of them share the rollout. A *copy* is a refined episode whose every prompt is rendered
again with the feedback slot empty; the emitted ids stay. Its mirror image, what a teacher reads, is
a draft whose every prompt is rendered again with the slot filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

from soulkit.types import Episode, Feedback, Record, Segment, Trace, Turn

Part = Literal["draft", "copy", "refined", "gold"]

Loss = Literal["policy", "regression", "imitation", "divergence"]
"""What a sequence's tokens are trained with: the clipped policy gradient, A ∇log π without a ratio,
cross-entropy, or a divergence to the teacher's distributions."""


Slot = Callable[[Record, str, Feedback], Segment]
"""(a record, its acted seat, feedback) → the seat's message with the feedback slot filled."""

TurnIds = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Prompt ids, emitted ids and the sampler's log-probs (or none) of one turn."""


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
    """λ of its component. Sequences of weight 0 are not computed, nor counted but for `counted`."""
    counted: bool = False
    """At weight 0 its tokens stay in the denominators: what they leave is not shared out."""
    advantage: float = 0.0
    compared: bool = True
    """Its rewards enter the group's statistics, which set its advantage; else it keeps its own."""
    loss: Loss = "policy"
    teacher: Span | None = None
    """The same emissions in the context that the teacher reads."""
    teacher_weight: float = 0.0
    """What the teacher's token advantages count for beside `advantage`, in a policy sequence."""
    task: str = ""
    """Whose teacher reads it, where every task has its own."""
    start: int = 0
    """Tokens of its trace that earlier sequences train."""

    @property
    def trace(self) -> tuple[str, str, str]:
        """(example, rollout, seat). A copy and its refined twin have the same trace, and the same
        tokens in it from the same `start` on."""
        return self.example_id, self.rollout, self.group[1]

    @property
    def component(self) -> str:
        """Sequences of one component share a denominator when denominators are separate."""
        if self.loss != "policy":
            return self.loss
        return "feedback" if self.part == "refined" else "base"


def spans(turns: Iterable[TurnIds]) -> list[Span]:
    """The turns of one trace as sequences, merged where they continue."""
    merged: list[Span] = []
    for turn in turns:
        head = merged.pop() if merged and _continues(merged[-1], turn) else None
        merged.append(_extended(head, turn))
    return merged


def paired_spans(turns: Iterable[tuple[TurnIds, TurnIds]]) -> list[tuple[Span, Span]]:
    """The same turns in two contexts, merged only where both continue: token answers token."""
    merged: list[tuple[Span, Span]] = []
    for plain, other in turns:
        first, second = merged[-1] if merged else (None, None)
        if first and second and _continues(first, plain) and _continues(second, other):
            merged[-1] = (_extended(first, plain), _extended(second, other))
        else:
            merged.append((_extended(None, plain), _extended(None, other)))
    return merged


def _continues(head: Span, turn: TurnIds) -> bool:
    return tuple(turn[0][: len(head.ids)]) == head.ids


def _extended(head: Span | None, turn: TurnIds) -> Span:
    """`head` with what a turn adds to it, or the turn alone."""
    prompt, emitted, logprobs = turn
    before = head or Span((), (), ())
    new = tuple(prompt[len(before.ids) :])
    return Span(
        ids=(*before.ids, *new, *emitted),
        trained=(*before.trained, *(False,) * len(new), *(True,) * len(emitted)),
        sampler=(*before.sampler, *logprobs),
    )


def emitted_spans(trace: Trace) -> list[Span]:
    """The sequences of a trace as they were sampled."""
    turns = (turn.completion for turn in trace.turns)
    return spans((c.prompt_ids, c.token_ids, c.logprobs) for c in turns)


def copied_spans(trace: Trace, renderer: Renders) -> list[Span]:
    """The same emissions under the prompts without feedback; log-probs stay the sampler's."""

    def bare(turn: Turn) -> list[int]:
        return renderer.prompt_ids(renderer.bare(turn.context))

    turns = ((bare(turn), turn.completion) for turn in trace.turns)
    return spans((prompt, c.token_ids, c.logprobs) for prompt, c in turns)


def filled_context(context: Sequence[Segment], slot: Segment) -> tuple[Segment, ...]:
    """The same conversation with `slot` for the message that holds the feedback slot.

    Raises ValueError when no message has that slot: the feedback would reach nobody.
    """
    places = [s.bare is not None and s.bare == slot.bare for s in context]
    if not any(places):
        raise ValueError(f"no message of the conversation has the slot of {slot.bare!r}")
    return tuple(slot if here else s for s, here in zip(context, places, strict=True))


def feedback_spans(trace: Trace, renderer: Renders, slot: Segment) -> list[tuple[Span, Span]]:
    """The sequences of a draft's trace, each with its mirror image: the same emissions under the
    prompts with the slot filled."""

    def both(turn: Turn) -> tuple[TurnIds, TurnIds]:
        c, prompt = turn.completion, renderer.prompt_ids(filled_context(turn.context, slot))
        return (c.prompt_ids, c.token_ids, c.logprobs), (prompt, c.token_ids, c.logprobs)

    return paired_spans(both(turn) for turn in trace.turns)


def sequences_of(
    record: Record, part: Part, renderer: Renders, weight: float = 1.0
) -> Iterator[TrainSequence]:
    """Every trained sequence of one record, as a draft, a copy or a refined rollout."""
    for trace in record.episode.traces:
        parts = copied_spans(trace, renderer) if part == "copy" else emitted_spans(trace)
        for start, span in zip(_starts(parts), parts, strict=False):
            if span.n_trained:
                yield _sequence(record, trace, part, span, weight, start)


def feedback_sequences(record: Record, renderer: Renders, slot: Slot) -> Iterator[TrainSequence]:
    """Every trained sequence of a draft with what the teacher reads.

    A draft without usable feedback has the sequences of `sequences_of`, without a teacher.
    """
    feedback = record.received
    if feedback is None or not feedback.usable:
        yield from sequences_of(record, "draft", renderer)
        return
    for trace in record.episode.traces:
        pairs = feedback_spans(trace, renderer, slot(record, trace.seat, feedback))
        starts = _starts([span for span, _ in pairs])
        for start, (span, reading) in zip(starts, pairs, strict=False):
            if span.n_trained:
                yield replace(_sequence(record, trace, "draft", span, 1.0, start), teacher=reading)


def without_truncated(
    sequences: Sequence[TrainSequence], records: Sequence[Record]
) -> list[TrainSequence]:
    """The same with weight 0 for episodes that ran into the length limit in any turn.

    They stay in the statistics of their group: their rewards were earned like any other.
    """
    cut = {(r.example_id, f"{r.rollout}/{r.kind}") for r in records if _ran_out(r)}
    return [
        replace(s, weight=0.0, counted=False) if (s.example_id, s.rollout) in cut else s
        for s in sequences
    ]


def _ran_out(record: Record) -> bool:
    turns = (turn for trace in record.episode.traces for turn in trace.turns)
    return any(turn.completion.stop_reason == "length" for turn in turns)


def _starts(parts: Sequence[Span]) -> Iterator[int]:
    """For each sequence of a trace, how many tokens the ones before it train."""
    return accumulate((span.n_trained for span in parts), initial=0)


def _sequence(
    record: Record, trace: Trace, part: Part, span: Span, weight: float, start: int
) -> TrainSequence:
    return TrainSequence(
        span=span,
        part=part,
        example_id=record.example_id,
        group=_group(record, trace, part),
        rollout=f"{record.rollout}/{'draft' if part == 'draft' else 'refined'}",
        reward=record.score.reward,
        weight=weight,
        task=record.task,
        start=start,
    )


def _group(record: Record, trace: Trace, part: Part) -> tuple[str, ...]:
    feedback = ("feedback",) if part == "refined" else ()
    return (record.example_id, trace.seat, *feedback)


def gold_spans(episode: Episode, renderer: Renders, encode: EncodeReply) -> list[Span]:
    """The sequences of a scripted episode: replies are tokenised here, as they were never sampled.

    The earlier replies of a dialogue are spliced in as the ids that train them, so that the turns
    share one sequence just as sampled ones do.
    """
    sequences: list[Span] = []
    for trace in episode.traces:
        replies = [encode(turn.completion.text) for turn in trace.turns]
        turns = [
            (renderer.prompt_ids(_spliced(turn.context, replies[:index])), replies[index], ())
            for index, turn in enumerate(trace.turns)
        ]
        sequences += spans(turns)
    return sequences


def _spliced(context: Sequence[Segment], replies: Sequence[Sequence[int]]) -> list[Segment]:
    """A turn's context with the ids of the replies before it in their places.

    The seat's words from before its first turn stay as they are: nobody emitted them.
    """
    places = [i for i, segment in enumerate(context) if segment.role == "assistant"]
    ids = dict(zip(places[len(places) - len(replies) :], replies, strict=True))
    return [replace(s, token_ids=tuple(ids[i])) if i in ids else s for i, s in enumerate(context)]


class EncodeReply(Protocol):
    """Text of a reply → its ids with the end-of-turn token."""

    def __call__(self, text: str) -> list[int]: ...
