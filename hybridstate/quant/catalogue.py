"""Names of arms, and what each name means.

    fp32 fp16 bf16 fp8 int4 nvfp4 int8-step int8-step-stochastic     one format for all key channels
    int8-every-L                                                     INT8 written at every L-th update
    int8-feedback-fp16 int8-feedback-int4                            INT8 with its error carried over
    damp[-LOW][-kN][-SELECTOR][-per-head][-every-L]                  FP16 channels, the rest low

LOW is int8 (default), fp8, int4 or nvfp4; SELECTOR is damp (default), error-only, retention-only, energy or
random. `+reorder` at the end of a name with a low format adds value scaling and reordering.
"""

import re
from dataclasses import dataclass
from typing import Final

from hybridstate.errors import UsageError
from hybridstate.families import ModelSpec
from hybridstate.quant.formats import FORMATS, Format

SELECTORS: Final = ("damp", "error-only", "retention-only", "energy", "random")
DEFAULT: Final = ("fp32", "fp16", "bf16", "int8-step", "damp", "damp-random")
GROUPS: Final = {
    "default": DEFAULT,
    "formats": (
        *("fp8", "int8-step+reorder", "int8-step-stochastic", "int4", "int4+reorder", "nvfp4"),
        *("damp+reorder", "damp-fp8", "damp-int4", "damp-int4+reorder", "damp-nvfp4"),
    ),
    "budgets": tuple(f"damp-k{n}" for n in (0, 4, 8, 16, 32, 64)),
    "selectors": (
        *("damp", "damp-error-only", "damp-retention-only", "damp-energy", "damp-random"),
        "damp-per-head",
    ),
    "baselines": (
        *("int8-feedback-fp16", "int8-feedback-int4"),
        *("int8-every-4", "int8-every-8", "int8-every-16"),
        *("damp-every-4", "damp-every-8", "damp-every-16"),
    ),
    "paper": (
        *("fp32", "fp16", "bf16", "fp8", "int8-step", "int8-step+reorder"),
        *("int4", "int4+reorder", "nvfp4", "damp+reorder", "damp-int4+reorder", "damp-nvfp4"),
        *(f"damp-{s}+reorder" for s in (*SELECTORS[1:], "per-head")),
        *(f"damp-k{n}+reorder" for n in (4, 8, 32, 64)),
    ),
}
"""Groups of arms by name; `all` is every one of them, `paper` the rows of DAMP's tables and figures."""

_PLAIN: Final = re.compile(
    r"(?P<format>fp32|fp16|bf16|fp8|int8-step-stochastic|int8-step|int4|nvfp4)(?P<reorder>\+reorder)?"
)
_INT8: Final = re.compile(
    r"int8(-every-(?P<every>[0-9]{1,9})(?P<reorder>\+reorder)?|-feedback-(?P<feedback>fp16|int4))"
)
_DAMP: Final = re.compile(
    r"damp(-(?P<low>int8|fp8|int4|nvfp4))?(-k(?P<k_hi>[0-9]{1,9}))?"
    r"(-(?P<selector>error-only|retention-only|energy|random))?(?P<alone>-per-head)?"
    r"(-every-(?P<every>[0-9]{1,9}))?(?P<reorder>\+reorder)?"
)
_EXACT: Final = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class ArmName:
    """A parsed name.

    Attributes:
        name: as given.
        low: format of the channels that are not protected.
        selector: how channels are chosen; None protects none.
        k_hi: protected channels per head; None is the run's own number.
        shared: value heads of one key head share their channels.
        every: updates between two writes.
        feedback: format of the carried residual.
        reorder: whether values are scaled and reordered.
    """

    name: str
    low: Format
    selector: str | None = None
    k_hi: int | None = None
    shared: bool = True
    every: int = 1
    feedback: str | None = None
    reorder: bool = False


def parse(name: str) -> ArmName:
    """One arm's name.

    Raises:
        UsageError: no such arm.
    """
    if match := _PLAIN.fullmatch(name):
        if not (match["reorder"] and match["format"] in _EXACT):
            return ArmName(name, FORMATS[match["format"]], reorder=bool(match["reorder"]))
    elif match := _INT8.fullmatch(name):
        every = int(match["every"] or 1)
        if every >= 1:
            return ArmName(
                name,
                FORMATS["int8-step"],
                every=every,
                feedback=match["feedback"],
                reorder=bool(match["reorder"]),
            )
    elif match := _DAMP.fullmatch(name):
        low = match["low"] or "int8"
        every = int(match["every"] or 1)
        if every >= 1:
            return ArmName(
                name,
                FORMATS["int8-step" if low == "int8" else low],
                selector=match["selector"] or "damp",
                k_hi=None if match["k_hi"] is None else int(match["k_hi"]),
                shared=match["alone"] is None,
                every=every,
                reorder=bool(match["reorder"]),
            )
    raise UsageError(
        f"no storage format {name!r:.60}",
        hint=f"groups: {', '.join(GROUPS)}, all; names: {', '.join(FORMATS)}, int8-every-16, "
        "int8-feedback-int4, damp, damp-int4, damp-k32, damp-energy, damp-every-16, ...; "
        "+reorder at the end scales and reorders values",
        found=name,
    )


def parse_list(text: str | None, spec: ModelSpec | None = None) -> tuple[ArmName, ...]:
    """Arms of a comma-separated list of names and groups, FP32 first, each once.

    Raises:
        UsageError: a name is unknown or protects more channels than a head of the model has, or the
            list is empty.
    """
    if text is None:
        return tuple(parse(name) for name in DEFAULT)
    names: dict[str, None] = {"fp32": None}
    given = [part.strip() for part in text.split(",") if part.strip()]
    if not given:
        raise UsageError("no storage format given", hint="leave the option out for the default")
    for part in given:
        members = GROUPS.get(part, (part,))
        if part == "all":
            members = tuple(name for group in GROUPS.values() for name in group)
        names.update(dict.fromkeys(members))
    arms = tuple(parse(name) for name in names)
    channels = None if spec is None else min(layer.key_dim for layer in spec.layers)
    for arm in arms:
        if channels is not None and arm.k_hi is not None and arm.k_hi > channels:
            raise UsageError(
                f"{arm.name} protects {arm.k_hi} channels, the state has {channels} per head",
                found=arm.k_hi,
                expected=f"0 to {channels}",
            )
    return arms
