"""Does a reply keep to a condition on its form? Pure functions, no model, no judgement.

A check is data: `{"kind": "words", "least": 20, "most": 30}` names a function here and its
arguments. Reading is strict: what is not met to the letter is not met.

How things are counted: a *word* is what stands between white space and holds a letter or a digit; a
*sentence* ends with `.`, `!`, `?` or `…` (closing quotation marks and brackets behind it belong to
it) before white space or the end, and words after the last one are a sentence, too; *lines* are
those that are not empty, *paragraphs* are parted by empty lines. Words that are named are looked
for whole and in any case. One code fence around a whole reply is taken off before JSON is read, and
nowhere else.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soulkit.errors import DataError

LONGEST = 50_000
"""Characters beyond which a reply meets nothing: no instruction here asks for a hundredth of it."""

_ENDS = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|\Z)")
_ITEM, _NUMBER = re.compile(r"[-*•] \s*\S"), re.compile(r"(\d{1,4})[.)] \s*\S")


# --- counting -------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    """The words of a text, with the marks that hang on them."""
    return [word for word in text.split() if any(map(str.isalnum, word))]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text; one that has no end is the last."""
    parts, start = [], 0
    for end in _ENDS.finditer(text):
        parts.append(text[start : end.end()])
        start = end.end()
    return [part.strip() for part in (*parts, text[start:]) if words_of(part)]


