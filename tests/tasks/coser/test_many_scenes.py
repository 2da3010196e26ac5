"""Many scenes at once: none is lost, and what was said is stored once for each table."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.file import load_request
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import Engine, Job
from soulkit.runs.records import RecordWriter, load_records
from soulkit.tasks.made import make_rows
from soulkit.tasks.registry import load_registry
from soulkit.types import Record
from tests.support.servers.faulty import FaultPlan, FaultyServer, formed

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


def test_contexts_that_stand_whole_are_read_as_well(records: list[Record], folder: Path) -> None:
    """As every record had them once."""
    path = folder / "whole.jsonl"
    path.write_text(json.dumps(TypeAdapter(Record).dump_python(records[0], mode="json")) + "\n")
    assert load_records(path) == [records[0]]


def lines_in(text: str, records: list[Record]) -> list[str]:
    every = (line.text for record in records for line in record.episode.transcript)
    return [one for one in every if one in text]
