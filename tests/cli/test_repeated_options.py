"""An option that holds one value is given once: twice is refused by name, in whatever form."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from soulkit.cli.mistakes import OnceCommand
from soulkit.errors import ConfigError
from tests.support.evaluation import soul, three_lines

ROOT = Path(__file__).parents[2]


def cli_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_docs", ROOT / "scripts" / "cli_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMMANDS: dict[str, Any] = {
    name: command for name, command in cli_docs().commands() if not hasattr(command, "commands")
}


def options(command: Any, *, several: bool) -> Iterator[Any]:
    for parameter in command.params:
        with_value = parameter.param_type_name == "option" and not parameter.is_flag
        if with_value and parameter.multiple == several:
            yield parameter


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_with_one_value_refuses_to_be_given_twice(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, OnceCommand)
    for option in options(command, several=False):
        first, last = option.opts[0], option.opts[-1]  # such as --out and -o
        forms = [(first, "1", last, "1"), (f"{first}=1", first, "2")]
        forms += (
            [(f"{first}=1", f"{last}=2")] if last.startswith("--") else [(f"{last}1", last, "2")]
        )
        for words in forms:
            with pytest.raises(ConfigError, match="is given twice") as refusal:
                command.make_context(name, list(words))
            assert first in refusal.value.what and last in refusal.value.what


def test_options_with_several_values_are_taken_several_times() -> None:
    found = {
        (name, option.opts[0])
        for name, command in COMMANDS.items()
        for option in options(command, several=True)
    }
    assert {("soul eval api", "--judge"), ("soul eval api", "--data"), ("soul train sft", "--set"),
            ("soul tasks list", "--tasks")} <= found  # fmt: skip


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("eval api --model a --model b --task tomi", "--model"),
        ("eval api --model=a --task tomi --model b --task hitom", "--model"),
        ("data synth tomi -o a.jsonl -n 3 --out b.jsonl", "-o or --out"),
        ("data synth tomi -n 3 -n4 -o b.jsonl", "-n"),
        ("data synth hitom -n 3 --stories 2 --stories 4", "--stories"),
        ("show r --limit 1 --limit=2", "--limit"),
        ("judge check r --pairs --no-pairs", "--pairs"),
        ("train sft --model tiny --task tomi --set steps=3 --set steps=4", "--set steps"),
        ("train sft --model tiny --task tomi --steps 3 --set steps=4", "'steps'"),
        ("eval api --model m --task tomi --partner actor --partner endpoint:p", "--partner"),
        ("eval api --model m --task a,b --partner a=actor --partner a=endpoint:p", "--partner"),
        ("eval api --model m --task tomi --where kind=x --where kind=y", "--where kind"),
        ("eval api --model m --task tomi --data synth:3 --data synth:4", "--data"),
        ("train sft --model tiny --task tomi,hitom --data tomi=a --data tomi=b", "--data"),
        ("train sft --model tiny --task tomi --task tomi:0.5 --data synth:3", "A mixing ratio"),
        ("plan eval api --model a --model b --task tomi --data synth:3", "--model"),
    ],
)  # fmt: skip
def test_it_is_named(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul(*words.split()) == 2
    said = capsys.readouterr().err.splitlines()[-3:]  # a busy machine says before it what it does
    what, why, _ = three_lines("\n".join(said))
    assert what.startswith(option) and "given twice" in what
    assert "only the last one" in why or "Only one" in why


@pytest.mark.parametrize(
    "words",
    [
        "tasks list --json --json",
        "data synth tomi -n 3 -o {folder}/rows.jsonl",
        "eval api --model m --task tomi --task hitom --data tomi=synth:3 --data hitom=synth:3 "
        "--judge endpoint:a --judge endpoint:b --set seed=1 --set repeats=2 --dry-run",
        "train sft --model tiny --task tomi --task hitom:0.5 --where kind=x --where task=y --help",
    ],
)
def test_what_may_be_given_several_times_still_may(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert soul(*words.format(folder=tmp_path).split()) == 0
    assert "given twice" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval api", "train ditto --dry-run"])
def test_a_setting_that_stands_twice_in_a_file_is_named(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: a\ntasks: {tomi: 1}\nmodel: b\n")
    assert soul(*command.split(), "--config", file) == 2
    what, _, _ = three_lines(capsys.readouterr().err)
    assert str(file) in what and "'model' stands here twice" in what
    file.write_text("model: a\njudges:\n- {model: b, model: c}\n")
    assert soul("eval", "api", "--task", "tomi", "--config", file) == 2
    assert "'model' stands here twice" in capsys.readouterr().err
