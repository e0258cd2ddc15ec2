"""A small engine on a real model and a prefix cache, for tests: exact, slow, one request at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridstate.runtime import restore
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.compressed import Kind
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.prefix_cache import Lease, PrefixCache
from hybridstate.runtime.radix import Keys, Tokens
from hybridstate.runtime.restore import resume
from hybridstate.runtime.slots import RESERVED
from hybridstate.runtime.tensor_store import TensorStore
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories.cache import forward, linear_layers, new_cache
from hybridstate.trajectories.model import LoadedModel

MARGIN = 1e-3
"""Two best logits closer than this may change places between chunkings."""


@dataclass(frozen=True)
class TensorKeys:
    """Keys and values `[1, heads, n, d]` of consecutive tokens, by block."""

    blocks: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def cut(self, start: int, end: int) -> "TensorKeys":
        return TensorKeys(
            {b: (k[:, :, start:end], v[:, :, start:end]) for b, (k, v) in self.blocks.items()}
        )


def joined(parts: Sequence[Keys | None]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    held = [part for part in parts if isinstance(part, TensorKeys)]
    assert len(held) == len(parts), "a part of the prefix has no keys"
    return {
        block: (
            torch.cat([part.blocks[block][0] for part in held], 2),
            torch.cat([part.blocks[block][1] for part in held], 2),
        )
        for block in (held[0].blocks if held else {})
    }


class CachedModel:
    """Requests of one model through a `PrefixCache` on tensors."""

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Pools,
        admission: Admission,
        *,
        retained: Sequence[torch.Tensor] | None = None,
        kind: Kind = "fp32",
        window: int = 0,
    ) -> None:
        self.loaded = loaded
        pool = StatePool(
            loaded.spec,
            pools.native + RESERVED,
            state="damp" if kind == "packed" else "fp32",
            conv_dtype=torch.float32,
        )
        self.store = TensorStore(
            pool, pools.packed, retained, kind=kind, window=window, replay=self._replay
        )
        self.cache = PrefixCache(pools, self.store, admission)
        self.linear = {layer.index for layer in loaded.spec.layers}
        self.tiers = {"dense": 0, "compressed": 0, "miss": 0}
        self._alone: dict[bytes, tuple[list[int], list[float]]] = {}

    def run(self, prompt: Tokens, reply: int, *, stop: int | None = None) -> list[int] | None:
        """Greedy reply to a prompt; aborted after `stop` chunks. None while it has to wait or after an abort."""
        lease = self.cache.acquire(prompt, reply)
        if lease is None:
            return None
        self.tiers[lease.tier] += 1
        if lease.hit is None:
            self.store.clear(lease.slot)
        kv = joined(self.cache.prefix(lease).kv)
        self.cache.load(lease)
        at = lease.hit_tokens
        logits = torch.empty(0)
        for number, end in enumerate(sorted({*lease.boundaries, len(prompt)})):
            if number == stop:
                self.cache.abort(lease)
                return None
            logits, kv = self._advance(lease, prompt[at:end], kv)
            at = end
            if end in lease.boundaries:
                self.cache.checkpoint(lease, end, TensorKeys(kv))
        produced = [int(logits.argmax())]
        while len(produced) < reply:
            logits, kv = self._advance(lease, np.array(produced[-1:], np.int32), kv)
            produced.append(int(logits.argmax()))
        self.cache.finish(lease, np.array(produced[:-1], np.int32), TensorKeys(kv))
        return produced

    def alone(self, prompt: Tokens, reply: int) -> tuple[list[int], list[float]]:
        """The reply without any cache, and the distance of the two best logits at each token."""
        key = prompt.tobytes() + bytes([reply])
        if key not in self._alone:
            past = new_cache(self.loaded)
            step = torch.from_numpy(prompt.astype(np.int64))[None]
            tokens: list[int] = []
            margins: list[float] = []
            with torch.no_grad():
                while len(tokens) < reply:
                    logits = forward(self.loaded, step, past)[0, -1]
                    best = logits.topk(2).values
                    tokens.append(int(logits.argmax()))
                    margins.append(float(best[0] - best[1]))
                    step = torch.tensor([[tokens[-1]]])
            self._alone[key] = tokens, margins
        return self._alone[key]

    def _advance(
        self, lease: Lease, tokens: Tokens, kv: dict[int, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """Run tokens on the request's slot: states leave the pool and come back."""
        slots = torch.tensor([lease.slot])
        self.store.pool.require_finite(slots)
        states, conv = self.store.pool.read(slots)
        past = resume(self.loaded, kv, states, conv)
        with torch.no_grad():
            logits = forward(self.loaded, torch.from_numpy(tokens.astype(np.int64))[None], past)
        layers = linear_layers(past)
        self.store.pool.write(
            slots,
            [layer.recurrent_states[0] for layer in layers],
            [layer.conv_states[0][..., 1:] for layer in layers],
        )
        found = {
            block: (layer.keys, layer.values)
            for block, layer in enumerate(past.layers)
            if block not in self.linear
        }
        return logits[0, -1], found

    def _replay(self, prefix: Prefix, window: int) -> Sequence[torch.Tensor]:
        tokens = torch.from_numpy(prefix.tokens.astype(np.int64))[None]
        whole = restore.Prefix(tokens, (), (), joined(prefix.kv))
        return restore.replay(self.loaded, whole, window)


def differing(got: list[int], expected: tuple[list[int], list[float]]) -> int | None:
    """First place at which two replies differ though the choice was clear; None if there is none."""
    for place, (token, other, margin) in enumerate(zip(got, *expected, strict=True)):
        if token != other:
            return place if margin > MARGIN else None
    return None


def prompt(rng: np.random.Generator, seen: list[Tokens]) -> Tokens:
    """Short, often a known sequence that is repeated, cut or extended."""
    fresh = rng.integers(3, 90, int(rng.integers(1, 6))).astype(np.int32)
    if not seen or rng.random() < 0.25:
        return fresh
    base = seen[int(rng.integers(len(seen)))]
    kind = rng.random()
    if kind < 0.25:
        return base
    if kind < 0.5:
        base = base[: int(rng.integers(1, len(base) + 1))]
    return np.concatenate([base, fresh])[:24]


def compare_outputs(
    engine: CachedModel,
    operations: int,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Random requests, aborts and reclamations; every reply has to be that of a run without a cache.

    Returns how many replies were compared. Pools are audited after every operation, and empty at the end.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    seen: list[Tokens] = []
    compared = 0
    for number in range(operations):
        tokens, reply = prompt(rng, seen), int(rng.integers(1, 4))
        draw = rng.random()
        if draw < 0.1:
            engine.run(tokens, reply, stop=int(rng.integers(0, 2)))
        elif draw < 0.15:
            engine.cache.tiers.reclaim(int(rng.integers(1, 4)))
        else:
            got = engine.run(tokens, reply)
            assert got is not None, "nothing runs, so nothing has to wait"
            place = differing(got, engine.alone(tokens, reply))
            assert place is None, f"request {number} differs at token {place}"
            seen = [*seen, np.concatenate([tokens, np.array(got[:-1], np.int32)])][-12:]
            compared += 1
        engine.cache.poll()
        engine.cache.audit()
        progress(number)
    engine.cache.clear()
    engine.cache.audit()
    assert engine.cache.tree.size == 0
    return compared
