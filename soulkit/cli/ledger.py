"""`soul ledger stats|show|export|verify`: inspect the recorded calls of a run.

Each takes a ledger file or a run folder; for a run that replayed another ledger, the commands use
that ledger. All commands are read-only. Text from models is sanitised before it is shown.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import err, one_line, out, print_json, safe
from soulkit.cli.options import Json
from soulkit.cli.parse_errors import CommandTable
from soulkit.errors import RunError
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.text import dollars

if TYPE_CHECKING:
    from soulkit.models.ledger.view import CallTotals, LedgerFindings, StoredCall

app = CommandTable(
    rich_markup_mode=None, help="Inspect recorded API calls: totals, single calls, integrity."
)

Where = Annotated[Path, typer.Argument(metavar="LEDGER", help="Ledger file or run folder.")]
Example = Annotated[str | None, typer.Option("--example", metavar="ID",
    help="Show only calls for the row with this id.")]  # fmt: skip
RoleName = Annotated[str | None, typer.Option("--role", metavar="ROLE",
    help="Show only calls of this role: actor, partner, judge, coach, …")]  # fmt: skip


# -- which file ----------------------------------------------------------------------------------


def ledger_path(where: Path) -> Path:
    """The ledger of a run folder, or the file itself; RunError if the run has none."""
    from soulkit.eval.results.rescore import ledger_of
    from soulkit.runs.folder import is_run, read_config

    if not where.is_dir():
        return where
    settings = read_config(where) if is_run(where) else {}
    path = ledger_of(where, settings) or where / "ledger.sqlite"
    if not path.is_file():
        off = settings.get("ledger") == "off"
        why = "It was started with --ledger off" if off else f"There is no file '{path}'"
        raise RunError(
            f"'{where}' has no ledger.",
            f"{why}; calls to local models are not recorded either.",
            "Name a ledger file, or the folder of a run with API calls.",
        )
    return path


# -- stats ---------------------------------------------------------------------------------------


@app.command()
def stats(where: Where, as_json: Json = False) -> None:
    """Print calls, tokens, cost and latency by role, model and purpose."""
    from soulkit.models.ledger.view import LedgerView

    path = ledger_path(where)
    with LedgerView(path) as view:
        groups, version = view.groups(), view.version
    if as_json:
        size = path.stat().st_size
        rows = [asdict(group) for group in groups]
        print_json({"path": str(path), "version": version, "bytes": size, "groups": rows})
    else:
        _print_stats(groups)


def _print_stats(groups: list[CallTotals]) -> None:
    several = any(g.purpose for g in groups)
    names = ("role", *(("purpose",) if several else ()), "model")
    head = (*names, "calls", "attempts", "prompt tokens", "reply tokens", "cost", "priced", "p50",
            "p95", "first (UTC)", "last (UTC)")  # fmt: skip
    rows = tuple(GridRow.of(
        one_line(g.role), *((one_line(g.purpose),) if several else ()), one_line(g.model),
        str(g.calls), str(g.attempts), str(g.prompt_tokens), str(g.completion_tokens),
        dollars(g.cost), f"{g.priced}/{g.calls}", f"{g.p50:.2f} s", f"{g.p95:.2f} s",
        _moment(g.first), _moment(g.last),
    ) for g in groups)  # fmt: skip
    grid = Grid(head=head, rows=rows, words=(*names, *head[-2:]), n_names=len(names), n_below=5,
                whole=("role",), least={"model": 12})  # fmt: skip
    for part in grid_parts(grid):
        out.print(part)
    costs = [g.cost for g in groups if g.cost is not None]
    out.print(
        f"{sum(g.calls for g in groups)} calls, cost {dollars(sum(costs) if costs else None)}"
    )


def _moment(stamp: str) -> str:
    return safe(stamp[:19].replace("T", " "))


# -- show ----------------------------------------------------------------------------------------


@app.command()
def show(
    where: Where,
    example: Example = None,
    role: RoleName = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY",
        help="Show the entry whose key starts with this text.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1,
        help="Show at most N entries.")] = 10,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show single calls with their prompts and replies."""
    from soulkit.models.ledger.view import LedgerView

    with LedgerView(ledger_path(where)) as view:
        entries = list(view.entries(example=example, role=role, key=key, limit=limit))
    if not entries:
        raise RunError(
            f"'{where}' contains no matching call.",
            "No entry matches this example, role and key.",
            "List the entries with soul ledger show without options, or count them with soul "
            "ledger stats.",
        )
    if as_json:
        print_json([stored.as_dict() for stored in entries])
        return
    for stored in entries:
        _print_entry(stored)


