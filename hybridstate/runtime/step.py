"""One token of a batch whose states live in the pool and whose keys and values live in lines.

Slots, lines and lengths are tensors of the batch: the step reads them anew whenever it runs, so a captured step serves
whatever requests the tensors name. A row of slot and line -1 is padding: its logits mean nothing, it touches nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridstate.errors import NumericError
from hybridstate.kernels.dispatch import by_kernels
from hybridstate.runtime.dense import dense_step
from hybridstate.runtime.fused import LinearStep, expert_step, linear_step
from hybridstate.runtime.kv import LineCache, line_layer_class
from hybridstate.runtime.prompts import prompt_agrees
from hybridstate.trajectories.cache import forward, linear_layers, new_cache
from hybridstate.trajectories.launches import Refused, replacement
from hybridstate.trajectories.model import LoadedModel, linear_modules, swap

if TYPE_CHECKING:
    from hybridstate.runtime.engine import DecodeEngine
    from hybridstate.runtime.pool import StatePool


class StateHandle:
    """Stands where transformers expects a state tensor: names the slots, holds no numbers."""

    __slots__ = ("ordinal", "slots")

    def __init__(self, ordinal: int, slots: Tensor) -> None:
        self.ordinal = ordinal
        self.slots = slots

    def to(self, *_args: Any, **_kwargs: Any) -> "StateHandle":
        """KDA models cast the state they get back; there is nothing to cast."""
        return self


class StepModules:
    """The modules of a model that run in few launches, each after its trial.

    Counted in `replaced`; `refused` says why others of a known kind kept their code.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.linear: dict[int, LinearStep] = {}
        """By ordinal."""
        kinds = ("linear", "mixtures", "norms", "routers", "experts", "dense")
        self.replaced = dict.fromkeys(kinds, 0)
        self.refused = Refused()
        self._modules: list[tuple[Any, int]] = []
        self._forwards: list[tuple[Any, Callable[..., Any]]] = []
        self.slots: Tensor | None = None
        for module, ordinal in linear_modules(loaded.model, loaded.spec):
            step = linear_step(loaded, module, loaded.spec.layers[ordinal], self.refused)
            if step is not None:
                self.linear[ordinal] = step
                self._modules.append((module, ordinal))
        self.replaced["linear"] = len(self.linear)
        self.replaced["prompts"] = sum(
            prompt_agrees(
                loaded, module, loaded.spec.layers[ordinal], self.linear[ordinal], self.refused
            )
            for module, ordinal in self._modules
        )
        self.prompts = self.replaced["prompts"] == len(loaded.spec.layers)
        """Whether prompts run through every linear layer in few launches (`prompt`)."""
        inside: set[Any] = {child for module, _ in self._modules for child in module.modules()}
        for module in loaded.model.modules():
            if not type(module).__name__.endswith(("SparseMoeBlock", "MoE")):
                continue
            mixture = expert_step(module, self.refused)
            if mixture is not None:
                self.replaced["mixtures"] += 1
                self._forwards.append((module, _mixture_forward(module.forward, mixture)))
                inside.update(module.modules())
        if not by_kernels(next(loaded.model.parameters())):
            return
        for module in loaded.model.modules():
            if module in inside:
                continue
            kind, found = replacement(module, self.refused)
            if found is None:
                kind, found = "dense", dense_step(module, self.refused)
            if found is not None:
                self.replaced[kind] += 1
                self._forwards.append((module, found))

    @contextmanager
    def active(self, engine: "DecodeEngine", slots: Tensor) -> Iterator[None]:
        """Run one-token steps of these slots through the replaced modules."""
        with _replaced(
            [
                *self._forwards,
                *(
                    (module, _linear_forward(self.linear[ordinal], engine, ordinal, slots))
                    for module, ordinal in self._modules
                ),
            ]
        ):
            yield

    @contextmanager
    def prompt(
        self,
        windows: Sequence[Tensor],
        states: Sequence[Tensor | None],
        count: Tensor | None = None,
    ) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Run the tokens of one sequence through the replaced modules.

        Args:
            windows: `[C, W - 1]` of each linear layer.
            states: FP32 `[1, H, K, V]`, None for none.
            count: int64 `[1]`, how many of the first tokens count; all by default.

        Yields:
            Windows and states behind the last token that counts by ordinal, once the model has run.
        """
        after: dict[int, tuple[Tensor, Tensor]] = {}

        def through(step: LinearStep, ordinal: int) -> Callable[..., Any]:
            def run(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
                found, *held = step.prompt(
                    hidden_states[0], windows[ordinal], states[ordinal], count
                )
                after[ordinal] = (held[0], held[1])
                return found[None]

            return run

        with _replaced(
            [
                *self._forwards,
                *((module, through(self.linear[n], n)) for module, n in self._modules),
            ]
        ):
            yield after


@contextmanager
def _replaced(forwards: Sequence[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Modules with other forwards while the context lasts."""
    for module, found in forwards:
        module.forward = found
    try:
        yield
    finally:
        for module, _ in forwards:
            del module.forward


