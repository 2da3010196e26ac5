"""A limit counts rows, whatever forms they are played in; an empty list is a value."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.files import RawRow, write_rows
from soulkit.data.rows import first_rows, row_id
from soulkit.errors import ConfigError
from soulkit.tasks.kit.loading import RowsOnly, examples_to_play, passage_of, rows_with_tasks
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import TaskSpec
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import load_training_data
from tests.support.evaluation import FAST, soul, three_lines
from tests.support.road import synth, task_of
from tests.support.servers.openai_server import ScriptedServer

NOWHERE = "http://127.0.0.1:9/v1"
FORMS = [("tombench", "paper", 5), ("alignx_pair", "paper", 2), ("tombench", "reference", 1),
         ("alignx_pair", "reference", 1), ("hitom", "paper", 1)]  # fmt: skip


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize(("name", "protocol", "forms"), FORMS)
def test_a_limit_counts_rows_and_keeps_every_form(
    name: str, protocol: Any, forms: int, made: bool, tmp_path: Path
) -> None:
    task, source = task_of(name, protocol), "synth:30"
    if not made:
        source = str(tmp_path / "rows.jsonl")
        write_rows(Path(source), synth(name, 30, 1), data_source=name)
    every, some, more = (examples_to_play(task, source, limit=n).examples for n in (None, 10, 20))
    assert Counter(Counter(row_id(e.id) for e in some).values()) == {forms: 10}
    assert len(more) == 20 * forms and len(every) == 30 * forms
    assert {e.id for e in some} < {e.id for e in more} < {e.id for e in every}


def test_rows_that_name_one_form_are_rows_too(tmp_path: Path) -> None:
    rows = [{**row, "flip": bool(n % 2)} for n, row in enumerate(synth("alignx_demo", 8, 1))]
    write_rows(tmp_path / "rows.jsonl", rows, data_source="alignx_demo")
    source = str(tmp_path / "rows.jsonl")
    assert len(examples_to_play(task_of("alignx_demo"), source, limit=6).examples) == 6


def test_the_smallest_limit_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, synth("tomi", 5, 1))
    assert len(examples_to_play(task_of("tomi"), str(path), limit=1).examples) == 1
    with pytest.raises(ConfigError, match="--limit 0"):
        examples_to_play(task_of("tomi"), str(path), limit=0)


@pytest.mark.parametrize(("name", "protocol", "forms"), FORMS)
def test_the_plan_of_an_evaluation_counts_the_same(
    name: str, protocol: str, forms: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul("plan", "eval", "api", "--model", "m", "--base-url", NOWHERE, "--task", name,
                "--protocol", protocol, "--data", "synth:30", "--limit", 10,
                "--json") == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["episodes"] == 10 * forms


def training(**more: Any) -> TrainConfig:
    settings = {"model": "tiny", "full": True, "method": "grpo", "tasks": {"tombench": 1.0},
                "data": {"*": "synth:40"}, "steps": 1}  # fmt: skip
    return TrainConfig(**{**settings, **more})


def test_training_takes_so_many_rows() -> None:
    pool = load_training_data(training(limit=10)).pool
    assert Counter(Counter(row_id(e.id) for _, e in pool).values()) == {5: 10}


def test_so_do_the_dev_rows_of_a_training() -> None:
    dev = load_training_data(training(eval_every=1, dev_share=0.5, dev_limit=4)).dev
    assert Counter(Counter(row_id(e.id) for _, e in dev).values()) == {5: 4}


def test_the_first_rows_of_ids_in_any_order() -> None:
    ids = ["b-1", "a-0", "b-0", "c", "a-1"]
    assert first_rows(ids, 2, str) == ["b-1", "a-0", "b-0", "a-1"]
    assert first_rows(ids, None, str) == ids and first_rows(ids, 9, str) == ids


def test_what_a_run_says_of_its_rows_counts_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ToMBench asks each in five forms."""
    with ScriptedServer(answer="<answer>A</answer>") as server:
        for limit in (2, 3):
            assert soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                        "tombench", "--data", "synth:4", "--limit", limit, "--out",
                        tmp_path / str(limit), *FAST) == 0  # fmt: skip
    assert "rows tombench 3 (" in " ".join(capsys.readouterr().out.split())
    assert soul("compare", tmp_path / "3", tmp_path / "2") == 2
    assert "tombench: rows 3 vs 2, 2 in both" in three_lines(capsys.readouterr().err)[0]


# -- blank ---------------------------------------------------------------------------------------


AGENT = """
tasks:
  service:
    title: Service
    summary: Actions of a service.
    module: service:Service
    seats: {agent: actor}
    columns:
      wish: {type: text, audience: [agent]}
      actions: {type: %s, audience: [gold]}
    metric: {name: accuracy}
"""
CODE = """
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.types import Score


class Service(ChoiceTask):
    def parse(self, text):
        return text, "ok"

    def grade(self, example, answer):
        return float(answer == str(len(example.fields["actions"])))

    def gold_completion(self, example):
        return str(len(example.fields["actions"]))
"""


