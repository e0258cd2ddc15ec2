"""The `plan.json` of a bundle: what it may contain, and nothing else.

Unknown keys, NaN and infinities are refused. Infinite horizons live in the arrays, never here.
A reader accepts `schema_version` up to its own and refuses a newer one. The JSON Schema of
`PlanDocument` is committed as `plans/plan.schema.json`.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

SCHEMA_NAME = "hybridstate.plan"
SCHEMA_VERSION = 2
"""Version 2 added `selection.measured`; documents of version 1 keep their form and digest."""
PLAN_FILE = "plan.json"
ARRAYS_FILE = "plan.safetensors"

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["F32", "I32", "I16", "U8"]


class Block(BaseModel):
    """Strict, frozen, closed, finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Digests(Block):
    """What a checkpoint is recognised by, each a sha256.

    `config` ignores the key `state_plan`, so a checkpoint that names its plan keeps its digest.
    `order` covers the convolution and decay tensors: small, and every permutation moves them.
    """

    config: Sha256
    index: Sha256
    decay: Sha256
    order: Sha256


class LayerBlock(Block):
    """Geometry of one linear-attention layer and the stored dtypes its horizons came from."""

    index: Annotated[int, Field(ge=0, description="0-based block index in the model")]
    ordinal: Annotated[int, Field(ge=0, description="0-based position among linear layers")]
    prefix: str
    key_heads: Positive
    value_heads: Positive
    key_dim: Positive
    value_dim: Positive
    conv_width: Positive
    a_log_dtype: str
    dt_bias_dtype: str

    @model_validator(mode="after")
    def _whole_bundles(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"layer {self.index}: {self.value_heads} value heads are not a multiple of "
                f"{self.key_heads} key heads"
            )
        return self


class ModelBlock(Block):
    """The checkpoint a plan was made from, and the permuted one it was exported to."""

    name: str
    revision: str | None = None
    family: str
    kind: Literal["gdn", "kda"]
    gate: Literal["softplus", "safe"]
    lower_bound: float | None = None
    num_layers: Positive
    layers: Annotated[tuple[LayerBlock, ...], Field(min_length=1)]
    original: Digests
    exported: Digests | None = None

    @model_validator(mode="after")
    def _layers_ascend(self) -> Self:
        indices = [layer.index for layer in self.layers]
        if indices != sorted(set(indices)) or indices[-1] >= self.num_layers:
            raise ValueError("layer indices must ascend and stay below num_layers")
        if [layer.ordinal for layer in self.layers] != list(range(len(self.layers))):
            raise ValueError("layer ordinals must count 0, 1, 2, ...")
        return self


class HorizonsBlock(Block):
    """How the static horizons were computed (DASC Eq. 3 to 5)."""

    epsilon: Annotated[float, Field(gt=0, lt=1)]
    gate_input: float
    chosen_by: Literal[
        "paper", "measured", "default", "given", "published", "assumed", "calibrated"
    ]
    """The last three are older words for the first three, still read."""


class SelectedLayer(Block):
    """Units kept in one linear layer; `offset` is the number kept in the layers before it."""

    index: Count
    units: Positive
    retained: Count
    offset: Count


class MeasuredCutoffBlock(Block):
    """One cutoff that `bench restore` tested: KL in nats per token of held-out prose to a dense restore."""

    w_max: Annotated[int, Field(ge=4)]
    kl: Annotated[float, Field(ge=0)]
    kl_se: Annotated[float, Field(ge=0)] | None = None
    cases: Positive
    checkpoint_bytes: Count
    passed: bool


