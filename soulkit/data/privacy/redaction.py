"""`soul data redact`: replaces private data in conversations by pseudonyms of the same form.

    row ──find──▶ originals ──draw (random key, never stored)──▶ pseudonyms ──▶ safe row

One original has one pseudonym in the whole file, which is never an original of the file and never a
valid number, machine or account. All strings of a row are covered. Names are those of the speakers
of a conversation, the words that a spaCy model finds, and those that a person adds to the sheet.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.exports.datasets import COLUMNS, KEYS, PEOPLE, ROLES, SPEAKERS, WORDS, person_in
from soulkit.data.files import BadRow, check_target, read_text, refuse_same, write_lines
from soulkit.data.privacy.finders import DOCUMENTATION, REGIONS, find_private
from soulkit.errors import ConfigError, DataError, MissingPackage
from soulkit.parse import PATTERN_ERRORS, json_or_none
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import write_secret
from soulkit.text import one_line

KEEP, REPLACE = "keep", "replace"
SHEET = ("decision", "kind", "text", "count", "context")
_DRAWS = 60
_COMMON = re.compile(
    "will|mark|may|rose|grace|hope|joy|art|bill|jack|pat|sue|rob|drew|june|april|august|summer|"
    "dawn|faith|max|guy|the|and|you|angel", re.IGNORECASE,
)  # fmt: skip
"""Names that are also words: only replaced with a capital letter."""
_ALPHABETS = {
    "LATIN": ("bdfgklmnprstv", "aeiou"), "CYRILLIC": ("бвгдзклмнпрст", "аеиоу"),
    "GREEK": ("βγδζκλμνπρστ", "αεηιο"), "ARABIC": ("بتجدرزسفكلمن", "اوي"),
    "HEBREW": ("בגדזלמנקרשת", "אוי"), "HANGUL": ("가나다라마바사아자하도미수진",) * 2,
    "CJK": ("安伯成德方高和江林明平石文新永",) * 2, "KATAKANA": ("アカサタナマヤラキシミリ",) * 2,
    "HIRAGANA": ("あかさたなまやらきしみり",) * 2, "DEVANAGARI": ("कगजतदनपमरलस", "ािीुे"),
}  # fmt: skip
"""Script → consonants and vowels of made names."""


class Pseudonyms:
    """The pseudonym of each original, drawn at random."""

    def __init__(self, originals: set[str], regions: Sequence[str]) -> None:
        self.map: dict[tuple[str, str], str] = {}
        self._taken = {one.casefold() for one in originals}
        self._regions, self._rng = regions, random.SystemRandom()

    def of(self, kind: str, original: str) -> str:
        """The pseudonym of an original, always the same."""
        key = (kind, _folded(original) if kind in ("name", "word") else original)
        if key not in self.map:
            for draw in range(_DRAWS):
                made = self._draw(kind, original, odd=draw > _DRAWS // 4)
                if kind in ("name", "place") or not self._unfit(made):
                    break
            while kind not in ("name", "place") and made.casefold() in self._taken:
                made += self._rng.choice("23456789")  # all ids of a short form are in use
            self._taken.add(made.casefold())
            self.map[key] = made
        made = self.map[key]
        return _in_case(made, original) if kind in ("name", "word") else made

    def _unfit(self, made: str) -> bool:
        return made.casefold() in self._taken or bool(find_private(made, None, self._regions))

    def _draw(self, kind: str, text: str, odd: bool) -> str:
        """One draw; `odd` numbers begin as valid ones seldom do."""
        rng = self._rng
        if kind == "word":
            return self._word(text)
        if kind in ("name", "place"):
            return self._digits(_WORD.sub(lambda m: self.of("word", m[0]), text))
        if kind == "email":
            local = re.sub(r"[^\W\d_]+", lambda m: self._word(m[0]), text.rpartition("@")[0])
            return f"{self._digits(local)}@example.{rng.choice(['org', 'net'])}"
        if kind == "ip" and "." in text:
            return rng.choice(DOCUMENTATION[:3]) + str(rng.randrange(1, 255))
        if kind == "ip":
            return f"{DOCUMENTATION[3]}:{rng.randrange(16, 16**4):x}:{rng.randrange(16, 16**4):x}"
        if kind == "mac":
            rest = re.sub(r"[\da-fA-F]", lambda _: rng.choice("0123456789abcdef"), text[8:])
            return f"00{text[2]}00{text[2]}5e{rest}"
        if kind == "url":
            scheme, _, rest = text.partition("://")
            path = re.search(r"[/?].*|$", rest, re.DOTALL)
            return f"{scheme}://www.example.org{self._scrambled(path[0] if path else '')}"
        start = _kept(kind, text)
        made = self._scrambled(text, start)
        if kind == "key":
            return f"{made[: max(start, len(made) - 7)]}EXAMPLE"
        first = iter(rng.choice(("00", "99", "90", "09", "00000")) if odd else "")
        return made[:start] + re.sub(r"\d", lambda m: next(first, m[0]), made[start:])

    def _digits(self, text: str) -> str:
        return re.sub(r"\d", lambda _: self._rng.choice("0123456789"), text)

    def _scrambled(self, text: str, start: int = 0) -> str:
        """The same form: a letter for a letter, a digit for a digit, after the first `start`."""
        made = re.sub(
            r"[a-z]", lambda _: self._rng.choice("abcdefghijkmnopqrstuvwxyz"), text[start:]
        )
        made = re.sub(r"[A-Z]", lambda _: self._rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ"), made)
        return text[:start] + self._digits(made)

    def _word(self, word: str) -> str:
        script = unicodedata.name(word[0], "LATIN").partition(" ")[0].partition("-")[0]
        letters = _ALPHABETS.get(script, _ALPHABETS["LATIN"])
        dense = letters[0] == letters[1]
        length = len(word) if dense else max(4, len(word) + self._rng.randrange(-1, 2))
        made = "".join(self._rng.choice(letters[place % 2]) for place in range(length))
        return made if dense else _in_case(made, word)


_WORD = re.compile(r"[^\W\d_]{2,}")


def _in_case(made: str, original: str) -> str:
    if original.isupper() and len(original) > 1:
        return made.upper()
    if original.islower():
        return made.lower()
    return re.sub(r"[^\W\d_]+", lambda m: m[0].capitalize(), made)


def _kept(kind: str, text: str) -> int:
    """Characters at the beginning that stay: the country of a number, the provider of a key."""
    if kind == "phone" and (start := re.match(r"\(?(\+|00)", text)):
        from phonenumbers import NumberParseException, parse

        try:
            code = str(parse(f"+{text[start.end() :]}", None).country_code)
        except NumberParseException:
            return start.end()
        digits = [m.start() for m in re.finditer(r"\d", text[start.end() :])]  # of any script
        return start.end() + digits[len(code) - 1] + 1
    start = re.match(_KEPT.get(kind, ""), text)
    return start.end() if start else 0


_KEPT = {"key": r"(?:[a-zA-Z]{2,6}[-_](?:[a-z]+[-_])?)?", "iban": "..", "card": ".", "phone": "0?"}
"""Kind → what stays at the beginning."""


# -- finding ---------------------------------------------------------------------------------------


@dataclass
class Redaction:
    """Options and results of one command."""

    patterns: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    regions: Sequence[str] = REGIONS
    model: str = ""
    """The spaCy model that finds names and places; empty: none."""
    keep: set[str] = field(default_factory=set)
    add: dict[str, str] = field(default_factory=dict)
    """What a person decided in the sheet: texts to leave, and text → kind to add."""
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, original) → how often."""
    contexts: dict[tuple[str, str], str] = field(default_factory=dict)
    bad: list[BadRow] = field(default_factory=list)
    rows: int = 0
    changed: int = 0
    speakers: Counter[str] = field(default_factory=Counter)
    """New name of a speaker → number of messages."""

    @property
    def counts(self) -> dict[str, int]:
        """Kind → number of private items, the most frequent first."""
        kinds = Counter[str]()
        for (kind, _), count in self.found.items():
            kinds[kind] += 0 if kind.startswith("row ") else count
        return {kind: count for kind, count in kinds.most_common() if count}

    @property
    def samples(self) -> dict[str, str]:
        """Kind → the longest context of one, without private items."""
        shown = dict.fromkeys(self.counts, "")
        for (kind, _), context in self.contexts.items():
            if kind in shown:
                shown[kind] = max(shown[kind], context, key=len)
        return shown

    @cached_property
    def _entities(self) -> Callable[[str], Any] | None:
        if not self.model:
            return None
        try:
            import spacy

            return spacy.load(self.model)
        except ModuleNotFoundError as error:
            raise MissingPackage.of(error, "--names") or error from None
        except OSError as error:
            raise DataError(
                f"The spaCy model '{self.model}' is not installed.",
                "--names finds names and places with it.",
                f"Install it with: python -m spacy download {self.model}",
            ) from error

    @cached_property
    def _added(self) -> NameTree:
        return name_tree(self.add)

    def _spans(self, text: str, names: NameTree) -> list[tuple[int, int, str]]:
        """Start, end and kind of everything to replace in a text, in order."""
        spans = [(one.start, one.end, one.kind)
                 for one in find_private(text, self.patterns, self.regions)]  # fmt: skip
        for start, end in [*named_in(text, names), *named_in(text, self._added)]:
            spans.append((start, end, self.add.get(_folded(text[start:end]), "name")))
        for entity in self._entities(text).ents if self._entities else ():
            if kind := _ENTITIES.get(entity.label_):
                spans.append((entity.start_char, entity.end_char, kind))
        kept, end = [], 0
        for span in sorted(spans, key=lambda one: (one[0], -one[1])):
            if span[0] >= end and text[span[0] : span[1]] not in self.keep:
                kept.append(span)
                end = span[1]
        return kept

    def walk(self, row: Any, change: Callable[[str, str, str], str]) -> Any:
        """The row with `change(kind, original, context)` in place of every private item."""
        names = name_tree(_names(row), _PARTS)

        def text(value: str) -> str:
            if value[:1] in ("{", "[") and isinstance(inner := json_or_none(value), dict | list):
                new = walk(inner)
                halves = "\\ud" in value.lower()  # of a surrogate pair, perhaps without the other
                return value if new == inner else json.dumps(new, ensure_ascii=halves)
            if not (spans := self._spans(value, names)):
                return value
            masked = _joined(value, spans, lambda kind, _: f"[{kind}]")
            return _joined(value, spans, lambda kind, original: change(kind, original, masked))

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return text(value)
            if isinstance(value, list | tuple):
                return [walk(one) for one in value]
            if not isinstance(value, Mapping):
                return value
            new = {text(key) if isinstance(key, str) else key: walk(one)
                   for key, one in value.items()}  # fmt: skip
            if "token_ids" in new and new != value:
                del new["token_ids"]
            return new

        ids = {key: str(row[key]) for key in (*KEYS, *PEOPLE) if row.get(key)}
        rest = {key: value for key, value in row.items() if key not in ids}
        made = {key: change("name" if _is_name(one) else f"row {key}", one, f"[{key}]")
                for key, one in ids.items()}  # fmt: skip
        return {**made, **walk(rest)}


