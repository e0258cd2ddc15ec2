"""The serving simulation: traces, statistics, equal bytes, the operating point, the fit."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hybridstate.bench.cost_model import TERMS, CostModel, features, fit
from hybridstate.bench.recording import RecordingExecutor, RecordingStore
from hybridstate.bench.scheduler import Limits, Run, Scheduler, Served
from hybridstate.bench.serving_arms import KIMI_SURVIVAL, Arm, kimi_profile
from hybridstate.bench.serving_setup import (
    context_limit,
    fitting_scale,
    kv_token_bytes,
    with_exchange,
)
from hybridstate.bench.serving_stats import Goal, mean_over_seeds, statistics
from hybridstate.bench.simulate import (
    CostedExecutor,
    Simulation,
    fit_and_predict,
    fitted_half,
    simulate_once,
)
from hybridstate.bench.sweep import Options
from hybridstate.bench.traces import (
    MOONCAKE_BLOCK,
    generated,
    longest,
    no_sharing,
    read_trace,
    shared_prefix,
    wildchat_shape,
)
from hybridstate.cli.main import app
from hybridstate.errors import NumericError, SourceError, UsageError
from hybridstate.runtime.admission import Admission, Counters, Pools
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.tiers import CountingStore

PROFILE = kimi_profile()
ARMS = {arm.name: arm for arm in PROFILE.arms((16,))}
COST = CostModel.default()
SMALL = wildchat_shape(24, prompt=(100, 800), context=1600, reply=64)
LOAD = Limits(clients=12, running=4)


def served(arm: Arm, pools: Pools, seed: int = 0) -> tuple[Run, PrefixCache]:
    return simulate_once(arm, pools, SMALL, COST, LOAD, seed=seed)


# -- traces -------------------------------------------------------------------------------------


def test_wildchat_shape_keeps_its_bounds_and_repeats() -> None:
    trace = wildchat_shape(64)
    assert trace.synthetic
    assert trace.note.startswith("synthetic")
    starts = set()
    for number in range(trace.size):
        conversation = trace.make(number)
        assert len(conversation.turns) == 4
        first = conversation.turns[0]
        assert 1_000 <= len(first.tokens) <= 8_000
        starts.add(first.tokens[:16].tobytes())
        total = sum(len(t.tokens) + t.reply for t in conversation.turns)
        assert total <= 16_384
        assert all(1 <= t.reply <= 1_024 == max(1_024, t.reply) for t in conversation.turns)
        assert all(len(t.recorded) == t.reply for t in conversation.turns)
        again = trace.make(number).turns[0].tokens
        assert np.array_equal(first.tokens, again)
    assert len(starts) == trace.size, "no two conversations may share a prefix"


def test_shared_prefixes_are_shared_and_the_control_shares_nothing() -> None:
    trace = shared_prefix(groups=2, per_group=3, system=50, question=20, reply=5)
    prompts = [trace.make(n).turns[0].tokens for n in range(trace.size)]
    assert np.array_equal(prompts[0][:50], prompts[2][:50])
    assert not np.array_equal(prompts[0][:50], prompts[1][:50])
    assert not np.array_equal(prompts[0][50:], prompts[2][50:])
    control = [no_sharing(8).make(n).turns[0].tokens[:16].tobytes() for n in range(8)]
    assert len(set(control)) == 8


def test_recorded_formats(tmp_path: Path) -> None:
    said = [("human", "Hello there"), ("gpt", "Hi"), ("human", "More?"), ("gpt", "No.")]
    sharegpt = tmp_path / "s.json"
    rows = [{"id": 1, "conversations": [{"from": a, "value": b} for a, b in said]}]
    sharegpt.write_text(json.dumps(rows))
    trace = read_trace(sharegpt, "sharegpt")
    turns = trace.make(0).turns
    assert [bytes(t.tokens.tolist()).decode() for t in turns] == ["Hello there", "More?"]
    assert [t.reply for t in turns] == [2, 3]
    assert not trace.synthetic
    messages = tmp_path / "m.jsonl"
    roles = {"human": "user", "gpt": "assistant"}
    row = {"conversation": [{"role": roles[a], "content": b} for a, b in said]}
    messages.write_text(json.dumps(row) + "\n\n" + json.dumps({"messages": row["conversation"]}))
    assert read_trace(messages, "messages").size == 2
    assert read_trace(messages, "messages", turns=2, reply=1).make(1).turns[1].reply == 1
    with pytest.raises(SourceError, match="no conversation"):
        read_trace(messages, "messages", turns=3)
    mooncake = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1000, "input_length": 600, "output_length": 0, "hash_ids": [7, 9]},
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(mooncake, "mooncake")
    first, second = trace.make(0), trace.make(1)
    assert (first.start, second.start) == (0.0, 1.0)
    assert (len(first.turns[0].tokens), len(second.turns[0].tokens)) == (600, 700)
    same = first.turns[0].tokens[:MOONCAKE_BLOCK] == second.turns[0].tokens[:MOONCAKE_BLOCK]
    assert same.all()
    assert first.turns[0].reply == 1


@pytest.mark.parametrize("style", ["sharegpt", "messages", "mooncake"])
@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "", '[{"conversations": 3}]'])
def test_damaged_traces_are_named(tmp_path: Path, style: str, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(SourceError, match=r"bad\.json"):
        read_trace(file, style)  # type: ignore[arg-type]


# -- the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd", [{"timestamp": float("nan")}, {"timestamp": float("inf")}, {"input_length": 1e999}]
)
def test_mooncake_numbers_are_finite(tmp_path: Path, odd: dict[str, float]) -> None:
    row = {"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1], **odd}
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(SourceError, match=r"odd\.jsonl as a Mooncake trace"):
        read_trace(path, "mooncake")


def test_every_request_is_served_in_order_and_the_clock_adds_up() -> None:
    run, cache = served(ARMS["dense"], Pools(native=40))
    assert len(run.served) == sum(len(SMALL.make(n).turns) for n in range(SMALL.size))
    turns: dict[int, list[Served]] = {}
    for request in run.served:
        assert request.sent <= request.first <= request.last <= run.seconds
        turns.setdefault(request.conversation, []).append(request)
    for number, requests in turns.items():
        wanted = SMALL.make(number).turns
        assert [r.output_tokens for r in requests] == [t.reply for t in wanted]
        for before, after in itertools.pairwise(requests):
            assert after.sent == before.last
            # the state behind the reply without its last token
            assert after.hit_tokens == before.prompt_tokens + before.output_tokens - 1
    assert run.peak == LOAD.running
    gaps = sum(len(values) * weight for values, weight in run.gaps)
    assert gaps == sum(r.output_tokens - 1 for r in run.served)
    between = sum(float(values.sum()) * weight for values, weight in run.gaps)
    assert between == pytest.approx(sum(r.last - r.first for r in run.served))
    assert cache.counters.requests == len(run.served)


def test_a_run_repeats_and_seeds_differ() -> None:
    pools = Pools(native=8, packed=10, watermark=2)
    digests = [served(ARMS["nr-16"], pools, seed)[1].digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_statistics_count_misses_and_average_seeds() -> None:
    requests = [
        Served(0, 0, 100, 0, "miss", 0, 1, 0.0, 1.0, 1.0),
        Served(0, 1, 100, 60, "dense", 0, 5, 1.0, 1.5, 3.5),
    ]
    run = Run(requests, [(np.array([0.5, 0.5]), 2)], 4.0, 2)
    counters = Counters(tokens_dense=60)
    found = statistics(run, counters, clients=2, limit=2, goal=Goal(ttft=0.7))
    assert found["mean_ttft_ms"] == pytest.approx(750)
    assert found["p95_ttft_ms"] == pytest.approx(1e3 * np.percentile([1.0, 0.5], 95))
    assert found["std_ttft_ms"] == pytest.approx(250)
    assert found["mean_tpot_ms"] == pytest.approx(500), "requests of one token have none"
    assert found["slo_attainment"] == 0.0
    assert found["hybridstate"]["token_hit_rate"] == pytest.approx(0.3)
    assert found["hybridstate"]["token_hit_rate_by_turn"] == [0.0, 0.6]
    assert found["hybridstate"]["token_hit_rate_dense_by_turn"] == [0.0, 0.6]
    assert found["hybridstate"]["token_hit_rate_compressed_by_turn"] == [0.0, 0.0]
    other = statistics(run, Counters(), clients=2, limit=2, goal=Goal())
    mean = mean_over_seeds([found, other])
    assert mean["hybridstate"]["token_hit_rate"] == pytest.approx(0.15)
    assert mean["p95_ttft_ms"] == found["p95_ttft_ms"]


def test_itl_percentiles_are_those_of_the_repeated_values() -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    gaps = [(rng.random(int(rng.integers(1, 9))), int(rng.integers(1, 5))) for _ in range(20)]
    flat = np.concatenate([np.repeat(values, weight) for values, weight in gaps])
    one = Served(0, 0, 1, 0, "miss", 0, 1, 0.0, 1.0, 1.0)
    found = statistics(Run([one], gaps, 1.0, 1), Counters(), clients=1, limit=1, goal=Goal())
    for name, value in (
        ("mean", flat.mean()),
        ("median", np.median(flat)),
        ("std", flat.std()),
        ("p90", np.percentile(flat, 90)),
        ("p99", np.percentile(flat, 99)),
    ):
        assert found[f"{name}_itl_ms"] == pytest.approx(1e3 * value)


# -- arms ---------------------------------------------------------------------------------------


def test_kimi_profile_has_the_published_retention() -> None:
    every = np.concatenate([values.ravel() for values in PROFILE.horizons])
    for tokens, share in KIMI_SURVIVAL[1:]:
        assert (every > tokens).mean() == pytest.approx(share, abs=1e-4)
    dense = ARMS["dense"].live
    assert dense.full_bytes == 41_943_040 + 1_474_560
    nr = ARMS["nr-16"].cached
    assert nr is not None
    assert dense.full_bytes / nr.full_bytes == pytest.approx(2.64, abs=0.01)


@pytest.mark.parametrize("scope", ["state", "state+kv"])
def test_every_arm_fits_the_dense_bytes(scope: str) -> None:
    dense = ARMS["dense"]
    for arm in ARMS.values():
        pools, spent = arm.pools(
            dense.live,
            100,
            native=20,
            kv_bytes=PROFILE.kv_bytes,
            scope=scope,  # type: ignore[arg-type]
        )
        total = spent.pop("budget_bytes")
        used = sum(spent.values())
        assert used <= total
        each = (arm.cached or arm.live).full_bytes
        kv = 0 if pools.kv_tokens is None else total // 101 - dense.live.full_bytes
        assert total - used < each + kv, f"{arm.name} leaves a slot unused"
    with pytest.raises(UsageError, match="too few for"):
        ARMS["nr-16"].pools(dense.live, 10, native=20)


def test_placement_moves_units_and_evens_out_slots() -> None:
    arms = {a.name: a for a in PROFILE.arms((16,), tp=8, balances=("off", "storage"))}
    off, storage = arms["nr-16"], arms["nr-16 storage"]
    assert off.cached is not None
    assert storage.cached is not None
    assert storage.cached.full_bytes < off.cached.full_bytes
    assert off.remote_bytes == 0 < storage.remote_bytes


def test_the_operating_point_is_chosen_by_the_dense_arm_and_the_control_gains_nothing() -> None:
    options = Options(
        arms=("nr", "wr", "damp+nr"),
        cutoffs=(16,),
        ratios=(0.5, 2.0),
        limits=(4, 2),
        clients=12,
        seeds=2,
    )
    # prompts are short here, so that their tokens have to cost more than what surrounds them
    slow = CostModel("test", {**COST.coefficients, "prefill": (0.0, 2e-4, 0.0)}, {})
    result = Simulation(PROFILE, SMALL, slow, options).run()
    dense = [p for p in result["points"] if p["arm"] == "dense" and p["limit"] == 4]
    hits = {p["ratio"]: p["mean"]["hybridstate"]["token_hit_rate"] for p in dense}
    chosen = result["operating_point"]["ratio"]
    assert abs(hits[chosen] - 0.5) == min(abs(hit - 0.5) for hit in hits.values())
    assert len(result["points"]) == 4 * 3
    assert {p["ratio"] for p in result["points"] if p["limit"] == 2} == {chosen}
    for point in result["control"]:
        assert point["mean"]["hybridstate"]["token_hit_rate"] == 0.0
        if point["arm"].startswith(("nr", "wr")):
            assert abs(point["against_dense"]["ttft"]) < 0.01
    better = next(p for p in result["points"] if p["arm"] == "nr-16" and p["ratio"] == 2.0)
    assert better["mean"]["hybridstate"]["token_hit_rate"] > hits[2.0]
    assert better["against_dense"]["ttft"] < 0
    json.dumps(result, allow_nan=False)


# -- cost model ---------------------------------------------------------------------------------


def test_fit_recovers_coefficients_with_error_bars() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    rows = {"prefill": [], "decode": []}  # type: ignore[var-annotated]
    for _ in range(200):
        start = float(rng.integers(0, 4000))
        end = start + float(rng.integers(1, 8000))
        batch, context = float(rng.integers(1, 33)), float(rng.integers(100, 100_000))
        noise = 1 + 0.01 * rng.standard_normal(2)
        rows["prefill"].append([start, end, COST.seconds("prefill", start, end) * noise[0]])
        seconds = COST.seconds("decode", batch, 43e6, context) * noise[1]
        rows["decode"].append([batch, 43e6, context, seconds])
    fitted = fit(rows, "test")
    for start, end in ((0, 4000), (2000, 9000)):
        assert fitted.seconds("prefill", start, end) == pytest.approx(
            COST.seconds("prefill", start, end), rel=0.02
        )
    assert fitted.seconds("decode", 16, 43e6, 5e4) == pytest.approx(
        COST.seconds("decode", 16, 43e6, 5e4), rel=0.02
    )
    slope, error = fitted.coefficients["prefill"][1], fitted.errors["prefill"][1]
    assert abs(slope - COST.coefficients["prefill"][1]) < 5 * error
    assert "assumed: copy" in fitted.source
    again = CostModel.from_json(fitted.to_json(), "file")
    assert again.coefficients == dict(fitted.coefficients)


def test_what_a_decode_call_adds_is_not_a_step_s() -> None:
    """Many short calls and a few long ones, which have most steps: a mean over calls would predict the short ones'."""
    rng = np.random.Generator(np.random.PCG64(8))
    step, call = COST.seconds("decode", 8, 43e6, 1e4), 2e-3
    lengths = np.where(rng.random(300) < 0.9, rng.integers(1, 4, 300), 200)
    rows = [[8.0, 43e6, 1e4, float(m), step + call / float(m)] for m in lengths]
    fitted = fit({"decode": rows}, "test")
    assert fitted.seconds("decode", 8, 43e6, 1e4) == pytest.approx(step, rel=1e-6)
    assert fitted.coefficients["decode"][4] == pytest.approx(call, rel=1e-6)
    executor = CostedExecutor(ARMS["dense"], fitted)
    request = SimpleNamespace(context=100)
    one, five = (executor.decode([request], n) for n in (1, 5))  # type: ignore[list-item]
    flat = executor.decode([request], 6)[:5]  # type: ignore[list-item]
    assert five.sum() - flat.sum() == pytest.approx(call, rel=1e-6)
    assert one[0] - flat[0] == pytest.approx(call, rel=1e-6)
    # rows that do not tell count only without others
    short = [row[:3] + row[4:] for row in rows]
    assert fit({"decode": [*rows, *short]}, "test").coefficients == fitted.coefficients
    # nor can calls of one length tell
    single = fit({"decode": [row for row in rows if row[3] == 1.0]}, "test")
    assert single.coefficients["decode"][4] == 0.0
    assert single.seconds("decode", 8, 43e6, 1e4) == pytest.approx(step + call, rel=1e-6)
    old = fit({"decode": short}, "test")
    assert old.coefficients["decode"][4] == 0.0
    assert old.seconds("decode", 8, 43e6, 1e4) > 1.1 * step


