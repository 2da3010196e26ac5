"""Settings of an evaluation, and the tasks, rows and sampling that they resolve to.

Settings that change only speed, retries or prices are not part of a run's identity: you can resume
a run with a longer time-out. Controls can be added to a finished run. Every other setting must be
the same when a run is resumed.

Rows come from `data[task]` (a file, a folder with the released files, or `synth:N`), else from the
folder in SOULKIT_DATA, else from `data` (see `soulkit.data.files`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from soulkit.config import Settings, section, setting
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.api.addresses import checked_headers, checked_url, with_address
from soulkit.models.base import ModelPrompt
from soulkit.models.ledger.ledger import Mode
from soulkit.models.players.settings import PANELS, VERSION, Coach, RoleSettings, endpoint_named
from soulkit.option_texts import BY_TASK
from soulkit.parse import decoded, read_limited
from soulkit.play.settings import TASKS_OR_SUITE, PlayConfig, configured_tasks
from soulkit.types import Sampling

if TYPE_CHECKING:  # the options of a command are made from this module: they need no tasks
    from soulkit.play.engine import FeedbackPolicy
    from soulkit.play.plan import Work
    from soulkit.play.requirements import MissingRequirement
    from soulkit.tasks.kit.base import Task
    from soulkit.tasks.kit.registry import Registry
    from soulkit.tasks.kit.spec import TaskSpec

_task = section("Task and model")
_api_task = section("Task and model", only=("api",))
_sampling = section("Sampling")
_refined = section("Feedback")
_call = section("Calls", only=("api",))


INSTEAD = "in place of the task's"
"""Ends the label of a system prompt that replaces the task's own."""


class SystemPrompt(Settings):
    """A system prompt of the model's own, with the name of its file."""

    name: str
    text: str = Field(min_length=1)


class GateSettings(Settings):
    """Conditions on the results, outside a run's identity: a finished run can be tested again."""

    gate: tuple[str, ...] = setting(
        (), metavar="GATE",
        help="Condition such as TASK/METRIC>=0.8 that the whole interval of a result must meet, "
             "else exit with code 1. Repeatable.",
    )  # fmt: skip
    gates: str | None = setting(
        None, metavar="FILE", help="File with more gates, one per line or as a YAML list."
    )

    @field_validator("gate", mode="before")
    @classmethod
    def _listed(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, str) else raw

    def gate_texts(self) -> list[str]:
        """All gates."""
        from soulkit.eval.gates import gates_in

        return [*self.gate, *(gates_in(Path(self.gates)) if self.gates else ())]


