"""`hybridstate bench decode`: time per output token by state format, batch and component."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.bench_options import Batches, PlanFolder, States
from hybridstate.cli.bench_output import OutputPath, check_output, finish
from hybridstate.cli.bench_tables import reference_note, times
from hybridstate.cli.options import Device, Force, Json, LocalModel, Quiet, check_device
from hybridstate.cli.output import Output, command


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
    requantise_every: Annotated[
        list[int] | None,
        typer.Option(
            "--requantise-every",
            metavar="L",
            help="Also decode damp states that are written at every L-th update, 1 to 16, with the inputs "
            "since beside them; repeatable. [default: the plan's interval alone]",
            show_default=False,
        ),
    ] = None,
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
    dummy: Annotated[
        bool,
        typer.Option(
            "--dummy",
            help="SYNTHETIC weights of MODEL's dimensions, made on the device: MODEL is a folder with "
            "config.json, Qwen3.6-35B-A3B or Kimi-Linear-48B-A3B. The result also has time by component "
            "and the bytes of a step.",
        ),
    ] = False,
    device: Device = "auto",
    output: OutputPath = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Decode batches with the state in the package's pool: FP32 and packed by default.

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
            requantise_every=requantise_every or (),
            k_hi=k_hi,
            graph=not eager,
            dummy=dummy,
            device=device,
            progress=out.progress,
        ).to_json()
        decode_tables(out, result)
        finish(out, "decode", result, output, force=force, draw=_draw)


def _draw(result: dict[str, Any], folder: Path) -> None:
    from hybridstate.figures import decode_figures

    decode_figures(result, folder)


def decode_tables(out: Output, result: dict[str, Any]) -> None:
    """One line per batch and format, and the checks."""
    faster = {(s["batch"], s["state"]): s["fp32_over_this"] for s in result["speedups"]}
    ran = result.get("checkpoint", "as given")  # absent in older records
    out.table(
        f"{result['model']}{'' if ran == 'as given' else f' ({ran})'}: time per output token on "
        f"{result['device']['name']}",
        (
            "batch",
            "state",
            "ran",
            "step",
            "state bytes",
            "ms",
            "p90",
            "state GB/step s",
            "FP32/this",
        ),
        [
            (
                row["batch"],
                row["state"],
                row["backend"],
                row["mode"],
                row["state_bytes_per_request"],
                1e3 * row["tpot_s"]["median"],
                1e3 * row["tpot_s"]["p90"],
                row["whole_step_state_gb_per_s"],
                times(faster.get((row["batch"], row["state"]))),
            )
            for row in result["rows"]
        ],
        note=f"{result['protocol']['input_tokens']} tokens in, {result['protocol']['output_tokens']} "
        f"timed; FP32/this: above 1 is faster than FP32; state bytes per request, with the convolution state "
        f"in {result['protocol']['dtype']}; state GB/step s: state bytes over the time of the whole model "
        f"step, not a kernel's bandwidth (see bench update); key order: "
        f"{result['protocol']['key_order']}" + _ring_note(result) + reference_note(result["rows"]),
    )
    if result.get("synthetic"):
        _synthetic_tables(out, result)
    for check in result["checks"]:
        out.text(
            f"check: {check['state']} logits {check['logit_error']:.1e} from the simulated run "
            f"(at most {check['logit_limit']:.0e}), {check['logit_distance_to_fp32']:.1e} from FP32"
        )


def _ring_note(result: dict[str, Any]) -> str:
    """What a row with a ring means."""
    if all(row.get("requantise_every", 1) == 1 for row in result["rows"]):
        return ""
    return (
        "; damp-every-L: states are written at every L-th update, their bytes count the inputs kept "
        "between, times are means over L steps"
    )


def _synthetic_tables(out: Output, result: dict[str, Any]) -> None:
    """Components of every step, and what the packed state saves beside what it could."""
    timed = [row for row in result["rows"] if row["components"]]
    if timed:
        out.table(
            "milliseconds of a step by component, from one profiled replay",
            ("batch", "state", "step", "bytes alone", *timed[0]["components"]),
            [
                (
                    row["batch"],
                    row["state"],
                    1e3 * row["tpot_s"]["median"],
                    None if row["bytes_s"] is None else 1e3 * row["bytes_s"],
                    *(1e3 * part["s"] for part in row["components"].values()),
                )
                for row in timed
            ],
            note="bytes alone: what a step moves, at the bandwidth of an in-place pass; projections: all matrix "
            "products but the experts' and the output layer's; components sum to the step",
        )
    out.table(
        "what the packed state saves",
        (
            *(
                "batch",
                "FP32 ms",
                "DAMP ms",
                "saved ms",
                "alone ms",
                "saved / alone %",
                "TPOT cut %",
            ),
            *("cut of bytes %", "paper's cut %", "update's share %", "state's share of bytes %"),
        ),
        [
            (
                saving["batch"],
                1e3 * saving["fp32_tpot_s"],
                1e3 * saving["damp_tpot_s"],
                1e3 * saving["saved_s"],
                *(
                    None if saving[key] is None else factor * saving[key]
                    for key, factor in (
                        ("isolated_saving_s", 1e3),
                        ("share_of_isolated", 100),
                        ("tpot_cut", 100),
                        ("cut_by_bytes", 100),
                        ("paper_tpot_cut", 100),
                        ("recurrent_share", 100),
                        ("state_share_of_bytes", 100),
                    )
                ),
            )
            for saving in result["savings"]
        ],
        note="SYNTHETIC weights; alone: layers x (FP32 - DAMP) of the update by itself; the paper measured the trained "
        "model at batch 256 on another server; update's share: of the FP32 step",
    )
    worst = max((row["check"]["module_error_median_worst"] for row in result["rows"]), default=0.0)
    out.text(
        f"check: mixers and feed-forwards within {worst:.1e} of the plain model on its inputs (median row); "
        f"{result['replaced_modules']}"
    )
    for reason in result["kept_modules"]:
        out.text(f"kept its own code: {reason}")
