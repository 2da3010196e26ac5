"""What a settings file needs: its command, what is missing, and the models it would call.

config.yaml of a run, or a file for --config ──▶ its command ──▶ gaps, and parts: settings with
                                                                 their players and the first row
                                                                 of each task
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.doctor.checks import CheckLine, Health, line
from soulkit.errors import ConfigError, MissingPackage, UserError, did_you_mean
from soulkit.eval.config import EvalConfig, left_out, work_and_missing
from soulkit.eval.run.actor import starts_servers
from soulkit.models.api.addresses import checked_url
from soulkit.models.players.settings import RoleSettings
from soulkit.play.default_players import with_default_players
from soulkit.play.plan import Work
from soulkit.play.requirements import (
    WORDS,
    MissingRequirement,
    RequirementsNotMet,
    left_out_lines,
    missing_checkpoints,
    missing_engine,
    missing_keys,
    missing_model,
    missing_roles,
    missing_services,
)
from soulkit.play.settings import PlayConfig
from soulkit.runs.folder import CONFIG
from soulkit.text import byte_size

if TYPE_CHECKING:
    from soulkit.train.config import TrainConfig
    from soulkit.train.setup.rows import TrainingData

PART = "settings"
COMMANDS = ("eval api", "eval local", "train METHOD", "distill")
SERVED = frozenset({"base_url", "api_key_env", "headers", "api_version"})
LOCAL = frozenset({"adapter", "device", "dtype", "quantize", "batch_size", "threads", "engine"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPart:
    """Tasks that are played with one configuration, with one row per task."""

    config: PlayConfig
    work: tuple[Work, ...]
    coached: bool = False
    """Whether the part also asks for feedback."""

    @property
    def served_actor(self) -> RoleSettings | None:
        """The model under test as a player, if a server hosts it."""
        config = self.config
        served = isinstance(config, EvalConfig) and config.kind == "api"
        return config.endpoint() if isinstance(config, EvalConfig) and served else None


@dataclass(kw_only=True)
class Needs:
    """What a settings file needs."""

    command: str
    lines: list[CheckLine] = field(default_factory=list)
    parts: list[TrialPart] = field(default_factory=list)
    config: PlayConfig | None = None

    @property
    def extras(self) -> set[str]:
        """The extras that the command cannot run without."""
        loads = self.config is not None and bool(self.config.checkpoints())
        return {"train"} if loads or self.command != "eval api" else set()

    @property
    def keys(self) -> set[str]:
        """NAMES of the environment variables that hold the players' keys."""
        return {who.api_key_env for part in self.parts for _, who in part.config.served()}

    @property
    def connections(self) -> int:
        """Maximum number of connections open at once."""
        return max((_connections(part.config) for part in self.parts), default=0)


def _connections(config: PlayConfig) -> int:
    """Each server gets one connection per concurrent request."""
    servers = {(checked_url(who.base_url), who.model) for _, who in config.served()}
    engine = config.engine_choice
    own = {*config.checkpoints("vllm"), *([config.model] if engine.kind == "vllm" else ())}
    vllm = len(own) + max(len(engine.urls) - 1, 0)
    return config.concurrency * len(servers) + config.batch_size * vllm


# -- which command ---------------------------------------------------------------------------------


def settings_file(path: Path) -> Path:
    """The settings file: `path` itself, or the config.yaml of a run folder."""
    return path / CONFIG if path.is_dir() else path


def command_for(settings: Mapping[str, Any], named: str | None = None) -> str:
    """The command that settings are for: `eval api`, `train grpo` …

    `named` is the value of --for. ConfigError if neither names the command.
    """
    kind, method = settings.get("kind"), settings.get("method")
    if named:
        return _checked_command(named)
    if "experts" in settings:
        return "distill"
    if method is not None:
        return f"train {method}"
    if kind in ("api", "local"):
        return f"eval {kind}"
    served, local = SERVED & settings.keys(), LOCAL & settings.keys()
    if bool(served) != bool(local):
        return "eval api" if served else "eval local"
    raise ConfigError(
        "The settings do not say which command they belong to.",
        "The config.yaml of a run names its command; a settings file of your own may not.",
        f"Add --for with one of: {', '.join(COMMANDS)}.",
    )


def _checked_command(text: str) -> str:
    words = text.split()
    known = {name.split()[0] for name in COMMANDS}
    fits = words[:1] == ["distill"] or len(words) == 2
    if fits and words[0] in known and (words[0] != "eval" or words[1] in ("api", "local")):
        return " ".join(words[:2])
    raise ConfigError(
        f"soul doctor cannot check the command '{text}'.",
        "It checks evaluations, training and distillation.",
        f"Set --for to one of: {', '.join(COMMANDS)}. {did_you_mean(text, COMMANDS)}",
    )


def needs_of(file: Path, flags: Mapping[str, Any], named: str | None, *, trust: bool) -> Needs:
    """What the settings in `file` need. UserError if they cannot be read or are not trusted."""
    from soulkit.config import read_settings_file

    needs = Needs(command=command_for(read_settings_file(file), named))
    group, _, rest = needs.command.partition(" ")
    look = {"eval": _evaluation, "train": _training, "distill": _distillation}[group]
    try:
        named_there = {"eval": {"kind": rest}, "train": {"method": rest}}.get(group, {})
        look(needs, file, {**flags, **named_there}, trust)
    except ModuleNotFoundError as error:
        missing = MissingPackage.of(error, f"soul {needs.command}")
        if missing is None:
            raise
        needs.lines.append(CheckLine.of_error(PART, "package", missing))
    return needs


