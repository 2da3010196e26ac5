"""What a checkup finds: lines that are fine, worth a note, or a problem with its way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from soulkit.errors import UserError
from soulkit.runs.schemas import DOCTOR_SCHEMA, SCHEMA

Health = Literal["ok", "note", "problem"]
"""`note`: nothing is wrong, and somebody may want to know; `problem`: what was asked for will not
work as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One thing that was looked at."""

    part: str
    """What it belongs to: `packages`, `machine`, `outside`, `rows`, `settings`."""
    name: str
    health: Health
    words: str
    way: str = ""
    """How to mend it, a command where there is one."""

    @classmethod
    def of_error(cls, part: str, name: str, error: UserError) -> CheckLine:
        """The problem that an error tells of."""
        words = f"{error.what} {error.why}"
        return cls(part=part, name=name, health="problem", words=words, way=error.way_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerCheck:
    """What a player made of a real question, or why it was asked none."""

    role: str
    who: str
    task: str
    health: Health
    words: str
    way: str = ""
    calls: int = 0
    seconds: float = 0.0
    """Of all calls together."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """US dollars; None where no price is known."""
    schema: Literal["", "held", "ignored", "refused"] = ""
    """What its server made of the JSON Schema that came with the question; empty: none did."""


@dataclass(kw_only=True)
class Checkup:
    """All lines, in the order in which they are shown."""

    lines: list[CheckLine] = field(default_factory=list)
    players: list[PlayerCheck] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(one.health == "problem" for one in self._all())

    def _all(self) -> Iterator[CheckLine | PlayerCheck]:
        yield from self.lines
        yield from self.players

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, of the schema `doctor-1.json`."""
        lines, players = ([asdict(one) for one in several] for several in self._parts())
        named = {SCHEMA: DOCTOR_SCHEMA, "problems": self.problems}
        return {**named, "lines": lines, "players": players}

    def _parts(self) -> tuple[Sequence[CheckLine], Sequence[PlayerCheck]]:
        return self.lines, self.players
