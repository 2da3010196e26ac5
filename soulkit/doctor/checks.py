"""What is here: packages, GPUs, cores, memory, disks, open files, API keys, the hub, pulled rows.

Each check gives lines that are fine, worth a note, or a problem with its way out.
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
from soulkit.models.local.machine import VARIABLE, allowed_cores, cpu_quota
from soulkit.models.vllm.settings import NEWER, OLDEST, interpreter, vllm_version
from soulkit.runs.jsonl import DOCTOR_SCHEMA, SCHEMA
from soulkit.tasks.kit.registry import Registry
from soulkit.text import web_address
from soulkit.version import __version__

Health = Literal["ok", "note", "problem"]
"""`note`: nothing is wrong, and somebody may want to know; `problem`: what was asked for will not
work as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One thing that was looked at."""

    part: str
    """What it belongs to: `packages`, `machine`, `outside`, `rows`, `settings`."""
    name: str
    health: Health
    words: str
    way: str = ""
    """How to mend it, a command where there is one."""

    @classmethod
    def of_error(cls, part: str, name: str, error: UserError) -> CheckLine:
        """The problem that an error tells of."""
        words = f"{error.what} {error.why}"
        return cls(part=part, name=name, health="problem", words=words, way=error.way_out)


def line(part: str, name: str, health: Health, words: str, way: str = "") -> CheckLine:
    return CheckLine(part=part, name=name, health=health, words=words, way=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerCheck:
    """What a player made of a real question, or why it was asked none."""

    role: str
    who: str
    task: str
    health: Health
    words: str
    way: str = ""
    calls: int = 0
    seconds: float = 0.0
    """Of all calls together."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """US dollars; None where no price is known."""
    schema: Literal["", "held", "ignored", "refused"] = ""
    """What its server made of the JSON Schema that came with the question; empty: none did."""


@dataclass(kw_only=True)
class Checkup:
    """All lines, in the order in which they are shown."""

    lines: list[CheckLine] = field(default_factory=list)
    players: list[PlayerCheck] = field(default_factory=list)

    @property
    def problems(self) -> int:
        return sum(one.health == "problem" for one in self._all())

    def _all(self) -> Iterator[CheckLine | PlayerCheck]:
        yield from self.lines
        yield from self.players

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, of the schema `doctor-1.json`."""
        lines, players = ([asdict(one) for one in several] for several in self._parts())
        named = {SCHEMA: DOCTOR_SCHEMA, "problems": self.problems}
        return {**named, "lines": lines, "players": players}

    def _parts(self) -> tuple[Sequence[CheckLine], Sequence[PlayerCheck]]:
        return self.lines, self.players


PACKAGES = "packages"
_package = partial(line, PACKAGES)
BRINGS = {
    "train": "models on this machine, and training",
    "report": "figures in reports",
    "metrics": "BLEU, ROUGE and other measures of texts",
    "tensorboard": "--track tensorboard",
    "trackio": "--track trackio",
    "wandb": "--track wandb",
}
"""Extra → what a user gets from it."""
ELSEWHERE = ("dev", "track", "vllm")
"""Extras of those who change soulkit, that only gather others, and that may be installed for
another interpreter (`vllm_line`)."""


def package_lines(needed: Collection[str] = (), home: Path = HOME) -> Iterator[CheckLine]:
    """Python, soulkit, and a line for each extra; one in `needed` may not be missing. `home` is the
    package folder of the installation."""
    pythons, core, extras = declared_requirements(home)
    yield _package("soulkit", "ok", __version__)
    here = platform.python_version()
    if SpecifierSet(pythons).contains(here, prereleases=True):
        yield _package("Python", "ok", here)
    else:
        yield _package("Python", "problem", f"{here}, and {pythons} is needed",
                    f"make an environment with Python {pythons}")  # fmt: skip
    yield from _core(core)
    for extra, packages in extras.items():
        if extra not in ELSEWHERE:
            yield _extra(extra, packages, needed=extra in needed)


def vllm_line(python: str | None = None) -> CheckLine:
    """The vLLM of the interpreter `python` (None: this one); it is not imported."""
    path = interpreter(python)
    try:
        install = vllm_version(path)
    except ConfigError as error:
        return CheckLine.of_error(PACKAGES, "vLLM", error)
    whose = "" if path == sys.executable else f" of {path}"
    if install is None:
        words = f"not installed{whose or ' here'}; --engine local samples without it"
        return _package("vLLM", "note", words, f"{install_line('vllm')}, or --vllm-python PATH")
    words = f"{install.distribution} {install.version}{whose}, "
    words += "on the GPU" if install.on_gpu else "on the CPU"
    if install.supported:
        return _package("vLLM", "ok", words)
    way = f"install vLLM {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, NEWER))}"
    return _package("vLLM", "note", f"{words}: soulkit does not know this version", way)


