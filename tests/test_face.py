"""`import soulkit as sk`: what it offers, that it is lazy, and that nothing shadows it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import soulkit as sk
from soulkit.data.files import write_rows
from soulkit.errors import ConfigError
from tests.support.road import synth
from tests.support.servers.openai_server import ScriptedServer

NAMES = [name for name in sk.__all__ if not name.startswith("_")]


def import_everything() -> None:
    for module in pkgutil.walk_packages(sk.__path__, "soulkit."):
        if "templates" not in module.name:
            importlib.import_module(module.name)


def test_importing_it_imports_nothing_else() -> None:
    code = "import sys, soulkit; print([m for m in sys.modules if m.startswith('soulkit.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['soulkit.version']"


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_that_of_a_module(name: str) -> None:
    modules = {module.name for module in pkgutil.iter_modules(sk.__path__)}
    assert name not in modules and name in dir(sk)


def test_a_name_that_is_not_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        _ = sk.evaluat  # type: ignore[attr-defined]


def test_every_name_stays_what_it_is_after_every_module_was_imported() -> None:
    before = {name: getattr(sk, name) for name in NAMES}
    import_everything()
    assert {name: getattr(sk, name) for name in NAMES} == before
    assert all(callable(value) for value in before.values())


def test_each_function_does_its_work_twice(tmp_path: Path) -> None:
    import_everything()
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, synth("tomi", 4, 3), data_source="tomi", replace=False)
    with ScriptedServer(answer=lambda _: "<answer>box</answer>") as server:
        for out in (tmp_path / "a", tmp_path / "b"):
            summary = sk.evaluate(
                "m", "tomi", base_url=server.base_url, data={"tomi": str(rows)}, out=out
            )
            assert summary is not None
    for _ in range(2):
        run = sk.load_run(tmp_path / "a")
        assert [record.task for record in run.records] == ["tomi"] * 4
        difference = sk.compare(tmp_path / "a", tmp_path / "b")
        assert difference.tasks[0].paired.n_shared == 4
        task = sk.load_task("tomi")
        assert (
            isinstance(task, sk.ChoiceTask) and task.example(synth("tomi", 1, 0)[0]).task == "tomi"
        )
        assert isinstance(sk.load_task("secret_keeper"), sk.DialogueTask)


@pytest.mark.slow
def test_training_from_python_twice(tmp_path: Path) -> None:
    import_everything()
    for out in (tmp_path / "a", tmp_path / "a"):
        summary = sk.train_model(
            "sft", "tiny", {"tomi": 1.0}, data={"tomi": "synth:16"}, steps=2, full=True, out=out
        )
        assert summary is not None and (out / "model").is_dir()


def test_what_the_command_refuses_is_refused_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_task"):
        sk.evaluate("m", "no_such_task", base_url="http://127.0.0.1:9/v1", out=tmp_path / "x")


def test_a_task_has_two_protocols() -> None:
    with pytest.raises(ConfigError, match="There is no protocol 'refrence'"):
        sk.load_task("tomi", protocol="refrence")  # type: ignore[arg-type]
