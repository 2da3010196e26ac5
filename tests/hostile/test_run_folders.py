"""Run folders with edited, damaged or odd files, read by every command that reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.hostile import Attack, seeds
from tests.support.odd_runs import (
    Change,
    copy_run,
    damages,
    distilling,
    make_sweep,
    make_training,
    sweep,
    training,
)

Run = Callable[[Attack, Iterable[Attack]], None]
READERS: Sequence[tuple[str, ...]] = (
    ("report", "run"),
    ("report", "run", "--out", "page.html"),
    ("report", "run", "--json", "--details"),
    ("compare", "other", "run"),
    ("show", "run", "--full"),
    ("rescore", "run", "--out", "again", "--trust"),
    ("runs", "."),
    ("ledger", "verify", "run"),
    ("report", "run", "--format", "episodes-csv"),
    ("ledger", "show", "run"),
    ("ledger", "stats", "run"),
    ("report", "run", "--format", "eee"),
    ("judge", "sheet", "run", "--out", "sheet"),
    ("ledger", "export", "run"),
    ("certify", "run"),
    ("report", "run", "--format", "latex"),
)
FILES = ("config.yaml", "environment.json", "conditions.json", "summary.json", "episodes.jsonl",
         "clock.json", "ledger.sqlite")  # fmt: skip


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainings")
    make_training(folder)
    return folder


def attacks(
    run: Path, other: Path, files: Sequence[str], seed: int, commands: Sequence[tuple[str, ...]]
) -> Iterator[Attack]:
    """Attacks on the files of a run in turn, each read by the next command."""
    number = seed
    for file in files:
        for name, change in damages(seed, run / file, 4):
            yield _attack(name, commands[number % len(commands)], run, other, file, change)
            number += 1


def _attack(
    name: str, command: tuple[str, ...], run: Path, other: Path, file: str, change: Change
) -> Attack:
    def prepare(folder: Path) -> None:
        copy_run(run, folder / "run")
        change((folder / "run" / file).parent)
        if "other" in command:
            copy_run(other, folder / "other")

    return Attack(name, command, prepare, canaries=("owned", "run/owned"))


@pytest.mark.parametrize("seed", seeds(13))
def test_odd_evaluations(attack_all: Run, evaluations: Path, seed: int) -> None:
    a, b = evaluations / "a", evaluations / "b"
    undamaged = _attack("undamaged", ("report", "run"), a, b, "config.yaml", lambda folder: None)
    attack_all(undamaged, attacks(a, b, FILES, seed, READERS))


TRAINED = ("config.yaml", "environment.json", "conditions.json", "summary.json", "episodes.jsonl",
           "metrics.jsonl", "dev.jsonl", "material.json")  # fmt: skip
TRAIN_READERS = (*READERS[:5], ("runs", "."), ("show", "run", "--dev"))


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(6))
def test_odd_trainings(attack_all: Run, trainings: Path, seed: int) -> None:
    run = trainings / "train"
    undamaged = _attack("undamaged", ("report", "run"), run, run, "config.yaml", lambda f: None)
    files = [name for name in TRAINED if (run / name).is_file()]
    attack_all(undamaged, attacks(run, run, files, seed, TRAIN_READERS))


MODEL = ("config.yaml", "environment.json", "summary.json", "model/soulkit.json",
         "model/adapter_config.json", "checkpoints/step_000002/position.json",
         "checkpoints/step_000002/soulkit.json")  # fmt: skip


def users(trainings: Path) -> Sequence[tuple[str, ...]]:
    """Commands that take a training as a model, or go on with it."""
    rows = ("--task", "tomi", "--data", "tomi=synth:2", "--max-tokens", "4", "--max-unscored", "1")
    return (
        ("export", "run", "--merge", "--out", "model"),
        ("export", "run", "--adapter", "--out", "model"),
        ("eval", "local", "--run", "run", "--checkpoints", "all", *rows, "--out", "grid"),
        (*distilling("run", "out"), "--dry-run"),
        tuple(training("ditto", trainings / "model", Path("run"), 3)),
        ("people", "memory", "run"),
        ("certify", "run"),
        tuple(distilling("run", "out")),
    )


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(4))
def test_odd_trainings_as_models(attack_all: Run, trainings: Path, seed: int) -> None:
    run, commands = trainings / "train", users(trainings)
    undamaged = _attack("undamaged", commands[0], run, run, "config.yaml", lambda f: None)
    assert all((run / name).is_file() for name in MODEL)
    attack_all(undamaged, attacks(run, run, MODEL, seed, commands))


@pytest.fixture(scope="session")
def comparison(trainings: Path) -> Path:
    make_sweep(trainings)
    return trainings / "sweep"


SWEEP = ("ablation.json", "report/comparison.json", "grpo/seed_0/summary.json",
         "grpo/seed_0/metrics.jsonl", "ditto/seed_0/config.yaml",
         "ditto/seed_0/environment.json", "ditto/seed_0/episodes.jsonl")  # fmt: skip


@pytest.mark.hostile
@pytest.mark.parametrize("seed", range(3))
def test_odd_comparisons(attack_all: Run, comparison: Path, seed: int) -> None:
    """A folder of `soul train ablate`: read, and gone on with."""
    a, b = "run/grpo/seed_0", "run/ditto/seed_0"
    commands = (
        tuple(sweep(comparison.parent, "run")), ("report", a, b), ("runs", "."),
        ("compare", a, b), ("show", b), ("report", a, "--out", "page.html"),
        ("rescore", b, "--out", "again"),
    )  # fmt: skip
    undamaged = _attack("undamaged", commands[0], comparison, comparison, "x", lambda f: None)
    assert all((comparison / name).is_file() for name in SWEEP)
    attack_all(undamaged, attacks(comparison, comparison, SWEEP, seed, commands))
