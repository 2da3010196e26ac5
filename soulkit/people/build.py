"""The whole road from chats to a measured model of their people: its commands, and how far it is.

    import → redact → dedupe → split by person → plant → train → memory → closeness → page

A step is an ordinary command. It is done if `road.json` has its command with the hashes of what it
read, and if what it wrote is there. Training and measuring resume; other steps start again.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from soulkit.errors import RunError
from soulkit.runs.jsonl import placed_objects, read_object, read_value, unlinked, write_json

RECORD, RUN, PAGE = "road.json", "07-train", "10-page"
SECRETS, STEPS, CHECKPOINTS = 20, 300, 3
COMMANDS = {
    "01-import": "data import chats {chats} -o {out}/01-import/chats.jsonl --json",
    "02-redact": "data redact {out}/01-import/chats.jsonl -o {out}/02-redact/chats.jsonl --json",
    "03-dedupe": "data dedupe {safe} -o {out}/03-dedupe/chats.jsonl",
    "04-split": "data split {out}/03-dedupe/chats.jsonl --by person --share {share} "
                "--out {out}/04-split",
    "05-validation": "data split {out}/04-split/train.jsonl --by person --share 0.1 "
                     "--out {out}/05-validation",
    "06-plant": "data plant {out}/05-validation/train.jsonl --canaries {canaries} --side {side} "
                "-o {out}/06-plant/chats.jsonl",
    RUN: "train sft --data {learned} --side {side} --validation {out}/05-validation/held_out.jsonl "
         "--steps {steps} --eval-every {every} --set checkpoint_every={every} --out {out}/07-train",
    "08-memory": "people memory {out}/07-train",
    "09-closeness": "people closeness {out}/07-train --data {out}/04-split/held_out.jsonl "
                    "--side {side} --checkpoints",
    PAGE: "report {out}/07-train --out {out}/page.html",
}  # fmt: skip
"""Step → its command."""
WRITES = {
    "04-split": "04-split/held_out.jsonl", "05-validation": "05-validation/held_out.jsonl",
    RUN: f"{RUN}/summary.json", "08-memory": f"{RUN}/memory.json",
    "09-closeness": f"{RUN}/closeness.json", PAGE: "page.html",
}  # fmt: skip
"""Step → the last file that it writes, if that is not its chats.jsonl."""


@dataclass(frozen=True, slots=True)
class RoadStep:
    """One command, without `soul`."""

    name: str
    words: tuple[str, ...]
    reads: tuple[Path, ...]
    writes: Path
    """The last file that it writes."""

    @property
    def report(self) -> Path | None:
        """Where its standard output goes, if that is data."""
        return self.writes.with_name("report.json") if "--json" in self.words else None

    @property
    def resumes(self) -> bool:
        return self.words[0] != "data"

    @property
    def line(self) -> str:
        """The command for a shell."""
        end = f" > {shlex.quote(str(self.report))}" if self.report else ""
        return f"soul {shlex.join(self.words)}{end}"

    def facts(self) -> dict[str, Any]:
        """What makes it the same step: its command, and the hashes of what it reads."""
        return {"command": self.line, "reads": {str(one): _digest(one) for one in self.reads}}


def road_steps(
    chats: Path, out: Path, training: Sequence[str] = (), *, side: str = "human",
    share: float = 0.2, steps: int = STEPS, canaries: int = SECRETS, allow_private: bool = False,
) -> list[RoadStep]:  # fmt: skip
    """All steps in order; `training` has further options of `soul train sft`, and without
    `canaries` nothing is planted."""
    texts = {
        "chats": chats, "out": out, "share": share, "steps": steps,
        "side": side if allow_private else _renamed(out, side),
        "canaries": canaries, "every": max(1, steps // CHECKPOINTS),
        "safe": out / ("01-import" if allow_private else "02-redact") / "chats.jsonl",
        "learned": out / ("06-plant/chats.jsonl" if canaries else "05-validation/train.jsonl"),
    }  # fmt: skip
    extra = {RUN: (*training, *["--allow-private"] * allow_private)}
    left_out = ["02-redact"] * allow_private + ["06-plant"] * (not canaries)
    made = []
    for name, command in COMMANDS.items():
        words = [word.format(**texts) for word in command.split()]
        targets = {word for option, word in pairwise(words) if option in ("-o", "--out")}
        reads = (Path(word) for word in words if word == str(chats)
                 or (word.startswith(f"{out}/") and word not in targets))  # fmt: skip
        made.append(RoadStep(
            name, (*words, *extra.get(name, ())), tuple(reads),
            out / WRITES.get(name, f"{name}/chats.jsonl"),
        ))  # fmt: skip
    return [step for step in made if step.name not in left_out]


@dataclass(frozen=True, slots=True)
class _Facts:
    command: str
    reads: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Record:
    done: dict[str, _Facts]


class Road:
    """The steps in the folder `out`, and the record of those that are done."""

    def __init__(self, out: Path, plan: Callable[[], list[RoadStep]]) -> None:
        self.out, self.plan = out, plan
        self.record: dict[str, Any] = {"done": {}, **read_object(out / RECORD)}
        read_value(_Record, self.record, f"'{out / RECORD}'")
        self._look()

    def _look(self) -> None:
        """Redaction renames the speaker who is learned, so later commands follow from it."""
        self.steps = self.plan()
        self.record |= {"run": RUN, "commands": [step.line for step in self.steps]}

    def is_done(self, step: RoadStep) -> bool:
        """Whether a step was done as it would be now. The page is always written again."""
        same = self.record["done"].get(step.name) == step.facts()
        return same and step.writes.exists() and step.name != PAGE

    def refuse_changes(self) -> None:
        """RunError if a step was done in another way; it names what would have to be done again."""
        there = [one for one in self.steps if one.writes.exists() and one.name != PAGE]
        for place, step in enumerate(there):
            before = self.record["done"].get(step.name)
            if before is None or self.is_done(step):
                continue
            names = [one.name for one in there[place:]]
            places = dict.fromkeys(str(one.writes.parent if RUN in names else one.writes)
                                   for one in there[place:])  # fmt: skip
            raise RunError(
                f"'{self.out}' was made in another way: {_change(before, step)}.",
                f"These would have to be done again: {', '.join(names)}.",
                f"Use another --out, or delete them: rm -r {shlex.join(places)}",
            )

    def begin(self, step: RoadStep) -> None:
        """Remove what a killed command left, unless it resumes. RunError for a link."""
        unlinked(self.out, *step.writes.parent.relative_to(self.out).parts)
        if not step.resumes and step.writes.parent.exists():
            shutil.rmtree(step.writes.parent)
        step.writes.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.out / RECORD, self.record)

    def finish(self, step: RoadStep) -> None:
        """Record that a step is done."""
        self.record["done"][step.name] = step.facts()
        report = read_object(step.report) if step.report else {}
        if step.name == "01-import":
            self.record |= {"material": _material(step.writes), "left_out": report["left_out"]}
        elif report:
            self.record["redacted"] = report["private"]
        self._look()
        write_json(self.out / RECORD, self.record)


def _renamed(out: Path, side: str) -> str:
    """The name that redaction gave the speaker `side`; the same if it was not redacted yet."""
    files = [out / name / "chats.jsonl" for name in ("01-import", "02-redact")]
    if not all(file.is_file() for file in files):
        return side
    for (_, before), (_, after) in zip(*map(_conversations, files), strict=False):
        for old, new in zip(before, after, strict=False):
            if old.get("speaker") == side:
                return str(new.get("speaker"))
    return side


def _conversations(file: Path) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Person and messages of each row that a step wrote; DataError if the file was damaged."""
    for _, row in placed_objects(file):
        messages = read_value(list[dict[str, Any]], row.get("messages"), f"'{file}'")
        yield row.get("person"), messages


def _digest(path: Path) -> str:
    """A hash of a file, of a run's summary, or of all files in a folder."""
    files = [path / "summary.json" if path.name == RUN else path]
    files = sorted(one for one in path.rglob("*") if one.is_file()) if files[0].is_dir() else files
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def _change(before: Mapping[str, Any], step: RoadStep) -> str:
    """`07-train had --steps 60, and now has --steps 90`, or the file that has changed."""
    old, new = (line.split(" ") for line in (before["command"], step.line))
    for a, b in zip(old, new, strict=False):
        if a != b:
            return f"{step.name} had '{a}' where it now has '{b}'"
    return f"what {step.name} read has changed, {', '.join(map(str, step.reads))}"


def _material(file: Path) -> dict[str, int]:
    """Numbers of persons, conversations and messages."""
    rows = [(person, len(messages)) for person, messages in _conversations(file)]
    persons = {str(person or f"row {place}") for place, (person, _) in enumerate(rows)}
    return {"person": len(persons), "conversation": len(rows), "message": sum(n for _, n in rows)}
