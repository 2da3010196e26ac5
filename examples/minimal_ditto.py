"""Learning from verbal feedback in one file; read it from top to bottom.

    python examples/minimal_ditto.py --steps 40

A tiny language model with random weights reads short stories about a moved object and says where
someone thinks it is. A supervised warm-up teaches questions of fact without hints, and questions of
belief only with a hint in the prompt. After it, the model can use a hint but cannot do without one.
Then every step of Ditto plays questions of belief twice, without and with a hint, and trains three
kinds of sequences:

    kind      its prompt               its reply            compared with
    draft     the question             sampled without      drafts and copies of the question
    copy      the question             sampled with hint    drafts and copies of the question
    refined   the question and hint    sampled with hint    refined replies of the question

The copy is the key: a reply that a hint improved becomes more likely without the hint.

What is simplified, compared with `soul train ditto`:

* it trains all weights instead of an adapter, with one update per step, so the old policy equals
  the current one: the old log-probs are the current ones without a gradient;
* one prompt, one reply, one word: no dialogues, partner or judge, and none of their failures;
* rules write the hints: they say what the person saw, name no place and ignore the draft (a coach
  would read it), so no leak check is needed;
* nothing is saved, resumed or reported, and batches of unequal lengths are just padded.

The arithmetic is not simplified: advantages and losses are the functions that `soul train` calls.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.tom.explain import explain
from soulkit.tasks.tom.generate import synth_rows
from soulkit.train.loss.advantage import GroupMember, group_advantages
from soulkit.train.loss.losses import aggregate, clipped_loss, nll_loss

Row = dict[str, Any]
MAX_NEW = 4
"""Maximum tokens of a reply: a place, the end of the turn, and room for mistakes."""


# --- 1. The task: a prompt, a reward, a hint ------------------------------------------------------


def prompt_of(row: Row, hint: str | None = None) -> str:
    """The prompt. A copy is sampled with a hint and trained with `hint=None`."""
    text = f"{row['story']}\n\n{row['question']}"
    return text if hint is None else f"{text}\nHint: {hint}"


def reward_of(row: Row, reply: str) -> float:
    return float(reply.strip() == row["answer"])


def hint_of(row: Row) -> str | None:
    """What decides the question, without naming a place; None if there is nothing to say."""
    return explain("tomi", row, None, terse=True)


def is_belief(row: Row) -> bool:
    return bool(row["order"] > 0)


def make_rows(count: int, seed: int) -> list[Row]:
    """Questions of fact, and equally many about false and about true beliefs."""
    kinds: dict[str, list[Row]] = {}
    for row in synth_rows("tomi", count, seed, world="small"):
        kinds.setdefault(row["question_type"], []).append(row)
    false, true = kinds["first_order_tom"], kinds["first_order_no_tom"]
    return [*kinds["memory"], *kinds["reality"], *false, *true[:: len(true) // len(false)]]


# --- 2. The model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Actor:
    """A causal language model with its tokenizer."""

    model: Any
    tokenizer: Any

    def prompt_ids(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        ids: list[int] = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        return ids

    def reply_ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def text_of(self, reply: Sequence[int]) -> str:
        return str(self.tokenizer.decode(reply, skip_special_tokens=True))

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """One reply per prompt, as the sampled token ids including the end of the turn."""
        width, pad = max(map(len, prompts)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW,
            do_sample=True, temperature=1.0, top_p=1.0, top_k=0,
        )  # fmt: skip
        return [self._upto_end(row) for row in out[:, width:].tolist()]

    def _upto_end(self, row: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return row[: row.index(end) + 1] if end in row else row

    def log_probs(self, batch: Sequence[Trained]) -> tuple[Tensor, Tensor]:
        """Log-probs of the batch's tokens [sequence, token], and which of them are replies."""
        width = max(len(s.prompt) + len(s.reply) for s in batch)
        ids = torch.full((len(batch), width), self.tokenizer.pad_token_id)
        seen, trained = torch.zeros_like(ids), torch.zeros(ids.shape, dtype=torch.bool)
        for row, s in enumerate(batch):
            length = len(s.prompt) + len(s.reply)
            ids[row, :length] = torch.tensor([*s.prompt, *s.reply])
            seen[row, :length] = 1
            trained[row, len(s.prompt) : length] = True
        logits = self.model(input_ids=ids, attention_mask=seen).logits[:, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return chosen, trained[:, 1:]


@dataclass(frozen=True)
class Trained:
    """A training sequence: a reply, and the prompt under which it is trained."""

    prompt: list[int]
    reply: list[int]
    group: str = ""
    """Sequences in the same group are compared with each other."""
    rollout: str = ""
    reward: float = 0.0


def new_actor(rows: Sequence[Row], folder: Path) -> Actor:
    """A model with random weights and one token for each word of the stories and hints."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hints = [hint_of(row) or "" for row in rows]
    build_tiny(folder, [*(prompt_of(r, "") for r in rows), *(r["answer"] for r in rows), *hints])
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Actor(model.eval(), AutoTokenizer.from_pretrained(folder))


# --- 3. Supervised warm-up -----------------------------------------------------------------------


def lesson(actor: Actor, row: Row) -> Trained:
    """The right reply; questions of belief are taught only with a hint."""
    hint = hint_of(row) if is_belief(row) else None
    return Trained(actor.prompt_ids(prompt_of(row, hint)), actor.reply_ids(row["answer"]))


def imitate(actor: Actor, optimizer: torch.optim.Optimizer, batch: Sequence[Trained]) -> float:
    """One update on the replies' mean negative log-likelihood, in nats per token."""
    log_prob, mask = actor.log_probs(batch)
    return descend(actor, optimizer, aggregate(nll_loss(log_prob), mask, "token-mean"))


def warm_up(actor: Actor, rows: Sequence[Row], options: argparse.Namespace) -> None:
    rng, rate = random.Random(options.seed), options.warm_lr
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=rate, betas=(0.9, 0.95))
    for step in range(options.warm_up):
        # Linear warm-up, then linear decay to zero.
        share = min((step + 1) / 20, 1 - step / options.warm_up)
        optimizer.param_groups[0]["lr"] = rate * share
        batch = [lesson(actor, row) for row in rng.choices(rows, k=48)]
        loss = imitate(actor, optimizer, batch)
        if step % 50 == 49 or step == options.warm_up - 1:
            print(f"warm-up {step + 1:4d}  loss {loss:.3f}", flush=True)


