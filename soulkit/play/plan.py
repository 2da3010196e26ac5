"""The plan of a command: estimated calls, tokens, cost, memory and time, and the cost confirmation.

A call counts as paid unless its server is on this machine or its price is 0; a call with an unknown
price is paid. On a terminal the user confirms the cost; elsewhere `--yes` or `--max-cost` is
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal, Self

from soulkit.data.files import BadRow
from soulkit.errors import ConfigError
from soulkit.judge.pairwise import purposes_asked
from soulkit.judge.structured import QUESTION_ATTEMPTS
from soulkit.models.api.prices import load_prices
from soulkit.models.base import NO_PROMPT, ModelPrompt
from soulkit.models.local.footprint import Machine
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.reporting import Reporter
from soulkit.tasks.kit.base import Control, Task
from soulkit.tasks.kit.loading import STAND_IN
from soulkit.text import counted, dollars, word_count
from soulkit.types import Example, Role

PANEL_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "judge": ("judge", "critic"),
    "auditor": ("audit",),
}
"""Role → prefixes of its template names; templates of a seat start with the seat's name."""


def words_by_seat(
    task: Task, example: Example, published: bool = True, own: ModelPrompt = NO_PROMPT
) -> list[int]:
    """The number of words in the first prompt of each acted seat, with the actor's `own`
    instructions; for rows that are not here, as `published`."""
    if published and example.source == STAND_IN and task.spec.size is not None:
        return [task.spec.size.words + word_count(own.text)] * len(task.acted_seats(example))
    contexts = map(own.added_to, task.previews(example).values())
    return [sum(word_count(segment.text) for segment in context) for context in contexts]


def opening_words(task: Task, example: Example, role: str) -> float | None:
    """Words in a prompt to `role` (not the actor) without the played turns: the mean length of its
    templates plus the fields that it may see. None if the task has no template for it."""
    seats = tuple(seat for seat, of_role in example.seats.items() if of_role == role)
    starts = PANEL_TEMPLATES.get(role, seats)
    sizes = task.prompts.sizes(*starts) if starts else {}
    if not sizes:
        return None
    reader = "judge" if role in PANEL_TEMPLATES else seats[0]
    fields, _ = task.within_budget(example.visible(reader))
    words = fmean(sizes.values()) + sum(map(words_of_value, fields.values()))
    if example.source == STAND_IN:  # released rows are longer, for every reader alike
        words += fmean(words_by_seat(task, example)) - fmean(words_by_seat(task, example, False))
    return max(words, 0.0)


LINE, LINES = 1024, 32_768
"""Tokens of an earlier line of a dialogue, and of all of them, for which a context has room. Most
lines are shorter; the sum of all reply limits would be more than any model holds."""
TOKENS_PER_CHARACTER = 0.6
"""An upper estimate for texts of unknown language."""


def episode_tokens(task: Task, example: Example, reply: int, prompt: int | None = None) -> int:
    """Tokens of the longest context of an episode: a first prompt of `prompt` tokens (None:
    estimated), the earlier lines, and a reply of `reply` tokens."""
    if prompt is None:
        texts = [sum(len(part.text) for part in one) for one in task.previews(example).values()]
        prompt = round(max(texts, default=0) * TOKENS_PER_CHARACTER)
    calls = task.calls(example)
    lines = sum(count for role, count in calls.items() if role in SPEAKERS) - 1
    return prompt + reply + min(max(lines, 0) * LINE, LINES)


def words_of_value(value: Any) -> int:
    """Words in all strings of a JSON value."""
    if isinstance(value, str):
        return word_count(value)
    if isinstance(value, Mapping):
        return sum(map(words_of_value, value.values()))
    if isinstance(value, Sequence):
        return sum(map(words_of_value, value))
    return 0


TOKENS_PER_WORD = 4 / 3
USUAL = {"actor": 120, "partner": 120, "environment": 60, "judge": 500, "coach": 250, "filter": 120,
         "dev_judge": 500, "auditor": 250, "blind_reader": 10, "drafter": 200}  # fmt: skip
