"""The scorers of texts, without a model: each compares a reply with a gold, in [0, 1].

Words are those of SQuAD (no case, punctuation or English articles), but signs and decimal points of
numbers count, and every Chinese, Japanese or Korean character is a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from soulkit.errors import ConfigError, MissingPackage, TaskError
from soulkit.judge.verdict import UNSPACED
from soulkit.metrics.text import common_length, overlap_f1
from soulkit.models.local.threads import trial
from soulkit.parse import ParseError, parse_json, pattern_matches
from soulkit.tasks.kit.declared.keys import Scorer
from soulkit.text import normalised, one_line

_IGNORED = re.compile(r"(?!(?<!\w)[-\u2212](?=\d))(?!(?<=\d)\.(?=\d))[^\w\s]|_")
"""Punctuation and symbols, but no sign before a number and no decimal point."""
_CHARACTER = re.compile(rf"([{UNSPACED}])")
_NUMBER = re.compile(
    r"(?<![\w.])([-\u2212]?)[$€£¥]?(\d{1,3}(?:[,'\u2019\u00a0\u202f]\d{3})+(?!\d)|\d+)?([.,]\d+)?"
)
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def scored_words(text: str) -> list[str]:
    """The words of a text; its signs if it has nothing else."""
    folded = _IGNORED.sub("", normalised(text).casefold())
    parts = _CHARACTER.sub(r" \1 ", folded).split()
    return [part for part in parts if part not in ("a", "an", "the")] or parts or text.split()


def last_number(text: str) -> float | None:
    """The last number of a text; a comma before other than three digits is a decimal comma."""
    for sign, whole, fraction in reversed(_NUMBER.findall(text)):
        if whole or fraction:
            digits = float(re.sub(r"\D", "", whole) + fraction.replace(",", "."))
            return -digits if sign else digits
    return None


def _contains(scorer: Scorer, reply: str, gold: str) -> bool:
    phrase, text = scored_words(gold), scored_words(reply)
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text)))


def _number(scorer: Scorer, reply: str, gold: str) -> bool:
    one, other = last_number(reply), last_number(gold)
    return None not in (one, other) and abs((one or 0) - (other or 0)) <= scorer.tolerance + 1e-9


def _rouge_l(scorer: Scorer, reply: str, gold: str) -> float:
    # The words of rouge-score are runs of a-z and 0-9: other scripts would have none.
    ascii_only = re.sub(r"\W", "", gold).isascii()
    one, other = (
        re.findall("[a-z0-9]+", text.lower()) if ascii_only else scored_words(text)
        for text in (gold, reply)
    )  # fmt: skip
    return 2 * common_length(one, other) / max(len(one) + len(other), 1)


def matches(pattern: str, text: str, flags: int = 0) -> Iterator[Any]:
    """The matches of a pattern of a task or a row; TaskError if it cannot be used."""
    try:
        yield from pattern_matches(pattern, text, flags)
    except ParseError as error:
        shown = one_line(pattern, 60)
        raise TaskError(f"The pattern '{shown}' cannot be used: {error}.") from error


def _json_schema(scorer: Scorer, reply: str, gold: str) -> bool:
    validator, fenced = json_validator(scorer), _FENCED.search(reply)
    from referencing.exceptions import Unresolvable

    try:
        return bool(validator.is_valid(parse_json(fenced[1] if fenced else reply)))
    except (ValueError, RecursionError):
        return False
    except Unresolvable as error:
        why = f"A `$ref` of the 'json_schema' is not in it: {error}."
        raise TaskError(why) from error


def json_validator(scorer: Scorer) -> Any:
    """A validator of the scorer's schema. MissingPackage without jsonschema, ConfigError for an
    invalid schema."""
    made, slow = _validator(json.dumps(scorer.json_schema))
    if slow:
        why = f"For a small value {slow}."
        raise ConfigError("A 'json_schema' cannot be used.", why, "Correct the scorer.")
    return made


@cache
def _validator(schema: str) -> tuple[Any, str]:
    try:
        from jsonschema import SchemaError, validators
        from jsonschema_specifications import REGISTRY
    except ImportError as error:
        raise MissingPackage("jsonschema", "the scorer 'json_schema'") from error
    kind = validators.validator_for(json.loads(schema))
    try:
        kind.check_schema(json.loads(schema))
    except SchemaError as error:
        why = f"{error.json_path}: {error.message}."
        raise ConfigError("A 'json_schema' is not valid.", why, "Correct the scorer.") from error
    # Without this registry, jsonschema would download what a `$ref` names.
    made = kind(json.loads(schema), registry=REGISTRY)
    values: list[Any] = [{}, [], "x", 1]
    return made, trial(lambda: [made.is_valid(value) for value in values])


SCORERS: Mapping[str, Callable[[Scorer, str, str], float]] = {
    "exact": lambda scorer, reply, gold: reply.strip() == gold.strip(),
    "normalised": lambda scorer, reply, gold: scored_words(reply) == scored_words(gold),
    "contains": _contains,
    "number": _number,
    "regex": lambda scorer, reply, gold: any(matches(scorer.pattern or gold, reply)),
    "token_f1": lambda scorer, reply, gold: overlap_f1(scored_words(gold), scored_words(reply)),
    "rouge_l": _rouge_l,
    "json_schema": _json_schema,
}
"""Kind → its function of (scorer, reply, gold)."""


def score_of(scorer: Scorer, reply: str, gold: str) -> float:
    """The score of a reply."""
    return float(SCORERS[scorer.kind](scorer, reply, gold))


def score_names(scorers: Sequence[Scorer]) -> list[str]:
    """A metric's name for every scorer: its kind, with a number from the second of a kind on."""
    kinds = [scorer.kind for scorer in scorers]
    counts = [kinds[: place + 1].count(kind) for place, kind in enumerate(kinds)]
    return [f"{k}_{n}" if n > 1 else k for k, n in zip(kinds, counts, strict=True)]
