"""Records on disk: every text once, equal when read back, old lines too, newer ones refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from soulkit.errors import DataError
from soulkit.report.episode_search import episode_places, records_at
from soulkit.runs.jsonl import has_lines, lines_in, pack_lines, packed_file
from soulkit.runs.records import (
    CONTROLS,
    RecordWriter,
    dev_after,
    load_controls,
    load_records,
    newest_dev,
    record_line,
    record_of_line,
    scored_keys,
    stream_records,
    without_tokens,
)
from soulkit.types import (
    Completion,
    ControlRecord,
    Episode,
    Failure,
    Feedback,
    Line,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    Usage,
    Verdict,
)

RECORDED = Path(__file__).parents[1] / "recorded"
OLD = (
    *(RECORDED / name / "episodes.jsonl" for name in ("before", "after", "ditto", "judged")),
    RECORDED / "scene.jsonl",
)

# -- any record ------------------------------------------------------------------------------------

WORDS = st.sampled_from(["", "A", "one two", "a line that is long enough", "sie sagte „Ja“\n"])
TEXTS = st.one_of(WORDS, st.text(st.characters(codec="utf-8"), max_size=30))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 3)
IDS = st.lists(st.integers(0, 9), max_size=4).map(tuple)
USAGES = st.builds(
    Usage, calls=COUNTS, prompt_tokens=COUNTS, completion_tokens=COUNTS, seconds=NUMBERS,
    cost=st.none() | NUMBERS,
)  # fmt: skip
SEGMENTS = st.builds(
    Segment, st.sampled_from(["system", "user", "assistant"]), TEXTS, st.none() | TEXTS, IDS
)
COMPLETIONS = st.builds(
    Completion, text=TEXTS, prompt_ids=IDS, token_ids=IDS,
    logprobs=st.lists(NUMBERS, max_size=2).map(tuple), stop_reason=TEXTS, reasoning=TEXTS,
    usage=USAGES, dropped=st.lists(TEXTS, max_size=1).map(tuple), policy=TEXTS,
)  # fmt: skip
CONTEXTS = st.lists(SEGMENTS, max_size=4).map(tuple)
LINES = st.lists(st.builds(Line, TEXTS, TEXTS), max_size=3).map(tuple)
METRICS = st.dictionaries(TEXTS, st.none() | NUMBERS, max_size=2)
VERDICTS = st.builds(
    Verdict, judge=TEXTS, purpose=TEXTS, said=st.dictionaries(TEXTS, TEXTS | COUNTS, max_size=2),
    problem=TEXTS, replies=COUNTS,
)  # fmt: skip
SCORES = st.builds(
    Score, value=st.none() | NUMBERS, reward=st.none() | NUMBERS, metrics=METRICS, status=TEXTS,
    words=TEXTS, protocol=st.sampled_from(["paper", "reference"]),
    verdicts=st.lists(VERDICTS, max_size=2).map(tuple),
)  # fmt: skip
FEEDBACK = st.builds(Feedback, text=TEXTS, author=TEXTS, leak=TEXTS, blind=st.none() | NUMBERS)


@st.composite
def talks(draw: st.DrawFn) -> Trace:
    """A trace as conversations make it: contexts grow, unless a turn saw something else."""
    context: tuple[Segment, ...] = draw(CONTEXTS)
    turns = []
    for _ in range(draw(COUNTS)):
        reply = draw(COMPLETIONS)
        turns.append(Turn(context, reply))
        memory = reply.text if draw(st.booleans()) else draw(TEXTS)
        heard_words = Segment("assistant", memory, token_ids=reply.token_ids)
        context = (*context, heard_words, *draw(CONTEXTS))
        if draw(COUNTS) == 0:
            context = context[draw(COUNTS) :]
    return Trace(draw(TEXTS), tuple(turns))


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = st.sampled_from(["draft", "refined", "gold"])
    task, example, rollout = draw(TEXTS), draw(TEXTS), draw(COUNTS)
    same = draw(st.booleans())
    episode = Episode(
        example_id=example if same else draw(TEXTS), task=task if same else draw(TEXTS),
        kind=draw(kind), rollout=rollout if same else draw(COUNTS), step=draw(COUNTS),
        traces=tuple(draw(st.lists(talks(), max_size=2))), transcript=draw(LINES),
        stop=draw(TEXTS), failure=draw(st.none() | st.builds(Failure, TEXTS, TEXTS)),
        usage=draw(USAGES), notes=draw(st.dictionaries(TEXTS, COUNTS | TEXTS, max_size=2)),
    )  # fmt: skip
    return Record(
        key=draw(TEXTS), task=task, example_id=example, rollout=rollout, kind=draw(kind),
        episode=episode, score=draw(SCORES), cluster=draw(TEXTS), step=draw(COUNTS),
        tags=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
        given=draw(st.none() | FEEDBACK), received=draw(st.none() | FEEDBACK),
        prompt=draw(TEXTS), gold=draw(TEXTS),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(records())
def test_any_record_is_read_back_as_it_was(tmp_path_factory: Any, record: Record) -> None:
    path = tmp_path_factory.mktemp("records") / "episodes.jsonl"
    writer = RecordWriter(path)
    writer.write(record)
    writer.close()
    assert load_records(path) == [record]
    assert load_records(path, light=True) == [without_tokens(record)]
    line = json.loads(path.read_text())
    assert record_of_line(line, path, 1) == record


# -- what a line holds -----------------------------------------------------------------------------


def scene(turns: int = 10) -> Record:
    """A conversation in which both sides say something new in every turn."""
    opening = "Play somebody who sells a piano. " * 20
    context: tuple[Segment, ...] = (Segment("system", opening, opening),)
    taken, lines = [], []
    for number in range(turns):
        context = (*context, Segment("user", f"They said: line {number} of the other side"))
        reply = Completion(text=f"line {number} of the actor's side", usage=Usage(calls=1))
        taken.append(Turn(context, reply))
        lines += [Line("buyer", context[-1].text), Line("seller", reply.text)]
        context = (*context, Segment("assistant", reply.text))
    episode = Episode(
        example_id="e", task="t", traces=(Trace("seller", tuple(taken)),), transcript=tuple(lines)
    )
    score = Score(value=0.5, reward=0.5)
    return Record(
        key="0/e/0/draft", task="t", example_id="e", rollout=0, kind="draft", episode=episode,
        score=score, prompt=f"{opening}\n\nThey said: line 0 of the other side",
    )  # fmt: skip


def test_every_text_stands_once() -> None:
    record = scene()
    text = json.dumps(record_line(record))
    for line in record.episode.transcript:
        assert text.count(line.text) == 1
    assert text.count("sells a piano") == 20
    assert record_line(record)["episode"]["traces"][0]["turns"][3] == {
        "reply": 8,
        "usage": {"calls": 1},
    }


def test_a_line_is_as_long_as_its_words() -> None:
    """A turn more costs its words and 170 bytes, however many there were before."""
    short, long = (
        len(json.dumps(record_line(scene(turns)), separators=(",", ":"))) for turns in (50, 100)
    )
    words = sum(len(line.text) for line in scene(100).episode.transcript[100:])
    assert (long - short - words) / 50 < 170


def test_feedback_in_a_slot_is_no_second_prompt() -> None:
    opening = Segment("system", "Play it. Notes: be kind. Begin.", "Play it. Begin.")
    turn = Turn((opening,), Completion(text="Well."))
    episode = replace(scene().episode, traces=(Trace("seller", (turn,)),), transcript=())
    record = replace(scene(), episode=episode)
    message = record_line(record)["episode"]["messages"][0]
    assert "bare" not in message and message["slot"] == [9, 25]


# -- files of other versions -----------------------------------------------------------------------


def test_a_line_without_a_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(TypeAdapter(Record).dump_python(scene(), mode="json")) + "\n")
    for light in (False, True):
        with pytest.raises(DataError, match=r"Line 1 of .* is not a record of an episode \(schema"):
            load_records(path, light=light)


@pytest.mark.parametrize(
    ("schema", "words"),
    [("soulkit/episodes@2", "Another version"), ("soulkit/controls@1", "do not match its name")],
)
def test_other_schemas_are_refused_by_name(tmp_path: Path, schema: str, words: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps({**record_line(scene()), "schema": schema}) + "\n")
    for read in (load_records, partial(load_records, light=True), episode_places):
        with pytest.raises(DataError, match=schema) as error:
            read(path)
        assert words in error.value.why


TURNS = ("traces", 0, "turns")
DAMAGES: dict[str, tuple[tuple[str | int, ...], dict[str, Any]]] = {
    "a reply": ((*TURNS, 0), {"reply": 99}),
    "a line": (("transcript", 0), {"seat": "buyer", "message": -1}),
    "a share": ((*TURNS, 1), {"shared": 9, "adds": []}),
    "a negative share": ((*TURNS, 1), {"shared": -1, "adds": []}),
    "ids": ((*TURNS, 0), {"shared_ids": 9}),
    "a slot": (("messages", 0), {"slot": [5, 3]}),
}
"""What is not there → where it is named, and what that says then."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_message_that_is_not_there_is_named(tmp_path: Path, damage: str) -> None:
    line = json.loads(json.dumps(record_line(scene())))
    where, change = DAMAGES[damage]
    place = line["episode"]
    for step in where:
        place = place[step]
    place |= change
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"Line 1 of .* is not a record of an episode"):
        load_records(path)


