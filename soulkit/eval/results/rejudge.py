"""Judge recorded episodes again: with an edited prompt, with another judge, or after judge
failures.

    recorded run ──▶ survey: all questions without a recorded answer, and their cost
                 ──▶ ask them ──▶ a run folder with its own ledger, layered on the old one

The actor's replies and the old folder do not change. Running the same command again resumes its
folder; the new ledger keeps all replies, so nothing is asked twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
    regrouped,
    score_all,
)
from soulkit.eval.results.rescore import (
    CHANGES,
    PREFIX,
    PROMPTS,
    Rescored,
    copy_prompts,
    distinct_tasks,
    existing_ledgers,
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
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.models.stand_ins import ObservedModel
from soulkit.models.vllm.manager import check_needs, player_servers, players_needs, terms_of
from soulkit.play.plan import Plan, PlayerTerms, TaskPlan, question_load
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import Conditions, Panel
from soulkit.runs.folder import Run, is_run, note_start
from soulkit.runs.jsonl import read_object, write_json
from soulkit.text import word_count
from soulkit.types import Call, Completion, ControlRecord, Record, Sampling, Segment

LEDGER = "ledger.sqlite"
AskedPlayer = tuple[str, str]
"""A role and its player, as written on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejudgePlan:
    """The episodes to judge again, and the judges and prompts to use."""

    recorded: RecordedRun
    config: RolesConfig
    """The settings of the run with the new judges."""
    prompts: Path | None
    """Folder of edited templates; None keeps the templates."""
    out: Path

    @property
    def ledger(self) -> Path:
        """The ledger of the new replies."""
        return self.out / LEDGER

    @property
    def command(self) -> str:
        return f"{PREFIX}{self.recorded.command}"

    def servers(self) -> list[str]:
        """A line for each server that will be asked."""
        return _judges_only(self.config).servers()


@dataclass
class Survey:
    """The questions without a recorded answer, by role and player."""

    words: dict[AskedPlayer, list[int]] = field(default_factory=dict)
    """Role and player → word count of each prompt without an answer."""
    episodes: set[str] = field(default_factory=set)
    """Keys of the episodes to judge again."""
    controls: set[str] = field(default_factory=set)
    """Keys of the controls to judge again."""

    @property
    def questions(self) -> int:
        return sum(len(prompts) for prompts in self.words.values())


class _SurveyedModel(ObservedModel):
    """Replays a player's model and records every question that the ledger lacks."""

    def __init__(self, model: ChatModel, seat: AskedPlayer, survey: Survey) -> None:
        super().__init__(model)
        self._seat, self._survey = seat, survey

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        try:
            return await super().complete(context, sampling, call)
        except ReplayMiss:
            words = sum(word_count(segment.text) for segment in context)
            self._survey.words.setdefault(self._seat, []).append(words)
            raise


@dataclass
class _SurveyPlayers(Players):
    """Players whose unanswered questions go into a survey."""

    survey: Survey = field(default_factory=Survey)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        model = super().model(role, settings)
        if role not in PANELS:
            return model
        return _SurveyedModel(model, (role, settings.written()), self.survey)


# -- plan --------------------------------------------------------------------------------------


def rejudge_plan(
    recorded: RecordedRun, judges: Sequence[RoleSettings], prompts: Path | None, out: Path | None,
    root: Path, *, max_cost: float | None = None, yes: bool = False,
    max_context: int | None = None,
) -> RejudgePlan:  # fmt: skip
    """The plan of a command; ConfigError or RunError if it is not possible.

    Without `out`, the folder is in `root` and its name is derived from the settings, so that the
    same command resumes the same folder. `max_cost` (US dollars) and `yes` confirm the cost;
    `max_context` is in tokens.
    """
    _refuse_rules(recorded)
    config = with_judges(recorded.config, judges)
    context = max_context or config.max_context
    config = config.model_copy(update={"max_cost": max_cost, "yes": yes, "max_context": context})
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
    """ConfigError if no episode is judged or audited, so nothing would be asked."""
    played = {r.example_id for r in recorded.records}
    rows = [row for example_id, row in recorded.rows.items() if example_id in played]
    asked = {role for task, row in rows for role, count in task.calls(row).items() if count}
    if rows and asked.isdisjoint(PANELS):
        names = {task.name for task, _ in rows}
        again = " To apply the rules again, use soul rescore RUN without --ask."
        raise no_judge_asked(names, "so --ask has nothing to ask", again)


def judging_players(config: RolesConfig) -> list[tuple[str, RoleSettings]]:
    """All judges and auditors with their role, including those of single tasks."""
    return [(role, who) for role, who in config.players() if role in PANELS]


def with_judges(config: RolesConfig, judges: Sequence[RoleSettings]) -> RolesConfig:
    """The settings with `judges` in every task, or unchanged if there are none. An auditor for all
    tasks stays. ConfigError for a judge that is listed twice."""
    if not judges:
        return config
    named = [judge.model_dump_json() for judge in judges]
    if len(set(named)) < len(named):
        raise ConfigError(
            "The same judge is listed twice.",
            "The second would get the first one's replies from the ledger, so the two would always "
            "agree.",
            "List it once.",
        )
    without = {"judge": (), "auditor": ()}
    seats = {t: own.model_copy(update=without) for t, own in config.task_players.items()}
    return config.model_copy(update={"judge": tuple(judges), "task_players": seats})


