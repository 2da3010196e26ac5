"""Settings of a training run. Defaults follow the paper where it gives a value.

Settings of a single method are declared with that method, in `objectives/`; TrainConfig holds the
settings of all built-in methods. `settings_class` adds those of a method from another package.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from soulkit.config import Settings, read_settings_file, section, setting
from soulkit.errors import ConfigError
from soulkit.models.players.settings import Coach, RoleSettings
from soulkit.option_texts import BY_TASK, row_sources, values_by_task
from soulkit.play.settings import TASKS_OR_SUITE, PlayConfig
from soulkit.train.objectives.base import built_in, built_in_settings, method_class
from soulkit.train.presets import preset_settings
from soulkit.types import LeakCheck

SFT = ("sft",)
_sft = section("Run", only=SFT)
NOTHING_TO_PLAY = (
    "conversations cannot be played as a task: name a task and its rows with "
    "--eval-task TASK --eval-data WHERE"
)


class MeasurementSettings(Settings):
    """Measurements of the weights before, during and after training."""

    retention: bool = setting(
        False,
        help="Measure general ability (the suite `general`: forms of reply that rules can check) "
        "before the first step and after the last.",
    )  # fmt: skip
    retention_tokens: int | None = setting(
        None, gt=0, flag=None, unset="the tasks' own",
        help="Limit of a reply there; a model that thinks needs more than one that answers.",
    )  # fmt: skip
    eval_task: tuple[str, ...] = _sft(
        (), complete="tasks", metavar="TASK", unset="the tasks that are imitated",
        help="Tasks that are played greedily every --eval-every steps, on a dev split of their "
        "training rows; the best weights are those that play best.",
    )  # fmt: skip
    eval_data: dict[str, str] = _sft(
        factory=dict, metavar="[TASK=]WHERE", unset="what was pulled",
        help="Rows of --eval-task, as --data names those of a task; may be repeated.",
    )  # fmt: skip
    probe_every: int | None = _sft(
        None, gt=0, unset="never",
        help="Steps between probes: a short reinforcement from a snapshot of the weights, measured "
        "before and after, and thrown away.",
    )  # fmt: skip
    probe_steps: int = _sft(5, gt=0, help="Steps of a probe.")
    probe_method: str = _sft("ditto", metavar="METHOD", help="What a probe trains by.")
    probe_lr: float | None = _sft(
        None, gt=0, flag=None, unset="that of the method", help="Its learning rate."
    )

    @field_validator("eval_task", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        return [names] if isinstance(names, str) else names

    @model_validator(mode="after")
    def _about_what_is_played(self) -> Self:
        """Refuse settings that have no effect."""
        method, tasks = getattr(self, "method", ""), getattr(self, "tasks", {})
        if method != "sft" and (self.eval_task or self.eval_data or self.probe_every):
            raise ValueError("--eval-task, --eval-data and --probe-every only work with sft")
        if self.eval_data and not self.eval_task:
            raise ValueError("--eval-data needs --eval-task TASK, whose rows it names")
        if strange := set(self.eval_data) - {*self.eval_task, "*"}:
            raise ValueError(
                f"--eval-data names rows for '{min(strange)}', which is not in --eval-task"
            )
        if self.eval_task and not (getattr(self, "eval_every", None) or self.probe_every):
            raise ValueError(
                "--eval-task needs --eval-every STEPS or --probe-every STEPS, which say how often "
                "to play it"
            )
        if self.probe_every and not (self.eval_task or tasks):
            raise ValueError(NOTHING_TO_PLAY)
        return self


RL = ("rollouts",)
MEASURED = ("rollouts", "sft")
"""Methods that can be measured on held-out data during training."""
TASKS_OR_CHATS = (
    "name the training data: conversations (--data FILE --side human), tasks (--task NAME,NAME) "
    "or a suite (--suite small)"
)
TASKS_AND_CHATS = (
    "one run cannot train on both tasks and conversations: tasks teach their gold answers, "
    "conversations teach what people said; train on the conversations first, then on the tasks "
    "with --model RUN/model"
)
OF_CHATS = ("preset", "side", "strip_system", "turns", "validation", "lesson_tokens")
"""Settings that only apply to conversations."""
OF_ROWS = (
    "limit", "where", "example", "rows_per_task", "tasks_file", "coach", "worked_examples",
    "sft_feedback", "sft_feedback_always",
)  # fmt: skip
"""Settings that only apply to rows of tasks."""
DEFAULT_MODEL = "Qwen/Qwen3-VL-8B-Instruct"
"""Default base model for the Soul tasks; there is no default for the user's own data."""
DEFAULT_MODEL_GB = 17.5
"""Download size of the default model."""
TINY = "tiny"
"""Name of a tiny model with random weights, built from the words of the rows."""
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}
"""Default number of tokens in one forward pass, by kind of device."""


