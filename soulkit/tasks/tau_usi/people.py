"""The user's own copies of the index's data: human conversations, word lists, difficulties.

soulkit ships none of it. Four options of the task name JSON files (word lists may be YAML):

    human_file   {"retail_12": {"conversation": [{"role": "user", "content": "..."}, ...],
                  "reward": 1, "keep": true, "survey": {"efficiency": {"answer": "..."}}},
                  "retail_12_ann2": {...}}         up to three batches, by the ends of the ids
    lexicons     {"politeness_rate": "REGEX", "emotion_rate": ["word", "two words"], ...}
    difficulty   {"retail_12": 0.62}, or {"retail_12": {"success": 0.62, "samples": 93}}
    survey_file  the model's answers about the people's conversations; required for Eval
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.errors import DataError, did_you_mean
from soulkit.parse import PATTERN_ERRORS, ParseError, parse_json, parse_yaml, read_limited
from soulkit.tasks.tau_usi.index import (
    LISTED,
    SURVEY,
    Lexicons,
    MeasuredTalk,
    Talks,
    is_persons_message,
    survey_agreement,
    talk_features,
    task_of,
)

BATCHES = ("", "_ann2", "_ann3")
LEAST_SAMPLES = 10
HUB = "https://huggingface.co/datasets/cmu-lti/tau-usi"
NEEDED = ("human_file", "lexicons", "difficulty")
"""The options without which there is no index."""
FILES = (*NEEDED, "survey_file")


@dataclass(frozen=True, slots=True)
class People:
    """The data that simulated customers are compared with."""

    batches: tuple[Talks, ...]
    difficulty: Mapping[str, float]
    survey: float | None


def missing_files(options: Mapping[str, Any]) -> list[str]:
    """The options that the index needs but that are not set."""
    return [name for name in NEEDED if not options.get(name)]


def file_hashes(options: Mapping[str, Any]) -> dict[str, str]:
    """Option → short hash of its file: numbers based on other lists or other people are not
    comparable, just like those of other prompts."""
    return {name: _file_hash(str(options[name])) for name in FILES if options.get(name)}


@cache
def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:12]
    except OSError:
        return "unreadable"


def check_files(options: Mapping[str, Any]) -> None:
    """DataError if a file does not have the format that its option requires, even if other files
    are missing and the index is not computed."""
    if lexicons := options.get("lexicons"):
        read_lexicons(str(lexicons))
    if difficulty := options.get("difficulty"):
        read_difficulty(str(difficulty))
    for option in ("human_file", "survey_file"):
        if path := options.get(option):
            _entries(str(path), option)


def require_shared_tasks(people: People, runs: Sequence[Talks], task: str) -> None:
    """DataError if no row's task has both human conversations and a known difficulty: the index
    would otherwise be missing without an explanation."""
    instances = {i for run in runs for i in run}
    shared = instances & set().union(*people.batches)
    if not shared:
        what = "human_file, which has no conversation about any of them"
    elif not {task_of(i) for i in shared} & people.difficulty.keys():
        what = "difficulty, which lists none of them"
    else:
        return
    raise DataError(
        f"The {len(instances)} rows of '{task}' have no task in common with the option {what}.",
        "The index compares customers and people on common tasks, and there are none. The rows "
        f"name tasks such as {min(instances, default='')}.",
        "Import rows of the people's tasks: soul data import tau_usi FILE; or omit the options.",
    )


def read_human_data(options: Mapping[str, Any]) -> People | None:
    """The data that the options name; None if the index lacks any of it.

    DataError if a file does not have the format that its option requires.
    """
    if missing_files(options):
        return None
    return _people(*(str(options.get(name) or "") for name in FILES))


@cache
def _people(human_file: str, lexicons: str, difficulty: str, survey_file: str) -> People:
    entries, lists = _entries(human_file, "human_file"), read_lexicons(lexicons)
    batches = tuple(
        {i: _talk(entry, lists) for i, entry in batch.items() if entry.get("keep", True)}
        for batch in in_batches(entries) if batch
    )  # fmt: skip
    if not any(talk.features for batch in batches for talk in batch.values()):
        raise _of_other_shape(human_file, "human_file", "the people's messages, under conversation")
    if not any(talk.success is not None for batch in batches for talk in batch.values()):
        raise _of_other_shape(human_file, "human_file", "a number under reward")
    survey = None
    if survey_file:
        model = in_batches(_entries(survey_file, "survey_file"))
        answers = [{i: answers_of(entry) for i, entry in batch.items()} for batch in model]
        survey = survey_agreement(batches, answers)
    return People(batches, read_difficulty(difficulty), survey)


def in_batches(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each batch of people, a mapping from ids without the batch suffix to entries."""
    batches: list[dict[str, Any]] = [{} for _ in BATCHES]
    for instance, entry in entries.items():
        number = next((n for n, end in enumerate(BATCHES) if end and instance.endswith(end)), 0)
        batches[number][instance.removesuffix(BATCHES[number])] = entry
    return batches


