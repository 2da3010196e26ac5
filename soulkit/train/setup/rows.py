"""The data of a training run: a mixture of tasks, shuffled per epoch, or conversations.

Rows are drawn by (seed, step), so a resumed run plays the same rows as an uninterrupted one. The
first lessons of each source of conversations are read as a sample, to estimate lengths, to build
the vocabulary of a tiny model, and to find validation conversations among the training data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from soulkit.data.chats import people_on_both_sides
from soulkit.data.corpora.file_rows import source_rows
from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.settings import HUMAN, SourceSettings, hub_address, source_files
from soulkit.data.corpora.stream import LessonRows, LessonStream, read_lessons
from soulkit.data.files import RawRow
from soulkit.data.privacy.finders import counts_line, private_counts, strings_in
from soulkit.errors import ConfigError, DataError
from soulkit.eval.results.batch_statistics import parts_remark
from soulkit.play.requirements import left_out_lines
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import CorpusFacts
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import damaged, first_problem
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig, settings_class
from soulkit.train.objectives.base import Objective
from soulkit.types import Example

TaskRows = list[tuple[Task, Example]]


@dataclass(frozen=True)
class TrainingData:
    """The data, settings and objective of a training run."""

    tasks: Mapping[str, Task]
    pool: TaskRows
    dev: TaskRows
    config: TrainConfig
    """The settings with default players filled in."""
    objective: Objective | None = None
    """The method; None in supervised training."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Skipped task of the suite → reason."""
    corpus: Corpus | None = None
    """Conversations to train on instead of tasks."""
    measured: TrainingData | None = None
    """Dev rows, players and settings used to measure supervised training."""
    players: tuple[str, ...] = ()
    """A line for each default player that differs from evaluation's."""
    coaches: tuple[str, ...] = ()
    """Lines on default coaches that are not models; plans print them too."""
    planned: tuple[str, ...] = ()
    """In a plan, lines about rows that are not here."""

    def remarks(self) -> list[str]:
        """Lines printed before the start: skipped tasks, players that differ from evaluation,
        repeated rows, and parts of the headline that no dev row measures."""
        share = self.config.rows_per_task
        lines = [*left_out_lines(self.config.suite, self.left_out), *self.planned, *self.players]
        lines += self.measured.players if self.measured else ()
        lines += self.coaches
        lines += self.corpus.remarks() if self.corpus else []
        for task in self.tasks.values():
            held_out = [row for owner, row in self.dev if owner is task]
            lines.append(parts_remark(task, held_out, dev=True))
        few = []
        for task in self.tasks.values() if share else ():
            taken = [row.id for owner, row in self.pool if owner is task]
            if (distinct := len(set(taken))) < len(taken):
                few.append(f"{task.name} ({distinct} for {len(taken)})")
        if few:
            lines.append(f"rows are repeated, so that each task keeps its share: {', '.join(few)}")
        return [line for line in lines if line]


