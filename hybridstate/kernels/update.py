"""One decode step on pooled states, in place: the fastest implementation that passes its own test here.

gluon      the matrix-instruction kernel for pools in fragment order on NVIDIA GPUs, one launch; the number of
           heads in the batch decides how many value columns a warp takes
triton     plain kernels for any dimensions and for dense pools, one launch
reference  plain torch on any device; synchronises, so it cannot be captured in a CUDA graph

The choice is made once per device and layout, before the first step, by running a small step of each candidate
against the float64 reference. Between steps only the pool exists. A slot of -1 marks padding: its output is zero
and no state is touched. Two live rows of a batch must not share a slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from hybridstate.defaults import GROUP
from hybridstate.errors import MissingRequirement, NumericError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion, draw_fusion
from hybridstate.kernels.layout import DenseLayout, Layout, PackedLayout
from hybridstate.kernels.reference import recurrent_step

Name = Literal["gluon", "triton", "reference"]

OUTPUT_ERROR = 5e-3
"""Relative RMS a bfloat16 output may have in the self-test; its rounding alone gives 1.7e-3."""

STATE_MARGIN = 1.02
"""State error allowed in the self-test, as a multiple of the error of storing the exact state."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation in use and why the faster ones are not."""

    name: Name
    reason: str


def backend(device: torch.device | str, layout: Layout) -> Name:
    """Implementation that `backend="auto"` uses for this device and layout.

    The first call per device and layout compiles and tests the candidates (seconds on a GPU); call it before
    capturing a CUDA graph.
    """
    return _choose(_canonical(device), layout).name


def backend_reason(device: torch.device | str, layout: Layout) -> str:
    """One line: what was chosen and what happened to the candidates before it."""
    return _choose(_canonical(device), layout).reason


def preferred_layout(
    device: torch.device | str, key_dim: int, value_dim: int, k_hi: int, group: int = GROUP
) -> PackedLayout:
    """The order that runs fastest here: fragment for the gluon kernel, natural for the plain one."""
    layout = PackedLayout(key_dim, value_dim, k_hi, group)
    if backend(device, layout) == "triton":
        return PackedLayout(key_dim, value_dim, k_hi, group, "natural")
    return layout


def packed_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    *,
    layout: PackedLayout,
    value_scale: Tensor | None = None,
    fusion: StepFusion = NO_FUSION,
    out: Tensor | None = None,
    backend: Name | Literal["auto"] = "auto",
    overlap: int = 0,
) -> Tensor:
    """Dequantise, decay, read, write, read out and requantise the states of one batch (DAMP A.4).

    The pool holds T = S / c with key rows in stored order; q, k and g come in that order too (DAMP Eq. 17-18).

    Args:
        q, k: [B, Hk, K], before normalisation, any float dtype.
        v: [B, H, V].
        g: log decay [B, H] or [B, H, K]; the raw gate input where `fusion` says so.
        beta: [B, H], likewise.
        pool: uint8 [P, H, layout.head_bytes], updated in place.
        slots: int64 [B], -1 for padding.
        layout: how the pool is laid out.
        value_scale: c, float32 [H, V], or None for ones.
        fusion: gates from raw projections, a key order per value head, a counter of clipped values.
        out: [B, H, V] to write to; allocated in the dtype of `v` when None.
        backend: force one implementation.
        overlap: programmatic dependent launch, gluon and dense Triton only. 1: start beside the end of the kernel
            before; 2: also read states there, which that kernel then must not write.

    Returns:
        o [B, H, V].

    Raises:
        NumericError: shapes or dtypes do not fit; non-finite states (reference only).
        MissingRequirement: a forced implementation cannot run here.
    """
    expected = (v.shape[1], layout.head_bytes)
    if pool.dtype != torch.uint8 or tuple(pool.shape[1:]) != expected:
        raise NumericError(
            f"packed pool is {pool.dtype} {tuple(pool.shape)}, expected uint8 [slots, {expected[0]}, {expected[1]}]",
            found=list(pool.shape),
            expected=["slots", *expected],
        )
    return _step(q, k, v, g, beta, pool, slots, layout, value_scale, fusion, out, backend, overlap)


