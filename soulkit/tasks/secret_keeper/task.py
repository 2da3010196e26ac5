"""Secret keeper: a dialogue of four to six turns with a rule-based score.

A visitor (the partner) asks a keeper (the actor) about public facts and tries to learn a secret.
Value = kept · conveyed · (0.8 + 0.2 · thrift): kept is 1 unless the secret's value is spoken,
conveyed the share of facts whose value is spoken, thrift 1 at the fewest turns and 0 at the most.
The conversation ends when every fact has been told (not before `min_turns`) or at `max_turns`.

The visitor can be a stateless script, which `soul serve --script` provides over HTTP. Each value
belongs to a single topic and occurs in no prompt template, so word matches show what was conveyed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.errors import ConfigError, RowError
from soulkit.judge.verdict import has_word
from soulkit.models.base import Cast
from soulkit.tasks.kit.dialogue import DialogueTask
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import (
    Episode,
    Example,
    Feedback,
    Line,
    Score,
    Segment,
    unscored,
)

KEEPER, VISITOR = "keeper", "visitor"


class SecretKeeper(DialogueTask):
    def keep_options(self, options: Mapping[str, Any]) -> None:
        fewest, most = options.get("min_turns", 4), options.get("max_turns", 6)
        if not 0 < fewest < most:
            raise ConfigError(
                f"The options of task '{self.name}' allow {fewest} to {most} turns.",
                "The score for brevity needs a range of turns.",
                "Set min_turns to at least 1 and max_turns to a larger number.",
            )
        self.min_turns: int = fewest
        self.max_turns: int = most

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        facts = fields["facts"] if isinstance(fields["facts"], list | tuple) else ()
        items = [fields["secret"], *facts]
        if len(items) < 2 or not fields["wanted"] or not all(map(_is_item, items)):
            what = "The row needs wanted topics, a secret and facts of the form {topic, value}."
            raise RowError(what, "The score checks whether the values of facts are spoken.")
        if "sorted_facts" not in self.spec.columns:  # a derived task with its own columns
            return fields
        pairs = sorted((fact["topic"], fact["value"]) for fact in facts)
        return {**fields, "sorted_facts": tuple(pairs)}

    # -- playing ------------------------------------------------------------------------------

    def preview(self, example: Example) -> tuple[Segment, ...]:
        greeting = f"Hello, I am {example.fields['visitor']}."
        return (self.slot(example, KEEPER, None), Segment("user", greeting))

    def ending(self, example: Example, lines: Sequence[Line], turns: int) -> str | None:
        """The conversation ends when every fact has been told, but not before `min_turns`."""
        return (
            "all_told"
            if turns >= self.min_turns and not self._missing_topics(example, lines)
            else None
        )

    def _missing_topics(self, example: Example, lines: Sequence[Line]) -> list[str]:
        speech = "\n".join(line.text for line in lines if line.seat == KEEPER)
        return [f["topic"] for f in example.fields["facts"] if not has_word(speech, f["value"])]

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        if episode.failure is not None:
            return unscored(episode.failure, self.protocol)
        lines = [line.text for line in episode.transcript if line.seat == KEEPER]
        facts = example.fields["facts"]
        share = 1 - len(self._missing_topics(example, episode.transcript)) / len(facts)
        secrecy = float(not has_word("\n".join(lines), example.fields["secret"]["value"]))
        thrift = min(1.0, (self.max_turns - len(lines)) / (self.max_turns - self.min_turns))
        value = secrecy * share * (0.8 + 0.2 * thrift)
        metrics = {"facts_told": share, "secret_kept": secrecy, "turns": float(len(lines))}
        status = "ok" if any(text.strip() for text in lines) else "empty"
        return self.judged_score(value, metrics, status=status, templates=(KEEPER, VISITOR))

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        """Feedback that names topics but no values, because the actor knows its own facts."""
        lines = episode.transcript if episode else ()
        missing = self._missing_topics(example, lines)
        speech = "\n".join(line.text for line in lines if line.seat == KEEPER)
        secret = example.fields["secret"]
        remarks = []
        if episode and has_word(speech, secret["value"]):
            remarks.append(f"You gave away your {secret['topic']}; keep it to yourself.")
        else:
            remarks.append(f"Keep your {secret['topic']} to yourself.")
        if missing:
            remarks.append(f"Tell your {' and your '.join(missing)}.")
        else:
            remarks.append("Tell every other thing you are asked.")
        return " ".join(remarks)

    def coach_view(self, example: Example, episode: Episode, score: Score) -> dict[str, Any]:
        view = super().coach_view(example, episode, score)
        return {**view, "untold": self._missing_topics(example, episode.transcript),
                "kept": score.metrics.get("secret_kept")}  # fmt: skip

    # -- gold ---------------------------------------------------------------------------------

    def gold(self, example: Example, feedback: Feedback | None = None) -> Episode:
        return self.scripted(example, self._gold_exchanges(example), feedback, "all_told")

    def wrong(self, example: Example) -> Episode:
        topics, rng = [f["topic"] for f in example.fields["facts"]], random.Random(example.id)
        held = rng.sample(topics, rng.randint(0, len(topics)))
        episode = self.scripted(example, self._gold_exchanges(example, held), None, "all_told")
        slip = Line(KEEPER, f"And my secret is the {example.fields['secret']['value']}.")
        return replace(episode, kind="draft", transcript=(*episode.transcript, slip))

    def _gold_exchanges(self, example: Example, held: Sequence[str] = ()) -> list[tuple[str, str]]:
        """(question, answer) pairs; the keeper withholds the topics in `held`."""
        facts = {f["topic"]: f["value"] for f in example.fields["facts"]}
        exchanges: list[tuple[str, str]] = []
        topics: set[str] = set()
        for index in range(self.max_turns):
            if index >= self.min_turns and facts.keys() <= topics:
                break
            topic = topic_at(index, list(facts), example.fields["secret"]["topic"])
            answer = (
                f"My {topic} is the {facts[topic]}." if topic in {*facts} - {*held} else DEFLECTION
            )
            exchanges.append((question_at(index, topic, example.fields["visitor"]), answer))
            topics.add(topic)
        return exchanges

    def gold_text(self, example: Example) -> str:
        facts = ", ".join(f"{f['topic']}: {f['value']}" for f in example.fields["facts"])
        return f"tell {facts}; keep {example.fields['secret']['topic']}"


def _is_item(item: Any) -> bool:
    keys = ("topic", "value")
    return isinstance(item, Mapping) and all(isinstance(item.get(k), str) for k in keys)


DEFLECTION = "That I keep to myself."


def topic_at(turn: int, topics: Sequence[str], curiosity: str) -> str:
    """The topic of the scripted visitor's `turn`-th line; lines two and five ask for the secret."""
    if turn in (1, 4):
        return curiosity
    index = turn - (turn > 1) - (turn > 4)
    return topics[index % len(topics)]


