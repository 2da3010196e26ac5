"""Reads request logs and traces of LLM applications, which have one record per request.

A request repeats the conversation so far, so the requests of one conversation become one row: those
of one session or thread, else those whose messages begin a longer request. The longest is used. If
no request of a session repeats anything, each is one turn, and they are put in a row by time.

Files are read twice: for hashes of the messages (about 200 bytes a request), and for the rows; if
records refer to others, once more before that. Only the answers of batch files and sessions of
single turns are held in memory.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from soulkit.data.exports.layouts import ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import records, sample_of
from soulkit.data.files import BadRow
from soulkit.data.literals import structure

Record = Mapping[str, Any]
Message = dict[str, Any]

# --- messages in any form -------------------------------------------------------------------------

_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "choice": "assistant",
          "developer": "system", "function": "tool",
          **{role: role for role in ("user", "assistant", "system", "tool")}}  # fmt: skip
_AFFIX = re.compile(r"^gen_ai\.|\.?message(chunk)?$")
_CALL = re.compile(r"^(server_)?tool_use$|_call$")
_RESULT = re.compile(r"_(result|response|output)$")
_TEXT = re.compile(r"^((input_|output_)?text|refusal)$")
_THOUGHT = re.compile(r"^((redacted_)?thinking|reasoning)$")
_USUAL = {"role", "content"}
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
    if isinstance(value, list | tuple):
        if text := "".join(map(_delta, value)):
            return [{"role": role, "content": text}]
        items = value[0] if value and isinstance(value[0], list) else value
        return [message for item in items for message in speech(item, role)]
    if not isinstance(value, dict):
        text = value.strip() if isinstance(value, str) else ""
        return [{"role": role, "content": text}] if text else []
    kind = str(value.get("type"))
    if value.keys() == _USUAL and isinstance(value["content"], str) and value["role"] in _ROLES:
        content = value["content"].strip()
        return [{"role": _ROLES[value["role"]], "content": content}] if content else []
    if _role(value) or any(form.search(kind) for form in (_TEXT, _THOUGHT, _CALL, _RESULT)):
        return list(_message(value, role))
    key = next((name for name in _WITHIN.get(role, ()) if value.get(name)), "")
    inner = value[key][:1] if key in _FIRST else value.get(key)
    system = speech(_first(value, ("system", "instructions")), "system")
    return [*system, *speech(value.get("chat_history"), "user"), *speech(inner, role)]


def _delta(event: Any) -> str:
    """The text in one event of a response that was stored as its stream."""
    kind = event.get("object") or event.get("type") if isinstance(event, dict) else ""
    if kind not in ("chat.completion.chunk", "content_block_delta", "response.output_text.delta"):
        return ""
    text = _first(event, ("choices.0.delta.content", "delta.text", "delta"))
    return text if isinstance(text, str) else ""


def _inner(item: Record) -> Record:
    """The fields of a message: LangChain wraps them."""
    return next((v for k in ("kwargs", "data") if isinstance(v := item.get(k), dict)), item)


def _role(item: Record) -> str:
    inner, names = _inner(item), item.get("id")
    kinds = (item.get("role"), inner.get("role"), names[-1:] if isinstance(names, list) else "",
             inner.get("type"), item.get("type"), item.get("name"))  # fmt: skip
    words = (_AFFIX.sub("", "".join(k).lower()) for k in kinds if isinstance(k, str | list))
    return next((_ROLES[word] for word in words if word in _ROLES), "")


def _message(item: Record, role: str) -> Iterator[Message]:
    """A message, after the results of tools in it."""
    inner, known = _inner(item), _role(item)
    calls = _first(inner, ("tool_calls", "additional_kwargs.tool_calls")) or []
    calls = [*calls, *filter(None, [inner.get("function_call")])]
    body = (_first(inner, ("content", "parts", "refusal")) or []) if known else item
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
    own = known or ("assistant" if calls else role)
    message = {"role": own, "content": "\n".join(filter(None, texts)).strip(),
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


def _nested(record: Record) -> Iterator[Record]:
    """Langfuse and LangSmith: the traces, observations and runs in a record."""
    trace = record.get("trace") or record
    if "input" in trace or "inputs" in trace:
        yield trace
    for inner in record.get("traces") or record.get("data") or ():
        yield from _nested({"sessionId": "traces" in record and record.get("id"), **inner})
    owner = {name: trace[name] for name in _OWNER if trace.get(name)}
    for inner in record.get("observations") or record.get("child_runs") or ():
        if isinstance(inner, dict):
            yield from _nested({"trace_id": trace.get("id"), **owner, **inner})


def _spans(record: Record) -> Iterator[Record]:
    """OpenTelemetry: the spans and log records about models, as requests."""
    kinds = ("resourceSpans", "scopeSpans", "spans"), ("resourceLogs", "scopeLogs", "logRecords")
    groups = ((g, items) for kind, scope, items in kinds for resource in record.get(kind, ())
              for g in resource.get(scope, ()))  # fmt: skip
    for span in (span for group, items in groups for span in group.get(items, ())):
        fields = _fields(span.get("attributes"))
        events = [{**_fields(e.get("attributes")), "name": e.get("name", "")}
                  for e in span.get("events") or ()]  # fmt: skip
        for event in events:
            fields |= {k: v for k, v in event.items() if k.startswith("gen_ai.")}
        told = [e | (structure(e.get("gen_ai.event.content")) or {}) for e in events if _role(e)]
        prompt = [event for event in told if event["name"] != "gen_ai.choice"]
        answer = [event.get("message") or event for event in told if event not in prompt]
        if any(name.startswith(("gen_ai.", "llm.", "ai.")) for name in fields):
            yield {**span, **{k.replace(".", "_"): v for k, v in fields.items()},
                   "error": str(_first(span, ("status.code",))) in ("2", "STATUS_CODE_ERROR"),
                   "request": {"system": fields.get("gen_ai.system_instructions"),
                               "messages": fields.get("gen_ai.input.messages") or prompt
                               or fields.get("ai.prompt.messages")
                               or _numbered(fields, r"gen_ai\.prompt|llm\.input_messages")},
                   "response": fields.get("gen_ai.output.messages") or answer
                   or fields.get("ai.response.text")
                   or _numbered(fields, r"gen_ai\.completion|llm\.output_messages")}  # fmt: skip


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


def _numbered(fields: Record, names: str) -> list[Record]:
    """Messages in numbered attributes: `gen_ai.prompt.0.role`."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, value in fields.items():
        if match := re.fullmatch(rf"(?:{names})\.(\d+)\.(?:message\.)?(role|content)", name):
            found[int(match[1])][match[2]] = structure(value)
    return [found[number] for number in sorted(found)]


