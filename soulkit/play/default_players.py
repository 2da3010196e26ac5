"""Who sits where: a role that a task asks for gets the player named for it, else the task's own.

    named for the task ▶ in the endpoints file for the task ▶ named for all tasks ▶ tasks.yaml

* tasks.yaml may name other players for training, and others for `--protocol reference`.
* A judge that a user names also audits, and coaches where training asks for feedback, unless
  somebody is named for that as well: nobody needs a second key for what was not asked for.
* On a judged task the coach is by default the judge's model: what it says about a draft is what
  the judge holds against it. Elsewhere it is the model that tasks.yaml names, or the task's rules.

What comes out is part of the settings: a run folder says who played, and a resumed run keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.players.settings import RoleSettings, TaskPlayers, players_in_tasks
from soulkit.play.plan import Work
from soulkit.play.settings import PlayConfig
from soulkit.tasks.kit.registry import Registry
from soulkit.tasks.kit.spec import DefaultPlayer
from soulkit.types import Role

Config = TypeVar("Config", bound=PlayConfig)
PAPER_COACH = "gpt-5-nano"
"""The model that gives all feedback in the Ditto paper (§5)."""
DECLARED_ROLES: tuple[Role, ...] = ("judge", "auditor", "partner", "environment")
"""Roles that a task's declaration may fill, whichever players they have elsewhere."""


def with_default_players(
    config: Config, work: Sequence[Work], registry: Registry, *, coached: bool = False,
    suite: str | None = None,
) -> Config:  # fmt: skip
    """`config` with somebody in every role that its tasks ask for, as far as anybody is named.

    `coached` says whether feedback is asked for. ConfigError for players of a task that nobody
    plays here; of `suite` some may be left out. Seating twice changes nothing.
    """
    file = players_in_tasks(config.endpoints)
    members = registry.suite(suite) if suite is not None else ()
    _check_names(config, [*(part.task.name for part in work), *members], file, registry)
    seats = {part.task.name: _players_of_task(config, part, file, coached=coached) for part in work}
    rules: dict[str, Any] = {}
    if "coach" in config.roles() and not config.named("coach"):
        coaches = (registry.spec(name).players.coach for name in members)
        if coached and any(isinstance(one, DefaultPlayer) for one in coaches):
            # Rules for all would be named for those that are left out as well.
            rules_alone = {"coach": "symbolic"}
            seats = {
                task: own if own.coach else own.model_copy(update=rules_alone)
                for task, own in seats.items()
            }
        else:
            rules = {"coach": "symbolic"}
    own_players = {task: own for task, own in seats.items() if any(dict(own).values())}
    return config.model_copy(update={"task_players": own_players, **rules})


def training_player_remarks(
    config: PlayConfig, work: Sequence[Work], registry: Registry
) -> list[str]:
    """A line for each default player in training that differs from evaluation's.

    `config` is seated; a role that the user fills has no line.
    """
    lines = []
    for part in work:
        task = part.task
        for role in sorted(called_roles(part) & set(DECLARED_ROLES)):
            here = task.spec.players.under(task.protocol, role)
            there = registry.spec(task.name).players.under(task.protocol, role)
            default = config.named(role, task.name) == _default(part, role).get(role)
            if default and there and here != there:
                lines.append(
                    f"{task.name}: the {role} is {here} in training and {there} in evaluation, so "
                    "scores of the two do not compare"
                )
    return lines


def coach_remarks(config: PlayConfig, work: Sequence[Work]) -> list[str]:
    """Where rules stand in for the paper's model, and which tasks have no feedback: a line each.

    `config` is not seated yet: what the user names has no line.
    """
    rules, without = [], []
    named_in_file = players_in_tasks(config.endpoints)
    for part in work:
        task = part.task
        in_file = named_in_file.get(task.name, TaskPlayers()).named("coach")
        default = _default(part, "coach").get("coach")
        if in_file or config.named("coach", task.name):
            continue
        rules += [task.name] if default == "symbolic" and task.protocol == "paper" else []
        without += [task.name] if default == "none" else []
    lines = []
    if rules:
        lines.append(
            f"{', '.join(rules)}: rules write the feedback and stand in for the paper's model "
            f"(--coach endpoint:{PAPER_COACH} asks that)"
        )
    if without:
        lines.append(
            f"{', '.join(without)}: no feedback under protocol reference, so no refined rollouts "
            "(--coach symbolic gives some)"
        )
    return lines


def called_roles(part: Work) -> frozenset[Role]:
    """The roles that episodes of a task may call: of its rows, else as the declaration has it."""
    if part.examples:
        return part.roles
    spec, protocol = part.task.spec, part.task.protocol
    offered = {role for role in DECLARED_ROLES if spec.players.under(protocol, role)}
    return frozenset(spec.seats.values()) | offered


def _players_of_task(
    config: PlayConfig, part: Work, file: Mapping[str, TaskPlayers], *, coached: bool
) -> TaskPlayers:
    task = part.task.name
    alone = [config.task_players.get(task, TaskPlayers()), file.get(task, TaskPlayers())]
    chosen: dict[str, Any] = {}
    for role in config.roles():
        player = next((who for one in alone if (who := one.named(role))), None)
        if player is not None:
            chosen[role] = player
    judge_named = bool(chosen.get("judge") or config.named("judge"))
    for role in DECLARED_ROLES:
        spared = role == "auditor" and judge_named
        if role in called_roles(part) and not (chosen.get(role) or config.named(role) or spared):
            chosen |= _default(part, role)
    if coached and not (chosen.get("coach") or config.named("coach")):
        chosen |= _coach(config, part, chosen, judge_named=judge_named)
    return TaskPlayers.model_construct(**{**dict(TaskPlayers()), **chosen})


def _default(part: Work, role: str) -> dict[str, Any]:
    default = part.task.spec.players.under(part.task.protocol, role)
    if not isinstance(default, DefaultPlayer):
        return {role: default} if default else {}
    player = RoleSettings(model=default.model, reasoning_effort=default.effort or None)
    return {role: (player,) if role in ("judge", "auditor") else player}


def _coach(
    config: PlayConfig, part: Work, chosen: Mapping[str, Any], *, judge_named: bool
) -> dict[str, Any]:
    """The coach where none is named: the task's own, else the model of its judge."""
    own = _default(part, "coach")
    judges = chosen.get("judge") or config.named("judge")
    judged = "judge" in called_roles(part) and bool(judges)
    default = own.get("coach")
    if default == "none" or (own and not judge_named):
        return own if judged or default != "symbolic" else {}
    if not judged and (default in (None, "symbolic") or not judges):
        return {}
    # A judge's temperature and length are a judge's.
    return {"coach": judges[0].model_copy(update={"temperature": None, "max_tokens": None})}


def _check_names(
    config: PlayConfig, names: Sequence[str], file: Mapping[str, TaskPlayers], registry: Registry
) -> None:
    """One endpoints file serves many commands: what it says of other tasks is no mistake."""
    for task in config.task_players:
        if task not in names:
            raise ConfigError(
                f"Players are named for the task '{task}', which is not played here.",
                "Nobody would ever ask them.",
                did_you_mean(task, names),
            )
    for task in file:
        registry.spec(task)
