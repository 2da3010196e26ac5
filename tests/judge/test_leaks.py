"""What counts as giving the answer away, to a reader of words and to a model that reads blind.

When a feedback repeats what its reader must not know, and when it only shares a scene.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest

from soulkit.errors import CallError
from soulkit.judge.leaks import (
    LeakView,
    above_chance,
    check_leak,
    echoes_private,
    echoes_reference,
    names_letter,
    read_blind,
    says_phrase,
    tokens,
)
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


@pytest.mark.parametrize(("colour", "kind"), [("red", "answerable"), ("very red", "")])
def test_single_words_point_at_names_of_three_words_at_most(colour: str, kind: str) -> None:
    options = tuple(f"the {one} box" for one in (colour, "blue", "green"))
    view = LeakView("Where is the hat?", options, options[0])
    assert leak("Look at the red one.", view) == kind


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
        ("It is not in the blue jar.", False),  # three of four are left
        ("Neither the blue jar nor the green tin.", True),
        ("Not the tin, and not the jar.", True),
        ("Neither A nor C, and D is wrong too.", True),
        ("Think of the red one.", True),
        ("Not the jar.", False),
        ("Ada did not see where the plum went.", False),
    ],
)
def test_what_elimination_can_answer(text: str, readable: bool) -> None:
    feedback = check_leak(Feedback(text=text, author="x"), VIEW)
    assert feedback.leak == ("answerable" if readable else "")
    assert feedback.chance == 0.25
    assert feedback.blind is not None and (feedback.blind >= 0.5) is readable


def test_an_option_inside_another_one() -> None:
    assert leak("The box was seen.", TWO) == "gold_text"
    # The longer option alone is named, which leaves the shorter one: found by elimination.
    assert leak("Not the treasure box.", TWO) == "answerable"
    swapped = LeakView(TWO.question, TWO.options, "treasure box")
    assert leak("Not the box.", swapped) == "answerable"
    assert leak("Think of the treasure box.", swapped) == "gold_text"
    three = LeakView(TWO.question, ("box", "treasure box", "bag"), "bag")
    assert check_leak(Feedback(text="Not the treasure box.", author="x"), three).blind == 0.5


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        ("You said red_box, but ask who was there.", "", ""),
        ("You said A, but ask who was there.", "", ""),
        ("You said red_box; it is not the blue_jar.", "", "answerable"),
        ("Neither red_box nor blue_jar nor green_tin.", "answerable", "answerable"),
        ("You said red_box, and it is red_bag.", "gold_text", "gold_text"),
        ("You said red_box; take B.", "gold_letter", "gold_letter"),
        ("You said red_box; take the second option.", "gold_place", "gold_place"),
        ("Neither blue_jar nor green_tin.", "answerable", "answerable"),
    ],
)
def test_the_drafts_own_answer_is_known(text: str, known: str, unknown: str) -> None:
    assert leak(text, VIEW.of_draft("A", "")) == known
    assert leak(text, VIEW.of_draft("red box", "")) == known
    assert leak(text) == unknown


def test_of_two_options_the_drafts_own_leaves_one() -> None:
    view = LeakView("Where?", ("box", "bag"), "bag").of_draft("box", "")
    assert leak("You said box, but ask who was there.", view) == "answerable"
    three = LeakView("Where?", ("box", "bag", "tin"), "bag").of_draft("box", "")
    assert leak("You said box, but ask who was there.", three) == ""
    assert leak("You said box, and it is not the tin.", three) == "answerable"


def test_a_draft_that_is_right_does_not_make_the_gold_known() -> None:
    view = VIEW.of_draft("B", "")
    assert view.drafted == () and leak("You said red_bag.", view) == "gold_text"


def test_a_ranking_has_several_answers() -> None:
    view = LeakView("Which?", ("tea", "milk", "rice", "soap", "salt", "oats"), "oats", "ABCDEF")
    ranked = view.of_draft("C,A,B", "")
    assert set(ranked.drafted) == {"rice", "tea", "milk"}
    assert leak("You put rice, tea and milk first; look at the last purchase.", ranked) == ""
    assert leak("It is none of rice, tea, milk.", view) == "answerable"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("not a, not c, not d", "answerable"),
        ("It's b.", "gold_letter"),
        ("A is wrong and so is C, says D", "answerable"),
        ("Neither of the last two options.", "answerable"),
        ("Only one of the first 2 options can be true.", "gold_place"),
        ("Neither jars nor tins.", "answerable"),
        ("Look at the first two sentences, and at a plan.", ""),
        ("Neither a jar nor the hall; go with your eyes.", ""),
    ],
)
def test_other_ways_of_ruling_out(text: str, kind: str) -> None:
    assert leak(text, VIEW.of_draft("A", "")) == kind


def test_articles_point_at_no_option() -> None:
    pets = LeakView("Which?", ("a big dog", "a small cat", "the red fox"), "the red fox", "ABC")
    assert leak("Look at a scene again, with the eyes of the person.", pets) == ""
    assert leak("Think of the fox.", pets) == "answerable"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("There is no reason to hurry, and no one was there.", ""),
        ("Answer yes or no.", ""),
        ("No, she does not.", "gold_text"),
        ("Answer no here.", "gold_text"),
        ("It is “no”.", "gold_text"),
        ("Yes is wrong.", "answerable"),
    ],
)
def test_no_before_a_noun_is_no_answer(text: str, kind: str) -> None:
    assert leak(text, LeakView("Does she know?", ("yes", "no"), "no")) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("From 1 to 5, 2 says too little.", ""),
        ("On a 5-point scale, 2 says too little.", ""),
        ("You said two; weigh the three facts.", ""),
        ("Say four.", "gold_text"),
        ("Not 1, three or five.", "answerable"),
    ],
)
def test_options_that_are_numbers(text: str, kind: str) -> None:
    scale = LeakView("How much?", ("1", "2", "3", "4", "5"), "4").of_draft("2", "")
    assert leak(text, scale) == kind


def test_a_draft_that_is_shown_is_ruled_out_beside_what_the_text_rules_out() -> None:
    three = LeakView("Where?", ("box", "bag", "tin"), "bag").of_draft("box", "")
    assert leak("It is not the tin.", three) == ""
    assert leak("It is not the tin.", replace(three, shown=True)) == "answerable"
    assert leak("Ask who was there.", replace(three, shown=True)) == ""


STORY = (
    "1 Ada entered the hall.\n2 Ada moved the plum to the red_bag.\n3 The red_bag.\n"
    "4 It all stood in the hall: red_box, red_bag, blue_jar."
)
READ = VIEW.of_draft("A", STORY)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("You passed over this: Ada moved the plum to the red_bag.", ""),
        ("You passed over sentence 2, “ADA MOVED the plum to the red bag”!", ""),
        ("You said red_box, although 'Ada moved the plum to the red_bag.'", ""),
        ("Ada moved the plum to the red_bag. So take the red_bag.", "gold_text"),
        ("You passed over this: Ada moved the plum to the red_bag, so B.", "gold_letter"),
        ("Somebody moved the plum to the red_bag.", "gold_text"),  # no sentence of the story
        ("The red_bag.", "gold_text"),  # a sentence, and the answer
        ("Ada moved the plum to the blue_jar.", ""),  # one option of four is ruled out
    ],
)
def test_a_sentence_of_the_story_may_be_quoted(text: str, kind: str) -> None:
    assert leak(text, READ) == kind


def test_an_option_is_no_story_even_if_the_actor_reads_it() -> None:
    options = ("She smiles. Then she leaves the room at once.", "She waits. Nobody comes by.")
    view = LeakView("What next?", options, options[0], ("A", "B"))
    story = "She entered the room in the evening.\n" + "\n".join(options)
    draft_view = view.of_draft("B", story)
    assert leak(options[0], draft_view) == "gold_text"
    assert leak("You forgot: She entered the room in the evening.", draft_view) == ""


def test_every_name_of_a_list_tells_a_part_of_it() -> None:
    people = ("Ada", "Ben", "Cy", "Dot", "Eli")
    assert leak("Think of Ada.", LeakView("Who knows?", people, "Ben")) == ""
    assert leak("Think of Ada.", LeakView("Who knows?", people, "Ben", each=True)) == "answerable"


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


def test_the_blind_reader_sees_no_quoted_sentence() -> None:
    seen: list[str] = []

    def answer(body: dict) -> str:
        seen.append(body["messages"][-1]["content"])
        return "<answer>A</answer>"

    async def read() -> None:
        with played_by(answer) as reader:
            text = "You passed over this: Ada moved the plum to the red_bag."
            call = Call(role="judge", example_id="e")
            await read_blind(Feedback(text=text, author="x"), READ, reader, [call])
            await reader.model.close()

    asyncio.run(read())
    assert len(seen) == 1 and "You passed over this" in seen[0] and "moved the plum" not in seen[0]


def test_a_reader_that_fails_is_an_error_and_no_verdict() -> None:
    from tests.support.servers.openai_server import Fault

    with pytest.raises(CallError):
        blind("<answer>A</answer>", script=lambda i, b: Fault.status_error(500))


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


def kind(text: str, **view: object) -> str:
    checked = check_leak(Feedback(text=text, author="x"), LeakView(**view))  # type: ignore[arg-type]
    assert checked.blind is None and checked.chance is None
    return checked.leak


def test_each_part_of_a_view_has_its_own_leak() -> None:
    assert kind("He pawned his brother's watch.", private=(GOAL, SECRET)) == "private_text"
    assert kind("Your believability is low.", rubric=("believability",)) == "rubric_words"
    assert kind("Nobody wants to wait for an accident.", reference=REFERENCE) == "gold_reference"
    assert kind("Speak more freely.", private=(GOAL,), rubric=("secret",), reference=SECRET) == ""


def test_words_that_the_actor_sees_are_no_rubric_words() -> None:
    assert kind("Mind the relationship.", rubric=("relationship",)) == "rubric_words"
    assert (
        kind("Mind the relationship.", rubric=("relationship",), public="Relationship: friends")
        == ""
    )
    assert (
        kind("Mind the question of trust.", rubric=("trust",), question="Whom do you trust?") == ""
    )


def test_a_view_with_options_is_checked_for_texts_too() -> None:
    view = LeakView("Who?", ("Ana", "Ben"), "Ana", private=(SECRET,))
    checked = check_leak(Feedback(text="A brother's watch was pawned.", author="x"), view)
    assert (checked.leak, checked.chance) == ("private_text", 0.5)
