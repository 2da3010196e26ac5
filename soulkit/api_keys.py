"""The API keys that this process has read, and their removal from texts that servers send."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

MASK = "[key]"
SHORTEST = 4
"""Minimum length of a key. Shorter values are placeholders such as "x"; masking them would garble
texts."""
PLACEHOLDERS = frozenset(("none", "null", "true", "false", "empty", "test", "dummy", "fake",
                          "token", "local", "ollama", "vllm", "default", "unused"))  # fmt: skip
"""Words that local servers take as a key. They are not masked."""
_SHORT = 8
"""A shorter key is masked in its own case only, and if it is a word or number, where it stands
alone."""
_WORD = 20
"""A key without a digit that is shorter counts as a word."""
_PART = 12
"""Minimum length of a part of a key."""
_ROUNDS = 3
"""Depth of escapes within escapes."""
_SPACE = bytes(b for b in range(256) if not 0x21 <= b <= 0x7E)
"""Characters that no key contains: white space, controls and non-ASCII."""
_ESCAPE = re.compile(
    # A run of backslashes is taken whole, from its first one, or long runs would take long.
    r"(?<!\\)\\++(?:(?:u00|x)(?P<json>[0-9a-f]{2})|[nrt]|(?P<sign>[^\w\s]))"
    r"|%(?P<percent>[0-9a-f]{2})"
    r"|(?P<html>&(?:\#x?[0-9a-f]{1,8}|[a-z]{2,8});?)",
    re.IGNORECASE,
)
_CODE = re.compile(r"\\(?:u00|x)[0-9a-f]|%[0-9a-f]{2}|&[\#a-z]", re.IGNORECASE)
"""Escapes of letters and digits; JSON's white space escapes are too common to count."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_remembered: dict[str, None] = {}

Spelled = tuple[str, list[tuple[int, int]]]
"""The unescaped characters of a text, and where each begins and ends."""


def remember(key: str) -> None:
    """Mask `key` from now on in all texts from servers."""
    if len(key) >= SHORTEST and key.casefold() not in PLACEHOLDERS:
        _remembered[key] = None


def holds_key(text: str) -> bool:
    """Whether `text` contains a remembered key in any notation."""
    words, needles = _sought(tuple(_remembered))
    return bool((needles and _hides(text, needles)) or (words and _says(text, words)))


def masked(text: str) -> str:
    """`text` with masked keys. If a key cannot be separated from its surroundings, the result is
    only a mask."""
    if not holds_key(text):
        return text
    for escapes in (True, False):
        text = _cut(text, _spans(_spelled(text, escapes)))
    return MASK if holds_key(text) else text


def masked_json(raw: str) -> str:
    """A JSON text unchanged, or rewritten with masked strings if it contains a key.

    Text that is not JSON is masked like any other text.
    """
    if not holds_key(raw):
        return raw
    try:
        return json.dumps(_without(json.loads(raw)))
    except (ValueError, RecursionError):
        return masked(raw)


def printable(text: str) -> str:
    """`text` without keys and without users and passwords in addresses."""
    return _CREDENTIALS.sub(f"{MASK}@", masked(text))


def shown_address(url: str) -> str:
    """An address (or the text given as one) without user, password, query and fragment."""
    return printable(url.rpartition("@")[2].partition("?")[0].partition("#")[0])


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [_without(one) for one in value]
    if isinstance(value, dict):
        return {masked(name): _without(one) for name, one in value.items()}
    return value


# -- what is looked for ----------------------------------------------------------------------------


