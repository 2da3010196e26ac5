"""Room in a whole episode: under `reference` its replies share one limit with all that is heard.

8,192 tokens after the prompt, words of all sides and the marks between them included; where fewer
than ten are left, nothing more is sampled (the published rollout's token accounting).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soulkit.models.api.wire import estimated_tokens, to_messages
from soulkit.models.base import Player
from soulkit.types import Segment, Turn

EPISODE_TOKENS, LEAST_TOKENS = 8192, 10
"""What an episode may have after its prompt, and what must be left of it for a turn."""


def episode_room(player: Player, turns: Sequence[Turn], context: Sequence[Segment]) -> int:
    """Tokens that are left of the episode."""
    return EPISODE_TOKENS - tokens_since(player, turns, context)


def within_room(player: Player, room: int) -> Player:
    """The player, whose reply may have no more than `room` tokens."""
    limit = min(player.sampling.max_tokens, room)
    return replace(player, sampling=replace(player.sampling, max_tokens=limit))


def tokens_since(player: Player, turns: Sequence[Turn], context: Sequence[Segment]) -> int:
    """Tokens of `context` beyond the prompt of the first turn; 0 before it.

    A local model counts them. Of a served one the server counted up to its last reply, and what was
    heard since is guessed at four bytes a token; servers that count nothing are guessed throughout.
    """
    if not turns:
        return 0
    first, last = turns[0], turns[-1]
    count = getattr(player.model, "prompt_length", None)
    if count is not None:
        thinking = player.sampling.thinking
        return int(count(context, thinking)) - len(first.completion.prompt_ids)
    counted, usage = first.completion.usage.prompt_tokens, last.completion.usage
    if not counted or not usage.prompt_tokens:
        return int(_guess(context) - _guess(first.context))
    fresh = context[len(last.context) + 1 :]  # the reply itself stands between the two
    said = usage.completion_tokens - usage.reasoning_tokens  # reasoning is in no later prompt
    return usage.prompt_tokens + said + int(_guess(fresh)) - counted


def _guess(context: Sequence[Segment]) -> float:
    return estimated_tokens(to_messages(context), 0)
