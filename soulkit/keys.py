"""The keys that this process has read, cut out of what servers and libraries say.

Whoever reads a key tells `remember`; from then on `masked` finds it wherever it comes back: as it
was sent, in other case, broken over lines, escaped as in JSON, HTML or addresses, as base64 or
hexadecimal, and in part (one half of it or more). A server escapes as it likes, so replies are
masked after they were read: `masked_json` for what is kept as JSON, `masked` for single texts.

A text is first looked through as a whole, which takes microseconds; only one that does hold a key
is spelled out character by character, to know what is to be cut.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

MASK = "[key]"
SHORTEST = 8
"""Characters of a key. Shorter values are placeholders such as "x"; masking them would garble."""
_PART = 12
"""Characters of a part of a key at least."""
_ROUNDS = 3
"""Of escapes within escapes."""
_SPACE = bytes(b for b in range(256) if not 0x21 <= b <= 0x7E)
"""What no key has: white space, controls, and whatever is not ASCII."""
_ESCAPE = re.compile(
    # A run of backslashes is taken whole, from its first one, or long runs would take long.
    r"(?<!\\)\\++(?:(?:u00|x)(?P<json>[0-9a-f]{2})|[nrt]|(?P<sign>[^\w\s]))"
    r"|%(?P<percent>[0-9a-f]{2})"
    r"|(?P<html>&(?:\#x?[0-9a-f]{1,8}|[a-z]{2,8});?)",
    re.IGNORECASE,
)
_CODE = re.compile(r"\\(?:u00|x)[0-9a-f]|%[0-9a-f]{2}|&[\#a-z]", re.IGNORECASE)
"""Escapes that stand for a letter or a digit; those of JSON's white space are everywhere."""
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")
_remembered: dict[str, None] = {}

Spelled = tuple[str, list[tuple[int, int]]]
"""Characters that a text spells, in lower case, and where each one begins and ends in it."""


def remember(key: str) -> None:
    """Have `key` masked from now on, in whatever any server says."""
    if len(key) >= SHORTEST:
        _remembered[key] = None


def holds_key(text: str) -> bool:
    """Whether a remembered key stands in `text`, however it is written."""
    needles = [needle for key in _remembered for needle in _needles(key)]
    bare = _bare(text) if needles else ""
    if _any(needles, bare) or _any(needles, _unbroken(bare)):
        return True
    for _ in range(_ROUNDS):
        if not _CODE.search(bare):
            return False
        before, bare = bare, _bare(_ESCAPE.sub(_unescaped, bare))
        if bare == before or _any(needles, bare):
            return bare != before
    return False


def masked(text: str) -> str:
    """`text` without keys; without anything where a key cannot be told from what is around it."""
    if not holds_key(text):
        return text
    for escapes in (True, False):
        text = _cut(text, _spans(_spelled(text, escapes)))
    return MASK if holds_key(text) else text


def masked_json(raw: str) -> str:
    """A JSON text as it came, or written anew with every string masked where it holds a key.

    What is no JSON is masked like any other text.
    """
    if not holds_key(raw):
        return raw
    try:
        return json.dumps(_without(json.loads(raw)))
    except (ValueError, RecursionError):
        return masked(raw)


def shown(text: str) -> str:
    """`text` as it may be printed: without keys, and without users and passwords of addresses."""
    return _CREDENTIALS.sub(f"{MASK}@", masked(text))


def shown_address(url: str) -> str:
    """An address, or what was given for one, without user, password, query and fragment."""
    return shown(url.rpartition("@")[2].partition("?")[0].partition("#")[0])


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
def _needles(key: str) -> tuple[str, ...]:
    """What gives `key` away, in lower case: itself, its halves, and other ways of writing it."""
    half = max(_PART, (len(key) + 1) // 2)
    halves = (key[:half], key[-half:]) if half < len(key) else (key,)
    written = (*halves, key.encode().hex(), *_base64(key))
    return tuple(dict.fromkeys(text.lower() for text in written))


def _base64(key: str) -> Iterator[str]:
    """The characters of base64 that depend on `key` alone, wherever in a longer text it begins."""
    for before in range(3):
        data = bytes(before) + key.encode()
        begin, end = -(-8 * before // 6), 8 * len(data) // 6
        for encoded in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
            yield encoded.decode()[begin:end]


def _any(needles: list[str], text: str) -> bool:
    return any(needle in text for needle in needles)


def _bare(text: str) -> str:
    return text.encode("utf-8", "ignore").translate(None, _SPACE).lower().decode("ascii")


def _unbroken(text: str) -> str:
    """`text` without the white space that JSON escapes, and without backslashes."""
    for blank in ("\\n", "\\r", "\\t", "\\"):
        text = text.replace(blank, "")
    return text


# -- where it stands -------------------------------------------------------------------------------


def _unescaped(match: re.Match[str]) -> str:
    """The character of an escape; none where it stands for white space."""
    code = match["json"] or match["percent"]
    if code:
        return chr(int(code, 16)).lower()
    if match["html"]:
        import html  # a large table, and hardly ever needed

        return html.unescape(match["html"]).lower()
    return match["sign"] or ""


def _spelled(text: str, escapes: bool) -> Spelled:
    letters: list[str] = []
    places: list[tuple[int, int]] = []

    def add(characters: str, begin: int, end: int) -> None:
        for character in characters:
            if "\x21" <= character <= "\x7e":
                letters.append(character.lower())
                places.append((begin, end))

    at = 0
    for match in _ESCAPE.finditer(text) if escapes else ():
        for place in range(at, match.start()):
            add(text[place], place, place + 1)
        add(_unescaped(match), match.start(), match.end())
        at = match.end()
    for place in range(at, len(text)):
        add(text[place], place, place + 1)
    return "".join(letters), places


def _spans(spelled: Spelled) -> list[tuple[int, int]]:
    """Beginning and end of everything in a text that belongs to a key, in order."""
    letters, places = spelled
    spans = []
    for key in _remembered:
        for needle in _needles(key):
            at = letters.find(needle)
            while at >= 0:
                first, last = _whole(letters, at, at + len(needle), key.lower())
                spans.append((places[first][0], places[last - 1][1]))
                at = letters.find(needle, last)
    return sorted(spans)


def _whole(letters: str, begin: int, end: int, key: str) -> tuple[int, int]:
    """A found part of `key` with as much of the key as stands on both sides of it."""
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
