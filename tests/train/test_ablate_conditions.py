"""`soul train ablate` puts no difference between methods that are not measured the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.report import ablation
from tests.support import judged
from tests.support.servers.openai_server import ScriptedServer
from tests.support.training import random_model, soul

SMALL = ("--task", "tomi", "--data", "tomi=synth:24", "--prompts", 2, "--group-size", 2,
         "--max-tokens", 6, "--lora-r", 2, "--lr", 1e-3, "--steps", 1, "--seeds", 1)  # fmt: skip
NOBODY = "http://127.0.0.1:9/v1"
"""Where no server is: what is refused here asks nobody."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny", max_context=512)


def scene(tmp_path: Path, methods: str, *more: Any) -> int:
    """Methods on a judged dialogue, with the players j, k, p and q by name."""
    book = {name: {"model": name, "base_url": NOBODY} for name in "jkpq"}
    (tmp_path / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
    return soul(
        "train", "ablate", "--methods", methods, "--model", "m", "--task", "sotopia",
        "--data", "sotopia=synth:8", "--endpoints", tmp_path / "book.yaml", "--partner", "p",
        "--judge", "j", "--out", tmp_path / "out", *more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("judge=k", "judge endpoint:j@http://127.0.0.1:9/v1 against endpoint:k@"),
        ("judge_samples=2", "judge samples 1 against 2"),
        ("judge_order=seeded", "judge order both against seeded"),
        ("partner=q", "partner endpoint:p@http://127.0.0.1:9/v1 against endpoint:q@"),
        ("protocol=reference", "protocol paper against reference"),
        ("limit=4", "limit none against 4"),
        ("eval_every=1", "dev split none against there"),
        ("tasks.sotopia=2", "mixing ratio 1.0 against 2.0"),
        ("data.sotopia=other.jsonl", "rows of synth:8 against other.jsonl"),
        ("where.hard=maybe", "where {} against {'hard': 'maybe'}"),
    ],
)
def test_methods_that_would_be_measured_in_another_way_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, words: str
) -> None:
    assert scene(tmp_path, f"grpo,ditto,grpo:{setting}") == 2
    lines = [line.partition(": ") for line in capsys.readouterr().err.splitlines()]
    assert [head for head, *_ in lines] == ["error", "why", "fix"]
    assert f"grpo against grpo:{setting}: sotopia: {words}" in lines[0][2]
    assert "against ditto" not in lines[0][2]
    assert "--force-mixed" in lines[2][2]
    assert not (tmp_path / "out").exists()


def test_a_partner_that_every_method_trains_is_another_one_in_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene(tmp_path, "grpo,ditto", "--partner", "sotopia=actor") == 2
    assert "grpo against ditto: sotopia: partner actor:m" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_method_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms = "grpo,ditto:coach=k,ditto:temperature=0.5,grpo:max_tokens=9,grpo:group_size=3"
    assert scene(tmp_path, f"{arms},grpo:judge=j", "--dry-run") == 0
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run", "--force-mixed") == 0


