"""Readers that look signs up in a table read what a pattern for each sign would read."""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soulkit.judge import echoes, objects
from soulkit.judge.verdict import plain
from soulkit.metrics.overlap import answer_words
from soulkit.tasks.userllm import metrics
from soulkit.text import SignTable, is_mark, normalised, words_only

PIECES = (
    "=", ">", "-", "->", "=>", "/", "1", "1,500", "\\", "\\\\u0041", "%41", "{", "}", '"', ":",
    "a", "an", "the", "_", " ", "\n", "\x1c", "\u0085", "\u3000", "\u0301", "\u0345", "\u1fb3",
    "\u0301" * 35, "\U0001d165" * 33, "\u0301" * 20 + "\U0001e000" * 20, "\u0f71" * 40,
    "\U0001f600" * 31, "\u00df", "\u0130", "\u03c3", "\u03c2", "\ufdfa", "\u2260", "\u226f",
    "\u2192", "\u2212", "\ufb01", "\ud55c", "\u1112\u1161\u11ab", "\u00bd", "\u2460", "\u24d0",
    "\u200d", "\u0430", "\u0131", "<b>", "/*x*/", "\ud800",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(), max_size=12).map("".join)
MARKS = "".join(filter(is_mark, map(chr, range(0x300, 0x1F000))))
HEAP = re.compile(f"[{re.escape(MARKS)}]{{31,}}")
ASSIGNS = re.compile(r"=>?|->|[\u2192\u2236\ua789]")
MINOR = re.compile(r"(?<!:)-|-(?!\d)|(?<!\d)/|/(?!\d)")


def normal(text: str) -> str:
    return unicodedata.normalize("NFKC", HEAP.sub(lambda run: run[0][:30], text))


def squeezed(text: str) -> str:
    bare = objects._TAG.sub("", objects._ESCAPE.sub(objects._unescape, text))
    bare = "".join(sign for sign in objects._DASHES.sub("-", bare) if not is_mark(sign))
    bare = unicodedata.normalize("NFKD", bare).casefold().translate(objects._ALIKE).casefold()
    return MINOR.sub("", re.sub(r"[^\w:{./-]|_", "", ASSIGNS.sub(":", bare)))


@given(TEXTS)
@example("a-\u226f1")
@example("\U0001f600" * 31 + "\u0301" * 31)
def test_the_same_is_read_sign_by_sign(text: str) -> None:
    assert normalised(text) == normal(text)
    assert plain(text) == " ".join(re.findall(r"[^\W_]+", normal(text).casefold()))
    assert objects._squeeze(text) == squeezed(text)
    bare = re.sub(r"\b(a|an|the)\b", " ", text.lower())
    assert answer_words(text) == re.sub(r"[!-/:-@\[-`{-~]", "", bare).split()
    grouped = re.sub(r"(?<=\d)[,.'\u2019\u00a0\u202f](?=\d{3}(?!\d))", "", text)
    assert echoes.words(text) == echoes._TOKEN.findall(plain(grouped))


@given(TEXTS)
def test_tokens_are_runs_of_letters_and_single_marks(text: str) -> None:
    tokens: list[str] = []
    for word, group in groupby(text.lower(), metrics._is_word):
        signs = list(group)
        marks = [sign for sign in signs if unicodedata.category(sign)[0] in "PS"]
        tokens += ["".join(signs)] if word else marks
    assert metrics.tokenize(text) == tokens


@pytest.mark.parametrize(
    "signs", ["\u00e9", "\u200b", "a\u0301", "\uff41", "\U0001f600", "{\u00e9:"]
)
def test_a_sign_is_looked_at_once_however_often_it_stands(signs: str) -> None:
    """The work for a megabyte is that for its signs: no more of it goes on where they repeat."""
    looks: list[str] = []
    table = SignTable(lambda sign: looks.append(sign) or " ")  # type: ignore[func-returns-value]
    assert not (signs * (1_000_000 // len(signs))).translate(table).strip()
    assert sorted(looks) == sorted(set(signs))
    for reader in (objects._SIGNS, SignTable(str.upper)):
        text = signs * 3
        assert text.translate(reader) == "".join(s.translate(reader) for s in text)


def test_a_table_forgets_before_it_holds_every_sign() -> None:
    table = SignTable(str.upper)
    every = "".join(map(chr, range(0x61000)))
    assert every.translate(table) == "".join(map(str.upper, every))
    assert len(table) <= 1 << 18


def test_words_are_letters_and_digits() -> None:
    assert words_only("  a_b--c\u00e9\n1 ") == "a b c\u00e9 1"
