"""`soul judge check`: measure the reliability of the judges of a finished evaluation.

    episodes of a run ──▶ judged again, N times by each judge ──▶ judgements.jsonl ─┐
    drafts of one row ──▶ which is better, in both orders      ──▶ pairs.jsonl ─────┴▶ summary.json

The check has its own run folder and ledger. The folder name is derived from the settings, so the
same command resumes the check: recorded judgements are kept, and judges that failed are asked
again. The evaluation's folder is not changed. Models and code that its settings name are used only
if the settings are known to be the user's own (trust.py), or with `trust`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter

from soulkit.config import section, setting
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.eval.config import EvalConfig, load_rows, task_names
from soulkit.eval.judges.questions import (
    RecordedEpisode,
    ask_for_preference,
    ask_judge,
    no_judge_asked,
    pair_key,
    pairs_of,
)
from soulkit.eval.planning import judging_plan
from soulkit.eval.results.recorded import from_ledger
from soulkit.eval.results.rescore import command_of
from soulkit.eval.run.run_lock import run_lock
from soulkit.eval.run.session import FailureStreak, asking, open_session
from soulkit.judge.panel import judge_names
from soulkit.judge.reliability import Judgement, PairJudgement, Reliability
from soulkit.metrics.agreement import RELIABLE, TENTATIVE
from soulkit.models.base import Player, unfilled
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve
from soulkit.models.vllm.manager import player_servers
from soulkit.play.engine import gather
from soulkit.play.plan import Plan, Work
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.folder import CONFIG, Run, read_environment
from soulkit.runs.jsonl import JsonlWriter, read_jsonl, read_object, read_value
from soulkit.runs.records import load_records
from soulkit.tasks.kit.base import Task
from soulkit.text import counted
from soulkit.types import Example, Record

COMMAND = "judge check"
JUDGEMENTS, PAIRS = "judgements.jsonl", "pairs.jsonl"
Report = dict[str, Any]
AskOnce = Callable[[], Awaitable[bool]]
"""Asks one question; False if there was no answer."""

UNREAD = frozenset(
    {"model", "adapter", "base_url", "api_key_env", "headers", "api_version", "partner",
     "environment", "auditor", "prices", "ledger_file"}
)  # fmt: skip
"""Settings of an evaluation that a check of its judge does not use."""

_JUDGEMENT, _MATCH = TypeAdapter(Judgement), TypeAdapter(PairJudgement)
_check = section("Check")


class CheckConfig(RolesConfig):
    """Settings of one check. Without `judge`, the judges of the evaluation are checked."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = RolesConfig.OUTSIDE_IDENTITY | {"concurrency"}

    run: str = setting(flag=None, help="Run folder of the evaluation.")
    episodes: str = setting(
        "",
        flag=None,
        help="Hash of the episodes; detects another evaluation in the same folder.",
    )
    samples: int = _check(2, gt=0, help="Number of replies per judge and question.")
    limit: int | None = _check(
        None, gt=0, unset="all", help="Check at most N episodes per task, always the same ones."
    )
    temperature: float | None = _check(
        None, ge=0, unset="as in the run", help="Sampling temperature of the judges."
    )
    pairs: bool = _check(True, help="Also compare drafts of the same row, in both orders.")
    seed: int = _check(0, help="Random seed of the judges' sampling.")


