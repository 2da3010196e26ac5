"""Tiny random models of several families, saved as ordinary folders with a tokenizer.

All weights are drawn from one seeded stream in the order of parameter names, so a kind gives the
same model everywhere. Matrices are large enough that token probabilities are far from uniform.
Norms and biases are not neutral; otherwise a test would not notice one that is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from soulkit.models.local.loading import quieten
from soulkit.models.local.tiny import tiny_tokenizer

WINDOW = 7
"""Sliding window of every kind that has one; test sequences are longer."""

LONG = 40
"""Sequence length from which a kind with two position scalings uses the long one."""

WORDS = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in "nrst"]
_CONTEXT = 1024
_GAIN = 1.2

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": _CONTEXT,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def build(kind: str, folder: Path, words: Iterable[str] = WORDS) -> Path:
    """Save model and tokenizer of `kind` (a key of KINDS) to `folder`; returns the folder."""
    model, tokenizer = make(kind, words)
    quieten()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make(kind: str, words: Iterable[str] = WORDS) -> tuple[Any, Any]:
    """(model, tokenizer) of `kind` in memory."""
    tokenizer = tiny_tokenizer(words, max_context=_CONTEXT)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)  # for vectors that a family initialises at random
        model: Any = KINDS[kind](len(tokenizer), {**ids, "bos_token_id": None})
    # Gemma scales its embeddings up again, and they are its head, too.
    _draw(model, seed=7, embeddings=0.25 if kind.startswith("gemma") else 0.5)
    model.generation_config = GenerationConfig(**ids)
    return model, tokenizer


def _draw(model: torch.nn.Module, seed: int, embeddings: float) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=random)
            if weight.ndim < 2:
                weight.copy_(weight + 0.1 * noise)
            elif "embed" in name or "head" in name or "wte" in name or "wpe" in name:
                weight.copy_(embeddings * noise)
            else:
                weight.copy_(_GAIN * noise / weight[0].numel() ** 0.5)


def _qwen3(vocab: int, ends: dict[str, Any], **more: Any) -> torch.nn.Module:
    shape = {"num_hidden_layers": 2, "tie_word_embeddings": False} | more
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, **_TEXT, **ends, **shape))


def _qwen3_tied(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return _qwen3(vocab, ends, tie_word_embeddings=True)


def _qwen3_sliding(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return _qwen3(
        vocab,
        ends,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    )


def _llama(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    shape = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **_TEXT, **ends, **shape))


def _mistral(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    shape = {"num_hidden_layers": 2, "sliding_window": WINDOW}
    return MistralForCausalLM(MistralConfig(vocab_size=vocab, **_TEXT, **ends, **shape))


def _phi3(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    text = {k: v for k, v in _TEXT.items() if k != "head_dim"}
    shape = {"num_hidden_layers": 2, "sliding_window": WINDOW}
    return Phi3ForCausalLM(Phi3Config(vocab_size=vocab, **text, **ends, **shape))


def _phi3_long(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    """Phi-3 with other position scaling for batches whose longest sequence exceeds LONG."""
    text = {k: v for k, v in _TEXT.items() if k != "head_dim"}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": LONG,
        "partial_rotary_factor": 1.0,
    }
    shape = {"num_hidden_layers": 2, "original_max_position_embeddings": LONG}
    return Phi3ForCausalLM(
        Phi3Config(vocab_size=vocab, rope_parameters=rope, **text, **ends, **shape)
    )


def _llama4(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    """Llama 4 with chunked attention, in chunks longer than a short trial sequence."""
    return Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=vocab,
            **_TEXT,
            **ends,
            intermediate_size_mlp=48,
            num_hidden_layers=2,
            moe_layers=[],
            attention_chunk_size=128,
            layer_types=["chunked_attention", "full_attention"],
        )
    )


def _gemma3_text(vocab: int, ends: dict[str, Any]) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=vocab,
        **_TEXT,
        **ends,
        num_hidden_layers=3,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=_MIXED,
    )


def _gemma3(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return Gemma3ForCausalLM(_gemma3_text(vocab, ends))


def _gemma3_vl(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    text = _gemma3_text(vocab, ends).to_dict()
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ends)
    )


def _qwen3_vl(vocab: int, ends: dict[str, Any], tied: bool = False) -> torch.nn.Module:
    text = {**_TEXT, **ends, "vocab_size": vocab, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={**text, "rope_parameters": rope, "tie_word_embeddings": tied},
            vision_config=vision,
            tie_word_embeddings=tied,
            **ends,
        )
    )


def _qwen3_vl_tied(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return _qwen3_vl(vocab, ends, tied=True)


def _hybrid(vocab: int, ends: dict[str, Any]) -> dict[str, Any]:
    """A layer of linear attention and one of attention."""
    return {
        **_TEXT, **ends, "vocab_size": vocab, "num_hidden_layers": 2, "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    }  # fmt: skip


def _qwen3_next(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    dense = {"mlp_only_layers": [0, 1], "num_experts": 2, "moe_intermediate_size": 16}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_hybrid(vocab, ends), **dense))


def _qwen3_5(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_hybrid(vocab, ends)))


def _gpt2(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": _CONTEXT}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, **shape, **quiet, **ends))


def _bloom(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    shape = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(vocab_size=vocab, **shape, **ends))


def _gemma2(vocab: int, ends: dict[str, Any]) -> torch.nn.Module:
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=vocab,
            **_TEXT,
            **ends,
            num_hidden_layers=2,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=9.0,
        )
    )


KINDS: dict[str, Callable[[int, dict[str, Any]], torch.nn.Module]] = {
    "qwen3": _qwen3,
    "qwen3-tied": _qwen3_tied,
    "qwen3-sliding": _qwen3_sliding,
    "llama": _llama,
    "mistral": _mistral,
    "phi3": _phi3,
    "phi3-long": _phi3_long,
    "gemma3": _gemma3,
    "gemma3-vl": _gemma3_vl,
    "qwen3-vl": _qwen3_vl,
    "qwen3-vl-tied": _qwen3_vl_tied,
    "qwen3-next": _qwen3_next,
    "qwen3.5": _qwen3_5,
    "gpt2": _gpt2,
    "bloom": _bloom,
    "llama4": _llama4,
    "gemma2": _gemma2,
}

VISUAL = ("qwen3-vl", "qwen3-vl-tied", "gemma3-vl")
"""Kinds that also read images: they have a vision tower."""
