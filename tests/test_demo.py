"""The demo as a user runs it, and its model on real files. Slow: it trains for minutes.

The demo without torch, as a separate process.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from soulkit.demo.scripted import careful, careless
from soulkit.reporting import SILENT
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.processes import run_together

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
ARMS = ("before", "ditto", "shuffled", "grpo")
LABELS = {"before": "before", "ditto": "Ditto", "shuffled": "shuffled feedback", "grpo": "GRPO"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)]


def soul(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("demo")
    done = soul("demo", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "with feedback" in done.stderr  # the example
    return home / "runs" / "demo", json.loads(done.stdout)


@pytest.fixture(scope="session")
def shown(demo: tuple[Path, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """What `soul demo` prints once more, in the folder that contains `runs`."""
    done = soul("demo", cwd=demo[0].parents[1])
    assert done.returncode == 0, done.stderr
    return done


# -- results ---------------------------------------------------------------------------------------


def test_json_has_the_figures_of_every_arm(demo: tuple[Path, dict[str, Any]]) -> None:
    _, results = demo
    assert results.keys() == {"seconds", "arms", "report"}
    assert tuple(results["arms"]) == ARMS
    for arm in results["arms"].values():
        assert arm.keys() == {"exact", "words", "in_form", "ci"}
        assert 0 <= arm["ci"][0] <= arm["exact"] <= arm["ci"][1] <= 1
        assert arm["exact"] <= arm["words"] <= arm["in_form"]


def test_only_feedback_on_the_own_draft_teaches_the_rule(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    arms = demo[1]["arms"]
    assert arms["ditto"]["exact"] >= 0.8
    for name in ("before", "shuffled", "grpo"):
        assert arms["ditto"]["ci"][0] > arms[name]["ci"][1]
        assert arms[name]["exact"] < 0.05 and arms[name]["words"] < 0.3


def test_the_controls_keep_the_form_of_a_reply(demo: tuple[Path, dict[str, Any]]) -> None:
    assert all(arm["in_form"] >= 0.95 for arm in demo[1]["arms"].values())


def test_the_arms_differ_in_their_feedback_alone(demo: tuple[Path, dict[str, Any]]) -> None:
    settings = {arm: read_config(demo[0] / arm) for arm in ("ditto", "shuffled", "grpo")}
    for arm, own in (("shuffled", {"shuffle_feedback"}), ("grpo", {"method", "group_size"})):
        differ = {k for k, v in settings["ditto"].items() if settings[arm].get(k, v) != v}
        assert differ == own
    lines = {arm: read_jsonl(demo[0] / arm / "metrics.jsonl") for arm in settings}
    samples = {
        arm: [line["rollouts/draft"] + line.get("rollouts/refined", 0) for line in lines[arm]]
        for arm in lines
    }
    assert samples["ditto"] == samples["shuffled"] == samples["grpo"]


def test_no_arm_trains_on_a_combination_that_is_evaluated(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    def cues(name: str) -> set[tuple[str, ...]]:
        rows = read_jsonl(demo[0] / "rows" / f"{name}.jsonl")
        return {(row["job"], row["town"], row["pet"]) for row in rows}

    assert not cues("people") & cues("held_out")
    assert len(cues("people") | cues("held_out")) == 343
    summary = json.loads((demo[0] / "after_ditto" / "summary.json").read_text("utf-8"))
    assert summary["tasks"]["cast_of_people"]["value"]["n_clusters"] == len(cues("held_out"))


def test_the_folder_ends_with_a_summary(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {**results, "seconds": summary["seconds"]}.items() <= summary.items()
    assert summary["command"] == "demo" and summary["protocol"] == "paper"
    exact = summary["tasks"]["cast_of_people"]["value"]["mean"]
    assert exact == results["arms"]["ditto"]["exact"]


def test_the_page_says_why_a_reward_alone_finds_nothing(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    out, results = demo
    page = (out.parents[1] / results["report"]).read_text("utf-8")
    assert "One of 343 replies is right" in page
    again = soul("report", out, "--format", "html", "--out", out.parent / "again.html")
    assert again.returncode == 0, again.stderr
    assert "One of 343 replies is right" in (out.parent / "again.html").read_text("utf-8")


# -- what a person sees ----------------------------------------------------------------------------


def test_the_table_and_the_finding_fit_a_terminal(
    demo: tuple[Path, dict[str, Any]], shown: subprocess.CompletedProcess[str]
) -> None:
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for arm, label in LABELS.items():
        (line,) = [one for one in shown.stdout.splitlines() if one.startswith(f" {label} ")]
        assert f"{demo[1]['arms'][arm]['exact']:.3f} [" in line
        assert line.rstrip().endswith(f"{demo[1]['arms'][arm]['in_form']:.3f}")
    text = " ".join(shown.stdout.split())
    assert "Ditto learned the rule from feedback that never gives the whole reply" in text
    assert "'The demo' in docs/benchmarks.md" in text
    assert demo[1]["report"] == "runs/demo/report/index.html"
    assert "open the report: runs/demo/report/index.html" in shown.stderr


def test_the_example_is_a_wrong_reply_and_what_feedback_made_of_it(
    shown: subprocess.CompletedProcess[str],
) -> None:
    lines = shown.stderr.splitlines()
    (place,) = [
        i for i, line in enumerate(lines) if line.startswith("example: ") and "is asked:" in line
    ]
    reply = r"\w+! Heard about the \w+\? \w+\."
    two_ways = r"feedback: (?:Greet \w+\.|Speak of \w+\.) (?:Speak of \w+\.|Leave \w+\.)"
    assert re.search(rf"before training: {reply} \(wrong\)", lines[place + 1])
    assert re.search(two_ways, lines[place + 2])
    assert re.search(rf"with feedback: {reply} \(right\)", lines[place + 3])


def test_the_printed_commands_run(
    demo: tuple[Path, dict[str, Any]], shown: subprocess.CompletedProcess[str]
) -> None:
    (line,) = [line for line in shown.stderr.splitlines() if line.startswith("next: ")]
    commands = [shlex.split(part) for part in line.removeprefix("next: ").split("; ")]
    assert len(commands) == 2
    for words in commands:
        assert words[0] == "soul"
        done = soul(*words[1:], cwd=demo[0].parents[1])
        assert done.returncode == 0, (words, done.stderr)
        assert done.stdout.strip()


# -- resuming --------------------------------------------------------------------------------------


def test_running_it_again_repeats_nothing(demo: tuple[Path, dict[str, Any]]) -> None:
    out, results = demo
    written = {p: p.stat().st_size for p in out.rglob("*.jsonl*")}
    again = soul("demo", "--json", cwd=out.parents[1])
    assert again.returncode == 0, again.stderr
    assert {**json.loads(again.stdout), "seconds": results["seconds"]} == results
    assert {p: p.stat().st_size for p in out.rglob("*.jsonl*")} == written


def children(pid: int) -> set[int]:
    """The processes below a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {pid}


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()
            and Path(f"/proc/{pid}/cmdline").read_bytes()}  # fmt: skip


