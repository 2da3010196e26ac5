"""`soul people`: measure models that are trained on people's own conversations; `soul certify`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli import data_build as drafting
from soulkit.cli.console import (
    ConsoleReporter,
    out,
    print_json,
    print_next,
    print_note,
    safe,
    warn_unsealed,
)
from soulkit.cli.data_build import OWN_OPTIONS
from soulkit.cli.options import Adapter, Device, Json, MaxContext, Seed, Side
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import ConfigError
from soulkit.metrics.intervals import estimate_text, number, signed
from soulkit.option_texts import given_twice
from soulkit.report.grid import plain_table
from soulkit.runs.folder import is_run

if TYPE_CHECKING:
    from soulkit.people.build import RoadStep

_two_digits, _signed = partial(number, digits=2), partial(signed, digits=2)

app = CommandTable(add_completion=False, rich_markup_mode=None)


@app.callback(help="Measure models that are trained on people's own conversations.")
def group() -> None:
    """Without a callback, a table with one command would be that command."""


@app.command("build", context_settings=OWN_OPTIONS)
def build_road(
    context: typer.Context,
    chats: Annotated[Path, typer.Argument(metavar="CHATS", readable=False,
        help="Export of chats: a file, folder or .zip for `soul data import chats`.")],
    model: Annotated[str, typer.Option("--model", metavar="MODEL",
        help="Model to train: a local folder, a Hub id or tiny.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", readable=False,
        help="Folder for everything. The same command resumes it.")],
    side: Annotated[str, typer.Option("--side", metavar="human|NAME",
        help="Side to learn; in chats between people, a speaker's name.")] = "human",
    share: Annotated[float, typer.Option("--share", metavar="X",
        help="Share of the persons to set aside for the measure of closeness.")] = 0.2,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1,
        help="Training steps; three checkpoints are measured.")] = 300,
    canaries: Annotated[int | None, typer.Option("--canaries", metavar="N", min=1,
        help="Number of secrets to plant. [default: 20]")] = None,
    no_plant: Annotated[bool, typer.Option("--no-plant",
        help="Plant no secrets, as in a model to share. Its twin with secrets is its "
        "audit.")] = False,
    allow_private: Annotated[bool, typer.Option("--allow-private",
        help="Learn from the chats as they are, without redaction.")] = False,
) -> None:  # fmt: skip
    """Train a model on people's chats and measure it, in one command.

    Imports, redacts and deduplicates the chats, sets persons aside, plants secrets, trains, and
    measures what the model remembers and how close it is to the persons set aside. Every step is
    printed as a command of its own; finished steps are skipped. Other options, such as --full and
    --lr, are those of soul train sft.
    """
    from soulkit.people.build import SECRETS, Road, road_steps

    if no_plant and canaries:
        raise given_twice("What to plant", how="with --canaries and with --no-plant")
    if not chats.exists():
        raise ConfigError(
            f"'{chats}' does not exist.", "The first step imports an export of chats.",
            "Give the file, folder or .zip file that another program has exported.",
        )  # fmt: skip
    road = Road(out, lambda: road_steps(
        chats, out, ("--model", model, *context.args), side=side, share=share, steps=steps,
        canaries=0 if no_plant else canaries or SECRETS, allow_private=allow_private,
    ))  # fmt: skip
    road.refuse_changes()
    for place in range(len(road.steps)):
        step = road.steps[place]
        done = road.is_done(step)
        print_note(f"step {place + 1} of {len(road.steps)}{', done' * done}: {step.line}")
        if not done:
            road.begin(step)
            _run_step(step)
            road.finish(step)
    print_next(f"soul report {road.steps[-1].words[1]}")


def _run_step(step: RoadStep) -> None:
    """Run a step in this process; its error or exit code ends the whole command."""
    from soulkit.cli.app import run_words

    report = step.report.open("w", encoding="utf-8") if step.report else nullcontext(sys.stdout)
    try:
        with report as stream, redirect_stdout(stream):
            code: object = run_words(step.words)
    except SystemExit as end:  # a training with several processes has ended
        code = end.code
    except Exception:
        print_note(f"failed: {step.line}")
        raise
    if code:
        if code != 130:  # not interrupted
            print_note(f"failed with exit code {code}: {step.line}")
        raise typer.Exit(code if isinstance(code, int) else 1)


_DRAFTED = {
    "personas": "Draft a persona of each person: how they write, not who they are.",
    "scenarios": "Draft a scenario of every conversation: what the person wanted.",
}
_HOW = """One model drafts each row from an excerpt, another keeps or rejects it. A row with a
private item or a speaker's name is rejected. The same command resumes an interrupted one."""


