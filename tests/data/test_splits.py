"""Whole combinations of values on one side: dev splits of training and `soul data split` alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soulkit.cli import app as cli
from soulkit.data.files import RawRow, read_rows, write_rows
from soulkit.data.rows import dev_split, group_key
from soulkit.data.splits import split_rows
from soulkit.errors import ConfigError, DataError, UserError
from soulkit.tasks.loading import load_examples
from soulkit.tasks.registry import load_registry
from soulkit.train.config import TrainConfig

GROUPS = [(a, b) for a in "abcdefgh" for b in range(6)]


def rows(copies: int = 4) -> list[RawRow]:
    cells = [{"who": a, "age": b, "note": f"{a}{b}{i}"} for i in range(copies) for a, b in GROUPS]
    return [RawRow(row, f"x:{i}") for i, row in enumerate(cells)]


def groups(side: Any) -> set[tuple[Any, Any]]:
    return {(row.fields["who"], row.fields["age"]) for row in side}


def test_a_combination_is_never_on_both_sides() -> None:
    parts = split_rows(rows(), ["who", "age"], 0.25)
    assert not groups(parts.rest) & groups(parts.aside)
    assert len(parts.rest) + len(parts.aside) == 4 * len(GROUPS)
    assert (parts.groups_rest, parts.groups_aside) == (
        len(groups(parts.rest)), len(groups(parts.aside)),
    )  # fmt: skip
    assert 4 <= parts.groups_aside <= 20 and len(parts.aside) == 4 * parts.groups_aside


def test_it_depends_on_the_values_and_the_seed_alone() -> None:
    first = groups(split_rows(rows(), ["who", "age"], 0.25).aside)
    backwards = split_rows(rows()[::-1], ["who", "age"], 0.25)
    assert groups(backwards.aside) == first
    assert groups(split_rows(rows()[:90], ["who", "age"], 0.25).aside) <= first
    assert first < groups(split_rows(rows(), ["who", "age"], 0.5).aside)
    assert groups(split_rows(rows(), ["who", "age"], 0.25, seed=1).aside) != first


def test_by_one_column_all_of_its_rows_stay_together() -> None:
    parts = split_rows(rows(), ["who"], 0.3)
    sides = [{row.fields["who"] for row in side} for side in (parts.rest, parts.aside)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set("abcdefgh")


def test_an_absent_value_is_a_group_of_its_own() -> None:
    some = [*rows(), RawRow({"who": "a"}, "x:a"), RawRow({"who": "a", "age": None}, "x:b")]
    parts = split_rows(some, ["who", "age"], 0.5)
    sides = [{row.source for row in side} & {"x:a", "x:b"} for side in (parts.rest, parts.aside)]
    assert {"x:a", "x:b"} in sides and parts.groups_rest + parts.groups_aside == len(GROUPS) + 1


@pytest.mark.parametrize(
    ("by", "share", "error", "words"),
    [
        (["whom"], 0.1, ConfigError, "Did you mean 'who'"),
        ([], 0.1, ConfigError, "--by NAME,NAME"),
        (["who"], 1.0, ConfigError, "no share"),
        (["who"], 0.0, ConfigError, "no share"),
    ],
)
def test_what_makes_no_groups_is_refused(
    by: list[str], share: float, error: type[UserError], words: str
) -> None:
    with pytest.raises(error) as refusal:
        split_rows(rows(), by, share)
    assert words in " ".join(refusal.value.lines())


def test_rows_that_are_all_alike_are_one_group() -> None:
    with pytest.raises(DataError, match="same who and age"):
        split_rows([rows()[0], rows()[0]], ["who", "age"], 0.5)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_two_files_and_says_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_rows(Path("all.jsonl"), [row.fields for row in rows()])
    call = ["data", "split", "all.jsonl", "--by", "who, age", "--share", "0.25", "--out", "parts"]
    assert cli.main([*call, "--json"]) == 0
    told_sizes = json.loads(capfd.readouterr().out)
    assert cli.main(call) == 0  # once more: the same files
    printed = capfd.readouterr().out
    train, held_out = (read_rows(Path("parts") / f"{n}.jsonl")[0] for n in ("train", "held_out"))
    assert told_sizes["train"]["rows"] == len(train) and len(train) + len(held_out) == 192
    assert told_sizes["held_out"]["combinations"] == len(groups(held_out))
    assert f"{len(held_out)} rows, {len(groups(held_out))} combinations of who, age" in printed
    assert groups(held_out) == groups(split_rows(rows(), ["who", "age"], 0.25).aside)


def test_the_command_writes_good_rows_and_names_bad_ones(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(row.fields) + "\n" for row in rows()) + "{no json\n")
    out = str(tmp_path / "parts")
    assert cli.main(["data", "split", str(file), "--by", "who", "--out", out]) == 2
    assert "bad row" in capfd.readouterr().err
    assert sum(len(read_rows(path)[0]) for path in Path(out).iterdir()) == 192


def test_an_unknown_column_is_told_in_three_lines(tmp_path: Path, capfd: Any) -> None:
    write_rows(tmp_path / "all.jsonl", [row.fields for row in rows()])
    assert cli.main(["data", "split", str(tmp_path / "all.jsonl"), "--by", "ago"]) == 2
    error = capfd.readouterr().err
    assert error.splitlines()[0] == "error: No row has a column 'ago'."
    assert "Did you mean 'age'?" in error and not list(tmp_path.glob("*split*"))


# -- dev splits ------------------------------------------------------------------------------------


def examples(tmp_path: Path) -> Any:
    task = load_registry().task("tomi")
    cells = [
        {"story": f"1 Ada entered the {a}.", "question": f"Where is {b}?", "answer": "jar",
         "question_type": b, "order": i}
        for i in range(3) for a in ("loft", "barn", "hall", "shed", "yard") for b in "abcdef"
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    write_rows(path, cells, data_source="tomi")
    return load_examples(task, [path]).examples


def test_a_dev_split_by_columns_holds_whole_combinations_out(tmp_path: Path) -> None:
    everything = examples(tmp_path)
    train, dev = dev_split(everything, 0.4, ("story",))
    assert {e.fields["story"] for e in train} & {e.fields["story"] for e in dev} == set()
    assert train and dev and len(train) + len(dev) == len(everything)
    assert [e for e in everything if e in dev] == list(dev)


def test_a_dev_split_tears_no_story_and_knows_its_columns(tmp_path: Path) -> None:
    everything = examples(tmp_path)
    with pytest.raises(ConfigError, match="tears 5 stories apart"):
        dev_split(everything, 0.4, ("question_type",))
    with pytest.raises(ConfigError, match="no field 'storey'") as refusal:
        dev_split(everything, 0.4, ("storey",))
    assert refusal.value.way_out == "Did you mean 'story'?"


def test_the_setting_takes_names_with_commas() -> None:
    rest = {"method": "ditto", "tasks": {"tomi": 1.0}, "eval_every": 5}
    for names in ("job, town,pet", ["job,town", "pet"], ("job", "town", "pet")):
        assert TrainConfig.model_validate({**rest, "dev_by": names}).dev_by == (
            "job",
            "town",
            "pet",
        )
    assert TrainConfig.model_validate(rest).dev_by == ()
    with pytest.raises(ValueError, match="which --eval-every STEPS makes"):
        TrainConfig.model_validate({**rest, "dev_by": "job", "eval_every": None})


def test_the_key_of_a_group_does_not_mix_columns_up() -> None:
    assert group_key({"a": "x", "b": "y"}, ["a", "b"]) != group_key(
        {"a": "y", "b": "x"}, ["a", "b"]
    )
    assert group_key({"a": 1.0}, ["a"]) == group_key({"a": 1, "b": 2}, ["a"])
