"""Linear layers and mixtures of experts of a decode step in few launches.

Modules of transformers keep their weights and, for all but one-token steps on our pool, their code. A module gets
another forward only where a trial on its own weights gives what the module gives; one it cannot be tried on, or that
fails, stays as it is.

* A linear layer: one product for all projections of its input, the convolution on the pool's window, the update with
  gates derived in the kernel, the gated norm, the output projection. Two more products where gates are low-rank (KDA).
* A mixture of experts: one product for the shared expert, the router and the shared gate (the router alone in float32
  where the model routes so), the choice, the experts, and one sum.

Weights of projections that share an input are moved into one tensor; the modules keep views of it, so nothing is held
twice and their own forwards read the same numbers.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridstate.families import LinearLayer, ModelSpec
from hybridstate.kernels.dispatch import by_kernels
from hybridstate.kernels.fusion import StepFusion
from hybridstate.kernels.reference import recurrent_step
from hybridstate.trajectories.cache import new_cache
from hybridstate.trajectories.launches import (
    TOKENS_PER_EXPERT,
    Refused,
    agree,
    decided_rows,
    experts_agree,
    is_silu,
    replacement,
    router_by,
    scaled_rows,
)
from hybridstate.trajectories.model import LoadedModel
from hybridstate.trajectories.recurrence import device_prefill

Advance = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""q, k `[B, Hk, K]`, v `[B, H, V]`, raw decay input `[B, H]` or `[B, H, K]`, raw strength `[B, H]` -> o `[B, H, V]`."""
ALIGNED: Final = 8
"""Rows of a joined projection are padded to a multiple of this many: matrix kernels want 16 bytes of BF16."""
_ROWS: Final = 8
"""Rows of a trial at each scale."""
_SCALES: Final = (1.0, 1 / 4, 4.0)
"""Scales of a trial whose projections are joined: far larger inputs would magnify roundings of BF16 logits."""


@dataclass(frozen=True, slots=True)
class LinearNames:
    """Where a linear module of transformers keeps the parts of its step.

    Attributes:
        channels: projections whose outputs pass the convolution, in channel order q, k, v.
        gate, decay: projections one after another, the first of the layer's input.
        strength: projection of beta.
        a_log, dt_bias, norm, out, conv: as they say.
    """

    channels: tuple[str, ...]
    gate: tuple[str, ...]
    decay: tuple[str, ...]
    strength: str
    a_log: str
    dt_bias: str
    norm: str
    out: str
    conv: str = "conv1d"


LINEAR: Final = (
    LinearNames(
        ("in_proj_qkv",), ("in_proj_z",), ("in_proj_a",), "in_proj_b", "A_log", "dt_bias", "norm", "out_proj"
    ),
    LinearNames(
        ("q_proj", "k_proj", "v_proj"),
        ("g_a_proj", "g_b_proj"),
        ("forget_gate.f_a_proj", "forget_gate.f_b_proj"),
        "b_proj",
        "forget_gate.A_log",
        "forget_gate.dt_bias",
        "o_norm",
        "o_proj",
    ),
)  # fmt: skip
"""Gated DeltaNet as Qwen3.5 writes it, Kimi Delta Attention as Kimi-Linear does."""


