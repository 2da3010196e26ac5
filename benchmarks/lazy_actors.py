"""How well do trivial actors score that ignore the row? Five of them, on every playable task.

    .venv/bin/python benchmarks/lazy_actors.py [--rows 120] [--task userllm ...] [--json lazy.json]

    same line       the same reply to every row: the best of a bland message and the gold replies of
                    the first rows, such as a constant letter, number or gesture
    own words       repeats the last message to the actor
    empty           an empty reply
    longest option  the longest option, in tasks with options
    description     everything that the actor was told about the row, in tasks whose judges compare
                    with a person

Rows are generated (synth). Scores are headlines as shares of their scales: 0 is the lowest score, 1
the highest. The judges have no model (`_lazy/judges.py`): the kindest always answers in the actor's
favour and shows which score an uncritical judge gives; the other goes by the words that the actor
shares with the recorded person. `person` is that person's own score. For tasks with controls, the
anchors are printed: two people compared, two actors compared.

All scores above half of their scale are listed below the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from _lazy.judges import Judge, recorded
from rich.console import Console
from rich.table import Table

from soulkit.models.base import Cast, Player
from soulkit.play.engine import Engine, Job, ask_control, control_jobs
from soulkit.play.plan import Work
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.types import Call, Completion, Example, Record, Sampling, Segment

BLAND = "hey, quick one, got a sec?"
ACTORS = ("same line", "own words", "empty", "longest option", "description", "person")
LAZY = ACTORS[:-1]
TRIED = 6
"""Number of rows whose gold reply is tried as the constant line."""
JUDGES = ("kindest", "rule")
UNJUDGED = "none"
Shares = dict[str, float | None]

Say = Callable[[str, Sequence[Segment]], str]
"""(example id, context) → reply."""


@dataclass
class Spoken:
    """A model whose replies come from a function."""

    say: Say
    name: str = "scripted"

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        return Completion(text=self.say(call.example_id, context))

    async def close(self) -> None:
        """Do nothing: there is no connection."""


@dataclass(frozen=True)
class Bench:
    """A task with its rows and one judge."""

    task: Task
    examples: Sequence[Example]
    judge: Judge

    def cast(self, say: Say) -> Cast:
        other, judge = partner_of(self.task), Player(self.judge)
        return Cast(actor=Player(Spoken(say)), partner=other, environment=other, judges=(judge,))

    async def records(self, examples: Sequence[Example], say: Say) -> list[Record]:
        jobs = [Job(self.task, example) for example in examples]
        return await Engine(self.cast(say)).run(jobs, lambda record: None)

    async def share(self, examples: Sequence[Example], say: Say) -> float | None:
        """The headline score of an actor as a share of its scale."""
        return share_of(self.task, await self.records(examples, say))


def share_of(task: Task, records: Sequence[Record]) -> float | None:
    """The headline as a share of its scale; the mean score if it needs missing files (tau_usi)."""
    for record in records:
        assert record.score.scored, (task.name, record.score.reason, record.score.words)
    value, metric = task.headline(records), task.spec.metric
    values = [r.score.value for r in records if r.score.value is not None]
    if value is None and values:
        value = fmean(values)
    return None if value is None else (value - metric.low) / (metric.high - metric.low)


# -- the other players -----------------------------------------------------------------------------


def partner_of(task: Task) -> Player:
    """The task's scripted partner, or one that repeats a polite line in every turn."""
    script = task.spec.hook(task.name, "scripted_partner")
    line = "I see. What do you mean?"
    if task.name == "sotopia":
        line = json.dumps({"action_type": "speak", "argument": line})

    def answer(_: str, context: Sequence[Segment]) -> str:
        if script is None:
            return line
        return str(script([{"role": s.role, "content": s.text} for s in context]))

    return Player(Spoken(answer))


# -- the actors ------------------------------------------------------------------------------------


def constant_lines(task: Task, examples: Sequence[Example]) -> list[str]:
    """Candidates for the constant line."""
    golds = (task.gold(example) for example in examples[:TRIED])
    first = (gold.traces[0].turns[0].completion.text for gold in golds if gold and gold.traces)
    return list(dict.fromkeys([BLAND, *first]))


def longest_options(task: Task, examples: Sequence[Example]) -> dict[str, str]:
    """Example id → the reply with the longest option; empty for tasks without options."""
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


def descriptions(task: Task, examples: Sequence[Example]) -> dict[str, str]:
    """Example id → everything that the acted seat is told about the row."""
    return {
        example.id: "\n".join(
            text for text in example.visible(task.acted_seats(example)[0]).values()
            if isinstance(text, str)
        )
        for example in examples
    }  # fmt: skip


