"""How a customer talks, as numbers of one conversation, in four dimensions.

    D1 conversation    politeness, short messages (three words at most), dashes of careful writing,
                       bare acknowledgements, spread of length, repetition, falling out of the role
    D2 information     share of the words in the first two turns, ids per turn, words per turn,
                       words of the first turn
    D3 clarification   uncertainty, certainty, and one kind of question a turn at most: pushing
                       back before asking what is meant before asking for information
    D4 reaction        emotion, accusation, change of plan

Only what the customer says counts, without markup of tools and thinking. A rate is the share of
turns with a hit. Twelve features need word lists; those are not shipped, since scores depend on the
exact lists: a reader of features gets them from the user's copy (`people.py`), and without them
such a feature is None, never 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

Features = Mapping[str, float | None]
Lexicons = Mapping[str, re.Pattern[str]]
"""Feature → what is looked for in a turn in lower case."""

DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "D1_conv": ("politeness_rate", "short_msg_rate", "formality_rate", "ack_only_rate",
                "verbosity_cv", "repeat_rate", "id_confuse_rate"),
    "D2_info": ("info_frontload", "id_density", "user_words_per_turn", "opening_words"),
    "D3_clarif": ("uncertainty_rate", "certainty_rate", "pushback_q_rate", "clarify_q_rate",
                  "info_q_rate"),
    "D4_react": ("emotion_rate", "accusation_rate", "pivot_rate"),
}  # fmt: skip
QUESTIONS = ("pushback_q_rate", "clarify_q_rate", "info_q_rate")
"""A turn is of the first kind that it shows."""
RATES = ("politeness_rate", "uncertainty_rate", "certainty_rate", "emotion_rate",
         "accusation_rate", "pivot_rate")  # fmt: skip
LISTED = (*RATES, "ack_only_rate", "id_confuse_rate", "id_density", *QUESTIONS)
"""The features that need a word list."""
PERCENT = tuple(
    name for names in DIMENSIONS.values() for name in names
    if name not in ("verbosity_cv", "id_density", "user_words_per_turn", "opening_words")
)  # fmt: skip
"""The features that a row of means holds in percent."""

STOP = "###STOP###"
SHORT, REPEATS, PARROT = 3, 3, 10
_MARKUP = (("<|think|>", "<|/think|>"), ("<|tool|>", "<|/tool|>"), ("<function=", "</function>"))
_DASH = re.compile("[\u2013\u2014]")
_COMMANDS = ("\\tau ", "\\reward")
_TAGS = ("<|canvas|>", "<|highlight|>", "<|survey|>")


def talk_features(turns: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    """Every feature of what one customer said, turn by turn; empty for no turns."""
    if not turns:
        return {}
    plain = [without_markup(turn) for turn in turns]
    lowered = [turn.lower() for turn in plain]
    return {**_shape(plain), **_listed(lowered, lexicons)}


def _shape(plain: Sequence[str]) -> dict[str, float]:
    """What needs no list. Spread is the population's, over the mean."""
    words = [len(turn.split()) for turn in plain]
    mean = fmean(words)
    return {
        "short_msg_rate": fmean(n <= SHORT for n in words),
        "formality_rate": fmean(bool(_DASH.search(turn)) for turn in plain),
        "verbosity_cv": pstdev(words) / mean if mean else 0.0,
        "repeat_rate": float(_repeats(plain)),
        "info_frontload": sum(words[:2]) / sum(words) if mean else 0.0,
        "user_words_per_turn": mean,
        "opening_words": float(words[0]),
    }


def _repeats(plain: Sequence[str]) -> bool:
    """Whether any three words in a row stand there more than ten times."""
    counts: Counter[tuple[str, ...]] = Counter()
    for turn in plain:
        words = turn.lower().split()
        counts.update(zip(*(words[i:] for i in range(REPEATS)), strict=False))
    return any(n > PARROT for n in counts.values())


def _listed(lowered: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    def share(name: str, hit: Callable[[re.Pattern[str], str], bool]) -> float | None:
        pattern = lexicons.get(name)
        return None if pattern is None else fmean(hit(pattern, turn) for turn in lowered)

    rates = {name: share(name, _inside) for name in RATES}
    confused, ids = lexicons.get("id_confuse_rate"), lexicons.get("id_density")
    return {
        **rates,
        "ack_only_rate": share("ack_only_rate", lambda p, turn: bool(p.match(turn.strip()))),
        "id_confuse_rate": confused and float(any(confused.search(turn) for turn in lowered)),
        "id_density": ids and fmean(sum(1 for _ in ids.finditer(turn)) for turn in lowered),
        **_question_rates(lowered, lexicons),
    }  # fmt: skip


def _inside(pattern: re.Pattern[str], turn: str) -> bool:
    return pattern.search(turn) is not None


def _question_rates(lowered: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    """Shares of the kinds; each turn counts once, so that all of the lists are needed."""
    if any(name not in lexicons for name in QUESTIONS):
        return dict.fromkeys(QUESTIONS)
    kinds = Counter(
        next((name for name in QUESTIONS if lexicons[name].search(turn)), "") for turn in lowered
    )
    return {name: kinds[name] / len(lowered) for name in QUESTIONS}


# -- messages --------------------------------------------------------------------------------------


def without_markup(text: str) -> str:
    """The text without thinking and tool calls; a call without an end reaches to the end."""
    for start, end in _MARKUP:
        parts, rest = [], text
        while start in rest:
            before, _, inside = rest.partition(start)
            _, closed, after = inside.partition(end)
            if not closed and start != "<function=":
                break
            parts.append(before)
            rest = after
        text = "".join([*parts, rest])
    return text


def of_person(message: str) -> bool:
    """Whether a message of a recorded person belongs to the talk: no command of the study's."""
    if message.startswith(_COMMANDS) or message.strip() == "/stop":
        return False
    return not any(tag in message for tag in _TAGS)


def of_model(message: str) -> bool:
    """Whether a message of a simulated customer belongs to the talk: no bare stop mark."""
    return message.strip() != STOP
