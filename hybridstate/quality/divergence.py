"""How far a storage format moves the model: next-token divergence, agreement, perplexity, state error.

Means are over the positions of a sequence, then over sequences; standard errors are over sequences (sample
standard deviation over sqrt(S)), since positions of one sequence are not independent. Steps are binned at
powers of two, and growth is the slope b of log KL against log step, KL ~ step**b, fitted to the means of
the bins; its interval resamples sequences.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import LinearLayer
from hybridstate.quant.simulate import Simulation

F64 = NDArray[np.float64]

SLOPE_FROM: Final = 9
"""First step of the first bin that a slope is fitted to: earlier bins hold fewer than 8 positions."""
RESAMPLES: Final = 2000
"""Bootstrap resamples of the sequences."""
COVERAGE: Final = 0.95
"""Of the interval around a slope."""


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A validation by step bin: A arms (FP32 first), S sequences, B bins.

    Attributes:
        formats: names of the arms.
        bits, bits_with_ring: of a state value, see `Divergence`.
        updates: decode steps of every sequence.
        chunk: prefill tokens between two writes of the state.
        kl: `[A, S, B]` mean over the bin's positions, in nats.
        same_top: `[A, S, B]` share of positions where both prefer the same token.
        nll: `[A, S, B]` mean negative log-likelihood of the FP32 tokens, in nats.
        state_error: `[A, S, B]` ||S^q - S|| / ||S|| after the bin's last update, mean over layers.
        saturated: `[A]` values beyond FP16 met where FP16 is stored.
        draws: `[S]` which evaluation draw (seed) a sequence belongs to.
    """

    formats: tuple[str, ...]
    bits: tuple[float, ...]
    bits_with_ring: tuple[float, ...]
    updates: int
    chunk: int
    kl: F64
    same_top: F64
    nll: F64
    state_error: F64
    saturated: NDArray[np.int64]
    draws: NDArray[np.int64]

    @property
    def bins(self) -> tuple[tuple[int, int], ...]:
        """First and last step of each bin."""
        return step_bins(self.updates)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `from_arrays` takes back, beside `describe`."""
        names = ("kl", "same_top", "nll", "state_error", "saturated")
        return {name: np.ascontiguousarray(getattr(self, name)) for name in names}

    def describe(self) -> dict[str, Any]:
        """The rest, as JSON values."""
        return {
            "formats": list(self.formats),
            "bits": list(self.bits),
            "bits_with_ring": list(self.bits_with_ring),
            "updates": self.updates,
            "chunk": self.chunk,
        }

    @classmethod
    def from_arrays(cls, described: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> "Measured":
        """One draw, as written."""
        return cls(
            formats=tuple(described["formats"]),
            bits=tuple(described["bits"]),
            bits_with_ring=tuple(described["bits_with_ring"]),
            updates=int(described["updates"]),
            chunk=int(described["chunk"]),
            draws=np.zeros(arrays["kl"].shape[1], dtype=np.int64),
            **{
                name: arrays[name] for name in ("kl", "same_top", "nll", "state_error", "saturated")
            },
        )


def step_bins(updates: int) -> tuple[tuple[int, int], ...]:
    """(1, 1), (2, 2), (3, 4), (5, 8), ... up to the last update: both ends belong to the bin."""
    ends = [1 << n for n in range(updates.bit_length()) if 1 << n < updates] + [updates]
    firsts = [1, *(end + 1 for end in ends)]
    return tuple(zip(firsts, ends, strict=False))


def measure(simulation: Simulation, layer: LinearLayer, *, per_channel: bool) -> Measured:
    """Bins of one simulation; the layer and whether each key channel has a decay are for the bits."""
    updates = simulation.kl.shape[2]
    bins = step_bins(updates)

    def binned(values: NDArray[Any]) -> F64:
        return np.stack([values[:, :, a - 1 : b].mean(2, dtype=np.float64) for a, b in bins], 2)

    at = {step: place for place, step in enumerate(simulation.steps)}
    errors = np.stack([simulation.state_error[at[last]] for _, last in bins], 2)
    bits = tuple(arm.bits(layer.key_dim, layer.value_dim) for arm in simulation.arms)
    rings = (arm.ring_bits(layer, per_channel=per_channel) for arm in simulation.arms)
    return Measured(
        formats=tuple(arm.name for arm in simulation.arms),
        bits=bits,
        bits_with_ring=tuple(b + ring for b, ring in zip(bits, rings, strict=True)),
        updates=updates,
        chunk=simulation.chunk,
        kl=binned(simulation.kl),
        same_top=binned(simulation.same_top),
        nll=binned(simulation.nll),
        state_error=errors,
        saturated=np.asarray(simulation.saturated, dtype=np.int64),
        draws=np.zeros(simulation.kl.shape[1], dtype=np.int64),
    )


def pooled(draws: list[Measured]) -> Measured:
    """Sequences of several draws side by side, numbered by draw; bits as the newest draw counts them."""
    counts = [draw.kl.shape[1] for draw in draws]
    return replace(
        draws[-1],
        kl=np.concatenate([draw.kl for draw in draws], 1),
        same_top=np.concatenate([draw.same_top for draw in draws], 1),
        nll=np.concatenate([draw.nll for draw in draws], 1),
        state_error=np.concatenate([draw.state_error for draw in draws], 1),
        saturated=np.sum([draw.saturated for draw in draws], axis=0),
        draws=np.repeat(np.arange(len(draws)), counts),
    )


@dataclass(frozen=True, slots=True)
class Steps:
    """One format by step bin, means over sequences; the bins are the document's `step_bins`.

    Attributes:
        kl, kl_error: mean KL in nats and its standard error.
        top1: share of equal top tokens.
        perplexity_ratio: perplexity of the teacher's tokens over that under FP32.
        state_error: after the bin's last update.
        slope: b of KL ~ step**b over bins from step 9 on; None where a bin has no divergence or fewer than
            three bins exist.
        slope_low, slope_high: 95 % interval, sequences resampled; None for fewer than two.
    """

    kl: tuple[float, ...]
    kl_error: tuple[float | None, ...]
    top1: tuple[float, ...]
    perplexity_ratio: tuple[float, ...]
    state_error: tuple[float, ...]
    slope: float | None
    slope_low: float | None
    slope_high: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the slope."""
        if self.slope_low is None or self.slope_high is None:
            return None
        return self.slope_low, self.slope_high


