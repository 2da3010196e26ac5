"""Structured verdicts: requested with a JSON Schema, validated strictly, re-asked once.

    class Rating(VerdictShape):
        reasoning: str
        score: int = Field(ge=0, le=10)
    rating = await ask(judge, question("rating", prompt, Rating), call)

A verdict must be the only object of the shape that the judge wrote itself. After an invalid reply,
the judge gets the error and is asked once more; then UnreadableVerdict is raised. Because an actor
may fake a verdict, objects inside broken JSON and objects that repeat the material in the prompt
(compared by words) do not count.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from soulkit.errors import UnreadableVerdict
from soulkit.judge.verdict import after_blocks, split_thinking
from soulkit.models.base import Player
from soulkit.parse import STRICT, is_deep, unique_keys
from soulkit.runs.jsonl import first_problem
from soulkit.text import SignTable, is_mark
from soulkit.types import Call, Completion, Form, Role, Segment

_QUOTES = (
    "\"'`\u00ab\u00bb\u2018\u2019\u201a\u201b\u201c\u201d\u201e\u201f\u2039\u203a"
    "\u300c\u300e\uff02\uff07"
)
_BRACE = re.compile(r"[{}]")
_BRACES = 2_000
"""Maximum number of braces and objects to scan; a text with more is rejected."""
_KEY = re.compile(rf"\{{\s*+(?:\\*+[{_QUOTES}]|[\w$.-]{{1,80}}+\s*+[:=]|\}})")
"""A brace that starts an object in JSON or something like it; other braces are prose."""


LENIENT = json.JSONDecoder(object_pairs_hook=unique_keys, strict=False)
"""Allows raw line breaks inside strings."""


@dataclass(frozen=True, slots=True)
class ObjectSpan:
    """An outermost object and its position."""

    value: dict[str, Any]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Scan:
    """The objects in a text."""

    spans: tuple[ObjectSpan, ...]
    """Outermost objects, in order."""
    broken: int | None = None
    """Start of an object that does not parse; the scan stops there."""
    stray: bool = False
    """Whether a brace is unmatched."""


def scan(text: str, decoder: json.JSONDecoder = STRICT) -> Scan:
    """Find the outermost objects of `text` in one pass."""
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
    return None if is_deep(text[place:end]) else ObjectSpan(value, place, end)


def whole_object(text: str, decoder: json.JSONDecoder = STRICT) -> dict[str, Any] | None:
    """The object that is the whole of `text`; None if it is not one object."""
    try:
        value = decoder.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_deep(text) else None


# -- repeating ------------------------------------------------------------------------------------

_FENCED = re.compile(r"<([A-Za-z][\w-]*) ([0-9a-f]{12})>\n(.*?)\n</\1 \2>", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?<!\\\\)\\*+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbf])|%([2-7][0-9a-fA-F])"
)
_TAG = re.compile(r"[<\u2039]/?[A-Za-z][^<>\u2039{}:]{0,80}>|/\*[^*]{0,80}\*/")
_BOTTOMLESS = re.compile(r"&#[0-9]{8,};?")
"""Character references that are too large for any character."""
_ENTITIES = 3
"""Maximum depth of nested character references."""
_DASHES = re.compile("[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
_DROPPED = re.compile(r"[^\w:{./=>-]|_")
_MINOR = re.compile(r"-(?:(?<!:-)|(?!\d))|/(?:(?<!\d/)|(?!\d))")
"""Signs that are kept only in numbers: a minus before one, a slash between two."""
_COLONS = re.compile("[\u2192\u2236\ua789]")
_ASSIGNS = ("=>", "->", "=")
_ALIKE = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0455\u0458\u043a\u0501\u051b"
    "\u03b1\u03b5\u03bf\u03c1\u03b9\u03ba\u03bd\u03c7\u0131",
    "aeopcyxisjkdqaeopikvxi",
)
"""Letters of other scripts that look like Latin ones."""
_LEFT_OUT = re.compile(r"\.{2,}|\u2026")
_TELLING_WORDS = 3
"""Minimum words of a value whose repetition under the same name is not a coincidence."""
_ATTEMPTS = 500
"""Maximum number of broken objects to skip in a question; limits the time."""


class JudgeMaterial:
    """The prompt that a model was shown, including texts by others."""

    def __init__(self, question: str, words: str | None = None) -> None:
        """`words` are the texts by others; default: the fenced texts in the question, else all."""
        fenced = [part for _, _, part in _FENCED.findall(question)] if words is None else [words]
        self._question = question
        self._apart = bool(fenced)
        self._words = "\n".join(fenced) if fenced else question

    def holds(self, value: Mapping[str, Any]) -> bool:
        """Whether `value` is in the question, or repeats texts by others."""
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
        # Rubrics contain scores too, so scores count only in fenced texts.
        telling = bool(leaves) and self._apart and "{" in self._squeezed
        return telling and all(_stands_in(leaf, self._squeezed) for leaf in leaves)


def resembles(words: str, names: Collection[str]) -> bool:
    """Whether an utterance contains an object with at least two of the keys `names` (or with the
    only key), in any spelling, even if it does not parse."""
    _, _, inside = _squeeze(words).partition("{")
    keys = {_squeeze(name) for name in names}
    seen = sum(f"{key}:" in inside for key in keys if key)
    return bool(keys) and seen >= min(2, len(keys))


def _every_object(text: str) -> Iterator[dict[str, Any]]:
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
    """(key, text) of every value that is not an object; a list of plain values is one text."""
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
    """Whether `squeezed` contains a value after its name; "…" in the value matches any text."""
    name, text = leaf
    first, *others = (_squeeze(part) for part in _LEFT_OUT.split(f"{name}:{text}"))
    start = first.rstrip(".")
    if first[-1:].isdecimal():  # 1 does not match in 10
        return re.search(rf"{re.escape(start)}(?:\.0+)?(?!\d|\.\d)", squeezed) is not None
    return start in squeezed and all(part.strip(".") in squeezed for part in others)


def _squeeze(text: str) -> str:
    """Case-folded letters, digits, colons, points, hyphens and opening braces of `text`."""
    for _ in range(_ENTITIES if "&" in text else 0):
        text = html.unescape(_BOTTOMLESS.sub("", text))
    plain = _TAG.sub("", _ESCAPE.sub(_unescape, text)).translate(_SIGNS)
    for assignment in _ASSIGNS:
        plain = plain.replace(assignment, ":")
    return _MINOR.sub("", plain.replace(" ", "").replace(">", ""))


def _squeezed_sign(sign: str) -> str:
    """The normalised form of a character; a space if it is dropped, so that split arrows stay
    split."""
    if is_mark(sign):
        return ""
    bare = unicodedata.normalize("NFKD", _DASHES.sub("-", sign)).casefold().translate(_ALIKE)
    return _DROPPED.sub(" ", _COLONS.sub(":", bare.casefold()))


_SIGNS = SignTable(_squeezed_sign)


def _unescape(escape: re.Match[str]) -> str:
    return chr(int(escape[escape.lastindex], 16)) if escape.lastindex else " "


T = TypeVar("T")
S = TypeVar("S", bound="VerdictShape")

QUESTION_ATTEMPTS = 2
"""The question and one re-ask."""
_DECORATION = " \t\r\n*`\"'.:!()[]"
_BLOCK = re.compile(r"```\w*\s((?:(?!```).)*)```", re.DOTALL)
_QUOTED = 2_000
"""Maximum characters of an unreadable reply that are quoted in the re-ask."""


class VerdictShape(BaseModel):
    """Base of a verdict: all fields are required, strictly typed and finite; no others allowed."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def rated_part(
    name: str, number: type[int] | type[float], reasons: str, ends: tuple[int, int] | None = None
) -> type[VerdictShape]:
    """The shape of `{reasons: "...", "score": number}`, with the number within `ends`."""
    limits = Field() if ends is None else Field(ge=ends[0], le=ends[1])
    fields: dict[str, Any] = {reasons: (str, ...), "score": (number, limits)}
    return create_model(name, __base__=VerdictShape, **fields)


