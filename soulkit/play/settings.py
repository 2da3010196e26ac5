"""Settings of all commands that play tasks: the model, the rows, the machine.

Rows are chosen in three steps: read the files, apply --limit, then apply --where and --example.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, field_validator, model_validator

from soulkit.config import MissingSetting, section, setting
from soulkit.errors import ConfigError, DataError
from soulkit.models.base import NO_PROMPT, ModelPrompt
from soulkit.models.local.quantize import Quantize
from soulkit.models.local.threads import MOST_THREADS
from soulkit.models.players.config import RolesConfig
from soulkit.models.vllm.settings import ENGINES, HERE, SamplingEngine, parse_engine
from soulkit.parse import PATTERN_ERRORS
from soulkit.types import MAX_TOKENS, Example, Protocol

if TYPE_CHECKING:
    from soulkit.tasks.kit.base import Task
    from soulkit.tasks.kit.registry import Registry

OWN_OPTIONS = ("hack_penalty", "assistant")
"""Task options that also have their own command-line option."""
TASKS_OR_SUITE = "choose either tasks (--task NAME,NAME) or one suite (--suite NAME), not both"
_task = section("Task and model")
_machine = section("Machine", only=HERE)
_local = section("Machine", only=("local", "train"))


class PlayConfig(RolesConfig):
    """Base of evaluation and training."""

    WHOLE: ClassVar[frozenset[str]] = frozenset({"tasks", "where"})
    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = RolesConfig.OUTSIDE_IDENTITY | {
        "threads", "engine",
    }  # fmt: skip
    _planned: bool = PrivateAttr(default=False)

    model: str = _task(
        min_length=1, metavar="MODEL",
        help="Model to evaluate: a local folder, a Hub id (owner/name@revision), or the model's "
             "name on the server.",
    )  # fmt: skip
    adapter: str | None = _task(
        None, only=("local", "train"), metavar="ADAPTER",
        help="LoRA adapter to evaluate or to continue training: a local folder or a Hub id.",
    )  # fmt: skip
    suite: str | None = _task(
        None, complete="suites", metavar="SUITE", unset="none",
        help="Run all tasks of a suite instead of --task.",
    )  # fmt: skip
    playable: bool = _task(
        False,
        help="Skip tasks of the suite that cannot run here and list them; no suite average is "
             "computed.",
    )  # fmt: skip
    tasks_file: str | None = _task(
        None, flag="--tasks", metavar="FILE", help="YAML file that declares your own tasks."
    )
    data: dict[str, str] = _task(
        factory=dict, metavar="[TASK=]ROWS", unset="the downloaded files",
        help="Rows: a file, a folder, or synth:N to generate N. Repeatable for single tasks.",
    )  # fmt: skip
    limit: int | None = _task(None, gt=0, unset="all", help="Use at most N rows per task.")
    where: dict[str, str] = _task(
        factory=dict, metavar="TAG=REGEX", unset="all rows",
        help="Keep rows whose tag fully matches this regular expression. Repeatable.",
    )  # fmt: skip
    example: tuple[str, ...] = _task(
        (), metavar="ID", unset="all rows", help="Keep only the row with this id. Repeatable."
    )
    protocol: Protocol = _task(
        "paper",
        only=("plays",),
        help="Score as the task's paper describes, or as its published code does.",
    )
    option: dict[str, str] = _task(
        factory=dict, only=("plays",), metavar="NAME=VALUE", unset="set by the task",
        help="Set an option of a task; `soul tasks show TASK` lists them. Repeatable.",
    )  # fmt: skip
    hack_penalty: Literal["train", "off", "always"] | None = _task(
        None, only=("plays",), unset="train",
        help="Penalise replies that an auditor flags as written for the judge: in the training "
             "reward (train), also in the score (always), or not at all (off).",
    )  # fmt: skip
    assistant: Literal["replay", "live"] | None = _task(
        None, only=("plays",), unset="set by the task",
        help="In recorded conversations, repeat the assistant's recorded replies (replay), or "
             "let the partner model write new ones (live).",
    )  # fmt: skip
    seed: int = setting(0, section="Run", help="Random seed.")
    engine: str = _machine(
        "auto",
        metavar="|".join(ENGINES),
        complete="engines",
        help="Engine for local models: vLLM or PyTorch (local).",
    )
    verify_weights: bool = _machine(
        False,
        help="With --engine vllm@URL: compare log-probs of a few prompts between server and "
             "model folder, and stop if they differ. Training always does this.",
    )  # fmt: skip
    batch_size: int = _machine(
        64, gt=0, help="Number of replies that each process on this machine generates at once."
    )
    device: str = _local(
        "auto",
        metavar="DEVICE",
        help="Device for PyTorch: cpu, cuda:0, …; auto uses a GPU if there is one.",
    )
    dtype: str = _local(
        "auto", metavar="DTYPE",
        help="Number format of the weights: float32, bfloat16, …; auto keeps the checkpoint's "
             "format, but uses float32 on a CPU and with --full.",
    )  # fmt: skip
    quantize: Quantize = _local(
        "none",
        help="Quantize the base to 4 bits per weight while loading it (nf4), to train an adapter "
             "in a quarter of the memory. Needs the extra nf4 and samples with --engine local.",
    )  # fmt: skip
    threads: int | None = _local(
        None, gt=0, le=MOST_THREADS,
        unset="OMP_NUM_THREADS, else the number of idle cores; 1 with --deterministic",
        help="Number of CPU threads. A resumed run keeps the number it started with.",
    )  # fmt: skip
    thinking: bool | None = setting(
        None,
        section="Sampling",
        unset="set by the model",
        help="Turn thinking on or off for hybrid models.",
    )

    def registry(self) -> Registry:
        """The declared tasks, including those of `tasks_file`."""
        from soulkit.tasks.kit.registry import load_registry

        return load_registry(*([Path(self.tasks_file)] if self.tasks_file else []))

    def no_tasks(self, what: str = "--task or --suite", fix: str = "") -> MissingSetting:
        """The error for settings without a task; `fix` names further options that help."""
        registry = self.registry()
        tasks = [name for name, spec in registry.specs.items() if not spec.rows_only]
        return MissingSetting(
            "tasks", what,
            f"There are {len(tasks)} tasks, such as {', '.join(tasks[:3])}, and "
            f"{len(registry.suites)} suites, such as {', '.join([*registry.suites][:3])}.",
            f"Add --task NAME,NAME or --suite NAME{fix}; `soul tasks list` shows all of them.",
        )  # fmt: skip

    @model_validator(mode="after")
    def _about_a_suite(self) -> Self:
        if self.playable and self.suite is None:
            raise ValueError("--playable needs a suite (--suite soul-10)")
        return self

    @field_validator("engine")
    @classmethod
    def _sampled(cls, engine: str) -> str:
        parse_engine(engine)
        return engine

    @property
    def instructions(self) -> ModelPrompt:
        """The actor's own system prompt."""
        return NO_PROMPT

    @property
    def planned(self) -> bool:
        """Whether these are the settings of a plan: API keys are not needed, and tasks whose rows
        are not here are counted with their published size."""
        return self._planned

    def for_plan(self) -> Self:
        """These settings for a plan."""
        copy = self.model_copy()
        copy._planned = True
        return copy

    @property
    def engine_choice(self) -> SamplingEngine:
        """The parsed `engine` setting; auto is local for a base that is quantised while loading."""
        choice = parse_engine(self.engine)
        if choice.kind == "auto" and self.quantize != "none":
            return SamplingEngine("local")
        return choice

    @field_validator("where")
    @classmethod
    def _patterns(cls, where: dict[str, str]) -> dict[str, str]:
        for tag, form in where.items():
            try:
                re.compile(form)
            except PATTERN_ERRORS as error:
                why = f"'{form}' for the tag '{tag}' is not a valid regular expression ({error})"
                raise ValueError(why) from error
        return where

    @model_validator(mode="after")
    def _one_word(self) -> Self:
        """Reject different values in --option and in the setting's own command-line option."""
        for name in OWN_OPTIONS:
            own_value, value = getattr(self, name), self.option.get(name)
            if None not in (own_value, value) and own_value != value:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{flag} {own_value} and --option {name}={value} contradict each other"
                )
        return self

    def task_options(self) -> dict[str, Any]:
        """Options that override those of the tasks."""
        own_values = {name: getattr(self, name) or self.option.get(name) for name in OWN_OPTIONS}
        return {**self.option, **own_values}

    def rows_source(self, task: str) -> str | None:
        """The source of a task's rows in --data: the one for this task, else the one for all."""
        return self.data.get(task) or self.data.get("*")

    def reply_limit(self, sampling: Mapping[str, Any]) -> int:
        """The reply limit of a task with this `sampling`, in tokens."""
        limit: int | None = getattr(self, "max_tokens", None)
        return int(limit or sampling.get("max_tokens", MAX_TOKENS))


