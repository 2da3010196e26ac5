"""Helpers for tests of judges: a judged task, rows, and judges with known behaviour."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.evaluation import soul
from tests.support.servers.openai_server import ScriptedServer

TASKS = Path(__file__).parent / "judged_task" / "tasks.yaml"
"""The essays: the judged example under another name."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "judged_task" / "tasks.yaml"
Body = dict[str, Any]


def write_rows(path: Path, n: int, human: bool = False) -> Path:
    """Write rows about n topics, optionally with human labels of quality and style."""
    lines = []
    for i in range(n):
        row: dict[str, Any] = {"topic": f"topic {i}"}
        if human:
            row |= {"human_quality": 1 + i % 9, "tone": "lively" if i % 2 else "plain"}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def first_message(body: Body) -> str:
    return str(body["messages"][0]["content"])


def topic(body: Body) -> int:
    match = re.search(r"topic:? (?:topic )?(\d+)", first_message(body))
    assert match, first_message(body)
    return int(match.group(1))


def essay(body: Body) -> str:
    """An essay of 5 to 13 words that depends on the topic and on the seed of the request."""
    i = topic(body)
    return " ".join([f"word{i}"] * (5 + i % 9)) + f" ending{body.get('seed', 0)}"


def noise(body: Body, width: int) -> int:
    """Noise between -width and width, determined by the prompt and the seed of the request."""
    text = json.dumps([first_message(body), body.get("seed")])
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % (2 * width + 1) - width


def opinion(score: int, style: str = "plain") -> str:
    quality = {"reasoning": "so it seems", "score": max(0, min(10, score))}
    return json.dumps({"quality": quality, "style": style})


def judge(width: int = 0, pair: str = "longer") -> Callable[[Body], str]:
    """A judge that scores by topic with noise of `width`; in pairs it prefers A, the longer or
    neither."""

    def answer(body: Body) -> str:
        if "Participant A" in first_message(body):
            return json.dumps({"reasoning": "compared", "verdict": preferred(body, pair)})
        i = topic(body)
        return opinion(1 + i % 9 + noise(body, width), "lively" if i % 2 else "plain")

    return answer


def preferred(body: Body, pair: str) -> str:
    if pair != "longer":
        return pair
    texts = re.findall(r"<answer \w+>\n(.*?)\n</answer", first_message(body), re.DOTALL)
    assert len(texts) == 2
    return "A" if texts[0] > texts[1] else "B"


def evaluated(out: Path, rows: Path, judge_url: str, *arguments: object) -> Path:
    """A finished evaluation of the essays."""
    with ScriptedServer(answer=essay) as actor:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", out,
            "--tasks", TASKS, "--task", "essay", "--data", f"essay={rows}", "--backoff", "0",
            "--judge", f"endpoint:j@{judge_url}", *arguments,
        )  # fmt: skip
    assert code == 0
    return out
