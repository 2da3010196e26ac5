"""The sampler of a training run: the trained model in this process, or vLLM servers.

`auto` samples in this process: no weights are transferred and runs are reproducible to the bit.
Servers sample if `--engine` says so, or if a resumed run began with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from soulkit.errors import ConfigError
from soulkit.eval.run.actor import refuse_idle_flags
from soulkit.eval.run.resume import begun_engine, check_engine
from soulkit.models.base import ChatModel, Sampler
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import Journal
from soulkit.models.local.quantize import is_quantised
from soulkit.models.players.settings import REPLY, RoleSettings
from soulkit.models.vllm.manager import (
    LOGS,
    MEMORY_FLAG,
    ServerNeed,
    VllmServers,
    actor_need,
    players_needs,
    terms_of,
    unstarted_player,
)
from soulkit.models.vllm.settings import SamplingEngine, interpreter, vllm_version
from soulkit.play.plan import episode_tokens
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.rollouts.push import (
    PUSHES,
    LogprobProbe,
    Pusher,
    ServedPolicy,
    check_adapter,
    rank_of,
)
from soulkit.train.setup.data import check_training_prompts
from soulkit.train.setup.rows import TrainingData
from soulkit.train.state.checkpoint import checkpoints, damage, read_position

SHARED_GPU = 0.4
"""Default share of GPU memory for all servers on the trainer's GPU."""
LOCAL = "use --engine local"


def refuse_engine(config: TrainConfig) -> None:
    """ConfigError for training that vLLM cannot sample for, and for flags without effect."""
    if config.engine_choice.kind == "vllm":
        _refuse_unserved(config)
    choice = config.engine_choice
    refuse_idle_flags(config, starts=choice.starts, attached=choice.attached)


def _refuse_unserved(config: TrainConfig) -> None:
    if config.method == "sft":
        raise ConfigError(
            "soul train sft does not support --engine vllm.",
            "This method samples little: dev scores, probes and the texts of --objective mixsd.",
            f"Remove --engine. To evaluate on vLLM, {LOCAL.replace('local', 'vllm')} in soul eval.",
        )
    if config.quantize != "none" and config.engine_choice.starts:
        raise ConfigError(
            f"--quantize {config.quantize} does not work with --engine vllm.",
            "The server would sample with the full base, which is another policy than the trained "
            "one.",
            f"Remove --engine vllm, or attach servers of the same base in {config.quantize} with "
            "--engine vllm@URL; every push of weights to them is verified.",
        )
    if config.full:
        raise ConfigError(
            "--full does not work with --engine vllm.",
            "Only an adapter can be sent to a running server.",
            f"Remove --full, or {LOCAL}.",
        )
    if config.deterministic:
        raise ConfigError(
            "--deterministic does not work with --engine vllm.",
            "vLLM batches requests by arrival time, which changes the last bits of the results.",
            f"Remove --deterministic (replies still have seeds), or {LOCAL}.",
        )


def check_served(policy: Policy, model: str, *, attached: bool = False) -> None:
    """ConfigError if servers would compute the base differently or do not support the adapter.

    `attached` servers may have a base in nf4: the verification of every push compares it.
    """
    packed = is_quantised(policy.causal)
    if packed and not (attached and packed == "nf4"):
        raise ConfigError(
            f"'{model}' is quantised ({packed}), which does not work with --engine vllm.",
            "Trainer and server unpack such weights differently, so log-probs cannot be compared.",
            f"Use the model in bfloat16 or float32, or {LOCAL}.",
        )
    check_adapter(policy)


