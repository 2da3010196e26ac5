"""Models that compute on this machine, there for as long as they are asked: with `--load` alone.
An actor on servers that run already is asked without it.

Checkpoints are loaded as their command loads them; what sits behind vLLM has its servers started
with their logs in a folder that is thrown away, and stopped in the end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from soulkit.doctor.needs import TrialPart
from soulkit.errors import UserError
from soulkit.eval.config import EvalConfig
from soulkit.models.base import ChatModel
from soulkit.models.local.names import adapter_folder
from soulkit.models.roles.checkpoints import checkpoint_player
from soulkit.models.roles.settings import RoleSettings
from soulkit.models.vllm.engine import interpreter, resolve_engine
from soulkit.models.vllm.pool import (
    ServerNeed,
    Servers,
    actor_need,
    player_need,
    players_needs,
    terms_of,
)

TINY = "tiny"
"""A model that is made when its training begins."""


@dataclass
class LoadedModels:
    """What `part` has on this machine; a context manager. Nothing is loaded before it is named."""

    part: TrialPart
    say: Callable[[str], None]
    load: bool = True
    """False: nothing is loaded or started, and servers that run already are asked alone."""
    _broken: UserError | None = None
    """Why no server could be started."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        config = self.part.config
        self._need: ServerNeed | None = None
        self._servers: Servers | None = None
        try:
            self._start(players_needs(config) if self.load else [])
        except UserError as error:
            self._broken = error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._stack.close()

    def _start(self, needs: list[ServerNeed]) -> None:
        """Start the servers of the actor and of the players, all of them before anybody is asked:
        a UserError where one does not start."""
        config = self.part.config
        urls: tuple[str, ...] = ()
        if self.part.served_actor is None and config.model != TINY:
            python = interpreter(config.vllm_python)
            engine = resolve_engine(config.engine_choice, python=python, device=config.device)
            urls = engine.urls
            if engine.kind == "vllm":
                self._need = actor_need(config, config.model, self._adapter, attached=bool(urls))
                needs = [self._need, *needs]
        if not needs:
            return
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="soul-doctor-")))
        servers = Servers(
            folder,
            terms_of(config),
            say=self.say,
            attached=urls,
            attached_model=config.model,
            proof="compare" if config.verify_weights else "none",
        )
        self._servers = self._stack.enter_context(servers)
        servers.check(needs)
        servers.prepare(needs)

    @property
    def _adapter(self) -> Path | None:
        adapter = self.part.config.adapter
        return None if adapter is None else adapter_folder(adapter)

    def actor(self) -> ChatModel | None:
        """The actor; None for one that is only made when the training begins. UserError when it
        cannot be loaded. Call it outside of an event loop."""
        config = self.part.config
        if config.model == TINY:
            return None
        if self._broken is not None:
            raise self._broken
        if self._need is not None and self._servers is not None:
            return self._servers.sampler(self._need, adapter=self._adapter)
        if isinstance(config, EvalConfig):
            from soulkit.eval.actor import local_model

            return local_model(config)
        return checkpoint_player(
            config.model, adapter=config.adapter, device=config.device, dtype=config.dtype
        )

    def player(self, path: str) -> ChatModel:
        """A checkpoint that plays beside the actor."""
        config = self.part.config
        return checkpoint_player(path, device=config.device, dtype=config.dtype)

    def served(self, settings: RoleSettings) -> ChatModel:
        """A player of the kind `vllm`."""
        if self._broken is not None or self._servers is None:
            raise self._broken or RuntimeError("no server was started for a player")
        return self._servers.sampler(player_need(self.part.config, settings))
