"""`hybridstate bench`: what compression costs and saves, measured."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_codecs import codecs
from hybridstate.cli.bench_decode import decode
from hybridstate.cli.bench_exchange import exchange
from hybridstate.cli.bench_options import Batches, Masks, PlanFolder, Samples
from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.bench_quality import quality
from hybridstate.cli.bench_serve import serve
from hybridstate.cli.bench_simulate import simulate
from hybridstate.cli.bench_tables import restore_tables, update_tables
from hybridstate.cli.options import (
    Device,
    Force,
    GateInput,
    GateInputFrom,
    Json,
    LocalModel,
    Quiet,
    WMax,
    check_device,
    parse_gate_input,
)
from hybridstate.cli.output import command


def register(app: typer.Typer) -> None:
    """Add the group and its verbs."""
    group = typer.Typer(
        name="bench",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Measure kernels, decoding, restoring, transfers, serving and quality.",
        short_help="Measure kernels, serving and quality.",
    )
    group.command(
        "restore",
        short_help="Quality and time of restored prefixes, by cutoff.",
        epilog="Example: hybridstate bench restore tiny-kda --w-max 64 --questions 8",
    )(restore)
    group.command(
        "update",
        short_help="Time of one recurrent update, dense and packed.",
        epilog="Example: hybridstate bench update tiny-kda --batch 1",
    )(update)
    group.command(
        "decode",
        short_help="Time per output token, dense and packed state.",
        epilog="Example: hybridstate bench decode tiny-gdn --state fp32 --state damp --batch 1",
    )(decode)
    group.command(
        "exchange",
        short_help="Checkpoints between tensor-parallel ranks.",
        epilog="Example: hybridstate bench exchange tiny-kda --tp 2 --device cpu",
    )(exchange)
    group.command(
        "codecs",
        short_help="Packing, unpacking, checkpoint codecs, slot copies.",
        epilog="Example: hybridstate bench codecs --size tiny --slots 2",
    )(codecs)
    group.command(
        "simulate",
        short_help="Serving through the prefix cache, without tensors.",
        epilog="Example: hybridstate bench simulate --ratio 1 --ratio 2 --limit 32 --seeds 1",
    )(simulate)
    group.command(
        "serve",
        short_help="Serving through the prefix cache on the real engine.",
        epilog="Example: hybridstate bench serve tiny-kda --scale 0.02 --conversations 8 --clients 4 --ratio 1 "
        "--limit 2 --seeds 1 --arm damp --no-control",
    )(serve)
    group.command(
        "quality",
        short_help="Answers after compressed hits and in every state format.",
        epilog="Example: hybridstate bench quality tiny-kda --tasks recall --tokens 512 --questions 4 --format bf16",
    )(quality)
    app.add_typer(group)


def restore(
    model: LocalModel,
    plan: PlanFolder = None,
    w_max: WMax = None,
    gate_input: GateInput = "auto",
    gate_input_from: GateInputFrom = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            metavar="TASK",
            help="recall, registers, latest, counts or tracking; repeatable. [default: recall, registers]",
            show_default=False,
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option("--questions", metavar="N", help="Per task, and prose prefixes.")
    ] = 16,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Length of a prompt.")
    ] = 1024,
    seeds: Masks = 5,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", help="Timed requests per arm.")
    ] = 5,
    interventions: Annotated[
        bool,
        typer.Option(
            "--interventions", help="Also zero state, KV or both: does the model need it?"
        ),
    ] = False,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            metavar="N",
            help="Sequences that run at once. [default: 32, on a GPU 256]",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Cached prefixes through bytes and back: dense, zeros (NR), replay (WR), random masks.

    Every prefix is packed to a checkpoint, loaded into memory filled with NaN and continued with 64 tokens
    of filler and a question. Prints bytes, answers, KL against the dense restore on held-out prose,
    and the time to the first token. Questions are synthetic.
    """
    with command("bench restore", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force, reads=(gate_input_from,))
        from hybridstate import api

        result = api.bench_restore(
            model,
            plan=plan,
            w_max=w_max,
            gate_input=parse_gate_input(gate_input),
            gate_input_from=gate_input_from,
            tasks=tasks,
            questions=questions,
            tokens=tokens,
            seeds=seeds,
            repeats=repeats,
            interventions=interventions,
            rows=rows,
            device=device,
            progress=out.progress,
        ).to_json()
        restore_tables(out, result)
        finish(out, "restore", result, output, force=force, draw=_draw_restore)


def update(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model whose layers give the sizes. [default: embedded and released sizes]",
            show_default=False,
        ),
    ] = None,
    plan: PlanFolder = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="FORMAT",
            help="fp32, bf16, fp16, damp (scales folded into the weights) or damp-scaled (reads a value scale); "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            "--gate",
            metavar="GATE",
            help="fused (raw projections enter the kernel) or given; repeatable. "
            "[default: fused on a GPU, given on a CPU]",
            show_default=False,
        ),
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap",
            help="Launches of every format may overlap the one before (programmatic dependent launch).",
        ),
    ] = False,
    requantise_every: Annotated[
        list[int] | None,
        typer.Option(
            "--requantise-every",
            metavar="L",
            help="Also time the packed step that keeps the last inputs and rewrites a state once in L steps, "
            "2 to 16; repeatable.",
            show_default=False,
        ),
    ] = None,
    batch: Batches = None,
    samples: Samples = 30,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One decode step of the recurrence on pooled states, in place, checked against float64 first.

    On a GPU one kernel launch per step, beside an in-place pass over as many bytes; on a CPU the
    reference runs. Inputs and states are synthetic.
    """
    with command("bench update", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_update(
            model,
            plan=plan,
            states=state,
            gates=gate,
            overlap=overlap,
            requantise_every=requantise_every or (),
            batches=batch,
            samples=samples,
            device=device,
            progress=out.progress,
        ).to_json()
        update_tables(out, result)
        finish(out, "update", result, output, force=force)


def _draw_restore(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures import restore_figure

    restore_figure(result, str(result["model"]), folder)
