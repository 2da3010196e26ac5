"""The contender of prefix-grouper (MIT), run by a Python that has it.

The package computes the prompt of a group once and pads the replies. It has no trainer, so this is
the step that its manual describes: prompts and replies joined, its attention around PyTorch's SDPA
(the causal kernel where nothing is padded), output split, GRPO loss. Log-probs are computed at
replies only. Rows are sorted by the length of their prompt, so that few are padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _processes import CLOCKS, Json
from prefix_grouper import PrefixGrouper  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import save_file
from torch import Tensor

LR = 5e-6
NAME = "prefix_grouper_sdpa"


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float,
    prefix_grouper: Any = None, masks: Any = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        whole = masks[q.shape[2] == k.shape[2]]
        how = {"is_causal": True} if whole is None else {"attn_mask": whole}
        out = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True, **how)
        return out.transpose(1, 2)

    return prefix_grouper.forward(attend, q, k, v), None


def _mask(seen: Tensor, queries: int) -> Tensor | None:
    """bool [rows, 1, queries, keys] for the last `queries` of the keys; None: plainly causal."""
    if queries == seen.shape[1] and bool(seen.all()):
        return None
    keys = seen.shape[1]
    place = torch.arange(keys)
    causal = place[None] <= place[keys - queries :, None]
    itself = place[None] == place[keys - queries :, None]  # a padded query sees at least itself
    return ((causal & seen[:, None]) | itself)[:, None]


class Batch:
    """Some rows, in the layout of the package."""

    def __init__(self, rows: list[Json]) -> None:
        groups = [list(g) for _, g in groupby(rows, key=_prompt)]
        prompts = [_prompt(group[0]) for group in groups]
        replies = [row["ids"][row["trained"][0][0] :] for row in rows]
        (prefix, there), (self.suffix, kept) = _padded(prompts), _padded(replies)
        self.grouper = PrefixGrouper.from_ungrouped_masks(there, kept, [len(g) for g in groups])
        self.ids = self.grouper.concat_input(prefix, there, self.suffix, kept)
        self.positions = torch.zeros_like(self.ids)
        for place, info in zip(self.positions, self.grouper.group_info, strict=True):
            begin = info.prefix_len
            runs = [
                torch.arange(begin),
                *(torch.arange(begin, begin + n) for n in info.suffix_lens),
            ]
            flat = torch.cat(runs)
            place[: len(flat)] = flat
        prompt, reply = self.grouper.prefix_attn_mask, self.grouper.suffix_attn_mask
        self.masks = {
            True: _mask(prompt, prompt.shape[1]), False: _mask(reply, self.suffix.shape[1]),
        }  # fmt: skip
        self.advantages = torch.tensor([row["advantage"] for row in rows])[:, None]

    def log_probs(self, model: Any) -> tuple[Tensor, Tensor]:
        """Log-probs of the replies and their mask, both [rows, longest reply]."""
        causal = model.get_base_model()
        any_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # passed on, and not used
        states = causal.model(
            input_ids=self.ids, position_ids=self.positions, attention_mask=any_mask,
            use_cache=False, prefix_grouper=self.grouper, masks=self.masks,
        )[0]  # fmt: skip
        _, _, out, mask = self.grouper.split_output(states, include_prefix_last=1)
        logits = causal.lm_head(out[:, :-1])
        picked = logits.gather(-1, self.suffix.unsqueeze(-1)).squeeze(-1)
        return picked - logits.logsumexp(-1), mask[:, 1:]


def _prompt(row: Json) -> list[int]:
    prompt: list[int] = row["ids"][: row["trained"][0][0]]
    return prompt


def _padded(parts: list[list[int]]) -> tuple[Tensor, Tensor]:
    tensors = [torch.tensor(ids) for ids in parts]
    mask = [torch.ones(len(ids), dtype=torch.bool) for ids in parts]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tensors, batch_first=True), pad(mask, batch_first=True)


class Grouped:
    """Old log-probs and one optimizer update, `micro` replies at once."""

    def __init__(self, spec: Json) -> None:
        from peft import PeftModel
        from transformers import AttentionInterface, AutoModelForCausalLM

        torch.set_num_threads(spec["threads"])
        AttentionInterface.register(NAME, _attention)
        base, adapter = Path(spec["folder"]) / "model", Path(spec["folder"]) / "adapter"
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation=NAME
        )
        self.model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
        self.clock, self.micro = CLOCKS[spec["clock"]], spec["micro"]
        rows = json.loads(Path(spec["rows"]).read_text())
        self.rows = sorted(rows, key=lambda row: (row["trained"][0][0], row["ids"]))
        self.count = sum(len(row["ids"]) - row["trained"][0][0] for row in rows)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)

    def _batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.rows), self.micro):
            yield Batch(self.rows[start : start + self.micro])

    def run(self, request: Json) -> Json:
        start = self.clock()
        with torch.no_grad():
            old = [batch.log_probs(self.model)[0] for batch in self._batches()]
        middle = self.clock()
        loss = self._update(old)
        end = self.clock()
        if "gradients" in request:
            named = self.model.named_parameters()
            gradients = {n.replace(".default.", "."): p.grad for n, p in named if p.requires_grad}
            save_file(gradients, request["gradients"])
        return {"old": middle - start, "step": end - middle, "loss": loss}

    def _update(self, old: list[Tensor]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for batch, before in zip(self._batches(), old, strict=True):
            now, mask = batch.log_probs(self.model)
            ratio = (now - before).exp()
            gains = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.28) * batch.advantages)
            loss = -(gains * mask).sum() / self.count
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total
