"""Episodes in readable form: the selection for a page, and one episode in a terminal."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from soulkit.metrics.intervals import number
from soulkit.report.load import EPISODES, RunData
from soulkit.runs.jsonl import has_lines
from soulkit.runs.records import SAMPLED, SAMPLES, load_records, stream_records
from soulkit.text import one_line, sanitise
from soulkit.types import Feedback, Record, Verdict

if TYPE_CHECKING:
    from rich.text import Text


CAP = 200
TEXT_LIMIT = 6000
"""Maximum characters of one text; longer texts end with a note on the rest."""


class Played(Protocol):
    """One play of an example: a record or its place in a file."""

    @property
    def task(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def example_id(self) -> str: ...
    @property
    def rollout(self) -> int: ...
    @property
    def kind(self) -> str: ...


_T = TypeVar("_T")
_P = TypeVar("_P", bound=Played)
TakeOutcome = Literal["right", "partial", "wrong", "unscored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """One play of an example, ready to print. Texts are sanitised but not escaped."""

    text: str
    reasoning: str
    score: str
    outcome: TakeOutcome
    status: str
    words: str
    failure: str
    metrics: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """A draft with its feedback and refined twin, or a single episode."""

    run: str
    task: str
    example_id: str
    step: int
    rollout: int
    kind: str
    prompt: str
    gold: str
    gold_label: str
    tags: tuple[tuple[str, str], ...]
    draft: Take
    feedback: str
    feedback_note: str
    refined: Take | None
    improved: bool


def choose(runs: Sequence[RunData], cap: int = CAP) -> tuple[list[ShownEpisode], int]:
    """(episodes to show, total number), in the order of run, task, step, example."""
    groups: dict[tuple[int, str], list[tuple[Record, Record | None]]] = {}
    for index, run in enumerate(runs):
        for pair in with_twins(_readable(run)):
            groups.setdefault((index, pair[0].task), []).append(pair)
    for pairs in groups.values():
        pairs.sort(key=lambda pair: hashlib.sha256(pair[0].key.encode("utf-8", "replace")).digest())
    tagged = [[(index, *pair) for pair in pairs] for (index, _), pairs in sorted(groups.items())]
    picked = list(_in_turn(tagged))[:cap]
    picked.sort(key=lambda p: (p[0], p[1].task, p[1].step, p[1].example_id, p[1].rollout))
    whole = _read_again(runs, picked)
    units = [
        _unit(
            runs[index].name,
            whole.get((index, draft.key), draft),
            refined and whole.get((index, refined.key), refined),
        )
        for index, draft, refined in picked
    ]
    return units, sum(map(len, groups.values()))


def _file(run: RunData) -> Path:
    """The episode file of a run: played episodes, else sampled continuations of held-out
    conversations."""
    played, samples = run.path / EPISODES, run.path / SAMPLES
    return samples if not run.records and samples.is_file() else played


def _readable(run: RunData) -> Sequence[Record]:
    file = _file(run)
    return load_records(file) if file.name == SAMPLES else run.records


def _read_again(
    runs: Sequence[RunData], picked: Sequence[tuple[int, Record, Record | None]]
) -> dict[tuple[int, str], Record]:
    """The complete records of the shown episodes, by run and key."""
    keys: dict[int, set[str]] = {}
    for index, draft, refined in picked:
        keys.setdefault(index, set()).update(one.key for one in (draft, refined) if one)
    return {
        (index, record.key): record
        for index, names in keys.items()
        if has_lines(file := _file(runs[index]))
        for record in stream_records(file, keys=names)
    }


def _in_turn(groups: Iterable[Sequence[_T]]) -> Iterator[_T]:
    for row in zip_longest(*groups):
        yield from (item for item in row if item is not None)


def with_twins(records: Iterable[_P]) -> list[tuple[_P, _P | None]]:
    """Every draft with its refined twin; a refined episode without its draft is listed alone."""
    slots: dict[tuple[str, int, str, int], dict[str, _P]] = {}
    for r in records:
        slots.setdefault((r.task, r.step, r.example_id, r.rollout), {})[r.kind] = r
    pairs: list[tuple[_P, _P | None]] = []
    for kinds in slots.values():
        twin = kinds.pop("refined", None)
        if "draft" in kinds:
            pairs.append((kinds.pop("draft"), twin))
        elif twin is not None:
            pairs.append((twin, None))
        pairs += [(other, None) for other in kinds.values()]
    return pairs


def _unit(run: str, draft: Record, refined: Record | None) -> ShownEpisode:
    feedback = draft.received or draft.given or (refined.given if refined else None)
    before, after = draft.score.value, refined.score.value if refined else None
    return ShownEpisode(
        run=run,
        task=one_line(draft.task),
        example_id=one_line(draft.example_id),
        step=draft.step,
        rollout=draft.rollout,
        kind=draft.kind,
        prompt=clean(draft.prompt),
        gold=clean(draft.gold),
        gold_label="The person wrote" if draft.score.reason == SAMPLED else "Gold answer",
        tags=tuple((one_line(k), one_line(str(v))) for k, v in draft.tags.items()),
        draft=_take(draft),
        feedback=clean(feedback.text) if feedback else "",
        feedback_note=_feedback_note(feedback),
        refined=_take(refined) if refined else None,
        improved=before is not None and after is not None and after > before,
    )


def _feedback_note(feedback: Feedback | None) -> str:
    if feedback is None:
        return ""
    kind = feedback.kind.replace("_", " ")
    leak = f", leaks ({feedback.leak})" if feedback.leak else ""
    return one_line(f"{kind} by {feedback.author}{leak}")


def _take(record: Record) -> Take:
    score, failure = record.score, record.episode.failure
    final = record.episode.final
    return Take(
        text=clean(_spoken(record)),
        reasoning=clean(final.reasoning) if final else "",
        score=number(score.value),
        outcome=outcome(score.value),
        status=one_line(f"{score.status}: {score.reason}" if score.reason else score.status),
        words=clean(score.words),
        failure=clean(failure.detail) if failure and failure.detail != score.words else "",
        metrics=tuple((one_line(k), number(v)) for k, v in score.metrics.items()),
    )


def _spoken(record: Record) -> str:
    """The dialogue if there is one, otherwise the answer."""
    lines = record.episode.transcript
    if len(lines) > 1:
        return "\n\n".join(f"{line.seat}: {line.text}" for line in lines)
    final = record.episode.final
    if final is not None:
        return final.text
    return lines[0].text if lines else ""


def outcome(value: float | None) -> TakeOutcome:
    """`right` for scores of 1 or more, `wrong` for 0 or less, `partial` in between."""
    if value is None:
        return "unscored"
    return "right" if value >= 1 else "wrong" if value <= 0 else "partial"


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` without control characters, cut at `limit` characters with a note on the rest."""
    safe = sanitise(text).strip()
    if len(safe) <= limit:
        return safe
    return f"{safe[:limit]}\n… {len(safe) - limit:,} more characters in episodes.jsonl"


