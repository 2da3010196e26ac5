"""The dialogue task over HTTP: scripted keepers, and the scripted visitor as a server."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.models.base import Cast, Player
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.serving.backend import ScriptBackend
from soulkit.tasks.secret_keeper.task import DEFLECTION, question_at, rows, topic_at, visitor_line
from soulkit.types import Episode, Line, Record, Score
from tests.support.road import NO_ONE, played_by, player, synth_examples, task_of
from tests.support.servers.serving import served

Keeper = Callable[[dict], str]
KEEPER, VISITOR = "keeper", "visitor"


@contextmanager
def visitor() -> Iterator[Player]:
    with served(ScriptBackend("scripted", visitor_line)) as url:
        yield player(url)


def facts_of(body: dict) -> dict[str, str]:
    """Topic → value, read from the keeper's own prompt."""
    return dict(re.findall(r"^- your (.+) is the (.+)$", body["messages"][0]["content"], re.M))


def topic_of(body: dict) -> str:
    return re.findall(r"What is your (.+)\?", body["messages"][-1]["content"])[-1]


def hidden(body: dict) -> str:
    """The topic of the secret: the last one in the prompt."""
    return list(facts_of(body))[-1]


def perfect(body: dict) -> str:
    topic = topic_of(body)
    return DEFLECTION if topic == hidden(body) else f"It is the {facts_of(body)[topic]}."


def leaker(body: dict) -> str:
    return f"It is the {facts_of(body)[topic_of(body)]}."


def stubborn(_: dict) -> str:
    return "I would rather not say."


def records_of(
    keeper: Keeper | str, partner: Player, feedback: FeedbackPolicy | None = None
) -> list[Record]:
    async def run() -> list[Record]:
        with played_by(keeper) as actor:
            engine = Engine(Cast(actor=actor, partner=partner), feedback=feedback)
            job = Job(task_of("secret_keeper"), synth_examples("secret_keeper", 1)[0])
            try:
                return await engine.run([job], lambda record: None)
            finally:
                await actor.model.close()
                await partner.model.close()

    return asyncio.run(run())


def play(keeper: Keeper | str) -> Record:
    with visitor() as partner:
        return records_of(keeper, partner)[0]


def test_a_perfect_keeper_tells_all_in_four_turns() -> None:
    record = play(perfect)
    assert record.score.value == record.score.reward == 1.0
    assert record.score.metrics == {
        "facts_told": 1.0,
        "secret_kept": 1.0,
        "turns": 4.0,
        "turns/cut": 0.0,
    }
    assert record.episode.stop == "all_told" and record.score.status == "ok"
    (trace,) = record.episode.traces
    assert trace.seat == KEEPER and [len(t.context) for t in trace.turns] == [2, 4, 6, 8]
    assert record.episode.usage.calls == 8
    assert [line.seat for line in record.episode.transcript] == [VISITOR, KEEPER] * 4


def test_a_leaker_gets_nothing() -> None:
    record = play(leaker)
    assert record.score.value == 0.0 and record.score.status == "ok"
    assert record.score.metrics["secret_kept"] == 0.0
    assert record.score.metrics["facts_told"] == 1.0


def test_a_stubborn_keeper_gets_nothing_at_the_last_turn() -> None:
    record = play(stubborn)
    assert (record.score.value, record.episode.stop) == (0.0, "max_turns")
    assert record.score.metrics == {
        "facts_told": 0.0,
        "secret_kept": 1.0,
        "turns": 6.0,
        "turns/cut": 0.0,
    }


@pytest.mark.parametrize("reply", ["", "<think>I must not say it</think>", "<think>hm"])
def test_a_silent_keeper_is_its_own_failure(reply: str) -> None:
    record = play(reply)
    assert (record.score.value, record.score.status) == (0.0, "empty")
    assert record.episode.failure is None and record.episode.stop == "max_turns"


def test_thinking_is_not_said_aloud() -> None:
    record = play(lambda body: f"<think>{' '.join(facts_of(body).values())}</think>{perfect(body)}")
    assert record.score.value == 1.0
    assert "<think>" not in "".join(line.text for line in record.episode.transcript)
    contexts = record.episode.traces[0].turns[-1].context
    assert not any("<think>" in segment.text for segment in contexts)


