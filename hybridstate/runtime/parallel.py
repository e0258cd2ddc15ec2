"""Tensor parallelism over the heads of linear attention: ranks of one engine, and a model cut for one of them.

Rank r of P computes key heads [r Hk / P, (r + 1) Hk / P) of every linear layer with their value heads, the contiguous
blocks of `plan.placement`: rows of the projections to q, k, v, gates and decays, the same channels of the convolution,
and the columns of the output projection. The output norm works inside a head. The sum of the ranks' outputs is the
layer's output, so one all-reduce follows each linear layer. Attention, MLPs, experts and embeddings run whole on every
rank: a reference for states and checkpoints on ranks, not the fastest way to share a model.

NCCL joins the ranks on GPUs, and its all-reduce is captured with the step; what the host decides goes over gloo.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridstate.errors import NumericError, UnsupportedModel
from hybridstate.families import AxisRule, LinearLayer, ModelSpec
from hybridstate.families.axes import FLAT_GDN, table
from hybridstate.plan.placement import check_tp
from hybridstate.runtime.exchange import agree
from hybridstate.trajectories.model import LoadedModel, linear_modules
from hybridstate.weights.permute import LayerOrder, axis_index

Floats = NDArray[np.float64]

PATIENCE: Final = timedelta(minutes=5)
"""After which a collective that a rank has not joined fails."""

HEAD_SIZES: Final = (
    "num_heads",
    "num_k_heads",
    "num_v_heads",
    "key_dim",
    "value_dim",
    "qkv_dim",
    "conv_dim",
)
"""Attributes of transformers' linear modules that count heads, or rows of all heads."""


class Ranks:
    """This process among the ranks of one engine.

    Attributes:
        rank, size: r and P; a single rank needs no process group.
        moves: process group of exchanges, apart from the model's: they run beside the step.
    """

    def __init__(self, rank: int = 0, size: int = 1, moves: Any = None) -> None:
        self.rank, self.size, self.moves = rank, size, moves
        self._sums = True
        self._summed = 0

    @classmethod
    def join(cls, rank: int, size: int, device: torch.device, meeting: Path) -> Self:
        """Meet the other ranks at a file that does not exist yet; returns when all are there."""
        import torch.distributed as dist

        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{meeting}",
            world_size=size,
            rank=rank,
            timeout=PATIENCE,
        )
        return cls(rank, size, dist.new_group(timeout=PATIENCE))

    def leave(self) -> None:
        """End the process group."""
        import torch.distributed as dist

        if self.size > 1:
            dist.destroy_process_group()

    def fewest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self._reduced(np.array(number, np.float64), "MIN"))

    def slowest(self, seconds: Floats) -> Floats:
        """The largest of all ranks' numbers, entry by entry."""
        return self._reduced(seconds, "MAX")

    def together(self, clock: Callable[[], float]) -> Callable[[], float]:
        """A clock that every rank reads alike: from one reading to the next the slowest rank's seconds pass.

        Readings wait for each other; what that takes is not on the clock.
        """
        if self.size == 1:
            return clock
        now, left = 0.0, clock()

        def read() -> float:
            nonlocal now, left
            now += float(self.slowest(np.array(clock() - left)))
            left = clock()
            return now

        return read

    def agree(self, digest: str, about: str) -> None:
        """See `exchange.agree`; a single rank agrees with itself."""
        if self.size > 1:
            agree(digest, about)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run layers without the others: outputs are this rank's part of the sum."""
        self._sums = False
        try:
            yield
        finally:
            self._sums = True

    def own(self, heads: Any) -> Any:
        """This rank's part of an array or tensor with the value heads of a whole layer in front."""
        share = len(heads) // self.size
        return heads[self.rank * share : (self.rank + 1) * share]

    def sum(self, _module: Any, _inputs: Any, output: Tensor) -> Tensor:
        """Forward hook of a linear layer: `[B, T, D]`, summed over the ranks in place."""
        import torch.distributed as dist

        self._summed += 1
        if self._sums:
            dist.all_reduce(output)
        return output

    def watch(self, model: Any, layers: int) -> None:
        """Refuse a run of the model in which a linear layer was not summed, whatever code replaced it."""

        def begin(*_call: Any) -> None:
            self._summed = 0

        def end(*_call: Any) -> None:
            if self._summed != layers:
                raise NumericError(
                    f"{self._summed} of {layers} linear layers were summed over the ranks",
                    found=self._summed,
                    expected=layers,
                )

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end)

    def _reduced(self, numbers: Floats, how: str) -> Floats:
        import torch.distributed as dist

        if self.size == 1:
            return numbers
        found = torch.from_numpy(numbers.astype(np.float64))
        dist.all_reduce(found, op=getattr(dist.ReduceOp, how))
        return found.numpy()


