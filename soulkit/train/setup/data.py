"""From a TrainConfig to everything a run needs: tasks, rows, players, the objective.

Errors in the settings are found here, before a run folder is created or a model loaded: unknown
tasks, missing rows, a missing partner, prompts that do not fit.

Dev scores and probes of a supervised run use the code of reinforcement runs. `measured_settings`
derives the settings of such a run from those of the supervised run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.data.rows import dev_split, first_rows
from soulkit.errors import ConfigError, DataError, did_you_mean
from soulkit.models.base import Cast, ChatModel, Player, Sampler, max_reply_tokens, min_reply_tokens
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.players import Players, cast_of
from soulkit.models.players.settings import RoleSettings
from soulkit.play.default_players import (
    called_roles,
    coach_remarks,
    training_player_remarks,
    with_default_players,
)
from soulkit.play.plan import Work
from soulkit.play.requirements import (
    MissingRequirement,
    missing_checkpoints,
    missing_engine,
    missing_keys,
    missing_model,
    missing_roles,
    planned_lines,
    refuse_empty_suite,
    refuse_missing,
    refuse_private_rows,
    rows_to_play,
    split_playable,
)
from soulkit.play.settings import configured_tasks
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, note_start
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import NoRows
from soulkit.tasks.kit.made_rows import MADE
from soulkit.tasks.kit.registry import NotForTraining, Registry, not_for_training
from soulkit.tasks.kit.spec import EVALUATION_ONLY
from soulkit.train.config import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_GB,
    TINY,
    MeasurementSettings,
    TrainConfig,
    suite_members,
)
from soulkit.train.objectives.base import Objective, make_objective, method_class
from soulkit.train.objectives.sft import SftSettings
from soulkit.train.planning import training_plan
from soulkit.train.rollouts.canaries import canaries_of
from soulkit.train.setup.feedback_check import refuse_without_feedback
from soulkit.train.setup.rows import TaskRows, TrainingData, gather_corpus, mixture, no_gold_words
from soulkit.types import Example

if TYPE_CHECKING:
    from soulkit.train.model.policy import Policy


PLAIN = "grpo"
"""Method used for greedy play: it needs no feedback."""
_ALL_ROWS: dict[str, Any] = {"limit": None, "where": {}, "example": (), "rows_per_task": None}
_OWN = ("lr", "lr_schedule", "warmup_steps")
"""Optimizer settings that a probe takes from its own method."""


def measured_settings(config: TrainConfig) -> TrainConfig | None:
    """Settings of the reinforcement run that gives a supervised run its dev rows, players and
    probes; None for a run that plays no episodes."""
    played = config.eval_every or config.probe_every
    if config.method != "sft" or not played or not (config.eval_task or config.tasks):
        return None
    method = config.probe_method if config.probe_every else PLAIN
    update: dict[str, Any] = {
        **_defaults(SftSettings), **_defaults(MeasurementSettings), **_defaults(TrainConfig, _OWN),
        "method": method, "steps": config.probe_steps, "eval_every": config.probe_steps,
        "checkpoint_every": 1, "keep_last": 1, "keep_best": 0, "track": "none",
    }  # fmt: skip
    if config.eval_task:
        tasks = dict.fromkeys(config.eval_task, 1.0)
        update |= {**_ALL_ROWS, "tasks": tasks, "data": config.eval_data, "suite": None,
                   "playable": False}  # fmt: skip
    plain = config.model_copy(update=update)
    usual = method_class(method).own_defaults(plain)
    lr = {"lr": config.probe_lr} if config.probe_lr else {}
    return plain.model_copy(update={**usual, **lr})


def _defaults(kind: Any, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Field → default for the settings of `kind`, or only for `names`."""
    fields = kind.model_fields
    return {name: fields[name].get_default(call_default_factory=True) for name in names or fields}


class UnnamedModel(ConfigError):
    """--model is missing; it has no default, because the data is the user's own."""


ServePlayer = Callable[[RoleSettings, Ledger | None], ChatModel]
"""Creates the player of a model on a vLLM server; its replies are recorded in the ledger."""


