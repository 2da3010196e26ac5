"""What stands beside saved weights: the model card README.md and the note `soulkit.json`.

The card says what was trained on which rows and how, what came out and who judged it, how to load
it, and under which licences. It holds no path of this machine except those that were typed. The
note is for programs that load, judge or distil the weights later:

{"schema": "soulkit/model@1", "soulkit": "0.1.0", "kind": "adapter",
 "method": "ditto", "protocol": "paper", "tasks": {"TASK": 1.0},
 "corpora": [{"name": "chats.jsonl", "side": "human", "ratio": 1.0, "rows": 1200}],  if any
 "base": {"model": "owner/name", "revision": "4c1d…",       or a folder and its "weights"
              "licence": {"license": "apache-2.0"}},
 "adapter": {"model": "runs/a/model", "weights": "9f…"},    what was trained further, if any
 "step": 50}
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    commit_of,
    is_peft,
    model_place,
)
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.settings import RoleSettings
from soulkit.runs.jsonl import write_aside
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.setup.conversations import Corpus, source_facts
from soulkit.train.setup.rows import TrainingData
from soulkit.train.state.summary import AbilityTotals, WrittenTotals
from soulkit.version import __version__

SCHEMA = "soulkit/model@1"


def model_note(config: TrainConfig, policy: Policy, corpus: Corpus | None = None) -> dict[str, Any]:
    """All of the note but the step; `corpus` is what was learned in the place of tasks."""
    base = base_of(policy.model)
    if "revision" not in base and Path(base["model"]).is_dir():
        base["weights"] = weights_hash(Path(base["model"]))
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
"""Settings that the command names itself, or that say nothing about the weights."""


def write_card(
    folder: Path, config: TrainConfig, material: TrainingData, policy: Policy,
    summary: Mapping[str, Any], step: int,
) -> None:  # fmt: skip
    """Write the card of the weights in `folder`, those after `step`; `summary` is the run's."""
    note = policy.note or {}
    text = "\n".join(
        [
            *_front(config, note),
            *_head(config, note, summary, step),
            *_data(config, material, summary),
            *_metrics(summary),
            *_loading(note, auto_class(policy.causal.config).__name__),
            *_licences(note),
        ]
    )
    write_aside(folder / CARD, text.encode())


# --- what the hub reads ---------------------------------------------------------------------------


def _front(config: TrainConfig, note: Mapping[str, Any]) -> Iterator[str]:
    import yaml

    adapter, base = note.get("kind") == "adapter", note.get("base", {})
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    if not Path(base.get("model", "")).is_absolute():  # the hub knows ids alone
        front["base_model"] = base.get("model", "")
        front["base_model_relation"] = "adapter" if adapter else "finetune"
    front |= base.get("licence", UNSTATED)
    front["pipeline_tag"] = "text-generation"
    lora = ["lora"] if adapter else []
    front["tags"] = ["soulkit", "human-simulation", config.method, *lora, *config.tasks]
    if on_hub := [m["repo"] for one in config.corpora if (m := hub_address(one.path))]:
        front["datasets"] = list(dict.fromkeys(on_hub))
    if any(config.data.get(name) is None for name in config.tasks):
        front["datasets"] = [RELEASES["train"]]
    yield "---"
    yield yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip()
    yield "---\n"


# --- what people read -----------------------------------------------------------------------------


