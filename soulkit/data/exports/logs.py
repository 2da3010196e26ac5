"""Reads request logs and traces of LLM applications, which have one record per request.

A request repeats the conversation so far, so the requests of one conversation become one row: those
of one session or thread, else those whose messages begin a longer request. The longest is used. If
no request of a session repeats anything, each is one turn, and they are put in a row by time.

Requests are held in a temporary file, and their hashes (about 300 bytes each) in memory.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import records, sample_of
from soulkit.data.files import BadRow
from soulkit.data.literals import structure

Record = Mapping[str, Any]
Row = dict[str, Any]
Message = dict[str, Any]
Read = Callable[[], Iterator[Record]]
_ODD = (AttributeError, KeyError, TypeError)
"""What a record in another form raises."""
_HELD = 1 << 25
"""Bytes of requests from which on the temporary file is on disk."""

# --- messages in any form -------------------------------------------------------------------------

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant",
          "developer": "system", "function": "tool",
          **{role: role for role in ("user", "assistant", "system", "tool")}}  # fmt: skip
_TEXT = re.compile(r"^((input_|output_)?text|refusal)$")
_THOUGHT = re.compile(r"^((redacted_)?thinking|reasoning)$")
_CALL = re.compile(r"^(server_)?tool_use$|_call$")
_RESULT = re.compile(r"_(result|response|output)$")
_PARTS = (_TEXT, _THOUGHT, _CALL, _RESULT)
_FIRST = ("choices", "candidates", "generations")
_WITHIN = {
    "user": ("messages", "contents", "input", "inputs", "kwargs", "args", "prompt", "question",
             "query", "message", "text", "content"),
    "assistant": (*_FIRST, "output", "outputs", "message", "messages", "content", "output_text",
                  "answer", "text", "response", "result", "completion"),
}  # fmt: skip
"""Where messages are in a request and in a response, most certain first."""


def speech(value: Any, role: str) -> list[Message]:
    """The messages in a request or response; those without a speaker are by `role`."""
    value = structure(value)
    if isinstance(value, str):
        return [{"role": role, "content": value.strip()}] if value.strip() else []
    if isinstance(value, list | tuple):
        items = value[0] if value and isinstance(value[0], list) else value
        return [message for item in items for message in speech(item, role)]
    if not isinstance(value, dict):
        return []
    if _role(value) or any(form.search(str(value.get("type"))) for form in _PARTS):
        return list(_message(value, role))
    key = next((name for name in _WITHIN.get(role, ()) if value.get(name)), "")
    inner = value[key][:1] if key in _FIRST else value.get(key)
    system = speech(_first(value, ("system", "instructions")), "system")
    return [*system, *speech(value.get("chat_history"), "user"), *speech(inner, role)]


def _inner(item: Record) -> Record:
    """The fields of a message: LangChain wraps them."""
    return next((v for k in ("kwargs", "data") if isinstance(v := item.get(k), dict)), item)


def _role(item: Record) -> str:
    inner, names = _inner(item), item.get("id")
    name = names[-1] if isinstance(names, list) and names else ""
    words = (item.get("role"), inner.get("role"), name, inner.get("type"), item.get("type"))
    roles = (_ROLES.get(re.sub("message(chunk)?$", "", str(word).lower())) for word in words)
    return next(filter(None, roles), "")


def _message(item: Record, role: str) -> Iterator[Message]:
    """A message, after the results of tools in it."""
    inner, speaker = _inner(item), _role(item)
    calls = _first(inner, ("tool_calls", "additional_kwargs.tool_calls")) or []
    calls = [*calls, *filter(None, [inner.get("function_call")])]
    body = (_first(inner, ("content", "parts", "refusal")) or []) if speaker else item
    texts, marks = [], []
    for part in body if isinstance(body, list) else [body]:
        kind = str(part.get("type") or "text") if isinstance(part, dict) else "text"
        if _TEXT.search(kind):
            text = part if isinstance(part, str) else _first(part, ("text", "content", "refusal"))
            texts.append(str(text or ""))
        elif _RESULT.search(kind):
            result = _first(part, ("content", "response", "result", "output"))
            yield {"role": "tool", "content": _plain(result)}
        elif _CALL.search(kind):
            calls.append(part)
        elif not _THOUGHT.search(kind):
            seen = f"{part.get('modality')} {kind}"
            marks.append(next((k for k in ("image", "audio", "video") if k in seen), "file"))
    name = speaker or ("assistant" if calls else role)
    message = {"role": name, "content": "\n".join(filter(None, texts)).strip(),
               "tool_calls": [_call(call) for call in calls], "attachments": marks}  # fmt: skip
    if any(message[key] for key in ("content", "tool_calls", "attachments")):
        yield {key: value for key, value in message.items() if value or key == "content"}


def _call(call: Record) -> Message:
    name = _first(call, ("function.name", "name", "type"))
    arguments = _first(call, ("function.arguments", "arguments", "input", "args"))
    return {"function": {"name": str(name), "arguments": _plain(structure(arguments or {}))}}


def _plain(value: Any) -> str:
    parts = speech(value, "tool") if isinstance(value, list) else []
    text = "\n".join(part["content"] for part in parts)
    return text or (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _first(record: Any, paths: Sequence[str]) -> Any:
    """The first value at one of the `paths` (`a.b.0`) that is not empty; JSON in text is read."""
    for path in paths:
        value = record
        for key in filter(None, path.split(".")):
            value = structure(value)
            value = dict(enumerate(value)) if isinstance(value, list) else value
            name = int(key) if key.isdecimal() else key
            value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, False, "", [], {}, "{}", "[]"):
            return value
    return None


def _id(record: Any, paths: Sequence[str]) -> str:
    value = _first(record, paths)
    return str(value) if isinstance(value, str | int | float) else ""


# --- records of each product ----------------------------------------------------------------------

_META = ("metadata.session_id", "metadata.thread_id", "metadata.conversation_id")
_THREAD = ("session_id", "sessionId", "thread_id", "threadId", "conversation_id", "conversationId",
           "conversation.id", *_META, "gen_ai_conversation_id")  # fmt: skip
_PERSON = ("user", "safety_identifier", "end_user", "user_id", "userId", "metadata.user_id",
           "extra.metadata.user_id", "enduser_id", "response.user",
           "response.safety_identifier")  # fmt: skip
_ASKED = ("body", "params")
_REQUEST = ("request.body", "request_body", "request", *_ASKED, "kwargs", "inputs",
            "proxy_server_request.body", "proxy_server_request", "")  # fmt: skip
_RESPONSE = ("response.body", "response_body", "response", "result.message", "completion",
             "outputs", "output", "choices.0")  # fmt: skip
"""Paths in a record; the first one that is not empty counts."""
_KINDS = ("object", "type")
_KEY = ("response.id", "id", "request_id", "spanId")
_TIME = ("startTime", "start_time", "timestamp", "created_at", "created", "time",
         "startTimeUnixNano", "response.created_at", "response.created")  # fmt: skip
_TRACE = ("traceId", "trace_id", "id")
_PARENT = ("parent_run_id", "parentObservationId", "parent_observation_id")
_FAILURE = ("error", "error_str", "result.error", "response.error", "response.body.error")
_OWNER = ("userId", "user_id", "sessionId", "session_id")
_LANGFUSE = {*_OWNER, *_TRACE[:2], *_PARENT[1:], "htmlPath", "projectId", "project_id",
             "completionStartTime", "completion_start_time"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Log:
    """One product's records."""

    name: str
    example: str
    fits: Callable[[Record], Any]
    person: tuple[str, ...] = _PERSON
    thread: tuple[str, ...] = _THREAD
    parts: Callable[[Record], Iterator[Record]] = lambda record: iter((record,))
    """The requests in one record."""
    joined: Callable[[_Log, Read], Iterator[Record]] = lambda log, read: read()
    """The requests, with what other records say about them; may read twice."""
    own_sessions: bool = True
    """Whether a session is the application's; LiteLLM makes up one for a request without."""


