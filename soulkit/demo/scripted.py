"""The demo without torch: two scripted models behind an HTTP API; and the rows of both demos."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Literal

from soulkit.data.files import write_rows
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.summary import Cell, Summary, headline
from soulkit.eval.run.runner import run_eval
from soulkit.report.load import NOTES
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import write_json
from soulkit.serving.partner import Speak, make_server
from soulkit.tasks.kit.made_rows import split_seed
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.tasks.tom.events import Exit, decode
from soulkit.tasks.tom.generate import synth_rows

TASK: Final = "tomi"
QUESTIONS = ("memory", "reality", "first_order_no_tom", "first_order_tom")
BELIEFS = "first_order_.*"
BELIEFS_PER_FACT = 2


def write_stories(path: Path, count: int, seed: int, split: Literal["train", "test"]) -> None:
    """Balanced rows out of `count` made ones, unless the file is there.

    The splits share no story, but they share their wording: up to names, places and things there
    are 28 different rows.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = synth_rows(TASK, count, split_seed(seed, split), world="small")
    write_rows(path, _choose_rows(made), data_source=TASK)


def _choose_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some facts, and beliefs of the one who leaves: before the move as often as after it.

    Most people in such stories know better, and the one who moves the object always does. Without
    the balance, naming where the object really is would look like understanding.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["order"] or _leaver(row) in row["question"]:
            kinds.setdefault(str(row["question_type"]), []).append(row)
    beliefs = min(len(kinds[kind]) for kind in QUESTIONS)
    chosen_rows = []
    for kind in QUESTIONS:
        size = beliefs if kind.startswith("first_order") else beliefs // BELIEFS_PER_FACT
        # Drawn, not every k-th: stories take turns by type, and a stride would pick one type alone.
        chosen_rows += random.Random(kind).sample(kinds[kind], size)
    return chosen_rows


def _leaver(row: dict[str, Any]) -> str:
    """Who leaves the room in a row's story."""
    return next(event.agent for event in decode(row["events"]) if isinstance(event, Exit))


TALK = "secret_keeper"
STORIES, TALKS = 1800, 40
"""Stories that rows are chosen from, and conversations."""
VISITOR = "scripted-visitor"
PORTS = "ports.json"
"""Where the scripts are served: an address is part of what a run is, so a resume takes it again."""
WHAT_IT_IS = (
    "Both actors are scripts of a few lines, and no model was asked. 'careless' answers with the "
    "first place of every story and tells a visitor whatever is asked; 'careful' follows who saw "
    "the move and keeps its secret. The visitor is a script, too, and rules score everything."
)

Messages = Sequence[Mapping[str, str]]


# -- the scripts -----------------------------------------------------------------------------------


def careless(messages: Messages) -> str:
    """The first place of a story; in a conversation whatever is asked for."""
    story = messages[-1]["content"]
    if place := _first_place(story):
        return f"<answer>{place}</answer>"
    return _what_is_asked(messages)


def careful(messages: Messages) -> str:
    """Where somebody looks who saw what they saw; in a conversation all but the secret."""
    story = messages[-1]["content"]
    if place := _first_place(story):
        return f"<answer>{_place_in_question(story, place)}</answer>"
    brief, topic = messages[0]["content"], _topic(messages)
    private = brief.partition("nobody may know")[2]
    return "That is mine to know." if f"your {topic} is" in private else _what_is_asked(messages)


def _first_place(story: str) -> str | None:
    match = re.search(r"^The .+? lay in the (.+?)\.$", story, re.MULTILINE)
    return match[1] if match else None


def _place_in_question(story: str, first: str) -> str:
    """`first`, unless the question is about now, or about somebody who saw a later move."""
    if "at first?" in story:
        return first
    asked_about = re.search(r"^Where would (\w+) search", story, re.MULTILINE)
    before_leaving = story
    if asked_about:
        before_leaving = story.partition(f"{asked_about[1]} went out")[0]
    moves: list[str] = re.findall(r"^\w+ put the .+? into the (.+?)\.$", before_leaving, re.M)
    return moves[-1] if moves else first


