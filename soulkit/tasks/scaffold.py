"""Write the folder of a new task (`soul tasks new`): a renamed copy of one of the examples.

    choice     examples/my_task          one prompt, one reply, one right answer
    judged     examples/judged_task      a judge scores the reply
    dialogue   examples/dialogue_task    actor and partner take turns
    scene      examples/scene_task       one actor plays several characters, a judge scores them

The examples are in `soulkit/tasks/templates/` (installed package) or `examples/` (checkout).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from soulkit.errors import ConfigError, did_you_mean
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.user_code import BUILTIN


@dataclass(frozen=True, slots=True)
class Template:
    """An example task, and the names in it that are replaced."""

    task: str
    cls: str
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


def template_files(kind: str) -> dict[str, str]:
    """The example's files: path inside the folder → text."""
    packaged = BUILTIN / "templates" / kind
    checkout = BUILTIN.parents[1] / "examples" / template(kind).task
    folder = packaged if packaged.is_dir() else checkout
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if "__pycache__" not in path.parts
    }


def template(kind: str) -> Template:
    """The template of a kind; ConfigError if there is no such kind."""
    if kind not in TEMPLATES:
        raise ConfigError(
            f"There is no kind of task '{kind}'.",
            f"The templates are: {', '.join(TEMPLATES)}.",
            f"{did_you_mean(kind, TEMPLATES)} Give one of them to --kind.",
        )
    return TEMPLATES[kind]


def renamed_files(name: str, kind: str) -> dict[str, str]:
    """The files of a new task: the example's files with its names replaced."""
    files, example = template_files(kind), template(kind)
    cls = _class_name(name, files["task.py"])
    return {
        path: text.replace(example.task, name).replace(example.cls, cls)
        for path, text in files.items()
    }


def _class_name(name: str, code: str) -> str:
    """`night_bus` → NightBus; `Task` is appended if the example's code already uses that name."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{camel}Task" if re.search(rf"\b{camel}\b", code) else camel


def write_task(name: str, kind: str, folder: Path) -> tuple[str, ...]:
    """Write the folder of a new task and return its file paths; no existing file is overwritten.

    ConfigError if the name is not allowed or the folder is not empty.
    """
    _refuse_name(name)
    files = renamed_files(name, kind)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"'{folder}' exists and is not an empty folder.",
            "The new task would mix with the files in it or overwrite them.",
            "Choose another folder with --out, or another name.",
        )
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
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
