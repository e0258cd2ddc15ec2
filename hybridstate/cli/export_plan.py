"""`hybridstate export-plan`: the plan bundle, and the checkpoint that carries its key order."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hybridstate.cli.options import (
    Balance,
    CacheDir,
    DryRun,
    Epsilon,
    GateInput,
    GateInputFrom,
    Json,
    LowerBound,
    Model,
    Offline,
    Quiet,
    RequiredOutputFolder,
    parse_balance,
    parse_gate_input,
    parse_w_max,
)
from hybridstate.cli.output import Output, command
from hybridstate.defaults import EPSILON
from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.plan.orders import KeyOrder, ValueOrder
    from hybridstate.weights.export import ExportedPlan


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "export-plan",
        short_help="Write the plan, and the checkpoint that carries its key order.",
        epilog="Example: hybridstate export-plan tiny-kda --w-max 64 -o plan\n\n"
        "Example: hybridstate export-plan tiny-kda --w-max auto --max-kl 0.01 --measured restore.json -o plan\n\n"
        "Example: hybridstate export-plan tiny-gdn --w-max 64 --calibration cal --check -o exported",
    )(export_plan)


def export_plan(
    model: Model,
    output: RequiredOutputFolder,
    w_max: Annotated[
        list[str] | None,
        typer.Option(
            "--w-max",
            metavar="N|auto",
            help="Cutoff in tokens, at least 4; leave it out for a plan of the packed state alone. auto takes "
            "the largest measured one within --max-kl.",
            show_default=False,
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            metavar="X",
            help="With --w-max auto: most nats per token that a restored prefix may be off a dense one.",
            show_default=False,
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FILE",
            help="With --w-max auto: what bench restore -o wrote for this model.",
            show_default=False,
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(
            "--load",
            metavar="nr|wr",
            help="With --w-max auto: how omitted units are loaded, as zeros or by a replay.",
        ),
    ] = "nr",
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            metavar="FILE",
            help="Model-Optimizer DASC policy that gives cutoff and gate input instead.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="DIR",
            help="Folder written by `hybridstate calibrate` for this model.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        bool | None,
        typer.Option(
            "--weights/--no-weights",
            help="Write the permuted checkpoint. [default: if calibrated]",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Then compare original and exported (runs both models)."),
    ] = False,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            metavar="P",
            help="Also place heads and packed units on P tensor-parallel ranks.",
            show_default=False,
        ),
    ] = None,
    balance: Balance = "off",
    kernels: Annotated[
        Path | None,
        typer.Option(
            "--kernels",
            metavar="DIR",
            help="Also write the decode step for this plan there: one module, torch and triton only.",
            show_default=False,
        ),
    ] = None,
    key_order: Annotated[
        str,
        typer.Option(
            "--key-order",
            metavar="ORDER",
            help="Key channels: shared by the value heads of a key head, per-head (left to the kernel), or "
            "expand (per head in the weights: q and k are replicated).",
        ),
    ] = "shared",
    value_order: Annotated[
        str,
        typer.Option(
            "--value-order",
            metavar="ORDER",
            help="Value dims and scales: none, fold (per head, output norm folded into its projection), or "
            "common (one order per layer). Needs a calibration with damp+reorder.",
        ),
    ] = "none",
    requantise_every: Annotated[
        int,
        typer.Option(
            "--requantise-every",
            metavar="L",
            min=1,
            help="Updates between two writes of the packed state, 1 to 16; the inputs of the others are kept.",
        ),
    ] = 1,
    gate_input: GateInput = "auto",
    gate_input_from: GateInputFrom = None,
    epsilon: Epsilon = EPSILON,
    lower_bound: LowerBound = None,
    offline: Offline = False,
    cache_dir: CacheDir = None,
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier export, the whole folder.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what an engine loads: which state to keep, in which precision and order.

    With --w-max alone the output is a plan bundle (plan.json and plan.safetensors). With
    --calibration it is a whole checkpoint whose key channels are permuted, with the bundle in
    state_plan/. The folder appears whole or not at all. A Hub model needs --no-weights or no
    calibration: its weights are not downloaded.
    """
    with command("export-plan", model=model, json=json, quiet=quiet) as out:
        from hybridstate import api
        from hybridstate.provenance import check_apart

        cutoff = parse_w_max(w_max)
        _check_load(load, chosen=cutoff == "auto")
        check_apart(output, measured, policy, gate_input_from)
        exported = api.export_plan(
            model,
            out=output,
            w_max=cutoff,
            max_kl=max_kl,
            measured_from=measured,
            load=load,
            policy=policy,
            calibration=calibration,
            weights=weights,
            tp=tp,
            balance=parse_balance(balance),
            kernels=kernels,
            key_order=cast("KeyOrder", key_order),
            value_order=cast("ValueOrder", value_order),
            requantise_every=requantise_every,
            gate_input=parse_gate_input(gate_input),
            gate_input_from=gate_input_from,
            epsilon=epsilon,
            lower_bound=lower_bound,
            check=check,
            dry_run=dry_run,
            force=force,
            offline=offline,
            cache_dir=cache_dir,
            progress=out.progress,
        )
        _show(out, exported, checked=check)
        for warning in exported.warnings:
            out.warn(warning)
        out.result(exported.to_json())


def _check_load(load: str, *, chosen: bool) -> None:
    """Refuse a way of loading that is none, or that no cutoff is chosen by.

    Raises:
        UsageError: it is.
    """
    if load not in ("nr", "wr"):
        raise UsageError(f"--load takes nr or wr, found {load!r}", found=load)
    if load != "nr" and not chosen:
        raise UsageError(
            "--load says by which measurements a cutoff is chosen", hint="add --w-max auto"
        )


def _show(out: Output, exported: "ExportedPlan", *, checked: bool) -> None:
    from hybridstate.cli.plan import show_plan

    show_plan(out, exported.plan, digest=exported.digest)
    layout = exported.layout
    if layout is not None:
        out.table(
            "checkpoint",
            ("tensors", "moved", "shards", "side files", "bytes"),
            [
                (
                    layout.tensors,
                    len(layout.moves),
                    len(layout.shards),
                    len(layout.side_files),
                    layout.nbytes,
                )
            ],
        )
        if layout.growth is not None:
            grown = layout.growth
            out.table(
                "key heads replicated, one for each value head",
                ("config", "key heads", "tensors", "bytes added", "conv bytes", "before"),
                [
                    (
                        grown.field,
                        f"{grown.before} -> {grown.after}",
                        len(grown.shapes),
                        grown.added_bytes,
                        grown.conv_after,
                        grown.conv_before,
                    )
                ],
            )
        if layout.rounded:
            out.warn(
                f"the output norm is folded into {layout.rounded} 16-bit projections: their entries are rounded "
                "anew (at most half a unit in the last place); --value-order common moves without rounding"
            )
        for name in layout.left_out:
            out.warn(f"{name} is not copied: it may hold weights in the old order")
    if exported.verification is not None:
        out.text(
            f"checked: logits within {exported.verification['logit_error']:.1e}, states within "
            f"{exported.verification['state_error']:.1e}, "
            f"{exported.verification['differing'] or 'no'} tokens differ"
        )
    elif checked and exported.written:
        out.text("checked: the bundle reads back and belongs to the model; no weights were written")
    if exported.kernels is not None:
        out.text(f"wrote {exported.kernels}: check it with python {exported.kernels} --check")
    out.text(f"{'wrote' if exported.written else 'would write'} {exported.path}")
