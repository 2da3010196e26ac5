"""How much a simulated user is like one: the numbers of UserLLM, pure and per reply or per batch.

* Intent overlap: the share of the reply's words of content that stand in the intent. People say
  what they want in words of their own and bit by bit, so *lower* is better.
* Termination: whether the reply ends the conversation exactly when it should; over a batch
  precision, recall and F1 of ending.
* Role adherence: a user asks a quiz question and does not answer it. To name some of its choices is
  to answer; to name all of them is to repeat the question.
* First-turn diversity: 1 minus the mean pairwise Jaccard of the words of first messages.

Under `reference` naming all choices is 0 and naming three or more of them 1; the rest of the
published arithmetic stands in `reference.py`. Words are those of the `regex` package, found without
it: `x²` is `x`, a combining mark is part of its word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from soulkit.judge.verdict import named_options, plain
from soulkit.metrics.diversity import mean_jaccard
from soulkit.tasks.userllm.fields import UserMessage
from soulkit.text import SignTable
from soulkit.types import Protocol

NOVELTY = "novelty"
"""How unlike the other drafts of its row a first message is, where there are any."""
Tokenizer = Callable[[str | None], list[str]]

STOP_WORDS = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "but", "by", "can", "could", "did", "do", "does",
     "for", "from", "had", "has", "have", "how", "i", "if", "in", "into", "is", "it", "its", "me",
     "might", "my", "of", "on", "or", "our", "should", "so", "that", "the", "their", "them", "then",
     "there", "these", "they", "this", "to", "us", "was", "we", "were", "what", "when", "where",
     "which", "who", "why", "will", "with", "would", "you", "your")
)  # fmt: skip
_JOINERS = "\u200c\u200d"
_CIRCLED = ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
"""Letters in circles and squares: symbols that count as letters."""
_NOT_ALNUM = re.compile(r"[^a-z0-9]+")


# -- words ---------------------------------------------------------------------------------------


def tokenize(text: str | None) -> list[str]:
    """Lower-case words; every mark or symbol outside a word stands alone."""
    return (text or "").lower().translate(_SIGNS).split()


def _is_word(sign: str) -> bool:
    kind = unicodedata.category(sign)
    if kind[0] in "LM" or kind in ("Nd", "Nl", "Pc"):
        return True
    return sign in _JOINERS or (kind == "So" and _within(sign, _CIRCLED))


def _within(sign: str, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(low <= ord(sign) <= high for low, high in ranges)


def _spaced(sign: str) -> str:
    """A sign as it stands in the row of words: within one, between blanks, or not at all."""
    if _is_word(sign):
        return sign
    return f" {sign} " if unicodedata.category(sign)[0] in "PS" else " "


_SIGNS = SignTable(_spaced)


def content_words(text: str | None, words: Tokenizer = tokenize) -> set[str]:
    """The words that are no stop words and no marks."""
    return {word for word in set(words(text)) if word not in STOP_WORDS and word.isalnum()}


# -- one reply -----------------------------------------------------------------------------------


def intent_overlap(intent: str | None, reply: str | None, words: Tokenizer = tokenize) -> float:
    """|intent ∩ reply| / |reply| over words of content, in [0, 1]; 0 when either has none."""
    intent_words, reply_words = content_words(intent, words), content_words(reply, words)
    return (
        len(intent_words & reply_words) / len(reply_words) if intent_words and reply_words else 0.0
    )


def goal_keywords(intent: str) -> list[str]:
    """The intent's words of content with more than two letters, in alphabetical order."""
    return sorted(word for word in content_words(intent) if len(word) > 2)


def choice_form(text: str) -> str:
    """The form in which the published score looks for choices: ASCII words between blanks."""
    return _NOT_ALNUM.sub(" ", f" {text.lower()} ")


def choices_named(choices: Sequence[str], reply: str, protocol: Protocol) -> tuple[str, ...]:
    """The choices that stand in a reply as whole words.

    `paper` reads longer choices first, so that "department store" does not also name "store", and
    reads every script.
    """
    if protocol == "paper":
        names = named_options(reply, choices)
        return tuple(choice for choice in choices if plain(choice) in names)
    text = choice_form(reply)
    return tuple(c for c in choices if choice_form(c).strip() and choice_form(c) in text)


def role_adherence(choices: Sequence[str], reply: str, protocol: Protocol) -> float:
    """1 for a reply that does not answer the quiz, else 0."""
    count = len(choices_named(choices, reply, protocol))
    if protocol == "paper":
        return float(count == 0 or count == len(choices))
    if not choices or count == len(choices):
        return 0.0
    return float(count not in (1, 2))


def prism_parts(intent: str, message: UserMessage, last: bool | None) -> dict[str, float | None]:
    """The parts of a PRISM score that need no judge; None where one does not apply.

    A reply that only ends the conversation has no text to compare with the intent, and where the
    row does not say whether it is the last turn, neither way of going on is right: `last` is None,
    as it is for a first message, which no one ends a conversation with.
    """
    return {
        "intent_decomposition": intent_overlap(intent, message.text) if message.text else None,
        "termination": None if last is None else float(message.ended == last),
    }


def prism_value(metrics: Mapping[str, float | None]) -> float | None:
    """The mean of what applies, low overlap counting as good; None when nothing does."""
    overlap = metrics.get("intent_decomposition")
    components = [None if overlap is None else 1 - overlap]
    components += [metrics.get(name) for name in ("termination", "ai_detector", NOVELTY)]
    values = [value for value in components if value is not None]
    return sum(values) / len(values) if values else None


# -- a batch -------------------------------------------------------------------------------------


def first_turn_diversity(texts: Iterable[str]) -> float | None:
    """1 − mean pairwise Jaccard of the words of the texts; None for fewer than two with words."""
    similarity = mean_jaccard(bag for text in texts if (bag := bag_of_words(text)))
    return None if similarity is None else 1 - similarity


def variety(texts: Iterable[str]) -> float | None:
    """The same where every text counts: what says nothing is like all the others.

    None for fewer than two texts.
    """
    bags = [bag_of_words(text) for text in texts]
    full = [bag for bag in bags if bag]
    pairs = len(bags) * (len(bags) - 1) / 2
    if not pairs:
        return None
    different = len(full) * (len(full) - 1) / 2 * (1 - (mean_jaccard(full) or 0.0))
    return different / pairs


@lru_cache(maxsize=1 << 14)
def bag_of_words(text: str) -> frozenset[str]:
    """The words and marks of a text. Numbers over a batch read the same texts again and again."""
    return frozenset(tokenize(text))


def termination_scores(
    predicted: Sequence[bool], labels: Sequence[bool]
) -> tuple[float, float, float]:
    """(precision, recall, F1) of ending; 0 where nothing was, or should have been, ended."""
    hits = sum(p and w for p, w in zip(predicted, labels, strict=True))
    precision = hits / sum(predicted) if any(predicted) else 0.0
    recall = hits / sum(labels) if any(labels) else 0.0
    both = precision + recall
    return precision, recall, 2 * precision * recall / both if both else 0.0
