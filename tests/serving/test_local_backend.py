"""The local engine of the server: replies in pieces equal whole ones and those of an evaluation;
rows join and leave a running batch; settings are followed or refused by name."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from soulkit.models.local import batching
from soulkit.models.local.continuous import Row
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.runs.records import load_records
from soulkit.serving.backend import Chunk, RequestError
from soulkit.serving.local_backend import LocalBackend, ReplyStream
from soulkit.types import Call, Sampling, Segment
from tests.support.evaluation import soul
from tests.support.servers.serving import served

pytestmark = pytest.mark.torch
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
LONG = {"max_tokens": 150, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """A tiny model that writes words, whose choices are far from uniform, and that never ends."""
    out = build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=256)
    model = LocalModel.load(out, batch_size=8)
    texts = [model.tokenizer.decode([i]) for i in range(len(model.tokenizer))]
    banned = [i for i, text in enumerate(texts) if text != "\n" and not text.strip().isalpha()]
    for name, weight in model.model.named_parameters():
        if weight.ndim == 2:
            weight.data *= 1.6
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data[0] = 0.0  # so that a token's first feature is that of its embedding
    embeddings = model.model.get_input_embeddings().weight.data
    embeddings[:, 0] = 1.0
    embeddings[banned, 0] = -5.0
    return model


@pytest.fixture
def backend(model: LocalModel) -> LocalBackend:
    return LocalBackend(model)


def body(text: str = "ba be", **settings: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12,
            **settings}  # fmt: skip


async def read(stream: AsyncIterator[Chunk]) -> list[dict[str, Any]]:
    """The choices of a whole reply, put together, and the usage as last entry."""
    made: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk["choices"]:
            one = made.setdefault(choice["index"], {"content": "", "reasoning": "", "pieces": 0})
            one["content"] += choice["delta"].get("content", "")
            one["reasoning"] += choice["delta"].get("reasoning_content", "")
            one["pieces"] += 1
            one["finish"] = choice["finish_reason"]
            one.setdefault("logprobs", []).extend(choice.get("logprobs", {}).get("content", []))
        usage = chunk.get("usage")
    return [*(made[index] for index in sorted(made)), {"usage": usage}]


def ask(backend: LocalBackend, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """The first choices of bodies that are sent at once."""

    async def all_of() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(read(backend.chunks(one, "")) for one in bodies))

    return [choices[0] for choices in asyncio.run(all_of())]


def refusal(backend: LocalBackend, sent: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as error:
        ask(backend, sent)
    return error.value


@pytest.mark.parametrize("windows", ["loop", pytest.param("generate", marks=pytest.mark.slow)])
def test_a_reply_in_pieces_is_the_whole_reply_and_that_of_an_evaluation(
    model: LocalModel, windows: str
) -> None:
    if windows == "generate":
        model = model.anew()
        model.__dict__["windows"] = None
    texts = ["ba", "ba be " * 9, "to", "to"]
    limits = [40, 7, 12, 12]
    sent = [body(t, max_tokens=n, temperature=0) for t, n in zip(texts, limits, strict=True)]
    sent[3]["stop"] = [" ", "zz"]
    backend = LocalBackend(model)
    whole, pieces = ask(backend, *sent), ask(backend, *({**one, "stream": True} for one in sent))

    async def evaluate() -> list[str]:
        replies = [
            await model.complete(
                [Segment("user", text)],
                Sampling(temperature=0, max_tokens=limit, stop=tuple(one.get("stop", ()))),
                Call(role="actor", example_id="x"),
            )
            for text, limit, one in zip(texts, limits, sent, strict=True)
        ]
        return [reply.text for reply in replies]

    expected = asyncio.run(evaluate())
    assert [one["content"] for one in whole] == expected
    assert [one["content"] for one in pieces] == expected
    assert [one["finish"] for one in pieces] == ["length", "length", "length", "stop"]
    assert whole[0]["pieces"] == 1 and pieces[0]["pieces"] > 20


def test_usage_and_logprobs_count_every_token(backend: LocalBackend) -> None:
    async def choices() -> list[dict[str, Any]]:
        return await read(backend.chunks(body(n=2, logprobs=True, stream=True), ""))

    first, second, usage = asyncio.run(choices())
    assert first["content"] != second["content"]
    assert usage["usage"] == {"prompt_tokens": 10, "completion_tokens": 24, "total_tokens": 34}
    for one in (first, second):
        assert len(one["logprobs"]) == 12 and all(n["logprob"] < 0 for n in one["logprobs"])
        # The tiny tokenizer writes no space before the first word.
        assert "".join(n["token"] for n in one["logprobs"]) == one["content"].replace(" ", "")


def test_rows_with_other_settings_share_the_batch_and_do_not_change_each_other(
    backend: LocalBackend,
) -> None:
    sent = [body(f"ba {word}", max_tokens=20 + n, temperature=t, top_k=k, seed=n)
            for n, (word, t, k) in enumerate((w, t, k) for w in ("be", "bi be bo " * 6)
                                             for t, k in ((0, 0), (1, 0), (1, 5)))]  # fmt: skip
    alone = [ask(backend, one)[0]["content"] for one in sent]
    before = backend.engine.steps
    together = ask(backend, *sent)
    assert [one["content"] for one in together] == alone
    assert backend.engine.steps - before <= 25 + len(sent)


def test_a_request_joins_a_running_batch_and_a_cancelled_one_leaves_it(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Row] = []
    submit = backend.engine.submit

    def note(rows: Sequence[Row]) -> None:
        made.extend(rows)
        submit(rows)

    monkeypatch.setattr(backend.engine, "submit", note)

    async def conversation() -> None:
        long = backend.chunks(body("da", **LONG, stream=True), "")
        for _ in range(3):
            await anext(long)
        reply = await read(backend.chunks(body("di", max_tokens=5, stream=True), ""))
        running, _ = made
        assert reply[-1]["usage"]["completion_tokens"] == 5 and not running.done
        before = len(running.ids)
        await long.aclose()
        await read(backend.chunks(body("do", max_tokens=9), ""))
        assert len(running.ids) <= before + 2 and not running.done

    asyncio.run(conversation())


@pytest.mark.slow
def test_a_cancelled_reply_ends_a_batch_that_cannot_be_joined(model: LocalModel) -> None:
    model = model.anew()
    model.__dict__["windows"] = None
    backend = LocalBackend(model)

    async def conversation() -> None:
        long = backend.chunks(body("da", **LONG, stream=True), "")
        await anext(long)
        await long.aclose()
        await read(backend.chunks(body("do", max_tokens=9), ""))

    asyncio.run(conversation())
    assert backend.engine.steps < 60


@pytest.mark.slow
def test_rows_that_do_not_fit_wait_and_go_on_where_they_were(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [
        body(f"ba {word}", temperature=n % 2, max_tokens=40) for n, word in enumerate(WORDS[:6])
    ]
    expected = [one["content"] for one in ask(backend, *sent)]
    monkeypatch.setattr("soulkit.models.local.continuous.EXPECTED", 10)
    monkeypatch.setattr(batching, "BATCH_TOKENS", 120)
    assert [one["content"] for one in ask(backend, *sent)] == expected


def test_a_failure_of_the_model_reaches_every_reader_and_the_next_request_works(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(backend.model.model, "forward", broken)
        error = refusal(backend, body("ba"))
        assert error.status == 500 and "no kernel" in error.message
    assert ask(backend, body("ba"))[0]["content"]


def test_closing_ends_the_running_replies(model: LocalModel) -> None:
    backend = LocalBackend(model.anew())

    async def conversation() -> None:
        long = backend.chunks(body("da", **LONG, stream=True), "")
        await anext(long)
        await backend.close()
        with pytest.raises(RequestError, match="has been closed"):
            async for _ in long:
                pass
        with pytest.raises(RequestError, match="has been closed"):
            await anext(backend.chunks(body(), ""))

    asyncio.run(asyncio.wait_for(conversation(), 60))


def test_equal_requests_get_equal_replies_and_seeds_matter(backend: LocalBackend) -> None:
    sent = body(), body(), body(seed=1), body(seed=1), body("bo"), body(temperature=0)
    first, again, seed, same, other, greedy = (one["content"] for one in ask(backend, *sent))
    assert first == again and seed == same
    assert len({first, seed, other, greedy}) == 4


SCHEMA = {
    "type": "object", "required": ["name", "age", "mood"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"},
                   "mood": {"enum": ["ba be", "to"]}},
}  # fmt: skip


def test_replies_follow_their_schema(backend: LocalBackend) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    sent = [body(f"ba {n}", response_format=form, max_tokens=200, stream=n % 2 == 0)
            for n in range(6)]  # fmt: skip
    other = body(response_format={"type": "json_object"}, max_tokens=200, seed=3)
    *people, anything = ask(backend, *sent, other)
    for one in people:
        jsonschema.validate(json.loads(one["content"]), SCHEMA)
        assert one["finish"] == "stop"
    assert isinstance(json.loads(anything["content"]), dict) or anything["finish"] == "length"
    free = {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}
    assert ask(backend, body(response_format=free, max_tokens=5))
    for schema in (False, {"type": "nonsense"}, {"type": "string", "pattern": "(?<=a)b"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        error = refusal(backend, body(response_format=form))
        assert error.status == 400 and error.param == "response_format"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"frobnicate": 1}, "frobnicate"), ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": "1"}, "top_p"), ({"n": 0}, "n"), ({"n": True}, "n"), ({"seed": 1.5}, "seed"),
        ({"max_tokens": 10**400}, "max_tokens"), ({"max_completion_tokens": 3}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"), ({"stop": 5}, "stop"), ({"stop": "a" * 300}, "stop"),
        ({"logprobs": 2}, "logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs.enable_thinking"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a \ud800 b"}]}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(
    backend: LocalBackend, settings: dict[str, Any], param: str
) -> None:
    error = refusal(backend, body(**settings))
    assert (error.status, error.param) == (400, param)


def test_neutral_values_and_all_forms_of_messages_pass(backend: LocalBackend) -> None:
    messages = [
        {"role": "developer", "content": "ba"}, {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "be"}], "name": "x"},
    ]  # fmt: skip
    neutral = {"frequency_penalty": 0.0, "presence_penalty": None, "repetition_penalty": 1.0,
               "top_k": -1, "min_p": 0, "logit_bias": {}, "tools": [], "tool_choice": "none",
               "user": "x", "response_format": {"type": "text"}, "top_logprobs": 0,
               "max_completion_tokens": 12, "stop": None, "chat_template_kwargs": {}}  # fmt: skip
    plain, sent = ask(backend, body(messages=messages), body(messages=messages, **neutral))
    assert plain["content"] == sent["content"]


def test_messages_that_do_not_fit_are_refused_with_the_numbers(backend: LocalBackend) -> None:
    error = refusal(backend, body("ba " * 300))
    assert error.code == "context_length_exceeded" and error.status == 400
    assert "256 tokens" in error.message and "309 tokens" in error.message
    for much in ([{"role": "user", "content": "b" * 7_000_000}], [{"role": "user"}] * 100_000):
        error = refusal(backend, body(messages=much))  # before the template is filled
        assert error.code == "context_length_exceeded" and "are longer" in error.message
    (whole,) = ask(backend, body("ba " * 230, max_tokens=None))  # 239 tokens
    assert whole["finish"] == "length" and whole["content"]
    assert refusal(backend, body("ba " * 230, max_tokens=18)).param == "messages"


def deltas(
    model: LocalModel, ids: Sequence[int], stop: tuple[str, ...] = ()
) -> list[dict[str, str]]:
    """The deltas of a reply whose tokens come one at a time."""
    row = Row([10], Sampling(stop=stop), np.zeros(len(ids)))
    stream, made = ReplyStream(row, model.codec, index=0, logprobs=False), []
    for number, one in enumerate(ids, 1):
        row.ids.append(one)
        made.append(stream.choice())  # the reader may be faster than the worker
        row.done = number == len(ids) or model.codec.hits_stop(row.ids, stop)
        made.append(stream.choice())
        if row.done:
            break
    return [choice["delta"] for choice in made if choice]


def encoded(model: LocalModel, text: str) -> list[int]:
    return list(model.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning"),
    [
        ("ba ###STOP### be", ("###STOP###",), "ba ", ""),
        ("ba ###STO be ###", ("###STOP###",), "ba ###STO be ###", ""),
        ("ba\nbe\n\nbi", ("\n\n", "bi"), "ba\nbe", ""),
        ("é 🙂 日本 ba", ("本",), "é 🙂 日", ""),
        ("<think>\nba be\n</think>\n\nbi bo", (), "bi bo", "ba be"),
        ("<think> ba < be", (), "", "ba < be"),
        ("a < b <thin> c", (), "a < b <thin> c", ""),
        (" ".join(WORDS * 3), (), " ".join(WORDS * 3), ""),
    ],
)
def test_pieces_show_whole_characters_and_nothing_of_a_stop_string(
    model: LocalModel, text: str, stop: tuple[str, ...], content: str, reasoning: str
) -> None:
    made = deltas(model, encoded(model, text), stop)
    pieces = [delta.get("content", "") for delta in made]
    assert "".join(pieces) == content
    assert "".join(delta.get("reasoning_content", "") for delta in made) == reasoning
    assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_of_any_tokens_give_the_text_of_all(model: LocalModel) -> None:
    random = np.random.default_rng(0)
    for _ in range(40):
        ids = random.integers(6, len(model.tokenizer), random.integers(1, 150)).tolist()
        text = "".join(delta.get("content", "") for delta in deltas(model, ids))
        assert text == model.codec.completion([10], ids, (), room=len(ids)).text


@pytest.mark.slow
def test_an_evaluation_over_http_has_the_replies_of_one_in_this_process(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "m", [" ".join(WORDS)], max_context=1024)
    model = LocalModel.load(folder, device="cpu")
    options = ("--task", "tomi", "--data", "synth:12", "--temperature", 0, "--max-tokens", 16,
               "--max-unscored", 1)  # fmt: skip
    with served(LocalBackend(model)) as url:
        assert soul("eval", "api", "--model", "m", "--base-url", url, "--out", tmp_path / "api",
                    *options) == 0  # fmt: skip
    assert soul("eval", "local", "--model", folder, "--device", "cpu", "--out", tmp_path / "local",
                *options) == 0  # fmt: skip
    over_http, here = (
        {
            one.episode.example_id: one.episode.transcript
            for one in load_records(tmp_path / run / "episodes.jsonl")
        }
        for run in ("api", "local")
    )
    assert len(here) == 12 and over_http == here
    conditions = json.loads((tmp_path / "api" / "conditions.json").read_text())
    assert "unknown" not in json.dumps(conditions["players"])
