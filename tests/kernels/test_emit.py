"""The emitted module stands alone, is the package's own code, and computes the same bits."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.kernels import emit, emit_cut, fusion, update
from hybridstate.kernels.emit import MODULE_FILE, StepSpec
from hybridstate.kernels.layout import PackedLayout
from tests.kernels.cases import Case, draw
from tests.kernels.emitted_offline import load

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]
OWN = {"runner", "key_index", "allocate", "store", "load", "decode_step", "run_checks", "main"}
OWN |= {"_check_packing", "NumericError", "MissingRequirement"}
OWN |= {"value_index", "value_scale", "_table", "_check_tables"}
"""Definitions that only the module has: its entry points and its two errors."""
ROOTS = [module for module, _ in emit._step_roots(True) + emit._ring_roots(True)]
SOURCES = {name: importlib.import_module(f"hybridstate.{name}") for name in emit_cut.sources(ROOTS)}

PLANS = {
    "gdn": StepSpec(PackedLayout(128, 128, 16), 2, 4, per_channel=False, model="some-gdn"),
    "kda": StepSpec(PackedLayout(24, 40, 16), 4, 4, per_channel=True, digest="ab" * 32),
    "index": StepSpec(
        PackedLayout(16, 12, 4),
        2,
        4,
        per_channel=True,
        key_index={
            i: [torch.randperm(16, generator=torch.Generator().manual_seed(9 * i + h)).tolist()
                for h in range(4)]
            for i in (0, 2)
        },
    ),
    "scaled": StepSpec(
        PackedLayout(32, 40, 16), 2, 4, per_channel=False,
        value_scale={i: [[0.5 + (7 * v + h + i) % 11 / 8 for v in range(40)] for h in range(4)] for i in (0, 2)},
    ),
    "all": StepSpec(
        PackedLayout(16, 12, 4), 2, 4, per_channel=True,
        key_index={i: [[(5 * k + h + i) % 16 for k in range(16)] for h in range(4)] for i in (0, 2)},
        value_index={i: [[(5 * v + h + i) % 12 for v in range(12)] for h in range(4)] for i in (0, 2)},
        value_scale={i: [[0.5 + (v + h) % 5 for v in range(12)] for h in range(4)] for i in (0, 2)},
    ),
}  # fmt: skip


@pytest.fixture(params=PLANS)
def emitted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StepSpec, Path]:
    path = tmp_path / MODULE_FILE
    path.write_text(emit.emit(PLANS[request.param]))
    return PLANS[request.param], path


def execute(path: Path, *, interpret: bool) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    return subprocess.run(
        [sys.executable, path.name, "--check", "--device", "cpu"],
        env=environment, cwd=path.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip


def definitions(source: str) -> dict[str, ast.stmt]:
    return {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def assert_stands_alone(path: Path) -> None:
    """It imports torch and triton alone, is formatted, and free of undefined names."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    assert found - set(sys.stdlib_module_names) == {"torch", "triton"}
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        ["check", "--isolated", "--select", "F,E9,I", str(path)],
        ["format", "--isolated", "--check", "--line-length", "100", str(path)],
    ):
        done = subprocess.run([*ruff, *command], capture_output=True, text=True, check=False)
        if "No module named" in done.stderr:
            pytest.skip("ruff is not installed")
        assert done.returncode == 0, done.stdout + done.stderr


def _unprefixed(text: str) -> str:
    """Without the prefixes that tell names of two modules apart."""
    for prefix in emit_cut.PREFIXES.values():
        text = text.replace(f"'{prefix}", "'").replace(f"`{prefix}", "`")
        text = text.replace(f"'_{prefix}", "'_").replace(f"'{prefix.upper()}", "'")
    return text


def assert_own(path: Path, others: set[str]) -> set[str]:
    """Apart from renamed identifiers, functions and classes are equal to their source, node by node.

    Args:
        path: the module.
        others: definitions of its template.

    Returns:
        All its functions and classes.
    """
    found = definitions(path.read_text())
    sources = {name: definitions(Path(str(m.__file__)).read_text()) for name, m in SOURCES.items()}
    compared = 0
    for name, node in found.items():
        if name in others:
            continue
        originals = [
            _unprefixed(ast.dump(sources[place][own]))
            for place in sources
            for own in {name, name.replace(emit_cut.PREFIXES.get(place, ""), "", 1)}
            if own in sources[place]
        ]
        assert _unprefixed(ast.dump(node)) in originals, name
        compared += 1
    assert compared > 15
    return set(found)


def test_it_stands_alone(emitted: tuple[StepSpec, Path]) -> None:
    assert_stands_alone(emitted[1])


def test_every_definition_is_the_package_s_own(emitted: tuple[StepSpec, Path]) -> None:
    found = assert_own(emitted[1], OWN)
    assert "packed_step" in found
    assert ("gluon_packed_kernel" in found) is (emitted[0].layout.order == "fragment")


