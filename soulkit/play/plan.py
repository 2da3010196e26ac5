"""What a command will ask for, before anything starts: calls, tokens, cost, memory and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from soulkit.data.files import BadRow
from soulkit.judge.pairwise import purposes_asked
from soulkit.judge.structured import QUESTION_ATTEMPTS
from soulkit.models.players.settings import PANELS
from soulkit.tasks.kit.base import Control, Task
from soulkit.types import Example, Role

PANEL_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "judge": ("judge", "critic"),
    "auditor": ("audit",),
}
"""Role → what the names of its templates begin with; those of a seat begin with the seat."""


def words_by_seat(task: Task, example: Example) -> list[int]:
    """Words of the first prompt of every acted seat."""
    contexts = task.previews(example).values()
    return [sum(len(segment.text.split()) for segment in context) for context in contexts]


def opening_words(task: Task, example: Example, role: str) -> float | None:
    """Words of a prompt to `role`, none of the actor's, without what was played: its mean template
    and the fields that it may see. None where the task has no template of that name."""
    seats = tuple(seat for seat, of_role in example.seats.items() if of_role == role)
    starts = PANEL_TEMPLATES.get(role, seats)
    sizes = task.prompts.sizes(*starts) if starts else {}
    if not sizes:
        return None
    reader = "judge" if role in PANEL_TEMPLATES else seats[0]
    fields, _ = task.within_budget(example.visible(reader))
    return fmean(sizes.values()) + sum(map(words_of_value, fields.values()))


def words_of_value(value: Any) -> int:
    """Words of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, Mapping):
        return sum(map(words_of_value, value.values()))
    if isinstance(value, Sequence):
        return sum(map(words_of_value, value))
    return 0


TOKENS_PER_WORD = 4 / 3
USUAL = {"actor": 120, "partner": 120, "environment": 60, "judge": 500, "auditor": 250,
         "coach": 250, "blind_reader": 10, "drafter": 200, "filter": 120}  # fmt: skip
