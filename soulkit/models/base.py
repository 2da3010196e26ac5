"""What a model is to the rest of the house: something that completes a context.

Local, vLLM and API models look the same to a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from soulkit.errors import (
    CallError,
    ConfigError,
    ContextOverflow,
    PartnerError,
    ProviderError,
    UnreadableVerdict,
)
from soulkit.types import Call, Completion, Role, Sampling, Segment

_BLAME: dict[Role, type[CallError]] = {
    "partner": PartnerError,
    "environment": PartnerError,
    "judge": UnreadableVerdict,
    "coach": UnreadableVerdict,
}


class ChatModel(Protocol):
    """A live model. `complete` raises `CallError` (never returns an error as text)."""

    name: str

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Player:
    """A model and how it is sampled in its role."""

    model: ChatModel
    sampling: Sampling = field(default_factory=Sampling)

    async def complete(self, context: Sequence[Segment], call: Call) -> Completion:
        """The model's reply; a provider's failure is blamed on the role that was called."""
        try:
            return await self.model.complete(context, self.sampling, call)
        except (ProviderError, ContextOverflow) as error:
            blamed = _BLAME.get(call.role)
            if blamed is None:
                raise
            raise blamed(error.detail) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The live models that fill the roles."""

    actor: Player
    partner: Player | None = None
    environment: Player | None = None
    judge: Player | None = None
    coach: Player | None = None

    def player(self, role: Role) -> Player:
        """The player of `role`; ConfigError when the role is not filled."""
        found: Player | None = getattr(self, role)
        if found is None:
            raise ConfigError(
                f"This task needs a model in the role '{role}', and none was given.",
                f"An episode cannot be played without its {role}.",
                f"Name one with --{role} MODEL --{role}-base-url URL.",
            )
        return found
