"""MirrorBench's rows: a person's aim, and the conversation that they really had.

Whoever plays the person sees the description alone; the assistant and the judge see the recorded
conversation. One conversation may stand in two files under two descriptions, so its words are an
entity of their own. Which of the four subsets a row belongs to, and which topic it shares with
others, is read from `dataset`, `metadata` and the form of its id (see `data/subsets.py`).

    {"task_description": "They want ...", "turns": [{"role": "user", "content": "hi"}, ...],
     "dataset": "clariq", "conversation_id": "clariq-448", "metadata": {"topic_id": "271"}}
"""

from __future__ import annotations

from typing import Any

from soulkit.data.turns import conversation
from soulkit.tasks.mirrorbench.subsets import subset_of, topic_of
from soulkit.tasks.rows_only import RowsOnly


class MirrorBenchRows(RowsOnly):
    """Binds rows of MirrorBench; playing them is refused."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        opened = super().prepare(fields)
        turns = conversation(opened["turns"], "turns")
        return {
            **opened,
            "turns": turns,
            "conversation": "\n".join(turn["content"] for turn in turns),
            "subset": subset_of(opened),
            "topic": topic_of(opened),
        }