_META = ("metadata.session_id", "metadata.thread_id", "metadata.conversation_id")
_THREAD = ("session_id", "sessionId", "thread_id", "threadId", "conversation_id", "conversationId",
           "conversation.id", *_META, "gen_ai_conversation_id", "langfuse_session_id")  # fmt: skip
_PERSON = ("user", "safety_identifier", "end_user", "user_id", "userId", "metadata.user_id",
           "extra.metadata.user_id", "enduser_id", "langfuse_user_id")  # fmt: skip
_REQUEST = ("request.body", "request_body", "request", "body", "kwargs")
_RESPONSE = ("response.body", "response_body", "response", "completion", "output")
_KEY = ("response.id", "id", "request_id", "spanId")
_TIME = ("startTime", "start_time", "timestamp", "created_at", "created", "time",
         "startTimeUnixNano", "response.created_at", "response.created")  # fmt: skip
_BEFORE = ("response.previous_response_id", "previous_response_id")
_TRACE = ("traceId", "trace_id", "id")
_PARENT = ("parent_run_id", "parentObservationId", "parent_observation_id")
_FAILURE = ("error", "error_str", "result.error", "response.error", "response.body.error")
_OWNER = ("userId", "user_id", "sessionId", "session_id")
_LANGFUSE = {*_OWNER, *_TRACE[:2], *_PARENT[1:], "htmlPath", "projectId", "project_id",
             "completionStartTime", "completion_start_time"}  # fmt: skip


