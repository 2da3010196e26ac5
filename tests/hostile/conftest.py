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
def attack_all(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> Callable[[Attack, Iterable[Attack]], None]:
    """Run attacks, each in an empty folder of its own, and fail with the list of all faults.

    The first one is the command on its undamaged input, which must exit with 0: otherwise the
    attacks would fail before they reach what they attack. A JUnit file of pytest has the numbers.
    """

    def run(undamaged: Attack, attacks: Iterable[Attack]) -> None:
        sound = dataclasses.replace(undamaged, codes=frozenset({0}))
        bad: list[str] = []
        failed = set[int]()
        for number, attack in enumerate([sound, *attacks]):
            folder = tmp_path / str(number)
            folder.mkdir()
            command = " ".join(attack.command)
            those = [f"{attack.name} ({command}): {fault}" for fault in faults(attack, folder)]
            bad += those
            failed |= {number} if those else set()
            shutil.rmtree(folder)
        record_property("tried", number)
        record_property("failed", len(failed - {0}))
        assert not bad, f"{len(bad)} faults:\n" + "\n".join(bad[:20])

    return run


@pytest.fixture(scope="session")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two judged evaluations, `a` and `b`."""
    folder = tmp_path_factory.mktemp("evaluations")
    make_evaluations(folder)
    return folder
