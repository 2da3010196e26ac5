"""`soul eval local|api`: parse, call, print.

Both commands take the options of `_shared`; `_with_shared` joins them to the few of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import err, one_line, out, print_json, progress, safe, say_unsealed
from soulkit.cli.options import Trust
from soulkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.summary import Summary
    from soulkit.runs import Run

app = typer.Typer(
    rich_markup_mode=None, help="Score a model: a local checkpoint or any API endpoint."
)

Text = str | None
Whole = int | None
Number = float | None
Yes = bool | None
Several = list[str] | None
File = Path | None
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be asked, and what it costs.")
]


def _shared(
    task: Annotated[Text, typer.Option("--task", help="Tasks: hitom,tomi")] = None,
    suite: Annotated[Text, typer.Option("--suite", help="A named list of tasks instead.")] = None,
    data: Annotated[
        Several, typer.Option("--data", help="[TASK=]FILE, FOLDER or synth:N; may be repeated.")
    ] = None,
    tasks: Annotated[
        File, typer.Option("--tasks", metavar="FILE", help="Your own tasks file.")
    ] = None,
    limit: Annotated[Whole, typer.Option("--limit", help="Rows of each task at most.")] = None,
    seed: Annotated[Whole, typer.Option("--seed", help="Of sampling and of made rows.")] = None,
    repeats: Annotated[Whole, typer.Option("--repeats", help="Plays of each row.")] = None,
    protocol: Annotated[Text, typer.Option("--protocol", help="paper or reference.")] = None,
    temperature: Annotated[Number, typer.Option("--temperature", help="0 is greedy.")] = None,
    top_p: Annotated[Number, typer.Option("--top-p", help="Nucleus; 1 keeps every token.")] = None,
    max_tokens: Annotated[
        Whole, typer.Option("--max-tokens", help="Limit of a reply; else the task's own.")
    ] = None,
    thinking: Annotated[
        Yes, typer.Option("--thinking/--no-thinking", help="Of hybrid models; else their default.")
    ] = None,
    partner: Annotated[
        Text, typer.Option("--partner", metavar="WHO", help="Plays the other side.")
    ] = None,
    environment: Annotated[
        Text, typer.Option("--environment", metavar="WHO", help="Plays the surroundings.")
    ] = None,
    judge: Annotated[
        Several, typer.Option("--judge", metavar="WHO", help="Scores; may be repeated.")
    ] = None,
    judge_samples: Annotated[
        Whole, typer.Option("--judge-samples", help="Opinions of each judge.")
    ] = None,
    judge_combine: Annotated[
        Text, typer.Option("--judge-combine", help="Several opinions: mean or vote.")
    ] = None,
    judge_order: Annotated[
        Text, typer.Option("--judge-order", help="Of pairs: both or seeded.")
    ] = None,
    endpoints: Annotated[
        File, typer.Option("--endpoints", metavar="FILE", help="Models by name: URL, limit, price.")
    ] = None,
    prices: Annotated[
        File, typer.Option("--prices", metavar="FILE", help="Your own price table.")
    ] = None,
    max_cost: Annotated[
        Number, typer.Option("--max-cost", help="Stop after so many US dollars; resumable.")
    ] = None,
    concurrency: Annotated[Whole, typer.Option("--concurrency", help="Requests at once.")] = None,
    timeout: Annotated[Number, typer.Option("--timeout", help="Seconds for one attempt.")] = None,
    max_attempts: Annotated[
        Whole, typer.Option("--max-attempts", help="Tries of a call before it fails.")
    ] = None,
    backoff: Annotated[
        Number, typer.Option("--backoff", help="Seconds before the second attempt.")
    ] = None,
    down_after: Annotated[
        Number, typer.Option("--down-after", help="Seconds until a silent server counts as down.")
    ] = None,
    ledger: Annotated[Text, typer.Option("--ledger", help="record, replay or off.")] = None,
    ledger_file: Annotated[
        Text, typer.Option("--ledger-file", help="The ledger of the run to replay.")
    ] = None,
    max_unscored: Annotated[
        Number, typer.Option("--max-unscored", help="Larger shares of unscored episodes exit 1.")
    ] = None,
    config: Annotated[
        File, typer.Option("--config", help="A YAML file with settings; flags win.")
    ] = None,
    folder: Annotated[
        File, typer.Option("--out", help="Run folder; the same command resumes it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json and nothing else on stdout.")
    ] = False,
    dry_run: DryRun = False,
    trust: Trust = False,
) -> None:
    """The options of both commands; never called."""


def _with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of `_shared` after its own."""

    @wraps(command)
    def joined(**given: Any) -> None:
        command(**given)

    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    added = list(inspect.signature(_shared, eval_str=True).parameters.values())
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *added)]
    joined.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    joined.__annotations__ = {p.name: p.annotation for p in named}
    return joined


@app.command()
@_with_shared
def local(
    model: Annotated[Text, typer.Option("--model", help="A Hugging Face folder or hub id.")] = None,
    adapter: Annotated[Text, typer.Option("--adapter", help="A LoRA folder on top.")] = None,
    batch_size: Annotated[
        Whole, typer.Option("--batch-size", help="Replies generated at once.")
    ] = None,
    device: Annotated[Text, typer.Option("--device", help="auto, cpu, cuda:0 …")] = None,
    dtype: Annotated[Text, typer.Option("--dtype", help="auto, float32, bfloat16 …")] = None,
    max_context: Annotated[
        Whole, typer.Option("--max-context", help="Longest prompt with reply, in tokens.")
    ] = None,
    allow_overflow: Annotated[
        Yes, typer.Option("--allow-overflow", help="Leave too long prompts unscored.")
    ] = None,
    **shared: Any,
) -> None:
    """Score a checkpoint on this machine, with or without an adapter."""
    own = {
        "model": model, "adapter": adapter, "batch_size": batch_size, "device": device,
        "dtype": dtype, "max_context": max_context, "allow_overflow": allow_overflow,
    }  # fmt: skip
    _command("local", own, **shared)


