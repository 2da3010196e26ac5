"""Estimates of a training run before it starts: calls, tokens, time and memory.

Only rows and file headers are loaded. Training on tasks is a list of loads: which rows are played,
how often, by which players. For conversations, rows are counted and tokens are estimated from a
sample, with the model's own tokenizer if its folder has one, else from the number of words.
`soul plan train …` and `--dry-run` print the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from soulkit.data.corpora.lessons import Lesson
from soulkit.errors import ConfigError
from soulkit.eval.planning import local_players, planned_players, sampler
from soulkit.models.local.footprint import (
    Footprint,
    Machine,
    context_of,
    device_memory,
    footprint,
    free_bytes,
    together,
)
from soulkit.models.players.settings import PANELS
from soulkit.play.plan import TOKENS_PER_WORD, Load, Plan, PlayerTerms, Work, plan_loads
from soulkit.tasks.kit.base import Task
from soulkit.text import byte_size, counted, word_count
from soulkit.train.config import TrainConfig
from soulkit.train.memory import (
    card_lines,
    device_kind,
    planned_memory,
    settings_that_fit,
    way_to_fit,
)
from soulkit.train.objectives.base import Objective
from soulkit.train.rollouts.canaries import canaries_of
from soulkit.train.setup.rows import (
    Corpus,
    TaskRows,
    TrainingData,
    beyond_context,
    general_rows,
    general_settings,
)
from soulkit.types import Example

PER_MESSAGE = 5
"""Approximate number of tokens that a chat template adds to a message."""


def training_plan(data: TrainingData, times: float = 1.0, label: str = "") -> Plan:
    """The plan of `times` runs like this one. `label` is appended to the names of the tasks."""
    config, work = data.config, work_of(data)
    if data.objective is None:
        return _supervised_plan(data, work, times, label)
    learned = _plan(config, _rollouts(config, data.objective, work), times, label)
    watched = _plan(config, [*_dev(data), *_canaries(data), *_general(config)], times, label)
    whole = replace(learned, tasks=(*learned.tasks, *watched.tasks))
    trained = _machine(data, data.objective, learned)
    if trained is None:
        return whole
    others = local_players(config, whole, config.batch_size, config.device, "auto")
    return replace(whole, machine=together([trained, _sampled(config, watched), *others]))


def _plan(config: TrainConfig, loads: Iterable[Load], times: float, label: str) -> Plan:
    scaled = [
        replace(load, times=load.times * times, label=f"{load.label} {label}".strip())
        for load in loads
    ]
    return plan_loads(scaled, concurrency=config.concurrency)


def _sampled(config: TrainConfig, plan: Plan) -> Machine:
    """Time the trained model needs to play a plan; the training counts its memory."""
    actor_loads = [one for one in plan.asked if "actor" in (one.role, one.name)]
    machine = sampler(config.model, plan, actor_loads, config.batch_size, config.device, "auto")
    return replace(machine, memory=0, parts={}, seconds=machine.seconds / at_once(config)[1])


# --- rollouts -------------------------------------------------------------------------------------


def _rollouts(config: TrainConfig, objective: Objective, work: list[Work]) -> Iterator[Load]:
    rows = sum(len(w.examples) for w in work)
    times = config.steps * config.prompts_per_step * config.group_size / rows
    coached = objective.uses_feedback
    yield Load(work, lambda w: _players(config, w, coached), "drafts", times)
    if objective.refines:
        coached_work = [w for w in work if _is_coached(config, w)]
        yield Load(coached_work, lambda w: _players(config, w, False), "refined", times)


def draft_plan(data: TrainingData, task: Task, example: Example) -> Plan:
    """The plan of one draft with its feedback and refined rollout."""
    assert data.objective is not None
    once = {"steps": 1, "prompts_per_step": 1, "group_size": 1}
    config = data.config.model_copy(update=once)
    return _plan(config, _rollouts(config, data.objective, [Work(task, (example,))]), 1.0, "")


def _dev(data: TrainingData, times: int | None = None) -> list[Load]:
    """Greedy dev scores, by default every `eval_every` steps."""
    config = data.config
    if times is None:
        times = config.steps // config.eval_every if config.eval_every else 0
    work = [w for w in _by_task(data.tasks, data.dev) if w.examples] if times else []
    return [Load(work, lambda w: [
        replace(one, role="judge", times=config.judge_samples) if one.role == "dev_judge" else one
        for one in _players(config, w, False)], "dev", times)]  # fmt: skip


def _canaries(data: TrainingData) -> list[Load]:
    """Calls to the judges about canaries, which are scored but not played."""
    config = data.config
    if config.canary_every is None:
        return []
    pool = [(canary.task, canary.example) for canary in canaries_of(data.pool)]
    work = [w for w in _by_task(data.tasks, pool) if w.examples]

    def judges(part: Work) -> list[PlayerTerms]:
        return [one for one in _players(config, part, False) if one.role in PANELS]

    return [Load(work, judges, "canaries", -(-config.steps // config.canary_every))]


def _general(config: TrainConfig) -> list[Load]:
    if not config.retention:
        return []
    rows, settings = general_rows(), general_settings(config)
    work = _by_task({task.name: task for task, _ in rows}, rows)
    return [Load(work, lambda w: [_actor(settings, w)], "before and after", 2)]


def work_of(data: TrainingData) -> list[Work]:
    """The training rows by task, repeated as the mixture repeats them."""
    return _by_task(data.tasks, data.pool)


def _by_task(tasks: Mapping[str, Task], pool: TaskRows) -> list[Work]:
    return [
        Work(task, tuple(example for owner, example in pool if owner is task))
        for task in tasks.values()
    ]


def _players(config: TrainConfig, work: Work, coached: bool) -> list[PlayerTerms]:
    coached = coached and _is_coached(config, work)
    return planned_players(config, work, _actor(config, work), coached=coached)


def _is_coached(config: TrainConfig, work: Work) -> bool:
    return bool(config.named("coach", work.task.name) != "none")


def _actor(config: TrainConfig, work: Work) -> PlayerTerms:
    reply = config.reply_limit(work.task.spec.sampling)
    return PlayerTerms(role="actor", name=config.model, limit=reply, served=False)


# --- supervised training --------------------------------------------------------------------------


def _supervised_plan(data: TrainingData, work: list[Work], times: float, label: str) -> Plan:
    """Supervised steps call no model: their plan has episodes but no calls."""
    config, lessons = data.config, data.config.steps * data.config.sft_batch
    each = lessons / max(len(data.pool), 1)
    lesson_plan = _plan(config, [Load(work, lambda _: (), times=each)], times, label)
    machine = imitation_machine(config, lesson_plan.prompt_words * TOKENS_PER_WORD)
    played = played_beside(data, times, label)
    if played is None:
        return replace(lesson_plan, machine=machine)
    machines = [one for one in (machine, played.machine) if one]
    tasks = (*lesson_plan.tasks, *played.tasks)
    return replace(played, tasks=tasks, machine=together(machines))


def played_beside(data: TrainingData, times: float = 1.0, label: str = "") -> Plan | None:
    """Episodes played during supervised training: dev scores, probes, general ability. None if
    there are none."""
    config, measured = data.config, data.measured
    loads, probe = _general(config), Plan(tasks=())
    if measured is not None:
        # Weights are scored every eval_every steps and before each probe.
        turns = [every for every in (config.eval_every, config.probe_every) if every]
        steps = range(1, config.steps + 1)
        scored = sum(any(step % every == 0 for every in turns) for step in steps)
        loads = [*_dev(measured, scored), *loads]
        if probes := config.steps // config.probe_every if config.probe_every else 0:
            # One process trains it.
            alone = replace(measured, config=measured.config.model_copy(update={"gpus": 1}))
            probe = training_plan(alone, probes * times, f"probe {label}".rstrip())
    sampled = _plan(config, loads, times, label)
    tasks = (*sampled.tasks, *probe.tasks)
    if not tasks and measured is None:
        return None
    # A probe holds a second model in memory.
    machines = [one for one in (probe.machine, _sampled(config, sampled)) if one]
    return replace(sampled, tasks=tasks, machine=together(machines))


# --- conversations --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """Size of one source of conversations."""

    source: str
    rows: int | None
    """None if unknown."""
    ratio: float
    tokens_per_lesson: float
    """Mean over the sample, limited to the longest lesson."""
    learned_share: float
    """Share of its tokens that have a loss."""

    @property
    def lessons_per_pass(self) -> float | None:
        """Lessons from this source in one pass over the mixture."""
        return None if self.rows is None else self.rows * self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlan:
    """The plan of training on conversations, as `--dry-run` and `soul plan` print it."""

    sources: tuple[SourcePlan, ...]
    steps: int
    batch: int
    tokens: int
    """Estimated tokens that the whole run reads."""
    learned_tokens: int
    validation: int
    """Validation conversations per measurement."""
    measurements: int
    machine: Machine | None

    @property
    def steps_per_pass(self) -> int | None:
        """Steps until every source has been used `ratio` times; None if a size is unknown."""
        lessons = [one.lessons_per_pass for one in self.sources]
        known = [one for one in lessons if one is not None]
        return -(-round(sum(known)) // self.batch) if len(known) == len(lessons) else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "steps_per_pass": self.steps_per_pass}


def corpus_plan(config: TrainConfig, corpus: Corpus) -> CorpusPlan:
    """The plan of a run on conversations."""
    counter = TokenCounter(config.model)
    limit = config.lesson_tokens or context_of(config.model)
    sources = tuple(
        _source_plan(label, corpus, one.ratio, counter, limit)
        for label, one in zip(corpus.samples, config.corpora, strict=True)
    )
    weights = [one.lessons_per_pass or 1.0 for one in sources]
    lessons = config.steps * config.sft_batch
    mean = fmean([one.tokens_per_lesson for one in sources], weights)
    learned = fmean([one.tokens_per_lesson * one.learned_share for one in sources], weights)
    measured = sum(map(len, corpus.validation.values()))
    turns = max(config.steps // config.eval_every, 1) if config.eval_every else 1
    return CorpusPlan(
        sources=sources,
        steps=config.steps,
        batch=config.sft_batch,
        tokens=round(lessons * mean),
        learned_tokens=round(lessons * learned),
        validation=measured,
        measurements=turns if measured else 0,
        # A forward pass is a third of a step.
        machine=imitation_machine(config, lessons * mean + turns * measured * mean / 3),
    )


def _source_plan(
    label: str, corpus: Corpus, ratio: float, counter: TokenCounter, limit: int | None
) -> SourcePlan:
    sizes = [counter.sizes(lesson) for lesson in corpus.samples[label]]
    total = sum(min(size, limit or size) for size, _ in sizes)
    learned = sum(part for _, part in sizes) / max(sum(size for size, _ in sizes), 1)
    return SourcePlan(
        source=label, rows=corpus.stream.sizes[label], ratio=ratio,
        tokens_per_lesson=total / max(len(sizes), 1), learned_share=learned,
    )  # fmt: skip


class TokenCounter:
    """Counts tokens without torch: with a model folder's tokenizer.json, else from the words."""

    def __init__(self, model: str) -> None:
        self._tokenizer = None
        file = Path(model).expanduser() / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(file))

    def count(self, text: str) -> int:
        if self._tokenizer is None:
            return round(word_count(text) * TOKENS_PER_WORD)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def sizes(self, lesson: Lesson) -> tuple[int, int]:
        """The estimated number of tokens in a lesson, and of those that are learned."""
        counts = [len(s.token_ids) or self.count(s.text) for s in lesson.segments]
        learned = sum(n + 1 for n, one in zip(counts, lesson.trained, strict=True) if one)
        return sum(counts) + PER_MESSAGE * len(counts), learned


