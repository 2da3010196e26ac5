"""What rows of SimulatorArena hold, what judges are asked about a simulated person, and the scores.

    question            asked about                                      answer        share
    writing_style       the messages of both                             1 to 5        x / 5
    interaction_style   the conversations of both                        1 to 5        x / 5
    features            the simulation, and what the person is like      Match or not  matches / all
    document            what the assistant made in the end               1 to 10       x / 10

A verdict on features is keyed by name: every feature once, in any order, under the name that the
question gives it (case and white space apart). Rows are read into one spelling:

    [{"Feature Name": "Message Length", "Feature Question Answer": "Short."}, {"Feature Name": "x"}]
    → [{"Feature Name": "Message Length", "Feature Question Answer": "Short."}]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator

from soulkit.data.chats import conversation
from soulkit.data.literals import structure
from soulkit.errors import RowError
from soulkit.judge.panel import Combine, Opinion, agreement, pooled, readable
from soulkit.judge.structured import VerdictShape
from soulkit.types import Line

NAME, ANSWER, QUESTION = "Feature Name", "Feature Question Answer", "Feature Question"
WRITING, INTERACTION = "target_writing_style_features", "target_interaction_style_features"
FEATURES = (WRITING, INTERACTION)


@dataclass(frozen=True, slots=True)
class Target:
    """A feature that a simulation should show."""

    label: str
    """Its name; with a number where another feature of the row has the same."""
    text: str
    """What is known of it, else what is asked about it."""
    column: str
    """WRITING or INTERACTION."""


def read_arena_row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The opened fields of a row in one spelling. DataError for what nothing can be compared with.

    `features` says whether the row has target features at all.
    """
    lists = {name: features(fields[name], name) for name in FEATURES if name in fields}
    return {
        **fields,
        **lists,
        "human_user_queries": _queries(fields["human_user_queries"]),
        "human_public_conversation": _talk(fields["human_public_conversation"]),
        "features": "with" if any(lists.values()) else "without",
    }


def features(value: Any, column: str) -> list[dict[str, str]] | None:
    """The features that say something, in their order; None for none. DataError for no list."""
    if value is None or value == "":
        return None
    items = structure(value)
    if not isinstance(items, list | tuple):
        what = f"row: '{column}' should hold a list of objects."
        raise RowError(what, f"It holds {type(items).__name__} {items!r:.60}.")
    return [feature for item in items if (feature := _feature(item))] or None


def _feature(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping):
        return {}
    texts = {k: str(item[k]).strip() for k in (NAME, ANSWER, QUESTION) if item.get(k) is not None}
    feature = {k: text for k, text in texts.items() if text}
    return feature if NAME in feature and len(feature) > 1 else {}


def targets(fields: Mapping[str, Any]) -> tuple[Target, ...]:
    """The target features of a row, those of writing first, each under a label of its own."""
    listed: list[Target] = []
    for column in FEATURES:
        for feature in fields.get(column) or ():
            label = _free_label(feature[NAME], {target.label for target in listed})
            listed.append(Target(label, feature.get(ANSWER) or feature[QUESTION], column))
    return tuple(listed)


def _free_label(name: str, taken: Iterable[str]) -> str:
    """`name` on one line, with the first number that makes it unlike the labels in use."""
    label, number, used = " ".join(name.split()), 1, {other.casefold() for other in taken}
    free = label
    while free.casefold() in used:
        number += 1
        free = f"{label} ({number})"
    return free


def human_lines(fields: Mapping[str, Any], actor: str, partner: str) -> list[Line]:
    """The recorded conversation as lines of the two seats; empty where it is one text."""
    recorded = fields["human_public_conversation"]
    if isinstance(recorded, str):
        return []
    seats = {"user": actor, "assistant": partner}
    return [Line(seats[m["role"]], m["content"]) for m in recorded if m["role"] in seats]


def human_messages(fields: Mapping[str, Any]) -> list[str]:
    """What the person wrote, message by message, blank ones left out."""
    return [text for text in fields["human_user_queries"] if text.strip()]


def _queries(value: Any) -> list[str]:
    """What the person said, message by message; a single text is one message."""
    messages = [value] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, str) for message in messages
    ):
        what = "row: 'human_user_queries' should hold what the person said."
        raise RowError(what, f"It holds {type(value).__name__} {value!r:.60}.")
    if not any(message.strip() for message in messages):
        what = "row: 'human_user_queries' holds no words."
        raise RowError(what, "There is nothing to compare a simulated person with.")
    return list(messages)


def _talk(value: Any) -> Any:
    """The conversation as messages; a text that lists its lines stays as it is."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    return conversation(value, "human_public_conversation")


def mean_words(texts: Sequence[str]) -> float:
    """Words of a text on average; 0 without any."""
    return sum(len(text.split()) for text in texts) / len(texts) if texts else 0.0


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
    verdict = create_model("FeatureVerdict", __base__=FeatureVerdict, feature_name=(name, ...))
    verdicts = Annotated[
        list[verdict],  # type: ignore[valid-type]
        Field(min_length=len(labels), max_length=len(labels)),
    ]
    return create_model("Fulfilment", __base__=_EachOnce, results=(verdicts, ...))


@lru_cache(maxsize=512)
def loose_fulfilment(labels: tuple[str, ...]) -> type[VerdictShape]:
    """Verdicts in a row, as many as the judge gives and under whatever names (`reference`); the
    form alone tells it what the features are called."""
    hint = Field(json_schema_extra={"enum": list(labels)} if labels else None)
    verdict = create_model(
        "FeatureVerdict", __base__=FeatureVerdict, feature_name=(Annotated[str, hint], ...)
    )
    verdicts = list[verdict]  # type: ignore[valid-type]
    return create_model("LooseFulfilment", __base__=VerdictShape, results=(verdicts, ...))


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