class EvalConfig(GateSettings, PlayConfig):
    """Settings of one evaluation: model, tasks, rows and sampling."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = PlayConfig.OUTSIDE_IDENTITY - {"max_context"} | {
        "concurrency", "batch_size", "max_unscored", "controls", "batch", "batch_judges",
        "batch_poll_s", *GateSettings.model_fields,
    }  # fmt: skip

    kind: Literal["local", "api"] = setting(
        flag=None, help="Command that made the evaluation: local or api."
    )
    actor_kind: Literal["endpoint", "local", "scripted", "function"] = setting(
        "endpoint", flag=None, help="Kind of player of a model under test that is not a checkpoint."
    )
    base_url: str | None = _api_task(
        None, metavar="URL", unset="OPENAI_BASE_URL, else OpenAI's server",
        help="Address of the server, up to /v1.",
    )  # fmt: skip
    api_key_env: str = _api_task(
        "OPENAI_API_KEY", metavar="NAME", help="Environment variable that holds the API key."
    )

    system_prompt: SystemPrompt | None = _task(
        None, metavar="FILE",
        help="Text file with instructions of the model's own, a folder of them, or none: a "
             "system prompt before the task's prompt.",
    )  # fmt: skip
    prompt_mode: Literal["before", "replace"] = _task(
        "before", help="Put the system prompt before the task's, or in its place (dialogues)."
    )
    headers: dict[str, str] = _api_task(
        factory=dict, metavar="NAME=ENV",
        help="Send the HTTP header NAME with the value of the environment variable ENV. "
             "Repeatable.",
    )  # fmt: skip
    api_version: str | None = _api_task(
        None, pattern=VERSION, metavar="VERSION",
        help="API version of an Azure deployment, unless the address contains it.",
    )  # fmt: skip

    # -- rows --
    tasks: tuple[str, ...] = _task(
        (),
        flag="--task",
        complete="tasks",
        metavar="TASK",
        help="Tasks to run: NAME,NAME. `soul tasks list` shows them.",
    )
    split: Literal["train", "test"] = _task(
        "test", flag=None,
        help="Use the evaluation rows (test), or the training rows, prepared as for training "
             "(train).",
    )  # fmt: skip
    repeats: int = _sampling(1, gt=0, help="Number of episodes per row.")

    # -- refined replies --
    refine: int = _refined(
        0, ge=0, le=9,
        help="Rounds in which a coach gives feedback and the model answers again.",
    )  # fmt: skip
    coach: Coach | None = _refined(
        None, metavar=BY_TASK, unset="as in training",
        help="With --refine: writer of feedback: a model, symbolic, terse, judge, raw or actor.",
    )  # fmt: skip
    show_draft: bool = _refined(
        False, help="With --refine: show the reply together with its feedback."
    )

    controls: bool = setting(
        False,
        section="Run",
        help="Also judge the tasks' controls. They can also be added to a finished run.",
    )

    # -- sampling; None is the task's own --
    temperature: float | None = _sampling(
        None, ge=0, unset="set by the task", help="Sampling temperature; 0 is greedy."
    )
    top_p: float | None = _sampling(
        None,
        gt=0,
        le=1,
        unset="set by the task",
        help="Nucleus sampling: probability mass to keep; 1 keeps every token.",
    )
    top_k: int | None = _sampling(
        None, ge=0, unset="set by the task",
        help="Sample from the N most likely tokens; 0 keeps every token.",
    )  # fmt: skip
    min_p: float | None = _sampling(
        None, ge=0, le=1, unset="set by the task",
        help="Sample only tokens at least X times as likely as the most likely one; 0 keeps "
             "every token.",
    )  # fmt: skip
    max_tokens: int | None = _sampling(
        None, gt=0, unset="set by the task, else 8192",
        help="Maximum tokens per reply, fewer if the context has less room.",
    )  # fmt: skip
    reasoning_effort: str | None = _sampling(
        None,
        only=("api",),
        metavar="EFFORT",
        unset="set by the server",
        help="Reasoning effort in the server's words: low, medium, …",
    )

    # -- calls --
    price_in: float | None = _call(
        None,
        ge=0,
        unset="the built-in price table",
        help="Price in US dollars per million prompt tokens.",
    )
    price_out: float | None = _call(
        None,
        ge=0,
        unset="the built-in price table",
        help="Price in US dollars per million reply tokens.",
    )
    ledger: Mode = setting(
        "record",
        section="Calls",
        help="Record API replies in a ledger, replay them without any call, or do neither.",
    )
    ledger_file: str | None = setting(
        None,
        section="Calls",
        metavar="FILE",
        help="Ledger file to replay from. Recording always uses the file in the run folder.",
    )

    batch: bool = _call(
        False,
        help="Send the calls of the model and the judges through the batch API: half the "
        "price, up to 24 hours; not for dialogues.",
    )
    batch_judges: bool = _call(False, help="Send only the judges' calls through the batch API.")
    batch_poll_s: float = _call(
        30.0, gt=0, flag="--batch-poll", help="Seconds between two status checks of a batch."
    )

    # -- local models --
    allow_overflow: bool = setting(
        False,
        section="Machine",
        only=("local",),
        help="Leave rows unscored if their prompt does not fit, instead of stopping.",
    )

    max_unscored: float = setting(
        0.05,
        ge=0,
        le=1,
        section="Run",
        help="Exit with code 1 if more than this share of episodes is unscored or truncated.",
    )

    @model_validator(mode="before")
    @classmethod
    def _addressed(cls, raw: Any) -> Any:
        served = isinstance(raw, Mapping) and raw.get("kind") == "api"
        if not served or raw.get("actor_kind", "endpoint") != "endpoint":
            return raw
        entry = endpoint_named(raw.get("endpoints"), raw.get("model"))
        if entry and raw.get("base_url") not in (None, entry.get("base_url")):
            raise ValueError(f"--base-url contradicts the endpoint '{raw['model']}' in --endpoints")
        over = {k: v for k, v in raw.items() if k not in entry or (v is not None and k != "model")}
        return with_address({**entry, **over})

    @model_validator(mode="before")
    @classmethod
    def _uncoached(cls, raw: Any) -> Any:
        plain = isinstance(raw, Mapping) and not raw.get("refine") and raw.get("coach") is None
        return {**raw, "coach": "none"} if plain else raw

    @field_validator("system_prompt", mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        if isinstance(raw, list | tuple):
            raise ValueError("a run has one file; only the command takes several")
        raw = str(raw) if isinstance(raw, Path) else raw
        if not isinstance(raw, str) or raw == "none":
            return None if raw == "none" else raw
        try:
            return {"name": Path(raw).stem, "text": decoded(read_limited(Path(raw))).strip()}
        except (OSError, ValueError) as error:
            raise ValueError(f"the file cannot be read: {error}") from None

    @model_validator(mode="after")
    def _refines(self) -> Self:
        if not self.refine and (self.show_draft or self.coach not in (None, "none")):
            raise ValueError("--coach and --show-draft need --refine N")
        if self.refine and self.coach == "none":
            raise ValueError("--refine needs feedback, and --coach none gives none")
        if self.refine and self.batched:
            raise ValueError("--refine does not work with --batch: a round needs the one before")
        return self

    @field_validator("headers")
    @classmethod
    def _named(cls, headers: dict[str, str]) -> dict[str, str]:
        return dict(checked_headers(headers))

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if not self.tasks and self.suite is None:
            raise self.no_tasks()
        if self.tasks and self.suite is not None:
            raise ValueError(TASKS_OR_SUITE)
        if self.prompt_mode == "replace" and self.system_prompt is None:
            raise ValueError("--prompt-mode replace needs --system-prompt FILE")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost estimate needs both --price-in and --price-out")
        if self.base_url is not None:
            checked_url(self.base_url)
        if self.batched and self.ledger == "off":
            raise ValueError(
                "batched calls need the ledger, because their replies can arrive a day later "
                "(leave out --ledger off)"
            )
        if self.kind == "local" and (why := self._unfollowed()):
            raise ValueError(why)
        if (self.ledger == "replay") != (self.ledger_file is not None):
            raise ValueError(
                "use --ledger replay and --ledger-file together: "
                "--ledger replay --ledger-file RUN/ledger.sqlite"
            )
        return self

    def _unfollowed(self) -> str:
        """The error text for settings that running servers cannot apply; empty if there are
        none."""
        here = () if self.verify_weights else ("dtype", "device", "threads")
        names = (*here, "vllm_arg") if self.engine_choice.attached else ()
        usual = self.defaults() if names else {}
        given = [name for name in names if getattr(self, name) != usual[name]]
        if not given or self.checkpoints():  # other local players may use these settings
            return ""
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return f"{flags} cannot be applied to servers that are already running: leave it out"

    def endpoint(self) -> RoleSettings:
        """The actor's settings as a player."""
        if self.actor_kind != "endpoint":
            return RoleSettings(kind=self.actor_kind, model=self.model)
        return RoleSettings(
            model=self.model,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            headers=self.headers,
            api_version=self.api_version,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            price_in=self.price_in,
            price_out=self.price_out,
        )

    @property
    def instructions(self) -> ModelPrompt:
        text = self.system_prompt.text if self.system_prompt else ""
        return ModelPrompt(text, self.prompt_mode == "replace")

    def feedback_policy(self, task: str) -> FeedbackPolicy:
        """The rules for the feedback that `task` gets with `refine`."""
        from soulkit.play.engine import FeedbackPolicy

        return FeedbackPolicy(coach=self.named("coach", task), show_draft=self.show_draft)

    @property
    def prompt_label(self) -> str:
        """`plain (1a2b3c4d)`: name and hash of the model's own system prompt, if it has one."""
        if (own := self.system_prompt) is None:
            return ""
        digest = hashlib.sha256(own.text.encode()).hexdigest()[:8]
        return f"{own.name} ({digest})" + f", {INSTEAD}" * (self.prompt_mode == "replace")

    @property
    def batched(self) -> bool:
        """Whether any role uses batch calls."""
        return self.batch or self.batch_judges

    def by_batch(self, role: str, settings: RoleSettings) -> bool:
        roles = ("actor", *PANELS) if self.batch else PANELS if self.batch_judges else ()
        return role in roles and settings.player_kind.over_http and settings.by_batch

    @property
    def episodes_at_once(self) -> int:
        """Concurrent episodes. A model on this machine needs many of them to fill its batches."""
        return self.concurrency if self.kind == "api" else max(256, 4 * self.batch_size)

    @property
    def limits_players(self) -> bool:
        return self.kind == "local"

    def served(self) -> list[tuple[str, RoleSettings]]:
        served = self.kind == "api" and self.actor_kind == "endpoint"
        actor = [("actor", self.endpoint())] if served else []
        return [*actor, *super().served()]

    @property
    def command(self) -> str:
        return f"eval {self.kind}"

    def sampling(self, spec: TaskSpec) -> Sampling:
        """The actor's sampling in a task: the settings given, else the task's own."""
        defaults = spec.sampling
        limit = {"max_tokens": self.reply_limit(defaults)}
        return Sampling.first_of(limit, vars(self), defaults)


