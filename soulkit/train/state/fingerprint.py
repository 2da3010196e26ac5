"""What a run trains on, in a few hashes: a resume with other rows or another model is refused.

`material.json` is written when a run starts. The settings alone do not tell: a data file may have
new rows and a model folder new weights under their old names. Rows are hashed by their ids and
by their prompts as the actor reads them; a model by its settings, and by the name, shape, number
type and an evenly spread sample of every tensor. (A change that misses every
sampled value passes; another checkpoint of the same model does not.) Equal bits need equal
arithmetic, too, so a deterministic run also keeps the device, threads and torch it was started on.
`provenance.json` says who plays, on which rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from soulkit.errors import RunError
from soulkit.eval.run.provenance import actor_identity, model_identity, provenance
from soulkit.models.local.chat_template import tokenizer_hash
from soulkit.models.local.loading import ADAPTER_CONFIG, adapter_folder, adapter_hash
from soulkit.models.players.players import Players
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import write_json
from soulkit.text import join_and
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.planning import work_of
from soulkit.train.setup.conversations import corpus_prints
from soulkit.train.setup.rows import TaskRows, TrainingData
from soulkit.types import Sampling

MATERIAL = "material.json"
SAMPLED = 4093
"""Values of a tensor that are hashed. A prime, so that no width of a matrix divides the stride."""

Prints = dict[str, Any]


def fingerprint(
    config: TrainConfig, material: TrainingData, policy: Policy, teacher: Policy | None
) -> Prints:
    """Hashes of everything a resume has to find as it was; taken before the weights move."""
    return {
        "training": pool_print(material.pool),
        "dev": pool_print(material.dev),
        **(corpus_prints(material.corpus) if material.corpus else {}),
        "model": model_print(policy),
        "adapter": _adapter(config.adapter),
        "teacher": None if teacher is None else model_print(teacher),
        "teacher_adapter": _adapter(config.teacher_adapter),
        "teacher_adapters": {t: _adapter(a) for t, a in config.teacher_adapters.items()},
        "machine": machine_print(policy.device) if config.deterministic else None,
    }


def pool_print(pool: TaskRows) -> dict[str, dict[str, Any]]:
    """Task → number of rows, hash of their ids, hash of their prompts; in the pool's order."""
    ids: dict[str, list[str]] = {}
    prompts: dict[str, list[list[str | None]]] = {}
    for task, example in pool:
        ids.setdefault(task.name, []).append(example.id)
        contexts = task.previews(example).values()
        shown = [text for c in contexts for s in c for text in (s.role, s.text, s.bare)]
        prompts.setdefault(task.name, []).append(shown)
    return {
        name: {"rows": len(ids_of_task), "ids": _hash(ids_of_task), "prompts": _hash(prompts[name])}
        for name, ids_of_task in ids.items()
    }


def model_print(policy: Policy) -> dict[str, str]:
    """Hashes of a model without its adapter: layout, number types, values, settings, tokenizer,
    template."""
    tensors = dict(_base_tensors(policy.model))
    values = hashlib.sha256()
    for name, tensor in tensors.items():
        values.update(name.encode())
        values.update(_sample(tensor))
    return {
        "layout": _hash([[name, list(t.shape)] for name, t in tensors.items()]),
        "types": _hash([[name, str(t.dtype)] for name, t in tensors.items()]),
        "weights": values.hexdigest()[:16],
        "settings": _hash(_settings(policy.causal)),
        "tokenizer": tokenizer_hash(policy.tokenizer),
        "template": _hash(policy.tokenizer.chat_template),
    }


def _base_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the frozen base under their own names, in the order of these."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if ".lora_" not in plain:
            tensors[plain] = tensor
    yield from sorted(tensors.items())


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    if len(flat) > SAMPLED:
        picked = torch.arange(SAMPLED, device=flat.device) * len(flat) // SAMPLED
        flat = flat[picked]
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


_NOT_ARITHMETIC = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


def _settings(model: Any) -> dict[str, Any]:
    """What a model's own files say about its arithmetic, and about where a reply ends.

    Equal weights compute other numbers with another base of their rotary positions, say.
    """
    settings = json.loads(model.config.to_json_string(use_diff=True))
    ends = getattr(model.generation_config, "eos_token_id", None)
    return {**{k: v for k, v in settings.items() if k not in _NOT_ARITHMETIC}, "ends": ends}


def _adapter(name: str | None) -> str | None:
    if name is None:
        return None
    folder = adapter_folder(name)
    scale = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return _hash([adapter_hash(folder), scale])


def machine_print(device: torch.device) -> dict[str, Any]:
    """What the last bit of a sum depends on."""
    cpu = device.type == "cpu"
    return {
        "threads": torch.get_num_threads(),
        "device": device.type if cpu else torch.cuda.get_device_name(device),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
    }


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- the same run? --------------------------------------------------------------------------------


