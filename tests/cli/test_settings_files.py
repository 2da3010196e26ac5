"""A settings file takes every option by its name on the command line, written in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.derive import Option, options_for, settings_from
from soulkit.cli.distill import BY_TASK, NOT_HERE, TRAITS
from soulkit.cli.train import method_options, settings_of
from soulkit.config import Settings
from soulkit.distill.config import DistillConfig
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.registry import built_in
from soulkit.written import row_sources

EVAL = {kind: options_for(EvalConfig, frozenset({"eval", "plays", kind}))
        for kind in ("local", "api")}  # fmt: skip
DISTILL = [one for one in options_for(DistillConfig, TRAITS) if one.setting not in NOT_HERE]
COMMANDS = {
    **{f"eval {kind}": options for kind, options in EVAL.items()},
    **{f"train {name}": method_options(name) for name in built_in()},
    "distill": DISTILL,
}
PLAYED: dict[str, Any] = {"model": "m", "task": ["tomi"]}
NEEDED = {"eval local": PLAYED, "eval api": PLAYED, "distill": {"experts": ["folder"]}}
TEXTS: dict[str, Any] = {
    "--task": ["tomi,hitom"], "--tasks": "own.yaml", "--data": ["tomi=synth:3"],
    "--judge": ["endpoint:j@http://localhost:1/v1", "tomi=endpoint:k@http://localhost:1/v1"],
    "--coach": ["symbolic", "tomi=none"], "--experts": ["tomi=folder", "other"],
    "--adapter": "folder", "--where": ["kind=x=y"], "--option": ["data_dir=x"],
    "--headers": ["X-Team=MY_TEAM"], "--vllm-arg": ["enforce-eager="], "--suite": "tom",
    "--preset": "osim-midtrain", "--blind-reader": "endpoint:b@http://localhost:1/v1",
    "--side": "human", "--base-url": "http://localhost:1/v1",
    "--teacher-adapter": ["one", "tomi=two"], "--eval-task": ["tomi"], "--eval-data": ["synth:4"],
    "--held-out": ["synth:4"], "--gate": ["gain>=0.1"], "--engine": "local",
    "--endpoints": "players.yaml", "--api-version": "2024-10-21", "--top-p": "0.5",
}  # fmt: skip
"""What is written; of others a text of their kind."""
CHATS = {"task": None, "data": ["chats.jsonl"]}
WITH: dict[str, dict[str, Any]] = {
    "--suite": {"task": None}, "--playable": {"task": None, "suite": "tom"},
    "--ledger-file": {"ledger": "replay"}, "--price-in": {"price_out": 1},
    "--price-out": {"price_in": 1}, "--dev-by": {"eval_every": 3},
    "--show-samples": {"eval_every": 3},
    "--eval-task": {"eval_every": 3}, "--eval-data": {"eval_every": 3, "eval_task": ["tomi"]},
    **dict.fromkeys(("--side", "--strip-system", "--turns", "--validation", "--lesson-tokens",
                     "--preset", "--objective"), CHATS),
    "--mix-samples": {**CHATS, "objective": "mixsd"},
}  # fmt: skip
"""What an option cannot do without, and what it stands in the place of."""
PLAYERS = ["endpoint:p@http://localhost:1/v1"]


def text_of(option: Option) -> Any:
    """One text as the option takes it, a list of such where it may be repeated."""
    if option.flag in TEXTS:
        return TEXTS[option.flag]
    if option.form in ("players", "panel"):
        return PLAYERS
    if option.form:
        return ["a", "b"]
    if option.choices:
        return option.choices[-1]
    return {bool: "true", int: "3", float: "0.5"}.get(option.kind, "text")


def from_command_line(command: str, values: dict[str, Any]) -> dict[str, Any]:
    name, _, kind = command.partition(" ")
    if name == "train":
        return settings_of(kind, values)
    if name == "eval":
        return {"kind": kind, **settings_from(EVAL[kind], values, row_sources)}
    rows = {name: row_sources(values[name], ()) for name in BY_TASK if name in values}
    rest = {name: value for name, value in values.items() if name not in BY_TASK}
    return {**settings_from(DISTILL, rest, row_sources), **rows}


def kind_of(command: str) -> type[Settings]:
    return {"eval": EvalConfig, "train": TrainConfig}.get(command.partition(" ")[0], DistillConfig)


CASES = {
    (kind_of(command), option.flag): (command, option)
    for command, options in reversed(COMMANDS.items()) for option in options if option.setting
}  # fmt: skip
"""Every option of each kind of settings, with one command that has it."""


@pytest.mark.parametrize(
    ("command", "option"),
    [pytest.param(*case, id=f"{case[0]} {case[1].flag}") for case in CASES.values()],
)
def test_a_file_takes_every_option_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: Option
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("tasks: {}\n")
    Path("players.yaml").write_text("endpoints: {}\n")
    kind, flag, value = kind_of(command), option.flag.partition("/")[0], text_of(option)
    base = {**NEEDED.get(command, {"task": ["tomi"]}), **WITH.get(flag, {})}
    base = {name: given for name, given in base.items() if given is not None}
    flags = from_command_line(command, {**base, option.name: value})
    expected = kind.load(None, env={}, flags=flags)
    named = {name: flags[name] for name in ("method", "kind") if name in flags}
    single = [value[0]] if isinstance(value, list) and len(value) == 1 else []
    for written in [value, *single]:
        for name in {option.name, flag.lstrip("-")}:
            settings = {k: v for k, v in base.items() if k != option.name}
            Path("file.yaml").write_text(json.dumps({**settings, name: written}))
            assert kind.load(Path("file.yaml"), env={}, flags=named) == expected, name


def load(tmp_path: Path, text: str, *, trust: bool = False, **flags: Any) -> TrainConfig:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return TrainConfig.load(file, env={}, flags={"method": "ditto", **flags}, trust=trust)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("task: tomi", {"tomi": 1.0}),
        ("tasks: tomi", {"tomi": 1.0}),
        ("tasks: tomi,hitom:0.5", {"tomi": 1.0, "hitom": 0.5}),
        ("task: [tomi, hitom:0.5]", {"tomi": 1.0, "hitom": 0.5}),
        ("tasks: {tomi: 2}", {"tomi": 2.0}),
    ],
)
def test_tasks_are_written_in_any_form(tmp_path: Path, text: str, tasks: dict[str, float]) -> None:
    assert load(tmp_path, text).tasks == tasks


def test_a_text_that_ends_like_a_file_is_the_tasks_file(tmp_path: Path) -> None:
    config = load(tmp_path, "tasks: my/tasks.yaml\ntask: mine")
    assert (config.tasks_file, config.tasks) == ("my/tasks.yaml", {"mine": 1.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "task: tomi\ntasks: hitom",
            "given twice in the file, as 'task' and as 'tasks'",
        ),
        ("task: tomi\nprompts: 4\nprompts_per_step: 8", "as 'prompts' and as 'prompts_per_step'"),
        ("task: tomi\nlora-r: 4\nlora: {r: 8}", "'lora.r' is given twice"),
        ("task: tomi\nlora: {r: 8}\nlora_r: 4", "'lora.r' is given twice"),
        ("task: tomi\nprompts: many", "prompts: Input should be a valid integer"),
        ("task: tomi\nlora_r: -4", "lora_r: Input should be greater than 0"),
        ("task: tomi:many", "'tomi:many' is not a task with a mixing ratio"),
        ("task: tomi\npromts: 4", "'promts' in the file"),
    ],
)
def test_an_error_names_what_the_user_wrote(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in caught.value.what
    assert "promts" not in text or "'prompts'" in caught.value.way_out


def test_options_go_before_a_file_under_either_name(tmp_path: Path) -> None:
    assert load(tmp_path, "task: tomi\nprompts: 4", prompts_per_step=8).prompts_per_step == 8


def test_conversations_in_a_file_are_conversations(tmp_path: Path) -> None:
    named = load(tmp_path, "data: chats.jsonl\nside: human", method="sft")
    assert [source.path for source in named.corpora] == ["chats.jsonl"]
    rows = load(tmp_path, "data: synth:4\ntask: tomi", method="sft")
    assert (rows.data, rows.corpora) == ({"tomi": "synth:4"}, ())


def test_what_a_run_stores_is_loaded_as_it_was(tmp_path: Path) -> None:
    settings = {"task": ["tomi"], "coach": ["terse", "tomi=none"], "where": ["kind=x"]}
    config = TrainConfig.load(env={}, flags=from_command_line("train ditto", settings))
    stored = load(tmp_path, json.dumps(config.resolved()), trust=True)
    assert stored.resolved() == config.resolved()
