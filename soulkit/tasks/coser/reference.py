"""CoSER under `--protocol reference`: the published play, marks and feedback condition.

A scene has ten rounds (fifteen if refined). After its opening, each character has 8,192 tokens,
including the messages that it hears. Characters read the plot's summary. The next speaker comes
from a predictor that remembers its answers; an unusable name is replaced by a random one; a silent
turn ends the scene. One verdict holds four marks from 1 to 10. The coach reads the book's scene and
the characters' thoughts; its notes are still checked for leaks.

Not reproduced: a failed judge does not give the worst score, and a character that thinks aloud does
not get half the reward, because all characters of a scene share one reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from soulkit.judge import panel
from soulkit.judge.leaks import LeakView, check_leak
from soulkit.judge.structured import JudgeQuestion, question
from soulkit.judge.verdict import fence, remove_think, transcript
from soulkit.models.base import Cast, Player
from soulkit.tasks.coser import judging
from soulkit.tasks.coser.judging import ASPECTS, Marks, anchored, plain_bleu, plain_rouge_l
from soulkit.tasks.coser.scene import (
    END,
    ENDS_FROM,
    ENVIRONMENT,
    START,
    BookScene,
    Candidates,
    SceneBook,
    bracketed,
    speaker_in,
    speakers,
    with_label,
    without_bracketed,
)
from soulkit.tasks.coser.task import Coser, Opinions
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.coaching import fenced_remarks
from soulkit.tasks.kit.dialogue import Conversation, within_episode
from soulkit.tasks.kit.prompting import first_words
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Score,
    Segment,
)

PURPOSE = "score"
UNBOUNDED = 1_000_000
"""A word limit that no message reaches: the reference truncates nothing."""
COACH_TURN, COACH_WORDS = 500, 2000
"""Word limits of the book's scene for the coach: per message and in total."""


class PublishedBook(SceneBook):
    """Lines carry their speaker's name unless they already contain it."""

    def audible_text(self, seat: str, text: str) -> str:
        return without_bracketed(remove_think(text, remove_unclosed=True))

    def public_text(self, line: Line) -> str:
        return with_label(line.text, line.seat)


@dataclass
class PublishedScene(PublishedBook, BookScene):
    """The predictor has its own conversation; a silent turn ends the scene."""

    predictor: Conversation | None = field(default=None, init=False)
    taken: int = field(default=0, init=False)
    """Number of lines that the predictor has received."""

    def actor(self, seat: str) -> Player | None:
        return within_episode(self.stage.tables[seat], self.cast.actor)

    def words_left(self, reply: Completion) -> str:
        return remove_think(reply.text, remove_unclosed=True)

    def _memory(self, reply: Completion) -> str:
        return reply.text

    async def surroundings(self, index: int) -> bool:
        call = self.rollout.call("environment", self.example, index, purpose="environment")
        player = self.cast.player("environment")
        reply = await player.complete(self.surroundings_context(), call)
        self.stage.usage += reply.usage
        if not self.words_left(reply):
            return False
        self.record(ENVIRONMENT, self.audible_text(ENVIRONMENT, reply.text))
        return True

    async def following(self, current: str, index: int) -> str | None:
        table, options = self._predictor_table(), self.candidates(current, index)
        call = self.rollout.call("environment", self.example, index, purpose="next_speaker")
        reply = await self.cast.player("environment").complete(tuple(table.context), call)
        self.stage.usage += reply.usage
        text = remove_think(reply.text, remove_unclosed=True)
        if not text:
            return None
        name = speaker_in(text)
        usable = name in options.names or (name == END and index >= ENDS_FROM)
        table.context.append(Segment("assistant", text if usable else name))
        if not usable:
            table.notify(table.context[0].text)
        return self.settled(name, options, index)

    def settled(self, answer: str | None, options: Candidates, index: int) -> str:
        """If the predictor asks for a random draw, its answer counts as an unusable name."""
        return super().settled(None if answer == "random" else answer, options, index)

    def _predictor_table(self) -> Conversation:
        if self.predictor is None:
            prompt = self.task.predictor_prompt(self.example, "", speakers(self.example.fields))
            opening = [Segment("system", prompt), Segment("user", START)]
            self.predictor = Conversation("next_speaker", opening)
        for line in self.stage.lines[self.taken :]:
            if line.text:
                self.predictor.notify(self.public_text(line))
        self.taken = len(self.stage.lines)
        return self.predictor


