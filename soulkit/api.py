"""The Python API, `import soulkit as sk`: the commands as functions.

Each function has the same checks, files and resume as its command, and returns the results that the
command prints. Settings have the names of the options, with underscores; `data` may also be rows.
The functions also work in notebooks; `aevaluate` and `atrain_model` are for asynchronous code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soulkit.config import Settings
    from soulkit.notebook import ComparisonResult, EvaluationResult, TrainingResult
    from soulkit.report.load import RunData
    from soulkit.tasks.kit.base import Task
    from soulkit.types import Protocol


def evaluate(
    model: str, tasks: str | Sequence[str], *, out: str | Path | None = None,
    progress: bool | None = None, **settings: Any,
) -> EvaluationResult:  # fmt: skip
    """Evaluate a model on tasks, like `soul eval`; returns the content of `summary.json`.

    `model` is a checkpoint on this machine, a player such as `function:FILE.py:NAME` or, with
    `base_url`, a model behind an OpenAI-compatible server. `progress` shows the progress; by
    default only in a notebook. `gate=["TASK/METRIC>=0.8"]` tests the result; its `gates` hold the
    outcomes.

        sk.evaluate("runs/ditto/model", "TASK", data={"TASK": "synth:200"}, out="runs/after")
        sk.evaluate("gpt-5-nano", ["TASK", "OTHER"], base_url="https://api.openai.com/v1")
        sk.evaluate("function:bots.py:reply", "TASK", data=[{"question": "…", "answer": "…"}])

    Raises a UserError if the command would fail with one.
    """
    from soulkit.runs.coroutines import run_beside_loop

    work = partial(_evaluated, model, tasks, out=out, progress=progress, **settings)
    with _explained():
        return run_beside_loop(work)


async def aevaluate(*arguments: Any, **settings: Any) -> EvaluationResult:
    """`evaluate` without blocking the event loop: `await sk.aevaluate(...)`.

    Cancellation stops it like Ctrl-C stops the command; the same call with the same `out` resumes.
    """
    from soulkit.runs.coroutines import run_in_thread

    with _explained():
        return await run_in_thread(partial(_evaluated, *arguments, **settings))


def _evaluated(
    model: str, tasks: str | Sequence[str], *, out: str | Path | None = None,
    progress: bool | None = None, **settings: Any,
) -> EvaluationResult:  # fmt: skip
    from soulkit.eval.config import EvalConfig
    from soulkit.eval.gates import tested_gates
    from soulkit.eval.run.runner import run_eval
    from soulkit.notebook import EvaluationResult, reporter_for

    kind, _, name = str(model).partition(":")
    actor = {"kind": "api" if settings.get("base_url") else "local", "model": model}
    if kind in ("function", "scripted"):
        actor = {"kind": "api", "actor_kind": kind, "model": name}
    flags = _with_rows(EvalConfig, {**actor, "tasks": _names(tasks), **settings}, out)
    config, reporter = EvalConfig.load(env={}, flags=flags), reporter_for("eval", progress)
    run, summary = run_eval(config, _path(out), reporter=reporter)
    gates = tested_gates(config.gate_texts(), run, summary, config.registry())
    return EvaluationResult.of(summary, run.path, gates=tuple(gates))


def train_model(
    method: str,
    model: str,
    tasks: str | Sequence[str] | Mapping[str, float],
    *,
    out: str | Path | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train an adapter, like `soul train METHOD`; returns the summary.

    `tasks` may map tasks to mixing ratios. The weights are written to `out/model`.

        sk.train_model("ditto", "runs/warm/model", "TASK", data={"TASK": "synth:2000"},
                       partner="scripted:lines.yaml", steps=50, out="runs/ditto")

    Raises a UserError if the command would fail with one.
    """
    from soulkit.runs.coroutines import run_beside_loop

    work = partial(_trained, method, model, tasks, out=out, progress=progress, **settings)
    with _explained():
        return run_beside_loop(work)


async def atrain_model(*arguments: Any, **settings: Any) -> TrainingResult:
    """`train_model` without blocking the event loop: `await sk.atrain_model(...)`."""
    from soulkit.runs.coroutines import run_in_thread

    with _explained():
        return await run_in_thread(partial(_trained, *arguments, **settings))


def _trained(
    method: str, model: str, tasks: str | Sequence[str] | Mapping[str, float], *,
    out: str | Path | None = None, progress: bool | None = None, **settings: Any,
) -> TrainingResult:  # fmt: skip
    from soulkit.notebook import TrainingResult, reporter_for
    from soulkit.runs.folder import default_run_path
    from soulkit.train.config import TrainConfig
    from soulkit.train.ranks.launch import check_launched
    from soulkit.train.run import train

    check_launched("sk.train_model")
    ratios = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(_names(tasks), 1.0)
    flags = {"method": method, "model": model, "tasks": ratios, **settings}
    config = TrainConfig.load(env={}, flags=_with_rows(TrainConfig, flags, out))
    folder = _path(out) or default_run_path(f"train-{method}", ratios)
    reporter = reporter_for(f"train {method}", progress, config.steps)
    return TrainingResult.of(train(config, folder, reporter=reporter), folder)


