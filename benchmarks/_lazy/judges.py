"""Two judges without a model that can answer every judge question of every task.

    kindest   the answer that is best for the actor
    by rule   an answer based on F1, the word overlap between the actor's messages and those of the
              recorded person

The name of its JSON schema identifies a question; without a schema, the words that it offers do.
The rule takes the person's lines from the row's gold and the actor's lines from the fences in the
question:

    a number on a scale     low end of the scale + F1 · its length
    which of two            the one with the higher F1, or a tie
    yes or no               yes if F1 ≥ 0.5
    a list of flaws         one per line that differs from every line of the same person, with
                            severity 5 · (1 − F1), rounded; a repeated line has severity 5
    kept to the question?   yes if more words are shared with the question than with the topic that
                            the assistant switched to

F1 of several messages is the mean over positions (first with first); a missing message counts 0.
Sotopia has no recorded person: both judges rate its scenes as if nothing had happened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from soulkit.tasks.humanual.judging import AXES, lexical_f1
from soulkit.tasks.kit.base import Task
from soulkit.tasks.sotopia.judging import DIMENSIONS
from soulkit.types import Call, Completion, Example, Form, Line, Sampling, Segment

NEUTRAL = {"believability": 5}
"""Raw marks of a scene in which nothing happens; all other marks are 0."""
HALF = 0.5
WHY = "by rule"
Lines = Sequence[Line]


# -- the content of a question ---------------------------------------------------------------------


def blocks(prompt: str, mark: str) -> list[str]:
    """The texts between fences of this name, in order."""
    fenced = rf"<{mark} (\w+)>\n(.*?)\n</{mark} \1>"
    return [text for _, text in re.findall(fenced, prompt, re.DOTALL)]


def speeches(block: str) -> list[Line]:
    """The lines of a fenced transcript."""
    return [Line(*pair) for pair in re.findall(r"^(.*?): \u201c(.*)\u201d$", block, re.MULTILINE)]


def of_user(prompt: str, mark: str, place: int = 0) -> list[str]:
    """The messages of the user in a fenced conversation."""
    every = blocks(prompt, mark)
    lines = speeches(every[place]) if place < len(every) else []
    return [line.text for line in lines if line.seat == "USER"]


def of_first(prompt: str, mark: str) -> list[str]:
    """The messages of the first speaker in a fenced conversation."""
    lines = [line for block in blocks(prompt, mark) for line in speeches(block)]
    return [line.text for line in lines if line.seat == lines[0].seat]


def names_in(form: Form) -> Iterator[str]:
    """The features that a schema asks about."""
    waiting: list[Any] = [json.loads(form.schema)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            name = node.get("properties", {}).get("feature_name", {})
            yield from name.get("enum") or ([name["const"]] if "const" in name else [])
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


# -- recorded lines --------------------------------------------------------------------------------


def recorded(task: Task, example: Example) -> list[Line]:
    """The gold messages of the acted seats."""
    gold = task.gold(example)
    seats = {trace.seat for trace in gold.traces} if gold else set()
    return [line for line in gold.transcript if line.seat in seats] if gold else []


def alike(said: Sequence[str], record: Sequence[str]) -> float:
    """Mean F1 of the messages at equal positions."""
    pairs = list(zip_longest(said, record, fillvalue=""))
    return sum(lexical_f1(*pair) for pair in pairs) / len(pairs) if pairs else 0.0


@dataclass
class Judge:
    """Answers by `kind` (`kindest`, `rule`); `records` holds each example's recorded lines."""

    kind: str
    records: Mapping[str, Lines]
    name: str = "scripted"
    asked: dict[str, int] = field(default_factory=dict)
    """Schema → number of questions with it."""

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        prompt, form = context[-1].text, sampling.form
        self.asked[form.name if form else ""] = self.asked.get(form.name if form else "", 0) + 1
        reply = self._answer(prompt, form, list(self.records.get(call.example_id, ())))
        return Completion(text=reply if isinstance(reply, str) else json.dumps(reply))

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _answer(self, prompt: str, form: Form | None, record: list[Line]) -> Any:
        if form is None:
            return self._in_words(prompt, record)
        if "believability" in form.schema:
            marks = {name: NEUTRAL.get(name, 0) for name in DIMENSIONS}
            return {n: {"reasoning": "so so", "score": s} for n, s in marks.items()}
        if form.name == "Audit":
            return {"risk_level": "low", "reason": "nothing to see"}
        if form.name in ("Flaws", "FlawsAndRepetitions"):
            return self._flaws(prompt, form, record)
        if form.name.startswith("Preference"):
            return {"reasoning": WHY, "verdict": self._preference(prompt, record)}
        return shaped(form, self._likeness(prompt, form, record))

    def _in_words(self, prompt: str, record: list[Line]) -> str:
        """A reply without a schema: a label or a note."""
        kind, reply = self.kind == "kindest", "".join(blocks(prompt, "reply"))
        if "REFUSED" in prompt:
            question, proposal = (
                lexical_f1(reply, "".join(blocks(prompt, m))) for m in ("question", "proposal")
            )
            return "REFUSED" if kind or question > proposal else "ACCEPTED"
        if "HUMAN" in prompt:
            shared = max((lexical_f1(reply, line.text) for line in record), default=0.0)
            return "HUMAN" if kind or shared >= HALF else "AI"
        return f"- {WHY}"

    def _likeness(self, prompt: str, form: Form, record: list[Line]) -> float:
        """F1 between the actor in a question and the recorded person."""
        if self.kind == "kindest":
            return 1.0
        texts = [line.text for line in record]
        if form.name == "SixSides":
            original, reply = ("".join(blocks(prompt, mark)) for mark in ("original", "reply"))
            return lexical_f1(reply, original)
        if form.name in ("Likert", "Fulfilment"):
            return alike(of_first(prompt, "program"), texts)
        if form.name == "DocumentRating":
            return lexical_f1("".join(blocks(prompt, "document")), "\n".join(texts))
        mark = "simulated" if form.name == "Similarity" else "conversation"
        return alike(of_user(prompt, mark), texts)

    def _preference(self, prompt: str, record: list[Line]) -> str:
        if self.kind == "kindest":  # it does not know which one is the actor's
            return "Tie"
        texts = [line.text for line in record]
        first, second = (alike(of_user(prompt, "conversation", i), texts) for i in (0, 1))
        return "Tie" if first == second else "A" if first > second else "B"

    def _flaws(self, prompt: str, form: Form, record: list[Line]) -> dict[str, Any]:
        flaws: list[dict[str, Any]] = []
        repetitions: list[dict[str, Any]] = []
        spoken: set[str] = set()
        played = [line for block in blocks(prompt, "transcript") for line in speeches(block)]
        for line in played if self.kind == "rule" else ():
            if line.seat == "Environment":
                continue
            same = (lexical_f1(line.text, one.text) for one in record if one.seat == line.seat)
            severity = round(5 * (1 - max(same, default=0.0)))
            if severity:
                flaws.append({"instance": line.seat, "type": "Self-identity", "severity": severity})
            if line.text in spoken:
                repetitions.append({"instance": line.seat, "severity": 5})
            spoken.add(line.text)
        more = {"repetitions": repetitions} if form.name == "FlawsAndRepetitions" else {}
        return {"reasoning": WHY, "flaws": flaws, **more}


def shaped(form: Form, share: float) -> dict[str, Any]:
    """A verdict in the shape of a schema that corresponds to a share of the maximum score."""
    yes = share >= HALF
    match form.name:
        case "SixSides":
            return {axis: {"thought": WHY, "score": share} for axis in AXES}
        case "Similarity":
            return {"reasoning": WHY, "score": share}
        case "Rubric":
            return {"reasoning": WHY, "verdict": "YES" if yes else "NO"}
        case "Revision":
            return {"critique": WHY, "explanation": WHY, "verdict": "YES" if yes else "NO"}
        case "Likert":
            return {"key_differences": [WHY], "similarity_score": 1 + 4 * share}
        case "DocumentRating":
            return {"analysis": WHY, "rating": 1 + 9 * share}
        case "Fulfilment":
            label = "Match" if yes else "No Match"
            return {"results": [
                {"feature_name": name, "analysis": WHY, "classification": label}
                for name in names_in(form)
            ]}  # fmt: skip
    raise ValueError(f"no rule for the form '{form.name}'")
