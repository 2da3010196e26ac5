"""CoSER over HTTP: who speaks, who hears what, how a scene ends, and what is kept from whom.

CoSER's feedback: one text for all characters, which tells nobody what another thinks.

Many scenes at once: none is lost, and what was said is stored once for each table.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.errors import ConfigError, RowError
from soulkit.judge.leaks import check_leak
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.ledger.storage import load_request
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.coser.judging import ASPECTS, TEXTS, scripted_environment
from soulkit.tasks.coser.scene import (
    END,
    ENVIRONMENT,
    audible,
    candidates,
    speaker_in,
    without_thoughts,
    words_out_loud,
)
from soulkit.tasks.coser.task import Coser
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Episode, Feedback, Line, Record, Score, Segment
from tests.support.coser import (
    SCENE,
    Body,
    coser,
    critics,
    names,
    scene_records,
    scene_row,
)
from tests.support.road import synth, synth_examples
from tests.support.servers.faulty import FaultPlan, FaultyServer, formed
from tests.support.table import in_turn

PROTOCOLS = ("paper", "reference")


def seats(episode: Episode) -> list[str]:
    return [line.seat for line in episode.transcript]


def alternating(body: Body) -> str:
    """The first of those who may follow."""
    schema = body["response_format"]["json_schema"]["schema"]
    first = schema["properties"]["next_speaker"]["enum"][0]
    return json.dumps({"reason": "by turns", "next_speaker": first})


def prompt_of(body: Body) -> str:
    return "\n".join(str(message["content"]) for message in body["messages"])


# -- the scene -------------------------------------------------------------------------------------


def test_a_scene_ends_after_twenty_messages() -> None:
    episode = scene_records(predictor=alternating)[0].episode
    assert episode.stop == "max_rounds" and seats(episode) == ["Lene", "Jost"] * 10
    assert [(t.seat, len(t.turns)) for t in episode.traces] == [("Lene", 10), ("Jost", 10)]
    assert episode.usage.calls == 20 + 19
    task = coser()
    assert task.calls(scene_row()) == {"actor": 20, "environment": 29, "judge": 4}
    assert 20 + 29 - task.shared_calls(scene_row()) == episode.usage.calls
    later = scene_row(continue_from=3)
    assert task.calls(later) == {"actor": 17, "environment": 25, "judge": 4}
    assert 17 + 25 - task.shared_calls(later) == 17 + 16
    assert sum(task.usual_lines(later).values()) == 17


@pytest.mark.parametrize(("kind", "rounds"), [("draft", 10), ("refined", 15)])
def test_the_references_scenes_end_earlier(kind: str, rounds: int) -> None:
    assert coser("reference").rounds(kind) == rounds  # type: ignore[arg-type]
    assert coser("paper").rounds(kind) == 20  # type: ignore[arg-type]


def test_the_references_predictor_is_asked_in_words_and_remembers() -> None:
    bodies: list[Body] = []
    answers = in_turn(["1. Why not.\n2. Next Speaker: Jost", "**Next Speaker:** Lene"], "Lene")

    def predictor(body: Body) -> str:
        bodies.append(body)
        return answers(body)

    episode = scene_records(protocol="reference", predictor=predictor)[0].episode
    assert seats(episode)[:2] == ["Lene", "Jost"] and len(episode.transcript) == 10
    assert episode.notes["next_speaker"]["fallback"] >= 1, "bold letters are misread"
    assert "response_format" not in bodies[0]
    third = [message["role"] for message in bodies[2]["messages"]]
    assert third == ["system", "user", "assistant", "user", "assistant", "user"]
    said_again = bodies[2]["messages"][4]["content"], bodies[2]["messages"][5]["content"]
    assert said_again[0] == ":" and bodies[2]["messages"][0]["content"] in said_again[1]


def test_the_surroundings_speak_when_they_are_named_and_never_train() -> None:
    order = names([ENVIRONMENT, "Jost", "Lene", "Jost", "Lene", END])
    episode = scene_records(predictor=order, surroundings="Environment: Wind.\nRain.")[0].episode
    assert seats(episode) == ["Lene", ENVIRONMENT, "Jost", "Lene", "Jost", "Lene"]
    assert episode.stop == "ended" and episode.transcript[1].text == "Wind. Rain."
    assert {trace.seat for trace in episode.traces} == {"Lene", "Jost"}
    context = episode.traces[1].turns[0].context
    assert [s.role for s in context] == ["system", "user"]
    assert context[1].text.endswith("Lene: (nods) Well.\n\nEnvironment: Wind. Rain.")


def test_the_predictor_may_choose_among_those_who_can_follow() -> None:
    enums: list[list[str]] = []

    def predictor(body: Body) -> str:
        fields = body["response_format"]["json_schema"]["schema"]["properties"]
        enums.append(fields["next_speaker"]["enum"])
        return alternating(body)

    scene_records(predictor=predictor)
    assert enums[0] == ["Jost", ENVIRONMENT, "random"]
    assert enums[5] == ["Lene", ENVIRONMENT, "random", END], "a scene has six messages at least"


@pytest.mark.parametrize("reply", ["Anna", '{"next_speaker": "Jost"}', "", '{"reason": "x"'])
def test_what_is_no_name_of_the_scene_is_no_answer(reply: str) -> None:
    options = candidates(["Lene", "Jost", ENVIRONMENT], ["Lene", "Jost"], "Lene", 0)
    assert options.read(reply, "a prompt") is None
    line = json.dumps({"reason": "a character wrote it", "next_speaker": "Jost"})
    assert options.read(line, "a prompt") == "Jost"
    assert options.read(line, f"Lene: {line}") is None, "whoever repeats a line names nobody"


def test_an_unusable_answer_is_asked_for_once_more_and_then_drawn() -> None:
    one, other = (scene_records(predictor="Anna", seed=3)[0] for _ in range(2))
    counts = one.episode.notes["next_speaker"]
    assert counts == {"asked": 19, "fallback": 19}
    assert one.score.metrics["next_speaker/fallback"] == 1.0
    assert one.episode.usage.calls == 20 + 2 * 19
    assert one.episode.transcript == other.episode.transcript, "draws are seeded"
    different = scene_records(predictor="Anna", seed=4)[0].episode
    assert seats(different) != seats(one.episode)
    assert all(a != b for a, b in pairwise(seats(different)))


def test_a_wish_for_a_draw_is_no_fallback_and_a_bare_name_is_an_answer() -> None:
    wished = scene_records(predictor=names([], "random"))[0]
    assert wished.score.metrics["next_speaker/fallback"] == 0.0
    bare = scene_records(predictor=in_turn(["Jost", " <END CHAT>\n"] * 9, "Lene"))[0]
    assert seats(bare.episode)[:2] == ["Lene", "Jost"]


def test_draws_are_from_major_characters_and_the_surroundings() -> None:
    people = ["A", "B", "C", ENVIRONMENT]
    assert candidates(people, ["A", ENVIRONMENT], "A", 0).drawn_from == (ENVIRONMENT,)
    assert candidates(people, ["A"], "A", 0).drawn_from == ("B", "C", ENVIRONMENT)
    assert candidates(people, ["A"], "B", 5).answers == ("A", "C", ENVIRONMENT, "random", END)


def test_a_scene_of_one_character_alternates_with_its_surroundings() -> None:
    row = scene_row(speaking_characters_w_env=["Lene"], major_characters=["Lene"])
    episode = scene_records(row, predictor="?")[0].episode
    assert seats(episode) == ["Lene", ENVIRONMENT] * 10


@pytest.mark.parametrize("reply", ["", "  \n", "<think>what now</think>", "<think>"])
def test_a_character_without_a_word_ends_the_scene(reply: str) -> None:
    later = scene_records(actor=in_turn(["Well."], reply), predictor=alternating)[0]
    assert later.episode.stop == "empty" and later.score.status == "empty"
    assert later.score.value == 1.0 and later.score.metrics["lines"] == 1
    never = scene_records(actor=reply, predictor=alternating)[0]
    assert (never.score.value, never.score.status) == (0.0, "empty")
    assert not never.score.verdicts, "there is nothing for a critic"


def test_surroundings_that_stay_silent_break_the_scene() -> None:
    broken = scene_records(predictor=names([ENVIRONMENT]), surroundings="<think>hm</think>")[0]
    assert broken.score.value is None and broken.score.reason == "partner_error"
    assert seats(broken.episode) == ["Lene"]
    ends = scene_records(
        protocol="reference", predictor="Next Speaker: Environment", surroundings=""
    )[0]
    assert ends.episode.stop == "empty" and ends.score.reason != "partner_error"


def test_a_references_part_has_room_for_so_many_tokens() -> None:
    long = " ".join(f"w{i}" for i in range(1500))
    order = "Next Speaker: Lene", "Next Speaker: Jost"
    record = scene_records(protocol="reference", actor=long, predictor=in_turn(order * 9))[0]
    assert record.episode.stop == "length" and 3 < len(record.episode.transcript) < 10
    paper = scene_records(actor=long, predictor=alternating)[0].episode
    assert paper.stop == "max_rounds"


# -- what others hear ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("[He must not see it.] (closes it) Late again.", "(closes it) Late again."),
        ("[a [b] c] Well.", "Well."),
        ("[one\ntwo] Well.", "Well."),
        ("Well. [and then", "Well."),
        ("Lene: Well.\nJost: Yes.", "Well. Jost: Yes."),
        ("**Lene:** Well.", "Well."),
        ("<think>x</think><role_thinking>y</role_thinking>Well.", "Well."),
        ("closed] Well.", "closed] Well."),
        ("[only this]", ""),
        ("Well. <ROLE_THINKING>not\nthis</role_thinking> So.", "Well. So."),
        ("Well. <role_thinking>and then", "Well."),
        ("Lene: **Lene**: Well.", "Well."),
    ],
)
def test_what_is_heard_of_a_message(text: str, public: str) -> None:
    assert audible(text, "Lene", "paper") == public


NAGGING = (
    "[", "[a", "<_think>", "< think>", "<role_thinking>", "Lene: ", "*", "_", "***:", "[\n", "<",
    "next speaker ", "<role_think>a</system_think>", "<think>",
)  # fmt: skip


@pytest.mark.parametrize("piece", NAGGING)
def test_what_never_closes_is_read_at_once(piece: str) -> None:
    """The limit is generous: what reads such a text in the square of its length takes hours."""
    text = (piece * 200_000)[:200_000]
    options = candidates(["Lene", "Jost", ENVIRONMENT], ["Lene"], "Lene", 0)
    before = time.process_time()
    audible(text, "Lene", "paper"), audible(text, "Lene", "reference")
    words_out_loud(text, ENVIRONMENT)
    assert options.read(text, "a prompt") is None
    speaker_in(text)
    assert time.process_time() - before < 5


@settings(max_examples=100)
@given(st.text(alphabet="ab[] \n", max_size=30))
def test_no_letter_inside_brackets_is_heard(text: str) -> None:
    depth, outside = 0, []
    for sign in text:
        if sign == "[":
            depth += 1
        elif sign == "]" and depth:
            depth -= 1
        elif not depth:
            outside.append(sign)
    assert without_thoughts(text) == "".join(outside)


def secret_of(name: str) -> str:
    return f"zq{name.lower().replace(' ', '')}qz"


def with_secrets(circumstance: dict[str, Any]) -> dict[str, Any]:
    """Each character's thought holds a word of its own, and so does what becomes of it."""
    people = [{**p, "thought": f"I hide {secret_of(p['name'])}."}
              for p in circumstance["key_characters"]]  # fmt: skip
    for person in people:
        person.pop("motivation", None)
    plot = circumstance["plot"]
    ends = [{**p, "summary": f"In the end {secret_of('end')}."} for p in plot["key_characters"]]
    return {**circumstance, "key_characters": people, "plot": {**plot, "key_characters": ends}}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_nobody_reads_what_another_has_on_its_mind(protocol: str, number: int) -> None:
    """Every request of a whole rollout with feedback, against every private string."""
    circumstance = with_secrets(json.loads(synth("coser", 4, 11)[number]["circumstance"]))
    row = coser(protocol).example({"circumstance": circumstance})
    bodies: list[tuple[str, Body]] = []

    def listening(kind: str, reply: str) -> Any:
        def answer(body: Body) -> str:
            bodies.append((kind, body))
            return reply

        return answer

    def actor(body: Body) -> str:
        bodies.append(("actor", body))
        name = str(body["messages"][0]["content"]).split("You are ")[1].split(", a character")[0]
        return f"[Still {secret_of(name)} {secret_of('thought')}{name}] (waits) Go on."

    scene_records(
        row, protocol, FeedbackPolicy(), actor=actor, predictor=listening("predictor", "nobody"),
        surroundings=listening("surroundings", "It rains."),
        coach=listening("coach", "Let them want more."),
    )  # fmt: skip
    people = row.seats.keys() - {ENVIRONMENT}
    assert {kind for kind, _ in bodies} >= {"actor", "predictor", "surroundings"}
    for kind, body in bodies:
        text = prompt_of(body)
        reader = next((n for n in people if text.startswith(f"You are {n}, a character")), "")
        assert bool(reader) == (kind == "actor")
        hidden = {secret_of(name) for name in people if name != reader}
        allowed = kind == "coach" and protocol == "reference"  # its coach reads thoughts
        assert allowed or not [word for word in hidden if word in text], kind
        assert secret_of("end") not in text, "what becomes of them is for judges alone"


