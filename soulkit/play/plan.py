"""What an evaluation will ask for, before anything starts: episodes, calls, words and cost.

Words are counted, not tokens, since an API model brings no tokenizer; TOKENS_PER_WORD turns them
into tokens for the cost. The cost is an upper estimate: every reply is taken to be as long as
`max_tokens` allows, and every dialogue to last as many turns as its task allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soulkit.data.files import BadRow
from soulkit.tasks.base import Task
from soulkit.types import Example, Role

TOKENS_PER_WORD = 4 / 3


@dataclass(frozen=True, slots=True)
class Work:
    """A task and the examples of it that are to be played."""

    task: Task
    examples: tuple[Example, ...]
    bad: tuple[BadRow, ...] = ()
    """Rows that were left out, and why."""

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that sit at the tables of these examples."""
        return frozenset(role for example in self.examples for role in example.seats.values())

    @property
    def turns(self) -> int:
        """Turns of the actor in one episode at most."""
        return int(self.task.spec.options.get("max_turns", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The plan of one task."""

    task: str
    examples: int
    episodes: int
    calls: Mapping[str, int]
    """Role → calls at most."""
    prompt_words: int
    """Words of the actor's first prompts, over all episodes."""
    longest_prompt: int
    """Words of the longest of them."""
    max_tokens: int
    """Limit of one reply."""
    cost: float | None
    """US dollars at most for the actor; None without prices."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `--dry-run` prints."""

    tasks: tuple[TaskPlan, ...]

    @property
    def episodes(self) -> int:
        return sum(t.episodes for t in self.tasks)

    @property
    def calls(self) -> int:
        return sum(count for t in self.tasks for count in t.calls.values())

    @property
    def prompt_words(self) -> int:
        return sum(t.prompt_words for t in self.tasks)

    @property
    def cost(self) -> float | None:
        known = [t.cost for t in self.tasks if t.cost is not None]
        return sum(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "episodes": self.episodes,
            "calls": self.calls,
            "prompt_words": self.prompt_words,
            "cost": self.cost,
            "tasks": [asdict(t) for t in self.tasks],
        }


def plan(
    work: Sequence[Work],
    repeats: int,
    max_tokens: Mapping[str, int],
    *,
    price_in: float | None = None,
    price_out: float | None = None,
) -> Plan:
    """The plan of `repeats` plays of every example.

    `max_tokens` is the reply limit by task; prices are US dollars per million tokens of the actor.
    """
    prices = None if price_in is None or price_out is None else (price_in, price_out)
    return Plan(tuple(_planned(w, repeats, max_tokens[w.task.name], prices) for w in work))


def _planned(
    work: Work, repeats: int, max_tokens: int, prices: tuple[float, float] | None
) -> TaskPlan:
    lengths = [_words(work.task, example) for example in work.examples]
    episodes = repeats * len(work.examples)
    calls: dict[str, int] = dict.fromkeys(sorted(work.roles), episodes * work.turns)
    cost = None
    if prices is not None:
        asked = repeats * sum(_prompt_tokens(n, work.turns, max_tokens) for n in lengths)
        cost = (prices[0] * asked + prices[1] * calls.get("actor", 0) * max_tokens) / 1e6
    return TaskPlan(
        task=work.task.name,
        examples=len(work.examples),
        episodes=episodes,
        calls=calls,
        prompt_words=repeats * sum(lengths),
        longest_prompt=max(lengths, default=0),
        max_tokens=max_tokens,
        cost=cost,
    )


def _words(task: Task, example: Example) -> int:
    return sum(len(segment.text.split()) for segment in task.preview(example))


def _prompt_tokens(words: int, turns: int, max_tokens: int) -> float:
    """Tokens of all prompts of one episode: each turn adds a line of both sides to the next."""
    return turns * words * TOKENS_PER_WORD + turns * (turns - 1) * max_tokens
