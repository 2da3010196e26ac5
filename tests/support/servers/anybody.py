"""Somebody for every seat of every built-in task: whatever is asked for, in the form asked for.

    with ScriptedServer(answer=Anybody(line=90), count=subwords) as server:
        soul("eval", "api", "--suite", "soul-27", ...)

A verdict is a random instance of the JSON Schema that came with the question; a choice ends in an
answer tag with a random answer of the kind that the prompt asks for; a line of dialogue has as many
words as `line` says. Equal questions with equal seeds get equal answers.

    python -m tests.support.servers.anybody --port 0

runs it as a process of its own and prints its base URL.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass
from typing import Any

from tests.support.servers.openai_server import Body, ScriptedServer
from tests.support.servers.verdicts import LABELS, value

WORDS = (
    "we", "would", "rather", "talk", "about", "their", "garden", "than", "of", "that", "old",
    "boat", "because", "nobody", "knows", "who", "left", "it", "there", "last", "winter",
    "and", "what", "may", "still", "be", "worth", "when", "spring", "comes",
)  # fmt: skip
LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class Anybody:
    """Answers by seed; lengths are in words."""

    line: int = 12
    """Of a line of dialogue, a thought before a choice, a document."""
    verdict: int = 40
    """Of all free text of a form together, about."""
    happening: int = 12
    """Of a form that names the next speaker, and of what an environment tells."""
    seed: int = 0

    def __call__(self, body: Body) -> str:
        drawn = random.Random(f"{self.seed} {body.get('seed')} {json.dumps(body['messages'])}")
        form = (body.get("response_format") or {}).get("json_schema")
        if form:
            return self._formed(form["schema"], drawn)
        messages = [str(m["content"]) for m in body["messages"]]
        return self._line("\n".join(messages), messages[0], drawn)

    def _formed(self, schema: dict[str, Any], drawn: random.Random) -> str:
        """Its free texts share the words."""
        defs = schema.get("$defs", {})
        whole = self.happening if "next_speaker" in schema["properties"] else self.verdict
        bare = json.dumps(value(schema, defs, random.Random(0), lambda _: "~"))
        each = max(1, round(whole / max(1, bare.count('"~"'))))
        verdict = value(schema, defs, drawn, lambda draw: filler(each, draw))
        if "next_speaker" in verdict:
            # A random end would make scenes of a random length; surroundings speak seldom in books.
            names = schema["properties"]["next_speaker"]["enum"]
            weights = [{"<END CHAT>": 0, "random": 0, "Environment": 1}.get(n, 4) for n in names]
            verdict["next_speaker"] = drawn.choices(names, weights)[0]
        return json.dumps(verdict)

    def _line(self, prompt: str, first: str, drawn: random.Random) -> str:
        text = filler(self.line, drawn)
        if "<answer>" in prompt:
            return f"{text} <answer>{choice(prompt, drawn)}</answer>"
        if "<response>" in prompt:
            return f"<response>{text}</response>"
        for labels in LABELS:
            if all(label in prompt for label in labels):
                return f"<think>{filler(self.verdict, drawn)}</think>{drawn.choice(labels)}"
        if "action_type" in first:
            return json.dumps({"action_type": "speak", "argument": text})
        if "`Message:`" in first:
            return f"Message: {text}"
        if "surroundings" in first.lower():
            return filler(self.happening, drawn)
        return text


def choice(prompt: str, drawn: random.Random) -> str:
    """An answer of the kind that a prompt asks for."""
    if "five different letters" in prompt:
        return ",".join(drawn.sample("ABCDE", 5))
    if "whole number" in prompt:
        return str(drawn.randint(1, 5))
    if "A or B" in prompt:
        return drawn.choice("AB")
    if re.search(r"letter", prompt):
        return drawn.choice(LETTERS)
    return filler(3, drawn)


def filler(n: int, drawn: random.Random) -> str:
    """`n` everyday words."""
    return " ".join(drawn.choices(WORDS, k=n))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a player for every seat.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    with ScriptedServer(answer=Anybody(), port=options.port, delay_s=options.delay) as server:
        print(server.base_url, flush=True)
        while True:
            input()


if __name__ == "__main__":
    main()