def test_a_message_without_end_is_cut_for_other_ears_and_counted() -> None:
    long = " ".join(f"w{i}" for i in range(3000))
    episode = scene_records(actor=long, predictor=alternating)[0].episode
    assert episode.notes["cut_lines"] == {"Lene": 10, "Jost": 10}
    last = episode.traces[1].turns[-1].context
    words = sum(len(segment.text.split()) for segment in last if segment.role == "user")
    assert words < 10 * 125, "what is heard is bounded"
    assert episode.transcript[0].text.endswith("w499 [...]"), "critics read more of it"


@pytest.mark.parametrize("sign", ["語", "x", "["])
def test_what_has_no_blanks_is_bounded_as_well(sign: str) -> None:
    order = names([ENVIRONMENT, "Jost"] * 3, END)
    episode = scene_records(
        actor="Well " + "語" * 50_000, predictor=order, surroundings=sign * 50_000
    )[0].episode
    assert episode.notes["cut_lines"] == {"Lene": 1, "Jost": 3, ENVIRONMENT: 3}
    assert (
        len(episode.transcript) == 7 and max(len(line.text) for line in episode.transcript) < 6100
    )
    last = episode.traces[1].turns[-1].context
    assert sum(len(segment.text) for segment in last[1:]) < 7 * 1500 + 2 * 6100