def dense_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    *,
    layout: DenseLayout | None = None,
    value_scale: Tensor | None = None,
    fusion: StepFusion = NO_FUSION,
    out: Tensor | None = None,
    backend: Name | Literal["auto"] = "auto",
    overlap: int = 0,
) -> Tensor:
    """The same step on an unquantised pool [P, H, K, V] of float32, float16 or bfloat16.

    Args: as `packed_step`; `layout` None means rows in logical order and the pool's dtype.
    """
    layout = layout or DenseLayout(q.shape[2], v.shape[2], pool.dtype)
    expected = (v.shape[1], layout.key_dim, layout.value_dim)
    if pool.dtype != layout.dtype or tuple(pool.shape[1:]) != expected:
        raise NumericError(
            f"dense pool is {pool.dtype} {tuple(pool.shape)}, expected {layout.dtype} [slots, *{expected}]",
            found=list(pool.shape),
            expected=["slots", *expected],
        )
    return _step(q, k, v, g, beta, pool, slots, layout, value_scale, fusion, out, backend, overlap)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    layout: Layout,
    value_scale: Tensor | None,
    fusion: StepFusion,
    out: Tensor | None,
    name: Name | Literal["auto"],
    overlap: int,
) -> Tensor:
    """Check, choose, run."""
    _check(q, k, v, g, beta, pool, slots, layout, value_scale)
    if fusion is not NO_FUSION:
        fusion.check(v.shape[1], layout.key_dim, per_channel=g.dim() == 3)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    if out.shape != v.shape or _inner_contiguous(out) is not out:
        raise NumericError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, expected contiguous rows of {tuple(v.shape)}"
        )
    if name == "auto":
        name = _choose(_canonical(v.device), layout).name
    rows = [_inner_contiguous(x) for x in (q, k, v, g, beta)]
    able = name == "gluon" or (name == "triton" and not isinstance(layout, PackedLayout))
    options = {"overlap": overlap} if overlap and able else {}
    runner(name, layout)(*rows, pool, slots, out, value_scale, layout, fusion, **options)
    return out


def runner(name: Name, layout: Layout) -> Callable[..., None]:
    """The function behind a name; imports Triton only when asked for."""
    if name == "reference":
        return _reference_step
    packed = isinstance(layout, PackedLayout)
    try:
        if name == "triton":
            from hybridstate.kernels import triton_update

            return triton_update.packed_step if packed else triton_update.dense_step
        if layout.order == "fragment":
            from hybridstate.kernels import gluon_update

            return gluon_update.packed_step
    except ImportError as error:
        raise MissingRequirement(
            f"the {name} kernels need Triton 3.6 or later ({error})",
            hint="Install triton, or use backend='reference'.",
        ) from error
    raise MissingRequirement(
        f"no gluon kernel for layout {layout.layout_id}", hint="Use backend='triton'."
    )


def _reference_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    out: Tensor,
    value_scale: Tensor | None,
    layout: Layout,
    fusion: StepFusion = NO_FUSION,
) -> None:
    """Unpack the batch's states, step, pack: what the kernels are compared with."""
    live = slots >= 0
    rows = slots[live]
    state = layout.unpack(pool[rows])
    scale = 1.0 if value_scale is None else value_scale.unsqueeze(-2)
    q, k, g, beta = fusion.derive(q[live], k[live], g[live], beta[live])
    o, state = recurrent_step(q, k, v[live], g, beta, state * scale)
    pool[rows] = layout.pack(state / scale)
    if fusion.saturated is not None:
        fusion.saturated.add_(layout.count_saturated(state / scale).to(torch.int32))
    out.zero_()
    out[live] = o.to(out.dtype)


