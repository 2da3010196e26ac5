"""Evaluation: play every example `repeats` times, score it, keep every record, write the summary.

    run all checks ──▶ open the run ──▶ play episodes without a score ──▶ summary.json

* Tasks, rows, roles, keys and prompt lengths are checked before a folder is created or an episode
  is played.
* Every paid reply is in the ledger before its episode is scored, and every record is written as
  soon as it is scored. After a kill, the same command resumes the run and pays for no reply twice.
* The run stops after many failed episodes in a row, because the server is probably down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.config import MissingSettings
from soulkit.errors import ConfigError, ProviderError, RunError, TaskError
from soulkit.eval.config import EvalConfig, left_out, work_and_missing
from soulkit.eval.gates import check_gates, parse_gate
from soulkit.eval.pilot import plan_from_pilot, played_rows
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.results.batch_statistics import parts_remark, summary_terms
from soulkit.eval.results.summary import Condenser, Summary, summarise, without_coach
from soulkit.eval.results.warnings import calls_by_task, costs_by_task, with_calls
from soulkit.eval.run.actor import (
    ActorSetup,
    LoadActor,
    actor_reader,
    check_actor,
    checkpoint_model,
    eval_engine,
    eval_servers,
    note_choices,
    on_vllm,
    starts_servers,
    unfitting_lines,
)
from soulkit.eval.run.provenance import (
    actor_facts,
    model_facts,
    note_calls,
    played_conditions,
    with_rows,
    write_conditions,
)
from soulkit.eval.run.resume import (
    ResumeState,
    calibration_remarks,
    control_counts,
    controls_words,
    draft_keys,
    finished_summary,
    is_unbegun,
    ordered_controls,
    play_controls,
    resume_state,
    resume_text,
)
from soulkit.eval.run.run_lock import CLOCK, GroupWriter, RunClock, find_resumable, run_lock
from soulkit.eval.run.session import (
    FailureStreak,
    check_open_batches,
    make_batches,
    max_calls,
    pilot_work,
    refuse_dialogues,
    report_open_batches,
)
from soulkit.models.base import Cast, ChatModel, Player, unfilled
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.threads import take_threads
from soulkit.models.players.players import Players, cast_of, check_players
from soulkit.models.vllm.manager import VllmServers
from soulkit.play.default_players import training_player_remarks, with_default_players
from soulkit.play.engine import Engine, Job, Sink, gather
from soulkit.play.plan import Plan, Work, confirm_cost, pays
from soulkit.play.requirements import (
    MissingRequirement,
    left_out_lines,
    missing_checkpoints,
    missing_engine,
    missing_keys,
    missing_model,
    missing_roles,
    missing_services,
    planned_lines,
    refuse_missing,
    refuse_private_rows,
)
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.conditions import Conditions, with_provenance
from soulkit.runs.coroutines import run_coroutine
from soulkit.runs.folder import Run, default_run_path, is_run, note_start
from soulkit.runs.jsonl import pack_lines
from soulkit.runs.records import stream_records
from soulkit.types import ControlRecord, Record, Score

_EXTERNAL_FAILURES = ("provider_error", "partner_error", "judge_error", TaskError.reason)


class RunningMean:
    """The mean score of the episodes so far, for the progress line; may differ from the
    headline."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.total, self.count, self.failed = 0.0, 0, 0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if record.score.value is None:
            self.failed += 1
        else:
            self.total, self.count = self.total + record.score.value, self.count + 1

    def words(self) -> str:
        mean = f"mean score {self.total / self.count:.3f}" if self.count else "no score yet"
        return f"{mean}, {self.failed} unscored" if self.failed else mean


# -- from a configuration to a finished run ------------------------------------------------------


