"""The task of the demo: its hidden rule, its rows, its grades, and its partial feedback."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.errors import ConfigError, DataError
from soulkit.judge.leaks import check_leak
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Score
from tests.support.evaluation import ROOT, soul
from tests.support.road import episode_of, score_text, synth_examples, task_of

NAME = "cast_of_people"
CUES = ("job", "town", "pet")
COMBINATIONS = 343


@pytest.fixture(scope="module")
def people() -> Task:
    return task_of(NAME)


def made(task: Task, n: int, seed: int = 0, **options: str) -> list[dict[str, Any]]:
    return make_rows(task, n, seed, options)


def cues(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in CUES)


def words(reply: str) -> list[str]:
    return [word for word in reply.translate(dict.fromkeys(map(ord, "!?.,"))).split()
            if word not in ("Heard", "about", "the")]  # fmt: skip


# -- rows ------------------------------------------------------------------------------------------


def test_the_check_of_the_task_passes_on_people_and_lessons(tmp_path: Path, capfd: Any) -> None:
    rows = tmp_path / "lessons.jsonl"
    assert soul("data", "synth", NAME, "--kind", "lessons", "-n", 40, "-o", rows) == 0
    for data in ("synth:30", rows):
        capfd.readouterr()
        assert soul("tasks", "check", NAME, "--data", data, "--json") == 0
        (checked,) = json.loads(capfd.readouterr().out)["tasks"]
        assert {k: v for k, v in checked.items() if isinstance(v, list) and v} == {}


def test_each_cue_fixes_one_word_and_a_block_has_every_combination_once(people: Task) -> None:
    rows = made(people, 2 * COMBINATIONS)
    first, second = ([cues(row) for row in part] for part in (rows[:343], rows[343:]))
    assert len(set(first)) == COMBINATIONS and first == second
    for part, cue in enumerate(CUES):
        for text in ("reply", "ways"):
            pairs = {(row[cue], words(row[text])[part]) for row in rows}
            assert len(pairs) == 7 == len({word for _, word in pairs})
    assert len({(cues(row), row["name"]) for row in rows}) == len(rows)


def test_rows_follow_from_the_seed_and_the_rule_from_the_world(people: Task) -> None:
    rows = made(people, 20, seed=3)
    assert made(people, 9, seed=3) == rows[:9] and made(people, 20, seed=4) != rows
    other = made(people, 20, seed=3, world="1")
    assert [cues(row) for row in other] == [cues(row) for row in rows]
    assert sum(a["reply"] != b["reply"] for a, b in zip(rows, other, strict=True)) > 10


def test_lessons_tell_nothing_of_the_rule(people: Task) -> None:
    rows = made(people, 5000, kind="lessons")
    assert Counter(row["kind"] for row in rows) == {"facts": 2000, "person": 3000}
    facts = [row for row in rows if row["kind"] == "facts"]
    assert all(words(row["reply"]) == list(cues(row)) for row in facts)
    greetings: dict[str, Counter[str]] = {}
    for row in rows:
        if row["kind"] == "person":
            greetings.setdefault(row["job"], Counter())[words(row["reply"])[0]] += 1
    shares = [max(counts.values()) / counts.total() for counts in greetings.values()]
    assert len(shares) == 7 and max(shares) < 0.25  # one in seven, and chance


@pytest.mark.parametrize("values", [2, 7])
def test_a_smaller_world_has_fewer_values(people: Task, values: int) -> None:
    rows = made(people, values**3, values=str(values))
    assert len(set(map(cues, rows))) == values**3
    assert [len({row[cue] for row in rows}) for cue in CUES] == [values] * 3


@pytest.mark.parametrize("values", [1, 8])
def test_other_numbers_of_values_are_refused(people: Task, values: int) -> None:
    with pytest.raises(ConfigError, match=f"{values} values"):
        made(people, 1, values=str(values))


@pytest.mark.parametrize("reply", ["Ahoy there", "Hey, rain, Bye.", "Hey! Heard about the rain?"])
def test_a_row_whose_reply_has_another_form_is_refused(people: Task, reply: str) -> None:
    with pytest.raises(DataError, match="does not have the form"):
        people.example({**made(people, 1)[0], "reply": reply})


@pytest.mark.parametrize(
    ("job", "pet", "start"),
    [("judge", "hen", "a judge from Lyon with a hen"),
     ("actor", "owl", "an actor from Lyon with an owl")],
)  # fmt: skip
def test_the_prompt_is_a_sentence(people: Task, job: str, pet: str, start: str) -> None:
    row = {**made(people, 1)[0], "name": "Mia", "job": job, "town": "Lyon", "pet": pet}
    example = people.example({**row, "question": "How are things, Mia?"})
    (segment,) = people.preview(example)
    assert segment.text == f'Mia, {start}, is asked: "How are things, Mia?"'


# -- scores ----------------------------------------------------------------------------------------


def scored(text: str, stop: str = "stop", **options: str) -> Score:
    task = load_registry().task(NAME, options=options)
    row = {**made(task, 1)[0], "reply": "Hey! Heard about the rain? Cheers."}
    return score_text(task, task.example(row), text, stop)


@pytest.mark.parametrize(
    ("text", "right", "reward", "dense"),
    [
        ("Hey! Heard about the rain? Cheers.", 3, 1.0, 1.0),
        ("  Hey! Heard about the rain? Cheers.\n", 3, 1.0, 1.0),
        ("Hey! Heard about the rain? Bye.", 2, 0.1, 2 / 3),
        ("Cheers! Heard about the rain? Hey.", 1, 0.1, 1 / 3),
        ("Cheers! Heard about the Hey? rain.", 0, 0.1, 0.1),
    ],
)
def test_a_reply_is_right_if_its_three_words_are(
    text: str, right: int, reward: float, dense: float
) -> None:
    score = scored(text)
    assert (score.value, score.reward, score.status) == (float(right == 3), reward, "ok")
    assert score.metrics == {"words": pytest.approx(right / 3), "in_form": 1.0}
    other = scored(text, dense="true")
    assert (other.value, other.reward) == (score.value, pytest.approx(dense))


@pytest.mark.parametrize(
    "text",
    ["", "Hey rain Cheers", "Hey! Heard about the rain?", "hey, rain, cheers.",
     "Hey! Heard about the rain? Cheers. Bye.", "Hey! Heard about the cold rain? Cheers."],
)  # fmt: skip
@pytest.mark.parametrize("dense", ["false", "true"])
def test_another_form_earns_nothing(text: str, dense: str) -> None:
    score = scored(text, dense=dense)
    assert (score.value, score.reward) == (0.0, 0.0)
    assert score.status in ("malformed", "empty")
    assert score.metrics == {"words": 0.0, "in_form": 0.0}


def test_a_reply_that_was_cut_off_is_not_in_form() -> None:
    score = scored("Hey! Heard about the rain? Cheers.", stop="length")
    assert (score.value, score.reward, score.metrics["in_form"]) == (0.0, 0.0, 0.0)


def test_people_with_the_same_cues_are_one_observation(people: Task) -> None:
    examples = [people.example(row) for row in made(people, 3 * COMBINATIONS)]
    by_cluster = {example.cluster: cues(dict(example.fields)) for example in examples}
    assert len(by_cluster) == len(set(by_cluster.values())) == COMBINATIONS


# -- feedback --------------------------------------------------------------------------------------


def test_feedback_names_two_of_the_three_ways_in_other_words_than_the_reply(people: Task) -> None:
    for example in synth_examples(NAME, COMBINATIONS):
        text = people.explain(example, None, None)
        assert text is not None
        said, ways = set(text.replace(".", "").split()), set(example.fields["ways"].split())
        assert len(said & ways) == 2 and not said & set(words(example.fields["reply"]))
        assert not check_leak(people.symbolic(text), people.leak_view(example)).leak


def test_another_draft_gets_other_feedback_and_the_same_draft_the_same(people: Task) -> None:
    example = synth_examples(NAME, 1)[0]
    draft = episode_of(people, example, "Hey! Heard about the rain? Cheers.")  # type: ignore[arg-type]
    texts = Counter(people.explain(example, replace(draft, rollout=i), None) for i in range(300))
    assert people.explain(example, draft, None) in texts
    assert len(texts) == 3 and min(texts.values()) > 70


def test_questions_about_the_cues_get_no_feedback(people: Task) -> None:
    fact = people.example(made(people, 1, kind="lessons")[0])
    assert people.explain(fact, None, None) is None


# -- rows of people as an example of clusters ------------------------------------------------------


@pytest.mark.torch
def test_dev_rows_of_a_training_are_combinations_that_it_never_shows() -> None:
    from soulkit.train.setup.data import load_training_data
    from tests.support.training import config

    settings: dict[str, Any] = {
        "tasks": {NAME: 1.0}, "data": {NAME: "synth:1024"}, "eval_every": 2, "coach": "terse",
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


def test_the_check_warns_of_people_who_differ_in_their_names_alone(
    people: Task, tmp_path: Path, capfd: Any
) -> None:
    rows, others = tmp_path / "people.jsonl", tmp_path / "others.jsonl"
    assert soul("data", "synth", NAME, "-n", 1024, "-o", rows) == 0
    capfd.readouterr()
    assert soul("data", "check", rows) == 0
    declared = capfd.readouterr()
    assert "343 clusters" in declared.out and "equal except for names" not in declared.err
    tasks = without_clusters(people, tmp_path / "own")
    synth = ("data", "synth", "others", "--tasks", tasks, "-n", 1024, "-o", others)
    assert soul(*synth) == 0 and soul("data", "check", others, "--tasks", tasks) == 0
    warned = capfd.readouterr().err
    # Without the declaration nothing says that the town is more than a name: 7 jobs and 7 pets.
    assert "1024 rows in 1024 clusters of others are equal except for names" in warned
    assert "only 49 of them are distinct" in warned and "others.jsonl:" in warned
    assert soul("data", "check", others, "--tasks", tasks, "--json") == 0
    (checked,) = json.loads(capfd.readouterr().out)["tasks"]
    assert checked["equal_up_to_names"]["distinct"] == 49


def without_clusters(people: Task, folder: Path) -> Path:
    """The tasks file of the same task under another name, with every row a cluster of its own."""
    shutil.copytree(people.spec.home.folder, folder)
    declared = yaml.safe_load((ROOT / "tasks.yaml").read_text("utf-8"))["tasks"][NAME]
    del declared["cluster"], declared["files"]
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"tasks": {"others": declared}}))
    return folder / "tasks.yaml"
