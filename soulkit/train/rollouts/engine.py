"""The sampler of a training run: the trained model in this process, or vLLM servers.

Which of them is settled in `engine_choice.py`. In this process no weights are transferred, and runs
are reproducible to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from soulkit.errors import ConfigError
from soulkit.eval.run.actor import refuse_idle_flags
from soulkit.eval.run.resume import check_engine
from soulkit.models.base import ChatModel, Sampler
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import Journal
from soulkit.models.players.settings import RoleSettings
from soulkit.models.vllm.manager import (
    LOGS,
    ServerNeed,
    VllmServers,
    actor_need,
    players_needs,
    unstarted_player,
)
from soulkit.models.vllm.server import VllmServer
from soulkit.models.vllm.settings import SamplingEngine
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.train.config import TrainConfig
from soulkit.train.memory import PassChoice
from soulkit.train.model.policy import Policy
from soulkit.train.rollouts.engine_choice import (
    EnginePlan,
    longest_rollout,
    memory_beside_server,
    placed_terms,
    settled_engine,
    starts_on_ray,
    with_share,
)
from soulkit.train.rollouts.push import PUSHES, LogprobProbe, Pusher, ServedPolicy, rank_of
from soulkit.train.setup.data import check_training_prompts
from soulkit.train.setup.rows import TrainingData
from soulkit.train.state.checkpoint import checkpoints, damage, read_position


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
        sleeps = self.config.vllm_sleep and self.choice.starts
        return replace(need, lora_rank=rank_of(self.policy), sleeps=sleeps)

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
        fleet, sleeps = self.servers.fleet(self.need), self.need.sleeps
        servers = self.servers.started(self.need)
        pusher = Pusher(fleet, touchstone, folder, reporter, sleeps, servers)
        return ServedPolicy(model, pusher, journal)

    def player(self, settings: RoleSettings, ledger: Ledger | None) -> ChatModel:
        """A player of kind `vllm`."""
        if not self.any_left:
            return unstarted_player(settings, ledger)
        return self.servers.serving(self.config, ledger)(settings)


def training_engine(
    config: TrainConfig, run: Run, policy: Policy, base: str, plan: EnginePlan, size: PassChoice,
    shared: VllmServers | None = None, reporter: Reporter = SILENT,
) -> TrainingEngine:  # fmt: skip
    """The engine of a run, whose passes have `size`; no server is started yet. ConfigError if vLLM
    cannot sample this model. `shared` are the servers of an enclosing training run."""
    choice = settled_engine(config, plan.early, policy, base)
    asked = choice.kind == "vllm" or bool(config.checkpoints("vllm"))
    left, words = not (asked and is_fully_played(run, config)), ""
    if left and shared is None:
        needed = memory_beside_server(config, base, size)
        config, choice, words = with_share(config, choice, plan.servers, needed)
    refuse_idle_flags(config, starts=choice.starts, attached=choice.attached)
    if words and policy.device.type == "cuda":
        reporter.note(words)
    terms = placed_terms(config)
    if choice.kind == "vllm":
        terms = replace(terms, dtype=policy.computed)
    servers = shared or VllmServers(
        run.path, terms, attached=choice.urls, attached_model=base, proof="pushes",
        reporter=reporter, kind=_kind(config),
    )  # fmt: skip
    return TrainingEngine(config, choice, policy, base, run, servers, shared is not None, left)


def _kind(config: TrainConfig) -> type[VllmServer]:
    """How the servers of a training are started."""
    if not starts_on_ray(config):
        return VllmServer
    from soulkit.train.ranks.ray_launch import RayServer

    return RayServer


def is_fully_played(run: Run, config: TrainConfig) -> bool:
    """Whether no episode of a run is left to play: its last step is taken and measured."""
    for path in reversed(checkpoints(run.checkpoints)):
        if not damage(path):
            position = read_position(path)
            return position.step >= config.steps and not position.unmeasured
    return False
