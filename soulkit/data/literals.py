"""Fields that hold a structure inside a string: lists as literals, lettered options.

Literals are read, never evaluated: a data file must not be able to run code. Two protocols. In
`reference` the readings are those of the published scores, their odd corners included; in `paper`
options may hold commas or stand on lines of their own, and sentences get their full stops.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from soulkit.errors import RowError
from soulkit.types import Protocol

# A letter, a full stop, and text without commas, up to the next lettered option or the end.
_COMMA_OPTION = re.compile(r"(?P<letter>[A-Z])\. (?P<text>[^,]+?)(?=,\s*[A-Z]\.|$)")
_BOUNDARY = re.compile(r"(?:\A|[,;\n])\s*\(?(?P<letter>[A-Z])[.)](?=\s)\s*")
_SENTENCE_END = (".", "!", "?", "…", '"', "”", "'")


def read_literal(text: str) -> Any:
    """The JSON or Python literal that `text` spells; ValueError when it spells none."""
    try:
        # First, because Python reads JSON's escapes (\/ and pairs of surrogates) as other signs.
        return json.loads(text)
    except (ValueError, RecursionError):
        pass  # quotes, None, True and False may be Python's: the second reading decides
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is no literal: {error}") from error


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a value, in order; other scalars as text, None as none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from texts_of(item)
    elif value is not None:
        yield str(value)


def structure(value: Any) -> Any:
    """`value`, or the list or mapping that its text spells as JSON or a literal."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return read_literal(value)
        except ValueError:
            return value  # a text that merely begins with a bracket
    return value


def first_message(conversations: Any) -> str | None:
    """`conversations[0]["messages"][0]["content"]`, every level as such or as its literal.

    None where there is no such message, "" for one without content.
    """
    node = structure(conversations)
    for key in ("messages", "content"):
        first = structure(node[0]) if isinstance(node, list | tuple) and node else None
        if not isinstance(first, Mapping):
            return None
        node = structure(first.get(key)) if key == "messages" else first.get(key)
    return str(node or "")


def literal_list(value: Any, protocol: Protocol = "paper") -> list[Any] | None:
    """`value` as a list when it is one or spells one, else None."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        literal = ast.literal_eval(value) if protocol == "reference" else read_literal(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return literal if isinstance(literal, list) else None


def item_text(value: Any, what: str) -> str:
    """`value`, one of the texts that `what` names, stripped; "" for None, numbers as written.

    DataError for a list or an object: written out, its brackets and keys would pass for words.
    """
    if isinstance(value, Mapping | list | tuple):
        raise RowError(
            f"One of the row's {what} is no text.", f"It is {type(value).__name__} {value!r:.60}."
        )
    return "" if value is None else str(value).strip()


def parse_story(value: Any, protocol: Protocol = "paper") -> str:
    """A story as text, from text, a list of sentences, or the literal of such a list.

    `reference` joins sentences by one blank; `paper` writes one a line and ends each properly, so
    that sentences stored without full stops stay apart.
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
    """One sentence a line, each with its final stop; empty ones left out."""
    stripped = [sentence.strip() for sentence in sentences]
    return "\n".join(s if s.endswith(_SENTENCE_END) else f"{s}." for s in stripped if s)


def parse_candidates(value: Any, protocol: Protocol = "paper") -> list[str]:
    """The candidate answers of a row: from a list, the literal of one, or plain text.

    `reference` takes any other text as one single candidate; `paper` splits it at commas,
    semicolons and line ends, and drops blanks and repetitions.
    """
    if value is None or value == "":
        return []
    items = literal_list(value, protocol)
    if protocol == "reference":
        return [str(value)] if items is None else [str(item) for item in items]
    parts = re.split(r"[,;\n]", str(value)) if items is None else [str(x) for x in items]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def parse_choices(text: str, protocol: Protocol = "paper") -> dict[str, str]:
    """Letter → option text, from `A. x, B. y` or, in `paper`, from options on lines of their own.

    `paper` accepts a boundary only with the letter that comes next, so that commas and stray
    capitals inside an option survive. No options: an empty dict.
    """
    if protocol == "reference":
        return {match["letter"]: match["text"] for match in _COMMA_OPTION.finditer(text)}
    options: dict[str, str] = {}
    marks: list[re.Match[str]] = []
    for match in _BOUNDARY.finditer(text):
        if len(marks) < 26 and match["letter"] == chr(ord("A") + len(marks)):
            marks.append(match)
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    for mark, end in zip(marks, ends, strict=False):  # without marks there is an end to spare
        options[mark["letter"]] = text[mark.end() : end].strip().rstrip(",;").rstrip()
    return options
