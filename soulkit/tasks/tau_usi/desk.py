"""Rows of `tau_usi`, and the built-in service: the desk of a library that lends tools.

A row is little more than a task number; the domain's service holds the rest. The built-in domain
`tool_library` runs in this process with the interface of a service runtime; other domains need a
runtime, which knows their tasks by domain and index. From a file of recorded conversations only the
ids are read: {"retail_12": {...}} → {"env_name": "retail", "task_index": 12}

A customer has two or three loans and one or two wishes. Every fourth customer wants something that
the rules forbid; then the right action is to change nothing. The reward is 1 if the loans end as
they should, else 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from soulkit.data.files import BadRow
from soulkit.errors import DataError
from soulkit.parse import ParseError, decoded, parse_json, read_limited
from soulkit.tasks.kit.importing import Imported, WrongShape
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.spec import EVALUATION_ONLY

DOMAIN: Final = "tool_library"
TEXTS = Texts(__file__)


@dataclass
class Loan:
    """A borrowed tool."""

    number: str
    item: str
    reserved: bool = False
    """Whether another member waits for it."""
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
    """The state of one desk."""

    name: str
    member: str
    loans: list[Loan]
    wishes: tuple[DeskWish, ...]
    instruction: str
    calls: list[str] = field(default_factory=list)

    def meta(self) -> dict[str, Any]:
        """The metadata of a fresh environment, as a runtime reports it."""
        return {"instruction": self.instruction, "wiki": TEXTS["rules"], "tools_info": desk_tools()}

    def step(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The answer of a tool; errors are returned as text, as by a real service."""
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
        """1 if every loan ends in the state that its wish and the rules require, else 0."""
        due = {wish.loan: wish.tool for wish in self.wishes if wish.allowed}
        return float(all(
            (loan.extended, loan.returned)
            == (due.get(loan.number) == "extend_loan", due.get(loan.number) == "end_loan")
            for loan in self.loans
        ))  # fmt: skip


def _changed(name: str, loan: Loan) -> str:
    """Change a loan. Forbidden changes are possible: the agent must follow the rules."""
    if name == "extend_loan":
        loan.extended = True
        return f"{loan.number} is due seven days later"
    loan.returned = True
    return f"{loan.number} is ended"


def desk(number: int) -> Desk:
    """The desk with this number, in its initial state."""
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
    """The agent's tools, declared as a runtime declares them."""
    return tuple(_declared(name, *about) for name, about in TEXTS["calls"].items())


def _declared(name: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    texts = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    declared = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": declared}


SIZES: Mapping[str, int] = {"retail": 115, "airline": 50}
"""Number of tasks in the published domains."""
_PER_SEED = 10_000


def rows(
    n: int = 100, seed: int = 0, *, domain: Literal["tool_library", "retail", "airline"] = DOMAIN
) -> list[dict[str, Any]]:
    """`n` rows of a domain. A published domain always gives its first `n`, regardless of the
    seed."""
    if domain in SIZES:
        return [_row(domain, i) for i in range(min(n, SIZES[domain]))]
    return [_row(domain, seed * _PER_SEED + i) for i in range(n)]


def _row(domain: str, number: int) -> dict[str, Any]:
    return {"env_name": domain, "task_index": number, "instance_id": f"{domain}_{number}"}


_TASK_KEYS = ({"instruction", "actions"}, {"user_scenario", "evaluation_criteria"})

_DOMAIN, _SIZE = next(iter(SIZES.items()))
_MAKE_ROWS = (
    f"Generate rows of a domain instead: soul data synth tau_usi --domain {_DOMAIN} -n {_SIZE} "
    f"({'; '.join(f'{name}: -n {size}' for name, size in list(SIZES.items())[1:])})."
)
_ID = re.compile(r"([a-z_]*[a-z])_(\d+)(?:_ann[23])?")


def import_tau(path: Path) -> Imported:
    """One row per task, in file order; DataError for a file of another format."""
    if path.suffix == ".py":  # the format of tau-bench itself
        raise _tasks_of_tau_bench(path)
    try:
        text = decoded(read_limited(Path(path)))
        lines = [line for line in text.splitlines() if line.strip()]
        entries = list(map(parse_json, lines)) if path.suffix == ".jsonl" else parse_json(text)
    except (OSError, ParseError) as error:
        raise _of_other_shape(path, " ".join(str(error).split())[:200]) from error
    if _are_tasks(entries):
        raise _tasks_of_tau_bench(path)
    if not isinstance(entries, dict) or not any(_ID.fullmatch(key) for key in entries):
        raise _of_other_shape(path, "It has no objects with ids such as retail_12.")
    made: dict[str, dict[str, Any]] = {}
    bad: list[BadRow] = []
    for key in entries:
        match = _ID.fullmatch(key)
        if match is None:
            bad.append(BadRow(f"{path.name}: {key[:60]}", "its id has no domain and number"))
            continue
        name = f"{match[1]}_{match[2]}"
        row = {"env_name": match[1], "task_index": int(match[2]), "instance_id": name}
        made.setdefault(name, {**row, EVALUATION_ONLY: True})
    notes = ("the rows are marked evaluation-only, as the file's terms require",)
    return Imported(rows=tuple(made.values()), bad=tuple(bad), notes=notes)


def _are_tasks(entries: Any) -> bool:
    """Whether these are tasks of tau-bench or its successor: a customer's wish, and what the
    service should do."""
    listed = entries.get("data", entries.get("tasks")) if isinstance(entries, dict) else entries
    return isinstance(listed, list) and any(
        isinstance(entry, dict) and any(keys <= entry.keys() for keys in _TASK_KEYS)
        for entry in listed
    )


def _tasks_of_tau_bench(path: Path) -> DataError:
    return DataError(
        f"'{path}' holds tau-bench tasks, which cannot be converted to rows.",
        "A row is the domain and number of a task. The runtime that serves the domain has the "
        "task itself, with its customers, tools and database.",
        _MAKE_ROWS,
    )


def _of_other_shape(path: Path, why: str) -> WrongShape:
    return WrongShape(
        f"'{path}' is not a file of recorded conversations.",
        why,
        "Give a JSON file with one object per conversation, under ids such as retail_12. "
        f"{_MAKE_ROWS}",
    )
