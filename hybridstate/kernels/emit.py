"""One self-contained Python module of the decode step, specialised to a plan, for engines to vendor.

Nothing in it is written twice: the definitions that the step needs are cut out of this package's own sources
(from `ROOTS` through everything they name), and only the entry points at the end are a template
(`emit_entry.py.txt`). So the module cannot drift from the kernels that tests and benches run.
"""

import ast
import base64
import io
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

import numpy as np

from hybridstate.errors import NumericError
from hybridstate.kernels.layout import PackedLayout

MODULE_FILE: Final = "packed_update.py"
"""Name of the emitted file."""

_PACKAGE: Final = "hybridstate."
_ROOT_MODULES: Final = ("kernels.triton_update", "kernels.gluon_update", "kernels.update")
"""Modules that the step starts from; those that they import come before them."""

_OUTSIDE: Final = frozenset({"errors"})
"""Modules whose definitions the preamble replaces."""

_PREFIXES: Final = {"kernels.triton_update": "triton_", "kernels.gluon_update": "gluon_"}
"""What goes before a name that two of the modules define."""

_REPLACED: Final = frozenset({"runner", "NumericError", "MissingRequirement", "DenseLayout"})
"""Names that the template or the preamble defines in their place."""

_SUBSTITUTES: Final = {"Layout": "Layout = PackedLayout\n"}
"""Definitions that say something narrower in the module."""

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

Name = tuple[str, str]
"""A definition: module and name in it."""


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
        model, digest: name of the model and content digest of the plan, for the docstring.
    """

    layout: PackedLayout
    key_heads: int
    heads: int
    per_channel: bool
    key_index: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    value_index: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    value_scale: Mapping[int, Sequence[Sequence[float]]] = field(default_factory=dict)
    model: str = "a model"
    digest: str = ""

    @property
    def by_block(self) -> bool:
        """Whether anything depends on the block, so that entry points take its number."""
        return bool(self.key_index or self.value_index or self.value_scale)

    def __post_init__(self) -> None:
        if self.heads % self.key_heads or self.layout.key_dim > 256:
            raise NumericError(
                f"no module for {self.heads} value heads on {self.key_heads} key heads of "
                f"{self.layout.key_dim} channels",
                expected="whole bundles and at most 256 channels",
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A top-level definition of a source module: its lines, and the names it defines and uses."""

    module: str
    names: tuple[str, ...]
    text: str
    uses: frozenset[str]


def emit(spec: StepSpec) -> str:
    """Source text of the module; equal input gives equal text.

    Raises:
        NumericError: the plan's dimensions do not fit an index of bytes.
    """
    sources = _sources()
    pieces = {module: list(_pieces(module)) for module in sources}
    origins = {module: _imported(module) for module in sources}
    roots: list[Name] = [
        ("kernels.update", "packed_step"),
        ("kernels.update", "check_step"),
        ("kernels.update", "backend_reason"),
        ("kernels.update", "_reference_step"),
        ("kernels.triton_update", "packed_step"),
    ]
    fragment = spec.layout.order == "fragment"
    if fragment:
        roots.append(("kernels.gluon_update", "packed_step"))
    wanted = _closure(roots, pieces, origins)
    renamed = _renames(wanted)
    parts: list[str] = []
    for module in sources:
        kept = [p for p in pieces[module] if any((module, n) in wanted for n in p.names)]
        if not kept:
            continue
        parts.append(f"# --- from hybridstate/{module.replace('.', '/')}.py\n")
        scope = {
            name: renamed[target]
            for name, target in _scope(module, pieces, origins).items()
            if target in renamed
        }
        parts += [_SUBSTITUTES.get(p.names[0]) or _rename(p.text, scope) for p in kept]
    body = _spaced(part.strip("\n") for part in parts)
    entry = _entry(spec, gluon=fragment)
    head = _preamble(spec, f"{body}\n{entry}", gluon=fragment).rstrip("\n")
    return f"{head}\n\n\n{body}\n\n\n{entry}"


def _spaced(parts: Iterable[str]) -> str:
    """Two blank lines around functions and classes, one elsewhere."""
    text, long_before = "", False
    for part in parts:
        long = part.startswith(("def ", "class ", "@", "if "))
        text += ("\n\n\n" if long or long_before else "\n\n") * bool(text) + part
        long_before = long
    return text


def _sources() -> tuple[str, ...]:
    """Modules that definitions are taken from, each behind those that it imports."""
    found: list[str] = []

    def visit(module: str) -> None:
        if module in found or module in _OUTSIDE:
            return
        for other in sorted({origin for origin, _ in _imported(module).values()}):
            visit(other)
        found.append(module)

    for module in _ROOT_MODULES:
        visit(module)
    return tuple(found)


