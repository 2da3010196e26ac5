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
    "--eval-task TASK --eval-data ROWS"
)


class MeasurementSettings(Settings):
    """Measurements of the weights before, during and after training."""

    retention: bool = setting(
        False,
        help="Evaluate the `general` suite (reply formats that rules can check) before and after "
             "training.",
    )  # fmt: skip
    retention_tokens: int | None = setting(
        None, gt=0, flag=None, unset="set by the tasks",
        help="Maximum tokens per reply in the `general` suite; thinking models need more.",
    )  # fmt: skip
    eval_task: tuple[str, ...] = _sft(
        (), complete="tasks", metavar="TASK", unset="the tasks of --task",
        help="Tasks to evaluate greedily every --eval-every steps, on a dev split of their "
             "training rows. Their score selects the best checkpoint.",
    )  # fmt: skip
    eval_data: dict[str, str] = _sft(
        factory=dict, metavar="[TASK=]ROWS", unset="the downloaded files",
        help="Rows of --eval-task, written like --data. Repeatable.",
    )  # fmt: skip
    probe_every: int | None = _sft(
        None, gt=0, unset="never",
        help="Every N steps, run a probe: train a snapshot of the weights by reinforcement for a "
             "few steps, measure the gain, and discard it.",
    )  # fmt: skip
    probe_steps: int = _sft(5, gt=0, help="Training steps per probe.")
    probe_method: str = _sft("ditto", metavar="METHOD", help="Training method of a probe.")
    probe_lr: float | None = _sft(
        None, gt=0, flag=None, unset="set by the method", help="Learning rate of a probe."
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
            raise ValueError("--eval-data needs --eval-task TASK: it names the rows of that task")
        if strange := set(self.eval_data) - {*self.eval_task, "*"}:
            raise ValueError(
                f"--eval-data names rows for '{min(strange)}', which is not in --eval-task"
            )
        if self.eval_task and not (getattr(self, "eval_every", None) or self.probe_every):
            raise ValueError(
                "--eval-task needs --eval-every STEPS or --probe-every STEPS, which set how often "
                "the task is played"
            )
        if self.probe_every and not (self.eval_task or tasks):
            raise ValueError(NOTHING_TO_PLAY)
        return self


RL = ("rollouts",)
MEASURED = ("rollouts", "sft")
"""Methods that can be measured on held-out data during training."""
TASKS_OR_CHATS = (
    "--task, --suite or --data",
    ", or chat logs with --data FILE --side human",
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
    """Whether --data names conversations (if no task is named)."""
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

    r: int = _task(32, gt=0, help="Rank of the LoRA adapter.")
    alpha: int | None = _task(
        None, gt=0, flag=None, unset="twice the rank",
        help="LoRA alpha: the adapter's output is multiplied by alpha / rank.",
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
        100,
        gt=0,
        section="Rollouts",
        help="Rollout steps, or optimizer steps for sft.",
    )
    prompts_per_step: int = setting(
        64, gt=0, section="Rollouts", only=RL, flag="--prompts", help="Prompts per training step."
    )
    group_size: int = setting(8, gt=0, section="Rollouts", only=RL, help="Drafts per prompt (G).")
    temperature: float = _sampling(
        1.0, gt=0, help="Temperature of sampling and of the log-probs in the loss."
    )
    max_tokens: int | None = _sampling(
        None, gt=0, unset="set by the task, else 8192",
        help="Maximum tokens per reply, fewer if the context has less room.",
    )  # fmt: skip
    vllm_sleep: bool = setting(
        False, section="Machine", only=RL,
        help="With a vLLM server on the trainer's GPU: release its memory during updates.",
    )  # fmt: skip
    max_prompt: int = _sampling(
        8192, gt=0, flag=None, help="Maximum tokens in an episode's first prompt."
    )
    feedback_for: Literal["auto", "all", "imperfect", "task"] = _feedback(
        "auto",
        help="Drafts that get feedback: all, those below the full reward (imperfect), or those "
             "the reference code selects (task). auto: all, or task with --protocol reference.",
    )  # fmt: skip
    coach: Coach | None = _feedback(
        None, only=("feedback", "sft"), metavar=BY_TASK,
        unset="the judge's model on judged tasks, else set by the task or symbolic",
        help="Model that writes feedback, or: symbolic (the task's rules), terse (the rules "
             "without remarks), judge (its model), raw (its verdict), actor, none. Repeatable for "
             "single tasks.",
    )  # fmt: skip
    leak_check: LeakCheck | None = _feedback(
        None, unset="drop; log with --protocol reference",
        help="Feedback that gives the answer away: record it without using it (drop), record and "
             "use it (log), or do not check (off).",
    )  # fmt: skip
    blind_reader: RoleSettings | None = _feedback(
        None, metavar="PLAYER",
        help="Model that tries to answer from the feedback alone. It finds leaks that a word "
             "comparison misses.",
    )  # fmt: skip
    worked_examples: bool = _feedback(
        False, flag=None, only=("feedback", "sft"),
        help="Allow feedback that shows the full solution with the answer, for tasks that have "
             "no other. Methods that need feedback reject such tasks without this option.",
    )  # fmt: skip
    coach_sees_gold: bool = _feedback(
        False,
        help="Show the right answer to the coach model. The leak check finds feedback that "
             "repeats it, but not paraphrases or codes.",
    )  # fmt: skip
    shuffle_feedback: bool = _feedback(
        False, help="Control experiment: give every draft the feedback of another example."
    )
    show_draft: bool = _feedback(
        False,
        only=("refined",),
        help="Show the draft together with the feedback in refined rollouts.",
    )


class LossSettings(Settings):
    """How sequences become a loss, for all methods."""

    denominator: Literal["joint", "separate"] = _objective(
        "joint",
        flag=None,
        help="Average token losses over all parts jointly, or over each part separately.",
    )
    advantage_std: Literal["group", "batch", "none"] = _objective(
        "group", flag=None,
        help="Divide centred rewards by the standard deviation of the group, of the batch, or "
             "not at all.",
    )  # fmt: skip
    ratio: Literal["token", "sequence"] = _objective(
        "token", flag=None,
        help="Importance ratio per token or per sequence (needs seq-mean-token-mean).",
    )  # fmt: skip
    eps_low: float = _objective(
        0.2, gt=0, lt=1, flag=None, help="Lower clip bound of the ratio: 1 − this value."
    )
    eps_high: float = _objective(
        0.28, gt=0, flag=None, help="Upper clip bound of the ratio: 1 + this value."
    )
    clip_ratio_c: float = _objective(
        10.0, gt=1, flag=None, help="Dual-clip bound for tokens with negative advantage."
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = _objective("token-mean", flag=None, help="How token losses are combined into one loss.")
    norm_length: int = _objective(
        8192, gt=0, flag=None, help="Fixed length for seq-mean-token-sum-norm."
    )
    kl_coef: float = _objective(
        0.0, ge=0, flag=None,
        help="Coefficient of the KL penalty against the base model (adapter off), k3 estimator.",
    )  # fmt: skip
    entropy_coef: float = _objective(0.0, ge=0, flag=None, help="Coefficient of the entropy bonus.")
    sampler_cap: float | None = _objective(
        None, gt=0, unset="no correction",
        help="Upper bound on the importance weight trainer/sampler; a copy uses the weight of "
             "its refined rollout.",
    )  # fmt: skip
    mask_truncated: bool = _objective(
        False, flag=None,
        help="Exclude truncated replies from the loss but keep them in the group baseline.",
    )  # fmt: skip


class OptimizerSettings(Settings):
    """Optimizer settings and memory limits."""

    lr: float = _optimizer(5e-6, gt=0, help="Learning rate (AdamW).")
    lr_schedule: Literal["constant", "cosine"] = _optimizer(
        "constant",
        flag=None,
        help="Learning rate schedule after the warm-up; cosine ends at one tenth.",
    )
    warmup_steps: int = _optimizer(0, ge=0, flag=None, help="Steps of linear warm-up.")
    beta2: float = _optimizer(0.999, gt=0, lt=1, flag=None, help="Beta2 of AdamW.")
    weight_decay: float = _optimizer(0.0, ge=0, flag=None, help="Weight decay of AdamW.")
    max_grad_norm: float = _optimizer(
        1.0, gt=0, flag=None, help="Maximum gradient norm (clipping)."
    )
    mini_batch_prompts: int = _optimizer(
        16,
        gt=0,
        flag=None,
        only=RL,
        help="Prompts per optimizer update; 64 prompts per step make four updates.",
    )
    tokens_per_batch: int | None = _optimizer(
        None, gt=0,
        unset="{cpu} on a CPU, {cuda} on a GPU, more or less by free memory".format(
            **TOKENS_PER_BATCH
        ),
        help="Tokens per forward pass. The result stays the same.",
    )  # fmt: skip
    packing: Literal["auto", "off"] = _optimizer(
        "auto",
        help="Compute shared prefixes once if that is cheaper (auto), or use padded rows (off).",
    )
    attention: Literal["auto", "sdpa", "flex"] = _optimizer(
        "auto", help="Attention kernel for packed sequences; auto: flex on a GPU, sdpa on a CPU."
    )
    fused: Literal["auto", "off", "modules", "compile"] = _optimizer(
        "auto", flag=None,
        help="Fuse kernels without changing results: adapted layers, norms and feed-forward parts "
             "(modules), or torch.compile on the parts of each layer (compile). auto: modules on a "
             "GPU, only adapted layers on a CPU.",
    )  # fmt: skip
    activation_checkpointing: Literal["auto", "on", "off"] = _optimizer(
        "auto",
        help="Recompute activations to save memory: slower, same result. auto: only if they do not "
             "fit in memory.",
    )  # fmt: skip

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """YAML reads a bare `on` as true."""
        return ("on" if value else "off") if isinstance(value, bool) else value


class RanksSettings(Settings):
    """The processes of a training job (ranks). They change how long it takes, not what it learns,
    up to rounding."""

    gpus: int = setting(
        1, gt=0, section="Machine",
        help="GPUs to use; with --device cpu, processes. Under torchrun, its number of processes.",
    )  # fmt: skip
    sampler_gpus: int = setting(
        0, ge=0, section="Machine", only=RL, metavar="K",
        help="With --engine vllm: use K of the --gpus for sampling servers, the rest for training.",
    )  # fmt: skip
    shard: bool = setting(
        False, section="Machine",
        help="Split the weights of the base model over the GPUs (FSDP2) instead of copying them.",
    )  # fmt: skip
    launcher: Literal["local", "ray"] = setting(
        "local", section="Machine",
        help="Start the processes on this machine, or on a Ray cluster (extra `ray`).",
    )  # fmt: skip

    @property
    def training_gpus(self) -> int:
        """Number of ranks: the GPUs that do not sample. ConfigError if none is left."""
        if self.sampler_gpus < self.gpus:
            return self.gpus - self.sampler_gpus
        raise ConfigError(
            f"--sampler-gpus {self.sampler_gpus} leaves no GPU for training.",
            f"The run uses {self.gpus} in all (--gpus).",
            f"Use --gpus {self.sampler_gpus + 1} or more, or a smaller --sampler-gpus.",
        )


class MonitoringSettings(Settings):
    """Checkpoints, measurements and checks during training."""

    checkpoint_every: int = setting(50, gt=0, help="Save a checkpoint every N steps.")
    checkpoint_minutes: float = setting(15.0, gt=0, help="Also save a checkpoint every X minutes.")
    keep_last: int = setting(3, gt=0, help="Keep the N newest checkpoints.")
    keep_best: int = setting(
        1,
        ge=0,
        only=MEASURED,
        help="Also keep the N best checkpoints by dev score (or validation loss).",
    )
    max_exposure: float | None = setting(
        None, gt=0, only=SFT, metavar="BITS", unset="no limit",
        help="Chat logs with canaries (soul data plant): keep the newest checkpoint whose "
             "once-planted canaries have a median exposure below this, and stop at the second "
             "above.",
    )  # fmt: skip
    deterministic: bool = setting(
        False,
        help="Sample in fixed batches with deterministic kernels, so that a resumed run "
        "is bit-identical. Slower.",
    )
    eval_every: int | None = setting(
        None, gt=0, only=MEASURED, unset="never",
        help="Every N steps, score a dev split of the training rows; for sft also measure the "
             "validation loss.",
    )  # fmt: skip
    show_samples: int | None = setting(
        None, ge=0, only=MEASURED, metavar="N", unset="4 for sft, else none",
        help="Every --eval-every steps, print the model's replies on N held-out rows next to the "
             "gold answers. sft also stores them for `soul show`.",
    )  # fmt: skip
    canary_every: int | None = _rl(
        None,
        gt=0,
        unset="never",
        help="Every N steps, check that the judge still rejects nonsense replies.",
    )
    canary_margin: float = _rl(
        0.1, ge=0, flag=None,
        help="Allowed rise of a nonsense reply's score above its first score, as a share of the "
             "metric's scale.",
    )  # fmt: skip
    stop_flat: int | None = _rl(
        None, ge=0, metavar="N", unset="10 if the run calls paid API models, else never",
        help="Stop with exit code 1 after N consecutive steps without any learning signal; 0 "
             "never stops. The same command resumes.",
    )  # fmt: skip
    dev_judge: RoleSettings | None = _rl(
        None, metavar="PLAYER",
        help="Judge outside the training that also scores the dev split; it selects best weights.",
    )  # fmt: skip
    stop_gap: int = _rl(
        0, ge=0, metavar="N", unset="never",
        help="Stop with exit code 1 when the training judge's dev score has risen over N "
             "evaluations while that of --dev-judge has fallen, significantly.",
    )  # fmt: skip
    dev_share: float = _rl(
        0.1, gt=0, lt=1, flag=None,
        help="Share of the rows in the dev split. Rows of one story stay together.",
    )  # fmt: skip
    dev_limit: int = _rl(200, gt=0, flag=None, help="Maximum rows per task in the dev split.")
    dev_by: tuple[str, ...] = _rl(
        (), metavar="COLUMN", unset="split by story",
        help="Build the dev split from unseen combinations of these columns: NAME,NAME.",
    )  # fmt: skip
    track: Literal["none", "tensorboard", "wandb", "trackio"] = setting(
        "none", help="Also log metrics to this service; metrics.jsonl is always written."
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
        if (self.dev_judge and self.eval_every is None) or (self.stop_gap and not self.dev_judge):
            raise ValueError("--dev-judge needs --eval-every STEPS, and --stop-gap needs both")
        if self.show_samples and self.eval_every is None:
            raise ValueError(
                "--show-samples needs --eval-every STEPS, which says how often held-out rows are "
                "played"
            )
        return self


if TYPE_CHECKING:
    from soulkit.train.objectives.critique_grpo import CritiqueGrpoSettings
    from soulkit.train.objectives.ditto import DittoSettings
    from soulkit.train.objectives.erl import ErlSettings
    from soulkit.train.objectives.opd import OpdSettings
    from soulkit.train.objectives.sdpo import SdpoSettings
    from soulkit.train.objectives.self_rewarding import SelfRewardingSettings
    from soulkit.train.objectives.sft import SftSettings

    class MethodSettings(
        DittoSettings, ErlSettings, CritiqueGrpoSettings, SdpoSettings, SelfRewardingSettings,
        OpdSettings, SftSettings,
    ):  # fmt: skip
        """Type declarations of method settings that other modules read."""
else:
    # Collected from every file in `objectives/`: a new method needs no change here.
    MethodSettings = type("MethodSettings", built_in_settings(), {"__module__": __name__})


class TrainConfig(
    MethodSettings, RolloutSettings, LossSettings, OptimizerSettings, MonitoringSettings,
    RanksSettings, MeasurementSettings, PlayConfig,
):  # fmt: skip
    """Settings of one training run, for all built-in methods."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = PlayConfig.OUTSIDE_IDENTITY | {
        "stop_flat", "stop_gap", "show_samples", "vllm_sleep", *RanksSettings.model_fields,
    }  # fmt: skip

    brought: ClassVar[str] = ""
    """Name of the package method whose settings this class includes."""

    method: str = setting(flag=None, help="Training method.")
    model: str = _task(
        DEFAULT_MODEL, min_length=1, metavar="MODEL",
        help="Model to train: a local folder or a Hub id (owner/name@revision).",
    )  # fmt: skip
    tasks: dict[str, float] = _task(
        factory=dict, flag="--task", complete="tasks", metavar="TASK[:RATIO]",
        unset="the tasks of --suite",
        help="Tasks to train on, with mixing ratios: a,b:0.5 uses half of the rows of b.",
    )  # fmt: skip
    rows_per_task: int | None = _task(
        None, gt=0, unset="all rows",
        help="Use N random rows per task; smaller tasks are repeated.",
    )  # fmt: skip
    lora: LoraSettings = _task(LoraSettings(), flag=None, help="LoRA adapter to train.")
    concurrency: int = setting(
        512, gt=0, section="Calls", only=RL, help="Maximum number of rollouts at once."
    )

    @model_validator(mode="before")
    @classmethod
    def _members(cls, raw: Any) -> Any:
        """Replace a suite by its tasks; a run folder lists only the tasks that it plays."""
        suite = raw.get("suite") if isinstance(raw, Mapping) else None
        if not suite or not isinstance(suite, str):
            return raw
        file, tasks = raw.get("tasks_file") or "", raw.get("tasks") or {}
        if not isinstance(file, str | Path) or not isinstance(tasks, Mapping):
            return raw  # reported as the wrong type of the setting
        members = dict.fromkeys(suite_members(suite, file), 1.0)
        tasks = tasks or members
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
            chats = self.method == "sft"
            raise self.no_tasks(*(TASKS_OR_CHATS if chats else ()))
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
        """Rows by task; ROWS without a task applies to the only task or the whole suite."""
        tasks = list(settings.get("tasks" if name == "data" else "eval_task") or ())
        return values_by_task(texts, ",".join(tasks)) if tasks else row_sources(texts, ())

    @classmethod
    def from_file(
        cls, raw: Mapping[str, Any], over: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Like Settings.from_file; for sft without a task, `data` names conversations."""
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


def suite_members(suite: str, tasks_file: str | Path | None) -> tuple[str, ...]:
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
