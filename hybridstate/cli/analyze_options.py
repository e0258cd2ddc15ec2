"""Options of `analyze --validate`: which text, which prefixes, what else to measure on them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridstate.errors import UsageError

Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="ShareGPT JSON, OpenAI messages JSONL or plain text to validate on. [default: held-out prose]",
        show_default=False,
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        "--tiers",
        metavar="N,N,...",
        help="Prefix lengths in tokens. [default: 16384,8192,4096,1024 with --text, 2048,1024,512,128 "
        "without, 4096,2048,1024,256 for byte tokenizers]",
        show_default=False,
    ),
]
PerTier = Annotated[
    int | None,
    typer.Option(
        "--per-tier",
        metavar="N",
        help="Prefixes of each length. [default: 8, on a CPU 2]",
        show_default=False,
    ),
]
CharsPerToken = Annotated[
    float | None,
    typer.Option(
        "--chars-per-token",
        metavar="FLOAT",
        help="Characters per token that make a conversation eligible. [default: 3.5, byte tokenizers 1]",
        show_default=False,
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        "--candidates",
        metavar="N",
        help="Eligible conversations that are tokenised per length. [default: 500]",
        show_default=False,
    ),
]
GateObjective = Annotated[
    str | None,
    typer.Option(
        "--gate-objective",
        metavar="rank|median",
        help="What a measured gate input has to agree in: order or median horizon. [default: rank]",
        show_default=False,
    ),
]
Intervention = Annotated[
    int | None,
    typer.Option(
        "--intervention",
        metavar="N",
        min=0,
        help="Also zero parts of a cached state: N questions at each of 5 depths. [default: 0]",
        show_default=False,
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        metavar="N",
        min=1,
        help="Tokens of one forward call. [default: the whole prefix]",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class ValidationArguments:
    """What was given of the options above, None where nothing was."""

    text: Path | None = None
    tiers: tuple[int, ...] | None = None
    per_tier: int | None = None
    chars_per_token: float | None = None
    candidates: int | None = None
    objective: str | None = None
    intervention: int | None = None
    chunk: int | None = None

    def check(self, *, validate: bool) -> None:
        """Refuse options that would do nothing.

        Raises:
            UsageError: given without --validate, or an unknown objective.
        """
        if self.given() and not validate:
            name = next(iter(self.given())).replace("_", "-")
            name = "gate-objective" if name == "objective" else name
            raise UsageError(f"--{name} needs --validate", hint="add --validate")
        if self.objective not in (None, "rank", "median"):
            raise UsageError(
                f"--gate-objective takes rank or median, found {self.objective!r}",
                found=self.objective,
            )

    def given(self) -> dict[str, Any]:
        """Keyword arguments of `api.validate_horizons`."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}


def parse_tiers(value: str | None) -> tuple[int, ...] | None:
    """Lengths separated by commas.

    Raises:
        UsageError: something is no whole number.
    """
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise UsageError(
            f"--tiers takes whole numbers separated by commas, found {value!r:.60}", found=value
        ) from error
