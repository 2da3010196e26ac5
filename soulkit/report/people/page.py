"""The part of a report on a model of people: closeness, memory, and how it was made from chats.

A training run has this part if `soul people closeness` or `soul people memory` wrote their files
into it. `soul people build` keeps its record beside the run. Nothing is computed again here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.metrics.intervals import DASH, estimate_text, number, percent, signed
from soulkit.metrics.student import CONFIDENCE, significance
from soulkit.report.figures import Chart, Curve, Plot
from soulkit.report.findings import ONE_RUN, Finding, p_text
from soulkit.report.load import RunData
from soulkit.runs.jsonl import read_object
from soulkit.serving.certificate import certificate_lines, find_certificate
from soulkit.text import join_and

CLOSENESS, MEMORY, ROAD = "closeness.json", "memory.json", "road.json"
Facts = Mapping[str, Any]
AUDITED = (
    "Yes: this model is an audit. Share its twin without them (--no-plant), and this page with it"
)
TWIN = "None. Only a twin that was trained with some shows how well this model remembers a secret"
NUMBERS = {"distance": ("Habits", "ratio"), "words": ("Words", "auc"),
           "context": ("Context", "auc"), "likelihood": ("Likelihood", "share"),
           "perplexity": ("Perplexity", "value")}  # fmt: skip
"""Name of a number → its title, and its key."""
TIMES = {0: "never (control)", 1: "once", 2: "twice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeoplePart:
    """What was measured in one run; empty where it was not."""

    run: str
    closeness: Facts
    memory: Facts
    road: Facts
    certificate: Sequence[str]
    """The lines of the certificate, or one that says that there is none."""

    @property
    def model(self) -> Facts:
        """The closeness of the last model, which is the run's own."""
        return self.closeness["models"][-1] if self.closeness else {}

    @property
    def planted(self) -> bool:
        return bool(self.memory.get("planted"))

    @property
    def finding(self) -> Finding:
        """The sentence that leads the report, and what stands below it."""
        last = self.model
        ratios = join_and(f"{NUMBERS[name][0].lower()} {number(ratio, 2)}"
                          for name, ratio in last.get("ratios", {}).items())  # fmt: skip
        facts = [
            ("How close", ratios and f"{ratios} times what chance makes of people"),
            ("Measured on", f"{self.closeness['persons']:,} persons who were not in training, "
             f"{self.closeness['turns']:,} messages" if last else ""),
            ("What it remembers", remembered_text(self.memory) if self.planted else ""),
            ("Planted secrets", self.memory and (AUDITED if self.planted else TWIN)),
            ("Made from", self.made_from()),
        ]  # fmt: skip
        return Finding(run=self.run, outcome=ONE_RUN, claim=closeness_text(last),
                       facts=tuple((label, text) for label, text in facts if text))  # fmt: skip

    def made_from(self) -> str:
        counts = self.road.get("material", {}).items()
        return ", ".join(f"{n:,} {noun}{'s' * (n != 1)}" for noun, n in counts)

    def numbers(self) -> Iterator[tuple[str, str, str]]:
        """(name, title, value with interval) of each number."""
        for name, (title, key) in NUMBERS.items():
            if cell := self.model.get(name):
                worst = " (the worst)" * (self.model["headline"]["name"] == name)
                yield name, title + worst, estimate_text(cell[key], cell["low"], cell["high"])

    def lines(self) -> Iterator[Facts]:
        """The rows of the figure of differences; every strip has a scale of its own, with zero in
        the middle: its ends and its dot in percent."""
        for one in self.model.get("lines", ()):
            low, high, shown = one["low"], one["high"], one["difference"]
            bounded = low is not None and high is not None
            far = max(abs(low), abs(high), abs(shown), 1e-12) * 1.05 if bounded else 1.0
            yield {
                **one, "text": estimate_text(shown, low, high, signed),
                "differs": (one["p_holm"] or 1.0) < significance(CONFIDENCE),
                "p_text": DASH if one["p_holm"] is None else p_text(one["p_holm"]),
                "strip": (50 + 50 * low / far, 50 * (high - low) / far, 50 + 50 * shown / far)
                if bounded else None,
            }  # fmt: skip

    def charts(self) -> list[Chart]:
        """Closeness against memorisation, a curve over the checkpoints that have both."""
        remembered = {
            one["step"]: group["median_exposure"]
            for one in self.memory.get("checkpoints", ()) for group in one["groups"]
            if group["repeats"] == 1 and group["median_exposure"] is not None
        }  # fmt: skip
        models = self.closeness.get("models", ())
        points = [(remembered[one["step"]], one["headline"]["value"], one["step"])
                  for one in models if one["step"] in remembered]  # fmt: skip
        if len(points) < 2:
            return []
        bits, apart, steps = zip(*points, strict=True)
        curves = [
            Curve(label=f"checkpoints, step {steps[0]} to {steps[-1]}", steps=bits, values=apart),
            Curve(label=f"the model, step {steps[-1]}", steps=bits[-1:], values=apart[-1:],
                  colour=2),
        ]  # fmt: skip
        plot = Plot(title="how far from people: the worst number", curves=curves, steps=False,
                    axis="memorisation: median exposure in bits",
                    rules=[("as close as people to each other", 1.0)])  # fmt: skip
        caption = (
            "Each point is a checkpoint. Up: farther from people (the worst of the three numbers, "
            "as a multiple of what chance makes of people). Right: secrets that stand once in the "
            "chats are remembered better; chance is 1 bit."
        )
        return [Chart(name="closeness-and-memory", title="Closeness against memorisation",
                      caption=caption, panels=[plot])]  # fmt: skip


def people_parts(runs: Sequence[RunData]) -> list[PeoplePart]:
    """One part for each run that was measured against people. RunError for a damaged file."""
    parts = []
    for run in runs:
        closeness, memory = (read_object(run.path / name) for name in (CLOSENESS, MEMORY))
        road = read_object(run.path.parent / ROAD)
        road = road if road.get("run") == run.path.name else {}
        certificate = find_certificate(str(run.path))
        if closeness or memory or certificate:
            lines = certificate_lines(certificate)
            part = PeoplePart(run=run.name, closeness=closeness, memory=memory, road=road,
                              certificate=lines)  # fmt: skip
            parts.append(part)
    return parts


def closeness_text(model: Facts) -> str:
    """The worst of the three numbers in words."""
    if not model:
        return "How close the model is to people was not measured."
    name = model["headline"]["name"]
    value = model[name][NUMBERS[name][1]]
    if name == "distance":
        apart = "farther from people than" if value > 1 else "as close to people as"
        return (
            f"By its habits the model is {apart} people are to each other: {number(value, 2)} "
            "times the distance of two halves of the people."
        )
    how = "by the words alone" if name == "words" else "by whether the reply fits the conversation"
    verdict = "tells" if model["headline"]["value"] > 1 else "cannot tell"
    return (f"A classifier {verdict} the model from people {how}: right in {percent(value)} of "
            "pairs, where 50% is chance.")  # fmt: skip


def times_text(repeats: int) -> str:
    return TIMES.get(repeats, f"{repeats} times")


def remembered_text(memory: Facts) -> str:
    """The median ranks of the secrets that stand in the chats most rarely and most often."""
    groups = [one for one in memory["checkpoints"][-1]["groups"] if one["repeats"]]
    ranks = (f"{number(one['median_rank'], 0)} if it stands {times_text(one['repeats'])} in the "
             "chats" for one in (groups[0], groups[-1]))  # fmt: skip
    among = memory["alternatives"]
    return f"The median rank of a planted secret among {among} is {join_and(ranks)}"
