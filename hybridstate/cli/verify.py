"""`hybridstate verify`: original against exported checkpoint, by their numbers."""

from typing import Annotated

import typer

from hybridstate.cli.options import Device, Json, Quiet, check_device
from hybridstate.cli.output import command


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "verify",
        short_help="Run original and exported checkpoint and compare them.",
        epilog="Example: hybridstate verify tiny-kda ./exported",
    )(verify)


def verify(
    original: Annotated[
        str,
        typer.Argument(metavar="ORIGINAL", help="The model exported from.", show_default=False),
    ],
    exported: Annotated[
        str,
        typer.Argument(
            metavar="EXPORTED",
            help="Checkpoint written by `hybridstate export-plan`.",
            show_default=False,
        ),
    ],
    device: Device = "auto",
    prompts: Annotated[int, typer.Option("--prompts", min=1, metavar="N", help="Texts read.")] = 4,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, metavar="N", help="Tokens of each text.")
    ] = 192,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=1, metavar="N", help="Greedy tokens after each.")
    ] = 32,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Account for every tensor, then compare logits, greedy tokens and states in float32.

    Passes if relative errors are at most 1e-5 and every token is the same; else exits with 5, or
    with 6 if the two folders do not belong together. `plan verify` compares digests alone.
    """
    with command("verify", model=original, json=json, quiet=quiet) as out:
        from hybridstate import api

        check_device(device)

        found = api.verify(
            original,
            exported,
            device=device,
            prompts=prompts,
            prompt_tokens=tokens,
            new_tokens=new_tokens,
            progress=out.progress,
        )
        out.table(
            f"{original} and {exported} compute the same ({found.dtype}, {found.device})",
            ("quantity", "found", "allowed"),
            [
                ("tensors equal", found.tensors.same, "-"),
                ("tensors moved as planned", len(found.tensors.moved), "-"),
                ("logits, relative error", f"{found.logit_error:.1e}", "1e-05"),
                (
                    f"states of {len(found.layers)} layers, relative error",
                    f"{found.state_error:.1e}",
                    "1e-05",
                ),
                (
                    "greedy tokens that differ",
                    f"0 of {found.prompts * found.new_tokens}",
                    "0",
                ),
            ],
            note=f"{found.prompts} x {found.prompt_tokens} tokens of {found.text}; smallest margin "
            f"between two best tokens {found.smallest_margin:.1e}",
        )
        out.result(found.to_json())