"""Tokens of a usual reply, thinking not counted: an assumption, see `PlayerTerms.usual`."""
RUBRIC = 800
"""Tokens of a judge's or coach's instructions, about, where no template tells."""
READERS = (*PANELS, "coach", "blind_reader")
"""The roles that read an episode when it is over."""
SPEAKERS = ("actor", "partner", "environment")
AGAIN = 600
"""Tokens that a judge's second prompt has more than the first: its reply, and what is wrong."""
CONTROLS = "controls"
"""What follows a task's name where its controls are planned."""
SECONDS_PER_TOKEN, SECONDS_PER_CALL = 0.012, 0.6
"""Assumed of a served model: what each reply token takes, and what each call takes before it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A task and the examples of it that are to be played."""

    task: Task
    examples: tuple[Example, ...]
    bad: tuple[BadRow, ...] = ()
    """Rows that were left out, and why."""
    controls: tuple[Control, ...] = ()
    """Those of the task that are asked about beside its episodes."""

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that an episode of these examples, or a control, may call."""
        controls = frozenset(role for one in self.controls for role in one.calls)
        return self.episode_roles | controls if self.examples else frozenset()

    @property
    def episode_roles(self) -> frozenset[Role]:
        """The roles that an episode of these examples may call: what its score depends on."""
        return frozenset(role for example in self.examples for role in self.task.calls(example))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerTerms:
    """One player of a role: how long its replies may be and what they cost."""

    role: str
    name: str
    limit: int
    """Tokens of one reply at most."""
    prices: tuple[float, float] | None = None
    """US dollars per million prompt and reply tokens."""
    times: int | None = None
    """Opinions on every question (`--judge-samples`); None: as many as the task's own `samples`."""
    orders: Literal["both", "seeded"] = "both"
    """In which orders a pair is shown (`--judge-order`)."""
    each: int = 0
    """Calls of an episode where the task itself does not call the role: a coach's."""
    usual: int | None = None
    """Tokens of its replies in an earlier run; None: USUAL."""
    served: bool = True
    """Whether it costs time on a server rather than on this machine."""
    paid: bool = False
    """Whether its calls cost money, as far as anybody knows."""

    @property
    def reply(self) -> int:
        return min(self.limit, self.usual or USUAL[self.role])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerLoad:
    """What one player is asked for in one task. Tokens and US dollars over all its calls."""

    role: str
    name: str
    calls: int
    """At most: a judge's with a re-ask each, which only `cost_limit` counts, too."""
    usual_calls: int
    """About: what the tokens, the cost and the time are made of."""
    prompt_tokens: int
    reply_tokens: int
    cost: float | None
    cost_limit: float | None
    """The cost at most; both are None without prices."""
    seconds: float
    """Of all calls one after the other; 0 for a player on this machine."""
    paid: bool = False
    """Whether they cost money, as far as anybody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The plan of one task."""

    task: str
    examples: int
    episodes: int
    prompt_words: int
    """Words of the actor's first prompts, over all episodes."""
    longest_prompt: int
    """Words of the longest of them."""
    asked: tuple[PlayerLoad, ...]
    chain: float
    """Seconds of one episode's calls, one after the other."""
    shared: int = 0
    """Calls that exclude each other: the episodes make so many fewer than `calls` come to."""

    @property
    def calls(self) -> dict[str, int]:
        """Role → calls at most."""
        counts: dict[str, int] = {}
        for one in self.asked:
            counts[one.role] = counts.get(one.role, 0) + one.calls
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan takes on this machine: bytes and seconds, `about` said in `words`."""

    memory: int
    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `--dry-run` and `soul plan` print."""

    tasks: tuple[TaskPlan, ...]
    concurrency: int = 1
    machine: Machine | None = None

    @property
    def episodes(self) -> int:
        return sum(t.episodes for t in self.tasks)

    @property
    def asked(self) -> tuple[PlayerLoad, ...]:
        return tuple(one for t in self.tasks for one in t.asked)

    @property
    def calls(self) -> int:
        """At most."""
        return sum(one.calls for one in self.asked) - sum(t.shared for t in self.tasks)

    @property
    def usual_calls(self) -> int:
        """About."""
        return sum(one.usual_calls for one in self.asked)

    @property
    def prompt_words(self) -> int:
        return sum(t.prompt_words for t in self.tasks)

    @property
    def cost(self) -> float | None:
        """US dollars about; None when no price is known."""
        return total(one.cost for one in self.asked)

    @property
    def cost_limit(self) -> float | None:
        """US dollars at most."""
        return total(one.cost_limit for one in self.asked)

    @property
    def cost_by_role(self) -> dict[str, tuple[float, float]]:
        """Role → US dollars about and at most, the dearest first; roles without prices left out."""
        sums: dict[str, tuple[float, float]] = {}
        for one in self.asked:
            if one.cost is not None and one.cost_limit is not None:
                about, most = sums.get(one.role, (0.0, 0.0))
                sums[one.role] = about + one.cost, most + one.cost_limit
        return dict(sorted(sums.items(), key=lambda item: -item[1][0]))

    @property
    def paid(self) -> bool:
        """Whether any call costs money, as far as anybody knows."""
        return any(one.paid for one in self.asked)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Served players without a price: the cost leaves them out."""
        return tuple(sorted({one.name for one in self.asked if one.cost is None and one.seconds}))

    @property
    def seconds(self) -> float:
        """Wall seconds, about: as wide as the concurrency allows, never shorter than one episode's
        own chain of calls, plus the work of this machine."""
        served = sum(one.seconds for one in self.asked) / self.concurrency
        chain = max((t.chain for t in self.tasks), default=0.0)
        return max(served, chain) + (self.machine.seconds if self.machine else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "episodes": self.episodes,
            "calls": self.calls,
            "usual_calls": self.usual_calls,
            "prompt_words": self.prompt_words,
            "cost": self.cost,
            "cost_limit": self.cost_limit,
            "cost_by_role": {
                role: {"cost": about, "cost_limit": most}
                for role, (about, most) in self.cost_by_role.items()
            },
            "unpriced": list(self.unpriced),
            "seconds": self.seconds,
            "machine": asdict(self.machine) if self.machine else None,
            "tasks": [{**asdict(t), "calls": t.calls} for t in self.tasks],
        }


def total(values: Any) -> float | None:
    """The sum of those that are known; None when none is."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def plan_work(
    work: Sequence[Work],
    repeats: int,
    players: Mapping[str, Sequence[PlayerTerms]],
    *,
    concurrency: int = 1,
) -> Plan:
    """The plan of `repeats` plays of every example.

    `players` are those of each task: the actor first, then the others. Roles that
    the task does not call are left out.
    """
    tasks = tuple(_plan_task(w, repeats, players[w.task.name]) for w in work)
    return Plan(tasks=tasks, concurrency=concurrency)


