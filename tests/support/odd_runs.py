"""Run folders for attacks: made once by real commands, then copied and damaged."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import judged
from tests.support.evaluation import FAST, soul
from tests.support.hostile import ODD_VALUES, mutations, seeded
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model

Change = Callable[[Path], object]


def make_evaluations(folder: Path) -> None:
    """Two judged evaluations in `folder`, `a` and `b`, with ledgers."""
    rows = judged.write_rows(folder / "rows.jsonl", 4)
    judge = ScriptedServer(answer=judged.judge())
    with ScriptedServer(answer=judged.essay) as actor, judge:
        for name in "ab":
            words = ("eval", "api", "--model", "m", "--base-url", actor.base_url, "--tasks",
                     judged.TASKS, "--task", "essay", "--data", rows, "--judge",
                     f"endpoint:judge@{judge.base_url}", "--out", folder / name, *FAST)  # fmt: skip
            assert soul(*words) == 0


def make_training(folder: Path) -> None:
    """A Ditto training in `folder`/train with a dev split, and the folder of its base model."""
    assert soul(*training("ditto", random_model(folder / "model"), folder / "train")) == 0


SIZES: dict[str, tuple[object, ...]] = {
    "sft": ("--batch", 4),
    "ditto": ("--prompts", 2, "--group-size", 2, "--max-tokens", 6, "--eval-every", 1,
              "--set", "dev_limit=2"),
}  # fmt: skip


def training(method: str, model: Path, out: Path, steps: int = 2, every: int = 1) -> list[str]:
    """The command of a small training with a checkpoint `every` so many steps."""
    words = ("train", method, "--model", model, "--task", "tomi", "--data", "tomi=synth:12",
             *SIZES[method], "--steps", steps, "--lora-r", 4, "--checkpoint-every", every,
             "--out", out)  # fmt: skip
    return [str(word) for word in words]


def make_sweep(folder: Path) -> None:
    """A comparison of two methods in `folder`/sweep."""
    assert soul(*sweep(folder)) == 0


def sweep(folder: Path, out: str = "") -> list[str]:
    words = ("train", "ablate", "--methods", "grpo,ditto", "--model", folder / "model", "--task",
             "tomi", "--data", "tomi=synth:12", "--prompts", 2, "--group-size", 2,
             "--max-tokens", 6, "--steps", 1, "--lora-r", 4, "--match", "prompts", "--seeds", 1,
             "--out", out or folder / "sweep")  # fmt: skip
    return [str(word) for word in words]


def distilling(experts: Path | str, out: Path | str) -> list[str]:
    """The command that distils untrained experts: every sample is good enough."""
    words = ("distill", "--experts", experts, "--data", "tomi=synth:4", "--held-out",
             "tomi=synth:3", "--samples", 1, "--max-tokens", 6, "--min-reward", -1, "--epochs", 1,
             "--lora-r", 4, "--device", "cpu", "--out", out)  # fmt: skip
    return [str(word) for word in words]


def damages(seed: int, file: Path, count: int) -> Iterator[tuple[str, Change]]:
    """`count` pairs (name, function that damages the copy of `file` in a folder)."""
    rng, name = seeded(seed), file.name
    if name.endswith(".sqlite"):
        kinds = [_bytes, _cells, _oddity]
    elif name.endswith((".json", ".jsonl")):
        kinds = [_bytes, _nodes, _nodes, _nodes, _oddity]
    else:
        kinds = [_bytes, _bytes, _settings, _settings, _oddity]
    for number in range(count):
        kind = rng.choice(kinds)
        what, change = kind(rng, file)
        yield f"{name} {what} {seed}.{number}", change


def _bytes(rng: random.Random, file: Path) -> tuple[str, Change]:
    what, damaged = next(mutations(rng.randrange(1 << 30), file.read_bytes(), 1))
    return what, lambda folder: (folder / file.name).write_bytes(damaged)


def _nodes(rng: random.Random, file: Path) -> tuple[str, Change]:
    """Replace values anywhere in the JSON of a random line by odd ones."""
    text = file.read_text()
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    number = rng.randrange(len(lines))
    lines[number], what = odd_nodes(rng, json.loads(lines[number]))
    damaged = "\n".join(lines) + "\n"
    return what, lambda folder: (folder / file.name).write_text(damaged)


def odd_nodes(rng: random.Random, value: Any) -> tuple[str, str]:
    """The JSON text of `value` with one to three odd values in it, and their places."""
    value, places = copy.deepcopy(value), []
    odd: dict[str, bytes] = {}
    for _ in range(rng.choice((1, 1, 1, 3))):
        place = rng.choice([*_places(value)] or [()])
        if not place:
            continue
        parent = value
        for key in place[:-1]:
            parent = parent[key]
        if rng.random() < 0.15 and isinstance(parent, dict):
            del parent[place[-1]]
        elif rng.random() < 0.1 and isinstance(parent, dict):
            parent[rng.choice(("", "\x1b[2Jx", "a/../b", "__class__"))] = parent.pop(place[-1])
        else:
            mark = f"@odd{len(odd)}@"
            parent[place[-1]], odd[mark] = mark, rng.choice(ODD_VALUES + MORE_VALUES)
        places.append(".".join(map(str, place)))
    text = json.dumps(value)
    for mark, raw in odd.items():
        text = text.replace(f'"{mark}"', raw.decode())
    return text, f"{places}={[raw[:12] for raw in odd.values()]}"


MORE_VALUES = (
    b"0", b"1", b"1e308", b"-1e308", b"0.5", b"123456789012345678901234567890", b"false",
    b'"x"', b'"2026-13-45T99:00:00"', b'"<script>alert(1)</script>"', b'"\\u009b31m"', b'["x"]',
    b'{"value": 1}', b'[[[]]]', b'"nan"', b'"0"', b'{"a": {"b": {"c": null}}}', b"1.5", b"[1, 2]",
)  # fmt: skip


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield (*place, key)
        yield from _places(part, (*place, key))


def _settings(rng: random.Random, file: Path) -> tuple[str, Change]:
    """Replace the values of settings by odd ones."""
    import yaml

    text, what = odd_nodes(rng, yaml.safe_load(file.read_text()))  # JSON is YAML
    return what, lambda folder: (folder / file.name).write_text(text)


def _cells(rng: random.Random, file: Path) -> tuple[str, Change]:
    """Replace a cell of a table by an odd one."""
    with sqlite3.connect(file) as db:
        table = rng.choice(("calls", "contexts", "settings"))
        column = rng.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
    odd = rng.choice(ODD_CELLS)

    def change(folder: Path) -> None:
        db = sqlite3.connect(folder / file.name)
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (odd,))
        db.commit()
        db.close()

    return f"{table}.{column}={odd[:12] if isinstance(odd, str | bytes) else odd!r}", change


ODD_CELLS = (
    None, -1, 2**62, 1e308, float("inf"), "", "x", "\x1b[2J", "nan", b"", b"\xff\x00", b"t\xff",
    b"z\x00\x00", "[" * 100_000, "{}", "[]", "null", '"x"', "9" * 5000, "x" * 100_000,
    '{"base_url": 3, "sampling": []}', "2026-99-99", b"z" * 40,
)  # fmt: skip


def _oddity(rng: random.Random, file: Path) -> tuple[str, Change]:
    what = rng.choice(list(ODDITIES))

    def change(folder: Path) -> None:
        (folder / file.name).unlink()
        ODDITIES[what](folder / file.name)

    return what, change


ODDITIES: dict[str, Change] = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "folder": lambda path: path.mkdir(),
    "FIFO": lambda path: os.mkfifo(path),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "null": lambda path: path.write_text("null\n"),
    "list": lambda path: path.write_text("[]\n"),
    "number": lambda path: path.write_text("1\n"),
    "string": lambda path: path.write_text('"x"\n'),
    "object": lambda path: path.write_text("{}\n"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep object": lambda path: path.write_text('{"a":' * 50_000 + "1" + "}" * 50_000 + "\n"),
    "sparse": lambda path: (path.touch(), os.truncate(path, 600 << 20)),
    "anchors": lambda path: path.write_text(
        "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    ),
    "tags": lambda path: path.write_text("task: !!python/object/apply:os.system ['touch owned']\n"),
    "timestamp": lambda path: path.write_text("task: !!timestamp x\n"),
}


def copy_run(run: Path, target: Path) -> Path:
    """A copy of a run in which every file is new (no links)."""
    shutil.copytree(run, target)
    return target
