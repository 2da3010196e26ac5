"""A made service: the desk of a library that lends tools, with members, loans and rules.

It speaks the language of the service runtime (`runtime.py`) and needs none: rows of the domain
`tool_library` are played against it in this process. Everything about a desk follows from its
number, so that a row is a number, and two desks of one number are alike.

A customer has two or three loans and wants one or two things of the desk. Every fourth customer
wants what the rules forbid (more time for a tool that somebody else has reserved): there the right
thing is to change nothing. The reward is 1 where the loans end as they should, else 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from soulkit.tasks.kit.prompting import Texts

DOMAIN: Final = "tool_library"
TEXTS = Texts(__file__)


@dataclass
class Loan:
    """A tool that somebody has at home."""

    number: str
    item: str
    reserved: bool = False
    """Whether somebody else waits for it."""
    extended: bool = False
    returned: bool = False

    def shown(self) -> str:
        facts = [word for word in ("reserved", "extended", "returned") if getattr(self, word)]
        state = " and ".join("reserved by somebody else" if f == "reserved" else f for f in facts)
        return f"{self.number}: {self.item}{f' ({state})' if state else ''}"


@dataclass(frozen=True, slots=True)
class DeskWish:
    """What a customer wants done with a loan, and whether the rules allow it."""

    tool: str
    loan: str
    allowed: bool


@dataclass
class Desk:
    """One desk under way."""

    name: str
    member: str
    loans: list[Loan]
    wishes: tuple[DeskWish, ...]
    instruction: str
    calls: list[str] = field(default_factory=list)

    def meta(self) -> dict[str, Any]:
        """What a runtime says of a fresh environment."""
        return {"instruction": self.instruction, "wiki": TEXTS["rules"], "tools_info": desk_tools()}

    def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers; mistakes are answered in words, as a service does."""
        self.calls.append(name)
        if name == "find_member":
            named = (str(arguments.get("name")).lower(), str(arguments.get("member")))
            matches = named == (self.name.lower(), self.member)
            return f"member {self.member}: {self.name}" if matches else "no such member"
        if name == "list_loans":
            matches = str(arguments.get("member")) == self.member
            return "\n".join(loan.shown() for loan in self.loans) if matches else "no such member"
        if name == "transfer_to_colleague":
            return "the customer was handed over"
        loan = next((x for x in self.loans if x.number == str(arguments.get("loan"))), None)
        return "no such loan" if loan is None else _changed(name, loan)

    def reward(self) -> float:
        """1 where every loan is as it should be at the end, else 0."""
        due = {wish.loan: wish.tool for wish in self.wishes if wish.allowed}
        return float(all(
            (loan.extended, loan.returned)
            == (due.get(loan.number) == "extend_loan", due.get(loan.number) == "end_loan")
            for loan in self.loans
        ))  # fmt: skip


def _changed(name: str, loan: Loan) -> str:
    """Change a loan. What the rules forbid is possible: keeping to them is the agent's part."""
    if name == "extend_loan":
        loan.extended = True
        return f"{loan.number} is due seven days later"
    loan.returned = True
    return f"{loan.number} is ended"


def desk(number: int) -> Desk:
    """The desk of this number before anybody has come."""
    rng = random.Random(f"{DOMAIN}/{number}")
    name = f"{rng.choice(TEXTS['first_names'])} {rng.choice(TEXTS['last_names'])}"
    member = f"M{rng.randrange(10_000, 100_000)}"
    items = rng.sample(TEXTS["tools"], rng.choice((2, 3)))
    numbers = rng.sample(range(10_000, 100_000), len(items))
    loans = [Loan(f"L{n}", item) for n, item in zip(numbers, items, strict=True)]
    wishes = _wishes(number % 4, loans)
    text = _instruction(name, member, loans, wishes, rng)
    return Desk(name, member, loans, wishes, text)


def _wishes(kind: int, loans: Sequence[Loan]) -> tuple[DeskWish, ...]:
    first, second = loans[0].number, loans[1].number
    if kind == 0:
        return (DeskWish("extend_loan", first, allowed=True),)
    if kind == 1:
        return (DeskWish("end_loan", first, allowed=True),)
    if kind == 2:
        loans[0].reserved = True
        return (DeskWish("extend_loan", first, allowed=False),)
    return (
        DeskWish("extend_loan", first, allowed=True),
        DeskWish("end_loan", second, allowed=True),
    )


def _instruction(
    name: str, member: str, loans: Sequence[Loan], wishes: Sequence[DeskWish], rng: random.Random
) -> str:
    items = {loan.number: loan.item for loan in loans}
    parts = [f"You are {name}, and your member number at the tool library is {member}."]
    for wish in wishes:
        reason = rng.choice(TEXTS["reasons"][wish.tool])
        parts.append(TEXTS["wishes"][wish.tool].format(item=items[wish.loan], reason=reason))
    parts.append("You do not know the numbers of your loans. If the rules say no, you accept it.")
    return " ".join(parts)


@cache
def desk_tools() -> tuple[dict[str, Any], ...]:
    """What the agent may call, declared as a runtime declares it."""
    return tuple(_declared(name, *about) for name, about in TEXTS["calls"].items())


def _declared(name: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    texts = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    declared = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": declared}