def lines_of(text: str) -> list[str]:
    """The lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def bare_words(text: str) -> list[str]:
    """The words of a text in lower case, without any marks."""
    return re.findall(r"\w+(?:['’]\w+)?", text.lower())


def words(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(words_of(text)), least, most)


def sentences(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(sentences_of(text)), least, most)


def lines(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(lines_of(text)), least, most)


def paragraphs(text: str, count: int) -> bool:
    blocks, filled = 0, False
    for line in text.splitlines():
        blocks += bool(line.strip()) and not filled
        filled = bool(line.strip())
    return blocks == count


def characters(text: str, most: int) -> bool:
    return 0 < len(text) <= most


def words_a_line(text: str, count: int) -> bool:
    return _every(lines_of(text), lambda line: len(words_of(line)) == count)


def words_a_sentence(text: str, most: int) -> bool:
    return _every(sentences_of(text), lambda one: len(words_of(one)) <= most)


# --- letters --------------------------------------------------------------------------------------


def upper(text: str) -> bool:
    return text.isupper()


def lower(text: str) -> bool:
    return text.islower()


def capitals(text: str) -> bool:
    """Every word begins with a capital."""
    return _every(bare_cased(text), lambda word: word[0].isupper() or word[0].isdigit())


def bare_cased(text: str) -> list[str]:
    """The words of a text as they are written, without what stands before their first letter."""
    return [word.lstrip("\"'“‘([*_#-") or word for word in words_of(text)]


def without_characters(text: str, characters: str) -> bool:
    low = text.lower()
    return bool(low) and not any(character in low for character in characters.lower())


def begin_with(text: str, letter: str) -> bool:
    """Every word begins with the letter, in whatever case."""
    return _every(bare_words(text), lambda word: word.startswith(letter.lower()))


def spells(text: str, letters: str) -> bool:
    """The first letters of the lines, in whatever case."""
    return "".join(line[0] for line in lines_of(text)).lower() == letters.lower()


# --- words ----------------------------------------------------------------------------------------


def contains(text: str, words: Sequence[str]) -> bool:
    return all(_times(text, word) for word in words)


def without(text: str, words: Sequence[str]) -> bool:
    return bool(text) and not any(_times(text, word) for word in words)


def times(text: str, word: str, count: int) -> bool:
    return _times(text, word) == count


def marks(text: str, mark: str, count: int) -> bool:
    return text.count(mark) == count


def no_word_twice(text: str) -> bool:
    every = bare_words(text)
    return bool(every) and len(set(every)) == len(every)


def starts(text: str, words: str) -> bool:
    return text.startswith(words)


def ends(text: str, words: str) -> bool:
    return text.endswith(words)


# --- form -----------------------------------------------------------------------------------------


def bullets(text: str, count: int, only: bool = True) -> bool:
    """So many lines that begin with `- `, `* ` or `• `; with `only`, and no other line."""
    items = [bool(_ITEM.match(line)) for line in lines_of(text)]
    return sum(items) == count and (all(items) or not only)


def numbered(text: str, count: int, only: bool = True) -> bool:
    """Lines `1. …` to `count. …`, in this order; with `only`, and no other line."""
    heads = [_NUMBER.match(line) for line in lines_of(text)]
    numbers = [int(head[1]) for head in heads if head]
    return numbers == list(range(1, count + 1)) and (all(heads) or not only)


def in_order(text: str) -> bool:
    """The lines stand in the order of the alphabet."""
    every = [line.lower() for line in lines_of(text)]
    return len(every) > 1 and every == sorted(every)


def title(text: str) -> bool:
    """A first line `# …`, an empty line, and more."""
    head, *rest = text.splitlines() or [""]
    return head.startswith("# ") and len(rest) > 1 and not rest[0].strip() and bool(rest[1].strip())


def quoted(text: str) -> bool:
    """The whole reply stands between double quotation marks, and no other is in it."""
    return len(text) > 2 and text[0] == text[-1] == '"' and text.count('"') == 2


def table(text: str, columns: int, rows: int) -> bool:
    """A Markdown table, its head and rule beside so many rows, and nothing else."""
    every = lines_of(text)
    cells = [line.strip("|").split("|") for line in every]
    framed = all(line.startswith("|") and line.endswith("|") for line in every)
    even = all(len(row) == columns and all(map(str.strip, row)) for row in cells)
    ruled = len(cells) > 1 and all(not set(cell.strip()) - set("-:") for cell in cells[1])
    return len(every) == rows + 2 and framed and even and ruled


def json_object(text: str, keys: Mapping[str, str]) -> bool:
    """A JSON object with exactly these keys, whose values are of these kinds."""
    value = _json(text)
    if not isinstance(value, dict) or value.keys() != keys.keys():
        return False
    return all(_is_kind(value[key], kind) for key, kind in keys.items())


def json_list(text: str, count: int, of: str = "string") -> bool:
    """A JSON list of so many values of one kind."""
    value = _json(text)
    return isinstance(value, list) and len(value) == count and all(_is_kind(v, of) for v in value)


# --- how checks are read --------------------------------------------------------------------------

KINDS: Mapping[str, Callable[..., bool]] = {
    check.__name__: check
    for check in (
        words, sentences, lines, paragraphs, characters, words_a_line, words_a_sentence,
        upper, lower, capitals, without_characters, begin_with, spells,
        contains, without, times, marks, no_word_twice, starts, ends,
        bullets, numbered, in_order, title, quoted, table, json_object, json_list,
    )
}  # fmt: skip
"""Kind of a check → what decides it."""


def unmet(checks: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """The kinds of those checks that a reply does not meet, in their order."""
    reply = text.strip()
    if len(reply) > LONGEST:
        return [check["kind"] for check in checks]
    return [check["kind"] for check in checks if not _meets(check, reply)]


def _meets(check: Mapping[str, Any], reply: str) -> bool:
    arguments = {name: value for name, value in check.items() if name != "kind"}
    return KINDS[check["kind"]](reply, **arguments)


def refuse_unreadable(checks: Any) -> None:
    """DataError unless `checks` is a list of checks that there are, with their arguments."""
    listed = isinstance(checks, list | tuple) and bool(checks)
    broken = [check for check in checks if not _is_check(check)] if listed else [checks]
    if broken:
        raise DataError(
            f"A row's checks cannot be used: {json.dumps(broken[0], default=str)[:120]}.",
            "A check is an object with its kind and the arguments that this kind takes.",
            f'Write {{"kind": "words", "least": 5, "most": 9}}; kinds: {", ".join(KINDS)}.',
        )


def _is_check(check: Any) -> bool:
    if not isinstance(check, Mapping) or check.get("kind") not in KINDS:
        return False
    arguments = {name: value for name, value in check.items() if name != "kind"}
    try:
        inspect.signature(KINDS[check["kind"]]).bind("", **arguments)
        _meets(check, "a word")  # arguments of another type than the check can use
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def _within(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _every(parts: Sequence[str], holds: Callable[[str], bool]) -> bool:
    """Whether there are parts, and it holds for all of them."""
    return bool(parts) and all(map(holds, parts))


def _times(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a kind; an empty string says nothing and is of none."""
    if kind.startswith("list of "):
        return isinstance(value, list) and _all_of(value, kind.removeprefix("list of "))
    if isinstance(value, bool):
        return kind == "boolean"
    types: Mapping[str, tuple[type, ...]] = {
        "string": (str,), "integer": (int,), "number": (int, float), "list": (list,),
        "object": (dict,), "boolean": (bool,),
    }  # fmt: skip
    return isinstance(value, types[kind]) and value != ""


def _all_of(values: Sequence[Any], kinds: str) -> bool:
    """Whether there are values, all of the kind that a plural names (`strings`)."""
    return bool(values) and all(_is_kind(value, kinds.removesuffix("s")) for value in values)


def _json(text: str) -> Any:
    """The value of a JSON text; None where it is none, or where a key stands twice."""
    try:
        return json.loads(_unfenced(text), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _unfenced(text: str) -> str:
    every = text.splitlines()
    if len(every) > 2 and every[0].startswith("```") and every[-1].strip() == "```":
        return "\n".join(every[1:-1])
    return text


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
