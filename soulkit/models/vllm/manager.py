"""The vLLM servers of one run: one for each model, whoever plays with it.

    needs of actor and players ──▶ one server a model, one started after the other ──▶ samplers
    servers that run already (--engine vllm@URL) ─────────────────────────────────────┘

GPU memory is measured by each server at its start, so no two start at once, and all of them before
anything is played. They are stopped in every way out of `with`; whoever dies without one is
survived by a supervisor that stops them.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from soulkit.errors import ModelLoadError, SoulError, UserError
from soulkit.models.api.transport import fitted, lowered_line, open_files
from soulkit.models.codec import Codec, least_limit
from soulkit.models.local.loading import ADAPTER_CONFIG, model_place
from soulkit.models.vllm.adapters import check_adapter_file
from soulkit.models.vllm.capabilities import (
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
from soulkit.models.vllm.server import VllmServer
from soulkit.models.vllm.settings import interpreter, no_vllm, vllm_version
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Segment

if TYPE_CHECKING:
    from soulkit.models.base import ChatModel
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.players.config import RolesConfig
    from soulkit.models.players.settings import RoleSettings
    from soulkit.models.vllm.adapters import ServedAdapter
    from soulkit.models.vllm.model import VllmModel

LOGS = "vllm"
"""In a run's folder: what its servers say."""
GPU_SHARE = 0.9
"""Of a GPU's memory, for all servers of a run together."""
MEMORY_FLAG = "gpu-memory-utilization"
CANARY = "Say in one sentence what you would do on a free afternoon, and why."
"""What shows that an adapter changes what is said."""
LEAVE_S = 30.0
"""How long taking adapters back from servers of others may take."""

Proof = Literal["none", "compare", "pushes"]
"""What shows that attached servers compute with the weights of the model's folder: nothing, a
comparison of log-probs when they are attached, or the proof of every push of a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTerms:
    """How the servers of a run are started and asked."""

    python: str = sys.executable
    limit_s: float = 300.0
    dtype: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    in_flight: int = 64
    """Requests that are under way at one server."""
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerNeed:
    """A model that somebody plays with."""

    model: str
    """A folder, or `owner/name@revision`."""
    args: tuple[tuple[str, str], ...] = ()
    """Flags of its server."""
    lora_rank: int | None = None
    """Of the largest adapter that will be loaded on it; None: of none."""

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What two needs that one server meets have in common."""
        place = model_place(self.model)
        where = str(place) if place.on_hub else str(Path(place.where).resolve())
        return where, tuple(sorted(self.args))

    def joined(self, other: ServerNeed) -> ServerNeed:
        """What meets both."""
        ranks = [rank for rank in (self.lora_rank, other.lora_rank) if rank is not None]
        return replace(self, lora_rank=max(ranks, default=None))


def terms_of(config: Any) -> ServerTerms:
    """The terms in the settings of a command; what it has no setting for is as usual."""
    usual = ServerTerms()
    return ServerTerms(
        python=interpreter(config.vllm_python),
        limit_s=config.vllm_start_s,
        dtype=getattr(config, "dtype", usual.dtype),
        device=getattr(config, "device", usual.device),
        max_context=getattr(config, "max_context", usual.max_context),
        in_flight=getattr(config, "batch_size", usual.in_flight),
        threads=getattr(config, "threads", usual.threads),
    )


def player_need(config: RolesConfig, player: RoleSettings) -> ServerNeed:
    """What a player of the kind `vllm` needs."""
    return ServerNeed(model=player.model, args=_pairs({**config.vllm_arg, **player.args}))


def players_needs(config: RolesConfig) -> list[ServerNeed]:
    """What all players of the kind `vllm` need."""
    return [player_need(config, who) for _, who in config.players() if who.kind == "vllm"]


def actor_need(
    config: RolesConfig, model: str, adapter: Path | None = None, *, attached: bool = False
) -> ServerNeed:
    """What an actor needs that is sampled by vLLM; `attached`: by servers that run already.
    ModelLoadError for an adapter whose files are damaged."""
    args = () if attached else _pairs(config.vllm_arg)
    rank = None
    if adapter is not None:
        check_adapter_file(adapter)
        rank = adapter_rank(adapter)
    return ServerNeed(model=model, args=args, lora_rank=rank)


def _pairs(flags: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(flags.items()))


def adapter_rank(folder: Path) -> int:
    """The largest rank in an adapter's folder; ModelLoadError where it does not say."""
    file = folder / ADAPTER_CONFIG
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return max([int(read["r"]), *map(int, (read.get("rank_pattern") or {}).values())])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"'{file}' does not say the rank of its adapter.",
            "A server that adapters are loaded on is told how large they are.",
            "Name a folder with a LoRA that PEFT or soulkit saved.",
        ) from error


