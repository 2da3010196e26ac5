"""Local models: transformers on this machine, batched behind the same `complete` as every model.

Requests wait in a list. When the model is free, the dispatcher takes those that can share one call
of `generate` (same sampling but for the seed), sorts them by their keys and runs them in a worker
thread, one batch at a time. So a wave of coroutines becomes a few batches without anyone counting.

Every generation draws from a random stream of its own, keyed by who asks (`uniforms`), through a
logits processor; `generate` itself runs greedily. A result therefore does not depend on the batch
it ran in, up to the rounding of the model's arithmetic. No tensor over steps x batch x vocabulary
is kept: the processor notes one log-prob per drawn token.

A trainer may wrap the model that it trains (`LocalModel(model, tokenizer)`) and set
`policy_version` after each step; between batches nothing of the sampler touches the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.loading import adapter_hash, load_adapter, load_base, locate, pick_device
from soulkit.models.render import (
    END_OF_THINKING,
    Renderer,
    SpliceReport,
    first_true,
    splice_report,
)
from soulkit.types import Call, Completion, Sampling, Segment, Usage

BATCH_TOKENS = 262_144
"""Rows x (longest prompt + max_tokens) of one batch; fewer rows run when they are long."""

START_OF_THINKING = "<think>"
_QUIET_TICKS = 3


def uniforms(seed: int | None, call: Call, n: int) -> np.ndarray:
    """The first `n` numbers in [0, 1) of the stream of one generation (float64).

    Equal seeds and calls give equal numbers on every machine; None is a seed like any other.
    """
    parts = (seed, call.role, call.example_id, call.rollout, call.kind, call.turn, call.sample)
    digest = hashlib.sha256("\x1f".join(map(str, (*parts, call.step))).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16]))).random(n)


class Draw:
    """A logits processor that draws each row's next token with that row's next uniform number.

    `logprobs` are those of logits / temperature in float32, before `top_p` cuts anything, and at
    temperature 0 (the likeliest token) those of the plain logits.
    """

    def __init__(self, uniform: torch.Tensor, temperature: float, top_p: float) -> None:
        """`uniform` is float64 [rows, steps]."""
        self.uniform, self.temperature, self.top_p = uniform, temperature, top_p
        self.noted: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` [rows, vocabulary] → the same shape, with only the drawn token finite."""
        logits = scores.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        logits = torch.log_softmax(logits, dim=-1)
        drawn = self._draw(logits) if self.temperature > 0 else logits.argmax(-1, keepdim=True)
        self.noted.append(logits.gather(1, drawn).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)

    def logprobs(self) -> torch.Tensor:
        """float32 [rows, steps], on the CPU."""
        return torch.stack(self.noted, dim=1).cpu()

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        # `generate` may run a step past the end before it notices that all rows have ended.
        step = min(len(self.noted), self.uniform.shape[1] - 1)
        order = None
        probs = logprobs.to(self.uniform.dtype).exp()
        if self.top_p < 1:
            probs, order = probs.sort(dim=-1, descending=True, stable=True)
            probs = probs * (probs.cumsum(-1) - probs < self.top_p)
        cdf = probs.cumsum(-1)
        at = torch.searchsorted(cdf, self.uniform[:, step, None] * cdf[:, -1:], right=True)
        at = at.clamp_max(cdf.shape[1] - 1)
        return at if order is None else order.gather(1, at)


@dataclass(slots=True, eq=False)
class _Request:
    ids: list[int]
    sampling: Sampling
    call: Call
    dropped: tuple[str, ...]
    future: asyncio.Future[Completion]

    @property
    def group(self) -> tuple[float, float, int]:
        """Requests of one group can share a batch: seeds, stops and thinking may differ."""
        return self.sampling.temperature, self.sampling.top_p, self.sampling.max_tokens

    @property
    def order(self) -> tuple[int | str, ...]:
        # Similar lengths first, to waste little on padding; then the key, so that equal sets of
        # requests make equal batches in whatever order they came.
        c = self.call
        who = (c.step, c.example_id, c.rollout, c.kind, c.turn, c.sample, c.role)
        return (len(self.ids).bit_length(), *who)


