"""The demo as a user runs it, and its model on real files. Slow: it trains for minutes.

The demo without torch, as a separate process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soulkit.demo.scripted import ScriptedDemo, careful, careless
from soulkit.errors import ConfigError
from soulkit.runs.folder import read_config

pytestmark = pytest.mark.slow

README = Path(__file__).parents[1] / "README.md"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "2"}


def soul(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("demo") / "runs" / "demo"
    done = soul("demo", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_ditto_teaches_what_the_warm_up_did_not(demo: tuple[Path, dict[str, Any]]) -> None:
    _, results = demo
    assert results["after"] - results["before"] >= 0.10
    assert results["after_ci"][0] > results["before_ci"][1]
    beliefs = results["beliefs_after"].values()
    assert sum(beliefs) / len(beliefs) > 0.6


def test_feedback_helps_and_others_feedback_less(demo: tuple[Path, dict[str, Any]]) -> None:
    _, results = demo
    assert results["loo_gap_ci"][0] > 0
    assert results["loo_gap"] > results["loo_gap_shuffled"]


def test_the_control_is_as_long_as_the_training(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    lengths = {
        name: len((out / name / "metrics.jsonl").read_text("utf-8").splitlines())
        for name in ("train", "control")
    }
    assert lengths["train"] == lengths["control"]
    control = json.loads((out / "after_shuffled" / "summary.json").read_text("utf-8"))
    assert control["tasks"]["tomi"]["value"]["mean"] == results["after_shuffled"]
    assert set(results["beliefs_after_shuffled"]) == set(results["beliefs_after"])


def test_why_the_two_meet_stands_on_the_page(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    assert "&#39;A cast of people&#39;" in Path(results["report"]).read_text("utf-8")
    again = soul("report", out, "--format", "html", "--out", out / "again.html")
    assert again.returncode == 0, again.stderr
    assert "&#39;A cast of people&#39;" in (out / "again.html").read_text("utf-8")


def test_the_folder_ends_with_a_summary(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert results.items() <= summary.items()
    assert summary["command"] == "demo" and summary["protocol"] == "paper"
    assert summary["tasks"]["tomi"]["value"]["mean"] == results["after"]


def test_the_report_is_one_file(demo: tuple[Path, dict[str, Any]]) -> None:
    page = Path(demo[1]["report"]).read_text(encoding="utf-8")
    assert "<svg" in page
    assert "http-equiv" in page
    assert "<script src" not in page


def test_running_it_again_repeats_nothing(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    written = {p: p.stat().st_size for p in out.rglob("*.jsonl")}
    again = soul("demo", "--out", out, "--json")
    assert again.returncode == 0, again.stderr
    assert {**json.loads(again.stdout), "seconds": results["seconds"]} == results
    assert {p: p.stat().st_size for p in out.rglob("*.jsonl")} == written


# --- README's lines, run as printed after the demo -----------------------------------------------


def printed(command: str) -> list[list[str]]:
    """The lines of README's fences that begin with `soul COMMAND`, as the words after `soul`."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [text for language, text in fence.findall(README.read_text("utf-8")) if not language]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"soul {command} ")]


def scores(demo: tuple[Path, dict[str, Any]], words: list[str]) -> tuple[float, list[float]]:
    """The accuracy, with interval, that an evaluation next to the demo's `runs` prints."""
    done = soul(*words, "--json", cwd=demo[0].parents[1])
    assert done.returncode == 0, done.stderr
    cell = json.loads(done.stdout)["tasks"]["tomi"]["value"]
    return cell["mean"], [cell["ci_low"], cell["ci_high"]]


def test_the_printed_evaluations_give_the_demos_figures(demo: tuple[Path, dict[str, Any]]) -> None:
    before, after = (scores(demo, words) for words in printed("eval local"))
    assert before == (demo[1]["before"], demo[1]["before_ci"])
    assert after == (demo[1]["after"], demo[1]["after_ci"])