def dimension_shape(
    name: str, about: str, parts: Mapping[str, type[VerdictShape]],
    titles: Mapping[str, str] = MappingProxyType({}),
) -> type[VerdictShape]:  # fmt: skip
    """A shape with a part for each dimension; `titles` are their names in the judge's JSON.

    `about` becomes part of the schema, and so of the question.
    """
    fields: dict[str, Any] = {
        slug: (part, Field(alias=titles.get(slug))) for slug, part in parts.items()
    }
    return create_model(name, __base__=VerdictShape, __doc__=about, **fields)


@dataclass(frozen=True, slots=True)
class JudgeQuestion(Generic[T]):
    """A question to a judge, and how its answer is read."""

    purpose: str
    """Its name in records: `score`, `audit`, `detector`."""
    prompt: str
    read: Callable[[str], T]
    """Reads the answer in a reply; raises UnreadableVerdict with the problem, for the re-ask."""
    dump: Callable[[T], dict[str, Any]]
    """Converts the answer to plain JSON values for the record."""
    form: Form | None = None
    attempts: int = QUESTION_ATTEMPTS
    samples: int = 1
    """Default number of opinions per judge; task and user can override it."""
    role: Role = "judge"
    """`judge`, or `auditor` for questions that must not depend on the judge."""
    quotes: Callable[[str], bool] = lambda text: False
    """Whether a reply repeats an answer that is in the prompt."""
    forgery: Callable[[str], bool] = lambda words: False
    """Whether an actor's text imitates an answer."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer(Generic[T]):
    """A readable answer, with facts about its replies."""

    value: T
    replies: int
    """Number of replies needed."""
    quoting: int
    """Number of replies that repeated an answer from the prompt."""
    ignored: tuple[str, ...] = ()
    """Sampling settings that the server accepted but ignored, such as `form`."""


def question(
    purpose: str,
    prompt: str,
    shape: type[S],
    beside: tuple[type[VerdictShape], ...] = (),
    role: Role = "judge",
) -> JudgeQuestion[S]:
    """A question to the players of `role` whose answer is a JSON object of `shape`.

    `beside` are the shapes of other questions about the same text; a forgery of any of them
    invalidates this answer too.
    """
    material, names = JudgeMaterial(prompt), _names(shape, *beside)
    return JudgeQuestion(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_shape(text, shape, material),
        dump=lambda verdict: verdict.model_dump(mode="json"),
        form=schema_form(shape),
        role=role,
        quotes=lambda text: _quotes_material(text, shape, material),
        forgery=lambda words: resembles(words, names),
    )


def label_question(purpose: str, prompt: str, labels: tuple[str, ...]) -> JudgeQuestion[str]:
    """A question whose answer is one of `labels`, ignoring case."""
    either = "|".join(map(re.escape, labels))
    alone = re.compile(
        rf"^(?:[^\n:=]{{0,80}}[:=])?[^\w\n]{{0,9}}(?:{either})[^\w\n]*$", re.MULTILINE
    )
    return JudgeQuestion(
        purpose=purpose,
        prompt=prompt,
        read=lambda text: read_label(text, labels),
        dump=lambda label: {"label": label},
        forgery=lambda words: alone.search(words) is not None,
    )


@lru_cache(maxsize=256)
def schema_form(shape: type[VerdictShape]) -> Form:
    """The JSON Schema of a shape, named after the class. Cached, because it takes milliseconds."""
    schema = json.dumps(shape.model_json_schema(), sort_keys=True, separators=(",", ":"))
    return Form(shape.__name__.lstrip("_"), schema)


@lru_cache(maxsize=256)
def _names(*shapes: type[VerdictShape]) -> frozenset[str]:
    schemas = [shape.model_json_schema() for shape in shapes]
    parts = [part for schema in schemas for part in (schema, *schema.get("$defs", {}).values())]
    return frozenset(name for part in parts for name in part.get("properties", {}))


async def ask(judge: Player, question: JudgeQuestion[T], call: Call) -> T:
    """The value of `answer`."""
    return (await answer(judge, question, call)).value


async def answer(judge: Player, question: JudgeQuestion[T], call: Call) -> JudgeAnswer[T]:
    """Ask `judge` a question, with re-asks after unreadable replies.

    A reply that was cut off is not re-asked, because the next one would be cut off too.
    UnreadableVerdict if no attempt was readable.
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
            if reply.stop_reason == "length":  # the next reply would be cut off too
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
    length = reply.usage.completion_tokens
    if 0 < length < limit:
        return (
            f"the reply was cut off at {length} tokens by the server or its context ({limit} were "
            "allowed)"
        )
    return f"the reply was cut off at {limit} tokens; increase the judge's max_tokens"


