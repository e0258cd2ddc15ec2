"""Kernels of other packages beside ours: fla-core's fused recurrent step on an FP32 state, where it is installed.

It returns a fresh state instead of writing into a pool, so it is a neighbour and not the baseline of a speed-up.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata, util
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hybridstate.bench.layers import UpdateDims, random_inputs
from hybridstate.bench.timing import Samples, measure_launches, rotation
from hybridstate.errors import NumericError
from hybridstate.kernels.reference import recurrent_step

Progress = Callable[[str, int, int], None]

OUTPUT_LIMIT = 5e-3
"""Relative RMS of a bfloat16 output."""

STATE_LIMIT = 1e-4
"""Relative RMS of the FP32 state after one step."""


def peer_version(device: torch.device) -> str | None:
    """Name and version of the peer that can run on this device, or None."""
    if device.type != "cuda" or util.find_spec("fla") is None:
        return None
    return f"fla-core {metadata.version('fla-core')}"


def peer_rows(
    dims: Sequence[UpdateDims],
    batches: Sequence[int],
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    report: Progress,
) -> tuple[dict[str, Any], ...]:
    """FP32 steps of another package on the same inputs; none where it is not installed."""
    name = peer_version(device)
    found: list[dict[str, Any]] = []
    for layer, batch in product(dims, batches) if name else ():
        vectors = random_inputs(layer, batch, device, seed)[:-1]
        one_way = batch * layer.value_heads * layer.key_dim * layer.value_dim * 4
        sets = rotation(one_way, device)
        step, errors = peer_step(layer.kind, vectors, sets, warmup=warmup, repeat=samples)
        row = {"peer": name, "dims": layer.name, "batch": batch, "state": "fp32, out of place"}
        found.append({**row, "pools": sets, "step_s": step.to_json(), "check": errors})
        report("peers", len(found), len(dims) * len(batches))
    return tuple(found)


def peer_step(
    kind: str, vectors: tuple[Tensor, ...], sets: int, *, warmup: int, repeat: int
) -> tuple[Samples, dict[str, float]]:
    """Check one step against float64, then time it over `sets` states.

    Args:
        kind: "gdn" or "kda".
        vectors: q, k [B, Hk, K], v [B, H, V], g, beta as for `kernels.update`.
        sets: distinct states to rotate over.
        warmup, repeat: rounds.

    Returns:
        Samples of one launch, and the errors found.

    Raises:
        NumericError: the peer's step is wrong.
    """
    q, k, v, g, beta = vectors
    call = _call(kind, *(x.unsqueeze(1) for x in vectors))
    shape = (v.shape[0], v.shape[1], q.shape[2], v.shape[2])
    states = [torch.randn(shape, device=v.device) for _ in range(sets)]
    o, state = call(states[0])
    exact_o, exact = recurrent_step(
        q.double(), k.double(), v.double(), g.double(), beta.double(), states[0].double()
    )
    errors = {
        "output_error": float((o.squeeze(1).double() - exact_o).norm() / exact_o.norm()),
        "state_error": float((state.double() - exact).norm() / exact.norm()),
    }
    if not (errors["output_error"] < OUTPUT_LIMIT and errors["state_error"] < STATE_LIMIT):
        raise NumericError(
            f"the peer's {kind} step differs from float64: {errors}",
            hint="uninstall fla-core or leave peers out",
        )
    launches = [partial(call, x) for x in states]
    return measure_launches(launches, device=v.device, warmup=warmup, repeat=repeat), errors


def _call(
    kind: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Callable[[Tensor], Any]:
    """The peer's function with everything but the state bound; tensors carry a token axis of one."""
    if kind == "gdn":
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step
    else:
        from fla.ops.kda import fused_recurrent_kda as step

    def call(state: Tensor) -> Any:
        with torch.no_grad():
            return step(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

    return call
