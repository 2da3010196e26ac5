"""HumanLLM under `--protocol reference`: any list of candidates, one exact form of an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from soulkit.judge.verdict import spoken
from soulkit.tasks.humanllm.task import HumanLLM, is_ranking

_TAGGED = re.compile(r"<answer>([A-T](?:,[A-T]){4})</answer>")


class HumanLLMReference(HumanLLM):
    def check(self, candidates: Sequence[str]) -> None:
        """Blank candidates and other numbers of them are played, too."""

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        if match is None:
            return "", "no_tag"
        return (match.group(1), "ok") if is_ranking(match.group(1)) else ("", "malformed")
