"""Odd tasks without code: patterns, schemas, numbers, suites, literals in cells, long prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hostile import Attack, seeds

Attacks = Callable[[Attack, Iterable[Attack]], None]
CHECK = ("tasks", "check", "t", "--tasks", "t.yaml")
LIST = ("tasks", "list", "--tasks", "t.yaml")
EVAL = ("eval", "api", "--dry-run", "--model", "m", "--base-url", "http://127.0.0.1:9/v1",
        "--tasks", "t.yaml", "--task", "t")  # fmt: skip
WHERE = ("eval", "api", "--dry-run", "--model", "m", "--task", "tomi", "--data", "synth:4")
LM_EVAL = ("tasks", "import", "lm-eval", "t.yaml", "--data", "rows.jsonl")
ROW = {"q": "Why", "gold": "a" * 32 + "!"}
HUGE = "a{99999999999999999999}"
PATTERNS = (
    HUGE, "(" * 5000, "(" * 5000 + ")" * 5000, "(?:" * 3000 + "a" + ")" * 3000, "(a+)+$",
    "(a|aa)+$",
    ".*" * 30 + "b", "(?:.*.*.*)*=!", "[", "(?<=a*)b", "(?P<x>a)(?P<x>b)", "\\", "(?i", "\ud800",
)  # fmt: skip
REPEATS = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)}
SCHEMAS: tuple[dict[Any, Any], ...] = (
    {"$ref": "#/$defs/d0", "$defs": {**REPEATS, "d30": {}}}, {1: 2}, {"$ref": "#"}, {"type": 7},
    {"$ref": "http://127.0.0.1:9/x"}, {"$ref": "file:///etc/passwd"}, {"pattern": HUGE},
    {"pattern": "(a+)+$"},
)  # fmt: skip
NUMBERS = (None, True, -1, 0, 1.5, float("nan"), float("inf"), 1e300, 10**22, 999_999_999, "x", [])


def task(**keys: Any) -> dict[str, Any]:
    usual = {"kind": "text", "rows": "rows.jsonl", "prompt": "{{ q }}?", "gold": "gold"}
    scorer = {"scorer": "exact"} if keys.get("kind", "text") == "text" else {}
    return {"tasks": {"t": {**usual, **scorer, **keys}}}


def attack(
    name: str, file: Any, command: Iterable[str] = CHECK, row: Any = ROW, prompt: str = ""
) -> Attack:
    def prepare(folder: Path) -> None:
        (folder / "t.yaml").write_text(yaml.safe_dump(file))
        (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(3)))
        (folder / "p.md").write_text(prompt)

    return Attack(name, (*command,), prepare)


def dialogue(**keys: Any) -> dict[str, Any]:
    return task(kind="dialogue", gold="gold", dialogue={"partner": "You talk.", **keys})


def of_patterns() -> Iterator[Attack]:
    for one in PATTERNS:
        name = repr(one[:20])
        yield attack(f"scorer {name}", task(scorer={"kind": "regex", "pattern": one}))
        yield attack(f"answer {name}", task(answer=f"({one})"))
        yield attack(f"ends {name}", dialogue(ends=[f"/{one}/"]))
        yield attack(f"gold {name}", task(scorer="regex"), row={**ROW, "gold": one})
        yield attack(f"where {name}", task(), (*WHERE, "--where", f"kind={one}"))
        steps = [{"name": "x", "filter": [{"function": "regex", "regex_pattern": one}]}]
        other = {"task": "x", "output_type": "generate_until", "doc_to_text": "q"}
        yield attack(
            f"lm-eval {name}", {**other, "doc_to_target": "gold", "filter_list": steps}, LM_EVAL
        )


def of_values() -> Iterator[Attack]:
    for schema in SCHEMAS:
        yield attack("schema", task(scorer={"kind": "json_schema", "json_schema": schema}))
    for number in NUMBERS:
        choice = {"kind": "choice", "options": ["a", "b"], "orders": number}
        yield attack(f"orders {number}", task(**choice), row={**ROW, "gold": "a"})
        yield attack(f"turns {number}", dialogue(turns=number))
        for key in ("temperature", "max_tokens"):
            yield attack(f"{key} {number}", task(sampling={key: number}), EVAL)
        yield attack(f"limit {number}", task(limits={"q": number}))
        yield attack(f"suite {number}", {"suites": {"a": number}, **task()}, LIST)
    for members in ([["t"]], [1], [None], {"members": [["t"]]}, ["t", "t"], ["nope"]):
        yield attack(f"suite {members}", {"suites": {"a": members}, **task()}, LIST)
    options = task(kind="choice", options={"column": "opts"})
    for text in ("[" + "1," * 2_500_000 + "]", "(" * 9000, "[" * 9000, "{1: " * 9000, "1e999",
                 "{" + "".join(f"{n}: 1," for n in range(9**5)) + "}", "['a', 1j]"):  # fmt: skip
        row = {**ROW, "opts": text}
        yield attack(
            "cell", options, ("data", "check", "rows.jsonl", *CHECK[3:], "--task", "t"), row
        )
    for value in ("x" + " " * 200_000 + "y", "{{ .index(" + "a" * 200_000, "{{ [" + "a," * 90_000):
        keys = dict.fromkeys(("doc_to_text", "doc_to_target", "doc_to_choice"), value)
        yield attack("lm-eval", {"output_type": "multiple_choice", **keys}, LM_EVAL)
    yield attack("prompt", task(prompt="p.md"), LIST, prompt="x" * 50_000_000)


@pytest.mark.parametrize("part", seeds(14))
def test_odd_patterns(attack_all: Attacks, part: int) -> None:
    attack_all(attack("undamaged", task()), [*of_patterns()][part::14])


@pytest.mark.parametrize("part", seeds(12, quick=0))
def test_odd_values(attack_all: Attacks, part: int) -> None:
    attack_all(attack("undamaged", task()), [*of_values()][part::12])


@pytest.mark.parametrize("part", seeds(12, quick=0))
def test_settings_of_another_type(attack_all: Attacks, part: int) -> None:
    """A value of the wrong type for each setting, in a file of settings."""
    commands = (("train", "ablate"), ("train", "ditto"), ("eval", "api"), ("distill",))
    values = (5, True, 1.5, float("inf"), [], [1], [[1]], [None], {}, {"a": {"b": None}}, "", "\0")
    names = ("suite", "tasks", "task", "tasks_file", "data", "model", "endpoints", "judge", "coach",
             "option", "adapter", "lora", "gate", "where", "example", "prices", "experts",
             "teacher", "preset", "headers", "engine", "method", "limit", "system_prompt",
             "base_url")  # fmt: skip
    usual = {"data": "synth:4", "model": "tiny", "task": "cast_of_people"}
    every = [(name, value) for name in names for value in values]

    def settings(name: str, value: Any, command: tuple[str, ...]) -> Attack:
        file = {k: v for k, v in usual.items() if k != "task" or name not in ("suite", "tasks")}
        words = (*command, "--dry-run", "--config", "t.yaml")
        return attack(f"{name}={value!r}", {**file, name: value}, words)

    attack_all(
        attack("undamaged", usual, ("eval", "api", "--dry-run", "--config", "t.yaml")),
        (settings(*one, commands[n % 4]) for n, one in enumerate(every) if n // 4 % 12 == part),
    )