def _nested(record: Record) -> Iterator[Record]:
    """Langfuse and LangSmith: the traces, observations and runs in a record."""
    trace = record["trace"] if isinstance(record.get("trace"), dict) else record
    if "input" in trace or "inputs" in trace:
        yield trace
    levels = {"traces": {"sessionId": record.get("id")}, "child_runs": {},
            "observations": {"trace_id": trace.get("id")}}  # fmt: skip
    for name, above in levels.items():
        for inner in record[name] if isinstance(record.get(name), list) else ():
            if isinstance(inner, dict):
                fields = {key: value for key, value in inner.items() if value is not None}
                yield from _nested({**above, **fields})


def _of_traces(log: _Log, read: Read) -> Iterator[Record]:
    """Calls of models with the person and session of their trace; without any, the trace itself."""
    owners: dict[str, Record] = {}
    modelled: set[str] = set()
    for record in read():
        trace = _id(record, _TRACE)
        owner = {"userId": _id(record, log.person), "thread_id": _id(record, log.thread)}
        filled = {name: value for name, value in owner.items() if value}
        owners[trace] = {**filled, **owners.get(trace, {})}
        if _is_model(record):
            modelled.add(trace)
    for record in read():
        trace = _id(record, _TRACE)
        if _is_model(record) or not (_first(record, _PARENT) or trace in modelled):
            yield {**record, **owners[trace]}


