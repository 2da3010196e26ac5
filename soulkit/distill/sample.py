"""Sampling: an evaluation run of every expert on the training rows of its task.

    OUT/samples/TASK/     config.yaml, episodes.jsonl, ledger.sqlite … as written by `soul eval`

Experts are loaded one at a time to save memory; experts of one base share vLLM servers, which stop
before the generalist is trained. Samples, teachers and measurements are rejected if an expert's
weights have changed since, because an expert that was trained further is another model. A training
row that overlaps an evaluation row is an error; with --exclude-overlap it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from soulkit.data.contamination import Passage, RowMatch, row_matches
from soulkit.distill.config import SAMPLES, SELECTION, DistillConfig
from soulkit.distill.experts import Expert
from soulkit.errors import DataError, ModelLoadError, RunError, UserError
from soulkit.eval.config import EvalConfig, load_work
from soulkit.eval.results.summary import summary_line
from soulkit.eval.run.actor import eval_needs, on_vllm
from soulkit.eval.run.resume import draft_keys
from soulkit.eval.run.runner import run_eval
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.footprint import free_memory
from soulkit.models.local.weights import weights_hash
from soulkit.models.vllm.manager import VllmServers, terms_of
from soulkit.models.vllm.settings import interpreter, resolve_engine
from soulkit.play.plan import Work
from soulkit.play.settings import OWN_OPTIONS, PlayConfig, configured_tasks
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import Conditions, PlayerFacts
from soulkit.runs.folder import is_run, plain_config, read_config, same_settings
from soulkit.runs.jsonl import has_lines
from soulkit.runs.records import scored_keys
from soulkit.tasks.kit.loading import NoRows, examples_to_play, passage_of
from soulkit.tasks.kit.registry import Registry


def expert_weights(expert: Expert) -> PlayerFacts:
    """The weights of an expert, as a run records them; empty for a served expert."""
    if expert.endpoint is not None:
        return PlayerFacts()
    if expert.adapter is None:
        return PlayerFacts(weights=expert.weights)
    return PlayerFacts(adapter_weights=expert.weights)


def folder_weights(model: str, adapter: str | None) -> PlayerFacts:
    """The weights of a model and its adapter; empty for those that are not local folders."""
    from soulkit.models.local.loading import adapter_hash

    folder = Path(model).expanduser()
    return PlayerFacts(
        weights=weights_hash(folder) if folder.is_dir() else "",
        adapter_weights=adapter_hash(adapter) if adapter and Path(adapter).is_dir() else "",
    )


def refuse_other_weights(folder: Path, now: PlayerFacts, name: str) -> None:
    """RunError if the run in `folder` was played with weights that `name` no longer has."""
    begun = Conditions.read(folder) if is_run(folder) else None
    if begun is not None:
        _refuse_other(folder, begun.actor, now, name)


def refuse_other_teachers(folder: Path, adapters: Mapping[str, str]) -> None:
    """RunError if the teachers of the training in `folder` had other weights than `adapters` (task
    → adapter) have now."""
    begun = Conditions.read(folder)
    for task, teacher in begun.teachers.items() if begun else ():
        now = folder_weights(teacher.model, adapters[task])
        _refuse_other(folder, teacher, now, f"the {task} expert")


def _refuse_other(folder: Path, before: PlayerFacts, now: PlayerFacts, name: str) -> None:
    pairs = [(before.weights, now.weights), (before.adapter_weights, now.adapter_weights)]
    for old, new in pairs:
        if old and new and old != new:
            raise RunError(
                f"'{folder}' was made with different weights than {name} has now.",
                f"They were {old} and are now {new}, so all results of this expert are outdated.",
                "Start a new distillation with another --out, or restore the old weights.",
            )


@contextmanager
def shared_servers(
    config: DistillConfig, configs: Sequence[EvalConfig], out: Path, reporter: Reporter
) -> Iterator[VllmServers | None]:
    """Context with vLLM servers for the evaluations `configs`, started when needed; None if none of
    them uses vLLM. Attached servers are handled by each evaluation."""
    engine = resolve_engine(
        config.engine_choice, python=interpreter(config.vllm_python), device=config.device
    )
    here = [one for one in configs if one.kind == "local"]
    if not here or not on_vllm(engine) or engine.attached:
        yield None
        return
    with VllmServers(out, terms_of(here[0]), reporter=reporter) as servers:
        for one in here:
            with suppress(ModelLoadError):  # a missing adapter is reported by its own run
                servers.expect(eval_needs(one, engine))
        yield servers


LEAST_BUDGET = 1e-6
"""Budget in US dollars if nothing is left; a budget of 0 would mean no limit."""
_OF_THE_EXPERT = frozenset(
    {"model", "adapter", "suite", "playable", "data", "option", "endpoints", "task_players"}
) | frozenset(OWN_OPTIONS)  # fmt: skip
"""Settings that are not passed unchanged to an expert's run."""


