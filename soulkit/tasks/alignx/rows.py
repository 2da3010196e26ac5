"""Rows of the five AlignX splits, with invented people who each have one taste that decides.

A taste is one end of an axis (short or long, blunt or gentle, numbers or stories, ...). The two
replies to a post give the same advice at the two ends of the person's axis; what is known of them
(a description, replies they compared, comments they wrote) shows which end is theirs, so a row is
solvable from itself and only from what is known of the person.

Example row: {"raw_prompt": "My flatmate keeps taking my bike. What now?", "chosen": "Stop waiting.
Agree on a rule for the bike today.", "rejected": "That sounds wearing. ...", "demographic": "A
nurse in their forties. Cannot stand being handled with kid gloves.", "index": 3}.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Topic:
    """A post, and what there is to advise: one step first, three in all."""

    post: str
    steps: tuple[str, str, str]
    thing: str
    people: str


@dataclass(frozen=True, slots=True)
class Taste:
    """One end of an axis: how it shows in a person, in their comments, and in a reply."""

    traits: tuple[str, ...]
    comments: tuple[str, ...]
    reply: Callable[[Topic], str]


TOPICS = (
    Topic(
        "My flatmate keeps taking my bike without asking. What now?",
        ("agree on a rule for the bike", "keep the key in your room", "put the rule in writing"),
        "bike", "flatmates",
    ),
    Topic(
        "I have two job offers and a week to decide. How?",
        ("list what you want from a job", "call someone at each company", "sleep on it"),
        "job", "people who changed jobs",
    ),
    Topic(
        "My sourdough never rises. Any ideas?",
        ("feed the starter twice a day", "let the dough stand in a warm spot", "bake it hotter"),
        "dough", "home bakers",
    ),
    Topic(
        "How do I start running when I hate running?",
        ("run for ten minutes only", "go on the same three days", "slow down until you can talk"),
        "run", "beginners",
    ),
    Topic(
        "The neighbours play music until two at night. Help!",
        ("talk to them in the daytime", "name an hour you can live with", "write to the landlord"),
        "music", "neighbours",
    ),
    Topic(
        "I want to save for a trip but money just vanishes.",
        ("move the savings on payday", "look at last month's spending", "cancel one subscription"),
        "budget", "savers",
    ),
    Topic(
        "My houseplants die one after the other. What am I doing wrong?",
        ("water only when the soil is dry", "move them to the window", "repot the oldest one"),
        "plant", "gardeners",
    ),
    Topic(
        "I freeze whenever I have to speak in front of the team.",
        ("learn the first sentence by heart", "rehearse it aloud", "pause before you start"),
        "talk", "speakers",
    ),
    Topic(
        "My old laptop takes ages to start. Buy a new one?",
        ("switch off what starts by itself", "clear the full disk", "put in more memory"),
        "laptop", "owners of old machines",
    ),
    Topic(
        "My sister and I always fight at family dinners.",
        ("leave politics off the table", "sit at different ends", "call her before the dinner"),
        "dinner", "siblings",
    ),
    Topic(
        "I cannot fall asleep before two in the morning.",
        ("get up at the same hour every day", "put the phone in the hall", "skip coffee at night"),
        "sleep", "bad sleepers",
    ),
    Topic(
        "Learning Spanish for a year and I still cannot hold a conversation.",
        ("speak for ten minutes every day", "learn whole phrases", "find someone to talk to"),
        "language", "learners",
    ),
)  # fmt: skip


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def _short(t: Topic) -> str:
    return f"{_cap(t.steps[0])}."


def _long(t: Topic) -> str:
    return (
        f"There is a lot to say about this, so let me go through it. To begin with, {t.steps[0]}, "
        f"since everything else depends on it. Once that works, {t.steps[1]}; give it time before "
        f"you judge it. And when both have become a habit, {t.steps[2]}, which most people forget. "
        f"Taken together these change how you deal with the {t.thing} for good."
    )


def _blunt(t: Topic) -> str:
    return f"Stop waiting and stop complaining. {_cap(t.steps[0])}, today. Then {t.steps[1]}."


def _gentle(t: Topic) -> str:
    return (
        "That sounds really wearing, and it is no wonder that you feel this way. Whenever you feel "
        f"ready, you might {t.steps[0]}, and perhaps {t.steps[1]}. Be kind to yourself meanwhile."
    )


def _numbers(t: Topic) -> str:
    return (
        f"Of 200 {t.people} asked, 71 percent were better off after four weeks when they did this: "
        f"{t.steps[0]}. Adding a second habit, {t.steps[1]}, brought it to 83 percent."
    )


def _story(t: Topic) -> str:
    return (
        "My aunt Ilse had just that for years, and she cursed it every evening over her soup. One "
        f"day a stranger on the tram told her: {t.steps[0]}. She laughed, she tried it, and she "
        f"still tells everyone to {t.steps[1]}."
    )


def _steps(t: Topic) -> str:
    return "\n".join(f"{i}. {_cap(step)}." for i, step in enumerate(t.steps, 1))


def _open(t: Topic) -> str:
    return (
        f"What would a good ending look like to you? If the {t.thing} were no trouble at all, what "
        f"would you do first? Some {t.people} ended up saying {t.steps[0]}; does that sit right "
        "with you, or is it something else that bothers you?"
    )


def _funny(t: Topic) -> str:
    return (
        f"Ah, the {t.thing}: proof that the universe has a sense of humour and a grudge. Before "
        f"you move to a desert island, {t.steps[0]}. If that fails, {t.steps[1]}. If that fails "
        "too, the island has good reviews."
    )


def _earnest(t: Topic) -> str:
    return (
        f"This is a real difficulty and deserves a serious answer. I would advise you to "
        f"{t.steps[0]} and, if necessary, to {t.steps[1]}."
    )


def _careful(t: Topic) -> str:
    return (
        f"Change as little as possible at first. You could {t.steps[0]} for a week, on trial, and "
        "keep a way back in case it makes things worse. Only then think about anything bigger."
    )


def _bold(t: Topic) -> str:
    return (
        f"Go all in. {_cap(t.steps[0])}, {t.steps[1]} and {t.steps[2]}, all of it this very week. "
        "Half measures are what got you here, and you will find out soon enough what holds."
    )


AXES: tuple[tuple[Taste, Taste], ...] = (
    (
        Taste(
            ("Reads nothing that is longer than a line.", "Has no patience for many words."),
            ("Too long. One line is enough.", "tl;dr. Just the point, please.", "Short and done."),
            _short,
        ),
        Taste(
            ("Loves to have things laid out at length.", "Wants the whole background, always."),
            (
                "Thank you for taking the time to go into it properly; I always want the whole "
                "background before I do anything, and most answers here stop after a line.",
                "I read this twice, slowly, and still wished you had gone further into the why.",
            ),
            _long,
        ),
    ),
    (
        Taste(
            ("Cannot stand being handled with kid gloves.", "Says what they think, to anyone."),
            ("Just say it. No cushions, please.", "If I am being silly, tell me so.",
             "Spare me the comforting."),
            _blunt,
        ),
        Taste(
            ("Is easily hurt and needs a warm word first.", "Values kindness above being right."),
            ("Please be a little kinder, we are all doing our best.",
             "A warm word would have helped me more than the advice.",
             "I felt so much better when somebody said that my feelings made sense."),
            _gentle,
        ),
    ),
    (
        Taste(
            ("Trusts figures and nothing else.", "Works as a statistician, at home as well."),
            ("Is there any data on this?", "How large was the sample, though?",
             "I believe it when I see the percentages."),
            _numbers,
        ),
        Taste(
            ("Remembers what happened to people, never a figure.", "Lives for a good anecdote."),
            ("Tell us how it went for you, figures leave me cold.",
             "This reminds me of my uncle's goat. Long story, sit down.",
             "I never forget a tale, and never remember a percentage."),
            _story,
        ),
    ),
    (
        Taste(
            ("Likes to be told what to do, in order.", "Runs their life by checklists."),
            ("Could someone number that for me?", "What is step one?", "List, please."),
            _steps,
        ),
        Taste(
            ("Wants to find their own answer and dislikes orders.", "Thinks best when asked."),
            ("I would rather be asked than told.",
             "Nobody can know that for me, but a good question helps.",
             "Why does everyone hand out instructions here?"),
            _open,
        ),
    ),
    (
        Taste(
            ("Takes nothing seriously, least of all trouble.", "Would rather laugh than be right."),
            ("This thread needs more jokes.", "I came for the puns.", "Made me snort my tea, ten "
             "out of ten."),
            _funny,
        ),
        Taste(
            ("Finds jokes about other people's trouble out of place.", "Is sober and formal."),
            ("I do not see what is funny about this.",
             "A serious question should be given a serious answer.",
             "Kindly leave the wisecracks for another place."),
            _earnest,
        ),
    ),
    (
        Taste(
            ("Avoids every risk that can be avoided.", "Never changes two things at once."),
            ("And if it goes wrong? I would keep a way back.", "Better slow and sure.",
             "I would try that on something small first."),
            _careful,
        ),
        Taste(
            ("Acts first and thinks later.", "Gets bored by anything gradual."),
            ("Why wait? Do it all at once.", "Baby steps are for babies.",
             "I quit, moved and started over in one week. Best week ever."),
            _bold,
        ),
    ),
)  # fmt: skip

TASKS = tuple(f"alignx_{s}" for s in ("demo", "pair", "ugc", "arbitrary", "history16"))
_JOBS = ("nurse", "bus driver", "lawyer", "florist", "roofer", "librarian", "student", "cook")
_AGES = ("twenties", "thirties", "forties", "fifties", "sixties")
_HOBBIES = ("chess", "pottery", "choir singing", "bird watching", "old radios", "swimming")
_KINDS = ("demographic", "icl_pairs", "ugc")
_ITEMS = 4
_HISTORY = 8


def rows(n: int, seed: int, *, task: str) -> list[Row]:
    """`n` rows of the split `alignx_<split>`; row i depends on (split, seed, i) alone."""
    split = task.removeprefix("alignx_")
    return [_row(random.Random(f"alignx/{split}/{seed}/{i}"), split, i) for i in range(n)]


def _row(rng: random.Random, split: str, index: int) -> Row:
    taste, other = rng.sample(rng.choice(AXES), 2)
    topic, *earlier = rng.sample(TOPICS, len(TOPICS))
    row: Row = {
        "raw_prompt": topic.post,
        "chosen": taste.reply(topic),
        "rejected": other.reply(topic),
        "index": index,
    }
    if split == "history16":
        pairs, posts = earlier[:_HISTORY], rng.sample(TOPICS, _HISTORY)
        return {**row, **_pairs(pairs, taste, other), **_comments(posts, taste, rng)}
    kinds = {"demo": _KINDS[:1], "pair": _KINDS[1:2], "ugc": _KINDS[2:]}.get(split)
    for kind in kinds or rng.sample(_KINDS, rng.randint(1, len(_KINDS))):
        if kind == "demographic":
            row[kind] = _person(taste, rng)
        elif kind == "icl_pairs":
            row |= _pairs(earlier[:_ITEMS], taste, other)
        else:
            row |= _comments(earlier[-_ITEMS:], taste, rng)
    return row


def _person(taste: Taste, rng: random.Random) -> str:
    said = [
        f"A {rng.choice(_JOBS)} in their {rng.choice(_AGES)}.",
        rng.choice(taste.traits),
        f"Spends free evenings on {rng.choice(_HOBBIES)}.",
    ]
    rng.shuffle(said)
    return " ".join(said)


def _pairs(topics: list[Topic], taste: Taste, other: Taste) -> Row:
    pairs = [
        {"prompt": t.post, "chosen": taste.reply(t), "rejected": other.reply(t)} for t in topics
    ]
    return {"icl_pairs": pairs, "n_icl": len(pairs)}


def _comments(topics: list[Topic], taste: Taste, rng: random.Random) -> Row:
    order = rng.sample(taste.comments, len(taste.comments))
    texts = (order[i % len(order)] for i in range(len(topics)))
    said = [{"prompt": t.post, "comment": text} for t, text in zip(topics, texts, strict=True)]
    return {"ugc": said, "n_ugc": len(said)}
