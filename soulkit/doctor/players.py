"""Players of a trial: what is noted of each while it is asked, and models loaded for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from soulkit.api_keys import printable
from soulkit.doctor.checks import Health, PlayerCheck
from soulkit.doctor.needs import TrialPart
from soulkit.errors import CallError, ProviderError, UserError
from soulkit.eval.config import EvalConfig
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
"""The roles whose turns make an episode: each is asked for one turn."""
MOST_TURNS = 4
"""Turns of one player while another one was not reached yet."""
QUOTED = 80
"""Characters of a reply that are shown."""


class EnoughHeard(CallError):
    """Everybody had a turn: the rest of the episode is not played."""

    reason = "enough_heard"


@dataclass
class PlayerReport:
    """What is noted of one player in one role."""

    role: str
    who: str
    task: str = ""
    calls: int = 0
    seconds: float = 0.0
    usage: Usage = field(default_factory=Usage)
    text: str = ""
    """Of its newest reply."""
    stop_reason: str = ""
    forms: set[str] = field(default_factory=set)
    failure: str = ""
    """Why a call brought nothing."""
    unusable: UserError | None = None
    """Why it could not even be made."""
    away: str = ""
    """Why it is not asked here."""
    unread: str = ""
    """Why what it said is of no use."""
    verdict: str = ""
    """What was read of it."""

    @property
    def absent(self) -> bool:
        return bool(self.away or self.unusable)

    def note(self, reply: Completion, sampling: Sampling, seconds: float) -> None:
        """One more reply."""
        self.calls, self.seconds = self.calls + 1, self.seconds + seconds
        self.usage += reply.usage
        self.text, self.stop_reason = reply.text, reply.stop_reason
        if sampling.form is not None:
            refused = any(name.partition(":")[0] == "form" for name in reply.dropped)
            self.forms.add("refused" if refused else
                           "ignored" if "form" in reply.ignored else "held")  # fmt: skip

    def check(self) -> PlayerCheck:
        """The line that is shown."""
        health, words, way = self._outcome()
        return PlayerCheck(
            role=self.role, who=self.who, task=self.task, health=health, words=printable(words),
            way=printable(way), calls=self.calls, seconds=round(self.seconds, 3),
            prompt_tokens=self.usage.prompt_tokens, cost=self.usage.cost,
            completion_tokens=self.usage.completion_tokens, schema=self._schema(),
        )  # fmt: skip

    def _schema(self) -> Literal["", "held", "ignored", "refused"]:
        """The worst that became of a schema: a server may hold one and not the next."""
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
                f"another --{self.role.replace('_', '-')}, or more room for its reply (max_tokens)"
            )
            wrote = f"; it wrote: {quoted(self.text)}" if self.text.strip() else ""
            return "problem", f"{one_line(self.unread, 200)}{wrote}", way
        if not self.calls:
            return "note", "not asked: the row that was tried does not come to it", ""
        return self._answered()

    def _answered(self) -> tuple[Health, str, str]:
        words = self.verdict or f"answered: {quoted(self.text)}"
        if not self.text.strip():
            return "problem", f"an empty reply ({self.stop_reason})", _way_to_answers(self)
        if self.stop_reason == "length":
            return "note", f"{words} (cut at its limit)", _way_to_room(self)
        if self._schema() in ("ignored", "refused"):
            words += "; its server does not hold replies to a schema: the prompt alone says it"
            return "note", words, ""
        return "ok", words, ""


def quoted(text: str) -> str:
    """The beginning of a reply, safe to show."""
    return f"'{one_line(text, QUOTED)}'"


def _way_to_answers(seat: PlayerReport) -> str:
    option = "--model and --base-url" if seat.role == "actor" else f"--{seat.role}"
    return f"check address, name of the model and key in {option.replace('_', '-')}"


def _way_to_room(seat: PlayerReport) -> str:
    if seat.role == "actor":
        return "a larger --max-tokens"
    return f"more room for the reply of the {seat.role.replace('_', ' ')} (max_tokens)"


@dataclass
class TrialPlayers:
    """Everybody who is asked, by role and settings, and whose turn it may be."""

    load: bool = False
    """Whether checkpoints are loaded to ask them."""
    seats: dict[tuple[str, str], PlayerReport] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()
    """The speakers of the episode that is played; empty: all may speak."""
    turns: dict[str, int] = field(default_factory=dict)

    def seat(self, role: str, who: str) -> PlayerReport:
        """The note on one player in a role, made when it is first named."""
        return self.seats.setdefault((role, who), PlayerReport(role, who))

    def begin(self, expected: frozenset[str]) -> None:
        """An episode begins in which each of `expected` is to have a turn."""
        self.expected, self.turns = expected, {}

    def take_turn(self, role: str) -> None:
        """`role` is about to speak. Raises EnoughHeard where everybody has."""
        if role not in self.expected:
            return
        had = self.turns.get(role, 0)
        if had and (self.expected <= self.turns.keys() or had >= MOST_TURNS):
            raise EnoughHeard(f"the {role} had its turn")
        self.turns[role] = had + 1


class ReportedModel(ObservedModel):
    """A player's model; what becomes of its calls is noted."""

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
        except UserError as error:  # a server that refuses; others may be asked all the same
            self.seat.unusable = self.seat.unusable or error
            raise ProviderError(error.what) from error
        self.seat.note(reply, sampling, time.monotonic() - start)
        return reply

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """Whoever asked could not use the reply."""
        self.seat.unread = self.seat.unread or "what it said cannot be read"


