"""An actor that says nothing, in every task: cut at its limit it is `truncated`, else `empty`."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.models.base import Cast
from soulkit.play.engine import Engine, Job
from soulkit.tasks.kit.base import Task
from soulkit.tasks.scaffold import TEMPLATES
from soulkit.types import Form, Record
from tests.support.evaluation import soul, summary
from tests.support.road import (
    TASKS,
    makeable,
    player,
    run,
    synth_examples,
    task_of,
)
from tests.support.servers.openai_server import Fault, ScriptedServer, completion, is_probe

PLAYABLE = sorted(set(makeable()) & set(TASKS))
THINKING = "<think>Let me see what this person would say"
ROWS = 2


def silent(stop: str, text: str = "") -> Any:
    """A script in which the model `m` ends every reply with `stop` and no visible text; at its
    limit it has used up all its tokens."""

    def reply(index: int, body: dict[str, Any]) -> Fault | None:
        if body["model"] != "m":
            return None
        answer = completion(body, text)
        answer["choices"][0]["finish_reason"] = stop
        used = body.get("max_tokens") or body.get("max_completion_tokens")
        answer["usage"]["completion_tokens"] = used if stop == "length" else len(text.split())
        return Fault.reply(answer)

    return reply


def others(task: Task) -> Any:
    """What partners say, and a judge of the task who finds everything bad."""

    def answer(body: dict[str, Any]) -> str:
        if body["model"] != "judge":
            return "Good evening."
        schema = (body.get("response_format") or {}).get("json_schema")
        form = Form(schema["name"], json.dumps(schema["schema"])) if schema else None
        return task.scripted_verdict(form, perfect=False) or ""

    return answer


def played(name: str, protocol: str, stop: str, text: str = "") -> list[Record]:
    """What the engine makes of a silent actor among others who speak."""
    task, rows = task_of(name, protocol), synth_examples(name, ROWS, protocol)
    with ScriptedServer(answer=others(task), script=silent(stop, text)) as server:
        seats = {seat: player(server.base_url, seat) for seat in ("partner", "environment")}
        judges = (player(server.base_url, "judge"),)
        cast = Cast(actor=player(server.base_url, "m"), judges=judges, **seats)
        jobs = [Job(task, row) for row in rows]
        return list(run(cast, Engine(cast).run(jobs, lambda record: None)))


@pytest.mark.parametrize("name", PLAYABLE)
def test_a_silent_actor_is_truncated_at_its_limit_and_else_empty(name: str) -> None:
    silence = played(name, "paper", "length")
    assert {record.score.value for record in silence} == {task_of(name).spec.metric.low}
    for records, status in (
        (silence, "truncated"), (played(name, "reference", "length"), "truncated"),
        (played(name, "paper", "length", THINKING), "truncated"),
        (played(name, "paper", "stop"), "empty"),
    ):  # fmt: skip
        assert {record.score.status for record in records} == {status}


# -- tasks of one's own, and the exit code ---------------------------------------------------------


def evaluated(out: Path, script: Any, *arguments: object) -> int:
    """The exit code of an evaluation whose actor is scripted; the others speak."""
    with ScriptedServer(answer="Good evening.", script=script) as server:
        who = f"endpoint:other@{server.base_url}"
        players = [part for role in ("partner", "judge", "environment")
                   for part in (f"--{role}", who)]  # fmt: skip
        return soul("eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out,
                    *players, "--backoff", "0", *arguments)  # fmt: skip


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of new tasks, one of each kind."""
    place = tmp_path_factory.mktemp("own")
    for kind in TEMPLATES:
        options = ("--python", "--kind", kind, "--out", place / kind)
        assert soul("tasks", "new", f"night_{kind}", *options) == 0
    return place


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("text", ["", THINKING, f"{THINKING}</think>"])
def test_a_judge_of_a_new_task_is_asked_about_no_silence(
    kind: str, text: str, own_tasks: Path, tmp_path: Path
) -> None:
    task = f"night_{kind}"
    options = ("--task", task, "--tasks", own_tasks / kind / "tasks.yaml", "--data", "synth:3")
    for stop in ("length", "stop"):
        assert evaluated(tmp_path / stop, silent(stop, text), *options) == 1
        written = summary(tmp_path / stop)
        named = {"truncated"} if stop == "length" else {"empty", "no_tag"}
        assert set(written["statuses"][task]) <= named
        cell = next(cell for cell in written["tasks"][task].values() if cell.get("headline"))
        assert cell["mean"] == 0.0


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize(("stop", "status"), [("length", "truncated"), ("stop", "empty")])
def test_a_new_task_says_so_and_the_exit_code_is_1(
    kind: str, stop: str, status: str, own_tasks: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    task = f"night_{kind}"
    options = ("--task", task, "--tasks", own_tasks / kind / "tasks.yaml", "--data", "synth:3")
    assert evaluated(tmp_path, silent(stop), *options) == 1
    written = summary(tmp_path)
    assert written["statuses"] == {task: {status: 3}}
    cell = next(cell for cell in written["tasks"][task].values() if cell.get("headline"))
    assert cell["mean"] == 0.0
    assert (cell.get("worst"), cell.get("best")) == ((0, 1) if stop == "length" else (None, None))
    printed = capsys.readouterr().err
    assert ("episodes are truncated" in printed) == (stop == "length")
    assert (f"every reply was empty: {task} (" in printed) == (stop == "stop")


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_new_task_has_no_limit_of_its_own(kind: str, own_tasks: Path) -> None:
    (declared,) = yaml.safe_load((own_tasks / kind / "tasks.yaml").read_text())["tasks"].values()
    assert "max_tokens" not in declared["sampling"]


@pytest.mark.parametrize(("task", "speaks", "code"), [
    ("tomi", 0, 1), ("tomi", 1, 0), ("secret_keeper", 0, 1), ("secret_keeper", 1, 0),
])  # fmt: skip
def test_one_reply_is_enough_not_to_be_silent(
    task: str, speaks: int, code: int, tmp_path: Path
) -> None:
    replies: list[int] = []
    mute = silent("stop")

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        if body["model"] != "m" or is_probe(body):
            return None
        replies.append(index)
        return None if len(replies) <= speaks else mute(index, body)

    assert evaluated(tmp_path, script, "--task", task, "--data", "synth:20") == code
    assert summary(tmp_path)["limits"][task]["silent"] == len(replies) - speaks


def test_one_silent_task_of_several_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = silent("stop")

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return mute(index, body) if "<answer>" in str(body["messages"]) else None

    arguments = ("--task", "tomi", "--task", "instructions", "--data", "synth:2")
    assert evaluated(tmp_path, script, *arguments) == 1
    printed = capsys.readouterr().err
    assert "every reply was empty: tomi (2 of 2);" in printed


def test_cut_replies_may_be_allowed_and_silence_is_not(tmp_path: Path) -> None:
    """`--max-unscored` bounds the truncated share; a model that says nothing is no share."""
    stops = {"cut": ["length"], "both": ["length", "stop"]}
    for name, ways in stops.items():
        scripts = cycle(map(silent, ways))

        def script(index: int, body: dict[str, Any], scripts: Any = scripts) -> Fault | None:
            return None if body["model"] != "m" or is_probe(body) else next(scripts)(index, body)

        options = ("--task", "tomi", "--data", "synth:4", "--max-unscored", 1)
        assert evaluated(tmp_path / name, script, *options) == (name == "both")
