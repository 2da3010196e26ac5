"""Odd chats and exports of other programs."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.corpora.duplicates import find_duplicates
from soulkit.data.corpora.file_rows import write_clean
from tests.support.exports import SAMPLES, Sample, as_text
from tests.support.hostile import ODD_VALUES, Attack, mutations, seeds

Runner = Callable[[Attack, Iterable[Attack]], None]
COMMANDS = (
    ("data", "import", "chats", "FILE", "-o", "out.jsonl"),
    ("data", "show", "FILE", "--side", "human"),
    ("data", "show", "FILE", "--side", "human", "--json"),
    ("train", "sft", "--dry-run", "--model", "tiny", "--out", "run", "--side", "human",
     "--data", "FILE"),
    ("data", "dedupe", "FILE", "-o", "out.jsonl"),
    ("data", "split", "FILE", "--by", "person"),
)  # fmt: skip
SINGLE = {name: sample for name, sample in SAMPLES.items() if len(sample.files) == 1}
CHATS = b"""\
{"person": "u1", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}]}
{"person": "u2", "messages": [{"role": "user", "content": "What is rye?"}, {"role": "assistant", "content": "A grain."}]}
"""  # noqa: E501


def attack(name: str, file: str, content: bytes, number: int = 0) -> Attack:
    """The attack `number` uses one of the commands."""
    command = [file if word == "FILE" else word for word in COMMANDS[number % len(COMMANDS)]]
    return Attack(name, command, lambda folder: (folder / file).write_bytes(content))


@pytest.mark.hostile
@pytest.mark.parametrize("name", SINGLE)
def test_damaged_exports(attack_all: Runner, name: str) -> None:
    sample: Sample = SINGLE[name]
    ((path, value),) = sample.files.items()
    content, file = as_text(path, value).encode(), Path(path).name
    attack_all(
        attack("undamaged", "chats.jsonl", CHATS),
        (
            attack(f"{name} {kind}", file, text, n)
            for n, (kind, text) in enumerate(mutations(len(name), content, 6))
        ),
    )


@pytest.mark.parametrize("seed", seeds(10))
def test_damaged_chats(attack_all: Runner, seed: int) -> None:
    attack_all(
        attack("undamaged", "chats.jsonl", CHATS),
        (
            attack(kind, "chats.jsonl", text, n)
            for n, (kind, text) in enumerate(mutations(seed, CHATS, 12 if seed else 4))
        ),
    )


def tree(levels: int, role: str = "assistant") -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "text": "end", "replies": []}
    for n in range(levels):
        role = "assistant" if n % 2 else "prompter"
        reply = {"role": role, "text": f"word {n}", "content": [{"text": "x"}], "replies": [reply]}
    return {"message_tree_id": "t", "prompt": {**reply, "role": "prompter"}}


@pytest.mark.parametrize("levels", [*(pytest.param(n, marks=pytest.mark.hostile)
                                           for n in (99, 300, 350, 480, 600, 5000))])  # fmt: skip
def test_deep_trees_of_replies(attack_all: Runner, levels: int) -> None:
    deep = '{"replies": [' * levels + "]}" * levels if levels > 350 else json.dumps(tree(levels))
    nested = '{"messages": [{"role": "user", "content": ' + "[" * levels + "]" * levels + "}]}"
    attack_all(
        attack("undamaged", "chats.jsonl", CHATS),
        (
            attack(f"{levels} in {file}", file, text.encode(), number)
            for number in range(len(COMMANDS))
            for file, text in (
                ("deep.jsonl", deep + "\n" + CHATS.decode()), ("deep.json", f"[{deep}]"),
                ("nested.jsonl", nested + "\n" + CHATS.decode()),
            )
        ),
    )  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_odd_values_in_chats(attack_all: Runner, number: int) -> None:
    def lines() -> Iterable[bytes]:
        for value in ODD_VALUES:
            yield b'{"person": ' + value + b', "messages": [{"role": "user", "content": "hi"}]}'
            yield b'{"messages": ' + value + b"}"
            yield b'{"messages": [{"role": "user", "content": ' + value + b"}]}"
            yield b'{"messages": [' + value + b', {"role": "assistant", "content": "x"}]}'

    attack_all(
        attack("undamaged", "chats.jsonl", CHATS),
        (attack(str(line[:50]), "chats.jsonl", CHATS + line, number) for line in lines()),
    )


@pytest.mark.hostile
def test_odd_archives(attack_all: Runner) -> None:
    def packed(**members: bytes) -> Callable[[Path], object]:
        def write(folder: Path) -> None:
            with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in members.items():
                    archive.writestr(name.replace("_up_", "../").replace("_dot_", "."), content)

        return write

    archives = {
        "bomb": packed(conversations_dot_json=b" " * 300_000_000),
        "outside": packed(_up_x_dot_jsonl=CHATS), "empty": packed(),
        "table": packed(rows_dot_csv=b'"' + b"x" * 100_000_000),
        "one line": packed(a_dot_jsonl=b"[" * 50_000_000),
        "not a zip": lambda folder: (folder / "x.zip").write_bytes(b"PK\3\4" + b"\0" * 99),
    }  # fmt: skip
    attack_all(
        attack("undamaged", "chats.jsonl", CHATS),
        (
            Attack(name, [("x.zip" if word == "FILE" else word) for word in command], write)
            for name, write in archives.items()
            for command in COMMANDS[:3]
        ),
    )


def test_an_unreadable_record_does_not_remove_a_conversation(tmp_path: Path) -> None:
    talk = '{"conversation_id": "c", "turn": 0, "user_prompt": "Rye?", "model_response": "Yes."}'
    (tmp_path / "a.jsonl").write_text(f'{{"conversation_id": "c", "tur\n{talk}\n')
    report = find_duplicates(str(tmp_path / "a.jsonl"))
    assert report.rows == 2 and len(report.bad) == 1
    write_clean(str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", report.left_out())
    assert "Rye?" in (tmp_path / "b.jsonl").read_text()
