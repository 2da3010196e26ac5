"""What was asked is found again; nothing that befalls the file is silent or destructive."""

from __future__ import annotations

import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import RunError
from soulkit.models.ledger import storage as ledger_file
from soulkit.models.ledger.ledger import Ledger, Mode, request_key
from soulkit.models.ledger.storage import Request, keep_request, load_request, seal
from soulkit.models.ledger.view import LedgerView, quantile
from soulkit.types import Form, Sampling
from tests.support.ledger_writer import entry_of

ROOT = Path(__file__).parents[3]
MODES: tuple[Mode, ...] = ("record", "replay")


HOLD = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


def filled(path: Path, count: int = 30) -> Path:
    with Ledger(path) as ledger:
        for number in range(count):
            key, entry, request = entry_of(number)
            ledger.store(key, entry, request)
    return path


@contextmanager
def closing_db(path: Path) -> Iterator[sqlite3.Connection]:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        yield db
    finally:
        db.close()


def verified(path: Path) -> tuple[int, list[str]]:
    """(entries, findings)."""
    with LedgerView(path) as view:
        findings = view.verify()
    return findings.entries, findings.lines()


def child(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.ledger_writer", path, first, count]
    return subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True)


# -- what was asked ------------------------------------------------------------------------------


def test_requests_are_kept_and_give_the_key_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "l.sqlite", 20)
    with LedgerView(path) as view:
        stored = {s.key: s for s in view.entries()}
    assert len(stored) == 20
    for number in range(20):
        key, entry, request = entry_of(number)
        assert stored[key].entry == entry
        assert stored[key].request is not None
        assert stored[key].request.messages == request.messages
        assert request_key(stored[key].request, "m", entry.call) == key
    with closing_db(path) as db:
        # Two dialogues of ten turns; a turn is stored once, whoever saw it later.
        assert db.execute("SELECT COUNT(*) FROM contexts").fetchone()[0] == 20
        assert db.execute("SELECT COUNT(*) FROM settings").fetchone()[0] == 1


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.text(st.characters())), max_size=4),
        max_size=6,
    )
)
def test_any_conversation_comes_back(talks: list[list[tuple[str, str]]]) -> None:
    db = sqlite3.connect(":memory:")
    for statement in ledger_file.TABLES:
        db.execute(statement)
    rows = []
    for talk in talks:
        messages = tuple({"role": role, "content": text} for role, text in talk)
        request = Request(base_url="u", messages=messages, sampling={"form": {"name": "\ud800"}})
        rows.append((request, keep_request(db, request)))
    for request, (context, settings) in rows:
        assert load_request(db, context, settings) == request
    db.close()


def test_forms_are_part_of_what_was_asked(tmp_path: Path) -> None:
    from soulkit.models.ledger.ledger import request_of

    key, entry, _ = entry_of(0)
    request = request_of("u", [{"role": "user", "content": "x"}], Sampling(form=Form("F", "{}")))
    key = request_key(request, "m", entry.call)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ledger.store(key, entry, request)
    assert verified(tmp_path / "l.sqlite") == (1, [])


# -- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", [0, ledger_file.VERSION - 1, ledger_file.VERSION + 1])
def test_another_version_is_refused_and_left_alone(tmp_path: Path, mode: Mode, other: int) -> None:
    path = filled(tmp_path / "l.sqlite", 2)
    with closing_db(path) as db:
        db.execute(f"PRAGMA user_version={other}")
    before = path.read_bytes()
    with pytest.raises(RunError, match=f"has version {other}") as caught:
        Ledger(path, mode)
    assert f"only reads version {ledger_file.VERSION}" in caught.value.what
    assert path.read_bytes() == before


# -- several processes, and dead ones --------------------------------------------------------------


@pytest.mark.slow
def test_processes_that_start_and_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    writers = [child(path, first, 150) for first in (0, 100, 200)]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert verified(path) == (350, [])


@pytest.mark.slow
def test_kill_9_in_the_middle_of_many_writes_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    path, printed_numbers = tmp_path / "l.sqlite", set()
    for life in range(4):
        writer = child(path, life * 1000, 1000)
        assert writer.stdout is not None
        for _ in range(37 + 11 * life):
            printed_numbers.add(int(writer.stdout.readline()))
        writer.kill()
        assert writer.wait() == -9
        printed_numbers |= {int(line) for line in writer.stdout if line.endswith("\n")}
        writer.stdout.close()
    with Ledger(path) as ledger:
        for number in printed_numbers:
            key, entry, _ = entry_of(number)
            assert ledger.lookup(key, model="m", call=entry.call) == entry
    entries, findings = verified(path)
    assert findings == []
    assert len(printed_numbers) <= entries <= len(printed_numbers) + 4, (
        "at most the entry whose number was not printed"
    )


