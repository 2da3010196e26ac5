"""CoSER's feedback: one text for all characters, which tells nobody what another thinks."""

from __future__ import annotations

import pytest

from soulkit.judge.leaks import check_leak
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.coser.flaws import ASPECTS
from soulkit.types import Feedback, Line, Score
from tests.support.coser import Body, coser, critics, scene_records, scene_row
from tests.support.servers.openai_server import Fault
from tests.tasks.coser.test_coser import alternating

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


@pytest.mark.parametrize(
    ("reward", "step", "open_"), [(0.2, 29, True), (0.21, 0, False), (0.1, 30, False)]
)
def test_the_references_gate(reward: float, step: int, open_: bool) -> None:
    assert coser("reference").gate(Score(value=reward, reward=reward), step) is open_


def test_a_coach_that_fails_leaves_the_draft_its_score() -> None:
    def script(_: int, body: Body) -> Fault | None:
        return Fault.status_error(500, "busy") if body["model"] == "coach" else None

    records = scene_records(
        predictor=alternating, coach="x", feedback=FeedbackPolicy(), script=script
    )
    assert len(records) == 1 and records[0].score.value == 1.0
