"""Batched decoding of a transformers model whose recurrent states live in our pool.

The model keeps its own code: only the function that advances one token is replaced (`trajectories.swap`), and the cache
layer of every linear block holds a handle instead of a tensor. Between two steps nothing but the pool stores the
temporal states, packed or dense, and `DecodeRun.check_bytes` proves it.

A plan made from this checkpoint reorders key channels (and value columns): the update reads its operands through an
index (`runtime.orders`). A checkpoint exported by `export-plan` carries the order in its weights and needs none.

A packed state may be rewritten at every L-th update only (`requantise_every`): a slot then holds a ring of the inputs
since, and one launch reads both (`kernels.ring_update`).

On a GPU the step runs on lines of keys and values, its modules in few launches (`runtime.fused`), and is captured in a
CUDA graph when that works; `DecodeRun.mode` says what runs. A CPU, and models whose attention keeps more than keys and
values, run the model's own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch

from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels import ring_update, update
from hybridstate.kernels.dispatch import brief
from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.layout import DenseLayout, DenseOrder, PackedLayout
from hybridstate.plan.store import Plan
from hybridstate.runtime.kv import LineCache, block_shapes
from hybridstate.runtime.orders import planned_interval, stored_orders
from hybridstate.runtime.pool import DENSE, StatePool
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.runtime.step import (
    PooledStep,
    StateHandle,
    StepModules,
    check_pooled,
    pooled_layer_class,
)
from hybridstate.trajectories.cache import forward
from hybridstate.trajectories.graphs import uses_fixed
from hybridstate.trajectories.model import LoadedModel, swap

__all__ = ["DecodeEngine", "DecodeRun", "StateHandle"]

GRAPH_WARMUP = 3


def _dense_order(loaded: LoadedModel, state: str) -> DenseOrder:
    """The fastest order of a dense state on a GPU, the readable one elsewhere.

    Matrix instructions on 16-bit states: 142 µs at batch 256 where tiles take 165 (Qwen3.6-35B on an H200).
    """
    if loaded.device.type != "cuda":
        return "rows"
    layers, dtype = loaded.spec.layers, DENSE.get(state, torch.float32)
    try:
        matrix = {DenseLayout(n.key_dim, n.value_dim, dtype, "fragment") for n in layers}
    except NumericError:  # no such order for these dimensions or dtype
        matrix = set()
    if matrix and all(update.backend(loaded.device, layout) == "gluon" for layout in matrix):
        return "fragment"
    return "tiles" if all(layer.value_dim % 8 == 0 for layer in layers) else "rows"


class DecodeEngine:
    """A loaded model with a pool of `slots` states.

    Args:
        loaded: the model; its prefill stays as it is.
        state: `fp32`, `bf16`, `fp16` or `damp`.
        slots: sequences that fit.
        plan: key order, value order and scale, and `k_hi` of the packed state; only with `damp`.
        unquantised: the plan's orders and scales without its INT8 error: with `damp` every key row in FP16, written
            at every update, and `fp32` may take a plan too.
        requantise_every: updates between two writes of a packed state, 1 to 16; None: the plan's, else 1.
        backend: forced kernel backend, `auto` chooses by device and layout.
        modules: those of another engine of the same model, whose trials then count for this one too.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        state: str,
        slots: int,
        plan: Plan | None = None,
        k_hi: int | None = None,
        unquantised: bool = False,
        requantise_every: int | None = None,
        backend: update.Name | Literal["auto"] = "auto",
        modules: StepModules | None = None,
    ) -> None:
        if plan is not None and state != "damp" and not (unquantised and state == "fp32"):
            raise UsageError(f"a plan orders the packed state; {state} is stored densely")
        if requantise_every is None:
            requantise_every = 1 if unquantised else planned_interval(plan)
        self.loaded = loaded
        self.state = state
        self.orders, planned = stored_orders(plan, loaded, indexed=requantise_every == 1)
        if unquantised:
            planned = min(layer.key_dim for layer in loaded.spec.layers)
        self.pool = StatePool(
            loaded.spec,
            slots,
            state=state,
            k_hi=planned if planned is not None else k_hi,
            dense_order=_dense_order(loaded, state),
            every=requantise_every,
            ring_key_heads=[
                order.key_heads(layer)
                for order, layer in zip(self.orders, loaded.spec.layers, strict=True)
            ],
            conv_dtype=loaded.dtype,
            device=loaded.device,
        )

        if modules is not None:
            self.modules = modules
        self.update_calls = [0] * len(self.pool.layouts)
        """Updates of each linear layer so far in the present step."""
        self.backend: update.Name = backend if backend != "auto" else self._choose()
        """What advances the state here: `gluon`, `triton` or `reference`."""

    def _choose(self) -> update.Name:
        """Test the kernels for every layout of the model before anything is captured."""
        found = {self._choice(layout)[0] for layout in self.pool.layouts}
        return "reference" if "reference" in found else sorted(found)[-1]

    def _choice(self, layout: PackedLayout | DenseLayout) -> tuple[update.Name, str]:
        """What advances a state of this layout here, and why."""
        device = self.loaded.device
        if self.pool.rings and isinstance(layout, PackedLayout):
            chosen = ring_update.backend(device, layout)
            return chosen.name, chosen.reason
        return update.backend(device, layout), update.backend_reason(device, layout)

    @property
    def backend_reason(self) -> str:
        """Why the first linear layer runs as it does."""
        return self._choice(self.pool.layouts[0])[1]

    @property
    def label(self) -> str:
        """The format with its interval: `damp`, `damp-every-8`."""
        every = self.pool.every
        return self.state if every == 1 else f"{self.state}-every-{every}"

    @cached_property
    def modules(self) -> StepModules:
        """The model's modules in few launches; tried once."""
        return StepModules(self.loaded)

    def start(
        self, prefix: Prefix, *, room: int, past: Any = None, fixed: bool | None = None
    ) -> "DecodeRun":
        """Move a prefilled batch into the pool; `room` tokens can follow.

        Args:
            past: the cache that `prefix` was captured from, to be continued in place. Needed where attention keeps
                more than keys and values (indexers, sliding windows); without it the KV of `prefix` is put into a
                new one.
            fixed: keys and values in lines, modules in few launches; None: on a GPU where the attention allows it.

        Raises:
            UsageError: no contiguous run of free slots for the batch.
        """
        slots = self.pool.alloc(prefix.batch)
        if slots is None or int(slots[-1] - slots[0]) != prefix.batch - 1:
            raise UsageError(
                f"{prefix.batch} sequences do not fit into {self.pool.available} free slots"
            )
        states = [
            order.states(state) for order, state in zip(self.orders, prefix.states, strict=True)
        ]
        self.pool.write(slots, states, prefix.conv)
        return DecodeRun(self, prefix, slots, room, past, fixed)

    def advance(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: Any,
    ) -> tuple[torch.Tensor, Any]:
        """One token of one layer, in place in the pool; the decode function of `swap`."""
        handle = initial_state
        if not isinstance(handle, StateHandle) or handle.ordinal != ordinal:
            raise NumericError(f"linear layer {ordinal} was given a state that is not its own")
        return self._advance(ordinal, q, k, v, g.float(), beta.float(), handle.slots), handle

    def update(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        strength: torch.Tensor,
        slots: torch.Tensor,
        fusion: StepFusion,
    ) -> torch.Tensor:
        """The same from a layer's raw projections, whose gates the kernel derives; o `[B, H, V]`."""
        order = self.orders[ordinal]
        if self.backend == "reference" or order.gathers_keys:
            q, k, g, beta = fusion.derive(q, k, decay, strength)
            return self._advance(ordinal, q, k, v, g, beta, slots)
        if order.fusion.key_index is not None:
            fusion = replace(fusion, key_index=order.fusion.key_index)
        return self._advance(ordinal, q, k, v, decay, strength, slots, fusion)

    def _advance(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        slots: torch.Tensor,
        fusion: StepFusion | None = None,
    ) -> torch.Tensor:
        order, heads, pool = self.orders[ordinal], v.shape[1], self.pool.states[ordinal]
        # the reference runs the recurrence of T itself; kernels and rings take c as an operand
        plain = self.backend == "reference" and not self.pool.rings
        values = order.values(v)
        operands = (
            order.queries(q, heads),
            order.queries(k, heads),
            order.scaled(values) if plain else values,
            order.decay(g),
            beta,
        )
        layout = self.pool.layouts[ordinal]
        self.update_calls[ordinal] += 1
        options: dict[str, Any] = {
            "value_scale": None if plain else order.scale,
            "fusion": fusion or order.fusion,
            "backend": self.backend,
        }
        if isinstance(layout, PackedLayout) and self.pool.rings:
            ring = self.pool.rings[ordinal]
            o = ring_update.ring_step(*operands, pool, ring, slots, layout=layout, **options)
        elif isinstance(layout, PackedLayout):
            o = update.packed_step(*operands, pool, slots, layout=layout, **options)
        else:
            o = update.dense_step(*operands, pool, slots, layout=layout, **options)
        o = order.unscaled(o, v.dtype) if plain else o
        return order.outputs(o)


