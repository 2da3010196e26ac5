"""Mixed contextual self-distillation: the model writes its own training texts about facts.

A row has a question and a fact that answers it. For each token of an answer, a Bernoulli(λ) switch
chooses the *expert* conditional, with the fact in the context (`prompts/expert.md`), or the *naive*
one, without it. Supervised steps then train on these answers to the plain question. Nearly all of
their tokens are likely under the model, so little changes besides the fact.

All texts are written to RUN/written.jsonl before the first update; a resumed run writes the missing
ones, with the same random numbers. RUN/lessons/ has the texts to train on, as conversations with
exact ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.corpora.lessons import Lesson, message_json
from soulkit.data.corpora.settings import SourceSettings
from soulkit.data.corpora.stream import LessonRows, LessonStream
from soulkit.errors import ContextOverflow, DataError
from soulkit.models.local.chat_template import tokenizer_hash
from soulkit.models.local.sampler import LocalModel, expert_turns
from soulkit.reporting import Reporter
from soulkit.runs.jsonl import JsonlWriter, read_jsonl, stored_json, write_aside, write_json
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.setup.rows import Corpus, lesson_print, lessons_of
from soulkit.train.sft.steps import HELD_OUT
from soulkit.train.state.summary import WrittenTotals
from soulkit.types import Call, Sampling, Segment

WRITTEN, LESSONS, TOTALS = "written.jsonl", "lessons", "written.json"
NO_FACT, EMPTY, CUT, TOO_LONG = (
    "it has no fact", "the text is empty", "the text was cut at its limit",
    "question and fact leave no room for a text",
)  # fmt: skip


@cache
def prompts() -> PromptFolder:
    """The prompts that show the fact to the expert."""
    return PromptFolder("mixsd", Path(__file__).parents[1])


@dataclass(frozen=True)
class Prompt:
    """The contexts of one text to write."""

    source: int
    """Index of its source in the run's list."""
    lesson: Lesson
    naive: tuple[Segment, ...]
    """The context before the learned reply."""
    expert: tuple[Segment, ...]
    key: str
    """Hash of both contexts, independent of the file and unique among the rows of a run."""
    sample: int

    @property
    def place(self) -> str:
        return f"{self.key}/{self.sample}"

    @property
    def call(self) -> Call:
        """The call that determines its random numbers."""
        return Call(role="actor", example_id=self.key, sample=self.sample, purpose="mixsd/")


def expert_context(context: Sequence[Segment], fact: str) -> tuple[Segment, ...]:
    """The conversation with the fact at the end of its system prompt."""
    words = prompts().render("expert", fact=fact)
    if context and context[0].role == "system":
        first = Segment("system", f"{context[0].text}\n\n{words}")
        return (first, *context[1:])
    return (Segment("system", words), *context)


def prompts_of(placed: Iterable[tuple[int, Lesson]], samples: int) -> list[Prompt]:
    """`samples` prompts for each (source, lesson), to replace the lesson's last learned reply.

    Rows with equal questions and facts are distinguished by their order.
    """
    made: list[Prompt] = []
    seen: Counter[str] = Counter()
    for source, lesson in placed:
        last = max(i for i, learned in enumerate(lesson.trained) if learned)
        naive = lesson.segments[:last]
        expert = expert_context(naive, lesson.fact)
        plain = [[(s.role, s.text, s.token_ids) for s in one] for one in (naive, expert)]
        key = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
        seen[key] += 1
        name = key if seen[key] == 1 else f"{key}#{seen[key]}"
        made += [Prompt(source, lesson, naive, expert, name, sample) for sample in range(samples)]
    return made


def read_written(run: Path) -> WrittenTotals | None:
    """Counts of the texts that a run wrote; None for a run without mixsd."""
    try:
        return WrittenTotals.from_json(stored_json(run / TOTALS))
    except FileNotFoundError:
        return None


def check_facts(config: TrainConfig, corpus: Corpus) -> None:
    """DataError for `mixsd` if none of the first lessons has a fact."""
    if config.objective != "mixsd":
        return
    sample = [lesson for several in corpus.samples.values() for lesson in several]
    if not any(lesson.fact for lesson in sample):
        raise _nothing_written(Counter({NO_FACT: len(sample)}))


async def with_written(
    config: TrainConfig, run: Path, policy: Policy, corpus: Corpus,
    reporter: Reporter,
) -> Corpus:  # fmt: skip
    """`corpus` with texts written by the policy instead of the rows' own replies. Call it before
    the first update and before a checkpoint is loaded. Finished texts are reused."""
    texts = [lesson_file(run, place) for place in range(len(config.corpora))]
    if not (run / TOTALS).exists():
        sampler = policy.sampler(config.batch_size)
        writer = Writer(config, sampler, tokenizer_hash(policy.tokenizer), reporter,
                        corpus.held_out)  # fmt: skip
        try:
            written = await writer.write([lessons_of(one, config) for one in config.corpora], run)
        finally:
            await sampler.close()
        reporter.note(f"texts written, which replace the rows' own answers: {written.words()}")
    sources = [
        SourceSettings(path=str(text), ratio=source.ratio, side="assistant", name=source.name)
        for text, source in zip(texts, config.corpora, strict=True)
        if text.exists()
    ]
    stream = LessonStream.open(sources, seed=config.seed, window=config.window)
    return replace(corpus, stream=stream)


