"""How close a model's turns are to people's: numbers on conversations whose answer is known."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from soulkit.errors import ConfigError, DataError
from soulkit.people.classifiers import word_wins
from soulkit.people.closeness import Closeness, Population, distance_beyond
from soulkit.people.continuations import END_QUESTION, Continuations, measure_closeness, models_of
from soulkit.people.texts import LINES, Vocabulary, turn_features, words_of
from soulkit.people.turns import PersonTurn, read_turns

THINGS = ["kettle", "bicycle", "radio", "tent", "piano", "lamp", "boat", "oven", "drone", "clock"]
HABITS = ["hey", "um hello", "ok so", "Hi!", "yo", "good day,"]


def chats(persons: int = 12, seed: int = 0) -> list[dict[str, object]]:
    """Three conversations a person; a later turn is about what the assistant has just said."""
    rng, rows = random.Random(seed), []
    for n in range(persons):
        for _ in range(3):
            hello, (a, b, c) = HABITS[n % len(HABITS)], rng.sample(THINGS, 3)
            texts = [
                f"{hello} my {a} is broke{'n' * (n % 2)}, what now{'?' * rng.randrange(2)}",
                f"Is the {a} near the {b}? Put the {a} on the {b}.",
                f"the {a} is on the {b} already {'lol' * (n % 3)}",
                f"Then the {c} must go first. Where is the {c}?",
                f"no idea where the {c} is, thanks{'!' * (n % 2)}",
            ][: rng.choice([3, 5])]
            roles = ["user", "assistant"] * 3
            messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
            rows.append({"person": f"p{n}", "messages": messages})
    return rows


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
    return file


@pytest.fixture
def turns(data: Path) -> list[PersonTurn]:
    return read_turns(data)


def own_ends(turns: list[PersonTurn]) -> list[float]:
    return [float(turn.is_last) for turn in turns]


def values(turn: PersonTurn, text: str) -> dict[str, float]:
    row = turn_features([turn], [text], [0.0], Vocabulary([turn]))[0]
    return dict(zip(LINES, row.tolist(), strict=True))


# -- features --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ("words", "don't stop", np.log2(3)),
        ("words", "你好吗", 2.0),  # three signs, no spaces
        ("question", "wirklich？", 1.0),
        ("question", "really.", 0.0),
        ("correction", "*kettle", 1.0),
        ("correction", "i mean the radio", 1.0),
        ("correction", "no", 0.0),  # an answer
        ("capital", "“Yes", 1.0),
        ("capital", "yes", 0.0),
        ("capital", "你好", np.nan),  # a script without capitals
        ("stop", 'he said "no."', 1.0),
        ("stop", "right？", 0.0),
        ("echo", "the kettle", np.nan),  # an opening replies to nothing
        ("odd_words", "my kettel is broke", 0.25),
        ("variety", "no no no no", 0.25),
    ],
)
def test_features_of_a_turn(
    line: str, text: str, value: float, turns: list[PersonTurn]
) -> None:  # fmt: skip
    opening = turns[0]
    vocabulary = Vocabulary(
        [*turns, PersonTurn("x", "y", "", 0, 1, (), "my kettle is broke don't stop")]
    )
    row = turn_features([opening], [text], [0.0], vocabulary)[0]
    assert row[list(LINES).index(line)] == pytest.approx(value, nan_ok=True)


def test_words_that_were_said_before_are_not_odd(turns: list[PersonTurn]) -> None:
    later = turns[1]
    word = words_of(later.context[-1].text)[2]
    assert values(later, f"{word} qwertzuiop")["odd_words"] == 0.5


def test_the_share_of_the_opening_needs_every_turn(turns: list[PersonTurn]) -> None:
    first = next(n for n, turn in enumerate(turns) if turn.turns == 3)
    whole, place = turns[first : first + 3], list(LINES).index("opening_share")
    texts: list[str | None] = ["one two", "three", "four"]
    vocabulary = Vocabulary(turns)
    assert turn_features(whole, texts, [0.0] * 3, vocabulary)[0, place] == 0.5
    assert np.isnan(turn_features(whole, [*texts[:2], None], [0.0] * 3, vocabulary)[:, place]).all()
    assert np.isnan(turn_features(whole[:2], texts[:2], [0.0] * 2, vocabulary)[:, place]).all()


# -- numbers ---------------------------------------------------------------------------------------


def test_people_are_as_close_to_themselves_as_can_be(turns: list[PersonTurn]) -> None:
    people = Population(turns)
    result = Closeness(people, people.texts, own_ends(turns)).report()
    assert result["ratios"] == {"distance": 0.0, "words": 0.0, "context": 0.0}
    assert all(line["difference"] in (0.0, None) for line in result["lines"])
    assert result["context"]["elsewhere"] > 0.8  # it sees what belongs together


def test_a_bland_line_is_far_from_people(turns: list[PersonTurn]) -> None:
    people = Population(turns)
    bland = Closeness(people, ["Could you please help me?"] * len(turns), [0.0] * len(turns))
    result = bland.report()
    assert result["words"]["auc"] == 1.0 and result["words"]["p"] < 0.01
    assert result["headline"]["value"] == max(result["ratios"].values()) > 2
    lines = {line["name"]: line for line in result["lines"]}
    assert lines["ends"]["high"] < 0 < lines["question"]["low"]
    assert lines["question"]["persons"] == 12 and lines["question"]["turns"] == len(turns)
    itself = distance_beyond(bland, Closeness(people, people.texts, own_ends(turns)))
    assert itself["headline"]["low"] > 0 and itself["distance"]["difference"] > 0


def test_turns_at_wrong_places_are_seen_by_the_context_alone(turns: list[PersonTurn]) -> None:
    people = Population(turns)
    moved = list(people.texts)
    for place in (1, 2):  # each text goes to another person
        here = [n for n, turn in enumerate(turns) if turn.place == place]
        for n, m in zip(here, [*here[len(here) // 2 :], *here[: len(here) // 2]], strict=True):
            moved[n] = people.texts[m]
    result = Closeness(people, moved, own_ends(turns)).report()
    assert result["context"]["low"] > 0.5
    assert result["words"]["auc"] < 0.65


def test_a_text_of_both_sides_is_not_recognised() -> None:
    """With each text once on either side, a classifier that has seen them gets far below .5."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh ", k=30)) for _ in range(200)]
    won = word_wins(texts, rng.sample(texts, 200), np.arange(200) % 5)
    assert 0.4 < won.mean() < 0.6


