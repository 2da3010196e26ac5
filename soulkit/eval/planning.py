"""What an evaluation will ask for: the players with their limits and prices, and this machine.

Nothing is loaded or called. `soul plan eval …` and `--dry-run` print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from soulkit.eval.config import EvalConfig
from soulkit.eval.run.actor import starts_servers
from soulkit.judge.structured import QUESTION_ATTEMPTS
from soulkit.models.local.memory import Footprint, device_speed, footprint
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.play.costs import is_paid, prices_of
from soulkit.play.engine import ControlJob, control_jobs
from soulkit.play.plan import (
    AGAIN,
    TOKENS_PER_WORD,
    Machine,
    Plan,
    PlayerLoad,
    PlayerTerms,
    TaskPlan,
    Work,
    on_machine,
    plan_controls,
    plan_work,
)
from soulkit.tasks.kit.base import Task
from soulkit.types import MAX_TOKENS

SERVER = Machine(memory=0, seconds=0.0, words="a vLLM server takes more than its model: "
                 "of a GPU nine tenths, else gigabytes, and a minute or more to start")  # fmt: skip
"""What is said beside the estimate where one is started."""


def evaluation_plan(
    config: EvalConfig, work: Sequence[Work], controls: Sequence[ControlJob] | None = None
) -> Plan:
    """What `config` will ask for; `controls` are all that `work` has where nothing else is said."""
    voices = {w.task.name: _voices(config, w) for w in work}
    whole = plan_work(work, config.repeats, voices, concurrency=config.concurrency)
    if controls is None:
        controls = [job for part in work for job in control_jobs(part, config.repeats)]
    tasks = {job.task.name: job.task for job in controls}
    beside = [_controls_plan(config, task, controls) for task in tasks.values()]
    whole = replace(whole, tasks=(*whole.tasks, *beside))
    return on_machine(whole, together(_machines(config, whole)))


def _controls_plan(config: EvalConfig, task: Task, controls: Sequence[ControlJob]) -> TaskPlan:
    parts = [(job.control, job.example) for job in controls if job.task is task]
    return plan_controls(task, parts, _voices(config, Work(task, ())))


def _voices(config: EvalConfig, work: Work) -> list[PlayerTerms]:
    actor = _actor(config, work)
    named = config.players_in(work.task.name)
    return [actor, *(voice_of(config, role, who, actor) for role, who in named)]


def voice_of(
    config: RolesConfig, role: str, settings: RoleSettings, actor: PlayerTerms
) -> PlayerTerms:
    """A player that is named beside the actor, with its price where one is known."""
    samples = config.judge_samples if role in PANELS else None
    served, paid, prices = settings.player_kind.over_http, is_paid(config, settings), None
    if served:
        prices = prices_of(config, settings, role)
    elif settings.kind == "actor":
        served, paid, prices = actor.served, actor.paid, actor.prices
    return PlayerTerms(
        role=role,
        name=settings.written(),
        limit=settings.sampling(role, None).max_tokens,
        prices=prices,
        times=samples,
        orders=config.judge_order,
        served=served,
        paid=paid,
    )


def _actor(config: EvalConfig, work: Work) -> PlayerTerms:
    endpoint = config.endpoint() if config.kind == "api" else None
    return PlayerTerms(
        role="actor",
        name=config.model,
        limit=config.sampling(work.task.spec).max_tokens,
        prices=prices_of(config, endpoint, "actor") if endpoint else None,
        served=endpoint is not None,
        paid=endpoint is not None and is_paid(config, endpoint),
    )


def _machines(config: EvalConfig, whole: Plan) -> list[Machine]:
    """What every checkpoint takes that this command loads."""
    others = local_players(config, whole, config.batch_size, config.device, config.dtype)
    if config.kind != "local":
        return others
    if starts_servers(config) and SERVER not in others:
        others.append(SERVER)
    parts = [one for one in whole.asked if "actor" in (one.role, one.name)]
    actor = sampler(config.model, whole, parts, config.batch_size, config.device, config.dtype)
    return [actor, *others]


def local_players(
    config: RolesConfig, whole: Plan, batch: int, device: str, dtype: str
) -> list[Machine]:
    """What the checkpoints take that play beside the actor, each loaded once."""
    names = {
        who.written(): who.model for _, who in config.players() if who.player_kind.takes_memory
    }
    by_name = {name: [one for one in whole.asked if one.name == name] for name in names}
    machines = [sampler(names[name], whole, parts, batch, device, dtype)
                for name, parts in by_name.items() if parts]  # fmt: skip
    if any(name.startswith("vllm:") and parts for name, parts in by_name.items()):
        machines.append(SERVER)
    return machines


def sampler(
    path: str, whole: Plan, parts: Sequence[PlayerLoad], batch: int, device: str, dtype: str
) -> Machine:
    """What the checkpoint at `path` takes to say what it is asked for."""
    model = footprint(Path(path))
    if model is None:
        return Machine(memory=0, seconds=0.0, words=f"{path} is not counted: no checkpoint folder")
    kind, speed = device_speed(device)
    itemsize = number_bytes(dtype, kind, model)
    memory = model.parameters * itemsize + model.cache_bytes(batch, longest_of(whole), itemsize)
    prompts, replies = sum(a.prompt_tokens for a in parts), sum(a.reply_tokens for a in parts)
    seconds = model.seconds(prompts, replies, 0, batch, speed)
    return Machine(memory=round(memory), seconds=seconds, words=assumed(model, kind, speed.flops))


def together(machines: Sequence[Machine]) -> Machine | None:
    """All of them on one machine; None where nothing is known of any."""
    if not any(one.memory for one in machines):
        return None
    words = "; ".join(dict.fromkeys(one.words for one in machines))
    memory, seconds = sum(one.memory for one in machines), sum(one.seconds for one in machines)
    return Machine(memory=memory, seconds=seconds, words=words)


def longest_of(whole: Plan) -> int:
    """Tokens of the longest context of a plan."""
    return max((longest_tokens(t.longest_prompt, limit_of(whole, t.task)) for t in whole.tasks),
               default=0)  # fmt: skip


def limit_of(whole: Plan, task: str) -> int:
    """Tokens of all replies of one episode's actor, about: what its context grows by."""
    part = next(t for t in whole.tasks if t.task == task)
    spoken = [one for one in part.asked if one.role in ("actor", "partner", "environment")]
    return sum(one.reply_tokens for one in spoken) // max(part.episodes, 1)