@pytest.mark.slow
def test_a_mixture_is_told_as_one(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ("train", "ablate", "--model", model, *SMALL, "--out", out, "--methods",
               "grpo,grpo:limit=12,grpo:temperature=0.5")  # fmt: skip
    assert soul(*command) == 2
    assert soul(*command, "--force-mixed", "--json") == 0
    capsys.readouterr()
    first, fewer, cold = ablation.load_ablation(out).rows
    assert first.mixed == cold.mixed == () and fewer.remarks == ()
    assert fewer.mixed == ("tomi: training rows 24 against 12",)
    assert cold.remarks == ("tomi: temperature 1.0 against 0.5",)
    assert fewer.final_difference is not None and cold.final_difference is not None
    page = (out / "report" / "index.html").read_text()
    assert "grpo against grpo:limit=12, not measured the same way, the difference mixes" in page

    state = json.loads((out / "ablation.json").read_text())
    (out / "ablation.json").write_text(json.dumps({**state, "force_mixed": False}))
    comparison = ablation.load_ablation(out)
    _, fewer, cold = comparison.rows
    assert fewer.final_difference is fewer.area_difference is fewer.dev_difference is None
    assert cold.final_difference is not None and fewer.final.mean is not None
    page = ablation.write_ablation(comparison, tmp_path / "page").read_text()
    apart = "grpo against grpo:limit=12, not measured the same way, so without a difference"
    for line in (
        f"{apart}: tomi: training rows 24 against 12.",
        "grpo against grpo:temperature=0.5: tomi: temperature 1.0 against 0.5.",
    ):
        assert line in page and line in ablation.method_notes(comparison)
    saved = json.loads((tmp_path / "page" / "comparison.json").read_text())["rows"][1]
    assert saved["final_difference"] is None and saved["mixed"] == list(fewer.mixed)

    runs = [out / arm / "seed_0" for arm in ("grpo", "grpo-limit=12", "grpo-temperature=0.5")]
    capsys.readouterr()
    assert soul("compare", *runs[:2]) == 2
    assert "tomi: training rows 24 against 12" in capsys.readouterr().err
    assert soul("compare", runs[0], runs[2], "--json") == 0
    *remarks, drafted = json.loads(capsys.readouterr().out)["remarks"]
    assert remarks == list(cold.remarks) and "drafts while training" in drafted


@pytest.mark.slow
def test_recorded_methods_with_other_judges_have_no_difference(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the settings cannot tell before the start: somebody else's word in the folder."""
    out = tmp_path / "out"
    assert soul("train", "ablate", "--model", model, *SMALL, "--out", out, "--methods",
                "grpo,grpo:kl_coef=0.01") == 0  # fmt: skip
    assert ablation.load_ablation(out).rows[1].final_difference is not None
    for arm, name in (("grpo", "j"), ("grpo-kl_coef=0.01", "k")):
        file = out / arm / "seed_0" / "provenance.json"
        record = json.loads(file.read_text())
        seated = {"judge": [{"kind": "endpoint", "model": name, "address": NOBODY}]}
        record["tasks"]["tomi"] |= {"roles": ["judge"], "players": seated}
        file.write_text(json.dumps(record))
    row = ablation.load_ablation(out).rows[1]
    assert row.final_difference is None
    assert row.mixed == (f"tomi: judge endpoint:j@{NOBODY} against endpoint:k@{NOBODY}",)


def test_judges_of_their_own_need_one_who_scores_all_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run") == 2
    assert "--eval-judge WHO" in capsys.readouterr().err.splitlines()[-1]
    assert scene(tmp_path, "grpo,grpo:judge=k", "--dry-run", "--eval-judge", "q") == 0
    capsys.readouterr()
    assert scene(tmp_path, "grpo,grpo:partner=q", "--dry-run", "--eval-judge", "q") == 2
    assert "partner endpoint:p@" in capsys.readouterr().err


@pytest.mark.slow
def test_ends_of_methods_with_other_judges_are_compared_by_one(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two judged trainings in earnest: what the judges of the training said has no difference."""
    rows = judged.write_rows(tmp_path / "rows.jsonl", 8)
    with ScriptedServer(answer=judged.judge()) as server:
        book = {name: {"model": name, "base_url": server.base_url} for name in "jkq"}
        (tmp_path / "book.yaml").write_text(yaml.safe_dump({"endpoints": book}))
        command = (
            "train", "ablate", "--methods", "grpo,grpo:judge=k", "--model", model, "--tasks",
            judged.TASKS, "--task", "essay", "--data", f"essay={rows}", "--endpoints",
            tmp_path / "book.yaml", "--judge", "j", "--eval-judge", "q", "--prompts", 2,
            "--group-size", 2, "--max-tokens", 6, "--lora-r", 2, "--steps", 1, "--seeds", 1,
            "--match", "prompts", "--backoff", 0, "--out", tmp_path / "out",
        )  # fmt: skip
        assert soul(*command) == 0
        models = [body["model"] for body in server.requests]
        assert models.count("q") == models.count("j") + models.count("k")
        assert soul(*command, "--json") == 0
        assert len(server.requests) == len(models)
        # Another judge of all ends has folders of its own, and nothing is trained again. What that
        # judge said of its own method while training is in the ledger.
        others = ("k" if word == "q" else word for word in command)
        assert soul(*others) == 0 and len(server.requests) - len(models) == models.count("j")
        again = ablation.load_ablation(tmp_path / "out")
        assert again.eval_judge == f"endpoint:k@{server.base_url}"
        assert again.rows[0].judged.mean is not None
        assert soul(*command) == 0
    comparison = ablation.load_ablation(tmp_path / "out")
    first, other = comparison.rows
    assert comparison.eval_judge == f"endpoint:q@{server.base_url}"
    assert other.final_difference is None and "judge endpoint:j@" in other.mixed[0]
    assert first.judged.mean is not None and other.judged_difference is not None
    assert other.judged_difference.mean is not None
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "judged end" in page and "endpoint:q@" in page
