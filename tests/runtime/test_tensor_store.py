"""The prefix cache on tensors: formats bit for bit, and every output against a run without a cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate.errors import PlanMismatch, UsageError
from hybridstate.families import ModelSpec
from hybridstate.kernels.codec import dequantise_rows, quantise_rows
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.runtime.cached_model import CachedModel, compare_outputs

REQUESTS = 100
"""Per model and arm; `scripts/cache_stress.py` runs 2,000 on each embedded model."""

NOTHING = Prefix(np.empty(0, np.int32), [])


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(str(tiny_checkpoint(request.param)))


def alternate(spec: ModelSpec) -> list[torch.Tensor]:
    """Every other unit."""
    masks = []
    for layer in spec.layers:
        shape = (layer.value_heads,) if spec.unit == "head" else (layer.value_heads, layer.key_dim)
        masks.append((torch.arange(int(np.prod(shape))) % 2 == 0).view(shape))
    return masks


def rows(mask: torch.Tensor, key_dim: int) -> torch.Tensor:
    return mask if mask.dim() == 2 else mask[:, None].expand(-1, key_dim)


def filled(spec: ModelSpec, **options: Any) -> StatePool:
    """Three slots; slot 1 holds random states."""
    pool = StatePool(spec, 3, conv_dtype=torch.float32, **options)
    torch.manual_seed(3)
    states = [torch.randn(1, n.value_heads, n.key_dim, n.value_dim) for n in spec.layers]
    conv = [torch.randn(1, n.conv_channels, n.conv_width - 1) for n in spec.layers]
    pool.write(torch.tensor([1]), states, conv)
    return pool


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["fp32", "int8", "packed"])
def test_retained_rows_come_back_and_the_others_are_zero_or_replayed(
    loaded: LoadedModel, kind: str, order: str
) -> None:
    spec, masks = loaded.spec, alternate(loaded.spec)
    options: dict[str, Any] = {"dense_order": order}
    if kind == "packed":
        options = {"state": "damp", "k_hi": 4}
    pool = filled(spec, **options)
    before, windows = pool.read(torch.tensor([1]))
    fresh = [torch.randn_like(state) for state in before]

    def replay(prefix: Prefix, window: int) -> list[torch.Tensor]:
        assert window == 5
        return fresh

    store = TensorStore(pool, 2, masks, kind=kind, window=5, replay=replay)  # type: ignore[arg-type]
    assert store.pack(1, 2, aside=True).done()
    pool.poison([1])
    for window, tokens in ((0, 0), (5, 7)):
        store.window = window
        prefix = Prefix(np.zeros(tokens, np.int32), [])
        assert store.load(2, 2, prefix) == window
        after, conv = pool.read(torch.tensor([2]))
        assert all(map(torch.equal, conv, windows))
        for layer, mask, old, new, fresh_state in zip(
            spec.layers, masks, before, after, fresh, strict=True
        ):
            kept = rows(mask, layer.key_dim)[None, :, :, None]
            expected = old if kind != "int8" else dequantise_rows(*quantise_rows(old))
            assert torch.equal(new * kept, expected * kept), "retained rows are exact"
            other = torch.zeros_like(new)
            if window:
                other = fresh_state
                if kind == "packed":
                    ordinal = pool.layouts[layer.ordinal]
                    other = ordinal.unpack(ordinal.pack(fresh_state))
            assert torch.equal(new * ~kept, other * ~kept)


def test_bytes_are_those_of_the_format(loaded: LoadedModel) -> None:
    spec, masks = loaded.spec, alternate(loaded.spec)
    kept = sum(int(rows(m, n.key_dim).sum()) for m, n in zip(masks, spec.layers, strict=True))
    width = spec.layers[0].value_dim
    conv = sum(4 * n.conv_channels * (n.conv_width - 1) for n in spec.layers)
    for kind, row in (("fp32", 4 * width), ("int8", width + 4)):
        store = TensorStore(filled_free(spec), 1, masks, kind=kind)  # type: ignore[arg-type]
        assert store.packed_bytes == kept * row + conv
    pool = StatePool(spec, 2, state="damp", k_hi=0)
    groups = -(-width // 32)
    assert TensorStore(pool, 1, masks, kind="packed").checkpoints.slot_bytes == kept * (
        width + 4 * groups
    )


def filled_free(spec: ModelSpec) -> StatePool:
    return StatePool(spec, 2, conv_dtype=torch.float32)


def test_freed_slots_are_poisoned_and_non_finite_ones_refused(loaded: LoadedModel) -> None:
    pool = filled(loaded.spec)
    store = TensorStore(pool, 1)
    assert store.finite(1)
    store.pack(1, 1, aside=False)
    store.freed(1, packed=False)
    assert not store.finite(1)
    store.load(1, 2, NOTHING)
    assert store.finite(2)
    store.freed(1, packed=True)
    store.load(1, 2, NOTHING)
    assert not store.finite(2), "a freed checkpoint must not load as numbers"
    store.clear(2)
    assert store.finite(2)


def test_wrong_stores_are_refused(loaded: LoadedModel) -> None:
    spec = loaded.spec
    with pytest.raises(PlanMismatch, match="fp32 pool"):
        TensorStore(StatePool(spec, 2, state="damp"), 1)
    with pytest.raises(PlanMismatch, match="damp pool"):
        TensorStore(filled_free(spec), 1, kind="packed")
    with pytest.raises(PlanMismatch, match="masks"):
        TensorStore(filled_free(spec), 1, alternate(spec)[:1])
    with pytest.raises(PlanMismatch, match="mask"):
        TensorStore(filled_free(spec), 1, [torch.ones(1, 2, 3)] * len(spec.layers))
    with pytest.raises(UsageError, match="replay"):
        TensorStore(filled_free(spec), 1, window=4)
    used = filled_free(spec)
    used.alloc(1)
    with pytest.raises(UsageError, match="its own"):
        TensorStore(used, 1)


# -- outputs ------------------------------------------------------------------------------------


ARMS: dict[str, tuple[Pools, dict[str, Any]]] = {
    "dense": (Pools(native=10), {}),
    "two-tier": (Pools(native=6, packed=6, watermark=1), {}),
    "replay": (Pools(native=2, packed=9), {"half": True, "window": 64}),
}


@pytest.mark.parametrize(
    "arm", [pytest.param("dense", marks=pytest.mark.slow), "two-tier", "replay"]
)
def test_every_output_is_that_of_a_run_without_a_cache(loaded: LoadedModel, arm: str) -> None:
    pools, options = ARMS[arm]
    retained = alternate(loaded.spec) if options.get("half") else None
    engine = CachedModel(
        loaded, pools, Admission(shortest=1), retained=retained, window=options.get("window", 0)
    )
    compared = compare_outputs(engine, REQUESTS, seed=9)
    assert compared > 0.7 * REQUESTS
    assert engine.tiers["miss"] > 0
    assert engine.tiers["dense"] + engine.tiers["compressed"] > 0.2 * compared
    if arm != "dense":
        assert engine.tiers["compressed"] > 0.05 * compared
