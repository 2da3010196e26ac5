"""`soul judge sheet`, `import` and `correct` on real runs, with judges whose bias is known."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soulkit.runs.records import load_records
from tests.support.evaluation import soul, three_lines
from tests.support.judged import Body, evaluated, first_message, opinion, topic, write_rows
from tests.support.servers.openai_server import ScriptedServer

RECORDED = Path(__file__).parents[1] / "recorded"
ROWS = 120


def truth(i: int) -> int:
    """What people think of topic i: 1 to 9."""
    return 1 + (i * 7) % 9


def kind_judge(body: Body) -> str:
    """A point for the poor and two for the good: a judge that is wrong in its own way."""
    if "Participant A" in first_message(body):
        return json.dumps({"reasoning": "compared", "verdict": "A"})
    i = topic(body)
    points = min(10, truth(i) + 1 + (truth(i) > 4))
    return opinion(points, "lively" if i % 3 else "plain")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("people")
    rows = write_rows(folder / "rows.jsonl", ROWS)
    with ScriptedServer(answer=kind_judge) as server:
        return evaluated(folder / "run", rows, server.base_url, "--repeats", 2)


@pytest.fixture
def sheet(run: Path, tmp_path: Path, capfd: Any) -> Path:
    out = tmp_path / "sheet"
    assert soul("judge", "sheet", run, "--sample", 50, "--raters", 2, "--out", out) == 0
    capfd.readouterr()
    return out


Answer = Callable[[str, str], str]
"""(text that is shown, dimension) → label."""


def shown_topic(text: str) -> int:
    match = re.search(r"word(\d+)", text)
    assert match, text
    return int(match.group(1))


def people(text: str, dimension: str) -> str:
    """Everybody agrees with the truth, and reads what a check asks for."""
    wish = re.search(rf"for “{dimension}” choose ([\w-]+)", text)
    if wish:
        return wish.group(1)
    i = shown_topic(text)
    return str(truth(i)) if dimension == "quality" else ("lively" if i % 2 else "plain")


def cards_of(page: str) -> dict[tuple[str, str], str]:
    """(blind example, rollout) → the text of the card, as a rater reads it."""
    parts = re.split(r'<section class="card"', page)[1:]
    cards = {}
    for part in parts:
        names = re.search(r'data-example="(\w+)" data-rollout="(\d+)"', part)
        assert names
        cards[names[1], names[2]] = html.unescape(re.sub(r"<[^>]*>", " ", part))
    return cards


def fill(sheet: Path, number: int, answer: Answer = people) -> Path:
    """The CSV of a rater with every label filled in by who reads the page."""
    place = sheet / f"rater-{number}"
    cards = cards_of((place / "sheet.html").read_text())
    with (place / "sheet.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        row["label"] = answer(cards[row["example"], row["rollout"]], row["dimension"])
    filled = place / "filled.csv"
    with filled.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return filled


def imported(sheet: Path, *files: Path, code: int = 0, flags: tuple[str, ...] = ()) -> None:
    assert soul("judge", "import", *files, "--key", sheet / "key.json", *flags) == code


# -- the sheet -----------------------------------------------------------------------------------


def test_a_sheet_is_blind_and_a_random_sample_of_clusters(run: Path, sheet: Path) -> None:
    key = json.loads((sheet / "key.json").read_text())
    assert key["clusters"] == {"essay": {"clusters": ROWS, "drawn": 50}}
    records = {r.key: r for r in load_records(run / "episodes.jsonl")}
    page = (sheet / "rater-1" / "sheet.html").read_text()
    for hidden in (*records, *(r.example_id for r in records.values()), "endpoint", str(run)):
        assert hidden not in page
    real = [card for card in key["cards"].values() if card["keys"]]
    assert len(real) == 100  # both rollouts of every row that is drawn
    assert len({card["cluster"] for card in real}) == 50
    assert len(key["cards"]) == 102  # two attention checks
    orders = [list(cards_of((sheet / f"rater-{n}" / "sheet.html").read_text())) for n in (1, 2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_another_seed_draws_others_and_the_same_command_the_same(
    run: Path, sheet: Path, tmp_path: Path, capfd: Any
) -> None:
    again = ("judge", "sheet", run, "--sample", 50, "--raters", 2)
    before = (sheet / "key.json").read_bytes(), (sheet / "rater-2" / "sheet.csv").read_bytes()
    assert soul(*again, "--out", sheet) == 0
    assert before == (
        (sheet / "key.json").read_bytes(),
        (sheet / "rater-2" / "sheet.csv").read_bytes(),
    )
    assert soul(*again, "--seed", 1, "--out", tmp_path / "other") == 0
    drawn = [
        {card["cluster"] for card in json.loads((place / "key.json").read_text())["cards"].values()}
        for place in (sheet, tmp_path / "other")
    ]
    assert drawn[0] != drawn[1]
    capfd.readouterr()
    assert soul(*again, "--seed", 1, "--out", sheet) == 2
    assert "another sheet" in three_lines(capfd.readouterr().err)[0]


def test_what_models_write_is_no_markup_and_their_name_is_gone(tmp_path: Path) -> None:
    from soulkit.judge.rating_sheets import blinded

    assert blinded("I am gpt-nine, GPT-nine!\x1b[31m", ["gpt-nine"]) == "I am [model], [model]!"
    run = tmp_path / "judged"
    run.symlink_to(RECORDED / "judged", target_is_directory=True)
    assert soul("judge", "sheet", run, "--out", tmp_path / "s") == 0
    page = (tmp_path / "s" / "rater-1" / "sheet.html").read_text()
    assert "&lt;answer&gt;C&lt;/answer&gt;" in page and "<answer>" not in page
    assert "http" not in page.replace('http-equiv="Content', "")
    scripts = re.findall(r"<script>", page)
    assert len(scripts) == 1 and "script-src 'sha256-" in page


def test_a_scale_that_nobody_knows_is_asked_for(run: Path, tmp_path: Path, capfd: Any) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("ledger.sqlite*"))
    assert soul("judge", "sheet", copy, "--out", tmp_path / "s") == 2
    what, _, fix = three_lines(capfd.readouterr().err)
    assert "scale of 'quality'" in what and "--scale quality=0:10" in fix
    command = ("judge", "sheet", copy, "--out", tmp_path / "s", "--scale")
    assert soul(*command, "quality=0:10") == 0
    scales = json.loads((tmp_path / "s" / "key.json").read_text())["scales"]["essay"]
    assert scales["quality"] == {"labels": [str(i) for i in range(11)], "numeric": True}
    assert scales["style"]["labels"] == ["lively", "plain"]  # as the judge used them
    capfd.readouterr()
    assert soul(*command, "quality=0:100") == 2  # this is a scale, and another sheet lies there
    assert "another sheet" in three_lines(capfd.readouterr().err)[0]
    wrong_scales = ("quality", "quality=9:1", "quality=a:b", "quality=one", "quality=a,,b")
    for wrong in (*wrong_scales, "quality=0:101", "quality=a,a"):
        assert soul(*command, wrong) == 2
        assert "is not a valid scale" in three_lines(capfd.readouterr().err)[0]


def test_a_run_without_judge_has_nothing_to_rate(tmp_path: Path, capfd: Any) -> None:
    for name, words in (("before", "tasks (kind)"), ("ditto", "drafts of many checkpoints")):
        assert soul("judge", "sheet", RECORDED / name, "--out", tmp_path / "s") == 2
        assert words in three_lines(capfd.readouterr().err)[1]
    assert not (tmp_path / "s").exists()


# -- filled sheets -------------------------------------------------------------------------------


def test_bad_rows_are_named_by_line_and_left_out(sheet: Path, capfd: Any) -> None:
    filled = fill(sheet, 1)
    lines = filled.read_text().splitlines()
    lines[1] = re.sub(r",[^,]*,(rater 1)$", r",11,\1", lines[1])
    lines[2] = lines[2].replace(".1,essay", ".1,novel")
    lines[3] = re.sub(r"^\w+", "ffffffff", lines[3])
    lines[4] = lines[4].replace(",quality,", ",beauty,").replace(",style,", ",beauty,")
    lines[5] += ",more"
    lines[6] = re.sub(r",[^,]*,(rater 1)$", r",,\1", lines[6])
    lines[7] = re.sub(r",[^,]*,(rater 1)$", r",?,\1", lines[7])
    lines.append(lines[8])
    filled.write_text("\n".join(lines) + "\n")
    imported(sheet, filled, flags=("--json",))
    report = json.loads(capfd.readouterr().out)
    sources = {bad["source"].rpartition(":")[2]: bad["why"] for bad in report["bad"]}
    assert set(sources) == {"2", "3", "4", "5", "6", str(len(lines))}
    assert "is not a label of" in sources["2"] and "no card" in sources["3"]
    assert (
        "belongs to sheet 'ffffffff.1'" in sources["4"]
        and "has no dimension 'beauty'" in sources["5"]
    )
    assert "already rated this" in sources[str(len(lines))]
    assert report["unrated"] == 2
    labels = (sheet / "labels.jsonl").read_text().splitlines()
    # Of 204 rows five are bad and two empty; what is left of the checks' four is no label.
    assert report["labels"] == len(labels)
    assert 204 - 7 - 4 <= len(labels) <= 204 - 7


def test_a_spreadsheet_may_write_numbers_and_separators_its_own_way(sheet: Path) -> None:
    filled = fill(sheet, 1)
    text = filled.read_text()
    changed = re.sub(r",(\d+),(rater 1)", r",\1.0,\2", text).replace(",lively,", ",Lively,")
    imported(sheet, filled)
    before = (sheet / "labels.jsonl").read_text()
    filled.write_text("\ufeff" + changed.replace(",", ";"), encoding="utf-8")
    imported(sheet, filled)
    assert (sheet / "labels.jsonl").read_text() == before


def test_whoever_fails_a_check_is_named_and_left_out_on_request(sheet: Path, capfd: Any) -> None:
    def careless(text: str, dimension: str) -> str:
        return "5" if dimension == "quality" else "plain"

    files = fill(sheet, 1), fill(sheet, 2, careless)
    imported(sheet, *files)
    message = capfd.readouterr().err
    assert "rater 2 failed" in message and "rater 1 failed" not in message
    assert "still counted" in message
    raters = [json.loads(line)["rater"] for line in (sheet / "labels.jsonl").open()]
    assert set(raters) == {"rater 1", "rater 2"}
    imported(sheet, *files, flags=("--drop-failed",))
    assert {json.loads(line)["rater"] for line in (sheet / "labels.jsonl").open()} == {"rater 1"}
    capfd.readouterr()
    imported(sheet, files[1], flags=("--drop-failed",), code=2)
    assert "No label is left" in three_lines(capfd.readouterr().err)[0]


def test_files_that_are_no_sheets_are_refused(sheet: Path, tmp_path: Path, capfd: Any) -> None:
    wrong = tmp_path / "wrong.csv"
    for text, words in (
        ("a,b\n1,2\n", "no column sheet"), ("{]", "was not saved from a rating page"),
        ('{"labels": 3}', "was not saved from a rating page"), ("", "no column sheet"),
        ('{"labels": [3]}', "No label could be read"),
    ):  # fmt: skip
        wrong.write_text(text)
        imported(sheet, wrong, code=2)
        assert words in three_lines(capfd.readouterr().err)[0]
    imported(sheet, tmp_path / "absent.csv", code=2)
    assert "cannot be read" in three_lines(capfd.readouterr().err)[0]
    assert soul("judge", "import", wrong) == 2
    assert "Neither --run nor --key" in three_lines(capfd.readouterr().err)[0]
    assert soul("judge", "import", wrong, "--key", wrong) == 2
    assert "The key" in three_lines(capfd.readouterr().err)[0]


# -- the correction ------------------------------------------------------------------------------


def corrected(run: Path, labels: Path, capfd: Any) -> dict[str, Any]:
    capfd.readouterr()
    assert soul("judge", "correct", run, "--labels", labels, "--json") == 0
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    return report


def test_a_biased_judge_is_moved_to_the_truth(run: Path, sheet: Path, capfd: Any) -> None:
    imported(sheet, fill(sheet, 1), fill(sheet, 2))
    cells = corrected(run, sheet / "labels.jsonl", capfd)["tasks"]["essay"]["dimensions"]
    mean = sum(map(truth, range(ROWS))) / ROWS
    quality = cells["quality"]
    assert quality["judged"]["value"] > mean + 1  # the judge is far off, and sure of itself
    assert quality["judged"]["ci_low"] > mean
    assert quality["corrected"]["ci_low"] < mean < quality["corrected"]["ci_high"]
    assert quality["corrected"]["value"] == pytest.approx(mean, abs=0.1)
    width = {name: quality[name]["ci_high"] - quality[name]["ci_low"]
             for name in ("corrected", "labelled")}  # fmt: skip
    assert width["corrected"] < 0.75 * width["labelled"]
    assert 0.5 < quality["lambda"] < 1.2
    assert quality["bias"]["ci_low"] < 13 / 9 + 0.2 and quality["bias"]["value"] > 1.2
    assert (quality["clusters"], quality["labelled_clusters"]) == (ROWS, 50)
    assert quality["labelled"]["n"] == 100
    assert quality["between_raters"]["alpha"]["value"] == pytest.approx(1)
    assert quality["judge_and_people"]["n"] == 100
    assert 0 < quality["judge_and_people"]["alpha"]["value"] < 1


def test_the_headline_follows_from_its_dimensions(run: Path, sheet: Path, capfd: Any) -> None:
    imported(sheet, fill(sheet, 1))
    cells = corrected(run, sheet / "labels.jsonl", capfd)["tasks"]["essay"]["dimensions"]
    headline, quality = cells["headline"], cells["quality"]
    assert headline["weights"] == pytest.approx({"constant": 0, "quality": 0.1}, abs=1e-9)
    for name in ("judged", "labelled", "corrected", "bias"):
        assert headline[name]["value"] == pytest.approx(quality[name]["value"] / 10)
    # Labels by name are counted: of two names the second, in the order of the judge's form.
    assert "style=lively" in cells and "style=plain" not in cells
    style = cells["style=lively"]
    assert style["judged"]["value"] == pytest.approx(2 / 3) and style["level"] == "nominal"
    assert style["corrected"]["ci_low"] < 0.5 < style["corrected"]["ci_high"]
    assert style["between_raters"] is None


def test_the_tables_say_who_where_and_how_sure(run: Path, sheet: Path, capfd: Any) -> None:
    imported(sheet, fill(sheet, 1), fill(sheet, 2))
    capfd.readouterr()
    assert soul("judge", "correct", run, "--labels", sheet / "labels.jsonl") == 0
    shown = capfd.readouterr().out
    for words in ("corrected", "judge − people", "50 of 120", "raters", "judge and people"):
        assert words in shown


def test_labels_of_ones_own_need_no_sheet(run: Path, tmp_path: Path, capfd: Any) -> None:
    records = [r for r in load_records(run / "episodes.jsonl") if r.rollout == 0][:8]
    labels = tmp_path / "labels.jsonl"
    lines = [
        {"task": "essay", "example": r.example_id, "dimension": "quality", "label": 3 + i % 2}
        for i, r in enumerate(records)
    ]
    lines.append({"task": "essay", "example": "nowhere", "dimension": "quality", "label": 1})
    lines.append({**lines[0], "dimension": "gaol"})
    lines.append({**lines[1], "label": "n/a", "rater": "other"})
    labels.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = corrected(run, labels, capfd)
    quality = report["tasks"]["essay"]["dimensions"]["quality"]
    assert quality["labelled"]["n"] == 8 and quality["labelled"]["value"] == 3.5
    assert any(
        "labels without a judged episode in this run: 1" in remark for remark in report["remarks"]
    )
    assert any("people labelled 'gaol'" in remark for remark in report["remarks"])


def test_labels_that_fit_nothing_are_refused(run: Path, tmp_path: Path, capfd: Any) -> None:
    labels = tmp_path / "labels.jsonl"
    for text, words in (
        ('{"task": "essay"}', "is not a valid label"),
        ('{"task": "essay", "example": "x", "dimension": "d", "label": 1}', "No label"),
        ("oops\n{}", "not a JSON object"),
    ):
        labels.write_text(text + "\n")
        assert soul("judge", "correct", run, "--labels", labels) == 2
        assert words in three_lines(capfd.readouterr().err)[0]
    assert soul("judge", "correct", run, "--labels", tmp_path / "absent") == 2
    assert "no label file" in three_lines(capfd.readouterr().err)[0]


def test_labels_of_another_models_words_are_refused(
    run: Path, sheet: Path, tmp_path: Path, capfd: Any
) -> None:
    """Rows and rollouts have the same names in the run of another model."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    text = (run / "episodes.jsonl").read_text()
    (other / "episodes.jsonl").write_text(text.replace("ending", "closing"))
    for pairs in ((), ("--pairs",)):
        place = tmp_path / f"sheet{len(pairs)}"
        assert soul("judge", "sheet", run, "--out", place, *pairs) == 0
        imported(place, fill(place, 1, either))
        capfd.readouterr()
        assert soul("judge", "correct", other, "--labels", place / "labels.jsonl") == 2
        assert "belong to another run" in three_lines(capfd.readouterr().err)[0]
        assert soul("judge", "correct", run, "--labels", place / "labels.jsonl") == 0


