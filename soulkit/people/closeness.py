"""How close a model's turns are to what people wrote at the same places, without a judge.

Three numbers, because each is blind to something:

* distance: root mean square over the lines (`texts.py`) of the difference of means, in standard
  deviations of people's turns. Blind to nonsense, and to what was said before.
* words: share of places where a classifier of character n-grams finds the model's text more like a
  model's than the person's (an AUC over pairs; .5 is chance). Blind to what was said before.
* context: share of places where the person's turn fits its context better than the model's, by a
  classifier that learned from people (.5: as well). Blind to style.

`ratios` puts them on one scale, on which 1 is what chance makes of people: each number (the shares
less .5) over its 95th percentile between random halves of the people, drawn within each kind of
conversation. The headline is the largest ratio. Every person counts equally.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from soulkit.errors import DataError
from soulkit.metrics.comparisons import (
    PairedDifference,
    holm,
    jackknife_difference,
    paired_difference,
    sign_flip_p,
)
from soulkit.metrics.intervals import Floats, estimate, jackknife
from soulkit.people.classifiers import ContextFit, Ints, wins, word_wins
from soulkit.people.texts import LINES, Vocabulary, turn_features
from soulkit.people.turns import PersonTurn, by_person

DRAWS, CHANCE = 1000, 0.95
FOLDS, LEAST_PERSONS = 5, 4


class Population:
    """What people wrote, and how much they differ among themselves. DataError for too few."""

    def __init__(self, turns: Sequence[PersonTurn], seed: int = 0) -> None:
        persons = by_person(turns)
        if len(persons) < LEAST_PERSONS:
            raise DataError(
                f"The conversations are of fewer than {LEAST_PERSONS} persons ({len(persons)}).",
                "Means are compared over persons, and classifiers are tested on unseen persons.",
                "Add conversations of other persons; every row names its own as `person`.",
            )
        self.turns, self.size, self.seed = tuple(turns), len(persons), seed
        index = {person: number for number, person in enumerate(persons)}
        self.owner: Ints = np.array([index[turn.person] for turn in turns])
        self.kinds = [tuple(sorted({turn.source for turn in human})) for human in persons.values()]
        self.texts, self.vocabulary = [turn.text for turn in turns], Vocabulary(turns)
        ends = [float(turn.is_last) for turn in turns]
        self.features = turn_features(turns, self.texts, ends, self.vocabulary)
        self.fold: Ints = self.parts(1, FOLDS)[0][self.owner]
        self.context = ContextFit(turns, self.owner, self.fold, seed)
        self.fits = self.context.scores(self.texts)

    def means(self, values: Floats) -> Floats:
        """The means by person [persons, columns] of `values` [turns, columns], without NaN."""
        members = np.eye(self.size)[self.owner].T
        return _share(members @ np.nan_to_num(values), members @ np.isfinite(values))

    def parts(self, draws: int, parts: int = 2) -> Ints:
        """Random parts of the persons [draws, persons], equal in size within each kind."""
        rng, values = np.random.default_rng(self.seed), np.zeros((draws, self.size), np.int64)
        for kind in sorted(set(self.kinds)):
            members = np.flatnonzero([one == kind for one in self.kinds])
            order = rng.random((draws, len(members))).argsort(axis=1).argsort(axis=1)
            values[:, members] = (order + rng.integers(parts, size=(draws, 1))) % parts
        return values

    def halves(self, spread: Floats) -> Floats:
        """The distances between the two halves of DRAWS draws."""
        means, half = self.means(self.features), self.parts(DRAWS)
        one, other = (
            _share(of @ np.nan_to_num(means), of @ np.isfinite(means)) for of in (half, 1 - half)
        )
        return _rms((one - other) / spread)

    def pairs(self, half: Ints) -> list[tuple[int, int]]:
        """Persons of two halves [persons], in random pairs of the same kind of conversation."""
        rng, values = np.random.default_rng(self.seed + 1), []
        for kind in sorted(set(self.kinds)):
            human = np.array([one == kind for one in self.kinds])
            sides = [rng.permutation(np.flatnonzero(human & (half == side))) for side in (0, 1)]
            values += [(int(a), int(b)) for a, b in zip(*sides, strict=False)]
        return values

    def shares_of(self, pairs: Sequence[tuple[int, int]]) -> dict[str, Floats]:
        """Per pair of persons the shares `words` and `context`, if the second played the model."""
        places = [
            zip(*(np.flatnonzero(self.owner == n) for n in pair), strict=False) for pair in pairs
        ]
        rows = [(number, a, b) for number, some in enumerate(places) for a, b in some]
        number, left, right = np.array(rows, np.int64).reshape(-1, 3).T
        human, other = ([self.texts[place] for place in side] for side in (left, right))
        won = np.array(
            [word_wins(human, other, number % FOLDS), wins(self.fits[right], self.fits[left])]
        )
        members = np.eye(len(pairs))[number].T
        shares = _share(members @ np.nan_to_num(won.T), members @ np.isfinite(won.T)).T
        return dict(zip(("words", "context"), shares, strict=True))

    @cached_property
    def chance(self) -> dict[str, float]:
        """The 95th percentile of the distance of the shares from .5, if persons of two halves stand
        against each other and the sides of every pair are drawn."""
        shares = self.shares_of(self.pairs(self.parts(1)[0]))
        draws = np.random.default_rng(self.seed).integers(2, size=(DRAWS, self.size))
        return {
            name: float(
                np.quantile(abs(_mean(((2.0 * draws[:, : len(x)] - 1) * (x - 0.5)).T)), CHANCE)
            )
            for name, x in shares.items()
        }


@dataclass(frozen=True)
class Closeness:
    """A model's turns at the places of people's turns, compared with these."""

    people: Population
    texts: Sequence[str | None]
    """None where the model gave no reply."""
    ends: Sequence[float]
    """How likely the model ends the conversation after the person's message; NaN if unknown."""
    likelier: Sequence[float] = field(default_factory=list)
    """Per turn, whether the model finds it likelier in its context than one from elsewhere."""
    surprise: Sequence[float] = field(default_factory=list)
    """Nats per token of the person's text; both empty without likelihoods."""

    @cached_property
    def features(self) -> Floats:
        return turn_features(self.people.turns, self.texts, self.ends, self.people.vocabulary)

    @cached_property
    def means(self) -> tuple[Floats, Floats]:
        """People's and the model's means by person, over the turns that have both."""
        human, made = self.people.features, self.features
        both = np.isfinite(human) & np.isfinite(made)
        return tuple(self.people.means(np.where(both, x, np.nan)) for x in (human, made))  # type: ignore[return-value]

    @cached_property
    def spread(self) -> Floats:
        """Standard deviations of people's turns, or of both sides' where people's is 0; NaN for a
        line that is not measured."""
        human, made = self.people.features, self.features
        widths = [
            np.sqrt(_mean(np.square(x - _mean(x)))) for x in (human, np.concatenate([human, made]))
        ]
        width = np.where(widths[0] > 0, *widths)
        return np.where((width > 0) & np.isfinite(self.means[1]).any(axis=0), width, np.nan)

    @cached_property
    def shares(self) -> dict[str, Floats]:
        """Per person, the share of turns of the numbers `words` and `context`."""
        people = self.people
        turns = {
            "words": word_wins(people.texts, self.texts, people.fold),
            "context": wins(people.context.scores(self.texts), people.fits),
        }
        return {name: people.means(won[:, None])[:, 0] for name, won in turns.items()}

    @cached_property
    def chance(self) -> dict[str, float]:
        """The 95th percentile of each number between two halves of the people."""
        halves = self.people.halves(self.spread)
        return {"distance": float(np.quantile(halves, CHANCE)), **self.people.chance}

    # -- statistics of persons, given by number ----------------------------------------------------

    def distance(self, persons: Sequence[int]) -> float:
        human, made = (_mean(side[list(persons)]) for side in self.means)
        return float(_rms((made - human) / self.spread))

    def ratios(self, persons: Sequence[int]) -> dict[str, float]:
        """The three numbers on one scale; those that cannot be computed are left out."""
        raw = {"distance": self.distance(persons)} | {
            name: abs(float(_mean(share[list(persons)])) - 0.5)
            for name, share in self.shares.items()
        }
        scaled = {
            name: value and value / (self.chance[name] or math.nan) for name, value in raw.items()
        }
        return {name: value for name, value in scaled.items() if math.isfinite(value)}

    # -- reports -----------------------------------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """Per line the means, the difference model − people with interval and p, and Holm's p."""
        both = np.isfinite(self.people.features) & np.isfinite(self.features)
        values: list[dict[str, Any]] = []
        persons: dict[Hashable, Hashable] = {n: n for n in range(self.people.size)}
        for place, (name, label) in enumerate(LINES.items()):
            human, made = (
                dict(zip(persons, side[:, place].tolist(), strict=True)) for side in self.means
            )
            line = paired_difference(human, made, persons)
            values.append({
                "name": name, "label": label, "people": line.mean_a, "model": line.mean_b,
                **_ends(line), "persons": line.n_shared, "turns": int(both[:, place].sum()),
            })  # fmt: skip
        return _with_holm(values)

    def report(self) -> dict[str, Any]:
        """The entry of `closeness.json`, without name and step."""
        everyone = list(range(self.people.size))
        ratios, shares = self.ratios(everyone), self.shares
        worst = max(ratios, key=ratios.__getitem__, default="")
        apart = jackknife(lambda some: self.ratios(some).get("distance"), self.people.size)
        elsewhere = self.people.context.scores(self.people.context.elsewhere())
        values: dict[str, Any] = {
            "headline": {"name": worst, "value": ratios.get(worst)}, "ratios": ratios,
            "distance": {
                "value": self.distance(everyone), "ratio": ratios.get("distance"),
                "halves_p95": self.chance["distance"],
                "low": None if apart.ci_low is None else max(0.0, apart.ci_low),
                "high": apart.ci_high,
            },
            "words": self._share("auc", shares["words"])
            | {"p": sign_flip_p([s - 0.5 for s in shares["words"] if s == s] or [0.0],
                                np.flatnonzero(np.isfinite(shares["words"])).tolist() or [0])},
            "context": self._share("auc", shares["context"])
            | {"elsewhere": float(np.nanmean(wins(elsewhere, self.people.fits)))},
            "likelihood": None, "perplexity": None, "lines": self.lines(),
        }  # fmt: skip
        if len(self.likelier):
            likelier, nats = self.people.means(np.array([self.likelier, self.surprise]).T).T
            each = estimate(nats.tolist(), everyone)
            ends = zip(
                ("value", "low", "high"), (each.mean, each.ci_low, each.ci_high), strict=True
            )
            values["likelihood"] = self._share("share", likelier)
            values["perplexity"] = {
                name: None if x is None else math.exp(x) for name, x in ends
            } | {"persons": sorted(np.exp(nats[np.isfinite(nats)]).tolist())}
        return values

    def _share(self, name: str, share: Floats) -> dict[str, float | None]:
        """The mean over persons of a share, with its interval."""
        whole = estimate(share.tolist(), list(range(len(share))), scale=(0.0, 1.0))
        return {name: whole.mean, "low": whole.ci_low, "high": whole.ci_high}


