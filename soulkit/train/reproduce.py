"""Figures of papers as lists of commands: `soul reproduce ditto-paper --figure 4 --scale tiny`.

    rows ─▶ warm-up ─▶ `soul train ablate --final-eval`: train every method, evaluate, compare

The lists are in `reproduce.yaml`. Every command resumes, and a step is finished when the files
exist that it writes last. At a scale for several GPUs each training has a launch line of its own;
`soul train ablate` then finds the trainings finished, evaluates and compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from soulkit.errors import ConfigError, did_you_mean
from soulkit.parse import parse_yaml
from soulkit.train.ablate import FINAL, parse_arms
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import method_class

COMPARED, EVALUATION = "methods", "final-eval.yaml"
"""In the folder of a reproduction: the trainings, and the settings of their evaluation."""


class CommandStep(NamedTuple):
    """One command, without `soul`, and the files that it writes last."""

    words: list[str]
    writes: list[Path]


def figure_of(paper: str, figure: str, scale: str, out: Path) -> dict[str, Any]:
    """The commands of a figure for the folder `out`, which takes the place of OUT in the settings
    of the evaluation; ConfigError for a figure that is not there."""
    text = (files("soulkit.train") / "reproduce.yaml").read_text(encoding="utf-8")
    chosen: dict[str, Any] = parse_yaml(text, ours=True)
    for what, name in (("paper", paper), ("figure", figure), ("scale", scale)):
        if name not in chosen:
            raise ConfigError(
                f"There are no commands for the {what} '{name}'.",
                f"soul reproduce has the {what} {' or '.join(chosen)}.",
                did_you_mean(name, chosen),
            )
        chosen = chosen[name]
    evaluation = json.dumps(chosen["evaluation"]).replace("OUT/", json.dumps(f"{out}/")[1:-1])
    return {**chosen, "evaluation": json.loads(evaluation)}


def figure_steps(figure: dict[str, Any], out: Path, seeds: int) -> list[CommandStep]:
    """All commands of a figure, in order."""

    def words_of(command: str) -> list[str]:
        return [word.replace("OUT/", f"{out}/") for word in command.split()]

    steps = [CommandStep(words_of(command), [out / file]) for file, command in figure["before"]]
    common, methods, ends = words_of(figure["training"]), ",".join(figure["methods"]), []
    for seed, arm in product(range(seeds), parse_arms(methods)):
        folder = out / COMPARED / arm.slug / f"seed_{seed}"
        ends.append(folder / FINAL / "summary.json")
        refines = "refined" in method_class(arm.method).traits(arm.method)
        usual = TrainConfig.model_fields["group_size"].default
        pairs = {**({} if refines else {"group_size": 2 * usual}), **arm.settings}.items()
        settings = [w for name, value in pairs for w in ("--set", f"{name}={json.dumps(value)}")]
        words = ["train", arm.method, *common, *figure["launch"].split(), *settings,
                 "--seed", str(seed), "--out", str(folder)]  # fmt: skip
        if figure["launch"]:
            steps.append(CommandStep(words, [folder / "summary.json"]))
    words = ["train", "ablate", "--methods", methods, "--seeds", str(seeds), *common,
             *figure["compare"].split(), "--final-eval", str(out / EVALUATION),
             "--out", str(out / COMPARED)]  # fmt: skip
    return [*steps, CommandStep(words, [*ends, out / COMPARED / "report" / "comparison.json"])]


def without_rows(words: Sequence[str], out: Path) -> list[str]:
    """The command with generated rows instead of files that an earlier step has not written yet."""
    rows = re.compile(rf"{re.escape(str(out))}/rows/\w+\.jsonl")
    return [rows.sub(lambda one: one[0] if Path(one[0]).is_file() else "synth:4096", word)
            for word in words]  # fmt: skip
