"""Settings: the order of their sources, and errors that can be mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from soulkit.config import Settings
from soulkit.errors import ConfigError


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
    with pytest.raises(ConfigError, match="SOULKIT_TASKS__MODEL is a part of no setting"):
        load(tmp_path, SOULKIT_TASKS__MODEL="x")
    assert load(tmp_path, SOULKIT_OTHER__MODEL="x").model == "m"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOULKIT_MODEL", "from-env")
    assert Eval.load().model == "from-env"


def test_unknown_keys_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'temprature' in the file .* is no setting") as caught:
        load(tmp_path, "model: m\ntemprature: 1")
    assert caught.value.way_out == "Did you mean 'temperature'?"
    with pytest.raises(ConfigError, match=r"'judge\.vote' in the command line") as caught:
        Eval.load(None, {}, {"model": "m", "judge.vote": 1})
    assert "votes" in caught.value.way_out


def test_other_variables_are_left_alone_but_slips_are_not(tmp_path: Path) -> None:
    load(tmp_path, SOULKIT_LEARNING_RATE="1", SOULKIT_DEBUG="1", SOULKIT_TEST_DATA="x")
    with pytest.raises(ConfigError, match="SOULKIT_TEMPERATUR is no setting"):
        load(tmp_path, SOULKIT_TEMPERATUR="1")


def test_every_problem_is_told_with_its_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "temperature: warm\njudge: {votes: 0}", SOULKIT_OUT="x")
    what = caught.value.what
    assert what.startswith("3 settings are wrong:")
    assert "model is required" in what
    assert "(got 'warm', from the file" in what
    assert "judge.votes" in what


def test_secrets_are_not_echoed() -> None:
    with pytest.raises(ConfigError) as caught:
        Eval.load(None, {}, {"model": "m", "api_key_env": ["hush"]})
    assert "hush" not in " ".join(caught.value.lines())


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "holds a list"), ("a: [", "cannot be read"), ("a: \x00", "cannot be read")],
)
def test_files_that_hold_no_settings(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        Eval.load(tmp_path / "nowhere.yaml", {})
    with pytest.raises(ConfigError, match="model is required"):
        load(tmp_path, "")


def test_settings_are_frozen_finite_and_resolved(tmp_path: Path) -> None:
    got = load(tmp_path, SOULKIT_OUT="x", SOULKIT_TASKS="a")
    assert got.resolved()["tasks"] == ["a"]
    assert got.resolved()["out"] == "x"
    with pytest.raises(ValueError, match="frozen"):
        got.model = "other"  # type: ignore[misc]
    with pytest.raises(ConfigError, match="finite"):
        load(tmp_path, "model: m\ntemperature: .nan")
