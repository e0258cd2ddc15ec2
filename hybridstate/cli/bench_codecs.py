"""`hybridstate bench codecs`: moving states between dense, packed and checkpoint layouts."""

from typing import Annotated, Any

import typer

from hybridstate.cli.bench_options import Samples
from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.options import Device, Force, Json, Quiet, check_device
from hybridstate.cli.output import Output, command, counted


def codecs(
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="NAME",
            help="kimi-linear, qwen3-next or tiny; repeatable. [default: kimi-linear, on a CPU tiny]",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option("--slots", metavar="N", min=1, help="Slots moved by one launch.")
    ] = 8,
    samples: Samples = 20,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pack, unpack, store and load retained units, INT8 checkpoints, slot copies; one launch for all layers.

    Every transfer is first compared with its reference byte for byte, then timed beside an in-place
    pass over as many bytes. States, masks and maps are synthetic.
    """
    with command("bench codecs", json=json, quiet=quiet) as out:
        check_device(device)
        check_output(output, force=force)
        from hybridstate import api

        result = api.bench_codecs(
            sizes=size, slots=slots, samples=samples, device=device, progress=out.progress
        ).to_json()
        codec_tables(out, result)
        finish(out, "codecs", result, output, force=force)


def codec_tables(out: Output, result: dict[str, Any]) -> None:
    """One line per transfer."""
    out.table(
        f"state transfers on {result['device']['name']}, {counted(result['protocol']['slots'], 'slot')}",
        ("size", "transfer", "bytes", "µs", "p90", "GB/s", "pass GB/s", "share %"),
        [
            (
                row["model"],
                row["transfer"],
                row["bytes"],
                1e6 * row["launch_s"]["median"],
                1e6 * row["launch_s"]["p90"],
                row["gb_per_s"],
                row["pass_gb_per_s"],
                100 * row["share_of_pass"],
            )
            for row in result["rows"]
        ],
        note="pass: reading and writing as many bytes in place; share: bandwidth over that of the pass; "
        f"{result['protocol']['inputs']}; each was first compared with its reference byte for byte"
        + (
            ""
            if result["protocol"]["backend_note"] is None
            else f"; {result['protocol']['backend_note']}"
        ),
    )