def test_an_archive_of_a_killed_run_is_not_read_without_its_newest_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l.sqlite"
    writer = child(path, 0, 1000)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    with monkeypatch.context() as patched:  # permissions do not hold the superuser back
        patched.setattr(os, "access", lambda *_: False)
        with pytest.raises(RunError, match="its newest entries are in 'l"):
            Ledger(path, "replay")
    assert verified(path)[0] > 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        Ledger(path, "replay").close()


# -- files that cannot be used ---------------------------------------------------------------------


def test_a_ledger_that_another_process_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_S", 0.2)
    path = filled(tmp_path / "l.sqlite", 2)
    with Ledger(path) as ledger:
        other = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "held\n"
        key, entry, request = entry_of(5)
        with pytest.raises(RunError, match="could not be stored") as caught:
            ledger.store(key, entry, request)
        assert "may have been paid for ('m' for this call: role judge" in caught.value.why
        other.communicate()
        assert ledger.store(key, entry, request) == entry
    assert verified(path) == (3, [])


def test_a_full_disk_says_that_a_reply_was_lost_and_keeps_the_others(tmp_path: Path) -> None:
    path, stored = tmp_path / "l.sqlite", 0
    with Ledger(path) as ledger:
        assert ledger._db is not None
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count={pages + 4}")
        with pytest.raises(RunError, match="database or disk is full") as caught:
            for number in range(1000):
                key, entry, request = entry_of(number)
                ledger.store(key, entry, request)
                stored += 1
        assert "all earlier replies are in the ledger" in caught.value.why
        assert ledger.totals()["calls"] == stored > 5
        ledger._db.execute("PRAGMA max_page_count=100000")
        assert ledger.store(key, entry, request) == entry, "with room again it goes on"
    assert verified(path) == (stored + 1, [])


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=300k tmpfs '{tmp_path}'"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this machine does not allow mounting a small disk")
    writer = (
        f"'{sys.executable}' -m tests.support.ledger_writer '{tmp_path}/l.sqlite' 0 5000 | tail -1"
    )
    look = f"'{sys.executable}' -m soulkit.cli.app ledger verify '{tmp_path}/l.sqlite' --json"
    script = f"{mount} && {{ {writer}; {look}; }}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "RunError: A reply could not be stored in the ledger" in done.stderr
    assert "disk is full" in done.stderr
    last, _, report = done.stdout.partition("\n")
    assert f'"entries": {int(last) + 1},' in report
    assert '"findings": []' in report


def overwrite(path: Path, share: float, length: int | None) -> None:
    """So many bytes from this share of the file on become others; None cuts it there."""
    data = bytearray(path.read_bytes())
    start = int(len(data) * share)
    end = len(data) if length is None else start + length
    data[start:end] = b"\xa5" * (length or 0)
    path.write_bytes(data)


def read_all(path: Path, mode: Mode) -> None:
    with Ledger(path, mode) as ledger:
        for number in range(200):
            key, entry, _ = entry_of(number)
            reply = ledger.lookup(key, model="m", call=entry.call)
            assert reply in (entry, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("share", "length"), [(0.0, 9000), (0.5, 9000), (0.9, 9000), (0.1, None), (0.95, None)]
)
def test_bytes_that_are_overwritten_or_cut_off_are_an_error(
    tmp_path: Path, share: float, length: int | None, mode: Mode
) -> None:
    path = filled(tmp_path / "l.sqlite", 200)
    overwrite(path, share, length)
    before = path.read_bytes()
    with pytest.raises(RunError, match="cannot be used"):
        read_all(path, mode)
    assert path.read_bytes() == before
    try:
        assert verified(path)[1]
    except RunError as error:
        assert "malformed" in error.what or "not a database" in error.what


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_that_was_changed_by_hand_is_not_used(tmp_path: Path, mode: Mode) -> None:
    path = filled(tmp_path / "l.sqlite", 3)
    with closing_db(path) as db:
        db.execute("UPDATE calls SET reply = replace(reply, 'reply 1', 'reply 9')")
    key, entry, _ = entry_of(1)
    with Ledger(path, mode) as ledger:
        with pytest.raises(RunError, match="is damaged"):
            ledger.lookup(key, model="m", call=entry.call)
        key, entry, _ = entry_of(2)
        assert ledger.lookup(key, model="m", call=entry.call) == entry
    assert "damaged entry" in verified(path)[1][0]


CHANGES = {
    "UPDATE calls SET example_id = 'other' WHERE turn = 2": "does not match its request",
    "UPDATE settings SET body = replace(body, '1.0', '2.0')": "settings are missing or changed",
    "UPDATE contexts SET role = 'system'": "a message of its prompt was changed",
    "UPDATE contexts SET body = x'7a00'": "a message of its prompt cannot be read",
    "DELETE FROM contexts WHERE parent IS NULL": "a message of its prompt is missing",
    f"UPDATE calls SET reply = '{{', seal = x'{seal('{').hex()}'": "unreadable reply",
    "UPDATE calls SET seal = NULL": "its reply differs from what was stored",
    "UPDATE calls SET dropped = 'x'": "its dropped parameters cannot be read",
}