def run_eval(
    config: EvalConfig,
    out: Path | None = None,
    *,
    load: LoadActor | None = None,
    servers: VllmServers | None = None,
    pilot: int | None = None,
    reporter: Reporter = SILENT,
) -> tuple[Run, Summary]:
    """Run `soul eval` and return the run with its summary. With `pilot`, play only that many rows
    and leave the run unfinished.

    `out` is the run folder. Without it, an unfinished run of the same configuration under `runs/`
    is resumed, or a new folder is created. `load` returns a model that the caller has loaded; it is
    closed at the end. `servers` are shared by several runs and keep running; otherwise the run's
    servers are stopped at the end.

    UserError before anything is played; ProviderError if the model does not answer.
    """
    config, work = prepare(config, reporter)
    if remark := controls_words(work, on=config.controls):
        reporter.note(remark)
    begun = out or find_resumable(config.command, config.identity())
    folder = begun or default_run_path(f"eval-{config.kind}", [part.task.name for part in work])
    # Open an existing folder first, so that its errors appear before the model loads.
    run = _open(folder, config) if is_run(folder) else None
    check_open_batches(config, folder)
    check_endpoints(config)
    standing = None if run is None else resume_state(run, work, config.repeats)
    part = work if pilot is None else pilot_work(work, pilot, config.seed)
    _confirm(config, part, run, standing, reporter, "this run" if pilot is None else "the pilot")
    engine = eval_engine(config, run)
    in_process = engine is not None and not on_vllm(engine)
    threads = take_threads(config.threads, folder) if in_process else None
    loading = reporter.working("loading the model", alone=True)
    with loading if in_process else nullcontext():
        reader = actor_reader(config, engine, load)
    check_actor(reader, work, config, run)
    with eval_servers(config, engine, folder, servers, reporter) as pool:
        left = standing is None or standing.any_left(part, config.repeats)
        seats = ActorSetup(config, engine, reader, pool, calls=left)
        seats.check(run, work)
        run = run or _open(folder, config)
        for server in config.servers() if config.ledger != "replay" else ():
            reporter.note(server)
        with run_lock(run), open_ledger(run, config) as ledger:
            note_choices(config, run, threads, engine, reporter)
            players = _make_players(run, config, seats, ledger, reporter)
            for line in unfitting_lines(seats.actor, reader, work, config):
                reporter.note(line)
            write_conditions(run, eval_conditions(config, players, work, seats.engine))
            _note_declared(run, config, reporter)
            playing = _play_and_close(run, work, part, players, config, ledger, standing, reporter)
            with report_open_batches(players.batches, reporter):
                summary = run_coroutine(playing)
    for remark in calibration_remarks(work, summary.tasks):
        reporter.note(remark)
    return run, summary


def evaluation_pilot(config: EvalConfig, n: int, out: Path | None, reporter: Reporter) -> Plan:
    """Play `n` rows of an evaluation and return the plan of all its rows, measured on the played
    ones. The run stays unfinished; the same command plays the rest."""
    if config.ledger != "record":
        raise ConfigError(
            f"--pilot does not work with --ledger {config.ledger}.",
            "The run takes the replies of the pilot from its own ledger.",
            "Leave out --ledger.",
        )
    # A batch can take a day; the pilot is played live.
    live = config.model_copy(update={"batch": False, "batch_judges": False})
    run, _ = run_eval(live, out, pilot=n, reporter=reporter)
    config, work = prepare(config, asking=False)
    rows = played_rows(run, config, work, resume_state(run, work, config.repeats))
    share = len(rows) / max(sum(len(part.examples) for part in work), 1)
    return plan_from_pilot(evaluation_plan(config, work), rows, run.path, share)


def _make_players(
    run: Run, config: EvalConfig, seats: ActorSetup, ledger: Ledger, reporter: Reporter
) -> Players:
    seats.fill(run, ledger)
    batches, note = make_batches(config, run.path, reporter), partial(note_start, run.path)
    return eval_players(
        config, ledger, seats.actor, batches=batches, serve=seats.player, note=note,
        reporter=reporter,
    )  # fmt: skip


