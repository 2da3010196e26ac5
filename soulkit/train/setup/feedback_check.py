"""Before a run: can the feedback that its method learns from exist at all?

Nothing is asked and nothing is sampled. Scripted drafts of every task are taken as far as rules go:
is feedback wanted on any of them, does the task's own coach say something about one that gives
nothing away, and does an actor who plays with feedback see any? One draft that passes is enough,
and one that cannot be tried counts as one that may pass; what only a model can tell is left to the
run (`rollouts/feedback.py`). Whatever a task's code breaks on is skipped: the run meets it itself.

Example: the feedback of a task is a worked example, answer included. A run that does not ask for
such feedback has none, whichever coach it names.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from soulkit.errors import ConfigError, UserError
from soulkit.models.base import Cast, Player
from soulkit.models.stand_ins import AnsweringModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job, record_of
from soulkit.runs.coroutines import run_coroutine
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.rewards import fixed_examples
from soulkit.tasks.kit.selfcheck import GoldLines, scripted_play, silent_cast
from soulkit.tasks.kit.user_code import checked_episode
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective, method_class
from soulkit.train.rollouts.feedback import feedback_policy, slot_is_filled
from soulkit.train.setup.rows import TaskRows
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Feedback,
    Line,
    Sampling,
    Score,
    Segment,
    Trace,
    Turn,
)


async def scripted_drafts(task: Task, example: Example) -> list[tuple[Episode, Score]]:
    """A wrong, a perfect and an empty episode with their scores, as far as the task has them. What
    only a judge could score is taken with the lowest and the highest score that there are."""
    pairs: list[tuple[Episode, Score]] = []
    for script, perfect in ((task.wrong, False), (task.gold, True), (_mute(task), False)):
        episode, score, _ = await scripted_play(task, example, script, perfect=perfect)
        if episode is not None:
            pairs += [(episode, one) for one in _scores(task, score, perfect)]
    return pairs


def _scores(task: Task, score: Score | None, perfect: bool) -> Sequence[Score]:
    value = None if score is None else score.value
    if score is None or value is None or (value >= task.spec.metric.high and not perfect):
        return extreme_scores(task)
    return [score]


def extreme_scores(task: Task) -> tuple[Score, Score]:
    """The lowest and the highest score of a task, made up."""
    low, high = task.spec.metric.low, task.spec.metric.high
    worst = Score(value=low, reward=low, protocol=task.protocol)
    return worst, replace(worst, value=high, reward=high)


def _mute(task: Task) -> Callable[[Example], Episode]:

    def script(example: Example) -> Episode:
        contexts, silence = task.previews(example), Completion(text="")
        return Episode(
            example_id=example.id, task=task.name,
            traces=tuple(Trace(seat, (Turn(c, silence),)) for seat, c in contexts.items()),
            transcript=tuple(Line(seat, "") for seat in contexts),
        )  # fmt: skip

    return script


async def gold_turns(
    task: Task, example: Example, feedback: Feedback | None
) -> list[tuple[str, tuple[Segment, ...]]]:
    """(seat, context) of every turn of the actor, who speaks the gold; empty where it cannot be
    played so."""
    rollout = Rollout(kind="refined" if feedback else "draft", feedback=feedback)
    try:
        actor, other = Player(_reciter(task.gold(example))), Player(_reciter(None))
        cast = Cast(actor=actor, partner=other, environment=other, judges=(other,), coach=other)
        episode = await task.play(example, cast, rollout)
        episode = checked_episode(task, episode)
    except UserError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - the run meets it with real replies, or not
        return []
    return [(trace.seat, turn.context) for trace in episode.traces for turn in trace.turns]


def _reciter(gold: Episode | None) -> AnsweringModel:
    """Says the lines of `gold`, a turn each, and agrees when there are none left."""
    lines = GoldLines(gold)

    def answer(call: Call, sampling: Sampling) -> str:
        line = lines.line(call)
        return "Yes." if line is None else line

    return AnsweringModel("none", answer)


ROWS = 500
"""Rows of a task that are tried at most; the first one that passes ends the search."""
TRIAL = Feedback(text="Take another look.", author="symbolic")


class NoFeedback(ConfigError):
    """A method that learns from feedback was asked for where there can be none."""


@dataclass(frozen=True, slots=True)
class NoFeedbackReason:
    """Why a task can have no feedback in a run, and what would help."""

    why: str
    way: str


def refuse_without_feedback(
    config: TrainConfig, objective: Objective | None, pool: TaskRows
) -> None:
    """NoFeedback, naming method, tasks and coach, where feedback can never be used. Of a mixture
    some tasks may be without a coach, but not all of them."""
    if objective is None:
        _refuse_empty_lessons(config, pool)
        return
    _refuse_weightless(config, objective, pool)
    rows = _by_task(pool) if objective.uses_feedback else []
    obstacles = {
        task.name: obstacle
        for task, examples in rows
        if (obstacle := no_feedback_reason(config, objective, task, examples)) is not None
    }
    mixed = len(obstacles) < len(rows)
    if mixed:
        obstacles = {name: one for name, one in obstacles.items() if not _uncoached(config, name)}
    if obstacles:
        raise _no_feedback(config, obstacles, mixed=mixed)


def _by_task(pool: TaskRows) -> list[tuple[Task, list[Example]]]:
    rows: dict[str, tuple[Task, dict[str, Example]]] = {}
    for task, example in pool:
        rows.setdefault(task.name, (task, {}))[1][example.id] = example
    return [(task, list(examples.values())) for task, examples in rows.values()]


def no_feedback_reason(
    config: TrainConfig, objective: Objective, task: Task, examples: Sequence[Example]
) -> NoFeedbackReason | None:
    """What keeps feedback from one task; None when nothing certain does."""
    if _uncoached(config, task.name):
        return NoFeedbackReason(
            "nobody comments on its drafts (coach none)",
            "name a coach: --coach symbolic, or --coach endpoint:MODEL@URL",
        )
    if _unasked_for(config, task):
        return NoFeedbackReason(
            "its feedback is a worked example, answer included, and none was asked for",
            "ask for worked examples with --set worked_examples=true",
        )
    if config.shuffle_feedback and min(len(examples), config.prompts_per_step) < 2:
        return NoFeedbackReason(
            "feedback is to come from another example, and a step has a single one",
            "use more rows and more --prompts, or leave out --shuffle-feedback",
        )
    return run_coroutine(_tried(config, objective, task, fixed_examples(examples, ROWS)))


def _uncoached(config: TrainConfig, task: str) -> bool:
    return bool(config.named("coach", task) == "none")


def _unasked_for(config: TrainConfig, task: Task) -> bool:
    return task.spec.feedback.kind == "worked_example" and not config.worked_examples


async def _tried(
    config: TrainConfig, objective: Objective, task: Task, examples: Sequence[Example]
) -> NoFeedbackReason | None:
    policy = feedback_policy(config, task=task.name)
    if policy.when == "task" and type(task).gate is not Task.gate:
        policy = replace(policy, when="all")  # its own gate may read what only real scores hold
    gate = FeedbackGate(policy, task, config.steps)
    if gate.opens_at(extreme_scores(task)[0]) is None:
        return NoFeedbackReason(
            f"its gate (--feedback-for {policy.when}) is closed to every draft",
            "ask for feedback on every draft with --feedback-for all",
        )
    asks_a_model = bool(config.cast_as("coach", task.name))
    silence = None if asks_a_model else await _nothing_said(gate, examples)
    return silence or await _nothing_seen(objective, task, examples)


@dataclass(frozen=True, slots=True)
class FeedbackGate:
    """Which drafts of a task a run of so many steps asks feedback for."""

    policy: FeedbackPolicy
    task: Task
    steps: int

    def opens_at(self, score: Score) -> int | None:
        """The first step at which a draft of this score is to have feedback; None: at none."""
        steps = (step for step in range(self.steps) if self.policy.wants(self.task, score, step))
        return next(steps, None)


# --- is anything said that may be shown? ----------------------------------------------------------


async def _nothing_said(gate: FeedbackGate, examples: Sequence[Example]) -> NoFeedbackReason | None:
    """The obstacle when the task's rules say nothing that an actor may see about any draft."""
    engine = Engine(replace(silent_cast(), coach=None), feedback=gate.policy)
    ends: Counter[str] = Counter()
    for example in examples:
        for episode, score in await scripted_drafts(gate.task, example):
            step = gate.opens_at(score)
            if step is not None:
                ends[await _end(engine, Job(gate.task, example, 0, step), episode, score)] += 1
        if "" in ends:
            return None
    parts = {
        "leaks": "its advice gives the answer away on {n} of {of} drafts that were tried",
        "silent": "its rules say nothing about {n} of {of} drafts that were tried",
    }
    whys = [part.format(n=ends[end], of=ends.total()) for end, part in parts.items() if ends[end]]
    if not whys:  # the task has no draft that could be tried
        return None
    return NoFeedbackReason(
        ", ".join(whys),
        "name another coach, for example --coach endpoint:MODEL@URL, or let the task's explain() "
        "say something that gives nothing away",
    )


