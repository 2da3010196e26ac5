"""Conformance: FANToM's answers, rewards and break-downs, and where `paper` departs from them."""

from __future__ import annotations

import pytest
from road_support import score_text, task_of
from vectors_support import Vector, assert_matches, load_vectors, vectors_folder

from soulkit.errors import DataError
from soulkit.metrics.overlap import token_f1
from soulkit.tasks.fantom import name_list, reference_aggregates

DIFFER = {
    "empty-gold-list-never-right": "where nobody knows, `nobody` is right; a blank gold is no row",
    "first-tag-wins": "the last tag decides",
    "gold-case-sensitive": "the gold is read in any case of letters",
    "name-parsing-splits-quotes": "lists of names are read as literals",
    "prefix-polarity": "yes and no are words, not beginnings of words",
    "unclosed-think-kept": "what is thought is no answer",
    "wrong-name-inside-gold": "a longer name is read first, and its words are then spent",
}
LETTERS = "a letter with more around it is read"
BAD_GOLD = "a gold that is no option makes a bad row"
BLANKS = "hedge-polarity: words need no blanks around them"
WITHOUT_SLUG = {
    "fantom.choice.0012": LETTERS,
    "fantom.choice.0023": LETTERS,
    "fantom.choice.0024": LETTERS,
    "fantom.choice.0033": BAD_GOLD,
    "fantom.choice.0035": BAD_GOLD,
    "fantom.choice.0138": BLANKS,
    "fantom.choice.0142": BLANKS,
}


@pytest.mark.parametrize("vector", load_vectors("fantom.choice"))
def test_choice(vector: Vector) -> None:
    task = task_of("fantom", "reference")
    if vector.raises:
        with pytest.raises(DataError, match="is not known"):
            task.example(vector.input["row"])
        return
    output = vector.input["output_text"] or ""
    score = score_text(task, task.example(vector.input["row"]), output)
    metrics = {
        "fantom/reward": score.reward,
        "fantom/response_length": len(output.split()),
        "all/score": score.value,
        "all/score_v1": score.value,
    }
    actual = {"predicted": score.words, "reward": score.reward, "metrics": metrics}
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("fantom.choice", differ=DIFFER))
def test_choice_under_paper(vector: Vector) -> None:
    if vector.id in WITHOUT_SLUG:
        pytest.skip(f"quirk {WITHOUT_SLUG[vector.id]}")
    task = task_of("fantom")
    if vector.raises:
        with pytest.raises(DataError, match="is not known"):
            task.example(vector.input["row"])
        return
    score = score_text(task, task.example(vector.input["row"]), vector.input["output_text"] or "")
    assert_matches(score.reward, vector.expected["reward"])


@pytest.mark.parametrize("vector", load_vectors("fantom.lexical", fns={"aggregates"}))
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])


def own_rows() -> list[object]:
    if not (vectors_folder() / "rows.parse.jsonl").is_file():
        return load_vectors("rows.parse")
    every = load_vectors("rows.parse", fns={"fantom.str_to_list", "fantom.f1"})
    return [p for p in every if p.values[0].family.startswith("fantom.")]


@pytest.mark.parametrize("vector", own_rows())
def test_rows(vector: Vector) -> None:
    given = vector.input
    found = (
        token_f1(given["gold"], given["pred"])
        if vector.family == "fantom.f1"
        else name_list(given["text" if "text" in given else "value"])
    )
    assert_matches(found, vector.expected["result"])
