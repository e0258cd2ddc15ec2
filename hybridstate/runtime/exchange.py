"""Checkpoint units between the rank that computes them and the rank that stores them (DASC 4.3, B.1).

`store` takes the units a rank computed, in packed order, and returns the units it stores, at their slots; `load` is the
exact inverse. Only units whose owner is another rank travel, `M_remote` of them, in one all-to-all with variable splits
that carries any number of checkpoints; where nothing is remote there is no communication at all. The maps come from
`plan.placement` and are integers known before the first request, so no rank waits to learn a size.

Works with any backend of `torch.distributed` that has `all_to_all_single` (NCCL on GPUs, gloo on CPUs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError, PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.plan.placement import Placement, bundle_costs, packed_order, packed_sources
from hybridstate.plan.select import Selection


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What one rank sends, keeps and receives at a store; a load runs it backwards.

    Local units are numbered in packed order among those the rank computes.

    Attributes:
        rank: whose route this is.
        local_units: units it computes, `n_r`.
        stored_units: units it stores, `t_r`.
        slot_units: units a checkpoint slot has room for, the same on every rank.
        kept, kept_slots: local units that stay, and the slots they go to; int64 `[n]` each.
        sent: local units that leave, by destination and then packed order.
        send_splits: how many go to each rank, `[P]`.
        received_slots: slots of the units that arrive, by source and then packed order.
        receive_splits: how many come from each rank, `[P]`.
        remote_units: units that cross ranks anywhere, `M_remote`.
    """

    rank: int
    local_units: int
    stored_units: int
    slot_units: int
    kept: NDArray[np.int64]
    kept_slots: NDArray[np.int64]
    sent: NDArray[np.int64]
    send_splits: tuple[int, ...]
    received_slots: NDArray[np.int64]
    receive_splits: tuple[int, ...]
    remote_units: int


def routes(spec: ModelSpec, selection: Selection, placement: Placement) -> tuple[Route, ...]:
    """One route per rank.

    Raises:
        PlanMismatch: the placement was made for another selection.
    """
    source = packed_sources(bundle_costs(spec, selection), placement.head_owner.astype(np.int64))
    local = np.empty(len(source), np.int64)
    for rank in range(placement.tp):
        mine = source == rank
        local[mine] = np.arange(int(mine.sum()))
    if placement.mode == "off":
        owner, slot = source, local
    else:
        owner = placement.storage_owner.astype(np.int64)
        slot = placement.storage_slot.astype(np.int64)
    if len(owner) != len(source):
        raise PlanMismatch(
            f"the placement stores {len(owner)} units, the selection keeps {len(source)}",
            found=len(owner),
            expected=len(source),
        )
    made = []
    for rank in range(placement.tp):
        stays = np.flatnonzero((source == rank) & (owner == rank))
        leaves = np.flatnonzero((source == rank) & (owner != rank))
        leaves = leaves[np.argsort(owner[leaves], kind="stable")]
        comes = np.flatnonzero((source != rank) & (owner == rank))
        comes = comes[np.argsort(source[comes], kind="stable")]
        made.append(
            Route(
                rank=rank,
                local_units=int((source == rank).sum()),
                stored_units=int((owner == rank).sum()),
                slot_units=placement.slot_units,
                kept=local[stays],
                kept_slots=slot[stays],
                sent=local[leaves],
                send_splits=_splits(owner[leaves], placement.tp),
                received_slots=slot[comes],
                receive_splits=_splits(source[comes], placement.tp),
                remote_units=int((source != owner).sum()),
            )
        )
    return tuple(made)


def _splits(ranks: NDArray[np.int64], tp: int) -> tuple[int, ...]:
    return tuple(int(n) for n in np.bincount(ranks, minlength=tp))


def rank_heads(spec: ModelSpec, placement: Placement, rank: int) -> tuple[tuple[int, ...], ...]:
    """Value heads that a rank computes, per linear layer, in its compute order."""
    found = []
    for layer, owner in zip(spec.layers, placement.head_owner.tolist(), strict=True):
        order = packed_order(layer.key_heads, layer.value_heads, owner)
        share = layer.value_heads // placement.tp
        found.append(tuple(order[rank * share : (rank + 1) * share]))
    return tuple(found)


