"""Arguments and options that several verbs share, as annotated types: one name, one help text."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.plan.placement import Balance as BalanceMode

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model folder, org/name[@revision] on the Hugging Face Hub, or tiny-gdn or tiny-kda.",
        show_default=False,
    ),
]
LocalModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model folder (config.json and safetensors), or tiny-gdn or tiny-kda.",
        show_default=False,
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Make no request: Hub models come from the cache (as HF_HUB_OFFLINE)."
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        help="Where parts of Hub models are kept. [default: $XDG_CACHE_HOME/hybridstate]",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also for errors.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes, no progress.")]
OutputFolder = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Write results to this new folder."),
]
RequiredOutputFolder = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="DIR", help="Write results to this new folder."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Accept a folder that is not empty; replace files of that name."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be read and written, then stop.")
]
WMax = Annotated[
    list[int] | None,
    typer.Option(
        "--w-max",
        metavar="N",
        help="Cutoff in tokens, repeatable. [default: 16, 64, 128, 512]",
        show_default=False,
    ),
]
OneWMax = Annotated[int, typer.Option("--w-max", metavar="N", help="Cutoff in tokens, at least 4.")]
GateInput = Annotated[
    str,
    typer.Option(
        "--gate-input",
        metavar="auto|FLOAT",
        help="Representative gate input a_s; auto takes the paper's value, or a default with a warning.",
    ),
]
GateInputFrom = Annotated[
    Path | None,
    typer.Option(
        "--gate-input-from",
        metavar="FILE",
        help="Take the gate input that a recorded analyze --validate --json chose for this model.",
        show_default=False,
    ),
]
Epsilon = Annotated[
    float,
    typer.Option("--epsilon", metavar="FLOAT", help="Share still present at the horizon."),
]
LowerBound = Annotated[
    float | None,
    typer.Option(
        "--lower-bound",
        metavar="FLOAT",
        help="Lower bound of the safe gate, if the config lacks it.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where the model runs.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Of the weights; auto is float32 on a CPU, bfloat16 on a GPU.",
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tp", metavar="P", help="Tensor-parallel ranks that share the heads.")
]
Balance = Annotated[
    str,
    typer.Option(
        "--balance",
        metavar="off|storage|hybrid",
        help="Placement on the ranks: contiguous, stored units moved, heads permuted as well.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of every random choice.")]


def check_device(value: str) -> str:
    """The name of a device, checked without torch.

    Raises:
        UsageError: not `auto`, `cpu`, `cuda` or `cuda:N`.
    """
    if not re.fullmatch(r"auto|cpu(:0)?|cuda(:\d{1,4})?", value):
        raise UsageError(f"--device takes auto, cpu, cuda or cuda:N, found {value!r}", found=value)
    return value


def parse_balance(value: str) -> "BalanceMode":
    """A placement mode.

    Raises:
        UsageError: none of the three.
    """
    for mode in ("off", "storage", "hybrid"):
        if value == mode:
            return mode
    raise UsageError(f"--balance takes off, storage or hybrid, found {value!r}", found=value)


def parse_w_max(values: list[str] | None) -> int | Literal["auto"] | None:
    """A cutoff, or `auto`; none where the option is not given.

    Raises:
        UsageError: neither, or more than one.
    """
    if not values:
        return None
    if len(values) > 1:
        raise UsageError(
            f"a plan has one cutoff, found --w-max {' and '.join(values)}",
            hint="export one plan for each, or compare cutoffs with hybridstate analyze",
            found=values,
        )
    value = values[0]
    if value == "auto":
        return "auto"
    try:
        return int(value)
    except ValueError as error:
        raise UsageError(
            f"--w-max takes a whole number or auto, found {value!r}", found=value
        ) from error


def parse_gate_input(value: str) -> float | None:
    """`auto` is None, anything else a finite float.

    Raises:
        UsageError: neither.
    """
    if value == "auto":
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--gate-input takes auto or a finite number, found {value!r}")
    return number
