"""What judges are asked about a simulated person, and what their answers come to.

    question            asked about                                      answer        share
    writing_style       the messages of both                             1 to 5        x / 5
    interaction_style   the conversations of both                        1 to 5        x / 5
    features            the simulation, and what the person is like      Match or not  matches / all
    document            what the assistant made in the end               1 to 10       x / 10

A verdict on features is keyed by name: every feature once, in any order, under the name by which
the question calls it (case and white space apart).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator

from soulkit.judge.panel import Combine, Opinion, agreement, pooled, readable
from soulkit.judge.structured import VerdictShape
from soulkit.tasks.sim_arena.fields import Target

STYLES = ("writing_style", "interaction_style")
FULFILMENT, DOCUMENT = "features", "document"
LIKERT, RATING = (1.0, 5.0), (1.0, 10.0)
"""The ends of the two scales."""
MATCH, NO_MATCH = "Match", "No Match"
Replies = Mapping[str, Sequence[Opinion[Any]]]
"""Purpose → the opinions on it."""


class Likert(VerdictShape):
    key_differences: list[str]
    similarity_score: float = Field(ge=LIKERT[0], le=LIKERT[1])


class DocumentRating(VerdictShape):
    analysis: str
    rating: float = Field(ge=RATING[0], le=RATING[1])


class LooseLikert(VerdictShape):
    """The same under `reference`, where what is off the scale is moved to its end."""

    key_differences: list[str]
    similarity_score: float


class LooseRating(VerdictShape):
    """The same under `reference`."""

    analysis: str
    rating: float


class FeatureVerdict(VerdictShape):
    feature_name: str
    analysis: str
    classification: Literal["Match", "No Match"]


class _EachOnce(VerdictShape):
    results: list[Any]

    @model_validator(mode="after")
    def _no_feature_twice(self) -> Self:
        names = [result.feature_name for result in self.results]
        if len(set(names)) < len(names):
            raise ValueError("every feature has to be named once")
        return self


@lru_cache(maxsize=512)
def fulfilment_shape(labels: tuple[str, ...]) -> type[VerdictShape]:
    """The shape of a verdict that names each of `labels` once."""
    allowed: Any = Literal.__getitem__(labels)
    name: Any = Annotated[allowed, BeforeValidator(partial(_as_called, labels))]
    one = create_model("FeatureVerdict", __base__=FeatureVerdict, feature_name=(name, ...))
    every = Annotated[
        list[one],  # type: ignore[valid-type]
        Field(min_length=len(labels), max_length=len(labels)),
    ]
    return create_model("Fulfilment", __base__=_EachOnce, results=(every, ...))


@lru_cache(maxsize=512)
def loose_fulfilment(labels: tuple[str, ...]) -> type[VerdictShape]:
    """Verdicts in a row, as many as the judge gives and under whatever names (`reference`); the
    form alone tells it what the features are called."""
    hint = Field(json_schema_extra={"enum": list(labels)} if labels else None)
    one = create_model(
        "FeatureVerdict", __base__=FeatureVerdict, feature_name=(Annotated[str, hint], ...)
    )
    every = list[one]  # type: ignore[valid-type]
    return create_model("LooseFulfilment", __base__=VerdictShape, results=(every, ...))


def _as_called(labels: tuple[str, ...], name: Any) -> Any:
    """The label that is meant by `name`, else `name`."""
    if not isinstance(name, str):
        return name
    folded = " ".join(name.split()).casefold()
    return next((label for label in labels if label.casefold() == folded), name)


# -- numbers ---------------------------------------------------------------------------------------


def raw_numbers(replies: Replies, combine: Combine) -> dict[str, float]:
    """Question on a scale → its number, of those that somebody answered."""
    readers: dict[str, Callable[[Any], float]] = {
        **dict.fromkeys(STYLES, lambda answer: float(answer.similarity_score)),
        DOCUMENT: lambda answer: float(answer.rating),
    }
    return {
        purpose: pooled(replies[purpose], read, combine)
        for purpose, read in readers.items()
        if readable(replies.get(purpose, ()))
    }


def feature_shares(
    opinions: Sequence[Opinion[Any]], targets: Sequence[Target], combine: Combine
) -> dict[str, float]:
    """Column → the share of its features that the simulation shows."""
    shown = {t.label: pooled(opinions, partial(_shows, t.label), combine) for t in targets}
    return {
        column: _mean([shown[t.label] for t in targets if t.column == column])
        for column in dict.fromkeys(target.column for target in targets)
    }


def _shows(label: str, answer: Any) -> float:
    return float(any(r.feature_name == label and r.classification == MATCH for r in answer.results))


def from_zero(likert: float) -> float:
    """A Likert number as a share of its scale, in [0, 1]: 1 is 0, and so is what lies below."""
    low, high = LIKERT
    return min(1.0, max(0.0, (likert - low) / (high - low)))


def style_agreement(replies: Replies) -> float | None:
    """How far several opinions on the styles agree; None for one opinion."""
    values = [
        agreement([a.similarity_score for a in readable(replies.get(name, ()))], *LIKERT)
        for name in STYLES
    ]
    numbers = [value for value in values if value is not None]
    return _mean(numbers) if numbers else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- words -----------------------------------------------------------------------------------------


def judge_words(replies: Replies) -> str:
    """What the judges said, a line for each question and opinion."""
    lines = [
        f"{purpose}: {_line(opinion.fields)}"
        for purpose, opinions in replies.items()
        for opinion in opinions
        if opinion.answer is not None
    ]
    return "\n".join(lines)


def _line(said_fields: Mapping[str, Any]) -> str:
    if "results" in said_fields:
        results = said_fields["results"]
        return "; ".join(f"{r['feature_name']} ({r['classification']})" for r in results)
    number = said_fields.get("similarity_score", said_fields.get("rating"))
    words = said_fields.get("key_differences") or [said_fields.get("analysis", "")]
    return f"{number:g} ({'; '.join(words)})"
