"""`soul eval api` against real servers that behave, misbehave and die.

How calls were sent, through `soul eval`: settings that were refused, neutral values, servers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from soulkit.extras import install_line
from soulkit.models.api.transport import BESIDE
from tests.support.evaluation import (
    FAST,
    ROOT,
    api,
    examples,
    keeper,
    last_message,
    oracle,
    paid,
    records,
    soul,
    start,
    summary,
    three_lines,
    value,
)
from tests.support.servers.faulty import FaultPlan, FaultyServer
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

SECRET = "sk-test-0123456789abcdef0123456789"


@pytest.mark.parametrize("task", ["hitom"])
def test_an_oracle_scores_one_and_a_fool_zero(task: str, tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle(task, 6)) as server:
        assert api(server.base_url, tmp_path / "right", task=task) == 0
    with ScriptedServer(answer="<answer>nowhere at all</answer>") as server:
        assert api(server.base_url, tmp_path / "wrong", task=task) == 0
    for name, mean in {"right": 1.0, "wrong": 0.0}.items():
        cell = value(tmp_path / name, task)
        assert (cell["mean"], cell["n_scored"], cell["n"]) == (mean, 6, 6)
        assert cell["unscored"] == {}


@pytest.mark.parametrize("profile", ["strict-reasoning", "thinking"])
def test_every_kind_of_server_is_scored(profile: str, tmp_path: Path) -> None:
    with ScriptedServer(profile=profile, answer=oracle("tomi", 6)) as server:  # type: ignore[arg-type]
        assert api(server.base_url, tmp_path / "run", "--max-tokens", 64) == 0
    assert value(tmp_path / "run")["mean"] == 1.0
    dropped = {tuple(r.episode.notes.get("dropped", ())) for r in records(tmp_path / "run")}
    assert dropped == ({("temperature",)} if profile == "strict-reasoning" else {()})


def test_thinking_that_fills_the_limit_is_the_actors_own_failure(tmp_path: Path) -> None:
    with ScriptedServer(profile="thinking", answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, tmp_path / "run", "--max-tokens", 5) == 1
    cell = value(tmp_path / "run")
    assert (cell["mean"], cell["worst"], cell["best"]) == (0.0, 0.0, 1.0)
    assert summary(tmp_path / "run")["statuses"] == {"tomi": {"truncated": 6}}
    assert {r.episode.transcript[0].text for r in records(tmp_path / "run")} == {""}


def test_what_was_not_answered_is_not_scored(tmp_path: Path, capsys) -> None:
    lost = said_of(examples("tomi", 6)[2])
    script = lambda index, body: Fault.status_error(503) if last_message(body) == lost else None  # noqa: E731
    with ScriptedServer(answer=oracle("tomi", 6), script=script) as server:
        assert api(server.base_url, tmp_path / "run", "--max-attempts", 2) == 1
    cell = value(tmp_path / "run")
    assert (cell["mean"], cell["n_scored"], cell["n"]) == (1.0, 5, 6)
    assert cell["unscored"] == {"provider_error": 1}
    assert (cell["worst"], cell["best"]) == (pytest.approx(5 / 6), 1.0)
    shown = capsys.readouterr()
    assert "1.000" in shown.out
    assert "(5/6)" in shown.out
    assert "provider_error (1): m: HTTP 503" in shown.err
    last = shown.err.splitlines()[-1]
    assert last.startswith("1 of 6 episodes are unscored, more than --max-unscored 0 allows")
    assert "run the same command with --out" in last


@pytest.mark.slow
def test_more_connections_than_files_are_lowered_in_one_line(tmp_path: Path) -> None:
    """Without the comparison the run ends in an internal error."""
    out = tmp_path / "run"
    with FaultyServer(FaultPlan(latency_s=(0.1, 0.2)), oracle("tomi", 150)) as server:
        process = start("eval", "api", "--model", "m", "--base-url", server.base_url, "--task",
                        "tomi", "--data", "synth:150", *FAST, "--concurrency", 512, "--out", out,
                        open_files=120)  # fmt: skip
        shown = process.communicate()
    assert process.returncode == 0, shown
    assert value(out)["n_scored"] == 150 and value(out)["mean"] == 1.0
    lowered = [line for line in shown[1].splitlines() if "concurrency is lowered from 512" in line]
    assert len(lowered) == 1 and "may only open 120 files" in lowered[0]
    assert "ulimit -n" in lowered[0]
    noted = json.loads((out / "environment.json").read_text())["concurrency"]
    assert noted["asked"] == 512 and noted["open_files"] == 120
    assert f"to {noted['used']}:" in lowered[0] and noted["used"] < 120 - BESIDE
    assert server.most_in_flight <= noted["used"]


def said_of(example) -> str:
    from soulkit.tasks.kit.registry import load_registry

    return load_registry().task(example.task).preview(example)[0].text


def test_a_small_unscored_share_is_tolerated(tmp_path: Path) -> None:
    script = {0: Fault.status_error(400, "no")}
    with ScriptedServer(answer=oracle("tomi", 6), script=script) as server:
        assert api(server.base_url, tmp_path / "run", "--max-unscored", 0.2) == 0
    assert value(tmp_path / "run")["n_scored"] == 5


def test_patience_may_change_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6), delay_s=0.4) as server:
        assert api(server.base_url, out, "--timeout", 0.1, "--max-attempts", 1) == 1
        assert value(out)["mean"] is None
        following = capsys.readouterr().err.partition("next: ")[2].partition(";")[0]
        assert soul(*following.split()[1:]) == 0, "the next line works where nothing was scored"
        assert api(server.base_url, out, "--timeout", 20, "--concurrency", 6) == 0
    assert value(out)["mean"] == 1.0


def test_a_dead_server_ends_the_run_early(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOULKIT_DOWN_AFTER_S", "0.5")
    with ScriptedServer(answer="x", script=lambda i, b: Fault.status_error(500)) as server:
        assert api(server.base_url, tmp_path / "run", "--max-attempts", 1, "--concurrency", 2,
                   n=60) == 1  # fmt: skip
        assert len(server.requests) <= 22
    said_last = capsys.readouterr().err.splitlines()[-3:]
    assert said_last[0].startswith("error: 20 episodes in a row failed; the last error: m at http")
    assert "has been down since" in said_last[0] and "(HTTP 500 " in said_last[0]
    assert len(records(tmp_path / "run")) >= 20


def test_kill_9_and_resume(tmp_path: Path) -> None:
    out, n = tmp_path / "run", 16
    with ScriptedServer(answer=oracle("tomi", n), delay_s=0.1) as server:
        command = (
            *("eval", "api", "--model", "m", "--base-url", server.base_url, "--out", out),
            *("--task", "tomi", "--data", f"synth:{n}", "--concurrency", 2, *FAST),
        )
        process = start(*command)
        server.wait_for(8)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        before = records(out)
        assert 4 <= len(before) < n
        assert all(r.score.value == 1.0 for r in before)
        assert not (out / "summary.json").exists()
        answered = {example for example, _ in paid(out)}
        calls = len(server.requests)
        assert soul(*command) == 0
        again = Counter(last_message(body) for body in server.requests[calls:])
        # What the ledger holds is not asked for again; only what was in flight is.
        assert len(server.requests) - calls == n - len(answered)
        assert set(again.values()) == {1}
        assert len(server.requests) <= n + 2
    assert (value(out)["mean"], value(out)["n_scored"]) == (1.0, n)
    assert json.loads((out / "environment.json").read_text())["resumed"]


@pytest.mark.slow
def test_interrupting_keeps_what_is_finished_and_the_same_command_resumes(tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle("tomi", 8), delay_s=0.15) as server:
        command = (
            *("eval", "api", "--model", "m", "--base-url", server.base_url),
            *("--task", "tomi", "--data", "synth:8", "--concurrency", 1, *FAST),
        )
        env = {"PYTHONPATH": str(ROOT)}
        process = start_in(tmp_path, *command, env=env)
        server.wait_for(4)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
        assert process.returncode == 130, err
        assert "interrupted: finished work is saved" in err
        process = start_in(tmp_path, *command, env=env)
        shown, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert "resuming runs/" in err
    (run,) = (tmp_path / "runs").iterdir()  # without --out, too
    assert value(run)["n_scored"] == 8
    assert "1.000" in shown
    assert len(paid(run)) == 8


def start_in(folder: Path, *arguments: object, env: dict[str, str]):
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **env},
    )


def test_json_is_alone_on_stdout_and_the_key_in_no_file(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    out, key = tmp_path / "run", ("--api-key-env", "MY_KEY", "--json")
    script = {0: Fault.status_error(401, f"bad key {SECRET}")}
    answer = lambda body: f"{SECRET} {oracle('tomi', 6)(body)}"  # noqa: E731
    with ScriptedServer(answer=answer, require_key=SECRET, script=script) as server:
        assert api(server.base_url, out, *key, "--concurrency", 1) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == summary(out)
    assert value(out)["n_scored"] == 5
    assert SECRET not in shown.out + shown.err
    files = [p for p in out.rglob("*") if p.is_file()]
    assert {"config.yaml", "episodes.jsonl", "ledger.sqlite"} <= {p.name for p in files}
    assert [p.name for p in files if SECRET.encode() in p.read_bytes()] == []


def test_repeats_are_calls_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, out, "--repeats", 3, "--limit", 4) == 0
        assert len(server.requests) == 12
        assert len({body["seed"] for body in server.requests}) == 12
    assert value(out)["n"] == 12
    assert Counter(r.rollout for r in records(out)) == {0: 4, 1: 4, 2: 4}


def test_a_dry_run_asks_nothing_and_writes_nothing(tmp_path: Path, capsys) -> None:
    with ScriptedServer() as server:
        code = api(server.base_url, tmp_path / "run", "--dry-run", "--json", "--price-in", 3,
                   "--price-out", 6, "--repeats", 2, "--max-tokens", 100)  # fmt: skip
        assert code == 0
        assert server.requests == []
    plan = json.loads(capsys.readouterr().out)
    words = 2 * sum(len(said_of(e).split()) for e in examples("tomi", 6))
    assert (plan["episodes"], plan["calls"], plan["prompt_words"]) == (12, 12, words)
    assert plan["cost_limit"] == pytest.approx((3 * words * 4 / 3 + 6 * 12 * 100) / 1e6, 1e-3)
    assert plan["cost"] == pytest.approx(plan["cost_limit"])  # no usual reply is longer
    assert not (tmp_path / "run").exists()


# --- two parties ----------------------------------------------------------------------------------


def test_a_partner_that_fails_leaves_the_episode_unscored(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = lambda index, body: Fault.status_error(500) if index >= 2 else None  # noqa: E731
    with (
        ScriptedServer(answer="What is your job?", script=script) as partner,
        ScriptedServer(answer=keeper) as server,
    ):
        arguments = ("--partner", f"endpoint:p@{partner.base_url}")
        few = ("--max-attempts", 1, "--concurrency", 1)
        assert api(server.base_url, out, *arguments, *few, task="secret_keeper", n=2) == 1
    cell = value(out, "secret_keeper")
    assert cell["mean"] is None
    assert cell["unscored"] == {"partner_error": 2}
    first, second = records(out)
    assert len(first.episode.transcript) == 4  # what was played stays on record
    assert first.score.value is second.score.value is None
    assert len(paid(out)) == 4


def test_no_partner_stops_before_anything_is_played(tmp_path: Path, capsys) -> None:
    with ScriptedServer(answer="x") as server:
        code = api(server.base_url, tmp_path / "run", task="tomi,secret_keeper", n=2)
        assert (code, server.requests) == (2, [])
    what, _, fix = three_lines(capsys.readouterr().err)
    assert "'partner'" in what
    assert "--partner endpoint:MODEL@URL" in fix
    assert "soul serve --script" in fix
    assert not (tmp_path / "run").exists()


def test_a_served_script_prints_its_address_and_stops(tmp_path: Path) -> None:
    process = start("serve", "--script", "secret_keeper", "--port", 0)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    with ScriptedServer(answer=keeper) as server:
        arguments = ("--partner", f"endpoint:scripted-visitor@{url}")
        code = api(server.base_url, tmp_path / "run", *arguments, task="secret_keeper", n=2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert (code, process.returncode) == (0, 130)
    assert f"--partner endpoint:scripted-visitor@{url}" in err
    assert "Traceback" not in err and err.splitlines()[-1] == "stopped"


# --- without torch --------------------------------------------------------------------------------

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "peft", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.mark.slow
def test_api_works_without_torch_and_local_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with ScriptedServer(answer=oracle("tomi", 4)) as server:
        common = ("--task", "tomi", "--data", "synth:4", "--json")
        url = ("--base-url", server.base_url)
        process = start("eval", "api", "--model", "m", *url, *common, "--out", tmp_path / "r",
                        env=env)  # fmt: skip
        shown, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert json.loads(shown)["tasks"]["tomi"]["value"]["mean"] == 1.0
    process = start("eval", "local", "--model", tmp_path, *common, env=env)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 2
    assert install_line("train") in three_lines(err)[2]


WHOLE = {"actor": {"m": {"temperature": 1.0}}}


def no_temperature(index: int, body: Body) -> Fault | None:
    if "temperature" not in body:
        return None
    text = "Unsupported parameter: 'temperature' is not supported with this model."
    return Fault.status_error(400, text, code="unsupported_parameter", param="temperature")


def record(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "conditions.json").read_text())
    return loaded


@pytest.mark.parametrize("ledger", ["record", "off"])
def test_a_refused_setting_is_recorded_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ledger: str
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6), script=no_temperature) as server:
        assert api(server.base_url, out, "--temperature", 0.7, "--ledger", ledger) == 0
    shown = capsys.readouterr()
    assert shown.err.count("tomi actor temperature (100 % of calls)") == 1
    assert "rejected by servers tomi actor temperature" in " ".join(shown.out.split())
    entry = record(out)["tasks"]["tomi"]
    assert summary(out)["dropped_settings"] == {"tomi": WHOLE}
    assert entry["dropped_settings"] == WHOLE
    (sent,) = entry["sent"]["actor"]["m"]
    assert sent["calls"] == 6 and sent["top_p"] == 1.0 and "temperature" not in sent
    assert entry["sampling"]["temperature"] == 0.7, "what was asked for stays"
    assert summary(out)["provenance"]["tasks"]["tomi"]["dropped_settings"] == WHOLE
    assert soul("report", out, "--format", "html", "--out", tmp_path / "page.html") == 0
    assert "tomi actor temperature (100 % of calls)" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert soul("show", out, "--worst", 1) == 0
    assert "settings that the server rejected: temperature" in capsys.readouterr().out


def test_the_share_is_of_calls_and_survives_a_resume(tmp_path: Path) -> None:
    """The server takes the setting at first; the second start plays the rows that failed."""
    out = tmp_path / "run"

    def script(index: int, body: Body) -> Fault | None:
        return Fault.status_error(400, "no") if index >= 3 else None

    one_by_one = ("--concurrency", 1, "--temperature", 0.7, "--max-unscored", 1)
    answer = oracle("tomi", 6)
    with ScriptedServer(answer=answer, script=script) as server:
        port = int(server.base_url.split(":")[2].removesuffix("/v1"))
        assert api(server.base_url, out, *one_by_one) == 0
    assert "dropped_settings" not in summary(out)
    with ScriptedServer(answer=answer, script=no_temperature, port=port) as server:
        assert api(server.base_url, out, *one_by_one) == 0
        assert api(server.base_url, out, *one_by_one) == 0, "nothing is left, nothing is lost"
    half = {"actor": {"m": {"temperature": 0.5}}}
    assert summary(out)["dropped_settings"] == {"tomi": half}
    entry = record(out)["tasks"]["tomi"]
    assert entry["dropped_settings"] == half
    sent = [("temperature" in one, one["calls"]) for one in entry["sent"]["actor"]["m"]]
    assert sorted(sent) == [(False, 3), (True, 3)]


@pytest.mark.parametrize(
    ("owner", "extra", "server_is", "values"),
    [
        ("vllm", {}, {"engine": "vllm", "defaults": "not used"},
         {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
        ("llamacpp", {"/props": {"default_generation_settings": {"n_ctx": 4096}}},
         {"engine": "llamacpp", "defaults": "not used", "context": 4096},
         {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}),
        ("library", {}, {"defaults": "unknown"}, {}),
    ],
)  # fmt: skip
def test_the_record_holds_what_was_sent_and_to_which_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], owner: str, extra: dict[str, Any],
    server_is: dict[str, Any], values: dict[str, Any],
) -> None:  # fmt: skip
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6), owner=owner, extra=extra) as server:
        assert api(server.base_url, out, "--temperature", 0.7) == 0
    (sent,) = record(out)["tasks"]["tomi"]["sent"]["actor"]["m"]
    basic = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 256, "seed": "one per call"}
    assert sent == {**basic, **values, "calls": 6}
    assert record(out)["servers"] == {f"m@{server.base_url}": server_is}
    assert summary(out)["provenance"]["servers"] == record(out)["servers"]
    shown = capsys.readouterr()
    unknown = server_is["defaults"] == "unknown"
    assert shown.err.count("unknown server: m at ") == unknown
    assert ("unknown server defaults m@" in " ".join(shown.out.split())) == unknown
