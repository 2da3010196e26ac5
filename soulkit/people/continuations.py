"""`soul people closeness`: a model continues real conversations at every turn of the person.

    TARGET/closeness.json                  the measurement, with its settings
    TARGET/closeness/NAME-HASH/            the replies of one model, a run folder of its own

The context is always what was really said before. Replies are kept in the folder's ledger or, for
models in this process, its journal, so that the same command resumes and pays for nothing twice.

After each message of the person the model is also offered to end the conversation (END_QUESTION).
Models in this process answer by how likely each answer is, other models in words.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from soulkit.config import setting
from soulkit.errors import CallError, ConfigError, RunError
from soulkit.eval.planning import voice_of
from soulkit.eval.run.run_lock import run_lock
from soulkit.eval.run.session import FailureStreak, asking, open_session
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.journal import SAMPLED, Journal
from soulkit.models.local.loading import ADAPTER_CONFIG, NOTE
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, Serve, checkpoint_player
from soulkit.models.players.settings import RoleSettings, is_spec
from soulkit.models.vllm.manager import player_servers
from soulkit.people.closeness import Closeness, People, compare
from soulkit.people.turns import PersonTurn, by_chat, by_person, read_turns
from soulkit.play.engine import gather
from soulkit.play.plan import Plan, PlayerTerms, TaskPlan, question_load
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.folder import Run, is_run
from soulkit.runs.jsonl import write_json
from soulkit.types import Call, Segment

if TYPE_CHECKING:
    from soulkit.models.local.sampler import LocalModel

COMMAND, FILE = "people closeness", "closeness.json"
END, GO_ON = "END", "GO ON"
END_QUESTION = f"(You may end the conversation here. Answer only {END}, or {GO_ON}.)"
MAX_TOKENS = 512


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
        path = Path(self.adapter or self.player.model)
        if self.player.kind != "local":
            return self.player.written()
        return "/".join(path.absolute().parts[-2:])


def models_of(
    text: str, flags: dict[str, Any], adapter: str | None = None, *, checkpoints: bool = False
) -> list[ClosenessConfig]:  # fmt: skip
    """The models that MODEL names: a player, a folder with weights, a Hub model, or a training run
    (its final weights; with `checkpoints` those of every step, oldest first)."""
    folder, extra = Path(text), {"max_tokens": flags.pop("max_tokens", None)}
    if checkpoints and not is_run(folder):
        raise ConfigError(
            f"'{text}' is not the folder of a training run.",
            "Only a training run has checkpoints.",
            "Name the run folder, or leave out --checkpoints.",
        )  # fmt: skip
    if is_spec(text) and not folder.exists():
        players = {**RoleSettings.model_validate(text).model_dump(exclude_unset=True), **extra}
        return [ClosenessConfig.load(flags={**flags, "partner": players})]
    places = [folder]
    if is_run(folder):
        places = [p for p in (folder / "best", folder / "model") if p.is_dir()][:1]
        steps = sorted((folder / "checkpoints").glob("step_*")) if checkpoints else []
        last = {_step_of(place) for place in places}
        places = [*(p for p in steps if _step_of(p) not in last), *places]
        if not places:
            raise RunError(
                f"The run '{folder}' has no model yet.",
                "It is unfinished, or it is not a training run.",
                "Finish it, or name a checkpoint.",
            )
    return [_local(place, adapter, extra, flags) for place in places]


def _step_of(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / NOTE).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _local(
    place: Path, adapter: str | None, extra: dict[str, Any], flags: dict[str, Any]
) -> ClosenessConfig:
    base, weights = str(place), adapter and Path(adapter)
    if (place / ADAPTER_CONFIG).is_file():
        settings = json.loads((place / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        revision = f"@{settings['revision']}" if settings.get("revision") else ""
        base, weights = f"{settings['base_model_name_or_path']}{revision}", place
    extra = {"max_tokens": MAX_TOKENS, **{k: v for k, v in extra.items() if v}}
    return ClosenessConfig.load(flags={
        **flags, "partner": {"kind": "local", "model": base, **extra},
        "adapter": None if weights is None else str(weights), "step": _step_of(place),
        "weights": "".join(weights_hash(p) for p in (Path(base), weights) if p and p.is_dir()),
    })  # fmt: skip


@dataclass
class Continuations:
    """Asks one model for its replies at all turns."""

    config: ClosenessConfig
    turns: Sequence[PersonTurn]
    system: str = ""
    """System prompt before each conversation that has none."""

    def folder(self, target: Path) -> Path:
        identity = json.dumps(self.config.identity(), sort_keys=True, default=str)
        name = "".join(c if c.isalnum() else "-" for c in self.config.name)[-40:].strip("-")
        return target / "closeness" / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    def plan(self) -> Plan:
        nobody = PlayerTerms(role="actor", name="", limit=0, served=False)
        terms = voice_of(self.config, "partner", self.config.player, nobody)
        words = [sum(len(part.text.split()) for part in turn.context) for turn in self.turns]
        load = question_load(terms, 2 * words)
        task = TaskPlan(
            task="closeness", examples=len(words), episodes=len(words), prompt_words=2 * sum(words),
            longest_prompt=max(words), asked=(load,), chain=load.seconds / max(1, load.calls),
        )  # fmt: skip
        return Plan(tasks=(task,), concurrency=self.config.concurrency)

    def play(self, people: People, target: Path, reporter: Reporter = SILENT) -> Closeness:
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
        self, people: People, run: Run, ledger: Ledger, serve: Serve, reporter: Reporter
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
            ends: Sequence[float]
            try:
                with reporter.progress(len(self.turns) * (1 if here else 2)) as bar:
                    texts = await self._ask(players, bar)
                    if here:
                        reporter.phase("likelihoods")
                    else:
                        ends = [_ended(text) for text in await self._ask(players, bar, "ends")]
            finally:
                if here:
                    local.journal.close()
            if not here:
                return Closeness(people, texts, ends)
            with reporter.working("likelihoods of people's turns"):
                return Closeness(people, texts, *self._likelihoods(local, people))

    async def _ask(self, players: Players, bar: Bar, purpose: str = "") -> list[str | None]:
        """The reply at each turn; None where the model gave none."""
        config, here = self.config, self.config.player.kind == "local"
        player = players.player("partner", config.player, config.seed)
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
        self, local: LocalModel, people: People
    ) -> tuple[list[float], list[float], list[float]]:
        """Per turn: the probability of ending, whether the turn is likelier in its context than one
        from elsewhere, and its nats per token. Two turns change places, so that the lengths and
        words of both count on both sides."""
        turns, swap = self.turns, _swapped(people)
        said = [self.context(turn) for turn in turns]
        asked = [self.context(turn, "ends") for turn in turns]
        questions = [(c, answer) for c in asked for answer in (END, GO_ON)]
        own = [(c, turn.text) for c, turn in zip(said, turns, strict=True)]
        other = [(said[n], turns[m].text) for n, m in enumerate(swap)]
        sums, sizes = log_likelihoods(local, [*own, *other, *questions])
        count = len(turns)
        here, there, odds = sums[:count], sums[count : 2 * count], sums[2 * count :]
        gain = here + here[swap] - there - there[swap]
        likelier = np.where(swap == np.arange(count), np.nan, (np.sign(gain) + 1) / 2)
        ends = 1 / (1 + np.exp(np.clip(odds[1::2] - odds[::2], -500, 500)))
        return ends.tolist(), likelier.tolist(), (-here / sizes[:count]).tolist()


def _ended(text: str | None) -> float:
    return math.nan if text is None else float(text.strip("\"'*([ \n").upper().startswith(END))


def _swapped(people: People) -> np.ndarray:
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
    found = np.full((2, len(pairs)), np.nan)
    with torch.inference_mode():
        for pack in policy.packs(spans, divided=False):
            scored = policy.score(pack)
            owner, nats = scored.owner.cpu().numpy(), scored.log_prob.double().cpu().numpy()
            for weights, row in zip((nats, None), found, strict=True):
                sums = np.bincount(owner, weights, minlength=len(pack.spans))
                row[[places[member] for member in pack.indices]] = sums
    return found[0], found[1]


# -- the measurement -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure: models by their text form, and the conversations of people."""

    model: str
    data: str
    side: str = "human"
    against: str | None = None
    adapter: str | None = None
    checkpoints: bool = False
    limit: int | None = None
    """Number of conversations, evenly over persons; None: all."""
    system: str = ""
    flags: dict[str, Any]
    """Settings of players: seed, max_tokens, concurrency, max_cost, …"""

    @property
    def target(self) -> Path:
        """The default folder: the run, else one under runs/."""
        if is_run(Path(self.model)):
            return Path(self.model)
        name = "".join(c if c.isalnum() or c in "-." else "-" for c in self.model).strip("-")
        return Path("runs") / f"people-closeness-{name[-60:]}"


