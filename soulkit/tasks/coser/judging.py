"""CoSER: scene scores, notes for the characters, and scripted scenes.

`paper` (CoSER, Wang et al. 2025): a critic lists flaws per dimension, each with a severity from 1
to 5 (up to 10 for repetition). With n messages of characters

    score of a dimension = 100 − 5 · (Σ severity − 0.3 · n), clipped to [0, 100]

and the value is the mean of the four / 100. `reference`: four marks from 1 to 10, value = mean of
(mark − 1) / 9; BLEU and ROUGE-L are computed as in the reference implementation, without optional
packages. All characters get the same note, so it must not contain private knowledge of one of them,
later events of the book, or the book's lines.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from soulkit.judge.leaks import LeakView
from soulkit.judge.structured import VerdictShape, dimension_shape, rated_part
from soulkit.metrics.text import common_length
from soulkit.runs.records import drafts
from soulkit.tasks.kit.coaching import longest_text, remarks_without_secrets, repeated_texts
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Line, Record, Score

TOLERANCE = 0.3
"""Severity per message of a character that costs nothing."""
POINTS = 5.0
"""Cost of one severity point, out of 100."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """One of the four dimensions: its published name and its kinds of flaws."""

    title: str
    kinds: tuple[str, ...]


ASPECTS: dict[str, Aspect] = {
    "storyline_consistency": Aspect("Storyline Consistency", ("Storyline Consistency",)),
    "anthropomorphism": Aspect(
        "Anthropomorphism",
        ("Self-identity", "Emotional Depth", "Persona Coherence", "Social Interaction"),
    ),
    "character_fidelity": Aspect(
        "Character Fidelity",
        ("Character Language", "Knowledge & Background", "Personality & Behavior",
         "Relationship & Social Status"),
    ),
    "storyline_quality": Aspect(
        "Storyline Quality", ("Flow & Progression", "Logical Consistency")
    ),
}  # fmt: skip
"""Slug (the question's purpose and the metric's name) → dimension, in published order."""


class _Flaw(VerdictShape):
    instance: str
    type: str
    severity: int = Field(ge=1, le=5)


class _Repetition(VerdictShape):
    instance: str
    severity: int = Field(ge=1, le=10)


class Flaws(VerdictShape):
    """What a critic lists on one dimension."""

    reasoning: str
    flaws: tuple[_Flaw, ...]

    @property
    def severity(self) -> int:
        """The sum of all severities."""
        return sum(flaw.severity for flaw in self.flaws)


class FlawsAndRepetitions(Flaws):
    """The same on a dimension that looks for repetition, too."""

    repetitions: tuple[_Repetition, ...]

    @property
    def severity(self) -> int:
        return super().severity + sum(repetition.severity for repetition in self.repetitions)


def flaw_shape(slug: str) -> type[Flaws]:
    """The schema of the verdict on a dimension."""
    return FlawsAndRepetitions if slug == "storyline_quality" else Flaws


def flaw_score(severity: float, messages: int) -> float:
    """The score of a dimension, 0 to 100; `messages` counts the characters' messages."""
    return max(0.0, min(100.0, 100.0 - POINTS * (severity - TOLERANCE * messages)))


def scene_value(scores: Mapping[str, float]) -> float:
    """The mean of the four dimension scores (0 to 100), divided by 100."""
    return mean_share([scores[slug] for slug in ASPECTS])


def mean_share(scores: Iterable[float]) -> float:
    """The mean of scores from 0 to 100, divided by 100."""
    values = list(scores)
    return sum(values) / len(values) / 100


LOWEST, HIGHEST = 1, 10


_MARKED = (
    "storyline_consistency", "character_fidelity", "anthropomorphism", "storyline_quality",
)  # fmt: skip


Marks = dimension_shape(
    "Marks", "A judge's four marks, under the published names.",
    dict.fromkeys(_MARKED, rated_part("_Mark", int, "reasoning", (LOWEST, HIGHEST))),
    {slug: ASPECTS[slug].title for slug in ASPECTS},
)  # fmt: skip


def anchored(mark: float) -> float:
    """A mark from 1 to 10, converted to points from 0 to 100 with one decimal."""
    return round((max(LOWEST, min(HIGHEST, mark)) - 1) * 100 / 9, 1)


MOST_ORDERS = 4


def plain_bleu(reference: str, hypothesis: str) -> float:
    """Unsmoothed BLEU of a text against another, 0 to 1; 0 if either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    if not gold or not words:
        return 0.0
    orders = range(1, min(MOST_ORDERS, len(words)) + 1)
    shares = [_precision(gold, words, order) for order in orders]
    if not all(shares):
        return 0.0
    brevity = 1.0 if len(words) >= len(gold) else math.exp(1 - len(gold) / len(words))
    return brevity * math.exp(sum(map(math.log, shares)) / len(shares))


def plain_rouge_l(reference: str, hypothesis: str) -> float:
    """F1 of the longest common subsequence of words, 0 to 1; 0 if either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    common = common_length(gold, words)
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _precision(gold: Sequence[str], words: Sequence[str], order: int) -> float:
    total = len(words) - order + 1
    counts = Counter(tuple(words[i : i + order]) for i in range(total))
    limits = Counter(tuple(gold[i : i + order]) for i in range(len(gold) - order + 1))
    return sum(min(count, limits[gram]) for gram, count in counts.items()) / total


RUBRIC = ("Storyline Consistency", "Character Fidelity", "Storyline Quality", "severity")
"""Rubric terms that no character in a scene would use."""
TEXTS = Texts(__file__)
WEAK = 60.0
"""Dimensions below this score get a remark."""
_ASSISTANT = re.compile(
    r"\b(?:as an ai|language model|how can i (?:help|assist)|happy to (?:help|assist)|"
    r"feel free to|let me know if)\b", re.IGNORECASE
)  # fmt: skip


