"""A step's log line, from records worked out by hand; nothing in it is ever NaN.

A step is a page, and a run makes its method once.

Trackers with their real packages, offline: one run through kills, nothing told twice.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.errors import DataError
from soulkit.report.training import facts_of_training, task_lines
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.state.metrics import (
    CoachCounts,
    FeedbackCounts,
    Learned,
    StepLine,
    read_step_lines,
    steps_of,
)
from soulkit.train.state.step_metrics import feedback_of, reward_groups, rewards_of, with_groups
from soulkit.train.state.stops import step_remarks
from soulkit.train.state.summary import FeedbackTotals, TrainSummary, feedback_totals
from soulkit.train.state.tracking import TRACKING, MetricsTracker, make_tracker
from soulkit.train.step import with_advantages
from soulkit.types import Feedback, Record, Score, Verdict
from tests.support.training import config, lines_of, random_model, soul
from tests.train.test_objectives import SMALL, Plain, made_record


def test_rewards_and_gaps_by_hand() -> None:
    """Example x: drafts 0, 1; refined 1, 0. Example y: drafts 0, 0, 1; refined 1 for the first."""
    y = [made_record("y", 0, "draft", 0.0), made_record("y", 0, "refined", 1.0),
         made_record("y", 1, "draft", 0.0), made_record("y", 2, "draft", 1.0)]  # fmt: skip
    line = rewards_of([*SMALL, *y])
    assert line.draft == pytest.approx(2 / 5)
    assert line.refined == pytest.approx(2 / 3)
    assert (line.n_draft, line.n_refined, line.n_unscored) == (5, 3, 0)
    # Leave one out: x gives 1 − 1 and 0 − 0; y gives 1 − mean(0, 1).
    assert line.loo == pytest.approx((0.0 + 0.0 + 0.5) / 3)
    assert line.pair == pytest.approx((1.0 - 1.0 + 1.0) / 3)
    assert line.loo_low <= line.loo <= line.loo_high
    assert line.tokens == 1 + 2 + 1 + 3 + 4
    assert line.tokens_per_turn == pytest.approx(11 / 8)


def test_the_same_example_at_two_steps_is_two_groups() -> None:
    later = [replace(r, step=1) for r in SMALL]
    assert len(reward_groups([*SMALL, *later])) == 2


def test_a_gap_counts_stories_over_all_steps() -> None:
    later = [replace(r, step=1) for r in SMALL]
    assert rewards_of([*SMALL, *later]).loo_clusters == 1
    other = [replace(r, example_id="z", cluster="story") for r in SMALL]
    again = [replace(r, example_id="w", cluster="story", step=1) for r in SMALL]
    line = rewards_of([*SMALL, *other, *again])
    assert line.loo_clusters == 2 and rewards_of(SMALL).loo_low is None
    elsewhere = [replace(r, task="hitom") for r in again]
    assert rewards_of([*SMALL, *other, *elsewhere]).loo_clusters == 3


def test_a_mixture_has_rewards_and_a_gap_for_every_task() -> None:
    """SMALL: drafts 0, 1; refined 1, 0. The other task: one draft, 0.5, and nothing refined."""
    other = replace(made_record("y", 0, "draft", 0.5), task="hitom")
    name, plain = SMALL[0].task, rewards_of([*SMALL, other])
    line = rewards_of([*SMALL, other], mixture=True)
    assert line.draft_by_task == {name: 0.5, "hitom": 0.5}
    assert line.refined_by_task == {name: 0.5} and line.loo_by_task == {name: 0.0}
    assert replace(line, draft_by_task={}, refined_by_task={}, loo_by_task={}) == plain
    written = StepLine(rewards=line).to_json()
    assert written[f"reward/draft/{name}"] == 0.5 and "gap/loo/hitom" not in written
    (again,) = steps_of([json.loads(json.dumps(written))])
    assert again.rewards == line
    assert [text.split() for text in task_lines(line)] == [
        ["hitom", "draft", "0.500"], [name, "draft", "0.500", "refined", "0.500", "gap", "0.000"]
    ]  # fmt: skip
    summary = TrainSummary(rewards=line)
    read = TrainSummary.from_json(summary.to_json()).rewards
    assert read.draft_by_task == line.draft_by_task and read.loo_by_task == line.loo_by_task
    old = {n: v for n, v in written.items() if n.count("/") < 2}  # before there were any by task
    assert steps_of([old])[0].rewards == plain


def rated(one: Record, text: str = "", **marks: float | None) -> Record:
    """The record with a judge's marks by dimension, and with feedback."""
    verdict = Verdict(judge="j", purpose="score", said={name: {"score": 1} for name in marks})
    score = replace(one.score, metrics={**marks, "turns": 3.0}, verdicts=(verdict,))
    feedback = Feedback(text=text, author="c") if text else None
    return replace(one, score=score, received=feedback)


