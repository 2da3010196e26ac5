"""Run folders with edited, damaged or odd files, read by every command that reads them."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from soulkit.models.ledger.storage import _PACKED, _link
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
LEDGERS = tuple(one for one in READERS if one[0] == "ledger")
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


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"
SQL = {
    "trigger": "CREATE TRIGGER t AFTER INSERT ON calls BEGIN DELETE FROM calls; END",
    "endless contexts": "ALTER TABLE contexts RENAME TO c0; CREATE VIEW contexts AS "
    f"{ENDLESS} x AS digest, NULL AS parent, 'user' AS role, 'x' AS body FROM c",
    "endless settings": "ALTER TABLE settings RENAME TO s0; CREATE VIEW settings AS "
    f"{ENDLESS} x AS digest, zeroblob(60000000) AS body FROM c",
    "endless calls": f"ALTER TABLE calls RENAME TO c1; CREATE VIEW calls AS {ENDLESS} * FROM c1, c",
}


def _with_sql(sql: str, run: Path) -> None:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        db.executescript(sql)


def _with_long_prompt(run: Path) -> None:
    """Twenty messages of 63 MB, packed into 1 MB, before those of the first call."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        parent = None
        for number in range(20):
            message = {"role": "user", "content": f"{number}{'a' * 63_000_000}"}
            packed = _PACKED + zlib.compress(message["content"].encode())
            digest = _link(parent, message)
            db.execute("INSERT INTO contexts VALUES (?, ?, ?, ?)", (digest, parent, "user", packed))
            parent = digest
        db.execute("UPDATE calls SET context = ?", (parent,))
        db.commit()


def _with_pipes(run: Path) -> None:
    for end in ("-wal", "-shm", "-journal"):
        os.mkfifo(run / f"ledger.sqlite{end}")


@pytest.mark.hostile
@pytest.mark.parametrize("name", [*SQL, "long prompt", "pipes"])
def test_ledgers_that_would_run_code_or_never_end(
    attack_all: Run, evaluations: Path, name: str
) -> None:
    change = {"long prompt": _with_long_prompt, "pipes": _with_pipes}.get(name)
    change = change or partial(_with_sql, SQL[name])
    run, other = evaluations / "a", evaluations / "b"
    attack_all(
        _attack("undamaged", READERS[7], run, other, "ledger.sqlite", lambda to: None),
        (_attack(name, one, run, other, "ledger.sqlite", change) for one in (READERS[0], *LEDGERS)),
    )


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


@pytest.mark.parametrize("place", ["report", "report/index.html"])
def test_a_page_is_not_written_through_a_link(
    attack_all: Run, evaluations: Path, place: str
) -> None:
    def linked(folder: Path) -> None:
        (folder / place).parent.mkdir(exist_ok=True)
        (folder.parent / "elsewhere").mkdir()
        (folder / place).symlink_to(folder.parent / "elsewhere")

    run = evaluations / "a"
    page = ("report", "run", "--format", "html")
    attack_all(
        _attack("undamaged", page, run, run, "config.yaml", lambda to: None),
        [
            replace(
                _attack(place, page, run, run, "config.yaml", linked),
                canaries=("elsewhere/index.html", "elsewhere/episodes"),
            )
        ],
    )
