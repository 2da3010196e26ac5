"""Chooses what samples the rollouts: the trained model in this process, or vLLM servers.

    auto ──▶ the engine of the earlier rollouts ──▶ vLLM, if it is installed for a GPU, can serve
             the trained model, and has room beside the training ──▶ transformers in this process

Servers use GPUs that no training rank uses: `--sampler-gpus K` of them, else one. If there is none,
they share that of the first rank: the training keeps what its passes need, the servers get the rest
(`train/memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from soulkit.errors import ConfigError
from soulkit.eval.run.actor import refuse_idle_flags
from soulkit.eval.run.resume import begun_engine
from soulkit.models.local.footprint import context_of, footprint
from soulkit.models.local.loading import pick_device
from soulkit.models.local.quantize import is_quantised
from soulkit.models.local.threads import local_processes
from soulkit.models.players.settings import REPLY
from soulkit.models.vllm.manager import (
    MEMORY_FLAG,
    ServerTerms,
    actor_need,
    check_needs,
    joined_needs,
    players_needs,
    served_context,
    terms_of,
)
from soulkit.models.vllm.settings import (
    SamplingEngine,
    interpreter,
    parse_engine,
    vllm_version,
)
from soulkit.play.plan import episode_tokens
from soulkit.runs.folder import BEGUN, Run
from soulkit.runs.jsonl import has_lines
from soulkit.text import byte_size, counted
from soulkit.train.config import TrainConfig
from soulkit.train.memory import (
    ASLEEP,
    CACHED,
    USABLE,
    Card,
    PassChoice,
    ServerMemory,
    card_of,
    gpu_split,
    pass_beside,
    server_memory,
    training_memory,
)
from soulkit.train.model.policy import Policy
from soulkit.train.ranks.world import launched
from soulkit.train.rollouts.push import check_adapter
from soulkit.train.setup.rows import TrainingData

SHARED_GPU = 0.4
"""Share of the trainer's GPU for all servers, if the size of a model is unknown."""
LOCAL = "use --engine local"


def refuse_engine(config: TrainConfig) -> None:
    """ConfigError for training that vLLM cannot sample for, and for flags without effect."""
    choice, placed = engine_of_settings(config), placement(config)
    if choice.kind == "vllm":
        _refuse_unserved(config, choice)
    refuse_idle_flags(config, starts=choice.starts, attached=choice.attached)
    if config.vllm_sleep and not (choice.starts and placed.shared):
        raise ConfigError(
            "--vllm-sleep has no effect: this run starts no vLLM server on the trainer's GPU.",
            "The option releases the server's memory during updates on the same card.",
            "Leave out --vllm-sleep, or train on one GPU with --engine vllm.",
        )


