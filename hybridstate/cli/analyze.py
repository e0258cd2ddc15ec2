"""`hybridstate analyze`: horizons, retained counts and bytes from the weights alone."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridstate.cli.analyze_options import (
    Candidates,
    CharsPerToken,
    Chunk,
    GateObjective,
    Intervention,
    PerTier,
    Text,
    Tiers,
    ValidationArguments,
    parse_tiers,
)
from hybridstate.cli.analyze_tables import analysis_tables, remarks
from hybridstate.cli.analyze_validation import VALIDATION_FILE, validation_tables
from hybridstate.cli.bench_output import recorded
from hybridstate.cli.capacity_tables import capacity_tables
from hybridstate.cli.options import (
    Balance,
    CacheDir,
    Device,
    DryRun,
    Epsilon,
    Force,
    GateInput,
    GateInputFrom,
    Json,
    LowerBound,
    Model,
    Offline,
    OutputFolder,
    Quiet,
    TensorParallel,
    WMax,
    check_device,
    parse_balance,
    parse_gate_input,
)
from hybridstate.cli.output import Output, command, counted
from hybridstate.defaults import EPSILON, W_MAX
from hybridstate.errors import UsageError
from hybridstate.report import REPORT_FILE

if TYPE_CHECKING:
    from hybridstate.checkpoint import Checkpoint
    from hybridstate.plan.analysis import Analysis


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "analyze",
        short_help="Horizons, retained units and bytes from the weights alone.",
        epilog="Example: hybridstate analyze tiny-kda\n\n"
        "Example: hybridstate analyze ./Qwen3.6-35B-A3B --w-max 64 --w-max 256 -o out\n\n"
        "Example: hybridstate analyze Qwen/Qwen3-Next-80B-A3B-Instruct --dry-run\n\n"
        "Example: hybridstate analyze tiny-kda --validate --intervention 100 --device cuda -o out\n\n"
        "Example: hybridstate analyze ./Kimi-Linear-48B --tp 8 --balance storage --budget 8GiB "
        "--concurrency 64 --report report",
    )(analyze)


def analyze(
    model: Model,
    w_max: WMax = None,
    gate_input: GateInput = "auto",
    gate_input_from: GateInputFrom = None,
    epsilon: Epsilon = EPSILON,
    lower_bound: LowerBound = None,
    tp: TensorParallel = 1,
    balance: Balance = "off",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="Memory per rank for all states, such as 8GiB: counts slots.",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            metavar="N",
            help="Requests wanted at once in that memory: finds the cutoff that allows them.",
            show_default=False,
        ),
    ] = None,
    output: OutputFolder = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="DIR",
            help="Write one self-contained HTML page to this new folder.",
            show_default=False,
        ),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Also run the model on text (needs torch)."),
    ] = False,
    text: Text = None,
    tiers: Tiers = None,
    per_tier: PerTier = None,
    chars_per_token: CharsPerToken = None,
    candidates: Candidates = None,
    gate_objective: GateObjective = None,
    intervention: Intervention = None,
    chunk: Chunk = None,
    device: Device = "cpu",
    offline: Offline = False,
    cache_dir: CacheDir = None,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How far back each part of the recurrent state remembers, and what a cutoff keeps.

    Reads the decay tensors alone (kilobytes, whatever the size of the model), from a folder or from
    the Hub, and needs neither torch nor transformers. With --tp it also places the state on ranks,
    with --budget it counts the slots that fit. -o writes analysis.json and the figures with the CSV
    behind each, --report the same as one page.

    --validate compares static horizons with what the gates did on prefixes of text (DASC 3.4, A.2),
    chooses the gate input on every other prefix and reports on the rest, pools the decay of three
    domains, and with --intervention asks what the model loses without its state. Its figures are
    drawn with -o.
    """
    with command("analyze", model=model, json=json, quiet=quiet) as out:
        from hybridstate.checkpoint import open_checkpoint, require_weights
        from hybridstate.horizons.static import check_epsilon
        from hybridstate.plan.capacity import check_request, parse_bytes
        from hybridstate.plan.placement import check_permutable, check_tp
        from hybridstate.plan.select import check_w_max
        from hybridstate.provenance import check_output_folder

        a_s = parse_gate_input(gate_input)
        wanted = ValidationArguments(
            text,
            parse_tiers(tiers),
            per_tier,
            chars_per_token,
            candidates,
            gate_objective,
            intervention,
            chunk,
        )
        wanted.check(validate=validate)
        check_device(device)
        mode = parse_balance(balance)
        memory = None if budget is None else parse_bytes(budget)
        check_request(memory, concurrency)
        for folder in (output, report):
            if folder is not None:
                check_output_folder(folder, force=force)
        if not force:
            _check_apart(output, report)
        if dry_run:
            for cutoff in w_max or W_MAX:
                check_w_max(cutoff)
            check_epsilon(epsilon)
            checkpoint = open_checkpoint(
                model,
                lower_bound=lower_bound,
                offline=offline,
                cache_dir=cache_dir,
                progress=out.progress,
            )
            check_tp(checkpoint.spec, tp)
            if mode == "hybrid":
                check_permutable(checkpoint)
            _dry_run(out, checkpoint, output, report, tp, validate=validate)
            return
        from hybridstate import api

        if validate:
            from hybridstate.trajectories.model import torch_device

            require_weights(model)
            torch_device(device)

        analysis = api.analyze(
            model,
            w_max=w_max or W_MAX,
            gate_input=a_s,
            gate_input_from=gate_input_from,
            epsilon=epsilon,
            lower_bound=lower_bound,
            tp=tp,
            balance=mode,
            budget=memory,
            concurrency=concurrency,
            offline=offline,
            cache_dir=cache_dir,
            progress=out.progress,
        )
        result = analysis.to_json()
        remarks(out, analysis)
        analysis_tables(out, analysis)
        capacity_tables(out, analysis)
        drawn: dict[str, Any] | None = None
        if validate:
            began = time.perf_counter()
            validation = api.validate_horizons(
                model,
                w_max=w_max or W_MAX,
                gate_input=a_s,
                gate_input_from=gate_input_from,
                epsilon=epsilon,
                lower_bound=lower_bound,
                device=device,
                progress=out.progress,
                **wanted.given(),
            )
            result["validation"] = validation.to_json()
            for warning in validation.warnings:
                out.warn(warning)
            validation_tables(out, result["validation"])
            drawn = validation.to_json(all_units=True) | {
                "seconds": round(time.perf_counter() - began, 1)
            }
            result["validation"]["seconds"] = drawn["seconds"]
        if output is not None:
            written = _write(out, output, analysis, result, drawn, force=force)
            result["written"] = written
            out.note(f"wrote {counted(len(written), 'file')} to {output}")
        if report is not None:
            page = _write_report(out, report, analysis, force=force)
            result["report"] = page
            out.note(f"wrote {page}")
        out.result(result)


