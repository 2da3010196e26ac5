"""The command line's promises: quick, three-line errors, exit codes, lazy imports.

SIGTERM, SIGHUP and Ctrl-C: one path, exit codes of their own, nothing that was finished lost.

What a terminal shows: errors of the file system, readers that leave, tables that stay narrow.
"""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from soulkit.cli import app, console
from soulkit.cli import app as cli
from soulkit.cli.app import StopSignals, main
from soulkit.errors import ConfigError, DataError, ModelLoadError, ProviderError
from soulkit.eval.results.summary import Cell, Summary
from soulkit.extras import install_line
from soulkit.models.local.loading import locate, quieten
from soulkit.report.grid import parts_text, plain_table
from soulkit.report.load import RunData
from soulkit.report.tables import blocks, report_parts
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.train.state.metrics import Learned, StepLine
from tests.support.evaluation import soul, three_lines

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
    # The code of an error decides whose it is, and this test file is not part of soulkit.
    file = Path(cli.__file__).with_name("boom.py")
    odd = "raise ValueError('odd\\nthing')"
    command(f"exec(compile({odd!r}, {str(file)!r}, 'exec'))")
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


SAYS = "interrupted: finished work is saved; run the same command again to resume\n"

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
     pytest.param("plain", signal.SIGHUP, 129, marks=pytest.mark.slow)],
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