def names_chats(method: Any, sources: Sequence[str]) -> bool:
    """Whether --data names conversations, when no task is named."""
    of_tasks = any(re.match(r"synth:|\w+=", text) for text in sources)
    return method == "sft" and bool(sources) and not of_tasks


_objective = section("Objective", only=RL)
_optimizer = section("Optimizer and memory")
_task = section("Task and model")
_rl = section("Run", only=RL)
_feedback = section("Feedback", only=("feedback",))
_sampling = section("Sampling", only=RL)


class LoraSettings(Settings):
    """The trained LoRA adapter (PEFT), applied to every linear layer."""

    r: int = _task(32, gt=0, help="Rank of the adapter.")
    alpha: int | None = _task(
        None, gt=0, flag=None, unset="twice the rank",
        help="Scale of the adapter: its product is multiplied by alpha / rank.",
    )  # fmt: skip
    """Never None after validation."""

    @model_validator(mode="after")
    def _scale(self) -> Self:
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2 * self.r)  # frozen, but not shared yet
        return self


class RolloutSettings(Settings):
    """Rollouts of a step and their feedback."""

    steps: int = setting(
        100, gt=0, section="Rollouts", help="Optimizer steps (sft) or rollout steps."
    )
    prompts_per_step: int = setting(
        64, gt=0, section="Rollouts", only=RL, flag="--prompts", help="Prompts per step."
    )
    group_size: int = setting(
        8, gt=0, section="Rollouts", only=RL, help="Drafts of each prompt (G)."
    )
    temperature: float = _sampling(
        1.0, gt=0, help="Of the sampling, and of the log-probs in the loss."
    )
    max_tokens: int | None = _sampling(
        None, gt=0, unset="the task's own, else 8192",
        help="Limit of a reply; the context may leave less.",
    )  # fmt: skip
    max_prompt: int = _sampling(8192, gt=0, flag=None, help="Longest first prompt, in tokens.")
    feedback_for: Literal["auto", "all", "imperfect", "task"] = _feedback(
        "auto",
        help="Drafts that get feedback: all; imperfect: below the full reward; task: the "
        "reference's gates; auto: all, under protocol reference task.",
    )  # fmt: skip
    coach: Coach | None = _feedback(
        None, only=("feedback", "sft"), metavar=BY_TASK,
        unset="the judge's model on a judged task, else the task's own, else symbolic",
        help="Writes feedback: symbolic (the task's rules), terse (those without remarks on the "
        "draft), none, actor or another player; may be repeated for single tasks.",
    )  # fmt: skip
    leak_check: LeakCheck | None = _feedback(
        None, unset="drop; under protocol reference log",
        help="Feedback that gives the answer away: drop records it and does not use it, log uses "
        "it all the same, off looks for none.",
    )  # fmt: skip
    blind_reader: RoleSettings | None = _feedback(
        None, metavar="WHO",
        help="Model that answers from the feedback alone: finds some leaks that a comparison of "
        "words misses.",
    )  # fmt: skip
    worked_examples: bool = _feedback(
        False, flag=None, only=("feedback", "sft"),
        help="Use feedback that shows how the row is solved, answer included, where a task gives "
        "such; without it such a task is refused by methods that need feedback.",
    )  # fmt: skip
    coach_sees_gold: bool = _feedback(
        False,
        help="Tell a model coach the right answer; the leak check finds feedback that says it, but "
        "not a paraphrase or a code.",
    )  # fmt: skip
    shuffle_feedback: bool = _feedback(
        False, help="Control: every draft gets the feedback of another example's draft."
    )
    show_draft: bool = _feedback(
        False, only=("refined",), help="Refined rollouts see their draft beside the feedback."
    )


