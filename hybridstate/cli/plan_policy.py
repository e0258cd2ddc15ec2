"""`hybridstate plan policy`: a Model-Optimizer DASC policy from the measurements of `bench restore`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.cli.options import (
    Epsilon,
    Force,
    GateInput,
    Json,
    Model,
    Quiet,
    parse_gate_input,
)
from hybridstate.cli.output import command
from hybridstate.defaults import EPSILON

EXAMPLE = "Example: hybridstate plan policy tiny-gdn restore.json --load wr -o policy.json"


def policy(
    model: Model,
    result: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT", help="Written by `hybridstate bench restore`.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the policy to this file.")
    ],
    load: Annotated[
        str, typer.Option("--load", metavar="nr|wr", help="Zeros for omitted heads, or replay.")
    ] = "wr",
    w_max: Annotated[
        int | None,
        typer.Option(
            "--w-max",
            metavar="N",
            help="Selected cutoff. [default: the largest that passes the format's gates]",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="TEXT",
            help="Revision to record. [default: digest of the index]",
            show_default=False,
        ),
    ] = None,
    gate_input: GateInput = "auto",
    epsilon: Epsilon = EPSILON,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write NVIDIA Model-Optimizer's DASC policy (format version 1) for a GDN model.

    The measurements come from `bench restore` on this model: prose per byte, one row per cutoff.
    `export-plan --policy FILE` goes the other way.
    """
    with command("plan policy", model=model, json=json, quiet=quiet) as out:
        from hybridstate import api
        from hybridstate.checkpoint import open_checkpoint
        from hybridstate.cli.bench_output import check_output
        from hybridstate.errors import SourceError, UsageError
        from hybridstate.plan.policy import GATES, Variant, policy_bytes
        from hybridstate.plan.policy_model import build_policy, measurements_of
        from hybridstate.provenance import sha256_json, write_file

        variants: dict[str, Variant] = {"nr": "dasc_nr", "wr": "dasc_wr"}
        if load not in variants:
            raise UsageError(f"--load takes nr or wr, found {load!r}", found=load)
        if output.suffix != ".json":
            raise UsageError(f"the policy is one file: give a name in .json, not {output}")
        check_output(output, force=force, reads=(result,))
        measured = _read(result)
        a_s = parse_gate_input(gate_input)
        found = api.analyze(model, gate_input=a_s, epsilon=epsilon)
        checkpoint = open_checkpoint(model)
        try:
            rows = measurements_of(measured, checkpoint, found.horizons, variants[load])
        except SourceError as error:
            raise SourceError(f"{result}: {error}", hint=error.hint, file=str(result)) from error
        made = build_policy(
            checkpoint,
            rows,
            epsilon=epsilon,
            gate_input=found.gate_input,
            revision=revision or f"index sha256:{checkpoint.digests()['index']}",
            data_id=f"sha256:{sha256_json(measured.get('protocol', {}))}",
            w_max=w_max,
        )
        write_file(output, policy_bytes(made))
        out.table(
            f"policy for {checkpoint.name}: W_max {made.selected_wmax}, {made.recovery}",
            ("W_max", "heads", "of", "saved %", "perplexity kept %", "top-1 %", "passes"),
            [
                (
                    row.wmax,
                    row.retained_heads,
                    row.total_heads,
                    f"{100 * row.checkpoint_savings:.1f}",
                    f"{100 * row.quality[0].perplexity_retention:.2f}",
                    f"{100 * row.quality[0].top1_agreement:.2f}",
                    row.passes(GATES),
                )
                for row in rows
            ],
            note="passes: " + ", ".join(f"{name} {value:g}" for name, value in GATES.items()),
        )
        out.text(f"wrote {output}")
        out.result({"path": str(output), "policy": made.model_dump(mode="json")})


def _read(file: Path) -> dict[str, Any]:
    """The `result` object of a file of `bench restore`, or of the folder it wrote.

    Raises:
        SourceError: not readable, or no JSON object.
    """
    from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes, result_of
    from hybridstate.errors import SourceError

    path = file / "restore.json" if file.is_dir() else file
    try:
        return result_of(an_object(parse_json(read_bytes(path)), "the document"))
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(
            f"{path}: not readable as JSON: {error}",
            hint="record it with `hybridstate bench restore MODEL -o FILE.json`",
            file=str(path),
        ) from error
