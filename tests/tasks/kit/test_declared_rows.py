"""Rows of tasks without code: who sees which column, the rows beside a file, and the macro mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import soulkit as sk
from soulkit.errors import ConfigError, RunError
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import NoRows, examples_to_play
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import soul, summary
from tests.support.servers.openai_server import ScriptedServer

TASK = """\
tasks:
  mood:
    kind: text
    rows: rows.jsonl
    prompt: "{{ person }} says: {{ words }}"
    gold: feeling
    macro: place
    limits: {words: 3}
    columns: {person: Who speaks}
"""
FEELINGS = ("happy", "sad", "angry", "bored")
ROWS: list[dict[str, Any]] = [
    {"Who speaks": f"P{n}", "words": f"one two three four {n}", "feeling": FEELINGS[n % 4],
     "place": "home" if n < 3 else "work", "note": f"n{n}", "human_warmth": n}
    for n in range(12)
]  # fmt: skip


def task_in(folder: Path, text: str = TASK, rows: Any = ROWS) -> Task:
    folder.mkdir(exist_ok=True)
    (folder / "tasks.yaml").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines, encoding="utf-8")
    return load_registry(folder / "tasks.yaml").task("mood")


def test_other_columns_are_for_the_judge_and_not_in_the_id(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    first = task.example(ROWS[0])
    assert first.visible("actor") == {"person": "P0", "words": "one two three four 0"}
    assert first.visible("judge")["note"] == "n0" and "note" not in first.visible("coach")
    assert first.visible("judge")["place"] == "home" and "Who speaks" not in first.fields
    assert first.audience["human_warmth"] == ("gold",)
    assert task.example({**ROWS[0], "note": "other"}).id == first.id
    assert task.example({**ROWS[0], "words": "other"}).id != first.id
    assert task.preview(first)[-1].text.startswith("P0 says: one two three [...]")


def test_rows_beside_the_file_are_for_evaluation_only(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    assert len(examples_to_play(task, None).examples) == 12
    with pytest.raises(NoRows):
        examples_to_play(task, None, split="train")
    code = TASK.replace("rows.jsonl", "made.py:some")
    maker = "def some(n, seed):\n    from rows_beside_made import ROWS\n    return ROWS[:n]\n"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "made.py").write_text(maker)
    (tmp_path / "code" / "rows_beside_made.py").write_text(f"ROWS = {ROWS!r}\n")
    assert len(examples_to_play(task_in(tmp_path / "code", code), "synth:5").examples) == 5


@pytest.mark.parametrize(("copies", "refused"), [(11, True), (10, False)])
def test_a_column_with_the_golds_text_is_refused(
    tmp_path: Path, copies: int, refused: bool
) -> None:
    rows = [{**row, "words": f" {row['feeling'].upper()}." if n < copies else "?"}
            for n, row in enumerate(ROWS)]  # fmt: skip
    task = task_in(tmp_path, rows=rows)
    if not refused:
        assert len(examples_to_play(task, None).examples) == 12
        return
    with pytest.raises(ConfigError, match="'words' has the text of 'feeling' in 11 of 12 rows"):
        examples_to_play(task, None)


@pytest.mark.parametrize(("count", "refused"), [(9, False), (10, True)])
def test_few_rows_do_not_show_that_an_option_is_always_right(
    tmp_path: Path, count: int, refused: bool
) -> None:
    keys = 'kind: choice\n    prompt: "{{ a }} or {{ b }}?"\n    options: {columns: [a, b]}'
    text = f"tasks:\n  mood:\n    {keys}\n    gold: best\n    rows: rows.jsonl\n"
    rows = [{"a": f"x{n}", "b": f"y{n}", "best": f"x{n}"} for n in range(count)]
    task = task_in(tmp_path, text, rows)
    if not refused:
        assert len(examples_to_play(task, None).examples) == count
        return
    with pytest.raises(ConfigError, match="'a' has the text of 'best' in 10 of 10 rows"):
        examples_to_play(task, None)


def test_a_run_knows_the_prompts_of_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task_in(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    declared, first = tmp_path / "tasks.yaml", tmp_path / "first"

    with ScriptedServer(answer="happy") as server:

        def play(out: Path) -> None:
            sk.evaluate("m", "mood", tasks_file=str(declared), base_url=server.base_url, out=out)

        play(first)
        declared.write_text(TASK + "    system: Be brief.\n", encoding="utf-8")
        with pytest.raises(RunError, match="a different prompt 'system' for the task mood"):
            play(first)
        play(tmp_path / "second")
    assert soul("compare", first, tmp_path / "second") == 2
    assert "prompt 'system' differs" in capsys.readouterr().err
    for change, code in (("    system: Be brief.\n", 2), ("    scorer: exact\n", 0)):
        declared.write_text(TASK + change, encoding="utf-8")
        load_registry.cache_clear()
        assert soul("rescore", first, "--tasks", declared, "--out", tmp_path / str(code)) == code
    assert "played with a different prompt 'system'" in capsys.readouterr().err


def test_the_headline_is_the_mean_over_the_values_of_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_in(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    at_home = {f"P{n} " for n in range(3)}

    def reply(body: Any) -> str:
        prompt = body["messages"][-1]["content"]
        return FEELINGS[int(prompt[1])] if prompt[:3] in at_home else "unsure"

    with ScriptedServer(answer=reply) as server:
        where = ("--tasks", tmp_path / "tasks.yaml", "--task", "mood", "--out", tmp_path / "run")
        assert soul("eval", "api", *where, "--model", "m", "--base-url", server.base_url) == 0
    cells = summary(tmp_path / "run")["tasks"]["mood"]
    assert cells["value"]["mean"] == pytest.approx(0.25)
    assert cells["macro_place"]["mean"] == pytest.approx(0.5)
