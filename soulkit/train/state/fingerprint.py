"""Hashes of a run's rows and models: a resume with other rows or another model is refused.

Settings are not enough, because the content of a data file or model folder may change. Rows are
hashed by content and by their prompts; a model by its settings and by the name, shape, dtype and an
evenly spread sample of every tensor, which detects another checkpoint of the same model. For
identical bits, a deterministic run also records device, threads and torch version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from soulkit.errors import RunError
from soulkit.eval.run.provenance import (
    actor_facts,
    model_facts,
    played_conditions,
    row_hashes,
    row_origin,
)
from soulkit.models.local.chat_template import tokenizer_hash
from soulkit.models.local.loading import ADAPTER_CONFIG, adapter_folder, adapter_hash
from soulkit.models.players.players import Players
from soulkit.runs.conditions import CONDITIONS, Conditions, MaterialFacts, TaskFacts
from soulkit.runs.folder import Run
from soulkit.tasks.kit.base import Task
from soulkit.text import join_and
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.planning import work_of
from soulkit.train.ranks.sharding import whole
from soulkit.train.ranks.world import on_all_ranks, ranks
from soulkit.train.setup.rows import TrainingData, corpus_facts
from soulkit.train.sft.exposure import canary_facts, canary_lists
from soulkit.types import Example, Sampling

SAMPLED = 4093
"""Number of hashed values per tensor. A prime, so that matrix widths do not divide the stride."""


def material_conditions(
    config: TrainConfig, material: TrainingData, policy: Policy, teacher: Policy | None
) -> Conditions:
    """Hashes of rows, models and machine that a resume must match, taken before the first update.
    Players are added later (`with_players`)."""
    tasks: dict[str, TaskFacts] = {}
    for name, task in material.tasks.items():
        rows, dev = ({row.id: row for one, row in pool if one.name == name}.values()
                     for pool in (material.pool, material.dev))  # fmt: skip
        taken = sum(one.name == name for one, _ in material.pool)
        tasks[name] = TaskFacts(
            rows=row_hashes(rows), prompts=prompts_hash(task, rows),
            taken=taken if taken > len(rows) else 0,
            dev_rows=row_hashes(dev), dev_prompts=prompts_hash(task, dev),
            origins=dict(Counter(row_origin(task, row) for row in dev)),
        )  # fmt: skip
    facts = MaterialFacts(
        model=model_print(policy),
        numbers={"stored": policy.stored, "computed": policy.computed},
        adapter=_adapter(config.adapter),
        teacher=None if teacher is None else model_print(teacher),
        teacher_adapter=_adapter(config.teacher_adapter),
        teacher_adapters={t: _adapter(a) for t, a in config.teacher_adapters.items()},
        machine=machine_print(policy.device) if config.deterministic else None,
        canaries={str(path): canary_facts(path) for path in canary_lists(config)},
        **(corpus_facts(material.corpus) if material.corpus else {}),
    )
    return Conditions(players={}, tasks=tasks, material=facts)


def prompts_hash(task: Task, rows: Iterable[Example]) -> str:
    """Hash of the prompts of rows as the actor reads them, in order."""
    shown = [
        [text for context in task.previews(row).values() for s in context
         for text in (s.role, s.text, s.bare)]
        for row in rows
    ]  # fmt: skip
    return _hash(shown) if shown else ""


@on_all_ranks
def model_print(policy: Policy) -> dict[str, str]:
    """Hashes of a model without its adapter: layout, dtypes, values, settings, tokenizer,
    template."""
    tensors = dict(_base_tensors(policy.model))
    values = hashlib.sha256()
    for name, tensor in tensors.items():
        values.update(name.encode())
        values.update(_sample(whole(tensor)))
    return {
        "layout": _hash([[name, list(t.shape)] for name, t in tensors.items()]),
        "types": _hash([[name, str(t.dtype)] for name, t in tensors.items()]),
        "weights": values.hexdigest()[:16],
        "settings": _hash(_settings(policy.causal)),
        "tokenizer": tokenizer_hash(policy.tokenizer),
        "template": _hash(policy.tokenizer.chat_template),
    }


def _base_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
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
    """Settings from a model's files that affect its arithmetic or the end of replies."""
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
    """Properties of the machine, and of the job, that affect the last bits of results."""
    cpu, size = device.type == "cpu", ranks().size
    return {
        **({"ranks": size} if size > 1 else {}),
        "threads": torch.get_num_threads(),
        "device": device.type if cpu else torch.cuda.get_device_name(device),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
    }


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- comparing ------------------------------------------------------------------------------------


def check_material(run: Run, now: Conditions, config: TrainConfig) -> None:
    """Record `now` in a new run; RunError if a resumed run has other rows, models or machine."""
    before = Conditions.read(run.path)
    if before is None and not any(run.checkpoints.glob("*")):
        now.write(run.path)
        return
    if before is None or before.material is None:
        raise RunError(
            f"{run.path} does not record its rows and model.",
            f"{CONDITIONS} is missing or incomplete, so soul cannot check that they are unchanged.",
            "Restore the file, or use another --out.",
        )
    for what in _changes(before, now, config):
        raise RunError(
            f"{what}.",
            "A resume needs the same rows and models as at the start.",
            "Undo the change, or use another --out.",
        )


