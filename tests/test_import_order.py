"""The package's shape: data flows one way, light commands stay light, printing has one place.

The sources are parsed, not imported, so a broken module cannot hide another one's fault.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hybridstate"

RANKS = {
    "errors": 0,
    "defaults": 0,
    "provenance": 1,
    "families": 2,
    "checkpoint": 3,
    "kernels": 3,  # knows tensors only, so quant, trajectories and runtime build on its reference
    "horizons": 4,
    "trajectories": 5,
    "quant": 6,
    "plan": 7,
    "weights": 8,
    "runtime": 9,
    "quality": 10,
    "bench": 11,
    "figures": 11,
    "report": 12,
    "api": 13,
    "cli": 14,
    "__main__": 15,
    "__init__": 15,  # resolves the public names from api on first use
}
DATA_FOLDERS = {"models", "prompts"}

HEAVY = {"torch", "transformers", "matplotlib", "triton"}
MAY_IMPORT_TORCH = {"kernels", "trajectories", "quant", "weights", "runtime", "quality", "bench"}
MAY_IMPORT_TRITON = {"kernels"}
LIGHT_ROOTS = (
    "errors",
    "defaults",
    "provenance",
    "families",
    "checkpoint",
    "horizons.static",
    "plan",
    "quality.tasks",
    "figures",
    "report",
    "api",
    "cli",
    "__init__",
    "__main__",
)
"""What `--help`, `analyze` and `plan` import: none of it may pull in a heavy library."""

MAX_LINES = 450
VAGUE_NAMES = {"utils", "common", "helpers", "manager", "base", "core", "misc"}


@dataclass(frozen=True)
class Import:
    """One imported name: dotted target, line, and whether it runs when the module is imported."""

    target: str
    line: int
    at_import: bool


def modules() -> dict[str, Path]:
    """Dotted name below `hybridstate` -> source file; a package is named by its folder."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if len(parts) > 1 and parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    return module.split(".")[0]


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(nodes: list[ast.stmt], at_import: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in nodes:
        yield node, at_import
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        runs = at_import and not inside_function and not is_type_checking(node)
        for field in ("body", "orelse", "finalbody"):
            yield from walk(getattr(node, field, []), runs)
        for handler in getattr(node, "handlers", []):
            yield from walk(handler.body, runs)


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Every import of a module; `from hybridstate.a import b` counts as a.b where that is a module."""
    path = MODULES[module]
    found = []
    for node, at_import in walk(ast.parse(path.read_text()).body, at_import=True):
        if isinstance(node, ast.Import):
            found += [Import(a.name, node.lineno, at_import) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            source = node.module or ""
            for alias in node.names:
                dotted = f"{source}.{alias.name}"
                ours = dotted.removeprefix("hybridstate.")
                target = dotted if source.startswith("hybridstate") and ours in MODULES else source
                found.append(Import(target, node.lineno, at_import))
    return tuple(found)


def own(target: str) -> str | None:
    """The module of ours that an import reaches, or None for another library."""
    if target == "hybridstate":
        return "__init__"
    if not target.startswith("hybridstate."):
        return None
    return target.removeprefix("hybridstate.")


def load_path(module: str) -> Iterator[tuple[str, Import]]:
    """All imports that run when `module` is imported, through modules of ours and their packages."""
    todo, seen = [module], {module}
    while todo:
        current = todo.pop()
        for entry in imports(current):
            if not entry.at_import:
                continue
            yield current, entry
            target = own(entry.target)
            if target is None:
                continue
            parts = target.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name in MODULES and name not in seen:
                    seen.add(name)
                    todo.append(name)


def test_every_room_has_a_rank_and_a_line_in_the_docs() -> None:
    rooms = {room(module) for module in MODULES} - DATA_FOLDERS
    assert rooms <= set(RANKS), f"give {sorted(rooms - set(RANKS))} a rank"
    page = (PACKAGE.parent / "docs" / "structure.md").read_text()
    for name in rooms - {"__init__", "__main__"}:
        assert f"| `{name}" in page, f"{name} has no line in docs/structure.md"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_downwards(module: str) -> None:
    mine = RANKS[room(module)]
    for entry in imports(module):
        target = own(entry.target)
        if target is None or target == "__init__" or room(target) == room(module):
            continue
        assert RANKS[room(target)] < mine, (
            f"{MODULES[module]}:{entry.line}: {room(module)} (rank {mine}) imports {target} "
            f"(rank {RANKS[room(target)]}); a module imports lower ranks or its own package"
        )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_libraries_are_imported_where_they_may_be(module: str) -> None:
    allowed = set()
    if room(module) in MAY_IMPORT_TORCH:
        allowed.add("torch")
    if room(module) in MAY_IMPORT_TRITON:
        allowed.add("triton")
    for entry in imports(module):
        library = entry.target.split(".")[0]
        assert library != "click", f"{MODULES[module]}:{entry.line}: typer's public names only"
        if entry.at_import and library in HEAVY:
            assert library in allowed, (
                f"{MODULES[module]}:{entry.line}: {library} at module level; import it in the function"
            )


@pytest.mark.parametrize(
    "module",
    [m for m in sorted(MODULES) if any(m == r or m.startswith(r + ".") for r in LIGHT_ROOTS)],
)
def test_light_modules_load_no_heavy_library_through_others(module: str) -> None:
    for source, entry in load_path(module):
        assert entry.target.split(".")[0] not in HEAVY, (
            f"importing {module} loads {entry.target} by {MODULES[source]}:{entry.line}"
        )


def test_printing_has_one_place() -> None:
    for module, path in MODULES.items():
        if module == "cli.output":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", (
                    f"{path}:{node.lineno}: print belongs in cli/output.py"
                )


def test_modules_are_short_and_named_after_what_they_own() -> None:
    for module, path in MODULES.items():
        lines = len(path.read_text().splitlines())
        assert lines < MAX_LINES, f"{path} has {lines} lines; find the second room in it"
        assert not VAGUE_NAMES & set(module.split(".")), f"{path}: the name says nothing"
