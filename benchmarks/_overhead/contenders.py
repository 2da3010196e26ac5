"""The contenders and their input files, which hold the same questions for all.

Example: `soulkit(files, url, 64).command(folder)` is the command line of `soul eval api` on the
rows in `files`; run it in the empty `folder`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _overhead.runs import Contender
from _overhead.server import MODEL

TASK = "tomi"
MAX_TOKENS = 32
ROWS, MANY, PROMPTS, PAIRS = "rows.jsonl", "many.jsonl", "prompts.json", "pairs.jsonl"
"""Input files: soulkit's rows, and their prompts and answers for the other tools."""

BARE = """
import asyncio, json, sys
import openai

async def main(path, url, workers, model, tokens):
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    client = openai.AsyncOpenAI(api_key="unused", base_url=url, max_retries=0, http_client=http)
    prompts = iter(json.load(open(path)))

    async def work():
        for prompt in prompts:
            await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": prompt}],
                temperature=0, max_tokens=int(tokens),
            )

    await asyncio.gather(*(work() for _ in range(int(workers))))
    await client.close()

asyncio.run(main(*sys.argv[1:]))
"""

INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate

@task
def bench():
    rows = json_dataset({path!r}, FieldSpec(input="prompt", target="gold"))
    return Task(dataset=rows, solver=generate(), scorer=pattern("<answer>(.*?)</answer>"))
"""

INSPECT_ACCURACY = """
import sys
from inspect_ai.log import read_eval_log
found = read_eval_log(sys.argv[1], header_only=True).results.scores[0].metrics
print(found["accuracy"].value)
"""

LM_EVAL_TASK = """
task: bench
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{gold}}}}"
generation_kwargs: {{until: [], do_sample: false, temperature: 0, max_gen_toks: {tokens}}}
filter_list:
  - name: answer
    filter: [{{function: regex, regex_pattern: "<answer>(.*?)</answer>"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def write_files(folder: str, episodes: int, rows: int) -> None:
    """Write the input of all contenders. Runs in its own process because its memory grows."""
    from soulkit.tasks.kit.loading import load_examples
    from soulkit.tasks.kit.made_rows import make_rows
    from soulkit.tasks.kit.registry import load_registry

    task = load_registry().task(TASK, "paper")
    made = Path(folder)
    for path, count in ((made / ROWS, episodes), (made / MANY, rows)):
        lines = (json.dumps({"data_source": TASK, **row}) for row in make_rows(task, count, 1))
        path.write_text("".join(f"{line}\n" for line in lines))
    examples = load_examples(task, [made / ROWS]).examples
    pairs = [{"prompt": task.preview(e)[0].text, "gold": task.gold_text(e)} for e in examples]
    (made / PROMPTS).write_text(json.dumps([pair["prompt"] for pair in pairs]))
    (made / PAIRS).write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def load_many(path: str, count: Any) -> None:
    """Load rows and render their prompts as an evaluation does; puts their number into `count`."""
    from soulkit.tasks.kit.loading import load_examples
    from soulkit.tasks.kit.registry import load_registry

    task = load_registry().task(TASK, "paper")
    prompts = [
        task.preview(example)[0].text for example in load_examples(task, [Path(path)]).examples
    ]
    count.value = len(prompts)


def bare(files: Path, url: str, at_once: int) -> Contender:
    def command(_: Path) -> list[str]:
        arguments = [str(files / PROMPTS), url, str(at_once), MODEL, str(MAX_TOKENS)]
        return [sys.executable, "-c", BARE, *arguments]

    return Contender("bare openai SDK", command, None)


def soulkit(files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        return [
            sys.executable, "-m", "soulkit.cli.app", "eval", "api", "--model", MODEL,
            "--base-url", url, "--task", TASK, "--data", f"{TASK}={files / ROWS}",
            "--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--concurrency", str(at_once),
            "--out", str(folder / "run"), "--json",
        ]  # fmt: skip

    def accuracy(_: Path, output: str) -> float:
        return float(json.loads(output)["tasks"][TASK]["value"]["mean"])

    return Contender("soul eval api", command, accuracy, asked_before=1)


def inspect_ai(python: str, files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        (folder / "bench.py").write_text(INSPECT_TASK.format(path=str(files / PAIRS)))
        return [
            python, "-c", "from inspect_ai._cli.main import main; main()", "eval", "bench.py",
            "--model", f"openai-api/bench/{MODEL}", "--model-base-url", url,
            "--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--log-dir", "logs",
            "--max-connections", str(at_once), "--max-samples", str(at_once),
            "--display", "plain",
        ]  # fmt: skip

    def accuracy(folder: Path, _: str) -> float:
        log = str(next((folder / "logs").glob("*.eval")))
        return float(subprocess.check_output([python, "-c", INSPECT_ACCURACY, log], text=True))

    return Contender("inspect_ai", command, accuracy, {"BENCH_API_KEY": "unused"})


def lm_eval(python: str, files: Path, url: str, at_once: int) -> Contender:
    def command(folder: Path) -> list[str]:
        task = LM_EVAL_TASK.format(path=files / PAIRS, tokens=MAX_TOKENS)
        (folder / "bench.yaml").write_text(task)
        model = (f"model={MODEL},base_url={url}/chat/completions,num_concurrent={at_once},"
                 "max_retries=1,tokenized_requests=False")  # fmt: skip
        return [
            python, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", model,
            "--tasks", "bench", "--include_path", str(folder), "--apply_chat_template",
            "--output_path", str(folder / "results"), "--log_samples",
        ]  # fmt: skip

    def accuracy(folder: Path, _: str) -> float:
        results = json.loads(next((folder / "results").rglob("results_*.json")).read_text())
        return float(results["results"]["bench"]["exact_match,answer"])

    offline = {"OPENAI_API_KEY": "unused", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
               "HF_HOME": str(files / "hf")}  # fmt: skip
    return Contender("lm-evaluation-harness", command, accuracy, offline)


def installed(python: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{python} has no {package}: the docstring of this script says how to install it"
        )
    return done.stdout.strip()
