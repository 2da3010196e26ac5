"""soulkit's supervised contenders: the shared model, one optimizer step, reading a corpus."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _processes import CLOCKS, Json, memory, serve
from _soulkit_side import WIDE_OPEN, Compare, Versions, save_gradients

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.stream import LessonStream
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.objectives.sequences import Span
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.sft.steps import imitate
from soulkit.types import Segment

VOCABULARY = 32_000
SHAPE: Json = {
    "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024, "head_dim": 64,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen3-shaped: 21 million parameters with the vocabulary, 12 million of them in the head."""


def words() -> list[str]:
    letters = "bcdfghjklmnprstvwz"
    pairs = ["".join(p) for p in itertools.product(letters, "aeiou")]
    made = ("".join(p) for p in itertools.product(pairs, pairs, "aeioun"))
    return list(itertools.islice(made, VOCABULARY - 800))


class Make:
    """Saves `model`, `adapter` and the `rows` of conversations to a folder."""

    def __init__(self, spec: Json) -> None:
        self.spec, self.folder = spec, Path(spec["folder"])

    def run(self, request: Json) -> Json:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        base = self.folder / "model"
        tokenizer = tiny_tokenizer(words(), max_context=SHAPE["max_position_embeddings"])
        torch.manual_seed(0)
        ends: Json = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **ends, **SHAPE))
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        policy = load_policy(_config({}, base, None), base)
        random_ = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in policy.trained:  # an adapter of zeros would have zero gradients
                parameter.add_(torch.randn(parameter.shape, generator=random_) * 0.02)
        policy.save(self.folder / "adapter")
        rows, seconds = self._encoded(policy)
        (self.folder / "rows.json").write_text(json.dumps(rows))
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "adapter": sum(p.numel() for _, p in policy.trained), "encode_s": seconds,
            "tokens": sum(len(row["ids"]) for row in rows), "sequences": len(rows),
            "trained": sum(b - a for row in rows for a, b in row["trained"]),
        }  # fmt: skip

    def _encoded(self, policy: Policy) -> tuple[list[Json], float]:
        lessons = conversations(self.spec["sequences"], self.spec["scale"])
        encoder = LessonEncoder(policy.renderer, policy.encode_reply)
        for lesson in lessons:  # the first lesson of each shape is compared turn by turn
            encoder(lesson)
        start = time.process_time()
        spans = [span for lesson in lessons for span in encoder(lesson)]
        seconds = time.process_time() - start
        return [_row(span) for span in spans if isinstance(span, Span)], seconds


def conversations(count: int, scale: float) -> list[Lesson]:
    """Conversations of 50 to 1,500 tokens, log-uniform; the person's turns are trained."""
    rng, vocabulary = random.Random(0), words()
    lessons = []
    for number in range(count):
        even = (number + 0.5) / count
        length = scale * math.exp(math.log(50) + even * (math.log(1500) - math.log(50)))
        segments = [Segment("system", _text(rng, vocabulary, 12))]
        while length > 0 or len(segments) < 3:
            turn = rng.randint(5, 60)
            segments += [Segment("user", _text(rng, vocabulary, turn)),
                         Segment("assistant", _text(rng, vocabulary, turn))]  # fmt: skip
            length -= 2 * turn + 10
        learned = tuple(s.role == "assistant" for s in segments)
        lessons.append(Lesson(tuple(segments), learned, "made", f"made:{number}"))
    rng.shuffle(lessons)
    return lessons


def _text(rng: random.Random, vocabulary: list[str], count: int) -> str:
    return " ".join(rng.choices(vocabulary, k=count))


def _row(span: Span) -> Json:
    edges = [i for i in range(1, len(span.ids)) if span.trained[i] != span.trained[i - 1]]
    edges += [len(span.ids)] if span.trained[-1] else []
    return {"ids": span.ids, "trained": list(zip(edges[::2], edges[1::2], strict=True))}


