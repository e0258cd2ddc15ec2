"""A value order of each head's own: the output norm moves into the output projection."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridstate import api
from hybridstate.checkpoint import open_checkpoint
from hybridstate.errors import UnsupportedModel
from hybridstate.plan.build import build_plan
from hybridstate.plan.calibration import read_calibration
from hybridstate.plan.schema import to_content
from hybridstate.plan.store import seal
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import load_model
from hybridstate.weights.export import write_export
from hybridstate.weights.fold import fold_norm, ones_like
from hybridstate.weights.moves import Move
from hybridstate.weights.orders import layer_orders
from hybridstate.weights.permute import layer_moves
from hybridstate.weights.rewrite import lay_out, write_shard
from tests.families.saved import available, save
from tests.plan.calibrated import write_calibration
from tests.tolerances import assert_within, relative_rms
from tests.weights.test_permute import random_order

FAMILIES = ["qwen3_next", "qwen3_5_text", "kimi_linear", "glm5_next", "bailing_hybrid", "lara_mini"]


def saved(name: str, folder: Path) -> Path:
    """A float32 model whose output norms are not ones."""
    if not available(name):
        pytest.skip(f"this transformers has no {name}")
    model = save(name, folder)
    checkpoint = open_checkpoint(model)
    rng = np.random.default_rng(4)
    for layer in checkpoint.spec.layers:
        for suffix, rules in checkpoint.spec.family.axes.items():
            entry = checkpoint.entries.get(layer.prefix + suffix)
            if entry is not None and [r.segments for r in rules] == [("value_shared",)]:
                with entry.file.open("r+b") as stream:
                    stream.seek(entry.start)
                    stream.write(rng.uniform(0.5, 1.5, entry.shape).astype(np.float32).tobytes())
    return model


def logits(folder: Path) -> torch.Tensor:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, 80, (2, 24)))
    return prefill(load_model(str(folder)), tokens, keep_logits=True)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_with_their_own_value_order_compute_the_same(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model")
    checkpoint = open_checkpoint(model)
    orders = [random_order(layer, 3) for layer in checkpoint.spec.layers]
    with pytest.raises(UnsupportedModel, match="different value orders"):
        lay_out(checkpoint, orders)
    moves = lay_out(checkpoint, [replace(order, fold=True) for order in orders]).moves
    target = tmp_path / "moved"
    shutil.copytree(model, target)
    for shard in checkpoint.files:
        here = [m for n, m in moves.items() if checkpoint.entries[n].file == shard]
        write_shard(checkpoint, shard, target / shard.name, here)
    expected = logits(model)
    assert_within(logits(target), expected, "export-logits-f32")
    wrong = [m for m in moves.values() if not m.ones]  # the norm counted twice
    write_shard(checkpoint, checkpoint.files[0], target / checkpoint.files[0].name, wrong)
    assert relative_rms(logits(target), expected) > 1e-3


@pytest.mark.parametrize("how", ["per-head", "common"])
def test_a_plan_with_a_value_order_exports_and_verifies(how: str, tmp_path: Path) -> None:
    model = saved("qwen3_5_text", tmp_path / "model")
    checkpoint = open_checkpoint(model)
    calibration = read_calibration(write_calibration(tmp_path / "cal", model))
    plain = build_plan(checkpoint, calibration=calibration)
    content: dict[str, Any] = to_content(plain.document)
    del content["arrays"], content["content_digest"]
    content["precision"]["value_order"] = how
    rng = np.random.default_rng(1)
    arrays = dict(plain.arrays)
    for layer in checkpoint.spec.layers:
        order = np.stack([rng.permutation(layer.value_dim) for _ in range(layer.value_heads)])
        if how == "common":
            order[:] = order[0]
        arrays[f"layers.{layer.index}.value_order"] = order.astype(np.int16)
    plan = seal(content, arrays)
    layout = lay_out(checkpoint, layer_orders(plan, checkpoint.spec))
    write_export(checkpoint, plan, layout, tmp_path / "out")
    found = api.verify(
        model, tmp_path / "out", prompts=2, prompt_tokens=24, new_tokens=4, bf16=False
    )
    assert found.logit_error <= 1e-5
    assert found.state_error <= 1e-5
    assert len(found.tensors.moved) == len(layout.moves)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_product_is_rounded_to_nearest_even(dtype: str) -> None:
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 12, generator=generator).to(kinds[dtype])
    norm = torch.rand(4, generator=generator) + 0.5
    raw = weight.view(torch.uint8).numpy().tobytes()
    found = fold_norm(raw, dtype, Move("out", (5, 12), ()), norm.numpy())
    expected = (weight.float() * norm.repeat(3)).to(kinds[dtype])
    assert found == expected.view(torch.uint8).numpy().tobytes()
    ones = torch.ones(4).to(kinds[dtype])
    assert (
        ones_like(raw[: 4 * ones.itemsize], dtype, "n") == ones.view(torch.uint8).numpy().tobytes()
    )


def test_a_quantised_projection_is_refused_with_the_alternative(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen3_5"))
    layer = checkpoint.spec.layers[0]
    name = layer.prefix + "out_proj.weight"
    order = replace(random_order(layer, 2), fold=True)
    shapes = {**checkpoint.shapes, name + "_scale": (checkpoint.shapes[name][0], 1)}
    with pytest.raises(UnsupportedModel, match="cannot take in the norm") as caught:
        list(layer_moves(checkpoint.spec, layer, order, shapes))
    assert "one common value order" in str(caught.value.hint)
    with pytest.raises(UnsupportedModel, match="into F8_E4M3"):
        fold_norm(b"\0" * 8, "F8_E4M3", Move("out", (2, 4), ()), np.ones(2, np.float32))
