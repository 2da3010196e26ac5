"""Original files where rows are wanted: they are named as such, with the command that imports them.

The files of the releases themselves where a copy is at hand, small ones of the same form elsewhere.

Files as the release has them, and as they should not be: every task, whoever wrote the Parquet.

A released file keeps the row in the struct `extra_info` beside a dummy prompt. Its nested values
may be arrays, or JSON text; a column may hold something else than in the last release; and files
that were joined have the keys of all, None where a file had none.

Made rows of tasks with lettered options, through a file as they are released in: joined structs.

One Parquet file holds rows of several tasks under `extra_info`; every row then has the keys of all,
None where a key is another task's.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soulkit.cli import app as cli
from soulkit.data.files import BadRow, RawRow, flatten, read_rows, write_rows
from soulkit.data.rows import ColumnsError
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.importing import WrongShape, import_records, mapped_columns
from soulkit.tasks.kit.loading import examples_to_inspect, examples_to_play, load_examples
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import soul, three_lines
from tests.support.road import import_rows, importable, original, synth, task_of
from tests.tasks.test_contract import ids_in, typed, wrapped

NOWHERE = "http://127.0.0.1:9/v1"
STORY = "1 Ada entered the attic.\n2 The pen is in the red_box.\n3 Ada moved the pen to the bag."
HITOM = {
    "prompting_type": "CoTP", "deception": False, "story_length": 1, "question_order": 0,
    "sample_id": 0, "story": STORY, "question": "Where is the pen really?",
    "choices": "A. red_box, B. bag", "answer": "bag",
}  # fmt: skip
SURVEY = {
    "instruction": "Answer as this person.", "study_id": "s1", "condition_num": 1,
    "input": "Demographics: Age: 74\n\nScenario: Only return an integer from 1 to 5, where 1 means "
    "never and 5 means always.", "output": "Response: 2",
}  # fmt: skip
LESSON = {
    "user_queries": ["help me"], "ai_responses": ["gladly"], "workerId": "w1", "model": "m",
    "document_type": "letter", "intent": "thank an aunt",
}  # fmt: skip
BILINGUAL = {
    "能力\nABILITY": "Belief: x", "序号\nINDEX": 7, "故事": "小梅走了。", "问题": "小梅在哪里？",
    "选项A": "家里", "选项B": "学校", "STORY": "Mei went.", "QUESTION": "Where is Mei?",
    "OPTION-A": "At home", "OPTION-B": "School", "答案\nANSWER": "B",
}  # fmt: skip
QUIZ = {"id": "q1", "question": "Where do fish live?", "answerKey": "A",
        "choices": {"label": ["A", "B"], "text": ["sea", "tree"]}}  # fmt: skip
PAIR = {"prompt": "How do I run?", "chosen": "Slowly.", "rejected": "Fast.", "profile": "Old"}
CLARIQ = {"initial_request": "tell me of ships", "question": "which ones", "answer": "old ones",
          "facet_desc": "find old ships", "topic_id": 1, "facet_id": "F1"}  # fmt: skip
FORMS: dict[str, Mapping[str, Any]] = {
    "hitom": HITOM, "socsci210": SURVEY, "sim_doc": LESSON, "tombench": BILINGUAL,
    "userllm": QUIZ, "alignx_demo": PAIR, "mirrorbench": CLARIQ,
}  # fmt: skip


def jsonl(path: Path, *records: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(r, ensure_ascii=False)}\n" for r in records), "utf-8")
    return path


def refusal(task: str, path: Path, **options: Any) -> tuple[str, str, str]:
    with pytest.raises(DataError) as caught:
        examples_to_play(task_of(task), str(path), **options)
    return caught.value.lines()


def import_named(task: str, path: Path, **options: Any) -> bool:
    """Whether the last line of the refusal ends with the command that imports the file."""
    fix = refusal(task, path, **options)[2]
    return fix.endswith(f"soul data import {task} {shlex.quote(str(path))}")


# -- which command -------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["test", "train"])
@pytest.mark.parametrize("task", FORMS)
def test_a_record_of_the_original_form_is_answered_with_the_import(
    task: str, split: Any, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "as published.jsonl", FORMS[task])
    assert import_named(task, path, split=split)


@pytest.mark.parametrize("task", FORMS)
def test_what_the_command_writes_can_be_played(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    _, _, fix = refusal(task, jsonl(tmp_path / "original.jsonl", FORMS[task]))
    command = shlex.split(fix.rpartition(": ")[2])
    assert soul(*command[1:], "-o", "rows.jsonl") == 0
    assert examples_to_play(task_of(task), "rows.jsonl").examples


REAL = [
    ("hitom", "hitom/Hi-ToM_data.json"), ("hitom", "hitom/sample_cotp_200.jsonl"),
    ("paratomi", "paratomi/test.txt"), ("tomi", "tomi/fb_all_test.txt"),
    ("tomi", "tomi/Percept-ToMi.csv"), ("sotopia", "sotopia/env_agent_combo_storages.jsonl"),
    ("userllm", "nq_open/NQ-open.dev.jsonl"),
    ("userllm", "commonsenseqa/dev_rand_split.hf_layout.jsonl"),
    ("userllm", "commonsenseqa/dev_rand_split.original_layout_100.jsonl"),
    ("twinvoice", "twinvoice/dimension_1_results_gpt-4o-mini.sample_100.jsonl"),
    ("twinvoice", "twinvoice/dimension_2_step1_generations_5rows.jsonl"),
    ("twinvoice", "twinvoice/dimension_3_choices.jsonl"),
    ("tombench", "tombench/False Belief Task.jsonl"), ("mistakes", "mistakes/train.csv"),
    ("socsci210", "socsci210/test_1pct.sample_200.jsonl"),
    ("alignx_pair", "alignx/P-Soups_student_phd.sample_150.jsonl"),
    ("mirrorbench", "clariq/dev.tsv"),
    ("mirrorbench", "clariq/multi_turn_human_generated_data.tsv"),
    ("mirrorbench", "qulac/qulac_sample_200.json"),
    ("sim_math", "simulatorarena/math_tutoring_annotations_redacted_for_benchmarking.json"),
    ("sim_doc", "simulatorarena/document_creation_annotations_for_benchmarking.json"),
]  # fmt: skip


@pytest.mark.parametrize("task", importable())
def test_another_file_is_refused_as_a_whole(task: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not have the original format|is not a file of"):
        import_rows(task, jsonl(tmp_path / "rows.jsonl", {"entirely": "another"}))


@pytest.mark.parametrize(("task", "name"), REAL)
def test_the_files_of_the_releases_are_answered_with_the_import(task: str, name: str) -> None:
    assert import_named(task, original(name))


@pytest.mark.parametrize(
    ("task", "name"),
    [("socsci210", "socsci210/treatment_experiments_20.json"), ("mistakes", "mistakes/test.csv"),
     ("mirrorbench", "clariq/question_bank.tsv"), ("sotopia", "sotopia/agent_profiles.jsonl")],
)  # fmt: skip
def test_a_file_that_no_importer_reads_gets_no_alias_that_is_unlike(task: str, name: str) -> None:
    with pytest.raises(ColumnsError) as caught:
        examples_to_play(task_of(task), str(original(name)))
    fix = caught.value.way_out
    aliases = fix[fix.index("columns:") : fix.index("; if it is an original file")]
    assert aliases.count("name_in_your_file") == aliases.count("aliases:")
    assert fix.endswith(f"soul data import {task} {shlex.quote(str(original(name)))}")


def test_the_folder_of_a_release_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "env_agent_combo_storages.jsonl").write_text("{}\n")
    _, _, fix = refusal("sotopia", tmp_path)
    assert fix.endswith(f"soul data import sotopia {tmp_path}")


# -- records that would pass for rows --------------------------------------------------------------


def in_file(kind: str, folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"data": records}))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter="\t" * (kind == "tsv") or ",")
            writer.writeheader()
            writer.writerows(records)
    else:
        write_rows(path, records)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_hitoms_original_is_refused_in_every_format(kind: str, tmp_path: Path) -> None:
    path = in_file(kind, tmp_path, [HITOM, {**HITOM, "prompting_type": "VP"}])
    _, why, fix = refusal("hitom", path)
    assert "'prompting_type'" in why and fix.endswith(f"soul data import hitom {path}")


@pytest.mark.parametrize(
    "change",
    [
        {"extra_info": json.dumps(HITOM), "data_source": "hitom", "prompt": "x"},
        {**HITOM, "correct_answer": "bag"},
        {**HITOM, "data_source": "hitom"},
    ],
)
def test_so_it_is_in_other_wrappings_and_among_rows(change: dict[str, Any], tmp_path: Path) -> None:
    row = {k: v for k, v in HITOM.items() if k != "prompting_type"}
    path = jsonl(tmp_path / "mixed.jsonl", row, change)
    assert "mixed.jsonl:2" in refusal("hitom", path)[1]


def test_rows_of_other_tasks_and_released_files_keep_what_columns_they_have(
    tmp_path: Path,
) -> None:
    row = {k: v for k, v in HITOM.items() if k != "prompting_type"}
    other = jsonl(tmp_path / "two.jsonl", row, {**HITOM, "data_source": "elsewhere"})
    assert len(examples_to_play(task_of("hitom"), str(other)).examples) == 1
    write_rows(tmp_path / "hitom_val.parquet", [HITOM])
    for source in (tmp_path, tmp_path / "hitom_val.parquet"):
        assert len(examples_to_play(task_of("hitom"), str(source)).examples) == 1


def test_the_real_file_is_played_after_its_import_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    path = original("hitom/Hi-ToM_data.json")
    monkeypatch.chdir(tmp_path)
    plan = (
        "plan",
        "eval",
        "api",
        "--model",
        "m",
        "--base-url",
        NOWHERE,
        "--task",
        "hitom",
        "--json",
    )
    assert soul(*plan, "--data", path) == 2
    lines = three_lines(capsys.readouterr().err)
    assert soul(*shlex.split(lines[2].partition(": ")[2])[1:]) == 0
    capsys.readouterr()
    assert soul(*plan, "--data", "hitom_Hi-ToM_data.jsonl") == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 600


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "api", "--model", "m", "--base-url", NOWHERE, "--task", "hitom", "--data"),
        ("train", "sft", "--model", "tiny", "--full", "--task", "hitom", "--data"),
        ("plan", "train", "grpo", "--model", "tiny", "--task", "hitom", "--data"),
        ("data", "check", "--task", "hitom"),
        ("data", "show", "--task", "hitom"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_every_command_that_reads_rows_says_the_same(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    path = jsonl(tmp_path / "original.jsonl", HITOM)
    assert soul(*command, path) == 2
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].endswith(f"soul data import hitom {path}"), shown


def test_commands_that_read_originals_read_them_through_the_importer(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "o.jsonl", HITOM, {**HITOM, "prompting_type": "VP", "answer": "red_box"}
    )
    (example,) = examples_to_inspect(task_of("hitom"), str(path)).examples
    assert example.fields["correct_answer"] == "bag"


def test_what_imports_write_is_never_taken_for_an_original(tmp_path: Path) -> None:
    for task, record in FORMS.items():
        rows = import_rows(task, jsonl(tmp_path / f"{task}.jsonl", record)).rows
        write_rows(tmp_path / f"{task}_rows.jsonl", rows, data_source=task)
        assert examples_to_play(task_of(task), str(tmp_path / f"{task}_rows.jsonl")).examples


def test_a_declaration_marks_originals_for_an_importer_alone() -> None:
    registry = load_registry()
    marked = [spec for spec in registry.specs.values() if spec.original]
    assert marked and all(not set(s.original) & set(s.columns) for s in marked)
    with pytest.raises(ValueError, match="there is no 'importer'"):
        type(marked[0]).model_validate({**marked[0].model_dump(), "importer": ""})


# -- aliases -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "alias"),
    [
        ("storyline", "storyline"), ("Story", "Story"), ("the_story", "the_story"),
        ("storyText", "storyText"), ("stories", "stories"), ("tale", ""), ("story_id", ""),
        ("history", ""), ("context", ""), ("type", ""),
    ],
)  # fmt: skip
def test_an_alias_is_offered_where_the_names_are_alike(found: str, alias: str) -> None:
    with pytest.raises(ColumnsError) as caught:
        task_of("tomi").example({found: "1 Ada left.", "question": "q", "answer": "a"})
    offered = alias or "name_in_your_file"
    assert f"columns: {{story: {{aliases: [{offered}]}}}}" in caught.value.way_out


def test_an_alias_has_to_hold_a_value_of_the_columns_type() -> None:
    for value, offered in ((3, "responses"), ({"a": 1}, "name_in_your_file")):
        with pytest.raises(ColumnsError) as caught:
            task_of("socsci210").example({"responses": value})
        assert f"aliases: [{offered}]" in caught.value.way_out


# -- tasks of tau-bench ----------------------------------------------------------------------------


TASK = {"user_id": "ada_1", "instruction": "You want a refund.", "actions": [], "outputs": []}
SUCCESSOR = {"id": "0", "user_scenario": {}, "evaluation_criteria": {"actions": []}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tasks.json", json.dumps([TASK])), ("tasks.json", json.dumps([SUCCESSOR])),
        ("tasks.json", json.dumps({"tasks": [TASK]})),
        ("tasks.jsonl", f"{json.dumps(TASK)}\n{json.dumps(TASK)}\n"),
        ("tasks_test.py", "TASKS_TEST = [Task(instruction='x', actions=[])]"),
    ],
)  # fmt: skip
def test_tasks_of_tau_bench_say_where_rows_come_from(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        import_rows("tau_usi", tmp_path / name)
    what, why, fix = caught.value.lines()
    assert "holds tau-bench tasks" in what and "runtime" in why
    assert "soul data synth tau_usi --domain retail -n 115" in fix


def test_the_printed_command_makes_those_rows(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert soul("data", "synth", "tau_usi", "--domain", "retail", "-n", "115") == 0
    rows = examples_to_play(task_of("tau_usi"), "tau_usi_synth_115_s0.jsonl").examples
    assert {row.fields["env_name"] for row in rows} == {"retail"} and len(rows) == 115


def test_an_unknown_importer_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="no importer"):
        import_rows("secret_keeper", Path("x.jsonl"))


Row = dict[str, Any]

SOUL = load_registry().suite("soul-27")


def test_files_joined_into_one_are_read_as_their_parts(tmp_path: Path) -> None:
    import datasets

    # Made rows of the other two have columns of other types.
    names = [name for name in SOUL if name not in ("paratomi", "userllm")]
    parts = [
        datasets.Dataset.from_list([wrapped(name, row, i) for i, row in enumerate(typed(name, 3))])
        for name in names
    ]
    path = tmp_path / "joined.parquet"
    pq.write_table(datasets.concatenate_datasets(parts).data.table, path)
    for name in names:
        alone = tmp_path / f"{name}.jsonl"
        write_rows(alone, typed(name, 3))
        loaded = load_examples(task_of(name), [path])
        assert not loaded.bad
        assert sorted(e.id for e in loaded.examples) == ids_in(name, alone)


def test_what_was_packed_is_opened_and_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = released(tmp_path / "rows.parquet", "behaviorchain", typed("behaviorchain", 2))
    assert cli.main(["data", "check", str(path), "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["tasks"]
    assert checked["usable"] == 2 and checked["ignored"] == []


# -- nested otherwise than before ----------------------------------------------------------------


def released(path: Path, name: str, rows: Sequence[Row]) -> Path:
    pq.write_table(pa.Table.from_pylist([wrapped(name, r, i) for i, r in enumerate(rows)]), path)
    return path


@pytest.mark.parametrize(
    ("name", "column"),
    [("twinvoice", "answer_choices"), ("twinvoice", "conversation_history"),
     ("humanllm", "candidates"), ("tombench", "options_dict")],
)  # fmt: skip
def test_texts_that_became_objects_or_lists_are_not_shown_as_words(
    name: str, column: str, tmp_path: Path
) -> None:
    changes: list[Callable[[Any], Any]] = [lambda v: [v]]
    changes += [lambda v: {"text": v}] if column != "conversation_history" else []
    for number, change in enumerate(changes):
        rows = [
            {**row, column: {k: change(v) for k, v in row[column].items()}
             if isinstance(row[column], dict) else [change(v) for v in row[column]]}
            for row in typed(name, 3)
        ]  # fmt: skip
        path = released(tmp_path / f"{number}.parquet", name, rows)
        with pytest.raises(DataError, match=r"All rows .* bad \(3\)") as caught:
            load_examples(task_of(name), [path])
        assert "is not text" in caught.value.why


def test_a_blank_candidate_is_none() -> None:
    (row,) = synth("humanllm", 1, 3)
    for gap in (None, " "):
        with pytest.raises(DataError, match="candidate 4 is blank"):
            task_of("humanllm").example(
                {**row, "candidates": [*row["candidates"][:3], gap, *row["candidates"][4:]]}
            )


def test_the_options_of_a_question_are_texts_too() -> None:
    (row,) = synth("lifechoices", 1, 3)
    nested = row["Multiple Choice Question"]
    nested["Options"] = [{"text": option} for option in nested["Options"]]
    with pytest.raises(DataError, match="is not text"):
        task_of("lifechoices").example(row)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [("humanual_chat", "prompt", []), ("mirrorbench", "turns", "[]")],
)
def test_a_required_column_that_holds_nothing_makes_a_bad_row(
    name: str, column: str, value: Any, tmp_path: Path
) -> None:
    path, (good, other) = tmp_path / "rows.jsonl", typed(name, 2)
    write_rows(path, [good, {**other, column: value}])
    (bad,) = load_examples(task_of(name), [path]).bad
    assert bad.source == "rows.jsonl:2" and column in bad.why and not bad.why.startswith("row:")


@pytest.mark.parametrize("column", ["dialogues", "speaking_characters_w_env", "major_characters"])
def test_a_scene_without_lines_or_people_is_a_bad_row(column: str, tmp_path: Path) -> None:
    path, (good, other) = tmp_path / "rows.jsonl", synth("coser", 2, 3)
    scene = {**json.loads(other["circumstance"]), column: []}
    write_rows(path, [good, {**other, "circumstance": json.dumps(scene)}])
    (bad,) = load_examples(task_of("coser"), [path]).bad
    assert column in bad.why


@pytest.mark.parametrize(
    ("name", "column"), [("mirrorbench", "conversation_id"), ("humanual_chat", "category")]
)
def test_bookkeeping_may_be_numbers(name: str, column: str, tmp_path: Path) -> None:
    path = released(tmp_path / "a.parquet", name, [{**r, column: 7} for r in typed(name, 3)])
    assert len(load_examples(task_of(name), [path], strict=True).examples) == 3


def test_a_gold_that_is_no_candidate_is_a_bad_row_of_paratomi() -> None:
    (row,) = synth("paratomi", 1, 3)
    strange = {**row, "correct_answer": "the moon"}
    with pytest.raises(DataError, match="not one of the row's candidates"):
        task_of("paratomi").example(strange)
    assert task_of("paratomi").example({**strange, "cands": None})
    assert task_of("paratomi", "reference").example(strange), "scored 0 there, as published"


def test_an_enormous_value_is_shown_by_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = typed("paratomi", 1)
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{**row, "story": "Ada came. " * 50_000}], data_source="paratomi")
    assert cli.main(["data", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--json prints all" in shown and len(shown) < 500_000


SOURCES = {"twinvoice": "twinvoice", "tombench": "tombench", "behaviorchain": "behavior_chain"}
N = 20


def packed(task: str, row: dict[str, Any], index: int) -> dict[str, Any]:
    if task == "behaviorchain":
        return {"raw": json.dumps(row), "index": index}
    return {**row, "index": index}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inner, sources = [], []
    for task, source in SOURCES.items():
        for i, row in enumerate(synth(task, N, 5)):
            inner.append(packed(task, row, i))
            sources.append(source)
    keys = sorted({key for row in inner for key in row})
    whole = [{key: row.get(key) for key in keys} for row in inner]
    dummy = [[{"role": "user", "content": "x"}]] * len(whole)
    path = tmp_path_factory.mktemp("joined") / "all_val.parquet"
    pq.write_table(
        pa.table({"prompt": dummy, "data_source": sources, "extra_info": pa.array(whole)}), path
    )
    return path


@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_a_joined_file_are_the_rows_that_were_made(joined: Path, name: str) -> None:
    task = task_of(name)
    loaded = load_examples(task, [joined])
    assert not loaded.bad and sum(loaded.skipped.values()) == 2 * N
    made = {e.id: e for row in synth(name, N, 5) for e in task.examples(row)}
    assert {e.id for e in loaded.examples} == set(made)
    for example in loaded.examples:
        same = made[example.id]
        assert (example.tags, example.cluster) == (same.tags, same.cluster)
        assert task.preview(example) == task.preview(same)


def plain_types(value: Any) -> bool:
    if isinstance(value, dict):
        return all(plain_types(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(plain_types(item) for item in value)
    return type(value) in (str, int, float, bool, type(None))


def test_nothing_but_plain_values_comes_out_of_a_file(joined: Path) -> None:
    rows, bad = read_rows(joined)
    assert not bad and all(plain_types(row.fields) for row in rows)
    for name in SOURCES:
        assert all(
            plain_types(dict(e.fields)) for e in load_examples(task_of(name), [joined]).examples
        )


def test_a_row_under_raw_may_be_json_text_or_the_row_itself() -> None:
    (row,) = synth("behaviorchain", 1, 5)
    forms = [flatten({"extra_info": {"raw": raw, "index": 0}}) for raw in (row, json.dumps(row))]
    assert len({task_of("behaviorchain").example(form).id for form in (row, *forms)}) == 1


@pytest.mark.parametrize("name", SOURCES)
def test_more_rows_begin_with_fewer_and_letters_are_spread(name: str) -> None:
    rows = synth(name, 200, 5)
    assert synth(name, 30, 5) == rows[:30] and synth(name, 30, 6) != rows[:30]
    task = task_of(name)
    golds = [task.gold_letter(task.example(row)) for row in rows]
    assert all(golds.count(letter) > 25 for letter in "ABCD")
    assert len({task.example(row).id for row in rows}) == 200


def scene(record: RawRow, index: int) -> list[dict[str, Any]]:
    row = mapped_columns(record, {"scene": "Text", "gold": "Answer"}, ["id", "lost"])
    return [row, {**row, "index": 7}] if index else [row]


def test_an_importer_says_what_a_record_becomes(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "scenes.jsonl",
        {"Text": "A door.", "Answer": "open", "id": 3}, {"Text": "A lamp.", "Answer": "off"},
        {"Text": " ", "Answer": "on"}, {"Text": "A bell.", "Answer": 1},
    )  # fmt: skip
    imported = import_records(
        path, scene, fields=("Text", "Answer"), way_out="Give scenes.", licence="CC0",
        notes=lambda rows, bad: [f"{len(rows)} rows, {len(bad)} bad"],
    )  # fmt: skip
    common = {"provenance": "scenes.jsonl:1", "licence": "CC0"}
    assert imported.rows == (
        {"scene": "A door.", "gold": "open", "id": 3, "index": 0, **common},
        {"scene": "A lamp.", "gold": "off", "index": 1, **common, "provenance": "scenes.jsonl:2"},
        {"scene": "A lamp.", "gold": "off", "index": 7, **common, "provenance": "scenes.jsonl:2"},
    )
    assert [bad.source for bad in imported.bad] == ["scenes.jsonl:3", "scenes.jsonl:4"]
    assert "'Answer'" in imported.bad[1].why and imported.notes == ("3 rows, 2 bad",)
    with pytest.raises(WrongShape, match="original format") as caught:
        import_records(path, scene, fields=("Text", "Name"), way_out="Give scenes.", licence="")
    assert caught.value.why == "None of its records has Text, Name."


def test_the_fields_of_a_file_say_what_makes_its_rows(tmp_path: Path) -> None:
    def lines(record: RawRow, _: int) -> Iterator[dict[str, Any] | BadRow]:
        for text in record.fields["lines"]:
            yield {"scene": text} if text else BadRow(record.source, "it has an empty line")

    shapes = {("Text", "Answer"): scene, ("lines",): lines}
    path = jsonl(
        tmp_path / "plays.jsonl", {"Text": "A door."}, {"lines": ["A lamp.", "", "A bell."]}
    )
    imported = import_records(path, shapes, way_out="Give scenes.", origin="Plays", read=last_row)
    assert [row["scene"] for row in imported.rows] == ["A lamp.", "A bell."]
    assert {row["provenance"] for row in imported.rows} == {"Plays, plays.jsonl:2"}
    assert imported.bad == (BadRow("plays.jsonl:2", "it has an empty line"),)
    path = jsonl(tmp_path / "other.jsonl", {"Text": "A door.", "lines": 3}, {"Answer": "open"})
    with pytest.raises(WrongShape, match="original format") as caught:
        import_records(path, {("Text", "Answer"): scene, ("play",): lines}, way_out="Give scenes.")
    assert caught.value.why == "None of its records has Text, Answer; or play."


def last_row(path: Path) -> tuple[list[RawRow], list[BadRow]]:
    rows, bad = read_rows(path)
    return rows[-1:], bad
