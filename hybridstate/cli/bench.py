"""`hybridstate bench restore|update|decode`: what compression costs and saves, measured."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_tables import decode_tables, restore_tables, update_tables
from hybridstate.cli.options import Device, Force, Json, LocalModel, Quiet, WMax, check_device
from hybridstate.cli.output import SCHEMA, Output, command

OutputPath = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="A file ending in .json, or a new folder.",
        show_default=False,
    ),
]
PlanFolder = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="DIR",
        help="Folder of export-plan. [default: the plan of MODEL, if it was exported with one]",
        show_default=False,
    ),
]
States = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        metavar="FORMAT",
        help="fp32, bf16, fp16 or damp; repeatable.",
        show_default=False,
    ),
]
Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        metavar="N",
        min=1,
        help="Batch size, repeatable. [default: small on a CPU, 1 to 256 on a GPU]",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group and its verbs."""
    group = typer.Typer(
        name="bench",
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Measure: restoring a cached prefix, one update of the state, decoding.",
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
    app.add_typer(group)


def restore(
    model: LocalModel,
    plan: PlanFolder = None,
    w_max: WMax = None,
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
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Random masks per cutoff, 0 to 5.")
    ] = 5,
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
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_restore(
            model,
            plan=plan,
            w_max=w_max,
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
            metavar="[MODEL]",
            help="Model whose layers give the sizes. [default: embedded and released sizes]",
            show_default=False,
        ),
    ] = None,
    plan: PlanFolder = None,
    state: States = None,
    batch: Batches = None,
    samples: Annotated[
        int, typer.Option("--samples", metavar="N", min=1, help="Measured rounds.")
    ] = 30,
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
            batches=batch,
            samples=samples,
            device=device,
            progress=out.progress,
        ).to_json()
        update_tables(out, result)
        finish(out, "update", result, output, force=force)


def decode(
    model: LocalModel,
    plan: PlanFolder = None,
    state: States = None,
    batch: Batches = None,
    input_tokens: Annotated[
        int, typer.Option("--input-tokens", metavar="N", min=1, help="Prefilled per sequence.")
    ] = 256,
    output_tokens: Annotated[
        int, typer.Option("--output-tokens", metavar="N", min=1, help="Decoded per sequence.")
    ] = 64,
    k_hi: Annotated[
        int | None,
        typer.Option(
            "--k-hi",
            metavar="N",
            min=0,
            help="FP16 channels per head without a plan. [default: 16 of 128]",
            show_default=False,
        ),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graph.")] = False,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Decode batches with the state in our pool: FP32 and packed by default.

    Logits are first compared with a simulation of each format. Between two tokens only the pool
    holds the states. On a CPU the reference runs, and its times say nothing about a GPU.
    """
    with command("bench decode", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_decode(
            model,
            plan=plan,
            states=state,
            batches=batch,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            k_hi=k_hi,
            graph=not eager,
            device=device,
            progress=out.progress,
        ).to_json()
        decode_tables(out, result)
        finish(out, "decode", result, output, force=force)


# -- writing ------------------------------------------------------------------------------------


def check_output(path: Path | None, *, force: bool) -> None:
    """Refuse a place that cannot take the result, before any work.

    Raises:
        UsageError: the file exists, or the folder is not empty, without `--force`.
    """
    from hybridstate.errors import UsageError
    from hybridstate.provenance import check_output_folder, check_writable

    if path is None:
        return
    if path.suffix != ".json":
        check_output_folder(path, force=force)
        return
    try:
        taken = path.is_dir() or (path.exists() and not force)
        check_writable(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", file=str(path)) from error
    if taken:
        raise UsageError(
            f"output {path} exists",
            hint="choose another file, or replace it with --force",
            file=str(path),
        )


def finish(
    out: Output,
    name: str,
    result: dict[str, Any],
    path: Path | None,
    *,
    force: bool,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> None:
    """Add where the numbers come from, write the document and its figures, hand over the result."""
    import json as json_format

    from hybridstate.provenance import environment, fresh_folder, write_file

    hardware = result["device"]
    result["provenance"] = environment(device=hardware["name"], hardware=hardware)
    document = {
        "schema": SCHEMA,
        "command": out.command,
        "arguments": _arguments(),
        "model": result.get("model", out.model),
        "provenance": result["provenance"],
        "result": {key: value for key, value in result.items() if key != "provenance"},
    }
    if path is not None:
        text = json_format.dumps(document, indent=1, allow_nan=False) + "\n"
        if path.suffix == ".json":
            write_file(path, text.encode())
        else:
            with fresh_folder(path, force=force) as folder:
                write_file(folder / f"{name}.json", text.encode())
                if draw is not None:
                    draw(result, folder)
        out.note(f"wrote {path}")
    out.result(result)


def _arguments() -> list[str]:
    """The command line with file names instead of paths."""
    return [
        Path(argument).name if "/" in argument or "\\" in argument else argument
        for argument in sys.argv[1:]
    ]


def _draw_restore(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures import restore_figure

    restore_figure(result, str(result["model"]), folder)
