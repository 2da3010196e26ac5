"""What a training run will ask for, before anything starts: drafts, refined rollouts, updates.

Nothing is loaded but rows and file headers. `soul plan train …` and `--dry-run` print it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from soulkit.eval.planning import (
    assumed,
    local_players,
    longest_of,
    number_bytes,
    sampler,
    together,
    voice_of,
)
from soulkit.models.local.memory import Footprint, device_speed, footprint
from soulkit.models.players.settings import PANELS
from soulkit.play.engine import BLIND_READS
from soulkit.play.plan import (
    TOKENS_PER_WORD,
    Machine,
    Plan,
    PlayerTerms,
    TaskPlan,
    Work,
    on_machine,
    plan_work,
    scaled,
)
from soulkit.tasks.kit.base import Task
from soulkit.train.ablate import PlannedRun
from soulkit.train.config import TOKENS_PER_BATCH, TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.train.rollouts.canaries import canaries_of
from soulkit.train.setup.data import TrainingData, load_training_data
from soulkit.train.setup.rows import TaskRows, general_rows, general_settings

EACH = {"coach": 1, "blind_reader": BLIND_READS}
"""Calls for every draft that gets feedback."""


def training_plan(config: TrainConfig, material: TrainingData | None = None) -> Plan:
    """What the whole run of `config` will ask for."""
    material = material or load_training_data(config)
    config = material.config
    work = work_of(material)
    if material.objective is None:
        lessons = _supervised_plan(config, work) if work else Plan(tasks=(), concurrency=1)
        played = beside_plan(config, material)
        if played is None:
            return on_machine(lessons, imitation_machine(config, _mean_prompt(work)))
        machines = [m for m in (imitation_machine(config, _mean_prompt(work)), played.machine) if m]
        whole = replace(played, tasks=(*lessons.tasks, *played.tasks))
        return on_machine(whole, together(machines))
    learned = _learned(config, material.objective, work)
    tasks = (*learned.tasks, *_dev(config, material), *_canaries(config, material),
             *general_tasks(config))  # fmt: skip
    whole = replace(learned, tasks=tasks)
    trained = _machine(config, material.objective, learned)
    size = (config.batch_size, config.device, "auto")
    watched = replace(whole, tasks=tasks[len(learned.tasks) :])
    of_actor = [one for one in watched.asked if "actor" in (one.role, one.name)]
    dev = replace(sampler(config.model, watched, of_actor, *size), memory=0)
    parts = [trained, dev, *local_players(config, whole, *size)] if trained else []
    return on_machine(whole, together(parts))


def beside_plan(config: TrainConfig, material: TrainingData) -> Plan | None:
    """What is played beside supervised training: dev scores, probes, general ability; None where
    nothing is."""
    measured = measured_plan(config, material.measured) if material.measured else None
    general = general_tasks(config)
    if not general:
        return measured
    own = Plan(tasks=general, concurrency=config.concurrency)
    by_itself = sampler(config.model, own, own.asked, config.batch_size, config.device, "auto")
    # The trained model is there already; of one that is not on this machine nothing is known.
    machine = replace(by_itself, memory=0) if by_itself.memory else None
    if measured is None:
        return on_machine(own, machine)
    whole = replace(measured, tasks=(*measured.tasks, *general))
    machines = [one for one in (measured.machine, machine) if one]
    return on_machine(whole, together(machines) or machine)


def general_tasks(config: TrainConfig) -> tuple[TaskPlan, ...]:
    """The replies by which general ability is measured, before and after; none without
    `retention`."""
    if not config.retention:
        return ()
    rows, config = general_rows(), general_settings(config)
    work = _by_task({task.name: task for task, _ in rows}, rows)
    voices = {w.task.name: [_actor(config, w)] for w in work}
    plan = plan_work(work, 2, voices, concurrency=config.concurrency)
    return scaled(plan, 1, "before and after").tasks


def measured_plan(config: TrainConfig, measured: TrainingData) -> Plan:
    """What a supervised run's dev scores and probes will ask for; a probe's model stands beside the
    one that is trained."""
    probe = training_plan(measured.config, measured)
    probes = config.steps // config.probe_every if config.probe_every else 0
    scored = _scorings(config)
    once = _dev(measured.config, measured)
    dev = scaled(replace(probe, tasks=once), scored).tasks if scored else ()
    each = scaled(probe, probes, "probe").tasks if probes else ()
    machine = probe.machine and replace(
        probe.machine,
        memory=probe.machine.memory if probes else 0,
        seconds=probe.machine.seconds * probes,
    )
    return replace(probe, tasks=(*dev, *each), machine=machine)


def _scorings(config: TrainConfig) -> int:
    """How often the weights of a supervised run are scored: by turns, and before probes."""
    turns = [every for every in (config.eval_every, config.probe_every) if every]
    return sum(any((step + 1) % every == 0 for every in turns) for step in range(config.steps))


def comparison_plan(runs: Sequence[PlannedRun]) -> Plan:
    """What `ablate` will ask for: its runs one after the other, by method."""
    arms = Counter(run.arm.spelling for run in runs)
    first = {run.arm.spelling: run.config for run in reversed(runs)}
    plans = [(training_plan(first[arm]), arm, seeds) for arm, seeds in arms.items()]
    tasks = [task for one, arm, seeds in plans for task in scaled(one, seeds, arm).tasks]
    machines = [(one.machine, seeds) for one, _, seeds in plans if one.machine]
    machine = Machine(
        memory=max(one.memory for one, _ in machines),
        seconds=sum(one.seconds * seeds for one, seeds in machines),
        words=machines[0][0].words,
    ) if machines else None  # fmt: skip
    width = min(one.concurrency for one, _, _ in plans)
    return Plan(tasks=tuple(tasks), concurrency=width, machine=machine)


def _learned(config: TrainConfig, objective: Objective, work: list[Work]) -> Plan:
    """The rollouts that are learned from."""
    drafts = _phase(config, work, "drafts", coached=objective.uses_feedback)
    if not objective.refines:
        return drafts
    refined = _phase(config, work, "refined", coached=False)
    told = [_is_coached(config, part) for part in work]
    tasks = tuple(part for part, yes in zip(refined.tasks, told, strict=True) if yes)
    refined = replace(refined, tasks=tasks)
    return replace(drafts, tasks=(*drafts.tasks, *refined.tasks))


def _dev(config: TrainConfig, material: TrainingData) -> tuple[TaskPlan, ...]:
    """The greedy dev scores of `eval_every`."""
    times = config.steps // config.eval_every if config.eval_every else 0
    if not times or not material.dev:
        return ()
    work = [w for w in _by_task(material.tasks, material.dev) if w.examples]
    voices = {w.task.name: _voices(config, w, coached=False) for w in work}
    return scaled(plan_work(work, times, voices, concurrency=config.concurrency), 1, "dev").tasks


def _canaries(config: TrainConfig, material: TrainingData) -> tuple[TaskPlan, ...]:
    """What the judges are asked about canaries; nobody plays them."""
    if config.canary_every is None:
        return ()
    times = -(-config.steps // config.canary_every)
    pool = [(canary.task, canary.example) for canary in canaries_of(material.pool)]
    work = [w for w in _by_task(material.tasks, pool) if w.examples]
    voices = {
        w.task.name: [v for v in _voices(config, w, coached=False) if v.role in PANELS]
        for w in work
    }
    return scaled(
        plan_work(work, times, voices, concurrency=config.concurrency), 1, "canaries"
    ).tasks


def work_of(material: TrainingData) -> list[Work]:
    """The training rows by task, as often as the mixture has them."""
    return _by_task(material.tasks, material.pool)


def _by_task(tasks: Mapping[str, Task], pool: TaskRows) -> list[Work]:
    return [
        Work(task, tuple(example for owner, example in pool if owner is task))
        for task in tasks.values()
    ]


def _supervised_plan(config: TrainConfig, work: list[Work]) -> Plan:
    """Supervised training asks nobody: its plan has episodes and no calls."""
    share = config.steps * config.sft_batch / sum(len(w.examples) for w in work)
    return scaled(plan_work(work, 1, {w.task.name: () for w in work}), share)


def _phase(config: TrainConfig, work: list[Work], label: str, *, coached: bool) -> Plan:
    voices = {w.task.name: _voices(config, w, coached) for w in work}
    rows = sum(len(w.examples) for w in work)
    once = plan_work(work, 1, voices, concurrency=config.concurrency)
    return scaled(once, config.steps * config.prompts_per_step * config.group_size / rows, label)


def _voices(config: TrainConfig, work: Work, coached: bool) -> list[PlayerTerms]:
    actor = _actor(config, work)
    voices = [actor]
    for role, settings in config.players_in(work.task.name):
        voice = voice_of(config, role, settings, actor)
        if role not in EACH:
            voices.append(voice)
        elif coached and _is_coached(config, work):
            voices.append(replace(voice, each=EACH[role]))
    return voices


def _is_coached(config: TrainConfig, work: Work) -> bool:
    """Whether drafts of the task may get feedback."""
    return bool(config.named("coach", work.task.name) != "none")


def _actor(config: TrainConfig, work: Work) -> PlayerTerms:
    """The model that is trained, which speaks on this machine."""
    reply = config.reply_limit(work.task.spec.sampling)
    return PlayerTerms(role="actor", name=config.model, limit=reply, served=False)


def imitation_machine(config: TrainConfig, lesson_tokens: float) -> Machine | None:
    """What supervised steps take, with lessons of so many tokens in the mean: nothing is sampled.
    None where nothing is known of the model."""
    model = footprint(Path(config.model))
    if model is None:
        return None
    kind, speed = device_speed(config.device)
    seconds = model.seconds(0, 0, config.steps * config.sft_batch * lesson_tokens, 1, speed)
    memory, _ = _training_bytes(config, model)
    return Machine(memory=memory, seconds=seconds, words=assumed(model, kind, speed.flops))


def _machine(config: TrainConfig, objective: Objective, learned: Plan) -> Machine | None:
    model = footprint(Path(config.model))
    if model is None:
        return None
    kind, speed = device_speed(config.device)
    memory, itemsize = _training_bytes(config, model)
    memory += model.cache_bytes(config.batch_size, longest_of(learned), itemsize)
    seconds = _seconds(config, objective, learned, model)
    return Machine(memory=memory, seconds=seconds, words=assumed(model, kind, speed.flops))


def _training_bytes(config: TrainConfig, model: Footprint) -> tuple[int, int]:
    """(bytes of the weights and of a pass over a batch, bytes of a number)."""
    kind, _ = device_speed(config.device)
    itemsize = number_bytes(config.dtype, kind, model)
    tokens = config.tokens_per_batch or TOKENS_PER_BATCH[kind]
    memory = model.parameters * itemsize + model.training_bytes(
        tokens, config.lora.r, itemsize, config.full
    )
    return memory, itemsize


def _seconds(config: TrainConfig, objective: Objective, learned: Plan, model: Footprint) -> float:
    """Sampling and learning. A prompt is computed once for its group by both."""
    of_actor = [one for one in learned.asked if one.role == "actor"]
    prompts = sum(one.prompt_tokens for one in of_actor) / config.group_size
    replies = sum(one.reply_tokens for one in of_actor)
    others = [one for one in learned.asked if one.name == "actor" and one.role != "actor"]
    read, written = sum(o.prompt_tokens for o in others), sum(o.reply_tokens for o in others)
    _, speed = device_speed(config.device)
    # Refined replies are learned from twice: as they were said, and as copies.
    trained = prompts + (1.5 if objective.refines else 1) * replies
    return model.seconds(prompts + read, replies + written, trained, config.batch_size, speed)


def _mean_prompt(work: list[Work]) -> float:
    once = plan_work(work, 1, {w.task.name: () for w in work})
    return once.prompt_words * TOKENS_PER_WORD / max(once.episodes, 1)
