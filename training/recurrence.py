"""The recurrence used in training: fla-core's `chunk_kda` on a GPU, a plain float recurrence on a CPU.

transformers' modules call module-level functions for the recurrence and the short convolution; `installed`
replaces them. GDN runs as KDA with its scalar log-decay broadcast over the key channels: the gradient of the
broadcast is a sum, so the gradients of ``A_log``, ``dt_bias`` and the decay input are those of GDN.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Step the gated delta rule over time: ``S = exp(g) S; S += k beta (v - k S); o = q S``.

    q, k [B,T,Hk,K] before normalisation, v [B,T,H,V], g [B,T,H] or [B,T,H,K], beta [B,T,H]; all arithmetic in
    ``dtype``. Returns o [B,T,H,V] and the final state [B,H,K,V].
    """
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeat = v.shape[2] // k.shape[2]
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
    q = q * q.shape[-1] ** -0.5
    decay = (g if g.dim() == 4 else g[..., None]).exp()
    batch, steps, heads, width = k.shape
    state = v.new_zeros(batch, heads, width, v.shape[-1]) if initial is None else initial.to(dtype)
    outputs = []
    for t in range(steps):
        state = state * decay[:, t, :, :, None]
        read = (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * ((v[:, t] - read) * beta[:, t, :, None])[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1), state


def _plain(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    out, state = plain(query, key, value, g, beta, options.get("initial_state"), torch.float32)
    return out.to(query.dtype), state if options.get("output_final_state") else None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    from fla.ops.kda import chunk_kda

    if g.dim() == 3:
        g = g[..., None].expand(*g.shape, key.shape[-1])
    with torch.autocast(query.device.type, enabled=False):
        out, state = chunk_kda(
            query.bfloat16(),
            key.bfloat16(),
            value.bfloat16(),
            g.float(),
            beta.float(),
            initial_state=options.get("initial_state"),
            output_final_state=bool(options.get("output_final_state")),
            use_qk_l2norm_in_kernel=True,
        )
    return out, state


def _convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Depthwise causal convolution with SiLU in fla's kernel, channels last inside. hidden_states [B,C,T]."""
    from fla.modules.causal_conv1d import causal_conv1d

    x = hidden_states.transpose(1, 2)
    out: Tensor = causal_conv1d(x.contiguous(), weight, activation="silu")[0].transpose(1, 2)
    return out


HEAVY = (
    "fwd_kernel_h",
    "bwd_kernel_dhu",
    "wy_dqkg_fused",
    "gla_fwd_kernel_o",
    "kda_bwd_kernel_intra",
    "parallel",
)


def limit_autotuning(most: int = 3, heavy: int = 8) -> None:
    """Keep at most ``most`` launch configurations of each fla kernel, those nearest to 4 warps and 64-wide blocks.

    Kernels named in `HEAVY` keep ``heavy``. The full search takes minutes of compilation, this one under one.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics

    def distance(config: Any) -> float:
        blocks = [
            abs(math.log2(v / 64)) for v in config.kwargs.values() if isinstance(v, int) and v > 0
        ]
        launch = abs(math.log2(config.num_warps / 4)) + 0.4 * abs(config.num_stages - 3)
        return float(launch + 0.7 * sum(blocks))

    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for value in list(vars(module).values()):
            while isinstance(value, Heuristics):
                value = value.fn
            if isinstance(value, Autotuner):
                keep = (
                    heavy
                    if any(part in getattr(value.base_fn, "__name__", "") for part in HEAVY)
                    else most
                )
                value.configs = sorted(value.configs, key=distance)[:keep]


@contextlib.contextmanager
def installed(model: nn.Module, kind: str, device: torch.device) -> Iterator[None]:
    """Replace the recurrence (and on a GPU the convolution) of ``model``'s modeling file for a while."""
    module = sys.modules[type(model).__module__]
    name = "torch_chunk_gated_delta_rule" if kind == "gdn" else "chunk_kimi_delta_attention"
    new: dict[str, Any] = {name: _plain}
    if device.type == "cuda":
        import fla.modules.causal_conv1d
        import fla.ops.kda  # noqa: F401

        limit_autotuning()
        new = {name: _fused, "causal_conv1d_fn": _convolution}
    old = {n: getattr(module, n) for n in new}
    for n, function in new.items():
        setattr(module, n, function)
    try:
        yield
    finally:
        for n, function in old.items():
            setattr(module, n, function)


def check(kind: str, device: torch.device, *, seed: int = 0) -> dict[str, float]:
    """Compare `chunk_kda` with the float64 recurrence, forward and backward, at the models' head shapes.

    Returns relative errors ``norm(x - ref) / norm(ref)`` of the output, the final state and each gradient.
    The reference sees the same bf16-rounded q, k, v.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = 8 if kind == "gdn" else 4
    shape = (2, 192, heads, 128)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    log_decay = -torch.exp(draw(*(shape[:3] if kind == "gdn" else shape)) * 2 - 4)
    inputs = [draw(*shape).bfloat16(), draw(*shape).bfloat16(), draw(*shape).bfloat16()]
    inputs += [log_decay, torch.sigmoid(draw(*shape[:3])), draw(2, heads, 128, 128)]
    weight_out, weight_state = draw(*shape), draw(2, heads, 128, 128) * 0.1
    fused = [x.to(device).requires_grad_() for x in inputs]
    exact = [x.double().to(device).requires_grad_() for x in inputs]
    out, state = _fused(*fused[:5], initial_state=fused[5], output_final_state=True)
    assert state is not None
    q, k, v, g, beta, initial = exact
    reference, last = plain(q, k, v, g, beta, initial, torch.float64)
    (
        (out.float() * weight_out.to(device)).sum() + (state * weight_state.to(device)).sum()
    ).backward()
    (
        (reference * weight_out.double().to(device)).sum()
        + (last * weight_state.double().to(device)).sum()
    ).backward()

    def error(x: Tensor, ref: Tensor) -> float:
        return float((x.double() - ref).norm() / ref.norm())

    names = ("q", "k", "v", "g", "beta", "initial")
    found = {"output": error(out, reference), "state": error(state, last)}
    pairs = zip(names, fused, exact, strict=True)
    return found | {f"grad_{n}": error(a.grad, b.grad) for n, a, b in pairs}  # type: ignore[arg-type]


def local_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention whose first rows see a short window only.

    ``module.windows`` (int64 [rows], at most 128) holds the window of each such row in tokens. It is computed in
    blocks of 128 against the own and the previous block, so it costs no more at 8,192 tokens than at 256.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    windows: Tensor = module.windows  # type: ignore[assignment]
    rows = len(windows)
    parts = []
    if rows:
        parts.append(_windowed(query[:rows], key[:rows], value[:rows], windows, options["scaling"]))
    if rows < query.shape[0]:
        full = F.scaled_dot_product_attention(
            query[rows:], key[rows:], value[rows:], is_causal=True, scale=options["scaling"]
        )
        parts.append(full)
    return torch.cat(parts).transpose(1, 2).contiguous(), None


def set_windows(model: nn.Module, windows: Tensor) -> None:
    """Give every full-attention module of ``model`` the windows that `local_attention` applies."""
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "o_proj"):
            module.windows = windows


def _windowed(q: Tensor, k: Tensor, v: Tensor, windows: Tensor, scale: float) -> Tensor:
    batch, heads, steps = q.shape[:3]
    size = min(128, steps)
    blocks = steps // size

    def split(x: Tensor) -> Tensor:
        return x.reshape(batch, heads, blocks, size, x.shape[-1]).transpose(1, 2)

    def pair(x: Tensor) -> Tensor:
        x = split(x)
        before = F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat((before, x), 3).flatten(0, 1)

    row = torch.arange(size, device=q.device)[:, None] + size
    column = torch.arange(2 * size, device=q.device)[None]
    back = row - column
    seen = (back >= 0) & (back < windows[:, None, None])
    seen = seen[:, None].expand(batch, blocks, size, 2 * size)
    first = torch.arange(blocks, device=q.device)[None, :, None, None] > 0
    seen = (seen & (first | (column >= size))).flatten(0, 1)[:, None]
    out = F.scaled_dot_product_attention(
        split(q).flatten(0, 1), pair(k), pair(v), attn_mask=seen, scale=scale
    )
    joined: Tensor = out.unflatten(0, (batch, blocks)).transpose(1, 2)
    return joined.reshape(batch, heads, steps, v.shape[-1])
