"""Other packages' kernels are checked before they are timed; none of them is needed here."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridstate.bench import peers
from hybridstate.bench.layers import UpdateDims, random_fusion, random_inputs
from hybridstate.bench.peer_calls import CALLS, PeerCall
from hybridstate.errors import NumericError
from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.reference import recurrent_step

CPU = torch.device("cpu")
LAYER = UpdateDims("small", "kda", 2, 4, 8, 12)


def call(factor: float = 1.0, *, in_place: bool = True, value_first: bool = True) -> PeerCall:
    """A peer that is the reference, or wrong by a factor."""

    def build(
        vectors: tuple[Tensor, ...], fusion: StepFusion, pool: Tensor, groups: Sequence[Tensor]
    ) -> Any:
        q, k, v, g, beta = vectors
        q, k, g, beta = fusion.derive(q, k, g, beta)

        def step(group: int, *, read: bool = False) -> Any:
            state = pool[groups[group]]
            state = state.mT if value_first else state
            o, new = recurrent_step(q, k, v, g, beta, state)
            new = (new * factor).mT if value_first else new * factor
            if in_place:
                pool[groups[group]] = new
            return (o, new) if read else None

        return step

    return PeerCall(
        "twin", "torch", "torch", torch.float32, in_place, value_first, ("kda",), ("fused", "given"),
        build,
    )  # fmt: skip


def test_no_peer_runs_on_a_cpu() -> None:
    assert peers.installed(CPU) == {}
    seen: list[object] = []
    found = peers.peer_rows((LAYER,), (1,), ("given",), CPU, 1, 1, 0, lambda *a: seen.append(a))
    assert found == ()
    assert not seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value_first", [False, True])
def test_a_right_peer_is_timed(value_first: bool, fused: bool) -> None:
    vectors = random_inputs(LAYER, 2, CPU, 0, fused=fused)[:-1]
    fusion = random_fusion(LAYER, CPU, 0, fused=fused)
    peer = call(in_place=value_first, value_first=value_first)
    samples, errors = peers.peer_step(peer, vectors, fusion, 2, warmup=1, repeat=3)
    assert len(samples.seconds) == 3
    assert errors["state_error"] < 1e-6


def test_a_wrong_peer_is_not_timed_and_its_row_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = random_inputs(LAYER, 2, CPU, 0)[:-1]
    with pytest.raises(NumericError, match="differs from float64"):
        peers.peer_step(call(1.01), vectors, warmup=0, repeat=1)
    monkeypatch.setattr(peers, "CALLS", (call(1.01), call()))
    monkeypatch.setattr(peers, "installed", lambda device: {"torch": "0"})
    wrong, right = peers.peer_rows((LAYER,), (1,), ("given",), CPU, 2, 0, 0, lambda *a: None)
    assert "differs from float64" in wrong["failed"]
    assert "step_s" not in wrong
    assert right["in_place"]
    assert len(right["step_s"]["samples"]) == 2


def test_calls_name_what_they_compute() -> None:
    assert {c.distribution for c in CALLS} == {"fla-core", "sglang", "vllm", "flashinfer-python"}
    assert {c.state for c in CALLS} == {"fp32", "bf16", "fp16"}
    assert not any(c.fits("kda", "fused") for c in CALLS if c.distribution == "vllm")
    assert all(c.in_place or "fused_recurrent" in c.name for c in CALLS)
