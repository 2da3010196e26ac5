"""Scores by a judge: the kinds `judged`, one reply, and `dialogue`, which may also have a gold.

The judge reads the task's own template, or the shared one, which shows what the actor was asked,
what it wrote, the gold, and every column that no seat's prompt names. Rubrics and scales are part
of the template's text, so the hash in a score covers them:

    value = Σ weight · (mark − low) / (high − low) / Σ weight       dimensions, or one score
    value = 1 if the judge prefers the reply to the gold, 0.5 for a tie, 0 otherwise     both orders
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from soulkit.data.literals import texts_of
from soulkit.judge import panel
from soulkit.judge.leaks import LeakView
from soulkit.judge.pairwise import judge_pair
from soulkit.judge.structured import VerdictShape, dimension_shape, question, rated_part
from soulkit.judge.verdict import fence, transcript, utterances
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.declared.keys import ACTOR, JUDGE, PARTNER, PROMPT, DialogueKeys, JudgeKeys
from soulkit.tasks.kit.declared.scorers import matches
from soulkit.tasks.kit.declared.single import YamlAnswer
from soulkit.tasks.kit.dialogue import DialogueTask
from soulkit.tasks.kit.scoring import actor_status
from soulkit.types import Episode, Example, Feedback, Line, Role, Score, Segment, unscored

_SCALES = re.compile(r"\{\{-?\s*scales\s*-?\}\}")
_SECRET_WORDS = 3
"""Minimum number of words of a judge's column that feedback must not repeat."""
REPLY, WEAK_REPLY = "This is what I would say to it.", "No idea."
"""Scripted replies for self-checks, where a row has no gold."""
ENDED = "ended"
"""The stop reason of a dialogue in which one side said an end."""
HELLO = "Hello."
"""What a scripted partner says, for self-checks."""


