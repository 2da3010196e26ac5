"""`soul train ablate` and `matrix`: train several methods and seeds, or one method on several sets
of tasks, as ordinary runs in one folder.

    OUT/<method>/seed_<k>/   an ordinary run          OUT/ablation.json   settings and status of all

Runs with the same seed play the same rows in the same order, with the same number of prompts per
step. A method with refined rollouts samples twice as much as one without, so `match="rollouts"`
doubles the drafts of the others; both counts are recorded.

The same command resumes: finished runs are skipped and interrupted ones continue. A failed run is
recorded with its reason, and the others still run.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from soulkit.api_keys import printable
from soulkit.config import about, read_settings_file
from soulkit.errors import CallError, ConfigError, UserError, did_you_mean
from soulkit.eval.comparison.comparability import announced_run, differences
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.run.run_lock import is_scored
from soulkit.eval.run.runner import load_config, prepare, run_eval
from soulkit.models.local.footprint import free_memory
from soulkit.models.players.settings import PANELS
from soulkit.parse import ParseError, parse_yaml
from soulkit.play.plan import confirm_cost, pays
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, is_run, plain_config, read_config, same_settings
from soulkit.runs.jsonl import read_value, sparse, write_json
from soulkit.tasks.kit.loading import NoRows
from soulkit.tasks.kit.registry import NotForTraining
from soulkit.text import counted, one_line
from soulkit.train.config import TrainConfig, settings_class, suite_members
from soulkit.train.objectives.base import method_class, rollout_methods
from soulkit.train.processes import run_together
from soulkit.train.ranks.launch import refuse_ranks
from soulkit.train.state.stops import identity_before, steps_before, with_more_steps

if TYPE_CHECKING:
    from soulkit.play.plan import Plan

BudgetMatch = Literal["rollouts", "prompts"]
Status = Literal["waiting", "finished", "failed"]

STATE = "ablation.json"
FINAL = "final-eval"
"""Folder of the final evaluation in that of a run; in OUT/base that of the untrained model."""
MOST_ARMS, MOST_RUNS = 200, 2000
"""Arms of a comparison, and their runs over all seeds."""
SEATED = ("task_players", "coach")
"""Settings that name players; defaults are filled in."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One method with its settings, as written in --methods: `ditto:lambda_fb=0`."""

    spelling: str
    method: str
    settings: Mapping[str, Any]

    @property
    def slug(self) -> str:
        """A folder name; it ends in a hash if characters of the arm's name had to be replaced."""
        plain = re.sub(r"[^\w.+=-]+", "-", self.spelling)[:80]
        if plain.replace("-", ":") == self.spelling.replace("-", ":"):
            return plain
        return f"{plain}-{hashlib.sha256(self.spelling.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of the comparison: an arm with a seed."""

    arm: Arm
    config: TrainConfig
    path: Path
    remarks: tuple[str, ...] = ()
    """Remarks to print, such as skipped rows."""
    coaches: tuple[str, ...] = ()
    """The remarks about default coaches."""
    final: EvalConfig | None = None
    """The evaluation after the training."""

    @property
    def name(self) -> str:
        return f"{self.arm.spelling} seed {self.config.seed}"


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The outcome of a planned run, with the reason if it failed."""

    planned: PlannedRun
    status: Status
    reason: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run as `ablation.json` lists it."""

    arm: str
    method: str
    seed: int
    path: str
    """Folder of the run, relative to that of the comparison."""
    status: str
    reason: str
    steps: int
    prompts_per_step: int
    group_size: int
    trace: str = ""

    def to_json(self) -> dict[str, Any]:
        return sparse(self, always={one.name for one in fields(self)} - {"trace"})

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        return read_value(cls, line, f"A run in {STATE}")


