"""The whole road as a user walks it: one command, also killed at random moments."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soulkit.people.build import road_steps
from tests.test_docs import generator

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "soulkit", "people", "build", "../chats", "--out", "me",
           "--share", "0.4", "--canaries", "4", "--steps", "6", "--model", "tiny", "--full",
           "--batch", "4", "--lr", "1e-3")  # fmt: skip
ROWS = ("01-import", "02-redact", "03-dedupe", "06-plant")

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def write_chats(folder: Path) -> None:
    """Twenty people with habits of their own; one of them gives an address away."""
    rng = random.Random(0)
    folder.mkdir()
    words = ["".join(rng.choices("abdeiklmnorstu", k=5)) for _ in range(200)]
    for person in range(20):
        hello, bye = rng.choice(["hi", "hey there", "um"]), rng.choice(["thanks!", "ok, cheers"])
        rows = []
        for _ in range(3):
            opening, second = (" ".join(rng.choices(words, k=8)) for _ in range(2))
            opening += " write to jo.field@gmail.com" if not person else ""
            texts = [f"{hello} {opening}?", second, f"no {rng.choice(words)}", "Clean it.", bye]
            roles = ["user", "assistant"] * 3
            messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
            rows.append(json.dumps({"person": f"p{person}", "messages": messages}) + "\n")
        (folder / f"p{person}.jsonl").write_text("".join(rows))


def start(home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    return subprocess.Popen(COMMAND, cwd=home, env=environment, text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def walk(home: Path, kills: int = 0, seconds: float = 0.0, seed: int = 0) -> tuple[str, float]:
    """The output of the last start, and its seconds; before it, `kills` starts are killed, each at
    a random moment of the part that is left of about `seconds`."""
    home.mkdir(exist_ok=True)
    rng = random.Random(seed)
    for left in range(kills, 0, -1):
        process = start(home)
        time.sleep(rng.uniform(1.0, 2 * seconds / (left + 1)))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    begun = time.monotonic()
    process = start(home)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output, time.monotonic() - begun


def redacted_alike(me: Path, other: Path) -> None:
    """Begin another road with the same pseudonyms: redaction draws new ones in every run."""
    for name in ("01-import", "02-redact"):
        shutil.copytree(me / name, other / name)
    record = json.loads((me / "road.json").read_text())
    record["done"] = {name: record["done"][name] for name in ("01-import", "02-redact")}
    (other / "road.json").write_text(json.dumps(record))


def results(home: Path) -> dict[str, str]:
    """What the road made: hashes of rows, weights and measurements."""
    me = home / "me"
    files = [*(me / name / "chats.jsonl" for name in ROWS), *me.glob("0[45]-*/*.jsonl"),
             *me.glob("07-train/model/*.safetensors"), me / "07-train/memory.json",
             me / "07-train/closeness.json"]  # fmt: skip
    made = {str(file.relative_to(me)): file.read_bytes() for file in files}
    record = json.loads((me / "road.json").read_text())
    memory = json.loads(made["07-train/memory.json"])
    del memory["asked"]  # a fingerprint with the path of the folder
    made["07-train/memory.json"] = json.dumps(memory).encode()
    made |= {name: json.dumps(record[name]).encode() for name in ("commands", "material")}
    assert len(made) == 13
    return {name: hashlib.sha256(content).hexdigest() for name, content in made.items()}


def test_the_road_from_chats_to_the_page_and_the_same_after_kills(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    write_chats(tmp_path / "chats")
    output, seconds = walk(tmp_path / "whole")
    assert re.findall(r"step (\d+) of 10: soul", output) == [str(n) for n in range(1, 11)]
    page = (tmp_path / "whole/me/page.html").read_text()
    for words in ("20 persons, 60 conversations, 300 messages", "What it remembers",
                  "Closeness against memorisation", "soul data redact me/01-import/"):  # fmt: skip
        assert words in page
    me = tmp_path / "whole/me"
    texts = "".join(file.read_text() for file in me.rglob("*.jsonl") if "01-" not in str(file))
    assert "jo.field@gmail.com" not in texts + page
    memory = json.loads((me / "07-train/memory.json").read_text())
    assert [one["step"] for one in memory["checkpoints"]] == [2, 4, 6]
    people = {
        part: {json.loads(line)["person"] for line in (me / part).read_text().splitlines()}
        for part in ("04-split/held_out.jsonl", "05-validation/held_out.jsonl",
                     "05-validation/train.jsonl")
    }  # fmt: skip
    assert sum(map(len, people.values())) == 20 == len(set().union(*people.values()))

    redacted_alike(me, tmp_path / "killed/me")
    walk(tmp_path / "killed", kills=2, seconds=seconds)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")

    again, _ = walk(tmp_path / "whole")
    assert again.count(", done: soul") == 9
    other = subprocess.run([*COMMAND, "--no-plant"], cwd=tmp_path / "whole", text=True,
                           capture_output=True, check=False)  # fmt: skip
    assert other.returncode == 2 and "--canaries and with --no-plant" in other.stderr


def test_every_step_is_a_command_that_exists(tmp_path: Path) -> None:
    commands = dict(generator().commands())
    for options in ({}, {"allow_private": True}, {"canaries": 0}):
        for step in road_steps(tmp_path, tmp_path, ("--model", "tiny"), **options):
            name = max((n for n in commands if f"soul {' '.join(step.words)} ".startswith(f"{n} ")),
                       key=len)  # fmt: skip
            offered = {flag for one in commands[name].params for flag in one.opts}
            assert {word for word in step.words if word.startswith("-")} <= offered, step.line
