"""Converts contexts to token ids with the model's chat template and the actor's sampled ids.

An assistant message with `token_ids` is never tokenised again: the template is rendered with a
marker in its place, the text between markers is tokenised, and the ids are inserted. Small test
conversations show whether a template strips reasoning or rejects a system message.

A tokenizer finds special tokens in any text: `<|eot_id|>` in a message would end it. Special tokens
are those that the tokenizer calls special, and added tokens that the template writes around a
message. In messages they are split with a space (`< |eot_id|>`), or, if that is not enough, their
first characters are replaced by STAND_IN.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from soulkit.errors import ModelLoadError
from soulkit.models.local.threads import trial
from soulkit.types import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


START_OF_THINKING, END_OF_THINKING = "<think>", "</think>"
THINKING = frozenset({START_OF_THINKING, END_OF_THINKING})
STAND_IN = "‹"

_SIGNS = 2
"""Maximum length of a token that may be a lone character, such as padding; seldom a turn."""


class Specials:
    """The special tokens of one tokenizer and chat template.

    `ids` contains the ids of all special tokens, including single characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, written: str, after: str) -> None:
        """`written`: a plain conversation as rendered by the template; `after`: its part from the
        end of an assistant's message."""
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
        # Normalisation may turn other characters, or a word of the vocabulary, into a special
        # token, and Python tokenizers may lower-case text: in these cases only ids are reliable.
        literal = getattr(tokenizer, "is_fast", False) and not _is_word(tokenizer, names)
        self._exact = literal and not any(t.normalized for t in added if t.content in names)
        first = "".join(sorted({n.strip()[0] for n in names if n.strip()}))
        tags = "|".join(THINKING)
        self._first = re.compile(f"(?!{tags})[{re.escape(first)}]" if first else "(?!)", re.I)

    def bend(self, text: str, *, thinks: bool = False) -> str:
        """`text` with a space inserted into each special token that it contains.

        `thinks`: keep reasoning tags, which the template looks for.
        """
        return (self._but_thinking if thinks else self._any).sub(_gap, text)

    def bend_turns(self, text: str) -> str:
        """Like `bend`, but only for turn tokens: a reply may contain tags that are special."""
        bent = self._turns.sub(_gap, text)
        return self.blunt(text) if self._turns.search(bent) else bent

    def blunt(self, text: str) -> str:
        """`text` with STAND_IN for each character that could begin a special token."""
        plain = text if self._exact else unicodedata.normalize("NFKC", text)
        return self._first.sub(STAND_IN, plain)

    def spelled(self, text: str) -> list[str] | list[int]:
        """The special tokens in `text`, in order: names, or ids if names are unreliable."""
        if self._exact:
            return self._any.findall(text)
        unknown = self._tokenizer.unk_token_id
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [i for i in ids if i in self.ids and i != unknown]