def _check_apart(output: Path | None, report: Path | None) -> None:
    """Refuse a page whose folder holds the other results: either is written whole, as one folder.

    Raises:
        UsageError: the same folder, or --report around it.
    """
    if output is None or report is None:
        return
    folder, page = output.resolve(), report.resolve()
    if page in (folder, *folder.parents):
        raise UsageError(
            f"-o and --report need folders of their own, found {output} and {report}",
            hint=f"take --report {output / 'report'}",
            found=str(report),
        )


def _dry_run(
    out: Output,
    checkpoint: "Checkpoint",
    folder: Path | None,
    report: Path | None,
    tp: int,
    *,
    validate: bool,
) -> None:
    for note in checkpoint.notes:
        out.note(note)
    reads = _reads(checkpoint)
    total = sum(read["bytes"] for read in reads)
    size = checkpoint.size
    hub = _hub_reads(out, checkpoint)
    out.table(
        f"{checkpoint.name}: would read",
        ("tensor", "dtype", "shape", "bytes", "file"),
        [
            (r["tensor"], r["dtype"], "x".join(map(str, r["shape"])), r["bytes"], r["file"])
            for r in reads
        ],
        note=f"{counted(len(reads), 'tensor')}, {total:,} bytes, and {checkpoint.header_bytes:,} bytes in the "
        f"headers of {counted(len(checkpoint.files), 'file')}, of {size:,} bytes",
    )
    names = _file_names(checkpoint.spec.unit, tp, validate=validate)
    writes = [] if folder is None else [str(folder / name) for name in names]
    if writes:
        out.text(f"would write {counted(len(writes), 'file')} to {folder}")
    if report is not None:
        writes.append(str(report / REPORT_FILE))
        out.text(f"would write {writes[-1]}")
    out.result(
        {
            "dry_run": True,
            "reads": reads,
            "tensor_bytes": total,
            "header_bytes": checkpoint.header_bytes,
            "checkpoint_bytes": size,
            "hub": hub,
            "writes": writes,
        }
    )


