"""Gates: limits on results, tested with their confidence intervals.

    TASK/METRIC>=0.8      the lower end of the interval is at least 0.8 (default: the headline)
    TASK<=0.2             the upper end of the interval is at most 0.2
    estimate(TASK)>=0.8   the mean itself, without its interval
    mean(SUITE)>=0.7      the average of a suite; `SUITE>=0.7` is the same
    scored(TASK)>=0.8     over scored episodes only

A gate passes only if the whole interval is on the right side of the limit, fails if the whole
interval is on the wrong side, and is undecided otherwise. In one run, an episode without a value
counts against the gate (`worst_case`). Of two runs (`soul compare`, `soul distill`) the tested
result is the difference B - A over the episodes that both scored; `scored` changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from soulkit.errors import ConfigError, did_you_mean
from soulkit.eval.results.cells import (
    Cell,
    headline_name,
    metric_name,
    missing_parts_text,
    suite_lines,
)
from soulkit.eval.results.summary import Summary, records_by_task, worst_case
from soulkit.metrics.comparisons import PairedDifference
from soulkit.metrics.intervals import estimate_text, number
from soulkit.parse import decoded, read_limited
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import write_aside
from soulkit.runs.records import load_records
from soulkit.tasks.kit.registry import Registry
from soulkit.text import join_and, one_line
from soulkit.types import Record

Outcome = Literal["pass", "fail", "undecided"]
_FORM = re.compile(r"\s*(.+?)\s*(>=|<=|>|<)\s*([-+\u2212]?(?:\d+\.?|\.\d)\d*(?:[eE][-+]?\d+)?)\s*")
_HOW = re.compile(r"(estimate|mean|scored)\(\s*(.+?)\s*\)")
MOST_CHARACTERS = 300
"""Length of a gate; the patterns take quadratic time."""
_TAIL = 0.025
"""Probability on either side of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition on a result, or on the difference between two runs."""

    text: str
    target: str
    """A task or a suite."""
    metric: str
    """Empty for the headline."""
    sign: str
    """`>=`, `>`, `<=` or `<`."""
    margin: float
    how: tuple[str, ...] = ()
    """The functions around the target: `estimate`, `mean`, `scored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The outcome of a gate."""

    gate: Gate
    outcome: Outcome
    value: float | None
    """The tested mean or difference."""
    low: float | None
    high: float | None
    why: str = ""
    """The basis of the interval, or why there is none."""
    n_scored: int = 0
    n: int = 0
    """Episodes of the result; 0 for a difference."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        counts = {"n_scored": self.n_scored, "n": self.n} if self.n else {}
        return {
            "gate": self.gate.text, "outcome": self.outcome, "value": self.value,
            "ci_low": self.low, "ci_high": self.high, **counts, "why": self.why,
        }  # fmt: skip

    def line(self, shown: Callable[[object], str] = number) -> str:
        """`gate TASK>=0.8: pass, 0.831 [0.790, 0.865] (accuracy, 98/100 scored)`."""
        where = estimate_text(self.value, self.low, self.high, shown)
        if "[" not in where and "estimate" not in self.gate.how:
            where = "no interval" if self.value is None else f"{where}, no interval"
        why = f" ({self.why})" if self.why else ""
        return one_line(f"gate {self.gate.text}: {self.outcome}, {where}{why}")


# -- reading gates ---------------------------------------------------------------------------------


def parse_gate(text: str) -> Gate:
    """`TASK/METRIC>=NUMBER`, also with functions → a gate; ConfigError for anything else."""
    match = _FORM.fullmatch(text) if len(text) <= MOST_CHARACTERS else None
    margin = float(match[3].replace("\u2212", "-")) if match else math.nan
    inner, how = match[1] if match else "", []
    while around := _HOW.fullmatch(inner):
        how.append(around[1])
        inner = around[2]
    target, slash, metric = inner.partition("/")
    wrong = not target.strip() or "(" in target or (slash and not metric)
    if not match or not math.isfinite(margin) or wrong:
        raise ConfigError(
            f"'{one_line(text, 80)}' is not a valid gate.",
            "A gate is a task or suite, an optional metric (default: the headline), and a limit; "
            "estimate(…), mean(…) and scored(…) may stand around the name.",
            "Write --gate 'TASK/METRIC>=0.8', with quotes so that the shell does not interpret >.",
        )
    return Gate(text.strip(), target.strip(), metric.strip(), match[2], margin, (*how,))


def gates_in(file: Path) -> list[str]:
    """The gates in a file: one per line, also as a YAML list; `#` begins a comment."""
    try:
        lines = decoded(read_limited(file)).splitlines()
        texts = [line.split("#")[0].strip().removeprefix("- ").strip("'\" ") for line in lines]
        if not any(texts):
            raise ValueError("it has none")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The gates in '{file}' cannot be read: {error}.",
            "Without gates the command would always pass.",
            "Write one gate per line, such as TASK/METRIC>=0.8.",
        ) from error
    return [*filter(None, texts)]