def parse_arms(text: str) -> list[Arm]:
    """`grpo,ditto:only_copy,ditto:lambda_fb=0|1:kl_coef=0.01` → arms, in this order, one for every
    combination of the values between `|`. ConfigError for an unknown method or setting, a setting
    without its value or with two, the same arm twice, too many, or none."""
    sweeps = [_swept(part.strip()) for part in text.split(",") if part.strip()]
    if (n := sum(prod(map(len, values)) for values in sweeps)) > MOST_ARMS:
        raise ConfigError(
            f"--methods has {n:,} arms; the most are {MOST_ARMS}.",
            "Every combination of the values between | is an arm of its own.",
            "List fewer methods and values, or compare them one after another.",
        )
    arms = [parse_arm(":".join(parts)) for values in sweeps for parts in product(*values)]
    same = [
        f"'{a.spelling}' is listed twice." if a.spelling == b.spelling
        else f"'{a.spelling}' and '{b.spelling}' are the same arm."
        for a, b in combinations(arms, 2)
        if a.slug == b.slug or (a.method, a.settings) == (b.method, b.settings)
    ]  # fmt: skip
    if same or not arms:
        raise ConfigError(
            same[0] if same else "--methods names no method.",
            "Each method of a comparison has its own folder and its own row in the table.",
            "Write, for example, --methods grpo,ditto,ditto:lambda_fb=0",
        )
    return arms


def _swept(spelling: str) -> list[list[str]]:
    """`ditto:lora.r=8|32` → `[["ditto"], ["lora.r=8", "lora.r=32"]]`."""
    method, *parts = spelling.split(":")
    swept = [[method]]
    for part in parts:
        name, equals, values = part.partition("=")
        swept.append([f"{name}{equals}{value.strip()}" for value in values.split("|")])
    return swept


def parse_arm(spelling: str) -> Arm:
    """`ditto:lambda_fb=0` → the arm."""
    method, *parts = spelling.split(":")
    if "|" in spelling:
        raise ConfigError(
            f"'{spelling}' names several values for a setting.",
            "This command trains one method with one value for every setting.",
            f"Compare values with soul train ablate --methods '{spelling}'.",
        )
    if not comparable(method):
        methods = rollout_methods()
        raise ConfigError(
            f"The method '{method}' cannot be compared.",
            "A comparison needs methods that play rollouts: only their rewards are comparable.",
            did_you_mean(method, methods),
        )
    settings = [_setting(part, spelling, method) for part in parts]
    for name in (name for name, n in Counter(name for name, _ in settings).items() if n > 1):
        raise ConfigError(
            f"'{spelling}' sets {name} twice.", "A setting has one value in an arm.",
            f"Write it once; values to compare are written {name}=A|B.",
        )  # fmt: skip
    return Arm(spelling, method, dict(settings))


def comparable(method: str) -> bool:
    """Whether this is a method that plays rollouts, from soulkit or another package."""
    try:
        return "rollouts" in method_class(method).traits(method)
    except ConfigError:
        return False


def _setting(part: str, spelling: str, method: str) -> tuple[str, Any]:
    name, equals, text = part.partition("=")
    name = name.strip().replace("-", "_")
    names = settings_used(method) - {"method", "seed"}
    if (head := name.partition(".")[0]) not in names:
        raise ConfigError(
            f"'{part}' in '{spelling}' is not a setting of {method}.",
            "After a colon, write NAME=VALUE, or just NAME for a switch.",
            did_you_mean(name, names),
        )
    try:
        value = parse_yaml(text) if equals else True
    except ParseError as error:
        raise ConfigError(
            f"The value of '{name}' in '{spelling}' cannot be read.",
            f"It is not valid YAML: {error}.",
            f"Write {name}=VALUE with a plain value.",
        ) from error
    switch = settings_class(method).model_fields[head].annotation is bool
    if value is None or not (equals or switch):
        raise ConfigError(
            f"'{name}' in '{spelling}' has no value.",
            "Only switches need no value.",
            f"Write {name}=VALUE.",
        )
    return name, value


OPTIONAL = {"feedback", "refined", "sft"}
"""Traits of methods; a setting that needs one of them does nothing in another method."""


def settings_used(method: str) -> set[str]:
    """The settings that apply to a method; `full`, which is an option of sft, applies to all."""
    kind, traits = settings_class(method), method_class(method).traits(method)
    needs = {name: set(about(field)["only"]) for name, field in kind.model_fields.items()}
    return {"full"} | {
        name for name, some in needs.items()
        if kind.owners(name) & traits and not (some and some <= OPTIONAL - traits)
    }  # fmt: skip