def server_spec(terms: ServerTerms, need: ServerNeed, number: int = 1) -> ServerSpec:
    """The server that meets a need, one of a `number` that run at once: they share a GPU."""
    args, install = dict(need.args), vllm_version(terms.python)
    if number > 1 and install is not None and install.on_gpu and MEMORY_FLAG not in args:
        args[MEMORY_FLAG] = f"{GPU_SHARE / number:.2f}"
    return ServerSpec(
        model=need.model, dtype=terms.dtype, device=terms.device, max_context=terms.max_context,
        lora_rank=need.lora_rank, in_flight=terms.in_flight, args=args, python=terms.python,
        threads=terms.threads,
    )  # fmt: skip


def check_needs(needs: Sequence[ServerNeed], terms: ServerTerms) -> None:
    """Raise what can be said before any server is started: ModelLoadError for a folder that is not
    there, ConfigError without vLLM and for flags that are not the user's to set."""
    install = vllm_version(terms.python) if needs else None
    for need in needs:
        model_place(need.model)
        if install is None:
            raise no_vllm(terms.python, attachable=False)
        server_command(server_spec(terms, need), install, port=1)


@dataclass(slots=True)
class _Served:
    """One model as it is served: by a server of ours, or by those of somebody else."""

    need: ServerNeed
    fleet: Replicas
    abilities: ServerCapabilities
    codec: Codec
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    """By their folders."""


