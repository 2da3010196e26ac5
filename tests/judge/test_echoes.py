"""When a feedback repeats what its reader must not know, and when it only shares a scene."""

from __future__ import annotations

import time

import pytest

from soulkit.judge.echoes import echoes_private, echoes_reference, says_phrase, tokens
from soulkit.judge.leaks import LeakView, check_leak
from soulkit.types import Feedback

PUBLIC = (
    "Ana and Ben haggle over a blue lamp at the flea market. Ana sells it; Ben wants to buy it. "
    "Ana's goal: sell the lamp for a good price and stay friendly."
)
GOAL = (
    "Pay no more than 40 dollars for the lamp, as the rent is due on Friday. "
    "Do not tell Ana that you already own a workshop full of antiques."
)
SECRET = "He pawned his brother's watch."


@pytest.mark.parametrize(
    "text",
    [
        "Ben will pay no more than 40 dollars, so do not wait.",
        "Do it soon: THE RENT IS DUE ON FRIDAY!",
        "He already owns a whole workshop of antiques.",
        "The other side's rent is due; he pays 40 dollars at most before Friday.",
    ],
)
def test_a_quoted_or_retold_goal_is_an_echo(text: str) -> None:
    assert echoes_private(text, GOAL, PUBLIC)


@pytest.mark.parametrize(
    "text",
    [
        "Name a price for the blue lamp and stay friendly with Ben.",
        "You gave in at once. Ask Ben what he wants to pay for the lamp, then wait.",
        "Ben wants to buy the lamp at the flea market.",
        "Do not tell Ben everything at once.",
        "Mention that the lamp is one of your antiques.",
        "",
    ],
)
def test_the_scene_and_its_names_are_no_echo(text: str) -> None:
    assert not echoes_private(text, GOAL, PUBLIC)


def test_a_short_secret_is_told_when_all_of_it_is_said() -> None:
    assert echoes_private("He pawned his brother's watch, you know.", SECRET, PUBLIC)
    assert echoes_private("His brother's watch was pawned.", SECRET, PUBLIC)
    assert not echoes_private("Ask about his brother.", SECRET, PUBLIC)
    assert echoes_private("Say: saffron!", "saffron", PUBLIC)
    assert not echoes_private("Say something else.", "saffron", PUBLIC)
    assert echoes_private("the green key is it", "the green key", PUBLIC)
    assert not echoes_private("the key is green", "the green key", PUBLIC)


def test_a_figure_is_told_when_it_is_said() -> None:
    assert echoes_private("Go down to 40.", GOAL, PUBLIC)
    assert echoes_private("$40.00 is what to ask for", GOAL, PUBLIC)
    assert not echoes_private("Go down to 45, or by 4.", GOAL, PUBLIC)
    assert not echoes_private("Go down to 40.", GOAL, f"{PUBLIC} The lamp once cost 40 dollars.")


def test_known_words_in_an_order_of_their_own_are_a_quotation() -> None:
    public = "Points for each of the plants: 3, of the records: 5, of the chairs: 1."
    private = "Points for each of the plants: 5, of the records: 3, of the chairs: 1."
    assert echoes_private(f"Bear in mind: {private}", private, public)
    assert not echoes_private(f"Bear in mind: {public}", private, public)
    assert not echoes_private("Give up plants for records, and take the chairs.", private, public)


def test_a_figure_is_the_same_with_and_without_its_commas() -> None:
    hidden = "Pay at most $1,500 for the car, today if it can be."
    for offer in ("Offer 1500.", "Offer $1,500.", "Offer 1.500 or 1\u202f500."):
        assert echoes_private(offer, hidden, PUBLIC), offer
    assert not echoes_private("Offer $2,500.", hidden, PUBLIC), "500 alone is no figure of it"
    assert not echoes_private("Wait 5 minutes.", "He is 5 and has three dogs in Ghent.", PUBLIC)


def test_five_words_in_a_row_are_a_quotation_and_four_are_not() -> None:
    # Twelve words of content: fewer than eight of them tell no sentence unless they are a run.
    hidden = "granite harbour copper lantern violet meadow silver anchor maple ribbon tunnel fox"
    assert echoes_private("granite harbour copper lantern violet", hidden, "")
    assert not echoes_private("granite harbour copper lantern", hidden, "")
    assert not echoes_private("granite harbour copper lantern, then violet", hidden, "")


def test_a_text_as_long_as_a_run_is_told_in_any_order_and_a_shorter_one_only_whole() -> None:
    assert echoes_private("violet lantern copper harbour granite",
                          "granite harbour copper lantern violet", "")  # fmt: skip
    assert not echoes_private("lantern copper harbour granite",
                              "granite harbour copper lantern", "")  # fmt: skip