def plan_controls(
    task: Task, parts: Sequence[tuple[Control, Example]], players: Sequence[PlayerTerms]
) -> TaskPlan:
    """The plan of asking about controls of a task's rows and drafts, under a name of its own; it
    plays no episode."""
    words = {example.id: _mean_words(words_by_seat(task, example)) for _, example in parts}
    loads = []
    for player in players:
        asks = [
            _control_ask(task, control, example, words[example.id], player)
            for control, example in parts
        ]
        loads.append(_player_load(task, asks, 1, player, players))
    return TaskPlan(
        task=f"{task.name} {CONTROLS}", examples=len(words), episodes=0, prompt_words=0,
        longest_prompt=max(words.values(), default=0),
        asked=tuple(one for one in loads if one.calls),
        chain=sum(one.seconds for one in loads) / max(len(parts), 1),
    )  # fmt: skip


def scaled(base: Plan, factor: float, label: str = "") -> Plan:
    """The plan of `factor` times as many episodes, its tasks marked with `label`."""
    return replace(base, tasks=tuple(_scale_task(t, factor, label) for t in base.tasks))


def _scale_task(part: TaskPlan, factor: float, label: str) -> TaskPlan:
    def more(value: float | None) -> float | None:
        return None if value is None else value * factor

    loads = [
        replace(
            one, calls=round(one.calls * factor), usual_calls=round(one.usual_calls * factor),
            prompt_tokens=round(one.prompt_tokens * factor),
            reply_tokens=round(one.reply_tokens * factor), cost=more(one.cost),
            cost_limit=more(one.cost_limit), seconds=one.seconds * factor,
        )
        for one in part.asked
    ]  # fmt: skip
    return replace(
        part, task=f"{part.task} {label}".strip(), episodes=round(part.episodes * factor),
        prompt_words=round(part.prompt_words * factor), shared=round(part.shared * factor),
        asked=tuple(loads),
    )  # fmt: skip


def on_machine(base: Plan, machine: Machine | None) -> Plan:
    """The plan with what it takes on this machine."""
    return replace(base, machine=machine)


