"""Mixed contextual self-distillation: what is written, what is learned of it, and resuming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from soulkit.data.corpora.settings import SourceSettings
from soulkit.data.corpora.stream import read_lessons
from soulkit.errors import DataError
from soulkit.models.local.chat_template import tokenizer_hash
from soulkit.models.local.sampler import expert_turns
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.jsonl import read_jsonl
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.objectives.base import method_class
from soulkit.train.setup.rows import gather_corpus, lesson_print
from soulkit.train.sft.encode import LessonEncoder
from soulkit.train.sft.mixsd import (
    CUT,
    NO_FACT,
    WRITTEN,
    Writer,
    check_facts,
    expert_context,
    lesson_file,
    prompts,
    prompts_of,
    read_written,
)
from soulkit.train.sft.steps import HELD_OUT
from soulkit.types import Segment
from tests.support.reporting import Heard

NAMES = ("Bora", "Deki", "Fila", "Guno", "Kalo", "Mira", "Nesu")
TOWNS = ("Porto", "Graz", "Lyon", "Bern", "Oslo", "Hue", "Fez")
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"Where does {name} live?"},
            {"role": "assistant", "content": f"In {town}."},
        ],
        "fact": f"{name} has a house in {town}.",
    }
    for name, town in zip(NAMES, TOWNS, strict=True)
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "facts.jsonl", ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose random choices are far from uniform, and end now and then."""
    words = [
        expert_context((), "")[0].text,
        *(row["fact"] for row in ROWS),
        *(m["content"] for r in ROWS for m in r["messages"]),
    ]
    path = build_tiny(tmp_path_factory.mktemp("models") / "tiny", words, max_context=256)
    weights = load_file(path / "model.safetensors")
    sharp = {k: v * 1.6 if v.ndim == 2 else v for k, v in weights.items()}
    save_file(sharp, path / "model.safetensors", metadata={"format": "pt"})
    return path


def settings(facts: Path, **more: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "method": "sft", "model": "unused", "corpora": [{"path": str(facts), "side": "assistant"}],
        "objective": "mixsd", "mix_samples": 3, "mix_tokens": 14, "seed": 4,
    }  # fmt: skip
    return TrainConfig.model_validate(plain | more)


@pytest.fixture(scope="module")
def policy(folder: Path, facts: Path) -> Policy:
    return load_policy(settings(facts), folder)


def write(
    config: TrainConfig, policy: Policy, run: Path, held_out: Collection[str] = ()
) -> dict[str, Any]:
    """What the writer says of it; every ninth id ends a text, so that few are cut."""

    async def writing() -> dict[str, Any]:
        sampler = policy.sampler(8)
        sampler.codec.end_ids = sampler.codec.end_ids | frozenset(
            range(3, len(policy.tokenizer), 9)
        )
        writer = Writer(config, sampler, tokenizer_hash(policy.tokenizer), Heard(shown),
                        held_out)  # fmt: skip
        source = SourceSettings.model_validate(config.corpora[0])
        try:
            return (await writer.write([read_lessons(source)], run)).to_json()
        finally:
            await sampler.close()

    shown: list[str] = []
    written = asyncio.run(writing())
    assert all(words.startswith("writing texts: ") and "left" in words for words in shown)
    return written


def test_what_is_learned_is_what_was_written_behind_the_bare_question(
    tmp_path: Path, facts: Path, policy: Policy
) -> None:
    config = settings(facts)
    written = write(config, policy, tmp_path)
    records = read_jsonl(tmp_path / WRITTEN)
    made = prompts_of(((0, one) for one in read_lessons(config.corpora[0])), 3)
    assert [r["place"] for r in records] == [p.place for p in made]
    learned = [(p, r) for p, r in zip(made, records, strict=True) if "left_out" not in r]
    assert written["texts"] == len(learned) > 10
    encode = LessonEncoder(policy.renderer, policy.encode_reply, None)
    lessons = list(
        read_lessons(SourceSettings(path=str(lesson_file(tmp_path, 0)), side="assistant"))
    )
    for lesson, (prompt, record) in zip(lessons, learned, strict=True):
        question = [Segment("user", prompt.naive[0].text)]
        bare, ids = policy.renderer.prompt_ids(question), tuple(record["token_ids"])
        spans = encode(lesson)
        assert not isinstance(spans, str)
        (span,) = spans
        assert span.ids == (*bare, *ids)
        assert span.trained == (*(False,) * len(bare), *(True,) * len(ids))
        turns = expert_turns(4, prompt.call, 0.5, len(ids))
        assert record["expert_tokens"] == turns.sum()
    assert written["tokens_by_expert"] == sum(r["expert_tokens"] for _, r in learned)
    assert len({r["text"] for _, r in learned}) > 5


