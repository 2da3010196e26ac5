"""Answers that fit what is asked, drawn from a hash of the question.

`answer` is what a ScriptedServer says to a judge's, a partner's or a coach's prompt: an object of
the JSON Schema that came with it, one of the labels that the prompt names, or a line of dialogue.
Equal questions get equal answers.

    python -m tests.support.servers.verdicts --port 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from typing import Any

from tests.support.servers.openai_server import Body, ScriptedServer

LABELS = (("REFUSED", "ACCEPTED"), ("HUMAN", "AI"))
WORDS = ("we", "would", "rather", "talk", "about", "their", "garden", "than", "of", "that", "boat")


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
    line = " ".join(drawn.sample(WORDS, 6))
    return (
        json.dumps({"action_type": "speak", "argument": line}) if "action_type" in prompt else line
    )


def digest(body: Body) -> str:
    """Names what was asked, whoever asked it and with whatever seed."""
    return hashlib.sha256(json.dumps(body["messages"], sort_keys=True).encode()).hexdigest()


def value(schema: Any, defs: dict[str, Any], drawn: random.Random) -> Any:
    """A value of a JSON Schema as pydantic writes them."""
    if "$ref" in schema:
        return value(defs[schema["$ref"].rsplit("/", 1)[-1]], defs, drawn)
    if "enum" in schema or "const" in schema:
        return drawn.choice(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object":
        return {k: value(v, defs, drawn) for k, v in schema["properties"].items()}
    if kind == "integer":
        return drawn.randint(schema.get("minimum", 0), schema.get("maximum", 10))
    if kind == "number":
        return round(drawn.uniform(schema.get("minimum", 0), schema.get("maximum", 1)), 3)
    if kind == "array":
        return items(schema, defs, drawn)
    if kind == "boolean":
        return drawn.random() < 0.5
    return " ".join(drawn.sample(WORDS, 4))


def items(schema: Any, defs: dict[str, Any], drawn: random.Random) -> list[Any]:
    """Two values, or as many as it takes at least; where as many names are allowed for something
    in them, each name once."""
    count, kind = schema.get("minItems", 2), schema["items"]
    drawn_items = [value(kind, defs, drawn) for _ in range(count)]
    shape = defs[kind["$ref"].rsplit("/", 1)[-1]] if "$ref" in kind else kind
    for field, part in shape.get("properties", {}).items():
        if len(part.get("enum", ())) == count:
            drawn_items = [
                {**item, field: name} for item, name in zip(drawn_items, part["enum"], strict=True)
            ]
    return drawn_items


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    with ScriptedServer(answer=answer, port=options.port, delay_s=options.delay) as server:
        print(server.base_url, flush=True)
        while True:
            input()


if __name__ == "__main__":
    main()
