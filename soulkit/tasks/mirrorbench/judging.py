"""MirrorBench: its four judge questions, its controls, and feedback for a simulated user.

    gteval     real and simulated user side by side: similarity from 0 to 1
    pairwise   both unlabelled: which is the person? In both orders; 1 won, 0.5 tie, 0 lost
    rnr, ctr   the simulated user alone, against a rubric, or criticised first: YES 1, NO 0

The headline is their mean; a part without a readable answer leaves the episode unscored. Controls
ask the same about two real users (`human_human`) and two simulated ones (`proxy_proxy`). A number s
becomes (s − PP) / (HH − PP), clipped to [0, 1]; it is undefined if HH − PP is below LEAST_GAP. A
coach gets only the verdicts' sentences that repeat none of the real user's messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from soulkit.errors import UnreadableVerdict
from soulkit.judge.leaks import LeakView
from soulkit.judge.pairwise import Preference, pair_outcome, pair_questions
from soulkit.judge.panel import ask_several, follow_up, pooled
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.judge.verdict import fence, spoken, transcript
from soulkit.models.base import Cast
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import Control
from soulkit.tasks.kit.coaching import fenced_remarks, first_safe_lesson, without_secrets
from soulkit.tasks.kit.prompting import PromptFolder, Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.mirrorbench.conversations import ASSISTANT
from soulkit.types import BatchMetric, ControlRecord, Episode, Form, Line, Record, Verdict

PARTS = ("gteval", "pairwise", "rnr", "ctr")
COMPARING = ("gteval", "pairwise")
"""The parts that compare two users."""
LABELS = {"user": "USER", "assistant": "ASSISTANT"}
CRITIQUE = "ctr_critique"
CALLS = {"gteval": 1, "pairwise": 6, "rnr": 2, "ctr": 4}
"""Part → calls per judge with the published numbers of samples."""


class Similarity(VerdictShape):
    reasoning: str
    score: float = Field(ge=0, le=1)


class Rubric(VerdictShape):
    reasoning: str
    verdict: Literal["YES", "NO"]


class Revision(VerdictShape):
    critique: str
    explanation: str
    verdict: Literal["YES", "NO"]


SHAPES: tuple[type[VerdictShape], ...] = (Similarity, Preference, Rubric, Revision)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two conversations to compare, and the description of the person."""

    real: Sequence[Line]
    simulated: Sequence[Line]
    description: str


@dataclass(frozen=True, slots=True)
class ComparedUsers:
    """The judges' results for a pair."""

    values: dict[str, float]
    """Part → its number."""
    flips: float | None
    """Share of judges and samples whose preference changed with the order."""
    verdicts: tuple[Verdict, ...]

    @property
    def mean(self) -> float:
        return sum(self.values.values()) / len(self.values)


async def judge_users(
    prompts: PromptFolder, pair: Pair, episode: Episode, cast: Cast,
    parts: Collection[str] = PARTS,
) -> ComparedUsers:  # fmt: skip
    """The results of these parts from the judges of `cast`.

    Raises UnreadableVerdict if a part has no readable answer, ConfigError without a judge.
    """
    questions = [q for part in parts for q in _questions(part, prompts, pair, episode, cast)]
    replies = await ask_several(cast, [_guarded(one) for one in questions], episode)
    if CRITIQUE in replies:
        revise = _revision(prompts, pair)
        replies["ctr"] = await follow_up(cast, replies[CRITIQUE], revise, episode)
    how = cast.panel.combine
    values = {name: pooled(replies[name], _WORTH[name], how) for name in _WORTH if name in replies}
    flips = None
    if "pairwise" in parts:
        compared = pair_outcome(cast, replies)
        values["pairwise"], flips = compared.value, compared.position_flip
    verdicts = tuple(one.verdict() for opinions in replies.values() for one in opinions)
    return ComparedUsers({part: values[part] for part in PARTS if part in values}, flips, verdicts)


def _worth_of_yes(answer: Rubric | Revision) -> float:
    return float(answer.verdict == "YES")


_WORTH: Mapping[str, Callable[[Any], float]] = {
    "gteval": lambda answer: float(answer.score),
    "rnr": _worth_of_yes,
    "ctr": _worth_of_yes,
}


# -- the questions -------------------------------------------------------------------------------


