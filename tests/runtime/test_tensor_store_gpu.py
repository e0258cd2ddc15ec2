"""The prefix cache on a GPU: demotions on a side stream, orders of the decode kernels, calls as graphs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.families import ModelSpec
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.compressed import PackedRows
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.tensor_store import EventTransfer, SlotCall, TensorStore
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.model import load_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("order", ["rows", "tiles"])
@pytest.mark.parametrize("kind", ["fp32", "int8", "packed"])
def test_demotions_on_a_side_stream_keep_every_bit(
    tiny_checkpoint: Callable[..., Path], kind: str, order: str
) -> None:
    """The GPU's bytes are the CPU's, whatever runs on the engine's stream meanwhile."""
    folder = tiny_checkpoint("kimi_linear", key_dim=16)
    spec = load_model(str(folder)).spec
    options: dict[str, Any] = {"dense_order": order}
    if kind == "packed":
        options = {"state": "damp", "k_hi": 0}
    torch.manual_seed(1)
    states = [torch.randn(1, n.value_heads, n.key_dim, n.value_dim) for n in spec.layers]
    conv = [torch.randn(1, n.conv_channels, n.conv_width - 1) for n in spec.layers]
    masks = [
        (torch.arange(n.value_heads * n.key_dim) % 3 > 0).view(n.value_heads, -1)
        for n in spec.layers
    ]
    found = []
    for device in ("cpu", "cuda"):
        pool = StatePool(spec, 8, device=device, **options)
        store = TensorStore(pool, 4, [m.to(device) for m in masks], kind=kind)  # type: ignore[arg-type]
        cache = PrefixCache(
            Pools(native=7, packed=4), store, Admission(prompt=(), junctions=False, shortest=1)
        )
        for number in range(4):
            prompt = np.arange(5, dtype=np.int32) + 100 * number
            lease = cache.acquire(prompt)
            assert lease is not None
            slot = torch.tensor([lease.slot], device=device)
            pool.write(
                slot,
                [(state * (number + 1)).to(device) for state in states],
                [(window * (number + 1)).to(device) for window in conv],
            )
            cache.finish(lease)
            if device == "cuda":
                busy = torch.randn(1024, 1024, device=device)
                for _ in range(20):
                    busy = busy @ busy / 1024
        cache.settle()
        cache.audit()
        loaded = []
        for number in range(4):
            prompt = np.append(np.arange(5, dtype=np.int32) + 100 * number, 7).astype(np.int32)
            lease = cache.acquire(prompt)
            assert lease is not None
            assert lease.tier == "compressed"
            cache.load(lease)
            slot = torch.tensor([lease.slot], device=device)
            after, windows = pool.read(slot)
            loaded.append([x.cpu() for x in (*after, *windows)])
            cache.abort(lease)
        found.append(loaded)
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_demotion_is_not_done_before_its_stream_is() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        event = torch.cuda.Event()
        event.record(side)
    transfer = EventTransfer(event)
    assert not transfer.done()
    transfer.wait()
    assert transfer.done()


# -- calls as graphs ----------------------------------------------------------------------------

MADE: dict[str, dict[str, Any]] = {
    "fp32 tiles": {"dense_order": "tiles"},
    "fp32 rows": {},
    "int8 tiles": {"dense_order": "tiles"},
    "int8 rows": {},
    "packed fragment": {"state": "damp", "k_hi": 16},
    "packed natural": {"state": "damp", "k_hi": 8},
}
NATIVE, PACKED = 7, 4
"""Slots that are used."""


def spec_of(tiny_checkpoint: Callable[..., Path], family: str = "kimi_linear") -> ModelSpec:
    return load_model(str(tiny_checkpoint(family, key_dim=64, value_dim=64))).spec


def store_of(spec: ModelSpec, kind: str, window: int) -> TensorStore:
    """Used native slots hold random states."""
    pool = StatePool(spec, NATIVE + 1, device="cuda", **MADE[kind])
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    masks = [(draw(n.value_heads, n.key_dim) > 0).cuda() for n in spec.layers]
    fresh = [draw(1, n.value_heads, n.key_dim, n.value_dim).cuda() for n in spec.layers]

    def replay(prefix: Prefix, tokens: int) -> list[torch.Tensor]:
        """Other values and addresses every time."""
        assert tokens == window
        return [state * len(prefix.tokens) for state in fresh]

    store = TensorStore(
        pool,
        PACKED,
        masks,
        kind=kind.split()[0],  # type: ignore[arg-type]
        window=window,
        replay=replay,
    )
    slots = torch.arange(1, NATIVE + 1, device="cuda")
    pool.write(
        slots,
        [draw(NATIVE, n.value_heads, n.key_dim, n.value_dim).cuda() for n in spec.layers],
        [draw(NATIVE, n.conv_channels, n.conv_width - 1).cuda() for n in spec.layers],
    )
    return store


def bytes_of(store: TensorStore) -> list[torch.Tensor]:
    """Everything that both pools hold in used slots."""
    rows: Any = store.checkpoints
    torch.cuda.synchronize()
    held = [x[1:].contiguous().view(torch.uint8) for x in (*store.pool.tensors, *store._conv)]
    return [x.cpu() for x in (*held, rows._buffer[1:, : rows.slot_bytes])]


