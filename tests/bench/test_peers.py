"""Other packages' kernels are checked before they are timed; fla-core itself is not needed here."""

import pytest
import torch
from torch import Tensor

from hybridstate.bench import peers
from hybridstate.bench.layers import UpdateDims, random_inputs
from hybridstate.errors import NumericError
from hybridstate.kernels.reference import recurrent_step

CPU = torch.device("cpu")
LAYER = UpdateDims("small", "kda", 2, 4, 8, 12)


def test_no_peer_runs_on_a_cpu() -> None:
    assert peers.peer_version(CPU) is None
    seen: list[object] = []
    assert peers.peer_rows((LAYER,), (1,), CPU, 1, 1, 0, lambda *a: seen.append(a)) == ()
    assert not seen


@pytest.mark.parametrize("wrong", [False, True])
def test_a_peer_must_be_right_to_be_timed(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(kind: str, *vectors: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, g, beta = (x.squeeze(1) for x in vectors)

        def call(state: Tensor) -> tuple[Tensor, Tensor]:
            o, new = recurrent_step(q, k, v, g, beta, state)
            return o.unsqueeze(1), new * 1.001 if wrong else new

        return call

    monkeypatch.setattr(peers, "_call", fake)
    vectors = random_inputs(LAYER, 2, CPU, 0)[:-1]
    if wrong:
        with pytest.raises(NumericError, match="differs from float64"):
            peers.peer_step("kda", vectors, 1, warmup=0, repeat=1)
    else:
        samples, errors = peers.peer_step("kda", vectors, 2, warmup=1, repeat=3)
        assert len(samples.seconds) == 3
        assert errors["state_error"] < 1e-6
