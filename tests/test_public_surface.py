"""What users import: the listed names, all of them, typed, without loading a library."""

import inspect
import subprocess
import sys
from importlib.resources import files

import hybridstate
from hybridstate import errors

VERBS = {
    "analyze",
    "bench_codecs",
    "bench_decode",
    "bench_exchange",
    "bench_quality",
    "bench_restore",
    "bench_serve",
    "bench_simulate",
    "bench_update",
    "calibrate",
    "export_plan",
    "inspect",
    "validate_horizons",
    "verify",
}


def test_every_listed_name_is_importable_and_documented() -> None:
    for name in hybridstate.__all__:
        value = getattr(hybridstate, name)
        assert name == "__version__" or inspect.getdoc(value), f"{name} has no docstring"


def test_the_list_is_the_verbs_and_the_errors() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.HybridStateError)
    }
    assert set(hybridstate.__all__) == VERBS | tree | {"__version__"}
    assert set(dir(hybridstate)) == set(hybridstate.__all__)


def test_verbs_are_annotated_throughout() -> None:
    for name in VERBS:
        signature = inspect.signature(getattr(hybridstate, name))
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}({parameter.name})"


def test_exit_codes_differ_and_are_documented() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.HybridStateError)
    ]
    codes = [cls.exit_code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert len({cls.code for cls in classes}) == len(classes)


def test_importing_the_package_loads_none_of_its_libraries() -> None:
    code = "import sys, hybridstate; print(sorted({'numpy', 'torch', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_type_information_is_shipped() -> None:
    assert (files("hybridstate") / "py.typed").is_file()
