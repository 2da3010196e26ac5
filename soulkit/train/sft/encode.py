"""Lessons → trained token sequences, in the form that RL training gives to sampled episodes.

If the chat template lets later prompts continue earlier ones, a conversation becomes one sequence
in which only its learned replies are trained, each with its end-of-turn token. This is determined
once per *shape* (order of roles, and text features that templates may test: tags, thinking, blank
messages). Otherwise every learned reply becomes its own sequence after its full prompt.

Exact ids are inserted and never tokenised again; ids of another tokenizer are refused. A
conversation that is too long loses its oldest turns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import ModelLoadError
from soulkit.models.local.chat_template import END_OF_THINKING, Renderer, tokenizer_hash
from soulkit.train.objectives.sequences import EncodeReply, Span, spans
from soulkit.types import Segment

NOT_ITS_WORDS = "its exact ids name no tokenizer, and do not spell its words"
REFUSED = "the model's chat template refuses it"
UNPRECEDED = "nothing stands before its first learned word"

MOST_COMPARED = 64
"""Maximum number of turns of a shape to compare, evenly spread."""

MOST_SHAPES = 10_000
"""Maximum number of cached shapes."""

_TAG = re.compile(r"\s*(<[\w|/]+)")
_SOUGHT = re.compile(
    r"""(?:"([^"\n]+)"|'([^'\n]+)')\s+(?:not\s+)?in\b"""
    r"""|\.(?:startswith|endswith|split|rsplit|find|replace|count)\(\s*(?:"([^"\n]+)"|'([^'\n]+)')"""
)

Shape = tuple[tuple[str, bool, str], ...]
"""Per message: role, whether it has exact ids, and text features that a template may test."""


