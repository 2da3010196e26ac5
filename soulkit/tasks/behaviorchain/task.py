"""BehaviorChain: what a character does next; one row is one node of a chain of behaviours.

{"persona_name": "Ilka", "profile_text": "Ilka counts before she speaks.", "history_truncated":
[{"chapter_num": 1, "chapter_content": "..."}], "prior_chain": [{"context": "A knock.", "behavior":
"She counts to ten."}], "current_context": "A shout.", "options_dict": {"A": "...", "B": "..."},
"right_option_letter": "B"}

The behaviours before a node are always the right ones, regardless of a model's answers, so nodes
are independent questions; `summarise` joins them to chains. Generated rows have invented people
with a habit for each kind of moment. The profile states all habits but one, which a chapter shows.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from soulkit.data.literals import literal_list
from soulkit.errors import RowError
from soulkit.runs.records import drafts
from soulkit.tasks.kit.choice import LetteredTask, check_gold, opening, read_options, read_state
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Example, Record, Score

Chain = tuple[float, ...]
"""The scores of a chain's nodes, in order."""


class BehaviorChain(LetteredTask):
    question_column, letter_column = "current_context", "right_option_letter"
    hears_thinking = True

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        options = read_options(fields.get("options_dict"), fields.get("options"))
        letter = str(fields.get("right_option_letter") or "").strip().upper()
        if self.protocol == "paper":
            check_gold(letter, options)
        steps = _steps(fields.get("prior_chain"))
        written = _chain_text(steps) if steps else str(fields.get("prior_chain_text") or "")
        return {
            **fields,
            "persona_name": str(fields.get("persona_name") or "the persona"),
            "profile_text": _profile(fields.get("profile_text")),
            "history_text": _history(fields),
            "history_truncated": None,
            "prior_chain": None,
            "prior_chain_text": written,
            "options": options,
            "options_dict": None,
            "right_option_letter": letter or None,
            "node": _node(fields.get("node"), steps, written),
        }

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        first = opening(
            read_state(score),
            "The draft kept to who this person is; go on reading for habits.",
            "The draft is not what this person would do.",
        )
        advice = TEXTS["advice_later"] if example.fields["node"] else TEXTS["advice_first"]
        for text in (advice, "Read again how this person met such moments before."):
            yield f"{first} {text}".strip()

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Means over the chains of personas with every node played and scored.

        `longest_run` is the share of a chain in its longest run of right answers,
        `consecutive_accuracy` the sum of run lengths at all nodes divided by its maximum,
        `whole_chain` the share of chains without a mistake. Chains of a single node or with gaps
        are left out.
        """
        chains = whole_chains(drafts(records))
        if not chains:
            return {}
        return {
            "longest_run": _over(chains, lambda c: longest_run(c) / len(c)),
            "consecutive_accuracy": _over(chains, consecutive_accuracy),
            "whole_chain": _over(chains, lambda c: float(all(v == 1 for v in c))),
        }


# -- rows ----------------------------------------------------------------------------------------


def _profile(value: Any) -> str:
    """A profile as text; a mapping has one line per trait."""
    if isinstance(value, Mapping):
        traits = ((key, _flat(v)) for key, v in value.items())
        return "\n".join(f"{key}: {text}" for key, text in traits if text)
    return str(value or "").strip()


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_flat(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return "; ".join(_flat(item) for item in value if item is not None)
    return "" if value is None else str(value)


def _history(fields: Mapping[str, Any]) -> str:
    """The chapters before the chain, each with its number, or the given text."""
    chapters = literal_list(fields.get("history_truncated"))
    if chapters is None:
        history = fields.get("history_truncated")
        return str(history or fields.get("history_text") or "").strip()
    texts = [_chapter(c) for c in chapters if c is not None]
    return "\n\n".join(text for text in texts if text)


def _chapter(chapter: Any) -> str:
    if not isinstance(chapter, Mapping):
        return str(chapter).strip()
    number, text = chapter.get("chapter_num"), str(chapter.get("chapter_content") or "").strip()
    return text if number is None or not text else f"Chapter {number}\n{text}"


def _steps(value: Any) -> list[tuple[str, str]]:
    """The (context, behaviour) pairs of a chain; DataError if a step is not such a pair."""
    steps = literal_list(value)
    if steps is None:
        if isinstance(value, str) and value.strip():
            raise _unreadable_chain(value)
        return []
    for step in steps:
        if not isinstance(step, Mapping):
            raise _unreadable_chain(step)
    return [(str(s.get("context") or ""), str(s.get("behavior") or "")) for s in steps]


def _unreadable_chain(value: Any) -> RowError:
    what = "The chain of earlier behaviours is unreadable."
    return RowError(what, f"It holds {value!r:.60}, not a list of contexts with behaviours.")


def _chain_text(steps: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f"{i}. Situation: {context}\n   What happened then: {behaviour}"
        for i, (context, behaviour) in enumerate(steps, 1)
    )


def _node(number: int | None, steps: Sequence[tuple[str, str]], written: str) -> int:
    """The number of earlier behaviours, from the row or else counted."""
    if number is not None:
        return number
    if steps:
        return len(steps)
    return len(re.findall(r"^\s*(?:step\s+)?\d+\s*[.:)]", written, re.IGNORECASE | re.MULTILINE))


# -- chains --------------------------------------------------------------------------------------


def whole_chains(records: Sequence[Record]) -> list[Chain | None]:
    """The scores by node for each play of a persona whose chain has no gap.

    A node that was asked twice counts with its lower score. A chain with an unscored node is None.
    """
    plays: dict[tuple[Any, ...], dict[int, float | None]] = defaultdict(dict)
    for record in records:
        if "node" not in record.tags:
            continue
        chain = plays[record.cluster, record.kind, record.step, record.rollout]
        node, value = int(record.tags["node"]), record.score.value
        worst = chain.get(node, value)
        chain[node] = None if value is None or worst is None else min(value, worst)
    chains = [nodes for nodes in plays.values() if len(nodes) > 1]
    return [_in_order(c) for c in chains if max(c) - min(c) + 1 == len(c)]


def _in_order(nodes: Mapping[int, float | None]) -> Chain | None:
    values = [nodes[number] for number in sorted(nodes)]
    scored = tuple(value for value in values if value is not None)
    return scored if len(scored) == len(values) else None


def _over(chains: Sequence[Chain | None], measure: Callable[[Chain], float]) -> BatchMetric:
    return mean_of([None if chain is None else measure(chain) for chain in chains], "chains")


def runs(chain: Chain) -> list[int]:
    """For each node, the number of consecutive right answers that end there (0 at a wrong one)."""
    lengths: list[int] = []
    for value in chain:
        lengths.append((lengths[-1] if lengths else 0) + 1 if value == 1 else 0)
    return lengths


def longest_run(chain: Chain) -> int:
    """The maximum number of consecutive right answers."""
    return max(runs(chain), default=0)


def consecutive_accuracy(chain: Chain) -> float:
    """The sum of run lengths divided by that of a perfect chain, n(n+1)/2; in [0, 1].

    Raises ValueError for an empty chain.
    """
    if not chain:
        raise ValueError("a chain without nodes has no accuracy")
    return sum(runs(chain)) / (len(chain) * (len(chain) + 1) / 2)


NODES = 5
"""Rows per chain."""


TEXTS = Texts(__file__)

_LAST = ("Brandt", "Okoye", "Lindqvist", "Marchetti", "Varga", "Halloran", "Sato", "Delacroix")
_TRADES = ("bridge builder", "clockmaker", "ferry captain", "beekeeper", "organist", "bookbinder")
_TOWNS = ("Halmstead", "Port Verity", "Ostrava Mill", "Lower Finch", "Saint Orlen")

Way = tuple[str, str]
"""A behaviour: as a habit in a profile, and as it looks in one moment."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> dict[str, Any]:
    chain, node = divmod(i, NODES)
    rng = random.Random(f"behaviorchain/{seed}/{chain}")
    name = f"{rng.choice(TEXTS['first'])} {rng.choice(_LAST)}"
    every = TEXTS["habits"]
    habits = {kind: rng.choice(habit["ways"]) for kind, habit in every.items()}
    kinds = rng.sample(list(every), NODES)
    shown = rng.choice(kinds)
    picks = {kind: rng.randrange(2) for kind in every}
    steps = [
        {"context": _scene(kind, picks[kind], name), "behavior": f"{name} {habits[kind][1]}."}
        for kind in kinds
    ]
    ways = list(every[kinds[node]]["ways"])
    random.Random(f"behaviorchain/{seed}/{i}/order").shuffle(ways)
    return {
        "persona_name": name,
        "profile_text": _made_profile(rng, name, habits, shown),
        "history_truncated": _made_history(name, shown, 1 - picks[shown], habits[shown][0]),
        "prior_chain": steps[:node],
        "current_context": steps[node]["context"],
        "options_dict": {"ABCD"[k]: f"{name} {act}." for k, (_, act) in enumerate(ways)},
        "right_option_letter": "ABCD"[ways.index(habits[kinds[node]])],
        "index": i,
    }


def _scene(kind: str, pick: int, name: str) -> str:
    moment: str = TEXTS["habits"][kind]["moments"][pick]
    return moment.format(name=name)


def _made_profile(rng: random.Random, name: str, habits: dict[str, Way], shown: str) -> str:
    """A profile: trade, town, and every habit except the one that a chapter shows."""
    kinds = [kind for kind in habits if kind != shown]
    rng.shuffle(kinds)
    first = f"{name} is a {rng.choice(_TRADES)} from {rng.choice(_TOWNS)}."
    named = {kind: habit["named"] for kind, habit in TEXTS["habits"].items()}
    return " ".join([first, *(f"{named[k]}, {name} {habits[k][0]}." for k in kinds)])


def _made_history(name: str, shown: str, pick: int, way: str) -> list[dict[str, Any]]:
    first = f"It is the first winter of {name} in the new house."
    second = f"{_scene(shown, pick, name)} {name} {way}. Those who know {name} are not surprised."
    return [
        {"chapter_num": number, "chapter_content": text}
        for number, text in enumerate((first, second), 1)
    ]
