"""Transfers through the real compiler: the cases of the interpreter, full sizes, graphs, offsets beyond 2^31."""

import pytest
import torch

from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.pack import pack_states, unpack_states
from hybridstate.kernels.transfer import copy_slots, gather_rows, scatter_rows
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable
from tests.kernels.transfer_cases import (
    FORMS,
    LARGE_LAYOUTS,
    LAYOUTS,
    check_copy,
    check_pack,
    check_packed_checkpoint,
    check_rows,
    random_masks,
    random_states,
    slots_of,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", [*LAYOUTS, *LARGE_LAYOUTS], ids=lambda x: x.layout_id)
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "mapped"])
def test_pack_and_unpack(layout: PackedLayout, mapped: bool) -> None:
    check_pack(layout, "cuda", mapped=mapped, layers=3, heads=4)


@pytest.mark.parametrize("order", ["rows", "columns", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("physical", ["fragment", "natural"])
def test_dense_sides(order: str, dtype: torch.dtype, physical: str) -> None:
    layout = PackedLayout(128, 128, 16, order=physical)  # type: ignore[arg-type]
    check_pack(layout, "cuda", dense=DenseLayout(128, 128, dtype, order))  # type: ignore[arg-type]


@pytest.mark.parametrize(("codec", "scale_dtype"), FORMS, ids=str)
@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize("padded", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("sizes", [(2, 3, 8, 20), (3, 8, 128, 128), (2, 4, 96, 192)], ids=str)
def test_rows(
    codec: str,
    scale_dtype: torch.dtype,
    per_channel: bool,
    padded: bool,
    sizes: tuple[int, int, int, int],
) -> None:
    check_rows(codec, scale_dtype, "cuda", per_channel=per_channel, padded=padded, sizes=sizes)


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *LAYOUTS[3:6], LARGE_LAYOUTS[0]], ids=lambda x: x.layout_id
)
@pytest.mark.parametrize("per_channel", [False, True], ids=["heads", "channels"])
def test_packed_slots_to_rows_and_back(layout: PackedLayout, per_channel: bool) -> None:
    check_packed_checkpoint(layout, "cuda", per_channel=per_channel)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 2, 48), torch.uint8),
        ((3, 5, 4, 20), torch.float32),
        ((3, 7), torch.uint8),
        ((3, 5), torch.float16),
    ],
)
def test_slots_are_copied_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_copy("cuda", shape, dtype)


def test_a_graph_replays_pack_gather_scatter_and_copy() -> None:
    layout, layers, heads = PackedLayout(128, 128, 16), 3, 4
    dense = LayerSet.of([x.cuda() for x in random_states(layers, 4, heads, 128, 128)])
    pool = LayerSet.of(
        [
            torch.zeros(4, heads, layout.head_bytes, dtype=torch.uint8, device="cuda")
            for _ in range(layers)
        ]
    )
    other = LayerSet.of([torch.zeros_like(x) for x in pool.tensors])
    back = LayerSet.of([torch.zeros_like(x) for x in dense.tensors])
    loaded = LayerSet.of([torch.zeros_like(x) for x in dense.tensors])
    table = RowTable.from_masks(random_masks(layers, heads, 128, True, 0.4).cuda(), 128)
    form = CheckpointForm("int8", 128)
    buffer = form.buffer(4, table)
    slots, into = slots_of([2, -1, 0], "cuda"), slots_of([1, 0, 3], "cuda")

    def everything() -> None:
        pack_states(dense, slots, pool, into, layout)
        copy_slots(pool, into, other, into)
        unpack_states(other, into, back, slots, layout)
        gather_rows(dense, slots, buffer, into, table, form)
        scatter_rows(buffer, into, loaded, slots, table, form, omitted="zero")

    everything()
    torch.cuda.synchronize()
    results = [*pool.tensors, *other.tensors, *back.tensors, *loaded.tensors, buffer]
    expected = [x.clone() for x in results]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    for x in results:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(expected, results, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    # slots are read at replay: other slots, other results
    slots.copy_(slots_of([0, 1, 2], "cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(expected[0], pool.first)


def test_offsets_beyond_two_to_the_31() -> None:
    layout, heads = PackedLayout(128, 128, 16), 32
    dense = LayerSet.of(
        [torch.zeros(1100, heads, 128, 128, device="cuda")]
    )  # 2.3 GB, and 2^29 values
    state = random_states(1, 2, heads, 128, 128)[0].cuda()
    dense.first[1099] = state[0]
    near = LayerSet.of([state])
    pool = LayerSet.of(
        [torch.zeros(4000, heads, layout.head_bytes, dtype=torch.uint8, device="cuda")]
    )
    reference = LayerSet.of(
        [torch.zeros(1, heads, layout.head_bytes, dtype=torch.uint8, device="cuda")]
    )
    last, first, far = (slots_of([n], "cuda") for n in (1099, 0, 3999))
    pack_states(near, first, reference, first, layout)
    pack_states(dense, last, pool, far, layout)
    assert torch.equal(pool.first[3999], reference.first[0])
    assert int(pool.first.count_nonzero()) == int(reference.first.count_nonzero())
    dense.first.zero_()
    unpack_states(pool, far, dense, last, layout)
    assert int(dense.first[:1099].count_nonzero()) == 0
    assert torch.equal(dense.first[1099].cpu(), layout.unpack(reference.first[0].cpu()))
    table = RowTable.from_masks(torch.ones(1, heads, dtype=torch.uint8, device="cuda"), 128)
    form = CheckpointForm("int8", 128)
    buffer = torch.zeros(8000, form.buffer(1, table).shape[1], dtype=torch.uint8, device="cuda")
    end = slots_of([7999], "cuda")
    gather_rows(dense, last, buffer, end, table, form)
    copied = form.buffer(1, table)
    gather_rows(dense, last, copied, first, table, form)
    assert torch.equal(buffer[7999], copied[0])
    scatter_rows(buffer, end, near, first, table, form)
    error = (near.first[0] - dense.first[1099]).norm() / dense.first[1099].norm()
    assert error < 8e-3


def test_bench_codecs_checks_and_times_everything() -> None:
    from hybridstate.bench.codecs import run_codecs

    result = run_codecs(models=["tiny"], slots=2, device="cuda", samples=2).to_json()
    assert len(result["rows"]) == len(result["checks"])
    assert all(row["bytes"] > 0 and row["share_of_pass"] > 0 for row in result["rows"])