# -- the table -------------------------------------------------------------------------------------


async def person_share(bench: Bench) -> float | None:
    """The score of the recorded people."""
    records, cast = [], bench.cast(last_words_back)
    for example in bench.examples:
        gold = bench.task.gold(example)
        if gold is None:
            return None
        score = await bench.task.judged(example, gold, cast)
        records.append(Record(
            key=example.id, task=bench.task.name, example_id=example.id, rollout=0, kind="draft",
            step=0, episode=gold, score=score, cluster=example.cluster, tags=example.tags,
        ))  # fmt: skip
    return share_of(bench.task, records)


async def anchors(bench: Bench, line: str) -> Mapping[str, float | None]:
    """The calibrated scores of a task's controls, for an actor that always replies `line`."""
    if not bench.task.controls:
        return {}
    drafts = await bench.records(bench.examples, lambda *_: line)
    episodes = {record.example_id: record.episode for record in drafts}
    cast = bench.cast(lambda *_: line)
    jobs = control_jobs(Work(bench.task, tuple(bench.examples), controls=bench.task.controls), 1)
    controls = [await ask_control(job, episodes[job.example.id], cast) for job in jobs]
    return {n: m.value for n, m in bench.task.calibrate(drafts, controls).items()}


async def shares_of(bench: Bench) -> tuple[Shares, str]:
    """(actor → its share, the best constant line)."""
    task, examples = bench.task, bench.examples
    lines = {
        line: await bench.share(examples, lambda *_, line=line: line)
        for line in constant_lines(task, examples)
    }
    best = max(lines, key=lambda line: lines[line] or 0.0)
    longest, told = longest_options(task, examples), descriptions(task, examples)
    with_options = [example for example in examples if example.id in longest]
    shares: Shares = {
        "same line": lines[best],
        "own words": await bench.share(examples, last_words_back),
        "empty": await bench.share(examples, lambda *_: ""),
        "longest option": await bench.share(with_options, lambda name, _: longest[name])
        if with_options else None,
    }  # fmt: skip
    if bench.judge.asked:
        shares["description"] = await bench.share(examples, lambda name, _: told[name])
    return {**shares, "person": await person_share(bench)}, best


async def results_of(
    task: Task, rows: int
) -> dict[str, tuple[Shares, str, Mapping[str, float | None]]]:
    """Judge → (shares, best line, anchors); the key is UNJUDGED for tasks without a judge."""
    examples = [example for row in make_rows(task, rows, 1) for example in task.examples(row)]
    examples = list(task.with_baselines(examples))
    lines = {example.id: recorded(task, example) for example in examples}
    results = {}
    for kind in JUDGES:
        bench = Bench(task, examples, Judge(kind, lines))
        shares, best = await shares_of(bench)
        if not bench.judge.asked:
            return {UNJUDGED: (shares, best, {})}
        results[kind] = shares, best, await anchors(bench, best)
    return results


def playable(registry: Registry, names: Sequence[str]) -> list[str]:
    every = [name for name, spec in registry.specs.items() if not spec.rows_only and spec.synth]
    return [name for name in every if not names or name in names]


Results = dict[str, dict[str, tuple[Shares, str, Mapping[str, float | None]]]]


def printed(results: Results) -> None:
    table = Table("task", "judge", *ACTORS, title="lazy actors: share of the headline's scale")
    for name, by_judge in results.items():
        for judge, (shares, _, _) in by_judge.items():
            cells = ("" if (s := shares.get(a)) is None else f"{s:.3f}" for a in ACTORS)
            table.add_row(name, "" if judge == UNJUDGED else judge, *cells)
    console = Console(width=140)
    console.print(table)
    for name, by_judge in results.items():
        for judge, (shares, best, controls) in by_judge.items():
            for actor in LAZY:
                value = shares.get(actor)
                if value is not None and value > 0.5:
                    what = f" ({' '.join(best.split())[:60]})" if actor == "same line" else ""
                    line = f"above half: {name}, {judge}, {actor}{what}: {value:.3f}"
                    console.print(line, markup=False)
            for control, value in controls.items():
                console.print(f"{name}, {judge}: {control} {value}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=120, help="number of generated rows per task")
    parser.add_argument("--task", nargs="*", default=(), help="tasks to run (default: all)")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    registry, results = load_registry(), {}
    for name in playable(registry, arguments.task):
        results[name] = asyncio.run(results_of(registry.task(name), arguments.rows))
    printed(results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
