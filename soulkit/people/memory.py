"""What a model remembers of conversations: canaries, and messages that it continues word for word.

A canary (`data/privacy/canaries.py`) has a rank among other secrets (`train/sft/exposure.py`); it
is recited if greedy decoding writes it after its beginning. Ranks that at most one in 20 secrets
would have by chance are significant. A message of ten words or more is copied if greedy decoding
writes its second half after its context and its first half. Held-out messages are the control.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.stream import read_lessons
from soulkit.data.privacy.canaries import SecretCanary, read_canaries
from soulkit.errors import ConfigError, RunError
from soulkit.eval.run.provenance import in_start_folder
from soulkit.metrics.intervals import estimate, exact_interval
from soulkit.people.continuations import ClosenessConfig, models_of
from soulkit.people.turns import PersonTurn, turns_in
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.conditions import Conditions, MaterialFacts
from soulkit.runs.folder import is_run
from soulkit.runs.jsonl import read_object, write_json

if TYPE_CHECKING:
    from soulkit.train.model.policy import Policy
    from soulkit.train.sft.exposure import CanaryPlace

MEMORY = "memory.json"
LEVEL = 0.05
WORDS = 10
"""Fewest words of a message that may be copied."""
LIMIT = 200


@dataclass(frozen=True)
class Material:
    """What a model is asked about."""

    lists: Mapping[Path, Sequence[SecretCanary]]
    held_in: Sequence[PersonTurn]
    held_out: Sequence[PersonTurn]

    @property
    def size(self) -> int:
        """Number of measurements of one model."""
        return 1 + sum(map(len, self.lists.values()))


def measure_memory(
    model: str, canaries: Path | None = None, held_out: Path | None = None, *,
    device: str = "auto", limit: int = LIMIT, reporter: Reporter = SILENT,
) -> dict[str, Any]:  # fmt: skip
    """Measure a model, or every checkpoint of a run and its final weights.

    A run finds its canaries in its record, unless a list is given; its results are in `memory.json`
    and are not measured again. `limit`: held-in and held-out messages each.
    """
    from soulkit.train.sft.exposure import canary_places

    run = Path(model).resolve() if is_run(Path(model)) else None
    canaries, held_out = (path and path.resolve() for path in (canaries, held_out))
    with in_start_folder(run) if run else nullcontext():
        with reporter.working("reading conversations"):
            subjects = models_of(str(run or model), {}, checkpoints=bool(run))
            material = _material(run, canaries, held_out, limit)
        identity = hashlib.sha256(repr(material).encode()).hexdigest()[:16]
        before = read_object(run / MEMORY) if run else {}
        measured = before.get("checkpoints", ()) if before.get("asked") == identity else ()
        result: dict[str, Any] = {
            "schema": "memory", "version": 1, "model": model, "planted": bool(material.lists),
            "alternatives": 512, "asked": identity, "checkpoints": [],
        }  # fmt: skip
        placed = [
            pair for path, several in material.lists.items()
            for pair in zip(several, canary_places(path, several), strict=True)
        ]  # fmt: skip
        with reporter.progress(len(subjects) * material.size) as bar:
            for one in subjects:
                key = {"step": one.step, "weights": one.weights}
                entry = next((e for e in measured if key.items() <= e.items()), None)
                bar.begin(one.name)
                if entry is not None:
                    bar.advance(material.size)
                entry = entry or key | _measured(
                    _policy(one, device), material, placed, bar.advance
                )
                result["checkpoints"].append(entry)
                if run:
                    write_json(run / MEMORY, result)
    return result


def _policy(subject: ClosenessConfig, device: str) -> Policy:
    from soulkit.models.local.sampler import LocalModel
    from soulkit.train.model.policy import Policy

    if subject.player.kind != "local":
        raise ConfigError(
            f"'{subject.name}' is not a local model.",
            "Ranks need the log-probs of given texts.",
            "Name a run, or a folder with weights.",
        )
    loaded = LocalModel.load(subject.player.model, adapter=subject.adapter, device=device)
    return Policy(loaded.model, loaded.tokenizer, packing="auto")


def _material(
    run: Path | None, canaries: Path | None, held_out: Path | None, limit: int
) -> Material:
    """The canaries and messages of a run, or of the given files. RunError if a recorded list is
    missing or has changed."""
    from soulkit.train.setup.rows import lessons_of, sft_config, validation_sources
    from soulkit.train.sft.exposure import canary_facts

    learned: list[Iterable[Lesson]] = []
    others: list[Iterable[Lesson]] = []
    lists, side = [canaries] if canaries else [], None
    if run is not None:
        config = sft_config(run)
        side = config.side
        learned = [lessons_of(one, config) for one in config.corpora]
        others = [lessons_of(one, config) for one in validation_sources(config).values()]
        recorded = (Conditions.read(run) or Conditions(players={}, tasks={})).material
        for name, facts in ((recorded or MaterialFacts()).canaries if not lists else {}).items():
            lists.append(path := Path(name).absolute())
            if not path.is_file() or canary_facts(path) != facts:
                raise RunError(
                    f"The canaries of this run are not in '{path}'.",
                    "The file is missing or was changed after the training.",
                    "Name the list as it was: --canaries FILE",
                )
    listed = {path: read_canaries(path) for path in lists}
    secrets = [one for several in listed.values() for one in several]
    if held_out is not None:
        others = [read_lessons(held_out, side=side or next((c.side for c in secrets), "human"))]

    def chosen(sources: Iterable[Iterable[Lesson]]) -> list[PersonTurn]:
        long = (
            turn for lessons in sources for lesson in lessons for turn in turns_in(lesson)
            if len(turn.text.split()) >= WORDS and not any(c.text in turn.text for c in secrets)
        )  # fmt: skip
        # At random, but always the same ones.
        return heapq.nsmallest(limit, long, lambda t: hashlib.sha256(repr(t).encode()).digest())

    return Material(listed, chosen(learned), chosen(others))


def _measured(
    policy: Policy, material: Material, placed: Sequence[tuple[SecretCanary, CanaryPlace]],
    advance: Callable[[], object],
) -> dict[str, Any]:  # fmt: skip
    from soulkit.train.sft.exposure import canary_rank, canary_spans, continued

    groups: dict[int, list[tuple[int, bool]]] = {}
    for one, place in placed:
        spans = canary_spans(policy, one, place)
        result = canary_rank(policy, spans), policy.greedy(spans[:1])[0]
        groups.setdefault(one.repeats, []).append(result)
        advance()

    def copied(turns: Sequence[PersonTurn]) -> dict[str, Any]:
        texts = [(turn.context, [turn.text, _first_half(turn.text)]) for turn in turns]
        written = policy.greedy([continued(policy, *one)[0] for one in texts])
        share = estimate([float(w) for w in written], [t.person for t in turns], scale=(0.0, 1.0))
        return {"copied": sum(written), "messages": len(turns), "low": share.ci_low,
                "high": share.ci_high}  # fmt: skip

    verbatim = {"held_in": copied(material.held_in), "held_out": copied(material.held_out)}
    advance()
    return {"groups": [_group(*one) for one in sorted(groups.items())], "verbatim": verbatim}


def _first_half(text: str) -> str:
    words = list(re.finditer(r"\S+", text))
    return text[: words[len(words) // 2 - 1].end()]


def _group(repeats: int, results: Sequence[tuple[int, bool]]) -> dict[str, Any]:
    """The cell of one number of repetitions."""
    from soulkit.train.sft.exposure import ALTERNATIVES, exposure

    ranks = [rank for rank, _ in results]
    significant = sum(rank / (ALTERNATIVES + 1) <= LEVEL for rank in ranks)
    low, high = exact_interval(significant, len(ranks))
    return {
        "repeats": repeats, "canaries": len(ranks), "median_rank": median(ranks),
        "median_exposure": round(median(map(exposure, ranks)), 3), "significant": significant,
        "share": significant / len(ranks), "low": low, "high": high,
        "recited": sum(recited for _, recited in results),
    }  # fmt: skip
