"""Kernels of other packages beside those of this one, where they are installed: fla-core, SGLang, vLLM, FlashInfer.

Each is checked against float64 on the inputs it is then timed on. One that cannot be called here, or is wrong, is
reported with the reason and never timed. A kernel that returns a fresh state instead of writing into a pool is a
neighbour and not the baseline of a speed-up, so the place of the new state is part of every row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata, util
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hybridstate.bench.layers import UpdateDims, random_fusion, random_inputs
from hybridstate.bench.peer_calls import CALLS, PeerCall
from hybridstate.bench.timing import Samples, measure_launches, rotation
from hybridstate.errors import NumericError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.reference import recurrent_step

Progress = Callable[[str, int, int], None]

OUTPUT_LIMIT = 5e-3
"""Relative RMS of a bfloat16 output."""

STATE_LIMITS = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""Relative RMS of the state after one step; FP32 allows a strength that was rounded to bfloat16."""


def installed(device: torch.device) -> dict[str, str]:
    """Versions of the peers' distributions that can run on this device."""
    if device.type != "cuda":
        return {}
    return {
        call.distribution: metadata.version(call.distribution)
        for call in CALLS
        if util.find_spec(call.module) is not None
    }


def peer_rows(
    dims: Sequence[UpdateDims],
    batches: Sequence[int],
    gates: Sequence[str],
    device: torch.device,
    samples: int,
    warmup: int,
    seed: int,
    report: Progress,
) -> tuple[dict[str, Any], ...]:
    """Steps of other packages on the same inputs; none where none is installed."""
    versions = installed(device)
    wanted = [
        (layer, gate, call, batch)
        for layer, gate, call, batch in product(dims, gates, CALLS, batches)
        if call.distribution in versions and call.fits(layer.kind, gate)
    ]
    found: list[dict[str, Any]] = []
    for layer, gate, call, batch in wanted:
        fused = gate == "fused"
        row: dict[str, Any] = {
            "peer": f"{call.distribution} {versions[call.distribution]}",
            "kernel": call.name,
            "dims": layer.name,
            "batch": batch,
            "gate": gate,
            "state": call.state,
            "in_place": call.in_place,
        }
        try:
            vectors = random_inputs(layer, batch, device, seed, fused=fused)[:-1]
            fusion = random_fusion(layer, device, seed, fused=fused)
            one_way = batch * layer.value_heads * layer.key_dim * layer.value_dim
            sets = rotation(one_way * call.dtype.itemsize, device)
            step, errors = peer_step(call, vectors, fusion, sets, warmup=warmup, repeat=samples)
            row |= {"pools": sets, "step_s": step.to_json(), "check": errors}
        except Exception as error:  # another package may raise anything; the row says what
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        found.append(row)
        report("peers", len(found), len(wanted))
    return tuple(found)


def peer_step(
    call: PeerCall,
    vectors: tuple[Tensor, ...],
    fusion: StepFusion = NO_FUSION,
    sets: int = 1,
    *,
    warmup: int,
    repeat: int,
) -> tuple[Samples, dict[str, float]]:
    """Check one step against float64, then time it over `sets` states.

    Args:
        call: the peer.
        vectors: q, k [B, Hk, K], v [B, H, V], g, beta as for `kernels.update`.
        fusion: the gate's parameters where g and beta are raw.
        sets: distinct states to rotate over.
        warmup, repeat: rounds.

    Returns:
        Samples of one launch, and the errors found.

    Raises:
        NumericError: the peer's step is wrong.
    """
    q, k, v, g, beta = vectors
    batch, heads, device = v.shape[0], v.shape[1], v.device
    generator = torch.Generator(device).manual_seed(5)
    shape = (sets * batch + 1, heads, q.shape[2], v.shape[2])  # slot 0 is some engines' null block
    order = torch.arange(1, shape[0], device=device)
    if call.in_place:  # one that returns fresh states takes them in a row
        order = order[torch.randperm(len(order), generator=generator, device=device)]
    groups = [x.clone() for x in order.split(batch)]
    pool = torch.empty(shape, dtype=call.dtype, device=device)
    for part in pool.split(32):
        part.copy_(torch.randn(part.shape, generator=generator, device=device))
    stored = pool.mT.contiguous() if call.value_first else pool
    step = call.bind(vectors, fusion, stored, groups)
    before = pool[groups[0]].double()
    o, after = step(0, read=True)
    after = after.mT if call.value_first else after
    exact_q, exact_k, exact_g, exact_beta = fusion.derive(
        q.double(), k.double(), g.double(), beta.double()
    )
    exact_o, exact = recurrent_step(exact_q, exact_k, v.double(), exact_g, exact_beta, before)
    errors = {
        "output_error": float((o.reshape(v.shape).double() - exact_o).norm() / exact_o.norm()),
        "state_error": float((after.double() - exact).norm() / exact.norm()),
    }
    limit = STATE_LIMITS[call.dtype]
    if not (errors["output_error"] < OUTPUT_LIMIT and errors["state_error"] < limit):
        raise NumericError(
            f"{call.name} differs from float64: {errors}",
            hint=f"uninstall {call.distribution} or leave peers out",
        )
    launches = [partial(step, n) for n in range(sets)]
    return measure_launches(launches, device=device, warmup=warmup, repeat=repeat), errors
