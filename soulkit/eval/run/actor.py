"""The actor of an evaluation, in this process or on vLLM servers, and its checks.

local ──▶ loads the checkpoint, which gives prompt lengths and the adapter's hash
vllm ───▶ loads only the tokenizer; servers start after all checks have passed
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
from soulkit.models.local.loading import NOTE, adapter_folder
from soulkit.models.local.quantize import base_remark
from soulkit.models.local.threads import ThreadChoice, note_threads
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
from soulkit.play.plan import Work, episode_tokens
from soulkit.reporting import Reporter
from soulkit.runs.folder import Run, note_start

if TYPE_CHECKING:
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.local.sampler import LocalModel
    from soulkit.models.players.settings import RoleSettings
    from soulkit.models.vllm.manager import ServerNeed
    from soulkit.play.settings import PlayConfig

Reader = Sampler | Codec
"""Computes prompt lengths."""
LoadActor = Callable[[EvalConfig], "LocalModel"]


def eval_engine(config: EvalConfig, run: Run | None) -> SamplingEngine | None:
    """The engine that samples the actor; None for an API model. `run` is the run to resume.

    ConfigError if the engine is not available, and for settings without effect.
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
        if engine.kind == "vllm" and config.quantize != "none":
            raise ConfigError(
                f"--quantize {config.quantize} does not work with --engine {config.engine}.",
                "Only the local engine quantises the base while loading it.",
                "Use --engine local, or --vllm-arg quantization=bitsandbytes without --quantize.",
            )
    starts = engine is not None and engine.starts
    refuse_idle_flags(config, starts=starts, attached=engine is not None and engine.attached)
    return engine


def refuse_idle_flags(config: PlayConfig, *, starts: bool, attached: bool) -> None:
    """ConfigError for vLLM flags without effect. `starts`: the run starts a server; `attached`: it
    uses running servers."""
    if config.vllm_arg and not (starts or config.checkpoints("vllm")):
        raise ConfigError(
            f"--vllm-arg {next(iter(config.vllm_arg))}=… has no effect: no vLLM server is started.",
            "It would be recorded with the run although it was not used.",
            "Add --engine vllm, write a player as vllm:PATH, or leave out --vllm-arg.",
        )
    if config.verify_weights and not attached:
        raise ConfigError(
            "--verify-weights has no effect: no running server is attached.",
            "It compares the weights of servers that you started yourself with the model folder.",
            "Attach a server with --engine vllm@URL, or leave out --verify-weights.",
        )


def on_vllm(engine: SamplingEngine | None) -> bool:
    """Whether the actor is sampled by vLLM."""
    return engine is not None and engine.kind == "vllm"


def eval_needs(config: EvalConfig, engine: SamplingEngine | None) -> list[ServerNeed]:
    """The models that need vLLM servers, the actor first. In a replay the ledger answers for the
    other players; local actors are not in a ledger, so they are always sampled."""
    actor = [own_need(config, engine)] if engine is not None and on_vllm(engine) else []
    return actor if config.ledger == "replay" else [*actor, *players_needs(config)]


def own_need(config: EvalConfig, engine: SamplingEngine) -> ServerNeed:
    """The server that the actor needs."""
    return actor_need(config, config.model, _adapter(config), attached=engine.attached)


def _adapter(config: EvalConfig) -> Path | None:
    return None if config.adapter is None else adapter_folder(config.adapter)


def eval_servers(
    config: EvalConfig, engine: SamplingEngine | None, folder: Path, shared: VllmServers | None,
    reporter: Reporter,
) -> AbstractContextManager[VllmServers]:  # fmt: skip
    """The servers of a run. `shared` servers are not stopped at the end."""
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
    """The loaded model, or only the tokenizer of a vLLM actor; None for an API model.

    ModelLoadError if it cannot be loaded.
    """
    if engine is None:
        return None
    if on_vllm(engine):
        return Codec.load(config.model, max_context=config.max_context)
    return (load or local_model)(config)


def policy_version(config: EvalConfig, reader: Reader) -> str:
    """The hash of the actor's adapter; empty if it has none."""
    if not isinstance(reader, Codec):
        return reader.policy_version
    from soulkit.models.local.loading import adapter_hash

    return "" if config.adapter is None else adapter_hash(config.adapter)


def local_model(config: EvalConfig) -> LocalModel:
    """Load the actor in this process; ModelLoadError if that fails."""
    return checkpoint_model(config.model, config, config.adapter)


def checkpoint_model(model: str, config: EvalConfig, adapter: str | None = None) -> LocalModel:
    """Load a checkpoint with the settings of `config`; ModelLoadError if that fails."""
    return checkpoint_player(
        model, adapter=adapter, device=config.device, dtype=config.dtype, quantize=config.quantize,
        batch_size=config.batch_size, max_context=config.max_context,
    )  # fmt: skip


def starts_servers(config: EvalConfig) -> bool:
    """Whether a vLLM server has to be started for the actor."""
    return config.kind == "local" and config.engine_choice.starts