UNNAMED_WAYS = {
    "model": ("model (--model)", "add --model MODEL"),
    "tasks": (
        "task (--task or --suite)",
        "add --task NAME,NAME or --suite NAME (see: soul tasks list)",
    ),
}
"""Required setting → its name in errors, and the fix."""
STAND_INS = {"model": "MODEL", "tasks": ("TASK",)}
"""Placeholders for them while all other missing requirements are collected."""


def load_config(
    file: Path | None, flags: Mapping[str, Any], *, trust: bool = False, asking: bool = True
) -> EvalConfig:
    """`EvalConfig.load`. If the model or the tasks are missing, the error also lists everything
    else that is missing (with `asking`, also keys and checkpoints)."""
    unnamed: dict[str, ConfigError] = {}
    while True:
        stand_ins = {name: STAND_INS[name] for name in unnamed}
        try:
            config = EvalConfig.load(file, flags={**flags, **stand_ins}, trust=trust)
            break
        except MissingSettings as error:
            new = [name for name in error.names if name in STAND_INS and name not in unnamed]
            if not new:
                raise
            unnamed |= dict.fromkeys(new, error)
        except ConfigError as error:
            raise next(iter(unnamed.values()), error) from error
    if unnamed:
        _refuse_unnamed(config, unnamed, asking=asking)
    return config


def _refuse_unnamed(
    config: EvalConfig, unnamed: Mapping[str, ConfigError], *, asking: bool
) -> None:
    """Raise one error with all missing requirements; `config` has placeholders for `unnamed`."""
    gaps = [
        MissingRequirement("unnamed", *UNNAMED_WAYS[name], error) for name, error in unnamed.items()
    ]
    work: list[Work] = []
    if "tasks" not in unnamed:
        registry = config.registry()
        work, without = work_and_missing(config, registry)
        config = with_default_players(
            config, work, registry, coached=bool(config.refine), suite=config.suite
        )
        gaps += without
    gaps += _role_gaps(config, work, asking=asking, model="model" not in unnamed)
    there = [part for part in work if part.examples]
    refuse_missing(gaps, lambda: evaluation_plan(config, there) if there else None, config.suite)


def _role_gaps(
    config: EvalConfig, work: Sequence[Work], *, asking: bool, model: bool = True
) -> list[MissingRequirement]:
    """Missing players of `work` and, with `asking`, missing services, keys, checkpoints and vLLM.
    The actor's checkpoint is checked only with `model`."""
    gaps = missing_roles(work, config)
    if not asking or config.ledger == "replay":
        return gaps
    gaps += (
        missing_services(work)
        + missing_keys(config)
        + missing_checkpoints(config)
        + missing_engine(config, actor=starts_servers(config))
    )
    loads = model and config.kind == "local"
    return gaps + (missing_model(config.model, config.adapter) if loads else [])


def prepare(
    config: EvalConfig, reporter: Reporter = SILENT, *, asking: bool = True
) -> tuple[EvalConfig, list[Work]]:
    """Check everything that needs no model, and return the configuration with default players and
    its work. Without `asking`, no keys or checkpoints are needed.
    """
    registry, gates = config.registry(), [*map(parse_gate, config.gate_texts())]
    work, gaps = work_and_missing(config, registry)
    check_gates(gates, [part.task.name for part in work], registry, whose="this run")
    config = with_default_players(
        config, work, registry, coached=bool(config.refine), suite=config.suite
    )
    gaps += _role_gaps(config, work, asking=asking)
    refuse_dialogues(config, work)
    fixed = [part.task.name for part in work if not part.task.plain_talk]
    if fixed and config.prompt_mode == "replace":
        raise ConfigError(
            f"--prompt-mode replace does not work with {', '.join(fixed)}.",
            "Only dialogues in plain messages need no answer format from the task's prompt.",
            "Leave out --prompt-mode: the system prompt then comes before the task's.",
        )
    there = [part for part in work if part.examples]
    refuse_private_rows(work if asking else [], config)
    refuse_missing(gaps, lambda: evaluation_plan(config, there) if there else None, config.suite)
    lines = left_out_lines(config.suite, left_out(config, work)) if config.playable else []
    lines += planned_lines(config, there, config.split)
    for line in (*lines, *training_player_remarks(config, there, registry)):
        reporter.note(line)
    for remark in (remark for part in work for remark in part.task.remarks() if asking):
        reporter.note(remark)
    for part in work:
        if remark := parts_remark(part.task, part.examples):
            reporter.note(remark)
        if part.bad:
            first = part.bad[0]
            reporter.note(
                f"bad rows of {part.task.name} left out: {len(part.bad)}; the first: "
                f"{first.source}: {first.why}"
            )
    return config, work


