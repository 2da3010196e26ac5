"""Request logs and traces of LLM applications are recognised, and requests become conversations."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.data.corpora.lessons import LessonShape, conversation_of, lesson_from
from soulkit.data.exports.layouts import ReadOptions
from soulkit.data.exports.reading import import_chats, recognise
from soulkit.data.files import BadRow
from soulkit.errors import DataError

SYSTEM = "You help customers of a shop."
ONE, TWO = "hi, wheres order 12?", "thx. and when does it come"
CALLED, SENT, LAST = '{"order": 12}', "It was shipped today.", "On Tuesday."
ARGUMENTS = {"order": 12}
LOOKUP = ("lookup", "shipped")

EXPECTED = [
    ("system", SYSTEM),
    ("user", ONE),
    ("call", "lookup"),
    ("tool", "shipped"),
    ("assistant", SENT),
    ("user", TWO),
    ("assistant", LAST),
]
"""The conversation in every log below: one row from three requests, the last with all messages."""

Files = Mapping[str, list[Any]]


# --- OpenAI chat completions ----------------------------------------------------------------------

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": CALLED}}
    ],
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": [{"type": "text", "text": ONE}]},
    CALL,
    {"role": "tool", "tool_call_id": "call_1", "content": "shipped"},
    {"role": "assistant", "content": SENT, "refusal": None},
    {"role": "user", "content": TWO},
    {"role": "assistant", "content": LAST, "refusal": None},
]
PLAIN = [CHAT[0], *CHAT[1:2], *CHAT[4:]]
"""The same without the tool."""
STEPS = ((2, 2), (4, 4), (6, 6))
"""(messages of the request, place of the answer) of the three requests."""


def completion(answer: Any, number: int = 0) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1_700_000_000 + number,
        "model": "gpt-4o", "usage": {"prompt_tokens": 9, "completion_tokens": 5},
        "choices": [{"index": 0, "message": answer, "finish_reason": "stop", "logprobs": None}],
    }  # fmt: skip


FAILURE = {"error": {"message": "Rate limit reached", "type": "tokens", "code": "rate_limit"}}

OPENAI = [
    {"request": {"model": "gpt-4o", "messages": CHAT[:n], "user": "u7"},
     "response": completion(CHAT[a], n)}
    for n, a in STEPS
]  # fmt: skip
OPENAI.append({"request": OPENAI[0]["request"], "response": FAILURE})

HELICONE = [
    {"request_created_at": f"2025-01-0{n}", "user_id": "u7",
     "request_body": json.dumps({"model": "gpt-4o", "messages": CHAT[:n]}),
     "response_body": json.dumps(completion(CHAT[a], n))}
    for n, a in STEPS
]  # fmt: skip

STORED = [
    {**completion(CHAT[a], n), "metadata": {"user_id": "u7"}, "messages": CHAT[:n]}
    for n, a in STEPS
]


def batch_request(number: int, messages: list[Any]) -> dict[str, Any]:
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "gpt-4o", "messages": messages, "user": "u7"}}  # fmt: skip


def batch_response(number: int, code: int, body: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{number}", "custom_id": f"request-{number}",
            "error": None,
            "response": {"status_code": code, "request_id": "r", "body": body}}  # fmt: skip


BATCH_INPUT = [batch_request(n, CHAT[:n]) for n, _ in STEPS] + [batch_request(9, CHAT[:2])]
BATCH_OUTPUT = [batch_response(n, 200, completion(CHAT[a])) for n, a in reversed(STEPS)]
BATCH_OUTPUT.append(batch_response(9, 400, FAILURE))

# --- OpenAI Responses -----------------------------------------------------------------------------


def words(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": "msg_1", "role": role, "status": "completed",
            "content": [{"type": kind, "text": text, "annotations": []}]}  # fmt: skip


ITEMS: list[Any] = [
    {"role": "developer", "content": SYSTEM},
    words("user", ONE),
    {"type": "function_call", "call_id": "c", "name": "lookup", "arguments": CALLED, "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c", "output": "shipped"},
    words("assistant", SENT),
    words("user", TWO),
    words("assistant", LAST),
]
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}


def response(number: int, output: list[Any], **more: Any) -> dict[str, Any]:
    return {"id": f"resp_{number}", "object": "response", "created_at": number, "error": None,
            "status": "completed", "output": [REASONING, *output], "user": "u7",
            "previous_response_id": None, **more}  # fmt: skip


RESPONSES = [
    {"request": {"model": "gpt-5", "input": ITEMS[:n]}, "response": response(n, [ITEMS[a]])}
    for n, a in STEPS
]
# --- Anthropic ------------------------------------------------------------------------------------

BLOCKS: list[Any] = [
    {"role": "user", "content": ONE},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "tool_use", "id": "toolu_1", "name": "lookup", "input": ARGUMENTS}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1",
         "content": [{"type": "text", "text": "shipped"}]}]},
    {"role": "assistant", "content": [{"type": "text", "text": SENT}]},
    {"role": "user", "content": [{"type": "text", "text": TWO}]},
    {"role": "assistant", "content": [{"type": "text", "text": LAST}]},
]  # fmt: skip
TURNS = (1, 3, 5)


def anthropic_request(n: int) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 99, "system": [{"type": "text", "text": SYSTEM}],
            "messages": BLOCKS[:n], "metadata": {"user_id": "u7"}}  # fmt: skip


def anthropic_message(n: int) -> dict[str, Any]:
    return {"id": f"msg_{n}", "type": "message", **BLOCKS[n], "model": "claude",
            "stop_reason": "end_turn", "usage": {"output_tokens": 4}}  # fmt: skip


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
ANTHROPIC = [{"request": anthropic_request(n), "response": anthropic_message(n)} for n in TURNS]
ANTHROPIC.append({"request": anthropic_request(1), "response": OVERLOADED})
CLAUDE_INPUT = [{"custom_id": f"r{n}", "params": anthropic_request(n)} for n in TURNS]
CLAUDE_INPUT.append({"custom_id": "r9", "params": anthropic_request(1)})
CLAUDE_OUTPUT: list[Any] = [
    {"custom_id": f"r{n}", "result": {"type": "succeeded", "message": anthropic_message(n)}}
    for n in TURNS
]
CLAUDE_OUTPUT.append({"custom_id": "r9", "result": {"type": "errored", "error": OVERLOADED}})

# --- LiteLLM --------------------------------------------------------------------------------------


def litellm(n: int, a: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{n}", "trace_id": f"made{n}", "call_type": "acompletion",
            "status": "success", "response_cost": 0.01, "startTime": 1.5 + n, "end_user": "u7",
            "metadata": {"user_api_key_user_id": "owner", "user_api_key_hash": "8f"},
            "messages": CHAT[:n], "response": completion(CHAT[a]), "error_str": None,
            "model_parameters": {}, "hidden_params": {}}  # fmt: skip


LITELLM = [litellm(n, a) for n, a in STEPS]
LITELLM.append({**litellm(2, 2), "status": "failure", "response": {}, "error_str": "Timeout"})
SPEND = [
    {"request_id": f"chatcmpl-{n}", "call_type": "acompletion", "api_key": "8f", "spend": 0.1,
     "startTime": f"2025-01-01T00:00:0{n}Z", "user": "owner", "end_user": "u7", "session_id": "s1",
     "messages": "{}", "proxy_server_request": json.dumps({"model": "m", "messages": CHAT[:n]}),
     "response": json.dumps(completion(CHAT[a]))}
    for n, a in STEPS
]  # fmt: skip
EMBEDDING = {"request_id": "e", "call_type": "aembedding", "end_user": "u7", "messages": "{}",
             "response": '{"object": "list", "data": [{"embedding": [0.1]}]}'}  # fmt: skip

# --- Langfuse -------------------------------------------------------------------------------------

OBSERVATIONS: list[Any] = [
    {"id": f"o{n}", "traceId": f"t{n // 3}", "type": "GENERATION", "name": "chat",
     "startTime": f"2025-01-01T00:00:0{n}.000Z", "parentObservationId": "root", "level": "DEFAULT",
     "input": json.dumps(CHAT[:n]), "output": json.dumps(CHAT[a])}
    for n, a in STEPS
]  # fmt: skip
TRACES: list[Any] = [
    {"id": f"t{n}", "timestamp": f"2025-01-01T00:00:0{n}.000Z", "name": "chat", "userId": "u7",
     "sessionId": "s1", "input": {"question": text}, "output": "…", "metadata": {}, "tags": []}
    for n, text in ((0, ONE), (1, ONE), (2, TWO))
]  # fmt: skip
SPAN = {"id": "x", "traceId": "t2", "type": "SPAN", "parentObservationId": "o6", "input": "q",
        "output": ["passage"], "startTime": "2025"}  # fmt: skip
ENRICHED = [
    {**{k: v for k, v in o.items() if k not in ("traceId", "parentObservationId")},
     "trace_id": o["traceId"], "parent_observation_id": "root", "user_id": "u7",
     "session_id": "s1", "trace_name": "chat", "project_id": "p"}
    for o in OBSERVATIONS
]  # fmt: skip
NESTED = {"trace": {**TRACES[2], "id": "t2"}, "observations": [SPAN, OBSERVATIONS[2]]}

PAGE = {"data": [{**trace, "htmlPath": "/x", "observations": OBSERVATIONS[n : n + 1]}
                 for n, trace in enumerate(TRACES)], "meta": {"page": 1}}  # fmt: skip
SESSION = {"id": "s1", "createdAt": "2025", "projectId": "p", "users": ["u7"], "traces": [
    {**trace, "sessionId": None, "observations": ["o1"], "input": {"messages": CHAT[:n]},
     "output": CHAT[a]} for trace, (n, a) in zip(TRACES, STEPS, strict=True)]}  # fmt: skip

# --- LangSmith ------------------------------------------------------------------------------------


def constructor(kind: str, **kwargs: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind],
            "kwargs": {"additional_kwargs": {}, "response_metadata": {}, **kwargs}}  # fmt: skip


LANGCHAIN: list[Any] = [
    constructor("SystemMessage", content=SYSTEM, type="system"),
    constructor("HumanMessage", content=ONE, type="human", id="1f"),
    constructor("AIMessage", content="", type="ai",
                tool_calls=[{"name": "lookup", "args": ARGUMENTS, "id": "c", "type": "tool_call"}]),
    constructor("ToolMessage", content="shipped", type="tool", tool_call_id="c", name="lookup"),
    constructor("AIMessageChunk", content=[{"type": "text", "text": SENT, "index": 0}]),
    constructor("HumanMessage", content=TWO),
    constructor("AIMessage", content=LAST),
]  # fmt: skip


THREAD = {"thread_id": "s1", "user_id": "u7"}


def run(number: int, kind: str, inputs: Any, outputs: Any, parent: str | None) -> dict[str, Any]:
    return {"id": f"run{number}", "name": "x", "run_type": kind, "trace_id": f"trace{number}",
            "start_time": f"2025-01-01T00:00:0{number}", "session_id": "project", "error": None,
            "inputs": inputs, "outputs": outputs, "parent_run_id": parent, "dotted_order": "1.2",
            "extra": {"metadata": {} if parent else THREAD}}  # fmt: skip


def generation(message: Any) -> dict[str, Any]:
    return {"generations": [[{"text": "", "type": "ChatGeneration", "message": message,
                              "generation_info": {"finish_reason": "stop"}}]],
            "llm_output": {"model_name": "gpt-4o"}, "run": None, "type": "LLMResult"}  # fmt: skip


LANGSMITH = [
    record
    for n, a in STEPS
    for record in (
        run(n, "chain", {"input": "raw"}, {"output": "raw"}, None),
        run(n, "llm", {"messages": [LANGCHAIN[:n]]}, generation(LANGCHAIN[a]), f"run{n}"),
        run(n, "retriever", {"query": "q"}, {"documents": []}, f"run{n}"),
    )
]
SHORT = [
    {"type": {"S": "system", "H": "human", "A": "ai", "T": "tool"}[m["id"][-1][0]], **m["kwargs"]}
    for m in LANGCHAIN
]
LANGGRAPH = [
    run(n, "chain", {"messages": [SHORT[5]]}, {"messages": SHORT[: n + 1]}, None) for n in (4, 6)
]
"""The state of a graph: the input is the new message, the output is the whole thread."""

# --- OpenTelemetry --------------------------------------------------------------------------------


def attributes(fields: Mapping[str, Any]) -> list[Any]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in fields.items()]


def otlp(*spans: tuple[Mapping[str, Any], list[Any]]) -> dict[str, Any]:
    return {"resourceSpans": [{
        "resource": {"attributes": attributes({"service.name": "shop"})},
        "scopeSpans": [{"scope": {"name": "opentelemetry.instrumentation.openai_v2"}, "spans": [
            {"traceId": "5b8e", "spanId": f"eee{n}", "parentSpanId": "", "kind": 3, "name": "chat",
             "startTimeUnixNano": str(n), "attributes": attributes(fields), "events": events,
             "status": {}}
            for n, (fields, events) in enumerate(spans)]}]}]}  # fmt: skip


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


PARTS: list[Any] = [
    text("system", SYSTEM),
    text("user", ONE),
    {"role": "assistant", "parts": [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c", "name": "lookup", "arguments": ARGUMENTS}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "shipped"}]},
    text("assistant", SENT),
    text("user", TWO),
    text("assistant", LAST),
]  # fmt: skip
USER = {"gen_ai.operation.name": "chat", "enduser.id": "u7", "gen_ai.conversation.id": "s1"}
OTEL = [
    otlp(*(({**USER, "gen_ai.system_instructions": json.dumps(PARTS[0]["parts"]),
             "gen_ai.input.messages": json.dumps(PARTS[1:n]),
             "gen_ai.output.messages": json.dumps([{**PARTS[a], "finish_reason": "stop"}])}, [])
           for n, a in STEPS),
         ({"http.request.method": "GET"}, []))
]  # fmt: skip


def event(message: Mapping[str, Any], choice: bool = False) -> dict[str, Any]:
    name = "gen_ai.choice" if choice else f"gen_ai.{message['role']}.message"
    body = {"index": 0, "message": message} if choice else message
    return {"name": name, "timeUnixNano": "1",
            "attributes": attributes({"gen_ai.system": "openai",
                                      "gen_ai.event.content": json.dumps(body)})}  # fmt: skip


OTEL_EVENTS = [otlp((USER, [*map(event, CHAT[:n]), event(CHAT[a], choice=True)])) for n, a in STEPS]


# --- tests ----------------------------------------------------------------------------------------

BATCH, REQUESTS = "OpenAI or Anthropic batch", "OpenAI or Anthropic request log"
CASES: dict[str, tuple[str, Files]] = {
    "openai": (REQUESTS, {"log.jsonl": OPENAI}),
    "bodies as text": (REQUESTS, {"requests.jsonl": HELICONE}),
    "stored completions": (REQUESTS, {"stored.jsonl": STORED}),
    "batch": (BATCH, {"in.jsonl": BATCH_INPUT, "out.jsonl": BATCH_OUTPUT}),
    "responses": (REQUESTS, {"log.jsonl": RESPONSES}),
    "anthropic": (REQUESTS, {"log.jsonl": ANTHROPIC}),
    "anthropic batch": (BATCH, {"a.jsonl": CLAUDE_INPUT, "b.jsonl": CLAUDE_OUTPUT}),
    "litellm": ("LiteLLM log", {"log.jsonl": LITELLM}),
    "litellm spend": ("LiteLLM log", {"spend.csv": [*SPEND, EMBEDDING]}),
    "langfuse": ("Langfuse export", {"traces.jsonl": TRACES, "obs.jsonl": [*OBSERVATIONS, SPAN]}),
    "langfuse enriched": ("Langfuse export", {"events.json": ENRICHED[::-1]}),
    "langfuse trace": ("Langfuse export", {"trace-t2.json": [NESTED]}),
    "langfuse page": ("Langfuse export", {"page.json": [PAGE]}),
    "langfuse session": ("Langfuse export", {"session-s1.json": [SESSION]}),
    "langsmith": ("LangSmith runs", {"runs.jsonl": LANGSMITH}),
    "langgraph": ("LangSmith runs", {"runs.jsonl": LANGGRAPH}),
    "otel": ("OpenTelemetry GenAI trace", {"traces.jsonl": OTEL}),
    "otel events": ("OpenTelemetry GenAI trace", {"traces.jsonl": OTEL_EVENTS}),
}


def read(
    folder: Path, files: Files, **options: Any
) -> tuple[str, list[dict[str, Any]], ReadOptions]:
    for name, values in files.items():
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            if name.endswith(".csv"):
                table = csv.DictWriter(file, list(values[0]))
                table.writeheader()
                table.writerows(values)
            elif name.endswith(".json"):
                json.dump(values if len(values) > 1 else values[0], file, indent=2)
            else:
                file.writelines(f"{json.dumps(value)}\n" for value in values)
    export = recognise(folder)
    chosen = ReadOptions(**options)
    rows = list(export.rows(chosen))
    assert not [row for row in rows if isinstance(row, BadRow)]
    names = [layout.name for layout in export.parts]
    assert len(names) == 1
    return names[0], [row for row in rows if not isinstance(row, BadRow)], chosen


def shown(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    results: list[tuple[str, str]] = []
    for message in row["messages"]:
        if message["content"]:
            results.append((message["role"], message["content"]))
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS
            results.append(("call", call["function"]["name"]))
    return results


@pytest.mark.parametrize("case", CASES)
def test_requests_of_one_conversation_become_one_row(case: str, tmp_path: Path) -> None:
    name, files = CASES[case]
    results, rows, _ = read(tmp_path, files)
    assert results == name
    assert [shown(row) for row in rows] == [EXPECTED]
    assert rows[0]["person"] == "u7"
    lesson = lesson_from(conversation_of(rows[0]), LessonShape("human"), "x", "row:1")
    assert [s.text for s in lesson.segments if s.role == "assistant"] == [ONE, TWO]
    assert lesson.person == "u7"


def test_a_trace_without_recorded_text_is_counted(tmp_path: Path) -> None:
    silent = otlp(({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, []))
    _, rows, options = read(tmp_path, {"t.jsonl": [silent, *OTEL]})
    assert [shown(row) for row in rows] == [EXPECTED]
    assert options.left_out["requests without recorded text"] == 1


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": t} for n, t in enumerate(texts)]


def request(*texts: str, **more: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": texts[-1]}
    return {"request": {"messages": chat(*texts[:-1])}, "response": completion(answer), **more}


@pytest.mark.parametrize(
    ("records", "expected", "left_out"),
    [
        pytest.param(
            [request("hi", "a"), request("hi", "a", "x", "b"), request("hi", "other")],
            [["hi", "a", "x", "b"], ["hi", "other"]],
            {"requests repeated in a longer one": 1},
            id="without ids, only a whole exchange that begins another is repeated",
        ),
        pytest.param(
            [request("hi", "a", user_id="1"), request("hi", "a", "x", "b", user_id="2")],
            [["hi", "a"], ["hi", "a", "x", "b"]],
            {},
            id="two persons may begin alike",
        ),
        pytest.param(
            [request("hi", "a", "x", "b", session_id="s"), request("hi", "c", session_id="s")],
            [["hi", "a", "x", "b"]],
            {"other requests of a session": 1},
            id="of the branches of a session the longest",
        ),
        pytest.param(
            [request("two", "b", session_id="s", timestamp="2025-01-02"),
             request("one", "a", session_id="s", timestamp="2025-01-01"),
             {"request": {"messages": [{"role": "system", "content": "Write a title."},
                                       *chat("one")]}, "timestamp": "2025-01-03",
              "response": completion({"role": "assistant", "content": "t"}), "session_id": "s"}],
            [["one", "a", "two", "b"]],
            {"other requests of a session": 1},
            id="single turns of a session by time, without those with another instruction",
        ),
        pytest.param(
            [request("hi", "a"), {**request("hi", "b"), "response": FAILURE},
             {**request("hi", "c"), "response": completion({"role": "assistant", "content": ""})}],
            [["hi", "a"]],
            {"failed requests": 1, "requests without an answer": 1},
            id="failures are counted",
        ),
    ],
)  # fmt: skip
def test_what_becomes_of_each_request(
    records: list[Any], expected: list[list[str]], left_out: dict[str, int], tmp_path: Path
) -> None:
    _, rows, options = read(tmp_path, {"log.jsonl": records})
    assert [[m["content"] for m in row["messages"]] for row in rows] == expected
    assert options.left_out == left_out


def test_branches_of_a_session_on_request(tmp_path: Path) -> None:
    records = [request("hi", "a", "x", "b", session_id="s"), request("hi", "c", session_id="s")]
    _, rows, _ = read(tmp_path, {"log.jsonl": records}, branches=True)
    assert [row["id"] for row in rows] == ["s", "s-2"]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"out.jsonl": BATCH_OUTPUT}, "answers of a batch without its input file"),
        ({"out.jsonl": CLAUDE_OUTPUT}, "answers of a batch without its input file"),
        ({"in.jsonl": BATCH_INPUT}, "requests without an answer"),
        ({"log.jsonl": [{**LITELLM[0], "messages": chat("redacted-by-litellm")}]},
         "requests whose text LiteLLM removed"),
    ],
)  # fmt: skip
def test_halves_are_left_out_with_the_reason(files: Files, why: str, tmp_path: Path) -> None:
    _, rows, options = read(tmp_path, files)
    assert not rows
    assert options.left_out == {why: len(next(iter(files.values())))}


def test_parts_that_are_no_text_are_named(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    requests = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}]
    answer = completion({"role": "assistant", "content": "A cat."})
    _, rows, _ = read(
        tmp_path, {"log.jsonl": [{"request": {"messages": requests}, "response": answer}]}
    )
    assert rows[0]["messages"] == [
        {"role": "user", "content": "what is it", "attachments": ["image"]},
        {"role": "assistant", "content": "A cat."},
    ]


@pytest.mark.parametrize(
    "case", [case for case, (_, files) in CASES.items() if "jsonl" in str(list(files))]
)
def test_damaged_records_never_raise(case: str, tmp_path: Path) -> None:
    """Every value at any depth of the first record is replaced by other types."""
    name, values = next(iter(CASES[case][1].items()))
    kinds = (None, 7, [None, 3], {"a": [1]})
    broken = [record for kind in kinds for record in damaged(values[0], kind)]
    text = "\n".join(json.dumps(value) for value in [*values, *broken])
    (tmp_path / name).write_text(text, encoding="utf-8")
    list(recognise(tmp_path).rows(ReadOptions()))


def damaged(value: Any, damage: Any) -> Iterator[Any]:
    yield damage
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: broken} for broken in damaged(value[key], damage))
    if isinstance(value, list):
        for n, item in enumerate(value[:3]):
            yield from ([*value[:n], b, *value[n + 1 :]] for b in damaged(item, damage))


def test_an_export_without_a_conversation_says_what_was_left_out(tmp_path: Path) -> None:
    read(tmp_path, {"out.jsonl": BATCH_OUTPUT})
    with pytest.raises(DataError) as error:
        import_chats(tmp_path / "out.jsonl", tmp_path / "chats.jsonl")
    assert "4 answers of a batch without its input file" in error.value.why