def idle_settings(method: str, names: Iterable[str]) -> set[str]:
    """Those of `names`, such as `lora.r`, that do nothing in a method; without unknown names, which
    the settings themselves refuse."""
    idle = settings_class(method).model_fields.keys() - settings_used(method)
    return {name for name in names if name.partition(".")[0] in idle}


def refuse_idle_settings(methods: Sequence[str], options: Mapping[str, str]) -> None:
    """ConfigError for a setting that no method uses, from its name → the option that sets it."""
    several = dict.fromkeys(methods)
    idle = set(options).intersection(*(idle_settings(method, options) for method in several))
    for option in (option for name, option in options.items() if name in idle):
        raise ConfigError(
            f"{option} has no effect here.",
            f"It is not a setting of {' or '.join(several)}.",
            "Leave it out.",
        )


def plan_arms(
    arms: Sequence[Arm], out: Path, file: Path | None,
    settings_of: Callable[[str], Mapping[str, Any]], *, seeds: int, match: str,
    trust: bool = False, force_mixed: bool = False, judged_alike: bool = False,
    planned: bool = False, final_eval: Path | None = None,
) -> list[PlannedRun]:  # fmt: skip
    """Every run of the comparison, seed by seed, so that early results are comparable.

    `settings_of` gives the common settings that a method knows, `final_eval` is the file with the
    settings of the final evaluation. ConfigError for invalid settings
    or (without `force_mixed`) different conditions, RunError for a folder with different settings.
    """
    most = MOST_RUNS // len(arms)
    if not 1 <= seeds <= most or match not in get_args(BudgetMatch):
        raise ConfigError(
            f"--seeds {seeds} --match {match} is not valid.",
            f"{counted(len(arms), 'method')} can have 1 to {most:,} seeds, and --match is "
            "'rollouts' or 'prompts'.",
            "Write, for example, --seeds 3 --match rollouts",
        )
    first = TrainConfig.load(file, flags=settings_of(arms[0].method), trust=trust).seed
    runs = []
    for seed in range(first, first + seeds):
        for arm in arms:
            config = arm_config(arm, file, settings_of(arm.method), seed, match, trust=trust)
            config = config.for_plan() if planned else config
            if "tasks" in arm.settings:  # other arms have the rows of the other tasks
                rows = {t: text for t, text in config.data.items() if t in (*config.tasks, "*")}
                config = config.model_copy(update={"data": rows})
            runs.append(PlannedRun(arm, config, out / arm.slug / f"seed_{seed}"))
    for run in runs:
        refuse_ranks(run.config, "soul train ablate")
        refuse_unplayable(run.config)
    runs = arms_with_players(runs)
    for run in runs:
        refuse_other_settings(run)
    if not force_mixed:
        refuse_unlike(runs[: len(arms)], judged_alike=judged_alike or final_eval is not None)
    if final_eval is None:
        return runs
    return with_final(runs, final_eval, trust=trust, force_mixed=force_mixed, planned=planned)


def plan_matrix(
    train: str, suite: str, arm: Arm, out: Path, file: Path | None, settings: Mapping[str, Any], *,
    final_eval: Path | None, trust: bool, force_mixed: bool, planned: bool,
) -> list[PlannedRun]:  # fmt: skip
    """The runs of `soul train matrix`: a training on each task of `train` and, from three tasks on,
    on all but one. All are evaluated on `suite` with the same settings, as is the base model."""
    names = [name.strip() for name in train.split(",") if name.strip()]
    if len(set(names)) < max(len(names), 2):
        raise ConfigError(
            f"--train {train} does not name several different tasks.",
            "Each task has one row of the matrix.", "Write --train TASK,TASK.",
        )  # fmt: skip
    every = {**settings, "tasks": dict.fromkeys(names, 1.0)}
    whole = TrainConfig.load(file, flags=every, trust=trust)
    members = suite_members(suite, whole.tasks_file)
    for strange in (name for name in names if name not in members):
        raise ConfigError(
            f"'{strange}' in --train is not in the suite '{suite}'.",
            "Each task that is trained on is also a column of the matrix.",
            did_you_mean(strange, members),
        )
    sets = {f"only:{name}": {name: 1.0} for name in names}
    if len(names) > 2:
        sets |= {f"all-but:{name}": {one: 1.0 for one in names if one != name} for name in names}
    arms = [Arm(row, arm.method, {**arm.settings, "tasks": tasks}) for row, tasks in sets.items()]
    runs = plan_arms(
        arms, out, file, lambda _: every, seeds=1, match="prompts", trust=trust,
        force_mixed=True, planned=planned,
    )  # fmt: skip
    return with_final(
        runs, final_eval, suite=suite, trust=trust, force_mixed=force_mixed, planned=planned
    )


