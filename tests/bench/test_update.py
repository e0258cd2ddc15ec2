"""`bench update`: what it refuses, what it counts, what it reports."""

import json
import os
from dataclasses import replace

import pytest
import torch

from hybridstate.bench import update as bench
from hybridstate.bench.layers import random_inputs
from hybridstate.bench.timing import Samples
from hybridstate.bench.update import UpdateDims, UpdateReport, run_update
from hybridstate.errors import MissingRequirement, NumericError, UsageError

SMALL = UpdateDims("small", "gdn", 1, 3, 16, 24, k_hi=8)
CHANNELS = UpdateDims("channels", "kda", 2, 2, 8, 40, k_hi=0)


@pytest.fixture(scope="module")
def report() -> UpdateReport:
    return run_update(dims=(SMALL, CHANNELS), batches=(1, 2), samples=3, warmup=1)


def test_every_format_runs_on_a_cpu_and_says_it_is_the_reference(report: UpdateReport) -> None:
    assert [(r.dims.name, r.batch, r.state) for r in report.rows] == [
        (dims, batch, state)
        for dims in ("small", "channels")
        for state in ("fp32", "bf16", "fp16", "damp")
        for batch in (1, 2)
    ]
    assert {r.backend for r in report.rows} == {"reference"}
    assert report.device["device"] == "cpu"
    assert "says nothing about the kernels" in report.protocol["backend_note"]
    assert report.protocol["inputs"].startswith("synthetic")


def test_bytes_are_the_states_read_and_written_once(report: UpdateReport) -> None:
    rows = {(r.dims.name, r.batch, r.state): r for r in report.rows}
    assert rows["small", 2, "fp32"].state_bytes == 2 * 2 * 3 * 16 * 24 * 4
    assert rows["small", 2, "bf16"].state_bytes == 2 * 2 * 3 * 16 * 24 * 2
    packed = 8 * 24 * 2 + 8 * 24 + 8 * 4
    assert rows["small", 1, "damp"].state_bytes == 2 * 3 * packed
    assert rows["small", 1, "damp"].bits_per_value == 8 * packed / (16 * 24)
    # q, k [1, 16], v, o [3, 24] in float32, g and beta [3], one slot number
    assert rows["small", 1, "fp32"].io_bytes == 4 * (2 * 16 + 2 * 72 + 6) + 8


def test_every_sample_is_kept_and_rates_follow_from_the_median(report: UpdateReport) -> None:
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    row = document["rows"][0]
    assert len(row["step_s"]["samples"]) == len(row["pass_s"]["samples"]) == 3
    moved = row["state_bytes"] + row["io_bytes"]
    assert row["gb_per_s"] == pytest.approx(moved / row["step_s"]["median"] / 1e9)
    assert set(row["check"]) == {"output_error", "state_error", "storage_error"}


def test_speed_ups_compare_equal_sizes_only(report: UpdateReport) -> None:
    fast = replace(report.rows[0], step=Samples([2.0]))
    sixteen = replace(fast, state="fp16", step=Samples([1.0]))
    packed = replace(report.rows[0], state="damp", step=Samples([0.5]))
    other = replace(packed, batch=7)
    raw = replace(packed, gate="fused")
    entry = {"dims": "small", "batch": 1, "gate": "given"}
    found = UpdateReport({}, {}, (fast, packed, other, raw)).speedups()
    assert found == [entry | {"state": "damp", "fp32_over_this": 4.0}]
    peer = entry | {
        "peer": "p 1", "kernel": "k", "state": "fp32", "in_place": False, "step_s": {"median": 1.5},
    }  # fmt: skip
    broken = entry | {"peer": "p 1", "kernel": "b", "state": "fp32", "failed": "no"}
    fastest = UpdateReport({}, {}, (fast, sixteen, packed, raw), (peer, broken)).fastest()
    assert fastest[0]["fastest"] == {
        "fp32, in place": {"who": f"ours: {fast.configuration}", "seconds": 2.0, "over_damp": 4.0},
        "fp32, out of place": {"who": "p 1: k", "seconds": 1.5, "over_damp": 3.0},
        "16-bit, in place": {
            "who": f"ours: {fast.configuration}",
            "seconds": 1.0,
            "over_damp": 2.0,
        },
    }
    assert fastest[1]["gate"] == "fused"
    assert fastest[1]["fastest"] == {}


def test_gates_from_raw_projections_are_rows_of_their_own() -> None:
    layer = replace(CHANNELS, lower_bound=-5.0)
    found = run_update(dims=(layer,), batches=(1,), gates=("fused", "given"), samples=1)
    assert [(r.gate, r.state) for r in found.rows] == [
        (gate, state) for gate in ("fused", "given") for state in ("fp32", "bf16", "fp16", "damp")
    ]
    with pytest.raises(UsageError, match="unknown gate"):
        run_update(dims=(layer,), batches=(1,), gates=("neither",), samples=1)


def test_a_wrong_step_ends_the_bench_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(q, k, v, g, beta, pool, slots, out, scale, layout, fusion):  # type: ignore[no-untyped-def]
        out.zero_()

    timed: list[object] = []
    monkeypatch.setattr(bench.Configuration, "step", lambda self: wrong)
    monkeypatch.setattr(bench, "measure_launches", lambda *a, **k: timed.append(a))
    with pytest.raises(NumericError, match=r"small, fp32, reference.* nothing is reported"):
        run_update(dims=(SMALL,), batches=(1,), samples=1)
    assert not timed


