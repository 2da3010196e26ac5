"""SimulatorArena's table for tests: actor, assistant, judge and coach behind one HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from soulkit.models.base import Cast, Panel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.sim_arena.task import SimArena
from soulkit.types import Example, Record
from tests.support.letters import released
from tests.support.road import player, run, task_of
from tests.support.servers.openai_server import Body, ScriptedServer

Says = Callable[[Body], str]
PHRASE = "terminate conversation"
FEATURE = {"Feature Name": "asks why", "Feature Question": "Does the student ask why?"}
LESSON: dict[str, Any] = {
    "problem": "Find x if 2x + 3 = 1103.",
    "correct_answer": "550",
    "user_profile_text": "- grade 8, shy",
    "human_user_queries": ["how do i even start here", "oh so minus three on both sides then"],
    "human_public_conversation": [
        {"role": "user", "content": "how do i even start here"},
        {"role": "assistant", "content": "What could you take away?"},
        {"role": "user", "content": "oh so minus three on both sides then"},
        {"role": "assistant", "content": "Exactly."},
    ],
    "target_interaction_style_features": [
        FEATURE,
        {"Feature Name": "short turns", "Feature Question": "How long?",
         "Feature Question Answer": "A few words."},
    ],
}  # fmt: skip
DOCUMENT: dict[str, Any] = {
    "document_type": "blog post",
    "intent": "share a soup recipe",
    "pre_writing_materials_text": "- Which soup?\n  Lentil.",
    "user_profile_text": "- casual writer",
    "human_user_queries": ["write about lentil soup", "shorter pls"],
    "human_public_conversation": "- User: write about lentil soup\n- AI: Ok\n- User: shorter pls",
    "target_document_preferences": "- short, warm",
    "target_writing_style_features": [
        {"Feature Name": "typos", "Feature Question": "Are there any?"},
        {"Feature Name": "lowercase", "Feature Question": "Is everything in small letters?"},
    ],
    "target_interaction_style_features": [
        {"Feature Name": "asks for edits", "Feature Question": "Does the person do it?"},
    ],
}  # fmt: skip
ROWS = {"sim_math": LESSON, "sim_doc": DOCUMENT}


def arena(name: str = "sim_math", protocol: str = "paper") -> SimArena:
    task = task_of(name, protocol)
    assert isinstance(task, SimArena)
    return task


def example(name: str = "sim_math", protocol: str = "paper", **changes: Any) -> Example:
    return arena(name, protocol).example(released({**ROWS[name], **changes}))


# -- judges ----------------------------------------------------------------------------------------


def asked_form(body: Body) -> Mapping[str, Any]:
    """The form of a judge's question: its `name` and `schema`."""
    form: Mapping[str, Any] = body["response_format"]["json_schema"]
    return form


def purpose(body: Body) -> str:
    """Which question a judge is asked."""
    prompt = str(body["messages"][0]["content"])
    openings = {
        "Compare how the two write": "writing", "Compare how the two deal": "interaction",
        "Rate a document": "document", "whether the program shows it": "fulfillment",
    }  # fmt: skip
    return next(name for words, name in openings.items() if words in prompt)


def feature_names(body: Body) -> list[str]:
    """What a schema says that the features are called."""
    text = json.dumps(asked_form(body)["schema"])
    schema = json.loads(text)["$defs"]["FeatureVerdict"]["properties"]["feature_name"]
    return list(schema.get("enum") or [schema["const"]])


def verdicts(
    writing: Any = 4, interaction: Any = 3, document: Any = 8, fulfillment: Any = None,
    why: str = "so it seems",
) -> Says:  # fmt: skip
    """A judge that gives these numbers, and for features a list of matches in their order, or a
    mapping from names; None: `Match` for all. A text is its whole reply."""

    def say(body: Body) -> str:
        name = purpose(body)
        if name == "fulfillment":
            return _fulfilment(feature_names(body), fulfillment, why)
        number = {"writing": writing, "interaction": interaction, "document": document}[name]
        if isinstance(number, str):
            return number
        if name == "document":
            return json.dumps({"analysis": why, "rating": number})
        return json.dumps({"key_differences": [why], "similarity_score": number})

    return say


def _fulfilment(names: Sequence[str], matches: Any, why: str) -> str:
    if isinstance(matches, str):
        return matches
    if matches is None:
        matches = dict.fromkeys(names, "Match")
    pairs = list(matches.items()) if isinstance(matches, dict) else [
        (names[min(i, len(names) - 1)], match) for i, match in enumerate(matches)
    ]  # fmt: skip
    results = [{"feature_name": n, "analysis": why, "classification": m} for n, m in pairs]
    return json.dumps({"results": results})


# -- the table -------------------------------------------------------------------------------------


def in_order(lines: Sequence[str | None], then: str = "") -> Says:
    """The lines one after the other, then always `then`."""
    waiting = iter(lines)
    return lambda _: next(waiting, then) or ""


def student(count: int = 2) -> Says:
    """So many messages, then the end; told by how often the actor has spoken."""

    def say(body: Body) -> str:
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        if spoken >= count:
            return PHRASE
        return "Query: how do i start" if not spoken else f"Response: ok so step {spoken}"

    return say


@contextmanager
def table(
    actor: str | Says | None = None, partner: str | Says = "What have you tried?",
    judge: str | Says = "", *, panel: Panel | None = None, judges: int = 1, coach: str | Says = "",
    **server: Any,
) -> Iterator[tuple[Cast, list[Body]]]:  # fmt: skip
    """(cast, requests) of a running server; a text is said again and again."""
    players = {
        "actor": student() if actor is None else actor, "partner": partner,
        "judge": judge or verdicts(), "coach": coach,
    }  # fmt: skip

    def answer(body: Body) -> str:
        reply = players[str(body["model"]).split("-")[0]]
        return reply if isinstance(reply, str) else reply(body)

    with ScriptedServer(answer=answer, **server) as running:
        yield Cast(
            actor=player(running.base_url, "actor"), partner=player(running.base_url, "partner"),
            judges=tuple(player(running.base_url, f"judge-{i}") for i in range(judges)),
            coach=player(running.base_url, "coach") if coach else None, panel=panel or Panel(),
        ), running.requests  # fmt: skip


def walked(
    name: str = "sim_math", protocol: str = "paper", row: Example | None = None,
    feedback: FeedbackPolicy | None = None, **players: Any,
) -> tuple[list[Record], list[Body]]:  # fmt: skip
    """The records of one rollout over HTTP, and everything that was asked."""
    with table(**players) as (cast, requests):
        job = Job(arena(name, protocol), row or example(name, protocol))
        plays = run(cast, Engine(cast, feedback=feedback).run([job], lambda record: None))
        return list(plays), requests


def record(name: str = "sim_math", protocol: str = "paper", **players: Any) -> Record:
    return walked(name, protocol, **players)[0][0]


def by(requests: Sequence[Body], model: str) -> list[Body]:
    """What one player was asked."""
    return [body for body in requests if str(body["model"]).startswith(model)]
