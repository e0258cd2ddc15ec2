"""Tables of docs/serving.md hold the numbers of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import serving_tables
import stress_tables
from serving_tails import tails

from hybridstate.bench.cost_model import CostModel
from hybridstate.bench.serving_arms import kimi_profile
from hybridstate.bench.simulate import Simulation
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import generated


def test_tables_of_a_run() -> None:
    options = Options(
        arms=("nr", "int8"), cutoffs=(16,), ratios=(0.5, 1.0), limits=(4, 2), clients=16, seeds=1
    )
    trace = generated("wildchat-shape", 16, scale=1 / 16)
    cost = CostModel.default()
    result = Simulation(kimi_profile(), trace, cost, options, scale=1 / 16).run()
    dense = next(p for p in result["points"] if p["arm"] == "dense" and p["ratio"] == 0.5)
    assert f"{dense['mean']['mean_ttft_ms'] / 1e3:.3f} s" in serving_tables.sweep(result)
    rows = serving_tables.operating(result).splitlines()
    assert len(rows) == 2 + 3 * 3, "three arms at two limits and on the control"
    assert sum("| control |" in row for row in rows) == 3
    said = "DASC reports -25.6 % (Qwen3-Next) and -42 % (Kimi-Linear) with NR"
    assert said in serving_tables.finding(result)
    assert "It hits" in serving_tables.finding(result)
    assert serving_tables.heading(result) == "kimi-linear-profile, no think time"
    assert "0.0625 of the published ones" in serving_tables.conditions(result)
    assert serving_tables.fit(result) == ""
    rows = [{"fitted": n % 2 == 0, "ttft_error": 0.1 * n, "hit_error": 0.0} for n in range(4)]
    fitted = {"points": rows, "largest_ttft_error": 0.3, "largest_hit_error": 0.0}
    assert "of the 2 others 1 are within" in serving_tables.fit({"fit": fitted})


def test_a_run_that_went_on_says_how_its_seeds_ran() -> None:
    """Points of fewer seeds, without an arm at every ratio, some from prompts that were not captured."""
    options = Options(
        arms=("nr",), cutoffs=(16,), ratios=(0.5, 1.0), limits=(4,), clients=16, seeds=2
    )
    trace = generated("wildchat-shape", 16, scale=1 / 16)
    result = Simulation(kimi_profile(), trace, CostModel.default(), options, scale=1 / 16).run()
    captured = {"mode": "cuda-graph", "prompts": {"mode": "cuda-graph"}}
    for point in result["points"]:
        point["engine"] = captured
    dense = result["points"][0]
    dense["earlier_engines"] = [{"mode": "cuda-graph"}]
    dense["seeds"] = dense["seeds"][:1]
    result["points"].pop()
    result["continued"] = ["0123456789", "0123456789"]
    text = serving_tables.conditions(result)
    assert (
        "1 to 2 seeds a point, as the tables say, and changes against dense over the seeds" in text
    )
    assert "; earlier seeds ran at commit 0123456." in text
    result["continued"] = ["0123456789", "abcdefabcd", "0123456789", "abcdefabcd"]
    told = serving_tables.conditions(result, "abcdefabcd")
    assert "; earlier seeds ran at commit 0123456." in told, "not its own, and each once"
    assert "; earlier seeds ran at commits 0123456, abcdefa." in serving_tables.conditions(result)
    result["continued"] = ["abcdefabcd"]
    assert "earlier seeds" not in serving_tables.conditions(result, "abcdefabcd")
    assert (
        "steps cuda-graph, prompts cuda-graph (dense, nr-16); steps cuda-graph, prompts eager (dense)"
        in text
    )
    assert "% (1) |" in serving_tables.sweep(result)
    assert serving_tables.operating(result)
    assert serving_tables.finding(result)


def test_changes_have_their_range_over_the_seeds() -> None:
    """Of the seeds that both arms have, each against dense's of the same order of conversations."""
    dense = {"mean": {}, "seeds": [{"mean_ttft_ms": value} for value in (100.0, 200.0, 300.0)]}
    arm = {"seeds": [{"mean_ttft_ms": value} for value in (80.0, 140.0)]}
    assert serving_tables.spread(arm, dense) == " (-30.0 to -20.0)"
    assert serving_tables.spread({"seeds": arm["seeds"][:1]}, dense) == ""
    assert serving_tables.spread(dense, dense) == ""
    assert serving_tables.spread(arm, None) == ""


