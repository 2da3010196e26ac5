"""The tiny model: its tokenizer loses nothing, its folder is an ordinary one."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from soulkit.errors import ConfigError
from soulkit.models.local.tiny import build_tiny, tiny_tokenizer

WORDS = ["the", "box", "is", "in", "Anne", "green_box", "kitchen", "Where?", "hello", "don't"]
TOKENIZER: Any = tiny_tokenizer(WORDS)

TEXTS = [
    "the box.",
    "green_box is in the_kitchen",
    " the box ",
    "the box\n  is 12 3 4.5 (in) a 3rd B2, 10:30",
    "\"hello\" said Anne's \"box\" and 'x' don't",
    "<answer>green_box</answer> the <answer> box",
    "zörp 日本 😀 «hm»  a\t\tb\r\n",
    '<think>\nx\n</think>\n\n"the" - >the > the" the " the ',
    "naïve e\u0301",
]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def tokens(text: str) -> list[str]:
    return list(TOKENIZER.convert_ids_to_tokens(ids(text)))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


@given(st.text(alphabet="ab12 \n\"'().,_-<>!/[]é日ABthe#\\", max_size=16))
@settings(max_examples=300, deadline=None)
def test_text_comes_back_exactly_whatever_stands_side_by_side(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


@given(st.text(max_size=20).filter(lambda t: not set(t) & {"▁", "⁀"}))
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


def test_a_known_word_is_the_same_single_token_everywhere() -> None:
    box = ids("box")
    assert len(box) == 1
    for text in ("the box", "box.", "<answer>box</answer>", "green_box", '"box"', "(box", "\nbox"):
        assert ids(text).count(box[0]) == 1, text
    assert tokens("green_box") == ["▁green", "_", "▁box"]
    assert tokens("<answer>box</answer>") == ["<answer>", "▁box", "</answer>"]


def test_unknown_words_become_characters_not_one_unknown() -> None:
    assert tokens("the zorp.") == ["▁the", "▁", "z", "o", "r", "p", "."]
    assert TOKENIZER.unk_token_id not in ids("日本 zorp ☃")


def test_a_chat_is_one_token_per_role_and_mark() -> None:
    chat = [{"role": "user", "content": "hello"}]
    out = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    said = ["<|im_start|>", "▁user", "\n", "▁hello", "<|im_end|>", "\n"]
    asked = ["<|im_start|>", "▁assistant", "\n"]
    assert TOKENIZER.convert_ids_to_tokens(out) == [*said, *asked]


def test_tags_survive_decoding_without_special_tokens() -> None:
    text = TOKENIZER.decode(ids("<answer>box</answer><|im_end|>"), skip_special_tokens=True)
    assert text == "<answer>box</answer>"


@pytest.mark.parametrize(("size", "low", "high"), [("1m", 0.8e6, 1.1e6), ("5m", 4.5e6, 5.5e6)])
def test_the_folder_is_an_ordinary_one(tmp_path: Path, size: Any, low: float, high: float) -> None:
    folder = build_tiny(tmp_path / "m", WORDS, size=size, max_context=256)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert low < sum(p.numel() for p in model.parameters()) < high
    assert model.config.max_position_embeddings == 256
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.encode(TEXTS[0]) == ids(TEXTS[0])
    assert tokenizer.chat_template == TOKENIZER.chat_template


def test_equal_seeds_write_equal_files_and_others_do_not(tmp_path: Path) -> None:
    folders = [
        build_tiny(tmp_path / name, words, seed=seed)
        for name, words, seed in (("a", WORDS, 1), ("b", WORDS[::-1], 1), ("c", WORDS, 2))
    ]
    a, b, c = ((f / "model.safetensors").read_bytes() for f in folders)
    words = [(f / "tokenizer.json").read_text() for f in folders]
    assert a == b != c and words[0] == words[1]


def test_a_vocabulary_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty"):
        build_tiny(tmp_path, ["", " 12 "])
