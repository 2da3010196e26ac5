"""How invented people write: a voice changes a plain sentence, and says of itself what it does.

So that a description, a message and a list of features agree: what `trait` promises is what
`write` does, and what `features` ask about can be seen in the messages.

    HASTY.write("Could you please show me the next step, because I am stuck.")
    → "could u pls show me the next step, bc i am stuck"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Feature = tuple[str, str, str]
"""Name, question and answer of one feature of style."""

FIRST_NAMES = (
    "Agnes", "Baltasar", "Corin", "Delia", "Elio", "Freya", "Gustav", "Henrike", "Imre", "Jolanda",
    "Kaspar", "Leonie", "Matteo", "Noor", "Orla", "Piotr", "Rhea", "Samir", "Thekla", "Urban",
)  # fmt: skip
FAMILIES = (
    "Abend", "Brook", "Castell", "Dunne", "Engel", "Ferro", "Grath", "Holm", "Ivers", "Jansky",
    "Klee", "Lund", "Moravec", "Nagy", "Oort", "Pell", "Quist", "Rask", "Stern", "Tamm",
)  # fmt: skip
"""Enough names that rows of two seeds seldom are about one person."""

_SHORT = {"you": "u", "your": "ur", "please": "pls", "because": "bc", "thanks": "thx"}


@dataclass(frozen=True, slots=True)
class Voice:
    """One way of writing."""

    trait: str
    """What a description says of it, as the end of `This person ...`."""
    write: Callable[[str], str]
    """A plain message (whole sentences, full stops) as this voice would put it."""
    features: tuple[Feature, ...]


def _lower(text: str) -> str:
    return text.lower().rstrip(".")


def _hasty(text: str) -> str:
    return re.sub(r"\w+", lambda word: _SHORT.get(word[0], word[0]), _lower(text))


def _loud(text: str) -> str:
    return re.sub(r"\.(?=\s|$)", "!", text)


def _trailing(text: str) -> str:
    return re.sub(r"\.(?=\s|$)", "...", text)


CAPITALS = "Does the user write capitals where they belong?"
STOPS = "How does the user end sentences?"
SHORT_FORMS = "Does the user take short forms and slang?"

_PLAIN = Voice(
    "writes whole sentences with capitals and full stops",
    lambda text: text,
    (
        ("Capitalization Patterns", CAPITALS, "Yes, at every beginning of a sentence."),
        ("Punctuation Usage", STOPS, "With full stops and question marks."),
    ),
)
LOWER = Voice(
    "writes in small letters and leaves out the last full stop",
    _lower,
    (
        ("Capitalization Patterns", CAPITALS, "No, everything is in small letters."),
        ("Punctuation Usage", STOPS, "The last sentence has no full stop."),
    ),
)
HASTY = Voice(
    "writes in a hurry, in small letters and with short forms such as u, pls and thx",
    _hasty,
    (
        ("Capitalization Patterns", CAPITALS, "No, everything is in small letters."),
        ("Use of Slang, Contractions, or Emojis", SHORT_FORMS, "Yes, such as u, pls and thx."),
    ),
)
LOUD = Voice(
    "ends nearly every sentence with an exclamation mark",
    _loud,
    (("Punctuation Usage", STOPS, "With exclamation marks instead of full stops."),),
)
TRAILING = Voice(
    "lets sentences trail off in three dots",
    _trailing,
    (("Punctuation Usage", STOPS, "With three dots instead of a full stop."),),
)
VOICES = (_PLAIN, LOWER, HASTY, LOUD, TRAILING)