def _read(module: str) -> str:
    parts = module.split(".")
    parts[-1] += ".py"
    return files("hybridstate").joinpath(*parts).read_text(encoding="utf-8")


def _pieces(module: str) -> Iterator[_Piece]:
    """Top-level definitions in order, each with its decorators, leading comment and trailing text."""
    source = _read(module)
    lines = source.splitlines(keepends=True)
    body = [n for n in ast.parse(source).body if not isinstance(n, ast.Import | ast.ImportFrom)]
    for position, node in enumerate(body):
        names = tuple(_defined(node))
        if not names:
            continue
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(d.lineno for d in decorators)]) - 1
        while start and lines[start - 1].startswith("#"):
            start -= 1
        end = node.end_lineno or node.lineno
        if position + 1 < len(body):
            after = body[position + 1]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                end = after.end_lineno or end  # the text below a constant
        uses = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        yield _Piece(module, names, "".join(lines[start:end]), frozenset(uses))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (t.id for t in node.targets if isinstance(t, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.If):
        for inner in node.body:
            yield from _defined(inner)


def _imported(module: str) -> dict[str, Name]:
    """Names that a module takes from another of the sources."""
    return {
        alias.name: (node.module.removeprefix(_PACKAGE), alias.name)
        for node in ast.parse(_read(module)).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(_PACKAGE)
        for alias in node.names
    }


def _scope(
    module: str, pieces: Mapping[str, Sequence[_Piece]], origins: Mapping[str, Mapping[str, Name]]
) -> dict[str, Name]:
    own = {name: (module, name) for piece in pieces[module] for name in piece.names}
    return {**origins[module], **own}


def _closure(
    roots: Sequence[Name],
    pieces: Mapping[str, Sequence[_Piece]],
    origins: Mapping[str, Mapping[str, Name]],
) -> set[Name]:
    """Everything the roots need, through the modules they import from."""
    todo, wanted = list(roots), set(roots)
    while todo:
        module, name = todo.pop()
        if module not in pieces:
            continue
        scope = _scope(module, pieces, origins)
        for piece in pieces[module]:
            if name not in piece.names:
                continue
            for used in piece.uses:
                target = scope.get(used)
                if used not in _REPLACED and target is not None and target not in wanted:
                    wanted.add(target)
                    todo.append(target)
    return wanted


def _renames(wanted: set[Name]) -> dict[Name, str]:
    """New names where two modules use one."""
    names = [name for _, name in wanted]
    return {
        (module, name): ("_" if name.startswith("_") else "")
        + _PREFIXES[module]
        + name.lstrip("_").lower()
        if not name.isupper()
        else _PREFIXES[module].upper() + name
        for module, name in wanted
        if names.count(name) > 1 and module in _PREFIXES
    }


def _rename(text: str, names: Mapping[str, str]) -> str:
    """Replace identifiers (never attributes) and their mention in backticks."""
    if not names:
        return text
    lines = text.splitlines(keepends=True)
    found = []
    previous = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in names and previous != ".":
            found.append((token.start, token.string))
        previous = token.string
    for (row, column), old in reversed(found):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + names[old] + line[column + len(old) :]
    result = "".join(lines)
    for old, new in names.items():
        result = result.replace(f"`{old}`", f"`{new}`")
    return result


def _preamble(spec: StepSpec, body: str, *, gluon: bool) -> str:
    """Docstring, imports and the two errors."""
    layout = spec.layout
    gate = "one decay per key channel (KDA)" if spec.per_channel else "one decay per head (GDN)"
    order = (
        "The weights do not carry the key order: the kernel reads q, k and decays through the block's index."
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
    return f'''"""Fused decode step on packed recurrent states, specialised to the plan of {spec.model}.

State of one head: {layout.key_dim} x {layout.value_dim}, {layout.k_hi} FP16 key rows, the rest INT8 with one FP32
scale per {layout.group} value columns; {layout.head_bytes:,} bytes, {layout.bits_per_value:.3f} bits per value.
{spec.heads} value heads on {spec.key_heads} key heads, {gate}.
Layout {layout.layout_id}.
{order}

Entry points: `allocate`, `store`, `load`, `decode_step`. `python {MODULE_FILE} --check` compares the
kernel with the reference below. Needs torch and triton, nothing else. Written by
`hybridstate export-plan --kernels` from the package's own sources: do not edit, export again.
Plan {spec.digest[:16] or "unnamed"}.
"""

{imports}

import torch
from torch import Tensor

{_template("emit_triton.py.txt").replace("@GLUON@", _GLUON_IMPORTS if gluon else "").rstrip()}
{_ABSENT_GLUON if gluon else ""}{error}'''


def _entry(spec: StepSpec, *, gluon: bool) -> str:
    layout = spec.layout
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
    }
    text = _template("emit_entry.py.txt")
    text = _choose(text, "gluon", gluon)
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
