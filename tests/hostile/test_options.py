"""Odd words on the command line, in the place of every kind of value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.support.hostile import Attack, seeds

Attacks = Callable[[Attack, Iterable[Attack]], None]

WORDS = (
    "", " ", "\n", "a\nb", "a\x00", "\x1b[31mx", "\x1b]0;x\x07", "\u202ex", "\udcff", "[/]",
    "[/bold]",
    "\\[/]", "[link=http://x]y", "x" * 5000, "é" * 300, "../../..", "/dev/zero", "/dev/stdin",
    "/proc/self/mem",
    "~nobody/x", "*", "-", "--", "=", "a=b=c", ":", "@", "{}", "[", "[1,2", "null", "&a [*a]",
    "%s%n", "$HOME",
    "!!python/object:os.system x", "1e999", "nan", "-1", "0", "9" * 400, "http://", "http://[::1",
    "http://x:99999/v1", "https://user:pw@h/v1", "file:///etc/passwd",
)  # fmt: skip
EVAL = ("eval", "api", "--dry-run", "--model", "m", "--task", "sotopia", "--data", "synth:2")
OPTIONS = ("--model", "--base-url", "--task", "--suite", "--data", "--set", "--where", "--gate",
           "--judge",
           "--config", "--endpoints", "--prices", "--out", "--option", "--repeats", "--max-cost",
           "--limit",
           "--tasks", "--system-prompt", "--refine", "--header")  # fmt: skip
COMMANDS: tuple[tuple[str, ...], ...] = (
    *((*EVAL, option, "WORD") for option in OPTIONS), (*EVAL, "--data", "synth:WORD"),
    (*EVAL, "--set", "option=WORD"), (*EVAL, "--judge", "endpoint:m@http://127.0.0.1:9/WORD"),
    (*EVAL, "--judge", "function:WORD"), ("train", "WORD"), ("report", "WORD"), ("show", "WORD"),
    ("train", "ditto", "--dry-run", "--task", "tomi", "--data", "synth:20", "--set", "lora=WORD"),
    ("train", "ablate", "--dry-run", "--task", "tomi", "--data", "synth:20", "--methods", "WORD"),
    ("train", "matrix", "--dry-run", "--train", "WORD", "--eval", "tom"),
    ("train", "matrix", "--dry-run", "--train", "tomi,hitom", "--eval", "WORD"),
    ("reproduce", "ditto-paper", "--dry-run", "--figure", "WORD", "--scale", "tiny"),
    ("report", "WORD", "--format", "WORD"), ("rescore", "WORD"), ("compare", "WORD", "WORD"),
    ("runs", "WORD"), ("ledger", "verify", "WORD"), ("data", "check", "WORD"), ("data", "show",
    "WORD"),
    ("data", "pull", "--task", "WORD"), ("data", "import", "WORD", "x"),
    ("tasks", "check", "riddle", "--tasks", "WORD"),
    ("tasks", "show", "WORD"), ("tasks", "new", "WORD"), ("export", "WORD", "--adapter"),
)  # fmt: skip


@pytest.mark.parametrize("part", seeds(60))
def test_odd_words(attack_all: Attacks, part: int) -> None:
    def attack(number: int, command: Iterable[str]) -> Attack:
        word = WORDS[number]
        words = [one.replace("WORD", word) for one in command]
        return Attack(f"{word[:20]!r}", words, lambda folder: None)

    every = [(n, command) for n in range(len(WORDS)) for command in COMMANDS]
    attacks = (attack(*one) for one in every[part::60][: None if part else 8])
    attack_all(Attack("undamaged", EVAL, lambda folder: None), attacks)
