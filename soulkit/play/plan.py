"""What a command will ask for, before anything starts: calls, tokens, cost, memory and time.

A call is paid for unless its server is on this machine or its price is 0; an unknown price counts
as one. On a terminal the user is asked; elsewhere `--yes` confirms, or `--max-cost` bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from soulkit.data.files import BadRow
from soulkit.errors import ConfigError
from soulkit.judge.pairwise import purposes_asked
from soulkit.judge.structured import QUESTION_ATTEMPTS
from soulkit.models.api.prices import load_prices
from soulkit.models.local.machine import Machine
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.reporting import Reporter
from soulkit.tasks.kit.base import Control, Task
from soulkit.text import dollars
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


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that are played, or asked about: how often, and by which players."""

    work: Sequence[Work]
    players: Callable[[Work], Sequence[PlayerTerms]]
    """The actor first. Roles that the task does not call are left out."""
    label: str = ""
    """What follows the names of the tasks."""
    times: float = 1.0
    """Plays of every row."""
    controls: Sequence[tuple[Control, Example]] = ()
    """Where given, these are asked about and no episode is played; `work` names their task."""


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

    @property
    def longest_context(self) -> int:
        """Tokens of the longest context, about: the longest prompt and an episode's replies."""
        spoken = sum(one.reply_tokens for one in self.asked if one.role in SPEAKERS)
        return round(self.longest_prompt * TOKENS_PER_WORD) + spoken // max(self.episodes, 1)


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


def plan_loads(loads: Iterable[Load], *, concurrency: int = 1) -> Plan:
    """The plan of all `loads`; this machine is not in it."""
    tasks = tuple(_plan_task(load, work) for load in loads for work in load.work)
    return Plan(tasks=tasks, concurrency=concurrency)


def in_turn(plans: Sequence[Plan]) -> Plan:
    """Plans one after the other: times add up, memory does not."""
    machines = [one.machine for one in plans if one.machine is not None]
    machine = Machine(
        memory=max(one.memory for one in machines), seconds=sum(one.seconds for one in machines),
        words=machines[0].words,
    ) if machines else None  # fmt: skip
    width = min((one.concurrency for one in plans if one.asked), default=1)
    tasks = tuple(task for one in plans for task in one.tasks)
    return Plan(tasks=tasks, concurrency=width, machine=machine)


def question_load(terms: PlayerTerms, prompts: Sequence[int]) -> PlayerLoad:
    """One player's questions, by the words of each prompt; only the cost counts second asks."""
    calls, tokens = len(prompts), round(sum(prompts) * TOKENS_PER_WORD)
    return replace(_priced(terms, calls, tokens, calls, tokens, QUESTION_ATTEMPTS), calls=calls)