def _talk(entry: Mapping[str, Any], lexicons: Lexicons) -> MeasuredTalk:
    messages = entry.get("conversation")
    turns = [
        str(message.get("content") or "")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping) and message.get("role") == "user"
    ]
    own_turns = [turn for turn in turns if is_persons_message(turn)]
    return MeasuredTalk(
        talk_features(own_turns, lexicons), _success(entry.get("reward")), answers_of(entry)
    )


def _success(reward: Any) -> bool | None:
    """None without a reward: an unknown outcome is not a failure."""
    return reward > 0 if isinstance(reward, int | float) and math.isfinite(reward) else None


def answers_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """An entry's answers by question; an answer that is not text is left out."""
    survey = entry.get("survey")
    fields = survey if isinstance(survey, Mapping) else {}
    chosen = {q: f.get("answer") for q in SURVEY if isinstance(f := fields.get(q), Mapping)}
    return {question: answer for question, answer in chosen.items() if isinstance(answer, str)}


# -- files -----------------------------------------------------------------------------------------


@cache
def read_lexicons(path: str) -> Lexicons:
    """The compiled word lists of a file; DataError if one of them is missing."""
    lists = _object(path, "lexicons", "a pattern or a list of words for each feature")
    missing = [name for name in LISTED if name not in lists]
    if missing:
        raise DataError(
            f"The word lists in '{path}' lack {', '.join(missing)}.",
            f"Twelve features need one each; the file has {', '.join(lists) or 'none'}.",
            f"Add them. {did_you_mean(missing[0], lists) if lists else ''}".strip(),
        )
    return {name: _pattern(name, lists[name], path) for name in LISTED}


def _pattern(name: str, value: Any, path: str) -> re.Pattern[str]:
    words = value if isinstance(value, list) and value else None
    text = rf"\b(?:{'|'.join(re.escape(str(w).lower()) for w in words)})\b" if words else value
    try:
        return re.compile(text)
    except (*PATTERN_ERRORS, TypeError) as error:
        raise DataError(
            f"The word list '{name}' in '{path}' cannot be used.",
            f"It holds {type(value).__name__} {value!r:.60}: {error}.",
            "Write a regular expression, or a list of words and phrases.",
        ) from error


@cache
def read_difficulty(path: str) -> Mapping[str, float]:
    """Task → the share of published simulators with which the service succeeded."""
    values = _object(path, "difficulty", "a share in [0, 1] for each task")
    shares: dict[str, float] = {}
    for task, value in values.items():
        share, samples = value, LEAST_SAMPLES
        if isinstance(value, Mapping):
            share, samples = value.get("success"), value.get("samples", LEAST_SAMPLES)
        if not _is_number(share) or not _is_number(samples) or not 0 <= share <= 1:
            raise DataError(
                f"The difficulty of '{task}' in '{path}' is not a share.",
                f"Its value is {value!r:.60}.",
                'Write a number in [0, 1], or {"success": 0.6, "samples": 90}.',
            )
        if samples >= LEAST_SAMPLES:
            shares[task] = float(share)
    return shares


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entries(path: str, option: str) -> Mapping[str, Mapping[str, Any]]:
    entries = _object(path, option, "an object for each conversation, under its id")
    if not entries or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise _of_other_shape(path, option, "an object for each conversation, under its id")
    return entries


def _object(path: str, option: str, expected: str) -> dict[str, Any]:
    try:
        text = read_limited(Path(path).expanduser())
        value = parse_yaml(text) if path.endswith((".yaml", ".yml")) else parse_json(text)
    except (OSError, ParseError) as error:
        raise DataError(
            f"'{path}', the file of the option {option}, cannot be read.",
            " ".join(str(error).split())[:200],
            f"Name a file with {expected}. The people's data is available under terms: {HUB}",
        ) from error
    if not isinstance(value, dict):
        raise _of_other_shape(path, option, expected)
    return {str(key): part for key, part in value.items()}


def _of_other_shape(path: str, option: str, expected: str) -> DataError:
    return DataError(
        f"'{path}', the file of the option {option}, has the wrong format.",
        f"It should hold {expected}.",
        "Check that the option names the right file. "
        "See docs/reference/benchmarks-as-played.md for the shapes.",
    )