def _topic(messages: Messages) -> str:
    match = re.search(r"What is your (.+?)\?", messages[-1]["content"])
    return match[1] if match else ""


def _what_is_asked(messages: Messages) -> str:
    topic = _topic(messages)
    match = re.search(rf"your {re.escape(topic)} is the (.+)$", messages[0]["content"], re.M)
    return f"My {topic} is the {match[1]}." if match else "I do not know."


ACTORS: Mapping[str, Speak] = {"careless": careless, "careful": careful}


# -- the demonstration -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedDemo:
    """One demonstration in the folder `out`; an actor a run."""

    out: Path
    seed: int = 0

    def run(self, reporter: Reporter = SILENT) -> dict[str, Any]:
        """Both evaluations; each is skipped or resumed when its folder says so."""
        rows = self.out / "rows" / "held_out.jsonl"
        write_stories(rows, STORIES, self.seed, "test")
        with self._served() as urls:
            summaries = {name: self._measure(name, rows, urls, reporter) for name in ACTORS}
        return {
            name: {task: _numbers(headline(cells)) for task, cells in summary.tasks.items()}
            for name, summary in summaries.items()
        }

    def write_summary(self, results: Mapping[str, Any]) -> None:
        """`summary.json` of the whole demonstration."""
        line = {"command": "demo --scripted", **results, NOTES: [WHAT_IT_IS]}
        write_json(self.out / "summary.json", line)

    def _measure(
        self, name: str, rows: Path, urls: Mapping[str, str], reporter: Reporter
    ) -> Summary:
        reporter.note(f"{name}: {urls[name]}")
        config = EvalConfig.model_validate({
            "kind": "api", "model": name, "base_url": urls[name], "tasks": (TASK, TALK),
            "data": {TASK: str(rows), TALK: f"synth:{TALKS}"}, "seed": self.seed,
            "partner": f"endpoint:{VISITOR}@{urls[VISITOR]}",
        })  # fmt: skip
        return run_eval(config, self.out / name)[1]

    @contextmanager
    def _served(self) -> Iterator[dict[str, str]]:
        """Name → address of every script, while they are needed."""
        file = self.out / PORTS
        ports = _ports(file)
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(_server(speak, name, ports.get(name, 0)))
                for name, speak in {**ACTORS, VISITOR: visitor_line}.items()
            }
            write_json(file, {name: one.server_port for name, one in servers.items()})
            yield {name: f"http://127.0.0.1:{one.server_port}/v1" for name, one in servers.items()}


def _ports(file: Path) -> dict[str, int]:
    """Name → port of an earlier start; nothing before the first. ConfigError for another file."""
    try:
        ports = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        ports = None
    if isinstance(ports, dict) and all(type(p) is int and 0 < p < 65536 for p in ports.values()):
        return ports
    raise ConfigError(
        f"'{file}' does not say on which ports the scripts were served.",
        "The address is part of what the run in this folder is.",
        "Give another folder with --out, or remove this one.",
    )


@contextmanager
def _server(speak: Speak, name: str, port: int) -> Iterator[ThreadingHTTPServer]:
    """A script that is served in a thread; ConfigError for a port in use."""
    try:
        server = make_server(speak, name, port=port)
    except OSError as error:
        raise ConfigError(
            f"The script '{name}' cannot be served on port {port} again ({error.strerror}).",
            "The address is part of what the run in this folder is.",
            "Wait until the port is free, or give another folder with --out.",
        ) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def _numbers(cell: Cell) -> dict[str, Any]:
    return {
        "mean": cell.mean, "ci": [cell.ci_low, cell.ci_high], "n_scored": cell.n_scored, "n": cell.n
    }  # fmt: skip