@dataclass(frozen=True)
class Check:
    """A check that was validated and is ready to ask its judges."""

    config: CheckConfig
    source: EvalConfig
    seen: tuple[RecordedEpisode, ...]
    couples: tuple[tuple[RecordedEpisode, RecordedEpisode], ...]
    lost: int = 0
    """Recorded episodes whose row is no longer in the data."""

    @property
    def by_rules(self) -> list[str]:
        """Tasks of the evaluation that no judge scores."""
        judged = {one.task.name for one in self.seen}
        names = task_names(self.source, self.source.registry())
        return [name for name in names if name not in judged]

    @property
    def foreign(self) -> bool:
        """Whether any setting of the check comes from a run that may not be the user's own."""
        return self.config.foreign or self.source.foreign

    @classmethod
    def of(cls, config: CheckConfig, *, trust: bool = False) -> Self:
        """Read the evaluation; RunError, ConfigError or DataError if it cannot be checked.

        TrustError if it may not be the user's own, unless `trust`.
        """
        if config.task_players:
            raise ConfigError(
                "judge check does not accept a judge for a single task.",
                "It compares all judges on the same episodes, so every judge is asked about all "
                "tasks.",
                "Write --judge PLAYER without a task name.",
            )
        folder = Path(config.run)
        unread = {"judge", "task_players"} if config.judge else ()
        source = source_of(folder, trust=trust, unread=unread)
        distinct = [one for i, one in enumerate(config.judge) if one not in config.judge[:i]]
        if len(distinct) < len(config.judge):
            raise ConfigError(
                "The same judge is listed twice.",
                "The second would get the first one's replies from the ledger, so the two would "
                "always agree.",
                "List the judge once. To measure its self-agreement, use --samples.",
            )
        of_source = (who for role, who in source.players() if role == "judge")
        judges = config.judge or tuple(of_source)
        # Before the judges: if rules score every task, naming a judge would not help.
        seen, lost = judged_episodes(folder, source, config.limit)
        if not judges:
            raise unfilled("judge")
        couples = tuple(pairs_of(seen)) if config.pairs else ()
        digest = hashlib.sha256("\n".join(_trace(s.record) for s in seen).encode()).hexdigest()[:16]
        settled = config.model_copy(update={"judge": judges, "episodes": digest})
        for settings in judges:
            if settings.kind == "actor":  # fail before the folder is created
                Players().model("judge", settings)
        return cls(settled, source, seen, couples, lost)

    @property
    def folder(self) -> Path:
        """Default run folder; the same settings give the same folder."""
        name = Path(self.config.run).name
        mark = hashlib.sha256(repr(sorted(self.config.identity().items())).encode()).hexdigest()[:8]
        return Path("runs") / f"judge-check-{name}-{mark}"

    @property
    def todo(self) -> int:
        """The number of judgements and pairs, including recorded ones."""
        judges = len(self.config.judge)
        return judges * (len(self.seen) * self.config.samples + len(self.couples))

    def words(self) -> str:
        """`80 judgements of 40 episodes and 12 pairs, by 1 judge`."""
        judges = len(self.config.judge)
        judgements = judges * len(self.seen) * self.config.samples
        asked = [f"{counted(judgements, 'judgement')} of {counted(len(self.seen), 'episode')}"]
        asked += [counted(judges * len(self.couples), "pair")] if self.couples else []
        return f"{' and '.join(asked)}, by {counted(judges, 'judge')}"

    def cost_plan(self) -> Plan:
        """Estimate of calls and cost, including judgements that are already recorded."""
        rows: dict[str, tuple[Task, list[Example]]] = {}
        for seen in self.seen:
            rows.setdefault(seen.task.name, (seen.task, []))[1].append(seen.example)
        work = [Work(task, tuple(examples)) for task, examples in rows.values()]
        compared = 2 * len(self.couples) / max(len(self.seen), 1)  # a pair is judged in both orders
        opinions = self.config.samples + math.ceil(compared)
        return judging_plan(self.config, work, opinions)

    def judges(self, players: Players) -> dict[str, Player]:
        """Name → judge, with the sampling of the evaluation unless a temperature is set."""
        made = []
        for settings in self.config.judge:
            samples = self.source.judge_samples or 1
            player = players.player("judge", settings, self.config.seed, samples)
            if self.config.temperature is not None:
                sampling = replace(player.sampling, temperature=self.config.temperature)
                player = replace(player, sampling=sampling)
            made.append(player)
        return dict(zip(judge_names(made), made, strict=True))


# -- what is checked -----------------------------------------------------------------------------


def source_of(folder: Path, *, trust: bool = False, unread: Collection[str] = ()) -> EvalConfig:
    """The settings of the evaluation in `folder`; RunError if it contains none.

    TrustError if they may not be the user's own, unless `trust`. Names in `unread` are settings
    that the caller does not use; they need no trust.
    """
    command = command_of(folder)
    if not command.startswith("eval"):
        raise RunError(
            f"{folder} was made by 'soul {command}'.",
            "Only the judges of an evaluation can be checked.",
            "Give the folder of a soul eval run.",
        )
    return EvalConfig.load(folder / CONFIG, env={}, trust=trust, unread=UNREAD.union(unread))


