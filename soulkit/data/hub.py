"""`soul data pull`: downloads the released files of tasks at one commit and writes a lock file.

    files in tasks.yaml ──▶ check locked files on disk ──▶ one listing per dataset
      ──▶ check for the user's files and free space ──▶ download file by file ──▶ lock

    soul-data.lock.json: {"version": 1, "repos": {"owner/name": "4c1d…"},
     "files": {"hitom_val.parquet": {"repo": "owner/name", "revision": "4c1d…",
               "path": "hitom_val.parquet", "sha256": "3f2a…", "bytes": 51234}}}

A dataset stays at the commit of its first pull until `--revision` names another one. Files that
match the lock need no request. Files from another source are never overwritten.
"""

from __future__ import annotations

import difflib
import glob
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from soulkit.data.download import Digests, Hub, Remote, digests, partial_path, size_of
from soulkit.data.files import ROW_SUFFIXES, unreadable_file
from soulkit.errors import ConfigError, DataError, did_you_mean
from soulkit.parse import parse_json, read_limited
from soulkit.reporting import SILENT, Bar, Reporter
from soulkit.runs.jsonl import append_to, first_problem, form_of, write_json
from soulkit.text import byte_size, counted

ReleaseSplit = Literal["train", "eval"]
SPLITS: tuple[ReleaseSplit, ...] = ("train", "eval")
RELEASES: Mapping[ReleaseSplit, str] = {
    "train": "sunweiwei/sim-rl-data",
    "eval": "sunweiwei/sim-eval-data",
}
CORPORA: Mapping[str, str] = {
    "mid-training": "cmu-lti/osim-mid-training",
    "post-training": "cmu-lti/osim-post-training",
}
"""Datasets that belong to no single task; each is pulled completely into its own folder."""

LOCK = "soul-data.lock.json"
_VERSION = 1
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


