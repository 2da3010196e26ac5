"""Fixtures of the attacks. Each file has a quick part; `make test-hostile` runs all of it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.support.hostile import Attack, faults
from tests.support.odd_runs import make_evaluations


@pytest.fixture
def attack_all(tmp_path: Path) -> Callable[[Attack, Iterable[Attack]], None]:
    """Run attacks, each in an empty folder of its own, and fail with the list of all faults.

    The first one is the command on its undamaged input, which must exit with 0: otherwise the
    attacks would fail before they reach what they attack.
    """

    def run(undamaged: Attack, attacks: Iterable[Attack]) -> None:
        sound = dataclasses.replace(undamaged, codes=frozenset({0}))
        bad: list[str] = []
        for number, attack in enumerate([sound, *attacks]):
            folder = tmp_path / str(number)
            folder.mkdir()
            command = " ".join(attack.command)
            bad += (f"{attack.name} ({command}): {fault}" for fault in faults(attack, folder))
            shutil.rmtree(folder)
        assert not bad, f"{len(bad)} faults:\n" + "\n".join(bad[:20])

    return run


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two judged evaluations, `a` and `b`."""
    folder = tmp_path_factory.mktemp("evaluations")
    make_evaluations(folder)
    return folder
