"""`hybridstate calibrate`: which key channels need FP16, and what every format costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridstate.cli.options import (
    Device,
    DryRun,
    Force,
    Json,
    LocalModel,
    LowerBound,
    OutputFolder,
    Quiet,
    Seed,
    check_device,
)
from hybridstate.cli.output import Output, command

if TYPE_CHECKING:
    from hybridstate.quality.calibration import Calibration


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "calibrate",
        short_help="Choose FP16 key channels on real trajectories, measure every format.",
        epilog="Example: hybridstate calibrate tiny-gdn -o calibration\n\n"
        "Example: hybridstate calibrate ./Qwen3.6-35B-A3B --profile paper --device cuda -o out",
    )(calibrate)


def calibrate(
    model: LocalModel,
    output: OutputFolder = None,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="quick|paper",
            help="quick: 9 prompts, minutes on a CPU. paper: 36 prompts, 4,096 tokens each.",
        ),
    ] = "quick",
    k_hi: Annotated[
        int | None,
        typer.Option(
            "--k-hi",
            metavar="N",
            help="FP16 key channels per head. [default: 16 of 128]",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats",
            metavar="LIST",
            help="Names and groups, comma-separated: default, formats, budgets, selectors, baselines, "
            "paper, all. [default: default]",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='JSONL of {"text": ..., "domain": ...} instead of the shipped texts.',
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="FLOAT",
            help="Of the reference text. [default: 1 for embedded models, else greedy]",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="auto|float32|bfloat16",
            help="Of the weights; auto is float32 on a CPU, bfloat16 on a GPU.",
        ),
    ] = "auto",
    lower_bound: LowerBound = None,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which key channels of the live state need FP16, and how far each format moves the model.

    Generates text with FP32 states, scores every key channel by its INT8 error and how long its
    decay keeps that error, then runs each format update by update on prompts left aside. With -o
    it writes calibration.json and calibration.safetensors for export-plan.
    """
    with command("calibrate", model=model, json=json, quiet=quiet) as out:
        from hybridstate.provenance import check_output_folder, environment
        from hybridstate.quant.catalogue import parse_list

        _check(temperature, seed)
        check_device(device)
        parse_list(formats)
        if output is not None:
            check_output_folder(output, force=force)
        if dry_run:
            _check_run(model, lower_bound, k_hi, formats, prompts, device, dtype)
            _dry_run(out, model, profile, formats, temperature, lower_bound, output)
            return
        from hybridstate import api
        from hybridstate.bench.timing import device_record

        found = api.calibrate(
            model,
            output,
            profile=profile,
            k_hi=k_hi,
            formats=formats,
            prompts=prompts,
            seed=seed,
            temperature=temperature,
            device=device,
            dtype=dtype,
            lower_bound=lower_bound,
            force=force,
            progress=out.progress,
        )
        for warning in found.warnings:
            out.warn(warning)
        _tables(out, found)
        result = found.to_json()
        hardware = device_record(result["versions"]["device"])
        result["provenance"] = environment(device=hardware["name"], hardware=hardware)
        if output is not None:
            names = ("calibration.json", "calibration.safetensors")
            result["written"] = [str(output / name) for name in names]
            out.note(f"wrote {' and '.join(names)} to {output}")
        out.result(result)


def _check(temperature: float | None, seed: int) -> None:
    import math

    from hybridstate.errors import UsageError

    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise UsageError(f"--temperature must be 0 or a positive number, found {temperature}")
    if seed < 0:
        raise UsageError(f"--seed must not be negative, found {seed}")


def _check_run(
    model: str,
    lower_bound: float | None,
    k_hi: int | None,
    formats: str | None,
    prompts: Path | None,
    device: str,
    dtype: str,
) -> None:
    """What a run would refuse, before its time is spent."""
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.quant.catalogue import parse_list
    from hybridstate.quant.risk import check_k_hi
    from hybridstate.trajectories.model import torch_device, torch_dtype
    from hybridstate.trajectories.prompts import read_texts

    torch_device(device)
    torch_dtype(dtype)
    spec = open_checkpoint(model, lower_bound=lower_bound, weights=True).spec
    check_k_hi(k_hi, spec)
    parse_list(formats, spec)
    if prompts is not None:
        read_texts(prompts)