class CoserReference(Coser):
    book, scene = PublishedBook, PublishedScene
    plot_is_known = judges_silence = True
    templates = ("character", "environment", "next_speaker", "judge")

    def keep_options(self, options: Mapping[str, Any]) -> None:
        super().keep_options(options)
        self.heard_words = self.line_words = UNBOUNDED

    def rounds(self, kind: Kind) -> int:
        return int(self.spec.options["refined_rounds"]) if kind == "refined" else self.max_rounds

    def purposes(self) -> tuple[str, ...]:
        return (PURPOSE,)

    def profile_words(self, feedback: Feedback | None) -> tuple[int, int]:
        """Only a prompt with feedback is truncated."""
        words = UNBOUNDED if feedback is None else int(self.spec.options["refined_words"])
        return words, words

    def questions(self, example: Example, episode: Episode) -> list[JudgeQuestion[Any]]:
        prompt = self.prompts.render("judge", **self.judge_view(example, episode))
        return [question(PURPOSE, prompt, Marks)]

    def rated(
        self, replies: Opinions, messages: int, cast: Cast
    ) -> tuple[dict[str, float], dict[str, float | None]]:
        opinions, how = replies[PURPOSE], cast.panel.combine
        points = {slug: panel.pooled(opinions, partial(_points, slug), how) for slug in ASPECTS}
        return points, {}

    def words(self, replies: Opinions) -> str:
        marks = [(aspect.title, getattr(verdict, slug))
                 for verdict in panel.readable(replies[PURPOSE])
                 for slug, aspect in ASPECTS.items()]  # fmt: skip
        return "\n".join(f"{title}: {mark.score} of 10. {mark.reasoning}" for title, mark in marks)

    def public_line(self, line: Line) -> Line:
        """A line without its bracketed thoughts; the environment's lines stay unchanged."""
        bare = line.text if line.seat == ENVIRONMENT else without_bracketed(line.text)
        return Line(line.seat, bare)

    def likeness(self, example: Example, episode: Episode) -> dict[str, float | None]:
        """Computed without packages; only the recorded side includes speaker names."""
        count = int(episode.notes.get("replayed", 0))
        gold = "\n".join(f"{line.seat}: {line.text}" for line in self.recorded(example)[count:])
        text = "\n".join(line.text for line in episode.transcript[count:])
        return {"bleu": plain_bleu(gold, text), "rouge_l": plain_rouge_l(gold, text)}

    def gate(self, score: Score, step: int) -> bool:
        options = self.spec.options
        low = score.reward is not None and score.reward <= options["gate"]
        return low and step < options["gate_steps"]

    # -- feedback ---------------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """Includes all characters' thoughts, the book's scene and the two worst dimensions."""
        view = super().coach_view(example, episode, score)
        worst = sorted(ASPECTS, key=lambda slug: score.metrics.get(slug) or 0.0)[:2]
        reasons = judging.aspect_reasons(score)
        notes = [f"{ASPECTS[slug].title}: {reasons[slug]}" for slug in worst if slug in reasons]
        return {
            **view, "transcript": transcript(self._thought_aloud(episode)),
            "remarks": fenced_remarks(notes),
            "gold": fence(self._brief(example), "book"),
        }  # fmt: skip

    async def critique(
        self, example: Example, episode: Episode, score: Score, cast: Cast, rollout: Rollout
    ) -> Feedback | None:
        """Notes that also must not reveal the characters' thoughts in the draft."""
        feedback = await super().critique(example, episode, score, cast, rollout)
        if feedback is None:
            return None
        public = (self.leak_view(example).public, *(line.text for line in episode.transcript))
        view = LeakView(private_by_seat=_thoughts(episode), public="\n".join(public))
        return check_leak(feedback, view)

    def _thought_aloud(self, episode: Episode) -> Iterator[Line]:
        texts = {t.seat: iter([turn.completion.text for turn in t.turns]) for t in episode.traces}
        replayed = int(episode.notes.get("replayed", 0))
        for place, line in enumerate(episode.transcript):
            written = place >= replayed and line.seat in texts
            yield Line(line.seat, next(texts[line.seat], line.text)) if written else line

    def _brief(self, example: Example) -> str:
        lines = [(line.seat, first_words(line.text, COACH_TURN)) for line in self.recorded(example)]
        return first_words("\n".join(f"{name}: {text}" for name, text in lines), COACH_WORDS)


def _thoughts(episode: Episode) -> dict[str, tuple[str, ...]]:
    """Seat → its thoughts in a draft, turn by turn."""
    thoughts: dict[str, tuple[str, ...]] = {}
    for trace in episode.traces:
        texts = (bracketed(turn.completion.text) for turn in trace.turns)
        thoughts[trace.seat] = tuple(filter(None, texts))
    return thoughts


def _points(slug: str, marks: Any) -> float:
    return anchored(getattr(marks, slug).score)
