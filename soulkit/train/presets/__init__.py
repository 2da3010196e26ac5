"""Presets: published settings by name, one YAML file each in this folder.

A preset replaces the defaults; options and settings files override it. A run records the resulting
settings and the name of the preset.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.errors import did_you_mean
from soulkit.parse import parse_yaml


def preset_names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.yaml"))


@cache
def preset_settings(name: str) -> Mapping[str, Any]:
    """The settings of a preset; ValueError, with the nearest name, if there is no such preset."""
    if name not in preset_names():
        raise ValueError(f"there is no preset '{name}'. {did_you_mean(name, preset_names())}")
    file = Path(__file__).parent / f"{name}.yaml"
    settings: Mapping[str, Any] = parse_yaml(file.read_bytes(), ours=True)
    return settings
