"""Builds the arguments and environment of a vLLM server, as pure functions.

soulkit sets everything that decides the probability of a token: the model and its name, log-probs
after temperature and cuts, no sampling defaults from the model's generation config, adapters loaded
at run time. Flags that decide speed (parallelism, memory, quantization, kernels) are passed
through.

Only uses flags that exist in vLLM 0.31 to 0.33.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.models.local.footprint import free_bytes
from soulkit.models.vllm.settings import VllmInstall

HOST = "127.0.0.1"
"""Address that servers listen on, except those on other hosts."""
BASE_NAME = "base"
"""Served name of the model itself; adapters have their own names."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum adapter ranks that vLLM accepts."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
"""Values of --dtype that vLLM accepts."""

_GRAMMAR = {"backend": "xgrammar", "disable_any_whitespace": True}
"""No white space between fields: a model could write nothing else until its limit."""

_ON_CPU = ("enforce-eager", "no-enable-chunked-prefill")
"""On a CPU, compiling takes minutes, and a prompt read in chunks crashes the server if its request
has a seed ("CPU Generator does not use offset")."""

_MODULE = "vllm.entrypoints.openai.api_server"
_GIB = 1 << 30

_OTHER_WAY = {
    "model": "Set the model as vllm:PATH, or as MODEL with --engine vllm.",
    "revision": "Set it with the model: owner/name@revision.",
    "dtype": "Use --dtype.",
    "max-model-len": "Use --max-context.",
    "max-num-seqs": "Use --batch-size; without it, the number follows --concurrency.",
    "enable-sleep-mode": "Use --vllm-sleep, which soul train has.",
    "hf-token": "Set HF_TOKEN in the environment, where process lists do not show it.",
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
"""Variables that torchrun sets; with them a server would join the training job."""


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One server to start.

    `model`: a folder or `owner/name@revision` on the Hub; `lora_rank`: maximum rank of its
    adapters, None without adapters; `in_flight`: concurrent requests; `unsent`: kinds of input
    that soulkit never sends (image, video); `sleeps`: whether it can release its memory; `args`:
    vLLM's own flags without dashes, with an empty value for a flag without one; `python`:
    interpreter with vLLM, None for this one; `threads`: for a server on a CPU; `host`: the address
    that it listens on.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    lora_rank: int | None = None
    in_flight: int = 64
    unsent: tuple[str, ...] = ()
    sleeps: bool = False
    args: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    threads: int | None = None
    host: str = HOST

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable


def server_command(spec: ServerSpec, install: VllmInstall, port: int) -> list[str]:
    """The command line of a server that listens on `port`, usually of this machine only.

    ConfigError for user flags that soulkit sets itself, a rank that vLLM does not support, and a
    device that this vLLM does not have.
    """
    command = [spec.interpreter, "-m", _MODULE, "--host", spec.host, "--port", str(port)]
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
    if spec.sleeps:
        command += ["--enable-sleep-mode"]
    ours = {
        "structured-outputs-config": _GRAMMAR,
        "limit-mm-per-prompt": dict.fromkeys(spec.unsent, 0),
    }
    for flag, settings in ours.items():
        if settings and not any(name.startswith(flag) for name in passed):
            command += [f"--{flag}", json.dumps(settings, separators=(",", ":"))]
    for name, value in passed.items():
        command += [f"--{name}={value}" if value else f"--{name}"]
    return command


def server_environment(
    spec: ServerSpec, install: VllmInstall, key: str, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The server's environment, based on this process's (or on `environment`).

    `key` is the bearer token that the server requires; it is stored nowhere else.
    """
    started_from = dict(os.environ if environment is None else environment)
    env = {
        name: value for name, value in started_from.items()
        if name not in _LAUNCHER and not name.startswith("TORCHELASTIC_")
    }  # fmt: skip
    env |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if spec.lora_rank is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if spec.sleeps:  # its paths for sleeping are among those for development
        env["VLLM_SERVER_DEV_MODE"] = "1"
    if _on_cpu(spec, install):
        # Space for keys and values in whole GiB: a quarter of free memory, from 1 to 8.
        cache = min(8, max(1, (free_bytes("cpu") or 0) // 4 // _GIB))
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache))
        if spec.threads is not None:
            env["OMP_NUM_THREADS"] = str(spec.threads)
            # Otherwise vLLM binds one thread per core and ignores the number above.
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
        f"vLLM does not support the number format '{name}'.",
        f"It supports {', '.join(DTYPES)}.",
        "Use --dtype auto, float32, bfloat16 or float16. To quantise the weights, use "
        "--vllm-arg quantization=fp8",
    )


def _rank(rank: int) -> int:
    for one in RANKS:
        if rank <= one:
            return one
    raise ConfigError(
        f"An adapter of rank {rank} is too large for vLLM.",
        f"The maximum rank is {RANKS[-1]}.",
        "Use --engine local, or train with a smaller rank.",
    )


def _on_cpu(spec: ServerSpec, install: VllmInstall) -> bool:
    """Whether the server runs on a CPU; ConfigError if that contradicts --device."""
    device = spec.device.partition(":")[0]
    if device in ("auto", "cuda" if install.on_gpu else "cpu"):
        return not install.on_gpu
    builds = "on a GPU" if install.on_gpu else "on a CPU (it is a CPU build or sees no GPU)"
    raise ConfigError(
        f"This vLLM cannot run on the device '{spec.device}'.",
        f"{install.distribution} {install.version} of '{spec.interpreter}' runs {builds}.",
        "Use another --device or --vllm-python, or --engine local.",
    )


def _visible(device: str, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for `cuda:N` or `cuda:N,M`: the N-th of the visible devices."""
    numbers = device.partition(":")[2].split(",")
    shown = [name.strip() for name in visible.split(",")] if visible else None
    if all(one.isdecimal() and (shown is None or int(one) < len(shown)) for one in numbers):
        return ",".join(numbers if shown is None else [shown[int(one)] for one in numbers])
    raise ConfigError(
        f"There is no device '{device}'.",
        f"CUDA_VISIBLE_DEVICES={visible} shows {len(shown)}, counted from 0." if shown
        else "Devices are named cuda:0, cuda:1 and so on.",
        "Use a visible device: --device cuda:0",
    )  # fmt: skip


def _passed(args: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text, value in args.items():
        name = text.lstrip("-").replace("_", "-")
        first = name.partition(".")[0].rstrip("+")
        _refuse_ours(text, first.removeprefix("no-") or first)
        yield name, value


def _refuse_ours(text: str, name: str) -> None:
    """vLLM accepts prefixes of flags, so these are refused as well."""
    ours = next((one for one in _REFUSED if one.startswith(name)), None)
    if not name.replace("-", "").isalnum():
        raise ConfigError(
            f"'{text}' is not a vLLM flag.",
            "A flag is written as on vLLM's command line, with its value after '='.",
            "Use for example --vllm-arg gpu-memory-utilization=0.8",
        )
    if ours is not None:
        raise ConfigError(
            f"--vllm-arg {text} cannot be set.",
            f"soulkit sets vLLM's --{ours} itself, because scores, log-probs or its own requests "
            "depend on it.",
            _OTHER_WAY.get(ours, "Remove it, or start a server yourself: --engine vllm@URL"),
        )
