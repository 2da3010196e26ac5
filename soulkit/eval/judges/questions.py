"""Ask judges about recorded episodes: score an episode again, or prefer one of two drafts.

Every judgement calls the task's own `score` with one judge and one opinion, so it measures the same
judging that runs use. An unreadable verdict is a result here, not a failure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soulkit.data.rows import HUMAN
from soulkit.errors import CallError, ConfigError, ContextOverflow, ProviderError, SoulError
from soulkit.judge.pairwise import judge_pair
from soulkit.judge.reliability import Grade, Judgement, PairJudgement, Subject, grades_in
from soulkit.judge.verdict import fence, utterances
from soulkit.models.base import Cast, ChatModel, Panel, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.stand_ins import ObservedModel, UnavailableModel
from soulkit.tasks.kit.base import Task
from soulkit.text import one_line
from soulkit.types import Call, Completion, Episode, Example, Record, Sampling, Score, Segment


def no_judge_asked(tasks: Collection[str], remark: str, way_out: str = "") -> ConfigError:
    """The error for judging a run whose tasks are all scored by rules. `remark` gives the
    consequence, and `way_out` an alternative fix."""
    return ConfigError(
        "No task of this run asks a judge.",
        f"Its tasks ({', '.join(sorted(tasks)) or 'none'}) are scored by rules, {remark}.",
        "Give the run of a judged task. soul tasks show TASK shows whether a task has a judge."
        f"{way_out}",
    )


class ActorWasAsked(SoulError):
    """A task called its actor while a recorded episode was being scored."""


class CountedJudge(ObservedModel):
    """A judge's model that adds the opinion number to its calls and counts them.

    The number is part of the ledger key and the seed, so a repeated question is asked anew.
    """

    def __init__(self, model: ChatModel, sample: int = 0) -> None:
        super().__init__(model)
        self.sample, self.questions, self.again = sample, 0, 0
        self.failed = False
        """Whether the model itself failed, so there is no reply to read."""

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        repeated = any(segment.role == "assistant" for segment in context)
        self.again += repeated
        self.questions += not repeated
        try:
            return await self.model.complete(
                context, sampling, replace(call, sample=call.sample + self.sample)
            )
        except (ProviderError, ContextOverflow):
            self.failed = True
            raise

    async def close(self) -> None:
        """Do nothing: the check's players own the model."""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A recorded episode with its task and row."""

    task: Task
    example: Example
    record: Record

    @property
    def key(self) -> str:
        return f"{self.record.task}/{self.record.key}"

    @property
    def episode(self) -> Episode:
        return replace(self.record.episode, step=self.record.step)

    @property
    def spoken(self) -> str:
        """The lines of the actor's seats."""
        return "\n".join(utterances(self.episode))

    def subject(self) -> Subject:
        turns = sum(len(trace.turns) for trace in self.episode.traces)
        people = human_labels(self.task, self.example)
        return Subject(words=len(self.spoken.split()), turns=turns, people=people)


def human_labels(task: Task, example: Example) -> dict[str, Grade]:
    """Dimension → human label, from the row's gold-only `human_<dimension>` columns.

    The task option `human_labels: {dimension: column}` can name other columns.
    """
    named: Mapping[str, str] = task.spec.options.get("human_labels", {})
    usual = {
        column.removeprefix(HUMAN): column
        for column in example.visible("gold")
        if column.startswith(HUMAN)
    }
    values = {dim: example.fields.get(column) for dim, column in {**usual, **named}.items()}
    return {dim: _label(value) for dim, value in values.items() if value is not None}


def _label(value: Any) -> Grade:
    if isinstance(value, bool):
        return str(value).lower()
    return float(value) if isinstance(value, int | float) else str(value)


def _judging_cast(judge: Player, listener: CountedJudge, ledger: Ledger | None = None) -> Cast:
    return Cast(
        actor=Player(
            UnavailableModel(
                "nobody",
                lambda call: ActorWasAsked(
                    f"the actor was asked while example {call.example_id} was being judged"
                ),
            )
        ),
        judges=(replace(judge, model=listener),),
        panel=Panel(samples=1, orders="both"),
        ledger=ledger,
    )