class Exchange:
    """The two transfers of one rank.

    Args:
        route: this rank's entry of `routes`.
        group: process group; None is the default one. Not needed where nothing is remote.
        device: where units live; NCCL needs a CUDA device.

    Attributes:
        units_sent: units this rank has sent to others so far, both directions.
    """

    def __init__(
        self, route: Route, *, group: Any = None, device: torch.device | str = "cpu"
    ) -> None:
        self.route = route
        self.group = group
        self.device = torch.device(device)
        self.units_sent = 0
        self._kept, self._kept_slots, self._sent, self._received = (
            torch.from_numpy(rows).to(self.device)
            for rows in (route.kept, route.kept_slots, route.sent, route.received_slots)
        )

    def store(self, units: torch.Tensor, out: torch.Tensor) -> None:
        """Computed units into storage slots.

        Args:
            units: `[B, n_r, ...]` of B checkpoints, in packed order; any dtype.
            out: `[B, slot_units, ...]` contiguous; rows beyond `stored_units` keep what they hold.

        Raises:
            NumericError: shapes do not fit the route.
        """
        route = self.route
        self._expect(units, route.local_units, "units")
        self._expect(out, route.slot_units, "slots")
        out[:, self._kept_slots] = units[:, self._kept]
        arrived = self._swap(units[:, self._sent], route.send_splits, route.receive_splits)
        if arrived is not None:
            out[:, self._received] = arrived

    def load(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Storage slots back into computed units: the inverse of `store`, bit for bit.

        Args:
            slots: `[B, slot_units, ...]`.
            out: `[B, n_r, ...]`, written completely.
        """
        route = self.route
        self._expect(slots, route.slot_units, "slots")
        self._expect(out, route.local_units, "units")
        out[:, self._kept] = slots[:, self._kept_slots]
        arrived = self._swap(slots[:, self._received], route.receive_splits, route.send_splits)
        if arrived is not None:
            out[:, self._sent] = arrived

    def _swap(
        self, rows: torch.Tensor, give: Sequence[int], take: Sequence[int]
    ) -> torch.Tensor | None:
        """Rows `[B, n, ...]` ordered by destination for rows ordered by source."""
        if not self.route.remote_units:
            return None
        import torch.distributed as dist

        first = rows.transpose(0, 1).contiguous()  # units lead: a split is one run of memory
        arrived = first.new_empty((sum(take), *first.shape[1:]))
        dist.all_to_all_single(arrived, first, list(take), list(give), group=self.group)
        self.units_sent += len(first) * rows.shape[0]
        return arrived.transpose(0, 1)

    def _expect(self, tensor: torch.Tensor, rows: int, what: str) -> None:
        if tensor.dim() < 2 or tensor.shape[1] != rows:
            raise NumericError(
                f"rank {self.route.rank} exchanges [B, {rows}, ...] {what}, "
                f"found {list(tensor.shape)}",
                found=list(tensor.shape),
                expected=rows,
            )


def agree(
    digest: str,
    about: str = "the prefix cache",
    *,
    group: Any = None,
    device: torch.device | str = "cpu",
) -> None:
    """Compare a decision of the cache with every other rank's.

    Caches of all ranks see the same requests and decide alike; a rank that does not would evict another checkpoint
    and load a mixture of two prefixes, which no later check can see.

    Args:
        digest: hexadecimal sha256 of what was decided, such as victims and slots of a reclamation.
        about: what that was, for the message.

    Raises:
        NumericError: a rank decided otherwise; all ranks raise it.
        UsageError: not a digest.
    """
    import torch.distributed as dist

    if len(digest) != 64:
        raise UsageError(f"a sha256 has 64 hexadecimal digits, found {len(digest)}")
    mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    different = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
    if different:
        raise NumericError(
            f"ranks {different} decided otherwise than rank 0 about {about}",
            hint="feed every rank the same requests in the same order",
            ranks=different,
        )