def test_overlap_reaches_every_kernel_that_has_it() -> None:
    dense = bench.Configuration("triton", bench.DenseLayout(16, 24), 8, 1, overlap=2)
    assert dense.step().keywords == {"columns": 8, "warps": 1, "overlap": 2}  # type: ignore[attr-defined]
    plain = bench.Configuration("triton", bench.PackedLayout(16, 24, 8), overlap=2)
    assert not hasattr(plain.step(), "keywords")
    assert not hasattr(replace(plain, backend="reference").step(), "keywords")
    found = run_update(dims=(SMALL,), batches=(1,), formats=("damp",), samples=1, overlap=True)
    assert found.protocol["overlapped_launches"] is True


def test_deferred_requantisation_is_timed_beside_the_other_formats() -> None:
    """Resident bits with the ring, bytes as the mean over L steps, both kinds of phases, in every comparison."""
    found = run_update(
        dims=(SMALL, CHANNELS), batches=(2,), formats=("fp32", "damp"), requantise_every=(2, 4), samples=1,
    )  # fmt: skip
    assert [(r.dims.name, r.every, r.phases) for r in found.rings] == [
        (name, every, phases)
        for name in ("small", "channels")
        for every in (2, 4)
        for phases in ("mixed", "aligned")
    ]
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    row = document["rings"][2]
    assert row["backend"] == "reference"
    packed = 8 * 24 * 2 + 8 * 24 + 8 * 4
    assert row["state_bytes"] == 2 * 3 * packed * 1.25
    # 3 entries of FP16 k (one key head) and u (three heads), FP32 sums, int32 phases
    assert row["ring_bits_per_value"] == 8 * (3 * 2 * (16 + 3 * 24) + 3 * 4 * 4 + 3 * 4) / (
        3 * 16 * 24
    )
    entry = 2 * (3 * 24 + 16)
    assert row["ring_bytes"] == 2 * (1.5 * entry + 0.75 * entry + 12 * 2.5 + 24)
    assert row["resident_bits_per_value"] == row["bits_per_value"] + row["ring_bits_per_value"]
    names = {x["state"] for x in document["speedups"]}
    assert names == {"damp"} | {
        f"damp, every {n}, {p}" for n in (2, 4) for p in ("mixed", "aligned")
    }
    assert len(document["fastest"]) == 2 * 5
    assert all("fp32, in place" in x["fastest"] for x in document["fastest"])
    with pytest.raises(UsageError, match="once in 2 to 16 steps, not in 1"):
        run_update(dims=(SMALL,), batches=(1,), requantise_every=(1,), samples=1)


def test_packed_steps_slower_than_fp32_are_listed_from_batch_8() -> None:
    layer = UpdateDims("x", "gdn", 1, 1, 8, 32)
    row = run_update(dims=(layer,), batches=(1,), formats=("damp",), samples=1).rows[0]
    rows = [
        replace(row, state=state, batch=batch, step=Samples([seconds]))
        for batch in (4, 8)
        for state, seconds in (("fp32", 1.0), ("damp", 2.0))
    ]
    assert [x["batch"] for x in UpdateReport({}, {}, tuple(rows)).slower_than_fp32()] == [8]


def test_bad_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown state format 'int4'"):
        run_update(dims=(SMALL,), formats=("fp32", "int4"))
    with pytest.raises(UsageError, match="must be positive"):
        run_update(dims=(SMALL,), batches=(0,))
    if not torch.cuda.is_available():
        with pytest.raises(MissingRequirement, match="no CUDA device"):
            run_update(dims=(SMALL,), device="cuda")


def test_progress_counts_every_row() -> None:
    seen: list[tuple[str, int, int]] = []
    run_update(
        dims=(SMALL,),
        batches=(1,),
        formats=("fp32", "damp"),
        samples=1,
        progress=lambda *args: seen.append(args),
    )
    assert seen == [("updates", 1, 2), ("updates", 2, 2)]


@pytest.mark.gpu
def test_a_gpu_tunes_dense_formats_and_runs_the_packed_kernel() -> None:
    dims = UpdateDims("gdn", "gdn", 2, 4, 128, 128)
    found = run_update(dims=(dims,), batches=(4,), device="cuda", samples=5)
    rows = {row.state: row for row in found.rows}
    assert rows["damp"].backend in ("gluon", "triton")
    assert len(rows["fp32"].tried) == 7
    assert len(rows["bf16"].tried) == 8
    ring = run_update(
        dims=(dims,), batches=(4,), formats=("damp",), requantise_every=(4,), overlap=True,
        device="cuda", samples=3,
    ).rings  # fmt: skip
    assert [(x.phases, x.backend) for x in ring] == [("mixed", "gluon"), ("aligned", "gluon")]
    assert rows["fp32"].pools * 4 * 4 * 128 * 128 * 4 >= 4 * found.device["l2_bytes"]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: a GPU is here"
)
@pytest.mark.parametrize("state", ["fp32", "fp16", "damp"])
def test_every_configuration_a_gpu_would_time_is_right(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(bench.update, "backend", lambda device, layout: "triton")
    layer, cpu = replace(CHANNELS, k_hi=4), torch.device("cpu")
    found = bench._configurations(layer, state, cpu)
    assert len({c.label for c in found}) == len(found) == (1 if state == "damp" else 7)
    for configuration in found:
        bench._checked(configuration, layer, state, cpu, fused=True)
        inputs = random_inputs(layer, 2, cpu, seed=0)
        bench._launches(configuration, layer, 2, 2, inputs, seed=0)[1]()
        assert torch.isfinite(inputs[-1]).all()
