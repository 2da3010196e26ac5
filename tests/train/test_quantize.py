"""`--quantize nf4`: a base in 4 bits trains, samples, saves and is evaluated like any other.

bitsandbytes has a CPU build, so real steps run here. Without the package only the refusals are
tested.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.errors import ConfigError, MissingPackage, ModelLoadError
from soulkit.models.local.quantize import base_remark, is_quantised, loading_arguments
from soulkit.models.local.sampler import LocalModel
from soulkit.runs.folder import read_environment
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span, spans
from soulkit.train.rollouts.engine_choice import check_served, refuse_engine
from soulkit.train.rollouts.push import Distance, LogprobProbe
from soulkit.train.run import refuse_untrainable
from soulkit.types import Call, Sampling
from tests.support.evaluation import three_lines
from tests.support.shapes import KINDS, VISUAL, build
from tests.support.training import (
    assert_close,
    config,
    gradients,
    jolt,
    policy_of,
    random_model,
    rows,
    soul,
    step_of,
)

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra nf4 is not installed"
)
LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}
TOMI = ("--task", "tomi", "--data", "synth:4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def quantised(folder: Path, **settings: Any) -> Policy:
    return policy_of(folder, quantize="nf4", **LORA, **settings)


def packed_layers(model: Any) -> list[Any]:
    """The linear layers in 4 bits, under their adapters."""
    import bitsandbytes

    return [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]


def unpacked(folder: Path) -> Policy:
    """A policy on plain linear layers with the values that the 4 bits stand for."""
    from bitsandbytes.functional import dequantize_4bit

    small, plain = quantised(folder), policy_of(folder, **LORA)
    with torch.no_grad():
        for ours, theirs in zip(linear(plain.decoder), packed_layers(small.decoder), strict=True):
            ours.weight.copy_(dequantize_4bit(theirs.weight.data, theirs.weight.quant_state))
    return plain


def linear(decoder: Any) -> list[Any]:
    """The frozen linear layers, under their adapters."""
    return [m for name, m in decoder.named_modules()
            if isinstance(m, torch.nn.Linear) and ".lora_" not in name]  # fmt: skip


def backward(policy: Policy, some: list[Span]) -> dict[str, torch.Tensor]:
    """Gradients of the summed log-probs, after a pass without gradients as in sampling."""
    log_probs(policy, some, None)
    for _, parameter in policy.trained:
        parameter.grad = None
    for pack in policy.packs(some):
        policy.score(pack).log_prob.sum().backward()
    return gradients(policy)


# --- arithmetic -----------------------------------------------------------------------------------


@needs_package
@pytest.mark.parametrize(
    "settings",
    [{}, {"packing": "off"}, {"activation_checkpointing": True}, {"fused": "modules"},
     {"fused": "off"}],
    ids=lambda settings: "-".join(f"{k}-{v}" for k, v in settings.items()) or "default",
)  # fmt: skip
def test_log_probs_and_gradients_are_those_of_the_unpacked_weights(
    folder: Path, settings: dict[str, Any]
) -> None:
    small, plain = quantised(folder, **settings), unpacked(folder)
    some = [s.span for s in step_of()]
    for a, b in zip(log_probs(small, some, None), log_probs(plain, some, None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    assert_close(backward(small, some), backward(plain, some), rel=1e-4)


@needs_package
@pytest.mark.parametrize("kind", [*KINDS, *VISUAL])
def test_every_linear_layer_but_the_head_is_packed(kind: str, tmp_path: Path) -> None:
    whole = LocalModel.load(build(kind, tmp_path / "m")).model
    model = LocalModel.load(tmp_path / "m", quantize="nf4").model
    assert is_quantised(model) == "nf4" and is_quantised(whole) == ""
    layers = packed_layers(model)
    assert layers and model.get_output_embeddings() not in layers
    for layer in packed_layers(model.get_decoder()):
        assert layer.weight.numel() == -(-layer.in_features * layer.out_features // 2)
        assert layer.weight.quant_state.nested and layer.weight.quant_state.quant_type == "nf4"
    ids = torch.arange(8)[None]
    gap = (model(input_ids=ids).logits - whole(input_ids=ids).logits).abs().max()
    assert 0 < float(gap.detach()) < 20


@needs_package
def test_log_probs_are_the_samplers(folder: Path) -> None:
    policy = quantised(folder)
    model, (task, examples) = policy.sampler(batch_size=4), rows("tomi", 5)
    sampling = Sampling(max_tokens=9, temperature=1.0, seed=2)

    async def wave() -> list[Any]:
        return await asyncio.gather(*(
            model.complete(task.preview(e), sampling, Call(role="actor", example_id=e.id))
            for e in examples
        ))  # fmt: skip

    replies = asyncio.run(wave())
    some = [s for c in replies for s in spans([(c.prompt_ids, c.token_ids, c.logprobs)])]
    for log, reply in zip(log_probs(policy, some, None), replies, strict=True):
        torch.testing.assert_close(log, torch.tensor(reply.logprobs), rtol=0, atol=1e-4)


# --- runs -----------------------------------------------------------------------------------------


@needs_package
def test_a_step_trains_an_adapter_that_records_its_base(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, seen = tmp_path / "run", tmp_path / "eval"
    assert soul(
        "train", "ditto", "--model", folder, *TOMI, "--steps", 1, "--prompts", 2, "--group-size", 2,
        "--max-tokens", 4, "--quantize", "nf4", "--out", run,
    ) == 0  # fmt: skip
    note = json.loads((run / "model/soulkit.json").read_text())
    assert note["base"]["quantize"] == "nf4" and note["base"]["model"] == str(folder)
    numbers = json.loads((run / "conditions.json").read_text())["material"]["numbers"]
    assert numbers == {"stored": "nf4", "computed": "float32"}
    card = (run / "model/README.md").read_text()
    assert "in nf4 during training" in card and "--adapter FOLDER --quantize nf4" in card
    assert not list((run / "model").glob("*quant*"))
    evaluate = ("eval", "local", "--model", folder, "--adapter", run / "model", *TOMI,
                "--max-tokens", 4, "--max-unscored", 1)  # fmt: skip
    capfd.readouterr()
    assert soul(*evaluate, "--out", seen) == 0
    line = "the adapter was trained on a base in nf4; this run uses the full base"
    assert line in capfd.readouterr().err and line in read_environment(seen)["base"]
    assert soul(*evaluate, "--quantize", "nf4", "--out", tmp_path / "same") == 0
    assert "trained on" not in capfd.readouterr().err
    assert soul("compare", seen, tmp_path / "same") == 0
    assert "quantize none vs nf4" in capfd.readouterr().out
    assert soul(*evaluate, "--quantize", "nf4", "--out", seen) == 2  # another run


@needs_package
def test_a_resumed_run_keeps_its_base(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("train", "grpo", "--model", folder, *TOMI, "--prompts", 2, "--group-size", 2,
             "--max-tokens", 4, "--out", tmp_path / "run")  # fmt: skip
    assert soul(*words, "--quantize", "nf4", "--steps", 1) == 0
    assert soul(*words, "--steps", 2) == 2
    assert "quantize" in capfd.readouterr().err
    assert soul(*words, "--quantize", "nf4", "--steps", 2) == 0


def test_an_adapter_whose_base_differs_is_named(tmp_path: Path) -> None:
    note = tmp_path / "soulkit.json"
    assert base_remark(note, "nf4") == ""  # no note: nothing is known
    for text in ("{", "[]", '{"base": 3}', "{}"):
        note.write_text(text)
        assert base_remark(note, "none") == ""
    note.write_text('{"base": {"model": "m", "quantize": "nf4"}}')
    assert base_remark(note, "nf4") == ""
    assert base_remark(note, "none").endswith("(to use the same: --quantize nf4)")
    note.write_text('{"base": {"model": "m"}}')
    assert base_remark(note, "none") == ""
    assert "trained on the full base; this run uses a base in nf4" in base_remark(note, "nf4")


# --- refusals -------------------------------------------------------------------------------------


def test_a_missing_package_is_an_error_of_three_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("soulkit.models.local.quantize.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="bitsandbytes"):
        LocalModel.load(folder, quantize="nf4")
    for command in (("train", "grpo"), ("eval", "local")):
        assert soul(*command, "--model", folder, *TOMI, "--quantize", "nf4") == 2
        what, why, fix = three_lines(capfd.readouterr().err)
        assert "'bitsandbytes' is not installed" in what and "--quantize nf4" in why
        assert "[nf4]" in fix


def test_a_package_that_cannot_be_imported_is_not_a_fault_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelLoadError, match="'bitsandbytes' is installed, but cannot") as caught:
        loading_arguments("m", object(), torch.device("cpu"), torch.float32)
    assert "leave out --quantize" in caught.value.way_out


@needs_package
def test_a_checkpoint_that_is_already_quantised_is_refused(folder: Path, tmp_path: Path) -> None:
    random_model(tmp_path / "m")
    file = tmp_path / "m/config.json"
    stored = {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    with pytest.raises(ModelLoadError, match=r"already quantised \(fp8\)"):
        LocalModel.load(tmp_path / "m", quantize="nf4")


def test_all_weights_and_own_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--full does not work with --quantize nf4"):
        refuse_untrainable(config(method="sft", full=True, quantize="nf4"))
    with pytest.raises(ConfigError) as caught:
        refuse_engine(config(quantize="nf4", engine="vllm"))
    assert "not the trained policy" in caught.value.why
    refuse_engine(config(quantize="nf4", engine="vllm@http://127.0.0.1:1"))  # verified later
    assert config(quantize="nf4").engine_choice.kind == "local"
    assert config().engine_choice.kind == "auto"


def test_an_evaluation_on_servers_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    address = "vllm@http://127.0.0.1:1"
    words = ("eval", "local", "--model", folder, *TOMI, "--quantize", "nf4", "--engine", address)
    assert soul(*words) == 2
    assert f"--quantize nf4 does not work with --engine {address}" in capfd.readouterr().err


@needs_package
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_with_the_full_base_does_not_pass_the_verification(
    folder: Path, dtype: str
) -> None:
    """Servers with the same base differ by rounding only, as another kernel does here."""
    policy, full = quantised(folder, dtype=dtype), policy_of(folder, dtype=dtype, **LORA)
    other = quantised(folder, dtype=dtype, packing="off")
    prompts = tuple(s.span.ids for s in step_of())
    probe, *servers = (LogprobProbe(one, prompts) for one in (policy, other, full))
    same, wrong = (Distance.between(probe.logprobs(), one.logprobs()) for one in servers)
    assert probe.passes(same) and not probe.passes(wrong)
    assert wrong.mean > 3 * same.mean
    check_served(policy, "m", attached=True)
    with pytest.raises(ConfigError, match="nf4"):
        check_served(policy, "m")


# --- no downloaded code ---------------------------------------------------------------------------


@needs_package
@pytest.mark.slow
def test_no_kernel_is_fetched_from_the_hub(folder: Path, tmp_path: Path) -> None:
    """bitsandbytes imports `kernels` on some CPUs, which downloads and runs code."""
    (tmp_path / "kernels.py").write_text("def get_kernel(*a, **k): raise SystemExit('fetched')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from soulkit.models.local.sampler import LocalModel\n"
        "LocalModel.load(sys.argv[1], quantize='nf4')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(tmp_path)], check=True)


@needs_package
def test_a_pass_without_gradients_leaves_the_weights_as_they_are(folder: Path) -> None:
    policy = quantised(folder)
    before = {n: t.clone() for n, t in policy.model.state_dict().items()}
    jolt(policy, 0.0, seed=0)
    log_probs(policy, [s.span for s in step_of()], None)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
