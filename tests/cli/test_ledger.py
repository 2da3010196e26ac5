"""`soul ledger` on the ledgers of real runs, and what a broken ledger does to a command."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from soulkit.cli.app import main
from soulkit.models.ledger import storage as ledger_file
from soulkit.models.ledger.view import LedgerView
from tests.support.evaluation import (
    ROOT,
    api,
    examples,
    oracle,
    records,
    soul,
    start,
    three_lines,
    visitor,
)
from tests.support.servers.openai_server import ScriptedServer

SECRET = "sk-test-0123456789abcdef0123456789"


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def change(run: Path, statement: str) -> None:
    db = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    db.execute(statement)
    db.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six answered episodes of tomi, with prices."""
    out = tmp_path / "run"
    with ScriptedServer(answer=oracle("tomi", 6)) as server:
        assert api(server.base_url, out, "--price-in", 1, "--price-out", 2) == 0
    return out


def test_stats(run: Path, capfd) -> None:
    capfd.readouterr()
    assert soul("ledger", "stats", run) == 0
    shown = capfd.readouterr().out
    assert "actor" in shown and "6/6" in shown and "6 calls, cost $0.00" in shown
    assert soul("ledger", "stats", run / "ledger.sqlite", "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert report["version"] == ledger_file.VERSION
    [group] = report["groups"]
    assert (group["role"], group["model"], group["calls"], group["priced"]) == ("actor", "m", 6, 6)
    assert group["attempts"] == 6
    assert group["prompt_tokens"] > 0 < group["completion_tokens"]
    assert group["cost"] == pytest.approx(
        (group["prompt_tokens"] + 2 * group["completion_tokens"]) / 1e6
    )
    assert 0 < group["p50"] <= group["p95"]
    assert group["first"] <= group["last"]


def test_show_prints_prompts_and_clean_replies(tmp_path: Path, capfd) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="\x1b[31m[bold]red\x07 <answer>x</answer>") as server:
        assert api(server.base_url, out) == 0
    capfd.readouterr()
    row = examples("tomi", 6)[0]
    assert soul("ledger", "show", out, "--example", row.id, "--role", "actor") == 0
    shown = capfd.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown
    assert "[bold]red <answer>x</answer>" in shown
    assert row.fields["question"] in shown
    assert f"example {row.id}, rollout 0, draft" in shown
    assert soul("ledger", "show", out, "--limit", 2, "--json") == 0
    entries = json.loads(capfd.readouterr().out)
    assert len(entries) == 2
    assert soul("ledger", "show", out, "--key", entries[1]["key"][:10], "--json") == 0
    assert json.loads(capfd.readouterr().out) == entries[1:]
    assert soul("ledger", "show", out, "--role", "coach") == 2
    assert "no matching call" in three_lines(capfd.readouterr().err)[0]


