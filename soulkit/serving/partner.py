"""A scripted visitor for `secret_keeper`, served over HTTP like any model.

It lets the two-party task run on a laptop without a key: an OpenAI-compatible server on loopback
that reads the visitor's brief from the system message and asks its next question. Stateless, so
equal conversations get equal replies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from soulkit.tasks.secret_keeper import question_at, topic_at

MODEL = "scripted-visitor"


def visitor_line(messages: Sequence[Mapping[str, str]]) -> str:
    """The visitor's next line, from its brief and the number of lines it has said."""
    brief = messages[0]["content"]
    topics = re.findall(r"^- (.+?)\s*$", brief, re.MULTILINE)
    if len(topics) < 2:
        raise ValueError("the brief lists no topics")
    name = re.search(r"You are ([^.\n]+)", brief)
    said = sum(message["role"] == "assistant" for message in messages)
    topic = topic_at(said, topics[:-1], topics[-1])
    return question_at(said, topic, name.group(1) if name else "a visitor")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: two small ones wait 40 ms for each other (Nagle).
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the console belongs to the command that uses the partner."""

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        try:
            body = json.loads(self.rfile.read(length))
            line = visitor_line(body["messages"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self._reply(400, {"error": {"message": f"not a visitor's request: {error!r}"}})
            return
        words = sum(len(str(m.get("content")).split()) for m in body["messages"])
        self._reply(200, _completion(line, words))

    def _reply(self, status: int, payload: Mapping[str, Any]) -> None:
        raw = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _completion(line: str, prompt_words: int) -> dict[str, Any]:
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": line}}
        ],
        "usage": {
            "prompt_tokens": prompt_words,
            "completion_tokens": len(line.split()),
            "total_tokens": prompt_words + len(line.split()),
        },
    }


def make_server(host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server bound to `host:port` (0: any free port); call `serve_forever()` to run it."""
    server = ThreadingHTTPServer((host, port), _Handler)
    server.daemon_threads = True
    return server
