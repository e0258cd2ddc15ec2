"""A small engine on a real model and a prefix cache, for tests: exact, slow, a step of one request at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybridstate.runtime import restore
from hybridstate.runtime.admission import Admission, Pools
from hybridstate.runtime.compressed import Kind
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.prefix_cache import Lease, Outcome, PrefixCache
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


@dataclass(eq=False)
class Request:
    """A running request.

    Attributes:
        lease: its hold on the cache.
        reply: tokens to produce.
        ends: where the chunks of its prompt end that have not run.
        chunks: how many ran.
        at: tokens of the prompt that ran or were loaded.
        kv: attention keys so far; None before its slot was filled.
        checkpoint: whether the state behind `at` is to be kept now.
        produced: tokens of the reply so far.
    """

    lease: Lease
    reply: int
    ends: list[int]
    chunks: int = 0
    at: int = 0
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    checkpoint: bool = False
    produced: list[int] = field(default_factory=list)

    @property
    def offers(self) -> bool:
        """Whether the next step gives the state in its slot to the cache."""
        return self.checkpoint or len(self.produced) == self.reply


class CachedModel:
    """Requests of one model through a `PrefixCache` on tensors.

    Args:
        loaded: the model.
        pools, admission: of the cache.
        retained, kind, window: of the compressed slots.
        store: class of the memory.
        alone: replies without a cache, by request; engines of one model may share them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pools: Pools,
        admission: Admission,
        *,
        retained: Sequence[torch.Tensor] | None = None,
        kind: Kind = "fp32",
        window: int = 0,
        store: type[TensorStore] = TensorStore,
        alone: dict[bytes, tuple[list[int], list[float]]] | None = None,
    ) -> None:
        self.loaded = loaded
        pool = StatePool(
            loaded.spec,
            pools.native + RESERVED,
            state="damp" if kind == "packed" else "fp32",
            conv_dtype=torch.float32,
        )
        self.store = store(
            pool, pools.packed, retained, kind=kind, window=window, replay=self._replay
        )
        self.cache = PrefixCache(pools, self.store, admission)
        self.linear = {layer.index for layer in loaded.spec.layers}
        self.tiers = {"dense": 0, "compressed": 0, "miss": 0}
        self._alone = {} if alone is None else alone

    def run(self, prompt: Tokens, reply: int, *, stop: int | None = None) -> list[int] | None:
        """Greedy reply to a prompt; aborted after `stop` chunks. None while it has to wait or after an abort."""
        request = self.start(prompt, reply)
        if request is None:
            return None
        produced = None
        while produced is None:
            begun = request.kv is not None and not request.checkpoint
            if begun and request.ends and request.chunks == stop:
                self.cache.abort(request.lease)
                return None
            produced, _ = self.step(request)
        return produced

    def start(self, prompt: Tokens, reply: int) -> Request | None:
        """Take a slot for a request; None while it has to wait."""
        lease = self.cache.acquire(prompt, reply)
        if lease is None:
            return None
        self.tiers[lease.tier] += 1
        return Request(lease, reply, sorted({*lease.boundaries, len(prompt)}))

    def step(self, request: Request) -> tuple[list[int] | None, Outcome | None]:
        """Fill the slot, run a chunk or a token, offer a state to the cache, or end.

        Returns:
            The reply once the request has ended, and what became of a state that was offered.

        Raises:
            NumericError: the slot is not finite before a chunk or a token.
        """
        lease, cache = request.lease, self.cache
        if request.kv is None:
            if lease.hit is None:
                self.store.clear(lease.slot)
            request.kv = joined(cache.prefix(lease).kv)
            cache.load(lease)
            request.at = lease.hit_tokens
        elif request.checkpoint:
            request.checkpoint = False
            return None, cache.checkpoint(lease, request.at, TensorKeys(request.kv))
        elif request.ends:
            end = request.ends[0]
            self._advance(request, lease.tokens[request.at : end])
            request.at = request.ends.pop(0)
            request.chunks += 1
            request.checkpoint = end in lease.boundaries
        elif len(request.produced) < request.reply:
            self._advance(request, np.array(request.produced[-1:], np.int32))
        else:
            rest = np.array(request.produced[:-1], np.int32)
            return request.produced, cache.finish(lease, rest, TensorKeys(request.kv))
        return None, None

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

    def _advance(self, request: Request, tokens: Tokens) -> None:
        """Run tokens on the request's slot: states leave the pool and come back; the end of a prompt gives a token."""
        assert request.kv is not None, "its slot was not filled"
        slots = torch.tensor([request.lease.slot])
        self.store.pool.require_finite(slots)
        states, conv = self.store.pool.read(slots)
        past = resume(self.loaded, request.kv, states, conv)
        with torch.no_grad():
            logits = forward(self.loaded, torch.from_numpy(tokens.astype(np.int64))[None], past)
        layers = linear_layers(past)
        self.store.pool.write(
            slots,
            [layer.recurrent_states[0] for layer in layers],
            [layer.conv_states[0][..., 1:] for layer in layers],
        )
        request.kv = {
            block: (layer.keys, layer.values)
            for block, layer in enumerate(past.layers)
            if block not in self.linear
        }
        if len(request.ends) < 2:
            request.produced.append(int(logits[0, -1].argmax()))

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
