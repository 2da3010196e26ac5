"""Features of what was written at one turn. None of them needs a judge or a language model.

A *word* is a run of letters and digits, in Chinese and Japanese a single character. A feature
without a value is NaN: a capital in a script without capitals, words in common with no message
before, the opening at a later turn.

`odd_words` stands for typing mistakes without a dictionary of any language: the share of words that
occur neither in what was said before nor in the conversations of any other person. Names and rare
words count, too, for people and models alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from soulkit.data.corpora.lessons import OPENING
from soulkit.metrics.intervals import Floats
from soulkit.metrics.text import mattr
from soulkit.people.turns import PersonTurn, by_chat

LINES = {
    "words": "length (doublings of words)",
    "question": "asks a question",
    "correction": "corrects something",
    "odd_words": "words nobody else uses",
    "capital": "starts with a capital",
    "stop": "ends with a full stop",
    "echo": "words of the message before",
    "variety": "different words",
    "opening_question": "the opening asks",
    "opening_share": "words in the opening",
    "ends": "ends the conversation",
}
"""Name of each line → its label. All but `words` are shares from 0 to 1."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+(?:['\u2019][^\W_]+)*")
_QUESTION = re.compile(r"[?\uff1f\u061f\u037e]")
_STOP = re.compile(r"[.!\u3002\uff01\u06d4\u0964][\"'\u201d\u2019)\]*_]*\s*$")
_CORRECTION = re.compile(
    r"(?:^|\s)\*\w+\W*$|^\*\w+"  # *word, as in chats
    r"|\b(?:i mean(?:t)?|sorry|my bad|oops|correction|scratch that|never ?mind|i misspoke|no wait"
    r"|wait no)\b"
    r"|^(?:actually|wait)\b|\bactually,",
    re.IGNORECASE,
)


@lru_cache(maxsize=65_536)
def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in lower case."""
    return tuple(_WORD.findall(text.lower()))


def has_question(text: str) -> bool:
    """Whether a text has a question mark."""
    return bool(_QUESTION.search(text))


def message_before(turn: PersonTurn) -> str:
    """The message that a turn replies to; empty for an opening."""
    last = turn.context[-1] if turn.context else None
    return "" if last is None or last.role != "user" or last.text == OPENING else last.text


class Vocabulary:
    """The words of conversations, with the person whose conversations contain them."""

    def __init__(self, turns: Iterable[PersonTurn]) -> None:
        self._owner: dict[str, str | None] = {}
        for turn in turns:
            for text in (turn.text, message_before(turn)):
                for word in words_of(text):
                    owner = self._owner.setdefault(word, turn.person)
                    if owner != turn.person:
                        self._owner[word] = None

    def odd(self, turn: PersonTurn, text: str) -> float:
        """The share of words of `text` at `turn` that nobody else uses; NaN without words."""
        earlier = {word for part in turn.context for word in words_of(part.text)}
        words = [word for word in words_of(text) if word.isalpha()]
        odd = [
            w for w in words if w not in earlier and self._owner.get(w, turn.person) == turn.person
        ]
        return len(odd) / len(words) if words else np.nan


def turn_features(
    turns: Sequence[PersonTurn], texts: Sequence[str | None], ends: Sequence[float],
    vocabulary: Vocabulary,
) -> Floats:  # fmt: skip
    """The features [turns, lines] of `texts`, written at these turns, in the order of LINES.

    A row is NaN where a text is missing. `ends`: whether the writer ends the conversation with this
    message, as 0, 1, or a probability.
    """
    values = np.full((len(turns), len(LINES)), np.nan)
    for place, (turn, text) in enumerate(zip(turns, texts, strict=True)):
        if text is not None:
            values[place] = _one(turn, text, vocabulary)
    values[:, -1] = ends
    row = {(turn.chat, turn.place): place for place, turn in enumerate(turns)}
    for chat, whole in by_chat(turns).items():
        written = [texts[row[chat, turn.place]] for turn in whole]
        lengths = [len(words_of(text)) for text in written if text is not None]
        first = row.get((chat, 0))
        if first is not None and len(lengths) == whole[0].turns > 1 and any(lengths):
            values[first, -2] = lengths[0] / sum(lengths)
    return values


def _one(turn: PersonTurn, text: str, vocabulary: Vocabulary) -> list[float]:
    words, before = words_of(text), set(words_of(message_before(turn)))
    first = next((sign for sign in text if sign.isalpha()), "")
    return [
        np.log2(1 + len(words)),
        float(has_question(text)),
        float(bool(_CORRECTION.search(text))),
        vocabulary.odd(turn, text),
        float(first.isupper()) if first.lower() != first.upper() else np.nan,
        float(bool(_STOP.search(text))),
        len(before & set(words)) / len(set(words)) if before and words else np.nan,
        mattr(words) if words else np.nan,
        float(has_question(text)) if turn.place == 0 else np.nan,
        np.nan,
        np.nan,
    ]
