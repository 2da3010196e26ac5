"""MirrorBench's controls: people at one anchor, simulators at the other, scores between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.runs.records import load_records
from soulkit.tasks.mirrorbench.anchors import (
    CONTROLS,
    HUMAN,
    PROXY,
    between_anchors,
    calibrated_metrics,
)
from soulkit.types import ControlRecord, Episode, Record, Score
from tests.support.evaluation import FAST, soul, summary
from tests.support.mirrorbench import Body, answers, conversations, kind_of
from tests.support.servers.openai_server import ScriptedServer
from tests.tasks.mirrorbench import reference


def draft(number: int, value: float) -> Record:
    return Record(
        key=f"0/{number}/0/draft", task="mirrorbench", example_id=str(number), rollout=0,
        kind="draft", episode=Episode(example_id=str(number), task="mirrorbench"),
        score=Score(value=value, reward=value, metrics={"gteval": value, "pairwise": 0.5}),
    )  # fmt: skip


def control(name: str, number: int, value: float | None) -> ControlRecord:
    metrics = {} if value is None else {"gteval": value, "pairwise": 0.5, "rnr": 1.0, "ctr": 1.0}
    score = Score(value=value, reward=None, metrics=metrics)
    return ControlRecord(
        task="mirrorbench", example_id=str(number), rollout=0, name=name, score=score
    )


SCORES = (0.2, 0.5, 0.7, 0.95)


@pytest.mark.parametrize(("human", "proxy"), [(0.9, 0.3), (0.5, 0.4), (1.0, 0.0)])
def test_scores_are_read_between_the_anchors_as_published(human: float, proxy: float) -> None:
    expected = reference.calibrated(SCORES, human, proxy)
    assert [between_anchors(s, human, proxy) for s in SCORES] == pytest.approx(expected)
    controls = [control(HUMAN, 0, human), control(PROXY, 0, proxy), control(HUMAN, 1, None)]
    metrics = calibrated_metrics([draft(i, s) for i, s in enumerate(SCORES)], controls)
    assert metrics["calibrated/gteval"].value == pytest.approx(sum(expected) / len(expected))
    assert metrics[f"{HUMAN}/gteval"].n == 2 and metrics[f"{HUMAN}/gteval"].n_scored == 1
    # Both anchors of the preference are one half: nothing lies between them.
    assert metrics["calibrated/pairwise"].value is None
    assert metrics["calibrated/pairwise"].n_scored == 0 < metrics["calibrated/pairwise"].n


@pytest.mark.parametrize("anchors", [(0.5, 0.5), (0.3, 0.6), (0.5, 0.47), (None, 0.2)])
def test_anchors_that_do_not_stand_apart_calibrate_nothing(
    anchors: tuple[float | None, float],
) -> None:
    controls = [control(HUMAN, 0, anchors[0]), control(PROXY, 0, anchors[1])]
    metrics = calibrated_metrics([draft(0, 0.5)], controls)
    assert metrics["calibrated/gteval"].value is None and metrics[f"{PROXY}/gteval"].value


def test_a_run_without_controls_of_a_kind_has_no_number_of_it() -> None:
    assert calibrated_metrics([draft(0, 0.5)], []) == {}
    assert set(calibrated_metrics([draft(0, 0.5)], [control(PROXY, 0, 0.4)])) == {
        f"{PROXY}/gteval", f"{PROXY}/pairwise",
    }  # fmt: skip


def likeness(body: Body) -> float:
    """Share of words that the users of two conversations have in common."""
    one, two = ({w for line in text.splitlines() if line.startswith("USER") for w in line.split()}
                for _, text in conversations(body))  # fmt: skip
    return len(one & two) / len(one | two)


def rule(body: Body) -> str:
    """Likeness by words; an assistant's words make a machine."""
    stiff = "Certainly" in json.dumps(body)
    if kind_of(body) != "gteval":
        return answers(rnr="NO" if stiff else "YES", ctr="NO" if stiff else "YES")(body)
    score = 0.2 if stiff and likeness(body) == 1 else likeness(body)
    return json.dumps({"reasoning": "by words", "score": round(score, 3)})


def test_people_stand_at_their_anchor_and_a_machine_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with ScriptedServer(answer="Certainly! How.") as actor, ScriptedServer(answer=rule) as judge:
        code = soul(
            "eval", "api", "--model", "m", "--base-url", actor.base_url, "--out", out,
            "--task", "mirrorbench", "--data", "synth:4", "--controls",
            "--judge", f"endpoint:j@{judge.base_url}", *FAST,
        )  # fmt: skip
        asked = len(judge.requests)
    assert code == 0
    calls = {one.name: dict(one.calls)["judge"] for one in CONTROLS}
    assert calls == {HUMAN: 13, PROXY: 7} and asked == 4 * (13 + 13 + 7)
    cells = summary(out)["tasks"]["mirrorbench"]
    assert cells[f"{HUMAN}/gteval"]["mean"] == 1 == cells[f"{HUMAN}/ctr"]["mean"]
    assert cells[f"{PROXY}/gteval"]["mean"] == pytest.approx(0.2)
    records = load_records(out / "episodes.jsonl")
    raw = [float(r.score.metrics["gteval"] or 0) for r in records]
    expected = [between_anchors(value, 1.0, 0.2) for value in raw]
    assert cells["calibrated/gteval"]["mean"] == pytest.approx(sum(expected) / 4)
    assert cells["calibrated/pairwise"]["mean"] is None
    (remark,) = [line for line in capsys.readouterr().err.splitlines() if "is undefined" in line]
    assert remark.startswith("mirrorbench: calibrated/pairwise is undefined: human_human (0.50)")
    assert "calibrated/gteval" not in remark
