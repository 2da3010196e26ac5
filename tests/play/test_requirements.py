"""Missing rows: one diagnosis, whether something else is missing as well or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.data.hub import released
from soulkit.tasks.kit.registry import load_registry
from tests.support.training import soul

LACKING = {
    "released": ("hitom", "soul data pull --task hitom --split {split}"),
    "made here": ("tomi", "--data tomi=synth:{count} (rows made here)"),
    "imported": ("tombench", "soul data import tombench FILE"),
}
COMMANDS = {
    "rows alone, eval": ("eval api --model m --base-url http://127.0.0.1:9/v1", "eval", 100),
    "a key as well, eval": ("eval api --model gpt-5.4-mini", "eval", 100),
    "rows alone, train": ("train sft --model tiny --full", "train", 2000),
    "a key as well, train": ("train ditto --coach endpoint:gpt-5-nano", "train", 2000),
}
"""What is missing → the command, the split of its rows, and how many are made for it."""


@pytest.fixture
def fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOULKIT_DATA", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(*words: str) -> str:
        """The last line of a command that must fail."""
        capfd.readouterr()
        assert soul(*words) == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize("missing", COMMANDS)
@pytest.mark.parametrize("kind", LACKING)
def test_the_way_to_rows_is_the_same_with_and_without_a_key(fix, kind: str, missing: str) -> None:
    (task, way), (words, split, count) = LACKING[kind], COMMANDS[missing]
    advice = fix(*words.split(), "--task", task)
    assert way.format(split=split, count=count) in advice
    assert ("export OPENAI_API_KEY" in advice) is ("key" in missing)
    assert ("data pull" in advice) is (kind == "released")


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("words", [("--suite", "tom"), ("--task", "hitom,paratomi,tomi")])
def test_of_several_tasks_only_released_ones_are_to_be_pulled(
    fix, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str], key: bool
) -> None:
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    advice = fix("eval", "api", "--model", "gpt-5.4-mini", *words)
    assert "rows of hitom,paratomi: download them: soul data pull --task hitom,paratomi " in advice
    assert "rows of tomi: --data tomi=synth:100 (rows made here), or --data tomi=FILE" in advice
    assert "{" not in advice


@pytest.mark.parametrize("split", ["train", "eval"])
def test_what_is_to_be_pulled_is_released(fix, split: str) -> None:
    """For every task: the advice names a download exactly where there is something to download."""
    command = "eval api --model m" if split == "eval" else "train grpo --steps 1"
    for name, spec in load_registry().specs.items():
        if spec.rows_only or (split == "train" and spec.evaluation_only):
            continue
        advice = fix(*command.split(), "--task", name)
        files = {name: spec.files}
        if f"soul data pull --task {name}" in advice:
            assert released(files, [split]), name
        else:
            assert not getattr(spec.files, split), name
        assert (f"{name}=synth:" in advice) is bool(spec.synth), name
        assert (f"data import {name}" in advice) is bool(spec.formats), name


def test_a_folder_without_the_files_is_the_one_to_pull_into(fix, tmp_path: Path) -> None:
    place = tmp_path / "my {rows}"
    place.mkdir()
    for more in ((), ("--base-url", "http://127.0.0.1:9/v1")):
        words = ("--model", "m", "--task", "hitom", "--data", str(place), *more)
        assert f"--split eval --out '{place}'" in fix("eval", "api", *words)