def test_gaps_and_feedback_by_judged_dimension() -> None:
    """SMALL: drafts 0 and 1 of x, each refined; the judge rates two dimensions."""
    draft, better, other, worse = SMALL
    records = [
        rated(draft, "Your GOALS are unclear.", goal=2, social_rules=-4),
        rated(better, goal=7, social_rules=None),
        rated(other, "Antisocial, and goalless.", goal=4, social_rules=-2),
        rated(worse, goal=4, social_rules=-1),
    ]
    line, feedback = rewards_of(records), feedback_of(records)
    # goal: 7 − 4 and 4 − 2; rules: −1 − −4, because the other refined rollout is not rated.
    assert line.loo_by_dimension == {"tomi/goal": 2.5, "tomi/social_rules": 3.0}
    assert feedback.about == {"tomi/goal": 1.0, "tomi/social_rules": 0.0}
    written = StepLine(rewards=line, feedback=feedback).to_json()
    assert written["gap/dimension/tomi/goal"] == 2.5 and written["feedback/about/tomi/goal"] == 1.0
    assert steps_of([written])[0].rewards.loo_by_task == {}
    assert (line.scored_by_dimension, line.n_by_dimension) == (
        {"tomi/goal": 2, "tomi/social_rules": 1}, {"tomi/goal": 2, "tomi/social_rules": 2}
    )  # fmt: skip
    alone = [rated(one, "goal", goal=1) for one in SMALL]  # this is the score itself
    assert not rewards_of(alone).loo_by_dimension and not feedback_of(alone).about


def test_unscored_records_are_counted_by_reason_and_enter_no_mean() -> None:
    lost = [*SMALL, made_record("x", 2, "draft", None), made_record("x", 3, "refined", None)]
    line, before = rewards_of(lost), rewards_of(SMALL)
    assert line.n_unscored == 2 and line.unscored == {"partner_error": 2}
    for name in ("draft", "refined", "loo", "pair"):
        assert getattr(line, name) == getattr(before, name)


@pytest.mark.parametrize("records", [[], SMALL[:1], [made_record("x", 0, "draft", None)], SMALL])
def test_a_line_is_json_without_nan(records: list[object]) -> None:
    rewards, feedback = rewards_of(records), feedback_of(records)  # type: ignore[arg-type]
    json.dumps(StepLine(rewards=rewards, feedback=feedback).to_json(), allow_nan=False)
    if not records:
        assert rewards.draft is None and rewards.loo is None
        assert feedback.share is None and rewards.tokens_per_turn is None


def test_task_metrics_are_means_over_drafts() -> None:
    scores = [{"turns": 4.0, "kept": None}, {"turns": 6.0, "kept": 1.0}]
    drafts = [
        replace(made_record("x", i, "draft", 0.0), score=Score(value=0.0, reward=0.0, metrics=m))
        for i, m in enumerate(scores)
    ]
    other = replace(SMALL[1], score=Score(value=1.0, reward=1.0, metrics={"turns": 99.0}))
    line = rewards_of([*drafts, other])
    assert line.tasks == {"tomi/turns": 5.0, "tomi/kept": 1.0}


