"""What a server's log says went wrong: the exception, not its traceback, and what helps.

Logs hold whatever a model's files and a driver put there, so what is shown of them is sanitised,
without keys, and short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from soulkit.keys import printable
from soulkit.text import one_line

TAIL_BYTES = 256_000
"""Of a log that are read at most; a usage text of vLLM has 40,000."""
_SHOWN = 3
_WIDTH = 300

_ORIGIN = re.compile(r"^\((?:\w+|\w+ )[^()]*pid=\d+\) ?")
_STAMP = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?:: |$)"
    r"|^\S+\.py: error: |^\S*/python[\d.]*: "
)
_WRAPPERS = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
"""What vLLM raises because of an exception that stands further up."""


class Cause(NamedTuple):
    """A known reason for a server to end: how its log tells, and what helps."""

    sign: re.Pattern[str]
    way_out: str


def _cause(sign: str, way_out: str) -> Cause:
    return Cause(re.compile(sign, re.IGNORECASE), way_out)


PORT_TAKEN = _cause(r"address already in use|errno 98\b", "Run the same command again.")
CAUSES = (
    _cause(
        r"out of memory|outofmemory|no available memory for the cache|less than desired GPU memory"
        r"|not enough memory|larger than the available KV cache|cannot allocate memory"
        r"|exceeds available memory|memory .*is less than",
        "Free memory, or ask for less: --max-context N, --vllm-arg gpu-memory-utilization=0.8; on "
        "a CPU, VLLM_CPU_KVCACHE_SPACE=GIB.",
    ),
    PORT_TAKEN,
    _cause(
        r"unrecognized arguments|invalid choice|expected (?:one )?argument|ambiguous option"
        r"|: error: argument ",
        "Mend --vllm-arg: python -m vllm.entrypoints.openai.api_server --help lists the flags of "
        "this version.",
    ),
    _cause(
        r"no module named '?vllm|operator torchvision::\w+ does not exist|undefined symbol"
        r"|cannot import name|no module named",
        "The environment of vLLM is broken. Where it is the CPU build: pip uninstall torchvision "
        "torchaudio torchcodec; else install vLLM anew, in an environment of its own.",
    ),
    _cause(
        r"compiler|g\+\+|gcc\b|ninja",
        "vLLM compiles parts of itself: install g++, or name another with CXX.",
    ),
    _cause(
        r"max_model_len|max_position_embeddings",
        "Ask for what the model has: --max-context N.",
    ),
    _cause(
        r"does not recognize this architecture|architectures? .* (?:is |are )?not supported"
        r"|no supported architecture|no model architectures",
        "vLLM does not know this model: use --engine local, or a newer vLLM.",
    ),
    _cause(
        r"safetensor",
        "The model's weights are damaged: save them or download the folder again.",
    ),
    _cause(
        r"no such file|not found|not a (?:local folder|valid model)|cannot find|couldn't connect"
        r"|repository ?not ?found|gated|no config|offline",
        "Check the model's name, and HF_TOKEN and the network where it is of the hub.",
    ),
    _cause(
        r"\bcuda\b|nvidia|nccl|no cuda-capable|driver",
        "Check the driver with nvidia-smi; several GPUs need NCCL to reach each other.",
    ),
)


class LogLine(NamedTuple):
    """A line without what vLLM writes before it."""

    text: str
    level: str
    """INFO, ERROR …; empty where the line has none."""


class Diagnosis(NamedTuple):
    """What is to be said of a server that ended."""

    lines: str
    """What its log says, on one line."""
    way_out: str
    port_taken: bool
    is_known: bool
    """Whether the cause is one of CAUSES."""


def diagnosis(log: Path, since: int = 0) -> Diagnosis:
    """What `log` says from byte `since` on about an end."""
    lines = list(plain_lines(log, since))
    at = _root(lines)
    tail = lines[-_SHOWN:] if at is None else _from(lines, at)
    shown = [line.text for line in tail]
    text = " ".join(shown)
    cause = next((one for one in CAUSES if one.sign.search(text)), None)
    return Diagnosis(
        one_line(text, _WIDTH) or "Its log is empty.",
        cause.way_out if cause else "Read the log; what it names first is the cause.",
        cause is PORT_TAKEN,
        cause is not None,
    )


def last_line(log: Path, since: int = 0) -> str:
    """The newest line of a log in short; empty where it has none."""
    lines = list(plain_lines(log, since, tail=4096))
    return one_line(lines[-1].text, 120) if lines else ""


def plain_lines(log: Path, since: int = 0, tail: int = TAIL_BYTES) -> Iterator[LogLine]:
    """The last lines of a log without what vLLM writes before each; empty ones are left out."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - tail))
            text = file.read(tail).decode("utf-8", "replace")
    except OSError:
        return
    for line in printable(text).splitlines():
        words = _ORIGIN.sub("", line)
        stamp = _STAMP.match(words)
        plain = words[stamp.end() if stamp else 0 :].rstrip()
        if plain:
            yield LogLine(plain, stamp["level"] if stamp else "")


def _from(lines: list[LogLine], at: int) -> Iterator[LogLine]:
    """The exception at `at` with the lines that belong to it."""
    yield lines[at]
    for line in lines[at + 1 : at + _SHOWN]:
        if line.text.startswith("Traceback") or _EXCEPTION.match(line.text):
            return
        if line.level not in ("", lines[at].level):  # of something else
            return
        yield line


def _root(lines: list[LogLine]) -> int | None:
    """Where the exception stands that is behind the others: the last that wraps none."""
    places = [n for n, line in enumerate(lines) if _EXCEPTION.match(line.text)]
    telling = [n for n in places if not _WRAPPERS.search(lines[n].text)] or places
    return telling[-1] if telling else None
