"""Both forms of the chunked prefill against the recurrence written down token by token in NumPy float64.

Nothing of the package computes the expectation (DAMP Eq. 1 and 2; Yang et al. 2024, arXiv:2412.06464).
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybridstate.kernels.prefill import prefill
from hybridstate.kernels.reference import chunk_prefill
from tests.kernels.test_prefill import DEVICES
from tests.tolerances import relative_rms

pytest.importorskip("triton")
Array = NDArray[np.float64]

NUMBERS = [0.0, -1e-6, -20.0, -80.0, -1e4]
DECAYS = ["mixed", "bursts", 0.0, -1e4]
"""`mixed`: every token draws one of the numbers; `bursts`: slow decay, now and then all is forgotten."""


def token_by_token(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Any:
    """Outputs `[B, T, H, V]` and final states of normalised q and k."""
    ratio = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), ratio, 2) for x in (q, k))
    outputs = np.empty_like(v)
    for t in range(v.shape[1]):
        decay = np.exp(g[:, t])
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        read = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        outputs[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) / np.sqrt(q.shape[-1])
    return outputs, state


def drawn(decay: Any, ratio: int, tokens: int, per_channel: bool) -> list[Array]:
    rng = np.random.default_rng([ratio, tokens, per_channel])
    heads, wide, columns = 2 * ratio, 13, 19
    q, k = (rng.normal(size=(2, tokens, 2, wide)) * 10.0 ** rng.integers(-3, 4) for _ in range(2))
    k[:, 1::3] = k[:, :1]
    v = rng.normal(size=(2, tokens, heads, columns))
    shape = (2, tokens, heads, wide) if per_channel else (2, tokens, heads)
    if decay == "mixed":
        g = rng.choice(NUMBERS, size=shape)
    elif decay == "bursts":
        g = np.where(rng.random(shape) < 0.1, -1e4, -rng.exponential(0.05, size=shape))
    else:
        g = np.full(shape, decay)
    beta = rng.choice([0.0, 0.3, 1.0], size=(2, tokens, heads))
    return [q, k, v, g.astype(np.float64), beta, rng.normal(size=(2, heads, wide, columns))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("ratio", "tokens"), [(1, 1), (2, 35), (3, 67)])
def test_outputs_and_states_are_those_of_the_recurrence(
    ratio: int, tokens: int, decay: Any, per_channel: bool, device: str
) -> None:
    low = tokens == 35  # q, k and v in BF16, outputs too
    arrays = drawn(decay, ratio, tokens, per_channel)
    inputs = [torch.tensor(x, dtype=torch.float32) for x in arrays]
    if low:
        inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    expected = token_by_token(*(x.double().numpy() for x in inputs))
    for form in (prefill, chunk_prefill):
        o, state = form(*(x.to(device) for x in inputs))
        assert o.dtype == inputs[2].dtype
        # the interpreter truncates to BF16: two roundings' worth
        assert relative_rms(o, expected[0]) < (8e-3 if low else 5e-6)
        assert relative_rms(state, expected[1]) < 5e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_a_gate_that_is_no_number_stays_visible(device: str, per_channel: bool) -> None:
    """A maximum on a GPU drops a NaN: its channel would be forgotten and nobody would know."""
    inputs = [torch.tensor(x, dtype=torch.float32) for x in drawn(-0.1, 2, 40, per_channel)]
    inputs[3][0, 20, 1] = float("nan")
    o, state = prefill(*(x.to(device) for x in inputs))
    assert bool(o[0, 20:, 1].isnan().all())
    assert bool(state[0, 1].isnan().all())
    assert bool(state[0, 0].isfinite().all())
    assert bool(state[1].isfinite().all())
