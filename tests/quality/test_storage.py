"""Every family that transformers runs: exported equals original in float32, BF16 and in the packed pool."""

from pathlib import Path

import pytest
import torch

from hybridstate.errors import NumericError
from hybridstate.quality import storage
from hybridstate.quality.verify import MAX_RELATIVE_ERROR, verify
from tests.quality.verified import EVERYTHING, RELEASED, SAVED, verified
from tests.tolerances import BF16_ERROR_RATIO


def test_bound_is_the_one_of_the_tolerance_table() -> None:
    assert storage.BF16_ERROR_RATIO == BF16_ERROR_RATIO


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RELEASED, *SAVED])
def test_exported_model_equals_the_original(name: str, tmp_path: Path) -> None:
    found = verified(name, tmp_path, **EVERYTHING)
    if found is None:
        pytest.skip("this transformers has no such class")
    assert found.logit_error <= MAX_RELATIVE_ERROR
    assert found.state_error <= MAX_RELATIVE_ERROR
    assert found.bf16 is not None
    assert found.bf16.original_error > 1e-3  # it really ran in BF16
    assert found.bf16.ratio <= BF16_ERROR_RATIO
    assert found.packed is not None
    assert found.packed.recurrence_error <= storage.RECURRENCE_ERROR
    assert found.packed.scaled
    assert found.packed.logit_error <= (1 + storage.SCALED_RATIO) * found.packed.storage_error
    assert found.packed.storage_error < 1e-2  # FP16 rounding of each step: up to 7.0e-3 here
    assert found.packed.differing == 0
    assert found.to_json()["bf16"]["ratio"] == found.bf16.ratio


def test_a_packed_pool_in_the_wrong_order_is_caught(
    tmp_path: Path, tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is told that the exported weights still need the plan's gather."""
    from hybridstate import api
    from hybridstate.runtime import orders
    from tests.plan.calibrated import write_calibration

    calibration = write_calibration(tmp_path / "cal", tiny_kda)
    api.export_plan(tiny_kda, out=tmp_path / "out", calibration=calibration)
    right = orders._stored_order

    def half(plan, layer, _order, *rest):  # type: ignore[no-untyped-def]
        return right(plan, layer, "original", *rest)

    # q, k and decays are gathered, the prefilled states are not
    monkeypatch.setattr(orders.StoredOrder, "states", lambda _order, state: state)
    monkeypatch.setattr(orders, "_stored_order", half)
    with pytest.raises(NumericError, match="in stored coordinates the exported model differs"):
        verify(tiny_kda, tmp_path / "out", prompts=1, prompt_tokens=24, new_tokens=4, bf16=False)


def test_divergence_names_the_earliest_step_and_its_margin() -> None:
    original = torch.zeros(2, 3, 4)
    original[..., 1] = 1.0
    exported = original.clone()
    exported[1, 1, 2], exported[0, 2, 3] = 2.0, 2.0
    count, first = storage._divergence(original, exported, original)
    assert count == 2
    assert first == storage.Divergence(prompt=1, step=1, original=1, exported=2, margin=1.0)
    assert storage._divergence(original, original, original) == (0, None)


def test_bf16_that_is_further_away_than_allowed_is_refused(
    tiny_kda: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = torch.ones(1, 6, 97)
    runs = [reference * 1.01, reference * 1.02]
    monkeypatch.setattr(storage, "_logits", lambda *_: runs.pop(0))
    with pytest.raises(NumericError, match=r"2\.000 times, at most 1\.05"):
        storage.compare_bf16(
            tiny_kda, tiny_kda, "cpu", torch.zeros(1, 4).long(), torch.zeros(1, 2).long(), reference,
            report=lambda *_: None,
        )  # fmt: skip