def _core(packages: list[str]) -> Iterator[CheckLine]:
    """One line where all is as it should be, else one for each package that is not."""
    wrong = [words for text in packages if (words := _wrong(text))]
    if wrong:
        yield _package("core", "problem", "; ".join(wrong), "install soulkit again")
    elif packages:
        yield _package("core", "ok", f"{len(packages)} packages within their ranges")


def _extra(extra: str, packages: list[str], *, needed: bool) -> CheckLine:
    name, brings = f"[{extra}]", BRINGS.get(extra, "")
    here = {text: installed_version(text) for text in packages}
    missing = [_name(text) for text, number in here.items() if number is None]
    wrong = [words for text, number in here.items() if number and (words := _wrong(text))]
    way = install_line(extra)
    if missing and (needed or len(missing) < len(packages)):
        shown = f"not installed: {', '.join(missing)}; {brings}"
        return _package(name, "problem" if needed else "note", shown, way)
    if missing:
        return _package(name, "note", f"not installed; brings {brings}", way)
    if wrong:
        return _package(name, "problem", "; ".join(wrong), way)
    versions = ", ".join(f"{_name(text)} {number}" for text, number in here.items())
    return _package(name, "ok", versions)


def installed_version(requirement: str) -> str | None:
    """The version that is here of the package a requirement names; None without one."""
    try:
        return version(_name(requirement))
    except PackageNotFoundError:
        return None


def _wrong(requirement: str) -> str:
    """What is wrong with the version that is here; empty where it is within its range."""
    number = installed_version(requirement)
    try:
        allowed = Requirement(requirement)
    except InvalidRequirement:  # of a later standard: whoever installed it could read it
        return ""
    if number is None:
        return f"{allowed.name} is not installed"
    if allowed.specifier.contains(number, prereleases=True):
        return ""
    return f"{allowed.name} {number} is outside {allowed.specifier}"


def _name(requirement: str) -> str:
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return requirement.split()[0]


_machine = partial(line, "machine")
GB = 1e9
LITTLE_DISK = 10 * GB
"""Below it a note: a model and some runs would fill it."""
NO_DISK = GB
LITTLE_MEMORY = 2 * GB
SMI = "name,memory.total,memory.free,driver_version"
SMI_S = 3.0
CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def machine_lines(*, connections: int = 0) -> Iterator[CheckLine]:
    """Lines about this machine; `connections` are those that a command opens at once at most."""
    yield from gpu_lines()
    yield _cores()
    yield memory_line()
    yield from disk_lines()
    yield files_line(connections)


# -- GPUs ----------------------------------------------------------------------------------------


def gpu_lines() -> Iterator[CheckLine]:
    """A line for each GPU, or one that says there is none."""
    gpus = _gpus()
    for number, (name, total, free, driver) in enumerate(gpus):
        words = f"{name}, {free} of {total} MiB free, driver {driver}"
        yield _machine(f"GPU {number}", "ok", words)
    torch = installed_version("torch") or ""
    if gpus and "+cpu" in torch:
        yield _machine("torch", "problem", f"{torch} cannot use the GPU: it is a build for CPUs",
                    "install torch for your driver: https://pytorch.org/get-started")  # fmt: skip
    if not gpus:
        yield _machine("GPU", "note", "none that nvidia-smi knows of: models compute on the CPU")


def _gpus() -> list[tuple[str, ...]]:
    """(name, MiB, MiB free, driver) of each GPU; empty without a driver."""
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
    limit = f", {quota:g} of them by the container's quota" if quota < cores else ""
    threads = os.environ.get(VARIABLE)
    chosen = f"; {VARIABLE}={threads}" if threads else ""
    return _machine("cores", "ok", f"{cores}{limit}{chosen}")


def memory_line(proc: Path = PROC, cgroups: Path = CGROUPS) -> CheckLine:
    """Memory that there is and that is free, by the kernel and by the limits of containers."""
    total, free = _meminfo(proc / "meminfo")
    limited = ""
    for limit, usage in _cgroup_limits(proc / "self" / "cgroup", cgroups):
        if limit < (total or limit + 1):
            total, limited = limit, ", by the container's limit"
        free = min(limit - usage, limit if free is None else free)
    if total is None or free is None:
        return _machine("memory", "note", "this system does not say how much there is")
    words = f"{free / GB:.1f} of {total / GB:.1f} GB free{limited}"
    if free < LITTLE_MEMORY:
        return _machine("memory", "note", words, "end what else computes here")
    return _machine("memory", "ok", words)


def _meminfo(file: Path) -> tuple[int | None, int | None]:
    """(bytes, bytes available) as the kernel counts them."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
        sizes = {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
    except (OSError, ValueError, IndexError):
        return None, None
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def _cgroup_limits(file: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(bytes allowed, bytes used) of the groups that bound this process, as far as any does."""
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


# -- disks, files, ports ---------------------------------------------------------------------------


def disk_lines() -> Iterator[CheckLine]:
    """The room for runs, and for what is downloaded."""
    yield disk_line("disk for runs", Path("runs"))
    yield disk_line("disk for downloads", hub_cache())


