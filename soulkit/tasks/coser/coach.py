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

from soulkit.judge.leaks import LeakView, echoes_private, echoes_reference, tokens
from soulkit.judge.quoting import fence
from soulkit.runs.records import drafts
from soulkit.tasks.coser.scoring import ASPECTS, HIGHEST, LOWEST
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Line, Record, Score

RUBRIC = ("Storyline Consistency", "Character Fidelity", "Storyline Quality", "severity")
"""Words of the critics that nobody in a scene would use."""
ADVICE = (
    "Play your own character alone, out of what this person wants right now, in words that only "
    "this person would choose. Answer what was just said before you bring something new, show a "
    "feeling instead of naming it, let a wish stay unsaid, and leave nobody's move without a "
    "consequence. Keep every turn short."
)
SHORT_NOTES = {
    "storyline_consistency": "The scene drifted from its situation: let everything that is said "
    "answer to what is at stake in the place and the hour in which it begins.",
    "anthropomorphism": "The characters were too even: let them want something, misunderstand, "
    "hold something back, and begin things instead of answering.",
    "character_fidelity": "The characters could have been anybody: take each one's words, temper "
    "and standing towards the others from what is recorded of them.",
    "storyline_quality": "The scene stood still or went in circles: let every turn change "
    "something that the next one has to deal with.",
}
WEAK = 60.0
"""Points below which a dimension is remarked on."""
_MACHINE = re.compile(
    r"\b(?:as an ai|language model|how can i (?:help|assist)|happy to (?:help|assist)|"
    r"feel free to|let me know if)\b", re.IGNORECASE
)  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


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
        instances = [str(one["instance"]) for key in ("flaws", "repetitions")
                     for one in fields.get(key, ())]  # fmt: skip
        yield purpose, "\n".join([str(fields["reasoning"]), *instances])
        return
    for slug in ASPECTS:
        if isinstance(fields.get(slug), Mapping):
            yield slug, str(fields[slug]["reasoning"])


def remarks_for_coach(score: Score, view: LeakView) -> str:
    """The critics' reasoning for a coach, fenced, without sentences that give something away."""
    lines = []
    for slug, text in aspect_reasons(score).items():
        sentences = [
            s for s in dict.fromkeys(_SENTENCE.split(text)) if s.strip() and not _tells(s, view)
        ]
        if sentences:
            lines.append(f"{ASPECTS[slug].title}: {' '.join(sentences)}")
    return fence("\n".join(lines), "remarks") if lines else ""


def _tells(sentence: str, view: LeakView) -> bool:
    """Whether a sentence echoes a private text or the book's own lines."""
    if any(echoes_private(sentence, text, view.public) for text in view.secrets):
        return True
    return echoes_reference(sentence, view.reference, view.public)


def scene_lesson(lines: Sequence[Line], score: Score, turn_words: int) -> str:
    """What rules say about a scene: what they saw, then what holds always."""
    seen = [*_silence(lines), *_length(lines, turn_words), *_machine(lines), *_repeats(lines)]
    points = [(p, slug) for slug in ASPECTS if (p := score.metrics.get(slug)) is not None]
    weakest = min(points, default=None)
    if weakest is not None and weakest[0] < WEAK:
        seen.append(SHORT_NOTES[weakest[1]])
    return " ".join([*seen, ADVICE])


def _silence(lines: Sequence[Line]) -> list[str]:
    return [] if lines else ["Nobody was heard: every turn needs words or an action."]


def _length(lines: Sequence[Line], turn_words: int) -> list[str]:
    longest = max(lines, key=lambda line: len(line.text.split()), default=None)
    count = 0 if longest is None else len(longest.text.split())
    if longest is None or count <= 2 * turn_words:
        return []
    return [f"{longest.seat} once spoke {count} words in a row; nobody talks that long."]


def _machine(lines: Sequence[Line]) -> list[str]:
    names = dict.fromkeys(line.seat for line in lines if _MACHINE.search(line.text))
    return [f"{name} sounded like an assistant; nobody in this book is one." for name in names]


def _repeats(lines: Sequence[Line]) -> list[str]:
    texts = [" ".join(tokens(line.text)) for line in lines]
    repeated = {t for t in texts if t and texts.count(t) > 1}
    names = dict.fromkeys(
        line.seat for line, text in zip(lines, texts, strict=True) if text in repeated
    )
    if not names:
        return []
    return [f"The same words came more than once ({', '.join(names)}): say a thing once."]


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


HELPFUL = (
    "Hello! How can I help you today?",
    "That is a great question. There are several things to consider.",
    "I understand both points of view, and I am happy to assist.",
    "In conclusion, communication and respect are what matters most.",
    "Let me know if there is anything else I can do for you!",
    "That is a great question. There are several things to consider.",
)
HAPPENINGS = (
    "Somewhere a door falls shut, and steps go away over stone.",
    "The light changes; for a moment nothing can be heard but the wind.",
    "A cart rattles by outside, and the cups on the shelf answer it.",
    "It has grown colder. Somebody outside laughs, far off.",
)


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
    return HAPPENINGS[drawn % len(HAPPENINGS)]
