"""What a task's own code raises is the row's `task_error`, with file and line; the run goes on."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soulkit.errors import ConfigError, PartnerError
from soulkit.eval.results.summary import summarise
from soulkit.models.base import Cast, Player
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.rewards import with_group_rewards
from soulkit.types import BatchMetric, Record, Score
from tests.play.test_engine import Voice, voice
from tests.support.evaluation import examples

TOMI = type(load_registry().task("tomi"))
HERE = Path(__file__).name


def task_with(**methods: Any) -> Task:
    """A user's task: tomi, with some methods of its own, declared outside soulkit."""
    kind = type("Mine", (TOMI,), methods)
    base = load_registry().task("tomi")
    task: Task = kind("tomi", base.spec)
    return task


def raising(error: BaseException) -> Any:
    def method(self: Task, *arguments: Any) -> Any:
        raise type(error)(*error.args)

    return method


async def leaving(self: Task, *arguments: Any) -> Any:
    sys.exit(3)


async def dividing(self: Task, *arguments: Any) -> Any:
    return 1 / len(())


def play(task: Task, *, refine: bool = False, when: str = "all", rows: int = 2) -> list[Record]:
    policy = FeedbackPolicy(when=when) if refine else None
    cast = Cast(actor=Player(voice("<answer>nowhere</answer>")))
    engine = Engine(cast, feedback=policy)
    jobs = [Job(task, example) for example in examples("tomi", rows)]
    return asyncio.run(engine.run(jobs, lambda record: None))


def line_of(words: str) -> str:
    """The source line that a record's words name."""
    place = re.search(r"\((\S+):(\d+), in \w+\)$", words)
    assert place is not None and place[1].endswith(HERE), words
    return Path(__file__).read_text(encoding="utf-8").splitlines()[int(place[2]) - 1]


@pytest.mark.parametrize(
    ("methods", "words", "line"),
    [
        ({"score": dividing}, "ZeroDivisionError: division by zero", "1 / len(())"),
        ({"play": dividing}, "ZeroDivisionError: division by zero", "1 / len(())"),
        ({"score": leaving}, "SystemExit: 3", "sys.exit(3)"),
        ({"play": leaving}, "SystemExit: 3", "sys.exit(3)"),
        ({"parse": raising(ValueError("no tag"))}, "ValueError: no tag", "raise type(error)"),
        ({"grade": raising(SystemExit(0))}, "SystemExit: 0", "raise type(error)"),
        ({"grade": raising(TimeoutError("slow"))}, "TimeoutError: slow", "raise type(error)"),
        ({"calls": raising(KeyError("x"))}, "KeyError: 'x'", "raise type(error)"),
    ],
)
def test_what_a_task_raises_is_the_rows_error_with_file_and_line(
    methods: dict[str, Any], words: str, line: str
) -> None:
    records = play(task_with(**methods))
    assert len(records) == 2
    for record in records:
        assert (record.score.value, record.score.reward) == (None, None)
        assert (record.score.status, record.score.reason) == ("unscored", "task_error")
        assert record.score.words.startswith(words)
        assert line in line_of(record.score.words)


def test_only_the_row_that_breaks_is_lost() -> None:
    first, _ = examples("tomi", 2)

    def grade(self: ChoiceTask, example: Any, answer: str) -> float:
        if example.id == first.id:
            raise LookupError("odd row")
        return 0.0

    assert [r.score.value for r in play(task_with(grade=grade))] == [None, 0.0]


@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, "0.5", np.float64("nan"), 10**400]
)
@pytest.mark.parametrize("name", ["value", "reward"])
def test_a_score_that_is_no_finite_number_is_unscored(name: str, number: Any) -> None:
    async def score(self: Task, *arguments: Any) -> Score:
        return replace(Score(value=0.5, reward=0.5), **{name: number})

    for record in play(task_with(score=score)):
        assert (record.score.value, record.score.reason) == (None, "task_error")
        assert f"returned a {name} of {number!r}" in record.score.words
        assert "async def score" in line_of(record.score.words)


def test_metrics_that_are_no_dict_are_told() -> None:
    async def score(self: Task, *arguments: Any) -> Score:
        return Score(value=0.5, reward=0.5, metrics=[0.5])  # type: ignore[arg-type]

    (record,) = play(task_with(score=score), rows=1)
    assert "returned metrics of type list" in record.score.words


