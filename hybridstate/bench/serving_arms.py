"""What is compared while serving: live format, cached format and load policy, all in the same bytes.

    dense           FP32 live and cached states in one pool
    nr-W, wr-W      retained units of cutoff W beside it, zeros or a replay for the others
    int8            one byte a value (DASC Eq. 8) beside it
    nr-W+int8 ...   both
    bf16, damp      live and cached states in one pool of BF16 or packed states
    damp+nr-W ...   retained units of the packed state, as packed, beside it

Every arm gets the bytes of the dense one: native slots, compressed slots, staging (one compressed slot to pack into,
and one native slot of scratch where a suffix is replayed), and with the budget scope `state+kv` the attention tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import UsageError
from hybridstate.families import FAMILIES, LinearLayer, ModelSpec
from hybridstate.plan.capacity import Capacity, State, capacity, usable_slots
from hybridstate.plan.placement import Balance
from hybridstate.plan.select import Selection, select
from hybridstate.runtime.admission import Pools

Scope = Literal["state", "state+kv"]
SCOPES: Final = ("state", "state+kv")

STATE_TO_KV: Final = 0.9
"""Bytes of state per byte of attention KV in the dense arm's budget (SGLang's `--mamba-full-memory-ratio`)."""

WATERMARK: Final = 2
"""Free native slots below which an arm with two pools reclaims."""

KIMI_KV_BYTES: Final = 7 * 576 * 2
"""Kimi-Linear's attention bytes per token: 7 MLA layers, 512 + 64 BF16 values each."""

KIMI_SURVIVAL: Final = ((1.0, 1.0), (16.0, 0.357), (64.0, 0.1115), (128.0, 0.035), (512.0, 0.0015))
"""Horizon in tokens and the share of Kimi-Linear's units above it, from the capacity ratios in DASC 5.3."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to keep states.

    Attributes:
        name: as above.
        live: of a running request.
        cached: of a compressed state, None where there is one pool.
        replay: window of a replay at a load in tokens, 0 without one.
        remote_bytes: bytes that the busiest rank sends or receives at a store or load.
        scratch_bytes: staging that an engine's pools need beyond the rule.
    """

    name: str
    live: State
    cached: State | None = None
    replay: int = 0
    remote_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def staging_bytes(self) -> int:
        """Beside both pools."""
        if self.cached is None:
            return 0
        held = self.cached.full_bytes + self.scratch_bytes
        return held + (self.live.full_bytes if self.replay else 0)

    @property
    def kind(self) -> str:
        """The name without cutoff and placement, such as `nr+int8`."""
        return kind_of(self.name)

    @property
    def balance(self) -> Balance:
        """The placement."""
        return cast("Balance", self.name.split(" ")[1]) if " " in self.name else "off"

    @property
    def live_format(self) -> str:
        """Format of the native pool, as `runtime.pool` calls it."""
        if self.live.stored == "packed":
            return "damp"
        return "bf16" if self.live.name == "bf16" else "fp32"

    def pools(
        self,
        dense: State,
        dense_slots: int,
        *,
        native: int,
        kv_bytes: int = 0,
        scope: Scope = "state",
        policy: str = "lru",
        watermark: int = WATERMARK,
    ) -> tuple[Pools, dict[str, int]]:
        """Pools in the bytes of `dense_slots` dense slots, and where those bytes went.

        Args:
            dense: the baseline's state.
            dense_slots: its usable slots; slot 0 is charged too.
            native: usable native slots of an arm with two pools.
            kv_bytes: attention bytes per token.
            scope: `state+kv` adds the attention tokens of the dense arm to the budget and divides the sum anew, with as
                many tokens per slot as there.
            policy, watermark: of the pools.

        Raises:
            UsageError: the budget does not hold the native pool and a compressed state.
        """
        budget = (dense_slots + 1) * dense.full_bytes
        per_slot = 0
        if scope == "state+kv":
            per_slot = round(dense.full_bytes / STATE_TO_KV / kv_bytes)
            budget += (dense_slots + 1) * per_slot * kv_bytes
        beside = per_slot * kv_bytes
        packed = 0
        if self.cached is None:
            native = usable_slots(budget, self.live.full_bytes + beside)
        else:
            rest = budget - self.staging_bytes - (native + 1) * (self.live.full_bytes + beside)
            packed = usable_slots(rest, self.cached.full_bytes + beside)
        if native < 1 or (self.cached is not None and packed < 1):
            raise UsageError(
                f"{self.name}: {budget:,} bytes are too few for {native} native slots and a compressed one",
                hint="take fewer running requests, or a smaller --ratio",
            )
        cached_bytes = 0 if self.cached is None else self.cached.full_bytes
        slots = native + 1 + (packed + 1 if packed else 0)
        tokens = slots * per_slot if per_slot else None
        pools = Pools(
            native=native,
            packed=packed,
            kv_tokens=tokens,
            native_bytes=self.live.full_bytes,
            packed_bytes=max(1, cached_bytes),
            watermark=watermark if packed else 0,
            policy=policy,
        )
        spent = {
            "budget_bytes": budget,
            "native_bytes": (native + 1) * self.live.full_bytes,
            "compressed_bytes": (packed + 1) * cached_bytes if packed else 0,
            "staging_bytes": self.staging_bytes,
            "kv_bytes": (tokens or 0) * kv_bytes,
        }
        used = sum(spent.values()) - budget
        assert used <= budget, f"{self.name} takes {used} of {budget} bytes"
        return pools, spent

    def to_json(self) -> dict[str, Any]:
        """Bytes per rank and policy."""
        return {
            "arm": self.name,
            "kind": self.kind,
            "w_max": None if self.cached is None else self.cached.w_max,
            "balance": self.balance,
            "live_bytes": self.live.full_bytes,
            "cached_bytes": self.live.full_bytes if self.cached is None else self.cached.full_bytes,
            "replay_window": self.replay,
            "remote_bytes": self.remote_bytes,
        }


