"""Streams of lessons: mixing, shuffling, positions, and what changed files do to them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.data.corpora import source
from soulkit.data.corpora.file_rows import index_file
from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.source import RowShare, SourceTurns
from soulkit.data.corpora.stream import LessonStream, read_lessons
from soulkit.data.files import PACKED
from soulkit.errors import ConfigError, DataError
from tests.support.chats import chat, jsonl, parquet
from tests.support.reporting import Heard


def keys(lessons: Sequence[Lesson]) -> list[str]:
    return [lesson.key for lesson in lessons]


def opened(*sources: Any, seed: int = 3, window: int = 7, side: str = "human") -> LessonStream:
    return LessonStream.open(sources, seed=seed, window=window, side=side)


def restored(position: Any) -> Any:
    """What a checkpoint gives back."""
    return json.loads(json.dumps(position))


@pytest.fixture
def mixture(tmp_path: Path) -> list[Any]:
    """Every kind of file, several shards, a broken line, blank lines."""
    lines = [chat(n) for n in range(40)]
    jsonl(tmp_path / "a.jsonl", [*lines[:20], "{broken", "", *lines[20:]])
    for shard in range(3):
        rows = [chat(100 * shard + n) for n in range(25)]
        parquet(tmp_path / "b" / f"train-{shard}.parquet", rows, group=[4, 10, 100][shard])
    (tmp_path / "c.json").write_text(json.dumps([chat(n) for n in range(12)]))
    return [f"{tmp_path / 'a.jsonl'}:1.5", tmp_path / "b", f"{tmp_path / 'c.json'}:0.5"]


def test_a_pass_has_every_row_once_in_another_order(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(50)])
    stream = opened(path)
    first, second = keys(stream.take(50)), keys(stream.take(50))
    in_file = [f"a.jsonl:{n + 1}" for n in range(50)]
    assert sorted(first) == sorted(second) == sorted(in_file)
    assert len({tuple(first), tuple(second), tuple(in_file)}) == 3
    assert keys(opened(path).take(50)) == first
    assert keys(opened(path, seed=4).take(50)) != first
    assert keys(opened(path, window=1).take(50)) == in_file


def test_rows_of_a_window_come_from_one_stretch_and_stretches_in_any_order(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(40)])
    numbers = [int(key.partition(":")[2]) - 1 for key in keys(opened(path, window=10).take(40))]
    stretches = [sorted(numbers[at : at + 10]) for at in range(0, 40, 10)]
    assert sorted(stretches) == [list(range(at, at + 10)) for at in range(0, 40, 10)]
    assert stretches != sorted(stretches)


def test_every_position_goes_on_as_if_nothing_had_happened(mixture: list[Any]):
    stream = opened(*mixture)
    positions, lessons = [], []
    for _ in range(260):
        positions.append(restored(stream.position()))
        lessons += stream.take(1)
    again = opened(*mixture)
    for at in range(260):
        again.resume(positions[at])
        assert again.take(min(25, 260 - at)) == lessons[at : at + 25], at
    assert len(json.dumps(positions[-1])) < 3_000


@pytest.mark.parametrize("steps", [(1, 5, 30, 90), (64, 64)])
def test_how_many_are_taken_at_once_does_not_matter(mixture: list[Any], steps: Sequence[int]):
    stream, one_by_one = opened(*mixture), opened(*mixture)
    for count in steps:
        assert stream.take(count) == [one_by_one.take(1)[0] for _ in range(count)]
    assert stream.position() == one_by_one.position()


CHILD = """
import json, sys
from soulkit.data.corpora.stream import LessonStream
sources, position = json.loads(sys.argv[1]), json.loads(sys.argv[2])
stream = LessonStream.open(sources, seed=3, window=7, side="human")
if position:
    stream.resume(position)
