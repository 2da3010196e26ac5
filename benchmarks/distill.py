"""Three experts, one generalist: what rejection sampling keeps of them, and on-policy teachers.

One tiny model with one vocabulary is warmed up by lessons on three tasks: plain stories of `tomi`,
`secret_keeper` (a dialogue with a scripted visitor, over HTTP on this machine) and
`examples/cast_of_people`. It follows feedback on all of them and is far from good without. Ditto
makes an expert of it for each task, and `soul distill` one generalist of the experts by two roads
with equally many samples: rejection sampling with SFT, and on-policy distillation with every expert
as the teacher of its task. Everything is measured greedily on held-out rows.

    .venv/bin/python benchmarks/distill.py --out runs/distill
    .venv/bin/python benchmarks/distill.py --report runs/distill

Every stage is an ordinary run folder: the first command takes up what was stopped.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from soulkit.data.files import write_rows
from soulkit.data.rows import group_key, groups_aside
from soulkit.demo.rows import BELIEFS, write_stories
from soulkit.eval.config import EvalConfig
from soulkit.eval.runner import run_eval
from soulkit.serving.partner import make_server
from soulkit.tasks.made import make_rows
from soulkit.tasks.registry import load_registry
from soulkit.tasks.secret_keeper.visitor import visitor_line
from soulkit.train.config import TrainConfig
from soulkit.train.run import train

STORIES, KEEPER, CAST = TASKS = ("tomi", "secret_keeper", "cast_of_people")
LESSONS = "keeper_lessons"
HERE = Path(__file__).parent
CUES = ("job", "town", "pet")
WARMUP: dict[str, Any] = {
    "method": "sft", "model": "tiny", "full": True, "lr": 2e-3, "lr_schedule": "cosine",
    "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.01, "sft_feedback": 0.6,
    "sft_feedback_always": {"question": BELIEFS}, "checkpoint_every": 1000, "coach": "terse",
}  # fmt: skip
EXPERT: dict[str, Any] = {
    "method": "ditto", "lr": 1e-3, "group_size": 8, "batch_size": 256, "checkpoint_every": 10,
    "keep_last": 1, "coach": "terse", "prompts_per_step": 64,
}  # fmt: skip
BY_TASK: dict[str, dict[str, Any]] = {
    STORIES: {"max_tokens": 8, "mini_batch_prompts": 16},
    KEEPER: {"max_tokens": 12, "mini_batch_prompts": 8, "prompts_per_step": 32},
    CAST: {"max_tokens": 6, "mini_batch_prompts": 8},
}


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    warmup: int = 400
    batch: int = 48
    experts: Mapping[str, int] = None  # type: ignore[assignment]
    values: int = 6
    stories: int = 9000
    talks: int = 2000
    people: int = 4000
    lessons: int = 12_000
    measured: int = 540


@dataclass(frozen=True)
class World:
    """One seed: its rows, its warmed-up base, its experts and what is made of them."""

    out: Path
    seed: int
    size: Size
    partner: str
    """The visitor's address as a player."""

    @property
    def tasks_file(self) -> Path:
        return self.out / "tasks" / "tasks.yaml"

    @property
    def base(self) -> Path:
        return self.out / "warmup" / "model"

    def rows(self, task: str, split: str) -> Path:
        return self.out / "rows" / split / f"{task}.jsonl"

    # -- rows --------------------------------------------------------------------------------------

    def write_rows(self) -> None:
        """Tasks and rows of all splits, unless they are there."""
        if self.tasks_file.exists():
            return
        aside = self.out / "tasks.new"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(HERE.parent / "examples" / CAST, aside)
        shutil.copytree(HERE.parent / "soulkit" / "tasks" / KEEPER / "prompts", aside / "prompts",
                        dirs_exist_ok=True)  # fmt: skip
        shutil.copy(HERE / "_distill" / "lessons.py", aside)
        declared = yaml.safe_load((aside / "tasks.yaml").read_text(encoding="utf-8"))
        declared["tasks"] |= yaml.safe_load((HERE / "_distill" / "lessons.yaml").read_text())
        (aside / "tasks.yaml").write_text(yaml.safe_dump(declared), encoding="utf-8")
        for split in ("lessons", "train", "test"):
            (self.out / "rows" / split).mkdir(parents=True, exist_ok=True)
        self._write_made(aside / "tasks.yaml")
        write_stories(self.rows(STORIES, "train"), self.size.stories, self.seed, "train")
        write_stories(self.rows(STORIES, "test"), 1900, self.seed, "test")
        aside.rename(self.out / "tasks")

    def _write_made(self, tasks_file: Path) -> None:
        registry = load_registry(tasks_file)

        def make(task: str, count: int, part: int, **options: Any) -> list[dict[str, Any]]:
            texts = {name: str(value) for name, value in options.items()}
            return make_rows(registry.task(task), count, 3 * self.seed + part, texts)

        size, world = self.size, {"values": self.size.values, "world": self.seed}
        people = make(CAST, size.people, 0, **world)
        others = make(CAST, size.people, 0, names="others", **world)
        keys = groups_aside([group_key(row, CUES) for row in people], 0.125, "test")
        unseen = [r for r in (*people, *others) if group_key(r, CUES) in keys]
        self._write(CAST, "lessons", make(CAST, size.lessons, 2, kind="lessons", **world))
        self._write(CAST, "train", [r for r in people if group_key(r, CUES) not in keys])
        self._write(CAST, "test", unseen[: size.measured])
        self._write(LESSONS, "lessons", make(LESSONS, size.lessons, 2))
        self._write(KEEPER, "train", make(KEEPER, size.talks, 0))
        self._write(KEEPER, "test", make(KEEPER, size.measured, 1))

    def _write(self, task: str, split: str, rows: list[dict[str, Any]]) -> None:
        write_rows(self.rows(task, split), rows, data_source=task)

    # -- base and experts --------------------------------------------------------------------------

    def warm_up(self) -> None:
        tasks = {STORIES: 1.0, LESSONS: 1.0, CAST: 1.0}
        data = {
            STORIES: str(self.rows(STORIES, "train")),
            LESSONS: str(self.rows(LESSONS, "lessons")),
            CAST: str(self.rows(CAST, "lessons")),
        }
        self.train(
            "warmup",
            WARMUP,
            steps=self.size.warmup,
            sft_batch=self.size.batch,
            tasks=tasks,
            data=data,
            rows_per_task=4000,
        )

    def make_expert(self, task: str) -> None:
        self.train(
            f"experts/{task}",
            {**EXPERT, **BY_TASK[task]},
            model=str(self.base),
            steps=self.size.experts[task],
            tasks={task: 1.0},
            data={task: str(self.rows(task, "train"))},
            partner=self.partner,
        )

    def train(self, name: str, settings: Mapping[str, Any], **more: Any) -> None:
        config = TrainConfig.model_validate({
            **settings, **more, "tasks_file": str(self.tasks_file), "seed": self.seed,
        })  # fmt: skip
        import time

        at = time.monotonic()

        def show(line):
            r = line.rewards
            if config.method == "sft":
                if line.step % 40 == 0:
                    print(name, line.step, line.learned.loss, line.train_seconds, flush=True)
            else:
                print(
                    name,
                    line.step,
                    "draft",
                    r.draft,
                    "ref",
                    r.refined,
                    line.sample_seconds,
                    line.train_seconds,
                    flush=True,
                )

        train(config, self.out / name, show)
        print(name, "took", round(time.monotonic() - at), flush=True)

    def measure(self, name: str, task: str, adapter: Path | None) -> None:
        config = EvalConfig(
            kind="local", model=str(self.base), adapter=str(adapter) if adapter else None,
            tasks=(task,), tasks_file=str(self.tasks_file),
            data={task: str(self.rows(task, "test"))}, temperature=0.0,
            max_tokens=BY_TASK[task]["max_tokens"], batch_size=128, partner=self.partner,
        )  # fmt: skip
        _, summary = run_eval(config, self.out / "measured" / name / task)
        print(
            name,
            task,
            {k: v.mean for k, v in summary.tasks[task].items() if "/" not in k or "question" in k},
            summary.seconds,
            flush=True,
        )


@contextmanager
def visitor(port: int = 0) -> Iterator[str]:
    server = make_server(visitor_line, "visitor", port=port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"endpoint:visitor@http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--values", type=int, default=6)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--experts", default="tomi:30,secret_keeper:20,cast_of_people:30")
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    experts = {k: int(v) for k, v in (x.split(":") for x in chosen.experts.split(","))}
    with visitor(chosen.port) as partner:
        world = World(
            chosen.out,
            0,
            Size(warmup=chosen.warmup, batch=chosen.batch, values=chosen.values, experts=experts),
            partner,
        )
        world.write_rows()
        world.warm_up()
        for task in TASKS:
            world.measure("base", task, None)
        for task in experts:
            world.make_expert(task)
            world.measure("expert", task, world.out / "experts" / task / "model")


if __name__ == "__main__":
    main()
