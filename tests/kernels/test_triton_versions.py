"""The installed Triton against its record; other versions by `make test-triton`, which needs the network."""

import json
from importlib.metadata import version as installed

import pytest

from tests.kernels.triton_versions.record import RECORD, VERSIONS, compiled, problems

RECORDS = json.loads(RECORD.read_text())


def test_the_installed_version_compiles_every_transfer_as_recorded() -> None:
    pytest.importorskip("triton")
    version = installed("triton").split("+")[0]
    same = [x for x in RECORDS if x.split(".")[:2] == version.split(".")[:2]]
    known = RECORDS.get(version) or (RECORDS[same[-1]] if same else {})
    found = compiled(None, "--own")
    assert problems(found, known) == []
    assert all("registers" in kernel for kernel in found.values())


def test_every_supported_version_is_recorded_and_below_3_6_the_plain_kernel_is_selected() -> None:
    assert set(RECORDS) == set(VERSIONS)
    for version, kernels in RECORDS.items():
        assert problems(kernels, kernels) == [], version
        gluon = "absent" if version < "3.6" else "loads"
        assert kernels["selection"]["gluon"] == gluon
        assert kernels["selection"]["plain"] == "loads"
        matrix = {name: x for name, x in kernels.items() if name.startswith("update gluon")}
        assert matrix
        assert all(("absent" in x) == (gluon == "absent") for x in matrix.values()), version
        assert all(
            "registers" in x for name, x in kernels.items() if name.startswith("update triton")
        )


def test_worse_results_are_problems() -> None:
    known = {"a": {"registers": 100, "instructions": 10, "stack": 0, "loads_128": 2}}
    assert problems(known, known) == []
    for change, word in (
        ({"registers": 120}, "registers"),
        ({"stack": 8}, "spills"),
        ({"loads_128": 1}, "loads_128"),
        ({"failed": "no"}, "no"),
    ):
        (line,) = problems({"a": known["a"] | change}, known)
        assert word in line