def test_what_is_public_is_no_secret() -> None:
    assert not echoes_private("Think of the blue lamp.", "the blue lamp", PUBLIC)
    assert not echoes_private("Ana sells it; Ben wants to buy it.", PUBLIC, PUBLIC)
    assert not echoes_private("and this is", "and this is", "")
    assert not echoes_private("anything", "", "") and not echoes_private("", "anything", "")


@pytest.mark.parametrize(
    ("text", "private", "echoes"),
    [
        ("彼は借金がある。", "彼は借金がある", True),
        ("もっと話してください。", "彼は借金がある", False),
        ("ÉMILE CACHE UNE LETTRE VOLÉE", "Émile cache une lettre volée.", True),
        ("E\u0301mile cache une lettre vole\u0301e", "Émile cache une lettre volée.", True),
        ("Прячет украденное письмо в столе", "Он прячет украденное письмо в столе.", True),
        ("Пиши короче.", "Он прячет украденное письмо в столе.", False),
    ],
)
def test_other_scripts(text: str, private: str, echoes: bool) -> None:
    assert echoes_private(text, private, "") is echoes


REFERENCE = (
    "Honestly I think the council should fix the old bridge first, because the school bus crosses "
    "it every morning and nobody wants to wait for an accident. Parks can come later."
)


def test_a_reference_is_echoed_by_a_run_or_by_many_short_ones() -> None:
    run = "Write that nobody wants to wait for an accident there."
    pieces = (
        "Say that the council should fix things; the old bridge first; the school bus crosses "
        "daily; parks can come after."
    )
    assert echoes_reference(run, REFERENCE, "")
    assert echoes_reference(pieces, REFERENCE, "")
    assert not echoes_reference(pieces, REFERENCE, f"Known: {REFERENCE}")
    assert not echoes_reference("Give an opinion on the bridge, more directly.", REFERENCE, "")
    assert not echoes_reference("I think the tone should be warmer, honestly.", REFERENCE, "")
    assert echoes_reference("Just say: fine by me", "Fine by me!", "")
    assert not echoes_reference("Be brief.", "Fine by me!", "")
    assert not echoes_reference("Be brief.", "", "")


def test_a_remark_of_many_sentences_is_held_against_a_long_row_at_once() -> None:
    public = " ".join(f"place{i}" for i in range(5_000))
    secret = " ".join(f"secret{i}" for i in range(300))
    start = time.process_time()
    for number in range(400):
        sentence = f"It lacks warmth, says the judge, in sentence {number}."
        assert not echoes_private(sentence, secret, public)
        assert not echoes_reference(sentence, secret, public)
    # Counting the words of the row for each of them takes twenty times as long.
    assert time.process_time() - start < 1
    assert echoes_reference("He says secret4 secret5 secret6 secret7 secret8 secret9.", secret,
                            public)  # fmt: skip


def test_phrases_are_found_as_words_in_a_row() -> None:
    assert says_phrase("Raise your Social-Rules score", "social rules")
    assert not says_phrase("social and other rules", "social rules")
    assert not says_phrase("anything", "") and not says_phrase("", "x")
    assert not says_phrase("do not accept it", "ACCEPTED")
    assert tokens("Sells, selling: SELL!") == ["sell"] * 3


def leak(text: str, **view: object) -> str:
    checked = check_leak(Feedback(text=text, author="x"), LeakView(**view))  # type: ignore[arg-type]
    assert checked.blind is None and checked.chance is None
    return checked.leak


def test_each_part_of_a_view_has_its_own_leak() -> None:
    assert leak("He pawned his brother's watch.", private=(GOAL, SECRET)) == "private_text"
    assert leak("Your believability is low.", rubric=("believability",)) == "rubric_words"
    assert leak("Nobody wants to wait for an accident.", reference=REFERENCE) == "gold_reference"
    assert leak("Speak more freely.", private=(GOAL,), rubric=("secret",), reference=SECRET) == ""


def test_words_that_the_actor_sees_are_no_rubric_words() -> None:
    assert leak("Mind the relationship.", rubric=("relationship",)) == "rubric_words"
    assert (
        leak("Mind the relationship.", rubric=("relationship",), public="Relationship: friends")
        == ""
    )
    assert (
        leak("Mind the question of trust.", rubric=("trust",), question="Whom do you trust?") == ""
    )


def test_a_view_with_options_is_checked_for_texts_too() -> None:
    view = LeakView("Who?", ("Ana", "Ben"), "Ana", private=(SECRET,))
    checked = check_leak(Feedback(text="A brother's watch was pawned.", author="x"), view)
    assert (checked.leak, checked.chance) == ("private_text", 0.5)
