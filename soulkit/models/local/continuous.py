"""Continuous batching for servers: rows join and leave the running batch at every step.

Each row has a lane in one buffer of keys and values and fills it from column 0 on, so rows of any
length share a step, and the lane of an ended row is used again. Rows with different sampling
settings share the forward pass; tokens are drawn in groups of equal settings. Models that
`decode_check.py` rejects get batches that no row can join.

Evaluation and training use the batches of `batching.py` instead, which do not depend on timing.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soulkit.errors import ProviderError
from soulkit.models.codec import Codec
from soulkit.models.local.batching import EXPECTED
from soulkit.models.local.chat_template import END_OF_THINKING
from soulkit.models.local.decode import Columns, Decoder, Windows, grouping, left_pad
from soulkit.models.local.draw import Draw
from soulkit.models.local.sampler import LocalModel, batch_tokens
from soulkit.types import Sampling


class SchemaTooComplex(ValueError):
    """A schema that cannot be enforced, which is only noticed while a reply is generated."""


@dataclass(slots=True)
class SchemaRule:
    """Lets a reply, after its reasoning, only be JSON of one schema."""

    matcher: Any
    """llguidance's state of the reply."""
    codec: Codec
    thinks: bool

    def allowed(self) -> np.ndarray | None:
        """Which tokens may come next (bool [vocabulary]); None: all."""
        return None if self.thinks else np.frombuffer(self.matcher.compute_logit_bias(), bool)

    def complete(self, ids: Sequence[int]) -> bool:
        """Take the last of these tokens; whether the reply must end. SchemaTooComplex if the schema
        cannot be enforced."""
        if self.thinks:
            self.thinks = END_OF_THINKING not in self.codec.text(ids[-8:])
            return False
        self.matcher.consume_token(ids[-1])
        if self.matcher.is_error():  # too complex, noticed late
            raise SchemaTooComplex(self.matcher.get_error().partition("\n")[0][:200])
        return bool(self.matcher.is_stopped())


@dataclass(slots=True, eq=False)
class Row:
    """A reply in progress. The worker thread appends to `ids` and sets `done` last."""

    prompt: list[int]
    sampling: Sampling
    uniform: np.ndarray
    """One random number for each token that the reply may have."""
    streams: bool = False
    """Whether `changed` is set after every token, not only at the end."""
    rule: SchemaRule | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None
    """Why there is no reply."""
    cancelled: bool = False
    """Set by the reader: the row leaves its batch before the next step."""

    @property
    def over(self) -> bool:
        """Whether the row leaves its batch."""
        return self.done or self.cancelled


