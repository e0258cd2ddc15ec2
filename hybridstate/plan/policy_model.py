"""A Model-Optimizer policy and a checkpoint: making one from measurements, applying one to weights."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint import Checkpoint, DecayParameters
from hybridstate.checkpoint.documents import an_object
from hybridstate.defaults import MIN_REPLAY_TOKENS
from hybridstate.errors import (
    UNREADABLE,
    NumericError,
    PlanMismatch,
    SourceError,
    UnsupportedModel,
    UsageError,
)
from hybridstate.horizons.static import static_horizons
from hybridstate.plan.accounting import account
from hybridstate.plan.policy import (
    GATES,
    RECOVERY,
    LayerPolicy,
    Measurement,
    Policy,
    Quality,
    StorageDtype,
    Variant,
)
from hybridstate.plan.select import Selection, select

_STORED: Final[dict[str, StorageDtype]] = {"BF16": "bfloat16", "F16": "float16"}
_ROUNDING: Final[dict[str, float]] = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_BLOCK: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def policy_selection(policy: Policy, checkpoint: Checkpoint) -> Selection:
    """The policy's selection on a checkpoint, recomputed from the stored decay parameters.

    A head may change sides only where rounding to the policy's storage dtype can move its horizon
    over the cutoff; then the policy's word counts.

    Raises:
        UnsupportedModel: the model is not a GDN model.
        PlanMismatch: other layers or head counts, or horizons that these parameters do not give.
    """
    layers = _by_layer(policy, checkpoint)
    horizons = _horizons(checkpoint, policy.epsilon, policy.static_gate_input)
    widths = _rounding_bounds(checkpoint, policy)
    decided = []
    for layer, own, width in zip(checkpoint.spec.layers, horizons, widths, strict=True):
        name, theirs = layers[layer.index]
        stored = np.array(theirs.static_horizons)
        off = np.flatnonzero(np.abs(stored - own) > width * own)
        if off.size:
            head = int(off[0])
            raise PlanMismatch(
                f"the policy gives head {head} of {name} a horizon of {stored[head]:.6g} tokens, the "
                f"checkpoint gives {own[head]:.6g}",
                hint="the policy was made from other weights; make a new one",
                layer=layer.index,
                head=head,
                found=float(own[head]),
                expected=float(stored[head]),
            )
        decided.append(stored)
    return select(decided, policy.selected_wmax)


def build_policy(
    checkpoint: Checkpoint,
    measurements: Iterable[Measurement],
    *,
    epsilon: float,
    gate_input: float,
    revision: str,
    data_id: str,
    gates: Mapping[str, float] = GATES,
    w_max: int | None = None,
) -> Policy:
    """A policy from this checkpoint's horizons and measurements of one variant.

    Args:
        measurements: one per cutoff.
        epsilon, gate_input: how the horizons are computed.
        revision, data_id: which weights, and what was measured on; both are mandatory in the format.
        gates: what a measurement must reach.
        w_max: the selected cutoff; by default the largest that passes.

    Raises:
        UnsupportedModel: the model is not a GDN model.
        UsageError: no measurements, or none of the wanted cutoff.
        NumericError: no measurement passes, or a horizon is not finite and positive.
    """
    _check_kind(checkpoint)
    rows = sorted(measurements, key=lambda row: row.wmax)
    if not rows:
        raise UsageError("a policy needs at least one measured cutoff")
    passing = [row.wmax for row in rows if row.passes(gates)]
    if w_max is None and not passing:
        raise NumericError(
            f"no cutoff of {', '.join(str(row.wmax) for row in rows)} passes "
            + ", ".join(f"{name} {value:g}" for name, value in gates.items()),
            hint="measure smaller cutoffs, or name one with the gates it shall pass",
        )
    selected = max(passing) if w_max is None else w_max
    if selected not in [row.wmax for row in rows]:
        raise UsageError(f"no measurement at W_max {selected}", found=selected)
    spec, dtype = checkpoint.spec, _storage_dtype(checkpoint)
    horizons = _horizons(checkpoint, epsilon, gate_input)
    layers = {}
    for layer, tokens in zip(spec.layers, horizons, strict=True):
        if not (np.isfinite(tokens) & (tokens > 0)).all():
            raise NumericError(
                f"block {layer.index} has an infinite or zero horizon, which a policy cannot hold",
                layer=layer.index,
            )
        kept = tokens > selected
        layers[_module(layer.prefix)] = LayerPolicy(
            num_heads=len(tokens),
            static_horizons=tuple(tokens.tolist()),
            retained_heads=tuple(np.flatnonzero(kept).tolist()),
            omitted_heads=tuple(np.flatnonzero(~kept).tolist()),
        )
    return Policy(
        variant=rows[0].variant,
        recovery=RECOVERY[rows[0].variant],
        epsilon=epsilon,
        static_gate_input=gate_input,
        decay_parameter_storage_dtype=dtype,
        selected_wmax=selected,
        wmax_candidates=tuple(row.wmax for row in rows),
        quality_gates=dict(gates),
        model_id=checkpoint.name,
        model_revision=revision,
        model_config_id=f"sha256:{checkpoint.digests()['config']}",
        calibration_data_id=data_id,
        model_structure_sha256=_sha256(
            [{"name": name, "num_heads": layers[name].num_heads} for name in sorted(layers)]
        ),
        decay_parameters_sha256=_sha256(_decay_snapshot(checkpoint)),
        layers=layers,
        measurements=tuple(rows),
    )


def measurements_of(
    result: Mapping[str, Any],
    checkpoint: Checkpoint,
    horizons: Sequence[NDArray[np.float64]],
    variant: Variant,
) -> tuple[Measurement, ...]:
    """The measurements in a result of `bench restore` (its `result` object), for one variant.

    The slice is held-out prose. Perplexity is per byte, dense over restored.

    Raises:
        SourceError: it is no such result, or it records no prose or no top-1 agreement.
        PlanMismatch: an arm retained other heads than this checkpoint does.
        UsageError: it holds no arm of this variant.
    """
    try:
        return tuple(_measured(result, checkpoint, horizons, variant))
    except UNREADABLE as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"not a result of `bench restore` with prose: {reason}",
            hint="run `hybridstate bench restore MODEL -o FILE` with this version",
        ) from error


def _measured(
    result: Mapping[str, Any],
    checkpoint: Checkpoint,
    horizons: Sequence[NDArray[np.float64]],
    variant: Variant,
) -> list[Measurement]:
    prefix = {"dasc_nr": "nr", "dasc_wr": "wr"}[variant]
    if not isinstance(result["arms"], list):
        raise TypeError("arms is no list")
    listed = [an_object(arm, f"arms[{n}]") for n, arm in enumerate(result["arms"])]
    arms = {str(arm["arm"]): arm for arm in listed}
    spec, rows = checkpoint.spec, []
    total = sum(layer.value_heads for layer in spec.layers)
    for arm in arms.values():
        if arm["policy"] != prefix or arm["w_max"] is None or arm["seed"] is not None:
            continue
        w_max = arm["w_max"]
        if isinstance(w_max, bool) or not isinstance(w_max, int) or w_max < MIN_REPLAY_TOKENS:
            raise ValueError(f"arm {arm['arm']} has a w_max of {w_max!r:.40}")
        selection = select(horizons, int(arm["w_max"]))
        if arm["mask_digest"] != selection.mask_digest:
            raise PlanMismatch(
                f"arm {arm['arm']} of the result retained other heads than {checkpoint.name} does",
                hint="run `hybridstate bench restore` on this model again",
            )
        accounting = account(spec, selection)
        rows.append(
            Measurement(
                variant=variant,
                wmax=int(arm["w_max"]),
                retained_heads=sum(selection.counts),
                total_heads=total,
                checkpoint_savings=1 - accounting.ragged_bytes / accounting.dense_bytes,
                quality=tuple(_quality(arm, arms["dense"], result["check"])),
            )
        )
    if not rows:
        raise UsageError(f"the result holds no {prefix.upper()} arm")
    return rows


def _quality(
    arm: Mapping[str, Any], dense: Mapping[str, Any], check: Mapping[str, Any]
) -> Iterable[Quality]:
    """One slice for held-out prose: the only text on which `bench restore` records likelihoods."""
    exact = check["dense_restore_bit_equal"]
    ours, theirs = (an_object(a["prose"], f"prose of {a['arm']}") for a in (arm, dense))
    for name in ("bits_per_byte", "kl", "top1_agreement"):
        for side in (ours, theirs):
            if isinstance(side[name], bool) or not isinstance(side[name], int | float):
                raise TypeError(f"{name} of arm {arm['arm']} or dense is no number")
    retention = 2.0 ** (theirs["bits_per_byte"] - ours["bits_per_byte"])
    # slots are poisoned with NaN before a load: a unit that the policy did not restore would show
    restored = math.isfinite(ours["kl"]) and math.isfinite(ours["bits_per_byte"])
    yield Quality(
        slice_id="prose, per byte",
        perplexity_retention=retention,
        top1_agreement=ours["top1_agreement"],
        finite_continuation_logits=restored,
        retained_state_exact=bool(exact["states"]),
        omitted_state_matches_recovery=restored,
        convolution_state_exact=bool(exact["conv"]),
    )


def _check_kind(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    if spec.family.kind != "gdn" or spec.gate != "softplus":
        raise UnsupportedModel(
            f"{checkpoint.name} is a {spec.name} model; the policy format knows heads of GDN layers only",
            hint="a plan bundle holds every family: hybridstate export-plan",
        )


def _by_layer(policy: Policy, checkpoint: Checkpoint) -> dict[int, tuple[str, LayerPolicy]]:
    """Block index -> name and layer of the policy; names may carry any prefix before `layers.N`."""
    _check_kind(checkpoint)
    found: dict[int, tuple[str, LayerPolicy]] = {}
    for name, layer in policy.layers.items():
        match = _BLOCK.search(f"{name}.")
        if match is None or int(match[1]) in found:
            raise PlanMismatch(f"the policy names a layer {name!r}, which says no block of its own")
        found[int(match[1])] = (name, layer)
    own = {layer.index: layer.value_heads for layer in checkpoint.spec.layers}
    theirs = {index: layer.num_heads for index, (_, layer) in found.items()}
    if own != theirs:
        wrong = sorted(
            index for index in own.keys() | theirs.keys() if own.get(index) != theirs.get(index)
        )
        raise PlanMismatch(
            f"the policy and {checkpoint.name} differ in the heads of block {wrong[0]}: "
            f"{theirs.get(wrong[0], 0)} and {own.get(wrong[0], 0)}",
            hint="the policy was made for another model, or was edited; make a new one",
            layer=wrong[0],
        )
    return found


def _horizons(
    checkpoint: Checkpoint, epsilon: float, gate_input: float
) -> tuple[NDArray[np.float64], ...]:
    spec = checkpoint.spec
    return tuple(
        static_horizons(
            checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=None,
            gate_input=gate_input,
            epsilon=epsilon,
        )
        for layer in spec.layers
    )


def _rounding_bounds(checkpoint: Checkpoint, policy: Policy) -> list[NDArray[np.float64]]:
    """Largest relative change of each horizon when both parameters are rounded once more.

    |dH/H| <= |A_log| u + |dt_bias| u, since the softplus has a log-derivative of at most 1, and a
    floor for float64 arithmetic in another order.
    """
    unit = _ROUNDING[policy.decay_parameter_storage_dtype]
    bounds = []
    for layer in checkpoint.spec.layers:
        decay: DecayParameters = checkpoint.decay(layer)
        shift = unit * (np.abs(decay.a_log) + np.abs(decay.dt_bias))
        bounds.append(np.expm1(2 * shift) + 1e-12)
    return bounds


def _storage_dtype(checkpoint: Checkpoint) -> StorageDtype:
    """The narrow dtype only where every decay tensor has it; float32 holds the others exactly."""
    names = [n for layer in checkpoint.spec.layers for n in checkpoint.decay_tensors(layer)]
    dtypes = {checkpoint.entries[name].dtype for name in names}
    return _STORED.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"


def _decay_snapshot(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Names and values; every stored value is already a number of the storage dtype."""
    rows = []
    for layer in checkpoint.spec.layers:
        decay = checkpoint.decay(layer)
        rows.append(
            {
                "name": _module(layer.prefix),
                "A_log": decay.a_log.astype(np.float32).tolist(),
                "dt_bias": decay.dt_bias.astype(np.float32).tolist(),
            }
        )
    return sorted(rows, key=lambda row: str(row["name"]))


def _module(prefix: str) -> str:
    """Path of the module whose tensors start with `prefix`."""
    return prefix.removesuffix(".")


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
