"""Checks before a run that its method can get feedback, without calling or sampling a model.

Scripted drafts of every task are checked with rules: is feedback requested on any of them, does the
task's symbolic coach give feedback that does not leak the answer, and does the feedback reach a
prompt? One draft that passes is enough, and a draft that cannot be checked counts as passing. The
run itself checks the rest (`rollouts/feedback.py`). Exceptions in a task's code are ignored here.

Example: a task's only feedback is a worked example, answer included. A run without
worked_examples gets no feedback from it, with any coach.
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
    COACH_FAILURE,
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
    """A wrong, a perfect and an empty episode with their scores, if the task has them. Episodes
    that need a judge are returned with the lowest and the highest score."""
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
    """The lowest and the highest possible score of a task."""
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
    """The seat and context of each turn when the actor recites the gold; empty if that fails."""
    rollout = Rollout(kind="refined" if feedback else "draft", feedback=feedback)
    try:
        actor, other = Player(_reciter(task.gold(example))), Player(_reciter(None))
        cast = Cast(actor=actor, partner=other, environment=other, judges=(other,), coach=other)
        episode = await task.play(example, cast, rollout)
        episode = checked_episode(task, episode)
    except UserError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - the run reports it if it happens with real replies
        return []
    return [(trace.seat, turn.context) for trace in episode.traces for turn in trace.turns]


def _reciter(gold: Episode | None) -> AnsweringModel:
    """Says the lines of `gold`, one per turn, and then "Yes."."""
    lines = GoldLines(gold)

    def answer(call: Call, sampling: Sampling) -> str:
        line = lines.line(call)
        return "Yes." if line is None else line

    return AnsweringModel("none", answer)


ROWS = 500
"""Maximum number of rows per task to check; the first one that passes ends the search."""
TRIAL = Feedback(text="Take another look.", author="symbolic")


class NoFeedback(ConfigError):
    """The method learns from feedback, but the run cannot produce any."""


@dataclass(frozen=True, slots=True)
class NoFeedbackReason:
    """Why a task cannot get feedback in a run, and how to fix it."""

    why: str
    way: str


def refuse_without_feedback(
    config: TrainConfig, objective: Objective | None, pool: TaskRows
) -> None:
    """NoFeedback, naming method, tasks and coach, if feedback can never be used. In a mixture, some
    but not all tasks may have no coach."""
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
    """Why one task cannot get feedback; None unless that is certain."""
    if _uncoached(config, task.name):
        return NoFeedbackReason(
            "it has no coach (coach none)",
            "set a coach with --coach symbolic or --coach endpoint:MODEL@URL",
        )
    if _unasked_for(config, task):
        return NoFeedbackReason(
            "its feedback is a worked example, answer included, and worked_examples is off",
            "allow worked examples with --set worked_examples=true",
        )
    if config.shuffle_feedback and min(len(examples), config.prompts_per_step) < 2:
        return NoFeedbackReason(
            "--shuffle-feedback needs several examples in each step, and there is only one",
            "use more rows and more --prompts, or remove --shuffle-feedback",
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
        policy = replace(policy, when="all")  # its own gate may need details of real scores
    if _first_step(policy, task, config.steps, extreme_scores(task)[0]) is None:
        return NoFeedbackReason(
            f"--feedback-for {policy.when} selects none of its drafts",
            "request feedback on every draft with --feedback-for all",
        )
    asks_a_model = bool(config.cast_as("coach", task.name)) or policy.coach == "raw"
    silence = None if asks_a_model else await _nothing_said(policy, task, config.steps, examples)
    return silence or await _nothing_seen(objective, task, examples)


def _first_step(policy: FeedbackPolicy, task: Task, steps: int, score: Score) -> int | None:
    """The first step at which a draft with this score gets feedback; None if never."""
    return next((step for step in range(steps) if policy.wants(task, score, step)), None)


# --- usable feedback ------------------------------------------------------------------------------


async def _nothing_said(
    policy: FeedbackPolicy, task: Task, steps: int, examples: Sequence[Example]
) -> NoFeedbackReason | None:
    """The reason if the task's rules give no usable feedback on any draft; else None."""
    engine = Engine(replace(silent_cast(), coach=None), feedback=policy)
    ends: Counter[str] = Counter()
    for example in examples:
        for episode, score in await scripted_drafts(task, example):
            step = _first_step(policy, task, steps, score)
            if step is not None:
                ends[await _end(engine, Job(task, example, 0, step), episode, score)] += 1
        if "" in ends:
            return None
    parts = {
        "leaks": "its feedback leaks the answer on {n} of {of} test drafts",
        "silent": "its rules give no feedback on {n} of {of} test drafts",
    }
    whys = [part.format(n=ends[end], of=ends.total()) for end, part in parts.items() if ends[end]]
    if not whys:  # the task has no test draft
        return None
    return NoFeedbackReason(
        ", ".join(whys),
        "use another coach, for example --coach endpoint:MODEL@URL, or make the task's explain() "
        "return feedback that does not leak the answer",
    )


