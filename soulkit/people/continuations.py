"""`soul people closeness`: a model continues real conversations at every turn of the person.

    TARGET/closeness.json                  the measurement, with its settings
    TARGET/closeness/NAME-HASH/            the replies of one model, a run folder of its own

The context is always what was really said before. Replies are kept in the folder's ledger or, for
models in this process, its journal, so that the same command resumes and pays for nothing twice.

After each message of the person the model is also offered to end the conversation (END_QUESTION).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from soulkit.config import setting
from soulkit.data.corpora.settings import HUMAN
from soulkit.data.privacy.finders import refuse_private
from soulkit.errors import CallError, ConfigError, RunError
from soulkit.eval.planning import voice_of
from soulkit.eval.run.run_lock import run_lock
from soulkit.eval.run.session import FailureStreak, asking, open_session
from soulkit.models.api.addresses import checked_url, is_loopback
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import SAMPLED, Journal
from soulkit.models.local.loading import NOTE
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve, base_and_adapter, checkpoint_player
from soulkit.models.players.settings import RoleSettings, is_spec
from soulkit.models.vllm.manager import player_servers
from soulkit.people.closeness import Closeness, Population, distance_beyond
from soulkit.people.texts import message_before
from soulkit.people.turns import PersonTurn, by_chat, read_turns
from soulkit.play.engine import gather
from soulkit.play.plan import Plan, PlayerTerms, TaskPlan, question_load
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.folder import Run, is_run
from soulkit.runs.jsonl import read_object, write_json
from soulkit.text import word_count
from soulkit.types import Call, Segment
from soulkit.version import __version__

if TYPE_CHECKING:
    from soulkit.models.local.sampler import LocalModel

COMMAND, FILE = "people closeness", "closeness.json"
END, GO_ON = "END", "GO ON"
END_QUESTION = f"(You may end the conversation here. Answer only {END}, or {GO_ON}.)"
MAX_TOKENS, END_TOKENS = 512, 8


class ClosenessConfig(RolesConfig):
    """Settings of the continuations of one model: the partner of an assistant."""

    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = RolesConfig.OUTSIDE_IDENTITY | {
        "concurrency", "step",
    }  # fmt: skip

    adapter: str | None = setting(None, flag=None, help="Adapter of a local model.")
    weights: str = setting("", flag=None, help="Hash of local weights.")
    step: int | None = setting(None, flag=None, help="Training step of a checkpoint.")
    seed: int = setting(0, flag=None, help="Random seed of sampling.")

    @classmethod
    def roles(cls) -> list[str]:
        return ["partner"]

    @property
    def player(self) -> RoleSettings:
        assert self.partner is not None
        return self.partner

    @property
    def name(self) -> str:
        """The player, or the last two parts of the folder of a local model."""
        if self.player.kind != "local":
            return self.player.written()
        return "/".join(Path(self.adapter or self.player.model).parts[-2:])


def models_of(
    text: str, flags: Mapping[str, Any], adapter: str | None = None, *, checkpoints: bool = False
) -> list[ClosenessConfig]:
    """The models that MODEL names: a player, a folder with weights, a Hub model, or a training run:
    its final weights, with `checkpoints` after those of every step."""
    folder = Path(text)
    flags, limit = {k: x for k, x in flags.items() if k != "max_tokens"}, flags.get("max_tokens")
    if checkpoints and not is_run(folder):
        raise ConfigError(
            f"'{text}' is not the folder of a training run.",
            "Only a training run has checkpoints.",
            "Name the run folder, or leave out --checkpoints.",
        )
    if is_spec(text) and not folder.exists():
        return [_limited(ClosenessConfig.load(flags={**flags, "partner": text}), limit)]
    last = _local(final_weights(folder), flags, adapter, limit)
    if not is_run(folder):
        return [last]
    steps = sorted((folder / "checkpoints").glob("step_*")) if checkpoints else []
    earlier = [_local(place, flags, adapter, limit) for place in steps]
    return [*(one for one in earlier if one.step != last.step), last]


def final_weights(folder: Path) -> Path:
    """The folder with a training run's final weights; any other folder or Hub id unchanged."""
    if not is_run(folder):
        return folder
    if not (folder / "model").is_dir():
        raise RunError(
            f"The run '{folder}' has no model.",
            "It is unfinished, or it is not a training run.",
            "Finish it, or name the folder of a checkpoint.",
        )
    return folder / "model"


def _local(
    place: Path, flags: Mapping[str, Any], adapter: str | None, limit: int | None
) -> ClosenessConfig:
    base, weights = base_and_adapter(str(place))
    note, weights = read_object(place / NOTE), weights or adapter
    folders = (Path(one) for one in (base, weights) if one)
    config = ClosenessConfig.load(flags={
        **flags, "partner": f"local:{base}", "adapter": weights, "step": note.get("step"),
        "weights": "".join(weights_hash(one) for one in folders if one.is_dir()),
    })  # fmt: skip
    return _limited(config, limit or MAX_TOKENS)


