"""Who speaks next: a model is asked after every message, and its answer is not always a name.

Under `paper` it chooses among the names that may follow, by JSON Schema: everybody but the one who
just spoke, the environment included, `random` where it cannot tell, and `<END CHAT>` once the scene
is old enough to end. An answer that is none of them is asked for once more. `reference` asks for a
line of text and reads it with the published pattern, which misreads names in bold, in quotation
marks or with a remark behind them.

Where no usable name comes, one is drawn: from the major characters and the environment, else from
everybody, never the one who just spoke. The draw has a stream of its own for every turn of every
rollout, so that a scene that is played again draws the same.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from soulkit.errors import UnreadableVerdict
from soulkit.judge.objects import JudgeMaterial
from soulkit.judge.structured import VerdictShape, read_shape
from soulkit.tasks.coser.speech import words_out_loud
from soulkit.types import Form

UNCLEAR, END = "random", "<END CHAT>"
ENDS_FROM = 5
"""The first round, counted from 0, after which a scene may end: it has six messages then."""

_LABEL = re.compile(r"next\s*speaker[ \t]*[*#]*[ \t]*(?:[:\-]|is)?[ \t]*([^*\n]+)", re.IGNORECASE)
_TAIL = " \t.,;!?\"'*"


class SpeakerChoice(VerdictShape):
    """What the predictor answers."""

    reason: str
    next_speaker: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who may speak after a message, and from whom one is drawn where nobody was named."""

    names: tuple[str, ...]
    drawn_from: tuple[str, ...]
    may_end: bool

    @property
    def answers(self) -> tuple[str, ...]:
        """Everything that the predictor may answer."""
        return (*self.names, UNCLEAR, *((END,) if self.may_end else ()))

    def form(self) -> Form:
        """The answer's JSON Schema, its names those of this scene."""
        fields = {
            "reason": {"type": "string"},
            "next_speaker": {"type": "string", "enum": list(self.answers)},
        }
        schema = {
            "type": "object", "properties": fields, "required": list(fields),
            "additionalProperties": False,
        }  # fmt: skip
        return Form("SpeakerChoice", json.dumps(schema, sort_keys=True, separators=(",", ":")))

    def read(self, reply: str, prompt: str) -> str | None:
        """The answer in a reply, an object or a bare name; None where there is none.

        An object that already stands in the prompt is somebody's line and no answer.
        """
        try:
            answer = read_shape(reply, SpeakerChoice, JudgeMaterial(prompt)).next_speaker
        except UnreadableVerdict:
            answer = words_out_loud(reply, "")
        return answer.strip() if answer.strip() in self.answers else None

    def draw(self, rng: random.Random) -> str:
        """One of those who may be drawn."""
        return rng.choice(self.drawn_from)


def candidates(
    speakers: Sequence[str], preferred: Sequence[str], current: str, round_index: int
) -> Candidates:
    """Who may follow `current` in a round; `preferred` are drawn from before anybody else.

    Names stand in their order in the row, so that nothing depends on how a set is walked.
    """
    others = tuple(name for name in speakers if name != current)
    first = tuple(name for name in others if name in preferred)
    return Candidates(others, first or others, round_index >= ENDS_FROM)


def label_in(text: str) -> str | None:
    """The name behind the last "Next Speaker" of a text, as the published pattern takes it."""
    names = _LABEL.findall(text)
    return names[-1].rstrip(_TAIL).strip() or None if names else None


def speaker_in(text: str) -> str:
    """The reference's reading of a predictor's reply: the labelled name, else what stands before
    the first colon, else all of it."""
    return label_in(text) or (text.split(":")[0].strip() if ":" in text else text)
