"""Modules, hooks and functions of users that raise, exit, or return other values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from tests.support.hostile import Attack, seeds

Attacks = Callable[[Attack, Iterable[Attack]], None]

ENDS = (
    "raise ValueError('no \\x1b[31m')", "raise SystemExit(0)", "raise SystemExit('bye')", "exit(3)",
    "raise KeyboardInterrupt", "raise BaseException('odd')", "raise GeneratorExit", "raise Odd()",
    "raise Mute()", "raise asyncio.CancelledError", "def f(): return f()\n    f()", "1 / 0",
    "raise RecursionError", "raise MemoryError", "raise StopIteration", "raise StopAsyncIteration",
    "raise ExceptionGroup('x', [ValueError(1)])", "raise BaseExceptionGroup('x', [Odd()])",
    "raise ValueError('x' * 10**6)", "raise UnicodeDecodeError('x', b'', 0, 1, 'y')", "raise 7",
    "raise FileNotFoundError(2, 'no', 'x')", "raise ModuleNotFoundError(name='torch')",
    "import nope", "raise OSError(28, 'full')", "raise ValueError('\\ud800')",
    "raise AttributeError", "raise NotImplementedError", "raise ImportError", "raise TimeoutError",
)  # fmt: skip
HEAD = """\
import asyncio
import os

from soulkit.tasks import ChoiceTask, Task

class Odd(BaseException): pass
class Mute(Exception):
    def __str__(self): raise SystemExit(0)

"""
DECLARATION = """\
tasks:
  riddle:
    kind: text
    rows: {rows}
    prompt: "{{{{ clue }}}}?"
    gold: answer
    scorer: exact
    synth: hooks:make
    importer: hooks:read
    audit: hooks:audit
"""
ROWS = [{"clue": f"{n} legs", "answer": str(n)} for n in range(3)]
HOOKS = {
    "rows": ("def rows(n, seed):\n    {end}\n", ("tasks", "check", "riddle")),
    "make": ("def make(n, seed):\n    {end}\n", ("data", "synth", "riddle", "--rows", "3")),
    "read": ("def read(path):\n    {end}\n", ("data", "import", "riddle", "rows.jsonl")),
    "audit": ("def audit(path, examples):\n    {end}\n", ("data", "audit", "riddle", "rows.jsonl")),
    "lazy": ("def make(n, seed):\n    yield from ()\n    {end}\n",
             ("data", "synth", "riddle", "--rows", "3")),
    "import": ("if True:\n    {end}\n", ("data", "synth", "riddle", "--rows", "3")),
}  # fmt: skip


def _put(hook: str, end: str, folder: Path) -> None:
    text = HOOKS[hook][0].format(end=end)
    (folder / "hooks.py").write_text(HEAD + text, encoding="utf-8", errors="surrogatepass")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    rows = "hooks.py:rows" if hook == "rows" else "rows.jsonl"
    (folder / "tasks.yaml").write_text(DECLARATION.format(rows=rows))


def _attack(hook: str, end: str) -> Attack:
    command = (*HOOKS[hook][1], "--tasks", "tasks.yaml")
    command += () if command[0] == "tasks" or command[1] == "audit" else ("--out", "out.jsonl")
    after = _no_place if end in ENDS and "Error(2" in end else lambda folder, text: ()
    return Attack(f"{hook}: {end[:40]}", command, partial(_put, hook, end), after=after)


def _no_place(folder: Path, text: str) -> list[str]:
    """Errors of the system need file and line, too: the disk of a user's code may be full."""
    return [] if "hooks.py:" in text else [f"no file and line: {text[-300:]}"]


SOUND = {
    "rows": f"return {ROWS}", "make": f"return {ROWS}[:n]", "lazy": f"yield from {ROWS}",
    "import": "pass",
}  # fmt: skip


@pytest.mark.parametrize("part", seeds(45))
def test_hooks_that_raise(attack_all: Attacks, part: int) -> None:
    sound = _attack("rows", SOUND["rows"])
    attacks = [_attack(hook, end) for hook in HOOKS for end in ENDS]
    attack_all(sound, attacks[part::45])


ODD_ROWS = ("None", "7", "''", "[7]", "[None]", "[[]]", "{}", "[{}]", "iter(())", "[{7: 7}]",
            "[{'clue': object(), 'answer': 'x'}]", "[{'clue': float('nan'), 'answer': '1'}]",
            "[{'clue': '\\x1b[31m', 'answer': '\\x1b'}]", "[{'clue': b'x', 'answer': set()}]",
            "(x for x in [1 / 0])", "[{'clue': 'x' * 10**7, 'answer': 'y'}]")  # fmt: skip


@pytest.mark.parametrize("hook", ["rows", "make", "read", "audit"])
@pytest.mark.hostile
def test_hooks_that_return_other_values(attack_all: Attacks, hook: str) -> None:
    attacks = (_attack(hook, f"return {value}") for value in ODD_ROWS)
    attack_all(_attack("rows", SOUND["rows"]), attacks)


TASK = (
    HEAD
    + """
class Riddle(Task):
    def prompt_values(self, example): return {{}}
    {method}

"""
)
METHODS = (
    "async def play(self, example, cast, rollout)", "async def score(self, example, episode, cast)",
    "def gold(self, example)", "def examples(self, row)", "def summarise(self, records)",
    "def __init__(self, *a, **k)", "def explain(self, *a)", "def gold_text(self, example)",
    "async def critique(self, *a)", "def controls(self, *a)",
)  # fmt: skip
CLASS = """\
tasks:
  riddle:
    module: hooks:Riddle
    seats: {solver: actor}
    metric: {name: accuracy}
    rows: rows.jsonl
    columns:
      clue: {audience: [solver]}
      answer: {audience: [gold]}
"""


def _put_class(method: str, end: str, folder: Path) -> None:
    text = TASK.format(method=f"{method}:\n        {end.replace(chr(10), chr(10) + '    ')}")
    (folder / "hooks.py").write_text(text, encoding="utf-8", errors="surrogatepass")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "tasks.yaml").write_text(CLASS)


@pytest.mark.parametrize("part", seeds(10, quick=0))
def test_methods_that_raise(attack_all: Attacks, part: int) -> None:
    attacks = [
        Attack(f"{method}: {end[:30]}", ("tasks", "check", "riddle", "--tasks", "tasks.yaml"),
               partial(_put_class, method, end))
        for method in METHODS for end in ENDS
    ]  # fmt: skip
    attack_all(_attack("rows", SOUND["rows"]), attacks[part::30])
