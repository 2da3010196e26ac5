"""HumanLLM: which of twenty items will this person buy next? Five letters, most likely first.

{"prompt_text": "A ferryman who reads at night. History 1: clip-on lamp, History 2: wool cap.
Candidate 1: sea stories Candidate 2: ...", "candidates": ["sea stories", "garden rake", ...],
"answer_index": 0}

Candidates are shown once, with the letters for the answer. The bought item earns 1/rank among the
five: random picks of 20 earn 0.114. `reference` plays any list of candidates and accepts only one
exact form of answer. Generated customers pursue one interest; exactly one of the candidates belongs
to it and was not bought before.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.literals import first_message, item_text
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken, tagged_text
from soulkit.tasks.kit.choice import UNREAD_OPENINGS, ChoiceTask, read_state
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.kit.made_rows import Row, rows_by_index
from soulkit.tasks.kit.prompting import Texts, keep_latest
from soulkit.types import Episode, Example, Score

_LETTERS = "ABCDEFGHIJKLMNOPQRST"
N_RANKED = 5
_ASKED = re.compile(r"[A-T](?:,[A-T]){4}")
_ITEM = re.compile(r"(?:\d{1,2}[.)]\s*)?[(\[]?([A-Ta-t])(?:[.:)\]]+(?:\s.*)?)?")
_ENTRY = re.compile(r"History\s*\d+\s*:")
_LIST = re.compile(r"Candidate\s*1\s*:")
_QUESTION = "What will this person buy next?"


class HumanLLM(ChoiceTask):
    """The answer is five distinct letters in the answer tag, separated by commas."""

    # -- rows ---------------------------------------------------------------------------------

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        text = _text(fields)
        candidates = tuple(item_text(item, "candidates") for item in fields["candidates"])
        _check_gold(candidates, fields["answer_index"])
        self.check(candidates)
        persona, history = split_history(_LIST.split(text, maxsplit=1)[0])
        return {
            **fields,
            "prompt_text": text,
            "conversations": None,
            "persona": persona,
            "history": tuple(history),
            "candidates": candidates,
        }

    def check(self, candidates: Sequence[str]) -> None:
        """DataError for candidates that cannot all be shown and ranked."""
        if not all(candidates):
            what = f"The row's candidate {candidates.index('') + 1} is blank."
            raise RowError(what, "A blank candidate cannot be shown or bought.")
        if not N_RANKED <= len(candidates) <= len(_LETTERS):
            raise RowError(
                f"The row has {len(candidates)} candidates.",
                f"A row needs {N_RANKED} to {len(_LETTERS)} of them, for the letters A to T.",
            )

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        entries = len(fields["history"])
        length = (
            "none" if not entries else "1-5" if entries <= 5 else "6-15" if entries <= 15 else "16+"
        )
        return {**super().tags(fields), "history": length}

    def within_budget(self, view: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        fitted, cuts = super().within_budget(view)
        if "history" in view:
            budget = self.spec.columns["history"].max_words
            fitted["history"], cut = keep_latest(view["history"], budget)
            cuts.update({"history": cut} if cut else {})
        return {**fitted, "letters": _LETTERS}, cuts

    # -- answers ------------------------------------------------------------------------------

    def parse(self, text: str) -> tuple[str, str]:
        inside = tagged_text(text, "paper")
        if inside is None:
            return "", "no_tag"
        if _ASKED.fullmatch(inside) and is_ranking(inside):
            return inside, "ok"
        letters = ",".join(_letters(inside))
        return (letters, "salvaged") if is_ranking(letters) else ("", "malformed")

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """`parse`; letters beyond the row's candidates are malformed."""
        answer, status = self.parse(text)
        return (
            (answer, status) if not answer or self.ranking(example, answer) else ("", "malformed")
        )

    def ranking(self, example: Example, answer: str) -> tuple[int, ...]:
        """The candidates that an answer names, as indices from 0 into the row's list, most likely
        first; () if none.
        """
        places = tuple(_LETTERS.index(letter) for letter in answer.split(",") if letter)
        return places if all(p < len(example.fields["candidates"]) for p in places) else ()

    def rank(self, example: Example, answer: str) -> int | None:
        """The rank of the bought item among the five, from 1; None if it is not among them."""
        places = self.ranking(example, answer)
        gold = example.fields["answer_index"]
        return places.index(gold) + 1 if gold in places else None

    def grade(self, example: Example, answer: str) -> float:
        rank = self.rank(example, answer)
        return 1 / rank if rank else 0.0

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        rank = self.rank(example, answer)
        return {"hit@5": float(rank is not None), "top1_acc": float(rank == 1)}

    def gold_text(self, example: Example) -> str:
        return str(example.fields["candidates"][example.fields["answer_index"]])

    def gold_completion(self, example: Example) -> str:
        gold = example.fields["answer_index"]
        return self._answer([gold, *self._others(example)][:N_RANKED])

    def wrong_completion(self, example: Example) -> str | None:
        others = self._others(example)[:N_RANKED]
        return self._answer(others) if len(others) == N_RANKED else None

    def _others(self, example: Example) -> list[int]:
        """All indices except the gold's, starting after it."""
        count, gold = len(example.fields["candidates"]), example.fields["answer_index"]
        return [(gold + step) % count for step in range(1, count)]

    def _answer(self, places: Sequence[int]) -> str:
        return f"<answer>{','.join(_LETTERS[place] for place in places)}</answer>"

    def leak_view(self, example: Example) -> LeakView:
        candidates = example.fields["candidates"]
        return LeakView(_QUESTION, candidates, self.gold_text(example), tuple(_LETTERS))

    # -- feedback -----------------------------------------------------------------------------

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        state = read_state(score)
        begun = "" if score is None else _UNREAD.get(state) or self._on_rank(example, score)
        many = len(example.fields["history"]) > 1
        entries = TEXTS["many_entries" if many else "few_entries"]
        return first_safe_lesson(
            ((begun, entries, TEXTS["form"]), (begun, entries), (begun,)), self.leak_view(example)
        )

    def _on_rank(self, example: Example, score: Score) -> str:
        rank = self.rank(example, score.words)
        if rank == 1:
            return "The draft put the thing that was bought at its head; rank by the same reasons."
        if rank:
            return "The thing that was bought is among the five of the draft, but not at its head."
        return "None of the five in the draft was bought."

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        return self.within_budget(super().coach_view(example, episode, score))[0]