def _is_word(tokenizer: PreTrainedTokenizerBase, names: set[str]) -> bool:
    """Whether normalised words could become one of `names` without being an added token."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is None:
        return False
    cut = backend.pre_tokenizer
    try:
        for name in names:
            pieces = [n for n, _ in cut.pre_tokenize_str(name)] if cut else [name]
            if any(t.value in names for n in pieces for t in backend.model.tokenize(n)):
                return True
    except Exception:  # noqa: BLE001 - a vocabulary without an unknown token: assume yes
        return True
    return False


def _pattern(names: set[str]) -> re.Pattern[str]:
    ordered = sorted((n for n in names if n.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _gap(match: re.Match[str]) -> str:
    """The match with a space after its first character; a lone character is replaced."""
    name = match[0]
    at = len(name) - len(name.lstrip()) + 1
    return f"{name[:at]} {name[at:]}" if name[at:].strip() else STAND_IN


MARKER = "SPLICEdHEREx"
_TRIED: set[tuple[str, str]] = set()


def bare(context: Sequence[Segment]) -> tuple[Segment, ...]:
    """The conversation with all feedback removed, for training without feedback."""
    return tuple(s if s.bare is None else replace(s, text=s.bare, bare=None) for s in context)


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The default chat template. ModelLoadError if the tokenizer has none."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), None)
    if template:
        return str(template)
    raise ModelLoadError(
        f"The tokenizer of '{tokenizer.name_or_path}' has no chat template.",
        "The template defines how a conversation is written as tokens.",
        "Use the instruction-tuned version of the model, or put a chat_template.jinja into its "
        "folder.",
    )


class Renderer:
    """Converts contexts to prompt ids for one model.

    `thinking`: True or False asks the template for a turn with or without reasoning; None keeps the
    template's default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> None:
        self.template = template_text(tokenizer)
        self.tokenizer = tokenizer
        self.thinking = thinking
        # Model families read one option or the other; some need both to turn reasoning off.
        budget = {"thinking_budget": 0} if thinking is False else {}
        self._options: dict[str, Any] = (
            {} if thinking is None else {"enable_thinking": thinking, **budget}
        )
        probe = _probe(Segment("assistant", MARKER))
        key = self.template, tokenizer.name_or_path
        if key not in _TRIED and (why := trial(lambda: self._try(probe))):
            raise ModelLoadError(
                f"The chat template of '{tokenizer.name_or_path}' cannot be used: {why}.",
                "Three messages were written, tokenized and decoded in a process of its own.",
                "Use the model's original chat_template.jinja and tokenizer.json.",
            )
        _TRIED.add(key)

    def _try(self, probe: Sequence[Segment]) -> None:
        """Render `probe` in a child process. Jinja computes constants while compiling and leaves
        out those that fail, also for want of memory: here that is an error."""
        from jinja2 import nodes

        def refuse(error: Exception, *_: object) -> None:
            if isinstance(cause := sys.exc_info()[1], MemoryError):
                raise cause

        setattr(nodes.Impossible, "__init__", refuse)  # noqa: B010 - mypy allows no other form
        self.tokenizer.decode(self.prompt_ids(probe))

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]:
        """Ids of the whole context, ending with the header of the actor's next turn.

        ModelLoadError if the template rejects the conversation.
        """
        spliced = [s for s in context if s.role == "assistant" and s.token_ids]
        if not spliced:
            return self.tokenize(self.render(context))
        ids = [self.history_ids(s.token_ids) for s in spliced]
        first, *rest = self.joined(self.pieces(context)[0], ids)
        return [*first, *(i for turn in zip(ids, rest, strict=True) for part in turn for i in part)]

    def pieces(self, context: Sequence[Segment]) -> tuple[list[str], bool]:
        """The template's text before, between and after the messages with `token_ids`, and whether
        all messages in it are blunted (see `render`).

        `prompt_ids` joins the ids of the pieces with those of the messages; the last piece ends
        with the header of the actor's next turn. Raises as `prompt_ids` does.
        """
        base = _unused_marker(context)
        places = [i for i, s in enumerate(context) if s.role == "assistant" and s.token_ids]
        markers = {i: f"{base}{number:04d}" for number, i in enumerate(places)}
        marked = [replace(s, text=markers.get(i, s.text)) for i, s in enumerate(context)]
        text, blunted = self._safe(marked, True)
        return self._cut(text, list(markers.values())), blunted

    def opening(self) -> str:
        """The template's text before the first turn, if the actor speaks first."""
        context = [Segment("assistant", MARKER)]
        return self.render(context, reply=False).partition(MARKER)[0]

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]:
        """See `bare`."""
        return bare(context)

    def render(self, context: Sequence[Segment], *, reply: bool = True) -> str:
        """The conversation as text; `reply` adds the header of the next turn.

        Special tokens in a message are bent (see `Specials.bend`), since they would end the message
        and begin another one. If the template joins words into a special token that no message
        contains, all messages are blunted.
        """
        return self._safe(context, reply)[0]

    def _safe(self, context: Sequence[Segment], reply: bool) -> tuple[str, bool]:
        """(text of `render`, whether all messages are blunted)."""
        messages = _fold(context) if self.folds_system else list(context)
        bent = [
            replace(s, text=self.specials.bend(s.text, thinks=s.role == "assistant"))
            for s in messages
        ]
        blunt = [replace(s, text=self.specials.blunt(s.text)) for s in bent]
        text = self._render(bent, reply)
        if blunt == bent:
            return text, False
        safe = self._render(blunt, reply)
        spelled = self.specials.spelled
        return (text, False) if spelled(text) == spelled(safe) else (safe, True)

    @cached_property
    def specials(self) -> Specials:
        """The special tokens of tokenizer and template."""
        rules = [] if self.folds_system else [Segment("system", "rules")]
        text = self._render([*rules, *_probe(Segment("assistant", MARKER))], True)
        return Specials(self.tokenizer, text, text.partition(MARKER)[2])

    @property
    def reads_thinking(self) -> bool:
        """Whether the template has an option to turn reasoning on or off."""
        return "enable_thinking" in self.template or "thinking_budget" in self.template

    @cached_property
    def folds_system(self) -> bool:
        """Whether the template rejects or drops a system message."""
        probe = [Segment("system", MARKER), Segment("user", "a")]
        try:
            return MARKER not in self._render(probe, True)
        except ModelLoadError:
            return True

    @cached_property
    def strips_thinking(self) -> bool:
        """Whether the template removes the reasoning of earlier turns."""
        thought = f"{START_OF_THINKING}\n{MARKER}\n{END_OF_THINKING}\n\nyes"
        return MARKER not in self.render(_probe(Segment("assistant", thought)))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token right after a reply; None if there is none."""
        text = self.render(_probe(Segment("assistant", MARKER)))
        after = self.tokenize(text.partition(MARKER)[2])
        return after[0] if after and after[0] in self.specials.ids else None

    def _render(self, context: Sequence[Segment], reply: bool) -> str:
        messages = [{"role": s.role, "content": s.text} for s in context]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=reply, **self._options
                )
            )
        except MemoryError:
            raise
        except Exception as error:  # a template can raise anything
            raise _refused(self.tokenizer.name_or_path, str(error) or repr(error)) from error

    def tokenize(self, text: str) -> list[int]:
        """Ids of text written by the template."""
        # The template writes the special tokens itself, so none are added here.
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def joined(self, pieces: Sequence[str], emitted: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """Ids of `pieces`. An end-of-turn token that the previous reply already contains is not
        repeated."""
        ids = [self.tokenize(piece) for piece in pieces]
        for place, before in enumerate(emitted, 1):
            after = ids[place]
            if after and before and after[0] == before[-1] == self.end_of_turn:
                ids[place] = after[1:]
        return ids

    def _cut(self, text: str, markers: list[str]) -> list[str]:
        pieces: list[str] = []
        for marker in markers:
            head, separator, text = text.partition(marker)
            if not separator or marker in text:
                raise _refused(self.tokenizer.name_or_path, "an earlier reply is dropped or moved")
            pieces.append(head)
        return [*pieces, text]

    def history_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The sampled ids that stay in the history: all, or those after the reasoning."""
        return after_thinking(self.tokenizer, ids) if self.strips_thinking else ids


