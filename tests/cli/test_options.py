"""Options that are made from settings: help, choices, refusals, completion, files of a run.

An option that holds one value is given once: twice is refused by name, in whatever form.

A settings file takes every option by its name on the command line, written in the same way.
"""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from soulkit.cli.app import COMMANDS, load, main
from soulkit.cli.distill import BY_TASK, NOT_HERE, TRAITS
from soulkit.cli.options import FEW, SECTIONS, GroupFromSettings, Option, options_for, settings_from
from soulkit.cli.parse_errors import OnceCommand
from soulkit.cli.train import ablate_options, matrix_options, method_options, settings_of
from soulkit.config import Settings, about, setting
from soulkit.distill.config import DistillConfig
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.judges.check import CheckConfig
from soulkit.option_texts import row_sources
from soulkit.runs.folder import Run
from soulkit.train.config import LoraSettings, TrainConfig
from soulkit.train.objectives.base import built_in, method_class
from tests.support.evaluation import examples, soul, three_lines

LISTS = {
    "eval local": lambda: options_for(EvalConfig, frozenset({"eval", "plays", "local"})),
    "eval api": lambda: options_for(EvalConfig, frozenset({"eval", "plays", "api"})),
    "judge check": lambda: options_for(CheckConfig, frozenset({"check"})),
    "train ditto": lambda: method_options("ditto"),
    "train sft": lambda: method_options("sft"),
    "train ablate": ablate_options,
    "train matrix": matrix_options,
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
    assert soul(*name.split(), "--help-all") == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for option in LISTS[name]():
        assert option.flag.split("/")[0] in text
        shown = f"[default: {option.default}]"
        # A long default without blanks is broken wherever the line ends.
        untold = option.default in ("", "none")
        assert untold or shown.replace(" ", "") in text.replace(" ", ""), option.flag
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
        made = list(group.sentences()) if isinstance(group, GroupFromSettings) else []
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
        (("eval", "remote"), "'remote'", "soul eval --help"),
        (("train", "dito"), "'dito'", "'ditto'"),
        (("judge", "chek"), "'chek'", "'check'"),
        (("report", "x", "--format", "pdf"), "'pdf'", "--format"),
        (("plan",), "'soul plan' needs COMMAND", "COMMAND"),
        (("train", "matrix"), "'soul train matrix' needs --train", "--train TASK,TASK"),
        (("train", "matrix", "--train", "tomi,hitom"), "needs --eval", "--eval SUITE"),
        (("plan", "soul", "eval"), "soul plan cannot estimate 'soul'", "soul plan eval api"),
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
        ("tasks", "new"), ("serve", "--port", "x"), ("show", "r", "--worst", "a"),
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
        ("show", "the folder of a run"),
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


def test_a_report_without_a_run_shows_the_only_one_or_lists_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert soul("report") == 2
    what, why, fix = three_lines(capsys.readouterr().err)
    assert "needs the folder of a run" in what and "./runs" in why and "soul demo" in fix
    summary = {"version": 1, "tasks": {}}
    first = Run.open(tmp_path / "runs" / "first", "eval api", {"model": "m-first"})
    (first.path / "summary.json").write_text(json.dumps(summary))
    whole = soul("report", tmp_path / "runs" / "first"), capsys.readouterr().out
    assert (soul("report"), capsys.readouterr().out) == whole
    Run.open(tmp_path / "runs" / "second", "eval api", {"model": "m-second"})
    assert soul("runs") == 0
    listed = capsys.readouterr().out
    assert soul("report") == 0
    captured = capsys.readouterr()
    assert captured.out == listed and "next: soul report runs/" in captured.err
    assert soul("report", "--json") == 2
    assert "listed above" in three_lines(capsys.readouterr().err)[1]


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("version",), "soul --version"),
        (("help",), "soul COMMAND --help"),
        (("train", "help"), "soul train --help"),
        (("plan", "eval", "--model", "m"), "local, api"),
        (("eval", "--model", "m"), "local, api"),
        (("tasks", "help"), "soul tasks --help"),
    ],
)
def test_an_unlikely_guess_is_not_made(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], way: str
) -> None:
    assert soul(*words) == 2
    text = " ".join(three_lines(capsys.readouterr().err))
    assert way in text and "Did you mean" not in text


