"""Answers that fit what is asked: objects of the schema that came with it, labels, lines.

`answer` draws from a hash of the question, so that equal questions get equal answers. `Anybody`
plays every seat of every built-in task, by seed and with texts of given lengths:

    with ScriptedServer(answer=Anybody(line=90), count=subwords) as server:
        soul("eval", "api", "--suite", "soul-27", ...)

`formed` always gives the same plain instance of a schema.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.servers.openai_server import Body

LABELS = (("REFUSED", "ACCEPTED"), ("HUMAN", "AI"))
WORDS = (
    "we", "would", "rather", "talk", "about", "their", "garden", "than", "of", "that", "old",
    "boat", "because", "nobody", "knows", "who", "left", "it", "there", "last", "winter",
    "and", "what", "may", "still", "be", "worth", "when", "spring", "comes",
)  # fmt: skip
FEW_WORDS = (*WORDS[:10], "boat")

Text = Callable[[random.Random], str]


def answer(body: Body) -> str:
    """A fitting answer to one request."""
    drawn = random.Random(digest(body))
    form = (body.get("response_format") or {}).get("json_schema")
    if form:
        schema = form["schema"]
        return json.dumps(value(schema, schema.get("$defs", {}), drawn))
    prompt = "\n".join(str(m["content"]) for m in body["messages"])
    for labels in LABELS:
        if all(label in prompt for label in labels):
            return drawn.choice(labels)
    line = " ".join(drawn.sample(FEW_WORDS, 6))
    return (
        json.dumps({"action_type": "speak", "argument": line}) if "action_type" in prompt else line
    )


def digest(body: Body) -> str:
    """Names what was asked, whoever asked it and with whatever seed."""
    return hashlib.sha256(json.dumps(body["messages"], sort_keys=True).encode()).hexdigest()


def some_words(drawn: random.Random) -> str:
    return " ".join(drawn.sample(FEW_WORDS, 4))


def value(schema: Any, defs: dict[str, Any], drawn: random.Random, text: Text = some_words) -> Any:
    """A value of a JSON Schema as pydantic writes them; `text` makes its free texts."""
    if "$ref" in schema:
        return value(defs[schema["$ref"].rsplit("/", 1)[-1]], defs, drawn, text)
    if "enum" in schema or "const" in schema:
        return drawn.choice(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return value(drawn.choice(schema["anyOf"]), defs, drawn, text)
    kind = schema.get("type")
    if kind == "object":
        return {k: value(v, defs, drawn, text) for k, v in schema["properties"].items()}
    if kind == "integer":
        return drawn.randint(schema.get("minimum", 0), schema.get("maximum", 10))
    if kind == "number":
        return round(drawn.uniform(schema.get("minimum", 0), schema.get("maximum", 1)), 3)
    if kind == "array":
        return items(schema, defs, drawn, text)
    if kind in ("boolean", "null"):
        return drawn.random() < 0.5 if kind == "boolean" else None
    return text(drawn)


def items(schema: Any, defs: dict[str, Any], drawn: random.Random, text: Text) -> list[Any]:
    """Two values, or as many as it takes at least; where as many names are allowed for something
    in them, each name once."""
    count, kind = schema.get("minItems", 2), schema["items"]
    drawn_items = [value(kind, defs, drawn, text) for _ in range(count)]
    shape = defs[kind["$ref"].rsplit("/", 1)[-1]] if "$ref" in kind else kind
    for field, part in shape.get("properties", {}).items():
        if len(part.get("enum", ())) == count:
            drawn_items = [
                {**item, field: name} for item, name in zip(drawn_items, part["enum"], strict=True)
            ]
    return drawn_items


# -- a player for every seat ----------------------------------------------------------------------

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


# -- the plainest instance of a schema -------------------------------------------------------------


def instance_of(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Any:
    """A value of a JSON Schema as pydantic writes them: the middle of a scale, the first choice."""
    root = schema if root is None else root
    if "$ref" in schema:
        return instance_of(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "anyOf" in schema:
        return instance_of(schema["anyOf"][0], root)
    return _of_type(schema, root)


def _of_type(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    kind = schema.get("type", "object")
    if kind == "object":
        return {k: instance_of(v, root) for k, v in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance_of(schema["items"], root) for _ in range(schema.get("minItems", 1))]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 10)
        return (low + high) // 2 if kind == "integer" else (low + high) / 2
    return {"boolean": True, "null": None}.get(kind, "As it should be.")


def formed(body: Body, otherwise: str) -> str:
    """An instance of the schema that is asked for, else the given text."""
    form = body.get("response_format", {}).get("json_schema")
    return json.dumps(instance_of(form["schema"])) if form else otherwise
