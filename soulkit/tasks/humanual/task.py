"""Humanual: what would this particular person have written?

A row shows a person and what they saw; the actor does not see what they really wrote. It writes one
reply in <response> tags; a judge compares this with the original on six aspects of a person
(judging.py). `paper`: the value is the mean of the six times the length factor. A missing answer
scores the minimum without a judge. Coach and actor never see the original.

`reference`: any reply is judged; a reply without the tag is judged whole. Feedback is in the system
prompt with the original, without a leak check. Refined replies are scored by another question
(covered points of the original, minus a penalty) to the `auditor`, which is the judge unless set
otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from soulkit.data.literals import structure
from soulkit.errors import RowError
from soulkit.judge import panel
from soulkit.judge.leaks import LeakView, echoes_reference
from soulkit.judge.structured import question
from soulkit.judge.verdict import fence, spoken
from soulkit.models.base import Cast
from soulkit.tasks.humanual import judging as coaching
from soulkit.tasks.humanual.judging import (
    AXES,
    Coverage,
    LooseSixSides,
    SixSides,
    clip_share,
    length_factor,
    lexical_f1,
    sides_mean,
    thoughts,
    two_sided_factor,
)
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.prompting import first_words, last_words
from soulkit.tasks.kit.scoring import READABLE, actor_status
from soulkit.types import Episode, Example, Feedback, Protocol, Role, Score, Segment, unscored

_OPENING = re.compile(r"<\s*response\s*>", re.IGNORECASE)
_CLOSING = re.compile(r"<\s*/\s*response\s*>", re.IGNORECASE)


def context_text(prompt: Any, protocol: Protocol) -> str:
    """What the person saw, as text; empty if it is unreadable."""
    messages = structure(prompt)
    if isinstance(messages, list | tuple):
        objects = [m if isinstance(m, Mapping) else {"content": m} for m in messages]
        return _joined(objects, protocol)
    if protocol == "paper" and isinstance(messages, Mapping):
        return _joined([messages], protocol)
    return "" if prompt is None else str(prompt)


def _joined(messages: list[Mapping[str, Any]], protocol: Protocol) -> str:
    texts = [str(message.get("content") or "") for message in messages]
    if protocol == "reference":
        return "\n".join(texts)
    pairs = [
        (str(m.get("role") or "user"), text.strip())
        for m, text in zip(messages, texts, strict=True)
    ]
    pairs = [(role, text) for role, text in pairs if text]
    if len(pairs) == 1:
        return pairs[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in pairs)


def field_text(text: str | None, field: str) -> str:
    """The published parsing: the content of the first tag of that name, else the whole text."""
    words = text or ""
    opening = re.search(re.escape(f"<{field}>"), words, re.IGNORECASE)
    if opening is not None:
        # At least one character is between the two marks, possibly part of a second mark.
        closing = re.compile(re.escape(f"</{field}>"), re.IGNORECASE)
        end = closing.search(words, opening.end() + 1)
        if end is not None:
            return words[opening.end() : end.start()].strip()
    return words.strip()


def read_comment(text: str, protocol: Protocol) -> tuple[str, str]:
    """(comment, status) of a completion.

    `paper`: the last tag counts, so that a model may correct itself. `salvaged`: one mark is
    missing, or both are and the whole text is the comment. `empty`: nothing is left. `reference`:
    always `ok`.
    """
    remainder = spoken(text, protocol)
    if protocol == "reference":
        return field_text(remainder, "response"), "ok"
    *before, last = _OPENING.split(remainder)
    inside, *after = _CLOSING.split(last)
    comment = inside.strip()
    if not comment:
        return "", "empty"
    return comment, "ok" if before and after else "salvaged"


BLAND = "No idea, I have not really thought about it."
"""The scripted wrong answer; it equals no original."""
CUT_FOR_THE_COACH = 2000
"""The coach reads this many words of what the person saw, the last ones."""
Metrics = dict[str, float | None]


class Humanual(ChoiceTask):
    sides = SixSides

    # -- rows -------------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        read = {**fields, "prompt": context_text(fields["prompt"], self.protocol)}
        self.check(read)
        return read

    def check(self, fields: Mapping[str, Any]) -> None:
        """DataError for a row that cannot be scored."""
        for name in ("persona", "prompt", "completion"):
            if not str(fields[name]).strip():
                what = f"The row's {name} is empty."
                raise RowError(what, "A row needs persona, prompt and completion.")

    def calls(self, example: Example) -> dict[Role, int]:
        return {"actor": 1, "judge": 1}

    # -- prompts ----------------------------------------------------------------------------------

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        return (self.opening(example), self.slot(example, self.acted_seat(example), feedback))

    def opening(self, example: Example) -> Segment:
        """The system prompt: the actor's persona and the form of its answer."""
        return Segment("system", self.rendered("person", example, None))

    def rendered(self, template: str, example: Example, feedback: Feedback | None) -> str:
        """A prompt of the actor."""
        view, _ = self.within_budget(example.visible(self.acted_seat(example)))
        words = feedback.text if feedback is not None else None
        return self.prompts.render(template, feedback=words, **view)

    # -- scoring ----------------------------------------------------------------------------------

    def parse(self, text: str) -> tuple[str, str]:
        return read_comment(text, self.protocol)

    def grade(self, example: Example, answer: str) -> float:
        """The rule-based part of the score: the words that a reply shares with the original."""
        return lexical_f1(answer, str(example.fields["completion"]))

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Raises UnreadableVerdict (the episode is then unscored) if no verdict is readable."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        assert episode.final is not None
        reply, parsed = self.parse(episode.final.text)
        status = actor_status(episode.final, parsed, self.strict_endings)
        if status not in READABLE:  # nothing for a judge to rate
            return self._no_answer(status)
        return await self.rated(example, episode, reply, status, cast)

    async def rated(
        self, example: Example, episode: Episode, reply: str, status: str, cast: Cast
    ) -> Score:
        """A reply's score from the six aspects."""
        asked_for = question("score", self.judge_prompt("judge", example, reply), self.sides)
        opinions: Sequence[panel.Opinion[Any]] = await panel.opinions(cast, asked_for, episode)
        scores = {
            axis: panel.pooled(opinions, partial(_side_score, axis), cast.panel.combine)
            for axis in AXES
        }
        metrics: Metrics = {
            **{f"axis/{axis}": number for axis, number in scores.items()},
            **self.text_metrics(example, reply, sides_mean(scores)),
            **panel.mean_agreement((opinions, partial(_side_score, axis), 0, 1) for axis in AXES),
        }
        return self._scored("judge", metrics, status, opinions)

    def text_metrics(self, example: Example, reply: str, judged: float) -> Metrics:
        """The headline `likeness` and additional metrics, from the judge's number."""
        original = str(example.fields["completion"])
        factor, both = length_factor(reply, original), two_sided_factor(reply, original)
        return {
            "likeness": clip_share(judged * factor),
            "two_sided": clip_share(judged * both),
            "sides_mean": judged, "length_factor": factor, "two_sided_factor": both,
            "lexical_f1": lexical_f1(reply, original),
            "echoes_original": float(echoes_reference(reply, original, self._public(example))),
        }  # fmt: skip

    def _scored(
        self, template: str, metrics: Metrics, status: str,
        opinions: Sequence[panel.Opinion[Any]],
    ) -> Score:  # fmt: skip
        return self.judged_score(
            metrics.pop("likeness"), metrics, panel.verdicts_of(opinions), status=status,
            words=panel.in_words(opinions), templates=("person", self.template, template),
        )  # fmt: skip

    def _no_answer(self, status: str) -> Score:
        low = self.spec.metric.low
        metrics: Metrics = dict.fromkeys((*(f"axis/{axis}" for axis in AXES), "sides_mean"))
        nothing = dict.fromkeys(("two_sided", "lexical_f1", "echoes_original"), low)
        return self.judged_score(
            low, {**metrics, **nothing}, status=status, words="There is no answer.",
            templates=("person", self.template, "judge"),
        )  # fmt: skip

    def judge_prompt(self, template: str, example: Example, reply: str) -> str:
        """A question about a reply, with the original and what the person had read."""
        view, _ = self.within_budget(example.visible("judge"))
        return self.prompts.render(
            template,
            context=fence(view["prompt"], "context"),
            original=fence(view["completion"], "original"),
            reply=fence(reply, "reply"),
        )

    # -- feedback ---------------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view, _ = self.within_budget(example.visible("coach"))
        reply, _ = self.parse(episode.transcript[-1].text if episode.transcript else "")
        remarks = self.judge_remarks(example, score)
        return {
            "persona": view["persona"],
            "context": fence(last_words(view["prompt"], CUT_FOR_THE_COACH), "context"),
            "reply": fence(reply or "(nothing)", "reply"),
            "remarks": fence(remarks, "remarks") if remarks else "",
            "short": coaching.is_short(score), "long": coaching.is_long(score),
        }  # fmt: skip

    def judge_remarks(self, example: Example, score: Score) -> str:
        """The judge's remarks on the draft, for a coach that must not know the original."""
        original = str(example.fields["completion"])
        return coaching.judge_remarks(score, original, self._public(example))

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        view = self.leak_view(example) or LeakView()
        return first_safe_lesson(coaching.person_lessons(score), view)

    def leak_view(self, example: Example) -> LeakView | None:
        return LeakView(
            reference=str(example.fields["completion"]), rubric=coaching.RUBRIC,
            public=self._public(example),
        )  # fmt: skip

    def _public(self, example: Example) -> str:
        return f"{example.fields['persona']}\n{example.fields['prompt']}"

    # -- self-checks ------------------------------------------------------------------------------

    def gold_completion(self, example: Example) -> str:
        return in_tag(example.fields["completion"])

    def wrong_completion(self, example: Example) -> str:
        return in_tag(BLAND)

    def gold_text(self, example: Example) -> str:
        return str(example.fields["completion"])

    def canary(self, example: Example, text: str) -> Episode | None:
        return super().canary(example, in_tag(text))

    def verdict(self, form: str, perfect: bool) -> str | None:
        number = 1.0 if perfect else 0.0
        if form in ("SixSides", "LooseSixSides"):
            return json.dumps({axis: {"thought": "as scripted", "score": number} for axis in AXES})
        if form == "Coverage":
            return json.dumps({"key_points": "all", "thought": "as scripted", "score": number})
        return None

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        yield "judge_coverage", self.judge_prompt("judge_coverage", example, BLAND)
        words = {"advice": "Look again.", "gold": self.gold_text(example)}
        yield "inspiration", self.prompts.render("inspiration", **words)


