"""Generated files in the documented layout of the PRISM corpus, with invented people and replies.

A conversation has an opening turn with replies of up to four models, and later turns with two
replies of one model. Each reply has a score from 1 to 100; one reply per turn is the chosen one.
`utterances` is the same in long form, with one record per reply.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("unguided", "values guided", "controversy guided")
SUBJECTS = ("keeping bees", "night trains", "old clocks", "sourdough", "lighthouses", "chess")
Record = dict[str, Any]


def conversation(n: int, seed: int = 0, turns: int | None = None) -> Record:
    """Conversation `n`, in which the person has 1 to 4 turns."""
    rng = random.Random(f"{seed}/{n}")
    subject, count = rng.choice(SUBJECTS), turns or rng.randint(1, 4)
    history: list[Record] = []
    for turn in range(count):
        opening = "hey i wondered about" if turn == 0 else "ok and what else is there on"
        history.append(
            {"turn": turn, "role": "user", "content": f"{opening} {subject} c{n} t{turn}"}
        )
        history += _replies(rng, f"c{n}", turn, subject)
    return {
        "conversation_id": f"c{n}", "user_id": f"user{n % 3}",
        "conversation_type": KINDS[n % 3], "opening_prompt": history[0]["content"],
        "conversation_turns": count, "conversation_history": history,
        "performance_attributes": {"fluency": rng.randint(1, 100)},
        "choice_attributes": {"fluency": rng.randint(1, 100)}, "open_feedback": "It was fine.",
    }  # fmt: skip


def _replies(rng: random.Random, name: str, turn: int, subject: str) -> list[Record]:
    several = 4 if turn == 0 else 2
    chosen = rng.randrange(several)
    return [
        {"turn": turn, "role": "model", "within_turn_id": i, "model_name": f"model-{i}",
         "model_provider": "nobody", "score": rng.randint(1, 100), "if_chosen": i == chosen,
         "content": f"On {subject}, {name} t{turn} r{i}{' chosen' if i == chosen else ''}."}
        for i in range(several)
    ]  # fmt: skip


def utterances(conversations: Iterable[Mapping[str, Any]]) -> list[Record]:
    """A conversation in long form."""
    records: list[Record] = []
    for one in conversations:
        asked = {m["turn"]: m["content"] for m in one["conversation_history"]
                 if m["role"] == "user"}  # fmt: skip
        for message in one["conversation_history"]:
            if message["role"] == "model":
                records.append({
                    "utterance_id": f"ut{len(records)}", "interaction_id": f"int{len(records)}",
                    "conversation_id": one["conversation_id"], "user_id": one["user_id"],
                    "turn": message["turn"], "within_turn_id": message["within_turn_id"],
                    "conversation_type": one["conversation_type"],
                    "user_prompt": asked[message["turn"]], "model_response": message["content"],
                    "model_name": message["model_name"], "score": message["score"],
                    "if_chosen": message["if_chosen"],
                })  # fmt: skip
    return records


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_conversations(path: Path, n: int, **more: Any) -> Path:
    """Write `n` conversations, each with the extra fields `more`."""
    return write_lines(path, ({**conversation(i), **more} for i in range(n)))
