"""Cut definitions out of this package's sources, with everything that they name, into one text.

A definition is a top-level function, class or constant. Where two modules define one name, that of a module in
`PREFIXES` gets its prefix, in its definition and wherever it is used.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

PREFIXES: Final = {
    "kernels.triton_update": "triton_",
    "kernels.gluon_update": "gluon_",
    "kernels.ring_triton": "triton_",
    "kernels.gluon_ring": "gluon_",
    "kernels.ring_reference": "reference_",
}
"""What goes before a name that two of the modules define."""

_PACKAGE: Final = "hybridstate."

_OUTSIDE: Final = frozenset({"errors"})
"""Modules whose definitions the preamble replaces."""

_REPLACED: Final = frozenset(
    {"runner", "functions", "NumericError", "MissingRequirement", "DenseLayout"}
)
"""Names that the template or the preamble defines in their place."""

_SUBSTITUTES: Final = {"Layout": "Layout = PackedLayout\n"}
"""Definitions that say something narrower in the module."""

Name = tuple[str, str]
"""A definition: module and name in it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A top-level definition of a source module: its lines, and the names it defines and uses."""

    module: str
    names: tuple[str, ...]
    text: str
    uses: frozenset[str]


def cut(roots: Sequence[Name]) -> str:
    """The roots and everything they need, module by module, each behind those that it imports.

    Args:
        roots: definitions to start from; modules in the order in which they should come.
    """
    modules = sources(module for module, _ in roots)
    pieces = {module: list(_pieces(module)) for module in modules}
    origins = {module: _imported(module) for module in modules}
    wanted = _closure(roots, pieces, origins)
    renamed = _renames(wanted)
    parts: list[str] = []
    for module in modules:
        kept = [p for p in pieces[module] if any((module, n) in wanted for n in p.names)]
        if not kept:
            continue
        parts.append(f"# --- from hybridstate/{module.replace('.', '/')}.py\n")
        scope = {
            name: renamed.get(target, target[1])
            for name, target in _scope(module, pieces, origins).items()
            if target in wanted and renamed.get(target, target[1]) != name
        }
        parts += [_SUBSTITUTES.get(p.names[0]) or _rename(p.text, scope) for p in kept]
    return _spaced(part.strip("\n") for part in parts)


def sources(roots: Iterable[str]) -> tuple[str, ...]:
    """Modules that definitions are taken from, each behind those that it imports."""
    found: list[str] = []

    def visit(module: str) -> None:
        if module in found or module in _OUTSIDE:
            return
        for other in sorted({origin for origin, _ in _imported(module).values()}):
            visit(other)
        found.append(module)

    for module in roots:
        visit(module)
    return tuple(found)


def _spaced(parts: Iterable[str]) -> str:
    """Two blank lines around functions and classes, one elsewhere."""
    text, long_before = "", False
    for part in parts:
        long = part.startswith(("def ", "class ", "@", "if "))
        text += ("\n\n\n" if long or long_before else "\n\n") * bool(text) + part
        long_before = long
    return text


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


def definitions(source: str) -> list[str]:
    """Names that a source text defines at its top, in order."""
    return [name for node in ast.parse(source).body for name in _defined(node)]


def _imported(module: str) -> dict[str, Name]:
    """Names that a module takes from another of the sources."""
    return {
        alias.asname or alias.name: (node.module.removeprefix(_PACKAGE), alias.name)
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
        + PREFIXES[module]
        + name.lstrip("_").lower()
        if not name.isupper()
        else PREFIXES[module].upper() + name
        for module, name in wanted
        if names.count(name) > 1 and module in PREFIXES
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
