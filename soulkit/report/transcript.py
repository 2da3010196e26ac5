"""Episodes in readable form: one episode in a terminal, and the parts that pages show, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from soulkit.metrics.intervals import number
from soulkit.runs.records import SAMPLED
from soulkit.text import one_line, sanitise
from soulkit.types import Feedback, Record, Verdict

if TYPE_CHECKING:
    from rich.text import Text


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
    yield from cuts(record)
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


def cuts(record: Record) -> Iterator[PageBlock]:
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
    yield PageBlock(_text(verdict_head(verdict), "bold"), 2)
    if verdict.problem:
        yield PageBlock(_text(f"could not be read: {one_line(verdict.problem)}", "yellow"), 4)
    for name, value in verdict.said.items():
        grade, words = dimension(name, value)
        line = _text(f"{one_line(name)} {grade}".strip())
        if words:
            line.append(f": {one_line(fold(words, 0 if full else WORDS_OF_REASONING))}", "dim")
        yield PageBlock(line, 4)


def verdict_head(verdict: Verdict) -> str:
    """Who judged what: `judged by NAME, sample 2, 2 replies`."""
    act = "audited by" if verdict.purpose == _AUDIT else "judged by"
    which = "" if verdict.purpose in ("score", _AUDIT) else f" ({one_line(verdict.purpose)})"
    sample = f", sample {verdict.sample + 1}" if verdict.sample else ""
    replies = f", {verdict.replies} replies" if verdict.replies > 1 else ""
    quoting = f", {verdict.quoting} of them quote the actor" if verdict.quoting else ""
    return f"{act} {one_line(verdict.judge)}{which}{sample}{replies}{quoting}"


def dimension(name: str, value: Any) -> tuple[str, str]:
    """A judge's grade of a dimension, and its reason."""
    parts = value if isinstance(value, Mapping) else {name: value}
    # Long texts are reasons; labels have a word or two.
    words = {k: v for k, v in parts.items()
             if isinstance(v, str) and (k == "reasoning" or len(v.split()) > 3)}  # fmt: skip
    grades = {k: v for k, v in parts.items() if k not in words}
    grade = _plain_value(next(iter(grades.values())) if len(grades) == 1 else grades)
    return grade, " ".join(words.values())


def _feedback(feedback: Feedback, full: bool) -> Iterator[PageBlock]:
    head, notes = feedback_notes(feedback)
    yield _title(head)
    yield PageBlock(_text(_shown(feedback.text, full)), 2)
    for i, note in enumerate(notes):
        yield PageBlock(_text(note, "yellow" if feedback.leak and not i else "dim"), 2)


def feedback_notes(feedback: Feedback) -> tuple[str, list[str]]:
    """The heading of feedback, and the results of its checks: leaks, a reader without the story."""
    kind = feedback.kind.replace("_", " ")
    about = f" on {', '.join(map(one_line, feedback.dimensions))}" if feedback.dimensions else ""
    notes = ["no leak found"]
    if feedback.leak:
        use = "shown anyway" if feedback.usable else "not shown to the actor"
        notes = [f"leaks ({one_line(feedback.leak)}): {use}"]
    if feedback.blind is not None:
        chance = "" if feedback.chance is None else f" (chance {number(feedback.chance)})"
        notes.append(f"score from question and feedback alone {number(feedback.blind)}{chance}")
    return f"feedback ({kind}) by {one_line(feedback.author)}{about}", notes


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
