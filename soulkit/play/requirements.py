"""Missing requirements of a run (settings, tasks, rows, players, keys, model), and `--playable`.

The preparation of a run collects all missing requirements. A single one raises its own error;
several are combined into one error that also gives the cost of the run. `--playable` skips the
tasks of a suite that cannot run here and lists the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from soulkit.data.privacy.finders import refuse_private, strings_in
from soulkit.errors import ConfigError, DataError, ModelLoadError, UserError
from soulkit.models.api.addresses import read_key, wants_key
from soulkit.models.base import unfilled
from soulkit.models.local.loading import ModelPlace, hub_cache, model_place
from soulkit.models.players.config import RolesConfig
from soulkit.models.vllm.settings import interpreter, no_vllm, vllm_version
from soulkit.play.default_players import called_roles, with_default_players
from soulkit.play.plan import Plan, Work, cost_words
from soulkit.play.settings import PlayConfig, chosen_rows
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import (
    STAND_IN,
    LoadedExamples,
    NoRows,
    examples_to_play,
    stand_ins,
)
from soulkit.tasks.kit.made_rows import Split
from soulkit.tasks.kit.registry import NotForTraining, Registry
from soulkit.text import join_and

RequirementKind = Literal[
    "unnamed", "tasks", "rows", "services", "players", "keys", "model", "engine"
]
WORDS: dict[RequirementKind, str] = {
    "unnamed": "no",
    "tasks": "no code to play",
    "rows": "no rows for",
    "services": "incomplete setup for",
    "players": "no player for",
    "keys": "no key in",
    "model": "no model",
    "engine": "no vLLM for",
}
"""Text before the missing names, in the order of the error message."""
MANY, FEW = 5, 3
"""If more than MANY tasks have no rows, only the first FEW are named."""
PULL = "soul data pull"
NO_COACH_KEY = "To get feedback from the task's rules without a key, use --coach symbolic"


@dataclass(frozen=True, slots=True)
class MissingRequirement:
    """One missing requirement."""

    kind: RequirementKind
    name: str
    """Short name of the missing thing."""
    way: str
    """The fix. For rows, `{names}` stands for all tasks with the same fix and `{task}` for one."""
    error: UserError
    """The error to raise if nothing else is missing; several requirements may share one."""
    fatal: bool = True
    """Whether the run cannot start; if not, it is only mentioned next to fatal ones."""

    def way_for(self, names: Sequence[str]) -> str:
        """The fix for all requirements with these names."""
        if self.kind != "rows":
            return self.way
        return self.way.format(names=",".join(names), task=names[0] if len(names) == 1 else "TASK")


class RequirementsNotMet(ConfigError):
    """Several requirements are missing."""

    gaps: tuple[MissingRequirement, ...] = ()


def refuse_missing(
    gaps: Sequence[MissingRequirement], plan: Callable[[], Plan | None], suite: str | None = None
) -> None:
    """Raise an error for fatal requirements in `gaps`, if any. `plan` makes the plan of the rest;
    `suite` is the suite of the tasks, if any."""
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
    partly = " for the tasks with rows" if names["rows"] or names["tasks"] else ""
    asked = whole is None and names["keys"] and names["rows"]
    unknown = "Cost unknown without rows. " if asked else ""
    head = f"Cost {cost}{partly}. " if cost else unknown
    error = RequirementsNotMet(
        f"{head}{len(gaps)} requirements are not met: {'; '.join(parts)}.",
        "Fix these first; nothing has been run yet.",
        f"{'; '.join(_ways(gaps, suite))}.",
    )
    error.gaps = tuple(gaps)
    raise error


def _listed(kind: RequirementKind, names: Sequence[str]) -> str:
    """All names; for many tasks without rows, the first ones and a count."""
    if kind != "rows" or len(names) <= MANY:
        return ", ".join(names)
    return f"{', '.join(names[:FEW])} and {len(names) - FEW} more"


def _ways(gaps: Sequence[MissingRequirement], suite: str | None) -> list[str]:
    """The distinct fixes; many tasks of a suite share one download command."""
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


def refuse_private_rows(work: Iterable[Work], config: RolesConfig) -> None:
    """ConfigError if rows from the user's own chats contain private data and a player runs on
    another machine. Rows of released files and generated rows have no origin and are not read."""
    own = [dict(row.fields) for part in work for row in part.examples if row.origin]
    if own and (players := config.elsewhere()):
        refuse_private(strings_in(own), join_and(players), config.allow_private)


def missing_roles(work: Iterable[Work], config: RolesConfig) -> list[MissingRequirement]:
    """Roles that an episode may call but no player fills."""
    return [
        MissingRequirement("players", f"{role} in {part.task.name}",
            f"choose a player for {role}: --{role} endpoint:MODEL@URL",
            unfilled(role, part.task.name))
        for part in work
        for role in sorted(called_roles(part) - config.filled(part.task.name))
    ]  # fmt: skip


def missing_services(work: Iterable[Work]) -> list[MissingRequirement]:
    """Tasks that lack something other than a model, such as a service or a file."""
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
    """Unset environment variables for the API keys of remote servers."""
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
            flags = " ".join(f"--{role} PLAYER" for role in roles if role != "actor")
            error.way_out += f" Or choose other players: {flags}." if flags else ""
            error.way_out += f" {NO_COACH_KEY}." if "coach" in roles else ""
            way = f"export {name}=KEY" + (f". {NO_COACH_KEY}" if set(roles) == {"coach"} else "")
            gaps.append(MissingRequirement("keys", f"{name} ({users})", way, error))
    return gaps


def missing_model(model: str, adapter: str | None = None) -> list[MissingRequirement]:
    """Missing model or adapter folders (fatal), or a Hub model that is not on this machine (not
    fatal, because loading downloads it)."""
    gaps = _missing_folder(model) + ([] if adapter is None else _missing_folder(adapter, "adapter"))
    if gaps:
        return gaps
    place = model_place(model)
    remote = place.on_hub and "/" in place.where and not _in_cache(place.where)
    return [_to_download(place)] if remote else []


def missing_checkpoints(config: RolesConfig) -> list[MissingRequirement]:
    """Missing folders of local players."""
    return [gap for name in config.checkpoints() for gap in _missing_folder(name)]


def missing_engine(config: RolesConfig, *, actor: bool = False) -> list[MissingRequirement]:
    """vLLM, if players or the `actor` need it and it is not installed."""
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
        way = f"replace the {what} {name}: use an existing folder or a Hub id (owner/name)"
        return [MissingRequirement("model", name, way, error)]
    return []


def _to_download(place: ModelPlace) -> MissingRequirement:
    revision = f" --revision {place.revision}" if place.revision else ""
    command = f"hf download {place.where}{revision}"
    error = ModelLoadError(
        f"The model '{place}' is not on this machine.",
        "It has to be downloaded first.",
        f"Run: {command}",
    )
    way = f"download the model: {command}"
    return MissingRequirement("model", f"{place} on this machine", way, error, fatal=False)


def _in_cache(model: str) -> bool:
    return (hub_cache().expanduser() / f"models--{model.replace('/', '--')}").is_dir()


def unplayable_tasks(
    registry: Registry, names: Sequence[str], suite: str | None
) -> list[MissingRequirement]:
    """Tasks that have rows but no code to play them."""
    try:
        registry.refuse_rows_only(names, suite)
    except ConfigError as error:
        way = "leave out these tasks" + (": --playable" if suite is not None else "")
        return [
            MissingRequirement("tasks", name, way, error)
            for name in names
            if registry.spec(name).rows_only
        ]
    return []


LoadRows = Callable[[Task], Work]
"""Loads the rows of a task; DataError if it has none."""


def split_playable(
    tasks: Mapping[str, Task], config: PlayConfig, registry: Registry, load: LoadRows,
    *, coached: bool = False, asking: bool = True,
) -> tuple[list[Work], dict[str, str]]:  # fmt: skip
    """The playable work, and task → reason for each task that cannot be played, in the order of
    `tasks`.

    `coached`: feedback is needed. Without `asking` no player is needed. DataError if the rows that
    --data names for one task are unusable.
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
    """ConfigError if no task of the suite can be played."""
    if work:
        return
    words = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise ConfigError(
        f"No task of the suite '{config.suite}' can be played here.",
        words + ("" if words.endswith(".") else "."),
        "Set rows with --data and players with --judge and --partner; see: soul tasks list",
    )