def learned_text(plan: CorpusPlan) -> Iterable[str]:
    """The lines below the table of a plan."""
    per_pass = plan.steps_per_pass
    passes = f", {plan.steps / per_pass:.2f} passes over the rows" if per_pass else ""
    yield f"{plan.steps:,} steps of {plan.batch:,} conversations{passes}"
    yield (
        f"about {plan.tokens:,} tokens, {plan.learned_tokens:,} of them trained on (estimated "
        "from the first conversations of each source)"
    )
    if plan.validation:
        times = "once" if plan.measurements == 1 else f"{plan.measurements} times"
        yield f"{plan.validation:,} validation conversations, measured {times}"


# --- memory and time ------------------------------------------------------------------------------


def imitation_machine(config: TrainConfig, tokens: float) -> Machine | None:
    """Memory and time of supervised steps on this many tokens; None for an unknown model."""
    model = footprint(config.model)
    if model is None:
        return None
    machine = model.on(config.device, 0, trained=tokens / at_once(config)[0])
    return _with_memory(config, model, machine)


def _with_memory(
    config: TrainConfig, model: Footprint, machine: Machine, cache: int = 0,
    beside: Callable[[int], str] = lambda _: "",
) -> Machine:  # fmt: skip
    """The machine of a training, with its memory by part and whether it fits."""
    kind, (free, where) = device_kind(config.device), device_memory(config.device)
    if config.training_gpus > 1 and kind == "cpu" and free is not None:
        free, where = free // config.training_gpus, f"an equal share of {where}"
    plan, fit = planned_memory(config, model, kind, free, cache), ""
    if free is not None:
        settings = settings_that_fit(config, model, kind, plan, free, beside)
        fit = f"fits {where} with" if plan.fits else f"does not fit {where}:"
        fit = f"{fit} {settings}"
    cards = card_lines(config, model, cache, beside) if kind == "cuda" or not plan.fits else ()
    return replace(machine, memory=plan.total, parts=plan.parts, fit=fit, cards=tuple(cards),
                   ranks=tuple(_ranks(config, model, kind)))  # fmt: skip


