"""The trained model (a frozen base with a LoRA adapter, or all weights) and its log-probs.

Log-probs are of logits / T, computed in float32 (`models/local/float32_head.py`) and only at
trained positions: hidden states are gathered first, and logits are computed in chunks that the
backward pass recomputes. When a model is loaded, a probe compares these logits with the model's own
forward pass; if they differ (logit scaling, soft caps), the own forward pass is used. A second
check (`attention.py`) compares packed attention with plain forward passes, and refuses a model that
fails it.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from soulkit.errors import ModelLoadError
from soulkit.models.local.chat_template import Renderer
from soulkit.models.local.float32_head import widen_head
from soulkit.models.local.journal import Journal
from soulkit.models.local.loading import (
    ADAPTER,
    freeze_all_but_language,
    is_peft,
    load_adapter,
    lora_targets,
    pick_device,
    save_model,
)
from soulkit.models.local.quantize import is_quantised
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.weights import stored_types
from soulkit.text import one_line
from soulkit.train.config import TOKENS_PER_BATCH, TrainConfig
from soulkit.train.memory import CHUNK, PassChoice
from soulkit.train.model.attention import (
    FLEX_BLOCK,
    Packed,
    check_packing,
    shape_of,
    try_flex,
    unknown_layers,
)
from soulkit.train.model.fused import FuseSetting, fuse, fused_parts
from soulkit.train.model.packing import (
    ENOUGH,
    Entries,
    HeadShape,
    Pack,
    pack_entries,
    plan_packs,
)
from soulkit.train.objectives.sequences import Span
from soulkit.train.ranks.sampling import rank_sampler
from soulkit.train.ranks.sharding import load_on_ranks, whole, whole_weights
from soulkit.train.ranks.world import on_all_ranks, ranks

STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""dtype names of safetensors → those of torch."""

Entropies = Literal["none", "values", "gradient"]
"""Whether entropies are computed, and whether with gradient."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Values of the trained tokens of a batch, sequence after sequence. All [n_trained]."""

    log_prob: Tensor
    entropy: Tensor
    """In nats; NaN if not requested."""
    owner: Tensor
    """Index of the token's sequence in the batch."""
    hidden: Tensor | None = None
    """Last hidden states [n_trained, width] at the tokens' parents, if requested."""


