"""A calibration folder with random risks, in the form `hybridstate calibrate` writes."""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hybridstate.checkpoint import open_checkpoint


def write_calibration(
    folder: Path, model: Path, *, k_hi: int = 2, seed: int = 0, values: bool = False
) -> Path:
    """Random risks for `model`; the channels of the largest risk, summed over each bundle.

    With `values` also random value orders and scales, as the format damp+reorder leaves them.
    """
    checkpoint = open_checkpoint(model)
    rng = np.random.Generator(np.random.PCG64(seed))
    arrays = {}
    for layer in checkpoint.spec.layers:
        risk = rng.uniform(0, 1, (layer.value_heads, layer.key_dim)).astype(np.float32)
        summed = risk.reshape(layer.key_heads, layer.bundle, layer.key_dim).sum(1)
        chosen = np.sort(np.argsort(-summed, axis=1)[:, :k_hi], axis=1)
        arrays[f"layers.{layer.index}.risk"] = risk
        arrays[f"layers.{layer.index}.protected"] = np.repeat(chosen, layer.bundle, 0).astype("i2")
        if values:
            shape = (layer.value_heads, layer.value_dim)
            scale = np.exp(rng.normal(0, 0.5, shape)).astype(np.float32)
            order = np.argsort(rng.uniform(size=shape), axis=1).astype("i2")
            alone = np.sort(np.argsort(summed, axis=1)[:, :k_hi], axis=1)  # other channels
            arrays[f"layers.{layer.index}.value_scale"] = scale
            arrays[f"layers.{layer.index}.value_order"] = order
            arrays[f"layers.{layer.index}.protected_reorder"] = np.repeat(
                alone, layer.bundle, 0
            ).astype("i2")
    folder.mkdir(parents=True)
    save_file(arrays, folder / "calibration.safetensors")
    digests = checkpoint.digests()
    content = {
        "schema": "hybridstate.calibration/1",
        "arrays": {
            name: {"sha256": hashlib.sha256(array.tobytes()).hexdigest()}
            for name, array in arrays.items()
        },
        "model": {"name": checkpoint.name, "digests": digests},
        "protocol": {"profile": "quick", "horizon": 96},
        "fingerprint": "0" * 64,
        "prompt_digests": {"fit/math/0": "1" * 64},
        "k_hi": k_hi,
        "group": 32,
        "selector": "damp",
        "key_order": "shared",
        "seed": seed,
        "validation": [
            {"format": "fp32", "bits_per_value": 32.0, "kl": 0.0, "top1": 1.0, "state_error": 0.0}
        ],
    }
    (folder / "calibration.json").write_text(json.dumps(content))
    return folder
