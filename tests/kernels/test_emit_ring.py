"""The emitted module of a plan that writes every L-th update: alone, the package's own code, the same bits."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels import emit, emit_cut, ring_update
from hybridstate.kernels.emit import MODULE_FILE, StepSpec
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.ring_reference import Ring
from hybridstate.kernels.ring_update import ring_layout
from hybridstate.kernels.update import Name
from tests.kernels import test_emit
from tests.kernels.emitted_offline import load
from tests.kernels.test_emit import INTERPRETED, ROOT, assert_own, assert_stands_alone, execute, ok
from tests.tolerances import relative_rms

OWN = test_emit.OWN - {"runner", "_check_tables"}
OWN |= {"functions", "preferred_layout", "allocate_ring", "describe_ring", "flush", "clear"}
OWN |= {"_in_stored_order", "_check_recurrence"}
"""Definitions that only the module has."""

EVERY = {"gdn": 4, "kda": 3, "index": 4, "scaled": 2, "all": 16}
PLANS = {name: replace(spec, every=EVERY[name]) for name, spec in test_emit.PLANS.items()}
PLANS["shared index"] = replace(
    PLANS["index"],
    heads=6,
    key_index={i: [[(5 * k + h // 3 + i) % 16 for k in range(16)] for h in range(6)] for i in (0, 2)},
)  # fmt: skip


@pytest.fixture(params=PLANS)
def emitted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StepSpec, Path]:
    path = tmp_path / MODULE_FILE
    path.write_text(emit.emit(PLANS[request.param]))
    return PLANS[request.param], path


def inputs_of(spec: StepSpec, seed: int, batch: int = 3) -> list[Tensor]:
    """q, k, v, log decay, beta of one step, as the model makes them."""
    generator = torch.Generator().manual_seed(seed)
    key_dim, value_dim = spec.layout.key_dim, spec.layout.value_dim
    keys = (batch, spec.key_heads, key_dim)
    shapes = [keys, keys, (batch, spec.heads, value_dim)]
    q, k, v = (torch.randn(x, generator=generator).bfloat16() for x in shapes)
    shape = (batch, spec.heads, key_dim) if spec.per_channel else (batch, spec.heads)
    g = -0.3 * torch.rand(shape, generator=generator)
    return [q, k, v, g, torch.rand(batch, spec.heads, generator=generator)]


def options_of(spec: StepSpec) -> dict[str, Any]:
    return {"block": 2} if spec.by_block else {}


def test_it_stands_alone(emitted: tuple[StepSpec, Path]) -> None:
    assert_stands_alone(emitted[1])


def test_every_definition_is_the_package_s_own(emitted: tuple[StepSpec, Path]) -> None:
    found = assert_own(emitted[1], OWN)
    fragment = emitted[0].stored.order == "fragment"
    assert {"Ring", "ring_step", "reference_ring_step", "triton_ring_step"} <= found
    kernels = {"gluon_ring_kernel", "triton_ring_kernel", "flush_kernel", "_fold_operands"}
    assert kernels & found == (kernels if fragment else set())
    assert ("ring_kernel" in found) is not fragment
    assert not found & {"packed_step", "triton_packed_kernel", "gluon_packed_kernel"}


def test_no_name_is_defined_twice(emitted: tuple[StepSpec, Path]) -> None:
    pieces = emit_cut.definitions(emitted[1].read_text())
    assert [name for name, count in Counter(pieces).items() if count > 1] == []


def test_check_in_the_interpreter_runs_the_kernel(emitted: tuple[StepSpec, Path]) -> None:
    done = execute(emitted[1], interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("reference", "triton"):
        assert ok(done.stdout, name)
        assert ok(done.stdout, f"{name} beside the recurrence")
    assert "not run" not in done.stdout


def test_the_reference_needs_torch_alone(tmp_path: Path) -> None:
    (tmp_path / MODULE_FILE).write_text(emit.emit(PLANS["gdn"]))
    (tmp_path / "triton.py").write_text('raise ImportError("absent")')
    done = execute(tmp_path / MODULE_FILE, interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ok(done.stdout, "reference beside the recurrence")
    assert "not run: it needs a GPU" in done.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("* (value / c - k_read)", "* (value / c + k_read)", "triton with value scale"),
        ("new + key[..., None] * entry", "new - key[..., None] * entry", "state error"),
        ("count >= ROOM) | FLUSH", "count >= ROOM - 1) | FLUSH", "phases differ"),
    ],
)
def test_check_fails_on_a_wrong_module(right: str, wrong: str, told: str, tmp_path: Path) -> None:
    """A wrong kernel beside the reference, a wrong reference beside float64, a wrong phase."""
    text = emit.emit(PLANS["kda"])
    assert right in text
    (tmp_path / MODULE_FILE).write_text(text.replace(right, wrong))
    done = execute(tmp_path / MODULE_FILE, interpret=True)
    assert done.returncode == 1
    assert told in done.stdout
    assert "error" in done.stdout or "differ" in done.stdout


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_steps_and_flush_are_bit_equal_to_the_package(
    backend: Name, emitted: tuple[StepSpec, Path]
) -> None:
    """Slots at different phases, padding, up to a rewrite of each; then what is left is folded."""
    if backend == "triton" and not INTERPRETED:
        pytest.skip("Triton's interpreter is off: a GPU is here")
    spec, path = emitted
    module, options = load(path), options_of(spec)
    layout = replace(spec.layout, order="natural")
    assert (module.NATURAL.layout_id, module.EVERY) == (layout.layout_id, spec.every)
    options["layout"] = module.NATURAL
    slots, rows = torch.tensor([3, -1, 0]), torch.tensor([3, 0])
    pool, ring = module.allocate(4, "cpu"), module.allocate_ring(4, "cpu")
    shape = (2, spec.heads, layout.key_dim, layout.value_dim)
    states = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    module.store(pool, ring, rows, states, **options)
    ring.start(rows)
    theirs, held = pool.clone(), Ring(*(x.clone() for x in ring.parts))
    index = spec.key_index and torch.tensor(spec.key_index[2])
    columns = spec.value_index and torch.tensor(spec.value_index[2]).expand(3, -1, -1)
    scale = torch.tensor(spec.value_scale[2]) if spec.value_scale else None
    for turn in range(min(spec.every, 5) + 1):
        q, k, v, g, beta = inputs_of(spec, turn)
        out = module.decode_step(q, k, v, g, beta, pool, ring, slots, backend=backend, **options)
        if spec.key_index:
            bundle = spec.heads // spec.ring_key_heads
            times = spec.ring_key_heads // spec.key_heads
            order = index[::bundle].expand(3, -1, -1)
            q, k = (x.repeat_interleave(times, 1).gather(2, order) for x in (q, k))
            g = g.gather(2, index.expand(3, -1, -1)) if spec.per_channel else g
        if spec.value_index:
            v = v.gather(2, columns)
        expected = ring_update.ring_step(
            q, k, v, g, beta, theirs, held, slots, layout=layout, value_scale=scale, backend=backend
        )
        if spec.value_index:
            expected = torch.empty_like(expected).scatter_(2, columns, expected)
        assert torch.equal(out, expected)
        assert not out[1].any()
    module.flush(pool, ring, slots, layout=module.NATURAL, backend=backend)
    ring_update.ring_flush(theirs, held, slots, layout=layout, backend=backend)
    assert torch.equal(pool, theirs)
    assert all(torch.equal(x, y) for x, y in zip(ring.parts, held.parts, strict=True))
    assert not ring.phases.any()


def test_what_an_engine_allocates_and_clears(emitted: tuple[StepSpec, Path]) -> None:
    """Rings in memory of the engine's own, full of NaN, cleared, stepped, read, folded and cleared again."""
    spec, path = emitted
    module, options = load(path), options_of(spec)
    described = module.describe_ring()
    parts = [torch.full((3, *shape), -1 if dtype == torch.int32 else float("nan"), dtype=dtype)
             for shape, dtype, _ in described.values()]  # fmt: skip
    ring = module.Ring(**dict(zip(described, parts, strict=True)))
    for (shape, dtype, nbytes), part in zip(
        described.values(), module.allocate_ring(3, "cpu").parts, strict=True
    ):
        assert (shape, dtype, 3 * nbytes) == (tuple(part.shape[1:]), part.dtype, part.nbytes)
    assert sum(nbytes for _, _, nbytes in described.values()) == ring.slot_bytes
    pool = torch.full_like(module.allocate(3, "cpu"), 255)
    rows = torch.tensor([2, 0])
    module.clear(pool, ring, rows, stagger=spec.every > 2)
    exact = module.load(pool, ring, rows, **options).double()
    assert not exact.any()
    for turn in range(2):
        inputs = inputs_of(spec, turn, 2)
        out = module.decode_step(*inputs, pool, ring, rows, **options)
        expected, exact = recurrent_step(*(x.double() for x in inputs), exact)
        assert relative_rms(out, expected) < 2e-2
    found = module.load(pool, ring, rows, **options)
    assert relative_rms(found, exact) < 2e-2
    module.flush(pool, ring, torch.tensor([2, -1, 0]))
    assert relative_rms(module.load(pool, ring, rows, **options), found) < 2e-2
    assert bool((pool[1] == 255).all())
    assert bool((ring.phases[1] == -1).all())
    module.clear(pool, ring, rows)
    assert not pool[rows].any()
    assert not ring.phases[rows].any()


