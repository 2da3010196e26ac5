"""Comparability: how the conditions of two runs differ, and whether they may be compared.

Runs with different protocols, prompts, judges, partners, environments, numbers of opinions or rows
measure different things, so their difference does not compare the models. Differences in the
actor's sampling, limits and word budgets, and in the code of a user's task, do not block a
comparison. They are listed as remarks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from soulkit.data.rows import row_id
from soulkit.eval.results.warnings import share_text
from soulkit.eval.run.provenance import (
    SAMPLING,
    actor_facts,
    panel_facts,
    player_facts,
    same_players,
)
from soulkit.models.players.settings import PANELS
from soulkit.models.vllm.settings import engine_words
from soulkit.play.settings import PlayConfig
from soulkit.runs.conditions import SCORING, Conditions, Facts, PlayerFacts, TaskFacts
from soulkit.runs.folder import CONFIG, plain_config, read_config
from soulkit.runs.jsonl import has_lines, read_object
from soulkit.runs.records import stream_records
from soulkit.types import Record

PROMPT = "system prompt of the model"
ROUNDS = "rounds with feedback (--refine)"
ACTOR = (*SAMPLING, "max_context", "quantize", "seed", "repeats", PROMPT, ROUNDS)
"""Settings of the actor. A difference is a remark and does not block a comparison."""
OPINIONS = {"samples": "judge samples", "combine": "judge combination", "orders": "judge order"}


# -- how a run was measured ------------------------------------------------------------------------


@dataclass(slots=True)
class Evidence:
    """Prompts, judges and examples of one task, collected from its episodes."""

    prompts: dict[str, set[str]] = field(default_factory=dict)
    """Template → its hashes."""
    judges: dict[str, set[str]] = field(default_factory=dict)
    """Question → the names of the judges that answered it."""
    ids: set[str] = field(default_factory=set)
    """The examples that were played."""

    def add(self, record: Record) -> None:
        """Add one episode."""
        score = record.score
        self.ids.add(record.example_id)
        for name, digest in score.prompts.items():
            self.prompts.setdefault(name, set()).add(digest)
        for verdict in score.verdicts:
            self.judges.setdefault(verdict.purpose, set()).add(verdict.judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The parts of a run that a comparison uses: conditions, settings, evidence from episodes."""

    folder: Path
    settings: Facts
    """`config.yaml`."""
    conditions: Conditions | None
    """None if the run recorded none; such a run cannot be compared."""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether the run is a training run."""
        material = self.conditions.material if self.conditions else None
        return material is not None or "method" in self.settings

    def shown(self, task: str) -> Evidence:
        """Evidence from the episodes of a task; empty if it has none."""
        return self.evidence.get(task, Evidence())

    def of_task(self, task: str) -> TaskFacts:
        """The recorded conditions of a task."""
        return self.conditions.of_task(task) if self.conditions else TaskFacts()

    def rows(self, task: str) -> Mapping[str, str]:
        """Example → hash of its row, including rows that were not played."""
        return self.of_task(task).rows

    def within(self, rows: Mapping[str, Container[str]], records: Iterable[Record]) -> Self:
        """A copy of the run that has only these rows (by task) and these episodes."""
        assert self.conditions is not None
        tasks = dict(self.conditions.tasks)
        for task, kept in rows.items():
            only = {id: digest for id, digest in self.rows(task).items() if id in kept}
            tasks[task] = replace(self.of_task(task), rows=only)
        conditions = replace(self.conditions, tasks=tasks)
        return replace(self, conditions=conditions, evidence=_evidence(records))

    def actor(self, task: str) -> dict[str, Any]:
        """Sampling settings of the actor in a task."""
        settings = {name: self.settings[name] for name in ACTOR if name in self.settings}
        prompt = (self.conditions.actor.system_prompt if self.conditions else "") or "none"
        rounds = self.settings.get("refine", 0)
        return {**settings, PROMPT: prompt, ROUNDS: rounds, **self.of_task(task).sampling}

    def dropped(self, task: str, role: str) -> list[Mapping[str, float]] | None:
        """Settings that servers rejected, for each affected player of a role: setting → share of
        the player's calls that were sent without it. None if the run is unfinished."""
        recorded = self.of_task(task).dropped_settings
        if recorded is None:
            return None
        return [shares for shares in recorded.get(role, {}).values() if shares]

    def players(self, task: str, role: str) -> list[PlayerFacts]:
        """The players of a role in a task. A model that the run trains gets the run's own path, so
        that it never equals a player of another run."""
        everybody = self.conditions.players if self.conditions else {}
        named = (self.of_task(task).players or everybody).get(role, ())
        here = str(self.folder.resolve())
        return [replace(one, path=here) if one.trained else one for one in named]

    def panel(self, task: str) -> dict[str, Any]:
        """Panel settings: how several opinions are combined. `samples` is a number, or a number per
        question if a task asks some questions more than once."""
        panel = dict(self.conditions.panel) if self.conditions else {}
        if panel.get("samples") is None:
            by_question = {q: n for q, n in self.of_task(task).samples.items() if n > 1}
            panel["samples"] = by_question or 1
        return panel


