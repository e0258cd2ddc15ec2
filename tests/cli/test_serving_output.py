"""Tables of `bench serve` and `bench simulate`, as a user meets them."""

from typing import Any

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.serving_arms import kimi_profile
from hybridstate.bench.simulate import Simulation
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import generated
from hybridstate.cli.output import Output
from hybridstate.cli.serving_output import dense_hits, seed_counts, serving_tables


def printed(result: dict[str, Any]) -> list[Any]:
    out = Output("bench serve", quiet=True)
    serving_tables(out, result)
    return [part for part in out._parts if not isinstance(part, str)]


def test_a_run_on_a_cpu_shows_no_change_against_dense() -> None:
    options = Options(arms=("nr",), cutoffs=(16,), ratios=(1.0,), limits=(4,), clients=8, seeds=1)
    trace = generated("wildchat-shape", 8, scale=1 / 16)
    simulation = Simulation(kimi_profile(), trace, CostModel.default(), options, scale=1 / 16)
    simulated = {"fit": None, **simulation.run()}
    on_cpu = {**simulated, "simulated": False, "device": {"name": "cpu", "device": "cpu"}}
    for result, shown in ((simulated, True), (on_cpu, False)):
        for table in printed(result):
            assert ("change" in table.columns) is shown
            assert all(len(row) == len(table.columns) for row in table.rows)


def test_points_of_fewer_seeds_and_ratios_in_another_order_are_told_as_they_are() -> None:
    point = {"mean": {}, "seeds": [{}]}
    result = {"seeds": 3, "points": [point, {"skipped": "no room"}], "control": []}
    assert seed_counts(result) == "1 to 3 seeds"
    assert seed_counts({**result, "seeds": 1}) == "1 seed"
    assert seed_counts({**result, "points": []}) == "3 seeds"
    operating = {"dense_token_hit_rates": {"1": 0.5, "10": 0.0, "0.5": 0.75}}
    assert dense_hits(operating) == "0.5 75.0 %, 1 50.0 %, 10 0.0 %"