def _is_model(record: Record) -> bool:
    return (record.get("type") or record.get("run_type")) in ("GENERATION", "llm")


def _of_batches(log: _Log, read: Read) -> Iterator[Record]:
    """Requests with their answers, which are in another file."""
    answers: dict[str, Record] = {}
    for record in read():
        if not _first(record, _ASKED):
            name = _id(record, ("custom_id",))
            answers[name] = {} if name in answers else record  # two batches may use one id
    alone = set(answers)
    for record in read():
        if _first(record, _ASKED):
            name = _id(record, ("custom_id",))
            alone.discard(name)
            yield {**answers.get(name, {}), **record}
    yield from (answers[name] for name in alone)


def _spans(record: Record) -> Iterator[Record]:
    """OpenTelemetry: the spans about models, as requests."""
    scopes = (s for resource in record["resourceSpans"] for s in resource.get("scopeSpans", ()))
    for span in (span for scope in scopes for span in scope.get("spans", ())):
        fields, prompt, answer = _fields(span.get("attributes")), [], []
        for event in span.get("events") or ():
            about = _fields(event.get("attributes"))
            content = structure(about.pop("gen_ai.event.content", None)) or about
            fields |= {key: v for key, v in about.items() if key.startswith("gen_ai.")}
            _, _, kind = event.get("name", "").partition("gen_ai.")
            if kind == "choice":
                answer.append(content.get("message") or content)
            elif kind.endswith(".message"):
                prompt.append({"role": kind.removesuffix(".message"), **content})
        if any(name.startswith("gen_ai.") for name in fields):
            yield {**span, **{key.replace(".", "_"): value for key, value in fields.items()},
                   "error": str(_first(span, ("status.code",))) in ("2", "STATUS_CODE_ERROR"),
                   "request": {"system": fields.get("gen_ai.system_instructions"),
                               "messages": fields.get("gen_ai.input.messages") or prompt},
                   "response": fields.get("gen_ai.output.messages") or answer}  # fmt: skip


def _fields(attributes: Any) -> dict[str, Any]:
    """Attributes with their values, which OTLP writes as {"stringValue": "hi"}."""
    if isinstance(attributes, dict):
        return dict(attributes)
    return {pair["key"]: _value(pair.get("value")) for pair in attributes or ()}