def test_a_cost_file_may_leave_out_what_a_call_adds() -> None:
    document = COST.to_json()
    del document["decode"]["per_call"]
    assert CostModel.from_json(document, "file").coefficients == dict(COST.coefficients)
    del document["decode"]["fixed"]
    with pytest.raises(SourceError, match="decode needs the numbers"):
        CostModel.from_json(document, "file")


def test_both_halves_of_a_fit_have_all_arms() -> None:
    """Arms in one order at every ratio: every other point would never fit some of them."""
    arms = ["dense"] * 6 + ["damp", "int8", "nr", "wr"] * 6
    used = fitted_half([{"arm": arm} for arm in arms])
    for arm in set(arms):
        assert sum(fits for name, fits in zip(arms, used, strict=True) if name == arm) == 3, arm
    once = fitted_half([{"arm": arm} for arm in ("dense", "damp", "int8", "nr")])
    assert once == [True, False, True, False]
    assert fitted_half([{}, {}, {}]) == [True, False, True]


def test_sums_of_a_noisy_operation_are_predicted() -> None:
    """Times with a long tail: what counts is their mean, not the usual one."""
    rng = np.random.Generator(np.random.PCG64(9))
    seconds = 0.01 * np.exp(rng.standard_normal(400))
    fitted = fit({"pack": [[100.0, float(s)] for s in seconds]}, "test")
    assert fitted.seconds("pack", 100.0) == pytest.approx(seconds.mean(), rel=0.01)