def _limited(config: ClosenessConfig, limit: int | None) -> ClosenessConfig:
    """The configuration with at most `limit` tokens a turn."""
    player = config.player.model_copy(update={"max_tokens": limit} if limit else {})
    return config.model_copy(update={"partner": player})


@dataclass
class Continuations:
    """Asks one model for its replies at all turns."""

    config: ClosenessConfig
    turns: Sequence[PersonTurn]
    system: str = ""
    """System prompt before each conversation that has none."""

    def folder(self, target: Path) -> Path:
        identity = json.dumps(self.config.identity(), sort_keys=True, default=str)
        name = re.sub(r"\W+", "-", self.config.name)[-40:].strip("-")
        return target / "closeness" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    def plan(self) -> Plan:
        nobody = PlayerTerms(role="actor", name="", limit=0, served=False)
        terms = voice_of(self.config, "partner", self.config.player, nobody)
        words = [sum(word_count(part.text) for part in turn.context) for turn in self.turns]
        load = question_load(terms, 2 * words)
        task = TaskPlan(
            task="closeness", examples=len(words), episodes=len(words), prompt_words=2 * sum(words),
            longest_prompt=max(words), asked=(load,), chain=load.seconds / max(1, load.calls),
        )  # fmt: skip
        return Plan(tasks=(task,), concurrency=self.config.concurrency)

    def play(self, people: Population, target: Path, reporter: Reporter = SILENT) -> Closeness:
        config = self.config
        run = open_session(config, self.folder(target), COMMAND, self.plan,
                           sealed=not config.foreign, reporter=reporter)  # fmt: skip
        with (
            run_lock(run),
            Ledger(run.ledger_path) as ledger,
            player_servers(config, run.path, ledger, reporter=reporter) as serve,
        ):
            return asyncio.run(self._play(people, run, ledger, serve, reporter))

    async def _play(
        self, people: Population, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
    ) -> Closeness:
        config = self.config
        async with asking(config, run, ledger, serve, reporter) as players:
            players.load = lambda model: checkpoint_player(
                model, adapter=config.adapter, max_context=config.max_context
            )
            local: Any = players.model("partner", config.player)
            here = config.player.kind == "local"
            if here:
                local.journal = Journal(run.path / SAMPLED)
                local.policy_version = config.weights
            try:
                with reporter.progress(2 * len(self.turns)) as bar:
                    texts = await self._ask(players, bar)
                    ends = [_ended(text) for text in await self._ask(players, bar, "ends")]
            finally:
                if here:
                    local.journal.close()
            if not here:
                return Closeness(people, texts, ends)
            with reporter.working("likelihoods of people's turns"):
                return Closeness(people, texts, ends, *self._likelihoods(local, people))

    async def _ask(self, players: Players, bar: Bar, purpose: str = "") -> list[str | None]:
        """The reply at each turn; None where the model gave none."""
        config, here = self.config, self.config.player.kind == "local"
        player = players.player("partner", config.player, config.seed)
        if purpose and here:  # a reasoning model behind a server may need more
            player = replace(player, sampling=replace(player.sampling, max_tokens=END_TOKENS))
        turn_of = asyncio.Semaphore(4096 if here else config.concurrency)
        streak = FailureStreak(config.concurrency, "turns")

        async def one(turn: PersonTurn) -> str | None:
            call = Call(role="partner", example_id=turn.chat, turn=turn.place, purpose=purpose)
            text, error = None, ""
            async with turn_of:
                try:
                    text = (await player.complete(self.context(turn, purpose), call)).text
                except CallError as failure:
                    error = str(failure)
            streak.add(text is None, error)
            bar.advance()
            return text

        return list(await gather(one(turn) for turn in self.turns))

    def context(self, turn: PersonTurn, purpose: str = "") -> list[Segment]:
        """What the model reads at a turn; for `ends` with the turn and the offer to end."""
        after = [Segment("assistant", turn.text), Segment("user", END_QUESTION)] if purpose else []
        alone = self.system and turn.context[0].role != "system"
        return [*([Segment("system", self.system)] if alone else []), *turn.context, *after]

    def _likelihoods(
        self, local: LocalModel, people: Population
    ) -> tuple[list[float], list[float]]:
        """Per turn, whether it is likelier in its context than one from elsewhere, and its nats per
        token. Two turns change places, so that the lengths and words of both count on both sides.
        """
        swap, contexts = _swapped(people), [self.context(turn) for turn in self.turns]
        real = [(context, turn.text) for context, turn in zip(contexts, self.turns, strict=True)]
        other = [(context, self.turns[n].text) for context, n in zip(contexts, swap, strict=True)]
        sums, sizes = log_likelihoods(local, [*real, *other])
        here, there = np.split(sums, 2)
        gain = here + here[swap] - there - there[swap]
        likelier = np.where(swap == np.arange(len(swap)), np.nan, (np.sign(gain) + 1) / 2)
        return likelier.tolist(), (-here / sizes[: len(here)]).tolist()


def _ended(text: str | None) -> float:
    return math.nan if text is None else float(text.strip("\"'*([ \n").upper().startswith(END))