def check_gates(
    gates: Sequence[Gate], tasks: Collection[str], registry: Registry, suite: str = "",
    whose: str = "both runs",
) -> None:  # fmt: skip
    """ConfigError for a gate on a task that is not in `tasks`, on another suite than `suite`
    (empty: any) or, for a single run, on a suite with other tasks."""
    for gate in gates:
        if gate.target in tasks and "mean" not in gate.how:
            continue
        if gate.target not in registry.suites:
            mean = "mean" in gate.how
            kind = "a suite" if mean else f"a task of {whose}"
            raise ConfigError(
                f"The gate '{gate.text}' is for '{gate.target}', which is not {kind}.",
                f"A gate needs a suite, or a task of {whose}: {', '.join(tasks)}.",
                did_you_mean(gate.target, [*([] if mean else tasks), *registry.suites]),
            )
        more = [t for t in registry.suite(gate.target) if t not in tasks and whose != "both runs"]
        if more or (suite and gate.target != suite):
            raise ConfigError(
                f"The gate '{gate.text}' is for the suite '{gate.target}', but "
                + (f"--suite is '{suite}'." if suite else f"{whose} lacks {join_and(more)}."),
                f"Tasks of '{gate.target}' that are not played would count as missing.",
                f"Write the gate for '{suite}', or leave out --suite." if suite
                else f"Write --suite {gate.target} in place of --task, or change the gate.",
            )  # fmt: skip


# -- testing them ----------------------------------------------------------------------------------


def gate_result(
    gate: Gate, value: float | None, low: float | None, high: float | None, why: str = "",
    **counts: int,
) -> GateResult:  # fmt: skip
    """Test whether the interval from `low` to `high`, or the value of an `estimate`, is on the
    right side of the gate's margin."""
    ends = (value, value) if "estimate" in gate.how else (low, high)
    outcome = "undecided" if None in ends else _outcome(gate, *ends)  # type: ignore[arg-type]
    return GateResult(
        gate=gate, outcome=outcome, value=value, low=low, high=high, why=why, **counts
    )


def paired_gate(gate: Gate, paired: PairedDifference, name: str, span: float | None) -> GateResult:
    """Test a gate on a paired difference in the metric `name`, whose scale is `span` wide. If the
    difference has no spread, its interval comes from `unseen_interval`."""
    why = f"{name}, {paired.n_shared} episodes"
    why += " of one cluster" if paired.n_clusters == 1 else ""
    low, high = paired.ci_low, paired.ci_high
    if low is None and paired.difference is not None and paired.n_clusters > 1:
        why = f"{name}: no spread in {paired.n_clusters} clusters"
        if span is not None and paired.method == "no-spread":
            low, high = unseen_interval(paired.difference, paired.n_clusters, span)
    return gate_result(gate, paired.difference, low, high, why)


