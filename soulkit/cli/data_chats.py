"""`soul data import chats`: conversations from the exports of other programs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.panel import Panel

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    one_line,
    out,
    print_json,
    print_next,
    safe,
)
from soulkit.cli.data_checks import say_bad_rows
from soulkit.errors import ConfigError, did_you_mean
from soulkit.text import counted, listed

if TYPE_CHECKING:
    from soulkit.data.exports.reading import ChatImport

COLUMN_KEYS = ("id", "role", "text", "person", "time")
SHOWN_NAMES, SHOWN_MESSAGES, SHOWN_CHARACTERS = 8, 6, 300


def import_export(
    path: Path, output: Path | None, branches: bool, columns: str | None, rest: Sequence[str],
    as_json: bool,
) -> None:  # fmt: skip
    """Write the conversations of an export; exits with 2 if some are malformed."""
    from soulkit.data.exports.layouts import ReadOptions
    from soulkit.data.exports.reading import import_chats
    from soulkit.data.files import check_target, refuse_same

    if rest:
        raise ConfigError(
            f"Unexpected argument '{rest[0]}'.",
            "Chats are imported from one file, folder or .zip file.",
            "Remove it, or see: soul data import --help",
        )
    target = output or Path("chats.jsonl")
    check_target(target, (".jsonl",))
    refuse_same(path, target)
    options = ReadOptions(branches, named_columns(columns or ""))
    done = import_chats(path, target, options, ConsoleReporter("import"))
    if as_json:
        counts = {"conversations": done.conversations, "messages": done.messages,
                  "persons": len(done.people), "speakers": done.speakers}  # fmt: skip
        print_json({"file": str(target), "layouts": done.layouts, **counts,
                    "left_out": done.left_out, "skipped_files": done.skipped,
                    "bad": [asdict(b) for b in done.bad], "example": done.example})  # fmt: skip
    else:
        _print_import(done, path, target)
    if done.bad:
        raise typer.Exit(2)


def named_columns(text: str) -> dict[str, str]:
    """`id=chat,text=body` as key → column; ConfigError for another form."""
    columns: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        key, equals, column = (word.strip() for word in part.partition("="))
        if key not in COLUMN_KEYS or not equals or not column:
            raise ConfigError(
                f"--columns cannot use '{part}'.",
                f"It takes KEY=COLUMN with the keys {', '.join(COLUMN_KEYS)}.",
                did_you_mean(key, COLUMN_KEYS),
            )
        columns[key] = column
    return columns


def _print_import(done: ChatImport, path: Path, target: Path) -> None:
    names = ", ".join(f"{n} ({counted(f, 'file')})" for n, f in done.layouts.items())
    people = counted(len(done.people), "person") if done.people else "no person's id"
    if done.speakers:
        people = counted(len(done.speakers), "speaker")
    lines = [
        f"{path}: {names}",
        f"{counted(done.conversations, 'conversation')}, {people}, "
        f"{counted(done.messages, 'message')} → {target}",
    ]
    if done.speakers:
        common = done.speakers.most_common(SHOWN_NAMES)
        more = f", and {len(done.speakers) - SHOWN_NAMES} more" * (len(done.speakers) > SHOWN_NAMES)
        named = ", ".join(f"{one_line(name, 40)} {count}" for name, count in common)
        lines.append(f"messages by speaker: {named}{more}")
    if done.left_out:
        lines.append(f"left out: {listed(done.left_out)}")
    if done.skipped:
        skipped = ", ".join(f"{count:,} {ending}" for ending, count in done.skipped.items())
        lines.append(f"files without conversations: {skipped}")
    for line in lines:
        console().print(safe(line), soft_wrap=True)
    _print_chat(done.example)
    say_bad_rows(done.bad)
    speaker = next((name for name, _ in done.speakers.most_common(1)), "human")
    name, side = shlex.quote(str(target)), shlex.quote(speaker)
    print_next(f"soul data show {name} --side {side}", f"soul data redact {name} -o safe.jsonl")


def _print_chat(row: Mapping[str, object]) -> None:
    messages = row["messages"]
    assert isinstance(messages, list)
    for message in messages[:SHOWN_MESSAGES]:
        title = safe(one_line(str(message.get("speaker") or message["role"]), 40))
        calls = [f"calls {call['function']['name']}" for call in message.get("tool_calls", ())]
        marks = " ".join(f"({mark})" for mark in [*message.get("attachments", ()), *calls])
        text = f"{message['content']} {marks}".strip()
        short = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"
        out.print(Panel(safe(short), title=title, title_align="left"))
    if len(messages) > SHOWN_MESSAGES:
        out.print(f"… and {counted(len(messages) - SHOWN_MESSAGES, 'more message')}")
