"""Local models: transformers on this machine, batched, with the same `complete` as every model.

Requests wait in a list. When the model is free, requests that can share a batch run in a worker
thread. With `deterministic`, batches do not depend on timing (batching.py). Every generation has
its own random stream, derived from the call (`uniforms`), so that its result does not depend on its
batch, up to floating-point rounding. `decode.py` contains the decoding loop; models that it does
not support use `generate`. A trainer may wrap the model in training.

`complete_mixed` draws one reply from two contexts, of which the *expert* context contains something
that the *naive* one lacks. Every token is appended to both; a random stream decides which context
draws the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from soulkit.errors import ConfigError, ProviderError
from soulkit.models.base import TrainedWeights
from soulkit.models.codec import Codec, CodecModel, least_limit
from soulkit.models.local import batching
from soulkit.models.local.batching import (
    ExpertPrompt,
    GenerationRequest,
    Queue,
    batches_of,
    current_participant,
    fail,
    loop_barrier,
)
from soulkit.models.local.decode import (
    Decoder,
    Finished,
    Replies,
    Windows,
    decode_batch,
    head_sizes,
    in_row_order,
    left_pad,
    run_decoder,
    windows_of,
)
from soulkit.models.local.decode_check import loop_fault, report_generate
from soulkit.models.local.draw import Draw, uniforms
from soulkit.models.local.float32_head import widen_head
from soulkit.models.local.footprint import free_memory
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.local.loading import (
    adapter_folder,
    adapter_hash,
    load_adapter,
    load_base,
    loading,
    locate,
    pick_device,
)
from soulkit.models.local.quantize import Quantize
from soulkit.types import Call, Completion, Sampling, Segment

log = logging.getLogger(__name__)

SWITCH = "switch"
"""Purpose of the calls whose random numbers decide which context draws."""


def expert_turns(seed: int | None, call: Call, share: float, n: int) -> np.ndarray:
    """For the first `n` tokens of a reply, whether the expert context draws them (bool [n]).

    Each is True with probability `share`, independently.
    """
    return uniforms(seed, replace(call, purpose=f"{call.purpose}{SWITCH}"), n) < share


class MixedDecoder:
    """Two decoders with the same rows; each row's logits come from the context that draws its next
    token."""

    over = False  # its batches have space for the longest replies

    def __init__(
        self,
        model: Any,
        windows: Windows,
        prompts: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        turns: np.ndarray,
        pad: int,
    ) -> None:
        """`prompts`: those of the naive and of the expert context, one per row; `turns`: bool
        [rows, steps], True if the expert draws."""
        most = turns.shape[1]
        self.naive, self.expert = (Decoder(model, windows, p, pad, most) for p in prompts)
        self.turns, self.step = torch.from_numpy(turns).to(self.naive.device), 0

    @property
    def rows(self) -> list[int]:
        return self.naive.rows

    def first(self) -> Tensor:
        """Process both prompts; returns the logits [rows, vocabulary] of each row's first token."""
        return self._choose(self.naive.first(), self.expert.first())

    def next(self, tokens: Tensor) -> Tensor:
        """The logits [rows, vocabulary] after `tokens` [rows], in the order of `rows`."""
        self.step += 1
        ordered = in_row_order(tokens, self.rows, self.expert.rows)
        return self._choose(self.naive.next(tokens), self.expert.next(ordered))

    def keep(self, alive: Sequence[bool]) -> None:
        """Remove the rows that are not `alive` from both."""
        lives = dict(zip(self.rows, alive, strict=True))
        self.expert.keep([lives[row] for row in self.expert.rows])
        self.naive.keep(alive)

    def _choose(self, naive: Tensor, expert: Tensor) -> Tensor:
        by_expert = self.turns[self.rows, self.step]
        expert = in_row_order(expert, self.expert.rows, self.rows)
        return torch.where(by_expert[:, None], expert, naive)


