"""What `soulkit.json` beside saved weights says, for whoever loads, judges or distils them later.

{"schema": "soulkit/model@1", "soulkit": "0.1.0", "kind": "adapter",
 "method": "ditto", "protocol": "paper", "tasks": {"TASK": 1.0},
 "corpora": [{"name": "chats.jsonl", "side": "human", "ratio": 1.0, "rows": 1200}],  if any
 "base": {"model": "owner/name", "revision": "4c1d…",       or a folder and its "weights"
              "licence": {"license": "apache-2.0"}},
 "adapter": {"model": "runs/a/model", "weights": "9f…"},    what was trained further, if any
 "step": 50}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soulkit.eval.provenance import weights_print
from soulkit.models.local.licences import base_licence
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.names import adapter_folder, commit_of, model_place
from soulkit.models.local.saving import base_of, is_peft
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.material.conversations import Corpus, source_facts
from soulkit.version import __version__

SCHEMA = "soulkit/model@1"


def model_note(config: TrainConfig, policy: Policy, corpus: Corpus | None = None) -> dict[str, Any]:
    """All of the note but the step; `corpus` is what was learned in the place of tasks."""
    base = base_of(policy.model)
    if "revision" not in base and Path(base["model"]).is_dir():
        base["weights"] = weights_print(Path(base["model"]))
    licence = base_licence(base["model"], base.get("revision"))
    return {
        "schema": SCHEMA,
        "soulkit": __version__,
        "kind": "adapter" if is_peft(policy.model) else "model",
        "method": config.method,
        "protocol": config.protocol,
        "tasks": dict(config.tasks),
        **({"corpora": source_facts(config, corpus)} if corpus else {}),
        "base": {**base, "licence": licence},
        **({"adapter": _trained_further(config.adapter)} if config.adapter else {}),
    }


def _trained_further(name: str) -> dict[str, str]:
    place, folder = model_place(name, "adapter"), adapter_folder(name)
    commit = commit_of(folder)
    model = place.where if place.on_hub else str(folder.resolve())
    revision = {"revision": commit} if commit else {}
    return {"model": model, **revision, "weights": adapter_hash(folder)}
