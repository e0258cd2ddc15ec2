"""Deferred requantisation: the ring's algebra in float64, its storage against the simulator's, kernels against both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridstate.errors import MissingRequirement, NumericError
from hybridstate.kernels import ring_update
from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.ring_reference import Ring, ring_flush, ring_read, ring_state, ring_step
from hybridstate.quant.arms import Arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.simulate import Storage
from tests.tolerances import assert_within, relative_rms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="Triton's interpreter is off: a GPU is here"
)
LAYOUT = PackedLayout(24, 40, 16, order="natural")


def inputs_of(
    kind: str,
    seed: int,
    *,
    batch: int = 2,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 24,
    value_dim: int = 40,
) -> list[Tensor]:
    """q, k, v, log decay, beta of one step in float64; KDA's log decays are float16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, key_heads, key_dim)] * 2 + [(batch, heads, value_dim)]
    q, k, v = (torch.randn(x, generator=generator).double() for x in shapes)
    gate = (batch, heads, key_dim) if kind == "kda" else (batch, heads)
    g = (-0.3 * torch.rand(gate, generator=generator)).half().double()
    return [q, k, v, g, torch.rand(batch, heads, generator=generator).double()]


def empty_ring(kind: str, every: int, layout: PackedLayout = LAYOUT, **options: object) -> Ring:
    options = {"slots": 3, "key_heads": 2, "heads": 4} | options
    return Ring.empty(layout=layout, every=every, per_channel=kind == "kda", **options)


def run(step, inputs, pool, ring, slots, layout=LAYOUT, value_scale=None):
    out = torch.full(inputs[2].shape, float("nan"), dtype=torch.float64)
    step(*inputs, pool, ring, slots, out, value_scale, layout)
    return out


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_replaying_the_ring_is_the_recurrence(kind: str, ratio: int) -> None:
    """Without quantisation: the same outputs and states as token by token, at different phases of two slots."""
    every, heads = 5, 2 * ratio
    ring = empty_ring(kind, every, heads=heads, dtype=torch.float64)
    rows = torch.tensor([2, 0])
    ring.start(torch.arange(3))
    stored = torch.randn(2, heads, 24, 40, dtype=torch.float64)
    truth = stored
    for turn in range(13):
        inputs = inputs_of(kind, turn, heads=heads)
        expected, truth = recurrent_step(*inputs, truth)
        o, entry, sums = ring_read(*inputs, stored, ring, rows)
        state = ring_state(stored, ring, rows, entry, sums)
        assert relative_rms(o, expected) < 1e-10
        assert relative_rms(state, truth) < 1e-10
        full = ring.phases[rows] >= every - 1
        # the pool-level step keeps the ring; its packed state is not used here
        run(ring_step, inputs, torch.zeros(3, heads, LAYOUT.head_bytes).byte(), ring, rows)
        replayed = entry_replaced(ring, rows, inputs, stored, full, state)
        assert relative_rms(replayed, truth) < 1e-10
        stored = torch.where(full[..., None, None], state, stored)


def entry_replaced(ring, rows, inputs, stored, full, state):
    """The state that the ring stands for, its newest values those of the exact state rather than of zeros."""
    heads = ring.phases.shape[1]
    count = ring.phases[rows].long()
    before = ring_without_newest(ring, rows)
    _, entry, _ = ring_read(*inputs, stored, before, rows)
    for n in range(len(rows)):
        for h in range(heads):
            if not full[n, h]:
                ring.values[rows[n], h, count[n, h] - 1] = entry[1][n, h]
    return torch.where(full[..., None, None], state, ring_state(stored, ring, rows))


def ring_without_newest(ring, rows):
    phases = ring.phases.clone()
    phases[rows] = (phases[rows] - 1).clamp_min(0)
    return Ring(ring.keys, ring.values, ring.gates, phases)