def test_the_printed_training_is_the_demos(demo: tuple[Path, dict[str, Any]]) -> None:
    """Its settings and its first step."""
    out, figures = demo
    (words,) = [words for words in printed("train ditto") if "runs/demo/warmup/model" in words]
    steps = words.index("--steps") + 1
    assert words[steps] == "30"
    words[steps] = "1"
    done = soul(*words, cwd=out.parents[1])
    assert done.returncode == 0, done.stderr
    run = out.parents[1] / words[words.index("--out") + 1]
    first = json.loads((run / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    assert first["gap/loo"] == figures["loo_gap"]
    assert [first["gap/loo_low"], first["gap/loo_high"]] == figures["loo_gap_ci"]
    one, other = read_config(run), read_config(out / "train")
    paths, pace = {"model", "data"}, {"steps", "batch_size", "checkpoint_every"}
    assert {name for name in one if one[name] != other[name]} == paths | pace


def test_the_demos_figures_lie_in_the_intervals_that_are_printed(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    # Processors round differently, so the last digits may differ.
    text = README.read_text("utf-8").replace("\u2212", "-")
    section = text.split("## What the demo shows")[1].split("\n## ")[0]
    bounds = re.findall(r"\[([-+]?\d\.\d+), ([-+]?\d\.\d+)\]", section)
    names = ("before", "after", "after_shuffled", "loo_gap", "loo_gap_shuffled")
    for name, (low, high) in zip(names, bounds, strict=True):
        assert float(low) <= round(demo[1][name], 3) <= float(high), name


ROWS = 200
"""Of the real files."""


def real(name: str) -> Path:
    root = os.environ.get("SOULKIT_TEST_DATA")
    path = Path(root or "none") / name
    if not path.exists():
        if "data" in os.environ.get("SOULKIT_REQUIRE", "").split(","):
            pytest.fail(f"SOULKIT_TEST_DATA has no {name}")
        pytest.skip("SOULKIT_TEST_DATA is not set")
    return path


def scored(demo: tuple[Path, dict[str, Any]], task: str, data: Path, out: Path) -> dict[str, Any]:
    model, adapter = demo[0] / "warmup" / "model", demo[0] / "train" / "model"
    done = soul(
        "eval", "local", "--model", model, "--adapter", adapter, "--task", task,
        "--data", f"{task}={data}", "--max-tokens", 8, "--limit", ROWS, "--out", out, "--json",
        "--max-unscored", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cell: dict[str, Any] = json.loads(done.stdout)["tasks"][task]["value"]
    return cell


def test_real_fixed_tomi_runs_through(demo: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    cell = scored(demo, "tomi", real("tomi/fixedtomi_test_balanced.jsonl"), tmp_path / "run")
    assert (cell["n_scored"], cell["n"]) == (ROWS, ROWS)


def test_real_paratomi_runs_through(demo: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    rows = tmp_path / "paratomi.jsonl"
    made = soul("data", "import", "paratomi", real("paratomi/test.txt"), "-o", rows)
    assert made.returncode == 0, made.stderr
    cell = scored(demo, "paratomi", rows, tmp_path / "run")
    assert (cell["n_scored"], cell["n"]) == (ROWS, ROWS)


ROOT = Path(__file__).parents[1]


def soul_without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `soul` in a process that cannot import torch."""
    path = os.pathsep.join([str(ROOT / "tests" / "without_torch"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.fixture(scope="module")
def scripted_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("scripted") / "demo"
    done = soul_without_torch("demo", "--scripted", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_it_runs_without_torch_and_tells_the_scripts_apart(
    scripted_demo: tuple[Path, dict[str, Any]],
) -> None:
    _, results = scripted_demo
    for task in ("tomi", "secret_keeper"):
        careless_cell, careful_cell = results["careless"][task], results["careful"][task]
        assert careless_cell["n_scored"] == careless_cell["n"] == careful_cell["n"]
        assert careful_cell["mean"] == 1.0
        assert careless_cell["ci"][1] < careful_cell["ci"][0]


def test_the_page_is_the_reports_and_says_that_scripts_spoke(
    scripted_demo: tuple[Path, dict[str, Any]],
) -> None:
    page = Path(scripted_demo[1]["report"]).read_text("utf-8")
    assert "Both actors are short scripts" in page
    assert page.index("careless</h3>") < page.index("careful</h3>")
    assert "data-task" in page or "episodes" in page


def test_a_second_start_asks_nobody_and_gives_the_same(
    scripted_demo: tuple[Path, dict[str, Any]],
) -> None:
    out, results = scripted_demo
    sizes = {path: path.stat().st_size for path in out.rglob("episodes.jsonl")}
    again = soul_without_torch("demo", "--scripted", "--out", out, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == results
    assert {path: path.stat().st_size for path in out.rglob("episodes.jsonl")} == sizes


def test_a_port_that_was_taken_since_is_named(
    scripted_demo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (tmp_path / "ports.json").write_text(json.dumps({"careless": other.getsockname()[1]}))
        done = soul_without_torch("demo", "--scripted", "--out", tmp_path)
    assert done.returncode == 2
    assert "'careless' cannot be served" in done.stderr and "--out" in done.stderr


@pytest.mark.parametrize("text", ['{"careless": ', "[]", '{"careless": "x"}', '{"careless": 0}'])
def test_a_note_of_ports_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text(text)
    with pytest.raises(ConfigError, match="ports") as refusal:
        ScriptedDemo(tmp_path).run()
    assert "--out" in refusal.value.way_out


def test_the_training_demo_names_what_it_lacks_and_this_one(tmp_path: Path) -> None:
    done = soul_without_torch("demo", "--out", tmp_path / "demo")
    assert done.returncode == 2
    assert "soul demo --scripted" in done.stderr
    assert not (tmp_path / "demo").exists()


STORY = """Zelda came into the gym.
Brigid came into the gym.
The map lay in the tin.
{events}

{question}"""
LEFT = "Brigid went out of the gym.\nZelda put the map into the locker."
SAW = "Zelda put the map into the locker.\nBrigid went out of the gym."


@pytest.mark.parametrize(
    ("events", "question", "place"),
    [
        (LEFT, "Where would Brigid search for the map?", "tin"),
        (SAW, "Where would Brigid search for the map?", "locker"),
        (LEFT, "Where would Zelda search for the map?", "locker"),
        (LEFT, "Where is the map now?", "locker"),
        (SAW, "Where was the map at first?", "tin"),
    ],
)
def test_the_careful_script_follows_who_saw_the_move(
    events: str, question: str, place: str
) -> None:
    messages = [{"role": "user", "content": STORY.format(events=events, question=question)}]
    assert careful(messages) == f"<answer>{place}</answer>"
    assert careless(messages) == "<answer>tin</answer>"