def after_thinking(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids after the last end of reasoning and its blank lines; all ids if there is none."""

    def text(upto: int) -> str:
        return str(tokenizer.decode(list(ids[:upto]), skip_special_tokens=False))

    closes = text(len(ids)).count(END_OF_THINKING)
    if not closes:
        return ids
    start = first_true(len(ids), lambda k: text(k).count(END_OF_THINKING) >= closes)
    while start < len(ids) and not str(tokenizer.decode([ids[start]])).strip():
        start += 1
    return ids[start:]


def first_true(n: int, holds: Callable[[int], bool]) -> int:
    """The smallest k in 0..n with `holds(k)`, which must be monotonic and true for n."""
    low, high = 0, n
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _probe(*turns: Segment) -> list[Segment]:
    first = Segment("user", "Say yes or no.")
    return [first, *turns, Segment("user", "And now?")] if turns else [first]


def _fold(context: Sequence[Segment]) -> list[Segment]:
    rules = [s.text for s in context if s.role == "system"]
    rest = [s for s in context if s.role != "system"]
    if not rules:
        return rest
    at = next((i for i, s in enumerate(rest) if s.role == "user"), None)
    if at is None:
        return [Segment("user", "\n\n".join(rules)), *rest]
    rest[at] = replace(rest[at], text="\n\n".join([*rules, rest[at].text]))
    return rest


def _unused_marker(context: Sequence[Segment]) -> str:
    marker = MARKER
    while any(marker in s.text for s in context):
        marker += "x"
    return marker


def _refused(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"The chat template of '{name}' rejects this conversation: {why}.",
        "Some templates only accept certain roles in a certain order.",
        "Use another model for this task, or edit the chat_template.jinja in the model's folder.",
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """First 16 hex digits of the SHA-256 of a tokenizer's rules.

    Equal hashes mean equal ids. Padding and truncation settings of the last batch are not included.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        rules: Any = sorted(tokenizer.get_vocab().items())
    else:
        whole = json.loads(fast.to_str())
        rules = {k: v for k, v in whole.items() if k not in ("padding", "truncation")}
    text = json.dumps(rules, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
