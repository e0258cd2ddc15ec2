"""Constants of the two methods, each with the place it comes from. No other module repeats them."""

from typing import Final

EPSILON: Final = 1e-3
"""Share of a unit's content still present at its retention horizon (DASC Eq. 3)."""

PAPER_GATE_INPUT: Final[dict[str, float]] = {
    "qwen3_next": -0.3,
    "kimi_linear": -0.3,
    "kimi_k3": 0.8,
}
"""Representative gate input a_s of the three models for which the paper gives one (DASC 3.3)."""

GATE_INPUT: Final[dict[str, float]] = {"softplus": -0.3, "safe": 0.0}
"""a_s by gate for every other model: the paper's softplus value, and no opinion for the safe gate."""

W_MAX: Final = (16, 64, 128, 512)
"""Cutoffs in tokens reported by default (DASC Table 2 and Fig. 4)."""

MIN_REPLAY_TOKENS: Final = 4
"""Shortest replay window of an omitted unit (DASC Eq. 7)."""

CUTOFF_TIE: Final = 1e-6
"""Relative distance to the cutoff under which a unit counts as a near tie."""

RANDOM_MASK_SEEDS: Final = (1234, 2027, 3407, 4519, 5683)
"""Seeds of the count-matched random masks (DASC appendix C)."""

GROUP: Final = 32
"""Values along V that share one INT8 scale (DAMP A.1)."""

RISK_HORIZON: Final = 256
"""Updates over which the risk score follows a quantisation error (DAMP 6.1, H)."""

K_HI_SHARE: Final = 0.125
"""Share of key channels kept in FP16 (DAMP 6.1: 16 of 128)."""

FP16_MAX: Final = 65504.0
"""Largest finite FP16 value; protected rows saturate there."""

L2_EPSILON: Final = 1e-6
"""Added to the sum of squares of q and k before the square root."""

REPEATED_LIMIT: Final = 0.5
"""Share of repeated 32-grams above which trajectories say little about real use."""