def either(text: str, dimension: str) -> str:
    return "A" if dimension == "preference" else people(text, dimension)


def test_labels_off_the_scale_are_left_out(run: Path, tmp_path: Path, capfd: Any) -> None:
    """Without a sheet, too: the question to the judge says how far its scale goes."""
    records = [r for r in load_records(run / "episodes.jsonl") if r.rollout == 0][:12]
    labels = tmp_path / "labels.jsonl"

    def write(*values: int) -> None:
        named = zip(records, values, strict=True)
        lines = [{"task": "essay", "example": r.example_id, "dimension": "quality", "label": v}
                 for r, v in named]  # fmt: skip
        labels.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write(*[9] * 11, 90)
    report = corrected(run, labels, capfd)
    quality = report["tasks"]["essay"]["dimensions"]["quality"]
    assert (quality["labelled"]["n"], quality["labelled"]["value"]) == (11, 9)
    assert any(
        "labels of 'quality' left out because they are outside its scale (0 to 10): 1" in r
        for r in report["remarks"]
    )
    write(*[90] * 12)
    assert soul("judge", "correct", run, "--labels", labels) == 2
    assert "can be used" in three_lines(capfd.readouterr().err)[0]


def test_no_number_is_cut_on_a_narrow_terminal(run: Path, sheet: Path, capfd: Any) -> None:
    imported(sheet, fill(sheet, 1), fill(sheet, 2))
    command = [sys.executable, "-m", "soulkit.cli.app", "judge", "correct", str(run), "--labels"]
    shown = subprocess.run(
        [*command, str(sheet / "labels.jsonl")], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "72"},
    ).stdout  # fmt: skip
    assert not re.search(r"\w…", shown) and "style=lively" in shown
    assert len(re.findall(r"\d\.\d{3} \[.?\d\.\d{3}, \d\.\d{3}\]", shown)) >= 6


