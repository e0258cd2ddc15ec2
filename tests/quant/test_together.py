"""One launch for all arms against each arm's own arithmetic; the kernel runs in Triton's interpreter without a GPU."""

import os
from typing import Any

import pytest
import torch

from hybridstate.quant import together
from hybridstate.quant.arms import Arm, ValueMap, plain_arm
from hybridstate.quant.formats import FORMATS
from hybridstate.quant.simulate import Storage
from hybridstate.quant.together import Together, fusible
from tests.conftest import HAS_GPU

pytest.importorskip("triton")
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is off", allow_module_level=True)

HEADS, KEYS, SEQUENCES = 2, 20, 2


def arms(value_dim: int) -> tuple[Arm, ...]:
    generator = torch.Generator().manual_seed(0)

    def channels(count: int) -> tuple[torch.Tensor, ...]:
        rows = [torch.randperm(KEYS, generator=generator)[:count] for _ in range(HEADS)]
        return (torch.stack(rows).sort(1).values,)

    scale = torch.rand(HEADS, value_dim, generator=generator) + 0.5
    order = torch.stack([torch.randperm(value_dim, generator=generator) for _ in range(HEADS)])
    values = (ValueMap(scale, order),)
    made = [plain_arm(name) for name in ("fp32", "fp16", "bf16", "int8-step", "fp8", "int4")]
    made += [plain_arm("nvfp4"), plain_arm("int8-step-stochastic")]
    made += [Arm(f"{low}+reorder", FORMATS[low], values=values) for low in ("int8-step", "int4")]
    made += [
        Arm(f"damp-{low}", FORMATS[low], channels(5), values=maps, every=every)
        for low in ("int8-step", "fp8", "int4", "nvfp4")
        for maps, every in ((None, 1), (values, 4))
    ]
    made += [Arm("none", FORMATS["int8-step"], channels(0))]
    made += [Arm("fed", FORMATS["int8-step"], feedback="fp16")]
    return tuple(arm.to(torch.device(DEVICE)) for arm in made)


def state(count: int, value_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(SEQUENCES, HEADS, KEYS, value_dim, generator=generator)
    one *= torch.logspace(-6, 3, KEYS)[None, None, :, None]
    one[0, 0, 3] = 0.0
    one[1, 1, 4] = 7.0e4  # beyond FP16, and a constant group
    one[0, 1, 5, :3] = torch.tensor([1e-41, -0.0, 3e-8])
    return one.repeat(count, 1, 1, 1).to(DEVICE)


@pytest.mark.parametrize("value_dim", [48, 128])
def test_every_arm_stores_what_it_would_alone(
    value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "usable", lambda _: True)
    made = arms(value_dim)
    both = state(len(made), value_dim)
    fused = Together(made)
    due = tuple(range(1, len(made)))
    left = fused.write(both, 0, due, 5, torch.tensor([4, 9], device=DEVICE))
    assert fused.reason is None
    assert left == tuple(place for place in due if not fusible(made[place]))
    assert [made[place].name for place in left] == ["fed"]
    blocks, before = both.chunk(len(made)), state(1, value_dim)
    for place, arm in enumerate(made):
        expected = before
        if place in due and place not in left:
            expected = arm.reconstruct(before, 0, 5, torch.tensor([4, 9], device=DEVICE))
        assert torch.equal(blocks[place], expected), arm.name


def test_arms_that_are_not_due_and_nan_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "usable", lambda _: True)
    made = arms(32)
    both = state(len(made), 32)
    fused = Together(made)
    fused.write(both, 0, (3,))
    before = state(len(made), 32)
    changed = (both != before).flatten(1).any(1).reshape(len(made), SEQUENCES).any(1)
    assert changed.nonzero()[:, 0].tolist() == [3]
    both[:, 0, 0, 0] = torch.nan
    fused.write(both, 0, tuple(range(1, len(made))))
    assert both[:, 0, 0, 0].isnan().all()


def test_storage_writes_the_same_with_and_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = ("fp32", "nvfp4", "int8-step-stochastic", "damp-int4", "fed")
    made = tuple(arm for arm in arms(32) if arm.name in kept)
    slow, fast = state(len(made), 32), state(len(made), 32)
    rows = torch.arange(SEQUENCES)
    plain = Storage(made, rows)
    for update in (-1, 1, 4):
        plain.write(slow, 0, update)
    monkeypatch.setattr(together, "usable", lambda _: True)
    fused = Storage(made, rows)
    for update in (-1, 1, 4):
        fused.write(fast, 0, update)
    assert fused.together.reason is None
    assert torch.equal(slow, fast)


def test_a_kernel_that_fails_or_disagrees_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "usable", lambda _: True)
    made = arms(32)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nat all")

    for stand_in, reason in (
        (broken, "RuntimeError: no compiler"),
        (lambda *_, **__: None, "differs"),
    ):
        monkeypatch.setattr(together, "store_in_place", stand_in)
        both, fused = state(len(made), 32), Together(made)
        assert fused.write(both, 0, (1, 2, 3)) == (1, 2, 3)
        assert fused.reason is not None
        assert reason in fused.reason
        assert torch.equal(both, state(len(made), 32))
