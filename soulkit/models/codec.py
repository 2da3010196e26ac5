"""Converts between text and one model's token ids: contexts to prompt ids, ids to a Completion.

Every engine that is prompted with ids uses it, so models in this process and behind HTTP cut a
reply at the same token, split off its reasoning the same way and report the same dropped settings.
No torch import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.base import max_reply_tokens, min_reply_tokens
from soulkit.models.local.chat_template import (
    END_OF_THINKING,
    START_OF_THINKING,
    Renderer,
    first_true,
)
from soulkit.models.local.loading import ModelPlace
from soulkit.types import Completion, Sampling, Segment, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SETTINGS = ("generation_config.json", "config.json")
"""Files of a model that may list its end-of-turn ids, in order of precedence."""


class Codec:
    """Encodes contexts and decodes replies for one model.

    Attributes: `tokenizer`; `name`, for messages; `context_limit` in tokens (None: unknown);
    `end_ids`, each of which ends a turn; `pad`, an id that is never a word; `commit` of a model on
    the Hub (None for a folder).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, end_ids: Iterable[int | None] = (),
        name: str = "model", context_limit: int | None = None, commit: str | None = None,
    ) -> None:  # fmt: skip
        """`end_ids` come from the model's settings; the ids of the tokenizer and the chat template
        are added. ModelLoadError without a chat template."""
        self.tokenizer, self.name, self.context_limit = tokenizer, name, context_limit
        self.raised_by = ""
        """How to raise `context_limit`; empty if the model itself sets it."""
        self.commit = commit
        self._renderer = lru_cache(maxsize=None)(lambda thinking: Renderer(tokenizer, thinking))
        ends = (*end_ids, tokenizer.eos_token_id, self.renderer().end_of_turn)
        self.end_ids = frozenset(one for one in ends if one is not None)
        pad = tokenizer.pad_token_id
        self.pad = int(pad) if pad is not None else min(self.end_ids, default=0)

    @classmethod
    def load(cls, path: str | Path | ModelPlace, *, max_context: int | None = None) -> Codec:
        """The codec of a model folder or of `owner/name@revision` on the Hub, without its weights.

        ModelLoadError names the missing file.
        """
        from soulkit.models.local.loading import checkpoint_json, load_tokenizer, locate

        place = path if isinstance(path, ModelPlace) else locate(path)
        tokenizer, commit = load_tokenizer(place)
        revision = commit or place.revision
        settings = [checkpoint_json(place.where, file, revision) for file in _SETTINGS]
        longest = _language(settings[-1]).get("max_position_embeddings")
        codec = cls(
            tokenizer,
            end_ids=next((ids for one in settings if (ids := _end_ids(one))), ()),
            name=str(place) if place.on_hub else Path(place.where).name,
            context_limit=longest if isinstance(longest, int) else None,
            commit=commit,
        )
        return codec.limited(max_context)

    def limited(self, most: int | None, raised_by: str = "raise --max-context") -> Codec:
        """This codec with a context of at most `most` tokens, which `raised_by` raises."""
        limit = least_limit(self.context_limit, most)
        if limit == self.context_limit:
            return self
        limited = copy(self)
        limited.context_limit, limited.raised_by = limit, raised_by
        return limited

    # -- contexts to ids ---------------------------------------------------------------------------

    def renderer(self, thinking: bool | None = None) -> Renderer:
        """The prompt renderer for one value of `Sampling.thinking`."""
        return self._renderer(thinking)

    def prompt_ids(self, context: Sequence[Segment], thinking: bool | None = None) -> list[int]:
        """The prompt ids for `context`."""
        return self.renderer(thinking).prompt_ids(context)

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Number of prompt tokens for `context`."""
        return len(self.prompt_ids(context, thinking))

    def room(self, prompt: int, limit: int) -> int:
        """Maximum reply tokens after `prompt` tokens; ContextOverflow if too few are left."""
        room = max_reply_tokens(prompt, limit, self.context_limit)
        if not room:
            raise ContextOverflow(
                f"The prompt has {prompt} tokens and the reply needs "
                f"{min_reply_tokens(limit)}, but '{self.name}' holds {self.context_limit}"
                f"{f'; {self.raised_by}' if self.raised_by else ''}."
            )
        return room

    def dropped(self, sampling: Sampling, *, forms: bool = False) -> tuple[str, ...]:
        """Names of settings that this model ignores. `forms`: whether the engine enforces a JSON
        schema (without it, the caller checks the reply)."""
        unread = sampling.thinking is not None and not self.renderer().reads_thinking
        effort = ("reasoning_effort",) if sampling.reasoning_effort else ()
        form = ("form",) if sampling.form and not forms else ()
        return (*form, *effort, *(("thinking",) if unread else ()))

    # -- ids to replies ----------------------------------------------------------------------------

    def completion(
        self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], *, room: int,
        stop: Sequence[str] = (), seconds: float = 0.0, policy: str = "",
        dropped: tuple[str, ...] = (), prompt_tokens: int | None = None,
    ) -> Completion:  # fmt: skip
        """The reply in `ids`, up to the first end id or the token that completes a stop string.

        Tokens after that, or beyond `room`, are cut off. `logprobs` has one value per id or none.
        `prompt_tokens`: the count to report if more than `prompt` was read.
        """
        if not all(map(math.isfinite, logprobs)):
            raise ProviderError(f"The model '{self.name}' computes log-probs that are no numbers.")
        emitted = list(ids[:room])
        end = next((i + 1 for i, one in enumerate(emitted) if one in self.end_ids), None)
        emitted, text, cut = self._cut_at_stops(emitted[:end], stop)
        reasoning, text = reasoning_and_text(text, self.opens_thinking(prompt))
        count = len(prompt) if prompt_tokens is None else prompt_tokens
        return Completion(
            text=text,
            prompt_ids=tuple(prompt),
            token_ids=tuple(emitted),
            logprobs=tuple(logprobs[: len(emitted)]),
            stop_reason="stop" if cut or end is not None else "length",
            reasoning=reasoning,
            usage=Usage(
                calls=1, prompt_tokens=count, completion_tokens=len(emitted), seconds=seconds
            ),
            dropped=dropped,
            policy=policy,
        )

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without end-of-turn ids."""
        # Tags such as <answer> may be special tokens and must stay.
        words = [i for i in ids if i not in self.end_ids and i != self.pad]
        return str(self.tokenizer.decode(words, skip_special_tokens=False))

    def hits_stop(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether `ids` contain a stop string. Checks the last tokens first, which is fast."""
        strings = [s for s in stop if s]
        if not strings:
            return False
        tail = self.text(ids[-max(map(len, strings)) - 8 :])
        return any(s in tail for s in strings) and any(s in self.text(ids) for s in strings)

    def _cut_at_stops(self, ids: list[int], stop: Sequence[str]) -> tuple[list[int], str, bool]:
        """Ids up to the token that completes the first stop string, and the text before it."""
        text = self.text(ids)
        if not any(s in text for s in stop if s):
            return ids, text, False
        end = first_true(len(ids), lambda k: any(s in self.text(ids[:k]) for s in stop if s))
        text = self.text(ids[:end])
        return ids[:end], text[: min(text.find(s) for s in stop if s and s in text)], True

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt already opens the reasoning, as some chat templates do."""
        tail = str(self.tokenizer.decode(list(prompt[-4:]), skip_special_tokens=False)).rstrip()
        return tail.endswith(START_OF_THINKING)


class CodecModel:
    """A model that is prompted with token ids from its codec."""

    codec: Codec

    def renderer(self, thinking: bool | None = None) -> Renderer:
        """The prompt renderer for one value of `Sampling.thinking`."""
        return self.codec.renderer(thinking)

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens of prompt and reply together; None: unknown."""
        return self.codec.context_limit

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Number of prompt tokens for `context`."""
        return self.codec.prompt_length(context, thinking)


def reasoning_and_text(text: str, is_open: bool) -> tuple[str, str]:
    """(reasoning, reply). The reply is empty if the reasoning never ends."""
    thought, closed, answer = text.rpartition(END_OF_THINKING)
    if closed:
        return thought.strip().removeprefix(START_OF_THINKING).strip(), answer.lstrip()
    if is_open or text.lstrip().startswith(START_OF_THINKING):
        return text.strip().removeprefix(START_OF_THINKING).strip(), ""
    return "", text


def least_limit(*limits: int | None) -> int | None:
    """The smallest known limit."""
    return min((one for one in limits if one), default=None)


def _language(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    part = settings.get("text_config")
    return {**settings, **part} if isinstance(part, dict) else settings


def _end_ids(settings: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _language(settings).get("eos_token_id")
    return tuple(one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int))
