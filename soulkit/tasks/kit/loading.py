"""Load rows as examples, in the same way for evaluation, training and the data commands.

    value of --data               examples_to_play (eval, train) examples_to_inspect (data, check)
    synth:N                       rows made here                 rows made here
    a file                        its rows                       its rows, else by the importer
    a folder                      the released files in it       these, or the whole release
    nothing                       the task's `rows` (eval), or   the task's `rows`
                                  the pulled files

Training rows and evaluation rows never mix: `tasks.yaml` assigns released files to a split, and
generated rows use a different seed per split. `RowsOnly` binds rows of tasks without a class.
`passages` turns rows into texts for comparing two files.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from soulkit.data.contamination import Passage, RowTexts, Words, entity_values, folded_words
from soulkit.data.files import (
    ROW_SUFFIXES,
    BadRow,
    RawRow,
    data_files,
    folder_note,
    read_rows,
    released_files,
    search_note,
)
from soulkit.data.literals import structure, texts_of
from soulkit.data.rows import ColumnsError, first_rows, share_of
from soulkit.errors import ConfigError, DataError, RowError, did_you_mean
from soulkit.models.base import Cast
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.tasks.kit.importing import (
    chats_for_rows,
    explaining_originals,
    import_rows,
    is_release,
    refuse_original_rows,
    refuse_release,
)
from soulkit.tasks.kit.made_rows import MADE, Split, made_rows, make_rows
from soulkit.tasks.kit.spec import cannot_play
from soulkit.types import Episode, Example, Score, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedExamples:
    """Loaded examples, and the rows that were left out."""

    examples: tuple[Example, ...]
    bad: tuple[BadRow, ...] = ()
    duplicates: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    """`data_source` of another task → number of its rows."""


# -- evaluation and training ---------------------------------------------------------------------


def examples_to_play(
    task: Task,
    source: str | None,
    *,
    split: Split = "test",
    limit: int | None = None,
    seed: int = 0,
) -> LoadedExamples:
    """The examples of `task` that a run plays: from `source`, or from the released files.

    A bad row is an error in training and is listed in an evaluation. DataError if no example is
    left.
    """
    if source is not None and source.startswith(MADE):
        loaded = to_examples(task, made_rows(task, source, seed, split), split=split)
        first = first_rows(loaded.examples, limit, lambda e: e.id)
        return LoadedExamples(examples=tuple(first), duplicates=loaded.duplicates)
    paths = row_files(task, source, split)
    strict = split == "train"
    return load_examples(task, paths, split=split, limit=limit, seed=seed, strict=strict)


STAND_IN = "published size"
"""`Example.source` of generated rows that stand for released ones in a plan."""
_DISTINCT = 20


def stand_ins(task: Task, split: Split, limit: int | None = None) -> tuple[Example, ...]:
    """Generated rows in the number of the task's released ones, for a plan without rows; empty if
    its `size` is not declared. Their prompts count as long as `size` says."""
    size = task.spec.size
    count = 0 if size is None else (size.train if split == "train" else size.eval)
    if not count or not task.spec.synth:
        return ()
    count = min(count, limit or count)
    made = make_rows(task, min(count, _DISTINCT), 0)
    rows = [RawRow(row, STAND_IN) for row in made]
    base = to_examples(task, rows, split=split).examples
    return tuple(
        replace(base[i % len(base)], id=f"{STAND_IN} {i}", cluster=f"{STAND_IN} {i}")
        for i in range(round(count * len(base) / len(rows)))
    )


def row_files(task: Task, source: str | None, split: Split) -> Sequence[Path]:
    """The file that `source` names, the task's `rows` (not for training), or the split's released
    files; DataError if there is no file."""
    files = task.spec.files
    if source is None and split != "train" and task.spec.rows:
        return [task.spec.rows_file]
    names = files.train if split == "train" else files.eval
    paths = data_files(task.name, names, source)
    if paths:
        return paths
    if source is not None:
        refuse_release(task, Path(source))
    chats = None if source is None else chats_for_rows(task, Path(source))
    raise chats or _no_rows(task, split, search_note(names, source), source)


class NoRows(DataError):
    """No rows of a task were found."""

    way: str = ""
    """How to get them, for messages about several missing things: `{names}` stands for the tasks
    that get their rows in the same way, `{task}` for one of them."""


def _no_rows(task: Task, split: Split, why: str, source: str | None) -> NoRows:
    name, train = task.name, split == "train"
    ways = _ways_to_rows(task, train, source)
    what = f"Task '{name}' has no training data here."
    reason = f"Training never reads evaluation files, and {why}."
    if not train:
        what, reason = f"There are no rows for the task '{name}'.", f"No file was found: {why}."
    error = NoRows(what, reason, f"One of: {'; '.join(ways).format(names=name, task=name)}.")
    place = f" into {braced(folder_note())}" if source is None else ""
    ways = tuple(f"{way}{place}" if "soul data pull" in way else way for way in ways)
    error.way = f"rows of {{names}}: {', or '.join(ways)}"
    return error


def _ways_to_rows(task: Task, train: bool, source: str | None) -> tuple[str, ...]:
    """The ways to get rows that the task declares: download, generate, import."""
    files = task.spec.files
    ways = []
    if files.train if train else files.eval:
        place = "" if source is None else f" --out {braced(shlex.quote(source))}"
        pull = f"soul data pull --task {{names}} --split {'train' if train else 'eval'}{place}"
        ways.append(f"download them: {pull}")
    if task.spec.synth:
        ways.append(f"--data {{task}}={MADE}{2000 if train else 100} (generated rows)")
    ways.append("--data {task}=FILE")
    if task.spec.formats:
        ways.append("import an original file: soul data import {task} FILE")
    return tuple(ways)


def braced(text: str) -> str:
    """`text` with its braces escaped for str.format."""
    return text.replace("{", "{{").replace("}", "}}")


def load_examples(
    task: Task,
    paths: Sequence[Path],
    *,
    split: str = "test",
    limit: int | None = None,
    seed: int = 0,
    strict: bool = False,
) -> LoadedExamples:
    """The examples of `task` in `paths`, without duplicates.

    `limit` keeps the rows with the smallest ids, each with all its forms. The sample does not
    depend on the order of rows and files, and every larger sample contains it. Examples are ordered
    by a hash of (seed, id).
    `strict` turns any bad row into a DataError.
    """
    if limit is not None and limit < 1:
        raise ConfigError(
            f"--limit {limit} leaves no rows.",
            "--limit is the number of rows to keep.",
            "Give a number of at least 1, or omit it to keep all rows.",
        )
    rows, bad = _rows_of(task, paths)
    with explaining_originals(task, paths[0]):
        rows.reverse()  # taken from the end, so that a row is not held twice
        taken = (rows.pop() for _ in range(len(rows)))
        loaded = to_examples(task, taken, split=split, bad=bad)
    if not loaded.examples or (strict and loaded.bad):
        raise _unusable(task, paths, loaded)
    sample = first_rows(sorted(loaded.examples, key=lambda e: e.id), limit, lambda e: e.id)
    sample.sort(key=lambda e: share_of(f"order/{seed}", e.id))
    return replace(loaded, examples=tuple(sample))


def _rows_of(task: Task, paths: Sequence[Path]) -> tuple[list[RawRow], list[BadRow]]:
    rows: list[RawRow] = []
    bad: list[BadRow] = []
    for path in map(Path, paths):
        with explaining_originals(task, path):
            good, broken = read_rows(path)
        rows += good
        bad += broken
    return rows, bad


# -- commands that look at data ------------------------------------------------------------------


def examples_to_inspect(
    task: Task, source: str, seed: int = 0, *, forms: bool = True
) -> LoadedExamples:
    """The examples of `task` in `source`, at least one; also reads original files and releases.

    Without `forms` every row is one example, as written. DataError if `source` holds nothing usable
    for this task, ConfigError for a `synth:` without a count or a task that generates no rows.
    """
    path, importer = Path(source), bool(task.spec.importer)
    try:
        if source.startswith(MADE):
            loaded = to_examples(task, made_rows(task, source, seed, "test"), forms=forms)
        elif is_release(task, path) or (importer and _is_other_file(path)):
            loaded = _load_original(task, path, forms)
        else:
            loaded = _load_rows(task, path, forms)
    except DataError as error:
        raise chats_for_rows(task, path) or error from None
    if not loaded.examples:
        raise _unusable(task, [path], loaded)
    return loaded


def _is_other_file(path: Path) -> bool:
    """Whether the file name lacks the suffix of a row format."""
    return not path.is_dir() and path.suffix.lower() not in ROW_SUFFIXES


def _load_rows(task: Task, path: Path, forms: bool) -> LoadedExamples:
    """The rows of a file, or what the importer reads from it; the released rows of a folder."""
    if path.is_dir():
        names = task.spec.files.eval
        paths = released_files(task.name, names, str(path))
        if not paths:
            raise DataError(
                f"There are no rows of the task '{task.name}' in '{path}'.",
                f"Searched for rows: {search_note(names, str(path))}.",
                "Name a file, or the folder that holds the released files.",
            )
        rows, bad = _rows_of(task, paths)
        return to_examples(task, rows, bad=bad, forms=forms)
    try:
        rows, bad = read_rows(path)
        return to_examples(task, rows, bad=bad, forms=forms)
    except DataError:  # not a list of rows, or rows with other columns: try the importer
        if not task.spec.importer:
            raise
        return _load_original(task, path, forms)


def _load_original(task: Task, path: Path, forms: bool) -> LoadedExamples:
    imported = import_rows(task, path)
    if not imported.rows and imported.bad:
        raise DataError(
            f"No record in '{path}' can be converted to a row of '{task.name}'.",
            f"{imported.bad[0].source}: {imported.bad[0].why.rstrip('.')}.",
            f"To list all of them: soul data import {task.name} {path}",
        )
    rows = [RawRow(row, f"{path.name}, record {i}") for i, row in enumerate(imported.rows, 1)]
    return to_examples(task, rows, bad=imported.bad, forms=forms)


# -- rows, one by one ------------------------------------------------------------------------------


def to_examples(
    task: Task,
    rows: Iterable[RawRow],
    *,
    split: str = "test",
    bad: Iterable[BadRow] = (),
    forms: bool = True,
) -> LoadedExamples:
    """Rows as examples, in order; without `forms` one example per row, as written.

    ColumnsError if every row lacks required columns; OriginalFile for records of the original
    release.
    """
    task_marks = sources(task)
    by_id: dict[str, Example] = {}
    broken = list(bad)
    skipped: Counter[str] = Counter()
    shapes: list[ColumnsError] = []
    own, marked = 0, list[RawRow]()
    duplicates = 0
    for row in rows:
        mark = str(row.fields.get("data_source") or task.name)
        if mark not in task_marks:
            skipped[mark] += 1
            continue
        own += 1
        marked += [] if row.fields.keys().isdisjoint(task.spec.original) else [row]
        try:
            for example in _examples(task, row, split, forms):
                duplicates += example.id in by_id
                by_id.setdefault(example.id, example)
        except DataError as error:
            shapes += [error] if isinstance(error, ColumnsError) else []
            what = error.what.removeprefix(f"{row.source}: ").removeprefix("row: ")
            broken.append(BadRow(row.source, f"{what} {error.why}"))
    refuse_original_rows(task, marked)
    if own and len(shapes) == own:
        raise shapes[0]
    return LoadedExamples(
        examples=tuple(task.with_baselines(tuple(by_id.values()))), bad=tuple(broken),
        duplicates=duplicates, skipped=dict(skipped),
    )  # fmt: skip


def sources(task: Task) -> frozenset[str]:
    """The `data_source` values that mark rows of `task`."""
    return frozenset((task.name, *task.spec.files.data_source))


def _examples(task: Task, row: RawRow, split: str, forms: bool) -> tuple[Example, ...]:
    examples = (
        task.examples(row.fields, source=row.source, split=split)
        if forms
        else (task.example(row.fields, source=row.source, split=split),)
    )
    for name, column in task.spec.columns.items():
        value = examples[0].fields.get(name)
        # An empty list is a value: a task that cannot play it raises its own error.
        if column.required and isinstance(value, str) and not value.strip():
            what = f"{row.source}: the required column '{name}' is blank."
            raise RowError(what, "A row without it cannot be played or scored.")
    return examples


def _unusable(task: Task, paths: Sequence[Path], loaded: LoadedExamples) -> DataError:
    names = ", ".join(f"'{path}'" for path in paths) or "no file"
    file = str(paths[0]) if len(paths) == 1 else "FILE"
    if loaded.bad:
        first = "; ".join(f"{b.source}: {b.why.rstrip('.')}" for b in loaded.bad[:3])
        kind = "Some" if loaded.examples else "All"
        return DataError(
            f"{kind} rows of {names} are bad ({len(loaded.bad)}).",
            f"{first}.",
            f"Correct them; to list all: soul data check {shlex.quote(file)} --task {task.name}",
        )
    others = ", ".join(f"{name} ({n})" for name, n in loaded.skipped.items())
    return DataError(
        f"No row of {names} belongs to task '{task.name}'.",
        f"Their data_source says: {others or 'nothing'}.",
        f"Name the right task, or set data_source to '{sorted(sources(task))[0]}' in the rows.",
    )


def rows_with_tasks(
    rows: Sequence[RawRow], names: Mapping[str, str], task: str | None = None
) -> tuple[list[tuple[str, RawRow]], list[BadRow]]:
    """(task, row) in the order of the rows, and the rows that belong to no known task.

    `names`: data_source → task. `task` is for rows without a data_source.
    """
    pairs: list[tuple[str, RawRow]] = []
    bad: list[BadRow] = []
    for row in rows:
        mark = str(row.fields.get("data_source") or "")
        owner = names.get(mark) if mark else task
        if owner is None:
            why = f"unknown data_source '{mark}'. {did_you_mean(mark, names)}" if mark else ""
            bad.append(BadRow(row.source, why or "it has no data_source"))
        else:
            pairs.append((owner, row))
    return pairs, bad


# -- tasks without a class, and rows as texts -----------------------------------------------------


class RowsOnly(Task):
    """A task that only binds rows; playing or scoring one raises ConfigError."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Parse JSON text in columns of type `any`, so that both spellings are the same row."""
        columns = self.spec.columns
        return {
            name: structure(value) if columns[name].type == "any" else value
            for name, value in fields.items()
        }

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """Empty, because a task without a class has no prompt."""
        return ()

    def gold_text(self, example: Example) -> str:
        """The text fields that only `gold` may read."""
        hidden = (example.fields.get(name) for name in self.gold_fields)
        return "\n".join(value for value in hidden if isinstance(value, str))

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        raise cannot_play([self.name])

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        raise cannot_play([self.name])