_ENTITIES = {"PERSON": "name", "PER": "name", "GPE": "place", "LOC": "place"}


def _joined(
    text: str, spans: Sequence[tuple[int, int, str]], change: Callable[[str, str], str]
) -> str:
    pieces, at = [], 0
    for start, end, kind in spans:
        pieces += [text[at:start], change(kind, text[start:end])]
        at = end
    return "".join([*pieces, text[at:]])


def _is_name(text: str) -> bool:
    return all(map(_WORD.fullmatch, text.split()))


def _names(value: Any) -> Iterator[str]:
    """The people of a row and the words of their names; roles and tools are none."""
    if isinstance(value, Mapping):
        words = [str(value[key]).strip() for key in SPEAKERS if isinstance(value.get(key), str)]
        roles = {ROLES.get(word.lower(), "") for word in words}
        spoken = any(key in value for key in WORDS) and not roles & {"tool", "call", "system"}
        people = [*(words if spoken else ()), *filter(_is_name, [person_in(value)])]
        for name in people:
            if name.lower() not in ROLES and len(name) > 1:
                yield name
                yield from (w for w in _WORD.findall(name) if len(w) > 2 or not w.isascii())
        value = list(value.values())
    for one in value if isinstance(value, list | tuple) else ():
        yield from _names(one)


