"""`soul reproduce`: the commands of a figure, their estimate, and what a killed one pays again."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.records import load_records
from soulkit.train import reproduce
from tests.support.training import soul

ROOT = Path(__file__).parents[2]
SMALL = {
    "before": [
        ["rows/lessons.jsonl", "data synth cast_of_people --rows 60 --kind lessons "
         "--out OUT/rows/lessons.jsonl"],
        ["rows/people.jsonl", "data synth cast_of_people --rows 60 --out OUT/rows/people.jsonl"],
        ["rows/held_out.jsonl", "data split OUT/rows/people.jsonl --by job,town,pet --share 0.2 "
         "--out OUT/rows"],
        ["warmup/summary.json", "train sft --task cast_of_people --data OUT/rows/lessons.jsonl "
         "--model tiny --full --steps 2 --batch 4 --out OUT/warmup"],
    ],
    "methods": ["grpo", "ditto"],
    "training": "--model OUT/warmup/model --task cast_of_people --data OUT/rows/train.jsonl "
    "--steps 6 --prompts 2 --max-tokens 14 --checkpoint-every 1 --stop-flat 0",
    "launch": "",
    "compare": "",
    "evaluation": {"tasks": ["cast_of_people"], "limit": 6, "max_tokens": 14, "temperature": 0.0,
                   "data": {"cast_of_people": "OUT/rows/held_out.jsonl"}},
    "published": {"table": "ditto_paper", "base model": "Base 8B", "grpo": "GRPO 8B"},
    "differs": "Everything is smaller.",
}  # fmt: skip
"""A figure of which every part takes seconds."""
PROGRAM = """
import json, sys
from soulkit.cli.app import main
from soulkit.train import reproduce

def figure_of(*names):
    return json.loads(sys.argv[1].replace("OUT/rows/held", f"{names[-1]}/rows/held"))


