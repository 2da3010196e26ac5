"""Who plays in a task where nobody is named: models of a task's declaration, by role and protocol.

    players:
      judge: {model: gpt-5-nano, effort: low}
      partner: {model: gpt-5-nano, effort: minimal}
      reference: {coach: {model: gpt-5.4-nano, effort: low}}     # where the published code differs

A model is asked with the key in OPENAI_API_KEY, where OPENAI_BASE_URL says or at OpenAI's own
service. Whoever the user names for a role goes before all of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from soulkit.types import Protocol


class DefaultPlayer(BaseModel):
    """A model, and how long it thinks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    effort: str = ""
    """`reasoning_effort`; empty: the server's own."""


class RoleDefaults(BaseModel):
    """Role → who fills it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    judge: DefaultPlayer | None = None
    auditor: DefaultPlayer | None = None
    partner: DefaultPlayer | None = None
    environment: DefaultPlayer | None = None
    coach: DefaultPlayer | Literal["symbolic"] | None = None
    """Nothing: the judge's model on a judged task, else the task's rules."""

    def of(self, role: str) -> DefaultPlayer | str | None:
        """Who fills `role`; None for nobody."""
        player: DefaultPlayer | str | None = getattr(self, role, None)
        return player


class DefaultPlayers(RoleDefaults):
    """Those under `paper`, and under `reference` where they are others."""

    reference: RoleDefaults = RoleDefaults()

    def words(self) -> str:
        """`judge gpt-5-nano low, …; reference: judge …`; empty where nobody is offered."""
        parts = [_words(self), _words(self.reference)]
        parts[1] = f"under reference {parts[1]}" if parts[1] else ""
        return "; ".join(part for part in parts if part)

    def under(self, protocol: Protocol, role: str) -> DefaultPlayer | str | None:
        """Who fills `role` under a protocol; None for nobody."""
        other = self.reference.of(role) if protocol == "reference" else None
        return other or self.of(role)


def _words(defaults: RoleDefaults) -> str:
    players = {role: defaults.of(role) for role in RoleDefaults.model_fields}
    texts = {
        role: f"{who.model} {who.effort}".strip() if isinstance(who, DefaultPlayer) else who
        for role, who in players.items()
    }
    return ", ".join(f"{role} {text}" for role, text in texts.items() if text)