class _Lanes(Columns):
    """Keys and values of one layer, of which a step writes one column per lane."""

    place: tuple[Tensor, Tensor]
    """Lanes and their columns to write."""

    def reserve(self, like: Columns, lanes: int, columns: int) -> None:
        """Have space for as many lanes and columns."""
        old = (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if lanes <= old[0] and columns <= old[1]:
            return
        # More than needed, so that few steps copy the buffer.
        size = [max(new * 5 // 4, now) for new, now in zip((lanes, columns), old, strict=True)]
        for name in ("keys", "values"):
            before, (_, heads, _, width) = getattr(self, name), getattr(like, name).shape
            # Not `new_empty`: a masked column with NaN would still make its row NaN.
            after = getattr(like, name).new_zeros(size[0], heads, size[1], width)
            if before is not None:
                after[: old[0], :, : old[1]] = before
            setattr(self, name, after)

    def fill(self, lane: int, source: Columns, row: int, start: int, end: int) -> None:
        """Copy the columns `start` to `end` of a row of `source` to the start of a lane."""
        self.keys[lane, :, : end - start] = source.keys[row, :, start:end]
        self.values[lane, :, : end - start] = source.values[row, :, start:end]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the step's columns; returns all columns that a row may see."""
        lanes, columns = self.place
        self.keys[lanes, :, columns] = keys[:, :, 0]
        self.values[lanes, :, columns] = values[:, :, 0]
        return self.keys[: len(lanes), :, : self.used], self.values[: len(lanes), :, : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0


class OpenBatch:
    """Rows that generate together; further rows may `add` at any step."""

    def __init__(self, model: Any, windows: Windows, pad: int) -> None:
        self.model, self.windows, self.pad = model, windows, pad
        self.rows: list[Row] = []
        self.lengths: list[int] = []
        """Tokens of each row whose keys and values are stored."""
        self.layers: list[_Lanes] = []

    def add(self, rows: Sequence[Row]) -> tuple[list[Row], Tensor]:
        """Process the prompts; returns the rows, in some order, and their logits."""
        texts = [[*row.prompt, *row.ids] for row in rows]
        prefill = Decoder(self.model, self.windows, texts, self.pad, 1)
        logits, first = prefill.first(), len(self.rows)
        if not self.layers:
            self.model, self.cache_name = prefill.model, prefill.cache_name
            self.cache, self.layers = prefill.cache, [_Lanes(0) for _ in prefill.cache.layers]
        self.rows += [rows[number] for number in prefill.rows]
        self.lengths += [len(texts[number]) for number in prefill.rows]
        for layer, source in zip(self.layers, prefill.cache.layers, strict=True):
            layer.reserve(source, len(self.rows), max(self.lengths) + 1)
            for lane, row in enumerate(prefill.at[0].tolist(), first):
                layer.fill(lane, source, row, prefill.width - self.lengths[lane], prefill.width)
        self.cache.layers = self.layers
        return self.rows[first:], logits

    def step(self) -> Tensor:
        """The logits [rows, vocabulary] after each row's last token."""
        weight, used = next(self.model.parameters()), max(self.lengths) + 1
        at = torch.tensor(self.lengths, device=weight.device)
        distance = (at[:, None] - torch.arange(used, device=weight.device))[:, None]
        for layer in self.layers:
            layer.reserve(layer, len(at), used)
            layer.place, layer.used = (torch.arange(len(at), device=weight.device), at), used
        with grouping(self.model.config.get_text_config()):
            out = self.model(
                input_ids=torch.tensor([row.ids[-1:] for row in self.rows], device=weight.device),
                attention_mask=self.windows.masks(distance >= 0, distance, weight.dtype),
                position_ids=at[:, None],
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        self.lengths = [length + 1 for length in self.lengths]
        return out.logits[:, -1]

    def drop(self) -> None:
        """Remove ended and cancelled rows; the last lane takes the place of a free one."""
        for lane in reversed(range(len(self.rows))):
            if self.rows[lane].over:
                self.pop(lane)

    def pop(self, lane: int) -> Row:
        """Remove and return a row."""
        row, last = self.rows[lane], len(self.rows) - 1
        for layer in self.layers if lane < last else ():
            layer.fill(lane, layer, last, 0, self.lengths[last])
        self.rows[lane], self.lengths[lane] = self.rows[last], self.lengths[last]
        del self.rows[last], self.lengths[last]
        if not self.rows:
            self.layers = []  # frees the memory
        return row


class ContinuousBatching:
    """Generates rows with a LocalModel, in its worker thread.

    `submit` takes rows from any coroutine; each row tells its reader by `changed`.
    """

    def __init__(self, model: LocalModel) -> None:
        self.model, self.codec = model, model.codec
        self.waiting: list[Row] = []
        self.fresh: list[Row] = []
        """Rows that join the batch now."""
        self.steps = 0
        """How often tokens have been drawn, since the start."""
        self._lock, self._busy, self._closed = threading.Lock(), False, False

    def submit(self, rows: Sequence[Row]) -> None:
        """Generate these rows. ProviderError if the model is closed."""
        with self._lock:
            self._check_open()
            self._loop = asyncio.get_running_loop()
            self.waiting += rows
            if not self._busy:
                self._busy = True
                self.model.run(self._work)

    def close(self) -> None:
        """End all rows with an error before the next step."""
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ProviderError(f"The local model '{self.model.name}' has been closed.")

    @torch.inference_mode()
    def _work(self) -> None:
        """Generate until no row is left."""
        self.batch = batch = OpenBatch(self.model.model, Windows(None), self.codec.pad)
        try:
            windows = self.model.windows
            batch.windows = windows or batch.windows
            expected = math.inf if windows is None else EXPECTED
            self.model.model.eval()
            while self._take(expected):
                if windows is None:
                    self._generate(self.fresh)
                    continue
                if self.fresh:
                    self._draw(*batch.add(self.fresh))
                    batch.drop()
                if batch.rows:
                    self._draw(batch.rows, batch.step())
        except Exception as error:  # noqa: BLE001 - every reader gets it
            with self._lock:
                rows, self.waiting = [*batch.rows, *self.fresh, *self.waiting], []
                self._busy = False
            for row in rows:
                if not row.done:
                    row.error, row.done = error, True
            self._tell(rows)

    def _take(self, expected: float) -> bool:
        """Choose `fresh` among the waiting rows; returns whether there is anything to generate.

        Rows that no longer fit into memory wait again. They continue with their tokens so far as
        part of the prompt.
        """
        self.batch.drop()
        rows, limit = self.batch.rows, batch_tokens(self.model.model, deterministic=False)
        with self._lock:
            self._check_open()
            while len(rows) > 1 and _size(rows, 1) > limit:
                self.waiting.insert(0, self.batch.pop(len(rows) - 1))
            self.waiting = [row for row in self.waiting if not row.over]
            self.fresh = []
            for row in self.waiting:
                every = [*rows, *self.fresh, row]
                fits = len(every) == 1 or _size(every, expected) <= limit
                # Prompts of similar length, to reduce padding.
                alike = not self.fresh or _magnitude(row) == _magnitude(self.fresh[0])
                if fits and alike and len(every) <= self.model.batch_size:
                    self.fresh.append(row)
            self.waiting = [row for row in self.waiting if row not in self.fresh]
            self._busy = bool(rows or self.fresh)
            return self._busy

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Append a token to each row, end the rows that are complete, and tell the readers."""
        self.steps += 1
        groups: dict[object, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            one = row.sampling
            groups[one.temperature, one.top_p, one.top_k, one.min_p].append(place)
            allowed = None if row.rule is None else row.rule.allowed()
            if allowed is not None:
                logits[place, torch.from_numpy(~allowed).to(logits.device)] = -torch.inf
        wide = torch.float32 if logits.device.type == "mps" else torch.float64
        for places in groups.values():
            group = [rows[place] for place in places]
            part = logits if len(group) == len(rows) else logits[places]
            numbers = torch.tensor(
                [row.uniform[len(row.ids)] for row in group], dtype=wide, device=logits.device
            )
            draw = Draw(numbers[:, None], group[0].sampling)
            tokens, logprobs = draw.pick(part, numbers)
            for row, token, logprob in zip(group, tokens.tolist(), logprobs.tolist(), strict=True):
                row.ids.append(token)
                row.logprobs.append(logprob)
                row.done = self._ended(row)
        self._tell([row for row in rows if row.streams or row.done])

    def _ended(self, row: Row) -> bool:
        over = len(row.ids) >= len(row.uniform) or row.ids[-1] in self.codec.end_ids
        stopped = over or self.codec.hits_stop(row.ids, row.sampling.stop)
        try:
            return stopped or (row.rule is not None and row.rule.complete(row.ids))
        except SchemaTooComplex as error:
            row.error = error
            return True

    def _tell(self, rows: Sequence[Row]) -> None:
        if rows and not self._loop.is_closed():
            for changed in {row.changed for row in rows}:
                self._loop.call_soon_threadsafe(changed.set)

    def _generate(self, rows: Sequence[Row]) -> None:
        """Generate a batch that no row can join, with transformers' `generate`."""
        model, pad = self.model.model, self.codec.pad
        ids, mask = left_pad([row.prompt for row in rows], pad, next(model.parameters()).device)

        def choose(_: Tensor, scores: Tensor) -> Tensor:
            places = [place for place, row in enumerate(rows) if not row.over]
            if places:
                self._draw([rows[place] for place in places], scores[places])
            chosen = torch.tensor([row.ids[-1] if row.ids else pad for row in rows])[:, None]
            return torch.full_like(scores, -torch.inf).scatter_(1, chosen.to(scores.device), 0.0)

        def ended(input_ids: Tensor, _: Tensor, **__: object) -> Tensor:
            over = [row.over or self._closed for row in rows]
            return torch.tensor(over, device=input_ids.device)

        model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=self.model.greedy_config(max(len(row.uniform) for row in rows)),
            logits_processor=[choose],
            stopping_criteria=[ended],
        )


def _magnitude(row: Row) -> int:
    return (len(row.prompt) + len(row.ids)).bit_length()


def _size(rows: Sequence[Row], expected: float) -> float:
    """Tokens that a batch of these rows holds after `expected` further ones."""
    return len(rows) * max(
        len(row.prompt) + min(len(row.uniform), len(row.ids) + expected) for row in rows
    )
