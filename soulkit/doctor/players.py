"""Players of a trial: models that record the outcome of each call, and models loaded for the
trial."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from soulkit.api_keys import printable
from soulkit.doctor.checks import Health, PlayerCheck
from soulkit.doctor.needs import TrialPart
from soulkit.errors import CallError, ProviderError, UserError
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.actor import longest_episode
from soulkit.models.api.probing import Preflight
from soulkit.models.base import Cast, ChatModel
from soulkit.models.local.loading import adapter_folder
from soulkit.models.players.players import Players, checkpoint_player
from soulkit.models.players.settings import RoleSettings
from soulkit.models.stand_ins import AnsweringModel, ObservedModel
from soulkit.models.vllm.manager import (
    ServerNeed,
    VllmServers,
    actor_need,
    player_need,
    players_needs,
    terms_of,
)
from soulkit.models.vllm.settings import interpreter, resolve_engine
from soulkit.reporting import SILENT, Reporter
from soulkit.text import one_line
from soulkit.types import Call, Completion, Sampling, Segment, Usage

SPOKEN = ("actor", "partner", "environment")
"""Roles whose turns make up an episode. Each is asked for one turn."""
MOST_TURNS = 4
"""Maximum turns of one player while another has not been reached."""
QUOTED = 80
"""Maximum characters shown of a reply."""


class EnoughHeard(CallError):
    """Every player has had a turn, so the rest of the episode is skipped."""

    reason = "enough_heard"


@dataclass
class PlayerReport:
    """The record of one player in one role."""

    role: str
    who: str
    task: str = ""
    calls: int = 0
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    text: str = ""
    """Text of its latest reply."""
    stop_reason: str = ""
    forms: set[str] = field(default_factory=set)
    failure: str = ""
    """Why a call failed."""
    unusable: UserError | None = None
    """Why the model could not be created."""
    away: str = ""
    """Why it is not asked here."""
    unread: str = ""
    """Why its reply cannot be used."""
    verdict: str = ""
    """What was read from its verdict."""

    @property
    def absent(self) -> bool:
        return bool(self.away or self.unusable)

    def note(self, reply: Completion, sampling: Sampling, seconds: float) -> None:
        """Record one reply."""
        self.calls, self.seconds = self.calls + 1, self.seconds + seconds
        self.usage += reply.usage
        self.text, self.stop_reason = reply.text, reply.stop_reason
        if sampling.form is not None:
            refused = any(name.partition(":")[0] == "form" for name in reply.dropped)
            self.forms.add("refused" if refused else
                           "ignored" if "form" in reply.ignored else "held")  # fmt: skip

    def check(self) -> PlayerCheck:
        """The line to show for this player."""
        health, words, way = self._outcome()
        return PlayerCheck(
            role=self.role, who=self.who, task=self.task, health=health, words=printable(words),
            way=printable(way), calls=self.calls, seconds=round(self.seconds, 3),
            prompt_tokens=self.usage.prompt_tokens, cost=self.usage.cost,
            completion_tokens=self.usage.completion_tokens, schema=self._schema(),
        )  # fmt: skip

    def _schema(self) -> Literal["", "held", "ignored", "refused"]:
        """The worst outcome of a schema: a server may accept one schema and reject the next."""
        fates: tuple[Literal["refused", "ignored", "held"], ...] = ("refused", "ignored", "held")
        return next((fate for fate in fates if fate in self.forms), "")

    def _outcome(self) -> tuple[Health, str, str]:
        if self.unusable is not None:
            return "problem", one_line(self.unusable.what, 300), self.unusable.way_out
        if self.away:
            return "note", f"not asked: {self.away}", ""
        if self.failure:
            return "problem", f"no answer: {one_line(self.failure, 300)}", _way_to_answers(self)
        if self.unread:
            way = (
                f"use another --{self.role.replace('_', '-')}, or allow longer replies (max_tokens)"
            )
            wrote = f"; it wrote: {quoted(self.text)}" if self.text.strip() else ""
            return "problem", f"{one_line(self.unread, 200)}{wrote}", way
        if not self.calls:
            return "note", "not asked: the row used for this check does not need it", ""
        return self._answered()

    def _answered(self) -> tuple[Health, str, str]:
        words = self.verdict or f"answered: {quoted(self.text)}"
        if not self.text.strip():
            return "problem", f"an empty reply ({self.stop_reason})", _way_to_answers(self)
        if self.stop_reason == "length":
            return "note", f"{words} (truncated at the length limit)", _way_to_room(self)
        if self._schema() in ("ignored", "refused"):
            words += "; the server does not enforce the JSON schema; only the prompt asks for it"
            return "note", words, ""
        return "ok", words, ""


def quoted(text: str) -> str:
    """The beginning of a reply, safe to print."""
    return f"'{one_line(text, QUOTED)}'"


def _way_to_answers(seat: PlayerReport) -> str:
    option = "--model and --base-url" if seat.role == "actor" else f"--{seat.role}"
    return f"check the address, model name and key in {option.replace('_', '-')}"


def _way_to_room(seat: PlayerReport) -> str:
    if seat.role == "actor":
        return "increase --max-tokens"
    return f"allow longer replies of the {seat.role.replace('_', ' ')} (max_tokens)"


@dataclass
class TrialPlayers:
    """All players by role and settings, and which of them still need a turn."""

    load: bool = False
    """Whether to load checkpoints and ask them."""
    seats: dict[tuple[str, str], PlayerReport] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    """Roles that need a turn in this episode; empty: no limit."""
    turns: dict[str, int] = field(default_factory=dict)

    def seat(self, role: str, who: str) -> PlayerReport:
        """The report of one player in a role, created on first use."""
        return self.seats.setdefault((role, who), PlayerReport(role, who))

    def begin(self, expected: frozenset[str]) -> None:
        """Start an episode in which each role of `expected` needs a turn."""
        self.expected, self.turns = expected, {}

    def take_turn(self, role: str) -> None:
        """Count a turn of `role`. Raises EnoughHeard if every role has had one."""
        if role not in self.expected:
            return
        had = self.turns.get(role, 0)
        if had and (self.expected <= self.turns.keys() or had >= MOST_TURNS):
            raise EnoughHeard(f"the {role} had its turn")
        self.turns[role] = had + 1


class ReportedModel(ObservedModel):
    """A player's model that records the outcome of its calls."""

    def __init__(self, model: ChatModel, seat: PlayerReport, table: TrialPlayers) -> None:
        super().__init__(model)
        self.seat, self._table = seat, table

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        self._table.take_turn(call.role)
        start = time.monotonic()
        try:
            reply = await self.model.complete(context, sampling, call)
        except CallError as error:
            self.seat.failure = self.seat.failure or error.detail
            raise
        except UserError as error:  # the server rejected the request; other players continue
            self.seat.unusable = self.seat.unusable or error
            raise ProviderError(error.what) from error
        self.seat.note(reply, sampling, time.monotonic() - start)
        return reply

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """Record that the caller could not use the reply."""
        self.seat.unread = self.seat.unread or "its reply cannot be read"