@pytest.mark.parametrize("place", ["term", "standard error"])
def test_a_misspelt_term_of_a_cost_model_is_named_with_the_known_ones(place: str) -> None:
    """Left out silently it would count as zero, or as the default where it is optional."""
    document = COST.to_json()
    terms = document["decode"]
    if place == "standard error":
        terms["standard_errors"] = terms = dict.fromkeys(TERMS["decode"], 0.0)
    terms["per_cal"] = 1e-3
    with pytest.raises(
        SourceError, match=r"cost\.json: .*decode has the unknown 'per_cal'"
    ) as failed:
        CostModel.from_json(document, "cost.json")
    assert all(term in failed.value.message for term in TERMS["decode"])
    with pytest.raises(SourceError, match=r"cost\.json: unknown operations .*: walk"):
        CostModel.from_json({"walk": {}}, "cost.json")


def test_wrong_cost_models_are_refused(tmp_path: Path) -> None:
    for text in (
        '{"walk": {}}',
        '{"copy": {"fixed": 1}}',
        '{"copy": {"fixed": -1, "per_byte": 0}}',
        "3",
    ):
        file = tmp_path / "cost.json"
        file.write_text(text)
        with pytest.raises(SourceError):
            CostModel.read(file)
    assert set(TERMS) == set(COST.coefficients)
    assert features("prefill", 2, 5) == (1.0, 3, 12.0), "positions 3 + 4 + 5"


