"""Comparability: in what the conditions of two runs differ, and whether they may be compared.

With another protocol, prompt, judge, partner, environment, number of opinions or other rows the
numbers measure something else: a difference would say nothing of the models. The actor's
sampling, limits and word budgets are part of what is compared: they are named beside it, and so
is the code of a user's task, which changes whenever a scorer is mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from soulkit.data.rows import row_id
from soulkit.eval.comparison.conditions import ACTOR, Conditions, read_conditions
from soulkit.eval.results.warnings import share_text
from soulkit.eval.run.provenance import BASIS, ENGINE, SCORING, JsonObject, same_players
from soulkit.models.players.settings import PANELS
from soulkit.models.vllm.settings import engine_words
from soulkit.types import Record

OPINIONS = {"samples": "judge samples", "combine": "judge combination", "orders": "judge order"}


class Differences(NamedTuple):
    """In what two runs differ on a task."""

    blocking: list[str]
    """Why the runs may not be compared; empty: they may."""
    remarks: list[str]
    """What is part of what is compared, and named beside it."""


def differences(
    a: Conditions, b: Conditions, task: str, names: Sequence[str] = ("A", "B"), *,
    judges: bool = True,
) -> Differences:  # fmt: skip
    """In what two runs, called `names`, differ on a task. Without `judges` only those who play are
    looked at: another judge scores both."""
    sides = dict(zip(names, (a, b), strict=True))
    bare = [name for name, side in sides.items() if not side.record]
    if bare:
        return Differences([f"{name} does not record its conditions" for name in bare], [])
    rows = _trained_rows if a.trained or b.trained else _rows
    players = [_players, _dropped_by_players, _opinions] if judges else [_others]
    blocking = [line for part in (_protocols, _prompts, *players, _scorer, rows)
                for line in part(a, b, task)]  # fmt: skip
    remarks = [*_engines(a, b), *_sampling(a, b, task), *_budgets(a, b, task),
               *_declared(a, b, task, names), *_unfinished(sides, task)]  # fmt: skip
    return Differences(blocking, remarks)


def _protocols(a: Conditions, b: Conditions, task: str) -> list[str]:
    left, right = (side.settings.get("protocol") for side in (a, b))
    return [] if left == right else [f"protocol {left} against {right}"]


def _prompts(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Templates used on both sides with other texts; all of them when no template is common.

    A template that only one side used while others agree may belong to a rare branch (a second
    request to the judge), so it is no difference by itself.
    """
    left, right = a.evidence(task).prompts, b.evidence(task).prompts
    common = left.keys() & right.keys()
    names = [name for name in common if left[name] != right[name]]
    if left and right and not common:
        names = [*left, *right]
    return [f"prompt '{name}' differs" for name in sorted(names)]


# -- players ---------------------------------------------------------------------------------------


def _roles(a: Conditions, b: Conditions, task: str) -> list[str]:
    """The roles that a score of the task may depend on."""
    roles = a.roles(task) | b.roles(task)
    return [role for role in SCORING if role in roles]


def _players(a: Conditions, b: Conditions, task: str) -> list[str]:
    lines = [line for role in _roles(a, b, task) if (line := _role(a, b, task, role))]
    return lines or _answerers(a, b, task)


