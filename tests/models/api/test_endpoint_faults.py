"""A judged dialogue with faults: the run ends, nothing is lost, and no fault becomes a score."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from soulkit.judge import panel
from soulkit.judge.structured import VerdictShape, question
from soulkit.judge.verdict import fence
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.replies import connection_fault
from soulkit.models.base import Cast, Panel, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import Engine, Job
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.secret_keeper.task import SecretKeeper
from soulkit.types import Episode, Example, Record, Sampling, Score, unscored
from tests.support.road import synth_examples
from tests.support.servers.faulty import FaultPlan, FaultyServer, wants_form

ATTEMPTS = 6


class Rating(VerdictShape):
    reasoning: str
    score: int = Field(ge=0, le=10)


class JudgedKeeper(SecretKeeper):
    """The secret keeper, rated by a judge instead of rules."""

    def rating_prompt(self, episode: Episode) -> str:
        transcript = "\n".join(f"{line.seat}: {line.text}" for line in episode.transcript)
        return f"{fence(transcript, 'transcript')}\n\nRate the talk with a JSON object."

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        rating_question = question("score", self.rating_prompt(episode), Rating)
        opinions = await panel.opinions(cast, rating_question, episode)
        ratings = [rating.score for rating in panel.readable(opinions)]
        value = panel.combined(ratings, cast.panel.combine) / 10
        return Score(value=value, reward=value, verdicts=tuple(o.verdict() for o in opinions))


def rating_of(prompt: str) -> int:
    """What the server's judge thinks of a prompt: always the same, and all values occur."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 11


def answer(body: dict[str, Any]) -> str:
    if wants_form(body):
        return json.dumps({"reasoning": "why", "score": rating_of(body["messages"][0]["content"])})
    return f"I say {len(body['messages'])}."


def endpoint(url: str, concurrency: int, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {
        "model": "gpt-x", "base_url": url, "timeout_s": 0.6, "backoff_s": 0.02, "max_wait_s": 1.0,
        "max_attempts": ATTEMPTS, "concurrency": concurrency,
    }  # fmt: skip
    return Endpoint(**(base | settings))


def played(
    server: FaultyServer, episodes: int, panel: Panel | None = None, **settings: Any
) -> list[Record]:
    """The records of `episodes` episodes, all at once against one server."""
    spec = load_registry().specs["secret_keeper"]
    task = JudgedKeeper("secret_keeper", spec)
    jobs = [Job(task, example) for example in synth_examples("secret_keeper", episodes)]
    model = endpoint(server.base_url, episodes, **settings)
    player = Player(model, Sampling(seed=1))
    cast = Cast(actor=player, partner=player, judges=(player,), panel=panel or Panel())

    async def run() -> list[Record]:
        try:
            return await asyncio.wait_for(Engine(cast).run(jobs, lambda record: None), 60)
        finally:
            await model.close()

    return asyncio.run(run())


def check(records: list[Record], episodes: int) -> Counter[str]:
    """Every episode has a record, a right score or a reason; reasons are counted."""
    assert len({record.key for record in records}) == len(records) == episodes
    task = JudgedKeeper("secret_keeper", load_registry().specs["secret_keeper"])
    reasons: Counter[str] = Counter()
    for record in records:
        score = record.score
        if score.scored:
            assert score.value == rating_of(task.rating_prompt(record.episode)) / 10
            assert any(verdict.said for verdict in score.verdicts)
        else:
            assert score.status == "unscored" and score.words
            assert score.value is None and score.reward is None
            reasons[score.reason] += 1
    return reasons


@pytest.mark.slow
def test_with_faults() -> None:
    """A tenth breaks, a twentieth hangs, verdicts are torn, replies are empty, a storm passes."""
    faults = FaultPlan(
        seed=5, latency_s=(0.0, 0.03), errors=0.1, hangs=0.05, malformed=0.05, empty=0.02,
        broken=0.02, storm=(0.3, 0.8), retry_after_s=0.2,
    )  # fmt: skip
    with FaultyServer(faults, answer) as server:
        records = played(server, 64)
    reasons = check(records, 64)
    assert set(reasons) <= {"provider_error", "partner_error", "judge_error"}
    assert sum(reasons.values()) < 32, "most episodes survive"
    for what in ("error", "hang", "malformed", "empty", "broken", "storm"):
        assert server.outcomes[what] > 0, f"{what} never happened"
    assert max(server.requests_of_key.values()) <= ATTEMPTS


def test_several_opinions_outlive_a_torn_one() -> None:
    with FaultyServer(FaultPlan(seed=1, malformed=0.4), answer) as server:
        records = played(server, 16, Panel(samples=4))
    reasons = check(records, 16)
    assert reasons["judge_error"] < 5
    problems = [v.problem for r in records for v in r.score.verdicts if not v.said]
    assert problems and all(problems), "unreadable opinions are on record with their reason"


def test_what_was_paid_for_despite_faults_is_in_the_ledger(tmp_path: Path) -> None:
    faults = FaultPlan(seed=2, errors=0.2, empty=0.05, latency_s=(0.0, 0.02))
    with FaultyServer(faults, answer) as server, Ledger(tmp_path / "ledger.sqlite") as ledger:
        first = played(server, 20, ledger=ledger)
        requests = sum(server.outcomes.values())
        again = played(server, 20, ledger=ledger)
        more = sum(server.outcomes.values()) - requests
    check(first, 20)
    scored = {r.key: r.score.value for r in first if r.score.scored}
    assert {r.key: r.score.value for r in again if r.key in scored} == scored
    assert more <= 20 * ATTEMPTS, "only what failed is asked again"


def test_a_broken_connection_without_words_has_the_name_of_its_error() -> None:
    assert connection_fault(ConnectionResetError()).detail.endswith(": ConnectionResetError")
    assert connection_fault(ConnectionResetError("cut")).detail.endswith(": cut")