def _value(value: Any) -> Any:
    kind, inner = next(iter(value.items())) if isinstance(value, dict) and value else ("", value)
    if kind == "arrayValue":
        return [_value(item) for item in inner.get("values", ())]
    return _fields(inner.get("values")) if kind == "kvlistValue" else inner


def _is_request(record: Record) -> Any:
    answers = ("choices.0.message", *(f"{place}.choices.0.message" for place in _RESPONSE))
    kinds = [_first(record, (f"{place}.{key}",)) for place in _RESPONSE for key in _KINDS]
    return (
        record.get("object") == "response"
        or _first(record, ("request.messages", *answers))
        or any(kind in ("message", "response") for kind in kinds)
    )


_LOGS = (
    _Log("OpenTelemetry GenAI trace",
         '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "…", "attributes": []}]}]}]}',
         lambda r: "resourceSpans" in r, parts=_spans),
    _Log("LangSmith runs", '{"id": "…", "run_type": "llm", "inputs": {}, "outputs": {}}',
         lambda r: "run_type" in r and "inputs" in r,
         thread=("thread_id", *_META, *(f"extra.{path}" for path in _META)),
         parts=_nested, joined=_of_traces),
    _Log("LiteLLM log", '{"call_type": "…", "end_user": "u7", "messages": [], "response": {}}',
         lambda r: "call_type" in r and ("messages" in r or "response" in r),
         ("end_user", "metadata.user_api_key_end_user_id"), ("session_id", "trace_id", *_META),
         own_sessions=False),
    _Log("Langfuse export",
         '{"id": "…", "sessionId": "s1", "userId": "u7", "input": [], "output": {}}',
         lambda r: any("input" in part and "output" in part and len(_LANGFUSE & part.keys()) > 1
                       for part in _nested(r)),
         parts=_nested, joined=_of_traces),
    _Log("OpenAI or Anthropic batch", '{"custom_id": "r1", "body": {"messages": []}} and '
         '{"custom_id": "r1", "response": {"body": {"choices": []}}}',
         lambda r: "custom_id" in r and bool({*_ASKED, "response", "result"} & r.keys()),
         joined=_of_batches),
    _Log("OpenAI or Anthropic request log",
         '{"request": {"messages": []}, "response": {"choices": []}}', _is_request),
)  # fmt: skip


def _fits(log: _Log, file: ExportFile) -> bool:
    fitting = (one for record in sample_of(file) if isinstance(record, dict) for one in _LOGS
               if one.fits(record))  # fmt: skip
    return next(fitting, None) is log


# --- requests → conversations ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request with its answer."""

    thread: str
    time: str
    row: Row
    hashes: tuple[int, ...]
    """Of the messages up to every place."""


def _exchange(log: _Log, record: Record) -> _Exchange | str:
    """The exchange in a record, else why it has none, in the plural."""
    request = _first(record, _REQUEST)
    prompt = speech(request, "user")
    answer = speech(_first(record, _RESPONSE), "assistant")
    if _has("user", answer):  # the state of an application
        prompt = [m for m in prompt if m["role"] == "system" and m not in answer]
    if "custom_id" in record and not _first(record, _ASKED):
        return "answers of a batch without its input file"
    if "redacted-by-litellm" in (message["content"] for message in prompt):
        return "requests whose text LiteLLM removed"
    if not (prompt or _has("user", answer)):
        return "requests without recorded text"
    if not _has("assistant", answer):
        return "failed requests" if _first(record, _FAILURE) else "requests without an answer"
    thread = _id(record, log.thread) or _id(request, log.thread)
    person = _id(request, log.person) or _id(record, log.person)
    row = {"id": thread or _id(record, _KEY), "person": person, "messages": [*prompt, *answer]}
    scope = (thread, "") if thread and log.own_sessions else ("", person)
    hashes = tuple(_hashes(hash(scope), row["messages"]))
    return _Exchange(thread, _id(record, _TIME), {k: v for k, v in row.items() if v}, hashes)


