"""Made rows of CoSER and Humanual: scenes hold together, and people show in their words."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from soulkit.tasks.coser.data import ENVIRONMENT, SCENES
from soulkit.tasks.humanual.data import HABITS, PER_PERSON
from soulkit.tasks.humanual.data import TASKS as HUMANUAL
from tests.support.road import synth, synth_examples


def scenes(n: int, seed: int = 3) -> list[dict[str, Any]]:
    return [json.loads(row["circumstance"]) for row in synth("coser", n, seed)]


# -- scenes --------------------------------------------------------------------------------------


def test_a_scene_holds_together() -> None:
    many_scenes = scenes(200)
    for scene in many_scenes:
        lines, people = scene["dialogues"], scene["major_characters"]
        speakers = [line["character"] for line in lines]
        assert 6 <= len(lines) <= 14 and 2 <= len(people) <= 4
        assert all(a != b for a, b in pairwise(speakers))
        assert set(speakers) - {ENVIRONMENT} == set(people)
        listed = [name for name, _ in Counter(speakers).most_common()]
        assert scene["speaking_characters_w_env"] == listed
        assert set(people) <= set(scene["character_profiles"])
        assert [person["name"] for person in scene["key_characters"]] == people
        messages = [line["message"] for line in lines]
        assert len(set(messages)) == len(messages) and "{" not in " ".join(messages)
        assert all(text.startswith("[") != (who == ENVIRONMENT)
                   for who, text in zip(speakers, messages, strict=True))  # fmt: skip
    with_it = sum(ENVIRONMENT in scene["speaking_characters_w_env"] for scene in many_scenes)
    assert 70 < with_it < 130
    assert Counter(len(scene["major_characters"]) for scene in many_scenes).keys() == {2, 3, 4}


def test_scenes_of_a_book_are_one_cluster() -> None:
    examples = synth_examples("coser", 40)
    assert len({example.cluster for example in examples}) == 40 / SCENES
    books = {scene["book"] for seed in (0, 1) for scene in scenes(40, seed)}
    assert len(books) == 2 * 40 / SCENES, "training and test rows share no book"


# -- people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUMANUAL)
def test_the_persona_shows_in_the_words(name: str) -> None:
    rows = synth(name, 200, 5)
    for row in rows:
        (habit,) = [h for h in HABITS if row["persona"].endswith(h.description)]
        written = row["completion"]
        seen = " ".join(message["content"] for message in json.loads(row["prompt"]))
        assert "{" not in written + seen + row["persona"]
        if "small letters" in habit.description:
            assert written == written.lower()
        assert written.startswith("Sorry to butt in.") == ("butting in" in habit.description)
        assert written.endswith("...") == ("three dots" in habit.description)
        assert ("\n" in written) == ("new line" in habit.description)
    for one, other in zip(rows[::PER_PERSON], rows[1::PER_PERSON], strict=True):
        assert one["persona"] == other["persona"] and one["prompt"] != other["prompt"]
    assert len({row["category"] for row in rows}) == 5
    assert len({row["completion"] for row in rows}) > 40
