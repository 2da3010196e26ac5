"""Helpers for evaluation tests: rows, servers that know the gold, readers of run folders."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soulkit.cli.app import main
from soulkit.data.files import RawRow
from soulkit.runs.jsonl import write_json
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.types import Example, Record
from tests.support.road import synth, synth_rows
from tests.support.servers.openai_server import ScriptedServer

ROOT = Path(__file__).parents[2]
Body = dict[str, Any]
FAST = ("--backoff", "0", "--max-unscored", "0")


def examples(task: str, n: int, seed: int = 0) -> tuple[Example, ...]:
    """The rows of `--data synth:n`."""
    rows = synth_rows(task, f"synth:{n}", seed, "test")
    return to_examples(load_registry().task(task), rows).examples


def write_records(folder: Path, records: Iterable[Record]) -> Path:
    """Add these episodes to a run folder, with the same conditions as all others."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "conditions.json", {"players": {}, "tasks": {}})
    writer = RecordWriter(folder / "episodes.jsonl")
    writer.write(*records)
    writer.close()
    return folder


def last_message(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def oracle(task: str, n: int) -> Callable[[Body], str]:
    """Answers each prompt with the gold of its row: of `synth:n`, or of `synth(task, n, 0)`."""
    live = load_registry().task(task)
    assert isinstance(live, ChoiceTask)
    written = [RawRow(row, f"{i}") for i, row in enumerate(synth(task, n, 0))]
    rows = (*examples(task, n), *to_examples(live, written).examples)
    answers = {live.preview(e)[0].text: live.gold_completion(e) for e in rows}
    return lambda body: answers[last_message(body)]


def soul(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def api(base_url: str, out: Path, *arguments: object, task: str = "tomi", n: int = 6) -> int:
    """Run `soul eval api` on generated rows; `arguments` replace the default options."""
    usual = ("--model", "m", "--base-url", base_url, "--out", out, "--task", task,
             "--data", f"synth:{n}", *FAST)  # fmt: skip
    return soul("eval", "api", *replaced(usual, arguments))


def replaced(usual: Sequence[object], arguments: Sequence[object]) -> list[object]:
    """The options of `usual` that `arguments` does not set, followed by `arguments`."""
    pairs = zip(usual[::2], usual[1::2], strict=True)
    kept = [part for pair in pairs if pair[0] not in arguments for part in pair]
    return [*kept, *arguments]


def start(
    *arguments: object, env: dict[str, str] | None = None, open_files: int | None = None
) -> subprocess.Popen[str]:
    """Start the real command as a process with this limit on open files."""
    limit = ["sh", "-c", f'ulimit -n {open_files}; exec "$0" "$@"'] if open_files else []
    return subprocess.Popen(
        [*limit, sys.executable, "-m", "soulkit.cli.app", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
    )


def summary(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return loaded


def value(out: Path, task: str = "tomi") -> dict[str, Any]:
    cell: dict[str, Any] = summary(out)["tasks"][task]["value"]
    return cell


def records(out: Path) -> list[Record]:
    return load_records(out / "episodes.jsonl")


def paid(out: Path) -> list[tuple[str, int]]:
    """(example, requests sent) of every call in the ledger."""
    db = sqlite3.connect(out / "ledger.sqlite")
    try:
        return db.execute("SELECT example_id, attempts FROM calls").fetchall()
    finally:
        db.close()


def messages(err: str) -> list[str]:
    """The lines of stderr without the progress lines that a slow machine prints."""
    return [line for line in err.splitlines() if not re.search(r", after \d+ s\)?$", line)]


def three_lines(err: str) -> tuple[str, str, str]:
    """The printed error, why and fix; fails if anything else was printed."""
    lines = messages(err)
    assert len(lines) == 3, err
    assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"], err
    what, why, fix = (line.partition(": ")[2] for line in lines)
    return what, why, fix


def changed(words: Sequence[object], *options: object) -> list[object]:
    """A command with these option values replaced."""
    names = options[::2]
    own = [i for i, word in enumerate(words) if word in names]
    kept = [word for i, word in enumerate(words) if i not in own and i - 1 not in own]
    return [*kept, *options]


def visit(body: Body) -> str:
    """The scripted partner of secret_keeper, for a ScriptedServer."""
    return visitor_line(body["messages"])


@contextmanager
def visitor() -> Iterator[str]:
    """The scripted partner on a loopback socket; gives its base URL."""
    with ScriptedServer(answer=visit) as server:
        yield server.base_url


def keeper(body: Body) -> str:
    """Answers questions about public facts and keeps the secret."""
    brief, question = body["messages"][0]["content"], last_message(body)
    public = brief.partition("What nobody may know")[0]
    for line in public.splitlines():
        words = line.split()
        if line.startswith("- your ") and f"your {words[2]}?" in question:
            return f"My {words[2]} is the {words[-1]}."
    return "That I keep to myself."
