"""Sotopia under `--protocol reference`: the published scene, reward and feedback condition.

15 turns; leaving counts from the sixth turn on; a silent side ends the scene (a partner's empty
reply is requested once more). The value is the mean, as under `paper`; the reward is computed as in
the reference's learner. The auditor matters only in training, and even a silent actor is judged.
The coach reads the private texts of both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.judge.coach import RISKS
from soulkit.judge.leaks import LeakView
from soulkit.models.base import Player
from soulkit.tasks.kit.dialogue import within_episode
from soulkit.tasks.kit.prompting import first_words
from soulkit.tasks.sotopia.actions import MAX_WORDS, NONE, Action, parse_line
from soulkit.tasks.sotopia.judging import LooseRatings, audited_lines, average, reference_reward
from soulkit.tasks.sotopia.task import SEATS, Scene, Sotopia
from soulkit.types import Episode, Example, Line, Score, Segment

_THINKING = ("<think>", "<seed:think>")


class ReferenceScene(Scene):
    """A scene that ends when a side is silent; the partner may leave before the actor's first turn.

    After its prompt, the episode has EPISODE_TOKENS, including the words of both sides and the
    marks between them; with fewer than LEAST_TOKENS left, sampling stops.
    """

    def actor(self) -> Player | None:
        return within_episode(self.talk, self.cast.actor)

    async def _answer(self, seat: str, index: int) -> Action | None:
        partner, context = self.cast.player("partner"), self._partner_context(seat)
        for sample in range(2):
            call = self.rollout.call("partner", self.example, index, sample)
            reply = await partner.complete(context, call)
            self.talk.usage += reply.usage
            action = self._read(seat, reply.text, context)
            if action is not None:
                return self._hear(seat, action)
            if reply.text.strip():
                return None  # a reply with nothing but thinking is not requested again
        return None

    def _read(self, seat: str, reply: str, context: Sequence[Segment]) -> Action | None:
        if seat != self.talk.seat:
            reply = first_words(reply, MAX_WORDS)
        action = super()._read(seat, reply, context)
        return None if action is None or action.kind == NONE else action


class SotopiaReference(Sotopia):
    ratings = LooseRatings
    scene = ReferenceScene
    judges_silence = True

    def keep_options(self, options: Mapping[str, Any]) -> None:
        super().keep_options(options)
        self.leave_from = int(options["leave_from"])

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Treat any `eval_position` other than agent1 as agent2, and accept equal names."""
        position = fields.get("eval_position")
        first = position is None or str(position) == "agent1"
        return {**fields, "eval_position": "agent1" if first else "agent2"}

    def coached(self, fields: Mapping[str, Any]) -> Sequence[str]:
        return SEATS

    @property
    def value_needs_audit(self) -> bool:
        return False

    def _numbers(
        self, raw: Mapping[str, float], risk: str, episode: Episode, acts: Sequence[Action]
    ) -> tuple[float, float, dict[str, float | None], str]:
        _, _, metrics, _ = super()._numbers(raw, risk, episode, acts)
        replies = (t.completion.text.strip() for trace in episode.traces for t in trace.turns)
        share, reward = reference_reward(
            raw, risk, is_train=True, kind=episode.kind,
            thought_aloud=any(reply.startswith(_THINKING) for reply in replies),
        )  # fmt: skip
        flags = {f"hack_{level}": float(risk == level) for level in RISKS}
        return average(raw) / 10, reward, {**metrics, **flags, "weighted_in_training": share}, "ok"

    def _retold(self, example: Example, line: Line) -> str:
        return line.text

    def _audited(self, example: Example, episode: Episode) -> list[str]:
        names = self.names(example)
        name = names[self.acted_seat(example)]
        lines = (line for line in episode.transcript if names.get(line.seat) == name)
        return audited_lines([parse_line(name, line.text) for line in lines])

    def gate(self, score: Score, step: int) -> bool:
        mean = score.metrics.get("eval_avg")
        return mean is not None and mean <= 4 and score.metrics.get("hack_low") == 1.0

    def hidden_from_coach(self, example: Example) -> LeakView:
        return LeakView()