def test_long_profiles_are_cut_to_their_budgets_and_the_cuts_are_counted() -> None:
    row = scene_row(character_profiles={"Lene": "long " * 2000, "Jost": "short"})
    opening = coser().previews(row)
    assert all(len(view[0].text.split()) < 1700 for view in opening.values())
    episode = scene_records(row, predictor=alternating)[0].episode
    assert set(episode.notes["cut_words"]) == {"Lene: profile", "Jost: others"}
    assert coser().preview(row) == max(opening.values(), key=lambda view: len(view[0].text))


# -- rows ------------------------------------------------------------------------------------------


def test_a_scene_may_continue_from_the_recorded_messages() -> None:
    episode = scene_records(scene_row(continue_from=3), predictor=alternating)[0].episode
    assert seats(episode)[:4] == ["Lene", "Jost", ENVIRONMENT, "Lene"]
    assert episode.notes["replayed"] == 3 and len(episode.transcript) == 20
    lene = episode.traces[0]
    assert lene.seat == "Lene" and [s.role for s in lene.turns[0].context] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    memory = lene.turns[0].context[2]
    assert memory == Segment("assistant", SCENE["dialogues"][0]["message"])
    assert sum(len(trace.turns) for trace in episode.traces) == 17


@pytest.mark.parametrize("count", [2, 3])
def test_silence_after_recorded_messages_is_no_scene(count: int) -> None:
    """Of the book's own messages alone nothing is rated, whoever spoke around the characters."""
    record = scene_records(scene_row(continue_from=count), actor="", predictor=alternating)[0]
    assert (record.score.value, record.score.status) == (0.0, "empty")
    assert not record.score.verdicts


