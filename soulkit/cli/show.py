"""`soul show RUN`: the episodes of a run in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.options import Json

if TYPE_CHECKING:
    from soulkit.report.episode_search import EpisodePlace, Places, Selection
    from soulkit.report.transcript import PageBlock
    from soulkit.types import Record

SHOWN = 10
"""Number of episodes to show without --limit."""
REST = 68
"""Terminal columns reserved for everything but the text of an episode."""

StatusWord = Annotated[str | None, typer.Option("--status", metavar="STATUS",
    help="Show episodes with this status (truncated), reason (judge_error) or mark (hacked, "
    "leaked, cut).")]  # fmt: skip
OneStep = Annotated[int | None, typer.Option("--step", metavar="N",
    help="Show only episodes of this training step.")]  # fmt: skip


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN",
        help="Run folder of an evaluation or training.")],
    example: Annotated[str | None, typer.Option("--example", metavar="ID",
        help="Show the row whose id starts with this text.")] = None,
    status: StatusWord = None,
    worst: Annotated[int | None, typer.Option("--worst", metavar="N", min=1,
        help="Show the N episodes with the lowest scores.")] = None,
    improved: Annotated[bool, typer.Option("--improved",
        help="Show drafts that feedback improved, largest gain first.")] = False,
    task: Annotated[str | None, typer.Option("--task", metavar="TASK",
        help="Show only episodes of this task.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND",
        help="Show only episodes of this kind: draft, refined or gold.")] = None,
    step: OneStep = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1,
        help="Show at most N episodes. [default: 10]")] = None,
    dev: Annotated[bool, typer.Option("--dev",
        help="Show a training run's episodes on its dev split.")] = False,
    full: Annotated[bool, typer.Option("--full",
        help="Show long texts in full.")] = False,
    pager: Annotated[bool, typer.Option("--pager",
        help="Show the output in a pager.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show the episodes of a run: prompts, replies, judgements and feedback.

    Without a filter, the command lists the newest episodes and suggests commands that select
    others. A draft is shown together with the refined episode that its feedback led to. For
    supervised training it shows how the model continued held-out conversations, next to what the
    person wrote.
    """
    from soulkit.report.episode_search import Selection, episode_places, select, show_command
    from soulkit.report.load import EPISODES
    from soulkit.runs.jsonl import has_lines
    from soulkit.runs.records import DEV_EPISODES, SAMPLES

    folder = _one_run(run)
    wish = Selection(
        example=example, status=status, task=task, kind=kind, step=step, worst=worst is not None,
        improved=improved,
    )  # fmt: skip
    file = folder / (DEV_EPISODES if dev else EPISODES)
    nothing_played = not has_lines(file) or (file.is_file() and not file.stat().st_size)
    if not dev and nothing_played and (folder / SAMPLES).is_file():
        file = folder / SAMPLES
    places = episode_places(file)
    pairs = select(places, wish, run)
    shown = pairs[: limit or worst or SHOWN]
    if as_json:
        _print_json(file, shown)
        return
    with _paged(pager):
        if wish.empty:
            _print_list(file, shown)
        else:
            _print_pages(file, shown, full)
    _say_more(f"{show_command(run)}{' --dev' if dev else ''}", places, wish, len(shown), len(pairs))


def _one_run(path: Path) -> Path:
    """The run folder at `path`; RunError for a folder with several runs."""
    from soulkit.errors import RunError
    from soulkit.report.episode_search import shell_path
    from soulkit.report.load import find_runs

    runs = find_runs(path)
    if len(runs) == 1:
        return runs[0]
    names = [shell_path(one) for one in runs]
    raise RunError(
        f"'{path}' contains {len(runs)} runs.",
        "soul show works on one run.",
        f"Name one of them: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}",
    )


def _print_json(file: Path, pairs: Sequence[Places]) -> None:
    from soulkit.cli.console import print_json
    from soulkit.report.episode_search import lines_at

    places = [place for pair in pairs for place in pair if place is not None]
    print_json(lines_at(file, places))


