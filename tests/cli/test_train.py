"""`soul train`: JSON alone on stdout, and every mistake told in three lines before it costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli.train import _say_next, method_options, settings_of
from soulkit.errors import ConfigError
from soulkit.extras import install_line
from soulkit.option_texts import mixing_ratios, values_by_task
from soulkit.train.objectives.base import built_in
from soulkit.train.state.metrics import Learned, Rewards, StepLine
from soulkit.train.state.stops import step_words
from soulkit.train.state.summary import TrainSummary
from tests.support.evaluation import replaced, visitor
from tests.support.training import policy_of, random_model, soul

RECORDED_RUN = Path(__file__).parents[1] / "recorded" / "ditto"
TOMI = ("--task", "tomi", "--data", "tomi=synth:30")
SMALL = ("--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--steps", 1, "--lora-r", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def errors(capsys: pytest.CaptureFixture[str], out: Path, *arguments: Any) -> dict[str, str]:
    """The three lines of a command that must fail with 2 and leave no run folder."""
    capsys.readouterr()
    code = soul("train", *arguments, "--out", out)
    streams = capsys.readouterr()
    assert code == 2, streams.err
    assert streams.out == ""
    parts = [line.partition(": ") for line in streams.err.splitlines() if ": " in line]
    lines = {k: v for k, _, v in parts if k in ("error", "why", "fix")}
    assert list(lines) == ["error", "why", "fix"]
    assert not (out / "config.yaml").exists()
    return lines


@pytest.mark.parametrize("more", [
    ("--task", "tomi", "--data", "tomi=synth:30", "--judge", "actor"),
    ("--data", "chats.jsonl", "--side", "human", "--partner", "actor"),
])  # fmt: skip
def test_players_that_nobody_would_ask_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "user", "content": "Soup?"}, {"role": "assistant", "content": "Soup."},
            {"role": "user", "content": "Not again."}]  # fmt: skip
    Path("chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    lines = errors(capsys, tmp_path / "run", "sft", "--model", "tiny", "--full", *more)
    assert more[-2] in lines["error"] and "--eval-task" in lines["fix"]
    errors(capsys, tmp_path / "run", "sft", "--model", "tiny", "--full", *more, "--dry-run")
    played = ("--eval-task", "tomi", "--eval-data", "synth:20", "--eval-every", 5, "--dry-run")
    assert soul("train", "sft", "--model", "tiny", "--full", *more, *played) == 0


def test_json_is_all_there_is_on_stdout(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert soul("train", "ditto", "--model", model, *TOMI, *SMALL, "--out", out, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "summary.json").read_text())
    assert printed["steps"] == 1 and set(printed["rewards"])
    assert soul("train", "ditto", "--model", model, *TOMI, *SMALL, "--out", out) == 0
    streams = capsys.readouterr()
    assert "1 step in" in streams.out
    assert f"{out} is already finished: all steps are trained" in streams.err
    assert re.search(rf"^next: soul report {out}; soul show {out} --", streams.err, re.MULTILINE)


@pytest.mark.parametrize(("n_scored", "shown"), [(0, "--status unscored"), (3, "--worst 10")])
def test_the_next_line_shows_what_is_there(
    n_scored: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((RECORDED_RUN / "summary.json").read_text("utf-8"))
    summary = replace(TrainSummary.from_json(recorded), rewards=Rewards(), n_scored=n_scored)
    _say_next(RECORDED_RUN, summary)
    following = capsys.readouterr().err.partition("next: ")[2].strip()
    assert f"soul show {RECORDED_RUN} {shown}" in following.split("; ")


def test_a_config_file_of_a_run_may_be_given_back(tmp_path: Path, model: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert soul("train", "grpo", "--model", model, *TOMI, *SMALL, "--out", first) == 0
    again = ("--config", first / "config.yaml", "--task", "tomi", "--model", model)
    assert soul("train", "grpo", *again, "--out", second) == 0
    assert (first / "config.yaml").read_bytes() == (second / "config.yaml").read_bytes()


# --- mistakes -------------------------------------------------------------------------------------


KEEPER = ("--task", "secret_keeper", "--data", "secret_keeper=synth:5")
PLAYS: tuple[Any, ...] = (*TOMI, *SMALL)
REFUSED: dict[str, tuple[str, tuple[Any, ...], str, str]] = {
    "no training data": ("grpo", ("--task", "tomi", *SMALL), "no training data", "synth:"),
    "an unknown task": (
        "ditto", ("--task", "tomy", "--data", "tomy=synth:9", *SMALL), "tomy", "tomi",
    ),
    "too many rows": ("grpo", ("--task", "tomi", "--data", "tomi=synth:many"), "synth:many", ""),
    "no rows": ("grpo", ("--task", "tomi", "--data", "tomi=synth:0"), "synth:0", ""),
    "no file": ("grpo", ("--task", "tomi", "--data", "tomi=nowhere.jsonl"), "nowhere.jsonl", ""),
    "data of another task": ("grpo", (*PLAYS, "--data", "hitom=synth:5"), "'hitom'", ""),
    "random weights": ("grpo", (*PLAYS, "--model", "tiny"), "random weights", "sft"),
    "no partner": ("ditto", (*KEEPER, *SMALL), "'partner'", "--partner"),
    "an unreadable partner": (
        "ditto", (*KEEPER, *SMALL, "--partner", "x"), "endpoint:MODEL@URL", "",
    ),
    "a partner at no address": (
        "ditto", (*KEEPER, *SMALL, "--partner", "endpoint:x@ftp://nowhere"), "ftp://nowhere", "",
    ),
    **{f"the coach {name}": ("ditto", (*PLAYS, "--coach", name), "endpoint:MODEL@URL", "")
       for name in ("model", "wise", "vllm:", "scripted:", "local")},
    "prompts that do not fit": (
        "grpo", replaced(PLAYS, ("--max-tokens", 500)), "30 of 30 prompts do not fit",
        "--max-tokens",
    ),
    "a distance to a base that is gone": (
        "grpo", (*PLAYS, "--set", "full=true", "--set", "kl_coef=0.1"), "", "kl_coef",
    ),
    "no adapter": ("grpo", (*PLAYS, "--adapter", Path(__file__).parent), "not an adapter", ""),
    "an adapter beside all weights": ("sft", (*TOMI, "--full", "--adapter", "x"), "adapter", ""),
    "a setting without a value": ("sft", (*TOMI, "--set", "kl_coef"), "kl_coef", "Write --set"),
    "a setting of another method": ("grpo", (*PLAYS, "--set", "lambda_fb=0"), "lambda_fb", "Leave"),
    "an option of no arm": (
        "ablate", ("--methods", "grpo,ditto", *PLAYS, "--iteration-steps", 3), "--iteration-steps",
        "Leave it out",
    ),
    "an unknown setting": ("sft", (*TOMI, "--set", "kl_koef=1"), "", "kl_coef"),
    "no steps": ("sft", (*TOMI, "--steps", 0), "steps", ""),
    "a ratio that is none": ("sft", replaced(TOMI, ("--task", "tomi:zero")), "ratio", ""),
    "no model": ("sft", (*TOMI, "--model", "/no/such/folder"), "folder", ""),
}  # fmt: skip
"""Name → method, options, words of the error and of the fix."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused(
    name: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method, options, error, fix = REFUSED[name]
    given = options if "--model" in options else ("--model", model, *options)
    lines = errors(capsys, tmp_path / "r", method, *given)
    assert error in lines["error"] and fix in lines["fix"]


