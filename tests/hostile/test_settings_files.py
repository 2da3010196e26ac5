"""Odd settings files (`--config FILE`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.support.hostile import Attack, mutations

SETTINGS = b"""\
task: [cast_of_people]
data: ["synth:4"]
limit: 2
temperature: 0.5
"""


def attack(name: str, content: bytes) -> Attack:
    return Attack(
        name,
        ("eval", "local", "--dry-run", "--config", "settings.yaml", "--model", "tiny"),
        lambda folder: (folder / "settings.yaml").write_bytes(content),
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.hostile) for s in range(1, 9))]
)
def test_odd_settings_files(
    attack_all: Callable[[Attack, Iterable[Attack]], None], seed: int
) -> None:
    attack_all(
        attack("undamaged", SETTINGS),
        (attack(name, content) for name, content in mutations(seed, SETTINGS, 25)),
    )