def trains(pid: int, out: Path) -> bool:
    """Whether a process has opened the metrics of a run."""
    with suppress(OSError):
        return any(os.readlink(link) == str(out / "metrics.jsonl")
                   for link in Path(f"/proc/{pid}/fd").iterdir())  # fmt: skip
    return False


def started(out: Path, steps: int) -> tuple[subprocess.Popen[str], set[int]]:
    """A running demo that has trained every arm for `steps` steps, and its processes."""
    process = subprocess.Popen(
        command("demo", "--out", out, "--steps", 6, "--json"), env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    files = [out / arm / "metrics.jsonl" for arm in ("ditto", "shuffled", "grpo")]
    while process.poll() is None:
        if all(file.exists() and file.read_text().count("\n") >= steps for file in files):
            return process, children(process.pid)
        time.sleep(0.1)
    raise AssertionError(process.communicate()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupted_and_a_killed_demo_resume(tmp_path: Path) -> None:
    """Ctrl-C, a killed arm and a killed parent leave no process behind; the next start resumes."""
    process, below = started(tmp_path, 1)
    warm = (tmp_path / "warmup" / "metrics.jsonl").read_bytes()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "run the same command again" in err
    assert not alive(below)

    process, below = started(tmp_path, 2)
    (arm,) = [pid for pid in below if trains(pid, tmp_path / "grpo")]
    os.kill(arm, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err
    what, why, fix = err.strip().splitlines()[-3:]
    assert what.startswith("error: The process of 'grpo' was killed")
    assert why.startswith("why: ") and fix == "fix: Run the same command again: it resumes."
    assert not alive(below)

    process, below = started(tmp_path, 3)
    process.kill()
    process.communicate()
    end = time.monotonic() + 60
    while alive(below) and time.monotonic() < end:
        time.sleep(0.2)
    assert not alive(below)

    done = soul("demo", "--out", tmp_path, "--steps", 6, "--json")
    assert done.returncode == 0, done.stderr
    assert tuple(json.loads(done.stdout)["arms"]) == ARMS
    assert (tmp_path / "warmup" / "metrics.jsonl").read_bytes() == warm
    for arm_name in ("ditto", "shuffled", "grpo"):
        steps = [line["step"] for line in read_jsonl(tmp_path / arm_name / "metrics.jsonl")]
        assert steps == list(range(6))


def test_an_error_in_a_process_is_reported_in_three_lines(
    demo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Here: the folder of the warm-up belongs to a demo with other rows."""
    (tmp_path / "warmup").symlink_to(demo[0] / "warmup")
    done = soul("demo", "--out", tmp_path)
    assert done.returncode == 2
    what, why, fix = done.stderr.strip().splitlines()[-3:]
    assert what.startswith("error: warmup: ") and "different settings" in what
    assert why.startswith("why: ") and fix.startswith("fix: ")


def test_a_bug_in_a_process_is_raised_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="broken: TypeError: int") as error:
        run_together({"broken": int}, SILENT)  # type: ignore[dict-item]
    assert "Traceback" in error.value.__notes__[0]


# -- documentation ---------------------------------------------------------------------------------


def test_the_figures_of_the_demo_lie_in_the_intervals_of_the_benchmark(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    """The intervals over seeds in docs/benchmarks.md, from which README takes its figures."""
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    page = page.split("## The demo\n")[1].split("\n## ")[0]
    row = r"^\| ([^|\d]+) \| \d\.\d+ \[(\d\.\d+), (\d\.\d+)\] \| \d+ of"
    table = re.findall(row, page, re.MULTILINE)
    intervals = {label: (float(low), float(high)) for label, low, high in table}
    labels = {"before": "before training", "ditto": "Ditto", "grpo": "GRPO, same reward",
              "shuffled": "Ditto, shuffled feedback"}  # fmt: skip
    lines = re.findall(r"^\| \d \| (.*)$", page, re.MULTILINE)  # one per seed
    columns = [map(float, re.findall(r"(\d\.\d+) \[", line)) for line in lines]
    seeds = dict(zip(intervals, zip(*columns, strict=True), strict=True))
    for arm, label in labels.items():
        low, high = intervals[label]  # of the mean: a single seed may lie outside
        low, high = min(low, *seeds[label]), max(high, *seeds[label])
        if arm == "ditto":  # other rounding moves one seed within what the page calls learned
            low = 0.9
        assert low <= round(demo[1]["arms"][arm]["exact"], 3) <= high, arm


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
    finding = page.split("<h1>")[1].split("</h1>")[0]  # careless, the older run, is the baseline
    assert "careful&#39; scores 1.000 on tomi" in finding and "in &#39;careless&#39;" in finding
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
