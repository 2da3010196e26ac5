"""The vLLM servers of one run: one per model, shared by all players that use it.

    needs of actor and players ──▶ one server per model, started one by one ──▶ samplers
    running servers (--engine vllm@URL) ──────────────────────────────────────────┘

Each server measures free GPU memory when it starts, so models start one after the other, before
anything is played. On several GPUs a model has a server on each, all with the same weights. Leaving
the `with` block stops them; if the process dies, a supervisor stops them.
"""

from __future__ import annotations

import asyncio
import atexit
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from soulkit.errors import ConfigError, ModelLoadError, SoulError, UserError
from soulkit.models.api.transport import fitted, lowered_line, open_files
from soulkit.models.codec import Codec, least_limit
from soulkit.models.local.loading import ADAPTER_CONFIG, checkpoint_json, model_place
from soulkit.models.players.settings import REPLY
from soulkit.models.vllm.adapters import check_adapter_file
from soulkit.models.vllm.capabilities import (
    QUESTIONS,
    Basis,
    ServerCapabilities,
    attached_addresses,
    compare_weights,
    compared_prompts,
    probe_servers,
    read_folder,
)
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.command import ServerSpec, server_command
from soulkit.models.vllm.replicas import Replicas
from soulkit.models.vllm.server import VllmServer, stop_all
from soulkit.models.vllm.settings import interpreter, no_vllm, vllm_version
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import stored_json
from soulkit.types import Segment

if TYPE_CHECKING:
    from soulkit.models.base import ChatModel
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.players.config import RolesConfig
    from soulkit.models.players.settings import RoleSettings
    from soulkit.models.vllm.adapters import ServedAdapter
    from soulkit.models.vllm.model import VllmModel

LOGS = "vllm"
"""Subfolder of a run folder for server logs."""
GPU_SHARE = 0.9
"""Share of a GPU's memory for all servers of a run together."""
MEMORY_FLAG = "gpu-memory-utilization"
EPISODE = 16_384
"""Tokens of an episode if its rows are not known: prompt and reply of 8,192 each."""
INSTRUCTIONS = 8_192
"""Tokens of a player's prompt beside the episode: its instructions and the fields of the row."""
PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
"""Flags that spread one server over several GPUs."""
STEP = 4_096
"""Served contexts are multiples of this."""
REQUESTS = (64, 512)
"""Least and most concurrent requests per server; they follow the number of concurrent episodes,
unless --batch-size sets them."""
UNSENT = {"vision_config": ("image", "video"), "audio_config": ("audio",)}
"""Part of a model's config.json → kinds of input that it reads; soulkit sends only text."""
LEAVE_S = 30.0
"""Timeout in seconds for removing adapters from attached servers."""

Proof = Literal["none", "compare", "pushes"]
"""How to verify the weights of attached servers: not at all, by comparing log-probs once, or with
every weight update of a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """Shared settings of a run's servers."""

    python: str = sys.executable
    limit_s: float = 300.0
    dtype: str = "auto"
    device: str = "auto"
    gpus: tuple[str, ...] = ()
    """Devices of every model's servers; empty: one server on `device`."""
    max_context: int | None = None
    """Context of every server, set by --max-context; None: see `served_context`."""
    episode: int | None = None
    """Tokens of the longest episode, with the actor's reply; None: EPISODE."""
    in_flight: int = 64
    """Maximum concurrent requests per server."""
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """A model that needs a server."""

    model: str
    """A folder, or `owner/name@revision`."""
    args: tuple[tuple[str, str], ...] = ()
    """Flags of its server."""
    lora_rank: int | None = None
    """Rank of the largest adapter to be loaded; None: no adapters."""
    beyond: int = 0
    """Tokens of its prompts and replies in addition to an episode, such as a judge's."""
    sleeps: bool = False
    """Whether its server can release its memory between rollouts."""

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """A key that is equal for two needs that can share a server."""
        place = model_place(self.model)
        where = str(place) if place.on_hub else str(Path(place.where).resolve())
        return where, tuple(sorted(self.args))

    def joined(self, other: ServerNeed) -> ServerNeed:
        """A need that covers both."""
        ranks = [rank for rank in (self.lora_rank, other.lora_rank) if rank is not None]
        return replace(
            self, lora_rank=max(ranks, default=None), beyond=max(self.beyond, other.beyond),
            sleeps=self.sleeps or other.sleeps,
        )  # fmt: skip


