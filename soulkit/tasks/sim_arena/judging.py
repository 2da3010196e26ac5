"""SimulatorArena: judge questions about a simulated person, scores, and feedback.

    question            compared or rated                              answer        share
    writing_style       the messages of both                           1 to 5        x / 5
    interaction_style   the conversations of both                      1 to 5        x / 5
    features            the simulation against the person's traits     Match or not  matches / all
    document            the assistant's final document                 1 to 10       x / 10

A verdict on features names each one once, in any order. Judges see the person's own words. A coach
therefore gets only sentences that do not repeat them, and rule-based feedback comments only on the
manner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator

from soulkit.judge.leaks import LeakView, grams, tokens
from soulkit.judge.panel import Combine, Opinion, mean_agreement, pooled, readable
from soulkit.judge.structured import VerdictShape
from soulkit.tasks.kit.coaching import remarks_without_secrets
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.sim_arena.data import Target
from soulkit.tasks.sim_arena.play import Utterance
from soulkit.types import Form, Score


def mean_words(texts: Sequence[str]) -> float:
    """The average number of words per text; 0 without texts."""
    return sum(len(text.split()) for text in texts) / len(texts) if texts else 0.0


STYLES = ("writing_style", "interaction_style")
FULFILMENT, DOCUMENT = "features", "document"
LIKERT, RATING = (1.0, 5.0), (1.0, 10.0)
"""The lowest and highest values of the two scales."""
MATCH, NO_MATCH = "Match", "No Match"
Replies = Mapping[str, Sequence[Opinion[Any]]]
"""Purpose → the judges' opinions."""


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
    """The schema of a verdict that names each of `labels` once."""
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
    """The schema for a list of verdicts of any length and with any names (`reference`); only the
    form, not the schema, names the features."""
    hint = Field(json_schema_extra={"enum": list(labels)} if labels else None)
    verdict = create_model(
        "FeatureVerdict", __base__=FeatureVerdict, feature_name=(Annotated[str, hint], ...)
    )
    verdicts = list[verdict]  # type: ignore[valid-type]
    return create_model("LooseFulfilment", __base__=VerdictShape, results=(verdicts, ...))


def _as_called(labels: tuple[str, ...], name: Any) -> Any:
    if not isinstance(name, str):
        return name
    folded = " ".join(name.split()).casefold()
    return next((label for label in labels if label.casefold() == folded), name)


# -- numbers ---------------------------------------------------------------------------------------


def raw_numbers(replies: Replies, combine: Combine) -> dict[str, float]:
    """Question on a scale → its combined rating; questions without an answer are left out."""
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
    """Column → the share of its features that the simulated person shows."""
    shown = {t.label: pooled(opinions, partial(_shows, t.label), combine) for t in targets}
    return {
        column: _mean([shown[t.label] for t in targets if t.column == column])
        for column in dict.fromkeys(target.column for target in targets)
    }


def _shows(label: str, answer: Any) -> float:
    return float(any(r.feature_name == label and r.classification == MATCH for r in answer.results))


def from_zero(likert: float) -> float:
    """A Likert number rescaled to [0, 1]: 1 and anything below becomes 0."""
    low, high = LIKERT
    return min(1.0, max(0.0, (likert - low) / (high - low)))


