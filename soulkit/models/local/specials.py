"""Special tokens that stand as words in what somebody says, and how such words are made harmless.

A tokenizer finds its added tokens in any text. Whoever writes `<|eot_id|>` into a message would end
it and begin another one that nobody said. Which tokens count: every one that the tokenizer calls
special, wherever it says so (`special_tokens_map`, `tokenizer_config`, or only the `added_tokens`
of `tokenizer.json`, as with Llama 3 and Gemma 3), and every added token that the chat template
itself writes around a message, flagged or not. Not among them: the tags of thinking where they
are not flagged, which templates and readers look for; white space, without which nobody could
write; and signs of one or two characters, unless the template ends a turn with them.

Words are bent (`<|eot_id|>` becomes `< |eot_id|>`), or, where that is not enough, blunted: every
sign that could begin such a token is exchanged for STAND_IN.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_OF_THINKING, END_OF_THINKING = "<think>", "</think>"
THINKING = frozenset({START_OF_THINKING, END_OF_THINKING})
STAND_IN = "‹"

_SIGNS = 2
"""Longest token that is a lone sign: perhaps somebody's padding, seldom a turn."""


class Specials:
    """The special tokens of one tokenizer under one chat template.

    `ids` are those of all of them, lone signs included.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, written: str, after: str) -> None:
        """`written`: a plain conversation as the template writes it; `after`: that from the end of
        an assistant's words on."""
        self._tokenizer = tokenizer
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).values())
        flagged = {token.content for token in added if token.special}
        flagged |= {str(token) for token in tokenizer.all_special_tokens}
        marks = {token.content for token in added if token.content in written}
        marks = {n for n in marks if n.strip()} - THINKING
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(flagged | marks)))
        names = {n for n in flagged | marks if len(n) > _SIGNS or after.startswith(n)}
        self._any, self._but_thinking = _pattern(names), _pattern(names - THINKING)
        self._turns = _pattern(names & (marks | {str(tokenizer.eos_token)}))
        # A text may spell a normalized token in other characters, one that is a word of the
        # vocabulary as well may come of them, and tokenizers in Python may lower what they read:
        # there only the ids tell.
        literal = getattr(tokenizer, "is_fast", False) and not _is_word(tokenizer, names)
        self._exact = literal and not any(t.normalized for t in added if t.content in names)
        first = "".join(sorted({n.strip()[0] for n in names if n.strip()}))
        tags = "|".join(THINKING)
        self._first = re.compile(f"(?!{tags})[{re.escape(first)}]" if first else "(?!)", re.I)

    def bend(self, text: str, *, thinks: bool = False) -> str:
        """`text` with a gap in everything that spells a special token.

        `thinks`: tags of thinking stay, since the template looks for them.
        """
        return (self._but_thinking if thinks else self._any).sub(_gap, text)

    def bend_turns(self, text: str) -> str:
        """Like `bend`, for the tokens of turns alone: a reply may hold tags that are special."""
        bent = self._turns.sub(_gap, text)
        return self.blunt(text) if self._turns.search(bent) else bent

    def blunt(self, text: str) -> str:
        """`text` without any sign that could begin a special token."""
        plain = text if self._exact else unicodedata.normalize("NFKC", text)
        return self._first.sub(STAND_IN, plain)

    def spelled(self, text: str) -> list[str] | list[int]:
        """The special tokens in `text`, in order: names, or ids where names do not tell."""
        if self._exact:
            return self._any.findall(text)
        unknown = self._tokenizer.unk_token_id
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [i for i in ids if i in self.ids and i != unknown]


def _is_word(tokenizer: PreTrainedTokenizerBase, names: set[str]) -> bool:
    """Whether normalized words could become one of `names` without being an added token."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is None:
        return False
    cut = backend.pre_tokenizer
    try:
        for name in names:
            pieces = [n for n, _ in cut.pre_tokenize_str(name)] if cut else [name]
            if any(t.value in names for n in pieces for t in backend.model.tokenize(n)):
                return True
    except Exception:  # noqa: BLE001 - a vocabulary without an unknown word says nothing
        return True
    return False


def _pattern(names: set[str]) -> re.Pattern[str]:
    """Matches any of `names`, the longest first; white space is not among them."""
    ordered = sorted((n for n in names if n.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _gap(match: re.Match[str]) -> str:
    """The match with a space after its first sign; a lone sign is exchanged."""
    name = match[0]
    at = len(name) - len(name.lstrip()) + 1
    return f"{name[:at]} {name[at:]}" if name[at:].strip() else STAND_IN
