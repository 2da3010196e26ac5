"""What do actors score that never read the row? Four of them, on every task that can be played.

    .venv/bin/python benchmarks/lazy_actors.py [--rows 120] [--task userllm ...] [--json lazy.json]

    same line       one line to everybody: the best of a bland message and of what would be right in
                    the first rows, so that a constant letter, number or gesture has its chance
    own words       the task's words back: the last thing that was said to the actor
    empty           nothing
    longest option  the longest of the options, where there are any

Rows are made here (synth), scores are headlines as shares of their scales: 0 is the lowest score, 1
the highest. Where a judge is asked, it is the kindest there is: it takes every message for a
person's and every answer for a refusal; a Sotopia scene it marks as one in which nothing happened.
Humanual's counts words that a reply shares with the person's own: the kindest would like any reply.
So such numbers say what is left when the judge sees nothing. Whatever is above half of its scale is
listed below the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from soulkit.models.base import Cast, Player
from soulkit.play.engine import Engine, Job
from soulkit.tasks.base import Task
from soulkit.tasks.humanual.scores import AXES, lexical_f1
from soulkit.tasks.made import make_rows
from soulkit.tasks.registry import Registry, load_registry
from soulkit.tasks.sotopia.scores import DIMENSIONS
from soulkit.types import Call, Completion, Example, Sampling, Segment

BLAND = "hey, quick one, got a sec?"
ACTORS = ("same line", "own words", "empty", "longest option")
TRIED = 6
"""Rows whose right answer is tried as the one line to everybody."""
NEUTRAL = {"believability": 5}
"""Raw marks of a scene in which nothing happens; the others are 0."""
Shares = dict[str, float | None]

Say = Callable[[str, Sequence[Segment]], str]
"""(example id, context) → reply."""


@dataclass
class Spoken:
    """A model that says what a function says."""

    say: Say
    name: str = "scripted"

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return Completion(text=self.say(call.example_id, context))

    async def close(self) -> None:
        """Nothing is open."""


# -- the other players -----------------------------------------------------------------------------


def kindest(_: str, context: Sequence[Segment]) -> str:
    """The label or the marks that cost the actor least."""
    prompt = context[0].text
    if "risk_level" in prompt:
        return json.dumps({"risk_level": "low", "reason": "nothing to see"})
    if "believability" in prompt:
        marks = {name: NEUTRAL.get(name, 0) for name in DIMENSIONS}
        return json.dumps({n: {"reasoning": "so so", "score": s} for n, s in marks.items()})
    if "six sides" in prompt:
        return by_shared_words(prompt)
    return "REFUSED" if "REFUSED" in prompt else "HUMAN"


def by_shared_words(prompt: str) -> str:
    """A rule in place of kindness, which would let every reply be the person's own: on every side
    the F1 of the words of the reply and of what the person wrote."""
    reply, original = (
        re.search(rf"<{name} (\w+)>\n(.*?)\n</{name} \1>", prompt, re.DOTALL)
        for name in ("reply", "original")
    )
    shared = lexical_f1(reply[2], original[2]) if reply and original else 0.0
    return json.dumps({axis: {"thought": "words", "score": shared} for axis in AXES})


def partner_of(task: Task) -> Player:
    """The task's partner by script, else one that says the same polite thing in every turn."""
    script = task.spec.hook(task.name, "scripted_partner")
    line = json.dumps({"action_type": "speak", "argument": "I see. What do you mean?"})

    def answer(_: str, context: Sequence[Segment]) -> str:
        if script is None:
            return line
        return str(script([{"role": s.role, "content": s.text} for s in context]))

    return Player(Spoken(answer))


# -- the actors ------------------------------------------------------------------------------------


def constant_lines(task: Task, examples: Sequence[Example]) -> list[str]:
    """What could be said to everybody."""
    golds = (task.gold(example) for example in examples[:TRIED])
    first = (gold.traces[0].turns[0].completion.text for gold in golds if gold and gold.traces)
    return list(dict.fromkeys([BLAND, *first]))


def longest_options(task: Task, examples: Sequence[Example]) -> dict[str, str]:
    """Example id → the reply that picks the longest option; only where there are options."""
    replies = {}
    for example in examples:
        view = task.leak_view(example)
        if view is None or len(view.options) < 2:
            continue
        place = max(range(len(view.options)), key=lambda i, v=view: len(v.options[i]))
        answer = view.letters[place] if view.letters else view.options[place]
        replies[example.id] = f"<answer>{answer}</answer>"
    return replies


def last_words_back(_: str, context: Sequence[Segment]) -> str:
    return next((s.text for s in reversed(context) if s.role != "assistant"), "")


# -- the table -------------------------------------------------------------------------------------


async def share(task: Task, examples: Sequence[Example], say: Say) -> float | None:
    """The headline of an actor, as a share of its scale."""
    judge = Player(Spoken(kindest))
    cast = Cast(actor=Player(Spoken(say)), partner=partner_of(task), judges=(judge,))
    records = await Engine(cast).run([Job(task, e) for e in examples], lambda record: None)
    value, metric = task.headline(records), task.spec.metric
    return None if value is None else (value - metric.low) / (metric.high - metric.low)


async def shares_of(task: Task, examples: Sequence[Example]) -> tuple[Shares, str]:
    """(actor → its share, the best line to everybody)."""
    lines = {
        line: await share(task, examples, lambda *_, line=line: line)
        for line in constant_lines(task, examples)
    }
    best = max(lines, key=lambda line: lines[line] or 0.0)
    longest = longest_options(task, examples)
    with_options = [example for example in examples if example.id in longest]
    return {
        "same line": lines[best],
        "own words": await share(task, examples, last_words_back),
        "empty": await share(task, examples, lambda *_: ""),
        "longest option": await share(task, with_options, lambda name, _: longest[name])
        if with_options else None,
    }, best  # fmt: skip


def made_examples(task: Task, rows: int) -> list[Example]:
    return [example for row in make_rows(task, rows, 1) for example in task.examples(row)]


def playable(registry: Registry, names: Sequence[str]) -> list[str]:
    every = [name for name, spec in registry.specs.items() if not spec.rows_only and spec.synth]
    return [name for name in every if not names or name in names]


def printed(results: dict[str, tuple[Shares, str]]) -> None:
    table = Table("task", *ACTORS, title="lazy actors: share of the headline's scale")
    for name, (shares, _) in results.items():
        table.add_row(name, *("" if (s := shares[a]) is None else f"{s:.3f}" for a in ACTORS))
    console = Console(width=120)
    console.print(table)
    for name, (shares, best) in results.items():
        for actor, value in shares.items():
            if value is not None and value > 0.5:
                what = f" ({' '.join(best.split())[:60]})" if actor == "same line" else ""
                console.print(f"above half: {name}, {actor}{what}: {value:.3f}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=120, help="made rows of each task")
    parser.add_argument("--task", nargs="*", default=(), help="tasks; all unless told")
    parser.add_argument("--json", type=Path, help="write the table here, too")
    arguments = parser.parse_args()
    registry, results = load_registry(), {}
    for name in playable(registry, arguments.task):
        task = registry.task(name)
        results[name] = asyncio.run(shares_of(task, made_examples(task, arguments.rows)))
    printed(results)
    if arguments.json:
        arguments.json.write_text(json.dumps({n: s for n, (s, _) in results.items()}, indent=1))


if __name__ == "__main__":
    main()
