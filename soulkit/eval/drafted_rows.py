"""`--drafter PLAYER --filter PLAYER`: one model drafts rows, another filters them.

    records ──▶ sketches, shuffled by seed ──▶ draft ──▶ filter ──▶ rows with their provenance

The name of the run folder is derived from the settings, and replies are kept in its ledger. Running
the same command again resumes the build without paying twice and gives the same rows. Unreadable
replies are counted and never become rows. If a server does not answer for a record, no rows are
written; the next run asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from soulkit.config import setting
from soulkit.data.corpora.settings import source_files
from soulkit.data.privacy.finders import refuse_private
from soulkit.errors import ConfigError, ContextOverflow, ProviderError, UnreadableVerdict
from soulkit.eval.planning import voice_of
from soulkit.eval.run.run_lock import run_lock
from soulkit.eval.run.session import FailureStreak, asking, open_session
from soulkit.judge.structured import ask
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger, Totals
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve
from soulkit.models.players.settings import FORMS, RoleSettings
from soulkit.models.vllm.manager import player_servers
from soulkit.play.engine import gather
from soulkit.play.plan import (
    USUAL,
    Plan,
    PlayerTerms,
    TaskPlan,
    question_load,
)
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import JsonlWriter
from soulkit.tasks.kit.made_rows import Drafts, Review, Row, Sketch
from soulkit.tasks.kit.spec import DRAFTED_BY, ORIGIN
from soulkit.text import join_and, one_line, word_count
from soulkit.types import Call, Role

COMMAND = "data build"
OUTCOMES = "outcomes.jsonl"
STAGES: tuple[Role, ...] = ("drafter", "filter")
ACTS = {"drafter": "drafts the missing fields", "filter": "decides which drafts become rows"}
PRIVATE = "private"
"""The fault of a draft that says who somebody is; the draft itself is not recorded."""
_REASON = 300
"""Maximum characters kept of a reason."""


class BuildConfig(RolesConfig):
    """Settings of one build: task, source file and models."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = RolesConfig.OUTSIDE_IDENTITY | {
        "concurrency", "source",
    }  # fmt: skip

    task: str = setting(flag=None, help="Task of the rows.")
    source: str = setting(flag=None, help="File with the original records.")
    sha256: str = setting("", flag=None, help="SHA-256 of that file.")
    options: dict[str, str] = setting(factory=dict, flag=None, help="Options of the task.")
    prompts: dict[str, str] = setting(factory=dict, flag=None, help="Prompt template → hash.")
    rows: int | None = setting(
        None, gt=0, flag=None, help="Number of rows to draft. Default: as many as possible."
    )
    seed: int = setting(0, flag=None, help="Random seed of the record order and of sampling.")
    drafter: RoleSettings | None = setting(
        None, flag=None, help="Model that drafts the missing parts of a row."
    )
    filter: RoleSettings | None = setting(
        None, flag=None, help="Model that keeps or rejects each draft."
    )

    @classmethod
    def roles(cls) -> list[str]:
        return list(STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one record; a line of `outcomes.jsonl`."""

    key: str
    source: str
    fate: str
    """`kept` | `rejected` | `unreadable` | `no_answer`."""
    stage: Role | None = None
    """The stage that rejected the record or gave no usable reply."""
    fault: str = ""
    """The fault that the filter found in a draft."""
    reason: str = ""
    draft: dict[str, Any] = field(default_factory=dict)
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The rows of a build, its report and its run."""

    rows: tuple[Row, ...]
    report: dict[str, Any]
    run: Run

    @property
    def complete(self) -> bool:
        return not self.report["counts"]["no_answer"]


@dataclass(frozen=True)
class Build:
    """A build that was checked and is ready to ask its models."""

    config: BuildConfig
    drafts: Drafts
    order: tuple[Sketch, ...]
    command: str = COMMAND

    @classmethod
    def of(cls, config: BuildConfig, read: Callable[[], Drafts], command: str = COMMAND) -> Build:
        """The build of what `read` makes of the source; ConfigError or DataError if it is not
        possible."""
        for role in STAGES:
            if getattr(config, role) is None:
                raise ConfigError(
                    f"--{role} is required: no model {ACTS[role]}.",
                    "One model drafts rows and another filters them; unfiltered rows are not "
                    "written.",
                    f"Add --{role} PLAYER: {FORMS.replace('actor, ', '')}.",
                )
        drafts, digest = read(), hashlib.sha256()
        for file in source_files(config.source):
            digest.update(file.read_bytes())
        settled = config.model_copy(
            update={"sha256": digest.hexdigest(), "prompts": dict(drafts.prompts)}
        )
        prompts = [sketch.draft.prompt for sketch in drafts.sketches if not sketch.published]
        if prompts and (players := settled.elsewhere()):
            refuse_private(prompts, join_and(players), config.allow_private)
        for name, settings in settled.players():
            if settings.kind == "actor":  # fail before the folder is created
                Players().model(name, settings)
        order = sorted(drafts.sketches, key=lambda sketch: _draw(config.seed, sketch.key))
        return cls(settled, drafts, tuple(order), command)

    @property
    def folder(self) -> Path:
        """Default run folder; the same settings give the same folder."""
        settings = json.dumps(self.config.identity(), sort_keys=True, default=str)
        mark = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return Path("runs") / f"{self.command} {self.config.task} {mark}".replace(" ", "-")

    def needed(self, sketches: Sequence[Sketch], rows: int) -> int:
        """Number of further sketches to draft for `rows` more rows if every draft is kept."""
        for place, sketch in enumerate(sketches, 1):
            rows -= sketch.count
            if rows <= 0:
                return place
        return len(sketches)

    def plan(self) -> Plan:
        """Estimated calls and cost. The expected values assume that every draft is kept; the
        maximum assumes that all records are needed and every question is asked twice."""
        most = self.config.rows
        first = len(self.order) if most is None else self.needed(self.order, most)
        loads = []
        nobody = PlayerTerms(role="actor", name="", limit=0, served=False)
        for role, settings in self.config.players():
            terms = voice_of(self.config, role, settings, nobody)
            words = [_words(sketch, role) for sketch in self.order]
            about, limit = question_load(terms, words[:first]), question_load(terms, words)
            loads.append(replace(about, cost_limit=limit.cost_limit))
        lengths = [_words(sketch, "drafter") for sketch in self.order[:first]]
        task = TaskPlan(
            task=self.config.task, examples=len(self.order), episodes=first,
            prompt_words=sum(lengths), longest_prompt=max(lengths, default=0), asked=tuple(loads),
            chain=sum(one.seconds for one in loads) / max(first, 1),
        )  # fmt: skip
        return Plan(tasks=(task,), concurrency=self.config.concurrency)

    def remarks(self) -> list[str]:
        """Limitations of the rows, as sentences."""
        drafter, judge = self.config.drafter, self.config.filter
        alike = drafter and judge and (drafter.written() == judge.written())
        return [*self.drafts.notes,
                *(["The drafter also filters its own drafts."] if alike else [])]  # fmt: skip


def _draw(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed}/{key}".encode()).hexdigest()


def _words(sketch: Sketch, role: str) -> int:
    """Words of a question; the filter's prompt is about the drafter's prompt plus the draft."""
    return word_count(sketch.draft.prompt) + (USUAL["drafter"] if role == "filter" else 0)


# -- asking --------------------------------------------------------------------------------------


def build_drafted_rows(
    build: Build,
    folder: Path | None = None,
    *,
    reporter: Reporter = SILENT,
) -> BuildResult:
    """Ask the models, or resume an interrupted build, and return the rows with their report.

    UserError before the first call; BudgetSpent at the cost limit; ProviderError if a server
    does not answer. Do not use the rows of an incomplete build.
    """
    config = build.config
    run = open_session(
        config, folder or build.folder, build.command, build.plan, sealed=not config.foreign,
        reporter=reporter,
    )  # fmt: skip
    with (
        run_lock(run),
        Ledger(run.ledger_path) as ledger,
        player_servers(config, run.path, ledger, reporter=reporter) as serve,
    ):
        results = asyncio.run(_ask(build, run, ledger, serve, reporter))
        (run.path / OUTCOMES).unlink(missing_ok=True)
        with JsonlWriter(run.path / OUTCOMES) as file:
            for outcome in results.outcomes:
                file.write(asdict(outcome))
        rows = tuple(results.rows[: config.rows])
        report = _report(build, results.outcomes, len(rows), ledger.totals())
        run.write_summary(report)
    return BuildResult(rows=rows, report=report, run=run)


async def _ask(
    build: Build, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
) -> BuildQuestions:
    config = build.config
    async with asking(config, run, ledger, serve, reporter) as players:
        cast = {role: players.player(role, who, config.seed) for role, who in config.players()}
        questions = BuildQuestions(build, cast["drafter"], cast["filter"])
        with reporter.progress(len(build.order)) as bar:
            await questions.all(bar)
        return questions


@dataclass
class BuildQuestions:
    """Asks about records in order, in parallel up to the limit, until there are enough rows. The
    choice of records depends only on earlier answers, not on their timing."""

    build: Build
    drafter: Player
    filter: Player
    outcomes: list[Outcome] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    async def all(self, bar: Bar) -> None:
        """Ask in waves, each as large as needed if all its drafts are kept."""
        pending, config = list(self.build.order), self.build.config
        turn = asyncio.Semaphore(config.concurrency)
        streak = FailureStreak(config.concurrency, "records")

        async def take(sketch: Sketch) -> tuple[Outcome, Sequence[Row]]:
            async with turn:
                outcome, rows = await self._one(sketch)
            streak.add(outcome.fate == "no_answer", outcome.reason)
            bar.advance(1)
            return outcome, rows

        while pending and (config.rows is None or len(self.rows) < config.rows):
            missing = len(pending) if config.rows is None else self.build.needed(
                pending, config.rows - len(self.rows))  # fmt: skip
            for outcome, rows in await gather(take(sketch) for sketch in pending[:missing]):
                self.outcomes.append(outcome)
                self.rows += rows
            pending = pending[missing:]
            if any(outcome.fate == "no_answer" for outcome in self.outcomes):
                return  # the next wave depends on the missing answers

    async def _one(self, sketch: Sketch) -> tuple[Outcome, Sequence[Row]]:
        stage: Role = "drafter"
        shown: dict[str, Any] = {}
        try:
            draft = await ask(self.drafter, sketch.draft, _call(sketch, stage))
            if why := sketch.private(draft):
                return _outcome(sketch, "rejected", stage, draft={}, fault=PRIVATE, reason=why), ()
            shown, stage = sketch.draft.dump(draft), "filter"
            review: Review = await ask(self.filter, sketch.review(draft), _call(sketch, stage))
        except (UnreadableVerdict, ContextOverflow) as error:
            return _outcome(sketch, "unreadable", stage, reason=error.detail, draft=shown), ()
        except ProviderError as error:
            return _outcome(sketch, "no_answer", stage, reason=error.detail, draft=shown), ()
        if not review.keeps:
            outcome = _outcome(
                sketch, "rejected", stage, fault=review.fault, reason=review.reasoning, draft=shown
            )
            return outcome, ()
        rows = [self._signed(sketch, row) for row in sketch.rows(draft)]
        return replace(_outcome(sketch, "kept", None, draft=shown), rows=len(rows)), rows

    def _signed(self, sketch: Sketch, row: Row) -> Row:
        """The row with its source and the names of both models as provenance."""
        drafter, judge = self.drafter.model.name, self.filter.model.name
        record = row.get("provenance") or sketch.source
        signed = {**row, "provenance": f"{record}{DRAFTED_BY}{drafter}, filtered by {judge}"}
        file = Path(self.build.config.source).name
        return signed if sketch.published else {**signed, ORIGIN: file}


def _call(sketch: Sketch, role: Role) -> Call:
    return Call(role=role, example_id=sketch.key)


def _outcome(
    sketch: Sketch, fate: str, stage: Role | None, *, draft: dict[str, Any], fault: str = "",
    reason: str = "",
) -> Outcome:  # fmt: skip
    return Outcome(
        key=sketch.key, source=sketch.source, fate=fate, stage=stage, fault=fault,
        reason=one_line(reason, _REASON), draft=draft,
    )  # fmt: skip


# -- the report ----------------------------------------------------------------------------------


def _report(
    build: Build, outcomes: Sequence[Outcome], rows: int, totals: Totals
) -> dict[str, Any]:  # fmt: skip
    """Contents of `summary.json`: source of the rows, outcome counts, cost."""
    config = build.config
    return {
        "command": build.command,
        "task": config.task,
        "source": {"file": Path(config.source).name, "sha256": config.sha256,
                   "sketches": len(build.order), "bad": len(build.drafts.bad)},
        "models": {role: {**who.model_dump(mode="json", exclude_none=True), "who": who.written()}
                   for role, who in config.players()},
        "prompts": config.prompts,
        "options": config.options,
        "seed": config.seed,
        "rows": rows,
        "counts": outcome_counts(outcomes),
        "remarks": build.remarks(),
        "calls": {role: dict(sums) for role, sums in totals["by_role"].items()},
        "cost": totals["cost"],
    }  # fmt: skip


def outcome_counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The number of records that models were asked about, and counts of the outcomes."""
    fates = Counter(outcome.fate for outcome in outcomes)
    faults = Counter(o.fault for o in outcomes if o.fate == "rejected")
    unread = Counter(str(o.stage) for o in outcomes if o.fate == "unreadable")
    return {
        "asked": len(outcomes), "kept": fates["kept"], "rejected": dict(sorted(faults.items())),
        "unreadable": dict(sorted(unread.items())), "no_answer": fates["no_answer"],
    }  # fmt: skip


def unreadable_records(folder: Path) -> list[str]:
    """A line for each record without a readable answer, and for each private draft."""
    from soulkit.runs.jsonl import read_jsonl

    lines = read_jsonl(folder / OUTCOMES)
    return [
        f"{line['source']}: {line['fate']}, {line['stage']}: {line['reason']}"
        for line in lines
        if line["fate"] in ("unreadable", "no_answer") or line["fault"] == PRIVATE
    ]
