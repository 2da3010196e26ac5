"""What the model says where people went on: some held-out conversations, continued on the way.

Every `eval_every` steps the weights continue the same few conversations greedily, each up to the
last words that would be learned. The reply is kept beside what the person wrote, in
`samples.jsonl`, which has the form of `episodes.jsonl`: `soul show` and the page read it. Nothing
of it is scored, and no weight depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import CallError, ModelLoadError
from soulkit.models.base import Sampler
from soulkit.runs.records import SAMPLED, SAMPLES, RecordWriter
from soulkit.text import one_line
from soulkit.train.setup.rows import TaskRows, TrainingData
from soulkit.train.state.loop import Loop
from soulkit.types import Call, Episode, Failure, Line, Record, Sampling, Score, Segment, Usage

SHOWN = 4
"""Conversations that are continued unless another number is asked for."""
REPLY_TOKENS = 160
"""Of a continuation at most, unless --max-tokens says another number."""
LINE_SIGNS = 160
"""Of each text on a printed line."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A conversation up to the words that a person wrote next."""

    source: str
    key: str
    context: tuple[Segment, ...]
    speakers: tuple[str, ...]
    """Who says each segment of it."""
    wrote: str


def held_out_conversations(material: TrainingData, count: int) -> list[HeldOut]:
    """The first `count` conversations that nothing is learned from, of every source in turn."""
    if material.corpus is None:
        return list(islice(_of_rows(material.dev), count))
    by_source = [[_of_lesson(one) for one in some] for some in material.corpus.validation.values()]
    in_turn = (one for row in zip_longest(*by_source) for one in row if one is not None)
    return list(islice(in_turn, count))


def _of_lesson(lesson: Lesson) -> HeldOut:
    last = max(place for place, learned in enumerate(lesson.trained) if learned)
    context, wrote = lesson.segments[:last], lesson.segments[last].text
    speakers = tuple(lesson.speaker(segment) for segment in context)
    return HeldOut(lesson.source, lesson.key, tuple(context), speakers, wrote)


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
        """None where nothing is held out, or nothing is measured on the way."""
        config = loop.config
        count = SHOWN if config.show_samples is None else config.show_samples
        conversations = held_out_conversations(material, count) if config.eval_every else []
        if not conversations:
            return None
        sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
        return cls(loop, conversations, sampler)

    async def after(self, step: int) -> None:
        """Continue them after `step`, where its turn is."""
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
            kind="draft", episode=episode, step=step, gold=one.wrote,
            score=Score(value=None, reward=None, status="unscored", reason=reason),
            prompt="\n".join(
                f"{who}: {part.text}" for who, part in zip(one.speakers, one.context, strict=True)
            ),
        )  # fmt: skip


def sample_line(record: Record) -> str:
    """`sample after step 20, chats.jsonl:3: model “…”; person “…”`, of a record with its gold."""
    said = " / ".join(line.text for line in record.episode.transcript) or "(nothing)"
    shown, wrote = (one_line(text, LINE_SIGNS) for text in (said, record.gold or "(nothing)"))
    who = "person" if record.score.reason == SAMPLED else "gold"
    where = f"sample after step {record.step + 1}, {one_line(record.example_id)}"
    return f"{where}: model “{shown}”; {who} “{wrote}”"