def batch_tokens(model: Any, *, deterministic: bool) -> int:
    """Tokens whose keys and values a batch may hold: BATCH_TOKENS, on a GPU also at most half of
    the free memory. `deterministic`: half of what weights and optimizer leave of the whole card,
    which is the same when a run is resumed."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return batching.BATCH_TOKENS
    weights = list(model.parameters())
    free, whole = torch.cuda.mem_get_info(device)
    if deterministic:
        free = whole - sum(w.nbytes + 12 * w.numel() * w.requires_grad for w in weights)
    else:  # torch keeps freed memory for itself
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    config = model.config.get_text_config()
    _, heads, width = head_sizes(config)
    itemsize = next(w.element_size() for w in weights if w.is_floating_point())
    token = 2 * config.num_hidden_layers * heads * width * itemsize
    return max(1, min(batching.BATCH_TOKENS, free // 2 // token))


_QUIET_TICKS = 3


class LocalModel(CodecModel):
    """A causal language model of transformers on this machine.

    Attributes: `name`; `policy_version`, recorded in completions (hash of the adapter, or of the
    weights passed to `take`); `codec`, which converts between text and ids. `deterministic`:
    batches depend on the participants, not on timing. With a `journal`, every batch is recorded,
    and recorded replies are not sampled again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 64,
        max_context: int | None = None,
        name: str = "local",
        policy_version: str = "",
        deterministic: bool = False,
        journal: Journal | None = None,
    ) -> None:
        """Wrap a loaded model and its tokenizer. ModelLoadError without a chat template."""
        widen_head(model)  # a trainer with the same weights then computes the same log-probs
        self.model, self.tokenizer = model, tokenizer
        self.name, self.policy_version, self.batch_size = name, policy_version, batch_size
        limit = context_limit(model, None)
        codec = Codec(tokenizer, end_ids=_end_ids(model), name=name, context_limit=limit)
        self.codec = codec.limited(max_context)
        self.deterministic, self.journal = deterministic, journal
        self.copies = 1
        """Number of copies of the model that generate a batch together."""
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-model")
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, Queue] = WeakKeyDictionary()
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        adapter: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quantize: Quantize = "none",
        batch_size: int = 64,
        max_context: int | None = None,
        move: bool = True,
    ) -> LocalModel:
        """Load a folder or `owner/name@revision` from the Hub, with a LoRA adapter if given.

        `device` auto: a GPU if there is one; `dtype` auto: float32 on a CPU, else the checkpoint's
        own; `quantize` quantises the base while loading. Without `move`, the weights stay in the
        memory of the host. Only safetensors files are read, and no code from the model's folder is
        run. ModelLoadError names what is missing.
        """
        where = locate(path)
        folder = None if adapter is None else adapter_folder(adapter)  # fails before the download
        place = pick_device(device)
        model, tokenizer = load_base(where, place, dtype, quantize)
        version = ""
        if folder is not None:
            model, version = load_adapter(model, folder), adapter_hash(folder)
        if move:
            model.to(place)
        model.eval()
        label = str(where) if where.on_hub else Path(where.where).name
        with loading(f"model '{where}'"):
            loaded = cls(
                model, tokenizer, batch_size=batch_size, max_context=max_context, name=label,
                policy_version=version,
            )  # fmt: skip
            if move:  # odd numbers in config.json show only now
                ids = loaded.codec.prompt_ids([Segment("user", "Say yes or no.")])
                with torch.no_grad():
                    model(input_ids=torch.tensor([ids], device=next(model.parameters()).device))
        return loaded

    def anew(self) -> LocalModel:
        """A new LocalModel with the same weights, for use after this one is closed."""
        return LocalModel(
            self.model, self.tokenizer, batch_size=self.batch_size, max_context=self.context_limit,
            name=self.name, policy_version=self.policy_version,
        )  # fmt: skip

    async def take(self, weights: TrainedWeights) -> None:
        """Update only the version, since the model in training also samples."""
        self.policy_version = weights.version()

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """Generate one reply, in a batch with other waiting requests.

        The reply has at most `max_tokens` tokens, or as many as the context leaves (`base.py`).
        ContextOverflow if that is too little; ProviderError if the model fails or is closed.
        """
        self._check_open()
        ids = self.codec.prompt_ids(context, sampling.thinking)
        room = self.codec.room(len(ids), sampling.max_tokens)
        # In deterministic mode, whole batches are replayed instead (`_reply`).
        if self.journal is not None and not self.deterministic:
            key = JournalKey(call, sampling, tuple(ids), self.policy_version)
            if (recorded_reply := self.journal.one(key)) is not None:
                return recorded_reply
        return await self._ask(ids, sampling, call, room)

    async def complete_mixed(
        self, context: Sequence[Segment], expert: Sequence[Segment], share: float,
        sampling: Sampling, call: Call,
    ) -> Completion:  # fmt: skip
        """Generate one reply to `context`, with a `share` of its tokens drawn in `expert`.

        `prompt_ids` are those of `context`; each log-prob is from the context that drew the token.
        Such replies are not recorded in the journal. Raises as `complete` does; ConfigError for a
        model that `decode.py` does not support.
        """
        self._check_open()
        if await self._probe() is None:
            raise ConfigError(
                f"'{self.name}' cannot generate from two contexts at once.",
                "Its layers (recurrent states, kernels without masks) have no cache that soulkit "
                "can keep in step for two prompts.",
                "Use a model with attention layers only, or --objective nll.",
            )
        renderer = self.renderer(sampling.thinking)
        ids, expert_ids = renderer.prompt_ids(context), renderer.prompt_ids(expert)
        room = self.codec.room(max(len(ids), len(expert_ids)), sampling.max_tokens)
        return await self._ask(ids, sampling, call, room, ExpertPrompt(expert_ids, share))

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in the worker thread, after the running batch."""
        self._worker.submit(work)

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError(f"The local model '{self.name}' has been closed.")

    async def _ask(
        self, ids: list[int], sampling: Sampling, call: Call, room: int,
        expert: ExpertPrompt | None = None,
    ) -> Completion:  # fmt: skip
        self._check_open()
        loop = asyncio.get_running_loop()
        dropped = self.codec.dropped(sampling)
        participant = current_participant() if self.deterministic else None
        request = GenerationRequest(
            ids, sampling, call, dropped, loop.create_future(), room, participant, expert
        )
        queue = self._queue(loop)
        queue.waiting.append(request)
        queue.wake()
        if queue.task is None or queue.task.done():
            queue.task = loop.create_task(self._dispatch(queue))
        return await request.future

    async def _probe(self) -> Windows | None:
        """`windows`, computed in the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: self.windows)

    def _queue(self, loop: asyncio.AbstractEventLoop) -> Queue:
        if loop not in self._queues:
            self._queues[loop] = Queue(loop_barrier() if self.deterministic else None)
            if self.deterministic:
                loop_barrier().queues.add(self._queues[loop])
        return self._queues[loop]

    async def close(self) -> None:
        """Reject further and waiting requests. The running batch continues unless nobody waits for
        it."""
        self._closed = True
        for queue in list(self._queues.values()):
            for request in [*queue.waiting, *queue.wave]:
                fail(request, RuntimeError("the model was closed"))
            queue.waiting.clear()
            queue.wave.clear()
            queue.wake()
        self._worker.shutdown(wait=False)

    async def _dispatch(self, queue: Queue) -> None:
        try:
            await self._probe()  # batches depend on it
        except Exception as error:  # noqa: BLE001 - each caller gets it as a ProviderError
            for request in queue.waiting:
                fail(request, error)
        while queue.drop_cancelled():
            queue.changed.clear()
            await self._settle(queue)
            if batch := self._take(queue):
                await self._serve(queue, batch)
            elif queue.drop_cancelled():
                await queue.changed.wait()

    async def _settle(self, queue: Queue) -> None:
        """Let every coroutine that is ready add its request, so that they share a batch."""
        quiet, seen = 0, len(queue.waiting)
        while quiet < _QUIET_TICKS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(queue.waiting) == seen else 0
            seen = len(queue.waiting)

    def _take(self, queue: Queue) -> list[GenerationRequest]:
        """Remove and return the batch with the oldest request; empty if none is ready."""
        queue.drop_cancelled()
        pool = queue.pool()
        if not pool:
            return []
        # In a wave the order of arrival depends on timing and must not decide.
        oldest = pool[0] if queue.barrier is None else min(pool, key=lambda r: (r.group, r.order))
        peers = sorted((r for r in pool if r.group == oldest.group), key=lambda r: r.order)
        # `generate` cannot set long rows aside, so there the limit of a reply counts.
        expected = math.inf if self.windows is None else batching.EXPECTED
        tokens = batch_tokens(self.model, deterministic=self.deterministic)
        rows, tokens = self.batch_size * self.copies, tokens * self.copies
        batches = batches_of(peers, rows, tokens, expected)
        batch = next(b for b in batches if oldest in b)
        queue.remove(batch)
        return batch

    async def _serve(self, queue: Queue, batch: list[GenerationRequest]) -> None:
        loop = asyncio.get_running_loop()
        queue.serving = batch
        try:
            replies = await loop.run_in_executor(self._worker, self._reply, batch)
        except asyncio.CancelledError:
            for request in batch:
                request.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it as a ProviderError
            for request in batch:
                fail(request, error)
        else:
            for request, reply in zip(batch, replies, strict=True):
                if not request.future.done():
                    request.future.set_result(reply)
        finally:
            queue.serving = []
            if queue.barrier is not None:
                queue.barrier.wake()

    def _reply(self, batch: list[GenerationRequest]) -> list[Completion]:
        """Replay a recorded batch, or run and record it. Runs in the worker thread."""
        version = self.policy_version
        if self.journal is None or batch[0].expert is not None:
            return self._generate(batch, version)
        keys = [JournalKey(r.call, r.sampling, tuple(r.ids), version) for r in batch]
        replies = self.journal.batch(keys)
        if replies is None:
            replies = self._generate(batch, version)
            self.journal.write(keys, replies)
        return replies

    def _generate(self, batch: list[GenerationRequest], version: str) -> list[Completion]:
        """Generate the replies; if memory runs out, each half by itself."""
        try:
            return self._generate_once(batch, version)
        except torch.OutOfMemoryError as error:
            if self.deterministic or len(batch) == 1:  # other batches would give other bits
                line = str(error).partition(". ")[0]
                advice = "Lower --batch-size, --max-tokens or --max-context."
                raise torch.OutOfMemoryError(f"{line}. {advice}") from error
        free_memory()  # after the `except`, whose error still refers to the batch
        half = len(batch) // 2
        log.warning("%s: no memory for %d replies at once; trying %d. To avoid this, lower "
                    "--batch-size.", self.name, len(batch), half)  # fmt: skip
        return [*self._generate(batch[:half], version), *self._generate(batch[half:], version)]

    def _generate_once(self, batch: list[GenerationRequest], version: str) -> list[Completion]:
        start = time.perf_counter()
        device = next(self.model.parameters()).device
        draw = self._draw(batch, device)
        training = self.model.training
        self.model.eval()
        try:
            if self.windows is None:
                rows, notes = self._run_generate(batch, draw, device)
            else:
                replies = self._run_loop(batch, draw, self.windows)
                rows, notes = replies.ids, replies.logprobs
        finally:
            if training:
                self.model.train()
        share = (time.perf_counter() - start) / len(batch)
        return [
            self.codec.completion(
                request.ids, row, note, room=request.room, stop=request.sampling.stop,
                seconds=share, policy=version, dropped=request.dropped,
                prompt_tokens=len(request.ids) + len(request.expert.ids if request.expert else ()),
            )
            for request, row, note in zip(batch, rows, notes, strict=True)
        ]  # fmt: skip

    def _run_loop(self, batch: list[GenerationRequest], draw: Draw, windows: Windows) -> Replies:
        prompts, ended, pad = [r.ids for r in batch], self._end_rule(batch), self.codec.pad
        experts = [r.expert for r in batch if r.expert is not None]
        if not experts:
            limit = batch_tokens(self.model, deterministic=self.deterministic)
            return decode_batch(self.model, windows, prompts, draw, ended, pad, limit)
        turns = [
            expert_turns(r.sampling.seed, r.call, e.share, draw.uniform.shape[1])
            for r, e in zip(batch, experts, strict=True)
        ]
        both, replies = (prompts, [e.ids for e in experts]), Replies(len(batch))
        decoder = MixedDecoder(self.model, windows, both, np.stack(turns), pad)
        run_decoder(decoder, range(len(batch)), replies, draw, ended)
        return replies

    @cached_property
    def windows(self) -> Windows | None:
        """The model's attention windows, probed before the first batch; None: use `generate`."""
        windows, fault = windows_of(self.model), "it has recurrent layers or virtual tokens"
        training = self.model.training
        self.model.eval()
        try:
            if windows is not None and not (fault := loop_fault(self.model, windows)):
                return windows
        finally:
            self.model.train(training)
        report_generate(self.name, fault)
        return None

    def _end_rule(self, batch: list[GenerationRequest]) -> Finished:
        def ended(row: int, ids: list[int]) -> bool:
            self._give_up(batch)
            request = batch[row]
            over = len(ids) >= request.room or ids[-1] in self.codec.end_ids
            return over or self.codec.hits_stop(ids, request.sampling.stop)

        return ended

    def _give_up(self, batch: list[GenerationRequest]) -> None:
        """Stop a batch that nobody waits for in a closed model, so that the process can exit."""
        if self._closed and all(request.future.done() for request in batch):
            raise RuntimeError("the model was closed")

    @torch.inference_mode()
    def _run_generate(
        self, batch: list[GenerationRequest], draw: Draw, device: torch.device
    ) -> tuple[list[list[int]], list[list[float]]]:
        ids, mask = left_pad([r.ids for r in batch], self.codec.pad, device)

        def unless_closed(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self._give_up(batch)
            return scores

        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=self.greedy_config(max(r.room for r in batch)),
            logits_processor=[unless_closed, draw],
        )
        return out[:, ids.shape[1] :].tolist(), draw.logprobs().tolist()

    def _draw(self, batch: list[GenerationRequest], device: torch.device) -> Draw:
        s = batch[0].sampling
        most = max(r.room for r in batch)
        streams = np.stack([uniforms(r.sampling.seed, r.call, most) for r in batch])
        wide = torch.float32 if device.type == "mps" else torch.float64
        return Draw(torch.from_numpy(streams).to(wide).to(device), s)

    def greedy_config(self, max_tokens: int) -> Any:
        """Settings of `generate` for replies of at most `max_tokens` tokens."""
        from transformers import GenerationConfig

        # All values are set explicitly: missing ones come from the model's generation_config, and
        # a repetition penalty there would change what is sampled.
        return GenerationConfig(
            max_new_tokens=max_tokens,
            min_new_tokens=0,
            do_sample=False,
            num_beams=1,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            use_cache=True,
            eos_token_id=sorted(self.codec.end_ids) or None,
            pad_token_id=self.codec.pad,
        )


def _end_ids(model: Any) -> list[int | None]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    return ids if isinstance(ids, list) else [ids]


def context_limit(model: Any, max_context: int | None) -> int | None:
    config = model.config.get_text_config()
    return least_limit(max_context, getattr(config, "max_position_embeddings", None))