@pytest.mark.parametrize("method", ["play", "score"])
def test_what_gives_back_nothing_says_so(method: str) -> None:
    async def nothing(self: Task, *arguments: Any) -> None:
        """Forgets to return."""

    for record in play(task_with(**{method: nothing})):
        assert record.score.words.startswith(f"{method}() returned NoneType")
        assert "def nothing" in line_of(record.score.words)


def test_numbers_of_numpy_and_metrics_that_are_not_finite_can_be_written_and_counted(
    tmp_path: Path,
) -> None:
    async def score(self: Task, *arguments: Any) -> Score:
        metrics = {"ratio": math.nan, "length": np.float32(3.0), "none": None}
        return Score(value=np.float32(0.5), reward=np.int64(1), metrics=metrics)

    records = play(task_with(score=score))
    writer = RecordWriter(tmp_path / "episodes.jsonl")
    writer.write(*records)
    writer.close()
    (one, _) = load_records(tmp_path / "episodes.jsonl")
    assert (one.score.value, one.score.reward) == (0.5, 1)
    assert one.score.metrics == {"ratio": None, "length": 3.0, "none": None}
    summary = summarise(
        records, command="", model="", protocol="", seconds=0.0, cost=None,
        batch={"tomi": task_with(summarise=lambda self, rows: {"spread": math.inf}).batch_metrics},
    )  # fmt: skip
    cells = summary.tasks["tomi"]
    assert cells["value"].mean == 0.5
    for name in ("ratio", "spread"):
        assert cells[name].mean is None and cells[name].unscored == {"undefined": 2}


# --- feedback, groups, batches --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "when"),
    [
        ({"critique": dividing}, "all"), ({"critique": leaving}, "all"),
        ({"leak_view": raising(ValueError("x"))}, "all"),
        ({"gate": raising(ValueError("x"))}, "task"),
    ],
)  # fmt: skip
def test_a_critique_that_breaks_is_no_feedback_and_the_draft_stands(
    methods: dict[str, Any], when: str
) -> None:
    for record in play(task_with(**methods), refine=True, when=when):
        assert record.score.value == 0.0 and record.received is None
        failure = record.episode.notes["coach_failure"]
        assert failure.startswith("task_error: ") and HERE in failure


def test_a_critique_that_gives_back_a_text_is_named() -> None:
    async def critique(self: Task, *arguments: Any) -> str:
        return "Read it again."

    (record,) = play(task_with(critique=critique), refine=True, rows=1)
    assert "critique() returned str, not Feedback" in record.episode.notes["coach_failure"]


def with_rewards(rewarded: Any) -> list[Record]:
    task = task_with(group_rewards=rewarded)
    return with_group_rewards({"tomi": task}, play(task))


@pytest.mark.parametrize(
    ("rewarded", "words"),
    [
        (lambda self, records: [1 / 0], "ZeroDivisionError"),
        (lambda self, records: [], "did not return the records"),
        (lambda self, records: None, "did not return the records"),
        (lambda self, records: "ab", "did not return the records"),
        (
            lambda self, records: [
                replace(r, score=replace(r.score, reward=math.nan)) for r in records
            ],
            "returned a reward of nan",
        ),
    ],
)
def test_rewards_of_a_group_that_break_leave_the_row_unscored(rewarded: Any, words: str) -> None:
    for record in with_rewards(rewarded):
        assert (record.score.value, record.score.reason) == (None, "task_error")
        assert words in record.score.words and HERE in record.score.words


def test_numbers_over_a_batch_that_break_are_a_number_without_a_value() -> None:
    task = task_with(summarise=raising(KeyError("joint")))
    assert task.batch_metrics(play(task)) == {"task_error": BatchMetric(None, 2, 0)}


@pytest.mark.parametrize("numbers", [None, 0.5, "ab"])
def test_numbers_over_a_batch_that_are_no_dict_are_one_without_a_value(numbers: Any) -> None:
    def summarise(self: Task, records: Any) -> Any:
        return numbers

    task = task_with(summarise=summarise)
    elsewhere = replace(task.spec.home, folder=Path(__file__).parent)
    task.spec = task.spec.at(elsewhere)
    assert task.batch_metrics(play(task)) == {"task_error": BatchMetric(None, 2, 0)}


