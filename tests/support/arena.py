"""SimulatorArena's players for tests: actor, assistant, judge and coach behind one HTTP server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.sim_arena.task import SimArena
from soulkit.types import Example, Record
from tests.support import table as tables
from tests.support.letters import released
from tests.support.road import task_of
from tests.support.servers.openai_server import Body
from tests.support.table import recorded

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
    """The response format of a judge's question: its `name` and `schema`."""
    form: Mapping[str, Any] = body["response_format"]["json_schema"]
    return form


def purpose(body: Body) -> str:
    """The kind of question that a judge is asked."""
    prompt = str(body["messages"][0]["content"])
    openings = {
        "Compare how the two write": "writing", "Compare how the two deal": "interaction",
        "Rate a document": "document", "whether the program shows it": "fulfillment",
    }  # fmt: skip
    return next(name for words, name in openings.items() if words in prompt)


def feature_names(body: Body) -> list[str]:
    """The names of the features in a schema."""
    text = json.dumps(asked_form(body)["schema"])
    schema = json.loads(text)["$defs"]["FeatureVerdict"]["properties"]["feature_name"]
    return list(schema.get("enum") or [schema["const"]])


def verdicts(
    writing: Any = 4, interaction: Any = 3, document: Any = 8, fulfillment: Any = None,
    why: str = "so it seems",
) -> Says:  # fmt: skip
    """A judge that gives these numbers, and for features a list of matches in order or a mapping by
    name; None: `Match` for all. A string is the complete reply."""

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


def student(count: int = 2) -> Says:
    """An actor that sends this many messages and then ends the conversation."""

    def say(body: Body) -> str:
        spoken = sum(message["role"] == "assistant" for message in body["messages"])
        if spoken >= count:
            return PHRASE
        return "Query: how do i start" if not spoken else f"Response: ok so step {spoken}"

    return say


def players(**says: Any) -> dict[str, Any]:
    """The usual players of a conversation, with these replaced."""
    usual = {"actor": student(), "partner": "What have you tried?", "judge": verdicts()}
    return {**usual, **says}


def table(**says: Any) -> AbstractContextManager[tuple[Cast, list[Body]]]:
    return tables.table(**players(**says))


def walked(
    name: str = "sim_math", protocol: str = "paper", row: Example | None = None,
    feedback: FeedbackPolicy | None = None, **says: Any,
) -> tuple[list[Record], list[Body]]:  # fmt: skip
    """The records of one rollout over HTTP, and all requests."""
    talk = row or example(name, protocol)
    return recorded(arena(name, protocol), talk, feedback, **players(**says))


def record(name: str = "sim_math", protocol: str = "paper", **says: Any) -> Record:
    return walked(name, protocol, **says)[0][0]
