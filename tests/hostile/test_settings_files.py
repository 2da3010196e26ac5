"""Odd YAML: settings, tasks, suites, prices, endpoints, --set and --methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest

from soulkit.parse import ParseError, parse_yaml
from tests.support.hostile import Attack, mutations, seeds

Runner = Callable[[Attack, Iterable[Attack]], None]
SETTINGS = b"""\
task: [cast_of_people]
data: ["synth:4"]
limit: 2
temperature: 0.5
"""
TASKS = b"""\
tasks:
  night_bus:
    kind: choice
    rows: rows.jsonl
    prompt: |
      {{ situation }} What does {{ speaker }} mean?
    options: {columns: [meant, literal, other]}
    gold: meant
suites:
  mine: [night_bus, cast_of_people]
"""
PRICES = b"""\
prices:
  - {model: gpt-x, in: 1.5, out: 2, cached: 0.1, as_of: 2026-01-01, source: "a page"}
  - model: m
    in: 0.5
    out: 1
"""
ENDPOINTS = b"""\
endpoints:
  small: {model: m, base_url: "http://127.0.0.1:9/v1", concurrency: 2}
"""
EVAL = ("eval", "local", "--dry-run", "--model", "tiny", "--task", "cast_of_people",
        "--data", "synth:2")  # fmt: skip
API = ("eval", "api", "--dry-run", "--model", "m", "--base-url", "http://127.0.0.1:9/v1",
       "--task", "cast_of_people", "--data", "synth:2")  # fmt: skip
FILES = {
    "settings": (SETTINGS, ("eval", "local", "--dry-run", "--model", "tiny", "--config")),
    "tasks": (TASKS, ("tasks", "list", "--tasks")),
    "prices": (PRICES, (*API, "--prices")),
    "endpoints": (ENDPOINTS, (*API, "--endpoints")),
}


def bombs() -> dict[str, str]:
    """YAML that is small and expensive, or builds values that others cannot store."""
    names = "abcdefghi"
    lists, merges = "a: &a [x]\n", "a: &a {x: 1}\n"
    for last, name in pairwise(names):
        lists += f"{name}: &{name} [{','.join([f'*{last}'] * 9)}]\n"
        merges += f"{name}: &{name} {{<<: [{','.join([f'*{last}'] * 9)}]}}\n"
    return {
        "lists": lists, "merges": merges, "itself": "a: &a [*a]", "brackets": "[" * 100_000,
        "braces": "{a: " * 5000, "dashes": "- " * 5000, "questions": "? " * 5000,
        "bool": "a: !!bool x", "time": "a: !!timestamp x", "day": "a: 2024-13-45",
        "python": "a: !!python/object/apply:os.system [touch canary]", "set": "a: !!set {x}",
        "binary": "a: !!binary x", "own tag": "a: !x y", "digits": "a: " + "9" * 5000,
        "hex": "a: 0x" + "f" * 5000, "minutes": "a: " + "1:" * 3000 + "1", "prefix": "a: 0x_",
        "surrogate": 'a: "\\ud800"', "beyond": 'a: "\\UFFFFFFFF"', "null byte": "a: b\0c",
        "escape": 'a: "\\e[2J"', "infinite": "temperature: .inf", "nan": "limit: .nan",
        "many": "".join(f"k{n}: 1\n" for n in range(60_000)), "long": "a: " + "x" * 2_000_000,
        "twice": "a: 1\na: 2", "list key": "{[a]: b}", "two": "--- a\n--- b", "empty": "",
        "merge text": "<<: x", "value": "=: =", "version": "%YAML 9.9\n---\na", "tab": "a:\n\tb: c",
        "text": "just text", "list": "- a", "null": "null: null", "number": "1: 2",
    }  # fmt: skip


def written(name: str, content: bytes, command: Iterable[str]) -> Attack:
    return Attack(
        name, (*command, "file.yaml"), lambda folder: (folder / "file.yaml").write_bytes(content),
        canaries=("canary",),
    )  # fmt: skip


@pytest.mark.parametrize("seed", seeds(8))
@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(attack_all: Runner, kind: str, seed: int) -> None:
    content, command = FILES[kind]
    attack_all(
        written("undamaged", content, command),
        (
            written(name, text, command)
            for name, text in mutations(seed, content, 10 if seed else 2)
        ),
    )


@pytest.mark.hostile
@pytest.mark.parametrize("kind", FILES)
def test_bombs(attack_all: Runner, kind: str) -> None:
    content, command = FILES[kind]
    attack_all(
        written("undamaged", content, command),
        (written(name, text.encode(), command) for name, text in bombs().items()),
    )


@pytest.mark.hostile
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_regular_file(attack_all: Runner, kind: str) -> None:
    content, command = FILES[kind]

    def attacks() -> Iterator[Attack]:
        words = (*command, "file.yaml")
        yield Attack("pipe", words, lambda folder: os.mkfifo(folder / "file.yaml"))
        yield Attack("folder", words, lambda folder: (folder / "file.yaml").mkdir())
        yield Attack("zeros", words, lambda folder: (folder / "file.yaml").symlink_to("/dev/zero"))

    attack_all(written("undamaged", content, command), attacks())


@pytest.mark.hostile
def test_odd_values_on_the_command_line(attack_all: Runner) -> None:
    ablate = (
        *("train", "ablate", "--dry-run", "--model", "tiny", "--task", "cast_of_people"),
        *("--data", "synth:8", "--out", "x", "--steps", "1", "--seeds", "1", "--methods"),
    )
    odd = {name: text for name, text in bombs().items() if len(text) < 130_000 and "\0" not in text}
    attack_all(
        Attack("undamaged", (*EVAL, "--set", "temperature=0.5"), lambda folder: None),
        [
            *(Attack(name, (*EVAL, "--set", f"temperature={text.removeprefix('a: ')}"),
                     lambda folder: None) for name, text in odd.items()),
            *(Attack(name, (*ablate, f"grpo,ditto:lambda_fb={text.removeprefix('a: ')}"),
                     lambda folder: None) for name, text in odd.items()),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "lists",
        "merges",
        "itself",
        "brackets",
        "bool",
        "time",
        "digits",
        "hex",
        "minutes",
        "surrogate",
        "many",
        "long",
    ],
)
def test_bombs_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ParseError, match=r"line|larger"):
        parse_yaml(bombs()[name])


def test_dates_stay_text_and_small_aliases_work() -> None:
    assert parse_yaml("a: 2026-01-02\nb: &b {c: [1]}\nd: {<<: *b, e: !!str 5}") == {
        "a": "2026-01-02", "b": {"c": [1]}, "d": {"c": [1], "e": "5"},
    }  # fmt: skip
