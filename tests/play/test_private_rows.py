"""Rows from the user's own chats go to models on other machines only without private data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.evaluation import soul

OWN = {"story": "1 Ann came in. Her number is 612 345 678.", "origin": "chats.jsonl"}


def rows(folder: Path, **fields: str) -> Path:
    assert soul("data", "synth", "tomi", "-n", 2, "-o", folder / "made.jsonl") == 0
    made = [json.loads(line) for line in (folder / "made.jsonl").read_text().splitlines()]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, **fields}) + "\n" for row in made))
    return path


@pytest.mark.parametrize(
    ("fields", "url", "options", "refused"),
    [
        (OWN, "http://gpu.acme.org/v1", (), True),
        (OWN, "http://gpu.acme.org/v1", ("--allow-private",), False),
        (OWN, "http://localhost:9/v1", (), False),
        ({"story": OWN["story"]}, "http://gpu.acme.org/v1", (), False),
        ({"origin": "chats.jsonl"}, "http://gpu.acme.org/v1", (), False),
    ],
    ids=["private", "allowed", "this machine", "published", "nothing private"],
)
def test_private_rows_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str], url: str, options: tuple[str, ...], refused: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "unused-key")
    path = rows(tmp_path, **fields)
    done = soul("eval", "api", "--model", "m", "--base-url", url, "--task", "tomi", "--data", path,
                "--out", tmp_path / "run", "--max-attempts", 1, *options)  # fmt: skip
    said = capfd.readouterr().err
    assert done != 0, "no server answers, and the cost is not confirmed"
    assert ("the actor m contain 2 phone numbers" in said) is refused
    assert ("--allow-private" in said) is refused
