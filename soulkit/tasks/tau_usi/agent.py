"""The service agent's side of a conversation: what it says, and the tools that it calls between."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from soulkit.errors import PartnerError
from soulkit.judge.verdict import spoken
from soulkit.models.base import Player
from soulkit.tasks.partners import partner_reply
from soulkit.tasks.tau_usi.runtime import Meta, Service
from soulkit.tasks.tau_usi.tools import FormatError, ToolCall, declaration, read_agent_message
from soulkit.types import Call, Segment, Usage

GREETING = "Hello, you have reached the service desk. What can I do for you today?"


@dataclass
class ServiceAgent:
    """An agent under way. Its context is its own: the customer sees only what it says."""

    player: Player
    service: Service
    meta: Meta
    context: list[Segment]
    call_of: Callable[[int], Call]
    """The call of its so-many-th message."""
    complaint: Callable[[str], str]
    """What it is told about a message in the wrong form."""
    most_rounds: int
    usage: Usage = field(default_factory=Usage)
    messages: int = 0
    tool_calls: int = 0
    format_errors: int = 0

    async def answer(self, words: str) -> str:
        """What the agent says to the customer's words, once it has done with its tools.

        PartnerError where it says nothing, or nothing but calls.
        """
        self.context.append(Segment("user", words))
        for _ in range(self.most_rounds + 1):
            text = await self._message()
            self.context.append(Segment("assistant", text))
            act = read_agent_message(text, self.meta.tools)
            if isinstance(act, str):
                return act
            self.context.append(await self._told(act))
        raise PartnerError(f"the agent called tools {self.most_rounds} times without a word")

    async def _message(self) -> str:
        call = self.call_of(self.messages)
        self.messages += 1
        text, usage = await partner_reply(
            self.player, tuple(self.context), call, lambda t: spoken(t, "paper") or None,
            "the agent",
        )  # fmt: skip
        self.usage += usage
        return text

    async def _told(self, act: ToolCall | FormatError) -> Segment:
        if isinstance(act, FormatError):
            self.format_errors += 1
            return Segment("user", self.complaint(act.why))
        self.tool_calls += 1
        return Segment("system", await self.service.step(act.name, act.arguments))


def tool_lines(meta: Meta) -> list[str]:
    """A tool a line, as the agent reads it."""
    shown = ("name", "description", "parameters")
    return [
        json.dumps({key: tool[key] for key in shown if key in tool}, ensure_ascii=False)
        for tool in map(declaration, meta.tools)
    ]
