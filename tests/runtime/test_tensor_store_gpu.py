"""The prefix cache on a GPU: demotions on a side stream, the physical order of the decode kernels, outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.prefix_cache import PrefixCache
from hybridstate.runtime.tensor_store import EventTransfer, TensorStore
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
