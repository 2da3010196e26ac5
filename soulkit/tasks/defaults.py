"""Default players of a task: models from its declaration, by role, purpose and protocol.

    players:
      judge: {model: gpt-5.4, effort: low}
      partner: {model: gpt-5-nano, effort: minimal}
      training: {judge: {model: gpt-5-nano, effort: low}}        # where training has another one
      reference: {coach: {model: gpt-5.4-nano, effort: low}}     # where the published code differs

A model is asked with the key in OPENAI_API_KEY, where OPENAI_BASE_URL says or at OpenAI's own
service. A player that the user names for a role replaces the default.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from soulkit.types import Protocol


class DefaultPlayer(BaseModel):
    """A model, and how long it thinks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    effort: str = ""
    """`reasoning_effort`; empty: the server's own."""

    def __str__(self) -> str:
        return f"{self.model} {self.effort}".strip()


class RoleDefaults(BaseModel):
    """Role → who fills it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    judge: DefaultPlayer | None = None
    auditor: DefaultPlayer | None = None
    partner: DefaultPlayer | None = None
    environment: DefaultPlayer | None = None
    coach: DefaultPlayer | Literal["symbolic", "none"] | None = None
    """`symbolic`: the task's rules, in the place of a paper's model; `none`: there is no feedback.
    Nothing: the judge's model on a judged task, else the task's rules."""

    def of(self, role: str) -> DefaultPlayer | str | None:
        """Who fills `role`; None for nobody."""
        player: DefaultPlayer | str | None = getattr(self, role, None)
        return player


class DefaultPlayers(RoleDefaults):
    """The players under `paper`; those of training and of `reference` where they differ."""

    training: RoleDefaults = RoleDefaults()
    """Rollouts, dev scores and feedback of a training run; `reference` goes before it."""
    reference: RoleDefaults = RoleDefaults()

    def words(self) -> str:
        """`judge gpt-5.4 low, …; in training judge …; under reference judge …`; empty for none."""
        parts = {"": _words(self), "in training ": _words(self.training),
                 "under reference ": _words(self.reference)}  # fmt: skip
        return "; ".join(f"{when}{text}" for when, text in parts.items() if text)

    def in_training(self) -> Self:
        """The same declaration with the players of training in the place of evaluation's."""
        others = {role: self.training.of(role) for role in RoleDefaults.model_fields}
        return self.model_copy(update={role: who for role, who in others.items() if who})

    def under(self, protocol: Protocol, role: str) -> DefaultPlayer | str | None:
        """Who fills `role` under a protocol; None for nobody."""
        other = self.reference.of(role) if protocol == "reference" else None
        return other or self.of(role)


def _words(defaults: RoleDefaults) -> str:
    players = {role: defaults.of(role) for role in RoleDefaults.model_fields}
    return ", ".join(f"{role} {who}" for role, who in players.items() if who)