def _drafting(kind: str) -> None:
    """Add the command that drafts this kind of rows."""

    @app.command(kind, help=f"{_DRAFTED[kind]}\n\n{_HOW}")
    def draft(
        path: Annotated[Path, typer.Argument(metavar="CHATS", readable=False,
            help="Conversations: a file, a folder or a glob pattern.")],
        output: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
            help="File to write. [default: personas.jsonl or scenarios.jsonl]")] = None,
        side: Side = "human",
        drafter: drafting.Drafter = None, filter_: drafting.Filter = None,
        n: drafting.Rows = None, endpoints: drafting.Endpoints = None,
        folder: drafting.Folder = None, concurrency: drafting.Concurrency = None,
        max_cost: drafting.MaxCost = None, max_context: MaxContext = None,
        allow_private: drafting.AllowPrivate = False, yes: drafting.Yes = False,
        dry_run: drafting.DryRun = False, as_json: Json = False,
    ) -> None:  # fmt: skip
        from soulkit.people.personas import people_drafts

        asking = {
            "drafter": drafter, "filter": filter_, "rows": n, "endpoints": endpoints,
            "concurrency": concurrency, "max_cost": max_cost, "max_context": max_context,
            "allow_private": allow_private or None, "yes": yes or None, "folder": folder,
            "dry_run": dry_run or None,
        }  # fmt: skip
        about = {"task": kind, "source": str(path), "options": {"side": side}}
        target = output or Path(f"{kind}.jsonl")
        drafting.write_drafts(
            target, about, asking, as_json, lambda: people_drafts(kind, str(path), side), "people"
        )
        if kind == "personas" and not (as_json or dry_run):
            players = f"--drafter {drafter} --filter {filter_}"
            print_next(f"soul people scenarios {shlex.quote(str(path))} --side {side} {players}")


for _kind in _DRAFTED:
    _drafting(_kind)