def refuse_unplayable(config: TrainConfig) -> None:
    """ConfigError for tasks that are unknown, have rows but no code, or are for evaluation only."""
    if config.playable:  # unplayable tasks are skipped
        return
    registry = config.registry()
    registry.refuse_rows_only(config.tasks, config.suite)
    registry.refuse_evaluation_only(config.tasks)


def arm_config(
    arm: Arm, file: Path | None, common: Mapping[str, Any], seed: int, match: str, *,
    trust: bool = False,
) -> TrainConfig:  # fmt: skip
    """The arm's configuration; matching by rollouts doubles G for methods that do not refine."""
    flags = {**common, **arm.settings, "method": arm.method, "seed": seed}
    config = TrainConfig.load(file, flags=flags, trust=trust)
    if match == "prompts" or "group_size" in arm.settings or refines(config):
        return config
    doubled = {**flags, "group_size": 2 * config.group_size}
    return TrainConfig.load(file, flags=doubled, trust=trust)


def refines(config: TrainConfig) -> bool:
    """Whether the method samples a refined rollout for every draft with feedback."""
    return "refined" in method_class(config.method).traits(config.method)


def refuse_other_settings(run: PlannedRun) -> None:
    """RunError naming the settings that differ from those in the run folder. More steps are
    allowed."""
    config = with_more_steps(run.config, run.path)
    settings = plain_config(identity_before(config, run.path))
    if is_run(run.path) and not same_settings(read_config(run.path), settings):
        Run.open(run.path, f"train {run.config.method}", settings)


def refuse_unlike(runs: Sequence[PlannedRun], *, judged_alike: bool = False) -> None:
    """ConfigError naming the differences in how the methods of one seed would be measured.

    `judged_alike`: one judge scores the final episodes of all runs, so training judges may differ.
    """
    reasons = _unlike(runs, judges=not judged_alike)
    if reasons:
        only_judges = not judged_alike and not _unlike(runs, judges=False)
        raise ConfigError(
            f"The methods would not be measured the same way ({'; '.join(reasons)}).",
            "Differences between methods would then be mixed with differences in measurement.",
            "Let one judge score the final episodes of all methods with --eval-judge MODEL, or "
            "compare anyway with --force-mixed."
            if only_judges
            else "Set judge, partner, samples, rows and protocol for the whole command, or compare "
            "anyway with --force-mixed.",
        )


def _unlike(runs: Sequence[PlannedRun], *, judges: bool) -> list[str]:
    first, *others = runs
    reasons = []
    for run in others:
        a, b = (announced_run(one.config, one.path) for one in (first, run))
        tasks = dict.fromkeys([*first.config.tasks, *run.config.tasks])
        lines, _ = differences(a, b, tasks, judges=judges).lines()
        reasons += [f"{first.arm.spelling} vs {run.arm.spelling}: {line}" for line in lines]
    return reasons


