"""`reference`: an episode may have 8,192 tokens after its prompt, whoever's words they are."""

from __future__ import annotations

import asyncio

import pytest

from soulkit.models.base import Player
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import Engine, Job
from soulkit.tasks.episode_room import EPISODE_TOKENS, LEAST_TOKENS, tokens_since
from soulkit.types import Call, Completion, Record, Sampling, Segment, Turn
from tests.support.road import run
from tests.support.servers.openai_server import Body
from tests.support.sotopia import LINE, example, in_turn, sotopia, table


def played(protocol: str, partner: str, limit: int = 8192) -> tuple[Record, list[Body]]:
    """One scene, and the actor's requests."""
    with table(actor=in_turn([LINE] * 99), partner=partner) as (cast, requests):
        actor = Player(cast.actor.model, Sampling(max_tokens=limit))
        cast = type(cast)(actor=actor, partner=cast.partner, judges=cast.judges)
        job = Job(sotopia(protocol), example(protocol))
        (record,) = run(cast, Engine(cast).run([job], lambda record: None))
    return record, [body for body in requests if body["model"] == "actor"]


def limits(requests: list[Body]) -> list[int]:
    return [body["max_tokens"] for body in requests]


def test_a_turn_has_what_the_episode_has_left() -> None:
    record, requests = played("reference", LINE)
    sent = limits(requests)
    assert sent[0] == EPISODE_TOKENS and sent == sorted(sent, reverse=True)
    turns = [turn.completion for turn in record.episode.traces[0].turns]
    for limit, reply in zip(sent, turns, strict=True):
        spent = reply.usage.prompt_tokens - turns[0].usage.prompt_tokens
        # Words are the server's tokens; those of the last line are guessed, at four bytes each.
        assert abs(EPISODE_TOKENS - spent - limit) <= 20
    assert record.episode.stop == "max_turns"


def test_an_episode_without_room_stops() -> None:
    record, requests = played("reference", "blah " * 2500)
    assert record.episode.stop == "length" and record.score.scored
    assert min(limits(requests)) >= LEAST_TOKENS and len(requests) < 8


def test_a_lower_limit_of_the_users_holds() -> None:
    _, requests = played("reference", LINE, limit=60)
    assert set(limits(requests)) == {60}


def test_under_paper_every_turn_has_its_own_limit() -> None:
    _, requests = played("paper", LINE)
    assert set(limits(requests)) == {8192}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    words = ["good", "morning", "how", "are", "you"]
    folder = build_tiny(tmp_path_factory.mktemp("models") / "tiny", words, max_context=600)
    return LocalModel.load(folder)


def test_a_local_model_counts(local: LocalModel) -> None:
    player = Player(local, Sampling(max_tokens=5, seed=1))
    first = (Segment("user", "good morning"),)
    reply = asyncio.run(player.complete(first, Call(role="actor", example_id="e")))
    said_back = Segment("assistant", reply.text, token_ids=reply.token_ids)
    context = (*first, said_back, Segment("user", "how are you"))
    turns = [Turn(first, reply)]
    assert tokens_since(player, [], first) == 0
    between = local.prompt_length(context) - local.prompt_length(first)
    assert tokens_since(player, turns, context) == between > len(reply.token_ids)


def test_local_replies_have_what_the_context_leaves(local: LocalModel) -> None:
    """Rows of one batch stop at limits of their own."""
    actor = Player(local, Sampling(max_tokens=8192, seed=3))
    contexts = [(Segment("user", text),) for text in ("good morning", "good morning " * 12)]

    async def both() -> list[Completion]:
        call = Call(role="actor", example_id="e")
        return list(await asyncio.gather(*(actor.complete(one, call) for one in contexts)))

    ends, local.codec.end_ids = local.codec.end_ids, frozenset()  # it never stops by itself
    try:
        replies = asyncio.run(both())
    finally:
        local.codec.end_ids = ends
    rooms = [600 - local.prompt_length(context) for context in contexts]
    assert [len(reply.token_ids) for reply in replies] == rooms and rooms[0] > rooms[1] > 512
    assert {reply.stop_reason for reply in replies} == {"length"}