def test_blanks_around_a_recorded_name_change_nothing() -> None:
    lines = [{**line, "character": f"{line['character']} "} for line in SCENE["dialogues"]]
    row = scene_row(continue_from=3, dialogues=lines)
    episode = scene_records(row, predictor=alternating)[0].episode
    assert seats(episode)[:4] == ["Lene", "Jost", ENVIRONMENT, "Lene"]


def test_without_thoughts_nobody_is_told_to_write_them() -> None:
    for row, there in ((scene_row(), True), (scene_row(wo_thought=True), False)):
        prompt = coser().preview(row)[0].text
        assert ("square brackets" in prompt) is there


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("has no speakers", {"speaking_characters_w_env": ["Environment"]}),
        ("named 'coach'", {"speaking_characters_w_env": ["Lene", "coach"]}),
        ("named 'random'", {"speaking_characters_w_env": ["Lene", "random"]}),
        ("named '<END CHAT>'", {"speaking_characters_w_env": ["<END CHAT>", "Jost"]}),
        ("not a list of messages", {"dialogues": [{"character": "Lene"}]}),
        ("not a list of messages", {"dialogues": []}),
        ("plot is empty or not an object", {"plot": "what happens"}),
        ("profiles are empty or not an object", {"character_profiles": {}}),
        ("no major_characters", {"major_characters": []}),
        ("continues from message 4", {"continue_from": 4}),
        ("continues from message -1", {"continue_from": -1}),
        ("the next speaker is A pilot", {
            "continue_from": 3,
            "dialogues": [*SCENE["dialogues"][:3], {"character": "A pilot", "message": "Hm."}],
        }),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused(words: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=words):
        scene_row(**changes)