def chosen_rows(rows: Iterable[Example], config: PlayConfig, task: str) -> tuple[Example, ...]:
    """The rows that match --where and --example; DataError if none does."""
    rows, named = tuple(rows), frozenset(config.example)
    left = tuple(
        row for row in rows if has_tags(row, config.where) and (not named or row.id in named)
    )
    if rows and not left:
        filters = [f"--where {tag}={form}" for tag, form in config.where.items()]
        filters += [f"--example {name}" for name in config.example]
        tags = sorted({name for row in rows for name in row.tags})
        raise DataError(
            f"None of the {len(rows)} rows of '{task}' matches {' '.join(filters)}.",
            f"Tags of the rows: {', '.join(tags) or 'none'}. Example of an id: '{rows[0].id}'.",
            "Change --where or --example, or leave them out.",
        )
    return left


def has_tags(example: Example, where: Mapping[str, str]) -> bool:
    """Whether every tag in `where` fully matches its regular expression."""
    return all(re.fullmatch(form, example.tags.get(tag, "")) for tag, form in where.items())


def configured_tasks(
    registry: Registry, names: Iterable[str], config: PlayConfig, *, training: bool = False
) -> dict[str, Task]:
    """Name → task with the run's settings applied; ConfigError for an option that no task has."""
    options = {name: value for name, value in config.task_options().items() if value is not None}
    tasks = {
        name: registry.task(name, config.protocol, training=training, options=options)
        for name in names
    }
    for option in options:
        if not any(option in task.spec.options for task in tasks.values()):
            raise ConfigError(
                f"No selected task ({', '.join(tasks)}) has an option '{option}'.",
                "This option has no effect here.",
                f"Leave out --option {option}=…; see: soul tasks show TASK"
                if option in config.option
                else f"Leave out --{option.replace('_', '-')}.",
            )
    return tasks