def test_half_of_the_points_predict_the_other_half() -> None:
    """An engine with other coefficients and noise: fitted on half of its points, predicted on the rest."""
    real = CostModel(
        "real", {k: tuple(1.7 * c for c in v) for k, v in COST.coefficients.items()}, {}
    )
    rng = np.random.Generator(np.random.PCG64(5))
    cases = [(n, limit) for n in (16, 24, 32, 48) for limit in (2, 4)]

    class Noisy(CostedExecutor):
        def prefill(self, request, start, end):  # type: ignore[no-untyped-def]
            return super().prefill(request, start, end) * (1 + 0.05 * rng.standard_normal())

    points = []
    for native, limit in cases:
        executor = Noisy(ARMS["dense"], real)
        recording = RecordingExecutor(executor, ARMS["dense"].live.full_bytes)
        cache = PrefixCache(Pools(native=native), executor.store)
        run = Scheduler(SMALL, cache, recording, Limits(12, limit)).serve()
        stats = statistics(run, cache.counters, clients=12, limit=limit, goal=Goal())
        points.append(
            {
                "native": native,
                "limit": limit,
                "operations": recording.operations,
                "mean_ttft_s": stats["mean_ttft_ms"] / 1e3,
                "token_hit_rate": stats["hybridstate"]["token_hit_rate"],
            }
        )

    def predict(point, cost):  # type: ignore[no-untyped-def]
        load = Limits(12, point["limit"])
        run, cache = simulate_once(ARMS["dense"], Pools(native=point["native"]), SMALL, cost, load)
        stats = statistics(run, cache.counters, clients=12, limit=point["limit"], goal=Goal())
        return stats["mean_ttft_ms"] / 1e3, stats["hybridstate"]["token_hit_rate"]

    found = fit_and_predict(points, predict)
    assert found["largest_ttft_error"] < 0.15
    assert found["largest_hit_error"] < 0.03
    with pytest.raises(SourceError, match="two measured points"):
        fit_and_predict(points[:1], predict)


