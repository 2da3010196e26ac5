"""ToMBench: what somebody thinks, wants, feels, means or knows; two to four options, two languages.

Example row: {"language": "en", "story": "Ada leaves the shed. Ben moves the rope to the crate.",
"question": "Where will Ada look for the rope?", "options_dict": {"A": "in the crate", "B": "on the
hook"}, "correct_letter": "B", "ability": "Belief: Location false beliefs"}. `options`, a list in
order, may stand for `options_dict`; `zh` rows get a Chinese prompt, all others an English one.
The ability before the colon is the group that break-downs go by.

As in the benchmark, `paper` asks every question with its options in five orders (`options:
{shuffles: 5}` in tasks.yaml; 1 keeps the order of the row) and lets the majority of the answers
stand for the row. The five are examples whose ids share their beginning, so that a subset by id
keeps them together; the headline is the mean over rows of the share that is right. `reference` asks
once.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from soulkit.errors import ConfigError
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import (
    UNREAD_OPENINGS,
    LetteredTask,
    check_gold,
    opening,
    read_options,
    read_state,
)
from soulkit.tasks.kit.scoring import ROWS, macro, mean_of, row_mean, row_plays
from soulkit.types import BatchMetric, Completion, Episode, Example, Kind, Record, Score, Segment

_GROUP = re.compile(r"([^:]+?):\s*")

_ADVICE = {
    "belief": "Go through the events one by one and note who was there for each; whoever was away "
    "keeps the picture they had when they went.",
    "knowledge": "List what each person could perceive from where they were, and credit them with "
    "that alone.",
    "desire": "Keep the people apart: find the sentence that tells what the one asked about is "
    "after, and leave your own taste out of it.",
    "emotion": "Ask what the event means for this very person, given what they hoped for and what "
    "they know, before naming how they feel.",
    "intention": "Ask which goal makes every action in the story useful, not only the last one.",
    "non-literal communication": "Ask why somebody would say this here: compare the words "
    "with what the speaker knows and with how the listener is placed.",
}
_GENERAL = "Write down who knows what at the moment that the question is about, then compare."
ADVICE_ZH = {
    "belief": "把事件一件一件列出来，记下每件事发生时谁在场；离开的人只记得离开之前的情形。",
    "knowledge": "先写出每个人从自己的位置能看到、听到什么，只能认定他知道这些。",
    "desire": "把几个人分开来看：找出写明所问之人想要什么的那句话，不要代入自己的喜好。",
    "emotion": "先想这件事对这个人意味着什么（他盼望什么、知道什么），再判断他的心情。",
    "intention": "想一想哪个目的能让故事里的每个举动都说得通，而不只是最后一个。",
    "non-literal communication": "想一想这个人为什么偏偏在此时说这话，再和他知道的情况对照。",
}
GENERAL_ZH = "先写明问题所问的那一刻谁知道什么，再作比较。"
OPENINGS = {
    "en": (
        "The draft holds; go on arguing from the people in the story.",
        "The draft does not follow from the people in the story.",
    ),
    "zh": ("这次的推理站得住，继续从人物出发来论证。", "这次的推理不是从人物出发的。"),
}
"""Language → what is said first about a right and about a wrong draft."""
UNREAD_ZH = {
    "no_tag": "这次写了推理，却没有把字母写进标签里。",
    "malformed": "这次在标签里写了别的东西，而不是一个字母。",
    "empty": "这次什么也没有写。",
    "truncated": "这次还没作答篇幅就用完了，推理要写得短一些。",
    "refusal": "这次拒绝了作答；这里只需要从给出的选项里挑一个。",
}


class ToMBench(LetteredTask):
    hears_thinking = True

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        options = read_options(fields.get("options_dict"), fields.get("options"))
        letter = str(fields.get("correct_letter") or "").strip().upper()
        if self.protocol == "paper":
            check_gold(letter, options)
        language = "zh" if str(fields["language"]).strip().lower() == "zh" else "en"
        return {
            **fields,
            "language": language,
            "options": options,
            "options_dict": None,
            "correct_letter": letter or None,
            "order": None,
            "story_id": fields.get("story_id") or fields["story"],
        }

    @property
    def shuffles(self) -> int:
        """In how many orders of its options a question is asked; ConfigError for no such number."""
        count = self.spec.options.get("shuffles", 1)
        if self.protocol == "reference":
            return 1
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"The task '{self.name}' cannot ask in {count!r} orders.",
                "Its option 'shuffles' says in how many orders of its options a question is asked.",
                "Write a whole number of at least 1; the benchmark has 5.",
            )
        return count

    def examples(
        self, row: Mapping[str, Any], *, source: str = "", split: str = "test"
    ) -> tuple[Example, ...]:
        """The row once for every order of its options."""
        example = self.example(row, source=source, split=split)
        if self.shuffles == 1:
            return (example,)
        drawn = orders(tuple(example.fields["options"]), self.shuffles, example.id)
        return tuple(_reordered(example, order, i) for i, order in enumerate(drawn))

    def _episode(
        self, example: Example, context: tuple[Segment, ...], completion: Completion,
        index: int, kind: Kind,
    ) -> Episode:  # fmt: skip
        """With a note on the order of the options, for `summarise`."""
        episode = super()._episode(example, context, completion, index, kind)
        order = example.fields["order"]
        return replace(episode, notes={**episode.notes, "order": order}) if order else episode

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Language, group of abilities, and the ability in full where the row names one."""
        ability = str(fields.get("ability") or "").strip()
        finer = {"ability": ability_group(ability)} if ability else {}
        return {**super().tags(fields), **finer}

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        chinese = example.fields["language"] == "zh"
        unread = UNREAD_ZH if chinese else UNREAD_OPENINGS
        first = opening(read_state(score), *OPENINGS["zh" if chinese else "en"], unread)
        advice, general = (ADVICE_ZH, GENERAL_ZH) if chinese else (_ADVICE, _GENERAL)
        group = ability_group(str(example.fields.get("ability") or "")).lower()
        for text in dict.fromkeys((advice.get(group, general), general)):
            yield f"{first} {text}".strip()
        yield general

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """`row_accuracy`: the mean over rows of their accuracy over all orders (the headline).

        `macro_ability`: the mean over groups of abilities of their accuracies.

        `majority_accuracy`: the share of rows of which the majority of answers over all orders is
        right, among rows scored in every order. Of options with equally many votes the one that an
        earlier order voted for wins, as in the benchmark; a reply that cannot be read is no vote.
        """
        metrics = {"row_accuracy": row_mean(records), "macro_ability": macro(records, "ability")}
        if self.shuffles > 1:
            metrics["majority_accuracy"] = _majority(records, self.shuffles)
        return {name: m for name, m in metrics.items() if m is not None and m.n}


