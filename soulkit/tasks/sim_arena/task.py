"""SimulatorArena: a student with a problem, or a writer who needs a document, talks to an AI.

The actor plays the person, with at most eight messages; the assistant is the partner. Judges
compare the conversation with the real person's:

    sim_math   (writing / 5 + interaction / 5 + features) / 3
    sim_doc    (document / 10 + writing / 5 + interaction / 5 + writing features
                + interaction features) / 5

`paper`: a row without recorded features gets the mean of its other parts. The headline is the mean
of all parts, each over the rows that have it. A missing judge answer leaves the episode unscored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from soulkit.judge.leaks import LeakView
from soulkit.judge.panel import ask_several, verdicts_of
from soulkit.judge.structured import JudgeQuestion, VerdictShape, question
from soulkit.judge.verdict import fence, transcript, utterance
from soulkit.models.base import Cast, Panel
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.dialogue import Conversation
from soulkit.tasks.kit.scoring import mean_of
from soulkit.tasks.sim_arena import judging
from soulkit.tasks.sim_arena.data import (
    INTERACTION,
    WRITING,
    Target,
    human_lines,
    human_messages,
    targets,
)
from soulkit.tasks.sim_arena.judging import DOCUMENT, FULFILMENT, LIKERT, RATING, STYLES, Replies
from soulkit.tasks.sim_arena.play import TEXTS, PlayedPerson, Utterance
from soulkit.types import (
    BatchMetric,
    Episode,
    Example,
    Form,
    Line,
    Record,
    Role,
    Score,
    Segment,
    unscored,
)

FINAL_DOCUMENT = "final_document"
"""The episode note with the document, and the purpose of the call for it."""
_METRICS = {"writing_style": "style/writing", "interaction_style": "style/interaction",
            DOCUMENT: "document/rating"}  # fmt: skip
TOPS = {**dict.fromkeys(STYLES, LIKERT[1]), DOCUMENT: RATING[1]}
_TELLING = 2
"""Shorter answers look like ordinary numbers in feedback."""


class SimArena(PlayedPerson):
    """The shared code of both tasks; a subclass defines the person and the topic."""

    person: str
    partner_name: str
    labels: ClassVar[Mapping[str, str]]
    """Seat → its name in transcripts."""
    looks_as: str
    """The text table with the aspects of questions on style."""
    parts: tuple[str, ...]
    """The parts of a complete row's score."""
    feature_metrics: ClassVar[Mapping[str, str]]
    """Column of features → metric of their share."""
    known_as: ClassVar[Mapping[str, str]]
    """Column → its name for the coach."""
    shapes: tuple[type[VerdictShape], ...] = (judging.Likert, judging.DocumentRating)
    """The schemas of verdicts on scales."""
    judges_silence = False
    """Whether judges also rate an actor that never said anything."""
    needs_all = True
    """Whether an unanswered question leaves the episode unscored."""

    @property
    def looks_at(self) -> Mapping[str, Sequence[str]]:
        """Question about a style → the aspects that it asks about."""
        looks_at: Mapping[str, Sequence[str]] = TEXTS["looks_at"][self.looks_as]
        return looks_at

    # -- rows ---------------------------------------------------------------------------------

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        columns = {target.column for target in targets(fields)}
        complete = columns == set(self.feature_metrics)
        return {**super().tags(fields), "parts": "all" if complete else "some"}

    def calls(self, example: Example) -> dict[Role, int]:
        questions = len(self.asked(example))
        return {"actor": self.most_turns, "partner": self.most_turns, "judge": questions}

    def asked(self, example: Example) -> tuple[str, ...]:
        """The judge questions about an episode of this row."""
        return (*STYLES, FULFILMENT) if targets(example.fields) else STYLES

    # -- scoring ------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Raises UnreadableVerdict (the episode is then unscored) if a part is missing."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        turns = self.turns(episode)
        if not self.judges_silence and not any(turn.text for turn in turns):
            return self._silent(example, episode, turns)
        questions = self.questions(example, episode)
        may_miss = (
            () if self.needs_all else [judge_question.purpose for judge_question in questions]
        )
        replies = await ask_several(cast, questions, episode, may_miss)
        raw = judging.raw_numbers(replies, cast.panel.combine)
        shares = self.feature_shares(example, replies, cast.panel)
        value = self.value({**self.scaled(raw), **shares})
        metrics = {**self.metrics(raw, shares), **self.coverage(replies),
                   **self._turn_metrics(example, turns),
                   **judging.style_agreement(replies)}  # fmt: skip
        return self.judged_score(
            value, metrics, verdicts_of(*replies.values()), status=self.status_of(turns),
            words=judging.judge_words(replies), templates=self.templates_of(example),
        )  # fmt: skip

    def status_of(self, turns: Sequence[Utterance]) -> str:
        """Whether every turn was in the required form."""
        return "salvaged" if any(turn.status == "salvaged" for turn in turns) else "ok"

    def scaled(self, raw: Mapping[str, float]) -> dict[str, float]:
        """Question on a scale → its number as a share of the maximum."""
        return {name: raw[name] / TOPS[name] for name in raw}

    def value(self, shares: Mapping[str, float]) -> float:
        """The mean of the available parts."""
        return sum(shares.values()) / len(shares)

    def feature_shares(
        self, example: Example, replies: Replies, panel: Panel
    ) -> Mapping[str, float]:
        """Column → share of its features that were shown, for the columns that the row has."""
        if FULFILMENT not in replies:
            return {}
        listed = targets(example.fields)
        return judging.feature_shares(replies[FULFILMENT], listed, panel.combine)

    def metrics(
        self, raw: Mapping[str, float], shares: Mapping[str, float]
    ) -> dict[str, float | None]:
        """The raw parts by name; missing parts have no entry."""
        metrics: dict[str, float | None] = {_METRICS[name]: raw[name] for name in raw}
        for name in STYLES:
            if name in raw:
                metrics[f"{_METRICS[name]}_from_zero"] = judging.from_zero(raw[name])
        metrics |= {self.feature_metrics[column]: share for column, share in shares.items()}
        return {**metrics, "parts/share": (len(raw) + len(shares)) / len(self.parts)}

    def coverage(self, replies: Replies) -> dict[str, float | None]:
        """Metrics of missing judge answers; none here, because such episodes are unscored."""
        return {}

    def _turn_metrics(
        self, example: Example, turns: Sequence[Utterance]
    ) -> dict[str, float | None]:
        return {
            "turns/messages": float(sum(bool(turn.text) for turn in turns)),
            "turns/human": float(len(human_messages(example.fields))),
            "turns/ended": float(any(turn.ended for turn in turns)),
        }

    def _silent(self, example: Example, episode: Episode, turns: Sequence[Utterance]) -> Score:
        shown = {self.feature_metrics[t.column]: 0.0 for t in targets(example.fields)}
        metrics = {**shown, **self._turn_metrics(example, turns)}
        words = "The person never said anything."
        return self.silent_score(episode, words, metrics, templates=self.templates_of(example))

    def templates_of(self, example: Example) -> tuple[str, ...]:
        """The prompts that affect the score of a row."""
        actor, partner = self.acted_seat(example), self.partner_seat(example)
        seats = (actor, f"{actor}_opening", partner, f"{partner}_opening")
        return (*seats, *(_TEMPLATES[name] for name in self.asked(example)))

    # -- questions ----------------------------------------------------------------------------

    def questions(self, example: Example, episode: Episode) -> list[JudgeQuestion[Any]]:
        shapes = {name: self.shape(name, example) for name in self.asked(example)}
        made = []
        for name, shape in shapes.items():
            beside = tuple(other for other in shapes.values() if other is not shape)
            prompt = self.judge_prompt(name, example, episode)
            made.append(question(name, prompt, shape, beside=beside))
        return made

    def shape(self, name: str, example: Example) -> type[VerdictShape]:
        """The schema of a question's answer."""
        likert, rating = self.shapes
        if name == FULFILMENT:
            return judging.fulfilment_shape(tuple(t.label for t in targets(example.fields)))
        return rating if name == DOCUMENT else likert

    def judge_prompt(self, name: str, example: Example, episode: Episode) -> str:
        ask = {STYLES[0]: self._writing_prompt, STYLES[1]: self._interaction_prompt}
        return ask.get(name, self._features_prompt)(example, episode)

    def _writing_prompt(self, example: Example, episode: Episode) -> str:
        seat = self.acted_seat(example)
        real = [Line(seat, text) for text in human_messages(example.fields)]
        simulated = [line for line in episode.transcript if line.seat == seat]
        return self._compared(STYLES[0], self.told(real, "real"), self.told(simulated, "program"))

    def _interaction_prompt(self, example: Example, episode: Episode) -> str:
        recorded = example.fields["human_public_conversation"]
        lines = human_lines(example.fields, self.acted_seat(example), self.partner_seat(example))
        real = fence(recorded, "real") if isinstance(recorded, str) else self.told(lines, "real")
        return self._compared(STYLES[1], real, self.told(episode.transcript, "program"))

    def _compared(self, name: str, real: str, simulated: str) -> str:
        return self.prompts.render(
            _TEMPLATES[name], person=self.person, partner=self.partner_name, real=real,
            simulated=simulated, aspects=", ".join(self.looks_at[name]),
        )  # fmt: skip

    def _features_prompt(self, example: Example, episode: Episode) -> str:
        listed = targets(example.fields)
        texts = "\n".join(self.feature_line(target) for target in listed)
        return self.prompts.render(
            "judge_features", person=self.person, partner=self.partner_name,
            features=fence(texts, "features"), count=len(listed),
            simulated=self.told(episode.transcript, "program"),
        )  # fmt: skip

    def feature_line(self, target: Target) -> str:
        """A feature as the judge sees it."""
        return f"- {target.label}: {utterance(target.text)}"

    def told(self, lines: Iterable[Line], mark: str) -> str:
        """Lines as a judge sees them."""
        return transcript(lines, self.labels, mark)

    # -- feedback -----------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        return {
            "person": self.person, "partner": self.partner_name,
            "brief": self.brief(example), "transcript": self.told(episode.transcript, "attempt"),
            "marks": judging.mark_lines(score.metrics),
            "notes": judging.style_notes(score, self.leak_view(example)),
            "remarks": self._remarks(example, episode),
            "words": self.spec.feedback.max_words // 2,
        }  # fmt: skip

    def brief(self, example: Example) -> list[tuple[str, str]]:
        """(name, text) of the row's fields that both actor and coach know."""
        view = self.view(example, "coach")
        return [(name, view[column]) for column, name in self.known_as.items() if view.get(column)]

    def _remarks(self, example: Example, episode: Episode) -> list[str]:
        human = human_messages(example.fields)
        turns, shown = self.turns(episode), self._public(example)
        return judging.draft_remarks(turns, human, shown, self.most_turns)

    def _public(self, example: Example) -> str:
        return "\n".join(text for _, text in self.brief(example))

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        remarks = self._remarks(example, episode) if episode is not None else []
        return " ".join([*remarks, judging.TEXTS["advice"]])

    def leak_view(self, example: Example) -> LeakView:
        answer = str(example.fields.get("correct_answer") or "").strip()
        messages = human_messages(example.fields)
        return LeakView(
            private=(answer,) if len(answer) >= _TELLING else (),
            rubric=judging.RUBRIC,
            reference="\n".join(messages),
            reference_parts=tuple(messages),
            public=self._public(example),
        )

    def scripted_verdict(self, form: Form | None, perfect: bool) -> str | None:
        return judging.scripted_answer(form, perfect)

    # -- batches ------------------------------------------------------------------------------

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Each part over the rows that have it, and the mean score of complete rows."""
        main = drafts(records)
        names = {**{p: _METRICS[p] for p in self.parts if p in _METRICS}, **self.feature_metrics}
        metrics = {
            f"parts/{metric.replace('/', '_')}": mean_of(
                [_share(record, metric, TOPS.get(name, 1)) for record in main
                 if _has_part(record, metric)]
            )
            for name, metric in names.items()
        }  # fmt: skip
        for name in ("all", "some"):
            values = [r.score.value for r in main if r.tags.get("parts") == name]
            metrics[f"similarity/{name}_parts"] = mean_of(values)
        counted = mean_of([record.score.value for record in main])
        metrics["similarity"] = replace(counted, value=None, is_mean=False)
        return {name: metric for name, metric in metrics.items() if metric.n}


def _has_part(record: Record, metric: str) -> bool:
    """Whether a row has the part; for an unscored row, whether its tags allow it."""
    if metric in _METRICS.values() or record.tags.get("parts") == "all":
        return True
    if record.score.scored:
        return metric in record.score.metrics
    return record.tags.get("features") != "without"


def _share(record: Record, metric: str, top: float) -> float | None:
    """A part as a share of the maximum; 0 for a person that never spoke."""
    raw = record.score.metrics.get(metric)
    return (raw or 0.0) / top if record.score.scored else None


_TEMPLATES = {STYLES[0]: "judge_writing", STYLES[1]: "judge_interaction",
              FULFILMENT: "judge_features", DOCUMENT: "judge_document"}  # fmt: skip


class SimMath(SimArena):
    """A student and a tutor."""

    tags_asked = ("Query", "Response")
    person, partner_name = "student", "an AI tutor"
    labels: ClassVar = {"student": "Student", "tutor": "AI Tutor"}
    looks_as = "sim_math"
    parts = (*STYLES, INTERACTION)
    feature_metrics: ClassVar = {INTERACTION: "features/met"}
    known_as: ClassVar = {"problem": "The problem", "user_profile_text": "Who the student is"}


class SimDoc(SimArena):
    """A writer and a writing assistant, which is finally asked for the document."""

    tags_asked = ("Message",)
    person, partner_name = "person", "an AI writing assistant"
    labels: ClassVar = {"writer": "User", "assistant": "AI Writing Assistant"}
    looks_as = "sim_doc"
    parts = (DOCUMENT, *STYLES, WRITING, INTERACTION)
    feature_metrics: ClassVar = {WRITING: "features/writing", INTERACTION: "features/interaction"}
    known_as: ClassVar = {
        "document_type": "The document", "intent": "What it is for",
        "pre_writing_materials_text": "Their notes", "user_profile_text": "Who they are",
    }  # fmt: skip

    def calls(self, example: Example) -> dict[Role, int]:
        """The final document needs one more call to the assistant."""
        return {**super().calls(example), "partner": self.most_turns + 1}

    def usual_lines(self, example: Example) -> dict[Role, int]:
        """The final document appears in no later prompt."""
        return dict.fromkeys(("actor", "partner"), self.most_turns)

    def asked(self, example: Example) -> tuple[str, ...]:
        return (DOCUMENT, *super().asked(example))

    async def close(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> None:
        """Ask the assistant for the final document, unless nothing was said."""
        if not talk.lines and not self.judges_silence:
            return
        seat = self.acted_seat(example)
        request = Line(seat, self.prompts.render(FINAL_DOCUMENT))
        call = rollout.call("partner", example, self.most_turns, purpose=FINAL_DOCUMENT)
        context = self.document_context(example, [*talk.lines, request])
        talk.notes[FINAL_DOCUMENT] = await self.ask_partner(cast, context, call, talk) or ""

    def document_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        """The context for requesting the document: the conversation and the request."""
        return self.partner_context(example, lines)

    def script_close(self, talk: Conversation) -> None:
        partner = [line.text for line in talk.lines if line.seat != talk.seat]
        talk.notes[FINAL_DOCUMENT] = partner[-1] if partner else TEXTS["neutral_document"]

    def judge_prompt(self, name: str, example: Example, episode: Episode) -> str:
        if name != DOCUMENT:
            return super().judge_prompt(name, example, episode)
        view = self.view(example, "judge")
        preferences = view["target_document_preferences"]
        return self.prompts.render(
            "judge_document", document_type=view["document_type"], intent=view["intent"],
            preferences=fence(preferences, "preferences") if preferences else "",
            document=fence(str(episode.notes.get(FINAL_DOCUMENT) or ""), "document"),
        )  # fmt: skip

    def templates_of(self, example: Example) -> tuple[str, ...]:
        return (*super().templates_of(example), FINAL_DOCUMENT)
