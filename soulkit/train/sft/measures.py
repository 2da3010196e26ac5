"""Measurements during a supervised run: dev scores, probes and samples.

    RUN/probes/step_000100/             an ordinary run of `probe_method`, without its weights
    RUN/probes/step_000100/probe.json   hash of the weights, dev scores before and after
    RUN/probes/weights_000100/          the snapshot it starts from; deleted after the probe

Dev scores use the current weights on rows that neither the run nor its probes train on. A probe is
a short reinforcement run from a snapshot on disk, with its own model and optimizer; it can resume.
Samples are unscored continuations of held-out conversations, for people to read.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import CallError, ModelLoadError, UserError
from soulkit.models.base import Sampler
from soulkit.models.local.footprint import free_memory
from soulkit.models.players.players import Players
from soulkit.runs.jsonl import write_json
from soulkit.runs.records import DEV_EPISODES, SAMPLED, SAMPLES, RecordWriter
from soulkit.text import one_line
from soulkit.train.config import TINY
from soulkit.train.ranks.world import ranks
from soulkit.train.rollouts.play import DevScores
from soulkit.train.setup.data import ServePlayer, make_cast, make_players
from soulkit.train.setup.rows import TaskRows, TrainingData
from soulkit.train.state.checkpoint import replace_folder
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import read_step_lines
from soulkit.types import Call, Episode, Failure, Line, Record, Sampling, Score, Segment, Usage

Reinforce = Callable[[TrainingData, Path], Awaitable[Any]]
"""Trains on the given data and settings, in a run folder."""
PROBES, RESULT, VERSION = "probes", "probe.json", "policy.txt"
WEIGHTS = ("model", "best", "checkpoints")
"""Folders of a probe's run that are deleted."""