def _speakers(row: Mapping[str, Any]) -> Iterator[str]:
    """Who says each message of a conversation between people."""
    lists = (row[name] for name in COLUMNS if isinstance(row.get(name), list))
    for item in filter(lambda one: isinstance(one, Mapping), next(lists, ())):
        words = [item[key] for key in SPEAKERS if isinstance(item.get(key), str)]
        if words and not any(word.lower() in ROLES for word in words):
            yield words[0]


NameTree = dict[str | None, Any]
"""First word of a name → the words that may follow. The key "" ends a name; its value is the only
spelling of a name that is also a word, else empty. None has beginnings of words that end a name."""
_PART = re.compile(r"[\u2e80-\U0010ffff]|[^\W\u2e80-\U0010ffff]+|\W")
"""Scripts from U+2E80 on have no spaces between words."""
_PARTS = 100
"""Parts of a speaker's name that are looked for: words, and the signs between them."""


def name_tree(words: Iterable[str], most: int | None = None) -> NameTree:
    """The names to look for, without regard to capital letters; of each the first `most` parts."""
    names: NameTree = {}
    for word in words:
        node, parts = names, _PART.findall(word)[:most]
        for part in parts[:-1]:
            node = node.setdefault(_folded(part), {})
        for last in parts[-1:]:
            if word[0] >= "\u2e80" > last:  # what follows the name may be written together with it
                node.setdefault(None, []).append((_folded(last), len(last)))
            node = node.setdefault(_folded(last), {})
            node[""] = word.capitalize() if _COMMON.fullmatch(word) else ""
    return names