@pytest.fixture(params=["list", "any"])
def service(request: Any, tmp_path: Path) -> Path:
    """A task of one's own whose gold is a list that may be empty."""
    (tmp_path / "tasks.yaml").write_text(AGENT % request.param)
    (tmp_path / "service.py").write_text(CODE)
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "actor.md").write_text("{{ wish }}")
    return tmp_path / "tasks.yaml"


@pytest.mark.parametrize("split", ["test", "train"])
def test_a_required_list_may_be_empty(service: Path, split: Any, tmp_path: Path) -> None:
    rows = [{"wish": "a refund", "actions": [{"name": "refund"}]}, {"wish": "none", "actions": []}]
    write_rows(tmp_path / "rows.jsonl", rows)
    task = load_registry(service).task("service")
    loaded = examples_to_play(task, str(tmp_path / "rows.jsonl"), split=split)
    assert not loaded.bad
    assert sorted(len(e.fields["actions"]) for e in loaded.examples) == [0, 1]


@pytest.mark.parametrize("wish", ["", "  \n\t", None])
def test_white_space_and_null_are_blank(service: Path, wish: str | None, tmp_path: Path) -> None:
    rows = [{"wish": "a refund", "actions": []}, {"wish": wish, "actions": []}]
    write_rows(tmp_path / "rows.jsonl", rows)
    loaded = examples_to_play(load_registry(service).task("service"), str(tmp_path / "rows.jsonl"))
    assert len(loaded.examples) == 1 and [b.source for b in loaded.bad] == ["rows.jsonl:2"]


EMPTY = [
    ("twinvoice", "answer_choices", [], "not an index of the row's 0 reactions"),
    ("humanllm", "candidates", [], "outside its 0 candidates"),
    ("secret_keeper", "wanted", [], "needs wanted topics"),
    ("secret_keeper", "facts", {}, "needs wanted topics"),
    ("instructions", "checks", [], "checks cannot be used"),
    ("mirrorbench", "turns", [], "must be a conversation"),
    ("humanual_book", "prompt", [], "prompt is empty"),
    ("sim_doc", "human_user_queries", [], "has no text"),
    ("sim_math", "human_public_conversation", [], "must be a conversation"),
    ("coser", "dialogues", [], "not a list of messages"),
    ("coser", "major_characters", [], "no major_characters"),
    ("coser", "speaking_characters_w_env", [], "has no speakers"),
    ("coser", "plot", {}, "plot is empty or not an object"),
    ("coser", "character_profiles", {}, "character_profiles are empty or not an object"),
    ("coser", "character_profiles", [], "character_profiles are empty or not an object"),
    ("fantom", "correct_answer", [], "gold answer"),
    ("fantom", "correct_answer", {}, "gold answer"),
    ("tombench", "options_dict", {}, "fewer than two options"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "column", "value", "why"), EMPTY)
def test_a_task_that_cannot_play_an_empty_value_says_so_itself(
    name: str, column: str, value: object, why: str, tmp_path: Path, capsys
) -> None:
    (row,) = synth(name, 1, 0)
    for packed in ("circumstance", "raw"):
        if isinstance(row.get(packed), str):
            row |= json.loads(row.pop(packed))
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{**row, column: value}], data_source=name)
    assert soul("eval", "api", "--model", "m", "--base-url", NOWHERE, "--task", name, "--data",
                path) == 2  # fmt: skip
    assert why in three_lines(capsys.readouterr().err)[1]


def test_nobody_is_a_gold_where_people_are_asked_for() -> None:
    task = task_of("fantom")
    row = next(r for r in synth("fantom", 60, 0) if r["question_type"].endswith(":list"))
    example = task.example({**row, "correct_answer": []})
    assert example.fields["correct_answer"] == []


def test_a_passage_keeps_histories_and_golds_apart() -> None:
    kinds = {"count": "int", "talk": "any", "silence": "any", "odd": "any", "text": "text"}
    seen = {name: {"type": kind, "audience": ["reader"]} for name, kind in kinds.items()}
    columns = {**seen, "answer": {"audience": ["gold"]}}
    spec = TaskSpec.model_validate({"title": "T", "summary": "S", "seats": {"reader": "actor"},
                                    "columns": columns})  # fmt: skip
    messages = [{"role": "user", "content": "Where is it?"}, {"role": "bot", "content": "In here"}]
    fields = {"count": 7, "talk": messages, "silence": [], "odd": [{"a": "b c"}, "d"],
              "text": "Look here", "answer": "The box"}  # fmt: skip
    passage = passage_of(RowsOnly("t", spec), RowsOnly("t", spec).example(fields))
    talk, answer = (("where", "is", "it"), ("in", "here")), (("the", "box"),)
    assert passage.recorded == (talk, answer)


def test_rows_are_given_to_the_task_that_they_name() -> None:
    marks = ("tom", "", "tim")
    rows = [RawRow({"data_source": mark} if mark else {}, f"f:{mark}") for mark in marks]
    pairs, bad = rows_with_tasks(rows, {"tom": "tomi"})
    assert pairs == [("tomi", rows[0])]
    assert [row.why for row in bad] == [
        "it has no data_source", "unknown data_source 'tim'. Did you mean 'tom'?",
    ]  # fmt: skip
    assert rows_with_tasks(rows, {"tom": "tomi"}, "own")[0] == [("tomi", rows[0]), ("own", rows[1])]
