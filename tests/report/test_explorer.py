"""The data behind the episodes of a page: the index of the list, and the chunks with the texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import RunError
from soulkit.models.ledger.view import LedgerView
from soulkit.report import explorer
from soulkit.report.explorer import FIRST_WORDS, EpisodePack, pack_episodes
from soulkit.report.load import load_runs
from soulkit.report.pages import write_page
from soulkit.types import Completion, Episode, Line, Record, Segment, Trace, Turn, Verdict
from tests.support.evaluation import soul, three_lines, write_records
from tests.support.pages import EVIL, episode, opened, pair, spoken, takes

RECORDED = Path(__file__).parents[1] / "recorded"


def packs(*folders: Path, out: Path | None = None) -> EpisodePack:
    return pack_episodes(load_runs(folders, episodes=False), out)


def column(pack: EpisodePack, name: str) -> list[Any]:
    index = opened(pack.index)
    values: list[Any] = index["columns"][name]
    texts = index["names"].get(name)
    return values if texts is None else [texts[value] for value in values]


def test_a_draft_and_its_refined_episode_share_a_row(tmp_path: Path) -> None:
    pack = packs(write_records(tmp_path / "run", [*pair(0, 0.0, 1.0), *pair(1, 1.0, 0.5)]))
    shown = takes(pack)
    assert pack.total == 2 and len(shown) == 4
    assert column(pack, "score") == [0, 1] and column(pack, "refined") == [1, 0.5]
    assert [shown[i]["kind"] for i in column(pack, "take")] == ["draft", "draft"]
    assert [shown[i]["kind"] for i in column(pack, "twin")] == ["refined", "refined"]
    assert shown[0]["feedback"]["text"] == "Look again." and shown[0]["feedback"]["shown"]


def test_a_refined_episode_without_its_draft_is_a_row(tmp_path: Path) -> None:
    pack = packs(write_records(tmp_path / "run", [pair(0, 0.0, 1.0)[1]]))
    assert (pack.total, column(pack, "refined"), column(pack, "kind")) == (1, [1], ["refined"])
    assert opened(pack.index)["words"] == ["refined reply"]


def test_an_episode_that_was_played_again_replaces_the_old_one(tmp_path: Path) -> None:
    old, new = replace(episode(0, None), tags={"order": "2"}), episode(0, 1.0, text="Second try.")
    pack = packs(write_records(tmp_path / "run", [old, episode(1, 0.0), new]))
    index = opened(pack.index)
    assert index["columns"]["tag:order"] == [None, None]  # the newer one has no such tag
    assert pack.total == 2 and index["words"][0] == "Second try."
    assert index["columns"]["score"] == [1, 0] and column(pack, "status")[0] == "ok"
    assert takes(pack)[index["columns"]["take"][0]]["lines"][0]["text"] == "Second try."


def test_every_metric_and_tag_is_a_column(tmp_path: Path) -> None:
    one = replace(episode(0, 0.25), tags={"order": "2"})
    other = episode(1, None)
    pack = packs(write_records(tmp_path / "run", [other, one]))
    assert column(pack, "metric:length") == [None, 12]
    assert opened(pack.index)["columns"]["tag:order"] == [None, 0]
    assert column(pack, "status") == ["unscored: judge_error", "ok"]
    assert column(pack, "step") == [0, 0]


@pytest.mark.parametrize(("said", "apart"), [
    ([{"quality": {"score": 4}}, {"quality": {"score": 7}}], 3),
    ([{"quality": 4, "style": "plain"}, {"quality": 4, "style": "grand"}], 1),
    ([{"quality": 4}, {"quality": 4}], 0),
    ([{"quality": 4}], None),
    ([{"quality": 4}, {}], None),
])  # fmt: skip
def test_judges_disagree_by_their_largest_difference(
    said: list[dict[str, Any]], apart: float | None, tmp_path: Path
) -> None:
    record = episode(0, 0.5)
    verdicts = tuple(
        Verdict(judge=f"j{i}", purpose="score", said=one) for i, one in enumerate(said)
    )
    record = replace(record, score=replace(record.score, verdicts=verdicts))
    pack = packs(write_records(tmp_path / "run", [record]))
    assert column(pack, "apart") == [apart]


def test_an_actors_line_has_its_thinking_and_its_raw_reply(tmp_path: Path) -> None:
    turns = tuple(
        Turn((Segment("system", "You are Mia."), Segment("user", "Hi.")),
             Completion(text=f"<say>{i}</say>", reasoning=f"thought {i}"))
        for i in (1, 2)
    )  # fmt: skip
    lines = (Line("Ann", "Hi."), Line("Mia", "1"), Line("Ann", "So?"), Line("Mia", "2"))
    play = Episode(example_id="x", task="talk", traces=(Trace("Mia", turns),), transcript=lines)
    record = replace(spoken(play), gold="")
    (shown,) = takes(packs(write_records(tmp_path / "run", [record])))
    assert shown["actors"] == ["Mia"]
    assert [(x["seat"], x.get("thinking", ""), x.get("raw", "")) for x in shown["lines"]] == [
        ("Ann", "", ""), ("Mia", "thought 1", "<say>1</say>"),
        ("Ann", "", ""), ("Mia", "thought 2", "<say>2</say>"),
    ]  # fmt: skip
    assert shown["seen"] == [
        {"seat": "Mia", "segments": [["system", "You are Mia."], ["user", "Hi."]]}
    ]


def test_texts_are_whole_and_sanitised(tmp_path: Path) -> None:
    record = episode(0, 1.0, text=EVIL + "a" * 3_000_000 + "\ud800 end")
    pack = packs(write_records(tmp_path / "run", [record, episode(1, 0.0)]))
    first, second = takes(pack)
    assert first["lines"][0]["text"].startswith("<script>")
    assert first["lines"][0]["text"].endswith("a end")
    assert not any(sign in first["lines"][0]["text"] for sign in "\x1b\u202e\u2066\x00")
    assert len(opened(pack.index)["words"][0]) <= FIRST_WORDS
    assert second["lines"] and len(pack.chunks) == 2


def test_raw_calls_belong_to_their_episode() -> None:
    pack = packs(RECORDED / "judged")
    index = opened(pack.index)
    calls = [one for name, text in pack.chunks.items() if "calls" in name for one in opened(text)]
    shown = [calls[place] for place in index["columns"]["calls"]]
    assert len(shown) == pack.total == 3
    with LedgerView(RECORDED / "judged" / "ledger.sqlite") as view:
        for example, of_episode in zip(index["example"], shown, strict=True):
            texts = [[list(text) for text in one.texts()] for one in view.entries(example=example)]
            assert [one["texts"] for one in of_episode] == texts
            assert all(one["head"].startswith("judge ") for one in of_episode)


def many(count: int) -> Iterator[Record]:
    for i in range(count):
        yield episode(i, i % 2, text=base64.b64encode(str(hash((i, "x"))).encode() * 9).decode())


def test_a_page_that_is_too_large_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_records(tmp_path / "run", many(40))
    monkeypatch.setattr(explorer, "PORTABLE", 2000)
    with pytest.raises(RunError):
        packs(run)
    assert soul("report", run, "--format", "html", "--out", tmp_path / "page.html") == 2
    what, _, way = three_lines(capsys.readouterr().err)
    assert "larger than" in what and "--out DIR" in way and str(run) in way
    assert not (tmp_path / "page.html").exists()
    assert soul("report", run, "--format", "html", "--out", tmp_path / "page") == 0
    assert (tmp_path / "page" / "index.html").is_file()


def test_calls_that_do_not_fit_into_the_page_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packs(RECORDED / "judged")
    texts = sum(len(text) for name, text in whole.chunks.items() if "calls" not in name)
    monkeypatch.setattr(explorer, "PORTABLE", texts + 10)
    pack = packs(RECORDED / "judged")
    assert list(pack.chunks) == ["00001"] and "calls" not in opened(pack.index)["columns"]


def test_a_folder_has_one_file_for_each_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "CHUNK", 4000)
    run, out = write_records(tmp_path / "run", many(40)), tmp_path / "page"
    runs = load_runs([run], episodes=False)
    assert write_page(runs, out) == out / "index.html"
    files = sorted((out / "episodes").iterdir())
    assert [file.name for file in files[:2]] == ["00001.js", "00002.js"] and len(files) > 3
    monkeypatch.setattr(explorer, "CHUNK", 1 << 20)
    own = [out / "episodes" / name for name in ("chapter1.js", "00099.js", "notes.txt")]
    for file in own:
        file.write_text("let mine = 1;")
    write_page(runs, out)
    assert all(file.read_text() == "let mine = 1;" for file in own)
    (left,) = set((out / "episodes").iterdir()) - set(own)
    name, digest, text = json.loads(f"[{left.read_text()[len('soulkitChunk(') : -3]}]")
    assert (name, len(digest), len(opened(text))) == ("00001", 8, 40)
