"""What a reply does in a scene: the repaired reader, the lines that are heard, both on any text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.tasks.sotopia.actions import (
    ACT,
    GESTURE,
    KINDS,
    LEAVE,
    MAX_CHARS,
    MAX_WORDS,
    NONE,
    SPEAK,
    Action,
    in_place,
    narrate,
    parse_json,
    parse_line,
    read_action,
)
from soulkit.tasks.sotopia.scores import audited_lines

PROTOCOLS = ("paper", "reference")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_was_asked_for_is_read_as_it_is(kind: str, protocol: str) -> None:
    action = Action(kind, 'a "b" {c}\nd' if kind != LEAVE else "")
    assert read_action(action.json(), protocol) == action  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "kind", "argument"),
    [
        ('{"action_type": "Speak", "argument": "x"}', SPEAK, "x"),
        ('{"action_type": "Non_Verbal Communication", "argument": "nods"}', GESTURE, "nods"),
        ('{"action_type": "SHOUT", "argument": "x"}', SPEAK, "x"),
        ('{"action_type": "leave"} Bye!', LEAVE, ""),
        ('```json\n{"action_type": "Action", "argument": "bows"}\n```', ACT, "bows"),
        ('Sure!\n{"action_type": "speak", "argument": "x"}\nHope it fits.', SPEAK, "x"),
        ('[{"action_type": "speak", "argument": "x"}]', SPEAK, "x"),
        ('{"reply": {"action_type": "action", "argument": "x"}}', ACT, "x"),
        ('{"response": "hello"}', SPEAK, "hello"),
        ('{"argument": "x"}', SPEAK, "x"),
        ('{"action_type": "action", "content": "bows"}', ACT, "bows"),
        ('{"action": "speak", "text": "hello"}', SPEAK, "hello"),
        ('{"action": "leave"}', LEAVE, ""),
        ('{"response": "Nothing."}', SPEAK, "Nothing."),
        ('Ana: "Hi"', SPEAK, "Hi"),
        ('{"action_type": "speak", "argument": 5}', SPEAK, "5"),
        ('{"action_type": "speak", "argument": ["a", "b"]}', SPEAK, "a; b"),
        ('{"action_type": "speak", "argument": "he said "hi" to me"}', SPEAK, 'he said "hi" to me'),
        ('{"action_type": "action", "argument": "cut off he', ACT, "cut off he"),
        ('{"action_type": "leave", "argum', LEAVE, ""),
        ("{'action_type': 'speak', 'argument': 'it is me'}", SPEAK, "it is me"),
        ('{"argument": "two\\nlines", "action_type": speak}', SPEAK, "two\nlines"),
        ('{"action_type": "leave"}{"action_type": "speak", "argument": "longer"}', LEAVE, ""),
        ("<think>{'a': 1}</think>Good morning.", SPEAK, "Good morning."),
        ('I plan.</THINK>{"action_type": "speak", "argument": "x"}.', SPEAK, "x"),
        ('"Good morning."', SPEAK, "Good morning."),
        ('"Hi," she says, "you."', SPEAK, '"Hi," she says, "you."'),
        ('Ana said: "Hi"', SPEAK, "Hi"),
        ("Ana [non-verbal communication] smiles", GESTURE, "smiles"),
        ("[action] waves", ACT, "waves"),
        ("Ana left the conversation", LEAVE, ""),
        ("Ben left the conversation", SPEAK, "Ben left the conversation"),
        ("Anabel left the conversation", SPEAK, "Anabel left the conversation"),
    ],
)
def test_other_forms_are_salvaged(text: str, kind: str, argument: str) -> None:
    assert read_action(text, "paper", "Ana") == Action(kind, argument, "salvaged")


@pytest.mark.parametrize("text", ["I said </think> twice", "use <think> tags", "<think>a</think>"])
def test_who_speaks_of_thinking_marks_does_not_think(text: str) -> None:
    assert read_action(Action(SPEAK, text).json(), "paper") == Action(SPEAK, text)
    assert read_action(f"<think>hm</think>{Action(SPEAK, 'x').json()}", "paper").argument == "x"


def test_line_breaks_and_tabs_inside_a_text_are_kept() -> None:
    text = '{"action_type": "speak", "argument": "one\n\ttwo"}'
    assert read_action(text, "paper") == Action(SPEAK, "one\n\ttwo")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", "empty"), (" \n", "empty"), ("<think>x</think>", "empty"), ("<seed:think>x", "empty"),
        ("{}", "malformed"), ("```json\n```", "malformed"), ('{"a": 1}', "malformed"),
        ('{"action_type": "speak"', "malformed"), ('"', "malformed"),
        ('{"action_type": "speak"}', "salvaged"), ('{"action": "none", "text": "x"}', "malformed"),
        ('{"plan": "to wait", "text": "x"}', "malformed"),
        ('{"action_type": "speak", "argument": "\\u001b[2J\\u0000"}', "malformed"),
        ('{"action_type": "speak", "argument": " "}', "salvaged"),
        ('{"action_type": "none", "argument": ""}', "ok"),
    ],
)  # fmt: skip
def test_nothing_usable_is_nothing_done(text: str, status: str) -> None:
    assert read_action(text, "paper") == Action(NONE, "", status)


def test_what_is_too_long_is_cut_and_says_so() -> None:
    long = read_action("word " * 5000, "paper")
    assert len(long.argument.split()) == MAX_WORDS + 1 and long.cut
    wide = read_action("w" * 50_000, "paper")
    assert len(wide.argument) <= MAX_CHARS + 10 and wide.cut
    assert not read_action("word " * 5000, "reference").cut
    assert len(read_action("w" * 100_000, "reference").argument) < 61_000


NAMES = st.text("abc XYZ'é佐", min_size=1, max_size=12).map(str.strip).filter(bool)
ACTIONS = st.builds(
    Action, st.sampled_from([SPEAK, GESTURE, ACT]), st.text(max_size=40).map(str.strip)
)


@settings(max_examples=200, deadline=None)
@given(NAMES, ACTIONS)
def test_a_line_tells_its_action(name: str, action: Action) -> None:
    assert parse_line(name, narrate(name, action)) == action


@pytest.mark.parametrize("kind", [LEAVE, NONE])
def test_leaving_and_idleness_are_lines_too(kind: str) -> None:
    assert parse_line("Ana", narrate("Ana", Action(kind))) == Action(kind)


PIECES = st.sampled_from(
    ['{"action_type": ', '"speak"', ', "argument": ', '"', "{", "}", "[", "]", "\\", "\n", "hello",
     "<think>", "</think>", "```", "Ana said: ", "'", ",", "1e999", "NaN", "\ud800", "\x1b["]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join), st.sampled_from(PROTOCOLS))
def test_any_reply_can_be_read_and_told(text: str, protocol: str) -> None:
    action = read_action(text, protocol, "Ana")  # type: ignore[arg-type]
    line = narrate("Ana", action)
    assert action.kind in (*KINDS, NONE)
    line.encode("utf-8")
    assert "\x1b" not in line
    if protocol == "paper":
        assert action.kind in (LEAVE, NONE) or action.argument.strip()
        assert json.loads(action.json())["argument"] == action.argument


def test_the_reference_finds_a_value_in_anything() -> None:
    assert parse_json('{"a": "x\ny"}') == {"a": "x\\ny"}
    assert parse_json("[" * 100_000) is None
    assert read_action('{"action_type": "none", "argument": ""}', "reference").kind == SPEAK


@pytest.mark.parametrize("text", ["{}", " {} ", '"{"action_type": "leave", "argument": ""}"'])
def test_the_reference_speaks_what_is_no_object_of_its_own(text: str) -> None:
    """An empty object is none, and one inside a text belongs to the text."""
    action = read_action(text, "reference")
    assert (action.kind, action.argument) == (SPEAK, text.strip())
    assert parse_json('x "{"a": 1}" y') == ": 1}"


def test_whoever_leaves_under_the_reference_may_say_why() -> None:
    action = read_action('{"action_type": "leave", "argument": "bye"}', "reference")
    assert (action.kind, action.argument) == (LEAVE, "bye")
    assert json.loads(action.json())["argument"] == "bye"


@pytest.mark.parametrize(
    ("argument", "shown"),
    [("<THINK>plan</THINK> Hello.", ["Hello."]), ("Hi. <Think>and so on", ["Hi."]),
     ("<THINK>plan</THINK>", []), ("I think so.", ["I think so."])],
)  # fmt: skip
def test_thinking_in_an_argument_is_not_audited_under_the_reference(
    argument: str, shown: list[str]
) -> None:
    assert audited_lines([Action(SPEAK, argument), Action(LEAVE, "bye")]) == shown


def test_placeholders() -> None:
    text = "agent1, Agent2's and Agent12"
    assert in_place(text, "Ana", "Ben", "paper") == "Ana, Ben's and Agent12"
    assert in_place(text, "Ana", "Ben", "reference") == "Ana, Ben's and Ana2"


def test_placeholders_among_odd_names_and_other_scripts() -> None:
    assert in_place("Agent1 meets Agent2", "Agent2", "Ben", "paper") == "Agent2 meets Ben"
    assert in_place("Agent1和agent2在商店", "佐藤", "Ben", "paper") == "佐藤和Ben在商店"
