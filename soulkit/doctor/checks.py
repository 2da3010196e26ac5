"""Checks of this machine: packages, GPUs, memory, disks, open files, API keys, the Hub, rows.

Each check yields lines: ok, a note, or a problem with its fix.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from soulkit.api_keys import remember, shown_address
from soulkit.data.files import folder_note, released_files
from soulkit.errors import ConfigError, DataError, ModelLoadError, UserError
from soulkit.extras import HOME, declared_requirements, install_line
from soulkit.models.api.addresses import VARIABLE as ADDRESS
from soulkit.models.api.addresses import checked_url, read_key
from soulkit.models.api.transport import BESIDE, file_limits, make_client
from soulkit.models.local.loading import hub_cache
from soulkit.models.local.threads import VARIABLE, allowed_cores, cpu_quota
from soulkit.models.vllm.settings import NEWER, OLDEST, interpreter, vllm_version
from soulkit.runs.jsonl import DOCTOR_SCHEMA, SCHEMA
from soulkit.tasks.kit.registry import Registry
from soulkit.text import web_address
from soulkit.version import __version__

Health = Literal["ok", "note", "problem"]
"""`note`: works, but worth knowing; `problem`: the requested command will fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """The result of one check."""

    part: str
    """Group of the check: `packages`, `machine`, `outside`, `rows`, `settings`."""
    name: str
    health: Health
    words: str
    way: str = ""
    """How to fix it, as a command if possible."""

    @classmethod
    def of_error(cls, part: str, name: str, error: UserError) -> CheckLine:
        """A problem line with the message of `error`."""
        words = f"{error.what} {error.why}"
        return cls(part=part, name=name, health="problem", words=words, way=error.way_out)


