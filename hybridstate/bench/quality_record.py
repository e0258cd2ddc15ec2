"""The record of `bench quality`: what ran, its blocks, and the blocks of an earlier run that goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hybridstate.bench.quality_form import Result
from hybridstate.bench.quality_options import Options
from hybridstate.bench.quality_rows import loaded_share, summary
from hybridstate.bench.recorded_form import check
from hybridstate.bench.serving_points import differing
from hybridstate.bench.timing import device_record
from hybridstate.checkpoint.documents import read_object, result_of
from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import UsageError, reading
from hybridstate.quality.questions import FILLER_TOKENS
from hybridstate.quality.replay import LOADED, TOKEN_HIT, ReuseArm
from hybridstate.trajectories.model import LoadedModel

LOADED_IN_ALL: Final = 0.99
"""Under residency, the least share of loaded requests of an arm over all blocks (DASC C)."""
OF_A_CALL: Final = ("tasks", "tokens", "boundaries", "rows", "within")
"""Options that say which blocks run and when, not what one measures."""


Key = tuple[str, int, str]
"""Task, tokens asked for, boundary."""


@dataclass(slots=True)
class Quality:
    """Everything measured so far; `to_json` is the stored document's `result`."""

    header: dict[str, Any]
    blocks: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    whole_window: dict[str, Any] | None = None
    ttft: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    plan: Sequence[Key] = ()
    """Blocks in the order of tables."""

    @property
    def done(self) -> list[Key]:
        """Blocks that were measured or refused."""
        return [_key(block) for block in (*self.blocks, *self.refused)]

    def go_on(self, before: "Quality") -> None:
        """Take over what an earlier run measured of the planned blocks."""
        self.blocks = [block for block in before.blocks if _key(block) in self.plan]
        self.refused = [entry for entry in before.refused if _key(entry) in self.plan]
        self.whole_window = before.whole_window
        groups = [(b["suite"], b["boundary"], b["tokens"]) for b in self.blocks]
        self.ttft = [t for t in before.ttft if (t["suite"], t["boundary"], t["tokens"]) in groups]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        places = {key: place for place, key in enumerate(self.plan)}
        self.blocks.sort(key=lambda block: places.get(_key(block), 0))
        return {
            **self.header,
            "complete": self.complete,
            "whole_window": self.whole_window,
            "summary": summary(self.blocks),
            "loaded": loaded_share(self.blocks),
            "blocks": list(self.blocks),
            "refused": list(self.refused),
            "left_out": list(self.left_out),
            "ttft": list(self.ttft),
        }


def run_header(loaded: LoadedModel, arms: Sequence[ReuseArm], options: Options) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in options.__slots__}
    return {
        "model": loaded.checkpoint.name,
        "model_digests": loaded.checkpoint.digests(),
        "device": device_record(loaded.device),
        "protocol": {
            **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "conv_dtype": "bfloat16",
            "filler_tokens": FILLER_TOKENS,
            "mask_seeds": list(RANDOM_MASK_SEEDS[: options.seeds]),
            "dense_spill": False,
            "warm_requests": "one per prefix, not scored",
            "equal_rounds": "every replay is loaded through the cache; where all rounds of an arm return the same "
            "bits and nothing is drawn, a question's reply is generated once",
            "resident_rules": {
                "token_hit_above": TOKEN_HIT,
                "loaded_at_least": LOADED,
                "loaded_at_least_in_all": LOADED_IN_ALL,
            },
            "formats": "written at the end of every prefill chunk and at every decoded token; simulated "
            "in an FP32 container",
            "data": "synthetic, in RULER's templates and in the models' own; prose is CC0",
            "ruler_left_out": "qa_2 (needs HotpotQA)",
        },
        "arms": [
            {
                "arm": arm.name,
                "policy": arm.policy,
                "checkpoint": arm.kind,
                "state": arm.storage.name,
                "w_max": arm.w_max,
                "w_replay": arm.w_replay,
                "seed": arm.seed,
                "retained_units": None if arm.units is None else arm.units.counts[0],
                "units": None if arm.units is None else arm.units.counts[1],
                "mask_digest": None if arm.units is None else arm.units.digest,
            }
            for arm in arms
        ],
    }


def _key(entry: Mapping[str, Any]) -> Key:
    """Of a block, or of one that was refused."""
    return entry["task"], entry.get("asked_tokens", entry["tokens"]), entry["boundary"]


def earlier(path: Path, header: Mapping[str, Any]) -> Quality:
    """What an earlier run measured, whole or partial.

    Args:
        header: of the run that goes on; model, arms and everything a block depends on have to be the same.

    Raises:
        SourceError: the file holds no such result.
        UsageError: it is of another model, device, arms or options.
    """
    hint = "give a document of `bench quality`, whole or partial, as it was written"
    with reading(path, f"cannot read the blocks of {path.name}", hint=hint):
        document = result_of(read_object(path))
        check(Result, document)
        found = Quality(
            {name: document[name] for name in header},
            blocks=list(document["blocks"]),
            refused=list(document["refused"]),
            whole_window=document["whole_window"],
            ttft=list(document["ttft"]),
        )
        before, now = _compared(found.header), _compared(json.loads(json.dumps(header)))
    other = [
        _told(name, before.get(name), now[name]) for name in now if before.get(name) != now[name]
    ]
    if other:
        raise UsageError(
            f"the earlier run had another {', '.join(other)}",
            hint="resume with the same model, plan, device, arms and options",
        )
    return found


def _told(name: str, was: Any, now: Any) -> str:
    """What differs, with both values where they are short."""
    if isinstance(was, dict | list) or isinstance(now, dict | list):
        return name
    return f"{name} ({differing(was, now)})"


def _compared(header: Mapping[str, Any]) -> dict[str, Any]:
    """What a block depends on, by name."""
    options = {k: v for k, v in header["protocol"].items() if k not in OF_A_CALL}
    rest = {k: v for k, v in header.items() if k not in ("protocol", "device")}
    return {**rest, **options, "device": header["device"]["name"]}
