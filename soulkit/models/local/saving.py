"""Writing a model or an adapter so that others can load it: another folder, user or library.

The folder holds what PEFT and transformers need (weights, configuration, tokenizer with its chat
template) and `soulkit.json`, which says what the weights were trained on. An adapter names its base
by hub id and commit, or by an absolute path.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soulkit.models.local.loading import ADAPTER
from soulkit.models.local.names import NOTE
from soulkit.models.local.weights import ADAPTER_FILE
from soulkit.runs.jsonl import write_json


def save_model(
    model: Any, tokenizer: Any, folder: Path, note: Mapping[str, Any] | None = None
) -> None:
    """The adapter of `model` (or, where it has none, all weights) with all it takes to use it."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_peft(model):
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)
    if note is not None:
        write_json(folder / NOTE, note)
    modes_by_umask(folder)


def is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def base_of(model: Any) -> dict[str, str]:
    """`model`: the hub's id or the absolute folder of the base; `revision`: the hub's commit."""
    base = model.get_base_model() if is_peft(model) else model
    name = str(base.config.name_or_path)
    if not name or Path(name).is_dir():
        return {"model": str(Path(name).resolve()) if name else ""}
    commit = getattr(base.config, "_commit_hash", None)
    return {"model": name, **({"revision": str(commit)} if commit else {})}


def save_adapter(model: Any, folder: Path) -> None:
    """Adapter files in `folder` itself: PEFT would put a named adapter into a folder below it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Linear layers alone are adapted; asking PEFT to find out would look the base up on the hub.
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[ADAPTER])
    if isinstance(config.target_modules, set):  # its order changes from process to process
        config.target_modules = sorted(config.target_modules)
    # An adapter that was trained further came with the base of whoever trained it first.
    base = base_of(model)
    config.base_model_name_or_path, config.revision = base["model"], base.get("revision")
    config.save_pretrained(folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # how the last batch was padded or cut would be saved as well
        fast.no_padding()
        fast.no_truncation()
    tokenizer.save_pretrained(folder)


def modes_by_umask(folder: Path) -> None:
    """Every file below `folder` is as readable as any new file here; safetensors writes 0600."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