def _paged(pager: bool) -> AbstractContextManager[Any]:
    from soulkit.cli.console import out

    return out.pager(styles=True) if pager and out.is_terminal else nullcontext()


# -- a list ----------------------------------------------------------------------------------------


def _print_list(file: Path, pairs: Sequence[Places]) -> None:
    from rich.text import Text

    from soulkit.cli.console import out
    from soulkit.report.episode_search import records_at
    from soulkit.report.grid import plain_table

    places = [place for pair in pairs for place in pair if place is not None]
    records = records_at(file, places)
    trained = any(record.step or record.kind != "draft" for record in records)
    repeated = any(record.rollout for record in records)
    shown = [True, True, repeated, trained, trained, True, True, True]
    heads = ("example", "task", ">rollout", ">step", "kind", ">score", "status", "reply")
    made = plain_table(*compress(heads, shown))
    for column in made.columns[:-1]:  # ids stay whole, so that they can be copied
        column.no_wrap = True
    for record in records:
        cells = compress(_cells(record, max(out.width - REST, 20)), shown)
        made.add_row(*map(Text, cells))
    out.print(made)


def _cells(record: Record, room: int) -> tuple[str, ...]:
    from soulkit.metrics.intervals import number
    from soulkit.text import one_line

    score, lines = record.score, record.episode.transcript
    words = lines[-1].text if lines else record.episode.final.text if record.episode.final else ""
    return (
        one_line(record.example_id),
        one_line(record.task),
        str(record.rollout),
        str(record.step),
        record.kind,
        number(score.value),
        one_line(f"{score.status}: {score.reason}" if score.reason else score.status),
        one_line(words, room),
    )


# -- pages -----------------------------------------------------------------------------------------


def _print_pages(file: Path, pairs: Sequence[Places], full: bool) -> None:
    from soulkit.cli.console import out
    from soulkit.report.episode_search import records_at
    from soulkit.report.transcript import episode_blocks

    records = iter(records_at(file, [place for pair in pairs for place in pair if place]))
    for number, (_, twin) in enumerate(pairs):
        if number:
            out.print()
        for block in episode_blocks(next(records), next(records) if twin else None, full=full):
            _print_block(block)


def _print_block(block: PageBlock) -> None:
    """Wrap to the terminal's width; print whole lines into a pipe, so that they can be searched."""
    from rich.padding import Padding
    from rich.text import Text

    from soulkit.cli.console import out

    if out.is_terminal:
        out.print(Padding.indent(block.text, block.indent))
        return
    margin = Text(" " * block.indent)
    for line in block.text.split("\n", allow_blank=True):
        out.print(Text.assemble(margin, line), soft_wrap=True)


# -- other episodes --------------------------------------------------------------------------------


def _say_more(
    show: str, places: Sequence[EpisodePlace], wish: Selection, shown: int, total: int
) -> None:
    """Print on stderr the number of episodes by status, and how to show others.

    `show` is the command without its selection.
    """
    from soulkit.cli.console import err, print_next
    from soulkit.report.episode_search import status_counts

    counts = status_counts(places)
    if wish.empty:
        listed = ", ".join(f"{count:,} {word}" for word, count in counts.items())
        err.print(f"{len(places):,} episodes: {listed}", markup=False, soft_wrap=True)
        odd = next((word for word in counts if word != "ok"), "")
        ways = [f"{show} --example {places[-1].example_id}"]
        ways += [f"{show} --worst 10"] if any(p.value is not None for p in places) else []
        ways += [f"{show} --status {odd}"] if odd else []
        ways += [f"{show} --improved"] if any(p.kind == "refined" for p in places) else []
        print_next(*ways)
    elif shown < total and not wish.worst:
        err.print(f"showing {shown:,} of {total:,}; --limit {total} shows all", soft_wrap=True)
