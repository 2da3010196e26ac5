"""Which of three shades somebody means, with advice of any quality: a class for each."""

from __future__ import annotations

from pathlib import Path

from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import tagged_letter
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.tasks.kit.registry import TaskSpec
from soulkit.types import Episode, Example, Feedback, Protocol, Score, Segment

LETTERS = "ABC"


class Shade(ChoiceTask):
    """Has nothing to say."""

    def __init__(
        self, name: str, spec: TaskSpec, *, protocol: Protocol = "paper", folder: Path | None = None
    ) -> None:
        super().__init__(name, spec, protocol=protocol, folder=folder)
        self.prompts = PromptFolder("slotless" if name == "slotless" else "shade", folder)

    def parse(self, text: str) -> tuple[str, str]:
        return tagged_letter(text, self.protocol)

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.letter(example))

    def letter(self, example: Example) -> str:
        return LETTERS[example.fields["shades"].index(example.fields["meant"])]

    def gold_text(self, example: Example) -> str:
        return str(example.fields["meant"])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.letter(example)}</answer>"

    def leak_view(self, example: Example) -> LeakView:
        shades = tuple(example.fields["shades"])
        return LeakView(example.fields["said"], shades, self.gold_text(example), tuple(LETTERS))


class Kind(Shade):
    """Says something useful."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        return "Think of what the speaker looked at."


class Blunt(Shade):
    """Says the answer."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        return f"It is {example.fields['meant']}."


class Pointing(Shade):
    """Leaks on every readable draft: what is ruled out leaves one shade; else says nothing."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        wrong = [shade for shade in example.fields["shades"] if shade != example.fields["meant"]]
        return f"Neither {wrong[0]} nor {wrong[1]}." if score and score.words else None


class Curt(Shade):
    """Says something useful about replies that nobody can read, and the answer about the rest."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        unread = score is not None and score.status not in ("ok", "salvaged")
        return "Put one letter between the tags." if unread else f"It is {example.fields['meant']}."


class Praising(Shade):
    """Says something useful about what is right already, and the answer about the rest."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        right = score is not None and score.value == 1
        return "That is how to look at it." if right else f"It is {example.fields['meant']}."


class Generous(Kind):
    """Likes whatever is said."""

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        return Score(value=1.0, reward=1.0)


class Contented(Generous):
    """The same, and has nothing to say about what it likes."""

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        return super().explain(example, episode, score) if not score or score.value != 1 else None


class Closed(Kind):
    """Has a gate of its own that never opens."""

    def gate(self, score: Score, step: int) -> bool:
        return False


class Unmarked(Kind):
    """Shows feedback in a message that nobody knows without it."""

    def context(self, example: Example, feedback: Feedback | None) -> tuple[Segment, ...]:
        return tuple(Segment(s.role, s.text) for s in super().context(example, feedback))


class Worded(Kind):
    """Its own critique, for whoever coaches."""

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        return self.symbolic("Think of the light.")
