"""`hybridstate analyze`: horizons, retained counts and bytes from the weights alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridstate.cli.options import (
    Device,
    DryRun,
    Epsilon,
    Force,
    GateInput,
    Json,
    LowerBound,
    Model,
    OutputFolder,
    Quiet,
    WMax,
    check_device,
    parse_gate_input,
)
from hybridstate.cli.output import Output, command
from hybridstate.defaults import EPSILON, W_MAX

if TYPE_CHECKING:
    from hybridstate.checkpoint import Checkpoint
    from hybridstate.horizons.observed import HorizonValidation
    from hybridstate.plan.analysis import Analysis


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "analyze",
        short_help="Horizons, retained units and bytes from the weights alone.",
        epilog="Example: hybridstate analyze tiny-kda\n\n"
        "Example: hybridstate analyze ./Qwen3.6-35B-A3B --w-max 64 --w-max 256 -o out",
    )(analyze)


def analyze(
    model: Model,
    w_max: WMax = None,
    gate_input: GateInput = "auto",
    epsilon: Epsilon = EPSILON,
    lower_bound: LowerBound = None,
    output: OutputFolder = None,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Also run the model on 8 prose prefixes (needs torch)."),
    ] = False,
    device: Device = "cpu",
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How far back each part of the recurrent state remembers, and what a cutoff keeps.

    Reads the decay tensors alone (kilobytes, whatever the size of the model), never the other
    weights, and needs neither torch nor transformers. With -o it also writes analysis.json and
    three figures with the CSV behind each.
    """
    with command("analyze", model=model, json=json, quiet=quiet) as out:
        from hybridstate.provenance import check_output_folder

        a_s = parse_gate_input(gate_input)
        check_device(device)
        if output is not None:
            check_output_folder(output, force=force)
        if dry_run:
            _dry_run(out, model, lower_bound, output, w_max or W_MAX, epsilon)
            return
        from hybridstate import api

        if validate:
            from hybridstate.trajectories.model import torch_device

            torch_device(device)

        analysis = api.analyze(
            model,
            w_max=w_max or W_MAX,
            gate_input=a_s,
            epsilon=epsilon,
            lower_bound=lower_bound,
        )
        result = analysis.to_json()
        _remarks(out, analysis)
        _tables(out, analysis)
        if validate:
            validation = api.validate_horizons(
                model,
                w_max=w_max or W_MAX,
                gate_input=a_s,
                epsilon=epsilon,
                lower_bound=lower_bound,
                device=device,
                progress=out.progress,
            )
            result["validation"] = validation.to_json()
            _validation_tables(out, validation)
        if output is not None:
            written = _write(output, analysis, result, force=force)
            result["written"] = written
            out.note(f"wrote {len(written)} files to {output}")
        out.result(result)


def _dry_run(
    out: Output,
    model: str,
    lower_bound: float | None,
    folder: Path | None,
    w_max: Sequence[int],
    epsilon: float,
) -> None:
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.horizons.static import check_epsilon
    from hybridstate.plan.select import check_w_max

    check_epsilon(epsilon)
    for cutoff in w_max:
        check_w_max(cutoff)
    checkpoint = open_checkpoint(model, lower_bound=lower_bound)
    reads = _reads(checkpoint)
    total = sum(read["bytes"] for read in reads)
    size = sum(file.stat().st_size for file in checkpoint.files)
    out.table(
        f"{checkpoint.name}: would read",
        ("tensor", "dtype", "shape", "bytes", "file"),
        [
            (r["tensor"], r["dtype"], "x".join(map(str, r["shape"])), r["bytes"], r["file"])
            for r in reads
        ],
        note=f"{len(reads)} tensors, {total:,} bytes, and {checkpoint.header_bytes:,} bytes of "
        f"headers, of {size:,} bytes in {len(checkpoint.files)} files",
    )
    writes = [] if folder is None else [str(folder / name) for name in _file_names()]
    if writes:
        out.text(f"would write {len(writes)} files to {folder}")
    out.result(
        {
            "dry_run": True,
            "reads": reads,
            "tensor_bytes": total,
            "header_bytes": checkpoint.header_bytes,
            "checkpoint_bytes": size,
            "writes": writes,
        }
    )