def distance_beyond(model: Closeness, base: Closeness) -> dict[str, Any]:
    """How much farther from people MODEL is than BASE, paired by person: the three ratios, the
    headline, and every line in its unit. Below zero, MODEL is closer."""

    def farther(measure: str, place: int = 0) -> dict[str, float | None]:
        def value(one: Closeness, persons: Sequence[int]) -> float | None:
            if measure == "line":
                human, made = (float(_mean(side[list(persons), place])) for side in one.means)
                return abs(made - human)
            ratios = one.ratios(persons)
            return max(ratios.values()) if measure == "headline" else ratios.get(measure)

        sides = (lambda some: value(base, some), lambda some: value(model, some))
        return _ends(jackknife_difference(*sides, model.people.size))

    lines = [
        {"name": name, "label": label, **farther("line", place)}
        for place, (name, label) in enumerate(LINES.items())
    ]
    numbers = ("headline", "distance", "words", "context")
    return {**{name: farther(name) for name in numbers}, "lines": _with_holm(lines)}


def _with_holm(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    adjusted = holm([line["p"] for line in lines])
    return [{**line, "p_holm": p} for line, p in zip(lines, adjusted, strict=True)]


def _ends(line: PairedDifference) -> dict[str, float | None]:
    return {"difference": line.difference, "low": line.ci_low, "high": line.ci_high, "p": line.p}


def _share(sums: Any, counts: Any) -> Floats:
    nothing = np.full(np.shape(sums), np.nan)
    return np.divide(sums, counts, out=nothing, where=np.asarray(counts) > 0)


def _mean(values: Floats) -> Floats:
    """The mean over the first axis, without NaN; NaN if nothing is left."""
    return _share(np.nan_to_num(values).sum(axis=0), np.isfinite(values).sum(axis=0))


def _rms(values: Floats) -> Floats:
    """The root mean square over the last axis, without NaN."""
    return np.sqrt(_mean(np.moveaxis(np.square(values), -1, 0)))
