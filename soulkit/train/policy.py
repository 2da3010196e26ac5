"""The model that is trained: a frozen base with a LoRA adapter, and the log-probs it gives.

Log-probs are of logits / T in float32, at trained positions only: the hidden states are gathered
first, so the vocabulary is never spread over prompts. A probe at load compares that with the
model's own forward pass and falls back to it where they differ (logit scaling, soft caps).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soulkit.models.loading import ADAPTER, load_adapter
from soulkit.models.local import LocalModel
from soulkit.models.render import Renderer
from soulkit.train.config import TrainConfig
from soulkit.train.sequences import Span


@dataclass(frozen=True, slots=True)
class Scored:
    """Flat over the trained tokens of a batch, sequence after sequence. All [n_trained]."""

    log_prob: Tensor
    entropy: Tensor
    """In nats, detached unless asked for."""
    owner: Tensor
    """Index of the token's sequence in the batch."""


class Policy:
    """Model, tokenizer and renderer of one training run; `sampler` is the same weights."""

    def __init__(self, model: Any, tokenizer: Any, temperature: float = 1.0) -> None:
        self.model = model.eval()  # dropout is 0; eval mode keeps every forward the same function
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.renderer = Renderer(tokenizer)
        self.pad_id = int(tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
        self.gathers = self._gather_agrees()

    @property
    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Named parameters with a gradient."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def version(self) -> str:
        """First 16 hex digits of the SHA-256 of the trained weights: rollouts carry it."""
        digest = hashlib.sha256()
        for name, parameter in self.trained:
            digest.update(name.encode())
            flat = parameter.detach().cpu().contiguous().view(torch.uint8)
            digest.update(flat.numpy().tobytes())
        return digest.hexdigest()[:16]

    @contextmanager
    def base(self) -> Iterator[None]:
        """Within it the adapter is off: the frozen base, without a second copy."""
        with self.model.disable_adapter():
            yield

    def score(self, batch: Sequence[Span], *, entropy: bool = False) -> Scored:
        """Log-probs (and entropies) of every trained token of `batch`.

        Equal sequences (eight drafts of one word, say) are computed once; their gradients add up.
        """
        place: dict[object, int] = {}
        rows = [place.setdefault(span.key, len(place)) for span in batch]
        unique = [batch[rows.index(row)] for row in range(len(place))]
        return expand(self._score(unique, entropy), rows)

    def _score(self, batch: Sequence[Span], entropy: bool) -> Scored:
        ids, mask, rows, positions, targets = self._lay_out(batch)
        logits = self._logits(ids, mask, rows, positions).float() / self.temperature
        norm = torch.logsumexp(logits, -1)
        chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy and torch.is_grad_enabled()):
            spread = norm - (torch.softmax(logits, -1) * logits).sum(-1)
        return Scored(chosen - norm, spread, rows)

    def _lay_out(self, batch: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Right-padded ids and mask [batch, length]; row, parent position, id of each token."""
        length = max(len(span.ids) for span in batch)
        ids = torch.full((len(batch), length), self.pad_id)
        mask = torch.zeros((len(batch), length), dtype=torch.long)
        rows, positions, targets = [], [], []
        for row, span in enumerate(batch):
            ids[row, : len(span.ids)] = torch.tensor(span.ids)
            mask[row, : len(span.ids)] = 1
            for position, trained in enumerate(span.trained):
                if trained:
                    rows.append(row)
                    positions.append(position - 1)
                    targets.append(span.ids[position])
        flat = [torch.tensor(x, dtype=torch.long) for x in (rows, positions, targets)]
        return tuple(t.to(self.device) for t in (ids, mask, *flat))

    def _logits(self, ids: Tensor, mask: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Logits [n_trained, vocabulary] at the parents of the trained tokens."""
        if not self.gathers:
            out = self.model(input_ids=ids, attention_mask=mask, use_cache=False)
            return out.logits[rows, positions]
        causal = _causal(self.model)
        hidden = causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        return causal.get_output_embeddings()(hidden[rows, positions])

    @torch.no_grad()
    def _gather_agrees(self) -> bool:
        ids = torch.arange(4, device=self.device)[None] % self.model.config.vocab_size
        rows, positions = torch.zeros(2, dtype=torch.long), torch.tensor([1, 3])
        full = self.model(input_ids=ids, use_cache=False).logits[rows, positions]
        self.gathers = True
        try:
            short = self._logits(ids, torch.ones_like(ids), rows, positions)
        except (AttributeError, TypeError):
            return False
        return torch.allclose(full, short, rtol=1e-3, atol=1e-4)

    def encode_reply(self, text: str) -> list[int]:
        """Ids of a scripted reply with the end-of-turn token."""
        end = self.renderer.end_of_turn
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.tokenizer.eos_token_id if end is None else end]

    def sampler(self, batch_size: int) -> LocalModel:
        """A ChatModel over the very weights that are trained."""
        return LocalModel(self.model, self.tokenizer, batch_size=batch_size)

    def save(self, folder: Path) -> None:
        """The adapter (or all weights, when they are what is trained) as a Hugging Face folder."""
        if _is_peft(self.model):
            _save_adapter(self.model, folder)
        else:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def _save_adapter(model: Any, folder: Path) -> None:
    """Adapter files in `folder` itself: PEFT would put a named adapter into a folder below it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # Linear layers alone are adapted; asking PEFT to find out would look the base up on the hub.
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {name: t.detach().cpu().contiguous() for name, t in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[ADAPTER].save_pretrained(folder)


def expand(scored: Scored, rows: Sequence[int]) -> Scored:
    """The scored rows `rows`, one after the other; a row may come more than once."""
    counts = torch.bincount(scored.owner, minlength=max(rows) + 1)
    ends = torch.cumsum(counts, 0).tolist()
    spans = [torch.arange(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]
    index = torch.cat([spans[row] for row in rows]).to(scored.owner.device)
    lengths = torch.tensor([len(spans[row]) for row in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), lengths).to(scored.owner.device)
    return Scored(scored.log_prob[index], scored.entropy[index], owner)


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _causal(model: Any) -> Any:
    return model.get_base_model() if _is_peft(model) else model


def load_policy(config: TrainConfig, folder: Path | str) -> Policy:
    """The base model of `folder` with a new adapter, the given one, or all weights (`full`)."""
    from peft import LoraConfig, get_peft_model

    loaded = LocalModel.load(folder, device=config.device, dtype=config.dtype)
    torch.manual_seed(config.seed)
    model: Any = loaded.model
    if config.adapter is not None:
        model = load_adapter(model, Path(config.adapter))
        model.set_adapter(ADAPTER)  # loaded frozen
    elif not config.full:
        lora = LoraConfig(
            r=config.lora.r,
            lora_alpha=config.lora.alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora, adapter_name=ADAPTER)
    return Policy(model, loaded.tokenizer, config.temperature)