def _reask(reply: str, problem: str) -> tuple[Segment, Segment]:
    quoted = reply.strip()[:_QUOTED] or "(nothing)"
    return Segment("assistant", quoted), Segment(
        "user",
        f"This answer cannot be used: {problem}. Answer once more, in exactly the form that was "
        "asked for and without anything around it.",
    )


# -- reading --------------------------------------------------------------------------------------


def read_label(text: str, labels: tuple[str, ...]) -> str:
    """The label that is the whole answer, ignoring thinking and decoration."""
    by_folded = {label.casefold(): label for label in labels}
    before, label = (
        by_folded.get(part.strip(_DECORATION).casefold()) for part in split_thinking(text)
    )
    if label is None or before not in (None, label):
        raise UnreadableVerdict(f"it is not one of {', '.join(labels)} and nothing else")
    return label


def read_shape(text: str, shape: type[S], material: JudgeMaterial | None = None) -> S:
    """The only verdict of `shape` in a reply, ignoring verdicts from the `material` it was shown.

    UnreadableVerdict with the problem if there is none.
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
    """(objects in the untagged thinking, objects in the answer) of a reply.

    A reply that is a single object has no thinking; it may quote an actor that wrote <think>.
    """
    rest = text[after_blocks(text) :].strip()
    block = _BLOCK.fullmatch(rest)
    alone = whole_object(block[1] if block else rest)
    if alone is not None:
        return Scan(()), Scan((ObjectSpan(alone, 0, len(rest)),))
    thinking, reply = split_thinking(text)
    return scan(thinking), scan(reply)


def _verdicts(reply: Scan, shape: type[S]) -> tuple[list[tuple[S, dict[str, Any]]], list[str]]:
    verdicts, problems = [], []
    for span in reply.spans:
        try:
            verdicts.append((shape.model_validate_json(json.dumps(span.value)), span.value))
        except ValidationError as error:
            problems.append(first_problem(error))
        except (ValueError, RecursionError):
            problems.append("it holds a number that is not finite, or is nested beyond reason")
    return verdicts, problems


def _unseen(
    verdicts: Iterable[tuple[S, dict[str, Any]]], material: JudgeMaterial | None
) -> list[S]:
    return [verdict for verdict, value in verdicts if material is None or not material.holds(value)]


def _quotes_material(text: str, shape: type[VerdictShape], material: JudgeMaterial) -> bool:
    try:
        verdicts, _ = _verdicts(_scans(text)[1], shape)
    except UnreadableVerdict:
        return False
    return len(_unseen(verdicts, material)) < len(verdicts)