WORDS = 150
"""Words shown of one text without --full."""
WORDS_OF_REASONING = 60
"""Words shown of a judge's reasoning and of a model's thinking."""
_WORD = re.compile(r"\S+")
_SPARE = 20
"""Fewer words are not cut: the note about them would be as long."""
_AUDIT = "audit"
STYLES = {"ok": "green", "salvaged": "green", "unscored": "yellow"}
"""Status → colour; other statuses are failures of the actor."""


@dataclass(frozen=True, slots=True)
class PageBlock:
    """Lines with one indentation, in columns."""

    text: Text
    indent: int = 0


def fold(text: str, words: int) -> str:
    """`text` with at most `words` words: its start and its end, where prompts put the question.

    0 means no limit. A note replaces the rest: `[… 812 words …]`.
    """
    places = [match.span() for match in _WORD.finditer(text)] if words else []
    hidden = len(places) - words
    if hidden <= _SPARE:
        return text
    head, tail = words - words // 3, words // 3
    begin, end = text[: places[head - 1][1]], text[places[-tail][0] :] if tail else ""
    return f"{begin} [… {hidden:,} words …] {end}".rstrip()


def episode_blocks(
    draft: Record, refined: Record | None = None, *, full: bool = False
) -> list[PageBlock]:
    """The page of a draft with its refined episode, or of a single episode."""
    blocks = [*_head(draft, refined), *_seen(draft, full), *_taken(draft, full)]
    feedback = draft.received or (refined.given if refined else None)
    if feedback is not None:
        blocks += _feedback(feedback, full)
    if draft.given is not None:  # a refined episode without its draft
        blocks += _feedback(draft.given, full)
    if refined is not None:
        blocks += [*_refined_prompt(refined, full), *_taken(refined, full)]
    return blocks


