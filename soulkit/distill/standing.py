"""Whether what lies in a distillation's folder came from the weights that are named now.

Settings are compared by whoever opens a run. An expert that was trained on, or a generalist that
was trained again, has the same name and is another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soulkit.distill.experts import Expert
from soulkit.errors import RunError
from soulkit.eval.provenance import read_provenance, weights_print
from soulkit.runs.folder import is_run

ADAPTER, BASE = "adapter_weights", "weights"
"""How a run's provenance calls what it says of its actor's weights."""


def weights_of(expert: Expert) -> dict[str, str]:
    """What a run of the expert notes of its weights; empty of a served one."""
    if expert.endpoint is not None:
        return {}
    return {BASE if expert.adapter is None else ADAPTER: expert.weights}


def weights_now(actor: Mapping[str, Any]) -> dict[str, str]:
    """The same of a model and adapter that lie in folders here."""
    from soulkit.models.local.loading import adapter_hash

    if actor.get("kind") != "local":
        return {}
    adapter, model = actor.get("adapter"), Path(str(actor["model"])).expanduser()
    there = {ADAPTER: adapter_hash(adapter)} if adapter and Path(adapter).is_dir() else {}
    return {**there, **({BASE: weights_print(model)} if model.is_dir() else {})}


def refuse_other_weights(folder: Path, now: Mapping[str, str], name: str) -> None:
    """RunError where the run in `folder` was played by other weights than those of `name` now."""
    if is_run(folder):
        _refuse_other(folder, read_provenance(folder).get("actor", {}), now, name)


def refuse_other_teachers(folder: Path, adapters: Mapping[str, str]) -> None:
    """RunError where the training in `folder` was taught by other weights than lie in `adapters`
    now; task → adapter."""
    for task, teacher in read_provenance(folder).get("teachers", {}).items():
        now = weights_now({"kind": "local", "model": teacher["model"], "adapter": adapters[task]})
        _refuse_other(folder, teacher, now, f"the expert of {task}")


def _refuse_other(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, str], name: str
) -> None:
    for kind, digest in now.items():
        if before.get(kind) and digest and before[kind] != digest:
            raise RunError(
                f"'{folder}' was made with other weights than {name} has now.",
                f"They were {before[kind]} and are {digest}: what was selected, learned and "
                "measured before is of another model.",
                "Distil anew with another --out, or bring the old weights back.",
            )
