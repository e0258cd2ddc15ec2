"""Compile the kernels of an emitted module for sm_90 without a GPU: `emitted_offline.py MODULE`."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.compile_offline import MATRIX, NATURAL, PLAIN, compile_one


def load(path: Path) -> Any:
    """The module in `path`, under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Both kernels of a 128 x 128 module; exit code 1 if one spills."""
    module = load(Path(sys.argv[1]))
    layout = module.LAYOUT
    heads = PLAIN | {"H": module.HEADS, "HK": module.KEY_HEADS, "KDA": module.PER_CHANNEL}
    plain = heads | NATURAL | {"KHI": layout.k_hi, "HEAD_BYTES": layout.head_bytes}
    matrix = heads | MATRIX | {"HIGH": layout.k_hi // 16}
    fine = [
        compile_one(GluonASTSource, module.gluon_packed_kernel, matrix),
        compile_one(ASTSource, module.triton_packed_kernel, plain),
    ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