@lru_cache(maxsize=64)
def _choose(device: str, layout: Layout) -> Choice:
    """Test the candidates from fastest to slowest; the reference needs no test."""
    if not device.startswith("cuda"):
        return Choice("reference", f"reference: no kernel runs on {device}")
    candidates: list[Name] = ["triton"]
    failures: list[str] = []
    if layout.order == "fragment":
        candidates = ["gluon", "triton"] if isinstance(layout, PackedLayout) else ["gluon"]
    elif isinstance(layout, PackedLayout):
        failures = [f"gluon: {layout.fragment_obstacle or 'the pool is in natural order'}"]
    for name in candidates:
        try:
            problem = self_test(name, torch.device(device), layout)
        except Exception as error:  # compilers and drivers raise anything; the reason is reported
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if problem is None:
            return Choice(name, "; ".join([*failures, f"{name}: passed its self-test on {device}"]))
        failures.append(f"{name}: {problem}")
    return Choice("reference", "; ".join([*failures, "reference: what is left"]))


@dataclass(frozen=True, slots=True)
class StepCheck:
    """How far one step is from float64, and what is wrong with it if anything is.

    Attributes:
        output_error: relative RMS of the outputs.
        state_error: relative RMS of the states.
        storage_error: the same for the exact states stored in this layout; no kernel can do better.
        problem: what is wrong, or None.
    """

    output_error: float
    state_error: float
    storage_error: float
    problem: str | None


def self_test(name: Name, device: torch.device, layout: Layout) -> str | None:
    """Small steps of GDN and of KDA, gates given and fused, in every form of a kernel, against float64.

    Returns:
        None when output and state are right, otherwise what was wrong.
    """
    step = runner(name, layout)
    forms: list[dict[str, int]] = [{}]
    if name == "gluon":
        forms = [{"columns": w} for w in (128, 64, 32) if w <= layout.block]
        forms.append({"columns": 32, "warps": 4})
    for per_channel, fused, form in [
        *((*kind, forms[0]) for kind in product((False, True), (False, True))),
        *((bool(n % 2), True, form) for n, form in enumerate(forms[1:])),
    ]:
        found = check_step(
            name,
            device,
            layout,
            per_channel=per_channel,
            key_heads=1 + per_channel,
            fused=fused,
            step=partial(step, **form),
        )
        if found.problem is not None:
            gate = f"{'KDA' if per_channel else 'GDN'}{' from raw projections' * fused}"
            gate += "".join(f", {n} {what}" for what, n in form.items())
            return f"{gate} step is wrong: {found.problem}"
    return None


