"""Episodes → trained token sequences. Tokens that the actor emitted are never re-tokenised.

A turn is (prompt ids, emitted ids). Two turns share a sequence iff the later prompt starts with
the earlier prompt and emission. If a template breaks that, each turn is its own sequence, and all
of them belong to the same rollout. A *copy* is a refined episode with every prompt rendered again
with an empty feedback slot; the emitted ids stay. A teacher reads the reverse: a draft with every
prompt rendered again with the slot filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Protocol

from soulkit.types import Episode, Feedback, Record, Segment, Trace, Turn

Part = Literal["draft", "copy", "refined", "gold"]

Loss = Literal["policy", "shaped", "regression", "preference", "imitation", "divergence"]
"""Loss of a sequence's tokens: clipped policy gradient, A f(π) without a ratio, A ∇log π without a
ratio, DPO on pairs of rollouts, cross-entropy, or a divergence from the teacher's distributions."""


Slot = Callable[[Record, str, Feedback], Segment]
"""(record, acted seat, feedback) → the seat's message with the feedback slot filled."""

TurnIds = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Prompt ids, emitted ids and the sampler's log-probs (or none) of one turn."""


class Renders(Protocol):
    """The part of `models.render.Renderer` that sequences use."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]: ...

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Token ids of one sequence, flags for trained ids, and the sampler's log-probs of these."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    sampler: tuple[float, ...]
    """One per trained token, in order; empty if the sampler returned none."""

    @property
    def n_trained(self) -> int:
        return sum(self.trained)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The input of a forward pass."""
        return self.ids, self.trained


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """A sequence with its group, weight and loss."""

    span: Span
    part: Part
    example_id: str
    group: tuple[str, ...]
    """Advantage group: (example, role) for drafts and copies, with `feedback` for refined."""
    rollout: str
    """Sequences of one rollout count once in their group."""
    reward: float | None
    weight: float = 1.0
    """λ of its component. Sequences of weight 0 are not computed; they count only if `counted`."""
    counted: bool = False
    """Whether its tokens stay in the denominators at weight 0."""
    advantage: float = 0.0
    compared: bool = True
    """Whether the group statistics use its reward and set its advantage; else it keeps its own."""
    loss: Loss = "policy"
    teacher: Span | None = None
    """The same emissions in the context that the teacher reads."""
    teacher_weight: float = 0.0
    """Weight of the teacher's token advantages that are added to `advantage`, with policy loss."""
    task: str = ""
    """Selects the teacher if every task has its own."""
    start: int = 0
    """Number of tokens of its trace that earlier sequences train."""

    @property
    def trace(self) -> tuple[str, str, str]:
        """(example, rollout, seat). A copy and its refined rollout have the same trace and
        `start`."""
        return self.example_id, self.rollout, self.group[1]

    @property
    def by_reward(self) -> bool:
        """Whether it is part of the loss on rewards, with a common denominator and aggregation."""
        return self.loss in ("policy", "shaped")

    @property
    def component(self) -> str:
        """The component whose sequences share a denominator, if denominators are separate."""
        if not self.by_reward:
            return self.loss
        return "feedback" if self.part == "refined" else "base"


def spans(turns: Iterable[TurnIds]) -> list[Span]:
    """The turns of one trace as sequences; a turn that continues the last one is merged with it."""
    merged: list[Span] = []
    for turn in turns:
        head = merged.pop() if merged and _continues(merged[-1], turn) else None
        merged.append(_extended(head, turn))
    return merged


def paired_spans(turns: Iterable[tuple[TurnIds, TurnIds]]) -> list[tuple[Span, Span]]:
    """The same turns in two contexts, merged only if both continue, so that tokens align."""
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
    """`head` extended by a turn, or the turn alone."""
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
    """The sampled tokens after prompts without feedback; log-probs stay those of the sampler."""

    def bare(turn: Turn) -> list[int]:
        return renderer.prompt_ids(renderer.bare(turn.context))

    turns = ((bare(turn), turn.completion) for turn in trace.turns)
    return spans((prompt, c.token_ids, c.logprobs) for prompt, c in turns)


def filled_context(context: Sequence[Segment], slot: Segment) -> tuple[Segment, ...]:
    """The conversation with `slot` in place of the message that has the feedback slot.

    Raises ValueError if no message has that slot.
    """
    places = [s.bare is not None and s.bare == slot.bare for s in context]
    if not any(places):
        raise ValueError(f"no message of the conversation has the slot of {slot.bare!r}")
    return tuple(slot if here else s for s, here in zip(context, places, strict=True))


def feedback_spans(trace: Trace, renderer: Renders, slot: Segment) -> list[tuple[Span, Span]]:
    """Pairs of sequences of a draft's trace: as sampled, and with feedback in the prompts."""

    def both(turn: Turn) -> tuple[TurnIds, TurnIds]:
        c, prompt = turn.completion, renderer.prompt_ids(filled_context(turn.context, slot))
        return (c.prompt_ids, c.token_ids, c.logprobs), (prompt, c.token_ids, c.logprobs)

    return paired_spans(both(turn) for turn in trace.turns)


def sequences_of(
    record: Record, part: Part, renderer: Renders, weight: float = 1.0
) -> Iterator[TrainSequence]:
    """The trained sequences of one record, as a draft, a copy or a refined rollout."""
    for trace in record.episode.traces:
        parts = copied_spans(trace, renderer) if part == "copy" else emitted_spans(trace)
        for start, span in zip(_starts(parts), parts, strict=False):
            if span.n_trained:
                yield _sequence(record, trace, part, span, weight, start)


def feedback_sequences(record: Record, renderer: Renders, slot: Slot) -> Iterator[TrainSequence]:
    """The trained sequences of a draft, each with the sequence that the teacher reads.

    A draft without usable feedback gives the sequences of `sequences_of`, without a teacher.
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
    """The sequences, with weight 0 for episodes in which any turn was truncated.

    They remain in the statistics of their group.
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
    """For each sequence of a trace, the number of tokens that earlier ones train."""
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
    """The sequences of a gold episode. Its replies are tokenised here, as they were not sampled.

    Earlier replies are inserted as their trained ids, so that turns share one sequence as sampled
    turns do.
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
    """A turn's context with the ids of the earlier replies filled in.

    Assistant messages from before the first turn stay text, because they are not trained.
    """
    places = [i for i, segment in enumerate(context) if segment.role == "assistant"]
    ids = dict(zip(places[len(places) - len(replies) :], replies, strict=True))
    return [replace(s, token_ids=tuple(ids[i])) if i in ids else s for i, s in enumerate(context)]


class EncodeReply(Protocol):
    """Text of a reply → its ids with the end-of-turn token."""

    def __call__(self, text: str) -> list[int]: ...