while True:
    before = stream.position()
    print(json.dumps([before, [lesson.key for lesson in stream.take(3)]]), flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_from_its_last_position(mixture: list[Any]):
    sources = [str(source) for source in mixture]
    expected = keys(opened(*sources).take(120))
    rng, position, done = random.Random(5), None, 0
    for _ in range(2):
        command = [sys.executable, "-c", CHILD, json.dumps(sources), json.dumps(position)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in islice(child.stdout, rng.randint(3, 12)):
                position, names = json.loads(line)
                assert names == expected[done : done + 3]
                done += 3
            os.kill(child.pid, signal.SIGKILL)
        done -= 3  # the step under way is taken again
    assert done > 6


# -- mixing ------------------------------------------------------------------------------------


def test_ratios_are_passes(mixture: list[Any]):
    stream = opened(*mixture)
    assert stream.sizes == {"a": 41, "b": 75, "c": 12}
    weights = {"a": 1.5 * 41, "b": 75.0, "c": 6.0}
    lessons = stream.take(1425)  # ten rounds, less the broken line in fifteen passes
    rounds = 1440 / sum(weights.values())
    counts = Counter(lesson.source for lesson in lessons)
    for name, weight in weights.items():
        assert counts[name] == pytest.approx(rounds * weight, abs=17 if name == "a" else 2)
    # The fixed half is one half, in every pass the same.
    assert len({lesson.key for lesson in lessons if lesson.source == "c"}) == 6
    assert stream.unusable == {"a": {"the line is not JSON": 1}, "b": {}, "c": {}}


def test_one_and_a_half_passes_are_a_whole_one_and_half_of_the_next(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(30)])
    other = jsonl(tmp_path / "b.jsonl", [chat(n) for n in range(30)])
    lessons = opened(f"{path}:1.5", other).take(75)
    times = Counter(lesson.key for lesson in lessons if lesson.source == "a")
    assert sorted(times.values()) == [1] * 15 + [2] * 15


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=6), st.integers(0, 9))
def test_shares_hold_over_any_stretch(weights, seed):
    turns = SourceTurns(weights, seed)
    order = [turns.next() for _ in range(400)]
    resumed = SourceTurns(weights, seed, taken=[order[:150].count(n) for n in range(len(weights))])
    assert [resumed.next() for _ in range(250)] == order[150:]
    for start, end in ((0, 400), (37, 390), (200, 300)):
        for place, weight in enumerate(weights):
            due = (end - start) * weight / sum(weights)
            assert abs(order[start:end].count(place) - due) <= 2 + len(weights)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 0.99), st.integers(1, 3500), st.integers(0, 5))
def test_a_part_has_its_size_to_the_row(ratio, rows, seed):
    part = RowShare(ratio, rows, f"{seed}")
    members = [n for n in range(rows) if n in part]
    assert len(members) in {max(int(rows * ratio), 1), max(int(rows * ratio), 1) + 1}
    assert members == [n for n in range(rows) if n in RowShare(ratio, rows, f"{seed}")]


def test_a_part_of_a_file_with_blank_lines_is_drawn_among_its_rows(tmp_path: Path):
    rows = [json.dumps(chat(n)) for n in range(1300)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n\n".join(rows))  # more lines than rows by far
    for window in (1, 100, 10_000):
        stream = opened(f"{path}:0.5", window=window)
        first = {lesson.key for lesson in stream.take(600)}
        assert len(first | {lesson.key for lesson in stream.take(800)}) == pytest.approx(
            650, abs=40
        )


def test_ordinals_beyond_the_span_that_was_stated_are_drawn_as_well():
    # A data set of the hub may state fewer rows than it has.
    part = RowShare(0.5, 10, "s")
    assert sum(n in part for n in range(2000, 3000)) == 500


# -- changes and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_changed_file_is_refused_by_name(tmp_path: Path, suffix: str):
    write = jsonl if suffix == "jsonl" else parquet
    path = write(tmp_path / f"a.{suffix}", [chat(n) for n in range(30)])
    stream = opened(path)
    stream.take(8)
    position, times = restored(stream.position()), path.stat()
    write(path, [chat(n if n != 17 else 71) for n in range(30)])  # of the same size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=rf"'a\.{suffix}' has changed"):
        opened(path).resume(position)


def test_another_stream_is_refused_with_what_differs(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(9)])
    position = restored(opened(path).position())
    others = {
        "seed was 3 and is now 4": opened(path, seed=4), "window was 7": opened(path, window=8),
        "sources were a:1 and are now a:2": opened(f"{path}:2"),
        "cannot be read: KeyError": opened(path),
    }  # fmt: skip
    for why, stream in others.items():
        state = {} if "KeyError" in why else position
        with pytest.raises(DataError) as error:
            stream.resume(state)
        assert why in error.value.why


def test_a_new_shard_is_refused_by_name(tmp_path: Path):
    folder = tmp_path / "chats"
    jsonl(folder / "train-0.jsonl", [chat(n) for n in range(9)])
    position = opened(folder).position()
    jsonl(folder / "train-1.jsonl", [chat(n) for n in range(9)])
    with pytest.raises(DataError, match=r"'train-1\.jsonl' is new"):
        opened(folder).resume(position)