def test_a_number_over_a_batch_that_is_none_has_no_value() -> None:
    def summarise(self: Task, records: Any) -> Any:
        return {"a": "much", "b": 10**400, "c": BatchMetric(math.inf, 2, 2), "d": np.float32(0.5)}

    task = task_with(summarise=summarise)
    values = {name: (m.value, m.n_scored) for name, m in task.batch_metrics(play(task)).items()}
    assert values == {"a": (None, 0), "b": (None, 0), "c": (None, 0), "d": (0.5, 2)}


def test_feedback_without_words_is_none() -> None:
    methods = {"explain": lambda self, *arguments: math.nan}
    for coach in (None, "terse"):
        engine = Engine(Cast(actor=Player(voice("<answer>nowhere</answer>"))),
                        feedback=FeedbackPolicy(coach=coach))  # fmt: skip
        (example,) = examples("tomi", 1)
        job = Job(task_with(**methods), example)
        (record,) = asyncio.run(engine.run([job], lambda record: None))
        assert "text is of type float" in record.episode.notes["coach_failure"]


def test_an_error_that_cannot_be_told_is_told_by_its_kind() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def grade(self: ChoiceTask, example: Any, answer: str) -> float:
        raise Mute

    (record,) = play(task_with(grade=grade), rows=1)
    assert record.score.words.startswith("Mute: (no message) (")


def test_a_gold_text_that_breaks_is_none_to_show() -> None:
    (record,) = play(task_with(gold_text=raising(KeyError("gold"))), rows=1)
    assert record.gold == "" and record.score.reason in ("", "task_error")


# --- whose error it is ----------------------------------------------------------------------------


def test_a_broken_call_keeps_its_reason_and_what_users_can_mend_stops() -> None:
    (record,) = play(task_with(score=raising(PartnerError("gone"))), rows=1)
    assert (record.score.reason, record.score.words) == ("partner_error", "gone")

    async def score(self: Task, *arguments: Any) -> Score:
        raise ConfigError("No table.", "why", "way")

    with pytest.raises(ConfigError, match="No table"):
        play(task_with(score=score))


def test_who_stops_a_run_stops_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        play(task_with(grade=raising(KeyboardInterrupt())))

    def cancels(*arguments: Any) -> float:
        task = asyncio.current_task()
        assert task is not None and task.cancel()
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        play(task_with(grade=cancels))


def test_a_task_that_raises_a_cancellation_itself_stops_nothing() -> None:
    (record,) = play(task_with(grade=raising(asyncio.CancelledError())), rows=1)
    assert record.score.words.startswith("CancelledError")


def test_what_breaks_in_a_model_is_no_error_of_the_task_that_asked() -> None:
    def reply(context: Any, call: Any) -> str:
        raise ZeroDivisionError("a bug")

    engine = Engine(Cast(actor=Player(Voice(reply))))
    (example,) = examples("tomi", 1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        asyncio.run(engine.run([Job(task_with(), example)], lambda record: None))


def test_what_a_library_raises_is_told_at_the_line_that_called_it() -> None:
    def grade(self: ChoiceTask, example: Any, answer: str) -> float:
        return float(np.linalg.inv(np.zeros((2, 2)))[0, 0])

    (record,) = play(task_with(grade=grade), rows=1)
    assert record.score.words.startswith("LinAlgError") and "np.linalg" in line_of(
        record.score.words
    )


def test_several_errors_of_a_task_group_are_told_by_the_first() -> None:
    async def score(self: Task, *arguments: Any) -> Score:
        async with asyncio.TaskGroup() as group:
            group.create_task(dividing(self))
        return Score(value=0.0, reward=0.0)

    (record,) = play(task_with(score=score), rows=1)
    assert record.score.words.startswith("ZeroDivisionError") and line_of(record.score.words)


def test_each_place_is_said_once_with_the_task(caplog: pytest.LogCaptureFixture) -> None:
    def grade(self: ChoiceTask, example: Any, answer: str) -> float:
        raise OverflowError("said once")

    play(task_with(grade=grade))
    lines = [r.getMessage() for r in caplog.records if "said once" in r.getMessage()]
    assert len(lines) == 1 and lines[0].startswith("task error in tomi.score: OverflowError")
