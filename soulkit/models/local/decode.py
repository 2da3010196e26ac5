"""Generates replies token by token, and computes and stores each distinct prompt once.

Rows with the same prompt are the *slots* of one *lane*: their keys and values follow those of the
prompt in one sequence, step by step, and a mask limits each slot to the prompt and its own earlier
tokens. Sixteen drafts of one prompt thus read its keys once per step instead of sixteen times, and
only new columns are written. Finished slots and lanes are removed when that saves enough work.
Batches are formed for replies of the expected length; rows that no longer fit wait for the others.

The loop needs a model that accepts one mask row per query and arbitrary positions, which
`decode_check.py` tests. Other models (recurrent states, kernels without masks) use `generate`,
with `Draw` as a logits processor.

The loop gets no new features: use vLLM for paged keys, quantised weights or several GPUs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from soulkit.models.local.draw import Draw

MOST_SLOTS = 16
"""Maximum slots per lane. A slot computes and masks the columns of all slots of its lane."""
_COLUMNS_PER_SLOT = 128
"""Columns of one more lane that cost about as much to read as one more slot."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
CACHE_NAMES = ("cache", "past_key_values")
"""Cache argument of transformers' models, newer name first."""
_SPECIAL = ("softcap", "s_aux", "sinks", "position_bias")
"""Arguments of attention functions that change the scores."""
GROUPED = "soulkit_grouped"
"""Name of `grouped_attention` in transformers; models have it only during a step."""
_AHEAD = 64
"""Steps for which space is reserved in advance."""

Finished = Callable[[int, list[int]], bool]
"""Whether a row (its number, its ids so far) ends here."""