def passages(
    tasks: Mapping[str, Task], rows: Iterable[tuple[str, RawRow]]
) -> tuple[list[Passage], list[BadRow]]:
    """The passages of (task name, row) pairs, and the rows that their task rejects."""
    good: list[Passage] = []
    bad: list[BadRow] = []
    for name, row in rows:
        try:
            good.append(passage(tasks[name], row))
        except DataError as error:
            bad.append(BadRow(row.source, f"{error.what} {error.why}"))
    return good, bad


def passage(task: Task, row: RawRow) -> Passage:
    """One row as a passage; DataError if the task rejects it."""
    return passage_of(task, task.example(row.fields, source=row.source))


def passage_of(task: Task, example: Example) -> Passage:
    """The texts that the seats of one row may read."""
    columns = task.spec.columns
    texts = {name: folded_words(value) for name, value in _read(task, example).items()}
    entities = {
        (column.entity, value)
        for name, column in columns.items()
        if column.entity
        for value in entity_values(example.fields.get(name), task.name)
    }
    every = tuple(w for words in texts.values() for w in words)
    core = tuple(w for n, words in texts.items() if not columns[n].entity for w in words)
    return Passage(
        example.source, task.name, every, core or every, frozenset(entities),
        tuple(_recorded(example)),
    )  # fmt: skip


