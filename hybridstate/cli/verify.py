"""`hybridstate verify`: original against exported checkpoint, by their numbers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hybridstate.cli.options import Device, Json, Quiet, check_device
from hybridstate.cli.output import command, counted

if TYPE_CHECKING:
    from hybridstate.quality.verify import Verification


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
    bf16: Annotated[
        bool, typer.Option("--bf16/--no-bf16", help="Also load both models in BF16.")
    ] = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Account for every tensor, then compare logits, greedy tokens and states.

    Passes if float32 errors are at most 1e-5, every token is the same, and BF16 is at most 1.05
    times as far from float32 as the original's; else exits with 5, or with 6 if the two folders do
    not belong together. A packed plan is also run from the runtime's pool with quantisation off.
    `plan verify` compares digests alone.
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
            bf16=bf16,
            progress=out.progress,
        )
        out.table(
            f"{original} and {exported} compute the same ({found.dtype}, {found.device})",
            ("quantity", "found", "allowed"),
            [
                ("tensors equal", found.tensors.same, "-"),
                ("tensors moved as planned", len(found.tensors.moved), "-"),
                ("logits, relative error", f"{found.logit_error:.1e}", f"{found.bound:.0e}"),
                (
                    f"states of {counted(len(found.layers), 'layer')}, relative error",
                    f"{found.state_error:.1e}",
                    f"{found.bound:.0e}",
                ),
                (
                    "greedy tokens that differ",
                    f"{found.differing} of {found.prompts * found.new_tokens}",
                    "-" if found.folded else "0",
                ),
                *_served(found),
            ],
            note=f"{found.prompts} x {found.prompt_tokens} tokens of {found.text}; smallest margin "
            f"between two best tokens {found.smallest_margin:.1e}"
            + (
                "; the output norm was folded into a 16-bit projection, whose rounding these figures hold "
                "(--value-order common folds nothing)"
                if found.folded
                else ""
            ),
        )
        out.result(found.to_json())


def _served(found: "Verification") -> Iterator[tuple[str, str, str]]:
    """Rows of the precisions a model is served in."""
    if found.bf16 is not None:
        low, first = found.bf16, found.bf16.first
        yield (
            f"BF16 error against float32 (original {low.original_error:.2e})",
            f"{low.exported_error:.2e}",
            "1.05 x original",
        )
        place = (
            ""
            if first is None
            else f", first: text {first.prompt}, token {first.step}, margin {first.margin:.1e}"
        )
        yield f"BF16 tokens that differ{place}", f"{low.differing}", "-"
    if found.packed is not None:
        row = found.packed
        yield (
            "FP32 states in stored coordinates, relative error",
            f"{row.recurrence_error:.1e}",
            "1e-05",
        )
        yield (
            "packed pool without INT8, relative error to an FP16 pool",
            f"{row.logit_error:.1e}",
            "-" if row.scaled else "2e-04",
        )
