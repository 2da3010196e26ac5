"""Rule-based players of the desk task: a clerk with tools, and a customer with an instruction."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from soulkit.tasks.tau_usi.index import STOP, SURVEY

Body = dict[str, Any]
_WHO = re.compile(r"I am (\w+ \w+), (M\d+)")
_LOAN = re.compile(r"(L\d+): ([\w ]+?)(?: \(([\w ]+)\))?$", re.MULTILINE)
_WANTS = re.compile(r"have the ([\w ]+) at home and want|brought the ([\w ]+) back this morning")


def call(name: str, /, **arguments: str) -> str:
    """A tool call in the text format of the service."""
    texts = (f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
    return f"<function={name}>{''.join(texts)}</function>"


def clerk(body: Body) -> str:
    """Looks up the customer and their loans, then does what the rules allow."""
    messages = body["messages"][1:]
    who = _WHO.search("\n".join(m["content"] for m in messages if m["role"] == "user"))
    results = "\n".join(m["content"] for m in messages if m["role"] == "system")
    last = messages[-1]
    if last["role"] == "system" and last["content"].startswith("L") and "is " in last["content"]:
        return "That is done. Is there anything else?"
    if who is None:
        return "May I have your name and your member number?"
    if "member M" not in results:
        return call("find_member", name=who[1], member=who[2])
    if not _LOAN.search(results):
        return call("list_loans", member=who[2])
    request = [m["content"] for m in messages if m["role"] == "user"][-1]
    for number, item, state in _LOAN.findall(results):
        if item in request and "reserved" not in state:
            return call("extend_loan" if "keep" in request else "end_loan", loan=number)
        if item in request:
            return "I am sorry, somebody else has reserved that one."
    return "What can I do for you?"


def customer(body: Body) -> str:
    """Gives its name, states its requests one by one, stops, and answers the survey."""
    first, *rest = body["messages"]
    who = re.search(r"You are (\w+ \w+), and your member number at the tool library is (M\d+)",
                    first["content"])  # fmt: skip
    assert who is not None
    if '"task_success"' in rest[-1]["content"]:
        return "Here you are: " + json.dumps({key: next(iter(o)) for key, o in SURVEY.items()})
    wishes = [
        f"Can I keep the {keep} a week longer?" if keep else f"I brought the {back} back, please."
        for keep, back in _WANTS.findall(first["content"])
    ]
    turns = sum(m["role"] == "assistant" for m in rest)
    lines = [f"Hi, I am {who[1]}, {who[2]}.", *wishes]
    return lines[turns] if turns < len(lines) else f"Thank you! {STOP}"


def answering(text: str) -> Callable[[Body], str]:
    """The same customer, but it answers the survey with `text`."""

    def answer(body: Body) -> str:
        surveyed = '"task_success"' in body["messages"][-1]["content"]
        return text if surveyed else customer(body)

    return answer


# -- the user's own files, of the shape that the task reads ----------------------------------------

LISTS = {
    "politeness_rate": r"\b(please|thank you)\b", "ack_only_rate": r"^(ok|yes)[\s.!]*$",
    "id_confuse_rate": "how can i help", "id_density": r"\bm\d+\b", "uncertainty_rate": "maybe",
    "certainty_rate": "definitely", "pushback_q_rate": "are you sure",
    "clarify_q_rate": "what do you mean", "info_q_rate": "how much", "emotion_rate": "angry",
    "accusation_rate": "your fault", "pivot_rate": "instead",
}  # fmt: skip


def write_people(folder: Path, numbers: Iterable[int]) -> dict[str, str]:
    """Write files of people, lists and difficulties for these desks; returns option → path."""
    people: dict[str, Any] = {}
    for number in numbers:
        for end in ("", "_ann2", "_ann3"):
            people[f"tool_library_{number}{end}"] = _person(number, end)
    files = {
        "human_file": people, "lexicons": LISTS,
        "difficulty": {f"tool_library_{number}": 0.3 for number in numbers},
    }  # fmt: skip
    for option, content in files.items():
        (folder / f"{option}.json").write_text(json.dumps(content), encoding="utf-8")
    return {option: str(folder / f"{option}.json") for option in files}


def _person(number: int, end: str) -> dict[str, Any]:
    words = ["\\tau 3", "Please keep it longer", "ok but why not", "/stop"]
    talk = [{"role": "user", "content": text} for text in words]
    return {
        "conversation": [{"role": "assistant", "content": "How can I help?"}, *talk],
        "reward": number % 2 == 0, "keep": not (number == 1 and end == "_ann2"),
        "survey": {"reuse": {"answer": "Maybe"}, "efficiency": {"answer": None}},
    }  # fmt: skip