def _swapped(people: Population) -> np.ndarray:
    """For each turn the number of one by another person in the same kind of conversation, in pairs
    that name each other; its own number where none is left."""
    order = np.random.default_rng(people.seed).permutation(len(people.turns)).tolist()
    swap, left = np.arange(len(order)), dict[str, list[int]]()
    for n in order:
        waiting = left.setdefault(people.turns[n].source, [])
        match = next((m for m in waiting if people.owner[m] != people.owner[n]), None)
        if match is None:
            waiting.append(n)
        else:
            waiting.remove(match)
            swap[n], swap[match] = match, n
    return swap


def log_likelihoods(
    local: LocalModel, pairs: Sequence[tuple[Sequence[Segment], str]]
) -> tuple[np.ndarray, np.ndarray]:
    """(sums of log-probs, numbers of tokens) of replies with their end-of-turn token; NaN for a
    pair that does not fit the model's context."""
    import torch

    from soulkit.train.model.policy import Policy
    from soulkit.train.objectives.sequences import Span

    policy, limit = Policy(local.model, local.tokenizer, packing="auto"), local.context_limit
    spans, places = [], []
    for place, (context, text) in enumerate(pairs):
        prompt, reply = policy.renderer.prompt_ids(context), policy.encode_reply(text)
        if prompt and (limit is None or len(prompt) + len(reply) <= limit):
            flags = (*[False] * len(prompt), *[True] * len(reply))
            spans.append(Span((*prompt, *reply), flags, ()))
            places.append(place)
    results = np.full((2, len(pairs)), np.nan)
    with torch.inference_mode():
        for pack in policy.packs(spans, divided=False):
            scored = policy.score(pack)
            owner, nats = scored.owner.cpu().numpy(), scored.log_prob.double().cpu().numpy()
            for weights, row in zip((nats, None), results, strict=True):
                sums = np.bincount(owner, weights, minlength=len(pack.spans))
                row[[places[member] for member in pack.indices]] = sums
    return results[0], results[1]


# -- the measurement -------------------------------------------------------------------------------


def measure_closeness(
    model: str, data: str, *, side: str = HUMAN, against: str | None = None,
    adapter: str | None = None, checkpoints: bool = False, limit: int | None = None,
    system: str = "", allow_private: bool = False, target: Path | None = None,
    flags: Mapping[str, Any] | None = None, reporter: Reporter = SILENT,
) -> dict[str, Any]:  # fmt: skip
    """Measure the models on the first `limit` conversations and write `closeness.json`.

    `flags` are settings of the players, `system` a system prompt for conversations without one.
    UserError before anything is played. A file that has the same measurement is returned as it is.
    """
    settings = {"seed": 0, **{name: x for name, x in (flags or {}).items() if x is not None}}
    models = models_of(model, settings, adapter, checkpoints=checkpoints)
    base = models_of(against, settings)[-1:] if against else []
    turns = read_turns(data, side, reporter)
    chosen = set([*by_chat(turns)][:limit])
    turns = [turn for turn in turns if turn.chat in chosen]
    for one in (*models, *base):
        url = one.player.base_url
        if one.player.kind == "endpoint" and not is_loopback(checked_url(url)):
            texts = [text for turn in turns for text in (turn.text, message_before(turn))]
            refuse_private(texts, f"the model {one.player.model}", allow_private)
    target = target or closeness_folder(model)
    keys = [_key(one, turns, system) for one in (*models, *base)]
    before = read_object(target / FILE)
    there = [*before.get("models", ())[-len(models) :], *([before.get("against")] if base else [])]
    if keys == [one and not one["no_reply"] and one.get("key") for one in there]:
        return before
    with reporter.working("people among themselves"):
        people = Population(turns, int(settings["seed"]))
    results, entries = [], []
    for one, key in zip((*models, *base), keys, strict=True):
        results.append(Continuations(one, turns, system).play(people, target, reporter))
        with reporter.working(f"closeness of {one.name}"):
            no_reply = list(results[-1].texts).count(None)
            about = {"name": one.name, "step": one.step, "weights": one.weights, "key": key,
                     "no_reply": no_reply}  # fmt: skip
            entries.append({**about, **results[-1].report()})
    compared = (
        {**entries.pop(), "comparison": distance_beyond(results[-2], results[-1])} if base else None
    )
    report = {
        "schema": "closeness", "version": 1, "persons": people.size, "turns": len(turns),
        "conversations": len(chosen), "data": data, "side": side, "seed": settings["seed"],
        "models": entries, "against": compared,
    }  # fmt: skip
    write_json(target / FILE, report)
    return report


def closeness_folder(model: str) -> Path:
    """Where the `closeness.json` of a model is, unless another folder is named."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")[-60:]
    return Path(model) if is_run(Path(model)) else Path("runs") / f"people-closeness-{name}"


def _key(one: ClosenessConfig, turns: Sequence[PersonTurn], system: str) -> str:
    """A hash of everything that the measurement of one model depends on."""
    digest = hashlib.sha256(repr((__version__, system, sorted(one.identity().items()))).encode())
    for turn in turns:
        digest.update(repr(turn).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]