def joined_needs(needs: Iterable[ServerNeed]) -> dict[Any, ServerNeed]:
    """One need for all that can share a server, by key."""
    joined: dict[Any, ServerNeed] = {}
    for need in needs:
        joined[need.key] = joined[need.key].joined(need) if need.key in joined else need
    return joined


def served_context(terms: ServerTerms, need: ServerNeed) -> int:
    """The context that a server should have, before it is cut to that of its model."""
    tokens = (terms.episode or EPISODE) + need.beyond
    return terms.max_context or -(-tokens // STEP) * STEP


def terms_of(config: Any) -> ServerTerms:
    """The terms from a command's settings; missing settings use the defaults."""
    usual, (least, most) = ServerTerms(), REQUESTS
    asked = min(max(getattr(config, "episodes_at_once", config.concurrency), least), most)
    if "batch_size" in config.model_fields_set:
        asked = config.batch_size
    return ServerTerms(
        python=interpreter(config.vllm_python), limit_s=config.vllm_start_s,
        dtype=getattr(config, "dtype", usual.dtype),
        device=getattr(config, "device", usual.device),
        max_context=getattr(config, "max_context", usual.max_context), in_flight=int(asked),
        threads=getattr(config, "threads", usual.threads),
    )  # fmt: skip


def player_need(config: RolesConfig, player: RoleSettings) -> ServerNeed:
    """The need of a player of kind `vllm`."""
    args = _pairs({**config.vllm_arg, **player.args})
    return ServerNeed(model=player.model, args=args, beyond=_beyond(player))


def _beyond(player: RoleSettings) -> int:
    """Tokens of a player's instructions, its reply, and an invalid reply that it repeats."""
    return INSTRUCTIONS + 2 * (player.max_tokens or max(most for _, most in REPLY.values()))


def players_needs(config: RolesConfig) -> list[ServerNeed]:
    """The needs of all players of kind `vllm`."""
    return [player_need(config, who) for _, who in config.players() if who.kind == "vllm"]


def actor_need(
    config: RolesConfig, model: str, adapter: Path | None = None, *, attached: bool = False
) -> ServerNeed:
    """The need of an actor that runs on vLLM; `attached`: on servers that are already running.
    ModelLoadError if the adapter's files are damaged."""
    args = () if attached else _pairs(config.vllm_arg)
    rank = None
    if adapter is not None:
        check_adapter_file(adapter)
        rank = adapter_rank(adapter)
    beyond = max((_beyond(who) for _, who in config.players() if who.kind == "actor"), default=0)
    return ServerNeed(model=model, args=args, lora_rank=rank, beyond=beyond)


def _pairs(flags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(flags.items()))


def adapter_rank(folder: Path) -> int:
    """The largest rank of an adapter; ModelLoadError if its config does not state it."""
    file = folder / ADAPTER_CONFIG
    try:
        read = stored_json(file)
        return max([int(read["r"]), *map(int, (read.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"'{file}' does not state the rank of its adapter.",
            "A vLLM server must know the rank before it loads an adapter.",
            "Use the folder of a LoRA adapter saved by PEFT or soulkit.",
        ) from error


def server_spec(terms: ServerTerms, need: ServerNeed, number: int = 1) -> ServerSpec:
    """The spec of a server for a need; `number` servers share the GPU."""
    args, install = dict(need.args), vllm_version(terms.python)
    if number > 1 and install is not None and install.on_gpu and MEMORY_FLAG not in args:
        args[MEMORY_FLAG] = f"{GPU_SHARE / number:.2f}"
    return ServerSpec(
        model=need.model, dtype=terms.dtype, device=terms.device,
        max_context=served_context(terms, need), lora_rank=need.lora_rank,
        in_flight=terms.in_flight, sleeps=need.sleeps, args=args, python=terms.python,
        threads=terms.threads,
    )  # fmt: skip


def server_devices(terms: ServerTerms, need: ServerNeed) -> list[str]:
    """The device of each server of a model, `cuda:2,3` for one that its flags spread over two
    GPUs; ConfigError if the GPUs cannot be divided that way."""
    gpus, flags = terms.gpus or (terms.device,), dict(need.args)
    sizes = [int(size) for flag in PARALLEL if (size := flags.get(flag, "")).isdecimal()]
    width = max(math.prod(sizes), 1) if len(gpus) > 1 else 1
    if len(gpus) % width:
        raise ConfigError(
            f"{len(gpus)} GPUs cannot be divided among servers of {width} GPUs each.",
            f"The flags of '{need.model}' spread a server over {width} GPUs.",
            f"Use --sampler-gpus {len(gpus) // width * width or width}, or change --vllm-arg.",
        )
    numbers = [gpu.partition(":")[2] for gpu in gpus]
    return [
        f"cuda:{','.join(numbers[n : n + width])}" if numbers[n] else gpus[n]
        for n in range(0, len(gpus), width)
    ]


def check_needs(needs: Sequence[ServerNeed], terms: ServerTerms) -> None:
    """Check needs before any server starts: ModelLoadError for a missing folder, ConfigError
    without vLLM, for flags that soulkit sets itself, and for GPUs that cannot be divided."""
    install = vllm_version(terms.python) if needs else None
    for need in needs:
        model_place(need.model)
        if install is None:
            raise no_vllm(terms.python, attachable=False)
        for device in server_devices(terms, need):
            spec = replace(server_spec(terms, need), device=device)
            server_command(spec, install, port=1)


@dataclass(slots=True)
class _Served:
    """One served model, on our own server or on attached ones."""

    need: ServerNeed
    fleet: Replicas
    abilities: ServerCapabilities
    codec: Codec
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    """By adapter folder."""


class VllmServers:
    """The vLLM servers of one run. A context manager that stops them all on exit.

    `folder`: the run folder, for logs; `attached`: addresses of running servers with the model
    `attached_model`; `proof`: how their weights are verified; `kind`: how servers are started.
    """

    def __init__(
        self, folder: Path, terms: ServerTerms, *, attached: Sequence[str] = (),
        attached_model: str = "", proof: Proof = "none", reporter: Reporter = SILENT,
        kind: type[VllmServer] = VllmServer,
    ) -> None:  # fmt: skip
        self._proof, self._kind = proof, kind
        self.folder, self.terms, self.reporter = folder, terms, reporter
        self._attached, self._attached_model = tuple(attached), attached_model
        self._expected: dict[Any, ServerNeed] = {}
        self._running: dict[Any, list[VllmServer]] = {}
        self._specs: dict[Any, ServerSpec] = {}
        self._served: dict[Any, _Served] = {}
        self._codecs: dict[Any, Codec] = {}
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        atexit.unregister(self.stop)

    # -- starting servers --------------------------------------------------------------------------

    def expect_episodes(self, tokens: int) -> None:
        """Register the tokens of the longest episode that is played with these servers."""
        self.terms = replace(self.terms, episode=max(self.terms.episode or 0, tokens))

    def expect(self, needs: Sequence[ServerNeed]) -> None:
        """Register the needs of later runs on these servers, so that each server starts with
        everything its model will need and is not restarted."""
        self._expected = joined_needs([*self._expected.values(), *needs])

    def check(self, needs: Sequence[ServerNeed]) -> None:
        """Check these needs before any server starts: ConfigError for flags that soulkit sets
        itself, IncompatibleServer for attached servers of another model."""
        for need in needs:
            if self._is_attached(need.key):
                self.expect([need])
                self._served[need.key] = self._ready(need.key)
            else:
                check_needs([need], self.terms)

    def prepare(self, needs: Sequence[ServerNeed]) -> None:
        """Start servers for exactly these models; blocks until all answer.

        Call it outside an event loop. UserError, with the last lines of the log, if a server does
        not start in time.
        """
        self.expect(needs)
        keys = list(dict.fromkeys(need.key for need in needs))
        for key in [key for key in self._running if key not in keys]:
            self._stop_one(key)
        own = [key for key in keys if not self._is_attached(key)]
        for key in own:
            self._start(key, len(own))
        for key in keys:
            if not (self._is_attached(key) and key in self._served):
                self._served[key] = self._ready(key)

    def _is_attached(self, key: Any) -> bool:
        return bool(self._attached) and key == ServerNeed(model=self._attached_model).key

    def _spec(self, key: Any, number: int) -> ServerSpec:
        spec = server_spec(self.terms, self._expected[key], number)
        # vLLM fails if asked for more than the model's context.
        limit, place = self._codec(key).context_limit, model_place(spec.model)
        config = checkpoint_json(place.where, "config.json", place.revision)
        unsent = tuple(one for part, kinds in UNSENT.items() if config.get(part) for one in kinds)
        return replace(spec, max_context=limit, unsent=unsent)

    def _start(self, key: Any, number: int) -> None:
        spec = self._spec(key, number)
        if key in self._running and self._specs[key] == spec:
            return
        self._stop_one(key)
        begun, devices = time.monotonic(), server_devices(self.terms, self._expected[key])
        with self.reporter.starting(
            f"starting vLLM with {spec.model}", self.terms.limit_s
        ) as watch:
            servers = self._kind.start_all(
                [replace(spec, device=device) for device in devices], self.folder / LOGS,
                limit_s=self.terms.limit_s, watch=watch,
            )  # fmt: skip
        self._running[key], self._specs[key] = servers, spec
        seconds, logs = time.monotonic() - begun, ", ".join(str(one.log) for one in servers)
        where = f" by {len(servers)} servers on {', '.join(devices)}" * (len(servers) > 1)
        self.reporter.note(
            f"vllm {servers[0].version} serves {spec.model}{where} after {seconds:.0f} s, with "
            f"contexts of {spec.max_context:,} tokens (--max-context); log: {logs}"
        )

    def _ready(self, key: Any) -> _Served:
        """A new fleet for each run: a closed one, or one that lost a server, cannot be reused."""
        need, servers = self._expected[key], self._running.get(key)
        codec = self._codec(key)
        if servers:
            fleet = self._fleet(
                [Address(one.url, one.key) for one in servers],
                {one.url: one.check for one in servers},
            )
            abilities = ServerCapabilities(
                served=servers[0].served, version=servers[0].version,
                adapters=need.lora_rank is not None,
            )  # fmt: skip
        else:
            fleet = self._fleet(attached_addresses(self._attached))
            abilities = asyncio.run(probe_servers(fleet, need.model, codec))
            basis: Basis = "declared" if self._proof == "none" else "verified"
            abilities = replace(abilities, basis=basis)
            for line in (_attached_words(abilities, self._attached), *abilities.remarks):
                self.reporter.note(line)
        served = _Served(need, fleet, abilities, codec)
        self._compare(served, abilities.served, None)
        return served

    def _compare(self, served: _Served, name: str, adapter: Path | None) -> None:
        """Compare the weights of attached servers with the folder, if requested."""
        if self._proof != "compare" or not served.abilities.basis:
            return
        limit = least_limit(served.codec.context_limit, served.abilities.max_context)
        prompts = compared_prompts(served.codec, limit)
        device, dtype = self.terms.device, self.terms.dtype
        folder = read_folder(served.need.model, adapter, prompts, device=device, dtype=dtype)
        self.reporter.note(asyncio.run(compare_weights(served.fleet, name, prompts, folder)))

    def _codec(self, key: Any) -> Codec:
        need, terms = self._expected[key], self.terms
        if key not in self._codecs:
            self._codecs[key] = Codec.load(need.model)
        most = terms.max_context if self._is_attached(key) else served_context(terms, need)
        return self._codecs[key].limited(most)

    def _fleet(
        self, addresses: Sequence[Address], checks: Mapping[str, Callable[[], None]] | None = None
    ) -> Replicas:
        clients = [VllmClient(address) for address in addresses]
        asked, servers = self.terms.in_flight, len(addresses) + len(self._expected) - 1
        before = open_files()
        used = fitted(asked, servers, before)
        if used < asked:
            self.reporter.note(lowered_line(asked, used, servers, before))
        return Replicas(clients, in_flight=used, checks=checks, reporter=self.reporter)

    # -- players -----------------------------------------------------------------------------------

    def sampler(
        self, need: ServerNeed, *, adapter: Path | None = None, ledger: Ledger | None = None,
        ledger_name: str = "",
    ) -> VllmModel:  # fmt: skip
        """The model for `need`; call `prepare` with this need first. Its replies are recorded in
        `ledger` under `ledger_name` (default: the model). An `adapter` is loaded and verified,
        which must be done outside an event loop. UserError if the adapter is rejected."""
        from soulkit.models.local.loading import adapter_hash
        from soulkit.models.vllm.model import VllmModel

        served = self._served[need.key]
        name, version = served.abilities.served, ""
        if adapter is not None:
            name, version = self._loaded(served, adapter), adapter_hash(adapter)
        return VllmModel(
            served.fleet, served.codec, name=served.codec.name, served=name,
            abilities=served.abilities, policy_version=version, ledger=ledger,
            ledger_name=ledger_name or need.model, weights_basis=served.abilities.basis,
        )  # fmt: skip

    def fleet(self, need: ServerNeed) -> Replicas:
        """The servers for `need`; call `prepare` with this need first."""
        return self._served[need.key].fleet

    def started(self, need: ServerNeed) -> Sequence[VllmServer]:
        """The servers for `need` that were started for it."""
        return self._running.get(need.key, ())

    def abilities(self, need: ServerNeed) -> ServerCapabilities:
        """What these servers support."""
        return self._served[need.key].abilities

    def serving(
        self, config: RolesConfig, ledger: Ledger | None
    ) -> Callable[[RoleSettings], ChatModel]:
        """A function that returns the vLLM players of `config` (for `Players.serve`)."""
        return lambda who: self.sampler(
            player_need(config, who), ledger=ledger, ledger_name=name_in_ledger(who)
        )

    def version_record(self, need: ServerNeed) -> dict[str, Any]:
        """The vLLM version of the servers for `need`, if known, and `max_context` in tokens if it
        is less than the model's."""
        served = self._served[need.key]
        version, limit = served.abilities.version, served.abilities.max_context
        short = limit is not None and limit < (served.codec.context_limit or 0)
        return {
            **({"version": version} if version else {}), **({"max_context": limit} if short else {})
        }  # fmt: skip

    def _loaded(self, served: _Served, adapter: Path) -> str:
        from soulkit.models.vllm.adapters import serve_adapter

        folder = str(adapter.resolve())
        if folder not in served.adapters:
            prompt = served.codec.prompt_ids([Segment("user", QUESTIONS[0])])
            served.adapters[folder] = asyncio.run(
                serve_adapter(served.fleet, served.abilities.served, adapter, prompt)
            )
            self._compare(served, served.adapters[folder].name, adapter)
        return served.adapters[folder].name

    # -- stopping servers --------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop our servers, the last one first, and remove adapters from attached ones. May be
        called twice."""
        for key in reversed(list(self._running)):
            self._stop_one(key)
        for key in list(self._served):
            self._leave(key)

    def _stop_one(self, key: Any) -> None:
        servers = self._running.pop(key, [])
        self._specs.pop(key, None)
        self._served.pop(key, None)
        try:
            stop_all(servers)
        except UserError as error:  # continue with the other models
            self.reporter.note(f"{error.what} {error.why}")

    def _leave(self, key: Any) -> None:
        """Remove our adapters from attached servers."""
        served = self._served.pop(key)

        async def unload() -> None:
            async with asyncio.timeout(LEAVE_S):
                for adapter in served.adapters.values():
                    await adapter.unload(served.fleet)
            await served.fleet.close()

        try:
            asyncio.run(unload())
        except (SoulError, OSError, TimeoutError) as error:
            left = ", ".join(one.name for one in served.adapters.values() if one.lent)
            self.reporter.note(
                f"adapters could not be removed from the attached servers: {left} ({error})"
            )


def name_in_ledger(player: RoleSettings) -> str:
    """The name of a `vllm` player in the ledger: its model and its own flags, so that players with
    the same model on different servers do not share replies."""
    return " ".join(
        [player.model, *(f"--{flag}={player.args[flag]}" for flag in sorted(player.args))]
    )


def unstarted_player(player: RoleSettings, ledger: Ledger | None) -> VllmModel:
    """A `vllm` player without servers. ModelLoadError if its tokenizer is missing."""
    codec = Codec.load(player.model)
    return unstarted(player.model, codec, ledger=ledger, ledger_name=name_in_ledger(player))


def unstarted(
    model: str, codec: Codec, *, policy_version: str = "", ledger: Ledger | None = None,
    ledger_name: str = "",
) -> VllmModel:  # fmt: skip
    """A model without servers that only replays its `ledger`."""
    from soulkit.models.vllm.model import VllmModel

    return VllmModel(
        None, codec, name=codec.name, served=model, ledger=ledger,
        ledger_name=ledger_name or model,
        abilities=ServerCapabilities(served=model, version="", forms=False),
        policy_version=policy_version,
    )  # fmt: skip


@contextmanager
def player_servers(
    config: RolesConfig, folder: Path, ledger: Ledger | None,
    terms: ServerTerms | None = None, reporter: Reporter = SILENT,
) -> Iterator[Callable[[RoleSettings], ChatModel]]:  # fmt: skip
    """Run the servers that the players of `config` need, and yield a function that returns those
    players. `terms` default to those of `config`."""
    with VllmServers(folder, terms or terms_of(config), reporter=reporter) as servers:
        servers.prepare(players_needs(config))
        yield servers.serving(config, ledger)


def _attached_words(abilities: ServerCapabilities, urls: Sequence[str]) -> str:
    """`attached to vllm 0.32.0 at http://a:8000: ids, processed log-probs, adapters`."""
    what, adapters = f"vllm {abilities.version}".rstrip(), "no " * (not abilities.adapters)
    able = f"ids, {abilities.logprobs} log-probs, {adapters}adapters"
    words = f"attached to {what} at {', '.join(urls)}: {able}"
    if abilities.basis == "declared":
        words += "; its weights were not verified (--verify-weights compares them)"
    return words