def check_step(
    name: Name,
    device: torch.device,
    layout: Layout,
    *,
    per_channel: bool,
    key_heads: int,
    heads: int = 2,
    batch: int = 3,
    scaled: bool = True,
    fused: bool = False,
    seed: int = 20,
    step: Callable[..., None] | None = None,
) -> StepCheck:
    """One step on random bfloat16 inputs, its second row padding, against float64 on the CPU.

    Args:
        name, device, layout: what to test and where.
        per_channel: KDA rather than GDN.
        key_heads, heads, batch: shape of the step.
        scaled: with a value scale.
        fused: `g` and `beta` are raw, with the safe gate and a key index for KDA and softplus for GDN.
        seed: of the inputs.
        step: function to test instead of the named one, with the same arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    key_dim, value_dim = layout.key_dim, layout.value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (draw(batch, key_heads, key_dim).bfloat16() for _ in range(2))
    v = draw(batch, heads, value_dim).bfloat16()
    g = -draw(*((batch, heads, key_dim) if per_channel else (batch, heads))).abs() * 0.2
    beta = draw(batch, heads) if fused else draw(batch, heads).sigmoid()
    fusion = draw_fusion(heads, key_dim, per_channel, generator) if fused else NO_FUSION
    scale = draw(heads, value_dim).exp() if scaled else torch.ones(heads, value_dim)
    pool = layout.pack(draw(batch + 1, heads, key_dim, value_dim))
    slots = torch.randperm(batch + 1, generator=generator)[:batch]
    if batch > 1:
        slots[1] = -1
    on_device = [x.to(device) for x in (q, k, v, g, beta, pool.clone(), slots)]
    out = torch.full_like(on_device[2], float("nan"))
    (step or runner(name, layout))(
        *on_device, out, scale.to(device) if scaled else None, layout, fusion.to(device)
    )
    q, k, g, beta = fusion.derive(q.double(), k.double(), g.double(), beta.double())
    return compare_step(
        (q, k, v, g, beta), slots, scale, pool, on_device[5].cpu(), out.cpu(), layout
    )


def compare_step(
    vectors: tuple[Tensor, ...],
    slots: Tensor,
    scale: Tensor,
    before: Tensor,
    after: Tensor,
    out: Tensor,
    layout: Layout,
) -> StepCheck:
    """Errors of a step's output and pool (before, after) against the float64 recurrence, all on one device.

    `vectors` are q, k, v and derived gates; `scale` is the value scale [H, V], ones where there is none.
    """
    live, scale = slots >= 0, scale.double().unsqueeze(-2)
    rows = slots[live]
    state = layout.unpack(before[rows]).double() * scale
    q, k, v, g, beta = (x[live].double() for x in vectors)
    o, exact = recurrent_step(q, k, v, g, beta, state)
    found = layout.unpack(after[rows]).double() * scale
    best = layout.unpack(layout.pack(exact / scale)).double() * scale
    output_error, state_error, storage_error = (
        float((x - y).norm() / y.norm())
        for x, y in ((out[live].double(), o), (found, exact), (best, exact))
    )
    untouched = torch.ones(before.shape[0], dtype=torch.bool, device=before.device)
    untouched[rows] = False
    limit = storage_error * STATE_MARGIN + 1e-6
    problem = None
    if not output_error < OUTPUT_ERROR:
        problem = f"output error {output_error:.1e}, at most {OUTPUT_ERROR:.0e}"
    elif not state_error < limit:
        problem = f"state error {state_error:.2e}, at most {limit:.2e}"
    elif bool((out[~live] != 0).any()) or not torch.equal(after[untouched], before[untouched]):
        problem = "padding row or unused slot was touched"
    return StepCheck(output_error, state_error, storage_error, problem)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    layout: Layout,
    value_scale: Tensor | None,
) -> None:
    """Refuse what a kernel would read out of bounds or broadcast."""
    batch, heads, value_dim = v.shape
    key_heads, key_dim = q.shape[-2:]
    expected = {
        "q": (q, (batch, key_heads, layout.key_dim)),
        "k": (k, (batch, key_heads, layout.key_dim)),
        "v": (v, (batch, heads, layout.value_dim)),
        "g": (g, (batch, heads) + ((key_dim,) if g.dim() == 3 else ())),
        "beta": (beta, (batch, heads)),
        "slots": (slots, (batch,)),
    }
    if value_scale is not None:
        expected["value_scale"] = (value_scale, (heads, value_dim))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise NumericError(
                f"{name} has shape {tuple(tensor.shape)}, expected {shape}",
                tensor=name,
                found=list(tensor.shape),
                expected=list(shape),
            )
    if heads % key_heads:
        raise NumericError(f"{heads} value heads do not divide by {key_heads} key heads")
    if slots.dtype != torch.int64:
        raise NumericError(f"slots are {slots.dtype}, expected int64")
    if value_scale is not None and (
        value_scale.dtype != torch.float32 or not value_scale.is_contiguous()
    ):
        raise NumericError("value_scale must be contiguous float32")
    if not pool[0].is_contiguous():
        raise NumericError("a pool slot must be contiguous")


def _inner_contiguous(x: Tensor) -> Tensor:
    """Batch rows may lie apart (views of one fused projection); heads inside a row may not."""
    if x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()


def _canonical(device: torch.device | str) -> str:
    """Device as text with its index, so that equal devices share one choice."""
    text = str(torch.device(device))
    return f"cuda:{torch.cuda.current_device()}" if text == "cuda" else text
