"""A server that speaks vLLM's wire by ids, and breaks where it is told to.

    with ToyVllm() as server:
        VllmClient(Address(server.url))

Its weights are a few numbers: what it says to a prompt follows from the prompt, the seed, and the
name it is asked under, so two toys of the same weights give the same replies, and an adapter gives
others. Log-probs are real: they sum to one over `size` tokens, and follow the temperature unless
the toy is `raw`. It dies (`die`), hangs (`hang`), breaks single connections (`breaks`), is slow,
lacks routes, or serves adapters that it only lists.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.servers.loopback import Asked, JsonServer, Reply

Body = dict[str, Any]
NOT_FOUND = Reply(404, {"detail": "Not Found"})


@dataclass(kw_only=True)
class Toy:
    """What a toy is and lacks."""

    served: str = "base"
    root: str = "/models/toy"
    weights: str = "toy"
    """Toys with other weights say other things."""
    size: int = 64
    """Tokens of its vocabulary."""
    max_context: int = 512
    max_rank: int = 64
    raw: bool = False
    """Log-probs are those before temperature."""
    key: str = ""
    """What it wants as a bearer token; empty: nothing."""
    without: frozenset[str] = frozenset()
    """What it has not: `adapters`, `ids`, `logprobs`, `tokenize`, `prompt_logprobs`."""
    tokens: list[int] | None = None
    """What it answers to /tokenize; None: it has no such path."""
    shelf: dict[str, str] = field(default_factory=dict)
    """Adapter → folder, from its start on."""
    refuses: str = ""
    """What it says to every adapter that it is to load; empty: it loads them."""
    idle_adapters: bool = False
    """Adapters are listed, and nothing is computed with them."""
    delay_s: float = 0.0
    """Of every completion."""
    die_after: int | None = None
    """Completions after which it dies, in the middle of the next."""
    breaks: int = 0
    """Completions that end in a broken connection, before any other."""


class ToyVllm(JsonServer):
    """Serves in threads of its own until it is left, or dies."""

    def __init__(self, toy: Toy | None = None, port: int = 0) -> None:
        self.toy = toy or Toy()
        self.requests: list[tuple[str, Body]] = []
        """Path and body of every POST, in order of arrival."""
        self.adapters: dict[str, tuple[str, str]] = {
            name: (path, _weights(path)) for name, path in self.toy.shelf.items()
        }
        """Name → its folder and what it held when it was loaded."""
        self.answered, self.at_once, self.most_at_once = 0, 0, 0
        self.dead, self.awake = threading.Event(), threading.Event()
        self.awake.set()
        self._lock = threading.Lock()
        super().__init__(port)

    def __exit__(self, *_: object) -> None:
        self.awake.set()
        if not self.dead.is_set():
            super().__exit__()

    def die(self) -> None:
        """Refuse connections from now on, and break those that are open, as after kill -9."""
        with self._lock:
            if self.dead.is_set():
                return
            self.dead.set()
        self.stop()
        self.awake.set()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Accept connections and answer nothing, health included."""
        self.awake.clear()

    def bodies(self, path: str = "/v1/completions") -> list[Body]:
        return [body for at, body in self.requests if at == path]

    # -- replies -----------------------------------------------------------------------------------

    def answer(self, asked: Asked) -> Reply | None:
        self.awake.wait()
        if asked.target.startswith("/v1") and not asked.has_key(self.toy.key):
            return error(401, "Unauthorized")
        body = asked.body if asked.method == "POST" else None
        reply = None if self.dead.is_set() else self._reply(asked.target, body)
        return None if self.dead.is_set() else reply

    def _reply(self, path: str, body: Body | None) -> Reply | None:
        if path == "/health":
            return Reply(200, {})
        if path == "/version":
            return Reply(200, {"version": "0.32.0"})
        if body is None:
            return self._got(path)
        with self._lock:
            self.requests.append((path, body))
        if path == "/tokenize" and self.toy.tokens is not None:
            return Reply(200, {"tokens": self.toy.tokens})
        if path == "/v1/completions":
            return self._completion_in_turn(body)
        if path.endswith("_lora_adapter") and "adapters" not in self.toy.without:
            return (self._load if path.startswith("/v1/load") else self._unload)(body)
        return NOT_FOUND

    def _got(self, path: str) -> Reply:
        if path == "/v1/load_lora_adapter" and "adapters" not in self.toy.without:
            return Reply(405, {"detail": "Method Not Allowed"})
        if path != "/v1/models":
            return NOT_FOUND
        base = self.toy.served
        models: list[tuple[str, str, str | None, int | None]] = [
            (base, self.toy.root, None, self.toy.max_context)
        ]
        models += [(name, place, base, None) for name, (place, _) in self.adapters.items()]
        listed = [
            {"id": name, "root": root, "parent": parent, "max_model_len": limit, "owned_by": "vllm"}
            for name, root, parent, limit in models
        ]
        return Reply(200, {"object": "list", "data": listed})

    def _load(self, body: Body) -> Reply:
        name, place = body["lora_name"], Path(body["lora_path"])
        if self.toy.refuses:
            return error(400, self.toy.refuses.format(place))
        if name in self.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (place / "adapter_config.json").is_file():
            return error(404, f"Loading lora {name} failed: No adapter found for {place}")
        settings = json.loads((place / "adapter_config.json").read_text())
        if settings.get("width", self.toy.size) != self.toy.size:
            return error(400, "Worker failed with error 'The size of tensor a must match the size "
                              "of tensor b (64) at non-singleton dimension 1'")  # fmt: skip
        rank = settings["r"]
        if rank > self.toy.max_rank:
            return error(400, f"LoRA rank {rank} is greater than max_lora_rank")
        self.adapters[name] = (str(place), _weights(place))
        return Reply(200, {})

    def _unload(self, body: Body) -> Reply:
        if self.adapters.pop(body["lora_name"], None) is None:
            return error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return Reply(200, {})

    def _completion_in_turn(self, body: Body) -> Reply | None:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            broken, self.toy.breaks = self.toy.breaks > 0, max(0, self.toy.breaks - 1)
        time.sleep(self.toy.delay_s)
        try:
            if self.toy.die_after is not None and self.answered >= self.toy.die_after:
                self.die()
            if broken or self.dead.is_set():
                return None
            return self._completion(body)
        finally:
            with self._lock:
                self.at_once -= 1
                self.answered += 1

    def _completion(self, body: Body) -> Reply:
        prompt, name = body["prompt"], body["model"]
        if name != self.toy.served and name not in self.adapters:
            return error(404, f"The model `{name}` does not exist.")
        if max(prompt) >= self.toy.size:
            return error(400, f"Token id {max(prompt)} is out of vocabulary")
        if "logprobs" in body and "logprobs" in self.toy.without:
            return error(400, "logprobs are not served here")
        weights = self.toy.weights
        if name in self.adapters and not self.toy.idle_adapters:
            weights += self.adapters[name][1]
        choice = self._choice(weights, prompt, body)
        return Reply(
            200, {"model": name, "choices": [choice], "usage": {"prompt_tokens": len(prompt)}}
        )

    def _choice(self, weights: str, prompt: list[int], body: Body) -> Body:
        draw = random.Random(f"{weights} {prompt} {body.get('seed')}")
        temperature = float(body.get("temperature", 1.0))
        nats = self.logprobs(weights, prompt, temperature or 1.0)
        greedy = max(range(self.toy.size), key=lambda token: nats[token])
        rolls = [draw.randrange(self.toy.size) for _ in range(int(body["max_tokens"]))]
        ids = rolls if temperature else [greedy, *rolls[1:]]
        choice: Body = {"text": "", "finish_reason": "length", "logprobs": None}
        if "ids" not in self.toy.without and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if body.get("logprobs"):
            told = self.logprobs(weights, prompt, 1.0) if self.toy.raw else nats
            best = sorted(range(self.toy.size), key=lambda token: -told[token])[: body["logprobs"]]
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{t}": told[t] for t in best}]}
        if "prompt_logprobs" in body and "prompt_logprobs" not in self.toy.without:
            choice["prompt_logprobs"] = self._of_prompt(weights, prompt)
        return choice

    def _of_prompt(self, weights: str, prompt: list[int]) -> list[Body | None]:
        places: list[Body | None] = [None]
        for k in range(1, len(prompt)):
            nats = self.logprobs(weights, prompt[:k], 1.0)
            places.append({str(prompt[k]): {"logprob": nats[prompt[k]]}})
        return places

    def logprobs(self, weights: str, prompt: Sequence[int], temperature: float) -> list[float]:
        """Of each token after `prompt`; only its last tokens count."""
        seed = f"{weights} {list(prompt[-2:])}".encode()
        draw = random.Random(hashlib.sha256(seed).digest())
        logits = [draw.gauss(0.0, 2.0) / temperature for _ in range(self.toy.size)]
        whole = math.log(sum(map(math.exp, logits)))
        return [logit - whole for logit in logits]


def error(status: int, message: str) -> Reply:
    """A refusal as vLLM writes it."""
    problem = {"message": message, "type": "BadRequestError", "code": status}
    return Reply(status, {"error": problem})


def _weights(place: str | Path) -> str:
    """What a folder holds, as far as it changes replies."""
    file = Path(place) / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()