def style_agreement(replies: Replies) -> dict[str, float]:
    """Agreement between several opinions on the styles."""
    return mean_agreement(
        (replies.get(name, ()), lambda answer: answer.similarity_score, *LIKERT) for name in STYLES
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# -- words -----------------------------------------------------------------------------------------


def judge_words(replies: Replies) -> str:
    """The judges' texts, one line per question and opinion."""
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


TEXTS = Texts(__file__)
FAR = 2.0
"""Messages this many times longer, or shorter, differ in manner."""
COPIED = 8
"""This many consecutive words from the person's materials count as copied."""
RUBRIC = (
    "similarity score", "key differences", "No Match", "feature list", "fulfillment rate",
    "document rating",
)  # fmt: skip
"""Rubric terms that no one in a chat would use."""
_CAPITAL, _WORD_SIGN = re.compile(r"\W*[A-Z]"), re.compile(r"\w")


def style_notes(score: Score, view: LeakView) -> str:
    """The judges' remarks, fenced, without sentences that repeat the person's texts."""
    return remarks_without_secrets(_judges_remarks(score), replace(view, private=()), ends=".!?;")


def _judges_remarks(score: Score) -> Iterator[tuple[str, str]]:
    """(topic, a judge's remark on it)."""
    titles = {"writing_style": "manner of writing", "interaction_style": "manner of dealing"}
    for verdict in score.verdicts:
        for difference in verdict.said.get("key_differences") or ():
            yield titles.get(verdict.purpose, verdict.purpose), str(difference)
        for result in verdict.said.get("results") or ():
            seen = "shown" if result["classification"] == "Match" else "not shown"
            yield f"{result['feature_name']} ({seen})", str(result["analysis"])


# -- rules -----------------------------------------------------------------------------------------


def draft_remarks(
    turns: Sequence[Utterance], human: Sequence[str], shown: str, most_turns: int
) -> list[str]:
    """Rule-based remarks on a draft; `shown` is the material that the person has."""
    texts: Mapping[str, str] = TEXTS["remarks"]
    return [texts[name] for name in _remarks(turns, human, shown, most_turns)]


def _remarks(
    turns: Sequence[Utterance], human: Sequence[str], shown: str, most_turns: int
) -> Iterator[str]:
    statuses, messages = {turn.status for turn in turns}, [turn.text for turn in turns if turn.text]
    if "salvaged" in statuses:
        yield "form"
    if "empty" in statuses:
        yield "empty_turn"
    if not messages:
        yield "silent"
        return
    ratio = mean_words(messages) / max(mean_words(human), 1.0)
    if ratio > FAR or ratio < 1 / FAR:
        yield "long" if ratio > FAR else "short"
    for habit, has in (("capitals", _begins_large), ("marks", _ends_marked)):
        gap = _share(has, messages) - _share(has, human)
        if abs(gap) > 0.5:
            yield f"less_{habit}" if gap > 0 else f"more_{habit}"
    runs = grams(tokens(shown), COPIED)
    if any(runs & grams(tokens(message), COPIED) for message in messages):
        yield "copied"
    if len(set(messages)) < len(messages):
        yield "twice"
    ended = any(turn.ended for turn in turns)
    if ended and FAR * len(messages) < len(human):
        yield "ended_early"
    elif not ended and len(messages) >= most_turns > len(human):
        yield "no_end"


def _begins_large(text: str) -> bool:
    return _CAPITAL.match(text) is not None


def _ends_marked(text: str) -> bool:
    """Whether punctuation follows the last word. Searched from the end: a regex search would be
    quadratic in a message of many marks."""
    behind = _WORD_SIGN.split(text)[-1]
    return any(mark in behind for mark in ".!?")


def _share(has: Callable[[str], bool], texts: Sequence[str]) -> float:
    return sum(map(has, texts)) / max(len(texts), 1)


def mark_lines(metrics: Mapping[str, float | None]) -> list[str]:
    """The numbers of a draft in words, for the coach's template."""
    numbers = {name: metrics.get(name) for name in TEXTS["marks"]}
    return [TEXTS["marks"][name].format(n) for name, n in numbers.items() if n is not None]


# -- scripts ---------------------------------------------------------------------------------------


def scripted_answer(form: Form | None, perfect: bool) -> str | None:
    """The judge's scripted reply for `form`: the top or bottom of every scale.

    Features are taken from the form; a form with open names gets none.
    """
    end = int(perfect)
    match form.name if form is not None else "":
        case "Likert" | "LooseLikert":
            return json.dumps({"key_differences": ["as scripted"], "similarity_score": LIKERT[end]})
        case "DocumentRating" | "LooseRating":
            return json.dumps({"analysis": "as scripted", "rating": RATING[end]})
        case "Fulfilment" | "LooseFulfilment":
            assert form is not None
            return json.dumps({"results": _results(form, perfect)})
    return None


def _results(form: Form, perfect: bool) -> list[dict[str, str]]:
    names = next(_enumerations(json.loads(form.schema)), ("any feature",))
    verdict = MATCH if perfect else NO_MATCH
    return [
        {"feature_name": name, "analysis": "as scripted", "classification": verdict}
        for name in names
    ]


def _enumerations(node: Any) -> Iterator[Sequence[str]]:
    if isinstance(node, Mapping):
        names = node.get("properties", {}).get("feature_name", {})
        if "enum" in names or "const" in names:
            yield names.get("enum") or [names["const"]]
        for part in node.values():
            yield from _enumerations(part)
