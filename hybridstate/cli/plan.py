"""`hybridstate plan`: look into a bundle, check it, compare two, match one with its model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridstate.cli import plan_policy
from hybridstate.cli.options import CacheDir, Json, Offline, Quiet
from hybridstate.cli.output import Output, command, counted
from hybridstate.defaults import REPEATED_LIMIT

if TYPE_CHECKING:
    from hybridstate.plan.schema import CalibrationBlock
    from hybridstate.plan.store import Plan

PlanFolder = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN", help="Plan bundle, or an exported checkpoint.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    """Add the group and its verbs."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.command("show", epilog="Example: hybridstate plan show ./plan")(show)
    group.command("validate", epilog="Example: hybridstate plan validate ./plan")(validate)
    group.command(
        "diff",
        short_help="Fields and arrays in which two plans differ.",
        epilog="Example: hybridstate plan diff ./plan ./plan",
    )(diff)
    group.command(
        "verify",
        short_help="Does a plan belong to a checkpoint? Digests only.",
        epilog="Example: hybridstate plan verify ./plan tiny-kda",
    )(verify)
    group.command(
        "policy", short_help="Write Model-Optimizer's DASC policy.", epilog=plan_policy.EXAMPLE
    )(plan_policy.policy)
    app.add_typer(
        group, name="plan", help="Look into, check and compare plans.", short_help="Inspect plans."
    )


def show(plan: PlanFolder, json: Json = False, quiet: Quiet = False) -> None:
    """What a plan keeps, in which precision, and where it came from."""
    with command("plan show", json=json, quiet=quiet) as out:
        from hybridstate.plan.schema import to_content
        from hybridstate.plan.store import read_plan

        found = read_plan(plan)
        show_plan(out, found, digest=found.digest)
        out.result(to_content(found.document))


def validate(plan: PlanFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Check schema, digests and meaning of every field and array."""
    with command("plan validate", json=json, quiet=quiet) as out:
        from hybridstate.plan.store import read_plan

        found = read_plan(plan)
        nbytes = sum(array.nbytes for array in found.arrays.values())
        out.text(f"valid: {len(found.arrays)} arrays, {nbytes:,} bytes, digest {found.digest}")
        out.result(
            {
                "valid": True,
                "digest": found.digest,
                "schema_version": found.document.schema_version,
                "arrays": len(found.arrays),
                "array_bytes": nbytes,
            }
        )


def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A plan.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """In which fields and arrays two plans differ; exits with 0 either way."""
    with command("plan diff", json=json, quiet=quiet) as out:
        from hybridstate.plan.compare import diff as compare
        from hybridstate.plan.store import read_plan

        found = compare(read_plan(left), read_plan(right))
        if found.same and not found.fields:
            out.text(f"same content: digest {found.left}")
        if found.fields:
            out.table(
                "fields that differ",
                ("field", "A", "B"),
                [(f.path, _text(f.left), _text(f.right)) for f in found.fields],
            )
        if found.arrays:
            out.table(
                "arrays that differ",
                ("array", "entries", "what"),
                [(a.name, a.changed, _side(a.what)) for a in found.arrays],
            )
        out.result(found.to_json())


def verify(
    plan: PlanFolder,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint to match; left out, the exported checkpoint PLAN lies in.",
            show_default=False,
        ),
    ] = None,
    offline: Offline = False,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check by digests that a plan belongs to a checkpoint, and say to which of its two.

    Runs no model: `hybridstate verify` compares the numbers.
    """
    with command("plan verify", model=model, json=json, quiet=quiet) as out:
        from hybridstate.checkpoint import open_checkpoint
        from hybridstate.plan.compare import verify_against
        from hybridstate.plan.store import read_plan

        found = read_plan(plan)
        checkpoint = open_checkpoint(
            _home(plan) if model is None else model,
            lower_bound=found.document.model.lower_bound if model is None else None,
            offline=offline,
            cache_dir=cache_dir,
            progress=out.progress,
        )
        order = verify_against(found, checkpoint)
        if model is None:
            _check_reference(found.digest, checkpoint.config, checkpoint.name)
        meaning = (
            "key channels in the model's order"
            if order == "original"
            else "key channels in the plan's stored order"
        )
        out.text(f"{checkpoint.name} is the {order} checkpoint of this plan ({meaning})")
        out.result({"order": order, "checkpoint": str(checkpoint.path), "digest": found.digest})


def _check_reference(digest: str, config: Mapping[str, Any], name: str) -> None:
    """The plan in a checkpoint is the one that its `config.json` names.

    Raises:
        PlanMismatch: it was replaced.
    """
    from hybridstate.errors import PlanMismatch
    from hybridstate.plan.store import STATE_PLAN

    reference = config.get(STATE_PLAN)
    named = reference.get("digest") if isinstance(reference, Mapping) else None
    if named != digest:
        raise PlanMismatch(
            f"config.json of {name} names the plan {named!s:.12}, {STATE_PLAN}/ holds "
            f"{digest[:12]}: one of them was replaced",
            hint="export the checkpoint again",
            found=digest,
            expected=None if named is None else str(named),
        )


def _home(plan: Path) -> str:
    """The exported checkpoint around a bundle.

    Raises:
        UsageError: the bundle lies in no checkpoint.
    """
    from hybridstate.errors import UsageError
    from hybridstate.plan.store import find_bundle

    folder = find_bundle(plan).absolute().parent
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{plan} is a bundle without weights, so MODEL is needed",
            hint=f"hybridstate plan verify {plan} MODEL",
            file=str(plan),
        )
    return str(folder)


