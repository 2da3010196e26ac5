"""What experts were trained from: whether two bases are one, whatever they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.eval.provenance import weights_print
from soulkit.models.local.names import model_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base as somebody named it."""

    where: str
    """An absolute folder, or the hub's id."""
    revision: str = ""
    """A commit of the hub; empty where it is not known, and of folders."""
    weights: str = ""
    """`weights_print` when it was named; empty where nobody took one."""

    @property
    def name(self) -> str:
        """As a model is named on the command line."""
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def is_folder(self) -> bool:
        return Path(self.where).is_absolute()

    @property
    def here(self) -> Path | None:
        """Its folder on this machine, or in the cache of the hub's client; None without one."""
        if self.is_folder:
            return Path(self.where) if Path(self.where).is_dir() else None
        return _cached(self.where, self.revision or None)

    def now(self) -> str:
        """The print of the weights that lie there now; empty where none do."""
        return "" if self.here is None else weights_print(self.here)

    @property
    def proof(self) -> str:
        """What tells it from another: the print of its weights, else its name."""
        return self.weights or self.now() or self.name


def named_base(name: str) -> Base:
    """The base that a setting names, with the weights that lie there; ModelLoadError for a folder
    that does not."""
    place = model_place(name)
    if not place.on_hub:
        folder = Path(place.where).resolve()
        return Base(where=str(folder), weights=weights_print(folder))
    return Base(where=place.where, revision=place.revision or "")


def noted_base(note: Mapping[str, Any]) -> Base:
    """The base as `soulkit.json` has it: {"model": …, "revision" or "weights": …}."""
    base = note.get("base")
    base = base if isinstance(base, Mapping) else {}
    return Base(
        where=str(base.get("model") or ""), revision=str(base.get("revision") or ""),
        weights=str(base.get("weights") or ""),
    )  # fmt: skip


def adapters_base(settings: Mapping[str, Any]) -> Base:
    """The base as `adapter_config.json` has it."""
    name = str(settings.get("base_model_name_or_path") or "")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return Base(where=str(folder.resolve()))
    return Base(where=name, revision=str(settings.get("revision") or ""))


def same_base(one: Base, other: Base) -> bool | None:
    """Whether two bases have the same weights; None where nobody can tell."""
    if one.revision and (one.where, one.revision) == (other.where, other.revision):
        return True
    weights = one.weights or one.now(), other.weights or other.now()
    if all(weights):
        return weights[0] == weights[1]
    if one.where != other.where:
        return None if one.is_folder != other.is_folder else False
    return None if one.is_folder or one.revision != other.revision else True


def _cached(where: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(where, "config.json", revision=revision)
    except ValueError:  # no name of the hub's
        return None
    return Path(config).parent if isinstance(config, str) else None
