"""Pack, unpack, gather, scatter, refresh and copy against their torch twins, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridstate.kernels.layout import DenseLayout, PackedLayout
from hybridstate.kernels.pack import Maps, load_packed, pack_states, store_packed, unpack_states
from hybridstate.kernels.transfer import copy_slots, gather_rows, refresh_rows, scatter_rows
from hybridstate.kernels.transfer_tables import CheckpointForm, LayerSet, RowTable

LAYOUTS = [
    PackedLayout(128, 128, 16),
    PackedLayout(128, 128, 0),
    PackedLayout(128, 128, 128),
    PackedLayout(128, 128, 32, order="natural"),
    PackedLayout(64, 96, 16, order="fragment"),
    PackedLayout(64, 64, 16),
    PackedLayout(24, 40, 16),
    PackedLayout(13, 37, 5),
    PackedLayout(12, 20, 0),
    PackedLayout(16, 20, 16, group=16),
]
LARGE_LAYOUTS = [
    PackedLayout(k, v, 16, order=order)  # type: ignore[arg-type]
    for k, v in ((96, 192), (256, 128), (64, 256), (128, 128))
    for order in ("fragment", "natural")
]
FORMS = [
    ("fp32", torch.float32),
    ("int8", torch.float32),
    ("int8", torch.bfloat16),
    ("int8", torch.float16),
]


def random_states(
    layers: int, slots: int, heads: int, key_dim: int, value_dim: int, seed: int = 3
) -> list[Tensor]:
    """States with everything that is hard to round: rows from 1e-12 to 1e3, zeros, exact ties, huge values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, slots, heads, key_dim, value_dim)
    scale = 10.0 ** (torch.rand(*shape[:-1], 1, generator=generator) * 15 - 12)
    x = torch.randn(shape, generator=generator) * scale
    x[:, :, :, 1] = 0.0
    x[:, :, :, 2] = (
        torch.arange(value_dim) - 63.5
    )  # halves of a step once the maximum is 63.5 or 127
    x[:, :, :, 2, 0] = 127.0
    x[:, :, :, 3, ::2] = 0.0
    x[:, :, :, 4] *= 1e-38  # subnormal scales
    x[:, :, 0, 0, 0] = 1e6  # FP16 rows saturate
    return [layer.clone() for layer in x]


