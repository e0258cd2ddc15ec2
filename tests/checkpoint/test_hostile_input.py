"""Whatever stands in config, index or header: a hybridstate error or a result, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridstate import api
from hybridstate.errors import HybridStateError
from tests.tiny import write_checkpoint

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
FUZZ = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


def attempt(folder: Path) -> None:
    message = ""
    try:
        api.analyze(folder)
    except HybridStateError as error:
        message = error.message
    assert "\n" not in message


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Dotted paths of every entry of a JSON object."""
    if not isinstance(value, dict):
        return []
    found = []
    for key, inner in value.items():
        found += [(*prefix, key), *paths(inner, (*prefix, key))]
    return found


def replace(document: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("victims")
    families = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear")
    folders = {name: write_checkpoint(root / name, name, shards=2) for name in families}
    return folders.__getitem__


@FUZZ
@given(
    family=st.sampled_from(["qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear"]),
    data=st.data(),
)
def test_any_value_anywhere_in_the_config(
    victims: Callable[[str], Path], family: str, data: st.DataObject
) -> None:
    folder = victims(family)
    file = folder / "config.json"
    original = file.read_text()
    config = json.loads(original)
    path = data.draw(st.sampled_from(paths(config)))
    try:
        file.write_text(json.dumps(replace(config, path, data.draw(JSON))))
        attempt(folder)
    finally:
        file.write_text(original)


@FUZZ
@given(value=JSON, key=st.sampled_from(["gate_lower_bound", "kda_layers", "head_dim"]))
def test_any_value_in_the_linear_attention_config(
    victims: Callable[[str], Path], value: Any, key: str
) -> None:
    folder = victims("kimi_linear")
    file = folder / "config.json"
    original = file.read_text()
    try:
        changed = replace(json.loads(original), ("linear_attn_config", key), value)
        file.write_text(json.dumps(changed))
        attempt(folder)
    finally:
        file.write_text(original)


@FUZZ
@given(data=st.data())
def test_any_bytes_in_a_header_or_index(
    victims: Callable[[str], Path], data: st.DataObject
) -> None:
    folder = victims("kimi_linear")
    names = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"]
    file = folder / data.draw(st.sampled_from(names))
    original = file.read_bytes()
    reach = min(len(original), 4000)
    start = data.draw(st.integers(0, reach - 1))
    junk = data.draw(st.binary(min_size=1, max_size=12))
    try:
        file.write_bytes(original[:start] + junk + original[start + len(junk) :])
        attempt(folder)
    finally:
        file.write_bytes(original)


@FUZZ
@given(size=st.integers(0, 6000))
def test_any_length_of_a_shard(victims: Callable[[str], Path], size: int) -> None:
    folder = victims("qwen3_5")
    file = folder / "model-00001-of-00002.safetensors"
    original = file.read_bytes()
    try:
        file.write_bytes(original[:size])
        attempt(folder)
    finally:
        file.write_bytes(original)