def read_measured(folder: Path, records: Iterable[Record] | None = None) -> MeasuredRun:
    """Read the run in `folder`. Prompts come from `records` if given, else from the summary, or
    from the episodes if the run is unfinished.

    RunError or DataError if a file is damaged.
    """
    return MeasuredRun(
        folder=folder,
        settings=read_config(folder) if (folder / CONFIG).is_file() else {},
        conditions=Conditions.read(folder),
        evidence=_summarised(folder) if records is None else _evidence(records),
    )


def announced_run(config: PlayConfig, folder: Path) -> MeasuredRun:
    """The run that `config` describes, before anything is loaded or played."""
    settings = config.model_dump()
    actor = actor_facts(settings)
    tasks = {
        task: TaskFacts(players=player_facts(config, actor, task=task))
        for task in settings["tasks"]
    }
    return MeasuredRun(
        folder=folder, settings=plain_config(config.identity()),
        conditions=Conditions(players={}, tasks=tasks, panel=panel_facts(config)),
    )  # fmt: skip


def _summarised(folder: Path) -> dict[str, Evidence]:
    prompts = read_object(folder / "summary.json").get("prompts")
    if prompts is None:
        episodes = folder / "episodes.jsonl"
        return _evidence(stream_records(episodes, light=True) if has_lines(episodes) else ())
    return {
        task: Evidence({name: set(hashes) for name, hashes in templates.items()})
        for task, templates in prompts.items()
    }


def _evidence(records: Iterable[Record]) -> dict[str, Evidence]:
    tasks: dict[str, Evidence] = {}
    for record in records:
        tasks.setdefault(record.task, Evidence()).add(record)
    return tasks


# -- differences of two runs -----------------------------------------------------------------------


