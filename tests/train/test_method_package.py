"""A method of another package: one class, found by its entry point, trained and taken up again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from soulkit.config import Settings
from soulkit.errors import ConfigError
from soulkit.train.config import TrainConfig, settings_class
from soulkit.train.objectives.base import built_in, built_in_settings, method_class
from tests.support.training import random_model, soul

PLUGIN = '''
    """REINFORCE: every draft's tokens, weighted by its reward minus a constant."""

    from dataclasses import dataclass, replace
    from typing import ClassVar

    from soulkit.config import Settings, setting
    from soulkit.train.objectives.base import Objective, no_slot, scored_records, sequences_of
    from soulkit.train.objectives.sdpo import SdpoSettings


    class ReinforceSettings(Settings):
        baseline: float = setting(
            0.5, section="Objective", help="What is taken off every reward."
        )


    @dataclass(frozen=True, slots=True, kw_only=True)
    class Reinforce(Objective):
        names: ClassVar = {"reinforce": "Plain policy gradient.", "grpo": "Another one."}
        settings: ClassVar = ReinforceSettings

        name: str = "reinforce"
        baseline: float = 0.0

        @classmethod
        def of(cls, config):
            return cls(baseline=config.baseline)

        def sequences(self, records, renderer, slot=no_slot):
            found = []
            for record in scored_records(records, "draft"):
                gain = record.score.reward - self.baseline
                for one in sequences_of(record, "draft", renderer):
                    found.append(replace(one, loss="regression", compared=False, advantage=gain))
            return found


    class OwnTeacher(Reinforce):
        names: ClassVar = {"own-teacher": "Follows a teacher in its own way."}
        settings: ClassVar = SdpoSettings


    class Greedy(Reinforce):
        names: ClassVar = {"greedy": "Takes a setting that is there already."}


    class GreedySettings(Settings):
        lr: float = setting(0.5, help="Another lr.")


    Greedy.settings = GreedySettings
    nothing = object()
'''
ENTRIES = """
    [soulkit.objectives]
    reinforce = soul_reinforce:Reinforce
    grpo = soul_reinforce:Reinforce
    greedy = soul_reinforce:Greedy
    own-teacher = soul_reinforce:OwnTeacher
    empty = soul_reinforce:nothing
"""
ROOT = Path(__file__).parents[2]
SMALL = ("--prompts", 2, "--group-size", 2, "--max-tokens", 8, "--steps", 1, "--lora-r", 2)
ROWS = ("--task", "tomi", "--data", "synth:20")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package, as an installer leaves it: a module and its metadata."""
    site = tmp_path / "site"
    noted = site / "soul_reinforce-1.0.dist-info"
    noted.mkdir(parents=True)
    (site / "soul_reinforce.py").write_text(textwrap.dedent(PLUGIN))
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: soul-reinforce\nVersion: 1.0\n")
    (noted / "entry_points.txt").write_text(textwrap.dedent(ENTRIES))
    monkeypatch.syspath_prepend(str(site))
    settings_class.cache_clear()
    yield
    settings_class.cache_clear()
    sys.modules.pop("soul_reinforce", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


OWN_FILE = '''
    """A baseline that decays."""

    from dataclasses import dataclass
    from typing import ClassVar

    from soulkit.config import Settings, setting
    from soulkit.train.objectives.base import Objective, no_slot


    class DecayedSettings(Settings):
        baseline_decay: float = setting(
            0.9, gt=0, section="Objective", help="Share of the baseline that a step keeps."
        )


    @dataclass(frozen=True, slots=True, kw_only=True)
    class Decayed(Objective):
        names: ClassVar = {"decayed": "Rewards above a decaying baseline."}
        settings: ClassVar = DecayedSettings

        name: str = "decayed"
        decay: float = 0.0

        @classmethod
        def of(cls, config):
            return cls(decay=config.baseline_decay)

        def sequences(self, records, renderer, slot=no_slot):
            return []
