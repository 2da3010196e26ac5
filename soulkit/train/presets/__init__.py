"""Published settings under a name: every YAML file of this folder is one.

A preset says what a run is told where neither an option nor a file says otherwise. What it came to
is recorded setting by setting, with the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from soulkit.errors import did_you_mean


def preset_names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.yaml"))


@cache
def preset_settings(name: str) -> Mapping[str, Any]:
    """The settings of a preset; ValueError with the nearest name for one that is none."""
    if name not in preset_names():
        raise ValueError(f"there is no preset '{name}'. {did_you_mean(name, preset_names())}")
    file = Path(__file__).parent / f"{name}.yaml"
    settings: Mapping[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return settings