# -- one judgement -------------------------------------------------------------------------------


async def ask_judge(
    seen: RecordedEpisode, name: str, judge: Player, sample: int, ledger: Ledger | None = None
) -> Judgement:
    """The `sample`-th opinion of `judge`, called `name` in the report, on an episode.

    Services that the task calls itself are asked through `ledger`. If the task scores the episode
    without the judge, the judgement is empty.
    """
    listener, problem = CountedJudge(judge.model, sample), ""
    try:
        score = await seen.task.score(
            seen.example, seen.episode, _judging_cast(judge, listener, ledger)
        )
        problem = _missing(score)
    except CallError as error:
        problem = error.detail
    return Judgement(
        key=seen.key,
        cluster=seen.example.cluster,
        judge=name,
        sample=sample,
        said={} if problem or not listener.questions else grades_in(score),
        problem=problem,
        answered=not listener.failed,
        asked=listener.questions,
        again=listener.again,
    )


def _missing(score: Score) -> str:
    return "" if score.scored else score.words or score.reason or "no score, and no reason given"


# -- one pair ------------------------------------------------------------------------------------


def pairs_of(seen: Sequence[RecordedEpisode]) -> list[tuple[RecordedEpisode, RecordedEpisode]]:
    """Pairs of drafts of the same example whose actor lines differ."""
    of_example: dict[str, list[RecordedEpisode]] = {}
    for one in sorted(seen, key=lambda s: (s.example.id, s.record.rollout)):
        of_example.setdefault(f"{one.task.name}/{one.example.id}", []).append(one)
    couples = (
        pair for same in of_example.values() for pair in zip(same[::2], same[1::2], strict=False)
    )
    return [(a, b) for a, b in couples if a.spoken != b.spoken]


def pair_key(a: RecordedEpisode, b: RecordedEpisode) -> str:
    return f"{a.key}+{b.record.rollout}"


async def ask_for_preference(
    a: RecordedEpisode, b: RecordedEpisode, name: str, judge: Player
) -> tuple[PairJudgement, bool]:
    """The judge's preference between two drafts, asked in both orders, and whether the judge
    answered."""
    listener = CountedJudge(judge.model)
    result = PairJudgement(key=pair_key(a, b), cluster=a.example.cluster, judge=name)
    try:
        compared = await judge_pair(
            _judging_cast(judge, listener), a.episode, lambda first: _question(a, b, first)
        )
    except CallError as error:
        return replace(result, problem=error.detail), not listener.failed
    return replace(result, ballots=compared.ballots, flips=compared.flips), True


def _question(a: RecordedEpisode, b: RecordedEpisode, first: bool) -> str:
    """The pair rendered with the task's `pairwise.md`, or the shared one."""
    one, two = (a, b) if first else (b, a)
    seats = {trace.seat for trace in a.episode.traces}
    others = {line.seat for line in a.episode.transcript} - seats
    return a.task.prompts.render(
        "pairwise",
        title=a.task.spec.title,
        summary=a.task.spec.summary,
        seat=" and ".join(sorted(seats)) if others else "",
        setting=_setting(a),
        a=fence(_transcript(one), "answer"),
        b=fence(_transcript(two), "answer"),
    )


def _setting(seen: RecordedEpisode) -> str:
    """The row's fields that the judge may see, one per line; empty if there are none."""
    view = seen.example.visible("judge")
    shown = [name for name in view if name not in seen.task.gold_fields]
    return (
        fence("\n".join(f"{name}: {_text(view[name])}" for name in shown), "row") if shown else ""
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _transcript(seen: RecordedEpisode) -> str:
    lines = seen.episode.transcript
    if len(lines) == 1:
        return lines[0].text
    # One line each: a line break in speech could fake a line of another seat.
    return "\n".join(f"{line.seat}: {one_line(line.text)}" for line in lines)