class YamlJudge(YamlAnswer):
    """Scoring by a judge, if the task has one."""

    @property
    def judge(self) -> JudgeKeys:
        assert self.keys.judge is not None
        return self.keys.judge

    def template_texts(self) -> dict[str, str]:
        texts = super().template_texts()
        if self.keys.judge is not None:
            text = self.judge.prompt or self.prompts.source("task_judge")
            text = text if _SCALES.search(text) else f"{text.rstrip()}\n\n{{{{ scales }}}}"
            texts[JUDGE] = _SCALES.sub(lambda _: _in_words(self.judge), text)
        return texts

    def judge_calls(self) -> dict[Role, int]:
        """Calls per episode, with all samples and orders."""
        return {"judge": self.judge.samples * (1 + self.judge.both_orders)}

    @cached_property
    def ratings(self) -> type[VerdictShape]:
        """The form of a rating: reasons and a score, for each dimension or alone."""
        parts = {name: rated_part(f"Rating{place}", int, "reasoning", (one.low, one.high))
                 for place, (name, one) in enumerate(self.judge.scales.items())}  # fmt: skip
        return parts.get("") or dimension_shape("Ratings", "A judge's ratings.", parts)

    # -- scoring ------------------------------------------------------------------------------

    def reply_of(self, episode: Episode) -> tuple[str, str]:
        """(reply, status): the actor's last words, and how they were read."""
        replies = [text for text in utterances(episode) if text.strip()]
        reply, parsed = self.parse(replies[-1]) if replies else ("", "empty")
        parsed = parsed if reply or parsed == "no_tag" else "empty"
        final = None if self.keys.dialogue else episode.final
        return reply, parsed if final is None else actor_status(final, parsed, self.strict_endings)

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Raises UnreadableVerdict (the episode is then unscored) if no verdict is readable."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        reply, status = self.reply_of(episode)
        if status not in READABLE:  # the actor's own failure: the judge is not asked
            nothing = dict.fromkeys(self.judge.dimensions)
            return self.judged_score(self.spec.metric.low, nothing, status=status)
        ask = self._preferred if self.judge.both_orders else self._rated
        score = await ask(self._judge_view(example, episode, reply), episode, cast)
        return replace(score, status=status)

    def _judge_view(self, example: Example, episode: Episode, reply: str) -> dict[str, Any]:
        """The values of the judge's template; everything but the named columns is fenced."""
        view, _ = self.within_budget(example.visible(JUDGE))
        others = "\n".join(
            f"{name}: {'; '.join(texts_of(value))}" for name, value in view.items()
            if name not in self.gold_fields and not {ACTOR, PARTNER} & set(example.audience[name])
        )  # fmt: skip
        gold, pair = self.gold_text(example), self.judge.both_orders
        texts = {"other_columns": others, "task_prompt": self.task_prompt(example),
                 "gold": gold, "reply": reply}  # fmt: skip
        lines = transcript(episode.transcript) if self.keys.dialogue else ""
        sides = [fence(text, "answer") if pair else "" for text in (reply, gold)]
        fenced = {name: fence(text, name) if text else "" for name, text in texts.items()}
        return {**view, **fenced, "transcript": lines, "a": sides[0], "b": sides[1]}

    async def _rated(self, view: Mapping[str, Any], episode: Episode, cast: Cast) -> Score:
        prompt, scales = self.prompts.render(JUDGE, **view), self.judge.scales
        rated = await panel.opinions(cast, question("score", prompt, self.ratings), episode)
        readers = {name: partial(_mark, name) for name in scales}
        marks = {n: panel.pooled(rated, read, cast.panel.combine) for n, read in readers.items()}
        shares = [d.weight * (marks[n] - d.low) / (d.high - d.low) for n, d in scales.items()]
        agreed = panel.mean_agreement((rated, readers[n], d.low, d.high) for n, d in scales.items())
        return self.judged_score(
            sum(shares) / sum(d.weight for d in scales.values()),
            {**{name: mark for name, mark in marks.items() if name}, **agreed},
            panel.verdicts_of(rated), words=panel.in_words(rated),
        )  # fmt: skip

    async def _preferred(self, view: Mapping[str, Any], episode: Episode, cast: Cast) -> Score:
        def prompt(first: bool) -> str:
            sides = {} if first else {"a": view["b"], "b": view["a"]}
            return self.prompts.render(JUDGE, **{**view, **sides})

        outcome = await judge_pair(cast, episode, prompt)
        flips = {"position_flip": outcome.position_flip}
        return self.judged_score(outcome.value, flips, outcome.verdicts)

    # -- feedback and scripts -----------------------------------------------------------------

    def leak_view(self, example: Example) -> LeakView:
        """Feedback must repeat neither the gold (without a judge, it is an answer, which must not
        be named) nor what only the partner or the judge sees."""
        seat, readers = self.acted_seat(example), example.audience
        hidden = tuple(
            text for name, value in example.fields.items()
            if not {seat, "gold"} & set(readers[name]) for text in texts_of(value)
            if PARTNER in readers[name]
            or (JUDGE in readers[name] and len(text.split()) >= _SECRET_WORDS)
        )  # fmt: skip
        gold, judged = self.gold_text(example), self.keys.judge is not None
        return LeakView(
            self.task_prompt(example), gold="" if judged else gold,
            reference=gold if judged else "", private=hidden,
        )  # fmt: skip

    def verdict(self, form: str, perfect: bool) -> str | None:
        if self.judge.both_orders:
            return None  # a good verdict depends on the order
        marks = {name: {"reasoning": "as scripted", "score": one.high if perfect else one.low}
                 for name, one in self.judge.scales.items()}  # fmt: skip
        return json.dumps(marks.get("", marks))


