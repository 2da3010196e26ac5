"""The command line's promises: quick, three-line errors, exit codes, lazy imports.

SIGTERM, SIGHUP and Ctrl-C: one path, exit codes of their own, nothing that was finished lost.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import app, console
from soulkit.cli import app as cli
from soulkit.cli.app import StopSignals
from soulkit.errors import ConfigError, DataError, ProviderError
from soulkit.extras import install_line
from tests.support.evaluation import FAST, oracle, paid, soul, summary, three_lines
from tests.support.resuming import episodes, fork_context, stop_after
from tests.support.servers.openai_server import ScriptedServer

HEAVY = ("torch", "transformers", "openai", "datasets", "pyarrow", "numpy", "pandas", "pydantic")


def run_soul(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "soulkit.cli.app", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env},
        timeout=600,
    )


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Register a command `boom` whose module is a real file, and return how to write it."""
    monkeypatch.setitem(cli.COMMANDS, "boom", "Break on purpose.")
    monkeypatch.delenv("SOULKIT_DEBUG", raising=False)
    import soulkit.cli

    monkeypatch.setattr(soulkit.cli, "__path__", [*soulkit.cli.__path__, str(tmp_path)])

    def write(body: str) -> None:
        (tmp_path / "boom.py").write_text(f"def command() -> None:\n    {body}\n")

    yield write
    sys.modules.pop("soulkit.cli.boom", None)


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from soulkit.cli.app import main; rc = main(['--help']); "
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY [] 0" in done.stdout
    for name, sentence in cli.COMMANDS.items():
        assert name in done.stdout
        assert sentence in done.stdout  # whole, not cut at 80 columns


def test_version_and_usage_errors(capsys) -> None:
    assert soul("--version") == 0 and capsys.readouterr().out.startswith("soul 0.")
    assert soul("evla") == 2
    what, _, fix = three_lines(capsys.readouterr().err)
    assert what == "No such command 'evla'." and "Did you mean 'eval'?" in fix
    assert soul("--no-such-option") == soul("completion", "tcsh") == 2
    assert capsys.readouterr().out == ""


def test_completion_prints_a_script_that_calls_soul(capsys) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert soul("completion", shell) == 0
        shown = capsys.readouterr().out
        assert "_SOUL_COMPLETE" in shown and f"complete_{shell}" in shown


def test_completion_completes_commands_without_loading_them() -> None:
    done = run_soul(_SOUL_COMPLETE="complete_bash", COMP_WORDS="soul co", COMP_CWORD="1")
    assert done.stdout.split() == ["compare", "completion"]


def test_a_group_of_one_keeps_its_subcommand(command, tmp_path: Path, capsys) -> None:
    (tmp_path / "boom.py").write_text(
        "import typer\napp = typer.Typer()\n\n@app.command()\n"
        "def partner(port: int = 1) -> None:\n    print('port', port)\n"
    )
    assert cli.main(["boom", "partner", "--port", "7"]) == 0
    assert capsys.readouterr().out == "port 7\n"
    assert cli.main(["boom", "partner", "--port", "x"]) == 2
    assert cli.main(["boom", "--help"]) == 0
    assert "Break on purpose." in capsys.readouterr().out


