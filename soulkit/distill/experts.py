"""Experts: found by the files beside their weights, checked, and put on one base.

    DIR/…/soulkit.json            an adapter or a model that soulkit saved: its task stands there
    DIR/…/config.yaml …           a training run: its best/, else its model/
    TASK=FOLDER                   one of either, or any adapter of PEFT's, for that task
    TASK=endpoint:MODEL@URL       one that is served; of its base nothing is known

Folders are searched at any depth, symbolic links included; their names do not count. What lies
inside a run or a model is part of it. Experts become one model only if they began as one: their
bases are compared by weights or commit, their tokenizers by what they do to a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.distill.config import ANY, DistillConfig
from soulkit.errors import ConfigError, ModelLoadError, did_you_mean
from soulkit.models.local.loading import (
    ADAPTER_CONFIG,
    NOTE,
    adapter_folder,
    first_line,
    model_place,
)
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.settings import RoleSettings, TaskPlayers
from soulkit.runs.folder import is_run, read_environment
from soulkit.runs.jsonl import read_object
from soulkit.tasks.kit.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base as somebody named it."""

    where: str
    """An absolute folder, or the hub's id."""
    revision: str = ""
    """A commit of the hub; empty where it is not known, and of folders."""
    weights: str = ""
    """`weights_hash` when it was named; empty where nobody took one."""

    @property
    def name(self) -> str:
        """As a model is named on the command line."""
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def is_folder(self) -> bool:
        return Path(self.where).is_absolute()

    @property
    def here(self) -> Path | None:
        """Its folder on this machine, or in the cache of the hub's client; None without one."""
        if self.is_folder:
            return Path(self.where) if Path(self.where).is_dir() else None
        return _cached(self.where, self.revision or None)

    def now(self) -> str:
        """The print of the weights that lie there now; empty where none do."""
        return "" if self.here is None else weights_hash(self.here)

    @property
    def proof(self) -> str:
        """What tells it from another: the print of its weights, else its name."""
        return self.weights or self.now() or self.name


def named_base(name: str) -> Base:
    """The base that a setting names, with the weights that lie there; ModelLoadError for a folder
    that does not."""
    place = model_place(name)
    if not place.on_hub:
        folder = Path(place.where).resolve()
        return Base(where=str(folder), weights=weights_hash(folder))
    return Base(where=place.where, revision=place.revision or "")


def base_of_note(note: Mapping[str, Any]) -> Base:
    """The base as `soulkit.json` has it: {"model": …, "revision" or "weights": …}."""
    base = note.get("base")
    base = base if isinstance(base, Mapping) else {}
    return Base(
        where=str(base.get("model") or ""), revision=str(base.get("revision") or ""),
        weights=str(base.get("weights") or ""),
    )  # fmt: skip


def base_of_adapter(settings: Mapping[str, Any]) -> Base:
    """The base as `adapter_config.json` has it."""
    name = str(settings.get("base_model_name_or_path") or "")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return Base(where=str(folder.resolve()))
    return Base(where=name, revision=str(settings.get("revision") or ""))


def same_base(one: Base, other: Base) -> bool | None:
    """Whether two bases have the same weights; None where nobody can tell."""
    if one.revision and (one.where, one.revision) == (other.where, other.revision):
        return True
    weights = one.weights or one.now(), other.weights or other.now()
    if all(weights):
        return weights[0] == weights[1]
    if one.where != other.where:
        return None if one.is_folder != other.is_folder else False
    return None if one.is_folder or one.revision != other.revision else True


