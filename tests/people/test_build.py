"""The road from chats to a measured model: its plan, and what it does when it is started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soulkit.errors import DataError, RunError
from soulkit.people.build import Road, RoadStep, road_steps

NAMES = ["01-import", "02-redact", "03-dedupe", "04-split", "05-validation", "06-plant",
         "07-train", "08-memory", "09-closeness", "10-page"]  # fmt: skip


def plan(folder: Path, *training: str, **options: object) -> list[RoadStep]:
    chats = folder / "my chats.jsonl"
    chats.write_text("{}\n")
    return road_steps(chats, folder / "out", training, **options)  # type: ignore[arg-type]


def walk(folder: Path, steps: list[RoadStep], end: int = 100) -> Road:
    """Write what the first steps would write, and note that they are done."""
    road = Road(folder / "out", lambda: steps)
    for step in steps[:end]:
        if not road.is_done(step):
            road.begin(step)
            if step.report:
                step.report.write_text('{"left_out": {}, "private": {"email": 2}}')
            text = f'{{"person": "{step.name}", "messages": [{{}}, {{}}]}}\n'
            for file in (step.writes.with_name("train.jsonl"), step.writes):
                file.write_text(text)
            road.finish(step)
    return Road(folder / "out", lambda: steps)


@pytest.mark.parametrize(
    ("options", "absent"),
    [({}, []), ({"allow_private": True}, ["02-redact"]), ({"canaries": 0}, ["06-plant"])],
)
def test_every_step_reads_what_an_earlier_one_wrote(
    tmp_path: Path, options: dict[str, object], absent: list[str]
) -> None:
    steps = plan(tmp_path, "--model", "tiny", **options)
    assert [step.name for step in steps] == [name for name in NAMES if name not in absent]
    written = {tmp_path / "my chats.jsonl"}
    for step in steps:
        assert step.reads and set(step.reads) <= written, step.name
        folder = step.writes.parent
        written |= {step.writes, folder, folder / "train.jsonl", folder / "held_out.jsonl"}
    train = next(step for step in steps if step.name == "07-train")
    assert train.words[-2:] == ("--model", "tiny") or train.words[-1] == "--allow-private"
    closeness = next(step for step in steps if step.name == "09-closeness")
    held_out = tmp_path / "out/04-split/held_out.jsonl"
    assert held_out in closeness.reads and held_out not in train.reads
    assert "my chats.jsonl' -o" in steps[0].line and steps[0].line.endswith("> " + str(
        tmp_path / "out/01-import/report.json"))  # fmt: skip


def test_finished_steps_are_skipped_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    steps = plan(tmp_path)
    road = walk(tmp_path, steps, 6)
    assert [road.is_done(step) for step in steps] == [True] * 6 + [False] * 4
    assert road.record["material"] == {"person": 1, "conversation": 1, "message": 2}
    assert road.record["redacted"] == {"email": 2}
    steps[3].writes.unlink()
    left = steps[3].writes.with_name("train.jsonl")
    assert not road.is_done(steps[3]) and left.exists()
    road.begin(steps[3])
    assert not left.exists()
    training = steps[6].writes.with_name("state")
    training.parent.mkdir()
    training.touch()
    road.begin(steps[6])
    assert training.exists(), "a training resumes"
    whole = walk(tmp_path, steps)
    assert [whole.is_done(step) for step in steps] == [True] * 9 + [False]  # the page is rewritten


def test_changed_options_and_files_name_what_would_be_done_again(tmp_path: Path) -> None:
    walk(tmp_path, plan(tmp_path, steps=60)).refuse_changes()
    out = tmp_path / "out"
    with pytest.raises(RunError) as caught:
        Road(out, lambda: plan(tmp_path, steps=90)).refuse_changes()
    error = caught.value
    assert "07-train had '60' where it now has '90'" in error.what
    assert "07-train, 08-memory, 09-closeness." in error.why and "10-page" not in error.why
    assert "06-plant" not in error.why and error.way_out.endswith(f"rm -r {out}/07-train")
    steps = plan(tmp_path, steps=60)
    (tmp_path / "my chats.jsonl").write_text("{}\n{}\n")
    with pytest.raises(RunError) as caught:
        Road(out, lambda: steps).refuse_changes()
    assert (
        "what 01-import read has changed" in caught.value.what and "02-redact" in caught.value.why
    )


@pytest.mark.parametrize(
    "record",
    ['{"done": []}', '{"done": {"01-import": 5}}', '{"done": {"01-import": {}}}',
     '{"done": {"01-import": {"command": "a \'b", "reads": {"x": 1}}}}'],
)  # fmt: skip
def test_a_damaged_record_is_an_error(tmp_path: Path, record: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/road.json").write_text(record)
    with pytest.raises(DataError, match=r"road\.json"):
        Road(tmp_path / "out", lambda: plan(tmp_path))


def test_unclosed_quotes_and_damaged_rows_are_errors(tmp_path: Path) -> None:
    steps, out = plan(tmp_path), tmp_path / "out"
    walk(tmp_path, steps, 2)
    record = json.loads((out / "road.json").read_text())
    record["done"]["01-import"]["command"] = "soul 'data"
    (out / "road.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="01-import had"):
        Road(out, lambda: steps).refuse_changes()
    (out / "01-import/chats.jsonl").write_text('{"messages": [1]}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl"):
        plan(tmp_path)


def test_no_step_writes_through_a_link(tmp_path: Path) -> None:
    steps, other = plan(tmp_path), tmp_path / "other"
    other.mkdir()
    (other / "keep").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/01-import").symlink_to(other)
    with pytest.raises(RunError, match="01-import"):
        walk(tmp_path, steps, 1)
    assert [one.name for one in other.iterdir()] == ["keep"]


def test_after_the_folder_is_deleted_a_changed_option_is_accepted(tmp_path: Path) -> None:
    walk(tmp_path, plan(tmp_path, steps=60))
    for file in (tmp_path / "out/07-train").iterdir():
        file.unlink()
    road = Road(tmp_path / "out", lambda: plan(tmp_path, steps=90))
    road.refuse_changes()
    assert [road.is_done(step) for step in road.steps] == [True] * 6 + [False] * 4


def test_the_side_follows_the_speaker_whom_redaction_renames(tmp_path: Path) -> None:
    names = {"01-import": ("Ann", "Tom"), "02-redact": ("Futi", "Nogi")}
    for step, (a, b) in names.items():
        (tmp_path / "out" / step).mkdir(parents=True)
        row = {"messages": [{"speaker": a, "content": "hi"}, {"speaker": b, "content": "oh"}]}
        (tmp_path / "out" / step / "chats.jsonl").write_text(json.dumps(row) + "\n")
    for side, expected in (("Tom", "Nogi"), ("human", "human")):
        closeness = plan(tmp_path, side=side)[-2]
        assert closeness.words[closeness.words.index("--side") + 1] == expected
    private = plan(tmp_path, side="Tom", allow_private=True)[-2]
    assert "Tom" in private.words