def random_calls(store: TensorStore, calls: int, seed: int) -> list[bool]:
    """Calls on random slots between other work, packs on both streams at once; what `finite` answered."""
    rng = np.random.Generator(np.random.PCG64(seed))
    busy = torch.randn(1024, 1024, device="cuda")
    under_way: dict[int, Any] = {}
    answers = []
    for packed in range(1, PACKED + 1):  # no load of what was never packed
        store.pack(packed, packed, aside=bool(packed % 2)).wait()
    for _ in range(calls):
        busy = busy @ busy / 1024
        what = ("copy", "pack", "aside", "load", "finite", "freed")[rng.integers(6)]
        source, target = (int(n) + 1 for n in rng.permutation(NATIVE)[:2])
        packed = int(rng.integers(PACKED)) + 1
        if what in ("copy", "load", "freed") and target in under_way:
            under_way.pop(target).wait()
        if what == "copy":
            store.copy(source, target)
        elif what == "pack":
            store.pack(source, packed, aside=False)
        elif what == "aside":
            if source in under_way:
                under_way.pop(source).wait()
            under_way[source] = store.pack(source, packed, aside=True)
        elif what == "load":
            store.load(packed, target, Prefix(np.zeros(5 + packed, np.int32), []))
        elif what == "finite":
            answers.append(store.finite(source))
        else:
            store.freed(target, packed=False)
    for transfer in under_way.values():
        transfer.wait()
    return answers


@pytest.mark.parametrize("window", [0, 4], ids=["zeros", "replayed"])
@pytest.mark.parametrize("kind", MADE)
def test_graphs_leave_what_eager_calls_leave(
    tiny_checkpoint: Callable[..., Path], kind: str, window: int
) -> None:
    """Every call captured; over random calls, bit for bit, NaN of freed slots too."""
    found = []
    for captured in (True, False):
        store = store_of(spec_of(tiny_checkpoint), kind, window)
        if not captured:
            for call in store._calls.values():
                call._replay.reason = "compared"
        store.capture()
        ran = store.to_json()
        for name, call in ran.items():
            expected = ("cuda-graph", None, 1) if captured else ("eager", "compared", 0)
            assert (call["mode"], call["reason"], call["graphs"]) == expected, (name, call)
        found.append([(random_calls(store, 60, seed), bytes_of(store)) for seed in range(3)])
        assert store.to_json() == ran
        if captured and window and isinstance(rows := store.checkpoints, PackedRows):
            assert rows._given is not None
            check = rows._given._check.to_json()
            assert (check["mode"], check["reason"]) == ("cuda-graph", None)
    for (answers, held), (eager_answers, eager_held) in zip(*found, strict=True):
        assert answers == eager_answers
        assert all(map(torch.equal, held, eager_held))
    assert any(any(answers) for answers, _ in found[0])


@pytest.mark.parametrize("window", [0, 4], ids=["zeros", "replayed"])
@pytest.mark.parametrize("kind", MADE)
def test_only_finite_waits_for_the_device(
    tiny_checkpoint: Callable[..., Path], kind: str, window: int
) -> None:
    """And a load of packed states that were replayed, which have to be finite."""
    store = store_of(spec_of(tiny_checkpoint), kind, window)
    store.capture()
    prefix = Prefix(np.zeros(6, np.int32), [])
    calls: list[tuple[int, Callable[[], Any]]] = [
        (0, lambda: store.copy(1, 2)),
        (0, lambda: store.pack(1, 1, aside=True)),
        (0, lambda: store.pack(1, 2, aside=False)),
        (int(kind.startswith("packed") and window > 0), lambda: store.load(1, 3, prefix)),
        (1, lambda: store.finite(2)),
    ]
    for waits, call in calls:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        told = [str(w.message) for w in said if "synchronizing CUDA operation" in str(w.message)]
        assert len(told) == waits, told


def test_slot_numbers_reach_the_device() -> None:
    call = SlotCall(lambda _source, _target, _refilled: None, torch.device("cuda"))
    rng = np.random.Generator(np.random.PCG64(3))
    for source, target in [(0, 0), (5, 5), (1, 0), *rng.integers(0, 1 << 22, (200, 2)).tolist()]:
        assert [int(n) for n in call.name(source, target)] == [source, target]


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_rings_are_folded_eagerly(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    spec = spec_of(tiny_checkpoint, family)
    pool = StatePool(spec, 4, state="damp", k_hi=8, every=4, device="cuda")
    store = TensorStore(pool, 2, kind="packed")
    pool.write(
        torch.tensor([1], device="cuda"),
        [torch.randn(1, n.value_heads, n.key_dim, n.value_dim).cuda() for n in spec.layers],
        [torch.randn(1, n.conv_channels, n.conv_width - 1).cuda() for n in spec.layers],
    )
    for ring in pool.rings:
        for part in (ring.keys, ring.values):
            part[1] = torch.randn(part[1].shape).cuda().to(part.dtype) * 0.1
        ring.gates[1] = -0.1
        ring.phases[1] = 2
    held = [state[1].clone() for state in pool.states]
    for aside in (True, False, True):
        store.pack(1, 1, aside=aside).wait()
        store.load(1, 3, Prefix(np.zeros(1, np.int32), []))
        store.copy(1, 2)
        assert store.finite(3)
        for state, before in zip(pool.states, held, strict=True):
            assert torch.equal(state[1], before)  # a running request's slot is as it was
            assert torch.equal(state[2], state[3])
            assert not torch.equal(state[3], before)
    assert {call["reason"] for call in store.to_json().values()} == {"rings"}
    assert {call["mode"] for call in store.to_json().values()} == {"eager"}
