"""The contenders of TRL, run by a Python that has TRL and prefix-grouper (soulkit is not needed).

The trainer is TRL's own. It does not sample or score: it receives the batch that it would build
after generation (`prompt_ids`, `completion_ids`, their masks, `advantages`, `num_items_in_batch`),
made from the same ids and advantages. Gradient checkpointing is off and the dtype is float32, which
is its fastest setting and the dtype of soulkit. The reference model is off (`beta` 0), the loss is
the token mean (`dapo`), and the clip range is the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from _prefix_grouper import Grouped
from _processes import CLOCKS, Json, serve
from safetensors.torch import save_file

LR = 5e-6
WIDE_OPEN = 1e9


def _trainer(spec: Json, micro: int, accumulate: int, new: int) -> Any:
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    class Given(GRPOTrainer):
        """Trains on a given batch instead of sampling one."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    torch.set_num_threads(spec["threads"])
    base, adapter = Path(spec["folder"]) / "model", Path(spec["folder"]) / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    config = GRPOConfig(
        output_dir=spec["folder"], use_cpu=True, bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=micro, gradient_accumulation_steps=accumulate,
        num_generations=micro * accumulate, max_completion_length=new, temperature=1.0,
        beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, learning_rate=LR,
        max_grad_norm=WIDE_OPEN, weight_decay=0.0, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["abc"]}),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trainer.current_gradient_accumulation_steps = accumulate
    return trainer


class Step:
    """Old log-probs and one optimizer update in micro-batches of `micro` rows."""

    def __init__(self, spec: Json) -> None:
        rows = json.loads(Path(spec["rows"]).read_text())
        self.clock, self.micro = spec["clock"], spec["micro"]
        new = max(len(row["ids"]) - row["trained"][0][0] for row in rows)
        self.trainer = _trainer(spec, self.micro, len(rows) // self.micro, new)
        self.trainer.create_optimizer()
        self.batch = _batch(rows, int(self.trainer._tokenizer.pad_token_id))

    def run(self, request: Json) -> Json:
        clock = CLOCKS[self.clock]
        start = clock()
        old = self._old()
        middle = clock()
        loss = self._update(old)
        end = clock()
        if "gradients" in request:
            named = self.trainer.model.named_parameters()
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            plain = {n.replace(".default.", "."): g for n, g in gradients.items()}
            save_file(plain, request["gradients"])
        return {"old": middle - start, "step": end - middle, "loss": loss}

    @torch.no_grad()
    def _old(self) -> torch.Tensor:
        b = self.batch
        ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
        mask = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
        log_probs = self.trainer._get_per_token_logps_and_entropies(
            self.trainer.model, ids, mask, b["completion_ids"].size(1), batch_size=self.micro
        )
        return log_probs[0]

    def _update(self, old: torch.Tensor) -> float:
        trainer, whole = self.trainer, {**self.batch, "old_per_token_logps": old}
        trainer.optimizer.zero_grad()
        total = 0.0
        count = len(old)
        for start in range(0, count, self.micro):
            inputs = {k: v if v.ndim == 0 else v[start : start + self.micro]
                      for k, v in whole.items()}  # fmt: skip
            total += float(trainer.training_step(trainer.model, inputs, None))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), WIDE_OPEN)
        trainer.optimizer.step()
        return total


def _batch(rows: list[Json], pad: int) -> dict[str, torch.Tensor]:
    """TRL's layout: prompts padded on the left, completions on the right."""
    cuts = [row["trained"][0][0] for row in rows]
    left = max(cuts)
    right = max(len(row["ids"]) - cut for row, cut in zip(rows, cuts, strict=True))
    shape = (len(rows), left + right)
    ids, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    for i, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
        place = slice(left - cut, left - cut + len(row["ids"]))
        ids[i, place], mask[i, place] = torch.tensor(row["ids"]), 1
    return {
        "prompt_ids": ids[:, :left].contiguous(), "prompt_mask": mask[:, :left].contiguous(),
        "completion_ids": ids[:, left:].contiguous(),
        "completion_mask": mask[:, left:].contiguous(),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": mask[:, left:].sum(),
    }  # fmt: skip


class Sample:
    """`samples` replies to one prompt through the trainer's own transformers path."""

    def __init__(self, spec: Json) -> None:
        prompt = json.loads(Path(spec["prompt_file"]).read_text())
        self.samples, self.clock = spec["samples"], spec["clock"]
        self.prompts = [prompt] * self.samples
        self.trainer = _trainer(spec, self.samples, 1, spec["new"])

    def run(self, request: Json) -> Json:
        # `Given` overrides how the trainer prepares inputs; use the base class's method here.
        torch.manual_seed(request["round"])
        clock = CLOCKS[self.clock]
        start = clock()
        completions, _ = self.trainer._generate_single_turn(self.prompts, None, {}, self.samples)
        seconds = clock() - start
        return {"seconds": seconds, "tokens": sum(len(ids) for ids in completions)}


class Versions:
    """The versions of the packages on this side."""

    def __init__(self, spec: Json) -> None:
        self.spec = spec

    def run(self, request: Json) -> Json:
        import peft
        import transformers
        import trl  # type: ignore[import-not-found, unused-ignore]
        from prefix_grouper import __version__  # type: ignore[import-not-found, unused-ignore]

        return {
            "trl": trl.__version__, "prefix-grouper": __version__, "torch": torch.__version__,
            "transformers": transformers.__version__, "peft": peft.__version__,
        }  # fmt: skip


if __name__ == "__main__":
    import datasets  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.grpo_trainer  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

    serve({"step": Step, "sample": Sample, "versions": Versions, "grouped": Grouped})
