"""What a run trains on: a mixture of tasks, shuffled per epoch, or conversations.

Rows are drawn by (seed, step), so a resumed run plays the rows that an untouched one would. Of each
source of conversations the first lessons are read as a sample: it says how long lessons are, which
words a tiny model has to know, and whether the validation conversations are those that are learned.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.settings import SourceSettings, hub_address, source_files
from soulkit.data.corpora.stream import LessonRows, LessonStream, read_lessons
from soulkit.data.files import RawRow
from soulkit.errors import ConfigError, DataError
from soulkit.eval.results.batch_statistics import parts_remark
from soulkit.play.requirements import left_out_lines
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import CorpusFacts
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.types import Example

TaskRows = list[tuple[Task, Example]]


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on."""

    tasks: Mapping[str, Task]
    pool: TaskRows
    dev: TaskRows
    config: TrainConfig
    """The settings with everybody in their seats."""
    objective: Objective | None = None
    """The method, made once; None in supervised training."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Task of the suite → why it is not trained on here."""
    corpus: Corpus | None = None
    """The conversations that are learned in the place of tasks."""
    measured: TrainingData | None = None
    """What supervised training is measured on: rows, players and settings of a reinforcement."""
    players: tuple[str, ...] = ()
    """A line for each default player that differs from evaluation's."""
    coaches: tuple[str, ...] = ()
    """Lines on default coaches that are no model: a plan has them as well."""

    def remarks(self) -> list[str]:
        """Lines printed before the start: tasks left out, other players than in evaluation, rows
        that are repeated, and headlines of which the dev rows lack a part."""
        share = self.config.rows_per_task
        lines = [*left_out_lines(self.config.suite, self.left_out), *self.players]
        lines += self.measured.players if self.measured else ()
        lines += self.coaches
        lines += self.corpus.remarks() if self.corpus else []
        for task in self.tasks.values():
            held_out = [row for owner, row in self.dev if owner is task]
            lines.append(parts_remark(task, held_out, dev=True))
        for task in self.tasks.values() if share else ():
            taken = [row.id for owner, row in self.pool if owner is task]
            if (distinct := len(set(taken))) < len(taken):
                lines.append(
                    f"{task.name} has {distinct} training rows: they are repeated up to "
                    f"{len(taken)}, so that the tasks keep their shares"
                )
        return [line for line in lines if line]


def mixture(
    tasks: Mapping[str, Task], examples: Mapping[str, Sequence[Example]],
    ratios: Mapping[str, float], seed: int, rows_per_task: int | None = None,
) -> TaskRows:  # fmt: skip
    """Every task's rows at its ratio: 0.5 a fixed half, 1.5 all and half of them once more.

    A ratio is one of `rows_per_task`, where that is given: tasks with equal ratios then have equal
    shares, and one with fewer rows has them repeated, as evenly as it goes.
    """
    pool: TaskRows = []
    for name, ratio in ratios.items():
        rows = sorted(examples[name], key=lambda e: e.id)
        random.Random(f"{seed}/{name}/mixture").shuffle(rows)
        size = max(1, round(ratio * (rows_per_task or len(rows)))) if rows else 0
        repeats = math.ceil(size / max(len(rows), 1))
        pool += [(tasks[name], row) for row in (rows * repeats)[:size]]
    if not pool:
        raise DataError(
            "There is no row to train on.",
            "Every task's training data is empty after filtering.",
            "Give rows with --data TASK=FILE, or generate some with --data TASK=synth:2000.",
        )
    return pool


def batch(pool: TaskRows, size: int, step: int, seed: int) -> TaskRows:
    """The `step`-th batch: epochs are shuffled separately and run into each other."""
    start = step * size
    chosen: TaskRows = []
    while len(chosen) < size:
        epoch, offset = divmod(start + len(chosen), len(pool))
        order = list(range(len(pool)))
        random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
        take = order[offset : offset + size - len(chosen)]
        chosen += [pool[i] for i in take]
    return chosen