# -- parts of a page -------------------------------------------------------------------------------


def _head(draft: Record, refined: Record | None) -> Iterator[PageBlock]:
    parts = [draft.task, draft.example_id, f"rollout {draft.rollout}"]
    parts += [f"step {draft.step}"] if draft.step or refined else []
    yield PageBlock(_text(" · ".join(map(one_line, parts)), "bold"))
    beside = [f"{one_line(tag)} {one_line(value)}" for tag, value in draft.tags.items()]
    if draft.cluster and draft.cluster != draft.example_id:
        beside.append(f"cluster {one_line(draft.cluster)}")
    if beside:
        yield PageBlock(_text(" · ".join(beside), "dim"))
    if refined is not None and None not in (draft.score.value, refined.score.value):
        before, after = draft.score.value or 0.0, refined.score.value or 0.0
        plus = "+" if after > before else ""
        yield PageBlock(_text(
            f"draft {number(before)} → refined {number(after)} ({plus}{number(after - before)})"
        ))  # fmt: skip


def _seen(record: Record, full: bool) -> Iterator[PageBlock]:
    """The first prompt of every acted seat; without traces, the recorded prompt."""
    traces = [trace for trace in record.episode.traces if trace.turns and trace.turns[0].context]
    for trace in traces:
        yield _title(f"seen by {one_line(trace.seat)}")
        for segment in trace.turns[0].context:
            yield PageBlock(_labelled(segment.role, segment.text, full), 2)
    if not traces and record.prompt:
        yield _title("seen by the actor")
        yield PageBlock(_text(_shown(record.prompt, full)), 2)


def _refined_prompt(record: Record, full: bool) -> Iterator[PageBlock]:
    """The changes for the refined episode; its prompt only if the full text is requested."""
    if full:
        yield from _seen(record, full)
    else:
        yield _title("refined: the same prompt with this feedback")


def _taken(record: Record, full: bool) -> Iterator[PageBlock]:
    """The result of an episode: text, cuts, score and verdicts."""
    yield _title("dialogue" if len(record.episode.transcript) > 1 else "answer", record.kind)
    yield from _spoken_lines(record, full)
    yield from _cuts(record)
    yield from _score(record, full)
    for verdict in record.score.verdicts:
        yield from _verdict(verdict, full)


def _spoken_lines(record: Record, full: bool) -> Iterator[PageBlock]:
    acted = {trace.seat for trace in record.episode.traces}
    for line in record.episode.transcript:
        style = "bold cyan" if line.seat in acted else "bold"
        yield PageBlock(_labelled(line.seat, line.text, full, style), 2)
    final = record.episode.final
    if final is not None and not record.episode.transcript:
        yield PageBlock(_text(_shown(final.text, full)), 2)
    if final is not None and final.reasoning:
        thought = fold(final.reasoning, 0 if full else WORDS_OF_REASONING)
        yield PageBlock(_text(f"thinking: {sanitise(thought).strip()}", "dim"), 2)
    if final is None and not record.episode.transcript:
        yield PageBlock(_text("no reply", "dim"), 2)


def _cuts(record: Record) -> Iterator[PageBlock]:
    """Notes on text cut by limits and settings dropped by servers."""
    for trace in record.episode.traces:
        stops = [turn.completion.stop_reason for turn in trace.turns]
        turns = [i for i, stop in enumerate(stops, 1) if stop == "length"]
        if turns:
            listed = ", ".join(map(str, turns))
            yield _remark(f"{one_line(trace.seat)}: reply cut at the token limit in turn {listed} "
                          f"of {len(trace.turns)}")  # fmt: skip
    for name, value in record.episode.notes.items():
        label = _NOTES.get(name) or one_line(name).replace("_", " ")
        yield _remark(f"{label}: {_plain_value(value)}")


_NOTES = {
    "dropped": "settings that the server rejected",
    "ignored": "settings that the server ignored",
}
"""Labels for notes of an episode whose names are unclear."""