def test_a_place_that_cannot_be_written_is_three_lines(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "summary.json").write_text('{"command": "eval api", "tasks": {}}')
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "below" / "report.md"
    assert main(["report", str(run), "--format", "md", "--out", str(target)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"]
    assert str(tmp_path / "file") in lines[0]
    (tmp_path / "there.html").mkdir()
    (tmp_path / "there.html" / "index.html").mkdir()
    assert main(["report", str(run), "--out", str(tmp_path / "there.html")]) == 2
    line, *_ = capsys.readouterr().err.splitlines()
    assert f"'{tmp_path / 'there.html' / 'index.html'}'" in line and ".tmp" not in line


def test_a_full_disk_has_no_name_but_a_way_out(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arguments: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("soulkit.cli.app._dispatch", full)
    assert main(["tasks", "list"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_text_for_a_reader_that_is_gone_ends_quietly() -> None:
    """Enough text to fill the pipe, read by a process that is already gone."""
    code = (
        "from soulkit.cli.console import out\n"
        "for _ in range(3000): out.print('x' * 100)\n"
        "raise SystemExit(7)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 7


def test_a_slip_below_a_run_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Run.open(Path("warm"), "train sft", {"steps": 1})
    with pytest.raises(ModelLoadError, match="no folder 'warm/modle'"):
        locate("warm/modle")
    assert locate("owner/name") == ("owner/name", None)


def test_nothing_done_is_not_reported_as_progress(capsys) -> None:
    with console.ConsoleReporter("eval").progress(0):
        pass
    assert capsys.readouterr().err == ""


def test_numbers_stand_right_and_words_left() -> None:
    table = plain_table("task", ">rows", title="rows")
    table.add_row("tomi", "7")
    shown = io.StringIO()
    Console(file=shown, width=40).print(table)
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    assert " tomi     7" in lines


def cell(mean: float) -> Cell:
    return Cell(mean=mean, ci_low=0.0, ci_high=1.0, n_scored=600, n=600)


def eval_run(metrics: dict[str, Cell]) -> RunData:
    summary = Summary(command="eval local", model="m", tasks={"tomi": metrics})
    return RunData(name="a", path=Path("a"), kind="eval", summary=summary)


def test_break_downs_stand_under_the_value_they_belong_to() -> None:
    run = eval_run({"value": cell(0.5), "turns": cell(0.1), "value/order=1": cell(0.4)})
    body = parts_text(report_parts(blocks([run], details=True)), 80)
    assert body.index("value ") < body.index(" order=1") < body.index("turns")
    assert "cost" not in body, "a local model costs no dollars"


def test_the_longest_break_down_fits_eighty_columns() -> None:
    run = eval_run({"value": cell(0.5), "value/story=second_order_false_belief": cell(0.4)})
    assert " story=second_order_false_belief " in parts_text(
        report_parts(blocks([run], details=True)), 80
    )


def test_a_run_of_one_step_shows_one_column() -> None:
    line = StepLine(step=0, learned=Learned(loss=1.5))
    run = RunData(name="a", path=Path("a"), kind="train", summary=None, steps=(line,))
    assert parts_text(report_parts(blocks([run]))).count("step 0") == 1


def test_no_name_turns_into_a_picture() -> None:
    with console.out.capture() as shown:
        console.out.print("synth:100:3 and :smile:")
    assert shown.get() == "synth:100:3 and :smile:\n"


# --- what takes time before anything is done ------------------------------------------------------


def shown_on(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """What stderr shows until `text` is there."""
    shown, end = "", time.monotonic() + 600
    while text not in shown:
        assert time.monotonic() < end
        time.sleep(0.005)
        shown += capsys.readouterr().err
    return shown


def test_a_log_says_what_is_under_way(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.01)
    with console.ConsoleReporter("train").progress(3) as bar:
        bar.begin("loading the model", alone=True)
        shown_on(capsys, "train: 0/3 (loading the model, after 0 s)\n")
        bar.begin("rollouts")
        shown_on(capsys, "train: 0/3 (rollouts, after 0 s)\n")
        monkeypatch.setattr(console, "QUIET", 0.01)
        shown_on(capsys, "train: 0/3 (rollouts, after 0 s)\n")  # once more: nothing else happens
        bar.advance(1, "loss 0.5")
        bar.begin("update")
        assert "update, loss 0.5, after" in shown_on(capsys, "update")
    with console.ConsoleReporter("train").working("starting"):
        shown_on(capsys, "train: starting, after 0 s\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Stderr becomes a terminal, and so does what commands print on."""
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(
        console, "err", Console(file=screen, force_terminal=True, width=130, highlight=False)
    )
    return screen


def test_a_bar_makes_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_a_terminal(monkeypatch)
    with console.ConsoleReporter("train").progress(3) as bar:
        assert sys.stderr is not screen  # what others print is put above the bar
        bar.begin("loading the model", alone=True)
        assert sys.stderr is screen and screen.getvalue().endswith("train: loading the model\n")
        place = len(screen.getvalue())
        time.sleep(0.15)  # a bar would draw itself anew
        assert len(screen.getvalue()) == place
        bar.begin("rollouts")
        assert "0/3" in screen.getvalue()[place:] and "rollouts" in screen.getvalue()[place:]
        bar.advance(1, "loss 0.5 " + "x" * 200)
    last = screen.getvalue().splitlines()[-2]  # the very last is about the cursor
    assert "1/3" in last and "0:00:0" in last and "loss 0.5" in last and "rollouts" not in last


def test_a_question_is_put_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = on_a_terminal(monkeypatch)
    streams, answers = [], iter([" Y ", "no", "yes"])

    def answer() -> str:
        streams.append(sys.stderr)
        return next(answers)

    monkeypatch.setattr(sys, "stdin", _Terminal())
    monkeypatch.setattr("builtins.input", answer)
    reporter = console.ConsoleReporter("train")
    with reporter.working("reading"):
        assert sys.stderr is not screen  # what others print is put above the words
        assert reporter.confirm("Pay?") is True and reporter.confirm("Pay?") is False
        assert sys.stderr is not screen
    assert reporter.confirm("Pay?") is True
    assert streams == [screen] * 3
    assert screen.getvalue().count("Pay? [y/N]") == 3


def test_without_a_terminal_nobody_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda: pytest.fail("a question without a terminal"))
    assert console.ConsoleReporter("train").confirm("Pay?") is None
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_whatever_a_command_reports_goes_to_stderr(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = on_a_terminal(monkeypatch) if terminal else None
    monkeypatch.setattr(console, "PLAIN_EVERY", 0.0)
    monkeypatch.setattr(console, "STARTING_EVERY", 0.0)
    report_everything(console.ConsoleReporter("train"))
    shown = capsys.readouterr()
    said = shown.err if screen is None else screen.getvalue()
    assert shown.out == "" and (terminal or said)
    for words in ("a [remark]", "2/4", "first step", "seed 1: second step", "seed 1: an alarm",
                  "starting a server: 40 s of at most 5 min"):  # fmt: skip
        assert words in said, words
    assert "seed 1 alone" not in said  # one of several: only its steps are shown


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    report_everything(SILENT)
    assert SILENT.confirm("Pay?") is None
    assert capsys.readouterr() == ("", "")


def report_everything(reporter: Reporter) -> None:
    """Call every method of a reporter but the question."""
    reporter.note("a [remark]")
    with reporter.progress(4, str) as bar:
        bar.begin("asking")
        bar.advance(2, "$1")
    with reporter.working("reading"):
        pass
    with reporter.starting("starting a server", 300.0) as watch:
        watch(40.0, "loading")
    with reporter.steps(3, "train") as steps:
        steps.phase("loading", alone=True)
        steps.step(1, "first step")
        one = steps.run("seed 1")
        one.note("seed 1 alone")
        one.phase("rollouts")
        with one.starting("seed 1 alone", 300.0) as watch:
            watch(40.0, "loading")
        one.step(1, "second step", ["an alarm"])
        one.step(2)


def test_bars_of_others_are_downloads_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    try:
        for screen, quiet in ((_Terminal(), False), (io.StringIO(), True)):
            monkeypatch.setattr(sys, "stderr", screen)
            quieten()
            assert not logging.is_progress_bar_enabled()
            assert are_progress_bars_disabled() is quiet
    finally:
        enable_progress_bars()