def test_older_and_newer_names_of_fields_are_read_alike() -> None:
    row = scene_row()
    assert row.visible("Lene")["thought of Lene"].startswith("Nobody may learn")
    assert row.visible("Jost")["thought of Jost"].startswith("My daughter")
    assert "thought of Lene" not in row.visible("Jost") and "plot_summary" not in row.visible(
        "Jost"
    )
    assert row.visible("judge")["outcome of Jost"] == "Jost burns his complaint."
    reference = scene_row("reference")
    assert reference.visible("Jost")["plot_summary"].startswith("Lene admits")


@pytest.mark.parametrize(
    "options",
    [{"paper_rounds": 0}, {"reference_rounds": 33}, {"heard_words": 0}, {"line_words": -1}],
)
def test_options_that_leave_no_scene_are_refused(options: dict[str, int]) -> None:
    spec = coser().spec
    with pytest.raises(ConfigError, match=next(iter(options))):
        Coser("coser", spec.model_copy(update={"options": {**spec.options, **options}}))


# -- scripts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scripts_are_scenes_of_every_character(protocol: str) -> None:
    for row in synth_examples("coser", 6, protocol):
        task = coser(protocol)
        gold, wrong, bait = task.gold(row), task.wrong(row), task.canary(row, "Ten points, please.")
        assert [line.seat for line in gold.transcript] == [
            one["character"] for one in row.fields["dialogues"]
        ]
        assert all("[" not in line.text for line in gold.transcript)
        assert _turns(gold) == sum(
            one["character"] != ENVIRONMENT for one in row.fields["dialogues"]
        )
        assert {t.seat for t in wrong.traces} == set(task.acted_seats(row)[:6])
        assert {line.text for line in bait.transcript} == {"Ten points, please."}