@app.command()
@_with_shared
def api(
    model: Annotated[Text, typer.Option("--model", help="Its name on the server.")] = None,
    base_url: Annotated[
        Text, typer.Option("--base-url", help="Up to /v1; else OPENAI_BASE_URL, or OpenAI's own.")
    ] = None,
    api_key_env: Annotated[
        Text, typer.Option("--api-key-env", help="NAME of the variable with the key.")
    ] = None,
    reasoning_effort: Annotated[
        Text, typer.Option("--reasoning-effort", help="As the server knows it: low, medium …")
    ] = None,
    price_in: Annotated[
        Number, typer.Option("--price-in", help="US dollars per million prompt tokens.")
    ] = None,
    price_out: Annotated[
        Number, typer.Option("--price-out", help="US dollars per million reply tokens.")
    ] = None,
    requests_per_minute: Annotated[
        Number, typer.Option("--requests-per-minute", help="Of the model's server.")
    ] = None,
    tokens_per_minute: Annotated[
        Number, typer.Option("--tokens-per-minute", help="Of the model's server.")
    ] = None,
    **shared: Any,
) -> None:
    """Score a model behind any OpenAI-compatible server."""
    own = {
        "model": model, "base_url": base_url, "api_key_env": api_key_env,
        "reasoning_effort": reasoning_effort, "price_in": price_in, "price_out": price_out,
        "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute,
    }  # fmt: skip
    _command("api", own, **shared)


# -- from options to settings --------------------------------------------------------------------


def _command(
    kind: str, own: Mapping[str, Any], *, config: Path | None, folder: Path | None,
    as_json: bool, dry_run: bool, trust: bool, **shared: Any,
) -> None:  # fmt: skip
    from soulkit.eval.config import EvalConfig

    settings = EvalConfig.load(config, flags={**own, **_flags(kind, **shared)}, trust=trust)
    if dry_run:
        _dry_run(settings, as_json)
    else:
        _run(settings, folder, as_json)


def _flags(
    kind: str, *, task: str | None, tasks: Path | None, data: Sequence[str] | None,
    timeout: float | None, backoff: float | None, down_after: float | None,
    endpoints: Path | None, prices: Path | None, **same: Any,
) -> dict[str, Any]:  # fmt: skip
    """Option values under the names of their settings."""
    names = [name.strip() for name in (task or "").split(",") if name.strip()]
    return {
        "kind": kind,
        "tasks": names or None,
        "tasks_file": None if tasks is None else str(tasks),
        "data": _rows(data, names),
        "timeout_s": timeout,
        "backoff_s": backoff,
        "down_after_s": down_after,
        "endpoints": None if endpoints is None else str(endpoints),
        "prices": None if prices is None else str(prices),
        **same,
    }


def _rows(given: Sequence[str] | None, tasks: Sequence[str]) -> dict[str, str] | None:
    """`TASK=WHERE` options as task → where; a bare WHERE is meant for every (other) task."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, where = text.partition("=")
        named = bool(equals) and (name in tasks or name.isidentifier())
        key, value = (name, where) if named else ("*", text)
        if key in found:
            raise ConfigError(
                f"--data is given twice for {'every task' if key == '*' else repr(key)}.",
                "Only one of them could be evaluated.",
                "Write --data TASK=FILE once for each task.",
            )
        if named and tasks and name not in tasks:
            raise ConfigError(
                f"--data has rows for '{name}', which is not evaluated here.",
                "They would be ignored.",
                did_you_mean(name, tasks),
            )
        found[key] = value
    return found or None


# -- running and printing ------------------------------------------------------------------------


def _dry_run(config: EvalConfig, as_json: bool) -> None:
    from soulkit.cli.plan import show_plan
    from soulkit.eval.planning import plan_of
    from soulkit.eval.runner import prepare

    show_plan(plan_of(config, prepare(config, _say)), as_json)
    for server in config.servers():
        _say(server)


def _run(config: EvalConfig, folder: Path | None, as_json: bool) -> None:
    from soulkit.eval.runner import run_eval

    run, summary = run_eval(config, folder, bars=lambda n: progress(n, "eval"), say=_say)
    say_unsealed()
    if as_json:
        print_json(summary.to_json())
    else:
        _print_run(run)
    _say_failures(run, summary)
    share = summary.unscored_share or 0.0
    if share > config.max_unscored:
        unscored = summary.n - summary.n_scored
        _say(
            f"{unscored} of {summary.n} episodes are unscored, more than --max-unscored "
            f"{config.max_unscored:g} allows; to play them again, run the same command with "
            f"--out {run.path}"
        )
        raise typer.Exit(1)


def _say(remark: str) -> None:
    err.print(safe(one_line(remark)), soft_wrap=True)


def _print_run(run: Run) -> None:
    from soulkit.report.load import load_runs
    from soulkit.report.table import terminal

    for part in terminal(load_runs([run.path], episodes=False)):
        out.print(part)


def _say_failures(run: Run, summary: Summary) -> None:
    """Statuses other than ok, and the first failure of each kind in its own words."""
    from soulkit.eval.runner import failures
    from soulkit.records import load_records

    for task, statuses in summary.statuses.items():
        if set(statuses) - {"ok"}:
            counts = ", ".join(f"{status} {count}" for status, count in statuses.items())
            _say(f"{task}: {counts}")
    if summary.n_scored < summary.n:
        for reason, words in failures(load_records(run.episodes)).items():
            _say(f"{reason}: {one_line(words, 300)}")
