"""100,000 random operations without tensors: every slot accounted for at every step, nothing left at the end."""

import pytest

from hybridstate.runtime.admission import Admission, Pools
from tests.runtime.cache_stress import Stress

ARMS = {
    "dense": Pools(native=12),
    "two-tier": Pools(native=10, packed=8, watermark=2),
    "two-tier-leaf": Pools(native=10, packed=8, watermark=1, policy="leaf-lru"),
    "two-tier-cost": Pools(native=10, packed=8, watermark=2, policy="cost", native_bytes=4),
    "packed-only": Pools(native=8, packed=6, spill=False),
    "tight": Pools(native=2, packed=1, watermark=1, hold=False),
    "one-slot": Pools(native=1),
    "kv": Pools(native=10, packed=8, kv_tokens=150, watermark=1),
}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "at-once"])
def test_random_operations_lose_no_slot(arm: str, delayed: bool) -> None:
    admission = Admission(prompt=(0, 1), every=7, shortest=1) if arm == "kv" else None
    stress = Stress(11, ARMS[arm], admission, delayed=delayed)
    for number in range(6250):
        stress.operate()
        if number % 16 == 0:
            stress.cache.audit()
    stress.drain()
    assert stress.done["finish"] > 100
    assert stress.done["abort"] > 30
    assert stress.cache.counters.skipped_nonfinite > 0
    late = delayed and ARMS[arm].packed > 0
    assert (stress.while_moving > 0) == late, "hits on states being demoted"