class DecodeRun:
    """One batch being decoded, one token per call of `step`."""

    def __init__(
        self,
        engine: DecodeEngine,
        prefix: Prefix,
        slots: torch.Tensor,
        room: int,
        past: Any = None,
        fixed: bool | None = None,
    ) -> None:
        self.engine = engine
        self.slots = slots
        self.length = prefix.length
        self.room = room
        self.mode = "eager"
        loaded = engine.loaded
        self._step: PooledStep | None = None
        if past is None and (uses_fixed(loaded) if fixed is None else fixed):
            self._step = _on_lines(engine, prefix, slots, room)
            self._past = self._step.past
        else:
            self._past = past if past is not None else _dynamic(loaded, prefix)
            first = int(slots[0])
            for layer in loaded.spec.layers:
                window = engine.pool.conv[layer.ordinal][first : first + prefix.batch]
                handle = StateHandle(layer.ordinal, slots)
                self._past.layers[layer.index] = pooled_layer_class()(handle, window)
        self.graph: Callable[[], None] | None = None
        """Replays the captured step on the loaded tokens."""
        self._tokens = torch.zeros(prefix.batch, 1, dtype=torch.int64, device=loaded.device)
        self._logits: torch.Tensor | None = None
        self.check_bytes()

    @torch.no_grad()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Advance every sequence by `tokens [B]`; returns logits `[B, vocabulary]`.

        A captured step returns the same tensor every time: read it before the next step.
        """
        if self.room < 1:
            raise UsageError(f"the cache was made for {self.length} tokens, no room for more")
        self.room -= 1
        self.length += 1
        self.load(tokens)
        if self.graph is not None and self._logits is not None:
            self.graph()
            return self._logits
        return self.eager_logits()

    @property
    def line_bytes(self) -> int:
        """Bytes of keys and values in lines, unused tokens included; 0 where the model keeps its own."""
        return 0 if self._step is None else self._step.lines.nbytes

    @property
    def line_tokens(self) -> int:
        """Tokens that a line has room for; 1 where there are none."""
        return 1 if self._step is None else self._step.lines.length

    def load(self, tokens: torch.Tensor) -> None:
        """Put tokens `[B]` where the step reads them."""
        self._tokens.copy_(tokens.view(-1, 1))

    def replayed_logits(self) -> torch.Tensor:
        """Where a captured step writes its logits."""
        assert self._logits is not None, "nothing was captured"
        return self._logits

    @torch.no_grad()
    def eager_logits(self) -> torch.Tensor:
        """One step of the loaded tokens without a graph."""
        return self._forward()

    def _forward(self) -> torch.Tensor:
        if self._step is not None:
            return self._step(self._tokens)
        self.engine.update_calls = [0] * len(self.engine.pool.layouts)
        with swap(self.engine.loaded, decode=self.engine.advance):
            logits = forward(self.engine.loaded, self._tokens, self._past)[:, -1]
        for ordinal, calls in enumerate(self.engine.update_calls):
            if calls != 1:
                raise NumericError(f"linear layer {ordinal} was updated {calls} times in one step")
        return logits

    @torch.no_grad()
    def capture(self) -> str | None:
        """Capture the step in a CUDA graph; returns why not, or None when it worked.

        The warm-up steps are undone: pool slots and positions are put back.
        """
        if self.engine.loaded.device.type != "cuda":
            return "no GPU"
        if self._step is None:
            return "the model's attention keeps its own cache"
        saved = self._saved()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(GRAPH_WARMUP):
                    self._forward()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._forward()
        except Exception as error:  # compilers and drivers raise anything; the step runs eagerly
            self._put_back(saved)
            return brief(error)
        self._put_back(saved)
        self.graph, self._logits, self.mode = graph.replay, logits, "cuda-graph"
        return None

    def _saved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of everything a step changes, apart from KV past the present position."""
        pool = self.engine.pool
        first, last = int(self.slots[0]), int(self.slots[-1]) + 1
        kept = [tensor[first:last] for tensor in pool.tensors]
        if self._step is not None:
            kept.append(self._step.lengths)
        return [(tensor, tensor.clone()) for tensor in kept]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put states, windows and positions back afterwards, whatever ran meanwhile."""
        saved = self._saved()
        try:
            yield
        finally:
            self._put_back(saved)

    def _put_back(self, saved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for tensor, copy in saved:
            tensor.copy_(copy)

    def check_bytes(self) -> int:
        """Bytes of state per sequence; refuses if anything but the pool holds a temporal state.

        Raises:
            NumericError: the cache holds a state tensor, or the pool is not as large as accounted.
        """
        return check_pooled(self._past, self.engine.pool)

    def close(self) -> None:
        """Give the slots back, poisoned."""
        self.graph = self._logits = None
        self.engine.pool.free(self.slots)


def _dynamic(loaded: LoadedModel, prefix: Prefix) -> Any:
    return resume(loaded, prefix.kv, (), ())


def _on_lines(engine: DecodeEngine, prefix: Prefix, slots: torch.Tensor, room: int) -> PooledStep:
    """The step of a batch whose prefix is copied into lines of its own."""
    loaded, device = engine.loaded, engine.loaded.device
    # steps that are undone (warm-up of a capture, a profiled replay) write past the present position
    length = prefix.length + room + GRAPH_WARMUP + 1
    cache = LineCache(loaded, block_shapes(loaded, prefix.kv), prefix.batch, length)
    rows = torch.tensor(cache.alloc(prefix.batch), device=device)
    for block, (keys, values) in prefix.kv.items():
        cache.write(block, rows, 0, keys, values)
    lengths = torch.full((prefix.batch,), prefix.length, dtype=torch.int64, device=device)
    return PooledStep(engine, cache, slots, rows, lengths)