def judged_episodes(
    folder: Path, source: EvalConfig, limit: int | None
) -> tuple[tuple[RecordedEpisode, ...], int]:
    """Two values: the complete episodes of judged tasks with their rows (at most `limit` per task),
    and the number of episodes left out because their row is gone.

    ConfigError if no task has a judge, DataError if no episode was played to its end.
    """
    rows = _rows_by_key(source)
    played = [r for r in load_records(folder / "episodes.jsonl") if r.episode.failure is None]
    by_task: dict[str, list[RecordedEpisode]] = {}
    for record in sorted(played, key=lambda r: (r.task, r.example_id, r.rollout)):
        row = rows.get((record.task, record.example_id))
        if row is not None and row[0].calls(row[1]).get("judge"):
            by_task.setdefault(record.task, []).append(RecordedEpisode(*row, record))
    if not by_task:
        judged = {task.name for task, example in rows.values() if task.calls(example).get("judge")}
        raise DataError(
            f"{folder} contains no complete episode of a judged task.",
            f"The episodes of its judged tasks ({', '.join(sorted(judged))}) are incomplete, or "
            "their rows have changed since the run.",
            "Finish the evaluation first, with the same data files.",
        )
    lost = sum((record.task, record.example_id) not in rows for record in played)
    return tuple(seen for seen_of_task in by_task.values() for seen in seen_of_task[:limit]), lost


def _rows_by_key(source: EvalConfig) -> dict[tuple[str, str], tuple[Task, Example]]:
    """(task, example) → its task and row; ConfigError if no row has a judge."""
    rows = {
        (part.task.name, example.id): (part.task, example)
        for part in load_rows(source)
        for example in part.examples
    }
    if not any(task.calls(example).get("judge") for task, example in rows.values()):
        raise no_judge_asked({task for task, _ in rows}, "and rules always agree with themselves")
    return rows


def _trace(record: Record) -> str:
    conversation = "\n".join(f"{line.seat}: {line.text}" for line in record.episode.transcript)
    return f"{record.task}/{record.key}/{hashlib.sha256(conversation.encode()).hexdigest()}"


# -- asking --------------------------------------------------------------------------------------


def check_judge(
    config: CheckConfig,
    out: Path | None = None,
    *,
    trust: bool = False,
    reporter: Reporter = SILENT,
) -> tuple[Run, Report]:
    """Run `soul judge check` and return the run with its report.

    `trust` allows using the settings of an evaluation that may not be the user's own.

    UserError before the first call; ProviderError if a judge does not answer.
    """
    check = Check.of(config, trust=trust)
    run = open_session(
        check.config, out or check.folder, COMMAND, check.cost_plan, sealed=not check.foreign,
        reporter=reporter,
    )  # fmt: skip
    with (
        run_lock(run),
        Ledger(run.ledger_path, mends=True) as ledger,
        # A finished check needs no server to show its report again.
        player_servers(check.config, run.path, ledger, reporter=reporter)
        if Asking(check, run, {}, ledger).left
        else nullcontext(from_ledger(ledger)) as serve,
    ):
        report = asyncio.run(_run_check(check, run, ledger, serve, reporter))
    run.write_summary(report)
    return run, report


async def _run_check(
    check: Check, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
) -> Report:
    async with asking(check.config, run, ledger, serve, reporter) as players:
        questions = Asking(check, run, check.judges(players), ledger)
        with reporter.progress(questions.left) as bar:
            await questions.all(bar)
    reporter.note("computing agreement and confidence intervals")
    return questions.report(ledger.totals()["cost"])


