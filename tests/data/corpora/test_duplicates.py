"""What a corpus holds twice, and what it gives away of rows to evaluate on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.contamination import Passage, folded_words, phrase_jaccard, phrases_of
from soulkit.data.corpora.duplicates import find_duplicates, find_leaks
from soulkit.data.corpora.file_rows import source_rows, write_clean
from soulkit.data.files import read_rows
from soulkit.errors import ConfigError, DataError
from tests.support.chats import Row, jsonl, parquet, said_by

VOCABULARY = [f"word{n}" for n in range(400)]


def words(rng: random.Random, count: int) -> list[str]:
    return rng.choices(VOCABULARY, k=count)


def talk(text: list[str], system: str = "You are a person.") -> Row:
    middle = len(text) // 2
    turns = [f"system: {system}", f"user: {' '.join(text[:middle])}",
             f"assistant: {' '.join(text[middle:])}"]  # fmt: skip
    return {"messages": said_by(*turns)}


def changed(text: list[str], places: int, rng: random.Random) -> list[str]:
    other = list(text)
    for place in rng.sample(range(len(text)), places):
        other[place] = "other"
    return other


@pytest.mark.parametrize("added", [0, 6])
def test_duplicates_are_those_that_comparing_all_pairs_finds(added: int, tmp_path: Path):
    """Naively, each row with every earlier one that stays; some are longer than others."""
    rng = random.Random(2)
    originals = [words(rng, 90) for _ in range(40)]
    texts = [*originals, *(changed(t, n % 9, rng) for n, t in enumerate(originals))]
    texts = [[*text, *words(rng, rng.randrange(added + 1))] for text in texts]
    rng.shuffle(texts)
    path = jsonl(tmp_path / "a.jsonl", [talk(text) for text in texts])
    staying: list[int] = []
    naive: dict[str, tuple[str, str]] = {}
    for row, text in enumerate(texts):
        phrases = phrases_of(folded_words(text))
        for other in staying:
            if phrase_jaccard(phrases, phrases_of(folded_words(texts[other]))) >= 0.8:
                kind = "exact" if texts[other] == text else "near"
                naive[f"a.jsonl:{row + 1}"] = (f"a.jsonl:{other + 1}", kind)
                break
        else:
            staying.append(row)
    report = find_duplicates(path)
    assert {d.row: (d.first, d.kind) for d in report.duplicates} == naive
    assert 5 < len(naive) < 40  # three changed words of ninety are near, four are not
    assert [d.row for d in report.duplicates] == sorted(naive, key=lambda k: int(k.split(":")[1]))


def test_case_and_punctuation_are_no_difference_but_who_speaks_is(tmp_path: Path):
    rows = [said_by("user: Hi there, you!", "assistant: Ho."),
            said_by("user: hi there you", "assistant: ho"),
            said_by("assistant: hi there you", "user: ho")]  # fmt: skip
    path = jsonl(tmp_path / "a.jsonl", [{"messages": row} for row in rows])
    report = find_duplicates(path)
    assert [(d.row, d.kind) for d in report.duplicates] == [
        ("a.jsonl:2", "exact"), ("a.jsonl:3", "near")
    ]  # fmt: skip


def test_a_common_system_prompt_makes_no_duplicates(tmp_path: Path):
    rng = random.Random(4)
    system = " ".join(words(rng, 2000))
    rows = [talk(words(rng, 30), system) for _ in range(20)]
    assert find_duplicates(parquet(tmp_path / "a.parquet", rows)).duplicates == []


def test_a_clean_file_has_the_rows_that_stay_as_they_were(tmp_path: Path):
    rng = random.Random(5)
    one, other = talk(words(rng, 20)) | {"id": 7}, talk(words(rng, 20))
    folder = tmp_path / "chats"
    jsonl(folder / "a.jsonl", [one, one, "{broken"])
    parquet(folder / "b.parquet", [other, one])
    report = find_duplicates(folder)
    assert (report.rows, len(report.duplicates), len(report.bad)) == (5, 2, 1)
    target = tmp_path / "clean.jsonl"
    assert write_clean(str(folder), target, report.left_out()) == 2
    rows, bad = read_rows(target)
    assert [row.fields for row in rows] == [one, other] and not bad
    with pytest.raises(DataError, match="exists with different content"):
        write_clean(str(folder), target, ())


@pytest.mark.parametrize("threshold", [0, -1, 1.2])
def test_a_threshold_is_a_share(tmp_path: Path, threshold: float):
    with pytest.raises(ConfigError):
        find_duplicates(jsonl(tmp_path / "a.jsonl", [talk(["a"])]), threshold)
    with pytest.raises(ConfigError):
        find_leaks([], [], threshold)


# -- leaks ---------------------------------------------------------------------------------------


def passage(text: list[str], number: int) -> Passage:
    folded = folded_words(text)
    return Passage(f"eval.jsonl:{number}", "t", folded, folded, frozenset())


def test_leaks_are_told_by_what_stands_in_what(tmp_path: Path):
    rng = random.Random(6)
    story, scene, short = words(rng, 60), words(rng, 200), ["a", "b", "c"]
    evaluation = [passage(story, 1), passage(scene, 2), passage(short, 3)]
    rows: list[Any] = [
        talk(words(rng, 90)),
        talk([*words(rng, 300), *story, *words(rng, 300)]),  # the story in a long conversation
        talk(scene[40:90]),  # a part of the scene
        talk(changed(story, 12, rng)),  # about half of its triples
        talk([*short, *words(rng, 50)]),
        {"text": "no conversation"},
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    report = find_leaks(source_rows(str(path)), evaluation)
    assert [(m.train, m.kind, m.evaluation) for m in report.matches] == [
        ("a.jsonl:2", "holds", "eval.jsonl:1"), ("a.jsonl:3", "part", "eval.jsonl:2")
    ]  # fmt: skip
    assert report.evaluations == {"eval.jsonl:1", "eval.jsonl:2"}
    assert (report.chats, report.short, len(report.bad)) == (6, 1, 1)
    assert report.left_out() == {"a.jsonl:2", "a.jsonl:3", "a.jsonl:6"}


def test_a_persona_in_a_system_prompt_is_a_leak(tmp_path: Path):
    rng = random.Random(7)
    persona = words(rng, 40)
    path = jsonl(tmp_path / "a.jsonl", [talk(words(rng, 40), " ".join(persona))])
    assert find_leaks(source_rows(str(path)), [passage(persona, 1)]).matches[0].kind == "holds"


def test_what_was_recorded_is_looked_for_without_what_was_written_for_the_row(tmp_path: Path):
    rng = random.Random(8)
    spoken, answer, aim = words(rng, 14), words(rng, 20), words(rng, 30)
    turns = (tuple(spoken[:7]), tuple(spoken[7:]))
    whole = (*aim, "user", *spoken[:7], "assistant", *spoken[7:])
    evaluation = [
        Passage("eval.jsonl:1", "t", whole, whole, frozenset(), (turns,)),
        Passage("eval.jsonl:2", "t", whole, whole, frozenset(), ((tuple(answer),),)),
        Passage("eval.jsonl:3", "t", ("a",), ("a",), frozenset(), ((("b", "c"),),)),
    ]
    rows = [talk([*spoken, *words(rng, 40)]), talk([*words(rng, 40), *answer]), talk(aim[:12])]
    report = find_leaks(source_rows(str(jsonl(tmp_path / "a.jsonl", rows))), evaluation)
    assert [(m.train, m.kind, m.evaluation) for m in report.matches] == [
        ("a.jsonl:1", "holds", "eval.jsonl:1"), ("a.jsonl:2", "holds", "eval.jsonl:2")
    ]  # fmt: skip
    assert report.short == 1