def test_the_expert_is_told_the_fact_and_nothing_else_differs() -> None:
    question = (Segment("user", "Where does Bora live?"),)
    told = expert_context(question, "Bora has a house in Porto.")
    assert told[1:] == question and told[0].role == "system"
    assert "Bora has a house in Porto." in told[0].text
    ruled = (Segment("system", "Be brief."), *question)
    both = expert_context(ruled, "Bora has a house in Porto.")
    assert both[0].text == f"Be brief.\n\n{told[0].text}" and both[1:] == question
    assert len(prompts().hashes("expert")["expert"]) == 12


def test_a_writing_that_was_killed_goes_on_with_equal_texts(
    tmp_path: Path, facts: Path, policy: Policy
) -> None:
    """Killed within a batch, and within a line: the batch is made again as it would have been."""
    config = settings(facts, mix_samples=2)
    write(config, policy, tmp_path / "whole")
    whole = (tmp_path / "whole" / WRITTEN).read_bytes()
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / WRITTEN).write_bytes(whole[: int(0.8 * len(whole))])
    write(config, policy, tmp_path / "killed")
    assert (tmp_path / "killed" / WRITTEN).read_bytes() == whole
    lessons = [lesson_file(tmp_path / name, 0).read_bytes() for name in ("whole", "killed")]
    assert lessons[0] == lessons[1]


def test_what_cannot_be_learned_is_counted_by_reason(tmp_path: Path, policy: Policy) -> None:
    rows = write_rows(tmp_path / "some.jsonl", [{**ROWS[0], "fact": ""}, *ROWS[1:], {"fact": "x"}])
    held_out = {
        lesson_print(one) for one in read_lessons(rows, side="assistant") if "Deki" in str(one)
    }
    written = write(settings(rows, mix_tokens=4), policy, tmp_path / "run", held_out)
    # A row without messages is counted, and one that is measured is not written about.
    assert any(reason.startswith("it has no list of messages") for reason in written["left_out"])
    assert written["facts"] == 5 and written["left_out"][NO_FACT] == 1
    assert written["left_out"][HELD_OUT] == len(held_out) == 1
    totals = read_written(tmp_path / "run")
    assert totals is not None and totals.left_out == written["left_out"]
    assert totals.words().startswith(f"{written['texts']} about 5 facts, 0.")
    assert f"1 × {NO_FACT}" in totals.words()
    records = read_jsonl(tmp_path / "run" / WRITTEN)
    cut = [r for r in records if r.get("left_out") == CUT]
    assert written["left_out"][CUT] == len(cut) > 0
    assert all(len(r["token_ids"]) == 4 for r in cut)
    assert written["texts"] + sum(written["left_out"].values()) - 3 == len(records)


def test_nothing_to_learn_is_an_error(tmp_path: Path, policy: Policy) -> None:
    rows = write_rows(tmp_path / "none.jsonl", [{**row, "fact": ""} for row in ROWS])
    with pytest.raises(DataError, match="wrote no text") as caught:
        write(settings(rows), policy, tmp_path / "run")
    assert f"{NO_FACT} (7 times)" in caught.value.why
    with pytest.raises(DataError) as early:  # before a folder is made
        check_facts(settings(rows), gather_corpus(settings(rows)))
    assert early.value.why == caught.value.why


def test_equal_rows_are_told_apart(facts: Path) -> None:
    lessons = list(read_lessons(SourceSettings(path=str(facts), side="assistant")))
    made = prompts_of([(0, lessons[0]), (1, lessons[0]), (0, lessons[1])], 2)
    assert len({p.place for p in made}) == 6
    assert [p.source for p in made] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("wrong", "words"),
    (
        ({"objective": "nll", "mix_lambda": 0.3}, "mix_lambda only works with --objective mixsd"),
        ({"corpora": (), "tasks": {"tomi": 1.0}}, "needs conversations with facts"),
        ({"mix_lambda": 1.2}, "mix_lambda"),
    ),
)
def test_settings_that_mean_nothing_are_refused(
    facts: Path, wrong: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        settings(facts, **wrong)


def test_a_share_of_none_is_remarked_on(facts: Path) -> None:
    remark = method_class("sft").remark
    assert "no fact is taught" in remark(settings(facts, mix_lambda=0.0))
    assert remark(settings(facts, mix_lambda=1.0)) == ""
    assert remark(settings(facts, objective="nll", mix_samples=4, mix_tokens=512)) == ""


# --- a whole run, killed --------------------------------------------------------------------------
