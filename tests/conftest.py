"""Fixtures for the whole suite: threads, GPU marker, tiny checkpoints, poisoned allocations."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch starts its pool: the models are so small that a second thread only costs, and one thread makes
# float32 sums repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Workers of pytest-xdist have the terminal's width, whoever looks: tables are as wide as in a pipe.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from hypothesis import settings

from tests.tiny import write_checkpoint

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton decides at decoration time, so this comes before any kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

POISONED_ROOMS = ("kernels", "runtime")

# A device context remembers at its first use which functions make tensors, and knows them by identity: were that use
# under `poisoned_empty`, modules made on a GPU would lie on the CPU for the rest of the process.
with torch.device("cpu"):
    torch.empty(0)

# Fixed examples and no time limit: a shared machine must not turn a slow example into a failure.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=25, database=None
)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, **options)` of `tests.tiny.write_checkpoint`, written once per session.

    The folder is shared: tests that damage a checkpoint write their own.
    """
    written: dict[tuple[Any, ...], Path] = {}

    def get(family: str = "qwen3_5", **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in written:
            folder = tmp_path_factory.mktemp(family) / f"tiny-{family}"
            written[key] = write_checkpoint(folder, family, **options)
        return written[key]

    return get


@pytest.fixture(scope="session")
def tiny_gdn(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Qwen3.5 layout, 2 key heads, 6 value heads, 8 x 12, two shards, byte tokenizer."""
    return tiny_checkpoint("qwen3_5", value_heads=6, shards=2, tokenizer=True)


@pytest.fixture(scope="session")
def tiny_kda(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Kimi-Linear layout, 4 heads of 8 x 8, byte tokenizer."""
    return tiny_checkpoint("kimi_linear", tokenizer=True)


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory is NaN (or 0x5A bytes) in the kernel and runtime rooms, so unwritten outputs show."""
    parts = Path(str(request.node.path)).parts
    if not any(room in parts for room in POISONED_ROOMS):
        yield
        return

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        if tensor.dtype is torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(0x5A)

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, poisoning(getattr(torch, name)))
        patch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))
        yield


@pytest.fixture
def rng_seed() -> int:
    """The seed of a test's generator; one place to change it when hunting a lucky draw."""
    return 20261130


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """No layer is announced to the dispatcher of `trajectories.recurrence` once a test has ended."""
    yield
    recurrence = sys.modules.get("hybridstate.trajectories.recurrence")
    assert recurrence is None or not recurrence._RUNNING
