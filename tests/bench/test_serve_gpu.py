"""`bench serve` on a GPU: every arm runs in captured steps, and hits what the CPU's cache would."""

import pytest

from hybridstate import bench_serve

pytestmark = pytest.mark.gpu

ARMS = ("nr", "wr", "int8", "bf16", "damp", "nr+int8", "wr+int8", "damp+nr", "damp+wr")


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-kda"])
def test_every_arm_serves_in_captured_steps(model: str) -> None:
    """The pools hold everything, so all arms find the same prefixes."""
    found = bench_serve(
        model,
        plan=f"plans/{model}",
        scale=1 / 16,
        conversations=12,
        clients=8,
        limits=(4,),
        ratios=(0.2,),
        seeds=1,
        w_max=(64,),
        arms=ARMS,
        control=False,
        device="cuda",
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
