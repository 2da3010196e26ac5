"""Ask every player one real question before a long run.

    a task's first row ──play, one turn per speaker──▶ replies of actor, partner, environment
    its perfect answer ──judged──▶ verdicts of judges and auditors, parsed as in any run
                       ──critique──▶ replies of the coach and the blind reader

All prompts, parsers and scores come from the task. A player used in several tasks is asked in the
first of them. Replies are not stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from soulkit.doctor.checks import PlayerCheck
from soulkit.doctor.needs import TrialPart
from soulkit.doctor.players import (
    SPOKEN,
    AbsentModel,
    EnoughHeard,
    LoadedModels,
    PlayerReport,
    ReportedModel,
    ReportedPlayers,
    TrialPlayers,
    quick,
    single_opinion,
)
from soulkit.errors import CallError, UserError
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import voice_of
from soulkit.judge.leaks import read_blind
from soulkit.judge.panel import judge_names
from soulkit.models.base import Cast, ChatModel, Player
from soulkit.models.players.players import cast_of
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.play.plan import (
    Load,
    Plan,
    PlayerTerms,
    Work,
    confirm_cost,
    is_paid,
    plan_loads,
    prices_of,
)
from soulkit.play.settings import PlayConfig
from soulkit.reporting import SILENT, Reporter
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.user_code import task_code
from soulkit.text import one_line
from soulkit.types import Episode, Example, Feedback, Sampling, Score

AFTERWARDS = ("coach", "blind_reader")
"""Roles that are asked about a draft when feedback is requested."""
NONSENSE = "I would rather not say."
"""Reply that is judged if a task has neither a scripted right nor a scripted wrong one."""
MADE_LATER = "it is created when training begins"
UNREADABLE = "its verdict cannot be read"
SHORT = 24
"""Longer texts in a verdict count as reasons and are not shown."""
DEPTH = 4
"""Maximum nesting depth of verdict fields shown."""
REASONS = ("reasoning", "reason", "analysis", "explanation")
SeatKey = tuple[str, str]
"""(role, player as written)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTrial:
    """One task to try, and the players that are first asked in it."""

    part: TrialPart
    task: Task
    example: Example
    seats: tuple[SeatKey, ...]


# -- which player is asked in which task -----------------------------------------------------------


def task_trials(parts: Sequence[TrialPart]) -> list[TaskTrial]:
    """The tasks to try, in order. Each has at least one player that no earlier task asks."""
    trials: list[TaskTrial] = []
    placed: set[SeatKey] = set()
    for part in parts:
        for work in part.work:
            fresh = [seat for seat in seats_in(part, work) if seat not in placed]
            if fresh:
                placed |= set(fresh)
                trials.append(TaskTrial(part=part, task=work.task, example=work.examples[0],
                                        seats=tuple(fresh)))  # fmt: skip
    return trials


def seats_in(part: TrialPart, work: Work) -> list[SeatKey]:
    """(role, player) pairs that may be asked in a task."""
    config, task = part.config, work.task.name
    seats = [("actor", _actor_name(part))]
    for role, who in config.players_in(task):
        stands_in = role == "auditor" and not config.named("auditor", task)
        later = role in AFTERWARDS
        if (part.coached if later else role in work.roles) and not stands_in:
            seats.append((role, who.written()))
    return list(dict.fromkeys(seats))


def _actor_name(part: TrialPart) -> str:
    if served := part.served_actor:
        return served.written()
    kind = "vllm" if part.config.engine_choice.kind == "vllm" else "local"
    adapter = f" + {part.config.adapter}" if part.config.adapter else ""
    return f"{kind}:{part.config.model}{adapter}"


def trial_plan(trials: Sequence[TaskTrial]) -> Plan:
    """The maximum cost of the questions, as if each row were played to its end."""
    return plan_loads(
        Load([Work(trial.task, (trial.example,))], partial(_voices, trial.part)) for trial in trials
    )


def _voices(part: TrialPart, work: Work) -> list[PlayerTerms]:
    config, served = part.config, part.served_actor
    actor = PlayerTerms(
        role="actor", name=_actor_name(part), limit=config.reply_limit(work.task.spec.sampling),
        prices=prices_of(config, served, "actor") if served else None, served=served is not None,
        paid=served is not None and is_paid(config, served),
    )  # fmt: skip
    voices = [actor]
    for role, who in config.players_in(work.task.name):
        voice = replace(voice_of(config, role, who, actor), times=1, orders="seeded")
        if role not in AFTERWARDS:
            voices.append(voice)
        elif part.coached:
            voices.append(replace(voice, each=1))
    return voices


# -- asking ----------------------------------------------------------------------------------------


