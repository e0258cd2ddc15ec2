"""Export and verification of one random tiny model, for the tests and for `scripts/verification.py`."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.families import FAMILIES
from hybridstate.quality.verify import Verification
from hybridstate.trajectories import model as loading
from tests.families.saved import MODELS, available, save
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


EVERYTHING: dict[str, str] = {"key_order": "expand", "value_order": "common"}
"""The orders that move most: key channels of every value head, value dims, with scales outside the weights."""

_SMALL: dict[str, Any] = {
    "k_hi": 2, "temperature": 1.0, "input_tokens": 24, "new_tokens": 20, "windows": (0,),
    "anchors": (2, 5), "horizon": 8,
}  # fmt: skip
_EMBEDDED: dict[str, Any] = {
    "input_tokens": 128, "new_tokens": 96, "windows": (0,), "anchors": (16, 32), "horizon": 48,
}  # fmt: skip


class FoldedBytes:
    """Text as token ids of a model without a tokenizer: bytes, folded into its vocabulary."""

    all_special_ids = (0, 1, 2)

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def encode(self, text: str, **_: Any) -> list[int]:
        """One id from 3 on for every byte."""
        return [3 + byte % (self.vocabulary - 3) for byte in text.encode()]


def calibrated(model: Path | str, folder: Path, **options: Any) -> Path:
    """A calibration of the model's own states with value maps, on the texts shipped here."""
    real = loading.load_model

    def load(*args: Any, **given: Any) -> Any:
        loaded = real(*args, **given)
        if loaded.tokenizer is not None:
            return loaded
        return replace(loaded, tokenizer=FoldedBytes(loaded.vocabulary))

    with mock.patch.object(loading, "load_model", load):
        api.calibrate(model, folder, formats="damp+reorder", **options)
    return folder


def verified(name: str, folder: Path, **orders: Any) -> Verification | None:
    """Export a model under calibrated orders and compare the two.

    Args:
        orders: `key_order` and `value_order` of the export.
    """
    if name in EMBEDDED:
        model = open_checkpoint(name).path
        calibration = calibrated(name, folder / "calibration", **_EMBEDDED)
        api.export_plan(model, out=folder / "exported", w_max=64, calibration=calibration, **orders)
        return api.verify(model, folder / "exported")
    model_folder = make(name, folder / "model")
    if model_folder is None:
        return None
    calibration = calibrated(model_folder, folder / "calibration", **_SMALL)
    api.export_plan(
        model_folder, out=folder / "exported", w_max=64, calibration=calibration, **orders
    )
    return api.verify(model_folder, folder / "exported", prompts=2, prompt_tokens=32, new_tokens=6)
