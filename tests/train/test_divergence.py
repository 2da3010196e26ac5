"""Divergences against numbers worked out by hand; the gradient is the student's alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.errors import ConfigError
from soulkit.train.maths.divergence import divergence

STUDENT = (0.5, 0.3, 0.15, 0.05)
TEACHER = (0.2, 0.4, 0.1, 0.3)


def logits(probabilities: tuple[float, ...]) -> torch.Tensor:
    """Logits of a row; shifted, because only differences count."""
    return torch.tensor([probabilities], dtype=torch.float64).log() + 3.0


def kl(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def value(**options: Any) -> float:
    return float(divergence(logits(STUDENT), logits(TEACHER), **options))


def test_the_whole_vocabulary_by_hand() -> None:
    assert value(top_k=None) == pytest.approx(kl(STUDENT, TEACHER))
    assert value(top_k=None, kind="forward_kl") == pytest.approx(kl(TEACHER, STUDENT))
    middle = tuple(0.3 * t + 0.7 * s for s, t in zip(STUDENT, TEACHER, strict=True))
    want = 0.3 * kl(TEACHER, middle) + 0.7 * kl(STUDENT, middle)
    assert value(top_k=None, kind="jsd", beta=0.3) == pytest.approx(want)


def test_the_students_likeliest_two_renormalised() -> None:
    """Tokens 0 and 1, though the teacher likes token 3 better than token 0."""
    student, teacher = (0.5 / 0.8, 0.3 / 0.8), (0.2 / 0.6, 0.4 / 0.6)
    assert value(top_k=2) == pytest.approx(kl(student, teacher))
    assert value(top_k=2, kind="forward_kl") == pytest.approx(kl(teacher, student))


def test_the_students_likeliest_two_and_one_bucket_for_the_rest() -> None:
    student, teacher = (0.5, 0.3, 0.2), (0.2, 0.4, 0.4)
    assert value(top_k=2, tail="bucket") == pytest.approx(kl(student, teacher))
    middle = tuple((s + t) / 2 for s, t in zip(student, teacher, strict=True))
    want = (kl(teacher, middle) + kl(student, middle)) / 2
    assert value(top_k=2, tail="bucket", kind="jsd") == pytest.approx(want)


@pytest.mark.parametrize("tail", ["renorm", "bucket"])
@pytest.mark.parametrize("top_k", [4, 9])
def test_as_many_as_there_are_is_all(tail: str, top_k: int) -> None:
    assert value(top_k=top_k, tail=tail) == pytest.approx(value(top_k=None))


def test_temperature_divides_both_logits() -> None:
    def warmed(row: tuple[float, ...]) -> tuple[float, ...]:
        powers = [p ** (1 / 5) for p in row]
        return tuple(p / sum(powers) for p in powers)

    want = kl(warmed(STUDENT), warmed(TEACHER))
    assert value(top_k=None, temperature=5.0) == pytest.approx(want)


def test_a_rest_that_is_tiny_keeps_its_digits() -> None:
    """One minus the inside would be 0 here, and its logarithm minus infinity."""
    student = torch.tensor([[0.0, -60.0, -61.0]], requires_grad=True)
    values = divergence(student, torch.tensor([[0.0, -1.0, -2.0]]), top_k=1, tail="bucket")
    values.sum().backward()
    assert torch.isfinite(values).all() and student.grad is not None
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize(("top_k", "tail"), [(None, "renorm"), (3, "renorm"), (3, "bucket")])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_properties(kind: Any, top_k: int | None, tail: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 5, 7, generator=random, dtype=torch.float64) * 2
    student.requires_grad_()
    teacher.requires_grad_()
    options: dict[str, Any] = {"kind": kind, "top_k": top_k, "tail": tail}
    values = divergence(student, teacher, **options)
    assert values.shape == (5,) and bool((values >= -1e-12).all())
    values.sum().backward()
    assert teacher.grad is None and student.grad is not None
    assert bool((student.grad.sum(-1).abs() < 1e-9).all())  # only differences of logits count
    same = divergence(student, student.detach(), **options)
    assert bool((same.abs() < 1e-12).all())
    step = divergence(student.detach() - 1e-6 * student.grad, teacher, **options)
    assert float(step.detach().sum()) < float(values.detach().sum())
    if tail == "bucket" and kind != "jsd":  # merging outcomes loses information
        assert bool((values <= divergence(student, teacher, kind=kind, top_k=None) + 1e-12).all())


@pytest.mark.parametrize("wrong", [{"kind": "kl"}, {"tail": "rest"}])
def test_unknown_names_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        divergence(logits(STUDENT), logits(TEACHER), **wrong)