# -- held-out rows ---------------------------------------------------------------------------------


def test_the_dev_episodes_of_any_weights_are_those_of_their_step(tmp_path: Path) -> None:
    several = [replace(scene(), key=f"{step}/e/0/draft", step=step) for step in (0, 1, 3)]
    _write(tmp_path / "dev.jsonl", *several)
    assert newest_dev(tmp_path) == dev_after(tmp_path, 4) == several[2:]
    assert dev_after(tmp_path, 1) == several[:1] and dev_after(tmp_path, 3) == []
    assert dev_after(tmp_path / "elsewhere", 1) == []


# -- controls --------------------------------------------------------------------------------------


def test_controls_have_a_schema(tmp_path: Path) -> None:
    control = ControlRecord(
        task="t", example_id="e", rollout=0, name="human", score=Score(value=1.0, reward=None)
    )
    writer = RecordWriter(tmp_path / CONTROLS)
    writer.write(control)
    writer.close()
    line = json.loads((tmp_path / CONTROLS).read_text())
    assert line["schema"] == "soulkit/controls@1" and load_controls(tmp_path) == [control]
    (tmp_path / CONTROLS).write_text(json.dumps({**line, "schema": "soulkit/controls@7"}) + "\n")
    with pytest.raises(DataError, match="controls@7"):
        load_controls(tmp_path)


