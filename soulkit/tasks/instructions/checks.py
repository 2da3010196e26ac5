"""Does a reply keep to a condition on its form? Pure functions, no model, no judgement.

A check is data: `{"kind": "words", "least": 20, "most": 30}` names a function here and its
arguments. Reading is strict: what is not met to the letter is not met.

How things are counted: a *word* is what stands between white space and holds a letter or a digit; a
*sentence* ends with `.`, `!`, `?` or `…` (closing quotation marks and brackets behind it belong to
it) before white space or the end, and words after the last one are a sentence, too, while the
number of an item in a list (`1.`) is none; *lines* are those that are not empty, *paragraphs* are
parted by empty lines. Words that are named are looked for whole and in any case. One code fence
around a whole reply is taken off before JSON is read, and nowhere else.
"""

from __future__ import annotations

import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soulkit.errors import DataError

LONGEST = 50_000
"""Characters beyond which a reply meets nothing: no instruction here asks for a hundredth of it."""

_ENDS = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|\Z)")
_ITEM, _NUMBER = re.compile(r"- \s*\S"), re.compile(r"(\d{1,4})\. \s*\S")
_NUMBERS = re.compile(r"^[ \t]*\d{1,4}[.)](?=[ \t])", re.MULTILINE)
_PIPE, _RULE = re.compile(r"(?<!\\)\|"), re.compile(r":?-+:?")
_QUOTES = (('"', '"'), ("“", "”"))


# --- counting -------------------------------------------------------------------------------------


def _words_of(text: str) -> list[str]:
    """The words of a text, with the marks that hang on them."""
    return [word for word in text.split() if any(map(str.isalnum, word))]


def _sentences_of(text: str) -> list[str]:
    """The sentences of a text; one that has no end is the last."""
    text, parts, start = _NUMBERS.sub("", text), [], 0
    for end in _ENDS.finditer(text):
        parts.append(text[start : end.end()])
        start = end.end()
    return [part.strip() for part in (*parts, text[start:]) if _words_of(part)]