def line(part: str, name: str, health: Health, words: str, way: str = "") -> CheckLine:
    return CheckLine(part=part, name=name, health=health, words=words, way=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerCheck:
    """A player's reply to one real question, or why the player was not asked."""

    role: str
    who: str
    task: str
    health: Health
    words: str
    way: str = ""
    calls: int = 0
    seconds: float = 0.0
    """Total over all calls."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """US dollars; None if no price is known."""
    schema: Literal["", "held", "ignored", "refused"] = ""
    """How the server handled the JSON Schema of the request; empty if no schema was sent."""


@dataclass(kw_only=True)
class Checkup:
    """All check lines in display order."""

    lines: list[CheckLine] = field(default_factory=list)
    players: list[PlayerCheck] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(one.health == "problem" for one in self._all())

    def _all(self) -> Iterator[CheckLine | PlayerCheck]:
        yield from self.lines
        yield from self.players

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values that follow the schema `doctor-1.json`."""
        lines, players = ([asdict(one) for one in several] for several in self._parts())
        named = {SCHEMA: DOCTOR_SCHEMA, "problems": self.problems}
        return {**named, "lines": lines, "players": players}

    def _parts(self) -> tuple[Sequence[CheckLine], Sequence[PlayerCheck]]:
        return self.lines, self.players


PACKAGES = "packages"
_package = partial(line, PACKAGES)
BRINGS = {
    "train": "local models and training",
    "report": "figures of reports as PDF and SVG files",
    "metrics": "BLEU, ROUGE and other text metrics",
    "tensorboard": "--track tensorboard",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
}
"""Extra → what it is needed for."""
ELSEWHERE = ("dev", "docs", "track", "vllm")
"""Extras without a line: two for developers, a group of other extras, and vLLM (`vllm_line`)."""


def package_lines(needed: Collection[str] = (), home: Path = HOME) -> Iterator[CheckLine]:
    """Python, soulkit, and one line per extra. A missing extra in `needed` is a problem. `home` is
    the package folder of the installation."""
    pythons, core, extras = declared_requirements(home)
    yield _package("soulkit", "ok", __version__)
    here = platform.python_version()
    if SpecifierSet(pythons).contains(here, prereleases=True):
        yield _package("Python", "ok", here)
    else:
        yield _package("Python", "problem", f"{here}; soulkit needs {pythons}",
                    f"create an environment with Python {pythons}")  # fmt: skip
    yield from _core(core)
    for extra, packages in extras.items():
        if extra not in ELSEWHERE:
            yield _extra(extra, packages, needed=extra in needed)


def vllm_line(python: str | None = None) -> CheckLine:
    """The vLLM version of the interpreter `python` (None: this one), read without importing it."""
    path = interpreter(python)
    try:
        install = vllm_version(path)
    except ConfigError as error:
        return CheckLine.of_error(PACKAGES, "vLLM", error)
    whose = "" if path == sys.executable else f" for {path}"
    if install is None:
        words = f"not installed{whose or ' here'}; use --engine local to sample without it"
        return _package("vLLM", "note", words, f"{install_line('vllm')}, or use --vllm-python PATH")
    words = f"{install.distribution} {install.version}{whose}, "
    words += "on the GPU" if install.on_gpu else "on the CPU"
    if install.supported:
        return _package("vLLM", "ok", words)
    way = f"install vLLM {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWER))}"
    return _package("vLLM", "note", f"{words}: soulkit has not been tested with this version", way)


def _core(packages: list[str]) -> Iterator[CheckLine]:
    """One line if every package is in its range, else a line with the packages that are not."""
    wrong = [words for text in packages if (words := _wrong(text))]
    if wrong:
        yield _package("core", "problem", "; ".join(wrong), "reinstall soulkit")
    elif packages:
        yield _package(
            "core", "ok", f"{len(packages)} required packages, all in supported versions"
        )


def _extra(extra: str, packages: list[str], *, needed: bool) -> CheckLine:
    name, brings = f"[{extra}]", BRINGS.get(extra, "")
    here = {text: installed_version(text) for text in packages}
    missing = [_name(text) for text, number in here.items() if number is None]
    wrong = [words for text, number in here.items() if number and (words := _wrong(text))]
    way = install_line(extra)
    if missing and (needed or len(missing) < len(packages)):
        shown = f"not installed: {', '.join(missing)}; needed for {brings}"
        return _package(name, "problem" if needed else "note", shown, way)
    if missing:
        return _package(name, "note", f"not installed; needed for {brings}", way)
    if wrong:
        return _package(name, "problem", "; ".join(wrong), way)
    versions = ", ".join(f"{_name(text)} {number}" for text, number in here.items())
    return _package(name, "ok", versions)


def installed_version(requirement: str) -> str | None:
    """The installed version of the package that a requirement names; None if it is missing."""
    try:
        return version(_name(requirement))
    except PackageNotFoundError:
        return None


def _wrong(requirement: str) -> str:
    """Why the installed version does not satisfy the requirement; empty if it does."""
    number = installed_version(requirement)
    try:
        allowed = Requirement(requirement)
    except InvalidRequirement:  # newer syntax; the installer already checked it
        return ""
    if number is None:
        return f"{allowed.name} is not installed"
    if allowed.specifier.contains(number, prereleases=True):
        return ""
    return f"{allowed.name} {number} is outside the supported range {allowed.specifier}"


def _name(requirement: str) -> str:
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return requirement.split()[0]


_machine = partial(line, "machine")
GB = 1e9
LITTLE_DISK = 10 * GB
"""Below this, a note: one model and a few runs would fill the disk."""
NO_DISK = GB
LITTLE_MEMORY = 2 * GB
SMI = "name,memory.total,memory.free,driver_version"
SMI_S = 3.0
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def machine_lines(*, connections: int = 0) -> Iterator[CheckLine]:
    """Lines about this machine; `connections` is the maximum a command opens at once."""
    yield from gpu_lines()
    yield _cores()
    yield memory_line()
    yield from disk_lines()
    yield files_line(connections)


# -- GPUs ----------------------------------------------------------------------------------------


def gpu_lines() -> Iterator[CheckLine]:
    """One line per GPU, or one line that says there is none."""
    gpus = _gpus()
    for number, (name, total, free, driver) in enumerate(gpus):
        words = f"{name}, {free} of {total} MiB free, driver {driver}"
        yield _machine(f"GPU {number}", "ok", words)
    torch = installed_version("torch") or ""
    if gpus and "+cpu" in torch:
        yield _machine("torch", "problem", f"{torch} is a CPU build and cannot use the GPU",
                    "install torch for your driver: https://pytorch.org/get-started")  # fmt: skip
    if not gpus:
        yield _machine("GPU", "note", "nvidia-smi found none; local models run on the CPU")


def _gpus() -> list[tuple[str, ...]]:
    """(name, total MiB, free MiB, driver) per GPU; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={SMI}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [tuple(part.strip() for part in line.split(",")) for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(SMI.split(","))]


# -- cores and memory ------------------------------------------------------------------------------


def _cores() -> CheckLine:
    cores, quota = len(allowed_cores()), cpu_quota()
    limit = f", limited to {quota:g} by the container's quota" if quota < cores else ""
    threads = os.environ.get(VARIABLE)
    chosen = f"; {VARIABLE}={threads}" if threads else ""
    return _machine("cores", "ok", f"{cores}{limit}{chosen}")


def memory_line(proc: Path = PROC, cgroups: Path = CGROUPS) -> CheckLine:
    """Total and free memory, from the kernel and from container limits."""
    total, free = _meminfo(proc / "meminfo")
    limited = ""
    for limit, usage in _cgroup_limits(proc / "self" / "cgroup", cgroups):
        if limit < (total or limit + 1):
            total, limited = limit, " (container limit)"
        free = min(limit - usage, limit if free is None else free)
    if total is None or free is None:
        return _machine("memory", "note", "this system does not report it")
    words = f"{free / GB:.1f} of {total / GB:.1f} GB free{limited}"
    if free < LITTLE_MEMORY:
        return _machine("memory", "note", words, "stop other programs on this machine")
    return _machine("memory", "ok", words)


def _meminfo(file: Path) -> tuple[int | None, int | None]:
    """(total bytes, available bytes) from the kernel."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
        sizes = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
    except (OSError, ValueError, IndexError):
        return None, None
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _cgroup_limits(file: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(allowed bytes, used bytes) of each cgroup that limits this process."""
    try:
        paths = [line.split(":", 2)[2] for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, IndexError):
        paths = []
    folders = {root, root / "memory"}  # a container often sees its own group as the root
    for path in paths:
        place = Path(path.lstrip("/"))
        folders |= {root / above for above in (place, *place.parents)}
    for folder in sorted(folders):
        for limit, usage in (("memory.max", "memory.current"),
                             ("memory.limit_in_bytes", "memory.usage_in_bytes")):  # fmt: skip
            try:
                allowed, used = (int((folder / n).read_text("ascii")) for n in (limit, usage))
            except (OSError, ValueError):  # `max`, or no such file
                continue
            if allowed < 1 << 60:  # version 1 writes a huge number for none
                yield allowed, used


# -- disks and open files --------------------------------------------------------------------------


def disk_lines() -> Iterator[CheckLine]:
    """Free space for runs and for downloads."""
    yield disk_line("disk for runs", Path("runs"))
    yield disk_line("disk for downloads", hub_cache())


def disk_line(name: str, folder: Path) -> CheckLine:
    """Free space at `folder`, which may not exist yet."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _machine(name, "problem", f"{folder}: {error.strerror}", "use another folder")
    words = f"{free / GB:.1f} GB free in '{folder}'"
    if not os.access(place, os.W_OK):
        return _machine(name, "problem", f"{folder} is not writable",
                     f"change the permissions of {place}, or use another folder")  # fmt: skip
    if free < LITTLE_DISK:
        health: Health = "problem" if free < NO_DISK else "note"
        return _machine(name, health, words, "free some space, or use another folder")
    return _machine(name, "ok", words)


def files_line(connections: int) -> CheckLine:
    """The limit on open files, compared with what a command needs."""
    needed = connections + BESIDE
    limits = file_limits()
    if limits is None:
        return _machine("open files", "note", "this system does not report its limit")
    soft, hard = limits
    if soft < 0:
        return _machine("open files", "ok", "unlimited")
    if soft >= needed or hard < 0 or hard >= needed:
        use = f"; {needed} needed" if connections else ""
        raised = ", and runs raise the limit to that number" if soft < needed else ""
        return _machine("open files", "ok", f"at most {soft}{use}{raised}")
    words = f"at most {hard}; {connections} connections need {needed}"
    way = "raise the limit in /etc/security/limits.conf, or use a smaller --concurrency"
    return _machine("open files", "problem", words, way)


# -- network ---------------------------------------------------------------------------------------

OUTSIDE = "outside"
_outside = partial(line, OUTSIDE)
HUB = "https://huggingface.co"
HUB_S = 3.0
"""Timeout of the Hub check in seconds."""
NO_HEAD = 501
"""HTTP status of a server that is up but does not support HEAD."""
_KEY = re.compile(r"[A-Z][A-Z0-9_]*_API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN")
_TRUE = ("1", "ON", "YES", "TRUE")
LISTED = 8
"""Maximum number of names in one line."""


# -- API keys --------------------------------------------------------------------------------------


def key_lines(wanted_keys: Collection[str] = ()) -> Iterator[CheckLine]:
    """A line with the NAMES of all API keys in the environment, and a problem for each key that
    cannot be sent in a request. Missing keys are reported by `missing_keys`."""
    names = sorted({*filter(_KEY.fullmatch, os.environ), *wanted_keys})
    here, broken = [], []
    for name in names:
        value = os.environ.get(name, "").strip()
        remember(value)  # hides the value in all later output
        try:
            here += [name] if read_key(name, optional=True) else []
        except ModelLoadError as error:
            broken.append(CheckLine.of_error(OUTSIDE, name, error))
    words = ", ".join(here) or "no API keys in the environment (remote servers need one)"
    yield _outside("keys", "ok" if here else "note", words)
    yield from broken
    yield from _default_address()


def _default_address() -> Iterator[CheckLine]:
    """The default server address, if the environment sets one."""
    if not (address := os.environ.get(ADDRESS, "").strip()):
        return
    try:
        yield _outside(ADDRESS, "note", f"models without an address use {checked_url(address)}")
    except ModelLoadError:
        # That error would quote the value, which may be a secret.
        yield _outside(ADDRESS, "problem", "its value is not a server address", f"unset {ADDRESS}")


# -- Hub -------------------------------------------------------------------------------------------


def hub_line() -> CheckLine:
    """Whether models and rows can be downloaded. Waits at most HUB_S seconds."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return _outside("hub", "note", f"not checked: {name} is set", f"unset {name}")
    address = os.environ.get("HF_ENDPOINT", "").strip() or HUB
    shown = shown_address(address)
    if web_address(address) is None:
        return _outside("hub", "problem", "HF_ENDPOINT is not an address", "unset HF_ENDPOINT")
    way = (
        "check your network and proxy; to work offline, use local models and rows and set "
        "HF_HUB_OFFLINE=1"
    )
    try:
        why = _unreachable(address)
    except ModelLoadError as error:
        return CheckLine.of_error(OUTSIDE, "hub", error)
    if why:
        return _outside("hub", "note", f"{shown} cannot be reached ({why})", way)
    return _outside("hub", "ok", f"{shown} answers")


def _unreachable(address: str) -> str:
    """Why the server at `address` cannot be used; empty if it answers."""
    import asyncio

    import httpx2

    async def ask() -> str:
        async with make_client(address, HUB_S, 1) as client:
            reply = await client.head(address)
        broken = reply.status_code >= 500 and reply.status_code != NO_HEAD
        return f"HTTP {reply.status_code}" if broken else ""

    async def in_time() -> str:
        return await asyncio.wait_for(ask(), HUB_S)

    try:
        return asyncio.run(in_time())
    except TimeoutError:
        return f"no answer within {HUB_S:g} s"
    except (httpx2.HTTPError, OSError) as error:
        return type(error).__name__


# -- rows ------------------------------------------------------------------------------------------


def rows_lines(registry: Registry) -> Iterator[CheckLine]:
    """How many tasks have their rows downloaded, by kind of rows."""
    for kind in ("eval", "train"):
        here: list[str] = []
        lacking: list[str] = []
        broken: list[CheckLine] = []
        for name, spec in registry.specs.items():
            if not (files := getattr(spec.files, kind)):
                continue
            try:
                (here if released_files(name, files) else lacking).append(name)
            except DataError as error:
                broken.append(CheckLine.of_error("rows", name, error))
        count = len(here) + len(lacking) + len(broken)
        words = f"{len(here)} of {count} tasks have rows in {folder_note()}"
        words += f": {_some(here)}" if here else ""
        way = f"soul data pull --task TASK --split {kind}" if lacking else ""
        yield line("rows", f"{kind} rows", "ok" if here else "note", words, "" if here else way)
        yield from broken


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