@pytest.mark.parametrize(("change", "finding"), CHANGES.items())
def test_verify_finds(tmp_path: Path, change: str, finding: str) -> None:
    path = filled(tmp_path / "l.sqlite", 12)
    with closing_db(path) as db:
        db.execute(change)
    assert finding in " ".join(verified(path)[1])


def test_findings_of_one_kind_are_counted_not_listed(tmp_path: Path) -> None:
    path = filled(tmp_path / "l.sqlite", 12)
    with closing_db(path) as db:
        db.execute("UPDATE calls SET example_id = 'other'")
    lines = verified(path)[1]
    assert len(lines) == 6
    assert lines[-1] == "key: and 7 more"


@pytest.mark.parametrize("mode", MODES)
def test_folders_that_cannot_hold_a_ledger(tmp_path: Path, mode: Any) -> None:
    (tmp_path / "folder.sqlite").mkdir()
    places = (tmp_path / "folder.sqlite", Path("/proc/soulkit/l.sqlite"), Path("/proc/l.sqlite"))
    for path in places:
        with pytest.raises(RunError, match="cannot be used"):
            Ledger(path, mode)
    assert os.listdir(tmp_path) == ["folder.sqlite"]


def test_an_empty_file_is_a_new_ledger_for_a_recording_only(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    path.touch()
    with pytest.raises(RunError, match="not a ledger"):
        Ledger(path, "replay")
    Ledger(path).close()
    assert verified(path) == (0, [])


def test_quantiles() -> None:
    assert [quantile([1, 2, 3, 4], share) for share in (0.0, 0.5, 0.75, 0.95, 1.0)] == [
        1, 2, 3, 4, 4,
    ]  # fmt: skip
    with pytest.raises(ValueError):
        quantile([], 0.5)


def journal_naming(victim: Path, path: Path) -> bytes:
    """A journal that SQLite would play back to `path` and, to end it, delete the file `victim`."""
    page, name = path.read_bytes()[:4096], os.fsencode(victim)
    magic = bytes.fromhex("d9d505f920a163d7")
    check = sum(page[3896::-200]) & 0xFFFFFFFF
    head = magic + struct.pack(">5I", 1, 0, path.stat().st_size // 4096, 512, 4096)
    end = struct.pack(">I", (1 << 30) // 4096 + 1) + name + struct.pack(">2I", len(name), sum(name))
    record = struct.pack(">I", 1) + page + struct.pack(">I", check)
    return head.ljust(512, b"\0") + record + end + magic


def test_a_journal_that_names_another_file_is_not_played_back(tmp_path: Path) -> None:
    path, victim = filled(tmp_path / "ledger.sqlite"), tmp_path / "victim.txt"
    with closing_db(path) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    journal = tmp_path / "ledger.sqlite-journal"
    for refused in (False, True):  # what the check prevents, and that it does
        victim.write_text("precious")
        journal.write_bytes(journal_naming(victim, path))
        if refused:
            with pytest.raises(RunError, match="names another file"):
                LedgerView(path)
        else:
            with closing_db(path) as db:
                db.execute("SELECT COUNT(*) FROM calls").fetchone()
        assert victim.exists() == refused


@pytest.mark.parametrize("sql", [
    "ALTER TABLE calls ADD COLUMN x AS (instr(zeroblob(30000), purpose)) VIRTUAL",
    "CREATE INDEX i ON calls(length(reply))",
    "CREATE VIEW v AS SELECT * FROM calls",
    "CREATE TRIGGER calls AFTER INSERT ON calls BEGIN DELETE FROM calls; END",
    "ALTER TABLE settings RENAME TO s; CREATE TABLE settings (digest, body CHECK (length(body)))",
])  # fmt: skip
def test_tables_that_a_ledger_does_not_have_are_refused(sql: str, tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.sqlite", 2)
    with closing_db(path) as db:
        db.executescript(sql)
    for open_ledger in (LedgerView, Ledger):
        with pytest.raises(RunError, match="are not those of a ledger"), open_ledger(path):
            pass


def test_bytes_in_the_place_of_a_name_are_damage(tmp_path: Path) -> None:
    path = filled(tmp_path / "ledger.sqlite", 2)
    with closing_db(path) as db:
        db.execute("UPDATE calls SET role = x'78'")
    with LedgerView(path) as view, pytest.raises(RunError, match="entries are damaged"):
        list(view.groups())


def test_nothing_is_recorded_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").symlink_to(tmp_path / "elsewhere.sqlite")
    with pytest.raises(RunError, match="it is a link"), Ledger(tmp_path / "ledger.sqlite"):
        pass
    assert not (tmp_path / "elsewhere.sqlite").exists()