def test_the_readme_s_changes_mark_points_of_fewer_seeds() -> None:
    dense = {"arm": "dense", "ratio": 1.0, "limit": 4, "seeds": [0, 0], "tp": 1}
    dense["mean"] = {"hybridstate": {"token_hit_rate": 0.476}}
    ours = {**dense, "arm": "damp", "against_dense": {"ttft": -0.288}}
    fewer = {**ours, "arm": "nr-64", "seeds": [0]}
    left_out = {"arm": "wr-64", "ratio": 1.0, "limit": 4, "seeds": []}
    elsewhere = {**ours, "limit": 2, "against_dense": {"ttft": 9.0}}
    points = [dense, ours, fewer, left_out, elsewhere]
    text = serving_tables.changes_by_ratio([{"model": "m", "seeds": 2, "points": points}])
    assert text.splitlines()[2:] == [
        "| `m`, tokens that dense hits | 47.6 % |",
        "| `m`, TTFT of damp | -28.8 % |",
        "| `m`, TTFT of nr-64 | -28.8 %* |",
    ]


def test_what_the_mean_does_not_show() -> None:
    """Quantiles, throughput and hits by turn at the operating point; changes over the seeds that both have."""

    def seed(median: float, tail: float, served: float, *turns: float) -> dict[str, Any]:
        quantiles = {"median_ttft_ms": median, "p95_ttft_ms": tail, "p99_ttft_ms": tail + 100}
        hits = {"token_hit_rate_by_turn": list(turns)}
        return quantiles | {"request_throughput": served, "hybridstate": hits}

    def point(
        arm: str, *seeds: dict[str, Any], ratio: float = 1.0, limit: int = 4
    ) -> dict[str, Any]:
        return {"arm": arm, "ratio": ratio, "limit": limit, "seeds": list(seeds)}

    dense = seed(400, 900, 50, 0.0, 0.5), seed(600, 1100, 30, 0.0, 0.7)
    points = [
        point("dense", *dense),
        point("damp", seed(100, 900, 60, 0.0, 0.9)),
        point("wr-64"),
        point("damp", seed(1, 1, 1, 1.0, 1.0), ratio=2.0),
        point("damp", seed(1, 1, 1, 1.0, 1.0), limit=2),
    ]
    text = tails({"operating_point": {"ratio": 1.0}, "points": points})
    head, _, *rows = text.splitlines()
    assert (
        head == "| arm, ratio 1 | median TTFT | P95 | P99 | requests a second | token hit by turn |"
    )
    assert rows == [
        "| dense | 0.500 s | 1.000 s | 1.100 s | 40.0 | 0, 60 % |",
        "| damp | 0.100 s, -75.0 % | 0.900 s, +0.0 % | 1.000 s, +0.0 % | 60.0, +20.0 % | 0, 90 % |",
    ]


def test_what_a_simulation_says_beside_what_was_measured() -> None:
    """Arms of both runs at the same ratio, the sign that turned named, rates by ratio and not by when they ran."""

    def run(chosen: float, **changes: float) -> dict[str, Any]:
        points = [
            {"arm": arm, "ratio": chosen, "limit": 32, "balance": "off", "against_dense": {"ttft": change}}
            for arm, change in changes.items()
        ]  # fmt: skip
        rates = {"1": 0.5, "0.5": 0.7, "10": 0.1}
        rule = {"ratio": chosen, "dense_token_hit_rate": 0.5, "dense_token_hit_rates": rates}
        return {"operating_point": rule, "points": points}

    measured = run(1.0, dense=0.0, damp=-0.31, wr=-0.04, int8=-0.2)
    simulated = run(1.0, dense=0.0, damp=-0.3, wr=0.02, bf16=-0.1)
    text = serving_tables.beside(simulated, measured)
    assert text == (
        "Change of the mean TTFT at ratio 1, measured / simulated: `damp` -31.0 / -30.0 %, `wr` -4.0 / +2.0 %. "
        "The sign differs for `wr`."
    )
    assert serving_tables.beside(simulated, run(2.0, dense=0.0, damp=-0.31)) == ""
    assert serving_tables.beside(simulated, run(1.0, dense=0.0, int8=-0.2)) == ""
    found = serving_tables.finding(run(1.0, damp=-0.3, bf16=-0.1))
    assert "by ratio: 0.5 70.0 %, 1 50.0 %, 10 10.0 %)." in found
    assert "The best change of the mean TTFT there: `damp`, -30.0 %." in found


