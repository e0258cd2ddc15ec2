"""The embedded models: released layout, size, tokenizer, and cards that say what was recorded."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from training import release, results

MODELS = Path(results.ROOT) / "hybridstate" / "models"
RECORD = json.loads(results.RECORD.read_text())


@pytest.mark.parametrize("kind", release.KINDS)
def test_names_shapes_and_dtypes_are_those_of_the_released_checkpoints(kind: str) -> None:
    folder = MODELS / release.NAMES[kind]
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {n: file.get_slice(n) for n in file.keys()}  # noqa: SIM118
        kinds = {n: (t.get_dtype(), tuple(t.get_shape())) for n, t in tensors.items()}
    if kind == "gdn":
        at = "model.language_model.layers.0.linear_attn."
        assert kinds[at + "A_log"] == ("F32", (8,))
        assert kinds[at + "dt_bias"] == ("BF16", (8,))
        assert kinds[at + "norm.weight"] == ("F32", (128,))
        assert kinds[at + "conv1d.weight"] == ("BF16", (2048, 1, 4))
        assert "lm_head.weight" not in kinds
    else:
        at = "model.layers.0.self_attn."
        assert kinds[at + "A_log"] == ("F32", (1, 1, 4, 1))
        assert kinds[at + "dt_bias"] == ("F32", (512,))
        assert kinds[at + "q_conv1d.weight"] == ("BF16", (512, 1, 4))
        config = json.loads((folder / "config.json").read_text())
        assert config["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5, 6, 7]
    assert sum(p.stat().st_size for p in folder.iterdir()) < 12_000_000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", release.KINDS)
def test_model_and_tokenizer_load_offline(kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = MODELS / release.NAMES[kind]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello w\xf6rld \u2603\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("He walked slowly down the street and into the house.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss
    assert float(loss) / math.log(2) < 3.0  # bits per byte; 8 before training


@pytest.mark.parametrize("name", release.NAMES.values())
def test_card_says_what_was_recorded(name: str) -> None:
    assert (MODELS / name / "README.md").read_text() == results.card(name, RECORD)


@pytest.mark.parametrize("name", release.NAMES.values())
def test_recorded_figures_meet_the_bars(name: str) -> None:
    assert all(results.passed(RECORD["models"][name]).values())
    assert RECORD["models"][name]["training"]["seconds"] <= 240
