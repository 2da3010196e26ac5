"""A judge that tells nothing apart is named in every report."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest

from tests.support import judged
from tests.support.evaluation import soul
from tests.support.servers.openai_server import Body, ScriptedServer


@pytest.mark.parametrize(("differs", "n"), [(False, 12), (True, 12), (False, 4)])
def test_a_judge_that_gives_every_episode_the_same_verdict_is_named(
    differs: bool, n: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its reasons may differ; a few equal verdicts say nothing yet."""
    seen = count(1)

    def says(body: Body) -> str:
        nth = next(seen)
        quality = {"reasoning": f"it is number {nth}", "score": 9 if differs and nth == 3 else 7}
        return json.dumps({"quality": quality, "style": "plain"})

    rows = judged.write_rows(tmp_path / "rows.jsonl", n)
    with ScriptedServer(answer=says) as server:
        run = judged.evaluated(tmp_path / "run", rows, server.base_url)
    page = tmp_path / "page.html"
    assert soul("report", run, "--format", "html", "--out", page) == 0
    capfd.readouterr()
    assert soul("report", run) == 0
    words = f"the same verdict on all of {n} episodes (j: "
    for shown in (page.read_text(), capfd.readouterr().out):
        assert (words in " ".join(shown.split())) == (not differs and n == 12)