def test_feedback_is_counted_with_its_leaks() -> None:
    feedback = Feedback(text="a", author="symbolic", blind=0.5, chance=0.25)
    leak = Feedback(text="b", author="symbolic", leak="gold_text", blind=1.0, chance=0.25)
    failed = replace(SMALL[0].episode, notes={"coach_failure": "judge_error: no answer"})
    drafts = [
        replace(SMALL[0], received=feedback), replace(SMALL[2], received=leak),
        replace(made_record("y", 0, "draft", 0.0), episode=failed),
        made_record("y", 1, "draft", 1.0),
    ]  # fmt: skip
    line = feedback_of([*drafts, SMALL[1]])
    assert line == FeedbackCounts(
        share=0.5, leak_share=0.5, leaks={"symbolic/gold_text": 1},
        distinct=1.0, dropped=0.5, dropped_by={"gold_text": 0.5},
        blind_reader=0.75, blind_chance=0.25, coach_failures=1,
        coaches={"symbolic": CoachCounts(checked=2, dropped=1, leaks={"gold_text": 1})},
    )  # fmt: skip


def test_a_worked_example_leaks_and_is_not_dropped() -> None:
    shown = Feedback(text="b", author="symbolic", leak="gold_text", kind="worked_example")
    line = feedback_of([replace(SMALL[0], received=shown)])
    assert line.coaches["symbolic"] == CoachCounts(1, 0, {"gold_text": 1})


def test_a_leak_that_the_run_only_logs_is_not_dropped() -> None:
    kept = Feedback(text="b", author="m", leak="gold_text", kept=True)
    line = feedback_of([replace(SMALL[0], received=kept)])
    assert line.coaches["m"] == CoachCounts(1, 0, {"gold_text": 1})
    assert (line.leak_share, line.dropped, line.dropped_by) == (1.0, 0.0, {})


def test_different_texts_are_counted_over_the_drafts_that_got_any() -> None:
    texts = ["a", "a", "b", "a", None]
    received = [Feedback(text=t, author="m") if t else None for t in texts]
    drafts = [replace(SMALL[0], rollout=i, received=f) for i, f in enumerate(received)]
    line = feedback_of([*drafts, replace(SMALL[1], given=received[2])])
    assert line.distinct == 0.5 and line.to_json()["feedback/distinct"] == 0.5
    assert "feedback/distinct" not in feedback_of(drafts[-1:]).to_json()


def test_the_share_of_different_texts_in_a_run_is_over_all_its_texts() -> None:
    def step(number: int, distinct: float | None) -> dict[str, object]:
        counts = {"a": {"checked": number, "dropped": 0, "leaks": {}}}
        return {"step": 0, "feedback/coaches": counts, "feedback/distinct": distinct}

    totals = feedback_totals(steps_of([step(30, 0.1), step(10, 0.5), step(8, None)]))
    assert totals.distinct == pytest.approx(0.2)
    assert FeedbackTotals.from_json(totals.to_json()) == totals
    assert "distinct" not in FeedbackTotals().to_json()


@pytest.mark.parametrize(
    ("share", "said"), [(0.09, True), (0.1, False), (1.0, False), (None, False)]
)
def test_feedback_that_hardly_differs_is_said(share: float | None, said: bool) -> None:
    for step in (0, 1):
        remarks = step_remarks(StepLine(step=step, feedback=FeedbackCounts(distinct=share)))
        assert any("hardly differs: 0.09" in one for one in remarks) is (said and step == 0)
    facts = dict(facts_of_training(TrainSummary(feedback=FeedbackTotals(distinct=share))))
    assert bool(facts["feedback texts"]) is said


