"""Default players: each role of a task gets the player that the user named, else the task's own.

    named for the task ▶ in the endpoints file for the task ▶ named for all tasks ▶ tasks.yaml

* tasks.yaml can name different players for training and for `--protocol reference`.
* A judge that the user names is also the auditor and, if training needs feedback, the coach, unless
  the user names these. So one API key is enough.
* On judged tasks the default coach is the judge's model, so that feedback follows the judge's
  criteria. On other tasks it is the model in tasks.yaml, or the task's rules. `coach: judge` asks
  for the judge's model, also where tasks.yaml names another one.

The result is part of the settings: the run folder records the players, and a resumed run keeps
them."""

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
"""The coach in the Ditto paper (§5)."""
DECLARED_ROLES: tuple[Role, ...] = ("judge", "auditor", "partner", "environment")
"""Roles that tasks.yaml can fill."""


def with_default_players(
    config: Config, work: Sequence[Work], registry: Registry, *, coached: bool = False,
    suite: str | None = None,
) -> Config:  # fmt: skip
    """`config` with the default players of its tasks filled in; roles without a default stay empty.

    `coached`: feedback is needed. ConfigError for players of a task that is not played here, unless
    it is a task of `suite`. Calling this twice changes nothing.
    """
    file = players_in_tasks(config.endpoints)
    members = registry.suite(suite) if suite is not None else ()
    _check_names(config, [*(part.task.name for part in work), *members], file, registry)
    seats = {part.task.name: _players_of_task(config, part, file, coached=coached) for part in work}
    rules: dict[str, Any] = {}
    if "coach" in config.roles() and not config.named("coach"):
        coaches = (registry.spec(name).players.coach for name in members)
        if coached and any(isinstance(one, DefaultPlayer) for one in coaches):
            # Set rules per task, so that tasks that are left out keep their own coach.
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
    """A line for each default player of training that differs from that of evaluation.

    `config` includes default players; roles that the user filled have no line.
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
                    "their scores are not comparable"
                )
    return lines


def coach_remarks(config: PlayConfig, work: Sequence[Work]) -> list[str]:
    """Lines for tasks that get feedback from rules instead of the paper's model, and for tasks
    without feedback.

    `config` does not include default players yet; coaches that the user named have no line.
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
            f"{', '.join(rules)}: feedback is written by rules instead of the paper's model; to "
            f"use that model: --coach endpoint:{PAPER_COACH}"
        )
    if without:
        lines.append(
            f"{', '.join(without)}: no feedback under protocol reference, so no refined rollouts; "
            "to get feedback from rules: --coach symbolic"
        )
    return lines


def called_roles(part: Work) -> frozenset[Role]:
    """The roles that episodes of a task may call, from its rows or, without rows, as declared."""
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
    coach = chosen.get("coach") or config.named("coach")
    if coached and not coach:
        chosen |= _coach(config, part, chosen, judge_named=judge_named)
    if coached and coach in ("judge", "raw"):
        judges = _judges(config, part, chosen)
        if not judges:
            raise ConfigError(
                f"The coach of {task} is set to '{coach}', but {task} has no judge.",
                "Its feedback would come from the judge.",
                f"Name another coach, such as --coach {task}=symbolic, or leave out the task.",
            )
        chosen |= _as_coach(judges[0]) if coach == "judge" else {}
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
    """The default coach: the task's own, else the model of its judge; none for a task whose only
    coach is its rules."""
    own = _default(part, "coach")
    judges = chosen.get("judge") or config.named("judge")
    judged = bool(_judges(config, part, chosen))
    if part.task.spec.feedback.coaches == ("symbolic",):
        return {}
    default = own.get("coach")
    if default == "none" or (own and not judge_named):
        return own if judged or default != "symbolic" else {}
    if not judged and (default in (None, "symbolic") or not judges):
        return {}
    return _as_coach(judges[0])


def _judges(config: PlayConfig, part: Work, chosen: Mapping[str, Any]) -> Sequence[RoleSettings]:
    """The judges that the task asks; empty for a task without a judge."""
    judges = chosen.get("judge") or config.named("judge") or ()
    return judges if "judge" in called_roles(part) else ()


def _as_coach(judge: RoleSettings) -> dict[str, Any]:
    # The judge's temperature and reply limit do not apply to the coach.
    return {"coach": judge.model_copy(update={"temperature": None, "max_tokens": None})}


def _check_names(
    config: PlayConfig, names: Sequence[str], file: Mapping[str, TaskPlayers], registry: Registry
) -> None:
    """ConfigError for players of tasks not played here; an endpoints file may name any task."""
    for task in config.task_players:
        if task not in names:
            raise ConfigError(
                f"Players are set for the task '{task}', but that task is not selected.",
                "These players would never be used.",
                did_you_mean(task, names),
            )
    for task in file:
        registry.spec(task)