@dataclass
class Asking:
    """Asks the questions whose answers are not on disk yet."""

    check: Check
    run: Run
    players: Mapping[str, Player]
    ledger: Ledger
    judgements: dict[tuple[str, str, int], Judgement] = field(default_factory=dict)
    matches: dict[tuple[str, str], PairJudgement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streak = FailureStreak(self.check.config.concurrency, "judgements")
        for line in read_jsonl(self.run.path / JUDGEMENTS):
            judgement = read_value(Judgement, line, f"A line of '{JUDGEMENTS}'")
            self.judgements[judgement.key, judgement.judge, judgement.sample] = judgement
        for line in read_jsonl(self.run.path / PAIRS):
            pair = read_value(PairJudgement, line, f"A line of '{PAIRS}'")
            self.matches[pair.key, pair.judge] = pair

    @property
    def left(self) -> int:
        return self.check.todo - len(self.judgements) - len(self.matches)

    async def all(self, bar: Bar) -> None:
        """Ask all missing judgements and pairs, `concurrency` at a time.

        Failures of a judge are kept in memory for the report and asked again on the next start.
        """
        turn = asyncio.Semaphore(self.check.config.concurrency)

        async def take(work: AskOnce) -> None:
            async with turn:
                answered = await work()
            broken = (j.problem for j in reversed(self.judgements.values()) if not j.answered)
            self.streak.add(not answered, "" if answered else next(broken, ""))
            bar.advance(1)

        with (
            JsonlWriter(self.run.path / JUDGEMENTS) as rated,
            JsonlWriter(self.run.path / PAIRS) as paired,
        ):
            await gather(take(work) for work in (*self._unrated(rated), *self._unpaired(paired)))

    def _unrated(self, file: JsonlWriter) -> Iterator[AskOnce]:
        for seen in self.check.seen:
            for name in self.players:
                for sample in range(self.check.config.samples):
                    if (seen.key, name, sample) not in self.judgements:
                        yield partial(self._rate, file, seen, name, sample)

    async def _rate(self, file: JsonlWriter, seen: RecordedEpisode, name: str, sample: int) -> bool:
        opinion = await ask_judge(seen, name, self.players[name], sample, self.ledger)
        self.judgements[opinion.key, name, sample] = opinion
        if opinion.answered:
            file.write(_JUDGEMENT.dump_python(opinion, mode="json"))
        return opinion.answered

    def _unpaired(self, file: JsonlWriter) -> Iterator[AskOnce]:
        for a, b in self.check.couples:
            for name in self.players:
                if (pair_key(a, b), name) not in self.matches:
                    yield partial(self._pair, file, a, b, name)

    async def _pair(
        self, file: JsonlWriter, a: RecordedEpisode, b: RecordedEpisode, name: str
    ) -> bool:
        result, answered = await ask_for_preference(a, b, name, self.players[name])
        self.matches[result.key, name] = result
        if answered:
            file.write(_MATCH.dump_python(result, mode="json"))
        return answered

    # -- the report --

    def report(self, cost: float | None) -> Report:
        """Contents of `summary.json`: the measures by task, and the thresholds for `reliable` and
        `tentative` agreement."""
        names = list(dict.fromkeys(seen.task.name for seen in self.check.seen))
        return {
            "command": COMMAND,
            "run": self.check.config.run,
            "judges": {name: p.sampling.temperature for name, p in self.players.items()},
            "samples": self.check.config.samples,
            "thresholds": {"reliable": RELIABLE, "tentative": TENTATIVE},
            "remarks": check_remarks(self.check, self.players),
            "tasks": {name: self._reliability(name).report() for name in names},
            "cost": cost,
        }

    def _reliability(self, task: str) -> Reliability:
        subjects = {s.key: s.subject() for s in self.check.seen if s.task.name == task}
        judged = [j for j in self.judgements.values() if j.key in subjects]
        order = sorted(judged, key=lambda j: (j.key, list(self.players).index(j.judge), j.sample))
        started = f"{task}/"
        matches = [m for _, m in sorted(self.matches.items()) if m.key.startswith(started)]
        return Reliability(order, subjects, matches)


def read_report(folder: Path) -> Report:
    """The report of a finished check; RunError if `folder` contains none."""
    command = str(read_environment(folder).get("command", ""))
    if command != COMMAND or not (folder / "summary.json").is_file():
        raise RunError(
            f"{folder} contains no finished judge check.",
            f"It was made by 'soul {command}'.",
            "Run soul judge check RUN, and give the folder that it prints.",
        )
    report = read_object(folder / "summary.json")
    read_value(_Thresholds, report.get("thresholds"), f"The report in '{folder}'")
    return report


@dataclass(frozen=True, slots=True)
class _Thresholds:
    reliable: float
    tentative: float


def check_remarks(check: Check, players: Mapping[str, Player]) -> list[str]:
    """Limitations of a check, as sentences."""
    sentences = []
    cold = [name for name, player in players.items() if player.sampling.temperature == 0]
    if check.config.samples < 2:
        sentences.append(
            "Each judge gave one opinion per episode, so self-agreement is not measured."
        )
    elif cold:
        sentences.append(
            f"{', '.join(cold)}: at temperature 0, repeated opinions measure whether the server is "
            "deterministic, not how certain the judge is. To measure certainty, use "
            "--temperature 1."
        )
    if check.lost:
        sentences.append(
            f"Recorded episodes left out because their rows are no longer in the data: {check.lost}"
            "."
        )
    if check.by_rules:
        sentences.append(f"{', '.join(check.by_rules)}: scored by rules, so no judge is asked.")
    if check.config.pairs and not check.couples:
        sentences.append(
            "Position bias is not measured because no row has two different drafts. To measure it, "
            "evaluate with --repeats 2."
        )
    return sentences
