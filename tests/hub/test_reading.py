"""Reading from the Hub: what is asked for, how much of it, and what a second run needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridstate.checkpoint import open_checkpoint
from hybridstate.checkpoint.hub import GAP_BYTES, coalesce, hub_name
from tests.hub.conftest import Reader
from tests.hub.standin import FIRST_COMMIT, SECOND_COMMIT, Fault, Repo, StandIn

SLACK_BYTES = 64 << 10


def files_of(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def test_a_hub_model_gives_what_its_folder_gives(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    found, local = read(), open_checkpoint(tiny_kda_shards)
    assert found["digests"] == local.digests()
    assert found["family"] == local.spec.name
    assert found["commit"] == FIRST_COMMIT
    assert found["size"] == local.size
    assert found["notes"] == [f"org/model: commit {FIRST_COMMIT} of the default branch"]


def test_requests_and_bytes_stay_in_the_budget(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    """Index, headers and coalesced decay bytes; three requests a shard and one per further range."""
    found = read()
    local = open_checkpoint(tiny_kda_shards)
    sizes = files_of(tiny_kda_shards)
    shards = [name for name in sizes if name.endswith(".safetensors")]
    ranges = 0
    payload = 0
    for shard in shards:
        entries = [local.entries[n] for n in local.all_decay_tensors]
        spans = [(e.start, e.end) for e in entries if e.file.name == shard]
        merged = list(coalesce(spans, GAP_BYTES))
        ranges += len(merged)
        payload += sum(end - start for start, end in merged)
    budget = sizes["model.safetensors.index.json"] + local.header_bytes + payload
    assert hub.body_bytes <= budget + SLACK_BYTES
    assert len(hub.log) == 3 + 2 * len(shards) + ranges
    per_shard = {shard: [s for s in hub.log if shard in s.path] for shard in shards}
    assert all(len(seen) <= 2 + max(1, ranges) for seen in per_shard.values())
    assert (found["requests"], found["received"]) == (len(hub.log), hub.body_bytes)
    assert sum(r for _, r, _ in found["cost"]) == len(hub.log)
    assert sum(b for _, _, b in found["cost"]) == hub.body_bytes


def test_only_the_index_config_and_ranges_of_shards_are_asked_for(
    hub: StandIn, read: Reader
) -> None:
    read()
    whole = [seen.path for seen in hub.log if seen.range is None]
    assert [path.rpartition("/")[2].partition("?")[0] for path in whole] == [
        "model",
        "config.json",
        "model.safetensors.index.json",
    ]
    assert all(seen.status == 206 for seen in hub.log if seen.range is not None)
    assert all(FIRST_COMMIT in seen.path for seen in hub.log if not seen.path.startswith("/api/"))


def test_second_run_asks_for_the_commit_alone(hub: StandIn, read: Reader) -> None:
    first = read()
    hub.log.clear()
    second = read()
    assert second["digests"] == first["digests"]
    assert [seen.path.partition("?")[0] for seen in hub.log] == ["/api/models/org/model"]


def test_second_run_at_a_commit_asks_for_nothing(hub: StandIn, read: Reader) -> None:
    model = f"org/model@{FIRST_COMMIT}"
    first = read(model)
    hub.log.clear()
    assert read(model)["digests"] == first["digests"]
    assert hub.log == []


@pytest.mark.parametrize("how", ["option", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_makes_no_request(hub: StandIn, read: Reader, how: str) -> None:
    first = read()
    hub.log.clear()
    if how == "option":
        second = read(offline=True)
    else:
        second = read(environment={how: "1"})
        read(environment={how: None}, offline=True)
    assert second["digests"] == first["digests"]
    assert (second["requests"], second["received"]) == (0, 0)
    assert hub.log == []


def test_offline_without_a_cache_says_which_command_fills_it(hub: StandIn, read: Reader) -> None:
    error = read.error("org/model@v1", offline=True)
    assert error["context"]["reason"] == "offline"
    assert "requests are switched off" in error["message"]
    assert "hybridstate analyze org/model@v1" in error["hint"]
    assert hub.log == []


def test_everything_comes_from_one_commit_when_the_branch_moves(
    hub: StandIn, read: Reader, tiny_kda_shards: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    other = tiny_checkpoint("kimi_linear", shards=3, seed=7)
    hub.repos["org/model"] = Repo(
        {FIRST_COMMIT: tiny_kda_shards, SECOND_COMMIT: other}, moves_to=SECOND_COMMIT
    )
    first = read()
    assert first["digests"] == open_checkpoint(tiny_kda_shards).digests()
    second = read()
    assert second["commit"] == SECOND_COMMIT
    assert second["digests"] == open_checkpoint(other).digests()
    assert second["notes"][1] == "org/model pointed to 111111111111 at the last run"


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/4", "feature/a+b", "..", "#4"])
def test_branches_tags_and_pull_requests_are_pinned(
    hub: StandIn, read: Reader, revision: str
) -> None:
    hub.repos["org/model"].branches[revision] = FIRST_COMMIT
    found = read(f"hf://org/model@{revision}")
    assert found["commit"] == FIRST_COMMIT
    assert read(f"org/model@{revision}", offline=True)["digests"] == found["digests"]
    inside = [path.relative_to(read.cache).parts[0] for path in read.cache.rglob("*")]
    assert set(inside) == {"org--model"}


def test_a_single_file_is_read_without_an_index(
    hub: StandIn, read: Reader, tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = tiny_checkpoint("qwen3_5")
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    found = read()
    assert found["digests"] == open_checkpoint(folder).digests()
    assert found["files"] == 1
    assert len(hub.log) == 2 + 3


def test_shards_without_linear_attention_are_not_touched(
    hub: StandIn, read: Reader, tiny_kda_shards: Path, tmp_path: Path
) -> None:
    import numpy as np

    from tests.tiny import write_safetensors

    folder = tmp_path / "model"
    shutil.copytree(tiny_kda_shards, folder)
    extra = "model-00004-of-00004.safetensors"
    write_safetensors(folder / extra, {"visual.weight": ("F32", np.zeros((4, 4), np.float32))})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["visual.weight"] = extra
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    assert read()["files"] == 3
    assert not [seen for seen in hub.log if extra in seen.path]


def test_an_unsupported_model_costs_no_header(hub: StandIn, read: Reader, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    names = {"model.layers.0.self_attn.q_proj.weight": "model-1.safetensors"}
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (tmp_path / "m" / "model-1.safetensors").write_bytes(b"never read")
    hub.repos["org/model"] = Repo({FIRST_COMMIT: tmp_path / "m"})
    found = read()
    assert (found["ok"], found["exit"], found["code"]) == (False, 4, "unsupported-model")
    assert not [seen for seen in hub.log if ".safetensors" in seen.path and seen.range]


def test_redirects_to_storage_are_followed_once_per_shard_and_never_see_the_token(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    hub.repos["org/model"].redirect = True
    found = read(environment={"HF_TOKEN": "allowed"})
    read(environment={"HF_TOKEN": None}, offline=True)
    assert found["digests"] == open_checkpoint(tiny_kda_shards).digests()
    storage = [seen for seen in hub.log if seen.server == "storage"]
    assert len(storage) >= 6
    assert {seen.authorization for seen in storage} == {None}
    assert {seen.authorization for seen in hub.log if seen.server == "hub"} == {"Bearer allowed"}
    assert len([seen for seen in hub.log if seen.status == 302]) == 3
    assert found["requests"] == len(hub.log)


def test_a_signature_that_ran_out_is_renewed(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    hub.repos["org/model"].redirect = True
    hub.faults.append(Fault("403", at="00002-of-00003.safetensors?signature=", after=1, times=1))
    found = read()
    assert found["digests"] == open_checkpoint(tiny_kda_shards).digests()
    assert [seen.status for seen in hub.log].count(403) == 1
    assert [seen.status for seen in hub.log].count(302) == 4


def test_a_renamed_repository_is_followed(
    hub: StandIn, read: Reader, tiny_kda_shards: Path
) -> None:
    hub.faults.append(Fault("renamed", at="/old/"))
    hub.repos["org/model"] = Repo({FIRST_COMMIT: tiny_kda_shards})
    assert read("old/model")["digests"] == open_checkpoint(tiny_kda_shards).digests()


def test_a_damaged_cache_is_noticed(hub: StandIn, read: Reader) -> None:
    first = read()
    victim = next(read.cache.rglob("*.safetensors.header"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    error = read.error(offline=True)
    assert str(victim) in error["message"]
    assert "is damaged" in error["message"]
    assert read()["digests"] == first["digests"]
    assert read(offline=True)["digests"] == first["digests"]


def test_a_cache_that_cannot_be_written_is_a_warning(hub: StandIn, read: Reader) -> None:
    read.cache.write_text("a file where the folder should be")
    found = read()
    assert found["ok"]
    assert "nothing is kept for the next run" in found["warnings"][0]


@pytest.mark.parametrize("weights", [True, False])
def test_weights_are_never_downloaded_unasked(hub: StandIn, read: Reader, weights: bool) -> None:
    if not weights:
        read()
        assert all(seen.nbytes < 20_000 for seen in hub.log)
        return
    error = read.error("org/model@v2", weights=True)
    assert error["context"]["reason"] == "weights"
    assert "hf download org/model --revision v2 --local-dir model" in error["hint"]
    assert hub.log == []


@pytest.mark.parametrize(
    ("model", "repo", "revision"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct", None),
        ("hf://Qwen/Qwen3-Next@v1.0", "Qwen/Qwen3-Next", "v1.0"),
        ("a/b@refs/pr/4", "a/b", "refs/pr/4"),
    ],
)
def test_hub_names(model: str, repo: str, revision: str | None) -> None:
    found = hub_name(model)
    assert found is not None
    assert (found.repo, found.revision) == (repo, revision)


@pytest.mark.parametrize(
    "model",
    [
        "tiny-kda", "a/b/c", "a/", "/a/b", "a/..", "../a", "a/b--c", "a/.b", "a b/c", "a/b@",
        "hf://a", "hf://datasets/a/b", "a/b@\n", "é/b", "a/b@" + "x" * 201, "a" * 90 + "/" + "b" * 90,
    ],
)  # fmt: skip
def test_what_is_no_hub_name(model: str) -> None:
    assert hub_name(model) is None


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(0, 4)], [(0, 4)]),
        ([(8, 12), (0, 4)], [(0, 12)]),
        ([(0, 4), (14, 20)], [(0, 4), (14, 20)]),
        ([(0, 4), (13, 20)], [(0, 20)]),
        ([(0, 30), (4, 8), (35, 40)], [(0, 40)]),
    ],
)
def test_spans_closer_than_the_gap_are_one(
    spans: list[tuple[int, int]], merged: list[tuple[int, int]]
) -> None:
    assert list(coalesce(spans, 10)) == merged
