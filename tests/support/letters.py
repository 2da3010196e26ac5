"""Helpers for tests of choice tasks: row formats, metrics of the reference, lessons, records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.data.files import flatten
from soulkit.types import Completion, Episode, Failure, Record, Score, unscored
from tests.support.vectors import Vector

THINKING = dict.fromkeys(
    ("nested-think-tail-kept", "stray-think-close-kept", "think-tag-case-sensitive",
     "unclosed-think-kept"),
    "all thinking is removed",
)  # fmt: skip
"""Four of them in one, for tasks that name what they repair themselves."""


def released(row: Mapping[str, Any]) -> dict[str, Any]:
    """The flat row of a released row whose `extra_info` is `row`."""
    return flatten({"prompt": [{"role": "user", "content": "x"}], "extra_info": dict(row)})


def logged(name: str, vector: Vector, score: Score) -> dict[str, Any]:
    """The metrics of a reply under the reference's names; two of them are the same metric."""
    words = len((vector.input["output_text"] or "").split())
    older = "all/score_v1" if "all/score_v1" in vector.expected["metrics"] else "all/score"
    return {f"{name}/reward": score.reward, f"{name}/response_length": words,
            "all/score": score.value, older: score.value}  # fmt: skip


# -- lessons and batches -------------------------------------------------------------------------


def draft_of(task: Any, example: Any, letter: str) -> Any:
    """The episode of a draft that answers `letter`."""
    completion = Completion(text=f"<answer>{letter}</answer>")
    return task._episode(example, task.context(example, None), completion, 0, "draft")


def record(
    example: str, value: float | None, *, cluster: str = "", kind: Any = "draft", **tags: str
) -> Record:
    """A record of a scored or unscored episode."""
    score = (
        unscored(Failure("provider_error")) if value is None else Score(value=value, reward=value)
    )
    return Record(
        key=f"{example}/{kind}", task="t", example_id=example, rollout=0, kind=kind,
        episode=Episode(example_id=example, task="t"), score=score, cluster=cluster, tags=tags,
    )  # fmt: skip
