"""The journal: what was sampled is not sampled again, to the bit, whenever the process dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.errors import DataError
from soulkit.models.local.journal import Journal, JournalKey
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.types import Call, Completion, Sampling, Segment, Usage

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
SAMPLING = Sampling(max_tokens=5, seed=1)

# One process: participants talk in waves of two batches, and `pause` seconds pass after
# each batch so that the test can kill in the middle. Prints all replies.
PROGRAM = """
import asyncio, json, sys, time
from dataclasses import asdict
from pathlib import Path
from soulkit.models.local.batching import participants
from soulkit.models.local.journal import Journal
from soulkit.models.local.sampler import LocalModel
from soulkit.types import Call, Sampling, Segment

folder, journal, pause = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
loaded = LocalModel.load(folder)
model = LocalModel(loaded.model, loaded.tokenizer, batch_size=4, policy_version="v1",
                   journal=Journal(journal))
generated, plain = [], model._generate

def generate(batch, version):
    generated.append([r.call.rollout for r in batch])
    time.sleep(pause)
    return plain(batch, version)

model._generate = generate

async def talk(participant, rollout):
    replies, context = [], [Segment("user", "ba be " + "bi " * (rollout % 3))]
    with participant:
        for turn in range(3):
            call = Call(role="actor", example_id="x", rollout=rollout, turn=turn)
            reply = await model.complete(context, Sampling(max_tokens=5, seed=1), call)
            replies.append(asdict(reply))
            answer_segment = Segment("assistant", reply.text, token_ids=reply.token_ids)
            context = [*context, answer_segment, Segment("user", "bo")]
    return replies

async def main():
    return await asyncio.gather(*(talk(participants([model], 1)[0], r) for r in range(6)))

