"""Checks that the rollouts of a step were sampled with the trained weights.

Every push is verified (`push.py`), but a proxy, a restart or another user may change the weights
afterwards. So the log-probs of every reply are compared with the trainer's, server by server,
before the step is saved or learned from:

    float32   no token differs by more than 1e-4 nats / max(temperature, 0.1)
    others    the mean is at most 0.25 nats, and not both above 0.05 nats and above ten times the
              median of earlier steps (after three of them)

The dtype is the trainer's. A step that needs old log-probs reuses those computed here.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Self

import torch

from soulkit.errors import UserError
from soulkit.metrics.intervals import finite_value
from soulkit.models.base import Sampler
from soulkit.models.vllm.adapters import Distance
from soulkit.models.vllm.capabilities import EXACT, GROSS
from soulkit.runs.folder import note_start
from soulkit.train.model.prepare import Scores, needs_old, scores_by_key
from soulkit.train.objectives.sequences import Span, TrainSequence, emitted_spans
from soulkit.train.rollouts.push import ServedPolicy
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import PushCost, SamplerGap, read_step_lines
from soulkit.types import Completion, Record, Trace

LEAST_TEMPERATURE = 0.1
"""The float32 bound grows with 1 / temperature, down to this temperature."""
NOTICEABLE = 0.05
"""Mean gap in nats, in lower precision, below which a jump is not an error."""
JUMP = 10.0
"""Allowed factor over the median of earlier steps' mean gaps."""
LEAST_STEPS = 3
"""Number of earlier steps that the median needs."""
UNCHECKED = "unchecked_rollouts"
"""Key in `environment.json` for the reason why rollouts could not be checked."""


class WrongWeights(UserError):
    """Rollouts of a step were not sampled with the trained weights."""


@dataclass(frozen=True, slots=True)
class CheckedRollouts:
    """Result of the check of a step; empty if the rollouts were sampled in this process."""

    scores: Scores = field(default_factory=dict)
    gap: SamplerGap | None = None
    push: PushCost = field(default_factory=PushCost)
    seconds: float = 0.0


NOTHING_CHECKED = CheckedRollouts()


@dataclass
class RolloutCheck:
    """Checks the rollouts of every step of a run that samples with vLLM servers."""

    loop: Loop
    sampler: Sampler
    earlier: list[float] = field(default_factory=list)
    """Mean gaps of earlier steps in nats."""
    told: bool = False
    """Whether this process has printed that rollouts cannot be checked."""

    @classmethod
    def of(cls, loop: Loop, sampler: Sampler) -> Self:
        """The check of a run; a resumed run reads the earlier gaps from its metrics."""
        means = (line.learned.sampler.mean for line in read_step_lines(loop.run.metrics))
        return cls(loop, sampler, [mean for mean in means if mean is not None])

    def __call__(
        self, step: int, records: Sequence[Record], sequences: Sequence[TrainSequence]
    ) -> CheckedRollouts:
        """Compare all replies of `records`, and compute the old log-probs that `sequences` need.

        WrongWeights names the servers whose log-probs differ too much from the trainer's. The
        step's replies are then void in the journal, and a checkpoint saves the earlier steps.
        """
        if not isinstance(self.sampler, ServedPolicy):
            return NOTHING_CHECKED
        self.loop.reporter.phase("checking rollouts")
        started, pusher = time.monotonic(), self.sampler.pusher
        scores = self._scores(records, sequences)
        compared, unchecked = by_server(records, scores)
        apart = {server: Distance.between(*pair) for server, pair in compared.items()}
        self._refuse_wrong(step, apart)
        self._note_unchecked(step, records, unchecked)
        gap = SamplerGap(unchecked=unchecked.total())
        if compared:
            whole = Distance.between(
                [logs for theirs, _ in compared.values() for logs in theirs],
                [logs for _, ours in compared.values() for logs in ours],
            )
            gap = replace(gap, mean=whole.mean, largest=whole.largest)
            self.earlier.append(whole.mean)
        push_seconds, pusher.seconds = pusher.seconds, 0.0
        proof = finite_value(pusher.distance.largest) if pusher.distance else None
        push = PushCost(push_seconds=round(push_seconds, 3), proof=proof)
        return CheckedRollouts(scores, gap, push, time.monotonic() - started)

    def _scores(self, records: Sequence[Record], sequences: Sequence[TrainSequence]) -> Scores:
        """Log-probs of the replies, and log-probs and entropies that the update needs."""
        config, policy = self.loop.config, self.loop.policy
        trained = [s for s in sequences if s.weight > 0]
        wanted = [s.span for s in trained if s.loss == "policy"]
        spans = [span for trace in traces_of(records) for span in trained_spans(trace)]
        old = needs_old(trained, config)
        if old:
            spans += wanted
        return scores_by_key(policy, spans, config.tokens_per_batch, "values" if old else "none")

    def _refuse_wrong(self, step: int, apart: Mapping[str, Distance]) -> None:
        """WrongWeights if a server's gap is too large; the step is then void in the journal."""
        policy = self.loop.policy
        exact, temperature = policy.computed == "float32", policy.temperature
        broken = {
            server: bound for server, gap in apart.items()
            if (bound := exceeded_bound(gap, temperature, self.earlier, exact=exact))
        }  # fmt: skip
        if not broken:
            return
        error = self._error(step, {server: (apart[server], broken[server]) for server in broken})
        if self.loop.journal is not None:
            why = f"{error.what} {error.why}"
            self.loop.journal.void(self.sampler.policy_version, step, why)
        if self.loop.step:
            self.loop.checkpoint(within_step=True)
        raise error

    def _error(self, step: int, broken: Mapping[str, tuple[Distance, str]]) -> WrongWeights:
        assert isinstance(self.sampler, ServedPolicy)
        some = f"one of {', '.join(self.sampler.pusher.fleet.urls)}"
        names = {server: server or some for server in broken}
        found = "; ".join(
            f"{names[server]}: {gap.words() if math.isfinite(gap.mean) else 'not finite'}, "
            f"the limit is {bound}"
            for server, (gap, bound) in broken.items()
        )
        return WrongWeights(
            f"The rollouts of step {step} from {', '.join(names.values())} were not sampled with "
            "the trained weights.",
            f"The log-probs of their tokens differ from the trainer's ({found}). The step was not "
            "used for training, and its rollouts are discarded.",
            "Check the server at that address (a proxy, a restart, another adapter), then run the "
            "same command again to repeat this step.",
        )

    def _note_unchecked(
        self, step: int, records: Sequence[Record], unchecked: Counter[str]
    ) -> None:
        """Print and record, once per process, that replies came without log-probs."""
        if not unchecked or self.told:
            return
        self.told = True
        total = sum(len(trace.turns) for trace in traces_of(records))
        servers = ", ".join(server or "a server" for server in unchecked)
        line = (
            f"step {step}: {unchecked.total()} of {total} replies came without usable log-probs "
            f"({servers}), so the weights that sampled them cannot be checked"
        )
        note_start(self.loop.run.path, {UNCHECKED: line})
        self.loop.reporter.note(f"{line}; start the server with --logprobs-mode processed_logprobs")