class LinearStep:
    """One token of one linear layer.

    Args:
        module: of transformers.
        names: where its parts are.
        layer, spec: its sizes and the model's gate.
        refused: takes the error of a norm that stays as it is.

    Raises:
        AttributeError, ValueError: the module is built differently.
    """

    def __init__(
        self,
        module: Any,
        names: LinearNames,
        layer: LinearLayer,
        spec: ModelSpec,
        refused: Refused | None = None,
    ) -> None:
        def part(name: str) -> Any:
            return attrgetter(name)(module)

        first = [*names.channels, names.gate[0], names.decay[0], names.strength]
        self._layer = layer
        self._joined, at = join_projections([part(name) for name in first])
        self._channels = at[len(names.channels)]
        self._gate = slice(*at[-4:-2]), [plain_weight(part(n)) for n in names.gate[1:]]
        self._decay = slice(*at[-3:-1]), [plain_weight(part(n)) for n in names.decay[1:]]
        self._strength = slice(*at[-2:])
        conv = part(names.conv)
        if conv.kernel_size[0] != layer.conv_width or self._channels != layer.conv_channels:
            raise ValueError("another convolution")
        self._taps, self._bias = conv.weight[:, 0].contiguous(), conv.bias
        norm = part(names.norm)
        found = replacement(norm, refused)[1] if by_kernels(self._taps) else None
        self._norm: Callable[..., Tensor] = found or norm
        self._out = plain_weight(part(names.out))
        units = spec.decay_shape(layer)
        heads = layer.value_heads
        self.fusion = StepFusion(
            a_log=part(names.a_log).detach().float().reshape(-1)[:heads].contiguous(),
            dt_bias=part(names.dt_bias).detach().float().reshape(units).contiguous(),
            lower_bound=spec.lower_bound if spec.gate == "safe" else None,
            beta_scale=1.0,
        )

    def __call__(self, x: Tensor, windows: Tensor, slots: Tensor, advance: Advance) -> Tensor:
        """One token.

        Args:
            x: `[B, D]`.
            windows: `[slots, C, W - 1]`, advanced in place.
            slots: int64 `[B]`, -1 for padding.
            advance: the recurrence on the same slots.

        Returns:
            `[B, D]`.
        """
        from hybridstate.kernels import norms

        joined = linear(x, self._joined)
        conv = norms.conv_step if by_kernels(x) else norms.conv_reference
        mixed = conv(joined[:, : self._channels], windows, self._taps, self._bias, slots)
        q, k, v = self._operands(mixed)
        decay = _chain(joined, *self._decay)
        if self.fusion.dt_bias is not None and self.fusion.dt_bias.dim() == 2:
            decay = decay.unflatten(1, (self._layer.value_heads, self._layer.key_dim))
        return self._result(advance(q, k, v, decay, joined[:, self._strength]), joined)

    def prompt(
        self, x: Tensor, window: Tensor, state: Tensor | None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of one sequence.

        Args:
            x: `[T, D]`.
            window: `[C, W - 1]`.
            state: FP32 `[1, H, K, V]`, None for none.
            count: int64 `[1]`, how many of the first tokens count; all by default.

        Returns:
            `[T, D]`, window and state behind the last token that counts.
        """
        from hybridstate.kernels import prefill_inputs

        joined = linear(x, self._joined)
        convolve, gates = prefill_inputs.convolve, prefill_inputs.gates
        if not by_kernels(x):
            convolve, gates = prefill_inputs.convolve_reference, prefill_inputs.gates_reference
        channels = joined[:, : self._channels]
        mixed, window = convolve(channels, window, self._taps, self._bias, count)
        decay = _chain(joined, *self._decay)
        decay, strength = gates(decay, joined[:, self._strength], self.fusion, count)
        q, k, v, decay, strength = (y[None] for y in (*self._operands(mixed), decay, strength))
        o, state = device_prefill(0, q, k, v, decay, strength, state)
        return self._result(o[0], joined), window, state

    def _operands(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v by head from convolved channels."""
        n = self._layer
        keys, all_keys = n.key_heads * n.key_dim, 2 * n.key_heads * n.key_dim
        q = mixed[:, :keys].unflatten(1, (n.key_heads, n.key_dim))
        k = mixed[:, keys:all_keys].unflatten(1, (n.key_heads, n.key_dim))
        return q, k, mixed[:, all_keys:].unflatten(1, (n.value_heads, n.value_dim))

    def _result(self, o: Tensor, joined: Tensor) -> Tensor:
        """Rows of the layer's output from those of the recurrence `[B, H, V]`."""
        gate = _chain(joined, *self._gate).unflatten(1, o.shape[1:])
        return linear(self._norm(o, gate).reshape(len(o), -1), self._out)


def _chain(joined: Tensor, first: slice, weights: Sequence[Tensor]) -> Tensor:
    """Columns of the joined projection, through the projections behind them."""
    x = joined[:, first]
    for weight in weights:
        x = linear(x, weight)
    return x


def linear_step(
    loaded: LoadedModel, module: Any, layer: LinearLayer, refused: Refused | None = None
) -> LinearStep | None:
    """The step of a linear module where a trial gives what the module gives, else None; `refused` takes why not."""
    refused = Refused() if refused is None else refused
    for names in LINEAR:
        try:
            step = LinearStep(module, names, layer, loaded.spec, refused)
        except (AttributeError, ValueError):
            continue
        try:
            same = all(_linear_trial(loaded, module, layer, step, scale) for scale in _SCALES)
        except Exception as error:  # compilers and drivers raise anything; the module runs
            refused.add(module, error)
            return None
        if not same:
            refused.add(module, "another result of a step")
        return step if same else None
    refused.add(module, "built differently")
    return None


@torch.no_grad()
def _linear_trial(
    loaded: LoadedModel, module: Any, layer: LinearLayer, step: LinearStep, scale: float
) -> bool:
    """Whether step and module agree on outputs, states and windows of random rows times `scale`."""
    generator = torch.Generator().manual_seed(layer.index)

    def draw(*shape: int) -> Tensor:
        drawn = scale * torch.randn(shape, generator=generator)
        return drawn.to(loaded.device, loaded.dtype)

    width = module_width(module)
    x = draw(_ROWS, width)
    state = draw(_ROWS, layer.value_heads, layer.key_dim, layer.value_dim).float() / 10
    windows = draw(_ROWS, layer.conv_channels, layer.conv_width - 1)
    past = new_cache(loaded)
    held = past.layers[layer.index]
    padded = torch.nn.functional.pad(windows, (1, 0))
    held.update_conv_state(padded, conv_kernel_size=padded.shape[-1])
    held.update_recurrent_state(state)
    expected = module(x[:, None], **{cache_name(module): past})[:, 0]
    ours = state.clone()

    def advance(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
        q, k, g, beta = step.fusion.derive(q, k, decay, strength)
        o, new = recurrent_step(q, k, v, g, beta, ours)
        ours.copy_(new)
        return o.to(v.dtype)

    found = step(x, windows, torch.arange(_ROWS, device=x.device), advance)
    kept = held.conv_states[0][..., 1 - layer.conv_width :]
    pairs = (
        (found, expected),
        (ours, held.recurrent_states[0]),
        (windows, kept.to(windows.dtype)),
    )
    # rows of one scale together: a head that nearly cancels magnifies roundings of its row
    return all(agree(a.flatten()[None], b.flatten()[None], dtype=loaded.dtype) for a, b in pairs)


def module_width(module: Any) -> int:
    """Width of a linear module's input."""
    for names in LINEAR:
        if hasattr(module, names.channels[0]):
            return int(getattr(module, names.channels[0]).in_features)
    raise ValueError(f"{type(module).__name__} is built differently")


def cache_name(module: Any) -> str:
    """The argument that brings the cache: `cache_params`, from transformers 5.24 on `cache`."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "cache_params"


# -- mixtures of experts --------------------------------------------------------------------------


class ExpertStep:
    """One token per sequence through a mixture of experts with a shared one.

    Raises:
        AttributeError, ValueError: the module is built differently.
    """

    def __init__(self, module: Any) -> None:
        router, experts = module.gate, module.experts
        shared = getattr(module, "shared_expert", None) or module.shared_experts
        shared_gate = getattr(module, "shared_expert_gate", None)
        self._top = int(router.top_k)
        self._gate_up, self._down = experts.gate_up_proj, experts.down_proj
        self._inner = int(shared.gate_proj.out_features)
        self._shared_down = plain_weight(shared.down_proj)
        self._bias = getattr(router, "e_score_correction_bias", None)
        self._factor = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)
        weight = router.weight
        self._wide = None if self._bias is None else weight.detach().float()
        joined = [shared.gate_proj, shared.up_proj]
        joined += [router] if self._bias is None else []
        joined += [] if shared_gate is None else [shared_gate]
        self._joined, at = join_projections(joined)
        self._logits = slice(at[2], at[3]) if self._bias is None else None
        self._shared_gate = None if shared_gate is None else at[-2]
        self.most = TOKENS_PER_EXPERT * len(self._down) // self._top
        """Tokens up to which this is the faster way."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        from hybridstate.kernels import experts, norms, router

        gpu, inner = by_kernels(x), self._inner
        joined = linear(x, self._joined)
        product = norms.gated if gpu else norms.gated_reference
        hidden = product(joined[:, inner : 2 * inner], joined[:, :inner], "silu")
        shared = linear(hidden, self._shared_down)
        logits = (
            linear(x.float(), self._wide) if self._wide is not None else joined[:, self._logits]
        )
        choose = router.route if gpu else router.route_reference
        weights, chosen = choose(logits, self._top, bias=self._bias, factor=self._factor)
        gate = None if self._shared_gate is None else joined[:, self._shared_gate]
        run = experts.experts_step if gpu else experts.experts_reference
        return run(x, self._gate_up, self._down, chosen, weights, shared, gate)


@torch.no_grad()
def expert_step(module: Any, refused: Refused | None = None) -> ExpertStep | None:
    """The step of a mixture of experts where trials give what the module and its parts give, else None.

    `refused` takes why not.
    """
    from hybridstate.kernels import experts, router

    refused = Refused() if refused is None else refused

    try:
        step = ExpertStep(module)
        gpu = by_kernels(step._down)
        parts = (
            router_by(module.gate, router.route if gpu else router.route_reference) is not None
            and experts_agree(
                module.experts, experts.experts_step if gpu else experts.experts_reference
            )
            and is_silu(getattr(module, "shared_expert", None) or module.shared_experts)
        )
        if not parts:
            refused.add(module, "another result of its parts")
            return None
        x = scaled_rows(_ROWS, step._down.shape[1], step._down, _SCALES[:2])
        decided = decided_rows(module.gate(x)[0], step._top, step._bias)
        expected, found = module(x[:, None])[:, 0], step(x)
    except Exception as error:  # compilers and drivers raise anything; the module runs
        refused.add(module, error)
        return None
    # the parts agree in every row; logits of the joined projection may round otherwise in some
    if agree(found, expected, decided=decided, share=7 / 8):
        return step
    refused.add(module, "another result")
    return None


# -- joined projections ---------------------------------------------------------------------------


def plain_weight(module: Any) -> Tensor:
    """The weight of a projection without a bias.

    Raises:
        ValueError: it has one.
    """
    if getattr(module, "bias", None) is not None or module.weight.dim() != 2:
        raise ValueError("a projection with a bias")
    weight: Tensor = module.weight
    return weight


@torch.no_grad()
def join_projections(modules: Sequence[Any]) -> tuple[Tensor, list[int]]:
    """One weight of projections that share an input; the modules' weights become views of it.

    Returns:
        `[rows, D]`, zero rows at the end up to a multiple of `ALIGNED`, and where each projection begins, with the end
        of the last.

    Raises:
        ValueError: a bias, or weights that differ in width, dtype or device.
    """
    weights = [plain_weight(module) for module in modules]
    if len({(w.shape[1], w.dtype, w.device) for w in weights}) != 1:
        raise ValueError("projections that cannot be joined")
    at = [0]
    for weight in weights:
        at.append(at[-1] + len(weight))
    shape = (-(-at[-1] // ALIGNED) * ALIGNED, weights[0].shape[1])
    held = _already_joined(weights, at, shape)
    if held is not None:
        return held, at
    joined = weights[0].new_zeros(shape)
    for module, weight, start in zip(modules, weights, at, strict=False):
        view = joined[start : start + len(weight)]
        view.copy_(weight)
        module.weight.data = view
    return joined, at


def _already_joined(
    weights: Sequence[Tensor], at: Sequence[int], shape: tuple[int, int]
) -> Tensor | None:
    """The tensor that an earlier call made of the same projections, if they are still its views."""
    first, width = weights[0], shape[1]
    storage, start = first.untyped_storage(), first.storage_offset()
    consecutive = all(
        w.untyped_storage().data_ptr() == storage.data_ptr()
        and w.is_contiguous()
        and w.storage_offset() == start + row * width
        for w, row in zip(weights, at, strict=False)
    )
    room = storage.nbytes() // first.element_size() - start
    if len(weights) < 2 or not consecutive or room < shape[0] * width:
        return None
    return first.detach().as_strided(shape, (width, 1), start)
