"""Simulated data with known truth: scores by cluster, pairs of runs, drafts with refined twins.

Arrays are simulations × clusters × rows; `mask` excludes rows beyond a cluster's size. Rows of a
cluster share a random level, so they are not independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rng = np.random.Generator


@dataclass(frozen=True)
class Draws:
    """Scores of many simulations."""

    values: Floats
    """simulations × clusters × rows"""
    mask: NDArray[np.bool_]

    @property
    def sums(self) -> Floats:
        """Sum of each cluster; simulations × clusters."""
        return np.where(self.mask, self.values, 0.0).sum(axis=-1)

    @property
    def sizes(self) -> Floats:
        return self.mask.sum(axis=-1).astype(np.float64)

    def rows(self, simulation: int) -> tuple[list[float], list[int]]:
        """(values, their clusters) of one simulation, in the form that the package takes."""
        mask = self.mask[simulation]
        clusters = np.broadcast_to(np.arange(mask.shape[0])[:, None], mask.shape)
        return self.values[simulation][mask].tolist(), clusters[mask].tolist()


@dataclass(frozen=True)
class Kind:
    """One kind of scores."""

    name: str
    truth: float
    draw: Callable[[Rng, int, int], Draws]
    """(random stream, simulations, clusters) → scores."""
    scale: tuple[float, float] | None = (0.0, 1.0)
    yes_no: bool = True

    def events(self, draws: Draws) -> float | None:
        """Expected number of failures or successes in one simulation, whichever is smaller."""
        if self.scale is None:
            return None
        share = (self.truth - self.scale[0]) / (self.scale[1] - self.scale[0])
        return float(draws.mask.sum(axis=(1, 2)).mean()) * min(share, 1 - share)


def ragged(sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of existing rows for clusters of these sizes."""
    mask: NDArray[np.bool_] = np.arange(sizes.max()) < sizes[..., None]
    return mask


def levels(rng: Rng, share: float, correlation: float, shape: tuple[int, int]) -> Floats:
    """A beta-distributed share per cluster with mean `share` and this correlation in a cluster."""
    weight = 1 / correlation - 1
    return rng.beta(share * weight, (1 - share) * weight, shape)


CORRELATION = 0.3


def yes_no(share: float, smallest: int, largest: int) -> Kind:
    """Scores of 0 or 1 in clusters of `smallest` to `largest` rows."""

    def draw(rng: Rng, simulations: int, clusters: int) -> Draws:
        shape = (simulations, clusters)
        mask = ragged(rng.integers(smallest, largest + 1, shape))
        chance = levels(rng, share, CORRELATION, shape)[..., None]
        return Draws((rng.random(mask.shape) < chance).astype(np.float64), mask)

    size = "one row" if largest == 1 else f"{smallest} to {largest} rows"
    return Kind(f"yes or no, {share:g}, {size} a cluster", share, draw)


def _judged(rng: Rng, simulations: int, clusters: int) -> Draws:
    quality = rng.beta(4, 1.2, (simulations, clusters, 1))
    values = rng.binomial(10, np.broadcast_to(quality, (simulations, clusters, 4))) / 10
    return Draws(values, np.ones(values.shape, dtype=bool))


def _continuous(rng: Rng, simulations: int, clusters: int) -> Draws:
    values = rng.beta(3, 0.7, (simulations, clusters, 1))
    return Draws(values, np.ones(values.shape, dtype=bool))


def _signed(rng: Rng, simulations: int, clusters: int) -> Draws:
    level = rng.beta(6, 3, (simulations, clusters, 1))
    values = np.clip(level + rng.normal(0, 0.08, (simulations, clusters, 2)), 0, 1)
    return Draws(-5 + 15 * values, np.ones(values.shape, dtype=bool))


def _open(rng: Rng, simulations: int, clusters: int) -> Draws:
    shape = (simulations, clusters)
    mask = ragged(rng.integers(1, 7, shape))
    values = 20 + 4 * rng.normal(size=(*shape, 1)) + 5 * rng.normal(size=mask.shape)
    return Draws(values, mask)


def _signed_truth() -> float:
    """The mean of ten million draws, because clipping shifts the mean a little."""
    rng = np.random.default_rng(0)
    return float(_signed(rng, 1000, 5000).values.mean())


