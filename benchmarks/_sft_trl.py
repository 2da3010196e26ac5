"""TRL's supervised contenders, run by a Python that has TRL (soulkit is not needed there).

The trainer is TRL's own. It receives token ids and labels, uses its own collator and packing, and
computes its own loss (with the entropy and accuracy that it always logs). Gradient checkpointing is
off and the dtype is float32, which is its fastest setting here and the dtype of soulkit.

Layouts: `padded` (rows of similar length together, which is faster than TRL's random order), `bfd`
(best-fit packing, TRL's default; only positions mark the boundaries) and `wrapped` (one stream of
tokens cut into blocks, which mixes conversations by design).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from _processes import CLOCKS, Json, serve
from _trl_side import Versions
from safetensors.torch import save_file

LR = 1e-5
WIDE_OPEN = 1e9


class SupervisedStep:
    """One optimizer update on the sequences of a file, micro-batch by micro-batch."""

    def __init__(self, spec: Json) -> None:
        from datasets import Dataset
        from trl import (  # type: ignore[import-not-found, unused-ignore]
            SFTConfig,
            SFTTrainer,
            pack_dataset,
        )  # fmt: skip

        torch.set_num_threads(spec["threads"])
        self.clock, layout = spec["clock"], spec["layout"]
        rows = sorted(json.loads(Path(spec["rows"]).read_text()), key=lambda row: len(row["ids"]))
        data = Dataset.from_list([{"input_ids": r["ids"], "labels": _labels(r)} for r in rows])
        packed = layout != "padded"
        if packed:
            data = pack_dataset(data, spec["tokens"], layout)
        config = SFTConfig(
            output_dir=spec["folder"], use_cpu=True, bf16=False, gradient_checkpointing=False,
            per_device_train_batch_size=1, packing=packed, max_length=spec["tokens"],
            packing_strategy=layout if packed else "bfd", learning_rate=LR, weight_decay=0.0,
            dataset_kwargs={"skip_prepare_dataset": True}, max_grad_norm=WIDE_OPEN, report_to=[],
            save_strategy="no",
        )  # fmt: skip
        self.trainer = SFTTrainer(
            model=_model(spec), args=config, train_dataset=data,
            processing_class=_tokenizer(spec),
        )  # fmt: skip
        self.trainer.create_optimizer()
        self.batches = list(_batches(list(data), spec["tokens"], packed))
        self.trained = sum(sum(label != -100 for label in _labels(r)) for r in rows)

    def run(self, request: Json) -> Json:
        clock, trainer = CLOCKS[self.clock], self.trainer
        start = clock()
        trainer.optimizer.zero_grad()
        trainer.current_gradient_accumulation_steps = len(self.batches)
        total, computed = 0.0, 0
        for rows in self.batches:
            inputs = trainer.data_collator(rows)
            computed += inputs["input_ids"].numel()
            count = torch.tensor(self.trained)
            total += float(trainer.training_step(trainer.model, inputs, count))
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), WIDE_OPEN)
        trainer.optimizer.step()
        seconds = clock() - start
        if "gradients" in request:
            named = trainer.model.named_parameters()
            gradients = {n: p.grad for n, p in named if p.grad is not None}
            plain = {n.replace(".default.", "."): g.contiguous() for n, g in gradients.items()}
            save_file(plain, request["gradients"])
        return {"step": seconds, "computed": computed, "loss": total}


def _labels(row: Json) -> list[int]:
    labels = [-100] * len(row["ids"])
    for start, end in row["trained"]:
        labels[start:end] = row["ids"][start:end]
    return labels


def _batches(rows: list[Json], tokens: int, packed: bool) -> Any:
    """Batches of one packed row, or of as many similarly long padded rows as the tokens allow."""
    batch: list[Json] = []
    for row in rows:
        if batch and (packed or (len(batch) + 1) * len(row["input_ids"]) > tokens):
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _model(spec: Json) -> Any:
    from transformers import AutoModelForCausalLM

    folder = Path(spec["folder"])
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if spec["full"]:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True)


def _tokenizer(spec: Json) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(spec["folder"]) / "model")


if __name__ == "__main__":
    import datasets  # noqa: F401 - import once, before forking
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import trl.trainer.sft_trainer  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

    serve({"step": SupervisedStep, "versions": Versions})