def _print_entry(stored: StoredCall) -> None:
    from soulkit.models.ledger.ledger import call_words

    entry, call = stored.entry, stored.entry.call
    out.rule(f"[bold]{safe(call.role)}[/] {safe(entry.model)}", align="left")
    who = f"{stored.key[:12]}  {call_words(call)}"
    dropped = f", without {', '.join(entry.dropped)}" if entry.dropped else ""
    beside = stored.request.beside if stored.request is not None else {}
    dropped += f", with {', '.join(f'{k} {v:g}' for k, v in beside.items())}" if beside else ""
    tokens = f"{entry.prompt_tokens} + {entry.completion_tokens} tokens, cost {dollars(entry.cost)}"
    paid = f"{tokens}, {entry.seconds:.2f} s, attempts {entry.attempts}{dropped}, {entry.created}"
    for line in (who, paid, *([f"damaged: {stored.problem}"] if stored.problem else [])):
        out.print(safe(one_line(line)), style="dim", soft_wrap=True)
    for label, text in stored.texts():
        out.print(f"[cyan]{safe(label)}[/]", soft_wrap=True)
        out.print(safe(text), soft_wrap=True)


# -- export --------------------------------------------------------------------------------------


@app.command()
def export(
    where: Where,
    example: Example = None,
    role: RoleName = None,
    file: Annotated[Path | None, typer.Option("--out", metavar="FILE",
        help="File to write instead of stdout.")] = None,
) -> None:  # fmt: skip
    """Export all calls as JSON lines, one entry per line."""
    from soulkit.models.ledger.view import LedgerView, write_export

    with LedgerView(ledger_path(where)) as view:
        entries = view.entries(example=example, role=role)
        lines = (json.dumps(s.as_dict(), ensure_ascii=True, allow_nan=False) for s in entries)
        if file is None:
            for line in lines:
                typer.echo(line)
            return
        count = write_export(file, lines)
    err.print(safe(f"{count} entries in {file}"), soft_wrap=True)


# -- verify --------------------------------------------------------------------------------------


@app.command()
def verify(where: Where, as_json: Json = False) -> None:
    """Check a ledger for damage, and a run folder for missing calls.

    Every scored episode must have its calls. The exit code is 1 if something is wrong.
    """
    from soulkit.models.ledger.view import LedgerView

    with LedgerView(ledger_path(where)) as view:
        findings = view.verify()
        if where.is_dir() and not findings.counts.get("file"):
            _check_run(where, view, findings)
    if as_json:
        print_json(findings.as_dict())
    else:
        _print_findings(findings)
    if findings.counts:
        raise typer.Exit(1)


def _check_run(folder: Path, view: Any, findings: LedgerFindings) -> None:
    from soulkit.eval.results.rescore import CHANGES
    from soulkit.models.ledger.view import check_controls, check_episodes
    from soulkit.runs.folder import is_run, read_config
    from soulkit.runs.jsonl import has_lines
    from soulkit.runs.records import load_controls, load_records

    if not is_run(folder) or not has_lines(folder / "episodes.jsonl"):
        return
    settings = read_config(folder)
    records = load_records(folder / "episodes.jsonl")
    # After a rescore with --ask, the actor's calls are in the ledger of the old run.
    judged_only = (folder / CHANGES).is_file() and settings.get("ledger") != "replay"
    check_episodes(view, records, findings, judges=_over_http(settings),
                   actor=settings.get("kind") == "api" and not judged_only)  # fmt: skip
    if _over_http(settings):
        check_controls(view, load_controls(folder), findings)


def _over_http(settings: dict[str, Any]) -> bool:
    """Whether every judge of a run is an API model; only their calls are in a ledger."""
    alone = [t for t in (settings.get("task_players") or {}).values() if isinstance(t, dict)]
    named = [one.get(role) or [] for one in (settings, *alone) for role in ("judge", "auditor")]
    judges = [judge for several in named for judge in several]
    kinds = [judge.get("kind", "endpoint") for judge in judges if isinstance(judge, dict)]
    actor_too = settings.get("kind") == "api"
    return bool(kinds) and all(k == "endpoint" or (k == "actor" and actor_too) for k in kinds)


def _print_findings(findings: LedgerFindings) -> None:
    for line in findings.lines():
        out.print(safe(one_line(line)), soft_wrap=True)
    runs = "" if findings.episodes is None else f", calls of {findings.episodes} scored episodes"
    total = sum(findings.counts.values())
    out.print(
        f"{findings.entries} entries (version {findings.version}), {findings.requests} keys "
        f"checked{runs}: {f'{total} problems' if total else 'no problem found'}",
        soft_wrap=True,
    )