def test_a_missing_reply_is_left_out_on_both_sides(turns: list[PersonTurn]) -> None:
    people = Population(turns)
    texts: list[str | None] = [None, *people.texts[1:]]
    result = Closeness(people, texts, own_ends(turns)).report()
    assert result["ratios"]["distance"] == 0.0
    assert result["lines"][0]["turns"] == len(turns) - 1


def test_halves_are_drawn_within_each_kind(turns: list[PersonTurn]) -> None:
    mixed = [
        PersonTurn(t.person, t.chat, "a" if int(t.person[1:]) < 4 else "b", t.place, t.turns,
                   t.context, t.text)
        for t in turns
    ]  # fmt: skip
    halves = Population(mixed).parts(50)
    assert set(halves[:, :4].sum(axis=1)) == {2} and set(halves[:, 4:].sum(axis=1)) == {4}


def test_one_person_is_too_few(turns: list[PersonTurn]) -> None:
    with pytest.raises(DataError, match="fewer than 4 persons"):
        Population([turn for turn in turns if turn.person == "p1"])


# -- plays -----------------------------------------------------------------------------------------


def script(folder: Path, *rules: str) -> str:
    file = folder / "script.yaml"
    file.write_text("\n".join(["replies: ['ok then']", "rules:", *rules, ""]), encoding="utf-8")
    return f"scripted:{file}"


def test_a_scripted_model_is_measured_and_resumed(data: Path, tmp_path: Path) -> None:
    model = script(tmp_path, "- {purpose: ends, say: ' end.'}")
    result = measure_closeness(
        model, str(data), target=tmp_path / "out", limit=10, flags={"max_tokens": 9}
    )
    assert result == json.loads((tmp_path / "out" / "closeness.json").read_text(encoding="utf-8"))
    (entry,) = result["models"]
    assert result["persons"] == 4 and result["conversations"] == 10
    assert entry["likelihood"] is None and entry["no_reply"] == 0
    assert {line["name"]: line["model"] for line in entry["lines"]}["ends"] == 1.0
    again = measure_closeness(
        model, str(data), target=tmp_path / "out", limit=10, flags={"max_tokens": 9}
    )
    assert again == result


def test_what_the_model_reads_at_a_turn(turns: list[PersonTurn], tmp_path: Path) -> None:
    (config,) = models_of(script(tmp_path, "- {when: x, say: y}"), {})
    questions = Continuations(config, turns, system="You are Ann.")
    context = questions.context(turns[1])
    assert [part.text for part in context[-2:]] == [turns[0].text, turns[1].context[-1].text]
    assert context[0].text == "You are Ann." and context[1:] == list(turns[1].context)
    assert [part.text for part in questions.context(turns[1], "ends")[-2:]] == [
        turns[1].text,
        END_QUESTION,
    ]


def test_only_a_run_has_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a training run"):
        models_of(str(tmp_path), {}, checkpoints=True)
