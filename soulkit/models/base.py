"""Models as the rest of soulkit sees them: ChatModel, Player, Cast, and how long a reply may be.

Local, vLLM and API models look the same to a task. A reply may have min(limit, context − prompt)
tokens. Where that is less than LEAST_ROOM tokens, or than the limit where the limit itself is
lower, the row does not fit: a reply that is cut after a few tokens says nothing about the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from soulkit.errors import (
    CallError,
    ConfigError,
    ContextOverflow,
    PartnerError,
    ProviderError,
    UnreadableVerdict,
)
from soulkit.types import LEAST_ROOM, Call, Completion, Form, Role, Sampling, Segment

if TYPE_CHECKING:
    from pathlib import Path

    from soulkit.models.ledger.ledger import Ledger


def min_reply_tokens(limit: int) -> int:
    """Tokens that must be left for a reply of at most `limit` tokens."""
    return min(LEAST_ROOM, limit)


def max_reply_tokens(prompt: int, limit: int, context: int | None) -> int:
    """Tokens that the reply to `prompt` tokens may have; 0 when the row does not fit.

    `context` is what the model holds in all; None: not known, and the limit is all there is.
    """
    room = limit if context is None else min(limit, context - prompt)
    return room if room >= min_reply_tokens(limit) else 0


_BLAME: dict[Role, type[CallError]] = {
    "partner": PartnerError,
    "environment": PartnerError,
    "judge": UnreadableVerdict,
    "auditor": UnreadableVerdict,
    "coach": UnreadableVerdict,
}

_MAY_NOT_REFUSE: tuple[Role, ...] = ("partner", "environment", "coach")
"""Whose refusal is nobody's words. An actor's is its answer, a judge is asked again."""


class ChatModel(Protocol):
    """A live model. `complete` raises `CallError` (never returns an error as text)."""

    name: str

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion: ...

    async def close(self) -> None: ...


class TrainedWeights(Protocol):
    """Weights that a trainer moves, as a sampler is given them."""

    def version(self) -> str:
        """Their hash."""

    def save(self, folder: Path, step: int | None = None) -> None:
        """Write them as a Hugging Face folder."""


class Sampler(ChatModel, Protocol):
    """What samples for training, or for the evaluation of weights that one has: prompted with ids,
    it answers with ids and log-probs; in this process or behind HTTP."""

    policy_version: str
    """Hash of the adapter that samples, stamped on every completion; empty without one."""

    @property
    def context_limit(self) -> int | None:
        """Tokens of a prompt with its reply; None: not known."""

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Tokens of the prompt that `context` becomes."""

    async def take(self, weights: TrainedWeights) -> None:
        """Sample with these weights from now on; returns once they are proven to be there."""


@dataclass(frozen=True, slots=True)
class Player:
    """A model and how it is sampled in its role."""

    model: ChatModel
    sampling: Sampling = field(default_factory=Sampling)
    repeated: Sampling | None = None
    """How it is sampled where one question is put to it several times; None: in the same way."""

    def asked_times(self, times: int) -> Player:
        """The same player, as it is sampled for so many opinions on one question."""
        if times == 1 or self.repeated is None:
            return self
        return replace(self, sampling=self.repeated)

    def with_form(self, form: Form | None) -> Player:
        """The same player, whose replies are to have this form."""
        return replace(self, sampling=replace(self.sampling, form=form))

    def set_aside(self, context: Sequence[Segment], call: Call) -> None:
        """The reply to this call was of no use: when the run is taken up it is asked for again.

        Only models that keep their replies know what that means.
        """
        keeps = getattr(self.model, "set_aside", None)
        if keeps is not None:
            keeps(context, self.sampling, call)

    async def complete(self, context: Sequence[Segment], call: Call) -> Completion:
        """The model's reply; a provider's failure is blamed on the role that was called.

        The words of a refusal are no line of a partner's and no feedback: they are its failure.
        """
        try:
            reply = await self.model.complete(context, self.sampling, call)
        except (ProviderError, ContextOverflow) as error:
            blamed = _BLAME.get(call.role)
            if blamed is None:
                raise
            raise blamed(error.detail) from error
        if reply.stop_reason == "refusal" and call.role in _MAY_NOT_REFUSE:
            self.set_aside(context, call)
            raise _BLAME[call.role](f"{self.model.name} refused: {reply.text[:200]}")
        return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """How several opinions of one episode become one."""

    samples: int | None = None
    """Opinions of each judge on every question; None: as many as the question asks for."""
    questions: Mapping[str, int] = field(default_factory=dict)
    """Purpose of a question → opinions of each judge, as the task declares."""
    combine: Literal["mean", "vote"] = "mean"
    orders: Literal["both", "seeded"] = "both"
    """Of a pairwise judgement: A and B both ways round, or one way drawn by the example."""

    def samples_of(self, purpose: str, usual: int = 1) -> int:
        """Opinions of each judge on a question that by itself asks for `usual`."""
        return self.samples or self.questions.get(purpose, usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The live models that fill the roles."""

    actor: Player
    partner: Player | None = None
    environment: Player | None = None
    judges: tuple[Player, ...] = ()
    auditors: tuple[Player, ...] = ()
    """Nobody: the judges audit, too."""
    coach: Player | None = None
    coach_sees_gold: bool = False
    """Whether coaches are told the right answer; the leak check stays."""
    panel: Panel = Panel()
    purpose: str = ""
    """What judges are asked for where it is not the episode's own score: a part of their calls."""
    ledger: Ledger | None = None
    """Where a task keeps replies that it pays for itself (a detection service's); models have
    their own way to it."""
    by_task: Mapping[str, Cast] = field(default_factory=dict)
    """Task → its cast, where it is another one; their actors are left as they were made."""

    @property
    def players(self) -> tuple[Player, ...]:
        """Everybody at the table, in any task."""
        single = (self.actor, self.partner, self.environment, self.coach)
        here = tuple(p for p in (*single, *self.judges, *self.auditors) if p is not None)
        return (*here, *(player for cast in self.by_task.values() for player in cast.players))

    def in_task(self, task: str) -> Cast:
        """The cast of one task, with this actor."""
        return replace(self.by_task.get(task, self), actor=self.actor, by_task={})

    def filled(self) -> frozenset[Role]:
        """The roles that somebody fills."""
        single: dict[Role, Player | None] = {
            "actor": self.actor, "partner": self.partner,
            "environment": self.environment, "coach": self.coach,
        }  # fmt: skip
        judged: frozenset[Role] = frozenset(["judge", "auditor"] if self.judges else [])
        judged |= {"auditor"} if self.auditors else frozenset()
        return judged | {role for role, player in single.items() if player is not None}

    def panel_of(self, role: Role) -> tuple[Player, ...]:
        """Those who fill `judge` or `auditor` together; nobody for another role."""
        if role == "auditor":
            return self.auditors or self.judges
        return self.judges if role == "judge" else ()

    def player(self, role: Role) -> Player:
        """The player of `role` (the first judge); ConfigError when the role is not filled."""
        panel = self.panel_of(role)
        player: Player | None = panel[0] if panel else getattr(self, role, None)
        if player is None:
            raise unfilled(role)
        return player


def unfilled(role: Role, task: str = "") -> ConfigError:
    """The error of a role that nobody plays."""
    who = f"The task '{task}'" if task else "This task"
    scripted = " A scripted one for trials: soul serve partner TASK." if role == "partner" else ""
    return ConfigError(
        f"{who} needs a model in the role '{role}', and none was given.",
        f"An episode cannot be played or scored without its {role}.",
        f"Name one with --{role} endpoint:MODEL@URL.{scripted}",
    )