@dataclass
class LessonEncoder:
    """Encodes lessons for one model: returns sequences of at most `limit` tokens, or the reason why
    the lesson cannot be used."""

    renderer: Renderer
    encode_reply: EncodeReply
    limit: int | None = None
    shortened: int = 0
    """Number of lessons that lost turns."""
    messages_left_out: int = 0
    """Number of messages they lost."""
    replies_left_out: int = 0
    """Number of learned replies among these."""
    unusable: Counter[str] = field(default_factory=Counter)
    """Reason → number of refused lessons."""
    _continues: dict[Shape, bool] = field(default_factory=dict)

    def __call__(self, lesson: Lesson) -> list[Span] | str:
        result: list[Span] | str = self._foreign(lesson)
        try:
            if lesson.trained[0] and not self._opening:
                result = result or UNPRECEDED
            result = result or self._fitting(lesson)
        except ModelLoadError:
            result = REFUSED
        if isinstance(result, str):
            self.unusable[result] += 1
        return result

    @cached_property
    def _opening(self) -> tuple[int, ...]:
        """Ids before a reply that opens the conversation."""
        return tuple(self.renderer.tokenize(self.renderer.opening()))

    @cached_property
    def _tokenizer_print(self) -> str:
        return tokenizer_hash(self.renderer.tokenizer)

    def _foreign(self, lesson: Lesson) -> str:
        exact = [s for s in lesson.segments if s.token_ids]
        if not exact:
            return ""
        if lesson.tokenizer:
            here = self._tokenizer_print
            if lesson.tokenizer == here:
                return ""
            return f"its exact ids are of tokenizer {lesson.tokenizer}, and the model's is {here}"
        return "" if all(self._spells(s) for s in exact) else NOT_ITS_WORDS

    def _spells(self, segment: Segment) -> bool:
        tokenizer = self.renderer.tokenizer
        if max(segment.token_ids) >= len(tokenizer):
            return False
        words = tokenizer.decode(list(segment.token_ids), skip_special_tokens=True)
        return str(words).strip() == segment.text.strip()

    def _fitting(self, lesson: Lesson) -> list[Span] | str:
        segments, trained = self._with_ids(lesson), lesson.trained
        whole = self._encoded(segments, trained)
        if self._fits(whole):
            return whole
        starts = list(_later_starts(segments, trained))
        low, high = 0, len(starts)
        shorter: list[Span] = []
        while low < high:  # binary search for the earliest start that fits
            middle = (low + high) // 2
            cut = self._encoded(*_from(starts[middle], segments, trained))
            if self._fits(cut):
                high, shorter = middle, cut
            else:
                low = middle + 1
        if not shorter:
            return f"its last turn alone is longer than {self.limit} tokens"
        lost = range(_rules(segments), starts[high])
        self.shortened += 1
        self.messages_left_out += len(lost)
        self.replies_left_out += sum(trained[i] for i in lost)
        return shorter

    def _fits(self, result: Sequence[Span]) -> bool:
        return self.limit is None or max(len(span.ids) for span in result) <= self.limit

    def _with_ids(self, lesson: Lesson) -> list[Segment]:
        """The messages, with ids for learned replies."""
        return [
            replace(s, token_ids=tuple(self.encode_reply(s.text)))
            if learned and not s.token_ids
            else s
            for s, learned in zip(lesson.segments, lesson.trained, strict=True)
        ]

    def _encoded(self, segments: Sequence[Segment], trained: Sequence[bool]) -> list[Span]:
        last = max(i for i, learned in enumerate(trained) if learned)
        context = segments[:last]
        if not self._keeps_replies(context):
            return self._turn_by_turn(segments, trained)
        pieces, blunted = self._pieces(context)
        if blunted or not self._is_stable(segments, trained, last, pieces):
            return self._turn_by_turn(segments, trained)
        return [self._in_one(segments[: last + 1], trained, pieces)]

    def _keeps_replies(self, context: Sequence[Segment]) -> bool:
        """Whether the template keeps all ids of earlier replies."""
        if not self.renderer.strips_thinking:
            return True
        history = self.renderer.history_ids
        return all(history(s.token_ids) == s.token_ids for s in context if s.token_ids)

    def _pieces(self, context: Sequence[Segment]) -> tuple[list[str], bool]:
        return self.renderer.pieces(context) if context else ([self.renderer.opening()], False)

    def _is_stable(
        self, segments: Sequence[Segment], trained: Sequence[bool], last: int, pieces: list[str]
    ) -> bool:
        """Whether every prompt of a conversation of this shape continues the earlier ones."""
        shape = tuple(
            (s.role, bool(s.token_ids), "" if s.token_ids else self._peculiarity(s.text))
            for s in segments[:last]
        )
        if shape not in self._continues:
            if len(self._continues) >= MOST_SHAPES:
                self._continues.clear()
            earlier = [i for i in range(last) if trained[i]]
            spliced = [s.token_ids for s in segments]
            self._continues[shape] = all(
                self._pieces(segments[:i])[0] == pieces[: 1 + sum(map(bool, spliced[:i]))]
                for i in earlier[:: -(-len(earlier) // MOST_COMPARED) or 1]
            )
        return self._continues[shape]

    @cached_property
    def _sought(self) -> tuple[str, ...]:
        """Strings that the template tests for, such as switches and tags."""
        matches = _SOUGHT.finditer(self.renderer.template)
        return tuple(sorted({next(filter(None, match.groups())) for match in matches}))

    def _peculiarity(self, text: str) -> str:
        """Features of a text that the template may test."""
        if not text.strip():
            return "blank"
        tag = _TAG.match(text)
        sought = (word for word in (END_OF_THINKING, *self._sought) if word in text)
        return "\0".join((tag[1] if tag else "", *sought))

    def _in_one(
        self, segments: Sequence[Segment], trained: Sequence[bool], pieces: list[str]
    ) -> Span:
        """One sequence from the pieces and the ids between them."""
        *history, final = (i for i, s in enumerate(segments) if s.token_ids)
        between = self.renderer.joined(pieces, [segments[i].token_ids for i in history])
        ids: list[int] = []
        flags: list[bool] = []
        for piece, place in zip(between, (*history, final), strict=True):
            emitted = segments[place].token_ids
            ids += (*piece, *emitted)
            flags += (*(False,) * len(piece), *(trained[place],) * len(emitted))
        return Span(tuple(ids), tuple(flags), ())

    def _turn_by_turn(self, segments: Sequence[Segment], trained: Sequence[bool]) -> list[Span]:
        """Every learned reply after its own prompt, merged where prompts continue."""
        return spans(
            (self._prompt(segments[:i]), segments[i].token_ids, ())
            for i, learned in enumerate(trained)
            if learned
        )

    def _prompt(self, context: Sequence[Segment]) -> Sequence[int]:
        return self.renderer.prompt_ids(context) if context else self._opening


def _rules(segments: Sequence[Segment]) -> int:
    """Number of system messages at the start of a conversation."""
    others = (i for i, s in enumerate(segments) if s.role != "system")
    return next(others, len(segments))


def _later_starts(segments: Sequence[Segment], trained: Sequence[bool]) -> Iterator[int]:
    """Later positions at which a conversation could start and still train a reply."""
    last = max(i for i, learned in enumerate(trained) if learned)
    for i in range(_rules(segments) + 1, last):
        if segments[i].role == "user" and segments[i - 1].role != "user":
            yield i


def _from(
    start: int, segments: Sequence[Segment], trained: Sequence[bool]
) -> tuple[list[Segment], list[bool]]:
    """A conversation from `start` on, with its system messages."""
    rules = _rules(segments)
    return [*segments[:rules], *segments[start:]], [*trained[:rules], *trained[start:]]
