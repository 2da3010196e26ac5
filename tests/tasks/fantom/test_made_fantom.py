"""Made conversations: what is asked can be read off them, and every kind of question occurs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from soulkit.data.literals import parse_candidates
from soulkit.tasks.fantom.rows import COMING, RETURNING, TEXTS, rows
from soulkit.tasks.fantom.sets import part_of

ROWS = rows(600, 4)


def lines(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(line.split(": ", 1)) for line in row["context"].splitlines()]  # type: ignore[misc]


def there_at(row: dict[str, Any], number: int) -> set[str]:
    """Who is there at an utterance, read from nothing but the words of the conversation."""
    dialogue = lines(row)
    everyone = {who for who, _ in dialogue}
    late = {who for who, text in dialogue if text in COMING}
    there = everyone - late
    for who, text in dialogue[:number]:
        there = there - {who} if text in TEXTS["leaving"] else there
        there = there | {who} if text in (*COMING, *RETURNING) else there
    return there


def test_who_knows_follows_from_the_conversation() -> None:
    questions = [r for r in ROWS if r["question_type"].endswith(":list")]
    for row in questions:
        mentions = [row["events"]["told"], *row["events"]["retold"]]
        aware = set().union(*(there_at(row, n) for n in mentions))
        assert set(parse_candidates(row["correct_answer"])) == aware
        everyone = {who for who, _ in lines(row)}
        first = {who for who, _ in lines(row)[: row["events"]["told"] - 1]}
        assert {lines(row)[row["events"]["told"] - 1][0]} <= aware & first, "nobody appears unsaid"
        assert set(parse_candidates(row["wrong_answer"])) == everyone - aware
        assert (row["missed_info_accessibility"] == "accessible") == (aware == everyone)


def test_the_information_stands_where_it_is_said_to() -> None:
    for row in ROWS:
        if row["question_type"] == "fact":
            utterance = lines(row)[row["events"]["told"] - 1][1]
            shared = set(row["correct_answer"].lower().rstrip(".").split()) & set(
                utterance.lower().rstrip(".").split()
            )
            assert len(shared) >= 3


def test_yes_or_no_agrees_with_the_lists() -> None:
    lists = {
        (r["set_id"], r["question_type"].split(":")[1]): parse_candidates(r["correct_answer"])
        for r in ROWS
        if r["question_type"].endswith(":list")
    }
    for row in ROWS:
        if row["question_type"].endswith(":binary"):
            kind = row["question_type"].split(":")[1]
            who = row["question"].split()[1]
            assert (row["correct_answer"] == "yes") == (who in lists[row["set_id"], kind])


def test_everything_occurs() -> None:
    kinds = Counter(r["question_type"] for r in ROWS)
    assert set(kinds) == {
        "fact",
        *(f"tom:{k}:{form}" for k in ("answerability", "info_accessibility")
          for form in ("list", "binary")),
        *(f"tom:belief:{a}{m}" for a in ("accessible", "inaccessible")
          for m in ("", ":multiple-choice")),
    }  # fmt: skip
    golds = Counter(r["correct_answer"] for r in ROWS if r["question_type"].endswith("choice"))
    assert min(golds["0"], golds["1"]) > 0.35 * golds.total()
    assert {r["tom_type"] for r in ROWS if "tom_type" in r} == {"first-order", "second-order"}
    assert any(r["events"]["retold"] for r in ROWS)


def test_yes_is_no_better_a_guess_than_no() -> None:
    for seed in range(5):
        questions = [r for r in rows(1500, seed) if r["question_type"].endswith("binary")]
        answers = Counter(r["correct_answer"] for r in questions)
        assert 0.45 < answers["yes"] / answers.total() < 0.55
    lacking = {(r["set_id"], name) for r in ROWS if r["question_type"].endswith(":list")
               for name in parse_candidates(r["wrong_answer"])}  # fmt: skip
    denied = {(r["set_id"], r["question"].split()[1]) for r in ROWS
              if r["question_type"].endswith("binary") and r["correct_answer"] == "no"}  # fmt: skip
    last = ROWS[-1]["set_id"]
    assert {d for d in denied if d[0] != last} == {x for x in lacking if x[0] != last}


def test_rows_know_the_size_of_their_set() -> None:
    last = ROWS[-1]["set_id"]
    counts = Counter(
        (r["set_id"], r["missed_info_accessibility"], part_of(r)) for r in ROWS
    )  # fmt: skip
    for row in ROWS:
        place = (row["set_id"], row["missed_info_accessibility"])
        sizes = (counts[*place, "strict"], counts[*place, "belief"])
        assert row["set_id"] == last or (row["set_size"], row["set_beliefs"]) == sizes


def test_rows_are_a_prefix_of_more_and_differ_by_seed() -> None:
    assert rows(50, 4) == ROWS[:50] and rows(50, 5) != ROWS[:50]
    assert len({r["context"] for r in ROWS}) > 12
