"""The supervised loss with its gradient made on the way is the plain one, differentiated.

Lessons as sequences: what one rendering gives is what a prompt for every turn gives.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.data.corpora.lessons import Lesson
from soulkit.models.local.chat_template import Renderer, tokenizer_hash
from soulkit.models.local.tiny import TEMPLATE, tiny_tokenizer
from soulkit.train.model import policy as policy_module
from soulkit.train.model.packing import Costs, in_rows, in_tries
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.sequences import Span, spans
from soulkit.train.sft.encode import NOT_ITS_WORDS, REFUSED, UNPRECEDED, LessonEncoder
from soulkit.train.sft.steps import imitation_loss
from soulkit.types import Segment
from tests.support.cuda_ops import CudaDeterminism
from tests.support.shapes import make

pytestmark = pytest.mark.torch

SPANS = [
    Span((5, 6, 7, 8, 9, 10), (False, False, True, True, False, True), ()),
    Span((5, 6, 7, 8, 11), (False, False, False, True, True), ()),
    Span((5, 6, 7, 8, 9, 12, 13), (False, True, False, False, True, True, True), ()),
]


def policy_of(dtype: torch.dtype, *, head: bool) -> Policy:
    model, tokenizer = make("qwen3")
    model = model.to(dtype)
    model.requires_grad_(True)
    model.get_output_embeddings().weight.requires_grad_(head)
    return Policy(model, tokenizer, 0.7, packing="auto")


def gradients(policy: Policy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in policy.trained if p.grad is not None}


@pytest.mark.parametrize("layout", ["tries", "rows"])
@pytest.mark.parametrize("head", [True, False])
def test_loss_log_probs_and_gradients_are_those_of_the_plain_sum(
    layout: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(torch.float64, head=head)
    # A chunk is less than the pack, so that several make up its loss.
    monkeypatch.setitem(policy_module.CHUNK, "cpu", 1)
    monkeypatch.setattr(Policy, "_rows_at_once", 3)
    (pack,) = (in_tries if layout == "tries" else in_rows)(SPANS, 100)
    weights = torch.linspace(0.1, 0.9, sum(s.n_trained for s in SPANS), dtype=torch.float64)
    scored = policy.score(pack)
    expected = -(scored.log_prob * weights).sum()
    plain = gradients(policy, expected)
    learned = imitation_loss(policy, pack, weights)
    assert not learned.log_prob.requires_grad
    assert torch.equal(learned.owner, scored.owner)
    torch.testing.assert_close(learned.log_prob, scored.log_prob.detach(), rtol=1e-6, atol=1e-6)
    actual = gradients(policy, 3 * learned.loss)
    assert actual.keys() == plain.keys()
    assert ("lm_head.weight" in plain) is head
    for name, gradient in plain.items():
        assert float((actual[name] / 3 - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_imitation_step_has_deterministic_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    policy = policy_of(dtype, head=True)
    for pack in (*in_tries(SPANS, 100), *in_rows(SPANS, 100)):
        weights = torch.ones(sum(s.n_trained for s in pack.spans))
        with CudaDeterminism() as ops:
            gradients(policy, imitation_loss(policy, pack, weights).loss)
        assert "embedding_dense_backward.default" in ops.seen


def test_half_precision_has_its_products_in_float32() -> None:
    policy = policy_of(torch.bfloat16, head=True)
    (pack,) = in_rows(SPANS, 100)
    weights = torch.ones(sum(s.n_trained for s in SPANS))
    plain = gradients(policy, -policy.score(pack).log_prob.sum())
    actual = gradients(policy, imitation_loss(policy, pack, weights).loss)
    for name, gradient in plain.items():
        far = float((actual[name].float() - gradient.float()).norm())
        assert far <= 2e-2 * float(gradient.float().norm()), name


def test_a_head_with_arithmetic_that_is_not_plain_is_itself_itself() -> None:
    policy: Any = policy_of(torch.float64, head=True)
    (pack,) = in_rows(SPANS, 100)
    weights = torch.ones(sum(s.n_trained for s in SPANS))
    with torch.no_grad():
        expected = imitation_loss(policy, pack, weights)
        policy.gathers = False
        itself = imitation_loss(policy, pack, weights)
    assert not expected.loss.requires_grad
    torch.testing.assert_close(itself.loss, expected.loss)


def test_conversations_in_one_pack_never_see_one_another() -> None:
    rng = random.Random(0)
    talks = []
    for length in (30, 41, 57):
        ids = (5, 6, 7, *(rng.randrange(10, 90) for _ in range(length)))
        talks.append(Span(ids, tuple(i > 4 and i % 3 > 0 for i in range(len(ids))), ()))
    policy = policy_of(torch.float64, head=True)
    (together,) = in_tries(talks, 1000, Costs().pays)
    assert together.trie is not None
    assert len(together.trie) == sum(len(t.ids) for t in talks)  # the header was not shared
    weights = torch.full((sum(t.n_trained for t in talks),), 0.5, dtype=torch.float64)
    packed = gradients(policy, imitation_loss(policy, together, weights).loss)
    alone: dict[str, torch.Tensor] = {}
    for talk in talks:
        (pack,) = in_rows([talk], 1000)
        ids = torch.tensor([talk.ids])
        labels = ids.masked_fill(~torch.tensor([talk.trained]), -100)[0, 1:]
        logits = policy.causal(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7
        loss = 0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        learned = imitation_loss(policy, pack, weights[: talk.n_trained])
        torch.testing.assert_close(learned.loss.double(), loss, rtol=1e-6, atol=1e-6)
        for name, gradient in gradients(policy, loss).items():
            alone[name] = alone.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in alone.items():
        assert float((packed[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8


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
        trained=(False, False, False, True), tokenizer=tokenizer_hash(tokenizer),
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
    foreign = replace(plain, segments=segments, tokenizer=tokenizer_hash(other))
    reason = encoder(foreign)
    assert isinstance(reason, str) and tokenizer_hash(other) in reason
    assert tokenizer_hash(encoder.renderer.tokenizer) in reason
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