def test_user_errors_are_three_lines_and_exit_2(command, capsys) -> None:
    command(
        "from soulkit.errors import DataError; "
        "raise DataError('\\x1b[31mred\\x1b[0m\\nrow', 'why\\x07 not', 'mend it')"
    )
    assert cli.main(["boom"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: red row\nwhy: why not\nfix: mend it\n"


def test_a_user_error_inside_a_task_group_is_found(command, capsys) -> None:
    command(
        "from soulkit.errors import ConfigError, ProviderError; "
        "raise ExceptionGroup('tasks', [ProviderError('x'), ConfigError('what', 'why', 'way')])"
    )
    assert cli.main(["boom"]) == 2
    assert capsys.readouterr().err == "error: what\nwhy: why\nfix: way\n"


def test_a_silent_model_exits_1_with_three_lines(command, capsys) -> None:
    command("from soulkit.errors import ProviderError; raise ProviderError('no answer')")
    assert cli.main(["boom"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: no answer"


def test_a_missing_extra_names_the_way_to_install_it(command, capsys) -> None:
    command("raise ModuleNotFoundError('No module', name='peft.tuners')")
    assert cli.main(["boom"]) == 2
    assert install_line("train") in capsys.readouterr().err


def test_other_errors_are_one_line_unless_debugging(command, capsys) -> None:
    command("raise ValueError('odd\\nthing')")
    assert cli.main(["boom"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("internal error: ValueError: odd thing (run again with --debug")
    assert line.count("\n") == 1
    for arguments in (["--debug", "boom"], ["boom", "--debug"]):
        assert cli.main(arguments) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_debug_is_taken_anywhere_but_after_the_separator(monkeypatch) -> None:
    monkeypatch.delenv("SOULKIT_DEBUG", raising=False)
    words = ["eval", "--debug", "local", "--", "--debug"]
    assert cli.take_debug(words) is True
    assert words == ["eval", "local", "--", "--debug"]
    assert cli.take_debug(["eval", "--", "--debug"]) is False
    monkeypatch.setenv("SOULKIT_DEBUG", "1")
    assert cli.take_debug(["eval"]) is True


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m soulkit.cli.app --help | true"],
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_errors_know_their_family() -> None:
    assert cli._soul_error(DataError("a", "b", "c")) is not None
    assert cli._soul_error(ValueError("x")) is None
    nested = ExceptionGroup("o", [ExceptionGroup("i", [ConfigError("a", "b", "c")])])
    assert isinstance(cli._soul_error(nested), ConfigError)
    assert isinstance(cli._soul_error(ExceptionGroup("o", [ProviderError("p")])), ProviderError)


# --- console --------------------------------------------------------------------------------------


def test_plain_progress_reports_rate_and_rest(capsys, monkeypatch) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.0)
    with console.ConsoleReporter("play\x1b[2J").progress(2) as bar:
        bar.advance(note="$0.01")
        bar.advance()
    captured = capsys.readouterr()
    first, last = captured.err.splitlines()
    assert captured.out == ""
    assert first.startswith("play: 1/2 (")
    assert " left, $0.01)" in first
    assert last.startswith("play: 2/2 (")
    assert " left" not in last


def test_progress_tells_the_end_even_when_the_loop_breaks(capsys) -> None:
    with (
        pytest.raises(RuntimeError, match="stop"),
        console.ConsoleReporter("read").progress(None) as bar,
    ):
        bar.advance(3)
        raise RuntimeError("stop")
    assert capsys.readouterr().err.startswith("read: 3 (")


def test_json_goes_to_stdout_alone_and_refuses_nan(capsys) -> None:
    console.print_json({"mean": None, "text": "é"})
    assert capsys.readouterr().out == '{\n  "mean": null,\n  "text": "\\u00e9"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"mean": float("nan")})
    assert console.console(json=True) is console.err
    assert console.console() is console.out


def test_model_text_cannot_use_markup_or_escapes() -> None:
    assert console.safe("[red]a\x1b]0;title\x07b[/red]") == "\\[red]ab\\[/red]"


SAYS = "interrupted: what was finished is kept; run the same command again to resume\n"

# --- a command that waits -------------------------------------------------------------------------

NAPS = {
    "plain": "def command() -> None:\n    ready()\n    time.sleep(600)\n",
    "loop": (
        "async def wait() -> None:\n    ready()\n    await asyncio.sleep(600)\n\n"
        "def command() -> None:\n    asyncio.run(wait())\n"
    ),
    "slow_end": (
        "def command() -> None:\n    try:\n        ready()\n        time.sleep(600)\n"
        "    finally:\n        print('ending', flush=True)\n        time.sleep(600)\n"
    ),
}


def usual_signals() -> None:
    """Whoever runs these tests may ignore some, as `nohup` does; a child would, too."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def nap(folder: Path, kind: str = "plain", **how: Any) -> subprocess.Popen[str]:
    """A `soul nap` that has begun to sleep."""
    (folder / "nap.py").write_text(
        f"import asyncio, time\n\ndef ready():\n    print('ready', flush=True)\n\n{NAPS[kind]}"
    )
    script = (
        "import sys, soulkit.cli; from soulkit.cli import app;"
        f"app.SAME_SIGNAL_S = {how.pop('echo_s', 0)}; app.COMMANDS['nap'] = 'Sleep.';"
        f"soulkit.cli.__path__.append({str(folder)!r}); sys.exit(app.main(['nap']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], text=True,
        **{
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": usual_signals,
            **how,
        },
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [("plain", signal.SIGTERM, 143), ("loop", signal.SIGINT, 130),
     *(pytest.param(*one, marks=pytest.mark.slow) for one in
       [("plain", signal.SIGINT, 130), ("loop", signal.SIGTERM, 143), ("plain", signal.SIGHUP, 129),
        ("loop", signal.SIGHUP, 129)])],
)  # fmt: skip
def test_each_signal_has_its_exit_code(
    tmp_path: Path, kind: str, number: signal.Signals, code: int
) -> None:
    process = nap(tmp_path, kind)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (code, SAYS)


@pytest.mark.slow
def test_what_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    """As after `nohup`, and in a shell's background: SIGTERM still ends an event loop in order."""

    def ignore() -> None:
        usual_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = nap(tmp_path, "loop", preexec_fn=ignore)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (143, SAYS)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = nap(tmp_path, "slow_end")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=600)
    assert process.returncode == 143  # the first one's


def test_an_echo_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM to the command, and again to its group."""
    monkeypatch.setattr(app, "SAME_SIGNAL_S", 600.0)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_command_in_order(tmp_path: Path) -> None:
    """Its last words have nowhere to go, which is no error."""
    import fcntl
    import termios

    here, there = pty.openpty()

    def take_terminal() -> None:
        usual_signals()
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)

    process = nap(
        tmp_path, "loop", echo_s=600, start_new_session=True, stderr=there,
        preexec_fn=take_terminal,
    )  # fmt: skip
    os.close(there)
    os.close(here)
    assert process.wait(600) == 129


# --- evaluations ----------------------------------------------------------------------------------


def played(out: Path) -> list[dict[str, Any]]:
    """The run's records in the order of their keys, without how long they took and what of."""
    return sorted(episodes(out), key=lambda record: str(record["key"]))


def figures(out: Path) -> dict[str, Any]:
    values = summary(out)
    values["provenance"].pop("dates")
    return {k: v for k, v in values.items() if k not in ("seconds", "costs")}


def stopped_runs(
    command: Callable[[Path], list[str]], folder: Path, wanted: int, most: int
) -> list[Path]:
    """Runs of one command that were stopped by SIGTERM `wanted` times in all, then finished; at
    most `most` changes of a run's files are between a start and its stop."""
    context, rng, stops = fork_context(), random.Random("evaluation"), 0
    finished: list[Path] = []
    while stops < wanted:
        out = folder / f"run_{len(finished)}"
        while stops < wanted:
            files = [out / "episodes.jsonl", out / "ledger.sqlite-wal", out / "ledger.sqlite"]
            code = stop_after(context, command(out), files, rng.randint(1, most))
            assert code in (0, 143)
            if code == 0:  # it came too late
                break
            stops += 1
        assert soul(*command(out)) == 0
        finished.append(out)
    return finished


@pytest.mark.slow
def test_stops_of_an_evaluation_over_http_lose_nothing(tmp_path: Path) -> None:
    n, whole = 60, tmp_path / "whole"
    with ScriptedServer(answer=oracle("tomi", n), delay_s=0.01) as server:

        def command(out: Path) -> list[str]:
            model = ("--model", "m", "--base-url", server.base_url, "--out", out)
            words = ("eval", "api", *model, "--task", "tomi", "--data", f"synth:{n}",
                     "--concurrency", 2, *FAST)  # fmt: skip
            return [str(word) for word in words]

        assert soul(*command(whole)) == 0
        runs = stopped_runs(command, tmp_path, 6, most=20)
        calls = len(server.requests)
    for out in runs:
        assert played(out) == played(whole) and figures(out) == figures(whole)
        assert len(paid(out)) == n
    # Nothing that was answered is asked again: only what was under way at a stop.
    assert calls <= n * (1 + len(runs)) + 6 * 2
