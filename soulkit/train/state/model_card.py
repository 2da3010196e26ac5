"""Files saved with the weights: the model card README.md and the note `soulkit.json`.

The card describes training data, method, results, judges, loading and licences. It contains no
local paths except those that the user typed. The note is for programs that load, judge or distil
the weights later:

{"schema": "soulkit/model@1", "soulkit": "0.1.0", "kind": "adapter",
 "method": "ditto", "protocol": "paper", "tasks": {"TASK": 1.0},
 "corpora": [{"name": "chats.jsonl", "side": "human", "ratio": 1.0, "rows": 1200}],  if any
 "base": {"model": "owner/name", "revision": "4c1d…",       or a folder and its "weights"
              "quantize": "nf4",                         if it was quantised for the training
              "licence": {"license": "apache-2.0"}},
 "adapter": {"model": "runs/a/model", "weights": "9f…"},    what was trained further, if any
 "step": 50}
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.api_keys import printable
from soulkit.config import Settings
from soulkit.data.corpora.settings import hub_address
from soulkit.data.hub import RELEASES
from soulkit.eval.results.cells import Cell, missing_parts_text
from soulkit.metrics.intervals import estimate_text
from soulkit.models.local.loading import (
    UNSTATED,
    adapter_folder,
    adapter_hash,
    auto_class,
    base_licence,
    base_of,
    is_peft,
    model_place,
)
from soulkit.models.local.weights import commit_of, weights_hash
from soulkit.models.players.settings import RoleSettings
from soulkit.runs.jsonl import write_aside
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.setup.rows import Corpus, TrainingData, source_facts
from soulkit.train.state.summary import AbilityTotals, WrittenTotals
from soulkit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Template

SCHEMA = "soulkit/model@1"


def model_note(config: TrainConfig, policy: Policy, corpus: Corpus | None = None) -> dict[str, Any]:
    """The note without the step; `corpus` is None if the run trains on tasks."""
    base = base_of(policy.model)
    if "revision" not in base and Path(base["model"]).is_dir():
        base["weights"] = weights_hash(Path(base["model"]))
    if config.quantize != "none":
        base["quantize"] = config.quantize
    licence = base_licence(base["model"], base.get("revision"))
    return {
        "schema": SCHEMA,
        "soulkit": __version__,
        "kind": "adapter" if is_peft(policy.model) else "model",
        "method": config.method,
        "protocol": config.protocol,
        "tasks": dict(config.tasks),
        **({"corpora": source_facts(config, corpus)} if corpus else {}),
        "base": {**base, "licence": licence},
        **({"adapter": _trained_further(config.adapter)} if config.adapter else {}),
    }


def _trained_further(name: str) -> dict[str, str]:
    place, folder = model_place(name, "adapter"), adapter_folder(name)
    commit = commit_of(folder)
    model = place.where if place.on_hub else str(folder.resolve())
    revision = {"revision": commit} if commit else {}
    return {"model": model, **revision, "weights": adapter_hash(folder)}


CARD = "README.md"
_ELSEWHERE = frozenset({"method", "model", "adapter", "tasks", "data", "side", "track", "max_cost"})
"""Settings that the command lists separately, or that do not affect the weights."""
Cells = tuple[object, ...]


def write_card(
    folder: Path, config: TrainConfig, material: TrainingData, policy: Policy,
    summary: Mapping[str, Any], step: int,
) -> None:  # fmt: skip
    """Write the card of the weights after `step` in `folder`; `summary` is the run's summary."""
    text = _card(config, material, policy.note or {}, summary, step,
                 auto_class(policy.causal.config).__name__)  # fmt: skip
    write_aside(folder / CARD, text.encode())


