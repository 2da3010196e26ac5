"""Reading a model's answer: thinking removed, the tagged part found.

Two ways, by protocol. `reference` reproduces the published parsers, quirks included: only closed
thinking is removed, the first tag decides. `paper` repairs them: unclosed and orphaned thinking goes
too, and the last tag decides, so that a model may correct itself.
"""

from __future__ import annotations

import re

from soulkit.types import Protocol

_CLOSED = re.compile(r"<think>.*?</think>|<seed:think>.*?</seed:think>", re.DOTALL)
_ORPHAN = re.compile(r"^.*</(?:seed:)?think>", re.DOTALL)
_UNCLOSED = re.compile(r"<(?:seed:)?think>.*\Z", re.DOTALL)
_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL | re.IGNORECASE)
_LAST_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_LETTER = re.compile(r"<answer>\s*([A-Z])\s*</answer>", re.IGNORECASE)
_LOOSE_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*(?:[).:]+(?:\s.*)?)?", re.DOTALL)


def remove_think(text: str, remove_unclosed: bool = False) -> str:
    """Without closed `<think>` and `<seed:think>` blocks (and unclosed ones on request), stripped."""
    text = _CLOSED.sub("", text)
    if remove_unclosed:
        text = _UNCLOSED.sub("", text)
    return text.strip()


def spoken(text: str, protocol: Protocol) -> str:
    """What is left of a completion when the thinking is taken out."""
    if protocol == "reference":
        return remove_think(text)
    return _UNCLOSED.sub("", _ORPHAN.sub("", _CLOSED.sub("", text))).strip()


def tagged_text(text: str, protocol: Protocol) -> str | None:
    """The text of the deciding `<answer>` tag, None without one."""
    said = spoken(text, protocol)
    if protocol == "reference":
        found = _TAGGED.search(said)
        return found.group(1) if found else None
    every = _LAST_TAGGED.findall(said)
    return every[-1].strip() if every else None


def tagged_letter(text: str, protocol: Protocol) -> tuple[str, str]:
    """(upper-case letter or "", status): `B`; under `paper` also `B.`, `(B)` and `B. some text`."""
    if protocol == "reference":
        found = _LETTER.search(spoken(text, protocol))
        return (found.group(1).upper(), "ok") if found else ("", "no_tag")
    inside = tagged_text(text, protocol)
    if inside is None:
        return "", "no_tag"
    letter = _LOOSE_LETTER.fullmatch(inside)
    return (letter.group(1).upper(), "ok") if letter else ("", "malformed")


def has_word(text: str, word: str) -> bool:
    """Whether `word` stands in `text` as a whole word, case ignored."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None
