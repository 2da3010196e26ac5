"""Settings: precedence of sources, errors with a fix, and the settings that a run compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from soulkit.config import Settings
from soulkit.distill.config import DistillConfig
from soulkit.errors import ConfigError
from soulkit.eval.config import EvalConfig
from soulkit.eval.drafted_rows import BuildConfig
from soulkit.eval.judges.check import CheckConfig
from soulkit.models.players.config import RolesConfig
from soulkit.play.settings import PlayConfig
from soulkit.train.config import TrainConfig


class Judge(Settings):
    model: str = "none"
    votes: int = Field(default=1, ge=1)


class Eval(Settings):
    model: str
    temperature: float = 1.0
    tasks: tuple[str, ...] = ()
    out: Path | None = None
    api_key_env: str = "KEY"
    judge: Judge = Judge()
    backup: Judge | None = None


def load(tmp_path: Path, text: str = "model: m", **env: str) -> Eval:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return Eval.load(file, env)


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: file\ntemperature: 1e-1\njudge: {model: file, votes: 3}\n")
    env = {"SOULKIT_MODEL": "env", "SOULKIT_JUDGE__MODEL": "env", "OTHER": "x"}
    got = Eval.load(file, env, {"model": "flag", "temperature": None, "judge.votes": 5})
    assert (got.model, got.temperature) == ("flag", 0.1)
    assert (got.judge.model, got.judge.votes) == ("env", 5)


def test_lists_and_groups_from_the_environment(tmp_path: Path) -> None:
    assert load(tmp_path, SOULKIT_TASKS="a, b").tasks == ("a", "b")
    assert load(tmp_path, SOULKIT_TASKS="[a, b]").tasks == ("a", "b")
    assert load(tmp_path, SOULKIT_OUT="x/y").out == Path("x/y")
    group = load(tmp_path, SOULKIT_BACKUP="{model: b}", SOULKIT_BACKUP__VOTES="2").backup
    assert group == Judge(model="b", votes=2)
    with pytest.raises(ConfigError, match="SOULKIT_TASKS starts like a list"):
        load(tmp_path, SOULKIT_TASKS="[a")


def test_a_part_of_what_has_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SOULKIT_TASKS__MODEL does not match any setting"):
        load(tmp_path, SOULKIT_TASKS__MODEL="x")
    assert load(tmp_path, SOULKIT_OTHER__MODEL="x").model == "m"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOULKIT_MODEL", "from-env")
    assert Eval.load().model == "from-env"


def test_unknown_keys_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'temprature' in the file .* is not a setting"
    ) as caught:
        load(tmp_path, "model: m\ntemprature: 1")
    assert caught.value.way_out == "Did you mean 'temperature'?"
    with pytest.raises(ConfigError, match=r"'judge\.vote' in the command line") as caught:
        Eval.load(None, {}, {"model": "m", "judge.vote": 1})
    assert "votes" in caught.value.way_out


def test_other_variables_are_left_alone_but_slips_are_not(tmp_path: Path) -> None:
    load(tmp_path, SOULKIT_LEARNING_RATE="1", SOULKIT_DEBUG="1", SOULKIT_TEST_DATA="x")
    with pytest.raises(ConfigError, match="SOULKIT_TEMPERATUR is not a setting"):
        load(tmp_path, SOULKIT_TEMPERATUR="1")


def test_every_problem_is_told_with_its_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "temperature: warm\njudge: {votes: 0}", SOULKIT_OUT="x")
    what = caught.value.what
    assert what.startswith("3 settings are wrong:")
    assert "model is missing" in what
    assert "(got 'warm', from the file" in what
    assert "judge.votes" in what


def test_secrets_are_not_echoed() -> None:
    with pytest.raises(ConfigError) as caught:
        Eval.load(None, {}, {"model": "m", "api_key_env": ["hush"]})
    assert "hush" not in " ".join(caught.value.lines())


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "contains a list"), ("a: [", "cannot be read"), ("a: \x00", "cannot be read")],
)
def test_files_that_hold_no_settings(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        Eval.load(tmp_path / "nowhere.yaml", {})
    with pytest.raises(ConfigError, match="missing: model"):
        load(tmp_path, "")


def test_settings_are_frozen_finite_and_resolved(tmp_path: Path) -> None:
    got = load(tmp_path, SOULKIT_OUT="x", SOULKIT_TASKS="a")
    assert got.resolved()["tasks"] == ["a"]
    assert got.resolved()["out"] == "x"
    with pytest.raises(ValueError, match="frozen"):
        got.model = "other"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="finite"):
        load(tmp_path, "model: m\ntemperature: .nan")


TESTS = "tests a finished run"
SPEED = "changes only how fast, or how persistently, servers are asked"
MONEY = "what calls may cost, not what they say"
PLACE = "where the work is done or how it is reported"
ROOM = "a run that met an episode beyond its context can go on with more"
OUTSIDE: dict[type[RolesConfig], dict[str, str]] = {
    RolesConfig: {
        "endpoints": "a file whose players are recorded one by one",
        "requests_per_minute": SPEED, "tokens_per_minute": SPEED, "timeout_s": SPEED,
        "max_attempts": SPEED, "backoff_s": SPEED, "rate_limit_wait_s": SPEED,
        "down_after_s": SPEED, "prices": MONEY, "max_cost": MONEY, "yes": MONEY,
        "vllm_python": PLACE, "vllm_start_s": PLACE,
        "allow_private": "lets a run start and changes nothing in it",
    },
    PlayConfig: {
        "threads": PLACE, "engine": "the engine in use is recorded with the model",
        "verify_weights": "checks what was loaded and changes nothing",
    },
    EvalConfig: {
        "concurrency": SPEED, "batch_size": SPEED, "batch": SPEED, "batch_judges": SPEED,
        "batch_poll_s": SPEED, "max_unscored": "decides the exit code alone",
        "controls": "more are played when a run is resumed", "gate": TESTS, "gates": TESTS,
    },
    TrainConfig: {
        "stop_flat": "decides when to stop; the steps before are the same",
        "stop_gap": "decides when to stop; the steps before are the same",
        "show_samples": PLACE, "max_context": ROOM,
        "vllm_sleep": "releases memory between rollouts",
        "gpus": PLACE, "sampler_gpus": PLACE, "shard": PLACE, "launcher": PLACE,
    },
    DistillConfig: {
        "max_context": ROOM, "concurrency": SPEED, "batch_size": SPEED,
        "gate": TESTS, "gates": TESTS,
    },
    CheckConfig: {"concurrency": SPEED, "max_context": ROOM},
    BuildConfig: {
        "concurrency": SPEED, "max_context": ROOM, "source": "the digest of the file is recorded",
        "allow_private": "only whether a check is made",
    },
}  # fmt: skip
"""Settings that a resumed run may change, and why. Every other one is part of its identity."""

SMALLEST: dict[type[RolesConfig], dict[str, Any]] = {
    EvalConfig: {"kind": "local", "model": "m", "tasks": ["tomi"]},
    TrainConfig: {"method": "ditto", "model": "m", "tasks": {"tomi": 1.0}},
    DistillConfig: {"model": "m", "experts": {"tomi": "folder"}, "data": {"tomi": "synth:2"}},
    CheckConfig: {"run": "folder"},
    BuildConfig: {"task": "userllm", "source": "rows.jsonl", "drafter": "endpoint:m"},
}


@pytest.mark.parametrize("kind", SMALLEST)
def test_every_setting_is_part_of_a_runs_identity_or_listed_here(kind: type[RolesConfig]) -> None:
    listed = {name for base in kind.__mro__ for name in OUTSIDE.get(base, ())}
    identity = kind.load(
        env={}, flags=SMALLEST[kind] | {"vllm_arg": {"max-model-len": "64"}}
    ).identity()
    assert set(kind.model_fields) - set(identity) == listed
    assert "vllm_arg" not in kind.load(env={}, flags=SMALLEST[kind]).identity()
