"""Checkpoints put back weights and optimizer to the bit; a damaged one is never used.

A resume puts back all that was trained, and names what a checkpoint lacks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from soulkit.errors import RunError
from soulkit.models.local.loading import ADAPTER, save_adapter
from soulkit.models.local.sampler import LocalModel
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.update import Tally, update
from soulkit.train.state.checkpoint import (
    POSITION,
    TRAINED,
    DamagedCheckpoint,
    Position,
    _digest,
    _files,
    _sha256,
    among_best,
    damage,
    export_best,
    load_checkpoint,
    prune,
    ranking,
    read_position,
    resume_checkpoint,
    save_checkpoint,
)
from soulkit.train.step import with_advantages
from tests.support.training import TOKENIZER, config, jolt, policy_of, random_model, step_of

SMALL = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def adam(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in policy.trained], lr=1e-3)


def step(policy: Policy, optimizer: torch.optim.Optimizer, seed: int) -> None:
    settings = config(**SMALL)
    prepared = prepare_step(policy, with_advantages(step_of(seed, examples=2), settings), settings)
    update(policy, optimizer, prepared, range(len(prepared.sequences)), settings, Tally())


def position(policy: Policy, number: int = 2, dev: float | None = None) -> Position:
    return Position(number, 10, 20, policy.version(), seconds=1.5, dev=dev)


def write(folder: Path, policy: Policy, number: int, dev: float | None = None) -> Path:
    """A checkpoint of weights of its own."""
    jolt(policy, 0.01, number)
    return save_checkpoint(folder, policy, adam(policy), position(policy, number, dev))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("full", [False, True])
def test_training_goes_on_to_the_bit(tmp_path: Path, folder: Path, full: bool) -> None:
    settings = {**SMALL, "full": full, "method": "sft" if full else "ditto"}
    policy = policy_of(folder, move=0.01, **settings)
    optimizer = adam(policy)
    for seed in (0, 1):
        step(policy, optimizer, seed)
    saved = save_checkpoint(tmp_path, policy, optimizer, position(policy))
    step(policy, optimizer, 2)

    again = policy_of(folder, move=0.3, **settings)
    fresh = adam(again)
    assert load_checkpoint(saved, again, fresh) == position(again)
    step(again, fresh, 2)
    assert again.version() == policy.version()
    for (_, a), (_, b) in zip(policy.trained, again.trained, strict=True):
        assert torch.equal(a, b)
        for slot, value in optimizer.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(fresh.state[b][slot]))


def whole_modules(folder: Path, into: Path) -> Path:
    """An adapter that also trains a whole module and biases."""
    base = LocalModel.load(folder).model
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"],
                      bias="lora_only", task_type="CAUSAL_LM")  # fmt: skip
    into.mkdir()
    save_adapter(get_peft_model(base, lora, adapter_name=ADAPTER), into)
    return into


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["lora", "modules", "full"])
def test_weights_are_stored_once(tmp_path: Path, folder: Path, kind: str, dtype: str) -> None:
    settings: dict[str, object] = {"dtype": dtype}
    if kind == "full":
        settings |= {"full": True, "method": "sft"}
    elif kind == "modules":
        settings["adapter"] = str(whole_modules(folder, tmp_path / "adapter"))
    policy = policy_of(folder, move=0.01, **settings)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    assert not (saved / TRAINED).exists()
    again = policy_of(folder, move=0.3, **settings)
    load_checkpoint(saved, again, adam(again))
    assert again.version() == policy.version()


def test_a_weight_that_the_model_folder_lacks_or_rounds_is_stored_beside_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, again = policy_of(folder, **SMALL), policy_of(folder, move=0.3, **SMALL)
    usual = Policy.save

    def save(policy: Policy, place: Path, step: int | None = None) -> None:
        usual(policy, place, step)
        _, (second, b), *rest = load_file(place / FILES[0]).items()
        save_file({second: b.to(torch.bfloat16), **dict(rest)}, place / FILES[0])

    monkeypatch.setattr(Policy, "save", save)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    assert len(load_file(saved / TRAINED)) == 2
    load_checkpoint(saved, again, adam(again))
    assert again.version() == policy.version()


def test_an_earlier_checkpoint_with_all_weights_apart_is_read(tmp_path: Path, folder: Path) -> None:
    policy, again = policy_of(folder, **SMALL), policy_of(folder, move=0.3, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    save_file({name: p.detach().clone() for name, p in policy.trained}, saved / TRAINED)
    (saved / FILES[0]).write_bytes(b"of another format")
    sign(saved)
    load_checkpoint(saved, again, adam(again))
    assert again.version() == policy.version()


def test_before_the_first_update_there_is_no_optimizer_state(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    fresh = adam(policy)
    load_checkpoint(saved, policy, fresh)
    assert not fresh.state


def test_the_moving_average_is_put_back(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    policy.ema = {name: torch.full_like(p, 0.25) for name, p in policy.trained}
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    again = policy_of(folder, move=0.3, **SMALL)
    with pytest.raises(RunError, match="has a moving average"):
        load_checkpoint(saved, again, adam(again))
    again.ema = {name: p.detach().clone() for name, p in again.trained}
    load_checkpoint(saved, again, adam(again))
    assert again.ema.keys() == policy.ema.keys()
    for name, average in policy.ema.items():
        assert torch.equal(again.ema[name], average)


def test_a_checkpoint_without_the_average_does_not_serve_a_run_with_one(
    tmp_path: Path, folder: Path
) -> None:
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    policy.ema = {name: p.detach().clone() for name, p in policy.trained}
    with pytest.raises(RunError, match="has no moving average"):
        load_checkpoint(saved, policy, adam(policy))


def test_a_run_without_checkpoints_begins_at_the_first_step(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    assert resume_checkpoint(tmp_path / "none", policy, adam(policy)) == (None, [])
    (tmp_path / ".step_000011.part").mkdir()
    assert resume_checkpoint(tmp_path, policy, adam(policy)) == (None, [])
    later = write(tmp_path, policy, 11)
    assert names(tmp_path) == [later.name]


@pytest.mark.parametrize("whole", [True, False])
def test_a_kill_between_two_renames_leaves_one_of_both_checkpoints(
    tmp_path: Path, folder: Path, whole: bool
) -> None:
    policy = policy_of(folder, **SMALL)
    saved = write(tmp_path, policy, 11)
    for kind in ("old", "part"):
        shutil.copytree(saved, tmp_path / f".{saved.name}.{kind}")
    shutil.rmtree(saved)
    if not whole:  # then it was a checkpoint that was being deleted, and another was begun
        (tmp_path / f".{saved.name}.part" / "position.json").unlink()
    place, remarks = resume_checkpoint(tmp_path, policy, adam(policy))
    assert (place.step if place else None, remarks) == (11 if whole else None, [])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = ("adapter_model.safetensors", "optimizer.safetensors", "position.json",
         "adapter_config.json")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "harm"),
    [*((name, flip) for name in FILES), (FILES[0], halve), (FILES[0], Path.unlink)],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, folder: Path, name: str, harm: Callable[[Path], None]
) -> None:
    policy = policy_of(folder, **SMALL)
    write(tmp_path, policy, 2)
    version = policy.version()
    harm(write(tmp_path, policy, 4) / name)
    checkpoint, remarks = resume_checkpoint(tmp_path, policy, adam(policy))
    assert checkpoint is not None and checkpoint.step == 2 and policy.version() == version
    (remark,) = remarks
    assert name in remark and "\n" not in remark
    assert "step_000004 is damaged" in remark and "resuming from step_000002" in remark
    assert names(tmp_path) == ["damaged_step_000004", "step_000002"]
    assert resume_checkpoint(tmp_path, policy, adam(policy)) == (checkpoint, [])  # said once


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(
    tmp_path: Path, folder: Path
) -> None:
    policy = policy_of(folder, **SMALL)
    for number in (2, 4):
        flip(write(tmp_path, policy, number) / FILES[0])
    before = policy.version()
    for _ in range(2):
        with pytest.raises(RunError, match="All 2 checkpoints") as raised:
            resume_checkpoint(tmp_path, policy, adam(policy))
        assert all(raised.value.lines())
    assert policy.version() == before and names(tmp_path) == ["step_000002", "step_000004"]


def test_a_damaged_checkpoint_is_not_loaded_by_name(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = write(tmp_path, policy, 2)
    flip(saved / "optimizer.safetensors")
    before = policy.version()
    with pytest.raises(DamagedCheckpoint, match="step_000002 is damaged"):
        load_checkpoint(saved, policy, adam(policy))
    assert policy.version() == before


def test_a_whole_checkpoint_of_the_same_weights_is_left_alone(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = write(tmp_path, policy, 2, dev=0.5)
    inode = saved.stat().st_ino
    save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    assert saved.stat().st_ino == inode and read_position(saved).dev == 0.5
    flip(saved / FILES[0])
    save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    assert saved.stat().st_ino != inode and not damage(saved)
    assert names(tmp_path) == ["step_000002"]


def test_no_file_of_a_checkpoint_can_run_code(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    optimizer = adam(policy)
    step(policy, optimizer, 0)
    saved = save_checkpoint(tmp_path, policy, optimizer, position(policy))
    assert {p.suffix for p in saved.rglob("*") if p.is_file()} == {
        ".json",
        ".safetensors",
        ".jinja",
    }


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    other = position(policy)
    jolt(policy, 0.01, 3)
    path = save_checkpoint(tmp_path / "other", policy, adam(policy), other)
    assert not damage(path) and not damage(saved)
    with pytest.raises(RunError, match="do not match its record"):
        load_checkpoint(path, policy, adam(policy))


def test_old_checkpoints_go(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    for number in (1, 2, 3, 10):
        write(tmp_path, policy, number)
    (tmp_path / ".step_000002.old").mkdir()  # a deletion that was killed
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step_000003", "step_000010"]


def test_the_best_stay_beside_the_newest(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    scores = {1: 0.5, 2: 0.75, 3: None, 4: 0.75, 5: 0.25, 6: None}
    for number, dev in scores.items():
        write(tmp_path, policy, number, dev)
    ranked = [(p.name, merit) for p, (_, merit) in ranking(tmp_path)]
    assert ranked == [("step_000004", 0.75), ("step_000002", 0.75), ("step_000001", 0.5),
                      ("step_000005", 0.25)]  # fmt: skip
    prune(tmp_path, 1, 2)
    assert names(tmp_path) == ["step_000002", "step_000004", "step_000006"]
    assert among_best(tmp_path, (True, 0.75), 2) and among_best(tmp_path, (True, 0.8), 2)
    assert not among_best(tmp_path, (True, 0.7), 2) and among_best(tmp_path, (True, 0.1), 3)
    assert not among_best(tmp_path, (False, 9.0), 2)  # of a loss, on no scale of theirs
    assert not among_best(tmp_path, None, 2) and not among_best(tmp_path, (True, 1.0), 0)
    prune(tmp_path, 1, 0)
    assert names(tmp_path) == ["step_000006"]


def test_the_best_model_is_copied_without_the_state_of_training(
    tmp_path: Path, folder: Path
) -> None:
    policy = policy_of(folder, **SMALL)
    points = tmp_path / "checkpoints"
    assert export_best(tmp_path, points) is None
    good = write(points, policy, 2, dev=0.5)
    best = write(points, policy, 4, dev=0.75)
    assert export_best(tmp_path, points) == best
    model = {"adapter_config.json", "adapter_model.safetensors"}
    assert set(names(tmp_path / "best")) == model | TOKENIZER
    weights = "adapter_model.safetensors"
    assert (tmp_path / "best" / weights).read_bytes() == (best / weights).read_bytes()
    flip(best / weights)
    assert export_best(tmp_path, points) == good
    assert (tmp_path / "best" / weights).read_bytes() == (good / weights).read_bytes()


STATE_FILES = ("adapter_model.safetensors", "optimizer.safetensors", "teacher.safetensors")

Tensors = dict[str, Tensor]


def stepped(policy: Policy, spared: int = 0) -> torch.optim.Optimizer:
    """An optimizer after one update in which the first `spared` weights had no gradient."""
    optimizer = adam(policy)
    for _, parameter in policy.trained[spared:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def saved(folder: Path, policy: Policy, spared: int = 0) -> Path:
    policy.ema = {name: p.detach().clone() for name, p in policy.trained}
    optimizer = stepped(policy, spared)
    return save_checkpoint(folder, policy, optimizer, Position(1, 0, 0, policy.version()))


def sign(path: Path) -> None:
    """Note the files of a checkpoint as they are now, as if they had been written so."""
    noted = json.loads((path / POSITION).read_text())
    del noted["sha256"]
    noted["files"] = {one.name: _sha256(one) for one in _files(path)}
    (path / POSITION).write_text(json.dumps({**noted, "sha256": _digest(noted)}))
    read_position(path)


def half(tensors: Tensors) -> Tensors:
    weights = sorted({k.partition(":")[0] for k in tensors})
    return {k: t for k, t in tensors.items() if k.partition(":")[0] in weights[::2]}


def stranger(tensors: Tensors) -> Tensors:
    return tensors | {
        name.replace("layers.0", "layers.9"): t.clone() for name, t in tensors.items()
    }


def narrow(tensors: Tensors) -> Tensors:
    return {k: t[:1].clone() if t.ndim else t for k, t in tensors.items()}


@pytest.mark.parametrize("file", STATE_FILES)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (half, "missing"),
        (stranger, "not in the model"),
        (narrow, "with another shape"),
        (lambda t: {}, ""),
    ],
)
def test_other_tensors_than_those_that_are_trained(
    file: str, change: Callable[[Tensors], Tensors], text: str, folder: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, policy_of(folder, **SMALL))
    if (file, change) == (STATE_FILES[0], stranger):  # the model's file may have more: an older one
        file = TRAINED
        policy = policy_of(folder, **SMALL)
        save_file({name: p.detach().clone() for name, p in policy.trained}, path / file)
    save_file(change(load_file(path / file)), path / file)
    sign(path)
    again = policy_of(folder, **SMALL)
    again.ema = {name: p.detach().clone() for name, p in again.trained}
    if file == "optimizer.safetensors" and not text:
        load_checkpoint(path, again, adam(again))  # a run that has had no update yet
        return
    with pytest.raises(RunError, match=r"step_000001 do not match its record") as caught:
        load_checkpoint(path, again, adam(again))
    where = "the saved model" if file == STATE_FILES[0] else file
    assert where in caught.value.why and (text or "missing") in caught.value.why
    assert "lora_" in caught.value.why and caught.value.why.count("lora_") <= 6


def test_a_weight_without_a_gradient_begins_where_it_would_have(
    folder: Path, tmp_path: Path
) -> None:
    policy, again = policy_of(folder, **SMALL), policy_of(folder, **SMALL)
    policy.ema = again.ema = {name: p.detach().clone() for name, p in policy.trained}
    optimizer, fresh = stepped(policy, spared=3), adam(again)
    position = Position(1, 0, 0, policy.version())
    load_checkpoint(save_checkpoint(tmp_path, policy, optimizer, position), again, fresh)
    for model, adam_ in ((policy, optimizer), (again, fresh)):
        for _, parameter in model.trained:
            parameter.grad = torch.full_like(parameter, 0.5)
        adam_.step()
    assert again.version() == policy.version()


def test_an_earlier_checkpoint_that_left_such_weights_out_is_read(
    folder: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, policy_of(folder, **SMALL))
    save_file(half(load_file(path / STATE_FILES[1])), path / STATE_FILES[1])
    noted = json.loads((path / POSITION).read_text())
    del noted["optimizer_complete"]
    (path / POSITION).write_text(json.dumps(noted))
    sign(path)
    again = policy_of(folder, **SMALL)
    again.ema = {name: p.detach().clone() for name, p in again.trained}
    fresh = adam(again)
    load_checkpoint(path, again, fresh)
    assert len(fresh.state) == len(again.trained) // 2


def test_all_weights_of_a_model_are_put_back_or_named(folder: Path, tmp_path: Path) -> None:
    full = {"full": True, "method": "sft"}
    policy = policy_of(folder, move=0.0, **full)
    jolt(policy, 0.01, 1)
    path = saved(tmp_path, policy)
    save_file(half(load_file(path / "model.safetensors")), path / "model.safetensors")
    sign(path)
    again = policy_of(folder, move=0.0, **full)
    with pytest.raises(RunError) as caught:
        load_checkpoint(path, again, adam(again))
    assert "weights missing: model." in caught.value.why and "more" in caught.value.why
