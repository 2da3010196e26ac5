"""The belief tracker: hand-made stories with known answers, then properties of random ones."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings

from soulkit.tasks.tom.stories.events import (
    ContainerRoom,
    Enter,
    Event,
    Exit,
    Move,
    Place,
    PrivateTell,
    PublicClaim,
    Stay,
    Story,
    agents,
    decode,
    encode,
    witnesses,
)
from soulkit.tasks.tom.stories.tracker import BeliefTracker, Rules
from tests.support.stories import last_joint_event
from tests.support.story_strategies import chapters, two_room

FALSE_BELIEF: tuple[Event, ...] = (
    Enter(("Otto",), "loft"),
    Enter(("Mei",), "loft"),
    Place("coin", "urn"),
    ContainerRoom("urn", "loft"),
    Exit("Mei", "loft"),
    Move("Otto", "coin", "jar"),
)

CHAPTER: tuple[Event, ...] = (
    Enter(("Otto", "Mei", "Rosa"), "loft"),
    Place("coin", "urn"),
    Stay("Otto", "loft"),
    Exit("Otto", "loft"),
    Move("Mei", "coin", "jar"),
    Exit("Mei", "loft"),
    Move("Rosa", "coin", "tin"),
    Exit("Rosa", "loft"),
    Enter(("Otto", "Mei", "Rosa"), "foyer"),
)


def where(rules: Rules, events: tuple[Event, ...], *chain: str) -> str | None:
    return BeliefTracker(rules).run(events).answer(chain, "coin")


def test_who_was_away_keeps_the_old_belief() -> None:
    assert where("tomi", FALSE_BELIEF) == "jar"
    assert where("tomi", FALSE_BELIEF, "Otto") == "jar"
    assert where("tomi", FALSE_BELIEF, "Mei") == "urn"
    assert where("tomi", FALSE_BELIEF, "Otto", "Mei") == "urn"
    assert where("tomi", FALSE_BELIEF, "Mei", "Otto") == "urn"
    assert BeliefTracker("tomi").run(FALSE_BELIEF).start("coin") == "urn"


def test_a_return_to_the_mover_brings_everybody_up_to_date() -> None:
    events = (*FALSE_BELIEF, Enter(("Mei",), "loft"))
    assert where("tomi", events, "Otto", "Mei") == "jar"


def test_a_return_after_the_mover_left_updates_only_the_returner() -> None:
    events = (*FALSE_BELIEF, Exit("Otto", "loft"), Enter(("Mei",), "loft"))
    assert where("tomi", events, "Mei") == "jar"
    assert where("tomi", events, "Mei", "Otto") == "urn"
    assert where("tomi", events, "Otto", "Mei") == "urn"


def test_a_return_to_another_room_shows_nothing() -> None:
    assert where("tomi", (*FALSE_BELIEF, Enter(("Mei",), "barn")), "Mei") == "urn"


def test_the_last_joint_event_is_where_the_group_last_was_complete() -> None:
    beliefs = BeliefTracker("hitom").run(CHAPTER)
    assert last_joint_event(beliefs, ("Rosa", "Mei", "Otto"), "coin") == 1
    assert last_joint_event(beliefs, ("Rosa", "Mei"), "coin") == 4
    assert last_joint_event(beliefs, ("Rosa",), "coin") == 6


def test_a_public_claim_is_believed_by_those_who_left_earlier() -> None:
    events = (*CHAPTER, PublicClaim("Mei", "coin", "sack"))
    assert where("hitom", events) == "tin"
    assert where("hitom", events, "Otto") == "sack"
    assert where("hitom", events, "Otto", "Mei") == "sack"
    assert where("hitom", events, "Rosa") == "tin"
    assert where("hitom", events, "Rosa", "Mei") == "jar"
    assert where("hitom", events, "Mei") == "jar"
    assert where("hitom", events, "Mei", "Rosa") == "sack"
    assert where("hitom", events, "Rosa", "Otto") == "urn"


def test_a_whisper_reaches_one_and_the_speaker_expects_belief() -> None:
    events = (*CHAPTER, PrivateTell("Otto", "Rosa", "coin", "sack"))
    assert where("hitom", events, "Rosa") == "tin"
    assert where("hitom", events, "Rosa", "Otto") == "urn"
    assert where("hitom", events, "Otto", "Rosa") == "sack"
    assert where("hitom", events, "Mei") == "jar"


def test_exits_of_an_earlier_chapter_do_not_count_for_trust() -> None:
    later = (
        Enter(("Rosa", "Otto"), "barn"),
        Place("kite", "box_a"),
        Exit("Rosa", "barn"),
        Exit("Otto", "barn"),
        PrivateTell("Rosa", "Mei", "kite", "box_b"),
        PrivateTell("Rosa", "Otto", "kite", "box_b"),
    )
    beliefs = BeliefTracker("hitom").run((*CHAPTER, *later))
    assert beliefs.answer(("Mei",), "kite") == "box_b"
    assert beliefs.answer(("Otto",), "kite") == "box_a"


def test_what_the_rules_do_not_follow_has_no_answer() -> None:
    beliefs = BeliefTracker("tomi").run(FALSE_BELIEF)
    assert beliefs.answer(("Otto", "Otto"), "coin") is None
    assert beliefs.answer(("Otto", "Mei", "Rosa"), "coin") is None
    assert beliefs.answer(("Otto",), "kite") is None
    with pytest.raises(ValueError, match="rules"):
        BeliefTracker("chess")  # type: ignore[arg-type]


def test_witnesses_are_those_in_the_room() -> None:
    assert witnesses(FALSE_BELIEF)[-1] == {"Otto"}
    assert witnesses(FALSE_BELIEF)[4] == {"Otto", "Mei"}
    with pytest.raises(ValueError, match="sentences"):
        Story.of(FALSE_BELIEF, ["one"])


def test_events_that_are_none_are_refused() -> None:
    for bad in (["fly", "Otto"], ["exit", "Otto"], []):
        with pytest.raises(ValueError, match="no event"):
            decode([bad])


def renamed(events: tuple[Event, ...], names: dict[str, str]) -> tuple[Event, ...]:
    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(v) for v in value]
        return names.get(value, value) if isinstance(value, str) else value

    return decode([[row[0], *map(change, row[1:])] for row in encode(events)])


HOLDS = Place | Move | PublicClaim | PrivateTell


def check_renaming(rules: Rules, events: tuple[Event, ...]) -> None:
    people = agents(events)
    held = sorted({e.container for e in events if isinstance(e, HOLDS)})
    shuffled = [*held[1:], held[0]]
    swapped = [*people[1:], people[0]]
    names = dict(zip([*people, *held], [*swapped, *shuffled], strict=True))
    obj = next(e.obj for e in events if isinstance(e, Place))
    plain, other = (
        BeliefTracker(rules).run(events),
        BeliefTracker(rules).run(renamed(events, names)),
    )
    for order in range(3):
        for chain in permutations(people, order):
            place = plain.answer(chain, obj)
            expected = names[place] if place else None
            assert other.answer(tuple(names[c] for c in chain), obj) == expected


@given(events=two_room())
def test_renaming_commutes_with_answering_in_two_rooms(events: tuple[Event, ...]) -> None:
    check_renaming("tomi", events)


@settings(max_examples=50)
@given(events=chapters())
def test_renaming_commutes_with_answering_in_chapters(events: tuple[Event, ...]) -> None:
    check_renaming("hitom", events)


@settings(max_examples=50)
@given(events=chapters(talk=False))
def test_without_talk_only_the_set_of_thinkers_matters(events: tuple[Event, ...]) -> None:
    beliefs = BeliefTracker("hitom").run(events)
    obj = next(e.obj for e in events if isinstance(e, Place))
    people = random.Random(len(events)).sample(agents(events), 4)
    for size in range(1, 5):
        answers = {beliefs.answer(chain, obj) for chain in permutations(people[:size])}
        assert len(answers) == 1


@given(events=chapters())
def test_the_truth_is_the_replay_of_moves(events: tuple[Event, ...]) -> None:
    replay: dict[str, str] = {}
    for event in events:
        if isinstance(event, Place | Move):
            replay[event.obj] = event.container
    beliefs = BeliefTracker("hitom").run(events)
    assert {obj: beliefs.answer((), obj) for obj in replay} == replay


@given(events=two_room())
def test_one_thinks_what_one_last_saw(events: tuple[Event, ...]) -> None:
    beliefs = BeliefTracker("tomi").run(events)
    obj = next(e.obj for e in events if isinstance(e, Place))
    for who in agents(events):
        last = last_joint_event(beliefs, (who,), obj)
        before = [c for i, o, c in beliefs.places if o == obj and last is not None and i <= last]
        assert beliefs.answer((who,), obj) == (before[-1] if before else None)
