"""Re-judge recorded episodes: with an edited prompt, with another judge, or where a judge failed.

    recorded run ──▶ survey: every question whose answer no ledger holds, and what it would cost
                 ──▶ ask those ──▶ a run folder with a ledger of its own, on top of the old one

What the actor said stays as it is, and so does the old folder. The same command resumes its
folder: the new ledger holds what was paid for, so nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, RunError
from soulkit.eval.judges.questions import no_judge_asked
from soulkit.eval.planning import voice_of
from soulkit.eval.results.recorded import (
    RecordedRun,
    UnrecordedModel,
    from_ledger,
    recorded_drafts,
    regrouped,
    score_again,
    score_control_again,
)
from soulkit.eval.results.rescore import (
    CHANGES,
    PREFIX,
    PROMPTS,
    Rescored,
    copy_prompts,
    distinct_tasks,
    put_prompts,
    refuse_empty,
    refuse_lost_rows,
    refuse_unused,
    templates_in,
    write_rescored,
)
from soulkit.eval.run.provenance import (
    actor_facts,
    player_facts,
    rescored_conditions,
    write_conditions,
)
from soulkit.eval.run.run_lock import run_lock
from soulkit.models.base import Cast, ChatModel, Player, unfilled
from soulkit.models.ledger.ledger import LayeredLedger, Ledger, ReplayMiss
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve, cast_of
from soulkit.models.players.settings import PANELS, RoleSettings, TaskPlayers
from soulkit.models.stand_ins import ObservedModel
from soulkit.models.vllm.manager import check_needs, player_servers, players_needs, terms_of
from soulkit.play.engine import gather
from soulkit.play.plan import Plan, PlayerTerms, TaskPlan, question_load
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.conditions import Conditions, Panel
from soulkit.runs.folder import Run, is_run, note_start
from soulkit.runs.jsonl import read_object, write_json
from soulkit.types import Call, Completion, ControlRecord, Record, Sampling, Segment

LEDGER = "ledger.sqlite"
AskedPlayer = tuple[str, str]
"""A role and who fills it, as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejudgePlan:
    """What is to be judged again, and by whom."""

    recorded: RecordedRun
    config: RolesConfig
    """The settings of the run with the judges that are asked now."""
    prompts: Path | None
    """Edited templates; None: as they are."""
    out: Path

    @property
    def ledger(self) -> Path:
        """Where the new replies are kept."""
        return self.out / LEDGER

    @property
    def command(self) -> str:
        return f"{PREFIX}{self.recorded.command}"

    def servers(self) -> list[str]:
        """A line for each server that is asked."""
        return _judges_only(self.config).servers()


@dataclass
class Survey:
    """The questions that no ledger answers, by who would be asked."""

    words: dict[AskedPlayer, list[int]] = field(default_factory=dict)
    """Role and player → the words of each prompt that it was not asked yet."""
    episodes: set[str] = field(default_factory=set)
    """Keys of the episodes that are to be judged again."""
    controls: set[str] = field(default_factory=set)
    """Keys of the controls."""

    @property
    def questions(self) -> int:
        return sum(len(prompts) for prompts in self.words.values())


class _SurveyedModel(ObservedModel):
    """A player's model while nothing is asked: notes every question that a ledger lacks."""

    def __init__(self, model: ChatModel, seat: AskedPlayer, survey: Survey) -> None:
        super().__init__(model)
        self._seat, self._survey = seat, survey

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        try:
            return await super().complete(context, sampling, call)
        except ReplayMiss:
            words = sum(len(segment.text.split()) for segment in context)
            self._survey.words.setdefault(self._seat, []).append(words)
            raise


@dataclass
class _SurveyPlayers(Players):
    """Players of whom a survey notes what they would be asked."""

    survey: Survey = field(default_factory=Survey)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        model = super().model(role, settings)
        if role not in PANELS:
            return model
        return _SurveyedModel(model, (role, settings.written()), self.survey)


# -- what is to be done ------------------------------------------------------------------------