# -- command line -------------------------------------------------------------------------------


def test_command_prints_one_document(tmp_path: Path, tiny_kda: Path) -> None:
    arguments = ["bench", "simulate", str(tiny_kda), "--ratio", "1", "--limit", "4", "--seeds", "1"]
    arguments += ["--clients", "8", "--conversations", "8", "--arm", "nr-16", "--w-max", "16"]
    done = CliRunner().invoke(app, [*arguments, "--json", "-q", "-o", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["result"]["simulated"] is True
    assert document["result"]["profile"]["synthetic"] is False
    assert [p["arm"] for p in document["result"]["points"]] == ["dense", "nr-16"]
    assert json.loads((tmp_path / "out.json").read_text())["command"] == "bench simulate"
    table = CliRunner().invoke(app, [*arguments, "-q", "--no-control"])
    assert "operating point" in table.stdout
    assert "synthetic" in table.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ["--trace", "nothing"],
        ["--trace", "sharegpt"],
        ["--arm", "xyz"],
        ["--ratio", "0"],
        ["--limit", "0"],
        ["--policy", "fifo"],
        ["--budget-scope", "all"],
        ["--balance", "none"],
        ["--think", "-1"],
        ["--kv-bytes", "-1"],
        ["--seeds", "0"],
        ["--scale", "2"],
        ["--every", "-1"],
        ["--conversations", "0"],
    ],
    ids=lambda w: w[0],
)
def test_wrong_options_are_usage_errors(wrong: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "simulate", *wrong])
    assert done.exit_code == 2, done.output