def _questions(
    part: str, prompts: PromptFolder, pair: Pair, episode: Episode, cast: Cast
) -> list[JudgeQuestion[Any]]:
    """A part's first questions; for `ctr` the critique, which the decision follows."""
    if part == "gteval":
        return [similarity_question(prompts, fenced(pair.real, "real"),
                                    fenced(pair.simulated, "simulated"))]  # fmt: skip
    if part == "pairwise":
        ordered = pair_questions(cast, episode, lambda first: _preference(prompts, pair, first))
        # A form is named after its order, because scripted judges of self-checks see only the form.
        return [
            replace(one, form=Form(f"Preference{place}", one.form.schema if one.form else ""))
            for place, one in enumerate(ordered, 1)
        ]
    conversation = fenced(pair.simulated, "conversation")
    if part == "rnr":
        return [question("rnr", prompts.render("judge_rnr", conversation=conversation), Rubric)]
    prompt = prompts.render("judge_critique", conversation=conversation)
    return [JudgeQuestion(purpose=CRITIQUE, prompt=prompt, read=_read_critique,
                          dump=lambda text: {"critique": text})]  # fmt: skip


def similarity_question(
    prompts: PromptFolder, real: str, simulated: str
) -> JudgeQuestion[Similarity]:
    """The question how similar two fenced conversations are; the answer is from 0 to 1."""
    prompt = prompts.render("judge_gteval", real=real, simulated=simulated)
    return question("gteval", prompt, Similarity)


def fenced(lines: Sequence[Line], mark: str) -> str:
    return transcript(lines, LABELS, mark)


def _preference(prompts: PromptFolder, pair: Pair, first: bool) -> str:
    user_a, user_b = (pair.simulated, pair.real) if first else (pair.real, pair.simulated)
    return prompts.render(
        "judge_pairwise", task_description=pair.description,
        a=fenced(user_a, "conversation"), b=fenced(user_b, "conversation"),
    )  # fmt: skip


def _read_critique(text: str) -> str:
    critique = spoken(text, "paper")
    if not critique:
        raise UnreadableVerdict("it holds no critique")
    return critique


def _revision(prompts: PromptFolder, pair: Pair) -> Callable[[str], JudgeQuestion[Revision]]:
    conversation = fenced(pair.simulated, "conversation")

    def decide(critique: str) -> JudgeQuestion[Revision]:
        prompt = prompts.render(
            "judge_revision", conversation=conversation, critique=fence(critique, "notes")
        )
        return _guarded(question("ctr", prompt, Revision))

    return decide


def _guarded(judge_question: JudgeQuestion[Any]) -> JudgeQuestion[Any]:
    """The question, made invalid by a message that imitates an answer to any of the four."""
    return replace(
        judge_question, forgery=lambda words: any(guard.forgery(words) for guard in _GUARDS)
    )


_GUARDS = tuple(question("guard", "", shape) for shape in SHAPES)


HUMAN, PROXY = "human_human", "proxy_proxy"
ASKED = {HUMAN: PARTS, PROXY: COMPARING}
"""Control → the parts that it asks."""
LEAST_GAP = 0.05
"""If HH − PP is smaller, a score between them is meaningless."""
UNIT = "conversations"

CONTROLS = (
    Control(HUMAN, "row", {"judge": sum(CALLS[part] for part in ASKED[HUMAN])}, CALLS["pairwise"]),
    Control(
        PROXY, "episode", {"judge": sum(CALLS[part] for part in ASKED[PROXY])}, CALLS["pairwise"]
    ),
)


def calibrated_metrics(
    records: Sequence[Record], controls: Sequence[ControlRecord]
) -> dict[str, BatchMetric]:
    """`human_human/gteval` etc. (the anchors) and `calibrated/gteval` etc. (rescaled scores)."""
    metrics: dict[str, BatchMetric] = {}
    for name, parts in ASKED.items():
        of_control = [control for control in controls if control.name == name]
        for part in parts if of_control else ():
            metrics[f"{name}/{part}"] = mean_of(
                [control.score.metrics.get(part) for control in of_control], UNIT
            )
    for part in COMPARING:
        human, proxy = metrics.get(f"{HUMAN}/{part}"), metrics.get(f"{PROXY}/{part}")
        if human is not None and proxy is not None:
            metrics[f"calibrated/{part}"] = _calibrated(records, part, human.value, proxy.value)
    return metrics


def _calibrated(
    records: Sequence[Record], part: str, human: float | None, proxy: float | None
) -> BatchMetric:
    main = drafts(records)
    scores = [value for record in main if (value := record.score.metrics.get(part)) is not None]
    value = None
    if human is not None and proxy is not None and scores and human - proxy >= LEAST_GAP:
        value = fmean(between_anchors(score, human, proxy) for score in scores)
    n_scored = 0 if value is None else len(scores)
    return BatchMetric(value, len(main), n_scored, UNIT, 0.0, 1.0)