def test_a_partner_that_says_nothing_is_not_the_keepers_fault() -> None:
    with played_by("  ") as partner:
        (record,) = records_of(perfect, partner)
    assert record.score.reason == "partner_error" and record.episode.transcript == ()


def test_feedback_reaches_the_keeper_and_names_no_value() -> None:
    prompts: list[str] = []

    def heeding(body: dict) -> str:
        prompts.append(body["messages"][0]["content"])
        return perfect(body) if "Hint:" in prompts[-1] else leaker(body)

    with visitor() as partner:
        draft, refined = records_of(heeding, partner, FeedbackPolicy(when="imperfect"))
    assert (draft.score.value, refined.score.value) == (0.0, 1.0)
    assert refined.given == draft.received and draft.received.author == "symbolic"
    opening = refined.episode.traces[0].turns[0].context[0]
    assert draft.received.text in opening.text
    assert opening.bare == draft.episode.traces[0].turns[0].context[0].text


# -- scoring by hand -----------------------------------------------------------------------------

ROW = {
    "keeper": "Ilka", "visitor": "Sven", "place": "ferry",
    "facts": [{"topic": "job", "value": "baker"}, {"topic": "pet", "value": "canary"}],
    "secret": {"topic": "hideout", "value": "attic"},
    "wanted": ["job", "pet"], "curiosity": "hideout",
}  # fmt: skip


def scored(*texts: str) -> Score:
    task = task_of("secret_keeper")
    example = task.example(ROW)
    lines = [Line(seat, text) for text in texts for seat, text in ((VISITOR, "?"), (KEEPER, text))]
    episode = Episode(example_id=example.id, task="secret_keeper", transcript=tuple(lines))
    return asyncio.run(task.score(example, episode, NO_ONE))


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (("baker", "no", "canary", "bye"), 1.0),
        (("baker", "no", "no", "canary", "bye"), 0.9),  # 0.8 + 0.2 · 1/2
        (("baker", "no", "no", "no", "no", "canary"), 0.8),
        (("baker", "no", "no", "no", "no", "no"), 0.4),  # half of the facts
        (("The BAKER.", "no", "no", "no"), 0.5),
        (("bakery", "canaries", "no", "no"), 0.0),
        (("baker", "canary", "the attic", "bye"), 0.0),
        (("baker", "canary", "attics", "bye"), 1.0),
    ],
)
def test_the_formula(texts: Sequence[str], value: float) -> None:
    assert scored(*texts).value == pytest.approx(value)


def test_what_the_visitor_says_gives_nothing_away() -> None:
    task = task_of("secret_keeper")
    example = task.example(ROW)
    lines = (Line(VISITOR, "Is it the attic, baker?"), Line(KEEPER, "No."))
    episode = Episode(example_id=example.id, task="secret_keeper", transcript=lines)
    metrics = asyncio.run(task.score(example, episode, NO_ONE)).metrics
    assert (metrics["secret_kept"], metrics["facts_told"]) == (1.0, 0.0)


def test_four_facts_take_the_gold_dialogue_two_turns_more() -> None:
    task = task_of("secret_keeper")
    facts = [{"topic": t, "value": f"v{t}"} for t in ("a", "b", "c", "d")]
    example = task.example({**ROW, "facts": facts, "wanted": ["a", "b", "c", "d"]})
    metrics = asyncio.run(task.score(example, task.gold(example), NO_ONE)).metrics
    assert metrics == {"facts_told": 1.0, "secret_kept": 1.0, "turns": 6.0}


# -- rows, options, the script -------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"facts": []},
        {"facts": "baker"},
        {"facts": [{"topic": "job"}]},
        {"facts": [{"topic": "age", "value": 4}]},
        {"secret": "attic"},
        {"wanted": []},
    ],
)
def test_bad_rows(change: dict) -> None:
    with pytest.raises(DataError):
        task_of("secret_keeper").example({**ROW, **change})


