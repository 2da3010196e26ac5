"""What a training run can be told. Defaults are the paper's, where it names one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from soulkit.config import Settings
from soulkit.models.roles.players import RolesConfig, RoleSettings
from soulkit.types import Protocol

Method = Literal[
    "sft",
    "grpo",
    "ditto",
    "rltf-sd",
    "erl",
    "sdpo-token",
    "sdpo-logits",
    "sdpo-token+grpo",
    "sdpo-logits+grpo",
    "opd",
]


class LoraSettings(Settings):
    """The adapter that is trained (PEFT), on every linear layer."""

    r: int = Field(default=32, gt=0)
    alpha: int = Field(default=64, gt=0)


class TrainConfig(RolesConfig):
    method: Method
    model: str
    """A local Hugging Face folder, a hub id, or `tiny`."""
    adapter: str | None = None
    """Start from this LoRA adapter instead of a new one."""
    tasks: dict[str, float]
    """Task → mixing ratio: 0.5 takes half of its rows, 2.0 takes each twice."""
    tasks_file: str | None = None
    data: dict[str, str] = Field(default_factory=dict)
    """Task → training file, a folder with the released ones, or `synth:N` for N generated rows;
    for tasks that are not named here, the pulled files are looked up."""
    limit: int | None = Field(default=None, gt=0)
    where: dict[str, str] = Field(default_factory=dict)
    """Train only on rows whose tags match: tag → regular expression."""
    protocol: Protocol = "paper"
    seed: int = 0

    # -- rollouts --
    steps: int = Field(default=100, gt=0)
    prompts_per_step: int = Field(default=64, gt=0)
    group_size: int = Field(default=8, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    """Response limit; None takes each task's own."""
    batch_size: int = Field(default=64, gt=0)
    """Sequences that the local sampler generates at once."""
    concurrency: int = Field(default=512, gt=0)

    # -- feedback --
    feedback_for: Literal["auto", "all", "imperfect", "task"] = "auto"
    """`auto`: every draft under protocol paper, the reference's gates under protocol reference."""
    coach: Literal["symbolic", "terse"] | RoleSettings = "symbolic"
    """`symbolic`: the task's rules; `terse`: the same without remarks on the draft; else a player,
    `actor` for the model that is trained."""
    blind_reader: RoleSettings | None = None
    """A model that tries to answer from question, options and feedback alone, eight times per
    feedback; what leads it to the gold above chance leaks, too."""
    worked_examples: bool = False
    """Use feedback that shows how the row is solved, answer included, where a task gives such."""
    shuffle_feedback: bool = False
    """Control: every draft gets the feedback of another example's draft."""

    # -- objective --
    lambda_fb: float = Field(default=1.0, ge=0)
    only_copy: bool = False
    denominator: Literal["joint", "separate"] = "joint"
    advantage_std: Literal["group", "batch", "none"] = "group"
    ratio: Literal["token", "sequence"] = "token"
    eps_low: float = Field(default=0.2, gt=0, lt=1)
    eps_high: float = Field(default=0.28, gt=0)
    clip_ratio_c: float = Field(default=10.0, gt=1)
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    norm_length: int = Field(default=8192, gt=0)
    """The fixed length of `seq-mean-token-sum-norm`."""
    kl_coef: float = Field(default=0.0, ge=0)
    entropy_coef: float = Field(default=0.0, ge=0)
    sampler_cap: float | None = Field(default=None, gt=0)
    """Cap of the sampler/trainer correction; None: no correction."""
    mask_truncated: bool = False
    """Leave completions that ran into the length limit out of the loss."""

    # -- objective: neighbours of Ditto --
    aux_weight: float = Field(default=1.0, ge=0)
    """Weight of the regression (rltf-sd) or imitation (erl) of refined rollouts."""
    accept_from: float | None = None
    """erl imitates refined rollouts of at least this reward; None: those above their draft's."""
    show_draft: bool = False
    """The refined rollout's prompt shows the draft beside the feedback."""
    teacher: Literal["live", "base", "ema"] = "live"
    """Who reads the feedback in sdpo: the current weights, the frozen base, or a moving average."""
    ema_tau: float = Field(default=0.05, gt=0, le=1)
    """Share of the student that the moving average takes up after each optimizer update."""
    teacher_model: str | None = None
    """opd: folder or hub id of the teacher; None: the student's own base, with teacher_adapter."""
    teacher_adapter: str | None = None
    """opd: a LoRA adapter on the teacher, a task expert for instance."""
    opd_form: Literal["token", "logits"] = "token"
    distill_weight: float | None = Field(default=None, ge=0)
    """Weight of the teacher's part in a sum; None: 0.1 in token form, 1.0 in logit form."""
    distill_clip: float = Field(default=5.0, gt=0)
    estimator: Literal["local", "sum", "discount", "window"] = "local"
    """How far ahead a token's distillation advantage looks."""
    estimator_discount: float = Field(default=0.99, gt=0, le=1)
    estimator_window: int = Field(default=32, ge=0)
    distill_centred: bool = False
    """Subtract the group's mean from the distillation advantages."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    divergence_top_k: int | None = Field(default=10, gt=0)
    """Tokens of the student's distribution that are compared; None: the whole vocabulary."""
    divergence_tail: Literal["renorm", "bucket"] = "renorm"
    """The mass outside the top k: left out, or one more outcome."""
    divergence_temperature: float = Field(default=1.0, gt=0)
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)

    # -- optimizer --
    lr: float = Field(default=5e-6, gt=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; `cosine` falls to a tenth at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    beta2: float = Field(default=0.999, gt=0, lt=1)
    mini_batch_prompts: int = Field(default=16, gt=0)
    tokens_per_batch: int | None = Field(default=None, gt=0)
    """Tokens that one forward pass computes; None: 4096 on a CPU, 16384 elsewhere."""
    packing: Literal["auto", "off"] = "auto"
    """`auto`: shared prefixes are computed once where that is cheaper; `off`: padded rows."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Kernel of packed attention; `auto`: flex on a GPU, sdpa elsewhere."""
    fused: Literal["auto", "off", "modules", "compile"] = "auto"
    """Fewer kernels for the same numbers; `auto`: adapted layers, `modules`: norms and feed-forward
    parts, too, `compile`: torch.compile for the parts of each layer."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    lora: LoraSettings = LoraSettings()
    device: str = "auto"
    dtype: str = "auto"

    # -- supervised (sft) --
    full: bool = False
    """SFT of all weights instead of an adapter: how a tiny model gets its first words."""
    sft_batch: int = Field(default=32, gt=0)
    sft_feedback: float = Field(default=0.0, ge=0, le=1)
    """Share of the prompts that hold the symbolic coach's feedback, as on a made-up draft."""
    sft_feedback_always: dict[str, str] = Field(default_factory=dict)
    """Rows whose tags match (tag → regular expression) always hold it."""
    sft_prompt_weight: float = Field(default=0.0, ge=0)
    """Weight of the prompts' own tokens (mean per token) beside the replies': plain language
    modelling, which gives a model from scratch its first grammar."""

    # -- keeping --
    checkpoint_every: int = Field(default=50, gt=0)
    keep_last: int = Field(default=3, gt=0)
    keep_best: int = Field(default=1, ge=0)
    """Checkpoints with the best dev score that are kept beside the newest (with eval_every)."""
    deterministic: bool = False
    """Fixed sampling waves and deterministic kernels: a resumed run is equal to the bit."""
    eval_every: int | None = Field(default=None, gt=0)
    canary_every: int | None = Field(default=None, gt=0)
    """Steps between two scorings of the canaries; None: none."""
    canary_margin: float = Field(default=0.1, ge=0)
    """Share of the metric's scale that a canary may rise above its first score without alarm."""
    dev_share: float = Field(default=0.1, gt=0, lt=1)
    dev_limit: int = Field(default=200, gt=0)
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"

    def served(self) -> list[tuple[str, RoleSettings]]:
        return [] if self.method == "sft" else super().served()

    @property
    def feedback_when(self) -> str:
        if self.feedback_for != "auto":
            return self.feedback_for
        return "task" if self.protocol == "reference" else "all"