class LossSettings(Settings):
    """How sequences become a loss, for all methods."""

    denominator: Literal["joint", "separate"] = _objective(
        "joint", flag=None, help="Token means over all parts together, or over each."
    )
    advantage_std: Literal["group", "batch", "none"] = _objective(
        "group", flag=None,
        help="What divides a centred reward: the spread of its group, of the batch, nothing.",
    )  # fmt: skip
    ratio: Literal["token", "sequence"] = _objective(
        "token", flag=None,
        help="Importance ratio per token, or per sequence (with seq-mean-token-mean).",
    )  # fmt: skip
    eps_low: float = _objective(
        0.2, gt=0, lt=1, flag=None, help="Lower clip bound: ratios below 1 − this."
    )
    eps_high: float = _objective(
        0.28, gt=0, flag=None, help="Upper clip bound: ratios above 1 + this."
    )
    clip_ratio_c: float = _objective(
        10.0, gt=1, flag=None, help="Dual clip of tokens with negative advantage."
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = _objective("token-mean", flag=None, help="How losses of tokens become one.")
    norm_length: int = _objective(
        8192, gt=0, flag=None, help="The fixed length of seq-mean-token-sum-norm."
    )
    kl_coef: float = _objective(
        0.0, ge=0, flag=None,
        help="Penalty on the distance to the base (the adapter switched off), k3 estimate.",
    )  # fmt: skip
    entropy_coef: float = _objective(0.0, ge=0, flag=None, help="Entropy bonus.")
    sampler_cap: float | None = _objective(
        None, gt=0, unset="no correction",
        help="Cap of the sampler/trainer correction; a copy takes its refined twin's.",
    )  # fmt: skip
    mask_truncated: bool = _objective(
        False, flag=None,
        help="Replies that ran into the length limit leave the loss, not the baseline.",
    )  # fmt: skip


class OptimizerSettings(Settings):
    """Optimizer settings and memory limits."""

    lr: float = _optimizer(5e-6, gt=0, help="Learning rate of AdamW.")
    lr_schedule: Literal["constant", "cosine"] = _optimizer(
        "constant", flag=None, help="After the warm-up; cosine falls to a tenth at the last step."
    )
    warmup_steps: int = _optimizer(0, ge=0, flag=None, help="Linear warm-up.")
    beta2: float = _optimizer(0.999, gt=0, lt=1, flag=None, help="Of AdamW.")
    weight_decay: float = _optimizer(0.0, ge=0, flag=None, help="Of AdamW.")
    max_grad_norm: float = _optimizer(
        1.0, gt=0, flag=None, help="Gradients are scaled down to this norm."
    )
    mini_batch_prompts: int = _optimizer(
        16, gt=0, flag=None, only=RL, help="Prompts an update; 64 prompts make four updates a step."
    )
    tokens_per_batch: int | None = _optimizer(
        None, gt=0, unset="{cpu} on a CPU, {cuda} elsewhere".format(**TOKENS_PER_BATCH),
        help="Tokens in one forward pass; same result.",
    )  # fmt: skip
    packing: Literal["auto", "off"] = _optimizer(
        "auto", help="Shared prefixes are computed once where that is cheaper; off: padded rows."
    )
    attention: Literal["auto", "sdpa", "flex"] = _optimizer(
        "auto", help="Kernel of packed attention; auto: flex on a GPU, sdpa elsewhere."
    )
    fused: Literal["auto", "off", "modules", "compile"] = _optimizer(
        "auto", flag=None,
        help="Fewer kernels for the same numbers; auto: adapted layers, modules: norms and "
        "feed-forward parts, too, compile: torch.compile for the parts of each layer.",
    )  # fmt: skip
    activation_checkpointing: bool = _optimizer(False, help="Less memory, more time; same result.")


class MonitoringSettings(Settings):
    """Checkpoints, measurements and checks during training."""

    checkpoint_every: int = setting(50, gt=0, help="Steps between checkpoints.")
    checkpoint_minutes: float = setting(
        15.0, gt=0, help="A checkpoint also at the first step that ends so long after the last."
    )
    keep_last: int = setting(3, gt=0, help="Newest checkpoints that stay.")
    keep_best: int = setting(
        1,
        ge=0,
        only=MEASURED,
        help="Checkpoints that stay beside them: those with the best dev score, of conversations "
        "without one those with the least validation loss.",
    )
    deterministic: bool = setting(
        False, help="Fixed sampling waves and deterministic kernels: resume to the bit; slower."
    )
    eval_every: int | None = setting(
        None, gt=0, only=MEASURED, unset="never",
        help="Steps between greedy scores on a dev split of the training rows; sft: between losses "
        "on the validation conversations, too.",
    )  # fmt: skip
    show_samples: int | None = setting(
        None, ge=0, only=MEASURED, metavar="N", unset="sft: 4 are kept; else none",
        help="Print what the model says on N held-out rows every --eval-every steps, beside the "
        "gold; sft keeps such continuations beside what the person wrote, for soul show.",
    )  # fmt: skip
    canary_every: int | None = _rl(
        None, gt=0, unset="never", help="Steps between checks that no judge likes nonsense."
    )
    canary_margin: float = _rl(
        0.1, ge=0, flag=None,
        help="Share of the metric's scale that a canary may rise above its first score.",
    )  # fmt: skip
    stop_flat: int | None = _rl(
        None, ge=0, metavar="N", unset="10 where players cost money, else never",
        help="End after N steps in a row that learn nothing, with exit code 1; the same command "
        "goes on. 0: never.",
    )  # fmt: skip
    dev_share: float = _rl(
        0.1, gt=0, lt=1, flag=None,
        help="Share of the rows in the dev split, whole stories at a time.",
    )  # fmt: skip
    dev_limit: int = _rl(200, gt=0, flag=None, help="Rows of a task in the dev split at most.")
    dev_by: tuple[str, ...] = _rl(
        (), metavar="COLUMN", unset="stories",
        help="Dev split by combinations of these columns instead: NAME,NAME. What is measured was "
        "never trained on in this combination.",
    )  # fmt: skip
    track: Literal["none", "tensorboard", "wandb", "trackio"] = setting(
        "none", help="Where metrics go beside metrics.jsonl."
    )

    @field_validator("dev_by", mode="before")
    @classmethod
    def _columns(cls, names: Any) -> Any:
        texts = [names] if isinstance(names, str) else names
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            return names
        return [name.strip() for text in texts for name in text.split(",") if name.strip()]

    @model_validator(mode="after")
    def _split_for_something(self) -> Self:
        if self.dev_by and self.eval_every is None:
            raise ValueError("--dev-by needs --eval-every STEPS: without it there is no dev split")
        if self.show_samples and self.eval_every is None:
            raise ValueError(
                "--show-samples needs --eval-every STEPS, which says how often held-out rows are "
                "played"
            )
        return self


if TYPE_CHECKING:
    from soulkit.train.objectives.ditto import DittoSettings
    from soulkit.train.objectives.erl import ErlSettings
    from soulkit.train.objectives.opd import OpdSettings
    from soulkit.train.objectives.sdpo import SdpoSettings
    from soulkit.train.objectives.sft import SftSettings

    class MethodSettings(DittoSettings, ErlSettings, SdpoSettings, OpdSettings, SftSettings):
        """Method settings that other modules read, for the type checker."""
else:
    # Collected from every file in `objectives/`: a new method needs no change here.
    MethodSettings = type("MethodSettings", built_in_settings(), {"__module__": __name__})


class TrainConfig(
    MethodSettings, RolloutSettings, LossSettings, OptimizerSettings, MonitoringSettings,
    MeasurementSettings, PlayConfig,
):  # fmt: skip
    """Settings of one training run, for all built-in methods."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = PlayConfig.OUTSIDE_IDENTITY | {
        "stop_flat", "show_samples",
    }  # fmt: skip

    brought: ClassVar[str] = ""
    """Name of the package method whose settings this class includes."""

    method: str = setting(flag=None, help="The name of the command.")
    model: str = _task(
        DEFAULT_MODEL, min_length=1,
        help="What is trained: a Hugging Face folder or hub id (owner/name@revision).",
    )  # fmt: skip
    tasks: dict[str, float] = _task(
        factory=dict, flag="--task", complete="tasks", metavar="TASK[:RATIO]",
        unset="those of the suite",
        help="Tasks with mixing ratios: a,b:0.5 takes half of the second's rows.",
    )  # fmt: skip
    rows_per_task: int | None = _task(
        None, gt=0, unset="all of them",
        help="Rows of each task, drawn by seed, so that all have equal shares; of a task with "
        "fewer each is taken several times.",
    )  # fmt: skip
    lora: LoraSettings = _task(LoraSettings(), flag=None, help="The adapter that is trained.")
    concurrency: int = setting(
        512, gt=0, section="Calls", only=RL, help="Rollouts under way at once."
    )

    @model_validator(mode="before")
    @classmethod
    def _members(cls, raw: Any) -> Any:
        """Replace a suite by its tasks; a run folder lists only the tasks that it plays."""
        suite = raw.get("suite") if isinstance(raw, Mapping) else None
        if not suite:
            return raw
        members = dict.fromkeys(suite_members(suite, raw.get("tasks_file")), 1.0)
        tasks = dict(raw.get("tasks") or members)
        if tasks != members and not (raw.get("playable") and tasks.items() <= members.items()):
            raise ValueError(TASKS_OR_SUITE)
        return {**raw, "tasks": tasks}

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        name = raw.get("preset") if isinstance(raw, Mapping) else None
        return {**preset_settings(name), **raw} if isinstance(name, str) else raw

    @model_validator(mode="after")
    def _complete(self) -> Self:
        self._tasks_or_chats()
        for name, value in method_class(self.method).own_defaults(self).items():
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)  # frozen, but not shared yet
        return self

    def _tasks_or_chats(self) -> None:
        if self.corpora and self.tasks:
            raise ValueError(TASKS_AND_CHATS)
        if not (self.corpora or self.tasks):
            raise ValueError(TASKS_OR_CHATS if self.method == "sft" else TASKS_OR_SUITE)
        if self.corpora and self.method != "sft":
            raise ValueError(f"only sft trains on conversations; {self.method} plays tasks")
        if self.corpora and self.show_samples and not (self.validation or self.eval_task):
            raise ValueError("--show-samples needs held-out conversations: --validation FILE")
        idle = [name for name in (OF_ROWS if self.corpora else OF_CHATS) if getattr(self, name)]
        if idle and self.corpora:
            raise ValueError(f"{idle[0]} only applies to rows of tasks, not to conversations")
        if idle:
            flag = f"--{idle[0].replace('_', '-')}"
            raise ValueError(
                f"{flag} only applies to conversations: soul train sft --data FILE {flag} …"
            )

    @field_validator("method")
    @classmethod
    def _is_a_method(cls, name: str) -> str:
        try:
            method_class(name)
        except ConfigError as error:
            raise ValueError(f"{error.what} {error.why} {error.way_out}") from error
        return name

    @classmethod
    def owners(cls, name: str) -> frozenset[str]:
        """The methods that declare this setting; `train` for a setting of all methods."""
        names = [*built_in(), *filter(None, [cls.brought])]
        methods = {one for one in names if name in method_class(one).settings.model_fields}
        return frozenset(methods or {"train"})

    @classmethod
    def read_rows(
        cls, name: str, texts: Sequence[str], settings: Mapping[str, Any]
    ) -> dict[str, str]:
        """Rows by task; a WHERE without a task applies to the only task or the whole suite."""
        tasks = list(settings.get("tasks" if name == "data" else "eval_task") or ())
        return values_by_task(texts, ",".join(tasks)) if tasks else row_sources(texts, ())

    @classmethod
    def from_file(
        cls, raw: Mapping[str, Any], over: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Like Settings.from_file; `data` of sft means conversations when no task is named."""
        named = [both.get(name) for both in (raw, over) for name in ("task", "tasks", "suite")]
        data = [raw["data"]] if isinstance(raw.get("data"), str) else raw.get("data")
        method = over.get("method") or raw.get("method")
        if isinstance(data, list) and names_chats(method, data) and not any(named):
            raw = {**{k: v for k, v in raw.items() if k != "data"}, "corpora": data}
        return super().from_file(raw, over)

    @classmethod
    def load(
        cls, file: Path | None = None, env: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None, *, trust: bool = False,
        unread: Collection[str] = (),
    ) -> Self:  # fmt: skip
        """Like Settings.load, with the settings of the chosen method."""
        name = (flags or {}).get("method")
        if name is None and file is not None:
            name = read_settings_file(file).get("method")
        kind = settings_class(name) if cls is TrainConfig and isinstance(name, str) else cls
        if kind is not cls:
            return kind.load(file, env, flags, trust=trust, unread=unread)  # type: ignore[return-value]
        return super().load(file, env, flags, trust=trust, unread=unread)

    def served(self) -> list[tuple[str, RoleSettings]]:
        return [] if self.method == "sft" else super().served()

    @model_validator(mode="after")
    def _checked_leaks(self) -> Self:
        if self.leak_check is None:  # frozen, but not shared yet
            told = "feedback" in method_class(self.method).traits(self.method)
            what = "log" if told and self.protocol == "reference" else "drop"
            object.__setattr__(self, "leak_check", what)
        return self

    @property
    def corpus_names(self) -> list[str]:
        """Names of the conversation sources: from the settings, else from their files."""
        return [one.name or Path(one.path).stem or one.path for one in self.corpora]

    @property
    def feedback_when(self) -> str:
        if self.feedback_for != "auto":
            return self.feedback_for
        return "task" if self.protocol == "reference" else "all"


def suite_members(suite: str, tasks_file: str | None) -> tuple[str, ...]:
    """The tasks of a suite; ConfigError for an unknown suite."""
    from soulkit.tasks.kit.registry import load_registry

    return load_registry(*([Path(tasks_file)] if tasks_file else [])).suite(suite)


@cache
def settings_class(method: str) -> type[TrainConfig]:
    """TrainConfig, extended by the settings of a method from another package."""
    if method in built_in():
        return TrainConfig
    method_settings = method_class(method).settings
    known_already = issubclass(TrainConfig, method_settings)
    declared = set() if known_already else set(vars(method_settings).get("__annotations__", ()))
    shadowed = sorted((declared & set(TrainConfig.model_fields)) - {"method"})
    if shadowed:
        raise ConfigError(
            f"The method '{method}' declares settings that already exist: {', '.join(shadowed)}.",
            "The same name would have two meanings.",
            "Rename them in the package that provides the method.",
        )
    bases = (TrainConfig,) if known_already else (TrainConfig, method_settings)
    kind: type[TrainConfig] = type("TrainConfig", bases, {"__module__": method_settings.__module__})
    kind.brought = method
    return kind
