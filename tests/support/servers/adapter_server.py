"""A server that computes with the adapters that are loaded on it, by the policy of the test itself.

    with AdapterServer(policy) as server:
        VllmClient(Address(server.url))

It speaks as much of vLLM's wire as pushes need: adapters are read from their folders when they are
loaded, and the log-probs of prompts are those of the base with them. `events` tells what was asked,
in order. It can be made to break: `deaf` to adapters, or `stale`: what is loaded later computes as
what was loaded at first; or `numb`: deaf once it has slept. While it sleeps it refuses the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from soulkit.train.model.policy import Policy
from soulkit.train.rollouts.push import LogprobProbe
from tests.support.servers.loopback import Asked, JsonServer, Reply

_ONE = threading.Lock()
"""Servers of one test may share their policy, whose weights are exchanged for each answer."""
Weights = dict[str, torch.Tensor]


class AdapterServer(JsonServer):
    """Serves until it is left. `adapters`: those that are loaded, by name."""

    def __init__(
        self, policy: Policy, *, deaf: bool = False, stale: bool = False, numb: bool = False
    ) -> None:
        self.policy, self.deaf, self.stale, self.numb = policy, deaf, stale, numb
        self.sleeping = self.sleepless = False
        self.events: list[tuple[str, str]] = []
        self.adapters: dict[str, Weights] = {}
        self.unread: list[str] = []
        """Folders that were gone while their adapter was loaded."""
        self._folders: dict[str, Path] = {}
        super().__init__()

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply()
        path, body = asked.target, asked.body
        if path in ("/sleep?level=1", "/wake_up"):
            if self.sleepless:
                return Reply(404, {"detail": "Not Found"})
            self.events.append((path.strip("/").partition("?")[0], ""))
            self.sleeping = path.startswith("/sleep")
            self.deaf |= self.numb and not self.sleeping
            return Reply(200, {"status": "sleeping" if self.sleeping else "awake"})
        if self.sleeping:
            return Reply(400, {"error": {"message": "it sleeps"}})
        with _ONE:
            self.unread += [name for name, at in self._folders.items() if not at.is_dir()]
            if path == "/v1/load_lora_adapter":
                return self._load(body["lora_name"], Path(body["lora_path"]))
            if path == "/v1/unload_lora_adapter":
                return self._unload(body["lora_name"])
            return self._read(body["model"], body["prompt"])

    def _load(self, name: str, folder: Path) -> Reply:
        self.events.append(("load", name))
        if name in self.adapters or folder in self._folders.values():
            return Reply(400, {"error": {"message": "has been loaded already"}})
        first = next(iter(self.adapters.values()), None)
        weights = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = first if self.stale and first is not None else weights
        self._folders[name] = folder
        return Reply(200, "Success")

    def _unload(self, name: str) -> Reply:
        self.events.append(("unload", name))
        if name not in self.adapters:
            return Reply(404, {"error": {"message": "cannot be found"}})
        del self.adapters[name], self._folders[name]
        return Reply(200, "Success")

    def _read(self, name: str, prompt: Sequence[int]) -> Reply:
        self.events.append(("read", name))
        with _weights(self.policy, {} if self.deaf else self.adapters[name]):
            (logprobs,) = LogprobProbe(self.policy, (tuple(prompt),)).logprobs()
        places = zip(prompt[1:], logprobs, strict=True)
        values = [None, *({str(i): {"logprob": value, "rank": 1}} for i, value in places)]
        return Reply(200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": values}]})


@contextmanager
def _weights(policy: Policy, weights: Weights) -> Iterator[None]:
    """Within it the policy has the adapter of a file; without one, none that does anything."""
    before = {name: parameter.data for name, parameter in policy.trained}
    try:
        for name, parameter in policy.trained:
            key = name.replace(".policy.", ".")
            parameter.data = weights.get(key, torch.zeros_like(parameter.data))
        yield
    finally:
        for name, parameter in policy.trained:
            parameter.data = before[name]