def samples_folder(out: Path, task: str) -> Path:
    """The run with the samples of a task's expert."""
    return out / SAMPLES / task


def sample_config(config: DistillConfig, expert: Expert) -> EvalConfig:
    """The evaluation that samples an expert: its training rows, `samples` times each.

    Rows that do not fit its context stay unscored. `expert.rows` overrides the rows of `config`.
    """
    registry = config.registry()
    shared = {
        name: getattr(config, name)
        for name in PlayConfig.model_fields
        if name not in _OF_THE_EXPERT and (name != "batch_size" or name in config.model_fields_set)
    }
    players = open_roles_filled(config, expert)
    source = config.rows_source(expert.task)
    rows: dict[str, Any] = {"data": {expert.task: source} if source else {}}
    if expert.rows is not None:
        rows = named_rows(expert, expert.rows.train)
    settings = EvalConfig.model_validate({
        **shared,
        **_actor(expert),
        **_machine(config),
        **_task_settings(config, expert.task, registry),
        "tasks": (expert.task,),
        **rows,
        "task_players": players,
        "split": "train",
        "repeats": config.samples,
        "temperature": config.temperature,
        "top_p": 1.0,  # sample from the distribution that the expert was trained with
        "max_tokens": config.max_tokens,
        "allow_overflow": True,
    })  # fmt: skip
    settings._foreign = config.foreign or (expert.rows is not None and expert.rows.foreign)
    return settings


def named_rows(expert: Expert, ids: Sequence[str]) -> dict[str, Any]:
    """Settings that read exactly the rows with these ids from the source of the expert's rows."""
    source = expert.rows.source if expert.rows is not None else None
    data = {expert.task: source} if source else {}
    return {"data": data, "split": "train", "example": tuple(ids), "where": {}, "limit": None}


def open_roles_filled(config: DistillConfig, expert: Expert) -> dict[str, dict[str, Any]]:
    """Task → its players: those named in the command, or else those of the expert's training."""
    named = config.task_players.get(expert.task)
    layers = [dict(one) for one in (expert.players, named) if one is not None]
    players = {role: who for layer in layers for role, who in layer.items() if who}
    return {expert.task: players} if players else {}


def _actor(expert: Expert) -> dict[str, Any]:
    served = expert.endpoint
    if served is None:
        adapter = None if expert.adapter is None else str(expert.adapter)
        return {"kind": "local", "model": expert.model, "adapter": adapter}
    names = ("base_url", "api_key_env", "headers", "api_version", "price_in", "price_out")
    here = {"verify_weights": False}  # a served expert has no files on this machine
    return {"kind": "api", "model": served.model, **here, **{n: getattr(served, n) for n in names}}


def _machine(config: DistillConfig) -> dict[str, Any]:
    """Machine settings; with attached servers they only apply to training."""
    if not config.engine_choice.attached or config.checkpoints():
        return {}
    return {"device": "auto", "dtype": "auto", "threads": None}


def _task_settings(config: DistillConfig, task: str, registry: Registry) -> dict[str, Any]:
    """The options that apply to this task; unknown options are checked elsewhere."""
    options = registry.spec(task).options
    special = {name: getattr(config, name) for name in OWN_OPTIONS if name in options}
    return {"option": {k: v for k, v in config.option.items() if k in options}, **special}


