"""What is known of a simulator: `certificate.json`, which lies beside its weights.

`soul certify` collects what other commands have measured. A certificate counts only for weights
with its hash, or for those that `copy_certificate` gave it to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from soulkit.data.corpora.settings import HUMAN
from soulkit.errors import RunError
from soulkit.eval.comparison.provenance_text import role_text
from soulkit.eval.results.summary import Summary, summary_line
from soulkit.eval.run.provenance import in_start_folder
from soulkit.metrics.intervals import estimate_text, number, signed
from soulkit.models.local.loading import NOTE, adapter_hash
from soulkit.models.local.weights import weights_hash
from soulkit.people import continuations
from soulkit.people.memory import MEMORY
from soulkit.people.turns import read_turns
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import provenance_of
from soulkit.runs.folder import is_run, read_config
from soulkit.runs.jsonl import CERTIFICATE_SCHEMA, SCHEMA, read_object, write_json
from soulkit.text import counted
from soulkit.version import __version__

FILE = "certificate.json"
Facts = Mapping[str, Any]
ABOUT = ("persons", "turns", "conversations", "side", "seed")
NUMBERS = ("key", "headline", "ratios", "distance", "words", "context", "likelihood", "perplexity",
           "lines")  # fmt: skip
HASHES = ("weights", "adapter_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The contents of `certificate.json`."""

    model: Facts
    """`name`, `base`, and the hashes `weights` and `adapter_weights`."""
    scores: Sequence[Facts]
    """The headline of each task in the evaluations."""
    closeness: Facts
    """The model's part of `closeness.json`; empty if not measured."""
    memory: Facts
    """The last checkpoint in `memory.json`; empty if not measured."""
    unknown: Sequence[str]
    """Names of the measurements that are missing."""
    date: str
    soulkit: str
    revision: str = ""
    """A hash of the fields above."""
    copies: Sequence[str] = field(default_factory=list)
    """Hashes of weights that were exported from the model."""


def certify(
    model: str, people: str | None = None, *, side: str = HUMAN, adapter: str | None = None,
    runs: Sequence[Path] = (), target: Path | None = None, reporter: Reporter = SILENT,
) -> tuple[dict[str, Any], Path]:  # fmt: skip
    """Collect what is known of a model, and write it: (the certificate, its file).

    With `people`, closeness is measured unless it is recorded; without, the recorded one counts.
    """
    subject = _subject(model, adapter)
    identity = _identity(subject)
    scores = [score for run in runs for score in _scores(run, model, identity)]
    report: Facts = read_object(continuations.closeness_folder(model) / continuations.FILE)
    if people is not None:
        report = continuations.measure_closeness(
            model, people, side=side, adapter=adapter, reporter=reporter
        )
    closeness, memory = _closeness(model, subject, report), _memory(model, subject)
    if not (scores or closeness or memory):
        raise RunError(
            f"Nothing was measured of '{model}' yet.",
            "A certificate collects scores, closeness to people and memory of the same weights.",
            f"Measure it: soul certify {model} --people FILE, or add --run RUN",
        )
    parts = {
        "scores on tasks": scores, "closeness to people": closeness,
        "memory of private items": memory,
        "whether the people were in training": closeness.get("persons_in_training") is not None,
    }  # fmt: skip
    content = asdict(Certificate(
        model=identity, scores=scores, closeness=closeness, memory=memory,
        unknown=[name for name, part in parts.items() if not part],
        date=datetime.now().astimezone().isoformat(timespec="seconds"), soulkit=__version__,
    ))  # fmt: skip
    certificate = {SCHEMA: CERTIFICATE_SCHEMA, **content, "revision": _revision(content)}
    file = target or _folder(model, adapter) / FILE
    write_json(file, certificate)
    return certificate, file


