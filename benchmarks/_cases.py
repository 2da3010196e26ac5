"""The batches of the training benchmark: token ids and rewards, drawn from fixed seeds.

A case is one or more named sets of sequences, stored as JSON so that a Python without soulkit can
read them. A sequence is a dict: `ids`, `trained` ([start, end) pairs), `part`, `example`,
`rollout`, `reward` and `advantage`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

VOCABULARY = 4200
"""Vocabulary size; a model of width 256 with six layers then has 5.8 million parameters."""
_FIRST = 700  # lower ids are markers, bytes and single characters

Row = dict[str, Any]
Sets = dict[str, list[Row]]


def single_turn(seed: int, prompt: int, group: int, new: int, prompts: int = 1) -> Sets:
    """`group` replies of `new` tokens to each of `prompts` prompts of `prompt` tokens."""
    rng = random.Random(seed)
    rows = []
    for example in range(prompts):
        head = _ids(rng, prompt)
        for rollout in range(group):
            ids = head + _ids(rng, new)
            rows.append(_row(rng, ids, [[prompt, len(ids)]], "draft", example, rollout))
    return {"all": with_advantages(rows)}


def dialogues(
    seed: int, group: int, shared: int, turns: int, heard_length: int, spoken_tokens: int
) -> Sets:
    """Dialogues with a common prefix of `shared` tokens and `turns` turns of partner and actor.

    The set `turns` holds the same training signal with one row per turn, each after its history.
    """
    rng = random.Random(seed)
    head, whole = _ids(rng, shared), []
    for rollout in range(group):
        ids, trained = list(head), []
        for _ in range(turns):
            ids += _ids(rng, heard_length + spoken_tokens)
            trained.append([len(ids) - spoken_tokens, len(ids)])
        whole.append(_row(rng, ids, trained, "draft", 0, rollout))
    whole = with_advantages(whole)
    split = [
        {**row, "ids": row["ids"][: span[1]], "trained": [span]}
        for row in whole
        for span in row["trained"]
    ]
    return {"all": whole, "turns": split}


def trees(
    seed: int, dialogues: int, branches: int, turns: int, opening: int, heard: int, new: int
) -> Sets:
    """Dialogues with `branches` replies at every turn, the first of which continues."""
    rng, rows = random.Random(seed), []
    for turn in range(dialogues * turns):
        before = [] if turn % turns else _ids(rng, opening)
        head = (before or rows[-branches]["ids"]) + _ids(rng, heard)
        for rollout in range(branches):
            ids = head + _ids(rng, new)
            rows.append(_row(rng, ids, [[len(head), len(ids)]], "draft", turn, rollout))
    return {"all": with_advantages(rows)}


def ditto(seed: int, group: int, prompt: int, slot: int, feedback: int, new: int) -> Sets:
    """Drafts, copies and refined replies; the feedback is at token `slot` of the prompt.

    The set `drafts` holds only the drafts, which GRPO trains on.
    """
    rng = random.Random(seed)
    bare, rows = _ids(rng, prompt), []
    for rollout in range(group):
        draft, better = _ids(rng, new), _ids(rng, new)
        hinted = bare[:slot] + _ids(rng, feedback) + bare[slot:]
        reward = rng.random()
        for part, head, tail in (
            ("draft", bare, draft), ("copy", bare, better), ("refined", hinted, better),
        ):  # fmt: skip
            row = _row(rng, head + tail, [[len(head), len(head) + new]], part, 0, rollout)
            rows.append(row if part == "draft" else {**row, "reward": reward})
    drafts = with_advantages([row for row in rows if row["part"] == "draft"])
    return {"all": with_advantages(rows), "drafts": drafts}


def with_advantages(rows: Sequence[Row]) -> list[Row]:
    """Add advantages: rewards normalised per group (drafts and copies of a prompt, or refined)."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        groups.setdefault(_group(row), []).append(row["reward"])
    weighted = []
    for row in rows:
        rewards = groups[_group(row)]
        off = row["reward"] - statistics.fmean(rewards)
        weighted.append({**row, "advantage": off / (statistics.stdev(rewards) + 1e-6)})
    return weighted


def _group(row: Row) -> tuple[int, bool]:
    return row["example"], row["part"] == "refined"


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_FIRST, VOCABULARY) for _ in range(count)]


def _row(
    rng: random.Random,
    ids: list[int],
    trained: list[list[int]],
    part: str,
    example: int,
    rollout: int,
) -> Row:
    return {
        "ids": ids, "trained": trained, "part": part, "example": example, "rollout": rollout,
        "reward": rng.random(),
    }  # fmt: skip