@contextmanager
def grouping(config: Any) -> Iterator[None]:
    """Context in which a model with this configuration uses `grouped_attention` instead of SDPA."""
    from transformers import AttentionInterface

    AttentionInterface.register(GROUPED, grouped_attention)
    chosen = config._attn_implementation
    if chosen == "sdpa" or str(chosen).startswith("soulkit"):  # packed attention is SDPA here
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = chosen


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention function of a step: [lanes, heads, slots, width] → [lanes, slots, heads, width].

    Query heads with the same keys become further queries of one head, so that the keys are read
    where they are; transformers copies them for every query head.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    lanes, heads, slots, width = query.shape
    shared = heads // key.shape[1]
    special = any(value is not None for name, value in kwargs.items() if name in _SPECIAL)
    if attention_mask is None or shared == 1 or special:
        kwargs["scaling"] = scaling
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(lanes, heads // shared, shared * slots, width)
    mask = attention_mask.expand(-1, -1, slots, -1).repeat(1, 1, shared, 1)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(lanes, heads, slots, -1).transpose(1, 2).contiguous(), None


class Columns:
    """Keys and values of one layer, [lanes, heads, columns, width], written in place.

    Replaces a cache layer of transformers. Attention windows are handled by the mask.
    """

    is_sliding = is_compileable = False

    def __init__(self, room: int) -> None:
        self.room, self.used = room, 0
        self.keys: Any = None
        self.values: Any = None

    @property
    def is_initialized(self) -> bool:
        return self.keys is not None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append columns and return all columns."""
        if self.keys is None:
            self.keys, self.values = _room_for(keys, self.room), _room_for(values, self.room)
        start, self.used = self.used, self.used + keys.shape[-2]
        if self.used > self.room:
            self._grow()
        self.keys[:, :, start : self.used] = keys
        self.values[:, :, start : self.used] = values
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def _grow(self) -> None:
        # Grow by half each time: most replies are far shorter than their limit.
        self.room = max(self.used, self.room * 3 // 2)
        self.keys, self.values = (_grow_columns(x, self.room) for x in (self.keys, self.values))

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def select(self, lanes: Tensor, columns: Tensor, room: int) -> None:
        """Keep only `lanes` [n] and their `columns` [n, m], with space for `room` columns."""
        self.room, self.used = room, columns.shape[1]
        self.keys = _select_columns(self.keys, lanes, columns, room)
        self.values = _select_columns(self.values, lanes, columns, room)


def _cache(layers: int, room: int) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import CacheLayerMixin

    # The cache only accepts lengths from layers of its own class.
    CacheLayerMixin.register(Columns)
    cache = DynamicCache()
    cache.layers = [Columns(room) for _ in range(layers)]
    return cache


def _room_for(states: Tensor, room: int) -> Tensor:
    lanes, heads, _, width = states.shape
    return states.new_empty(lanes, heads, room, width)


def _grow_columns(states: Tensor, room: int) -> Tensor:
    wider = _room_for(states, room)
    wider[:, :, : states.shape[2]] = states
    return wider


def _select_columns(states: Tensor, lanes: Tensor, columns: Tensor, room: int) -> Tensor:
    lanes, columns = lanes.to(states.device), columns.to(states.device)
    selection = states.new_empty(len(lanes), states.shape[1], room, states.shape[3])
    selection[:, :, : columns.shape[1]] = states[lanes[:, None], :, columns].transpose(1, 2)
    return selection


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Row numbers by place, [lanes, slots]; -1 for an empty slot."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> int:
        return len(self.rows[0])

    def places(self) -> list[tuple[int, int, int]]:
        """(row, lane, slot) of every row."""
        places = ((r, i, k) for i, lane in enumerate(self.rows) for k, r in enumerate(lane))
        return [place for place in places if place[0] >= 0]

    def cost(self, columns: int) -> float:
        return len(self.rows) * (self.slots + columns / _COLUMNS_PER_SLOT)


def lay_out(groups: Sequence[Sequence[int]], columns: int) -> tuple[LaneLayout, list[int]]:
    """The cheapest layout of `groups` (rows with equal prompts), and the group of each lane."""
    most = min(MOST_SLOTS, max(map(len, groups)))
    layouts = [_with_slots(groups, slots) for slots in range(1, most + 1)]
    return min(layouts, key=lambda candidate: candidate[0].cost(columns))


def _with_slots(groups: Sequence[Sequence[int]], slots: int) -> tuple[LaneLayout, list[int]]:
    lanes, owners = [], []
    for owner, group in enumerate(groups):
        for start in range(0, len(group), slots):
            lane = group[start : start + slots]
            lanes.append((*lane, *[-1] * (slots - len(lane))))
            owners.append(owner)
    return LaneLayout(tuple(lanes)), owners


@dataclass(frozen=True, slots=True)
class Windows:
    """Attention window of each kind of layer; `by_kind` None: one mask for all layers."""

    by_kind: dict[str, int | None] | None
    only: int | None = None

    def masks(self, seen: Tensor, distance: Tensor, dtype: torch.dtype) -> Any:
        """Additive masks [lanes, 1, slots, columns] from visibility and distance."""
        if self.by_kind is None:
            return _additive(seen, distance, self.only, dtype)
        kinds = self.by_kind.items()
        return {kind: _additive(seen, distance, window, dtype) for kind, window in kinds}


def _additive(seen: Tensor, distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    visible = seen if window is None else seen & (distance < window)
    # The minimum instead of -inf, which would turn an empty slot into NaN.
    hidden = torch.finfo(dtype).min
    zeros = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(visible, zeros, hidden)[:, None]


def windows_of(model: Any) -> Windows | None:
    """The attention windows of a model's layers; None if it has other kinds of layers."""
    config = model.config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return None
    if not kinds:
        return Windows(None, window)
    if not set(kinds) <= {_FULL, _SLIDING} or (_SLIDING in kinds and not window):
        return None
    if set(kinds) == {_FULL}:
        return Windows(None)
    return Windows({_FULL: None, _SLIDING: window})


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Number of query heads, number of key heads, and their width, of a language model's config."""
    heads: int = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return heads, keys, getattr(config, "head_dim", None) or config.hidden_size // heads


def _cache_name(model: Any) -> str:
    """The name of the model's cache argument."""
    named = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in named), CACHE_NAMES[-1])