def test_fit_file(tmp_path: Path) -> None:
    """Measured points, here of a simulated engine twice as slow, through the command."""
    options = Options(
        arms=("nr-16",), cutoffs=(16,), ratios=(1.0,), limits=(4,), clients=8, seeds=1
    )
    slow = CostModel("real", {k: tuple(2 * c for c in v) for k, v in COST.coefficients.items()}, {})
    trace = wildchat_shape(8)
    points = []
    for arm in (ARMS["dense"], ARMS["nr-16"]):
        for ratio in (0.5, 1.0):
            pools, _ = arm.pools(ARMS["dense"].live, round(16 / ratio), native=8)
            executor = CostedExecutor(arm, slow)
            recording = RecordingExecutor(executor, arm.live.full_bytes)
            cache = PrefixCache(pools, executor.store)
            run = Scheduler(trace, cache, recording, Limits(8, 4)).serve()
            stats = statistics(run, cache.counters, clients=8, limit=4, goal=options.goal)
            points.append(
                {
                    **arm.to_json(),
                    "ratio": ratio,
                    "limit": 4,
                    "slots_native": pools.native,
                    "slots_compressed": pools.packed,
                    "kv_tokens": None,
                    "seeds": [stats],
                    "operations": recording.operations,
                    "mean_ttft_s": stats["mean_ttft_ms"] / 1e3,
                    "token_hit_rate": stats["hybridstate"]["token_hit_rate"],
                }
            )
    file = tmp_path / "points.json"
    file.write_text(json.dumps({"points": points}))
    arguments = ["bench", "simulate", "--fit", str(file), "--arm", "nr-16", "--w-max", "16"]
    arguments += ["--ratio", "1", "--limit", "4", "--clients", "8", "--conversations", "8"]
    done = CliRunner().invoke(app, [*arguments, "--seeds", "1", "--no-control", "-q", "--json"])
    assert done.exit_code == 0, done.output
    fitted = json.loads(done.stdout)["result"]["fit"]
    assert fitted["largest_ttft_error"] < 0.15
    assert fitted["largest_hit_error"] < 0.03
    assert "standard_errors" in fitted["cost_model"]["prefill"]
    file.write_text(json.dumps({"points": points, "model": "another-model"}))
    done = CliRunner().invoke(app, [*arguments, "--seeds", "1", "--no-control", "-q"])
    assert done.exit_code != 0
    assert "measured on another-model, not on kimi-linear-profile" in done.output
    file.write_text(json.dumps({"points": points, "trace": {"note": "another"}}))
    other = CliRunner().invoke(app, arguments)
    assert other.exit_code == 3
    assert "another trace" in other.output
    file.write_text("{}")
    assert CliRunner().invoke(app, arguments).exit_code == 3