# -- rows ----------------------------------------------------------------------------------------


def training_work(config: DistillConfig, experts: Sequence[Expert]) -> list[Work]:
    """The training rows of every expert's task; ConfigError or DataError if they are invalid."""
    from soulkit.train.setup.data import refuse_marked_rows

    registry = config.registry()
    configured_tasks(registry, [one.task for one in experts], config, training=True)
    work = [part for one in experts for part in load_work(sample_config(config, one))]
    for part in work:
        refuse_marked_rows(part.task.name, part.examples)
    return work


def work_aside(config: DistillConfig, experts: Sequence[Expert]) -> list[Work]:
    """The held-out rows of tasks for which --held-out names none."""
    settings = [
        sample_config(config, one).model_copy(update=named_rows(one, one.rows.held_out))
        for one in experts if one.rows is not None and one.rows.held_out
    ]  # fmt: skip
    return [part for one in settings for part in load_work(one)]


# -- playing -------------------------------------------------------------------------------------


def sample(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *,
    servers: VllmServers | None = None, reporter: Reporter = SILENT,
) -> None:  # fmt: skip
    """Play the missing samples, one expert at a time; finished runs are skipped.

    After `select`, samples are not changed any more. UserError for problems with rows, experts or
    players, or for rows that overlap evaluation rows, before anything is played.
    """
    refuse_other_samples(out, experts)
    if (out / SELECTION).is_file():
        reporter.note(f"samples: the selection is already made, {out / SAMPLES} is not changed")
        return
    for remark in (remark for one in experts for remark in one.remarks):
        reporter.note(remark)
    work = training_work(config, experts)
    overlaps = find_overlaps(config, work, work_aside(config, experts))
    for name, matches in overlaps.items():
        if matches:
            reporter.note(f"rows of {name} left out because they overlap evaluation rows: "
                          f"{len(matches)}")  # fmt: skip
    for expert, part in zip(experts, work, strict=True):
        folder = samples_folder(out, expert.task)
        settings = sample_config(config, expert).model_copy(
            update={"max_cost": budget_left(config, out, folder)}
        )
        if is_sampled(folder, settings, expert, part):
            reporter.note(f"samples of {expert.task}: complete, in {folder}")
            continue
        reporter.note(f"sampling {expert.task} with {expert.name}")
        run_eval(settings, folder, servers=servers, reporter=reporter)
        free_memory()


def is_sampled(folder: Path, settings: EvalConfig, expert: Expert, part: Work) -> bool:
    """Whether the run is complete and was played by this expert; RunError if it had other weights.
    Changed settings are reported when the run resumes."""
    if not is_run(folder) or not has_lines(folder / "episodes.jsonl"):
        return False
    same = same_settings(read_config(folder), plain_config(settings.identity()))
    refuse_other_weights(folder, expert_weights(expert), expert.name)
    scored = scored_keys(folder / "episodes.jsonl")
    every = set(draft_keys([part], settings.repeats))
    complete = scored.keys() == every and all(scored.values())
    try:
        return same and complete and bool(summary_line(folder))
    except (OSError, UserError):
        return False


def refuse_other_samples(out: Path, experts: Sequence[Expert]) -> None:
    """RunError if samples in `out` come from old weights of an expert."""
    for expert in experts:
        refuse_other_weights(samples_folder(out, expert.task), expert_weights(expert), expert.name)


def spent(out: Path) -> tuple[float | None, int]:
    """The cost in US dollars and the number of calls without a price, from a folder's ledgers."""
    cost, unpriced = None, 0
    for file in sorted(out.rglob("ledger.sqlite")):
        with Ledger(file) as ledger:
            totals = ledger.totals()
        cost = cost if totals["cost"] is None else (cost or 0.0) + totals["cost"]
        unpriced += totals["unpriced"]
    return cost, unpriced


