"""Rows of `userllm` made here: invented wishes in all three subsets.

The subsets take turns: a quiz question that the assistant could not answer, a question from which
it strays, and a message as in PRISM. Of those every second one is a first message, and of the
others every second one comes after an answer that settles the wish, so that the conversation should
end. Rows are written in the spellings that files have: choices as a list or as `{label, text}`,
conversations as tagged lines, intents with and without the sentence that introduces them.

Example: {"source": "prism", "intent": "find out how to dry a cellar after a flood",
"conversation_history": "<user>: cellar is full of water, what now\\n<assistant>: ...",
"is_last_turn": true, "opening_prompt": "cellar is full of water, what now"}.
"""

from __future__ import annotations

import random

from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts
from soulkit.tasks.userllm.quiz import quiz_history

PREAMBLE = "You are a user chatting with an assistant language model to: "

TEXTS = Texts(__file__)

STRAYING = (
    "Nice question! How about we talk about {aside} instead?",
    "Before that, let me tell you about {aside}. Would you like that?",
    "I think {aside} would interest you more. Shall we?",
)


def rows(n: int, seed: int) -> list[Row]:
    """The first `n` rows; row i depends on the seed alone."""
    makers = (_quiz, _search, _prism)
    return [
        {**makers[i % 3](i // 3, random.Random(f"userllm/{seed}/{i}")), "id": f"m{seed}-{i}",
         "index": i}
        for i in range(n)
    ]  # fmt: skip


def _quiz(turn: int, rng: random.Random) -> Row:
    question, texts = rng.choice(TEXTS["quizzes"])
    place = _place(rng)
    shown = rng.sample(texts, len(texts))
    labels = list("ABCDE")
    wish = f"settle a quiz in {place}: {question}"
    return {
        "source": "commonsense_qa",
        "intent": _introduced(wish, turn),
        "choices": {"label": labels, "text": shown} if turn % 2 else shown,
        "answer_key": labels[shown.index(texts[0])],
        "conversation_history": quiz_history(question, shown),
    }


def _search(turn: int, rng: random.Random) -> Row:
    question, aside = rng.choice(TEXTS["searches"])
    query = question.format(place=_place(rng))
    strayed = rng.choice(STRAYING).format(aside=aside)
    return {
        "source": "natural_questions",
        "intent": _introduced(query, turn),
        "question": query,
        "assistant_suggestion_turn": strayed,
        "conversation_history": f"<user>: {query}\n<assistant>: {strayed}",
    }


def _prism(turn: int, rng: random.Random) -> Row:
    wish, opening, settled, asked_back = rng.choice(TEXTS["wishes"])
    place = _place(rng)
    last = turn % 4 == 1
    answer = settled if last else asked_back
    later = f"<user>: {opening}\n<assistant>: {answer}"
    return {
        "source": "prism",
        "intent": _introduced(f"{wish}, in {place}", turn),
        "opening_prompt": opening,
        "conversation_history": later if turn % 2 else "",
        "is_last_turn": last,
        "turn": 1 + turn % 2,
    }


def _place(rng: random.Random) -> str:
    name = rng.choice(TEXTS["heads"]) + rng.choice(TEXTS["tails"])
    return f"{name} on the {rng.choice(TEXTS['rivers'])}"


def _introduced(wish: str, turn: int) -> str:
    return f"{PREAMBLE}{wish}" if turn % 3 == 2 else wish