@dataclass(frozen=True)
class Probe:
    """Takes the probes of one supervised run."""

    loop: Loop
    measured: TrainingData
    reinforce: Reinforce

    def recorded(self, step: int) -> dict[str, float | None]:
        """The recorded result of a probe of the current weights; empty if there is none."""
        try:
            result = json.loads((self._run(step) / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if result.get("policy") != self.loop.policy.version():
            return {}
        self._throw_away(step)
        return _named(result["before"], result["after"])

    async def run(self, step: int, before: Mapping[str, float | None]) -> dict[str, float | None]:
        """Reinforce a snapshot of the weights after `step`, whose dev scores are `before`."""
        self._snapshot(step)
        self.loop.reporter.phase(f"probe of step {step + 1}")
        run, failure = self._run(step), ""
        try:
            with torch.random.fork_rng():
                await self.reinforce(replace(self.measured, config=self._settings(step)), run)
        except (UserError, CallError) as error:  # a failed probe has no result
            failure = str(error)
            self.loop.reporter.note(f"the probe of step {step + 1} failed: {failure}")
        scores = [line.dev for line in read_step_lines(run / "metrics.jsonl") if line.dev]
        after = dict(scores[-1]) if scores and not failure else {}
        result = {"policy": self.loop.policy.version(), "before": dict(before), "after": after}
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / RESULT, {**result, **({"failure": failure} if failure else {})})
        self._throw_away(step)
        return _named(before, after)

    def _settings(self, step: int) -> Any:
        """Settings of the probe; its weights are a whole model or an adapter on the run's base."""
        config, weights = self.loop.config, str(self._weights(step))
        base = str(self.loop.run.path / "base") if config.model == TINY else config.model
        whole, adapter = {"model": weights, "adapter": None}, {"model": base, "adapter": weights}
        start = {**(whole if config.full else adapter), "threads": torch.get_num_threads()}
        return self.measured.config.model_copy(update=start)

    def _run(self, step: int) -> Path:
        return self.loop.run.path / PROBES / f"step_{step + 1:06d}"

    def _weights(self, step: int) -> Path:
        return self.loop.run.path / PROBES / f"weights_{step + 1:06d}"

    def _snapshot(self, step: int) -> None:
        """Save the weights unless an unfinished probe has them; delete other probes."""
        weights, version = self._weights(step), self.loop.policy.version()
        mark = weights / VERSION
        if mark.is_file() and mark.read_text(encoding="utf-8") == version:
            return
        shutil.rmtree(self._run(step), ignore_errors=True)

        def fill(aside: Path) -> None:
            self.loop.policy.save(aside, step + 1)
            (aside / VERSION).write_text(version, encoding="utf-8")

        replace_folder(weights, fill)

    def _throw_away(self, step: int) -> None:
        for folder in (self._weights(step), *(self._run(step) / name for name in WEIGHTS)):
            shutil.rmtree(folder, ignore_errors=True)
        free_memory()


def _named(
    before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> dict[str, float | None]:
    """The scores by metric name; a failed probe has None after."""
    tasks = dict.fromkeys((*before, *after))
    return {
        f"{task}/{moment}": scores.get(task)
        for task in tasks
        for moment, scores in (("before", before), ("after", after))
    }


Scores = Mapping[str, float | None]


@dataclass
class Measures:
    """Measures the weights of a Loop on the held-out rows of `measured`. Must be closed."""

    loop: Loop
    measured: TrainingData
    sampler: Sampler
    players: Players
    dev: DevScores
    trial: Probe
    _newest: tuple[int, Scores] = field(default=(-1, {}))
    """The last scored step and its scores."""

    async def score(self, step: int) -> Scores:
        """Dev scores per task of the weights after `step`; empty if none are due."""
        every = self.loop.config.eval_every
        return await self._scores(step) if every and not (step + 1) % every else {}

    async def probe(self, step: int) -> Scores:
        """Dev scores `TASK/before` and `TASK/after` a probe of the weights, if one is due."""
        every = self.loop.config.probe_every
        if not every or (step + 1) % every:
            return {}
        recorded = self.trial.recorded(step)
        return recorded or await self.trial.run(step, await self._scores(step))

    async def _scores(self, step: int) -> Scores:
        if self._newest[0] != step:
            scores = await self.dev.now(step, self.loop.policy, self.loop.reporter)
            self._newest = (step, scores)
        return self._newest[1]

    async def close(self) -> None:
        await self.sampler.close()
        await self.players.close()


def make_measures(
    loop: Loop, measured: TrainingData, reinforce: Reinforce, serve: ServePlayer | None = None
) -> Measures:
    """The measures of a supervised run; `serve` creates players on vLLM servers."""
    config = measured.config
    sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
    players = make_players(config, sampler, loop.run, serve, loop.reporter)
    cast = make_cast(config, sampler, players)
    dev = DevScores(config, sampler, cast, measured.dev, loop.run.path / DEV_EPISODES)
    return Measures(loop, measured, sampler, players, dev, Probe(loop, measured, reinforce))


# --- held-out conversations, continued ------------------------------------------------------------


SHOWN = 4
"""Default number of conversations to continue."""
REPLY_TOKENS = 160
"""Default limit of a continuation, in tokens."""
LINE_SIGNS = 160
"""Maximum characters of each text on a printed line."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A conversation, with the reply that a person wrote next."""

    source: str
    key: str
    context: tuple[Segment, ...]
    speakers: tuple[str, ...]
    """Speaker of each segment."""
    wrote: str
    person: str = ""


def held_out_conversations(material: TrainingData, count: int) -> list[HeldOut]:
    """The first `count` held-out conversations, taken from all sources in turn."""
    if material.corpus is None:
        return list(islice(_of_rows(material.dev), count))
    by_source = [[_of_lesson(one) for one in some] for some in material.corpus.validation.values()]
    in_turn = (one for row in zip_longest(*by_source) for one in row if one is not None)
    return list(islice(in_turn, count))


def _of_lesson(lesson: Lesson) -> HeldOut:
    last = max(place for place, learned in enumerate(lesson.trained) if learned)
    context, wrote = lesson.segments[:last], lesson.segments[last].text
    speakers = tuple(lesson.speaker(segment) for segment in context)
    who = lesson.person or lesson.key
    return HeldOut(lesson.source, lesson.key, tuple(context), speakers, wrote, who)


def _of_rows(dev: TaskRows) -> Iterator[HeldOut]:
    for task, example in dev:
        gold = task.gold(example)
        turns = [turn for trace in gold.traces for turn in trace.turns] if gold else []
        if turns:
            wrote = turns[-1].completion.text
            context = tuple(turns[-1].context)
            roles = tuple(segment.role for segment in context)
            yield HeldOut(task.name, example.id, context, roles, wrote)


@dataclass
class Samples:
    """Continues held-out conversations with the weights of a Loop."""

    loop: Loop
    conversations: Sequence[HeldOut]
    sampler: Sampler

    @classmethod
    def of(cls, loop: Loop, material: TrainingData) -> Samples | None:
        """The samples of a run; None without held-out conversations or measurements."""
        config = loop.config
        unset = 0 if ranks().sharded else SHOWN  # a split model does not generate text
        count = unset if config.show_samples is None else config.show_samples
        conversations = held_out_conversations(material, count) if config.eval_every else []
        if not conversations:
            return None
        sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
        return cls(loop, conversations, sampler)

    async def after(self, step: int) -> None:
        """Continue the conversations after `step`, if that is due."""
        every = self.loop.config.eval_every
        if not every or (step + 1) % every:
            return
        self.loop.reporter.phase("samples")
        await self.sampler.take(self.loop.policy)
        records = await asyncio.gather(*(self._continue(one, step) for one in self.conversations))
        writer = RecordWriter(self.loop.run.path / SAMPLES)
        writer.write(*records)
        writer.close()
        for record in records if self.loop.config.show_samples else ():
            self.loop.reporter.note(sample_line(record))

    async def _continue(self, one: HeldOut, step: int) -> Record:
        config = self.loop.config
        sampling = Sampling(
            temperature=0.0, max_tokens=config.max_tokens or REPLY_TOKENS, seed=config.seed,
            thinking=config.thinking,
        )  # fmt: skip
        text, failure, usage = "", None, Usage()
        try:
            call = Call(role="actor", example_id=one.key, step=step, purpose=SAMPLED)
            reply = await self.sampler.complete(one.context, sampling, call)
            text, usage = reply.text, reply.usage
        except CallError as error:
            failure = Failure(error.reason, error.detail)
        except ModelLoadError as error:  # the chat template refuses these messages
            failure = Failure("provider_error", error.what)
        episode = Episode(
            example_id=one.key, task=one.source, step=step, failure=failure, usage=usage,
            transcript=() if failure else (Line("model", text),),
        )  # fmt: skip
        reason = failure.reason if failure else SAMPLED
        return Record(
            key=f"{step}/{one.key}/0/draft", task=one.source, example_id=one.key, rollout=0,
            kind="draft", episode=episode, step=step, gold=one.wrote, cluster=one.person,
            score=Score(value=None, reward=None, status="unscored", reason=reason),
            prompt="\n".join(
                f"{who}: {part.text}" for who, part in zip(one.speakers, one.context, strict=True)
            ),
        )  # fmt: skip


def sample_line(record: Record) -> str:
    """A line such as `sample after step 20, chats.jsonl:3: model “…”; person “…”`."""
    said = " / ".join(line.text for line in record.episode.transcript) or "(nothing)"
    shown, wrote = (one_line(text, LINE_SIGNS) for text in (said, record.gold or "(nothing)"))
    who = "person" if record.score.reason == SAMPLED else "gold"
    where = f"sample after step {record.step + 1}, {one_line(record.example_id)}"
    return f"{where}: model “{shown}”; {who} “{wrote}”"
