"""All arms of one write in one launch, where a kernel for it runs; the others one by one.

Carried residuals stay with `Arm.reconstruct`. The first write of every layer is done both ways: a kernel that does
not compile is not used again, nor is it for an arm where it disagrees.
"""

from collections.abc import Sequence
from typing import Final

import torch

from hybridstate.kernels.storage import KINDS, StorageTables, store_in_place
from hybridstate.quant.arms import Arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.rounding import row_hashes

AGREEMENT: Final = 1e-5
"""Largest relative difference (norms over a layer's state) from the arms' own arithmetic; ties may fall apart."""


def fusible(arm: Arm) -> bool:
    """Whether the kernel can store as this arm does."""
    return (
        arm.low.name in KINDS
        and FORMATS[arm.low.name] is arm.low
        and arm.high is FORMATS["fp16"]
        and arm.feedback is None
    )


class Together:
    """Fused writes of a fixed list of arms.

    Attributes:
        reason: why the kernel is not used for all arms it should serve, None while it is.
        places: arms that it stores.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = tuple(arms)
        self.places = frozenset(
            place for place, arm in enumerate(arms) if not arm.exact and fusible(arm)
        )
        self.reason: str | None = None
        self._tables: dict[int, StorageTables] = {}
        self._chosen: dict[tuple[int, ...], torch.Tensor] = {}

    def write(
        self,
        state: torch.Tensor,
        ordinal: int,
        due: tuple[int, ...],
        update: int | torch.Tensor = 0,
        sequences: torch.Tensor | None = None,
    ) -> tuple[int, ...]:
        """Store the arms of `due` that the kernel can, in place; returns those left to do.

        `update` and `sequences [S]` say which random numbers are drawn, as in `Arm.reconstruct`.
        """
        mine = tuple(place for place in due if place in self.places)
        if not mine or not usable(state):
            return due
        if ordinal not in self._tables:
            self._tables[ordinal] = tables(self.arms, state, ordinal)
            self._check(state, ordinal, mine, update, sequences)
            mine = tuple(place for place in mine if place in self.places)
            if not mine:
                return due
        self._launch(state, ordinal, mine, update, sequences)
        return tuple(place for place in due if place not in self.places)

    def _launch(
        self,
        state: torch.Tensor,
        ordinal: int,
        mine: tuple[int, ...],
        update: int | torch.Tensor,
        sequences: torch.Tensor | None,
    ) -> None:
        whole = tuple(place for place in mine if self.arms[place].low.whole_state)
        for some in (mine, whole):
            if some not in self._chosen:  # before a step is captured: its first run is eager
                self._chosen[some] = torch.tensor(some, dtype=torch.int32, device=state.device)
        count = len(state) // len(self.arms)
        rows = torch.arange(count, device=state.device) if sequences is None else sequences
        hashes = torch.zeros(len(state), dtype=torch.int32, device=state.device)
        for place in mine:
            arm = self.arms[place]
            if arm.low.stochastic is not None:
                found = row_hashes(rows, (arm.seed, ordinal, update), state.device)
                signed = found - ((found >> 31) << 32)  # the same 32 bits
                hashes[place * count : (place + 1) * count] = signed.to(torch.int32)
        store_in_place(
            *(state, self._tables[ordinal], self._chosen[mine], count, hashes),
            whole=self._chosen[whole] if whole else None,
        )

    def _check(
        self,
        state: torch.Tensor,
        ordinal: int,
        mine: tuple[int, ...],
        update: int | torch.Tensor,
        sequences: torch.Tensor | None,
    ) -> None:
        """Try a copy of this state and keep only the arms of `mine` that the kernel stores as they would alone."""
        copy = state.clone()
        try:
            self._launch(copy, ordinal, mine, update, sequences)
        except Exception as error:  # whatever a compiler raises
            first = str(error).splitlines()[:1]
            self.reason = f"{type(error).__name__}: {''.join(first):.200}"
            self.places = frozenset()
            return
        before, after = state.chunk(len(self.arms)), copy.chunk(len(self.arms))
        for place in mine:
            expected = self.arms[place].reconstruct(before[place], ordinal, update, sequences)
            difference = float((after[place] - expected).norm() / expected.norm().clamp_min(1e-30))
            if not difference <= AGREEMENT:
                self.reason = f"{self.arms[place].name} differs by {difference:.1e}"
                self.places -= {place}


def usable(state: torch.Tensor) -> bool:
    """Whether the kernel takes this state."""
    return state.is_cuda and state.dtype == torch.float32 and state.is_contiguous()


def tables(arms: Sequence[Arm], state: torch.Tensor, ordinal: int) -> StorageTables:
    """Tables of one layer, of a state `[A * S, H, K, V]`; arms that the kernel cannot store get the plain ones."""
    _, heads, key_dim, value_dim = state.shape
    count, device = len(arms), state.device
    kinds = torch.zeros(count, dtype=torch.int32)
    protected = torch.zeros(count, heads, key_dim, dtype=torch.uint8)
    order = torch.arange(value_dim, dtype=torch.int32).expand(count, heads, -1).clone()
    scale = torch.ones(count, heads, value_dim)
    for place, arm in enumerate(arms):
        if arm.exact or not fusible(arm):
            continue
        kinds[place] = KINDS.index(arm.low.name)
        if arm.protected is not None:
            protected[place].scatter_(1, arm.protected[ordinal].cpu(), 1)
        if arm.values is not None:
            order[place] = arm.values[ordinal].order.cpu().to(torch.int32)
            scale[place] = arm.values[ordinal].scale.cpu()
    return StorageTables(*(x.to(device) for x in (kinds, protected, order, scale)))
