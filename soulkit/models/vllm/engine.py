"""What an engine that was asked for comes to on this machine.

auto ──▶ what the run began with ▶ vLLM, where it is installed and a GPU is there ▶ local
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from soulkit.errors import ConfigError
from soulkit.extras import install_line
from soulkit.models.vllm.settings import EngineChoice
from soulkit.models.vllm.version import vllm_version


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """What samples."""

    kind: Literal["local", "vllm"]
    version: str = ""
    """Of vLLM; empty while nobody has asked the servers."""
    urls: tuple[str, ...] = ()
    """Of servers that somebody else has started."""
    why: str = field(default="", compare=False)
    """Why `auto` came to this; empty where it was asked for by name."""

    @property
    def attached(self) -> bool:
        """Whether servers are asked that somebody else has started."""
        return bool(self.urls)

    def record(self) -> dict[str, Any]:
        """What a run keeps of it: neither addresses nor reasons."""
        version = {"version": self.version} if self.version else {}
        return {"kind": self.kind, **version}

    def words(self) -> str:
        """`vllm 0.32.0 (installed, and a GPU is there)`."""
        return engine_words(self.record()) + (f" ({self.why})" if self.why else "")


LOCAL: Mapping[str, Any] = ResolvedEngine(kind="local").record()
"""The record of what samples where a run of an earlier version kept none."""


def engine_words(record: Mapping[str, Any]) -> str:
    """`vllm 0.32.0` of what a run keeps, with its context where the model's is longer."""
    words = " ".join(str(record[name]) for name in ("kind", "version") if record.get(name))
    limit = record.get("max_context")
    return f"{words} with a context of {limit} tokens" if limit else words


def resolve_engine(
    choice: EngineChoice, *, python: str, device: str = "auto", begun: str = ""
) -> ResolvedEngine:
    """What `choice` comes to with the interpreter `python`; `begun` is the kind of engine that a
    run has been sampled by so far, which `auto` keeps.

    A vLLM that is not installed has no version: whoever starts servers says what is missing.
    """
    if choice.attached:
        return ResolvedEngine(kind="vllm", urls=choice.urls)
    kind, why = _kind(choice, python, device, begun)
    if kind == "local":
        return ResolvedEngine(kind="local", why=why)
    install = vllm_version(python)
    return ResolvedEngine(kind="vllm", version=install.version if install else "", why=why)


def _kind(
    choice: EngineChoice, python: str, device: str, begun: str
) -> tuple[Literal["local", "vllm"], str]:
    if choice.kind != "auto":
        return choice.kind, ""
    if begun in ("local", "vllm"):
        return ("vllm" if begun == "vllm" else "local"), "as this run began"
    if device.startswith("cpu"):
        return "local", ""
    install = vllm_version(python)
    if install is not None and install.on_gpu:
        return "vllm", "it is installed, and a GPU is there"
    return "local", ""


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
