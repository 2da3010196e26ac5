"""What a server of our own is started with: arguments and environment, as pure functions.

Whatever decides what a token is worth is soulkit's and not to be changed: which model answers under
which name, log-probs after temperature and cuts, no sampling settings from the model's own
generation config, adapters that can be loaded while it runs. Everything that decides how fast it is
(parallelism, memory, quantization, kernels) is passed through.

Flags: those that vLLM 0.31 to 0.33 all have.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.models.local.machine import free_bytes
from soulkit.models.vllm.settings import VllmInstall

HOST = "127.0.0.1"
BASE_NAME = "base"
"""What the model itself is called there; adapters have names of their own."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM can be told of."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
"""What --dtype may be there."""

_GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Without white space between the fields: a model could write nothing else until its limit."""

_ON_CPU = ("enforce-eager", "no-enable-chunked-prefill")
"""Compiling takes minutes there; and a prompt that is read in pieces kills a server on a CPU when
its request has a seed ("CPU Generator does not use offset")."""

_MODULE = "vllm.entrypoints.openai.api_server"
_GIB = 1 << 30

_OTHER_WAY = {
    "model": "Name it where the model is named: vllm:PATH, or MODEL with --engine vllm.",
    "revision": "Name it with the model: owner/name@revision.",
    "dtype": "Use --dtype.",
    "max-model-len": "Use --max-context.",
    "max-num-seqs": "Use the setting of how many calls may be in flight.",
    "hf-token": "Set HF_TOKEN in the environment, where no list of processes shows it.",
}
_REFUSED = (
    *_OTHER_WAY,
    "host", "port", "uds", "root-path", "api-key", "served-model-name", "config", "headless",
    "generation-config", "override-generation-config", "logprobs-mode", "trust-remote-code",
    "code-revision", "tokenizer", "tokenizer-revision", "skip-tokenizer-init", "model-weights",
    "enable-lora", "max-lora-rank", "max-loras", "max-cpu-loras", "lora-modules", "lora-dtype",
    "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers",
    "enable-ssl-refresh", "chat-template", "return-tokens-as-token-ids", "tokens-only",
    "data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-rank",
    "data-parallel-multi-port-external-lb", "grpc-port", "runner", "convert",
)  # fmt: skip
_LAUNCHER = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
"""What torchrun tells its processes: a server would take itself for one of them."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server that is to be started.

    `model` is a folder or `owner/name@revision` of the hub; `lora_rank` the largest rank of the
    adapters that it is to take, None for a server without adapters; `in_flight` how many requests
    it works on at once; `args` vLLM's own flags, without dashes before them, an empty value for a
    flag that takes none; `python` the interpreter that has vLLM, None for this one; `threads` of a
    server on a CPU.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    lora_rank: int | None = None
    in_flight: int = 64
    args: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    threads: int | None = None

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable


def server_command(spec: ServerSpec, install: VllmInstall, port: int) -> list[str]:
    """The arguments of a server that listens on `port` of this machine alone.

    ConfigError for flags of the user's that soulkit decides, for a rank that vLLM cannot take, and
    for a device that this vLLM has not.
    """
    command = [spec.interpreter, "-m", _MODULE, "--host", HOST, "--port", str(port)]
    command += [*_model(spec.model), "--served-model-name", BASE_NAME]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    command += ["--disable-uvicorn-access-log", "--max-num-seqs", str(max(1, spec.in_flight))]
    if spec.max_context is not None:
        command += ["--max-model-len", str(spec.max_context)]
    if spec.lora_rank is not None:
        command += ["--enable-lora", "--max-lora-rank", str(_rank(spec.lora_rank))]
        command += ["--max-loras", "2", "--max-cpu-loras", "4"]
    on_cpu = _on_cpu(spec, install)
    command += ["--dtype", "float32" if on_cpu and spec.dtype == "auto" else _dtype(spec.dtype)]
    passed = dict(_passed(spec.args))
    for flag in _ON_CPU if on_cpu else ():
        name = flag.removeprefix("no-")
        if not {name, f"no-{name}"} & passed.keys():
            command += [f"--{flag}"]
    if not any(name.startswith("structured-outputs-config") for name in passed):
        command += ["--structured-outputs-config", json.dumps(_GRAMMAR, separators=(",", ":"))]
    for name, value in passed.items():
        command += [f"--{name}={value}" if value else f"--{name}"]
    return command