def _card(
    config: TrainConfig, material: TrainingData, note: Mapping[str, Any],
    summary: Mapping[str, Any], step: int, kind: str,
) -> str:  # fmt: skip
    base, corpus = note["base"], material.corpus
    licence = base.get("licence", UNSTATED)
    learned = summary.get("lessons", {})
    total = sum(n for name, n in learned.items() if name.startswith("lessons/of/"))
    written, ability = summary.get("written"), summary.get("retention")
    return _template().render(
        config=config, note=note, base=base, kind=kind, step=step,
        adapter=note["kind"] == "adapter",
        summary={"best_step": None, "best_valid": None, **summary},
        front=_front(config, note),
        names=[*config.tasks, *(str(one["name"]) for one in note.get("corpora", ()))],
        teacher=summary.get("provenance", {}).get("teacher"),
        command=_command(config, base),
        rows=_rows(config, material, summary),
        sources=_sources(config, corpus, summary) if corpus is not None else None,
        learned=f"{total:,}",
        written=written and WrittenTotals.from_json(written).words(),
        figures=[*_figures(summary), *_validated(summary)],
        ability=ability and AbilityTotals.from_json(ability),
        licence=licence.get("license_name", licence["license"]),
    )  # fmt: skip


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader

    made = Environment(
        loader=PackageLoader("soulkit.train", "state"), trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    made.filters |= {"plain": _plain, "row": _row, "repr": repr}
    return made.get_template("model_card.md.j2")


def _front(config: TrainConfig, note: Mapping[str, Any]) -> str:
    import yaml

    adapter, base = note["kind"] == "adapter", note["base"]
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if not Path(base["model"]).is_absolute():  # the Hub only knows ids
        front["base_model"] = base["model"]
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    front |= base.get("licence", UNSTATED)
    front["pipeline_tag"] = "text-generation"
    lora = ["lora"] if adapter else []
    front["tags"] = ["soulkit", "human-simulation", config.method, *lora, *config.tasks]
    if on_hub := [m["repo"] for one in config.corpora if (m := hub_address(one.path))]:
        front["datasets"] = list(dict.fromkeys(on_hub))
    if any(config.data.get(name) is None for name in config.tasks):
        front["datasets"] = [RELEASES["train"]]
    return str(yaml.safe_dump(front, sort_keys=False, allow_unicode=True)).rstrip()


def _command(config: TrainConfig, base: Mapping[str, Any]) -> str:
    """The command with all settings that differ from the defaults, without local folders."""
    defaults, revision = type(config).defaults(), base.get("revision")
    hub = f"{base.get('model')}@{revision}" if revision else ""
    words = ["soul", "train", config.method, "--model", hub or _plain(config.model)]
    tasks = [t if ratio == 1 else f"{t}:{ratio:g}" for t, ratio in config.tasks.items()]
    words += ["--task", ",".join(tasks)] if tasks else []
    for one in config.corpora:
        words += ["--data", _plain(one.path) + (f":{one.ratio:g}" if one.ratio != 1 else "")]
    words += ["--side", config.side] if config.side else []
    for one in config.validation:
        words += ["--validation", _plain(one.path)]
    for task, source in config.data.items():
        words += ["--data", f"{task}={_plain(source)}"]
    for name, value in config.resolved().items():
        plain = isinstance(value, str | int | float) and not {"/", "\\"} & set(str(value))
        if name not in _ELSEWHERE and plain and value != defaults.get(name):
            words += ["--set", f"{name}={value}"]
    players = [*_players(config, "")]
    for task, named in config.task_players.items():
        players += _players(named, f"{task}=")
    return shlex.join([*words, *players])


def _players(settings: Settings, task: str) -> Iterator[str]:
    """`--judge endpoint:MODEL` and the like for all players except the actor."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, RoleSettings):
                player = one.model_copy(update={"model": _plain(one.model)}).written()
                yield from (f"--{name.replace('_', '-')}", printable(f"{task}{player}"))


def _rows(
    config: TrainConfig, material: TrainingData, summary: Mapping[str, Any]
) -> Iterator[Cells]:
    tasks = summary.get("provenance", {}).get("tasks", {})
    for name, task in material.tasks.items():
        rows, dev = (tasks.get(name, {}).get(part) or {} for part in ("rows", "dev_rows"))
        source = config.data.get(name)
        yield (
            name, rows.get("n", "–"), f"`{rows.get('sha256', '–')}`", dev.get("n", 0),
            f"`{_plain(source)}`" if source else RELEASES["train"],
            task.spec.licence or "not stated",
        )  # fmt: skip


def _sources(config: TrainConfig, corpus: Corpus, summary: Mapping[str, Any]) -> Iterator[Cells]:
    tasks = summary.get("provenance", {}).get("tasks", {})
    for one in source_facts(config, corpus):
        rows = tasks.get(one["name"], {}).get("rows") or {}
        digest = f"`{rows.get('sha256', '–')}`"
        size = "unknown" if one["rows"] is None else one["rows"]
        yield _plain(one["name"]), size, digest, one["side"], f"{one['ratio']:g}"


def _figures(summary: Mapping[str, Any]) -> Iterator[Cells]:
    """Headlines, losses and rewards, each with its interval and judge."""
    for task, cells in summary.get("tasks", {}).items():
        for name, cell in cells.items():
            if "/" in name and name != "value/kind=refined":
                continue
            mean = estimate_text(cell.get("mean"), cell.get("ci_low"), cell.get("ci_high"))
            scored = cell.get("not_applicable") or f"{cell.get('n_scored')}/{cell.get('n')}"
            lacks = missing_parts_text(Cell.from_json(cell))
            scored += f"; {lacks}" if lacks else ""
            judge = "–" if name == "loss" else _judges(summary, task)
            yield task, _label(name, cells, summary), mean, scored, judge


def _validated(summary: Mapping[str, Any]) -> Iterator[Cells]:
    """A row for every source of validation conversations."""
    valid = summary.get("validation") or {}
    for name, loss in valid.get("last", {}).items():
        label = f"validation loss (step {valid['steps']})"
        lessons = valid.get("lessons", {}).get(name, "–")
        yield _plain(name), label, f"{loss:.3f}", lessons, "–"


def _label(metric: str, cells: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    mean, dev = (cells.get(name, {}).get("name", "") for name in ("value", "dev"))
    names = {
        "value": f"{mean} drafts", "value/kind=refined": f"{mean} refined rollouts",
        "dev": f"{dev} dev (step {summary.get('dev_steps')})",
        "loss": "loss, of all tasks" if len(summary.get("tasks", {})) > 1 else "loss",
    }  # fmt: skip
    if summary.get("lessons"):  # of conversations each source has its own
        names["loss"] = "training loss"
    return names.get(metric, metric).strip()


def _row(cells: Cells) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _judges(summary: Mapping[str, Any], task: str) -> str:
    entry = summary.get("provenance", {}).get("tasks", {}).get(task, {})
    players = entry.get("players", {}).get("judge", []) if "judge" in entry.get("roles", ()) else []
    names = dict.fromkeys(_plain(str(one.get("model"))) for one in players)
    return " and ".join(f"`{name}`" for name in names) or "rules"


def _plain(name: str) -> str:
    return Path(name).name if name.startswith(("/", "~")) or "\\" in name else name