def show_plan(out: Output, plan: "Plan", *, digest: str | None) -> None:
    """The tables of a plan; also the human result of `export-plan`."""
    document = plan.document
    model = document.model
    first = model.layers[0]
    bound = "" if model.lower_bound is None else f", lower bound {model.lower_bound:g}"
    out.text(
        f"plan for {model.name}: {model.family}, {model.gate} gate{bound}, {len(model.layers)} "
        f"linear layers of {first.key_heads} key and {first.value_heads} value heads, "
        f"{first.key_dim} x {first.value_dim}"
    )
    if digest is not None:
        out.text(f"digest {digest}")
    if document.horizons is not None:
        found = document.horizons
        out.text(f"gate input {found.gate_input:g} ({found.chosen_by}), epsilon {found.epsilon:g}")
    for note in document.provenance.notes:
        out.text(f"note: {note}")
    _show_selection(out, plan)
    _show_measured(out, plan)
    _show_placement(out, plan)
    _show_precision(out, plan)


def _show_selection(out: Output, plan: "Plan") -> None:
    from hybridstate.plan.accounting import Accounting

    document = plan.document
    selection, stored = document.selection, document.accounting
    if selection is None or stored is None:
        return
    accounting = Accounting(**stored.model_dump())
    units = sum(layer.units for layer in selection.layers)
    kept = sum(layer.retained for layer in selection.layers)
    counts = [layer.retained for layer in selection.layers]
    out.table(
        f"checkpoint: {selection.unit}s kept by {selection.selector}",
        ("W_max", "retained", "of", "per layer", "W_replay", "bytes", "full", "temporal"),
        [
            (
                selection.w_max,
                kept,
                units,
                f"{min(counts)}..{max(counts)}",
                selection.w_replay,
                accounting.ragged_bytes,
                _ratio(accounting.ratio_full_ragged),
                _ratio(accounting.ratio_temporal_ragged),
            )
        ],
        note=f"dense: {accounting.dense_bytes:,} bytes with the convolution state",
    )


def _show_measured(out: Output, plan: "Plan") -> None:
    selection = plan.document.selection
    if selection is None or selection.measured is None:
        return
    found = selection.measured
    out.table(
        f"the cutoff is the largest tested one within {found.max_kl:g} nats per token ({found.policy}, "
        f"{found.source}, {found.tokens:,} tokens in {found.dtype} on {found.device})",
        ("W_max", "prose KL", "+/-", "cases", "bytes", "within"),
        [
            (c.w_max, c.kl, c.kl_se, c.cases, c.checkpoint_bytes, "yes" if c.passed else "no")
            for c in found.cutoffs
        ],
    )


def _show_placement(out: Output, plan: "Plan") -> None:
    found = plan.document.placement
    if found is None:
        return
    out.table(
        f"placement {found.mode} on {found.tp} ranks, in units",
        ("rank", "computed", "stored"),
        [
            (rank, computed, stored)
            for rank, (computed, stored) in enumerate(
                zip(found.rank_units, found.stored_units, strict=True)
            )
        ],
        note=f"a slot has room for {found.slot_units:,} on every rank; {found.remote_units:,} cross "
        "ranks at each store and load",
    )


def _show_precision(out: Output, plan: "Plan") -> None:
    document = plan.document
    precision = document.precision
    if precision is None:
        return
    out.table(
        "live state",
        (
            "FP16 channels",
            "of",
            "bits per value",
            "packed bytes",
            "FP32 bytes",
            "key order",
            "values",
        ),
        [
            (
                precision.k_hi,
                document.model.layers[0].key_dim,
                precision.bits_per_value,
                precision.state_packed_bytes,
                precision.state_dense_bytes,
                f"{precision.key_order}, " + _where_keys_move(plan),
                (
                    "model's order"
                    if precision.value_order == "none"
                    else f"{precision.value_order} order"
                )
                + (", scaled" if precision.value_scale else ""),
            )
        ],
        note=f"layout {document.layout_id}"
        + (
            ""
            if precision.requantise_every == 1
            else f"; written at every {precision.requantise_every}th update, "
            f"{precision.bits_per_value_with_ring:.3f} bits per value with the inputs kept between"
        ),
    )
    if document.calibration is not None and document.calibration.validation:
        out.table(
            "validation against FP32",
            ("format", "KL, nats", "top-1 %", "state error"),
            [
                (r.format, r.kl, f"{100 * r.top1:.2f}", r.state_error)
                for r in document.calibration.validation
            ],
            note=_validation_note(document.calibration),
        )


def _where_keys_move(plan: "Plan") -> str:
    """Who applies the key order of a plan."""
    if plan.absorbs_keys:
        return "in the exported weights"
    precision = plan.document.precision
    if precision is not None and precision.key_order == "expand":
        return "for a loader that replicates q and k"
    return "gathered by the kernel"


def _validation_note(calibration: "CalibrationBlock") -> str:
    text = ""
    sequences, updates = calibration.validation_sequences, calibration.validation_positions
    if sequences is not None and updates is not None:
        text = f"{counted(sequences, 'sequence')} of {counted(updates, 'update')}; "
    text += f"{calibration.protocol.get('profile', 'given')} protocol"
    if calibration.split_agreement is not None:
        text += f"; two halves of the prompts share {calibration.split_agreement:.0%} of channels"
    if calibration.split_agreement_random is not None:
        text += f" (chance {calibration.split_agreement_random:.1%})"
    if (calibration.repeated_32gram_share or 0.0) > REPEATED_LIMIT:
        text += (
            f"; {calibration.repeated_32gram_share:.0%} of its text repeats itself: the model loops"
        )
    return text


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def _side(what: str) -> str:
    return what.replace("on the left", "in A").replace("on the right", "in B")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{len(value)} fields"
    text = "-" if value is None else str(value)
    return text if len(text) <= 48 else text[:45] + "..."
