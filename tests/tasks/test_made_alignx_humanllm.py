"""Made rows of AlignX and HumanLLM: reproducible, varied, solvable from the row itself."""

from __future__ import annotations

from collections import Counter

import pytest

from soulkit.tasks.alignx import rows as alignx
from soulkit.tasks.humanllm import rows as humanllm
from soulkit.tasks.registry import load_registry
from tests.support.road import synth


@pytest.mark.parametrize("task", [*alignx.TASKS, "humanllm"])
def test_fewer_rows_are_a_prefix_of_more_and_seeds_differ(task: str) -> None:
    assert synth(task, 5, 3) == synth(task, 20, 3)[:5]
    assert synth(task, 5, 3) != synth(task, 5, 4)
    live = load_registry().task(task)
    ids = {live.example(row).id for row in synth(task, 200, 3)}
    assert len(ids) > 150


@pytest.mark.parametrize(
    ("split", "kinds"),
    [
        ("demo", {("demographic",)}),
        ("pair", {("icl_pairs",)}),
        ("ugc", {("ugc",)}),
        ("history16", {("icl_pairs", "ugc")}),
    ],
)
def test_a_split_shows_its_kind_of_evidence(split: str, kinds: set[tuple[str, ...]]) -> None:
    rows = synth(f"alignx_{split}", 30, 0)
    names = ("demographic", "icl_pairs", "ugc")
    assert {tuple(k for k in names if k in row) for row in rows} == kinds
    if split == "history16":
        assert all(row["n_icl"] + row["n_ugc"] == 16 for row in rows)
        assert all(len(row["icl_pairs"]) + len(row["ugc"]) == 16 for row in rows)


def test_the_arbitrary_split_has_every_mixture() -> None:
    live = load_registry().task("alignx_arbitrary")
    mixtures = Counter(
        live.example(row).tags["evidence"] for row in synth("alignx_arbitrary", 100, 0)
    )
    assert len(mixtures) == 7 and "none" not in mixtures


def ends(reply: str, post: str) -> set[tuple[int, int]]:
    """The (axis, end) whose reply to `post` this is."""
    topic = next(t for t in alignx.all_posts() if t.post == post)
    return {
        (i, j)
        for i, axis in enumerate(alignx.axes())
        for j, taste in enumerate(axis)
        if taste.answer(topic) == reply
    }


@pytest.mark.parametrize("task", alignx.TASKS)
def test_the_evidence_of_a_row_decides_it(task: str) -> None:
    for row in synth(task, 60, 1):
        ((axis, end),) = ends(row["chosen"], row["raw_prompt"])
        assert ends(row["rejected"], row["raw_prompt"]) == {(axis, 1 - end)}
        taste = alignx.axes()[axis][end]
        if "demographic" in row:
            assert any(trait in row["demographic"] for trait in taste.traits)
        for pair in row.get("icl_pairs", ()):
            assert ends(pair["chosen"], pair["prompt"]) == {(axis, end)}
            assert pair["prompt"] != row["raw_prompt"], "the answer is not among the examples"
        assert all(item["comment"] in taste.comments for item in row.get("ugc", ()))


def test_no_trait_or_comment_belongs_to_two_tastes() -> None:
    tastes = [taste for axis in alignx.axes() for taste in axis]
    counts = Counter(text for taste in tastes for text in (*taste.traits, *taste.comments))
    assert set(counts.values()) == {1}


def test_one_candidate_continues_the_pursuit_of_the_customer() -> None:
    pursuit = {
        thing: name for name, things in humanllm.TEXTS["pursuits"].items() for thing in things
    }
    assert len(pursuit) == sum(map(len, humanllm.TEXTS["pursuits"].values())), (
        "a thing has one pursuit"
    )
    for row in synth("humanllm", 100, 1):
        head, _, offer = row["prompt_text"].partition("\n")
        bought = [p for thing, p in pursuit.items() if f": {thing}" in head]
        assert len(row["candidates"]) == 20 and len(set(row["candidates"])) == 20
        kinds = Counter(pursuit[thing] for thing in row["candidates"])
        assert set(kinds.values()) == {1} and len(set(bought)) == 1
        gold = row["candidates"][row["answer_index"]]
        assert pursuit[gold] == bought[0] and f": {gold}" not in head
        assert row["answer_letter"] == "ABCDEFGHIJKLMNOPQRST"[row["answer_index"]]
        assert all(f": {thing}" in offer for thing in row["candidates"])


def test_the_place_of_the_gold_is_no_hint() -> None:
    places = Counter(row["answer_index"] for row in synth("humanllm", 400, 0))
    assert len(places) == 20 and max(places.values()) < 45