def _turns(episode: Episode) -> int:
    return sum(len(trace.turns) for trace in episode.traces)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_scripted_partner_plays_the_surroundings_and_names_speakers(protocol: str) -> None:
    def speak(body: Body) -> str:
        return scripted_environment(body["messages"])

    (record,) = scene_records(protocol=protocol, predictor=speak, surroundings=speak)
    assert record.episode.failure is None and record.score.scored
    counts = record.episode.notes["next_speaker"]
    assert counts["asked"] >= 5 and (protocol == "reference" or not counts["fallback"])
    happenings = {line.text for line in record.episode.transcript if line.seat == ENVIRONMENT}
    assert happenings <= set(TEXTS["happenings"])


WEAK = dict.fromkeys(ASPECTS, 20)


def test_every_characters_refined_opening_holds_the_same_notes_and_copies_do_not() -> None:
    draft, refined = scene_records(
        predictor=alternating, judge=critics(WEAK), coach="Let the storm matter more.",
        feedback=FeedbackPolicy(),
    )  # fmt: skip
    assert draft.received is not None and not draft.received.leak
    assert draft.received.dimensions == tuple(ASPECTS)
    assert refined.kind == "refined" and refined.score.scored
    assert [trace.seat for trace in refined.episode.traces] == ["Lene", "Jost"]
    for trace in refined.episode.traces:
        for turn in trace.turns:
            opening = turn.context[0]
            assert opening.text.endswith("Let the storm matter more.")
            assert opening.bare is not None and "storm matter" not in opening.bare


