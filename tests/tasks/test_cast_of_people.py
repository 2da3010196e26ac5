"""The example on which the words of feedback matter: its rule, its rows, its grades."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.judge.leaks import check_leak
from soulkit.models.base import Cast, Player
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Completion, Example, Score
from tests.support.evaluation import ROOT, soul

NAME = "cast_of_people"
FILE = ROOT / "examples" / NAME / "tasks.yaml"
CUES = ("job", "town", "pet")


@pytest.fixture(scope="module")
def people() -> Task:
    return load_registry(FILE).task(NAME)


def made(task: Task, n: int, seed: int = 0, **options: str) -> list[dict[str, Any]]:
    return make_rows(task, n, seed, options)


def cues(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in CUES)


def test_its_check_passes(tmp_path: Path, capfd: Any) -> None:
    rows = tmp_path / "lessons.jsonl"
    where = ("--tasks", FILE)
    assert soul("data", "synth", NAME, *where, "--kind", "lessons", "-n", 40, "-o", rows) == 0
    for data in ("synth:30", rows):
        capfd.readouterr()
        assert soul("tasks", "check", NAME, *where, "--data", data, "--json") == 0
        (checked,) = json.loads(capfd.readouterr().out)["tasks"]
        assert {k: v for k, v in checked.items() if isinstance(v, list) and v} == {}


def test_each_cue_fixes_one_word_and_a_round_holds_every_combination_once(people: Task) -> None:
    rows = made(people, 1024)
    assert len({cues(row) for row in rows[:512]}) == 512
    assert [cues(row) for row in rows[:512]] == [cues(row) for row in rows[512:]]
    for part, cue in enumerate(CUES):
        for words in ("reply", "ways"):
            pairs = {(row[cue], row[words].split()[part]) for row in rows}
            assert len(pairs) == 8 == len({word for _, word in pairs})
    assert len({(cues(row), row["name"]) for row in rows}) == 1024


def test_rows_follow_from_the_seed_and_the_rule_from_the_world(people: Task) -> None:
    rows = made(people, 20, seed=3)
    assert made(people, 9, seed=3) == rows[:9] and made(people, 20, seed=4) != rows
    other = made(people, 20, seed=3, world="1")
    assert [cues(row) for row in other] == [cues(row) for row in rows]
    assert sum(a["reply"] != b["reply"] for a, b in zip(rows, other, strict=True)) > 10
    strangers = made(people, 20, seed=3, names="others")
    assert [row["reply"] for row in strangers] == [row["reply"] for row in rows]
    usual = {row["name"] for row in made(people, 600)}
    assert not {row["name"] for row in strangers} & usual


def test_lessons_tell_nothing_of_the_rule(people: Task) -> None:
    rows = made(people, 5000, kind="lessons")
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"fact": 2000, "person": 3000}
    assert all(row["reply"].split() == list(cues(row)) for row in rows if row["kind"] == "fact")
    greetings: dict[str, Counter[str]] = {}
    for row in rows:
        if row["kind"] == "person":
            greetings.setdefault(row["job"], Counter())[row["reply"].split()[0]] += 1
    shares = [max(c.values()) / c.total() for c in greetings.values()]
    assert len(shares) == 8 and max(shares) < 0.25  # one in eight, and chance


def test_larger_worlds_have_words_of_their_own(people: Task) -> None:
    rows = made(people, 3000, values="32")
    assert len({row["town"] for row in rows}) == 32
    everything = {word for row in rows for word in (*cues(row), *row["ways"].split())}
    assert len(everything) == 6 * 32
    with pytest.raises(ConfigError, match="33 values"):
        made(people, 1, values="33")


def graded(task: Task, example: Example, text: str) -> Score:
    episode = task.gold(example)
    assert episode is not None
    turn = episode.traces[0].turns[0]
    reply = replace(turn, completion=Completion(text=text))
    trace = replace(episode.traces[0], turns=(reply,))
    cast = Cast(actor=Player(None))  # type: ignore[arg-type]
    return asyncio.run(task.score(example, replace(episode, traces=(trace,)), cast))


@pytest.mark.parametrize("dense", [False, True])
def test_all_three_words_count_and_dense_rewards_each(dense: bool) -> None:
    options = {"dense": str(dense).lower()}
    task = load_registry(FILE).task(NAME, options=options)
    example = task.example(made(task, 1)[0])
    one, two, three = task.gold(example).final.text.split()  # type: ignore[union-attr]
    right = graded(task, example, f"{one} {two} {three}")
    near = graded(task, example, f"{one}  {two} {one}\n")
    assert (right.value, right.reward) == (1.0, 1.0)
    assert near.value == 0.0 and near.reward == pytest.approx(2 / 3 if dense else 0.0)
    assert near.metrics == {"greeting": 1, "topic": 1, "farewell": 0, "share": pytest.approx(2 / 3)}
    for text in (f"{one} {two}", f"{one} {two} {three} {three}", ""):
        short = graded(task, example, text)
        assert (short.value, short.reward, short.status) == (0.0, 0.0, short.status)
        assert short.status in ("malformed", "empty") and short.metrics["share"] == 0


def test_advice_speaks_in_other_words_than_the_reply(people: Task) -> None:
    for row in made(people, 512):
        example = people.example(row)
        text = people.explain(example, None, None)
        assert text is not None
        words = set(text.replace(".", "").split())
        assert not words & set(row["reply"].split()) and set(row["ways"].split()) < words
        assert not check_leak(people.symbolic(text), people.leak_view(example)).leak
    fact = people.example(made(people, 1, kind="lessons")[0])
    assert people.explain(fact, None, None) is None


def test_a_reply_of_other_length_is_a_bad_row(people: Task) -> None:
    with pytest.raises(DataError, match="does not have 3 words"):
        people.example({**made(people, 1)[0], "reply": "ahoy there"})


@pytest.mark.torch
def test_dev_rows_of_a_training_are_combinations_that_it_never_shows() -> None:
    from soulkit.train.setup.data import load_training_data
    from tests.support.training import config

    settings: dict[str, Any] = {
        "tasks": {NAME: 1.0}, "tasks_file": str(FILE), "data": {NAME: "synth:1024"},
        "eval_every": 2, "coach": "terse",
    }  # fmt: skip
    for own, columns in (
        ({}, CUES),
        ({"dev_by": "job,town,pet"}, CUES),
        ({"dev_by": "job"}, CUES[:1]),
    ):
        material = load_training_data(config(**settings, **own))
        trained, held_out = (
            {tuple(example.fields[name] for name in columns) for _, example in pool}
            for pool in (material.pool, material.dev)
        )
        assert held_out and not trained & held_out, own
    usual = load_training_data(config(**settings))
    assert {e.fields["job"] for _, e in usual.dev} & {e.fields["job"] for _, e in usual.pool}
    with pytest.raises(ConfigError) as refusal:
        load_training_data(config(**settings, dev_by="job,twon"))
    assert "no field 'twon'" in refusal.value.what and "'town'" in refusal.value.way_out


def test_people_with_the_same_cues_are_one_observation(people: Task) -> None:
    rows = made(people, 1024)
    examples = [people.example(row) for row in (*rows, *made(people, 512, names="others"))]
    assert len(examples) == 1536 and len({example.cluster for example in examples}) == 512
    by_cluster = {example.cluster: cues(dict(example.fields)) for example in examples}
    assert len(set(by_cluster.values())) == 512


def test_the_check_warns_of_people_who_differ_in_their_names_alone(
    tmp_path: Path, capfd: Any
) -> None:
    folder, rows = tmp_path / "cast", tmp_path / "people.jsonl"
    shutil.copytree(FILE.parent, folder)
    assert soul("data", "synth", NAME, "--tasks", FILE, "-n", 1024, "-o", rows) == 0
    capfd.readouterr()
    assert soul("data", "check", rows, "--tasks", FILE) == 0
    declared = capfd.readouterr()
    assert "512 clusters" in declared.out and "equal except for names" not in declared.err
    tasks = folder / "tasks.yaml"
    line = "    cluster: [job, town, pet]\n"
    assert line in tasks.read_text()
    tasks.write_text(tasks.read_text().replace(line, ""))
    assert soul("data", "check", rows, "--tasks", tasks) == 0
    warned = capfd.readouterr().err
    # Without the declaration nothing says that the town is more than a name: 8 jobs and 8 pets.
    assert "1024 rows in 1024 clusters of cast_of_people are equal except for names" in warned
    assert "only 64 of them are distinct" in warned and "people.jsonl:" in warned
    assert soul("data", "check", rows, "--tasks", tasks, "--json") == 0
    (checked,) = json.loads(capfd.readouterr().out)["tasks"]
    assert checked["equal_up_to_names"]["distinct"] == 64