"""Assumed tokens of a usual reply without thinking; see `PlayerTerms.usual`."""
RUBRIC = 800
"""Assumed tokens of a judge's or coach's instructions, if there is no template."""
READERS = (*PANELS, "coach", "blind_reader")
"""The roles that read finished episodes."""
SPEAKERS = ("actor", "partner", "environment")
AGAIN = 600
"""Additional tokens of a judge's second prompt: its first reply and the error."""
CONTROLS = "controls"
"""Follows the task's name in the plan of its controls."""
SPREAD = (1.0, 0.5, 2.0)
"""Assumed lengths of replies as factors: usual, and the range of a cost that was not measured."""
SECONDS_PER_TOKEN, SECONDS_PER_CALL = 0.012, 0.6
"""Assumed speed of an API model: seconds per reply token, and per call before the first token."""


@dataclass(frozen=True, slots=True)
class Work:
    """A task and its examples to play."""

    task: Task
    examples: tuple[Example, ...]
    bad: tuple[BadRow, ...] = ()
    """Rows that were left out, with reasons."""
    controls: tuple[Control, ...] = ()
    """Controls of the task to ask in addition to the episodes."""

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that an episode of these examples, or a control, may call."""
        controls = frozenset(role for one in self.controls for role in one.calls)
        return self.episode_roles | controls if self.examples else frozenset()

    @property
    def episode_roles(self) -> frozenset[Role]:
        """The roles that an episode of these examples may call; controls do not count."""
        return frozenset(role for example in self.examples for role in self.task.calls(example))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerTerms:
    """One player of a role, with reply limit, prices and number of calls."""

    role: str
    name: str
    limit: int
    """Maximum tokens of one reply."""
    prices: tuple[float, float] | None = None
    """US dollars per million prompt and reply tokens."""
    times: int | None = None
    """Opinions per question (`--judge-samples`); None for the task's own `samples`."""
    orders: Literal["both", "seeded"] = "both"
    """Orders in which a pair is shown (`--judge-order`)."""
    each: int = 0
    """Calls per episode if the task itself does not call the role, as for a coach."""
    usual: int | None = None
    """Mean tokens of its replies in an earlier run; None for USUAL."""
    served: bool = True
    """Whether it runs on a server and not in this process."""
    paid: bool = False
    """Whether its calls cost money; unknown prices count as paid."""
    instructions: ModelPrompt = NO_PROMPT

    @property
    def reply(self) -> int:
        return min(self.limit, self.usual or USUAL[self.role])

    def stretched(self, factor: float) -> Self:
        """The player with replies that are `factor` times as long as usual."""
        return replace(self, usual=max(1, round(factor * (self.usual or USUAL[self.role]))))


