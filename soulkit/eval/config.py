"""What an evaluation can be told, and what that resolves to: tasks, rows, sampling.

Settings that change only speed, patience and prices are no part of a run's identity: a run that
was cut short by an impatient time-out may be finished with a longer one. Everything else must stay
as it was, or the run folder refuses.

Rows come from `data[task]` (a file, a folder with the released files, or `synth:N`), else from the
folder of `soulkit.data.folder`: what SOULKIT_DATA names, or `data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.api.address import OPENAI_URL, addressed, checked_url
from soulkit.models.ledger.ledger import Mode
from soulkit.models.roles.players import UNSAID, RolesConfig, RoleSettings
from soulkit.play.plan import Work
from soulkit.tasks.base import Task
from soulkit.tasks.loading import examples_for
from soulkit.tasks.registry import Registry, TaskSpec, load_registry
from soulkit.types import Protocol, Sampling


class EvalConfig(RolesConfig):
    """One evaluation: a model, tasks, rows, and how to sample."""

    PATIENCE: ClassVar[frozenset[str]] = RolesConfig.PATIENCE | {
        "concurrency", "batch_size", "max_unscored",
    }  # fmt: skip

    kind: Literal["local", "api"]
    model: str = Field(min_length=1)
    """A folder or hub id (local), or the model's name as the server knows it (api)."""
    adapter: str | None = None
    base_url: str | None = None
    """Of an api model: filled in where it is left out, with OPENAI_BASE_URL or OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"

    # -- rows --
    tasks: tuple[str, ...] = ()
    suite: str | None = None
    tasks_file: str | None = None
    data: dict[str, str] = Field(default_factory=dict)
    """Task → file, folder with the released files, or `synth:N`; `*` is every other task."""
    protocol: Protocol = "paper"
    limit: int | None = Field(default=None, gt=0)
    """Rows of each task: the same ones whatever the order of the file."""
    seed: int = 0
    repeats: int = Field(default=1, gt=0)

    # -- sampling; None is the task's own --
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    thinking: bool | None = None
    reasoning_effort: str | None = None

    # -- calls --
    concurrency: int = Field(default=16, gt=0)
    """Requests in flight at most."""
    price_in: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens."""
    price_out: float | None = Field(default=None, ge=0)
    ledger: Mode = "record"
    ledger_file: str | None = None
    """The ledger to replay; a recording run keeps its own in its folder."""

    # -- local models --
    batch_size: int = Field(default=64, gt=0)
    device: str = "auto"
    dtype: str = "auto"
    max_context: int | None = Field(default=None, gt=0)
    allow_overflow: bool = False
    """Leave prompts that do not fit the context unscored instead of stopping."""

    max_unscored: float = Field(default=0.05, ge=0, le=1)
    """The command fails when a larger share of the episodes stays unscored."""

    @model_validator(mode="before")
    @classmethod
    def _addressed(cls, given: Any) -> Any:
        served = isinstance(given, Mapping) and given.get("kind") == "api"
        return addressed(given) if served else given

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if bool(self.tasks) == (self.suite is not None):
            raise ValueError("name either tasks (--task hitom,tomi) or one suite (--suite small)")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost needs both prices, --price-in and --price-out")
        if self.base_url is not None:
            checked_url(self.base_url)
        if (self.ledger == "replay") != (self.ledger_file is not None):
            raise ValueError(
                "a replay needs the ledger of an earlier run and only a replay takes one: "
                "--ledger replay --ledger-file RUN/ledger.sqlite"
            )
        return self

    def endpoint(self) -> RoleSettings:
        """The actor as a player, where it is served."""
        return RoleSettings(
            model=self.model,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            price_in=self.price_in,
            price_out=self.price_out,
        )

    def served(self) -> list[tuple[str, RoleSettings]]:
        actor = [("actor", self.endpoint())] if self.kind == "api" else []
        return [*actor, *super().served()]

    @classmethod
    def identity_defaults(cls) -> dict[str, Any]:
        return super().identity_defaults() | {UNSAID: OPENAI_URL}

    @property
    def command(self) -> str:
        return f"eval {self.kind}"

    def sampling(self, spec: TaskSpec) -> Sampling:
        """How the actor is sampled in a task: what was asked for, else the task's own."""
        own = spec.sampling
        return Sampling(
            temperature=_first(self.temperature, own.get("temperature"), 1.0),
            top_p=_first(self.top_p, own.get("top_p"), 1.0),
            max_tokens=int(_first(self.max_tokens, own.get("max_tokens"), 512)),
            seed=self.seed,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
        )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


# -- tasks and rows ------------------------------------------------------------------------------


def registry_of(config: EvalConfig) -> Registry:
    return load_registry(*([Path(config.tasks_file)] if config.tasks_file else []))


def task_names(config: EvalConfig, registry: Registry) -> tuple[str, ...]:
    """The tasks to play, each once; ConfigError for one that nobody declared."""
    names = registry.suite(config.suite) if config.suite is not None else config.tasks
    for name in names:
        registry.spec(name)
    return tuple(dict.fromkeys(names))


def load_work(config: EvalConfig) -> list[Work]:
    """The tasks with their examples. ConfigError for unknown names, DataError for unusable rows."""
    registry = registry_of(config)
    names = task_names(config, registry)
    for name in config.data:
        if name != "*" and name not in names:
            raise ConfigError(
                f"There are rows for '{name}', which is not evaluated here.",
                "They would be ignored, and the task they were meant for might have none.",
                did_you_mean(name, names),
            )
    registry.refuse_rows_only(names, config.suite)
    return [_work(registry.task(name, config.protocol), config) for name in names]


def load_rows(config: EvalConfig) -> list[Work]:
    """All rows of the tasks, for whoever looks recorded ones up by id: with --limit, rows that
    were added to a file since would push the old ones out of the sample.
    """
    return load_work(config.model_copy(update={"limit": None}))


def _work(task: Task, config: EvalConfig) -> Work:
    source = config.data.get(task.name) or config.data.get("*")
    loaded = examples_for(task, source, limit=config.limit, seed=config.seed)
    return Work(task, loaded.examples, loaded.bad)
