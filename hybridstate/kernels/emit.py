"""One self-contained Python module of the decode step, specialised to a plan, for engines to vendor.

Nothing in it is written twice: the definitions that the step needs are cut out of this package's own sources
(`emit_cut`), and only the entry points at the end are a template (`emit_entry.py.txt`, and `emit_step.py.txt` or
`emit_ring.py.txt`). So the module cannot drift from the kernels that tests and benches run. A plan that writes its
packed state at every L-th update gets the kernels that keep a ring of the inputs between.
"""

import ast
import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

import numpy as np

from hybridstate.errors import NumericError
from hybridstate.kernels.emit_cut import Name, cut
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.ring_reference import LONGEST, Ring
from hybridstate.kernels.ring_update import ring_layout

MODULE_FILE: Final = "packed_update.py"
"""Name of the emitted file."""

_STANDARD: Final = {
    "Callable": "collections.abc",
    "dataclass": "dataclasses",
    "lru_cache": "functools",
    "partial": "functools",
    "product": "itertools",
    "Any": "typing",
    "Final": "typing",
    "Literal": "typing",
}
"""Names of the standard library that the sources and the template use, and where they come from."""

_GLUON_IMPORTS: Final = """\
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
"""
_ABSENT_GLUON: Final = "    gluon = gl = async_copy = mma_v2 = triton\n"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What a module is specialised to.

    Attributes:
        layout: the plan's packed layout.
        key_heads, heads: Hk and H of the whole model.
        per_channel: one decay per key channel (KDA) rather than per head (GDN).
        key_index: by block, stored row -> key channel `[H][K]`; empty where the weights carry the order.
        value_index: by block, stored column -> value dim `[H][V]`; likewise.
        value_scale: by block, c of every stored column `[H][V]`; empty for ones.
        every: L, updates between two writes of a packed state; above 1 with a ring of the inputs between.
        model, digest: name of the model and content digest of the plan, for the docstring.
    """

    layout: PackedLayout
    key_heads: int
    heads: int
    per_channel: bool
    key_index: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    value_index: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    value_scale: Mapping[int, Sequence[Sequence[float]]] = field(default_factory=dict)
    every: int = 1
    model: str = "a model"
    digest: str = ""

    @property
    def by_block(self) -> bool:
        """Whether anything depends on the block, so that entry points take its number."""
        return bool(self.key_index or self.value_index or self.value_scale)

    @property
    def stored(self) -> PackedLayout:
        """The layout whose kernels the module brings: ring kernels have one order per size."""
        return ring_layout(self.layout) if self.every > 1 else self.layout

    @property
    def ring_key_heads(self) -> int:
        """Key heads that a ring tells apart: value heads where those of one key head have orders of their own."""
        bundle = self.heads // self.key_heads
        own = any(
            list(order) != list(heads[h - h % bundle])
            for heads in self.key_index.values()
            for h, order in enumerate(heads)
        )
        return self.heads if own else self.key_heads

    def __post_init__(self) -> None:
        if self.heads % self.key_heads or self.layout.key_dim > 256:
            raise NumericError(
                f"no module for {self.heads} value heads on {self.key_heads} key heads of "
                f"{self.layout.key_dim} channels",
                expected="whole bundles and at most 256 channels",
            )
        if not 1 <= self.every <= LONGEST:
            raise NumericError(
                f"the plan writes its packed state once in {self.every} updates, the emitted step once in "
                f"{LONGEST} at most",
                hint=f"export the plan with --requantise-every {LONGEST} or less, or leave --kernels out",
                found=self.every,
                expected=LONGEST,
            )


def emit(spec: StepSpec) -> str:
    """Source text of the module; equal input gives equal text.

    Raises:
        NumericError: the plan's dimensions do not fit an index of bytes.
    """
    gluon = spec.stored.order == "fragment"
    body = cut(_ring_roots(gluon) if spec.every > 1 else _step_roots(gluon))
    entry = _entry(spec, gluon=gluon)
    head = _preamble(spec, f"{body}\n{entry}", gluon=gluon).rstrip("\n")
    return f"{head}\n\n\n{body}\n\n\n{entry}"


def _step_roots(gluon: bool) -> list[Name]:
    """What the entry points use where a state is written at every update."""
    return [
        ("kernels.triton_update", "packed_step"),
        *([("kernels.gluon_update", "packed_step")] if gluon else []),
        ("kernels.update", "packed_step"),
        ("kernels.update", "check_step"),
        ("kernels.update", "backend_reason"),
        ("kernels.update", "_reference_step"),
    ]


def _ring_roots(gluon: bool) -> list[Name]:
    """What they use where it is written at every L-th."""
    used = {
        "kernels.ring_triton": ("ring_step", "ring_flush"),
        "kernels.gluon_ring": ("ring_step", "ring_flush") if gluon else (),
        "kernels.reference": ("recurrent_step",),
        "kernels.ring_update": ("ring_step", "ring_flush", "check", "backend"),
    }
    return [(module, name) for module, names in used.items() for name in names]


def _preamble(spec: StepSpec, body: str, *, gluon: bool) -> str:
    """Docstring, imports and the two errors."""
    layout = spec.stored
    gate = "one decay per key channel (KDA)" if spec.per_channel else "one decay per head (GDN)"
    reader = "torch gathers" if spec.every > 1 else "the kernel reads"
    order = (
        f"The weights do not carry the key order: {reader} q, k and decays through the block's index."
        if spec.key_index
        else "The weights carry the key order of the plan, so q, k and decays come as the model makes them."
    )
    if spec.value_index:
        order += "\nNor do they carry the value order: v and o are gathered around the kernel."
    if spec.value_scale:
        order += "\nThe pool holds states over the value scales of the plan, which the kernel takes as an operand."
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    standard = [
        f"from {module} import {', '.join(sorted(n for n, m in _STANDARD.items() if m == module and n in used))}"
        for module in sorted({m for n, m in _STANDARD.items() if n in used})
    ]
    plain = ["argparse", "os", "sys", *(["base64", "zlib"] if spec.by_block else [])]
    imports = "\n".join([*(f"import {name}" for name in sorted(plain)), *standard])
    error = _template("emit_errors.py.txt")
    points = "`allocate`, `store`, `load`, `decode_step`"
    if spec.every > 1:
        points = (
            "`preferred_layout`, `allocate`, `allocate_ring`, `describe_ring`, `store`, `load`,\n"
        )
        points += "`decode_step`, `flush`, `clear`"
    return f'''"""Fused decode step on packed recurrent states, specialised to the plan of {spec.model}.