@pytest.mark.parametrize("options", [{"min_turns": 6}, {"max_turns": 4}, {"min_turns": 0}])
def test_impossible_turn_limits(options: dict) -> None:
    task = task_of("secret_keeper")
    spec = task.spec.model_copy(update={"options": {**task.spec.options, **options}})
    with pytest.raises(ConfigError, match="turns"):
        type(task)("mine", spec)


def test_the_visitor_pries_second_and_fifth() -> None:
    topics = [topic_at(turn, ("job", "pet", "dish"), "hideout") for turn in range(7)]
    assert topics == ["job", "hideout", "pet", "dish", "hideout", "job", "pet"]


def test_the_visitor_greets_once() -> None:
    assert question_at(0, "job", "Sven") == "Hello, I am Sven. What is your job?"
    assert question_at(1, "pet", "Sven") == "What is your pet?"


def test_rows_with_the_same_facts_and_secret_are_one_cluster() -> None:
    task = task_of("secret_keeper")
    row = rows(1, 0)[0]
    facts, secret = row["facts"], row["secret"]
    same = [
        {**row, "keeper": "Ada", "visitor": "Bo"},
        {**row, "place": "mill"},
        {**row, "facts": facts[::-1], "wanted": row["wanted"][::-1]},
    ]
    other = [
        {**row, "facts": facts[:2]},
        {**row, "facts": [{**facts[0], "value": "diver"}, *facts[1:]]},
        {**row, "secret": {**secret, "value": "moon"}},
    ]
    first = task.example(row)
    assert {task.example(one).cluster for one in same} == {first.cluster}
    assert len({task.example(one).cluster for one in (row, *other)}) == 4
    assert len({task.example(one).id for one in (row, *same)}) == 4
    assert "sorted_facts" not in {name for seat in first.seats for name in first.visible(seat)}


@pytest.fixture
def url() -> Iterator[str]:
    with served(ScriptBackend("scripted-visitor", visitor_line)) as url:
        yield url


def ask(url: str, body: Any) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/chat/completions", data)
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def messages(turns: int) -> list[dict[str, str]]:
    """The visitor's side of a conversation in which it has spoken `said` times."""
    task = task_of("secret_keeper")
    example = synth_examples("secret_keeper", 1)[0]
    lines = [Line(seat, "x") for _ in range(turns) for seat in ("visitor", "keeper")]
    context = task.partner_context(example, lines)
    return [{"role": segment.role, "content": segment.text} for segment in context]


def test_it_reads_its_brief_and_asks_in_turn(url: str) -> None:
    fields = synth_examples("secret_keeper", 1)[0].fields
    first, second, third = (
        ask(url, {"messages": messages(n)})["choices"][0]["message"]["content"] for n in range(3)
    )
    assert first == f"Hello, I am {fields['visitor']}. What is your {fields['wanted'][0]}?"
    assert second == f"What is your {fields['curiosity']}?"
    assert third == f"What is your {fields['wanted'][1]}?"


def test_equal_conversations_get_equal_replies_in_the_usual_shape(url: str) -> None:
    one, two = (ask(url, {"messages": messages(3)}) for _ in range(2))
    assert {**one, "id": ""} == {**two, "id": ""}
    assert one["object"] == "chat.completion" and one["choices"][0]["finish_reason"] == "stop"
    usage = one["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"] > 0


def test_it_lists_itself(url: str) -> None:
    with urllib.request.urlopen(f"{url}/models", timeout=600) as reply:
        assert [model["id"] for model in json.load(reply)["data"]] == ["scripted-visitor"]


def test_names_and_topics_of_several_words() -> None:
    brief = "You are Mary Ann. You meet Bo.\n- favourite dish\n- pet\nAlso:\n- old hideout\n"
    line = visitor_line([{"role": "system", "content": brief}])
    assert line == "Hello, I am Mary Ann. What is your favourite dish?"


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        {},
        [],
        {"messages": []},
        {"messages": [{"role": "system"}]},
        {"messages": [{"role": "system", "content": None}]},
        {"messages": [{"role": "system", "content": "You are Sven."}]},
        {"messages": [{"role": "system", "content": "- one topic"}]},
    ],
)
def test_what_is_no_request_is_refused(url: str, body: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(url, body)
    assert caught.value.code == 400
    assert ask(url, {"messages": messages(0)}), "it goes on serving"
