"""Rows of `sim_math`: invented students, each stuck on one problem whose answer is computed.

The row is JSON text under `raw`, as in released files. Three kinds take turns: without target
features, with answered ones, and with some that only ask (and one that says nothing, which a reader
has to leave out). What the profile tells of a student is what the recorded messages show: how they
write, how far they get alone, whether they slip.

Example: {"raw": "{\\"problem\\": \\"A pen costs 3 coins ...\\", \\"correct_answer\\": \\"12\\",
\\"user_profile_text\\": \\"- School: grade 8 ...\\", \\"human_user_queries\\": [...],
\\"human_public_conversation\\": [...]}", "index": 4}.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from soulkit.data.turns import alternate
from soulkit.tasks.made import Row
from soulkit.tasks.voices import FAMILIES, FIRST_NAMES, VOICES, Voice

GRADES = ("grade 6", "grade 7", "grade 8", "grade 9", "grade 10", "evening school")
_THINGS = ("pens", "ferry tickets", "bolts", "postcards", "lemons", "tram tickets")


@dataclass(frozen=True, slots=True)
class _Problem:
    """A problem with its steps; a step is what the tutor asks and the right short answer."""

    subject: str
    level: str
    text: str
    topic: str
    steps: tuple[tuple[str, str], ...]

    @property
    def answer(self) -> str:
        return self.steps[-1][1]


def _prices(rng: random.Random) -> _Problem:
    many, price, more = rng.randint(3, 9), rng.randint(2, 12), rng.randint(2, 8)
    thing, total = rng.choice(_THINGS), many * price
    text = (f"{many} {thing} cost {total} coins in all. How many coins do {many + more} {thing} "
            "cost at the same price?")  # fmt: skip
    return _Problem("Prealgebra", "Level 2", text, "unit prices", (
        (f"What does one of the {thing} cost?", str(price)),
        ("Now multiply by the new number. What do you get?", str(price * (many + more))),
    ))  # fmt: skip


def _equation(rng: random.Random) -> _Problem:
    factor, root, add = rng.randint(2, 9), rng.randint(2, 15), rng.randint(1, 20)
    right = factor * root + add
    text = f"Find x if {factor}x + {add} = {right}."
    return _Problem("Algebra", "Level 3", text, "linear equations", (
        (f"What is {right} minus {add}?", str(right - add)),
        (f"Which number times {factor} gives that?", str(root)),
    ))  # fmt: skip


def _rectangle(rng: random.Random) -> _Problem:
    short, longer = rng.randint(2, 9), rng.randint(1, 9)
    long = short + longer
    text = (f"A garden is {longer} metres longer than it is wide. Its fence is "
            f"{2 * (short + long)} metres long. What is its area in square metres?")  # fmt: skip
    return _Problem("Geometry", "Level 4", text, "perimeter and area", (
        ("Length and width together make half of the fence. How much is that?", str(short + long)),
        (f"They differ by {longer}. How wide is the garden?", str(short)),
        ("So what is width times length?", str(short * long)),
    ))  # fmt: skip


def _choices(rng: random.Random) -> _Problem:
    caps, scarves, gloves = (rng.randint(2, 7) for _ in range(3))
    text = (f"Mira owns {caps} caps, {scarves} scarves and {gloves} pairs of gloves. In how many "
            "ways can she wear one of each?")  # fmt: skip
    return _Problem("Counting & Probability", "Level 3", text, "counting by multiplying", (
        ("How many ways are there for cap and scarf alone?", str(caps * scarves)),
        ("And with the gloves?", str(caps * scarves * gloves)),
    ))  # fmt: skip


def _remainder(rng: random.Random) -> _Problem:
    by, rest, times = rng.randint(5, 12), rng.randint(1, 4), rng.randint(7, 60)
    number, add = by * times + rest, rng.randint(3, 30)
    text = f"What is the remainder when {number} + {add} is divided by {by}?"
    return _Problem("Number Theory", "Level 4", text, "remainders", (
        (f"What remains of {number} when it is divided by {by}?", str(rest)),
        (f"Add {add} to that and divide by {by}. What remains?", str((rest + add) % by)),
    ))  # fmt: skip


PROBLEMS: tuple[Callable[[random.Random], _Problem], ...] = (
    _prices, _equation, _rectangle, _choices, _remainder,
)  # fmt: skip
_OPENERS = {
    "lost": "I do not understand this problem at all. Where do I begin?",
    "start": "I understand the question but do not know how to start. Can you give me a hint?",
    "method": "Is this about {topic}? I am not sure which step comes first.",
}
STUCK = {
    "lost": "is lost and does not see what the problem asks",
    "start": "understands the question and does not know where to start",
    "method": "guesses the right method and doubts it",
}


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> Row:
    rng = random.Random(f"sim_math/{seed}/{i}")
    problem = PROBLEMS[i % len(PROBLEMS)](rng)
    voice, stuck, slips = rng.choice(VOICES), rng.choice(sorted(STUCK)), rng.random() < 0.5
    grade, who = rng.choice(GRADES), f"{rng.choice(FIRST_NAMES)} {rng.choice(FAMILIES)}"
    messages, replies = _lesson(problem, voice, stuck, slips)
    profile = [f"{who}, {grade}", f"This student {STUCK[stuck]}",
               f"{problem.topic.capitalize()}: partly understood", f"This student {voice.trait}",
               "Makes a slip in the first step" if slips else "Computes carefully"]  # fmt: skip
    packed = {
        "id": f"sm{seed}-{i}",
        "problem": problem.text,
        "correct_answer": problem.answer,
        "user_profile_text": "\n".join(f"- {line}" for line in profile),
        "human_user_queries": messages,
        "human_public_conversation": alternate(messages, replies),
        **_features(i, slips, stuck),
        "level": problem.level,
        "subject": problem.subject,
    }
    return {"raw": json.dumps(packed), "index": i}


def _lesson(
    problem: _Problem, voice: Voice, stuck: str, slips: bool
) -> tuple[list[str], list[str]]:
    """What the student says and what the tutor replies; the student thanks at the end."""
    messages = [voice.write(_OPENERS[stuck].format(topic=problem.topic))]
    replies = [f"Let us go step by step. {problem.steps[0][0]}"]
    for place, (_, right) in enumerate(problem.steps):
        if slips and place == 0:
            messages.append(voice.write(f"I think it is {int(right) + 1}."))
            replies.append(f"Not quite, look again. {problem.steps[0][0]}")
            messages.append(voice.write(f"Oh, I see my mistake. It is {right}."))
        else:
            messages.append(voice.write(f"I get {right}."))
        rest = problem.steps[place + 1 :]
        replies.append(f"Right. {rest[0][0]}" if rest else "Yes, that is the answer.")
    return [*messages, voice.write("Thanks, now I understand it.")], [*replies, "You are welcome."]


def _features(i: int, slips: bool, stuck: str) -> Row:
    """Target features: none, answered, or asked only with one entry that says nothing."""
    entries = (
        ("Message Length", "How long are the messages?", "One or two short sentences."),
        ("Error Handling", "What happens after a mistake?",
         "Sees it and corrects it." if slips else "No mistake occurs."),
        ("Seeking Guidance", "What does the first message ask for?",
         "A hint." if stuck == "start" else "A place to begin."),
    )  # fmt: skip
    if i % 3 == 0:
        return {}
    listed = [
        {"Feature Name": name, "Feature Question": question,
         **({"Feature Question Answer": answer} if i % 3 == 1 else {})}
        for name, question, answer in entries
    ]  # fmt: skip
    empty = [{"Feature Name": "Topic Coherence", "Feature Question": ""}] if i % 3 == 2 else []
    return {"target_interaction_style_features": [*listed, *empty]}