'''
CALLED = """
import json, sys
from soulkit.cli.app import main
print([main(arguments) for arguments in json.loads(sys.argv[1])])
"""


def with_links(folder: Path, original: Path, *but: str) -> Path:
    """A new folder with links to what is in `original`, but for these names."""
    folder.mkdir()
    for path in original.iterdir():
        if path.name not in (*but, "__pycache__"):
            (folder / path.name).symlink_to(path)
    return folder


def test_a_built_in_method_with_a_setting_of_its_own_is_one_file(tmp_path: Path) -> None:
    package = with_links(tmp_path / "soulkit", ROOT / "soulkit", "train")
    train = with_links(package / "train", ROOT / "soulkit" / "train", "objectives")
    shutil.copytree(ROOT / "soulkit" / "train" / "objectives", train / "objectives")
    (train / "objectives" / "decayed.py").write_text(textwrap.dedent(OWN_FILE))

    (tmp_path / "tasks.yaml").symlink_to(ROOT / "tasks.yaml")
    run = ["plan", "train", "decayed", "--model", "m", *ROWS, "--set"]
    commands = [
        [*run, "baseline_decay=0.5"], [*run, "baseline_decay=0"], ["train", "decayed", "--help-all"]
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CALLED, json.dumps(commands)], cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True, check=False,
    )  # fmt: skip
    assert "[0, 2, 0]" in done.stdout, done.stderr
    assert "baseline_decay" in done.stderr and "--baseline-decay" in done.stdout


def test_no_two_methods_declare_one_setting() -> None:
    owners: dict[str, set[type[Settings]]] = {}
    for kind in built_in_settings():
        for base in kind.__mro__:
            for name in vars(base).get("__annotations__", ()) if issubclass(base, Settings) else ():
                owners.setdefault(name, set()).add(base)
    assert {name: kinds for name, kinds in owners.items() if len(kinds) > 1} == {}


@pytest.mark.slow
def test_a_step_is_trained_and_taken_up_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ("train", "reinforce", "--model", model, *ROWS, *SMALL, "--baseline", "0.25")
    assert soul(*command, "--out", out, "--json") == 0, capsys.readouterr().err
    (line,) = (json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 0 and line["grad/norm"] > 0
    assert (out / "model" / "adapter_model.safetensors").is_file()
    noted = yaml.safe_load((out / "config.yaml").read_text())
    assert noted["method"] == "reinforce" and noted["baseline"] == 0.25
    again = ("train", "reinforce", "--config", out / "config.yaml")
    assert soul(*again, "--out", out) == 0, capsys.readouterr().err
    assert soul(*again, "--out", out, "--baseline", "0.5") == 2
    assert "baseline" in capsys.readouterr().err
    assert soul("rescore", out, "--out", tmp_path / "rescored") == 0, capsys.readouterr().err


def test_its_options_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("train", "reinforce", "--help") == 0
    text = capsys.readouterr().out
    assert "--baseline X" in text and "Plain policy gradient." in text
    assert "--coach" not in text and "--group-size" in text
    assert soul("train", "own-teacher", "--help-all") == 0
    assert "--ema-tau" in capsys.readouterr().out
    assert soul("train", "ditto", "--help-all") == 0
    assert "--baseline" not in capsys.readouterr().out


def test_nothing_of_it_is_imported_before_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert soul("train", "--help") == 0
    listed = capsys.readouterr().out
    assert "From an installed package: soul_reinforce:Reinforce." in listed
    assert "soul_reinforce" not in sys.modules and listed.count("  grpo ") == 1
    assert soul("train", "grpo", "--help-all") == 0
    TrainConfig.load(env={}, flags={"method": "ditto", "model": "m", "tasks": {"tomi": 1.0}})
    assert "soul_reinforce" not in sys.modules
    assert "Another one" not in capsys.readouterr().out


def test_a_built_in_name_wins_and_says_so(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert method_class("grpo").__module__ == "soulkit.train.objectives.grpo"
    dry = ("train", "grpo", "--model", model, *ROWS, *SMALL, "--dry-run")
    assert soul(*dry, "--out", tmp_path / "run") == 0
    message = capsys.readouterr().err
    assert "'grpo' is a built-in method" in message and "soul_reinforce:Reinforce" in message


def test_what_is_no_method_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'empty' from soul_reinforce:nothing is not valid"):
        method_class("empty")
    with pytest.raises(ConfigError, match="already exist: lr"):
        settings_class("greedy")
    assert soul("train", "reinforc") == 2
    assert "Did you mean 'reinforce'?" in capsys.readouterr().err


def test_every_built_in_method_says_what_it_is() -> None:
    for name, sentence in built_in().items():
        assert method_class(name).names[name] == sentence
        assert settings_class(name) is TrainConfig
