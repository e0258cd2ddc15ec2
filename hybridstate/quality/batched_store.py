"""The store of a prefix cache whose copies wait for each other: those of one kind run together, in one launch each.

A cache decides request by request; where all requests of a round are there at once, nothing needs the bytes before the
round's states are read. Kinds run in the order of the decisions, so every slot holds what `TensorStore` would leave.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from hybridstate.errors import NumericError
from hybridstate.runtime.compressed import FloatRows, Kind
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Finished, Prefix, Transfer

ReplayAll = Callable[[Sequence[Prefix], int], Sequence[torch.Tensor]]
"""States after a replay of the last tokens of B prefixes, FP32 `[B, H, K, V]` per layer."""

What = Literal["copy", "pack", "load", "freed", "freed packed"]


class BatchedStore(TensorStore):
    """`TensorStore` on FP32 slots in rows order; `flush` before anybody else reads or writes the pool.

    Args:
        replay: who replays, all prefixes of a batch at once.
    """

    def __init__(
        self,
        pool: StatePool,
        packed: int,
        retained: Sequence[torch.Tensor] | None = None,
        *,
        kind: Kind = "fp32",
        window: int = 0,
        replay: ReplayAll,
    ) -> None:
        super().__init__(
            *(pool, packed, retained),
            kind=kind,
            window=window,
            replay=lambda prefix, tokens: replay([prefix], tokens),
        )
        self._replay_all = replay
        self._what: tuple[What, int] | None = None
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._prefixes: list[Prefix] = []
        self._finite: set[int] = set()

    def flush(self) -> None:
        """Run what waits."""
        if self._what is None:
            return
        (what, replayed), self._what = self._what, None
        sources, targets, prefixes = self._sources, self._targets, self._prefixes
        self._sources, self._targets, self._prefixes = [], [], []
        if what == "copy":
            self.pool.copy(self._index(sources), self._index(targets))
        elif what == "freed":
            self.pool.poison(targets)
        else:
            self._compressed(what, sources, targets, replayed, prefixes)

    def written(self, slots: Sequence[int]) -> None:
        """Say that somebody wrote these native slots after a `flush`: all are asked at once whether they are finite."""
        try:
            self.pool.require_finite(self._index(slots))
        except NumericError:
            return  # each is asked for itself
        self._finite.update(slots)

    def copy(self, source: int, target: int) -> None:
        """See `tiers.Store`."""
        self._wait("copy", source, target)

    def pack(self, source: int, target: int, *, aside: bool) -> Transfer:
        """See `tiers.Store`; on the engine's stream, in order."""
        self._wait("pack", source, target)
        return Finished()

    def load(self, source: int, target: int, prefix: Prefix) -> int:
        """See `tiers.Store`."""
        replayed = min(self.window, len(prefix.tokens))
        self._wait("load", source, target, replayed)
        self._prefixes.append(prefix)
        return replayed

    def finite(self, slot: int) -> bool:
        """See `tiers.Store`."""
        if slot in self._finite:
            return True
        self.flush()
        return super().finite(slot)

    def freed(self, slot: int, *, packed: bool) -> None:
        """See `tiers.Store`."""
        self._wait("freed packed" if packed else "freed", slot, slot)

    def _wait(self, what: What, source: int, target: int, replayed: int = 0) -> None:
        """Add to what waits, which runs first where this is another kind or meets one of its slots."""
        meets = target in self._targets
        if what == "copy":
            meets = meets or source in self._targets or target in self._sources
        if self._what != (what, replayed) or meets:
            self.flush()
        self._what = what, replayed
        self._sources.append(source)
        self._targets.append(target)
        if what in ("copy", "load", "freed"):
            self._finite.discard(target)

    def _compressed(
        self,
        what: What,
        sources: list[int],
        targets: list[int],
        replayed: int,
        prefixes: Sequence[Prefix],
    ) -> None:
        """`pack`, `load` or `freed packed`."""
        rows: Any = self.checkpoints
        assert isinstance(rows, FloatRows), "quality keeps FP32 states"
        source, target = self._index(sources), self._index(targets)
        if what == "freed packed":
            rows.poison(target)
            for kept in self._conv:
                kept[target] = float("nan")
        elif what == "pack":
            rows.pack(source, target)
            for window, kept in zip(self.pool.conv, self._conv, strict=True):
                kept[target] = window[source]
        else:
            if replayed:
                rows.refill(target, self._replay_all(prefixes, replayed))
            rows.unpack(source, target, refilled=bool(replayed))
            for window, kept in zip(self.pool.conv, self._conv, strict=True):
                window[target] = kept[source]

    def _index(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self.pool.device)
