"""Bound mode: prompts and roles, the draw of a persona, the forms of an end, and refusals."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from soulkit.errors import ConfigError
from soulkit.judge.structured import read_shape
from soulkit.serving.backend import Body, Chunk, RequestError, chunk_head, usage_of
from soulkit.serving.bound import END_TOOL, ENDED, BoundBackend, row_briefs
from soulkit.tasks.kit.person.brief import END_MARK, START, Brief
from soulkit.tasks.person_chat.task import PersonRatings
from tests.support.road import synth_examples, task_of

BRIEFS = tuple(Brief(f"Writes like p{i}.", "Wants a lamp.", f"p{i}", "lamp") for i in range(20))
GREETING = {"role": "assistant", "content": "Hello!"}


class Pieces:
    """A model that answers with fixed pieces."""

    name, context_limit = "m", 128
    last: ClassVar[Body] = {}

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        type(self).last = body
        head = chunk_head(self.name)
        yield {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for piece in self.pieces:
            yield {**head, "choices": [{"index": 0, "delta": {"content": piece}}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": usage_of(1, 1)}

    async def close(self) -> None: ...


def replied(
    messages: Sequence[Any], pieces: Sequence[str] = ("ok",), *, conversation: str = "",
    ending: Any = "marker", system: Any = "refuse", **body: Any,
) -> list[Chunk]:  # fmt: skip
    backend = BoundBackend(Pieces(pieces), BRIEFS, ending, system)

    async def collect() -> list[Chunk]:
        request = {"model": "m", "messages": messages, **body}
        return [chunk async for chunk in backend.chunks(request, conversation)]

    return asyncio.run(collect())


def contents(chunks: Sequence[Chunk]) -> list[str]:
    texts = [one["delta"].get("content") for c in chunks for one in c["choices"]]
    return [text for text in texts if text]


def test_the_model_has_the_persona_and_hears_the_agent_as_the_user() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}]
    replied([
        GREETING, {"role": "user", "content": "my lamp is late"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "order 17"},
        {"role": "assistant", "content": [{"type": "text", "text": "Since when?"}]},
    ], temperature=0.5)  # fmt: skip
    system, *talk = Pieces.last["messages"]
    assert "Writes like p" in system["content"] and END_MARK in system["content"]
    assert [(m["role"], m["content"]) for m in talk] == [
        ("user", "Hello!"), ("assistant", "my lamp is late"), ("user", "Since when?"),
    ]  # fmt: skip
    assert Pieces.last["temperature"] == 0.5
    replied([])
    assert Pieces.last["messages"][1]["content"] == START


def brief_of_reply(messages: Sequence[Any], **more: Any) -> str:
    return str(replied(messages, **more)[0]["soulkit"]["brief"])


def test_a_conversation_keeps_its_persona_and_others_have_other_ones() -> None:
    later = [GREETING, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}]
    ids = [str(i) for i in range(30)]
    drawn = [brief_of_reply([GREETING], conversation=i) for i in ids]
    assert drawn == [brief_of_reply(later, conversation=i) for i in ids] and len(set(drawn)) > 5
    assert drawn == [brief_of_reply(later, user=i) for i in ids]
    assert brief_of_reply([GREETING]) == brief_of_reply(later), "without an id: the opening"
    assert brief_of_reply([]) == brief_of_reply(later[1:])
    greetings = [{"role": "assistant", "content": f"Hello {i}"} for i in ids]
    assert len({brief_of_reply([one]) for one in greetings}) > 5


SPLITS = [
    [f"bye \n{END_MARK} more"],
    ["bye", " \n#", "##ST", "OP###", " more"],
    [*f"bye {END_MARK}"],
]


@pytest.mark.parametrize("pieces", SPLITS)
def test_the_end_has_the_form_that_was_asked_for(pieces: list[str]) -> None:
    by_form = {form: replied([GREETING], pieces, ending=form)
               for form in ("marker", "tool", "finish")}  # fmt: skip
    texts = {form: contents(chunks) for form, chunks in by_form.items()}
    assert "".join(texts["marker"]).split() == ["bye", END_MARK]
    assert sum("#" in text for text in texts["marker"]) == 1, "the mark is in one piece"
    assert "".join(texts["tool"]) == "".join(texts["finish"]) == "bye"
    last = {form: chunks[-2]["choices"][0] for form, chunks in by_form.items()}
    assert (last["marker"]["finish_reason"], last["finish"]["finish_reason"]) == ("stop", "stop")
    assert last["finish"]["stop_reason"] == ENDED
    assert last["tool"]["finish_reason"] == "tool_calls"
    assert last["tool"]["delta"]["tool_calls"][0]["function"]["name"] == END_TOOL


@pytest.mark.parametrize("text", ["no end", "### no end #", "###STOP", "a\n\n"])
def test_a_reply_that_does_not_end_is_unchanged(text: str) -> None:
    chunks = replied([GREETING], [*text], ending="finish")
    assert "".join(contents(chunks)) == text
    assert "stop_reason" not in chunks[-2]["choices"][0] and chunks[-1]["usage"]


SYSTEM = {"role": "system", "content": "Speak like a pirate."}


def test_a_system_prompt_of_the_client_is_refused_ignored_or_appended() -> None:
    with pytest.raises(RequestError, match="--system ignore"):
        replied([SYSTEM, GREETING])
    replied([SYSTEM, GREETING], system="ignore")
    assert "pirate" not in str(Pieces.last["messages"])
    replied([SYSTEM, GREETING], system="append")
    assert Pieces.last["messages"][0]["content"].endswith("Speak like a pirate.")


TOOL = {"type": "function", "function": {"name": "find"}}
END = {"type": "function", "function": {"name": END_TOOL}}


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("messages", {"messages": [GREETING, {"role": "user", "content": "hi"}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "content": [
            {"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("tools", {"tools": [TOOL]}), ("tools", {"tools": [END]}),
        ("tools", {"tools": [END, TOOL], "ending": "tool"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("logprobs", {"logprobs": True}),
    ],
)  # fmt: skip
def test_what_a_person_cannot_do_is_refused_by_name(param: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refusal:
        replied(**{"messages": [GREETING], **body})
    assert (refusal.value.param, refusal.value.status) == (param, 400)


def test_the_end_tool_may_be_listed_where_it_is_called() -> None:
    replied([GREETING], tools=[END], tool_choice="auto", ending="tool")
    assert "tools" not in Pieces.last and "tool_choice" not in Pieces.last


@pytest.mark.parametrize("task", ["person_chat", "mirrorbench", "secret_keeper"])
def test_the_actor_of_a_task_can_be_served(task: str) -> None:
    rows = synth_examples(task, 3)
    briefs = row_briefs(task_of(task), rows)
    assert [b.prompt().text for b in briefs] == [
        task_of(task).slot(row, task_of(task).acted_seat(row), None).text for row in rows
    ]


@pytest.mark.parametrize("task", ["tomi", "sim_math", "sotopia"])
def test_other_actors_are_refused_by_name(task: str) -> None:
    with pytest.raises(ConfigError, match=task):
        row_briefs(task_of(task), synth_examples(task, 3))


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["tau2_user.py", "verifiers_user.py"])
def test_examples_for_packages_that_are_not_installed_compile(name: str) -> None:
    compile((EXAMPLES / name).read_text(encoding="utf-8"), name, "exec")


def test_the_scripted_person_ends_and_its_judge_is_readable() -> None:
    script = runpy.run_path(str(EXAMPLES / "scripted_person.py"))
    talk = [{"role": "system", "content": ""}, *[{"role": "assistant", "content": ""}] * 2]
    assert script["person"](talk).endswith(END_MARK)
    read_shape(script["judge"]([{"role": "user", "content": "Rate"}]), PersonRatings)