def random_maps(layout: PackedLayout, layers: int, heads: int, device: str) -> Maps:
    """A key order and a value scale that is no power of two."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.rand(layers, heads, layout.key_dim, generator=generator).argsort(-1)
    scale = torch.rand(layers, heads, layout.value_dim, generator=generator) + 0.5
    return Maps(keys.to(torch.uint8).to(device), scale.to(device))


def slots_of(numbers: Sequence[int], device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes on the CPU: equality then also means equal NaN."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8)


def check_pack(
    layout: PackedLayout,
    device: str,
    *,
    mapped: bool = True,
    dense: DenseLayout | None = None,
    layers: int = 2,
    heads: int = 2,
) -> None:
    """Both directions against the twin on the CPU, bit for bit, with a padding row and untouched slots."""
    states = random_states(layers, 3, heads, layout.key_dim, layout.value_dim)
    dense = dense or DenseLayout(layout.key_dim, layout.value_dim)
    stored = [dense.pack(x) for x in states]
    empty = [torch.full((4, heads, layout.head_bytes), 7, dtype=torch.uint8) for _ in states]
    results = []
    for where, backend in (("cpu", "reference"), (device, "triton")):
        maps = random_maps(layout, layers, heads, where) if mapped else Maps()
        source = LayerSet.of([x.clone().to(where) for x in stored])
        pool = LayerSet.of([x.clone().to(where) for x in empty])
        back = LayerSet.of([torch.full_like(x, 3.0) for x in source.tensors])
        one, two = slots_of([2, -1, 0], where), slots_of([3, 2, 1], where)
        pack_states(source, one, pool, two, layout, maps=maps, dense_layout=dense, backend=backend)
        three = slots_of([0, -1, 1], where)
        unpack_states(
            pool, two, back, three, layout, maps=maps, dense_layout=dense, backend=backend
        )
        results.append([*map(bytes_of, pool.tensors), *map(bytes_of, back.tensors)])
    for expected, found in zip(*results, strict=True):
        different = int((expected != found).sum())
        assert not different, f"{different} of {len(expected)} bytes differ"


def random_masks(layers: int, heads: int, key_dim: int, per_channel: bool, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    shape = (layers, heads, key_dim) if per_channel else (layers, heads)
    return (torch.rand(shape, generator=generator) < share).to(torch.uint8)


def check_rows(
    codec: str,
    scale_dtype: torch.dtype,
    device: str,
    *,
    per_channel: bool,
    padded: bool = False,
    share: float = 0.4,
    sizes: tuple[int, int, int, int] = (2, 3, 8, 20),
) -> None:
    """Gather, scatter over kept and over zeroed rows, refresh: bytes equal to the twin's."""
    layers, heads, key_dim, value_dim = sizes
    masks = random_masks(layers, heads, key_dim, per_channel, share)
    states = random_states(layers, 3, heads, key_dim, value_dim)
    form = CheckpointForm(codec, value_dim, scale_dtype)  # type: ignore[arg-type]
    results = []
    for where, backend in (("cpu", "reference"), (device, "triton")):
        table = RowTable.from_masks(masks.to(where), key_dim, padded=padded)
        pools = LayerSet.of([x.clone().to(where) for x in states])
        buffer = form.buffer(3, table)
        assert table.count == int(masks.sum()) * (1 if per_channel else key_dim)
        slots, into = slots_of([2, 0, -1], where), slots_of([0, 2, 1], where)
        gather_rows(pools, slots, buffer, into, table, form, backend=backend)
        kept, zeroed = (
            LayerSet.of([torch.full_like(x, 3.0) for x in pools.tensors]) for _ in range(2)
        )
        targets = slots_of([1, 0, 2], where)
        scatter_rows(buffer, into, kept, targets.clone(), table, form, backend=backend)
        zeroing = {"omitted": "zero", "backend": backend}
        scatter_rows(buffer, into, zeroed, targets, table, form, **zeroing)
        fresh = slots_of([1, -1, 0], where)
        refresh_rows(pools, fresh, kept, targets, table.omitted, backend=backend)
        results.append([bytes_of(buffer), *(bytes_of(x) for x in (*kept.tensors, *zeroed.tensors))])
    for expected, found in zip(*results, strict=True):
        different = int((expected != found).sum())
        assert not different, f"{different} of {len(expected)} bytes differ"


def check_packed_checkpoint(layout: PackedLayout, device: str, *, per_channel: bool) -> None:
    """Packed slots to ragged rows and back into packed slots."""
    layers, heads = 2, 2
    masks = random_masks(layers, heads, layout.key_dim, per_channel, 0.5)
    states = random_states(layers, 3, heads, layout.key_dim, layout.value_dim)
    form = CheckpointForm("fp32", layout.value_dim)
    results = []
    for where, backend in (("cpu", "reference"), (device, "triton")):
        maps = random_maps(layout, layers, heads, where)
        table = RowTable.from_masks(masks.to(where), layout.key_dim)
        pool = LayerSet.of([layout.pack(x, check=False).to(where) for x in states])
        buffer = form.buffer(2, table)
        slots, into = slots_of([2, 0, -1], where), slots_of([0, 1, 1], where)
        store_packed(pool, slots, buffer, into, table, layout, maps=maps, backend=backend)
        target = LayerSet.of([torch.full_like(x, 9) for x in pool.tensors])
        load_packed(buffer, into, target, slots, table, layout, maps=maps, backend=backend)
        results.append([bytes_of(buffer), *(bytes_of(x) for x in target.tensors)])
    for expected, found in zip(*results, strict=True):
        different = int((expected != found).sum())
        assert not different, f"{different} of {len(expected)} bytes differ"


def check_copy(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whole slots, bit for bit; slots that are not named stay."""
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator) for _ in range(3)]
    source = LayerSet.of([x.to(dtype).to(device) for x in data])
    target = LayerSet.of([torch.full_like(x, 9) for x in source.tensors])
    copy_slots(
        source, slots_of([1, -1, 0], device), target, slots_of([2, 0, 1], device), backend="triton"
    )
    for one, other in zip(source.tensors, target.tensors, strict=True):
        assert torch.equal(other[2], one[1])
        assert torch.equal(other[1], one[0])
        assert (other[0] == 9).all()