class VllmServers:
    """The vLLM servers of one run. A context manager: out of it none of them is left.

    `folder` is the run's, where their logs go; `attached` are the addresses of servers that serve
    the model `attached_model`, and `proof` is what shows that.
    """

    def __init__(
        self, folder: Path, terms: ServerTerms, *, attached: Sequence[str] = (),
        attached_model: str = "", proof: Proof = "none", reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        self._proof = proof
        self.folder, self.terms, self.reporter = folder, terms, reporter
        self._attached, self._attached_model = tuple(attached), attached_model
        self._expected: dict[Any, ServerNeed] = {}
        self._running: dict[Any, VllmServer] = {}
        self._specs: dict[Any, ServerSpec] = {}
        self._served: dict[Any, _Served] = {}
        self._codecs: dict[Any, Codec] = {}
        atexit.register(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        atexit.unregister(self.stop)

    # -- before anything is played -----------------------------------------------------------------

    def expect(self, needs: Sequence[ServerNeed]) -> None:
        """Needs of later runs that share these servers: a server is started so that it meets all
        that is expected of its model, and need not be started again."""
        for need in needs:
            before = self._expected.get(need.key)
            self._expected[need.key] = need if before is None else before.joined(need)

    def check(self, needs: Sequence[ServerNeed]) -> None:
        """Raise what can be said of these needs before any server is started: a ConfigError for
        flags that are not the user's to set, NotAttachable for servers of something else."""
        for need in needs:
            if self._is_attached(need.key):
                self.expect([need])
                self._served[need.key] = self._ready(need.key)
            else:
                check_needs([need], self.terms)

    def prepare(self, needs: Sequence[ServerNeed]) -> None:
        """Have these models served, and no others: blocks until all answer.

        Call it outside of an event loop. Raises a UserError with the log's last lines when a server
        does not start within its limit.
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

    def _start(self, key: Any, number: int) -> None:
        spec = server_spec(self.terms, self._expected[key], number)
        if spec.max_context is not None:  # a server ends if asked for more than its model holds
            spec = replace(spec, max_context=self._codec(key).context_limit)
        if key in self._running and self._specs[key] == spec:
            return
        self._stop_one(key)
        begun = time.monotonic()
        with self.reporter.starting(
            f"starting vLLM with {spec.model}", self.terms.limit_s
        ) as watch:
            server = VllmServer.start(
                spec, self.folder / LOGS, limit_s=self.terms.limit_s, watch=watch
            )
        self._running[key], self._specs[key] = server, spec
        seconds = time.monotonic() - begun
        self.reporter.note(
            f"vllm {server.version} serves {spec.model}, {seconds:.0f} s; log {server.log}"
        )

    def _ready(self, key: Any) -> _Served:
        """A new fleet for every run: one that was closed or lost a server cannot be used again."""
        need, server = self._expected[key], self._running.get(key)
        codec = self._codec(key)
        if server is not None:
            fleet = self._fleet([Address(server.url, server.key)], {server.url: server.check})
            abilities = ServerCapabilities(
                served=server.served, version=server.version, adapters=need.lora_rank is not None
            )
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
        """Compare attached servers' weights with the folder, where that is asked for."""
        if self._proof != "compare" or not served.abilities.basis:
            return
        limit = least_limit(served.codec.context_limit, served.abilities.max_context)
        prompts = compared_prompts(served.codec, limit)
        device, dtype = self.terms.device, self.terms.dtype
        folder = read_folder(served.need.model, adapter, prompts, device=device, dtype=dtype)
        self.reporter.note(asyncio.run(compare_weights(served.fleet, name, prompts, folder)))

    def _codec(self, key: Any) -> Codec:
        if key not in self._codecs:
            model, limit = self._expected[key].model, self.terms.max_context
            self._codecs[key] = Codec.load(model, max_context=limit)
        return self._codecs[key]

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

    # -- who plays ---------------------------------------------------------------------------------

    def sampler(
        self, need: ServerNeed, *, adapter: Path | None = None, ledger: Ledger | None = None,
        ledger_name: str = "",
    ) -> VllmModel:  # fmt: skip
        """The model that meets `need`, of those that `prepare` was called for; its replies go
        through `ledger`, under `ledger_name` (the model's if empty). With an `adapter`, which is
        loaded and shown to be there: call it outside of an event loop then. Raises a UserError for
        an adapter that is not taken."""
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
        """The servers that meet `need`, of those that `prepare` was called for."""
        return self._served[need.key].fleet

    def abilities(self, need: ServerNeed) -> ServerCapabilities:
        """What these servers can do."""
        return self._served[need.key].abilities

    def serving(
        self, config: RolesConfig, ledger: Ledger | None
    ) -> Callable[[RoleSettings], ChatModel]:
        """What makes the players of the kind `vllm` that `config` names (`Players.serve`)."""
        return lambda who: self.sampler(
            player_need(config, who), ledger=ledger, ledger_name=name_in_ledger(who)
        )

    def version_record(self, need: ServerNeed) -> dict[str, Any]:
        """The version of vLLM that serves `need`, where its servers tell, and `max_context`, the
        tokens of a prompt with its reply, where they hold fewer than the model."""
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
            prompt = served.codec.prompt_ids([Segment("user", CANARY)])
            served.adapters[folder] = asyncio.run(
                serve_adapter(served.fleet, served.abilities.served, adapter, prompt)
            )
            self._compare(served, served.adapters[folder].name, adapter)
        return served.adapters[folder].name

    # -- in the end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop what was started here, the last one first, and take adapters back from servers of
        others; again, it does nothing."""
        for key in reversed(list(self._running)):
            self._stop_one(key)
        for key in list(self._served):
            self._leave(key)

    def _stop_one(self, key: Any) -> None:
        server = self._running.pop(key, None)
        self._specs.pop(key, None)
        self._served.pop(key, None)
        if server is None:
            return
        try:
            server.stop()
        except UserError as error:  # the others are to be stopped all the same
            self.reporter.note(f"{error.what} {error.why}")

    def _leave(self, key: Any) -> None:
        """Take what was loaded away from servers that go on without this run."""
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
                f"adapters that could not be taken back from the servers: {left} ({error})"
            )


def name_in_ledger(player: RoleSettings) -> str:
    """What stands in the ledger for a player of the kind `vllm`: its model, with the flags that are
    its own. Two players of one model whose servers differ are not each other's replies."""
    return " ".join(
        [player.model, *(f"--{flag}={player.args[flag]}" for flag in sorted(player.args))]
    )


def unstarted_player(player: RoleSettings, ledger: Ledger | None) -> VllmModel:
    """A player of the kind `vllm` without its servers. ModelLoadError without its tokenizer."""
    codec = Codec.load(player.model)
    return unstarted(player.model, codec, ledger=ledger, ledger_name=name_in_ledger(player))


def unstarted(
    model: str, codec: Codec, *, policy_version: str = "", ledger: Ledger | None = None,
    ledger_name: str = "",
) -> VllmModel:  # fmt: skip
    """A model without servers: it answers what its `ledger` holds, and nothing else."""
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
    """Within it the servers run that players of `config` need, on its terms if no others are named;
    what makes those players."""
    with VllmServers(folder, terms or terms_of(config), reporter=reporter) as servers:
        servers.prepare(players_needs(config))
        yield servers.serving(config, ledger)


def _attached_words(abilities: ServerCapabilities, urls: Sequence[str]) -> str:
    """`attached to vllm 0.32.0 at http://a:8000: ids, processed log-probs, adapters`."""
    able = ["ids" if abilities.prompt_ids else "no ids", f"{abilities.logprobs} log-probs",
            "adapters" if abilities.adapters else "no adapters"]  # fmt: skip
    what = f"vllm {abilities.version}".rstrip()
    words = f"attached to {what} at {', '.join(urls)}: {', '.join(able)}"
    if abilities.basis == "declared":
        words += "; its weights are declared, not verified (--verify-weights compares them)"
    return words