def _mixture_forward(original: Callable[..., Any], step: Any) -> Callable[..., Any]:
    def run(hidden_states: Tensor) -> Any:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        if len(flat) > step.most:
            return original(hidden_states)
        return step(flat).view(hidden_states.shape)

    return run


def _linear_forward(
    step: LinearStep, engine: "DecodeEngine", ordinal: int, slots: Tensor
) -> Callable[..., Any]:
    windows = engine.pool.conv[ordinal]

    def advance(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        return engine.update(ordinal, q, k, v, decay, strength, slots, step.fusion)

    def run(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return step(hidden_states[:, 0], windows, slots, advance)[:, None]

    return run


class PooledStep:
    """The step of one batch.

    Args:
        engine: model and pool.
        lines: keys and values.
        slots, rows, lengths: int64 `[B]`: pool slot and line of each sequence, -1 for padding, and the tokens it holds.
            `lengths` advances with every step.
    """

    def __init__(
        self, engine: "DecodeEngine", lines: LineCache, slots: Tensor, rows: Tensor, lengths: Tensor
    ) -> None:
        self.engine, self.lines = engine, lines
        self.slots, self.rows, self.lengths = slots, rows, lengths
        self.past = pooled_cache(engine.loaded, engine.pool, slots)
        for block in lines.shapes:
            self.past.layers[block] = line_layer_class()(lines, block)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `[B, vocabulary]` of `tokens [B, 1]`; states, windows, lines and lengths advance."""
        engine, loaded = self.engine, self.engine.loaded
        modules = engine.modules
        engine.update_calls = [0] * len(engine.pool.layouts)
        with (
            self.lines.active(loaded, self.rows, self.lengths),
            modules.active(engine, self.slots),
            swap(loaded, decode=engine.advance, conv=self._conv),
        ):
            options = {"position_ids": self.lengths[:, None]}
            logits = forward(loaded, tokens, self.past, **options)[:, -1]
        for ordinal, calls in enumerate(engine.update_calls):
            if calls != 1:
                raise NumericError(f"linear layer {ordinal} was updated {calls} times in one step")
        self.lengths.add_(1)
        return logits

    def _conv(
        self,
        x: Tensor,
        windows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
    ) -> Tensor:
        """The convolution of layers that kept their own code, on the pool's windows."""
        from hybridstate.kernels import norms

        if activation not in ("silu", "swish"):
            raise NumericError(f"no convolution in slots with {activation or 'no activation'}")
        conv = norms.conv_step if by_kernels(x) else norms.conv_reference
        return conv(x[..., 0], windows, weight.contiguous(), bias, self.slots)[..., None]


def pooled_cache(loaded: LoadedModel, pool: "StatePool", slots: Tensor) -> Any:
    """A transformers cache whose linear layers hold handles and the pool's windows."""
    past = new_cache(loaded)
    for layer in loaded.spec.layers:
        handle = StateHandle(layer.ordinal, slots)
        past.layers[layer.index] = pooled_layer_class()(handle, pool.conv[layer.ordinal])
    return past


def check_pooled(past: Any, pool: "StatePool") -> int:
    """Bytes of state per sequence; refuses if anything but the pool holds a temporal state.

    Raises:
        NumericError: the cache holds a state tensor, or the pool is not as large as accounted.
    """
    if pool.held_bytes != pool.nbytes:
        raise NumericError(
            f"the pool holds {pool.held_bytes} bytes between steps, accounted {pool.nbytes}",
            found=pool.held_bytes,
            expected=pool.nbytes,
        )
    for ordinal, layer in enumerate(linear_layers(past)):
        held = layer.recurrent_states[0]
        if not isinstance(held, StateHandle):
            raise NumericError(
                f"linear layer {ordinal} keeps a {type(held).__name__} beside the pool"
            )
        storage = pool.conv[ordinal].untyped_storage().data_ptr()
        if layer.conv_states[0].untyped_storage().data_ptr() != storage:
            raise NumericError(f"linear layer {ordinal} keeps a convolution window of its own")
    return pool.slot_bytes


@cache
def pooled_layer_class() -> Any:
    """The cache layer of a linear block: a handle and windows of the pool."""
    cache_utils: Any = import_module("transformers.cache_utils")

    class PooledLayer(cache_utils.LinearAttentionLayer):  # type: ignore[misc]
        def __init__(self, handle: StateHandle, window: Tensor) -> None:
            super().__init__()
            self.recurrent_states[0] = handle
            self.conv_states[0] = window
            self.conv_kernel_size[0] = window.shape[-1] + 1
            self.is_conv_states_initialized[0] = True
            self.is_recurrent_states_initialized[0] = True
            self.has_previous_state[0] = True
            self.dtype, self.device = window.dtype, window.device

        def update_recurrent_state(self, recurrent_states: Any, *args: Any, **kwargs: Any) -> Any:
            if recurrent_states is not self.recurrent_states[0]:
                raise NumericError("the model wrote a state tensor where the pool's handle belongs")
            return recurrent_states

        def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
            raise NumericError("packed states advance one token at a time")

    return PooledLayer
