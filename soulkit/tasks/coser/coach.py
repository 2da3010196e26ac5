"""Notes for a company of players, the gap between books, and scripted scenes.

One text goes to every character, so it may hold nothing that only one of them has on their mind,
nothing of how the book goes on, and none of its lines. Rules look at what was said: its length, its
repetitions, the phrases of an assistant, and which dimension the critics liked least. A model coach
reads the critics' reasoning without the sentences that echo what is private.

The scripts are for self-checks, canaries and trials without a model (`soul serve partner coser`): a
scene of assistants, verdicts, and a scripted environment.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import LeakView
from soulkit.runs.records import drafts
from soulkit.tasks.coser.scoring import ASPECTS, HIGHEST, LOWEST
from soulkit.tasks.kit.coaching import longest_text, remarks_without_secrets, repeated_texts
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Line, Record, Score

RUBRIC = ("Storyline Consistency", "Character Fidelity", "Storyline Quality", "severity")
"""Words of the critics that nobody in a scene would use."""
TEXTS = Texts(__file__)
WEAK = 60.0
"""Points below which a dimension is remarked on."""
_ASSISTANT = re.compile(
    r"\b(?:as an ai|language model|how can i (?:help|assist)|happy to (?:help|assist)|"
    r"feel free to|let me know if)\b", re.IGNORECASE
)  # fmt: skip


def aspect_points(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The dimensions with their points, as the coach's template shows them."""
    return [
        {"title": aspect.title, "score": f"{points:.0f}"}
        for slug, aspect in ASPECTS.items() if (points := metrics.get(slug)) is not None
    ]  # fmt: skip


def aspect_reasons(score: Score) -> dict[str, str]:
    """Dimension → what the first critic that could be read wrote about it."""
    texts: dict[str, str] = {}
    for verdict in score.verdicts:
        if not verdict.said:
            continue
        for slug, said in _by_dimension(verdict.purpose, verdict.said):
            texts.setdefault(slug, said)
    return texts


def _by_dimension(purpose: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dimension, its reasoning and flaws) of a verdict on one dimension or on all."""
    if purpose in ASPECTS:
        instances = [str(flaw["instance"]) for key in ("flaws", "repetitions")
                     for flaw in fields.get(key, ())]  # fmt: skip
        yield purpose, "\n".join(dict.fromkeys([str(fields["reasoning"]), *instances]))
        return
    for slug in ASPECTS:
        if isinstance(fields.get(slug), Mapping):
            yield slug, str(fields[slug]["reasoning"])


def remarks_for_coach(score: Score, view: LeakView) -> str:
    """The critics' reasoning for a coach, fenced, without sentences that give something away."""
    reasons = ((ASPECTS[slug].title, text) for slug, text in aspect_reasons(score).items())
    return remarks_without_secrets(reasons, view)


def scene_lesson(lines: Sequence[Line], score: Score, turn_words: int) -> str:
    """What rules say about a scene: what they saw, then what holds always."""
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
    """`in_distribution` and `out_of_distribution`: the mean over scenes by their tag, and `gap`,
    the first less the second, over the scenes of both. Empty where no row has a tag."""
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
    """The texts, said by one seat after the other."""
    return [Line(seats[i % len(seats)], text) for i, text in enumerate(texts)]


def scripted_verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: nothing wrong, or as much as there can be."""
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
    """What a scripted environment and predictor of speakers says to a request.

    Asked for a speaker, it names one of those who may follow, by a hash of the request.
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
