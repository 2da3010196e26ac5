"""Leak check: does feedback reveal the answer, or private information of another seat?

For a question with options, feedback leaks if it contains the gold text, names the gold letter, or
rules out so many options that only one, or at most half of them, remain. The draft's answer and
whole sentences that the actor has read do not count.

    red box, red bag (gold), blue jar, green tin: "Not the blue jar" passes, "think of the red one"
    leaks; when the draft said red box, "you said red box, but it is not the jar" passes.

In a dialogue, leaks are another seat's texts (`private_text`), words of the rubric (`rubric_words`)
and a human's reply in the actor's place (`gold_reference`), found by counting words. Each text is
also checked with look-alike characters replaced (obfuscation.py).
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from soulkit.judge.obfuscation import (
    CARDINALS,
    folded,
    letters_named,
    places_named,
    respelled,
    spelled_names,
)
from soulkit.judge.verdict import UNSPACED, named_options, plain, tagged_letter
from soulkit.metrics.intervals import upper_tail
from soulkit.models.base import Player
from soulkit.types import Call, Feedback, Segment

RUN = 5
"""Minimum length in words of a quotation from a private text …"""
REFERENCE_RUN = 6
"""… and from a reference, whose phrases a similar style shares …"""
NEW_IN_RUN = 2
"""… if at least this many of its words are content words that the public text does not contain."""
LONG_RUN = 8
"""Minimum length of a quotation whose words are all public: in "five points for a lamp, one for a
chair" the order is the secret."""
SENTENCE_WORDS = 3
SENTENCE_SHARE = 0.6
"""Minimum number and share of a private sentence's new content words for a leak. A text with fewer
new content words (a code word, a name), or one too short for a run, leaks if it is said whole."""
REFERENCE_GRAM = 3
REFERENCE_SHARE = 0.2
"""A reference leaks if at least two, and this share, of its three-word runs with new content
appear."""

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
    """The words of a text, case-folded, without punctuation; 1,500 is one word, equal to 1500."""
    return _TOKEN.findall(plain(_GROUPED.sub("", text)))


def tokens(text: str) -> list[str]:
    """The words of a text without common endings."""
    return [_ENDING.sub("", word) for word in words(text)]


def content(stems: Iterable[str]) -> set[str]:
    """The content words among stems from `tokens`, without function words."""
    return {word for word in stems if word not in _STEMS}


def echoes_private(text: str, private: str, public: str) -> bool:
    """Whether `text` quotes `private`, retells one of its sentences, contains all of a short one,
    or contains one of its numbers of two or more digits.

    `public` is text that the reader of `text` already knows.
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
    """Whether `text` quotes `reference` or contains many of its three-word runs."""
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
    """A text to compare many sentences with; its counts are cached."""

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
        """The content words of every sentence."""
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
    return _Material(tokens(text), text)


def _quotes(stems: Sequence[str], hidden: _Material, shown: _Material, length: int) -> bool:
    """Whether both share a run of `length` words that is not public and has new content words."""
    shared = (grams(stems, length) & hidden.runs(length)) - shown.runs(length)
    return any(len(content(run) - shown.vocabulary) >= NEW_IN_RUN for run in shared)


def figures(stems: Iterable[str]) -> set[str]:
    """The numbers of two or more digits, such as prices, dates or house numbers."""
    return {word for word in stems if len(word) > 1 and word.isdecimal()}


def grams(stems: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """Every run of `length` words."""
    return {tuple(stems[i : i + length]) for i in range(len(stems) - length + 1)}


def says_phrase(text: str, phrase: str) -> bool:
    """Whether `text` contains exactly the words of `phrase` in a row.

    A phrase in capitals must appear in capitals, because in lower case it may be an ordinary word.
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
    places = [i for i, word in enumerate(hidden) if content([word])]
    return hidden[places[0] : places[-1] + 1] if places else ()


def _tells(stems: Collection[str], new_stems: frozenset[str]) -> bool:
    shared = new_stems & set(stems)
    return len(shared) >= SENTENCE_WORDS and len(shared) >= SENTENCE_SHARE * len(new_stems)


SIGNIFICANCE = 0.05
MAX_CHARACTERS = 30_000
"""Longer feedback counts as a leak without a check."""
QUOTED_WORDS = 3
"""Minimum number of words other than options in a story sentence that may be quoted."""
_NUMBERED = re.compile(r"^\s*\d+[.):]?\s+")
_NO_ANSWER = re.compile(
    r"\byes or no\b|(?P<said>\b(?:say|said|answer|answered|choose|chose|pick|picked|or|than)\s+)?"
    r"\bno(?=\s+[a-z])", re.IGNORECASE,
)  # fmt: skip
_NUMBER_WORD = re.compile(
    rf"\b(?:{'|'.join(CARDINALS[1:])})\b(?=\s*(?:[.,;:!?)\"'”’]|\Z|(?:or|and|nor|is|was)\b))",
    re.IGNORECASE,
)
"""Matches `say four.`, not `four facts`; `one` is left out because it is too common."""
_OR_TWO = re.compile(r"\ban? \w+ or two\b", re.IGNORECASE)
"""`in a sentence or two` does not name a number."""
MAX_NAME_WORDS = 3
"""Options up to this length count as names: single words (`the red one`) can identify them."""


