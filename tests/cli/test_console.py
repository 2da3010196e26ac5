"""What a terminal shows: errors of the file system, readers that leave, tables that stay narrow."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from soulkit.cli import console
from soulkit.cli.app import main
from soulkit.errors import ModelLoadError
from soulkit.eval.results.summary import Cell, Summary
from soulkit.models.local.loading import locate, quieten
from soulkit.report.grid import parts_text, plain_table
from soulkit.report.load import RunData
from soulkit.report.tables import report_parts
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.train.state.metrics import Learned, StepLine


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


def test_a_full_disk_has_no_name_but_a_way_out(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arguments: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("soulkit.cli.app._dispatch", full)
    assert main(["tasks", "list"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
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
    body = parts_text(report_parts([run], details=True), 80)
    assert body.index("value ") < body.index(" order=1") < body.index("turns")
    assert "cost" not in body, "a local model costs no dollars"


def test_the_longest_break_down_fits_eighty_columns() -> None:
    run = eval_run({"value": cell(0.5), "value/story=second_order_false_belief": cell(0.4)})
    assert " story=second_order_false_belief " in parts_text(report_parts([run], details=True), 80)


def test_a_run_of_one_step_shows_one_column() -> None:
    line = StepLine(step=0, learned=Learned(loss=1.5))
    run = RunData(name="a", path=Path("a"), kind="train", summary=None, steps=(line,))
    assert parts_text(report_parts([run])).count("step 0") == 1


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
