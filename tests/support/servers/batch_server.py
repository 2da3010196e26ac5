"""A batch service beside chat completions, on a real loopback socket.

    with BatchServer(answer=lambda body: "B") as server:
        ... server.base_url ...

A batch moves on by one state whenever it is looked at: `states`, then what `ends` says of it. Its
lines are answered by `answer` when it ends, except those for which `lines` gives a status error or
`None` (no line at all). `service` may break single requests of the service itself.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from tests.support.servers.loopback import Asked, JsonServer, Reply
from tests.support.servers.openai_server import Answer, Fault, completion, echo, is_probe

Json = dict[str, Any]
STATES = ("validating", "in_progress", "finalizing")


@dataclass
class Batch:
    """What the service knows of one batch."""

    number: int
    input_file_id: str
    metadata: Json
    created_at: int
    lines: list[Json]
    looks: int = 0
    status: str = "validating"
    output: str | None = None
    errors_file: str | None = None
    done: int = 0
    broken: int = 0
    errors: list[Json] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"batch_{self.number}"

    def shown(self) -> Json:
        return {
            "id": self.id, "object": "batch", "endpoint": "/v1/chat/completions",
            "completion_window": "24h", "input_file_id": self.input_file_id, "status": self.status,
            "created_at": self.created_at, "expires_at": self.created_at + 86400,
            "metadata": self.metadata, "output_file_id": self.output,
            "error_file_id": self.errors_file,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {"total": len(self.lines), "completed": self.done,
                               "failed": self.broken},
        }  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """How a batch ends, and how many of its lines are done by then."""

    status: str = "completed"
    done: int | None = None
    code: str = ""


class BatchServer(JsonServer):
    """Files, batches, models and live completions under `/v1`."""

    def __init__(
        self,
        *,
        answer: Answer = echo,
        states: tuple[str, ...] = STATES,
        ends: Callable[[Batch], Ending] = lambda batch: Ending(),
        lines: Callable[[Batch, Json], Fault | None] = lambda batch, body: None,
        service: Callable[[str, int], str] = lambda request, index: "",
        live: Callable[[Json], Fault | None] = lambda body: None,
        key: str | None = None,
    ) -> None:
        """`service` says of the index-th request of a kind (`POST /files`, `GET /batches/ID` …)
        `refuse` (503 before anything is done), `unknown` (404), `hang up` (after it is done) or
        `stall` (after it is done, until somebody sets `go_on`)."""
        self.says, self.states, self.ends = answer, states, ends
        self.line_fault, self.service, self.live_fault, self.key = lines, service, live, key
        self.files: dict[str, bytes] = {}
        self.batches: list[Batch] = []
        self.paid: Counter[str] = Counter()
        """custom_id → lines that were answered with success."""
        self.live: list[Json] = []
        """Bodies of the requests that were answered at once."""
        self.requests: Counter[str] = Counter()
        self.heads: list[Json] = []
        """Headers (names in lower case) and query of all requests."""
        self.lock = threading.RLock()
        self.stalled, self.go_on = threading.Event(), threading.Event()
        super().__init__()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"requests so far: {dict(self.requests)}")
            time.sleep(0.005)

    def answer(self, asked: Asked) -> Reply | None:
        path, _, query = asked.target.partition("?")
        self.heads.append({**asked.headers, "?": query})
        request = re.sub(
            "/(batch|file)_[0-9]+", "/ID", f"{asked.method} {path.removeprefix('/v1')}"
        )
        with self.lock:
            index = self.requests[request]
            self.requests[request] += 1
            what = self.service(request, index)
            if what == "refuse" or not asked.has_key(self.key or ""):
                error = {"message": "not now", "type": "x", "code": None}
                reply = Reply(503 if asked.has_key(self.key or "") else 401, {"error": error})
            elif what == "unknown":
                reply = Reply(404, {"error": {"message": f"no path {path}"}})
            else:
                kind = asked.headers.get("content-type", "")
                reply = Reply(*self.handle(asked.method, path, asked.raw, kind))
        if what == "stall":
            self.stalled.set()
            self.go_on.wait()
        return None if what in ("hang up", "stall") else reply

    # -- the service -------------------------------------------------------------------------------

    def handle(self, method: str, path: str, raw: bytes, content_type: str) -> tuple[int, Any]:
        parts = path.removeprefix("/v1/").split("/")
        if (method, parts[0]) == ("POST", "chat"):
            return self.complete(json.loads(raw))
        if parts[0] == "models":
            model = {"id": "scripted", "object": "model", "created": 0, "owned_by": "tests"}
            return 200, {"object": "list", "data": [model, {**model, "id": "another"}]}
        if parts[0] == "files":
            return (
                self.upload(raw, content_type) if method == "POST" else (200, self.files[parts[1]])
            )
        if method == "POST" and len(parts) == 3:
            return 200, self.cancel(self.batches[int(parts[1].removeprefix("batch_"))])
        if method == "POST":
            return 200, self.create(json.loads(raw))
        if len(parts) == 2:
            return 200, self.look(self.batches[int(parts[1].removeprefix("batch_"))])
        shown = [batch.shown() for batch in reversed(self.batches)]
        return 200, {"object": "list", "data": shown, "has_more": False}

    def complete(self, body: Json) -> tuple[int, Any]:
        if is_probe(body):
            return 200, completion(body, "yes")
        fault = self.live_fault(body)
        if fault is not None:
            return fault.status, json.loads(fault.raw or b"{}")
        self.live.append(body)
        return 200, completion(body, self.says(body))

    def upload(self, raw: bytes, content_type: str) -> tuple[int, Any]:
        head = f"Content-Type: {content_type}\r\n\r\n".encode()
        fields = {
            part.get_param("name", header="content-disposition"): part
            for part in BytesParser(policy=HTTP).parsebytes(head + raw).iter_parts()
        }
        content = fields["file"].get_payload(decode=True)
        assert fields["purpose"].get_content().strip() == "batch"
        name = f"file_{len(self.files)}"
        self.files[name] = content
        return 200, {
            "id": name, "object": "file", "bytes": len(content), "created_at": int(time.time()),
            "filename": fields["file"].get_filename(), "purpose": "batch", "status": "processed",
        }  # fmt: skip

    def create(self, body: Json) -> Json:
        assert body["endpoint"] == "/v1/chat/completions" and body["completion_window"] == "24h"
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
        keys = [line["custom_id"] for line in lines]
        assert len(set(keys)) == len(keys) and {line["url"] for line in lines} == {body["endpoint"]}
        batch = Batch(len(self.batches), body["input_file_id"], body.get("metadata") or {},
                      int(time.time()), lines)  # fmt: skip
        self.batches.append(batch)
        return batch.shown()

    def look(self, batch: Batch) -> Json:
        if batch.looks < len(self.states):
            batch.status = self.states[batch.looks]
            batch.done = len(batch.lines) * batch.looks // (len(self.states) + 1)
        elif batch.output is None and batch.status not in ("cancelled", "failed"):
            self.end(batch, self.ends(batch))
        batch.looks += 1
        return batch.shown()

    def cancel(self, batch: Batch) -> Json:
        self.end(batch, Ending("cancelled", 0))
        batch.looks = len(self.states)
        return batch.shown()

    def end(self, batch: Batch, ending: Ending) -> None:
        good: list[Json] = []
        bad: list[Json] = []
        count = len(batch.lines) if ending.done is None else ending.done
        for line in batch.lines[:count]:
            self.answer_line(batch, line, good, bad)
        if ending.status in ("expired", "cancelled"):
            error = {"code": f"batch_{ending.status}", "message": "not done within the window"}
            bad += [{"custom_id": line["custom_id"], "response": None, "error": error}
                    for line in batch.lines[count:]]  # fmt: skip
        batch.status, batch.done, batch.broken = ending.status, len(good), len(bad)
        if ending.code:
            batch.errors = [{"code": ending.code, "message": "the provider's reason", "line": None,
                             "param": None}]  # fmt: skip
        batch.output = self.store(good) if good else None
        batch.errors_file = self.store(bad) if bad else None

    def answer_line(self, batch: Batch, line: Json, good: list[Json], bad: list[Json]) -> None:
        fault = self.line_fault(batch, line["body"])
        if fault is not None and fault.hang_up:
            return  # lost without a word
        if fault is not None:
            response = {"status_code": fault.status, "body": json.loads(fault.raw or b"{}")}
            bad.append({"custom_id": line["custom_id"], "response": response, "error": None})
            return
        self.paid[line["custom_id"]] += 1
        body = completion(line["body"], self.says(line["body"]))
        response = {"status_code": 200, "request_id": "r", "body": body}
        good.append({"custom_id": line["custom_id"], "response": response, "error": None})

    def store(self, lines: list[Json]) -> str:
        name = f"file_{len(self.files)}"
        self.files[name] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        return name