@dataclass
class TrainingEngine:
    """The sampler of the trained model, and of the players on vLLM servers."""

    config: TrainConfig
    choice: SamplingEngine
    """Sampler of the trained model; never auto."""
    policy: Policy
    base: str
    """Folder or Hub id of the trained base."""
    run: Run
    servers: VllmServers
    shared: bool
    """Whether the servers belong to another training run, which starts and stops them."""
    any_left: bool
    """Whether any episode is left to play."""

    # -- servers -----------------------------------------------------------------------------------

    @property
    def served(self) -> bool:
        """Whether servers sample the trained model."""
        return self.choice.kind == "vllm"

    @property
    def need(self) -> ServerNeed:
        """What servers need for the trained model: the base, and the rank of its adapter."""
        need = actor_need(self.config, self.base, attached=self.choice.attached)
        return replace(need, lora_rank=rank_of(self.policy))

    @contextmanager
    def started(self, material: TrainingData) -> Iterator[None]:
        """Context in which all needed servers run, if any episode is left to play.

        Blocks; enter it outside an event loop. UserErrors if a server cannot start, and RunError
        for a run whose earlier rollouts were sampled by another engine.
        """
        if self.shared:
            yield
            return
        flags = {"vllm_arg": self.config.vllm_arg}
        players = (material.measured or material).config.model_copy(update=flags)
        needs = [*([self.need] if self.served else []), *players_needs(players)]
        with self.servers:
            if self.any_left and needs:
                self.servers.expect_episodes(longest_rollout(material))
                self.servers.prepare(needs)
            if self.any_left and self.served:
                self._check_abilities()
                limit = self.servers.sampler(self.need).context_limit
                check_training_prompts(self.policy, limit, material, self.config)
            if material.objective is not None:
                check_engine(self.run, self.record())
            yield

    def _check_abilities(self) -> None:
        abilities = self.servers.abilities(self.need)
        if not abilities.adapters:
            raise ConfigError(
                "The attached servers do not accept LoRA adapters.",
                "The trained weights are sent to them as an adapter after every step.",
                "Start them with --enable-lora --max-loras 2 --max-lora-rank RANK and with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the environment, or use --engine vllm.",
            )
        unusual = self.config.temperature != 1.0 and abilities.logprobs != "processed"
        if self.config.sampler_cap is not None and (unusual or abilities.logprobs == "none"):
            raise ConfigError(
                f"--sampler-cap needs the log-probs of the sampling distribution, but the log-prob "
                f"mode of the servers is '{abilities.logprobs}'.",
                "Importance weights compare the trainer with that distribution (temperature "
                f"{self.config.temperature:g}).",
                "Start the servers with --logprobs-mode processed_logprobs, or remove "
                "--sampler-cap.",
            )

    def record(self) -> dict[str, Any]:
        """The record of the engine in the run folder; complete once the servers have started."""
        record: dict[str, Any] = {"kind": self.choice.kind}
        if self.served and self.any_left:
            record |= self.servers.version_record(self.need)
        return record

    @property
    def weights_basis(self) -> str:
        """`verified` for attached servers, because every push to them is verified; else empty."""
        return "verified" if self.choice.attached else ""

    # -- players -----------------------------------------------------------------------------------

    def sampler(
        self, material: TrainingData, journal: Journal | None, reporter: Reporter = SILENT
    ) -> Sampler:
        """The sampler of the trained weights. Close it before the servers stop."""
        config, policy = self.config, self.policy
        if not (self.served and self.any_left):
            return policy.sampler(
                config.batch_size, deterministic=config.deterministic, journal=journal
            )
        model = self.servers.sampler(self.need)
        touchstone = LogprobProbe.of(policy, material.pool, model.context_limit)
        folder = self.run.path.resolve() / LOGS / PUSHES
        pusher = Pusher(self.servers.fleet(self.need), touchstone, folder, reporter)
        return ServedPolicy(model, pusher, journal)

    def player(self, settings: RoleSettings, ledger: Ledger | None) -> ChatModel:
        """A player of kind `vllm`."""
        if not self.any_left:
            return unstarted_player(settings, ledger)
        return self.servers.serving(self.config, ledger)(settings)