def descend(actor: Actor, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


# --- 4. One step of Ditto -------------------------------------------------------------------------


@dataclass(frozen=True)
class Play:
    """One rollout: a draft, the hint it got, and the refined reply."""

    row: Row
    number: int
    draft: list[int]
    hint: str | None = None
    refined: list[int] | None = None


def play(actor: Actor, rows: Sequence[Row], group_size: int) -> list[Play]:
    """`group_size` drafts per row; each with a hint is followed by a second attempt."""
    places = [(row, number) for row in rows for number in range(group_size)]
    drafts = actor.sample([actor.prompt_ids(prompt_of(row)) for row, _ in places])
    hints = [hint_of(row) for row, _ in places]
    hinted = [i for i, hint in enumerate(hints) if hint is not None]
    prompts = [actor.prompt_ids(prompt_of(places[i][0], hints[i])) for i in hinted]
    refined = dict(zip(hinted, actor.sample(prompts) if prompts else [], strict=True))
    return [
        Play(row, number, drafts[i], hints[i], refined.get(i))
        for i, (row, number) in enumerate(places)
    ]


def sequences_of(actor: Actor, played: Play) -> list[Trained]:
    """The draft and, if there was a hint, the refined reply twice: as itself and as a copy."""
    row, n = played.row, played.number
    plain = actor.prompt_ids(prompt_of(row))
    question = f"{row['story_id']}/{row['question']}"
    reward = reward_of(row, actor.text_of(played.draft))
    sequences = [Trained(plain, played.draft, question, f"{n}/draft", reward)]
    if played.refined is not None:
        second = reward_of(row, actor.text_of(played.refined))
        prompt_with_hint = actor.prompt_ids(prompt_of(row, played.hint))
        name = f"{n}/refined"
        sequences.append(Trained(plain, played.refined, question, name, second))
        sequences.append(
            Trained(prompt_with_hint, played.refined, f"{question}/feedback", name, second)
        )
    return sequences


def learn(actor: Actor, optimizer: torch.optim.Optimizer, batch: Sequence[Trained]) -> float:
    """One update; replies that beat their group become more likely under their prompt."""
    entries = [GroupMember(s.group, s.rollout, s.reward) for s in batch]
    advantages = [a for a in group_advantages(entries) if a is not None]
    log_prob, mask = actor.log_probs(batch)
    per_token = torch.tensor(advantages)[:, None].expand_as(log_prob)
    # With one update per step, the old policy is the current one, so the ratio is 1.
    loss = clipped_loss(log_prob, log_prob.detach(), per_token).loss
    return descend(actor, optimizer, aggregate(loss, mask, "token-mean"))


def rewards_of(actor: Actor, plays: Sequence[Play]) -> tuple[float, float | None]:
    """Mean reward of the drafts and of the refined replies."""
    drafts = [reward_of(p.row, actor.text_of(p.draft)) for p in plays]
    refined = [reward_of(p.row, actor.text_of(p.refined)) for p in plays if p.refined is not None]
    return fmean(drafts), fmean(refined) if refined else None


# --- 5. The script --------------------------------------------------------------------------------


def main() -> None:
    options = read_options()
    rng = random.Random(options.seed)
    torch.manual_seed(options.seed)
    rows = make_rows(options.rows, options.seed)
    beliefs = [row for row in rows if is_belief(row)]
    with tempfile.TemporaryDirectory() as folder:
        actor = new_actor(rows, Path(folder))

    warm_up(actor, rows, options)
    optimizer = torch.optim.AdamW(actor.model.parameters(), lr=options.lr)
    for step in range(options.steps):
        plays = play(actor, rng.sample(beliefs, options.prompts), options.group_size)
        batch = [sequence for played in plays for sequence in sequences_of(actor, played)]
        learn(actor, optimizer, batch)
        draft, refined = rewards_of(actor, plays)
        shown = "   -" if refined is None else f"{refined:.3f}"
        print(f"ditto {step + 1:4d}  draft reward {draft:.3f}  refined reward {shown}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny model with Ditto, on one CPU.")
    parser.add_argument("--steps", type=int, default=40, help="Ditto steps")
    parser.add_argument("--warm-up", type=int, default=300, help="supervised updates before Ditto")
    parser.add_argument("--rows", type=int, default=9000, help="questions to generate")
    parser.add_argument("--prompts", type=int, default=16, help="questions per step")
    parser.add_argument("--group-size", type=int, default=8, help="drafts per question")
    parser.add_argument("--warm-lr", type=float, default=2e-3, help="learning rate of the warm-up")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of Ditto")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
