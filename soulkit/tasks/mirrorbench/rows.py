"""Rows of `mirrorbench`: invented people who want one thing of an assistant, in all four subsets.

The subsets take turns, each in the shape of the real one: `clariq` has three questions back and
ends with the user, `qulac` is one question and its answer, `chatbot_arena` and `oasst1` begin with
the user and mostly end with the assistant. Every fifth row lacks `dataset`, so that its subset can
be told by its id alone. The description names the aim and the voice of the messages, so a row can
be played well from its description.

Example: {"task_description": "A welder of 40 turns to an assistant about sourdough bread. ...",
"turns": [{"role": "assistant", "content": "are you asking which flour to buy"}, ...], "dataset":
"qulac", "conversation_id": "qulac-9000-1", "metadata": {"topic_id": 9000}, "index": 3}.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from soulkit.data.turns import ChatMessage
from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts
from soulkit.tasks.voices import VOICES, Voice

TEXTS = Texts(__file__)

_JOBS = ("baker", "bus driver", "dentist", "florist", "plumber", "translator", "welder", "gardener")
REMARKS = ("Thanks, that helps.", "I see.", "That is more than I knew.", "Good, that is clear now.")


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants to know what about which subject, and how they write."""

    number: int
    subject: str
    aim: str
    others: tuple[str, ...]
    who: str
    voice: Voice
    rng: random.Random

    def user(self, text: str) -> ChatMessage:
        return {"role": "user", "content": self.voice.write(text)}


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> Row:
    rng = random.Random(f"mirrorbench/{seed}/{i}")
    subset = list(_SHAPES)[i % len(_SHAPES)]
    subject = rng.choice(sorted(TEXTS["subjects"]))
    aim, *others = rng.sample(TEXTS["subjects"][subject], len(TEXTS["subjects"][subject]))
    who = f"A {rng.choice(_JOBS)} of {rng.randint(19, 88)}"
    number = 9000 + sorted(TEXTS["subjects"]).index(subject)
    wish = Wish(number, subject, aim, tuple(others), who, rng.choice(VOICES), rng)
    key, metadata, turns = _SHAPES[subset](wish, i)
    named = {} if i % 5 == 4 else {"dataset": subset}
    return {
        "task_description": f"{who} turns to an assistant about {subject} and wants to know {aim}. "
        f"This person {wish.voice.trait}.",
        "turns": turns,
        **named,
        "conversation_id": key,
        "metadata": {"language": "en", **metadata},
        "few_shot_user_examples": _examples(wish, subset),
        "index": i,
    }


_Recording = tuple[str, Row, list[ChatMessage]]


def _clariq(wish: Wish, i: int) -> _Recording:
    turns = [wish.user(f"Tell me about {wish.subject}.")]
    for place, other in enumerate(wish.others):
        turns.append(_clarification(other))
        last = place == len(wish.others) - 1
        turns.append(wish.user(f"No, just {wish.aim}." if last else _no(wish)))
    about = {"topic_id": str(wish.number), "facet": _question(wish.aim),
             "clarification_pairs": len(wish.others)}  # fmt: skip
    return f"clariq-{wish.number}-{i}", about, turns


def _qulac(wish: Wish, i: int) -> _Recording:
    hit = wish.rng.random() < 0.3
    facet = wish.aim if hit else wish.rng.choice(wish.others)
    answer = f"Yes, I want to know {wish.aim}." if hit else f"No, I want to know {wish.aim}."
    about = {"topic": wish.subject, "topic_id": wish.number, "facet_desc": _question(wish.aim)}
    return f"qulac-{wish.number}-{i}", about, [_clarification(facet), wish.user(answer)]


def _arena(wish: Wish, i: int) -> _Recording:
    key = f"{wish.rng.getrandbits(128):032x}"
    turns = _open_talk(wish, wish.rng.choice((1, 1, 1, 2)))
    return f"{key}::made-model-{i % 3}", {"question_id": key, "arena_winner": "tie"}, turns


def _oasst(wish: Wish, i: int) -> _Recording:
    turns = _open_talk(wish, wish.rng.choice((1, 2, 3)))
    if wish.rng.random() < 0.35:
        turns.append(wish.user(wish.rng.choice(REMARKS)))
    user_turns = sum(turn["role"] == "user" for turn in turns)
    key = str(UUID(int=wish.rng.getrandbits(128), version=4))
    return key, {"num_user_turns": user_turns, "num_turns": len(turns)}, turns


_SHAPES: dict[str, Callable[[Wish, int], _Recording]] = {
    "chatbot_arena": _arena,
    "clariq": _clariq,
    "oasst1": _oasst,
    "qulac": _qulac,
}
"""Subset → how a row of it is made."""


def _open_talk(wish: Wish, rounds: int) -> list[ChatMessage]:
    facets = [wish.aim, *wish.others][:rounds]
    turns: list[ChatMessage] = []
    for place, facet in enumerate(facets):
        lead = "Can you tell me" if place == 0 else wish.rng.choice(("And", "Next question:"))
        turns.append(wish.user(f"{lead} {facet}? It is about {wish.subject}."))
        turns.append({"role": "assistant", "content": _answer(wish, facet)})
    return turns


def _clarification(facet: str) -> ChatMessage:
    return {"role": "assistant", "content": f"are you asking {facet}"}


def _no(wish: Wish) -> str:
    return wish.rng.choice(
        ("No.", "No, that is not it.", "Not now, thanks.", "No, something else.")
    )


def _answer(wish: Wish, facet: str) -> str:
    tip = wish.rng.choice(("start small and note what changes", "ask somebody nearby who does it",
                           "compare two sources first", "give it a week"))  # fmt: skip
    return f"As for {facet}: it depends on the case, so {tip}."


def _question(facet: str) -> str:
    return f"{facet[:1].upper()}{facet[1:]}?"


def _examples(wish: Wish, subset: str) -> list[Row]:
    """What other people said, as the published rows carry along."""
    others = wish.rng.sample(sorted(set(TEXTS["subjects"]) - {wish.subject}), 2)
    return [
        {"conversation_id": f"{subset}-made-{n}", "utterance": f"Tell me about {name}.",
         "similarity": f"0.{wish.rng.randint(1000, 9999)}"}
        for n, name in enumerate(others)
    ]  # fmt: skip
