"""Ways of hiding the answer from a reader of words: which are caught, and which pass."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from soulkit.judge.leaks import MAX_CHARACTERS, LeakView, check_leak
from soulkit.judge.obfuscation import folded, letters_named, places_named, respelled, spelled_names
from soulkit.tasks.kit.choice import LetteredTask
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Feedback
from tests.support.evaluation import examples

VIEW = LeakView(
    "Where will Nia look for the ring?",
    ("red crate", "blue box", "green jar", "old tin"),
    "blue box",
    tuple("ABCD"),
)

CAUGHT = {
    "as it is": "It is in the blue box.",
    "in other letters": "It is in the BLUE-BOX!",
    "zero-width spaces": "Think of the b\u200blue b\u200box once more.".replace("b\u200bb", "b"),
    "zero-width joiners": "Think of the bl\u200due bo\u200dx once more.",
    "soft hyphens": "Think of the bl\u00adue bo\u00adx once more.",
    "word joiners": "Think of the bl\u2060ue bo\ufeffx once more.",
    "a direction mark": "Think of the bl\u200eue bo\u200fx once more.",
    "variation selectors": "Think of the bl\ufe0fue bo\ufe0fx once more.",
    "invisible tags": "Look again."
    + "".join(chr(0xE0000 + ord(letter)) for letter in " the blue box"),
    "combining accents": "Think of the b\u0301l\u0302u\u0303e b\u0300o\u0308x once more.",
    "strokes through": "Think of the b\u0336l\u0336u\u0336e\u0336 b\u0336o\u0336x\u0336 once more.",
    "ready-made accents": "Think of the blüé böx once more.",
    "Cyrillic letters": "Think of the bluе bох once more.",
    "Greek letters": "Think of the βluε bοχ once more.",
    "small capitals": "Think of the ʙʟᴜᴇ ʙᴏx once more.",
    "full-width letters": "Think of the ｂｌｕｅ ｂｏｘ once more.",
    "mathematical letters": "Think of the 𝐛𝐥𝐮𝐞 𝐛𝐨𝐱 once more.",
    "letters in circles": "Think of the ⓑⓛⓤⓔ ⓑⓞⓧ once more.",
    "digits for letters": "Think of the b1u3 b0x once more.",
    "signs for letters": "Think of the 8lue 80x: no, the b|ue b0x.",
    "hyphens between": "Think of the b-l-u-e b-o-x once more.",
    "blanks between": "Think of the b l u e  b o x once more.",
    "points between": "Think of the b.l.u.e. b.o.x. once more.",
    "stars between": "Think of the *b*l*u*e* *b*o*x* once more.",
    "joined": "Think of the bluebox once more.",
    "joined to more": "Look inthebluebox once more.",
    "camel case": "Think of the BlueBox once more.",
    "torn apart": "Think of the bl ue bo x once more.",
    "marks inside": "Think of the bl**ue** bo**x** once more.",
    "tags inside": "Think of the bl<b>ue</b> bo<i>x</i> once more.",
    "entities": "Think of the &#98;lue b&#111;x once more.",
    "over line ends": "Think of the blue\n\nbox once more.",
    "backwards": "Read this from its end: xob eulb.",
    "the letter": "Option B deserves another look.",
    "a Cyrillic letter": "Option В deserves another look.",
    "a letter in a box": "Look at 🅱 again.",
    "a flag's letter": "Look at 🇧 again.",
    "the letter spoken": "Option bee deserves another look.",
    "the radio alphabet": "Choose bravo this time.",
    "the letter's neighbour": "Take the letter after A this time.",
    "the alphabet": "The second letter of the alphabet deserves another look.",
    "an ordinal": "The second option deserves another look.",
    "an ordinal in figures": "The 2nd choice deserves another look.",
    "a number": "Option two deserves another look.",
    "a numeral": "Option no. 2 deserves another look.",
    "a numbered answer": "The answer is number two.",
    "a number sign": "Have a look at #2.",
    "from behind": "The third from the bottom deserves another look.",
    "second of four": "It is the second of the four options.",
    "the other three": "Rule out the first, the third and the last option.",
    "all others by name": "Neither crate nor jar nor tin.",
    "a single word": "Think of something blue.",
}  # fmt: skip
PASSES = {
    "another language": "Denk an die blaue Schachtel.",
    "a synonym": "Think of the azure carton.",
    "a description": "Think of what has the colour of a clear sky.",
    "a comparison": "It has more colour than the sea.",
    "a rhyme": "It rhymes with new socks.",
    "first letters": "Before leaving, understand everything. But observe x-rays.",
    "rot13": "Guvax bs gur oyhr obk.",
    "base64": "Ymx1ZSBib3g=",
    "Morse": "-... .-.. ..- . / -... --- -..-",
    "a picture": "Look for the 🟦📦.",
    "escapes": r"Think of the \u0062lue \u0062ox.",
    "numbers of letters": "2-12-21-5 2-15-24",
    "pig latin": "Think of the uebla oxba.",
    "every second letter": "Think of bxlxuxe bxoxx.",
}
"""Paraphrases and codes, which pass: docs/reference/benchmarks-as-played.md."""


def leak(text: str, view: LeakView = VIEW) -> str:
    return check_leak(Feedback(text=text, author="x"), view).leak


@pytest.mark.parametrize("way", CAUGHT)
def test_a_disguise_is_seen_through(way: str) -> None:
    assert leak(CAUGHT[way])


@pytest.mark.parametrize("way", PASSES)
def test_what_is_not_about_form_passes(way: str) -> None:
    assert leak(PASSES[way]) == ""


def test_the_kinds_of_leaks_say_how() -> None:
    assert leak(CAUGHT["hyphens between"]) == leak(CAUGHT["Cyrillic letters"]) == "gold_text"
    assert leak(CAUGHT["a letter in a box"]) == "gold_letter"
    assert leak(CAUGHT["an ordinal"]) == leak(CAUGHT["the radio alphabet"]) == "gold_place"
    assert leak(CAUGHT["the other three"]) == "answerable"


HARMLESS = (
    "Compare the options one by one; ask which goal fits every action, not only the last one.",
    "Read the second sentence again; the first one says who left.",
    "Your first answer was closer; the last one who saw the ring was Nia.",
    "Her second choice of words hides two things: who moved it, and who saw that.",
    "Option texts are short; weigh all four.",
    "Answer one question at a time, and the last one first: who was there?",
    "In the end, a person acts on what she knows. Nobody told her on the 2nd of May.",
    "Take two minutes; pick one thought and follow it to its end.",
    "Ask what each of the three people saw, first of all the one in the hall.",
    "She is a top student; the final answer needs a letter in tags.",
    "The former owner of the house had left; nobody saw the latter part of the scene.",
)


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_advice_does_not_leak(text: str) -> None:
    view = LeakView(VIEW.question, ("Nia's left hand", "the shelf above", "a drawer", "under beds"),
                    "a drawer", tuple("ABCD"))  # fmt: skip
    assert leak(text, view) == ""


def test_options_that_differ_in_accents_alone_are_not_confused() -> None:
    view = LeakView("Which word?", ("ano", "año", "mes"), "año")
    assert leak("Not the word ano, at least.", view) == ""  # two of three are left
    assert leak("Neither ano nor mes.", view) == "answerable"
    assert leak("It is año.", view) == "gold_text"
    three = LeakView("Which word?", ("peso", "pesó", "pose"), "pesó")
    assert leak("Think of the time of the verb.", three) == ""


def test_a_russian_text_stays_russian() -> None:
    assert folded("в коробке") == "в коробке" and folded("the bох") == "the box"
    view = LeakView("Где кольцо?", ("в ящике", "в банке"), "в ящике", ("A", "B"))
    assert leak("Подумай ещё раз, кто в комнате.", view) == ""
    assert leak("Оно в\u200b ящи\u00adке.", view) == "gold_text"


def test_short_names_are_not_put_together_from_parts() -> None:
    assert spelled_names("I saw so me one", {"some", "box"}) == frozenset()
    assert spelled_names("take the b o x", {"box"}) == {"box"}
    assert spelled_names("the treasure-box", {"box", "treasure box"}) == {"treasure box"}
    assert spelled_names("an is land", {"island"}) == {"island"}  # the price of torn words
    assert spelled_names("mislands", {"island"}) == frozenset()
    assert spelled_names("an ap ple", {"apple"}) == {"apple"}  # five letters may be torn,
    assert spelled_names("a pe ar", {"pear"}) == frozenset()  # four are spelled or they are not
    assert spelled_names("the o x", {"ox"}) == frozenset()
    assert spelled_names("elppa", {"apple"}) == {"apple"} and not spelled_names("rae p", {"pear"})


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("the first and the third option", {0, 2}),
        ("the last one", {3}),
        ("the last one to leave", set()),
        ("the penultimate choice", {2}),
        ("the middle one", set()),
        ("option 4", {3}),
        ("option 9", set()),
        ("the third from the bottom", {1}),
        ("his second choice", set()),
        ("two options", set()),
        ("", set()),
    ],
)
def test_places(text: str, places: set[int]) -> None:
    assert places_named(text, 4) == places
    assert places_named(text, 1) == frozenset()


def test_the_middle_and_the_pair_need_a_fitting_number() -> None:
    assert places_named("the middle one", 3) == {1}
    assert places_named("The latter.", 2) == {1} and places_named("The latter.", 3) == frozenset()


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("the second letter of the alphabet", {"B"}),
        ("the letter after A", {"B"}),
        ("the one right before option C", {"B"}),
        ("the option following B", {"C"}),
        ("choose bravo", {"B"}),
        ("answer: dee", {"D"}),
        ("option Charlie", set()),  # somebody among the options is called so
        ("the one before C left", {"B"}),
        ("bravo, well done", set()),
    ],
)
def test_letters(text: str, letters: set[str]) -> None:
    assert letters_named(text, ("Charlie is told", "Ada")) == letters


def test_what_nobody_sees_is_gone() -> None:
    for sign in "\u034f\u115f\u1160\u180b\u180e\u3164\ufe00\ufe0f\uffa0\u200b\u2060\xad\U000e0100":
        assert folded(f"bl{sign}ue") == "blue", hex(ord(sign))
    assert folded("\U0001f150\U0001f170\U0001f189\U0001f1e6\U0001f1ff") == "AAZAZ"
    assert folded("<i>bl</i>ue &lt; 3") == "blue < 3" and folded("1 < 2") == "1 < 2"


def test_a_spelled_secret_is_a_secret() -> None:
    view = LeakView(private=("marzipan",), rubric=("believability",))
    assert leak("Ask about m-a-r-z-i-p-a-n.", view) == "private_text"
    assert leak("Ask about marzi\u200bpan.", view) == "private_text"
    assert leak("Mind your belіevabіlіty.", view) == "rubric_words"
    assert respelled("a b c, and I am") == "abc, and I am"


def made_lessons(name: str, n: int) -> Iterator[tuple[str, LeakView]]:
    """Every lesson that a task could give on made rows, leaking ones included."""
    task = load_registry().task(name)
    for example in examples(name, n):
        view = task.leak_view(example) or LeakView()
        lessons = list(task.lessons(example, None)) if isinstance(task, LetteredTask) else []
        yield from ((text, view) for text in lessons)
        if not lessons:
            text = task.rehearse(example, random.Random(example.id))
            yield from [(text, view)] if text else []


WITH_RULES = ("hitom", "tomi", "twinvoice", "tombench", "socsci210", "lifechoices", "fantom",
               "mistakes", "alignx_demo", "humanllm", "social_r1", "userllm", "sotopia",
               "mmtom", "behaviorchain")  # fmt: skip


@pytest.mark.parametrize("name", WITH_RULES)
def test_what_rules_write_is_never_taken_for_a_disguise(name: str) -> None:
    """Every lesson on made rows passes, as it did while words alone were read."""
    lessons = list(made_lessons(name, 12))
    assert lessons
    assert [text for text, view in lessons if leak(text, view)] == []


@pytest.mark.parametrize(
    "text",
    [
        "blue box " * 5_500, "b-l-u-e " * 6_000, "the first " * 5_000, "x" * 50_000,
        "a " * 25_000, "first" + " " * 49_000, "e\u0301" * 25_000, "\u0300" * 50_000,
        "option " * 7_000, "Nia's " * 8_000, "&" * 50_000, "<b" * 25_000, "б" * 50_000,
        "first, " * 7_000, "option 1 and 2 and " * 2_600, "\u05b0\u0591" * 25_000,
    ],
)  # fmt: skip
def test_long_texts_are_read_in_time(text: str) -> None:
    leak("warm up")
    start = time.process_time()
    leak(text[:MAX_CHARACTERS])
    assert time.process_time() - start < 10, "the time grows with the square of the length"


def test_what_is_too_long_to_be_read_is_not_shown() -> None:
    assert leak("Look again. " * 90_000) == "too_long"
    longest = ("Look again. " * 5_000)[:MAX_CHARACTERS]
    assert (leak(longest), leak(longest + ".")) == ("", "too_long")
