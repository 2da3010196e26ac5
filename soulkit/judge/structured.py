"""Verdicts with a shape: asked for as JSON Schema, read strictly, asked for once more, or missing.

A judge is told the shape in three ways, of which a server may take any: the sampling carries a
`Form` (JSON Schema, JSON mode or nothing is the endpoint's business), the prompt says it in words,
and the reply is checked here. The *last* complete object of the right shape counts, since judges
think aloud and quote; one that is off the shape does not count, however near it is: numbers in
quotation marks, NaN, 1e400, values off their scale, missing and additional fields. A reply without
such an object is answered with what is wrong, once. After that there is no verdict: whoever asked
gets UnreadableVerdict with the reason, never a number in its place.

    class Rating(Shape):
        reasoning: str
        score: int = Field(ge=0, le=10)

    found = await ask(judge, question("score", prompt, Rating), call)      # a Rating
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from soulkit.errors import UnreadableVerdict
from soulkit.judge.verdict import spoken
from soulkit.models.base import Player
from soulkit.types import Call, Form, Segment

T = TypeVar("T")
S = TypeVar("S", bound="Shape")

ATTEMPTS = 2
"""The question and one re-ask."""
_QUOTED = 2_000
"""Characters of an unreadable reply that are shown to its author again."""


_READ = 60_000
"""Characters at the end of a reply that are searched for a verdict: looking for one where there is
none costs the square of the length, and a judge that never stops must not hold up the others."""


class Shape(BaseModel):
    """Base of a verdict: every field is required, of its very type, finite, and nothing else."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """What a judge is asked, and how its answer is read."""

    purpose: str
    """A slug for the record: `score`, `audit`, `detector`."""
    prompt: str
    read: Callable[[str], T]
    """The answer in a reply; raises UnreadableVerdict with what is wrong, for the re-ask."""
    said: Callable[[T], dict[str, Any]]
    """The answer as plain JSON values, for the record."""
    form: Form | None = None
    attempts: int = ATTEMPTS


def question(purpose: str, prompt: str, shape: type[S], attempts: int = ATTEMPTS) -> Question[S]:
    """A question whose answer is a JSON object of `shape`."""
    return Question(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_shape(text, shape),
        said=lambda found: found.model_dump(mode="json"),
        form=form_of(shape),
        attempts=attempts,
    )


def label_question(
    purpose: str, prompt: str, labels: tuple[str, ...], attempts: int = ATTEMPTS
) -> Question[str]:
    """A question whose answer is one of a few words, in any case of letters."""
    return Question(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_label(text, labels),
        said=lambda found: {"label": found},
        attempts=attempts,
    )


@lru_cache(maxsize=256)
def form_of(shape: type[Shape]) -> Form:
    """The JSON Schema of a shape; its name is the class's. Made once: it takes milliseconds."""
    schema = json.dumps(shape.model_json_schema(), sort_keys=True, separators=(",", ":"))
    return Form(shape.__name__.lstrip("_"), schema)


async def ask(judge: Player, asked: Question[T], call: Call) -> T:
    """What `judge` answers to `asked`.

    Raises UnreadableVerdict when no attempt could be read, or the judge itself failed.
    """
    player = judge.asked_for(asked.form)
    context: tuple[Segment, ...] = (Segment("user", asked.prompt),)
    problem, asked_so_far = "", []
    for _ in range(asked.attempts):
        asked_so_far.append(context)
        reply = await player.complete(context, call)
        try:
            return asked.read(_finished(reply.text, reply.stop_reason))
        except UnreadableVerdict as error:
            problem = error.detail
            context = (context[0], *_again(reply.text, problem))
    for useless in asked_so_far:
        player.set_aside(useless, call)
    raise UnreadableVerdict(f"{judge.model.name}: {problem} (asked {asked.attempts} times)")


def _finished(text: str, stop: str) -> str:
    if stop == "content_filter":
        raise UnreadableVerdict("the reply was held back by a content filter")
    if not text.strip():
        raise UnreadableVerdict(f"the reply is empty ({stop})")
    return text


def _again(reply: str, problem: str) -> tuple[Segment, Segment]:
    shown = reply.strip()[:_QUOTED] or "(nothing)"
    return Segment("assistant", shown), Segment(
        "user",
        f"This answer cannot be used: {problem}. Answer once more, in exactly the form that was "
        "asked for and without anything around it.",
    )


def read_label(text: str, labels: tuple[str, ...]) -> str:
    """The label that is the whole answer, or its last line; thinking and decoration removed."""
    said = spoken(text, "paper")
    lines = [line.strip(" \t*`\"'.:!()[]") for line in said.splitlines() if line.strip()]
    known = {label.casefold(): label for label in labels}
    found = known.get(lines[-1].casefold()) if lines else None
    if found is None:
        raise UnreadableVerdict(f"it is not one of {', '.join(labels)}")
    return found


def read_shape(text: str, shape: type[S]) -> S:
    """The last complete object of `shape` in a reply; UnreadableVerdict says what is wrong."""
    problems = []
    for value in reversed(_objects(text)):
        try:
            return shape.model_validate_json(json.dumps(value))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the object"
            problems.append(f"{where}: {first['msg']}")
        except (ValueError, RecursionError):
            problems.append("it holds a number that is not finite, or is nested beyond reason")
    raise UnreadableVerdict(problems[0] if problems else "it holds no complete JSON object")


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects of a reply without its thinking.

    A reply that is one object from end to end has none: it may quote an actor who wrote <think>.
    """
    try:
        whole = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        return [whole]
    return list(json_objects(spoken(text, "paper")[-_READ:]))


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Every outermost JSON object in `text`, in order; NaN and infinities are no JSON."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    return (value for value, _, _ in json_spans(text, decoder))


def json_spans(text: str, decoder: json.JSONDecoder) -> Iterator[tuple[dict[str, Any], int, int]]:
    """(object, start, end) of every outermost object that `decoder` reads in `text`, in order."""
    place = text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            yield value, place, end
        place = text.find("{", end)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