def _hub_reads(out: Output, checkpoint: "Checkpoint") -> dict[str, Any] | None:
    """What a Hub model costs where nothing is cached; the tensors are the part not yet asked for."""
    origin = checkpoint.origin
    if origin is None:
        return None
    cost = checkpoint.cost(checkpoint.all_decay_tensors)
    requests, nbytes = sum(r.requests for r in cost), sum(r.nbytes for r in cost)
    out.table(
        f"{checkpoint.name}: would ask the Hub for",
        ("part", "requests", "bytes"),
        [*((read.part, read.requests, read.nbytes) for read in cost), ("total", requests, nbytes)],
        note=f"with an empty cache, redirects not counted; so far {counted(origin.requests, 'request')}, "
        f"{origin.received:,} bytes",
    )
    return {
        "repo": origin.repo,
        "commit": origin.commit,
        "parts": [
            {"part": read.part, "requests": read.requests, "bytes": read.nbytes} for read in cost
        ],
        "requests": requests,
        "bytes": nbytes,
        "requests_made": origin.requests,
        "bytes_received": origin.received,
    }


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


def _file_names(unit: str, tp: int, *, validate: bool) -> list[str]:
    from hybridstate.figures import VALIDATION_FIGURES, figure_names

    names = [*figure_names(unit, tp), *(VALIDATION_FIGURES if validate else ())]
    files = ["analysis.json", *([VALIDATION_FILE] if validate else [])]
    return [*files, *(f"{name}.{kind}" for name in names for kind in ("csv", "png"))]


def _write(
    out: Output,
    folder: Path,
    analysis: "Analysis",
    result: dict[str, Any],
    validation: dict[str, Any] | None,
    *,
    force: bool,
) -> list[str]:
    from hybridstate.figures import analysis_figures, validation_figures
    from hybridstate.provenance import environment, fresh_folder, readable_json

    document = result | {"environment": environment()}
    with fresh_folder(folder, force=force) as partial:
        (partial / "analysis.json").write_bytes(readable_json(document))
        analysis_figures(analysis, partial)
        if validation is not None:
            from hybridstate.bench.timing import device_record

            validation_figures(validation, analysis.source.name, partial)
            kept = {"model": analysis.source.name, "validation": result["validation"]}
            found = recorded(out, kept, device_record(validation["device"]))
            (partial / VALIDATION_FILE).write_bytes(readable_json(found))
        names = sorted(path.name for path in partial.iterdir())
    return [str(folder / name) for name in names]


def _write_report(out: Output, folder: Path, analysis: "Analysis", *, force: bool) -> str:
    from hybridstate.provenance import environment, fresh_folder
    from hybridstate.report import analysis_page

    page = analysis_page(
        analysis, out.page_parts(), warnings=out.warnings, environment=environment()
    )
    with fresh_folder(folder, force=force) as partial:
        (partial / REPORT_FILE).write_text(page, encoding="utf-8")
    return str(folder / REPORT_FILE)
