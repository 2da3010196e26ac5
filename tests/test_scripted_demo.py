"""The demonstration without torch, in a process of its own as a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soulkit.demo.scripted import ScriptedDemo, careful, careless
from soulkit.errors import ConfigError

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def soul_without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`soul` where torch cannot be imported."""
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
    _, results = demo
    for task in ("tomi", "secret_keeper"):
        careless_cell, careful_cell = results["careless"][task], results["careful"][task]
        assert careless_cell["n_scored"] == careless_cell["n"] == careful_cell["n"]
        assert careful_cell["mean"] == 1.0
        assert careless_cell["ci"][1] < careful_cell["ci"][0]


def test_the_page_is_the_reports_and_says_that_scripts_spoke(
    scripted_demo: tuple[Path, dict[str, Any]],
) -> None:
    page = Path(scripted_demo[1]["report"]).read_text("utf-8")
    assert "Both actors are scripts" in page
    assert page.index("careless</h3>") < page.index("careful</h3>")
    assert "data-task" in page or "episodes" in page


def test_a_second_start_asks_nobody_and_gives_the_same(scripted_demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
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
        ScriptedDemo(tmp_path).run(lambda words: None)
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
