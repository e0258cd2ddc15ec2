"""What `bench update` tries for each state format and batch, and the check every one of them passes before it is timed.

At 128 x 128 on Hopper the dense candidates are all that were fastest at about so many heads in the recorded runs on an
H200 (4 to 32,768 heads in a batch, GDN and KDA); other dimensions and devices try every candidate at every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch

from hybridstate.bench.layers import UpdateDims, random_fusion, random_inputs
from hybridstate.defaults import GROUP
from hybridstate.errors import MissingRequirement, NumericError
from hybridstate.kernels import update
from hybridstate.kernels.layout import DenseLayout, Layout, PackedLayout

Step = Callable[..., None]

FORMATS: Final = ("fp32", "bf16", "fp16", "damp", "damp-scaled")
"""State formats; `damp` has orders and value scales folded into the weights, `damp-scaled` reads a value scale."""

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKED_BATCH: Final = 3
ANY: Final = 1 << 30

DENSE: Final = (
    # order, columns, warps; least and most heads in a batch where it can win: FP32, then 16 bits
    ("rows", 16, 1, (1, 128), (0, 0)),
    ("columns", 8, 1, (1, ANY), (1, ANY)),
    ("columns", 16, 1, (4096, ANY), (128, 512)),
    ("columns", 32, 4, (0, 0), (192, 512)),
    ("tiles", 8, 1, (1, ANY), (1, 512)),
)
HOPPER: Final = (9, 0)
MATRIX_HEADS: Final = 512
"""Heads in a batch from which the matrix kernel can win on 16-bit states."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One implementation of one format.

    Attributes:
        scaled: the step reads a value scale.
        columns, warps: of a program where they are chosen; None leaves both to the launcher.
        overlap: of programmatic dependent launch, 0 for none.
    """

    backend: str
    layout: Layout
    columns: int | None = None
    warps: int = 1
    overlap: int = 0
    scaled: bool = False

    @property
    def label(self) -> str:
        """Backend, physical order, value columns and warps of a program where they were chosen."""
        chosen = "" if self.columns is None else f", {self.columns} columns, {self.warps} warps"
        scale = ", value scale" if self.scaled else ""
        return f"{self.backend}, {self.layout.layout_id}{chosen}{scale}"

    def step(self) -> Step:
        """The function that runs it, with the arguments of the launchers."""
        step = update.runner(self.backend, self.layout)  # type: ignore[arg-type]
        options: dict[str, int] = {}
        if self.columns is not None:
            options = {"columns": self.columns, "warps": self.warps}
        plain = self.backend == "triton" and isinstance(self.layout, PackedLayout)
        if self.overlap and self.backend != "reference" and not plain:
            options["overlap"] = self.overlap
        return partial(step, **options) if options else step


def configurations(
    layer: UpdateDims, state: str, batch: int, device: torch.device, overlap: int = 0
) -> list[Configuration]:
    """Implementations worth timing for this format and batch on this device, each of them once."""
    heads = batch * layer.value_heads
    if state in DTYPES:
        return _dense(layer, DTYPES[state], heads, device, overlap)
    scaled = state == "damp-scaled"
    layout = PackedLayout(layer.key_dim, layer.value_dim, layer.protected, GROUP)
    if device.type != "cuda":
        return [Configuration(update.backend(device, layout), layout, scaled=scaled)]
    matrix = _matrix(layout, heads, device, overlap, scaled)
    plain = PackedLayout(layer.key_dim, layer.value_dim, layer.protected, GROUP, "natural")
    return matrix or [Configuration("triton", plain, overlap=overlap, scaled=scaled)]


def _dense(
    layer: UpdateDims, dtype: torch.dtype, heads: int, device: torch.device, overlap: int
) -> list[Configuration]:
    key_dim, value_dim = layer.key_dim, layer.value_dim
    rows = DenseLayout(key_dim, value_dim, dtype)
    if device.type != "cuda" and update.backend(device, rows) != "triton":
        return [Configuration("reference", rows)]
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) == HOPPER
    known, wide = hopper and (key_dim, value_dim) == (128, 128), dtype == torch.float32
    found = []
    for order, columns, warps, *ranges in DENSE:
        least, most = ranges[0 if wide else 1]
        if (known and not least <= heads <= most) or (order == "tiles" and value_dim % columns):
            continue
        tile = (columns,) if order == "tiles" else ()
        layout = DenseLayout(key_dim, value_dim, dtype, order, *tile)  # type: ignore[arg-type]
        found.append(Configuration("triton", layout, columns, warps, overlap))
    fragment = PackedLayout(key_dim, value_dim, 0).has_fragment_order
    if device.type == "cuda" and fragment and not wide and (not known or heads >= MATRIX_HEADS):
        found += _matrix(DenseLayout(key_dim, value_dim, dtype, "fragment"), heads, device, overlap)
    return found


def _matrix(
    layout: Layout, heads: int, device: torch.device, overlap: int, scaled: bool = False
) -> list[Configuration]:
    """The matrix kernel in the form that this many heads take; none where it cannot run."""
    if layout.order != "fragment":
        return []
    if torch.cuda.get_device_capability(device) != HOPPER:
        if update.backend(device, layout) != "gluon":
            return []
    else:  # its own check follows, a self-test would compile as much again
        try:
            update.runner("gluon", layout)
        except MissingRequirement:
            return []
    from hybridstate.kernels.gluon_update import matrix_form

    return [Configuration("gluon", layout, *matrix_form(layout, heads), overlap, scaled)]


def checked(
    wanted: Sequence[Configuration],
    layer: UpdateDims,
    state: str,
    device: torch.device,
    fused: bool,
    seed: int = 20,
) -> dict[Configuration, dict[str, Any]]:
    """Errors of each configuration against float64 at these dimensions, from inputs as they are timed.

    One step of `CHECKED_BATCH` rows, the second of them padding, on the gate and in the dtypes that are timed, so
    that what was checked is the compiled kernel that is timed.

    Raises:
        NumericError: they are too large.
    """
    *vectors, out = random_inputs(layer, CHECKED_BATCH, device, seed, fused=fused)
    fusion = random_fusion(layer, device, seed, fused=fused)
    generator = torch.Generator(device).manual_seed(seed)
    shape = (CHECKED_BATCH + 1, layer.value_heads, layer.key_dim, layer.value_dim)
    dense = torch.randn(shape, generator=generator, device=device)
    drawn = torch.rand(shape[1], shape[3], generator=generator, device=device) + 0.5
    slots = torch.tensor([2, -1, 0], device=device)
    q, k, v, g, beta = (x.double() for x in vectors)
    q, k, g, beta = fusion.derive(q, k, g, beta)
    errors = {}
    for one in dict.fromkeys(wanted):
        scale = drawn if one.scaled else None
        ones = torch.ones_like(drawn) if scale is None else scale
        before = one.layout.pack(dense)
        after = before.clone()
        out.fill_(float("nan"))
        one.step()(*vectors, after, slots, out, scale, one.layout, fusion)
        found = update.compare_step((q, k, v, g, beta), slots, ones, before, after, out, one.layout)
        if found.problem is not None:
            raise NumericError(
                f"{layer.name}, {state}, {one.label}: {found.problem}; nothing is reported",
                hint="the update kernel is wrong on this device; run `hybridstate doctor`",
                state=state,
            )
        errors[one] = {key: x for key, x in asdict(found).items() if key != "problem"}
    return errors