class AbsentModel(AnsweringModel):
    """Takes the place of a model that is not asked; says the lines of a script, else fails."""

    def __init__(self, name: str, script: Sequence[str] = ()) -> None:
        super().__init__(name, self._line)
        self._lines = list(script)

    def _line(self, call: Call, sampling: Sampling) -> str:
        if call.role != "actor":
            raise ProviderError(f"{self.name} is not asked here")
        return self._lines.pop(0) if self._lines else "I see. Please go on."


@dataclass
class ReportedPlayers(Players):
    """Players of whom everything is noted; one that cannot be made does not keep the others from
    being asked."""

    table: TrialPlayers = field(default_factory=TrialPlayers)

    def model(self, role: str, settings: RoleSettings) -> ChatModel:
        seat = self.table.seat(role, settings.written())
        try:
            if settings.player_kind.takes_memory and not self.table.load:
                seat.away = "it would have to be loaded (--load)"
            elif settings.kind == "actor" and isinstance(self.actor, AbsentModel):
                seat.away = "it is the actor, which is not loaded (--load)"
            else:
                return ReportedModel(self.made(role, settings), seat, self.table)
        except UserError as error:
            seat.unusable = error
        return AbsentModel(settings.written())

    def made(self, role: str, settings: RoleSettings) -> ChatModel:
        """The model behind `settings`, as it is; a UserError when it cannot be made."""
        # Of its own, or one server's refusal would keep everybody from being asked.
        self.preflight = Preflight(self.reporter)
        return super().model(role, settings)


def quick(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of endpoints for a single question: whoever is away is to be known soon."""
    return {
        **arguments, "max_attempts": 2, "backoff_s": min(arguments.get("backoff_s", 1.0), 1.0),
        "rate_limit_wait_s": min(arguments.get("rate_limit_wait_s", 60.0), 60.0),
        "timeout_s": min(arguments.get("timeout_s", 60.0), 60.0),
    }  # fmt: skip


def single_opinion(cast: Cast) -> Cast:
    """The cast, whose judges give one opinion each, and see a pair one way round."""
    panel = replace(cast.panel, samples=1, orders="seeded")
    return replace(cast, panel=panel)


TINY = "tiny"
"""A model that is made when its training begins."""


@dataclass
class LoadedModels:
    """What `part` has on this machine; a context manager. Nothing is loaded before it is named."""

    part: TrialPart
    load: bool = True
    """False: nothing is loaded or started, and servers that run already are asked alone."""
    reporter: Reporter = SILENT
    _broken: UserError | None = None
    """Why no server could be started."""
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
        servers = VllmServers(
            folder,
            terms_of(config),
            attached=urls,
            attached_model=config.model,
            proof="compare" if config.verify_weights else "none",
            reporter=self.reporter,
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
            from soulkit.eval.run.actor import local_model

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
