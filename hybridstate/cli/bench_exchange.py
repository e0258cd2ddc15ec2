"""`hybridstate bench exchange`: checkpoints over tensor-parallel ranks, slots gained and time spent."""

from typing import Annotated, Any

import typer

from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.options import Device, Force, Json, Model, Quiet, WMax, check_device
from hybridstate.cli.output import Output, command


def exchange(
    model: Model,
    tp: Annotated[
        int, typer.Option("--tp", metavar="P", help="Ranks, one process (and GPU) each.")
    ] = 2,
    w_max: WMax = None,
    balance: Annotated[
        list[str] | None,
        typer.Option(
            "--balance",
            metavar="MODE",
            help="off, storage or hybrid; repeatable. [default: all three]",
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        list[int] | None,
        typer.Option(
            "--checkpoints",
            metavar="N",
            min=1,
            help="Checkpoints that travel together, repeatable. [default: 1, 8]",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Timed stores and loads.")
    ] = 20,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Store and load checkpoints across ranks, as placed by `analyze --tp P --balance MODE`.

    Reads decay parameters only; states are synthetic. Every unit is checked at its slot and after the
    way back. NCCL joins the ranks on GPUs, gloo on a CPU.
    """
    with command("bench exchange", model=model, json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_exchange(
            model,
            tp=tp,
            w_max=w_max,
            balance=balance,
            checkpoints=checkpoints,
            repeats=repeats,
            device=device,
            progress=out.progress,
        ).to_json()
        exchange_table(out, result)
        finish(out, "exchange", result, output, force=force)


def exchange_table(out: Output, result: dict[str, Any]) -> None:
    """One row per cutoff, mode and number of checkpoints."""
    protocol = result["protocol"]
    out.table(
        f"{result['model']}: checkpoints over {protocol['tp']} ranks ({protocol['backend']}), synthetic states",
        ("W_max", "balance", "checkpoints", "capacity", "remote", "sent MB", "store µs", "load µs"),
        [
            (
                row["w_max"],
                row["mode"],
                row["checkpoints"],
                f"{row['capacity']:.2f}x",
                f"{row['remote_units']:,} of {row['units']:,}",
                f"{row['remote_bytes'] / 1e6:.2f}",
                f"{1e6 * row['store_s']['median']:.0f}",
                f"{1e6 * row['load_s']['median']:.0f}",
            )
            for row in result["exchange"]
        ],
        note="capacity: dense bytes over slot bytes on the fullest rank, convolution windows included; remote: "
        "units stored on another rank than the one that computes them; times of the slowest rank, gather and "
        "scatter included"
        + ("" if protocol["backend"] == "nccl" else "; times on a CPU say nothing about GPUs"),
    )