# -- tasks and rows ------------------------------------------------------------------------------


def task_names(config: EvalConfig, registry: Registry) -> tuple[str, ...]:
    """The tasks to play, without duplicates; ConfigError for an unknown task."""
    names = registry.suite(config.suite) if config.suite is not None else config.tasks
    for name in names:
        registry.spec(name)
    return tuple(dict.fromkeys(names))


def load_work(config: EvalConfig) -> list[Work]:
    """The tasks with their examples. ConfigError for unknown names, DataError for unusable rows."""
    registry = config.registry()
    names = _named_tasks(config, registry)
    if config.playable:
        return _playable_work(config, registry, names)
    registry.refuse_rows_only(names, config.suite)
    tasks = _configured(registry, names, config)
    return [_work(task, config) for task in tasks.values()]


def work_and_missing(
    config: EvalConfig, registry: Registry
) -> tuple[list[Work], list[MissingRequirement]]:
    """(playable tasks with their examples, missing requirements). A task whose rows are missing has
    no examples."""
    from soulkit.play.plan import Work
    from soulkit.play.requirements import MissingRequirement, unplayable_tasks
    from soulkit.tasks.kit.loading import NoRows

    work: list[Work] = []
    names = _named_tasks(config, registry)
    if config.playable:
        return _playable_work(config, registry, names), []
    gaps = unplayable_tasks(registry, names, config.suite)
    for name, task in _configured(registry, names, config).items():
        if registry.spec(name).rows_only:
            continue
        try:
            work.append(_work(task, config))
        except NoRows as error:
            work.append(Work(task, ()))
            gaps.append(MissingRequirement("rows", name, error.way, error))
    return work, gaps


