"""A server whose model plays a person: it has the persona's prompt, and swaps the roles.

    client                   assistant: "Hello!"   user: "my lamp is late"        assistant: "Oh."
    model    system: persona      user: "Hello!"   assistant: "my lamp is late"        user: "Oh."

The client sends the conversation as its agent sees it, without a system prompt. Messages without
text (tool calls and their results) are left out, because a person does not see them. The persona is
drawn by the conversation's id; without one, by the messages before the person's first. A
conversation ends when the model writes END_MARK, which reaches the client in one of three forms:

    marker    the content ends with the mark
    tool      the reply calls the tool `end_conversation`; finish_reason is "tool_calls"
    finish    stop_reason is "end_of_conversation"; finish_reason is "stop"
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from soulkit.errors import ConfigError
from soulkit.serving.backend import (
    TEXT_ONLY,
    Body,
    ChatBackend,
    Chunk,
    Ending,
    RequestError,
    SystemPolicy,
    refuse_settings,
    text_of,
)
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.person.brief import END_MARK, PARTIAL_MARK, Brief, as_heard, draw
from soulkit.types import Example, Segment

END_TOOL, ENDED = "end_conversation", "end_of_conversation"
NOT_PASSED = ("tools", "tool_choice", "parallel_tool_calls", "metadata")
SPEAKERS: Mapping[str, Literal["user", "assistant"]] = {"user": "user", "assistant": "assistant"}


def row_briefs(task: Task, examples: Sequence[Example]) -> tuple[Brief, ...]:
    """The persons of a task's rows; ConfigError if its actor cannot talk to any agent."""
    slots = [task.slot(one, task.acted_seat(one), None) for one in examples if task.plain_talk]
    if not slots or any(slot.role != "system" for slot in slots):
        raise ConfigError(
            f"A server cannot play the actor of '{task.name}'.",
            "It needs a task whose actor has a system prompt and writes plain messages.",
            "Name another task, or give --persona FILE.",
        )
    pairs = zip(examples, slots, strict=True)
    return tuple(Brief(persona_id=one.id, text=slot.text) for one, slot in pairs)


class BoundBackend:
    """The model of `inner` as a person; one of `briefs` in each conversation."""

    def __init__(
        self, inner: ChatBackend, briefs: Sequence[Brief], ending: Ending = "marker",
        system: SystemPolicy = "refuse",
    ) -> None:  # fmt: skip
        self.inner, self.briefs, self.ending, self.system = inner, briefs, ending, system
        self.name, self.context_limit = inner.name, inner.context_limit

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """See `ChatBackend`; chunks have the brief's name under `soulkit`."""
        tools = [one.get("function") for one in body.get("tools") or ()]
        listed = self.ending == "tool" and all(
            isinstance(one, dict) and one.get("name") == END_TOOL for one in tools
        )
        checked = {**body, "tools": []} if listed else body
        refuse_settings(checked, TEXT_ONLY, "this server plays a person")
        extra, talk = self._read(body["messages"])
        brief = draw(self.briefs, conversation or body.get("user") or _opening(extra, talk))
        prompt = "\n\n".join([brief.prompt().text, *(extra if self.system == "append" else ())])
        context = [Segment("system", prompt), *as_heard(talk)]
        messages = [{"role": part.role, "content": part.text} for part in context]
        request = {**{k: v for k, v in body.items() if k not in NOT_PASSED},
                   "model": self.inner.name, "messages": messages}  # fmt: skip
        choices: defaultdict[int, _Choice] = defaultdict(partial(_Choice, self.ending))
        source: Any = self.inner.chunks(request, conversation)
        async with aclosing(source):
            async for chunk in source:
                pieces = [choices[one["index"]].passed(one) for one in chunk["choices"]]
                if any(pieces) or not pieces:
                    changed = [one for one in pieces if one is not None]
                    yield {**chunk, "choices": changed, "soulkit": {"brief": brief.name}}

    async def close(self) -> None:
        """Close the model."""
        await self.inner.close()

    def _read(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Segment]]:
        """(the client's system prompts, the conversation); RequestError if it cannot be played."""
        extra: list[str] = []
        talk: list[Segment] = []
        for place, message in enumerate(messages):
            role, text = message.get("role"), text_of(message, f"messages[{place}]")
            if role in SPEAKERS and text:
                talk.append(Segment(SPEAKERS[str(role)], text))
            elif role in ("system", "developer") and text:
                extra.append(text)
        if extra and self.system == "refuse":
            raise _refused(
                "messages", "This server has the person's system prompt and takes no other. Leave "
                "yours out, or start the server with --system ignore or --system append.",
            )  # fmt: skip
        if talk and talk[-1].role != "assistant":
            raise _refused(
                "messages", "The last message must be your agent's, with the role assistant: this "
                "server writes the next message of the user.",
            )  # fmt: skip
        return extra, talk


def _refused(param: str, message: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_value")


def _opening(extra: Sequence[str], talk: Sequence[Segment]) -> str:
    """The messages before the person's first: they are the same in every request of a
    conversation."""
    place = next((i for i, part in enumerate(talk) if part.role == "user"), len(talk))
    return json.dumps([*extra, *(part.text for part in talk[:place])])


_HELD = re.compile(rf"\s*(?:{PARTIAL_MARK})?\Z")
"""The end of a text that may turn out to belong to the mark."""


@dataclass(slots=True)
class _Choice:
    """One choice of a reply while its pieces pass."""

    ending: Ending
    ended: bool = False
    _held: str = field(default="", init=False)

    def passed(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        """The piece for the client; None if nothing is left of it."""
        delta, reason = dict(choice.get("delta") or {}), choice.get("finish_reason")
        text = self._ready(delta.pop("content", None) or "", whole=bool(reason))
        if text or "role" in delta:
            delta["content"] = text
        if not (delta or reason):
            return None
        changed = {**choice, "delta": delta}
        if not (reason and self.ended):
            return changed
        changed["finish_reason"] = "stop"
        if self.ending == "tool":
            call = {"name": END_TOOL, "arguments": "{}"}
            name = f"call_{uuid4().hex[:24]}"
            delta["tool_calls"] = [{"index": 0, "id": name, "type": "function", "function": call}]
            changed["finish_reason"] = "tool_calls"
        elif self.ending == "finish":
            changed["stop_reason"] = ENDED
        return changed

    def _ready(self, piece: str, *, whole: bool) -> str:
        """The text that can be sent; what may belong to a mark waits until it is `whole`."""
        if self.ended:
            return ""
        text = self._held + piece
        before, mark, _ = text.partition(END_MARK)
        if mark:
            self.ended = True
            return before + mark if self.ending == "marker" else before.rstrip()
        held = _HELD.search(text)
        ready = text if whole or held is None else text[: held.start()]
        self._held = text[len(ready) :]
        return ready
