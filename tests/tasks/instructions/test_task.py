"""The forty instructions: every gold keeps to its own, and one missed check costs the row."""

from __future__ import annotations

import asyncio

import pytest

from soulkit.cli.app import main
from soulkit.tasks.instructions.checks import unmet
from soulkit.tasks.loading import examples_from
from soulkit.tasks.registry import load_registry
from soulkit.tasks.selfcheck import check_task, nobody
from soulkit.types import Completion, Episode, Example, Line, Score, Trace, Turn
from tests.support.road import synth, task_of

NAME = "instructions"


def scored(example: Example, reply: str, stop: str = "stop") -> Score:
    task = task_of(NAME)
    completion = Completion(text=reply, stop_reason=stop)
    trace = Trace("writer", (Turn(task.preview(example), completion),))
    episode = Episode(
        example_id=example.id, task=NAME, kind="draft", rollout=0, traces=(trace,),
        transcript=(Line("writer", reply),), stop=stop,
    )  # fmt: skip
    return asyncio.run(task.judged(example, episode, nobody()))


def test_the_forty_are_the_same_whatever_seed_and_split() -> None:
    task = task_of(NAME)
    ids = {example.id for example in examples_from(task, "synth:40", 0).examples}
    assert len(ids) == 40
    for number, seed in ((40, 7), (1000, 0)):
        assert {e.id for e in examples_from(task, f"synth:{number}", seed).examples} == ids
    assert synth(NAME, 5, 3) == synth(NAME, 40, 3)[:5]


def test_every_gold_keeps_to_its_instruction_and_no_wrong_one_does() -> None:
    task = task_of(NAME)
    check = check_task(task, examples_from(task, "synth:40", 0), "synth:40")
    assert check.rows == 40 and check.passed
    assert not (check.wrong_passes or check.wrong_unread or check.no_gold or check.no_wrong)
    assert not (check.unscored or check.warnings or check.unrendered or check.bad)


def test_one_missed_check_costs_the_row_and_is_named() -> None:
    task = task_of(NAME)
    row = next(r for r in synth(NAME, 40, 0) if r["instruction"].startswith("Write a note"))
    example = task.example(row)
    whole = scored(example, row["reply"])
    assert (whole.value, whole.metrics["checks"], whole.words, whole.status) == (1, 1, "", "ok")
    missed = scored(example, row["reply"].replace("ladder", "saw"))
    assert (missed.value, missed.metrics["checks"], missed.words) == (0, 0.5, "contains")


TRIED = [
    ("Write a warning sign", ["WET FLOOR!"], ["Wet floor", "CAREFUL"]),
    ("List exactly five", ["- a\r\n- b\r\n- c\r\n- d\r\n- e\r\n\r\n"],
     ["* a\n* b\n* c\n* d\n* e", "Sure:\n- a\n- b\n- c\n- d\n- e"]),
    ("Name six different", ["Apple\nBanana\nCherry\nFig\nKiwi\nPear\n"],
     ["apple\n" * 6, "- apple\n- banana\n- cherry\n- fig\n- kiwi\n- pear"]),
    ("Give three reasons", ["Why?\n\n- a\n- b\n- c"], ["- a\n- b\n- c\nThat is why."]),
    ("Rank three ways", ["1. a\n2. b\n3. c\n\nThat is all."],
     ["So:\n1. a\n2. b\n3. That is all.", "1. a\n2. b\n3. c\nWell, that is all."]),
    ("Name the four seasons", ['["Spring", "Summer", "Fall", "Winter"]',
                               '```json\n["spring", "summer", "autumn", "winter"]\n```'],
     ['["a", "b", "c", "d"]', '["summer", "spring", "autumn", "winter"]']),
    ("Give the first five", ["[1,4,9,16,25]"], ["[25, 16, 9, 4, 1]", "[true, 4, 9, 16, 25]"]),
    ("A guest called Tom", ['{"nights": 2, "guest": "Tom", "day": "Friday"}'],
     ['{"guest": "Friday", "day": "Tom", "nights": 2}',
      '{"guest": "Tom 2", "day": "Friday", "nights": 3}']),
    ("Write one sentence of four", ["Six sun-burnt sailors slept."], ["So. So. So. So."]),
    ("Write a short notice", ["# Fleas!\n\nCome. Buy."], ["# Fleas\n\nCome. Buy. Leave."]),
    ("What might a ship's", ["“Land!”", '"Land!"'], ["Land!", "'Land!'"]),
    ("Compare a bicycle",
     ["| | bike | car |\n|---|---|---|\n| wheels | 2 | 4 |\n| fuel | no | yes |"],
     ["| | bike | car |\n|---|---|---|\n| wheels | 2 | 4 |"]),
    ("Interview a beekeeper", ["Why bees?\n\nWhen?\n\nHow many?"], ["Why? When? How?\nSo.\nYes."]),
]  # fmt: skip


@pytest.mark.parametrize(("begins", "good", "bad"), TRIED, ids=[row[0] for row in TRIED])
def test_what_keeps_to_an_instruction_counts_and_what_only_looks_like_it_does_not(
    begins: str, good: list[str], bad: list[str]
) -> None:
    row = next(r for r in synth(NAME, 40, 0) if r["instruction"].startswith(begins))
    assert [text for text in good if unmet(row["checks"], text)] == []
    assert [text for text in bad if not unmet(row["checks"], text)] == []


def test_replies_that_are_none_score_nothing_with_a_status() -> None:
    example = task_of(NAME).example(synth(NAME, 1, 0)[0])
    assert (scored(example, "").status, scored(example, "<think>a</think>").status) == (
        "empty", "empty",
    )  # fmt: skip
    cut = scored(example, synth(NAME, 1, 0)[0]["reply"], stop="length")
    assert (cut.value, cut.metrics["checks"], cut.status) == (0, 0, "truncated")
    thoughts = "<think>thirty words, then</think>\n" + synth(NAME, 1, 0)[0]["reply"]
    assert scored(example, thoughts).value == 1


def test_it_stands_in_no_mean_of_the_benchmarks_and_is_never_trained_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = load_registry()
    assert [name for name in registry.suites if NAME in registry.suite(name)] == ["general"]
    train = ["train", "sft", "--model", "tiny", "--full", "--task", NAME, "--data", "synth:40"]
    assert main([*train, "--dry-run"]) == 2
    assert NAME in capsys.readouterr().err