def test_a_source_without_a_lesson_ends_the_stream_with_reasons(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 5)
    for read in (lambda: opened(path).take(1), lambda: list(read_lessons(path, side="human"))):
        with pytest.raises(DataError) as error:
            read()
        assert "5 × it has no list of messages" in error.value.why


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_unknown_name_in_the_last_row_is_told_before_the_first(tmp_path: Path, suffix: str):
    rows = [chat(n, data_source="wildchat") for n in range(30)]
    write = jsonl if suffix == "jsonl" else parquet
    path = write(tmp_path / f"a.{suffix}", [*rows, chat(31, data_source="wildchats")])
    with pytest.raises(DataError) as error:
        LessonStream.open([path])
    assert "Did you mean 'wildchat'?" in error.value.why
    assert len(LessonStream.open([path], side="human").take(31)) == 31


def test_rows_of_one_file_may_be_of_several_sides(tmp_path: Path):
    names = ["wildchat", "tom_hitom", "human_llm", "psych101"]
    path = jsonl(tmp_path / "a.jsonl", [chat(n, data_source=names[n % 4]) for n in range(8)])
    for lesson in read_lessons(path):
        human = lesson.source in ("wildchat", "psych101")
        learned = [s.text for s, yes in zip(lesson.segments, lesson.trained, strict=True) if yes]
        assert any("question" in text for text in learned) == human


def test_settings_of_a_source_win_over_those_of_the_run(tmp_path: Path):
    row = chat(1)
    row["messages"].insert(0, {"role": "system", "content": "S"})
    path = jsonl(tmp_path / "a.jsonl", [row])
    one, other = (
        LessonStream.open(
            [{"path": str(path), **more}], side="human", strip_system=True, turns=1
        ).take(1)[0]
        for more in ({}, {"side": "assistant", "strip_system": False, "turns": 9, "name": "n"})
    )
    assert [s.role for s in one.segments] == ["user", "assistant"]
    assert one.segments[0].text.endswith("answer 1\n(It goes on from here:)")
    assert (other.source, other.segments[0].text) == ("n", "S")


@pytest.mark.parametrize("sources", [[], ["nowhere.jsonl"], ["*.nothing"], ["empty.jsonl"]])
def test_sources_that_are_none_are_refused(tmp_path: Path, monkeypatch, sources: list[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises((DataError, ConfigError)):
        LessonStream.open(sources, side="human")
    with pytest.raises(ConfigError):
        LessonStream.open([jsonl(tmp_path / "a.jsonl", [chat(1)])], side="human", window=0)


def test_the_first_lessons_of_each_source_leave_the_stream_where_it_is(mixture: list[Any]):
    stream, untouched = opened(*mixture), opened(*mixture)
    for _ in range(3):
        heads = stream.heads(3)
        assert stream.position() == untouched.position()
        assert stream.take(20) == untouched.take(20)
    assert {name: keys(some) for name, some in heads.items()} == {
        "a": [f"a.jsonl:{n}" for n in (1, 2, 3)],
        "b": [f"train-0.parquet:{n}" for n in (1, 2, 3)],
        "c": [f"c.json:{n}" for n in (1, 2, 3)],
    }
    for path in mixture:
        (head,) = opened(path).heads(3).values()
        assert list(head) == list(islice(read_lessons(path, side="human"), 3))


def test_what_takes_long_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(30)])
    for least, lines in ((1 << 30, 0), (10, 1)):
        monkeypatch.setattr(source, "LONG_TO_READ", least)
        words: list[str] = []
        LessonStream.open([path], side="human", reporter=Heard(words))
        assert len(words) == lines and all(str(path) in line for line in words)


