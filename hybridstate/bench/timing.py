"""Samples of seconds: how they are taken and summed up; every one is kept.

On a GPU a step of microseconds is timed as the replay of a CUDA graph over several pools whose bytes exceed the L2
cache four times, so that neither launch gaps nor cached state flatter it. Elsewhere the clock surrounds each call.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Clock = Callable[[], float]

L2_MULTIPLE = 4
"""Bytes of the rotated pools, as a multiple of the L2 cache."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured seconds, in the order they were taken."""

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", tuple(float(x) for x in self.seconds))
        if not self.seconds:
            raise ValueError("a measurement needs at least one sample")

    @property
    def median(self) -> float:
        """Middle sample, in seconds."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """Linear quantile of the samples, in seconds; `share` from 0 to 1."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    def to_json(self) -> dict[str, Any]:
        """Median, 10th and 90th percentile, interquartile range, and every sample, in seconds."""
        return {
            "unit": "s",
            "count": len(self.seconds),
            "median": self.median,
            "p10": self.quantile(0.1),
            "p90": self.quantile(0.9),
            "iqr": self.quantile(0.75) - self.quantile(0.25),
            "samples": list(self.seconds),
        }


def measure(
    call: Callable[[], Any],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    repeat: int = 20,
    clock: Clock = time.perf_counter,
) -> Samples:
    """Seconds of each of `repeat` calls after `warmup` others, device work included.

    Args:
        call: what to time.
        device: synchronised before and after every call when it is a GPU.
        warmup: calls before the first sample.
        repeat: samples.
        clock: seconds; injected by tests.
    """
    settle = synchroniser(device)
    for _ in range(warmup):
        call()
    seconds = []
    for _ in range(repeat):
        settle()
        start = clock()
        call()
        settle()
        seconds.append(clock() - start)
    return Samples(seconds)


def measure_launches(
    launches: Sequence[Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    graph: bool = True,
    warmup: int = 3,
    repeat: int = 30,
    clock: Clock = time.perf_counter,
) -> Samples:
    """Seconds of one launch, averaged inside each round over all of `launches`.

    On a GPU the round is captured in a CUDA graph and timed with device events; each launch should work on its own
    pool (`rotation` says how many). On a CPU, or with `graph` off for launches that synchronise, the clock
    surrounds the round.

    Args: as `measure`.
    """

    def round_() -> None:
        for launch in launches:
            launch()

    if torch.device(device).type != "cuda" or not graph:
        samples = measure(round_, device=device, warmup=warmup, repeat=repeat, clock=clock)
        return Samples([x / len(launches) for x in samples.seconds])
    captured = capture(round_)
    for _ in range(warmup):
        captured.replay()
    seconds = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        captured.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3 / len(launches))
    return Samples(seconds)


def kernel_times(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and seconds of every device activity of one call on a GPU, in order of their start.

    The profiler runs for one cycle, whose events `acc_events` keeps; without it torch 2.11 warns that they are cleared.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if "CUDA" in str(e.device_type)]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, 1e-6 * event.time_range.elapsed_us()) for event in events]


def in_place_pass(
    nbytes: int, sets: int, *, device: torch.device | str, warmup: int, repeat: int
) -> Samples:
    """Seconds of `x += 1`, which reads and writes `nbytes` together, over `sets` places in turn."""
    memory = torch.ones(sets, -(-nbytes // 8), dtype=torch.float32, device=device)
    launches = [partial(part.add_, 1.0) for part in memory]
    return measure_launches(launches, device=device, warmup=warmup, repeat=repeat)


def capture(call: Callable[[], Any]) -> "torch.cuda.CUDAGraph":
    """A CUDA graph of `call`, run twice before so that compilation and first-use allocations are done."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def rotation(
    pool_bytes: int, device: torch.device | str, *, least: int = 2, most: int = 4096
) -> int:
    """Pools of `pool_bytes` to rotate over: above four times the L2 cache on a GPU, one elsewhere."""
    if torch.device(device).type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(torch.device(device)).L2_cache_size
    return max(least, min(most, -(-L2_MULTIPLE * cache // pool_bytes)))


def synchroniser(device: torch.device | str) -> Callable[[], None]:
    """A function that waits for the device; does nothing on a CPU."""
    if torch.device(device).type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def device_record(device: torch.device | str) -> dict[str, Any]:
    """What a time depends on: name, memory, cache and software of the device."""
    device = torch.device(device)
    if device.type != "cuda":
        return {
            "device": str(device),
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
