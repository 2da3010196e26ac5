"""JSON objects in what a model wrote: which it wrote itself, and which it only repeats.

A judge reads what an actor said, and an actor may say a verdict. So two things are never taken for
a judge's own: what stands inside an object that does not parse, since nobody can tell where its
texts end, and what stands in the material that it was shown. The first is a matter of braces,
looked at once from left to right:

    {"score": 2}                         an object
    {a, b}   \\boxed{x}                   prose: no key follows the brace
    {'note': '{"score": 9}'}             does not parse: nothing is looked for from there on
    {"note": "he said ", "score": 9}"}   the last brace closes nothing: the text is no witness

The second compares words, not characters: an object repeats others' words when one of its texts, or
each of its values, stands there under its name, whatever became of quotation marks, escapes, order
and line breaks.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from soulkit.text import SignTable, is_mark

_QUOTES = (
    "\"'`\u00ab\u00bb\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2039\u203a"
    "\u300c\u300e\uff02\uff07"
)
_BRACE = re.compile(r"[{}]")
_BRACES = 2_000
"""Braces and objects that are looked at; a text with more is no answer to anything."""
_KEY = re.compile(rf"\{{\s*+(?:\\*+[{_QUOTES}]|[\w$.-]{{1,80}}+\s*+[:=]|\}})")
"""A brace that begins an object, in JSON or in what passes for it; any other is prose."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object that names a key twice says two things, and which one is chance."""
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
LENIENT = json.JSONDecoder(object_pairs_hook=_unique, strict=False)
"""Allows raw line breaks inside texts."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """An outermost object and where it stands."""

    value: dict[str, Any]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a look at the braces of a text gave."""

    spans: tuple[ObjectSpan, ...]
    """Objects that stand in no other braces, in order."""
    broken: int | None = None
    """Where an object begins that does not parse; behind it nothing was looked for."""
    stray: bool = False
    """Whether a brace lacks its counterpart."""


def scan(text: str, decoder: json.JSONDecoder = STRICT) -> Scan:
    """The outermost objects of `text`, in one pass."""
    spans: list[ObjectSpan] = []
    depth, looks, brace = 0, 0, _BRACE.search(text)
    while brace is not None:
        looks += 1
        if looks > _BRACES:
            return Scan((), stray=True)
        place, end = brace.span()
        if brace.group() == "}":
            if not depth:
                return Scan(tuple(spans), stray=True)
            depth -= 1
        elif not _KEY.match(text, place):
            depth += 1
        elif (decoded := _decode_at(text, place, decoder) if not depth else None) is None:
            return Scan(tuple(spans), broken=place)
        else:
            spans.append(decoded)
            end = decoded.end
        brace = _BRACE.search(text, end)
    return Scan(tuple(spans), stray=depth > 0)


def _decode_at(text: str, place: int, decoder: json.JSONDecoder) -> ObjectSpan | None:
    try:
        value, end = decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return ObjectSpan(value, place, end)


def whole_object(text: str, decoder: json.JSONDecoder = STRICT) -> dict[str, Any] | None:
    """The object that `text` is from end to end, None when it is none."""
    try:
        value = decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


# -- repeating ------------------------------------------------------------------------------------

_FENCED = re.compile(r"<([A-Za-z][\w-]*) ([0-9a-f]{12})>\n(.*?)\n</\1 \2>", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?<!\\\\)\\*+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbf])|%([2-7][0-9a-fA-F])"
)
_TAG = re.compile(r"[<\u2039]/?[A-Za-z][^<>\u2039{}:]{0,80}>|/\*[^*]{0,80}\*/")
_BOTTOMLESS = re.compile(r"&#[0-9]{8,};?")
"""No character has such a number, and reading one of thousands of digits fails."""
_ENTITIES = 3
"""So often may a reference stand in a reference."""
_DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_DROPPED = re.compile(r"[^\w:{./=>-]|_")
_MINOR = re.compile(r"-(?:(?<!:-)|(?!\d))|/(?:(?<!\d/)|(?!\d))")
"""What counts in a number alone: a sign before it, a stroke between two."""
_COLONS = re.compile("[\u2192\u2236\ua789]")
_ASSIGNS = ("=>", "->", "=")
_ALIKE = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0455\u0458\u043a\u0501\u051b"
    "\u03b1\u03b5\u03bf\u03c1\u03b9\u03ba\u03bd\u03c7\u0131",
    "aeopcyxisjkdqaeopikvxi",
)
"""Letters of other scripts that look like Latin ones: whoever retypes them writes those."""
_LEFT_OUT = re.compile(r"\.{2,}|\u2026")
_TELLING_WORDS = 3
"""A text of so many words stands nowhere under the same name by chance."""
_ATTEMPTS = 500
"""Broken objects of a question after which no other is looked for: each costs a look at all."""


