"""Calls of the tensor store as steps that can be captured: nothing between host and device inside, no number built in.

A GPU is not needed: kernels run under Triton's interpreter, and the rules of a capture are those that torch's own
operations are checked against here.
"""

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridstate.errors import NumericError
from hybridstate.families import ModelSpec
from hybridstate.kernels import (
    pack,
    pack_triton,
    packed_rows,
    packed_rows_triton,
    transfer,
    transfer_triton,
)
from hybridstate.runtime import compressed
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.tensor_store import CAPTURED, SlotCall, TensorStore
from hybridstate.runtime.tiers import Prefix
from hybridstate.trajectories import graphs
from hybridstate.trajectories.model import load_model
from tests.runtime.capture_rules import Rules

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off: a GPU is here"
)
KINDS: dict[str, dict[str, Any]] = {
    "fp32 rows": {},
    "fp32 columns": {"dense_order": "columns"},
    "int8 columns": {"dense_order": "columns"},
    "int8 rows": {},
    "packed": {"state": "damp", "k_hi": 4},
    "packed codes": {"state": "damp", "k_hi": 0},
    "packed halves": {"state": "damp", "k_hi": 8},
}


def refused(*_given: Any, **_options: Any) -> None:
    raise AssertionError("a step reads or brings numbers")


