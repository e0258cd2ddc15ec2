"""Model folders: what is read, what is refused, and how the message helps."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridstate.checkpoint import source as module
from hybridstate.checkpoint.source import open_checkpoint
from hybridstate.errors import HybridStateError, NumericError, SourceError, UsageError
from tests.tiny import write_checkpoint, write_safetensors

Damage = Callable[[Path], None]


def damaged(tmp_path: Path, damage: Damage, family: str = "kimi_linear", shards: int = 3) -> Path:
    folder = write_checkpoint(tmp_path / "model", family, shards=shards)
    damage(folder)
    return folder


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def poke(folder: Path, tensor: str, index: tuple[int, ...], value: float) -> None:
    """Overwrite one stored F32 value in place."""
    entry = open_checkpoint(folder).entries[tensor]
    assert entry.dtype == "F32"
    offset = entry.start + 4 * int(np.ravel_multi_index(index, entry.shape))
    with entry.file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(np.float32(value).tobytes())


def test_only_decay_bytes_are_read(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("kimi_linear", shards=3))
    assert checkpoint.bytes_read == 0
    for layer in checkpoint.spec.layers:
        checkpoint.decay(layer)
        checkpoint.decay(layer)
    checkpoint.digests()
    heads, dim = 4, 8
    assert checkpoint.bytes_read == 3 * (4 * heads + 4 * heads * dim)


def test_channel_bias_is_head_major_and_a_log_flat(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("kimi_linear"))
    layer = checkpoint.spec.layers[1]
    a_name, dt_name = checkpoint.decay_tensors(layer)
    assert checkpoint.shapes[a_name] == (1, 1, 4, 1)
    decay = checkpoint.decay(layer)
    assert decay.a_log.shape == (4,)
    assert decay.dt_bias.shape == (4, 8)
    flat = checkpoint.read(dt_name)
    assert decay.dt_bias[2, 3] == flat[2 * 8 + 3]
    assert (decay.a_log_dtype, decay.dt_bias_dtype) == ("F32", "F32")


def test_stored_dtypes_are_kept_apart(tiny_checkpoint: Callable[..., Path]) -> None:
    qwen35 = open_checkpoint(tiny_checkpoint("qwen3_5"))
    qwen_next = open_checkpoint(tiny_checkpoint("qwen3_next"))
    assert qwen35.decay(qwen35.spec.layers[0]).a_log_dtype == "F32"
    assert qwen35.decay(qwen35.spec.layers[0]).dt_bias_dtype == "BF16"
    assert qwen_next.decay(qwen_next.spec.layers[0]).a_log_dtype == "BF16"


def test_padding_of_a_log_never_reaches_the_heads(tmp_path: Path) -> None:
    """Kimi-K3 stores 128 entries for 96 heads; here 8 for 6, the padding poisoned."""
    heads, dim, hidden = 6, 4, 5
    prefix = "language_model.model.layers.0.self_attn."
    rng = np.random.default_rng(1)
    a_log = rng.uniform(-2, 1, 8).astype(np.float32)
    a_log[heads:] = 99.0
    rows = heads * dim
    tensors = {
        prefix + "A_log": ("F32", a_log),
        prefix + "dt_bias": ("F32", rng.standard_normal(rows).astype(np.float32)),
        prefix + "f_a_proj.weight": ("BF16", np.zeros((dim, hidden), np.float32)),
        prefix + "f_b_proj.weight": ("BF16", np.zeros((rows, dim), np.float32)),
        prefix + "g_proj.weight": ("BF16", np.zeros((rows, hidden), np.float32)),
    }
    text = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 1,
        "linear_attn_config": {
            "kda_layers": [1],
            "num_heads": heads,
            "head_dim": dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k3", "text_config": text})
    )
    write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(tmp_path)
    decay = checkpoint.decay(checkpoint.spec.layers[0])
    np.testing.assert_array_equal(decay.a_log, a_log[:heads].astype(np.float64))


def _nan(folder: Path) -> None:
    poke(folder, "model.layers.1.self_attn.dt_bias", (13,), float("nan"))


def _nan_a_log(folder: Path) -> None:
    poke(folder, "model.layers.2.self_attn.A_log", (0, 0, 3, 0), float("nan"))


def _infinite_a_log(folder: Path) -> None:
    poke(folder, "model.layers.2.self_attn.A_log", (0, 0, 1, 0), float("-inf"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_nan, r"layers\.1\.self_attn\.dt_bias\[13\] is NaN \(1 of 32 values are not finite\)"),
        (_nan_a_log, r"layers\.2\.self_attn\.A_log\[0, 0, 3, 0\] is NaN"),
        (_infinite_a_log, r"layers\.2\.self_attn\.A_log\[0, 0, 1, 0\] is -inf"),
    ],
)
def test_nan_names_tensor_and_index(tmp_path: Path, damage: Damage, message: str) -> None:
    checkpoint = open_checkpoint(damaged(tmp_path, damage))
    with pytest.raises(NumericError, match=message) as caught:
        [checkpoint.decay(layer) for layer in checkpoint.spec.layers]
    assert caught.value.exit_code == 5


def _drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _truncate(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _index_names_absent_tensor(folder: Path) -> None:
    def change(weights: dict[str, str]) -> None:
        weights["model.layers.9.extra"] = "model-00001-of-00003.safetensors"

    edit_index(folder, change)


def _index_escapes_the_folder(folder: Path) -> None:
    def change(weights: dict[str, str]) -> None:
        weights["lm_head.weight"] = "../outside.safetensors"

    edit_index(folder, change)


def _store_twice(folder: Path) -> None:
    shards = [folder / f"model-0000{i}-of-00003.safetensors" for i in (1, 2)]
    names = open_checkpoint(folder).entries
    name = next(n for n, entry in names.items() if entry.file == shards[0])
    other = next(n for n, entry in names.items() if entry.file == shards[1])
    values = np.zeros((2, 2), np.float32)
    write_safetensors(shards[1], {name: ("F32", values), other: ("F32", values)})

    def change(weights: dict[str, str]) -> None:
        for tensor in [t for t, shard in weights.items() if shard == shards[1].name and t != other]:
            del weights[tensor]

    edit_index(folder, change)


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _config_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _config_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def _no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def _empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_shard, r"shard model-00002-of-00003\.safetensors is missing .*1 of 3, \d+ tensors"),
        (_truncate, r"model-00002-of-00003\.safetensors is truncated: \d+ bytes, \d+ needed"),
        (_index_names_absent_tensor, r"places model\.layers\.9\.extra in .*does not hold it"),
        (_index_escapes_the_folder, "is not the name of a safetensors file in this folder"),
        (_store_twice, "is stored twice: in model-00001"),
        (_no_config, "has no config.json"),
        (_config_not_json, "config.json is not JSON"),
        (_config_a_list, "config.json is not a JSON object"),
        (_no_weights, "has neither model.safetensors nor"),
        (_empty_index, "has no weight_map"),
    ],
)
def test_damaged_folder_is_refused_in_one_line(
    tmp_path: Path, damage: Damage, message: str
) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(damaged(tmp_path, damage))
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 3


def test_unlisted_tensors_and_files_are_warnings(tmp_path: Path) -> None:
    def damage(folder: Path) -> None:
        edit_index(folder, lambda weights: weights.pop("lm_head.weight") and None)
        shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "stray-0001.safetensors")

    checkpoint = open_checkpoint(damaged(tmp_path, damage))
    assert len(checkpoint.warnings) == 2
    assert "lm_head.weight" in checkpoint.warnings[0]
    assert "stray-0001.safetensors" in checkpoint.warnings[1]
    assert "lm_head.weight" in checkpoint.entries


def test_digests_follow_decay_bytes_and_nothing_else(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    before = open_checkpoint(folder).digests()
    poke(folder, "model.layers.0.self_attn.dt_bias", (0,), 0.25)
    after = open_checkpoint(folder).digests()
    assert before["decay"] != after["decay"]
    assert {k: v for k, v in before.items() if k != "decay"} == {
        k: v for k, v in after.items() if k != "decay"
    }


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("moonshotai/Kimi-Linear-48B", "hf download moonshotai/Kimi-Linear-48B --local-dir"),
        ("Qwen/Qwen3-Next@v1.0", "hf download Qwen/Qwen3-Next --revision v1.0 --local-dir"),
        ("hf://Qwen/Qwen3-Next", "hf download Qwen/Qwen3-Next --local-dir Qwen3-Next"),
    ],
)
def test_hub_name_prints_the_download_command(model: str, command: str) -> None:
    with pytest.raises(SourceError, match="needs the weights of") as caught:
        open_checkpoint(model, weights=True)
    assert command in str(caught.value.hint)


def test_a_folder_that_looks_like_a_hub_name_wins_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "org" / "model", "kimi_linear")
    monkeypatch.chdir(tmp_path)
    assert "not the Hub repository of that name" in open_checkpoint("org/model").notes[0]
    assert open_checkpoint("./org/model").notes == ()
    with pytest.raises(SourceError, match="requests are switched off"):
        open_checkpoint("hf://org/model", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("model", ["./a/b", "/a/b", "~/a/b", "nowhere"])
def test_path_like_name_is_never_taken_for_a_hub_name(model: str) -> None:
    with pytest.raises(SourceError, match="no model at"):
        open_checkpoint(model)


@pytest.mark.parametrize("model", ["Qwen3.6-35B-A3B", "./Kimi-Linear-48B-A3B"])
def test_a_model_known_by_its_sizes_gets_its_own_hint(model: str) -> None:
    with pytest.raises(SourceError, match="no model at") as caught:
        open_checkpoint(model)
    assert caught.value.hint is not None
    assert "--dummy" in caught.value.hint
    assert "its Hub name org/" in caught.value.hint


@pytest.mark.parametrize("model", ["", " "])
def test_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(write_checkpoint(tmp_path / "model", "kimi_linear"))
    with pytest.raises(UsageError, match="MODEL is empty"):
        open_checkpoint(model)
    assert open_checkpoint(".").name == "model"


def test_file_instead_of_a_folder_is_refused(tiny_kda: Path) -> None:
    with pytest.raises(SourceError, match="is a file"):
        open_checkpoint(tiny_kda / "config.json")


def test_local_folder_wins_over_an_embedded_name_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "tiny-kda", "kimi_linear")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("tiny-kda")
    assert checkpoint.path == (tmp_path / "tiny-kda").resolve()
    assert "not the embedded model" in checkpoint.notes[0]


def test_embedded_model_absent_from_the_installation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "checkpoint" / "source.py"))
    with pytest.raises(SourceError, match="tiny-gdn is not part of this installation"):
        open_checkpoint("tiny-gdn")


def test_unknown_tensor_is_refused(tiny_kda: Path) -> None:
    with pytest.raises(HybridStateError, match="no tensor named nothing"):
        open_checkpoint(tiny_kda).read("nothing")


# --- a config that contradicts itself or the tensors ------------------------------------------------


def edited(folder: Path, family: str, path: str, value: Any) -> Path:
    write_checkpoint(folder, family)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    *parents, key = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[key] = value
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "path", "value", "message"),
    [
        ("kimi_linear", "linear_attn_config.kda_layers", [0, 1, 2], "counts from 1 to 4"),
        ("kimi_linear", "linear_attn_config.kda_layers", [1, 2, 3, 9], "lists block 9"),
        ("kimi_linear", "linear_attn_config.kda_layers", "all", "should be a list, found 'all'"),
        ("kimi_linear", "num_hidden_layers", 9, r"no tensor of model\.layers\.4 \(5 missing\)"),
    ],
)
def test_layer_list_that_cannot_be_is_refused(
    tmp_path: Path, family: str, path: str, value: Any, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        _ = open_checkpoint(edited(tmp_path / "model", family, path, value)).spec


def test_convolution_width_of_config_and_tensors_must_agree(tmp_path: Path) -> None:
    path = "linear_attn_config.short_conv_kernel_size"
    folder = edited(tmp_path / "model", "kimi_linear", path, 7)
    with pytest.raises(NumericError, match=r"q_conv1d\.weight has shape .* 7\]"):
        _ = open_checkpoint(folder).spec


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_no_model_file(tmp_path: Path, name: str) -> None:
    """Opening one would wait forever for a writer."""
    folder = write_checkpoint(tmp_path / "model", "kimi_linear")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SourceError, match="regular file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("model", ["a" * 300, "~no-such-user/model", "./" + "b/" * 3000])
def test_a_name_the_system_refuses_is_no_model(model: str) -> None:
    with pytest.raises(SourceError, match="no model at"):
        open_checkpoint(model)


@pytest.mark.parametrize("shard", ["a" * 300 + ".safetensors", "a\0.safetensors"])
def test_index_with_an_impossible_file_name(tmp_path: Path, shard: str) -> None:
    folder = write_checkpoint(tmp_path / "model", "kimi_linear", shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(SourceError, match="is not the name of a safetensors file"):
        open_checkpoint(folder)
