"""Generate commands.md, settings.md, tasks.md and the tables of file-formats.md in docs/reference.

    .venv/bin/python scripts/reference_docs.py            # write
    .venv/bin/python scripts/reference_docs.py --check    # exit 1 if a page is stale

The texts come from the command objects, not from rendered help, so the pages do not depend on the
terminal or the version of Typer.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from soulkit.cli.app import COMMANDS, app, load
from soulkit.cli.options import HELP_ALL, SECTIONS, GroupFromSettings, default_text
from soulkit.config import about, flag_of
from soulkit.distill.report import Distillation
from soulkit.doctor.checks import Checkup
from soulkit.eval.results.summary import Summary
from soulkit.report.exports.episodes import COLUMNS
from soulkit.runs.jsonl import (
    CERTIFICATE_SCHEMA,
    CONTROLS_SCHEMA,
    DISTILLATION_SCHEMA,
    DOCTOR_SCHEMA,
    EPISODES_SCHEMA,
    SUMMARY_SCHEMA,
    schema_file,
)
from soulkit.runs.record_lines import ControlLine, RecordLine
from soulkit.serving.certificate import Certificate
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.spec import HookKey, Suite, TaskSpec
from soulkit.train.config import LoraSettings, TrainConfig
from soulkit.train.objectives.base import built_in, method_class

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
HEAD = """# Commands

Every command and option. `scripts/reference_docs.py` generates this page from the code; do not edit
it by hand.

