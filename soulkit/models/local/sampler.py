"""Local models: transformers on this machine, batched behind the same `complete` as every model.

Requests wait in a list. When the model is free, the dispatcher takes those that can share one batch
(same sampling but for the seed), sorts them by their keys and runs them in a worker thread, one
batch at a time. So a wave of coroutines becomes a few batches without anyone counting. With
`deterministic`, what shares a batch is decided by waves (`waves.py`) and not by the clock.

Every generation draws from a random stream of its own, keyed by who asks (`uniforms`). A result
therefore does not depend on the batch it ran in, up to the rounding of the model's arithmetic.
`decode.py` holds the loop; models that it cannot serve go through `generate`, which runs greedily
with the draw as a logits processor. No tensor over steps x batch x vocabulary is kept.

A trainer may wrap the model that it trains (`LocalModel(model, tokenizer)`) and set
`policy_version` after each step; between batches nothing of the sampler touches the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.local.decode import (
    Decoder,
    Decodes,
    Draw,
    Finished,
    Windows,
    follows,
    left_pad,
    run_decoder,
    uniforms,
    windows_of,
)
from soulkit.models.local.head import widen_head
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.local.loading import adapter_hash, load_adapter, load_base, locate, pick_device
from soulkit.models.local.mixed import MixedDecoder, expert_turns, no_two_contexts
from soulkit.models.local.names import adapter_folder
from soulkit.models.local.queueing import ExpertPrompt, GenerationRequest, Queue, batches_of, fail
from soulkit.models.local.render import Renderer, SpliceReport, first_true, splice_report
from soulkit.models.local.specials import END_OF_THINKING, START_OF_THINKING
from soulkit.models.local.waves import Participant, current_participant, loop_barrier, participants
from soulkit.models.room import least_room, reply_room
from soulkit.types import Call, Completion, Sampling, Segment, Usage

_QUIET_TICKS = 3


class LocalModel:
    """A causal language model of transformers, on this machine.

    Attributes: `name`; `policy_version`, stamped on completions (the hash of the adapter, settable
    by a trainer); `context_limit` in tokens (None: not known); `splice`, what the template does to
    a conversation. `deterministic`: batches depend on who takes part (`join`), not on the clock.
    With a `journal`, every batch is recorded, and what is recorded is not sampled again.
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
        """Wraps a loaded model and its tokenizer. ModelLoadError without a chat template."""
        widen_head(model)  # the log-probs of a trainer on the same weights are made alike
        self.model, self.tokenizer = model, tokenizer
        self.name, self.policy_version, self.batch_size = name, policy_version, batch_size
        self.context_limit = context_limit(model, max_context)
        self._renderer = lru_cache(maxsize=None)(lambda thinking: Renderer(tokenizer, thinking))
        self.splice: SpliceReport = splice_report(self.renderer())
        self.end_ids = _end_ids(model, tokenizer, self.renderer())
        self._pad = _pad_id(tokenizer, self.end_ids)
        self.deterministic, self.journal = deterministic, journal
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
        batch_size: int = 64,
        max_context: int | None = None,
        name: str | None = None,
    ) -> LocalModel:
        """Loads a folder or `owner/name@revision` of the hub, with a LoRA adapter if one is named.

        `device` auto is a GPU when there is one; `dtype` auto is float32 on a CPU and the
        checkpoint's own elsewhere. Only safetensors are read, and no code of the model's folder is
        run. Raises ModelLoadError, which names what is missing.
        """
        where = locate(path)
        folder = None if adapter is None else adapter_folder(adapter)  # before the large download
        place = pick_device(device)
        model, tokenizer = load_base(where, place, dtype)
        version = ""
        if folder is not None:
            model, version = load_adapter(model, folder), adapter_hash(folder)
        model.to(place).eval()
        label = name or (str(where) if where.on_hub else Path(where.where).name)
        return cls(
            model,
            tokenizer,
            batch_size=batch_size,
            max_context=max_context,
            name=label,
            policy_version=version,
        )

    def anew(self) -> LocalModel:
        """The same weights for another run, once this one is closed."""
        return LocalModel(
            self.model, self.tokenizer, batch_size=self.batch_size, max_context=self.context_limit,
            name=self.name, policy_version=self.policy_version,
        )  # fmt: skip

    def join(self) -> Participant:
        """One participant, who is the caller within `with`: see `waves.py`.

        While there are any, a deterministic model waits until all of them are waiting for it.
        Without `deterministic` no wave waits for it.
        """
        return participants([self], 1)[0]

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

        The reply may have what the context leaves of `max_tokens` (`room.py`). Raises
        ContextOverflow when that is too little, ProviderError when the model fails or is closed.
        """
        self._check_open()
        ids = self.renderer(sampling.thinking).prompt_ids(context)
        room = self._room(len(ids), sampling.max_tokens)
        recorded_reply = self._recorded_reply(ids, sampling, call)
        if recorded_reply is not None:
            return recorded_reply
        return await self._ask(ids, sampling, call, room)

    async def complete_mixed(
        self, context: Sequence[Segment], expert: Sequence[Segment], share: float,
        sampling: Sampling, call: Call,
    ) -> Completion:  # fmt: skip
        """One reply to `context`, a `share` of whose tokens is drawn in `expert` (`mixed.py`).

        `prompt_ids` are those of `context`; a log-prob is that of the conditional which drew the
        token. No journal keeps such replies. Raises as `complete` does; ConfigError for a model
        that `decode.py` cannot serve.
        """
        self._check_open()
        if self._windows is None:
            raise no_two_contexts(self.name)
        renderer = self.renderer(sampling.thinking)
        ids, expert_ids = renderer.prompt_ids(context), renderer.prompt_ids(expert)
        room = self._room(max(len(ids), len(expert_ids)), sampling.max_tokens)
        return await self._ask(ids, sampling, call, room, ExpertPrompt(expert_ids, share))

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError(f"The local model '{self.name}' has been closed.")

    async def _ask(
        self, ids: list[int], sampling: Sampling, call: Call, room: int,
        expert: ExpertPrompt | None = None,
    ) -> Completion:  # fmt: skip
        loop = asyncio.get_running_loop()
        dropped = self._dropped(sampling)
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

    def _recorded_reply(self, ids: list[int], sampling: Sampling, call: Call) -> Completion | None:
        """Without waves any recorded reply serves; waves are answered batch by batch."""
        if self.journal is None or self.deterministic:
            return None
        return self.journal.one(JournalKey(call, sampling, tuple(ids), self.policy_version))

    def _queue(self, loop: asyncio.AbstractEventLoop) -> Queue:
        if loop not in self._queues:
            self._queues[loop] = Queue(loop_barrier() if self.deterministic else None)
            if self.deterministic:
                loop_barrier().queues.add(self._queues[loop])
        return self._queues[loop]

    async def close(self) -> None:
        """Refuses further calls and lets the running batch end, unless nobody waits for it any
        more; waiting requests are refused."""
        self._closed = True
        for queue in list(self._queues.values()):
            for request in [*queue.waiting, *queue.wave]:
                fail(request, RuntimeError("the model was closed"))
            queue.waiting.clear()
            queue.wave.clear()
            queue.wake()
        self._worker.shutdown(wait=False)

    def _room(self, prompt: int, limit: int) -> int:
        """Tokens that the reply to a prompt of so many may have; ContextOverflow for too few."""
        room = reply_room(prompt, limit, self.context_limit)
        if not room:
            raise ContextOverflow(
                f"The prompt has {prompt} tokens and its reply needs room for {least_room(limit)}; "
                f"'{self.name}' holds {self.context_limit}."
            )
        return room

    def _dropped(self, sampling: Sampling) -> tuple[str, ...]:
        unread = sampling.thinking is not None and not self.renderer().reads_thinking
        effort = ("reasoning_effort",) if sampling.reasoning_effort else ()
        form = ("form",) if sampling.form else ()  # whoever reads the reply checks it
        return (*form, *effort, *(("thinking",) if unread else ()))

    async def _dispatch(self, queue: Queue) -> None:
        while queue.drop_cancelled():
            queue.changed.clear()
            await self._settle(queue)
            if batch := self._take(queue):
                await self._serve(queue, batch)
            elif queue.drop_cancelled():
                await queue.changed.wait()

    async def _settle(self, queue: Queue) -> None:
        """Lets every coroutine that is ready to ask do so, so that a wave is one set of batches."""
        quiet, seen = 0, len(queue.waiting)
        while quiet < _QUIET_TICKS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(queue.waiting) == seen else 0
            seen = len(queue.waiting)

    def _take(self, queue: Queue) -> list[GenerationRequest]:
        """Removes and returns the batch of whoever has waited longest, or nothing yet."""
        queue.drop_cancelled()
        pool = queue.pool()
        if not pool:
            return []
        # The order in which a wave's calls came is the clock's doing, so it may not choose.
        oldest = pool[0] if queue.barrier is None else min(pool, key=lambda r: (r.group, r.order))
        peers = sorted((r for r in pool if r.group == oldest.group), key=lambda r: r.order)
        batch = next(b for b in batches_of(peers, self.batch_size) if oldest in b)
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
        """Replays one batch, or runs and records it; called in the worker thread."""
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
        start = time.perf_counter()
        device = next(self.model.parameters()).device
        draw = self._draw(batch, device)
        training = self.model.training
        self.model.eval()
        try:
            if self._windows is None:
                rows, notes = self._run_generate(batch, draw, device)
            else:
                decoder = self._decoder(batch, self._windows)
                rows, notes = run_decoder(decoder, len(batch), draw, self._end_rule(batch))
        finally:
            if training:
                self.model.train()
        share = (time.perf_counter() - start) / len(batch)
        return [
            self._completion(*row, share, version) for row in zip(batch, rows, notes, strict=True)
        ]

    def _decoder(self, batch: list[GenerationRequest], windows: Windows) -> Decodes:
        prompts, most = [r.ids for r in batch], max(r.room for r in batch)
        experts = [r.expert for r in batch if r.expert is not None]
        if not experts:
            return Decoder(self.model, windows, prompts, self._pad, most)
        turns = [
            expert_turns(r.sampling.seed, r.call, e.share, most)
            for r, e in zip(batch, experts, strict=True)
        ]
        both = prompts, [e.ids for e in experts]
        return MixedDecoder(self.model, windows, both, np.stack(turns), self._pad)

    @cached_property
    def _windows(self) -> Windows | None:
        """How masks look to this model; None leaves it to `generate`. Probed at the first batch."""
        windows = windows_of(self.model)
        return windows if windows is not None and follows(self.model, windows) else None

    def _end_rule(self, batch: list[GenerationRequest]) -> Finished:
        def ended(row: int, ids: list[int]) -> bool:
            self._give_up(batch)
            request = batch[row]
            over = len(ids) >= request.room or ids[-1] in self.end_ids
            return over or self._hits_stop(ids, request.sampling.stop)

        return ended

    def _give_up(self, batch: list[GenerationRequest]) -> None:
        """End a batch that nobody waits for in a model that was closed: a process that was stopped
        would otherwise live until its last token."""
        if self._closed and all(request.future.done() for request in batch):
            raise RuntimeError("the model was closed")

    def _hits_stop(self, ids: list[int], stops: tuple[str, ...]) -> bool:
        """Whether a stop string is out; a look at the last tokens settles most steps."""
        strings = [s for s in stops if s]
        if not strings:
            return False
        tail = self._text(ids[-max(map(len, strings)) - 8 :])
        return any(s in tail for s in strings) and any(s in self._text(ids) for s in strings)

    @torch.inference_mode()
    def _run_generate(
        self, batch: list[GenerationRequest], draw: Draw, device: torch.device
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and log-probs of every row by transformers' own loop."""
        ids, mask = left_pad([r.ids for r in batch], self._pad, device)

        def unless_closed(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self._give_up(batch)
            return scores

        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=self._config(max(r.room for r in batch)),
            logits_processor=[unless_closed, draw],
        )
        return out[:, ids.shape[1] :].tolist(), draw.logprobs().tolist()

    def _draw(self, batch: list[GenerationRequest], device: torch.device) -> Draw:
        s = batch[0].sampling
        most = max(r.room for r in batch)
        streams = np.stack([uniforms(r.sampling.seed, r.call, most) for r in batch])
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
        request: GenerationRequest,
        row: list[int],
        notes: list[float],
        seconds: float,
        version: str,
    ) -> Completion:
        row = row[: request.room]  # `generate` runs as long as the longest of the batch
        end = next((i + 1 for i, t in enumerate(row) if t in self.end_ids), None)
        ids = row[:end]
        ids, text, cut = self._cut_at_stops(ids, request.sampling.stop)
        reasoning, text = _split_thinking(text, self._thinking_open(request.ids))
        usage = Usage(
            calls=1,
            prompt_tokens=len(request.ids) + (len(request.expert.ids) if request.expert else 0),
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
        text_ids = [i for i in ids if i not in self.end_ids and i != self._pad]
        return str(self.tokenizer.decode(text_ids, skip_special_tokens=False))

    def _thinking_open(self, prompt: list[int]) -> bool:
        """Whether the prompt itself ends inside the thinking, as some templates write it."""
        tail = str(self.tokenizer.decode(prompt[-4:], skip_special_tokens=False)).rstrip()
        return tail.endswith(START_OF_THINKING)


def _split_thinking(text: str, is_open: bool) -> tuple[str, str]:
    """(reasoning, what is said). Thinking that never ends says nothing."""
    thought, closed, answer = text.rpartition(END_OF_THINKING)
    if closed:
        return thought.strip().removeprefix(START_OF_THINKING).strip(), answer.lstrip()
    if is_open or text.lstrip().startswith(START_OF_THINKING):
        return text.strip().removeprefix(START_OF_THINKING).strip(), ""
    return "", text


def _end_ids(model: Any, tokenizer: Any, renderer: Renderer) -> frozenset[int]:
    """Every id that ends a turn, in the model's opinion, the tokenizer's or the template's."""
    model_ids = getattr(model.generation_config, "eos_token_id", None)
    ids = [*(model_ids if isinstance(model_ids, list) else [model_ids]), tokenizer.eos_token_id]
    return frozenset(i for i in [*ids, renderer.end_of_turn] if i is not None)


def _pad_id(tokenizer: Any, end_ids: frozenset[int]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return min(end_ids, default=0)


def context_limit(model: Any, max_context: int | None) -> int | None:
    config = model.config.get_text_config()
    limits = [n for n in (max_context, getattr(config, "max_position_embeddings", None)) if n]
    return min(limits) if limits else None