class Decoder:
    """A batch in progress. Use `decode_batch`."""

    def __init__(self, model: Any, windows: Windows, prompts: Sequence[Sequence[int]], pad: int,
                 max_tokens: int, limit: float = math.inf) -> None:  # fmt: skip
        """`prompts`: one per row; `pad`: any id; `max_tokens`: maximum for every row; `limit`:
        tokens that keys and values may have space for (see `over`)."""
        self.model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.cache_name = _cache_name(self.model)
        self.windows, self.pad, self.ahead = windows, pad, min(max_tokens, _AHEAD)
        self.limit = limit
        weight = next(self.model.parameters())
        self.device = weight.device
        self.distinct = list(dict.fromkeys(map(tuple, prompts)))
        place = {prompt: index for index, prompt in enumerate(self.distinct)}
        groups: list[list[int]] = [[] for _ in self.distinct]
        for row, prompt in enumerate(prompts):
            groups[place[tuple(prompt)]].append(row)
        self.width = max(map(len, self.distinct))
        self.layout, self.owners = lay_out(groups, self.width)
        self.steps = 0
        self._place()

    def _place(self) -> None:
        places = self.layout.places()
        self.rows = [row for row, _, _ in places]
        self.at = torch.tensor([(lane, slot) for _, lane, slot in places], device=self.device).T

    @property
    def over(self) -> bool:
        """Whether the next step exceeds the limit. `keep` then frees what it can."""
        slots = self.layout.slots
        return len(self.layout.rows) * (self.width + slots * (self.steps + 1)) > self.limit

    def first(self) -> Tensor:
        """Process the prompts; returns the logits [rows, vocabulary] of each row's first token."""
        lanes, slots = len(self.layout.rows), self.layout.slots
        room = self.width + slots * self.ahead
        self.cache = _cache(self.model.config.get_text_config().num_hidden_layers, room)
        ids, mask = left_pad(self.distinct, self.pad, self.device)
        even = bool(mask.all())
        out = self.model(
            input_ids=ids,
            # Without padding, the plain causal kernel is enough.
            attention_mask=None if even else mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        )
        self.cache.layers = [layer for layer in self.cache.layers if layer.is_initialized]
        owners = torch.tensor(self.owners, device=self.device)
        if lanes != len(self.distinct):
            columns = torch.arange(self.width, device=self.device).expand(lanes, -1)
            for layer in self.cache.layers:
                layer.select(owners, columns, room)
        self.depth = mask.sum(-1)[owners]
        self.prompt = mask[owners].bool()
        return out.logits[:, -1][owners[self.at[0]]]

    def next(self, tokens: Tensor) -> Tensor:
        """The logits [rows, vocabulary] after `tokens` [rows], in the order of `rows`."""
        shape = (len(self.layout.rows), self.layout.slots)
        ids = torch.full(shape, self.pad, device=self.device)
        ids[self.at[0], self.at[1]] = tokens
        depth = self.depth[:, None] + self.steps
        self.steps += 1
        with grouping(self.model.config.get_text_config()):
            out = self.model(
                input_ids=ids,
                attention_mask=self._mask(),
                position_ids=depth.expand(shape),
                use_cache=True,
                **{self.cache_name: self.cache},
            )
        return out.logits[self.at[0], self.at[1]]

    def _mask(self) -> Any:
        lanes, slots = len(self.layout.rows), self.layout.slots
        same_slot = torch.eye(slots, dtype=torch.bool, device=self.device).repeat(1, self.steps)
        prompt = self.prompt[:, None].expand(lanes, slots, -1)
        seen = torch.cat([prompt, same_slot.expand(lanes, -1, -1)], -1)
        # Padding is on the left, so a prompt's last column is one step before the first reply.
        width = self.prompt.shape[1]
        far = self.steps - 1 + width - torch.arange(width, device=self.device)
        ago = torch.arange(self.steps - 1, -1, -1, device=self.device).repeat_interleave(slots)
        distance = torch.cat([far, ago])
        return self.windows.masks(seen, distance, next(self.model.parameters()).dtype)

    def keep(self, alive: Sequence[bool]) -> None:
        """Drop the rows that are not `alive`, and shrink the tensors if that saves enough."""
        left = {row for row, lives in zip(self.rows, alive, strict=True) if lives}
        lanes = [[row for row in lane if row in left] for lane in self.layout.rows]
        slots = max(map(len, lanes))
        full = [(i, lane) for i, lane in enumerate(lanes) if lane]
        small = LaneLayout(tuple((*lane, *[-1] * (slots - len(lane))) for _, lane in full))
        columns = self.prompt.shape[1]
        if self.over or small.cost(columns) <= 0.6 * self.layout.cost(columns):
            self._compact(small, [i for i, _ in full])
        else:
            hidden = [tuple(r if r in left else -1 for r in lane) for lane in self.layout.rows]
            self.layout = LaneLayout(tuple(hidden))
        self._place()

    def _compact(self, small: LaneLayout, lanes: list[int]) -> None:
        before = [{row: slot for slot, row in enumerate(self.layout.rows[i])} for i in lanes]
        slots = [[old.get(r, 0) for r in lane]
                 for old, lane in zip(before, small.rows, strict=True)]  # fmt: skip
        width, index = self.prompt.shape[1], torch.tensor(lanes, device=self.device)
        start = torch.arange(self.steps, device=self.device) * self.layout.slots + width
        reply_columns = start[:, None] + torch.tensor(slots, device=self.device)[:, None]
        prompt = torch.arange(width, device=self.device).expand(len(lanes), -1)
        columns = torch.cat([prompt, reply_columns.flatten(1)], 1)
        room = columns.shape[1] + small.slots * self.ahead
        for layer in self.cache.layers:
            layer.select(index, columns, room)
        self.layout, self.depth, self.prompt = small, self.depth[index], self.prompt[index]


