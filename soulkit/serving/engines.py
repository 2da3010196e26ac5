"""Opens a model for chat requests: in this process, or on a vLLM server.

MODEL ─▶ weights (run, folder, Hub id, tiny) ─▶ engine ─▶ LocalBackend
                                                      └─▶ VllmBackend, started or attached
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from soulkit.errors import ConfigError, UserError, did_you_mean
from soulkit.models.players.players import checkpoint_player
from soulkit.models.vllm.adapters import MODELS, entries_of
from soulkit.models.vllm.capabilities import attached_addresses
from soulkit.models.vllm.client import Address, ServerGone, ServerRefused, VllmClient
from soulkit.models.vllm.manager import LOGS, ServerNeed, ServerTerms, VllmServers, adapter_rank
from soulkit.models.vllm.settings import interpreter, parse_engine, resolve_engine, vllm_version
from soulkit.people.continuations import models_of
from soulkit.people.simulation import TINY, tiny_person
from soulkit.reporting import SILENT, Reporter
from soulkit.serving.backend import ChatBackend
from soulkit.serving.vllm_backend import VllmBackend

WEB = ("http://", "https://")


@contextmanager
def opened_model(
    model: str, *, adapter: str | None = None, engine: str = "auto", device: str = "auto",
    max_context: int | None = None, running: int = 64, name: str = "",
    reporter: Reporter = SILENT,
) -> Iterator[ChatBackend]:  # fmt: skip
    """The backend of a training run, a folder with weights, a Hub model, or `tiny`; or of the only
    model of a running server, if `model` is its address.

    `running`: replies at the same time; `name`: id for clients, by default from the model. The
    caller closes the backend. UserError if the model cannot be loaded or the engine not started.
    """
    if model.startswith(WEB):
        model, engine = "", f"vllm@{model}"
    try:
        choice = parse_engine(engine)
    except ValueError as error:
        raise ConfigError(
            f"'{engine}' is not an engine.", f"{error}.", "Use --engine auto, local or vllm."
        ) from error
    if choice.attached:
        if adapter or max_context or device != "auto":
            raise ConfigError(
                "--adapter, --max-context and --device have no effect on a running server.",
                "They are set where it is started.", "Leave them out.",
            )  # fmt: skip
        yield _attached(choice.urls[0], model, name)
        return
    name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
    python = interpreter(None)
    choice = resolve_engine(choice, python=python, device=device)
    why = ""
    if engine == "auto" and choice.kind == "local":
        why = (
            f" ({'there is no GPU for vLLM' if vllm_version(python) else 'vLLM is not installed'})"
        )
    reporter.note(f"engine: {choice.words()}{why}")
    folder = Path(tempfile.mkdtemp(prefix="soulkit-"))
    try:
        place, weights = _weights(model, adapter, folder)
        if choice.kind == "vllm":
            terms = ServerTerms(
                python=python, device=device, max_context=max_context, in_flight=running
            )
            with _on_vllm(place, weights, name, VllmServers(folder, terms, reporter=reporter)) as b:
                yield b
            return
        from soulkit.serving.local_backend import LocalBackend

        with reporter.working(f"loading {name}"):
            local = LocalBackend(checkpoint_player(
                place, adapter=weights, device=device, batch_size=running, max_context=max_context
            ))  # fmt: skip
        local.name = name
        yield local
    finally:
        failed = isinstance(sys.exc_info()[1], UserError)
        if not (failed and (folder / LOGS).is_dir()):  # the error names a log there
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _on_vllm(
    place: str, weights: str | None, name: str, starting: VllmServers
) -> Iterator[VllmBackend]:
    folder = Path(weights) if weights else None
    need = ServerNeed(model=place, lora_rank=adapter_rank(folder) if folder else None)
    with starting as servers:
        servers.check([need])
        servers.prepare([need])
        player = servers.sampler(need, adapter=folder)
        (server,) = servers.started(need)
        yield VllmBackend(
            Address(server.url, server.key), player.served, name=name, check=server.check,
            context_limit=player.codec.context_limit,
        )  # fmt: skip


def _attached(url: str, served: str, name: str) -> VllmBackend:
    """The model `served` of a running server; its only one if none is named."""
    (address,) = attached_addresses([url])
    try:
        entries = entries_of(asyncio.run(VllmClient(address).ask(MODELS)))
    except (ServerRefused, ServerGone) as error:
        raise ConfigError(
            f"The server at {url} does not list its models.", f"{error}",
            "Check the address, and the key in VLLM_API_KEY.",
        ) from error  # fmt: skip
    for entry in entries:
        if entry.id == served or (not served and len(entries) == 1):
            return VllmBackend(address, entry.id, name=name, context_limit=entry.max_context)
    names = [entry.id for entry in entries]
    raise ConfigError(
        f"The server at {url} has no model '{served}'.", f"It has {', '.join(names) or 'none'}.",
        did_you_mean(served, names),
    )  # fmt: skip


def _weights(model: str, adapter: str | None, folder: Path) -> tuple[str, str | None]:
    """The base model and the adapter that MODEL stands for."""
    if model == TINY:
        return tiny_person(folder / TINY), adapter
    subject = models_of(model, {}, adapter)[-1]
    if subject.player.kind != "local":
        raise ConfigError(
            f"'{model}' cannot be served.", "It is a player, not a model with weights.",
            "Name a training run, a folder with weights, or a Hub model.",
        )  # fmt: skip
    return subject.player.model, subject.adapter