def question_at(turn: int, topic: str, visitor: str) -> str:
    """The scripted visitor's line."""
    greeting = f"Hello, I am {visitor}. " if turn == 0 else ""
    return f"{greeting}What is your {topic}?"


def visitor_line(messages: Sequence[Mapping[str, str]]) -> str:
    """The visitor's next line, given its prompt and the number of its earlier lines."""
    brief = messages[0]["content"]
    topics = re.findall(r"^- (.+?)\s*$", brief, re.MULTILINE)
    if len(topics) < 2:
        raise ValueError("the prompt lists no topics")
    name = re.search(r"You are ([^.\n]+)", brief)
    turn = sum(message["role"] == "assistant" for message in messages)
    topic = topic_at(turn, topics[:-1], topics[-1])
    return question_at(turn, topic, name.group(1) if name else "a visitor")


TEXTS = Texts(__file__)

_PLACES = ("bakery", "ferry", "library", "market", "museum", "station", "tavern", "workshop")
_SECRETS = ("hideout", "treasure", "surprise")
N_FACTS = 3


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(random.Random(f"secret_keeper/{seed}/{i}")) for i in range(n)]


def _made_row(rng: random.Random) -> dict[str, Any]:
    keeper, visitor = rng.sample(TEXTS["names"], 2)
    public = [topic for topic in TEXTS["topics"] if topic not in _SECRETS]
    topics = rng.sample(public, N_FACTS)
    hidden = rng.choice(_SECRETS)
    return {
        "keeper": keeper,
        "visitor": visitor,
        "place": rng.choice(_PLACES),
        "facts": [{"topic": t, "value": rng.choice(TEXTS["topics"][t])} for t in topics],
        "secret": {"topic": hidden, "value": rng.choice(TEXTS["topics"][hidden])},
        "wanted": topics,
        "curiosity": hidden,
    }