@cache
def _sought(keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The `keys` that are words, and the patterns that reveal the others."""
    words = [key for key in keys if _is_word(key)]
    return words, [needle for key in keys if not _is_word(key) for needle in _needles(key)]


@cache
def _is_word(key: str) -> bool:
    return len(key) < (_SHORT if any(character.isdigit() for character in key) else _WORD)


@cache
def _word(key: str) -> re.Pattern[str]:
    """The places of a key that is a word. A short one must stand alone, or follow an escape."""
    cases = (key.lower(), key.upper(), key.capitalize())
    common = key.isdigit() or (key.isalpha() and key in cases)
    alone = r"(?:(?<![^\W_])|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{4})|(?<=\[\d\dm))%s(?![^\W_]|\.\d)"
    return re.compile((alone if common and len(key) < _SHORT else "%s") % re.escape(key))


@cache
def _needles(key: str) -> tuple[str, ...]:
    """The texts that reveal `key`, in lower case: itself, its halves, and other notations."""
    half = max(_PART, (len(key) + 1) // 2)
    halves = (key[:half], key[-half:]) if half < len(key) else (key,)
    written = (*halves, key.encode().hex(), *_base64(key))
    return tuple(dict.fromkeys(text.lower() for text in written))


def _base64(key: str) -> Iterator[str]:
    for before in range(3):
        data = bytes(before) + key.encode()
        begin, end = -(-8 * before // 6), 8 * len(data) // 6
        for encoded in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
            yield encoded.decode()[begin:end]


# -- whether it stands there -----------------------------------------------------------------------


def _hides(text: str, needles: list[str]) -> bool:
    bare = _bare(text)
    if _any(needles, bare) or _any(needles, _unbroken(bare)):
        return True
    for _ in range(_ROUNDS):
        if not _CODE.search(bare):
            return False
        before, bare = bare, _bare(_ESCAPE.sub(_unescaped, bare))
        if bare == before or _any(needles, bare):
            return bare != before
    return False


def _says(text: str, words: list[str]) -> bool:
    for _ in range(_ROUNDS):
        if any(_word(word).search(text) for word in words):
            return True
        if not _CODE.search(text):
            return False
        text = _ESCAPE.sub(_unescaped, text)
    return any(_word(word).search(text) is not None for word in words)


def _any(needles: list[str], text: str) -> bool:
    return any(needle in text for needle in needles)


def _bare(text: str) -> str:
    return text.encode("utf-8", "ignore").translate(None, _SPACE).lower().decode("ascii")


def _unbroken(text: str) -> str:
    """`text` without the white space that JSON escapes, and without backslashes."""
    for blank in ("\\n", "\\r", "\\t", "\\"):
        text = text.replace(blank, "")
    return text


def _unescaped(match: re.Match[str]) -> str:
    code = match["json"] or match["percent"]
    if code:
        return chr(int(code, 16))
    if match["html"]:
        import html  # a large table, and hardly ever needed

        return html.unescape(match["html"])
    return match["sign"] or ""


# -- where it stands -------------------------------------------------------------------------------


def _spelled(text: str, escapes: bool) -> Spelled:
    characters: list[str] = []
    places: list[tuple[int, int]] = []
    at = 0
    for match in _ESCAPE.finditer(text) if escapes else ():
        for place in range(at, match.start()):
            characters.append(text[place])
            places.append((place, place + 1))
        for character in _unescaped(match):
            characters.append(character)
            places.append(match.span())
        at = match.end()
    characters += text[at:]
    places += ((place, place + 1) for place in range(at, len(text)))
    return "".join(characters), places


def _folded(spelled: Spelled) -> Spelled:
    """The same in lower case, without characters that no key contains."""
    pairs = zip(*spelled, strict=True)
    letters = [(c.lower(), place) for c, place in pairs if "\x21" <= c <= "\x7e"]
    return "".join(c for c, _ in letters), [place for _, place in letters]


def _spans(spelled: Spelled) -> list[tuple[int, int]]:
    """Start and end of all parts of keys in a text, in order."""
    folded, spans = _folded(spelled), []
    for key in _remembered:
        letters, places = spelled if _is_word(key) else folded
        whole = key if _is_word(key) else key.lower()
        for needle in (key,) if _is_word(key) else _needles(key):
            at = letters.find(needle)
            while at >= 0:
                first, last = _stretched(letters, at, at + len(needle), whole)
                if not _is_word(key) or _word(key).match(letters, at):
                    spans.append((places[first][0], places[last - 1][1]))
                at = letters.find(needle, last)
    return sorted(spans)


def _stretched(letters: str, begin: int, end: int, key: str) -> tuple[int, int]:
    """A found part of `key`, extended over the adjacent characters of the key."""
    at = key.find(letters[begin:end])
    before, behind = at, at + end - begin
    while at >= 0 and before > 0 and begin > 0 and letters[begin - 1] == key[before - 1]:
        begin, before = begin - 1, before - 1
    while at >= 0 and behind < len(key) and end < len(letters) and letters[end] == key[behind]:
        end, behind = end + 1, behind + 1
    return begin, end


def _cut(text: str, spans: list[tuple[int, int]]) -> str:
    pieces, at = [], 0
    for begin, end in spans:
        if begin >= at:
            pieces += [text[at:begin], MASK]
        at = max(at, end)
    return "".join([*pieces, text[at:]])