@app.command()
def closeness(
    model: Annotated[str, typer.Argument(metavar="MODEL",
        help="Training run, folder with weights, Hub model, or player: endpoint:MODEL@URL, …")],
    data: Annotated[str, typer.Option("--data", metavar="FILE",
        help="Conversations of people that the model has not seen.")],
    side: Side = "human",
    against: Annotated[str | None, typer.Option("--against", metavar="BASE",
        help="Second model, compared with the first, paired by person.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints",
        help="Measure every checkpoint of the training run, too.")] = False,
    adapter: Adapter = None,
    prompt: Annotated[Path | None, typer.Option("--prompt", metavar="FILE", readable=False,
        help="Text file with a system prompt for conversations without one.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1,
        help="Only the first N conversations. [default: all]")] = None,
    seed: Seed = 0,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", metavar="N", min=1,
        help="Maximum tokens of a turn. [default: 512, and 4096 of an API model]")] = None,
    concurrency: drafting.Concurrency = None, max_cost: drafting.MaxCost = None,
    allow_private: drafting.AllowPrivate = False, yes: drafting.Yes = False,
    folder: Annotated[Path | None, typer.Option("-o", "--out", metavar="FOLDER",
        help="Folder for closeness.json. [default: the run, else one under runs/]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure how close a model's turns are to what people write.

    Without a judge: the model continues real conversations at every turn of the person. Three
    numbers compare its turns with the person's: a distance of features, a classifier of character
    n-grams, and a classifier of turns and their contexts. The headline is the largest of them; 1 is
    what chance makes of people. The same command resumes an interrupted measurement.
    """
    from soulkit.data.files import read_text
    from soulkit.people.continuations import measure_closeness

    system = read_text(prompt) if prompt is not None else ""
    report = measure_closeness(
        model, data, side=side, against=against, adapter=adapter, checkpoints=checkpoints,
        limit=limit, system=system,
        allow_private=allow_private, target=folder, reporter=ConsoleReporter("closeness"),
        flags={"seed": seed, "max_tokens": max_tokens, "concurrency": concurrency,
               "max_cost": max_cost, "yes": yes or None},
    )  # fmt: skip
    warn_unsealed()
    if as_json:
        print_json(report)
    else:
        _print_closeness(report)
        if is_run(Path(model)) and folder is None:
            print_next(f"soul report {shlex.quote(model)} --format html")
    base = [report["against"]] if report["against"] else []
    if missing := sum(one["no_reply"] for one in [*report["models"], *base]):
        print_note(f"{missing} turns got no reply and are left out; the same command retries them")
        raise typer.Exit(1)


def _print_closeness(report: Mapping[str, Any]) -> None:
    last, base = report["models"][-1], report["against"]
    out.print(f"{report['persons']} persons, {report['conversations']} conversations, "
              f"{report['turns']} turns: {safe(last['name'])}", soft_wrap=True)  # fmt: skip
    table = plain_table("line", ">people", ">model", ">difference [95% CI]", ">p (Holm)")
    for line in last["lines"]:
        spread = estimate_text(line["difference"], line["low"], line["high"], _signed)
        cells = (number(line["people"], 2), number(line["model"], 2), spread)
        table.add_row(line["label"], *cells, number(line["p_holm"]))
    out.print(table)
    numbers = plain_table("model", ">distance", ">words", ">context", ">headline")
    for one in [*report["models"], *([base] if base else [])]:
        step = "" if one["step"] is None else f" step {one['step']}"
        ratios = [number(one["ratios"].get(name), 2) for name in ("distance", "words", "context")]
        numbers.add_row(safe(one["name"] + step), *ratios, number(one["headline"]["value"], 2))
    out.print(numbers)
    for line in _remarks(last, base):
        print_note(line)


def _remarks(last: Mapping[str, Any], base: Mapping[str, Any] | None) -> Iterator[str]:
    yield "1: what chance makes of people; the headline is the largest of the three"
    words, context = last["words"], last["context"]
    auc = estimate_text(words["auc"], words["low"], words["high"])
    fits = estimate_text(context["auc"], context["low"], context["high"])
    yield f"told from people by its words: {auc}; its turns fit worse: {fits} (.5: chance)"
    if last["likelihood"]:
        yield (f"the real turn is likelier than one from elsewhere: "
               f"{number(last['likelihood']['share'])}; perplexity of people's turns: "
               f"{number(last['perplexity']['value'], 1)}")  # fmt: skip
    if base:
        headline = base["comparison"]["headline"]
        text = estimate_text(headline["difference"], headline["low"], headline["high"], _signed)
        yield f"headline, compared with {base['name']}: {text} (below 0: closer to people)"


@app.command()
def memory(
    model: Annotated[str, typer.Argument(metavar="MODEL",
        help="Training run, or folder with weights, or Hub model.")],
    canaries: Annotated[Path | None, typer.Option("--canaries", metavar="FILE", readable=False,
        help="List of secrets. [default: the one that the run has recorded]")] = None,
    held_out: Annotated[Path | None, typer.Option("--held-out", metavar="FILE", readable=False,
        help="Conversations that were not learned. [default: the run's --validation]")] = None,
    device: Device = "auto",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1,
        help="Number of held-in and held-out messages.")] = 200,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure what a model remembers of its training conversations.

    Secrets that soul data plant put there are ranked among 512 others of the same form, at every
    checkpoint of a run; secrets that were never planted are the control. Messages of ten words and
    more count as copied if the model continues their first half word for word. The results of a
    run are in RUN/memory.json; the same command resumes an interrupted measurement.
    """
    from soulkit.people.memory import measure_memory
    from soulkit.report.episode_search import shell_path
    from soulkit.runs.folder import is_run

    report = measure_memory(
        model, canaries, held_out, device=device, limit=limit, reporter=ConsoleReporter("memory")
    )
    if as_json:
        print_json(report)
        return
    _print_memory(report)
    if is_run(Path(model)):
        print_next(f"soul report {shell_path(Path(model))}")


def _print_memory(report: Mapping[str, Any]) -> None:
    table = plain_table(">step", ">planted", ">canaries", ">rank", ">bits", ">p ≤ .05 [95% CI]",
                        ">recited")  # fmt: skip
    for one in report["checkpoints"]:
        for place, group in enumerate(one["groups"]):
            step = "" if place or one["step"] is None else str(one["step"])
            share = estimate_text(group["share"], group["low"], group["high"], _two_digits)
            times = f"{group['repeats']} ×" if group["repeats"] else "never"
            bits = _two_digits(group["median_exposure"])
            table.add_row(step, times, str(group["canaries"]), f"{group['median_rank']:g}", bits,
                          share, str(group["recited"]))  # fmt: skip
    if report["planted"]:
        out.print(table)
        print_note("rank: median place of a secret among 512 others of the same form (1: the "
                   "likeliest); bits: log2(513 / rank), about 1 without memory")  # fmt: skip
    else:
        print_note("no canaries: soul data plant puts some into conversations before training")
    for name, share in report["checkpoints"][-1]["verbatim"].items():
        text = f"{share['copied']} of {share['messages']}"
        ends = [f" [{number(share['low'])}, {number(share['high'])}]"] if share["messages"] else []
        out.print(f"{name.replace('_', '-')} messages continued word for word: {text}", *ends,
                  sep="", markup=False)  # fmt: skip


def certify_command(
    model: Annotated[str, typer.Argument(metavar="MODEL",
        help="Training run, folder with weights, Hub model, or player: endpoint:MODEL@URL, …")],
    people: Annotated[str | None, typer.Option("--people", metavar="FILE",
        help="Conversations of people that the model has not seen. [default: use what soul "
        "people closeness has recorded]")] = None,
    side: Side = "human",
    runs: Annotated[list[Path] | None, typer.Option("--run", metavar="RUN", readable=False,
        help="Evaluation of this model whose scores to include. Repeatable.")] = None,
    adapter: Adapter = None,
    target: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", readable=False,
        help="File to write. [default: certificate.json in the folder of MODEL]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Collect what is known of a simulator in one file.

    The certificate has the scores of evaluations of the same weights, closeness to people (measured
    as by soul people closeness, unless that is recorded) and memory (soul people memory). It names
    what was not measured. Export, serve, chat and simulate carry it with the model. To measure with
    other settings or against a base, run soul people closeness first, and certify without --people.
    """
    from soulkit.serving.certificate import certificate_lines, certify

    certificate, file = certify(
        model, people, side=side, adapter=adapter, runs=runs or (), target=target,
        reporter=ConsoleReporter("certify"),
    )  # fmt: skip
    if as_json:
        print_json(certificate)
        return
    for line in [*certificate_lines(certificate), f"written: {file}"]:
        out.print(safe(line), soft_wrap=True)
    if Path(model).is_dir():
        print_next(f"soul serve {shlex.quote(model)}")
