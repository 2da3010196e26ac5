"""Small real models for tests, demos and first runs without a network.

`build_tiny` writes an ordinary Hugging Face folder: a Qwen3-shaped model with random weights, and a
tokenizer with one token per word of a given vocabulary. A word token contains `▁` for the usual gap
before it: a space after most characters, nothing after an opening bracket, a line break and the
like. Other gaps are explicit: `⁀` joins a word to the text before it, a space token adds a space.
Punctuation has two tokens, with and without a space before it. Digits are separate tokens; unknown
words are split into characters, unknown characters into bytes.

Decoding restores every text exactly, except texts that contain `▁` or `⁀`.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import ConfigError
from soulkit.models.local.loading import quieten

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config

GAP, GLUE = "▁", "⁀"
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"
PLAIN_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
"""Added tokens that count as ordinary text and are kept when decoding."""
ROLES = ("system", "user", "assistant")

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# Characters after which a word has no gap: line starts, white space, openers, and an opening
# quotation mark (one that follows a space, an opener or the start).
_OPENERS = r"\s(\[{<>_/'#@$=*`\\+~^&|\-"
_QUOTE_AFTER = r"\s(\[>"
_CLOSE_UP = rf'(?:(?<=[{_OPENERS}])|(?<=[{_QUOTE_AFTER}]")|(?<=\A")|\A)'
_LETTER = r"[\p{L}\p{M}]"
_WORD_START = rf"(?:(?<!{_LETTER})(?={_LETTER})|(?=\d))"
_UNITS = rf"{GAP}?{_LETTER}+|{GAP}?\d|{GLUE}| ?[^\s\p{{L}}\p{{M}}\d{GAP}{GLUE}]|{GAP}|\s"

_SHAPES: dict[str, dict[str, int]] = {
    "1m": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 384},
    "5m": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768},
}
_HEAD = 32
_STD = 0.05


def build_tiny(
    out: Path,
    words: Iterable[str],
    *,
    size: Literal["1m", "5m"] = "1m",
    seed: int = 0,
    max_context: int = 1024,
) -> Path:
    """Write an untrained model and its tokenizer to the folder `out`, and return `out`.

    `words` may be words or texts: every word in them becomes one token. Equal arguments give equal
    weights and ids. `size` is "1m" or "5m": about 0.9 or 5 million parameters for a thousand words;
    `max_context` is in tokens. ConfigError if there are no words.
    """
    tokenizer = tiny_tokenizer(words, max_context=max_context)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    _save_model(out, _config(size, tokenizer, max_context), seed)
    return out


def tiny_tokenizer(words: Iterable[str], *, max_context: int = 1024) -> PreTrainedTokenizerFast:
    """The tokenizer of `build_tiny`: one token per word in `words`, characters for the rest.

    ConfigError if `words` contains no word.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = _known_words(words)
    if not vocabulary:
        raise ConfigError(
            "The vocabulary of the tiny model is empty.",
            "Its tokenizer is built from the given words.",
            "Pass the words or texts that the model will read and write.",
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(vocabulary),
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=max_context,
        padding_side="left",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _known_words(texts: Iterable[str]) -> list[str]:
    normalizer, splitter = _normalizer(), _splitter()
    words: set[str] = set()
    for text in texts:
        pieces = splitter.pre_tokenize_str(normalizer.normalize_str(text))
        words.update(piece for piece, _ in pieces if len(piece) > 1 and piece[1].isalpha())
    # Sorted, so that equal vocabularies get equal ids.
    return sorted(words)


def _backend(words: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, models

    model = models.BPE(
        vocab={token: i for i, token in enumerate(_vocabulary(words))},
        merges=[],
        unk_token=UNKNOWN,
        byte_fallback=True,
        ignore_merges=True,  # every unit in the vocabulary is one token, without merge rules
    )
    backend = Tokenizer(model)
    backend.normalizer = _normalizer()
    backend.pre_tokenizer = _splitter()
    backend.decoder = _decoder()
    backend.add_special_tokens([PAD, START, END, UNKNOWN])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in PLAIN_TOKENS])
    return backend


def _vocabulary(words: list[str]) -> list[str]:
    tokens = [PAD, START, END, UNKNOWN, *PLAIN_TOKENS]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [GAP, GLUE, *string.printable]
    tokens += [f"{GAP}{c}" for c in string.digits + string.ascii_letters]
    tokens += [f" {c}" for c in string.punctuation]
    tokens += [f"{GAP}{role}" for role in ROLES]
    return list(dict.fromkeys([*tokens, *words]))


def _normalizer() -> Any:
    from tokenizers import Regex, normalizers

    gap_before_word = rf" (?=(?:{_LETTER}|(?<!\d )\d))"
    usual_gap = rf'(?:(?<=[^{_OPENERS}"])|(?<=[^{_QUOTE_AFTER}]"))'
    not_usual = rf"(?<!{GAP})(?<!\A)(?!{_CLOSE_UP}){_WORD_START}(?!(?<=\d)\d)"
    return normalizers.Sequence(
        [
            normalizers.Replace(GAP, "_"),
            normalizers.Replace(GLUE, "~"),
            normalizers.Replace(Regex(usual_gap + gap_before_word), GAP),
            normalizers.Replace(Regex(not_usual), GLUE + GAP),
            normalizers.Replace(Regex(rf"(?<!{GAP}){_WORD_START}"), GAP),
        ]
    )


def _splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(_UNITS), behavior="isolated")


def _decoder() -> Any:
    from tokenizers import Regex, decoders

    return decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace(Regex(rf"{_CLOSE_UP}{GAP}|(?<=\d){GAP}(?=\d)"), ""),
            decoders.Replace(GLUE + GAP, ""),
            decoders.Replace(GLUE, ""),
            decoders.Replace(GAP, " "),
        ]
    )


def _config(size: str, tokenizer: PreTrainedTokenizerFast, max_context: int) -> Qwen3Config:
    from transformers import Qwen3Config

    shape = _SHAPES[size]
    heads = shape["hidden_size"] // _HEAD
    return Qwen3Config(
        vocab_size=len(tokenizer),
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=_HEAD,
        max_position_embeddings=max_context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def _save_model(out: Path, config: Qwen3Config, seed: int) -> None:
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
    random = torch.Generator().manual_seed(seed)
    # Scale down outputs into the residual stream, so that it does not grow with depth.
    deep = _STD / (2 * config.num_hidden_layers) ** 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0.0, deep if last else _STD, generator=random)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    quieten()
    model.save_pretrained(out)