class Differences(NamedTuple):
    """How two runs differ, as (task, line) pairs."""

    blocking: list[tuple[str, str]]
    """Why the runs may not be compared; empty if they may."""
    remarks: list[tuple[str, str]]
    """Differences that do not block a comparison but are reported with it."""

    def lines(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The blocking differences and the remarks, merged as in `by_task`."""
        return by_task(self.blocking), by_task(self.remarks)


def by_task(pairs: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Merge (task, line) pairs into lines `task, task: line`, one for each distinct line."""
    tasks: dict[str, dict[str, None]] = {}
    for task, line in pairs:
        tasks.setdefault(line, {})[task] = None
    return tuple(f"{', '.join(names)}: {line}" for line, names in tasks.items())


def differences(
    a: MeasuredRun, b: MeasuredRun, tasks: Iterable[str], names: Sequence[str] = ("A", "B"), *,
    judges: bool = True,
) -> Differences:  # fmt: skip
    """How two runs, called `names`, differ on some tasks. Without `judges` the panel is ignored:
    use this when another judge scores both runs."""
    sides = dict(zip(names, (a, b), strict=True))
    bare = [f"{name} did not record its conditions" for name, side in sides.items()
            if side.conditions is None]  # fmt: skip
    players = (_players, _dropped_by_players, _opinions) if judges else (_others,)
    found = Differences([], [])
    for task in tasks:
        blocking = bare or [line for part in (_protocols, _prompts, *players, _scorer, _rows)
                            for line in part(a, b, task)]  # fmt: skip
        remarks = [] if bare else [
            *_engines(a, b), *_sampling(a, b, task), *_budgets(a, b, task),
            *_declared(a, b, task, names), *_unfinished(sides, task),
        ]  # fmt: skip
        found.blocking.extend((task, line) for line in blocking)
        found.remarks.extend((task, line) for line in remarks)
    return found


def _protocols(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    left, right = (side.settings.get("protocol") for side in (a, b))
    return [] if left == right else [f"protocol {left} vs {right}"]


def _prompts(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    """Templates that both runs used with different texts; all templates if the runs share none.

    If only one run used a template and the others agree, that template may belong to a rare branch
    (such as a second request to the judge), so it does not count as a difference.
    """
    left, right = a.shown(task).prompts, b.shown(task).prompts
    common = left.keys() & right.keys()
    names = [name for name in common if left[name] != right[name]]
    if left and right and not common:
        names = [*left, *right]
    return [f"prompt '{name}' differs" for name in sorted(names)]


# -- players ---------------------------------------------------------------------------------------


def _roles(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    roles = {*a.of_task(task).roles, *b.of_task(task).roles}
    return [role for role in SCORING if role in roles]


def _players(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    lines = [line for role in _roles(a, b, task) if (line := _role(a, b, task, role))]
    return lines or _answerers(a, b, task)


def _others(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    roles = [role for role in _roles(a, b, task) if role not in PANELS]
    parts = (_role, _dropped)
    return [line for role in roles for part in parts if (line := part(a, b, task, role))]


def _dropped_by_players(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    roles = _roles(a, b, task)
    return [line for role in roles if (line := _dropped(a, b, task, role))]


def _dropped(a: MeasuredRun, b: MeasuredRun, task: str, role: str) -> str:
    """How the settings differ that the servers of a role rejected; empty if they are equal or a
    run is unfinished."""
    left, right = (side.dropped(task, role) for side in (a, b))
    if left is None or right is None:
        return ""
    words = [_without(side) for side in (left, right)]
    return "" if words[0] == words[1] else f"{role} sampled {words[0]} vs {words[1]}"


def _without(players: Sequence[Mapping[str, float]]) -> str:
    settings = sorted(
        ", ".join(
            f"{name} ({share_text(share)} of calls)" for name, share in sorted(shares.items())
        )
        for shares in players
    )
    return f"without {' and '.join(settings)}" if settings else "with all settings"


def _role(a: MeasuredRun, b: MeasuredRun, task: str, role: str) -> str:
    """How the players of a role differ; empty if they are equal. Without an auditor the judges
    audit."""
    left, right = (side.players(task, role) for side in (a, b))
    if role == "auditor" and (left or right):
        left, right = (
            named or side.players(task, "judge") for named, side in ((left, a), (right, b))
        )
    return "" if same_players(left, right) else f"{role} {_against(left, right)}"


def _answerers(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    """Differing judges in the episodes, for services that a task calls itself without a role."""
    left, right = a.shown(task).judges, b.shown(task).judges
    return [
        f"judge of '{question}' {_joined(left[question])} vs {_joined(right[question])}"
        for question in sorted(left.keys() & right.keys())
        if left[question] != right[question]
    ]


def _opinions(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    judges = [side.players(task, "judge") for side in (a, b)]
    if "judge" not in _roles(a, b, task) or not all(judges):
        return []
    left, right = panels = a.panel(task), b.panel(task)
    single = all(p["samples"] == len(j) == 1 for p, j in zip(panels, judges, strict=True))
    return [
        f"{word} {left.get(name)} vs {right.get(name)}"
        for name, word in OPINIONS.items()
        if left.get(name) != right.get(name) and not (single and name == "combine")
    ]


# -- scorer ----------------------------------------------------------------------------------------


def _scorer(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    names = [name for name in _options(a, b, task) if _scores(name)]
    own = ["" if name.startswith("prompt ") else "the task's " for name in names]
    return [f"{whose}{name} differs" for whose, name in zip(own, names, strict=True)]


def _scores(option: str) -> bool:
    return option in ("metric", "scorer") or option.startswith(("detector", "prompt '"))


def _options(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    left, right = (side.of_task(task).options for side in (a, b))
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


# -- rows ------------------------------------------------------------------------------------------


def _rows(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    """Different rows or row contents; for training runs also a different order or grouping into
    prompts. Before anything is loaded: different settings that select the rows."""
    if a.trained != b.trained:
        return ["evaluation rows vs training rows"]
    if a.trained and not any(s.conditions and s.conditions.material for s in (a, b)):
        return _other_drawing(a.settings, b.settings, task)
    one, two = a.of_task(task), b.of_task(task)
    if not a.trained:
        return _other_rows("rows", one.rows, two.rows)
    lines = [*_other_rows("training rows", one.rows, two.rows),
             *_other_rows("dev rows", one.dev_rows, two.dev_rows)]  # fmt: skip
    taken = [facts.taken or len(facts.rows) for facts in (one, two)]
    if not lines and taken[0] != taken[1]:
        lines.append(f"training rows used {taken[0]} vs {taken[1]} times")
    orders = [[*facts.rows, *facts.dev_rows] for facts in (one, two)]
    if not lines and orders[0] != orders[1]:
        lines.append("rows in a different order")
    if not lines and (one.prompts, one.dev_prompts) != (two.prompts, two.dev_prompts):
        lines.append("rows grouped into different prompts")
    return lines


def _other_rows(kind: str, left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    if left == right:
        return []
    shared = left.keys() & right.keys()
    changed = [id for id in shared if left[id] != right[id]]
    counts = f"{kind} {_n_rows(left)} vs {_n_rows(right)}, {_n_rows(shared)} in both"
    return [f"{counts}, {_n_rows(changed)} of these with different content" if changed else counts]


def _other_drawing(left: Facts, right: Facts, task: str) -> list[str]:
    a, b = _deciding(left, task), _deciding(right, task)
    return [
        f"{name} {_value(a[name], 'none')} vs {_value(b[name], 'none')}"
        for name in a
        if name in b and a[name] != b[name]
    ]


def _deciding(settings: Facts, task: str) -> dict[str, Any]:
    split = bool(settings.get("eval_every"))
    names = ("limit", "where", "example", *(("dev_share", "dev_limit", "dev_by") if split else ()))
    return {
        **{name: settings.get(name) for name in names},
        "dev split": "on" if split else "off",
        "rows of": settings["data"].get(task),
        "mixing ratio": settings["tasks"].get(task),
    }


def _n_rows(ids: Iterable[str]) -> int:
    """The number of distinct rows behind these ids."""
    return len(set(map(row_id, ids)))


def same_rows(a: MeasuredRun, b: MeasuredRun, task: str) -> frozenset[str]:
    """The rows that both runs have with the same content."""
    return frozenset(id for id, _ in a.rows(task).items() & b.rows(task).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """The rows of a task that both runs have; a comparison can be limited to them."""

    ids: frozenset[str]
    a: int
    """All rows of A."""
    b: int

    def as_dict(self) -> dict[str, int]:
        return {"rows": len(self.ids), "a": self.a, "b": self.b}

    def words(self) -> str:
        """`240 of 300 in A and 240 in B`."""
        return f"{len(self.ids)} of {self.a} in A and {self.b} in B"


def shared_rows(a: MeasuredRun, b: MeasuredRun, tasks: Iterable[str]) -> dict[str, SharedRows]:
    """Task → the rows that two evaluations share; tasks without shared rows are left out."""
    found = {
        task: SharedRows(ids=same_rows(a, b, task), a=len(a.rows(task)), b=len(b.rows(task)))
        for task in tasks
    }
    return {task: rows for task, rows in found.items() if rows.ids}


# -- remarks ---------------------------------------------------------------------------------------


def _engines(a: MeasuredRun, b: MeasuredRun) -> list[str]:
    left, right = (side.conditions.engine if side.conditions else {} for side in (a, b))
    lines = []
    if left and right and left != right:
        lines.append(f"sampled by {engine_words(left)} vs {engine_words(right)}")
    flags, others = (_flags(side.settings.get("vllm_arg")) for side in (a, b))
    return [*lines, *([f"vLLM with {flags} vs {others}"] if flags != others else ())]


def _declared(a: MeasuredRun, b: MeasuredRun, task: str, names: Sequence[str]) -> list[str]:
    """Players on attached servers whose weights were declared and not verified."""
    lines = []
    for name, side in zip(names, (a, b), strict=True):
        players = [("actor", side.conditions.actor)] if side.conditions else []
        players += [(role, who) for role in _roles(a, b, task) for who in side.players(task, role)]
        declared = [role for role, who in players if who.weights_basis == "declared"]
        if declared:
            roles = _joined(dict.fromkeys(declared))
            lines.append(f"the weights of {name}'s {roles} are declared, not verified")
    return lines


def _flags(flags: Any) -> str:
    """The server flags of a run as written on the command line; `no flags` if there are none."""
    if not isinstance(flags, Mapping) or not flags:
        return "no flags"
    return " ".join(f"--{name}={flags[name]}" for name in sorted(flags))


def _sampling(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    left, right = a.actor(task), b.actor(task)
    lines = [
        f"{name} {_value(left[name])} vs {_value(right[name])}"
        for name in ACTOR
        if name in left and name in right and left[name] != right[name]
    ]
    dropped = _dropped(a, b, task, "actor")
    return [*lines, *([dropped] if dropped else [])]


def _budgets(a: MeasuredRun, b: MeasuredRun, task: str) -> list[str]:
    """Word budgets, and task options that do not affect scoring (turns, entries, task code)."""
    left, right = (side.of_task(task).budgets for side in (a, b))
    words = [
        f"word budget of '{name}' {left.get(name, 'none')} vs {right.get(name, 'none')}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]
    options = [name for name in _options(a, b, task) if not _scores(name)]
    return [*words, *(f"the task's {name} differs" for name in options)]


def _unfinished(sides: Mapping[str, MeasuredRun], task: str) -> list[str]:
    counts = {name: (len(side.shown(task).ids), len(side.rows(task)))
              for name, side in sides.items() if not side.trained}  # fmt: skip
    return [
        f"{name} is unfinished: {played} of {rows} rows played"
        for name, (played, rows) in counts.items()
        if 0 < played < rows
    ]


# -- words -----------------------------------------------------------------------------------------


def _against(a: Sequence[PlayerFacts], b: Sequence[PlayerFacts]) -> str:
    """Both sides in words, with enough detail to tell them apart."""
    if _players_text(a) != _players_text(b):
        return f"{_players_text(a)} vs {_players_text(b)}"
    players = [player.known() for player in (*a, *b)]
    names = dict.fromkeys(name for player in players for name in player)
    details = [name for name in names if len({str(p.get(name)) for p in players}) > 1]
    return f"{_players_text(a, details)} vs {_players_text(b, details)}"


def _players_text(players: Sequence[PlayerFacts], details: Sequence[str] = ()) -> str:
    return _joined(_player_text(player, details) for player in players) or "none"


def _player_text(player: PlayerFacts, details: Sequence[str]) -> str:
    where = f"@{player.address}" if player.address else ""
    name, known = f"{player.kind}:{player.model}{where}", player.known()
    more = [f"{detail} {_value(known[detail])}" for detail in details if detail in known]
    return f"{name} ({', '.join(more)})" if more else name


def _joined(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))


def _value(value: Any, absent: str = "default") -> str:
    return absent if value is None else str(value)


NOT_ALIKE = "not measured the same way"


class LoadedRun(Protocol):
    """The parts of a loaded run that `unlike_pairs` reads."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def tasks(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikePair:
    """Two runs of the same tasks that differ in more than the model."""

    a: str
    b: str
    mixed: tuple[str, ...]
    """Why the runs may not be compared; empty if they may."""
    remarks: tuple[str, ...]
    """Differences that do not block a comparison, and facts that were not recorded."""

    def lines(self) -> list[str]:
        """The differences as lines for a report."""
        pair = f"{self.a} vs {self.b}"
        return [
            *(f"{pair}, {NOT_ALIKE}: {line}" for line in self.mixed),
            *(f"{pair}: {line}" for line in self.remarks),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"a": self.a, "b": self.b, "mixed": [*self.mixed], "remarks": [*self.remarks]}


def unlike_pairs(runs: Sequence[LoadedRun]) -> list[UnlikePair]:
    """The differences between each run and the first run that has the same task.

    RunError or DataError if a file with the conditions of a run is damaged.
    """
    tasks: dict[tuple[int, int], list[str]] = {}
    for task in dict.fromkeys(task for run in runs for task in run.tasks):
        first, *others = (i for i, run in enumerate(runs) if task in run.tasks)
        for other in others:
            tasks.setdefault((first, other), []).append(task)
    places = {place for pair in tasks for place in pair}
    measured = {i: read_measured(runs[i].path, runs[i].records or None) for i in places}
    differing = []
    for (i, j), shared in sorted(tasks.items()):
        names = runs[i].name, runs[j].name
        mixed, remarks = differences(measured[i], measured[j], shared, names).lines()
        if mixed or remarks:
            differing.append(UnlikePair(a=names[0], b=names[1], mixed=mixed, remarks=remarks))
    return differing