async def _end(engine: Engine, job: Job, episode: Episode, score: Score) -> str:
    """`leaks` or `silent` for a draft without usable feedback; empty if it may get some."""
    try:
        record = record_of(job, job.rollout(engine.seed), episode, score)
        record = await engine.critique(job, record)
    except (Exception, SystemExit):  # noqa: BLE001 - the run reports it if it happens with real drafts
        return ""
    if record.received is None:
        return "" if COACH_FAILURE in record.episode.notes else "silent"
    return "" if record.received.usable else "leaks"


# --- feedback in prompts --------------------------------------------------------------------------


async def _nothing_seen(
    objective: Objective, task: Task, examples: Sequence[Example]
) -> NoFeedbackReason | None:
    """The reason if no prompt of any row has a feedback slot; else None."""
    for example in examples:
        turns = await gold_turns(task, example, TRIAL if objective.refines else None)
        if not turns or any(_shows(objective, task, example, *turn) for turn in turns):
            return None
    return NoFeedbackReason(
        "its prompts have no feedback slot: feedback does not change them, or its place is not "
        "marked",
        "put {{ feedback }} into the actor's template, and give the message that contains it a "
        "'bare' text without it",
    )


def _shows(
    objective: Objective, task: Task, example: Example, seat: str, context: Sequence[Segment]
) -> bool:
    """Whether feedback reaches this turn, in its own prompt or in the teacher's."""
    if objective.refines:
        return slot_is_filled(context)
    slot = task.slot(example, seat, TRIAL)
    return slot_is_filled([slot]) and any(s.bare == slot.bare for s in context)


# --- errors ---------------------------------------------------------------------------------------


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
    ways += [f"remove {', '.join(obstacles)} from --task"] if mixed else []
    text = "; ".join([*ways, "or train on rewards alone with soul train grpo"])
    return NoFeedback(
        f"'{config.method}' learns from feedback, and the coach '{coach}' cannot give usable "
        f"feedback: {whys}.",
        f"'{config.method}' does not work without feedback.",
        f"{text[0].upper()}{text[1:]}.",
    )


def _refuse_weightless(config: TrainConfig, objective: Objective, pool: TaskRows) -> None:
    """NoFeedback if the part of the loss that uses feedback or a teacher is always 0."""
    # With a single outcome both probabilities are 1, so the divergence is 0.
    alone = config.divergence_top_k == 1 and config.divergence_tail == "renorm"
    if alone and objective.logits:
        raise NoFeedback(
            f"'{config.method}' compares distributions, but divergence_top_k is 1.",
            "A single token has probability 1 in both, so nothing is learned from the teacher.",
            "Remove divergence_top_k, or add --set divergence_tail=bucket.",
        )
    # Under protocol reference, rewards are not on the scale of the metric.
    paper = config.protocol == "paper"
    highs = {task.name: task.spec.metric.high for task, _ in pool} if paper else {}
    if lines := method_class(config.method).futile(config, highs):
        raise NoFeedback(*lines)


def zero_weight_remark(config: TrainConfig) -> str:
    """A remark if a weight of 0 turns the method into an ablation; else empty."""
    return method_class(config.method).remark(config)


# --- lessons --------------------------------------------------------------------------------------


def lesson_feedback(
    task: Task, example: Example, config: TrainConfig, rng: random.Random
) -> Feedback | None:
    """Feedback for a lesson, on a made-up draft (or without draft if the coach is terse)."""
    coach = config.named("coach", task.name)
    # A lesson has no verdict, so its judge has no words about it.
    if _unasked_for(config, task) or coach in ("judge", "raw", "none"):
        return None
    plain = coach == "terse"
    text = task.explain(example, None, None) if plain else task.rehearse(example, rng)
    return task.symbolic(text) if text else None


def _refuse_empty_lessons(config: TrainConfig, pool: TaskRows) -> None:
    if not config.sft_feedback and not config.sft_feedback_always:
        return
    rng = random.Random(config.seed)
    if any(lesson_feedback(task, example, config, rng) is not None for task, example in pool):
        return
    raise NoFeedback(
        f"--feedback has no effect: {', '.join(config.tasks)} cannot give feedback.",
        "No prompt would contain feedback.",
        "Remove --feedback and sft_feedback_always; if a task's feedback is a worked example, add "
        "--set worked_examples=true.",
    )
