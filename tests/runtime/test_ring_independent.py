"""Slots with rings against the recurrence and its storage written down in NumPy float64, one token at a time.

Between two rewrites a state is the packed one, decayed, plus the decayed products of what the ring holds: keys and
pseudo values in FP16, decays per channel in FP16, decays per head as FP32 sums.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybridstate.bench.decode_check import rounded
from hybridstate.kernels.layout import PackedLayout
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.orders import StoredOrder
from hybridstate.runtime.pool import StatePool
from hybridstate.trajectories.model import LoadedModel, load_model
from tests.runtime.test_engine import MODELS
from tests.tolerances import relative_rms

Array = NDArray[Any]
K_HI = 8


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1].get('value_heads', 0)}")
def loaded(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> LoadedModel:
    family, options = request.param
    return load_model(str(tiny_checkpoint(family, **options)))


def half(x: Array) -> Array:
    """FP16 as torch converts from float64: by way of float32."""
    return np.clip(x, -65504, 65504).astype(np.float32).astype(np.float16).astype(np.float64)


def stored(state: Array) -> Array:
    """T `[H, K, V]` after its storage: K_HI rows in FP16, the others in INT8 with a scale for 32 columns (Eq. 5, 6)."""
    result = half(state)
    for first in range(0, state.shape[2], 32):
        x = state[:, K_HI:, first : first + 32]
        scale = (np.abs(x).max(2, keepdims=True) / 127).astype(np.float32)
        codes = np.clip(np.rint(x / np.where(scale > 0, scale, 1)), -127, 127).astype(np.float32)
        result[:, K_HI:, first : first + 32] = codes * scale
    return result


@dataclass
class Slot:
    """One layer of one request: `key` and `value` are its orders `[H, K]`, `[H, V]`, `scale` its c `[H, V]`."""

    packed: Array
    key: Array
    value: Array
    scale: Array
    every: int
    ring: list[tuple[Array, Array, Array]] = field(default_factory=list)
    """k, u and the decay: of one update per channel, summed since the rewrite per head."""

    def state(self) -> Array:
        state = self.packed
        if self.ring and self.ring[0][2].ndim == 1:  # sums
            total = self.ring[-1][2]
            state = state * np.exp(total)[:, None, None]
            for k, u, g in self.ring:
                state = state + np.exp(total - g)[:, None, None] * k[:, :, None] * u[:, None]
            return state
        for k, u, g in self.ring:
            state = state * np.exp(g)[:, :, None] + k[:, :, None] * u[:, None]
        return state

    def step(self, q: Array, k: Array, v: Array, g: Array, beta: Array) -> Array:
        ratio, width = len(v) // len(q), q.shape[-1]
        q, k = (
            np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), ratio, 0) for x in (q, k)
        )
        q, k = (np.take_along_axis(x, self.key, 1) for x in (q / np.sqrt(width), k))
        v = np.take_along_axis(v, self.value, 1) / self.scale
        g = np.maximum(g, -100.0)
        if g.ndim == 2:
            g = np.take_along_axis(half(g), self.key, 1)
            state = self.state() * np.exp(g)[:, :, None]
        else:
            state = self.state() * np.exp(g)[:, None, None]
            g = g + (self.ring[-1][2] if self.ring else 0.0)
            if len(self.ring) < self.every - 1:  # the last goes straight into the state
                g = g.astype(np.float32).astype(np.float64)
        u = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        read = np.einsum("hkv,hk->hv", state + k[:, :, None] * u[:, None], q) * self.scale
        self.ring.append((half(k), half(u), g))
        if len(self.ring) == self.every:
            self.fold()
        o = np.empty_like(read)
        np.put_along_axis(o, self.value, read, 1)
        return o

    def fold(self) -> None:
        if self.ring:
            self.packed, self.ring = stored(self.state()), []


class Pair:
    """An engine with orders of every value head and the same slots in NumPy."""

    def __init__(self, loaded: LoadedModel, every: int) -> None:
        self.rng = np.random.default_rng(every)
        self.layers = loaded.spec.layers
        self.engine = DecodeEngine(loaded, state="damp", slots=4, k_hi=K_HI, requantise_every=every)
        self.engine.orders = tuple(
            StoredOrder(
                key=self._orders(n.value_heads, n.key_dim),
                value=self._orders(n.value_heads, n.value_dim),
                scale=torch.tensor(
                    np.exp(self.rng.normal(size=(n.value_heads, n.value_dim)))
                ).float(),
                indexed=False,
            )
            for n in self.layers
        )
        self.pool = self.engine.pool = StatePool(
            loaded.spec, 4, state="damp", k_hi=K_HI, every=every, conv_dtype=loaded.dtype,
            ring_key_heads=[n.value_heads for n in self.layers],
        )  # fmt: skip
        self.slots: dict[int, list[Slot]] = {}

    def _orders(self, rows: int, width: int) -> torch.Tensor:
        return torch.tensor(np.stack([self.rng.permutation(width) for _ in range(rows)]))

    def join(self) -> int:
        """A request with random states, at phase 0."""
        slots = self.pool.alloc(1)
        assert slots is not None
        states = [
            torch.tensor(self.rng.normal(size=(1, n.value_heads, n.key_dim, n.value_dim))).float()
            for n in self.layers
        ]
        orders = self.engine.orders
        states = [o.states(s) for o, s in zip(orders, states, strict=True)]
        self.pool.write_states(slots, states)
        for window in self.pool.conv:
            window[slots] = 0.0
        self.slots[int(slots)] = [
            Slot(
                stored(s[0].double().numpy()),
                *(x.numpy() for x in (o.key, o.value, o.scale.double())),
                self.pool.every,
            )
            for o, s in zip(orders, states, strict=True)
        ]
        return int(slots)

    def checkpoint(self, source: int) -> int:
        """A copy of a slot, which is one requantisation where its ring holds anything."""
        slots = self.pool.alloc(1)
        assert slots is not None
        self.pool.copy(torch.tensor([source]), slots)
        copies = [replace(x, ring=list(x.ring)) for x in self.slots[source]]
        for copy in copies:
            copy.fold()
        self.slots[int(slots)] = copies
        return int(slots)

    def step(self, *rows: int) -> None:
        """A token of some slots and of padding; outputs and states have to agree."""
        slots = torch.tensor([*rows, -1])
        for n in self.layers:
            q, k = (self.rng.normal(size=(len(slots), n.key_heads, n.key_dim)) for _ in range(2))
            v = self.rng.normal(size=(len(slots), n.value_heads, n.value_dim))
            gate = v.shape[:2] + ((n.key_dim,) if self.pool.rings[0].per_channel else ())
            g = np.where(self.rng.random(gate) < 0.8, -self.rng.exponential(0.1, size=gate), -80.0)
            given = [torch.tensor(x).float() for x in (q, k, v, g, self.rng.random(v.shape[:2]))]
            o = self.engine._advance(n.ordinal, *given, slots)
            assert not bool(o[-1].any())
            for i, row in enumerate(rows):
                inputs = (x[i].double().numpy() for x in given)
                assert relative_rms(o[i], self.slots[row][n.ordinal].step(*inputs)) < 1e-6
        for row in rows:
            self.check(row)

    def check(self, row: int) -> None:
        for ordinal, (slot, layout) in enumerate(
            zip(self.slots[row], self.pool.layouts, strict=True)
        ):
            assert isinstance(layout, PackedLayout)
            assert bool((self.pool.rings[ordinal].phases[row] == len(slot.ring)).all())
            found = self.pool.read(torch.tensor([row]))[0][ordinal][0].double().numpy()
            if slot.ring:
                assert relative_rms(found, slot.state()) < 1e-6
            else:  # a value halfway between two codes may go either way, and would be carried on
                assert (np.abs(found - slot.packed) > 1e-6 * np.abs(slot.packed)).mean() < 1e-3
                slot.packed = found


@pytest.mark.parametrize("every", [2, 4, 7, 16])
def test_checkpoints_of_every_phase_continue_as_their_simulation(
    loaded: LoadedModel, every: int
) -> None:
    """Copied at phases 0 to L - 1, restored and run for more than two rewrites beside the source, which goes on."""
    pair = Pair(loaded, every)
    source = pair.join()
    for phase in range(0, every, max(1, every // 4)):
        while len(pair.slots[source][0].ring) != phase:
            pair.step(source)
        saved = pair.checkpoint(source)
        pair.check(saved)
        if not phase:
            assert all(torch.equal(x[source], x[saved]) for x in pair.pool.states)
        restored = pair.checkpoint(saved)  # nothing is held: bit for bit
        assert all(torch.equal(x[saved], x[restored]) for x in pair.pool.states)
        for _ in range(2 * every + 1):
            pair.step(restored, source)
        for row in (saved, restored):
            pair.pool.free(torch.tensor([row]))
            del pair.slots[row]


def test_the_simulation_of_the_check_saturates_as_storage_does(loaded: LoadedModel) -> None:
    engine = DecodeEngine(loaded, state="damp", slots=1, k_hi=K_HI)
    n = loaded.spec.layers[0]
    state = torch.full((1, n.value_heads, n.key_dim, n.value_dim), 1e5)
    engine.pool.alloc(1)
    engine.pool.write_states(torch.tensor([0]), [state] * len(loaded.spec.layers))
    assert torch.equal(engine.pool.read(torch.tensor([0]))[0][0], rounded(state, engine, 0))
