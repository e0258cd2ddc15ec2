"""What a state may not lose in a step: ties, idle steps, NaN kept apart, thousands of steps."""

import os

import pytest
import torch

from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import recurrent_step
from hybridstate.kernels.update import packed_step
from tests.kernels.cases import SMALL, draw
from tests.tolerances import relative_rms

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: a GPU is here"
)
CPU = ["reference", pytest.param("triton", marks=interpreter)]
GPU = [pytest.param("gluon", marks=pytest.mark.gpu), pytest.param("triton", marks=pytest.mark.gpu)]


def one_row(layout: PackedLayout, row: int, values: torch.Tensor, name: str) -> torch.Tensor:
    """Codes of an INT8 row after a step that writes `values` into it: k is a unit vector, beta 1, no decay."""
    heads = 1
    integers = torch.arange(layout.value_dim) % 120.0
    integers[:: layout.group] = 127.0
    state = integers.expand(1, heads, layout.key_dim, -1).clone()
    pool = layout.pack(state)
    k = torch.zeros(1, heads, layout.key_dim)
    k[..., row] = (
        2.0**13
    )  # its norm, epsilon included, is a power of two, so the unit vector is exact
    zero, one = torch.zeros(1, heads), torch.ones(1, heads)
    slots = torch.zeros(1, dtype=torch.int64)
    packed_step(
        k, k, values.view(1, heads, -1), zero, one, pool, slots, layout=layout, backend=name
    )
    _, codes, scales = layout.split(pool)
    others = [r for r in range(layout.rows_lo) if r != row - layout.k_hi]
    assert torch.equal(codes[:, :, others].float(), state[:, :, layout.k_hi :][:, :, others])
    assert (scales == 1.0).all()
    return codes[0, 0, row - layout.k_hi].float()


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("order", ["natural", "fragment"])
def test_ties_go_to_even(name: str, order: str) -> None:
    size = 128 if order == "fragment" else 40
    layout = PackedLayout(size, size, 16 if order == "fragment" else 8, order=order)  # type: ignore[arg-type]
    halves = torch.arange(size) % 100 - 49.5
    halves[:: layout.group] = 127.0
    found = one_row(layout, layout.k_hi + 3, halves, name)
    assert torch.equal(found, halves.round()), "torch rounds half to even"


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_steps_that_write_nothing_change_no_code(name: str, kind: str) -> None:
    """Decay 1 and beta 0: codes and FP16 rows stay; a scale moves by its rounding at most."""
    layout = PackedLayout(16, 40, 8)
    generator = torch.Generator().manual_seed(6)
    state = torch.randn(2, 2, 16, 40, generator=generator) * 10.0 ** torch.randint(
        -9, 3, (2, 2, 16, 1), generator=generator
    )
    pool = layout.pack(state)
    before = layout.split(pool.clone())
    gate = torch.zeros((2, 2, 16) if kind == "kda" else (2, 2))
    x = torch.randn(2, 2, 16, generator=generator)
    v = torch.randn(2, 2, 40, generator=generator)
    for _ in range(20):
        packed_step(
            x, x, v, gate, torch.zeros(2, 2), pool, torch.arange(2), layout=layout, backend=name
        )
    after = layout.split(pool)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert ((before[2] - after[2]).abs() <= before[2] * 20 * 2**-23).all()


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("name", [pytest.param("triton", marks=interpreter)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_nan_stays_in_its_slot(name: str, kind: str) -> None:
    case = next(c for c in SMALL if c.kind == kind and c.name == "zero groups")
    clean, dirty = draw(case), draw(case)
    layout = case.layout
    assert isinstance(layout, PackedLayout)
    row = 1
    bad = int(clean.slots[row])
    dirty.pool[bad] = 0xFF  # what a free slot holds: NaN in halves and scales
    outputs, pools = [], []
    for inputs in (clean, dirty):
        arguments = inputs.on("cpu")
        outputs.append(packed_step(**arguments, layout=layout, backend=name))  # type: ignore[arg-type]
        pools.append(arguments["pool"])
    others = [b for b in range(case.batch) if b != row]
    assert torch.equal(outputs[0][others], outputs[1][others])
    assert outputs[1][row].isnan().any()
    kept = [s for s in range(len(clean.pool)) if s != bad]
    assert torch.equal(pools[0][kept], pools[1][kept])
    assert layout.unpack(pools[1][bad]).isnan().any(), "a NaN must not turn into numbers"


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_drift_over_4096_steps(name: str, kind: str) -> None:
    """No further from float64 than exact updates stored by the reference packer at every step."""
    layout, heads, steps = PackedLayout(128, 128, 16), 4, 4096
    generator = torch.Generator("cuda").manual_seed(8)
    truth = torch.zeros(1, heads, 128, 128, dtype=torch.float64, device="cuda")
    pool = layout.pack(truth)
    stored, slots = pool.clone(), torch.zeros(1, dtype=torch.int64, device="cuda")
    gate = (1, heads, 128) if kind == "kda" else (1, heads)
    for _ in range(steps):
        q, k, v = (
            torch.randn(1, heads, 128, generator=generator, device="cuda").bfloat16()
            for _ in range(3)
        )
        g = -0.02 * torch.rand(gate, generator=generator, device="cuda")
        beta = torch.rand(1, heads, generator=generator, device="cuda")
        packed_step(q, k, v, g, beta, pool, slots, layout=layout, backend=name)
        exact = [x.double() for x in (q, k, v, g, beta)]
        _, truth = recurrent_step(*exact, truth)
        _, state = recurrent_step(*exact, layout.unpack(stored).double())
        stored = layout.pack(state, check=False)
    error, least = (relative_rms(layout.unpack(x).double(), truth) for x in (pool, stored))
    assert error < 1.03 * least, f"{error:.5f}, exact updates with this storage {least:.5f}"
