"""Samples and how they are taken, with a clock that the tests turn."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridstate.bench.timing import (
    Samples,
    device_record,
    kernel_times,
    measure,
    measure_launches,
    rotation,
)


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_statistics_of_known_samples() -> None:
    samples = Samples([5.0, 1.0, 2.0, 4.0, 3.0])
    found = samples.to_json()
    assert (found["median"], found["p10"], found["p90"], found["iqr"]) == (3.0, 1.4, 4.6, 2.0)
    assert found["samples"] == [5.0, 1.0, 2.0, 4.0, 3.0], "order of measurement"
    assert (found["count"], found["unit"]) == (5, "s")
    assert Samples([7.0]).to_json()["p90"] == 7.0


def test_no_samples_is_not_a_measurement() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Samples([])


def test_warm_up_is_run_and_not_counted() -> None:
    clock, durations = Clock(), iter([100.0, 50.0, 1.0, 2.0, 3.0])

    def call() -> None:
        clock.now += next(durations)

    assert measure(call, warmup=2, repeat=3, clock=clock).seconds == (1.0, 2.0, 3.0)


def test_a_round_is_averaged_over_its_launches() -> None:
    clock, order = Clock(), []

    def launch(name: str) -> None:
        order.append(name)
        clock.now += 1.0 if name == "a" else 3.0

    samples = measure_launches(
        [lambda: launch("a"), lambda: launch("b")], warmup=1, repeat=2, clock=clock
    )
    assert samples.seconds == (2.0, 2.0)
    assert order == ["a", "b"] * 3


def test_a_cpu_rotates_nothing_and_says_what_it_is() -> None:
    assert rotation(10, "cpu") == 1
    assert device_record("cpu")["threads"] == torch.get_num_threads()


@pytest.mark.gpu
def test_graph_replay_times_every_launch_on_its_own_pool() -> None:
    pools = [torch.zeros(1 << 20, device="cuda") for _ in range(3)]
    samples = measure_launches(
        [lambda p=pool: p.add_(1) for pool in pools], device="cuda", warmup=2, repeat=5
    )
    torch.cuda.synchronize()
    assert [float(p[0]) for p in pools] == [9.0] * 3, "two runs before capture, seven replays"
    assert 0 < samples.median < 1e-3


@pytest.mark.gpu
def test_pools_exceed_the_cache_four_times() -> None:
    cache = device_record("cuda")["l2_bytes"]
    assert rotation(cache, "cuda") == 4
    assert rotation(100 * cache, "cuda") == 2
    assert rotation(1, "cuda") == 4096


class OneCycle:
    """A profiler of one cycle that warns as torch 2.11 does unless its events are kept."""

    def __init__(self, *, activities: list[Any], acc_events: bool = False) -> None:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        self.acc_events = acc_events

    def __enter__(self) -> "OneCycle":
        if not self.acc_events:
            warnings.warn("Profiler clears events at the end of each cycle.", stacklevel=2)
        return self

    def __exit__(self, *_: Any) -> None: ...

    def events(self) -> list[Any]:
        found = []
        for name, device, start, end in (
            ("scan_kernel", "DeviceType.CUDA", 40.0, 70.0),
            ("cudaGraphLaunch", "DeviceType.CPU", 1.0, 5.0),
            ("prepare_kernel", "DeviceType.CUDA", 10.0, 30.0),
        ):
            time = SimpleNamespace(start=start, elapsed_us=lambda took=end - start: took)
            found.append(SimpleNamespace(name=name, device_type=device, time_range=time))
        return found


def test_device_activities_are_timed_in_order_and_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = inspect.signature(torch.profiler.profile).parameters
    assert set(inspect.signature(OneCycle).parameters) <= set(real)
    monkeypatch.setattr(torch.profiler, "profile", OneCycle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[int] = []
    found = kernel_times(lambda: calls.append(1))
    assert calls == [1]
    assert found == [
        ("prepare_kernel", pytest.approx(20e-6)),
        ("scan_kernel", pytest.approx(30e-6)),
    ]


@pytest.mark.gpu
def test_kernels_of_one_call_are_seen_on_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(2):  # a warning that comes once would come at the first
        found = kernel_times(lambda: x.add_(1.0))
        took = [seconds for name, seconds in found if "elementwise" in name]
        assert len(took) == 1
        assert took[0] > 0
