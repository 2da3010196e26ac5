"""Every expert answers the training prompts of its task: an evaluation run on training rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from soulkit.distill.config import SAMPLES, DistillConfig
from soulkit.distill.experts import Expert
from soulkit.eval.config import EvalConfig
from soulkit.eval.runner import EvalBars, Waiting
from soulkit.play.costs import AskUser


def samples_folder(out: Path, task: str) -> Path:
    """The run with the samples of a task's expert."""
    return out / SAMPLES / task


def sample_config(config: DistillConfig, expert: Expert) -> EvalConfig:
    """The evaluation that samples an expert: its training rows, `samples` times each."""
    raise NotImplementedError


def sample(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *,
    bars: EvalBars | None = None, say: Callable[[str], None] | None = None,
    ask: AskUser | None = None, waiting: Waiting | None = None,
) -> None:  # fmt: skip
    """Play what `out/samples` lacks, one expert after the other; finished runs are not loaded.

    Raises a UserError before anything is played where rows, experts or players are not in order,
    or training rows overlap evaluation rows.
    """
    raise NotImplementedError
