"""What `soul train METHOD` can be told: one list of methods, one list of options.

Every subcommand is made from these two lists, so an option has one name, one sentence and one
setting wherever it appears, and a method shows only what changes its result. Whatever is not here
is reached with --set NAME=VALUE. Nothing of the trainer is imported: help answers at once.

To add a method: its line in METHODS, and its name in the groups of the options that matter to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.cli.options import TRUST, pairs, ratios
from soulkit.errors import ConfigError

METHODS = {
    "sft": "Imitate the tasks' gold episodes.",
    "grpo": "Reinforce a scalar reward.",
    "ditto": "Learn from verbal feedback, then act without it.",
    "rltf-sd": "Reward-weighted regression of refined rollouts.",
    "erl": "Imitate refined rollouts that beat their draft.",
    "sdpo-token": "Follow the model that read feedback, token by token.",
    "sdpo-logits": "Match that model's distributions.",
    "sdpo-token+grpo": "sdpo-token and grpo in one loss.",
    "sdpo-logits+grpo": "sdpo-logits and grpo in one loss.",
    "opd": "Follow another teacher on the actor's own drafts.",
}
"""Method → what `soul train --help` says of it."""

RL = frozenset(METHODS) - {"sft"}
REFINED = frozenset({"ditto", "rltf-sd", "erl"})
"""Methods that play every draft again with its feedback."""
SDPO = frozenset({"sdpo-token", "sdpo-logits", "sdpo-token+grpo", "sdpo-logits+grpo"})
TOLD = REFINED | SDPO
"""Methods that ask a coach."""
TOKEN = frozenset({"sdpo-token", "sdpo-token+grpo", "opd"})
LOGITS = frozenset({"sdpo-logits", "sdpo-logits+grpo", "opd"})
SUMS = frozenset({"sdpo-token+grpo", "sdpo-logits+grpo"})
EVERY = frozenset(METHODS)
SFT = frozenset({"sft"})


@dataclass(frozen=True, slots=True)
class Flag:
    """One option: how it is written, what it holds, what it sets, and for which methods."""

    names: str
    kind: Any
    help: str
    methods: frozenset[str] = EVERY
    setting: str | None = None
    """The setting in TrainConfig; None: the option's own name, with underscores."""
    required: bool = False

    @property
    def name(self) -> str:
        """The parameter's name in Python."""
        return self.names.split("/")[0].lstrip("-").replace("-", "_")


