"""Person chat: the actor plays a person who talks to an agent; a judge rates how well.

    {"persona": "Writes in small letters", "facts": {"city": "Riga"}, "scenario": "You want ...",
     "persona_id": "u7", "scenario_id": "chat 3", "repeat": 0}

The person writes first, unless the row has the agent's `opening`, and ends the conversation with
END_MARK, which the agent does not see. The value is the mean of three ratings from 0 to 10, divided
by 10: `persona`, `purpose` and `human`. Faults that need no judge (kit/person/faults.py) are in the
notes; `without_faults` is the value of the conversations that have none.

`soul serve --persona`, `soul chat` and `soul simulate` use the same prompt.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from soulkit.data.literals import structure
from soulkit.errors import RowError
from soulkit.judge import panel
from soulkit.judge.leaks import LeakView
from soulkit.judge.structured import dimension_shape, question, rated_part
from soulkit.judge.verdict import spoken, transcript
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.coaching import fenced_remarks, first_verdict
from soulkit.tasks.kit.dialogue import Conversation, DialogueTask, others_view
from soulkit.tasks.kit.made_rows import FIRST_NAMES, rows_by_index
from soulkit.tasks.kit.person.brief import START, Brief, split_end
from soulkit.tasks.kit.person.faults import fault_kinds, fault_notes
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import (
    Completion,
    Episode,
    Example,
    Feedback,
    Kind,
    Line,
    Role,
    Score,
    Segment,
    unscored,
)

PERSON, AGENT = "person", "agent"
DIMENSIONS = ("persona", "purpose", "human")
TOP, WITHOUT_FAULTS = 10, "without_faults"
TEXTS = Texts(__file__)
RUBRIC = ("persona score", "purpose score", "human score")
"""Terms of the judge's question: feedback that uses them is about the judge."""
PersonRatings = dimension_shape(
    "PersonRatings", "A judge's three ratings of a simulated person.",
    dict.fromkeys(DIMENSIONS, rated_part("_Rating", int, "reasoning", (0, TOP))),
)  # fmt: skip


def brief_of(fields: Mapping[str, Any]) -> Brief:
    """The brief in a row's fields."""
    texts = {name: str(fields.get(name) or "")
             for name in ("persona", "scenario", "persona_id", "scenario_id")}  # fmt: skip
    return Brief(**texts, facts=fields.get("facts") or {})


