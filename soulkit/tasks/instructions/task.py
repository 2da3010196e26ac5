"""Instructions that rules can check: lengths, case, lists, JSON, words to avoid.

{"instruction": "Name the four seasons … as a JSON list.", "checks": [{"kind": "json_list",
"count": 4}], "kind": "json", "reply": "[...]"}

A reply scores 1 if it meets every check of its row, else 0; `checks` is the share that it meets.
There are forty fixed rows. A check names a function below and its arguments, and is applied
literally. A *word* is delimited by white space and contains a letter or digit; a *sentence* ends
with `.`, `!`, `?` or `…`; *lines* are not empty, and *paragraphs* are separated by empty lines.
Given words are matched as whole words, ignoring case.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken
from soulkit.models.base import Cast
from soulkit.parse import ParseError, parse_json
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import READABLE
from soulkit.types import Episode, Example, Score

SHARE = "checks"
"""Metric: the share of a row's checks that a reply meets."""


class Instructions(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        refuse_unreadable(fields["checks"])
        return fields

    def parse(self, text: str) -> tuple[str, str]:
        """The whole spoken reply is the answer; an empty one is not checked."""
        words = spoken(text, self.protocol).strip()
        return words, "ok" if words else "empty"

    def grade(self, example: Example, answer: str) -> float:
        return float(not unmet(example.fields["checks"], answer))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        checks = example.fields["checks"]
        return {SHARE: 1 - len(unmet(checks, answer)) / len(checks) if answer else 0.0}

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Score as in every choice task; the score's words list the checks that failed."""
        score = await super().score(example, episode, cast)
        missed = unmet(example.fields["checks"], score.words) if score.status in READABLE else []
        return replace(score, words=", ".join(missed))

    def gold_completion(self, example: Example) -> str:
        return str(example.fields["reply"])

    def gold_text(self, example: Example) -> str:
        return str(example.fields["reply"])

    def wrong_completion(self, example: Example) -> str:
        return (
            "Congratulations on the test drive! I would rather NOT swim in blue water,\n\n"
            "thank you very much. Another time? Perhaps."
        )

    def leak_view(self, example: Example) -> LeakView:
        fields = example.fields
        return LeakView(question=fields["instruction"], reference=fields["reply"])


TEXTS = Texts(__file__)


def rows(n: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """`n` of the forty rows, in an order drawn from the seed."""
    every = list(TEXTS["instructions"])
    random.Random(f"instructions/{seed}").shuffle(every)
    return [deepcopy(dict(row)) for row in every[:n]]


LONGEST = 50_000
"""A longer reply (in characters) meets no check: no instruction asks for even a hundredth of it."""

_ENDS = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|\Z)")
_ITEM, _NUMBER = re.compile(r"- \s*\S"), re.compile(r"(\d{1,4})\. \s*\S")
_NUMBERS = re.compile(r"^[ \t]*\d{1,4}[.)](?=[ \t])", re.MULTILINE)
_PIPE, _RULE = re.compile(r"(?<!\\)\|"), re.compile(r":?-+:?")
_QUOTES = (('"', '"'), ("“", "”"))


# --- parts of a text -----------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return [word for word in text.split() if any(map(str.isalnum, word))]


def _cased_words(text: str) -> list[str]:
    """The words of a text, without any marks before their first letter."""
    return [word.lstrip("\"'“‘«([*_#-") or word for word in _words(text)]


def _sentences(text: str) -> list[str]:
    """The sentences of a text; the last one may be unfinished."""
    text, parts, start = _NUMBERS.sub("", text), [], 0
    for end in _ENDS.finditer(text):
        parts.append(text[start : end.end()])
        start = end.end()
    return [part.strip() for part in (*parts, text[start:]) if _words(part)]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _paragraphs(text: str) -> int:
    blocks, filled = 0, False
    for line in text.splitlines():
        blocks += bool(line.strip()) and not filled
        filled = bool(line.strip())
    return blocks


def _count_of(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _within(count: int, least: int, most: int | None) -> bool:
    return least <= count and (most is None or count <= most)


def _every(parts: Sequence[str], holds: Callable[[str], bool]) -> bool:
    """Whether there are any parts, and all of them pass."""
    return bool(parts) and all(map(holds, parts))


# --- letters and words ----------------------------------------------------------------------------


def _spells(text: str, letters: str) -> bool:
    """Whether the lines' first letters spell `letters`, ignoring case and leading marks."""
    first = [next(filter(str.isalnum, line), "") for line in _lines(text)]
    return "".join(first).lower() == letters.lower()


def _contains(text: str, words: Sequence[str]) -> bool:
    _refuse_one(words)
    return all(_count_of(text, word) for word in words)


def _without(text: str, words: Sequence[str]) -> bool:
    _refuse_one(words)
    return bool(text) and not any(_count_of(text, word) for word in words)


def _refuse_one(words: Sequence[str]) -> None:
    """TypeError for a text in place of a list: its letters would be searched for."""
    if isinstance(words, str):
        raise TypeError(f"'{words}' is not a list of words")


def _no_word_twice(text: str) -> bool:
    bare = re.findall(r"\w+(?:['’]\w+)?", text.lower())
    return bool(bare) and len(set(bare)) == len(bare)


def _starts(text: str, words: str) -> bool:
    """Whether the text begins with these words, the last one as a whole word."""
    behind = text[len(words) : len(words) + 2]
    goes_on = behind[:1].isalnum() or (behind[:1] in ("'", "’") and behind[1:].isalpha())
    return text.startswith(words) and not (words[-1:].isalnum() and goes_on)


# --- form -----------------------------------------------------------------------------------------


def _bullets(text: str, count: int, before: int = 0, after: int = 0) -> bool:
    """Whether there are `count` consecutive `- ` lines, with `before` and `after` other lines."""
    return _list_of(text, _ITEM, count, before, after) is not None


def _numbered(text: str, count: int, before: int = 0, after: int = 0) -> bool:
    """Whether lines `1. …` to `count. …` are in order, with `before` and `after` other lines."""
    heads = _list_of(text, _NUMBER, count, before, after)
    return heads is not None and [int(head[1]) for head in heads] == list(range(1, count + 1))


def _list_of(
    text: str, item: re.Pattern[str], count: int, before: int, after: int
) -> list[re.Match[str]] | None:
    """The items of a list with exactly these numbers of lines around it; None without one."""
    heads = [item.match(line) for line in _lines(text)]
    items = [head for head in heads[before : before + count] if head]
    others = heads[:before] + heads[before + count :]
    complete = len(heads) == before + count + after and len(items) == count
    return items if complete and not any(others) else None


def _in_order(text: str) -> bool:
    """Whether the lines are in alphabetical order, ignoring accents."""
    split = [unicodedata.normalize("NFKD", line.casefold()) for line in _lines(text)]
    plain = ["".join(s for s in line if not unicodedata.combining(s)) for line in split]
    return len(plain) > 1 and plain == sorted(plain)


def _title(text: str, least: int = 1, most: int | None = None) -> bool:
    """Whether a first line `# …` and an empty line precede `least` to `most` sentences."""
    head, *rest = text.splitlines() or [""]
    parted = len(rest) > 1 and not rest[0].strip() and bool(rest[1].strip())
    body = "\n".join(rest[1:])
    return bool(head.startswith("# ") and parted and _within(len(_sentences(body)), least, most))


def _quoted(text: str) -> bool:
    """Whether double quotation marks, straight or curly, enclose the whole reply, without any
    inside."""
    inside = not any(mark in text[1:-1] for pair in _QUOTES for mark in pair)
    return len(text) > 2 and (text[0], text[-1]) in _QUOTES and inside


def _table(text: str, columns: int, rows: int) -> bool:
    """Whether the reply is just a Markdown table with header, rule and `rows` rows; only header
    cells may be empty."""
    every = [_cells_of(line) for line in _lines(text)]
    even = all(len(row) == columns for row in every)
    ruled = len(every) > 1 and all(map(_RULE.fullmatch, every[1]))
    return (
        len(every) == rows + 2 and even and ruled and all(cell for row in every[2:] for cell in row)
    )


def _cells_of(line: str) -> list[str]:
    """The cells of a table line; a line without a pipe has none."""
    cells = [cell.strip() for cell in _PIPE.split(line)]
    if len(cells) == 1:
        return []
    return cells[not cells[0] and line.startswith("|") : -1 if line.endswith("|") else None]


def _json_object(text: str, keys: Mapping[str, str]) -> bool:
    """Whether the reply is a JSON object with exactly these keys and kinds of values."""
    _refuse_unknown(*keys.values())
    value = _json(text)
    if not isinstance(value, dict) or value.keys() != keys.keys():
        return False
    return all(_is_kind(value[key], kind) for key, kind in keys.items())


def _json_list(text: str, count: int, of: str = "string") -> bool:
    """Whether the reply is a JSON list of `count` values of one kind."""
    _refuse_unknown(of)
    value = _json(text)
    return isinstance(value, list) and len(value) == count and all(_is_kind(v, of) for v in value)


def _json_value(text: str, value: Any) -> bool:
    """Whether the reply is this JSON value, with keys in any order; `1.0` is not `1`."""
    written = _json(text)
    return written is not None and _spelled(written) == _spelled(value)


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _json_begins(text: str, value: str) -> bool:
    """Whether the reply is a JSON list whose first value is this word, ignoring case."""
    written = _json(text)
    first = written[0] if isinstance(written, list) and written else None
    return isinstance(first, str) and first.strip().lower() == value.lower()


# --- applying checks ------------------------------------------------------------------------------

KINDS: Mapping[str, Callable[..., bool]] = {
    "words": lambda text, least=1, most=None: _within(len(_words(text)), least, most),
    "sentences": lambda text, least=1, most=None: _within(len(_sentences(text)), least, most),
    "lines": lambda text, least=1, most=None: _within(len(_lines(text)), least, most),
    "paragraphs": lambda text, count: _paragraphs(text) == count,
    "characters": lambda text, most: 0 < len(text) <= most,
    "words_a_line": lambda text, count: _every(
        _lines(text), lambda line: len(_words(line)) == count
    ),
    "words_a_sentence": lambda text, most: _every(
        _sentences(text), lambda sentence: len(_words(sentence)) <= most
    ),
    "upper": lambda text: text.isupper(),
    "lower": lambda text: text.islower(),
    "capitals": lambda text: _every(
        _cased_words(text), lambda word: word[0].isupper() or word[0].isdigit()
    ),
    "without_characters": lambda text, characters: (
        bool(text) and not set(characters.lower()) & set(text.lower())
    ),
    "begin_with": lambda text, letter: _every(
        _cased_words(text), lambda word: word.lower().startswith(letter.lower())
    ),
    "spells": _spells,
    "contains": _contains,
    "without": _without,
    "times": lambda text, word, count: _count_of(text, word) == count,
    "marks": lambda text, mark, count: text.count(mark) == count,
    "no_word_twice": _no_word_twice,
    "starts": _starts,
    "ends": lambda text, words: text.endswith(words),
    "bullets": _bullets,
    "numbered": _numbered,
    "last_line": lambda text, words: _lines(text)[-1:] == [words],
    "lines_end": lambda text, mark: _every(_lines(text), lambda line: line.endswith(mark)),
    "in_order": _in_order,
    "title": _title,
    "quoted": _quoted,
    "table": _table,
    "json_object": _json_object,
    "json_list": _json_list,
    "json_value": _json_value,
    "json_begins": _json_begins,
}
"""Kind of a check → its function."""


def unmet(checks: Sequence[Mapping[str, Any]], text: str) -> list[str]:
    """The kinds of the checks that a reply fails, in order."""
    reply = text.strip()
    if len(reply) > LONGEST:
        return [check["kind"] for check in checks]
    return [check["kind"] for check in checks if not _meets(check, reply)]


def _meets(check: Mapping[str, Any], reply: str) -> bool:
    arguments = {name: value for name, value in check.items() if name != "kind"}
    return KINDS[check["kind"]](reply, **arguments)


def refuse_unreadable(checks: Any) -> None:
    """DataError unless `checks` is a list of known checks with valid arguments."""
    listed = isinstance(checks, list | tuple) and bool(checks)
    broken = [check for check in checks if not _is_check(check)] if listed else [checks]
    if broken:
        raise RowError(
            f"A row's checks cannot be used: {json.dumps(broken[0], default=str)[:120]}.",
            'A check looks like {"kind": "words", "least": 5, "most": 9}; '
            f"kinds: {', '.join(KINDS)}.",
        )


def _is_check(check: Any) -> bool:
    kind = check.get("kind") if isinstance(check, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return False
    arguments = {name: value for name, value in check.items() if name != "kind"}
    try:
        inspect.signature(KINDS[kind]).bind("", **arguments)
        _meets(check, "a word")  # raises for arguments of the wrong type
    except (TypeError, ValueError, AttributeError):
        return False
    return True


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "list": (list,),
    "object": (dict,), "boolean": (bool,),
}  # fmt: skip
"""Kind of a JSON value → its Python types."""


def _refuse_unknown(*kinds: str) -> None:
    for kind in kinds:
        if kind.removeprefix("list of ").removesuffix("s") not in _TYPES:
            raise ValueError(f"'{kind}' is not a kind of JSON value")


def _is_kind(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a kind; an empty string is of none."""
    if kind.startswith("list of "):
        return isinstance(value, list) and _all_of(value, kind.removeprefix("list of "))
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind]) and value != ""


def _all_of(values: Sequence[Any], kinds: str) -> bool:
    """Whether there are values, all of the kind that a plural names (`strings`)."""
    return bool(values) and all(_is_kind(value, kinds.removesuffix("s")) for value in values)


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is invalid or has a duplicate key."""
    try:
        return parse_json(_unfenced(text))
    except ParseError:
        return None


def _unfenced(text: str) -> str:
    every = text.splitlines()
    if len(every) > 2 and every[0].startswith("```") and every[-1].strip() == "```":
        return "\n".join(every[1:-1])
    return text