def row_texts(task: Task, example: Example) -> RowTexts:
    """The texts of one row as written, and which of them identify its cluster."""
    texts = texts_of(list(_read(task, example).values()))
    telling = texts_of([example.fields.get(name) for name in task.spec.cluster])
    return RowTexts(example.source, example.cluster, tuple(texts), tuple(telling))


def _read(task: Task, example: Example) -> dict[str, Any]:
    values = {n: v for seat in example.seats for n, v in example.visible(seat).items()}
    return {name: values[name] for name in task.spec.columns if name in values}


def _recorded(example: Example) -> Iterator[tuple[Words, ...]]:
    for name, value in example.fields.items():
        readers = example.audience.get(name, ())
        listed = value if isinstance(value, list | tuple) else ()
        history = listed and all(isinstance(item, Mapping) for item in listed)
        if history and set(readers) & set(example.seats):
            texts = (folded_words(v) for item in listed for v in item.values())
            yield tuple(words for words in texts if len(words) > 1)  # without role names
        elif "gold" in readers and isinstance(value, str):
            yield (folded_words(value),)


def entity_kinds(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The kinds of entity that the columns of `tasks` declare."""
    kinds = {c.entity for task in tasks for c in task.spec.columns.values() if c.entity}
    return tuple(sorted(kinds))