def test_the_docstring_counts_bytes_and_bits() -> None:
    spec = StepSpec(PackedLayout(128, 128, 16), 16, 32, per_channel=False, every=8)
    ring = Ring.empty(1, 16, 32, spec.layout, 8, per_channel=False)
    text = emit.emit(spec)
    assert "A packed state is written once in 8 updates" in text
    assert f"a slot takes {32 * spec.layout.head_bytes:,} + {ring.slot_bytes:,} bytes" in text
    assert f"{spec.layout.bits_per_value + ring.bits_per_value:.3f} bits per value" in text


def test_bytes_and_bits_in_the_documentation() -> None:
    text, layout = (ROOT / "docs/applying.md").read_text(), PackedLayout(128, 128, 16)
    for name, every in product(("GDN", "KDA"), (4, 8, 16)):
        key_heads = 16 if name == "GDN" else 32
        ring = Ring.empty(1, key_heads, 32, layout, every, per_channel=name == "KDA")
        heads = "32 heads on 16" if name == "GDN" else "32 heads"
        bits = layout.bits_per_value + ring.bits_per_value
        row = f"{32 * layout.head_bytes:,} | {ring.slot_bytes:,} | {bits:.3f} |"
        assert f"| {name}, {heads} | {every} | {row}" in text


def test_heads_other_than_128_by_128_lie_in_the_order_that_has_a_ring_kernel() -> None:
    wide = StepSpec(PackedLayout(64, 128, 16), 2, 4, per_channel=False, every=8)
    assert wide.layout.order == "fragment"
    assert wide.stored == ring_layout(wide.layout)
    assert wide.stored.order == "natural"
    assert replace(wide, every=1).stored == wide.layout


