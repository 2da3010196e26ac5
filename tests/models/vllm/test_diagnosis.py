"""Logs of servers that ended, as vLLM 0.32 wrote them, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from soulkit.models.vllm.diagnosis import diagnosis, last_line

TRACE = '(APIServer pid=3)   File "launcher.py", line 348, in create_server_socket\n'
LOGS = {
    "flag": (
        "usage: api_server.py [-h] [--headless]\napi_server.py: error: unrecognized arguments: "
        "--foo\n",
        "unrecognized arguments: --foo",
        "--vllm-arg",
    ),
    "port": (
        f"Traceback (most recent call last):\n{TRACE}OSError: [Errno 98] Address already in use\n",
        "OSError: [Errno 98] Address already in use",
        "same command again",
    ),
    "architecture": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, The checkpoint you are trying to load has model type `foo` but "
        "Transformers does not recognize this architecture.\n",
        "model type `foo`",
        "--engine local",
    ),
    "context": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9999) is greater than the derived "
        "max_model_len (max_position_embeddings=1024.0)\n",
        "max_model_len (9999)",
        "--max-context",
    ),
    "hub": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached "
        "snapshot folder for the specified revision on the local disk\n",
        "LocalEntryNotFoundError",
        "HF_TOKEN",
    ),
    "package": (
        "RuntimeError: operator torchvision::nms does not exist\n",
        "torchvision::nms",
        "pip uninstall torchvision",
    ),
    "absent": ("/opt/bin/python: No module named vllm\n", "No module named vllm", "install vLLM"),
    "compiler": (
        "(EngineCore pid=9) torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found "
        "in torch._inductor.config.cpp.cxx: (None, 'g++')\n",
        "InvalidCxxCompiler",
        "install g++",
    ),
    "memory": (
        "(EngineCore pid=9) ERROR 11-23 03:00:46 [core.py:1199] torch.OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 2.00 GiB.\n"
        "(APIServer pid=3) Traceback (most recent call last):\n"
        "(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}\n"
        "/opt/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked\n",
        "torch.OutOfMemoryError: CUDA out of memory",
        "--max-context N",
    ),
    "weights": (
        "(Worker pid=8) ERROR 11-23 03:00:46 [multiproc_executor.py:953] safetensors._safetensors_"
        "rust.SafetensorError: Error while deserializing header: incomplete metadata\n"
        "(EngineCore pid=9) INFO 11-23 03:00:46 [multiproc_executor.py:479] [shutdown] waiting\n",
        "incomplete metadata",
        "download the folder again",
    ),
    "unknown": (
        "INFO 11-23 03:00:46 [a.py:1] one\nsomething else\n",
        "one something else",
        "Read the log",
    ),
    "empty": ("", "Its log is empty.", "Read the log"),
}


@pytest.mark.parametrize("kind", LOGS)
def test_the_cause_is_named_with_a_way_out(kind: str, tmp_path: Path) -> None:
    text, says, helps = LOGS[kind]
    log = tmp_path / "m.log"
    log.write_text(text)
    words = diagnosis(log)
    assert says in words.lines
    assert helps in words.way_out
    assert "Traceback" not in words.lines
    assert "pid=" not in words.lines
    assert "\n" not in words.lines
    assert "[shutdown]" not in words.lines
    assert words.port_taken == (kind == "port")


def test_only_this_start_counts(tmp_path: Path) -> None:
    log = tmp_path / "m.log"
    log.write_text("ValueError: of the start before\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("\x1b[31mKeyError: 'of this one'\x1b[0m\n")
    assert diagnosis(log, since).lines == "KeyError: 'of this one'"
    assert last_line(log, since) == "KeyError: 'of this one'"


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert last_line(tmp_path / "none.log") == ""
    assert diagnosis(tmp_path / "none.log").lines == "Its log is empty."