@dataclass(frozen=True, slots=True)
class Load:
    """Rows to play, or controls to ask, with their players."""

    work: Sequence[Work]
    players: Callable[[Work], Sequence[PlayerTerms]]
    """Task → its players, the actor first. Roles that the task does not call are left out."""
    label: str = ""
    """Follows the task names in the plan."""
    times: float = 1.0
    """Episodes per row."""
    controls: Sequence[tuple[Control, Example]] = ()
    """If given, only these controls are asked and no episode is played; `work` names their task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerLoad:
    """The calls of one player in one task. Tokens and US dollars are totals over all its calls."""

    role: str
    name: str
    calls: int
    """Maximum, including one re-ask for every judge call; `cost_limit` is based on it."""
    usual_calls: int
    """Expected; tokens, cost and time are based on it."""
    prompt_tokens: int
    reply_tokens: int
    cost: float | None
    cost_limit: float | None
    """Maximum cost. Both are None without prices."""
    seconds: float
    """Seconds of all calls one after the other; 0 for a player on this machine."""
    paid: bool = False
    """Whether the calls cost money; unknown prices count as paid."""
    cost_range: tuple[float, float] | None = None
    """Expected cost with replies half and twice as long as usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The plan of one task."""

    task: str
    examples: int
    episodes: int
    prompt_words: int
    """Total words in the actor's first prompts."""
    longest_prompt: int
    """Words in the longest of them."""
    asked: tuple[PlayerLoad, ...]
    chain: float
    """Seconds of one episode's calls, one after the other."""
    shared: int = 0
    """Calls counted twice in `calls` because an episode makes only one of two; to subtract."""

    @property
    def calls(self) -> dict[str, int]:
        """Role → maximum number of calls."""
        counts: dict[str, int] = {}
        for one in self.asked:
            counts[one.role] = counts.get(one.role, 0) + one.calls
        return counts

    @property
    def longest_context(self) -> int:
        """Estimated tokens of the longest context: the longest prompt plus an episode's replies."""
        spoken = sum(one.reply_tokens for one in self.asked if one.role in SPEAKERS)
        return round(self.longest_prompt * TOKENS_PER_WORD) + spoken // max(self.episodes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """The played rows from which a plan was measured."""

    rows: int
    tasks: int
    cost: float | None
    """US dollars that they cost; None if no price is known."""
    interval: tuple[float, float] | None
    """95 % interval of the cost of the whole plan; None if the rows support none."""
    ratios: Mapping[str, Mapping[str, float]]
    """Role → quantity (calls, prompt_tokens, reply_tokens) → used over assumed."""
    folder: str
    """The run that played them and continues with the other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan that `--dry-run` and `soul plan` print."""

    tasks: tuple[TaskPlan, ...]
    concurrency: int = 1
    machine: Machine | None = None
    pilot: Pilot | None = None
    """None: reply lengths and numbers of calls are assumed."""

    @property
    def episodes(self) -> int:
        return sum(t.episodes for t in self.tasks)

    @property
    def asked(self) -> tuple[PlayerLoad, ...]:
        return tuple(one for t in self.tasks for one in t.asked)

    @property
    def calls(self) -> int:
        """Maximum number of calls."""
        return sum(one.calls for one in self.asked) - sum(t.shared for t in self.tasks)

    @property
    def usual_calls(self) -> int:
        """Expected number of calls."""
        return sum(one.usual_calls for one in self.asked)

    @property
    def prompt_words(self) -> int:
        return sum(t.prompt_words for t in self.tasks)

    @property
    def cost(self) -> float | None:
        """Expected cost in US dollars; None if no price is known."""
        return total(one.cost for one in self.asked)

    @property
    def cost_limit(self) -> float | None:
        """Maximum cost in US dollars; None if no price is known."""
        return total(one.cost_limit for one in self.asked)

    @property
    def cost_range(self) -> tuple[float, float] | None:
        """The range of `cost`: the interval of the pilot, else that of other reply lengths."""
        if self.pilot is not None:
            return self.pilot.interval
        ends = [one.cost_range for one in self.asked if one.cost_range is not None]
        low, high = (sum(pair[i] for pair in ends) for i in (0, 1))
        return (low, high) if low < high else None

    @property
    def cost_by_role(self) -> dict[str, tuple[float, float]]:
        """Role → expected and maximum US dollars, most expensive first; only roles with prices."""
        sums: dict[str, tuple[float, float]] = {}
        for one in self.asked:
            if one.cost is not None and one.cost_limit is not None:
                about, most = sums.get(one.role, (0.0, 0.0))
                sums[one.role] = about + one.cost, most + one.cost_limit
        return dict(sorted(sums.items(), key=lambda item: -item[1][0]))

    @property
    def paid(self) -> bool:
        """Whether any call costs money; unknown prices count as paid."""
        return any(one.paid for one in self.asked)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """API players without a price, which the cost does not include."""
        return tuple(sorted({one.name for one in self.asked if one.cost is None and one.seconds}))

    @property
    def seconds(self) -> float:
        """Estimated wall seconds: all calls divided by the concurrency, but at least one episode's
        chain of calls, plus the time on this machine."""
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
            "cost_range": self.cost_range,
            "cost_limit": self.cost_limit,
            "pilot": asdict(self.pilot) if self.pilot else None,
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
    """The sum of the known values; None if all are None."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def plan_loads(loads: Iterable[Load], *, concurrency: int = 1) -> Plan:
    """The plan of all `loads`, without memory and time on this machine."""
    tasks = tuple(_plan_task(load, work) for load in loads for work in load.work)
    return Plan(tasks=tasks, concurrency=concurrency)


def in_turn(plans: Sequence[Plan]) -> Plan:
    """The plan of several commands that run in turn: times are added, memory is the maximum."""
    machines = [one.machine for one in plans if one.machine is not None]
    machine = replace(
        max(machines, key=lambda one: one.memory), seconds=sum(one.seconds for one in machines),
        words=machines[0].words,
    ) if machines else None  # fmt: skip
    width = min((one.concurrency for one in plans if one.asked), default=1)
    tasks = tuple(task for one in plans for task in one.tasks)
    return Plan(tasks=tasks, concurrency=width, machine=machine)


def question_load(terms: PlayerTerms, prompts: Sequence[int]) -> PlayerLoad:
    """The load of one player's questions, from the number of words in each prompt; only
    `cost_limit` includes re-asks."""
    calls, tokens = len(prompts), round(sum(prompts) * TOKENS_PER_WORD)
    return replace(_with_range(
        _priced(terms.stretched(factor), calls, tokens, calls, tokens, QUESTION_ATTEMPTS)
        for factor in SPREAD
    ), calls=calls)  # fmt: skip


def _with_range(loads: Iterable[PlayerLoad]) -> PlayerLoad:
    """The first of three loads; the costs of the others are the range of its cost."""
    usual, short, long = loads
    if short.cost is None or long.cost is None:
        return usual
    return replace(usual, cost_range=(short.cost, long.cost))


def _plan_task(load: Load, work: Work) -> TaskPlan:
    task, players = work.task, load.players(work)
    parts: Sequence[tuple[Control | None, Example]] = load.controls
    parts = parts or [(None, example) for example in work.examples]
    own = next((one.instructions for one in players), NO_PROMPT)
    by_seat = {example.id: words_by_seat(task, example, own=own) for _, example in parts}
    words = {name: round(sum(seats) / max(len(seats), 1)) for name, seats in by_seat.items()}
    longest = max((max(seats, default=0) for seats in by_seat.values()), default=0)
    if task.spec.size and any(row.source == STAND_IN for _, row in parts):
        longest = max(longest, task.spec.size.longest)
    spread = [[one.stretched(factor) for one in players] for factor in SPREAD]
    loads = []
    for i, player in enumerate(players):
        asks = [_ask(task, control, row, words[row.id], player) for control, row in parts]
        loads.append(
            _with_range(_player_load(task, asks, load.times, some[i], some) for some in spread)
        )
    plays = 0.0 if load.controls else load.times
    return TaskPlan(
        task=f"{task.name} {load.label}".rstrip(),
        examples=len(work.examples) or len(words),
        episodes=round(plays * len(parts)),
        prompt_words=round(plays * sum(words[row.id] for _, row in parts)),
        longest_prompt=longest,
        asked=tuple(one for one in loads if one.calls),
        chain=sum(one.seconds for one in loads) / max(load.times * len(parts), 1),
        shared=round(plays * _shared(work, players)),
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """The calls to one player in one episode, or for one control."""

    opening: float
    """Tokens of the prompt without the turns of the episode."""
    turns: int
    """Maximum turns of the actor."""
    calls: float
    """Maximum calls, with the task's own samples."""
    usual_turns: int
    usual_calls: float
    lines: Mapping[str, float]
    """Role → expected number of its lines per turn of the actor."""


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
    """Tokens of the first prompt of `role`, if the actor's has `words` words."""
    counted = opening_words(task, example, role) if role != "actor" else None
    if counted is not None:
        return counted * TOKENS_PER_WORD
    return words * TOKENS_PER_WORD + (RUBRIC if role in READERS else 0)


