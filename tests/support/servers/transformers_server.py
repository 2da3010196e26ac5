"""A stand-in for `transformers serve` of transformers 5.23, which needs packages that tests lack.

    with TransformersServer(model_folder) as server:
        Endpoint(model="m", base_url=server.base_url)

It takes what that server takes and refuses what it refuses. A field that its interface does not
know gets 422 before a model is looked at. `/v1/models` breaks where there is no cache of the hub,
and the connection is closed after that answer. `generation_config`, a JSON text, stands in for the
model's own. Replies are sampled by transformers itself from a real model.
"""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

from tests.support.servers.loopback import Asked, JsonServer, Reply

FIELDS = frozenset((
    "messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias",
    "logprobs", "max_completion_tokens", "max_tokens", "metadata", "modalities", "n",
    "parallel_tool_calls", "prediction", "presence_penalty", "reasoning_effort",
    "response_format", "seed", "service_tier", "stop", "store", "stream", "stream_options",
    "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user",
    "web_search_options", "generation_config", "chat_template_kwargs",
))  # fmt: skip
"""What its interface knows."""
PATHS = ("/health", "/load_model", "/reset", "/v1/chat/completions", "/v1/models")


class TransformersServer(JsonServer):
    """Serves the model in `folder`; with `hidden` nothing but chat requests, as behind a proxy."""

    def __init__(self, folder: Path, *, hidden: bool = False) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.hidden = hidden
        self.requests: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self._turn = threading.Lock()
        super().__init__()

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "POST":
            return self._chat(asked.body)
        if asked.target == "/openapi.json" and not self.hidden:
            paths: dict[str, Any] = {name: {} for name in PATHS}
            return Reply(200, {"info": {"title": "FastAPI"}, "paths": paths})
        if asked.target == "/v1/models":
            return Reply(500, '"Internal Server Error"', last=True)
        return Reply(404)

    def _chat(self, body: dict[str, Any]) -> Reply:
        with self._turn:
            unexpected = set(body) - FIELDS
            if unexpected:
                self.refused.append(body)
                return Reply(422, {"detail": f"Unexpected fields in the request: {unexpected}"})
            self.requests.append(body)
            return Reply(200, self._generate(body))

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        import torch
        from transformers import GenerationConfig

        if body.get("generation_config") is not None:
            config = GenerationConfig(**json.loads(body["generation_config"]))
        else:
            config = copy.deepcopy(self.model.generation_config)
        if body.get("temperature") is not None:
            config.temperature = float(body["temperature"])
            if config.temperature == 0.0:
                config.do_sample = False
        config.top_p = body.get("top_p", config.top_p)
        config.max_new_tokens = body.get("max_tokens", 1024)
        torch.manual_seed(body.get("seed", 0))
        prompt = self.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = self.model.generate(**prompt, generation_config=config)[0]
        size = prompt["input_ids"].shape[-1]
        count = len(ids) - size
        end = "length" if count >= config.max_new_tokens else "stop"
        text = self.tokenizer.decode(ids[size:], skip_special_tokens=True)
        choice = {"index": 0, "message": {"role": "assistant", "content": text},
                  "finish_reason": end}  # fmt: skip
        usage = {"prompt_tokens": size, "completion_tokens": count, "total_tokens": size + count}
        return {"object": "chat.completion", "choices": [choice], "usage": usage}
