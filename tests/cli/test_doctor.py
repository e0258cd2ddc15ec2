"""`hybridstate doctor` on the Hub: where models come from and are kept, and never the token."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hybridstate.cli import doctor
from hybridstate.cli.main import app
from hybridstate.provenance import environment

TOKEN = "hf_" + "z" * 30


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_doctor_tells_of_a_login_and_keeps_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "hybridstate" / "org--model").mkdir(parents=True)
    (tmp_path / "hybridstate" / "org--model" / "part").write_bytes(bytes(123))
    ran = CliRunner().invoke(app, ["doctor", *options])
    assert ran.exit_code == 0
    assert TOKEN not in ran.output
    assert str(tmp_path / "hybridstate") in ran.output
    if options:
        found = json.loads(ran.stdout)["result"]["hub"]
        assert (found["logged_in"], found["offline"], found["cached_bytes"]) == (True, True, 123)


def test_doctor_says_which_kernel_fits_each_size_and_why() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--json"])
    device = json.loads(ran.stdout)["result"]["device"]
    assert (
        device["kernels_reason"].startswith(device["kernels"])
        or "passed" in device["kernels_reason"]
    )
    dims = {(d["key_dim"], d["value_dim"]): d for d in device["kernel_dims"]}
    assert dims[96, 192]["matrix_kernel"]
    assert not dims[256, 512]["matrix_kernel"]
    assert "outside 64 to 256" in dims[256, 512]["why"]
    assert set(device["prefill"]) == {"GDN", "KDA"}
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "prefill of 128 x 128 states" in text
    assert "256 x 512 is outside 64 to 256" in text
    assert dims[192, 128]["matrix_kernel"]
    assert dims[128, 96]["matrix_kernel"]
    if device["kernels"] == "reference":
        here = f"GPU the reference runs ({device['kernels_reason']})"
        here = here if device["gpus"] else "CPU the reference runs"
        assert f"the table is for a GPU with both kernels; on this {here}\n" in text
        assert "decode kernels: none, the torch reference runs" in text


def test_doctor_names_what_runs_instead_of_the_matrix_kernel() -> None:
    note = doctor._kernel_note
    assert note("gluon", "tests passed", gpu=True) == "chosen here for 128 x 128: tests passed"
    assert note("triton", "no Gluon", gpu=True).endswith("triton runs instead of the matrix kernel")
    table = "the table is for a GPU with both kernels; on this"
    reason = "gluon: no Triton; reference: what is left"
    assert note("reference", reason, gpu=True) == f"{table} GPU the reference runs ({reason})"
    assert note("reference", "not on cpu", gpu=False) == f"{table} CPU the reference runs"


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="names of GPUs and of drivers have any length"
)
def test_doctor_stays_within_80_columns_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/c")
    monkeypatch.delenv("COLUMNS", raising=False)
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    for name in ("fla_core", "flash_linear_attention"):
        found = next(
            line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith(name)
        )
        assert found == (environment()[name] or "not installed (optional)")
