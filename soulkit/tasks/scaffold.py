"""Write the folder of a new task (`soul tasks new`): one of the examples under another name.

    choice     examples/my_task          a prompt, a reply, a right answer
    judged     examples/judged_task      a judge scores the reply
    dialogue   examples/dialogue_task    two parties take turns
    scene      examples/scene_task       one actor plays several people, a judge reads it

In an installed package the examples lie in `soulkit/tasks/templates/`, in a checkout at its root.
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
    """An example, and the names in it that stand for the new ones."""

    task: str
    cls: str
    players: str = ""
    """What an evaluation needs beside the actor."""


TEMPLATES: Mapping[str, Template] = {
    "choice": Template("my_task", "MyTask"),
    "judged": Template("judged_task", "JudgedTask", "--judge endpoint:JUDGE@URL"),
    "dialogue": Template("dialogue_task", "MyDialogue", "--partner endpoint:PARTNER@URL"),
    "scene": Template(
        "scene_task", "MyScene", "--judge endpoint:JUDGE@URL --environment endpoint:ENVIRONMENT@URL"
    ),
}


def template_files(kind: str) -> dict[str, str]:
    """Path inside the folder → text, of the example of a kind."""
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
    """The example of a kind; ConfigError when there is none."""
    if kind not in TEMPLATES:
        raise ConfigError(
            f"There is no kind of task '{kind}'.",
            f"A new task begins as one of {', '.join(TEMPLATES)}.",
            f"{did_you_mean(kind, TEMPLATES)} Give it to --kind.",
        )
    return TEMPLATES[kind]


def renamed_files(name: str, kind: str) -> dict[str, str]:
    """The files of a new task: those of the example with its names replaced."""
    files, example = template_files(kind), template(kind)
    cls = _class_name(name, files["task.py"])
    return {
        path: text.replace(example.task, name).replace(example.cls, cls)
        for path, text in files.items()
    }


def _class_name(name: str, code: str) -> str:
    """`night_bus` → NightBus; with `Task` at its end where the code means something else by it."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{camel}Task" if re.search(rf"\b{camel}\b", code) else camel


def write_task(name: str, kind: str, folder: Path) -> tuple[str, ...]:
    """Write the folder of a new task; returns what lies in it. ConfigError on a bad name or place.

    Nothing that exists is replaced.
    """
    _refuse_name(name)
    files = renamed_files(name, kind)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"'{folder}' exists and is not an empty folder.",
            "What lies there would be mixed with the new task, or replaced.",
            "Give another folder with --out, or another name.",
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
            "It stands in options (--data NAME=FILE), in files and in Python.",
            "Take letters, digits and underscores, with a letter first: night_bus.",
        )
    if yaml.safe_load(name) != name:
        raise ConfigError(
            f"'{name}' cannot be the name of a task.",
            "It is a value of its own in YAML, in which tasks are declared.",
            f"Take another one: my_{name}, for example.",
        )
    if name in load_registry().specs:
        raise ConfigError(
            f"'{name}' is the name of a built-in task.",
            "One name for two tasks would make every record of them ambiguous.",
            f"Take another one: my_{name}, for example.",
        )
