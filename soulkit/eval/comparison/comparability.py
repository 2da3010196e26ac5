"""Comparability: in what the conditions of two runs differ, and whether they may be compared.

With another protocol, prompt, judge, partner, environment, number of opinions or other rows the
numbers measure something else: a difference would say nothing of the models. The actor's
sampling, limits and word budgets are part of what is compared: they are named beside it, and so
is the code of a user's task, which changes whenever a scorer is mended.

What a run did not record is never taken for equal where a score depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from soulkit.data.rows import row_id
from soulkit.eval.comparison.conditions import ACTOR, Conditions, read_conditions
from soulkit.eval.results.warnings import share_text
from soulkit.eval.run.provenance import BASIS, SCORING, Print, same_players
from soulkit.models.players.settings import PANELS
from soulkit.models.vllm.settings import engine_words
from soulkit.types import Record

OPINIONS = {"samples": "judge samples", "combine": "judge combination", "orders": "judge order"}
TRAINING_ROWS = ("limit", "where", "dev_share", "dev_limit")
"""Settings that decide which rows a training plays; the last two where there is a dev split."""


def condition_differences(
    a: Conditions, b: Conditions, task: str, *, judges: bool = True
) -> list[str]:
    """Why no difference may be put between two runs on a task, A's first; empty: it may.

    Without `judges` nobody who judges is looked at: another one scores both.
    """
    rows = _trained_rows if a.trained or b.trained else _rows
    players = [_players, _dropped_by_players, _opinions] if judges else [_others]
    parts = [_protocols, _prompts, *players, _scorer, rows]
    return [line for part in parts for line in part(a, b, task)]


def _protocols(a: Conditions, b: Conditions, task: str) -> list[str]:
    sides = []
    for one in (a, b):
        setting = {one.settings["protocol"]} if "protocol" in one.settings else set()
        sides.append(one.evidence(task).protocols or setting)
    if not all(sides) or sides[0] == sides[1]:
        return []
    return [f"protocol {_joined(sides[0])} against {_joined(sides[1])}"]


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
    """The roles that a score of the task may depend on: all of them where it is not known."""
    recorded = [roles for one in (a, b) if (roles := one.roles(task)) is not None]
    return [role for role in SCORING if not recorded or any(role in roles for roles in recorded)]


def _players(a: Conditions, b: Conditions, task: str) -> list[str]:
    lines = [line for role in _roles(a, b, task) if (line := _role(a, b, task, role))]
    return lines or _answerers(a, b, task)


def _others(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Those who play and do not judge."""
    roles = [role for role in _roles(a, b, task) if role not in PANELS]
    parts = (_role, _dropped)
    return [line for role in roles for part in parts if (line := part(a, b, task, role))]


def _dropped_by_players(a: Conditions, b: Conditions, task: str) -> list[str]:
    roles = _roles(a, b, task)
    return [line for role in roles if (line := _dropped(a, b, task, role))]


def _dropped(a: Conditions, b: Conditions, task: str, role: str) -> str:
    """How the settings differ that the servers of a role refused; empty where they do not, or
    where a run does not record them."""
    left, right = (one.dropped(task, role) for one in (a, b))
    if left is None or right is None:
        return ""
    words = [_without(side) for side in (left, right)]
    return "" if words[0] == words[1] else f"{role} sampled {words[0]} against {words[1]}"


def _without(players: Sequence[Mapping[str, float]]) -> str:
    several = sorted(
        ", ".join(f"{name} ({share_text(share)} of calls)" for name, share in sorted(one.items()))
        for one in players
    )
    return f"without {' and '.join(several)}" if several else "with every setting"


def _role(a: Conditions, b: Conditions, task: str, role: str) -> str:
    """How the players of a role differ; empty where they do not."""
    if role == "auditor" and not any(one.named(task, role) for one in (a, b)):
        return ""  # on both sides the judges audit, and they are compared
    sides = [one.named(task, role) for one in (a, b)]
    if role == "auditor":
        sides = [side or one.named(task, "judge") for side, one in zip(sides, (a, b), strict=True)]
    left, right = sides
    if left is not None and right is not None:
        return "" if same_players(left, right) else f"{role} {_against(left, right)}"
    if left or right:
        words = [
            "one that is not recorded" if side is None else _players_text(side) for side in sides
        ]
        return f"{role} {words[0]} against {words[1]}"
    return f"{role} not recorded" if left is right and _present(a, b, task, role) else ""


def _present(a: Conditions, b: Conditions, task: str, role: str) -> bool:
    """Whether the episodes show that somebody had a role of whom neither run says who it was."""
    sides = a.evidence(task), b.evidence(task)
    if role == "judge":
        return any(side.judges for side in sides)
    return role == "partner" and any(side.company for side in sides)


