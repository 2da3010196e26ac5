"""Helpers for tests of distillation: a small base, untrained experts, commands."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from soulkit.distill.config import DistillConfig
from soulkit.models.local.tiny import build_tiny
from tests.support.road import synth_rows

TASKS = ("secret_keeper", "tomi")


def small_base(folder: Path, seed: int = 0, words: Sequence[str] = ()) -> Path:
    """A model with random weights whose vocabulary covers some rows."""
    texts = [
        json.dumps(dict(row.fields)) for t in TASKS for row in synth_rows(t, "synth:6", 0, "test")
    ]
    return build_tiny(folder, [*texts, *words], seed=seed)


def save_expert(folder: Path, base: Path, *tasks: str, **settings: Any) -> Path:
    """Save an adapter on `base` in the form in which a training on `tasks` saves it."""
    from soulkit.train.state.model_card import model_note
    from tests.support.training import config, policy_of

    plain = config(tasks=dict.fromkeys(tasks, 1.0), lora={"r": 2, "alpha": 4}, **settings)
    policy = policy_of(base, lora={"r": 2, "alpha": 4}, **settings)
    policy.note = model_note(plain, policy)
    policy.save(folder, 3)
    return folder


def distillation(experts: Path | dict[str, str], **settings: Any) -> DistillConfig:
    named = experts if isinstance(experts, dict) else str(experts)
    return DistillConfig.model_validate(
        {"experts": named, "device": "cpu", "threads": 1, **settings}
    )


def change_note(folder: Path, **entries: Any) -> None:
    """Change entries of `soulkit.json`; None removes an entry."""
    path = folder / "soulkit.json"
    note = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({k: v for k, v in note.items() if v is not None}))


# -- processes that may be killed ------------------------------------------------------------------


def gather_once(settings: dict[str, Any], out: str, stages: Sequence[str]) -> None:
    """Sample and select in a separate process."""
    from soulkit.distill.experts import find_experts
    from soulkit.distill.sample import sample
    from soulkit.distill.select import select_samples

    config = DistillConfig.model_validate(settings)
    experts = find_experts(config)
    if "sample" in stages:
        sample(config, experts, Path(out))
    if "select" in stages:
        select_samples(config, experts, Path(out))


def killed_after(
    context: Any, settings: dict[str, Any], out: Path, *stages: str, growing: Sequence[Path] = (),
    events: int = 0, delay: float = 0.0, target: Callable[..., None] = gather_once,
) -> bool:  # fmt: skip
    """Start the stages and kill them `delay` seconds after the files in `growing` have been seen to
    change `events` times; False when they had ended by then."""
    process = context.Process(target=target, args=(settings, str(out), stages))
    process.start()
    before = sizes(growing)
    while process.is_alive() and events:
        now = sizes(growing)
        events -= now != before
        before = now
        time.sleep(0.002)
    process.join(delay)
    if process.exitcode is None:
        os.kill(process.pid, signal.SIGKILL)
    process.join(600)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return bool(process.exitcode)


def sizes(paths: Sequence[Path]) -> list[int]:
    return [path.stat().st_size if path.exists() else 0 for path in paths]
