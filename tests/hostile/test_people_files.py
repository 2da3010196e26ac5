"""Odd files that people edit or send: rating sheets, their keys, review sheets, scripts, gates."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.evaluation import soul
from tests.support.hostile import Attack, mutations, seeds

Runner = Callable[[Attack, Iterable[Attack]], None]
IMPORT = ("judge", "import", "filled.csv", "--key", "key.json")
CHATS = json.dumps({"person": "Ann", "messages": [
    {"speaker": "Ann", "content": "Call me: +49 30 901820, or a.lee@gmail.com."},
    {"speaker": "Bob", "content": "Thanks, Ann!"}]})  # fmt: skip
REVIEW = """\
decision,kind,text,count,context
keep,email,a.lee@gmail.com,1,or [email]
replace,name,Ann,2,[name]
replace,name,Berlin,,
"""
SCRIPT = """\
rules:
  - when: "(?i)price"
    say: "Twelve euros."
replies: ["Hello.", "Anything else?"]
"""
SIMULATE = ("simulate", "--agent", "scripted:agent.yaml", "--user", "scripted:user.yaml",
            "--personas", "personas.jsonl", "-n", "1", "--max-turns", "2",
            "--out", "run")  # fmt: skip


@pytest.fixture(scope="module")
def sheet(evaluations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a rating sheet, filled in, and its key."""
    folder = tmp_path_factory.mktemp("sheet")
    assert soul("judge", "sheet", evaluations / "a", "--out", folder) == 0
    key = json.loads((folder / "key.json").read_text())
    with (folder / "rater-1/sheet.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    with (folder / "filled.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        for row in rows:
            labels = key["scales"][row["task"]][row["dimension"]]["labels"]
            writer.writerow({**row, "label": labels[0]})
    return folder


@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.parametrize("name", ["key.json", "filled.csv"])
def test_rating_sheets(attack_all: Runner, sheet: Path, name: str, seed: int) -> None:
    def attack(kind: str, text: bytes | None = None) -> Attack:
        def prepare(folder: Path) -> None:
            for file in ("key.json", "filled.csv"):
                shutil.copy(sheet / file, folder)
            if text is not None:
                (folder / name).write_bytes(text)

        return Attack(kind, IMPORT, prepare)

    content = (sheet / name).read_bytes()
    damaged = mutations(seed, content, 16 if seed else 3)
    attack_all(attack("undamaged"), (attack(kind, text) for kind, text in damaged))


@pytest.mark.hostile
def test_values_of_a_key(attack_all: Runner, sheet: Path) -> None:
    """Every value of a key in turn becomes another one."""

    def keys() -> Iterator[str]:
        text = (sheet / "key.json").read_text()
        for place in range(len(_places(json.loads(text)))):
            for odd in (None, True, -1, "x", [], {}, [1]):
                key = json.loads(text)
                parent, name = _places(key)[place]
                parent[name] = odd
                yield json.dumps(key)

    def attack(name: str, key: str = "") -> Attack:
        def prepare(folder: Path) -> None:
            for file in ("key.json", "filled.csv"):
                shutil.copy(sheet / file, folder)
            if key:
                (folder / "key.json").write_text(key)

        return Attack(name, IMPORT, prepare)

    attack_all(attack("undamaged"), (attack(f"key {n}", key) for n, key in enumerate(keys())))


def _places(value: object) -> list[tuple[dict[str, object], str]]:
    """Every (object, name) of a JSON value, of many alike only the first three."""
    found: list[tuple[dict[str, object], str]] = []
    for name, inner in [*value.items()][:20] if isinstance(value, dict) else ():
        found += [(value, name)] if isinstance(value, dict) else []
        found += _places(inner)[:8]
    return found


@pytest.mark.parametrize("seed", seeds(10))
def test_review_sheets(attack_all: Runner, seed: int) -> None:
    def attack(name: str, text: bytes) -> Attack:
        def prepare(folder: Path) -> None:
            (folder / "chats.jsonl").write_text(CHATS)
            (folder / "review.csv").write_bytes(text)

        command = ("data", "redact", "chats.jsonl", "-o", "safe.jsonl", "--review", "review.csv")
        return Attack(name, command, prepare)

    content = REVIEW.encode()
    attack_all(
        attack("undamaged", content),
        (attack(*one) for one in mutations(seed, content, 16 if seed else 3)),
    )


def scripted(name: str, agent: str | bytes, user: str = SCRIPT) -> Attack:
    def prepare(folder: Path) -> None:
        (folder / "agent.yaml").write_bytes(agent if isinstance(agent, bytes) else agent.encode())
        (folder / "user.yaml").write_text(user)
        (folder / "personas.jsonl").write_text('{"id": "a", "persona": "Writes short messages."}')

    return Attack(name, SIMULATE, prepare)


@pytest.mark.parametrize("seed", seeds(6))
def test_scripts(attack_all: Runner, seed: int) -> None:
    attack_all(
        scripted("undamaged", SCRIPT),
        (scripted(*one) for one in mutations(seed, SCRIPT.encode(), 12 if seed else 2)),
    )


@pytest.mark.hostile
def test_patterns_of_scripts(attack_all: Runner) -> None:
    def attacks() -> Iterator[Attack]:
        talk = f"replies: ['{'a' * 40}!']"
        for pattern in ("(a+)+$", "(a|aa)+$", "(.*)*x", "a{99999999}", "(?<=a+)b", "(" * 5000):
            rule = f'rules: [{{when: "{pattern}", say: "x"}}]\nreplies: ["{"a" * 40}!"]'
            yield scripted(f"agent {pattern[:9]}", rule, talk)
            yield scripted(f"user {pattern[:9]}", talk, rule)

    attack_all(scripted("undamaged", SCRIPT), attacks())


@pytest.mark.hostile
def test_gates(attack_all: Runner, evaluations: Path) -> None:
    def attack(name: str, text: str) -> Attack:
        runs = (str(evaluations / "a"), str(evaluations / "b"))
        return Attack(name, ("compare", *runs, "--gates", "gates.txt"),
                      lambda folder: (folder / "gates.txt").write_text(text))  # fmt: skip

    texts = ("a" + " " * 100_000 + "b", "essay>=" + "1" * 100_000 + "x", "essay>=1e999",
             "estimate(" * 20_000 + "essay" + ")" * 20_000 + ">=0", ">=" * 50_000,
             "estimate(" * 100_000 + "essay>=0", "\x1b[2Jessay>=0", "essay/\u202e>=0")  # fmt: skip
    attack_all(
        attack("undamaged", "essay>=-10"),
        (attack(text[:9], text) for text in texts),
    )
