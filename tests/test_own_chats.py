"""The tutorial on one's own chats, docs/own-chats.md, run from top to bottom in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_authoring import ROOT, Reader

PAGE = ROOT / "docs" / "own-chats.md"


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.follow(PAGE.read_text("utf-8"))
    people = {
        part: {json.loads(line)["person"] for line in (tmp_path / part).read_text().splitlines()}
        for part in ("clean.jsonl", "people/held_out.jsonl")
    }
    assert not people["clean.jsonl"] & people["people/held_out.jsonl"]
    assert "neighbour" not in (tmp_path / "clean.jsonl").read_text()
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page[:2000]
    assert "the same verdict on all of 40 episodes (judge: detector)" in page
    before = json.loads((tmp_path / "runs" / "before" / "summary.json").read_text())
    assert before["statuses"]["userllm"]["ok"] > 30, "its replies are not cut"