class Decodes(Protocol):
    """The interface that `run_decoder` needs."""

    @property
    def rows(self) -> list[int]:
        """The rows that have not ended, in the order of logits and tokens."""

    @property
    def over(self) -> bool:
        """Whether there are too many rows for the next step."""

    def first(self) -> Tensor: ...

    def next(self, tokens: Tensor) -> Tensor: ...

    def keep(self, alive: Sequence[bool]) -> None: ...


class Replies:
    """Ids and log-probs of every row so far."""

    def __init__(self, count: int) -> None:
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]


def decode_batch(
    model: Any,
    windows: Windows,
    prompts: Sequence[Sequence[int]],
    draw: Draw,
    finished: Finished,
    pad: int,
    limit: float = math.inf,
) -> Replies:
    """The replies of every row, up to the token at which it is `finished`.

    A row has at most as many tokens as `draw` has random numbers for it. When keys and values need
    space for more than `limit` tokens, half of the rows are set aside. They continue afterwards,
    with their tokens so far as part of the prompt.
    """
    replies, rows = Replies(len(prompts)), list(range(len(prompts)))
    waiting: list[int] = []
    while rows:
        texts = [[*prompts[row], *replies.ids[row]] for row in rows]
        decoder = Decoder(model, windows, texts, pad, draw.uniform.shape[1], limit)
        waiting += run_decoder(decoder, rows, replies, draw, finished)
        lengths = accumulate((len(prompts[r]) + len(replies.ids[r]) for r in waiting), max)
        # Half the limit, so that these rows have space to grow.
        count = sum(n * longest <= limit / 2 for n, longest in enumerate(lengths, 1))
        rows, waiting = waiting[: max(1, count)], waiting[max(1, count) :]
    return replies


@torch.inference_mode()
def run_decoder(
    decoder: Decodes, numbers: Sequence[int], replies: Replies, draw: Draw, finished: Finished
) -> list[int]:
    """Continue `replies` with a decoder whose rows have these `numbers`; returns the numbers of
    rows that were set aside."""
    most, aside = draw.uniform.shape[1], list[int]()
    logits = decoder.first()
    while True:
        rows = decoder.rows
        named = [numbers[row] for row in rows]
        steps = [len(replies.ids[number]) for number in named]
        tokens, logprobs = draw.pick(logits, draw.uniform[named, steps])
        for number, token, logprob in zip(named, tokens.tolist(), logprobs.tolist(), strict=True):
            replies.ids[number].append(token)
            replies.logprobs[number].append(logprob)
        alive = [step + 1 < most and not finished(number, replies.ids[number])
                 for number, step in zip(named, steps, strict=True)]  # fmt: skip
        if not any(alive):
            return aside
        if not all(alive) or (decoder.over and len(rows) > 1):
            decoder.keep(alive)
            while decoder.over and len(decoder.rows) > 1:
                half = (len(decoder.rows) + 1) // 2
                aside += [numbers[row] for row in decoder.rows[half:]]
                decoder.keep([place < half for place in range(len(decoder.rows))])
            tokens = in_row_order(tokens, rows, decoder.rows)
        logits = decoder.next(tokens)


def in_row_order(values: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """The values of the rows `before`, for the rows `after`."""
    place = {row: index for index, row in enumerate(before)}
    return values[torch.tensor([place[row] for row in after], device=values.device)]


def left_pad(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(ids, mask), both int64 [rows, longest]."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(r)) + list(r) for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask
