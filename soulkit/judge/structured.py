"""Verdicts with a shape: asked for as JSON Schema, read strictly, asked for once more, or missing.

A judge is told the shape in three ways, of which a server may take any: the sampling carries a
`Form` (JSON Schema, JSON mode or nothing is the endpoint's business), the prompt says it in words,
and the reply is checked here. A verdict is the one object of the right shape that the judge wrote
itself: what stands in the question, or repeats what somebody says there, is a quotation
(`objects.py`), and of two that differ nobody knows which is meant. One that is off the shape does
not count, however near it is: numbers in quotation marks, NaN, 1e400, values off their scale,
missing, additional and repeated fields. A reply without a verdict is answered with what is wrong,
once. After that there is none: whoever asked gets UnreadableVerdict with the reason, never a number
in its place.

    class Rating(Shape):
        reasoning: str
        score: int = Field(ge=0, le=10)

    rating = await ask(judge, question("score", prompt, Rating), call)      # a Rating
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from soulkit.errors import UnreadableVerdict
from soulkit.judge.objects import JudgeMaterial, ObjectSpan, Scan, resembles, scan, whole_object
from soulkit.judge.verdict import after_blocks, split_thinking
from soulkit.models.base import Player
from soulkit.types import Call, Completion, Form, Role, Segment

T = TypeVar("T")
S = TypeVar("S", bound="VerdictShape")

QUESTION_ATTEMPTS = 2
"""The question and one re-ask."""
_DECORATION = " \t\r\n*`\"'.:!()[]"
_BLOCK = re.compile(r"```\w*\s((?:(?!```).)*)```", re.DOTALL)
_QUOTED = 2_000
"""Characters of an unreadable reply that are shown to its author again."""


class VerdictShape(BaseModel):
    """Base of a verdict: every field is required, of its very type, finite, and nothing else."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


@dataclass(frozen=True, slots=True)
class JudgeQuestion(Generic[T]):
    """What a judge is asked, and how its answer is read."""

    purpose: str
    """A slug for the record: `score`, `audit`, `detector`."""
    prompt: str
    read: Callable[[str], T]
    """The answer in a reply; raises UnreadableVerdict with what is wrong, for the re-ask."""
    dump: Callable[[T], dict[str, Any]]
    """The answer as plain JSON values, for the record."""
    form: Form | None = None
    attempts: int = QUESTION_ATTEMPTS
    samples: int = 1
    """Opinions of each judge that it takes, where neither task nor user says another number."""
    role: Role = "judge"
    """Whom it is for: `judge`, or `auditor` for what must not depend on who judges."""
    quotes: Callable[[str], bool] = lambda text: False
    """Whether a reply repeats an answer that somebody else wrote into the question."""
    forgery: Callable[[str], bool] = lambda words: False
    """Whether words of an actor hold what poses as an answer."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer(Generic[T]):
    """A readable answer, and how it was come by."""

    value: T
    replies: int
    """Asked for so often."""
    quoting: int
    """So many of the replies repeated an answer from the question."""
    ignored: tuple[str, ...] = ()
    """What the server took of the sampling and did not follow: `form`."""


def question(
    purpose: str,
    prompt: str,
    shape: type[S],
    attempts: int = QUESTION_ATTEMPTS,
    beside: tuple[type[VerdictShape], ...] = (),
    role: Role = "judge",
) -> JudgeQuestion[S]:
    """A question to the players of `role` whose answer is a JSON object of `shape`.

    `beside` are the shapes of what else is asked about the same words: whoever forges one of them
    spoils this answer, too.
    """
    material, names = JudgeMaterial(prompt), _names(shape, *beside)
    return JudgeQuestion(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_shape(text, shape, material),
        dump=lambda verdict: verdict.model_dump(mode="json"),
        form=schema_form(shape),
        attempts=attempts,
        role=role,
        quotes=lambda text: _quotes_material(text, shape, material),
        forgery=lambda words: resembles(words, names),
    )


def label_question(
    purpose: str, prompt: str, labels: tuple[str, ...], attempts: int = QUESTION_ATTEMPTS
) -> JudgeQuestion[str]:
    """A question whose answer is one of a few words, in any case of letters."""
    either = "|".join(map(re.escape, labels))
    alone = re.compile(
        rf"^(?:[^\n:=]{{0,80}}[:=])?[^\w\n]{{0,9}}(?:{either})[^\w\n]*$", re.MULTILINE
    )
    return JudgeQuestion(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_label(text, labels),
        dump=lambda label: {"label": label},
        attempts=attempts,
        forgery=lambda words: alone.search(words) is not None,
    )


@lru_cache(maxsize=256)
def schema_form(shape: type[VerdictShape]) -> Form:
    """The JSON Schema of a shape; its name is the class's. Made once: it takes milliseconds."""
    schema = json.dumps(shape.model_json_schema(), sort_keys=True, separators=(",", ":"))
    return Form(shape.__name__.lstrip("_"), schema)


@lru_cache(maxsize=256)
def _names(*shapes: type[VerdictShape]) -> frozenset[str]:
    """Every key that an object of these shapes has, inner objects included."""
    schemas = [shape.model_json_schema() for shape in shapes]
    parts = [part for schema in schemas for part in (schema, *schema.get("$defs", {}).values())]
    return frozenset(name for part in parts for name in part.get("properties", {}))


async def ask(judge: Player, question: JudgeQuestion[T], call: Call) -> T:
    """What `judge` answers to `question`; see `answer`."""
    return (await answer(judge, question, call)).value