def test_export_is_whole_stable_and_holds_no_key(
    tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    run, file = tmp_path / "run", tmp_path / "deep" / "l.jsonl"
    echo = lambda body: f"I was sent {SECRET}"  # noqa: E731
    with ScriptedServer(answer=echo, require_key=SECRET) as server:
        assert api(server.base_url, run, "--api-key-env", "MY_KEY") == 0
    assert soul("ledger", "export", run, "--out", file) == 0
    capfd.readouterr()
    assert soul("ledger", "export", run) == 0
    text = file.read_text()
    assert capfd.readouterr().out == text
    assert SECRET not in text and "Authorization" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 6
    assert {tuple(line) for line in lines} == {
        ("key", "role", "example_id", "rollout", "kind", "turn", "sample", "step", "seat",
         "purpose", "model", "reply", "dropped", "prompt_tokens", "completion_tokens", "cost",
         "seconds", "attempts", "created", "request"),
    }  # fmt: skip
    assert {line["request"]["sampling"]["max_tokens"] for line in lines}
    assert {line["request"]["messages"][0]["role"] for line in lines} == {"user"}
    assert [p.name for p in file.parent.iterdir()] == ["l.jsonl"]


def test_a_good_run_verifies(run: Path, capfd) -> None:
    capfd.readouterr()
    assert soul("ledger", "verify", run) == 0
    assert "6 entries (version 3), 6 keys checked, calls of 6 scored episodes: no problem" in (
        " ".join(capfd.readouterr().out.split())
    )
    assert soul("ledger", "verify", run / "ledger.sqlite", "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["entries"], report["recomputed"], report["episodes"]) == (6, 6, None)


def test_a_dialogue_verifies_and_misses_a_lost_partner(tmp_path: Path, capfd) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="I say nothing.") as server, visitor() as url:
        assert api(server.base_url, out, "--partner", f"endpoint:v@{url}",
                   task="secret_keeper", n=3) == 0  # fmt: skip
    assert soul("ledger", "verify", out) == 0
    lost = records(out)[1].example_id
    change(out, f"DELETE FROM calls WHERE role = 'partner' AND example_id = '{lost}'")
    capfd.readouterr()
    assert soul("ledger", "verify", out) == 1
    assert "has 0 of 1 calls of role partner" in capfd.readouterr().out


def test_verify_finds_lost_calls(run: Path, capfd) -> None:
    lost = records(run)[2].example_id
    change(run, f"DELETE FROM calls WHERE example_id = '{lost}'")
    capfd.readouterr()
    assert soul("ledger", "verify", run, "--json") == 1
    report = json.loads(capfd.readouterr().out)
    assert report["counts"] == {"missing calls": 1}
    assert f"0/{lost}/0/draft of tomi has 0 of 1 calls of role actor" in report["findings"][0]
    assert soul("ledger", "verify", run / "ledger.sqlite") == 0


def test_no_ledger_is_three_lines(tmp_path: Path, run: Path, capfd) -> None:
    (tmp_path / "text").write_text("no database " * 500)
    for command in ("stats", "show", "export", "verify"):
        for where in (tmp_path / "nowhere", tmp_path, tmp_path / "text"):
            capfd.readouterr()
            assert soul("ledger", command, where) == 2
            assert "ledger" in three_lines(capfd.readouterr().err)[0]
    (run / "ledger.sqlite").unlink()
    assert soul("ledger", "stats", run) == 2
    assert "has no ledger" in three_lines(capfd.readouterr().err)[0]


def test_a_run_that_replayed_shows_the_ledger_it_replayed(run: Path, tmp_path: Path, capfd) -> None:
    replay = ("--ledger", "replay", "--ledger-file", run / "ledger.sqlite")
    url = json.loads(_first_request(run))["base_url"]
    assert api(url, tmp_path / "again", *replay) == 0
    capfd.readouterr()
    assert soul("ledger", "verify", tmp_path / "again") == 0
    assert "calls of 6 scored episodes: no problem found" in capfd.readouterr().out


def _first_request(run: Path) -> str:
    db = sqlite3.connect(run / "ledger.sqlite")
    try:
        return str(db.execute("SELECT body FROM settings").fetchone()[0])
    finally:
        db.close()


# -- commands that meet a broken ledger ----------------------------------------------------------


def resumed(out: Path, capfd) -> str:
    """What a resumed evaluation says first; it must stop in three lines and not change the file."""
    (out / "episodes.jsonl").write_text("")
    before = (out / "ledger.sqlite").read_bytes()
    capfd.readouterr()
    with ScriptedServer(answer="x") as server:
        url = json.loads(_config(out))["base_url"]
        assert api(url, out, "--price-in", 1, "--price-out", 2) == 2
        assert server.requests == []
    assert (out / "ledger.sqlite").read_bytes() == before
    lines = [x for x in capfd.readouterr().err.splitlines() if not x.startswith("resuming")]
    return three_lines("\n".join(lines[-3:]))[0]


def _config(out: Path) -> str:
    from soulkit.runs.folder import read_config

    return json.dumps(read_config(out))


def test_an_evaluation_stops_at_a_corrupt_ledger(run: Path, capfd) -> None:
    path = run / "ledger.sqlite"
    data = bytearray(path.read_bytes())
    data[4096 : 4096 + 3000] = b"\xa5" * 3000
    path.write_bytes(data)
    assert "cannot be used" in resumed(run, capfd)


def test_an_evaluation_stops_at_a_truncated_ledger(run: Path, capfd) -> None:
    path = run / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[:6000])
    assert "cannot be used" in resumed(run, capfd)


