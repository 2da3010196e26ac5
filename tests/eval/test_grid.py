"""Several models and system prompts: combinations, budget, resume, and what the model sees."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.eval.grid import combinations, grid_runs
from soulkit.metrics.comparisons import holm
from soulkit.models.base import ModelPrompt
from soulkit.models.ledger.view import LedgerView, paid_so_far
from soulkit.report.load import load_runs
from soulkit.report.published import published_beside
from soulkit.types import Segment
from tests.support.evaluation import Body, oracle, records, soul, start, three_lines
from tests.support.servers.openai_server import ScriptedServer

SYSTEM, USER = Segment("system", "brief"), Segment("user", "hello")


@pytest.mark.parametrize(
    ("replaces", "context", "seen"),
    [
        (False, [USER], [("system", "own"), ("user", "hello")]),
        (False, [SYSTEM, USER], [("system", "own\n\nbrief"), ("user", "hello")]),
        (True, [SYSTEM, USER], [("system", "own"), ("user", "hello")]),
    ],
)
def test_instructions_come_before_the_task_or_in_its_place(
    replaces: bool, context: list[Segment], seen: list[tuple[str, str]]
) -> None:
    made = ModelPrompt("own", replaces).added_to(context)
    assert [(one.role, one.text) for one in made] == seen
    assert ModelPrompt().added_to(context) == tuple(context)


def _named(model: str | None, system_prompt: str | None) -> Any:
    prompt = SimpleNamespace(name=system_prompt) if system_prompt else None
    return SimpleNamespace(model=model or "of the file", system_prompt=prompt)


def test_folders_are_named_by_model_and_prompt_with_the_baseline_first() -> None:
    grid = combinations(["owner/name@v1", "b"], ["terse", "kind"], _named)
    assert list(grid) == ["owner-name-v1--terse", "owner-name-v1--kind", "b--terse", "b--kind"]
    assert list(combinations([], [], _named)) == ["of-the-file"]
    with pytest.raises(ConfigError, match="the run folder 'b--kind'"):
        combinations(["b"], ["kind", "kind"], _named)


def command(url: str, out: Path, *more: object, rows: int = 12) -> list[str]:
    words = ("eval", "api", "--base-url", url, "--task", "tomi", "--data", f"synth:{rows}",
             "--price-in", 1, "--price-out", 1, "--out", out, *more)  # fmt: skip
    return [str(word) for word in words]


def prompts(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("alpha", "beta"):
        (folder / f"{name}.md").write_text(f"You are {name}.\n")
    return folder


def asked(server: ScriptedServer) -> Counter[tuple[str, str]]:
    """(model, all messages) → how often the server was asked."""
    return Counter((body["model"], json.dumps(body["messages"])) for body in server.requests)


def by_prompt(body: Body) -> str:
    """Right for one model, and for the other one only with the prompt alpha."""
    if body["model"] == "good" or "alpha" in body["messages"][0]["content"]:
        return RIGHT(body)
    return "<answer>nowhere</answer>"


RIGHT = oracle("tomi", 24)


def test_every_combination_is_a_run_and_one_table_compares_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = prompts(tmp_path / "prompts"), tmp_path / "grid"
    words = ("--system-prompt", "none", "--system-prompt", folder)
    with ScriptedServer(answer=by_prompt) as server:
        one = command(server.base_url, out, "--model", "bad", *words, "--json")
        assert soul(*one) == 0
        capsys.readouterr()
        asked_before = asked(server)
        # Another model continues with what is finished, and nothing is asked twice.
        assert soul(*command(server.base_url, out, "--model", "bad", "--model", "good", *words,
                             "--json")) == 0  # fmt: skip
        again = asked(server) - asked_before
        shown = json.loads(capsys.readouterr().out)
        # A narrower command keeps the other runs in the table, with its own first run in front.
        assert soul(*command(server.base_url, out, "--model", "good", *words)) == 0
        assert asked(server) == again + asked_before
    assert max(again.values()) == 1 and {model for model, _ in again} == {"good"}
    names = ["bad", "bad--alpha", "bad--beta", "good", "good--alpha", "good--beta"]
    assert list(shown["runs"]) == names and not shown["problems"]
    pairs = [one["tasks"][0] for one in shown["comparisons"]]
    assert [pair["mean_b"] for pair in pairs] == [1, 0, 1, 1, 1]
    assert [pair["difference"] for pair in pairs] == [1, 0, 1, 1, 1]
    # Holm's p is corrected for all combinations, not for the one task of a pair.
    expected = holm([pair["p"] for pair in pairs])
    assert [pair["p_holm"] for pair in pairs] == expected != [pair["p"] for pair in pairs]
    # What is recorded is what the model saw, and a prompt of the model's own may be compared.
    seen = records(out / "bad--alpha")[0].episode.traces[0].turns[0].context[0]
    assert (seen.role, seen.text) == ("system", "You are alpha.")
    assert soul("compare", out / "bad", out / "good--alpha") == 0
    assert "system prompt of the model none vs alpha (" in capsys.readouterr().out
    assert [run.name for run in grid_runs(out)] == [*names[3:], *names[:3]]
    capsys.readouterr()
    assert soul("report", out) == 0
    assert "Models and system prompts" in capsys.readouterr().out
    assert soul("report", out, "--format", "html") == 0
    assert "alpha (" in (out / "report" / "index.html").read_text()


def test_all_combinations_spend_one_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, models = tmp_path / "grid", ("--model", "good", "--model", "bad")
    with ScriptedServer(answer=by_prompt) as server:
        assert soul(*command(server.base_url, out, *models, "--concurrency", 1)) == 0
        whole = sum(paid_so_far(run)[0] or 0.0 for run in grid_runs(out))
        assert soul(*command(server.base_url, tmp_path / "b", *models, "--concurrency", 1,
                             "--max-cost", whole * 0.75)) == 2  # fmt: skip
    assert "of at most" in capsys.readouterr().err
    assert (tmp_path / "b" / "good" / "summary.json").exists()
    assert 0 < len(records(tmp_path / "b" / "bad")) < 12


def test_an_endpoint_of_the_file_is_a_model(tmp_path: Path) -> None:
    book, out = tmp_path / "endpoints.yaml", tmp_path / "grid"
    with ScriptedServer(answer=by_prompt) as server:
        book.write_text(f"endpoints:\n  mine: {{model: good, base_url: {server.base_url}}}\n"
                        "  here: {kind: local, model: folder}\n")  # fmt: skip
        usual = ("eval", "api", "--task", "tomi", "--data", "synth:2", "--endpoints", book)
        assert soul(*usual, "--model", "mine", "--out", tmp_path / "one") == 0
        assert {body["model"] for body in server.requests} == {"good"}
        assert soul(*usual, "--model", "mine", "--model", "here", "--out", out) == 2
        assert soul(*usual, "--model", "mine", "--base-url", "http://127.0.0.1:9/v1") == 2


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--system-prompt", "nowhere.md"), "cannot be read"),
        (("--prompt-mode", "replace", "--system-prompt", "alpha.md"), "replace does not work with"),
        (("--prompt-mode", "replace"), "needs --system-prompt"),
        (("--system-prompt", "alpha.md", "--system-prompt", "d/alpha.md"), "folder 'm--alpha'"),
        (("--model", "b", "--config", "settings.yaml"), "--gate does not work"),
        (("--model", "b", "--dry-run", "--pilot", 2), "--pilot does not work"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_asked(
    words: tuple[object, ...], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    prompts(tmp_path)
    prompts(tmp_path / "d")
    (tmp_path / "settings.yaml").write_text("gate: [tomi>=.9]\n")
    url = "http://127.0.0.1:9/v1"
    assert soul(*command(url, tmp_path / "out", "--model", "m", *words)) == 2
    assert what in three_lines(capsys.readouterr().err)[0]
    assert not (tmp_path / "out").exists()


def test_the_report_of_a_grid_has_its_suite_and_its_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, book = tmp_path / "grid", tmp_path / "mine.yaml"
    book.write_text("suites: {short: [tomi]}\n")
    with ScriptedServer(answer=by_prompt) as server:
        assert soul(
            *("eval", "api", "--base-url", server.base_url, "--suite", "short", "--tasks", book),
            *("--data", "synth:6", "--repeats", 2, "--model", "bad", "--model", "good"),
            *("--out", out),
        ) == 0  # fmt: skip
    shown = capsys.readouterr().out
    for part in ("Models and system prompts", "\nshort\n", "repeats: bad", "repeats: good"):
        assert part in shown


def test_a_failed_combination_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    book, out = tmp_path / "endpoints.yaml", tmp_path / "grid"
    usual = ("eval", "api", "--task", "tomi", "--data", "synth:2", "--endpoints", book,
             "--out", out, "--model", "wrong")  # fmt: skip
    with ScriptedServer(answer=by_prompt) as server, ScriptedServer(require_key="k") as refusing:
        book.write_text(f"endpoints:\n  wrong: {{model: w, base_url: {refusing.base_url}}}\n"
                        f"  right: {{model: good, base_url: {server.base_url}}}\n"
                        f"  wrong2: {{model: v, base_url: {refusing.base_url}}}\n")  # fmt: skip
        assert soul(*usual, "--model", "wrong2") == 1
        assert soul(*usual, "--model", "right") == 1
    assert "wrong failed, and the same command tries it again" in capsys.readouterr().err
    assert [run.name for run in grid_runs(out)] == ["wrong", "right"]
    assert load_runs([out / "right"])[0].summary
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
    assert soul("eval", "local", "--model", tmp_path / "x", "--model", tmp_path / "y", "--task",
                "tomi", "--data", "synth:2", "--out", tmp_path / "local") == 1  # fmt: skip
    assert capsys.readouterr().err.count("is not a complete model") == 2


def test_a_replaced_prompt_is_named_and_hides_published_figures(tmp_path: Path) -> None:
    prompts(tmp_path)
    partner = tmp_path / "partner.yaml"
    partner.write_text('name: visitor\nreplies: ["Good evening.", "Tell me more."]\n')
    with ScriptedServer(answer="Hello.") as server:
        assert soul(
            *("eval", "api", "--model", "m", "--base-url", server.base_url, "--data", "synth:2"),
            *("--task", "secret_keeper", "--out", tmp_path / "run"),
            *("--partner", f"scripted:{partner}", "--prompt-mode", "replace"),
            *("--judge", f"endpoint:m@{server.base_url}", "--system-prompt", "none"),
            *("--system-prompt", tmp_path / "alpha.md"),
        ) in (0, 1)  # fmt: skip
        spoken = [body for body in server.requests if len(body["messages"]) > 2]
    # Beside a replacement, none is the task's own prompt.
    replacement, of_task = Counter(body["messages"][0]["content"] == "You are alpha."
                                   for body in spoken).values()  # fmt: skip
    assert replacement == of_task
    (run,) = load_runs([tmp_path / "run" / "m--alpha"])
    assert run.provenance["actor"]["system_prompt"].endswith("in place of the task's")
    assert not published_beside([run]).tables and "in place" in published_beside([run]).left_out


@pytest.mark.slow
def test_killed_three_times_nothing_recorded_is_asked_again(tmp_path: Path) -> None:
    rows, out = 24, tmp_path / "grid"
    more = ("--model", "good", "--model", "bad", "--system-prompt", prompts(tmp_path / "p"),
            "--concurrency", 4, "--max-cost", 1)  # fmt: skip
    recorded: set[tuple[str, str]] = set()
    with ScriptedServer(answer=by_prompt, delay_s=0.05) as server:
        words = command(server.base_url, out, *more, rows=rows)
        for calls in (15, 45, 75):
            process = start(*words)
            server.wait_for(calls)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            recorded |= in_ledgers(out)
            before = asked(server)
        assert soul(*words) == 0
        again = asked(server) - before
    assert len(in_ledgers(out)) == 4 * rows and len(recorded) > 40
    assert sum(asked(server).values()) <= 4 * rows + 3 * 4  # those in flight at the kills
    assert not {ask for ask in again if ask in recorded}
    assert all(run.summary and run.summary.n_scored == rows for run in load_runs([out]))


def in_ledgers(out: Path) -> set[tuple[str, str]]:
    """(model, all messages) of the replies in the ledgers of a grid."""
    found = set()
    for file in out.glob("*/ledger.sqlite"):
        with LedgerView(file) as view:
            found |= {
                (one.entry.model, json.dumps(list(one.request.messages)))
                for one in view.entries()
                if one.request
            }
    return found