def _answerers(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Who judged, by the episodes' own word: a service that a task asks for itself has no role."""
    left, right = a.evidence(task).judges, b.evidence(task).judges
    return [
        f"judge of '{question}' {_joined(left[question])} against {_joined(right[question])}"
        for question in sorted(left.keys() & right.keys())
        if left[question] != right[question]
    ]


def _opinions(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Other numbers of opinions, or other ways to make one of them."""
    judges = [one.named(task, "judge") or () for one in (a, b)]
    if "judge" not in _roles(a, b, task) or not all(judges):
        return []
    panels = a.panel(task), b.panel(task)
    single = all(p["samples"] == len(j) == 1 for p, j in zip(panels, judges, strict=True))
    return [
        f"{word} {panels[0][name]} against {panels[1][name]}"
        for name, word in OPINIONS.items()
        if panels[0][name] != panels[1][name] and not (single and name == "combine")
    ]


# -- scorer ----------------------------------------------------------------------------------------


def _scorer(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Options that say who scores, and the scale."""
    return [f"{name} of the task differs" for name in _options(a, b, task) if _scores(name)]


def _scores(option: str) -> bool:
    return option == "metric" or option.startswith("detector")


def _options(a: Conditions, b: Conditions, task: str) -> list[str]:
    left, right = (one.of_task(task).get("options") for one in (a, b))
    if left is None or right is None:
        return []
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


# -- rows ------------------------------------------------------------------------------------------


def _rows(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Other rows, or the same ones with other content."""
    sides = [one.rows(task) for one in (a, b)]
    left, right = (_known_rows(one, task) for one in (a, b))
    whole = next((side for side in sides if side is not None), None)
    if whole is None or (None in sides and {*left, *right} == whole.keys()):
        return []  # of a run that was cut short only a part is there: it may have been the same
    shared = left.keys() & right.keys()
    changed = shared - same_rows(a, b, task)
    if left.keys() == right.keys() and not changed:
        return []
    counts = f"rows {_n_rows(left)} against {_n_rows(right)}, {_n_rows(shared)} in both"
    return [f"{counts}, {_n_rows(changed)} of these with other content" if changed else counts]


def _n_rows(ids: Iterable[str]) -> int:
    """How many rows these are forms of."""
    return len(set(map(row_id, ids)))


def _known_rows(one: Conditions, task: str) -> Mapping[str, str]:
    """Example → hash of its row, "" where unknown; those that were played where a run does not
    record its rows."""
    rows = one.rows(task)
    return dict.fromkeys(one.evidence(task).ids, "") if rows is None else rows


def same_rows(a: Conditions, b: Conditions, task: str) -> frozenset[str]:
    """The rows that both runs have, as far as is known with the same content."""
    left, right = (_known_rows(one, task) for one in (a, b))
    return frozenset(
        row for row in left.keys() & right.keys()
        if not (left[row] and right[row] and left[row] != right[row])
    )  # fmt: skip


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
        task: SharedRows(ids=same_rows(a, b, task), a=len(_known_rows(a, task)),
                         b=len(_known_rows(b, task)))
        for task in tasks
    }  # fmt: skip
    return {task: rows for task, rows in found.items() if rows.ids}


def _trained_rows(a: Conditions, b: Conditions, task: str) -> list[str]:
    """Training rows by their hashes, else by the settings that decide them."""
    if not (a.trained and b.trained):
        evaluation = b if a.trained else a
        recorded = evaluation.rows(task) is not None or evaluation.settings
        return ["rows of an evaluation against training rows"] if recorded else []
    if a.material and b.material:
        return [line for kind in ("training", "dev") for line in _hashed(a, b, task, kind)]
    left, right = _deciding(a.settings, task), _deciding(b.settings, task)
    return [
        f"{name} {_value(left[name], 'none')} against {_value(right[name], 'none')}"
        for name in left
        if name in right and left[name] != right[name]
    ]


def _hashed(a: Conditions, b: Conditions, task: str, kind: str) -> list[str]:
    left, right = (one.material.get(kind, {}).get(task, {}) for one in (a, b))
    if left == right:
        return []
    if (left.get("rows"), left.get("ids")) == (right.get("rows"), right.get("ids")):
        return [f"{kind} rows in other prompts"]
    counts = [side.get("rows", 0) for side in (left, right)]
    others = ", others or in another order" if counts[0] == counts[1] else ""
    return [f"{kind} rows {counts[0]} against {counts[1]}{others}"]


def _deciding(settings: Print, task: str) -> Print:
    """The settings that decide the training rows of a task, as far as they are named."""
    split = bool(settings.get("eval_every"))
    names = TRAINING_ROWS if split else TRAINING_ROWS[:2]
    rows: Print = {name: settings[name] for name in names if name in settings}
    if settings.get("example"):  # older runs say nothing of it, and mean all rows
        rows["example"] = settings["example"]
    if split and settings.get("dev_by"):  # older runs say nothing of it, and mean stories
        rows["dev_by"] = settings["dev_by"]
    if "eval_every" in settings:
        rows["dev split"] = "there" if split else "none"
    for name, word in (("data", "rows of"), ("tasks", "mixing ratio")):
        if isinstance(settings.get(name), Mapping):
            rows[word] = settings[name].get(task)
    return rows


# -- what is named ---------------------------------------------------------------------------------


def likeness_remarks(
    a: Conditions, b: Conditions, task: str, names: Sequence[str] = ("A", "B")
) -> list[str]:
    """What a reader has to know beside a difference: part of what is compared, or not recorded."""
    return [*_engines(a, b), *_sampling(a, b, task), *_budgets(a, b, task),
            *_declared(a, b, task, names), *_unrecorded(a, b, task, names)]  # fmt: skip


def _engines(a: Conditions, b: Conditions) -> list[str]:
    """By what the actors were sampled; an endpoint's engine nobody knows."""
    left, right = a.engine, b.engine
    lines = []
    if left and right and left != right:
        lines.append(f"sampled by {engine_words(left)} against {engine_words(right)}")
    flags, others = (_flags(one.settings.get("vllm_arg")) for one in (a, b))
    return [*lines, *([f"vLLM with {flags} against {others}"] if flags != others else ())]


def _declared(a: Conditions, b: Conditions, task: str, names: Sequence[str]) -> list[str]:
    """Who answered from attached servers whose weights nobody compared with what is recorded."""
    lines = []
    for name, one in zip(names, (a, b), strict=True):
        players = [("actor", one.record.get("actor", {}))]
        players += [
            (role, who) for role in _roles(a, b, task) for who in one.named(task, role) or ()
        ]
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
    left, right = (one.of_task(task).get("budgets", {}) for one in (a, b))
    words = [
        f"word budget of '{name}' {left.get(name, 'none')} against {right.get(name, 'none')}"
        for name in sorted({*left, *right})
        if a.of_task(task) and b.of_task(task) and left.get(name) != right.get(name)
    ]
    options = [name for name in _options(a, b, task) if not _scores(name)]
    return [*words, *(f"{name} of the task differs" for name in options)]


def _unrecorded(a: Conditions, b: Conditions, task: str, names: Sequence[str]) -> list[str]:
    lines = []
    for name, one in zip(names, (a, b), strict=True):
        rows, played = one.rows(task), one.evidence(task).ids
        if one.players is None:
            lines.append(f"{name} does not record who played beside the actor")
        if rows is None and not one.trained:
            state = "does" if one.finished else "is unfinished and does"
            lines.append(f"{name} {state} not record its rows")
        elif rows is not None and played and len(played) < len(rows):
            lines.append(f"{name} is unfinished: {len(played)} of {len(rows)} rows were played")
    scripts = {
        f"{role} {player['model']}"
        for role in _roles(a, b, task)
        for one in (a, b)
        for player in one.named(task, role) or ()
        if player["kind"] == "scripted" and "sha256" not in player
    }
    return [*lines, *(f"content of the scripted {name} not recorded" for name in sorted(scripts))]


def grouped_by_task(lines: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """(task, line) pairs as `task, task: line`, each line once."""
    tasks: dict[str, list[str]] = {}
    for task, line in lines:
        tasks.setdefault(line, []).append(task)
    return tuple(f"{', '.join(names)}: {line}" for line, names in tasks.items())


# -- words -----------------------------------------------------------------------------------------


def _against(a: Sequence[Print], b: Sequence[Print]) -> str:
    """Both sides in words, with as much detail as tells them apart."""
    if _players_text(a) != _players_text(b):
        return f"{_players_text(a)} against {_players_text(b)}"
    players = [*a, *b]
    every = dict.fromkeys(name for one in players for name in one)
    details = [name for name in every if len({str(one.get(name)) for one in players}) > 1]
    return f"{_players_text(a, details)} against {_players_text(b, details)}"


def _players_text(players: Sequence[Print], details: Sequence[str] = ()) -> str:
    return _joined(_player_text(one, details) for one in players) or "nobody"


def _player_text(player: Print, details: Sequence[str]) -> str:
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
        names, sides = (runs[i].name, runs[j].name), (conditions[i], conditions[j])
        pair = UnlikePair(
            a=names[0], b=names[1],
            mixed=grouped_by_task(
                (task, line) for task in shared for line in condition_differences(*sides, task)
            ),
            remarks=grouped_by_task(
                (task, line) for task in shared for line in likeness_remarks(*sides, task, names)
            ),
        )  # fmt: skip
        differing += [pair] if pair.mixed or pair.remarks else []
    return differing
