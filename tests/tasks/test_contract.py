"""What every built-in task keeps to: rows, gold, feedback, prompts, and what is read from a file.

The checks run over the whole of tasks.yaml, so a task that is added there is checked as well.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from soulkit.data.files import read_rows, write_rows
from soulkit.judge.leaks import check_leak
from soulkit.play.engine import Engine, Job
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import examples_to_inspect, load_examples
from soulkit.tasks.kit.made_rows import made_rows, split_seed
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.row_checks import check_rows
from soulkit.tasks.kit.selfcheck import check_task, scripted_cast, silent_cast
from soulkit.tasks.kit.spec import READERS
from soulkit.types import Episode, Example, Feedback, Line, Score
from tests.support.road import (
    EVERY,
    TASKS,
    makeable,
    run,
    score_text,
    synth,
    synth_examples,
    task_of,
)

PROTOCOLS = ("paper", "reference")
SOUL = load_registry().suite("soul-27")
PLAYABLE = sorted(set(makeable()) & set(TASKS))
TAUGHT = [name for name in TASKS if task_of(name).spec.feedback.coaches]
ADVICE = Feedback(text="Look again at who was there.", author="symbolic")
Row = dict[str, Any]


# -- rows ----------------------------------------------------------------------------------------


PROMPTED_BY_USER = "agent_chat"
"""Its actor is an agent with a prompt of its own."""
FIXED = "instructions"
"""Its rows are the same forty whatever the seed."""


@pytest.mark.parametrize("name", sorted(set(makeable()) - {FIXED}))
def test_made_rows_follow_from_their_seed_and_nearly_all_differ(name: str) -> None:
    rows = synth(name, 50, 3)
    assert synth(name, 10, 3) == rows[:10] != synth(name, 10, 5)
    ids = [e.id for row in rows for e in task_of(name).examples(row)]
    assert len(set(ids)) >= 0.9 * len(ids)
    trained = {e.id for row in synth(name, 50, 4) for e in task_of(name).examples(row)}
    assert len(trained & set(ids)) <= 0.1 * len(ids), "other seeds give other rows"


MADE_ROWS = {  # hash of 120 rows of one seed
    "alignx_arbitrary": "d33dd643",
    "alignx_demo": "a2816431",
    "alignx_history16": "4f6c5192",
    "alignx_pair": "c2fb52dd",
    "alignx_ugc": "4d49b324",
    "behaviorchain": "b92bb3ab",
    "cast_of_people": "6d37f953",
    "coser": "22ccbcbb",
    "fantom": "fdafffbd",
    "hitom": "2ed032ef",
    "humanllm": "0a6b0248",
    "humanual_book": "ab9e2e84",
    "humanual_chat": "05251ed0",
    "humanual_email": "3353aeef",
    "humanual_news": "cc1a13f9",
    "humanual_opinion": "ecc48fc2",
    "humanual_politics": "1a56a592",
    "instructions": "d9adb892",
    "lifechoices": "4a7bc92b",
    "mirrorbench": "b7494a70",
    "mistakes": "0b1da025",
    "mistakes_worked": "0b1da025",
    "mmtom": "9645a863",
    "paratomi": "dd42105f",
    "agent_chat": "5c29754d",
    "person_chat": "5c29754d",
    "secret_keeper": "f62f99e3",
    "sim_doc": "bf735da7",
    "sim_math": "b395e9ab",
    "social_r1": "fe589249",
    "socsci210": "1c5c0e18",
    "sotopia": "1fd5c1c8",
    "tau_usi": "29fbec41",
    "tombench": "eea37fe3",
    "tomi": "32bcc871",
    "twinvoice": "205ce34e",
    "userllm": "3dd414fb",
}


def test_made_rows_are_those_of_earlier_versions() -> None:
    texts = {name: json.dumps(synth(name, 120, 3), sort_keys=True) for name in sorted(makeable())}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}
    assert hashes == MADE_ROWS


def test_training_rows_come_from_even_seeds_and_test_rows_from_odd_ones() -> None:
    assert [split_seed(3, "train"), split_seed(3, "test"), split_seed(4, "train")] == [6, 7, 8]
    rows = [
        [row.fields for row in made_rows(task_of("tomi"), spec, 3, split)]
        for spec, split in (("synth:5", "train"), ("synth:5", "test"), ("synth:5@3", "test"))
    ]
    assert rows == [synth("tomi", 5, 6), synth("tomi", 5, 7), synth("tomi", 5, 7)]


@pytest.mark.parametrize("name", EVERY)
def test_a_row_has_declared_columns_and_an_id_that_follows_from_them(name: str) -> None:
    task, rows = task_of(name), synth(name, 12, 5)
    spec = task.spec
    assert all(set(row) <= {*spec.columns, *spec.unpack} for row in rows)
    unnamed = [column for column, declared in spec.columns.items() if not declared.identity]
    for row in rows:
        example = task.example(row)
        assert task.example(row).id == example.id
        assert task.example({**row, **dict.fromkeys(unnamed)}).id == example.id
        assert set(example.audience) >= set(spec.columns)
        seats = {*spec.seats, *example.seats}  # a row may have seats of its own
        assert {r for a in example.audience.values() for r in a} <= {*seats, *READERS}


WHOLE = ("behaviorchain", "sim_doc", "sim_math")
"""Tasks whose rows are JSON text under `raw`."""


def typed(name: str, n: int = 12) -> list[Row]:
    """Made rows whose columns have one type each, as the columns of a released file have."""
    rows = [{k: v for k, v in row.items() if k not in ("events", "index")}
            for row in synth(name, n, 3)]  # fmt: skip
    for row in rows:
        if name == "mirrorbench":
            row["metadata"] = {k: str(v) for k, v in row["metadata"].items()}
        if isinstance(row.get("choices"), dict):
            row["choices"] = row["choices"]["text"]
    return rows


def wrapped(name: str, row: Row, index: int) -> Row:
    """A row as a released file has it: under `extra_info`, beside a dummy prompt."""
    info = {"raw": json.dumps(row)} if name in WHOLE and "raw" not in row else row
    return {"prompt": [{"role": "user", "content": "x"}], "extra_info": {**info, "index": index},
            "data_source": load_registry().spec(name).files.data_source[0]}  # fmt: skip


def as_json(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: as_arrays(v) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), dtype=object)
    array[:] = [as_arrays(item) for item in value]
    return array


def ids_in(name: str, path: Path) -> list[str]:
    loaded = load_examples(task_of(name), [path])
    assert not loaded.bad and not loaded.skipped
    return sorted(example.id for example in loaded.examples)


@pytest.mark.parametrize("name", SOUL)
def test_a_row_is_the_same_example_whoever_wrote_the_file(name: str, tmp_path: Path) -> None:
    rows = typed(name)
    write_rows(tmp_path / "plain.jsonl", rows)
    write_rows(tmp_path / "copy.parquet", rows)
    ids = ids_in(name, tmp_path / "plain.jsonl")
    assert ids_in(name, tmp_path / "copy.parquet") == ids
    shapes: dict[str, Callable[[Any], Any]] = {
        "as is": lambda v: v, "json": as_json, "numpy": as_arrays,
    }  # fmt: skip
    for shape, change in shapes.items():
        table = [
            wrapped(name, {k: change(v) for k, v in row.items()} if name not in WHOLE else row, i)
            for i, row in enumerate(rows)
        ]
        path = tmp_path / f"{shape}.parquet"
        # With the index that a data frame brings along.
        pd.DataFrame(table, index=range(7, 7 + len(table))).to_parquet(path)
        assert ids_in(name, path) == ids, shape


@pytest.mark.parametrize("name", SOUL)
def test_made_rows_pass_the_check_of_rows(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", synth(name, 50, 3), data_source=name)
    checked = check_rows(task_of(name), *read_rows(tmp_path / "rows.jsonl"))
    assert (checked.task, checked.rows, checked.bad, checked.ignored) == (name, 50, (), ())
    assert checked.usable >= 45
    examples = load_examples(task_of(name), [tmp_path / "rows.jsonl"]).examples
    assert checked.clusters == len({example.cluster for example in examples})
    tags = {tag for example in examples for tag in example.tags}
    assert checked.tags == {
        tag: Counter(e.tags[tag] for e in examples if tag in e.tags) for tag in tags
    }


# -- gold, wrong answers and feedback ------------------------------------------------------------

OUT_OF_REACH = {("sim_math", "reference"), ("sim_doc", "reference")}
"""Some rows lack a part of the score, which counts 0 there: nobody could have the maximum."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", makeable())
def test_gold_is_best_and_a_wrong_answer_is_not(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    report = check_task(task, examples_to_inspect(task, "synth:12"))
    assert report.rows > 0
    assert (report.gold_fails, report.wrong_passes, report.wrong_unread) == ((),) * 3
    assert report.breaks == ()
    if protocol == "paper":  # prompts of the paper alone are not rendered under `reference`
        assert (report.warnings, report.unrendered) == ((), ())
    assert bool(report.no_gold) == ((name, protocol) in OUT_OF_REACH)


@cache
def rule_scored(name: str, protocol: str) -> tuple[Example, ...]:
    """Rows that are scored without a judge."""
    task = task_of(name, protocol)
    rows = synth_examples(name, 30, protocol)
    return tuple(row for row in rows if "judge" not in task.calls(row))


def score_of(task: Task, example: Example, episode: Episode) -> Score:
    return run(silent_cast(), task.judged(example, episode, silent_cast()))


SHAPED = {"cast_of_people": 0.1}
"""Tasks whose training reward is not the score → the reward of a wrong answer in form."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", [name for name in PLAYABLE if rule_scored(name, "paper")])
def test_a_score_by_rules_says_its_protocol_and_prompts(name: str, protocol: str) -> None:
    task = task_of(name, protocol)
    for example in rule_scored(name, protocol):
        gold = task.gold(example)
        score = score_of(task, example, gold)
        assert (score.value, score.reward, score.status) == (task.spec.metric.high,) * 2 + ("ok",)
        assert score.protocol == protocol and score.prompts
        if wrong := task.wrong(example):
            score = score_of(task, example, wrong)
            assert score.reward == SHAPED.get(name, score.value)
            assert score.value < task.spec.metric.high
            assert score.value == task.spec.metric.low or not task.spec.metric.binary
            assert score.status in ("ok", "salvaged")


def speaks_by_rules(name: str) -> bool:
    """Whether rules coach, and not by a worked example, which gives the answer away by design."""
    feedback = task_of(name).spec.feedback
    return "symbolic" in feedback.coaches and feedback.kind == "coach"


@pytest.mark.parametrize("name", filter(speaks_by_rules, TAUGHT))
def test_feedback_from_rules_never_leaks(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 20):
        rng = random.Random(example.id)
        drafts = [e for e in (task.gold(example), task.wrong(example)) if e is not None]
        scored = [(e, score_of(task, example, e)) for e in drafts]
        texts = [task.explain(example, e, s) for e, s in scored if s.scored]
        texts += [task.explain(example, None, None), task.rehearse(example, rng)]
        view = task.leak_view(example)
        if isinstance(task, ChoiceTask) and view.letters:
            replies = [f"<answer>{letter}</answer>" for letter in (*view.letters[:5], "?")]
            scores = [score_text(task, example, reply) for reply in (*replies, "hm", "")]
            scores.append(score_text(task, example, "so", "length"))
            lessons = [task.explain(example, None, score) for score in scores]
            assert all(lessons) and len(set(lessons)) > 1, example.fields
            texts += lessons
        for text in filter(None, texts):
            checked = check_leak(Feedback(text=text, author="symbolic"), view)
            assert checked.leak == "" and (checked.blind or 0) <= (checked.chance or 0), text
        assert any(texts)


# -- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*TASKS} - {PROMPTED_BY_USER}))
def test_a_copy_is_the_draft_with_nothing_in_the_slot(name: str) -> None:
    task = task_of(name)
    for example in synth_examples(name, 12):
        draft, refined = (
            task.gold(example, feedback).traces[0].turns[0].context for feedback in (None, ADVICE)
        )
        assert len(draft) == len(refined)
        assert sum(a.text != b.text for a, b in zip(draft, refined, strict=True)) == 1
        bare = [segment.text if segment.bare is None else segment.bare for segment in refined]
        assert bare == [segment.text for segment in draft]
        assert ADVICE.text in "".join(segment.text for segment in refined)


def marked(value: Any, mark: str) -> Any:
    """The value with every text in it replaced by `mark`."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {key: marked(inner, mark) for key, inner in value.items()}
    return [marked(inner, mark) for inner in value] if isinstance(value, list | tuple) else value


def with_private_strings(example: Example) -> tuple[Example, dict[str, str]]:
    """The example with a string of its own in every field, and field → string."""
    marks = {name: f"zq{i}zq" for i, name in enumerate(example.fields) if example.fields[name]}
    fields = {name: marked(v, marks.get(name, "")) for name, v in example.fields.items()}
    return replace(example, fields=fields), marks


def contexts_of(task: Any, example: Example) -> dict[str, str]:
    """Seat → all it reads."""
    seats = {s: "".join(m.text for m in c) for s, c in task.previews(example).items()}
    if hasattr(task, "partner_context"):
        brief = task.partner_context(example, [])
        seats[task.partner_seat(example)] = "".join(s.text for s in brief)
    for seat in seats_called(task, example) - set(seats):
        seats[seat] = task.slot(example, seat, None).text
    return seats


def seats_called(task: Any, example: Example) -> set[str]:
    """The seats whose players an episode may call: a recorded partner is nobody."""
    calls = task.calls(example)
    return {seat for seat, role in example.seats.items() if calls.get(role)}


@pytest.mark.parametrize("name", TASKS)
def test_no_seat_reads_a_field_that_is_not_for_it(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        contexts = contexts_of(task, example)
        assert set(contexts) == seats_called(task, example)
        for seat, text in contexts.items():
            shown = {field for field, mark in marks.items() if mark in text}
            allowed = {f for f in marks if seat in example.audience[f]}
            assert shown <= allowed, f"{seat} reads {shown - allowed}"
            assert shown or not allowed


@pytest.mark.parametrize("name", TAUGHT)
def test_the_coach_does_not_read_the_gold(name: str) -> None:
    task = task_of(name)
    for original in synth_examples(name, 12):
        example, marks = with_private_strings(original)
        episode = replace(task.gold(original), transcript=(Line("actor", "I wonder."),))
        score = Score(value=0.0, reward=0.0)
        text = task.prompts.render("coach", **task.coach_view(example, episode, score))
        hidden = {f for f in marks if "coach" not in example.audience[f] or f in task.gold_fields}
        shown = {f for f in hidden if marks[f] in text}
        # Of what is not told yet the coach learns the topic; here topic and value are one string.
        assert shown <= ({"facts"} if name == "secret_keeper" else set())


# -- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PLAYABLE)
def test_what_was_played_is_read_back_from_its_file_as_it_was(
    name: str, protocol: str, tmp_path: Path
) -> None:
    """So a run that goes on, and whoever scores it again, has what the first start had."""
    task, path = task_of(name, protocol), tmp_path / "episodes.jsonl"
    records = []
    for example in synth_examples(name, 2, protocol):
        cast = scripted_cast(task, task.gold(example))
        run(cast, Engine(cast).run([Job(task, example)], records.append))
    writer = RecordWriter(path)
    writer.write(*records)
    writer.close()
    again = load_records(path)
    assert again and [asdict(r) for r in again] == [asdict(r) for r in records]
    assert {record.score.protocol for record in again} == {protocol}


# -- one task each -------------------------------------------------------------------------------


def test_a_gold_dialogue_with_the_secret_in_it_scores_nothing() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper"):
        gold = task.gold(example)
        slip = Line("keeper", f"And the {example.fields['secret']['value']}.")
        episode = replace(gold, transcript=(*gold.transcript[:-1], slip))
        assert score_of(task, example, episode).value == 0


def test_feedback_on_a_dialogue_names_topics_and_no_values() -> None:
    task = task_of("secret_keeper")
    for example in synth_examples("secret_keeper", 12):
        values = [f["value"] for f in (*example.fields["facts"], example.fields["secret"])]
        episode = replace(task.gold(example), transcript=(Line("keeper", "I wonder."),))
        view = task.coach_view(example, episode, score_of(task, example, episode))
        texts = [task.explain(example, e, None) for e in (task.gold(example), None)]
        for text in (*texts, task.prompts.render("coach", **view)):
            assert text and not any(value.lower() in text.lower() for value in values)
        assert all(fact["topic"] in text for fact in example.fields["facts"])


def test_texts_over_their_word_budget_are_cut_for_every_model_and_noted() -> None:
    task, (example,) = task_of("tomi"), synth_examples("tomi", 1)
    words = " \n".join(f"w{i}" for i in range(3005))
    long = replace(example, fields={**example.fields, "story": words})
    (segment,) = task.context(long, None)
    assert "w2999 [...]" in segment.text and "w3000" not in segment.text
    assert "w0 \nw1" in segment.text, "line breaks survive the cut"
    assert task.gold(long).notes["cut_words"] == {"story": 5}