def _changes(before: Conditions, now: Conditions, config: TrainConfig) -> Iterator[str]:
    for kind in ("training", "dev"):
        old_rows, rows = _rows(before, kind), _rows(now, kind)
        for task in sorted({*old_rows, *rows}):
            none: Rows = (0, "", "")
            yield from _other_rows(task, kind, old_rows.get(task, none), rows.get(task, none))
    old, new = before.material or MaterialFacts(), now.material or MaterialFacts()
    teacher = config.teacher_model or config.model
    yield from _other_model("base model", config.model, old.model, new.model)
    yield from _other_model("teacher", teacher, old.teacher or {}, new.teacher or {})
    adapters = [("adapter", config.adapter, old.adapter, new.adapter),
                ("teacher's adapter", config.teacher_adapter, old.teacher_adapter,
                 new.teacher_adapter)]  # fmt: skip
    for task, adapter in config.teacher_adapters.items():
        first, second = (facts.teacher_adapters.get(task) for facts in (old, new))
        adapters.append((f"teacher of {task},", adapter, first, second))
    for role, name, first, second in adapters:
        if first != second:
            yield f"The weights of the {role} '{name}' have changed since this run was started"
    alone, options = {"ranks": 1}, {"ranks": "gpus", "threads": "threads"}
    was, machine = {**alone, **(old.machine or {})}, {**alone, **(new.machine or {})}
    for key in sorted({*was, *machine}):
        if was.get(key) != machine.get(key):
            hint = f" (--{options[key]} {was.get(key)})" if key in options else ""
            yield (f"This deterministic run was started with {key} {was.get(key)}{hint}, but now "
                   f"it is {machine.get(key)}")  # fmt: skip


Rows = tuple[int | None, object, str]
"""(number of rows, ids or hash in order, hash of their prompts) of a task or source."""


def _rows(conditions: Conditions, kind: str) -> dict[str, Rows]:
    dev, material = kind == "dev", conditions.material or MaterialFacts()
    corpora = material.validation if dev else material.corpora
    found: dict[str, Rows] = {name: (one.rows, one.sha256, "") for name, one in corpora.items()}
    for name, task in conditions.tasks.items():
        if rows := task.dev_rows if dev else task.rows:
            found[name] = len(rows), [*rows.items()], task.dev_prompts if dev else task.prompts
    return found


def _other_rows(task: str, kind: str, before: Rows, now: Rows) -> Iterator[str]:
    if before[0] != now[0]:
        yield (f"'{task}' had {before[0]} {kind} rows when this run was started, and has "
               f"{now[0]} now")  # fmt: skip
    elif before[1] != now[1]:
        yield f"'{task}' still has {now[0]} {kind} rows, but not the same ones"
    elif before[2] != now[2]:
        yield (f"The prompts of the {kind} rows of task '{task}' have changed since this run was "
               "started")  # fmt: skip


def _other_model(
    role: str, name: str, before: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[str]:
    differ = [text for key, text in _PARTS.items() if before.get(key) != now.get(key)]
    if differ:
        yield (f"The {role} '{name}' has changed since this run was started: it has a different "
               f"{join_and(differ)}")  # fmt: skip


_PARTS = {
    "layout": "shape", "types": "dtype", "weights": "set of weights",
    "settings": "configuration", "tokenizer": "tokenizer", "template": "chat template",
}  # fmt: skip


# --- equal bits -----------------------------------------------------------------------------------


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Context in which torch uses deterministic kernels; torch raises RuntimeError for operations
    without one. With `on` False nothing changes."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    name = "CUBLAS_WORKSPACE_CONFIG"  # read by the first CUDA handle
    unset = name not in os.environ
    os.environ.setdefault(name, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        if unset:
            os.environ.pop(name, None)


def with_players(
    run: Run, config: TrainConfig, players: Players, material: TrainingData, policy: Policy
) -> Conditions:
    """The recorded conditions of `run`, with players, limits and initial weights added."""
    begun = Conditions.read(run.path) or Conditions(players={}, tasks={})
    sampling = {
        name: Sampling(temperature=config.temperature, thinking=config.thinking,
                       max_tokens=config.reply_limit(task.spec.sampling))
        for name, task in material.tasks.items()
    }  # fmt: skip
    actor = actor_facts(config.model_dump())
    played = played_conditions(config, players, work_of(material), actor, sampling)
    rows = ("rows", "taken", "prompts", "dev_rows", "dev_prompts", "origins")
    tasks = {
        name: replace(facts, **{one: getattr(begun.of_task(name), one) for one in rows})
        for name, facts in played.tasks.items()
    }
    return replace(
        played,
        actor=model_facts(config.model_dump(), policy),
        tasks={**begun.tasks, **tasks},
        material=begun.material,
        suite=config.suite or "",
        left_out=material.left_out if config.suite else {},
    )