@dataclass(slots=True)
class _Queue:
    """What waits in one event loop, and the task that serves it while anything does."""

    waiting: list[_Request] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class LocalModel:
    """A causal language model of transformers, on this machine.

    Attributes: `name`; `policy_version`, stamped on completions (the hash of the adapter, settable
    by a trainer); `context_limit` in tokens (None: not known); `splice`, what the template does to
    a conversation.
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
    ) -> None:
        """Wraps a loaded model and its tokenizer. ModelLoadError without a chat template."""
        self.model, self.tokenizer = model, tokenizer
        self.name, self.policy_version, self.batch_size = name, policy_version, batch_size
        self.context_limit = _context_limit(model, max_context)
        self._renderer = lru_cache(maxsize=None)(lambda thinking: Renderer(tokenizer, thinking))
        self.splice: SpliceReport = splice_report(self.renderer())
        self.end_ids = _end_ids(model, tokenizer, self.renderer())
        self._pad = _pad_id(tokenizer, self.end_ids)
        self._shares = _can_share_prefill(model)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-model")
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        adapter: Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 64,
        max_context: int | None = None,
        name: str | None = None,
    ) -> LocalModel:
        """Loads a folder or a hub id, with a LoRA adapter when one is named.

        `device` auto is a GPU when there is one; `dtype` auto is float32 on a CPU and the
        checkpoint's own elsewhere. Only safetensors are read, and no code of the model's folder is
        run. Raises ModelLoadError, which names what is missing.
        """
        where = locate(path)
        place = pick_device(device)
        model, tokenizer = load_base(where, place, dtype)
        version = ""
        if adapter is not None:
            model, version = load_adapter(model, Path(adapter)), adapter_hash(Path(adapter))
        model.to(place).eval()
        label = name or (Path(where).name if Path(where).is_dir() else where)
        return cls(
            model,
            tokenizer,
            batch_size=batch_size,
            max_context=max_context,
            name=label,
            policy_version=version,
        )

    def renderer(self, thinking: bool | None = None) -> Renderer:
        """The renderer that prompts this model, for one value of `Sampling.thinking`."""
        return self._renderer(thinking)

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Tokens of the prompt that `context` becomes."""
        return len(self.renderer(thinking).prompt_ids(context))

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """One reply, in a batch with whatever else waits.

        Raises ContextOverflow when prompt and `max_tokens` do not fit, ProviderError when the model
        fails or is closed.
        """
        if self._closed:
            raise ProviderError(f"The local model '{self.name}' has been closed.")
        ids = self.renderer(sampling.thinking).prompt_ids(context)
        self._check_fits(len(ids), sampling.max_tokens)
        loop = asyncio.get_running_loop()
        dropped = self._dropped(sampling)
        request = _Request(ids, sampling, call, dropped, loop.create_future())
        queue = self._queues.setdefault(loop, _Queue())
        queue.waiting.append(request)
        if queue.task is None or queue.task.done():
            queue.task = loop.create_task(self._dispatch(queue))
        return await request.future

    async def close(self) -> None:
        """Refuses further calls and lets the running batch end; waiting requests are refused."""
        self._closed = True
        for queue in list(self._queues.values()):
            for request in queue.waiting:
                _fail(request, RuntimeError("the model was closed"))
            queue.waiting.clear()
        self._worker.shutdown(wait=False)

    def _check_fits(self, prompt: int, reply: int) -> None:
        if self.context_limit is not None and prompt + reply > self.context_limit:
            raise ContextOverflow(
                f"The prompt has {prompt} tokens and the reply may have {reply}; "
                f"'{self.name}' holds {self.context_limit}."
            )

    def _dropped(self, sampling: Sampling) -> tuple[str, ...]:
        unread = sampling.thinking is not None and not self.renderer().reads_thinking
        effort = ("reasoning_effort",) if sampling.reasoning_effort else ()
        return (*effort, *(("thinking",) if unread else ()))

    async def _dispatch(self, queue: _Queue) -> None:
        while queue.waiting:
            await self._settle(queue)
            if batch := self._take(queue):
                await self._serve(batch)

    async def _settle(self, queue: _Queue) -> None:
        """Lets every coroutine that is ready to ask do so, so that a wave is one set of batches."""
        quiet, seen = 0, len(queue.waiting)
        while quiet < _QUIET_TICKS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(queue.waiting) == seen else 0
            seen = len(queue.waiting)

    def _take(self, queue: _Queue) -> list[_Request]:
        """Removes and returns the batch of whoever has waited longest."""
        queue.waiting = [r for r in queue.waiting if not r.future.done()]
        if not queue.waiting:
            return []
        oldest = queue.waiting[0]
        peers = sorted((r for r in queue.waiting if r.group == oldest.group), key=lambda r: r.order)
        batch = next(b for b in _batches(peers, self.batch_size) if oldest in b)
        taken = {id(r) for r in batch}
        queue.waiting = [r for r in queue.waiting if id(r) not in taken]
        return batch

    async def _serve(self, batch: list[_Request]) -> None:
        loop = asyncio.get_running_loop()
        try:
            replies = await loop.run_in_executor(self._worker, self._generate, batch)
        except asyncio.CancelledError:
            for request in batch:
                request.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it as a ProviderError
            for request in batch:
                _fail(request, error)
            return
        for request, reply in zip(batch, replies, strict=True):
            if not request.future.done():
                request.future.set_result(reply)

    def _generate(self, batch: list[_Request]) -> list[Completion]:
        """Runs one batch; called in the worker thread."""
        start, version = time.perf_counter(), self.policy_version
        device = next(self.model.parameters()).device
        ids, mask = _left_pad([r.ids for r in batch], self._pad, device)
        draw = self._draw(batch, device)
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                cache = self._shared_prefill(batch, device) if self._shares else None
                out = self.model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    past_key_values=cache,
                    generation_config=self._config(batch[0].sampling.max_tokens),
                    logits_processor=[draw],
                )
        finally:
            if training:
                self.model.train()
        rows, notes = out[:, ids.shape[1] :].tolist(), draw.logprobs().tolist()
        share = (time.perf_counter() - start) / len(batch)
        return [
            self._completion(*row, share, version) for row in zip(batch, rows, notes, strict=True)
        ]

    def _shared_prefill(self, batch: list[_Request], device: torch.device) -> Any:
        """The cache of all prompts but their last tokens, with equal prompts computed once.

        None when no prompt occurs twice.
        """
        prompts = list(dict.fromkeys(tuple(r.ids) for r in batch))
        if len(prompts) == len(batch) or min(map(len, prompts)) < 2:
            return None
        ids, mask = _left_pad([list(p[:-1]) for p in prompts], self._pad, device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        decoder = self.model.get_decoder()
        cache = decoder(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True
        ).past_key_values
        place = {p: i for i, p in enumerate(prompts)}
        rows = [place[tuple(r.ids)] for r in batch]
        cache.batch_select_indices(torch.tensor(rows, device=device))
        return cache

    def _draw(self, batch: list[_Request], device: torch.device) -> Draw:
        s = batch[0].sampling
        streams = np.stack([uniforms(r.sampling.seed, r.call, s.max_tokens) for r in batch])
        wide = torch.float32 if device.type == "mps" else torch.float64
        return Draw(torch.from_numpy(streams).to(wide).to(device), s.temperature, s.top_p)

    def _config(self, max_tokens: int) -> Any:
        from transformers import GenerationConfig

        # Neutral values stand here by name: what is left out comes from the model's own
        # generation_config, and a repetition penalty would change what is sampled.
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
            eos_token_id=sorted(self.end_ids) or None,
            pad_token_id=self._pad,
        )

    def _completion(
        self,
        request: _Request,
        row: list[int],
        notes: list[float],
        seconds: float,
        version: str,
    ) -> Completion:
        end = next((i + 1 for i, t in enumerate(row) if t in self.end_ids), None)
        ids = row[:end]
        ids, text, cut = self._cut_at_stops(ids, request.sampling.stop)
        reasoning, text = _split_thinking(text, self._thinking_open(request.ids))
        usage = Usage(
            calls=1,
            prompt_tokens=len(request.ids),
            completion_tokens=len(ids),
            seconds=seconds,
        )
        return Completion(
            text=text,
            prompt_ids=tuple(request.ids),
            token_ids=tuple(ids),
            logprobs=tuple(notes[: len(ids)]),
            stop_reason="stop" if cut or end is not None else "length",
            reasoning=reasoning,
            usage=usage,
            dropped=request.dropped,
            policy=version,
        )

    def _cut_at_stops(self, ids: list[int], stops: tuple[str, ...]) -> tuple[list[int], str, bool]:
        """Ids up to the token that completes the first stop string, and the text before it."""
        text = self._text(ids)
        if not any(s in text for s in stops if s):
            return ids, text, False
        end = first_true(len(ids), lambda k: any(s in self._text(ids[:k]) for s in stops if s))
        text = self._text(ids[:end])
        return ids[:end], text[: min(text.find(s) for s in stops if s and s in text)], True

    def _text(self, ids: list[int]) -> str:
        # Only what ends a turn is left out: tags such as <answer> may be special tokens as well.
        kept = [i for i in ids if i not in self.end_ids and i != self._pad]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def _thinking_open(self, prompt: list[int]) -> bool:
        """Whether the prompt itself ends inside the thinking, as some templates write it."""
        tail = str(self.tokenizer.decode(prompt[-4:], skip_special_tokens=False)).rstrip()
        return tail.endswith(START_OF_THINKING)