LATE = """
import json, sys
from soulkit.data.corpora.stream import LessonStream
stream = LessonStream.open([sys.argv[1]], side="human")
position = stream.position()
position["sources"][0].update(start=int(sys.argv[2]), place=3)
stream.take(1)
before = memory()
stream.resume(position)
stream.take(1)
print(memory() - before)
"""
PEAK = """
def memory():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) << 10
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own figures")
def test_what_is_before_a_late_window_of_a_row_group_is_not_held(tmp_path: Path):
    path = parquet(
        tmp_path / "a.parquet", [chat(n, note="x" * 4000) for n in range(60_000)], 60_000
    )
    windows = len(index_file(path, 0, 10_000, 32 << 20, False).bundles[0])
    assert windows > 5
    command = [sys.executable, "-c", PEAK + LATE, str(path), str(windows - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 << 20  # of 240 MB


# -- reading ---------------------------------------------------------------------------------------


def test_one_pass_is_in_file_order_and_counts_what_it_leaves_out(mixture: list[Any]):
    rows = read_lessons(mixture[0], side="human")
    numbers = [int(key.partition(":")[2]) for key in keys(list(rows))]
    assert numbers == [*range(1, 21), *range(23, 43)]
    assert rows.unusable == {"the line is not JSON": 1}
    assert rows.examples == {"the line is not JSON": "a.jsonl:21"}
    assert len(list(rows)) == 40


@pytest.mark.slow
def test_rows_are_those_that_datasets_streams(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [chat(n) for n in range(30)]
    files = {
        "json": jsonl(tmp_path / "a.jsonl", rows),
        "parquet": parquet(tmp_path / "a.parquet", rows, 8),
    }
    for kind, path in files.items():
        streamed = datasets.load_dataset(
            kind, data_files=str(path), split="train", streaming=True,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        streamed_turns = [[(m["role"], m["content"]) for m in row["messages"]] for row in streamed]
        lessons = list(read_lessons(path, side="assistant"))
        assert [[(s.role, s.text) for s in lesson.segments] for lesson in lessons] == [
            turns[:2] for turns in streamed_turns
        ]


def test_columns_that_hold_json_are_opened(tmp_path: Path):
    packed = [pa.field(name, pa.string(), metadata={PACKED: b"json"}) for name in ("messages", "x")]
    texts = [json.dumps(chat(n)["messages"]) for n in range(5)]
    table = pa.table({"messages": texts, "x": [None] * 5}, schema=pa.schema(packed))
    pq.write_table(table, tmp_path / "a.parquet")
    assert sorted(keys(opened(tmp_path / "a.parquet").take(5))) == [
        f"a.parquet:{n + 1}" for n in range(5)
    ]


def test_lines_without_an_end_marks_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    texts = [json.dumps(chat(n)) for n in range(5)]
    body = "\r\n".join(texts).encode() + b"\r\n\xff\xfe{}\r\n" + texts[0].encode()
    path.write_bytes(b"\xef\xbb\xbf" + body)
    rows = read_lessons(path, side="human")
    assert keys(list(rows)) == [f"a.jsonl:{n}" for n in (1, 2, 3, 4, 5, 7)]
    assert rows.unusable == {"the line is not UTF-8 text": 1}


def test_records_that_make_up_one_chat_are_read_together(tmp_path: Path):
    records = [
        {"conversation_id": "c", "turn": turn, "user_prompt": f"q{turn}", "model_response": f"r{n}",
         "if_chosen": n == 1, "data_source": "prism"}
        for turn in range(2) for n in range(2)
    ]  # fmt: skip
    (lesson,) = read_lessons(jsonl(tmp_path / "a.jsonl", records))
    assert [s.text for s in lesson.segments][1:] == ["q0", "r1", "q1"]
    assert lesson.source == "prism"


def test_rows_for_evaluation_only_are_never_lessons(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(1), chat(2, evaluation_only=True)])
    stream = opened(path)
    assert set(keys(stream.take(4))) == {"a.jsonl:1"}
    assert stream.unusable["a"] == {"it is marked evaluation_only and must not be trained on": 1}


def test_the_turns_of_the_table_hold_whoever_names_the_side(tmp_path: Path):
    turns = [{"role": role, "content": f"{n}"} for n in range(30) for role in ("assistant", "user")]
    path = jsonl(tmp_path / "a.jsonl", [{"messages": turns, "data_source": "psych101"}])
    for side, count in (("human", 20), (None, 20)):
        (lesson,) = read_lessons(path, side=side)
        assert len(lesson.segments) == count
        assert lesson.segments[0].text.count("\n") == 42  # forty turns, two marks, and a line
    (lesson,) = read_lessons(path, side="human", turns=4)
    assert len(lesson.segments) == 4


def test_nothing_that_says_who_is_learned_is_told_at_once(tmp_path: Path):
    with pytest.raises(DataError, match="The side to learn is not set"):
        LessonStream.open([jsonl(tmp_path / "a.jsonl", [chat(1), chat(2)])])
    nested = {"extra_info": json.dumps(chat(1)), "data_source": "wildchat"}
    assert LessonStream.open([jsonl(tmp_path / "b.jsonl", [nested])]).take(1)


def test_a_file_that_changes_under_a_stream_is_noticed(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(n) for n in range(40)])
    stream = opened(path)
    stream.take(1)
    jsonl(path, [chat(1)])
    with pytest.raises(DataError, match="cannot be read"):
        stream.take(40)


def test_a_file_that_is_read_whole_is_read_again_when_it_has_changed(tmp_path: Path):
    path = tmp_path / "a.csv"
    for number in (1, 22):
        cell = json.dumps(chat(number)["messages"]).replace('"', '""')
        path.write_text(f'data_source,messages\nwildchat,"{cell}"\n')
        (lesson,) = read_lessons(path)
        assert lesson.segments[1].text == f"question {number}"
        assert (lesson.source, lesson.key) == ("wildchat", "a.csv:2")


def test_a_file_too_large_to_be_read_whole_is_refused(tmp_path: Path):
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(DataError, match="too large to read as a whole: 65 MiB"):
        opened(path)


def test_texts_that_a_parquet_file_stores_once_count_as_often_as_they_stand_there(tmp_path: Path):
    prompt = {"role": "system", "content": "x" * 20_000}
    rows = [{"messages": [prompt, *chat(n)["messages"]]} for n in range(600)]
    path = parquet(tmp_path / "a.parquet", rows)
    assert path.stat().st_size < 100_000
    index = index_file(path, 0, 10_000, 1 << 20, False)
    assert [s.rows for s in index.bundles[0]][:-1] == [52] * 11


def test_a_damaged_parquet_file_is_no_end_of_the_rows(tmp_path: Path):
    path = parquet(tmp_path / "a.parquet", [chat(n) for n in range(200)], group=10)
    content = bytearray(path.read_bytes())
    content[2_000:4_000] = bytes(2_000)
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_lessons(path, side="human"))


GROWTH = """
import re, sys
from pathlib import Path
import numpy, pyarrow.parquet
from soulkit.data.corpora.stream import LessonStream
from tests.support.reporting import Heard
# Of this program alone: what getrusage says is not less than of the one that started it.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
stream = LessonStream.open([sys.argv[1]], side="human")
for _ in range(40):
    stream.take(500)