MEANS = (
    yes_no(0.5, 2, 10),
    yes_no(0.8, 2, 10),
    yes_no(0.95, 2, 10),
    yes_no(0.7, 1, 1),
    yes_no(0.6, 1, 40),
    Kind("judged 0 to 10, skewed, four rollouts a cluster", 4 / 5.2, _judged, yes_no=False),
    Kind("continuous, skewed, one row a cluster", 3 / 3.7, _continuous, yes_no=False),
    Kind("−5 to 10, two rollouts a cluster", _signed_truth(), _signed, (-5.0, 10.0), False),
    Kind("no scale, 1 to 6 rows a cluster", 20.0, _open, None, False),
    yes_no(0.9, 1, 40),
    yes_no(0.95, 1, 40),
    yes_no(0.98, 1, 40),
)


# -- pairs of runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """A pair of runs over the same rows."""

    name: str
    truth: float
    draw: Callable[[Rng, int, int], tuple[Draws, Draws]]
    yes_no: bool = True


def _accuracies(rng: Rng, simulations: int, clusters: int) -> tuple[Draws, Draws]:
    shape = (simulations, clusters)
    mask = ragged(rng.integers(2, 6, shape))
    chance = levels(rng, 0.7, 0.3, shape)[..., None]
    a, b = ((rng.random(mask.shape) < chance).astype(np.float64) for _ in range(2))
    return Draws(a, mask), Draws(b, mask)


def _alike(rng: Rng, simulations: int, clusters: int) -> tuple[Draws, Draws]:
    """Two checkpoints of one model that agree on four of five answers."""
    a, b = _accuracies(rng, simulations, clusters)
    same = rng.random(a.values.shape) < 0.8
    return a, Draws(np.where(same, a.values, b.values), a.mask)


def repairs(share: float, smallest: int = 1, largest: int = 1, broken: float = 0.0) -> Pairs:
    """B repairs this share of all rows and breaks the share `broken`; other answers are equal. The
    repaired share differs between clusters of several rows."""

    def draw(rng: Rng, simulations: int, clusters: int) -> tuple[Draws, Draws]:
        shape = (simulations, clusters)
        mask = ragged(rng.integers(smallest, largest + 1, shape))
        chance = np.full(shape, share) if largest == 1 else levels(rng, share, CORRELATION, shape)
        moved, right = rng.random(mask.shape), rng.random(mask.shape) < 0.7
        repaired = moved < chance[..., None]
        lost = ~repaired & (moved > 1 - broken)
        a = np.where(repaired, 0.0, np.where(lost, 1.0, right))
        b = np.where(repaired, 1.0, np.where(lost, 0.0, right))
        return Draws(a, mask), Draws(b, mask)

    size = "one row" if largest == 1 else f"{smallest} to {largest} rows"
    undone = f", breaks {broken:.0%}" if broken else ", breaks none"
    return Pairs(
        f"yes or no, B repairs {share:.0%}{undone}, {size} a cluster", share - broken, draw
    )


def _judges(rng: Rng, simulations: int, clusters: int) -> tuple[Draws, Draws]:
    """Judged scores; each cluster favours one of the models."""
    shape = (simulations, clusters, 1)
    level, turn = rng.beta(4, 2, shape), rng.normal(0, 0.15, shape)
    mask = ragged(rng.integers(1, 9, shape[:2]))
    a, b = (
        np.clip(level + sign * turn + rng.normal(0, 0.1, mask.shape), -1, 2) for sign in (-1, 1)
    )
    return Draws(a, mask), Draws(b, mask)


def _better(rng: Rng, simulations: int, clusters: int) -> tuple[Draws, Draws]:
    a, b = _judges(rng, simulations, clusters)
    return a, Draws(b.values + 0.1, b.mask)


PAIRS = (
    Pairs("yes or no, equal models", 0.0, _accuracies),
    Pairs("yes or no, equal models, four of five answers alike", 0.0, _alike),
    Pairs("judged, equal models, 1 to 8 rows a cluster", 0.0, _judges, yes_no=False),
    Pairs("judged, B better by 0.1", 0.1, _better, yes_no=False),
    repairs(0.02),
    repairs(0.03),
    repairs(0.05),
    repairs(0.1),
    repairs(0.05, 1, 10),
    repairs(0.1, 1, 10),
    repairs(0.05, broken=0.05),
)


