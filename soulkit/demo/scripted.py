"""The demo without torch: two functions as models, on balanced rows of stories."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from soulkit.data.files import write_rows
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.summary import Cell, Summary, headline
from soulkit.eval.run.runner import run_eval
from soulkit.report.load import NOTES
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import write_json
from soulkit.tasks.kit.made_rows import split_seed
from soulkit.tasks.secret_keeper.task import visitor_line
from soulkit.tasks.tom.events import Exit, decode
from soulkit.tasks.tom.generate import synth_rows

TASK: Final = "tomi"
QUESTIONS = ("memory", "reality", "first_order_no_tom", "first_order_tom")
BELIEFS_PER_FACT = 2


def write_stories(path: Path, count: int, seed: int, split: Literal["train", "test"]) -> None:
    """Write balanced rows chosen from `count` generated ones, unless the file exists.

    The splits share no story, but they share their wording: apart from names, places and things,
    there are only 28 different rows.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = synth_rows(TASK, count, split_seed(seed, split), world="small")
    write_rows(path, _choose_rows(made), data_source=TASK)


def _choose_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some fact questions, and belief questions about the person who leaves: equally many about a
    move before and after leaving.

    Most people in these stories know better, and the person who moves the object always does. In
    unbalanced rows, naming the real place would look like understanding beliefs.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not row["order"] or _leaver(row) in row["question"]:
            kinds.setdefault(str(row["question_type"]), []).append(row)
    beliefs = min(len(kinds[kind]) for kind in QUESTIONS)
    chosen_rows = []
    for kind in QUESTIONS:
        size = beliefs if kind.startswith("first_order") else beliefs // BELIEFS_PER_FACT
        # Random choice: stories alternate by type, so every k-th row would pick only one type.
        chosen_rows += random.Random(kind).sample(kinds[kind], size)
    return chosen_rows


def _leaver(row: dict[str, Any]) -> str:
    """Name of the person who leaves the room in a row's story."""
    return next(event.agent for event in decode(row["events"]) if isinstance(event, Exit))


TALK = "secret_keeper"
STORIES, TALKS = 1800, 40
"""Number of generated stories to choose rows from, and number of conversations."""
WHAT_IT_IS = (
    "Both actors are short scripts; no model is involved. 'careless' answers with the first place "
    "in every story and tells a visitor everything. 'careful' tracks who saw the move and keeps "
    "its secret. The visitor is also a script, and all scores are computed by rules."
)

Messages = Sequence[Mapping[str, str]]


# -- the scripts -----------------------------------------------------------------------------------


def careless(messages: Messages) -> str:
    """Answer with the first place in the story; in a conversation, reveal everything."""
    story = messages[-1]["content"]
    if place := _first_place(story):
        return f"<answer>{place}</answer>"
    return _what_is_asked(messages)


def careful(messages: Messages) -> str:
    """Answer from what the person saw; in a conversation, reveal everything but the secret."""
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
    """`first`, unless the question is about now or about a person who saw a later move."""
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


ACTORS = (careless, careful)


# -- the demonstration -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedDemo:
    """One demonstration in the folder `out`, with one run per actor."""

    out: Path
    seed: int = 0

    def run(self, reporter: Reporter = SILENT) -> dict[str, Any]:
        """Run both evaluations; finished ones are skipped, interrupted ones resumed."""
        rows = self.out / "rows" / "held_out.jsonl"
        write_stories(rows, STORIES, self.seed, "test")
        summaries = {one.__name__: self._measure(one, rows, reporter) for one in ACTORS}
        return {
            name: {task: _numbers(headline(cells)) for task, cells in summary.tasks.items()}
            for name, summary in summaries.items()
        }

    def write_summary(self, results: Mapping[str, Any]) -> None:
        """Write `summary.json` of the whole demonstration."""
        line = {"command": "demo --scripted", **results, NOTES: [WHAT_IT_IS]}
        write_json(self.out / "summary.json", line)

    def _measure(self, actor: Callable[[Messages], str], rows: Path, reporter: Reporter) -> Summary:
        reporter.note(f"evaluating '{actor.__name__}'")
        config = EvalConfig.model_validate({
            "kind": "api", "actor_kind": "function", "model": f"{__name__}:{actor.__name__}",
            "tasks": (TASK, TALK), "data": {TASK: str(rows), TALK: f"synth:{TALKS}"},
            "seed": self.seed, "partner": f"function:{visitor_line.__module__}:visitor_line",
        })  # fmt: skip
        return run_eval(config, self.out / actor.__name__)[1]


def _numbers(cell: Cell) -> dict[str, Any]:
    return {
        "mean": cell.mean, "ci": [cell.ci_low, cell.ci_high], "n_scored": cell.n_scored, "n": cell.n
    }  # fmt: skip
