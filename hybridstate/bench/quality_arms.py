"""The arms of `bench quality`: DASC's load policies on FP32 and INT8 checkpoints, and formats of the live state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from hybridstate.defaults import RANDOM_MASK_SEEDS
from hybridstate.errors import UsageError
from hybridstate.plan.compare import verify_against
from hybridstate.plan.select import Selection, random_selection
from hybridstate.plan.store import Plan
from hybridstate.quality.replay import ReuseArm
from hybridstate.quant.arms import Arm as StorageArm
from hybridstate.quant.arms import ValueMap
from hybridstate.quant.catalogue import ArmName, parse
from hybridstate.runtime.restore import Units
from hybridstate.trajectories.model import LoadedModel

FORMATS: Final = ("fp16", "bf16", "fp8", "int8-step", "int8-step-stochastic", "int4", "nvfp4")
"""Formats of the live state that need no plan."""
PLANNED: Final = ("damp", "damp-random", "damp-int4")
"""Those that take FP16 channels from a plan, or as many random ones."""
RANDOM_CHANNELS_SEED: Final = 20_261_130


def reuse_arms(
    loaded: LoadedModel, selections: Sequence[Selection], seeds: int
) -> tuple[ReuseArm, ...]:
    """Dense, recompute, INT8, then per cutoff NR and WR on both kinds of checkpoint, and random masks (NR)."""
    arms = [
        ReuseArm("dense", "dense"),
        ReuseArm("recompute", "recompute"),
        ReuseArm("int8-checkpoint", "dense", "int8"),
    ]
    for chosen in selections:
        w_max, window = chosen.w_max, chosen.w_replay
        units = Units.of(chosen.retained, loaded.device)
        arms += [
            ReuseArm(f"nr-{w_max}", "nr", "fp32", units, w_max),
            ReuseArm(f"wr-{w_max}", "wr", "fp32", units, w_max, window),
            ReuseArm(f"nr-{w_max}+int8", "nr", "int8", units, w_max),
            ReuseArm(f"wr-{w_max}+int8", "wr", "int8", units, w_max, window),
        ]
        for seed in RANDOM_MASK_SEEDS[:seeds]:
            mask = random_selection(chosen, seed).retained
            arms.append(
                ReuseArm(
                    f"random-{w_max}-{seed}",
                    "nr",
                    "fp32",
                    Units.of(mask, loaded.device),
                    w_max,
                    seed=seed,
                )
            )
    return tuple(arms)


def storage_arms(
    loaded: LoadedModel, names: Sequence[str] | None, plan: Plan | None
) -> tuple[ReuseArm, ...]:
    """Formats of the live state by their names in `calibrate --formats`; all known here by default.

    Raises:
        UsageError: an unknown name, or one that needs a plan or a calibration.
        PlanMismatch: the plan is for another model.
    """
    if plan is not None:  # also where no format takes channels from it: the result names it
        verify_against(plan, loaded.checkpoint)
    if names is None:
        names = FORMATS + (PLANNED if _has_channels(plan) else ())
    made = [_storage(loaded, parse(name), plan) for name in dict.fromkeys(names) if name != "fp32"]
    return tuple(
        ReuseArm(storage.name, "dense", storage=storage.to(loaded.device)) for storage in made
    )


def _has_channels(plan: Plan | None) -> bool:
    return plan is not None and plan.document.precision is not None


def _storage(loaded: LoadedModel, name: ArmName, plan: Plan | None) -> StorageArm:
    storage = StorageArm(name.name, name.low, every=name.every, feedback=name.feedback)
    if name.selector is None and not name.reorder:
        return storage
    if plan is None or plan.document.precision is None:
        raise UsageError(
            f"{name.name} takes its FP16 channels from a plan",
            hint="give --plan DIR of export-plan",
        )
    order, k_hi = verify_against(plan, loaded.checkpoint), plan.document.precision.k_hi
    if (
        name.selector not in (None, "damp", "random")
        or not name.shared
        or name.k_hi
        not in (
            None,
            k_hi,
        )
    ):
        raise UsageError(
            f"{name.name} is not what the plan holds ({k_hi} channels by risk)",
            hint="compare selectors and budgets with `hybridstate calibrate --formats`",
        )
    if name.reorder:
        maps = []
        for layer in loaded.spec.layers:
            stored = plan.value_order(layer.index, order)
            scale = plan.value_scale(layer.index, order)
            if stored is None or scale is None:
                raise UsageError(
                    f"{name.name}: the plan has no value scales",
                    hint="export it with --value-order fold",
                )
            index = stored.astype(np.int64)
            by_value = np.empty_like(scale)
            np.put_along_axis(by_value, index, scale, axis=1)
            maps.append(ValueMap(torch.from_numpy(by_value).float(), torch.from_numpy(index)))
        storage = replace(storage, values=tuple(maps))
    if name.selector is None:
        return storage
    rng = np.random.Generator(np.random.PCG64(RANDOM_CHANNELS_SEED))
    protected = []
    for layer in loaded.spec.layers:
        keys = plan.key_order(layer.index, order)
        if keys is None:
            keys = np.broadcast_to(np.arange(layer.key_dim), (layer.value_heads, layer.key_dim))
        if name.selector == "random":
            keys = rng.permuted(np.array(keys), axis=1)
        protected.append(torch.from_numpy(keys[:, :k_hi].astype(np.int64).copy()))
    return replace(storage, protected=tuple(protected))


def stored_bytes(loaded: LoadedModel, arm: ReuseArm) -> int:
    """Bytes of one live state in the arm's format, scales and convolution windows (BF16) included."""
    total = 0.0
    for layer in loaded.spec.layers:
        values = layer.value_heads * layer.key_dim * layer.value_dim
        total += values * arm.storage.bits(layer.key_dim, layer.value_dim) / 8
        total += layer.conv_channels * (layer.conv_width - 1) * 2
    return round(total)
