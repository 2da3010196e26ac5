"""Write docs/cli.md from the help texts of every command, and the settings in docs/training.md.

    .venv/bin/python scripts/cli_docs.py            # write
    .venv/bin/python scripts/cli_docs.py --check    # exit 1 when one is stale

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
from soulkit.cli.options import HELP_ALL, SECTIONS, GroupFromSettings, default_text
from soulkit.config import about, flag_of
from soulkit.train.config import LoraSettings, TrainConfig
from soulkit.train.objectives.base import built_in, method_class

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "cli.md"
TRAINING = DOCS / "training.md"
BEGIN = "<!-- settings: written by scripts/cli_docs.py -->"
END = "<!-- end of settings -->"
HEAD = """# Commands

Every command with all its options. `scripts/cli_docs.py` writes this page; edits belong where the
option is declared: in the settings (`setting(…)`), or in `soulkit/cli/`.

`-h` and `--help` work behind every command. Behind `soul eval`, `train` and `distill` they show the
options of every day, and `--help-all` shows all of them. Options that several commands share are in
[one table](#shared-options); a command's own section has the others.

`--debug` may stand anywhere on the line and adds the traceback to an error. Commands with `--json`
print one JSON document on stdout and say everything else on stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an internal error, a silent model, too many unscored, a failing check, a damaged ledger |
| 2 | something you can mend: three lines say what, why and how |
| 130, 143, 129 | Ctrl-C, SIGTERM, SIGHUP: what was finished is kept; the same command resumes |
"""


def commands() -> Iterator[tuple[str, Any]]:
    """(full name, command) of `soul`, its commands and their subcommands."""
    yield "soul", typer.main.get_group(app)
    for name in COMMANDS:
        found = load(name)
        yield f"soul {name}", found
        for child, command in children(found).items():
            yield f"soul {name} {child}", command


def children(group: Any) -> dict[str, Any]:
    """The subcommands, whole: some groups make them when they are called."""
    if isinstance(group, GroupFromSettings):
        made = {name: group.build(name) for name in group.sentences()}
        return {**made, **group.commands}
    return dict(getattr(group, "commands", {}))


Row = tuple[str, str]


def rows_of(command: Any) -> list[Row]:
    """Option and meaning, for every option of a command."""
    options = [
        p for p in command.params if p.opts[0].startswith("-") and p.name not in ("help", HELP_ALL)
    ]
    return [(_names(p), _meaning(p)) for p in options]


def shared_rows(every: dict[str, Any]) -> dict[Row, list[str]]:
    """Options that are the same in several commands → the commands."""
    owners: dict[Row, list[str]] = {}
    for name, command in every.items():
        for row in rows_of(command):
            owners.setdefault(row, []).append(name)
    return {row: names for row, names in owners.items() if len(names) > 1}


def shared_section(every: dict[str, Any], shared: dict[Row, list[str]]) -> str:
    lines = ["## Shared options", "", "| option | meaning | commands |", "|---|---|---|"]
    lines += [f"| {a} | {b} | {_where(names, every)} |" for (a, b), names in shared.items()]
    return "\n".join(lines) + "\n"


def _where(names: list[str], every: dict[str, Any]) -> str:
    """Commands in short: a whole group by its name, and what is missing of it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        _, group, *child = name.split(" ", 2)
        groups.setdefault(group, []).extend(child)
    return "; ".join(_part(group, inner, every) for group, inner in groups.items())


def _part(group: str, inner: list[str], every: dict[str, Any]) -> str:
    all_of_it = [n.split(" ", 2)[2] for n in every if n.startswith(f"soul {group} ")]
    missing = [name for name in all_of_it if name not in inner]
    if not missing or not inner:
        return group
    if len(missing) < len(inner):
        return f"{group} but {', '.join(missing)}"
    return f"{group} {', '.join(inner)}"


def section(name: str, command: Any, inner: list[str], shared: dict[Row, list[str]]) -> str:
    """One command: its text, how it is called, its own options, its subcommands."""
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    rows = rows_of(command)
    words = [name, *(p.metavar or p.name.upper().rstrip("_") for p in arguments)]
    words += ["COMMAND"] if inner else []
    parts = [f"## {name}", inspect.cleandoc(command.help or ""), f"    {' '.join(words)} [OPTIONS]"]
    named = [(f"`{p.metavar or p.name.upper()}`", _meaning(p)) for p in arguments]
    named += [row for row in rows if row not in shared]
    if inner:
        parts.append("\n".join(f"* [{name} {child}](#{_anchor(name, child)})" for child in inner))
    if named:
        lines = [f"| {left} | {right} |" for left, right in named]
        parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *lines]))
    also = sum(row in shared for row in rows)
    if also:
        parts.append(f"And {also} of the [shared options](#shared-options).")
    return "\n\n".join(parts) + "\n"