# -- packed files ----------------------------------------------------------------------------------


def _write(path: Path, *records: Record) -> None:
    writer = RecordWriter(path)
    writer.write(*records)
    writer.close()


def test_packed_lines_are_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    several = [replace(scene(), key=f"0/{number}/0/draft") for number in range(5)]
    _write(path, *several)
    assert not pack_lines(path), "a small file stays plain"
    places = [place.offset for place in episode_places(path)]
    assert pack_lines(path, least=1) and not path.exists()
    assert has_lines(path) and packed_file(path).is_file()
    assert load_records(path) == several
    assert load_records(path, light=True) == [without_tokens(one) for one in several]
    assert scored_keys(path) == {one.key: True for one in several}
    assert [place.offset for place in episode_places(path)] == places
    chosen = [episode_places(path)[number] for number in (3, 1)]
    assert records_at(path, chosen) == [several[3], several[1]]


def test_what_is_played_again_comes_after_what_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    lost = replace(scene(), score=Score(value=None, reward=None, status="unscored", reason="judge"))
    _write(path, lost)
    pack_lines(path, least=1)
    _write(path, scene())
    assert load_records(path) == [scene()] and scored_keys(path) == {scene().key: True}
    assert pack_lines(path, least=10**9), "packed lines and plain ones become one file"
    assert not path.exists() and load_records(path) == [scene()]
    assert len(list(stream_records(path))) == 2, "the line that was replaced is kept"


def test_a_packing_that_was_killed_before_its_end_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    _write(path, scene())
    plain = path.read_bytes()
    pack_lines(path, least=1)
    path.write_bytes(plain)  # as if it died before the plain file was removed
    assert load_records(path) == [scene()]
    pack_lines(path)
    assert len(list(stream_records(path))) == 1


def test_a_packing_that_was_killed_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    before = b"".join(b'{"key":"%s"}\n' % os.urandom(1000).hex().encode() for _ in range(3000))
    path.write_bytes(before)
    script = "import sys; from pathlib import Path; from soulkit.runs.jsonl import pack_lines\n"
    script += "print('begun', flush=True); pack_lines(Path(sys.argv[1]), 1)"
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        while process.poll() is None and len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.001)
        process.kill()
    assert b"".join(lines_in(path)) == before
    pack_lines(path, least=1)
    assert b"".join(lines_in(path)) == before
    assert [file.name for file in tmp_path.iterdir()] == [packed_file(path).name]


def test_only_the_lines_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    _write(path, *(replace(scene(), key=f"0/é{number}/0/draft") for number in range(3)))
    damaged = path.read_text().replace('"turns":[', '"turns":[7,', 1)
    path.write_text(damaged)
    assert [one.key for one in stream_records(path, keys={"0/é2/0/draft"})] == ["0/é2/0/draft"]
    with pytest.raises(DataError, match="Line 1"):
        load_records(path)


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "empty", "longer"])
def test_packed_lines_that_are_damaged_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "episodes.jsonl"
    _write(path, *(replace(scene(), key=f"0/{number}/0/draft") for number in range(5)))
    pack_lines(path, least=1)
    packed = packed_file(path)
    good = packed.read_bytes()
    half = len(good) // 2
    packed.write_bytes({
        "cut": good[:half], "changed": good[:half] + bytes([good[half] ^ 255]) + good[half + 1 :],
        "other": b"no gzip", "empty": b"", "longer": good + b"and more",
    }[damage])  # fmt: skip
    for read in (load_records, scored_keys, episode_places):
        with pytest.raises(DataError, match=r"jsonl\.gz' cannot be unpacked"):
            read(path)


def test_lines_that_are_packed_while_they_are_read_are_read(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    several = [replace(scene(), key=f"0/{number}/0/draft") for number in range(3)]
    _write(path, *several)
    stream = stream_records(path)
    records = [next(stream)]
    pack_lines(path, least=1)
    assert [*records, *stream] == several


@pytest.mark.parametrize("begin", ['{"key":"\xff', '{"key":"a\tb', "[" * 100_000])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, begin: str) -> None:
    path = tmp_path / "episodes.jsonl"
    _write(path, scene(), replace(scene(), key="0/last/0/draft"))
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + begin.encode("latin-1") + b'"}\n' + last)
    for read in (load_records, scored_keys, episode_places):
        with pytest.raises(DataError, match=r"jsonl:2"):
            read(path)
    with pytest.raises(DataError, match=r"jsonl:2"):
        list(stream_records(path, keys={"0/last/0/draft"}))
