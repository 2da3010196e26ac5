"""Write the folder of a new task (`soul tasks new`): a renamed copy of one of the examples.

    choice     examples/yaml_choice, or with --python my_task    one prompt, one right answer
    text       examples/yaml_text                                one prompt, a free answer
    judged     examples/yaml_judged, or judged_task              a judge scores the reply
    dialogue   examples/yaml_dialogue, or dialogue_task          actor and partner take turns
    scene      examples/scene_task                               one actor, several characters

The examples are in `soulkit/tasks/templates/` (installed package) or `examples/` (checkout).
"""

from __future__ import annotations

import keyword
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from soulkit.errors import ConfigError, did_you_mean
from soulkit.runs.jsonl import TASKS_SCHEMA, schema_file
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.user_code import BUILTIN


@dataclass(frozen=True, slots=True)
class Template:
    """An example task, and the names in it that are replaced."""

    task: str
    cls: str = ""
    """The class; empty for a task without code."""
    players: str = ""
    """Options that an evaluation needs besides the model under test."""


TEMPLATES: Mapping[str, Template] = {
    "choice": Template("my_task", "MyTask"),
    "judged": Template("judged_task", "JudgedTask", "--judge endpoint:JUDGE@URL"),
    "dialogue": Template("dialogue_task", "MyDialogue", "--partner endpoint:PARTNER@URL"),
    "scene": Template(
        "scene_task", "MyScene", "--judge endpoint:JUDGE@URL --environment endpoint:ENVIRONMENT@URL"
    ),
}


YAML_TEMPLATES: Mapping[str, Template] = {
    "choice": Template("yaml_choice"),
    "text": Template("yaml_text"),
    "judged": Template("yaml_judged", players="--judge endpoint:JUDGE@URL"),
    "dialogue": Template(
        "yaml_dialogue", players="--partner endpoint:PARTNER@URL --judge endpoint:JUDGE@URL"
    ),
}
"""Kinds of tasks without code."""
SCHEMA_PATH = "../../soulkit/schemas/tasks-1.json"
"""The schema as the examples name it; a new task names the file in the package."""


def template_files(kind: str, *, python: bool = True) -> dict[str, str]:
    """The example's files: path inside the folder → text."""
    example = template(kind, python=python).task
    packaged = BUILTIN / "templates" / (kind if python else example)
    checkout = BUILTIN.parents[1] / "examples" / example
    folder = packaged if packaged.is_dir() else checkout
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if "__pycache__" not in path.parts
    }


def template(kind: str, *, python: bool = True) -> Template:
    """The template of a kind; ConfigError if there is no such kind."""
    kinds, others = (TEMPLATES, YAML_TEMPLATES) if python else (YAML_TEMPLATES, TEMPLATES)
    if kind in kinds:
        return kinds[kind]
    raise ConfigError(
        f"There is no kind of task '{kind}' {'with' if python else 'without'} Python code.",
        f"The kinds are: {', '.join(kinds)}.",
        f"{'Omit' if python else 'Add'} --python." if kind in others
        else f"{did_you_mean(kind, kinds)} Give one of them to --kind.",
    )  # fmt: skip


def renamed_files(name: str, kind: str, *, python: bool = True) -> dict[str, str]:
    """The files of a new task: the example's files with its names replaced."""
    files, example = template_files(kind, python=python), template(kind, python=python)
    cls = _class_name(name, files["task.py"]) if example.cls else ""
    names = {example.task: name, SCHEMA_PATH: schema_file(TASKS_SCHEMA).as_uri()}
    for old, new in {**names, **({example.cls: cls} if cls else {})}.items():
        files = {path: text.replace(old, new) for path, text in files.items()}
    return files


def _class_name(name: str, code: str) -> str:
    """`night_bus` → NightBus; `Task` is appended if the example's code already uses that name."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{camel}Task" if re.search(rf"\b{camel}\b", code) else camel


def write_task(name: str, kind: str, folder: Path, *, python: bool = False) -> tuple[str, ...]:
    """Write the folder of a new task and return its file paths; no existing file is overwritten.

    ConfigError if the name is not allowed or the folder is not empty.
    """
    _refuse_name(name)
    files = renamed_files(name, kind, python=python)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"'{folder}' exists and is not an empty folder.",
            "The new task would mix with the files in it or overwrite them.",
            "Choose another folder with --out, or another name.",
        )
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # a part of it would stop the next attempt
        raise
    return tuple(files)


def _refuse_name(name: str) -> None:
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ConfigError(
            f"'{name}' cannot be the name of a task.",
            "The name is used in options (--data NAME=FILE), file names and Python code.",
            "Use letters, digits and underscores, starting with a letter: night_bus.",
        )
    if yaml.safe_load(name) != name:
        raise ConfigError(
            f"'{name}' cannot be the name of a task.",
            "YAML, in which tasks are declared, does not read it as text.",
            f"Choose another name, for example my_{name}.",
        )
    if name in load_registry().specs:
        raise ConfigError(
            f"'{name}' is the name of a built-in task.",
            "Results of two tasks with the same name could not be told apart.",
            f"Choose another name, for example my_{name}.",
        )