def _names(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    metavar = (option.metavar or "").replace("|", "\\|")
    return f"`{names} {metavar}`" if metavar else f"`{names}`"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    parts = [(parameter.help or "").replace("|", "\\|")]
    if parameter.required:
        parts.append("Required.")
    elif isinstance(default, str | int | float | Path) and not isinstance(default, bool):
        parts.append(f"Default: `{default}`.")
    return " ".join(parts)


def _anchor(name: str, child: str) -> str:
    """As pages are anchored where Markdown is shown: signs other than the hyphen are left out."""
    return re.sub(r"[^\w -]", "", f"{name} {child}").replace(" ", "-")


def page() -> str:
    """The whole page."""
    every = dict(commands())
    shared = shared_rows(every)
    inner = {
        name: [n.rpartition(" ")[2] for n in every if n.rpartition(" ")[0] == name]
        for name in every
    }
    sections = [section(name, command, inner[name], shared) for name, command in every.items()]
    return "\n".join([HEAD, shared_section(every, shared), *sections])


# --- the settings of training ---------------------------------------------------------------------


def settings_table() -> str:
    """Every setting of training: option, default, meaning, methods."""
    lines = ["| name | option | default | meaning | methods |", "|---|---|---|---|---|"]
    order = sorted(_settings(TrainConfig), key=lambda one: _place(one[1]))
    for name, info in order:
        flag = flag_of(name, info)
        option = f"`{flag.partition('/')[0]}`" if flag else ""
        meaning = (info.description or "").replace("|", "\\|")
        methods = _methods(name.partition(".")[0], info)
        lines.append(f"| `{name}` | {option} | {_defaults(name, info)} | {meaning} | {methods} |")
    return "\n".join(lines)


def _defaults(name: str, info: Any) -> str:
    """The default, and behind it those of methods that have another."""
    words = {method: method_class(method).default_words.get(name) for method in built_in()}
    others = [f"{method}: {text}" for method, text in words.items() if text]
    return "; ".join([default_text(info), *others])


def _settings(kind: Any, under: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in kind.model_fields.items():
        if name == "lora":
            yield from _settings(LoraSettings, "lora.")
        elif about(info):
            yield f"{under}{name}", info


def _place(info: Any) -> int:
    return SECTIONS.index(about(info)["section"])


def _methods(name: str, info: Any) -> str:
    """The methods that a setting matters to; empty for all."""
    only, owners = set(about(info)["only"]), TrainConfig.owners(name)
    mattering = []
    for method in built_in():
        traits = method_class(method).traits(method)
        if traits & owners and (not only or traits & only):
            mattering.append(method)
    others = [method for method in built_in() if method not in mattering]
    if not others:
        return ""
    if not mattering:
        return "none"
    return f"all but {', '.join(others)}" if len(others) < 3 else ", ".join(mattering)


def training_page(text: str) -> str:
    """docs/training.md with a fresh table of settings."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n\n{settings_table()}\n\n{end}{after}"


def main(arguments: list[str]) -> int:
    training = TRAINING.read_text(encoding="utf-8")
    stale = 0
    for path, fresh in ((PAGE, page()), (TRAINING, training_page(training))):
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != fresh:
            print(f"{path} is stale: run {sys.executable} scripts/cli_docs.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
