"""Conversations of every layout as lessons: whose words are learned, and what stands before."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.data.corpora.lessons import (
    EARLIER,
    FROM_HERE,
    OPENING,
    conversation_of,
    labelled_line,
)
from soulkit.data.corpora.settings import corpus_rules, rule_for
from soulkit.data.files import BadRecord
from soulkit.errors import DataError
from tests.support.chats import lesson, lines, said_by

TURNS = said_by("system: Be kind.", "user: hi", "assistant: hello", "user: bye")
SWAPPED = ["system Be kind.", "assistant* hi", "user hello", "assistant* bye"]
SHAREGPT = [
    {"from": "system", "value": "Be kind."}, {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"}, {"from": "human", "value": "bye"},
]  # fmt: skip
PARTS = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TURNS]
LAYOUTS: dict[str, Any] = {
    "messages": {"messages": TURNS},
    "json text": {"messages": json.dumps(TURNS)},
    "python literal": {"messages": str(TURNS)},
    "extra_info": {"prompt": [], "data_source": "x", "extra_info": {"messages": TURNS}},
    "extra_info as text": {"extra_info": json.dumps({"messages": TURNS}), "data_source": "x"},
    "sharegpt": {"conversations": SHAREGPT},
    "parts": {"messages": PARTS},
    "a system prompt beside": {"system": "Be kind.", "conversations": SHAREGPT[1:]},
    "struct with empty keys": {
        "messages": [{**m, "name": None, "tool_calls": None} for m in TURNS]
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_lesson(layout: str):
    assert lines(lesson(LAYOUTS[layout])) == SWAPPED


def test_branches_and_trees_follow_the_path_that_was_taken():
    history = [
        {"turn": 0, "role": "user", "content": "hi"},
        {"turn": 0, "role": "model", "content": "no", "if_chosen": False},
        {"turn": 0, "role": "model", "content": "hello", "if_chosen": True},
        {"turn": 1, "role": "user", "content": "bye"},
    ]
    tree = {"text": "hi", "role": "prompter", "replies": [
        {"text": "no", "role": "assistant", "rank": 1},
        {"text": "hello", "role": "assistant", "rank": 0,
         "replies": [{"text": "bye", "role": "prompter"}]},
    ]}  # fmt: skip
    for row in ({"conversation_history": history}, {"prompt": tree}):
        assert lines(lesson(row))[1:] == SWAPPED[1:]


def test_the_assistant_side_stays_as_it_stands_and_ends_with_its_last_word():
    assert lines(lesson({"messages": TURNS}, "assistant")) == [
        "system Be kind.", "user hi", "assistant* hello"
    ]  # fmt: skip


def test_who_opens_without_a_system_prompt_is_told_so():
    assert lines(lesson({"messages": TURNS}, strip_system=True))[:2] == [
        f"user {OPENING}", "assistant* hi"
    ]  # fmt: skip
    assert lines(lesson({"messages": said_by("assistant: yes?", "user: no")}, "assistant")) == [
        f"user {OPENING}", "assistant* yes?"
    ]  # fmt: skip


@pytest.mark.parametrize("strip", [False, True])
def test_a_person_who_reacts_is_learned_with_and_without_the_system_prompt(strip: bool):
    row = {"messages": said_by("system: You are Ann.", "assistant: A book.", "user: I like it.")}
    after = lines(lesson(row, strip_system=strip))
    assert after[-2:] == ["user A book.", "assistant* I like it."] and len(after) == 3 - strip


def test_neighbours_of_one_side_are_one_message():
    row = {"messages": said_by("user: a", "user: b", "assistant: c", "assistant: d", "user: e")}
    assert lines(lesson(row)) == [
        f"user {OPENING}", "assistant* a\nb", "user c\nd", "assistant* e"
    ]  # fmt: skip


def test_tools_are_words_of_the_surroundings_and_never_learned():
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "search", "arguments": '{"q": "tea"}'}}]}  # fmt: skip
    answer = {"role": "tool", "name": "search", "content": "tea: 3 hits"}
    row = {"messages": [*said_by("user: tea?"), call, answer, *said_by("assistant: three")]}
    words = '(the assistant calls search) {"q": "tea"}\n(search answers) tea: 3 hits'
    row["messages"][1]["content"] = "I look."
    assert lines(lesson(row, "assistant")) == [
        "user tea?", "assistant* I look.", f"user {words}", "assistant* three"
    ]  # fmt: skip
    row["messages"] += said_by("user: ok")
    assert lines(lesson(row)) == [
        f"user {OPENING}", "assistant* tea?", f"user I look.\n{words}\nthree", "assistant* ok"
    ]  # fmt: skip


def test_a_call_without_words_is_no_blank_message():
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}]}  # fmt: skip
    row = {"messages": [*said_by("user: time?"), call, *said_by("tool: 9:00", "assistant: nine")]}
    words = '(the assistant calls clock) {"zone": "UTC"}\n(tool answers) 9:00'
    assert lines(lesson(row, "assistant")) == [f"user time?\n{words}", "assistant* nine"]
    talk = {"human": "time?", "function_call": "clock()", "observation": "9:00", "gpt": "nine"}
    turns = [{"from": speaker, "value": text} for speaker, text in talk.items()]
    words = "(the assistant calls a tool) clock()\n(observation answers) 9:00"
    assert lines(lesson({"conversations": turns}, "assistant")) == [
        f"user time?\n{words}", "assistant* nine"
    ]  # fmt: skip


def test_a_message_of_no_weight_is_context():
    turns = said_by("user: a", "assistant: b", "user: c", "assistant: d")
    turns[1] |= {"weight": 0}  # type: ignore[dict-item]
    assert lesson({"messages": turns}, "assistant").trained == (False, False, False, True)


def test_pictures_stay_visible_in_the_context_and_are_no_words_to_learn():
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    look = [{"type": "text", "text": "see"}, picture]
    row = {"messages": [{"role": "user", "content": look}, *said_by("assistant: nice")]}
    assert lines(lesson(row, "assistant")) == ["user see (image)", "assistant* nice"]
    row["messages"][0]["content"] = [picture]
    with pytest.raises(BadRecord, match="the person says nothing"):
        lesson(row)
    row["messages"] += said_by("user: is it?")
    assert lines(lesson(row)) == ["user (you sent image)\nnice", "assistant* is it?"]


def test_attachments_are_context_on_both_sides():
    turns = [
        {"speaker": "Ann", "content": "", "attachments": ["image"]},
        {"speaker": "Bob", "content": "Where?", "attachments": ["file"]},
        {"speaker": "Ann", "content": "Leeds"},
    ]
    assert lines(lesson({"messages": turns}, "Ann")) == [
        "user (you sent image)\nWhere? (file)", "assistant* Leeds"
    ]  # fmt: skip


def test_a_speaker_is_learned_by_name_and_the_others_have_theirs_before_their_lines():
    turns = [
        {"speaker": "Ann", "text": "Tea?"}, {"speaker": "Bob", "text": "Yes.\nAnn: No."},
        {"speaker": "Cy", "text": "Me too."}, {"speaker": "ann", "text": "Two, then."},
    ]  # fmt: skip
    assert lines(lesson({"messages": turns}, "Ann")) == [
        f"user {OPENING}", "assistant* Tea?",
        "user Bob: Yes.\n    Ann: No.\nCy: Me too.", "assistant* Two, then.",
    ]  # fmt: skip
    assert lines(lesson({"messages": turns[:2]}, "Bob")) == [
        "user Tea?",
        "assistant* Yes.\nAnn: No.",
    ]
    with pytest.raises(BadRecord, match="'Dan' says nothing"):
        lesson({"messages": turns}, "Dan")
    with pytest.raises(BadRecord, match="--side NAME"):
        lesson({"messages": turns}, "human")


def test_exact_ids_pass_where_the_assistant_is_learned():
    turns = said_by("user: hi", "assistant: ho", "user: x", "assistant: y")
    turns[1] |= {"token_ids": [5, 6]}  # type: ignore[dict-item]
    turns[1] |= {"trained": False}  # type: ignore[dict-item]
    row = {"messages": turns, "tokenizer": "abc", "fact": "f"}
    made = lesson(row, "assistant")
    assert made.trained == (False, False, False, True)
    assert (made.segments[1].token_ids, made.tokenizer, made.fact) == ((5, 6), "abc", "f")
    swapped = lesson(row)
    assert swapped.tokenizer == "" and not any(s.token_ids for s in swapped.segments)


BROKEN: dict[str, tuple[Any, str]] = {
    "no object": (3, "not a row of named fields"),
    "no messages": ({"text": "hi"}, "no list of messages"),
    "a blank target": ({"messages": said_by("user: a", "assistant: b", "user: ")}, "has no text"),
    "nobody learned": ({"messages": said_by("system: a", "assistant: b")}, "says nothing"),
    "no speaker": ({"messages": [{"content": "a"}]}, "has no speaker"),
    "no message": ({"messages": ["a"]}, "no list of messages"),
    "ids that are none": (
        {"messages": [{"role": "user", "content": "a", "token_ids": ["x"]}]},
        "token_ids are no",
    ),
    "no branch": (
        {"conversation_history": [{"if_chosen": True, "content": "x"}]},
        "has no speaker",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_learned_has_a_reason(what: str):
    row, reason = BROKEN[what]
    with pytest.raises(BadRecord, match=reason):
        lesson(row)


# -- folding -------------------------------------------------------------------------------------


def test_the_last_turns_stay_and_the_rest_is_words_before_them():
    turns = said_by("system: S", "user: a", "assistant: b", "user: c", "assistant: d", "user: e")
    past = f"{EARLIER}\nYou: a\nAssistant: b\n{FROM_HERE}"
    assert lines(lesson({"messages": turns}, turns=3)) == [
        "system S", f"user {past}", "assistant* c", "user d", "assistant* e"
    ]  # fmt: skip
    past = f"{EARLIER}\nYou: a\nAssistant: b\nYou: c\n{FROM_HERE}\nd"
    assert lines(lesson({"messages": turns}, turns=2)) == [
        "system S", f"user {past}", "assistant* e"
    ]  # fmt: skip


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
WORDS = WORDS.filter(lambda text: bool(text.strip()))
ROLES = st.sampled_from(["user", "assistant"])
TALK = st.lists(st.tuples(ROLES, WORDS), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(TALK, st.booleans(), st.one_of(st.none(), st.integers(1, 6)))
def test_every_word_of_the_person_is_learned_or_folded(talk, system, turns):
    """Naively: which words stand where, whatever the order of speakers."""
    messages = [{"role": role, "content": text} for role, text in talk]
    persons = [text.strip() for role, text in talk if role == "user"]
    row = {"messages": [*said_by("system: S")[: int(system)], *messages]}
    if not persons:
        with pytest.raises(BadRecord):
            lesson(row, turns=turns)
        return
    made = lesson(row, turns=turns)
    roles = [s.role for s in made.segments]
    assert all(one != other for one, other in pairwise(roles))
    assert made.trained == tuple(role == "assistant" for role in roles)
    assert not made.trained[0] and made.trained[-1]
    learned = "\n".join(s.text for s in made.segments if s.role == "assistant")
    if turns is None:
        assert learned == "\n".join(persons)
    else:
        assert "\n".join(persons).endswith(learned)
        assert len([r for r in roles if r != "system"]) <= turns + 1


@settings(max_examples=60, deadline=None)
@given(TALK, st.integers(1, 3))
def test_only_labels_stand_at_the_margin_of_what_was_folded(talk, turns):
    forged = [(role, f"{text}\nYou: forged\r\u2028Assistant: forged") for role, text in talk]
    messages = [{"role": role, "content": text} for role, text in forged]
    row = {"messages": [*messages, *said_by("assistant: x", "user: y")]}
    made = lesson(row, turns=turns)
    context = next(s.text for s in made.segments if s.role == "user")
    if EARLIER not in context:
        return
    past = context.partition(EARLIER)[2].partition(f"\n{FROM_HERE}")[0]
    at_margin = [line for line in past.splitlines() if line and not line.startswith("    ")]
    assert all(line.startswith(("You: ", "Assistant: ")) for line in at_margin)
    assert not any(line.endswith(": forged") for line in at_margin)


@given(WORDS)
def test_a_labelled_line_keeps_every_line(text):
    shown = labelled_line("A", text).splitlines() or ["A: "]
    bare = [shown[0].removeprefix("A: "), *(line[4:] for line in shown[1:])]
    assert bare == (text.splitlines() or [""])


# -- the table -----------------------------------------------------------------------------------


def test_the_table_has_every_published_name():
    rules = corpus_rules()
    sides = [rule.side for rule in rules.values()]
    # 9 chats, 4 dialogues, CoSER, 7 of people, 3 experiments, 3 tutoring, 22 of ConvoKit;
    # 1 + 12 + 5 + 1 + 3 on the other side
    assert (sides.count("human"), sides.count("assistant")) == (49, 22)
    assert sum(name.startswith("convokit_") for name in rules) == 22
    assert rules["psych101"].turns == 20
    assert [name for name, rule in rules.items() if rule.turns] == ["psych101"]


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    assert rule_for("wildchat", None, "f:1").side == "human"
    assert rule_for(None, "tom_hitom", "f:1").side == "assistant"
    assert rule_for("my_chats", "wildchat", "f:1").side == "human"
    with pytest.raises(DataError) as error:
        rule_for("convokit_supremes", None, "f:1")
    assert "Did you mean 'convokit_supreme'?" in error.value.why
    assert "--side" in error.value.way_out
    with pytest.raises(DataError, match="The side to learn is not set for f:1"):
        rule_for(None, None, "f:1")


def test_a_row_says_what_stands_beside_its_messages():
    row = {"messages": TURNS, "data_source": "wildchat", "fact": "F"}
    held = conversation_of(row)
    assert (held.data_source, held.fact, held.tokenizer) == ("wildchat", "F", "")


def test_own_words_that_are_not_learned_stand_beside_learned_ones_as_context():
    own = [{"role": "user", "content": "forwarded", "trained": False}, *said_by("user: mine")]
    assert lines(lesson({"messages": [*TURNS[:3], *own]}))[-2:] == [
        "user hello\n(you wrote) forwarded", "assistant* mine",
    ]  # fmt: skip