def no_gold_words(task: str) -> tuple[str, str, str]:
    """The error of a task that cannot be imitated."""
    return (
        f"The task '{task}' has no gold episodes to imitate.",
        "Supervised training needs the perfect answer of each row.",
        "Train it with grpo or ditto, or define gold() in the task.",
    )


GENERAL = "general"
"""The suite whose tasks stand for what a model can do beside what it is trained for."""


def general_rows() -> TaskRows:
    """Every row of the suite, each task's as many as it makes by itself."""
    registry = load_registry()
    tasks = [registry.task(name) for name in registry.suite(GENERAL)]
    pool: TaskRows = []
    for task in tasks:
        made = enumerate(make_rows(task, None, seed=0), 1)
        rows = [RawRow(row, f"{GENERAL}:{i}") for i, row in made]
        pool += [(task, example) for example in to_examples(task, rows).examples]
    return pool


def general_settings(config: TrainConfig) -> TrainConfig:
    """Those of a run, with replies as long as these tasks want them: the limit of what is trained
    on says nothing of them."""
    return config.model_copy(update={"max_tokens": config.retention_tokens})


# --- conversations --------------------------------------------------------------------------------


SAMPLE = 300
"""Lessons of each source that are looked at before the start."""
SAME = 0.5
"""Share of the validation conversations that may stand in the sample of what is learned."""


@dataclass(frozen=True)
class Corpus:
    """The conversations of a run."""

    stream: LessonStream
    samples: Mapping[str, tuple[Lesson, ...]]
    """Source → its first lessons."""
    validation: Mapping[str, tuple[Lesson, ...]]
    """Name → the conversations whose loss is measured."""
    sizes: Mapping[str, int | None]
    """Source → its rows where known, whatever the stream reads in their place (`mixsd`)."""

    @property
    def lessons(self) -> Iterator[Lesson]:
        """The samples and what is measured: what is known of the words before the start."""
        for several in (*self.samples.values(), *self.validation.values()):
            yield from several

    @property
    def held_out(self) -> frozenset[str]:
        """`lesson_print` of all that is measured."""
        return frozenset(
            lesson_print(one) for several in self.validation.values() for one in several
        )

    def remarks(self) -> list[str]:
        """What is said aloud before the start."""
        held_out = self.held_out
        shared = sum(lesson_print(one) in held_out for s in self.samples.values() for one in s)
        if not shared:
            return []
        return [
            f"{shared} of the first conversations also stand among the validation conversations: "
            "they are measured and not learned, here and further on"
        ]


def lesson_print(lesson: Lesson) -> str:
    """What tells a conversation from another: its words in their order, whoever learns them."""
    digest = hashlib.sha256()
    for segment in lesson.segments:
        digest.update(" ".join(segment.text.split()).encode() + b"\0")
    return digest.hexdigest()[:24]


def gather_corpus(config: TrainConfig, reporter: Reporter = SILENT) -> Corpus:
    """The conversations that `config` names; UserError for what is wrong with them. `reporter` gets
    what takes long."""
    if config.data:
        raise ConfigError(
            "There are conversations, and rows of tasks beside them.",
            "One training learns either people's conversations or tasks; the rows would be unread.",
            "Name the conversations under corpora, or with --data FILE, and leave out data.",
        )
    _refuse_same_files(config)
    stream = open_stream(config, reporter)
    samples = stream.heads(SAMPLE)
    validation = {
        name: tuple(islice(lessons_of(one, config), config.validation_limit))
        for name, one in validation_sources(config).items()
    }
    _refuse_same_rows(samples, validation)
    return Corpus(stream, samples, validation, stream.sizes)


def open_stream(config: TrainConfig, reporter: Reporter = SILENT) -> LessonStream:
    """The stream of a run at its first lesson."""
    return LessonStream.open(
        config.corpora, seed=config.seed, window=config.window, side=config.side,
        strip_system=config.strip_system, turns=config.turns, reporter=reporter,
    )  # fmt: skip


def lessons_of(source: SourceSettings, config: TrainConfig) -> LessonRows:
    """The lessons of a source in the order of its files, cut as the run's settings say."""
    return read_lessons(
        source, side=config.side, strip_system=config.strip_system, turns=config.turns
    )


