"""How much a policy remembers of the canaries in its training data, and a limit on it.

A canary's rank is its place by log-probability among ALTERNATIVES other secrets of the same form,
given the conversation it was planted in and what stands before it. Its exposure is
log2((ALTERNATIVES + 1) / rank) bits: about 1 for half of the secrets that were never seen, and at
most 9.0 (Carlini et al., The Secret Sharer, 2019, with ranks among samples). Equal log-probs count
against the canary.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from soulkit.data.corpora.settings import hub_address, source_files
from soulkit.data.corpora.stream import read_lessons
from soulkit.data.privacy.canaries import SecretCanary, canary_list, planted_chats, read_canaries
from soulkit.errors import ConfigError, RunStopped
from soulkit.models.local.sampler import context_limit
from soulkit.runs.conditions import CorpusFacts
from soulkit.train.config import TrainConfig
from soulkit.train.model.packing import common_prefix
from soulkit.train.model.policy import Policy
from soulkit.train.model.teacher import Teacher
from soulkit.train.objectives.sequences import Span
from soulkit.train.state.checkpoint import replace_folder
from soulkit.train.state.metrics import read_step_lines
from soulkit.types import Segment

ALTERNATIVES = 512
ROOM = 1 << 15
"""Computed tokens in the forward pass of a canary and its alternatives."""
MOST_ABOVE = 2
"""A run with --max-exposure stops at this many checkpoints that are not below it."""


def exposure(rank: int) -> float:
    """Bits that a rank tells about its canary."""
    return math.log2((ALTERNATIVES + 1) / rank)


@dataclass(frozen=True, slots=True)
class CanaryPlace:
    """Where a canary is said."""

    context: tuple[Segment, ...]
    before: str = ""
    """What the person says in the same message before it."""


def canary_lists(config: TrainConfig) -> list[Path]:
    """The lists of the canaries in the conversations of a run."""
    local = [one.path for one in config.corpora if hub_address(one.path) is None]
    lists = [canary_list(file) for path in local for file in source_files(path)]
    return [path for path in lists if path.is_file()]


def canary_facts(path: Path) -> CorpusFacts:
    """Number and hash of the canaries in a list, for the run's record."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return CorpusFacts(rows=len(read_canaries(path)), sha256=digest)


def canary_places(path: Path, canaries: Sequence[SecretCanary]) -> list[CanaryPlace]:
    """Where each canary of a list is said first; those never planted take the others' places. If
    the planted conversations are gone, every canary opens a conversation."""
    chats, places = planted_chats(path), dict[str, CanaryPlace]()
    lessons = read_lessons(chats, side=canaries[0].side) if chats.is_file() else ()
    missing = {one.text for one in canaries if one.repeats}
    for lesson in lessons:
        for number, learned in enumerate(lesson.trained):
            text_there = lesson.segments[number].text
            for text in [text for text in missing if learned and text in text_there]:
                places[text] = CanaryPlace(
                    lesson.segments[:number], text_there[: text_there.index(text)]
                )
                missing.remove(text)
    others = list(places.values()) or [CanaryPlace(())]
    return [places.get(one.text) or others[n % len(others)] for n, one in enumerate(canaries)]


def continued(policy: Policy, context: Sequence[Segment], texts: Sequence[str]) -> list[Span]:
    """`texts` as replies, trained from the first token on that differs between them. A context that
    does not fit is left out."""
    ids = [tuple(policy.encode_reply(text)[:-1]) for text in texts]
    same = min(common_prefix(ids[0], other) for other in ids[1:])
    limit, longest = context_limit(policy.model, None), max(map(len, ids))
    prompt = tuple(policy.renderer.prompt_ids(context)) if context else ()
    if not prompt or (limit and len(prompt) + longest > limit):
        prompt = tuple(policy.renderer.tokenize(policy.renderer.opening()))
    first = len(prompt) + same
    return [
        Span((*prompt, *one), tuple(n >= first for n in range(len(prompt) + len(one))), ())
        for one in ids
    ]


