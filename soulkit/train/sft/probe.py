"""Dev scores of a supervised run, and probes: what would reinforcement make of these weights?

    RUN/probes/step_000100/          an ordinary run of `probe_method`, without its weights
    RUN/probes/step_000100/probe.json   of which weights, their dev scores before and after
    RUN/probes/weights_000100/       the snapshot it starts from; deleted when the probe is done

Dev scores are played by the weights that are trained, on rows that neither the run nor its probes
learn from. The probe is a training of its own that starts from a snapshot on the disk, with its own
model, adapter and optimizer: nothing of the supervised run is moved. That costs the memory of a
second model beside the first, and its loading. A killed probe resumes from its own newest
checkpoint; one from other weights is begun again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from soulkit.errors import CallError, UserError
from soulkit.models.base import Sampler
from soulkit.models.local.memory import free_memory
from soulkit.models.players.players import Players
from soulkit.runs.jsonl import write_json
from soulkit.runs.records import DEV_EPISODES
from soulkit.train.config import TINY
from soulkit.train.rollouts.play import DevScores
from soulkit.train.setup.data import ServePlayer, make_cast, make_players, probe_settings
from soulkit.train.setup.rows import TrainingData
from soulkit.train.state.checkpoint import replace_folder
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import read_step_lines

Reinforce = Callable[[TrainingData, Path], Awaitable[Any]]
"""Trains on a material, whose settings say how, into a run folder."""
PROBES, RESULT, VERSION = "probes", "probe.json", "policy.txt"
WEIGHTS = ("model", "best", "checkpoints")
"""Folders of a probe's run that are thrown away."""


@dataclass(frozen=True)
class Probe:
    """Takes the probes of one supervised run."""

    loop: Loop
    measured: TrainingData
    reinforce: Reinforce

    def recorded(self, step: int) -> dict[str, float | None]:
        """The result of a probe of these very weights that was done before; empty without one."""
        try:
            result = json.loads((self._run(step) / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if result.get("policy") != self.loop.policy.version():
            return {}
        self._throw_away(step)
        return _named(result["before"], result["after"])

    async def run(self, step: int, before: Mapping[str, float | None]) -> dict[str, float | None]:
        """Reinforce a snapshot of the weights that `step` moved, whose dev scores are `before`."""
        self._snapshot(step)
        self.loop.reporter.phase(f"probe of step {step + 1}")
        run, failure = self._run(step), ""
        try:
            with torch.random.fork_rng():
                await self.reinforce(replace(self.measured, config=self._settings(step)), run)
        except (
            UserError,
            CallError,
        ) as error:  # what it says of the weights is that it says nothing
            failure = str(error)
            self.loop.reporter.note(
                f"the probe of step {step + 1} ended without a result: {failure}"
            )
        scores = [line.dev for line in read_step_lines(run / "metrics.jsonl") if line.dev]
        after = dict(scores[-1]) if scores and not failure else {}
        result = {"policy": self.loop.policy.version(), "before": dict(before), "after": after}
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / RESULT, {**result, **({"failure": failure} if failure else {})})
        self._throw_away(step)
        return _named(before, after)

    def _settings(self, step: int) -> Any:
        """The weights are a whole model, or an adapter on the base of the run."""
        config, weights = self.loop.config, self._weights(step)
        base = str(self.loop.run.path / "base") if config.model == TINY else config.model
        return probe_settings(
            self.measured.config,
            model=weights if config.full else base,
            adapter=None if config.full else weights,
            threads=torch.get_num_threads(),
        )

    def _run(self, step: int) -> Path:
        return self.loop.run.path / PROBES / f"step_{step + 1:06d}"

    def _weights(self, step: int) -> Path:
        return self.loop.run.path / PROBES / f"weights_{step + 1:06d}"

    def _snapshot(self, step: int) -> None:
        """Write the weights down, unless a probe of just these is under way; one of others goes."""
        weights, version = self._weights(step), self.loop.policy.version()
        mark = weights / VERSION
        if mark.is_file() and mark.read_text(encoding="utf-8") == version:
            return
        shutil.rmtree(self._run(step), ignore_errors=True)

        def fill(aside: Path) -> None:
            self.loop.policy.save(aside, step + 1)
            (aside / VERSION).write_text(version, encoding="utf-8")

        replace_folder(weights, fill)

    def _throw_away(self, step: int) -> None:
        for folder in (self._weights(step), *(self._run(step) / name for name in WEIGHTS)):
            shutil.rmtree(folder, ignore_errors=True)
        free_memory()


def _named(
    before: Mapping[str, float | None], after: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Named as metrics are; a probe that failed has None after."""
    tasks = dict.fromkeys((*before, *after))
    return {
        f"{task}/{moment}": scores.get(task)
        for task in tasks
        for moment, scores in (("before", before), ("after", after))
    }


Scores = Mapping[str, float | None]


@dataclass
class Measures:
    """Measures the weights of a Loop on what `measured` holds out. Close it."""

    loop: Loop
    measured: TrainingData
    sampler: Sampler
    players: Players
    dev: DevScores
    trial: Probe
    _newest: tuple[int, Scores] = field(default=(-1, {}))
    """The step whose weights were scored last, and what they scored."""

    async def score(self, step: int) -> Scores:
        """Dev scores of the weights that `step` moved, per task; empty between turns."""
        every = self.loop.config.eval_every
        return await self._scores(step) if every and not (step + 1) % every else {}

    async def probe(self, step: int) -> Scores:
        """`TASK/before` and `TASK/after` a short reinforcement of these weights; empty between
        turns."""
        every = self.loop.config.probe_every
        if not every or (step + 1) % every:
            return {}
        recorded = self.trial.recorded(step)
        return recorded or await self.trial.run(step, await self._scores(step))

    async def _scores(self, step: int) -> Scores:
        if self._newest[0] != step:
            scores = await self.dev.now(step, self.loop.policy, self.loop.reporter)
            self._newest = (step, scores)
        return self._newest[1]

    async def close(self) -> None:
        await self.sampler.close()
        await self.players.close()


def make_measures(
    loop: Loop, measured: TrainingData, reinforce: Reinforce, serve: ServePlayer | None = None
) -> Measures:
    """What measures a supervised run; `serve` makes players behind vLLM servers."""
    config = measured.config
    sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
    players = make_players(config, sampler, loop.run, serve, loop.reporter)
    cast = make_cast(config, sampler, players)
    dev = DevScores(config, sampler, cast, measured.dev, loop.run.path / DEV_EPISODES)
    return Measures(loop, measured, sampler, players, dev, Probe(loop, measured, reinforce))