class MeasuredBlock(Block):
    """The measurements a cutoff was taken from: the largest tested one whose KL is at most `max_kl`.

    `policy` is how omitted units were loaded: `nr` as zeros, `wr` by a replay. `source_digest` is the sha256 of the
    recorded file `source`; `tokens` the length of a cached prefix.
    """

    source: str
    source_digest: Sha256
    policy: Literal["nr", "wr"]
    max_kl: Annotated[float, Field(ge=0)]
    device: str
    dtype: str
    tokens: Positive
    cutoffs: Annotated[tuple[MeasuredCutoffBlock, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        order = [cutoff.w_max for cutoff in self.cutoffs]
        if order != sorted(set(order)):
            raise ValueError("measured cutoffs must ascend")
        for cutoff in self.cutoffs:
            if cutoff.passed != (cutoff.kl <= self.max_kl):
                raise ValueError(f"W_max {cutoff.w_max}: passed contradicts kl and max_kl")
        return self

    @property
    def chosen(self) -> int | None:
        """The largest cutoff that passed."""
        return max((cutoff.w_max for cutoff in self.cutoffs if cutoff.passed), default=None)


class SelectionBlock(Block):
    """Which units a checkpoint keeps: those whose horizon exceeds `w_max` tokens (strictly)."""

    w_max: Annotated[int, Field(ge=4)]
    unit: Literal["head", "channel"]
    selector: Literal["horizon", "random"] = "horizon"
    seed: int | None = None
    layers: tuple[SelectedLayer, ...]
    w_replay: Count
    near_cutoff: Count
    measured: MeasuredBlock | None = None

    @model_validator(mode="after")
    def _as_measured(self) -> Self:
        if self.measured is not None and self.measured.chosen != self.w_max:
            raise ValueError(
                f"w_max {self.w_max} is not the largest measured cutoff that passed, "
                f"{self.measured.chosen}"
            )
        return self


class AccountingBlock(Block):
    """Bytes of one checkpoint over all linear layers: FP32 temporal state, BF16 convolution."""

    temporal_dense_bytes: Count
    temporal_ragged_bytes: Count
    temporal_padded_bytes: Count
    conv_bytes: Count


class PlacementBlock(Block):
    """Where heads and packed units live under tensor parallelism (DASC B.1).

    `rank_units` are the retained units that each rank computes, `stored_units` those it stores;
    a slot has room for `slot_units` on every rank, and `remote_units` cross ranks at each store.
    """

    mode: Literal["off", "storage", "hybrid"]
    tp: Positive
    rank_units: tuple[Count, ...]
    stored_units: tuple[Count, ...]
    slot_units: Count
    remote_units: Count

    @model_validator(mode="after")
    def _one_entry_per_rank(self) -> Self:
        if not len(self.rank_units) == len(self.stored_units) == self.tp:
            raise ValueError(
                f"rank_units and stored_units need one entry for each of {self.tp} ranks"
            )
        if sum(self.rank_units) != sum(self.stored_units):
            raise ValueError("the ranks compute and store different numbers of units")
        if self.slot_units != max(self.stored_units):
            raise ValueError("slot_units must be the largest of stored_units")
        return self


class PrecisionBlock(Block):
    """The packed live state: `k_hi` FP16 key rows, the rest INT8 in groups along V (DAMP).

    `state_packed_bytes` are those of one sequence in a pool, alignment of each head included. Key order `shared` and
    `expand` are carried by exported weights (`expand` with one key head for each value head), `per-head` by the
    kernel. `requantise_every` updates share one write, in the engines of this package and in the module of
    `export-plan --kernels` at most 16; the inputs kept meanwhile are in `bits_per_value_with_ring`.
    """

    k_hi: Count
    high_format: Literal["float16"] = "float16"
    low_format: Literal["int8"] = "int8"
    group: Positive
    scale_dtype: Literal["float32"] = "float32"
    key_order: Literal["shared", "per-head", "expand"]
    value_order: Literal["none", "per-head", "common"] = "none"
    value_scale: bool = False
    selector: str
    requantise_every: Positive = 1
    bits_per_value: Annotated[float, Field(gt=0)]
    bits_per_value_with_ring: Annotated[float, Field(gt=0)]
    state_dense_bytes: Count
    state_packed_bytes: Count


class ValidationRow(Block):
    """One format, run by the true per-step requantised recurrence on the validation split.

    `kl` in nats and `top1` agreement against FP32 on the same tokens, `state_error` relative to
    the FP32 states.
    """

    format: str
    bits_per_value: Annotated[float, Field(gt=0)]
    kl: float
    top1: float
    state_error: float


class CalibrationBlock(Block):
    """Where the risk came from and how the selection did on prompts it never saw.

    `split_agreement` is the share of protected channels that two halves of the prompts have in
    common, `split_agreement_random` what chance gives, `repeated_32gram_share` the share of generated
    stretches of 32 tokens that occurred before: above one half the text loops and says little.
    """

    protocol: Annotated[dict[str, JsonValue], Field(description="options of the calibration")]
    fingerprint: str
    prompt_digests: dict[str, str]
    seed: int | None = None
    split_agreement: float | None = None
    split_agreement_random: float | None = None
    repeated_32gram_share: float | None = None
    validation_sequences: Count | None = None
    validation_positions: Count | None = None
    validation: tuple[ValidationRow, ...] = ()


class ProvenanceBlock(Block):
    """Versions that made the plan, and notes such as that its input is synthetic.

    `export-plan` leaves `commit`, `time`, `host` and `argv` empty, so that the same input gives the
    same bytes; a publisher may fill them in. The last three never enter the content digest.
    """

    versions: dict[str, str | None]
    notes: tuple[str, ...] = ()
    commit: str | None = None
    time: str | None = None
    host: str | None = None
    argv: tuple[str, ...] | None = None


class ArrayBlock(Block):
    """One array of `plan.safetensors`: sha256 of its little-endian bytes in row-major order."""

    name: str
    dtype: Dtype
    shape: tuple[Count, ...]
    sha256: Sha256


class PlanDocument(Block):
    """A whole `plan.json`."""

    schema_name: Annotated[Literal["hybridstate.plan"], Field(alias="schema")] = "hybridstate.plan"
    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    content_digest: Sha256
    model: ModelBlock
    horizons: HorizonsBlock | None = None
    selection: SelectionBlock | None = None
    accounting: AccountingBlock | None = None
    placement: PlacementBlock | None = None
    precision: PrecisionBlock | None = None
    calibration: CalibrationBlock | None = None
    layout_id: str | None = None
    provenance: ProvenanceBlock
    arrays: tuple[ArrayBlock, ...]

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.selection is None and self.precision is None:
            raise ValueError("a plan needs a selection (DASC), a precision (DAMP) or both")
        if self.selection is not None and (self.horizons is None or self.accounting is None):
            raise ValueError("a selection needs the blocks horizons and accounting")
        if self.schema_version < 2 and self.selection is not None and self.selection.measured:
            raise ValueError("selection.measured needs schema_version 2")
        if self.schema_version < 2 and self.precision and self.precision.key_order == "expand":
            raise ValueError("key order expand needs schema_version 2")
        if self.placement is not None and self.selection is None:
            raise ValueError("a placement needs a selection")
        if (self.precision is None) != (self.layout_id is None):
            raise ValueError("precision and layout_id come together")
        names = [array.name for array in self.arrays]
        if names != sorted(set(names)):
            raise ValueError("arrays must be sorted by name, each name once")
        return self


def canonical(document: PlanDocument) -> bytes:
    """The one spelling of a `plan.json`: sorted keys, two spaces, LF, ASCII."""
    text = json.dumps(to_content(document), sort_keys=True, indent=2, allow_nan=False)
    return (text + "\n").encode("ascii")


def to_content(document: PlanDocument) -> dict[str, Any]:
    """The document as plain JSON values, under the names of the file and in the form of its version."""
    content = document.model_dump(mode="json", by_alias=True)
    if document.schema_version < 2 and content["selection"] is not None:
        del content["selection"]["measured"]
    if document.schema_version < 2 and content["calibration"] is not None:
        del content["calibration"]["repeated_32gram_share"]
    return content


def json_schema() -> str:
    """The JSON Schema of `plan.json` (draft 2020-12), as committed in `plans/`."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{SCHEMA_NAME}/{SCHEMA_VERSION}",
        **{k: v for k, v in PlanDocument.model_json_schema().items() if k != "title"},
    }
    return json.dumps(schema, sort_keys=True, indent=2) + "\n"
