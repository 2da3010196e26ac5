"""One reply from two contexts: of each token a switch says which of them it is drawn from.

The *expert* context holds something that the *naive* one lacks. Both are kept in step: every drawn
token goes behind either prompt, whoever drew it, so that the two conditionals always share the
reply so far. Which of them draws the next token is a Bernoulli variable of a random stream of its
own. The token's own number is the one that the call would have had in ordinary sampling: with a
share of 1 a reply is the one that the expert context gives alone, with 0 that of the naive one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.models.local.decode import Decoder, Windows, uniforms
from soulkit.types import Call

SWITCH = "switch"
"""Purpose of the calls whose random numbers say who draws."""


def expert_turns(seed: int | None, call: Call, share: float, n: int) -> np.ndarray:
    """Of the first `n` tokens of a reply: whether the expert context draws them (bool [n]).

    Each with probability `share`, and none depends on another.
    """
    return uniforms(seed, replace(call, purpose=f"{call.purpose}{SWITCH}"), n) < share


class MixedDecoder:
    """Two decoders of the same rows in lockstep; a row's logits are those of whoever draws."""

    def __init__(
        self,
        model: Any,
        windows: Windows,
        prompts: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        turns: np.ndarray,
        pad: int,
    ) -> None:
        """`prompts` are those of the naive and of the expert context, one a row each; `turns` is
        bool [rows, steps], True where the expert draws."""
        most = turns.shape[1]
        self.naive, self.expert = (Decoder(model, windows, p, pad, most) for p in prompts)
        self.turns, self.step = torch.from_numpy(turns).to(self.naive.device), 0

    @property
    def rows(self) -> list[int]:
        return self.naive.rows

    def first(self) -> Tensor:
        """Computes both prompts; the logits [rows, vocabulary] of each row's first token."""
        return self._choose(self.naive.first(), self.expert.first())

    def next(self, tokens: Tensor) -> Tensor:
        """The logits [rows, vocabulary] after `tokens` [rows], in the order of `rows`."""
        self.step += 1
        ordered = tokens[self._places(self.rows, self.expert.rows)]
        return self._choose(self.naive.next(tokens), self.expert.next(ordered))

    def keep(self, alive: Sequence[bool]) -> None:
        """Forget the rows that are not `alive` in both."""
        lives = dict(zip(self.rows, alive, strict=True))
        self.expert.keep([lives[row] for row in self.expert.rows])
        self.naive.keep(alive)

    def _choose(self, naive: Tensor, expert: Tensor) -> Tensor:
        by_expert = self.turns[self.rows, self.step]
        expert = expert[self._places(self.expert.rows, self.rows)]
        return torch.where(by_expert[:, None], expert, naive)

    def _places(self, before: Sequence[int], after: Sequence[int]) -> Tensor:
        """Where each row of `after` stands in `before`."""
        place = {row: index for index, row in enumerate(before)}
        return torch.tensor([place[row] for row in after], device=self.naive.device)


def no_two_contexts(name: str) -> ConfigError:
    """The refusal of a model whose memory is not what `decode.py` expects."""
    return ConfigError(
        f"'{name}' cannot write from two contexts at once.",
        "Its layers (recurrent states, kernels without masks) keep no memory that two prompts "
        "could be kept in step with.",
        "Take a model whose layers are all attention, or --objective nll.",
    )