class Released(Protocol):
    """The released files of one task."""

    @property
    def train(self) -> tuple[str, ...]: ...
    @property
    def eval(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class FileRequest:
    """One requested file: its path in the dataset, and its name in the local folder."""

    repo: str
    path: str
    name: str
    task: str = ""


@dataclass(frozen=True, slots=True)
class LockEntry:
    """The lock file's entry for one file."""

    repo: str
    revision: str
    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """One file that is now in place."""

    name: str
    file: str
    entry: LockEntry
    state: Literal["kept", "downloaded", "resumed"]


# -- requested files -----------------------------------------------------------------------------


def released(tasks: Mapping[str, Released], splits: Sequence[ReleaseSplit]) -> list[FileRequest]:
    """The files that `tasks.yaml` lists for the tasks, each once; DataError if there are none."""
    requests: dict[tuple[str, str], FileRequest] = {}
    for task, files in tasks.items():
        for split in splits:
            for name in files.train if split == "train" else files.eval:
                requests.setdefault((split, name), FileRequest(RELEASES[split], name, name, task))
    if not requests:
        subject = f"The task '{next(iter(tasks))}' has" if len(tasks) == 1 else "These tasks have"
        raise DataError(
            f"{subject} no released files for {' and '.join(splits)}.",
            "tasks.yaml lists none: these rows are generated, imported, or your own.",
            "See: soul data synth, soul data import, and soul tasks show NAME",
        )
    return list(requests.values())


def corpus_repo(name: str) -> str:
    """The dataset of a corpus; ConfigError for an unknown name."""
    if name not in CORPORA:
        raise ConfigError(
            f"There is no corpus named '{name}'.",
            "A corpus is a released dataset that belongs to no single task.",
            did_you_mean(name, CORPORA),
        )
    return CORPORA[name]


# -- the lock ------------------------------------------------------------------------------------


@dataclass
class Lock:
    """The lock file of a folder, in memory."""

    path: Path
    repos: dict[str, str] = field(default_factory=dict)
    files: dict[str, LockEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Lock:
        """The lock of a folder, empty without a lock file; DataError if it is unreadable."""
        path = folder / LOCK
        if not path.exists():
            return cls(path)
        try:
            stored = parse_json(read_limited(path))
            if stored["version"] != _VERSION:
                raise ValueError(f"it has version {stored['version']}; expected {_VERSION}")
            files = form_of(dict[str, LockEntry]).validate_python(stored["files"])
            return cls(path, form_of(dict[str, str]).validate_python(stored["repos"]), files)
        except (OSError, ValueError, LookupError, TypeError) as error:
            from pydantic import ValidationError

            why = first_problem(error) if isinstance(error, ValidationError) else str(error)
            raise DataError(
                f"The lock file '{path}' cannot be read.",
                f"It was edited or written by another version: {type(error).__name__}: {why}.",
                "Delete it. Files with the right checksum are recognised without it.",
            ) from error

    def write(self) -> None:
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        write_json(self.path, {"version": _VERSION, "repos": self.repos, "files": files})

    def vouches(self, request: FileRequest, revision: str | None, folder: Path) -> LockEntry | None:
        """The entry of a file if the file on disk matches it, at the requested revision."""
        entry = self.files.get(request.name)
        if entry is None or entry.repo != request.repo:
            return None
        if entry.revision != (revision or self.repos.get(request.repo)):
            return None
        path = folder / request.name
        same = size_of(path) == entry.bytes and path.is_file()
        return entry if same and digests(path).sha256 == entry.sha256 else None


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows has no such locks
        yield
        return
    with append_to(folder / ".soul-data.pulling") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"Another process is downloading into '{folder}'.",
                "Two processes would write the same files.",
                "Wait until it finishes, or choose another folder with --out.",
            ) from error
        yield


# -- pulling -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    request: FileRequest
    remote: Remote
    target: Path
    have: Digests | None

    @property
    def done(self) -> bool:
        return self.have is not None and self.have.match(self.remote)

    @property
    def left(self) -> int:
        """Bytes still to download; those of an interrupted download do not count."""
        part = min(size_of(partial_path(self.target, self.remote)), self.remote.bytes)
        return 0 if self.done else self.remote.bytes - part


def pull_files(
    hub: Hub,
    requests: Sequence[FileRequest],
    folder: Path,
    *,
    revision: str | None = None,
    reporter: Reporter = SILENT,
) -> list[Pulled]:
    """Download the requested files into `folder`, all files of a dataset at the same commit.

    `revision` is a commit, branch or tag. Without it, the commit in the lock file is used, else the
    newest of the main branch. A second call resumes an interrupted one. DataError if a file is
    missing (after all others were pulled), refused or damaged, or would replace a user's file.
    """
    _one_commit_one_repo(requests, revision)
    with _locked_folder(folder):
        lock = Lock.read(folder)
        present = _files_in_place(requests, lock, folder, revision)
        rest = [w for w in requests if w.name not in present]
        jobs, missing = _download_jobs(hub, rest, lock, folder, revision)
        new = _download_all(hub, jobs, lock, folder, reporter)
    if missing:
        raise missing
    both = {**present, **new}
    return [both[w.name] for w in requests]


def corpus_files(
    hub: Hub, name: str, folder: Path, revision: str | None = None
) -> tuple[list[FileRequest], str]:
    """Requests for all row files of a corpus, in its own folder, and the commit that was listed.

    ConfigError for an unknown corpus; DataError if it cannot be listed or has no row files.
    """
    repo = corpus_repo(name)
    subfolder = repo.partition("/")[2]
    pinned = revision or Lock.read(folder).repos.get(repo)
    commit, files = hub.listing(repo, pinned, f"the corpus {name}")
    row_paths = [f.path for f in files if PurePosixPath(f.path).suffix.lower() in ROW_SUFFIXES]
    if not row_paths:
        raise DataError(
            f"The dataset {repo} contains no row files at commit {commit[:12]}.",
            f"It has {len(files)} files, none with the suffix {', '.join(ROW_SUFFIXES)}.",
            f"Check {hub.endpoint}/datasets/{repo}, or name another commit with --revision.",
        )
    return [
        FileRequest(repo, path, f"{subfolder}/{_checked_path(path)}") for path in row_paths
    ], commit


def _checked_path(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
        raise DataError(
            f"The dataset contains the path '{path}', which is outside its folder.",
            "Writing there could overwrite your own files.",
            "Do not use this dataset. If HF_ENDPOINT is set, check the mirror it names.",
        )
    return path


def _one_commit_one_repo(requests: Sequence[FileRequest], revision: str | None) -> None:
    repos = sorted({w.repo for w in requests})
    if revision and _COMMIT.fullmatch(revision) and len(repos) > 1:
        raise ConfigError(
            f"The commit {revision[:12]} cannot be used for several datasets.",
            f"The requested files are in {len(repos)} datasets: {' and '.join(repos)}.",
            "Add --split train or --split eval.",
        )


def _files_in_place(
    requests: Iterable[FileRequest], lock: Lock, folder: Path, revision: str | None
) -> dict[str, Pulled]:
    entries = {w.name: lock.vouches(w, revision, folder) for w in requests}
    return {
        name: Pulled(name, str(folder / name), entry, "kept")
        for name, entry in entries.items()
        if entry is not None
    }


def _download_jobs(
    hub: Hub, requests: Sequence[FileRequest], lock: Lock, folder: Path, revision: str | None
) -> tuple[list[_Job], DataError | None]:
    by_repo: dict[str, list[FileRequest]] = defaultdict(list)
    for request in requests:
        by_repo[request.repo].append(request)
    jobs: list[_Job] = []
    missing: list[DataError] = []
    for repo, group in by_repo.items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        pinned = revision or lock.repos.get(repo)
        commit, files = hub.listing(repo, pinned, f"{group[0].path}{more}")
        lock.repos[repo] = commit
        places = {w: _place(w.path, files) for w in group}
        if lacking := [w for w, place in places.items() if place is None]:
            missing.append(_missing_error(hub, repo, commit, lacking, files))
        jobs += [_job(hub, w, p, lock, folder) for w, p in places.items() if p is not None]
    return jobs, missing[0] if missing else None


def _place(path: str, files: Sequence[Remote]) -> Remote | None:
    """The file with that path, or the only file with that name in any folder of the dataset."""
    exact = [f for f in files if f.path == path]
    below = [f for f in files if PurePosixPath(f.path).name == path]
    candidates = exact or below
    return candidates[0] if len(candidates) == 1 else None


def _job(hub: Hub, request: FileRequest, place: Remote, lock: Lock, folder: Path) -> _Job:
    target, remote = folder / _checked_path(request.name), hub.completed(place)
    if target.is_dir():
        raise unreadable_file(target, "a folder with this name already exists")
    job = _Job(request, remote, target, digests(target) if target.is_file() else None)
    entry = lock.files.get(request.name)
    if job.have and not job.done and (entry is None or entry.sha256 != job.have.sha256):
        raise DataError(
            f"'{target}' already exists and differs from the file in {remote.repo}.",
            "It was changed or is your own file, and a download would overwrite it.",
            f"Move it away, or choose another folder with --out, then run: {hub.command}",
        )
    return job


def _missing_error(
    hub: Hub, repo: str, commit: str, lacking: Sequence[FileRequest], files: Sequence[Remote]
) -> DataError:
    names = [f.path for f in files]
    more = f" (and {len(lacking) - 1} more are missing)" if len(lacking) > 1 else ""
    short = {PurePosixPath(name).name: name for name in names}
    near = difflib.get_close_matches(lacking[0].path, short, n=3, cutoff=0.4)
    nearest = ", ".join(f"'{short[name]}'" for name in near) or "none"
    return DataError(
        f"The dataset {repo} has no file '{lacking[0].path}'{more}.",
        f"At commit {commit[:12]} it has {len(names)} files. Similar names: {nearest}.",
        "Name another commit with --revision, or correct `files` of the task "
        f"'{lacking[0].task}' in your tasks file, then run: {hub.command}",
    )


# -- downloading ---------------------------------------------------------------------------------


def _download_all(
    hub: Hub,
    jobs: Sequence[_Job],
    lock: Lock,
    folder: Path,
    reporter: Reporter,
) -> dict[str, Pulled]:
    if not jobs:
        return {}
    total = sum(job.left for job in jobs)
    _check_space(folder, total)
    lock.write()  # pins the commit for a resumed download
    waiting = [job for job in jobs if job.left]
    for repo in dict.fromkeys(job.remote.repo for job in waiting):
        files = counted(sum(job.remote.repo == repo for job in waiting), "file")
        reporter.note(f"{repo} at {lock.repos[repo][:12]}: {files} to download")
    pulled: dict[str, Pulled] = {}
    with reporter.progress(total, byte_size) as bar:
        for job in jobs:
            pulled[job.request.name] = _download(hub, job, lock, bar)
    return pulled


def _download(hub: Hub, job: _Job, lock: Lock, bar: Bar) -> Pulled:
    resumed = job.left < job.remote.bytes
    have = job.have
    if have is None or not job.done:
        have = hub.fetch(job.remote, job.target, bar)
        for other in job.target.parent.glob(f".{glob.escape(job.target.name)}.*.part"):
            other.unlink()  # partial download of another commit
    entry = LockEntry(
        job.remote.repo, job.remote.revision, job.remote.path, have.sha256, have.bytes
    )
    lock.files[job.request.name] = entry
    lock.write()
    state: Literal["kept", "downloaded", "resumed"] = "resumed" if resumed else "downloaded"
    return Pulled(job.request.name, str(job.target), entry, "kept" if job.done else state)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"'{folder}' does not have enough free disk space.",
            f"The files need {needed} bytes, and {free} are free.",
            "Free some space, or choose a folder on another disk with --out.",
        )
