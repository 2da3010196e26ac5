"""Score recorded episodes again without any call, for example after a parser or metric changed.

Edited prompts (`prompts/judge.md`, `prompts/TASK/judge.md`) override a task's own. A run that was
judged with edited prompts keeps a copy in its folder for the next rescoring.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from soulkit.errors import ConfigError, RunError, did_you_mean
from soulkit.eval.config import EvalConfig, load_rows
from soulkit.eval.results.batch_statistics import task_scales
from soulkit.eval.results.recorded import (
    RecordedRun,
    UnrecordedModel,
    from_ledger,
    regrouped,
    score_all,
)
from soulkit.eval.results.summary import (
    Cell,
    Summary,
    headline_name,
    metric_name,
    metric_values,
    recorded_summary,
    records_by_task,
    summarise,
)
from soulkit.eval.results.warnings import calls_by_task, costs_by_task, joined_costs, with_calls
from soulkit.eval.run.actor import checkpoint_model, local_model
from soulkit.eval.run.provenance import note_calls, rescored_conditions, write_conditions
from soulkit.eval.run.runner import eval_cast, eval_players, summary_of
from soulkit.models.base import Cast, ChatModel
from soulkit.models.ledger.ledger import Ledger, ReplayMiss
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.functions import load_function
from soulkit.models.players.players import Players
from soulkit.runs.conditions import with_provenance
from soulkit.runs.folder import CONFIG, Run, default_run_path, is_run, read_config, read_environment
from soulkit.runs.jsonl import first_problem, read_object, write_json
from soulkit.runs.records import CONTROLS, RecordWriter, drafts, load_controls, load_records
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.user_code import scoring_by
from soulkit.trust import in_run, inside_runs, refuse_foreign, run_settings
from soulkit.types import ControlRecord, Example, Record, Score

PROMPTS = "prompts"
"""Folder of edited templates in a rescored run."""


def templates_in(folder: Path) -> list[Path]:
    """All templates in a prompts folder, including those for single tasks."""
    return sorted([*folder.glob("*.md"), *folder.glob("*/*.md")]) if folder.is_dir() else []


def distinct_tasks(rows: Mapping[str, tuple[Task, Example]]) -> list[Task]:
    """The tasks in `rows` (row id → task and row), each once."""
    return list({id(task): task for task, _ in rows.values()}.values())


def put_prompts(tasks: Iterable[Task], folder: Path) -> None:
    """Make the templates in `folder`, if there are any, override the tasks' own."""
    if templates_in(folder):
        for task in tasks:
            task.prompts = task.prompts.over(folder)


def copy_prompts(source: Path, run: Path) -> None:
    """Copy the templates in `source` into a run folder, replacing those with the same names."""
    place = run / PROMPTS
    for path in templates_in(source) if source.resolve() != place.resolve() else ():
        copy = place / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def refuse_empty(folder: Path) -> None:
    """ConfigError for a folder without any template."""
    if not templates_in(folder):
        raise ConfigError(
            f"'{folder}' contains no edited prompt.",
            "--prompts needs a folder with templates: judge.md, or TASK/judge.md for one task.",
            "Copy judge.md from a task's prompts folder there, and edit it.",
        )


def refuse_unused(tasks: Iterable[Task], folder: Path) -> None:
    """ConfigError for an edited template that no question used.

    Call it after all questions of the episodes have been rendered.
    """
    opened = {path.resolve() for task in tasks for path in task.prompts.opened}
    unused = [path for path in templates_in(folder) if path.resolve() not in opened]
    if unused:
        names = [path.relative_to(folder).as_posix() for path in unused]
        raise ConfigError(
            f"No judge question of these episodes uses {', '.join(names)}.",
            "Only judge prompts can be edited here, because the actor is not asked again.",
            did_you_mean(unused[0].name, sorted({path.name for path in opened})),
        )