@pytest.mark.parametrize("every", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_storage_is_the_simulators_deferred_arm(kind: str, every: int) -> None:
    """With quantisation: what the pool and a ring without rounding stand for is the simulated state."""
    ring = empty_ring(kind, every, dtype=torch.float64)
    slots = torch.tensor([1, 2])
    channels = torch.arange(16).expand(4, -1)
    arm = Arm("deferred", FORMATS["int8-step"], protected=(channels,), every=every)
    storage, simulated = Storage((arm,)), torch.zeros(2, 4, 24, 40, dtype=torch.float64)
    pool = LAYOUT.pack(torch.zeros(3, 4, 24, 40))
    for update in range(1, 3 * every + 2):
        inputs = inputs_of(kind, update)
        expected, simulated = recurrent_step(*inputs, simulated)
        storage.write(simulated, 0, update)
        o = run(ring_step, inputs, pool, ring, slots)
        assert relative_rms(o, expected) < 1e-6
        found = ring_state(LAYOUT.unpack(pool[slots]).double(), ring, slots)
        assert relative_rms(found, simulated) < 1e-6


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_fewer_rewrites_lose_less_of_the_state(kind: str) -> None:
    errors = {}
    for every in (2, 8):
        ring = empty_ring(kind, every)
        pool, slots = LAYOUT.pack(torch.zeros(3, 4, 24, 40)), torch.arange(2)
        truth = torch.zeros(2, 4, 24, 40, dtype=torch.float64)
        for turn in range(96):
            inputs = inputs_of(kind, turn)
            inputs[3] = inputs[3] * 0.1
            _, truth = recurrent_step(*inputs, truth)
            run(ring_step, inputs, pool, ring, slots)
        found = ring_state(LAYOUT.unpack(pool[slots]).double(), ring, slots)
        errors[every] = relative_rms(found, truth)
    assert errors[8] < 0.7 * errors[2], errors


@pytest.mark.parametrize(
    ("layout", "key_heads", "heads", "every"),
    [
        (LAYOUT, 1, 2, 4),
        (PackedLayout(13, 37, 5), 1, 3, 3),
        (PackedLayout(16, 20, 16), 2, 2, 2),
        (PackedLayout(12, 20, 0), 1, 1, 5),
    ],
    ids=lambda x: x.layout_id if isinstance(x, PackedLayout) else str(x),
)
@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_kernels_beside_the_reference(
    name: str, kind: str, layout: PackedLayout, key_heads: int, heads: int, every: int
) -> None:
    """Mixed phases, padding and a flush. Outputs are BF16, which the interpreter truncates."""
    step, flush = ring_update.functions(name, layout)
    found = ring_update.check(
        step, flush, "cpu", layout, per_channel=kind == "kda", every=every, key_heads=key_heads,
        heads=heads, batch=2, steps=every + 1,
    )  # fmt: skip
    assert found["problem"] is None, found
    assert found["state"] <= found["storage"] * 1.002 + 3e-7
    assert found["entry"] < 1e-4


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_gates_from_raw_projections(name: str, kind: str) -> None:
    step, flush = ring_update.functions(name, LAYOUT)
    found = ring_update.check(
        step, flush, "cpu", LAYOUT, per_channel=kind == "kda", every=3, key_heads=1, heads=2,
        batch=2, steps=3, fused=True,
    )  # fmt: skip
    assert found["problem"] is None, found


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_hard_states(name: str, kind: str) -> None:
    """Decay that underflows and groups of zeros; a slot that is not finite stays so, and stays alone."""
    step, _ = ring_update.functions(name, LAYOUT)
    ring = empty_ring(kind, 3)
    state = torch.randn(3, 4, 24, 40)
    state[0, :, :, :32] = 0
    pool, slots = LAYOUT.pack(state), torch.tensor([0, 1])
    exact = LAYOUT.unpack(pool[slots]).double()
    for turn in range(6):
        inputs = inputs_of(kind, turn)
        inputs[3].fill_(-200.0 if turn == 1 else -0.1)
        if turn >= 3 and name != "reference":  # which refuses to store it
            inputs[2][1, 1, 3] = float("nan")
        inputs = [x.float() for x in inputs]
        expected, exact = recurrent_step(*(x.double() for x in inputs), exact)
        o = run(step, inputs, pool, ring, slots)
        assert relative_rms(o[0], expected[0]) < 2e-2
    assert torch.isfinite(LAYOUT.unpack(pool[0])).all()
    assert torch.isfinite(o[0]).all()
    if name != "reference":
        assert not ring.phases[slots].any()  # just rewritten
        assert torch.isnan(LAYOUT.unpack(pool[1])[1, 16:, :32]).all()
        assert torch.isfinite(LAYOUT.unpack(pool[1])[1, 16:, 32:]).all()


def test_a_flush_keeps_the_state_and_empties_the_ring() -> None:
    ring = empty_ring("kda", 8)
    pool, slots = LAYOUT.pack(torch.zeros(3, 4, 24, 40)), torch.tensor([2, -1, 0])
    for turn in range(5):
        run(ring_step, inputs_of("kda", turn, batch=3), pool, ring, slots)
    rows = torch.tensor([2, 0])
    exact = ring_state(LAYOUT.unpack(pool[rows]).double(), ring, rows)
    untouched = pool[1].clone()
    ring_flush(pool, ring, slots, LAYOUT)
    assert torch.equal(pool[rows], LAYOUT.pack(exact))
    assert not ring.phases.any()
    flushed = pool.clone()
    ring_flush(pool, ring, slots, LAYOUT)  # nothing held: nothing is requantised again
    assert torch.equal(pool, flushed)
    assert torch.equal(pool[1], untouched)


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_flush_leaves_an_empty_ring_alone(name: str, kind: str) -> None:
    """Bit for bit, even where the codes are not those that requantising their values would give."""
    hi, codes, scales = LAYOUT.split(LAYOUT.pack(torch.randn(3, 4, 24, 40)))
    pool = LAYOUT.join(hi, codes // 2, scales)
    before = pool.clone()
    ring, slots = empty_ring(kind, 4), torch.tensor([2, -1, 0])
    ring_update.functions(name, LAYOUT)[1](pool, ring, slots, LAYOUT)
    assert torch.equal(pool, before)
    ring.phases[0] = 1  # one entry of zeros: now it is folded, and its codes fill their range again
    ring_update.functions(name, LAYOUT)[1](pool, ring, slots, LAYOUT)
    assert torch.equal(pool[1:], before[1:])
    assert not torch.equal(pool[0], before[0])
    assert int(LAYOUT.split(pool)[1][0].abs().amax()) == 127


def test_a_copied_slot_goes_on_alike() -> None:
    ring = empty_ring("gdn", 4)
    pool = LAYOUT.pack(torch.randn(3, 4, 24, 40))
    run(ring_step, inputs_of("gdn", 0, batch=1), pool, ring, torch.tensor([0]))
    source, target = torch.tensor([0]), torch.tensor([2])
    pool[target] = pool[source]
    ring.copy(source, target)
    for turn in range(1, 6):
        one = inputs_of("gdn", turn, batch=1)
        both = [torch.cat([x, x]) for x in one]
        o = run(ring_step, both, pool, ring, torch.tensor([0, 2]))
        assert torch.equal(o[0], o[1])
    assert torch.equal(pool[0], pool[2])


def test_staggered_slots_rewrite_at_different_steps() -> None:
    every, places = 4, 8
    ring = empty_ring("gdn", every, slots=places)
    ring.start(torch.arange(places))
    pool, slots = LAYOUT.pack(torch.zeros(places, 4, 24, 40)), torch.arange(places)
    written = []
    for turn in range(2 * every):
        before = pool.clone()
        run(ring_step, inputs_of("gdn", turn, batch=places), pool, ring, slots)
        written.append(int((pool != before).flatten(1).any(1).sum()))
    assert written == [places // every] * (2 * every)


def test_resident_bits() -> None:
    """The last L - 1 inputs: FP16 k (shared), u and, for KDA, gates; GDN's sums and phases besides."""
    layout = PackedLayout(128, 128, 16)
    gdn = Ring.empty(1, 16, 32, layout, 16, per_channel=False)
    kda = Ring.empty(1, 32, 32, layout, 16, per_channel=True)
    assert gdn.bits_per_value == pytest.approx((15 * 16 * 192 + 32 * 16 + 32) / 16384)
    assert kda.bits_per_value == pytest.approx((15 * 16 * 384 + 32) / 16384)


def test_public_step_and_what_it_refuses() -> None:
    ring, pool = empty_ring("gdn", 4), LAYOUT.pack(torch.zeros(3, 4, 24, 40))
    inputs, slots = inputs_of("gdn", 0), torch.tensor([0, 1])
    out = ring_update.ring_step(*inputs, pool, ring, slots, layout=LAYOUT)
    assert out.shape == inputs[2].shape
    ring_update.ring_flush(pool, ring, slots, layout=LAYOUT)
    with pytest.raises(NumericError, match=r"ring\.gates"):
        ring_update.ring_step(*inputs_of("kda", 0), pool, ring, slots, layout=LAYOUT)
    with pytest.raises(NumericError, match="int64"):
        ring_update.ring_step(*inputs, pool, ring, slots.int(), layout=LAYOUT)
    with pytest.raises(NumericError, match="no ring of 17"):
        empty_ring("gdn", 17)
    order = StepFusion(key_index=torch.zeros(4, 24, dtype=torch.uint8))
    with pytest.raises(NumericError, match="key index"):
        ring_update.ring_step(*inputs, pool, ring, slots, layout=LAYOUT, fusion=order)
    with pytest.raises(MissingRequirement, match="gluon"):
        ring_update.functions("gluon", LAYOUT)


def test_wide_values_saturate_in_the_ring() -> None:
    ring, pool = empty_ring("gdn", 4), LAYOUT.pack(torch.zeros(3, 4, 24, 40))
    inputs = inputs_of("gdn", 0)
    inputs[2] = inputs[2] * 1e7
    run(ring_step, inputs, pool, ring, torch.tensor([0, 1]))
    assert float(ring.values.abs().max()) == 65504.0
    assert_within(torch.tensor(ring.phases.sum().item()), torch.tensor(8.0), "reference-f64")


def test_ring_kernels_compile_for_hopper_without_spills(capsys: pytest.CaptureFixture[str]) -> None:
    """Offline, in a process whose Triton is not an interpreter; L = 8 here, all lengths by hand."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    script = [sys.executable, str(Path(__file__).with_name("ring_offline.py")), "8", "--product"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    with capsys.disabled():
        sys.stdout.write("\n" + done.stdout)
    assert done.returncode == 0, done.stderr