async def _end(engine: Engine, job: Job, episode: Episode, score: Score) -> str:
    """`leaks` or `silent` for a draft that gets nothing; empty when it may get feedback."""
    try:
        record = record_of(job, job.rollout(engine.seed), episode, score)
        record = await engine.critique(job, record)
    except (Exception, SystemExit):  # noqa: BLE001 - the run meets it with real drafts, or not
        return ""
    if record.received is None:
        return "" if "coach_failure" in record.episode.notes else "silent"
    return "" if record.received.usable else "leaks"


# --- does anybody see it? -------------------------------------------------------------------------


async def _nothing_seen(
    objective: Objective, task: Task, examples: Sequence[Example]
) -> NoFeedbackReason | None:
    """The obstacle when no prompt of any row has a slot that feedback fills."""
    for example in examples:
        turns = await gold_turns(task, example, TRIAL if objective.refines else None)
        if not turns or any(_shows(objective, task, example, *turn) for turn in turns):
            return None
    return NoFeedbackReason(
        "its prompts have no feedback slot: with feedback and without they are the same, or "
        "nothing marks where it stands",
        "put {{ feedback }} into the actor's template, and give the message that holds it a "
        "'bare' text without",
    )


def _shows(
    objective: Objective, task: Task, example: Example, seat: str, context: Sequence[Segment]
) -> bool:
    """Whether feedback reaches this turn: it did, or a teacher's reading of it would."""
    if objective.refines:
        return slot_is_filled(context)
    slot = task.slot(example, seat, TRIAL)
    return slot_is_filled([slot]) and any(s.bare == slot.bare for s in context)


