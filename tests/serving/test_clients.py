"""Whole conversations of real clients with a real server process, in plain and in bound mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from soulkit.serving.backend import ScriptBackend
from soulkit.serving.bound import BoundBackend
from soulkit.tasks.kit.person.brief import Brief
from tests.support.servers.serving import served
from tests.support.serving import MARKS, PERSON, person, scripted

pytestmark = pytest.mark.slow
Messages = Sequence[dict[str, str]]
Client = Callable[[str, Messages], str]
KEY = "none"


def by_openai(url: str, messages: Messages) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
    stream = client.chat.completions.create(model="sim", messages=messages, stream=True)  # type: ignore[arg-type]
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]


def by_litellm(url: str, messages: Messages) -> str:
    litellm = pytest.importorskip("litellm")  # `make test-slow` installs the clients
    reply = litellm.completion("openai/sim", list(messages), api_base=url, api_key=KEY)
    return str(reply.choices[0].message.content)


def by_pydantic_ai(url: str, messages: Messages) -> str:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import messages as parts
    from pydantic_ai.direct import model_request_sync
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kinds = {"system": parts.SystemPromptPart, "user": parts.UserPromptPart}
    history = [
        parts.ModelResponse([parts.TextPart(m["content"])]) if m["role"] == "assistant"
        else parts.ModelRequest([kinds[m["role"]](m["content"])])
        for m in messages
    ]  # fmt: skip
    model = OpenAIChatModel("sim", provider=OpenAIProvider(base_url=url, api_key=KEY))
    return "".join(part.content for part in model_request_sync(model, history).parts)  # type: ignore[union-attr]


def by_inspect_ai(url: str, messages: Messages) -> str:
    inspect = pytest.importorskip("inspect_ai.model")

    kinds = {"system": inspect.ChatMessageSystem, "user": inspect.ChatMessageUser,
             "assistant": inspect.ChatMessageAssistant}  # fmt: skip
    sim = inspect.get_model("openai-api/soul/sim", base_url=url, api_key=KEY, memoize=False)
    talk = [kinds[m["role"]](content=m["content"]) for m in messages]
    return asyncio.run(sim.generate(talk)).completion


CLIENTS = (by_openai, by_litellm, by_pydantic_ai, by_inspect_ai)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with scripted("marks") as url:
        yield url


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("people")
    personas, scenarios = folder / "personas.jsonl", folder / "scenarios.jsonl"
    personas.write_text(json.dumps({"id": "u7", "persona": "Writes in small letters."}))
    scenarios.write_text(json.dumps({"id": "lamp", "scenario": "Your lamp is late."}))
    with scripted("person", "--persona", personas, "--scenario", scenarios) as url:
        yield url


@pytest.mark.parametrize("client", CLIENTS)
def test_in_plain_mode_the_client_has_the_prompt_the_roles_and_its_marks(
    client: Client, plain: str
) -> None:
    talk = [{"role": "system", "content": "You are Ada."}, {"role": "user", "content": "Hello!"}]
    for mark in MARKS:
        talk.append({"role": "assistant", "content": client(plain, talk)})
        assert talk[-1]["content"] == f"You are Ada. {mark}"
        talk.append({"role": "user", "content": "Go on."})


@pytest.mark.parametrize("client", CLIENTS)
def test_in_bound_mode_the_client_sends_what_its_agent_sees(client: Client, bound: str) -> None:
    talk = [{"role": "assistant", "content": "Hello, how can I help?"}]
    for line in PERSON:
        talk.append({"role": "user", "content": client(bound, talk)})
        assert talk[-1]["content"] == line
        talk.append({"role": "assistant", "content": "Let me see."})


def test_the_person_writes_first_to_an_empty_conversation(bound: str) -> None:
    assert by_openai(bound, []) == PERSON[0]


def test_what_the_mode_does_not_have_is_refused_by_name(plain: str, bound: str) -> None:
    from openai import BadRequestError, OpenAI

    tools: Any = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    user: Any = [{"role": "user", "content": "Hi"}]
    agent: Any = [{"role": "assistant", "content": "Hi"}]
    system: Any = [{"role": "system", "content": "You are Ada."}, *agent]
    for url, messages, more, named in (
        (plain, user, {"tools": tools}, "tools"), (bound, agent, {"tools": tools}, "tools"),
        (bound, system, {}, "--system"), (bound, user, {}, "assistant"),
    ):  # fmt: skip
        client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        with pytest.raises(BadRequestError, match=named):
            client.chat.completions.create(model="sim", messages=messages, **more)


@pytest.mark.parametrize("end", ["tool", "finish"])
def test_other_forms_of_the_end_reach_a_client(end: Any) -> None:
    from openai import OpenAI

    talk: list[Any] = [{"role": "assistant", "content": "Hello!"}]
    briefs = [Brief("Writes in small letters.", "Your lamp is late.")]
    with served(BoundBackend(ScriptBackend("sim", person), briefs, end)) as url:
        client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        for line in PERSON:
            choice = client.chat.completions.create(model="sim", messages=talk).choices[0]
            talk += [{"role": "user", "content": choice.message.content},
                     {"role": "assistant", "content": "?"}]  # fmt: skip
            ended = line == PERSON[-1]
            assert choice.message.content == line.removesuffix("###STOP###").strip()
            assert bool(choice.message.tool_calls) == (ended and end == "tool")
            reason = getattr(choice, "stop_reason", None)
            assert (reason == "end_of_conversation") == (ended and end == "finish")
