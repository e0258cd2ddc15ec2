"""`bench serve` on a GPU: every call on slots is a graph before the clock starts, and a result says so."""

import pytest

from hybridstate import bench_serve
from tests.bench.test_serve_gpu import SMALL

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-kda"])
def test_results_tell_that_slots_move_in_graphs(model: str) -> None:
    found = bench_serve(
        model,
        plan=f"plans/{model}",
        arms=("wr+int8", "damp", "damp+wr"),
        **SMALL,
    )
    for point in found["points"]:
        calls = point["engine"]["slots"]
        assert {call["reason"] for call in calls.values()} == {None}, calls
        ran = {name for name, call in calls.items() if call["mode"] == "cuda-graph"}
        alone = {"copy", "finite"}
        assert ran == (alone if point["arm"] in ("dense", "damp") else set(calls)), point["arm"]