def measure(
    request: Request, target: Path | None = None, reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Measure the models and write `closeness.json`; UserError before anything is played."""
    flags = {"seed": 0, **{k: v for k, v in request.flags.items() if v is not None}}
    models = models_of(request.model, dict(flags), request.adapter, checkpoints=request.checkpoints)
    base = models_of(request.against, dict(flags))[-1:] if request.against else []
    everything = read_turns(request.data, request.side, reporter)
    turns = _limited(everything, request.limit)
    target = target or request.target
    with reporter.working("people among themselves"):
        people = People(turns, int(flags["seed"]))
    found = [
        Continuations(one, turns, request.system).play(people, target, reporter)
        for one in (*models, *base)
    ]
    entries = []
    for one, close in zip((*models, *base), found, strict=True):
        with reporter.working(f"closeness of {one.name}"):
            missing = sum(text is None for text in close.texts)
            entries.append(
                {"name": one.name, "step": one.step, "no_reply": missing, **close.report()}
            )
    against = None
    if base:
        against = {**entries.pop(), "comparison": compare(found[len(models) - 1], found[-1])}
    report = {
        "schema": "closeness", "version": 1, "persons": people.size, "turns": len(turns),
        "conversations": len(by_chat(turns)), "data": request.data, "side": request.side,
        "seed": flags["seed"], "models": entries, "against": against,
    }  # fmt: skip
    write_json(target / FILE, report)
    return report


def _limited(turns: Sequence[PersonTurn], limit: int | None) -> list[PersonTurn]:
    """The turns of `limit` conversations: the first one of each person, then the second, …"""
    chats = {
        chat: (number, turn.person)
        for own in by_person(turns).values()
        for number, (chat, (turn, *_)) in enumerate(by_chat(own).items())
    }
    kept = set(sorted(chats, key=lambda chat: chats[chat][0])[:limit])
    return [turn for turn in turns if turn.chat in kept]