@dataclass(frozen=True, slots=True)
class LeakView:
    """The material that a blind reader may see, and the secrets that feedback must not reveal.

    Every part may be empty; only a view with options gets a blind read.
    """

    question: str = ""
    options: tuple[str, ...] = ()
    gold: str = ""
    letters: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    """Texts of other seats: the partner's goal, background, secret."""
    private_by_seat: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Acted seat → its private texts, if several seats read the same feedback. None of them may
    appear, because the other seats would read it."""
    rubric: tuple[str, ...] = ()
    """Words and phrases that only a judge's rubric uses."""
    reference: str = ""
    """The human's reply in the actor's place."""
    reference_parts: tuple[str, ...] = ()
    """The messages of `reference`, if there are several; each is checked separately."""
    public: str = ""
    """Text that the actor sees anyway (scenario, names, its own profile) and that may be repeated.
    The question is added automatically."""
    story: str = ""
    """Text that the actor reads in addition to question and options; whole sentences of it may be
    quoted."""
    drafted: tuple[str, ...] = ()
    """The wrong options that the draft answered."""
    shown: bool = False
    """Whether the actor sees its draft with the feedback, and so knows the draft's answer."""
    each: bool = False
    """Whether every option alone reveals a part of the answer (a name in a list, a word in a
    sentence), so that naming any of them is a leak."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """All texts that at least one reader of the feedback must not learn."""
        return (*self.private, *(t for texts in self.private_by_seat.values() for t in texts))

    @property
    def letter(self) -> str:
        """The gold option's letter; empty if it has none."""
        pairs = zip(self.letters, self.options, strict=False)
        return next((letter for letter, option in pairs if option == self.gold), "")

    @property
    def chance(self) -> float:
        """The chance of guessing right: 1 / number of different options."""
        return 1 / max(len(self.names()), 1)

    def of_draft(self, answer: str, story: str) -> LeakView:
        """The view for feedback on a draft that answered `answer` (letters if the options have
        them, else text); `story` is the text that the actor has read."""
        words = answer.upper().replace(",", " ").split()
        if words and set(words) <= set(self.letters):
            pairs = zip(self.letters, self.options, strict=False)
            named = {plain(option) for letter, option in pairs if letter in words}
        else:
            named = set(named_options(answer, self.options))
        drafted = tuple(o for o in self.options if plain(o) in named - {plain(self.gold)})
        return replace(self, story=story, drafted=drafted)

    def names(self) -> dict[str, set[str]]:
        """Plain option text → its letters."""
        letters_by_name: dict[str, set[str]] = {}
        for index, option in enumerate(self.options):
            letters_by_name.setdefault(plain(option), set()).update(self.letters[index : index + 1])
        return letters_by_name


def names_gold(text: str, view: LeakView) -> bool:
    """Whether `text` contains the gold answer, other than inside the name of another option."""
    return plain(view.gold) in named_options(text, (*view.options, view.gold))


def names_letter(text: str, letter: str) -> bool:
    """Whether `text` names an option letter: `option B`, `answer: b`, `(B)`, `<answer>B`, or `B`.

    The words `a` and `I` count only in positions where they can only be letters.
    """
    return bool(letter) and re.search(_letter_pattern(letter), text) is not None


def _letter_pattern(letter: str) -> str:
    upper, lower = letter.upper(), letter.lower()
    either = f"[{upper}{lower}]"
    spoken_of = r"|(?=\s+(?:is|was|are|or|and|nor|but|cannot|can't)\b)" if upper == "A" else ""
    after_word = r"(?=\s*(?:[.,;:!?)\]*\"'’]|\Z))" if upper in "AI" else r"\b"
    lead = r"\b(?i:option|answer|letter|choice|choose|pick)\b\W{0,3}(?:is\W{1,3})?"
    return "|".join(
        (
            rf"[(\[*`\"]{either}[)\]*`\".]",
            rf"(?i:<answer>)\s*{either}\b",
            rf"{lead}{upper}\b",
            rf"(?:{lead}|\b(?i:not|nor|neither|or|with|it's|it is)\s+){lower}{after_word}",
            rf"(?<![\w-]){upper}(?!\w|['’-]\w)(?:{after_word}{spoken_of})",
        )
    )