def aspect_points(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The dimensions with their points, for the coach's template."""
    return [
        {"title": aspect.title, "score": f"{points:.0f}"}
        for slug, aspect in ASPECTS.items() if (points := metrics.get(slug)) is not None
    ]  # fmt: skip


def aspect_reasons(score: Score) -> dict[str, str]:
    """Dimension → the first readable critic's text about it."""
    texts: dict[str, str] = {}
    for verdict in score.verdicts:
        if not verdict.said:
            continue
        for slug, said in _by_dimension(verdict.purpose, verdict.said):
            texts.setdefault(slug, said)
    return texts


def _by_dimension(purpose: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dimension, its reasoning and flaws) in a verdict on one or all dimensions."""
    if purpose in ASPECTS:
        instances = [str(flaw["instance"]) for key in ("flaws", "repetitions")
                     for flaw in fields.get(key, ())]  # fmt: skip
        yield purpose, "\n".join(dict.fromkeys([str(fields["reasoning"]), *instances]))
        return
    for slug in ASPECTS:
        if isinstance(fields.get(slug), Mapping):
            yield slug, str(fields[slug]["reasoning"])


def remarks_for_coach(score: Score, view: LeakView) -> str:
    """The critics' reasoning for a coach, fenced, without sentences that leak something."""
    reasons = ((ASPECTS[slug].title, text) for slug, text in aspect_reasons(score).items())
    return remarks_without_secrets(reasons, view)


def scene_lesson(lines: Sequence[Line], score: Score, turn_words: int) -> str:
    """Rule-based feedback on a scene: remarks on this draft, then general advice."""
    return " ".join([*_remarks(lines, score, turn_words), TEXTS["advice"]])


def _remarks(lines: Sequence[Line], score: Score, turn_words: int) -> Iterator[str]:
    texts: Mapping[str, str] = TEXTS["remarks"]
    if not lines:
        yield texts["silent"]
    place, count = longest_text([line.text for line in lines])
    if count > 2 * turn_words:
        yield texts["long"].format(name=lines[place].seat, count=count)
    for name in dict.fromkeys(line.seat for line in lines if _ASSISTANT.search(line.text)):
        yield texts["assistant"].format(name=name)
    if repeated := repeated_texts([line.text for line in lines]):
        names = dict.fromkeys(lines[place].seat for place in repeated)
        yield texts["repeated"].format(names=", ".join(names))
    points = [(p, slug) for slug in ASPECTS if (p := score.metrics.get(slug)) is not None]
    lowest, weakest = min(points, default=(WEAK, ""))
    if lowest < WEAK:
        yield TEXTS["weak"][weakest]


# -- over a batch --------------------------------------------------------------------------------


def distributions(records: Sequence[Record]) -> dict[str, BatchMetric]:
    """`in_distribution` and `out_of_distribution` (means over scenes by their tag), and `gap`, the
    first minus the second. Empty if no row has a tag."""
    means = {}
    for name, tag in (("in_distribution", "id"), ("out_of_distribution", "ood")):
        values = [r.score.value for r in drafts(records) if r.tags.get("tag") == tag]
        if values:
            means[name] = mean_of(values, "scenes")
    if len(means) < 2:
        return means
    inside, outside = means["in_distribution"], means["out_of_distribution"]
    complete = inside.value is not None and outside.value is not None
    gap = (inside.value or 0.0) - (outside.value or 0.0) if complete else None
    return {
        **means,
        "distribution_gap": BatchMetric(
            value=gap, n=inside.n + outside.n, n_scored=inside.n_scored + outside.n_scored,
            unit="scenes", low=-1.0, high=1.0,
        ),
    }  # fmt: skip


# -- scripts -------------------------------------------------------------------------------------


def lines_in_turn(seats: Sequence[str], texts: Sequence[str]) -> list[Line]:
    """The texts as lines; the seats take turns."""
    return [Line(seats[i % len(seats)], text) for i, text in enumerate(texts)]


def scripted_verdict(form: str, perfect: bool) -> str | None:
    """A judge's scripted verdict of the schema `form`: no flaws, or the worst possible."""
    why = "as scripted"
    if form == "Marks":
        score = HIGHEST if perfect else LOWEST
        marks = {aspect.title: {"reasoning": why, "score": score} for aspect in ASPECTS.values()}
        return json.dumps(marks)
    if form not in ("Flaws", "FlawsAndRepetitions"):
        return None
    flaw = {"instance": "everywhere", "type": "Self-identity", "severity": 5}
    verdict = {"reasoning": why, "flaws": [] if perfect else [flaw] * 5}
    return json.dumps(verdict | ({} if form == "Flaws" else {"repetitions": []}))


def scripted_environment(messages: Sequence[Mapping[str, str]]) -> str:
    """The reply of a scripted environment or next-speaker predictor.

    For a next speaker, it picks one of the candidates by a hash of the request.
    """
    text = "\n".join(str(message["content"]) for message in messages)
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    choice = re.search(r"is exactly one of: (.*)\.$", text, re.MULTILINE)
    if choice:
        names = [name for name in re.findall(r'"([^"]+)"', choice[1]) if name != "random"]
        return json.dumps({"reason": "by turns", "next_speaker": names[drawn % len(names)]})
    listed = re.findall(r"^In it are: (.*)\. \"Environment\" stands", text, re.MULTILINE)
    if listed:
        names = listed[0].split(", ")
        return f"1. By turns.\n2. Next Speaker: {names[drawn % len(names)]}"
    happenings: Sequence[str] = TEXTS["happenings"]
    return happenings[drawn % len(happenings)]
