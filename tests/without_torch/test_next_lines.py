"""Commands without torch and matplotlib, as after `pip install .`, and their `next:` lines.

Every command that works without torch runs here, and so does every `next:` line that it prints,
and every one that these print in turn. The commands run in a process of their own that has neither
package, one after the other, because starting Python for each would take a minute.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.support.judged import TASKS, essay, first_message, judge, write_rows
from tests.support.plain_install import Done, run_line
from tests.support.servers.answers import answer
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[2]
NO_TORCH = Path(__file__).parent
NEED_TORCH = {
    "chat.py", "distill.py", "export.py", "people.py", "plan.py", "serve.py", "train.py",
}  # fmt: skip
"""Commands that print a `next:` line and cannot run here."""

# Command → its arguments, in running order: later commands read the output of earlier ones.
ESSAYS = f"--tasks {TASKS} --task essay --data essay=essays.jsonl --judge endpoint:j"
FIRST = {
    "demo.py": "demo --scripted --out demo",
    "data_build.py": "data synth tomi -n 6 -o tomi.jsonl",
    "data_build.py, chats": "data import chats export.json -o chats.jsonl",
    "eval.py": "eval api --model m --task tomi --data synth:6 --out other",
    "eval.py, judged": f"eval api --model m {ESSAYS} --repeats 2 --out essays",
    "report.py": "runs .",
    "show.py": "show essays",
    "show.py, trained": "show ditto",
    "rescore.py": "rescore essays --trust --out rescored",
    "rescore.py, trained": "rescore ditto --trust --out again",
    "judge.py": "judge check essays --trust --judge endpoint:j --out check",
    "judge.py, people": "judge import essays-sheet/rater-1/sheet.csv --run essays",
    "tasks.py": "tasks new night_bus",
}  # fmt: skip
REPORTED = (
    "report essays", "report essays other --format html", "report ditto",
    "report sft --format md", "report before after --format latex",
    "report .", "show ditto --improved",
)  # fmt: skip
"""What is reported of every kind of run."""


def asked(body: dict[str, Any]) -> str:
    """The judge of the essays, their writer, or what fits any other task."""
    if body["model"] == "j":
        return judge()(body)
    return essay(body) if "topic" in first_message(body) else answer(body)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, and with runs that were trained elsewhere."""
    folder = tmp_path_factory.mktemp("home")
    write_rows(folder / "essays.jsonl", 12)
    shutil.copytree(ROOT / "tests" / "recorded", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests" / "support" / "shade_task", folder / "shade_task")
    shades = ["amber", "cobalt", "olive"]
    rows = [
        {"said": f"Speaker {n} points.", "shades": shades, "meant": shades[n % 3]}
        for n in range(12)
    ]
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    (folder / "export.json").write_text(json.dumps([{"id": "c1", "conversations": turns}]))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows" / "shade.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plain(home: Path) -> Iterator[ProcessPoolExecutor]:
    """One process of a plain installation, in `home`; its models answer on a local server."""
    for package in ("matplotlib", "datasets"):
        missing = f"raise ModuleNotFoundError('No module named {package!r}', name={package!r})\n"
        (home / "absent").mkdir(exist_ok=True)
        (home / "absent" / f"{package}.py").write_text(missing)
    path = os.pathsep.join(map(str, (home / "absent", NO_TORCH, ROOT)))
    with ScriptedServer(answer=asked) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("PYTHONPATH", path)
        patch.setenv("OPENAI_BASE_URL", server.base_url)
        patch.setenv("OPENAI_API_KEY", "k")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            pool.submit(os.getpid).result()  # it starts here, with these variables
            yield pool


def fill_sheet(plain: ProcessPoolExecutor, home: Path) -> None:
    """What a rater sends back of the essays."""
    done = plain.submit(run_line, "judge sheet essays --sample 6").result()
    assert done.code == 0, done.err
    place = home / "essays-sheet" / "rater-1" / "sheet.csv"
    with place.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    with place.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            row | {"label": "5" if row["dimension"] == "quality" else "plain"} for row in rows
        )


def next_lines(done: Done) -> list[str]:
    """The commands after `next:`, with placeholders filled in."""
    groups = re.findall(r"^next: (.+)$", done.err, re.MULTILINE)
    lines = [line for group in groups for line in group.split("; ")]
    lines += re.findall(r"^  (soul .+)$", done.out.partition("next:\n")[2], re.MULTILINE)
    return [filled(line.removeprefix("soul ")) for line in lines]


def filled(line: str) -> str:
    for placeholder, value in ((r"\bMODEL\b", "m"), (r" --base-url URL\b", "")):
        line = re.sub(placeholder, value, line)
    # Which other run is compared is left to the reader, who chooses one with the same rows.
    return re.sub(r"^compare OTHER (\S+)$", r"compare \1 \1", line)


def followed(plain: ProcessPoolExecutor, line: str, seen: set[str]) -> list[str]:
    """Run `line` and its `next:` lines; returns those that failed, with their output."""
    done = plain.submit(run_line, line).result()
    assert done.code == 0, f"soul {line}\n{done.out}{done.err}"
    waiting, failed = next_lines(done), list[str]()
    assert waiting, f"soul {line} prints no next line"
    while waiting:
        following = waiting.pop()
        if following in seen or following.startswith("train "):  # training needs torch
            continue
        seen.add(following)
        done = plain.submit(run_line, following).result()
        if done.code:
            failed.append(f"soul {following}\n{done.err}")
        waiting += next_lines(done)
    return failed


@pytest.fixture(scope="module")
def seen() -> set[str]:
    return set()


@pytest.mark.parametrize("command", FIRST)
def test_every_next_line_runs_without_torch(
    command: str, plain: ProcessPoolExecutor, home: Path, seen: set[str]
) -> None:
    if command == "judge.py, people":
        fill_sheet(plain, home)
    assert followed(plain, FIRST[command], seen) == []


def test_every_command_that_prints_a_next_line_runs_here() -> None:
    printing = {
        path.name for path in (ROOT / "soulkit" / "cli").glob("*.py")
        if re.search(r"\bprint_next\(|next:", path.read_text("utf-8"))
    }  # fmt: skip
    run_here = {command.partition(",")[0] for command in FIRST}
    assert printing - {"console.py"} == run_here | NEED_TORCH


@pytest.mark.parametrize("line", REPORTED)
def test_runs_of_every_kind_are_reported_without_torch(
    line: str, plain: ProcessPoolExecutor
) -> None:
    done = plain.submit(run_line, line).result()
    assert done.code == 0, done.err
    assert done.out