@dataclass(frozen=True, slots=True)
class Divergence:
    """One storage format against FP32, on identical tokens.

    Attributes:
        format: name of the arm.
        bits_per_value: of a state value, scales and residuals included.
        bits_per_value_with_ring: the same with the inputs kept between two writes; equal where every update writes.
        kl, kl_error: mean KL(FP32 || format) per position in nats, and its standard error.
        kl_spread: standard deviation over the means of the draws (seeds); None for one draw.
        top1, top1_error: share of positions where both prefer the same token, and its standard error.
        perplexity_ratio: perplexity of the teacher's tokens over that under FP32.
        state_error, state_error_error: ||S^q - S|| / ||S|| after the last update, mean over layers
            and sequences, and its standard error.
        state_error_steps: the same mean after 1, 2, 4, ... updates.
        saturated: values beyond FP16 met where FP16 is stored.
        samples: per draw the mean KL, share of equal top tokens and final state error; of a single draw
            per sequence.
        steps: the same quantities by step.
    """

    format: str
    bits_per_value: float
    bits_per_value_with_ring: float
    kl: float
    kl_error: float | None
    kl_spread: float | None
    top1: float
    top1_error: float | None
    perplexity_ratio: float
    state_error: float
    state_error_error: float | None
    state_error_steps: tuple[float, ...]
    saturated: int
    samples: dict[str, tuple[float, ...]]
    steps: Steps

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite is None (see `finite`)."""
        found: dict[str, Any] = finite(asdict(self))
        return found


def finite(value: Any) -> Any:
    """The same of lists and dictionaries, with None for numbers that JSON does not know.

    Errors of formats that diverge were once summed in FP32 and are infinite in finished draws of that time.
    """
    if isinstance(value, dict):
        return {name: finite(kept) for name, kept in value.items()}
    if isinstance(value, list | tuple):
        return [finite(kept) for kept in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def divergences(measured: Measured) -> tuple[Divergence, ...]:
    """Summaries of all arms."""
    sizes = np.array([last - first + 1 for first, last in measured.bins], dtype=np.float64)
    share = sizes / sizes.sum()
    return tuple(_divergence(measured, place, share) for place in range(len(measured.formats)))


def _divergence(measured: Measured, place: int, share: F64) -> Divergence:
    kl, top = measured.kl[place], measured.same_top[place]
    excess = measured.nll[place] - measured.nll[0]
    error = measured.state_error[place]
    whole = {"kl": kl @ share, "top1": top @ share, "state_error": error[:, -1]}
    slope, low, high = growth(measured.bins, kl)
    draws = [measured.draws == draw for draw in range(int(measured.draws.max(initial=0)) + 1)]
    samples = whole
    if len(draws) > 1:
        samples = {
            name: np.array([values[rows].mean() for rows in draws])
            for name, values in whole.items()
        }
    return Divergence(
        format=measured.formats[place],
        bits_per_value=measured.bits[place],
        bits_per_value_with_ring=measured.bits_with_ring[place],
        kl=float(whole["kl"].mean()),
        kl_error=standard_error(whole["kl"]),
        kl_spread=float(samples["kl"].std(ddof=1)) if len(draws) > 1 else None,
        top1=float(whole["top1"].mean()),
        top1_error=standard_error(whole["top1"]),
        perplexity_ratio=math.exp(float((excess @ share).mean())),
        state_error=float(error[:, -1].mean()),
        state_error_error=standard_error(error[:, -1]),
        state_error_steps=tuple(error.mean(0).tolist()),
        saturated=int(measured.saturated[place]),
        samples={name: tuple(values.tolist()) for name, values in samples.items()},
        steps=Steps(
            kl=tuple(kl.mean(0).tolist()),
            kl_error=tuple(standard_error(column) for column in kl.T),
            top1=tuple(top.mean(0).tolist()),
            perplexity_ratio=tuple(np.exp(excess.mean(0)).tolist()),
            state_error=tuple(error.mean(0).tolist()),
            slope=slope,
            slope_low=low,
            slope_high=high,
        ),
    )


def growth(
    bins: tuple[tuple[int, int], ...], kl: F64
) -> tuple[float | None, float | None, float | None]:
    """Slope of log mean KL against log step, and its interval, from `[S, B]` (see `Steps.slope`).

    A bin stands at the geometric mean of its ends; all bins weigh the same.
    """
    used = [place for place, (first, _) in enumerate(bins) if first >= SLOPE_FROM]
    if len(used) < 3:
        return None, None, None
    x = np.array([0.5 * (math.log(bins[b][0]) + math.log(bins[b][1])) for b in used])
    x -= x.mean()
    values = kl[:, used]

    def fit(means: F64) -> F64:
        slopes: F64 = np.log(means) @ x / (x @ x)
        return slopes

    if (values.mean(0) <= 0).any():
        return None, None, None
    slope = float(fit(values.mean(0)))
    if len(values) < 2:
        return slope, None, None
    generator = np.random.Generator(np.random.PCG64(0))
    rows = generator.integers(0, len(values), (RESAMPLES, len(values)))
    means = values[rows].mean(1)
    means = means[(means > 0).all(1)]
    if len(means) < RESAMPLES // 2:
        return slope, None, None
    tail = 50.0 * (1.0 - COVERAGE)
    low, high = np.percentile(fit(means), [tail, 100.0 - tail])
    return slope, float(low), float(high)


def standard_error(values: F64) -> float | None:
    """Of the mean of independent values; None for fewer than two, or where one is not finite."""
    if values.size < 2 or not np.isfinite(values).all():
        return None
    return float(values.std(ddof=1) / math.sqrt(values.size))