SECTIONS: dict[str, tuple[Flag, ...]] = {
    "Task and model": (
        Flag("--task", str, "Tasks with mixing ratios: hitom,paratomi:0.5", required=True),
        Flag("--data", list[str], "TASK=FILE or TASK=synth:N, for each task."),
        Flag("--tasks", Path, "A YAML file with your own tasks.", setting="tasks_file"),
        Flag("--limit", int, "Use at most so many rows of a task."),
        Flag("--protocol", str, "paper or reference.", RL),
        Flag("--model", str, "Hugging Face folder or hub id; 'tiny' for sft.", required=True),
        Flag("--adapter", str, "Start from this LoRA adapter."),
        Flag("--full/--lora", bool, "Train all weights, or an adapter.", SFT),
        Flag("--lora-r", int, "Rank of the adapter; alpha is twice that."),
    ),
    "Rollouts": (
        Flag("--steps", int, "Optimizer steps (sft) or rollout steps."),
        Flag("--prompts", int, "Prompts per step.", RL, "prompts_per_step"),
        Flag("--group-size", int, "Drafts per prompt (G).", RL),
        Flag("--temperature", float, "Of the sampling, and of the loss.", RL),
        Flag("--max-tokens", int, "Response limit.", RL),
        Flag("--partner", str, "Plays the other side.", RL),
        Flag("--environment", str, "Plays the surroundings.", RL),
        Flag("--judge", list[str], "Scores; may be repeated.", RL),
        Flag("--judge-samples", int, "Opinions of each judge.", RL),
        Flag("--judge-combine", str, "Several opinions: mean or vote.", RL),
        Flag("--endpoints", Path, "Models by name: URLs, limits, prices.", RL),
        Flag("--prices", Path, "Your own price table.", RL),
        Flag("--max-cost", float, "Stop after so many US dollars; resumable.", RL),
    ),
    "Feedback": (
        Flag("--coach", str, "symbolic, terse, actor or another player.", TOLD | SFT),
        Flag("--feedback", float, "Share of prompts with feedback.", SFT, "sft_feedback"),
        Flag("--feedback-for", str, "all, imperfect or task.", TOLD),
        Flag("--blind-reader", str, "Model that checks for leaks.", TOLD),
        Flag("--show-draft", bool, "Refined rollouts see their draft, too.", REFINED),
        Flag("--shuffle-feedback", bool, "Control: others' feedback.", TOLD),
    ),
    "Objective": (
        Flag("--lambda-fb", float, "Weight of the fed-back loss.", frozenset({"ditto"})),
        Flag("--only-copy", bool, "Ablation: train copies alone.", frozenset({"ditto"})),
        Flag("--aux-weight", float, "Weight of what refined rollouts teach.",
             frozenset({"rltf-sd", "erl"})),
        Flag("--accept-from", float, "Imitate from this reward on, not from the draft's.",
             frozenset({"erl"})),
        Flag("--teacher", str, "Who reads the feedback: live, base or ema.", SDPO),
        Flag("--ema-tau", float, "Share of the student that ema takes up.", SDPO),
        Flag("--teacher-model", str, "Folder or hub id of the teacher.",
             frozenset({"opd"})),
        Flag("--teacher-adapter", str, "LoRA adapter on the teacher.", frozenset({"opd"})),
        Flag("--opd-form", str, "token or logits.", frozenset({"opd"})),
        Flag("--distill-weight", float, "Weight of the teacher's part.", SUMS),
        Flag("--estimator", str, "Credit over tokens: local, sum, discount, window.", TOKEN),
        Flag("--divergence", str, "reverse_kl, forward_kl or jsd.", LOGITS),
        Flag("--divergence-top-k", int, "Student's likeliest tokens that are compared.", LOGITS),
        Flag("--divergence-tail", str, "The others: renorm (left out) or bucket.", LOGITS),
        Flag("--sampler-cap", float, "Cap of the sampler/trainer correction.", RL),
    ),
    "Optimizer and memory": (
        Flag("--lr", float, "Learning rate."),
        Flag("--batch", int, "Examples per step.", SFT, "sft_batch"),
        Flag("--tokens-per-batch", int, "Tokens in one forward pass; same result."),
        Flag("--packing", str, "auto: shared prefixes once; off: padded rows."),
        Flag("--attention", str, "auto, sdpa or flex."),
        Flag("--activation-checkpointing", bool, "Less memory, more time; same result."),
    ),
    "Run": (
        Flag("--out", Path, "Run folder; the same command resumes it."),
        Flag("--config", Path, "YAML file with settings; flags win over it."),
        Flag("--seed", int, "Keys every random choice of the run."),
        Flag("--deterministic", bool, "Resume to the bit; slower."),
        Flag("--checkpoint-every", int, "Steps between checkpoints."),
        Flag("--keep-last", int, "Newest checkpoints that stay."),
        Flag("--keep-best", int, "Best checkpoints by dev score that stay.", RL),
        Flag("--eval-every", int, "Steps between greedy dev scores.", RL),
        Flag("--canary-every", int, "Steps between checks that no judge likes nonsense.", RL),
        Flag("--track", str, "tensorboard, wandb or trackio, beside metrics.jsonl."),
        Flag("--trust", bool, TRUST),
        Flag("--set", list[str], "Any other setting: NAME=VALUE."),
        Flag("--dry-run", bool, "Print calls, tokens, cost, memory and time."),
        Flag("--json", bool, "Print one JSON document and nothing else on stdout."),
    ),
}  # fmt: skip
"""Section of the help → its options, in reading order."""

BY_HAND = frozenset(
    {"task", "data", "lora_r", "out", "config", "trust", "set", "json", "dry_run"}
)  # fmt: skip
"""Options whose value is no setting as it stands."""


def flags_for(methods: frozenset[str]) -> Iterator[tuple[str, Flag]]:
    """(section, option) of every option that one of `methods` has."""
    for section, flags in SECTIONS.items():
        yield from ((section, flag) for flag in flags if flag.methods & methods)


def settings_of(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, as settings of `method`: those that other methods alone have are left out."""
    found: dict[str, Any] = {
        "method": method,
        "tasks": ratios(given["task"]),
        "data": pairs(given.get("data"), given["task"]),
    }
    for _, flag in flags_for(frozenset({method})):
        value = given.get(flag.name)
        if flag.name not in BY_HAND and value is not None:
            plain = str(value) if isinstance(value, Path) else value
            found[flag.setting or flag.name] = plain
    if given.get("lora_r") is not None:
        found |= {"lora.r": given["lora_r"], "lora.alpha": 2 * given["lora_r"]}
    return found | assignments(given.get("set"))


def assignments(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE settings, values read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for option in options or ():
        name, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(
                f"'{option}' is no setting.",
                "Settings are given as NAME=VALUE.",
                "Write --set kl_coef=0.01, for example.",
            )
        found[name.strip()] = value = yaml.safe_load(text)
        if value is None:
            raise ConfigError(
                f"--set {option} gives no value.",
                "On a command line an empty value is the same as none at all.",
                f"Write '{name.strip()}: null' into a YAML file and give it with --config.",
            )
    return found
