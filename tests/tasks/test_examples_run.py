"""The four examples through the real commands: rows, an evaluation, a training step.

Each is a folder laid out like a built-in benchmark's, so whatever runs here runs for a task that
somebody writes by their pattern.
"""

from __future__ import annotations

import json
import re
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.base import Task
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from soulkit.tasks.scaffold import TEMPLATES
from soulkit.types import Example
from tests.support.evaluation import FAST, ROOT, records, soul, start, summary, three_lines
from tests.support.servers.openai_server import ScriptedServer

EXAMPLES = ROOT / "examples"
NAMES = [template.task for template in TEMPLATES.values()]
Body = dict[str, Any]


def declared(name: str) -> tuple[str, Path]:
    return "--tasks", EXAMPLES / name / "tasks.yaml"


def loaded(name: str) -> tuple[Task, tuple[Example, ...]]:
    task = load_registry(declared(name)[1]).task(name)
    return task, load_examples(task, [EXAMPLES / name / "rows.jsonl"]).examples


def content(body: Body, index: int = -1) -> str:
    return str(body["messages"][index]["content"])


# --- layout and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_is_laid_out_like_a_built_in_benchmark(name: str) -> None:
    folder, spec = EXAMPLES / name, load_registry(declared(name)[1]).spec(name)
    files = ("tasks.yaml", "task.py", "rows.py", "rows.jsonl", "README.md", "prompts/coach.md")
    assert [file for file in files if not (folder / file).is_file()] == []
    assert (spec.module.partition(":")[0], spec.synth) == ("task", "rows:rows")
    for key in ("synth", "importer", "audit", "scripted_partner"):
        hook = spec.hook(name, key)
        assert hook is None or Path(hook.function.__code__.co_filename).parent == folder
    assert len((folder / "README.md").read_text().splitlines()) < 40


def test_between_them_they_show_every_key() -> None:
    keys = ("synth", "importer", "audit", "scripted_partner")
    specs = [load_registry(declared(name)[1]).spec(name) for name in NAMES]
    assert [key for key in keys if not any(getattr(spec, key) for spec in specs)] == []


@pytest.mark.parametrize("name", NAMES)
def test_its_check_passes_on_made_and_on_written_rows(name: str, capfd: Any) -> None:
    for data in ("synth:30", EXAMPLES / name / "rows.jsonl"):
        assert soul("tasks", "check", name, *declared(name), "--data", data, "--json") == 0
        (checked,) = json.loads(capfd.readouterr().out)["tasks"]
        assert {k: v for k, v in checked.items() if isinstance(v, list) and v} == {}


@pytest.mark.parametrize("name", NAMES)
def test_made_rows_can_be_read_and_audited(name: str, tmp_path: Path, capfd: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    assert soul("data", "synth", name, *declared(name), "-n", 20, "-o", rows) == 0
    assert soul("data", "check", rows, *declared(name), "--task", name) == 0
    capfd.readouterr()
    assert soul("data", "audit", name, rows, *declared(name), "--json") == 0
    audited = json.loads(capfd.readouterr().out)
    assert audited["rows"]["rows"] >= 18 and audited["rows"]["bad"] == []
    first, more = (_made(name, n, tmp_path) for n in (3, 6))
    assert more[:3] == first and _made(name, 3, tmp_path, seed=1) != first


def _made(name: str, n: int, folder: Path, seed: int = 0) -> list[str]:
    path = folder / f"{n}_{seed}.jsonl"
    out = ("-o", path, "--seed", seed)
    assert soul("data", "synth", name, *declared(name), "-n", n, *out) == 0
    return path.read_text().splitlines()


def test_an_original_file_is_imported(tmp_path: Path, capfd: Any) -> None:
    good = {"scene": "It snows.", "line": {"by": "Lien", "text": "Were you raised in a tent?"},
            "right": "Shut the window.", "wrong": ["Go camping.", "Tell me more."]}  # fmt: skip
    records = [good, {**good, "wrong": ["one"]}, {**good, "line": "who?"}, {**good, "right": " "}]
    original, rows = tmp_path / "original.json", tmp_path / "rows.jsonl"
    original.write_text(json.dumps(records))
    soul("data", "import", "my_task", original, *declared("my_task"), "-o", rows)
    printed = capfd.readouterr().err
    assert "wrong readings" in printed and "by whom" in printed and "'right'" in printed
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert sorted(row["options"]) == ["Go camping.", "Shut the window.", "Tell me more."]
    assert soul("tasks", "check", "my_task", *declared("my_task"), "--data", rows) == 0
    assert soul("data", "import", "judged_task", original, *declared("judged_task")) == 2


def test_the_audit_disputes_a_literal_reading(tmp_path: Path, capfd: Any) -> None:
    row = {"situation": "At the door.", "speaker": "Bo", "said": "A lovely frame.",
           "options": ["Bo buys lovely frames", "Bo dislikes it", "Bo is tired"]}  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({**row, "meant": meant, "kind": "k"}) for meant in row["options"][:2]]
    rows.write_text("\n".join(lines))
    assert soul("data", "audit", "my_task", rows, *declared("my_task"), "--json") == 0
    audited = json.loads(capfd.readouterr().out)
    assert audited["overall"] == {"agreed": 1, "total": 2}
    assert [dispute["gold"] for dispute in audited["disputed"]] == row["options"][:1]


