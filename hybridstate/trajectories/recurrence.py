"""Taking over the recurrence of a transformers model.

The modeling files of transformers look up their two recurrence functions by name in their own
module. `load_model` puts a dispatcher under each name for good: it finds the running layer through
forward hooks and calls whatever `swap` has installed for that model, by default the reference
maths of `kernels.reference`, on a GPU prompts by the kernels of the same maths. So no optional package is ever
dispatched to, two models of one family can be loaded side by side, and a replacement sees the same call on every
transformers version:

    prefill(ordinal, q, k, v, g, beta, initial_state) -> (o, S)     any number of tokens T
    decode(ordinal, q, k, v, g, beta, initial_state) -> (o, S)      one token, no T axis

with q, k `[B, T, H_k, K]` before L2 norm and scale (never expanded to the value heads), v
`[B, T, H, V]`, log-decay g `[B, T, H]` or `[B, T, H, K]`, beta `[B, T, H]`, S `[B, H, K, V]` (key
rows, value columns; `None` before the first token) and `ordinal` the position among the linear layers.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from hybridstate.kernels import prefill as kernel
from hybridstate.kernels import reference

if TYPE_CHECKING:
    from hybridstate.trajectories.model import LoadedModel

CONV_UPDATE: Final = "causal_conv1d_update"
"""Name of the one-token convolution in a modeling module."""


class RecurrenceFn(Protocol):
    """What `swap` takes: one layer's recurrence, over T tokens (prefill) or over one (decode)."""

    def __call__(
        self,
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def reference_prefill(
    ordinal: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked reference recurrence, used for every call of more than one token."""
    return reference.chunk_prefill(q, k, v, g, beta, initial_state)


def device_prefill(
    ordinal: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in two launches on a GPU, where the trial of `kernels.prefill` has passed; the reference elsewhere."""
    choice = prefill_choice(q, v, g)
    if choice.precision is None:
        return reference_prefill(ordinal, q, k, v, g, beta, initial_state)
    return kernel.prefill(q, k, v, g, beta, initial_state, precision=choice.precision)


def prefill_choice(q: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> kernel.Choice:
    """What `device_prefill` runs for such inputs, and why; the first call on a GPU tries."""
    sizes = q.shape[2], v.shape[2], q.shape[3], v.shape[3]
    return kernel.choose(v.device, v.dtype, kernel.Geometry(*sizes, per_channel=g.dim() == 4))


def reference_decode(
    ordinal: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference recurrence of one token."""
    if initial_state is None:
        shape = (q.shape[0], v.shape[1], q.shape[2], v.shape[2])
        initial_state = q.new_zeros(shape, dtype=torch.float32)
    return reference.recurrent_step(q, k, v, g, beta, initial_state)


ConvFn = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, str | None], torch.Tensor
]
"""x `[B, C, 1]`, window `[B, C, W]` (advanced in place), weight `[C, W]`, bias, activation to `[B, C, 1]`."""


@dataclass(slots=True)
class Recurrence:
    """The functions one loaded model runs at the moment, and which of its layers is running."""

    prefill: RecurrenceFn = device_prefill
    decode: RecurrenceFn = reference_decode
    key_heads: tuple[int, ...] = ()
    """Key heads of each linear layer, to undo the expansion that some versions do."""
    conv: ConvFn | None = None
    """What advances the short convolution by one token; None keeps the model's own function."""


_RUNNING: list[tuple[Recurrence, int]] = []
"""Stack of (recurrence, ordinal) of the linear layers being executed, innermost last."""


@contextmanager
def swap(
    loaded: "LoadedModel",
    prefill: RecurrenceFn | None = None,
    decode: RecurrenceFn | None = None,
    conv: ConvFn | None = None,
) -> Iterator[None]:
    """Run the model with other recurrence functions; `None` keeps the present one."""
    recurrence = loaded.recurrence
    before = recurrence.prefill, recurrence.decode, recurrence.conv
    recurrence.prefill = prefill or recurrence.prefill
    recurrence.decode = decode or recurrence.decode
    recurrence.conv = conv or recurrence.conv
    try:
        yield
    finally:
        recurrence.prefill, recurrence.decode, recurrence.conv = before


def watch(module: Any, recurrence: Recurrence, ordinal: int) -> None:
    """Announce the layer to the dispatcher while it runs; compiled and copied models keep the hooks.

    Linear layers do not nest, so that a layer which an interrupt left standing ends with the next one. Hooks are not
    called for an interrupt; the dispatcher forgets the layer where one comes inside a recurrence.
    """

    def enter(_module: Any, _args: Any) -> None:
        _RUNNING[:] = [(recurrence, ordinal)]

    def leave(_module: Any, _args: Any, _output: Any) -> None:
        _RUNNING.clear()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def install(module_name: str, prefill: str, decode: str) -> None:
    """Put dispatchers under the two names of a modeling module, once per process."""
    modeling = sys.modules[module_name]
    for name, single in ((prefill, False), (decode, True)):
        original = getattr(modeling, name)
        if not hasattr(original, "original"):
            setattr(modeling, name, _dispatcher(original, single))
    update = getattr(modeling, CONV_UPDATE, None)
    if update is not None and not hasattr(update, "original"):
        setattr(modeling, CONV_UPDATE, _conv_dispatcher(update))


def _dispatcher(original: Callable[..., Any], single: bool) -> Callable[..., Any]:
    """A stand-in for one recurrence function of a modeling file.

    Models that `load_model` did not load keep their own function.
    """

    def dispatch(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _RUNNING:
            result: tuple[torch.Tensor, torch.Tensor] = original(query, key, value, *args, **kwargs)
            return result
        recurrence, ordinal = _RUNNING[-1]
        g, beta = kwargs["g"], kwargs["beta"]
        repeat = key.shape[2] // recurrence.key_heads[ordinal]
        if repeat > 1:  # transformers before 5.24 expands the key heads first
            query, key = query[:, :, ::repeat], key[:, :, ::repeat]
        state = kwargs["initial_state"]
        try:
            if single:
                q, k, v, g, beta = (x[:, 0] for x in (query, key, value, g, beta))
                o, state = recurrence.decode(ordinal, q, k, v, g, beta, state)
                return o.unsqueeze(1).to(value.dtype), state
            o, state = recurrence.prefill(ordinal, query, key, value, g, beta, state)
        except BaseException:
            _RUNNING.clear()
            raise
        return o.to(value.dtype), state

    dispatch.original = original  # type: ignore[attr-defined]
    return dispatch


def _conv_dispatcher(original: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for the one-token convolution; the original unless `swap` has installed another."""

    def dispatch(
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **more: Any,
    ) -> torch.Tensor:
        replaced = _RUNNING[-1][0].conv if _RUNNING else None
        if replaced is None or more or hidden_states.shape[-1] != 1:
            result: torch.Tensor = original(
                hidden_states, conv_state, weight, bias, activation, **more
            )
            return result
        return replaced(hidden_states, conv_state, weight, bias, activation)

    dispatch.original = original  # type: ignore[attr-defined]
    return dispatch