def longest_tokens(words: int, replies: int) -> int:
    """Tokens of the longest context: its first prompt and what is said after it."""
    return round(words * TOKENS_PER_WORD) + replies


def number_bytes(dtype: str, kind: str, model: Footprint) -> int:
    """Bytes of one number of the loaded model: float32 on a CPU, else as the files have it."""
    named = {"float32": 4, "bfloat16": 2, "float16": 2}
    return named.get(dtype, 4 if kind == "cpu" else model.itemsize)


def assumed(model: Footprint, kind: str, flops: float) -> str:
    """What time and memory rest on, in words."""
    millions = model.parameters / 1e6
    count = f"{millions / 1e3:.1f} billion" if millions >= 1e3 else f"{millions:.1f} million"
    return (
        f"{count} parameters on {kind} at an assumed "
        f"{flops / 1e9:,.0f} GFLOP/s; right to a factor of two or three"
    )


def judging_plan(config: RolesConfig, work: Sequence[Work], opinions: int) -> Plan:
    """What it takes to have recorded episodes of `work` judged `opinions` times by every judge of
    `config`, who audits as well; no player is asked."""
    actor = PlayerTerms(role="actor", name="", limit=MAX_TOKENS, served=False)
    judges = [
        replace(voice_of(config, role, who, actor), times=opinions, orders="both")
        for who in config.judge
        for role in PANELS
    ]
    whole = plan_work(work, 1, {w.task.name: [actor, *judges] for w in work})
    tasks = [replace(t, asked=tuple(a for a in t.asked if a.role in PANELS)) for t in whole.tasks]
    return replace(whole, tasks=tuple(tasks), concurrency=config.concurrency)


def question_load(terms: PlayerTerms, prompts: Sequence[int]) -> PlayerLoad:
    """One player's questions, by the words of each prompt; at most each of them is put again, and
    answered at full length."""
    calls, tokens = len(prompts), round(sum(prompts) * TOKENS_PER_WORD)
    most = QUESTION_ATTEMPTS * tokens + (QUESTION_ATTEMPTS - 1) * calls * AGAIN
    prices = terms.prices

    def dollars(prompt: int, reply: int) -> float | None:
        return None if prices is None else (prices[0] * prompt + prices[1] * reply) / 1e6

    return PlayerLoad(
        role=terms.role, name=terms.name, paid=terms.paid, calls=calls, usual_calls=calls,
        prompt_tokens=tokens, reply_tokens=calls * terms.reply,
        cost=dollars(tokens, calls * terms.reply),
        cost_limit=dollars(most, QUESTION_ATTEMPTS * calls * terms.limit),
        seconds=float(calls) if terms.served else 0.0,
    )  # fmt: skip
