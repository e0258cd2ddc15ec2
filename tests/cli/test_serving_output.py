"""Tables of `bench serve` and `bench simulate`, as a user meets them."""

from typing import Any

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.serving_arms import kimi_profile
from hybridstate.bench.simulate import Simulation
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import generated
from hybridstate.cli.output import Output
from hybridstate.cli.serving_output import (
    dense_hits,
    earlier_commits,
    seed_counts,
    serving_tables,
)


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
    whole = {"mean": {}, "seeds": [{}] * 3}
    result = {"seeds": 3, "points": [point, {"skipped": "no room"}], "control": [whole]}
    assert seed_counts(result) == "1 to 3 seeds"
    assert seed_counts({**result, "control": []}) == "1 seed", "however many were asked for"
    assert seed_counts({**result, "seeds": 1, "control": []}) == "1 seed"
    assert seed_counts({**result, "points": [], "control": []}) == "3 seeds"
    operating = {"dense_token_hit_rates": {"1": 0.5, "10": 0.0, "0.5": 0.75}}
    assert dense_hits(operating) == "0.5 75.0 %, 1 50.0 %, 10 0.0 %"


def test_commits_of_earlier_seeds() -> None:
    """Recorded files name the run's own commit, and others more than once."""
    ran = {"continued": ["f" * 40, "f" * 40, "9" * 40, "9" * 40]}
    assert earlier_commits(ran, "9" * 40) == "earlier seeds ran at commit fffffff"
    assert earlier_commits(ran) == "earlier seeds ran at commits fffffff, 9999999"
    assert earlier_commits({"continued": ["9" * 40]}, "9" * 40) == ""
    assert earlier_commits({}) == ""


def simulated(**options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"arms": ("nr", "damp"), "cutoffs": (16,), "ratios": (0.5, 1.0, 2.0)}
    given |= {"limits": (4,), "clients": 32, "seeds": 2, **options}
    trace = generated("wildchat-shape", 8, scale=1 / 16)
    cost = CostModel.default()
    return {
        "fit": None,
        **Simulation(kimi_profile(), trace, cost, Options(**given), scale=1 / 16).run(),
    }


def told(result: dict[str, Any]) -> tuple[list[str], list[Any]]:
    out = Output("bench serve", quiet=True)
    serving_tables(out, result)
    return out.warnings, [part for part in out._parts if not isinstance(part, str)]


def test_seeds_have_a_column_only_where_points_differ() -> None:
    result = simulated()
    warnings, tables = told(result)
    assert warnings == []
    assert "means of 2 seeds over" in tables[0].note
    assert not any("seeds" in table.columns for table in tables)
    dense = next(p for p in result["points"] if (p["arm"], p["ratio"]) == ("dense", 1.0))
    dense["seeds"].pop()
    warnings, tables = told(result)
    assert warnings == ["fewer than 2 seeds: dense (1 at ratio 1)"]
    assert "means of 1 to 2 seeds over" in tables[0].note
    assert tables[0].note.endswith("over the seeds that both have")
    for table, points in zip(tables, (result["points"], result["control"]), strict=True):
        column = table.columns.index("seeds")
        assert [row[column] for row in table.rows] == [len(p["seeds"]) for p in points]
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_fewer_seeds_than_an_earlier_run_has_are_none_that_are_missing() -> None:
    result = simulated()
    result["points"][1]["seeds"].pop()
    result["seeds_asked"] = 1
    warnings, tables = told(result)
    assert warnings == []
    assert "seeds" in tables[0].columns


def test_what_is_missing_is_told_by_arm_in_short() -> None:
    result = simulated(limits=(4, 2))
    count = {"dense": 5, "nr-16": {0.5: 2, 1.0: 2, 2.0: 1}, "damp": {0.5: 2, 1.0: 2, 2.0: 1}}
    for point in result["points"]:
        several = count[point["arm"]]
        seeds = several if isinstance(several, int) else several[point["ratio"]]
        point["seeds"] = point["seeds"][:1] * (5 if point["limit"] == 2 else seeds)
    for point in result["control"]:
        point["seeds"] = point["seeds"][:1] * (4 if point["arm"] == "damp" else 5)
    result |= {"seeds": 5, "seeds_asked": 5, "not_begun": 30}
    warnings, _ = told(result)
    operating = f"{result['operating_point']['ratio']:g}"
    assert warnings == [
        "the deadline came before 30 runs, of one seed each",
        "fewer than 5 seeds: damp (2 at ratios 0.5, 1; 1 at ratio 2; "
        f"4 at ratio {operating} of the control); nr-16 (2 at ratios 0.5, 1; 1 at ratio 2)",
    ]
    result["control"] = []
    assert told(result)[0][1].endswith("damp, nr-16 (2 at ratios 0.5, 1; 1 at ratio 2)")
    for point in result["points"]:
        if point["limit"] == 2 and point["arm"] == "damp":
            point["seeds"] = point["seeds"][:3]
    assert f"1 at ratio 2; 3 at ratio {operating} with limit 2)" in told(result)[0][1]


def test_points_that_did_not_run_are_told_with_their_ratios() -> None:
    result = simulated()
    for point in result["points"]:
        if point["arm"] == "damp" and point["ratio"] != 0.5:
            for name in ("mean", "seeds"):
                del point[name]
            point["skipped"] = "damp: not begun before the deadline"
        if point["arm"] == "nr-16":
            point["seeds"].pop()
            point["not_continued"] = "nr-16: RuntimeError: CUDA error"
            point["left_out"] = 1
    point = result["control"][1]
    del point["mean"], point["seeds"]
    point |= {"skipped": f"{point['arm']}: not begun before the deadline"}
    warnings, tables = told(result)
    ratio = f"{result['operating_point']['ratio']:g}"
    missing = f"at ratio {ratio} of the control"
    assert warnings == [
        (
            f"damp at ratios 1, 2; {point['arm']} {missing}"
            if point["arm"] != "damp"
            else f"damp at ratios 1, 2 and {missing}"
        )
        + ": not begun before the deadline",
        "no more seeds of nr-16 at ratios 0.5, 1, 2: RuntimeError: CUDA error",
        "fewer than 2 seeds: nr-16 (1 at ratios 0.5, 1, 2)",
        "3 seeds that ran behind a missing one left out: nr-16 at ratios 0.5, 1, 2",
    ]
    seeds = tables[0].columns.index("seeds")
    assert {row[seeds] for row in tables[0].rows} == {0, 1, 2}


def test_a_run_without_a_seed_has_no_means() -> None:
    result = simulated(control=False)
    for point in result["points"]:
        for name in ("mean", "seeds"):
            del point[name]
        point["skipped"] = f"{point['arm']}: not begun before the deadline"
    result["operating_point"]["dense_token_hit_rate"] = None
    warnings, tables = told(result)
    assert warnings == [
        "dense, damp, nr-16 at ratios 0.5, 1, 2: not begun before the deadline",
        "the dense arm ran nowhere, so there is no operating point",
    ]
    assert "; no seed ran; " in tables[0].note
