"""The scripted visitor as a server: what it says, to whom, and what it refuses."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from soulkit.serving.partner import make_server
from soulkit.tasks.secret_keeper.visitor import visitor_line
from soulkit.types import Line
from tests.support.road import synth_examples, task_of


@pytest.fixture
def url() -> Iterator[str]:
    server = make_server(visitor_line, "scripted-visitor")
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


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
    assert one == two
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