def _lines(task: Task, example: Example) -> dict[str, float]:
    lines = task.usual_lines(example)
    turns = max(1, lines.get("actor", 1))
    return {str(role): count / turns for role, count in lines.items()}


def _shared(work: Work, players: Sequence[PlayerTerms]) -> int:
    """Calls of one episode that exclude each other, if all its speakers are planned."""
    roles = {player.role for player in players}
    return sum(
        work.task.shared_calls(example) for example in work.examples
        if {role for role in work.task.calls(example) if role in SPEAKERS} <= roles
    )  # fmt: skip


def _calls_to(player: PlayerTerms, by_role: Mapping[Role, int], pair_calls: int) -> float:
    """Calls of a player. A judge that sees pairs in only one order saves half of `pair_calls`."""
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
    """The load of `about` expected calls with `prompts` tokens. Its limit: `calls` calls with
    `most` tokens, each asked `tries` times with replies of full length."""
    replies = about * player.reply
    most = tries * most + (tries - 1) * calls * AGAIN
    return PlayerLoad(
        role=player.role, name=player.name, calls=tries * calls, usual_calls=about,
        prompt_tokens=prompts, reply_tokens=replies, cost=_cost(player, prompts, replies),
        cost_limit=_cost(player, most, tries * calls * player.limit),
        seconds=seconds_of(about, replies) if player.served else 0.0,
        paid=player.paid,
    )  # fmt: skip