def check_material(run: Run, now: Prints, config: TrainConfig) -> None:
    """Keep `now` in a new run; RunError when a resumed one was started on something else."""
    path = run.path / MATERIAL
    if not path.exists() and not any(run.checkpoints.glob("*")):
        write_json(path, now)
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{run.path} does not say on which rows and which model it was started.",
            f"{MATERIAL} is missing or damaged, so nobody can tell whether they are the same.",
            "Bring the file back, or give another folder with --out.",
        ) from error
    for refusal in _differences(before, now, config):
        raise refusal


def _differences(before: Prints, now: Prints, config: TrainConfig) -> Iterator[RunError]:
    for kind in ("training", "dev"):
        yield from _other_rows(kind, before[kind], now[kind])
    yield from _other_model("base model", config.model, before["model"], now["model"])
    yield from _other_adapter("adapter", config.adapter, before["adapter"], now["adapter"])
    teacher = config.teacher_model or config.model
    yield from _other_model("teacher", teacher, before["teacher"], now["teacher"])
    yield from _other_adapter(
        "teacher's adapter", config.teacher_adapter, before["teacher_adapter"],
        now["teacher_adapter"],
    )  # fmt: skip
    # Runs from before tasks could have teachers of their own do not have the entry.
    experts = before.get("teacher_adapters", {}), now.get("teacher_adapters", {})
    for task, adapter in config.teacher_adapters.items():
        yield from _other_adapter(f"teacher of {task},", adapter, *(e.get(task) for e in experts))
    yield from _other_machine(before["machine"] or {}, now["machine"] or {})


def _other_rows(kind: str, before: Prints, now: Prints) -> Iterator[RunError]:
    for task in sorted({*before, *now}):
        was, current = before.get(task, {}), now.get(task, {})
        if was == current:
            continue
        counts = was.get("rows", 0), current.get("rows", 0)
        if counts[0] != counts[1]:
            what = f"had {counts[0]} {kind} rows when this run was started, and has {counts[1]} now"
        elif was["ids"] != current["ids"]:
            what = f"has {counts[1]} {kind} rows as before, but they are others"
        else:
            what = f"puts its {kind} rows into other prompts than when this run was started"
        yield RunError(
            f"Task '{task}' {what}.",
            "The steps to come would not be those of this run, and its numbers would mix two.",
            "Bring the old data file or prompt template back, or give another folder with --out.",
        )


_PARTS = {
    "layout": "shape",
    "types": "number type",
    "weights": "set of weights",
    "settings": "configuration",
    "tokenizer": "tokenizer",
    "template": "chat template",
}


def _other_model(
    role: str, name: str, before: Prints | None, now: Prints | None
) -> Iterator[RunError]:
    differ = [
        text for key, text in _PARTS.items() if (before or {}).get(key) != (now or {}).get(key)
    ]
    if differ:
        yield RunError(
            f"The {role} '{name}' is not the one that this run was started with: it has another "
            f"{join_and(differ)}.",
            "What was learned so far belongs to the old one.",
            "Bring the old one back under this name, or give another folder with --out.",
        )


def _other_adapter(
    role: str, name: str | None, before: str | None, now: str | None
) -> Iterator[RunError]:
    if before != now:
        yield RunError(
            f"The {role} '{name}' holds other weights than when this run was started.",
            "What was learned so far belongs to the old ones.",
            "Bring the old files back, or give another folder with --out.",
        )


def _other_machine(before: Prints, now: Prints) -> Iterator[RunError]:
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            hint = f"Add --threads {before.get(key)}" if key == "threads" else "Go back to it"
            yield RunError(
                f"This deterministic run was started with {key} {before.get(key)}, "
                f"and now it is {now.get(key)}.",
                "Sums come out different in the last bit, and the run promises equal bits.",
                f"{hint}, or begin another run with --out.",
            )


# --- equal bits -----------------------------------------------------------------------------------


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Within it torch uses kernels that give equal bits every time; RuntimeError by torch for an
    operation that has none. With `on` False nothing is changed."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    with _variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8"):  # read when CUDA makes its first handle
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable unless the user did."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def training_provenance(
    config: TrainConfig, players: Players, material: TrainingData, policy: Policy
) -> dict[str, Any]:
    """The provenance of a run: players, rows, limits, and the weights that it starts from."""
    limits = {name: config.reply_limit(task.spec.sampling) for name, task in material.tasks.items()}
    sampling = {
        name: Sampling(temperature=config.temperature, max_tokens=limit, thinking=config.thinking)
        for name, limit in limits.items()
    }
    actor = actor_identity(config.model_dump())
    record = provenance(config, players, work_of(material), actor, sampling)
    suite = {"suite": config.suite, "left_out": dict(material.left_out)} if config.suite else {}
    return {"actor": model_identity(config.model_dump(), policy), **record, **suite}