def load_training_data(
    config: TrainConfig, *, asking: bool = False, reporter: Reporter = SILENT
) -> TrainingData:
    """Tasks with training and dev rows (split by content hash of the story), or conversations.

    With `asking`, also check that API keys and models are available.
    """
    if config.corpora:
        refuse_unnamed_model(config)
        corpus = gather_corpus(config, reporter)
        refuse_missing(missing_requirements(config) if asking else [], lambda: None)
        return TrainingData({}, [], [], config, corpus=corpus, measured=_measured(config, asking))
    registry = config.registry()
    check_names(config)
    objective = None if config.method == "sft" else make_objective(config)
    if objective is not None:
        from soulkit.train.model.teacher import check_settings

        check_settings(config, objective)
    left_out: dict[str, str] = {}
    if config.playable:
        config, left_out = playable_part(config, registry, objective)
    registry.refuse_rows_only(config.tasks, config.suite)
    registry.refuse_evaluation_only(config.tasks)
    tasks = configured_tasks(registry, config.tasks, config, training=True)
    refuse_scripts(config, tasks)
    refuse_unnamed_model(config, tasks)
    rows_by_task, gaps = rows_and_gaps(tasks, config)
    coached = objective is not None and objective.uses_feedback
    work = [Work(task, rows_by_task.get(name, ())) for name, task in tasks.items()]
    played = work if objective is not None else []  # supervised training calls no players
    remarks = coach_remarks(config, played) if coached else []
    config = with_default_players(config, played, registry, coached=coached, suite=config.suite)
    if objective is not None and objective.judges_itself:
        refuse_other_judges(config, played)
    refuse_dev_judge(config, played)
    refuse_private_rows(played if asking else [], config)
    gaps += missing_roles(played, config)
    if asking:
        gaps += missing_requirements(config)
    # Supervised training needs no players; if they are missing, only losses are measured.
    alone = all(part.roles <= {"actor"} for part in work)
    asked_for = config.eval_task or config.probe_every
    measured = _measured(config, asking) if alone or asked_for else None
    material = replace(
        _mixed(config, tasks, rows_by_task, objective), left_out=left_out, measured=measured,
        players=tuple(training_player_remarks(config, played, registry)), coaches=tuple(remarks),
        planned=tuple(planned_lines(config, work, "train")),
    )  # fmt: skip
    refuse_missing(gaps, lambda: training_plan(material) if material.pool else None, config.suite)
    pool = material.pool
    if config.canary_every is not None:
        canaries_of(pool)
    refuse_without_feedback(config, objective, pool)
    return material


def refuse_other_judges(config: TrainConfig, work: Sequence[Work]) -> None:
    """NotForTraining if a task has no judge, or one that is not the actor."""
    for part in work:
        task, judged = part.task.name, "judge" in called_roles(part)
        names = ", ".join(who.written() for who in config.cast_as("judge", task))
        if not judged or names != "actor":
            why = f"its judge is {names}" if judged else "it is scored without a judge"
            raise NotForTraining(
                f"{config.method} cannot train on {task}: {why}.",
                "In this method the actor judges its own drafts.",
                "Use tasks with a judge and --judge actor (in ablate self-rewarding:judge=actor).",
            )


def refuse_dev_judge(config: TrainConfig, work: Sequence[Work]) -> None:
    """ConfigError for a --dev-judge that also trains the model, or that no task asks."""
    if (judge := config.dev_judge) is None:
        return
    trains = {who.model or who.kind: role for role, who in config.players() if role != "dev_judge"}
    role = trains.get(judge.model or judge.kind, "trained model" if judge.kind == "actor" else "")
    if role or not any("judge" in called_roles(part) for part in work):
        raise ConfigError(
            f"The dev judge {judge.written()} {f'is also the {role}' if role else 'has no task'}.",
            "It must judge a task, and it must not take part in the training that it checks.",
            "Name another model with --dev-judge, or leave it out.",
        )


def refuse_unnamed_model(config: TrainConfig, tasks: Mapping[str, Task] | None = None) -> None:
    """UnnamedModel if no model is named and the data is the user's own: conversations, own rows,
    or an own task."""
    own = [f"the conversations in {source.path}" for source in config.corpora]
    for name, task in (tasks or {}).items():
        source = config.rows_source(name)
        if not task.spec.home.builtin_task:
            own.append(f"your own task '{name}'")
        elif source is not None and not _is_soul(task, source):
            own.append(f"the rows in {source}")
    if own and "model" not in config.model_fields_set:
        raise UnnamedModel(
            f"Training on {own[0]} needs --model.",
            f"The default {DEFAULT_MODEL} (a download of about {DEFAULT_MODEL_GB:g} GB) applies "
            "only to the Soul tasks.",
            f"Add --model FOLDER, --model OWNER/NAME or --model {DEFAULT_MODEL}.",
        )


def _is_soul(task: Task, source: str) -> bool:
    names = {*task.spec.files.train, *task.spec.files.eval}
    return source.startswith(MADE) or Path(source).is_dir() or Path(source).name in names


