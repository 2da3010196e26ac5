"""Decode disguised text into what a human reader sees.

    folded(text)      removes invisible characters, replaces look-alikes by the letters they imitate
    respelled(text)   joins letters written one by one (`b-l-u-e`) into words
    spelled_names     options written joined, split, letter by letter, with digits for letters, or
                      backwards
    places_named      options named by position: "the second option", "option two"
    letters_named     letters that are spoken or described: "option bravo", "the one after A"

Only the form is decoded, not the meaning: translations, synonyms, descriptions, riddles, acrostics,
rhymes and codes (base64, rot13, Morse) are not detected.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from soulkit.text import normalised

# -- signs ---------------------------------------------------------------------------------------

_DIACRITICS = re.compile("[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+")
"""Marks on Latin, Greek and Cyrillic letters. Marks of other scripts are vowels and are kept."""
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,80}>")
_LETTER_LIKE = {
    # Cyrillic
    "А": "A", "В": "B", "С": "C", "Е": "E", "Н": "H", "І": "I", "Ј": "J", "К": "K", "М": "M",
    "О": "O", "Р": "P", "Ѕ": "S", "Т": "T", "У": "Y", "Х": "X", "Ԍ": "G", "Ԛ": "Q", "Ԝ": "W",
    "а": "a", "в": "b", "с": "c", "ԁ": "d", "е": "e", "һ": "h", "н": "h", "і": "i", "ј": "j",
    "к": "k", "м": "m", "о": "o", "р": "p", "ԛ": "q", "ѕ": "s", "т": "t", "у": "y", "х": "x",
    "ԝ": "w", "ѵ": "v", "ӏ": "l", "Ӏ": "I",
    # Greek
    "Α": "A", "Β": "B", "Ε": "E", "Ζ": "Z", "Η": "H", "Ι": "I", "Κ": "K", "Μ": "M", "Ν": "N",
    "Ο": "O", "Ρ": "P", "Τ": "T", "Υ": "Y", "Χ": "X", "α": "a", "β": "b", "ε": "e", "ι": "i",
    "κ": "k", "ν": "v", "ο": "o", "ρ": "p", "τ": "t", "υ": "u", "χ": "x", "γ": "y", "ω": "w",
    # Armenian
    "օ": "o", "ո": "n", "ս": "u", "հ": "h", "ց": "g",
    # Latin letters in another shape
    "ɑ": "a", "ɡ": "g", "ı": "i", "ȷ": "j", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d",
    "Đ": "D", "ħ": "h", "ŧ": "t", "ƀ": "b", "ɨ": "i", "ǀ": "l", "æ": "ae", "Æ": "AE", "œ": "oe",
    "ᴀ": "a", "ʙ": "b", "ᴄ": "c", "ᴅ": "d", "ᴇ": "e", "ꜰ": "f", "ɢ": "g", "ʜ": "h", "ɪ": "i",
    "ᴊ": "j", "ᴋ": "k", "ʟ": "l", "ᴍ": "m", "ɴ": "n", "ᴏ": "o", "ᴘ": "p", "ʀ": "r", "ꜱ": "s",
    "ᴛ": "t", "ᴜ": "u", "ᴠ": "v", "ᴡ": "w", "ʏ": "y", "ᴢ": "z",
}  # fmt: skip
"""A selection of the most common Unicode confusables of Latin letters (UTS 39)."""
_LOOKS = str.maketrans(_LETTER_LIKE)
_DIGIT_LETTERS = str.maketrans("013457@$|i", "oleastasll")
"""Digits and signs used as letters. 1 can be l or i, so both become l."""


def folded(text: str) -> str:
    """`text` without invisible characters and accents, with look-alikes replaced by letters.

    Look-alikes of other scripts are replaced only in texts that are mostly Latin.
    """
    if text.isascii() and "&" not in text and "<" not in text:
        return text
    text = _TAG.sub("", html.unescape(text)).translate(_signs())
    text = unicodedata.normalize("NFKD", normalised(_DIACRITICS.sub("", text)))
    text = unicodedata.normalize("NFC", _DIACRITICS.sub("", text))
    return text.translate(_LOOKS) if _mostly_latin(text) else text


@cache
def _signs() -> Mapping[int, str | None]:
    """Invisible characters → None; letters in boxes, circles, flags and tags → plain letters."""
    signs: dict[int, str | None] = {
        code: None for code in range(0x10000) if unicodedata.category(chr(code)) == "Cf"
    }
    for first, last in ((0x34F, 0x34F), (0x115F, 0x1160), (0x180B, 0x180F), (0x3164, 0x3164),
                        (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xE0000, 0xE01EF)):  # fmt: skip
        signs |= dict.fromkeys(range(first, last + 1))
    for start in (0x1F150, 0x1F170, 0x1F1E6):
        signs |= {start + i: chr(ord("A") + i) for i in range(26)}
    return signs | {0xE0000 + code: chr(code) for code in range(0x20, 0x7F)}


def _mostly_latin(text: str) -> bool:
    latin = sum(c < "\u0250" for c in text if c.isalpha())
    return 2 * latin >= sum(c.isalpha() for c in text)


# -- spelling ------------------------------------------------------------------------------------

_WORD = re.compile(r"[^\W_]+")
_ONE_BY_ONE = re.compile(r"(?<![^\W_])[^\W\d_](?:[\W_]{1,3}[^\W\d_](?![^\W_])){2,}")
_BETWEEN = re.compile(r"[\W_]+")
WHOLE = 5
"""Minimum length of a name that may be split or joined anywhere. Shorter names match only letter by
letter: `b o x` is `box`, but `so me` is not `some`."""
SPELLED = 3


def respelled(text: str) -> str:
    """`text` with letters written one by one joined into words: `b-l-u-e`, `b l u e`, `b.l.u.e`."""
    return _ONE_BY_ONE.sub(lambda run: _BETWEEN.sub("", run[0]), text)


def spelled_names(text: str, names: Collection[str]) -> frozenset[str]:
    """The `names` that `text` contains when spaces and punctuation are ignored.

    A name must start and end at word boundaries, or start after "the". Longer names are matched
    first and their letters are then used up, as in `named_options`.
    """
    readings = [text.casefold()]
    if any(c in "013457@$|" for c in text):
        readings.append(readings[0].translate(_DIGIT_LETTERS))
    names_read: set[str] = set()
    for number, reading in enumerate(readings):
        strip = _Letters(reading)
        for name in sorted(names, key=lambda n: (-len(n), n)):
            letters = "".join(_WORD.findall(name.casefold()))
            letters = letters.translate(_DIGIT_LETTERS) if number else letters
            if strip.spend(letters) or strip.spend_backwards(letters):
                names_read.add(name)
    return frozenset(names_read)


class _Letters:
    def __init__(self, text: str) -> None:
        words = _WORD.findall(text)
        self.letters = "".join(words)
        self.edges = {0}
        place = 0
        for word in words:
            place += len(word)
            self.edges.add(place)

    def spend(self, name: str) -> bool:
        """Whether `name` occurs; its occurrences are used up."""
        if len(name) < SPELLED:
            return False
        parts, begin = [], 0
        for place in self._occurrences(name):
            if self._fits(place, place + len(name)):
                parts += [self.letters[begin:place], " " * len(name)]
                begin = place + len(name)
        self.letters = "".join([*parts, self.letters[begin:]])
        return bool(parts)

    def spend_backwards(self, name: str) -> bool:
        return len(name) >= WHOLE and name != name[::-1] and self.spend(name[::-1])

    def _occurrences(self, name: str) -> Iterator[int]:
        place = self.letters.find(name)
        while place >= 0:
            yield place
            place = self.letters.find(name, place + len(name))

    def _fits(self, start: int, end: int) -> bool:
        if end - start < WHOLE:
            return all(place in self.edges for place in range(start, end + 1))
        begins = start in self.edges or self.letters.endswith("the", 0, start)
        plural = any(
            self.letters.startswith(s, end) and end + len(s) in self.edges for s in ("s", "es")
        )
        return begins and (end in self.edges or plural)


# -- places and letters --------------------------------------------------------------------------

CARDINALS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
)  # fmt: skip
_ENDS = {
    "top": 0, "last": -1, "final": -1, "bottom": -1, "penultimate": -2, "next to last": -2,
    "second to last": -2, "second last": -2, "last but one": -2,
}  # fmt: skip
_OF_TWO = {"former": 0, "latter": 1}
_PLACE = "|".join(
    [r"\d{1,2}(?:st|nd|rd|th)", *sorted((*_ENDS, *_OF_TWO, *_ORDINALS, "middle"), key=len)[::-1]]
).replace(" ", r"[\s-]+")
_NUMBER = rf"(?:\d{{1,2}}|{'|'.join(CARDINALS)})"
_OPTION = r"(?:option|choice|alternative|candidate|possibilit(?:y|ie))s?"
_OPTIONS = rf"(?:the\s+|these\s+|those\s+)?(?:{_NUMBER}\s+)?(?:{_OPTION}|answers)"
_AND = r"(?:\s*,\s*(?:and|or|nor)\s+|\s*[,/&]\s*|\s+(?:and|or|nor)\s+)(?:the\s+)?"
_ROW = rf"(?:{_PLACE})(?:{_AND}(?:{_PLACE})){{0,9}}"
_RELATIVE = r"(?!\s+(?:to|who|whom|whose|that|which|where|when|he|she|they|it|you|i|we)\b)"
_BY_PLACE = re.compile(
    rf"(?P<owner>\b(?:your|my|his|her|their|our|its|[\w]+['\u2019]s|(?:only|even|than|besides)\s+the)"
    rf"\s+)?(?P<row>\b{_ROW})\s+"
    rf"(?:(?:listed|possible|answer)\s+)?"
    rf"(?:{_OPTION}\b|(?<!final\s)(?<!first\s)(?<!last\s)(?<!top\s)answer\b|(?P<one>ones?\b){_RELATIVE}|of\s+{_OPTIONS}\b"
    rf"|(?:in|on|from|of)\s+the\s+(?:list|top)\b(?:\s+of\s+{_OPTIONS}\b)?|(?P<up>from\s+the\s+bottom\b))",
    re.IGNORECASE,
)
_THE = re.compile(r"\bthe\s+\Z", re.IGNORECASE)
_BEFORE = 160
_OF_ANOTHER = re.compile(
    r"\b(?:actions?|clues?|drafts?|facts?|friends?|lines?|m[ae]n|messages?|moves?|parts?|people|"
    r"persons?|questions?|rooms?|scenes?|sentences?|speakers?|steps?|stor(?:y|ies)|turns?|"
    r"thoughts?|words?|wom[ae]n)\b[^.!?\n]*\Z",
    re.IGNORECASE,
)
"""Nouns that "the last one" may refer to, if they come before it in the same sentence."""
_ALONE = re.compile(rf"\bthe\s+(former|latter|penultimate)\b(?!\s+[a-z])|^\W*the\s+({_PLACE})\W*$",
                    re.IGNORECASE)  # fmt: skip
_NO_COUNT = (
    r"(?!\s+(?:by|at|of|more|less|or\s+more|other|another|time|thing|word|sentence|minute)s?\b)"
)
_MARK = r"(?:number\b|num\b|no\b|nr\b|#)"
_BY_NUMBER = re.compile(
    rf"\b{_OPTION}\W{{0,3}}(?:is\W{{1,3}})?(?:numbers?\b\W{{0,2}})?"
    rf"(?P<row>{_NUMBER}\b(?:{_AND}{_NUMBER}\b){{1,9}})"
    rf"|\b{_OPTION}(?<!s)\W{{0,3}}(?:is\W{{1,3}})?(?:{_MARK}\W{{0,2}})?(?P<one>{_NUMBER})\b{_NO_COUNT}"
    rf"|\b(?:answer|pick|choose|select|take|with|is|it's)\W{{0,3}}(?:is\W{{1,3}})?"
    rf"(?:number\b|no\.|nr\.|#)\W{{0,2}}(?P<marked>{_NUMBER})\b"
    rf"|(?<!\w)#(?P<bare>\d{{1,2}})\b",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    rf"\b(?P<end>first|top|last|final|bottom)\s+(?P<many>{_NUMBER})\s+"
    rf"(?:listed\s+|possible\s+)?(?:{_OPTION}|answers)\b", re.IGNORECASE,
)  # fmt: skip
_LEAD = r"\b(?:option|answer|letter|choice|choose|pick)\b\W{0,3}(?:is\W{1,3})?"
_SPOKEN = {
    "bee": "B", "cee": "C", "dee": "D", "eff": "F", "gee": "G", "alpha": "A", "alfa": "A",
    "bravo": "B", "charlie": "C", "delta": "D", "echo": "E", "foxtrot": "F", "golf": "G",
    "hotel": "H",
}  # fmt: skip
_BY_NAME = re.compile(rf"{_LEAD}(?P<name>{'|'.join(_SPOKEN)})\b", re.IGNORECASE)
_BESIDE = re.compile(
    r"\b(?i:letter|one|option|answer|choice)\s+(?i:right\s+|just\s+|directly\s+)?"
    r"(?P<side>(?i:after|before|following|preceding))\s+(?i:option\s+|letter\s+)?(?P<letter>[A-Z])\b"
)
_IN_ALPHABET = re.compile(
    rf"\b(?P<place>{_PLACE})\s+letter\s+(?:of|in)\s+the\s+alphabet\b", re.IGNORECASE
)


def places_named(text: str, count: int) -> frozenset[int]:
    """Positions (from 0) among `count` options that `text` names: "the 2nd option", "option two".

    "Your first choice", "the last one who left", "not only the last one" and "the options one by
    one" do not count.
    """
    if count < 2:
        return frozenset()
    places: set[int | None] = set()
    for match in _BY_NUMBER.finditer(text):
        row = re.findall(_NUMBER, match["row"] or match["one"] or match["marked"] or match["bare"],
                         re.IGNORECASE)  # fmt: skip
        places |= {_numbered(word) for word in row}
    for match in _ALONE.finditer(text):
        places.add(_place(match[1] or match[2], count))
    for match in _BY_PLACE.finditer(text):
        before = text[max(0, match.start("row") - _BEFORE) : match.start("row")]
        elsewhere = match["one"] and (not _THE.search(before) or _OF_ANOTHER.search(before))
        if not match["owner"] and not elsewhere:
            words = re.findall(_PLACE, match["row"], re.IGNORECASE)
            inside = {_place(word, count) for word in words}
            places |= {count - 1 - p for p in inside if p is not None} if match["up"] else inside
    for match in _SEVERAL.finditer(text):
        numbers = range(_numbered(match["many"]) + 1)
        last = match["end"].lower() not in ("first", "top")
        places |= {count - 1 - place if last else place for place in numbers}
    return frozenset(p for p in places if p is not None and 0 <= p < count)


def _place(word: str, count: int) -> int | None:
    """The position of an ordinal; None for the middle of an even count, or former/latter of more
    than two."""
    word = " ".join(word.lower().replace("-", " ").split())
    if word[0].isdigit():
        return int(re.sub(r"\D", "", word)) - 1
    if word in _ORDINALS:
        return _ORDINALS.index(word)
    if word in _ENDS:
        return _ENDS[word] if _ENDS[word] >= 0 else count + _ENDS[word]
    if word == "middle":
        return count // 2 if count % 2 else None
    return _OF_TWO[word] if count == 2 else None


def _numbered(word: str) -> int:
    return int(word) - 1 if word.isdigit() else CARDINALS.index(word.lower())


def letters_named(text: str, options: Collection[str]) -> frozenset[str]:
    """Letters that `text` names without writing them: spoken, or described by a neighbouring
    letter.

    A word that is part of an option (a person called Charlie) does not count.
    """
    words = {word for option in options for word in _WORD.findall(option.casefold())}
    spoken = (match["name"].lower() for match in _BY_NAME.finditer(text))
    letters = {_SPOKEN[name] for name in spoken if name not in words}
    for match in _BESIDE.finditer(text):
        step = 1 if match["side"].lower() in ("after", "following") else -1
        letters.add(chr(ord(match["letter"]) + step))
    for match in _IN_ALPHABET.finditer(text):
        letters.add(chr(ord("A") + (_place(match["place"], 26) or 0)))
    return frozenset(letters)