replies = asyncio.run(main())
print(json.dumps({"replies": replies, "generated": generated}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=128)


def start(folder: Path, journal: Path, pause: float) -> subprocess.Popen[str]:
    arguments = [str(folder), str(journal), str(pause)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> dict[str, list[list[dict[str, object]]]]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    output: dict[str, list[list[dict[str, object]]]] = json.loads(out)
    for replies in output["replies"]:
        for reply in replies:
            usage = reply["usage"]
            assert isinstance(usage, dict)
            usage.pop("seconds")
    return output


def kill_after_lines(process: subprocess.Popen[str], journal: Path, lines: int) -> None:
    end = time.monotonic() + 600
    while not journal.exists() or journal.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_process_killed_in_mid_step_replays_what_was_said(folder: Path, tmp_path: Path) -> None:
    """Tests of whole trainings compare deterministic ones to the bit."""
    whole = finished(start(folder, tmp_path / "whole.jsonl", 0.0))
    journal = tmp_path / "torn.jsonl"
    process = start(folder, journal, 0.4)
    kill_after_lines(process, journal, 3)
    journal.write_bytes(journal.read_bytes() + b'{"policy": "v1", "rows": [{"ca')
    again = finished(start(folder, journal, 0.0))
    texts = [[r["token_ids"] for r in replies] for replies in whole["replies"]]
    assert [[r["token_ids"] for r in replies] for replies in again["replies"]] == texts
    assert len(again["generated"]) < len(whole["generated"])


def journal_key(
    rollout: int = 0, policy: str = "v1", prompt: tuple[int, ...] = (1, 2, 3), step: int = 0
) -> JournalKey:
    call = Call(role="actor", example_id="é", rollout=rollout, step=step)
    return JournalKey(call, SAMPLING, prompt, policy)


def reply(text: str, *logprobs: float) -> Completion:
    usage = Usage(calls=1, prompt_tokens=3, completion_tokens=2, seconds=0.1 + 0.2)
    return Completion(
        text=text, prompt_ids=(1, 2, 3), token_ids=(7, 8), logprobs=logprobs, policy="v1",
        stop_reason="length", reasoning="hm\n", usage=usage, dropped=("thinking",),
    )  # fmt: skip


ODD = reply("a\u2028b\n\ud83d \x00", -0.1 - 0.2, -1e-300, -0.0)


def test_replies_come_back_exactly(tmp_path: Path) -> None:
    with_one = Journal(tmp_path / "j.jsonl")
    with_one.write([journal_key(0), journal_key(1)], [ODD, reply("two", -2 / 3)])
    with_one.close()
    read = Journal(tmp_path / "j.jsonl")
    assert read.batch([journal_key(0), journal_key(1)]) == [ODD, reply("two", -2 / 3)]
    assert str(read.one(journal_key(0)).logprobs[2]) == "-0.0"  # type: ignore[union-attr]
    assert read.one(journal_key(1)) == reply("two", -2 / 3)


def test_another_prompt_policy_or_company_is_another_request(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl").write([journal_key(0), journal_key(1)], [ODD, ODD])
    journal = Journal(tmp_path / "j.jsonl")
    assert journal.one(journal_key(0)) == ODD
    assert journal.one(journal_key(0, policy="v2")) is None
    assert journal.one(journal_key(0, prompt=(1, 2))) is None
    assert journal.batch([journal_key(0)]) is None
    assert journal.batch([journal_key(1), journal_key(0)]) is None


def test_a_batch_comes_from_its_own_line(tmp_path: Path) -> None:
    written = Journal(tmp_path / "j.jsonl")
    first, second = [reply("a"), reply("b")], [reply("c"), reply("d")]
    written.write([journal_key(0), journal_key(1)], first)
    written.write([journal_key(1), journal_key(2)], second)
    read = Journal(tmp_path / "j.jsonl")
    assert read.batch([journal_key(0), journal_key(1)]) == first
    assert read.batch([journal_key(1), journal_key(2)]) == second


def test_a_cleared_journal_is_empty_and_goes_on(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl").write([journal_key(0)], [ODD])
    journal = Journal(tmp_path / "j.jsonl")
    assert len(journal) == 1
    journal.clear()
    assert (len(journal), journal.one(journal_key(0))) == (0, None)
    assert (tmp_path / "j.jsonl").read_bytes() == b""
    journal.write([journal_key(1)], [ODD])
    assert len(Journal(tmp_path / "j.jsonl")) == 1


def test_what_is_written_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.write([journal_key(0)], [ODD])
    assert (len(journal), journal.one(journal_key(0))) == (0, None)
    assert Journal(tmp_path / "j.jsonl").one(journal_key(0)) == ODD


def test_a_void_record_takes_back_one_step_and_nothing_else(tmp_path: Path) -> None:
    path, journal = tmp_path / "j.jsonl", Journal(tmp_path / "j.jsonl")
    wrong = journal_key(0, step=1)
    kept = [journal_key(0), journal_key(0, policy="v2", step=1), journal_key(0, step=2)]
    for key in [wrong, *kept]:
        journal.write([key], [ODD])
    journal.write([journal_key(1), journal_key(1, step=1)], [ODD, ODD])  # one batch of two steps
    journal.void("v1", 1, "from other weights")
    read = Journal(path)
    assert read.one(wrong) is None and all(read.one(key) == ODD for key in kept)
    assert read.batch([wrong]) is None and read.batch([kept[0]]) == [ODD]
    assert read.batch([journal_key(1), journal_key(1, step=1)]) is None
    read.write([wrong], [reply("again", -1.0)])  # sampled again, after the record
    assert Journal(path).one(wrong) == reply("again", -1.0)
    opened = Journal(path)
    opened.void("v1", 1, "again")  # what this process has read is taken back as well
    assert opened.one(wrong) is None and opened.one(kept[0]) == ODD


def test_a_journal_from_before_servers_were_recorded_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path).write([journal_key(0)], [replace(ODD, server="http://127.0.0.1:1")])
    assert Journal(path).one(journal_key(0)) == replace(ODD, server="http://127.0.0.1:1")
    line = json.loads(path.read_text())
    assert line["rows"][0]["reply"].pop("server") == "http://127.0.0.1:1"
    path.write_text(json.dumps(line) + "\n")
    assert Journal(path).one(journal_key(0)) == ODD


OLDER = (
    '{"policy": "v1", "prompts": [[1, 2, 3], [1, 2, 4]], "rows": [{"call": {"role": "actor", '
    '"example_id": "\u00e9"}, "sampling": {"max_tokens": 5, "seed": 1}, "prompt": 0, "reply": '
    '{"text": "two"}}, {"call": {"role": "actor", "example_id": "\u00e9", "rollout": 1}, '
    '"sampling": {"max_tokens": 5, "seed": 1}, "prompt": 1, "reply": {"text": "one"}}]}\n'
)
"""A line of a journal that listed its prompts."""


def test_a_journal_with_prompts_is_read_and_goes_on(tmp_path: Path) -> None:
    path, keys = tmp_path / "j.jsonl", [journal_key(0), journal_key(1, prompt=(1, 2, 4))]
    path.write_text(OLDER)
    Journal(path).write([journal_key(2)], [ODD])
    read = Journal(path)
    assert read.batch(keys) == [
        Completion(text="two", prompt_ids=(1, 2, 3)),
        Completion(text="one", prompt_ids=(1, 2, 4)),
    ]
    assert read.one(journal_key(1)) is None and read.one(journal_key(2)) == ODD


def dialogue(turns: int = 30, tokens: int = 2000) -> list[tuple[JournalKey, Completion]]:
    """Replies to prompts that grow by `tokens` a turn."""
    prompts = [tuple(range(10**6, 10**6 + turn * tokens)) for turn in range(1, turns + 1)]
    return [(journal_key(turn, prompt=ids), replace(ODD, prompt_ids=ids))
            for turn, ids in enumerate(prompts)]  # fmt: skip


def test_long_prompts_fill_neither_the_disk_nor_the_memory(tmp_path: Path) -> None:
    path, replies = tmp_path / "j.jsonl", dialogue()
    for key, reply in replies:
        Journal(path).write([key], [reply])
    assert path.stat().st_size < 1000 * len(replies)
    tracemalloc.start()
    read = Journal(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert all(read.one(key) == reply for key, reply in replies)


def test_single_replies_share_writes_that_do_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gaps, synced, usual = tmp_path / "j.jsonl", [0.0], [0], os.fsync

    def slow(handle: int) -> None:
        usual(handle)
        synced[0] += 1
        time.sleep(1.0)

    async def record(journal: Journal, rollout: int) -> None:
        await journal.record(journal_key(rollout), ODD)
        assert Journal(path).one(journal_key(rollout)) == ODD

    async def tick() -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - start)

    async def run() -> None:
        journal, ticks = Journal(path), asyncio.create_task(tick())
        await asyncio.gather(*(record(journal, rollout) for rollout in range(20)))
        ticks.cancel()
        journal.close()

    monkeypatch.setattr(os, "fsync", slow)
    asyncio.run(run())
    assert max(gaps) < 1.0 and synced[0] <= 3
    assert len(Journal(path)) == 20


def test_a_reply_that_cannot_be_written_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j.jsonl")

    async def record(*replies: Completion) -> list[object]:
        records = [journal.record(journal_key(i), reply) for i, reply in enumerate(replies)]
        return await asyncio.gather(*records, return_exceptions=True)

    assert [type(x) for x in asyncio.run(record(ODD, reply("", float("nan")), ODD))] == [
        type(None), ValueError, type(None)
    ]  # fmt: skip
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda handle: os.write(-1, b""))
        assert isinstance(asyncio.run(record(ODD))[0], OSError)
    assert len(Journal(journal.path)) == 2
    journal.void("v1", 0, "")  # takes back the reply that could not be written, too
    assert Journal(journal.path).one(journal_key(0)) is None


@pytest.mark.parametrize("void", [False, True])
def test_a_cancelled_reply_is_still_written(tmp_path: Path, void: bool) -> None:
    """And before a void record that follows it."""
    journal = Journal(tmp_path / "j.jsonl")

    async def run() -> None:
        journal._writer.submit(time.sleep, 0.2)  # the disk is busy
        task = asyncio.create_task(journal.record(journal_key(0), ODD))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())
    if void:
        journal.void("v1", 0, "")
    journal.close()
    assert Journal(journal.path).one(journal_key(0)) == (None if void else ODD)
    assert journal.path.read_text().count("reply") == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"policy": "v1", "prompts": [], "rows": [{"call": {}, "prompt": 0}]}',
        '{"void": {"policy": "v1"}}',
        '{"void": "v1"}',
    ],
)
def test_another_file_is_refused_by_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match="Line 1") as refused:
        Journal(path)
    assert all(refused.value.lines())


def test_new_weights_are_sampled_anew(folder: Path, tmp_path: Path) -> None:
    loaded = LocalModel.load(folder)
    call, context = Call(role="actor", example_id="x"), [Segment("user", "ba")]
    path = tmp_path / "j.jsonl"

    def reply_of(version: str) -> Completion:
        model = LocalModel(
            loaded.model, loaded.tokenizer, policy_version=version, journal=Journal(path)
        )
        return asyncio.run(model.complete(context, SAMPLING, call))

    first = reply_of("v1")
    assert reply_of("v1") == first and len(Journal(path)) == 1
    assert reply_of("v2").policy == "v2"
    assert len(Journal(path)) == 2
