"""Evaluations as records of Every Eval Ever, a shared format for evaluation results.

    FOLDER/data/COLLECTION/DEVELOPER/MODEL/UUID.json            one record per run
                                          /UUID_samples.jsonl   one line per scored episode

A record says what its run recorded. What the run does not know is left out, or `unknown` where the
format demands a value: who made the model, whether its weights are public, who evaluates. The
format has no place for an unscored episode: it is counted in the details and has no sample.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from math import sqrt
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from soulkit.eval.results.cells import VALUE, Cell, metric_name
from soulkit.metrics.intervals import finite_value
from soulkit.report.exports.episodes import METRIC, TAG, episode_row
from soulkit.report.load import EPISODES, RunData
from soulkit.runs.jsonl import aside, has_lines, write_json
from soulkit.runs.records import stream_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.kit.scoring import of_one_origin
from soulkit.types import Record, Usage

VERSION = "0.3.0"
"""Version of the schemas."""
UNKNOWN = "unknown"
PATH = ("/", ".", "~")
"""Beginnings of a path, as opposed to a public name."""
ARGUMENTS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
             "max_tokens": "max_tokens", "thinking": "reasoning"}  # fmt: skip
"""Sampling setting → its name in the format."""
COMBINED = {"mean": "average", "vote": "majority_vote"}
"""How judges are combined → the word of the format."""
OF_MODEL = ("kind", "weights", "weights_basis", "revision", "adapter_weights", "adapter_revision")
OF_CELL = ("n", "n_scored", "n_clusters", "unit", "unscored", "worst", "best", "missing")
OF_SAMPLE = ("kind", "rollout", "cluster", "origin", "status", "words", "judges", METRIC, TAG)
"""Facts that go into additional details, and the columns of an episode in its metadata."""

Facts = Mapping[str, Any]
Line = dict[str, Any]


def unfit_reason(run: RunData) -> str:
    """Why there is no record of `run`; empty if there is one."""
    if run.kind == "train":
        return "a training run; export an evaluation of the trained model"
    if run.progress is not None:
        return f"unfinished, {run.progress.text()}; the command that started it resumes it"
    if not has_lines(run.path / EPISODES):
        return "its episodes are missing"
    scored = any(cell.mean is not None for cells in run.tasks.values() for cell in cells.values())
    return "" if scored else "no episode has a score"


def write_record(run: RunData, folder: Path) -> Path:
    """Write the record and samples of a finished evaluation below `folder`; returns the record's
    path. Both replace those of an earlier export of the same run."""
    origin, now = run.provenance, str(int(time.time()))
    model = _model(origin.get("actor", {}), run)
    suite = run.summary.suite if run.summary else ""
    collection = suite or (next(iter(run.tasks)) if len(run.tasks) == 1 else "soulkit")
    *developer, name = model["id"].split("/", 1)
    place = "/".join(_portable(part) for part in (collection, *(developer or [UNKNOWN]), name))
    digest = hashlib.sha256(_text([origin, repr(run.tasks)]).encode("utf-8", "replace")).digest()
    file = folder / "data" / place / f"{UUID(bytes=digest[:16], version=4)}.json"
    samples = file.with_name(f"{file.stem}_samples.jsonl")
    versions, started = origin.get("versions", {}), origin.get("dates", {}).get("started")
    try:
        moment = datetime.fromisoformat(started).timestamp() if started else None
    except (TypeError, ValueError):  # the file was edited
        moment = None
    record: Line = {
        "schema_version": VERSION,
        "evaluation_id": f"{collection}/{model['id']}/{now}",
        **({"evaluation_timestamp": f"{moment:.0f}"} if moment is not None else {}),
        "retrieved_timestamp": now,
        "source_metadata": {
            "source_name": "soulkit", "source_type": "evaluation_run",
            "source_organization_name": UNKNOWN, "evaluator_relationship": "other",
        },
        "eval_library": {"name": "soulkit", "version": versions.get("soulkit") or UNKNOWN,
                         "additional_details": _texts({"commit": versions.get("commit")})},
        "model_info": model,
        "evaluation_results": [one for task in run.tasks for one in _results(run, task)],
    }  # fmt: skip
    record["detailed_evaluation_results"] = {
        "format": "jsonl", "file_path": samples.relative_to(folder).as_posix(),
        "hash_algorithm": "sha256", **_write_samples(run, record, samples),
    }  # fmt: skip
    write_json(file, record)
    return file


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _texts(values: Facts) -> dict[str, str]:
    """The known values as texts, which the format demands of additional details."""
    return {name: _text(v) for name, v in values.items() if v not in (None, "", {}, [], ())}


def _portable(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name.replace("/", "_")).strip("-.") or UNKNOWN


def _model(player: Facts, run: RunData) -> Line:
    """`model_info` of a player. Paths of local folders are cut to their last two parts."""
    actor = run.provenance.get("actor", {})
    player = actor if player.get("kind") == "actor" else player  # it judges itself
    kind, address = str(player.get("kind", "")), urlsplit(player.get("address") or "")
    known = {"model": kind in ("api", "endpoint") or "revision" in player,
             "adapter": "adapter_revision" in player}  # fmt: skip
    parts = {part: str(player.get(part) or "").partition("@")[0] for part in known}
    public = {part: known[part] and not name.startswith(PATH) for part, name in parts.items()}
    shown = [name if public[part] else "/".join(Path(name).parts[-2:]).lstrip("/.~")
             for part, name in parts.items() if name]  # fmt: skip
    last = "adapter" if parts["adapter"] else "model"
    made: Line = {"name": " + ".join(shown) or UNKNOWN}
    made["id"] = parts[last] if public[last] else _portable(made["name"].replace("/", "-"))
    host, engine = address.hostname or "", run.provenance.get("engine", {})
    if "." in host and not host.replace(".", "").isdigit():
        made["inference_platform"] = host
    if player is actor and engine:
        version = engine.get("version")
        made["inference_engine"] = _texts({"name": engine.get("kind"), "version": version})
    made["additional_details"] = {
        "deployment_type": UNKNOWN if kind in ("api", "endpoint", "") else "self_deployed",
        "model_availability": UNKNOWN,
        **_texts({name: player.get(name) for name in OF_MODEL}),
    }
    return made


def _results(run: RunData, task: str) -> Iterator[Line]:
    """The numbers of a task with a known direction: its score and break-downs, its headline, and
    the metrics that a built-in task declares. Other means are details of the score."""
    cells, spec = run.tasks[task], load_registry().specs.get(task)
    beside, fewer = (spec.metric.beside, spec.metric.less_is_better) if spec else ((), ())
    known = {name for name, cell in cells.items()
             if cell.headline or name in beside or name.partition("/")[0] == VALUE}  # fmt: skip
    others = {f"mean of {name}": cells[name].mean for name in cells.keys() - known}
    facts: Facts = run.provenance.get("tasks", {}).get(task, {})
    rows, prompts = facts.get("rows", {}), run.summary.prompts.get(task, {}) if run.summary else {}
    about = {"rows": rows.get("n"), "sha256": rows.get("sha256"), "files": facts.get("origins")}
    source = {"dataset_name": task, "source_type": "other", "additional_details": _texts(about)}
    for name, cell in cells.items():
        if name in known and cell.mean is not None:
            own = name.partition("/") if name.startswith(f"{VALUE}/") else (name, "", "")
            yield {
                "evaluation_result_id": f"{task}/{name}",
                "evaluation_name": task + own[1] + own[2],
                "source_data": source,
                "metric_config": {
                    "metric_name": metric_name(own[0], cells), "lower_is_better": name in fewer,
                    **({"score_type": "continuous", "min_score": cell.scale[0],
                        "max_score": cell.scale[1]} if cell.scale else {}),
                    **(_judging(run, facts, prompts) if own[0] == VALUE else {}),
                },
                "score_details": _score(cell, others if name == VALUE else {}),
                "generation_config": _generation(run, facts, prompts),
            }  # fmt: skip


def _score(cell: Cell, others: Facts) -> Line:
    """The mean over scored episodes as recorded, with its interval and counts."""
    unsure: Line = {"num_samples": cell.n_scored}
    if cell.ci_low is not None and cell.ci_high is not None:
        ends = {"lower": cell.ci_low, "upper": cell.ci_high}
        unsure["confidence_interval"] = {**ends, "confidence_level": 0.95, "method": cell.method}
    if cell.variance is not None:
        unsure["standard_error"] = {"value": sqrt(cell.variance), "method": "over clusters"}
    details = {**{name: getattr(cell, name) for name in OF_CELL}, **others}
    return {"score": cell.mean, "uncertainty": unsure, "details": _texts(details)}


def _generation(run: RunData, facts: Facts, prompts: Facts) -> Line:
    """The requested sampling settings, except those that the server rejected."""
    model = run.provenance.get("actor", {}).get("model")
    rest, rejected = _used(facts.get("sampling", {}), facts, "actor", model)
    arguments = {ARGUMENTS[name]: rest.pop(name) for name in ARGUMENTS if name in rest}
    own = {name: run.provenance.get(name) for name in ("seed", "repeats", "protocol")}
    more = {**rest, **own, "rejected_by_server": rejected, "prompt_templates": prompts}
    return {"generation_args": arguments, "additional_details": _texts(more)}


def _used(requested: Facts, facts: Facts, role: str, model: Any) -> tuple[Line, Facts]:
    """The requested settings that the model's server accepted; setting that it rejected → share of
    calls."""
    rejected = (facts.get("dropped_settings") or {}).get(role, {}).get(model, {})
    return {n: v for n, v in requested.items() if v is not None and n not in rejected}, rejected


def _judging(run: RunData, facts: Facts, prompts: Facts) -> Line:
    """The judges of a task; empty if rules score it."""
    judges = facts.get("players", {}).get("judge") or run.provenance.get("players", {}).get("judge")
    if "judge" not in facts.get("roles", ()) or not judges:
        return {}
    panel, asked = run.provenance.get("panel", {}), []
    for judge in judges:
        used, rejected = _used(judge.get("sampling", {}), facts, "judge", judge.get("model"))
        warmth = {"temperature": used.pop("temperature")} if "temperature" in used else {}
        more = _texts({**used, "rejected_by_server": rejected})
        asked.append({"model_info": _model(judge, run), **warmth, "additional_details": more})
    hashes = _text({name: used for name, used in prompts.items() if name != "user"})
    combined = COMBINED.get(panel.get("combine")) if len(judges) > 1 else None
    return {"llm_scoring": {
        "judges": asked,
        "input_prompt": f"hashes of soulkit's templates: {hashes}",
        **({"aggregation_method": combined} if combined else {}),
        "additional_details": _texts({"samples": panel.get("samples") or facts.get("samples")}),
    }}  # fmt: skip


def _write_samples(run: RunData, record: Line, file: Path) -> Line:
    """Write a line for every scored episode; returns their number and the checksum."""
    names = {r["evaluation_result_id"]: r["evaluation_name"] for r in record["evaluation_results"]}
    places = {r.key: i for i, r in enumerate(stream_records(run.path / EPISODES, light=True))}
    newest, rows, digest = set(places.values()), 0, hashlib.sha256()
    with aside(file) as stream:
        for place, one in enumerate(stream_records(run.path / EPISODES)):
            cells = (f"{VALUE}/kind={one.kind}", of_one_origin(VALUE, one.origin), VALUE)
            result = next((n for c in cells if (n := f"{one.task}/{c}") in names), "")
            if place in newest and result and finite_value(one.score.value) is not None:
                line = {
                    "schema_version": VERSION, "evaluation_id": record["evaluation_id"],
                    "model_id": record["model_info"]["id"], "evaluation_result_id": result,
                    "evaluation_name": names[result],
                    **_sample(one, run.tasks[one.task][VALUE]),
                }  # fmt: skip
                data = json.dumps(line, allow_nan=False).encode() + b"\n"
                stream.write(data)
                digest.update(data)
                rows += 1
    counts = _texts({"episodes": len(newest), "unscored": len(newest) - rows})
    return {"checksum": digest.hexdigest(), "total_rows": rows, "additional_details": counts}


def _sample(record: Record, cell: Cell) -> Line:
    """An episode. Its answer counts as correct only with the highest score of the scale."""
    score, gold, row = record.score, [record.gold] if record.gold else [], episode_row(record)
    text = "".join([record.prompt, *gold]).encode("utf-8", "replace")
    used = sum((turn.completion.usage for trace in record.episode.traces for turn in trace.turns),
               Usage())  # fmt: skip
    sample: Line = {
        "sample_id": record.example_id,
        "sample_hash": hashlib.sha256(text).hexdigest(),
        "input": {"raw": record.prompt, "reference": gold},
        **_said(record),
        "evaluation": {
            "score": score.value,
            "is_correct": cell.scale is not None and score.value == cell.scale[1],
        },
        "metadata": _texts({name: v for name, v in row.items() if name.startswith(OF_SAMPLE)}),
    }
    if used.prompt_tokens or used.completion_tokens:  # of the model, without its partners
        both = used.prompt_tokens + used.completion_tokens
        sample["token_usage"] = {"input_tokens": used.prompt_tokens, "total_tokens": both,
                                 "output_tokens": used.completion_tokens}  # fmt: skip
    if used.seconds:
        sample["performance"] = {"latency_ms": 1000 * used.seconds}
    return {**sample, "error": score.status} if _failed(record) else sample


def _failed(record: Record) -> bool:
    return record.score.status not in ("ok", "salvaged")


def _said(record: Record) -> Line:
    """The reply, or the transcript of a dialogue: the evaluated model is the assistant; if it plays
    several seats, each line has the name of its seat."""
    lines, final = record.episode.transcript, record.episode.final
    if len(lines) > 1:
        seats = {trace.seat for trace in record.episode.traces}
        several = len(seats) != 1
        roles = [line.seat if several else "assistant" if line.seat in seats else "user"
                 for line in lines]  # fmt: skip
        messages = [{"turn_idx": i, "role": role, "content": line.text}
                    for i, (role, line) in enumerate(zip(roles, lines, strict=True))]  # fmt: skip
        return {"interaction_type": "multi_turn", "messages": messages, "answer_attribution": []}
    output: Line = {"raw": [final.text] if final else [line.text for line in lines]}
    if final and final.reasoning:
        output["reasoning_trace"] = [final.reasoning]
    parsed = {"turn_idx": 0, "source": "output.raw", "extracted_value": record.score.words,
              "extraction_method": "custom", "is_terminal": True}  # fmt: skip
    by_rule = record.score.words and not record.score.verdicts and not _failed(record)
    return {"interaction_type": "single_turn", "output": output,
            "answer_attribution": [parsed] if by_rule else []}  # fmt: skip
