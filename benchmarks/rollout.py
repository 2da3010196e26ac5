"""Does the sampler idle while it waits for judges? One Ditto step of 64 rollouts with slow judges.

    .venv/bin/python benchmarks/rollout.py [--deterministic] [--batch-size N]

Judge and coach are a local HTTP server that answers after two seconds. Each rollout is drafted,
judged, coached, refined and judged again, so it waits six seconds in any case. A step takes at
least as long as the sampler's own work, and as one rollout alone. The script prints the three times
and step / max(busy, alone); the budget is 1.2.

Batches are small here: a judge can start on a draft only when its batch has ended, so large batches
of a sampler that is as slow as its judges would hardly overlap with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.spec import TaskSpec
from soulkit.types import Completion, Episode, Example, Record, Sampling, Score, Segment

PROMPTS, DRAFTS = 8, 8
LATENCY_S = 2.0
TOKENS = 32
BUDGET = 1.2

PROMPT = """
{{ scene }}

What would you say now? One sentence.
{% if feedback %}

Someone heard your first try and said: {{ feedback }}
{% endif %}
"""
COACH = """
Scene: {{ scene }}

This was said: {{ attempt }}

Say in one sentence what would sound more like a person.
"""
SCENES = [
    "The tram has stopped between two stations, and a stranger with a cello asks for the time.",
    "Your neighbour brings back the ladder that she borrowed in spring, with one rung missing.",
    "At the bakery the last loaf goes to the man before you, who offers to share it.",
    "Your brother calls at midnight to ask how long an egg takes to boil.",
    "The librarian finds a letter in the book that you return, and it is not yours.",
    "A child on the beach sells you a stone and promises that it is lucky.",
    "Your old teacher sits down beside you on the train and calls you by another name.",
    "The plumber has finished, and water comes out of the lamp.",
]
SPEC: dict[str, Any] = {
    "title": "Remarks",
    "summary": "Does a remark sound like a person? A judge says.",
    "module": "benchmarks.rollout:Remarks",
    "seats": {"speaker": "actor"},
    "columns": {"scene": {"audience": ["speaker", "judge", "coach"]}},
    "metric": {"name": "human", "binary": False},
    "feedback": {"coaches": ["model"]},
    "licence": "Apache-2.0",
}


class Remarks(ChoiceTask):
    """A task: a remark on a scene, which the judge scores from 0 to 9."""

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        assert episode.final is not None, episode.failure
        rollout = Rollout(index=episode.rollout, kind=episode.kind)
        text = f"{example.fields['scene']}\nSaid: {episode.final.text}\nA digit for it?"
        context = (Segment("user", text),)
        verdict = await cast.player("judge").complete(context, rollout.call("judge", example))
        value = int(verdict.text) / 9
        return Score(value=value, reward=value, words=verdict.text)

    def parse(self, text: str) -> tuple[str, str]:
        return text, "ok"

    def grade(self, example: Example, answer: str) -> float:
        raise NotImplementedError("remarks are graded by the judge")

    def gold_completion(self, example: Example) -> str:
        raise NotImplementedError("no remark is the right one")


class _Slow(BaseHTTPRequestHandler):
    """Answers after LATENCY_S with a digit (as judge) or a sentence (as coach)."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        time.sleep(LATENCY_S)
        text = str(len(prompt) % 10) if prompt.endswith("digit for it?") else "Keep it shorter."
        message = {"role": "assistant", "content": text}
        reply = {
            "id": "r", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no request log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def serve() -> None:
    """Print the port and serve until killed."""
    server = _Server(("127.0.0.1", 0), _Slow)
    print(server.server_address[1], flush=True)
    server.serve_forever()


@contextmanager
def slow_server() -> Iterator[str]:
    """The base URL of a slow judge and coach in its own process.

    In this process it would share the interpreter lock with the sampler, unlike a real judge.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()


class Clocked(LocalModel):
    """A model that records its own working time and number of batches."""

    busy, count = 0.0, 0

    def _reply(self, batch: list[Any]) -> list[Completion]:
        start = time.perf_counter()
        try:
            return super()._reply(batch)
        finally:
            self.busy += time.perf_counter() - start
            self.count += 1


def remarks(folder: Path) -> tuple[Remarks, list[Example]]:
    prompts = folder / "prompts" / "remarks"
    prompts.mkdir(parents=True)
    (prompts / "user.md").write_text(PROMPT, encoding="utf-8")
    (prompts / "coach.md").write_text(COACH, encoding="utf-8")
    task = Remarks("remarks", TaskSpec.model_validate(SPEC), folder=folder)
    return task, [task.example({"scene": scene}) for scene in SCENES[:PROMPTS]]


async def step(model: Clocked, url: str, jobs: list[Job]) -> tuple[float, float, int, list[Record]]:
    """(seconds of the step, seconds that the sampler worked, number of batches, records)."""
    slow = Player(Endpoint(model="slow", base_url=url, concurrency=256), Sampling(max_tokens=64))
    actor = Player(model, Sampling(max_tokens=TOKENS, seed=1))
    cast = Cast(actor=actor, judges=(slow,), coach=slow)
    model.busy, model.count = 0.0, 0
    start = time.perf_counter()
    records = await Engine(cast, feedback=FeedbackPolicy()).run(jobs, lambda record: None)
    seconds = time.perf_counter() - start
    await slow.model.close()
    return seconds, model.busy, model.count, records


def measure(folder: Path, deterministic: bool, batch_size: int) -> float:
    """Print the table; returns step / max(busy, alone)."""
    task, examples = remarks(folder)
    words = [PROMPT, COACH, *SCENES]
    loaded = LocalModel.load(build_tiny(folder / "tiny", words))
    model = Clocked(
        loaded.model, loaded.tokenizer, batch_size=batch_size, deterministic=deterministic
    )
    jobs = [Job(task, example, index) for example in examples for index in range(DRAFTS)]
    with slow_server() as url:
        asyncio.run(step(model, url, jobs[:1]))  # the first batch probes the model
        alone, *_ = asyncio.run(step(model, url, jobs[:1]))
        whole, busy, count, records = asyncio.run(step(model, url, jobs))
    refined = sum(r.kind == "refined" and r.score.scored for r in records)
    ratio = whole / max(busy, alone)
    print(f"{len(jobs)} rollouts, {refined} refined and scored, judge and coach {LATENCY_S:.0f} s")
    print(f"{'step':24}{whole:8.2f} s")
    print(f"{'sampler busy':24}{busy:8.2f} s   in {count} batches")
    print(f"{'one rollout alone':24}{alone:8.2f} s")
    print(f"{'step / max of the two':24}{ratio:8.2f}     budget {BUDGET}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deterministic", action="store_true", help="sample in fixed batches")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help="run the judge server (internal)")
    args = parser.parse_args()
    if args.serve:
        serve()
    with tempfile.TemporaryDirectory() as folder:
        return int(measure(Path(folder), args.deterministic, args.batch_size) > BUDGET)


if __name__ == "__main__":
    sys.exit(main())
