"""Several teachers: every task is read by its own expert, out of one frozen base."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.tiny import build_tiny
from soulkit.train.config import TrainConfig
from soulkit.train.forward.experts import experts_of
from soulkit.train.forward.policy import Policy, load_policy
from soulkit.train.forward.prepare import prepare_step
from soulkit.train.forward.teacher import Teacher, load_teacher
from soulkit.train.forward.update import take_updates
from soulkit.train.objectives.registry import make_objective
from soulkit.train.objectives.sequences import Span, TrainSequence
from soulkit.train.state.note import model_note
from soulkit.train.state.skips import Skips
from tests.support.evaluation import soul
from tests.support.resuming import assert_same
from tests.support.training import config, jolt, policy_of, random_model, sequence, span

TWO = {"tomi": 1.0, "secret_keeper": 1.0}
ROWS = ("--data", "tomi=synth:4", "--data", "hitom=synth:4")
SMALL: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "base", ["a", "few", "words"])


@pytest.fixture(scope="module")
def experts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of two ranks, which differ from each other and from nothing."""
    folders, place = {}, tmp_path_factory.mktemp("experts")
    for seed, task in enumerate(TWO, 7):
        settings = config(model=str(base), tasks={task: 1.0}, lora={"r": seed - 4, "alpha": 8})
        policy = load_policy(settings, base)
        jolt(policy, 0.08, seed)
        policy.note = model_note(settings, policy)
        policy.save(place / task)
        folders[task] = str(place / task)
    return folders