def _score(record: Record, full: bool) -> Iterator[PageBlock]:
    score, failure = record.score, record.episode.failure
    status = score.status if score.scored else f"{score.status}: {score.reason}".rstrip(": ")
    head = _text(f"score {number(score.value)}", "bold")
    head.append(f"   {one_line(status)}", STYLES.get(score.status, "red"))
    if score.reward != score.value:
        why = f" ({one_line(score.reason)})" if score.scored and score.reason else ""
        head.append(f"   reward {number(score.reward)}{why}")
    yield PageBlock(head, 2)
    if record.gold:
        label = "person wrote" if score.reason == SAMPLED else "gold"
        yield PageBlock(_labelled(label, record.gold, full), 4)
    repeated = score.scored and any(verdict.said for verdict in score.verdicts)
    if score.words and (full or not repeated):
        yield PageBlock(_labelled("scored as" if score.scored else "why", score.words, full), 4)
    if failure and failure.detail and failure.detail != score.words:
        yield PageBlock(_labelled("why", failure.detail, full), 4)
    if score.metrics:
        metrics = (f"{one_line(name)} {number(value)}" for name, value in score.metrics.items())
        yield PageBlock(_text(" · ".join(metrics), "dim"), 4)


def _verdict(verdict: Verdict, full: bool) -> Iterator[PageBlock]:
    """The judge and question of a verdict, and one line per dimension."""
    act = "audited by" if verdict.purpose == _AUDIT else "judged by"
    which = "" if verdict.purpose in ("score", _AUDIT) else f" ({one_line(verdict.purpose)})"
    sample = f", sample {verdict.sample + 1}" if verdict.sample else ""
    replies = f", {verdict.replies} replies" if verdict.replies > 1 else ""
    quoting = f", {verdict.quoting} of them quote the actor" if verdict.quoting else ""
    who = f"{act} {one_line(verdict.judge)}{which}{sample}{replies}{quoting}"
    yield PageBlock(_text(who, "bold"), 2)
    if verdict.problem:
        yield PageBlock(_text(f"could not be read: {one_line(verdict.problem)}", "yellow"), 4)
    for name, value in verdict.said.items():
        yield PageBlock(_dimension(name, value, full), 4)


def _dimension(name: str, value: Any, full: bool) -> Text:
    """`goal 7: because …`: the grade, then its reason."""
    parts = value if isinstance(value, Mapping) else {name: value}
    # Long texts are reasons; labels have a word or two.
    words = {k: v for k, v in parts.items()
             if isinstance(v, str) and (k == "reasoning" or len(v.split()) > 3)}  # fmt: skip
    grades = {k: v for k, v in parts.items() if k not in words}
    grade = _plain_value(next(iter(grades.values())) if len(grades) == 1 else grades)
    made = _text(f"{one_line(name)} {grade}".strip())
    if words:
        text = fold(" ".join(words.values()), 0 if full else WORDS_OF_REASONING)
        made.append(f": {one_line(text)}", "dim")
    return made


def _feedback(feedback: Feedback, full: bool) -> Iterator[PageBlock]:
    kind = feedback.kind.replace("_", " ")
    about = f" on {', '.join(map(one_line, feedback.dimensions))}" if feedback.dimensions else ""
    yield _title(f"feedback ({kind}) by {one_line(feedback.author)}{about}")
    yield PageBlock(_text(_shown(feedback.text, full)), 2)
    if feedback.leak:
        use = "shown anyway" if feedback.usable else "not shown to the actor"
        yield PageBlock(_text(f"leaks ({one_line(feedback.leak)}): {use}", "yellow"), 2)
    else:
        yield PageBlock(_text("no leak found", "dim"), 2)
    if feedback.blind is not None:
        chance = "" if feedback.chance is None else f" (chance {number(feedback.chance)})"
        score = f"score from question and feedback alone {number(feedback.blind)}{chance}"
        yield PageBlock(_text(score, "dim"), 2)


# -- texts -----------------------------------------------------------------------------------------


def _title(words: str, kind: str = "") -> PageBlock:
    return PageBlock(_text(f"{words} ({kind})" if kind else words, "underline"), 0)


def _remark(words: str) -> PageBlock:
    return PageBlock(_text(words, "yellow"), 2)


def _labelled(label: str, text: str, full: bool, style: str = "bold") -> Text:
    made = _text(f"{one_line(label)}: ", style)
    made.append(_shown(text, full))
    return made


def _shown(text: str, full: bool) -> str:
    return sanitise(fold(text, 0 if full else WORDS)).strip() or "(empty)"


def _plain_value(value: Any) -> str:
    """A note or grade on one line: `story 120, memory 7`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{one_line(str(k))} {_plain_value(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain_value, value))
    return one_line(str(value))


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text.assemble((words, style))  # appended text keeps its own style