def find_certificate(model: str, adapter: str | None = None) -> dict[str, Any] | None:
    """The certificate of a run, a model folder or an exported folder; None if it has none.

    Of one that was changed or is of other weights only `stale` is returned: why it does not count.
    """
    folder = _folder(model, adapter)
    places = [folder / FILE, *([folder.parent / FILE] if folder.name == "model" else [])]
    file = next((one for one in places if one.is_file()), None)
    if file is None:
        return None
    certificate = read_object(file)
    try:
        weights = {_digest(certificate["model"]), *certificate["copies"]}
        is_whole = certificate_lines(certificate) and certificate["revision"] == _revision(
            certificate
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        weights, is_whole = set(), False
    weightless = is_run(folder) and not (folder / "model").is_dir()
    here = "missing" if weightless else _digest(_identity(_subject(model, adapter)))
    if is_whole and here in weights:
        return certificate
    names = ", ".join(sorted(weights))
    why = f"it is of the weights {names}, and these are {here}" if is_whole else "it was changed"
    return {SCHEMA: CERTIFICATE_SCHEMA, "stale": f"{file} does not count: {why}."}


def copy_certificate(model: str, folder: Path) -> None:
    """Give the certificate of a model, if it has one, to the weights that were exported from it."""
    certificate = find_certificate(model)
    if certificate and "stale" not in certificate:
        copies = {*certificate["copies"], _digest(_identity(_subject(str(folder))))}
        write_json(folder / FILE, {**certificate, "copies": sorted(copies)})


def certificate_lines(certificate: Facts | None) -> list[str]:
    """What a certificate says, line by line, for terminals, cards and pages."""
    if certificate is None or "stale" in certificate:
        nothing = "soul certify collects what was measured of a model."
        return [f"No certificate: {certificate['stale'] if certificate else nothing}"]
    model, unknown = certificate["model"], certificate["unknown"]
    revision, date = certificate["revision"], certificate["date"][:10]
    weights = model["adapter_weights"] or model["weights"] or "unknown"
    return [
        f"Certificate {revision} of {model['name']}, {date}, weights {weights}",
        *(_closeness_lines(certificate["closeness"]) if certificate["closeness"] else ()),
        *map(_score_line, certificate["scores"]),
        *(_memory_lines(certificate["memory"]) if certificate["memory"] else ()),
        *([f"Not measured: {', '.join(unknown)}"] if unknown else ()),
    ]


def _closeness_lines(one: Facts) -> Iterator[str]:
    ratios = ", ".join(f"{name} {number(x, 2)}" for name, x in one["ratios"].items())
    differ = sum((line["p_holm"] or 1.0) < 0.05 for line in one["lines"])
    yield f"Distance from people: {ratios} (1: what chance makes of people)"
    yield (f"Differs from people in {differ} of {len(one['lines'])} features; measured on "
           f"{counted(one['persons'], 'person')}, {counted(one['turns'], 'message')}")  # fmt: skip
    if base := one["against"]:
        apart = estimate_text(base["difference"], base["low"], base["high"], signed)
        yield f"Compared with {base['name']}: {apart} (below 0: closer to people)"
    if one["persons_in_training"]:
        yield f"Warning: {one['persons_in_training']} of these persons were in its training data"


def _score_line(one: Facts) -> str:
    value = estimate_text(one["mean"], one["low"], one["high"])
    judge = f"judge {one['judge']}" if one["judge"] else "scored by rules"
    return (f"{one['task']}: {one['metric']} {value}, {one['n_scored']} of {one['n']} scored, "
            f"{judge}, run {one['run']}")  # fmt: skip


def _memory_lines(one: Facts) -> Iterator[str]:
    for group in one["groups"]:
        if group["repeats"]:
            yield (f"Secrets planted {group['repeats']} × in training: median rank "
                   f"{group['median_rank']:g} of {one['alternatives']}, {group['recited']} of "
                   f"{group['canaries']} recited")  # fmt: skip
    copied = one["verbatim"]["held_in"]
    yield f"Training messages continued word for word: {copied['copied']} of {copied['messages']}"


# -- the model -------------------------------------------------------------------------------------


def _subject(model: str, adapter: str | None = None) -> continuations.ClosenessConfig:
    run = Path(model).resolve() if is_run(Path(model)) else None
    with in_start_folder(run) if run else nullcontext():
        return continuations.models_of(str(run or model), {}, adapter)[-1]


def _folder(model: str, adapter: str | None = None) -> Path:
    """Where the certificate of a model is."""
    folder = Path(adapter or model)
    return folder if folder.is_dir() else continuations.closeness_folder(model)


def _identity(one: continuations.ClosenessConfig) -> dict[str, str]:
    """The name of a model, its base, and the hashes of its weights, as far as they are known."""
    local, folder = one.player.kind == "local", Path(one.player.model)
    here = local and folder.is_dir()
    note = read_object(folder / NOTE).get("base", {}) if here and not one.adapter else {}
    return {
        "name": one.name,
        "base": str(note.get("model") or (one.player.model if local else one.player.written())),
        "weights": weights_hash(folder) if here else "",
        "adapter_weights": adapter_hash(one.adapter) if one.adapter else "",
    }


def _digest(identity: Facts) -> str:
    """What tells a model from others; an adapter was made for one base."""
    return str(identity.get("adapter_weights") or identity.get("weights") or identity.get("base"))


def _revision(content: Facts) -> str:
    covered = {name: x for name, x in content.items() if name not in (SCHEMA, "revision", "copies")}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()[:16]


# -- what was measured -----------------------------------------------------------------------------


def _scores(run: Path, model: str, identity: Facts) -> Iterator[Facts]:
    """The headlines of an evaluation of these weights; RunError for any other run."""
    line = summary_line(run)
    origin = provenance_of(run, line) if line else {}
    played = {name: str(origin.get("actor", {}).get(name) or "") for name in HASHES}
    if not any(played.values()) or any(played[name] != identity[name] for name in HASHES):
        weights = (
            f"the weights {_digest(played)}" if any(played.values()) else "no recorded weights"
        )
        raise RunError(
            f"'{run}' is no evaluation of '{model}'.",
            f"It has {weights}, and this model has {_digest(identity)}.",
            "Name finished runs of `soul eval local` with these weights.",
        )
    for task, cells in Summary.from_json(line).tasks.items():
        judge = role_text({**origin, "tasks": {task: origin.get("tasks", {}).get(task)}}, "judge")
        for metric, cell in cells.items():
            if cell.headline:
                yield {
                    "task": task, "metric": metric, "mean": cell.mean, "low": cell.ci_low,
                    "high": cell.ci_high, "n_scored": cell.n_scored, "n": cell.n, "judge": judge,
                    "protocol": line["protocol"], "run": run.resolve().name,
                }  # fmt: skip


def _closeness(model: str, subject: continuations.ClosenessConfig, report: Facts) -> dict[str, Any]:
    """The numbers of these weights in a `closeness.json`; empty if it has none."""
    entry = (report.get("models") or [{}])[-1]
    if entry.get("weights") != subject.weights:
        return {}
    base = report["against"]
    return {
        **{name: report[name] for name in ABOUT}, "data": Path(str(report["data"])).name,
        **{name: entry[name] for name in NUMBERS},
        "against": base and {"name": base["name"], **base["comparison"]["headline"]},
        "persons_in_training": _persons_in_training(model, report),
    }  # fmt: skip


def _persons_in_training(model: str, report: Facts) -> int | None:
    """How many of the measured persons the run has learned from; None if that is not known."""
    from soulkit.train.setup.rows import lessons_of, sft_config

    run = Path(model).resolve()
    sft = is_run(run) and read_config(run).get("method") == "sft"
    if not sft or not Path(report["data"]).exists():
        return None
    measured = {turn.person for turn in read_turns(str(report["data"]), report["side"])}
    with in_start_folder(run):
        config = sft_config(run)
        return len(
            measured
            & {one.person for source in config.corpora for one in lessons_of(source, config)}
        )


def _memory(model: str, subject: continuations.ClosenessConfig) -> dict[str, Any]:
    """The last checkpoint of a run's `memory.json`; empty if it is not of these weights."""
    record = read_object(Path(model) / MEMORY)
    last = (record.get("checkpoints") or [{}])[-1]
    if last.get("weights") != subject.weights:
        return {}
    return {**last, "planted": record["planted"], "alternatives": record["alternatives"]}
