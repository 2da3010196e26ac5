"""Base weights that are split over the ranks of a job (`--shard`), with FSDP2.

Each rank keeps a piece of every layer; the pieces are put together for the layer's pass. Whole stay
the output layer (ranks call it different numbers of times), embeddings that share its weights, and
adapters, whose gradients are added up as without `--shard`. With all weights trained, FSDP adds up
the gradients of the pieces, and a rank has the optimizer state of its pieces only. Every pass needs
all ranks, so a rank without a pack takes part with an empty one.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVarTuple

import torch
from torch import Tensor

from soulkit.errors import ModelLoadError
from soulkit.models.local.loading import is_peft
from soulkit.models.local.quantize import is_quantised
from soulkit.train.ranks.world import is_split, on_all_ranks, ranks

Rest = TypeVarTuple("Rest")


# --- loading --------------------------------------------------------------------------------------


def load_on_ranks(load: Callable[[], tuple[Any, *Rest]], device: torch.device) -> tuple[Any, *Rest]:
    """What `load` returns: a model and other things. Rank 0 is the first, so that only it
    downloads. In a sharded job `load` must leave the model in the host's memory; it is then split
    and moved to `device`, and the ranks of a host take turns, so that it holds one whole model."""
    world = ranks()
    hosts = world.gather(socket.gethostname())
    turn, turns = min(world.rank, 1), min(world.size, 2)
    if world.sharded:
        from torch.distributed.device_mesh import init_device_mesh

        turn, turns = hosts[: world.rank].count(hosts[world.rank]), max(Counter(hosts).values())
        mesh = init_device_mesh(device.type, (world.size,))
    for number in range(turns):
        if number == turn:
            loaded = load()
        if number == turn and world.sharded:
            model = loaded[0]
            _refuse_unsplittable(model.get_base_model() if is_peft(model) else model)
            split_layers(model, mesh)
            model.to(device)
        world.gather(None)
    return loaded


def _refuse_unsplittable(causal: Any) -> None:
    packed = is_quantised(causal)
    if packed not in ("", "nf4") or not _layers(causal.get_decoder()):
        raise ModelLoadError(
            f"--shard does not work with '{causal.config.name_or_path}'.",
            f"Its weights are quantised ({packed})." if packed else "It has no list of layers.",
            "Leave out --shard, or use the model in bfloat16 or float32.",
        )


def split_layers(model: Any, mesh: Any) -> None:
    """Split the base weights of `model` over the ranks of a device mesh, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    causal = model.get_base_model() if is_peft(model) else model
    decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    whole = {p for p in model.parameters() if not p.dim()} | set(head.parameters())
    if is_peft(model):
        own = model.base_model.prefix  # of the names of adapter weights, trained or not
        whole |= {p for name, p in model.named_parameters() if p.requires_grad or own in name}
    embedding = decoder.get_input_embeddings()
    apart = [] if embedding.weight is head.weight else [embedding]
    for part in (*_beside(causal, decoder, head), *_layers(decoder), *apart, decoder):
        # Not even the last part stays whole after a pass: its weights may change before the next.
        fully_shard(part, mesh=mesh, ignored_params=whole, reshard_after_forward=True)
        part.set_gradient_divide_factor(1.0)  # sums, not means
        part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


def whole_parts(decoder: Any) -> Iterator[Any]:
    """The decoder, or, if it is split, its layers and its last norm one by one, each with whole
    weights until the next is asked for."""
    if not hasattr(decoder, "unshard"):
        yield decoder
        return
    layers = [(layer, layer) for layer in _layers(decoder)]
    for part, inner in (*layers, (decoder, getattr(decoder, "norm", torch.nn.Module()))):
        part.unshard()
        try:
            yield inner
        finally:
            part.reshard()


def _beside(module: Any, decoder: Any, head: Any) -> Iterator[Any]:
    """The largest parts of a model without its decoder and output layer, such as a vision tower."""
    for part in module.children():
        if part is not decoder and any(inner is decoder for inner in part.modules()):
            yield from _beside(part, decoder, head)
        elif part not in (decoder, head) and any(True for _ in part.parameters()):
            yield part


def _layers(decoder: Any) -> list[Any]:
    """The decoder's layers; empty if it has no list of them."""
    lists = (part for part in decoder.children() if isinstance(part, torch.nn.ModuleList))
    return list(max(lists, key=len, default=()))


# --- weights of which every rank has a piece ------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with the pieces of all ranks, which must ask for it together."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def whole_on_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` as `whole`, in the memory of the host of rank 0; empty on other ranks. Tensors that
    share their memory still do."""
    kept, by_place = {}, dict[int, Tensor]()
    for name, tensor in tensors.items():
        held = whole(tensor.detach())
        if not ranks().rank:
            # Wrapped tensors, such as split ones, have no address.
            place = (not is_split(tensor) and tensor.data_ptr()) or id(tensor)
            kept[name] = by_place.setdefault(place, held.cpu())
    return kept


@on_all_ranks
def whole_weights(policy: Any) -> dict[str, Tensor] | None:
    """Name → weight of a model whose trained weights are split, on rank 0; None for any other."""
    split = any(is_split(p) for _, p in policy.trained)
    return whole_on_first(policy.model.state_dict()) if split else None


class FirstRankTensors:
    """Tensors by `weight` or `weight:state`, which only rank 0 has; others know their names."""

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self.tensors = tensors

    def __reduce__(self) -> Any:
        return FirstRankTensors, (dict.fromkeys(self.tensors),)


@on_all_ranks
def put_pieces(policy: Any, optimizer: torch.optim.Optimizer, held: FirstRankTensors) -> None:
    """Give every rank its pieces of split weights or of their moments."""
    from torch.distributed.tensor import distribute_tensor

    places = {name: p for name, p in policy.trained if is_split(p)}
    for key, tensor in held.tensors.items():
        name, _, state = key.partition(":")
        if name in places and state != "step":
            p = places[name]
            full = torch.empty(p.shape) if tensor is None else tensor
            piece = distribute_tensor(full.to(p.dtype), p.device_mesh, p.placements)
            if state:
                optimizer.state[p][state] = piece
            else:
                p.detach().copy_(piece)


def clip_split(weights: Sequence[Any], most: float) -> float:
    """As torch's `clip_grad_norm_`, if gradients of some `weights` are split over the ranks."""
    pieces = [p.grad.to_local() for p in weights if is_split(p)]
    plain = [p.grad for p in weights if not is_split(p)]
    split_norm, common = (float(torch.nn.utils.get_total_norm(some)) for some in (pieces, plain))
    norm = math.hypot(*ranks().gather(split_norm), common)
    for gradient in (*pieces, *plain):
        gradient.mul_(min(1.0, most / (norm + 1e-6)))
    return norm