def kind_of(name: str) -> str:
    """The kind of an arm of that name, without its cutoff and placement."""
    return "+".join(part.split("-")[0] for part in name.split(" ")[0].split("+"))


@dataclass(frozen=True, eq=False)
class Profile:
    """A model to simulate.

    Attributes:
        name, note: what it is, and where its horizons come from.
        synthetic: whether the horizons were made up.
        spec: geometry.
        horizons: per linear layer.
        kv_bytes: attention bytes per token, 0 if unknown.
    """

    name: str
    note: str
    synthetic: bool
    spec: ModelSpec
    horizons: tuple[NDArray[np.float64], ...]
    kv_bytes: int = 0

    def to_json(self, tp: int, balances: Sequence[str]) -> dict[str, Any]:
        """What the sizes and horizons are."""
        return {
            "note": self.note,
            "synthetic": self.synthetic,
            "kv_bytes_per_token": self.kv_bytes,
            "tp": tp,
            "balances": list(balances),
        }

    def arms(
        self, cutoffs: Sequence[int], *, tp: int = 1, balances: Sequence[Balance] = ("off",)
    ) -> tuple[Arm, ...]:
        """Every arm, dense first; with several placements those of the cutoffs are repeated for each."""
        selections = [select(self.horizons, w) for w in cutoffs]
        found: list[Arm] = []
        for balance in balances:
            planned = capacity(self.spec, self.horizons, selections, tp=tp, balance=balance)
            suffix = "" if balance == "off" else f" {balance}"
            if not found:
                found += _single_pools(planned)
                found += _beside(planned, "int8-checkpoint", "int8", 0, 0)
            for index, selection in enumerate(selections):
                found += _of_cutoff(self.spec, planned, index, selection, suffix)
        return tuple(found)


def _single_pools(planned: Capacity) -> list[Arm]:
    dense = planned.dense
    half = State("bf16", None, "fp32", dense.temporal_bytes // 2, dense.conv_bytes)
    found = [Arm("dense", dense), Arm("bf16", half)]
    return found if planned.packed is None else [*found, Arm("damp", planned.packed)]


def _beside(planned: Capacity, state: str, name: str, replay: int, remote: int) -> list[Arm]:
    cached = next(entry for entry in planned.checkpoints if entry.name == state)
    return [Arm(name, planned.dense, cached, replay, remote)]


def _of_cutoff(
    spec: ModelSpec, planned: Capacity, index: int, selection: Selection, suffix: str
) -> list[Arm]:
    """NR and WR at one cutoff: FP32, INT8 and packed."""
    placement = planned.placements[index]
    layer = spec.layers[0]
    values = spec.unit_values(layer)
    units = max(
        placement.transfers.sum(0).max(initial=0), placement.transfers.sum(1).max(initial=0)
    )
    moved = {"": values * 4, " + int8": values + 4 * values // layer.value_dim}
    w, found = selection.w_max, []
    for kind, replay in (("nr", 0), ("wr", selection.w_replay)):
        for stored, bytes_each in moved.items():
            name = f"{kind}-{w}{stored.replace(' ', '')}{suffix}"
            found += _beside(planned, f"W_max {w}{stored}", name, replay, int(units) * bytes_each)
        if planned.packed is not None:
            rank_units = sum(spec.units(n) for n in spec.layers) // planned.tp
            share = planned.packed.temporal_bytes / rank_units
            temporal = int(np.ceil(placement.slot_units * share))
            cached = State(f"packed {w}", w, "packed", temporal, planned.dense.conv_bytes)
            remote = int(np.ceil(int(units) * share))
            found.append(Arm(f"damp+{kind}-{w}{suffix}", planned.packed, cached, replay, remote))
    return found


def served_arms(every: Sequence[Arm]) -> list[Arm]:
    """The arms that an engine serves: packed units differ in size, so no exchange places them."""
    return [arm for arm in every if arm.live_format != "damp" or arm.balance == "off"]


def kimi_profile(seed: int = 0) -> Profile:
    """Kimi-Linear's sizes with made-up horizons that have its published retention at every cutoff.

    Horizons are drawn per channel with a part common to each head, so that ranks differ as they do in the model.
    """
    family = next(f for f in FAMILIES if f.name == "kimi_linear")
    blocks = [b for b in range(27) if (b + 1) % 4 and b != 26]
    layers = tuple(
        LinearLayer(block, ordinal, 32, 32, 128, 128, 4, f"model.layers.{block}.self_attn.")
        for ordinal, block in enumerate(blocks)
    )
    spec = ModelSpec(family, "softplus", None, layers, 27)
    rng = np.random.Generator(np.random.PCG64(seed))
    drawn = 0.6 * rng.standard_normal((len(layers), 32, 1)) + 0.8 * rng.standard_normal(
        (len(layers), 32, 128)
    )
    share = np.empty(drawn.size)
    share[np.argsort(-drawn.ravel(), kind="stable")] = (np.arange(drawn.size) + 0.5) / drawn.size
    tokens, survival = (
        np.array(column) for column in zip(*KIMI_SURVIVAL, (4096.0, 0.0), strict=True)
    )
    horizon = np.exp2(np.interp(share, survival[::-1], np.log2(tokens)[::-1])).reshape(drawn.shape)
    return Profile(
        name="kimi-linear-profile",
        note="synthetic horizons with Kimi-Linear's sizes and its published retention at 16, 64, 128 and 512 tokens",
        synthetic=True,
        spec=spec,
        horizons=tuple(horizon),
        kv_bytes=KIMI_KV_BYTES,
    )