def seconds_of(calls: float, reply_tokens: float) -> float:
    """Assumed seconds of the calls of an API model, one after the other."""
    return calls * SECONDS_PER_CALL + reply_tokens * SECONDS_PER_TOKEN


def _repeats(task: Task, player: PlayerTerms) -> float:
    """Factor on the task's calls from the player's own number of opinions."""
    if player.role not in PANELS or player.times is None:
        return 1.0
    declared = task.spec.samples
    samples = [declared[purpose] for purpose in purposes_asked(declared, player.orders)]
    return player.times * len(samples) / sum(samples) if samples else float(player.times)


def _prompt(opening: float, turns: int, player: PlayerTerms, each: float) -> float:
    """Tokens of a mean prompt: its opening plus `each` tokens per turn so far."""
    if player.role in READERS:
        return opening + turns * each
    return opening + (turns - 1) / 2 * each


def _cost(player: PlayerTerms, prompt: float, reply: float) -> float | None:
    if player.prices is None:
        return None
    return (player.prices[0] * prompt + player.prices[1] * reply) / 1e6


# -- money -----------------------------------------------------------------------------------------


class CostUnconfirmed(ConfigError):
    """A run would cost money, but the cost was not confirmed."""


def prices_of(
    config: RolesConfig, settings: RoleSettings, role: str = ""
) -> tuple[float, float] | None:
    """US dollars per million prompt and reply tokens of an API player, with batch prices if the
    role uses batch calls; None if unknown."""
    price = settings.player_kind.price(settings, lambda: load_prices(config.prices))
    if price is not None and config.by_batch(role, settings):
        price = price.by_batch
    return None if price is None else (price.prompt, price.reply)


def is_paid(config: RolesConfig, settings: RoleSettings) -> bool:
    """Whether calls of a player cost money; an unknown price counts as paid."""
    return settings.player_kind.is_paid(settings, lambda: load_prices(config.prices))


def pays(config: RolesConfig) -> bool:
    """Whether any player's calls cost money."""
    return any(is_paid(config, who) for _, who in config.served())


def cost_words(plan: Plan) -> str:
    """`about $0.42 ($0.31 to $0.62 if …)`, and the players without a known price."""
    strangers = sorted({one.name for one in plan.asked if one.paid and one.cost is None})
    if plan.cost is None:
        return f"unknown: no price for {', '.join(strangers)}"
    beside = f", without {', '.join(strangers)} (no known price)" if strangers else ""
    return f"about {dollars(plan.cost)}{range_words(plan)}{beside}"


def range_words(plan: Plan) -> str:
    """The range of the cost and what it rests on, in brackets; empty without a range."""
    ends, pilot = plan.cost_range, plan.pilot
    shown = " to ".join(dollars(end) for end in ends) if ends else ""
    if pilot is not None:
        basis = f"from {counted(pilot.rows, 'played row')}"
        return f" (95 % interval {shown}, {basis})" if shown else f" ({basis}, without interval)"
    return f" ({shown} if replies are half to twice as long as assumed)" if shown else ""


def confirm_cost(
    plan: Plan, config: RolesConfig, reporter: Reporter, what: str = "this run"
) -> None:
    """Report the cost of `what` and ask for confirmation; CostUnconfirmed without it. Does nothing
    for a plan without paid calls."""
    if not plan.paid:
        return
    batched = sorted({who.written() for role, who in config.served() if config.by_batch(role, who)})
    through = f" (batch calls at a lower price: {', '.join(batched)})" if batched else ""
    reporter.note(f"cost of {what}: {cost_words(plan)}{through}")
    if config.yes or config.max_cost is not None:
        return
    agreed = reporter.confirm("Continue?")
    if agreed:
        return
    if agreed is not None:
        raise CostUnconfirmed(
            "The cost was not confirmed.",
            "No calls were made and no files were written.",
            "Use --yes, set a limit with --max-cost DOLLARS, or see the details with soul plan.",
        )
    raise CostUnconfirmed(
        f"This run would cost money ({cost_words(plan)}), and the cost is not confirmed.",
        "soul asks for confirmation only on a terminal.",
        "Confirm with --yes, or set a limit with --max-cost DOLLARS. If the server is your own, "
        "set price_in and price_out to 0 in the endpoints file.",
    )