def _confirm(
    config: EvalConfig, work: Sequence[Work], run: Run | None, standing: ResumeState | None,
    reporter: Reporter, what: str,
) -> None:  # fmt: skip
    if config.ledger == "replay" or not pays(config):
        return
    if run is None or standing is None:
        plan = evaluation_plan(config, work)
    else:
        waiting = {job.example.id for job in standing.jobs_left(work, config.repeats)}
        rows = [(w, tuple(e for e in w.examples if e.id in waiting)) for w in work]
        left = [replace(w, examples=examples) for w, examples in rows if examples]
        plan = evaluation_plan(config, left, standing.controls_left(work, config.repeats))
        plan = plan_from_pilot(plan, played_rows(run, config, work, standing), run.path)
    confirm_cost(plan, config, reporter, what)


def _note_declared(run: Run, config: EvalConfig, reporter: Reporter) -> None:
    """Report if --verify-weights cannot cover earlier episodes of the run."""
    conditions = Conditions.read(run.path) if config.verify_weights else None
    if conditions and conditions.actor.weights_basis == "declared":
        reporter.note(
            f"weights declared, not verified: earlier episodes in {run.path} were sampled without "
            "--verify-weights; to verify all episodes, choose another folder with --out"
        )


def _open(folder: Path, config: EvalConfig) -> Run:
    """Open the run in `folder`. Its settings may change if nothing was played yet, for example to
    fix a server that did not start."""
    command, settings, sealed = config.command, config.identity(), not config.foreign
    try:
        return Run.open(folder, command, settings, sealed=sealed)
    except RunError:
        if not is_unbegun(folder, command):
            raise
        return Run.open(folder, command, settings, sealed=sealed, replacing=True)


def eval_conditions(
    config: EvalConfig, players: Players, work: Sequence[Work], engine: Mapping[str, Any]
) -> Conditions:
    """The conditions of an evaluation with its players and rows; `engine` describes the sampler."""
    sampling = {part.task.name: config.sampling(part.task.spec) for part in work}
    actor = actor_facts(config.model_dump(), players.actor)
    conditions = with_rows(played_conditions(config, players, work, actor, sampling), work)
    measured = model_facts(config.model_dump(), players.actor)
    measured = replace(measured, system_prompt=config.prompt_label)
    return replace(conditions, actor=measured, engine=engine)


async def _play_and_close(
    run: Run, work: Sequence[Work], part: Sequence[Work], players: Players, config: EvalConfig,
    ledger: Ledger, before: ResumeState | None, reporter: Reporter,
) -> Summary:  # fmt: skip
    """Play `part` of the run's work and close its models. `before` is its state before it was
    locked."""
    cast = eval_cast(config, players)
    try:
        standing = resume_state(run, work, config.repeats, before)
        left = len(standing.jobs_left(part, config.repeats))
        controls = len(standing.controls_left(part, config.repeats))
        if run.resumed:
            every = len(draft_keys(part, config.repeats))
            reporter.note(resume_text(run, left, every, controls))
        if run.resumed and not (left or controls):
            suite = config.suite or ""
            if (summary := finished_summary(run, work, standing, suite)) is not None:
                return summary
        # Check servers before playing: a local model may play for an hour before the first call.
        # The ledger of a resumed run may contain all remaining replies; it needs no server then.
        if left + controls and (config.kind == "local" or not run.resumed):
            await players.preflight.hold()
        if not run.resumed:  # only now: the folder is removed if a server rejects us
            reporter.note(f"run folder {run.path}")
        with reporter.progress(left + controls) as bar:
            return await run_evaluation(
                run, part, cast, config, bar=bar, ledger=ledger, standing=standing,
                whole=part is work,
            )  # fmt: skip
    finally:
        await cast.actor.model.close()
        await players.close()


