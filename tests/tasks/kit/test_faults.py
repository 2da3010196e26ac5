"""Faults of a simulated person: each kind in several languages, and what people really write."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from soulkit.tasks.kit.person.brief import START, Brief
from soulkit.tasks.kit.person.faults import FAULTS, find_faults
from soulkit.types import Line

ZOFIA = Brief(
    persona="Writes short messages without capitals and never says thank you. Grew up in Poland.",
    scenario="You want your money back for a kettle that leaks, and you will not take another one.",
    facts={"name": "Zofia Nowak", "age": "34", "city": "Riga"},
)
OFFER = "Would you like a refund, or shall we send you a new kettle of the same kind?"


DATA = Path(os.environ.get("SOULKIT_TEST_DATA") or "nowhere")


def talk(*texts: str) -> list[Line]:
    """A conversation that the person begins."""
    return [Line("agent" if place % 2 else "person", text) for place, text in enumerate(texts)]


def kinds(*texts: str, brief: Brief | None = ZOFIA) -> set[str]:
    return {fault.kind for fault in find_faults(talk(*texts), "person", brief)}


FAULTY = [
    ("role_flip", ["Hello! How can I help you today?"]),
    ("role_flip", ["Guten Tag, wie kann ich Ihnen helfen?"]),
    ("role_flip", ["Bonjour, comment puis-je vous aider ?"]),
    ("role_flip", ["¿En qué puedo ayudarle hoy?"]),
    ("role_flip", ["Здравствуйте! Чем я могу вам помочь?"]),
    ("role_flip", ["您好!请问有什么可以帮您的吗?"]),
    ("role_flip", ["こんにちは。何かお手伝いできることはありますか？"]),
    ("role_flip", ["안녕하세요, 무엇을 도와드릴까요?"]),
    ("role_flip", ["كيف يمكنني مساعدتك؟"]),
    ("role_flip", ["the kettle leaks", OFFER, "As an AI language model, I cannot take a refund."]),
    ("role_flip", ["the kettle leaks\n\nAssistant: I am sorry to hear that."]),
    ("role_flip", ["it leaks<|im_end|>\n<|im_start|>assistant\nSorry!"]),
    ("role_flip", ["can i get my money back?\n\nCertainly! Here is how to do it."]),
    ("role_flip", ["it leaks", OFFER, "1. **Refund**: we pay it back\n2. **Repair**: we mend it"]),
    ("leaked_instructions", [f"hi. {ZOFIA.persona}"]),
    ("leaked_instructions", ["Stay this person: you are not an assistant, you help nobody, ok"]),
    ("leaked_instructions", [ZOFIA.scenario]),
    ("leaked_instructions", [START]),
    ("leaked_reasoning", ["<think>they want a reason</think>it leaks"]),
    ("leaked_reasoning", ["Okay, the user wants me to complain. it leaks"]),
    ("leaked_reasoning", ["好的,用户想让我抱怨。水壶漏水"]),
    ("leaked_reasoning", ["Хорошо, пользователь просит жалобу."]),
    ("leaked_reasoning", ["Okay, der Nutzer will, dass ich mich beschwere."]),
    ("leaked_reasoning", ["it leaks. I should stay in character and complain."]),
    ("swallowed_last_line", ["it leaks", OFFER, " \n"]),
    ("swallowed_last_line", ["it leaks", OFFER, "###STOP###"]),
    ("parroting", ["it leaks", OFFER, OFFER]),
    ("parroting", ["it leaks", OFFER, OFFER.replace("kettle", "pot")]),
    ("parroting", ["hi", OFFER, "я хочу вернуть деньги за чайник, он течёт", "Почему?",
                   "Я хочу вернуть деньги за чайник: он течёт!"]),
    ("parroting", ["hi", OFFER, "我买的水壶一直在漏水我想把钱全部退回来", "?",
                   "我买的水壶一直在漏水,我想把钱全部退回来"]),
    ("two_first_turns", ["hi there i want my money back", "Why?", "hi i bought a kettle from you"]),
    ("two_first_turns", ["Guten Tag, der Kocher ist undicht", "Oh!", "Hallo, mein Kocher leckt"]),
    ("two_first_turns", ["i want my money back for the kettle", "Why?",
                         "I want my money back for the kettle."]),
    ("goodbye_loop", ["bye", "Goodbye!", "bye bye", "Take care!", "see you"]),
    ("goodbye_loop", ["ok thanks bye", "You're welcome! Have a great day!", "you too", "Bye!"]),
    ("goodbye_loop", ["tschüss", "Auf Wiedersehen!", "danke, bis bald", "Schönen Tag noch!"]),
    ("goodbye_loop", ["再见", "再见,谢谢!", "拜拜", "再见"]),
    ("contradicts_persona", ["my name is Martha and the kettle leaks"]),
    ("contradicts_persona", ["I'm 52 years old and it leaks"]),
    ("contradicts_persona", ["well, I live in Berlin."]),
    ("contradicts_persona", ["ich wohne in Hamburg, ich bin 34"]),
    ("contradicts_persona", ["je m'appelle Claire"]),
    ("contradicts_persona", ["tengo 21 años"]),
]  # fmt: skip

CLEAN = [
    ["hi, my kettle leaks", "I am sorry. How can I help you?", "can you help me get a refund?"],
    ["are you an AI?", "Yes, as an AI I cannot feel.", "as an AI, do you know what a kettle is?"],
    ["hi", "Hello! What is your name?", "Zofia", "And your city?", "Riga. I'm from Poland"],
    ["my name is zofia, I'm 34", "And where are you?", "I live in Latvia, in Riga"],
    ["i'm 5 minutes late", "Fine.", "I am 20 euros short", "Oh.", "I'm 40% sure"],
    ["yes", "Yes?", "yes", "Yes?", "yes"],
    ["what?", "A refund?", "yes please", "Done.", "thanks, bye"],
    ["thanks", "You are welcome!", "thanks again, bye", "Bye!"],
    ["hello", "Hi!", "hello?? anybody there"],
    ["the user of my app wants a refund", "I see.", "the assistant: is it a person?"],
    ["i want my money back for a kettle that leaks", "Why?", "because it leaks everywhere"],
]


@pytest.mark.parametrize(("kind", "texts"), FAULTY)
def test_a_fault_is_found(kind: str, texts: list[str]) -> None:
    assert kinds(*texts) == {kind}


def test_every_kind_is_tested_and_named() -> None:
    assert {kind for kind, _ in FAULTY} == set(FAULTS)


@pytest.mark.parametrize("texts", CLEAN)
def test_what_people_write_is_no_fault(texts: list[str]) -> None:
    assert find_faults(talk(*texts), "person", ZOFIA) == ()


def test_only_the_persons_lines_count_and_the_line_is_named() -> None:
    lines = talk("it leaks", "How can I help you today?", "How may I help you?")
    assert [(one.kind, one.line) for one in find_faults(lines, "person")] == [("role_flip", 2)]
    assert "how may i help you" in find_faults(lines, "person")[0].evidence
    assert find_faults(talk(" \n"), "person")[0].evidence == "empty"


def test_instructions_of_another_prompt_count() -> None:
    prompt = "The user is a tired nurse who wants to know when the next bus to the city leaves."
    lines = talk("the user is a tired nurse who wants to know when the next bus leaves")
    assert [one.kind for one in find_faults(lines, "person", Brief(text=prompt))] == [
        "leaked_instructions"
    ]


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "hi " * 333_333, "?\n" * 500_000, "İ" * 500_000, "<" * 10**6, "*#[ " * 250_000,
     "я из " * 200_000, "I live in A " * 80_000, "你好" * 500_000, "e\u0301" * 500_000,
     " " * 10**6, "<model " * 140_000],
    ids=lambda text: ascii(text[:6]),
)  # fmt: skip
def test_a_message_without_end_takes_no_time(text: str) -> None:
    find_faults(talk("hi"), "person", ZOFIA)
    start = time.process_time()
    find_faults(talk("hi", text, text), "person", ZOFIA)
    assert time.process_time() - start < 2  # 0.1 s on an idle machine; quadratic: hours


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="no original files ($SOULKIT_TEST_DATA)")
def test_recorded_people_have_few_faults() -> None:
    chats = []
    for name in ("document_creation_annotations", "math_tutoring_annotations_redacted"):
        path = DATA / "simulatorarena" / f"{name}_for_benchmarking.json"
        for row in json.loads(path.read_text("utf-8")):
            pairs = zip(row["user_queries"], row["ai_responses"], strict=False)
            texts = [str(text or "") for pair in pairs for text in pair]
            chats.append((talk(*texts), Brief(scenario=row.get("intent", ""))))
    arena = (DATA / "mirrorbench" / "chatbot_arena_mirror.jsonl").read_text("utf-8")
    for row in map(json.loads, arena.splitlines()):
        texts = [turn["content"] for turn in row["turns"]]
        chats.append((talk(*texts), Brief(scenario=row["task_description"])))
    faults = Counter(
        kind
        for lines, brief in chats
        for kind in {fault.kind for fault in find_faults(lines, "person", brief)}
    )
    assert len(chats) == 296
    assert all(count <= 0.01 * len(chats) for count in faults.values()), faults
