"""Which units a checkpoint keeps (DASC Eq. 4 to 7): horizons and a cutoff in, masks out.

A unit is retained iff its horizon is strictly above `w_max`. Arrays keep the shape of the horizons:
`[H]` for value heads (GDN), `[H, K]` for key channels (KDA); one array per linear layer, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.defaults import CUTOFF_TIE, MIN_REPLAY_TOKENS
from hybridstate.errors import NumericError, UsageError
from hybridstate.provenance import sha256_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Retained and omitted units at one cutoff.

    Attributes:
        w_max: cutoff in tokens.
        retained: per layer, True where the unit is kept.
        replay_window: per layer, W_u in tokens of omitted units, 0 for retained ones.
        w_replay: tokens replayed on a hit, 0 if nothing is omitted; a prefix caps it at its length.
        near_cutoff: units within a relative 1e-6 of the cutoff, whose side is a matter of rounding.
        seed: of the random mask, None for a selection by horizon.
    """

    w_max: int
    retained: tuple[NDArray[np.bool_], ...]
    replay_window: tuple[NDArray[np.int32], ...]
    w_replay: int
    near_cutoff: int
    seed: int | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Retained units per layer, r_l."""
        return tuple(int(mask.sum()) for mask in self.retained)

    @property
    def units(self) -> tuple[int, ...]:
        """All units per layer, n_l."""
        return tuple(int(mask.size) for mask in self.retained)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each layer's units in the ragged layout, and their total at the end."""
        return tuple(int(o) for o in np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64))))

    @property
    def fraction(self) -> float:
        """Share of all units that is retained."""
        return sum(self.counts) / sum(self.units)

    @property
    def mask_digest(self) -> str:
        """sha256 over the masks, one byte per unit in layer order."""
        return sha256_bytes(b"".join(mask.astype(np.uint8).tobytes() for mask in self.retained))

    def replay_tokens(self, prefix_tokens: int) -> int:
        """Tokens replayed after a hit on a prefix: min(n_p, W_replay)."""
        return min(prefix_tokens, self.w_replay)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far two count-matched masks agree.

    Attributes:
        both: units retained in both.
        either: units retained in at least one.
        expected: mean of `both` if one mask were drawn at random with the same counts.
    """

    both: int
    either: int
    expected: float

    @property
    def jaccard(self) -> float:
        """both / either, 1 if both masks are empty."""
        return self.both / self.either if self.either else 1.0

    def to_json(self) -> dict[str, Any]:
        """Counts, their expectation, and the ratio."""
        return {
            "both": self.both,
            "either": self.either,
            "expected_both": self.expected,
            "jaccard": self.jaccard,
        }


def replay_windows(horizons: NDArray[np.float64], w_max: int) -> NDArray[np.int32]:
    """W_u = clamp(next_pow2(H), 4, w_max) in tokens, for every unit (DASC Eq. 7); next_pow2(0) = 4.

    The exponent comes from frexp: a logarithm rounds near powers of two.
    """
    mantissa, exponent = np.frexp(np.minimum(horizons, float(w_max)))
    power = np.ldexp(1.0, exponent - (mantissa == 0.5))
    return np.asarray(np.clip(power, MIN_REPLAY_TOKENS, w_max), dtype=np.int32)


def check_w_max(w_max: int) -> None:
    """Refuse a cutoff that is none.

    Raises:
        UsageError: below 4, the shortest replay window, or above the int32 range.
    """
    if w_max < MIN_REPLAY_TOKENS:
        raise UsageError(
            f"W_max must be at least {MIN_REPLAY_TOKENS} tokens, the shortest replay window, "
            f"found {w_max}",
            found=w_max,
            expected=MIN_REPLAY_TOKENS,
        )
    if w_max >= 2**31:
        raise UsageError(f"W_max must be below 2**31 tokens, found {w_max}", found=str(w_max))


def select(horizons: Sequence[NDArray[np.float64]], w_max: int) -> Selection:
    """Keep the units whose horizon is strictly above `w_max` tokens.

    Raises:
        UsageError: `w_max` below 4, the shortest replay window, or above the int32 range.
        NumericError: a horizon is NaN or negative.
    """
    check_w_max(w_max)
    for ordinal, values in enumerate(horizons):
        bad = np.argwhere(~(values >= 0))
        if len(bad):
            raise NumericError(
                f"horizon {[int(i) for i in bad[0]]} of linear layer {ordinal} is "
                f"{values[tuple(bad[0])]}",
                layer_ordinal=ordinal,
            )
    retained = tuple(np.asarray(values > w_max) for values in horizons)
    near = sum(int((np.abs(values - w_max) <= CUTOFF_TIE * w_max).sum()) for values in horizons)
    windows = tuple(replay_windows(values, w_max) for values in horizons)
    return _selection(w_max, retained, windows, near, seed=None)


def random_selection(selection: Selection, seed: int) -> Selection:
    """A random mask with the same count in every layer (DASC appendix C).

    PCG64 with this seed, one permutation of a layer's units per layer in order, the first r_l kept.
    An omitted unit has the window w_max: nothing is known about its horizon.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    retained = []
    for mask in selection.retained:
        order = generator.permutation(mask.size)
        flat = np.zeros(mask.size, dtype=np.bool_)
        flat[order[: int(mask.sum())]] = True
        retained.append(flat.reshape(mask.shape))
    windows = tuple(np.full(mask.shape, selection.w_max, np.int32) for mask in retained)
    return _selection(selection.w_max, tuple(retained), windows, near=0, seed=seed)


def _selection(
    w_max: int,
    retained: tuple[NDArray[np.bool_], ...],
    windows: tuple[NDArray[np.int32], ...],
    near: int,
    seed: int | None,
) -> Selection:
    omitted = tuple(
        np.where(mask, 0, window).astype(np.int32)
        for mask, window in zip(retained, windows, strict=True)
    )
    w_replay = max((int(window.max(initial=0)) for window in omitted), default=0)
    return Selection(w_max, retained, omitted, w_replay, near, seed)


def overlap(a: Selection, b: Selection) -> Overlap:
    """Agreement of two selections over the same units.

    Raises:
        NumericError: the selections do not have the same shapes.
    """
    if [m.shape for m in a.retained] != [m.shape for m in b.retained]:
        raise NumericError("two selections over different units cannot be compared")
    pairs = list(zip(a.retained, b.retained, strict=True))
    both = sum(int((x & y).sum()) for x, y in pairs)
    either = sum(int((x | y).sum()) for x, y in pairs)
    expected = sum(int(x.sum()) * int(y.sum()) / x.size for x, y in pairs)
    return Overlap(both, either, expected)