# -- the models ----------------------------------------------------------------------------------


def eval_players(
    config: EvalConfig, ledger: Ledger | None, local: ChatModel | None = None, **others: Any
) -> Players:
    """The players of `config`. `local` is the actor unless it is an API model; `others` are further
    fields of Players."""
    calls = {**config.call_arguments(ledger), "concurrency": config.concurrency}
    endpoints = [config.endpoint(), *config.settings_of_players()]
    players = Players(
        ledger, local, lambda path: checkpoint_model(path, config), calls, endpoints,
        by_batch=config.by_batch, **others,
    )  # fmt: skip
    if local is None:
        players.actor = players.model("actor", config.endpoint())
    return players


def eval_cast(config: EvalConfig, players: Players) -> Cast:
    """The cast of `config`; each task sets the actor's sampling."""
    assert players.actor is not None
    actor = Player(players.actor, instructions=config.instructions)
    return cast_of(config, players, actor, config.seed)


def check_endpoints(config: EvalConfig) -> None:
    """Check addresses, keys and prices before a folder is created."""
    if config.ledger == "replay":
        return  # a replay needs no key
    if config.kind == "api":
        eval_players(config, None)
    check_players(config)


def open_ledger(run: Run, config: EvalConfig) -> Ledger:
    """Open the run's own ledger, or the ledger to replay."""
    path = Path(config.ledger_file) if config.ledger_file else run.ledger_path
    return Ledger(None if config.ledger == "off" else path, config.ledger, mends=True)


# -- playing -------------------------------------------------------------------------------------


async def run_evaluation(
    run: Run, work: Sequence[Work], players: Cast, config: EvalConfig, *,
    bar: Bar | None = None, ledger: Ledger | None = None, standing: ResumeState | None = None,
    whole: bool = True,
) -> Summary:  # fmt: skip
    """Play the episodes of `run` without a score and return the summary, written unless `work` is
    only a part (not `whole`) of the run.

    ConfigError if a role is not filled, RunError if the folder has episodes of other rows,
    ProviderError after too many failures in a row. `standing` is the run's state, if known.
    """
    _check_roles(work, players)
    standing = standing or resume_state(run, work, config.repeats)
    jobs = standing.jobs_left(work, config.repeats)
    asks = standing.controls_left(work, config.repeats)
    # Only controls need the whole episodes.
    there = stream_records(run.episodes, light=not asks) if standing.scored else ()
    small = Condenser({part.task.name for part in work if part.task.batch_reads_texts}.__contains__)
    scored = {record.key: record if asks else small(record) for record in there}
    played_before = (record for key, record in scored.items() if standing.scored.get(key))
    clock, streak = RunClock(run.path / CLOCK), FailureStreak(max_calls(config), "episodes")
    mean = RunningMean(played_before)
    writer = GroupWriter(run.episodes)
    controls = {control.key: control for control in standing.controls}

    def count(score: Score) -> None:
        clock.tick()
        if bar is not None:
            bar.advance(1, mean.words())
        kind = TaskError if score.reason == TaskError.reason else ProviderError
        streak.add(not score.scored and score.reason in _EXTERNAL_FAILURES, score.words, kind)

    def sink(record: Record) -> None:
        writer.add(record)
        scored[record.key] = record if asks else small(record)
        if record.kind == "draft":
            mean.add(record)
            count(record.score)

    def notice(control: ControlRecord) -> None:
        controls[control.key] = control
        count(control.score)

    engine = partial(_engine, players=players, config=config)
    try:
        try:
            players_of = ((part, engine(part)) for part in work)
            await gather(_play_rounds(p, w, jobs, config.refine, sink) for w, p in players_of)
        finally:
            await writer.close()
        # All drafts are on disk, so a kill cannot lose a draft that has a control.
        await play_controls(run.path, work, asks, scored, engine, notice)
    finally:
        seconds = clock.save()
    records = [scored[key] for key in draft_keys(work, config.repeats)]
    records += [record for record in scored.values() if record.kind == "refined"]
    beside = ordered_controls(controls, work, config.repeats)
    summary = summary_of(work, records, config, seconds, _cost(records, ledger), beside)
    return _written(run, summary, ledger, work, players) if whole else summary


