"""Two classifiers that compare a model's turns with people's; each is tested on unseen persons.

`word_wins` reads the turn alone: logistic regression on character n-grams. A tested text that both
sides wrote is left out of training. Otherwise the classifier would recognise it, and people's own
turns in another order would get .17 instead of .5.

`ContextFit` reads the turn and what was said before: their lengths, their questions, and how alike
they are. It learns from people which turn belongs to a context: the person's own, or one from
elsewhere (of another person, in the same kind of conversation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soulkit.errors import MissingPackage
from soulkit.metrics.intervals import Floats
from soulkit.people.texts import has_question, message_before, words_of
from soulkit.people.turns import PersonTurn

Ints = NDArray[np.int64]
ELSEWHERE = 4
"""Turns from elsewhere for every turn of a person in training."""
MOST = 4000
"""Characters of the earlier messages that are compared."""


def wins(low: Floats, high: Floats) -> Floats:
    """1 where `high` is above `low`, .5 where they are equal, NaN where one is missing."""
    return (np.sign(high - low) + 1) / 2


def word_wins(people: Sequence[str], model: Sequence[str | None], fold: Ints) -> Floats:
    """Per place, 1 if the classifier finds the model's text more like a model's than the person's,
    else 0; .5 if they are alike, NaN without a text of the model."""
    text_module, linear, _ = _sklearn()
    there = np.array([text is not None for text in model])
    sides = [np.array([text or "" for text in side]) for side in (people, model)]
    shared = np.intersect1d(sides[0][there], sides[1][there])
    scores = np.full((2, len(people)), np.nan)
    for part in np.unique(fold[there]):
        tested = there & (fold == part)
        repeated = shared[np.isin(shared, np.concatenate([side[tested] for side in sides]))]
        used = [there & (fold != part) & ~np.isin(side, repeated) for side in sides]
        scores[:, tested] = 0.0
        if not used[0].any() or not used[1].any():
            continue
        grams = text_module.TfidfVectorizer(
            analyzer="char_wb", ngram_range=(2, 4), lowercase=False, sublinear_tf=True
        )
        seen = grams.fit_transform([*sides[0][used[0]], *sides[1][used[1]]])
        labels = np.repeat([0, 1], [used[0].sum(), used[1].sum()])
        machine = linear.LogisticRegression(C=10.0, max_iter=2000).fit(seen, labels)
        for side, row in zip(sides, scores, strict=True):
            row[tested] = machine.decision_function(grams.transform(side[tested]))
    return wins(*scores)


class ContextFit:
    """How well turns fit their contexts, learned from people. Openings have no context."""

    def __init__(self, turns: Sequence[PersonTurn], owner: Ints, fold: Ints, seed: int) -> None:
        text_module, linear, make_machine = _sklearn()
        self._rng, self._size = np.random.default_rng(seed), len(turns)
        self._places = np.array([n for n, t in enumerate(turns) if message_before(t)], np.int64)
        self._turns = [turns[n] for n in self._places]
        self._owner, self._fold = owner[self._places], fold[self._places]
        before = [message_before(turn) for turn in self._turns]
        earlier = [_said(turn, {"assistant"}) for turn in self._turns]
        parts = [before, earlier, [_said(turn, {"assistant", "user"}) for turn in self._turns]]
        self._machines: dict[int, Any] = {}
        if not self._turns:
            return
        self._grams = text_module.TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 3))
        self._grams.fit([*before, *(turn.text for turn in self._turns)])
        self._contexts = [self._grams.transform(part) for part in parts]
        numbers = [_numbers(part) for part in parts]
        places = np.log1p([[turn.place] for turn in self._turns])
        self._numbers = np.column_stack([*numbers, places])
        real = self._pairs([turn.text for turn in self._turns])
        others = [self._pairs(self._elsewhere()) for _ in range(ELSEWHERE)]
        for part in np.unique(self._fold):
            rest = self._fold != part
            pairs = np.concatenate([one[rest] for one in (real, *others)])
            labels = np.repeat([1, 0], [rest.sum(), ELSEWHERE * rest.sum()])
            machine = linear.LogisticRegression(C=0.1, max_iter=2000, class_weight="balanced")
            self._machines[int(part)] = make_machine(machine).fit(pairs, labels)

    def scores(self, texts: Sequence[str | None]) -> Floats:
        """How well each text [turns] fits its context; NaN without a text or a context."""
        scores = np.full(self._size, np.nan)
        here = [texts[place] for place in self._places]
        pairs = self._pairs([text or "" for text in here]) if here else np.empty((0, 0))
        for part, machine in self._machines.items():
            tested = self._fold == part
            scores[self._places[tested]] = machine.decision_function(pairs[tested])
        scores[[text is None for text in texts]] = np.nan
        return scores

    def elsewhere(self) -> list[str | None]:
        """For each turn [turns] the text of one from elsewhere; None without a context."""
        texts = dict(zip(self._places.tolist(), self._elsewhere(), strict=True))
        return [texts.get(place) for place in range(self._size)]

    def _elsewhere(self) -> list[str]:
        kinds, texts = np.array([turn.source for turn in self._turns]), []
        for place, turn in enumerate(self._turns):
            others = np.flatnonzero((kinds == kinds[place]) & (self._owner != self._owner[place]))
            texts.append(self._turns[self._rng.choice(others)].text if len(others) else turn.text)
        return texts

    def _pairs(self, texts: Sequence[str]) -> Floats:
        """Features of every context with its text, and their products."""
        earlier = self._grams.transform(texts)
        alike = [np.asarray(part.multiply(earlier).sum(axis=1)).ravel() for part in self._contexts]
        scores = np.column_stack([*alike, _numbers(texts), self._numbers])
        left, right = np.triu_indices(scores.shape[1])
        return np.column_stack([scores, scores[:, left] * scores[:, right]])


def _numbers(texts: Sequence[str]) -> Floats:
    return np.array([[np.log1p(len(words_of(t))), has_question(t[-300:])] for t in texts], float)


def _said(turn: PersonTurn, roles: set[str]) -> str:
    return "\n".join(part.text for part in turn.context[:-1] if part.role in roles)[-MOST:]


def _sklearn() -> tuple[Any, Any, Any]:
    try:
        from sklearn import linear_model, pipeline, preprocessing
        from sklearn.feature_extraction import text
    except ImportError as error:
        raise MissingPackage("sklearn", "closeness to people") from error
    return text, linear_model, lambda m: pipeline.make_pipeline(preprocessing.StandardScaler(), m)