def test_a_tokenizer_without_a_chat_template(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = tmp_path / "mute"
    shutil.copytree(model, mute)
    (mute / "chat_template.jinja").unlink()
    lines = errors(capsys, tmp_path / "r", "grpo", "--model", mute, *TOMI, *SMALL)
    assert "no chat template" in lines["error"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, name, None)
    lines = errors(capsys, tmp_path / "r", "grpo", "--model", model, *TOMI, *SMALL, "--track", name)
    assert f"'{name}' is not installed" in lines["error"]
    assert install_line(name) in lines["fix"]


def test_training_goes_on_from_a_runs_adapter(tmp_path: Path, model: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert soul("train", "grpo", "--model", model, *TOMI, *SMALL, "--out", first) == 0
    onward = ("--adapter", first / "model", "--out", second)
    assert soul("train", "ditto", "--model", model, *TOMI, *SMALL, *onward) == 0
    assert (second / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_key_is_never_written(tmp_path: Path, model: Path) -> None:
    """The run folder of a dialogue names the key's variable, and no file holds the key."""
    secret = "sk-" + "0123456789abcdef" * 2
    out = tmp_path / "run"
    with visitor() as url:
        done = subprocess.run(
            [sys.executable, "-m", "soulkit.cli.app", "train", "grpo", "--model", str(model),
             "--task", "secret_keeper", "--data", "secret_keeper=synth:4",
             *map(str, SMALL), "--partner", f"endpoint:visitor@{url}#MY_KEY",
             "--out", str(out), "--json"],
            env={**os.environ, "MY_KEY": secret, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    for file in out.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file
    assert "MY_KEY" in (out / "config.yaml").read_text()


# --- methods and their options --------------------------------------------------------------------


def test_an_unknown_method_is_told_in_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("train", "sdpo", "--model", "m") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "why", "fix"]
    assert "'sdpo'" in lines[0] and "Did you mean 'sdpo-token'?" in lines[2]


def test_every_method_of_the_trainer_is_a_command() -> None:
    from soulkit.train.config import TrainConfig

    names = set(TrainConfig.model_fields)
    for method in built_in():
        for option in method_options(method):
            assert not option.setting or option.setting.partition(".")[0] in names, option.flag


def test_a_method_shows_only_options_that_matter_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    methods = set(built_in())
    options = {
        "--lambda-fb": {"ditto"}, "--accept-from": {"erl"}, "--aux-weight": {"rltf-sd", "erl"},
        "--teacher-model": {"opd"}, "--estimator": {"sdpo-token", "sdpo-token+grpo", "opd"},
        "--distill-weight": {"sdpo-token+grpo", "sdpo-logits+grpo"},
        "--coach": methods - {"grpo", "opd", "self-rewarding"}, "--group-size": methods - {"sft"},
        "--packing": methods, "--iteration-steps": {"self-rewarding"},
    }  # fmt: skip
    shown: dict[str, set[str]] = {option: set() for option in options}
    for method in built_in():
        assert soul("train", method, "--help-all") == 0
        text = capsys.readouterr().out
        assert "Optimizer and memory:" in text
        for option in options:
            if re.search(rf"^ +{option}[ \n]", text, re.MULTILINE):
                shown[option].add(method)
    assert shown == options


def test_help_does_not_load_the_trainer() -> None:
    code = (
        "import sys; from soulkit.cli.app import main; main(['train', '--help']);"
        "print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_options_become_settings() -> None:
    options = {
        "task": ["tomi:2"], "model": "m", "data": ["rows"], "tasks": Path("t.yaml"), "lora_r": 8,
        "coach": "local:wise", "show_draft": True, "set": ["kl_coef=0.1"], "prompts": None,
    }  # fmt: skip
    assert settings_of("erl", options) == {
        "method": "erl", "tasks": {"tomi": 2.0}, "data": {"tomi": "rows"}, "model": "m",
        "tasks_file": "t.yaml", "coach": "local:wise", "show_draft": True,
        "lora.r": 8, "kl_coef": 0.1,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="has no value"):
        settings_of("erl", options | {"set": ["sampler_cap=null"]})


# --- the adapter ----------------------------------------------------------------------------------

RECORDED = "LoRA adapter: rank 16, alpha 64 (twice the rank would be 32)"
TWICE = "LoRA adapter: rank 16, alpha 32 (twice the rank)"


@pytest.mark.parametrize("written, values, line", [
    ({}, {"lora_r": 16}, TWICE),
    ({}, {"set": ["lora.r=16"]}, TWICE),
    ({"r": 16}, {}, TWICE),
    ({"r": 8, "alpha": None}, {"lora_r": 16}, TWICE),
    ({"r": 32, "alpha": 64}, {"lora_r": 16}, RECORDED),
    ({"alpha": 64}, {"set": ["lora.r=16"]}, RECORDED),
    ({"r": 16}, {"set": ["lora.alpha=64"]}, RECORDED),
    ({}, {}, "LoRA adapter: rank 32, alpha 64 (twice the rank)"),
    ({}, {"full": True}, ""),
])  # fmt: skip
def test_alpha_is_twice_the_rank_unless_it_is_set(
    tmp_path: Path, written: dict[str, Any], values: dict[str, Any], line: str
) -> None:
    """However the two are written. One line says what they are."""
    from soulkit.train.config import TrainConfig
    from soulkit.train.run import adapter_remark

    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"lora": written}))
    flags = settings_of("sft", {"task": ["tomi"], **values})
    assert adapter_remark(TrainConfig.load(file, {}, flags)) == line


def test_comparisons_and_distillations_have_the_same_rule() -> None:
    from soulkit.distill.config import DistillConfig
    from soulkit.train.ablate import arm_config, parse_arms

    common = {"tasks": {"tomi": 1.0}, "lora.r": 16}
    alphas = [arm_config(arm, None, common, 0, "prompts").lora.alpha
              for arm in parse_arms("grpo,grpo:lora.r=4,grpo:lora.alpha=7")]  # fmt: skip
    assert alphas == [32, 8, 7]
    settings = {"experts": "folder", "data": {"*": "synth:2"}, "lora.r": 16}
    assert DistillConfig.load(None, {"SOULKIT_LORA__R": "8"}, settings).lora.alpha == 32


@pytest.mark.parametrize("named", [False, True])
def test_a_training_says_rank_and_alpha_of_the_adapter_it_trains(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    """A named adapter keeps its own, whatever else is asked for. The plan has the same line."""
    more: tuple[Any, ...] = ()
    line, scale = TWICE, (16, 32)
    if named:
        policy_of(model, lora={"r": 4, "alpha": 12}).save(tmp_path / "adapter")
        more, scale = ("--adapter", tmp_path / "adapter"), (4, 12)
        line = f"LoRA adapter: {tmp_path / 'adapter'}, rank 4, alpha 12; "
        line += "lora.r and lora.alpha are ignored"
    out = tmp_path / "run"
    words = ("train", "sft", *TOMI, "--model", model, *more, "--lora-r", 16, "--steps", 1,
             "--batch", 2, "--out", out)  # fmt: skip
    for command in ((*words, "--dry-run"), words):
        assert soul(*command) == 0
        assert [one for one in capsys.readouterr().err.splitlines() if "LoRA" in one] == [line]
    saved = json.loads((out / "model" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == scale


# --- small pieces ---------------------------------------------------------------------------------


def test_ratios_and_pairs() -> None:
    assert mixing_ratios("hitom, paratomi:0.5,") == {"hitom": 1.0, "paratomi": 0.5}
    assert values_by_task(["rows.jsonl"], "tomi") == {"tomi": "rows.jsonl"}
    assert values_by_task(["tomi=a", "hitom=b"], "tomi,hitom:2") == {"tomi": "a", "hitom": "b"}
    assert values_by_task(None, "tomi") == {}
    for wrong in ("tomi:0", "tomi:-1", "tomi:x", "tomi:nan", "tomi:inf"):
        with pytest.raises(ConfigError):
            mixing_ratios(wrong)
    with pytest.raises(ConfigError, match="which task"):
        values_by_task(["rows.jsonl"], "tomi,hitom")


def test_a_step_in_a_few_words() -> None:
    line = StepLine(
        rewards=Rewards(draft=0.25),
        learned=Learned(loss=0.5),
        valid={"chats": 2.0},
        dev={"tomi": 0.75, "hitom": None, "fantom": 0.5},
    )
    numbers = "draft 0.250, loss 0.500, dev tomi 0.750, dev fantom 0.500, valid chats 2.000"
    assert step_words(line) == numbers
