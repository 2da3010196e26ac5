"""Sotopia's files: small ones written here, and the originals where they are at hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import app as cli
from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.models.base import Cast, Player
from soulkit.play.engine import Engine, Job
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.sotopia.data import BONDS, HARD_SCENARIOS, PAIRS, PEOPLE, SCENES, profile_text
from soulkit.types import Example, Feedback, Record, Sampling
from tests.support.road import import_rows, original, run, synth, task_of
from tests.support.sotopia import LINE, table

SCENE = {
    "env_id": min(HARD_SCENARIOS),
    "codename": "lamp",
    "scenario": 'Two  people want one lamp. <p viewer="environment">It is broken.</p>',
    "agent_goals": [
        "Get it (<extra_info>Extra: you saw it first. <strategy_hint>Hint: pay</strategy_hint>"
        "</extra_info>)",
        "Get it too",
    ],
    "relationship": "3",
    "occupation_constraint": "nan",
}
PEOPLE_ROWS = [
    {"agent_id": "a", "first_name": "Ana", "last_name": "Brandt", "age": 41,
     "occupation": "Wildlife Biologist", "gender_pronoun": "She/her", "public_info": "Sings",
     "moral_values": ["Care", " Fairness"], "secret": "Cannot swim", "mbti": ""},
    {"agent_id": "b", "first_name": "Ben", "last_name": "Castell", "secret": "Is rich."},
]  # fmt: skip
PAIR = {"combo_id": "c", "env_id": SCENE["env_id"], "agent_ids": ["b", "a"]}
BOND = {"agent1_id": "a", "agent2_id": "b", "relationship": "4", "background_story": "Long ago."}


def files(folder: Path, **changed: Sequence[Any]) -> Path:
    rows = {SCENES: [SCENE], PEOPLE: PEOPLE_ROWS, PAIRS: [PAIR], BONDS: [BOND]} | changed
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_pair_is_two_rows_one_for_each_side(tmp_path: Path) -> None:
    imports = import_rows("sotopia", files(tmp_path))
    one, two = imports.rows
    assert (one["eval_position"], two["eval_position"]) == ("agent1", "agent2")
    assert {**one, "eval_position": "", "index": 0} == {**two, "eval_position": "", "index": 0}
    assert (one["agent1_name"], one["agent2_name"]) == ("Ben Castell", "Ana Brandt")
    assert one["scenario"] == "Two people want one lamp."
    assert one["agent1_goal"] == "Get it (Extra: you saw it first. Hint: pay)"
    assert one["relationship"] == "They are friends." and one["hard"] is True
    assert one["licence"].startswith("Apache-2.0") and PAIRS in one["provenance"]
    assert (
        "1 pairs in 1 scenarios" in imports.notes[0]
        and "In 1 pairs the relationship differs" in imports.notes[-1]
    )
    task = task_of("sotopia")
    examples = [task.example(row) for row in imports.rows]
    assert examples[0].cluster == examples[1].cluster and examples[0].id != examples[1].id


def test_a_profile_is_said_in_labelled_sentences() -> None:
    assert profile_text(PEOPLE_ROWS[0]) == (
        "Ana Brandt, 41 years old, wildlife biologist (she/her). Known to others: Sings. "
        "Moral values: Care, Fairness. Secret, known to nobody else: Cannot swim."
    )
    assert profile_text(PEOPLE_ROWS[1]) == "Ben Castell. Secret, known to nobody else: Is rich."


def test_the_folder_means_the_hard_scenarios_and_the_file_all(tmp_path: Path) -> None:
    easy = {**SCENE, "env_id": "01EASY"}
    pairs = [PAIR, {**PAIR, "env_id": "01EASY"}]
    folder = files(tmp_path, **{SCENES: [SCENE, easy], PAIRS: pairs})
    assert len(import_rows("sotopia", folder).rows) == 2
    assert [row["hard"] for row in import_rows("sotopia", folder / PAIRS).rows] == [True] * 2 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({PAIRS: [PAIR, {**PAIR, "agent_ids": ["a"]}]}, "two entries of"),
        ({PAIRS: [PAIR, {**PAIR, "agent_ids": ["a", "z"]}]}, "two entries of"),
        ({SCENES: [{**SCENE, "agent_goals": ["one"]}]}, "not have two goals"),
        ({SCENES: [{**SCENE, "scenario": " "}]}, "scenario"),
        ({SCENES: [{**SCENE, "env_id": "other"}]}, "is not in"),
        ({SCENES: [{**SCENE, "env_id": ["other"]}]}, "is not in"),
        ({PAIRS: [PAIR, {**PAIR, "agent_ids": [["a"], {"b": 1}]}]}, "two entries of"),
        ({PEOPLE: [*PEOPLE_ROWS[:1], {**PEOPLE_ROWS[1], "agent_id": {}}]}, "two entries of"),
    ],
)
def test_a_record_that_cannot_be_joined_is_named(
    changed: dict[str, Any], why: str, tmp_path: Path
) -> None:
    imports = import_rows("sotopia", files(tmp_path, **changed))
    assert len(imports.bad) == 1 and why in imports.bad[0].why
    assert imports.bad[0].source.startswith(PAIRS)


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=PAIRS):
        import_rows("sotopia", tmp_path)
    folder = files(tmp_path, **{PEOPLE: [{"name": "x"}]})
    with pytest.raises(DataError, match="original format"):
        import_rows("sotopia", folder)


def test_the_command_takes_the_folder(tmp_path: Path) -> None:
    folder, out = files(tmp_path), tmp_path / "rows.jsonl"
    assert cli.main(["data", "import", "sotopia", str(folder), "-o", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 2
    assert cli.main(["data", "audit", "sotopia", str(folder)]) == 0


def test_made_rows_are_pairs_of_both_sides() -> None:
    rows = synth("sotopia", 28, 3)
    assert rows[:6] == synth("sotopia", 6, 3)
    examples = to_examples(
        task_of("sotopia"), [RawRow(row, f"{i}") for i, row in enumerate(rows)]
    ).examples
    assert len(examples) == 28
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert {k: v for k, v in one.items() if k not in ("eval_position", "index")} == {
            k: v for k, v in two.items() if k not in ("eval_position", "index")
        }
    assert Counter(row["eval_position"] for row in rows) == {"agent1": 14, "agent2": 14}
    assert len({row["codename"] for row in rows}) == 7


# -- the originals ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals() -> list[Example]:
    """All 140 rows of the hard scenarios."""
    task = task_of("sotopia")
    return [task.example(row) for row in import_rows("sotopia", original("sotopia")).rows]


def test_the_hard_scenarios_of_the_release(originals: list[Example]) -> None:
    imports = import_rows("sotopia", original("sotopia"))
    assert len(imports.rows) == 140 and imports.bad == ()
    assert len({row["combo_id"] for row in imports.rows}) == 70
    assert {row["environment_id"] for row in imports.rows} == HARD_SCENARIOS
    assert len({example.id for example in originals}) == 140
    assert len({example.cluster for example in originals}) == 14
    every = import_rows("sotopia", original(f"sotopia/{PAIRS}"))
    assert len(every.rows) == 900 and every.bad == ()
    assert not any("<" in str(value) for row in every.rows for value in row.values())


def test_no_original_profile_or_goal_reaches_the_other_side(originals: list[Example]) -> None:
    task = task_of("sotopia")
    for example in originals:
        for seat, other in (("agent1", "agent2"), ("agent2", "agent1")):
            text = task.slot(example, seat, None).text
            assert str(example.fields[f"{other}_background"]) not in text
            goal = str(example.fields[f"{other}_goal"])
            assert goal == example.fields[f"{seat}_goal"] or goal not in text


@pytest.mark.slow
def test_what_rules_say_gives_nothing_away(originals: list[Example]) -> None:
    task = task_of("sotopia")
    for example in originals:
        drafts = (None, task.gold(example), task.wrong(example), task.canary(example, "Hi."))
        for draft in drafts:
            text = task.explain(example, draft, None)
            verdict = check_leak(Feedback(text=text, author="symbolic"), task.leak_view(example))
            assert verdict.leak == "", text


def checked(records: list[Record], examples: Sequence[Example]) -> None:
    assert len(records) == len(examples)
    for record in records:
        assert record.episode.failure is None, record.episode.failure
        assert record.episode.stop in ("max_turns", "left", "stale")
        assert record.score.value is not None


@pytest.mark.slow
def test_pairs_are_played_to_the_end_over_http(originals: list[Example]) -> None:
    task, rows = task_of("sotopia"), originals[::6]
    with table(actor=LINE) as (cast, _):
        jobs = [Job(task, example) for example in rows]
        checked(run(cast, Engine(cast, concurrency=32).run(jobs, lambda record: None)), rows)


@pytest.mark.slow
def test_pairs_are_played_to_the_end_by_a_local_model(
    originals: list[Example], tmp_path: Path
) -> None:
    from soulkit.models.local.sampler import LocalModel
    from soulkit.models.local.tiny import build_tiny

    task, rows = task_of("sotopia"), originals[1::7]
    words = [task.preview(example)[0].text for example in rows]
    model = LocalModel.load(build_tiny(tmp_path / "tiny", words, max_context=4096))
    with table() as (cast, _):
        actor = Player(model, Sampling(max_tokens=4, seed=1))
        mixed = Cast(actor=actor, partner=cast.partner, judges=cast.judges)
        jobs = [Job(task, example) for example in rows]
        work = Engine(mixed, concurrency=70).run(jobs, lambda record: None)
        checked(records := run(mixed, work), rows)
    for record in records:
        turns = record.episode.traces[0].turns
        for earlier, later in pairwise(turns):
            prefix = (*earlier.completion.prompt_ids, *earlier.completion.token_ids)
            assert earlier.completion.token_ids and later.completion.prompt_ids
            assert later.completion.prompt_ids[: len(prefix)] == prefix, "nothing is re-tokenised"