def left_open(text: str, view: LeakView) -> frozenset[str]:
    """The options that can still be the gold after reading `text` in the most revealing way."""
    names, gold = view.names(), plain(view.gold)
    mentioned = named_options(text, names) | spelled_names(text, names) | _pointed_at(text, view)
    mentioned |= {o for o, letters in names.items() if any(names_letter(text, x) for x in letters)}
    left = set(names)
    if gold in names:
        for side in (mentioned, *_hint_groups(text, view, names)):
            left &= set(side) if gold in side else set(names) - set(side)
    return frozenset(left)


def _gives_away(left: Collection[str], view: LeakView) -> bool:
    """Whether the options left open reveal the answer: only one, or at most half of the options
    that the draft did not answer (of all options, if the draft's answer is not mentioned)."""
    names = view.names()
    if view.each or len(names) < 2:
        return len(left) < len(names)
    if view.shown and len(left) < len(names):
        left = set(left) - set(map(plain, view.drafted))
    return len(left) == 1 or 2 * len(left) <= len(names) - len(_known(left, view))


def _known(left: Collection[str], view: LeakView) -> set[str]:
    return set(map(plain, view.drafted)) - set(left)


def _hint_groups(text: str, view: LeakView, names: Collection[str]) -> list[set[str]]:
    """Groups of options that a single word of `text` identifies, if the options are names.

    Words of the question and function words are ignored.
    """
    if any(len(name.split()) > MAX_NAME_WORDS for name in names):
        return []
    rest = plain(text)
    for name in sorted(named_options(text, names), key=len, reverse=True):
        rest = rest.replace(name, " ")
    words = content(_stems(rest)) - _stems(plain(view.question))
    return [{name for name in names if word in _stems(name)} for word in sorted(words)]


def _stems(words: str) -> set[str]:
    return {"".join(tokens(word)) for word in words.split()}


@lru_cache(maxsize=8)
def _pointed_at(text: str, view: LeakView) -> frozenset[str]:
    """The options that `text` names by their position, or by describing their letter."""
    options = [plain(option) for option in view.options]
    pointed = {options[place] for place in places_named(text, len(options))}
    letters = letters_named(text, view.options) if view.letters else frozenset()
    named = {name for name, spoken in view.names().items() if spoken & letters}
    return frozenset(pointed | named)


def above_chance(hits: int, reads: int, chance: float) -> bool:
    """Whether `hits` of `reads` is significantly above guessing (one-sided binomial test)."""
    tail = upper_tail(hits, reads, chance)
    return tail < SIGNIFICANCE


def check_leak(feedback: Feedback, view: LeakView | None) -> Feedback:
    """The feedback with `leak` set by rules (no model), and with `blind` and `chance` if the view
    has options. A leak that the task itself found, for example from the turns of the draft, stays.
    """
    if view is None:
        return feedback
    if len(feedback.text) > MAX_CHARACTERS:
        return replace(feedback, leak="too_long")
    leak, share, told = feedback.leak, view.chance, False
    for text, seen in _readings(feedback.text, view):
        bare = _as_answers(unquoted(text, seen), seen)
        leak = leak or _answer_leak(bare, seen) or _text_leak(text, seen)
        if seen.options:
            left = left_open(bare, seen)
            share, told = max(share, 1 / len(left)), told or _gives_away(left, seen)
    if not view.options:
        return replace(feedback, leak=leak)
    if not leak and told:
        leak = "answerable"
    return replace(feedback, leak=leak, blind=share, chance=view.chance)


def unquoted(text: str, view: LeakView) -> str:
    """`text` without whole sentences quoted from the story.

    A sentence that is part of an option, or has few words other than an option, is kept, because
    quoting it would reveal the answer.
    """
    if not view.story:
        return text
    rest = f" {plain(text)} "
    for sentence in _sentences(view.story):
        if sentence in rest and _is_quotable(sentence, view):
            rest = rest.replace(f" {sentence} ", " | ")
            pattern = r"[\W_]+".join(map(re.escape, sentence.split()))
            text = re.sub(rf"(?<!\w){pattern}(?!\w)", " | ", text, flags=re.IGNORECASE)
    return text


@lru_cache(maxsize=64)
def _sentences(story: str) -> tuple[str, ...]:
    """The plain sentences of a story without leading numbers, longest first."""
    parts = {plain(_NUMBERED.sub("", part)) for part in SENTENCE_END.split(story)}
    return tuple(sorted(parts - {""}, key=lambda part: (-len(part), part)))


def _is_quotable(sentence: str, view: LeakView) -> bool:
    options = {plain(option) for option in (*view.options, view.gold)} - {""}
    if any(sentence in option for option in options):
        return False
    rest = sentence
    for option in sorted(options, key=len, reverse=True):
        rest = rest.replace(option, " ")
    return len(tokens(rest)) >= QUOTED_WORDS