def ask_players(
    parts: Sequence[TrialPart], *, load: bool = False, reporter: Reporter = SILENT
) -> list[PlayerCheck]:
    """Ask every player one real question; with `load`, also load checkpoints and ask them.

    CostUnconfirmed if it costs money and the user does not agree; BudgetSpent if the budget is
    spent.
    """
    trials = task_trials(parts)
    if not trials:
        return []
    confirm_cost(trial_plan(trials), trials[0].part.config, reporter)
    table = TrialPlayers(load=load)
    for part in parts:
        here = [trial for trial in trials if trial.part is part]
        asks = load or attached(part)
        with LoadedModels(part, load, reporter) if asks and here else nullcontext() as loaded:
            for trial in here:
                roles = ", ".join(role for role, _ in trial.seats)
                reporter.note(f"asking each model one question about a {trial.task.name} row: "
                              f"{roles}")  # fmt: skip
                asyncio.run(_TaskTrying(trial, table, loaded).run())
    return [table.seat(*seat).check() for trial in trials for seat in trial.seats]


def attached(part: TrialPart) -> bool:
    """Whether the actor runs on servers that are already up, so asking it loads nothing here."""
    return part.served_actor is None and part.config.engine_choice.attached


@dataclass
class _TaskTrying:
    """Tries one task with the cast of its configuration."""

    trial: TaskTrial
    table: TrialPlayers
    loaded: LoadedModels | None = None
    """None: no local model is loaded."""
    rollout: Rollout = field(default_factory=Rollout)

    def __post_init__(self) -> None:
        self.players = self._made_players()

    async def run(self) -> None:
        for seat in self.trial.seats:
            self.table.seat(*seat).task = self.trial.task.name
        try:
            cast = single_opinion(self._cast())
            drafted = await self._play(cast)
            await self._judge(cast, drafted)
        finally:
            if self.players.actor is not None:
                await self.players.actor.close()
            await self.players.close()

    # -- players -----------------------------------------------------------------------------------

    def _made_players(self) -> ReportedPlayers:
        config = self.trial.part.config
        calls = quick({**config.call_arguments(None), "concurrency": config.concurrency})
        served = self.trial.part.served_actor
        everybody = [*([served] if served else []), *config.settings_of_players()]
        players = ReportedPlayers(
            call_arguments=calls, settings_of_all=everybody, table=self.table,
            load=self.loaded.player if self.loaded else None,
            serve=self.loaded.served if self.loaded else None,
        )  # fmt: skip
        players.actor = self._actor(players, served)
        return players

    def _actor(self, players: ReportedPlayers, served: RoleSettings | None) -> ChatModel:
        """The actor, or a scripted perfect one if it cannot be asked."""
        seat = self.table.seat("actor", _actor_name(self.trial.part))
        lines = [reply for _, reply in _scripted_turns(self.trial.task, self.trial.example)]
        try:
            if served is not None:
                return players.made("actor", served)
            if self.loaded is not None and (actor := self.loaded.actor()):
                return actor
            made_later = self.loaded is not None
            seat.away = MADE_LATER if made_later else "it must be loaded first (add --load)"
        except UserError as error:
            seat.unusable = error
        return AbsentModel(seat.who, lines)

    def _cast(self) -> Cast:
        config, task = self.trial.part.config, self.trial.task
        actor = self.players.actor
        assert actor is not None
        if not isinstance(actor, AbsentModel):
            seat = self.table.seat("actor", _actor_name(self.trial.part))
            actor = ReportedModel(actor, seat, self.table)
        sampling = _actor_sampling(config, task)
        cast = cast_of(config, self.players, Player(actor, sampling), config.seed).in_task(
            task.name
        )
        # A missing judge would make the other judges' verdicts unusable.
        judges, auditors = (
            tuple(one for one in panel if not isinstance(one.model, AbsentModel))
            for panel in (cast.judges, cast.auditors)
        )
        return replace(cast, judges=judges, auditors=auditors)

    # -- questions ---------------------------------------------------------------------------------

    async def _play(self, cast: Cast) -> Episode | None:
        """Play until every speaker has had a turn; return the episode if it ended before that."""
        task, example = self.trial.task, self.trial.example
        speakers = frozenset(role for role in SPOKEN if role in task.calls(example))
        asked_for = {role for role, _ in self.trial.seats}
        scripted = isinstance(cast.actor.model, AbsentModel)
        if not asked_for & set(SPOKEN) or (scripted and speakers <= {"actor"}):
            return None
        if empty := speakers - cast.filled():
            for seat in self._seats("actor"):
                seat.away = seat.away or f"no model plays the {' and the '.join(sorted(empty))}"
            return None
        self.table.begin(speakers - {"actor"} if scripted else speakers)
        try:
            with task_code(task, "play"):
                episode = await task.play(example, cast, self.rollout)
        except EnoughHeard:
            return None
        except CallError as error:
            self._note_break(error, SPOKEN)
            return None
        finally:
            self.table.begin(frozenset())
        return None if scripted or episode.failure is not None else episode

    async def _judge(self, cast: Cast, drafted: Episode | None) -> None:
        task, example = self.trial.task, self.trial.example
        if not any(role not in SPOKEN for role, _ in self.trial.seats):
            return
        try:
            episode = _judged_episode(task, example, drafted)
        except CallError as error:
            self._note_break(error, [role for role, _ in self.trial.seats])
            return
        readers = {role for role in PANELS if role in task.calls(example)}
        if episode is None or readers - cast.filled():
            return
        score = await task.judged(example, episode, cast)
        for panel in (cast.judges, cast.auditors):
            note_verdicts(panel, score, task.spec.metric.high)
        if self.trial.part.coached:
            await self._coach(cast, episode, score)

    async def _coach(self, cast: Cast, episode: Episode, score: Score) -> None:
        """Ask the coach for feedback, and the blind reader to answer from the feedback alone."""
        seats = [seat for role in AFTERWARDS for seat in self._seats(role) if not seat.absent]
        if not seats:
            return
        if not score.scored:
            for seat in seats:
                seat.away = "there is no score to comment on"
            return
        task = self.trial.task
        try:
            with task_code(task, "critique"):
                feedback = await task.critique(
                    self.trial.example, episode, score, cast, self.rollout
                )
        except CallError as error:
            self._note_break(error, ["coach"])
            return
        if feedback is not None:
            await self._read_blind(feedback)

    async def _read_blind(self, feedback: Feedback) -> None:
        config, example = self.trial.part.config, self.trial.example
        settings = getattr(config, "blind_reader", None)
        if settings is None or not self._seats("blind_reader"):
            return
        reader = self.players.player("blind_reader", settings, config.seed)
        try:
            with task_code(self.trial.task, "leak_view"):
                view = self.trial.task.leak_view(example)
            if view is not None and not isinstance(reader.model, AbsentModel):
                await read_blind(feedback, view, reader, [self.rollout.call("judge", example)])
        except CallError as error:
            self._note_break(error, ["blind_reader"])

    # -- recording ---------------------------------------------------------------------------------

    def _seats(self, role: str) -> list[PlayerReport]:
        return [self.table.seat(*seat) for seat in self.trial.seats if seat[0] == role]

    def _note_break(self, error: CallError, roles: Sequence[str]) -> None:
        """Record an error that no call recorded: an unusable reply or a bug in the task."""
        seats = [seat for role in roles for seat in self._seats(role) if not seat.absent]
        if any(seat.failure or seat.unread for seat in seats):
            return
        for seat in [one for one in seats if one.calls][-1:] or seats[:1]:
            seat.unread = error.detail