async def _play_rounds(
    engine: Engine, part: Work, jobs: Sequence[Job], rounds: int, sink: Sink
) -> None:
    async def walk(job: Job) -> None:
        # The draft last: once it is on disk, nothing of its rounds is missing.
        for record in reversed(await engine.rounds(job, rounds)):
            sink(record)

    await engine.each([job for job in jobs if job.task is part.task], walk)


def _check_roles(work: Sequence[Work], players: Cast) -> None:
    for part in work:
        for role in sorted(part.roles - set(players.in_task(part.task.name).filled())):
            raise unfilled(role, part.task.name)


def _written(
    run: Run, summary: Summary, ledger: Ledger | None, work: Sequence[Work], players: Cast
) -> Summary:
    """Add facts from the ledger to the summary and write it; packs the records of a complete
    run."""
    tasks = {example.id: part.task.name for part in work for example in part.examples}
    if ledger is not None:
        calls = calls_by_task(ledger, tasks)
        dropped = with_calls(summary.dropped_settings, calls)
        summary = replace(summary, dropped_settings=dropped)
        note_calls(run.path, calls, dropped, (player.model for player in players.players))
    if ledger is not None and ledger.mode == "record":
        unpriced, costs = ledger.totals()["unpriced"], costs_by_task(ledger, tasks)
        summary = replace(summary, unpriced_calls=unpriced, costs=costs)
    if summary.n == summary.n_scored:
        pack_lines(run.episodes)
    run.write_summary(with_provenance(run.path, summary.to_json()))
    return summary


def _engine(part: Work, players: Cast, config: EvalConfig) -> Engine:
    sampling = config.sampling(part.task.spec)
    cast = players.in_task(part.task.name)
    table = replace(cast, actor=replace(players.actor, sampling=sampling))
    room = max_calls(config) if config.kind == "api" else config.episodes_at_once
    return Engine(table, config.seed, room, config.feedback_policy(part.task.name))


def summary_of(
    work: Sequence[Work], records: Sequence[Record], config: EvalConfig, seconds: float,
    cost: float | None, controls: Sequence[ControlRecord] = (),
) -> Summary:  # fmt: skip
    """The summary of these records and controls."""
    summary = summarise(
        records,
        command=config.command,
        model=f"{config.model} + {config.adapter}" if config.adapter else config.model,
        protocol=config.protocol,
        seconds=round(seconds, 3),
        cost=cost,
        **summary_terms((w.task for w in work), controls),
    )
    summary = replace(summary, controls=control_counts(controls))
    if config.suite is None:
        return summary
    missing = left_out(config, work) if config.playable else {}
    return replace(summary, suite=config.suite, left_out=missing)


def _cost(records: Sequence[Record], ledger: Ledger | None) -> float | None:
    if ledger is not None and ledger.mode == "record":
        return ledger.totals()["cost"]
    costs = [r.episode.usage.cost for r in records if r.episode.usage.cost is not None]
    return sum(costs) if costs else None


def failures(records: Iterable[Record]) -> dict[str, str]:
    """`reason (count)` → message of the first unscored episode with that reason."""
    missing = [r for r in map(without_coach, records) if not r.score.scored]
    counts: Mapping[str, int] = Counter(r.score.reason for r in missing)
    words = {r.score.reason: r.score.words for r in reversed(missing)}
    return {f"{reason} ({count})": words[reason] for reason, count in counts.items()}