@dataclass
class Writer:
    """Writes the texts of one run."""

    config: TrainConfig
    sampler: LocalModel
    tokenizer: str
    """Hash of the sampler's tokenizer, recorded with token ids."""
    reporter: Reporter
    """Shows progress."""
    held_out: Collection[str] = ()
    """`lesson_print` of validation conversations, which are skipped."""

    async def write(self, sources: Sequence[LessonRows], run: Path) -> WrittenTotals:
        """Write the missing texts of RUN/written.jsonl, then RUN/lessons/, one file per source.

        Rows that are not lessons or have no fact are counted and skipped; DataError if none is
        left. A source without usable texts has no file.
        """
        placed = [(place, one) for place, several in enumerate(sources) for one in several]
        facts = [pair for pair in placed if pair[1].fact]
        used = [pair for pair in facts if lesson_print(pair[1]) not in self.held_out]
        made = prompts_of(used, self.config.mix_samples)
        left_out = Counter({NO_FACT: len(placed) - len(facts), HELD_OUT: len(facts) - len(used)})
        for rows in sources:
            left_out.update(rows.unusable)
        records = await self._records(made, run / WRITTEN)
        left_out.update(record["left_out"] for record in records if "left_out" in record)
        texts = [record for record in records if "left_out" not in record]
        if not texts:
            raise _nothing_written(left_out)
        learned: dict[int, list[dict[str, Any]]] = {}
        for prompt, record in zip(made, records, strict=True):
            if "left_out" not in record:
                learned.setdefault(prompt.source, []).append(_learned_row(prompt, record))
        for place, of_source in learned.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in of_source)
            write_aside(lesson_file(run, place), text.encode("utf-8", "surrogatepass"))
        totals = WrittenTotals(
            facts=len(made) // self.config.mix_samples, texts=len(texts),
            tokens=sum(len(record["token_ids"]) for record in texts),
            tokens_by_expert=sum(record["expert_tokens"] for record in texts),
            left_out={reason: n for reason, n in sorted(left_out.items()) if n},
        )  # fmt: skip
        write_json(run / TOTALS, {**totals.to_json(), "prompts": prompts().hashes("expert")})
        return totals

    async def _records(self, made: Sequence[Prompt], path: Path) -> list[dict[str, Any]]:
        """One record per prompt, in order; batches do not depend on what is already on disk."""
        on_disk = {record["place"]: record for record in read_jsonl(path)}
        start, before = time.monotonic(), sum(p.place in on_disk for p in made)
        done = before
        with JsonlWriter(path) as lines:
            size = self.sampler.batch_size
            for batch in (made[start : start + size] for start in range(0, len(made), size)):
                lost = [p for p in batch if p.place not in on_disk]
                if not lost:
                    continue
                written = await asyncio.gather(*(self._text(prompt) for prompt in batch))
                records = {record["place"]: record for record in written}
                lines.write_all(records[p.place] for p in lost)
                on_disk.update((p.place, records[p.place]) for p in lost)
                done += len(lost)
                self.reporter.phase(_progress(done, before, len(made), time.monotonic() - start))
        return [on_disk[p.place] for p in made]

    async def _text(self, prompt: Prompt) -> dict[str, Any]:
        config = self.config
        sampling = Sampling(
            temperature=config.temperature, max_tokens=config.mix_tokens, seed=config.seed,
            thinking=config.thinking,
        )  # fmt: skip
        record = {"place": prompt.place, "row": prompt.lesson.key, "source": prompt.lesson.source}
        try:
            reply = await self.sampler.complete_mixed(
                prompt.naive, prompt.expert, config.mix_lambda, sampling, prompt.call
            )
        except ContextOverflow as error:
            return {**record, "left_out": TOO_LONG, "detail": str(error)}
        n = len(reply.token_ids)
        turns = expert_turns(config.seed, prompt.call, config.mix_lambda, n)
        left_out = CUT if reply.stop_reason == "length" else "" if reply.text.strip() else EMPTY
        return {
            **record,
            "text": reply.text,
            "token_ids": list(reply.token_ids),
            "tokenizer": self.tokenizer,
            "expert_tokens": int(turns.sum()),
            "expert_share": round(float(turns.mean()), 4) if n else 0.0,
            **({"left_out": left_out} if left_out else {}),
        }


def _learned_row(prompt: Prompt, record: Mapping[str, Any]) -> dict[str, Any]:
    """The text as a conversation in which only it is trained."""
    context = [message_json(segment, trained=False) for segment in prompt.naive]
    reply = {
        "role": "assistant", "content": record["text"], "token_ids": record["token_ids"]
    }  # fmt: skip
    return {
        "messages": [*context, reply],
        "data_source": prompt.lesson.source,
        "tokenizer": record["tokenizer"],
        "place": prompt.place,
    }


def lesson_file(run: Path, source: int) -> Path:
    """File of the texts to train on for the source with this index."""
    return run / LESSONS / f"source{source}.jsonl"


def _progress(done: int, before: int, total: int, seconds: float) -> str:
    left = seconds * (total - done) / max(done - before, 1)
    words = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
    return f"writing texts: {done} of {total}, about {words} left"


def _nothing_written(left_out: Counter[str]) -> DataError:
    reasons = "; ".join(f"{why} ({n} times)" for why, n in (+left_out).most_common(3))
    return DataError(
        "The model wrote no text that can be used for training.",
        f"Reasons: {reasons or 'there are no rows'}.",
        "Give each row a field 'fact' next to its messages; for truncated texts raise "
        "--set mix_tokens=N, or use a model that ends its replies.",
    )
