"""The weights in training, as vLLM servers sample with them."""

from __future__ import annotations

from collections.abc import Sequence

from soulkit.models.base import TrainedWeights
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.vllm.model import VllmModel
from soulkit.train.pushes.push import Pusher
from soulkit.types import Call, Completion, Sampling, Segment


class ServedPolicy:
    """A Sampler whose weights travel to servers before it samples with them.

    With a `journal`, every reply is recorded before anybody sees it, and what is recorded of the
    same weights is not sampled again. Close it before its servers.
    """

    def __init__(self, model: VllmModel, pusher: Pusher, journal: Journal | None = None) -> None:
        self.model, self.pusher, self.journal = model, pusher, journal
        self.name, self.policy_version = model.name, ""

    @property
    def context_limit(self) -> int | None:
        """Tokens of a prompt with its reply; None: not known."""
        return self.model.context_limit

    def prompt_length(self, context: Sequence[Segment], thinking: bool | None = None) -> int:
        """Tokens of the prompt that `context` becomes."""
        return self.model.prompt_length(context, thinking)

    async def take(self, weights: TrainedWeights) -> None:
        """Sample with these weights from now on; returns once they are proven to be there.

        Raises UserErrors where they are not (`push.py`), and then samples with nothing new.
        """
        served, version = await self.pusher(weights)
        self.model.use(served, version)
        self.policy_version = version

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """One reply; raises as the servers' model does."""
        if self.journal is None:
            return await self.model.complete(context, sampling, call)
        ids = self.model.codec.prompt_ids(context, sampling.thinking)
        key = JournalKey(call, sampling, tuple(ids), self.policy_version)
        recorded_reply = self.journal.one(key)
        if recorded_reply is not None:
            return recorded_reply
        reply = await self.model.complete(context, sampling, call)
        self.journal.write([key], [reply])
        return reply

    async def close(self) -> None:
        """Take the weights away from the servers, and close the connections to them."""
        try:
            await self.pusher.close()
        finally:
            await self.model.close()
