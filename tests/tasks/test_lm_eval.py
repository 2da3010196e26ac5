"""Tasks of lm-evaluation-harness become tasks without code, or are refused by key and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation import soul, three_lines

ARC = {
    "task": "arc_easy", "dataset_path": "allenai/ai2_arc", "output_type": "multiple_choice",
    "test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices.text}}", "doc_to_target": "{{choices.label.index(answerKey)}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}], "metadata": {"version": 1.0},
}  # fmt: skip
ARC_ROW = {"question": "What melts ice?", "answerKey": "2",
           "choices": {"text": ["Cold", "Heat", "Wind"], "label": ["1", "2", "3"]}}  # fmt: skip
GSM = {
    "task": "gsm8k", "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "output_type": "generate_until", "num_fewshot": 0, "repeats": 1,
    "generation_kwargs": {"until": ["Question:"], "do_sample": False, "max_gen_toks": 512},
    "filter_list": [
        {"name": "strict-match", "filter": [
            {"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"},
            {"function": "take_first"}]},
        {"name": "flexible", "filter": [{"function": "regex"}]},
    ],
    "metric_list": [{"metric": "exact_match", "regexes_to_ignore": [","]}],
}  # fmt: skip
GSM_ROW = {"question": "Tom has 3 and gets 15.", "answer": "3 + 15 = 18\n#### 18"}
BOOLQ = {**ARC, "task": "boolq", "doc_to_choice": ["no", "yes"], "doc_to_target": "label"}
SCIQ = {**ARC, "task": "sciq", "doc_to_choice": "{{[wrong, right]}}", "doc_to_target": 1}


def write(folder: Path, task: dict[str, Any], row: dict[str, Any]) -> tuple[Path, Path]:
    path, rows = folder / "theirs.yaml", folder / "rows.jsonl"
    path.write_text(yaml.safe_dump(task, sort_keys=False))
    rows.write_text(json.dumps(row) + "\n")
    return path, rows


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        (ARC, ARC_ROW, {"kind": "choice", "prompt": "Question: {{question}}", "options": "choices",
                        "gold": "answerKey"}),
        (GSM, GSM_ROW, {"kind": "text", "prompt": "Question: {{question}}\nAnswer:",
                        "gold": "answer", "answer": r"#### (\-?[0-9\.\,]+)", "scorer": "number",
                        "sampling": {"temperature": 0.0, "max_tokens": 512}}),
        (BOOLQ, {"question": "Is water wet?", "label": 1},
         {"kind": "choice", "prompt": "Question: {{question}}", "options": ["no", "yes"],
          "gold": "label"}),
        (SCIQ, {"question": "Hot?", "wrong": "ice", "right": "fire"},
         {"kind": "choice", "prompt": "Question: {{question}}",
          "options": {"columns": ["wrong", "right"]}, "gold": "right"}),
    ],
)  # fmt: skip
def test_simple_tasks(
    tmp_path: Path, capsys: Any, task: dict[str, Any], row: dict[str, Any], expected: Any
) -> None:
    path, rows = write(tmp_path, task, row)
    assert soul("tasks", "import", "lm-eval", path, "--data", rows, "-o", tmp_path) == 0
    capsys.readouterr()
    written = tmp_path / "tasks.yaml"
    assert yaml.safe_load(written.read_text())["tasks"] == {task["task"]: expected}
    assert ("not scored by log-likelihood" in written.read_text()) == (expected["kind"] == "choice")
    checked = soul("tasks", "check", task["task"], "--tasks", written, "--data", rows, "--json")
    (found,) = json.loads(capsys.readouterr().out)["tasks"]
    assert checked == 0 and found["rows"] == 1 and not found["bad"] and not found["no_gold"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"include": "base.yaml"}, "include: this key may change scores"),
        ({"process_docs": "f"}, "process_docs: this key may change scores"),
        ({"num_fewshot": 5}, "num_fewshot: this key may change scores"),
        ({"output_type": "loglikelihood"}, "output_type: expected multiple_choice"),
        ({"doc_to_target": "{{answer.strip()}}"}, "doc_to_target: expected a column"),
        ({"doc_to_choice": "{{shuffled(choices)}}"}, "doc_to_choice: expected a list"),
        ({"doc_to_choice": None}, "doc_to_choice: expected a list"),
        ({"doc_to_text": 7}, "doc_to_text: this value cannot be converted"),
        ({"generation_kwargs": {"beams": 4}}, "generation_kwargs.beams: this setting"),
        ({"filter_list": [{"filter": [{"function": "majority_vote"}]}]}, "filter.0: this filter"),
        ({"metric_list": [{"metric": "bleu"}]}, "metric_list.0.metric: expected acc"),
    ],
)
def test_what_cannot_be_converted(
    tmp_path: Path, capsys: Any, change: dict[str, Any], line: str
) -> None:
    path, rows = write(tmp_path, {**ARC, **change}, ARC_ROW)
    assert soul("tasks", "import", "lm-eval", path, "--data", rows, "-o", tmp_path) == 2
    key = next(iter(change))
    number = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if key in text)
    err = capsys.readouterr().err
    told = re.search(rf"theirs.yaml:(\d+): {key}", err)
    assert told and 0 <= int(told[1]) - number <= 3  # the line of the innermost key
    assert line in " ".join(err.split()) and not (tmp_path / "tasks.yaml").exists()


def test_rows_are_never_downloaded(tmp_path: Path, capsys: Any) -> None:
    path, rows = write(tmp_path, ARC, ARC_ROW)
    assert soul("tasks", "import", "lm-eval", path) == 2
    assert "dataset_path: rows are not downloaded" in " ".join(capsys.readouterr().err.split())
    path.write_text("task: t\ndoc_to_text: !function utils.f\n")
    assert soul("tasks", "import", "lm-eval", path, "--data", rows) == 2
    assert "theirs.yaml:2: not YAML: 'doc_to_text: !function utils.f'" in capsys.readouterr().err
    (tmp_path / "arc_easy").mkdir()
    write(tmp_path, ARC, ARC_ROW)
    (tmp_path / "tasks.yaml").write_text("mine\n")
    assert soul("tasks", "import", "lm-eval", path, "--data", rows, "-o", tmp_path) == 2
    assert three_lines(capsys.readouterr().err)[0].endswith("tasks.yaml' exists already.")
    assert soul("tasks", "import", "helm", path) == 2
