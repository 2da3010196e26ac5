"""Read answers in model replies, and quote model text safely in other prompts.

Reading depends on the protocol. `reference` reproduces the published parsers with their quirks:
only closed thinking is removed, and the first tag counts. `paper` fixes them: unclosed and orphaned
thinking is removed too, and the last tag counts, so that a model may correct itself.

Quoted text is put between two marks that it cannot contain, because they include its hash.

    <transcript 9f2c41d07b3e>
    Ana: “Would you take forty?”
    </transcript 9f2c41d07b3e>
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from types import MappingProxyType

from soulkit.errors import UnreadableVerdict
from soulkit.text import normalised, one_line, sanitise, words_only
from soulkit.types import Episode, Line, Protocol

_KINDS: tuple[str, ...] = ("think", "seed:think")
_UNCLOSED = re.compile(r"<(?:seed:)?think>.*\Z", re.DOTALL)
_ANY_ORPHAN = re.compile(r"\A.*</(?:seed:)?think>", re.DOTALL | re.IGNORECASE)
_ANY_UNCLOSED = re.compile(_UNCLOSED.pattern, re.DOTALL | re.IGNORECASE)

_ANY_MARK = re.compile(r"<(/?)(?:seed:)?think>", re.IGNORECASE)
_JUDGES_KINDS = (*_KINDS, "thinking", "thought", "reasoning")
_LEADING = re.compile(rf"(?:\ufeff|assistant:?\s)?\s*<({'|'.join(_JUDGES_KINDS)})>", re.IGNORECASE)
_ENDINGS = {kind: re.compile(f"</{kind}>", re.IGNORECASE) for kind in _JUDGES_KINDS}

_OPEN_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSE_TAG = re.compile(r"</answer>", re.IGNORECASE)
_LETTER = re.compile(r"<answer>\s*([A-Z])\s*</answer>", re.IGNORECASE)

# Scripts that write words without spaces, or attach particles: they have no word boundaries.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_OPEN, _CLOSE = r"(\[\u3010\u3014\u300c\u300e", r")\].:\u3011\u3015\u300d\u300f\u3002"
_LOOSE_LETTER = re.compile(
    # An enumeration comma may end the letter, but not between two letters.
    rf"[{_OPEN}]?\s*([A-Za-z])\s*(?:(?:[{_CLOSE}]+|\u3001(?!\s*[A-Za-z]\b))(?:[\s{UNSPACED}].*)?)?",
    re.DOTALL,
)
_NO_LETTERS = str.maketrans("\u212a\u017f", "\ufffd\ufffd")
"""The Kelvin sign and the long s would be folded to letters, but are never option letters."""
_LONGEST_ANSWER = 50_000
"""Maximum characters of an answer that are read; limits the time to parse a broken reply."""
_AROUND = "*`\"' \u201c\u201d\u2018\u2019"


def remove_think(text: str, remove_unclosed: bool = False) -> str:
    """`text` without closed `<think>` and `<seed:think>` blocks (optionally also unclosed ones),
    stripped."""
    text = _without_blocks(text, re.RegexFlag(0))
    if remove_unclosed:
        text = _UNCLOSED.sub("", text)
    return text.strip()


def _without_blocks(text: str, flags: re.RegexFlag) -> str:
    """`text` without closed blocks.

    A kind of block without a closing tag is searched only once, to keep the time linear.
    """
    parts: list[str] = []
    place, kinds = 0, _KINDS
    opening = _opening(kinds, flags).search(text)
    while opening is not None:
        kind, after = opening[0][1:-1].lower(), opening.end()
        closing = re.compile(f"</{kind}>", flags).search(text, after)
        if closing is None:
            kinds = tuple(other for other in kinds if other != kind)
        else:
            parts.append(text[place : opening.start()])
            place = after = closing.end()
        opening = _opening(kinds, flags).search(text, after) if kinds else None
    return "".join([*parts, text[place:]])


@cache
def _opening(kinds: tuple[str, ...], flags: re.RegexFlag) -> re.Pattern[str]:
    return re.compile("|".join(f"<{kind}>" for kind in kinds), flags)


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking without an opening tag, answer) of a judge's reply.

    Thinking comes before the answer, in closed blocks or up to a single closing tag. A tag in any
    other place is ambiguous, because it may be a quotation: UnreadableVerdict.
    """
    place, before = after_blocks(text), ""
    marks = list(islice(_ANY_MARK.finditer(text, place), 2))
    if marks and (place or len(marks) > 1 or not marks[0][1]):
        raise UnreadableVerdict("its thinking cannot be told from its answer")
    if marks:
        before, place = text[: marks[0].start()], marks[0].end()
    return before.strip(), text[place:].strip()


def after_blocks(text: str) -> int:
    """The end of the closed thinking blocks at the start of `text`; 0 if there are none."""
    place = 0
    while (block := _LEADING.match(text, place)) is not None:
        closing = _ENDINGS[block[1].lower()].search(text, block.end())
        if closing is None:
            break
        place = closing.end()
    return place