def opd(base: Path, experts: dict[str, str], **settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {"method": "opd", "model": str(base), "tasks": TWO, **SMALL}
    return config(**{**plain, "teacher_adapters": experts, **settings})


def teacher_of(settings: TrainConfig, student: Policy) -> Policy:
    teacher = load_teacher(settings, make_objective(settings), student)
    assert teacher is not None
    return teacher


@pytest.fixture
def student(base: Path) -> Policy:
    return policy_of(base, **SMALL)


def spans() -> list[Span]:
    """Six sequences, some with a prefix in common across the tasks."""
    rng = random.Random(5)
    return [span(rng, (301, 302, 303 + i // 3), (3 + i % 3,)) for i in range(6)]


TASKS = ("tomi", "secret_keeper", "secret_keeper", "tomi", "secret_keeper", "tomi")


def alone(base: Path, adapter: str, student: Policy) -> Teacher:
    """The expert as the only teacher of a run."""
    return Teacher(teacher_of(opd(base, {}, teacher_adapter=adapter), student))


@pytest.mark.parametrize(("packing", "budget"), [("auto", 1000), ("off", 8)])
def test_every_span_is_read_by_the_expert_of_its_task(
    base: Path, experts: dict[str, str], student: Policy, packing: str, budget: int
) -> None:
    several = Teacher(teacher_of(opd(base, experts, packing=packing), student))
    assert not several.policy.trained
    all_spans = spans()
    logs, spreads = several.scores(all_spans, budget, TASKS)
    hidden = several.hidden(all_spans, budget, TASKS)
    edges = torch.tensor([0, *(s.n_trained for s in all_spans)]).cumsum(0).tolist()
    assert not several.policy.trained and not hidden.requires_grad
    single = {task: alone(base, adapter, student) for task, adapter in experts.items()}
    readings = {task: one.log_probs(all_spans, None) for task, one in single.items()}
    for i, task in enumerate(TASKS):
        assert torch.allclose(logs[i], readings[task][i], atol=1e-5)
        other = next(name for name in TWO if name != task)
        assert not torch.allclose(logs[i], readings[other][i], atol=1e-2)
        states = single[task].hidden([all_spans[i]], None)
        assert torch.allclose(hidden[edges[i] : edges[i + 1]], states, atol=1e-5)
        assert len(spreads[i]) == all_spans[i].n_trained


@pytest.mark.parametrize("form", ["token", "logits"])
def test_the_update_is_that_of_single_teachers_together(
    base: Path, experts: dict[str, str], student: Policy, form: str
) -> None:
    """The gradient of a mixture is the sum of what each expert's own sequences give it."""
    settings = opd(base, experts, opd_form=form, mini_batch_prompts=16)
    lessons = taught(spans(), settings)
    mixed = gradient(student, lessons, settings, Teacher(teacher_of(settings, student)))
    total = [torch.zeros_like(g) for g in mixed]
    tokens = sum(s.span.n_trained for s in lessons)
    for task, adapter in experts.items():
        part = [s for s in lessons if s.task == task]
        share = sum(s.span.n_trained for s in part) / tokens
        single = gradient(student, part, settings, alone(base, adapter, student))
        total = [t + share * g for t, g in zip(total, single, strict=True)]
    for one, other in zip(mixed, total, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)
    assert any(bool((g.abs() > 1e-4).any()) for g in mixed)


def taught(all_spans: Sequence[Span], settings: TrainConfig) -> list[TrainSequence]:
    lessons = []
    for i, (one, task) in enumerate(zip(all_spans, TASKS, strict=True)):
        plain = replace(sequence(one, "draft", f"x{i}", 0, 0.0), task=task, compared=False)
        form = {"loss": "divergence"} if settings.opd_form == "logits" else {"teacher_weight": 1.0}
        lessons.append(replace(plain, teacher=one, **form))
    return lessons


def gradient(
    policy: Policy, lessons: list[TrainSequence], settings: TrainConfig, teacher: Teacher
) -> list[Tensor]:
    """Of one update whose step is of no size, with no bound on its norm."""
    free = settings.model_copy(update={"max_grad_norm": 1e9})
    optimizer = torch.optim.SGD([p for _, p in policy.trained], lr=0.0)
    fixed = prepare_step(policy, lessons, free, teacher=teacher)
    assert take_updates(policy, optimizer, fixed, free, Skips()).updates == 1
    return [p.grad.clone() for _, p in policy.trained if p.grad is not None]


# --- who may teach --------------------------------------------------------------------------------


def test_a_bare_adapter_teaches_the_tasks_that_have_no_expert(base: Path) -> None:
    mixed = opd(base, {"tomi": "a"}, teacher_adapter="b")
    assert experts_of(mixed) == {"tomi": "a", "secret_keeper": "b"}
    assert experts_of(opd(base, {}, teacher_adapter="b")) == {}


def test_tasks_without_a_teacher_and_teachers_without_a_task_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("train", "opd", "--model", "m", "--task", "tomi,hitom", *ROWS)
    for teachers, words in (
        (("tomi=a",), "Nobody teaches hitom"),
        (("tomi=a", "hitom=b", "fantom=c"), "named for fantom, and it is not trained on"),
    ):
        flags = [text for one in teachers for text in ("--teacher-adapter", one)]
        assert soul(*command, *flags) == 2
        shown = capsys.readouterr().err
        assert words in shown and "Traceback" not in shown


def test_an_adapter_of_another_base_or_tokenizer_is_refused_by_name(
    base: Path, experts: dict[str, str], student: Policy, tmp_path: Path
) -> None:
    other = _copied(base, tmp_path / "other")
    _move(other)
    with pytest.raises(ConfigError, match=r"teacher of tomi.* another base") as raised:
        teacher_of(opd(other, experts), student)
    assert all(raised.value.lines())
    build_tiny(tmp_path / "words", ["quite", "another", "vocabulary"])
    foreign = _copied(Path(experts["secret_keeper"]), tmp_path / "foreign")
    (foreign / "tokenizer.json").write_bytes((tmp_path / "words/tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"teacher of secret_keeper.* another tokenizer"):
        teacher_of(opd(base, {**experts, "secret_keeper": str(foreign)}), student)


def _move(folder: Path, name: str = "model.safetensors") -> None:
    file = folder / name
    moved = {name: tensor * 1.01 for name, tensor in load_file(file).items()}
    save_file(moved, file, metadata={"format": "pt"})


def _copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_records_its_teachers_and_goes_on_with_them_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the bit without its last step; not at all when a teacher holds other weights."""
    base = random_model(tmp_path / "base", max_context=4096)
    experts = {task: _expert(base, task, tmp_path, seed) for seed, task in enumerate(MIXED)}
    flags = [text for pair in experts.items() for text in ("--teacher-adapter", "=".join(pair))]
    whole, again = tmp_path / "whole", tmp_path / "again"

    def command(out: Path) -> tuple[object, ...]:
        return (
            "train", "opd", "--model", base, "--task", ",".join(MIXED), *MIXED_ROWS, *flags,
            "--steps", 3, "--prompts", 4, "--group-size", 2, "--max-tokens", 4, "--lora-r", 4,
            "--lr", 1e-2, "--checkpoint-every", 1, "--set", "mini_batch_prompts=2",
            "--set", "deterministic=true", "--out", out,
        )  # fmt: skip

    assert soul(*command(whole)) == 0
    teachers = json.loads((whole / "provenance.json").read_text())["teachers"]
    assert {task: one["adapter"] for task, one in teachers.items()} == experts
    weights = {task: one["adapter_weights"] for task, one in teachers.items()}
    assert weights == {task: adapter_hash(folder) for task, folder in experts.items()}
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_000003")
    assert soul(*command(again)) == 0
    assert_same(again, whole)
    _move(Path(experts["hitom"]), "adapter_model.safetensors")
    capsys.readouterr()
    assert soul(*command(again)) == 2
    assert "teacher of hitom, '" in capsys.readouterr().err


MIXED = ("tomi", "hitom")
MIXED_ROWS = ("--data", "tomi=synth:8", "--data", "hitom=synth:8")


def _expert(base: Path, task: str, folder: Path, seed: int) -> str:
    policy = policy_of(base, **SMALL)
    jolt(policy, 0.05, seed)
    policy.save(folder / f"expert_{task}")
    return str(folder / f"expert_{task}")
