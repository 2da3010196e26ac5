"""Scripts of people for `soul serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.serving import serve_process

PERSON = ("hi, where is my lamp", "order 4711, its been nine days", "ok thanks ###STOP###")
MARKS = ("###TRANSFER###", "###OUT-OF-SCOPE###", "bye ###STOP###")
Messages = Sequence[Mapping[str, str]]


def person(messages: Messages) -> str:
    """The next line of a person whose prompt has a persona."""
    if messages[0]["role"] != "system" or "lamp" not in messages[0]["content"]:
        raise ValueError("there is no prompt of a person")
    hint = "9 days!! " if "Hint:" in messages[0]["content"] else ""
    return hint + PERSON[min(sum(m["role"] == "assistant" for m in messages), len(PERSON) - 1)]


def marks(messages: Messages) -> str:
    """End marks of other frameworks; the first line repeats the client's prompt."""
    turn = sum(m["role"] == "assistant" for m in messages)
    return f"{messages[0]['content']} {MARKS[min(turn, len(MARKS) - 1)]}"


@contextmanager
def scripted(function: str, *options: object) -> Iterator[str]:
    """The address of `soul serve --script` with a function of this module, in its own process."""
    script = ("--script", f"{Path(__file__)}:{function}", "--model-name", "sim")
    with serve_process(*script, *options) as (_, url):
        yield url