def left_out_lines(suite: str | None, reasons: Mapping[str, str]) -> list[str]:
    """A line for every task that is left out."""
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
        return "it is for evaluation only"
    except DataError as error:
        if task.name in config.data:
            raise
        return error.what.rstrip(".")
    return (_missing_player(work, config, registry, coached=coached) if asking else "") or work


def _missing_player(work: Work, config: PlayConfig, registry: Registry, *, coached: bool) -> str:
    """The missing player or API key of a task; empty if none is missing."""
    seats = with_default_players(config, [work], registry, coached=coached, suite=config.suite)
    if unfilled_roles := sorted(work.roles - seats.filled(work.task.name)):
        return f"no model plays the {' and the '.join(unfilled_roles)}"
    # A missing key of the user's own players is an error; of the task's players, a reason to skip.
    named = {gap.name for gap in missing_keys(config)}
    keys = [gap for gap in missing_keys(seats) if gap.name not in named and not config.planned]
    ways = [NO_COACH_KEY for gap in keys if NO_COACH_KEY in gap.way]
    parts = [f"no key in {', '.join(gap.name for gap in keys)}", *dict.fromkeys(ways)]
    return ". ".join(parts) if keys else ""


def rows_to_play(task: Task, config: PlayConfig, split: Split) -> LoadedExamples:
    """The rows that the settings choose from --data or the released files; DataError if there are
    none. In a plan, generated rows in the published number stand for files that are not here."""
    source = config.rows_source(task.name)
    try:
        loaded = examples_to_play(task, source, split=split, limit=config.limit, seed=config.seed)
    except NoRows:
        named = source or config.where or config.example
        published = stand_ins(task, split, config.limit) if config.planned and not named else ()
        if not published:
            raise
        return LoadedExamples(examples=published)
    return replace(loaded, examples=chosen_rows(loaded.examples, config, task.name))


def planned_lines(config: PlayConfig, work: Iterable[Work], split: Split) -> list[str]:
    """In a plan, lines about rows that are not here, and about what --playable would skip."""
    if not config.planned:
        return []
    names = [w.task.name for w in work if any(e.source == STAND_IN for e in w.examples)]
    lines = []
    if names:
        which = f"--suite {config.suite}" if config.suite else f"--task {','.join(names)}"
        place = f"--split {'train' if split == 'train' else 'eval'}"
        lines.append(
            f"counted with the published sizes: the rows of {_listed('rows', names)} are not "
            f"downloaded; get them with: {PULL} {which} {place}"
        )
    keys = [gap.name.partition(" (")[0] for gap in missing_keys(config)]
    missing = ["rows"] * bool(names) + [f"a key in {key}" for key in keys]
    if config.playable and missing:
        lines.append(f"the run itself skips the tasks without {' or without '.join(missing)}")
    return lines
