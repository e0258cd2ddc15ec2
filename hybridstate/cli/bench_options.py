"""Options that several bench verbs share."""

from pathlib import Path
from typing import Annotated

import typer

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
        help="fp32, bf16, fp16 or damp; repeatable. [default: fp32, damp]",
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
Masks = Annotated[
    int, typer.Option("--seeds", metavar="N", help="Random masks per cutoff, 0 to 5.")
]
Samples = Annotated[int, typer.Option("--samples", metavar="N", min=1, help="Measured rounds.")]
