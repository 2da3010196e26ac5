"""Rows of `userllm` made here: invented wishes in all three subsets.

The subsets take turns: a quiz question, a question from which the assistant strays, and a message
as in PRISM. Of those every second one is a first message, and of the others every second one comes
after an answer that settles the wish, so that the conversation should end. Rows are written in the
spellings that files have: choices as a list or as `{label, text}`, conversations as tagged lines,
intents with and without the sentence that introduces them.

Example: {"source": "prism", "intent": "find out how to dry a cellar after a flood",
"conversation_history": "<user>: cellar is full of water, what now\\n<assistant>: ...",
"is_last_turn": true, "opening_prompt": "cellar is full of water, what now"}.
"""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]

PREAMBLE = "You are a user chatting with an assistant language model to: "
QUIZZES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Where does one leave a wet umbrella on entering a house?",
     ("hall stand", "bread bin", "chimney", "letter box", "mattress")),
    ("What does a gardener carry water in?",
     ("watering can", "rake", "straw hat", "seed packet", "fence")),
    ("What would someone do with a letter that has just come?",
     ("open envelope", "boil soup", "polish boots", "wind clock", "fold tent")),
    ("Where would you look for a missing sock?",
     ("laundry basket", "lighthouse", "orchestra", "glacier", "quarry")),
    ("What do musicians need to see in the dark pit of an opera house?",
     ("stand lamp", "compass", "telescope", "mirror ball", "torch relay")),
    ("Why does a baker get up before dawn?",
     ("fresh rolls", "cold coffee", "full moon", "late trains", "loud owls")),
    ("What holds the pages of a book together?",
     ("binding", "ink", "margin", "plot", "footnote")),
    ("Where do ferries wait for their passengers?",
     ("pier", "attic", "vineyard", "tunnel", "stadium")),
)  # fmt: skip
SEARCHES: tuple[tuple[str, str], ...] = (
    ("who built the old stone bridge in {place}", "the river that flows under it"),
    ("when was the night train to {place} stopped", "travelling by train in general"),
    ("how high is the bell tower of {place}", "how bells are cast"),
    ("what is the oldest inn of {place} called", "the dishes of the region"),
    ("which year did {place} get its harbour", "how harbours work today"),
    ("who painted the ceiling of the town hall of {place}", "painting techniques"),
)
HEADS = (
    "Ard",
    "Brunn",
    "Cor",
    "Dun",
    "Esk",
    "Fallow",
    "Garn",
    "Hyth",
    "Ing",
    "Kirn",
    "Lod",
    "Marl",
    "Nord",
    "Ott",
    "Pell",
    "Quen",
    "Rusk",
    "Sorn",
    "Tarn",
    "Uld",
    "Vess",
    "Wend",
)
TAILS = (
    "acre",
    "berg",
    "bury",
    "combe",
    "dale",
    "elle",
    "ford",
    "gate",
    "ham",
    "holm",
    "mere",
    "ness",
    "port",
    "stad",
    "thorpe",
    "vik",
    "wick",
    "worth",
)
RIVERS = (
    "Amsel",
    "Birne",
    "Calder",
    "Elst",
    "Fjell",
    "Gisp",
    "Imme",
    "Lauch",
    "Mirn",
    "Oster",
    "Rhee",
    "Stour",
    "Ully",
    "Wipper",
)
"""Enough places that two rows, of one seed or of two, are seldom about the same one."""
STRAYING = (
    "Nice question! How about we talk about {aside} instead?",
    "Before that, let me tell you about {aside}. Would you like that?",
    "I think {aside} would interest you more. Shall we?",
)
WISHES: tuple[tuple[str, str, str, str], ...] = (
    ("find out how to dry a cellar after a flood", "cellar is full of water, what now",
     "Pump it out, open everything, run a dryer for two weeks and measure the walls.",
     "That sounds unpleasant. Is the water coming from the river or from a pipe?"),
    ("get ideas for a speech at a sister's wedding", "my sis is getting married and i have to talk",
     "Begin with how you shared a room, tell of the lake, end with a toast to both.",
     "Congratulations! How long may you speak, and how well do you know her partner?"),
    ("understand why sourdough bread stays flat", "my loaves look like frisbees",
     "Your starter is too young: feed it twice a day for a week and let the dough rise longer.",
     "How old is the starter, and how warm is the kitchen?"),
    ("plan two rainy days in a small town with children", "stuck in a tiny town w 2 kids, rain",
     "Day one: the puppet museum and the pool. Day two: the mill, then pancakes at the station.",
     "How old are they, and have you got a car?"),
    ("hear what people think about longer school days", "should kids stay in school till 5?",
     "Parents like it for work, teachers ask for staff, pupils mostly dislike it; here is why.",
     "That is debated. Do you ask as a parent, a teacher or a pupil?"),
    ("learn to tell a fake antique map from a real one", "bought an old map at a flea mkt, real??",
     "Hold it to the light: chain lines, a plate mark and no dots of modern printing mean real.",
     "Can you describe the paper and the colours?"),
    ("write to a landlord about a broken heating", "its freezing here and nobody fixes it",
     "Dear landlord, the heating has failed since Monday; please repair it within three days.",
     "Since when has it been off, and have you told them already?"),
    ("decide whether to adopt a second cat", "one cat, thinking abt another one",
     "With your space and hours a calm adult cat would do; wait until the move is over.",
     "How old is yours, and how does it take visitors?"),
)  # fmt: skip


def rows(n: int, seed: int) -> list[Row]:
    """The first `n` rows; row i depends on the seed alone."""
    makers = (_quiz, _search, _prism)
    return [
        {**makers[i % 3](i // 3, random.Random(f"userllm/{seed}/{i}")), "id": f"m{seed}-{i}",
         "index": i}
        for i in range(n)
    ]  # fmt: skip


def _quiz(turn: int, rng: random.Random) -> Row:
    question, texts = rng.choice(QUIZZES)
    place = _place(rng)
    shown = rng.sample(texts, len(texts))
    labels = list("ABCDE")
    return {
        "source": "commonsense_qa",
        "intent": _introduced(f"settle a quiz in {place}: {question}", turn),
        "choices": {"label": labels, "text": shown} if turn % 2 else shown,
        "answer_key": labels[shown.index(texts[0])],
        "conversation_history": "",
    }


def _search(turn: int, rng: random.Random) -> Row:
    question, aside = rng.choice(SEARCHES)
    asked = question.format(place=_place(rng))
    strayed = rng.choice(STRAYING).format(aside=aside)
    return {
        "source": "natural_questions",
        "intent": _introduced(asked, turn),
        "question": asked,
        "assistant_suggestion_turn": strayed,
        "conversation_history": f"<user>: {asked}\n<assistant>: {strayed}",
    }


def _prism(turn: int, rng: random.Random) -> Row:
    wish, opening, settled, asked_back = rng.choice(WISHES)
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
    return f"{rng.choice(HEADS)}{rng.choice(TAILS)} on the {rng.choice(RIVERS)}"


def _introduced(wish: str, turn: int) -> str:
    return f"{PREAMBLE}{wish}" if turn % 3 == 2 else wish