class AbsentModel(AnsweringModel):
    """Stands in for a model that is not asked: returns the lines of a script, or fails."""

    def __init__(self, name: str, script: Sequence[str] = ()) -> None:
        super().__init__(name, self._line)
        self._lines = list(script)

    def _line(self, call: Call, sampling: Sampling) -> str:
        if call.role != "actor":
            raise ProviderError(f"{self.name} is not asked here")
        return self._lines.pop(0) if self._lines else "I see. Please go on."


@dataclass
class ReportedPlayers(Players):
    """Players that record every call. A player that cannot be created does not stop the others."""

    table: TrialPlayers = field(default_factory=TrialPlayers)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        seat = self.table.seat(role, settings.written())
        try:
            if settings.player_kind.takes_memory and not self.table.load:
                seat.away = "it must be loaded first (add --load)"
            elif settings.kind == "actor" and isinstance(self.actor, AbsentModel):
                seat.away = "it is the model under test, which is not loaded (add --load)"
            else:
                return ReportedModel(self.made(role, settings), seat, self.table)
        except UserError as error:
            seat.unusable = error
        return AbsentModel(settings.written())

    def made(self, role: str, settings: RoleSettings) -> ChatModel:
        """The model behind `settings`; UserError if it cannot be created."""
        # One Preflight per player: a server that refuses must not stop the others.
        self.preflight = Preflight(self.reporter)
        return super().model(role, settings)


def quick(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of endpoints for a single question: few retries and short timeouts."""
    return {
        **arguments, "max_attempts": 2, "backoff_s": min(arguments.get("backoff_s", 1.0), 1.0),
        "rate_limit_wait_s": min(arguments.get("rate_limit_wait_s", 60.0), 60.0),
        "timeout_s": min(arguments.get("timeout_s", 60.0), 60.0),
    }  # fmt: skip


def single_opinion(cast: Cast) -> Cast:
    """The cast with one reply per judge, and one order per pair."""
    panel = replace(cast.panel, samples=1, orders="seeded")
    return replace(cast, panel=panel)


TINY = "tiny"
"""Model that is created when training begins."""


@dataclass
class LoadedModels:
    """The local models of `part`, loaded on first use. A context manager."""

    part: TrialPart
    load: bool = True
    """False: nothing is loaded or started; only servers that already run are asked."""
    reporter: Reporter = SILENT
    _broken: UserError | None = None
    """Why a server could not be started."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        config = self.part.config
        self._need: ServerNeed | None = None
        self._servers: VllmServers | None = None
        try:
            self._start(players_needs(config) if self.load else [])
        except UserError as error:
            self._broken = error
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, needs: list[ServerNeed]) -> None:
        """Start the servers of the model under test and of all players; UserError on failure."""
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
        servers = VllmServers(
            folder,
            terms_of(config),
            attached=urls,
            attached_model=config.model,
            proof="compare" if config.verify_weights else "none",
            reporter=self.reporter,
        )
        self._servers = self._stack.enter_context(servers)
        servers.expect_episodes(longest_episode(self.part.work, config))
        servers.check(needs)
        servers.prepare(needs)

    @property
    def _adapter(self) -> Path | None:
        adapter = self.part.config.adapter
        return None if adapter is None else adapter_folder(adapter)

    def actor(self) -> ChatModel | None:
        """The model under test; None if it is only created when training begins. UserError if it
        cannot be loaded. Call it outside an event loop."""
        config = self.part.config
        if config.model == TINY:
            return None
        if self._broken is not None:
            raise self._broken
        if self._need is not None and self._servers is not None:
            return self._servers.sampler(self._need, adapter=self._adapter)
        if isinstance(config, EvalConfig):
            from soulkit.eval.run.actor import local_model

            return local_model(config)
        return checkpoint_player(
            config.model,
            adapter=config.adapter,
            device=config.device,
            dtype=config.dtype,
            quantize=config.quantize,
        )

    def player(self, path: str) -> ChatModel:
        """A local checkpoint used as a player."""
        config = self.part.config
        return checkpoint_player(path, device=config.device, dtype=config.dtype)

    def served(self, settings: RoleSettings) -> ChatModel:
        """A player of the kind `vllm`."""
        if self._broken is not None or self._servers is None:
            raise self._broken or RuntimeError("no server was started for a player")
        return self._servers.sampler(player_need(self.part.config, settings))