words, reproduce.figure_of = sys.argv[2:], figure_of
sys.exit(main(words))
"""


def start(out: Path, figure: dict[str, Any], *more: str) -> subprocess.Popen[bytes]:
    """`soul reproduce` with another list of figures."""
    words = ("reproduce", "paper", "--figure", "1", "--scale", "small", "--out", str(out), *more)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(figure), *words], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def contents(files: Iterable[Path]) -> dict[Path, tuple[bytes, int]]:
    """File → its bytes and when it was written."""
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files if file.is_file()}


@pytest.mark.parametrize(
    ("paper", "figure", "scale", "words"),
    [
        ("dito-paper", "4", "tiny", ("paper 'dito-paper'", "the paper ditto-paper.")),
        ("ditto-paper", "9", "tiny", ("figure '9'", "the figure 4.")),
        ("ditto-paper", "4", "70b", ("scale '70b'", "the scale tiny or 8b.")),
    ],
)
def test_an_error_names_what_there_is(
    paper: str, figure: str, scale: str, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul("reproduce", paper, "--figure", figure, "--scale", scale) == 2
    error, why, fix = capsys.readouterr().err.splitlines()
    assert words[0] in error and words[1] in why and fix.startswith("fix: ")


def test_methods_without_refined_rollouts_get_twice_the_drafts(tmp_path: Path) -> None:
    figure = reproduce.figure_of("ditto-paper", "4", "8b", tmp_path)
    doubled = {step.words[1] for step in reproduce.figure_steps(figure, tmp_path, 2)
               if "group_size=16" in step.words}  # fmt: skip
    assert {"grpo", "sdpo-token", "self-rewarding"} <= doubled
    assert not doubled & {"ditto", "erl", "rltf-sd", "critique-grpo"}


@pytest.mark.slow
def test_every_command_at_8b_can_be_planned_and_the_plan_is_their_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("reproduce", "ditto-paper", "--figure", "4", "--scale", "8b", "--out", tmp_path / "o")

    def plan_of(*command: Any) -> dict[str, Any]:
        assert soul(*command, "--dry-run", "--json") == 0, command
        made: dict[str, Any] = json.loads(capsys.readouterr().out)
        return made

    assert soul(*words) == 0
    commands = [line.removeprefix("soul ") for line in capsys.readouterr().out.splitlines()
                if line.startswith("soul train ")]  # fmt: skip
    *trainings, compare = map(shlex.split, commands)
    assert len(trainings) == 13 and compare[:2] == ["train", "ablate"]
    whole, plans = plan_of(*compare), [plan_of(*training) for training in trainings]
    settings = reproduce.figure_of("ditto-paper", "4", "8b", tmp_path)["evaluation"]
    pairs = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    final = plan_of("eval", "local", "--model", "Qwen/Qwen3-VL-8B-Instruct",
                    *(word for pair in pairs for word in ("--set", pair)))  # fmt: skip
    calls = sum(one["usual_calls"] for one in plans) + 14 * final["usual_calls"]
    assert whole["usual_calls"] == calls
    assert whole["machine"]["memory"] == max(one["machine"]["memory"] for one in plans)
    planned = plan_of(*words)
    assert {name: planned[name] for name in ("calls", "cost")} == {
        name: whole[name] for name in ("calls", "cost")
    }


@pytest.mark.slow
def test_a_killed_reproduction_pays_for_nothing_twice(tmp_path: Path) -> None:
    """Killed in the second training; the same figure from the same runs has the same bytes."""
    out = tmp_path / "out"
    killed = start(out, SMALL)
    begun = out / "methods" / "ditto" / "seed_0" / "episodes.jsonl"
    while not (begun.is_file() and begun.stat().st_size):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    parts = (out / folder for folder in ("rows", "warmup", "methods/grpo"))
    files = (file for folder in parts for file in folder.rglob("*.jsonl"))
    finished = [file for file in files if "final-eval" not in file.parts]
    before = contents(finished)
    assert start(out, SMALL).wait() == 0
    assert len(before) > 5 and contents(finished) == before
    records = load_records(out / "methods/ditto/seed_0/episodes.jsonl")
    played = [(one.step, one.example_id, one.rollout, one.kind) for one in records]
    assert len(played) == len(set(played))
    drawn = contents(out.rglob("*"))
    assert start(out, SMALL).wait() == 0
    again = contents(out.rglob("*"))
    assert {file: data for file, (data, _) in again.items()} == {
        file: data for file, (data, _) in drawn.items()
    }
    written = {file.relative_to(out).parts[0] for file in again if again[file] != drawn[file]}
    assert written <= {"report"}


@pytest.mark.slow
def test_trainings_that_were_launched_with_several_processes_are_finished(tmp_path: Path) -> None:
    """`soul train METHOD --gpus 2` and then `soul train ablate`, which knows no --gpus."""
    out, launched = tmp_path / "out", {**SMALL, "methods": ["grpo"], "launch": "--gpus 2"}
    launched["training"] = f"{SMALL['training']} --device cpu".replace("--steps 6", "--steps 1")
    for step in reproduce.figure_steps(launched, out, 1)[:-1]:
        assert subprocess.run([sys.executable, "-m", "soulkit", *step.words], cwd=ROOT,
                              check=False).returncode == 0  # fmt: skip
    trained = out / "methods" / "grpo" / "seed_0" / "metrics.jsonl"
    before = contents([trained])
    shown = start(out, launched)
    assert shown.communicate()[0].count(b"soul train ") == 1 and shown.returncode == 0
    compare = reproduce.figure_steps(launched, out, 1)[-1].words
    assert subprocess.run([sys.executable, "-m", "soulkit", *compare], cwd=ROOT,
                          check=False).returncode == 0  # fmt: skip
    assert contents([trained]) == before
    drawn = start(out, launched, "--json")
    rows = json.loads(drawn.communicate()[0])["rows"]
    assert [row[0] for row in rows] == ["base model", "grpo"] and drawn.returncode == 0
    # A method that fails for good is named on the page and does not keep it from being drawn.
    for lost in ("model", "final-eval"):
        shutil.rmtree(trained.parent / lost)
    assert subprocess.run([sys.executable, "-m", "soulkit", *compare], cwd=ROOT,
                          check=False).returncode == 1  # fmt: skip
    drawn = start(out, launched, "--json")
    content = json.loads(drawn.communicate()[0])
    assert content["rows"][1][:4] == ["grpo", "–", "–", "–"] and drawn.returncode == 1
    assert "grpo seed 0 failed" in " ".join(content["notes"])
