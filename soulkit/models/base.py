"""Interfaces of models: ChatModel, Player, Cast, and the maximum length of a reply.

Tasks use local, vLLM and API models in the same way. A reply may have min(limit, context − prompt)
tokens. If that is less than LEAST_ROOM tokens (or than the limit, if the limit is lower), the row
does not fit: a reply truncated after a few tokens says nothing about the model.
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
    """Minimum tokens to leave for a reply of at most `limit` tokens."""
    return min(LEAST_ROOM, limit)


def max_reply_tokens(prompt: int, limit: int, context: int | None) -> int:
    """Maximum tokens of the reply to `prompt` tokens; 0 if the row does not fit.

    `context` is the model's total context; None: unknown, so only `limit` counts.
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
"""Roles whose refusal is a failure. An actor's refusal is its answer; a judge is asked again."""


class ChatModel(Protocol):
    """A live model. `complete` raises `CallError`; it never returns an error as text."""

    name: str

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion: ...

    async def close(self) -> None: ...


class TrainedWeights(Protocol):
    """The weights of the model in training, as a sampler receives them."""

    def version(self) -> str:
        """Hash of the weights."""

    def save(self, folder: Path, step: int | None = None) -> None:
        """Write the weights as a Hugging Face folder."""


class Sampler(ChatModel, Protocol):
    """A model whose weights soulkit controls, for training or evaluation, in this process or over
    HTTP. It takes prompt ids and returns ids and log-probs."""

    policy_version: str
    """Hash of the active adapter, recorded in every completion; empty without one."""

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of prompt and reply together; None: unknown."""

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Number of prompt tokens for `context`."""

    async def take(self, weights: TrainedWeights) -> None:
        """Sample with these weights from now on; returns after verifying that they are loaded."""


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """A model's own system prompt, before the task's or in its place; empty for none."""

    text: str = ""
    replaces: bool = False

    def added_to(self, context: Sequence[Segment]) -> tuple[Segment, ...]:
        """The context as the model sees it."""
        if not self.text:
            return tuple(context)
        start = [one.text for one in context[:1] if one.role == "system"]
        text = "\n\n".join([self.text, *([] if self.replaces else start)])
        return (Segment("system", text), *context[len(start) :])


NO_PROMPT = ModelPrompt()


@dataclass(frozen=True, slots=True)
class Player:
    """A model with the sampling settings of its role, and its own instructions."""

    model: ChatModel
    sampling: Sampling = field(default_factory=Sampling)
    repeated: Sampling | None = None
    """Sampling when one question is asked several times; None: the same as `sampling`."""
    instructions: ModelPrompt = NO_PROMPT

    def asked_times(self, times: int) -> Player:
        """The player with the sampling settings for asking a question `times` times."""
        if times == 1 or self.repeated is None:
            return self
        return replace(self, sampling=self.repeated)

    def with_form(self, form: Form | None) -> Player:
        """The player with a required reply format."""
        return replace(self, sampling=replace(self.sampling, form=form))

    def set_aside(self, context: Sequence[Segment], call: Call) -> None:
        """Mark the reply to this call as unusable, so that a resumed run asks again.

        Does nothing for a model that keeps no replies.
        """
        keeps = getattr(self.model, "set_aside", None)
        if keeps is not None:
            keeps(self.instructions.added_to(context), self.sampling, call)

    async def complete(self, context: Sequence[Segment], call: Call) -> Completion:
        """The model's reply. Failures are raised as errors of the role that was called.

        A refusal by a partner or coach is a failure, never a line of dialogue or feedback.
        """
        try:
            seen = self.instructions.added_to(context)
            reply = await self.model.complete(seen, self.sampling, call)
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
    """How several judge replies for one episode are combined."""

    samples: int | None = None
    """Samples per judge and question; None: the question's own number."""
    questions: Mapping[str, int] = field(default_factory=dict)
    """Purpose of a question → samples per judge, as declared by the task."""
    combine: Literal["mean", "vote"] = "mean"
    orders: Literal["both", "seeded"] = "both"
    """Pairwise judging: ask in both orders, or in one order that the example determines."""

    def samples_of(self, purpose: str, usual: int = 1) -> int:
        """Samples per judge for the question `purpose`, which by itself asks for `usual`
        samples."""
        return self.samples or self.questions.get(purpose, usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The live models for all roles."""

    actor: Player
    partner: Player | None = None
    environment: Player | None = None
    judges: tuple[Player, ...] = ()
    auditors: tuple[Player, ...] = ()
    """Empty: the judges audit, too."""
    coach: Player | None = None
    coach_sees_gold: bool = False
    """Whether coaches see the correct answer; the leak check stays on."""
    panel: Panel = Panel()
    purpose: str = ""
    """Purpose of the judge calls if they do not compute the episode's own score."""
    ledger: Ledger | None = None
    """Stores paid replies that a task requests itself, such as from a detection service. Models
    have their own ledger."""
    by_task: Mapping[str, Cast] = field(default_factory=dict)
    """Task → its cast, if it differs. `in_task` replaces the actor."""

    @property
    def players(self) -> tuple[Player, ...]:
        """All players, in all tasks."""
        single = (self.actor, self.partner, self.environment, self.coach)
        here = tuple(p for p in (*single, *self.judges, *self.auditors) if p is not None)
        return (*here, *(player for cast in self.by_task.values() for player in cast.players))

    def in_task(self, task: str) -> Cast:
        """The cast of one task, with this actor."""
        return replace(self.by_task.get(task, self), actor=self.actor, by_task={})

    def filled(self) -> frozenset[Role]:
        """The roles that have a player."""
        single: dict[Role, Player | None] = {
            "actor": self.actor, "partner": self.partner,
            "environment": self.environment, "coach": self.coach,
        }  # fmt: skip
        judged: frozenset[Role] = frozenset(["judge", "auditor"] if self.judges else [])
        judged |= {"auditor"} if self.auditors else frozenset()
        return judged | {role for role, player in single.items() if player is not None}

    def panel_of(self, role: Role) -> tuple[Player, ...]:
        """All players of `judge` or `auditor`; empty for any other role."""
        if role == "auditor":
            return self.auditors or self.judges
        return self.judges if role == "judge" else ()

    def player(self, role: Role) -> Player:
        """The player of `role` (the first judge); ConfigError if the role has none."""
        panel = self.panel_of(role)
        player: Player | None = panel[0] if panel else getattr(self, role, None)
        if player is None:
            raise unfilled(role)
        return player


def unfilled(role: Role, task: str = "") -> ConfigError:
    """The error for a role without a model."""
    who = f"The task '{task}'" if task else "This task"
    scripted = (
        " For a scripted partner, run: soul serve --script TASK." if role == "partner" else ""
    )
    return ConfigError(
        f"{who} needs a model for the role '{role}', but none is set.",
        f"Episodes cannot be played or scored without the {role}.",
        f"Add --{role} endpoint:MODEL@URL.{scripted}",
    )