_WHOLE = 1 << 26
"""Size in bytes up to which a file with one trace is read at once."""


@dataclass(frozen=True, slots=True)
class _Log:
    """Where a product writes what; the first path that is not empty counts."""

    name: str
    example: str
    fits: Callable[[Record], Any]
    request: tuple[str, ...] = (*_REQUEST, "")
    response: tuple[str, ...] = (*_RESPONSE, "")
    person: tuple[str, ...] = _PERSON
    thread: tuple[str, ...] = _THREAD
    parts: Callable[[Record], Iterator[Record]] = lambda record: iter((record,))


def _response(record: Record) -> Record:
    if record.get("object") in ("response", "chat.completion"):
        return record
    value = structure(_first(record, _RESPONSE))
    if isinstance(value, list) and any(map(_delta, value)):
        return {"object": "response"}
    return value if isinstance(value, dict) else record


_LOGS = (
    _Log("OpenTelemetry GenAI trace",
         '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "…", "attributes": []}]}]}]}',
         lambda r: "resourceSpans" in r or "resourceLogs" in r,
         ("request",), ("response",), parts=_spans),
    _Log("LangSmith runs", '{"id": "…", "run_type": "llm", "inputs": {}, "outputs": {}}',
         lambda r: "run_type" in r and "inputs" in r, ("inputs",), ("outputs",),
         thread=("thread_id", *_META, *(f"extra.{path}" for path in _META)), parts=_nested),
    _Log("LiteLLM log", '{"call_type": "…", "end_user": "u7", "messages": [], "response": {}}',
         lambda r: "call_type" in r and ("messages" in r or "response" in r),
         ("messages", "proxy_server_request.body", "proxy_server_request"), ("response",),
         ("end_user", "metadata.user_api_key_end_user_id"), ("session_id", "trace_id", *_META)),
    _Log("Langfuse export",
         '{"id": "…", "sessionId": "s1", "userId": "u7", "input": [], "output": {}}',
         lambda r: "input" in r and "output" in r and len(_LANGFUSE & r.keys()) > 1,
         ("input",), ("output",), parts=_nested),
    _Log("OpenAI or Anthropic batch", '{"custom_id": "r1", "body": {"messages": []}} and '
         '{"custom_id": "r1", "response": {"body": {"choices": []}}}',
         lambda r: "custom_id" in r and bool({"body", "params", "response", "result"} & r.keys()),
         ("body", "params"), ("response.body", "result.message")),
    _Log("OpenAI preference file", '{"input": {"messages": []}, "preferred_output": []}',
         lambda r: "preferred_output" in r and "input" in r, ("input",), ("preferred_output",)),
    _Log("OpenAI or Anthropic request log",
         '{"request": {"messages": []}, "response": {"choices": []}}',
         lambda r: _first(_response(r), ("choices.0.message", "choices.0.delta"))
         or _response(r).get("object") == "response" or _first(r, ("request.messages",))
         or (_response(r).get("type") == "message" and "content" in _response(r))),
)  # fmt: skip


def _fits(log: _Log, file: ExportFile) -> bool:
    found = (one for record in sample_of(file) if isinstance(record, dict) for one in _LOGS
             if one.fits(record))  # fmt: skip
    return next(found, None) is log


# --- requests → conversations ---------------------------------------------------------------------

Links = dict[tuple[str, str], Any]
"""What records say about others: ("answer", custom_id), ("owner", trace), ("before", response),
("session", id) → whether it has several requests."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A request with its answer, as a row."""

    row: dict[str, Any]
    thread: str
    time: str
    why: str | None
    """Why it is left out, in the plural; None for what is no request and is not counted."""