_UNREAD = {
    **UNREAD_OPENINGS,
    "malformed": "The draft did not put five different letters between the answer tags.",
    "no_tag": "The draft never put its ranking between the answer tags.",
}


def _check_gold(candidates: Sequence[str], index: int) -> None:
    if not 0 <= index < len(candidates):
        what = f"The row's answer_index {index} is outside its {len(candidates)} candidates."
        raise RowError(what, "It is an index into the list of candidates, counted from 0.")


def _text(fields: Mapping[str, Any]) -> str:
    text = str(fields.get("prompt_text") or "")
    if not text.strip():
        text = first_message(fields.get("conversations")) or ""
    if not text.strip():
        why = "It is read from 'prompt_text' or from the first message of 'conversations'."
        raise RowError("The row has no prompt.", why)
    return text


def split_history(text: str) -> tuple[str, list[str]]:
    """The text before the first `History n:`, and the entries without trailing separators."""
    intro, *entries = _ENTRY.split(text)
    return intro.strip(), [entry.strip().rstrip(",;").rstrip() for entry in entries]


def _letters(inside: str) -> list[str]:
    """The letters in a list, [] if any part of it is not a letter."""
    plain = unicodedata.normalize("NFKC", inside).strip("*`\"'[]() \n")
    parts = [p for p in (part.strip("*`\"' ") for part in re.split(r"[,;>\n]+", plain)) if p]
    items = [_ITEM.fullmatch(part) for part in (parts if len(parts) > 1 else plain.split())]
    return [item.group(1).upper() for item in items if item] if all(items) else []


def is_ranking(answer: str) -> bool:
    """Whether an answer is five different letters."""
    letters = answer.split(",")
    return len(letters) == N_RANKED == len(set(letters))


_TAGGED = re.compile(r"<answer>([A-T](?:,[A-T]){4})</answer>")


class HumanLLMReference(HumanLLM):
    def check(self, candidates: Sequence[str]) -> None:
        """Accept blank candidates and any number of candidates."""

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        if match is None:
            return "", "no_tag"
        return (match.group(1), "ok") if is_ranking(match.group(1)) else ("", "malformed")


TEXTS = Texts(__file__)

EVERYDAY = ("soap", "batteries", "light bulbs", "toothpaste", "tea towels", "umbrella", "candles")
_JOBS = ("baker", "bus driver", "dentist", "florist", "plumber", "teacher", "translator", "welder")
_PLACES = ("by a lake", "in a small flat", "at the edge of town", "near the station", "on a farm",
          "with two cats", "with a large family")  # fmt: skip


def _made_row(rng: random.Random, index: int) -> Row:
    pursuit, *others = rng.sample(sorted(TEXTS["pursuits"]), len(TEXTS["pursuits"]))
    bought = rng.sample(TEXTS["pursuits"][pursuit], rng.randint(4, 6))
    gold = rng.choice([thing for thing in TEXTS["pursuits"][pursuit] if thing not in bought])
    history = [*bought, *rng.sample(EVERYDAY, rng.randint(1, 2))]
    rng.shuffle(history)
    candidates = [gold, *(rng.choice(TEXTS["pursuits"][other]) for other in others)]
    rng.shuffle(candidates)
    place = candidates.index(gold)
    return {
        "prompt_text": _made_text(rng, history, candidates),
        "candidates": candidates,
        "answer_index": place,
        "answer_letter": _LETTERS[place],
        "answer_text": gold,
        "index": index,
    }


rows = rows_by_index("humanllm", _made_row)


def _made_text(rng: random.Random, history: list[str], candidates: list[str]) -> str:
    person = f"A {rng.choice(_JOBS)} of {rng.randint(19, 74)} who lives {rng.choice(_PLACES)}."
    past = ", ".join(f"History {i}: {thing}" for i, thing in enumerate(history, 1))
    offer = " ".join(f"Candidate {i}: {thing}" for i, thing in enumerate(candidates, 1))
    return f"{person} {past}\n{offer}\nWhich of these is bought next?"