@dataclass
class ActorSetup:
    """The actor and the players on vLLM servers. `fill` starts the servers."""

    config: EvalConfig
    settled: SamplingEngine | None
    """The engine that samples the actor; None for an API model."""
    reader: Reader | None
    servers: VllmServers
    calls: bool
    """Whether any call is left to make; if not, no server is started."""
    actor: ChatModel | None = None
    """None for an API model."""

    def __post_init__(self) -> None:
        self.engine = self.settled.record() if self.settled is not None else {}
        """The recorded facts about the engine."""
        self._ledger: Ledger | None = None
        self._needs = eval_needs(self.config, self.settled) if self.calls else []

    def check(self, run: Run | None, work: Sequence[Work]) -> None:
        """Run all checks that need no server and no run folder."""
        if run is not None and self.engine:
            check_engine(run, self.engine)
        if self._needs:
            self.servers.expect_episodes(longest_episode(work, self.config, self.reader))
        self.servers.check(self._needs)

    def fill(self, run: Run, ledger: Ledger) -> None:
        """Start the servers; RunError if `run` was started with another version of vLLM."""
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
    """Raise if prompts do not fit the actor's context, or `run` has episodes from other weights."""
    if reader is not None:
        check_prompt_lengths(reader, work, config)
        if run is not None:
            check_weights(run, policy_version(config, reader))


def note_choices(
    config: EvalConfig, run: Run, threads: ThreadChoice | None, engine: SamplingEngine | None,
    reporter: Reporter,
) -> None:  # fmt: skip
    """Report and record automatic choices of threads and engine, and a base other than the one
    that the adapter was trained on."""
    if threads is not None:
        note_threads(run.path, threads)
        if not threads.asked:
            reporter.note(threads.words())
    if engine is not None and engine.why:
        reporter.note(f"engine: {engine.words()}")
    folder = None if engine is None else _adapter(config)
    if folder is not None and (remark := base_remark(folder / NOTE, config.quantize)):
        reporter.note(remark)
        note_start(run.path, {"base": remark})


def longest_episode(work: Sequence[Work], config: PlayConfig, reader: Reader | None = None) -> int:
    """Tokens of the longest context of an episode of `work`; estimated without a `reader`."""
    longest, prompt = 0, None
    for part in work:
        reply, seen = config.reply_limit(part.task.spec.sampling), config.thinking
        for row in part.examples:
            if reader is not None:
                contexts = map(config.instructions.added_to, part.task.previews(row).values())
                prompt = max((reader.prompt_length(one, seen) for one in contexts), default=0)
            longest = max(longest, episode_tokens(part.task, row, reply, prompt))
    return longest


def check_prompt_lengths(reader: Reader, work: Sequence[Work], config: EvalConfig) -> None:
    """ConfigError if a first prompt leaves no room for a reply in the model's context.

    With `allow_overflow` such rows are played and stay unscored as `context_overflow`.
    """
    limit = reader.context_limit
    if limit is None or config.allow_overflow:
        return
    for part, over, lengths in _overlong(reader, work, config, limit):
        longest, least = max(lengths), min_reply_tokens(config.sampling(part.task.spec).max_tokens)
        ways = ["a larger --max-context"] if config.max_context == limit else []
        ways += [f"--max-tokens {limit - longest} or less"] if limit > longest else []
        raise ConfigError(
            f"{over} of {len(lengths)} prompts of '{part.task.name}' do not fit the model's "
            "context.",
            f"The longest prompt has {longest} tokens, its reply needs {least}, and the context is "
            f"{limit} tokens; prompts are never truncated automatically.",
            f"Use {', or '.join([*ways, ''])}--allow-overflow to leave those rows unscored.",
        )


def unfitting_lines(actor: ChatModel | None, reader: Reader | None, work: Sequence[Work],
                    config: EvalConfig) -> Iterator[str]:  # fmt: skip
    """A line for each task with first prompts that fit the model but not its attached servers."""
    limit = getattr(actor, "context_limit", None)
    if not isinstance(reader, Codec) or limit is None or limit == reader.context_limit:
        return
    for part, over, lengths in _overlong(reader, work, config, limit):
        yield (
            f"{over} of {len(lengths)} prompts of {part.task.name} do not fit the servers' context "
            f"({limit} tokens) and stay unscored"
        )


def _overlong(
    reader: Reader, work: Sequence[Work], config: EvalConfig, limit: int
) -> Iterator[tuple[Work, int, list[int]]]:
    """(part, number of first prompts that leave no room for a reply within `limit` tokens, lengths
    of all first prompts), for parts that have such prompts."""
    for part in work:
        sampling = config.sampling(part.task.spec)
        lengths = [
            max(reader.prompt_length(config.instructions.added_to(c), sampling.thinking)
                for c in part.task.previews(e).values())
            for e in part.examples
        ]  # fmt: skip
        if over := sum(not max_reply_tokens(n, sampling.max_tokens, limit) for n in lengths):
            yield part, over, lengths
