"""The engines that sample in their own process, and the model that all engines share.

`soulkit` is LocalModel; `generate` is transformers' own loop on left-padded rows; `continuous` is
its `generate_batch`. All of them take texts and return texts; only soulkit keeps the log-probs of
sampled tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from _processes import Json, Versions, forget_peak, serve
from _sampling_cases import WORDS, Case, replies, timed

from soulkit.models.local.loading import load_adapter, load_base, locate, pick_device
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import tiny_tokenizer

HEAD = 32
"""Width of an attention head of the benchmark's model."""
NEVER = 50.0
"""The end-of-turn token gets a logit this far below all others."""
PAGE = 64
"""Tokens per page of `generate_batch`; its default pages of 256 would be mostly empty here."""
PREFILL, PROMPTS = 1024, 2048
"""Limits of `generate_batch`: prompt tokens per pass, and over all replies in progress. On a CPU,
each row reads the keys of all others and masks them afterwards."""


class Make:
    """Saves `model` and `adapter` to a folder; the model never ends a turn."""

    def __init__(self, spec: Json) -> None:
        self.spec, self.folder = spec, Path(spec["folder"])

    def run(self, request: Json) -> Json:
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

        hidden, layers = self.spec["hidden"], self.spec["layers"]
        tokenizer = tiny_tokenizer(WORDS, max_context=self.spec["context"])
        ends: Json = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers,
            intermediate_size=3 * hidden, head_dim=HEAD, num_attention_heads=hidden // HEAD,
            num_key_value_heads=hidden // HEAD // 2, tie_word_embeddings=True,
            max_position_embeddings=self.spec["context"], initializer_range=0.05, **ends,
        ))  # fmt: skip
        _endless(model, {*ends.values()})
        model.generation_config = GenerationConfig(**ends)
        model.save_pretrained(self.folder / "model")
        tokenizer.save_pretrained(self.folder / "model")
        empty = tokenizer.apply_chat_template(
            [{"role": "user", "content": WORDS[0]}], add_generation_prompt=True, return_dict=False
        )
        return {
            "parameters": sum(p.numel() for p in model.parameters()),
            "adapter": _adapter(model, self.folder / "adapter", self.spec["rank"]),
            "overhead": len(empty) - 1,
        }


@torch.no_grad()
def _endless(model: Any, ends: set[int]) -> None:
    """Make end-of-turn tokens impossible, so that all engines write equally many tokens.

    The first component of every hidden state is fixed to that of its token's embedding, which is 1.
    That of an end token's embedding is negative, which gives end tokens a very low logit.
    """
    embeddings = model.get_input_embeddings().weight
    embeddings[:, 0] = 1.0
    for token in ends:
        embeddings[token, 0] = -NEVER
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0


@torch.no_grad()
def _adapter(model: Any, folder: Path, rank: int) -> int:
    """Save an adapter with random weights on all linear layers; return its parameter count."""
    from peft import LoraConfig, get_peft_model

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=rank, target_modules=linear, task_type="CAUSAL_LM")
    )
    random = torch.Generator().manual_seed(1)
    count = 0
    for name, weight in adapted.named_parameters():
        if "lora_" not in name:
            continue
        count += weight.numel()
        if "lora_B" in name:  # initially zero, so the adapter would have no effect
            weight.normal_(0.0, 0.02, generator=random)
            if "o_proj" in name or "down_proj" in name:
                weight[0] = 0.0  # see `_endless`
    adapted.save_pretrained(str(folder))
    return count


class Ours:
    """soulkit's decode loop, called in the way that an episode does."""

    def __init__(self, spec: Json) -> None:
        torch.set_num_threads(spec["threads"])
        self.model = LocalModel.load(
            Path(spec["folder"]) / "model", device=spec["device"], dtype=spec["dtype"],
            adapter=_adapter_of(spec), batch_size=spec["many"],
        )  # fmt: skip
        self.overhead = spec["overhead"]

    def run(self, request: Json) -> Json:
        forget_peak()
        return timed(Case(**request["case"]), request["round"], self.overhead, self.sample)

    def sample(self, case: Case, texts: list[str]) -> list[list[int]]:
        return asyncio.run(replies(self.model, case, texts))


class _Transformers:
    """Base of both engines of transformers: the model as soulkit loads it, and its tokenizer."""

    def __init__(self, spec: Json) -> None:
        torch.set_num_threads(spec["threads"])
        place = pick_device(spec["device"])
        base, self.tokenizer = load_base(locate(Path(spec["folder"]) / "model"), place,
                                         spec["dtype"])  # fmt: skip
        adapter = _adapter_of(spec)
        adapted = base if adapter is None else load_adapter(base, adapter)
        adapted.to(place).eval()
        self.model = base  # its layers contain the adapter
        self.overhead = spec["overhead"]

    def run(self, request: Json) -> Json:
        forget_peak()
        return timed(Case(**request["case"]), request["round"], self.overhead, self.sample)

    def sample(self, case: Case, texts: list[str]) -> list[list[int]]:
        messages = [[{"role": "user", "content": text}] for text in texts]
        prompts = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        wrong = {len(prompt) for prompt in prompts} - {case.length}
        if wrong:
            raise ValueError(f"prompts have {wrong} tokens instead of {case.length}")
        ids = self.replies(case, prompts)
        self.tokenizer.batch_decode(ids)
        return ids

    def replies(self, case: Case, prompts: list[list[int]]) -> list[list[int]]:
        raise NotImplementedError


class Generate(_Transformers):
    """`model.generate` on a batch of left-padded rows."""

    @torch.inference_mode()
    def replies(self, case: Case, prompts: list[list[int]]) -> list[list[int]]:
        from transformers import GenerationConfig

        width = max(map(len, prompts))
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        place = self.model.device
        out = self.model.generate(
            input_ids=torch.tensor(rows, device=place),
            attention_mask=torch.tensor(mask, device=place),
            generation_config=GenerationConfig(max_new_tokens=case.new, do_sample=False),
        )
        return [row[width:] for row in out.tolist()]


class Continuous(_Transformers):
    """`model.generate_batch` with pages and limits for a small machine, set up once per case. By
    default it starts and ends a thread in each call, which takes half a second."""

    case: Case | None = None
    """The case that it is set up for."""

    def replies(self, case: Case, prompts: list[list[int]]) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self.case is not None and self.case != case:
            self.model.destroy_cached_continuous_batching_manager()
        self.case = case
        out = self.model.generate_batch(
            prompts,
            GenerationConfig(max_new_tokens=case.new, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(**self._sizes(case)),
            persistent_manager=True,
        )
        return [list(reply.generated_tokens) for reply in out.values()]

    def _sizes(self, case: Case) -> Json:
        if self.model.device.type != "cpu":
            return {}  # on a GPU, its own choice by available memory is better
        pages = -(-(case.length + case.new) // PAGE)
        at_once = max(1, min(case.at_once, PROMPTS // case.length))
        return {"page_size": PAGE, "num_blocks": (at_once + 2) * pages,
                "max_batch_tokens": PREFILL, "max_requests_per_batch": at_once}  # fmt: skip


def _adapter_of(spec: Json) -> Path | None:
    return Path(spec["folder"]) / "adapter" if spec["lora"] else None


if __name__ == "__main__":
    import peft  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    serve({"make": Make, "soulkit": Ours, "generate": Generate, "continuous": Continuous,
           "versions": Versions})  # fmt: skip