def mixture(
    tasks: Mapping[str, Task], examples: Mapping[str, Sequence[Example]],
    ratios: Mapping[str, float], seed: int, rows_per_task: int | None = None,
) -> TaskRows:  # fmt: skip
    """Every task's rows at its ratio: 0.5 is a fixed half, 1.5 is all rows plus half of them again.

    With `rows_per_task`, ratios refer to that number: tasks with equal ratios get equal shares, and
    tasks with fewer rows repeat them as evenly as possible.
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
            "There are no rows to train on.",
            "The training data of every task is empty after filtering.",
            "Provide rows with --data TASK=FILE, or generate some with --data TASK=synth:2000.",
        )
    return pool


def batch(pool: TaskRows, size: int, step: int, seed: int) -> TaskRows:
    """The `step`-th batch; epochs are shuffled separately, and a batch may span two of them."""
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
    """The error for a task without gold episodes."""
    return (
        f"The task '{task}' has no gold episodes to train on.",
        "Supervised training needs the correct answer for each row.",
        "Train it with grpo or ditto, or define gold() in the task.",
    )


GENERAL = "general"
"""The suite that measures general ability, outside the trained tasks."""


def general_rows() -> TaskRows:
    """All generated rows of the suite, in the default number per task."""
    registry = load_registry()
    tasks = [registry.task(name) for name in registry.suite(GENERAL)]
    pool: TaskRows = []
    for task in tasks:
        made = enumerate(make_rows(task, None, seed=0), 1)
        rows = [RawRow(row, f"{GENERAL}:{i}") for i, row in made]
        pool += [(task, example) for example in to_examples(task, rows).examples]
    return pool


def general_settings(config: TrainConfig) -> TrainConfig:
    """Settings of a run for the general suite, with its own limit on reply length."""
    return config.model_copy(update={"max_tokens": config.retention_tokens})


# --- conversations --------------------------------------------------------------------------------


SAMPLE = 300
"""Number of lessons per source that are read before the start."""
PEOPLE_OF = 5_000
"""Number of lessons per source whose people are compared with those of the validation."""
SAME = 0.5
"""Largest share of validation conversations that may occur in the sample of training data."""


@dataclass(frozen=True)
class Corpus:
    """The conversations of a run."""

    stream: LessonStream
    samples: Mapping[str, tuple[Lesson, ...]]
    """Source → its first lessons."""
    validation: Mapping[str, tuple[Lesson, ...]]
    """Name → validation conversations."""
    sizes: Mapping[str, int | None]
    """Source → its number of rows, if known."""
    shared_people: frozenset[str] = frozenset()
    """People with validation conversations who also wrote some of the training data."""

    private: str = ""
    """The remark about private data in the training data; empty if it may be there."""

    @property
    def lessons(self) -> Iterator[Lesson]:
        """All lessons known before the start: samples and validation conversations."""
        for several in (*self.samples.values(), *self.validation.values()):
            yield from several

    @property
    def held_out(self) -> frozenset[str]:
        """`lesson_print` of all validation conversations."""
        return frozenset(
            lesson_print(one) for several in self.validation.values() for one in several
        )

    def remarks(self) -> list[str]:
        """Lines printed before the start."""
        held_out = self.held_out
        shared = sum(lesson_print(one) in held_out for s in self.samples.values() for one in s)
        twice = (
            f"{shared} of the first conversations are also validation conversations: such "
            "conversations are only used for validation"
        )
        people = people_on_both_sides(self.shared_people, "validation conversations")
        return [*([twice] if shared else []), *filter(None, (people, self.private))]


def lesson_print(lesson: Lesson) -> str:
    """A hash of a conversation's words, independent of which side is trained."""
    digest = hashlib.sha256()
    for segment in lesson.segments:
        digest.update(" ".join(segment.text.split()).encode() + b"\0")
    return digest.hexdigest()[:24]


def gather_corpus(config: TrainConfig, reporter: Reporter = SILENT) -> Corpus:
    """The conversations that `config` names; UserError if they cannot be used. `reporter` shows
    progress."""
    if config.data:
        raise ConfigError(
            "The settings name both conversations and rows of tasks.",
            "One run trains on either conversations or tasks, so the rows would be ignored.",
            "Name the conversations with corpora or --data FILE, and remove data.",
        )
    _refuse_same_files(config)
    stream = open_stream(config, reporter)
    samples = stream.heads(SAMPLE)
    validation = {
        name: tuple(islice(lessons_of(one, config), config.validation_limit))
        for name, one in validation_sources(config).items()
    }
    _refuse_same_rows(samples, validation)
    held = _people(validation)
    shared = held & _people(stream.heads(PEOPLE_OF)) if held else held
    return Corpus(stream, samples, validation, stream.sizes, shared, private_remark(config))


def private_remark(config: TrainConfig) -> str:
    """The remark about private data in the first conversations of local sources, or empty."""
    paths = [one.path for one in config.corpora if hub_address(one.path) is None]
    if config.allow_private:
        return ""
    found = {
        path: private_counts(strings_in([row for _, row in islice(source_rows(path), SAMPLE)]))
        for path in paths
    }
    return "; ".join(
        f"the first {SAMPLE} conversations of {path} contain {counts_line(counts)}: replace them "
        f"with soul data redact {shlex.quote(path)} -o SAFE.jsonl, or add --allow-private"
        for path, counts in found.items() if counts
    )  # fmt: skip


