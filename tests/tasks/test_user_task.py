"""The example of a task of one's own works as docs/tasks.md says, over HTTP and on the shell."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from soulkit.cli import app as cli
from soulkit.models.base import Cast
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from soulkit.types import Record
from tests.support.road import NO_ONE, played_by
from tests.support.servers.openai_server import ScriptedServer

FOLDER = Path(__file__).parents[2] / "examples" / "my_task"
TASKS = FOLDER / "tasks.yaml"
RIGHT = {"Were you raised in a tent?": "B", "The frame is lovely.": "C"}


def task_and_examples():
    task = load_registry(TASKS).task("my_task")
    return task, load_examples(task, [FOLDER / "rows.jsonl"]).examples


def test_every_row_can_be_used_and_gold_is_best() -> None:
    task, examples = task_and_examples()
    assert len(examples) == 10
    assert {task.gold_letter(e) for e in examples} == set("ABC")
    for example in examples:
        assert asyncio.run(task.score(example, task.gold(example), NO_ONE)).value == 1
        assert example.fields["meant"] not in task.explain(example, None, None)
        assert task.preview(example)[0].text.count("\nA. ") == 1


def answer(body: dict) -> str:
    """Knows two rows, and listens to advice on the others."""
    prompt = body["messages"][-1]["content"]
    speech = re.findall(r'says: "(.*)"', prompt)[0]
    if "Advice" in prompt:
        return "I give up."
    return f"Hm. <answer>{RIGHT.get(speech, 'Z')}.</answer>"


def test_the_engine_plays_it_like_any_other_task() -> None:
    task, examples = task_and_examples()

    async def run() -> list[Record]:
        with played_by(answer) as actor:
            engine = Engine(Cast(actor=actor), feedback=FeedbackPolicy(when="imperfect"))
            jobs = [Job(task, example) for example in examples]
            try:
                return await engine.run(jobs, lambda record: None)
            finally:
                await actor.model.close()

    records = asyncio.run(run())
    drafts = [r for r in records if r.kind == "draft"]
    refined = [r for r in records if r.kind == "refined"]
    assert sum(r.score.value for r in drafts) == 2 and len(drafts) == 10
    assert len(refined) == 8 and {r.score.status for r in refined} == {"no_tag"}
    assert all(r.received.leak == "" for r in drafts if r.received)
    assert {r.tags["kind"] for r in drafts} == {"request", "criticism", "refusal", "praise"}


def test_it_is_listed_and_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["tasks", "list", "--tasks", str(TASKS)]) == 0
    listed = capfd.readouterr().out
    assert "my_task" in listed and "suite my_task_and_tomi: my_task, tomi" in listed
    assert cli.main(["tasks", "show", "my_task", "--tasks", str(TASKS)]) == 0
    shown = capfd.readouterr().out
    assert "What was meant" in shown and "listener (actor)" in shown and "utterance" in shown
    assert cli.main(["tasks", "show", "mytask", "--tasks", str(TASKS)]) == 2
    assert "'my_task'" in capfd.readouterr().err


def test_soul_eval_scores_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(answer=answer) as server:
        arguments = ["eval", "api", "--tasks", str(TASKS), "--task", "my_task"]
        arguments += ["--data", f"my_task={FOLDER / 'rows.jsonl'}", "--model", "m"]
        arguments += ["--base-url", server.base_url, "--out", "run", "--json"]
        assert cli.main(arguments) == 0
    summary = json.loads(capfd.readouterr().out)
    cell = summary["tasks"]["my_task"]["value"]
    assert (cell["mean"], cell["n_scored"], cell["n"]) == (0.2, 10, 10)
    assert "value/kind=praise" in summary["tasks"]["my_task"]
    assert {body["temperature"] for body in server.requests} == {0.7}