def test_help_names_values_and_arguments_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    """No page shows a Python type, and every option that takes a value has a word for it."""
    for words in ((), *every_command()):
        for flag in ("--help", "--help-all"):
            if soul(*words, flag) == 2:
                assert flag == "--help-all"
                capsys.readouterr()
                continue
            page = capsys.readouterr().out
            types = re.findall(r"<[a-z][^>\n]*>|\blist\[|\bTEXT\b|\bINTEGER\b|[{}]", page)
            assert not types, (words, types)
            listed = re.findall(r"^  (?:-\w, )?--[\w-]+ (\S+)", page, re.MULTILINE)
            names = {name for name in listed if not name.startswith(("/", "-"))}
            assert all(re.search("[A-Z]|[|]", name) for name in names), (words, names)


@pytest.mark.parametrize("name", ["eval api", "eval local", "train ditto", "train sft"])
def test_what_everybody_needs_comes_first(name: str) -> None:
    flags = [option.flag for option in LISTS[name]()]
    first = [f for f in ("--model", "--base-url", "--adapter", "--task", "--suite", "--data",
                         "--limit") if f in flags]  # fmt: skip
    assert flags[: len(first)] == first


def test_no_help_speaks_of_another_command() -> None:
    for name, options in LISTS.items():
        for option in options():
            others = {"eval api", "eval local", "judge check"} - {name}
            assert not [o for o in others if o in f"{option.help} {option.default}"], option.flag


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
    assert first == "A setting is missing: --task or --suite."
    assert soul("train", "ditto", "--help") == 0
    assert "[default: the tasks of --suite]" in " ".join(capsys.readouterr().out.split())
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
    assert set(completed("soul", "train", "")) == {*built_in(), "ablate", "matrix"}


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