# --- evaluation -----------------------------------------------------------------------------------


def evaluate(
    name: str, answer: Callable[[Body], str], out: Path, *more: object, code: int = 0
) -> None:
    with ScriptedServer(answer=answer) as server:
        model = ("--model", "m", "--base-url", server.base_url, *FAST)
        rows = ("--data", f"{name}={EXAMPLES / name / 'rows.jsonl'}")
        ended = soul(
            "eval", "api", *declared(name), "--task", name, *rows, *model, "--out", out, *more
        )
        assert ended == code


def mean(out: Path, name: str) -> tuple[float, int]:
    cell = summary(out)["tasks"][name]["value"]
    return cell["mean"], cell["n_scored"]


def test_the_choice_is_evaluated(tmp_path: Path) -> None:
    task, examples = loaded("my_task")
    golds = {task.preview(e)[0].text: task.gold_completion(e) for e in examples}  # type: ignore[attr-defined]
    evaluate("my_task", lambda body: golds[content(body)], tmp_path / "right")
    evaluate("my_task", lambda body: "<answer>A</answer>", tmp_path / "first")
    assert mean(tmp_path / "right", "my_task") == (1.0, 10)
    first = sum("A" in gold for gold in golds.values())
    assert 0 < first < 10 and mean(tmp_path / "first", "my_task") == (first / 10, 10)


def judged(body: Body) -> str:
    """Two points for every sentence."""
    text = re.findall(r"<essay \w+>\n(.*?)\n</essay", content(body), re.DOTALL)[0]
    quality = {"reasoning": "counted", "score": min(10, 2 * text.count("."))}
    return json.dumps({"quality": quality, "style": "plain"})


def test_the_judged_task_is_evaluated_with_a_judge(tmp_path: Path) -> None:
    name, out = "judged_task", tmp_path / "run"
    with ScriptedServer(answer=judged) as judge:
        player = ("--judge", f"endpoint:j@{judge.base_url}")
        evaluate(name, lambda body: "One. Two. Three.", out, *player)
        assert mean(out, name) == (pytest.approx(0.6), 4)
        evaluate(name, lambda body: " ", tmp_path / "silent", *player, code=1)
        assert mean(tmp_path / "silent", name) == (0.0, 4)
        assert len(judge.requests) == 4
        assert soul("judge", "check", out, "--out", tmp_path / "check", "--no-pairs") == 0


@contextmanager
def served(name: str) -> Iterator[str]:
    """`soul serve partner` as a process of its own; gives the address that it prints."""
    process = start("serve", "partner", name, *declared(name), "--port", 0)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "the partner prints no address"
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def caller(body: Body) -> str:
    """Offers its free days in turn, and settles the one that suits."""
    brief = content(body, 0)
    listed = re.search(r"You are free on ([^.]+?), and on no other", brief)
    assert listed is not None
    last = re.search(r"Yes, (\w+) suits me", content(body))
    turns = sum(message["role"] == "assistant" for message in body["messages"])
    return f"Agreed: {last[1]}" if last else f"How about {listed[1].split(', ')[turns]}?"


def test_the_dialogue_is_evaluated_with_its_scripted_partner(tmp_path: Path) -> None:
    name, out = "dialogue_task", tmp_path / "run"
    with served(name) as url:
        partner = ("--partner", f"endpoint:scripted-friend@{url}")
        evaluate(name, caller, out, *partner)
        evaluate(name, lambda body: "Agreed: Monday", tmp_path / "rash", *partner)
    assert mean(out, name) == (1.0, 3) and mean(tmp_path / "rash", name) == (0.0, 3)
    by_stop = {record.episode.stop for record in records(out)}
    assert by_stop == {"agreed"}
    for record in records(out):
        seats = [line.seat for line in record.episode.transcript]
        assert seats == (["caller", "friend"] * len(seats))[: len(seats)]
        assert "Sorry" in record.episode.transcript[1].text or len(seats) == 3


def test_a_call_without_an_end_scores_nothing(tmp_path: Path) -> None:
    with served("dialogue_task") as url:
        player = ("--partner", f"endpoint:scripted-friend@{url}")
        evaluate("dialogue_task", lambda body: "Hello.", tmp_path / "run", *player)
    assert mean(tmp_path / "run", "dialogue_task") == (0.0, 3)
    assert {record.episode.stop for record in records(tmp_path / "run")} == {"max_turns"}


