"""Overlap of training and evaluation rows: the same, nearly the same, and what they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.contamination import (
    Passage,
    RowTexts,
    clean_rows,
    find_overlap,
    find_renamed,
    folded_words,
    phrase_jaccard,
    phrases_of,
    row_matches,
)
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError
from soulkit.tasks.kit.loading import entity_kinds, passage, passages
from soulkit.tasks.kit.registry import load_registry
from tests.support.road import synth

OWN = """\
tasks:
  survey:
    title: Survey
    summary: What would this person say?
    module: soulkit.tasks.tom.task:ToMi
    seats: {guest: actor}
    columns:
      persona: {audience: [guest], entity: persona}
      people: {type: list, required: false, audience: [guest], entity: character}
      number: {type: any, required: false, audience: [], entity: persona}
      question: {audience: [guest]}
      answer: {audience: [gold]}
      cands: {type: any, required: false, audience: [gold]}
"""
NURSE = "A nurse from Leeds who keeps bees and writes letters to her sister every other week."
BAKER = "A baker from Cork who rises at three, sings at work and has never owned a telephone."
TEA = "How do you take your tea when you come home from a long day at work in the rain?"
SLEEP = "What do you do at night when sleep does not come and the house is quiet around you?"


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("own") / "own.yaml"
    path.write_text(OWN)
    return load_registry(path).task("survey")


def row(source: str, persona: str, question: str, answer: str = "milk", **more: Any) -> RawRow:
    return RawRow({"persona": persona, "question": question, "answer": answer, **more}, source)


def overlap(task: Any, train: list[RawRow], evaluation: list[RawRow], **options: Any) -> Any:
    sides = [[passage(task, r) for r in rows] for rows in (train, evaluation)]
    return find_overlap(*sides, entities=entity_kinds([task]), **options)


def test_the_same_row_is_exact_whatever_its_gold_says(survey: Any) -> None:
    train = [row("t:1", NURSE, TEA), row("t:2", BAKER, SLEEP)]
    report = overlap(survey, train, [row("e:1", NURSE.upper(), TEA.replace("?", " ?"), "sugar")])
    (match,) = report.matches
    assert (match.kind, match.train, match.evaluation, match.similarity) == (
        "exact", "t:1", "e:1", 1.0,
    )  # fmt: skip
    assert report.reached == {"exact": 1, "near": 0, "character": 0, "persona": 1}


def test_a_word_changed_is_near_and_another_question_is_not(survey: Any) -> None:
    changed = TEA.replace("tea", "coffee")
    train = [row("t:1", NURSE, changed), row("t:2", NURSE, SLEEP), row("t:3", BAKER, TEA)]
    report = overlap(survey, train, [row("e:1", NURSE, TEA)], threshold=0.6)
    assert [(m.kind, m.train) for m in report.matches] == [("near", "t:1")]
    every = [passage(survey, r) for r in (train[0], row("e:1", NURSE, TEA))]
    truth = phrase_jaccard(*(phrases_of(p.words) for p in every))
    assert report.matches[0].similarity == pytest.approx(truth) and 0.6 < truth < 1
    assert report.touched("persona") == {"t:1", "t:2"}, "t:3 shares the question alone"
    assert overlap(survey, train, [row("e:1", NURSE, TEA)], threshold=0.95).matches == ()


def test_every_near_pair_is_found_among_many(survey: Any) -> None:
    words = [f"word{i}" for i in range(400)]
    train, evaluation = [], []
    for i in range(60):
        text = words[i : i + 300 : 3]
        evaluation.append(row(f"e:{i}", " ".join(text[:20]), " ".join(text)))
        text[50] = "changed"
        train.append(row(f"t:{i}", " ".join(text[:20]), " ".join(text)))
    report = overlap(survey, train, evaluation)
    assert report.touched("near") == {f"t:{i}" for i in range(60)}
    assert report.reached["near"] == 60
    best = {m.train: m.evaluation for m in report.matches}
    assert all(best[f"t:{i}"] == f"e:{i}" for i in range(60)), "the most alike is named"


def test_lists_name_entities_and_bare_numbers_stay_within_their_task(survey: Any) -> None:
    train = [row("t:1", NURSE, TEA, people=["Ada", "Ben"], number=7)]
    evaluation = [row("e:1", BAKER, SLEEP, people=["ben"], number=7), row("e:2", BAKER, TEA)]
    report = overlap(survey, train, evaluation)
    assert [(s.kind, s.value, s.evaluation) for s in report.shared] == [
        ("character", "ben", ("e:1",)),
        ("persona", "survey 7", ("e:1",)),
    ]


@pytest.mark.parametrize(
    ("name", "columns", "kind"),
    [
        ("sotopia", ("scenario",), "scenario"),
        ("sotopia", ("agent1_name", "agent1_background"), "persona"),
        ("coser", ("book",), "book"),
        ("coser", ("major_characters", "character_profiles"), "character"),
        ("userllm", ("intent",), "intent"),
        ("mirrorbench", ("turns",), "conversation"),
        ("mirrorbench", ("dataset", "conversation_id", "metadata"), "topic"),
        ("humanual_chat", ("persona",), "persona"),
        ("sim_math", ("problem",), "problem"),
        ("sim_math", ("user_profile_text",), "persona"),
        ("sim_doc", ("intent",), "intent"),
        ("sim_doc", ("user_profile_text",), "persona"),
    ],
)
def test_the_tasks_say_what_their_rows_may_share(
    name: str, columns: tuple[str, ...], kind: str
) -> None:
    task, packed = load_registry().task(name), {"coser": "circumstance"}.get(name, "raw")

    def opened(seed: int) -> list[dict[str, Any]]:
        rows = synth(name, 8, seed)
        return [{**row, **json.loads(row[packed])} if packed in row else row for row in rows]

    train, evaluation = ([{k: v for k, v in row.items() if k != packed} for row in opened(seed)]
                    for seed in (6, 7))  # fmt: skip
    planted = {**train[3], **{column: evaluation[3][column] for column in columns}}
    rows = [RawRow(fields, f"e:{i}") for i, fields in enumerate(evaluation)]
    report = overlap(task, [RawRow(planted, "t:1")], rows)
    assert "e:3" in {source for s in report.shared if s.kind == kind for source in s.evaluation}


def test_the_clean_rows_are_those_without_the_kinds_asked_for(survey: Any) -> None:
    train = [row("t:1", NURSE, TEA), row("t:2", NURSE, SLEEP), row("t:3", BAKER, SLEEP)]
    report = overlap(survey, train, [row("e:1", NURSE, TEA)])
    assert [r.source for r in clean_rows(train, report)] == ["t:2", "t:3"]
    assert [r.source for r in clean_rows(train, report, ("exact", "persona"))] == ["t:3"]
    with pytest.raises(ConfigError) as error:
        clean_rows(train, report, ("person",))
    assert "'persona'" in error.value.way_out


def test_rows_that_a_task_cannot_use_are_named(survey: Any) -> None:
    rows = [("survey", row("t:1", NURSE, TEA)), ("survey", RawRow({"persona": NURSE}, "t:2"))]
    good, bad = passages({"survey": survey}, rows)
    assert [p.source for p in good] == ["t:1"]
    assert [b.source for b in bad] == ["t:2"] and "question" in bad[0].why


def test_a_threshold_is_a_share() -> None:
    some = [Passage("a:1", "x", ("a",), ("a",), frozenset())]
    for threshold in (0.0, 1.5):
        with pytest.raises(ConfigError):
            find_overlap(some, some, threshold=threshold)


def test_no_gold_is_compared(survey: Any) -> None:
    report = passage(survey, row("t:1", NURSE, TEA, "zanzibar"))
    assert "zanzibar" not in report.words and report.core == folded_words(TEA)


def test_files_of_real_stories_overlap_with_themselves_alone(tmp_path: Path) -> None:
    from tests.support.road import synth

    task = load_registry().task("tomi")
    raw = [RawRow(r, f"t:{i}") for i, r in enumerate(synth("tomi", 40, 0))]
    other = [RawRow(r, f"e:{i}") for i, r in enumerate(synth("tomi", 40, 1))]
    same = overlap(task, raw, raw)
    assert len(same.touched("exact")) == 40
    assert overlap(task, raw, other).matches == ()


def of_words(source: str, count: int) -> Passage:
    """A text of the words w0, w1, …: of two such texts the shorter begins the longer."""
    text = tuple(f"w{i}" for i in range(count))
    return Passage(source, "x", text, text, frozenset())


@pytest.mark.parametrize(
    ("short", "long", "share", "near"),
    [(6, 7, 4 / 5, True), (10, 12, 8 / 10, True), (21, 26, 19 / 24, False), (9, 11, 7 / 9, False)],
)
def test_four_fifths_of_the_triples_are_near(
    short: int, long: int, share: float, near: bool
) -> None:
    one, other = of_words("t:1", short), of_words("e:1", long)
    assert phrase_jaccard(phrases_of(one.words), phrases_of(other.words)) == share
    assert [m.kind for m in find_overlap([one], [other]).matches] == ["near"] * near


@pytest.mark.parametrize("threshold", [1.0, 1e-9])
def test_every_share_above_none_up_to_all_is_a_threshold(threshold: float) -> None:
    some = [of_words("a:1", 5)]
    assert find_overlap(some, some, threshold=threshold).touched("exact") == {"a:1"}


def test_all_triples_shared_in_another_order_are_near_at_the_highest_threshold() -> None:
    # The triples of a circle, begun at another place.
    one, other = "abcdeab", "cdeabcd"
    pair = [
        Passage(f"{text}:1", "x", tuple(text), tuple(text), frozenset()) for text in (one, other)
    ]
    (match,) = find_overlap(pair[:1], pair[1:], threshold=1.0).matches
    assert (match.kind, match.similarity) == ("near", 1.0)


def test_of_two_equal_evaluation_rows_the_first_is_named() -> None:
    evaluation = [of_words(source, 7) for source in ("e:1", "e:2")]
    for count in (7, 6):  # the same words, and nearly the same
        (match,) = find_overlap([of_words("t:1", count)], evaluation).matches
        assert match.evaluation == "e:1"


def bare_passage(source: str, text: str, core: str) -> Passage:
    words = tuple(text.split())
    return Passage(source, "t", words, tuple(core.split()), frozenset())


def test_the_same_persona_with_another_question_is_another_row() -> None:
    persona = " ".join(f"word{n}" for n in range(60))
    rows = [bare_passage("1", f"{persona} how do you take your tea", "how do you take your tea")]
    others = [
        bare_passage("2", f"{persona} do you like tea at all", "do you like tea at all"),
        bare_passage(
            "3", f"{persona} how do you take your tea today", "how do you take your tea today"
        ),
        bare_passage("4", f"{persona} how do you take your tea", "how do you take your tea"),
    ]
    matches = [(place, match.kind) for place, match in row_matches(rows, others, 0.75)[0]]
    assert matches == [(2, "exact"), (1, "near")]


STORY = "Mia put the cup away. Then Bo came in. Where does Bo look?"


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (STORY, "Eva put the cup away. Then Leo came in. Where does Leo look?", True),
        (STORY, "Bo put the cup away. Then MIA came in. Where does Mia look?", True),
        (STORY, "Mia put the cup away. Then Bo came in. Where does Mia look?", False),
        (STORY, "Mia put the pan away. Then Bo came in. Where does Bo look?", False),
        ("Room 12 is cold, says Élodie.", "Hall 7 is cold, says Zoë.", True),
        ("She has 3 cups.", "She has 4 cups.", False),  # another sum, not another name
        ("Mia", "Bo", False),  # nothing is left
    ],
)
def test_rows_are_equal_up_to_names(one: str, other: str, equal: bool) -> None:
    rows = [
        RowTexts("f:1", "a", (one,)),
        RowTexts("f:2", "b", (other,)),
        RowTexts("f:3", "c", ("it",)),
    ]
    renamed = find_renamed(rows)
    assert (renamed is not None) == equal
    if renamed is not None:
        assert (renamed.rows, renamed.clusters, renamed.distinct) == (2, 2, 1)
        assert renamed.example == ("f:1", "f:2")


def test_a_word_that_is_also_written_small_is_no_name() -> None:
    rows = [RowTexts("f:1", "a", ("Baker Mia sings",)), RowTexts("f:2", "b", ("Nurse Mia sings",))]
    assert find_renamed(rows) is not None
    small = [
        RowTexts(f"f:{i}", "c", (f"the {job} sings",)) for i, job in ((3, "baker"), (4, "nurse"))
    ]
    assert find_renamed([*rows, *small]) is None


def test_rows_of_one_cluster_may_be_equal_and_a_name_that_tells_clusters_apart_counts() -> None:
    rows = [RowTexts(f"f:{i}", "a", (f"{who} sings",)) for i, who in enumerate(("Mia", "Bo"))]
    assert find_renamed(rows) is None
    lives = "{} lives in {} now"
    towns = [RowTexts(f"f:{i}", town, (lives.format(who, town),), (town,))
             for i, (who, town) in enumerate([("Mia", "Lyon"), ("Bo", "New York")])]  # fmt: skip
    assert find_renamed(towns) is None
    same = [RowTexts(f"f:{i}", str(i), (lives.format(who, "Lyon"),), (f"{i} Lyon, {who}",))
            for i, who in enumerate(("Mia", "Bo"))]  # fmt: skip
    assert find_renamed(same) is not None