def test_help_of_a_method_does_not_load_torch() -> None:
    code = (
        "import sys; from soulkit.cli.app import main; main(['train', 'opd', '-h']);"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


ROOT = Path(__file__).parents[2]


def reference_docs() -> ModuleType:
    path = ROOT / "scripts" / "reference_docs.py"
    spec = importlib.util.spec_from_file_location("reference_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRINTED_COMMANDS: dict[str, Any] = {
    name: command
    for name, command in reference_docs().commands()
    if not hasattr(command, "commands")
}


def options(command: Any, *, several: bool) -> Iterator[Any]:
    for parameter in command.params:
        with_value = parameter.param_type_name == "option" and not parameter.is_flag
        if with_value and parameter.multiple == several:
            yield parameter


@pytest.mark.parametrize("name", PRINTED_COMMANDS)
def test_help_is_short_and_help_all_lists_every_option(name: str, capsys: Any) -> None:
    every = {p.opts[0] for p in PRINTED_COMMANDS[name].params if p.param_type_name == "option"}

    def listed(flag: str) -> tuple[set[str], int]:
        assert soul(*name.split()[1:], flag) == 0
        text = capsys.readouterr().out
        return every & set(re.split(r"[\s/,]+", text)), text.count("\n")

    brief, lines = listed("--help")
    assert lines <= 70
    if "--help-all" not in every:
        assert brief == every
    else:
        assert listed("--help-all")[0] == every
        assert {"--json", "--help-all"} <= brief and (len(brief) < FEW or brief == every)


@pytest.mark.parametrize("name", PRINTED_COMMANDS)
def test_every_option_with_one_value_refuses_to_be_given_twice(name: str) -> None:
    command = PRINTED_COMMANDS[name]
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
        for name, command in PRINTED_COMMANDS.items()
        for option in options(command, several=True)
    }
    assert {("soul eval api", "--judge"), ("soul eval api", "--data"), ("soul train sft", "--set"),
            ("soul tasks list", "--tasks")} <= found  # fmt: skip


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("eval api --limit 3 --limit 4 --task tomi", "--limit"),
        ("eval api --limit=3 --task tomi --limit 4 --task hitom", "--limit"),
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
        ("plan eval api --seed 1 --seed 2 --task tomi --data synth:3", "--seed"),
    ],
)  # fmt: skip
def test_it_is_named(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert soul(*words.split()) == 2
    printed = capsys.readouterr().err.splitlines()[
        -3:
    ]  # a busy machine says before it what it does
    what, why, _ = three_lines("\n".join(printed))
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
    assert str(file) in what and "'model' appears twice" in what
    file.write_text("model: a\njudges:\n- {model: b, model: c}\n")
    assert soul("eval", "api", "--task", "tomi", "--config", file) == 2
    assert "'model' appears twice" in capsys.readouterr().err


EVAL = {kind: options_for(EvalConfig, frozenset({"eval", "plays", kind}))
        for kind in ("local", "api")}  # fmt: skip
DISTILL = [one for one in options_for(DistillConfig, TRAITS) if one.setting not in NOT_HERE]
OPTIONS_OF = {
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
    "--endpoints": "players.yaml", "--system-prompt": "own.yaml",
    "--api-version": "2024-10-21", "--top-p": "0.5",
    "--dev-judge": "endpoint:b@http://localhost:1/v1",
}  # fmt: skip
"""What is written; of others a text of their kind."""
CHATS = {"task": None, "data": ["chats.jsonl"]}
WITH: dict[str, dict[str, Any]] = {
    "--suite": {"task": None}, "--playable": {"task": None, "suite": "tom"},
    "--ledger-file": {"ledger": "replay"}, "--price-in": {"price_out": 1},
    "--price-out": {"price_in": 1}, "--dev-by": {"eval_every": 3},
    "--show-samples": {"eval_every": 3}, "--dev-judge": {"eval_every": 3},
    "--stop-gap": {"eval_every": 3, "dev_judge": "endpoint:b@http://localhost:1/v1"},
    "--eval-task": {"eval_every": 3}, "--eval-data": {"eval_every": 3, "eval_task": ["tomi"]},
    **dict.fromkeys(("--side", "--strip-system", "--turns", "--validation", "--lesson-tokens",
                     "--preset", "--objective"), CHATS),
    "--prompt-mode": {"system_prompt": "own.yaml"},
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
    for command, options in reversed(OPTIONS_OF.items()) for option in options if option.setting
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
    rounds = kind is EvalConfig and flag in ("--coach", "--show-draft")
    base = {
        **NEEDED.get(command, {"task": ["tomi"]}),
        **WITH.get(flag, {}),
        **({"refine": 2} if rounds else {}),
    }
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


def load_file(tmp_path: Path, text: str, *, trust: bool = False, **flags: Any) -> TrainConfig:
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
    assert load_file(tmp_path, text).tasks == tasks


def test_a_text_that_ends_like_a_file_is_the_tasks_file(tmp_path: Path) -> None:
    config = load_file(tmp_path, "tasks: my/tasks.yaml\ntask: mine")
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
        load_file(tmp_path, text)
    assert words in caught.value.what
    assert "promts" not in text or "'prompts'" in caught.value.way_out


def test_options_go_before_a_file_under_either_name(tmp_path: Path) -> None:
    assert load_file(tmp_path, "task: tomi\nprompts: 4", prompts_per_step=8).prompts_per_step == 8


def test_conversations_in_a_file_are_conversations(tmp_path: Path) -> None:
    named = load_file(tmp_path, "data: chats.jsonl\nside: human", method="sft")
    assert [source.path for source in named.corpora] == ["chats.jsonl"]
    rows = load_file(tmp_path, "data: synth:4\ntask: tomi", method="sft")
    assert (rows.data, rows.corpora) == ({"tomi": "synth:4"}, ())


def test_what_a_run_stores_is_loaded_as_it_was(tmp_path: Path) -> None:
    settings = {"task": ["tomi"], "coach": ["terse", "tomi=none"], "where": ["kind=x"]}
    config = TrainConfig.load(env={}, flags=from_command_line("train ditto", settings))
    stored = load_file(tmp_path, json.dumps(config.resolved()), trust=True)
    assert stored.resolved() == config.resolved()