def test_feedback_of_a_whole_run_is_summed_per_coach() -> None:
    def step(**coaches: dict[str, int]) -> dict[str, object]:
        counts = {
            name: {"checked": 4, "dropped": sum(leaks.values()), "leaks": leaks}
            for name, leaks in coaches.items()
        }
        numbers = {"rollouts/draft": 8, "feedback/coach_failures": 1}
        return {"step": 0, **numbers, "feedback/coaches": counts}

    lines = [step(a={"gold_text": 1}, b={}), {"step": 0, "eval/tomi": 0.5},
             step(a={"gold_text": 1, "answerable": 2})]  # fmt: skip
    assert feedback_totals(steps_of(lines)).to_json() == {
        "drafts": 16, "coach_failures": 2, "coaches": {
            "a": {"checked": 8, "dropped": 4, "leaks": {"gold_text": 2, "answerable": 2}},
            "b": {"checked": 4, "dropped": 0, "leaks": {}},
        },
    }  # fmt: skip
    assert feedback_totals([]).to_json() == {"drafts": 0, "coach_failures": 0, "coaches": {}}


def test_groups_that_teach_nothing_are_counted() -> None:
    flat = [made_record("y", 0, "draft", 0.5), made_record("y", 1, "draft", 0.5)]
    alone = [made_record("z", 0, "draft", 0.5)]
    sequences = Ditto().sequences([*SMALL, *flat, *alone], Plain())
    line = with_groups(Learned(), sequences, with_advantages(sequences, config()))
    assert (line.groups, line.groups_single, line.groups_flat) == (4, 1, 1)
    assert line.silent_share == 0.5
    assert line.trained == {"draft": 5, "copy": 5, "refined": 5}
    assert with_groups(Learned(), [], []).silent_share is None


TRAIN = Path(__file__).parents[2] / "soulkit" / "train"


def test_a_step_is_a_page() -> None:
    assert (TRAIN / "step.py").read_text(encoding="utf-8").count("\n") <= 150


def test_the_method_is_made_with_the_material_and_handed_on() -> None:
    calls = [
        path.relative_to(TRAIN).as_posix()
        for path in TRAIN.rglob("*.py")
        if "make_objective(" in path.read_text(encoding="utf-8")
        and path.parent.name != "objectives"
    ]
    assert calls == ["setup/data.py"]


def test_lines_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward/draft": 0.5}\n')
    assert read_step_lines(path)[0].rewards.draft == 0.5
    path.write_text('{"step": 0, "draft_reward": 0.5}\n')
    with pytest.raises(DataError, match=r"Line 1 of .* earlier version .* 'draft_reward'"):
        read_step_lines(path)
    path.write_text('{"schema": "soulkit/metrics@1", "step": 0, "reward/draft": "much"}\n')
    with pytest.raises(DataError, match=r"rewards\.draft"):
        read_step_lines(path)


SECRET = "very-secret-0123456789abcdef"


def log_all(tracker: MetricsTracker, steps: range) -> None:
    for step in steps:
        tracker.log(StepLine(step=step, learned=Learned(loss=1.0 + step)))
    tracker.close()


def entry(run: Path, package: str) -> dict[str, object]:
    noted: dict[str, object] = json.loads((run / TRACKING).read_text())[package]
    return noted


# -- TensorBoard -----------------------------------------------------------------------------------


def test_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_all(make_tracker("tensorboard", tmp_path, {}), range(5))
    log_all(make_tracker("tensorboard", tmp_path, {}), range(3, 7))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("loss/total")
    assert [one.step for one in scalars] == list(range(7))
    assert [one.value for one in scalars] == [1.0 + step for step in range(7)]


# -- trackio ---------------------------------------------------------------------------------------


@pytest.fixture
def trackio_folder(tmp_path: Path) -> dict[str, str]:
    pytest.importorskip("trackio")
    return {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "people"}


PLAY = """
import sys
from pathlib import Path
from soulkit.api_keys import remember
from tests.train.test_step_metrics import SECRET, log_all
from soulkit.train.state.tracking import make_tracker
package, run, first, last = sys.argv[1:5]
remember(SECRET)
tracker = make_tracker(package, Path(run), {"steps": 9, "note": f"a {SECRET}"})
log_all(tracker, range(int(first), int(last)))
"""