State of one head: {layout.key_dim} x {layout.value_dim}, {layout.k_hi} FP16 key rows, the rest INT8 with one FP32
scale per {layout.group} value columns; {layout.head_bytes:,} bytes, {layout.bits_per_value:.3f} bits per value.
{spec.heads} value heads on {spec.key_heads} key heads, {gate}.
Layout {layout.layout_id}.
{order}
{_ring_text(spec)}
Entry points: {points}. `python {MODULE_FILE} --check` compares the
kernel with the reference below. Needs torch and triton, nothing else. Written by
`hybridstate export-plan --kernels` from the package's own sources: do not edit, export again.
Plan {spec.digest[:16] or "unnamed"}.
"""

{imports}

import torch
from torch import Tensor

{_template("emit_triton.py.txt").replace("@GLUON@", _GLUON_IMPORTS if gluon else "").rstrip()}
{_ABSENT_GLUON if gluon else ""}{error}'''


def _ring_text(spec: StepSpec) -> str:
    """What the docstring says about a ring; empty without one."""
    if spec.every == 1:
        return ""
    layout, heads = spec.stored, spec.heads
    ring = Ring.empty(
        1, spec.ring_key_heads, heads, layout, spec.every, per_channel=spec.per_channel,
        device="meta",
    )  # fmt: skip
    bits = layout.bits_per_value + ring.bits_per_value
    return f"""
A packed state is written once in {spec.every} updates; a ring beside it holds the inputs between. Packed state and
ring belong together: a slot takes {heads * layout.head_bytes:,} + {ring.slot_bytes:,} bytes, {bits:.3f} bits per value.
"""


def _entry(spec: StepSpec, *, gluon: bool) -> str:
    layout, ring = spec.stored, spec.every > 1
    values = {
        "KEY_DIM": layout.key_dim,
        "VALUE_DIM": layout.value_dim,
        "K_HI": layout.k_hi,
        "GROUP": layout.group,
        "ORDER": f'"{layout.order}"',
        "LAYOUT_ID": f'"{layout.layout_id}"',
        "KEY_HEADS": spec.key_heads,
        "HEADS": spec.heads,
        "PER_CHANNEL": spec.per_channel,
        "PLAN": f'"{spec.digest}"',
        "STEP": "ring_step" if ring else "packed_step",
        "EVERY": spec.every,
        "RING_KEY_HEADS": spec.ring_key_heads,
    }
    text = _template("emit_entry.py.txt")
    own = _template("emit_ring.py.txt" if ring else "emit_step.py.txt")
    text = text.replace("@OWN@\n", own)
    index = bool(spec.key_index)
    for tag, chosen in (
        ("gluon", gluon), ("ring", ring), ("ring index", ring and index),
        ("step index", index and not ring),
    ):  # fmt: skip
        text = _choose(text, tag, chosen)
    tables: dict[str, tuple[str, Mapping[int, Sequence[Sequence[float]]], str]] = {
        "index": ("KEY_INDEX", spec.key_index, "u1"),
        "values": ("VALUE_INDEX", spec.value_index, "<i2"),
        "scale": ("VALUE_SCALE", spec.value_scale, "<f4"),
    }
    for tag, (name, table, dtype) in tables.items():
        text = _choose(text, tag, bool(table))
        if table:
            text = text.replace(f"@{name}@", _packed(table, dtype))
            values["TABLE"] = f"{name}_TEXT"
    text = _choose(text, "block", spec.by_block)
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _choose(text: str, name: str, chosen: bool) -> str:
    """Lines marked `# [name]` or `# [not name]` at their end stay or go."""
    stays, goes = f"# [{name}]", f"# [not {name}]"
    if not chosen:
        stays, goes = goes, stays
    lines = [line for line in text.splitlines() if not line.endswith(goes)]
    return (
        "\n".join(x.removesuffix(stays).rstrip() if x.endswith(stays) else x for x in lines) + "\n"
    )


def _packed(table: Mapping[int, Sequence[Sequence[float]]], dtype: str) -> str:
    """A table by block as text: little-endian `[H, width]` of each, deflated, base64 in lines."""
    rows = []
    for block, heads in sorted(table.items()):
        raw = np.array(heads, dtype).tobytes()
        text = base64.b64encode(zlib.compress(raw, 9)).decode()
        if len(text) <= 80:
            rows.append(f'    {block}: "{text}",')
            continue
        rows.append(f"    {block}: (")
        rows += [f'        "{text[start : start + 88]}"' for start in range(0, len(text), 88)]
        rows.append("    ),")
    return "\n".join(rows)


def _template(name: str) -> str:
    return files("hybridstate.kernels").joinpath(name).read_text(encoding="utf-8")