def server_environment(
    spec: ServerSpec, install: VllmInstall, key: str, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """This process's environment (or `environment`) with what the server needs.

    `key` is the bearer token that the server asks for; it stands nowhere else.
    """
    started_from = dict(os.environ if environment is None else environment)
    env = {
        name: value for name, value in started_from.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }  # fmt: skip
    env |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if _on_cpu(spec, install):
        # Whole GiB for keys and values: a quarter of what is free, from 1 to 8.
        cache = min(8, max(1, (free_bytes("cpu") or 0) // 4 // _GIB))
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache))
        if spec.threads is not None:
            env["OMP_NUM_THREADS"] = str(spec.threads)
            # Else vLLM binds one thread to every core it may use, and the number above is lost.
            env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif spec.device.startswith("cuda:"):
        env["CUDA_VISIBLE_DEVICES"] = _visible(spec.device, env.get("CUDA_VISIBLE_DEVICES"))
    return env


def _model(name: str) -> list[str]:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return ["--model", str(folder.absolute())]
    where, _, revision = name.partition("@")
    pinned = ["--revision", revision, "--tokenizer-revision", revision] if revision else []
    return ["--model", where, *pinned]


def _dtype(name: str) -> str:
    if name in DTYPES:
        return name
    raise ConfigError(
        f"'{name}' is no number type that vLLM computes in.",
        f"It knows {', '.join(DTYPES)}.",
        "Use --dtype auto, float32, bfloat16 or float16; how weights are kept is another matter: "
        "--vllm-arg quantization=fp8",
    )


def _rank(rank: int) -> int:
    for one in RANKS:
        if rank <= one:
            return one
    raise ConfigError(
        f"An adapter of rank {rank} is too large for vLLM.",
        f"Its servers take adapters of rank {RANKS[-1]} at most.",
        "Use --engine local, or train with a smaller rank.",
    )


def _on_cpu(spec: ServerSpec, install: VllmInstall) -> bool:
    """Whether the server runs on a CPU; ConfigError where that is not what was asked for."""
    device = spec.device.partition(":")[0]
    if device in ("auto", "cuda" if install.on_gpu else "cpu"):
        return not install.on_gpu
    builds = "on a GPU" if install.on_gpu else "on a CPU, where it is the CPU build or sees no GPU"
    raise ConfigError(
        f"This vLLM cannot serve on the device '{spec.device}'.",
        f"{install.distribution} {install.version} of '{spec.interpreter}' serves {builds}.",
        "Name another --device, another --vllm-python, or use --engine local.",
    )


def _visible(device: str, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES becomes for `cuda:N`: the N-th of those that are visible now."""
    number = device.partition(":")[2]
    shown = [name.strip() for name in visible.split(",")] if visible else None
    if number.isdecimal() and (shown is None or int(number) < len(shown)):
        return number if shown is None else shown[int(number)]
    raise ConfigError(
        f"There is no device '{device}'.",
        f"CUDA_VISIBLE_DEVICES={visible} shows {len(shown)}, counted from 0." if shown
        else "A device is written cuda:0, cuda:1 and so on.",
        "Name one that is visible: --device cuda:0",
    )  # fmt: skip


def _passed(args: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text, value in args.items():
        name = text.lstrip("-").replace("_", "-")
        first = name.partition(".")[0].rstrip("+")
        _refuse_ours(text, first.removeprefix("no-") or first)
        yield name, value


def _refuse_ours(text: str, name: str) -> None:
    """vLLM takes the beginning of a flag for the whole of it, so that is refused as well."""
    ours = next((one for one in _REFUSED if one.startswith(name)), None)
    if not name.replace("-", "").isalnum():
        raise ConfigError(
            f"'{text}' is no flag of vLLM.",
            "A flag is written as on vLLM's own command line, with its value behind '='.",
            "Write for example --vllm-arg gpu-memory-utilization=0.8",
        )
    if ours is not None:
        raise ConfigError(
            f"--vllm-arg {text} is not open to choice.",
            f"soulkit decides vLLM's --{ours}: scores and log-probs depend on it, or its own "
            "requests do.",
            _OTHER_WAY.get(ours, "Leave it out, or start a server yourself: --engine vllm@URL"),
        )
