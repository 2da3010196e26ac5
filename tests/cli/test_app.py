"""The command line's promises: quick, three-line errors, exit codes, lazy imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from soulkit.cli import app as cli
from soulkit.cli import console
from soulkit.errors import ConfigError, DataError, ProviderError
from soulkit.extras import install_line

HEAVY = ("torch", "transformers", "openai", "datasets", "pyarrow", "numpy", "pandas", "pydantic")


def soul(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
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


def test_version_and_usage_errors() -> None:
    assert soul("--version").stdout.startswith("soul 0.")
    unknown = soul("evla")
    assert unknown.returncode == 2
    lines = unknown.stderr.splitlines()
    assert lines[0] == "error: No such command 'evla'." and "Did you mean 'eval'?" in lines[2]
    assert soul("--no-such-option").returncode == 2
    wrong_value = soul("completion", "tcsh")
    assert wrong_value.returncode == 2
    assert wrong_value.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_calls_soul(shell: str) -> None:
    done = soul("completion", shell)
    assert done.returncode == 0
    assert "_SOUL_COMPLETE" in done.stdout
    assert f"complete_{shell}" in done.stdout


def test_completion_completes_commands_without_loading_them() -> None:
    done = soul(_SOUL_COMPLETE="complete_bash", COMP_WORDS="soul co", COMP_CWORD="1")
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


def test_interrupting_prints_one_line_and_exits_130(tmp_path: Path) -> None:
    script = (
        "import sys, soulkit.cli; from soulkit.cli import app; app.COMMANDS['nap'] = 'Sleep.';"
        f"soulkit.cli.__path__.append({str(tmp_path)!r}); sys.exit(app.main(['nap']))"
    )
    (tmp_path / "nap.py").write_text(
        "import time\n\ndef command() -> None:\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=600)
    assert process.returncode == 130
    assert message.startswith("interrupted: ")
    assert message.count("\n") == 1


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
    with console.progress(2, "play\x1b[2J") as bar:
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
    with pytest.raises(RuntimeError, match="stop"), console.progress(None, "read") as bar:
        bar.advance(3)
        raise RuntimeError("stop")
    assert capsys.readouterr().err.startswith("read: 3 (")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")],
)
def test_durations(seconds: float, words: str) -> None:
    assert console.duration(seconds) == words


def test_json_goes_to_stdout_alone_and_refuses_nan(capsys) -> None:
    console.print_json({"mean": None, "text": "é"})
    assert capsys.readouterr().out == '{\n  "mean": null,\n  "text": "\\u00e9"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"mean": float("nan")})
    assert console.console(json=True) is console.err
    assert console.console() is console.out


def test_model_text_cannot_use_markup_or_escapes() -> None:
    assert console.safe("[red]a\x1b]0;title\x07b[/red]") == "\\[red]ab\\[/red]"