def budget_left(config: DistillConfig, out: Path, folder: Path) -> float | None:
    """What remains of --max-cost for the run in `folder`, whose own cost is not subtracted."""
    if config.max_cost is None:
        return None
    others = (spent(out)[0] or 0.0) - (spent(folder)[0] or 0.0)
    return max(LEAST_BUDGET, config.max_cost - others)


# --- overlap with evaluation rows -----------------------------------------------------------------


OVERLAPS_SHOWN = 3
"""Number of rows per task that an error names; the others are counted."""

Overlaps = Mapping[str, Mapping[str, RowMatch]]
"""Task → id of a training row → the most similar evaluation row."""


def find_overlaps(
    config: DistillConfig, work: Sequence[Work], aside: Sequence[Work] = ()
) -> Overlaps:
    """Training rows that overlap evaluation rows; DataError without --exclude-overlap.

    Rows that overlap a row in `aside` (by default the held-out rows) are always left out.
    """
    named = list(chain.from_iterable(
        _evaluation_rows(config, part.task.name) for part in work
    ))  # fmt: skip
    overlaps = _overlaps(config, work, named)
    _refuse(config, overlaps, work)
    passages = [passage_of(part.task, example) for part in aside for example in part.examples]
    also = _overlaps(config, work, passages) if passages else {}
    overlaps = {name: {**also.get(name, {}), **found} for name, found in overlaps.items()}
    _refuse_nothing_left(overlaps, work)
    return overlaps


def _overlaps(
    config: DistillConfig, work: Sequence[Work], evaluation: Sequence[Passage]
) -> dict[str, dict[str, RowMatch]]:
    overlaps: dict[str, dict[str, RowMatch]] = {}
    for part in work:
        rows = [passage_of(part.task, example) for example in part.examples]
        matches = row_matches(rows, evaluation, config.near)
        overlaps[part.task.name] = {
            part.examples[place].id: max(
                (match for _, match in several), key=lambda m: (m.kind == "exact", m.similarity)
            )
            for place, several in sorted(matches.items())
        }
    return overlaps


def _evaluation_rows(config: DistillConfig, name: str) -> list[Passage]:
    """The texts of a task's available evaluation rows, with their sources."""
    registry = config.registry()
    task, passages = registry.task(name, config.protocol), []
    for source in dict.fromkeys([None, config.held_out_source(name)]):
        try:
            loaded = examples_to_play(task, source, seed=config.seed)
        except NoRows:
            if source is not None:
                raise
            continue
        passages += [passage_of(task, example) for example in loaded.examples]
    return passages


def _refuse(config: DistillConfig, overlaps: Overlaps, work: Sequence[Work]) -> None:
    rows = {part.task.name: len(part.examples) for part in work}
    touched = {name: matches for name, matches in overlaps.items() if matches}
    if touched and not config.exclude_overlap:
        raise DataError(
            f"Training rows overlap evaluation rows: {_listed(touched, rows)}.",
            "The generalist would be evaluated on rows that it was trained on.",
            "Name other rows with --data or --held-out, or leave out the overlapping training rows "
            "with --exclude-overlap",
        )


def _refuse_nothing_left(overlaps: Overlaps, work: Sequence[Work]) -> None:
    for name, rows in {part.task.name: len(part.examples) for part in work}.items():
        if rows and len(overlaps[name]) == rows:
            raise DataError(
                f"All {rows} training rows of '{name}' overlap evaluation rows.",
                "Without them, no rows remain to train the generalist on.",
                f"Name other rows with --data {name}=ROWS",
            )


def _listed(touched: Overlaps, rows: Mapping[str, int]) -> str:
    parts = []
    for name, matches in touched.items():
        pairs = [
            f"{m.train} = {m.evaluation}" if m.kind == "exact"
            else f"{m.train} ≈ (similarity {m.similarity:.2f}) {m.evaluation}"
            for m in list(matches.values())[:OVERLAPS_SHOWN]
        ]  # fmt: skip
        more = f" and {len(matches) - OVERLAPS_SHOWN} more" if len(matches) > OVERLAPS_SHOWN else ""
        parts.append(f"{len(matches)} of {rows[name]} of '{name}' ({'; '.join(pairs)}{more})")
    return ", ".join(parts)