def test_a_fitted_simulation_is_beside_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run, if it was recorded, else the fitted one; never one with another budget."""
    monkeypatch.setattr(serving_tables, "BENCHMARKS", tmp_path)

    def run(scope: str, change: float) -> dict[str, Any]:
        point = {"arm": "damp", "ratio": 1.0, "limit": 32, "against_dense": {"ttft": change}}
        rule = {"ratio": 1.0, "dense_token_hit_rate": 0.5, "dense_token_hit_rates": {"1": 0.5}}
        return {"operating_point": rule, "points": [point], "budget_scope": scope}

    def recorded(name: str, result: dict[str, Any]) -> None:
        (tmp_path / name).write_text(json.dumps({"result": result}))

    def said(name: str, scope: str) -> str:
        words = ["bench", "simulate", "m", "--fit", "serve-m.json"]
        document = {"arguments": words, "result": run(scope, -0.2)}
        return serving_tables.fitted(tmp_path / name, document)

    assert said("simulate-m.json", "state") == ""  # not recorded
    recorded("serve-m.json", run("state", -0.3))
    text = "Change of the mean TTFT at ratio 1, measured / simulated: `damp` -30.0 / -20.0 %."
    assert said("simulate-m.json", "state") == text
    assert said("simulate-m-other.json", "state") == text
    assert said("simulate-m-kv.json", "state+kv") == ""
    recorded("serve-m-kv.json", run("state+kv", -0.1))
    assert said("simulate-m-kv.json", "state+kv") == (
        f"{text.replace('-30.0', '-10.0')} Nothing of that run was fitted."
    )
    document = {"arguments": ["bench", "simulate"], "result": run("state", -0.2)}
    assert serving_tables.fitted(tmp_path / "simulate-m.json", document) == ""


def test_stress_table_counts_leaks_and_differences() -> None:
    row = {"arm": "dense", "operations": {"submit": 1000, "step": 490, "finish": 7, "abort": 3}}
    counters = {"demotions": 5, "skipped_full": 1200, "skipped_nonfinite": 8}
    row |= {"counters": counters, "reclamations": 7, "leaked_slots": 1}
    model = {"model": "tiny", "arm": "replay", "operations": 1000, "replies_compared": 854}
    model |= {"replies_that_differ": 2, "starts": {"dense": 1, "compressed": 2, "miss": 3}}
    counters = {"requests": 9, "aborts": 4, "demotions": 6, "skipped_full": 0}
    model |= {"counters": {**counters, "skipped_nonfinite": 11}, "leaked_slots": 0}
    text = stress_tables.stress({"without_tensors": [row], "models": [model]})
    assert "| no tensors | dense | 1,500 | 1,000 | 7 | 3 | 5 | 7 | 1,200 / 8 |  |  |  | 1 |" in text
    assert (
        "| tiny | replay | 1,000 | 9 | 5 | 4 | 6 |  | 0 / 11 |  | 1 / 2 / 3 | 854, 2 differ | 0 |"
        in text
    )
    assert stress_tables.crowded({"models": [model]}) == ""
    row["while_moving"] = 31
    model["met"] = {"while_moving": 1700, "overtaken": 60, "broken": 13, "broken_known": 2}
    model["met"]["stopped"] = 5
    said = stress_tables.crowded({"models": [model]})
    assert "13 broken states were offered and 11 refused (2 known already), 5 requests were" in said
    assert "0 states were refused for lack of room; 1,700 hits" in said
    assert "for 60 of which" in said
    said = stress_tables.crowded({"models": [model, {**model, "model": "other"}]})
    assert said.count("were offered") == 1
    assert "on `tiny` and on `other` each 13 broken states" in said
    text = stress_tables.stress({"without_tensors": [row], "models": [model]})
    assert "| 1,200 / 8 | 31 |  |  | 1 |" in text
    assert "| 0 / 11 | 1,700 | 1 / 2 / 3 |" in text
