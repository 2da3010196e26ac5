"""What a supervised run is worth while it runs: greedy dev scores, and probes by reinforcement.

Dev scores are played by the very weights that are trained, on rows that neither the run nor its
probes learn from; their episodes are kept as those of a reinforcement are, and the best weights
follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from soulkit.models.base import Sampler
from soulkit.models.roles.players import Players
from soulkit.runs.records import DEV_EPISODES
from soulkit.train.material.assemble import Material, ServePlayer, make_cast, make_players
from soulkit.train.rollouts.greedy import DevScores
from soulkit.train.sft.probe import Probe, Reinforce
from soulkit.train.state.loop import Loop

Scores = Mapping[str, float | None]


@dataclass
class Measures:
    """Measures the weights of a Loop on what `measured` holds out. Close it."""

    loop: Loop
    measured: Material
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
            scores = await self.dev.now(step, self.loop.policy, self.loop.begin)
            self._newest = (step, scores)
        return self._newest[1]

    async def close(self) -> None:
        await self.sampler.close()
        await self.players.close()


def make_measures(
    loop: Loop, measured: Material, reinforce: Reinforce, say: Callable[[str], None],
    serve: ServePlayer | None = None,
) -> Measures:  # fmt: skip
    """What measures a supervised run; `say` hears of probes that fail, `serve` makes players behind
    vLLM servers."""
    config = measured.config
    sampler = loop.policy.sampler(config.batch_size, deterministic=config.deterministic)
    players = make_players(config, sampler, loop.run, serve)
    cast = make_cast(config, sampler, players)
    dev = DevScores(config, sampler, cast, measured.dev, loop.run.path / DEV_EPISODES)
    return Measures(loop, measured, sampler, players, dev, Probe(loop, measured, reinforce, say))