FLAG = re.compile(
    r"soul [a-z](?:(?![.,] |[;`)]).)*|--([a-z][a-z0-9-]+)(?:[= ](?=[A-Z\d]|\S+[=:]))?"
)
"""A command, which stays as it is, or an option with the sign before its value."""


@contextmanager
def _explained() -> Iterator[None]:
    """Turn a missing optional package into a UserError that says how to install it, and options in
    errors into arguments: `--max-tokens 9` becomes `max_tokens=9`. Tasks files are read again."""
    from soulkit.errors import MissingPackage, UserError
    from soulkit.tasks.kit.registry import load_registry

    load_registry.cache_clear()  # a tasks file may have changed since the last call
    try:
        yield
    except ModuleNotFoundError as error:
        missing = MissingPackage.of(error, "this call")
        if missing is None:
            raise
        raise missing from error
    except UserError as error:
        lines = (line.replace("the command line", "this call") for line in error.lines())
        error.what, error.why, error.way_out = (FLAG.sub(_argument, line) for line in lines)
        error.args = (error.what,)
        raise


def _argument(match: re.Match[str]) -> str:
    from soulkit.config import file_options
    from soulkit.eval.config import EvalConfig
    from soulkit.train.config import TrainConfig

    name, switch = (match[1] or "").replace("-", "_"), ("force_mixed", "shared_rows", "yes")
    options = {**file_options(TrainConfig), **file_options(EvalConfig)}
    if name not in (*options, *switch, "out", "metric"):
        return match[0]
    value = "True" if name in switch else ""
    return f"{options[name].setting if name in options else name}={value}"


def _with_rows(
    config: type[Settings], settings: Mapping[str, Any], out: str | Path | None
) -> dict[str, Any]:
    """`settings` with `data` as files. It may be rows, or a text as on the command line; rows are
    written to a folder next to the run's."""
    data, rest = settings.get("data"), {n: v for n, v in settings.items() if n != "data"}
    folder = (Path(out).parent if out else Path("runs")) / "rows"
    if isinstance(data, Mapping):
        return rest | {"data": {task: _row_source(rows, folder) for task, rows in data.items()}}
    if data is None:
        return rest
    if not (isinstance(data, list) and data and all(isinstance(one, str) for one in data)):
        data = [_row_source(data, folder)]
    return rest | config.from_file({"data": data}, rest)[0]


def _row_source(rows: Any, folder: Path) -> str:
    """`rows` if it is a text or path, else the file that they are written to. DataError for a row
    that is not JSON."""
    from soulkit.errors import DataError
    from soulkit.runs.jsonl import write_aside

    if isinstance(rows, str | Path):
        return str(rows)
    if hasattr(rows, "to_dict"):  # a data frame of polars or pandas
        rows = rows.to_dicts() if hasattr(rows, "to_dicts") else rows.to_dict("records")
    lines, problem = [], "data= cannot be used"
    try:
        for index, row in enumerate(rows):
            line, problem = {}, f"Row {index} of data= cannot be used"
            for column, value in row.items():
                problem = f"Row {index} of data= cannot be used, column {column!r}"
                if not (isinstance(value, float) and value != value):  # NaN is a missing value
                    line[column] = json.loads(json.dumps(value, allow_nan=False, default=_plain))
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{problem}: {error}.",
            "It is a list of rows, and a row is a dictionary of texts, numbers, lists and "
            "dictionaries.",
            "Convert the value, or remove the row.",
        ) from error
    text = "".join(lines).encode()
    write_aside(file := folder / f"{hashlib.sha256(text).hexdigest()[:12]}.jsonl", text)
    return str(file)


def _plain(value: Any) -> Any:
    """The Python form of a value of NumPy or pandas."""
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    convert = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    if convert is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return convert()


def compare(
    a: str | Path, b: str | Path, metric: str = "headline", *, suite: str = "",
    force_mixed: bool = False, shared_rows: bool = False,
) -> ComparisonResult:  # fmt: skip
    """The difference B - A per task on episodes that both runs scored, like `soul compare`.

        sk.compare("runs/before", "runs/after").tasks[0].paired.difference

    `shared_rows` restricts it to rows that both evaluations contain. RunError if the runs share no
    episode or were measured differently.
    """
    from soulkit.eval.comparison.compare import compare_runs
    from soulkit.notebook import ComparisonResult

    with _explained():
        compared = compare_runs(Path(a), Path(b), metric, allow_mixed=force_mixed, suite=suite,
                                only_shared_rows=shared_rows)  # fmt: skip
    return ComparisonResult.of(compared, Path(a), Path(b))


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

    load_registry.cache_clear()
    registry = load_registry(*([Path(tasks)] if tasks is not None else []))
    return registry.task(name, protocol_named(protocol))


def _names(tasks: str | Sequence[str]) -> tuple[str, ...]:
    names = tasks.split(",") if isinstance(tasks, str) else tasks
    return tuple(name.strip() for name in names)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)