def test_a_row_with_two_common_days_is_refused(tmp_path: Path, capfd: Any) -> None:
    row = json.loads((EXAMPLES / "dialogue_task" / "rows.jsonl").read_text().splitlines()[0])
    bad = tmp_path / "rows.jsonl"
    bad.write_text(json.dumps({**row, "friend_free": row["free"]}))
    assert soul("tasks", "check", "dialogue_task", *declared("dialogue_task"), "--data", bad) == 2
    assert "Monday" in three_lines(capfd.readouterr().err)[1]


def person(body: Body) -> str:
    """Thinks what it alone knows, and says who it is."""
    brief = content(body, 0)
    seat, thought = re.findall(r"You are the (\w+) in|Only you know this: (.+)", brief)[:2]
    return f"[{thought[1]}] I am the {seat[0]}."


def reader(body: Body) -> str:
    """Ten points for voices where all three are there, four for what they know."""
    prompt = content(body)
    everybody = all(f"{seat}: \u201cI am the {seat}.\u201d" in prompt for seat in PEOPLE)
    points = 4 if "read each other" in prompt else 10 * everybody
    return json.dumps({"reasoning": "read", "score": points})


PEOPLE = ("owner", "neighbour", "child")


def test_the_scene_is_evaluated_and_thoughts_stay_with_their_seats(tmp_path: Path) -> None:
    name, out = "scene_task", tmp_path / "run"
    _, examples = loaded(name)
    with served(name) as url, ScriptedServer(answer=reader) as judge:
        players = ("--judge", f"endpoint:j@{judge.base_url}")
        street = ("--environment", f"endpoint:scripted-street@{url}")
        evaluate(name, person, out, *players, *street, "--controls")
    assert mean(out, name) == (pytest.approx(0.7), 3)
    anchored = summary(out)["tasks"][name]["share_of_people"]
    assert anchored["mean"] == pytest.approx(0.7 / 0.2)  # the written scenes have 0 and 4 of 10
    thoughts = {e.id: {s: e.fields[f"{s}_thought"] for s in PEOPLE} for e in examples}
    for record in records(out):
        by_seat = thoughts[record.episode.example_id]
        lines = [line.seat for line in record.episode.transcript]
        assert lines == [*PEOPLE, "street"] * 2
        assert not any("[" in line.text for line in record.episode.transcript)
        for trace in record.episode.traces:
            seen = "\n".join(segment.text for turn in trace.turns for segment in turn.context)
            assert [seat for seat, text in by_seat.items() if text in seen] == [trace.seat]


def test_a_scene_in_which_nobody_speaks_is_no_judges_business(tmp_path: Path) -> None:
    with served("scene_task") as url, ScriptedServer(answer=reader) as judge:
        players = ("--judge", f"endpoint:j@{judge.base_url}")
        street = ("--environment", f"endpoint:scripted-street@{url}")
        evaluate("scene_task", lambda body: "[Better not.]", tmp_path / "run", *players, *street)
        assert judge.requests == []
    assert mean(tmp_path / "run", "scene_task") == (0.0, 3)
    assert {record.score.status for record in records(tmp_path / "run")} == {"empty"}


def test_original_scenes_are_imported(tmp_path: Path, capfd: Any) -> None:
    line = {"who": "owner", "thinks": "It is late.", "says": "Minka!"}
    good = {"cat": "Minka", "where": "the stairs", "scene": [line, {"who": "child", "says": "Hm."}],
            "thoughts": {seat: f"What the {seat} knows." for seat in PEOPLE}}  # fmt: skip
    originals = [good, {**good, "thoughts": {}}, {**good, "scene": "x"}, {**good, "scene": [{}]}]
    original, rows = tmp_path / "original.json", tmp_path / "rows.jsonl"
    original.write_text(json.dumps(originals))
    soul("data", "import", "scene_task", original, *declared("scene_task"), "-o", rows)
    printed = capfd.readouterr().err
    assert "thoughts are not" in printed and "no list" in printed and "who says what" in printed
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["written"] == ["owner: [It is late.] Minka!", "child: Hm."]
    assert soul("tasks", "check", "scene_task", *declared("scene_task"), "--data", rows) == 0


def test_a_scene_with_a_stranger_is_refused(tmp_path: Path, capfd: Any) -> None:
    row = json.loads((EXAMPLES / "scene_task" / "rows.jsonl").read_text().splitlines()[0])
    bad = tmp_path / "rows.jsonl"
    bad.write_text(json.dumps({**row, "written": ["onwer: Hello."]}))
    assert soul("tasks", "check", "scene_task", *declared("scene_task"), "--data", bad) == 2
    assert "onwer" in three_lines(capfd.readouterr().err)[1]


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_step(tmp_path: Path) -> None:
    task, examples = loaded("my_task")
    words = sorted({w for e in examples for s in task.preview(e) for w in s.text.split()})
    model = build_tiny(tmp_path / "model", words, max_context=1024)
    options = ("--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--steps", 1, "--lora-r", 2)
    rows = ("--task", "my_task", "--data", "my_task=synth:20")
    out = tmp_path / "run"
    where = (*declared("my_task"), *rows, "--out", out)
    assert soul("train", "ditto", "--model", model, *where, *options) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 1