class YamlJudged(YamlJudge, ChoiceTask):
    """One reply, scored by a judge."""

    template = PROMPT

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gold_is_script = not self.keys.gold
        self.pair_calls = self.judge_calls()["judge"] if self.judge.both_orders else 0

    def calls(self, example: Example) -> dict[Role, int]:
        return {"actor": 1, **self.judge_calls()}

    def gold_completion(self, example: Example) -> str:
        return self.in_form(self.gold_text(example) or REPLY)

    def wrong_completion(self, example: Example) -> str:
        return self.in_form(WEAK_REPLY)

    def canary(self, example: Example, text: str) -> Episode | None:
        return super().canary(example, self.in_form(text))


class YamlDialogue(YamlJudge, DialogueTask):
    """A conversation with a partner, scored by a judge, or by the actor's last line.

    The actor's prompt is a system message. The conversation ends after the declared turns, when
    either side says one of the declared `ends` (the partner only after a turn of the actor), or
    when the actor says nothing.
    """

    prompt_role = "system"
    partner_attempts = 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.keys.dialogue is not None
        self.talk: DialogueKeys = self.keys.dialogue
        self.start, self.actor_begins = self.talk.start, self.talk.begins == "actor"
        self.gold_is_script = self.keys.judge is not None

    def calls(self, example: Example) -> dict[Role, int]:
        answers = self.most_turns - self.actor_begins
        calls: dict[Role, int] = {"actor": self.most_turns, "partner": answers}
        calls |= self.judge_calls() if self.keys.judge else {}
        return {role: count for role, count in calls.items() if count}

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return (*self.context(example, None), Segment("user", self.start))

    def ending(self, example: Example, lines: Sequence[Line], turns: int) -> str | None:
        return self.partner_ending(lines[-1].text) if lines[-1].text else "empty"

    def partner_ending(self, line: str) -> str | None:
        return ENDED if any(_says(line, end) for end in self.talk.ends) else None

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if self.keys.judge is not None or episode.failure is not None:
            score = await super().score(example, episode, cast)
        else:
            answer, status = self.reply_of(episode)
            value = self.grade(example, answer) if status in READABLE else self.spec.metric.low
            score = self.judged_score(value, {}, status=status, words=answer)
        turns, ended = float(len(utterances(episode))), float(episode.stop == ENDED)
        return replace(score, metrics={**score.metrics, "turns": turns, "ended": ended})

    # -- scripts ------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        last = REPLY if self.keys.judge else self.gold_completion(example)
        return self.scripted(example, [(HELLO, last)], feedback, "max_turns")

    def wrong(self, example: Example) -> Episode:
        return self.scripted(example, [(HELLO, WEAK_REPLY)], None, "max_turns")

    def canary(self, example: Example, text: str) -> Episode | None:
        return (
            self.scripted(example, [(HELLO, text)], None, "max_turns") if self.keys.judge else None
        )


def _says(line: str, end: str) -> bool:
    """Whether a line says an end: a text, or a pattern between two slashes; ignoring case."""
    if len(end) > 2 and end[0] == end[-1] == "/":
        return any(matches(end[1:-1], line, re.IGNORECASE))
    return end.casefold() in line.casefold()


def _mark(name: str, rating: Any) -> float:
    return float((getattr(rating, name) if name else rating).score)


def _in_words(judge: JudgeKeys) -> str:
    """What the judge should look at, the scales, and the form of the answer."""
    reasons, form = "one to three sentences", dict[str, Any]()
    lines = [judge.rubric] if judge.rubric else []
    if judge.both_orders:
        form = {"reasoning": reasons, "verdict": "A"}
        lines.append('The verdict is "A", "B", or "Tie" if neither is clearly better.')
    for name, one in judge.scales.items() if not judge.both_orders else ():
        part = {"reasoning": reasons, "score": (one.low + one.high) // 2}
        form = {**form, name: part} if name else part
        label, rubric = (f"- {name}", f": {one.rubric}") if name else ("The score is", ".")
        lines.append(f"{label} from {one.low} (worst) to {one.high} (best){rubric}")
    lines.append("Answer with one JSON object of this form, and nothing around it:")
    return "\n".join([*lines, json.dumps(form, ensure_ascii=False)])
