"""Reading sentences and questions: exact forms, and None for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.errors import DataError
from soulkit.tasks.tom.stories.events import ContainerRoom, Enter, Move, Noise, Place, PrivateTell
from soulkit.tasks.tom.stories.paraphrase import read_paraphrase
from soulkit.tasks.tom.stories.questions import Question, read_question
from soulkit.tasks.tom.stories.read import read_sentence
from soulkit.tasks.tom.stories.sources import events_of_row, read_fixed_tomi, read_tomi_txt
from tests.support.stories import read_story


def test_a_container_sentence_is_told_by_its_place() -> None:
    story = read_story("1 The coin is in the pantry.\n2 The pantry is in the pantry.")
    assert story is not None
    assert story.events == (Place("coin", "pantry"), ContainerRoom("pantry", "pantry"))


def test_published_forms() -> None:
    assert read_sentence("A B and C entered the loft", set()) is None
    assert read_sentence("Ann, Bob and Cy entered the TV_room.", set()) == Enter(
        ("Ann", "Bob", "Cy"), "TV_room"
    )
    assert read_sentence("Ann moved the red hat to the big box", set()) == Move(
        "Ann", "red hat", "big box"
    )
    assert read_sentence("Ann lost his phone.", set()) == Noise("Ann", "lost", "phone")
    event = read_sentence("Ann privately told Bob that the peas is in the red_box now.", set())
    assert event == PrivateTell("Ann", "Bob", "peas", "red_box")


def test_stray_lines_are_no_part_of_the_story() -> None:
    text = "Read this and answer.\n1 Ann entered the loft.\n2 Ann exited the loft. ***\n\n"
    story = read_story(text)
    assert story is not None
    assert story.lines == ("Ann entered the loft.", "Ann exited the loft.")


@pytest.mark.parametrize(
    "line", ["Ann teleported to the loft.", "Ann entered.", "The coin vanished.", "ann is here"]
)
def test_what_cannot_be_read_is_never_guessed(line: str) -> None:
    assert read_story(f"1 Ann entered the loft.\n2 {line}") is None


def test_questions() -> None:
    assert read_question("Where was the red hat at the beginning?") == Question(
        "memory", (), "red hat"
    )
    deep = read_question("Where does Ann think Bob thinks Cy thinks the peas is?")
    assert deep == Question("belief", ("Ann", "Bob", "Cy"), "peas")
    assert read_question("Where does Ann really think the peas is?") == Question(
        "belief", ("Ann",), "peas"
    )
    assert read_question("Who has the peas?") is None


PARAPHRASED = (
    "The cellar shelters Ann.",
    "Bob sauntered into the cellar.",
    "The green box has the sweet potato within it.",
    "The cellar is where the green box is.",
    "Ann is mad about the tie.",
    "Bob tiptoed from the cellar.",
    "Ann shoved the sweet potato into the pantry.",
    "There is a pantry in the cellar.",
)
TRACE = ("enter_agent_0", "enter_agent_1", "agent_1_exits", "agent_0_moves_obj")


def test_paraphrases_are_read_by_what_they_join() -> None:
    story = read_paraphrase(PARAPHRASED, "sweet potato", ["green box", "tie"], TRACE)
    assert story is not None
    assert story.events[2] == Place("sweet potato", "green box")
    assert story.events[6] == Move("Ann", "sweet potato", "pantry")
    assert story.witnesses[6] == {"Ann"}


def test_a_story_that_contradicts_its_trace_is_not_read() -> None:
    swapped = ("enter_agent_1", "enter_agent_0", *TRACE[2:])
    assert read_paraphrase(PARAPHRASED, "sweet potato", ["green box"], swapped) is None
    assert read_paraphrase(PARAPHRASED, "sweet potato", ["green box"], TRACE[:3]) is None


def test_a_row_may_hold_its_story_as_a_list_literal() -> None:
    question = "Where will Bob look for the sweet potato?"
    row = {"story": str(list(PARAPHRASED)), "question": question, "cands": "['green box', 'tie']"}
    assert events_of_row("paratomi", row) is not None
    assert events_of_row("tomi", row) is None


def test_broken_files_say_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_fixed_tomi(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"story": "x"}\n')
    with pytest.raises(DataError, match="question, answer"):
        list(read_fixed_tomi(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.txt").write_text("1 Where is the hat really?\tbox\t1\n")
    with pytest.raises(DataError, match=r"bad\.txt:1"):
        list(read_tomi_txt(tmp_path / "bad.txt"))