def test_an_evaluation_stops_at_a_newer_ledger(run: Path, capfd) -> None:
    change(run, "PRAGMA user_version=99")
    assert "has version 99" in resumed(run, capfd)


def test_an_evaluation_stops_at_a_changed_reply(run: Path, capfd) -> None:
    change(run, "UPDATE calls SET reply = replace(reply, 'answer', 'ANSWER')")
    assert "is damaged" in resumed(run, capfd)


def test_an_evaluation_stops_at_a_locked_ledger(
    run: Path, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_S", 0.2)
    change(run, "DELETE FROM calls")
    (run / "episodes.jsonl").write_text("")
    holder = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    port = int(json.loads(_config(run))["base_url"].split(":")[2].split("/")[0])
    capfd.readouterr()
    with ScriptedServer(answer=oracle("tomi", 6), port=port) as server:
        assert api(server.base_url, run, "--price-in", 1, "--price-out", 2) == 2
        lines = three_lines("\n".join(capfd.readouterr().err.splitlines()[-3:]))
        assert "could not be stored in the ledger" in lines[0] and "locked" in lines[0]
        assert "may have been paid for" in lines[1]
        holder.execute("ROLLBACK")
        holder.close()
        assert api(server.base_url, run, "--price-in", 1, "--price-out", 2) == 0
    assert soul("ledger", "verify", run) == 0


def test_an_evaluation_on_a_full_disk_keeps_what_was_paid(tmp_path: Path) -> None:
    """On a disk of 400 kB, in a mount namespace of its own; then on one with room."""
    disk, copy, size = tmp_path / "disk", tmp_path / "copy", "size=400k"
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("this machine does not allow mounting a small disk")
    with ScriptedServer(answer=lambda body: "x" * 3000) as server:
        evaluate = (
            f"'{sys.executable}' -m soulkit.cli.app eval api --model m --task tomi --data synth:400"
            f" --base-url {server.base_url} --out '{disk}/run'"
        )
        small = f"mount -t tmpfs -o {size} tmpfs '{disk}' && {{ {evaluate}; echo $?; }}"
        done = isolated(f"{small}; cp -r '{disk}/run' '{copy}'")
        calls = len(server.requests)
    what, why, _ = three_lines("\n".join(done.stderr.splitlines()[-3:]))
    assert done.stdout.split()[-1] == "2"
    assert "full" in what or "No space left" in why
    with LedgerView(copy / "ledger.sqlite") as view:
        findings = view.verify()
    assert findings.lines() == []
    assert 5 < findings.entries <= calls < 400


def may_mount(folder: Path) -> bool:
    return isolated(f"mount -t tmpfs -o size=40k tmpfs '{folder}'").returncode == 0


def isolated(script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "-m", "sh", "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_prompts_on_a_broken_page_do_not_hide_the_replies(run: Path, capfd) -> None:
    """Pages of `contexts` are overwritten: what was answered is still shown, and it is said."""
    path = run / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        size = db.execute("PRAGMA page_size").fetchone()[0]
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'contexts'"
        page = db.execute(sql).fetchone()[0]
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = b"\xa5" * size
    path.write_bytes(data)
    assert soul("ledger", "show", run, "--limit", 1) == 0
    shown = capfd.readouterr().out
    assert "damaged: its prompt cannot be read" in shown and "reply (stop)" in shown
    assert soul("ledger", "export", run) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines and all(json.loads(line)["request"] is None for line in lines)
    assert soul("ledger", "verify", run) == 1


def test_a_reader_that_leaves_early_sees_no_traceback(run: Path) -> None:
    process = start("ledger", "export", run)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=600)


def test_help_names_the_commands(capfd) -> None:
    assert main(["ledger", "--help"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in ("stats", "show", "export", "verify"))