def _others(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Players that do not judge."""
    roles = [role for role in _roles(a, b, task) if role not in PANELS]
    parts = (_role, _dropped)
    return [line for role in roles for part in parts if (line := part(a, b, task, role))]


def _dropped_by_players(a: Conditions, b: Conditions, task: str) -> list[str]:
    roles = _roles(a, b, task)
    return [line for role in roles if (line := _dropped(a, b, task, role))]


def _dropped(a: Conditions, b: Conditions, task: str, role: str) -> str:
    """How the settings differ that the servers of a role refused; empty where they do not, or
    where a run has not ended."""
    left, right = (side.dropped(task, role) for side in (a, b))
    if left is None or right is None:
        return ""
    words = [_without(side) for side in (left, right)]
    return "" if words[0] == words[1] else f"{role} sampled {words[0]} against {words[1]}"


def _without(players: Sequence[Mapping[str, float]]) -> str:
    settings = sorted(
        ", ".join(
            f"{name} ({share_text(share)} of calls)" for name, share in sorted(shares.items())
        )
        for shares in players
    )
    return f"without {' and '.join(settings)}" if settings else "with every setting"


def _role(a: Conditions, b: Conditions, task: str, role: str) -> str:
    """How the players of a role differ; empty where they do not. Judges audit where no auditor is
    named."""
    left, right = (side.players(task, role) for side in (a, b))
    if role == "auditor" and (left or right):
        left, right = (
            named or side.players(task, "judge") for named, side in ((left, a), (right, b))
        )
    return "" if same_players(left, right) else f"{role} {_against(left, right)}"


def _answerers(a: Conditions, b: Conditions, task: str) -> list[str]:
    """The judges that the episodes name: a service that a task asks for itself has no role."""
    left, right = a.evidence(task).judges, b.evidence(task).judges
    return [
        f"judge of '{question}' {_joined(left[question])} against {_joined(right[question])}"
        for question in sorted(left.keys() & right.keys())
        if left[question] != right[question]
    ]


def _opinions(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Other numbers of opinions, or other ways to make one of them."""
    judges = [side.players(task, "judge") for side in (a, b)]
    if "judge" not in _roles(a, b, task) or not all(judges):
        return []
    left, right = panels = a.panel(task), b.panel(task)
    single = all(p["samples"] == len(j) == 1 for p, j in zip(panels, judges, strict=True))
    return [
        f"{word} {left.get(name)} against {right.get(name)}"
        for name, word in OPINIONS.items()
        if left.get(name) != right.get(name) and not (single and name == "combine")
    ]


# -- scorer ----------------------------------------------------------------------------------------


def _scorer(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Options that say who scores, and the scale."""
    return [f"{name} of the task differs" for name in _options(a, b, task) if _scores(name)]


def _scores(option: str) -> bool:
    return option == "metric" or option.startswith("detector")


def _options(a: Conditions, b: Conditions, task: str) -> list[str]:
    left, right = (side.of_task(task).get("options", {}) for side in (a, b))
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


# -- rows ------------------------------------------------------------------------------------------


def _rows(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Other rows, or the same ones with other content."""
    left, right = a.rows(task), b.rows(task)
    if left == right:
        return []
    shared = left.keys() & right.keys()
    changed = shared - same_rows(a, b, task)
    counts = f"rows {_n_rows(left)} against {_n_rows(right)}, {_n_rows(shared)} in both"
    return [f"{counts}, {_n_rows(changed)} of these with other content" if changed else counts]


def _n_rows(ids: Iterable[str]) -> int:
    """How many rows these are forms of."""
    return len(set(map(row_id, ids)))


def same_rows(a: Conditions, b: Conditions, task: str) -> frozenset[str]:
    """The rows that both runs have with the same content."""
    return frozenset(id for id, _ in a.rows(task).items() & b.rows(task).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """The rows of a task to which both sides of a comparison are cut."""

    ids: frozenset[str]
    a: int
    """Rows of A before that."""
    b: int

    def as_dict(self) -> dict[str, int]:
        return {"rows": len(self.ids), "a": self.a, "b": self.b}

    def words(self) -> str:
        """`240 of 300 in A and 240 in B`."""
        return f"{len(self.ids)} of {self.a} in A and {self.b} in B"


def shared_rows(a: Conditions, b: Conditions, tasks: Iterable[str]) -> dict[str, SharedRows]:
    """Task → what two evaluations share of it; tasks of which they share no row are left out."""
    found = {
        task: SharedRows(ids=same_rows(a, b, task), a=len(a.rows(task)), b=len(b.rows(task)))
        for task in tasks
    }
    return {task: rows for task, rows in found.items() if rows.ids}


def _trained_rows(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Training rows by their hashes; before anything is loaded, by the settings that decide
    them."""
    if not (a.trained and b.trained):
        return ["rows of an evaluation against training rows"]
    if a.material or b.material:
        return [line for kind in ("training", "dev") for line in _hashed(a, b, task, kind)]
    left, right = _deciding(a.settings, task), _deciding(b.settings, task)
    return [
        f"{name} {_value(left[name], 'none')} against {_value(right[name], 'none')}"
        for name in left
        if name in right and left[name] != right[name]
    ]


def _hashed(a: Conditions, b: Conditions, task: str, kind: str) -> list[str]:
    left, right = (side.material.get(kind, {}).get(task, {}) for side in (a, b))
    if left == right:
        return []
    if (left.get("rows"), left.get("ids")) == (right.get("rows"), right.get("ids")):
        return [f"{kind} rows in other prompts"]
    counts = [side.get("rows", 0) for side in (left, right)]
    others = ", others or in another order" if counts[0] == counts[1] else ""
    return [f"{kind} rows {counts[0]} against {counts[1]}{others}"]


def _deciding(settings: JsonObject, task: str) -> JsonObject:
    """The settings that decide the training rows of a task."""
    split = bool(settings.get("eval_every"))
    names = ("limit", "where", "example", *(("dev_share", "dev_limit", "dev_by") if split else ()))
    return {
        **{name: settings.get(name) for name in names},
        "dev split": "there" if split else "none",
        "rows of": settings["data"].get(task),
        "mixing ratio": settings["tasks"].get(task),
    }


# -- what is named beside a difference -------------------------------------------------------------


def _engines(a: Conditions, b: Conditions) -> list[str]:
    """What sampled the actors; the engine of an endpoint is not known."""
    left, right = (side.record.get(ENGINE) for side in (a, b))
    lines = []
    if left and right and left != right:
        lines.append(f"sampled by {engine_words(left)} against {engine_words(right)}")
    flags, others = (_flags(side.settings.get("vllm_arg")) for side in (a, b))
    return [*lines, *([f"vLLM with {flags} against {others}"] if flags != others else ())]


def _declared(a: Conditions, b: Conditions, task: str, names: Sequence[str]) -> list[str]:
    """Players of attached servers whose weights were not compared with what is recorded."""
    lines = []
    for name, side in zip(names, (a, b), strict=True):
        players = [("actor", side.record.get("actor", {}))]
        players += [(role, who) for role in _roles(a, b, task) for who in side.players(task, role)]
        declared = [role for role, who in players if who.get(BASIS) == "declared"]
        if declared:
            roles = _joined(dict.fromkeys(declared))
            lines.append(f"weights of the {roles} of {name} declared, not verified")
    return lines


def _flags(flags: Any) -> str:
    """The flags of a run's servers as they are written; `no flags` without any."""
    if not isinstance(flags, Mapping) or not flags:
        return "no flags"
    return " ".join(f"--{name}={flags[name]}" for name in sorted(flags))


def _sampling(a: Conditions, b: Conditions, task: str) -> list[str]:
    left, right = a.actor(task), b.actor(task)
    lines = [
        f"{name} {_value(left[name])} against {_value(right[name])}"
        for name in ACTOR
        if name in left and name in right and left[name] != right[name]
    ]
    dropped = _dropped(a, b, task, "actor")
    return [*lines, *([dropped] if dropped else [])]


def _budgets(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Word budgets, what a task is told of turns and entries, and the code of a user's task."""
    left, right = (side.of_task(task).get("budgets", {}) for side in (a, b))
    words = [
        f"word budget of '{name}' {left.get(name, 'none')} against {right.get(name, 'none')}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]
    options = [name for name in _options(a, b, task) if not _scores(name)]
    return [*words, *(f"{name} of the task differs" for name in options)]


def _unfinished(sides: Mapping[str, Conditions], task: str) -> list[str]:
    counts = {name: (len(side.evidence(task).ids), len(side.rows(task)))
              for name, side in sides.items()}  # fmt: skip
    return [
        f"{name} is unfinished: {played} of {rows} rows were played"
        for name, (played, rows) in counts.items()
        if 0 < played < rows
    ]


def grouped_by_task(lines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """(task, line) pairs as `task, task: line`, each line once."""
    tasks: dict[str, list[str]] = {}
    for task, line in lines:
        tasks.setdefault(line, []).append(task)
    return tuple(f"{', '.join(names)}: {line}" for line, names in tasks.items())


# -- words -----------------------------------------------------------------------------------------


def _against(a: Sequence[JsonObject], b: Sequence[JsonObject]) -> str:
    """Both sides in words, with as much detail as tells them apart."""
    if _players_text(a) != _players_text(b):
        return f"{_players_text(a)} against {_players_text(b)}"
    players = [*a, *b]
    names = dict.fromkeys(name for player in players for name in player)
    details = [name for name in names if len({str(p.get(name)) for p in players}) > 1]
    return f"{_players_text(a, details)} against {_players_text(b, details)}"


def _players_text(players: Sequence[JsonObject], details: Sequence[str] = ()) -> str:
    return _joined(_player_text(player, details) for player in players) or "nobody"


def _player_text(player: JsonObject, details: Sequence[str]) -> str:
    where = f"@{player['address']}" if "address" in player else ""
    name = f"{player['kind']}:{player['model']}{where}"
    more = [f"{detail} {_value(player[detail])}" for detail in details if detail in player]
    return f"{name} ({', '.join(more)})" if more else name


def _joined(words: Iterable[str]) -> str:
    return " and ".join(sorted(words))


def _value(value: Any, absent: str = "its default") -> str:
    return absent if value is None else str(value)


NOT_ALIKE = "not measured the same way"


class LoadedRun(Protocol):
    """A run as a report holds it."""

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
    """Why no difference may be put between them; empty: it may."""
    remarks: tuple[str, ...]
    """What differs and is part of what is compared, and what was not recorded."""

    def lines(self) -> list[str]:
        """What a reader is told of them, a sentence each."""
        pair = f"{self.a} against {self.b}"
        return [
            *(f"{pair}, {NOT_ALIKE}: {line}" for line in self.mixed),
            *(f"{pair}: {line}" for line in self.remarks),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"a": self.a, "b": self.b, "mixed": [*self.mixed], "remarks": [*self.remarks]}


def unlike_pairs(runs: Sequence[LoadedRun]) -> list[UnlikePair]:
    """Every run beside the first that has a task with it, as far as they differ.

    RunError or DataError when a file that tells the conditions of a run is damaged.
    """
    tasks: dict[tuple[int, int], list[str]] = {}
    for task in dict.fromkeys(task for run in runs for task in run.tasks):
        first, *others = (i for i, run in enumerate(runs) if task in run.tasks)
        for other in others:
            tasks.setdefault((first, other), []).append(task)
    places = {place for pair in tasks for place in pair}
    conditions = {i: read_conditions(runs[i].path, runs[i].records or None) for i in places}
    differing = []
    for (i, j), shared in sorted(tasks.items()):
        names = runs[i].name, runs[j].name
        by_task = {task: differences(conditions[i], conditions[j], task, names) for task in shared}
        pair = UnlikePair(
            a=names[0], b=names[1],
            mixed=grouped_by_task(
                (task, line) for task, of_task in by_task.items() for line in of_task.blocking
            ),
            remarks=grouped_by_task(
                (task, line) for task, of_task in by_task.items() for line in of_task.remarks
            ),
        )  # fmt: skip
        differing += [pair] if pair.mixed or pair.remarks else []
    return differing