Every command accepts `-h` and `--help`. For `soul eval`, `train` and `distill`, `--help` lists the
common options and `--help-all` lists all of them. Options shared by several commands are listed in
[one table](#shared-options).

`--debug` works anywhere on the command line and adds the traceback to an error. Commands with
`--json` print one JSON document to stdout and everything else to stderr.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | internal error, unresponsive model, too many unscored, failed check, damaged ledger |
| 2 | user error: three lines say what is wrong, why, and how to fix it |
| 130, 143, 129 | stopped by Ctrl-C, SIGTERM or SIGHUP; the same command resumes |
"""
SETTINGS_HEAD = """# Training settings

Every setting of `soul train`. `scripts/reference_docs.py` generates this page from the code; do not
edit it by hand.

Set a value in one of four ways. Flags take precedence over environment variables, and environment
variables over the file.

| where | example |
|---|---|
| option | `--lr 1e-5` |
| --set, for settings without an option of their own | `--set lora.r=16` |
| environment variable | `SOULKIT_LR=1e-5`; nested: `SOULKIT_LORA__R=16` |
| YAML file, passed with `--config` | `lr: 1e-5`, or the `config.yaml` of an earlier run |

The file accepts the name of a setting or of its option: `task: tomi,hitom:0.5` means
`tasks: {tomi: 1, hitom: 0.5}`, and `lora_r: 16` means `lora: {r: 16}`. Hyphens count as
underscores, and a repeatable option takes a list. Using both names of one setting is an error.
"""

TASKS_HEAD = """# Tasks and suites

Every built-in task and suite. `scripts/reference_docs.py` generates this page from `tasks.yaml`; do
not edit it by hand.

`soul tasks show TASK` prints the columns of a task, who sees them, its options and its sampling
defaults. [Benchmarks as played](benchmarks-as-played.md) explains how each one is scored.
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; in cells, line breaks become spaces and pipes are escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> Iterator[tuple[str, Any]]:
    """(full name, command) for `soul`, its commands and their subcommands."""
    yield "soul", typer.main.get_group(app)
    for name in COMMANDS:
        found = load(name)
        yield f"soul {name}", found
        for child, command in children(found).items():
            yield f"soul {name} {child}", command


def children(group: Any) -> dict[str, Any]:
    """All subcommands of a group, including those that the group builds on demand."""
    if isinstance(group, GroupFromSettings):
        made = {name: group.build(name) for name in group.sentences()}
        return {**made, **group.commands}
    return dict(getattr(group, "commands", {}))


Row = tuple[str, str]


def rows_of(command: Any) -> list[Row]:
    """(option, meaning) for every option of a command."""
    options = [
        p for p in command.params if p.opts[0].startswith("-") and p.name not in ("help", HELP_ALL)
    ]
    return [(_names(p), _meaning(p)) for p in options]


def shared_rows(every: dict[str, Any]) -> dict[Row, list[str]]:
    """Options that several commands share → names of those commands."""
    owners: dict[Row, list[str]] = {}
    for name, command in every.items():
        for row in rows_of(command):
            owners.setdefault(row, []).append(name)
    return {row: names for row, names in owners.items() if len(names) > 1}


def shared_section(every: dict[str, Any], shared: dict[Row, list[str]]) -> str:
    rows = [(*row, _where(names, every)) for row, names in shared.items()]
    return f"## Shared options\n\n{_table(('option', 'meaning', 'commands'), rows)}"


def _where(names: list[str], every: dict[str, Any]) -> str:
    """The commands in short form: `data`, `data but diff`, or `data diff, split`."""
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
    """The section of one command: its help, usage line, subcommands and own options."""
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
        parts.append(_table(("argument or option", "meaning"), named).rstrip())
    also = sum(row in shared for row in rows)
    if also:
        flag = "--help-all" if any(p.name == HELP_ALL for p in command.params) else "--help"
        plural = ("s", "them") if also > 1 else ("", "it")
        parts.append(
            f"It also takes {also} [shared option{plural[0]}](#shared-options); "
            f"`{name} {flag}` lists {plural[1]}."
        )
    return "\n\n".join(parts) + "\n"


def _names(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names} {option.metavar}`" if option.metavar else f"`{names}`"


def _meaning(parameter: Any) -> str:
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    parts = [parameter.help or ""]
    if parameter.required:
        parts.append("Required.")
    elif isinstance(default, str | int | float | Path) and not isinstance(default, bool):
        parts.append(f"[default: {default}]")
    return " ".join(parts)


def _anchor(name: str, child: str) -> str:
    """The anchor of a heading in Markdown viewers: without punctuation, except hyphens."""
    return re.sub(r"[^\w -]", "", f"{name} {child}").replace(" ", "-")


def page() -> str:
    """The page of commands."""
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
    """A table of all training settings: name, option, default, meaning, methods."""
    rows = []
    for name, info in sorted(_settings(TrainConfig), key=lambda one: _place(one[1])):
        flag = flag_of(name, info)
        option = f"`{flag.partition('/')[0]}`" if flag else ""
        methods = _methods(name.partition(".")[0], info)
        rows.append((f"`{name}`", option, _defaults(name, info), info.description or "", methods))
    return _table(("name", "option", "default", "meaning", "methods"), rows)


def _defaults(name: str, info: Any) -> str:
    """The default, followed by the defaults of methods that differ."""
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
    """The methods that use a setting; empty if all do."""
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


def settings_page() -> str:
    return f"{SETTINGS_HEAD}\n{settings_table()}"


# --- file formats ---------------------------------------------------------------------------------


FORMATS = {
    EPISODES_SCHEMA: RecordLine,
    CONTROLS_SCHEMA: ControlLine,
    SUMMARY_SCHEMA: Summary,
    DISTILLATION_SCHEMA: Distillation,
    DOCTOR_SCHEMA: Checkup,
    CERTIFICATE_SCHEMA: Certificate,
}
COLUMNS_HEAD = """## The table of episodes

`soul report RUN... --format episodes-csv` (or `episodes-parquet`) writes one row per episode. The
first column is `run`, the name of the run. After the columns below come `metric_NAME` (`float`) for
every metric and `tag_NAME` (`str`) for every tag in these runs, in alphabetical order. Missing
values are empty in CSV and null in Parquet. In CSV, a text that a spreadsheet would read as a
formula starts with an apostrophe."""
GENERATED = "<!-- Generated from here on by scripts/reference_docs.py; do not edit by hand. -->\n"


def formats_page() -> str:
    """The page on file formats: its handwritten text, then a table for every schema and type."""
    written = (REFERENCE / "file-formats.md").read_text(encoding="utf-8").partition(GENERATED)[0]
    meanings = {kind.__name__: _meanings(kind) for kind in _types(tuple(FORMATS.values()))}
    parts, shown = [], set()
    for name, kind in FORMATS.items():
        schema = json.loads(schema_file(name).read_text(encoding="utf-8"))
        parts.append(_table_of(f"## {name}", schema, meanings[kind.__name__]))
        for inner, definition in schema.get("$defs", {}).items():
            if inner not in shown:
                parts.append(_table_of(f"### {inner}", definition, meanings[inner]))
            shown.add(inner)
    columns = [(f"`{name}`", f"`{form.__name__}`", meaning)
               for name, (form, _, meaning) in COLUMNS.items()]  # fmt: skip
    parts.append(f"{COLUMNS_HEAD}\n\n{_table(('column', 'type', 'meaning'), columns)}")
    return "\n".join([written + GENERATED, *parts])


def _table_of(heading: str, schema: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    rows = []
    for name, value in schema.get("properties", {}).items():
        meaning = meanings.get(name) or value.get("description") or ""
        mark = " (required)" if name in schema.get("required", ()) else ""
        rows.append((f"`{name}`", _type_words(value) + mark, meaning))
    about_it = schema.get("description") or schema.get("title", "")
    return "\n\n".join([heading, about_it, _table(("field", "type", "meaning"), rows)])


def _type_words(schema: Mapping[str, Any]) -> str:
    """The type of a field in words; named types become links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type_words(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    kind, inner = schema.get("type", "any"), schema.get("additionalProperties")
    if kind == "array":
        return f"list of {_type_words(schema.get('items', {}))}"
    if isinstance(inner, dict):
        return f"map of {_type_words(inner)}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _types(kind: Any) -> set[type]:
    """All dataclasses in a type, including the type itself."""
    if isinstance(kind, tuple):
        return set().union(*map(_types, kind))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return {kind, *_types(tuple(get_type_hints(kind).values()))}
    return _types(get_args(kind)) if get_args(kind) else set()


def _meanings(kind: type) -> dict[str, str]:
    """Field → the docstring below it, including inherited fields."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(line.target)] = str(ast.literal_eval(below.value))
    return found


# --- the tasks ------------------------------------------------------------------------------------


def tasks_page() -> str:
    """The page of tasks: metric, players, files and licence of each, then the suites."""
    registry = load_registry()
    tasks, suites = registry.specs.items(), registry.suites.items()
    parts: dict[str, tuple[tuple[str, ...], list[tuple[str, ...]]]] = {
        "## Tasks": (
            ("task", "what it asks", "axis", "metric"),
            [(f"`{name}`", task.summary, task.axis,
              f"`{task.metric.headline or task.metric.name}`") for name, task in tasks],
        ),
        "## Sources": (
            ("task", "benchmark", "citation", "licence of the data"),
            [(f"`{name}`", f"[{task.title}]({task.url})" if task.url else task.title,
              task.citation, task.licence) for name, task in tasks],
        ),
        "## Default players": (
            ("task", "models besides the one under test"),
            [(f"`{name}`", task.players.words()) for name, task in tasks if task.players.words()],
        ),
        "## Rows and files": (
            ("task", "training file", "evaluation file", "original files that `soul data` reads",
             "own options of `soul data`"),
            [(f"`{name}`", _code(task.files.train), _code(task.files.eval), _originals(task),
              _code(_data_options(name, task))) for name, task in tasks],
        ),
        "## Suites": (
            ("suite", "title", "tasks", "average"),
            [(f"`{name}`", suite.title, _members(suite), suite.average) for name, suite in suites],
        ),
    }  # fmt: skip
    sections = [f"{title}\n\n{_table(*table)}" for title, table in parts.items()]
    return "\n".join([TASKS_HEAD, *sections])


def _originals(task: TaskSpec) -> str:
    """The commands that convert a task's original files, and the formats of those files."""
    ways = {"import": task.importer, "build": task.builder, "build --drafter": task.drafting}
    how = _code(command for command, function in ways.items() if function)
    forms = "; ".join(task.formats).replace("*", "\\*")
    return f"{how}: {forms}" if how and forms else how


def _data_options(name: str, task: TaskSpec) -> list[str]:
    """The options that a task adds to commands of `soul data`."""
    hooks: dict[str, HookKey] = {
        "synth": "synth", "import": "importer", "build": "builder", "build --drafter": "drafting",
    }  # fmt: skip
    found = []
    for command, key in hooks.items():
        hook = task.hook(name, key)
        found += [f"{command} {o.describe()}" for o in hook.options.values()] if hook else []
    return found


def _members(suite: Suite) -> str:
    """The members of a suite, axis by axis."""
    if not suite.axes:
        return _code(suite.members)
    return "; ".join(f"{axis}: {_code(names)}" for axis, names in suite.axes.items())


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES = {
    "commands.md": page,
    "settings.md": settings_page,
    "tasks.md": tasks_page,
    "file-formats.md": formats_page,
}


def main(arguments: list[str]) -> int:
    stale = 0
    for name, write in PAGES.items():
        path, fresh = REFERENCE / name, write()
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != fresh:
            command = f"{sys.executable} scripts/reference_docs.py"
            print(f"{path} is stale: run {command}", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