def _named_tasks(config: EvalConfig, registry: Registry) -> tuple[str, ...]:
    names = task_names(config, registry)
    for name in config.data:
        if name != "*" and name not in names:
            raise ConfigError(
                f"--data names rows for '{name}', but that task is not selected.",
                "They would be ignored. The name may be misspelled.",
                did_you_mean(name, names),
            )
    return names


def left_out(config: EvalConfig, work: Sequence[Work]) -> dict[str, str]:
    """Suite task that is missing from `work` → why it cannot be played here."""
    from soulkit.play.requirements import split_playable

    registry, played = config.registry(), {part.task.name for part in work}
    names = task_names(config, registry) if config.suite is not None else ()
    tasks = _configured(registry, names, config) if names else {}
    others = {name: task for name, task in tasks.items() if name not in played}
    return split_playable(others, config, registry, lambda task: _work(task, config))[1]


def _playable_work(config: EvalConfig, registry: Registry, names: Sequence[str]) -> list[Work]:
    from soulkit.play.requirements import refuse_empty_suite, split_playable

    tasks = _configured(registry, names, config)
    work, reasons = split_playable(tasks, config, registry, lambda task: _work(task, config))
    refuse_empty_suite(config, work, reasons)
    return work


def _configured(registry: Registry, names: Sequence[str], config: EvalConfig) -> Mapping[str, Task]:
    """The configured tasks. For training rows they have the word budgets and default players of
    training; evaluation-only tasks are rejected."""
    training = config.split == "train"
    if training:
        registry.refuse_evaluation_only(names)
    return configured_tasks(registry, names, config, training=training)


def load_rows(config: EvalConfig) -> list[Work]:
    """All rows of the tasks, for finding recorded rows by id. --limit is ignored, because rows
    added to a file since the run would change the sample.
    """
    return load_work(config.model_copy(update={"limit": None}))


def _work(task: Task, config: EvalConfig) -> Work:
    from soulkit.play.plan import Work
    from soulkit.play.requirements import rows_to_play

    loaded = rows_to_play(task, config, config.split)
    return Work(task, loaded.examples, loaded.bad, task.controls if config.controls else ())