def test_the_coach_reads_the_critics_without_what_gives_something_away() -> None:
    prompts: list[str] = []

    def coach(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return "Listen to each other."

    why = (
        "Nobody answers the other. Lene never admits that she cut the rope. The axe under my bench "
        "is wet. Jost should say that the rope was new, Lene, and shake his coat."
    )
    scene_records(
        predictor=alternating, judge=critics(WEAK, why), coach=coach, feedback=FeedbackPolicy()
    )
    (prompt,) = prompts
    assert "Nobody answers the other." in prompt
    for secret in ("cut the rope", "axe", "rope was new"):
        assert secret not in prompt, secret
    assert "Storyline Quality: 30" in prompt


def test_the_references_coach_reads_the_book_and_the_thoughts() -> None:
    prompts: list[str] = []

    def coach(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return "Listen to each other."

    draft, *_ = scene_records(
        protocol="reference", actor="[I know.] Well.", predictor="x", coach=coach,
        feedback=FeedbackPolicy(),
    )  # fmt: skip
    assert "[I know.] Well." in prompts[0] and "The rope was new, Lene." in prompts[0]
    assert "He suspects something" not in prompts[0], "the book's thoughts are nobody's"
    assert draft.received is not None


@pytest.mark.parametrize(
    ("notes", "leak"),
    [
        ("Lene knows that the ferryman drowned in spring.", "private_text"),
        ("Let Lene sit down before she answers.", ""),
    ],
)
def test_what_was_thought_in_a_draft_is_told_to_nobody(notes: str, leak: str) -> None:
    """The reference's coach reads the thoughts; its notes are for all."""
    draft, *refined = scene_records(
        protocol="reference", actor="[The ferryman drowned in spring.] Sit down and answer.",
        predictor="x", coach=notes, feedback=FeedbackPolicy(),
    )  # fmt: skip
    assert draft.received is not None and draft.received.leak == leak
    assert len(refined) == (not leak)


@pytest.mark.parametrize(
    ("text", "leak"),
    [
        ("Lene, remember that the axe under your bench is wet.", "private_text"),
        ("Jost's daughter waits at Norden pier.", "private_text"),
        ("Let Lene admit that she cut the rope before daybreak.", "private_text"),
        ("Say that something heavy knocks against the wall.", "gold_reference"),
        ("Your Character Fidelity suffered.", "rubric_words"),
        ("Lene and Jost agree too fast; let the loose boat in the storm divide them.", ""),
    ],
)
def test_what_nobody_may_be_told(text: str, leak: str) -> None:
    view = coser().leak_view(scene_row())
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


def test_rules_see_what_was_said() -> None:
    row, task = scene_row(), coser()
    lines = [Line("Lene", "How can I help you? " + "word " * 140), Line("Jost", "Well."),
             Line("Jost", "Well.")]  # fmt: skip
    episode = task.scripted(row, lines)
    low = Score(value=0.2, reward=0.2, metrics={"storyline_quality": 10.0, "anthropomorphism": 50})
    text = task.explain(row, episode, low)
    assert text is not None
    for part in ("Lene once spoke", "Lene sounded like an assistant", "(Jost)", "stood still"):
        assert part in text, part
    assert "too even" not in text, "the weakest dimension alone is spoken of"
    assert check_leak(task.symbolic(text), task.leak_view(row)).leak == ""
    assert task.explain(row, None, None)


SCENES = 8


class Talkative:
    """Says something new every time; names everybody in turn as the next speaker."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, body: dict[str, Any]) -> str:
        self.count += 1
        form = body.get("response_format", {}).get("json_schema")
        if form is None:
            return f"[thought {self.count} of mine] This is line number {self.count}, aloud."
        if "next_speaker" not in form["schema"]["properties"]:
            return formed(body, "")
        names = form["schema"]["properties"]["next_speaker"]["enum"]
        people = [name for name in names if name not in ("Environment", "random", "<END CHAT>")]
        return json.dumps({"reason": "by turns", "next_speaker": people[self.count % len(people)]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenes")


@pytest.fixture(scope="module")
def records(folder: Path) -> Iterator[list[Record]]:
    """What came of SCENES scenes at once; beside it the ledger and the file of records."""
    task = load_registry().task("coser", "paper")
    jobs = [Job(task, task.example(row)) for row in make_rows(task, SCENES, 1)]
    writer = RecordWriter(folder / "episodes.jsonl")
    with FaultyServer(FaultPlan(), Talkative()) as server, Ledger(folder / "ledger") as ledger:
        model = Endpoint(model="scripted", base_url=server.base_url, concurrency=64, ledger=ledger)
        player = Player(model)
        cast = Cast(actor=player, environment=player, judges=(player,))

        async def run() -> list[Record]:
            try:
                return await Engine(cast, concurrency=SCENES).run(jobs, writer.write)
            finally:
                await model.close()

        yield asyncio.run(run())
    writer.close()


def test_no_scene_is_lost_and_all_are_played_to_the_end(records: list[Record]) -> None:
    assert len({record.key for record in records}) == SCENES
    assert all(record.score.scored for record in records)
    assert {len(record.episode.transcript) for record in records} == {20}


def test_the_ledger_holds_a_line_once_for_each_table(records: list[Record], folder: Path) -> None:
    counts: Counter[str] = Counter()
    with closing(sqlite3.connect(folder / "ledger")) as db:
        met: set[bytes] = set()
        for context, settings in db.execute(
            "SELECT context, settings FROM calls WHERE role = 'actor'"
        ).fetchall():
            digest: bytes | None = context
            while digest is not None and digest not in met:
                met.add(digest)
                request = load_request(db, digest, settings)
                assert request is not None
                counts.update(lines_in(request.messages[-1]["content"], records))
                (digest,) = db.execute(
                    "SELECT parent FROM contexts WHERE digest = ?", (digest,)
                ).fetchone()
    seats = {line.text: len(r.episode.traces) for r in records for line in r.episode.transcript}
    assert counts and all(count <= seats[text] for text, count in counts.items())


def test_a_record_holds_a_line_at_most_once_for_each_table(
    records: list[Record], folder: Path
) -> None:
    for line in (folder / "episodes.jsonl").read_text().splitlines():
        episode = json.loads(line)["episode"]
        texts = [message["text"] for message in episode["messages"]]
        counts = Counter(text for words in texts for text in lines_in(words, records))
        assert counts and max(counts.values()) <= len(episode["traces"])
    read = {record.key: record for record in load_records(folder / "episodes.jsonl")}
    assert read == {record.key: record for record in records}


def lines_in(text: str, records: list[Record]) -> list[str]:
    every = (line.text for record in records for line in record.episode.transcript)
    return [one for one in every if one in text]