def rejudge_plan(
    recorded: RecordedRun, judges: Sequence[RoleSettings], prompts: Path | None, out: Path | None,
    root: Path, *, max_cost: float | None = None, yes: bool = False,
) -> RejudgePlan:  # fmt: skip
    """The plan of a command; ConfigError or RunError for what cannot be done.

    Without `out` the folder is one in `root` whose name follows from what is asked, so that the
    same command takes up the same folder. `max_cost` (US dollars) and `yes` agree to the cost.
    """
    _refuse_rules(recorded)
    config = with_judges(recorded.config, judges)
    config = config.model_copy(update={"max_cost": max_cost, "yes": yes})
    if not judging_players(config):
        raise unfilled("judge")
    refuse_lost_rows(recorded)
    if prompts is not None:
        refuse_empty(prompts)
        put_prompts(distinct_tasks(recorded.rows), prompts)
    plan = RejudgePlan(
        recorded=recorded, config=config, prompts=prompts,
        out=(out or root / _usual_name(recorded, config, prompts)).resolve(),
    )  # fmt: skip
    _check_folder(plan)
    return plan


def _refuse_rules(recorded: RecordedRun) -> None:
    """ConfigError where no episode is judged or audited: nothing would be asked."""
    played = {r.example_id for r in recorded.records}
    rows = [row for example_id, row in recorded.rows.items() if example_id in played]
    asked = {role for task, row in rows for role, count in task.calls(row).items() if count}
    if rows and asked.isdisjoint(PANELS):
        names = {task.name for task, _ in rows}
        again = " Without --ask, soul rescore RUN reads the recorded replies again by the rules."
        raise no_judge_asked(names, "so nobody would be asked, whoever is named", again)


def judging_players(config: RolesConfig) -> list[tuple[str, RoleSettings]]:
    """Everybody who judges or audits, with their role, in all tasks or in one."""
    return [(role, who) for role, who in config.players() if role in PANELS]


def with_judges(config: RolesConfig, judges: Sequence[RoleSettings]) -> RolesConfig:
    """The same settings with other judges in every task, if any are named; ConfigError for one
    that is named twice. An auditor stays where one was named for all tasks."""
    if not judges:
        return config
    named = [judge.model_dump_json() for judge in judges]
    if len(set(named)) < len(named):
        raise ConfigError(
            "The same judge is named twice.",
            "Equal judges would be one ledger entry, and agree with themselves by construction.",
            "Name it once.",
        )
    seats = {
        task: _without_roles(own, judge=(), auditor=()) for task, own in config.task_players.items()
    }  # fmt: skip
    return config.model_copy(update={"judge": tuple(judges), "task_players": seats})


def _without_roles(own: TaskPlayers, **others: Any) -> TaskPlayers:
    return own.model_copy(update=others)


def _usual_name(recorded: RecordedRun, config: RolesConfig, prompts: Path | None) -> str:
    texts = [path.read_bytes().hex() for path in templates_in(prompts)] if prompts else []
    judges = [(role, who.model_dump(mode="json")) for role, who in judging_players(config)]
    whole = json.dumps([str(recorded.path.resolve()), judges, texts], sort_keys=True)
    mark = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return f"rescore-{recorded.path.resolve().name}-{mark}"


def _check_folder(plan: RejudgePlan) -> None:
    source = str(plan.recorded.path.resolve())
    # Run.open refuses what is neither empty nor a run.
    if is_run(plan.out) and read_object(plan.out / CHANGES).get("source") != source:
        raise RunError(
            f"'{plan.out}' holds another run already.",
            f"It was not made by rescoring '{source}', and its replies belong to other episodes.",
            "Give a new or empty folder with --out.",
        )


# -- survey --------------------------------------------------------------------------------------


def survey_of(plan: RejudgePlan) -> Survey:
    """Every question that would have to be asked; no model is asked. ConfigError for an edited
    template that no question of these episodes uses."""
    survey = Survey()
    with _replay_ledger(plan) as ledger:
        asyncio.run(_collect_questions(plan, ledger, survey))
    if plan.prompts is not None:
        refuse_unused(distinct_tasks(plan.recorded.rows), plan.prompts)
    return survey


@contextmanager
def _replay_ledger(plan: RejudgePlan) -> Iterator[Ledger]:
    import tempfile

    below, above = plan.recorded.ledger, plan.ledger
    with tempfile.TemporaryDirectory() as folder:
        files = [path for path in (above, below) if path is not None and path.is_file()]
        if not files:
            files = [Path(folder) / "empty.sqlite"]
            Ledger(files[0]).close()
        with LayeredLedger(files[0], files[1] if files[1:] else None, "replay") as ledger:
            yield ledger


