"""Experts: found by the files saved with their weights, checked, and placed on one base.

    DIR/…/soulkit.json            an adapter or model saved by soulkit; the file names its task
    DIR/…/config.yaml …           a training run: its best/, else its model/
    TASK=FOLDER                   either of these, or any PEFT adapter, for that task
    TASK=endpoint:MODEL@URL       a served expert, whose base is unknown

Folders are searched at any depth, including symbolic links; folder names do not matter. Runs and
models are not searched inside. All experts must share one base: bases are compared by weights or
commit, tokenizers by their effect on text.
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
    model_place,
)
from soulkit.models.local.weights import cached_folder, weights_hash
from soulkit.models.players.settings import RoleSettings, TaskPlayers
from soulkit.runs.folder import is_run, read_environment
from soulkit.runs.jsonl import read_object
from soulkit.tasks.kit.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base model as named in a setting or file."""

    where: str
    """An absolute folder, or a Hub id."""
    revision: str = ""
    """Commit on the Hub; empty if unknown, and for folders."""
    weights: str = ""
    """`weights_hash` at the time it was named; empty if unknown."""

    @property
    def name(self) -> str:
        """The name as used on the command line."""
        return f"{self.where}@{self.revision}" if self.revision else self.where

    @property
    def is_folder(self) -> bool:
        return Path(self.where).is_absolute()

    @property
    def here(self) -> Path | None:
        """Its folder on this machine or in the Hub cache; None without one."""
        if self.is_folder:
            return Path(self.where) if Path(self.where).is_dir() else None
        return cached_folder(self.where, self.revision or None)

    def now(self) -> str:
        """Hash of the weights that this folder holds now; empty if it holds none."""
        return "" if self.here is None else weights_hash(self.here)

    @property
    def proof(self) -> str:
        """Identity of the base: the hash of its weights, else its name."""
        return self.weights or self.now() or self.name


def named_base(name: str) -> Base:
    """The base that a setting names, with the hash of its weights; ModelLoadError for a missing
    folder."""
    place = model_place(name)
    if not place.on_hub:
        folder = Path(place.where).resolve()
        return Base(where=str(folder), weights=weights_hash(folder))
    return Base(where=place.where, revision=place.revision or "")


def base_of_note(note: Mapping[str, Any]) -> Base:
    """The base from `soulkit.json`: {"model": …, "revision" or "weights": …}."""
    base = note.get("base")
    base = base if isinstance(base, Mapping) else {}
    return Base(
        where=str(base.get("model") or ""), revision=str(base.get("revision") or ""),
        weights=str(base.get("weights") or ""),
    )  # fmt: skip


def base_of_adapter(settings: Mapping[str, Any]) -> Base:
    """The base from `adapter_config.json`."""
    name = str(settings.get("base_model_name_or_path") or "")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return Base(where=str(folder.resolve()))
    return Base(where=name, revision=str(settings.get("revision") or ""))


def same_base(one: Base, other: Base) -> bool | None:
    """Whether two bases have the same weights; None if unknown."""
    if one.revision and (one.where, one.revision) == (other.where, other.revision):
        return True
    weights = one.weights or one.now(), other.weights or other.now()
    if all(weights):
        return weights[0] == weights[1]
    if one.where != other.where:
        return None if one.is_folder != other.is_folder else False
    return None if one.is_folder or one.revision != other.revision else True


SERVED = "endpoint:"
"""Prefix of a served expert, instead of a folder."""
WEIGHTS = ("best", "model")
"""Folders with the final weights of a training run; the best by dev score comes first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder with weights, and the task that --experts names for it, if any."""

    folder: Path
    task: str = ""
    origin: str = ""
    """The run that produced it."""


def expert_candidates(config: DistillConfig) -> Iterator[Candidate]:
    """Experts named for a task, then those found in the searched folder."""
    named = {t: w for t, w in config.experts.items() if t != ANY and not w.startswith(SERVED)}
    settled = [_weights_of(_folder(where), task) for task, where in named.items()]
    yield from settled
    if ANY in config.experts and not config.experts[ANY].startswith(SERVED):
        root = Path(config.experts[ANY]).expanduser()
        if not root.is_dir():
            beside = [p.name for p in root.parent.glob("*/")]
            raise ConfigError(
                f"The folder '{root}' in --experts does not exist.",
                "Experts are adapters, models or training runs, each in its own folder.",
                did_you_mean(root.name, beside) if beside else "Check the path.",
            )
        taken = {one.folder.resolve() for one in settled}
        taken |= {Path(one.origin).resolve() for one in settled if one.origin}
        there = [one for one in _found_in(root, set()) if one.resolve() not in taken]
        if not there and not config.experts.keys() - {ANY}:
            raise ConfigError(
                f"There is no expert in '{root}'.",
                f"No folder in it is a training run or contains {NOTE} or {ADAPTER_CONFIG}.",
                "Train one with soul train ditto --task TASK …, or name a folder with "
                "--experts TASK=FOLDER",
            )
        yield from (c for c in map(_weights_of, there) if c.folder.resolve() not in taken)


