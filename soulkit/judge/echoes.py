"""What a feedback repeats of a text that its reader must not know.

Pure word counting, a few thresholds, no judgement of meaning: a paraphrase passes, a quotation does
not. Words are compared in one case, without marks, and without the commonest English endings
(`sells` and `selling` are `sell`); scripts that write without blanks are compared by character.
What the reader sees anyway never counts: a run that stands in the public text is no echo of a
private one, and neither names nor words of the scenario make one.

Example: where the public text says that Ana and Ben haggle over a lamp, and Ben's goal is "Pay no
more than 40 dollars, as rent is due on Friday", the remark "ask Ben about the lamp" echoes nothing,
"the rent is due on Friday" repeats a run, "Friday his rent is due" a sentence, and "ask for 40" a
figure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from soulkit.judge.verdict import UNSPACED, plain

RUN = 5
"""So many words in a row, as they stand in a private text, are a quotation …"""
REFERENCE_RUN = 6
"""… and so many of a reference: whoever learns to write like it shares its turns of phrase."""
NEW_IN_RUN = 2
"""… if so many of them are words of content that the public text does not hold."""
LONG_RUN = 8
"""So many in a row are a quotation even when each of them is known: in "five points for a lamp, one
for a chair" the order is the secret."""
SENTENCE_WORDS = 3
SENTENCE_SHARE = 0.6
"""A private sentence is told when so many of its new words of content are said, as a count and as a
share of all that it has. A text with fewer new words of content (a code word, a name), or one too
short for a run, is told when it is said whole."""
REFERENCE_GRAM = 3
REFERENCE_SHARE = 0.2
"""A reference is handed over when at least two, and this share, of its three-word runs with new
content are said."""

_TOKEN = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
_GROUPED = re.compile(r"[,.'\u2019\u00a0\u202f](?<=\d.)(?=\d{3}(?!\d))")
SENTENCE_END = re.compile(r"(?<=[.!?;\u3002\uff01\uff1f])\s*|\n+")
_ENDING = re.compile(r"(?<=\w{3})(?:ing|ed|es|s|e)$")
_FUNCTION = """
a about after again all also am an and any are as at be because been before being both but by
can cannot could did do does doing down during each either else ever every few for from get had
has have having he her here hers herself him himself his how i if in into is it its itself just
know least let like made make many may me might mine more most much must my myself need neither
no nor not now of off on once one only onto or other our ours out over own per rather really
said same say shall she should since so some something such tell than that the their theirs them
themselves then there these they thing things this those though through to too toward try under
until up upon us very want was we well were what when where whether which while who whom whose
why will with within without would yet you your yours yourself
"""
_STEMS = frozenset(_ENDING.sub("", word) for word in _FUNCTION.split())


def words(text: str) -> list[str]:
    """The words of a text in one case, without marks; 1,500 is one word, and the same as 1500."""
    return _TOKEN.findall(plain(_GROUPED.sub("", text)))


def tokens(text: str) -> list[str]:
    """The words of a text without their common endings."""
    return [_ENDING.sub("", word) for word in words(text)]


def content(stems: Iterable[str]) -> set[str]:
    """Of words as `tokens` gives them, those that are no function words."""
    return {word for word in stems if word not in _STEMS}


def echoes_private(text: str, private: str, public: str) -> bool:
    """Whether `text` quotes `private`, tells one of its sentences, says all of a short one, or
    names one of its figures of two digits or more.

    `public` is what the reader of `text` knows anyway.
    """
    stems, hidden, shown = tokens(text), _material(private), _material(public)
    if hidden.figures & figures(stems) - shown.figures:
        return True
    if grams(stems, LONG_RUN) & hidden.runs(LONG_RUN) - shown.runs(LONG_RUN):
        return True
    if _is_short(hidden, shown, RUN):
        return _says_whole(stems, hidden, shown)
    if _quotes(stems, hidden, shown, RUN):
        return True
    new = content(stems) - shown.vocabulary
    return any(_tells(new, sentence - shown.vocabulary) for sentence in hidden.sentences)


