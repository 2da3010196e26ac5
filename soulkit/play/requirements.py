"""What a run lacks, in one error: settings, tasks, rows, players, keys, model; and `--playable`.

The preparation of a run collects missing requirements instead of stopping at the first. A single
one keeps its own error; several become one, with what the run would cost in front. `--playable`
leaves out the tasks of a suite that cannot be played here, and says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from soulkit.errors import ConfigError, DataError, ModelLoadError, UserError
from soulkit.models.api.addresses import read_key, wants_key
from soulkit.models.base import unfilled
from soulkit.models.local.loading import ModelPlace, hub_cache, model_place
from soulkit.models.players.config import RolesConfig
from soulkit.models.vllm.settings import interpreter, no_vllm, vllm_version
from soulkit.play.default_players import called_roles, with_default_players
from soulkit.play.plan import Plan, Work, cost_words
from soulkit.play.settings import PlayConfig
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.registry import NotForTraining, Registry

RequirementKind = Literal[
    "unnamed", "tasks", "rows", "services", "players", "keys", "model", "engine"
]
WORDS: dict[RequirementKind, str] = {
    "unnamed": "no",
    "tasks": "no class that plays",
    "rows": "no rows of",
    "services": "what is needed beside models for",
    "players": "nobody as",
    "keys": "no key in",
    "model": "no model",
    "engine": "no vLLM for",
}
"""In the order in which they are told."""
MANY, FEW = 5, 3
"""More tasks without rows are not all named, but so many."""
PULL = "soul data pull"
NO_COACH_KEY = "With --coach symbolic the task's rules write the feedback, without a key"


@dataclass(frozen=True, slots=True)
class MissingRequirement:
    """One thing that is missing."""

    kind: RequirementKind
    name: str
    """What is missing, in a word or two."""
    way: str
    """How to get it. Of rows `{names}` stands for all tasks that get them in the same way, and
    `{task}` for one of them."""
    error: UserError
    """What is said where nothing else is missing; several gaps may share one."""
    fatal: bool = True
    """Whether the run cannot go on; else it is only told beside what is fatal."""

    def way_for(self, names: Sequence[str]) -> str:
        """The way, for the gaps of these names together."""
        if self.kind != "rows":
            return self.way
        return self.way.format(names=",".join(names), task=names[0] if len(names) == 1 else "TASK")


class RequirementsNotMet(ConfigError):
    """Several things are missing."""

    gaps: tuple[MissingRequirement, ...] = ()
    """Each of them."""


def refuse_missing(
    gaps: Sequence[MissingRequirement], plan: Callable[[], Plan | None], suite: str | None = None
) -> None:
    """Raise what is missing; nothing when nothing is. `plan` is that of what is there; `suite` is
    the one that the tasks are of, if any."""
    fatal = [gap for gap in gaps if gap.fatal]
    if not fatal:
        return
    whole = plan()
    cost = cost_words(whole) if whole is not None and whole.paid else ""
    if len({id(gap.error) for gap in gaps}) == 1:
        error = fatal[0].error
        if cost:
            error.what = f"Cost {cost}. {error.what}"
            error.args = (error.what,)
        raise error
    names = {kind: [gap.name for gap in gaps if gap.kind == kind] for kind in WORDS}
    parts = [f"{WORDS[kind]} {_listed(kind, some)}" for kind, some in names.items() if some]
    partly = " for what can be counted" if names["rows"] or names["tasks"] else ""
    unknown = "Cost unknown without rows. " if whole is None and names["keys"] else ""
    head = f"Cost {cost}{partly}. " if cost else unknown
    error = RequirementsNotMet(
        f"{head}{len(gaps)} things are missing: {'; '.join(parts)}.",
        "Nothing is asked, loaded or written before all of it is there.",
        f"{'; '.join(_ways(gaps, suite))}.",
    )
    error.gaps = tuple(gaps)
    raise error


def _listed(kind: RequirementKind, names: Sequence[str]) -> str:
    """All names, but of many tasks without rows the first ones and a count."""
    if kind != "rows" or len(names) <= MANY:
        return ", ".join(names)
    return f"{', '.join(names[:FEW])} and {len(names) - FEW} more"


def _ways(gaps: Sequence[MissingRequirement], suite: str | None) -> list[str]:
    """How to get what is missing, each way once; for many tasks of a suite one command."""
    alike = {gap.way: [one.name for one in gaps if one.way == gap.way] for gap in gaps}
    pulled = [gap for gap in gaps if gap.kind == "rows" and PULL in gap.way]
    whole = len(pulled) > MANY and suite is not None
    ways = []
    for gap in gaps:
        if whole and gap in pulled:
            command = gap.way[gap.way.index(PULL) :].partition(", or ")[0]
            command = command.replace("--task {names}", f"--suite {suite}").format(task="TASK")
            ways.append(f"download the rows: {command}; other ways: soul tasks show TASK")
        else:
            ways.append(gap.way_for(alike[gap.way]))
    return list(dict.fromkeys(ways))


def missing_roles(work: Iterable[Work], config: RolesConfig) -> list[MissingRequirement]:
    """Roles that an episode may call and that no player fills."""
    return [
        MissingRequirement("players", f"{role} in {part.task.name}",
            f"name a {role}: --{role} endpoint:MODEL@URL",
            unfilled(role, part.task.name))
        for part in work
        for role in sorted(called_roles(part) - config.filled(part.task.name))
    ]  # fmt: skip


def missing_services(work: Iterable[Work]) -> list[MissingRequirement]:
    """Tasks that lack something beside models: a service that answers, a file of an option."""
    gaps = []
    for part in work:
        try:
            part.task.check_ready(part.examples)
        except UserError as error:
            gaps.append(
                MissingRequirement("services", part.task.name, error.way_out.rstrip("."), error)
            )
    return gaps


def missing_keys(config: RolesConfig) -> list[MissingRequirement]:
    """Variables without the key that a server off this machine wants."""
    wanted_by: dict[str, list[str]] = {}
    for role, who in config.served():
        if wants_key(who.base_url, who.headers) and not os.environ.get(who.api_key_env):
            wanted_by.setdefault(who.api_key_env, []).append(f"{role} {who.model}")
    gaps = []
    for name, players in wanted_by.items():
        users = ", ".join(dict.fromkeys(players))
        try:
            read_key(name, optional=False, what=f"The key for {users}")
        except ModelLoadError as error:
            roles = dict.fromkeys(one.partition(" ")[0] for one in players)
            flags = " ".join(f"--{role} WHO" for role in roles if role != "actor")
            error.way_out += f" Or name other players: {flags}." if flags else ""
            error.way_out += f" {NO_COACH_KEY}." if "coach" in roles else ""
            way = f"export {name}=KEY" + (f". {NO_COACH_KEY}" if set(roles) == {"coach"} else "")
            gaps.append(MissingRequirement("keys", f"{name} ({users})", way, error))
    return gaps


def missing_model(model: str, adapter: str | None = None) -> list[MissingRequirement]:
    """Folders that are not there, which is fatal, and a model of the hub that is not on this
    machine: told beside what is fatal, since loading it downloads it."""
    gaps = _missing_folder(model) + ([] if adapter is None else _missing_folder(adapter, "adapter"))
    if gaps:
        return gaps
    place = model_place(model)
    remote = place.on_hub and "/" in place.where and not _in_cache(place.where)
    return [_to_download(place)] if remote else []


def missing_checkpoints(config: RolesConfig) -> list[MissingRequirement]:
    """Folders of players on this machine that are not there."""
    return [gap for name in config.checkpoints() for gap in _missing_folder(name)]


def missing_engine(config: RolesConfig, *, actor: bool = False) -> list[MissingRequirement]:
    """vLLM, where it is to be started for players, or for the `actor`, and is not installed."""
    users = ["the actor"] if actor else []
    users += [f"{role} {who.model}" for role, who in config.players() if who.kind == "vllm"]
    python = interpreter(config.vllm_python)
    if not users or vllm_version(python) is not None:
        return []
    error = no_vllm(python, attachable=actor)
    names = ", ".join(dict.fromkeys(users))
    return [MissingRequirement("engine", names, error.way_out.rstrip("."), error)]


def _missing_folder(name: str, what: str = "model") -> list[MissingRequirement]:
    try:
        model_place(name, what)
    except ModelLoadError as error:
        way = f"name another {what} than {name}: a folder that is there, or owner/name"
        return [MissingRequirement("model", name, way, error)]
    return []


def _to_download(place: ModelPlace) -> MissingRequirement:
    revision = f" --revision {place.revision}" if place.revision else ""
    command = f"hf download {place.where}{revision}"
    error = ModelLoadError(
        f"The model '{place}' is not on this machine.",
        "It would be downloaded first.",
        f"Run: {command}",
    )
    way = f"download the model: {command}"
    return MissingRequirement("model", f"{place} on this machine", way, error, fatal=False)


def _in_cache(model: str) -> bool:
    return (hub_cache().expanduser() / f"models--{model.replace('/', '--')}").is_dir()


def unplayable_tasks(
    registry: Registry, names: Sequence[str], suite: str | None
) -> list[MissingRequirement]:
    """Tasks of which there are only rows."""
    try:
        registry.refuse_rows_only(names, suite)
    except ConfigError as error:
        way = "leave out what cannot be played" + (": --playable" if suite is not None else "")
        return [
            MissingRequirement("tasks", name, way, error)
            for name in names
            if registry.spec(name).rows_only
        ]
    return []


LoadRows = Callable[[Task], Work]
"""A task with its rows; DataError for one that has none."""


def split_playable(
    tasks: Mapping[str, Task], config: PlayConfig, registry: Registry, load: LoadRows,
    *, coached: bool = False, asking: bool = True,
) -> tuple[list[Work], dict[str, str]]:  # fmt: skip
    """(what can be played, task → why it cannot), in the order of `tasks`.

    `coached` says whether feedback is asked for; without `asking` no player is asked at all, and no
    player is missed. DataError when rows that were named for a very task are of no use.
    """
    tried = {
        name: _work_or_reason(task, config, registry, load, coached=coached, asking=asking)
        for name, task in tasks.items()
    }
    work = [one for one in tried.values() if not isinstance(one, str)]
    return work, {name: why for name, why in tried.items() if isinstance(why, str)}


def refuse_empty_suite(
    config: PlayConfig, work: Sequence[Work], reasons: Mapping[str, str]
) -> None:
    """ConfigError when nothing of the suite is left."""
    if work:
        return
    words = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise ConfigError(
        f"Of the suite '{config.suite}' nothing can be played here.",
        words + ("" if words.endswith(".") else "."),
        "Name rows with --data and players with --judge and --partner; see: soul tasks list",
    )


def left_out_lines(suite: str | None, reasons: Mapping[str, str]) -> list[str]:
    """What is said aloud of every task that is left out."""
    return [f"left out of {suite}: {task}: {why}" for task, why in reasons.items()]


def _work_or_reason(
    task: Task, config: PlayConfig, registry: Registry, load: LoadRows, *, coached: bool,
    asking: bool,
) -> Work | str:  # fmt: skip
    if task.spec.rows_only:
        return "this version cannot play it"
    try:
        work = load(task)
    except NotForTraining:
        return "it may be measured with and not trained on"
    except DataError as error:
        if task.name in config.data:
            raise
        return error.what.rstrip(".")
    return (_missing_player(work, config, registry, coached=coached) if asking else "") or work


def _missing_player(work: Work, config: PlayConfig, registry: Registry, *, coached: bool) -> str:
    """Whose seat is empty, or whose key is not here; empty when everybody is there."""
    seats = with_default_players(config, [work], registry, coached=coached, suite=config.suite)
    if unfilled_roles := sorted(work.roles - seats.filled(work.task.name)):
        return f"nobody plays the {' and the '.join(unfilled_roles)}"
    # A key that the user's own players want is an error; one of the task's players leaves it out.
    named = {gap.name for gap in missing_keys(config)}
    keys = [gap for gap in missing_keys(seats) if gap.name not in named]
    ways = [NO_COACH_KEY for gap in keys if NO_COACH_KEY in gap.way]
    parts = [f"no key in {', '.join(gap.name for gap in keys)}", *dict.fromkeys(ways)]
    return ". ".join(parts) if keys else ""