# -- evaluations -----------------------------------------------------------------------------------


def _evaluation(needs: Needs, file: Path, flags: Mapping[str, Any], trust: bool) -> None:
    config = EvalConfig.load(file, flags=flags, trust=trust)
    needs.config = config
    _look_at_evaluation(needs, config)


def _look_at_evaluation(needs: Needs, config: EvalConfig) -> None:
    try:
        registry = config.registry()
        work, gaps = work_and_missing(config, registry)
        config = with_default_players(config, work, registry, suite=config.suite)
    except UserError as error:
        needs.lines.append(CheckLine.of_error(PART, "tasks", error))
        return
    gaps += missing_roles(work, config) + missing_services(work) + missing_keys(config)
    gaps += missing_checkpoints(config) + missing_engine(config, actor=starts_servers(config))
    gaps += missing_model(config.model, config.adapter) if config.kind == "local" else []
    needs.lines += gap_lines(gaps)
    needs.lines += _work_lines(work)
    for remark in left_out_lines(config.suite, left_out(config, work)) if config.playable else ():
        needs.lines.append(line(PART, "left out", "note", remark))
    if config.ledger != "replay":  # a replay calls no model
        first = (replace(part, examples=part.examples[:1]) for part in work if part.examples)
        needs.parts.append(TrialPart(config=config, work=tuple(first)))


def _work_lines(work: Sequence[Work]) -> Iterator[CheckLine]:
    rows = ", ".join(f"{part.task.name} {len(part.examples)}" for part in work if part.examples)
    if rows:
        yield line(PART, "rows", "ok", rows)
    for part in work:
        for remark in part.task.remarks():
            yield line(PART, part.task.name, "note", remark)
        if part.bad:
            first = part.bad[0]
            words = f"{len(part.bad)} bad rows will be skipped; the first is {first.source}"
            yield line(PART, part.task.name, "note", f"{words}: {first.why}")


def gap_lines(gaps: Sequence[MissingRequirement]) -> Iterator[CheckLine]:
    """One line per missing requirement."""
    for gap in gaps:
        health: Health = "problem" if gap.fatal else "note"
        words = f"{WORDS[gap.kind]} {gap.name}"
        yield line(PART, gap.kind, health, words, gap.way_for([gap.name]))


# -- trainings -------------------------------------------------------------------------------------


def _training(needs: Needs, file: Path, flags: Mapping[str, Any], trust: bool) -> None:
    from soulkit.train.config import TrainConfig

    config = TrainConfig.load(file, flags=flags, trust=trust)
    needs.config = config
    needs.lines.append(_memory_line(config))
    material = _material(needs, config)
    if material is None:
        return
    for remark in material.remarks():
        needs.lines.append(line(PART, "rows", "note", remark))
    played = material if material.objective is not None else material.measured
    if played is None:
        words = "none: supervised training calls no other model"
        needs.lines.append(line(PART, "players", "ok", words))
        return
    first = {task.name: Work(task, (row,)) for task, row in reversed(played.pool)}
    work = tuple(first[name] for name in played.tasks if name in first)
    coached = played.objective is not None and played.objective.uses_feedback
    needs.parts.append(TrialPart(config=played.config, work=work, coached=coached))


def _memory_line(config: TrainConfig) -> CheckLine:
    from soulkit.train.planning import imitation_machine

    machine = imitation_machine(config, 0)
    if machine is None:
        words = f"the size of {config.model} is unknown before it is downloaded"
        return line(PART, "memory", "note", words)
    fits, _, way = machine.fit.partition(": ")
    health: Health = "problem" if fits.startswith("does not") else "ok"
    return line(PART, "memory", health, f"about {byte_size(machine.memory)}; {fits}", way)


def _material(needs: Needs, config: TrainConfig) -> TrainingData | None:
    """The training data; adds lines for what is missing. None if nothing can be loaded."""
    from soulkit.train.setup.data import load_training_data

    try:
        return load_training_data(config, asking=True)
    except RequirementsNotMet as error:
        needs.lines += gap_lines(error.gaps)
    except UserError as error:
        needs.lines.append(CheckLine.of_error(PART, "training", error))
    try:
        return load_training_data(config)  # other players can be asked without the key or model
    except UserError:
        return None


# -- distillations ---------------------------------------------------------------------------------


def _distillation(needs: Needs, file: Path, flags: Mapping[str, Any], trust: bool) -> None:
    from soulkit.distill.config import DistillConfig
    from soulkit.distill.experts import find_experts
    from soulkit.distill.sample import sample_config

    config = DistillConfig.load(file, flags=flags, trust=trust)
    needs.config = config
    try:
        experts = find_experts(config)
    except UserError as error:
        needs.lines.append(CheckLine.of_error(PART, "experts", error))
        return
    for expert in experts:
        words = f"{expert.task}: {expert.name}"
        needs.lines.append(line(PART, "expert", "ok", words))
        _look_at_evaluation(needs, sample_config(config, expert))
