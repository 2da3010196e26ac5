"""A customer of the made desk by script, before an agent that does right or wrong."""

from __future__ import annotations

import json

from soulkit.tasks.dialogue import Conversation
from soulkit.tasks.tau_usi.agent import GREETING
from soulkit.tasks.tau_usi.desk import Desk, DeskWish
from soulkit.tasks.tau_usi.features import STOP
from soulkit.tasks.tau_usi.survey import SURVEY
from soulkit.types import Completion, Line


def play_desk(talk: Conversation, desk: Desk, right: bool, form: str) -> None:
    """The conversation about every wish, the changes made at the desk, and the survey."""
    talk.hear(Line("agent", GREETING))
    _say(talk, f"Hi, {desk.name} here, member number {desk.member}.")
    for wish in desk.wishes:
        talk.hear(Line("agent", "What is it about?"))
        _say(talk, _request(desk, wish))
        done = wish.allowed is right
        if done:
            desk.step(wish.tool, {"loan": wish.loan})
        answer = "That is done." if done else "That cannot be done."
        talk.hear(Line("agent", f"{answer} Is there anything else?"))
    _say(talk, STOP)
    talk.notify(form)
    best = {key: max(options, key=lambda o: options[o]) for key, options in SURVEY.items()}
    text = json.dumps(best)
    talk.take(Completion(text=text))
    talk.record(Line("survey", text))
    talk.notes["answers"] = best


def _say(talk: Conversation, words: str) -> None:
    talk.take(Completion(text=words))
    talk.record(Line(talk.seat, words))


def _request(desk: Desk, wish: DeskWish) -> str:
    item = next(loan.item for loan in desk.loans if loan.number == wish.loan)
    if wish.tool == "extend_loan":
        return f"Can I keep the {item} a week longer?"
    return f"I brought the {item} back, please take it off my list."


def desk_outcome(desk: Desk) -> str:
    """What should have changed at the desk in the end."""
    changes = [f"{wish.tool} {wish.loan}" for wish in desk.wishes if wish.allowed]
    return "; ".join(changes) or "no change"