def _folder(where: str) -> Path:
    place = model_place(where, "adapter")
    return adapter_folder(where) if place.on_hub else Path(place.where)


def _found_in(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Folders of runs and weights in `folder`, each once, in order of their names."""
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
        f"The run '{folder}' is unfinished and has no model yet.",
        "An unfinished run has no weights to distil.",
        "Run its command again to finish it, move it elsewhere, or name a checkpoint with "
        f"--experts TASK={folder}/checkpoints/STEP",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Ids of the training and held-out rows of one task."""

    source: str | None
    """Source in the form of --data; None: the pulled training files."""
    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    """Sorted; empty if --held-out names rows, or no rows could be held out."""
    clusters: tuple[str, ...] = ()
    """Sorted clusters of the held-out rows."""
    run: str = ""
    """The expert's training run that the rows come from; empty for --data and pulled files."""
    dev: bool = False
    """Whether the held-out rows are the dev rows of that run."""
    foreign: bool = False
    """Whether the run is of unknown origin."""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """The checked expert on one task. Hashes and folders are empty or None for a served expert."""

    task: str
    folder: Path | None = None
    """Folder of its weights."""
    adapter: Path | None = None
    """`folder` if it is an adapter; None for a full model."""
    base: str = ""
    """Folder or Hub id (owner/name@revision) of its base."""
    base_print: str = ""
    """Hash or name that identifies the base."""
    tokenizer_print: str = ""
    """Hash of its tokenizer's behaviour."""
    template_print: str = ""
    """Hash of its chat template."""
    weights: str = ""
    """Hash of its own weights."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """Content of its soulkit.json; empty for adapters from other tools."""
    endpoint: RoleSettings | None = None
    rows: ExpertRows | None = None
    """Default rows; None: use --data and --held-out."""
    players: TaskPlayers | None = None
    """Players of its training, for roles that the command does not name."""
    remarks: tuple[str, ...] = ()
    """Lines to print before it is used."""

    @property
    def model(self) -> str:
        """The model to load, or its name on the server."""
        if self.endpoint is not None:
            return self.endpoint.model
        return self.base if self.adapter is not None else str(self.folder and self.folder.resolve())

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"'{self.folder}'" if self.endpoint is None else self.endpoint.written()


def find_experts(config: DistillConfig) -> tuple[Expert, ...]:
    """The experts that `config` names, sorted by task.

    ConfigError or ModelLoadError, naming the expert, if they cannot be distilled into one model.
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
    """One expert per task, and its base; experts named for a task take precedence."""
    experts: dict[str, Expert] = {one.task: one for one in _served(config)}
    bases: dict[str, Base] = {}
    for candidate in expert_candidates(config):
        expert, base = _expert(candidate, config)
        first = experts.get(expert.task)
        if first is not None and expert.task not in config.experts:
            raise ConfigError(
                f"There are two experts for '{expert.task}': {first.name} and {expert.name}.",
                "Each task needs exactly one expert.",
                f"Choose one with --experts {expert.task}={expert.folder}; the other is ignored.",
            )
        if first is not None:
            line = f"{expert.name} is ignored: --experts names another expert for {expert.task}"
            experts[expert.task] = replace(first, remarks=(*first.remarks, line))
            continue
        experts[expert.task], bases[expert.task] = expert, base
    return list(experts.values()), bases


def common_base(experts: Sequence[Expert], config: DistillConfig) -> str:
    """The base of the generalist; ConfigError if all experts are served and --model is missing."""
    name = next((one.base for one in experts if one.base), None) or config.model
    if name is None:
        raise ConfigError(
            "The base of the generalist is unknown.",
            "All experts are served, and servers do not report the base of a model.",
            "Name the base with --model FOLDER or --model OWNER/NAME",
        )
    return name


def _served(config: DistillConfig) -> Iterator[Expert]:
    for task, where in config.experts.items():
        if where.startswith(SERVED):
            if task == ANY:
                raise ConfigError(
                    f"The task of the expert '{where}' is unknown.",
                    "A served model has no files that name its task.",
                    f"Write --experts TASK={where}",
                )
            yield Expert(task=task, endpoint=RoleSettings.model_validate(where))


# -- reading experts -----------------------------------------------------------------------------


def _expert(candidate: Candidate, config: DistillConfig) -> tuple[Expert, Base]:
    from soulkit.models.local.loading import adapter_hash

    folder = candidate.folder.resolve()
    note = read_object(folder / NOTE)
    if not note and not candidate.task:
        raise ConfigError(
            f"The task of the expert '{candidate.folder}' is unknown: it has no {NOTE}.",
            "The task is read from this file, not from the folder's name.",
            f"Name its task with --experts TASK={candidate.folder}",
        )
    settings = read_object(folder / ADAPTER_CONFIG)
    base = base_of_note(note) if note else base_of_adapter(settings)
    if not settings and not note:
        raise ConfigError(
            f"'{candidate.folder}' is not an expert.",
            f"It contains neither {ADAPTER_CONFIG} nor {NOTE}, so its base is unknown.",
            "Name the folder of an adapter, of a model saved by soulkit, or of a training run.",
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
    """The task of a candidate, named by the user or in the note, and remarks about it."""
    tasks = note.get("tasks")
    learned = sorted(tasks) if isinstance(tasks, Mapping) else []
    if not candidate.task and len(learned) != 1:
        named = f"{len(learned)} tasks: {', '.join(learned)}" if learned else "no task"
        first, where = learned[0] if learned else "TASK", candidate.folder
        raise ConfigError(
            f"'{where}' is not an expert on one task: its {NOTE} names {named}.",
            "soul cannot tell which task this expert should teach.",
            f"Name its task with --experts {first}={where}, or move it elsewhere.",
        )
    task, lines = candidate.task or learned[0], []
    if learned and learned != [task]:
        lines.append(f"the {task} expert '{candidate.folder}' was trained on {', '.join(learned)}")
    if candidate.origin and candidate.folder.name == WEIGHTS[0]:
        lines.append(
            f"the {task} expert is the checkpoint with the best dev score, '{candidate.folder}'"
        )
    if note.get("protocol", config.protocol) != config.protocol:
        lines.append(
            f"the {task} expert was trained with protocol {note['protocol']}, but its samples "
            f"are scored with protocol {config.protocol}"
        )
    return task, tuple(lines)


def _prints(where: str, revision: str = "") -> tuple[str, str]:
    file = Path(where) / "tokenizer.json"
    return _prints_at(where, revision, file.stat().st_mtime_ns if file.is_file() else 0)


@cache
def _prints_at(where: str, revision: str, changed: int) -> tuple[str, str]:
    """Cached, because a large vocabulary takes a second; `changed` is the file's time stamp."""
    from transformers import AutoTokenizer

    from soulkit.models.local.chat_template import tokenizer_hash
    from soulkit.models.local.loading import loading, quieten

    quieten()
    with loading(f"tokenizer of '{where}'"):
        tokenizer = AutoTokenizer.from_pretrained(where, revision=revision or "main")
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
            "Its replies would be nonsense, and the generalist would learn them.",
            "Use an earlier checkpoint of its training, or remove this expert.",
        )


# -- compatibility -------------------------------------------------------------------------------


def _check_task(expert: Expert, registry: Registry) -> None:
    try:
        registry.spec(expert.task)
    except ConfigError as error:
        raise ConfigError(
            f"The task '{expert.task}' of the expert {expert.name} is unknown.",
            error.why,
            f"{error.way_out} For your own task, add --tasks FILE",
        ) from error
    registry.refuse_rows_only([expert.task])
    registry.refuse_evaluation_only([expert.task])


def _check_names(flag: str, settings: Mapping[str, str], experts: Sequence[Expert]) -> None:
    names = [one.task for one in experts]
    for name in settings.keys() - {ANY, *names}:
        raise ConfigError(
            f"{flag} names rows for '{name}', but there is no expert for it.",
            "These rows would be ignored.",
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
            owner = "--model" if asked else f"the {first_task} expert"
            raise ModelLoadError(
                f"The {expert.task} expert {expert.name} was not trained on the base that "
                f"{owner} names: it was trained on {base.name} ({base.proof}), not on "
                f"{common.name} ({common.proof}).",
                "All experts of a generalist must share one base model.",
                "Train it again from the common base, or distil it separately.",
            )
        if same is None and base.name != common.name:
            unsure = f"the {expert.task} expert may not have been trained on "
            remarks = (*remarks, f"{unsure}{common.name}: it names {base.name or 'no base'}")
        expert = replace(expert, base=common.name, base_print=common.proof, remarks=remarks)
        settled.append(_with_tokenizer(expert, common))
    return settled


def _check_there(base: Base, expert: Expert) -> None:
    """ModelLoadError for a base that is missing or whose weights have changed."""
    if not base.where:
        raise ModelLoadError(
            f"The base of the expert {expert.name} is unknown.",
            "An adapter needs its base model.",
            "Name the base with --model FOLDER or --model OWNER/NAME",
        )
    if base.is_folder and base.here is None:
        raise ModelLoadError(
            f"The base '{base.where}' of the expert {expert.name} does not exist.",
            "Experts and generalist need their base model.",
            "Restore the folder, or name its new path with --model FOLDER",
        )
    if base.is_folder and base.weights and base.weights != base.now():
        raise ModelLoadError(
            f"The weights of the base '{base.where}' have changed since {expert.name} was trained.",
            "An adapter only works with the base that it was trained on.",
            "Restore the old weights, or name their new path with --model FOLDER",
        )


def _with_tokenizer(expert: Expert, base: Base) -> Expert:
    """The expert with its tokenizer; ModelLoadError if it differs from that of its base."""
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
            raise _other_tokenizer(expert, f"the {first.task} expert", "vocabulary")
        if expert.template_print != first.template_print:
            raise _other_tokenizer(expert, f"the {first.task} expert", "chat template")


def _other_tokenizer(expert: Expert, other: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The {expert.task} expert {expert.name} has a different {what} than {other}.",
        "The token ids in its replies would stand for other tokens in the generalist.",
        "Train it again with the tokenizer of the base, or distil it separately.",
    )