def disk_line(name: str, folder: Path) -> CheckLine:
    """How much is free where `folder` lies, or would."""
    place = folder.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _machine(name, "problem", f"{folder}: {error.strerror}", "name another place")
    words = f"{free / GB:.1f} GB free at {folder}"
    if not os.access(place, os.W_OK):
        return _machine(name, "problem", f"nothing can be written at {folder}",
                     f"change the permissions of {place}, or work elsewhere")  # fmt: skip
    if free < LITTLE_DISK:
        health: Health = "problem" if free < NO_DISK else "note"
        return _machine(name, health, words, "make room, or name another place")
    return _machine(name, "ok", words)


def files_line(connections: int) -> CheckLine:
    """The limit on open files against what a command needs."""
    needed = connections + BESIDE
    limits = file_limits()
    if limits is None:
        return _machine("open files", "note", "this system does not say how many there may be")
    soft, hard = limits
    if soft < 0:
        return _machine("open files", "ok", "unlimited")
    if soft >= needed or hard < 0 or hard >= needed:
        use = f"; {needed} are needed" if connections else ""
        raised = ", and a run raises the limit to that" if soft < needed else ""
        return _machine("open files", "ok", f"{soft} at once{use}{raised}")
    words = f"{hard} at once, and {needed} are needed for {connections} connections"
    way = "ask for more in /etc/security/limits.conf, or give a smaller --concurrency"
    return _machine("open files", "problem", words, way)


# -- outside of this machine -----------------------------------------------------------------------

OUTSIDE = "outside"
_outside = partial(line, OUTSIDE)
HUB = "https://huggingface.co"
HUB_S = 3.0
"""Seconds that the hub may take to say anything."""
NO_HEAD = 501
"""What a server says that is there and knows no HEAD."""
_KEY = re.compile(r"[A-Z][A-Z0-9_]*_API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN")
_TRUE = ("1", "ON", "YES", "TRUE")
LISTED = 8
"""Names in one line at most."""


# -- keys ------------------------------------------------------------------------------------------


def key_lines(wanted_keys: Collection[str] = ()) -> Iterator[CheckLine]:
    """A line with the NAMES of all keys in the environment, and a problem for each that no request
    could carry. Who misses one of `wanted_keys` is told by whoever knows the players."""
    names = sorted({*filter(_KEY.fullmatch, os.environ), *wanted_keys})
    here, broken = [], []
    for name in names:
        value = os.environ.get(name, "").strip()
        remember(value)  # whatever else is printed today does not show it
        try:
            here += [name] if read_key(name, optional=True) else []
        except ModelLoadError as error:
            broken.append(CheckLine.of_error(OUTSIDE, name, error))
    words = ", ".join(here) or "none in the environment (needed for servers off this machine)"
    yield _outside("keys", "ok" if here else "note", words)
    yield from broken
    yield from _default_address()


def _default_address() -> Iterator[CheckLine]:
    """Where players without an address are asked, if the environment says so."""
    if not (address := os.environ.get(ADDRESS, "").strip()):
        return
    try:
        yield _outside(ADDRESS, "note", f"players without an address: {checked_url(address)}")
    except ModelLoadError:
        # The words of that error quote what stands there, which may be anything.
        yield _outside(ADDRESS, "problem", "it holds no address of a server", f"unset {ADDRESS}")


# -- the hub ---------------------------------------------------------------------------------------


def hub_line() -> CheckLine:
    """Whether models and rows can be downloaded. Waits HUB_S seconds at most."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return _outside("hub", "note", f"not asked: {name} is set", f"unset {name}")
    address = os.environ.get("HF_ENDPOINT", "").strip() or HUB
    shown = shown_address(address)
    if web_address(address) is None:
        return _outside("hub", "problem", "HF_ENDPOINT holds no address", "unset HF_ENDPOINT")
    way = "check network and proxy; without it: models and rows as folders, HF_HUB_OFFLINE=1"
    try:
        why = _unreachable(address)
    except ModelLoadError as error:
        return CheckLine.of_error(OUTSIDE, "hub", error)
    if why:
        return _outside("hub", "note", f"{shown} does not answer ({why})", way)
    return _outside("hub", "ok", f"{shown} answers")


def _unreachable(address: str) -> str:
    """Why the server at `address` says nothing of use; empty where it answers."""
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
        return f"nothing within {HUB_S:g} s"
    except (httpx2.HTTPError, OSError) as error:
        return type(error).__name__


# -- rows ------------------------------------------------------------------------------------------


def rows_lines(registry: Registry) -> Iterator[CheckLine]:
    """Of how many tasks rows lie where they are looked for, by kind of rows."""
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
        words = f"{len(here)} of {len(here) + len(lacking) + len(broken)} tasks in {folder_note()}"
        words += f": {_some(here)}" if here else ""
        way = f"soul data pull --task TASK --split {kind}" if lacking else ""
        yield line("rows", f"{kind} rows", "ok" if here else "note", words, "" if here else way)
        yield from broken


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