def play(package: str, run: Path, first: int, last: int, env: dict[str, str]) -> str:
    """Some steps in a process of their own, as a resumed command is; what it says on stderr."""
    run.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PLAY, package, str(run), str(first), str(last)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # it belongs to results
    return done.stderr


@pytest.mark.slow
def test_trackio_goes_on_with_the_run_and_is_told_each_step_once(
    tmp_path: Path, trackio_folder: dict[str, str]
) -> None:
    run = tmp_path / "run"
    play("trackio", run, 0, 4, trackio_folder)
    first = entry(run, "trackio")
    play("trackio", run, 2, 6, trackio_folder)
    assert entry(run, "trackio") == {**first, "step": 5} and first["step"] == 3
    other = tmp_path / "elsewhere" / "run"
    other.parent.mkdir()
    play("trackio", other, 0, 1, trackio_folder)
    assert entry(other, "trackio")["id"] != first["id"]
    rows = subprocess.run(
        [sys.executable, "-c", "import json; from trackio.sqlite_storage import SQLiteStorage as S;"
         f"print(json.dumps(S.get_logs('people', {first['name']!r})))"],
        env={**os.environ, **trackio_folder}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    logs = json.loads(rows.stdout.splitlines()[-1])
    assert [(one["step"], one["loss/total"]) for one in logs] == [(n, 1.0 + n) for n in range(6)]
    stored = b"".join(p.read_bytes() for p in (tmp_path / "trackio").rglob("*") if p.is_file())
    assert b"loss/total" in stored and SECRET.encode() not in stored


# -- Weights & Biases ------------------------------------------------------------------------------


def histories(run: Path, id: str) -> list[tuple[int, float]]:
    """(step, loss) that offline wandb keeps under one id, in the order they were told."""
    from wandb.proto.wandb_internal_pb2 import Record

    logged = []
    for file in sorted(run.glob(f"wandb/offline-run-*-{id}/run-{id}.wandb")):
        for data in log_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): i.value_json
                         for i in record.history.item}  # fmt: skip
                logged.append((int(items["_step"]), float(items["loss/total"])))
    return logged


def log_records(log: bytes) -> Iterator[bytes]:
    """The records of a log as LevelDB writes it: blocks of 32 KiB, parts with crc, size, type."""
    place, record = 7, b""  # behind the head of the file
    while place + 7 <= len(log):
        room = 32_768 - place % 32_768
        if room < 7:  # too little for a part: zeros
            place += room
            continue
        size, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_goes_on_with_the_run_and_is_told_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    env = {"WANDB_MODE": "offline", "WANDB_PROJECT": "people", "WANDB_SILENT": "true"}
    play("wandb", run, 0, 4, env)
    first = entry(run, "wandb")
    assert (first["project"], first["name"], first["step"]) == ("people", "run", 3)
    play("wandb", run, 2, 6, env)
    assert entry(run, "wandb") == {**first, "step": 5}
    assert histories(run, str(first["id"])) == [(n, 1.0 + n) for n in range(6)]
    stored = b"".join(p.read_bytes() for p in (run / "wandb").rglob("*") if p.is_file())
    assert b"people" in stored and SECRET.encode() not in stored


@pytest.mark.slow
def test_a_run_whose_tracker_fails_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is logged in at the service."""
    pytest.importorskip("wandb")
    random_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for name, value in {"WANDB_MODE": "online", "NETRC": "none", "HOME": str(tmp_path),
                        "WANDB_BASE_URL": "http://127.0.0.1:9"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert soul("train", "sft", "--model", "base", "--task", "tomi", "--data", "tomi=synth:20",
                "--batch", 2, "--steps", 2, "--track", "wandb", "--out", "run") == 0  # fmt: skip
    assert len(lines_of(tmp_path / "run")) == 2
    assert capsys.readouterr().err.count("wandb failed and is disabled") == 1


def test_what_a_tracker_raises_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where its folder would be")
    log_all(make_tracker("tensorboard", tmp_path, {}), range(3))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("tensorboard failed and is disabled (")
    assert "the run continues, and metrics.jsonl has every step" in errors[0]