def exceeded_bound(
    gap: Distance, temperature: float, earlier: Sequence[float], *, exact: bool
) -> str:
    """The bound that a server's gap exceeds, as text; empty if none.

    `earlier` are the mean gaps of earlier steps; `exact`: the trainer computes in float32.
    """
    if exact:
        most = EXACT / max(temperature, LEAST_TEMPERATURE)
        return "" if gap.largest <= most else f"{most:.2g} nats at any token in float32"
    if not gap.mean <= GROSS:
        return f"{GROSS:g} nats on average"
    usual = median(earlier) if len(earlier) >= LEAST_STEPS else float("inf")
    if gap.mean > NOTICEABLE and gap.mean > JUMP * usual:
        most = max(NOTICEABLE, JUMP * usual)
        return f"{most:.2g} nats on average ({usual:.2g} in earlier steps)"
    return ""


Compared = tuple[list[Sequence[float]], list[Sequence[float]]]
"""Log-probs of the same replies by the server and by the trainer, in nats."""


def by_server(
    records: Sequence[Record], scores: Scores
) -> tuple[dict[str, Compared], Counter[str]]:
    """Each server's and the trainer's log-probs of its replies; counts of replies without any."""
    compared: dict[str, Compared] = defaultdict(lambda: ([], []))
    unchecked: Counter[str] = Counter()
    for trace in traces_of(records):
        for reply, ours in scored_replies(trace, scores):
            if len(reply.logprobs) == len(ours):
                theirs, trainers = compared[reply.server]
                theirs.append(reply.logprobs)
                trainers.append(ours)
            else:
                unchecked[reply.server] += 1
    return dict(compared), unchecked


def scored_replies(trace: Trace, scores: Scores) -> Iterator[tuple[Completion, list[float]]]:
    """Every non-empty reply of a trace, with the trainer's log-probs of its tokens."""
    parts = [scores[span.key][0] for span in trained_spans(trace)]
    logs = torch.cat(parts).tolist() if parts else []
    start = 0
    for turn in trace.turns:
        end = start + len(turn.completion.token_ids)
        if end > start:
            yield turn.completion, logs[start:end]
        start = end


def trained_spans(trace: Trace) -> list[Span]:
    """The sequences of a trace that contain sampled tokens, in the order of its turns."""
    return [span for span in emitted_spans(trace) if span.n_trained]


def traces_of(records: Sequence[Record]) -> Iterator[Trace]:
    """The traces of all records, including unscored ones."""
    return chain.from_iterable(record.episode.traces for record in records)