def _head(
    config: TrainConfig, note: Mapping[str, Any], summary: Mapping[str, Any], step: int
) -> Iterator[str]:
    base, best = note.get("base", {}), summary.get("best_step")
    kind = "A LoRA adapter" if note.get("kind") == "adapter" else "A model"
    names = [*config.tasks, *(str(one["name"]) for one in note.get("corpora", ()))]
    subject = ", ".join(f"`{_plain(name)}`" for name in names)
    beside = "conversations" if config.corpora else f"under the protocol `{config.protocol}`"
    yield f"# {', '.join(map(_plain, names))}: {config.method}\n"
    yield (
        f"{kind} trained with `{config.method}` by soulkit {note.get('soulkit')} on {subject}, "
        f"{beside}; a model of how people talk, decide and err.\n"
    )
    mark = base.get("revision") or base.get("weights") or "not recorded"
    name = base.get("model", "") if "revision" in base else _plain(config.model)
    yield f"* base: `{name}` (`{mark}`)"
    if further := note.get("adapter"):
        yield f"* trained further from: `{_plain(further['model'])}` (`{further['weights']}`)"
    if teacher := summary.get("provenance", {}).get("teacher"):
        yield f"* teacher: {_teacher(teacher)}"
    measured = "validation loss" if summary.get("best_valid") is not None else "dev score"
    selected = f"; best {measured} at step {best}" if best is not None else ""
    yield f"* step {step} of {config.steps}{selected}"
    fresh = note.get("kind") == "adapter" and not further
    rank = f", LoRA rank {config.lora.r}, alpha {config.lora.alpha}" if fresh else ""
    yield f"* seed {config.seed}, learning rate {config.lr:g}{rank}"
    yield f"* command: `{_command(config, base)}`\n"


def _teacher(teacher: Mapping[str, Any]) -> str:
    """`MODEL` (commit or hash) + `ADAPTER`."""
    mark = teacher.get("revision") or teacher.get("weights")
    model = f"`{_plain(str(teacher['model']))}`" + (f" (`{mark}`)" if mark else "")
    adapter = teacher.get("adapter")
    return f"{model} + `{_plain(str(adapter))}`" if adapter else model


