"""What tests of tasks with lettered options share: conformance, forms of rows, lessons.

Under `reference` every line has to come out exactly. Under `paper` a line may come out differently
only where it carries a quirk that `paper` repairs, or where the answer was salvaged: a letter with
something around it, which the published parsers do not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.data.files import flatten
from soulkit.judge.leaks import check_leak
from soulkit.types import Completion, Episode, Failure, Feedback, Record, Score, unscored
from tests.support.road import score_text, synth_examples, task_of
from tests.support.vectors import Vector, assert_matches

REPAIRED = {
    "first-tag-wins": "the last tag decides",
    "unclosed-think-kept": "an answer inside unclosed thinking is none",
    "stray-think-close-kept": "what stands before a lone closing tag is thinking",
    "nested-think-tail-kept": "the outer block is thinking to its end",
    "think-tag-case-sensitive": "thinking tags are read in any case",
    "think-not-stripped": "an answer inside thinking is none",
    "negative-index-wraps": "a negative place of the gold is a bad row",
    "null-output-crash": "a reply without text is empty, and scores the minimum",
}
"""Quirk → what `paper` does instead."""


THINKING = dict.fromkeys(
    ("nested-think-tail-kept", "stray-think-close-kept", "think-tag-case-sensitive",
     "unclosed-think-kept"),
    "all thinking is removed",
)  # fmt: skip
"""Four of them in one, for tasks that name what they repair themselves."""


def released(row: Mapping[str, Any]) -> dict[str, Any]:
    """The flat row of a released one, whose `extra_info` is `row`."""
    return flatten({"prompt": [{"role": "user", "content": "x"}], "extra_info": dict(row)})


def reading(name: str, protocol: str, vector: Vector) -> dict[str, Any]:
    """What a task reads and pays for a vector's reply."""
    task = task_of(name, protocol)
    example = task.example(released(vector.input["row"]))
    score = score_text(task, example, vector.input["output_text"] or "")
    gold = task.gold_letter(example)
    return {"predicted": score.words or None, "reward": score.reward, "status": score.status,
            "correct_letter": gold}  # fmt: skip


def logged(name: str, vector: Vector, score: Score) -> dict[str, Any]:
    """The metrics of a reply under the reference's names, one of them an older name for another."""
    words = len((vector.input["output_text"] or "").split())
    older = "all/score_v1" if "all/score_v1" in vector.expected["metrics"] else "all/score"
    return {f"{name}/reward": score.reward, f"{name}/response_length": words,
            "all/score": score.value, older: score.value}  # fmt: skip


def assert_reference(actual: Mapping[str, Any], vector: Vector, task: str) -> None:
    """The reading, the reward, and every metric that is one of the two."""
    rewards = {f"{task}/reward", "all/score", "all/score_v1"}
    paid = {k: v for k, v in vector.expected["metrics"].items() if k in rewards}
    expected = {k: v for k, v in vector.expected.items() if k in actual and k != "metrics"}
    assert_matches({k: actual[k] for k in expected}, expected)
    assert paid and all(value == actual["reward"] for value in paid.values())


def assert_paper(actual: Mapping[str, Any], vector: Vector) -> None:
    """As the reference, or named above why not."""
    same = all(actual[k] == vector.expected[k] for k in ("predicted", "reward"))
    if not same:
        salvaged = actual["status"] == "salvaged" and vector.expected["predicted"] is None
        assert salvaged or set(vector.quirks) & set(REPAIRED), vector.note


# -- lessons and batches -------------------------------------------------------------------------


def draft_of(task: Any, example: Any, letter: str) -> Any:
    """The episode of a draft that answers `letter`, as the task records it."""
    completion = Completion(text=f"<answer>{letter}</answer>")
    return task._episode(example, task.context(example, None), completion, 0, "draft")


def assert_lessons_keep_quiet(name: str, n: int) -> None:
    """Every draft of every made row, however it went, earns a lesson that gives nothing away."""
    task = task_of(name)
    for example in synth_examples(name, n):
        view = task.leak_view(example)
        drafts = [f"<answer>{letter}</answer>" for letter in view.letters]
        scores = [
            score_text(task, example, text) for text in (*drafts, "hm", "", "<answer>?</answer>")
        ]
        scores.append(score_text(task, example, "so", "length"))
        for score in (*scores, None):
            text = task.explain(example, None, score)
            assert text, (example.fields, score)
            feedback = check_leak(Feedback(text=text, author="symbolic"), view)
            assert feedback.leak == "" and feedback.blind <= feedback.chance, text


def record(
    example: str, value: float | None, *, cluster: str = "", kind: Any = "draft", **tags: str
) -> Record:
    """A record of one scored play, or of an unscored one."""
    score = (
        unscored(Failure("provider_error")) if value is None else Score(value=value, reward=value)
    )
    return Record(
        key=f"{example}/{kind}", task="t", example_id=example, rollout=0, kind=kind,
        episode=Episode(example_id=example, task="t"), score=score, cluster=cluster, tags=tags,
    )  # fmt: skip
