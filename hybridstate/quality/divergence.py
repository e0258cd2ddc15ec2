"""How far a storage format moves the model: next-token divergence, agreement, perplexity, state error.

Means are over the positions of a sequence, then over sequences; the standard error is over sequences
(sample standard deviation over sqrt(S)), since positions of one sequence are not independent.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridstate.families import LinearLayer
from hybridstate.quant.simulate import Simulation


@dataclass(frozen=True, slots=True)
class Divergence:
    """One storage format against FP32, on identical tokens.

    Attributes:
        format: name of the arm.
        bits_per_value: of a state value, scales and residuals included.
        bits_per_value_with_ring: the same with the inputs kept between two writes; equal where every update writes.
        kl, kl_error: mean KL(FP32 || format) per position in nats, and its standard error.
        top1: share of positions where both prefer the same token.
        perplexity_ratio: perplexity of the teacher's tokens over that under FP32.
        state_error, state_error_error: ||S^q - S|| / ||S|| after the last update, mean over layers
            and sequences, and its standard error.
        state_error_steps: the same mean after 1, 2, 4, ... updates.
        saturated: values beyond FP16 met where FP16 is stored.
        samples: per sequence, mean KL, share of equal top tokens and final state error.
    """

    format: str
    bits_per_value: float
    bits_per_value_with_ring: float
    kl: float
    kl_error: float | None
    top1: float
    perplexity_ratio: float
    state_error: float
    state_error_error: float | None
    state_error_steps: tuple[float, ...]
    saturated: int
    samples: dict[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {
            "state_error_steps": list(self.state_error_steps),
            "samples": {name: list(values) for name, values in self.samples.items()},
        }


def divergences(
    simulation: Simulation, layer: LinearLayer, *, per_channel: bool
) -> tuple[Divergence, ...]:
    """Summaries of all arms; the layer and whether each key channel has a decay are for the bits."""
    rows = []
    for place, arm in enumerate(simulation.arms):
        kl = simulation.kl[place].mean(1)
        error = simulation.state_error[-1, place]
        ratio = math.exp(float(simulation.nll[place].mean() - simulation.nll[0].mean()))
        bits = arm.bits(layer.key_dim, layer.value_dim)
        rows.append(
            Divergence(
                format=arm.name,
                bits_per_value=bits,
                bits_per_value_with_ring=bits + arm.ring_bits(layer, per_channel=per_channel),
                kl=float(kl.mean()),
                kl_error=standard_error(kl),
                top1=float(simulation.same_top[place].mean()),
                perplexity_ratio=ratio,
                state_error=float(error.mean()),
                state_error_error=standard_error(error),
                state_error_steps=tuple(simulation.state_error[:, place].mean(1).tolist()),
                saturated=simulation.saturated[place],
                samples={
                    "kl": tuple(kl.tolist()),
                    "top1": tuple(simulation.same_top[place].mean(1).tolist()),
                    "state_error": tuple(error.tolist()),
                },
            )
        )
    return tuple(rows)


def standard_error(values: NDArray[np.float64]) -> float | None:
    """Of the mean of independent values; None for fewer than two."""
    if values.size < 2:
        return None
    return float(values.std(ddof=1) / math.sqrt(values.size))