def _split_thinking(text: str, is_open: bool) -> tuple[str, str]:
    """(reasoning, what is said). Thinking that never ends says nothing."""
    thought, closed, said = text.rpartition(END_OF_THINKING)
    if closed:
        return thought.strip().removeprefix(START_OF_THINKING).strip(), said.lstrip()
    if is_open or text.lstrip().startswith(START_OF_THINKING):
        return text.strip().removeprefix(START_OF_THINKING).strip(), ""
    return "", text


def _fail(request: _Request, error: Exception) -> None:
    if not request.future.done():
        wrapped = ProviderError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        request.future.set_exception(wrapped)


def _batches(requests: list[_Request], most: int) -> list[list[_Request]]:
    """Cuts into runs of at most `most` rows and BATCH_TOKENS tokens (one row always fits)."""
    batches: list[list[_Request]] = []
    longest = 0
    for request in requests:
        longest = max(longest, len(request.ids) + request.sampling.max_tokens)
        full = batches and (len(batches[-1]) + 1) * longest > BATCH_TOKENS
        if not batches or full or len(batches[-1]) == most:
            batches.append([])
            longest = len(request.ids) + request.sampling.max_tokens
        batches[-1].append(request)
    return batches


def _left_pad(
    rows: list[list[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 ids and mask, both [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + r for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask


def _end_ids(model: Any, tokenizer: Any, renderer: Renderer) -> frozenset[int]:
    """Every id that ends a turn, in the model's opinion, the tokenizer's or the template's."""
    said = getattr(model.generation_config, "eos_token_id", None)
    ids = [*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id]
    return frozenset(i for i in [*ids, renderer.end_of_turn] if i is not None)


def _pad_id(tokenizer: Any, end_ids: frozenset[int]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return min(end_ids, default=0)


def _can_share_prefill(model: Any) -> bool:
    """Whether the cache is plain keys and values in all layers, so that its rows can be repeated.

    Other caches (windows, recurrent states) and learned prompts are left to `generate`.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ("unknown",)
    adapter = getattr(model, "active_peft_config", None)
    learned = adapter is not None and adapter.is_prompt_learning
    return set(kinds) == {"full_attention"} and not learned


def _context_limit(model: Any, asked: int | None) -> int | None:
    config = model.config.get_text_config()
    known = [n for n in (asked, getattr(config, "max_position_embeddings", None)) if n]
    return min(known) if known else None