def _as_answers(text: str, view: LeakView) -> str:
    """`text` without option words that do not answer (`no reason`; `from 1 to 5` if that is the
    whole scale), and with number words as digits."""
    names = view.names()
    if "no" in names:
        text = _NO_ANSWER.sub(lambda no: no[0] if no["said"] else " | ", text)
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if not numbers or len(numbers) < len(names):
        return text
    low, high = numbers[0], numbers[-1]
    text = re.sub(
        rf"(?i)\b{low}\s*(?:to|and|through|[-–—])\s*{high}\b|\b{high}-point\b", " | ", text
    )
    text = _OR_TWO.sub(" | ", text)
    return _NUMBER_WORD.sub(lambda word: str(CARDINALS.index(word[0].lower()) + 1), text)


def _readings(text: str, view: LeakView) -> Iterator[tuple[str, LeakView]]:
    """(text, view) pairs: the text as written, with look-alikes replaced, and with spelled-out
    words joined.

    Look-alikes are not replaced if that would make different options equal.
    """
    yield text, view
    looks, looked_for = folded(text), _folded_view(view)
    if (looks, looked_for) != (text, view) and len(looked_for.names()) == len(view.names()):
        yield looks, looked_for
    hidden = view.secrets or view.rubric or view.reference
    joined = respelled(looks) if hidden else looks
    if joined != looks:
        yield joined, replace(looked_for, options=(), letters=(), gold="")


@lru_cache(maxsize=64)
def _folded_view(view: LeakView) -> LeakView:
    return replace(
        view,
        question=folded(view.question),
        options=tuple(map(folded, view.options)),
        gold=folded(view.gold),
        private=tuple(map(folded, view.secrets)),
        private_by_seat={},
        rubric=tuple(map(folded, view.rubric)),
        reference=folded(view.reference),
        reference_parts=tuple(map(folded, view.reference_parts)),
        public=folded(view.public),
        story=folded(view.story),
        drafted=tuple(map(folded, view.drafted)),
    )


def _answer_leak(text: str, view: LeakView) -> str:
    gold = plain(view.gold)
    if names_gold(text, view) or gold in spelled_names(text, {*view.names(), gold}):
        return "gold_text"
    if names_letter(text, view.letter):
        return "gold_letter"
    return "gold_place" if view.options and gold in _pointed_at(text, view) else ""


def _text_leak(text: str, view: LeakView) -> str:
    public = f"{view.question}\n{view.public}"
    if any(echoes_private(text, private, public) for private in view.secrets):
        return "private_text"
    if any(says_phrase(text, word) and not says_phrase(public, word) for word in view.rubric):
        return "rubric_words"
    # Skip short parts such as greetings and thanks.
    parts = (p for p in view.reference_parts if len(content(tokens(p))) >= SENTENCE_WORDS)
    echoed = any(echoes_reference(text, part, public) for part in (view.reference, *parts))
    return "gold_reference" if echoed else ""


def _blind_prompt(text: str, question: str, options: Sequence[str]) -> str:
    lettered = "\n".join(f"{chr(65 + i)}. {option}" for i, option in enumerate(options))
    return (
        "You cannot see the story that this question is about. Someone left a remark on it.\n\n"
        f"Question: {question}\n{lettered}\n\nRemark: {text}\n\n"
        "Pick the most likely option from the remark alone. Reply with its letter in <answer> tags."
    )


async def read_blind(
    feedback: Feedback, view: LeakView, reader: Player, calls: Sequence[Call]
) -> Feedback:
    """Let a model guess the answer from the feedback alone, once per call; the leak is `answerable`
    if it beats chance (binomial test).

    Options are shuffled for each read, so that a preference for one letter does not beat chance.
    Does nothing for a view without options. CallError if a read fails.
    """
    if not calls or not view.options:
        return feedback
    hits, text = 0, unquoted(feedback.text, view)
    told = _as_answers(text, view)
    for call in calls:
        hits += await _read_once(text, view, reader, call)
    known = _known(left_open(told, view), view)
    chance = 1 / max(len(view.names()) - len(known), 1)
    leak = feedback.leak or ("answerable" if above_chance(hits, len(calls), chance) else "")
    return replace(feedback, leak=leak, blind=hits / len(calls), chance=view.chance)


async def _read_once(text: str, view: LeakView, reader: Player, call: Call) -> bool:
    options = list(dict.fromkeys(view.options))
    random.Random(f"{call.example_id}/{call.rollout}/{call.step}/{call.sample}").shuffle(options)
    prompt = _blind_prompt(text, view.question, options)
    completion = await reader.complete((Segment("user", prompt),), call)
    letter, _ = tagged_letter(completion.text, "paper")
    index = ord(letter) - ord("A") if letter else -1
    return 0 <= index < len(options) and plain(options[index]) == plain(view.gold)