def canary_spans(policy: Policy, canary: SecretCanary, place: CanaryPlace) -> list[Span]:
    """The canary, then its alternatives, each up to its last digit."""
    before = place.before + canary.prefix
    secrets = (canary.secret, *canary.alternatives(ALTERNATIVES))
    digits = [re.sub(r"\D+$", "", secret) for secret in secrets]
    return continued(policy, place.context, [before + one for one in digits])


def canary_rank(policy: Policy, spans: Sequence[Span]) -> int:
    """The rank of the first sequence among all, 1 for the likeliest."""
    sums = [float(one.sum()) for one in Teacher(policy).log_probs(spans, ROOM)]
    return 1 + sum(not other < sums[0] for other in sums[1:])


@dataclass
class ExposureLimit:
    """Keeps in `model/` the newest weights whose once-planted canaries have a median exposure below
    a limit, and ends the run at the second checkpoint with another one."""

    limit: float
    run: Path
    policy: Policy
    canaries: Mapping[SecretCanary, CanaryPlace]
    measured: dict[int, float] = field(default_factory=dict)
    """Steps done → median exposure."""

    @classmethod
    def of(cls, config: TrainConfig, run: Path, policy: Policy) -> ExposureLimit | None:
        """The limit of a run, with what it measured before a resume; None without one."""
        if config.max_exposure is None:
            return None
        once: dict[SecretCanary, CanaryPlace] = {}
        for path in canary_lists(config):
            listed = read_canaries(path)
            places = zip(listed, canary_places(path, listed), strict=True)
            once |= {one: place for one, place in places if one.repeats == 1}
        lines = read_step_lines(run / "metrics.jsonl")
        before = {line.step + 1: line.exposure for line in lines if line.exposure is not None}
        return cls(config.max_exposure, run, policy, once, before)

    def after(self, step: int) -> float:
        """The median exposure after `step` steps; saves the weights if it is below the limit."""
        ranks = [
            canary_rank(self.policy, canary_spans(self.policy, one, place))
            for one, place in self.canaries.items()
        ]
        self.measured[step] = value = median(map(exposure, ranks))
        if value < self.limit:
            replace_folder(self.run / "model", partial(self.policy.save, step=step))
        return value

    @property
    def reached(self) -> bool:
        """Whether the run ends now."""
        return sum(value >= self.limit for value in self.measured.values()) >= MOST_ABOVE

    def kept(self) -> int:
        """Number of steps of the weights in `model/`; RunStopped if no checkpoint was below."""
        below = [step for step, value in self.measured.items() if value < self.limit]
        if below:
            return max(below)
        first = min(self.measured)
        raise RunStopped(
            f"No checkpoint has a median exposure below {self.limit:g} bits.",
            f"After {first} steps it is {self.measured[first]:.2f} bits.",
            "Use a smaller --checkpoint-every or --lr, more conversations or a higher "
            "--max-exposure, and another --out.",
        )


def refuse_unlimitable(config: TrainConfig) -> None:
    """ConfigError for --max-exposure without canaries, or with the last checkpoint only."""
    if config.max_exposure is None:
        return
    if not canary_lists(config):
        raise ConfigError(
            "--max-exposure needs canaries in the conversations.",
            f"There is no list such as {canary_list(Path(config.corpora[0].path)).name} beside "
            "them." if config.corpora else "Tasks have none.",
            "Plant some first: soul data plant chats.jsonl -o planted.jsonl",
        )  # fmt: skip
    if config.checkpoint_every >= config.steps:
        raise ConfigError(
            "--max-exposure needs checkpoints to choose from.",
            f"With --checkpoint-every {config.checkpoint_every}, {config.steps} steps have one.",
            f"Use --checkpoint-every {max(1, config.steps // 10)}.",
        )