def run_gates(
    gates: Sequence[Gate], summary: Summary, records: Sequence[Record], registry: Registry
) -> Iterator[GateResult]:
    """Test gates on the results of one run; ConfigError for a metric that its task lacks."""
    by_task, whole = records_by_task(records), summary.tasks
    for gate in gates:
        single, strict = "mean" not in gate.how and gate.target in whole, "scored" not in gate.how
        names = [gate.target] if single else registry.suite(gate.target)
        tasks = {name: whole[name] for name in names if name in whole}
        if strict:
            end = int(gate.sign[0] == "<")
            tasks = {t: worst_case(t, c, by_task.get(t, []), end) for t, c in tasks.items()}
        cells = {task: _named_cell(gate, task, cells) for task, cells in tasks.items()}
        if single:
            ((name, cell),) = cells[gate.target].items()
            missing = cell.not_applicable or missing_parts_text(cell)
        else:
            suite = registry.suite_spec(gate.target).model_copy(update={"average": "macro"})
            line = suite_lines(suite, cells, lambda _: None)[-1]
            name, cell, missing = f"{len(line.members)} members", line.cell, join_and(line.missing)
            missing += " missing" if missing else ""
        counts = {"n_scored": cell.n_scored, "n": cell.n}
        why = [name, f"{cell.n_scored}/{cell.n} scored", missing]
        if strict and cell.n_scored < cell.n:
            why.append("no worst case" if cell.mean is None else "the others count as the worst")
        text = ", ".join(filter(None, why))
        yield gate_result(gate, cell.mean, cell.ci_low, cell.ci_high, text, **counts)


def tested_gates(
    texts: Sequence[str], run: Run, summary: Summary, registry: Registry
) -> list[GateResult]:
    """`run_gates` on a finished run."""
    gates = [*map(parse_gate, texts)]
    records = load_records(run.episodes, light=True) if gates else []
    return [*run_gates(gates, summary, records, registry)]


def _named_cell(gate: Gate, task: str, cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Name → cell of the gate's metric, as the headline; an empty cell if nothing is scored."""
    names = {metric_name(name, cells): name for name in cells}
    key = names.get(gate.metric, gate.metric) or headline_name(cells)
    if key in cells or not any(cell.n_scored for cell in cells.values()):
        return {metric_name(key, cells): replace(cells.get(key, Cell()), headline=True)}
    raise ConfigError(
        f"The gate '{gate.text}' is for '{gate.metric}', which is not a metric of {task}.",
        "The run is finished; the same command with another gate plays nothing again.",
        did_you_mean(gate.metric, names),
    )


def _outcome(gate: Gate, low: float, high: float) -> Outcome:
    # Mirror `<=` gates so that higher is better.
    upward = gate.sign.startswith(">")
    worst, best, margin = (low, high, gate.margin) if upward else (-high, -low, -gate.margin)
    if worst > margin or (worst == margin and gate.sign.endswith("=")):
        return "pass"
    return "fail" if best < margin or worst == best else "undecided"


def unseen_interval(difference: float, clusters: int, span: float) -> tuple[float, float]:
    """Interval of a mean difference d that was the same in each of C = `clusters` clusters.

    With probability 1 - 0.025, at most a share q = 1 - 0.025**(1/C) of all clusters differs, each
    by no more than `span`, the width of the scale. The interval is (1 - q) d - q span to
    (1 - q) d + q span.
    """
    share = 1 - _TAIL ** (1 / clusters)
    middle = (1 - share) * difference
    return middle - share * span, middle + share * span


def write_junit(file: Path, name: str, lines: Mapping[str, GateResult]) -> None:
    """Write JUnit XML with a test case for each gate, from its line in the terminal and its result.
    A gate that failed or is undecided is a failure of this type."""
    suites, failures = Element("testsuites"), [r for r in lines.values() if r.outcome != "pass"]
    counts = {"tests": str(len(lines)), "failures": str(len(failures))}
    suite = SubElement(suites, "testsuite", {"name": name, **counts})
    for line, result in lines.items():
        case = SubElement(suite, "testcase", classname=name, name=one_line(result.gate.text))
        if result in failures:
            SubElement(case, "failure", type=result.outcome, message=line)
    indent(suites)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_aside(file, tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")
