"""NVIDIA Model-Optimizer's DASC policy, `format_version` 1, read and written (GDN heads alone).

A policy names the retained heads of every layer by module path, with their static horizons, and the
measurements that justify the cutoff: one per candidate, each with quality on named slices. It is
bound to a model by two sha256 over canonical JSON, of layer names with head counts and of the decay
parameters in their storage dtype. Unknown keys are kept, so reading and writing loses nothing.

The direction of the gate input is theirs too: a larger one shortens horizons and drops more heads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes
from hybridstate.errors import SourceError

Variant = Literal["dasc_nr", "dasc_wr"]
StorageDtype = Literal["float16", "bfloat16", "float32"]

_FORM: Final = "give a DASC policy, as Model-Optimizer or `hybridstate plan policy` writes it"

GATES: Final = {
    "min_perplexity_retention": 0.995,
    "min_top1_agreement": 0.98,
    "min_checkpoint_savings": 0.2,
}
"""Thresholds that a measurement must reach; the defaults of Model-Optimizer."""

RECOVERY: Final[dict[Variant, Literal["zero", "suffix_replay"]]] = {
    "dasc_nr": "zero",
    "dasc_wr": "suffix_replay",
}

Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, gt=0)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Finite, Field(ge=0, le=1)]
Above = Annotated[Finite, Field(gt=0)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Quality(_Kept):
    """One slice: how well requests went on after a restore, and whether the restore was exact."""

    slice_id: Text
    perplexity_retention: Above
    top1_agreement: Share
    finite_continuation_logits: Flag
    retained_state_exact: Flag
    omitted_state_matches_recovery: Flag
    convolution_state_exact: Flag


class Measurement(_Kept):
    """What one cutoff saves and costs."""

    variant: Variant
    wmax: Positive
    retained_heads: Whole
    total_heads: Positive
    checkpoint_savings: Annotated[Finite, Field(ge=0, lt=1)]
    quality: Annotated[tuple[Quality, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_result_per_slice(self) -> Self:
        if len({quality.slice_id for quality in self.quality}) < len(self.quality):
            raise ValueError("slice_id values must be unique")
        return self

    def passes(self, gates: Mapping[str, float]) -> bool:
        """Whether every gate is reached on every slice."""
        return self.checkpoint_savings >= gates["min_checkpoint_savings"] and all(
            quality.perplexity_retention >= gates["min_perplexity_retention"]
            and quality.top1_agreement >= gates["min_top1_agreement"]
            and quality.finite_continuation_logits
            and quality.retained_state_exact
            and quality.omitted_state_matches_recovery
            and quality.convolution_state_exact
            for quality in self.quality
        )


class LayerPolicy(_Kept):
    """Heads of one layer: which are kept, and the horizons that decided it."""

    num_heads: Positive
    static_horizons: tuple[Above, ...]
    retained_heads: tuple[Whole, ...]
    omitted_heads: tuple[Whole, ...]

    @model_validator(mode="after")
    def _heads_are_shared_out(self) -> Self:
        if len(self.static_horizons) != self.num_heads:
            raise ValueError(f"{len(self.static_horizons)} horizons for {self.num_heads} heads")
        if sorted(self.retained_heads + self.omitted_heads) != list(range(self.num_heads)):
            raise ValueError("retained and omitted heads must name every head once")
        return self


class Policy(_Kept):
    """A whole policy document."""

    format_version: Literal[1] = 1
    variant: Variant
    recovery: Literal["zero", "suffix_replay"]
    epsilon: Annotated[Above, Field(lt=1)]
    static_gate_input: Finite
    decay_parameter_storage_dtype: StorageDtype = "float32"
    selected_wmax: Positive
    wmax_candidates: Annotated[tuple[Positive, ...], Field(min_length=1)]
    quality_gates: dict[str, Finite]
    model_id: Text
    model_revision: Text
    model_config_id: Text
    calibration_data_id: Text
    granularity: Literal["gdn_head"] = "gdn_head"
    preserve_convolution_state: Literal[True] = True
    active_runtime_state: Literal["dense"] = "dense"
    model_structure_sha256: Sha256
    decay_parameters_sha256: Sha256
    layers: Annotated[dict[str, LayerPolicy], Field(min_length=1)]
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.recovery != RECOVERY[self.variant]:
            raise ValueError(f"{self.variant} recovers by {RECOVERY[self.variant]}")
        if self.selected_wmax not in self.wmax_candidates:
            raise ValueError("selected_wmax is not a candidate")
        measured = [measurement.wmax for measurement in self.measurements]
        if sorted(measured) != sorted(set(self.wmax_candidates)):
            raise ValueError("one measurement is needed for every candidate, and no other")
        if any(measurement.variant != self.variant for measurement in self.measurements):
            raise ValueError("a measurement is of the other variant")
        for name, layer in self.layers.items():
            kept = tuple(h for h, t in enumerate(layer.static_horizons) if t > self.selected_wmax)
            if layer.retained_heads != kept:
                raise ValueError(f"{name}: retained heads are not those above selected_wmax")
        return self


def read_policy(path: str | Path) -> Policy:
    """Read and check a policy file.

    Raises:
        SourceError: unreadable, not format version 1, or it contradicts itself.
    """
    file = Path(path)

    def refuse_constant(text: str) -> float:
        raise ValueError(f"{text} is not a number a policy may hold")

    def refuse_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} appears twice in one object")
        return found

    try:
        content = an_object(
            parse_json(
                read_bytes(file), parse_constant=refuse_constant, object_pairs_hook=refuse_repeated
            ),
            "the policy",
        )
        return Policy.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "document"
        message = str(first["msg"]).removeprefix("Value error, ").replace("valid tuple", "list")
        said = f"no {place!r}" if first["type"] == "missing" else f"{place}: {message}"
        raise SourceError(f"{file}: {said}", hint=_FORM, file=str(file)) from error
    except (OSError, ValueError, TypeError) as error:
        raise SourceError(
            f"{file}: not readable as JSON: {error}", hint=_FORM, file=str(file)
        ) from error


def policy_bytes(policy: Policy) -> bytes:
    """The file: sorted keys, two spaces, LF; Model-Optimizer reads any order."""
    content = policy.model_dump(mode="json")
    return (json.dumps(content, sort_keys=True, indent=2, allow_nan=False) + "\n").encode("ascii")