async def _collect_questions(plan: RejudgePlan, ledger: Ledger, survey: Survey) -> None:
    players = _SurveyPlayers(**_player_arguments(plan, ledger, UnrecordedModel), survey=survey)
    players.serve = from_ledger(ledger)
    cast = _cast(plan, players, _unrecorded_actor(plan))
    for record in plan.recorded.records:
        _, miss = await score_again(plan.recorded, record, cast)
        await asyncio.sleep(0)  # other opinions of the same question are noted as well
        if miss is not None:
            survey.episodes.add(record.key)
    for control, draft in recorded_drafts(plan.recorded):
        _, miss = await score_control_again(plan.recorded, control, draft, cast)
        await asyncio.sleep(0)
        if miss is not None:
            survey.controls.add(control.key)
    await players.close()


def survey_plan(plan: RejudgePlan, survey: Survey) -> Plan:
    """What the survey's questions come to: calls, tokens and cost, by task and judge."""
    config, tasks = plan.config, sorted({r.task for r in plan.recorded.records})
    actor = PlayerTerms(role="actor", name=str(plan.recorded.settings.get("model", "")), limit=0)
    loads = []
    for role, judge in judging_players(config):
        prompts = survey.words.get((role, judge.written()), [])
        terms = voice_of(config, role, judge, actor)
        loads += [question_load(terms, prompts)] if prompts else []
    task = TaskPlan(
        task=", ".join(tasks), examples=len(plan.recorded.rows), episodes=len(survey.episodes),
        prompt_words=sum(sum(prompts) for prompts in survey.words.values()),
        longest_prompt=max((n for prompts in survey.words.values() for n in prompts), default=0),
        asked=tuple(loads), chain=0.0,
    )  # fmt: skip
    return Plan(tasks=(task,), concurrency=config.concurrency)


# -- asking ------------------------------------------------------------------------------------


def _player_arguments(
    plan: RejudgePlan, ledger: Ledger, load: Callable[[str], ChatModel]
) -> dict[str, Any]:  # fmt: skip
    config = plan.config
    return {
        "ledger": ledger, "load": load, "settings_of_all": config.settings_of_players(),
        "call_arguments": {**config.call_arguments(ledger), "concurrency": config.concurrency},
    }  # fmt: skip


def _cast(plan: RejudgePlan, players: Players, actor: ChatModel) -> Cast:
    """The judges; the players are not needed to judge what was played."""
    players.actor = actor
    return cast_of(_judges_only(plan.config), players, Player(actor), plan.recorded.seed)


def _judges_only(config: RolesConfig) -> RolesConfig:
    fields = {name: getattr(config, name) for name in RolesConfig.model_fields}
    seats = {
        task: _without_roles(own, partner=None, environment=None, coach=None)
        for task, own in config.task_players.items()
    }
    alone = {"partner": None, "environment": None, "task_players": seats}
    return RolesConfig.model_construct(**{**fields, **alone})


def rejudge(plan: RejudgePlan, *, reporter: Reporter = SILENT) -> Rescored:
    """Ask what is missing and write the run folder, or take it up again.

    A judge that fails leaves its episode unscored; the same command asks it again. Raises RunError
    when the folder is another's, BudgetSpent when the money is.
    """
    recorded, judging, terms = (
        plan.recorded,
        _judges_only(plan.config),
        terms_of(plan.config),
    )
    serves = bool(players_needs(judging)) and survey_of(plan).questions > 0
    if serves:
        check_needs(players_needs(judging), terms)
    run = Run.open(plan.out, plan.command, _settings(plan), sealed=recorded.sealed)
    source = str(recorded.path.resolve())
    with run_lock(run):
        if not (run.path / CHANGES).is_file():
            write_json(run.path / CHANGES, {"source": source, "path": str(run.path)})
        copy_prompts(recorded.path / PROMPTS, run.path)
        if plan.prompts is not None:
            copy_prompts(plan.prompts, run.path)
        with (
            LayeredLedger(plan.ledger, recorded.ledger) as ledger,
            player_servers(judging, run.path, ledger, terms, reporter)
            if serves
            else nullcontext(from_ledger(ledger)) as serve,
        ):
            records, controls = asyncio.run(_ask(plan, run, ledger, serve, reporter))
            grouped = regrouped(recorded, records)
            return write_rescored(recorded, run, grouped, controls, paid=ledger)


