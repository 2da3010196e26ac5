"""Does `soul people closeness` find people close to people, and what is not people far away?

    python benchmarks/closeness.py CHATS.jsonl [DRAWS]    rows with `person` and `messages`

1. Two halves of the people, DRAWS times (1,000): one half plays the model. Each person of the one
   half is paired at random with a person of the other in the same kind of conversation. How often
   does each line's interval cover zero, and how many pages have a line significant after Holm?
2. Sources that are no people, or people changed: a bland line, turns 30 % longer, turns with
   capitals and stops repaired, turns of other persons at random places, an assistant's texts.
3. Chance of the classifier of words: the p-value where one half of people plays the other.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

from soulkit.data.corpora.settings import HUMAN
from soulkit.metrics.comparisons import holm, paired_difference, sign_flip_p
from soulkit.people.closeness import Closeness, Population
from soulkit.people.texts import LINES, message_before
from soulkit.people.turns import PersonTurn, read_turns

BLAND = "Could you please help me with this?"


def main(path: str, draws: int = 1000) -> None:
    turns = read_turns(path, HUMAN)
    start = time.process_time()
    people = Population(turns)
    print(f"{people.size} persons, {len(turns)} turns; people among themselves: "
          f"{time.process_time() - start:.1f} s")  # fmt: skip
    halves(people, draws)
    words_between_halves(people)
    sources(people)


def halves(people: Population, draws: int) -> None:
    means, start = people.means(people.features), time.process_time()
    covered, pages = np.zeros(len(LINES)), 0
    for half in people.parts(draws):
        pairs = np.array(people.pairs(half))
        names = list(range(len(pairs)))
        values = []
        for line in range(len(LINES)):
            one, other = (
                dict(zip(names, means[side, line].tolist(), strict=True)) for side in pairs.T
            )
            found = paired_difference(one, other, dict(zip(names, names, strict=True)))
            zero = found.ci_low is None or found.ci_high is None
            covered[line] += zero or found.ci_low <= 0 <= found.ci_high
            values.append(found.p)
        pages += any(p is not None and p < 0.05 for p in holm(values))
    print(f"\n{draws} draws of two halves of people ({time.process_time() - start:.0f} s)\n")
    print(f"{'line':30} interval covers zero")
    for label, share in zip(LINES.values(), covered / draws, strict=True):
        print(f"{label:30} {share:.3f}")
    print(f"{'pages with a significant line':30} {pages / draws:.3f}")


def words_between_halves(people: Population, draws: int = 40) -> None:
    """p of the classifier of words where every person's text stands against one of another."""
    small = []
    for half in people.parts(draws):
        excess = [x - 0.5 for x in people.shares_of(people.pairs(half))["words"].tolist()]
        small.append(sign_flip_p(excess, list(range(len(excess)))) < 0.05)
    print(f"{'words: p < .05 among people':30} {np.mean(small):.3f} ({draws} draws)\n")


def sources(people: Population) -> None:
    rng, turns = random.Random(0), people.turns
    kinds: dict[str, list[PersonTurn]] = {}
    for turn in turns:
        kinds.setdefault(turn.source, []).append(turn)
    last = [float(turn.is_last) for turn in turns]
    moved = [
        rng.choice([one for one in kinds[turn.source] if one.person != turn.person])
        for turn in turns
    ]
    spoken = [text for turn in turns if (text := message_before(turn))]
    made = {
        "people themselves": (list(people.texts), last),
        "a bland line": ([BLAND] * len(turns), [0.0] * len(turns)),
        "an assistant's texts": ([rng.choice(spoken) for _ in turns], [0.0] * len(turns)),
        "people, 30 % longer": ([longer(text) for text in people.texts], last),
        "people, tidied": ([tidied(text) for text in people.texts], last),
        "other people's turns": (
            [one.text for one in moved],
            [float(one.is_last) for one in moved],
        ),
    }
    print(f"{'source':22}{'distance':>9}{'words':>7}{'context':>8}{'head':>6}"
          f"{'AUC words':>10}{'AUC context':>12}{'lines':>6}")  # fmt: skip
    for name, (texts, ends) in made.items():
        found = Closeness(people, texts, ends).report()
        ratios = [found["ratios"].get(one, 0.0) for one in ("distance", "words", "context")]
        apart = sum(line["p_holm"] is not None and line["p_holm"] < 0.05 for line in found["lines"])
        print(f"{name:22}{ratios[0]:9.2f}{ratios[1]:7.2f}{ratios[2]:8.2f}{max(ratios):6.2f}"
              f"{found['words']['auc']:10.3f}{found['context']['auc']:12.3f}"
              f"{apart:>3}/{len(found['lines'])}")  # fmt: skip


def longer(text: str) -> str:
    words = text.split()
    return " ".join([*words, *words[: max(1, round(0.3 * len(words)))]])


def tidied(text: str) -> str:
    return (text[:1].upper() + text[1:]).rstrip(" .!?") + "."


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
