"""A far end that is prompted with ids and answers with ids, as a script says.

    with IdsServer(lambda body: [5, 6, END]) as server:
        VllmClient(Address(server.url))

It has no model: `answer` writes the emitted ids, and the server does with them what vLLM does: it
cuts them at `max_tokens` and at `stop_token_ids`, says how they ended (what ends before either has
met a stop string), and gives log-probs of a fixed distribution, before temperature (`raw`) or after
it. A `schema` that it follows is answered by what `spell` writes of its first allowed value;
otherwise schemas are taken and ignored. `script` maps the number of a completion to a `Fault`;
`health` is the status of /health, 0 for a server that leaves the question open.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.servers.loopback import Asked, JsonServer, Reply

Body = dict[str, Any]
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is answered to one completion instead."""

    status: int = 200
    message: str = "scripted"
    choice: Mapping[str, Any] | None = None
    """Parts of the choice that are other than usual."""
    hang_up: bool = False
    wait: threading.Event | None = None
    """What it waits for before it answers."""
    dies: bool = False
    """Whether the whole server ends with it."""


class IdsServer(JsonServer):
    """Serves in threads of its own until it is left, or dies."""

    def __init__(
        self, answer: Callable[[Body], list[int]], *, script: Mapping[int, Fault] | None = None,
        raw: bool = False, spell: Callable[[str], list[int]] | None = None, key: str = "",
    ) -> None:  # fmt: skip
        self.requests: list[Body] = []
        self.health = 200
        self.open_questions = threading.Event()
        """Set, it lets go of the questions for its health that were left open."""
        self.says, self.script, self.raw, self.spell = answer, script or {}, raw, spell
        self.key = key
        self.arrived = threading.Semaphore(0)
        """Released for every completion that has arrived."""
        self.looks = threading.Semaphore(0)
        """Released for every question about its health."""
        self._lock = threading.Lock()
        super().__init__()

    def __exit__(self, *error: object) -> None:
        self.open_questions.set()
        super().__exit__(*error)

    def completion(self, body: Body) -> Body:
        """The reply to one request."""
        schema = (body.get("structured_outputs") or {}).get("json")
        ids = self.says(body)
        if schema is not None and self.spell is not None:
            ids = self.spell(json.dumps(schema["enum"][0])) + ids
        ids, finish = _cut(ids, body)
        choice: Body = {
            "index": 0, "text": "as it is written", "finish_reason": finish, "token_ids": ids,
            "logprobs": None, "prompt_token_ids": body["prompt"],
        }  # fmt: skip
        if body.get("logprobs") is not None:
            temperature = 1.0 if self.raw else body["temperature"] or 1.0
            notes = [logprob(one, temperature) for one in ids]
            choice["logprobs"] = {"token_logprobs": notes}
        return {"model": body["model"], "choices": [choice]}

    def arrive(self, body: Body) -> Fault | None:
        with self._lock:
            self.requests.append(body)
            self.arrived.release()
            return self.script.get(len(self.requests) - 1)

    def answer(self, asked: Asked) -> Reply | None:
        if asked.method == "GET":
            return self._looked(asked.target)
        if not asked.has_key(self.key):
            return _refusal(401, "Unauthorized")
        fault = self.arrive(asked.body) or Fault()
        if fault.wait is not None:
            fault.wait.wait()
        if fault.dies:
            self.stop()
        if fault.hang_up or fault.dies:
            return None
        if fault.status != 200:
            return _refusal(fault.status, fault.message)
        reply = self.completion(asked.body)
        reply["choices"][0] |= dict(fault.choice or {})
        return Reply(200, reply)

    def _looked(self, path: str) -> Reply:
        self.looks.release()
        if self.health == 0:
            self.open_questions.wait()
        if path == "/text":
            return Reply(200, "Success: done.")
        return Reply(self.health or 200, {"status": "ok"})


def _refusal(status: int, message: str) -> Reply:
    return Reply(status, {"error": {"message": message, "type": "x", "code": status}})


def logprob(token: int, temperature: float) -> float:
    """Of a token under logits that fall by a tenth from token to token, 64 in all."""
    logits = [-0.1 * one / temperature for one in range(64)]
    return logits[token % 64] - math.log(sum(map(math.exp, logits)))


def _cut(ids: list[int], body: Body) -> tuple[list[int], str]:
    for place, one in enumerate(ids[: body["max_tokens"]]):
        if one in body["stop_token_ids"]:
            return ids[: place + 1], "stop"
    return ids[: body["max_tokens"]], "length" if len(ids) >= body["max_tokens"] else "stop"
