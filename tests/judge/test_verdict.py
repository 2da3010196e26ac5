"""Reading answers under the paper protocol; the reference protocol has its vectors.

Readers that look signs up in a table read what a pattern for each sign would read.
"""

from __future__ import annotations

import re
import time
import unicodedata
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soulkit.judge import leaks, structured
from soulkit.judge.verdict import has_word, named_options, plain, spoken, tagged_letter, tagged_text
from soulkit.metrics.text import answer_words
from soulkit.tasks.userllm import metrics
from soulkit.text import SignTable, is_mark, normalised, words_only
from soulkit.types import Protocol


@pytest.mark.parametrize(
    ("text", "speech"),
    [
        ("<think>hm</think> b", "b"),
        ("<seed:think>hm</seed:think>b", "b"),
        ("<THINK>hm</THINK>b", "b"),
        ("hm</think> b", "b"),
        ("b <think>and so on", "b"),
        ("<think>a<think>b</think>c</think>d", "d"),
        ("<think>never ends <answer>B</answer>", ""),
        ("", ""),
    ],
)
def test_thinking_is_not_spoken(text: str, speech: str) -> None:
    assert spoken(text, "paper") == speech


def test_the_protocols_differ_on_open_thinking() -> None:
    text = "<think>so <answer>B</answer>"
    assert tagged_text(text, "reference") == "B"
    assert tagged_text(text, "paper") is None


@pytest.mark.parametrize(
    ("text", "reference", "paper"),
    [
        ("<answer>a</answer> no, <answer>b</answer>", "a", "b"),
        ("in <answer> tags: <answer>b</answer>", "tags: <answer>b", "b"),
        ("<ANSWER> (b) </Answer>", "(b)", "(b)"),
        ("<answer>one\ntwo</answer>", "one\ntwo", "one\ntwo"),
        ("<answer>b", None, None),
        ("<answer></answer>", "", ""),
    ],
)
def test_the_deciding_tag(text: str, reference: str | None, paper: str | None) -> None:
    assert tagged_text(text, "reference") == reference
    assert tagged_text(text, "paper") == paper


@pytest.mark.parametrize(
    "inside", ["B.", "(B)", "(b).", "B)", "B. red_box", "B: red box", "**B**", "`b`"]
)
def test_a_letter_with_more_around_it_is_salvaged(inside: str) -> None:
    assert tagged_letter(f"<answer>{inside}</answer>", "paper") == ("B", "salvaged")


@pytest.mark.parametrize("inside", ["B", "b", " B ", "\nB\n"])
def test_a_bare_letter_is_the_form_asked_for(inside: str) -> None:
    assert tagged_letter(f"<answer>{inside}</answer>", "paper") == ("B", "ok")


@pytest.mark.parametrize("inside", ["", "AB", "B red_box", "red_box", "A or B", "5", "A box"])
def test_what_is_no_letter(inside: str) -> None:
    assert tagged_letter(f"<answer>{inside}</answer>", "paper") == ("", "malformed")


def test_without_a_tag_there_is_no_letter() -> None:
    assert tagged_letter("The answer is B.", "paper") == ("", "no_tag")
    assert tagged_letter("<answer>B.</answer>", "reference") == ("", "no_tag")


@pytest.mark.parametrize(
    "text", ["Red_Box.", "red  box", "**red-box**", "the RED\nbox", "ｒｅｄ box"]
)
def test_spellings_of_one_place(text: str) -> None:
    assert named_options(text, ("red_box", "blue_box")) == {"red box"}


@pytest.mark.parametrize("protocol", ["paper", "reference"])
@pytest.mark.parametrize("end", ["", "</seed:think>"])
def test_a_megabyte_of_opened_thoughts_is_read_at_once(protocol: Protocol, end: str) -> None:
    started = time.process_time()
    spoken("<think>" * 150_000 + end, protocol)
    assert time.process_time() - started < 10, "the time grows with the square of the length"


@pytest.mark.parametrize("filling", ["a b ", "A, ", "\u200b", "```json\n", "é", "😀", "ﷺ"])
def test_of_an_answer_tag_no_more_is_read_than_an_answer_can_be(filling: str) -> None:
    text = f"<answer>{filling * (1_000_000 // len(filling))}</answer>"
    answer = tagged_text(text, "paper")
    assert answer is not None and len(answer) <= 50_000