def run_all(
    runs: Sequence[PlannedRun], out: Path, *, force_mixed: bool = False, eval_judge: str = "",
    parallel: int = 1, reporter: Reporter = SILENT,
) -> list[EndedRun]:  # fmt: skip
    """Run every unfinished run, `parallel` at a time; `ablation.json` is rewritten after each."""
    states = {run.name: EndedRun(run, "finished" if is_finished(run) else "waiting")
              for run in runs}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_comparison(out, list(states.values()), force_mixed, eval_judge)
    base, first = out / "base" / FINAL, runs[0]
    if first.final and not is_scored(base):  # before the trainings: it shows that all is there
        weights = {"model": first.config.model, "adapter": first.config.adapter}
        run_eval(first.final.model_copy(update=weights), base, reporter=reporter)
    with reporter.steps(sum(run.config.steps for run in runs)) as steps:

        def ended(name: str, run: EndedRun) -> None:
            states[name] = run
            write_comparison(out, list(states.values()), force_mixed, eval_judge)
            if run.status == "failed":
                steps.note(f"{name} failed: {run.reason}")

        parts = {}
        for name, state in states.items():
            if state.status == "finished":
                steps.run(name).step(state.planned.config.steps)
            elif parallel > 1:
                parts[name] = partial(run_one, state.planned)
            else:
                own = steps.run(name)
                ended(name, run_one(state.planned, own))
                own.step(state.planned.config.steps)
        run_together(parts, steps, at_once=parallel, ended=ended)
    return list(states.values())