def _settings(plan: RejudgePlan) -> dict[str, Any]:
    now = plan.config.identity()
    settings = {**plan.recorded.settings,
                **{name: now[name] for name in ("judge", "task_players")}}  # fmt: skip
    if "ledger_file" in settings:
        settings |= {"ledger": "record", "ledger_file": None}
    return settings


async def _ask(
    plan: RejudgePlan, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
) -> tuple[list[Record], list[ControlRecord]]:
    recorded = plan.recorded
    judges_itself = any(who.kind == "actor" for _, who in judging_players(plan.config))
    actor = recorded.actor() if judges_itself else _unrecorded_actor(plan)
    terms = _player_arguments(plan, ledger, recorded.load)
    note = partial(note_start, run.path)
    players = Players(**terms, serve=serve, note=note, reporter=reporter)
    try:
        cast = _cast(plan, players, actor)
        write_conditions(run, _conditions(plan, players))
        with reporter.progress(len(recorded.records) + len(recorded.controls)) as bar:
            return await _judged(plan, cast, bar)
    finally:
        await players.close()


async def _judged(
    plan: RejudgePlan, cast: Cast, bar: Bar
) -> tuple[list[Record], list[ControlRecord]]:
    turn, recorded = asyncio.Semaphore(plan.config.concurrency), plan.recorded
    records: dict[str, Record] = {}
    controls: dict[str, ControlRecord] = {}

    async def judge(record: Record) -> None:
        async with turn:
            records[record.key], _ = await score_again(recorded, record, cast)
        bar.advance(1)

    async def ask(control: ControlRecord, draft: Record | None) -> None:
        async with turn:
            controls[control.key], _ = await score_control_again(recorded, control, draft, cast)
        bar.advance(1)

    await gather(judge(record) for record in recorded.records)
    await gather(ask(control, draft) for control, draft in recorded_drafts(recorded))
    return (
        [records[record.key] for record in recorded.records],
        [controls[control.key] for control in recorded.controls],
    )


def _unrecorded_actor(plan: RejudgePlan) -> ChatModel:
    return UnrecordedModel(str(plan.recorded.settings.get("model", "")))


def _conditions(plan: RejudgePlan, players: Players) -> Conditions:
    config, actor = _judges_only(plan.config), actor_facts(plan.recorded.settings)
    before = rescored_conditions(plan.recorded.path, plan.recorded.rows)
    tasks = {
        task: replace(facts, players=_with_judges(
            facts.players, player_facts(config, actor, players, task)
        ))
        for task, facts in before.tasks.items()
    }  # fmt: skip
    everybody = _with_judges(before.players, player_facts(config, actor, players))
    return replace(before, players=everybody, tasks=tasks)


def _with_judges(before: Panel, now: Panel) -> Panel:
    others = {role: players for role, players in before.items() if role not in PANELS}
    return {**others, **{role: players for role, players in now.items() if role in PANELS}}


def judges_named(texts: Sequence[str], endpoints: str | None) -> tuple[RoleSettings, ...]:
    """`--judge WHO` options as players; ConfigError for one that cannot be read or is meant for one
    task."""
    if any(text.partition("=")[0].isidentifier() and "=" in text for text in texts):
        raise ConfigError(
            "A judge is named for one task, and episodes of all tasks are judged again.",
            "Whoever is named takes the place of every judge of the run.",
            "Write --judge WHO, or leave it out: each task keeps its own judges.",
        )
    config = RolesConfig.load(flags={"judge": list(texts) or None, "endpoints": endpoints}, env={})
    return tuple(map(_placed, config.judge))


def _placed(judge: RoleSettings) -> RoleSettings:
    """A file or folder is meant from where the command is given, not from where the run was."""
    if judge.player_kind.may_be_path and Path(judge.model).exists():
        return judge.model_copy(update={"model": str(Path(judge.model).resolve())})
    return judge