def download_remark(config: TrainConfig) -> str:
    """A remark about the model that will be downloaded first; empty if it is on this machine."""
    if config.model == TINY or not any(not gap.fatal for gap in missing_model(config.model)):
        return ""
    return (
        f"the model {config.model}{_model_facts(config)} is not on this machine and will be "
        "downloaded first; choose another with --model FOLDER or --model OWNER/NAME"
    )


def _model_facts(config: TrainConfig) -> str:
    """Whether the model is the default, and its size, in brackets; empty for other models."""
    facts = [] if "model" in config.model_fields_set else ["the default"]
    facts += [f"about {DEFAULT_MODEL_GB:g} GB"] if config.model == DEFAULT_MODEL else []
    return f" ({', '.join(facts)})" if facts else ""


def _measured(config: TrainConfig, asking: bool) -> TrainingData | None:
    settings = measured_settings(config)
    return None if settings is None else load_training_data(settings, asking=asking)


def playable_part(
    config: TrainConfig, registry: Registry, objective: Objective | None
) -> tuple[TrainConfig, dict[str, str]]:
    """The settings with only the trainable tasks of the suite, and the reasons why the others are
    skipped; ConfigError if all are."""
    members = suite_members(config.suite or "", config.tasks_file)
    tasks = configured_tasks(registry, members, config, training=True)
    work, left_out = split_playable(
        tasks, config, registry, lambda task: _work(task, config, objective),
        coached=objective is not None and objective.uses_feedback, asking=objective is not None,
    )  # fmt: skip
    refuse_empty_suite(config, work, left_out)
    played = {part.task.name: 1.0 for part in work}
    return config.model_copy(update={"tasks": played}), left_out


def _work(task: Task, config: TrainConfig, objective: Objective | None) -> Work:
    """A task with its training rows; NotForTraining or DataError if it has none."""
    if task.spec.evaluation_only:
        raise not_for_training(f"the task {task.name}")
    rows = training_rows(task, config)
    refuse_marked_rows(task.name, rows)
    if objective is None and task.gold_is_script:
        raise NoRows(*_script_words(task.name))
    if objective is None and all(task.gold(row) is None for row in rows[:1]):
        raise NoRows(*no_gold_words(task.name))
    return Work(task, rows)


def _mixed(
    config: TrainConfig, tasks: Mapping[str, Task], rows_by_task: Mapping[str, tuple[Example, ...]],
    objective: Objective | None,
) -> TrainingData:  # fmt: skip
    train: dict[str, Sequence[Example]] = {}
    dev: TaskRows = []
    for name, rows in rows_by_task.items():
        train[name] = rows
        held: Sequence[Example] = ()
        if (config.eval_every or config.probe_every) and name in (config.eval_task or rows_by_task):
            train[name], held = dev_split(rows, config.dev_share, config.dev_by)
        first = first_rows(held, config.dev_limit, lambda e: e.id)
        dev += [(tasks[name], example) for example in first]
    present = {name: task for name, task in tasks.items() if name in train}
    ratios = {name: ratio for name, ratio in config.tasks.items() if name in train}
    share = config.rows_per_task
    pool = mixture(present, train, ratios, config.seed, share) if train else []
    return TrainingData(present, pool, dev, config, objective)


def rows_and_gaps(
    tasks: Mapping[str, Task], config: TrainConfig
) -> tuple[dict[str, tuple[Example, ...]], list[MissingRequirement]]:
    """Task → its training rows, and the tasks that have none."""
    rows: dict[str, tuple[Example, ...]] = {}
    gaps = []
    for name, task in tasks.items():
        try:
            rows[name] = training_rows(task, config)
            refuse_marked_rows(name, rows[name])
        except NoRows as error:
            gaps.append(MissingRequirement("rows", name, error.way, error))
    return rows, gaps


def missing_requirements(config: TrainConfig) -> list[MissingRequirement]:
    """API keys, model and teacher that are missing on this machine."""
    model = [] if config.model == TINY else missing_model(config.model, config.adapter)
    facts = _model_facts(config)
    model = [gap if gap.fatal else replace(gap, name=f"{gap.name}{facts}") for gap in model]
    teacher = [
        gap
        for adapter in dict.fromkeys(config.teacher_adapters.values()) or [config.teacher_adapter]
        for gap in missing_model(config.teacher_model or config.model, adapter)
    ]
    model += missing_checkpoints(config)
    engine = missing_engine(config, actor=config.engine_choice.starts)
    taught = teacher if config.method == "opd" else []
    return [*missing_keys(config), *model, *taught, *engine]