def test_exchange_file(tmp_path: Path) -> None:
    """What a placement adds to a store and a load becomes the cost of an exchange; less than nothing is left out."""
    rows = []
    for w_max, count in ((16, 1), (16, 8), (64, 1), (64, 8)):
        remote = 1000 * count * (1 if w_max == 64 else 3)
        common = {"w_max": w_max, "checkpoints": count}
        at_home, apart = {"median": 1e-3}, {"median": 1e-3 + 2e-5 + remote / 2 * 1e-9}
        rows += [
            {**common, "mode": "off", "remote_bytes": 0, "store_s": at_home, "load_s": at_home},
            {**common, "mode": "storage", "remote_bytes": remote, "store_s": apart}
            | {"load_s": {"median": 5e-4} if count == 8 else apart},
        ]
    file = tmp_path / "exchange.json"
    file.write_text(json.dumps({"protocol": {"tp": 2, "backend": "gloo"}, "exchange": rows}))
    found = with_exchange(COST, file)
    assert found.coefficients["exchange"] == pytest.approx((2e-5, 1e-9), rel=1e-6)
    assert "6 measured between 2 ranks (gloo)" in found.source
    file.write_text(json.dumps({"protocol": {"tp": 2, "backend": "gloo"}, "exchange": rows[:2]}))
    with pytest.raises(SourceError, match="a fit needs three"):
        with_exchange(COST, file)


def test_lengths_scale_and_the_factor_is_stated() -> None:
    half = generated("wildchat-shape", 16, scale=0.5)
    assert "lengths are 0.5 of the published ones" in half.note
    lengths = [len(half.make(n).turns[0].tokens) for n in range(16)]
    assert 500 <= min(lengths) <= max(lengths) <= 4_000
    assert longest(half) <= 8_192
    assert generated("wildchat-shape", 4).note == wildchat_shape(4).note
    assert fitting_scale(8_192) == 0.5
    assert fitting_scale(None) == fitting_scale(1 << 20) == 1.0
    assert context_limit({"text_config": {"max_position_embeddings": 99}}) == 99
    assert context_limit({"model_max_length": 7}) == 7
    shared = generated("shared-prefix", 32, scale=1 / 64)
    assert np.array_equal(shared.make(0).turns[0].tokens[:32], shared.make(2).turns[0].tokens[:32])
    words = generated("no-sharing", 2, scale=1 / 64, encode=lambda text: [1] * len(text))
    assert set(words.make(0).turns[0].tokens.tolist()) == {1}


def test_a_recording_store_times_what_the_engine_waits_for() -> None:
    ticks = iter(range(100))
    store = RecordingStore(CountingStore(), 10, 4, lambda: float(next(ticks)))
    cache = PrefixCache(Pools(native=3, packed=1), store, Admission(shortest=1))
    first = cache.acquire(np.arange(4, dtype=np.int32))
    assert first is not None
    cache.checkpoint(first, 3)
    assert store.operations["pack"] == [[4, 1.0]]
    assert store.operations["check"] == [[10, 1.0]]
    assert (store.take(), store.take()) == (2.0, 0.0)
    cache.finish(first)
    again = cache.acquire(np.arange(4, dtype=np.int32))
    assert again is not None
    cache.load(again)
    assert store.operations["load"] == [[4, 1.0]]


def test_attention_bytes_per_token() -> None:
    assert kv_token_bytes({"num_key_value_heads": 2, "head_dim": 256}) == 2048
    assert kv_token_bytes({"text_config": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}) == 1152
    assert kv_token_bytes({}) == 0


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("copy", None, "2 numbers"),
        ("copy", [1.0], "2 numbers"),
        ("check", [True, 0.1], "2 numbers"),
        ("prefill", [0, "5", 0.1], "3 numbers"),
        ("replay", 7, "3 numbers"),
        ("decode", [1, 2], "4 or 5 numbers"),
    ],
)
def test_a_measured_row_of_another_form_is_named(kind: str, row: Any, expected: str) -> None:
    length = int(expected[0])
    good: list[Any] = [[*range(1, length), 0.1]]
    with pytest.raises(SourceError, match=rf"measured {kind} 1 is .*, {expected} are expected"):
        fit({kind: [*good, row]}, "test")


def test_rows_of_any_number_are_fitted_and_those_beyond_range_are_refused() -> None:
    rows = [[np.int64(n), np.float64(1e-3 * n)] for n in range(1, 9)]
    assert fit({"copy": rows}, "test").coefficients["copy"][1] == pytest.approx(1e-3)
    with pytest.raises(NumericError, match="prefill has arguments beyond the range"):
        fit({"prefill": [[0, 1e300, 0.1 * n] for n in range(1, 9)]}, "test")
    with pytest.raises(NumericError, match="too far apart to be fitted"):
        fit({"check": [*rows, [1e308, 1e-5]]}, "test")
