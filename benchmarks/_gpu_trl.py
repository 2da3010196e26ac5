"""The same optimizer update through TRL's trainer, on a model that is already loaded.

The trainer is TRL's own; it receives a ready batch, in micro-batches of padded rows, instead of
sampling one. No reference model (`beta` 0), token mean (`dapo`), the same clip range. Like a
soulkit step with one update, it uses the current log-probs as the old ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

from soulkit.train.objectives.sequences import TrainSequence


def trl_update(
    model: Any, tokenizer: Any, sequences: Sequence[TrainSequence], micro: int, checkpointing: bool
) -> Callable[[], float]:
    """A function that makes one update on `sequences` with prompts and replies of equal length."""
    batch = _batch(sequences, next(model.parameters()).device)
    trainer = _trainer(model, tokenizer, batch, micro, checkpointing)
    trainer.create_optimizer()
    if checkpointing:
        # TRL does this in its training loop, which does not run here.
        again = {"use_reentrant": False}
        model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
    starts = range(0, len(sequences), micro)

    def update() -> float:
        trainer.optimizer.zero_grad()
        total = 0.0
        for start in starts:
            part = {k: v if v.ndim == 0 else v[start : start + micro] for k, v in batch.items()}
            total += float(trainer.training_step(trainer.model, part, None))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        return total

    return update


def _trainer(
    model: Any, tokenizer: Any, batch: dict[str, torch.Tensor], micro: int, checkpointing: bool
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    class Given(GRPOTrainer):
        """Trains on a given batch instead of sampling one."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    count, new = batch["completion_ids"].shape
    on_cpu = batch["prompt_ids"].device.type == "cpu"
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=on_cpu, bf16=not on_cpu,
        gradient_checkpointing=checkpointing, per_device_train_batch_size=micro,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        gradient_accumulation_steps=count // micro, num_generations=count, temperature=1.0,
        max_completion_length=new, beta=0.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
        learning_rate=1e-6, weight_decay=0.0, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["abc"]}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = count // micro
    return trainer


def _batch(sequences: Sequence[TrainSequence], device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.tensor([s.span.ids for s in sequences], device=device)
    prompt = sequences[0].span.trained.index(True)
    ones = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :prompt].contiguous(), "prompt_mask": ones[:, :prompt].contiguous(),
        "completion_ids": ids[:, prompt:].contiguous(),
        "completion_mask": ones[:, prompt:].contiguous(),
        "advantages": torch.tensor([s.advantage for s in sequences], device=device),
        "num_items_in_batch": ones[:, prompt:].sum(),
    }  # fmt: skip
