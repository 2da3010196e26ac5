"""Write docs/cli.md from the help texts of every command.

    .venv/bin/python scripts/cli_docs.py            # write
    .venv/bin/python scripts/cli_docs.py --check    # exit 1 when the page is stale

The texts are taken from the commands themselves, not from rendered help, so the page is the same
on every terminal and for every version of Typer.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from soulkit.cli.app import COMMANDS, app, load

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# Commands

Every command with its options, as `--help` gives them. `scripts/cli_docs.py` writes this page;
edits belong in `soulkit/cli/`.

`--debug` may stand anywhere on the line and adds the traceback to an error. Commands with `--json`
print one JSON document on stdout and say everything else on stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an internal error, a silent model, too many unscored, a failing check, a damaged ledger |
| 2 | something you can mend: three lines say what, why and how |
| 130 | interrupted; what was finished is kept, and the same command resumes it |
"""


def commands() -> Iterator[tuple[str, Any]]:
    """(full name, command) of `soul`, its commands and their subcommands."""
    yield "soul", typer.main.get_group(app)
    for name in COMMANDS:
        found = load(name)
        yield f"soul {name}", found
        for child, command in getattr(found, "commands", {}).items():
            yield f"soul {name} {child}", command


def section(name: str, command: Any) -> str:
    """One command: its text, how it is called, its options, its subcommands."""
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-") and p.name != "help"]
    inner = COMMANDS if name == "soul" else getattr(command, "commands", {})
    words = [name, *(p.metavar or p.name.upper().rstrip("_") for p in arguments)]
    words += ["COMMAND"] if inner else []
    parts = [f"## {name}", inspect.cleandoc(command.help or ""), f"    {' '.join(words)} [OPTIONS]"]
    named = [(f"`{p.metavar or p.name.upper()}`", _meaning(p)) for p in arguments]
    named += [(_names(p), _meaning(p)) for p in options]
    if inner:
        parts.append("\n".join(f"* [{name} {child}](#{_anchor(name, child)})" for child in inner))
    if named:
        lines = [f"| {left} | {right} |" for left, right in named]
        parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _names(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names} {option.metavar}`" if option.metavar else f"`{names}`"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    said = [(parameter.help or "").replace("|", "\\|")]
    if parameter.required:
        said.append("Required.")
    elif isinstance(default, str | int | float | Path) and not isinstance(default, bool):
        said.append(f"Default: `{default}`.")
    return " ".join(said)


def _anchor(name: str, child: str) -> str:
    """As pages are anchored where Markdown is shown: signs other than the hyphen are left out."""
    return re.sub(r"[^\w -]", "", f"{name} {child}").replace(" ", "-")


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(name, command) for name, command in commands())])


def main(arguments: list[str]) -> int:
    fresh = page()
    if "--check" in arguments:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != fresh
        if stale:
            print(f"{PAGE} is stale: run {sys.executable} scripts/cli_docs.py", file=sys.stderr)
        return int(stale)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
