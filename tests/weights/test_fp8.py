"""A whole checkpoint in the released FP8 layout: codes and block scales exported together, dequantised equal."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UnsupportedModel
from hybridstate.quality.verify import account_tensors
from tests.plan.calibrated import write_calibration
from tests.tiny import write_checkpoint

BLOCK = 128
FP8_MAX = 448.0


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes float8_e4m3 and `weight_scale_inv` float32, one scale for each 128 x 128 block."""
    rows, columns = weight.shape
    grid = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    codes = torch.zeros_like(weight)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = (slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1)))
            grid[i, j] = weight[at].abs().max() / FP8_MAX
            codes[at] = weight[at] / grid[i, j]
    return codes.to(torch.float8_e4m3fn), grid


def released_fp8(folder: Path, family: str, **options: int) -> Path:
    """A tiny BF16 checkpoint with its projections of linear layers as Qwen's FP8 releases store them (synthetic)."""
    model = write_checkpoint(folder, family, **options)
    checkpoint = open_checkpoint(model)
    prefixes = tuple(layer.prefix for layer in checkpoint.spec.layers)
    for file in checkpoint.files:
        tensors = load_file(file)
        for name in [n for n in tensors if n.startswith(prefixes) and "proj" in n]:
            if tensors[name].dim() == 2 and not name.endswith(
                ("_a.weight", "_b.weight", "ba.weight")
            ):
                codes, grid = quantise(tensors[name].float())
                tensors[name] = codes
                tensors[name.removesuffix("weight") + "weight_scale_inv"] = grid
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config, indent=2))
    return model


def dequantised(model: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor in float32, codes times their block's scale."""
    tensors = {}
    for file in open_checkpoint(model).files:
        tensors |= load_file(file)
    found = {}
    for name, tensor in tensors.items():
        values = tensor.float()
        grid = tensors.get(name.removesuffix("weight") + "weight_scale_inv")
        if grid is not None and tensor.dtype == torch.float8_e4m3fn:
            factors = grid.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            values = values * factors[: values.shape[0], : values.shape[1]]
        if not name.endswith("weight_scale_inv"):
            found[name] = values.numpy()
    return found


@pytest.mark.parametrize("key_order", ["shared", "expand"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_dequantised_checkpoints_are_permutations_of_each_other(
    family: str, key_order: str, tmp_path: Path
) -> None:
    sizes = {"key_dim": 128, "value_heads": 2}
    if family != "kimi_linear":
        sizes |= {"key_heads": 2, "value_heads": 4, "value_dim": 128}
    model = released_fp8(tmp_path / "model", family, **sizes)
    plain = write_checkpoint(tmp_path / "plain", family, **sizes)
    calibration = write_calibration(tmp_path / "cal", model, k_hi=16, values=True)
    options = {"calibration": calibration, "key_order": key_order, "value_order": "common"}
    made = api.export_plan(model, out=tmp_path / "out", **options)  # type: ignore[arg-type]
    source, target = open_checkpoint(model), open_checkpoint(tmp_path / "out")
    account = account_tensors(made.plan, source, target)
    assert any(name.endswith("_scale_inv") for name in source.entries)
    assert {source.entries[n].dtype for n in account.moved} >= {"F8_E4M3"}
    # the same orders, applied to the dequantised tensors
    from hybridstate.weights.orders import layer_orders
    from hybridstate.weights.permute import layer_moves

    unquantised = open_checkpoint(plain)
    before, after = dequantised(model), dequantised(tmp_path / "out")
    orders = layer_orders(made.plan, unquantised.spec)
    for layer, order in zip(unquantised.spec.layers, orders, strict=True):
        for move in layer_moves(unquantised.spec, layer, order, unquantised.shapes):
            expected = before.pop(move.name).reshape(move.shape)
            for axis, index in move.axes:
                expected = np.take(expected, index, axis=axis)
            assert (after.pop(move.name).reshape(expected.shape) == expected).all(), move.name
    assert all((after[name] == before[name]).all() for name in before)


def test_orders_that_break_a_block_are_refused_with_the_alternative(tmp_path: Path) -> None:
    """Heads of 96: a block of 128 rows holds the channels of two heads."""
    model = released_fp8(
        tmp_path / "model", "qwen3_5", key_heads=4, value_heads=4, key_dim=96, value_dim=96
    )
    calibration = write_calibration(tmp_path / "cal", model, k_hi=16, values=True)
    with pytest.raises(UnsupportedModel, match="mixes scale blocks: block 0 of 128") as caught:
        api.export_plan(model, out=tmp_path / "out", calibration=calibration)
    assert "in_proj_qkv.weight_scale_inv" in str(caught.value)
    assert "--no-weights" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    made = api.export_plan(model, out=tmp_path / "out", calibration=calibration, weights=False)
    assert made.layout is None


def test_a_norm_does_not_fold_into_codes(tmp_path: Path) -> None:
    model = released_fp8(
        tmp_path / "model", "qwen3_5", key_heads=2, value_heads=4, key_dim=128, value_dim=128
    )
    calibration = write_calibration(tmp_path / "cal", model, k_hi=16, values=True)
    with pytest.raises(UnsupportedModel, match="cannot take in the norm") as caught:
        api.export_plan(model, out=tmp_path / "out", calibration=calibration, value_order="fold")
    assert "common value order" in str(caught.value.hint)