def arms_with_players(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs with all players filled in. NoFeedback, NotForTraining and UnnamedModel stop the
    whole comparison; other errors of an arm are recorded when it runs."""
    from soulkit.train.run import adapter_remark
    from soulkit.train.setup.data import UnnamedModel, download_remark, load_training_data
    from soulkit.train.setup.feedback_check import NoFeedback

    arms: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {}
    made = []
    for run in runs:
        if run.arm.spelling not in arms:
            try:
                material = load_training_data(run.config)
            except (NoFeedback, NotForTraining, UnnamedModel):
                raise
            except UserError:
                arms[run.arm.spelling] = {}, (), ()
            else:
                config = material.config
                said = (download_remark(config), adapter_remark(config), *material.remarks())
                seats = {name: getattr(config, name) for name in ("tasks", *SEATED)}
                arms[run.arm.spelling] = seats, tuple(filter(None, said)), material.coaches
        seats, remarks, coaches = arms[run.arm.spelling]
        config = run.config.model_copy(update=seats)
        made.append(replace(run, config=config, remarks=remarks, coaches=coaches))
    return made


def comparison_plan(runs: Sequence[PlannedRun]) -> Plan:
    """The plan of all runs, by method."""
    from soulkit.play.plan import in_turn
    from soulkit.train.planning import training_plan
    from soulkit.train.setup.data import load_training_data

    arms = Counter(run.arm.spelling for run in runs)
    first = {run.arm.spelling: run.config for run in reversed(runs)}
    plans = [
        training_plan(load_training_data(first[arm]), seeds, arm) for arm, seeds in arms.items()
    ]
    if final := runs[0].final:
        times = {"model": runs[0].config.model, "repeats": final.repeats * (len(runs) + 1)}
        times_final = prepare(final.model_copy(update=times), asking=False)
        plans.append(evaluation_plan(*times_final, label="final evaluation"))
    return in_turn(plans)


def confirm_runs(runs: Sequence[PlannedRun], reporter: Reporter) -> list[PlannedRun]:
    """The runs, once the cost of the unfinished ones is confirmed; CostUnconfirmed if it is not."""
    left = [run for run in runs if not is_finished(run)]
    if any(pays(one) for run in left for one in (run.config, run.final) if one):
        confirm_cost(comparison_plan(left), left[0].config, reporter)
    yes = {"yes": True}
    return [
        replace(
            run,
            config=run.config.model_copy(update=yes),
            final=run.final and run.final.model_copy(update=yes),
        )
        for run in runs
    ]


def with_final(
    runs: Sequence[PlannedRun], file: Path | None, *, suite: str = "", trust: bool,
    force_mixed: bool, planned: bool,
) -> list[PlannedRun]:  # fmt: skip
    """The runs with a final evaluation by the settings in `file`, on `suite` if it is named; limits
    and endpoints that it does not set are those of the training. UserError for one that is not
    possible as planned."""
    first = runs[0].config
    settings = EvalConfig.from_file(read_settings_file(file), {})[0] if file else {}
    if suite and (named := sorted(settings.keys() & {"suite", "tasks"})):
        raise ConfigError(
            f"{file} sets '{named[0]}'.", f"The evaluated tasks are those of --eval {suite}.",
            "Remove it.",
        )  # fmt: skip
    shared = (EvalConfig.OUTSIDE_IDENTITY | {"tasks_file"}) - settings.keys()
    flags = {name: value for name, value in first.resolved().items() if name in shared}
    flags |= {"kind": "local", "model": first.model, "adapter": first.adapter}
    flags |= {"suite": suite} if suite else {}
    config = load_config(file, flags, trust=trust, asking=not planned)
    try:
        config, _ = prepare(config.for_plan() if planned else config, asking=not planned)
    except NoRows as error:
        raise ConfigError(
            error.what,
            "The final evaluation has rows of its own; --data is for the trainings.",
            f"Name the rows in {file or 'a YAML file and add --final-eval FILE'}, as in "
            "`data: {TASK: held_out.jsonl}`.",
        ) from error
    judges = {who.model or who.kind for role, who in config.players() if role in PANELS}
    both = [f"{who.written()}, the {role} of {run.arm.spelling}" for run in runs
            for role, who in run.config.players() if role in (*PANELS, "coach")
            and (who.model or who.kind) in judges and not force_mixed]  # fmt: skip
    older = [r.path / FINAL for r in runs if is_run(r.path / FINAL) and not has_all_steps(r)]
    for wrong, what, why, fix in (
        (sorted(settings.keys() & {"kind", "actor_kind", "model", "adapter", "base_url"}),
         f"{file} sets '{{}}'.", "The evaluated models are those of the comparison.", "Remove it."),
        (both, "The judge of the final evaluation is also {}.", "A method can learn to please it.",
         f"Name another judge in {file}, or use --force-mixed."),
        (older, "{} belongs to an earlier step of its training.",
         "The training has more steps now.", "Remove the folder, or set --steps as before."),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(what.format(wrong[0]), why, fix)
    finals = [
        config.model_copy(update={
            "model": run.config.model, "adapter": None,
            "model" if run.config.full else "adapter": str(run.path / "model"),
        }) for run in runs
    ]  # fmt: skip
    folders = [runs[0].path.parents[1] / "base", *(run.path for run in runs)]
    for folder, one in zip(folders, [config, *finals], strict=True):
        if is_run(folder / FINAL):
            Run.open(folder / FINAL, one.command, one.identity())
    return [replace(run, final=one) for run, one in zip(runs, finals, strict=True)]


def is_finished(run: PlannedRun) -> bool:
    return has_all_steps(run) and (run.final is None or is_scored(run.path / FINAL))


def has_all_steps(run: PlannedRun) -> bool:
    there = is_run(run.path) and (run.path / "summary.json").is_file()
    return there and (steps_before(run.path) or 0) >= run.config.steps


def run_one(run: PlannedRun, reporter: Reporter = SILENT) -> EndedRun:
    """Train and evaluate a run; if it fails, the outcome has the reason and nothing is raised."""
    from soulkit.train.run import train

    try:
        if not has_all_steps(run):
            train(run.config, run.path, reporter=reporter)
        if run.final:
            run_eval(run.final, run.path / FINAL, reporter=reporter)
    except UserError as error:
        return EndedRun(run, "failed", printable(f"{error.what} {error.why} {error.way_out}"))
    except CallError as error:
        return EndedRun(run, "failed", error.detail)
    except Exception as error:  # noqa: BLE001 - recorded with its traceback; other runs go on
        reason = one_line(printable(f"{type(error).__name__}: {error}"), 300)
        return EndedRun(run, "failed", reason, printable(traceback.format_exc()))
    finally:
        free_memory()
    return EndedRun(run, "finished")


def write_comparison(
    out: Path, runs: Sequence[EndedRun], force_mixed: bool = False, eval_judge: str = ""
) -> None:
    """Write `ablation.json`: the planned runs and their status."""
    lines = [_listed(out, run).to_json() for run in runs]
    judge = {"eval_judge": eval_judge} if eval_judge else {}
    write_json(out / STATE, {"runs": lines, "force_mixed": force_mixed, **judge})


def _listed(out: Path, run: EndedRun) -> ListedRun:
    config = run.planned.config
    return ListedRun(
        arm=run.planned.arm.spelling,
        method=config.method,
        seed=config.seed,
        path=run.planned.path.relative_to(out).as_posix(),
        status=run.status,
        reason=run.reason,
        trace=run.trace,
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
    )
