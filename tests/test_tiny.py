"""The tiny checkpoints are what the other tests stand on: transformers must accept every tensor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.tiny import FAMILIES, bf16, write_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_tensor_and_misses_none(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(family, shards=2)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not {kind: names for kind, names in info.items() if names}
    with torch.no_grad():
        logits = model(torch.arange(40)[None]).logits
    assert logits.isfinite().all()
    assert 0.3 < float(logits.std()) < 3.0


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one", "kimi_linear")
    three = write_checkpoint(tmp_path / "three", "kimi_linear", shards=3)
    with safe_open(one / "model.safetensors", "np") as whole:
        expected = dict.fromkeys(whole.keys())
    found: dict[str, None] = {}
    for shard in sorted(three.glob("model-*.safetensors")):
        with safe_open(shard, "np") as part:
            found |= dict.fromkeys(part.keys())
    assert len(list(three.glob("model-*.safetensors"))) == 3
    assert set(found) == set(expected)


def test_bf16_rounding_is_torchs() -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    torch_rounded = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(bf16(values), torch_rounded)


def test_tokenizer_is_one_token_per_byte(tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("kimi_linear", tokenizer=True))
    text = 'Hé\n\x01 zß€ "x"'
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
