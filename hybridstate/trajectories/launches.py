"""Fewer launches in a decode step: norms, routers and experts of a transformers model through our kernels.

A module is replaced only where a trial shows that the kernel does what the module does, on its own weights; a norm with
another formula, an unknown activation or grouped routing stays as it is. The model's code is untouched: instances get
another `forward` for as long as the context lasts, and calls that are not a decode batch go to the original.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

TOKENS_PER_EXPERT: Final = 32
"""Mean tokens per expert up to which reading weights once matters more than large matrix tiles."""
_TRIAL: Final = 2e-2
"""Relative error of a trial: a few roundings of BF16, far below what another formula gives."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """How many modules of each kind run through our kernels."""

    norms: int
    routers: int
    experts: int


@contextmanager
def fewer_launches(model: Any) -> Iterator[Replaced]:
    """Replace what a trial allows while the context lasts; nothing without a CUDA device."""
    forwards: list[tuple[Any, Callable[..., Any]]] = []
    counts = dict.fromkeys(("norms", "routers", "experts"), 0)
    if next(model.parameters()).is_cuda:
        for module in model.modules():
            kind, forward = replacement(module)
            if forward is not None:
                counts[kind] += 1
                forwards.append((module, forward))
    for module, forward in forwards:
        module.forward = forward
    try:
        yield Replaced(**counts)
    finally:
        for module, _ in forwards:
            del module.forward


@torch.no_grad()
def replacement(module: Any) -> tuple[str, Callable[..., Any] | None]:
    """The kind of a module and a forward that passed its trial, or None."""
    name = type(module).__name__
    if "forward" in module.__dict__:  # already somebody else's
        return "", None
    if name.endswith("RMSNorm"):
        return "norms", _norm(module)
    if name.endswith("RMSNormGated"):
        return "norms", _gated_norm(module)
    if name.endswith("Experts"):
        return "experts", _experts(module)
    if name.lower().endswith("topkrouter"):
        return "routers", _router(module)
    return "", None


def agree(found: Tensor, expected: Tensor, *, rows: bool = False) -> bool:
    """Whether two results differ by roundings alone.

    With `rows`, one row in eight may be anything: a near tie between two experts goes either way.
    """
    if found.shape != expected.shape:
        return False
    difference, size = found.float() - expected.float(), expected.float()
    if not rows:
        return bool(difference.norm() <= _TRIAL * size.norm())
    right = difference.flatten(1).norm(dim=1) <= _TRIAL * size.flatten(1).norm(dim=1)
    return bool(right.float().mean() >= 7 / 8)


def _sample(rows: int, width: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn((rows, width), generator=generator).to(like.device, like.dtype)


def _weight(module: Any) -> Tensor | None:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 1 else None


def _epsilon(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _norm(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.norms import rms_norm

    weight, eps = _weight(module), _epsilon(module)
    if weight is None or eps is None:
        return None
    x = _sample(2, len(weight), weight)
    expected = module(x)
    for centred in (False, True):
        if agree(rms_norm(x, weight, eps, zero_centred=centred), expected):
            return lambda x, centred=centred: rms_norm(x, weight, eps, zero_centred=centred)
    return None


def _gated_norm(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.norms import rms_norm

    weight, eps = _weight(module), _epsilon(module)
    if weight is None or eps is None:
        return None
    x, gate = _sample(4, len(weight), weight).chunk(2)
    expected = module(x, gate)
    for activation in ("silu", "sigmoid"):
        for centred in (False, True):
            options: dict[str, Any] = {"zero_centred": centred, "activation": activation}
            if agree(rms_norm(x, weight, eps, gate=gate, **options), expected):
                return lambda x, gate, options=options: rms_norm(
                    x, weight, eps, gate=gate, **options
                )
    return None


def _experts(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.experts import MAX_PAIRS, experts_step

    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3:
        return None
    experts, width = down.shape[0], down.shape[1]
    if gate_up.shape != (experts, 2 * down.shape[2], width):
        return None
    original = module.forward
    most = min(MAX_PAIRS, TOKENS_PER_EXPERT * experts)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if top_k_index.numel() > most:
            result: Tensor = original(hidden_states, top_k_index, top_k_weights)
            return result
        return experts_step(hidden_states, gate_up, down, top_k_index, top_k_weights)

    x = _sample(2, width, down)
    chosen = torch.tensor([[0, experts - 1], [experts // 2, 0]], device=x.device)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]], device=x.device, dtype=x.dtype)
    return forward if agree(forward(x, chosen, weights), original(x, chosen, weights)) else None


def _router(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.router import route

    weight, top = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(top, int):
        return None
    bias = getattr(module, "e_score_correction_bias", None)
    factor = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden_states.reshape(-1, weight.shape[1])
        # models that route in float32 do so in their projection
        wide = weight if bias is None else weight.float()
        logits = torch.nn.functional.linear(flat.to(wide.dtype), wide)
        weights, chosen = route(logits, top, bias=bias, factor=factor)
        return logits, weights.to(logits.dtype), chosen

    x = _sample(8, weight.shape[1], weight)
    expected, found = module(x), forward(x)
    if len(expected) != len(found):
        return None
    places, ours = expected[2].argsort(-1), found[2].argsort(-1)
    chosen = expected[2].gather(-1, places), found[2].gather(-1, ours)
    same = (chosen[0] == chosen[1]).all(-1)
    weights = expected[1].gather(-1, places)[same], found[1].gather(-1, ours)[same]
    right = bool(same.float().mean() >= 7 / 8) and agree(weights[1], weights[0])
    return forward if right and expected[1].dtype == found[1].dtype else None