def named_in(text: str, names: NameTree) -> Iterator[tuple[int, int]]:
    """Start and end of the names in a text, the longest at each place."""
    parts = [*_PART.finditer(text)] if names else []
    at = 0
    while at < len(parts):
        node, next_at, end = names, at + 1, 0
        for place in range(at, len(parts)):
            part = _folded(parts[place][0])
            for start, length in node.get(None, ()):
                if part.startswith(start) and parts[place].start() + length > end:
                    next_at, end = place + 1, parts[place].start() + length
            node = node.get(part, {})
            if not node:
                break
            if node.get("") in ("", parts[place][0]):
                next_at, end = place + 1, parts[place].end()
        if end:
            yield parts[at].start(), end
        at = next_at


def _folded(text: str) -> str:
    """For comparisons without regard to capital letters, also of the Turkish i."""
    return text.translate({0x130: "i", 0x131: "i"}).casefold()


# -- the command -----------------------------------------------------------------------------------


def redact_chats(
    path: str, output: Path, redaction: Redaction, *, review: Path | None = None,
    key: Path | None = None, reporter: Reporter = SILENT,
) -> bool:  # fmt: skip
    """Write the redacted rows of `path` and, with `key`, the map of pseudonyms; True if done. With
    a new `review` file only that sheet is written; a corrected one is applied."""
    check_target(output, (".jsonl",))
    refuse_same(Path(path), output)
    if key is not None and (key.exists() or key.resolve() == output.resolve()):
        raise DataError(
            f"The map '{key}' cannot be written.",
            "The file exists, or is also the output. An older map may be the only copy.",
            "Choose a new file with --map.",
        )
    if review is not None and review.exists():
        _read_sheet(review, redaction)

    def note(kind: str, original: str, context: str) -> str:
        redaction.found[kind, original] += 1
        at = context.find(f"[{kind}]")
        window = one_line(context[max(at - 20, 0) : at + 40])
        redaction.contexts[kind, original] = max(
            redaction.contexts.get((kind, original), ""), window, key=len
        )
        return original

    for row in _rows(path, redaction, reporter, "finding"):
        redaction.rows += 1
        before = redaction.found.total()
        redaction.walk(row, note)
        redaction.changed += redaction.found.total() > before
    if review is not None and not review.exists():
        write_secret(review, _sheet(redaction))
        return False
    originals = {original for _, original in redaction.found}
    words = {word for one in originals for word in _WORD.findall(one)}
    pseudonyms = Pseudonyms(originals | words, redaction.regions)
    redaction.bad.clear()

    def safe_rows() -> Iterator[Any]:
        for row in _rows(path, redaction, reporter, "replacing"):
            safe = redaction.walk(row, lambda kind, original, _: pseudonyms.of(kind, original))
            redaction.speakers.update(_speakers(safe))
            yield safe

    write_lines(output, safe_rows())
    if key is not None:
        lines = [json.dumps({"kind": kind, "original": one, "pseudonym": made}, ensure_ascii=False)
                 for (kind, one), made in pseudonyms.map.items()]  # fmt: skip
        write_secret(key, "\n".join([*lines, ""]))
    return True


