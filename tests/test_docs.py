"""The documentation is complete, its links lead somewhere, and the command page is fresh."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from soulkit.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READABLE = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
]


def generator() -> ModuleType:
    path = ROOT / "scripts" / "cli_docs.py"
    spec = importlib.util.spec_from_file_location("cli_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def command_page() -> str:
    """The page on commands, as the code of today has it."""
    text: str = generator().page()
    return text


def test_the_command_page_is_fresh() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == command_page(), "stale: run .venv/bin/python scripts/cli_docs.py"


def test_the_settings_of_training_are_fresh() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert page == generator().training_page(page), "stale: run scripts/cli_docs.py"
    assert "| `lambda_fb` | `--lambda-fb` | 1.0 |" in page


def test_every_command_and_option_says_what_it_is_for() -> None:
    listed = dict(generator().commands())
    assert set(listed) >= {f"soul {name}" for name in COMMANDS}
    assert [name for name, command in listed.items() if not command.help] == []
    bare = [
        f"{name} {parameter.opts[0]}"
        for name, command in listed.items()
        for parameter in command.params
        if parameter.name != "help" and not getattr(parameter, "help", None)
    ]
    assert bare == []


def test_lists_of_commands_fit_a_terminal() -> None:
    for name, command in generator().commands():
        if name.count(" ") < 2:
            continue  # these lists show the sentences of COMMANDS
        first = (command.help or "").split("\n\n")[0]
        # The widest command name is ten letters; list and margins take four more.
        assert len(" ".join(first.split())) <= 66, name


@pytest.mark.parametrize("path", READABLE, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_the_map_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [p.name for p in PAGES if p.name != "index.md" and f"({p.name})" not in index] == []


@pytest.mark.parametrize("path", READABLE, ids=lambda p: p.name)
def test_commands_in_the_documentation_exist(path: Path) -> None:
    page = command_page()
    commands = set(re.findall(r"^## (soul[ \w+-]*)$", page, re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    named = {
        m.group(0).strip() for m in re.finditer(r"(?<=[\n`])soul [a-z]+(?: [a-z][a-z+-]*)?", text)
    }
    for words in named:
        first_two = " ".join(words.split()[:2])
        assert first_two in commands, words
        group = any(name.startswith(f"{first_two} ") for name in commands)
        assert not group or words == first_two or words in commands, words


def test_the_front_page_shows_the_figures_of_the_benchmarks_page() -> None:
    front, benchmarks = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks.md")
    )
    shown = front.split("## What the demo shows\n")[1].split("\n## ")[0]
    table = benchmarks.split("## The demo\n")[1].split("## Ten methods")[0]
    figures = re.findall(r"[+−]?\d\.\d+(?: GB)?", shown)
    assert len(figures) > 15
    assert [figure for figure in figures if figure not in table] == []


def test_options_in_the_documentation_exist() -> None:
    page = command_page()
    options = set(re.findall(r"--[a-z][a-z-]+", page))
    for path in READABLE:
        for block in re.findall(
            r"^\$? ?(soul .*(?:\\\n.*)*)", path.read_text("utf-8"), re.MULTILINE
        ):
            unknown = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", block)) - options
            assert unknown == set(), f"{path.name}: {block}"