def test_what_it_refuses(emitted: tuple[StepSpec, Path]) -> None:
    spec, path = emitted
    module, options = load(path), options_of(spec)
    pool, slots = module.allocate(3, "cpu"), torch.tensor([0, 1, 2])
    ring, inputs = module.allocate_ring(3, "cpu"), inputs_of(spec, 0)
    other = replace(spec, per_channel=not spec.per_channel)
    with pytest.raises(module.NumericError, match="expected one decay per"):
        module.decode_step(*inputs_of(other, 0), pool, ring, slots, **options)
    with pytest.raises(module.NumericError, match=r"ring\.keys has shape"):
        module.decode_step(*inputs, pool, module.allocate_ring(2, "cpu"), slots, **options)
    with pytest.raises(module.NumericError, match="int64"):
        module.decode_step(*inputs, pool, ring, slots.int(), **options)
    with pytest.raises(module.MissingRequirement, match="no gluon ring kernel"):
        module.functions("gluon", module.NATURAL)


def test_equal_plans_give_equal_text() -> None:
    assert emit.emit(PLANS["all"]) == emit.emit(PLANS["all"])


@pytest.mark.parametrize("every", [0, 17, 32])
def test_an_interval_that_no_ring_holds_is_refused(every: int) -> None:
    with pytest.raises(NumericError, match=f"once in {every} updates, the emitted step once in 16"):
        StepSpec(PackedLayout(16, 16, 4), 2, 4, per_channel=False, every=every)


@pytest.mark.parametrize("every", [8, 16])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_ring_kernels_of_the_module_compile_for_hopper(
    kind: str, every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline at full-size geometry, in a process whose Triton is not an interpreter; nothing spills."""
    spec = StepSpec(
        PackedLayout(128, 128, 16), 16 if kind == "gdn" else 32, 32, per_channel=kind == "kda",
        every=every,
    )  # fmt: skip
    path = tmp_path / MODULE_FILE
    path.write_text(emit.emit(spec))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("emitted_offline.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    with capsys.disabled():
        sys.stdout.write("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"gluon_ring_kernel L={every}" in done.stdout
    assert f"flush_kernel L={every}" in done.stdout