def _plan_task(load: Load, work: Work) -> TaskPlan:
    task, players = work.task, load.players(work)
    parts: Sequence[tuple[Control | None, Example]] = load.controls
    parts = parts or [(None, example) for example in work.examples]
    by_seat = {example.id: words_by_seat(task, example) for _, example in parts}
    words = {name: round(sum(seats) / max(len(seats), 1)) for name, seats in by_seat.items()}
    loads = []
    for player in players:
        asks = [_ask(task, control, row, words[row.id], player) for control, row in parts]
        loads.append(_player_load(task, asks, load.times, player, players))
    plays = 0.0 if load.controls else load.times
    return TaskPlan(
        task=f"{task.name} {load.label}".rstrip(),
        examples=len(work.examples) or len(words),
        episodes=round(plays * len(parts)),
        prompt_words=round(plays * sum(words[row.id] for _, row in parts)),
        longest_prompt=max((max(seats, default=0) for seats in by_seat.values()), default=0),
        asked=tuple(one for one in loads if one.calls),
        chain=sum(one.seconds for one in loads) / max(load.times * len(parts), 1),
        shared=round(plays * _shared(work, players)),
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


def _ask(
    task: Task, control: Control | None, example: Example, words: int, player: PlayerTerms
) -> Ask:
    most, usual = task.calls(example), task.usual_calls(example)
    if control is None:
        calls, about = (_calls_to(player, one, task.pair_calls) for one in (most, usual))
    else:
        calls = about = _calls_to(replace(player, each=0), control.calls, control.pair_calls)
    return Ask(
        _opening(task, example, words, player.role),
        int(most.get("actor", 1)), calls, int(usual.get("actor", 1)), about,
        _lines(task, example),
    )  # fmt: skip


def _opening(task: Task, example: Example, words: int, role: str) -> float:
    """Tokens that a prompt of `role` begins with, where the actor's has `words`."""
    counted = opening_words(task, example, role) if role != "actor" else None
    if counted is not None:
        return counted * TOKENS_PER_WORD
    return words * TOKENS_PER_WORD + (RUBRIC if role in READERS else 0)


def _lines(task: Task, example: Example) -> dict[str, float]:
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


def _calls_to(player: PlayerTerms, by_role: Mapping[Role, int], pair_calls: int) -> float:
    """Calls of a player; a judge that sees pairs in one order saves half of `pair_calls`."""
    dropped = pair_calls / 2 if player.role == "judge" and player.orders == "seeded" else 0
    calls = next((count for role, count in by_role.items() if role == player.role), 0)
    return calls - dropped if calls else player.each


def _player_load(
    task: Task, asks: Sequence[Ask], plays: float, player: PlayerTerms,
    players: Sequence[PlayerTerms],
) -> PlayerLoad:  # fmt: skip
    others = {v.role: v for v in players}
    repetitions = _repeats(task, player)
    longest = sum(others[role].limit for role in SPEAKERS if role in others)
    calls = about = prompts = most = 0.0
    for ask in asks:
        times, usual = ask.calls * repetitions, ask.usual_calls * repetitions
        calls, about = calls + times, about + usual
        each = sum(others[role].reply * n for role, n in ask.lines.items() if role in others)
        prompts += usual * _prompt(ask.opening, ask.usual_turns, player, each)
        most += times * _prompt(ask.opening, ask.turns, player, longest)
    tries = QUESTION_ATTEMPTS if player.role in PANELS else 1
    about, prompts, calls, most = (round(plays * n) for n in (about, prompts, calls, most))
    return _priced(player, int(about), int(prompts), int(calls), int(most), tries)


def _priced(
    player: PlayerTerms, about: int, prompts: int, calls: int, most: int, tries: int
) -> PlayerLoad:
    """The load of `about` calls with `prompts` tokens, and of `calls` with `most` tokens at most,
    each of them put `tries` times and answered at full length."""
    replies = about * player.reply
    most = tries * most + (tries - 1) * calls * AGAIN
    return PlayerLoad(
        role=player.role, name=player.name, calls=tries * calls, usual_calls=about,
        prompt_tokens=prompts, reply_tokens=replies,
        cost=_cost(player, prompts, replies),
        cost_limit=_cost(player, most, tries * calls * player.limit),
        seconds=about * SECONDS_PER_CALL + replies * SECONDS_PER_TOKEN if player.served else 0.0,
        paid=player.paid,
    )  # fmt: skip


def _repeats(task: Task, player: PlayerTerms) -> float:
    """What a player's own number of opinions makes of the calls that the task counts."""
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


def _cost(player: PlayerTerms, prompt: float, reply: float) -> float | None:
    if player.prices is None:
        return None
    return (player.prices[0] * prompt + player.prices[1] * reply) / 1e6


# -- money -----------------------------------------------------------------------------------------


class CostUnconfirmed(ConfigError):
    """A run would cost money, and the cost was not confirmed."""


def prices_of(
    config: RolesConfig, settings: RoleSettings, role: str = ""
) -> tuple[float, float] | None:
    """US dollars per million prompt and reply tokens of a served player, in a role where it may be
    asked by batch; None where unknown."""
    price = settings.player_kind.price(settings, lambda: load_prices(config.prices))
    if price is not None and config.by_batch(role, settings):
        price = price.by_batch
    return None if price is None else (price.prompt, price.reply)


def is_paid(config: RolesConfig, settings: RoleSettings) -> bool:
    """Whether calls of a player cost money, as far as anybody knows."""
    return settings.player_kind.is_paid(settings, lambda: load_prices(config.prices))


def pays(config: RolesConfig) -> bool:
    """Whether anybody is named whose calls cost money."""
    return any(is_paid(config, who) for _, who in config.served())


def cost_words(plan: Plan) -> str:
    """`about $0.4200, at most $3.10`, and of whom no price is known."""
    strangers = sorted({one.name for one in plan.asked if one.paid and one.cost is None})
    if plan.cost is None:
        return f"unknown: no price is known of {', '.join(strangers)}"
    beside = f", without {', '.join(strangers)}: no price is known" if strangers else ""
    return f"about {dollars(plan.cost)}, at most {dollars(plan.cost_limit)}{beside}"


def confirm_cost(plan: Plan, config: RolesConfig, reporter: Reporter) -> None:
    """Say what the calls of `plan` will cost; CostUnconfirmed without an agreement. Nothing is said
    of a plan that costs nothing."""
    if not plan.paid:
        return
    batched = sorted({who.written() for role, who in config.served() if config.by_batch(role, who)})
    through = f" (by batch at a lower price: {', '.join(batched)})" if batched else ""
    reporter.note(f"cost of this run: {cost_words(plan)}{through}")
    if config.yes or config.max_cost is not None:
        return
    agreed = reporter.confirm("Go on?")
    if agreed:
        return
    if agreed is not None:
        raise CostUnconfirmed(
            "The cost was not confirmed.",
            "No model was asked, and nothing was written.",
            "Give --yes, bound it with --max-cost, or look closer with soul plan.",
        )
    raise CostUnconfirmed(
        f"This run would cost money ({cost_words(plan)}), and nobody has agreed to it.",
        "It was not started from a terminal, where it would have asked.",
        "Confirm with --yes, or bound the cost with --max-cost DOLLARS. A server of your own has "
        "price_in and price_out 0 in the endpoints file.",
    )