def _command(config: TrainConfig, base: Mapping[str, Any]) -> str:
    """The settings that are not the defaults, without folders of this machine."""
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
    """`--judge endpoint:MODEL` for everybody who plays beside the actor."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, RoleSettings):
                player = one.model_copy(update={"model": _plain(one.model)}).written()
                yield from (f"--{name.replace('_', '-')}", printable(f"{task}{player}"))


def _data(config: TrainConfig, material: TrainingData, summary: Mapping[str, Any]) -> Iterator[str]:
    yield "## Data\n"
    if material.corpus is not None:
        yield from _conversations(config, material.corpus, summary)
        return
    yield "| task | rows | sha256 | held out | source | licence |"
    yield "|---|---|---|---|---|---|"
    tasks = summary.get("provenance", {}).get("tasks", {})
    for name, task in material.tasks.items():
        rows, dev = (tasks.get(name, {}).get(part) or {} for part in ("rows", "dev_rows"))
        source = config.data.get(name)
        cells = [
            name, rows.get("n", "–"), f"`{rows.get('sha256', '–')}`", dev.get("n", 0),
            f"`{_plain(source)}`" if source else RELEASES["train"],
            task.spec.licence or "not stated",
        ]  # fmt: skip
        yield _row(*cells)
    yield "\nThe hash is of the rows' ids, in their order.\n"


def _conversations(
    config: TrainConfig, corpus: Corpus, summary: Mapping[str, Any]
) -> Iterator[str]:
    yield "| source | rows | sha256 | side learned | passes of its rows in one of the mixture |"
    yield "|---|---|---|---|---|"
    tasks = summary.get("provenance", {}).get("tasks", {})
    for one in source_facts(config, corpus):
        rows = tasks.get(one["name"], {}).get("rows") or {}
        digest = f"`{rows.get('sha256', '–')}`"
        size = "unknown" if one["rows"] is None else one["rows"]
        yield _row(_plain(one["name"]), size, digest, one["side"], f"{one['ratio']:g}")
    learned = summary.get("lessons", {})
    total = sum(n for name, n in learned.items() if name.startswith("lessons/of/"))
    prompts = "without their system prompts" if config.strip_system else "with their system prompts"
    yield f"\n{total:,} conversations were learned from, {prompts}; the words of the side that is"
    yield "learned are the only ones with a loss. The hash is of the files. Their terms are not"
    yield "known here: whoever publishes this model has to know them.\n"
    if "written" in summary:
        written = WrittenTotals.from_json(summary["written"])
        yield "The rows' own answers were not learned: before it was trained the model wrote texts"
        yield f"about their facts itself, {written.words()}.\n"


def _metrics(summary: Mapping[str, Any]) -> Iterator[str]:
    """The headlines, and the loss or reward beside them; every one with its interval and judge."""
    yield "## Metrics\n"
    yield "| task | metric | mean [95 % interval] | scored | judged by |"
    yield "|---|---|---|---|---|"
    for task, cells in summary.get("tasks", {}).items():
        for name, cell in cells.items():
            if "/" in name and name != "value/kind=refined":
                continue
            mean = estimate_text(cell.get("mean"), cell.get("ci_low"), cell.get("ci_high"))
            scored = cell.get("not_applicable") or f"{cell.get('n_scored')}/{cell.get('n')}"
            lacks = missing_parts_text(Cell.from_json(cell))
            scored += f"; {lacks}" if lacks else ""
            label = _label(name, cells, summary)
            judge = "–" if name == "loss" else _judges(summary, task)
            yield _row(task, label, mean, scored, judge)
    yield from _validated(summary)
    steps, last = summary.get("summary_steps"), summary.get("steps")
    if summary.get("command") != "train sft":
        yield f"\nDrafts and refined rollouts are of the last {steps} of the run's {last} steps, on"
        yield "training rows; `dev` is greedy, on held-out rows, after the step it names."
    if "retention" in summary:
        ability = AbilityTotals.from_json(summary["retention"])
        lost = " This is a regression." if ability.regression else ""
        yield f"\nGeneral ability, before to after: {ability.words()}.{lost}"
    yield "\nFigures of a training run are no evaluation: `soul eval` makes one.\n"


def _validated(summary: Mapping[str, Any]) -> Iterator[str]:
    """A row for every source of conversations that were measured and not learned."""
    valid = summary.get("validation") or {}
    for name, loss in valid.get("last", {}).items():
        label = f"validation loss (step {valid['steps']})"
        lessons = valid.get("lessons", {}).get(name, "–")
        yield _row(_plain(name), label, f"{loss:.3f}", lessons, "–")


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


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _judges(summary: Mapping[str, Any], task: str) -> str:
    entry = summary.get("provenance", {}).get("tasks", {}).get(task, {})
    players = entry.get("players", {}).get("judge", []) if "judge" in entry.get("roles", ()) else []
    names = dict.fromkeys(_plain(str(one.get("model"))) for one in players)
    return " and ".join(f"`{name}`" for name in names) or "rules"


def _loading(note: Mapping[str, Any], kind: str) -> Iterator[str]:
    base = note.get("base", {})
    named = repr(base.get("model", "")) if base.get("revision") else '"BASE"'
    revision = f", revision={base['revision']!r}" if base.get("revision") else ""
    yield "## Loading\n\nFOLDER is this one.\n\n```python"
    yield "from transformers import AutoTokenizer"
    if note.get("kind") != "adapter":
        yield f"from transformers import {kind}\n"
        yield f'model = {kind}.from_pretrained("FOLDER")'
    elif kind == "AutoModelForCausalLM":
        yield "from peft import AutoPeftModelForCausalLM\n"
        yield 'model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")'
    else:  # PEFT has no class of its own that reads images
        yield f"from transformers import {kind}\nfrom peft import PeftModel\n"
        yield f"base = {kind}.from_pretrained({named}{revision})"
        yield 'model = PeftModel.from_pretrained(base, "FOLDER")'
    yield 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n'
    adapter = note.get("kind") == "adapter"
    where = f"{base.get('model')}@{base['revision']}" if base.get("revision") else "BASE"
    model = f"{where} --adapter FOLDER" if adapter else "FOLDER"
    task = next(iter(note["tasks"]), "TASK")
    yield f"```sh\nsoul eval local --model {model} --task {task}\n```\n"


def _licences(note: Mapping[str, Any]) -> Iterator[str]:
    fields = note.get("base", {}).get("licence", UNSTATED)
    stated = fields.get("license_name", fields["license"])
    yield "## Licence\n"
    terms = "its own terms" if note.get("corpora") else "the terms in the table above"
    yield f"The base model's ({stated}); what was trained on has {terms}.\n"


def _plain(name: str) -> str:
    return Path(name).name if name.startswith(("/", "~")) or "\\" in name else name
