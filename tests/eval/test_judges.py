"""One judgement of one recorded episode: who is asked, who is not, and what is paid for.

Labels of pairs, held against what the judge scored.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from soulkit.eval.judges.correction import Correction, PersonLabel
from soulkit.eval.judges.questions import RecordedEpisode, ask_judge
from soulkit.eval.judges.rating import GradedEpisode
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.userllm.fields import PRISM
from soulkit.tasks.userllm.task import UserLLM
from soulkit.types import Completion, Episode, Record, Score, record_key
from tests.support.letters import released
from tests.support.road import episode_of
from tests.support.servers.detector_server import DetectorServer

ROW = {
    "source": PRISM, "intent": "get advice about moving to another city for a new job",
    "conversation_history": "", "is_last_turn": False, "opening_prompt": "shd i move 4 a job",
}  # fmt: skip


class Unasked:
    """A judge that must not be asked."""

    name = "unasked"

    async def complete(self, *_: Any) -> Completion:
        raise AssertionError("nobody should ask")

    async def close(self) -> None:
        """Nothing is open."""


def test_a_service_of_the_task_is_paid_once_and_is_no_opinion_of_the_judge(tmp_path: Path) -> None:
    with DetectorServer([(200, {"fraction_human": 0.25})]) as server:
        options = {"detector": "url", "detector_url": server.url}
        spec = load_registry().spec("userllm").model_copy(update={"options": options})
        seen = _seen(UserLLM("userllm", spec))
        with Ledger(tmp_path / "ledger.sqlite") as ledger:
            for _ in range(2):
                opinion = asyncio.run(ask_judge(seen, "j", Player(Unasked()), 0, ledger))
                assert not opinion.problem and opinion.asked == 0 and not opinion.said
        assert len(server.requests) == 1


def _seen(task: UserLLM) -> RecordedEpisode:
    example = task.example(released(ROW))
    record = Record(
        key=f"0/{example.id}/0/draft", task=task.name, example_id=example.id, rollout=0,
        kind="draft", episode=episode_of(task, example, "hey, new job, new town?"),
        score=Score(value=1.0, reward=1.0),
    )  # fmt: skip
    return RecordedEpisode(task, example, record)


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