def spoken(text: str, protocol: Protocol) -> str:
    """A completion without its thinking."""
    if protocol == "reference":
        return remove_think(text)
    text = _without_blocks(text, re.IGNORECASE)
    return _ANY_UNCLOSED.sub("", _ANY_ORPHAN.sub("", text)).strip()


def tagged_text(text: str, protocol: Protocol) -> str | None:
    """The text of the `<answer>` tag that counts; None if there is none."""
    answer = spoken(text, protocol)
    if protocol == "reference":
        start = _OPEN_TAG.search(answer)
        end = _CLOSE_TAG.search(answer, start.end()) if start else None
        return answer[start.end() : end.start()].strip() if start and end else None
    parts = (_CLOSE_TAG.split(part, 1) for part in _OPEN_TAG.split(answer)[1:])
    closed = [part[0] for part in parts if len(part) > 1]
    return closed[-1][:_LONGEST_ANSWER].strip() if closed else None


def tagged_letter(text: str, protocol: Protocol) -> tuple[str, str]:
    """(upper-case letter or "", status): `B`; under `paper` also `B.`, `(B)` and `B. some text`.

    `paper` also accepts full-width characters and brackets of other scripts.

    The status is `ok`, `no_tag`, or (`paper` only) `salvaged` for a letter with text around it and
    `malformed` for anything else.
    """
    if protocol == "reference":
        match = _LETTER.search(spoken(text, protocol))
        return (match.group(1).upper(), "ok") if match else ("", "no_tag")
    inside = tagged_text(text, protocol)
    if inside is None:
        return "", "no_tag"
    folded = normalised(inside.translate(_NO_LETTERS))
    letter = _LOOSE_LETTER.fullmatch(folded.strip(_AROUND))
    if not letter:
        return "", "malformed"
    bare = inside.upper() == letter.group(1).upper()
    return letter.group(1).upper(), "ok" if bare else "salvaged"


def has_word(text: str, word: str) -> bool:
    """Whether `text` contains `word` as a whole word, ignoring case."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def plain(text: str) -> str:
    """Case-folded words only: `Red_Box.`, `red  box` and `**red-box**` all become `red box`."""
    return words_only(normalised(text).casefold())


def named_options(text: str, options: Iterable[str]) -> frozenset[str]:
    """The options that `text` names, in their `plain` form.

    Longer options are matched first and their words are used up: `treasure box` does not name
    `box`."""
    rest, names = plain(text), set()
    for option in sorted({plain(o) for o in options} - {""}, key=lambda o: (-len(o), o)):
        if option not in rest:
            continue  # avoids compiling a pattern for most options
        rest, times = _phrase_pattern(option).subn(" | ", rest)
        if times:
            names.add(option)
    return frozenset(names)


def _phrase_pattern(phrase: str) -> re.Pattern[str]:
    joined = rf"[^\W{UNSPACED}]"
    return re.compile(rf"(?<!{joined}){re.escape(phrase)}(?!{joined})")


# -- model text in other prompts -------------------------------------------------------------------

MAX_FENCED_CHARS = 60_000
"""Maximum characters of a fenced text; about 15,000 tokens."""
_MARK = re.compile(r"<(?=(?:\s*/\s*)?[A-Za-z][\w-]*(?:\s[^<>]{0,80})?/?>)")


def fence(text: str, label: str) -> str:
    """`text` between an opening and a closing mark with the name `label`."""
    clean = _MARK.sub("\u2039", shortened(sanitise(text), MAX_FENCED_CHARS))
    digest = hashlib.sha256(clean.encode("utf-8", "replace")).hexdigest()[:12]
    return f"<{label} {digest}>\n{clean}\n</{label} {digest}>"


def utterance(text: str) -> str:
    """Speech on one line with replaced quotation marks, so that it cannot end its own line in a
    transcript or fake another one."""
    return one_line(text).replace('"', "\u201d")


def shortened(text: str, max_chars: int) -> str:
    """`text`, or if it is too long, its beginning and end with a note between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


NO_LABELS: Mapping[str, str] = MappingProxyType({})


def transcript(
    lines: Iterable[Line], labels: Mapping[str, str] = NO_LABELS, mark: str = "transcript"
) -> str:
    """The lines of a conversation between two marks with the name `mark`.

    `labels` maps seats to display names (default: the seat's name). Line breaks and quotation marks
    are removed from labels, which are not quoted.
    """
    return fence("\n".join(_quoted(line, labels) for line in lines), mark)


def utterances(episode: Episode) -> list[str]:
    """The public lines of the acted seats, in order."""
    seats = {trace.seat for trace in episode.traces}
    return [line.text for line in episode.transcript if line.seat in seats]


def _quoted(line: Line, labels: Mapping[str, str]) -> str:
    label = one_line(labels.get(line.seat, line.seat)).translate(_NO_MARKS)
    return f"{label}: \u201c{utterance(line.text).translate(_BENT)}\u201d"


_NO_MARKS = dict.fromkeys(map(ord, '"\u201c\u201d\u201e\u201f\uff02'))
_BENT = str.maketrans("\u201c\u201d\u201e\u201f\uff02", "\u2018\u2019\u2018\u2018\u2019")
