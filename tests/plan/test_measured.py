"""A cutoff taken from measurements: the largest that passes, the same masks, the same checkpoint, kept in the plan."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from hybridstate import api
from hybridstate.cli.main import app
from hybridstate.errors import PlanMismatch, SourceError, UsageError
from hybridstate.plan.measured import read_measured
from hybridstate.plan.schema import PlanDocument, to_content
from hybridstate.plan.store import read_plan

KL = {16: 0.001, 64: 0.02, 128: 0.004, 512: 0.3}
"""Not monotone: 64 is worse than 128."""


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def recorded(tiny_kda: Path, tmp_path: Path) -> Callable[..., Path]:
    """`recorded(**changes)` writes what `bench restore` would have, masks and digests of the real analysis."""

    def write(**changes: Any) -> Path:
        analysis = api.analyze(
            tiny_kda, w_max=tuple(KL), gate_input=changes.pop("gate_input", None)
        )
        arms: list[dict[str, Any]] = [
            {"arm": "dense", "policy": "dense", "seed": None, "w_max": None}
        ]
        for cutoff in analysis.cutoffs:
            w_max = cutoff.selection.w_max
            for policy, seed, factor in (("nr", None, 1.0), ("wr", None, 0.1), ("nr", 1234, 0.0)):
                kl = KL[w_max] * factor
                arms.append(
                    {
                        "arm": f"{policy}-{w_max}",
                        "policy": policy,
                        "seed": seed,
                        "w_max": w_max,
                        "prose": {"kl": kl, "kl_se": kl / 10, "cases": 16},
                        "checkpoint_bytes": cutoff.accounting.ragged_bytes,
                        "mask_digest": cutoff.selection.mask_digest,
                    }
                )
        result = {
            "model_digests": analysis.source.digests,
            "device": {"name": "a device"},
            "protocol": {"dtype": "float32", "tokens": 1024},
            "arms": arms,
        } | changes
        file = tmp_path / "restore.json"
        file.write_text(json.dumps({"command": "bench restore", "result": result}))
        return file

    return write


@pytest.mark.parametrize(
    ("max_kl", "load", "chosen"),
    [
        (0.001, "nr", 16),
        (0.005, "nr", 128),
        (0.5, "nr", 512),
        (0.005, "wr", 128),
        (0.03, "wr", 512),
    ],
)
def test_the_largest_cutoff_that_passes_is_taken_and_kept(
    tiny_kda: Path,
    recorded: Callable[..., Path],
    tmp_path: Path,
    max_kl: float,
    load: str,
    chosen: int,
) -> None:
    out = tmp_path / "plan"
    found = run(
        *("export-plan", tiny_kda, "--w-max", "auto", "--max-kl", max_kl, "--load", load),
        *("--measured", recorded(), "-o", out, "--json"),
    )
    assert found.exit_code == 0, found.output
    selection = read_plan(out).document.selection
    assert selection is not None
    assert selection.w_max == chosen
    measured = selection.measured
    assert measured is not None
    assert (measured.policy, measured.max_kl, measured.source) == (load, max_kl, "restore.json")
    factor = 1.0 if load == "nr" else 0.1
    assert {c.w_max: c.kl for c in measured.cutoffs} == {w: kl * factor for w, kl in KL.items()}
    assert [c.passed for c in measured.cutoffs] == [c.kl <= max_kl for c in measured.cutoffs]
    assert run("plan", "validate", out).exit_code == 0
    assert (
        f"within {max_kl:g} nats per token ({load}, restore.json" in run("plan", "show", out).stdout
    )


def test_no_cutoff_passes(tiny_kda: Path, recorded: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"no tested cutoff.*closest is W_max 16 with 0.001"):
        export(tiny_kda, recorded(), 0.0001)
    with pytest.raises(UsageError, match="takes a number from 0 on"):
        export(tiny_kda, recorded(), float("nan"))


def export(model: Path, file: Path, max_kl: float, **options: Any) -> Any:
    return api.export_plan(
        model,
        out=file.parent / "plan",
        w_max="auto",
        max_kl=max_kl,
        measured_from=file,
        dry_run=True,
        **options,
    )


def test_measurements_of_another_checkpoint_or_mask_are_refused(
    tiny_kda: Path, tiny_gdn: Path, recorded: Callable[..., Path]
) -> None:
    with pytest.raises(PlanMismatch, match=r"measured on another checkpoint: config digest"):
        export(tiny_gdn, recorded(), 1.0)
    file = recorded(gate_input=1.5)
    with pytest.raises(PlanMismatch, match=r"at W_max 512 other units were measured") as caught:
        export(tiny_kda, file, 1.0)
    assert "--gate-input" in str(caught.value.hint)
    assert export(tiny_kda, file, 1.0, gate_input=1.5).plan.document.selection.w_max == 512


@pytest.mark.parametrize(
    "changes",
    [{"model_digests": None}, {"arms": []}, {"arms": [{"policy": "nr"}]}, {"protocol": {}}],
)
def test_a_recording_without_what_is_needed_is_refused(
    recorded: Callable[..., Path], changes: dict[str, Any]
) -> None:
    file = recorded(**changes)
    with pytest.raises(SourceError, match="no measurements of bench restore"):
        read_measured(file, {})
    with pytest.raises(SourceError, match=r"^no file .*absent$"):
        read_measured(file.parent / "absent", {})
    with pytest.raises(UsageError, match="takes nr or wr, found 'dense'"):
        read_measured(file, {}, policy="dense")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("w_max", 10**400),
        ("w_max", "64"),
        ("w_max", True),
        ("w_max", -5),
        ("checkpoint_bytes", float("inf")),
        ("kl", 10**400),
        ("kl", -1.0),
        ("kl_se", float("nan")),
        ("kl_se", float("inf")),
        ("cases", 0),
        ("cases", 1e999),
    ],
)
def test_edited_numbers_are_told_with_their_file(
    recorded: Callable[..., Path], where: str, value: Any
) -> None:
    file = recorded()
    document = json.loads(file.read_text())
    for arm in document["result"]["arms"][1:]:
        (arm["prose"] if where in arm["prose"] else arm)[where] = value
    file.write_text(json.dumps(document))
    with pytest.raises((SourceError, UsageError), match=r"restore\.json"):
        read_measured(file, document["result"]["model_digests"]).choose(0.1)


def test_a_cutoff_that_occurs_twice_is_refused(recorded: Callable[..., Path]) -> None:
    file = recorded()
    document = json.loads(file.read_text())
    document["result"]["arms"] *= 2
    file.write_text(json.dumps(document))
    with pytest.raises(SourceError, match=r"restore\.json.*occur twice"):
        read_measured(file, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--w-max", "auto"), "needs a bound and the measurements"),
        (("--w-max", "auto", "--max-kl", "1"), "needs a bound and the measurements"),
        (("--w-max", "64", "--max-kl", "1"), "choose a cutoff"),
        (("--w-max", "many"), "a whole number or auto, found 'many'"),
        (("--w-max", "64", "--w-max", "512"), "one cutoff, found --w-max 64 and 512"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tiny_kda: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    found = run("export-plan", tiny_kda, *options, "-o", tmp_path / "plan")
    assert found.exit_code == 2
    assert message in found.stderr


def test_a_plan_cannot_claim_another_cutoff(tiny_kda: Path, recorded: Callable[..., Path]) -> None:
    document = export(tiny_kda, recorded(), 0.005).plan.document
    content = to_content(document)
    assert content["schema_version"] == 2

    def refused(message: str, change: Callable[[dict[str, Any]], None]) -> None:
        changed = json.loads(json.dumps(content))
        change(changed)
        with pytest.raises(ValidationError, match=message):
            PlanDocument.model_validate_json(json.dumps(changed))

    refused("not the largest measured cutoff", lambda c: c["selection"].update(w_max=16))
    measured = ("selection", "measured")
    refused(
        "passed contradicts",
        lambda c: c[measured[0]][measured[1]]["cutoffs"][3].update(passed=True),
    )
    refused("must ascend", lambda c: c[measured[0]][measured[1]]["cutoffs"].reverse())
    refused("needs schema_version 2", lambda c: c.update(schema_version=1))


def test_bench_restore_records_what_export_plan_needs(tiny_gdn: Path, tmp_path: Path) -> None:
    """The whole way, with a gate input of one's own: measure, choose, keep."""
    file = tmp_path / "restore.json"
    options = ("--tasks", "counts", "--questions", 2, "--tokens", 256, "--seeds", 0)
    gate = ("--gate-input", 0.4)
    found = run(
        *("bench", "restore", tiny_gdn, "--w-max", 16, "--w-max", 64, *gate, *options),
        *("--repeats", 1, "--device", "cpu", "-o", file, "--quiet"),
    )
    assert found.exit_code == 0, found.output
    auto = ("--w-max", "auto", "--max-kl", 100, "--measured", file, "-o", tmp_path / "plan")
    made = run("export-plan", tiny_gdn, *auto, *gate)
    assert made.exit_code == 0, made.output
    document = read_plan(tmp_path / "plan").document
    assert document.selection is not None
    assert document.selection.w_max == 64
    assert document.selection.measured is not None
    assert (
        document.selection.measured.device
        == json.loads(file.read_text())["result"]["device"]["name"]
    )
