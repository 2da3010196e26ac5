"""The choice rows on which engines are compared, and what a run said to each."""

from __future__ import annotations

from pathlib import Path

from soulkit.types import Completion
from tests.support.evaluation import records, soul

CHOICE_TASKS = ("tomi", "paratomi", "hitom", "social_r1")
ROWS = 50
"""Of each task: 200 in all."""
TOKENS = 12


def evaluated(out: Path, model: Path, engine: str, *arguments: object, rows: int = ROWS) -> Path:
    """A finished run of the choice rows. Untrained, the model hardly ever ends a reply."""
    tasks = ("--task", ",".join(CHOICE_TASKS), "--data", f"synth:{rows}")
    terms = ("--max-tokens", TOKENS, "--max-unscored", 1)
    code = soul(
        "eval", "local", "--model", model, "--engine", engine, "--out", out, *tasks, *terms,
        *arguments,
    )  # fmt: skip
    assert code == 0
    return out


def replies(out: Path) -> dict[str, Completion]:
    """Row → what was said to it, with ids and log-probs."""
    return {
        f"{record.episode.task}/{record.key}": record.episode.traces[0].turns[-1].completion
        for record in records(out)
    }
