"""A small run of every kernel, each compared with its twin, for `scripts/sanitize.sh`.

`--short` runs every kernel once, at one size; `--only TEXT...` those with a text in their name. `--plant` writes out of
bounds, `--plant-race` lets lanes store different bits to one place of shared memory.

Allocations go straight to the driver there (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that an access past a tensor is one
past an allocation.
"""

import sys
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from hybridstate.kernels import ring_update
from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.update import Name, dense_step, packed_step
from tests.kernels.cases import DENSE, PUBLISHED, SMALL, Case, check, draw
from tests.kernels.test_multi_token import LARGE, check_tokens
from tests.kernels.test_packed_rows import LAYOUTS as ROW_LAYOUTS
from tests.kernels.test_packed_rows import test_kernels_move_the_bits_that_torch_moves
from tests.kernels.transfer_cases import (
    LAYOUTS,
    check_copy,
    check_pack,
    check_packed_checkpoint,
    check_rows,
)


def step(case: Case, name: str) -> None:
    """One decode step."""
    inputs = draw(case)
    arguments = inputs.on("cuda")
    out = torch.zeros(inputs.v.shape, device="cuda")
    call = packed_step if isinstance(case.layout, PackedLayout) else dense_step
    call(**arguments, layout=case.layout, out=out, backend=name)  # type: ignore[arg-type, operator]
    check(case, inputs, out, arguments["pool"], "kernel-bf16")


def ring(name: Name, layout: PackedLayout, *, per_channel: bool) -> None:
    """Steps of every phase and a flush of deferred requantisation."""
    functions = ring_update.functions(name, layout)
    found = ring_update.check(
        *functions, "cuda", layout, per_channel=per_channel, every=4, steps=5, batch=3, fused=True
    )
    assert found["problem"] is None, found


def runs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every kernel by name."""
    for layout in (*LAYOUTS[:2], LAYOUTS[3], LAYOUTS[5]):
        yield f"pack, unpack {layout.layout_id}", lambda x=layout: check_pack(x, "cuda")
    dense = DenseLayout(128, 128, torch.float16, "columns")
    yield "pack from columns", lambda: check_pack(LAYOUTS[0], "cuda", dense=dense)
    for codec in ("fp32", "int8"):
        for padded in (False, True):
            yield (
                f"rows {codec}{', padded' if padded else ''}",
                lambda c=codec, p=padded: check_rows(
                    c, torch.float32, "cuda", per_channel=True, padded=p
                ),
            )
    for layout in (LAYOUTS[0], LAYOUTS[4]):
        yield (
            f"packed rows {layout.layout_id}",
            lambda x=layout: check_packed_checkpoint(x, "cuda", per_channel=True),
        )
    for layout in ROW_LAYOUTS[:4]:
        yield (
            f"kept rows {layout.layout_id}",
            lambda x=layout: test_kernels_move_the_bits_that_torch_moves(x, "cuda"),
        )
    for kda in (False, True):
        for backend, layout in (
            ("gluon", PackedLayout(128, 128, 16)),
            ("triton", PackedLayout(24, 40, 8)),
        ):
            yield (
                f"ring {backend} {'kda' if kda else 'gdn'}",
                lambda b=backend, x=layout, k=kda: ring(b, x, per_channel=k),
            )
    yield "copy", lambda: check_copy("cuda", (3, 5, 4, 20), torch.float32)
    yield "copy of odd bytes", lambda: check_copy("cuda", (3, 7), torch.uint8)
    for layout in LARGE:
        yield f"tokens {layout.layout_id}", lambda x=layout: check_tokens(x, "kda", 3, "cuda")
    for case in (SMALL[0], SMALL[5], *PUBLISHED[:3], *DENSE[:3]):
        names = ["triton"]
        if isinstance(case.layout, PackedLayout) and case.layout.order == "fragment":
            names.append("gluon")
        for name in names:
            yield f"step {case} {name}", lambda c=case, n=name: step(c, n)


SHORT = (
    *(f"pack, unpack {x.layout_id}" for x in (LAYOUTS[0], LAYOUTS[3])),
    *("rows fp32", "rows int8", "copy", "ring gluon gdn", "ring triton kda"),
    f"packed rows {LAYOUTS[0].layout_id}",
    f"kept rows {ROW_LAYOUTS[0].layout_id}",
    f"tokens {LARGE[0].layout_id}",
    *(f"step {case} gluon" for case in PUBLISHED[:2]),
    *(f"step {case} triton" for case in (SMALL[0], DENSE[0])),
)


@triton.jit
def stray(pointer, DISTANCE: tl.constexpr):
    """One store far behind a small allocation: what memcheck has to find."""
    tl.store(pointer + DISTANCE, 1.0)


@triton.jit
def race(x, y, out):
    """A sum of one product a lane: rounded differently in each, and stored by all of them on its way to `out`."""
    column = tl.arange(0, 8)
    at = tl.program_id(0) * 128 + tl.arange(0, 16)[:, None] * 8 + column[None, :]
    total = tl.sum(tl.load(x + at) * tl.load(y + at), 0)
    tl.store(out + tl.program_id(0) * 8 + column, total)


def main() -> int:
    """One line per kernel."""
    option, names = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if option.startswith("--plant"):
        if option == "--plant":
            stray[(1,)](torch.zeros(16, device="cuda"), DISTANCE=1 << 10)
        else:
            x, y = torch.randn(2, 64, 16, 8, device="cuda")
            race[(64,)](x, y, torch.zeros(64, 8, device="cuda"), num_warps=1)
        torch.cuda.synchronize()
        return 0
    chosen = list(runs())
    if option == "--short":
        chosen = [x for x in chosen if x[0] in SHORT]
    elif option == "--only":
        chosen = [x for x in chosen if any(text in x[0] for text in names)]
    for name, run in chosen:
        run()
        torch.cuda.synchronize()
        sys.stdout.write(f"ok {name}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