def _people(several: Mapping[str, Sequence[Lesson]]) -> frozenset[str]:
    """The known people who talk to an assistant; with a named side they are the same by design."""
    return frozenset(
        one.person for lessons in several.values() for one in lessons if one.side == HUMAN
    ) - {""}


def open_stream(config: TrainConfig, reporter: Reporter = SILENT) -> LessonStream:
    """The stream of a run at its first lesson."""
    return LessonStream.open(
        config.corpora, seed=config.seed, window=config.window, side=config.side,
        strip_system=config.strip_system, turns=config.turns, reporter=reporter,
    )  # fmt: skip


def sft_config(run: Path) -> TrainConfig:
    """The settings of a supervised training. DataError if its file was damaged."""
    try:
        return settings_class("sft").model_validate(read_config(run))
    except ValidationError as error:
        problem = first_problem(error, "the settings")
        raise damaged(f"The settings of '{run}' cannot be read ({problem}).") from error


def lessons_of(source: SourceSettings, config: TrainConfig) -> LessonRows:
    """The lessons of a source in the order of its files, shortened as the settings say."""
    return read_lessons(
        source, side=config.side, strip_system=config.strip_system, turns=config.turns
    )


# --- validation -----------------------------------------------------------------------------------


def validation_sources(config: TrainConfig) -> dict[str, SourceSettings]:
    """Name → validation source: the named ones, or else validation files in shard folders."""
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
        except DataError:  # a folder without validation files
            continue
        yield from (source.model_copy(update={"path": str(file), "ratio": 1.0}) for file in files)


def _refuse_same_files(config: TrainConfig) -> None:
    """ConfigError for a validation file that is also trained on."""
    learned = {file: one.path for one in config.corpora for file in _files_of(one.path)}
    for source in validation_sources(config).values():
        for file in _files_of(source.path):
            if file in learned:
                raise ConfigError(
                    f"The validation file '{source.path}' is also training data "
                    f"('{learned[file]}').",
                    "A loss on training conversations says nothing about new ones.",
                    "Put some conversations into a separate file for --validation.",
                )


def _files_of(path: str) -> set[str]:
    """Real paths of the files of a source; empty for a source on the Hub."""
    if hub_address(path) is not None:
        return set()
    return {os.path.realpath(file) for file in source_files(path)}


def _refuse_same_rows(
    samples: Mapping[str, Sequence[Lesson]], validation: Mapping[str, Sequence[Lesson]]
) -> None:
    """ConfigError if most validation conversations are also training data."""
    learned = {lesson_print(one) for sample in samples.values() for one in sample}
    for name, lessons in validation.items():
        shared = sum(lesson_print(one) in learned for one in lessons)
        if shared > SAME * len(lessons):
            raise ConfigError(
                f"{shared} of the {len(lessons)} validation conversations in '{name}' are also "
                "training data.",
                "A loss on training conversations says nothing about new ones.",
                "Put some conversations into a separate file for --validation.",
            )


def beyond_context(tokens: int, context: int, config: TrainConfig) -> ConfigError:
    """The error for lessons that are longer than the model's context."""
    preset = f" (preset {config.preset})" if config.preset else ""
    return ConfigError(
        f"Lessons of {tokens:,} tokens{preset} are longer than the context of '{config.model}', "
        f"which is {context:,}.",
        "The model cannot read tokens beyond its context.",
        f"Use --lesson-tokens {context}, which drops the oldest turns of longer conversations, or "
        "a model with a longer context.",
    )


# --- records --------------------------------------------------------------------------------------


def corpus_facts(corpus: Corpus) -> dict[str, dict[str, CorpusFacts]]:
    """Row counts and hashes of sources and validation conversations, for the run's record."""
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
    """The training sources as listed in a model's note and card, without local paths."""
    return [
        {
            "name": label,
            "side": source.side or config.side or "by data set",
            "ratio": source.ratio,
            "rows": rows,
        }
        for (label, rows), source in zip(corpus.sizes.items(), config.corpora, strict=True)
    ]
