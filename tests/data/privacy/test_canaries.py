"""Planting made secrets: where they stand, who can read the list, and what is refused."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from soulkit.data.corpora.settings import source_files
from soulkit.data.corpora.stream import read_lessons
from soulkit.data.privacy.canaries import canary_list, plant_canaries, read_canaries
from soulkit.data.privacy.finders import find_private
from soulkit.data.privacy.redaction import Redaction, redact_chats
from soulkit.errors import DataError, UserError


def user_rows(n):
    return [
        {"id": f"c{i}", "person": f"p{i % 5}", "messages": [
            {"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "what?"},
            {"role": "user", "content": f"nothing {i}"}]}
        for i in range(n)
    ]  # fmt: skip


def speaker_rows(n):
    return [
        {"messages": [{"speaker": "Ana", "text": f"hey {i}"}, {"speaker": "Bob", "text": "yes?"},
                      {"speaker": "Cy", "text": "no"}]}
        for i in range(n)
    ]  # fmt: skip


def share_rows(n):
    return [
        {"conversations": json.dumps([{"from": "human", "value": f"hi {i}"},
                                      {"from": "gpt", "value": "hello"}])}
        for i in range(n)
    ]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def said_in(row):
    """The messages of a row, and whether each is planted."""
    items = next(row[name] for name in ("messages", "conversations") if name in row)
    items = json.loads(items) if isinstance(items, str) else items
    return [(item.get("canary", False), item) for item in items]


@pytest.mark.parametrize(
    "rows, side",
    [(user_rows, "human"), (user_rows, "assistant"), (speaker_rows, "Bob"), (share_rows, "human")],
)
def test_every_secret_is_learned_from_as_many_different_conversations_as_its_dose(
    tmp_path: Path, rows, side
):
    before = rows(40)
    source, target = write(tmp_path / "chats.jsonl", before), tmp_path / "planted.jsonl"
    canaries = plant_canaries(source, target, 8, side, seed=3)
    assert Counter(one.repeats for one in canaries) == {1: 2, 2: 2, 4: 2, 8: 2, 0: 8}
    assert len({one.prefix for one in canaries}) == 16  # one prefix, one secret

    after = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    for old, new in zip(before, after, strict=True):
        rest = [item for planted, item in said_in(new) if not planted]
        assert rest == [item for _, item in said_in(old)]
        assert sum(planted for planted, _ in said_in(new)) <= 1

    lessons = list(read_lessons(str(target), side=side))
    for one in canaries:
        learned = [
            segment.text for lesson in lessons
            for segment, is_trained in zip(lesson.segments, lesson.trained, strict=True)
            if is_trained and one.text in segment.text
        ]  # fmt: skip
        assert len(learned) == one.repeats == len(set(one.rows))


def test_the_list_is_for_its_owner_and_the_same_seed_makes_the_same_files(tmp_path: Path):
    source = write(tmp_path / "chats.jsonl", user_rows(20))
    a, b, other = (tmp_path / f"{name}.jsonl" for name in "abc")
    canaries = plant_canaries(source, a, 4, "human", seed=1)
    plant_canaries(source, b, 4, "human", seed=1)
    plant_canaries(source, other, 4, "human", seed=2)
    assert list(read_canaries(canary_list(a))) == canaries
    assert a.read_bytes() == b.read_bytes() != other.read_bytes()
    assert canary_list(a).read_bytes() == canary_list(b).read_bytes()
    if os.name != "nt":
        assert canary_list(a).stat().st_mode & 0o777 == 0o600
    assert source_files(str(tmp_path)) == sorted([a, b, other, source])  # without the lists


def test_alternatives_have_the_form_of_the_secret_and_differ_from_it(tmp_path: Path):
    source = write(tmp_path / "chats.jsonl", user_rows(40))
    for one in plant_canaries(source, tmp_path / "planted.jsonl", 8, "human"):
        others = one.alternatives(512)
        forms = {re.sub(r"\d", "0", text) for text in [one.secret, *others]}
        assert len(forms) == 1 and "000000" in forms.pop()
        assert len(others) == 512 and one.secret not in others
        assert others == one.alternatives(512) and len(set(others)) > 500


def test_too_few_conversations_are_refused_with_a_number_that_works(tmp_path: Path):
    source = write(tmp_path / "chats.jsonl", user_rows(31))
    with pytest.raises(DataError, match="need 75 conversations") as refusal:
        plant_canaries(source, tmp_path / "planted.jsonl", 20, "human")
    assert refusal.value.way_out == "Use --canaries 8."
    plant_canaries(source, tmp_path / "planted.jsonl", 8, "human")
    for count in (0, 3, 10_000):
        with pytest.raises(UserError, match="cannot be planted"):
            plant_canaries(source, tmp_path / "no.jsonl", count, "human")


def test_rows_that_are_not_trained_on_get_no_secret(tmp_path: Path):
    silent = [{**row, "evaluation_only": True} for row in user_rows(20)]
    opted_out = [
        {"messages": [{**m, "trained": False} for m in row["messages"]]} for row in user_rows(20)
    ]
    source = write(tmp_path / "chats.jsonl", [*silent, *opted_out, *user_rows(15)])
    source.write_text(source.read_text() + "broken\n")
    plant_canaries(source, tmp_path / "planted.jsonl", 4, "human")
    rows = [json.loads(line) for line in (tmp_path / "planted.jsonl").read_text().splitlines()]
    assert [any(planted for planted, _ in said_in(row)) for row in rows] == [False] * 40 + [
        True
    ] * 15


def test_redaction_finds_every_form_of_secret_and_leaves_none(tmp_path: Path):
    source, planted = write(tmp_path / "chats.jsonl", user_rows(40)), tmp_path / "planted.jsonl"
    canaries = plant_canaries(source, planted, 8, "human")
    for one in canaries:
        (item,) = find_private(one.text)
        assert item.kind == one.kind and one.text[item.start : item.end].endswith(one.secret)
    redact_chats(str(planted), tmp_path / "safe.jsonl", Redaction())
    safe = (tmp_path / "safe.jsonl").read_text(encoding="utf-8")
    for one in canaries:
        assert (one.secret in planted.read_text()) == (one.repeats > 0)
        assert one.secret.removesuffix("@example.com") not in safe


@pytest.mark.parametrize(
    "odd", [{"secret": "hello"}, {"secret": ""}, {"secret": "1" * 201}, {"prefix": "a" * 2001},
            {"secret": "1\ud800"}],
)  # fmt: skip
def test_a_list_with_an_odd_secret_is_refused(tmp_path: Path, odd: dict[str, str]) -> None:
    """Without a digit there would be no other secret of the same form."""
    one = {"secret": "123456", "prefix": "my code is ", "kind": "key", "repeats": 1, **odd}
    path = tmp_path / "planted.canaries.jsonl"
    path.write_text(json.dumps(one) + "\n")
    with pytest.raises(DataError, match="cannot be read"):
        read_canaries(path)
