"""Parses text fields that hold a structure: list literals, lettered options.

Literals are parsed, never evaluated, so a data file cannot run code. There are two protocols:
`reference` parses as the published scores were computed, with all quirks; in `paper`, options may
contain commas or be on separate lines, and sentences get their full stops.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from soulkit.errors import RowError
from soulkit.parse import ParseError, parse_json
from soulkit.types import Protocol

# A letter, a full stop, and text without commas, up to the next lettered option or the end.
_COMMA_OPTION = re.compile(r"(?P<letter>[A-Z])\. (?P<text>[^,]+?)(?=,\s*[A-Z]\.|$)")
_BOUNDARY = re.compile(r"(?:\A|[,;\n])\s*\(?(?P<letter>[A-Z])[.)](?=\s)\s*")
LONGEST = 500_000
"""Maximum characters of a Python literal, whose syntax tree takes 500 times as much memory."""
_SENTENCE_END = (".", "!", "?", "…", '"', "”", "'")


def read_literal(text: str) -> Any:
    """The value of a JSON or Python literal; ValueError if `text` is neither."""
    try:
        # JSON first: Python reads JSON escapes (\/ and surrogate pairs) as other characters.
        return parse_json(text, strict=False)
    except ParseError:
        pass  # it may be a Python literal
    try:
        return python_literal(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is not a literal: {error}") from error


def python_literal(text: str) -> Any:
    """The value of a Python literal; raises what `ast.literal_eval` raises."""
    if len(text) > LONGEST:
        raise ValueError(f"it has more than {LONGEST} characters")
    return ast.literal_eval(text)


def texts_of(value: Any) -> Iterator[str]:
    """All strings in a value, in order. Other scalars become strings; None is skipped."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
    elif value is not None:
        yield str(value)


def structure(value: Any) -> Any:
    """`value`, parsed if it is text that spells a list or a mapping."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return read_literal(value)
        except ValueError:
            return value  # plain text that starts with a bracket
    return value


def first_message(conversations: Any) -> str | None:
    """`conversations[0]["messages"][0]["content"]`; each level may be a literal.

    None if there is no such message, "" if it has no content.
    """
    node = structure(conversations)
    for key in ("messages", "content"):
        first = structure(node[0]) if isinstance(node, list | tuple) and node else None
        if not isinstance(first, Mapping):
            return None
        node = structure(first.get(key)) if key == "messages" else first.get(key)
    return str(node or "")


def literal_list(value: Any, protocol: Protocol = "paper") -> list[Any] | None:
    """`value` as a list if it is one or spells one, else None."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        literal = python_literal(value) if protocol == "reference" else read_literal(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return literal if isinstance(literal, list) else None


def item_text(value: Any, what: str) -> str:
    """One of the row's texts, stripped. "" for None; numbers as text. `what` names it in errors.

    DataError for a list or an object, whose brackets and keys would end up in the text.
    """
    if isinstance(value, Mapping | list | tuple):
        raise RowError(
            f"One of the row's {what} is not text.", f"It is {type(value).__name__} {value!r:.60}."
        )
    return "" if value is None else str(value).strip()


def parse_story(value: Any, protocol: Protocol = "paper") -> str:
    """A story as text, from text, a list of sentences, or the literal of such a list.

    `reference` joins sentences with a space. `paper` writes one per line and adds missing full
    stops, so that sentences stay separate.
    """
    if value is None:
        return ""
    sentences = literal_list(value, protocol)
    if sentences is None:
        return str(value)
    if protocol == "reference":
        return " ".join(str(sentence) for sentence in sentences)
    return join_sentences(str(sentence) for sentence in sentences)


def join_sentences(sentences: Iterable[str]) -> str:
    """One sentence per line, each with a final stop; empty sentences are skipped."""
    stripped = [sentence.strip() for sentence in sentences]
    return "\n".join(s if s.endswith(_SENTENCE_END) else f"{s}." for s in stripped if s)


def parse_candidates(value: Any, protocol: Protocol = "paper") -> list[str]:
    """The candidate answers of a row, from a list, the literal of one, or plain text.

    `reference` treats any other text as a single candidate. `paper` splits it at commas, semicolons
    and line ends, and drops blanks and repetitions.
    """
    if value is None or value == "":
        return []
    items = literal_list(value, protocol)
    if protocol == "reference":
        return [str(value)] if items is None else [str(item) for item in items]
    parts = re.split(r"[,;\n]", str(value)) if items is None else [str(x) for x in items]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def parse_choices(text: str, protocol: Protocol = "paper") -> dict[str, str]:
    """Letter → option text, from `A. x, B. y` or, in `paper`, from options on separate lines.

    `paper` starts a new option only at the next letter, so commas and stray capitals inside an
    option are kept. An empty dict if there are no options.
    """
    if protocol == "reference":
        return {match["letter"]: match["text"] for match in _COMMA_OPTION.finditer(text)}
    options: dict[str, str] = {}
    marks: list[re.Match[str]] = []
    for match in _BOUNDARY.finditer(text):
        if len(marks) < 26 and match["letter"] == chr(ord("A") + len(marks)):
            marks.append(match)
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=False):  # without marks, `ends` is one longer
        options[mark["letter"]] = text[mark.end() : end].strip().rstrip(",;").rstrip()
    return options