def test_few_labels_stand_alone_and_it_says_so(run: Path, tmp_path: Path, capfd: Any) -> None:
    record = load_records(run / "episodes.jsonl")[0]
    labels = tmp_path / "labels.jsonl"
    line = {"task": "essay", "example": record.example_id, "dimension": "quality", "label": 4}
    labels.write_text(json.dumps(line) + "\n")
    report = corrected(run, labels, capfd)
    quality = report["tasks"]["essay"]["dimensions"]["quality"]
    assert quality["lambda"] == 0 and quality["corrected"]["value"] == 4
    assert quality["corrected"]["ci_low"] is None
    assert any("too few" in remark for remark in report["remarks"])


# -- pairs ---------------------------------------------------------------------------------------


def test_pairs_come_in_both_orders_and_are_read_back(run: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "pairs"
    command = ("judge", "sheet", run, "--pairs", "--sample", 40, "--raters", 2, "--out", out)
    assert soul(*command) == 0
    key = json.loads((out / "key.json").read_text())
    assert len(key["exchanged"]) == 20 and len(key["cards"]) == 42
    records = {r.key: r for r in load_records(run / "episodes.jsonl")}

    def first_rollout(text: str, dimension: str) -> str:
        """Prefers the ending of rollout 0 wherever it stands."""
        wish = re.search(r"for “preference” choose (\w+)", text)
        if wish:
            return wish.group(1)
        one, two = re.findall(r"ending(\d+)", text)
        return "A" if int(one) < int(two) else "B"

    imported(out, fill(out, 1, first_rollout), fill(out, 2, first_rollout))
    lines = [json.loads(line) for line in (out / "labels.jsonl").open()]
    assert len(lines) == 80 and len({line["shown"] for line in lines}) == 2
    for line in lines:
        ends = [int(records[line[k]].episode.transcript[0].text.rpartition("ending")[2])
                for k in ("key", "other")]  # fmt: skip
        assert line["label"] == ("A" if ends[0] < ends[1] else "B")
    pairs = corrected(run, out / "labels.jsonl", capfd)["tasks"]["essay"]["pairs"]
    assert pairs["n"] == 40 and pairs["first_preferred"] == 0.5
    assert pairs["between_raters"]["exact"]["value"] == 1
    assert pairs["judge_and_people"]["exact"]["value"] == 0  # the judge's scores are all ties
    assert soul("judge", "correct", run, "--labels", out / "labels.jsonl") == 0
    assert "preferred in 50 %" in capfd.readouterr().out


def test_pairs_need_two_drafts_of_a_row(tmp_path: Path, capfd: Any) -> None:
    run = RECORDED / "judged"
    assert soul("judge", "sheet", run, "--pairs", "--out", tmp_path / "s") == 2
    assert "--repeats 2" in three_lines(capfd.readouterr().err)[2]