def test_check_on_a_cpu_says_that_the_kernel_did_not_run(emitted: tuple[StepSpec, Path]) -> None:
    done = execute(emitted[1], interpret=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not run: it needs a GPU, or TRITON_INTERPRET=1" in done.stdout
    assert ok(done.stdout, "reference")


def ok(output: str, title: str) -> bool:
    """Whether the check says of one thing that it is right."""
    return any(line.split() == [*title.split(), "ok"] for line in output.splitlines())


def test_check_in_the_interpreter_runs_the_kernel(emitted: tuple[StepSpec, Path]) -> None:
    done = execute(emitted[1], interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ok(done.stdout, "triton")
    assert ok(done.stdout, "triton, every block's tables") is emitted[0].by_block
    assert "not run" not in done.stdout


def test_the_reference_needs_torch_alone(emitted: tuple[StepSpec, Path]) -> None:
    absent = emitted[1].parent / "triton.py"
    absent.write_text('raise ImportError("absent")')
    done = execute(emitted[1], interpret=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ok(done.stdout, "reference")
    assert "not run: it needs a GPU" in done.stdout


def test_check_fails_on_a_wrong_kernel(tmp_path: Path) -> None:
    path = tmp_path / MODULE_FILE
    path.write_text(emit.emit(PLANS["kda"]))
    right = "delta = strength * (value / c - k_read * kn)"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, "delta = strength * (value / c + k_read * kn)"))
    done = execute(path, interpret=True)
    assert done.returncode == 1
    assert "error" in done.stdout


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_step_is_bit_equal_to_the_package(backend: str, emitted: tuple[StepSpec, Path]) -> None:
    if backend == "triton" and not INTERPRETED:
        pytest.skip("Triton's interpreter is off: a GPU is here")
    spec, path = emitted
    module = load(path)
    kind = "kda" if spec.per_channel else "gdn"
    case = Case("step", spec.layout, kind, spec.key_heads, spec.heads, batch=2, padding=True)
    inputs = draw(case)
    mine, theirs = inputs.on("cpu"), inputs.on("cpu")
    options: dict[str, Any] = {"block": 2} if spec.by_block else {}
    if spec.value_scale:
        del mine["value_scale"]  # the module's own
    out = module.decode_step(**mine, **options, backend=backend)
    extra: dict[str, Any] = {}
    if spec.key_index:
        index = torch.tensor(spec.key_index[2], dtype=torch.uint8)
        extra["fusion"] = fusion.StepFusion(key_index=index)
    if spec.value_scale:
        theirs["value_scale"] = torch.tensor(spec.value_scale[2])
    if spec.value_index:
        columns = torch.tensor(spec.value_index[2]).expand(2, -1, -1)
        theirs["v"] = theirs["v"].gather(2, columns)
    expected = update.packed_step(**theirs, **extra, layout=spec.layout, backend=backend)  # type: ignore[arg-type]
    if spec.value_index:
        expected = torch.empty_like(expected).scatter_(2, columns, expected)
    assert torch.equal(out, expected)
    assert torch.equal(mine["pool"], theirs["pool"])


def test_stored_states_come_back_in_model_order(emitted: tuple[StepSpec, Path]) -> None:
    spec, path = emitted
    module = load(path)
    options: dict[str, Any] = {"block": 0} if spec.by_block else {}
    shape = (2, spec.heads, spec.layout.key_dim, spec.layout.value_dim)
    states = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(3)).float()
    states[..., 0] = 127.0  # a whole number of steps in each group: nothing is rounded
    states[..., :: spec.layout.group] = 127.0
    if spec.value_scale:  # rounded in stored columns over c
        scale = torch.tensor(spec.value_scale[0])
        if spec.value_index:
            columns = torch.tensor(spec.value_index[0])
            scale = torch.empty_like(scale).scatter_(1, columns, scale)
        states = states * scale[:, None]
    pool = module.allocate(3, "cpu")
    slots = torch.tensor([2, 0])
    module.store(pool, slots, states, **options)
    torch.testing.assert_close(module.load(pool, slots, **options), states, rtol=1e-6, atol=1e-5)
    assert not pool[1].any()


def test_wrong_gate_shape_is_refused(emitted: tuple[StepSpec, Path]) -> None:
    spec, path = emitted
    module = load(path)
    other = "gdn" if spec.per_channel else "kda"
    arguments = draw(Case("gate", spec.layout, other, spec.key_heads, spec.heads)).on("cpu")
    options: dict[str, Any] = {"block": 0} if spec.by_block else {}
    if spec.value_scale:
        del arguments["value_scale"]
    with pytest.raises(module.NumericError, match="expected one decay per"):
        module.decode_step(**arguments, **options)


def test_equal_plans_give_equal_text() -> None:
    assert emit.emit(PLANS["index"]) == emit.emit(PLANS["index"])


def test_impossible_geometry_is_refused() -> None:
    with pytest.raises(NumericError, match="no module for 5 value heads"):
        StepSpec(PackedLayout(16, 16, 4), 2, 5, per_channel=False)


def test_kernels_of_the_module_compile_for_hopper(tmp_path: Path) -> None:
    """Offline, in a process whose Triton is not an interpreter; no GPU needed."""
    path = tmp_path / MODULE_FILE
    path.write_text(emit.emit(PLANS["gdn"]))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("emitted_offline.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gluon_packed_kernel" in done.stdout