# --- what is measured -----------------------------------------------------------------------------


def validation_sources(config: TrainConfig) -> dict[str, SourceSettings]:
    """Name → source: those that were named, else the validation files in folders of shards."""
    sources = config.validation or tuple(_beside_shards(config.corpora))
    named: dict[str, SourceSettings] = {}
    for source in sources:
        name = stem = source.name or Path(source.path).stem
        number = 1
        while name in named:
            number += 1
            name = f"{stem} {number}"
        named[name] = source
    return named


def _beside_shards(sources: Sequence[SourceSettings]) -> Iterator[SourceSettings]:
    for source in sources:
        if not Path(source.path).is_dir():
            continue
        try:
            files = source_files(source.path, "validation")
        except DataError:  # a folder without any: nothing is measured of it
            continue
        yield from (source.model_copy(update={"path": str(file), "ratio": 1.0}) for file in files)


def _refuse_same_files(config: TrainConfig) -> None:
    """ConfigError for a validation file that is learned from, and for two sources that are one."""
    learned = {file: one.path for one in config.corpora for file in _files_of(one.path)}
    for source in validation_sources(config).values():
        for file in _files_of(source.path):
            if file in learned:
                raise ConfigError(
                    f"'{source.path}' is to be measured, and '{learned[file]}' is learned from: "
                    "they are one file.",
                    "A loss on conversations that were learned says nothing about new ones.",
                    "Keep some conversations apart in a file of their own for --validation.",
                )


def _files_of(path: str) -> set[str]:
    """The files of a source by where they really lie, none for one of the hub."""
    if hub_address(path) is not None:
        return set()
    return {os.path.realpath(file) for file in source_files(path)}


def _refuse_same_rows(
    samples: Mapping[str, Sequence[Lesson]], validation: Mapping[str, Sequence[Lesson]]
) -> None:
    """ConfigError where most of what is measured is learned from."""
    learned = {lesson_print(one) for sample in samples.values() for one in sample}
    for name, lessons in validation.items():
        shared = sum(lesson_print(one) in learned for one in lessons)
        if shared > SAME * len(lessons):
            raise ConfigError(
                f"{shared} of the {len(lessons)} conversations in '{name}' that are to be "
                "measured are learned from: the same rows stand in both.",
                "A loss on conversations that were learned says nothing about new ones.",
                "Keep some conversations apart in a file of their own for --validation.",
            )


def beyond_context(tokens: int, context: int, config: TrainConfig) -> ConfigError:
    """The error of lessons that are longer than a model reads."""
    preset = f" (preset {config.preset})" if config.preset else ""
    return ConfigError(
        f"Lessons of {tokens:,} tokens were asked for{preset}, and the context of "
        f"'{config.model}' holds {context:,}.",
        "Beyond it the model has no positions that mean anything.",
        f"Write --lesson-tokens {context}: older turns then leave; or take a model with more "
        "context.",
    )


# --- what is recorded -----------------------------------------------------------------------------


def corpus_facts(corpus: Corpus) -> dict[str, dict[str, CorpusFacts]]:
    """The rows of the sources and of the validation conversations, as the run records them."""
    return {
        "corpora": {
            one["source"]: CorpusFacts(
                rows=corpus.stream.sizes[one["source"]],
                sha256=_hash(json.dumps(one["content"], sort_keys=True)),
            )
            for one in corpus.stream.position()["sources"]
        },
        "validation": {
            name: CorpusFacts(rows=len(some), sha256=_hash("".join(map(lesson_print, some))))
            for name, some in corpus.validation.items()
        },
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_facts(config: TrainConfig, corpus: Corpus) -> list[dict[str, Any]]:
    """What a model's note and card say of what was learned; no folder of this machine."""
    return [
        {
            "name": label,
            "side": source.side or config.side or "by data set",
            "ratio": source.ratio,
            "rows": rows,
        }
        for (label, rows), source in zip(corpus.sizes.items(), config.corpora, strict=True)
    ]
