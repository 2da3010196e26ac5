"""What a choice task says of an answer beside its value; answers in another form than asked."""

from __future__ import annotations

import pytest
from road_support import score_text, synth_examples, task_of

from soulkit.eval.summary import summarise
from soulkit.tasks.tomi import ToMi
from soulkit.types import Episode, Example, Record, Score


class Measured(ToMi):
    """ToMi that also says how long an answer is, and takes quoted ones as salvaged."""

    def parse(self, text: str) -> tuple[str, str]:
        answer, status = super().parse(text)
        bare = answer.strip("'")
        return bare, "salvaged" if status == "ok" and bare != answer else status

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        return {"words": float(len(answer.split())), "age": None}


def score(text: str, stop: str = "stop") -> Score:
    task = Measured("tomi", task_of("tomi").spec)
    example = synth_examples("tomi", 1)[0]
    return score_text(task, example, text.format(gold=example.fields["answer"]), stop)


@pytest.mark.parametrize(
    ("text", "stop", "value", "status", "words"),
    [
        ("<answer>{gold}</answer>", "stop", 1, "ok", 1),
        ("<answer>'{gold}'</answer>", "stop", 1, "salvaged", 1),
        ("<answer>'{gold}'</answer> and", "length", 1, "salvaged", 1),
        ("<answer>somewhere else</answer>", "stop", 0, "ok", 2),
        ("It is there.", "stop", 0, "no_tag", 0),
        ("It is", "length", 0, "truncated", 0),
        ("", "stop", 0, "empty", 0),
    ],
)
def test_every_scored_reply_is_measured(
    text: str, stop: str, value: float, status: str, words: float
) -> None:
    found = score(text, stop)
    assert (found.value, found.reward, found.status) == (value, value, status)
    assert found.metrics == {"words": words, "age": None}


def test_the_summary_counts_how_answers_could_be_read() -> None:
    texts = ("<answer>{gold}</answer>", "<answer>'{gold}'</answer>", "no tag", "none")
    records = [
        Record(key=str(i), task="tomi", example_id=str(i), rollout=0, kind="draft",
               episode=Episode(example_id=str(i), task="tomi"), score=score(text))
        for i, text in enumerate(texts)
    ]  # fmt: skip
    found = summarise(records, command="eval", model="x", protocol="paper", seconds=1, cost=None)
    assert found["statuses"] == {"tomi": {"no_tag": 2, "ok": 1, "salvaged": 1}}
    assert found["tasks"]["tomi"]["words"]["mean"] == 0.5
    assert found["tasks"]["tomi"]["age"]["n_scored"] == 0
