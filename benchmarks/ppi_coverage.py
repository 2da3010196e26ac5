"""How often does the interval of a bias-corrected judge mean contain the truth?

    .venv/bin/python benchmarks/ppi_coverage.py            # two minutes
    .venv/bin/python benchmarks/ppi_coverage.py --quick    # 200 simulations each, no bounds

Clusters have one to six episodes on a scale from 0 to 10, with a third of the variance between
clusters. All episodes are judged, some are labelled. The truth is the mean of the distribution, so
the intervals must include the sampling of clusters. The corrected mean is compared with the
interval of the judge, which ignores its bias, and with that of the labels alone.

Exit code 1 if the corrected mean covers the truth in less than 93 % or more than 99.5 % of the
simulations, or its interval is over 10 % wider than that of the labels (from twenty clusters on).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from soulkit.metrics.ppi import ClusterSums, CorrectedMean, corrected_mean

Floats = np.ndarray
Judge = Callable[[Floats, np.random.Generator], Floats]

SCALE = (0.0, 10.0)
CLUSTERS = 500
LABELLED = (10, 20, 50, 100)
LEAST, MOST, WIDEST = 0.93, 0.995, 1.10
WIDTH_FROM = 20
"""The width has a bound from this many labelled clusters on; with fewer, tuning costs too much."""
SIMULATIONS = 4000
WARM_UP = 400_000


def noisy(truth: Floats, rng: np.random.Generator, spread: float) -> Floats:
    return truth + rng.normal(0, spread, truth.shape)


JUDGES: dict[str, Judge] = {
    "good": lambda y, rng: noisy(y, rng, 0.7),
    "two points too kind": lambda y, rng: noisy(y, rng, 0.7) + 2,
    "compressed to the middle": lambda y, rng: 5 + 0.4 * (noisy(y, rng, 0.7) - 5),
    "never below seven": lambda y, rng: np.maximum(noisy(y, rng, 0.7), 7),
    "noise about seven": lambda y, rng: noisy(np.full_like(y, 7), rng, 2),
    "anti-correlated": lambda y, rng: 10 - noisy(y, rng, 0.7),
    "kind to the poor alone": lambda y, rng: noisy(np.where(y < 5, y + 4, y), rng, 0.7),
    "always seven": lambda y, rng: np.full_like(y, 7),
}


@dataclass
class Tally:
    """Totals over the simulations of one case."""

    corrected: int = 0
    judged: int = 0
    labelled: int = 0
    width: float = 0.0
    labelled_width: float = 0.0
    power: float = 0.0
    n: int = 0
    clusters: int = 0

    def line(self, judge: str) -> str:
        shares = [self.corrected / self.n, self.labelled / self.n, self.judged / self.n]
        covered = "".join(f"{share:10.3f}" for share in shares)
        widths = f"{self.width / self.n:8.2f}{self.labelled_width / self.n:9.2f}"
        return f"{judge:26}{self.clusters:9}{covered}{widths}{self.power / self.n:8.2f}"

    @property
    def broken(self) -> str:
        share = self.corrected / self.n
        if not LEAST <= share <= MOST:
            return f"covers {share:.3f}"
        wide = self.clusters >= WIDTH_FROM and self.width > WIDEST * self.labelled_width
        return f"{self.width / self.labelled_width:.2f} times as wide as the labels" if wide else ""


def drawn(clusters: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """(the true value of every episode, the cluster of each)."""
    sizes = rng.integers(1, 7, clusters)
    level = np.repeat(rng.normal(0, 1.15, clusters), sizes)
    values = np.round(5.5 + level + rng.normal(0, 1.63, sizes.sum()))
    return np.clip(values, *SCALE), np.repeat(np.arange(clusters), sizes)


def sums(values: Floats, of: Floats, clusters: int) -> Floats:
    return np.bincount(of, values, minlength=clusters)


NOBODY = ClusterSums(np.zeros(0), np.zeros(0), np.zeros(0))


def holds(mean: CorrectedMean, truth: float) -> bool:
    """Whether an interval exists and contains the truth."""
    return bool(abs(mean.value - truth) <= mean.half_width)


def simulate(judge: Judge, labelled: int, n: int, truth: float, seed: int) -> Tally:
    """`n` simulations of judged, partly labelled clusters. Clusters are exchangeable, so the first
    ones are a random sample."""
    rng, tally = np.random.default_rng(seed), Tally(n=n, clusters=labelled)
    for _ in range(n):
        values, of = drawn(CLUSTERS, rng)
        grades = np.clip(judge(values, rng), *SCALE)
        people, machine = sums(values, of, CLUSTERS), sums(grades, of, CLUSTERS)
        sizes = np.bincount(of, minlength=CLUSTERS).astype(float)
        part = ClusterSums(people[:labelled], machine[:labelled], sizes[:labelled])
        rest = ClusterSums(people[labelled:], machine[labelled:], sizes[labelled:])
        alone = ClusterSums(machine, machine, sizes)
        mean, labels = corrected_mean(part, rest), corrected_mean(part, NOBODY)
        tally.corrected += holds(mean, truth)
        tally.labelled += holds(labels, truth)
        tally.judged += holds(corrected_mean(alone, NOBODY), truth)
        tally.width += 2 * mean.half_width
        tally.labelled_width += 2 * labels.half_width
        tally.power += mean.power
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="200 simulations each, without checking bounds"
    )
    quick = parser.parse_args().quick
    n, start = 200 if quick else SIMULATIONS, time.monotonic()
    values, _ = drawn(WARM_UP, np.random.default_rng(0))
    truth = float(values.mean())
    heads = "".join(f"{head:>10}" for head in ("corrected", "labels", "judge"))
    print(f"{n} simulations each; {CLUSTERS} judged clusters; truth {truth:.3f}")
    print(f"{'judge':26}{'labelled':>9}{heads}{'width':>8}{'labels':>9}{'lambda':>8}")
    broken = []
    for number, (name, judge) in enumerate(JUDGES.items()):
        for labelled in LABELLED:
            tally = simulate(judge, labelled, n, truth, 1000 * number + labelled)
            print(tally.line(name), flush=True)
            broken += [f"{name}, {labelled} labelled: {tally.broken}"] if tally.broken else []
    print(f"{time.monotonic() - start:.0f} s")
    for line in [] if quick else broken:
        print(f"out of bounds: {line}")
    return int(bool(broken) and not quick)


if __name__ == "__main__":
    sys.exit(main())
