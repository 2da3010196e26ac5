"""Reading answers under the paper protocol; the reference protocol has its vectors."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.judge.verdict import has_word, named_options, plain, spoken, tagged_letter, tagged_text
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