def at_once(config: TrainConfig) -> tuple[int, int]:
    """How many processes train and how many sample at the same time. On a CPU they share its cores
    and count as one."""
    if device_kind(config.device) == "cpu":
        return 1, 1
    own = 1 if config.engine_choice.kind == "vllm" else config.training_gpus
    return config.training_gpus, config.sampler_gpus or own


def _ranks(config: TrainConfig, model: Footprint, kind: str) -> Iterator[str]:
    """The processes of a job, and what travels between them; nothing for one process."""
    if config.gpus == 1:
        return
    servers, ranks = config.sampler_gpus, config.training_gpus
    also = f" and {counted(servers, 'vLLM server')}" if servers else ""
    each = "GPU; the time assumes equal work for all and does not count transfers"
    if kind == "cpu":
        each = "process; the time is that of one process, because they share the cores"
    yield f"{counted(ranks, 'training rank')}{also}: the memory is per {each}"
    trained = model.parameters if config.full else model.lora_parameters(config.lora.r)
    size = byte_size(4 * trained)
    sums = [f"an update sums {size} of gradients over the ranks"] * (ranks > 1)
    yield "; ".join(sums + [f"a push sends {size} to each server"] * (servers > 0))
    if config.shard and ranks > 1:
        width = 4 if config.full else model.number_bytes(config.dtype, kind)
        split = model.weight_bytes(width, config.quantize) - width * model.vocabulary * model.hidden
        yield f"a pass gathers {byte_size(split)} of weights on each rank, forward and backward"


