"""`bench serve` on a GPU: every arm runs in captured steps, and hits what the CPU's cache would."""

from typing import Any

import pytest
import torch

from hybridstate import bench_serve

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "scale": 1 / 16,
    "conversations": 12,
    "clients": 8,
    "limits": (4,),
    "ratios": (0.2,),
    "seeds": 1,
    "w_max": (64,),
    "control": False,
    "device": "cuda",
}
"""A run whose pools hold everything."""
ARMS = ("nr", "wr", "int8", "bf16", "damp", "nr+int8", "wr+int8", "damp+nr", "damp+wr")


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-kda"])
def test_every_arm_serves_in_captured_steps(model: str) -> None:
    """The pools hold everything, so all arms find the same prefixes."""
    found = bench_serve(
        model,
        plan=f"plans/{model}",
        arms=ARMS,
        **SMALL,
    )
    failed = {p["arm"]: p["skipped"] for p in found["points"] if "skipped" in p}
    assert not failed, failed
    assert len(found["points"]) == 1 + len(ARMS)
    for point in found["points"]:
        ours = point["mean"]["hybridstate"]
        assert point["engine"]["mode"] == "cuda-graph", point["engine"]
        assert ours["skipped_nonfinite"] == 0
        assert point["token_hit_rate"] == pytest.approx(found["points"][0]["token_hit_rate"])
        spent = point["native_bytes"] + point["compressed_bytes"] + point["staging_bytes"]
        assert spent <= point["budget_bytes"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-kda"])
def test_two_ranks_serve_in_captured_steps(model: str) -> None:
    """NCCL's sums lie in the graphs; the pools hold everything, so both numbers of ranks find the same prefixes."""
    options = {**SMALL, "arms": ("nr", "wr", "int8", "nr+int8", "damp+nr")}
    one = bench_serve(model, **options)["points"]
    two = bench_serve(model, tp=2, balances=("off", "storage"), **options)["points"]
    assert len(two) == len(one) + 3
    for point in (*one, *two):
        assert "skipped" not in point, point["skipped"]
        assert point["engine"]["mode"] == "cuda-graph", point["engine"]
        assert point["engine"]["replaced_modules"]["linear"] == 6
        assert point["mean"]["hybridstate"]["skipped_nonfinite"] == 0
        assert point["token_hit_rate"] == pytest.approx(one[0]["token_hit_rate"])
