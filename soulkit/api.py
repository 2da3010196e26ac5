"""The functions of `import soulkit as sk`: the commands, from Python.

Each does what the command of the same purpose does, with the same checks, files and resume, and
returns what the command would print. Settings are those of the command line, with underscores.
They also work in a notebook, where an event loop runs; `aevaluate` and `atrain_model` are for
asynchronous code.
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
    """Score a model on tasks, as `soul eval` does; returns the summary that `summary.json` holds.

    A checkpoint on this machine, or with `base_url` a model behind an OpenAI-compatible server.

        sk.evaluate("runs/ditto/model", "TASK", data={"TASK": "synth:200"}, out="runs/after")
        sk.evaluate("gpt-5-nano", ["TASK", "OTHER"], base_url="https://api.openai.com/v1")

    Raises a UserError for whatever the command would refuse.
    """
    from soulkit.runs.coroutines import run_beside_loop

    with _explained():
        return run_beside_loop(_evaluation(model, tasks, out, settings))


async def aevaluate(
    model: str, tasks: str | Sequence[str], *, out: str | Path | None = None, **settings: Any
) -> Summary:
    """`evaluate`, without holding up the event loop: `await sk.aevaluate(...)`.

    Cancelled, it stops like a command after Ctrl-C: the same call with the same `out` resumes.
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
    """Train an adapter, as `soul train METHOD` does; returns the summary.

    `tasks` may say mixing ratios. The weights are in `out/model` afterwards.

        sk.train_model("ditto", "runs/warm/model", "TASK", data={"TASK": "synth:2000"},
                       partner="scripted:lines.yaml", steps=50, out="runs/ditto")

    Raises a UserError for whatever the command would refuse.
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
    """`train_model`, without holding up the event loop: `await sk.atrain_model(...)`."""
    from soulkit.runs.coroutines import run_in_thread

    with _explained():
        return await run_in_thread(_training(method, model, tasks, out, settings))


def _training(
    method: str, model: str, tasks: str | Sequence[str] | Mapping[str, float],
    out: str | Path | None, settings: Mapping[str, Any],
) -> Callable[[], TrainSummary]:  # fmt: skip
    from soulkit.runs.folder import default_run_path
    from soulkit.train.config import TrainConfig
    from soulkit.train.run import train

    ratios = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(_names(tasks), 1.0)
    flags = _with_rows(TrainConfig, {"method": method, "model": model, "tasks": ratios, **settings})
    config = TrainConfig.load(env={}, flags=flags)
    folder = _path(out) or default_run_path(f"train-{method}", ratios)
    return lambda: train(config, folder)


@contextmanager
def _explained() -> Iterator[None]:
    """A package that is not installed is a UserError that says how to install it."""
    from soulkit.errors import MissingPackage

    try:
        yield
    except ModuleNotFoundError as error:
        missing = MissingPackage.of(error, "this call")
        if missing is None:
            raise
        raise missing from error


def _with_rows(config: type[Settings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with rows as the configuration holds them, where they are written as an option of
    the command line: "synth:100", or ["TASK=FILE", ...]."""
    rest = {name: value for name, value in settings.items() if name != "data"}
    if not isinstance(settings.get("data"), str | list):
        return dict(settings)
    return rest | config.from_file({"data": settings["data"]}, rest)[0]


def compare(
    a: str | Path, b: str | Path, metric: str = "headline", *, suite: str = "",
    force_mixed: bool = False, shared_rows: bool = False,
) -> Comparison:  # fmt: skip
    """B minus A on the episodes that both runs scored, task by task, as `soul compare` does.

        sk.compare("runs/before", "runs/after").tasks[0].paired.difference

    With `shared_rows` on the rows alone that both evaluations have. RunError when the runs share no
    episode or were not measured the same way.
    """
    from soulkit.eval.comparison.compare import compare_runs

    return compare_runs(Path(a), Path(b), metric, allow_mixed=force_mixed, suite=suite,
                        only_shared_rows=shared_rows)  # fmt: skip


def load_run(path: str | Path) -> RunData:
    """One run folder: its summary, its training steps, its episodes.

        [record.score.value for record in sk.load_run("runs/after").records]

    RunError when `path` holds no run.
    """
    from soulkit.report.load import load_runs

    return load_runs([Path(path)])[0]


def load_task(name: str, *, tasks: str | Path | None = None, protocol: Protocol = "paper") -> Task:
    """A task, ready to bind rows, play, score and critique; `tasks` is a file with your own.

        sk.load_task("TASK").example({"question": "…", "answer": "box"})

    ConfigError when nobody declares it, or for another protocol.
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
