"""The part of a report on a model of people: closeness, memory, and how it was made from chats.

A training run has this part if `soul people closeness` or `soul people memory` wrote their files
into it. `soul people build` keeps its record beside the run. Nothing is computed again here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import DataError
from soulkit.metrics.intervals import estimate_text, number, percent, signed
from soulkit.metrics.student import CONFIDENCE, significance
from soulkit.report.figures import Chart, Curve, Plot
from soulkit.report.findings import ONE_RUN, Finding
from soulkit.report.load import RunData
from soulkit.runs.jsonl import damaged, read_object
from soulkit.text import counted, join_and

CLOSENESS, MEMORY, ROAD = "closeness.json", "memory.json", "road.json"
Facts = Mapping[str, Any]
OTHER_ATTACKS = (
    "The ranks show whether the model prefers a secret to others like it. They do not show what "
    "other attacks find: guessing who is in the data, asking in other words, training the model "
    "further, or combining what it says with other sources. A secret that stands out less, or that "
    "a person repeats in other words, is remembered differently."
)
NUMBERS = {
    "distance": (
        "Habits",
        "The distance from people over all lines below, divided by what 95% of 1,000 random halves "
        "of the people stay under. Up to 1, the model is as far from people as they from each "
        "other.",
    ),
    "words": (
        "Words",
        "How often a classifier that sees only the letters takes the person's message for the "
        "person's, of one of a person and one of the model. 0.5: it cannot tell them apart.",
    ),
    "context": (
        "Context",
        "How often the person's reply fits the conversation better than the model's, for a "
        "classifier that learned from people what fits. 0.5: it cannot tell them apart.",
    ),
    "likelihood": (
        "Likelihood",
        "How often the model gives the reply that a person wrote a higher likelihood than one from "
        "another conversation. Chance: 0.5.",
    ),
    "perplexity": ("Perplexity", "Of the people's messages, per token, as the model sees them."),
}
"""Name of a number → its title, and what it means."""
VALUES = {"distance": "ratio", "likelihood": "share", "perplexity": "value"}
"""Name of a number → its key, if that is not `auc`."""
TIMES = {0: "never (control)", 1: "once"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeoplePart:
    """The texts and numbers of the part, ready for the template."""

    run: str
    claim: str
    facts: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, str, str], ...] = ()
    """(title, value with interval, meaning)."""
    lines: tuple[Facts, ...] = ()
    planted: bool = False
    alternatives: int = 0
    groups: tuple[tuple[str, ...], ...] = ()
    """Rows of the table of repetitions of the last checkpoint."""
    checkpoints: tuple[tuple[str, ...], ...] = ()
    """Rows of the table of checkpoints; the first one has the heads."""
    verbatim: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()
    road: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding:
        return Finding(run=self.run, outcome=ONE_RUN, claim=self.claim, facts=self.facts)


def people_parts(runs: Sequence[RunData]) -> list[PeoplePart]:
    """One part for each run that was measured against people. DataError if a file is damaged."""
    parts = []
    for run in runs:
        closeness, memory = (read_object(run.path / name) for name in (CLOSENESS, MEMORY))
        road = read_object(run.path.parent / ROAD)
        road = road if road.get("run") == run.path.name else {}
        if not closeness and not memory:
            continue
        try:
            parts.append(_part(run.name, closeness, memory, road))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(run.path, error) from error
    return parts


def _damaged(path: Path, error: Exception) -> DataError:
    names = ", ".join(name for name in (CLOSENESS, MEMORY) if (path / name).is_file())
    return damaged(
        f"{names} in '{path}' lacks something that the report shows ({error!r}).",
        f"Measure again: soul people closeness {path}; soul people memory {path}",
    )


def _part(run: str, closeness: Facts, memory: Facts, road: Facts) -> PeoplePart:
    models = list(closeness.get("models", ()))
    last = models[-1] if models else {}
    checkpoints = list(memory.get("checkpoints", ()))
    planted = bool(memory.get("planted"))
    claims = [closeness_text(last)] if last else []
    claims += [memory_text(checkpoints[-1], memory["alternatives"])] if planted else []
    people = f"{counted(closeness['persons'], 'person')} who were not in training, " \
             f"{closeness['turns']:,} messages" if last else ""  # fmt: skip
    three = [f"{title} {value}" for title, value, _ in list(_numbers(last))[:3]]
    facts = [("How close", join_and(three)), ("Measured on", people),
             ("What it remembers", claims[-1] if planted else ""),
             ("Canaries", _canaries(memory, planted)), *_road_facts(road)]  # fmt: skip
    return PeoplePart(
        run=run, claim=claims[0] if claims else "How close the model is to people is not measured.",
        facts=tuple((label, text) for label, text in facts if text),
        numbers=tuple(_numbers(last)),
        lines=tuple(_line(one) for one in last.get("lines", ())),
        planted=planted, alternatives=memory.get("alternatives", 0),
        groups=tuple(_group(one) for one in checkpoints[-1]["groups"]) if planted else (),
        checkpoints=tuple(_by_checkpoint(checkpoints)) if len(checkpoints) > 1 and planted else (),
        verbatim=tuple(_verbatim(checkpoints[-1])) if checkpoints else (),
        charts=tuple(people_charts(models, checkpoints)),
        road=tuple(_road_facts(road, whole=True)),
        commands=tuple(step["command"] for step in road.get("steps", ())),
    )  # fmt: skip


# -- closeness -------------------------------------------------------------------------------------


def closeness_text(model: Facts) -> str:
    """The headline in words: the worst of the three numbers."""
    name = model["headline"]["name"]
    value = model[name][VALUES.get(name, "auc")]
    if name == "distance":
        apart = "farther from people than" if value > 1 else "as close to people as"
        return (
            f"By its habits the model is {apart} people are to each other: {number(value, 2)} "
            "times the distance of two halves of the people."
        )
    how = "by the words alone" if name == "words" else "by whether the reply fits the conversation"
    unsure = model["headline"]["value"] <= 1
    verdict = "cannot tell the model from people" if unsure else "tells the model from people"
    return f"A classifier {verdict} {how}: right in {percent(value)} of pairs, where 50% is chance."


def _interval(value: object, ends: Facts) -> str:
    return estimate_text(value, ends.get("low"), ends.get("high"))


def _numbers(model: Facts) -> Iterator[tuple[str, str, str]]:
    for name, (title, meaning) in NUMBERS.items():
        cell, key = model.get(name), VALUES.get(name, "auc")
        if isinstance(cell, Mapping):
            worst = " (the worst)" if model["headline"]["name"] == name else ""
            ends = {} if key == "ratio" else cell  # the interval is that of the distance itself
            yield title + worst, _interval(cell[key], ends), meaning
        elif cell is not None:
            yield title, number(cell, 1), meaning


def _line(one: Facts) -> Facts:
    """A row of the figure of differences; its strip has a scale of its own, with zero in the
    middle."""
    low, high, shown = one["low"], one["high"], one["difference"]
    bounded = low is not None and high is not None
    far = max(abs(low), abs(high), abs(shown), 1e-12) * 1.05 if bounded else 1.0
    differs = one["p_holm"] is not None and one["p_holm"] < significance(CONFIDENCE)
    return {
        "label": one["label"], "people": number(one["people"]), "model": number(one["model"]),
        "difference": estimate_text(shown, low, high, signed), "differs": differs,
        "p": number(one["p_holm"]),
        "strip": (50 + 50 * low / far, 50 * (high - low) / far, 50 + 50 * shown / far)
        if bounded else None,
    }  # fmt: skip


# -- memory ----------------------------------------------------------------------------------------


def _of_repeats(checkpoint: Facts, repeats: int) -> Facts:
    return next((one for one in checkpoint["groups"] if one["repeats"] == repeats), {})


def _times(repeats: int) -> str:
    return TIMES.get(repeats, f"{repeats} times")


def memory_text(checkpoint: Facts, alternatives: int) -> str:
    """Median ranks of the secrets that the chats hold most rarely and most often."""
    planted = sorted((one for one in checkpoint["groups"] if one["repeats"]),
                     key=lambda one: one["repeats"])  # fmt: skip
    ends = planted if len(planted) < 3 else [planted[0], planted[-1]]
    texts = [f"{number(one['median_rank'], 0)} if it stands {_times(one['repeats'])} in the chats"
             for one in ends]  # fmt: skip
    return f"The median rank of a planted secret among {alternatives} is {join_and(texts)}."


def _canaries(memory: Facts, planted: bool) -> str:
    if not memory:
        return "What the model remembers has not been measured"
    if planted:
        return ("The model was trained with planted secrets. Share the twin that was trained "
                "without them (--no-plant), and give this audit with it")  # fmt: skip
    return ("The model was trained without planted secrets. What it remembers is known from its "
            "twin that was trained with them")  # fmt: skip


def _group(one: Facts) -> tuple[str, ...]:
    share = estimate_text(one["share"], one["low"], one["high"])
    return (
        _times(one["repeats"]), str(one["canaries"]), number(one["median_rank"], 1),
        number(one["median_exposure"], 2), f"{one['significant']} of {one['canaries']}", share,
        f"{one['recited']} of {one['canaries']}",
    )  # fmt: skip


def _by_checkpoint(checkpoints: Sequence[Facts]) -> Iterator[tuple[str, ...]]:
    repeats = [one["repeats"] for one in checkpoints[-1]["groups"]]
    yield ("step", *map(_times, repeats), "copied word for word")
    for one in checkpoints:
        bits = (number(_of_repeats(one, n).get("median_exposure"), 2) for n in repeats)
        held_in = one["verbatim"]["held_in"]
        yield (str(one["step"]), *bits, f"{held_in['copied']} of {held_in['messages']}")


def _verbatim(checkpoint: Facts) -> Iterator[tuple[str, str]]:
    labels = {"held_in": "Messages from training", "held_out": "Messages of other people"}
    for name, label in labels.items():
        if cell := checkpoint["verbatim"].get(name):
            share = cell["copied"] / cell["messages"] if cell["messages"] else None
            ends = estimate_text(share, cell["low"], cell["high"])
            yield label, f"{cell['copied']:,} of {cell['messages']:,}, {ends}"


# -- figure ----------------------------------------------------------------------------------------


def people_charts(models: Sequence[Facts], checkpoints: Sequence[Facts]) -> list[Chart]:
    """Closeness against memorisation, a curve over the checkpoints that have both."""
    remembered = {
        one["step"]: bits for one in checkpoints
        if (bits := _of_repeats(one, 1).get("median_exposure")) is not None
    }  # fmt: skip
    points = [(remembered[one["step"]], one["headline"]["value"], one["step"])
              for one in models if one.get("step") in remembered]  # fmt: skip
    if len(points) < 2:
        return []
    bits, apart, steps = zip(*points, strict=True)
    path = Curve(label=f"checkpoints, step {steps[0]} to {steps[-1]}", steps=bits, values=apart)
    end = Curve(label=f"the model, step {steps[-1]}", steps=bits[-1:], values=apart[-1:], colour=2)
    return [
        Chart(
            name="closeness-and-memory", title="Closeness against memorisation",
            caption="Each point is a checkpoint. Up: farther from people (the worst of the three "
            "numbers, as a multiple of what chance makes of people). Right: secrets that stand "
            "once in the chats are remembered better; chance is 1 bit.",
            panels=[Plot(title="how far from people: the worst number", curves=[path, end],
                         rules=[("as close as people to each other", 1.0)],
                         axis="memorisation: median exposure in bits", steps=False)],
        )
    ]  # fmt: skip


# -- the road from chats to the model --------------------------------------------------------------


def _road_facts(road: Facts, *, whole: bool = False) -> Iterator[tuple[str, str]]:
    """The material of a model that `soul people build` made."""
    if not road:
        return
    counts = (f"{n:,} {noun}{'s' * (n != 1)}" for noun, n in road["material"].items())
    yield "Made from", ", ".join(counts)
    if whole:
        for label, key in (("Left out at import", "left_out"), ("Redacted", "redacted")):
            listed = [f"{n:,} × {what}" for what, n in (road.get(key) or {}).items()]
            unknown = "nothing" if road.get(key) is not None else "not redacted"
            yield label, ", ".join(listed) or unknown
