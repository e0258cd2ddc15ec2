"""Plans made from a generator, for tests of the plan room: no checkpoint behind them."""

from typing import Any

import numpy as np

from hybridstate.plan.store import Plan, seal

DIGEST = "a" * 64


def digests(letter: str = "a") -> dict[str, str]:
    return dict.fromkeys(("config", "index", "decay", "order"), letter * 64)


def sample(
    seed: int = 0,
    *,
    key_heads: int = 2,
    bundle: int = 2,
    key_dim: int = 8,
    value_dim: int = 12,
    layers: int = 3,
    unit: str = "head",
    dasc: bool = True,
    damp: bool = True,
    k_hi: int = 4,
    exported: bool = True,
) -> Plan:
    """A plan of random but consistent content."""
    content, arrays = sample_content(
        seed,
        key_heads=key_heads,
        bundle=bundle,
        key_dim=key_dim,
        value_dim=value_dim,
        layers=layers,
        unit=unit,
        dasc=dasc,
        damp=damp,
        k_hi=k_hi,
        exported=exported,
    )
    return seal(content, arrays)


def sample_content(
    seed: int,
    *,
    key_heads: int,
    bundle: int,
    key_dim: int,
    value_dim: int,
    layers: int,
    unit: str,
    dasc: bool,
    damp: bool,
    k_hi: int,
    exported: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON content and the arrays of `sample`, to be damaged before sealing."""
    rng = np.random.Generator(np.random.PCG64(seed))
    heads = key_heads * bundle
    indices = [i + i // 3 for i in range(layers)]
    arrays: dict[str, Any] = {}
    counted, offset, longest = [], 0, 0
    for i in indices:
        start = f"layers.{i}."
        if dasc:
            shape = (heads, key_dim) if unit == "channel" else (heads,)
            horizon = np.exp(rng.uniform(0, 8, shape)).astype(np.float32)
            horizon.flat[0] = np.inf
            retained = horizon > 64
            window = np.where(retained, 0, np.maximum(4, 2 ** np.ceil(np.log2(horizon))))
            arrays[start + "horizon"] = horizon
            arrays[start + "retained"] = retained.astype(np.uint8)
            arrays[start + "replay_window"] = window.astype(np.int32)
            kept = int(retained.sum())
            counted.append({"index": i, "units": horizon.size, "retained": kept, "offset": offset})
            offset += kept
            longest = max(longest, int(window.max()))
        if damp:
            orders = []
            for _ in range(key_heads):
                chosen = np.sort(rng.permutation(key_dim)[:k_hi])
                rest = np.setdiff1d(np.arange(key_dim), chosen)
                orders += [np.concatenate([chosen, rest])] * bundle
            arrays[start + "key_order"] = np.array(orders, np.int16)
            arrays[start + "risk"] = rng.uniform(0, 1, (heads, key_dim)).astype(np.float32)
    unit_bytes = 4 * value_dim * (1 if unit == "channel" else key_dim)
    dense = 4 * layers * heads * key_dim * value_dim
    content: dict[str, Any] = {
        "schema": "hybridstate.plan",
        "schema_version": 1,
        "model": {
            "name": "sample",
            "family": "qwen3_5" if unit == "head" else "kimi_linear",
            "kind": "gdn" if unit == "head" else "kda",
            "gate": "softplus",
            "num_layers": indices[-1] + 2,
            "layers": [
                {
                    "index": i,
                    "ordinal": ordinal,
                    "prefix": f"model.layers.{i}.linear_attn.",
                    "key_heads": key_heads,
                    "value_heads": heads,
                    "key_dim": key_dim,
                    "value_dim": value_dim,
                    "conv_width": 4,
                    "a_log_dtype": "F32",
                    "dt_bias_dtype": "BF16",
                }
                for ordinal, i in enumerate(indices)
            ],
            "original": digests("a"),
            "exported": digests("b") if exported and damp else None,
        },
        "provenance": {"versions": {"hybridstate": "0.1.0"}, "commit": None},
    }
    if dasc:
        content["horizons"] = {"epsilon": 1e-3, "gate_input": -0.3, "chosen_by": "published"}
        content["selection"] = {
            "w_max": 64,
            "unit": unit,
            "layers": counted,
            "w_replay": longest,
            "near_cutoff": 0,
        }
        content["accounting"] = {
            "temporal_dense_bytes": dense,
            "temporal_ragged_bytes": unit_bytes * offset,
            "temporal_padded_bytes": unit_bytes * layers * max(c["retained"] for c in counted),
            "conv_bytes": 1000,
        }
    if damp:
        content["layout_id"] = "sample-layout"
        content["precision"] = {
            "k_hi": k_hi,
            "group": 32,
            "key_order": "shared",
            "selector": "damp",
            "bits_per_value": 9.875,
            "bits_per_value_with_ring": 9.875,
            "state_dense_bytes": dense,
            "state_packed_bytes": dense // 3,
        }
        content["calibration"] = {
            "protocol": {"profile": "quick", "horizon": 96},
            "fingerprint": "f",
            "prompt_digests": {"fit": DIGEST},
        }
    return content, arrays