class Policy:
    """Model, tokenizer and renderer of one training run; `sampler` shares its weights."""

    def __init__(
        self, model: Any, tokenizer: Any, temperature: float = 1.0, *,
        packing: Literal["auto", "off"] = "off",
        attention: Literal["auto", "sdpa", "flex"] = "auto",
        activation_checkpointing: bool = False, tokens: int | None = None,
        fused: FuseSetting = "auto", thinking: bool | None = None,
    ) -> None:  # fmt: skip
        """ModelLoadError for packing "auto" if the model's attention cannot be packed. `tokens`:
        computed tokens per forward pass."""
        widen_head(model)
        self.model = model.eval()  # dropout is 0; all forward passes run in eval mode
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.renderer = Renderer(tokenizer, thinking)
        self.pad_id = int(tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
        self.ema: dict[str, Tensor] | None = None
        """Moving average of the trained weights by name, if the run keeps one."""
        self.max_context: int | None = None
        """Limit of prompt and reply when it samples; None: the model's."""
        self.experts: Mapping[str, str] = {}
        """Task → name of its adapter, in a teacher with several."""
        self.note: Mapping[str, Any] | None = None
        """Note saved with the weights, without the step (`state/model_card.py`)."""
        self.stored = ""
        """dtype of the stored checkpoint, if there is only one."""
        self.remarks: list[str] = []
        """Lines for the user about fallbacks: packing, attention kernel, fused layers."""
        self.tokens = tokens or TOKENS_PER_BATCH.get(self.device.type, TOKENS_PER_BATCH["cpu"])
        self.recomputed = _checkpointed_layers(self.causal) if activation_checkpointing else []
        self.gathers = self._gather_agrees()
        self.turn = _turn_of_positions(self.decoder.config)
        self.kernel: Literal["sdpa", "flex"] = "sdpa"
        self.shape: HeadShape | None = None
        if packing == "auto":
            self._pack(attention)
        fuse(self.decoder, fused_parts(fused, self.device.type), self.remarks.append)

    def _pack(self, attention: Literal["auto", "sdpa", "flex"]) -> None:
        """Turn packing on, after checks; leave it off for a model with other layers than
        attention."""
        others = unknown_layers(self.decoder)
        if others and attention == "auto":
            self.remarks.append(
                f"packing is off: this model has {others} layers, which need a row per sequence"
            )
            return
        self.kernel, remark = _kernel(attention, self.decoder, self.device)
        self.remarks += [remark] if remark else []
        self.shape = shape_of(self.decoder, self.kernel)
        check_packing(self.decoder, self._states_by_depth, self.shape, self.turn)

    @property
    def causal(self) -> Any:
        """The language model without the adapter's wrapper."""
        return self.model.get_base_model() if is_peft(self.model) else self.model

    @property
    def decoder(self) -> Any:
        """The language model's layers, without output head and vision parts."""
        return self.causal.get_decoder()

    @property
    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Named parameters with a gradient."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    @property
    def computed(self) -> str:
        """dtype of the base during computation."""
        weight = next(self.decoder.parameters())
        return str(weight.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @on_all_ranks
    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the trained weights, recorded in rollouts.

        RankError if they differ between ranks.
        """
        digest = hashlib.sha256()
        for name, parameter in self.trained:
            digest.update(name.encode())
            flat = whole(parameter.detach()).cpu().contiguous().view(torch.uint8)
            digest.update(flat.numpy().tobytes())
        version = digest.hexdigest()[:16]
        ranks().same("The weights", version)
        return version

    def __reduce__(self) -> Any:
        raise TypeError("a policy is loaded by every rank, and not sent")

    @contextmanager
    def base(self) -> Iterator[None]:
        """Context in which the adapter is off, so that the model is the frozen base."""
        with self.model.disable_adapter():
            yield

    def packs(
        self, spans: Sequence[Span], budget: int | None = None, *, divided: bool = True
    ) -> list[Pack]:
        """Forward passes over at most `budget` computed tokens of `spans`, or one longer sequence.

        With `budget` None, the policy's own number applies. `divided`: the ranks share them, so
        they are planned for an even division.
        """
        budget = budget or self.tokens
        if not divided:
            return self._packs(spans, budget)
        plan = partial(self._packs, spans)
        return ranks().best_plan(plan, budget, self.cost, self.device.type)

    def divided(self, spans: Sequence[Span], budget: int | None) -> Iterator[Pack]:
        """The packs of this rank. In a sharded job every rank takes part in as many passes, so a
        rank with fewer packs makes empty passes after them."""
        for pack in ranks().share(self.packs(spans, budget), self.cost):
            if pack is None:
                self.empty_pass()
            else:
                yield pack

    def cost(self, pack: Pack) -> float:
        """Cost of a pack, forward and backward."""
        return (self.shape or HeadShape()).cost(pack)

    def _packs(self, spans: Sequence[Span], budget: int) -> list[Pack]:
        enough = ENOUGH.get(self.device.type, sys.maxsize)
        if self.turn is None:
            return plan_packs(spans, budget, self.shape, enough)
        packs = []
        for far in (False, True):
            side = [i for i, span in enumerate(spans) if (len(span.ids) > self.turn) is far]
            for pack in plan_packs([spans[i] for i in side], budget, self.shape, enough):
                packs.append(replace(pack, indices=tuple(side[i] for i in pack.indices)))
        return packs

    def hidden(self, pack: Pack) -> Tensor:
        """Last hidden states [n_trained, width] at the parents of the trained tokens of `pack`.

        The order is that of `score`.
        """
        return self.states(pack)[self._tensor(pack_entries(pack).parent)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits / temperature, float32 [n, vocabulary], from hidden states [n, width]."""
        return self.causal.get_output_embeddings()(hidden).float() / self.temperature

    def score(self, pack: Pack, *, entropy: Entropies = "none", hidden: bool = False) -> Scored:
        """Log-probs (and entropies) of every trained token of `pack`, sequence after sequence.

        Shared prefixes are computed once and their gradients add up. `hidden` needs `gathers`.
        """
        places = pack_entries(pack)
        unique, place = np.unique(places.parent, return_inverse=True)
        compute = self.states if self.gathers else self._model_logits
        rows = compute(pack).index_select(0, self._tensor(unique))
        log_prob, spread = self._read_all(rows, place, places, entropy)
        states = rows.index_select(0, self._tensor(place)) if hidden else None
        return Scored(log_prob, spread, self._tensor(places.owner), states)

    @torch.no_grad()
    def greedy(self, spans: Sequence[Span]) -> list[bool]:
        """Per sequence, whether each of its trained tokens is the likeliest one: whether greedy
        decoding writes it."""
        written = [True] * len(spans)
        for pack in self.packs(spans, divided=False):
            places = pack_entries(pack)
            rows = (self.states if self.gathers else self._model_logits)(pack)
            wanted = (rows[self._tensor(places.parent)], self._tensor(places.target))
            hit = torch.cat([((self.logits(row) if self.gathers else row).argmax(-1) == target)
                             for row, target in self.chunks(*wanted)])  # fmt: skip
            for place in places.owner[~hit.cpu().numpy()]:
                written[pack.indices[place]] = False
        return written

    def states(self, pack: Pack) -> Tensor:
        """Last hidden states [positions, width] of `pack`, row after row."""
        with self._recomputing():
            states = self.decoder(**self._inputs(pack), use_cache=False)[0]
        return states.reshape(-1, states.shape[-1])

    def empty_pass(self) -> None:
        """A forward pass over two tokens, and a backward pass where gradients are on, that change
        nothing: in a sharded job every rank takes part in as many passes."""
        states = self.states(Pack((0,), (Span((0, 1), (False, True), ()),)))
        if torch.is_grad_enabled():
            (states.sum() * 0).backward()

    def _states_by_depth(self, pack: Pack) -> list[Tensor]:
        """Hidden states after the embeddings and after every layer, as in `states`."""
        out = self.decoder(**self._inputs(pack), use_cache=False, output_hidden_states=True)
        depths = (*(out.hidden_states or ()), out[0])
        return [states.reshape(-1, states.shape[-1]) for states in depths]

    def _model_logits(self, pack: Pack) -> Tensor:
        with self._recomputing():
            logits = self.causal(**self._inputs(pack), use_cache=False).logits
        return logits.reshape(-1, logits.shape[-1])

    def _inputs(self, pack: Pack) -> dict[str, Any]:
        if pack.trie is not None:
            return self._trie_inputs(pack)
        # Padding on the right comes after all real tokens, so they do not see it.
        ids = np.full((len(pack.rows), pack.width), self.pad_id)
        for row, span in enumerate(pack.rows):
            ids[row, : len(span.ids)] = span.ids
        return {"input_ids": self._tensor(ids)}

    def _trie_inputs(self, pack: Pack) -> dict[str, Any]:
        trie = pack.trie
        assert trie is not None and self.shape is not None
        short = -len(trie) % FLEX_BLOCK if self.kernel == "flex" else 0
        costs, length = self.shape.costs, len(trie) + short
        ids = np.pad(trie.ids, (0, short), constant_values=self.pad_id)
        return {
            "input_ids": self._tensor(ids)[None],
            "position_ids": self._tensor(np.pad(trie.depth, (0, short)))[None],
            # A four-dimensional mask is passed through unchanged; packed attention ignores it.
            "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),
            "packed": Packed(trie, costs=costs, kernel=self.kernel, length=length),
        }

    def _read_all(
        self, rows: Tensor, place: np.ndarray, places: Entries, entropy: Entropies
    ) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) per entry; `rows` are hidden states or logits of distinct parents."""
        size = self._rows_at_once
        order = np.argsort(place, kind="stable")
        edges = np.searchsorted(place[order], np.arange(0, len(rows) + size, size))
        parts = []
        read = self._read
        if len(rows) > size and torch.is_grad_enabled():
            read = partial(checkpoint, self._read, use_reentrant=False)
        for first, (a, b) in zip(range(0, len(rows), size), pairwise(edges), strict=False):
            chosen = order[a:b]
            targets = self._tensor(places.target[chosen])
            parts.append(read(rows[first : first + size], self._tensor(place[chosen] - first),
                              targets, entropy))  # fmt: skip
        back = self._tensor(np.argsort(order, kind="stable"))
        log_prob, spread = (torch.cat(x)[back] for x in zip(*parts, strict=True))
        return log_prob, spread

    def _read(
        self, rows: Tensor, place: Tensor, target: Tensor, entropy: Entropies
    ) -> tuple[Tensor, Tensor]:
        logits = self.logits(rows) if self.gathers else rows.float() / self.temperature
        norm = torch.logsumexp(logits, -1)
        log_prob = logits[place, target] - norm[place]
        if entropy == "none":
            return log_prob, torch.full_like(log_prob, torch.nan, requires_grad=False)
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            spread = norm - (torch.softmax(logits, -1) * logits).sum(-1)
        return log_prob, spread[place]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(array, dtype=np.int64)).to(self.device)

    @property
    def _vocabulary(self) -> int:
        return int(self.causal.get_output_embeddings().weight.shape[0])

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Slices of tensors [n, ...], small enough to hold the logits of each slice."""
        return zip(*(t.split(self._rows_at_once) for t in tensors), strict=True)

    @property
    def _rows_at_once(self) -> int:
        return max(16, CHUNK.get(self.device.type, CHUNK["cpu"]) // self._vocabulary)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Layers recompute activations only in training mode, but sampling needs eval mode."""
        for layer in self.recomputed:
            layer.training = torch.is_grad_enabled()
        try:
            yield
        finally:
            for layer in self.recomputed:
                layer.training = False

    @torch.no_grad()
    def _gather_agrees(self) -> bool:
        if self.decoder is self.causal:  # a model that does not separate layers and head
            return False
        ids = tuple(i % self._vocabulary for i in range(4))
        pack = Pack((0,), (Span(ids, (False, True, True, True), ()),))
        try:  # first, because FSDP takes the first module that computes for the whole model
            short = self.logits(self.states(pack))
        except (AttributeError, TypeError):
            return False
        full = self._model_logits(pack).float() / self.temperature
        # Strict, because a soft cap changes small logits only slightly.
        exact = full.dtype == next(self.decoder.parameters()).dtype
        return torch.allclose(
            full, short, rtol=1e-5 if exact else 1e-3, atol=1e-6 if exact else 1e-4
        )

    def encode_reply(self, text: str) -> list[int]:
        """Ids of a scripted reply plus the end-of-turn token; markers in the text are defused."""
        end = self.renderer.end_of_turn
        words = self.renderer.specials.bend_turns(text)
        ids = self.tokenizer.encode(words, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id if end is None else end]

    def sampler(
        self, batch_size: int, *, deterministic: bool = False, journal: Journal | None = None
    ) -> LocalModel:
        """A ChatModel that shares the trained weights."""
        return rank_sampler(
            self, batch_size=batch_size, max_context=self.max_context, deterministic=deterministic,
            journal=journal,
        )  # fmt: skip

    def save(self, folder: Path, step: int | None = None) -> None:
        """Save the adapter, or all weights if they are trained, as a Hugging Face folder."""
        note = None if self.note is None else {**self.note, "step": step}
        save_model(self.model, self.tokenizer, folder, note, whole_weights(self))


def _kernel(
    setting: Literal["auto", "sdpa", "flex"], decoder: Any, device: torch.device
) -> tuple[Literal["sdpa", "flex"], str]:
    """The kernel of packed attention, and a remark if it is a fallback. ModelLoadError if
    FlexAttention was requested and does not work on a GPU."""
    if setting == "sdpa" or device.type != "cuda":
        return ("flex" if setting == "flex" else "sdpa"), ""
    try:
        try_flex(decoder, device)
    except Exception as error:
        what, why = "FlexAttention does not work with this model here", one_line(str(error), 200)
        if setting == "flex":
            raise ModelLoadError(f"{what}.", why, "Use --attention sdpa.") from error
        return "sdpa", f"packed attention uses SDPA: {what} ({why})"
    return "flex", ""


def _turn_of_positions(config: Any) -> int | None:
    """The length from which a model encodes positions differently (longrope; else None).

    The longest sequence decides for the whole pass, so shorter and longer ones are kept apart.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope["original_max_position_embeddings"])


def _checkpointed_layers(causal: Any) -> list[Any]:
    """Enable activation checkpointing and return the layers that support it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Called `gradient_...` until transformers 5.2x; the settings are the first argument.
    old, new = causal.gradient_checkpointing_enable, "activation_checkpointing_enable"
    getattr(causal, new, old)({"use_reentrant": False})
    layers = causal.get_decoder().modules()
    return [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]


def load_policy(
    config: TrainConfig, folder: Path | str, choice: PassChoice | None = None
) -> Policy:
    """The base model in `folder` with a new or given adapter, or with all weights trained. Without
    a `choice`, passes have the default size, with activations stored unless the setting is `on`."""
    load = partial(_trained_model, config, folder)
    model, tokenizer, stored = load_on_ranks(load, pick_device(config.device))
    again = choice.checkpointing if choice else config.activation_checkpointing == "on"
    policy = Policy(
        model, tokenizer, config.temperature, packing=config.packing,
        attention=config.attention, activation_checkpointing=again,
        tokens=choice.tokens if choice else None, fused=config.fused, thinking=config.thinking,
    )  # fmt: skip
    policy.stored = stored
    policy.max_context = config.max_context
    return policy


def _trained_model(config: TrainConfig, folder: Path | str) -> tuple[Any, Any, str]:
    """The model with its adapter, the tokenizer, and the dtype of the stored checkpoint."""
    # In bfloat16 typical updates are too small for most weights and are rounded away. The weights
    # of an adapter are always float32.
    dtype = "float32" if config.full and config.dtype == "auto" else config.dtype
    loaded = LocalModel.load(
        folder, device=config.device, dtype=dtype, quantize=config.quantize,
        move=not ranks().sharded,
    )  # fmt: skip
    from peft import LoraConfig  # imports bitsandbytes, whose warnings loading has turned off

    torch.manual_seed(config.seed)
    model: Any = loaded.model
    packed = is_quantised(model)
    stored = stored_types(model.config._name_or_path, model.config._commit_hash)
    if packed and config.full:
        raise ModelLoadError(
            f"--full does not work with '{folder}', whose weights are quantised ({packed}).",
            "Typical updates are too small for quantised weights and would be rounded away.",
            "Train an adapter (remove --full), or use the model in bfloat16 or float32.",
        )
    if not packed and next(model.parameters()).dtype == torch.float16:
        model = model.to(torch.bfloat16)  # same size, with the range of float32
    if config.adapter is not None:
        model = load_adapter(model, config.adapter)
        model.set_adapter(ADAPTER)  # loaded frozen
    elif config.full:
        freeze_all_but_language(model)
    else:
        lora = LoraConfig(
            r=config.lora.r, lora_alpha=config.lora.alpha, target_modules=lora_targets(model),
            lora_dropout=0.0, task_type="CAUSAL_LM",
        )  # fmt: skip
        model = _adapted(model, lora, folder, packed)
    return model, loaded.tokenizer, packed or STORED.get("/".join(sorted(stored)), "")


def _adapted(model: Any, lora: Any, folder: Path | str, packed: str) -> Any:
    from peft import get_peft_model

    try:
        return get_peft_model(model, lora, adapter_name=ADAPTER)
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        if not packed:
            raise
        raise ModelLoadError(
            f"PEFT cannot add an adapter to '{folder}', whose weights are quantised ({packed}).",
            f"PEFT reports: {one_line(str(error), 200)}",
            "Use the model in bfloat16 or float32, or in a quantisation that PEFT supports.",
        ) from error
