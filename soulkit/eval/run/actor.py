"""The actor of an evaluation, in this process or behind vLLM servers, and what is checked of it.

local ──▶ the checkpoint is loaded: it knows its prompts' lengths and its adapter's hash
vllm ───▶ its tokenizer alone is: nothing is started before all checks are passed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.resume import begun_engine, check_engine, check_weights
from soulkit.models.base import ChatModel, Sampler, max_reply_tokens, min_reply_tokens
from soulkit.models.codec import Codec
from soulkit.models.local.loading import adapter_folder
from soulkit.models.local.machine import ThreadChoice, note_threads
from soulkit.models.players.players import checkpoint_player
from soulkit.models.vllm.manager import (
    VllmServers,
    actor_need,
    players_needs,
    terms_of,
    unstarted,
    unstarted_player,
)
from soulkit.models.vllm.settings import SamplingEngine, interpreter, no_vllm, resolve_engine
from soulkit.play.plan import Work
from soulkit.reporting import Reporter
from soulkit.runs.folder import Run

if TYPE_CHECKING:
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.local.sampler import LocalModel
    from soulkit.models.players.settings import RoleSettings
    from soulkit.models.vllm.manager import ServerNeed
    from soulkit.play.settings import PlayConfig

Reader = Sampler | Codec
"""Whatever knows how long prompts are."""
LoadActor = Callable[[EvalConfig], "LocalModel"]


def eval_engine(config: EvalConfig, run: Run | None) -> SamplingEngine | None:
    """What samples the actor; None for a served one. `run` is the one that is taken up.

    ConfigError where that cannot be had, and for settings that nothing reads.
    """
    engine = None
    if config.kind == "local":
        python = interpreter(config.vllm_python)
        engine = resolve_engine(
            config.engine_choice, python=python, device=config.device,
            begun="" if run is None else begun_engine(run).get("kind", ""),
        )  # fmt: skip
        if engine.starts and not engine.version:
            raise no_vllm(python, attachable=True)
    starts = engine is not None and engine.starts
    refuse_idle_flags(config, starts=starts, attached=engine is not None and engine.attached)
    return engine


def refuse_idle_flags(config: PlayConfig, *, starts: bool, attached: bool) -> None:
    """ConfigError for flags of vLLM that nothing reads: whether a server `starts`, and whether some
    are `attached`."""
    if config.vllm_arg and not (starts or config.checkpoints("vllm")):
        raise ConfigError(
            f"--vllm-arg {next(iter(config.vllm_arg))}=… is given, and no vLLM server is started.",
            "A setting that nothing reads would be recorded as if it had been followed.",
            "Give --engine vllm, name a player as vllm:PATH, or leave the flag out.",
        )
    if config.verify_weights and not attached:
        raise ConfigError(
            "--verify-weights is given, and no server is attached.",
            "It compares servers that somebody else started with the model's folder.",
            "Name the servers with --engine vllm@URL, or leave it out.",
        )


def on_vllm(engine: SamplingEngine | None) -> bool:
    """Whether the actor is sampled by vLLM."""
    return engine is not None and engine.kind == "vllm"


def eval_needs(config: EvalConfig, engine: SamplingEngine | None) -> list[ServerNeed]:
    """The models that vLLM servers are needed for, the actor's first. In a replay the ledger speaks
    for the players; the actor's replies are in none, so it is sampled as ever."""
    actor = [own_need(config, engine)] if engine is not None and on_vllm(engine) else []
    return actor if config.ledger == "replay" else [*actor, *players_needs(config)]


def own_need(config: EvalConfig, engine: SamplingEngine) -> ServerNeed:
    """What the actor needs."""
    return actor_need(config, config.model, _adapter(config), attached=engine.attached)


def _adapter(config: EvalConfig) -> Path | None:
    return None if config.adapter is None else adapter_folder(config.adapter)


def eval_servers(
    config: EvalConfig, engine: SamplingEngine | None, folder: Path, shared: VllmServers | None,
    reporter: Reporter,
) -> AbstractContextManager[VllmServers]:  # fmt: skip
    """The servers of a run: `shared` ones are left running for their owner."""
    if shared is not None:
        return nullcontext(shared)
    urls = engine.urls if engine is not None else ()
    return VllmServers(
        folder, terms_of(config), attached=urls, attached_model=config.model,
        proof="compare" if config.verify_weights else "none", reporter=reporter,
    )  # fmt: skip


def actor_reader(
    config: EvalConfig, engine: SamplingEngine | None, load: LoadActor | None
) -> Reader | None:
    """The loaded model, or the tokenizer of one that is served by vLLM; None for an endpoint.

    ModelLoadError when it cannot be loaded.
    """
    if engine is None:
        return None
    if on_vllm(engine):
        return Codec.load(config.model, max_context=config.max_context)
    return (load or local_model)(config)


def policy_version(config: EvalConfig, reader: Reader) -> str:
    """The hash of the actor's adapter; empty without one."""
    if not isinstance(reader, Codec):
        return reader.policy_version
    from soulkit.models.local.loading import adapter_hash

    return "" if config.adapter is None else adapter_hash(config.adapter)


def local_model(config: EvalConfig) -> LocalModel:
    """The actor in this process; ModelLoadError when it cannot be loaded."""
    return checkpoint_model(config.model, config, config.adapter)


