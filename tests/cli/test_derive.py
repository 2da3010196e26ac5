"""Options that are made from settings: help, choices, refusals, completion, files of a run."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.app import COMMANDS, load, main
from soulkit.cli.derive import SECTIONS, Derived, options_for, settings_from
from soulkit.cli.train import ablate_options, method_options
from soulkit.config import Settings, about, setting
from soulkit.eval.config import EvalConfig
from soulkit.eval.judge_check import CheckConfig
from soulkit.runs.folder import Run
from soulkit.train.config import LoraSettings, TrainConfig
from soulkit.train.objectives.registry import built_in, method_class
from soulkit.written import row_sources
from tests.support.evaluation import examples, soul, three_lines

LISTS = {
    "eval local": lambda: options_for(EvalConfig, frozenset({"eval", "plays", "local"})),
    "eval api": lambda: options_for(EvalConfig, frozenset({"eval", "plays", "api"})),
    "judge check": lambda: options_for(CheckConfig, frozenset({"check"})),
    "train ditto": lambda: method_options("ditto"),
    "train sft": lambda: method_options("sft"),
    "train ablate": ablate_options,
}


class Own(Settings):
    """Settings with one of each kind."""

    share: float = setting(0.5, ge=0, help="A share.")
    mode: str | None = setting(None, only=("one",), unset="the usual", help="A mode.")
    hidden: int = setting(3, flag=None, help="Without an option.")


def test_a_setting_is_one_line() -> None:
    """Adding `share` above is all that is needed for option, help, default and value."""
    options = {option.flag: option for option in options_for(Own, frozenset({"one"}))}
    assert options["--share"].kind is float and options["--share"].default == "0.5"
    assert options["--mode"].default == "the usual" and "--hidden" not in options
    assert "--mode" not in {option.flag for option in options_for(Own, frozenset({"two"}))}
    values = {"share": 0.25, "mode": None, "set": ["hidden=4"]}
    flags = settings_from(list(options.values()), values, row_sources)
    assert Own.load(env={}, flags=flags) == Own(share=0.25, hidden=4)


@pytest.mark.parametrize("kind", [EvalConfig, TrainConfig, CheckConfig, LoraSettings])
def test_every_setting_says_what_it_is(kind: Any) -> None:
    for name, info in kind.model_fields.items():
        if name == "method" and not about(info):
            continue
        assert info.description and about(info), name
        assert about(info)["section"] in SECTIONS, name


@pytest.mark.parametrize("name", LISTS)
def test_help_shows_every_default_and_choice(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul(*name.split(), "-h") == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option in LISTS[name]():
        assert option.flag.split("/")[0] in text
        shown = f"[default: {option.default}]"
        # A long default without blanks is broken wherever the line ends.
        assert not option.default or shown.replace(" ", "") in text.replace(" ", ""), option.flag
        assert "|".join(option.choices) in text, option.flag
    flags = [option.flag for option in LISTS[name]()]
    assert len(set(flags)) == len(flags)


def test_the_same_thing_has_the_same_name_everywhere() -> None:
    everywhere = ["--judge-order", "--timeout", "--thinking", "--concurrency", "--where"]
    everywhere += ["--example", "--limit", "--out", "--config", "--set", "--max-attempts"]
    for name in ("eval local", "eval api", "train ditto"):
        flags = {option.flag.split("/")[0] for option in LISTS[name]()}
        assert set(everywhere) <= flags, name
    for name in ("eval local", "train ditto"):
        flags = {option.flag.split("/")[0] for option in LISTS[name]()}
        assert {"--device", "--dtype", "--engine", "--batch-size"} <= flags
    for name in ("eval api", "eval local", "train ditto", "judge check"):
        flags = {option.flag for option in LISTS[name]()}
        assert {"--requests-per-minute", "--tokens-per-minute"} <= flags


def every_command() -> list[tuple[str, ...]]:
    words: list[tuple[str, ...]] = []
    for name in COMMANDS:
        group = load(name)
        made = list(group.sentences()) if isinstance(group, Derived) else []
        children = {*made, *getattr(group, "commands", {})}
        words += [(name,), *((name, child) for child in children)]
    return words


def test_h_is_help_on_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), *every_command()):
        assert soul(*words, "-h") == 0, words
        assert capsys.readouterr().out.startswith("Usage: soul"), words


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what", "way"),
    [
        (("eval", "local", "--limit", "many"), "--limit 'many'", "--limit N"),
        (("eval", "local", "--protocol", "papr"), "'papr'", "paper|reference"),
        (("train", "ditto", "--teacher", "live"), "'--teacher'", "--help"),
        (("train", "ditto", "--group-sise", "4"), "'--group-sise'", "'--group-size'"),
        (("train", "ditto", "--steps"), "'--steps'", "--steps VALUE"),
        (("train", "ditto", "--json=3"), "'--json'", "--json"),
        (("compare", "a", "b", "c"), "c", "--help"),
        (("ledger", "shw", "x"), "'shw'", "'show'"),
        (("eval", "remote"), "'remote'", "local"),
        (("train", "dito"), "'dito'", "'ditto'"),
        (("judge", "chek"), "'chek'", "'check'"),
        (("report", "x", "--format", "pdf"), "'pdf'", "--format"),
        (("plan",), "'soul plan' needs COMMAND", "COMMAND"),
        (("plan", "soul", "eval"), "soul plan cannot plan 'soul'", "soul plan eval api"),
        (("plan", "eval", "local", "--limit", "many"), "--limit 'many'", "--limit N"),
    ],
)
def test_the_parsers_own_errors_are_three_lines(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], what: str, way: str
) -> None:
    assert soul(*words) == 2
    captured = capsys.readouterr()
    lines = three_lines(captured.err)
    assert what in lines[0] and way in lines[2] and captured.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("report",), ("show",), ("rescore",), ("plan",), ("compare",), ("compare", "a"),
        ("judge", "sheet"), ("judge", "import"), ("judge", "show"), ("ledger", "show"),
        ("data", "check"), ("data", "split"), ("data", "audit"), ("tasks", "show"),
        ("tasks", "new"), ("serve", "partner", "--port", "x"), ("show", "r", "--worst", "a"),
        ("data", "synth", "tomi", "-n", "x"), ("demo", "--steps", "x"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors_name_no_types(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert soul(*words) == 2
    what, _, way = three_lines(capsys.readouterr().err)
    assert not re.search(r"<[^|]*>|list\[|\bPath\b", what + way) and ".." not in what


def test_choices_stay_in_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("completion") == 2
    assert "bash|zsh|fish" in three_lines(capsys.readouterr().err)[2]


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("report", "the folder of a run"), ("show", "the folder of a run"),
        ("rescore", "the folder of a run"), ("judge check", "the folder of a run"),
        ("judge sheet", "the folder of a run"), ("ledger show", "the folder of a run"),
        ("compare", "the folders of 2 runs"), ("compare a", "the folders of 2 runs"),
    ],
)  # fmt: skip
def test_a_command_that_needs_a_run_lists_those_that_are_there(
    capsys: pytest.CaptureFixture[str], command: str, needed: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    name = command.removesuffix(" a")
    assert soul(*command.split()) == 2
    assert "no run in ./runs" in three_lines(capsys.readouterr().err)[1]
    for folder in ("first", "second"):
        Run.open(tmp_path / "runs" / folder, "eval api", {"model": f"m-{folder}"})
    assert soul("runs") == 0
    listed = capsys.readouterr().out
    assert "first" in listed and "m-second" in listed
    assert soul(*command.split()) == 2
    captured = capsys.readouterr()
    what, why, way = three_lines(captured.err)
    assert captured.out == listed and "listed above" in why
    assert what == f"'soul {name}' needs {needed}." and f"{name} runs/" in way
    assert way.count("runs/") == (2 if name == "compare" else 1)


@pytest.mark.parametrize("command", [("eval", "local"), ("train", "ditto")], ids=["eval", "train"])
def test_an_engine_that_is_not_there(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    options = ("--model", "m", "--task", "tomi", "--engine", "sglang@http://127.0.0.1:9")
    assert soul(*command, *options) == 2
    lines = three_lines(capsys.readouterr().err)
    assert "sglang@http://127.0.0.1:9" in lines[0] and "--engine auto or local" in lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--steps", "0"), ("steps: ", "--steps, got 0", "greater than 0")),
        (("--timeout", "-1"), ("timeout_s: ", "--timeout, got -1")),
        (("--where", "order"), ("--where order", "TAG=REGEX")),
        (("--option", "max_turns"), ("--option max_turns", "NAME=VALUE", "soul tasks show")),
        (("--option", "=3"), ("--option =3", "NAME=VALUE")),
        (("--where", "order=["), ("where: ", "--where", "'['")),
        (("--set", "lr=["), ("--set lr=[",)),
    ],
)
def test_a_refusal_names_value_and_flag(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert soul("train", "grpo", "--model", "m", "--task", "tomi", *options) == 2
    text = " ".join(three_lines(capsys.readouterr().err))
    assert all(word in text for word in words), text


def test_what_is_required_is_named_with_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("train", "ditto") == 2
    first = three_lines(capsys.readouterr().err)[0]
    assert "name either tasks (--task NAME,NAME) or one suite" in first
    assert soul("train", "ditto", "--help") == 0
    assert "[default: those of the suite]" in " ".join(capsys.readouterr().out.split())
    assert soul("judge", "check") == 2
    assert "needs the folder of a run" in three_lines(capsys.readouterr().err)[0]


# --- completion -----------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """What a shell is offered for the last word."""
    env = {
        "_SOUL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }  # fmt: skip
    text = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(text):
        for name, value in env.items():
            patch.setenv(name, value)
        with suppress(SystemExit):
            main([])
    return text.getvalue().split()


def test_completion_knows_names_and_choices() -> None:
    assert completed("soul", "train", "sdpo-t") == ["sdpo-token", "sdpo-token+grpo"]
    assert completed("soul", "eval", "a") == ["api"]
    assert completed("soul", "eval", "local", "--protocol", "r") == ["reference"]
    assert completed("soul", "train", "ditto", "--group") == ["--group-size"]
    assert completed("soul", "train", "grpo", "--task", "hito") == ["hitom"]
    lists = completed("soul", "eval", "local", "--task", "hitom,tom")
    assert sorted(lists) == ["hitom,tombench", "hitom,tomi"]
    assert completed("soul", "eval", "local", "--suite", "soul-2") == ["soul-23", "soul-27"]
    assert completed("soul", "train", "ablate", "--methods", "grpo,di") == ["grpo,ditto"]
    assert completed("soul", "eval", "local", "--engine", "l") == ["local"]
    assert completed("soul", "data", "synth", "hito") == ["hitom"]
    assert completed("soul", "tasks", "show", "mirr") == ["mirrorbench"]
    assert completed("soul", "tasks", "list", "--suite", "soul-2") == ["soul-23", "soul-27"]


def test_every_method_is_offered() -> None:
    assert set(completed("soul", "train", "")) == {*built_in(), "ablate"}


# --- a run's settings -----------------------------------------------------------------------------


def test_a_settings_file_gives_what_a_command_requires(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\ntasks: [tomi]\ndata: {tomi: 'synth:4'}\n")
    assert planned(capsys, "eval", "local", "--config", file) == 4
    file.write_text("model: m\ntasks: {tomi: 1.0}\ndata: {tomi: 'synth:4'}\n")
    for method in ("ditto", "sft"):
        assert planned(capsys, "train", method, "--config", file) > 0
    assert soul("train", "ditto", "--config", file, "--data", "synth:6", "--dry-run") == 0
    compared = ("train", "ablate", "--methods", "grpo,ditto", "--config", file, "--dry-run")
    assert soul(*compared, "--seeds", 1) == 0, capsys.readouterr().err
    file.write_text(f"run: {tmp_path / 'nowhere'}\n")
    capsys.readouterr()
    assert soul("judge", "check", "--config", file) == 2
    assert "nowhere" in three_lines(capsys.readouterr().err)[0]
    assert soul("judge", "check") == 2
    assert "needs the folder of a run" in three_lines(capsys.readouterr().err)[0]


def test_options_choose_anew_what_a_file_chose(tmp_path: Path) -> None:
    """Other tasks, or other rows, are not added to those of the file; rows of tasks are."""
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nmethod: grpo\ntasks: {tomi: 2.0}\nwhere: {order: '1'}\n"
                    "data: {tomi: a, hitom: b}\n")  # fmt: skip
    options = method_options("grpo")
    values = {"task": ["hitom"], "where": ["length=2"], "data": ["c"]}
    flags = settings_from(options, values, row_sources)
    config = TrainConfig.load(file, env={}, flags=flags)
    assert (config.tasks, config.where) == ({"hitom": 1.0}, {"length": "2"})
    assert config.data == {"tomi": "a", "hitom": "b", "*": "c"}


# --- which rows -----------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> int:
    assert soul(*words, "--dry-run", "--json") == 0, capsys.readouterr().err
    episodes: int = json.loads(capsys.readouterr().out)["episodes"]
    return episodes


def test_rows_are_chosen_by_tag_and_by_id(capsys: pytest.CaptureFixture[str]) -> None:
    rows = examples("hitom", 40)
    order = rows[0].tags["order"]
    same = sum(row.tags["order"] == order for row in rows)
    assert 0 < same < 40
    command = ("eval", "local", "--model", "m", "--task", "hitom", "--data", "synth:40")
    assert planned(capsys, *command) == 40
    assert planned(capsys, *command, "--where", f"order={order}") == same
    named = ("--example", rows[3].id, "--example", rows[5].id)
    assert planned(capsys, *command, *named) == 2
    assert soul(*command, "--where", "order=none-such", "--dry-run") == 2
    lines = three_lines(capsys.readouterr().err)
    assert "40 rows of 'hitom'" in lines[0] and "order" in lines[1] and "--where" in lines[2]


# --- the same settings in training ----------------------------------------------------------------


def test_every_only_names_something() -> None:
    """A misspelled trait would hide an option everywhere."""
    traits = {"eval", "plays", "local", "api", "check"}
    traits |= {trait for name in built_in() for trait in method_class(name).traits(name)}
    for kind in (EvalConfig, TrainConfig, CheckConfig, LoraSettings):
        for name, info in kind.model_fields.items():
            assert set(about(info).get("only", ())) <= traits, name


def test_rate_limits_reach_the_players_of_a_training() -> None:
    served = {"model": "p", "base_url": "http://127.0.0.1:9/v1"}
    config = TrainConfig(
        method="grpo", model="m", tasks={"tomi": 1.0}, requests_per_minute=30,
        partner={**served, "requests_per_minute": 5}, judge=[{**served, "model": "j"}],
    )  # fmt: skip
    limits = {who.model: who.requests_per_minute for who in config.settings_of_players()}
    assert limits == {"p": 5, "j": 30}
    options = {"model": "m", "tasks": ["tomi"], "requests_per_minute": 30, "partner": served}
    players = {
        kind: EvalConfig(kind=kind, **options).settings_of_players()[0] for kind in ("api", "local")
    }
    assert (players["api"].requests_per_minute, players["local"].requests_per_minute) == (None, 30)
    assert "requests_per_minute" not in config.identity()


def test_settings_that_older_runs_do_not_name_are_their_defaults() -> None:
    from soulkit.runs.folder import plain_config, same_settings

    for kind, values in (
        (TrainConfig, {"method": "grpo", "model": "m", "tasks": {"tomi": 1.0}}),
        (EvalConfig, {"kind": "local", "model": "m", "tasks": ["tomi"]}),
    ):
        config = kind.model_validate(values)
        now, defaults = plain_config(config.identity()), plain_config(config.identity_defaults())
        old = {k: v for k, v in now.items() if k not in ("engine", "example", "thinking")}
        assert same_settings(old, now, defaults)
        other = plain_config(kind.model_validate({**values, "thinking": False}).identity())
        assert not same_settings(old, other, defaults)


def test_help_of_a_method_does_not_load_torch() -> None:
    code = (
        "import sys; from soulkit.cli.app import main; main(['train', 'opd', '-h']);"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