def undefined_remarks(values: Mapping[str, float | None]) -> Iterator[str]:
    """A line for each calibrated metric that is undefined because its anchors are too close."""
    for part in COMPARING:
        human, proxy = values.get(f"{HUMAN}/{part}"), values.get(f"{PROXY}/{part}")
        if human is not None and proxy is not None and human - proxy < LEAST_GAP:
            yield (
                f"calibrated/{part} is undefined: {HUMAN} ({human:.2f}) is less than {LEAST_GAP:g} "
                f"above {PROXY} ({proxy:.2f}), so noise would dominate the result"
            )


def between_anchors(score: float, human: float, proxy: float) -> float:
    """The position of a score between the two anchors, in [0, 1]; `human` is the higher one."""
    return min(1.0, max(0.0, (score - proxy) / (human - proxy)))


TEXTS = Texts(__file__)
LONG_MESSAGE = 60
"""Mean words per message above which a message is unlikely to be typed by a person."""
LEFT_OUT = "(something is left out here)"
"""Replaces, in the coach's prompt, what an assistant repeated of the real user."""
LONGEST_REMARK = 4_000
"""Maximum characters of a judge's remark for a coach; two or three sentences were requested."""
_LAYOUT = re.compile(r"^[^\S\n]*+(?:[-*#]|\d++[.)])\s|\*\*", re.MULTILINE)
_SERVICE = re.compile(
    r"\b(?:certainly|delighted|happy to help|as an ai|comprehensive|let me know if|feel free)\b",
    re.IGNORECASE,
)


def remarks(verdicts: Sequence[Verdict]) -> list[str]:
    """The judges' remarks about the simulated user, without duplicates."""
    texts = [
        str(verdict.said[name])
        for verdict in verdicts
        for name in ("reasoning", "explanation")
        if name in verdict.said and not verdict.purpose.startswith("pairwise")
    ]
    return list(dict.fromkeys(texts))


def notes(verdicts: Sequence[Verdict], view: LeakView) -> str:
    """The judges' remarks for a coach, fenced, without sentences that repeat the real user."""
    hidden = _hiding(view, view.public)
    return fenced_remarks(
        text for remark in remarks(verdicts)
        if (text := without_secrets(remark[:LONGEST_REMARK], hidden))
    )  # fmt: skip


def shown_attempt(lines: Sequence[Line], view: LeakView) -> list[Line]:
    """An attempt without those sentences of the assistant that repeat the real user's words before
    the simulated user has said them."""
    public = view.public
    shown: list[Line] = []
    for line in lines:
        if line.seat == ASSISTANT:
            text = without_secrets(line.text, _hiding(view, public))
            complete = text == without_secrets(line.text, LeakView())
            shown.append(line if complete else Line(ASSISTANT, f"{text} {LEFT_OUT}".strip()))
        else:
            public = f"{public}\n{line.text}"
            shown.append(line)
    return shown


def _hiding(view: LeakView, public: str) -> LeakView:
    """Treats the real user's words as a secret that no sentence may repeat."""
    return LeakView(question=view.question, private=(view.reference,), public=public)


def style_lesson(texts: Sequence[str] | None, view: LeakView) -> str | None:
    """Rule-based remarks on these messages (None: general advice), in the fullest version that
    leaks nothing."""
    seen = list(_seen(texts)) if texts is not None else []
    general: Sequence[str] = TEXTS["lessons"]
    return first_safe_lesson(((*seen, *general), seen, general), view)


def _seen(texts: Sequence[str]) -> Iterator[str]:
    remarks: Mapping[str, str] = TEXTS["remarks"]
    written = [text for text in texts if text]
    if len(written) < len(texts):
        yield remarks["silent"]
    if not written:
        return
    words = fmean(len(text.split()) for text in written)
    if words > LONG_MESSAGE:
        yield remarks["long"].format(words=words)
    if any(map(_LAYOUT.search, written)):
        yield remarks["layout"]
    if any(map(_SERVICE.search, written)):
        yield remarks["service"]
    if len(set(written)) < len(written):
        yield remarks["twice"]


def user_verdict(form: str, perfect: bool) -> str | None:
    """A judge's scripted answer for `form`: the simulated user is a person, or is not."""
    if form == "":
        return "- as scripted"
    why, yes, similar = "as scripted", "YES" if perfect else "NO", float(perfect)
    verdicts: dict[str, dict[str, Any]] = {
        "Similarity": {"reasoning": why, "score": similar},
        "LooseSimilarity": {"reasoning": why, "score": similar},
        "Preference1": {"reasoning": why, "verdict": "A" if perfect else "B"},
        "Preference2": {"reasoning": why, "verdict": "B" if perfect else "A"},
        "Rubric": {"reasoning": why, "verdict": yes},
        "Revision": {"critique": why, "explanation": why, "verdict": yes},
    }
    return json.dumps(verdicts[form]) if form in verdicts else None