# --- what is told ---------------------------------------------------------------------------------


def _no_feedback(
    config: TrainConfig, obstacles: Mapping[str, NoFeedbackReason], mixed: bool
) -> NoFeedback:
    players = {name: config.cast_as("coach", name) for name in obstacles}
    coach = " and ".join(dict.fromkeys(
        who[0].written() if who else config.named("coach", name) or "symbolic"
        for name, who in players.items()
    ))  # fmt: skip
    whys = "; ".join(f"task '{name}': {one.why}" for name, one in obstacles.items())
    ways = list(dict.fromkeys(one.way for one in obstacles.values()))
    ways += [f"leave {', '.join(obstacles)} out of --task"] if mixed else []
    text = "; ".join([*ways, "or train on rewards alone, with soul train grpo"])
    return NoFeedback(
        f"'{config.method}' learns from feedback, and the coach '{coach}' can give none that may "
        f"be used: {whys}.",
        "Without feedback it would be another method under this name.",
        f"{text[0].upper()}{text[1:]}.",
    )


def _refuse_weightless(config: TrainConfig, objective: Objective, pool: TaskRows) -> None:
    """Settings under which the part that learns from feedback, or a teacher, is always 0."""
    # The one outcome that is left has probability 1 for both: nothing differs.
    alone = config.divergence_top_k == 1 and config.divergence_tail == "renorm"
    if alone and objective.logits:
        raise NoFeedback(
            f"'{config.method}' compares distributions, and divergence_top_k is 1.",
            "A single token has probability 1 for both, so nothing is learned from the teacher.",
            "Leave out divergence_top_k, or add --set divergence_tail=bucket.",
        )
    # Rewards of the reference are not on the scale of the metric.
    paper = config.protocol == "paper"
    highs = {task.name: task.spec.metric.high for task, _ in pool} if paper else {}
    if lines := method_class(config.method).futile(config, highs):
        raise NoFeedback(*lines)


def zero_weight_remark(config: TrainConfig) -> str:
    """What a weight of 0, an ablation, makes of the method, in a sentence; empty without one."""
    return method_class(config.method).remark(config)


# --- lessons --------------------------------------------------------------------------------------


def lesson_feedback(
    task: Task, example: Example, config: TrainConfig, rng: random.Random
) -> Feedback | None:
    """Feedback for a lesson, on a made-up draft (or on none, when the coach is terse)."""
    if _unasked_for(config, task) or _uncoached(config, task.name):
        return None
    plain = config.named("coach", task.name) == "terse"
    text = task.explain(example, None, None) if plain else task.rehearse(example, rng)
    return task.symbolic(text) if text else None


def _refuse_empty_lessons(config: TrainConfig, pool: TaskRows) -> None:
    if not config.sft_feedback and not config.sft_feedback_always:
        return
    rng = random.Random(config.seed)
    if any(lesson_feedback(task, example, config, rng) is not None for task, example in pool):
        return
    raise NoFeedback(
        f"Lessons with feedback were asked for, and {', '.join(config.tasks)} can give none.",
        "Every prompt would be without, as if nothing had been asked for.",
        "Leave out --feedback and sft_feedback_always; where a task's feedback is a worked "
        "example, add --set worked_examples=true.",
    )
