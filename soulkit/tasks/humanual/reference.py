"""Humanual under `--protocol reference`: the published scores, gate and feedback.

Any row and any reply is judged: a reply without the tag is taken whole, a cut one as it stands, one
that says nothing as "". A single score may lie off its scale, only their mean is clipped. Feedback
stands in the system prompt, before the form of the answer, with the original itself beside it, and
nothing is checked for leaks.

A refined reply is scored by other means than its draft: by another question (points of the original
that are covered, less a penalty; no length factor) to another player. That player is the `auditor`
of the declaration, since it must not depend on who judges: naming a judge names it as well, unless
an auditor is named, too. Thinking is not taken out of a refined reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.judge import panel
from soulkit.judge.leaks import LeakView
from soulkit.judge.structured import question
from soulkit.models.base import Cast
from soulkit.tasks.base import Rollout
from soulkit.tasks.budgets import first_words
from soulkit.tasks.humanual.coach import thoughts
from soulkit.tasks.humanual.replies import field_text
from soulkit.tasks.humanual.scores import Coverage, LooseSixSides, clip_share, lexical_f1
from soulkit.tasks.humanual.task import Humanual
from soulkit.types import Episode, Example, Feedback, Role, Score, Segment

SHOWN_WORDS = 2000
"""Words of the original that a refined reply's prompt holds."""


class HumanualReference(Humanual):
    sides = LooseSixSides

    def check(self, fields: Mapping[str, Any]) -> None:
        """Every row can be played."""

    def calls(self, example: Example) -> dict[Role, int]:
        """At most one of the two judges is asked about an episode."""
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
        whole = field_text(episode.final.text, "response")
        prompt = self.judge_prompt("judge_coverage", example, whole)
        opinions = await panel.opinions(
            cast, question("coverage", prompt, Coverage, role="auditor"), episode
        )
        value = clip_share(panel.pooled(opinions, _covered, cast.panel.combine))
        shared = lexical_f1(whole, self.gold_text(example))
        return self._scored(
            "judge_coverage", {"likeness": value, "lexical_f1": shared}, status, opinions
        )

    # -- feedback ---------------------------------------------------------------------------------

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        """The coach's words, and under them what the person wrote."""
        feedback = await super().critique(example, episode, score, cast, rollout)
        if feedback is None:
            return None
        original = first_words(self.gold_text(example), SHOWN_WORDS)
        text = self.prompts.render("inspiration", advice=feedback.text, gold=original)
        return Feedback(text=text, author=feedback.author, kind=feedback.kind,
                        dimensions=feedback.dimensions)  # fmt: skip

    def judge_remarks(self, example: Example, score: Score) -> str:
        """All that the judge said: this coach sees the original as well."""
        return "\n".join(f"{axis} ({n:g}): {text}" for axis, (text, n) in thoughts(score).items())

    def leak_view(self, example: Example) -> LeakView | None:
        return None


def _covered(verdict: Coverage) -> float:
    return verdict.score
