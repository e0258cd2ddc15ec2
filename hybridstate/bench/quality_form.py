"""The form of a recorded `bench quality`: what a run that continues from it takes from its blocks."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from hybridstate.bench.quality_options import BOUNDARIES
from hybridstate.bench.recorded_form import (
    ABSENT,
    Count,
    Device,
    Number,
    Positive,
    Recorded,
    Share,
    Signed,
    refuse_twice,
)

_Boundary = Literal[BOUNDARIES]  # type: ignore[valid-type]
_Interval = Annotated[list[Signed], Field(min_length=2)] | None


class _Hit(Recorded):
    token_hit: Share
    hits: Count
    requests: Positive
    not_resident: list[str]


class _Arm(Recorded):
    accuracy: Share
    accuracy_se: Number | None
    difference: Signed
    difference_interval_95: _Interval
    same_reply: Share
    kl_first: Signed
    bytes: Count
    hit: _Hit
    rounds_decoded: Positive = ABSENT
    rounds_differ: Count = ABSENT
    samples: list[str] = ABSENT


class _Random(Recorded):
    w_max: Positive
    mean: Share
    nr_above: Signed
    sd_over_masks: Number | None = ABSENT
    by_mask: list[Share] = ABSENT
    nr_above_interval_95: _Interval = ABSENT


class _Place(Recorded):
    task: str
    tokens: Positive
    boundary: _Boundary
    asked_tokens: Positive = ABSENT

    @property
    def said(self) -> str:
        tokens = self.asked_tokens or self.tokens
        return f"{self.task} at {tokens} tokens, cached to the {self.boundary}"


class _Block(_Place):
    suite: str
    source: str
    questions: Positive
    replays: Positive
    hit_pooled: Share
    arms: dict[str, _Arm]
    random: list[_Random]
    prefix_tokens: Positive = ABSENT
    unseen_tokens: Positive = ABSENT
    rule: str = ABSENT
    budget: Positive = ABSENT
    chance: Number | None = ABSENT
    dense_replies: list[str] = ABSENT
    references: list[list[str]] = ABSENT
    seconds: Number = ABSENT
    stages_s: dict[str, Number] = ABSENT


class _Refused(_Place):
    arms: Annotated[dict[str, str], Field(min_length=1)]


class _Samples(Recorded):
    samples: Annotated[list[Number], Field(min_length=1)]


class _Times(Recorded):
    suite: str
    boundary: _Boundary
    tokens: Positive
    seconds: dict[str, _Samples]


class _Window(Recorded):
    arm: str
    prefix_tokens: Positive
    state_error: Number
    same_reply_as_recompute: Share


class _RunArm(Recorded):
    arm: str


class Result(Recorded):
    """Its blocks, and what is read before they are compared."""

    protocol: dict[str, Any]
    device: Device
    arms: list[_RunArm]
    blocks: list[_Block]
    refused: list[_Refused]
    whole_window: _Window | None
    ttft: list[_Times]

    @model_validator(mode="after")
    def _arms_of_the_run(self) -> Self:
        names = [arm.arm for arm in self.arms]
        for index, block in enumerate(self.blocks):
            missing = [name for name in names if name not in block.arms]
            unknown = [name for name in block.arms if name not in names]
            if missing or unknown:
                said = (
                    f"has no {missing[0]!r}" if missing else f"has the unknown {unknown[0]!r:.60}"
                )
                raise ValueError(f"blocks[{index}].arms {said}, the run's arms are expected")
        return self

    @model_validator(mode="after")
    def _no_block_twice(self) -> Self:
        parts = (("blocks", self.blocks), ("refused", self.refused))
        refuse_twice(
            {f"{part}[{i}]": e.said for part, entries in parts for i, e in enumerate(entries)}
        )
        return self
