"""Labels of pairs, held against what the judge scored."""

from __future__ import annotations

from soulkit.eval.correction import Correction, PersonLabel
from soulkit.eval.graded import GradedEpisode
from soulkit.types import Episode, Record, Score, record_key


def graded(example: str, rollout: int, value: float) -> GradedEpisode:
    record = Record(
        key=record_key(0, example, rollout, "draft"), task="essay", example_id=example,
        rollout=rollout, kind="draft", step=0,
        episode=Episode(example_id=example, task="essay", traces=()),
        score=Score(value=value, reward=value),
    )  # fmt: skip
    return GradedEpisode(record, {"quality": (value,)})


def test_rows_may_have_any_sign_in_their_ids() -> None:
    episodes = [graded(f"2+{i}+x", side, float(side)) for i in range(6) for side in (0, 1)]
    labels = [
        PersonLabel((one.record.example_id, 0), "preference", label, "ann", one.record.key,
                    two.record.key, "A")
        for one, two, label in zip(episodes[::2], episodes[1::2], "BBBBBA", strict=True)
    ]  # fmt: skip
    pairs = Correction(episodes, labels, {}).report()["pairs"]
    assert pairs["n"] == 6 and pairs["judge_and_people"]["exact"]["value"] == 5 / 6