def _reads(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    names = [name for layer in checkpoint.spec.layers for name in checkpoint.decay_tensors(layer)]
    return [
        {
            "tensor": name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "bytes": entry.nbytes,
            "offset": entry.start,
            "file": entry.file.name,
        }
        for name in names
        for entry in [checkpoint.entries[name]]
    ]


def _file_names() -> list[str]:
    from hybridstate.figures import ANALYSIS_FIGURES

    return ["analysis.json", *(f"{n}.{kind}" for n in ANALYSIS_FIGURES for kind in ("csv", "png"))]


def _remarks(out: Output, analysis: "Analysis") -> None:
    source = analysis.source
    for note in source.notes:
        out.note(note)
    out.note(
        f"read {source.tensor_bytes:,} bytes in {source.tensors} decay tensors "
        f"of {source.checkpoint_bytes:,}"
    )
    for warning in analysis.warnings:
        out.warn(warning)


def _tables(out: Output, analysis: "Analysis") -> None:
    spec, source = analysis.spec, analysis.source
    dtypes = ", ".join(f"{name} {'/'.join(found)}" for name, found in source.stored_dtypes.items())
    bound = "" if spec.lower_bound is None else f", lower bound {spec.lower_bound:g}"
    first = spec.layers[0]
    heads = (
        f"{first.value_heads} heads"
        if first.bundle == 1
        else f"{first.key_heads} key and {first.value_heads} value heads"
    )
    out.text(
        f"{source.name}: {spec.name}, {len(spec.layers)} of {spec.num_layers} layers linear, "
        f"{heads} of {first.key_dim} x {first.value_dim}"
    )
    out.text(
        f"{spec.gate} gate{bound}, gate input {analysis.gate_input:g} "
        f"({analysis.gate_input_source}; a larger one shortens every horizon), stored as {dtypes}"
    )
    tokens = analysis.quantiles
    out.table(
        f"horizon in tokens at which {analysis.epsilon:g} of the content is left",
        ("units", "shortest", "10 %", "median", "90 %", "longest", "infinite"),
        [
            (
                tokens["units"],
                *(_tokens(tokens[name]) for name in ("min", "p10", "median", "p90", "max")),
                tokens["infinite"],
            )
        ],
    )
    cutoffs = analysis.cutoffs
    out.table(
        f"retained units (one {'value head' if spec.unit == 'head' else 'key channel of a head'} each)",
        ("W_max", "retained", "share %", "W_replay", "per layer"),
        [
            (
                c.selection.w_max,
                sum(c.selection.counts),
                _fixed(100 * c.selection.fraction, 1),
                c.selection.w_replay,
                f"{min(c.selection.counts)}..{max(c.selection.counts)}",
            )
            for c in cutoffs
        ],
    )
    dense = cutoffs[0].accounting
    out.table(
        "checkpoint size, dense over compressed",
        ("W_max", "bytes", "full", "full padded", "temporal", "temporal padded"),
        [
            (
                c.selection.w_max,
                c.accounting.ragged_bytes,
                _ratio(c.accounting.ratio_full_ragged),
                _ratio(c.accounting.ratio_full_padded),
                _ratio(c.accounting.ratio_temporal_ragged),
                _ratio(c.accounting.ratio_temporal_padded),
            )
            for c in cutoffs
        ],
        note=f"dense: {dense.dense_bytes:,} bytes = {dense.temporal_dense_bytes:,} temporal (FP32) "
        f"+ {dense.conv_bytes:,} convolution (BF16); full ratios count both",
    )


def _tokens(value: float | int | None) -> float | str:
    return "inf" if value is None else float(value)


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _validation_tables(out: Output, found: "HorizonValidation") -> None:
    title = f"static horizons against {found.prefixes} prefixes of {found.tokens:,} tokens"
    out.table(
        f"{title} ({found.source})",
        ("Spearman, per prefix and layer", "median", "25 %", "75 %", "pairs", "constant"),
        [
            (name, *map(_rho, (a.median, a.lower_quartile, a.upper_quartile)), a.pairs, constant)
            for name, a in (
                ("observed horizon H_e", found.horizons),
                ("state magnitude M_S", found.magnitudes),
            )
            for constant in (a.constant_pairs,)
        ],
        note="constant: pairs left out because all units were equal",
    )
    out.table(
        "the cutoff, decided by static and by observed horizons",
        ("W_max", "same side %", "omitted", "omitted but longer"),
        [
            (c.w_max, _fixed(100 * c.same_side, 1), c.omitted, c.omitted_but_longer)
            for c in found.cutoffs
        ],
        note="units counted once per prefix",
    )


def _rho(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _write(folder: Path, analysis: "Analysis", result: dict[str, Any], *, force: bool) -> list[str]:
    import json

    from hybridstate.figures import analysis_figures
    from hybridstate.provenance import environment, fresh_folder

    document = result | {"environment": environment()}
    with fresh_folder(folder, force=force) as partial:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        (partial / "analysis.json").write_text(text, encoding="utf-8")
        analysis_figures(analysis, partial)
        names = sorted(path.name for path in partial.iterdir())
    return [str(folder / name) for name in names]
