"""The cutoff of a plan taken from measurements: `export-plan --w-max auto --max-kl X`.

The measurements are a recorded `bench restore`: per cutoff the KL on held-out prose between a restored prefix and a
dense restore. Of all tested cutoffs the largest whose KL is at most X is taken, as it keeps the fewest bytes. The
measured masks have to be those of the plan: same checkpoint, same gate input.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes, result_of
from hybridstate.errors import UNREADABLE, PlanMismatch, SourceError, UsageError
from hybridstate.plan.select import Selection
from hybridstate.provenance import check_digests, sha256_bytes

LoadPolicy = Literal["nr", "wr"]
LOAD_POLICIES: Final[tuple[LoadPolicy, ...]] = get_args(LoadPolicy)

_AGAIN: Final = "record them with `hybridstate bench restore MODEL --w-max N ... -o FILE.json`"


@dataclass(frozen=True, slots=True)
class MeasuredCutoff:
    """One tested cutoff: prose KL in nats per token with its standard error, and what was restored."""

    w_max: int
    kl: float
    kl_se: float | None
    cases: int
    checkpoint_bytes: int
    mask_digest: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Cutoffs that `bench restore` tested on one checkpoint.

    Attributes:
        file, digest: the recording and its sha256.
        policy: `nr` (zeros for omitted units) or `wr` (replay).
        device, dtype, tokens: how it was measured.
        cutoffs: ascending.
    """

    file: str
    digest: str
    policy: LoadPolicy
    device: str
    dtype: str
    tokens: int
    cutoffs: tuple[MeasuredCutoff, ...]

    def choose(self, max_kl: float) -> int:
        """The largest cutoff whose KL is at most `max_kl`.

        Raises:
            UsageError: none is, or the bound is no number.
        """
        if not (math.isfinite(max_kl) and max_kl >= 0):
            raise UsageError(f"--max-kl takes a number from 0 on, found {max_kl}", found=max_kl)
        passing = [cutoff.w_max for cutoff in self.cutoffs if cutoff.kl <= max_kl]
        if not passing:
            best = min(self.cutoffs, key=lambda cutoff: cutoff.kl)
            raise UsageError(
                f"{self.file}: no tested cutoff stays within {max_kl:g} nats per token, the closest "
                f"is W_max {best.w_max} with {best.kl:.3g}",
                hint="allow more with --max-kl, or measure smaller cutoffs with bench restore --w-max",
                found=best.kl,
                expected=max_kl,
            )
        return max(passing)

    def require_mask(self, selection: Selection) -> None:
        """The plan keeps exactly the units that were measured at its cutoff.

        Raises:
            PlanMismatch: other units.
        """
        tested = next(c for c in self.cutoffs if c.w_max == selection.w_max)
        if tested.mask_digest != selection.mask_digest:
            raise PlanMismatch(
                f"{self.file}: at W_max {selection.w_max} other units were measured than this plan "
                f"keeps (mask {tested.mask_digest[:12]}, here {selection.mask_digest[:12]})",
                hint="use the gate input and epsilon of the measurement, or measure again with "
                "bench restore --gate-input",
                found=tested.mask_digest,
                expected=selection.mask_digest,
            )

    def block(self, max_kl: float) -> dict[str, Any]:
        """The `measured` block of a plan's selection."""
        return {
            "source": self.file,
            "source_digest": self.digest,
            "policy": self.policy,
            "max_kl": max_kl,
            "device": self.device,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "cutoffs": [
                {
                    "w_max": c.w_max,
                    "kl": c.kl,
                    "kl_se": c.kl_se,
                    "cases": c.cases,
                    "checkpoint_bytes": c.checkpoint_bytes,
                    "passed": c.kl <= max_kl,
                }
                for c in self.cutoffs
            ],
        }


def read_measured(path: str | Path, digests: Mapping[str, str], *, policy: str = "nr") -> Measured:
    """Read a recorded `bench restore` of the checkpoint with these digests.

    Args:
        path: its JSON document, or the folder with `restore.json`.
        digests: `config`, `index` and `decay` of the checkpoint at hand.
        policy: which way of loading has to stay within the bound.

    Raises:
        SourceError: no such recording, or one without digests.
        PlanMismatch: it is about another checkpoint.
        UsageError: no such policy.
    """
    if policy not in LOAD_POLICIES:
        raise UsageError(f"--load takes {' or '.join(LOAD_POLICIES)}, found {policy!r}")
    chosen: LoadPolicy = "nr" if policy == "nr" else "wr"
    file = Path(path)
    file = file / "restore.json" if file.is_dir() else file
    try:
        raw = read_bytes(file)
        result = result_of(an_object(parse_json(raw), "the document"))
        recorded: dict[str, str] = an_object(result["model_digests"], "model_digests")
        protocol = an_object(result["protocol"], "protocol")
        found = Measured(
            file=file.name,
            digest=sha256_bytes(raw),
            policy=chosen,
            device=str(result["device"]["name"]),
            dtype=str(protocol["dtype"]),
            tokens=int(protocol["tokens"]),
            cutoffs=_cutoffs(result["arms"], chosen),
        )
        if not isinstance(recorded, dict) or not found.cutoffs:
            raise ValueError(f"no arm {chosen} with a cutoff")
    except FileNotFoundError as error:
        raise SourceError(f"no file {file}", hint=_AGAIN, file=str(file)) from error
    except (OSError, *UNREADABLE) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"{file}: no measurements of bench restore that name their model: {reason}",
            hint=_AGAIN,
            file=str(file),
            expected="result.model_digests, result.protocol and result.arms",
        ) from error
    check_digests(file, recorded, digests, hint=_AGAIN)
    return found


def _cutoffs(arms: Sequence[Mapping[str, Any]], policy: LoadPolicy) -> tuple[MeasuredCutoff, ...]:
    found = []
    for arm in arms:
        if arm["policy"] != policy or arm["seed"] is not None or arm["w_max"] is None:
            continue
        prose = arm["prose"]
        kl, error = float(prose["kl"]), prose["kl_se"]
        if not (math.isfinite(kl) and kl >= 0):
            raise ValueError(f"arm {arm['arm']} has a KL of {kl}")
        if error is not None and not (math.isfinite(error) and error >= 0):
            raise ValueError(f"arm {arm['arm']} has a standard error of {error}")
        for name, value, least in (("w_max", arm["w_max"], 4), ("cases", prose["cases"], 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"arm {arm['arm']} has a {name} of {value!r:.40}")
        found.append(
            MeasuredCutoff(
                w_max=int(arm["w_max"]),
                kl=kl,
                kl_se=None if error is None else float(error),
                cases=int(prose["cases"]),
                checkpoint_bytes=int(arm["checkpoint_bytes"]),
                mask_digest=str(arm["mask_digest"]),
            )
        )
    twice = len(found) - len({cutoff.w_max for cutoff in found})
    if twice:
        raise ValueError(f"{twice} cutoffs of {policy} occur twice")
    return tuple(sorted(found, key=lambda cutoff: cutoff.w_max))