def echoes_reference(text: str, reference: str, public: str) -> bool:
    """Whether `text` quotes `reference` or hands over a good part of its three-word runs."""
    stems, gold, shown = tokens(text), _material(reference), _material(public)
    if _is_short(gold, shown, REFERENCE_GRAM + 1):
        return _says_whole(stems, gold, shown)
    if _quotes(stems, gold, shown, REFERENCE_RUN):
        return True
    new = content(gold.stems) - shown.vocabulary
    new_grams = {g for g in gold.runs(REFERENCE_GRAM) if new & set(g)}
    shared = new_grams & grams(stems, REFERENCE_GRAM)
    return len(shared) >= 2 and len(shared) >= REFERENCE_SHARE * len(new_grams)


@dataclass(frozen=True, eq=False)
class _Material:
    """A text that many sentences are held against; what is counted of it is counted once."""

    stems: Sequence[str]
    text: str

    @cached_property
    def vocabulary(self) -> frozenset[str]:
        return frozenset(self.stems)

    @cached_property
    def figures(self) -> frozenset[str]:
        return frozenset(figures(self.stems))

    @cached_property
    def sentences(self) -> tuple[frozenset[str], ...]:
        """The words of content of every sentence."""
        return tuple(frozenset(content(tokens(part))) for part in SENTENCE_END.split(self.text))

    @cached_property
    def _runs(self) -> dict[int, frozenset[tuple[str, ...]]]:
        return {}

    def runs(self, length: int) -> frozenset[tuple[str, ...]]:
        """Every run of `length` words."""
        if length not in self._runs:
            self._runs[length] = frozenset(grams(self.stems, length))
        return self._runs[length]


@lru_cache(maxsize=8)
def _material(text: str) -> _Material:
    """A judge's remark of a hundred sentences would else have the whole row counted for each."""
    return _Material(tokens(text), text)


def _quotes(stems: Sequence[str], hidden: _Material, shown: _Material, length: int) -> bool:
    """Whether both share a run of `length` words that is not public and says something new."""
    shared = (grams(stems, length) & hidden.runs(length)) - shown.runs(length)
    return any(len(content(run) - shown.vocabulary) >= NEW_IN_RUN for run in shared)


def figures(stems: Iterable[str]) -> set[str]:
    """The numbers of two digits or more: a price, a date, a house number."""
    return {word for word in stems if len(word) > 1 and word.isdecimal()}


def grams(stems: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words."""
    return {tuple(stems[i : i + length]) for i in range(len(stems) - length + 1)}


def says_phrase(text: str, phrase: str) -> bool:
    """Whether the very words of `phrase` stand in `text`, in a row, endings included.

    A label in capitals must be in capitals: the same word otherwise belongs to ordinary talk.
    """
    if phrase.isupper() and phrase not in text:
        return False
    phrase_words = tuple(words(phrase))
    return bool(phrase_words) and phrase_words in grams(words(text), len(phrase_words))


def _is_short(hidden: _Material, shown: _Material, run: int) -> bool:
    return len(hidden.stems) < run or len(content(hidden.stems) - shown.vocabulary) < SENTENCE_WORDS


def _says_whole(stems: Sequence[str], hidden: _Material, shown: _Material) -> bool:
    core = tuple(_content_core(hidden.stems))
    return bool(content(core) - shown.vocabulary) and core in grams(stems, len(core))


def _content_core(hidden: Sequence[str]) -> Sequence[str]:
    """Without the function words at both ends."""
    places = [i for i, word in enumerate(hidden) if content([word])]
    return hidden[places[0] : places[-1] + 1] if places else ()


def _tells(stems: Collection[str], new_stems: frozenset[str]) -> bool:
    shared = new_stems & set(stems)
    return len(shared) >= SENTENCE_WORDS and len(shared) >= SENTENCE_SHARE * len(new_stems)