def read_facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with `facts` as a mapping of texts; RowError if it is none."""
    facts = structure(fields.get("facts") or {})
    if not isinstance(facts, Mapping):
        raise RowError("The row's facts are not an object.", 'For example: {"city": "Riga"}.')
    texts = {str(name): str(value) for name, value in facts.items() if value is not None}
    return {**fields, "facts": texts or None}


class PersonChat(DialogueTask):
    templates = ("person", AGENT, "judge")
    start = START
    default_turns = 8
    partner_attempts = 2
    gold_is_script = True

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        return read_facts(fields)

    def calls(self, example: Example) -> dict[Role, int]:
        return {"actor": self.most_turns, "partner": self.most_turns - 1, "judge": 1}

    # -- playing ------------------------------------------------------------------------------

    def view(self, example: Example, reader: str) -> dict[str, Any]:
        """What the template `person` names, within word budgets."""
        fields, _ = self.within_budget(example.visible(reader))
        return brief_of(fields).values()

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        return self.prompts.opening("person", feedback, self.view(example, seat))

    def conversation(self, example: Example, feedback: Feedback | None) -> Conversation:
        talk = super().conversation(example, feedback)
        if first := str(example.fields.get("opening") or "").strip():
            talk.hear(Line(AGENT, first))
        else:
            talk.notify(self.start)
        return talk

    def preview(self, example: Example) -> tuple[Segment, ...]:
        return tuple(self.conversation(example, None).context)

    async def _converse(
        self, example: Example, cast: Cast, rollout: Rollout, talk: Conversation
    ) -> str:
        stop = ""
        for index in range(self.most_turns):
            if index:
                talk.hear(await self._partner_line(example, cast, rollout, talk, index - 1))
            reply = await talk.speak(cast.actor, rollout.call("actor", example, index))
            if stop := self.take_turn(talk, reply.text):
                break
        self.note_faults(example, talk)
        return stop or "max_turns"

    def take_turn(self, talk: Conversation, reply: str) -> str:
        """Add the person's reply as a line; the stop reason, or an empty text to continue."""
        text, ended = split_end(spoken(reply, self.protocol))
        if text.strip() or ended:
            talk.record(Line(PERSON, text.strip()))
        return "ended" if ended else "" if text.strip() else "empty"

    def note_faults(self, example: Example, talk: Conversation) -> None:
        """Note the faults of the finished conversation."""
        talk.notes |= fault_notes(talk.lines, PERSON, brief_of(example.fields))

    def partner_context(self, example: Example, lines: Sequence[Line]) -> tuple[Segment, ...]:
        return others_view(AGENT, [Segment("system", self.prompts.render(AGENT))], lines)

    # -- scoring ------------------------------------------------------------------------------

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        """Raises UnreadableVerdict (the episode is then unscored) if no verdict is readable."""
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        turns = sum(line.seat == PERSON and bool(line.text) for line in episode.transcript)
        if not turns:
            nothing = dict.fromkeys((*DIMENSIONS, WITHOUT_FAULTS), self.spec.metric.low)
            return self.silent_score(episode, "The person never wrote anything.", nothing)
        asked = question("score", self.judge_prompt(example, episode), PersonRatings)
        rated = await panel.opinions(cast, asked, episode)
        marks = {name: panel.pooled(rated, partial(_mark, name), cast.panel.combine)
                 for name in DIMENSIONS}  # fmt: skip
        agreed = panel.mean_agreement((rated, partial(_mark, n), 0, 1) for n in DIMENSIONS)
        value, faulty = sum(marks.values()) / len(marks), bool(fault_kinds(episode))
        metrics = {**marks, "turns": float(turns), "faulty": float(faulty), **agreed}
        return self.judged_score(
            value, metrics if faulty else {**metrics, WITHOUT_FAULTS: value},
            panel.verdicts_of(rated), words=panel.in_words(rated),
        )  # fmt: skip

    def judge_prompt(self, example: Example, episode: Episode) -> str:
        return self.prompts.render(
            "judge", **self.view(example, "judge"), transcript=transcript(episode.transcript)
        )

    # -- feedback -----------------------------------------------------------------------------

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        remarks = first_verdict(score, "score")
        return {
            **self.view(example, "coach"), "attempt": transcript(episode.transcript),
            "remarks": fenced_remarks(f"{n}: {part['reasoning']}" for n, part in remarks.items()),
        }  # fmt: skip

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """A lesson on the lowest rating."""
        marks = {n: score.metrics.get(n) for n in DIMENSIONS} if score is not None else {}
        low = [name for name, mark in marks.items() if mark is not None and mark < 1]
        chosen = min(low, key=lambda name: marks[name] or 0, default="human")
        return str(TEXTS["lessons"][chosen])

    def leak_view(self, example: Example) -> LeakView:
        return LeakView(rubric=RUBRIC)

    # -- scripts ------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self.scripted_talk(example, TEXTS["lines"], feedback, "gold")

    def wrong(self, example: Example) -> Episode:
        return self.scripted_talk(example, TEXTS["unlike"])

    def canary(self, example: Example, text: str) -> Episode:
        return self.scripted_talk(example, (text, text))

    def scripted_talk(
        self, example: Example, replies: Sequence[str], feedback: Feedback | None = None,
        kind: Kind = "draft",
    ) -> Episode:  # fmt: skip
        """The episode in which the person writes `replies` and the agent answers neutrally."""
        talk = self.conversation(example, feedback)
        for index, reply in enumerate(replies):
            if index:
                talk.hear(Line(AGENT, TEXTS["answers"][index - 1]))
            talk.take(Completion(text=reply))
            self.take_turn(talk, reply)
        return talk.episode(example, Rollout(kind=kind), "max_turns")

    def verdict(self, form: str, perfect: bool) -> str | None:
        mark = {"reasoning": "as scripted", "score": TOP if perfect else 1}
        return json.dumps(dict.fromkeys(DIMENSIONS, mark))


def _mark(name: str, ratings: Any) -> float:
    return float(getattr(ratings, name).score) / TOP


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
    persona, scenario = rng.choice(list(TEXTS["personas"])), rng.choice(list(TEXTS["scenarios"]))
    name, city, job = (rng.choice(words) for words in (FIRST_NAMES, TEXTS["cities"], TEXTS["jobs"]))
    facts = {"name": name, "age": str(rng.randrange(18, 80)), "city": city, "job": job}
    return {
        "persona": TEXTS["personas"][persona], "facts": facts,
        "scenario": TEXTS["scenarios"][scenario],
        "persona_id": f"{persona} {name} {facts['age']} {city}", "scenario_id": scenario,
        "repeat": 0,
    }  # fmt: skip


rows = rows_by_index("person_chat", _made_row)