def note_verdicts(panel: Sequence[Player], score: Score, best: float) -> None:
    """Record the verdict read from each judge of a panel, or why none could be read."""
    for name, player in zip(judge_names(panel), panel, strict=True):
        seat = player.model.seat if isinstance(player.model, ReportedModel) else None
        if seat is None or not seat.calls:
            continue
        if seat.unread:
            own_words = score.words.startswith(f"{player.model.name}: ")
            seat.unread = f"the verdict cannot be read: {score.words}" if own_words else UNREADABLE
            continue
        fields = [(v.purpose, v.said) for v in score.verdicts if v.judge == name and v.said]
        words = ", ".join(dict.fromkeys(text for _, said in fields for text in short_verdict(said)))
        seat.verdict = f"verdict read: {one_line(words, 120)}" if words else "verdict read"
        if score.value is not None:
            seat.verdict += f"; score {score.value:.3g} of {best:g}"


def short_verdict(fields: Mapping[str, Any], depth: int = DEPTH) -> Iterator[str]:
    """The fields of a verdict without its reasons: `quality 7`, `style plain`."""
    for name, value in fields.items():
        inner = value.get("score", value) if isinstance(value, Mapping) else value
        if name in REASONS:
            continue
        if isinstance(inner, Mapping):
            yield from short_verdict(inner, depth - 1) if depth else ()
        elif isinstance(inner, list | tuple):
            yield f"{len(inner)} {name}"
        elif isinstance(inner, int | float) or (isinstance(inner, str) and len(inner) <= SHORT):
            yield f"{name} {inner}"


def _actor_sampling(config: PlayConfig, task: Task) -> Sampling:
    if isinstance(config, EvalConfig):
        return config.sampling(task.spec)
    return Sampling(max_tokens=config.reply_limit(task.spec.sampling), seed=config.seed)


def _scripted_turns(task: Task, example: Example) -> list[tuple[str, str]]:
    """(seat, reply) per turn of a scripted perfect actor; empty without a script."""
    with task_code(task, "gold"):
        episode = task.gold(example)
    traces = episode.traces if episode else ()
    return [(trace.seat, turn.completion.text) for trace in traces for turn in trace.turns]


def _judged_episode(task: Task, example: Example, drafted: Episode | None) -> Episode | None:
    """The episode for the judges: perfect answer, else the actor's reply, else a script."""
    with task_code(task, "gold"):
        return (
            task.gold(example) or drafted or task.wrong(example) or task.canary(example, NONSENSE)
        )