def training_engine(
    config: TrainConfig, run: Run, policy: Policy, base: str, shared: VllmServers | None = None,
    reporter: Reporter = SILENT,
) -> TrainingEngine:  # fmt: skip
    """The engine of a run; no server is started yet. ConfigError if vLLM cannot sample this model.
    `shared` are the servers of an enclosing training run."""
    choice = config.engine_choice
    if choice.kind == "auto":
        begun = begun_engine(run).get("kind", "local")
        choice = SamplingEngine("vllm" if begun == "vllm" else "local")
        if remark := _beside_auto(config, policy, choice):
            reporter.note(remark)
    terms = replace(terms_of(config), device=_other_device(policy.device))
    if choice.kind == "vllm":
        check_served(policy, base, attached=choice.attached)
        terms = replace(terms, dtype=policy.computed)
    if terms.device == _name_of(policy.device):
        config = with_memory(config, own_actor=choice.starts)
    servers = shared or VllmServers(
        run.path,
        terms,
        attached=choice.urls,
        attached_model=base,
        proof="pushes",
        reporter=reporter,
    )
    asked = choice.kind == "vllm" or bool(config.checkpoints("vllm"))
    left = not (asked and is_fully_played(run, config))
    return TrainingEngine(config, choice, policy, base, run, servers, shared is not None, left)


def _beside_auto(config: TrainConfig, policy: Policy, choice: SamplingEngine) -> str:
    """A remark about the automatic choice of engine; empty if there is no other."""
    if choice.kind == "vllm":
        return "vLLM samples the rollouts, as at the start of this run"
    if policy.device.type != "cuda" or config.method == "sft" or config.full:
        return ""
    install = vllm_version(interpreter(config.vllm_python))
    if install is None or not install.on_gpu:
        return ""
    return "transformers samples the rollouts in this process; --engine vllm samples them with vLLM"


def with_memory(config: TrainConfig, *, own_actor: bool) -> TrainConfig:
    """The settings with a memory limit for servers on the trainer's GPU, unless the user set one.
    `own_actor`: one of the servers samples the trained model."""
    servers = len(config.checkpoints("vllm")) + own_actor
    if MEMORY_FLAG in config.vllm_arg or not servers:
        return config
    share = {MEMORY_FLAG: f"{SHARED_GPU / servers:.2f}"}
    return config.model_copy(update={"vllm_arg": {**config.vllm_arg, **share}})


def _other_device(trainer: torch.device) -> str:
    """Device for servers: another GPU than the trainer's, if there is one."""
    if trainer.type != "cuda":
        return "auto"
    here = trainer.index or 0
    others = [number for number in range(torch.cuda.device_count()) if number != here]
    return f"cuda:{others[0]}" if others else _name_of(trainer)


def _name_of(trainer: torch.device) -> str:
    """`cuda:N`; empty if the trainer is not on a GPU."""
    return f"cuda:{trainer.index or 0}" if trainer.type == "cuda" else ""


def longest_rollout(material: TrainingData) -> int:
    """Tokens of the longest context of an episode: the longest prompt that is allowed, the lines of
    a dialogue, the feedback that a refined rollout reads, and a reply of full length."""
    played = material.measured or material
    config, longest = played.config, 0
    for task, example in {row.id: (task, row) for task, row in played.pool}.values():
        reply = config.reply_limit(task.spec.sampling)
        prompt = config.max_prompt + reply * config.show_draft
        if played.objective is not None and played.objective.uses_feedback:
            prompt += REPLY["coach"][1]
        longest = max(longest, episode_tokens(task, example, reply, prompt))
    return longest


def is_fully_played(run: Run, config: TrainConfig) -> bool:
    """Whether no episode of a run is left to play: its last step is taken and measured."""
    for path in reversed(checkpoints(run.checkpoints)):
        if not damage(path):
            position = read_position(path)
            return position.step >= config.steps and not position.unmeasured
    return False
