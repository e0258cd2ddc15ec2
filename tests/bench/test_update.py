"""`bench update`: what it refuses, what it counts, what it reports."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridstate.bench import update as bench
from hybridstate.bench import update_forms as forms
from hybridstate.bench.layers import random_inputs
from hybridstate.bench.timing import Samples
from hybridstate.bench.update import UpdateDims, UpdateReport, run_update
from hybridstate.errors import MissingRequirement, NumericError, UsageError
from hybridstate.kernels.layout import DenseLayout, PackedLayout

SMALL = UpdateDims("small", "gdn", 1, 3, 16, 24, k_hi=8)
CHANNELS = UpdateDims("channels", "kda", 2, 2, 8, 40, k_hi=0)


@pytest.fixture(scope="module")
def report() -> UpdateReport:
    return run_update(dims=(SMALL, CHANNELS), batches=(1, 2), samples=3, warmup=1)


def test_every_format_runs_on_a_cpu_and_says_it_is_the_reference(report: UpdateReport) -> None:
    assert [(r.dims.name, r.batch, r.state) for r in report.rows] == [
        (dims, batch, state)
        for dims in ("small", "channels")
        for state in ("fp32", "bf16", "fp16", "damp", "damp-scaled")
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
        (gate, state)
        for gate in ("fused", "given")
        for state in ("fp32", "bf16", "fp16", "damp", "damp-scaled")
    ]
    with pytest.raises(UsageError, match="unknown gate"):
        run_update(dims=(layer,), batches=(1,), gates=("neither",), samples=1)


def test_a_wrong_step_ends_the_bench_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(q, k, v, g, beta, pool, slots, out, scale, layout, fusion):  # type: ignore[no-untyped-def]
        out.zero_()

    timed: list[object] = []
    monkeypatch.setattr(forms.Configuration, "step", lambda self: wrong)
    monkeypatch.setattr(bench, "measure_launches", lambda *a, **k: timed.append(a))
    with pytest.raises(NumericError, match=r"small, fp32, reference.* nothing is reported"):
        run_update(dims=(SMALL,), batches=(1,), samples=1)
    assert not timed


def test_overlap_reaches_every_kernel_that_has_it() -> None:
    dense = forms.Configuration("triton", DenseLayout(16, 24), 8, 1, overlap=2)
    assert dense.step().keywords == {"columns": 8, "warps": 1, "overlap": 2}  # type: ignore[attr-defined]
    plain = forms.Configuration("triton", PackedLayout(16, 24, 8), overlap=2)
    assert not hasattr(plain.step(), "keywords")
    assert not hasattr(replace(plain, backend="reference").step(), "keywords")
    found = run_update(dims=(SMALL,), batches=(1,), formats=("damp",), samples=1, overlap=True)
    assert found.protocol["overlapped_launches"] is True


def test_deferred_requantisation_is_timed_beside_the_other_formats() -> None:
    """Resident bits with the ring, bytes as the mean over L steps, both kinds of phases, in every comparison."""
    found = run_update(
        dims=(SMALL, CHANNELS), batches=(2,), formats=("fp32", "damp"), requantise_every=(2, 4), samples=1,
    )  # fmt: skip
    few = run_update(
        dims=(SMALL,), batches=(1, 2), formats=("damp",), requantise_every=(2,), ring_batches=(2,), samples=1,
    )  # fmt: skip
    assert [r.batch for r in few.rings] == [2, 2]
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
    found = run_update(dims=(dims,), batches=(4, 256), device="cuda", samples=3)
    rows = {(row.state, row.batch): row for row in found.rows}
    assert {rows[state, 256].backend for state in ("damp", "damp-scaled")} == {"gluon"}
    assert rows["damp-scaled", 4].configuration.endswith(", 32 columns, 4 warps, value scale")
    assert [len(rows[state, 4].tried) for state in ("fp32", "bf16", "damp")] == [3, 2, 0]
    assert len(rows["bf16", 256].tried) == 2
    assert rows["bf16", 256].memory_pass == rows["fp16", 256].memory_pass
    ring = run_update(
        dims=(dims,), batches=(4,), formats=("damp",), requantise_every=(4,), overlap=True,
        device="cuda", samples=3,
    ).rings  # fmt: skip
    assert [(x.phases, x.backend) for x in ring] == [("mixed", "gluon"), ("aligned", "gluon")]
    assert rows["fp32", 4].pools * 4 * 4 * 128 * 128 * 4 >= 4 * found.device["l2_bytes"]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: a GPU is here"
)
@pytest.mark.parametrize("state", ["fp32", "fp16", "damp", "damp-scaled"])
def test_every_configuration_a_gpu_would_time_is_right(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(forms.update, "backend", lambda device, layout: "triton")
    layer, cpu = replace(CHANNELS, k_hi=4), torch.device("cpu")
    found = forms.configurations(layer, state, 2, cpu)
    assert len({c.label for c in found}) == len(found) == (1 if state.startswith("damp") else 5)
    errors = forms.checked(found, layer, state, cpu, fused=True)
    assert list(errors) == found
    for configuration in found:
        inputs = random_inputs(layer, 2, cpu, seed=0)
        bench._launches(configuration, layer, 2, 2, inputs, seed=0)[1]()
        assert torch.isfinite(inputs[-1]).all()


def test_known_dimensions_try_what_can_win_at_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms.update, "backend", lambda device, layout: "triton")
    layer = UpdateDims("known", "kda", 32, 32, 128, 128)

    def orders(state: str, batch: int) -> list[tuple[str, int | None]]:
        found = forms.configurations(layer, state, batch, torch.device("cpu"))
        return [(c.layout.order, c.columns) for c in found]

    assert orders("fp32", 1) == [("rows", 16), ("columns", 8), ("tiles", 8)]
    assert orders("fp32", 256) == [("columns", 8), ("columns", 16), ("tiles", 8)]
    assert orders("fp16", 8) == [("columns", 8), ("columns", 16), ("columns", 32), ("tiles", 8)]
    assert orders("bf16", 256) == [("columns", 8)]


def test_a_value_scale_is_a_format_of_its_own() -> None:
    """`damp` has none: exports fold it into the weights."""
    cpu, scales = torch.device("cpu"), []
    for state in ("damp", "damp-scaled"):
        (found,) = forms.configurations(SMALL, state, 1, cpu)
        (launch,) = bench._launches(found, SMALL, 1, 1, random_inputs(SMALL, 1, cpu, 0), seed=0)
        scales.append(launch.args[8])  # type: ignore[attr-defined]
    assert scales[0] is None
    assert scales[1].shape == (3, 24)


def test_equal_bytes_are_passed_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    measured = bench.in_place_pass

    def counted(nbytes: int, *sets: int, **timing: Any) -> Samples:
        passes.append(nbytes)
        return measured(nbytes, *sets, **timing)

    monkeypatch.setattr(bench, "in_place_pass", counted)
    found = run_update(dims=(SMALL,), batches=(1,), formats=("bf16", "fp16", "damp"), samples=1)
    assert passes == [found.rows[0].state_bytes, found.rows[2].state_bytes]
    assert found.rows[0].memory_pass is found.rows[1].memory_pass
