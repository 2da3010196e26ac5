"""person_chat: who speaks first, how a conversation ends, and what each model reads."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import RowError
from soulkit.tasks.kit.person.brief import END_MARK, START
from tests.support.road import task_of
from tests.support.servers.openai_server import Body
from tests.support.table import asked_of, in_turn, recorded

ROW = {"persona": "Writes in small letters.", "scenario": "You want your parcel.",
       "facts": {"city": "Riga"}, "persona_id": "u7", "scenario_id": "parcel"}  # fmt: skip


def judge(body: Body) -> str:
    return str(task_of("person_chat").verdict("PersonRatings", perfect=True))


def played(person: Any, **fields: Any) -> tuple[Any, list[Body]]:
    task = task_of("person_chat")
    (record,), requests = recorded(
        task, task.example({**ROW, **fields}), actor=person, partner="One moment.", judge=judge
    )
    return record, requests


def test_the_person_writes_first_and_ends_with_a_mark_that_others_do_not_see() -> None:
    record, requests = played(in_turn(["where is it", f"ok thanks {END_MARK} bye"]))
    assert [(line.seat, line.text) for line in record.episode.transcript] == [
        ("person", "where is it"), ("agent", "One moment."), ("person", "ok thanks"),
    ]  # fmt: skip
    assert (record.episode.stop, record.score.value, record.cluster) != ("max_turns", None, "")
    first = asked_of(requests, "actor")[0]["messages"]
    assert first[1]["content"] == START and END_MARK in first[0]["content"]
    agent = asked_of(requests, "partner")[0]["messages"]
    assert [m["role"] for m in agent] == ["system", "user"]
    assert not any(word in str(agent) for word in (END_MARK, "parcel", "Riga", START))
    assert END_MARK not in str(asked_of(requests, "judge")[0]["messages"])


def test_the_agents_opening_replaces_the_start() -> None:
    record, requests = played(f"where is it {END_MARK}", opening="Hello, this is Post Express.")
    assert record.episode.transcript[0].text == "Hello, this is Post Express."
    first = asked_of(requests, "actor")[0]["messages"]
    assert [m["content"] for m in first[1:]] == ["Hello, this is Post Express."]


@pytest.mark.parametrize(
    ("person", "stop", "status", "lines"),
    [("", "empty", "empty", 0), (END_MARK, "ended", "empty", 1), ("hm", "max_turns", "ok", 15)],
)
def test_a_conversation_ends(person: str, stop: str, status: str, lines: int) -> None:
    record, _ = played(person)
    assert (record.episode.stop, record.score.status) == (stop, status)
    assert len(record.episode.transcript) == lines


def test_faults_are_noted_and_the_value_stands_without_them() -> None:
    faulty, _ = played(in_turn(["my name is Bo", END_MARK]), facts={"name": "Ada"})
    kinds = {fault["kind"] for fault in faulty.episode.notes["faults"]}
    assert kinds == {"contradicts_persona", "swallowed_last_line"}
    assert faulty.score.metrics["faulty"] == 1 and "without_faults" not in faulty.score.metrics
    clean, _ = played(in_turn(["where is it", f"ok thanks {END_MARK}"]))
    assert "faults" not in clean.episode.notes and clean.score.metrics["faulty"] == 0
    assert clean.score.metrics["without_faults"] == clean.score.value


def test_rows_of_one_person_form_a_cluster_and_facts_must_be_an_object() -> None:
    task = task_of("person_chat")
    one, other = task.example(ROW), task.example({**ROW, "scenario": "You want a refund."})
    assert one.cluster == other.cluster and one.id != other.id
    text = task.example({**ROW, "facts": '{"city": "Riga"}'})
    assert text.id == one.id
    with pytest.raises(RowError):
        task.example({**ROW, "facts": ["Riga"]})