def compiled(patterns: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Kind → pattern, from texts such as `customer=KD-[0-9]+`."""
    own = {}
    for text in patterns:
        kind, equals, pattern = text.partition("=")
        try:
            own[kind] = re.compile(pattern)
            usable = bool(kind and equals) and not own[kind].match("")
        except PATTERN_ERRORS:
            usable = False
        if not usable:
            raise ConfigError(
                f"--pattern '{one_line(text, 80)}' cannot be used.",
                "It needs a name, = and a regular expression that matches some text.",
                "Write for example --pattern 'customer=KD-[0-9]{6}'.",
            )
    return own


def _rows(path: str, redaction: Redaction, reporter: Reporter, what: str) -> Iterator[Any]:
    with reporter.progress(redaction.rows or None) as bar:
        for _, row in source_rows(path):
            bar.advance(note=what)
            if isinstance(row, BadRow):
                redaction.bad.append(row)
            elif isinstance(row, Mapping):
                yield row


def _sheet(redaction: Redaction) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(SHEET)
    for (kind, original), count in redaction.found.most_common():
        if not kind.startswith("row "):
            context = one_line(redaction.contexts[kind, original], 200)
            writer.writerow([REPLACE, kind, original, count, context])
    return file.getvalue()


def _read_sheet(path: Path, redaction: Redaction) -> None:
    """Take the decisions of a sheet; rows without a count were added by a person."""
    csv.field_size_limit(2**31 - 1)
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except csv.Error as error:
        raise DataError(
            f"The sheet '{path}' cannot be read.", f"It is not a valid CSV file: {error}.",
            "Save it as CSV, or delete it: the same command writes a new one.",
        ) from error  # fmt: skip
    for number, row in enumerate(rows, 2):
        decision, text = (row.get("decision") or "").strip().lower(), row.get("text") or ""
        if decision not in (KEEP, REPLACE) or not text:
            raise DataError(
                f"{path}:{number} has the decision '{one_line(decision, 40)}' for "
                f"'{one_line(text, 40)}'.",
                f"Each row of a sheet needs a text and one of {KEEP}, {REPLACE}.",
                "Correct the row; to add a text, leave its count empty.",
            )
        if decision == KEEP:
            redaction.keep.add(text)
        elif not (row.get("count") or "").strip():
            redaction.add[_folded(text)] = (row.get("kind") or "name").strip()