def training_rows(task: Task, config: TrainConfig) -> tuple[Example, ...]:
    """The chosen rows of `--data`, or else of the pulled training files; DataError if there are
    none."""
    return rows_to_play(task, config, "train").examples


def refuse_marked_rows(task: str, rows: Sequence[Example]) -> None:
    """ConfigError for rows that are marked as for evaluation only."""
    marked = [row for row in rows if row.fields.get(EVALUATION_ONLY)]
    if marked:
        which = f"{len(marked)} of {len(rows)} rows of '{task}', the first {marked[0].source}"
        raise not_for_training(which)


def make_players(
    config: TrainConfig, sampler: Sampler, run: Run, serve: ServePlayer | None = None,
    reporter: Reporter = SILENT,
) -> Players:  # fmt: skip
    """The factory of a run's players; `sampler` is the actor, `serve` creates players on vLLM
    servers."""
    from soulkit.models.local.sampler import LocalModel

    ledger = Ledger(run.ledger_path)
    calls = {**config.call_arguments(ledger), "concurrency": config.concurrency}
    load = partial(LocalModel.load, device=config.device, max_context=config.max_context)
    players = Players(
        ledger, sampler, load, calls, config.settings_of_players(),
        note=partial(note_start, run.path), reporter=reporter,
    )  # fmt: skip
    if serve is not None:
        players.serve = lambda settings: serve(settings, ledger)
    return players


def make_cast(config: TrainConfig, sampler: Sampler, players: Players) -> Cast:
    """The cast of a run: the trained model is the actor; other roles are players or empty."""
    cast = cast_of(config, players, Player(sampler), config.seed)
    seeing = {task: replace(one, coach_sees_gold=config.coach_sees_gold)
              for task, one in cast.by_task.items()}  # fmt: skip
    return replace(cast, coach_sees_gold=config.coach_sees_gold, by_task=seeing)


def make_reader(config: TrainConfig, players: Players) -> Player | None:
    """The model that checks feedback for leaks, if one is named."""
    if config.blind_reader is None:
        return None
    return players.player("blind_reader", config.blind_reader, config.seed)


def refuse_scripts(config: TrainConfig, tasks: Mapping[str, Task]) -> None:
    """ConfigError for supervised training on tasks whose gold is a fixed script."""
    scripted = [name for name, task in tasks.items() if task.gold_is_script]
    if config.method == "sft" and scripted:
        raise ConfigError(*_script_words(", ".join(scripted)))


def _script_words(names: str) -> tuple[str, str, str]:
    return (
        f"The gold of {names} is a script for self-checks, not an answer.",
        "Its lines are the same in every row, so the actor would learn to recite them.",
        "Train it with grpo or ditto, or use sft on another task. If your own task has real gold "
        "answers, set gold_is_script = False in it.",
    )


def check_names(config: TrainConfig) -> None:
    """ConfigError if --data names a task that the run does not train on."""
    for name in config.data:
        if name not in (*config.tasks, "*"):
            raise ConfigError(
                f"--data names rows for '{name}', which this run does not train on.",
                f"This run trains on {', '.join(config.tasks)}.",
                did_you_mean(name, config.tasks),
            )


def check_training_prompts(
    policy: Policy, limit: int | None, material: TrainingData, config: TrainConfig
) -> None:
    """DataError if a training prompt is longer than `max_prompt`, or leaves no room for a reply in
    the model's context."""
    lengths: list[int] = []
    over = long = 0
    for task, example in material.pool:
        prompts = task.previews(example).values()
        prompt = max(len(policy.renderer.prompt_ids(context)) for context in prompts)
        lengths.append(prompt)
        over += not max_reply_tokens(prompt, config.reply_limit(task.spec.sampling), limit)
        long += prompt > config.max_prompt
    if long:
        raise DataError(
            f"{long} of {len(lengths)} prompts are too long: the longest has {max(lengths)} "
            f"tokens, and the limit is {config.max_prompt}.",
            "Prompts are never truncated, because that would change the task.",
            "Use shorter rows, or raise the limit with --set max_prompt=TOKENS.",
        )
    if over:
        least = max(
            min_reply_tokens(config.reply_limit(task.spec.sampling)) for task, _ in material.pool
        )
        raise DataError(
            f"{over} of {len(lengths)} prompts do not fit: the longest needs "
            f"{max(lengths) + least} tokens, {least} of them for the reply, and the model's "
            f"context is {limit}.",
            "Prompts are never truncated, because that would change the task.",
            "Lower --max-tokens, use shorter rows, raise --max-context if it is set, or use a "
            "model with a longer context.",
        )