def _usual_name(recorded: RecordedRun, config: RolesConfig, prompts: Path | None) -> str:
    texts = [path.read_bytes().hex() for path in templates_in(prompts)] if prompts else []
    judges = [(role, who.model_dump(mode="json")) for role, who in judging_players(config)]
    whole = json.dumps([str(recorded.path.resolve()), judges, texts], sort_keys=True)
    mark = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return f"rescore-{recorded.path.resolve().name}-{mark}"


def _check_folder(plan: RejudgePlan) -> None:
    source = str(plan.recorded.path.resolve())
    # Run.open rejects a folder that is neither empty nor a run.
    if is_run(plan.out) and read_object(plan.out / CHANGES).get("source") != source:
        raise RunError(
            f"'{plan.out}' already contains another run.",
            f"It was not made by rescoring '{source}', so its replies belong to other episodes.",
            "Choose a new or empty folder with --out.",
        )


# -- survey --------------------------------------------------------------------------------------


def survey_of(plan: RejudgePlan) -> Survey:
    """All questions without a recorded answer; no model is asked. ConfigError for an edited
    template that no question of these episodes uses."""
    survey = Survey()
    with (
        existing_ledgers(plan.ledger, plan.recorded.ledger) as files,
        LayeredLedger(files[0], next(iter(files[1:]), None), "replay") as ledger,
    ):
        asyncio.run(_collect_questions(plan, ledger, survey))
    if plan.prompts is not None:
        refuse_unused(distinct_tasks(plan.recorded.rows), plan.prompts)
    return survey


async def _collect_questions(plan: RejudgePlan, ledger: Ledger, survey: Survey) -> None:
    players = _SurveyPlayers(**_player_arguments(plan, ledger, UnrecordedModel), survey=survey)
    players.serve = from_ledger(ledger)
    cast = _cast(plan, players, UnrecordedModel(str(plan.recorded.settings.get("model", ""))))
    records, controls = await score_all(plan.recorded, cast)
    survey.episodes |= {record.key for record, miss in records if miss is not None}
    survey.controls |= {control.key for control, miss in controls if miss is not None}
    await players.close()


def survey_plan(plan: RejudgePlan, survey: Survey) -> Plan:
    """Calls, tokens and cost of the survey's questions, by task and judge."""
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
    """The judges; no other player is needed to judge recorded episodes."""
    players.actor = actor
    return cast_of(_judges_only(plan.config), players, Player(actor), plan.recorded.seed)


def _judges_only(config: RolesConfig) -> RolesConfig:
    fields = {name: getattr(config, name) for name in RolesConfig.model_fields}
    without = dict.fromkeys(("partner", "environment", "coach"))
    seats = {t: own.model_copy(update=without) for t, own in config.task_players.items()}
    alone = {"partner": None, "environment": None, "task_players": seats}
    return RolesConfig.model_construct(**{**fields, **alone})


def rejudge(plan: RejudgePlan, *, reporter: Reporter = SILENT) -> Rescored:
    """Ask the missing questions and write the run folder, or resume it.

    If a judge fails, the episode is unscored; the same command asks it again. RunError if the
    folder belongs to another run; BudgetSpent at the cost limit.
    """
    recorded, judging, terms = plan.recorded, _judges_only(plan.config), terms_of(plan.config)
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
    actor = (
        recorded.actor()
        if judges_itself
        else UnrecordedModel(str(plan.recorded.settings.get("model", "")))
    )
    terms = _player_arguments(plan, ledger, recorded.load)
    note = partial(note_start, run.path)
    players = Players(**terms, serve=serve, note=note, reporter=reporter)
    try:
        cast = _cast(plan, players, actor)
        write_conditions(run, _conditions(plan, players))
        with reporter.progress(len(recorded.records) + len(recorded.controls)) as bar:
            records, controls = await score_all(recorded, cast, plan.config.concurrency, bar)
            return [one for one, _ in records], [one for one, _ in controls]
    finally:
        await players.close()


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
    """`--judge PLAYER` options as players; ConfigError for an invalid one, or one for a single
    task."""
    if any(text.partition("=")[0].isidentifier() and "=" in text for text in texts):
        raise ConfigError(
            "soul rescore does not accept a judge for a single task.",
            "--judge replaces all judges of the run, and the episodes of all tasks are judged "
            "again.",
            "Write --judge PLAYER without a task name, or leave it out to keep each task's judges.",
        )
    config = RolesConfig.load(flags={"judge": list(texts) or None, "endpoints": endpoints}, env={})
    return tuple(map(_placed, config.judge))


def _placed(judge: RoleSettings) -> RoleSettings:
    """Resolve a path relative to the current folder, not the run's start folder."""
    if judge.player_kind.may_be_path and Path(judge.model).exists():
        return judge.model_copy(update={"model": str(Path(judge.model).resolve())})
    return judge
