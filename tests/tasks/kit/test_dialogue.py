"""A stage: one transcript, a conversation for each acted seat, and thoughts stay at their table.

Asking a partner: once more where a reply is of no use, then its failure, and nothing unpaid.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from soulkit.errors import CallError, ConfigError, PartnerError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.stand_ins import Script, ScriptedModel
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import (
    Conversation,
    DialogueTask,
    Stage,
    episode_tokens_left,
    partner_reply,
    partner_words,
    tokens_since,
    with_reply_limit,
    within_episode,
)
from soulkit.tasks.kit.spec import TaskSpec
from soulkit.tasks.kit.user_code import Home
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Line,
    Sampling,
    Score,
    Segment,
    Turn,
    Usage,
)
from tests.support.road import played_by
from tests.support.servers.openai_server import Fault, ScriptedServer

SEATS = ("ann", "bo", "cy")
EXAMPLE = Example(
    id="e", task="t", fields={}, audience={}, seats=dict.fromkeys(SEATS, "actor")
)  # fmt: skip
ROLLOUT = Rollout(index=3, kind="refined")


def stage_of(*seats: str) -> Stage:
    return Stage({s: Conversation(s, [Segment("system", f"You are {s}.")]) for s in seats})


def messages(stage: Stage, seat: str) -> list[tuple[str, str]]:
    return [(segment.role, segment.text) for segment in stage.tables[seat].context]


def played() -> tuple[Stage, Episode]:
    stage = stage_of(*SEATS)
    stage.notify("(The scene begins.)")
    replies = iter(["[I lie.] Good day.", "[A liar!] Is it?"])

    async def scene() -> None:
        with played_by(lambda body: next(replies)) as player:
            first = await stage.speak("bo", player, ROLLOUT.call("actor", EXAMPLE, 0))
            stage.record(Line("bo", "Good day."), memory=first.text)
            stage.record(Line("room", "The clock strikes nine."))
            second = await stage.speak("ann", player, ROLLOUT.call("actor", EXAMPLE, 1))
            stage.record(Line("ann", second.text), shown="ann: Is it?")

    asyncio.run(scene())
    return stage, stage.episode(EXAMPLE, ROLLOUT, "over")


def test_everybody_hears_a_line_and_only_its_author_remembers_more() -> None:
    stage, _ = played()
    assert messages(stage, "cy") == [
        ("system", "You are cy."),
        ("user", "(The scene begins.)\n\nGood day.\n\nThe clock strikes nine.\n\nann: Is it?"),
    ]
    assert messages(stage, "bo") == [
        ("system", "You are bo."), ("user", "(The scene begins.)"),
        ("assistant", "[I lie.] Good day."),
        ("user", "The clock strikes nine.\n\nann: Is it?"),
    ]  # fmt: skip
    assert messages(stage, "ann")[1:] == [
        ("user", "(The scene begins.)\n\nGood day.\n\nThe clock strikes nine."),
        ("assistant", "[A liar!] Is it?"),
    ]


def test_the_episode_has_a_trace_for_each_seat_that_spoke_in_the_order_of_the_tables() -> None:
    _, episode = played()
    assert [(t.seat, len(t.turns)) for t in episode.traces] == [("ann", 1), ("bo", 1)]
    assert [(line.seat, line.text) for line in episode.transcript] == [
        ("bo", "Good day."), ("room", "The clock strikes nine."), ("ann", "[A liar!] Is it?"),
    ]  # fmt: skip
    assert (episode.kind, episode.rollout, episode.stop) == ("refined", 3, "over")
    assert episode.usage.calls == 2


def test_the_call_names_the_seat() -> None:
    rules = [{"seat": name, "say": f"I am {name}."} for name in ("ann", "bo", "b")]
    player = Player(ScriptedModel(Script.model_validate({"rules": rules})))
    stage = stage_of("ann", "bo")
    words = []
    for seat, name in (("ann", ""), ("bo", ""), ("bo", "b")):
        call = ROLLOUT.call("actor", EXAMPLE, 0, seat=name)
        words.append(asyncio.run(stage.speak(seat, player, call)).text)
    assert words == ["I am ann.", "I am bo.", "I am b."]


def test_a_line_that_was_there_before_carries_no_ids_and_no_turn() -> None:
    stage = stage_of("ann", "bo")
    stage.record(Line("ann", "It was so."), memory="[Was it?] It was so.")
    stage.take("ann", Completion(text="And now?", token_ids=(4, 5)))
    stage.record(Line("ann", "And now?"))
    stage.record(Line("bo", "(silence)"), shown="")
    segments = stage.tables["ann"].context[1:]
    assert [(s.role, s.text, s.token_ids) for s in segments] == [
        ("assistant", "[Was it?] It was so.", ()), ("assistant", "And now?", (4, 5)),
    ]  # fmt: skip
    episode = stage.episode(EXAMPLE, ROLLOUT, "over")
    assert [(t.seat, len(t.turns)) for t in episode.traces] == [("ann", 1)]
    assert len(episode.transcript) == 3


def test_a_misspelt_seat_is_named_with_those_that_there_are() -> None:
    stage, player = stage_of(*SEATS), Player(ScriptedModel(Script(replies=("Hm.",))))
    call = ROLLOUT.call("actor", EXAMPLE)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(stage.speak("an", player, call))
    what, why, fix = caught.value.lines()
    assert "'an'" in what and "ann, bo, cy" in why and "'ann'" in fix
    with pytest.raises(ConfigError):
        stage.take("room", Completion(text="A door slams."))
    assert stage.episode(EXAMPLE, ROLLOUT, "over").traces == ()


CALL = Call(role="environment", example_id="e", turn=2, seat="room", purpose="environment")
CONTEXT = (Segment("user", "What happens?"),)


def reply_of(player: Player, attempts: int = 2) -> tuple[str, Usage]:
    return asyncio.run(
        partner_reply(player, CONTEXT, CALL, partner_words, "the room", attempts=attempts)
    )


def test_an_unusable_reply_is_asked_for_once_more() -> None:
    replies = iter(["<think>hm", "A door slams."])
    with played_by(lambda body: next(replies)) as player:
        words, usage = reply_of(player)
    assert (words, usage.calls) == ("A door slams.", 2)


@pytest.mark.parametrize(("attempts", "times"), [(1, ""), (2, ", twice"), (3, ", 3 times")])
def test_a_partner_that_never_says_anything_broke_the_episode(attempts: int, times: str) -> None:
    with (
        played_by(" ") as player,
        pytest.raises(PartnerError, match=f"the room said nothing usable{times} .stop") as caught,
    ):
        reply_of(player, attempts)
    assert caught.value.usage.calls == attempts, "what it cost is not lost"


def test_a_failure_after_a_useless_reply_carries_its_cost() -> None:
    with ScriptedServer(answer="", script={1: Fault.status_error(400)}) as server:
        player = Player(Endpoint(model="m", base_url=server.base_url, max_attempts=1))
        with pytest.raises(CallError) as caught:
            reply_of(player)
    assert caught.value.usage.calls == 1


def test_both_replies_are_set_aside_and_asked_for_anew(tmp_path: Path) -> None:
    replies = iter(["", "", "Rain.", "Never."])

    def play(mode: str) -> str:
        with Ledger(tmp_path / "l.sqlite", mode, mends=True) as ledger:  # type: ignore[arg-type]
            endpoint = Endpoint(model="m", base_url=server.base_url, ledger=ledger, backoff_s=0.0)
            try:
                return reply_of(Player(endpoint, Sampling()))[0]
            except PartnerError as error:
                return error.reason

    with ScriptedServer(answer=lambda body: next(replies)) as server:
        outcomes = [play("record"), play("record"), play("replay")]
    assert outcomes == ["partner_error", "Rain.", "Rain."]


class Talk(DialogueTask):
    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        raise AssertionError("nobody scores here")


@pytest.mark.parametrize(("options", "turns"), [({}, 6), ({"max_turns": 2}, 2)])
def test_two_seats_take_turns_until_the_limit(
    options: dict[str, int], turns: int, tmp_path: Path
) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "ann.md").write_text("You are Ann.{{ feedback }}")
    (tmp_path / "prompts" / "bo.md").write_text("You are Bo.")
    spec = TaskSpec(title="Talk", summary="They talk.", columns={}, options=options,
                    seats={"ann": "actor", "bo": "partner"}).at(Home(tmp_path))  # fmt: skip
    task = Talk("talk", spec)
    example = Example(id="e", task="talk", fields={}, audience={}, seats=spec.seats)

    async def talk() -> Episode:
        with played_by(lambda body: f"{len(body['messages'])} heard") as player:
            return await task.play(example, Cast(actor=player, partner=player), ROLLOUT)

    assert task.calls(example) == {"actor": turns, "partner": turns}
    episode = asyncio.run(talk())
    assert episode.stop == "max_turns" and len(episode.traces[0].turns) == turns
    spoken = [(line.seat, line.text) for line in episode.transcript]
    # Each sees its prompt and what was said; the partner's first line answers a start mark.
    assert spoken == [
        line for i in range(turns) for line in (("bo", f"{2 + 2 * i} heard"),
                                                ("ann", f"{2 + 2 * i} heard"))
    ]  # fmt: skip


def test_an_episode_has_what_its_prompt_and_lines_leave_of_it() -> None:
    """Of a server that counts no tokens everything is guessed, at four bytes a token."""
    endpoint = Endpoint(model="m", base_url="http://127.0.0.1:9/v1")
    limited = Player(endpoint, Sampling(max_tokens=100))
    prompt = (Segment("system", "x" * 4000),)
    turns = [Turn(prompt, Completion(text="y" * 400))]
    context = (*prompt, Segment("assistant", "y" * 400), Segment("user", "z" * 800))
    assert tokens_since(limited, [], context) == 0
    assert 300 <= tokens_since(limited, turns, context) < 400
    assert 8192 - 400 < episode_tokens_left(limited, turns, context) <= 8192 - 300
    assert [with_reply_limit(limited, n).sampling.max_tokens for n in (40, 400)] == [40, 100]


@pytest.mark.parametrize(
    ("left", "limit"), [(-5, None), (9, None), (10, 10), (99, 99), (100, 100), (101, 100)]
)
def test_a_reply_has_what_the_episode_has_left(left: int, limit: int | None) -> None:
    player = Player(Endpoint(model="m", base_url="http://127.0.0.1:9/v1"), Sampling(max_tokens=100))
    prompt, said = Segment("system", "You are Ann."), Segment("assistant", "Hello.")
    counts = (Usage(prompt_tokens=50), Usage(prompt_tokens=50 + 8192 - 3 - left,
                                             completion_tokens=7, reasoning_tokens=4))  # fmt: skip
    talk = Conversation("ann", [prompt, said, said])
    talk.turns = [Turn((prompt,), Completion(text="Hello.", usage=counts[0])),
                  Turn((prompt, said), Completion(text="Hello.", usage=counts[1]))]  # fmt: skip
    actor = within_episode(talk, player)
    assert limit == (None if actor is None else actor.sampling.max_tokens)