def _config(changes: Json, base: Path, adapter: Path | None) -> TrainConfig:
    settings: Json = {
        "method": "sft", "model": str(base), "tasks": {"tomi": 1.0}, "device": "cpu",
        "adapter": None if adapter is None else str(adapter), "max_grad_norm": WIDE_OPEN,
    }  # fmt: skip
    return TrainConfig.model_validate(settings | changes)


def _policy(spec: Json) -> tuple[Policy, TrainConfig]:
    torch.set_num_threads(spec["threads"])
    folder = Path(spec["folder"])
    adapter = None if spec["full"] else folder / "adapter"
    changes = {"full": spec["full"], "tokens_per_batch": spec["tokens"], **spec["settings"]}
    config = _config(changes, folder / "model", adapter)
    return load_policy(config, folder / "model"), config


class SupervisedStep:
    """One optimizer update on the sequences of a file, as in a run."""

    def __init__(self, spec: Json) -> None:
        self.clock = spec["clock"]
        self.policy, self.config = _policy(spec)
        self.spans = _spans(spec)
        parameters = [p for _, p in self.policy.trained]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)

    def run(self, request: Json) -> Json:
        clock = CLOCKS[self.clock]
        start = clock()
        learned = imitate(self.policy, self.optimizer, self.spans, self.config)
        seconds = clock() - start
        if "gradients" in request:
            gradients = {n: p.grad for n, p in self.policy.trained if p.grad is not None}
            save_gradients(gradients, request["gradients"])
        packs = self.policy.packs(self.spans, self.config.tokens_per_batch)
        computed = sum(pack.computed for pack in packs)
        return {"step": seconds, "computed": computed, "loss": learned.loss}


class OneByOne:
    """The baseline: transformers' own forward pass, one sequence at a time, without packing."""

    def __init__(self, spec: Json) -> None:
        self.policy, _ = _policy({**spec, "settings": {"packing": "off", "fused": "off"}})
        self.spans = _spans(spec)

    def run(self, request: Json) -> Json:
        trained = sum(span.n_trained for span in self.spans)
        for span in self.spans:
            ids = torch.tensor([span.ids])
            labels = ids.masked_fill(~torch.tensor([span.trained]), -100)[0, 1:]
            logits = self.policy.causal(input_ids=ids, use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, labels, reduction="sum") / trained).backward()
        gradients = {n: p.grad for n, p in self.policy.trained if p.grad is not None}
        save_gradients(gradients, request["gradients"])
        return {}


def _spans(spec: Json) -> list[Span]:
    spans = []
    for row in json.loads(Path(spec["rows"]).read_text()):
        flags = [False] * len(row["ids"])
        for start, end in row["trained"]:
            flags[start:end] = [True] * (end - start)
        spans.append(Span(tuple(row["ids"]), tuple(flags), ()))
    return spans


class Read:
    """Reads a corpus through the stream of a run, from `position` on."""

    def __init__(self, spec: Json) -> None:
        self.sources = spec["sources"]
        self.before = memory("VmRSS")

    def run(self, request: Json) -> Json:
        clock = CLOCKS[request["clock"]]
        start = clock()
        stream = LessonStream.open(self.sources, seed=1, side="human")
        opened = clock()
        if "position" in request:
            stream.resume(request["position"])
        first = stream.take(1)[0].key
        ready = clock()
        for _ in range(request["steps"]):
            stream.take(request["batch"])
        end = clock()
        position = stream.position()
        keys = [lesson.key for lesson in stream.take(request["batch"])]
        return {
            "open_s": opened - start, "first_s": ready - opened, "first": first,
            "rows_s": request["steps"] * request["batch"] / (end - ready),
            "position": position, "next": keys, "rows": sum(n or 0 for n in stream.sizes.values()),
            "grown": memory("VmHWM") - self.before, "passes": stream.passes,
        }  # fmt: skip


if __name__ == "__main__":
    import peft  # noqa: F401 - import once, before forking
    import pyarrow.parquet  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    serve({"make": Make, "step": SupervisedStep, "plain": OneByOne, "compare": Compare,
           "read": Read, "versions": Versions})  # fmt: skip