RescoreMissing = Literal["stop", "unscored"]
CHANGES = "rescore.json"
PREFIX = "rescore "
Config = TypeVar("Config", bound=RolesConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of one task, before and after rescoring."""

    task: str
    metric: str
    old: float | None
    new: float | None
    changed: int
    """Episodes whose value changed, appeared or vanished; 0 for a batch statistic."""
    n: int
    old_scored: int
    new_scored: int
    unscored: Mapping[str, int]
    """Reason → episodes that now have no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """The result of `soul rescore`, printed and saved as `rescore.json`."""

    source: str
    path: str
    episodes: int
    changed: int
    """Episodes whose value, reward, metrics or status changed."""
    misses: int
    changes: tuple[Change, ...]
    controls: int = 0
    """Controls that were scored again."""
    controls_changed: int = 0
    scorer: Mapping[str, str] = field(default_factory=dict)
    """The function of `--scorer` → the hash of its name and file."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def rescore(recorded: RecordedRun, out: Path | None, missing: RescoreMissing = "stop") -> Rescored:
    """Score every episode of `recorded` again into the new run folder `out`.

    RunError if rows are gone or `out` exists. ReplayMiss if the scorers need replies that were not
    recorded and `missing` is `stop`; nothing is written then.
    """
    folder = out or default_run_path("rescore", sorted({r.task for r in recorded.records}))
    _check_new(folder)
    refuse_lost_rows(recorded)
    with existing_ledgers(recorded.ledger) as (file,), Ledger(file, "replay") as ledger:
        records, controls, misses = asyncio.run(_scored_again(recorded, ledger))
    if misses and missing == "stop":
        beside = f" and {len(recorded.controls)} controls" if recorded.controls else ""
        raise ReplayMiss(
            f"{len(misses)} of {len(recorded.records)} episodes{beside} need replies that were not "
            f"recorded; the first: {misses[0].what}",
            "The question to that model has changed (its prompt, sampling or form), and rescoring "
            "makes no calls.",
            "Leave them unscored with --missing unscored, ask a judge with --ask, or evaluate "
            "again.",
        )
    return _write(recorded, folder, records, controls, len(misses))


async def _scored_again(
    recorded: RecordedRun, ledger: Ledger
) -> tuple[list[Record], list[ControlRecord], list[ReplayMiss]]:
    cast = recorded.cast(ledger)
    records, controls = await score_all(recorded, cast)
    for model in {id(p.model): p.model for p in cast.players}.values():
        await model.close()
    old = [*(r.score for r in recorded.records), *(c.score for c in recorded.controls)]
    new = [miss for _, miss in (*records, *controls)]
    # An episode that was unscored before failed in the recorded run.
    misses = [miss for miss, score in zip(new, old, strict=True) if miss and score.scored]
    return regrouped(recorded, [r for r, _ in records]), [c for c, _ in controls], misses


def with_scorer(recorded: RecordedRun, reference: str, *, trust: bool) -> RecordedRun:
    """`recorded` scored by the function FILE.py:NAME on the scale of each task; no judge is asked.

        def closeness(row, reply, lines):  # lines: [{"seat": …, "text": …}, …]
            return {"value": float(row["answer"] in reply), "letters": len(reply)}

    ConfigError if there is no such function, or for a training run. TrustError for a file in a run
    folder, unless `trust`.
    """
    if recorded.grouped:
        raise ConfigError(
            "--scorer needs an evaluation run.",
            "The rewards of a training run also depend on the other episodes of a row.",
            "Evaluate the trained model, then rescore that run.",
        )
    if in_run(place := Path(reference.rpartition(":")[0])) and not trust:
        refuse_foreign(place, {"reference": reference})
    function, file = load_function(reference, "row", "reply", "lines")
    tasks = distinct_tasks(recorded.rows)
    for task in tasks:
        ends = task.spec.metric.low, task.spec.metric.high
        task.score = scoring_by(function, task, *ends)  # type: ignore[method-assign]

    def summary(
        records: Sequence[Record], seconds: float, cost: float | None,
        controls: Sequence[ControlRecord],
    ) -> Summary:  # fmt: skip
        model, protocol = (str(recorded.settings.get(name)) for name in ("model", "protocol"))
        return summarise(
            records, command=recorded.command, model=model, protocol=protocol, seconds=seconds,
            cost=cost, scale=task_scales(tasks),
            names={task.name: function.__name__ for task in tasks},
        )  # fmt: skip

    digest = hashlib.sha256(function.__name__.encode() + file.read_bytes()).hexdigest()[:16]
    return replace(recorded, summary=summary, controls=(), scorer={reference: digest})


# -- the recorded run ------------------------------------------------------------------------------


def command_of(path: Path) -> str:
    """The command that played the run in `path`; for a rescored run, the command of the original
    run."""
    return str(read_environment(path).get("command", "")).removeprefix(PREFIX)


def recorded_eval(
    path: Path, *, trust: bool = False, tasks_file: Path | None = None
) -> RecordedRun:  # fmt: skip
    """Load an evaluation; RunError if it is not one, or has settings unknown to this version.
    `tasks_file` replaces its own.

    TrustError if it may not be the user's own, unless `trust`.
    """
    config, settings, sealed = load_recorded(EvalConfig, path, trust=trust, tasks_file=tasks_file)
    work = load_rows(config)
    put_prompts([part.task for part in work], path / PROMPTS)

    def cast(ledger: Ledger) -> Cast:
        actor = UnrecordedModel(config.model) if config.kind == "local" else None
        players = eval_players(config, ledger, actor)
        players.load = UnrecordedModel  # local judges are not recorded either
        players.serve = from_ledger(ledger)
        return eval_cast(config, players)

    def actor() -> ChatModel:
        local = config.kind == "local"
        return local_model(config) if local else Players().model("actor", config.endpoint())

    def summary(
        records: Sequence[Record], seconds: float, cost: float | None,
        controls: Sequence[ControlRecord],
    ) -> Summary:  # fmt: skip
        return summary_of(work, records, config, seconds, cost, controls)

    return RecordedRun(
        path=path, command=config.command, settings=settings, sealed=sealed,
        rows={example.id: (part.task, example) for part in work for example in part.examples},
        records=load_records(path / "episodes.jsonl"), controls=load_controls(path),
        ledger=ledger_of(path, settings),
        cast=cast, sampling=lambda task: config.sampling(task.spec), summary=summary,
        config=config, seed=config.seed, actor=actor,
        load=lambda model: checkpoint_model(model, config),
    )  # fmt: skip


def ledger_of(path: Path, settings: Mapping[str, Any]) -> Path | None:
    """The ledger with the run's replies; None if it kept none. RunError if the file is gone."""
    named = settings.get("ledger_file")
    if named is None:
        if (ledger := path / "ledger.sqlite").is_file():
            return ledger
        # A rescored training run has no ledger: its replies are in the original run.
        source = read_object(path / CHANGES).get("source")
        return ledger_of(Path(source), read_config(Path(source))) if source else None
    if not Path(str(named)).is_file():
        raise RunError(
            f"The ledger '{named}' of the run '{path}' does not exist.",
            "The run replayed this ledger, which contains its judges' replies.",
            "Restore the file, or correct ledger_file in the run's config.yaml.",
        )
    return Path(str(named))


def load_recorded(
    kind: type[Config], path: Path, *, trust: bool, tasks_file: Path | None = None
) -> tuple[Config, dict[str, Any], bool]:
    """The settings of the run in `path`, the same settings as plain values, and whether they are
    known to be the user's own.

    RunError for settings unknown to this version. TrustError for foreign settings, unless `trust`,
    before anything that they name is read.
    """
    settings, sealed = run_settings(path)
    for name in settings:
        if name not in kind.model_fields:
            raise unreadable_settings(path, f"{name}: unknown setting in this version")
    if not (sealed or trust):
        refuse_foreign(path / CONFIG, settings)
    if tasks_file is not None:
        settings["tasks_file"] = str(tasks_file)
        if inside_runs(settings) and not trust:
            refuse_foreign(tasks_file, {"tasks_file": settings["tasks_file"]})
    try:
        return kind.model_validate(settings), settings, sealed
    except ValidationError as error:
        raise unreadable_settings(path, first_problem(error, "the settings")) from error


def unreadable_settings(path: Path, problem: str) -> RunError:
    """The error for a config.yaml that this version of soulkit cannot read."""
    return RunError(
        f"The settings of '{path}' cannot be used ({problem}).",
        "Its config.yaml was edited by hand, or written by another version of soulkit.",
        "Restore the file, or rescore with the version that wrote it.",
    )


def _check_new(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RunError(
            f"'{folder}' already contains {'a run' if is_run(folder) else 'other files'}.",
            "Rescored episodes need their own folder.",
            "Choose a new or empty folder with --out.",
        )


def refuse_lost_rows(recorded: RecordedRun) -> None:
    """RunError if there is no episode to score, or if rows of episodes are gone."""
    if not recorded.records:
        raise RunError(
            f"'{recorded.path}' contains no episode to score.",
            "Its episodes.jsonl is empty: the run stopped before it finished the first episode.",
            "Resume the run with its original command, then rescore it.",
        )
    gone = [r for r in recorded.records if r.example_id not in recorded.rows]
    if gone:
        raise RunError(
            f"Rows are missing for {len(gone)} of {len(recorded.records)} episodes of "
            f"'{recorded.path}', such as {gone[0].example_id} of {gone[0].task}.",
            "Scoring needs the rows. The data files were changed or moved since the run, or the "
            "task now reads its rows differently.",
            "Restore the data files in the run's config.yaml, then rescore again.",
        )


@contextmanager
def existing_ledgers(*places: Path | None) -> Iterator[list[Path]]:
    """The existing files of `places`, or an empty ledger, which has no reply."""
    with tempfile.TemporaryDirectory() as folder:
        files = [path for path in places if path is not None and path.is_file()]
        if not files:
            files = [Path(folder) / "empty.sqlite"]
            Ledger(files[0]).close()
        yield files


# -- the new folder --------------------------------------------------------------------------------


def _write(
    recorded: RecordedRun, folder: Path, records: Sequence[Record],
    controls: Sequence[ControlRecord], misses: int,
) -> Rescored:  # fmt: skip
    aside = folder.resolve().with_name(f".{folder.resolve().name}.half")
    if aside.exists():  # left by an interrupted command
        shutil.rmtree(aside)
    settings = dict(recorded.settings)
    if recorded.ledger is not None and "ledger_file" in settings:  # evaluations only
        settings |= {"ledger": "replay", "ledger_file": str(recorded.ledger.resolve())}
    run = Run.open(aside, f"{PREFIX}{recorded.command}", settings, sealed=recorded.sealed)
    now = rescored_conditions(recorded.path, recorded.rows, recorded.scorer)
    write_conditions(run, now)
    copy_prompts(recorded.path / PROMPTS, run.path)
    done = write_rescored(recorded, run, records, controls, misses=misses, shown=folder)
    aside.replace(folder.resolve())
    return done


def write_rescored(
    recorded: RecordedRun, run: Run, records: Sequence[Record],
    controls: Sequence[ControlRecord] = (), *, misses: int = 0, paid: Ledger | None = None,
    shown: Path | None = None,
) -> Rescored:  # fmt: skip
    """Write episodes, controls, summary and changes into `run`, replacing earlier ones, and return
    the changes. `paid` is the ledger of new judge calls; `shown` is the folder name to report."""
    _write_records(run.episodes, records)
    if controls:
        _write_records(run.path / CONTROLS, controls)
    before = _old_summary(recorded)
    new, unpriced = (paid.totals()["cost"], paid.totals()["unpriced"]) if paid else (None, 0)
    costs = [cost for cost in (before.cost, new) if cost is not None]
    tasks = {record.example_id: record.task for record in records}
    asked, calls = (costs_by_task(paid, tasks), calls_by_task(paid, tasks)) if paid else ({}, {})
    after = replace(
        recorded.summary(records, before.seconds or 0.0, sum(costs) if costs else None, controls),
        unpriced_calls=before.unpriced_calls + unpriced, costs=joined_costs(before.costs, asked),
        dropped_settings=with_calls(before.dropped_settings, calls),
        rescored_from=str(recorded.path),
    )  # fmt: skip
    note_calls(run.path, calls, after.dropped_settings)
    run.write_summary(with_provenance(run.path, after.to_json()))
    done = Rescored(
        source=str(recorded.path.resolve()), path=str(shown or run.path), episodes=len(records),
        misses=misses, changed=_changed(recorded.records, records), controls=len(controls),
        controls_changed=_changed(recorded.controls, controls),
        changes=tuple(_changes(recorded.records, records, before, after)), scorer=recorded.scorer,
    )  # fmt: skip
    write_json(run.path / CHANGES, done.as_dict())
    return done


def _write_records(path: Path, records: Sequence[Record] | Sequence[ControlRecord]) -> None:
    half = path.with_name(f".{path.stem}.half")
    half.unlink(missing_ok=True)
    writer = RecordWriter(half)
    try:
        writer.write(*records)
    finally:
        writer.close()
    half.replace(path)


def _old_summary(recorded: RecordedRun) -> Summary:
    before = recorded_summary(recorded.path)
    made = summarise(
        recorded.records, command=recorded.command, model="", protocol="",
        seconds=before.seconds or 0.0, cost=before.cost,
        headlines={task: headline_name(cells) for task, cells in before.tasks.items()},
        training=recorded.grouped,
    )  # fmt: skip
    tasks = dict(made.tasks)
    for task, cells in before.tasks.items():
        batch = {name: cell for name, cell in cells.items() if cell.of_batch}
        tasks[task] = {**tasks.get(task, {}), **batch}
    return replace(
        made, tasks=tasks, unpriced_calls=before.unpriced_calls, costs=before.costs,
        controls=before.controls, dropped_settings=before.dropped_settings,
    )  # fmt: skip


def _changed(olds: Sequence[Record | ControlRecord], news: Sequence[Record | ControlRecord]) -> int:
    def numbers(score: Score) -> tuple[Any, ...]:
        return score.value, score.reward, dict(score.metrics), score.status

    pairs = zip(olds, news, strict=True)
    return sum(numbers(old.score) != numbers(new.score) for old, new in pairs)


def _changes(
    old: Sequence[Record], new: Sequence[Record], before: Summary, after: Summary
) -> Iterator[Change]:
    olds, news = records_by_task(old), records_by_task(new)
    for task in news:
        first, second = before.tasks.get(task, {}), after.tasks.get(task, {})
        # Breakdowns repeat the headline for fewer rows.
        for metric in dict.fromkeys(m for m in [*first, *second] if not m.startswith("value/")):
            one, two = first.get(metric, Cell()), second.get(metric, Cell())
            yield Change(
                task=task, metric=metric_name(metric, second), old=one.mean, new=two.mean,
                changed=_moved(olds[task], news[task], metric),
                n=two.n if metric in second else one.n,
                old_scored=one.n_scored, new_scored=two.n_scored, unscored=two.unscored,
            )  # fmt: skip


def _moved(old: Sequence[Record], new: Sequence[Record], metric: str) -> int:
    sides = [{(r.key, v) for r, v in metric_values(drafts(side), metric)} for side in (old, new)]
    return len({key for key, _ in sides[0] ^ sides[1]})
