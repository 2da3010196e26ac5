"""From episodes to rows: every reply once, in the context that it had, with its exact ids."""

from __future__ import annotations

from soulkit.distill.experts import Expert
from soulkit.distill.lessons import lesson_conversations, lesson_lines
from soulkit.types import Completion, Episode, Record, Score, Segment, Trace, Turn

RULES, HELLO = Segment("system", "Be brief."), Segment("user", "Hello.")


def reply(text: str, *ids: int) -> Segment:
    return Segment("assistant", text, token_ids=ids)


def turn(text: str, *context: Segment, ids: tuple[int, ...] = ()) -> Turn:
    return Turn(context, Completion(text=text, token_ids=ids))


def shape(trace: Trace) -> list[list[tuple[str, bool]]]:
    return [[(m.segment.text, m.trained) for m in part] for part in lesson_conversations(trace)]


def test_a_dialogue_is_one_conversation() -> None:
    second = (RULES, HELLO, reply("Hi.", 5, 2), Segment("user", "Well?"))
    trace = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *second, ids=(6, 2))))
    assert shape(trace) == [
        [("Be brief.", False), ("Hello.", False), ("Hi.", True), ("Well?", False), ("Yes.", True)]
    ]


def test_another_context_begins_another_conversation() -> None:
    other = (Segment("system", "A memory."), HELLO, reply("Hi.", 5, 2), Segment("user", "Well?"))
    trace = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *other, ids=(6, 2))))
    first, second = shape(trace)
    assert first[-1] == ("Hi.", True) and len(first) == 3
    assert second[2] == ("Hi.", False) and second[-1] == ("Yes.", True)
    # The same words with other ids are other words.
    again = (RULES, HELLO, reply("Hi.", 7, 2), Segment("user", "Well?"))
    apart = Trace("a", (turn("Hi.", RULES, HELLO, ids=(5, 2)), turn("Yes.", *again, ids=(6, 2))))
    assert len(lesson_conversations(apart)) == 2
    assert sum(m.trained for part in lesson_conversations(apart) for m in part) == 2


def test_rows_of_every_seat_without_feedback() -> None:
    slot = Segment("user", "Hello. Hint: tea.", bare="Hello. ")
    traces = (
        Trace("a", (turn("Hi.", RULES, slot, ids=(5, 2)),)),
        Trace("b", (turn("Ho.", RULES, reply("Ha."), HELLO),)),
    )
    episode = Episode(example_id="x", task="t", rollout=3, traces=traces)
    record = Record(
        key="0/x/3/draft", task="t", example_id="x", rollout=3, kind="draft", episode=episode,
        score=Score(value=0.5, reward=0.75),
    )  # fmt: skip
    expert = Expert(task="t", tokenizer_print="abc", weights="w1")
    first, second = lesson_lines(record, expert)
    assert first == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello. "},
            {"role": "assistant", "content": "Hi.", "token_ids": [5, 2]},
        ],
        "data_source": "t", "tokenizer": "abc", "task": "t", "example_id": "x", "rollout": 3,
        "seat": "a", "value": 0.5, "reward": 0.75, "expert": "w1",
    }  # fmt: skip
    assert second["seat"] == "b" and "tokenizer" not in second
    assert second["messages"][1] == {"role": "assistant", "content": "Ha.", "trained": False}
    assert second["messages"][3] == {"role": "assistant", "content": "Ho."}