def in_tag(text: str) -> str:
    """A reply in the required form."""
    return f"<response>{text}</response>"


def _side_score(axis: str, verdict: Any) -> float:
    return float(getattr(verdict, axis).score)


SHOWN_WORDS = 2000
"""Maximum words of the original in the prompt of a refined reply."""


class HumanualReference(Humanual):
    sides = LooseSixSides

    def check(self, fields: Mapping[str, Any]) -> None:
        """Accept every row."""

    def calls(self, example: Example) -> dict[Role, int]:
        """One call each: the judge scores drafts, the auditor scores refined replies."""
        return {**super().calls(example), "auditor": 1}

    # -- prompts ----------------------------------------------------------------------------------

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        seen = Segment("user", self.rendered(self.template, example, None))
        return (self.slot(example, self.acted_seat(example), feedback), seen)

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        bare = self.rendered("person", example, None)
        return Segment("system", self.rendered("person", example, feedback), bare=bare)

    # -- scoring ----------------------------------------------------------------------------------

    async def rated(
        self, example: Example, episode: Episode, reply: str, status: str, cast: Cast
    ) -> Score:
        if episode.kind != "refined":
            return await super().rated(example, episode, reply, status, cast)
        assert episode.final is not None
        reply_text = field_text(episode.final.text, "response")
        prompt = self.judge_prompt("judge_coverage", example, reply_text)
        opinions = await panel.opinions(
            cast, question("coverage", prompt, Coverage, role="auditor"), episode
        )
        value = clip_share(panel.pooled(opinions, lambda said: said.score, cast.panel.combine))
        shared = lexical_f1(reply_text, self.gold_text(example))
        return self._scored(
            "judge_coverage", {"likeness": value, "lexical_f1": shared}, status, opinions
        )

    # -- feedback ---------------------------------------------------------------------------------

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        """The coach's words, followed by what the person wrote."""
        feedback = await super().critique(example, episode, score, cast, rollout)
        if feedback is None:
            return None
        original = first_words(self.gold_text(example), SHOWN_WORDS)
        text = self.prompts.render("inspiration", advice=feedback.text, gold=original)
        return Feedback(text=text, author=feedback.author, kind=feedback.kind,
                        dimensions=feedback.dimensions)  # fmt: skip

    def judge_remarks(self, example: Example, score: Score) -> str:
        """All of the judge's remarks, because this coach sees the original as well."""
        return "\n".join(f"{axis} ({n:g}): {text}" for axis, (text, n) in thoughts(score).items())

    def leak_view(self, example: Example) -> LeakView | None:
        return None