def _dry_run(
    out: Output,
    model: str,
    profile: str,
    formats: str | None,
    temperature: float | None,
    lower_bound: float | None,
    folder: Path | None,
) -> None:
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.quant.calibration import estimate
    from hybridstate.quant.catalogue import parse_list
    from hybridstate.trajectories.protocol import protocol

    checkpoint = open_checkpoint(model, lower_bound=lower_bound, weights=True)
    settings = protocol(profile, temperature=temperature)
    plan = estimate(checkpoint, settings, formats=len(parse_list(formats)))
    out.table(
        f"{checkpoint.name}: would run profile {profile}",
        ("quantity", "value"),
        [(name.replace("_", " "), value) for name, value in plan.items()],
        note="trajectories are kept beside the output folder until it is written",
    )
    if folder is not None:
        out.text(f"would write calibration.json and calibration.safetensors to {folder}")
    out.result({"dry_run": True, "profile": profile, **plan})


def _tables(out: Output, found: "Calibration") -> None:
    document = found.document
    sequences, positions = document["validation_sequences"], document["validation_positions"]
    out.table(
        f"{document['model']['name']}: storage of the live state, requantised at every update",
        (
            "format",
            "bits",
            "KL",
            "+/-",
            "top-1 %",
            "state error",
            "perplexity",
            "risk J",
        ),
        [
            (
                row.format,
                _bits(row.bits_per_value, row.bits_per_value_with_ring),
                row.kl,
                row.kl_error,
                f"{100 * row.top1:.2f}",
                row.state_error,
                f"{row.perplexity_ratio:.4f}x",
                document["objective"].get(row.format),
            )
            for row in found.divergences
        ],
        note=f"{sequences} sequences of {positions:,} updates, teacher-forced on the FP32 text; KL in "
        "nats with its standard error over sequences; state error relative, after the last update",
    )
    out.table("how the channels were chosen", ("quantity", "value"), _choice(document))
    for name, reason in document["skipped"].items():
        out.note(f"{name} was left out: {reason}")


def _bits(packed: float, with_ring: float) -> str:
    """Bits of a value, and what recent inputs add where writes are deferred."""
    ring = with_ring - packed
    return f"{packed:g}" if ring == 0 else f"{packed:g} + {ring:.3g} ring"


def _choice(document: dict[str, Any]) -> list[tuple[str, object]]:
    overlap, chance = document["split_agreement"], document["split_agreement_random"]
    rho = document["split_rank_correlation"]
    protocol = document["protocol"]
    return [
        ("FP16 key channels per head", document["k_hi"]),
        ("agreement of two halves of the prompts", f"{100 * overlap:.1f} %"),
        ("the same by chance", f"{100 * chance:.1f} %"),
        ("rank correlation of the halves", None if rho is None else f"{rho:.3f}"),
        *_findings(document),
        ("prompts", len(document["prompts"])),
        ("prompt + generated tokens", f"{protocol['input_tokens']} + {protocol['new_tokens']}"),
        ("horizon in updates", protocol["horizon"]),
        ("temperature", protocol["temperature"]),
        ("repeated 32-token stretches", f"{100 * document['repeated_32gram_share']:.1f} %"),
    ]


def _findings(document: dict[str, Any]) -> list[tuple[str, object]]:
    """What the run says about the method itself."""
    concentration, prediction = document["error_concentration"], document["risk_prediction"]
    rows: list[tuple[str, object]] = [
        (
            "INT8 error in the worst 12.5 % of channels",
            f"{100 * concentration['plain']['mean_over_heads']:.1f} %",
        )
    ]
    if "reordered" in concentration:
        share = concentration["reordered"]["mean_over_heads"]
        rows.append(("the same, values scaled and reordered", f"{100 * share:.1f} %"))
    for name, label in (("damp", "risk"), ("error-only", "local error")):
        rho = prediction.get(name, {}).get("spearman")
        if rho is not None:
            rows.append((f"rank correlation of {label} and accumulated error", f"{rho:.3f}"))
    for name, gap in document["key_order_gap"].items():
        rows.append((f"J of {name} above channels per value head", f"{100 * gap:.2f} %"))
    return rows
