"""What a choice task says of an answer beside its value; answers in another form than asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from soulkit.eval.results.summary import summarise
from soulkit.tasks.tom.task import ToMi
from soulkit.types import Completion, Episode, Example, Record, Score
from tests.support.road import ROLLOUT, batch_values, score_text, synth, synth_examples, task_of


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
        ("<answer>'{gold}'</answer> and", "length", 0, "truncated", 0),
        ("<answer>somewhere else</answer>", "stop", 0, "ok", 2),
        ("It is there.", "stop", 0, "no_tag", 0),
        ("It is", "length", 0, "truncated", 0),
        ("", "stop", 0, "empty", 0),
    ],
)
def test_every_scored_reply_is_measured(
    text: str, stop: str, value: float, status: str, words: float
) -> None:
    scored = score(text, stop)
    assert (scored.value, scored.reward, scored.status) == (value, value, status)
    assert scored.metrics == {"words": words, "age": None}


def test_the_summary_counts_how_answers_could_be_read() -> None:
    texts = ("<answer>{gold}</answer>", "<answer>'{gold}'</answer>", "no tag", "none")
    records = [
        Record(key=str(i), task="tomi", example_id=str(i), rollout=0, kind="draft",
               episode=Episode(example_id=str(i), task="tomi"), score=score(text))
        for i, text in enumerate(texts)
    ]  # fmt: skip
    summary = summarise(records, command="eval", model="x", protocol="paper", seconds=1, cost=None)
    assert summary.statuses == {"tomi": {"no_tag": 2, "ok": 1, "salvaged": 1}}
    assert summary.tasks["tomi"]["words"].mean == 0.5
    assert summary.tasks["tomi"]["age"].n_scored == 0


@pytest.mark.parametrize("name", ["hitom", "alignx_demo", "mistakes", "socsci210", "fantom"])
def test_what_is_summed_up_over_a_batch_is_of_drafts(name: str) -> None:
    """A training run also has refined episodes; feedback made them another quantity."""
    task = task_of(name)
    examples = [e for row in synth(name, 40, 2) for e in task.examples(row)]
    drafts = [recorded(task, e, "draft", task.gold_completion(e)) for e in examples]
    refined = [recorded(task, e, "refined", task.wrong_completion(e)) for e in examples]
    of_drafts = batch_values(task, drafts)
    assert of_drafts and batch_values(task, [*refined, *drafts]) == of_drafts
    assert batch_values(task, refined) != of_drafts, "without a draft, of what there is"


def recorded(task: Any, example: Example, kind: Any, text: str) -> Record:
    episode = task._episode(example, task.context(example, None), Completion(text=text), 0, kind)
    return Record(
        key=f"{example.id}/{kind}", task=task.name, example_id=example.id, rollout=0, kind=kind,
        episode=episode, score=score_text(task, example, text), cluster=example.cluster,
        tags=example.tags, gold=task.gold_text(example),
    )  # fmt: skip


def test_every_random_choice_has_a_stream_of_its_own() -> None:
    one, two = synth_examples("tomi", 2)
    assert ROLLOUT.rng(one, "x").random() == ROLLOUT.rng(one, "x").random()
    streams = {ROLLOUT.rng(e, p).random() for e in (one, two) for p in ("x", "y")}
    assert len(streams | {replace(ROLLOUT, index=1).rng(one, "x").random()}) == 5
