"""A drafter and a filter with known behaviour, for rows that models draft."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soulkit.data.files import read_rows
from tests.support.evaluation import soul
from tests.support.servers.openai_server import Answer, Body, ScriptedServer

CHOICES = ("amber", "birch", "coral")


def text_of(body: Body) -> str:
    """The text of all messages of a request."""
    return "\n".join(str(message["content"]) for message in body["messages"])


def mark(body: Body) -> str:
    """A word determined by the first message, so that equal questions get equal drafts."""
    first = str(body["messages"][0]["content"])
    return "w" + hashlib.sha256(first.encode()).hexdigest()[:8]


def intent(body: Body) -> str:
    return json.dumps({"intent": f"learn a thing or two about {mark(body)}"})


def search(body: Body) -> str:
    return json.dumps(
        {"intent": f"find out {mark(body)} from afar", "suggestion": "Boats instead?"}
    )


def description(body: Body) -> str:
    words = "The user wants to get somewhere with a hobby, writes short lower case lines and asks"
    return json.dumps({"task_description": f"{words} for more each time, about {mark(body)}."})


def reactions(body: Body) -> str:
    """Three reactions: one word shorter than, as long as, and one word longer than the person's."""
    reply = re.search(r"<reply \w+>\n(.*?)\n</reply", text_of(body), re.DOTALL)
    assert reply
    size = len(reply[1].split())
    made = [" ".join([mark(body), *[word] * (size - 2 + i)]) for i, word in enumerate(CHOICES)]
    return json.dumps({"reactions": made})


def review(fault: str = "none") -> str:
    return json.dumps({"reasoning": f"It is {fault}.", "fault": fault})


def by_content(answers: dict[str, str], usual: Callable[[Body], str]) -> Answer:
    """The answer whose key occurs in the first message, otherwise the usual one."""

    def answer(body: Body) -> str:
        first = str(body["messages"][0]["content"])
        return next((text for key, text in answers.items() if key in first), None) or usual(body)

    return answer


def built(
    task: str, source: Path, out: Path, drafter: ScriptedServer, judge: ScriptedServer,
    *more: object,
) -> int:  # fmt: skip
    """Run `soul data build` with a run folder next to `out`."""
    return soul(
        "data", "build", task, source, "-o", out, "--drafter", f"endpoint:d@{drafter.base_url}",
        "--filter", f"endpoint:f@{judge.base_url}", "--folder", out.with_suffix(".run"), *more,
    )  # fmt: skip


def rows_in(path: Path) -> list[dict[str, Any]]:
    rows, bad = read_rows(path)
    assert bad == []
    return [dict(row.fields) for row in rows]


def provenance(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(out.with_suffix(".provenance.json").read_text("utf-8"))
    return loaded