def _refuse_unserved(config: TrainConfig, choice: SamplingEngine) -> None:
    if config.method == "sft":
        raise ConfigError(
            "soul train sft does not support --engine vllm.",
            "This method samples little: dev scores, probes and the texts of --objective mixsd.",
            "Remove --engine. To evaluate on vLLM, use --engine vllm in soul eval.",
        )
    if config.quantize != "none" and choice.starts:
        raise ConfigError(
            f"--quantize {config.quantize} does not work with --engine vllm.",
            "The server would sample with the full base, which is not the trained policy.",
            f"Remove --engine vllm, or attach servers of the base in {config.quantize} with "
            "--engine vllm@URL.",
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
    Attached servers may have a base in nf4, which every push compares with the trainer's."""
    packed = is_quantised(policy.causal)
    if packed and not (attached and packed == "nf4"):
        raise ConfigError(
            f"'{model}' is quantised ({packed}), which does not work with --engine vllm.",
            "Trainer and server unpack such weights differently, so log-probs cannot be compared.",
            f"Use the model in bfloat16 or float32, or {LOCAL}.",
        )
    check_adapter(policy)


# --- the choice -----------------------------------------------------------------------------------


def engine_of_settings(config: TrainConfig, run: Run | None = None) -> SamplingEngine:
    """The engine of a training before its model is loaded; never auto. `run` is the run to
    resume."""
    choice = parse_engine(config.engine)
    choice = choice if choice.kind != "auto" else _automatic(config, run)
    if config.sampler_gpus and not choice.starts:
        raise ConfigError(
            f"--sampler-gpus {config.sampler_gpus} has no effect: this run starts no vLLM server.",
            "The servers are running already." if choice.attached
            else "The training processes sample their rollouts themselves.",
            "Leave out --sampler-gpus, or use --engine vllm.",
        )  # fmt: skip
    return choice


def _automatic(config: TrainConfig, run: Run | None) -> SamplingEngine:
    begun = begun_engine(run).get("kind") if run is not None else None
    if run is not None and (begun or has_lines(run.episodes)):
        return SamplingEngine("vllm" if begun == "vllm" else "local", why=BEGUN)
    if config.sampler_gpus:
        return SamplingEngine("vllm", why="--sampler-gpus")
    if config.method == "sft" or pick_device(config.device).type != "cuda":
        return SamplingEngine("local")
    try:
        _refuse_unserved(config, SamplingEngine("vllm"))
    except ConfigError as error:
        return SamplingEngine("local", why=error.what.rstrip("."))
    install = vllm_version(interpreter(config.vllm_python))
    if install is None or not (install.on_gpu and install.supported):
        return SamplingEngine("local", why="no supported vLLM for the GPU is installed")
    placed = placement(config)
    if placed.shared and len(placed.ranks) > 1:
        return SamplingEngine("local", why="every GPU trains; --sampler-gpus K gives some to vLLM")
    return SamplingEngine("vllm", why="installed, and there is a GPU")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is known about a run's engine before the trained model is loaded."""

    early: SamplingEngine = field(default=SamplingEngine("local"))
    servers: Sequence[ServerMemory] = ()
    """Servers that start on the trainer's card, the trained model's last."""

    @classmethod
    def of(cls, config: TrainConfig, run: Run | None, base: str, material: TrainingData) -> Self:
        early = engine_of_settings(config, run)
        if run is None and early.starts:  # before a folder is bound to these settings
            check_needs([actor_need(config, base)], placed_terms(config))
        return cls(early, servers_on_card(config, early, base, material))


def settled_engine(
    config: TrainConfig, early: SamplingEngine, policy: Policy, base: str
) -> SamplingEngine:
    """`early`, or local if auto chose vLLM and it cannot serve the loaded model; ConfigError if
    vLLM was requested or has sampled earlier rollouts."""
    if early.kind != "vllm":
        return early
    try:
        check_served(policy, base, attached=early.attached)
    except ConfigError as error:
        return _or_local(error, config, early)
    return early


def _or_local(error: ConfigError, config: TrainConfig, choice: SamplingEngine) -> SamplingEngine:
    asked = choice.why == BEGUN or config.vllm_sleep or config.vllm_arg or config.shard
    if parse_engine(config.engine).kind == "auto" and not asked:
        return SamplingEngine("local", why=error.what.rstrip("."))
    raise error


def choice_words(choice: SamplingEngine) -> str:
    """The line about an automatic choice; empty if there was nothing to choose."""
    who = "vLLM" if choice.kind == "vllm" else "transformers"
    return f"{who} samples the rollouts: {choice.why}" if choice.why else ""


# --- the GPUs of one machine ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of the training ranks of a machine, and of its vLLM servers."""

    ranks: tuple[str, ...]
    servers: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether a server uses the GPU of a rank, because there is no other one."""
        return self.servers[0] in self.ranks


def place(first: str, visible: int, ranks: int, sampler_gpus: int) -> Placement:
    """Place `ranks`, of which the first uses the device `first`, and servers on a machine with
    `visible` GPUs; ConfigError if there are not enough."""
    kind, _, number = first.partition(":")
    if kind != "cuda":
        return Placement((first,) * ranks, ("auto",) * max(sampler_gpus, 1))
    training = [int(number or 0)] if ranks == 1 else list(range(ranks))
    others = [one for one in range(visible) if one not in training]
    if sampler_gpus > len(others):
        raise ConfigError(
            f"There is no GPU for {sampler_gpus - len(others)} of {sampler_gpus} servers.",
            f"This process sees {counted(visible, 'GPU')}; the training uses {ranks}.",
            "Use a smaller --gpus or --sampler-gpus, or check CUDA_VISIBLE_DEVICES.",
        )
    servers = others[: max(sampler_gpus, 1)] or training[:1]
    return Placement(*(tuple(f"cuda:{one}" for one in part) for part in (training, servers)))


def placement(config: TrainConfig) -> Placement:
    """The devices of a training on this machine."""
    device, visible = pick_device(config.device), torch.cuda.device_count()
    if starts_on_ray(config):  # the servers' GPUs are not those of this machine
        servers = [f"{device.type}:{n}" if device.type == "cuda" else "auto"
                   for n in range(config.sampler_gpus)]  # fmt: skip
        return Placement(("ray",) * config.training_gpus, tuple(servers))
    ranks = local_processes() if launched() else config.training_gpus
    return place(str(device), visible, ranks, config.sampler_gpus)


def starts_on_ray(config: TrainConfig) -> bool:
    """Whether Ray chooses the hosts of the servers."""
    return config.launcher == "ray" and config.sampler_gpus > 0


def placed_terms(config: TrainConfig) -> ServerTerms:
    """The terms of the servers of a training."""
    return replace(terms_of(config), gpus=placement(config).servers)


def servers_on_card(
    config: TrainConfig, choice: SamplingEngine, base: str, material: TrainingData
) -> list[ServerMemory]:
    """Memory of the servers that start on the trainer's card; empty if there is none, if the user
    sets their share, or if the size of a model is unknown."""
    if MEMORY_FLAG in config.vllm_arg or not placement(config).shared:
        return []
    return server_sizes(config, choice.starts, base, material)


def server_sizes(
    config: TrainConfig, starts: bool, base: str, material: TrainingData
) -> list[ServerMemory]:
    """Memory of the players' servers and, if it `starts`, of the trained model's; empty if the size
    of a model is unknown."""
    terms = replace(terms_of(config), episode=longest_rollout(material))
    own = [replace(actor_need(config, base), lora_rank=config.lora.r)] if starts else []
    sizes = []
    for need in joined_needs([*players_needs(config), *own]).values():
        model, limit = footprint(need.model), context_of(need.model)
        if model is None:
            return []
        context = served_context(terms, need)
        sizes.append(server_memory(
            model, config.dtype, context=min(context, limit or context), requests=terms.in_flight,
            rank=need.lora_rank or 0,
        ))  # fmt: skip
    return sizes


def kept_free(config: TrainConfig, servers: Sequence[ServerMemory]) -> int:
    """Bytes that a training should leave to servers: for a cache of CACHED tokens, or while they
    sleep."""
    return sum(ASLEEP if config.vllm_sleep else one.with_cache(CACHED) for one in servers)


def memory_beside_server(config: TrainConfig, base: str, size: PassChoice) -> int:
    """Bytes of the training while servers are awake. If they sleep during updates, only forward
    passes run beside them, which keep no more than one layer."""
    model, needs = footprint(base), size.needs
    if model is not None and size.memory is not None and config.vllm_sleep:
        one = replace(model, layers=1)
        awake = training_memory(config, one, tokens=size.tokens, checkpointing=True, kind="cuda")
        needs += awake.activations - size.memory.activations
    return int(needs / USABLE)


def room_beside(config: TrainConfig, servers: Sequence[ServerMemory], free: int) -> str:
    """What vLLM servers get of a GPU with `free` bytes beside a training, in words."""
    kept, model = kept_free(config, servers), footprint(config.model)
    choice = pass_beside(config, model, "cuda", free, kept)
    needed = memory_beside_server(config, config.model, choice)
    share = gpu_split(Card(total=free, free=free, held=0), needed, servers) if servers else None
    if share is not None:
        return f"; vLLM beside it gets {share:.0%}"
    ways = "--engine local or " * (not config.shard) + "--max-context N"
    ways += ", or --vllm-sleep" * (not config.vllm_sleep)
    return f"; no room for vLLM beside it ({ways})" if servers else ""


def with_share(
    config: TrainConfig, choice: SamplingEngine, servers: Sequence[ServerMemory], needed: int
) -> tuple[TrainConfig, SamplingEngine, str]:
    """The settings with a memory limit for servers on the trainer's card, the engine, and a line
    about both. `needed`: bytes of the training while servers are awake. Without enough room auto
    becomes local; ConfigError if vLLM was requested."""
    words = choice_words(choice)
    starts = len(config.checkpoints("vllm")) + choice.starts
    if not starts or MEMORY_FLAG in config.vllm_arg or not placement(config).shared:
        return config, choice, words
    share: float | None = SHARED_GPU / starts
    if servers:
        card = card_of(pick_device(config.device))
        share = gpu_split(card, needed, servers)
        if share is None:
            if choice.starts:
                choice = _or_local(_no_room(card, needed, servers), config, choice)
            return with_share(config, choice, (), needed)
        left = card.free + card.held - share * card.total * len(servers)
        words = (
            f"{words or 'vLLM starts on the GPU of the training'}; "
            f"{share:.0%} of the GPU per server, {byte_size(left)} for the training"
        )
    flags = {**config.vllm_arg, MEMORY_FLAG: f"{share:.3f}"}
    return config.model_copy(update={"vllm_arg": flags}), choice, words


def _no_room(card: Card, needed: int, servers: Sequence[ServerMemory]) -> ConfigError:
    least = sum(one.least for one in servers)
    return ConfigError(
        "A vLLM server does not fit on the GPU beside the training.",
        f"Of {byte_size(card.total)}, the training takes {byte_size(needed)} and the server at "
        f"least {byte_size(least)}, for a context of {servers[-1].context:,} tokens.",
        "Use a smaller --max-context, --vllm-sleep, --set tokens_per_batch=N or a smaller model, "
        f"or {LOCAL}.",
    )


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
