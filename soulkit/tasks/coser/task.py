"""CoSER: the characters of a scene from a book; the actor plays all of them.

`scene.py` plays the scene. Each character that may speak is a seat with its own context, and has a
trace if it spoke. The environment model also decides who speaks next.

`paper`: 20 rounds; four critics, one question each, list flaws with severities (judging.py). If a
dimension has no readable verdict, the scene is unscored. A scene in which no character could be
heard gets the minimum without a critic. Every character that spoke gets the scene's value as its
reward. `reference.py` holds the differences of `reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.errors import ConfigError, RowError
from soulkit.judge import panel
from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import Opinion, ask_several
from soulkit.judge.structured import JudgeQuestion, question
from soulkit.judge.verdict import transcript
from soulkit.metrics.text import bleu, rouge_l
from soulkit.models.base import Cast
from soulkit.tasks.coser import judging
from soulkit.tasks.coser.judging import ASPECTS, Flaws, flaw_score, flaw_shape, scene_value
from soulkit.tasks.coser.scene import (
    END,
    ENVIRONMENT,
    OUTCOME_OF,
    PROFILES,
    START,
    SUMMARY,
    THOUGHT_OF,
    BookScene,
    SceneBook,
    audible,
    characters,
    checked_fields,
    dialogue,
    fitted_view,
    names_in,
    plot_summary,
    private_fields,
    profiles,
    seats_of,
    speakers,
    words_out_loud,
)
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.dialogue import Conversation, Stage, cut_note, play_out
from soulkit.tasks.kit.spec import TaskSpec
from soulkit.types import (
    BatchMetric,
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Record,
    Role,
    Score,
    Segment,
    unscored,
)

Opinions = Mapping[str, Sequence[Opinion[Any]]]


def _check_options(spec: TaskSpec) -> None:
    most = int(spec.metric.scales["rounds"][1])
    for name, value in spec.options.items():
        rounds = name.endswith("_rounds")
        if (rounds or name.endswith("_words")) and not 1 <= value <= (most if rounds else value):
            raise ConfigError(
                f"The option {name} cannot be {value}.",
                f"A scene has 1 to {most} messages." if rounds else "No word would be left.",
                f"Use a number from 1 to {most}." if rounds else "Use a number of at least 1.",
            )


class Coser(Task):
    book, scene = SceneBook, BookScene
    templates = ("character", "environment", "next_speaker", "critic")
    plot_is_known = False
    """Whether characters read the summary of their part of the book."""
    judges_silence = False
    """Whether judges also rate a scene in which no character could be heard."""

    def keep_options(self, options: Mapping[str, Any]) -> None:
        _check_options(self.spec)
        self.max_rounds = int(options[f"{self.protocol}_rounds"])
        self.heard_words, self.line_words = int(options["heard_words"]), int(options["line_words"])

    def rounds(self, kind: Kind) -> int:
        """The maximum number of messages in a scene, including those that it continues from."""
        return self.max_rounds

    # -- rows -------------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        checked = checked_fields(fields)
        if int(fields.get("continue_from") or 0) >= self.max_rounds:
            why = f"A scene ends after {self.max_rounds} messages, so nothing would be played."
            raise RowError(f"The row continues from message {fields['continue_from']}.", why)
        return checked

    def seats(self, fields: Mapping[str, Any]) -> Mapping[str, Role]:
        return seats_of(fields)

    def audience(self, fields: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        seats = {"character": tuple(characters(fields)), "environment": (ENVIRONMENT,)}
        return {
            name: tuple(seat for reader in readers for seat in seats.get(reader, (reader,)))
            for name, readers in super().audience(fields).items()
        }

    def example(self, row: Mapping[str, Any], *, source: str = "", split: str = "test") -> Example:
        """The row as an example; each private text is visible only to its character."""
        example = super().example(row, source=source, split=split)
        fields = example.fields
        cast, private = tuple(characters(fields)), private_fields(fields)
        readers: dict[str, tuple[str, ...]] = {
            PROFILES: (*cast, "judge", "coach"),
            SUMMARY: (*(cast if self.plot_is_known else ()), "judge"),
        }
        for name in private:
            readers[name] = (
                (name.removeprefix(THOUGHT_OF),) if name.startswith(THOUGHT_OF) else ("judge",)
            )
        made = {PROFILES: profiles(fields), SUMMARY: plot_summary(fields), **private}
        return replace(example, fields={**fields, **made}, audience={**example.audience, **readers})

    def calls(self, example: Example) -> dict[Role, int]:
        """One call per message, and one prediction after each. The environment never speaks twice
        in a row. One question per critic."""
        rounds = self._played_rounds(example)
        return {
            "actor": rounds, "environment": rounds - 1 + (rounds + 1) // 2,
            "judge": len(self.purposes()),
        }  # fmt: skip

    def shared_calls(self, example: Example) -> int:
        return (self._played_rounds(example) + 1) // 2

    def _played_rounds(self, example: Example) -> int:
        """The maximum number of messages in a draft, without those that it continues from."""
        return self.max_rounds - int(example.fields.get("continue_from") or 0)

    def usual_calls(self, example: Example) -> dict[Role, int]:
        """Assume that the environment speaks as often as in the book; its turns count as rounds."""
        lines = self.usual_lines(example)
        predictions = self._played_rounds(example) - 1
        calls = {**lines, "environment": predictions + lines["environment"]}
        return {**self.calls(example), **calls}

    def usual_lines(self, example: Example) -> dict[Role, int]:
        """Predictions of the next speaker do not count, because no player's prompt contains
        them."""
        speakers = [line["character"] for line in example.fields["dialogues"]]
        share = speakers.count(ENVIRONMENT) / max(1, len(speakers))
        rounds = self._played_rounds(example)
        happenings = min(round(rounds * share), rounds // 2)
        return {"actor": rounds - happenings, "environment": happenings}

    def purposes(self) -> tuple[str, ...]:
        """The purposes of the judge's questions."""
        return tuple(ASPECTS)

    # -- prompts ----------------------------------------------------------------------------------

    def character_view(
        self, example: Example, seat: str, feedback: Feedback | None
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The values for a character's prompt, and the number of words cut from each part."""
        fields, cuts = self.within_budget(example.visible(seat))
        view, cut_parts = fitted_view(fields, seat, *self.profile_words(feedback))
        return {**view, "words": self.spec.options["turn_words"]}, {**cuts, **cut_parts}

    def profile_words(self, feedback: Feedback | None) -> tuple[int, int]:
        """Two word budgets: for the character's own texts, and for all other profiles together."""
        options = self.spec.options
        return int(options["profile_words"]), int(options["others_words"])

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        if seat == ENVIRONMENT:
            return Segment("system", self.surroundings_prompt(example))
        view, _ = self.character_view(example, seat, feedback)
        return self.prompts.opening("character", feedback, view)

    def opening(
        self, example: Example, seat: str, feedback: Feedback | None
    ) -> tuple[Segment, ...]:
        return (self.slot(example, seat, feedback), Segment("user", START))

    def previews(self, example: Example) -> Mapping[str, tuple[Segment, ...]]:
        return {seat: self.opening(example, seat, None) for seat in self.acted_seats(example)}

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """The longest opening of a character."""
        return max(self.previews(example).values(), key=lambda opening: len(opening[0].text))

    def surroundings_prompt(self, example: Example) -> str:
        fields, _ = self.within_budget(example.visible(ENVIRONMENT))
        names = ", ".join(names_in(fields["major_characters"]))
        return self.prompts.render("environment", names=names, scenario=fields["scenario"])

    def predictor_prompt(
        self, example: Example, so_far: str, names: Sequence[str], answers: Sequence[str] = ()
    ) -> str:
        """The prompt of the next-speaker predictor, with only what the environment may see."""
        fields, _ = self.within_budget(example.visible(ENVIRONMENT))
        return self.prompts.render(
            "next_speaker", names=", ".join(names), scenario=fields["scenario"],
            transcript=so_far, may_end=END in answers,
            answers=", ".join(f'"{answer}"' for answer in answers),
        )  # fmt: skip

    # -- playing ----------------------------------------------------------------------------------

    def stage(self, example: Example, feedback: Feedback | None) -> Stage:
        """The conversations of all characters at the start."""
        tables: dict[str, Conversation] = {}
        words: dict[str, int] = {}
        for seat in self.acted_seats(example):
            tables[seat] = Conversation(seat, list(self.opening(example, seat, feedback)))
            _, cuts = self.character_view(example, seat, feedback)
            words |= {f"{seat}: {name}": count for name, count in cuts.items()}
        return Stage(tables, notes=cut_note(words))

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        cast.player("environment")
        stage = self.stage(example, rollout.feedback)
        scene = self.scene(self, example, stage, cast, rollout)
        return await play_out(scene.stage, example, rollout, scene.play)

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """The critics' verdicts as one Score.

        Raises UnreadableVerdict (the episode is then unscored) if a dimension has no readable
        verdict.
        """
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        if not self.judges_silence and not self.messages(example, episode, played=True):
            nothing = {**dict.fromkeys(ASPECTS), "lines": 0.0}
            words = "No character could be heard."
            return self.silent_score(episode, words, nothing)
        replies = await ask_several(cast, self.questions(example, episode), episode)
        points, metrics = self.rated(replies, self.messages(example, episode), cast)
        metrics = {**points, **metrics, **self.facts(example, episode)}
        verdicts = panel.verdicts_of(*replies.values())
        return self.judged_score(scene_value(points), metrics, verdicts, words=self.words(replies))

    def messages(self, example: Example, episode: Episode, played: bool = False) -> int:
        """The number of audible messages of characters; `played` excludes those that the scene
        continues from."""
        seats, first = self.acted_seats(example), int(episode.notes.get("replayed", 0)) * played
        return sum(line.seat in seats and bool(line.text) for line in episode.transcript[first:])

    def questions(self, example: Example, episode: Episode) -> list[JudgeQuestion[Any]]:
        """One question per dimension."""
        view = self.judge_view(example, episode)
        return [
            question(slug, self._critic(slug, view), flaw_shape(slug)) for slug in self.purposes()
        ]

    def other_prompts(
        self, example: Example, draft: Episode, score: Score
    ) -> Iterator[tuple[str, str]]:
        view = self.judge_view(example, draft)
        yield "judge", self.prompts.render("judge", **view)
        for slug in ASPECTS:
            yield "critic", self._critic(slug, view)

    def _critic(self, slug: str, view: Mapping[str, Any]) -> str:
        return self.prompts.render(
            "critic", slug=slug, title=ASPECTS[slug].title, kinds=ASPECTS[slug].kinds,
            repetitions="repetitions" in flaw_shape(slug).model_fields, **view,
        )  # fmt: skip

    def judge_view(self, example: Example, episode: Episode) -> dict[str, Any]:
        """The critic's view: the scene in the book and as played, without thoughts."""
        fields, _ = self.within_budget(example.visible("judge"))
        people = [{"name": name, "profile": text} for name, text in fields[PROFILES].items()]
        return {
            "book": fields["book"], "scenario": fields["scenario"], "plot": fields[SUMMARY],
            "profiles": people, "major": ", ".join(names_in(fields["major_characters"])),
            "reference": transcript(self.recorded(example), mark="book"),
            "transcript": self.played(episode), "replayed": episode.notes.get("replayed", 0),
        }  # fmt: skip

    def recorded(self, example: Example) -> list[Line]:
        """The book's dialogue as the other characters heard it."""
        lines = [self.public_line(line) for line in dialogue(example.fields)]
        return [line for line in lines if line.text]

    def public_line(self, line: Line) -> Line:
        """A message without thoughts."""
        if line.seat == ENVIRONMENT:
            return Line(line.seat, words_out_loud(line.text, line.seat))
        return Line(line.seat, audible(line.text, line.seat, self.protocol))

    def played(self, episode: Episode) -> str:
        """The fenced transcript of the played scene."""
        return transcript(line for line in episode.transcript if line.text)

    def rated(
        self, replies: Opinions, messages: int, cast: Cast
    ) -> tuple[dict[str, float], dict[str, float | None]]:
        """(dimension → 0 to 100, additional metrics)."""
        how = cast.panel.combine

        def scored(flaws: Flaws) -> float:
            return flaw_score(flaws.severity, messages)

        points = {slug: panel.pooled(opinions, scored, how) for slug, opinions in replies.items()}
        flaws = {
            f"flaws/{slug}": panel.pooled(opinions, lambda flaws: flaws.severity, how)
            for slug, opinions in replies.items()
        }
        agreed = panel.mean_agreement((panel_, scored, 0, 100) for panel_ in replies.values())
        return points, {**flaws, **agreed}

    def facts(self, example: Example, episode: Episode) -> dict[str, float | None]:
        """Metrics that need no judge."""
        seats, notes = self.acted_seats(example), episode.notes
        counts = [
            n for seat in seats
            if (n := sum(line.seat == seat and bool(line.text) for line in episode.transcript))
        ]  # fmt: skip
        predicted = notes.get("next_speaker", {})
        drawn = predicted["fallback"] / predicted["asked"] if predicted.get("asked") else None
        return {
            "rounds": float(notes.get("rounds", len(episode.transcript))),
            "lines": float(sum(counts)),
            "lines_per_character": sum(counts) / len(counts) if counts else 0.0,
            "characters_heard": len(counts) / len(seats),
            "next_speaker/fallback": drawn, **self.likeness(example, episode),
        }  # fmt: skip

    def likeness(self, example: Example, episode: Episode) -> dict[str, float | None]:
        """BLEU and ROUGE-L against the book's scene, after the messages that both start with; None
        without the packages that compute them."""
        count = int(episode.notes.get("replayed", 0))
        gold = "\n".join(line.text for line in self.recorded(example)[count:])
        text = "\n".join(line.text for line in episode.transcript[count:] if line.text)
        return {"bleu": bleu(gold, text), "rouge_l": rouge_l(gold, text)}

    def words(self, replies: Opinions) -> str:
        """The critics' texts, one line per dimension and opinion."""
        lines = []
        for slug, opinions in replies.items():
            for flaws in panel.readable(opinions):
                reasons = f"severity {flaws.severity}. {flaws.reasoning}"
                lines.append(f"{ASPECTS[slug].title}: {reasons}")
        return "\n".join(lines)

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Means for books that models may have seen in training and for other books, and the
        gap."""
        return judging.distributions(records)

    # -- feedback ---------------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        """The audible scene, the ratings, and the critics' remarks. All characters read the same
        notes, so remarks that leak something are left out."""
        fields, _ = self.within_budget(example.visible("coach"))
        return {
            "book": fields["book"], "scenario": fields["scenario"],
            "names": ", ".join(self.acted_seats(example)), "transcript": self.played(episode),
            "marks": judging.aspect_points(score.metrics), "gold": "",
            "remarks": judging.remarks_for_coach(score, self.leak_view(example)),
            "most_words": self.spec.feedback.max_words,
        }  # fmt: skip

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        if episode is None or score is None:
            return str(judging.TEXTS["advice"])
        lines = [line for line in episode.transcript if line.seat != ENVIRONMENT and line.text]
        return judging.scene_lesson(lines, score, int(self.spec.options["turn_words"]))

    def leak_view(self, example: Example) -> LeakView:
        """Notes for all characters must not reveal thoughts, the outcome or the book's lines."""
        fields = example.fields
        outcomes = [text for name, text in fields.items() if name.startswith(OUTCOME_OF)]
        hidden = () if self.plot_is_known else (fields[SUMMARY], *outcomes)
        return LeakView(
            private=tuple(text for text in hidden if text),
            private_by_seat={
                seat: (fields[f"{THOUGHT_OF}{seat}"],)
                for seat in self.acted_seats(example) if f"{THOUGHT_OF}{seat}" in fields
            },
            rubric=judging.RUBRIC,
            reference="\n".join(line.text for line in self.recorded(example)),
            public="\n".join((fields["scenario"], *speakers(fields), *fields[PROFILES].values())),
        )  # fmt: skip

    # -- scripts ----------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self.scripted(example, dialogue(example.fields), feedback, "gold")

    def wrong(self, example: Example) -> Episode:
        return self.scripted(
            example, judging.lines_in_turn(self.acted_seats(example), judging.TEXTS["helpful"])
        )

    def canary(self, example: Example, text: str) -> Episode:
        lines = judging.lines_in_turn(
            self.acted_seats(example), (text,) * len(judging.TEXTS["helpful"])
        )
        return self.scripted(example, lines)

    def verdict(self, form: str, perfect: bool) -> str | None:
        return judging.scripted_verdict(form, perfect)

    def gold_text(self, example: Example) -> str:
        first = dialogue(example.fields)[0]
        return f"{first.seat}: {first.text}"

    def scripted(
        self, example: Example, lines: Sequence[Line], feedback: Feedback | None = None,
        kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        """The episode with these messages of the actor and the environment."""
        stage, rollout = self.stage(example, feedback), Rollout(kind=kind)
        scene = self.book(self, example, stage)
        first, _ = scene.replay()
        for line in lines[first if kind == "gold" else 0 :]:
            if line.seat in stage.tables:
                stage.take(line.seat, Completion(text=line.text))
            scene.record(line.seat, scene.audible_text(line.seat, line.text), line.text)
        return stage.episode(example, rollout, "gold" if kind == "gold" else "max_rounds")
