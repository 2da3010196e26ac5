"""`train` turns a configuration into a finished run folder."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.eval.results.batch_statistics import task_scales
from soulkit.eval.results.rejudge import with_judges
from soulkit.eval.results.summary import summarise
from soulkit.eval.results.warnings import calls_by_task, costs_by_task, with_calls
from soulkit.eval.run.provenance import note_calls, with_teachers, write_conditions
from soulkit.eval.run.run_lock import run_lock
from soulkit.models.base import ChatModel, Player
from soulkit.models.codec import least_limit
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import SAMPLED, Journal
from soulkit.models.local.loading import ADAPTER_CONFIG, NOTE, pick_device
from soulkit.models.local.quantize import base_remark, require_package
from soulkit.models.local.sampler import context_limit
from soulkit.models.local.threads import note_threads, take_threads
from soulkit.models.local.tiny import build_tiny
from soulkit.models.players.players import cast_of, check_players
from soulkit.models.vllm.manager import VllmServers
from soulkit.play.plan import confirm_cost, pays
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import with_provenance
from soulkit.runs.coroutines import run_coroutine
from soulkit.runs.folder import Run, is_run
from soulkit.runs.jsonl import stored_json
from soulkit.runs.records import DEV_EPISODES, dev_after, load_records, newest_dev
from soulkit.train.config import TINY, TrainConfig
from soulkit.train.memory import memory_advice, note_pass, split_ranks, take_pass
from soulkit.train.model.policy import Policy
from soulkit.train.model.teacher import teacher_of
from soulkit.train.objectives.base import Objective, method_class
from soulkit.train.planning import refuse_unfitting, training_plan
from soulkit.train.ranks.follower import leading, load_student, load_teachers
from soulkit.train.ranks.launch import refuse_ranks
from soulkit.train.ranks.world import alone, launched
from soulkit.train.rollouts.ability import ability_of, measure_ability
from soulkit.train.rollouts.canaries import CanaryMonitor
from soulkit.train.rollouts.engine import TrainingEngine, training_engine
from soulkit.train.rollouts.engine_choice import (
    EnginePlan,
    engine_of_settings,
    kept_free,
    refuse_engine,
)
from soulkit.train.rollouts.feedback import FeedbackMonitor
from soulkit.train.rollouts.play import DevScores, Rollouts
from soulkit.train.rollouts.rollout_check import RolloutCheck
from soulkit.train.setup.data import (
    check_training_prompts,
    download_remark,
    load_training_data,
    make_cast,
    make_players,
    make_reader,
)
from soulkit.train.setup.rows import TaskRows, TrainingData
from soulkit.train.sft.exposure import refuse_unlimitable
from soulkit.train.sft.measures import sample_line
from soulkit.train.sft.mixsd import check_facts, with_written
from soulkit.train.sft.run import check_corpus, corpus_texts, supervise
from soulkit.train.sft.steps import check_lessons
from soulkit.train.state.checkpoint import export_best, read_position, replace_folder
from soulkit.train.state.fingerprint import (
    check_material,
    deterministic,
    material_conditions,
    with_players,
)
from soulkit.train.state.loop import Loop, Measure
from soulkit.train.state.metrics import read_step_lines
from soulkit.train.state.model_card import model_note, write_card
from soulkit.train.state.step_metrics import rewards_of
from soulkit.train.state.stops import Skips, identity_before, take_more_steps, with_more_steps
from soulkit.train.state.summary import (
    LAST_STEPS,
    TrainSummary,
    canary_totals,
    feedback_totals,
    with_dev,
    without_dev,
)
from soulkit.train.state.tracking import check_tracker, make_tracker
from soulkit.train.step import Step
from soulkit.types import Record

TINY_CONTEXT = 4096
"""Context length of a tiny model, in tokens."""
Parts = tuple[TrainConfig, Run, Policy, Policy | None, TrainingData, TrainingEngine]
"""Everything a training run needs; the second policy is a teacher."""


def train(
    config: TrainConfig, out: Path, ready: TrainingData | None = None, *,
    reporter: Reporter = SILENT,
) -> TrainSummary:  # fmt: skip
    """Train with `config` in the run folder `out`, resuming it if it exists; return the summary.

    The final weights are in `out/model`; with `eval_every`, those with the best dev score are in
    `out/best`. A resume needs the same rows and models and, if deterministic, the same arithmetic:
    RunError names the differences. `ready` is the result of `prepare_training`, if that was already
    called.
    """
    if not launched():
        refuse_ranks(config, "training in one process")
    with leading(), memory_advice(config, out), open_training(
        config, out, ready, reporter
    ) as parts:  # fmt: skip
        return run_coroutine(_train(*parts, reporter))


async def train_probe(
    material: TrainingData, out: Path, servers: VllmServers | None = None
) -> None:
    """Train silently within another training run, whose `servers` may host players."""
    with alone(), open_training(material.config, out, material, SILENT, servers) as parts:
        await _train(*parts, SILENT)


@contextmanager
def open_training(
    config: TrainConfig, out: Path, ready: TrainingData | None, reporter: Reporter,
    servers: VllmServers | None = None,
) -> Iterator[Parts]:  # fmt: skip
    """Check and load everything a training run needs, lock its folder and start its servers."""
    config = with_more_steps(config, out)
    refuse_untrainable(config)
    check_tracker(config.track)
    threads = take_threads(config.threads, out, alike=config.deterministic)
    with deterministic(config.deterministic):
        material = ready or prepare_training(config, out, reporter)
        config = with_more_steps(material.config, out)
        material = replace(material, config=config)
        run = _open(config, out) if is_run(out) or config.model == TINY else None
        reporter.phase("loading the model", alone=True)  # may download
        base = base_model(config, material, out)
        # A run within another one samples in this process.
        plan = EnginePlan.of(config, run, base, material) if servers is None else EnginePlan()
        choice = take_pass(config, base, out, kept_free(config, plan.servers))
        policy = load_student(config, base, choice)
        policy.note = model_note(config, policy, material.corpus)
        reporter.phase("checking model and rows")
        teacher = prepare_models(config, policy, material)
        # Created last, so that an error above leaves no folder bound to wrong settings.
        run = run or _open(config, out)
        with run_lock(run):
            note_threads(run.path, threads)
            note_pass(run.path, choice)
            if not threads.asked:
                reporter.note(threads.words())
            reporter.note(choice.words)
            check_material(run, material_conditions(config, material, policy, teacher), config)
            take_more_steps(run, config, reporter)
            servers_asked = (material.measured or material).config.servers()
            computed = dict.fromkeys(policy.remarks + (teacher.remarks if teacher else []))
            for remark in filter(None, (numbers_remark(policy), *computed, *servers_asked)):
                reporter.note(remark)
            engine = training_engine(config, run, policy, base, plan, choice, servers, reporter)
            with engine.started(material):
                yield config, run, policy, teacher, material, engine


def prepare_training(config: TrainConfig, out: Path, reporter: Reporter = SILENT) -> TrainingData:
    """Load the training data, check that players can be called, and confirm the cost."""
    material = load_training_data(config, asking=True, reporter=reporter)
    for remark in filter(None, (download_remark(config), *material.remarks())):
        reporter.note(remark)
    for part in filter(None, (material, material.measured)):
        check_players(part.config)
    if pays(material.config) or (material.measured and pays(material.measured.config)):
        _confirm(material, out, reporter)
    return material


def _confirm(material: TrainingData, out: Path, reporter: Reporter) -> None:
    config, asking = with_more_steps(material.config, out), (material.measured or material).config
    lines = read_step_lines(out / "metrics.jsonl")
    done = 1 + max((line.step for line in lines if line.played or material.measured), default=-1)
    left = max(config.steps - done, 0) / config.steps
    if left:
        confirm_cost(training_plan(material, left), asking, reporter)


def prepare_models(config: TrainConfig, policy: Policy, material: TrainingData) -> Policy | None:
    """Run the checks that need the model, start its moving average, and load the teacher."""
    limit = context_limit(policy.model, None)
    if material.corpus is not None:
        check_facts(config, material.corpus)
        check_corpus(config, policy, material.corpus)
        return None
    if material.objective is None:
        check_lessons(policy, limit, material.pool)
        return None
    check_training_prompts(policy, least_limit(limit, config.max_context), material, config)
    return load_teachers(config, material.objective, policy)


def adapter_remark(config: TrainConfig) -> str:
    """Rank and alpha of the trained adapter; empty without an adapter."""
    if config.full:
        return ""
    if config.adapter is None:
        rank, alpha = config.lora.r, config.lora.alpha
        rule = "twice the rank" if alpha == 2 * rank else f"twice the rank would be {2 * rank}"
        return f"LoRA adapter: rank {rank}, alpha {alpha} ({rule})"
    file, own = Path(config.adapter).expanduser() / ADAPTER_CONFIG, "its own rank and alpha"
    # An adapter on the Hub is not downloaded for a remark; loading refuses a damaged file.
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = stored_json(file)
        own = f"rank {saved['r']}, alpha {saved['lora_alpha']}"
    base = base_remark(file.with_name(NOTE), config.quantize)
    remark = f"LoRA adapter: {config.adapter}, {own}; lora.r and lora.alpha are ignored"
    return "; ".join(filter(None, (remark, base)))


def numbers_remark(policy: Policy) -> str:
    """A remark about a float16 checkpoint that is trained in another dtype; else empty."""
    if policy.stored != "float16":
        return ""
    return f"the checkpoint is stored in float16; training computes in {policy.computed}"


def _open(config: TrainConfig, out: Path) -> Run:
    identity = identity_before(config, out)
    return Run.open(out, f"train {config.method}", identity, sealed=not config.foreign)


def refuse_untrainable(config: TrainConfig) -> None:
    """ConfigError for settings that contradict each other or do not fit in memory."""
    refuse_unfitting(config)
    refuse_engine(config)
    refuse_unlimitable(config)
    refuse_unshardable(config)
    require_package(config.quantize)
    full, packed = config.full, config.quantize if config.quantize != "none" else ""
    flex = config.attention == "flex" and config.packing == "auto"
    for there, what, why, way in (
        (flex and pick_device(config.device).type == "cpu",
         "--attention flex cannot train on a CPU.",
         "FlexAttention has no backward pass there.",
         "Leave out --attention, or train on a GPU."),
        (full and (packed or config.dtype in ("bfloat16", "float16")),
         f"--full does not work with {f'--quantize {packed}' if packed else config.dtype}.",
         "Typical updates are too small for such weights and would be rounded away.",
         "Use --dtype float32 without --quantize, or train an adapter, which is always float32."),
        (config.dtype == "float16",
         "An adapter cannot be trained on a base in float16.",
         "Activations and gradients overflow in float16.",
         "Use --dtype bfloat16 or float32; both can load a float16 checkpoint."),
        (full and config.adapter is not None,
         "--full and --adapter cannot be combined.",
         "Training updates either all weights or an adapter.",
         "Remove --full or --adapter."),
        (full and config.kl_coef > 0,
         f"kl_coef {config.kl_coef} does not work with --full.",
         "The penalty compares the model with its base, which is the model without adapter.",
         "Set kl_coef to 0, or train an adapter."),
        (config.model == TINY and config.method != "sft",
         "The model 'tiny' has random weights.",
         "Reinforcement learning needs a model that succeeds at least sometimes.",
         "Warm it up first with soul train sft --full --model tiny ..., then use its folder."),
    ):  # fmt: skip
        if there:
            raise ConfigError(what, why, way)


def refuse_unshardable(config: TrainConfig) -> None:
    """ConfigError for settings that do not work with weights that are split over several ranks."""
    if split_ranks(config) == 1:
        return
    method, sft = method_class(config.method), config.method == "sft"
    local = not sft and engine_of_settings(config).kind == "local"
    compares = issubclass(method, Objective) and method.of(config).logits
    text = "A model that is split over GPUs can be trained, but does not generate text."
    pack = "The teacher computes inside one rank's pack, and every pass needs all ranks."
    for there, name, why, way in (
        (local, "--engine local", text, "use --engine vllm"),
        (sft and config.show_samples, "--show-samples", text, ""),
        (config.eval_task, "--eval-task", text, ""),
        (config.probe_every, "--probe-every", text, ""),
        (config.retention, "--retention", text, ""),
        (sft and config.objective == "mixsd", "--objective mixsd", text, ""),
        (compares, "methods that compare distributions", pack,
         "use sdpo-token or --opd-form token"),
        (config.deterministic, "--deterministic", "The order of sums is not fixed.", ""),
        (config.fused == "compile", "fused: compile", "Compiled parts need whole weights.", ""),
    ):  # fmt: skip
        if there:
            fix = f"Leave out --shard, or {way or f'leave out {name}'}."
            raise ConfigError(f"--shard does not work with {name}.", why, fix)


def base_model(config: TrainConfig, material: TrainingData, out: Path) -> str:
    """Folder of the base model; `tiny` is built from the words of the rows, once per run."""
    if config.model != TINY:
        return config.model
    folder = out / "base"
    if not folder.exists():
        corpus = material.corpus
        texts = corpus_texts(corpus) if corpus else tiny_model_texts(material.pool)
        build = partial(build_tiny, words=texts, seed=config.seed, max_context=TINY_CONTEXT)
        replace_folder(folder, build)
    return str(folder)


def tiny_model_texts(pool: TaskRows) -> list[str]:
    """Texts with every word that a tiny model must know: prompts, answers and feedback."""
    texts = set()
    for task, example in pool:
        gold = task.gold(example)
        lines = gold.transcript if gold else ()
        texts |= {s.text for context in task.previews(example).values() for s in context}
        texts |= {line.text for line in lines}
        texts.add(task.explain(example, None, None) or "")
    return sorted(texts)


async def _train(
    config: TrainConfig, run: Run, policy: Policy, teacher: Policy | None, material: TrainingData,
    engine: TrainingEngine, reporter: Reporter,
) -> TrainSummary:  # fmt: skip
    tracker = make_tracker(config.track, run.path, config.resolved())
    journal = None if config.method == "sft" else Journal(run.path / SAMPLED)
    learned = material  # the model card names the given data, not the texts written from it
    if material.corpus is not None and config.objective == "mixsd":
        corpus = await with_written(config, run.path, policy, material.corpus, reporter)
        learned = replace(material, corpus=corpus)
    stream = learned.corpus.stream if learned.corpus else None
    loop = Loop.open(config, run, policy, tracker, journal, stream, reporter)
    try:
        await measure_ability(loop, "before")
        if material.objective is None:
            if remark := adapter_remark(config):
                reporter.note(remark)
            beside = partial(train_probe, servers=engine.servers)
            summary = await supervise(loop, learned, beside, engine.player)
        else:
            summary = await _reinforce(loop, material, engine, teacher)
        await measure_ability(loop, "after")
        summary = replace(summary, retention=ability_of(loop))
    finally:
        loop.close()
    saved = loop.step
    if loop.limit is not None:
        saved = loop.limit.kept()
        bits = loop.limit.measured[saved]
        summary = replace(summary, kept_step=saved, kept_exposure=bits)
    else:
        replace_folder(run.path / "model", partial(policy.save, step=saved))
    best = None if loop.limit else export_best(run.path, run.checkpoints)
    if best is not None:
        summary = with_best(summary, run, best)
    whole = with_provenance(run.path, summary.to_json())
    write_card(run.path / "model", config, material, policy, whole, saved)
    if best is not None:
        done = read_position(best).step
        of_best = with_provenance(run.path, best_summary(summary, run, done, material).to_json())
        write_card(run.path / "best", config, material, policy, of_best, done)
    run.write_summary(whole)
    await asyncio.sleep(0)  # a late interrupt also stops the caller, not just this run
    return summary


def best_summary(
    summary: TrainSummary, run: Run, step: int, material: TrainingData
) -> TrainSummary:
    """`summary` with the dev scores of the best weights, those after `step`."""
    measured = dev_after(run.path, step, light=True)
    before = replace(without_dev(summary), retention=None)  # measured on the last weights
    tasks = (material.measured or material).tasks
    return with_dev(before, measured, tasks.values())


def with_best(summary: TrainSummary, run: Run, checkpoint: Path) -> TrainSummary:
    position = read_position(checkpoint)
    return replace(
        summary, best_step=position.step, best_dev=position.dev,
        best_valid=None if position.dev is not None else position.valid,
        best_checkpoint=checkpoint.relative_to(run.path).as_posix(),
    )  # fmt: skip


async def _reinforce(
    loop: Loop, material: TrainingData, engine: TrainingEngine, teacher: Policy | None
) -> TrainSummary:
    config, run, policy, objective = loop.config, loop.run, loop.policy, material.objective
    assert objective is not None
    sampler = engine.sampler(material, loop.journal, loop.reporter)
    players = make_players(config, sampler, run, engine.player, loop.reporter)
    conditions = with_players(run, config, players, material, policy)
    basis = engine.weights_basis or conditions.actor.weights_basis
    conditions = replace(conditions, engine=engine.record(),
                         actor=replace(conditions.actor, weights_basis=basis))  # fmt: skip
    conditions = with_teachers(conditions, config.model_dump(), teacher)
    write_conditions(run, conditions, proven=engine.served)
    recent: deque[Sequence[Record]] = deque(maxlen=LAST_STEPS)
    cast = make_cast(config, sampler, players)
    judged = with_judges(config, [one] if (one := config.dev_judge) else [])
    second = cast_of(judged, players, Player(sampler), config.seed) if one else None
    dev = DevScores(config, sampler, cast, material.dev, run.path / DEV_EPISODES, second)
    rollouts = Rollouts(
        config, objective, sampler, cast, material.pool, dev, make_reader(config, players)
    )
    step = Step(
        loop, objective, rollouts, teacher_of(config, objective, policy, teacher),
        RolloutCheck.of(loop, sampler), recent,
        canaries=CanaryMonitor.of(config, material.pool, material.tasks, run.metrics),
        watch=FeedbackMonitor.of(config, objective, material.tasks, run.metrics),
        skips=Skips.of(run.metrics),
    )  # fmt: skip
    try:
        if remark := adapter_remark(config):
            loop.reporter.note(remark)
        if not loop.unmeasured:
            loop.refuse_ended()
        if loop.step < config.steps:
            await players.preflight.hold()  # before sampling the first drafts
        await loop.run_all(step, with_sample_lines(loop, step.measure))
    finally:
        await sampler.close()
        await players.close()
    records = [record for records in recent for record in records]
    if len(recent) < min(LAST_STEPS, config.steps):  # resumed: earlier steps are only on disk
        last = config.steps - LAST_STEPS
        records = [r for r in load_records(run.episodes, light=True) if r.step >= last]
    models = [player.model for player in rollouts.cast.players]
    summary = rollout_summary(config, loop, records, material, models)
    return with_dev(summary, newest_dev(run.path, light=True), material.tasks.values())


def with_sample_lines(loop: Loop, measure: Measure) -> Measure:
    """A version of `measure` that also prints some of the held-out episodes it played."""

    async def both(step: int) -> Mapping[str, float | None]:
        scores = await measure(step)
        if scores and loop.config.show_samples:
            played = dev_after(loop.run.path, step + 1)
            for record in played[: loop.config.show_samples]:
                loop.reporter.note(sample_line(record))
        return scores

    return both


def rollout_summary(
    config: TrainConfig, loop: Loop, records: Sequence[Record], material: TrainingData,
    models: Sequence[ChatModel],
) -> TrainSummary:  # fmt: skip
    """Means over the last steps, the two rewards with the leave-one-out gap; feedback, calls and
    cost of the whole run. The servers of `models` are recorded."""
    with Ledger(loop.run.ledger_path) as ledger:
        paid = ledger.totals()
        tasks = {row.id: task.name for task, row in (*material.pool, *material.dev)}
        costs, calls = costs_by_task(ledger, tasks), calls_by_task(ledger, tasks)
    summary = summarise(
        records, command=f"train {config.method}", model=config.model, protocol=config.protocol,
        seconds=loop.seconds, cost=paid["cost"], scale=task_scales(material.tasks.values()),
        beside={name: task.spec.metric.beside for name, task in material.tasks.items()},
        names={name: task.spec.metric.name for name, task in material.tasks.items()},
        training=True,
    )  # fmt: skip
    dropped = with_calls(summary.dropped_settings, calls)
    note_calls(loop.run.path, calls, dropped, models)
    lines = read_step_lines(loop.run.metrics)
    return TrainSummary(
        **{one.name: getattr(summary, one.name) for one in fields(summary)
           if one.name not in
           ("unpriced_calls", "costs", "suite", "left_out", "dropped_settings")},
        dropped_settings=dropped,
        unpriced_calls=paid["unpriced"],
        costs=costs,
        suite=config.suite or "",
        left_out=material.left_out,
        steps=loop.step,
        summary_steps=min(LAST_STEPS, loop.step),
        rewards=rewards_of(records, mixture=len(config.tasks) > 1),
        feedback=feedback_totals(lines, config.leak_check),
        canaries=canary_totals(lines),
        calls=paid["by_role"],
    )  # fmt: skip
