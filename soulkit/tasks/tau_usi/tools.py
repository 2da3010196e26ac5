"""Calls of tools as a service agent writes them into its text:

    <function=find_member><parameter=name>Ada Amsel</parameter></function>

A message holds one call or none. What is no call and looks like one is a format error, which the
agent is told in words and may mend; a message without the mark is said to the customer. Values are
texts, except where the tool's schema wants something else and the text is JSON for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<function=", "</function>"
PARAMETER, END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FormatError:
    """Why a message is neither a call nor words for the customer."""

    why: str


def read_agent_message(
    text: str, tools: Sequence[Mapping[str, Any]]
) -> ToolCall | FormatError | str:
    """What an agent's message is: a call, a mistake in one, or words for the customer."""
    if OPEN not in text and CLOSE not in text:
        return text.strip()
    try:
        name, body = _call_parts(text)
        schema = _schema(name, tools)
        return ToolCall(name, _arguments(body, schema))
    except ValueError as error:
        return FormatError(str(error))


def _call_parts(text: str) -> tuple[str, str]:
    """(name, what stands between head and end) of the only call."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        raise ValueError(f"a message holds one call, from {OPEN}NAME> to {CLOSE}")
    _, _, rest = text.partition(OPEN)
    inside, end, behind = rest.partition(CLOSE)
    if not end or behind.strip():
        raise ValueError(f"nothing may stand behind {CLOSE}")
    name, mark, body = inside.partition(">")
    if not mark or not _NAME.fullmatch(name.strip()):
        raise ValueError(f"the head of a call is {OPEN}NAME>")
    return name.strip(), body


def _schema(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Parameter → its JSON Schema; ValueError for a tool that nobody has declared."""
    declared = {str(d.get("name")): d for d in map(declaration, tools)}
    if name not in declared:
        raise ValueError(f"there is no tool '{name}'; there are {', '.join(declared) or 'none'}")
    parameters = declared[name].get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def declaration(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name, description and parameters of a tool, in either of the shapes that services use."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def _arguments(body: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    rest = body.strip()
    while rest:
        if not rest.startswith(PARAMETER):
            raise ValueError(f"between the parameters stands '{rest[:40]}'")
        head, end, rest = rest.removeprefix(PARAMETER).partition(END)
        name, mark, value = head.partition(">")
        if not (mark and end and _NAME.fullmatch(name.strip())):
            raise ValueError(f"a parameter is written {PARAMETER}NAME>VALUE{END}")
        if name.strip() in arguments:
            raise ValueError(f"the parameter '{name.strip()}' stands twice")
        arguments[name.strip()] = _value(value.strip(), schema.get(name.strip()))
        rest = rest.strip()
    return arguments


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