def _beside(data: TrainingData) -> Callable[[int], str]:
    """A function from the free bytes of a GPU to words about what vLLM would get of them."""
    config, choice = data.config, data.config.engine_choice
    other = choice.kind == "local" or choice.attached or config.full or config.sampler_gpus
    other = other or (choice.kind == "auto" and config.gpus > 1)  # all GPUs train and sample
    if other or device_kind(config.device) == "cpu":
        return lambda _: ""
    from soulkit.train.rollouts.engine_choice import room_beside, server_sizes

    return partial(room_beside, config, server_sizes(config, True, config.model, data))


def _machine(data: TrainingData, objective: Objective, learned: Plan) -> Machine | None:
    config, model = data.config, footprint(data.config.model)
    if model is None:
        return None
    longest = max((task.longest_context for task in learned.tasks), default=0)
    itemsize = model.number_bytes(config.dtype, config.device)
    of_actor = [one for one in learned.asked if one.role == "actor"]
    prompts = sum(one.prompt_tokens for one in of_actor) / config.group_size
    replies = sum(one.reply_tokens for one in of_actor)
    others = [one for one in learned.asked if one.name == "actor" and one.role != "actor"]
    train, sample = at_once(config)
    machine = model.on(
        config.device, 0, batch=config.batch_size,
        prompt=(prompts + sum(one.prompt_tokens for one in others)) / sample,
        reply=(replies + sum(one.reply_tokens for one in others)) / sample,
        # Refined replies are trained on twice: as refined rollouts and as copies.
        trained=(prompts + (1.5 if objective.refines else 1) * replies) / train,
    )  # fmt: skip
    cache = model.cache_bytes(config.batch_size, longest, itemsize)
    cache = 0 if config.sampler_gpus else cache
    return _with_memory(config, model, machine, cache, _beside(data))


def refuse_unfitting(config: TrainConfig) -> None:
    """ConfigError if lessons are longer than the model's context, or if a preset needs more
    memory than the device has."""
    context, model = context_of(config.model), footprint(config.model)
    if config.lesson_tokens and context and config.lesson_tokens > context:
        raise beyond_context(config.lesson_tokens, context, config)
    if config.preset is None or model is None:
        return
    kind, free = device_kind(config.device), free_bytes(config.device)
    needed = planned_memory(config, model, kind, free).total
    if free is None or needed <= free:
        return
    raise ConfigError(
        f"The preset {config.preset} does not fit in memory: training "
        f"{'all weights' if config.full else 'an adapter'} of '{config.model}' on lessons of "
        f"{config.lesson_tokens:,} tokens takes about {needed / 2**30:,.1f} GiB, and "
        f"{free / 2**30:,.1f} GiB are free.",
        "Weights, gradients, AdamW moments and the activations of one lesson are in memory "
        "together.",
        f"To save memory: {way_to_fit(config, model, kind, free)}; or use a smaller model or a "
        "larger device.",
    )