_NOTHING = _Exchange({}, "", "", None)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the first reading keeps of an exchange."""

    thread: int
    time: str
    whole: int
    size: int
    single: bool
    """Whether no answer comes before a message of the person."""
    system: int
    why: str | None


def _exchange(log: _Log, record: Record | BadRow, links: Links) -> _Exchange:
    try:
        return _NOTHING if isinstance(record, BadRow) else _read(log, record, links)
    except (AttributeError, KeyError, TypeError):
        return _Exchange({}, "", "", "requests in an unknown form")


def _read(log: _Log, record: Record, links: Links) -> _Exchange:
    request, source, why = _first(record, log.request), record, ""
    if batch := _id(record, ("custom_id",)):
        if request is None and ("prompt", batch) in links:
            return _NOTHING
        why = "" if request else "answers of a batch without its input file"
        source = links.get(("answer", batch), {}) if request else {}
    if log.parts is _nested:
        trace = _id(record, _TRACE)
        if not _is_model(record) and (_first(record, _PARENT) or ("model", trace) in links):
            return _NOTHING
        owner = links.get(("owner", trace), ("", ""))
    else:
        owner = "", _root(record, links)
    prompt = speech(request, "user")
    answer = speech(_first(source, log.response), "assistant") if source else []
    if any(message["role"] == "user" for message in answer):  # the state of an application
        prompt = [m for m in prompt if m["role"] == "system" and m not in answer]
    if "redacted-by-litellm" in (message["content"] for message in prompt):
        why = "requests whose text LiteLLM removed"
    elif not (prompt or any(message["role"] == "user" for message in answer)):
        why = why or "requests without recorded text"
    elif not any(message["role"] == "assistant" for message in answer):
        why = "failed requests" if _first(source, _FAILURE) else "requests without an answer"
    thread = _id(record, log.thread) or _id(request, log.thread) or owner[1]
    thread = thread if links.get(("session", thread), True) else ""
    person = _id(request, log.person) or _id(record, log.person) or owner[0]
    person = person or _id(record, tuple(f"response.{path}" for path in log.person[:2]))
    row = {"id": thread or _id(record, _KEY), "person": person, "messages": [*prompt, *answer]}
    return _Exchange({k: v for k, v in row.items() if v}, thread, _id(record, _TIME), why)


def _root(record: Record, links: Links) -> str:
    """The first response of the chain that a response continues; empty outside a chain."""
    own = first = _id(record, _KEY)
    seen = {own}
    while (before := links.get(("before", first))) and before not in seen:
        first = before
        seen.add(first)
    return first if first != own or ("after", own) in links else ""


def _linked(log: _Log, files: Sequence[ExportFile]) -> Links:
    links: Links = {}
    traces = log.parts is _nested
    marks = b"custom_id", b"previous_response_id", b"call_type"
    linked = [file for file in files if traces or any(mark in file.head for mark in marks)]
    for record in _records(log, linked):
        if isinstance(record, BadRow):
            continue
        if batch := _id(record, ("custom_id",)):
            side = "prompt" if _first(record, log.request) else "answer"
            links[side, batch] = {} if (side, batch) in links or side == "prompt" else record
        elif before := _id(record, _BEFORE):
            links["before", _id(record, _KEY)] = before
            links["after", before] = True
        elif "call_type" in record and _first(record, log.response):
            # LiteLLM makes up a session for every request without one.
            thread = "session", _id(record, log.thread)
            links[thread] = thread in links
        elif traces:
            owner, trace = (_id(record, log.person), _id(record, log.thread)), _id(record, _TRACE)
            if any(owner):
                links.setdefault(("owner", trace), owner)
            if _is_model(record):
                links["model", trace] = True
    return links


def _is_model(record: Record) -> bool:
    return (record.get("type") or record.get("run_type")) in ("GENERATION", "llm")


def _records(log: _Log, files: Sequence[ExportFile]) -> Iterator[Record | BadRow]:
    for file in files:
        # One trace or session is one object; in other files the records are in a list.
        whole = file.name.endswith(".json") and file.head[:1] == b"{" and file.size < _WHOLE
        whole = whole and b'"observations"' in file.head and b"\n{" not in file.head
        for source, record in records(file, "" if whole else None):
            if isinstance(record, BadRow):
                yield record
                continue
            parts: list[Record | BadRow]
            try:
                parts = list(log.parts({key: structure(value) for key, value in record.items()}))
            except (AttributeError, KeyError, TypeError):
                parts = [BadRow(source, f"it does not have the form of the layout {log.name}")]
            yield from parts


def _rows(
    log: _Log, files: Sequence[ExportFile], options: ReadOptions
) -> Iterator[dict[str, Any] | BadRow]:
    links = _linked(log, files)
    begun: set[int] = set()
    entries = [_entry(_exchange(log, record, links), begun) for record in _records(log, files)]
    plan = _plan(entries, begun, options)
    waiting: dict[int, dict[str, Any]] = {}
    for number, record in enumerate(_records(log, files)):
        if isinstance(record, BadRow):
            yield record
        elif members := plan.get(number):
            waiting[number] = _exchange(log, record, links).row
            if any(member not in waiting for member in members):
                continue
            rows = [waiting.pop(member) for member in members]
            later = [m for row in rows[1:] for m in row["messages"] if m["role"] != "system"]
            messages = rows[0]["messages"] + later
            if any(message["role"] == "user" for message in messages):
                yield {**rows[0], "messages": messages}
            else:
                options.left_out["conversations without a message of a person"] += 1


def _entry(found: _Exchange, begun: set[int]) -> _Entry:
    """The hash of an exchange; the hashes of its beginnings are added to `begun`."""
    messages = found.row.get("messages", ())
    spoken = [message for message in messages if message["role"] != "system"]
    whole, hashes = hash((found.thread, not found.thread and found.row.get("person"))), []
    for message in spoken:
        calls = tuple(call["function"]["name"] for call in message.get("tool_calls", ()))
        whole = hash((whole, message["role"], " ".join(message["content"].split()), calls))
        hashes.append(whole)
    begun.update(hashes[:-1] if not found.why else ())
    roles = [message["role"] for message in spoken if message["role"] != "tool"]
    system = tuple(m["content"] for m in messages if m["role"] == "system")
    return _Entry(hash(found.thread) if found.thread else 0, found.time, whole, len(hashes),
                  roles == sorted(roles, reverse=True), hash(system) if system else 0,
                  found.why)  # fmt: skip


def _plan(entries: Sequence[_Entry], begun: set[int], options: ReadOptions) -> dict[int, list[int]]:
    """For each exchange in a row, the numbers of all exchanges in this row."""
    threads: dict[Any, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for number, entry in enumerate(entries):
        repeated = entry.whole in begun or entry.whole in seen
        if why := entry.why or ("requests repeated in a longer one" if repeated else ""):
            options.left_out[why] += 1
        elif entry.why is not None:
            seen.add(entry.whole)
            threads[entry.thread or ("alone", number)].append(number)
    plan: dict[int, list[int]] = {}
    for own in threads.values():
        own.sort(key=lambda number: entries[number].time)
        if all(entries[number].single for number in own):
            same = (0, entries[own[0]].system)
            groups = [[number for number in own if entries[number].system in same]]
        elif options.branches:
            groups = [[number] for number in own]
        else:
            groups = [[max(own, key=lambda number: entries[number].size)]]
        if others := len(own) - sum(map(len, groups)):
            options.left_out["other requests of a session"] += others
        plan.update((number, group) for group in groups for number in group)
    return plan


LAYOUTS = tuple(
    Layout(log.name, log.example, partial(_fits, log), partial(_rows, log)) for log in _LOGS
)