print(stream.sizes["a"], peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much")
def test_memory_does_not_grow_with_a_row_group(tmp_path: Path):
    """A Parquet file that is one row group of texts that cannot be packed."""
    rows = [chat(n, filler=os.urandom(2_000).hex()) for n in range(50_000)]
    path = parquet(tmp_path / "a.parquet", rows, group=len(rows))
    assert path.stat().st_size > 200_000_000
    command = [sys.executable, "-c", GROWTH, str(path)]
    assert int(subprocess.check_output(command, text=True).split()[1]) < 180  # MiB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much")
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path):
    line = json.dumps(chat(1, filler="x" * 2_900)) + "\n"
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for _ in range(100):
            file.write(line * 1000)
    command = [sys.executable, "-c", GROWTH, str(path)]
    rows, grown = subprocess.check_output(command, text=True).split()
    assert path.stat().st_size > 300_000_000
    assert int(rows) == 100_000
    assert int(grown) < 200  # MiB


@pytest.mark.parametrize(
    ("side", "words"), [("Anne", "Did you mean 'Ann'? "), ("Zoe", ""), ("human", ""), (None, "")]
)
def test_a_side_that_is_missing_or_unknown_is_answered_with_those_who_speak(
    tmp_path: Path, side: str | None, words: str
):
    rows = [
        {"messages": [{"speaker": name, "content": "hi"} for name in names]}
        for names in (("Ben", "Ann", "Ben"), ("Ann", "Ben", *(f"P{n}" for n in range(20))))
    ]
    with pytest.raises(DataError) as error:
        list(read_lessons(jsonl(tmp_path / "a.jsonl", rows), side=side))
    listed = ", ".join(f"P{n} (1)" for n in range(10))
    expected = f"{words}Set --side to one of: Ben (3 messages), Ann (2), {listed} and 10 more."
    assert error.value.way_out == expected


def test_a_side_is_read_in_any_case(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", [chat(1)])
    assert [*read_lessons(path, side=" Human")] == [*read_lessons(path, side="human")]