# -- drafts and refined rollouts -------------------------------------------------------------------

DRAFTS, ROWS = 8, 3


TRIPLES = {
    "yes or no, .1 / .9 / .8": (0.1, 0.9, 0.8), "yes or no, .05 / .97 / .9": (0.05, 0.97, 0.9),
    "yes or no, .3 / .7 / .5": (0.3, 0.7, 0.5), "grades, .3 / .6 / .55": (0.3, 0.6, 0.55),
}  # fmt: skip
"""Kind of score → means of base, expert and generalist."""


def triple(rng: Rng, simulations: int, clusters: int, kind: str) -> tuple[Floats, Floats, Floats]:
    """Scores of base, expert and generalist on the same rows, simulations × clusters. The row's
    difficulty decides half of the right-or-wrong answers and all grades."""
    shape = (simulations, clusters)
    ease = rng.random(shape)

    def of(mean: float) -> Floats:
        if kind.startswith("grades"):
            return mean + 0.3 * (ease - 0.5) + rng.normal(0.0, 0.15, shape)
        shared = rng.random(shape) < 0.5
        answers: Floats = (np.where(shared, ease, rng.random(shape)) < mean).astype(float)
        return answers

    base, expert, generalist = map(of, TRIPLES[kind])
    return base, expert, generalist


def reward_groups(
    rng: Rng, simulations: int, clusters: int, gain: float
) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """(drafts, whether each was refined, refined), simulations × clusters × rows × drafts.

    If `gain` is 0, only failed drafts get feedback, so a gap against their own draft would be large
    and wrong. Otherwise all drafts get feedback and `gain` is the true gap.
    """
    shape = (simulations, clusters, ROWS, DRAFTS)
    chance = (1 - gain) * levels(rng, 0.5, 0.3, shape[:2])[..., None, None]
    drafts = (rng.random(shape) < chance).astype(np.float64)
    refined = (rng.random(shape) < chance + gain).astype(np.float64)
    return drafts, np.ones(shape, dtype=bool) if gain else drafts == 0, refined


# -- batch metrics ---------------------------------------------------------------------------------

LABELS = {
    "one text often": np.array([0.6, 0.2, 0.1, 0.05, 0.05]),
    "five texts about equally often": np.array([0.3, 0.25, 0.2, 0.15, 0.1]),
}
"""Shares of the texts that a run may produce."""
WORDS = 40


def confusion(rng: Rng, simulations: int, clusters: int) -> Floats:
    """(true positives, false positives, false negatives) per cluster of four rows."""
    skill = levels(rng, 0.75, 0.2, (simulations, clusters))
    positives = rng.binomial(4, 0.5, (simulations, clusters))
    hits = rng.binomial(positives, skill)
    alarms = rng.binomial(4 - positives, 1 - skill)
    return np.stack([hits, alarms, positives - hits], axis=-1).astype(np.float64)


def labels(rng: Rng, simulations: int, clusters: int, shares: Floats) -> Floats:
    """Distance, 0 or 1, between the texts of two clusters: simulations × clusters × clusters."""
    says = rng.choice(len(shares), (simulations, clusters), p=shares)
    return (says[:, :, None] != says[:, None, :]).astype(np.float64)


def word_sets(rng: Rng, simulations: int, clusters: int) -> Floats:
    """1 − Jaccard between the texts of two clusters: simulations × clusters × clusters.
    Most texts contain the common words; texts differ in length."""
    common = 1.2 / (1 + np.arange(WORDS) / 3)
    chance = np.clip(common * rng.beta(2, 2, (simulations, clusters, 1)), 0, 1)
    spoken = (rng.random((simulations, clusters, WORDS)) < chance).astype(np.float64)
    both, size = spoken @ np.swapaxes(spoken, -1, -2), spoken.sum(axis=-1)
    either = size[:, :, None] + size[:, None, :] - both
    return np.where(either > 0, 1 - both / np.maximum(either, 1), 0.0)


def mean_distance(distances: Floats) -> float:
    """Mean distance over all pairs of different clusters."""
    clusters = distances.shape[-1]
    apart = ~np.eye(clusters, dtype=bool)
    return float(distances[..., apart].mean())


def jaccard_truth() -> float:
    """The mean over eight million pairs."""
    return mean_distance(word_sets(np.random.default_rng(0), 40, 450))