def checkpoint_model(model: str, config: EvalConfig, adapter: str | None = None) -> LocalModel:
    """A checkpoint as `config` has it loaded; ModelLoadError when it cannot be."""
    return checkpoint_player(
        model, adapter=adapter, device=config.device, dtype=config.dtype,
        batch_size=config.batch_size, max_context=config.max_context,
    )  # fmt: skip


def starts_servers(config: EvalConfig) -> bool:
    """Whether a server of vLLM is asked for that is started for the actor."""
    return config.kind == "local" and config.engine_choice.starts


@dataclass
class ActorSetup:
    """The actor and those players who sit behind vLLM servers. `fill` has the servers started."""

    config: EvalConfig
    settled: SamplingEngine | None
    """What samples the actor; None for an endpoint."""
    reader: Reader | None
    servers: VllmServers
    calls: bool
    """Whether any call is left to make: for none, nothing is started."""
    actor: ChatModel | None = None
    """None where it is an endpoint."""

    def __post_init__(self) -> None:
        self.engine = self.settled.record() if self.settled is not None else {}
        """What is kept of the engine."""
        self._ledger: Ledger | None = None
        self._needs = eval_needs(self.config, self.settled) if self.calls else []

    def check(self, run: Run | None) -> None:
        """Raise what can be said before a server is started, or the folder of a new run made."""
        if run is not None and self.engine:
            check_engine(run, self.engine)
        self.servers.check(self._needs)

    def fill(self, run: Run, ledger: Ledger) -> None:
        """Start what is needed; RunError where `run` was begun by another version of vLLM."""
        config, engine, self._ledger = self.config, self.settled, ledger
        if self._needs:
            self.servers.prepare(self._needs)
        if engine is None or self.reader is None:
            return
        if not isinstance(self.reader, Codec):
            self.actor = self.reader
        elif self._needs:
            need = own_need(config, engine)
            self.actor = self.servers.sampler(need, adapter=_adapter(config))
            self.engine |= self.servers.version_record(need)
            if run.resumed:
                check_engine(run, self.engine)
                self.engine = {**begun_engine(run), **self.engine}
        else:
            version = policy_version(config, self.reader)
            self.actor = unstarted(config.model, self.reader, policy_version=version)
            self.engine |= begun_engine(run)

    def player(self, settings: RoleSettings) -> ChatModel:
        """A player of the kind `vllm`."""
        if not self._needs or self.config.ledger == "replay":
            return unstarted_player(settings, self._ledger)
        return self.servers.serving(self.config, self._ledger)(settings)


# -- checks before anything is played ------------------------------------------------------------


def check_actor(
    reader: Reader | None, work: Sequence[Work], config: EvalConfig, run: Run | None
) -> None:
    """Raise where prompts do not fit the actor, or `run` holds episodes of other weights."""
    if reader is not None:
        check_prompt_lengths(reader, work, config)
        if run is not None:
            check_weights(run, policy_version(config, reader))


def note_choices(
    run: Run, threads: ThreadChoice | None, engine: SamplingEngine | None, reporter: Reporter
) -> None:
    """Say, and keep, what was chosen for the user."""
    if threads is not None:
        note_threads(run.path, threads)
        if not threads.asked:
            reporter.note(threads.words())
    if engine is not None and engine.why:
        reporter.note(f"engine: {engine.words()}")


def check_prompt_lengths(reader: Reader, work: Sequence[Work], config: EvalConfig) -> None:
    """ConfigError when a first prompt leaves no room for a reply in the model's context.

    With `allow_overflow` they are played all the same, and stay unscored as `context_overflow`.
    """
    limit = reader.context_limit
    if limit is None or config.allow_overflow:
        return
    for part, over, lengths in _overlong(reader, work, config, limit):
        reply = config.sampling(part.task.spec).max_tokens
        raise _too_long(part.task.name, over, lengths, reply, limit)


def unfitting_lines(actor: ChatModel | None, reader: Reader | None, work: Sequence[Work],
                    config: EvalConfig) -> Iterator[str]:  # fmt: skip
    """A line for every task with first prompts that fit the model, and not its attached servers."""
    limit = getattr(actor, "context_limit", None)
    if not isinstance(reader, Codec) or limit is None or limit == reader.context_limit:
        return
    for part, over, lengths in _overlong(reader, work, config, limit):
        yield (
            f"{over} of {len(lengths)} prompts of {part.task.name} do not fit the servers' {limit} "
            "tokens and stay unscored"
        )


def _overlong(
    reader: Reader, work: Sequence[Work], config: EvalConfig, limit: int
) -> Iterator[tuple[Work, int, list[int]]]:
    """The parts with first prompts that leave no room for a reply within `limit` tokens: how many,
    and the lengths of all."""
    for part in work:
        sampling = config.sampling(part.task.spec)
        lengths = [
            max(reader.prompt_length(c, sampling.thinking) for c in part.task.previews(e).values())
            for e in part.examples
        ]
        if over := sum(not max_reply_tokens(n, sampling.max_tokens, limit) for n in lengths):
            yield part, over, lengths


def _too_long(task: str, over: int, lengths: Sequence[int], reply: int, limit: int) -> ConfigError:
    longest, spare, least = max(lengths), limit - max(lengths), min_reply_tokens(reply)
    shorter = f"Give --max-tokens {spare} or less, or " if spare > 0 else "Give "
    return ConfigError(
        f"{over} of {len(lengths)} prompts of '{task}' do not fit the model's context.",
        f"The longest has {longest} tokens, its reply needs room for {least}, and the model holds "
        f"{limit} in all; nothing is cut silently.",
        f"{shorter}--allow-overflow to leave those rows unscored.",
    )