@pytest.fixture(scope="module", params=["qwen3_5", "kimi_linear"])
def spec(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> ModelSpec:
    return load_model(str(tiny_checkpoint(request.param))).spec


@pytest.fixture
def small(spec: ModelSpec) -> ModelSpec:
    """Two layers."""
    return replace(spec, layers=spec.layers[:2])


def filled(spec: ModelSpec, kind: str, window: int = 0) -> TensorStore:
    """Five native and four compressed slots; native ones 1 and 2 hold random states, the others are poisoned."""
    pool = StatePool(spec, 5, conv_dtype=torch.float32, **KINDS[kind])
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    pool.write(
        torch.tensor([1, 2]),
        [draw(2, n.value_heads, n.key_dim, n.value_dim) for n in spec.layers],
        [draw(2, n.conv_channels, n.conv_width - 1) for n in spec.layers],
    )
    fresh = [draw(1, n.value_heads, n.key_dim, n.value_dim) for n in spec.layers]
    masks = [draw(n.value_heads, n.key_dim) > 0 for n in spec.layers]

    def replay(prefix: Prefix, _window: int) -> list[torch.Tensor]:
        """Other values and addresses for every length."""
        return [state * len(prefix.tokens) for state in fresh]

    options: dict[str, Any] = {"window": window, "replay": replay}
    return TensorStore(pool, 3, masks, kind=kind.split()[0], **options)  # type: ignore[arg-type]


def run(store: TensorStore) -> list[Any]:
    """Every call on several slots, and what was left behind."""
    found: list[Any] = []
    store.copy(1, 3)
    store.copy(2, 4)
    store.pack(3, 2, aside=True)
    store.freed(1, packed=False)
    store.pack(4, 1, aside=False)
    store.pack(2, 3, aside=False)
    found += [store.finite(slot) for slot in (1, 2, 3)]
    for source, target in ((1, 3), (2, 1), (3, 4)):
        store.load(source, target, Prefix(np.zeros(9, np.int32), []))
        found.append(store.finite(target))
    store.freed(3, packed=True)
    store.load(3, 2, Prefix(np.zeros(9, np.int32), []))
    found.append(store.finite(2))
    return [*found, *(x.clone().view(torch.uint8) for x in store.pool.tensors)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: bool(x.sum()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor(2.0),
    ],
)
def test_the_rules_see_what_no_capture_allows(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3)
    with Rules(), pytest.raises(AssertionError, match=r"cannot be captured|a mask is a wait"):
        call(x)


@interpreted
@pytest.mark.parametrize("window", [0, 4], ids=["zeros", "replayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_keep_the_rules_of_a_capture_and_every_bit(
    small: ModelSpec, kind: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels and torch's operations around them, beside the reference of each."""
    expected = run(filled(small, kind, window))
    store = filled(small, kind, window)
    with monkeypatch.context() as patch:
        for module in (transfer, pack, packed_rows):
            patch.setattr(module, "use_triton", lambda _tensor, _backend: True)
        for call in store._calls.values():
            replay = call._replay
            step = replay._step

            def ruled(phase: Any, step: Callable[[Any], None] = step) -> None:
                with Rules(), monkeypatch.context() as inside:
                    inside.setattr(torch.Tensor, "tolist", refused)
                    inside.setattr(torch, "tensor", refused)
                    step(phase)

            replay._step = ruled
        found = run(store)
    answers = sum(isinstance(x, bool) for x in expected)
    assert found[:answers] == expected[:answers] == [False, True, True, True, True, True, False]
    for ours, theirs in zip(found[answers:], expected[answers:], strict=True):
        assert torch.equal(ours, theirs)


class Tape(TorchDispatchMode):
    """What a capture would record, played again on the tensors it was recorded on."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self.recording = True
        self.fresh = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if self.recording:
            self.entries.append((func, args, kwargs or {}, found))
        return found

    def launch(self, run: Callable[[], None]) -> None:
        """A kernel; what its interpreter does is not part of the tape."""
        self.recording = False
        run()
        self.recording = True
        self.entries.append((run, (), {}, None))

    def replay(self) -> None:
        """Recording ran it once already."""
        if self.fresh:
            self.fresh = False
            return
        for func, args, kwargs, found in self.entries:
            again = func(*args, **kwargs)
            pairs = zip(found, again, strict=True) if isinstance(found, list) else [(found, again)]
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Taped(graphs.Replay):
    """A tape where a GPU has a graph."""

    tapes: ClassVar[list[Tape]] = []
    """The one that is recorded."""

    def __init__(self, step: Callable[[Any], None], device: torch.device) -> None:
        super().__init__(step, device)
        self.reason = None

    def _capture(self, phase: Any) -> Any:
        tape = Tape()
        self.tapes.append(tape)
        with tape:
            self._step(phase)
        self.tapes.pop()
        self._graphs[phase] = tape
        self.mode = "tape"
        return tape


class Launched:
    """A kernel whose launches are recorded."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            def run() -> None:
                self.kernel[grid](*args, **options)

            if Taped.tapes:
                Taped.tapes[-1].launch(run)
            else:
                run()

        return launch


def random_calls(store: TensorStore, calls: int) -> list[Any]:
    """On random slots; what `finite` answered, and what every slot that is used holds after each."""
    rng = np.random.Generator(np.random.PCG64(8))
    found: list[Any] = []
    for packed in (1, 2, 3):
        store.pack(1, packed, aside=True)
    for _ in range(calls):
        what = ("copy", "pack", "aside", "load", "load", "finite", "freed")[rng.integers(7)]
        source, target = (int(n) + 1 for n in rng.permutation(4)[:2])
        packed = int(rng.integers(3)) + 1
        if what == "copy":
            store.copy(source, target)
        elif what in ("pack", "aside"):
            store.pack(source, packed, aside=what == "aside")
        elif what == "load":
            store.load(packed, target, Prefix(np.zeros(5 + packed, np.int32), []))
        elif what == "finite":
            found.append(store.finite(source))
        else:
            store.freed(target, packed=False)
        found += [x[1:].clone().view(torch.uint8) for x in (*store.pool.tensors, *store._conv)]
    return found


@interpreted
@pytest.mark.parametrize("window", [0, 4], ids=["zeros", "replayed"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_on_other_slots_leave_what_they_would(
    small: ModelSpec, kind: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations and launches of one call, played for later ones: whatever is built in would come again."""
    expected = random_calls(filled(small, kind, window), 40)
    for module in (transfer, pack, packed_rows):
        monkeypatch.setattr(module, "use_triton", lambda _tensor, _backend: True)
    for module in (transfer_triton, pack_triton, packed_rows_triton):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launched(getattr(module, name)))
    monkeypatch.setattr(graphs, "Replay", Taped)
    monkeypatch.setattr(compressed, "Replay", Taped)
    store = filled(small, kind, window)
    found = random_calls(store, 40)
    assert all(
        call["mode"] == "tape" for name, call in store.to_json().items() if name != "pack aside"
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs if isinstance(ours, bool) else torch.equal(ours, theirs)


def test_a_step_gets_its_numbers_in_the_same_tensors_every_time() -> None:
    seen: list[tuple[int, int, list[int], bool]] = []

    def step(source: torch.Tensor, target: torch.Tensor, refilled: bool) -> None:
        values = [*source.tolist(), *target.tolist()]
        seen.append((source.data_ptr(), target.data_ptr(), values, refilled))

    call = SlotCall(step, torch.device("cpu"))
    for source in range(40):
        call(source, 1000 * source)
    call.name(7, 7)
    call.run(refilled=True)
    assert len({(source, target) for source, target, _, _ in seen}) == 1
    assert [values for _, _, values, _ in seen[:-1]] == [[n, 1000 * n] for n in range(40)]
    assert seen[-1][2:] == ([7, 7], True)
    assert call.to_json() == {"mode": "eager", "reason": "no GPU", "graphs": 0}


def test_a_replay_that_is_not_finite_is_not_packed(small: ModelSpec) -> None:
    """Numbers whose magnitudes overflow in a sum are."""
    store = filled(small, "packed", window=4)
    prefix = Prefix(np.zeros(4, np.int32), [])
    store.pack(1, 1, aside=False)
    states = [torch.zeros_like(x) for x in store._replay(prefix, 4)]  # type: ignore[misc]
    store._replay = lambda _prefix, _window: states
    states[1][0, 0, 0] = 3e38
    store.load(1, 3, prefix)
    assert store.finite(3)
    before = [x.clone() for x in store.pool.states]
    states[1][0, 0, 0, 1] = float("nan")
    with pytest.raises(NumericError, match="not finite"):
        store.load(1, 3, prefix)
    assert all(map(torch.equal, before, store.pool.states))


def test_packed_slots_are_as_large_as_what_they_keep(small: ModelSpec) -> None:
    store = filled(small, "packed")
    rows = store.checkpoints
    assert isinstance(rows, compressed.PackedRows)
    held = sum(
        x.numel() * x.element_size() for parts in rows._split(rows._buffer[0]) for x in parts
    )
    assert held == rows.slot_bytes <= rows._buffer.shape[1] < rows.slot_bytes + 16


def test_a_store_says_how_its_calls_ran_and_dies_with_its_last_user(small: ModelSpec) -> None:
    """Slots of gigabytes must not wait for a collection of cycles."""
    store = filled(small, "fp32 rows")
    run(store)
    assert set(store.to_json()) == set(CAPTURED)
    assert all(x["mode"] == "eager" and x["reason"] == "no GPU" for x in store.to_json().values())
    gone = weakref.ref(store.checkpoints)
    gc.disable()
    try:
        del store
        assert gone() is None
    finally:
        gc.enable()