def test_a_longer_option_is_not_its_part() -> None:
    options = ("box", "treasure box", "treasure chest", "bag")
    assert named_options("in the treasure box", options) == {"treasure box"}
    assert named_options("the treasure box, not the box", options) == {"treasure box", "box"}
    assert named_options("boxes and bagels", options) == frozenset()
    assert (
        named_options("box", ()) == frozenset() and named_options("box", ("", "?")) == frozenset()
    )


@pytest.mark.parametrize(
    ("text", "option"),
    [("在盒子里", "盒子"), ("箱の中", "箱"), ("상자에 있다", "상자"), ("在box里", "box")],
)
def test_scripts_without_blanks_have_no_word_boundary(text: str, option: str) -> None:
    assert named_options(text, (option, "杯")) == {plain(option)}
    assert not has_word(text, option), "the reference rule wants blanks"


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    assert plain(plain(text)) == plain(text)
    assert named_options(text, (text,)) == ({plain(text)} - {""})
    for protocol in ("paper", "reference"):
        letter, status = tagged_letter(text, protocol)  # type: ignore[arg-type]
        assert (status in ("ok", "salvaged")) == bool(letter)


@pytest.mark.parametrize(
    "inside",
    ["（Ｂ）", "Ｂ", "Ｂ．", "ｂ", "【B】", "【Ｂ】", "「B」", "〔Ｂ〕", "[B]",
     "B。", "B、在箱子里", "（B）在箱子里", "【B】 在箱子里", "B：在箱子里",
     "Ｂ. in the box", "“B”", "　Ｂ　"],
)  # fmt: skip
def test_letters_of_other_keyboards_are_letters(inside: str) -> None:
    text = f"<answer>{inside}</answer>"
    assert tagged_letter(text, "paper") == ("B", "salvaged")
    assert tagged_letter(text, "reference") == ("", "no_tag")


@pytest.mark.parametrize(
    "inside", ["（ＡＢ）", "A、B", "A、 B", "A，B", "【】", "B在箱子里", "甲", "１", "（B）or A"]
)
def test_what_is_no_letter_on_any_keyboard(inside: str) -> None:
    assert tagged_letter(f"<answer>{inside}</answer>", "paper") == ("", "malformed")


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
    bare = structured._TAG.sub("", structured._ESCAPE.sub(structured._unescape, text))
    bare = "".join(sign for sign in structured._DASHES.sub("-", bare) if not is_mark(sign))
    bare = unicodedata.normalize("NFKD", bare).casefold().translate(structured._ALIKE).casefold()
    return MINOR.sub("", re.sub(r"[^\w:{./-]|_", "", ASSIGNS.sub(":", bare)))


@given(TEXTS)
@example("a-\u226f1")
@example("\U0001f600" * 31 + "\u0301" * 31)
def test_the_same_is_read_sign_by_sign(text: str) -> None:
    assert normalised(text) == normal(text)
    assert plain(text) == " ".join(re.findall(r"[^\W_]+", normal(text).casefold()))
    assert structured._squeeze(text) == squeezed(text)
    bare = re.sub(r"\b(a|an|the)\b", " ", text.lower())
    assert answer_words(text) == re.sub(r"[!-/:-@\[-`{-~]", "", bare).split()
    grouped = re.sub(r"(?<=\d)[,.'\u2019\u00a0\u202f](?=\d{3}(?!\d))", "", text)
    assert leaks.words(text) == leaks._TOKEN.findall(plain(grouped))


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
    for reader in (structured._SIGNS, SignTable(str.upper)):
        text = signs * 3
        assert text.translate(reader) == "".join(s.translate(reader) for s in text)


def test_a_table_forgets_before_it_holds_every_sign() -> None:
    table = SignTable(str.upper)
    every = "".join(map(chr, range(0x61000)))
    assert every.translate(table) == "".join(map(str.upper, every))
    assert len(table) <= 1 << 18


def test_words_are_letters_and_digits() -> None:
    assert words_only("  a_b--c\u00e9\n1 ") == "a b c\u00e9 1"