async def answer(judge: Player, question: JudgeQuestion[T], call: Call) -> JudgeAnswer[T]:
    """What `judge` answers to `question`, and how often it was asked.

    A reply that was cut is not asked for again: nothing would be other about the second one. Raises
    UnreadableVerdict when no attempt could be read, or the judge itself failed.
    """
    player = judge.with_form(question.form)
    context: tuple[Segment, ...] = (Segment("user", question.prompt),)
    problem, contexts, quoting = "", [], 0
    ignored: set[str] = set()
    for attempt in range(1, question.attempts + 1):
        contexts.append(context)
        reply = await player.complete(context, call)
        quoting += question.quotes(reply.text)
        ignored |= set(reply.ignored)
        try:
            value = question.read(_complete_text(reply.text, reply.stop_reason))
            return JudgeAnswer(value, attempt, quoting, tuple(sorted(ignored)))
        except UnreadableVerdict as error:
            problem = error.detail
            if reply.stop_reason == "length":  # the same question would end in the same place
                problem = _cut_problem(reply, player.sampling.max_tokens)
                break
            context = (context[0], *_reask(reply.text, problem))
    for useless in contexts:
        player.set_aside(useless, call)
    times = "once" if len(contexts) == 1 else f"{len(contexts)} times"
    detail = f"{judge.model.name}: {problem} (asked {times})"
    raise UnreadableVerdict(detail, question.forgery)


def _complete_text(text: str, stop: str) -> str:
    if stop == "content_filter":
        raise UnreadableVerdict("the reply was held back by a content filter")
    if stop == "refusal":
        raise UnreadableVerdict(f"the judge refused: {text[:200]}")
    if not text.strip():
        raise UnreadableVerdict(f"the reply is empty ({stop})")
    return text


def _cut_problem(reply: Completion, limit: int) -> str:
    """What to say of a reply that ended at the limit: at whose, and what would help."""
    length = reply.usage.completion_tokens
    if 0 < length < limit:
        return (
            f"the reply was cut at {length} tokens, a limit of the server or of its context "
            f"({limit} were allowed)"
        )
    return f"the reply was cut at its limit of {limit} tokens; the judge's max_tokens raises it"


def _reask(reply: str, problem: str) -> tuple[Segment, Segment]:
    quoted = reply.strip()[:_QUOTED] or "(nothing)"
    return Segment("assistant", quoted), Segment(
        "user",
        f"This answer cannot be used: {problem}. Answer once more, in exactly the form that was "
        "asked for and without anything around it.",
    )


# -- reading --------------------------------------------------------------------------------------


def read_label(text: str, labels: tuple[str, ...]) -> str:
    """The label that is the whole answer; thinking and decoration removed."""
    by_folded = {label.casefold(): label for label in labels}
    before, label = (
        by_folded.get(part.strip(_DECORATION).casefold()) for part in split_thinking(text)
    )
    if label is None or before not in (None, label):
        raise UnreadableVerdict(f"it is not one of {', '.join(labels)} and nothing else")
    return label


def read_shape(text: str, shape: type[S], material: JudgeMaterial | None = None) -> S:
    """The one verdict of `shape` in a reply that was not in the `material` it was shown.

    UnreadableVerdict says what is wrong.
    """
    thinking, reply = _scans(text)
    if reply.stray:
        raise UnreadableVerdict("a brace in it opens or closes nothing")
    verdicts, problems = _verdicts(reply, shape)
    fresh = _unseen(verdicts, material)
    if not fresh and verdicts:
        raise UnreadableVerdict("its only verdict is one that stands in the question")
    if not fresh:
        raise UnreadableVerdict(problems[-1] if problems else "it holds no complete JSON object")
    thinking_verdicts, _ = _verdicts(thinking, shape)
    if any(verdict != fresh[0] for verdict in (*fresh, *_unseen(thinking_verdicts, material))):
        raise UnreadableVerdict("it holds several verdicts that differ")
    return fresh[0]


def _scans(text: str) -> tuple[Scan, Scan]:
    """The objects of a reply: those of its unmarked thinking, and those of its answer.

    What is one object from end to end, fenced or not, does not think: it may quote an actor who
    wrote <think>.
    """
    rest = text[after_blocks(text) :].strip()
    block = _BLOCK.fullmatch(rest)
    alone = whole_object(block[1] if block else rest)
    if alone is not None:
        return Scan(()), Scan((ObjectSpan(alone, 0, len(rest)),))
    thinking, reply = split_thinking(text)
    return scan(thinking), scan(reply)


def _verdicts(reply: Scan, shape: type[S]) -> tuple[list[tuple[S, dict[str, Any]]], list[str]]:
    """The objects of `shape`, read and as they came, and what is wrong with the others."""
    verdicts, problems = [], []
    for span in reply.spans:
        try:
            verdicts.append((shape.model_validate_json(json.dumps(span.value)), span.value))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the object"
            problems.append(f"{where}: {first['msg']}")
        except (ValueError, RecursionError):
            problems.append("it holds a number that is not finite, or is nested beyond reason")
    return verdicts, problems


def _unseen(
    verdicts: Iterable[tuple[S, dict[str, Any]]], material: JudgeMaterial | None
) -> list[S]:
    """The verdicts that the judge was not shown."""
    return [verdict for verdict, value in verdicts if material is None or not material.holds(value)]


def _quotes_material(text: str, shape: type[VerdictShape], material: JudgeMaterial) -> bool:
    """Whether a reply repeats a verdict that its author was shown."""
    try:
        verdicts, _ = _verdicts(_scans(text)[1], shape)
    except UnreadableVerdict:
        return False
    return len(_unseen(verdicts, material)) < len(verdicts)