def _has(role: str, messages: Sequence[Message]) -> bool:
    return any(message["role"] == role for message in messages)


def _hashes(begin: int, messages: Any) -> Iterator[int]:
    for message in messages:
        if message["role"] != "system":
            calls = tuple(call["function"]["name"] for call in message.get("tool_calls", ()))
            begin = hash((begin, message["role"], " ".join(message["content"].split()), calls))
            yield begin


def _records(log: _Log, files: Sequence[ExportFile], bad: dict[str, BadRow]) -> Iterator[Record]:
    for file in files:
        for source, record in records(file):
            if isinstance(record, BadRow):
                bad[source] = record
                continue
            try:
                yield from log.parts({key: structure(value) for key, value in record.items()})
            except _ODD:
                bad[source] = BadRow(source, f"it does not have the form of the layout {log.name}")


def _rows(log: _Log, files: Sequence[ExportFile], options: ReadOptions) -> Iterator[Row | BadRow]:
    with tempfile.SpooledTemporaryFile(_HELD) as spool:
        longest = yield from _kept(log, files, options, spool)
        threads: dict[Any, list[tuple[str, int]]] = defaultdict(list)
        for thread, time, place in longest:
            threads[thread or place].append((time, place))
        for places in threads.values():
            rows = []
            for _, place in sorted(places):
                spool.seek(place)
                rows.append(json.loads(spool.readline()))
            yield from _conversations(rows, options)


def _kept(
    log: _Log, files: Sequence[ExportFile], options: ReadOptions, spool: IO[bytes]
) -> Generator[BadRow, None, Collection[tuple[str, str, int]]]:
    """Thread, time and place in `spool` of the requests that no longer one repeats."""
    bad: dict[str, BadRow] = {}
    begun: set[int] = set()
    longest: dict[int, tuple[str, str, int]] = {}
    for record in log.joined(log, partial(_records, log, files, bad)):
        try:
            exchange = _exchange(log, record)
        except _ODD:
            exchange = "requests in an unknown form"
        if isinstance(exchange, str):
            options.left_out[exchange] += 1
            continue
        *beginnings, whole = exchange.hashes
        repeated = whole in begun or whole in longest
        if not repeated:
            begun.update(beginnings)
            longest[whole] = (exchange.thread, exchange.time, spool.tell())
            spool.write(json.dumps(exchange.row).encode() + b"\n")
        if shorter := repeated + sum(longest.pop(one, None) is not None for one in beginnings):
            options.left_out["requests repeated in a longer one"] += shorter
    yield from bad.values()
    return longest.values()


def _conversations(rows: Sequence[Row], options: ReadOptions) -> Iterator[Row]:
    """The conversations in the requests of one session, which are in order."""
    used = chosen = [max(rows, key=lambda row: len(row["messages"]))]
    if all(_is_single_turn(row["messages"]) for row in rows):
        systems = [[m for m in row["messages"] if m["role"] == "system"] for row in rows]
        used = [r for r, system in zip(rows, systems, strict=True) if system in ([], systems[0])]
        later = [m for row in used[1:] for m in row["messages"] if m["role"] != "system"]
        chosen = [{**rows[0], "messages": rows[0]["messages"] + later}]
    elif options.branches:
        used = chosen = list(rows)
    if len(used) < len(rows):
        options.left_out["other requests of a session"] += len(rows) - len(used)
    for row in chosen:
        if _has("user", row["messages"]):
            yield row
        else:
            options.left_out["conversations without a message of a person"] += 1


def _is_single_turn(messages: Sequence[Message]) -> bool:
    """Whether no answer comes before a message of the person."""
    roles = [message["role"] for message in messages if message["role"] in ("user", "assistant")]
    return roles == sorted(roles, reverse=True)


LAYOUTS = tuple(
    Layout(log.name, log.example, partial(_fits, log), partial(_rows, log)) for log in _LOGS
)