class JudgeMaterial:
    """What a model was shown before it wrote: a question with others' words in it."""

    def __init__(self, question: str, words: str | None = None) -> None:
        """`words` are the others' own (None: what is fenced in the question, else all of it)."""
        fenced = [part for _, _, part in _FENCED.findall(question)] if words is None else [words]
        self._question = question
        self._apart = bool(fenced)
        self._words = "\n".join(fenced) if fenced else question

    def holds(self, value: Mapping[str, Any]) -> bool:
        """Whether `value` stands in the question as it is, or repeats others' words."""
        return value in self._objects or self._repeats(value)

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        return list(_every_object(self._question))

    @cached_property
    def _squeezed(self) -> str:
        return _squeeze(self._words)

    def _repeats(self, value: Mapping[str, Any]) -> bool:
        leaves = list(_leaves(value))
        wordy = [leaf for leaf in leaves if len(leaf[1].split()) >= _TELLING_WORDS]
        if any(_stands_in(leaf, self._squeezed) for leaf in wordy):
            return True
        # A rubric names scores, too: where it cannot be told from others' words, words decide.
        telling = bool(leaves) and self._apart and "{" in self._squeezed
        return telling and all(_stands_in(leaf, self._squeezed) for leaf in leaves)


def resembles(words: str, names: Collection[str]) -> bool:
    """Whether an utterance holds an object with at least two of the keys `names` (the only one of
    one), however it is spelled, and whether or not it parses."""
    _, _, inside = _squeeze(words).partition("{")
    keys = {_squeeze(name) for name in names}
    seen = sum(f"{key}:" in inside for key in keys if key)
    return bool(keys) and seen >= min(2, len(keys))


def _every_object(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object in `text`, inner ones included, in whatever it stands."""
    start, attempts_left = _KEY.search(text), _ATTEMPTS
    while start is not None and attempts_left > 0:
        span = _decode_at(text, start.start(), STRICT)
        if span is None:
            attempts_left -= 1
        else:
            yield from _with_inner(span.value)
        start = _KEY.search(text, span.end if span is not None else start.start() + 1)


def _with_inner(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(key, text) of every value that is no object; a list of plain values is one text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for item in value:
            yield from _leaves(item, name)
    elif isinstance(value, list):
        yield name, "".join(map(_plain_text, value))
    else:
        yield name, _plain_text(value)


def _plain_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _stands_in(leaf: tuple[str, str], squeezed: str) -> bool:
    """Whether a value stands under its name; what a quotation leaves out ("…") is no difference."""
    name, text = leaf
    first, *others = (_squeeze(part) for part in _LEFT_OUT.split(f"{name}:{text}"))
    start = first.rstrip(".")
    if first[-1:].isdecimal():  # 1 does not stand in 10
        return re.search(rf"{re.escape(start)}(?:\.0+)?(?!\d|\.\d)", squeezed) is not None
    return start in squeezed and all(part.strip(".") in squeezed for part in others)


def _squeeze(text: str) -> str:
    """Letters, digits, colons, points, hyphens and opening braces of `text` in one case."""
    for _ in range(_ENTITIES if "&" in text else 0):
        text = html.unescape(_BOTTOMLESS.sub("", text))
    plain = _TAG.sub("", _ESCAPE.sub(_unescape, text)).translate(_SIGNS)
    for assignment in _ASSIGNS:
        plain = plain.replace(assignment, ":")
    return _MINOR.sub("", plain.replace(" ", "").replace(">", ""))


def _squeezed_sign(sign: str) -> str:
    """What stands for a sign, a blank for nothing: an arrow is one only where its halves touch."""
    if is_mark(sign):
        return ""
    bare = unicodedata.normalize("NFKD", _DASHES.sub("-", sign)).casefold().translate(_ALIKE)
    return _DROPPED.sub(" ", _COLONS.sub(":", bare.casefold()))


_SIGNS = SignTable(_squeezed_sign)


def _unescape(escape: re.Match[str]) -> str:
    return chr(int(escape[escape.lastindex], 16)) if escape.lastindex else " "