def _cached(where: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(where, "config.json", revision=revision)
    except ValueError:  # no name of the hub's
        return None
    return Path(config).parent if isinstance(config, str) else None


SERVED = "endpoint:"
"""What stands before the name of a served expert, in the place of a folder."""
WEIGHTS = ("best", "model")
"""Where a training run keeps what it ends with, the best by its dev score first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder with weights, and for which task it was named, if for one."""

    folder: Path
    task: str = ""
    origin: str = ""
    """The run that it is the outcome of."""


def expert_candidates(config: DistillConfig) -> Iterator[Candidate]:
    """Those that are named for a task, then those that are found and not named."""
    named = {t: w for t, w in config.experts.items() if t != ANY and not w.startswith(SERVED)}
    settled = [_weights_of(_folder(where), task) for task, where in named.items()]
    yield from settled
    if ANY in config.experts and not config.experts[ANY].startswith(SERVED):
        root = Path(config.experts[ANY]).expanduser()
        if not root.is_dir():
            beside = [p.name for p in root.parent.glob("*/")]
            raise ConfigError(
                f"There is no folder '{root}' with experts.",
                "An expert is an adapter, a model or a training run, in a folder of its own.",
                did_you_mean(root.name, beside) if beside else "Check the path.",
            )
        taken = {one.folder.resolve() for one in settled}
        taken |= {Path(one.origin).resolve() for one in settled if one.origin}
        there = [one for one in _found_in(root, set()) if one.resolve() not in taken]
        if not there and not config.experts.keys() - {ANY}:
            raise ConfigError(
                f"There is no expert in '{root}'.",
                f"No folder below it is a training run, or holds {NOTE} or {ADAPTER_CONFIG}.",
                "Train one with: soul train ditto --task TASK …; or name a folder: "
                "--experts TASK=FOLDER",
            )
        yield from (c for c in map(_weights_of, there) if c.folder.resolve() not in taken)


def _folder(where: str) -> Path:
    place = model_place(where, "adapter")
    return adapter_folder(where) if place.on_hub else Path(place.where)


def _found_in(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Folders of runs and weights below `folder`, each place once, in order of their names."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if is_run(folder):
        if str(read_environment(folder).get("command", "")).startswith("train"):
            yield folder
    elif (folder / NOTE).is_file() or (folder / ADAPTER_CONFIG).is_file():
        yield folder
    else:
        inner = (path for path in folder.iterdir() if not path.name.startswith("."))
        for path in sorted(path for path in inner if path.is_dir()):
            yield from _found_in(path, seen)


def _weights_of(folder: Path, task: str = "") -> Candidate:
    if not is_run(folder):
        return Candidate(folder, task)
    for name in WEIGHTS:
        if (folder / name).is_dir():
            return Candidate(folder / name, task, str(folder))
    raise ConfigError(
        f"The run '{folder}' has not ended: there is no model in it yet.",
        "Without it its task would have no expert, and nobody would notice.",
        "Let it end by giving its command again, move it elsewhere, or name a checkpoint: "
        f"--experts TASK={folder}/checkpoints/STEP",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """The rows of one task, by id: what the generalist learns from, and what is held out."""

    source: str | None
    """As --data names them; None: the pulled training files."""
    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    """In ascending order; empty where --held-out names rows, or nothing could be set aside."""
    clusters: tuple[str, ...] = ()
    """Of the held-out rows, in ascending order."""
    run: str = ""
    """The training run of the expert that the rows were taken from; empty for --data and pulled
    files."""
    dev: bool = False
    """Whether the held-out rows are the dev rows of that run."""
    foreign: bool = False
    """Whether the run is not known to be the user's own."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert of one task, checked: its files fit each other and those of the other experts."""

    task: str
    folder: Path | None = None
    """Where its weights lie; None of a served one."""
    adapter: Path | None = None
    """`folder` where it is an adapter; None of a model with weights of its own, or a served one."""
    base: str = ""
    """Folder or hub id (owner/name@revision) of what it was trained from; "" of a served one."""
    base_print: str = ""
    """What tells the weights of the base; "" of a served one."""
    tokenizer_print: str = ""
    """What tells what its tokenizer does to a text; "" of a served one."""
    template_print: str = ""
    """What tells its chat template; "" of a served one."""
    weights: str = ""
    """What tells its own weights; "" of a served one."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """What soulkit.json beside the weights says; empty of a foreign adapter."""
    endpoint: RoleSettings | None = None
    rows: ExpertRows | None = None
    """Rows that the command does not name; None: those of --data and --held-out."""
    players: TaskPlayers | None = None
    """Players of its training, for roles that the command leaves open."""
    remarks: tuple[str, ...] = ()
    """What is to be said of it before it is used."""

    @property
    def model(self) -> str:
        """What is loaded, or its name on its server."""
        if self.endpoint is not None:
            return self.endpoint.model
        return self.base if self.adapter is not None else str(self.folder and self.folder.resolve())

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"'{self.folder}'" if self.endpoint is None else self.endpoint.written()


def find_experts(config: DistillConfig) -> tuple[Expert, ...]:
    """The experts that `config` names, in the order of their tasks' names.

    ConfigError or ModelLoadError, by name, for whatever keeps them from becoming one model.
    """
    registry = config.registry()
    experts, bases = _distinct(config)
    for expert in experts:
        _check_task(expert, registry)
    experts = _on_one_base(sorted(experts, key=lambda one: one.task), bases, config)
    _one_tokenizer([one for one in experts if one.endpoint is None])
    _check_names("--data", config.data, experts)
    _check_names("--held-out", config.held_out, experts)
    return tuple(experts)


def _distinct(config: DistillConfig) -> tuple[list[Expert], dict[str, Base]]:
    """One expert a task and the base of each; what was named for a task goes first."""
    experts: dict[str, Expert] = {one.task: one for one in _served(config)}
    bases: dict[str, Base] = {}
    for candidate in expert_candidates(config):
        expert, base = _expert(candidate, config)
        first = experts.get(expert.task)
        if first is not None and expert.task not in config.experts:
            raise ConfigError(
                f"There are two experts for '{expert.task}': {first.name} and {expert.name}.",
                "A task is taught by one of them, and nobody says by which.",
                f"Name it, and the other stays aside: --experts {expert.task}={expert.folder}",
            )
        if first is not None:
            line = f"{expert.name} stays aside: another expert of {expert.task} was named"
            experts[expert.task] = replace(first, remarks=(*first.remarks, line))
            continue
        experts[expert.task], bases[expert.task] = expert, base
    return list(experts.values()), bases


def common_base(experts: Sequence[Expert], config: DistillConfig) -> str:
    """The base that a generalist is trained from; ConfigError where all experts are served and
    --model names none."""
    name = next((one.base for one in experts if one.base), None) or config.model
    if name is None:
        raise ConfigError(
            "Nothing says from which base the generalist is to be trained.",
            "All experts are served, and a server does not tell what a model was made from.",
            "Name it: --model FOLDER or owner/name",
        )
    return name


def _served(config: DistillConfig) -> Iterator[Expert]:
    for task, where in config.experts.items():
        if where.startswith(SERVED):
            if task == ANY:
                raise ConfigError(
                    f"'{where}' does not say whose expert it is.",
                    "A served model has no files that could tell its task.",
                    f"Write --experts TASK={where}",
                )
            yield Expert(task=task, endpoint=RoleSettings.model_validate(where))


# -- what one is ---------------------------------------------------------------------------------


def _expert(candidate: Candidate, config: DistillConfig) -> tuple[Expert, Base]:
    from soulkit.models.local.loading import adapter_hash

    folder = candidate.folder.resolve()
    note = read_object(folder / NOTE)
    if not note and not candidate.task:
        raise ConfigError(
            f"'{candidate.folder}' does not say whose expert it is: there is no {NOTE} in it.",
            "The task is read from the metadata of the weights; a folder's name may be anything.",
            f"Name its task: --experts TASK={candidate.folder}",
        )
    settings = read_object(folder / ADAPTER_CONFIG)
    base = base_of_note(note) if note else base_of_adapter(settings)
    if not settings and not note:
        raise ConfigError(
            f"'{candidate.folder}' is no expert.",
            f"It holds neither {ADAPTER_CONFIG} nor {NOTE}: a model of unknown base cannot be told "
            "from a stranger's.",
            "Name the folder of an adapter, of a model that soulkit saved, or of a training run.",
        )
    if settings:
        _check_adapter(folder)
    task, remarks = _task_of(candidate, note, config)
    weights = adapter_hash(folder) if settings else Base(where=str(folder)).now()
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    rules, template = _prints(str(folder)) if has_tokenizer else ("", "")
    expert = Expert(
        task=task, folder=candidate.folder, adapter=folder if settings else None,
        tokenizer_print=rules, template_print=template, weights=weights, note=note, remarks=remarks,
    )  # fmt: skip
    return expert, base


def _task_of(
    candidate: Candidate, note: Mapping[str, Any], config: DistillConfig
) -> tuple[str, tuple[str, ...]]:
    """The task that somebody named or the note holds, and what is to be said about it."""
    tasks = note.get("tasks")
    learned = sorted(tasks) if isinstance(tasks, Mapping) else []
    if not candidate.task and len(learned) != 1:
        named = f"{len(learned)} tasks: {', '.join(learned)}" if learned else "no task"
        first, where = learned[0] if learned else "TASK", candidate.folder
        raise ConfigError(
            f"'{where}' is no expert of one task: its {NOTE} names {named}.",
            "Which of them it is to teach nobody can tell.",
            f"Say for which tasks it stands: --experts {first}={where}; or move it elsewhere.",
        )
    task, lines = candidate.task or learned[0], []
    if learned and learned != [task]:
        lines.append(f"the expert of {task}, '{candidate.folder}', learned {', '.join(learned)}")
    if candidate.origin and candidate.folder.name == WEIGHTS[0]:
        lines.append(
            f"the expert of {task} is the best of its run by dev score, '{candidate.folder}'"
        )
    if note.get("protocol", config.protocol) != config.protocol:
        lines.append(
            f"the expert of {task} learned under the protocol {note['protocol']}, and its samples "
            f"are scored under {config.protocol}"
        )
    return task, tuple(lines)


def _prints(where: str, revision: str = "") -> tuple[str, str]:
    file = Path(where) / "tokenizer.json"
    return _prints_at(where, revision, file.stat().st_mtime_ns if file.is_file() else 0)


@cache
def _prints_at(where: str, revision: str, changed: int) -> tuple[str, str]:
    """Of a large vocabulary a second's work; `changed` is when its file was written."""
    from transformers import AutoTokenizer

    from soulkit.models.local.chat_template import tokenizer_hash
    from soulkit.models.local.loading import quieten

    quieten()
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, revision=revision or "main")
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(
            f"The tokenizer of '{where}' cannot be loaded.",
            f"transformers says: {first_line(error)}",
            "Save it there with save_pretrained, or leave its files out of the adapter's folder.",
        ) from error
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    return tokenizer_hash(tokenizer), template


def _check_adapter(folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from soulkit.models.local.weights import ADAPTER_FILE, broken_weights, weights_misfit

    try:
        fault = weights_misfit(broken=broken_weights(load_file(folder / ADAPTER_FILE)))
    except (OSError, SafetensorError) as error:
        fault = str(error)
    if fault:
        raise ModelLoadError(
            f"The expert '{folder}' cannot be used: {fault}.",
            "What it would say is nonsense, and a generalist would learn it.",
            "Take an earlier checkpoint of its training, or leave it out.",
        )


# -- whether they go together --------------------------------------------------------------------


def _check_task(expert: Expert, registry: Registry) -> None:
    try:
        registry.spec(expert.task)
    except ConfigError as error:
        raise ConfigError(
            f"The expert {expert.name} is one of '{expert.task}', which is no task here.",
            error.why,
            f"{error.way_out} Of a task of your own: --tasks FILE",
        ) from error
    registry.refuse_rows_only([expert.task])
    registry.refuse_evaluation_only([expert.task])


def _check_names(flag: str, settings: Mapping[str, str], experts: Sequence[Expert]) -> None:
    names = [one.task for one in experts]
    for name in settings.keys() - {ANY, *names}:
        raise ConfigError(
            f"{flag} has rows for '{name}', which no expert is for.",
            "They would be ignored.",
            did_you_mean(name, names),
        )


def _on_one_base(
    experts: Sequence[Expert], bases: Mapping[str, Base], config: DistillConfig
) -> list[Expert]:
    if not bases:
        return list(experts)
    asked = named_base(config.model) if config.model else None
    first_task = next(one.task for one in experts if one.task in bases)
    common = asked or bases[first_task]
    _check_there(common, next(one for one in experts if one.task == first_task))
    settled = []
    for expert in experts:
        if expert.task not in bases:
            settled.append(expert)
            continue
        base, remarks = bases[expert.task], expert.remarks
        same = same_base(base, common)
        if same is False:
            owner = "--model" if asked else f"the expert of {first_task}"
            raise ModelLoadError(
                f"The expert of {expert.task}, {expert.name}, was trained from another base than "
                f"{owner} names: {base.name} ({base.proof}) instead of {common.name} "
                f"({common.proof}).",
                "What its adapter adds belongs to other weights, and one generalist has one base.",
                "Train it again from the common base, or distil it apart from the others.",
            )
        if same is None and base.name != common.name:
            unsure = f"nobody can tell whether the expert of {expert.task} was trained from "
            remarks = (*remarks, f"{unsure}{common.name}: it names {base.name or 'no base'}")
        expert = replace(expert, base=common.name, base_print=common.proof, remarks=remarks)
        settled.append(_with_tokenizer(expert, common))
    return settled


def _check_there(base: Base, expert: Expert) -> None:
    """ModelLoadError for a base that is gone, or holds other weights than it did."""
    if not base.where:
        raise ModelLoadError(
            f"The expert {expert.name} does not say from which base it was trained.",
            "An adapter is a change to a base, and means nothing without it.",
            "Name the base: --model FOLDER or owner/name",
        )
    if base.is_folder and base.here is None:
        raise ModelLoadError(
            f"The base '{base.where}' of the expert {expert.name} is not there.",
            "Experts and generalist are changes to one base.",
            "Bring it back, or say where it is now: --model FOLDER",
        )
    if base.is_folder and base.weights and base.weights != base.now():
        raise ModelLoadError(
            f"The base '{base.where}' holds other weights than when {expert.name} was trained.",
            "An adapter on another base is another model.",
            "Bring the old weights back, or say where they are now: --model FOLDER",
        )


def _with_tokenizer(expert: Expert, base: Base) -> Expert:
    """The expert with its tokenizer; ModelLoadError where that is another than its base has."""
    if expert.adapter is None and expert.tokenizer_print:
        return expert
    rules, template = _prints(base.where, base.revision)
    if expert.tokenizer_print and expert.tokenizer_print != rules:
        raise _other_tokenizer(expert, f"its base '{base.name}'", "vocabulary")
    if expert.template_print and expert.template_print != template:
        raise _other_tokenizer(expert, f"its base '{base.name}'", "chat template")
    return replace(expert, tokenizer_print=rules, template_print=template)


def _one_tokenizer(experts: Sequence[Expert]) -> None:
    for expert in experts[1:]:
        first = experts[0]
        if expert.tokenizer_print != first.tokenizer_print:
            raise _other_tokenizer(expert, f"the expert of {first.task}", "vocabulary")
        if expert.template_print != first.template_print:
            raise _other_tokenizer(expert, f"the expert of {first.task}", "chat template")


def _other_tokenizer(expert: Expert, other: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The expert of {expert.task}, {expert.name}, has another {what} than {other}.",
        "The ids that it says would mean something else to the generalist.",
        "Train it again with the tokenizer of the base, or distil it apart from the others.",
    )