def _plan_task(work: Work, repeats: int, players: Sequence[PlayerTerms]) -> TaskPlan:
    by_seat = [words_by_seat(work.task, example) for example in work.examples]
    lengths = [_mean_words(words) for words in by_seat]
    loads = [
        _player_load(work.task, _asks(work, lengths, player), repeats, player, players)
        for player in players
    ]
    episodes = repeats * len(work.examples)
    return TaskPlan(
        task=work.task.name,
        examples=len(work.examples),
        episodes=episodes,
        prompt_words=repeats * sum(lengths),
        longest_prompt=max((max(words, default=0) for words in by_seat), default=0),
        asked=tuple(one for one in loads if one.calls),
        chain=sum(one.seconds for one in loads) / max(episodes, 1),
        shared=_shared(work, players) * repeats,
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """What one episode, or one control, asks of a player."""

    opening: float
    """Tokens of the prompt without what is said in the episode."""
    turns: int
    """Of the actor, at most."""
    calls: float
    """At most, with the task's own samples."""
    usual_turns: int
    usual_calls: float
    lines: Mapping[str, float]
    """Role → what it says in the episode, per turn of the actor, about."""


def _asks(work: Work, lengths: Sequence[int], player: PlayerTerms) -> list[Ask]:
    """What an episode of each example asks of a player."""
    task = work.task
    return [
        Ask(
            _opening(task, example, words, player.role),
            *_times(task.calls(example), player, task.pair_calls),
            *_times(task.usual_calls(example), player, task.pair_calls),
            _lines(task, example),
        )
        for example, words in zip(work.examples, lengths, strict=True)
    ]


def _opening(task: Task, example: Example, words: int, role: str) -> float:
    """Tokens that a prompt of `role` begins with, where the actor's has `words`."""
    counted = opening_words(task, example, role) if role != "actor" else None
    if counted is not None:
        return counted * TOKENS_PER_WORD
    return words * TOKENS_PER_WORD + (RUBRIC if role in READERS else 0)


def _lines(task: Task, example: Example) -> dict[str, float]:
    """Role → its lines for each turn of the actor."""
    lines = task.usual_lines(example)
    turns = max(1, lines.get("actor", 1))
    return {str(role): count / turns for role, count in lines.items()}


def _shared(work: Work, players: Sequence[PlayerTerms]) -> int:
    """Calls of one play that exclude each other, where everybody at the table is planned."""
    roles = {player.role for player in players}
    return sum(
        work.task.shared_calls(example) for example in work.examples
        if {role for role in work.task.calls(example) if role in SPEAKERS} <= roles
    )  # fmt: skip


def _times(
    role_calls: Mapping[Role, int], player: PlayerTerms, pair_calls: int
) -> tuple[int, float]:
    """(turns of the actor in one episode, calls of a player in it); `pair_calls` of a judge's ask
    about a pair, and the half of them falls away where one order is drawn."""
    of_role = {str(role): count for role, count in role_calls.items()}
    dropped = pair_calls / 2 if player.role == "judge" and player.orders == "seeded" else 0
    calls = of_role.get(player.role, 0)
    return int(of_role.get("actor", 1)), (calls - dropped if calls else player.each)


def _player_load(
    task: Task, asks: Sequence[Ask], repeats: int, player: PlayerTerms,
    players: Sequence[PlayerTerms],
) -> PlayerLoad:  # fmt: skip
    others = {v.role: v for v in players}
    repetitions = _repeats(task, player)
    calls = about = prompts = most = 0.0
    for ask in asks:
        times, usual = ask.calls * repetitions, ask.usual_calls * repetitions
        calls, about = calls + times, about + usual
        prompts += usual * _prompt(ask.opening, ask.usual_turns, player, _each(ask, others))
        most += times * _prompt(ask.opening, ask.turns, player, _longest(others))
    calls, about, prompts, most = (round(repeats * n) for n in (calls, about, prompts, most))
    replies = int(about) * player.reply
    tries = QUESTION_ATTEMPTS if player.role in PANELS else 1
    most = tries * most + (tries - 1) * calls * AGAIN
    return PlayerLoad(
        role=player.role, name=player.name, calls=tries * int(calls), usual_calls=int(about),
        prompt_tokens=int(prompts), reply_tokens=replies,
        cost=_cost(player, prompts, replies),
        cost_limit=_cost(player, most, tries * calls * player.limit),
        seconds=about * SECONDS_PER_CALL + replies * SECONDS_PER_TOKEN if player.served else 0.0,
        paid=player.paid,
    )  # fmt: skip


def _repeats(task: Task, player: PlayerTerms) -> float:
    """What a player's own number of opinions makes of the calls that the task counts, which are
    those of its `samples`: exact where it puts all its questions equally often."""
    if player.role not in PANELS or player.times is None:
        return 1.0
    declared = task.spec.samples
    samples = [declared[purpose] for purpose in purposes_asked(declared, player.orders)]
    return player.times * len(samples) / sum(samples) if samples else float(player.times)


def _prompt(opening: float, turns: int, player: PlayerTerms, each: float) -> float:
    """Tokens of a mean prompt: its opening and what has been said since, `each` a turn."""
    if player.role in READERS:
        return opening + turns * each
    return opening + (turns - 1) / 2 * each


def _each(ask: Ask, others: Mapping[str, PlayerTerms]) -> float:
    """Tokens that an episode grows by with each turn of the actor, on all sides."""
    return sum(others[role].reply * n for role, n in ask.lines.items() if role in others)


def _longest(others: Mapping[str, PlayerTerms]) -> float:
    """The same at most."""
    return sum(others[role].limit for role in SPEAKERS if role in others)


def _cost(player: PlayerTerms, prompt: float, reply: float) -> float | None:
    if player.prices is None:
        return None
    return (player.prices[0] * prompt + player.prices[1] * reply) / 1e6


def _mean_words(by_seat: Sequence[int]) -> int:
    """Words of the first prompt of an acted seat, on average."""
    return round(sum(by_seat) / max(len(by_seat), 1))


def _control_ask(
    task: Task, control: Control, example: Example, words: int, player: PlayerTerms
) -> Ask:
    _, calls = _times(control.calls, replace(player, each=0), control.pair_calls)
    turns, usual_turns = (
        int(counts.get("actor", 1)) for counts in (task.calls(example), task.usual_calls(example))
    )
    opening = _opening(task, example, words, player.role)
    return Ask(opening, turns, calls, usual_turns, calls, _lines(task, example))
