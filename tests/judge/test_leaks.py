"""What counts as giving the answer away, to a reader of words and to a model that reads blind."""

from __future__ import annotations

import asyncio
import re

import pytest

from soulkit.errors import CallError
from soulkit.judge.leaks import LeakView, above_chance, check_leak, names_letter, read_blind
from soulkit.types import Call, Feedback
from tests.support.road import played_by

PLACES = ("red_box", "red_bag", "blue_jar", "green_tin")
VIEW = LeakView("Where does Ada look for the plum?", PLACES, "red_bag", tuple("ABCD"))
TWO = LeakView("Where is the hat?", ("box", "treasure box"), "box")


def leak(text: str, view: LeakView = VIEW) -> str:
    return check_leak(Feedback(text=text, author="x"), view).leak


@pytest.mark.parametrize(
    "text",
    ["It is in the red_bag.", "the Red Bag", "a **red-bag**!", "red\nbag", "Not red_box: red_bag."],
)
def test_the_gold_text_leaks(text: str) -> None:
    assert leak(text) == "gold_text"


@pytest.mark.parametrize(
    "text",
    ["Take B.", "option b", "The answer is B", "(b)", "<answer>B</answer>", "B) fits", "It is *B*",
     "B", "Choose b.", "Try 'B'", "`b`"],
)  # fmt: skip
def test_the_gold_letter_leaks(text: str) -> None:
    assert leak(text) == "gold_letter"


@pytest.mark.parametrize(
    "text", ["Option A is right.", "pick a.", "(a)", "It is A.", "A", "the answer: A", '"A"']
)
def test_the_letter_a(text: str) -> None:
    assert names_letter(text, "A")


@pytest.mark.parametrize(
    "text",
    ["A move was missed.", "Ada saw a move.", "It was a surprise", "an option a reader may miss",
     "Vitamin-A", "I'm sure.", ""],
)  # fmt: skip
def test_the_article_is_no_letter(text: str) -> None:
    assert not names_letter(text, "A") and not names_letter(text, "I")
    assert not names_letter(text, "")


@pytest.mark.parametrize(
    ("text", "readable"),
    [
        ("Look at sentence 4 again.", False),
        ("It is neither the red box, the blue jar nor the green tin.", True),
        ("It is not in the blue jar.", True),
        ("Neither A nor C, and D is wrong too.", True),
        ("Think of the red one.", True),
        ("Not the jar.", True),
        ("Ada did not see where the plum went.", False),
    ],
)
def test_what_elimination_can_answer(text: str, readable: bool) -> None:
    feedback = check_leak(Feedback(text=text, author="x"), VIEW)
    assert feedback.leak == ("answerable" if readable else "")
    assert feedback.chance == 0.25
    assert feedback.blind is not None and (feedback.blind > 0.25) is readable


def test_an_option_inside_another_one() -> None:
    assert leak("The box was seen.", TWO) == "gold_text"
    # The longer option alone is named, which leaves the shorter one: found by elimination.
    assert leak("Not the treasure box.", TWO) == "answerable"
    swapped = LeakView(TWO.question, TWO.options, "treasure box")
    assert leak("Not the box.", swapped) == "answerable"
    assert leak("Think of the treasure box.", swapped) == "gold_text"
    three = LeakView(TWO.question, ("box", "treasure box", "bag"), "bag")
    assert check_leak(Feedback(text="Not the treasure box.", author="x"), three).blind == 0.5


def test_words_of_the_question_tell_nothing() -> None:
    view = LeakView("Where is the box of chalk?", ("red_box", "red_bag"), "red_box")
    assert leak("Who saw the box?", view) == ""


def test_options_that_are_sentences_are_not_taken_apart() -> None:
    options = ("She goes to the shop at once", "She waits for a friend")
    view = LeakView("What does she do?", options, options[0])
    assert leak("Think of the weather.", view) == ""
    assert leak("She goes to the shop at once, of course.", view) == "gold_text"


def test_without_options_nobody_reads_blind_but_the_texts_are_checked() -> None:
    feedback = Feedback(text="red_bag", author="x")
    assert check_leak(feedback, None) == feedback
    assert check_leak(feedback, LeakView()) == feedback
    checked = check_leak(feedback, LeakView("?", (), "red_bag"))
    assert (checked.leak, checked.blind, checked.chance) == ("gold_text", None, None)
    assert LeakView("?", ("a b", "a_b"), "a b").chance == 1


def test_the_binomial_test() -> None:
    assert above_chance(8, 8, 0.5) and above_chance(7, 8, 0.5)
    assert not above_chance(6, 8, 0.5) and not above_chance(0, 8, 0.5)
    assert above_chance(3, 8, 1 / 15) and not above_chance(8, 8, 1.0)


def test_one_in_twenty_is_chance_and_less_is_not() -> None:
    # One hit in one read has exactly the probability of chance.
    assert not above_chance(1, 1, 0.05) and not above_chance(1, 1, 0.051)
    assert above_chance(1, 1, 0.049)


def letter_of(option: str, prompt: str) -> str:
    match = re.search(rf"^([A-Z])\. {option}$", prompt, re.MULTILINE)
    assert match is not None
    return match.group(1)


def blind(answer: object, text: str = "Look again.", **server: object) -> Feedback:
    calls = [Call(role="judge", example_id="e", sample=i) for i in range(8)]

    async def read() -> Feedback:
        with played_by(answer, **server) as reader:
            try:
                return await read_blind(Feedback(text=text, author="x"), VIEW, reader, calls)
            finally:
                await reader.model.close()

    return asyncio.run(read())


def says(option: str):
    return lambda body: f"<answer>{letter_of(option, body['messages'][-1]['content'])}</answer>"


def test_a_blind_reader_who_finds_the_gold_makes_it_answerable() -> None:
    feedback = blind(says("red_bag"))
    assert (feedback.leak, feedback.blind, feedback.chance) == ("answerable", 1.0, 0.25)


def test_a_blind_reader_of_nothing_to_pick_is_not_asked() -> None:
    view, feedback = LeakView(private=("a secret",)), Feedback(text="Look again.", author="x")
    with played_by("<answer>A</answer>") as reader:
        call = Call(role="judge", example_id="e")
        assert asyncio.run(read_blind(feedback, view, reader, [call])) == feedback


def test_a_blind_reader_who_is_wrong_does_not() -> None:
    assert (blind(says("blue_jar")).leak, blind(says("blue_jar")).blind) == ("", 0.0)


@pytest.mark.parametrize("letter", "ABCD")
def test_a_favourite_letter_is_no_knowledge(letter: str) -> None:
    assert blind(f"<answer>{letter}</answer>").leak == ""


@pytest.mark.parametrize("answer", ["", "no idea", "<answer>Z</answer>", "<answer>?</answer>"])
def test_a_blind_reader_without_an_answer_has_found_nothing(answer: str) -> None:
    assert blind(answer).blind == 0.0


def test_the_blind_reader_sees_the_remark_and_no_story() -> None:
    seen: list[str] = []

    def answer(body: dict) -> str:
        seen.append(body["messages"][-1]["content"])
        return "<answer>A</answer>"

    blind(answer, "She left early.")
    assert len(seen) == 8 and len(set(seen)) > 1
    assert all("She left early." in s and VIEW.question in s and "red_bag" in s for s in seen)


def test_a_reader_that_fails_is_an_error_and_no_verdict() -> None:
    from tests.support.servers.openai_server import Fault

    with pytest.raises(CallError):
        blind("<answer>A</answer>", script=lambda i, b: Fault.status_error(500))