# -- orders --------------------------------------------------------------------------------------


def orders(letters: Sequence[str], n: int, seed: str) -> list[str]:
    """`n` orders of the letters, drawn by the seed; none comes twice before all have come once."""
    every = ["".join(order) for order in permutations(letters)]
    random.Random(f"orders/{seed}").shuffle(every)
    return [every[i % len(every)] for i in range(n)]


def _reordered(example: Example, order: str, number: int) -> Example:
    """`order` BCA: what the row calls B is shown as A, its C as B, its A as C."""
    options, gold = example.fields["options"], example.fields["correct_letter"]
    shown = dict(zip(options, order, strict=True))
    letter = next((new for new, old in shown.items() if old == gold), gold)
    fields = {
        **example.fields,
        "options": {new: options[old] for new, old in shown.items()},
        "correct_letter": letter,
        "order": order,
    }
    return replace(example, id=f"{example.id}-{number}", fields=fields)


def _majority(records: Sequence[Record], orders: int) -> BatchMetric:
    """Over rows, and where a row was played several times the mean of these."""
    votes: list[float | None] = []
    for plays in row_plays(records).values():
        right = [
            float(_majority_right(sorted(play, key=_number)))
            for play in plays
            if len(play) == orders and all(r.score.scored for r in play)
        ]
        votes.append(sum(right) / len(right) if right else None)
    return mean_of(votes, ROWS)


def _number(record: Record) -> int:
    """Which of its row's orders a record is of."""
    return int(record.example_id.rpartition("-")[2])


def _majority_right(records: Sequence[Record]) -> bool:
    votes: Counter[str] = Counter()
    right: dict[str, bool] = {}
    for record in records:
        order = str(record.episode.notes["order"])
        meant = dict(zip(sorted(order), order, strict=True)).get(record.score.words)
        if meant and record.score.status in READABLE:
            votes[meant] += 1
            right[meant] = record.score.value == 1
    return bool(votes) and right[votes.most_common(1)[0][0]]


def ability_group(ability: str) -> str:
    """`Belief` of `Belief: Location false beliefs`; a text without a colon is its own group."""
    match = _GROUP.match(ability)
    return match.group(1).strip() if match else ability
