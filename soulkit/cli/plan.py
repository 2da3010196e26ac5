"""`soul plan COMMAND …`: estimate what a command needs before it runs. `soul reproduce PAPER`: plan
and run the commands behind a figure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import console, one_line, print_json, print_next, print_note, safe
from soulkit.cli.options import DRY_RUN, Json
from soulkit.errors import ConfigError
from soulkit.report.grid import Grid, GridRow, grid_parts, plain_table
from soulkit.text import byte_size, counted, dollars, duration, short_count

if TYPE_CHECKING:
    from soulkit.models.local.footprint import Machine
    from soulkit.play.plan import Plan, PlayerLoad
    from soulkit.train.planning import CorpusPlan
    from soulkit.train.reproduce import CommandStep

PLANNED = ("eval", "train", "distill")


def command(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...",
        help="Command to estimate, without `soul`: eval api …, train ditto … or distill …")],
) -> None:  # fmt: skip
    """Estimate the calls, tokens, cost, memory and time of a command.

    No model is called or loaded, except with --pilot N, which plays N rows to measure the cost.
    --bounds adds the maximum of calls and cost.
    """
    from soulkit.cli.app import run_words

    if words[0] not in PLANNED:
        raise ConfigError(
            f"soul plan cannot estimate '{words[0]}'.",
            f"It estimates only commands that run models: {', '.join(PLANNED)}.",
            "Write the command without 'soul': soul plan eval api --model MODEL --task TASK",
        )
    if len(words) + len(context.args) < 2:
        raise ConfigError(
            f"'soul plan {words[0]}' needs the rest of the command.",
            "The estimate depends on the command's options.",
            "Write soul plan eval api --model MODEL --task TASK, or soul plan train ditto …",
        )
    raise typer.Exit(run_words([*words, *context.args, "--dry-run"]))


CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def show_plan(
    plan: Plan, as_json: bool, coaches: Sequence[str] = (), *, bounds: bool = False,
    offered: bool = False,
) -> None:  # fmt: skip
    """Print a plan: a table by task and role, totals, the maximum of calls and cost (`bounds`), and
    remarks on default `coaches`. `offered`: the command has --pilot."""
    if as_json:
        print_json(plan.as_dict() | ({"coaches": list(coaches)} if coaches else {}))
        return
    rows = tuple(GridRow.of(one_line(part.task), one.role, _model(one), *_figures(one))
                 for part in plan.tasks for one in part.asked)  # fmt: skip
    head = ("task", "role", "model", "calls", "prompt tokens", "reply tokens", "cost")
    grid = Grid(head=head, rows=rows, words=head[:3], n_names=3, whole=head[:2],
                least={"model": 10})  # fmt: skip
    for shown in grid_parts(grid) if rows else ():
        console().print(shown)
    for line in (*_totals(plan, bounds=bounds, offered=offered), *coaches):
        console().print(line, markup=False, soft_wrap=True)


def show_corpus_plan(
    plan: CorpusPlan, as_json: bool, played: Plan | None = None, bounds: bool = False
) -> None:
    """Print the plan of a training run on conversations: a table by source, totals, and the plan of
    the episodes `played` to evaluate it."""
    from soulkit.train.planning import learned_text

    if as_json:
        print_json({**plan.as_dict(), **({"played": played.as_dict()} if played else {})})
        return
    table = plain_table("source", ">rows", ">ratio", ">tokens each", ">share learned")
    for one in plan.sources:
        rows = "unknown" if one.rows is None else f"{one.rows:,}"
        each, share = f"{one.tokens_per_lesson:,.0f}", f"{one.learned_share:.0%}"
        table.add_row(safe(one.source), rows, f"{one.ratio:g}", each, share)
    console().print(table)
    lines = list(learned_text(plan))
    if (machine := plan.machine) is None:
        lines.append(f"time: {UNTIMED}")
    else:
        lines += memory_lines(machine)
        lines.append(f"time about {duration(machine.seconds)}")
    for line in lines:
        console().print(line, markup=False, soft_wrap=True)
    if played is not None:
        show_plan(played, as_json=False, bounds=bounds)


def _model(one: PlayerLoad) -> str:
    """The name of the model, without the folder or owner of one on this machine."""
    name = one_line(one.name.removeprefix("endpoint:"))
    return name if one.seconds else name.rstrip("/").rpartition("/")[2]


def _figures(one: PlayerLoad) -> tuple[str, ...]:
    cost = "-" if one.cost is None and not one.seconds else dollars(one.cost)
    tokens = short_count(one.prompt_tokens), short_count(one.reply_tokens)
    return (f"{one.usual_calls:,}", *tokens, cost)


def _totals(plan: Plan, *, bounds: bool, offered: bool) -> list[str]:
    from soulkit.play.plan import range_words

    lines = [
        f"{plan.episodes:,} episodes, about {plan.usual_calls:,} calls, "
        f"{plan.prompt_words:,} words in the first prompts"
    ]
    if plan.cost is not None:
        wide = offered and not plan.pilot and plan.cost_range
        more = "; --pilot N plays N rows and narrows this" if wide else ""
        lines.append(f"cost about {dollars(plan.cost)}{range_words(plan)}{more}")
    elif plan.unpriced:
        lines.append("cost unknown")
    if len(roles := plan.cost_by_role) > 1:
        parts = [f"{role} about {dollars(about)}" for role, (about, _) in roles.items()]
        lines.append(f"cost by role: {', '.join(parts)}")
    if bounds:
        most = f" and {dollars(plan.cost_limit)}" if plan.cost_limit is not None else ""
        lines.append(f"bounds: at most {plan.calls:,} calls{most}")
    if (pilot := plan.pilot) is not None:
        cost = "" if pilot.cost is None else f" cost {dollars(pilot.cost)}"
        lines.append(
            f"pilot: {counted(pilot.rows, 'row')} of {counted(pilot.tasks, 'task')}{cost}; "
            f"{pilot.folder} keeps their replies, and the same command with "
            f"--out {pilot.folder} plays the rest"
        )
        parts = [
            f"{role} " + ", ".join(f"{n:.2f} × {name.replace('_', ' ')}" for name, n in one.items())
            for role, one in pilot.ratios.items()
        ]
        lines += [f"measured over assumed: {'; '.join(parts)}"] if parts else []
    if plan.unpriced:
        own = any(one.role == "actor" and one.name in plan.unpriced for one in plan.asked)
        ways = "--price-in and --price-out, or --prices FILE" if own else "--prices FILE"
        lines.append(f"no known price for {', '.join(plan.unpriced)}; set it with {ways}")
    if plan.machine is not None:
        lines += memory_lines(plan.machine)
    return [*lines, _time(plan)]


def memory_lines(machine: Machine) -> Iterator[str]:
    """The memory in all and by part, whether it fits, what happens on GPUs of other sizes, and the
    processes of a job."""
    fit = f"; {machine.fit}" if machine.fit else ""
    yield f"memory about {byte_size(machine.memory)}{fit}"
    if machine.parts:
        parts = (f"{name} {byte_size(size)}" for name, size in machine.parts.items())
        yield f"of this: {', '.join(parts)}"
    yield from machine.cards
    yield from machine.ranks
    yield f"computed for {machine.words}"


def _time(plan: Plan) -> str:
    """The estimated time; the speed of this machine is unknown."""
    served = bool(plan.asked) and all(one.seconds for one in plan.asked)
    here = "" if plan.machine is not None or served else UNTIMED
    if here and not plan.seconds:
        return f"time: {here}"
    parts, own = "", plan.machine.seconds if plan.machine is not None else 0.0
    if own and plan.asked and plan.seconds > own:
        parts = f" (calls {duration(plan.seconds - own)}, this machine {duration(own)})"
    assumed = f"{_assumed_speed(plan)}{here and f'; {here}'}"
    return f"time about {duration(plan.seconds)}{parts}{assumed}"


UNTIMED = "computation on this machine is not estimated"


def _assumed_speed(plan: Plan) -> str:
    from soulkit.play.plan import SECONDS_PER_CALL, SECONDS_PER_TOKEN

    if not any(one.seconds for one in plan.asked):
        return ""
    each = f"assuming {SECONDS_PER_CALL:g} s a call and {1000 * SECONDS_PER_TOKEN:g} ms a token"
    return f", {each} for API models and {plan.concurrency} calls at once"


# --- figures of papers ----------------------------------------------------------------------------


def reproduce_command(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="The paper: ditto-paper.")],
    figure: Annotated[str, typer.Option(metavar="N", help="Number of the figure: 4.")],
    scale: Annotated[str, typer.Option(metavar="tiny|8b",
        help="tiny runs here in minutes; 8b prints the commands for several GPUs.")],
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Seeds per method.")] = 1,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FOLDER",
        help="Folder for all results. [default: runs/PAPER-figure-N-SCALE]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN)] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Run the commands behind a figure of a paper, and draw it.

    The same command resumes and skips finished steps. With --scale 8b it prints the estimate and
    the commands, and draws the figure once they have run.
    """
    import yaml

    from soulkit.cli.app import run_words
    from soulkit.report.ablation import load_ablation, reproduction_grid, write_ablation
    from soulkit.train.reproduce import COMPARED, EVALUATION, figure_of, figure_steps

    out = out or Path("runs", f"{paper}-figure-{figure}-{scale}")
    drawn = figure_of(paper, figure, scale, out)
    steps, settings = figure_steps(drawn, out, seeds), yaml.safe_dump(drawn["evaluation"])
    left = [step for step in steps if not all(file.is_file() for file in step.writes)]
    if left and not dry_run:
        out.mkdir(parents=True, exist_ok=True)
        (out / EVALUATION).write_text(settings, encoding="utf-8")
    compared = (out / COMPARED / "report" / "comparison.json").is_file()
    if dry_run or (left and drawn["launch"] and not compared):
        code = _print_steps(left, steps[-1].words, settings, out, as_json)
        if drawn["launch"]:
            print_note(f"the time above is without {drawn['launch']}")
        raise typer.Exit(code)
    code = int(bool(left and drawn["launch"]))  # some trainings failed: the page names them
    for number, step in enumerate([] if code else left, 1):
        print_note(f"step {number} of {len(left)}: soul {shlex.join(step.words)}")
        with redirect_stdout(sys.stderr):
            code = run_words(step.words)
        if code and (code != 1 or step is not left[-1]):  # 1: some trainings failed
            raise typer.Exit(code)
    comparison = load_ablation(out / COMPARED)
    grid = reproduction_grid(out / COMPARED, comparison, drawn)
    title = f"{paper}, figure {figure}, scale {scale}"
    page = write_ablation(comparison, out / "report", title, grid)
    if as_json:
        rows = [[cell.text for cell in row.cells] for row in grid.rows]
        print_json({"columns": grid.head, "rows": rows, "notes": grid.notes})
    else:
        for part in grid_parts(grid):
            console().print(part)
        print_next(f"soul runs {shlex.quote(str(out / COMPARED))}")
    print_note(f"report: {page}")
    raise typer.Exit(code)


def _print_steps(
    steps: Sequence[CommandStep], last: Sequence[str], settings: str, out: Path, as_json: bool
) -> int:
    """Print commands of a reproduction, and the plan of the last one; return its exit code."""
    from soulkit.cli.app import run_words
    from soulkit.train.reproduce import EVALUATION, without_rows

    for step in steps:
        line = f"soul {shlex.join(step.words)}"
        console(as_json).print(line, markup=False, highlight=False, soft_wrap=True)
    with TemporaryDirectory() as folder:
        file = Path(folder, EVALUATION)
        file.write_text(without_rows([settings], out)[0], encoding="utf-8")
        words = [str(file) if word == str(out / EVALUATION) else word
                 for word in without_rows(last, out)]  # fmt: skip
        return run_words([*words, "--dry-run", *["--json"] * as_json])
