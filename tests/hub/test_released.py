"""Released layouts at full size, served by the stand-in: what `analyze` costs on the network.

Headers and index have the released names and shapes; decay values are synthetic, the rest is holes.
"""

from pathlib import Path

import pytest

from hybridstate.checkpoint import open_checkpoint
from hybridstate.checkpoint.hub import GAP_BYTES, coalesce
from tests.hub.conftest import Reader
from tests.hub.standin import FIRST_COMMIT, Repo, StandIn
from tests.released import BY_NAME, RELEASES, write

SLACK_BYTES = 64 << 10
MOST_BYTES = {
    "Qwen3-Next-80B-A3B-Instruct": 15_000_000,
    "Qwen3.6-35B-A3B": 1_000_000,
    "Kimi-Linear-48B-A3B-Instruct": 20_000_000,
}
"""Fused experts cost well under a megabyte, 512 experts of 48 layers about 14."""


@pytest.mark.parametrize("name", [name for name in MOST_BYTES if name in BY_NAME])
def test_a_release_costs_its_index_headers_and_decay_tensors(
    hub: StandIn, read: Reader, tmp_path: Path, name: str
) -> None:
    folder = write(BY_NAME[name], tmp_path / name)
    hub.repos["org/model"] = Repo({FIRST_COMMIT: folder})
    found = read()
    local = open_checkpoint(folder)
    assert found["digests"] == local.digests()
    assert found["size"] == pytest.approx(local.size, rel=1e-3)  # headers left unread are not in it
    touched = {seen.path.rpartition("/")[2] for seen in hub.log if seen.range}
    ranges = payload = 0
    for shard in touched:
        entries = [local.entries[n] for n in local.all_decay_tensors]
        spans = [(e.start, e.end) for e in entries if e.file.name == shard]
        merged = list(coalesce(spans, GAP_BYTES))
        ranges += len(merged)
        payload += sum(end - start for start, end in merged)
        assert len([s for s in hub.log if shard in s.path]) <= 3 + max(0, len(merged) - 1)
    headers = sum(b for part, _, b in found["cost"] if part.startswith("headers"))
    index = folder / "model.safetensors.index.json"
    budget = (index.stat().st_size if index.exists() else 0) + headers + payload + SLACK_BYTES
    assert hub.body_bytes <= min(budget, MOST_BYTES[name])
    assert len(hub.log) == 2 + index.exists() + 2 * len(touched) + ranges
    first = (len(hub.log), hub.body_bytes)
    hub.log.clear()
    assert read(offline=True)["digests"] == found["digests"]
    assert hub.log == []
    print(f"{name}: {first[0]} requests, {first[1]:,} bytes of {found['size']:,}")  # noqa: T201


def test_the_table_of_budgets_names_releases() -> None:
    known = {release.name for release in RELEASES}
    assert set(MOST_BYTES) <= known