def rank_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """Geometry of one of `tp` ranks: every layer with its share of the heads.

    Raises:
        PlanMismatch: the ranks do not divide the key heads.
    """
    check_tp(spec, tp)
    layers = tuple(
        replace(n, key_heads=n.key_heads // tp, value_heads=n.value_heads // tp)
        for n in spec.layers
    )
    return replace(spec, layers=layers)


@torch.no_grad()
def shard(loaded: LoadedModel, ranks: Ranks) -> LoadedModel:
    """Cut the linear layers of a loaded model, in place, for one rank.

    Returns:
        The model with the rank's geometry as its `spec`; `checkpoint.spec` stays that of the whole.

    Raises:
        PlanMismatch: the ranks do not divide the key heads.
        UnsupportedModel: a weight of a linear layer that the family's table does not name.
    """
    if ranks.size == 1:
        return loaded
    whole, spec = loaded.spec, rank_spec(loaded.spec, ranks.size)
    axes = table(FLAT_GDN, whole.family.axes)  # modules may join or split what checkpoints do not
    for module, ordinal in linear_modules(loaded.model, whole):
        layer = whole.layers[ordinal]
        order = _heads(layer, ranks)
        for name, weight in module.named_parameters():
            stored = name.removeprefix("forget_gate.")
            if stored not in axes:
                raise UnsupportedModel(
                    f"block {layer.index}: nothing is known about the heads of {name}, so {whole.name} cannot be "
                    "shared by ranks",
                    layer=layer.index,
                    tensor=name,
                )
            for rule in axes[stored]:
                weight.data = _part(weight.data, name, layer, rule, order)
        for part in module.modules():
            _resize(part, ranks.size)
        module.register_forward_hook(ranks.sum)
    ranks.watch(loaded.model, len(spec.layers))
    loaded.recurrence.key_heads = tuple(layer.key_heads for layer in spec.layers)
    return replace(loaded, spec=spec)


def _heads(layer: LinearLayer, ranks: Ranks) -> LayerOrder:
    """The rank's heads of a layer, in their order."""
    order = LayerOrder.identity(layer)
    return replace(order, bundles=ranks.own(order.bundles), heads=ranks.own(order.heads))


def _part(
    weight: Tensor, name: str, layer: LinearLayer, rule: AxisRule, order: LayerOrder
) -> Tensor:
    """Entries of the heads in `order` along one axis."""
    length = sum(layer.segment_length(segment) for segment in rule.segments)
    index = torch.from_numpy(np.asarray(axis_index(layer, rule, order, length))).to(weight.device)
    if weight.dim() > rule.axis and weight.shape[rule.axis] == length:
        return weight.index_select(rule.axis, index)
    if weight.numel() != length:
        raise UnsupportedModel(
            f"block {layer.index}: {name} is {list(weight.shape)}, its heads take {length} entries",
            layer=layer.index,
            tensor=name,
            found=list(weight.shape),
            expected=length,
        )
    shape = list(weight.shape)  # A_log [1, 1, H, 1], dt_bias [H, K]: heads lead
    first = next(axis for axis, size in enumerate(shape) if size > 1)
    shape[first] = -1
    return weight.flatten()[index].view(shape)


def _resize(part: Any, tp: int) -> None:
    """Sizes that a module of transformers keeps beside its weights."""
    for name in HEAD_SIZES:
        if isinstance(part.__dict__.get(name), int):
            setattr(part, name, getattr(part, name) // tp)
    if isinstance(part, torch.nn.Linear):
        part.out_features, part.in_features = part.weight.shape
    if isinstance(part, torch.nn.Conv1d):
        part.in_channels = part.out_channels = part.groups = len(part.weight)
