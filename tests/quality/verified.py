"""Export and verification of one random tiny model, for the tests and for `scripts/verification.py`."""

from pathlib import Path
from typing import Any

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.families import FAMILIES
from hybridstate.quality.verify import Verification
from tests.families.saved import MODELS, available, save
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5, H/Hk = 1": ("qwen3_5", {"key_heads": 2, "value_heads": 2}),
    "qwen3_5, H/Hk = 3": ("qwen3_5", {"value_heads": 6, "shards": 2, "tokenizer": True}),
    "qwen3_5_moe, composite": ("qwen3_5_moe", {}),
    "qwen3_next, H/Hk = 3": ("qwen3_next", {"value_heads": 6}),
    "kimi_linear, released names": ("kimi_linear", {"tokenizer": True}),
    "olmo_hybrid, released names": ("olmo_hybrid", {}),
}
"""Folders with the tensor names of the release."""

SAVED = tuple(
    name
    for name, model in MODELS.items()
    if model.family != "olmo_hybrid"  # transformers saves its convolution split in the wrong places
    and any(family.name == model.family and family.runtime for family in FAMILIES)
)
"""Folders as transformers saves them."""


EMBEDDED = ("tiny-gdn", "tiny-kda")
"""Trained models of the package, compared on held-out prose at the sizes `verify` takes by default."""


def make(name: str, folder: Path) -> Path | None:
    """The model's folder; None where this transformers has no such class."""
    if name in RELEASED:
        family, options = RELEASED[name]
        return write_checkpoint(folder, family, **options)
    return save(name, folder) if available(name) else None


def verified(name: str, folder: Path) -> Verification | None:
    """Export a model under a random key order and compare the two."""
    if name in EMBEDDED:
        model = open_checkpoint(name).path
        calibration = write_calibration(folder / "calibration", model, k_hi=16)
        api.export_plan(model, out=folder / "exported", w_max=64, calibration=calibration)
        return api.verify(model, folder / "exported")
    model = make(name, folder / "model")
    if model is None:
        return None
    calibration = write_calibration(folder / "calibration", model)
    api.export_plan(model, out=folder / "exported", w_max=64, calibration=calibration)
    return api.verify(model, folder / "exported", prompts=2, prompt_tokens=32, new_tokens=6)