def _lines_of(text: str) -> list[str]:
    """The lines of a text that are not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _bare_words(text: str) -> list[str]:
    """The words of a text in lower case, without any marks."""
    return re.findall(r"\w+(?:['’]\w+)?", text.lower())


def _words(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(_words_of(text)), least, most)


def _sentences(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(_sentences_of(text)), least, most)


def _lines(text: str, least: int = 1, most: int | None = None) -> bool:
    return _within(len(_lines_of(text)), least, most)


def _paragraphs(text: str, count: int) -> bool:
    blocks, filled = 0, False
    for line in text.splitlines():
        blocks += bool(line.strip()) and not filled
        filled = bool(line.strip())
    return blocks == count


def _characters(text: str, most: int) -> bool:
    return 0 < len(text) <= most


def _words_a_line(text: str, count: int) -> bool:
    return _every(_lines_of(text), lambda line: len(_words_of(line)) == count)


def _words_a_sentence(text: str, most: int) -> bool:
    return _every(_sentences_of(text), lambda one: len(_words_of(one)) <= most)


# --- letters --------------------------------------------------------------------------------------


def _upper(text: str) -> bool:
    return text.isupper()


def _lower(text: str) -> bool:
    return text.islower()


def _capitals(text: str) -> bool:
    """Every word begins with a capital."""
    return _every(_bare_cased(text), lambda word: word[0].isupper() or word[0].isdigit())


def _bare_cased(text: str) -> list[str]:
    """The words of a text as they are written, without what stands before their first letter."""
    return [word.lstrip("\"'“‘«([*_#-") or word for word in _words_of(text)]


def _without_characters(text: str, characters: str) -> bool:
    low = text.lower()
    return bool(low) and not any(character in low for character in characters.lower())


def _begin_with(text: str, letter: str) -> bool:
    """Every word begins with the letter, in whatever case."""
    words = [word.lower() for word in _bare_cased(text)]
    return _every(words, lambda word: word.startswith(letter.lower()))


def _spells(text: str, letters: str) -> bool:
    """The first letters of the lines, in whatever case, behind whatever marks."""
    first = [next(filter(str.isalnum, line), "") for line in _lines_of(text)]
    return "".join(first).lower() == letters.lower()


# --- words ----------------------------------------------------------------------------------------


def _contains(text: str, words: Sequence[str]) -> bool:
    _refuse_one(words)
    return all(_count_of(text, word) for word in words)


def _without(text: str, words: Sequence[str]) -> bool:
    _refuse_one(words)
    return bool(text) and not any(_count_of(text, word) for word in words)


def _times(text: str, word: str, count: int) -> bool:
    return _count_of(text, word) == count


def _marks(text: str, mark: str, count: int) -> bool:
    return text.count(mark) == count


def _no_word_twice(text: str) -> bool:
    every = _bare_words(text)
    return bool(every) and len(set(every)) == len(every)


def _starts(text: str, words: str) -> bool:
    """It begins with these words, the last of them whole."""
    behind = text[len(words) : len(words) + 2]
    goes_on = behind[:1].isalnum() or (behind[:1] in ("'", "’") and behind[1:].isalpha())
    return text.startswith(words) and not (words[-1:].isalnum() and goes_on)


def _ends(text: str, words: str) -> bool:
    return text.endswith(words)


# --- form -----------------------------------------------------------------------------------------


def _bullets(text: str, count: int, before: int = 0, after: int = 0) -> bool:
    """So many lines that begin with `- `, in one piece between so many others."""
    return _list_of(text, _ITEM, count, before, after) is not None


def _numbered(text: str, count: int, before: int = 0, after: int = 0) -> bool:
    """Lines `1. …` to `count. …`, in this order, between so many others."""
    heads = _list_of(text, _NUMBER, count, before, after)
    return heads is not None and [int(head[1]) for head in heads] == list(range(1, count + 1))


def _list_of(
    text: str, item: re.Pattern[str], count: int, before: int, after: int
) -> list[re.Match[str]] | None:
    """The items of a list with so many lines around it, no more and no fewer; None without one."""
    heads = [item.match(line) for line in _lines_of(text)]
    items = [head for head in heads[before : before + count] if head]
    others = heads[:before] + heads[before + count :]
    whole = len(heads) == before + count + after and len(items) == count
    return items if whole and not any(others) else None


def _last_line(text: str, words: str) -> bool:
    return _lines_of(text)[-1:] == [words]


def _lines_end(text: str, mark: str) -> bool:
    return _every(_lines_of(text), lambda line: line.endswith(mark))


def _in_order(text: str) -> bool:
    """The lines stand in the order of the alphabet, whatever accents their letters have."""
    every = [_plain(line) for line in _lines_of(text)]
    return len(every) > 1 and every == sorted(every)


def _plain(line: str) -> str:
    """A line in lower case, without accents."""
    split = unicodedata.normalize("NFKD", line.casefold())
    return "".join(one for one in split if not unicodedata.combining(one))


def _title(text: str, least: int = 1, most: int | None = None) -> bool:
    """A first line `# …`, an empty line, and so many sentences."""
    head, *rest = text.splitlines() or [""]
    parted = len(rest) > 1 and not rest[0].strip() and bool(rest[1].strip())
    body = "\n".join(rest[1:])
    return bool(head.startswith("# ") and parted and _sentences(body, least, most))


def _quoted(text: str) -> bool:
    """The whole reply stands between double quotation marks, straight or curly, and no other is in
    it."""
    inside = not any(mark in text[1:-1] for pair in _QUOTES for mark in pair)
    return len(text) > 2 and (text[0], text[-1]) in _QUOTES and inside


def _table(text: str, columns: int, rows: int) -> bool:
    """A Markdown table, its head and rule beside so many rows, and nothing else; only cells of its
    head may be empty."""
    every = [_cells_of(line) for line in _lines_of(text)]
    even = all(len(row) == columns for row in every)
    ruled = len(every) > 1 and all(map(_RULE.fullmatch, every[1]))
    return (
        len(every) == rows + 2 and even and ruled and all(cell for row in every[2:] for cell in row)
    )


def _cells_of(line: str) -> list[str]:
    """The cells of a line of a table; one without a pipe has none."""
    cells = [cell.strip() for cell in _PIPE.split(line)]
    if len(cells) == 1:
        return []
    return cells[not cells[0] and line.startswith("|") : -1 if line.endswith("|") else None]


def _json_object(text: str, keys: Mapping[str, str]) -> bool:
    """A JSON object with exactly these keys, whose values are of these kinds."""
    _refuse_unknown(*keys.values())
    value = _json(text)
    if not isinstance(value, dict) or value.keys() != keys.keys():
        return False
    return all(_is_kind(value[key], kind) for key, kind in keys.items())


def _json_list(text: str, count: int, of: str = "string") -> bool:
    """A JSON list of so many values of one kind."""
    _refuse_unknown(of)
    value = _json(text)
    return isinstance(value, list) and len(value) == count and all(_is_kind(v, of) for v in value)


def _json_value(text: str, value: Any) -> bool:
    """This very JSON value, its keys in any order; `1.0` is another number than `1`."""
    written = _json(text)
    return written is not None and _spelled(written) == _spelled(value)


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _json_begins(text: str, value: str) -> bool:
    """A JSON list whose first value is this word, in any case."""
    written = _json(text)
    first = written[0] if isinstance(written, list) and written else None
    return isinstance(first, str) and first.strip().lower() == value.lower()


# --- how checks are read --------------------------------------------------------------------------

KINDS: Mapping[str, Callable[..., bool]] = {
    check.__name__.removeprefix("_"): check
    for check in (
        _words, _sentences, _lines, _paragraphs, _characters, _words_a_line, _words_a_sentence,
        _upper, _lower, _capitals, _without_characters, _begin_with, _spells,
        _contains, _without, _times, _marks, _no_word_twice, _starts, _ends,
        _bullets, _numbered, _last_line, _lines_end, _in_order, _title, _quoted, _table,
        _json_object, _json_list, _json_value, _json_begins,
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
    kind = check.get("kind") if isinstance(check, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return False
    arguments = {name: value for name, value in check.items() if name != "kind"}
    try:
        inspect.signature(KINDS[kind]).bind("", **arguments)
        _meets(check, "a word")  # arguments of another type than the check can use
    except (TypeError, ValueError, AttributeError):
        return False
    return True


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "list": (list,),
    "object": (dict,), "boolean": (bool,),
}  # fmt: skip
"""Kind of a JSON value → its types here."""


def _refuse_unknown(*kinds: str) -> None:
    """ValueError for a kind of value that there is not."""
    for kind in kinds:
        if kind.removeprefix("list of ").removesuffix("s") not in _TYPES:
            raise ValueError(f"'{kind}' is no kind of a JSON value")


def _refuse_one(words: Sequence[str]) -> None:
    """TypeError for one word where a list of them belongs: its letters would be looked for."""
    if isinstance(words, str):
        raise TypeError(f"'{words}' is no list of words")


def _within(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _every(parts: Sequence[str], holds: Callable[[str], bool]) -> bool:
    """Whether there are parts, and it holds for all of them."""
    return bool(parts) and all(map(holds, parts))


def _count_of(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a kind; an empty string says nothing and is of none."""
    if kind.startswith("list of "):
        return isinstance(value, list) and _all_of(value, kind.removeprefix("list of "))
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) and value != ""


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
