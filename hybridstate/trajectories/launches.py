"""Fewer launches in a decode step: norms, routers and experts of a transformers model through our kernels.

A module is replaced only where a trial shows that the kernel does what the module does, row by row on small, large,
shifted and spiked inputs; a norm with another formula, an unknown activation or grouped routing stays as it is, and so
does a module whose trial fails, whatever compilers and drivers raise (`Refused` says what). Norms are tried with random
weights too. The model's code is untouched: instances get another `forward` for as long as the context lasts, and calls
that are not a decode batch go to the original.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.kernels.dispatch import brief

TOKENS_PER_EXPERT: Final = 32
"""Mean tokens per expert up to which reading weights once matters more than large matrix tiles."""
SCALES: Final = (1.0, 1 / 16, 16.0)
"""Scales of trial inputs: activations, gates and routers differ where others agree."""
_TRIAL = 2e-2
"""Relative error of a trial: a few roundings of BF16, far below what another formula gives."""
_TRIAL_FLOAT32: Final = 2e-3
"""The same in float32."""
_ROUTED: Final = 8
"""Rows of each scale in a trial of a router or of experts."""


@dataclass(slots=True)
class Refused:
    """Why modules kept their own code though their kind is known: a trial that failed or gave other numbers."""

    reasons: list[str] = field(default_factory=list)
    """`class: reason`, each once."""

    def add(self, module: Any, why: str | Exception) -> None:
        """Note an error, or what differs."""
        text = f"{type(module).__name__}: {why if isinstance(why, str) else brief(why)}"
        if text not in self.reasons:
            self.reasons.append(text)


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
def replacement(
    module: Any, refused: Refused | None = None
) -> tuple[str, Callable[..., Any] | None]:
    """The kind of a module and a forward that passed its trial, or None.

    `refused` takes the error of a trial that failed.
    """
    name = type(module).__name__
    if "forward" in module.__dict__:  # already somebody else's
        return "", None
    kinds: tuple[tuple[str, bool, Callable[[Any], Callable[..., Any] | None]], ...] = (
        ("norms", name.endswith("RMSNorm"), _norm),
        ("norms", name.endswith("RMSNormGated"), _gated_norm),
        ("experts", name.endswith("Experts"), _experts),
        ("routers", name.lower().endswith("topkrouter"), _router),
    )
    for kind, named, trial in kinds:
        if named:
            try:
                return kind, trial(module)
            except Exception as error:  # compilers and drivers raise anything; the module runs
                if refused is not None:
                    refused.add(module, error)
                return kind, None
    return "", None


def agree(
    found: Tensor,
    expected: Tensor,
    *,
    decided: Tensor | None = None,
    dtype: torch.dtype | None = None,
    share: float = 1.0,
) -> bool:
    """Whether two results differ by roundings alone in every row that counts; one row in four has to.

    Args:
        decided: bool `[rows]`, the rows that count; those that overflow in both results never do.
        dtype: that was computed in, if not the results'.
        share: of those rows that has to agree.
    """
    if found.shape != expected.shape:
        return False
    exact = (expected.dtype if dtype is None else dtype) == torch.float32
    limit = min(_TRIAL, _TRIAL_FLOAT32) if exact else _TRIAL
    found, expected = found.float().flatten(1), expected.float().flatten(1)
    error = (found - expected).norm(dim=1)
    right = torch.isfinite(error) & (error <= limit * expected.norm(dim=1))
    finite = torch.isfinite(found).all(1) | torch.isfinite(expected).all(1)
    counts = finite if decided is None else finite & decided
    return bool(counts.float().mean() >= 1 / 4) and bool(right[counts].float().mean() >= share)


def is_silu(module: Any) -> bool:
    """Whether the activation that a module names is SiLU; so is none at all, which the trial has to show."""
    activation = getattr(module, "act_fn", None)
    if activation is None:
        return True
    x = torch.linspace(-30, 30, 241)
    return bool(torch.allclose(activation(x), torch.nn.functional.silu(x), rtol=1e-4, atol=1e-6))


def scaled_rows(rows: int, width: int, like: Tensor, scales: Sequence[float] = SCALES) -> Tensor:
    """`[len(scales) * rows, width]` random numbers, the first rows of the first scale."""
    return torch.cat([scale * _sample(rows, width, like) for scale in scales])


def decided_rows(logits: Tensor, top: int, bias: Tensor | None) -> Tensor:
    """Bool `[T]`: whether the choice of experts is clear, so that no rounding of the logits can change it."""
    rank = logits.float() if bias is None else logits.float().sigmoid() + bias.float()
    if top >= rank.shape[1]:
        return torch.ones(len(rank), dtype=torch.bool, device=rank.device)
    best = rank.topk(top + 1, dim=-1).values
    rounding = 1e-3 if logits.dtype == torch.float32 else 2e-2
    return best[:, top - 1] - best[:, top] > rounding * rank.abs().amax(-1)


def _sample(rows: int, width: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn((rows, width), generator=generator).to(like.device, like.dtype)


def _odd_rows(width: int, like: Tensor) -> Tensor:
    """`[5, width]`: plain, tiny (epsilon matters), large, with a mean, with a spike."""
    x = _sample(5, width, like)
    x[1] *= 1e-3
    x[2] *= 1e3
    x[3] += 1.0
    x[4, width // 2] = 100.0
    return x


@contextmanager
def _another_weight(weight: Tensor) -> Iterator[None]:
    """Random numbers in place of a weight, which comes back untouched."""
    held = weight.data
    weight.data = _sample(1, len(held), held)[0]
    try:
        yield
    finally:
        weight.data = held


def _same_with_any_weight(weight: Tensor, same: Callable[[], bool]) -> bool:
    """Whether `same` holds with the weight as it is and with a random one."""
    if not same():
        return False
    with _another_weight(weight):
        return same()


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
    x = _odd_rows(len(weight), weight)
    for centred in (False, True):

        def forward(x: Tensor, centred: bool = centred) -> Tensor:
            return rms_norm(x, weight, eps, zero_centred=centred)

        if _same_with_any_weight(weight, lambda f=forward: agree(f(x), module(x))):  # type: ignore[misc]
            return forward
    return None


def _gated_norm(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.norms import rms_norm

    weight, eps = _weight(module), _epsilon(module)
    if weight is None or eps is None:
        return None
    x = _odd_rows(len(weight), weight)
    gate = 4 * _sample(len(x), len(weight), weight).flip(0)
    for activation in ("silu", "sigmoid"):
        for centred in (False, True):
            options: dict[str, Any] = {"zero_centred": centred, "activation": activation}

            def forward(x: Tensor, gate: Tensor, options: dict[str, Any] = options) -> Tensor:
                return rms_norm(x, weight, eps, gate=gate, **options)

            if _same_with_any_weight(
                weight,
                lambda f=forward: agree(f(x, gate), module(x, gate)),  # type: ignore[misc]
            ):
                return forward
    return None


def experts_agree(module: Any, run: Callable[..., Tensor]) -> bool:
    """Whether `run` (as `kernels.experts.experts_reference`) does what a module of experts does.

    Every scale of inputs passes experts from the first to the last, with unequal weights.
    """
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3:
        return False
    experts, width = down.shape[0], down.shape[1]
    if gate_up.shape != (experts, 2 * down.shape[2], width) or not is_silu(module):
        return False
    if any(getattr(module, f"{n}_bias", None) is not None for n in ("gate_up_proj", "down_proj")):
        return False
    # not so small that FP16 results become subnormal
    x = scaled_rows(_ROUTED, width, down, (1.0, 1 / 4, 16.0))
    first = torch.linspace(0, experts - 1, len(x), device=x.device).long()
    chosen = torch.stack([first, (first + max(1, experts // 2)) % experts], 1)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.125]], device=x.device, dtype=x.dtype)
    weights = weights.repeat(len(x) // 2, 1)
    found = run(x, gate_up, down, chosen, weights)
    return agree(found, module(x, chosen, weights), share=7 / 8)


def _experts(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.experts import MAX_PAIRS, experts_step

    original = module.forward
    if not experts_agree(module, experts_step):
        return None
    gate_up, down = module.gate_up_proj, module.down_proj
    most = min(MAX_PAIRS, TOKENS_PER_EXPERT * down.shape[0])

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if top_k_index.numel() > most:
            result: Tensor = original(hidden_states, top_k_index, top_k_weights)
            return result
        return experts_step(hidden_states, gate_up, down, top_k_index, top_k_weights)

    return forward


def router_by(module: Any, choose: Callable[..., Any]) -> Callable[[Tensor], Any] | None:
    """The forward of a router by `choose` (as `kernels.router.route_reference`) if it does what the module does.

    The choice must be the module's wherever no rounding decides it.
    """
    weight, top = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(top, int):
        return None
    if getattr(module, "norm_topk_prob", True) is False or _grouped(module):
        return None
    bias = getattr(module, "e_score_correction_bias", None)
    factor = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = hidden_states.reshape(-1, weight.shape[1])
        # models that route in float32 do so in their projection
        wide = weight if bias is None else weight.float()
        logits = torch.nn.functional.linear(flat.to(wide.dtype), wide)
        weights, chosen = choose(logits, top, bias=bias, factor=factor)
        return logits, weights.to(logits.dtype), chosen

    x = scaled_rows(_ROUTED, weight.shape[1], weight)
    expected, found = module(x), forward(x)
    if len(expected) != len(found) or expected[1].dtype != found[1].dtype:
        return None
    decided = decided_rows(found[0], top, bias)
    (theirs, places), (mine, ours) = expected[2].sort(-1), found[2].sort(-1)
    right = (
        agree(found[0], expected[0])
        and bool((theirs == mine)[decided].all())
        and agree(found[1].gather(-1, ours), expected[1].gather(-1, places), decided=decided)
    )
    return forward if right else None


def _grouped(module: Any) -> bool:
    """Whether a router leaves out groups of experts."""
    groups = next((getattr(module, n) for n in ("num_group", "n_group") if hasattr(module, n)), 1)
    return (groups or 1) > 1 and getattr(module, "topk_group", None) != groups


def _router(module: Any) -> Callable[..., Any] | None:
    from hybridstate.kernels.router import route

    return router_by(module, route)
