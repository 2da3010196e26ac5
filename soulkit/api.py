"""The Python API, `import soulkit as sk`: the commands as functions.

Each function has the same checks, files and resume as its command, and returns the results that the
command prints. Settings have the names of the options, with underscores. The functions also work in
notebooks; `aevaluate` and `atrain_model` are for asynchronous code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soulkit.config import Settings
    from soulkit.eval.comparison.compare import Comparison
    from soulkit.eval.results.summary import Summary
    from soulkit.report.load import RunData
    from soulkit.tasks.kit.base import Task
    from soulkit.train.state.summary import TrainSummary
    from soulkit.types import Protocol


def evaluate(
    model: str, tasks: str | Sequence[str], *, out: str | Path | None = None, **settings: Any
) -> Summary:
    """Evaluate a model on tasks, like `soul eval`; returns the content of `summary.json`.

    `model` is a checkpoint on this machine or, with `base_url`, a model behind an OpenAI-compatible
    server.

        sk.evaluate("runs/ditto/model", "TASK", data={"TASK": "synth:200"}, out="runs/after")
        sk.evaluate("gpt-5-nano", ["TASK", "OTHER"], base_url="https://api.openai.com/v1")

    Raises a UserError if the command would fail with one.
    """
    from soulkit.runs.coroutines import run_beside_loop

    with _explained():
        return run_beside_loop(_evaluation(model, tasks, out, settings))


async def aevaluate(
    model: str, tasks: str | Sequence[str], *, out: str | Path | None = None, **settings: Any
) -> Summary:
    """`evaluate` without blocking the event loop: `await sk.aevaluate(...)`.

    Cancellation stops it like Ctrl-C stops the command; the same call with the same `out` resumes.
    """
    from soulkit.runs.coroutines import run_in_thread

    with _explained():
        return await run_in_thread(_evaluation(model, tasks, out, settings))


def _evaluation(
    model: str, tasks: str | Sequence[str], out: str | Path | None, settings: Mapping[str, Any]
) -> Callable[[], Summary]:
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.run.runner import run_eval

    kind = "api" if settings.get("base_url") else "local"
    flags = {"kind": kind, "model": model, "tasks": _names(tasks), **settings}
    flags = _with_rows(EvalConfig, flags)
    config = EvalConfig.load(env={}, flags=flags)
    return lambda: run_eval(config, _path(out))[1]


def train_model(
    method: str,
    model: str,
    tasks: str | Sequence[str] | Mapping[str, float],
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> TrainSummary:
    """Train an adapter, like `soul train METHOD`; returns the summary.

    `tasks` may map tasks to mixing ratios. The weights are written to `out/model`.

        sk.train_model("ditto", "runs/warm/model", "TASK", data={"TASK": "synth:2000"},
                       partner="scripted:lines.yaml", steps=50, out="runs/ditto")

    Raises a UserError if the command would fail with one.
    """
    from soulkit.runs.coroutines import run_beside_loop

    with _explained():
        return run_beside_loop(_training(method, model, tasks, out, settings))


async def atrain_model(
    method: str,
    model: str,
    tasks: str | Sequence[str] | Mapping[str, float],
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> TrainSummary:
    """`train_model` without blocking the event loop: `await sk.atrain_model(...)`."""
    from soulkit.runs.coroutines import run_in_thread

    with _explained():
        return await run_in_thread(_training(method, model, tasks, out, settings))


def _training(
    method: str, model: str, tasks: str | Sequence[str] | Mapping[str, float],
    out: str | Path | None, settings: Mapping[str, Any],
) -> Callable[[], TrainSummary]:  # fmt: skip
    from soulkit.runs.folder import default_run_path
    from soulkit.train.config import TrainConfig
    from soulkit.train.ranks.launch import check_launched
    from soulkit.train.run import train

    check_launched("sk.train_model")
    ratios = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(_names(tasks), 1.0)
    flags = _with_rows(TrainConfig, {"method": method, "model": model, "tasks": ratios, **settings})
    config = TrainConfig.load(env={}, flags=flags)
    folder = _path(out) or default_run_path(f"train-{method}", ratios)
    return lambda: train(config, folder)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn a missing optional package into a UserError that says how to install it."""
    from soulkit.errors import MissingPackage

    try:
        yield
    except ModuleNotFoundError as error:
        missing = MissingPackage.of(error, "this call")
        if missing is None:
            raise
        raise missing from error


def _with_rows(config: type[Settings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `data` converted from the notation of the command line: "synth:100" or
    ["TASK=FILE", ...]."""
    rest = {name: value for name, value in settings.items() if name != "data"}
    if not isinstance(settings.get("data"), str | list):
        return dict(settings)
    return rest | config.from_file({"data": settings["data"]}, rest)[0]


def compare(
    a: str | Path, b: str | Path, metric: str = "headline", *, suite: str = "",
    force_mixed: bool = False, shared_rows: bool = False,
) -> Comparison:  # fmt: skip
    """The difference B - A per task on episodes that both runs scored, like `soul compare`.

        sk.compare("runs/before", "runs/after").tasks[0].paired.difference

    `shared_rows` restricts it to rows that both evaluations contain. RunError if the runs share no
    episode or were measured differently.
    """
    from soulkit.eval.comparison.compare import compare_runs

    return compare_runs(Path(a), Path(b), metric, allow_mixed=force_mixed, suite=suite,
                        only_shared_rows=shared_rows)  # fmt: skip


def load_run(path: str | Path) -> RunData:
    """The summary, training steps and episodes of a run folder.

        [record.score.value for record in sk.load_run("runs/after").records]

    RunError if `path` is not a run.
    """
    from soulkit.report.load import load_runs

    return load_runs([Path(path)])[0]


def load_task(name: str, *, tasks: str | Path | None = None, protocol: Protocol = "paper") -> Task:
    """A task that can bind rows, run episodes, score and give feedback. `tasks` is a YAML file with
    your own tasks.

        sk.load_task("TASK").example({"question": "…", "answer": "box"})

    ConfigError for an unknown task or an unsupported protocol.
    """
    from soulkit.tasks.kit.registry import load_registry
    from soulkit.tasks.kit.spec import protocol_named

    registry = load_registry(*([Path(tasks)] if tasks is not None else []))
    return registry.task(name, protocol_named(protocol))


def _names(tasks: str | Sequence[str]) -> tuple[str, ...]:
    names = tasks.split(",") if isinstance(tasks, str) else tasks
    return tuple(name.strip() for name in names)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)
