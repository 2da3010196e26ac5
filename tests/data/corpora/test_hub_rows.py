"""A data set of the hub, streamed through `datasets` from a hub on a real loopback socket."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.chats import Row, chat
from tests.support.servers.hub_server import HubServer, commit_of

pytestmark = pytest.mark.slow
ROWS = 60


def content(rows: list[Row]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=16)
    return sink.getvalue()


def files(offset: int) -> dict[str, bytes]:
    return {
        f"data/{split}-0000{shard}-of-00002.parquet": content(
            [chat(offset + 1000 * (split == "validation") + 30 * shard + n) for n in range(30)]
        )
        for split in ("train", "validation")
        for shard in range(2)
    }


def child(hub: HubServer, tmp_path: Path, script: str, *arguments: Any) -> Any:
    """What a new process prints that knows this hub alone (the address is read at its start)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
            "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    command = [sys.executable, "-c", script, *map(json.dumps, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EVERY_POSITION = """
import json, sys
from soulkit.data.corpora.stream import LessonStream, read_lessons
from tests.support.reporting import Heard
path, = map(json.loads, sys.argv[1:])
differences = []
for window in (7, 10, 64):
    opened = lambda: LessonStream.open([path], seed=1, window=window, side="human")
    stream, positions, keys = opened(), [], []
    for _ in range(130):
        positions.append(json.loads(json.dumps(stream.position())))
        keys.append(stream.take(1)[0].key)
    for at in range(0, 110, 13):
        again = opened()
        again.resume(positions[at])
        if [lesson.key for lesson in again.take(20)] != keys[at:at + 20]:
            differences.append(at)
in_order = [lesson.segments[1].text for lesson in read_lessons(path, side="human")]
heard = Heard()
sizes = LessonStream.open([path, path + ":validation"], side="human", reporter=heard).sizes
print(json.dumps([differences, keys, positions[40], in_order, sizes, heard.lines]))
"""


def test_a_data_set_is_streamed_in_shuffled_passes_with_exact_positions(tmp_path: Path):
    with HubServer({"me/chats": files(0)}) as hub:
        differences, keys, position, in_order, sizes, notes = child(
            hub, tmp_path, EVERY_POSITION, "me/chats"
        )
    assert differences == []
    assert len(set(keys[:ROWS])) == ROWS and keys[:ROWS] != keys[ROWS : 2 * ROWS]
    assert in_order == [f"question {n}" for n in range(ROWS)]
    assert set(sizes.values()) == {ROWS} and len(notes) == 2
    assert position["sources"][0]["content"]["commit"] == commit_of(files(0))
    assert len(json.dumps(position)) < 3_000


GO_ON = """
import json, sys
from soulkit.data.corpora.stream import LessonStream
from soulkit.errors import UserError
position, = map(json.loads, sys.argv[1:])
opened = lambda: LessonStream.open(["me/chats"], seed=1, window=7, side="human")
words = lambda stream: [lesson.segments[1].text for lesson in stream.take(20)]
stream, refusals = opened(), []
if position:
    resumed = opened()
    resumed.resume(position)
    print(json.dumps([words(stream), words(resumed)]))
else:
    for path in ("me/nothing", "me/chats:nowhere", "me/chats/other"):
        try:
            LessonStream.open([path], side="human").take(1)
        except UserError as error:
            refusals.append(error.lines())
    stream.take(20)
    print(json.dumps([stream.position(), words(stream), refusals]))
"""


def test_a_stream_goes_on_at_the_commit_of_its_start(tmp_path: Path):
    with HubServer({"me/chats": files(0)}) as hub:
        position, after, refusals = child(hub, tmp_path, GO_ON, None)
        hub.push("me/chats", files(500))
        fresh, resumed = child(hub, tmp_path, GO_ON, position)
    assert resumed == after
    assert all(int(text.split()[1]) >= 500 for text in fresh)
    assert len(refusals) == 3
    for what, _, _ in refusals:
        assert what.startswith("The Hub dataset '") and what.endswith("' cannot be read.")
