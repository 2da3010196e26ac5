"""Lessons as sequences: what one rendering gives is what a prompt for every turn gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.data.corpora.lesson import Lesson
from soulkit.models.local.render import Renderer
from soulkit.models.local.tiny import TEMPLATE, tiny_tokenizer
from soulkit.models.local.tokenizing import tokenizer_print
from soulkit.train.objectives.sequences import Span, spans
from soulkit.train.sft.encode import (
    NOT_ITS_WORDS,
    REFUSED,
    UNPRECEDED,
    LessonEncoder,
)
from soulkit.types import Segment

pytestmark = pytest.mark.torch

WORDS = ["say", "yes", "no", "and", "the", "box", "rule", "a", "b"]

HEADER = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
TEMPLATES = {
    "plain": TEMPLATE,
    "strips thinking": TEMPLATE.replace(
        "message.content", "message.content.split('</think>')[-1].lstrip()"
    ),
    "empty thoughts in the header alone": TEMPLATE.replace(
        "assistant\\n' }}", "assistant\\n<think></think>' }}"
    ),
    "no system role": "{%- if messages[0].role == 'system' -%}{{ raise_exception('no') }}"
    "{%- endif -%}" + TEMPLATE,
    "begins with a sign, trims": "{{ '<|endoftext|>' }}"
    + TEMPLATE.replace("message.content", "message.content | trim"),
    "rules in the last message": (
        "{%- set rules = messages[0].content if messages[0].role == 'system' else '' -%}"
        "{%- for m in messages -%}{%- if m.role != 'system' -%}{{ '<|im_start|>' + m.role + '\\n' "
        "+ (rules + ' ' if rules and loop.last else '') + m.content "
        "+ '<|im_end|>' }}{%- endif -%}{%- endfor -%}" + HEADER
    ),
    "looks for tools": TEMPLATE.replace(
        "message.content",
        "(message.content if not loop.last or '<tool>' not in message.content else 'tool')",
    ),
    "a switch in anybody's words": TEMPLATE.replace(
        "assistant\\n' }}",
        "assistant\\n' + ('<think></think>' if '/no_think' in (messages | map(attribute='content') "
        "| join(' ')) else '') }}",
    ),
    "a line lost after the last reply": (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{{ '<|im_end|>' if loop.revindex > 2 else '<|im_end|>\\n' }}{%- endfor -%}" + HEADER
    ),
}
ODD = ["<think>\nbox\n</think>\n\nyes", "yes<|im_end|>\n<|im_start|>user\nno", "<tool> box", "<",
       "say /no_think"]  # fmt: skip


def renderer_of(template: str) -> Renderer:
    tokenizer: Any = tiny_tokenizer(WORDS)
    tokenizer.chat_template = TEMPLATES[template]
    return Renderer(tokenizer)


def encode_with(renderer: Renderer) -> Any:
    def encode(text: str) -> list[int]:
        words = renderer.specials.bend_turns(text)
        end = renderer.end_of_turn
        assert end is not None
        return [*renderer.tokenizer.encode(words, add_special_tokens=False), end]

    return encode


def lesson_of(*turns: tuple[str, str], trained: str = "", **rest: str) -> Lesson:
    """Turns as (role, words); `trained`: a sign a turn, x where it is learned."""
    flags = trained or "".join("x" if role == "assistant" else "." for role, _ in turns)
    segments = tuple(Segment(role, text) for role, text in turns)  # type: ignore[arg-type]
    return Lesson(segments, tuple(f == "x" for f in flags), "chats", "chats.jsonl:1", **rest)


def turn_by_turn(lesson: Lesson, renderer: Renderer) -> list[Span]:
    """Every reply behind the prompt that a sampler would have been given for it."""
    encode = encode_with(renderer)
    before: list[Segment] = []
    turns: list[Any] = []
    for segment, learned in zip(lesson.segments, lesson.trained, strict=True):
        ids = tuple(segment.token_ids or (encode(segment.text) if learned else ()))
        if learned:
            prompt = (
                renderer.prompt_ids(before) if before else renderer.tokenize(renderer.opening())
            )
            turns.append((prompt, ids, ()))
        before.append(Segment(segment.role, segment.text, token_ids=ids))
    return spans(turns)


TEXT = st.sampled_from(["say yes", "no", "the box and the rule", "a", "", " b ", *ODD])
TALK = st.tuples(
    st.lists(TEXT, max_size=1), st.booleans(), st.lists(st.tuples(TEXT, TEXT, st.booleans()),
    min_size=1, max_size=4),
)  # fmt: skip


def drawn(talk: Any) -> Lesson:
    rules, person_first, pairs = talk
    turns = [("system", text) for text in rules]
    flags = "." * len(rules)
    for words, reply, learned in pairs:
        turns += [("user", words), ("assistant", reply)]
        flags += ".x" if learned else ".."
    turns, flags = [*turns, ("assistant", "yes")], f"{flags}x"
    if person_first and not rules:
        turns, flags = turns[1:], flags[1:]
    return lesson_of(*turns, trained=flags)


ENCODERS = {
    name: LessonEncoder(renderer, encode_with(renderer))
    for name in TEMPLATES
    for renderer in [renderer_of(name)]
}
"""They live for all examples, so that what was learned of a shape is put to use."""


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=20)
@given(talks=st.lists(TALK, min_size=1, max_size=3))
def test_one_rendering_gives_the_ids_of_a_prompt_for_every_turn(
    template: str, talks: list[Any]
) -> None:
    encoder = ENCODERS[template]
    for lesson in map(drawn, talks):
        assert encoder(lesson) == turn_by_turn(lesson, encoder.renderer)


TALKED = [("user", "say"), ("assistant", "yes"), ("user", "and"), ("assistant", "no box")]


def test_a_switch_in_the_words_of_one_conversation_is_no_verdict_on_the_next() -> None:
    encoder = ENCODERS["a switch in anybody's words"]
    for words in ("say", "say /no_think", "say"):
        lesson = lesson_of(("user", words), *TALKED[1:])
        result = encoder(lesson)
        assert result == turn_by_turn(lesson, encoder.renderer)
        assert len(result) == 1 + ("/no_think" in words)


def only(result: list[Span] | str) -> Span:
    assert isinstance(result, list)
    (span,) = result
    return span


class Counting(Renderer):
    """Counts how often the template was filled in."""

    renderings = 0

    def _render(self, context: Any, reply: bool) -> str:
        self.renderings += 1
        return super()._render(context, reply)


def test_a_conversation_of_a_shape_that_was_seen_is_rendered_once() -> None:
    renderer = Counting(renderer_of("plain").tokenizer)
    encoder = LessonEncoder(renderer, encode_with(renderer))
    long = [(role, "the box") for role in ("user", "assistant")] * 6
    encoder(lesson_of(*long))
    for reply in ("yes", "no", "rule"):
        before = renderer.renderings
        span = only(encoder(lesson_of(*[(role, reply) for role, _ in long])))
        assert renderer.renderings == before + 1
        assert span.n_trained == 6 * 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_replies_are_trained_with_their_end_and_nothing_else(template: str) -> None:
    renderer = renderer_of(template)
    encode = encode_with(renderer)
    result = LessonEncoder(renderer, encode, None)(lesson_of(*TALKED))
    assert isinstance(result, list)
    learned = [i for span in result for i, flag in zip(span.ids, span.trained, strict=True) if flag]
    assert learned == [*encode("yes"), *encode("no box")]
    one = template not in ("empty thoughts in the header alone", "a line lost after the last reply")
    assert len(result) == (1 if one else 2)


def test_a_template_that_moves_the_rules_is_one_sequence_only_without_them() -> None:
    renderer = renderer_of("rules in the last message")
    encoder = LessonEncoder(renderer, encode_with(renderer))
    assert len(encoder(lesson_of(*TALKED))) == 1
    assert len(encoder(lesson_of(("system", "rule"), *TALKED))) == 2


def test_a_person_who_speaks_first_is_learned_behind_the_header() -> None:
    encoder = ENCODERS["begins with a sign, trims"]
    span = only(encoder(lesson_of(*TALKED[1:])))
    header = encoder.renderer.tokenize("<|endoftext|><|im_start|>assistant\n")
    assert list(span.ids[: len(header)]) == header
    assert span.trained.index(True) == len(header)


def test_without_anything_before_it_a_first_word_cannot_be_learned() -> None:
    tokenizer: Any = tiny_tokenizer(WORDS)
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ m.content + '<|im_end|>' }}{%- endfor -%}"
    )
    renderer = Renderer(tokenizer)
    encoder = LessonEncoder(renderer, encode_with(renderer))
    assert encoder(lesson_of(*TALKED[1:])) == UNPRECEDED
    assert isinstance(encoder(lesson_of(*TALKED)), list)
    assert encoder.unusable == {UNPRECEDED: 1}


def test_exact_ids_stand_there_as_they_are() -> None:
    encoder = ENCODERS["plain"]
    tokenizer = encoder.renderer.tokenizer
    odd = tuple(i for sign in ("n", "o") for i in encoder.renderer.tokenize(sign))
    assert list(odd) != encoder.renderer.tokenize("no")
    plain = lesson_of(*TALKED)
    exact = replace(plain.segments[3], text="no", token_ids=odd)
    earlier = replace(plain.segments[1], token_ids=(*encoder.renderer.tokenize("yes"),))
    lesson = replace(
        plain, segments=(plain.segments[0], earlier, plain.segments[2], exact),
        trained=(False, False, False, True), tokenizer=tokenizer_print(tokenizer),
    )  # fmt: skip
    span = only(encoder(lesson))
    assert span.ids[-len(odd) :] == odd and span.n_trained == len(odd)
    assert [span] == turn_by_turn(lesson, encoder.renderer)


def test_ids_of_another_tokenizer_are_refused_by_name() -> None:
    encoder = ENCODERS["plain"]
    other: Any = tiny_tokenizer([*WORDS, "other"])
    ids = tuple(encoder.renderer.tokenize("no"))
    plain = lesson_of(("user", "say"), ("assistant", "no"))
    segments = (plain.segments[0], replace(plain.segments[1], token_ids=ids))
    foreign = replace(plain, segments=segments, tokenizer=tokenizer_print(other))
    reason = encoder(foreign)
    assert isinstance(reason, str) and tokenizer_print(other) in reason
    assert tokenizer_print(encoder.renderer.tokenizer) in reason
    assert isinstance(encoder(replace(foreign, tokenizer="")), list)  # they spell its words
    wrong = replace(segments[1], text="yes")
    assert encoder(replace(foreign, segments=(segments[0], wrong), tokenizer="")) == NOT_ITS_WORDS
    beyond = replace(segments[1], token_ids=(10**6,))
    assert encoder(replace(foreign, segments=(segments[0], beyond), tokenizer="")) == NOT_ITS_WORDS


def test_a_template_that_refuses_a_conversation_leaves_it_out() -> None:
    tokenizer: Any = tiny_tokenizer(WORDS)
    tokenizer.chat_template = (
        "{%- if messages[0].role == 'assistant' and messages|length > 1 -%}"
        "{{ raise_exception('roles must alternate') }}{%- endif -%}" + TEMPLATE
    )
    renderer = Renderer(tokenizer)
    encoder = LessonEncoder(renderer, encode_with(renderer))
    assert encoder(lesson_of(*TALKED[1:])) == REFUSED
    assert isinstance(encoder(lesson_of(*TALKED)), list)


@pytest.mark.parametrize("template", ["plain", "a line lost after the last reply"])
@given(limit=st.integers(1, 60), rules=st.booleans())
@settings(max_examples=20)
def test_the_oldest_turns_leave_until_a_lesson_fits(template: str, limit: int, rules: bool) -> None:
    renderer = ENCODERS[template].renderer
    encoder = LessonEncoder(renderer, encode_with(renderer), limit)
    head = [("system", "rule")] if rules else []
    turns = [*TALKED, ("user", "the box"), ("assistant", "a rule")]
    shorter = [turn_by_turn(lesson_of(*head, *turns[i:]), renderer) for i in (0, 2, 4)]
    fitting = [i for i, cut in enumerate(shorter) if max(len(s.ids) for s in cut) <= limit]
    result = encoder(lesson_of(*head, *turns))
    if not fitting:
        assert isinstance(result, str) and str(limit) in result
        assert encoder.shortened == 0
    else:
        assert result == shorter[fitting[0]]
        lost = (encoder.shortened, encoder.messages_left_out, encoder.replies_left_out)
        assert lost == (int(fitting[0] > 0), 2 * fitting[0], fitting[0])
