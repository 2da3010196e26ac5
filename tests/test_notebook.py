"""Results of `import soulkit as sk` in a notebook: tables, data frames, figures, rows as data,
progress and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import soulkit as sk
from soulkit.errors import ConfigError, DataError, MissingPackage, UserError
from soulkit.report.exports.episodes import COLUMNS, METRIC, TAG
from tests.support.evaluation import ROOT

BOTS = """
def box(messages):
    return "<answer>box</answer>"

def lost(messages):
    return "<answer><b>nowhere</b></answer>"
"""
ROWS = [
    {"story": f"Ann puts the ball into the {place}.", "question": "Where is the ball?",
     "answer": place, "question_type": "memory", "story_id": place}
    for place in ("box", "drawer", "jar", "basket")
]  # fmt: skip


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Evaluates a function on `tomi` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("bots.py").write_text(BOTS)

    def played(name: str, data: Any = ROWS, **settings: Any) -> Any:
        return sk.evaluate(f"function:bots.py:{name}", "tomi", data=data, **settings)

    return played


def frame() -> Any:
    import numpy
    import pandas

    table = pandas.DataFrame(ROWS)
    table["order"] = pandas.array([1, 2, None, 1], dtype="Int64")
    table["index"] = numpy.arange(4)
    table["events"] = [numpy.array([1, 2]), float("nan"), None, [pandas.Timestamp(0)]]
    return table


@pytest.mark.parametrize(
    "data", [lambda: ROWS, lambda: tuple(ROWS), frame, lambda: {"tomi": ROWS}, str]
)
def test_rows_are_data_and_the_same_call_resumes(data: Any, play: Callable[..., Any]) -> None:
    rows = "synth:4" if data is str else data()
    first, again = play("box", rows, out="runs/a"), play("box", rows, out="runs/a")
    assert (first.n, first.n_scored) == (4, 4) and first.tasks == again.tasks
    assert first.episodes()["example_id"].nunique() == 4
    assert len(list(Path("runs/rows").glob("*.jsonl"))) == (data is not str)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ([ROWS[0], {"story": {1, 2}}], "Row 1 of data= cannot be used, column 'story': set"),
        ([{"story": float("inf")}], "Row 0 of data= cannot be used, column 'story': Out of range"),
        ([ROWS[0], "text"], "Row 1 of data= cannot be used: 'str'"),
        (5, "data= cannot be used: 'int'"),
        ({"story": 5}, "data= cannot be used: 'int'"),
        ([], "contains no rows"),
    ],
)
def test_rows_that_are_refused(data: Any, place: str, play: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match=re.escape(place)):
        play("box", data)


def test_gates_are_tested_with_the_result(play: Callable[..., Any]) -> None:
    result = play("box", out="runs/a", gate=["estimate(tomi)>=0", "tomi>=1.1"])
    assert [(one.gate.text, one.outcome) for one in result.gates] == [
        ("estimate(tomi)>=0", "pass"), ("tomi>=1.1", "fail"),
    ]  # fmt: skip
    assert [one.outcome for one in play("box", out="runs/a", gate="tomi<2").gates] == ["pass"]
    assert play("box", out="runs/a").gates == ()


def test_the_table_is_that_of_the_report_with_every_text_escaped(play: Callable[..., Any]) -> None:
    result = play("box", out="runs/<b onclick=x>bold")
    shown = result._repr_html_()
    assert "<b onclick" not in shown and "&lt;b onclick=x&gt;bold" in shown
    cells = re.findall(r"<td [^>]*>(.*?)</td>", shown)
    assert cells == ["task", "metric", "mean [95% CI] (scored)", "clusters",
                     "tomi", "accuracy", cells[6], "4: few, few events"]  # fmt: skip
    assert re.fullmatch(r"0\.250 \[0\.\d{3}, 0\.\d{3}\] \(4/4\)", cells[6])
    assert isinstance(result, type(result).__mro__[2]) and "script" not in shown


def test_episodes_and_scores_are_data_frames(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = play("box", out="runs/a")
    episodes, scores = result.episodes(), result.scores()
    fixed = [name for name in episodes.columns if not name.startswith((METRIC, TAG))]
    assert fixed == ["run", *COLUMNS] and len(episodes) == 4
    assert list(episodes["value"]).count(1.0) == 1
    main = scores[scores["headline"] == True]  # noqa: E712 - a column
    assert list(main["mean"]) == [0.25] and list(main["name"]) == ["accuracy"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    plain = result.episodes()
    assert [list(row) for row in plain] == [list(episodes.columns)] * 4


def test_a_comparison_has_the_same_views(play: Callable[..., Any]) -> None:
    play("box", out="runs/a"), play("lost", out="runs/b")
    compared = sk.compare("runs/a", "runs/b")
    [row] = compared.scores().to_dict("records")
    assert (row["task"], row["difference"], row["n_shared"]) == ("tomi", -0.25, 4)
    assert compared.tasks[0].paired.difference == -0.25
    assert "A: runs/a" in compared._repr_html_() and "−0.250" in compared._repr_html_()
    assert set(compared.episodes()["run"]) == {"a", "b"}
    assert "<b>nowhere" not in compared._repr_html_()


def test_a_figure_is_one_of_matplotlib(
    play: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = play("box", out="runs/a")
    result.plot().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="no figure 'reward'"):
        result.plot("reward")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match="'matplotlib' is not installed"):
        result.plot()


@pytest.mark.parametrize("progress", [True, None])
def test_progress_outside_a_notebook_is_off(
    progress: bool | None, play: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    play("box", progress=progress)
    written = capsys.readouterr().err
    assert ("eval: 4/4 (" in written) == bool(progress) and written.count("\n") < 4


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"data": None}, ["data=tomi=FILE", "soul data import tomi FILE", "no data= was given"]),
        ({"max_tokens": 0}, ["max_tokens: ", "(max_tokens=, from this call)"]),
        ({"ledger": "replay"}, ["ledger=", "ledger_file=RUN/ledger.sqlite"]),
        ({"data": {"tom": "synth:2"}}, ["data= names rows for 'tom'"]),
        ({"system_prompt": ["a.md", "b.md"]}, ["a run has one file"]),
        ({"temprature": 1}, ["'temprature' in this call is not a setting", "'temperature'"]),
    ],
)
def test_errors_name_arguments(
    settings: dict[str, Any], lines: list[str], play: Callable[..., Any]
) -> None:
    with pytest.raises(UserError) as error:
        play("box", **settings)
    shown = error.value._render_traceback_()
    assert len(shown) == 3 and shown[0] == str(error.value)
    assert all(line in "\n".join(shown) for line in lines), shown
    assert not re.search(r"--(data|max-tokens|ledger)", "\n".join(shown).partition("soul ")[0])


def test_a_list_of_models_is_refused() -> None:
    with pytest.raises(UserError, match="model: "):
        sk.evaluate(["a", "b"], "tomi")  # type: ignore[arg-type]


def test_an_edited_file_is_loaded_again(play: Callable[..., Any]) -> None:
    assert set(play("box", out="runs/a").episodes()["reply"]) == {"<answer>box</answer>"}
    Path("bots.py").write_text(BOTS.replace(">box<", ">jar<"))  # of the same size and second
    assert set(play("box", out="runs/b").episodes()["reply"]) == {"<answer>jar</answer>"}


def test_a_refused_comparison_names_arguments(play: Callable[..., Any]) -> None:
    play("box", out="runs/a"), play("box", out="runs/b", protocol="reference")
    with pytest.raises(UserError, match="protocol paper vs reference") as error:
        sk.compare("runs/a", "runs/b")
    assert "compare anyway with force_mixed=True" in error.value.way_out
    assert "(soul rescore RUN --ask --judge PLAYER)" in error.value.way_out


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs(tmp_path: Path) -> None:
    code = f"""
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read({str(ROOT / "examples" / "notebook.ipynb")!r}, 4)
shape = lambda: [[(o.output_type, *sorted(o.get("data", {{}}))) for o in c.get("outputs", [])]
                 for c in notebook.cells]
stored = shape()
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
assert shape() == stored, (shape(), stored)
assert sum(map(len, stored)) >= 8 and not any("error" in o for c in stored for o, *_ in c)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert (ROOT / "examples" / "notebook.ipynb").stat().st_size < 200_000
