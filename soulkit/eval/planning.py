"""The plan of an evaluation: calls, tokens and cost of all players, and memory on this machine.

Nothing is loaded or called. `soul plan eval …` and `--dry-run` print the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from soulkit.eval.config import EvalConfig
from soulkit.eval.run.actor import starts_servers
from soulkit.models.local.footprint import (
    Machine,
    device_memory,
    device_speed,
    footprint,
    together,
)
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.settings import PANELS, RoleSettings
from soulkit.play.engine import BLIND_READS, ControlJob, control_jobs
from soulkit.play.plan import (
    CONTROLS,
    Load,
    Plan,
    PlayerLoad,
    PlayerTerms,
    Work,
    is_paid,
    plan_loads,
    prices_of,
)
from soulkit.types import MAX_TOKENS

EACH = {"coach": 1, "blind_reader": BLIND_READS}
"""Calls per draft that gets feedback."""
SERVER = Machine(memory=0, seconds=0.0, words="a vLLM server needs more than its model: "
                 "90 % of a GPU, or several GB of RAM, and a minute or more to start")  # fmt: skip
"""Note in the estimate of a run that starts a vLLM server."""


def evaluation_plan(
    config: EvalConfig, work: Sequence[Work], controls: Sequence[ControlJob] | None = None,
    label: str = "",
) -> Plan:  # fmt: skip
    """The plan of `config`. `controls` defaults to all controls of `work`. `label` is added to the
    task names."""
    if controls is None:
        controls = [job for part in work for job in control_jobs(part, config.repeats)]

    def players(part: Work, coached: bool = False) -> list[PlayerTerms]:
        return planned_players(config, part, _actor(config, part), coached=coached)

    loads = [Load(work, players, label, config.repeats)]
    if config.refine:
        refined = partial(players, coached=True)
        loads.append(Load(work, refined, "refined", config.repeats * config.refine))
    by_task: dict[str, list[ControlJob]] = {}
    for job in controls:
        by_task.setdefault(job.task.name, []).append(job)
    for jobs in by_task.values():
        parts = [(job.control, job.example) for job in jobs]
        name = f"{CONTROLS} {label}".rstrip()
        loads.append(Load([Work(jobs[0].task, ())], players, name, controls=parts))
    whole = plan_loads(loads, concurrency=config.concurrency)
    return replace(whole, machine=_with_fit(config, together(_machines(config, whole))))


def _with_fit(config: EvalConfig, machine: Machine | None) -> Machine | None:
    if machine is None or not machine.memory or starts_servers(config):
        return machine
    free, where = device_memory(config.device)  # imports torch
    if free is None:
        return machine
    way = "--quantize nf4, a lower --batch-size or a smaller model"
    fits = f"fits {where}" if machine.memory <= free else f"does not fit {where}: {way}"
    return replace(machine, fit=fits)


def planned_players(
    config: RolesConfig, work: Work, actor: PlayerTerms, *, coached: bool
) -> list[PlayerTerms]:
    """The actor and the other players of a task; with `coached` also those of its feedback."""
    players = [actor]
    for role, who in config.players_in(work.task.name):
        player = voice_of(config, role, who, actor)
        if role not in EACH:
            players.append(player)
        elif coached:
            players.append(replace(player, each=EACH[role]))
    return players


def voice_of(
    config: RolesConfig, role: str, settings: RoleSettings, actor: PlayerTerms
) -> PlayerTerms:
    """The terms of a player other than the actor, for the plan; prices only if they are known."""
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
    endpoint = next((who for role, who in config.served() if role == "actor"), None)
    return PlayerTerms(
        role="actor",
        name=config.model,
        limit=config.sampling(work.task.spec).max_tokens,
        prices=prices_of(config, endpoint, "actor") if endpoint else None,
        served=endpoint is not None,
        paid=endpoint is not None and is_paid(config, endpoint),
        instructions=config.instructions,
    )


def _machines(config: EvalConfig, whole: Plan) -> list[Machine]:
    others = local_players(config, whole, config.batch_size, config.device, config.dtype)
    if config.kind != "local":
        return others
    if starts_servers(config) and SERVER not in others:
        others.append(SERVER)
    parts = [one for one in whole.asked if "actor" in (one.role, one.name)]
    actor = sampler(config.model, whole, parts, config.batch_size, config.device, config.dtype,
                    config.quantize)  # fmt: skip
    return [actor, *others]


def local_players(
    config: RolesConfig, whole: Plan, batch: int, device: str, dtype: str
) -> list[Machine]:
    """Memory and time of the local checkpoints other than the actor, each loaded once."""
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
    path: str, whole: Plan, parts: Sequence[PlayerLoad], batch: int, device: str, dtype: str,
    quantize: str = "none",
) -> Machine:  # fmt: skip
    """Memory and time that the checkpoint at `path` needs for these calls."""
    model = footprint(path)
    if model is None:
        return Machine(memory=0, seconds=0.0, words=f"{path} is not counted: its size is unknown")
    itemsize = model.number_bytes(dtype, device)
    longest = max((task.longest_context for task in whole.tasks), default=0)
    weights = model.weight_bytes(itemsize, quantize)
    cache = model.cache_bytes(batch, longest, itemsize)
    free, _ = device_memory(device)
    if free is not None and device_speed(device)[0] == "cuda":  # batches shrink to half of it
        cache = min(cache, max(0, free - weights) // 2)
    sizes = {"weights": weights, "sampler cache": cache}
    prompt, reply = sum(a.prompt_tokens for a in parts), sum(a.reply_tokens for a in parts)
    machine = model.on(device, sum(sizes.values()), prompt=prompt, reply=reply, batch=batch)
    return replace(machine, parts=sizes)


def judging_plan(config: RolesConfig, work: Sequence[Work], opinions: int) -> Plan:
    """The plan for judging recorded episodes of `work` again, `opinions` times by every judge of
    `config`; judges also act as auditors, and no other player is called."""
    actor = PlayerTerms(role="actor", name="", limit=MAX_TOKENS, served=False)
    judges = [
        replace(voice_of(config, role, who, actor), times=opinions, orders="both")
        for who in config.judge
        for role in PANELS
    ]
    load = Load(work, lambda _: [actor, *judges])
    whole = plan_loads([load], concurrency=config.concurrency)
    tasks = [replace(t, asked=tuple(a for a in t.asked if a.role in PANELS)) for t in whole.tasks]
    return replace(whole, tasks=tuple(tasks))
