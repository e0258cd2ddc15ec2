"""Jobs of a serving sweep on several devices: one process and one GPU each, every run with a device to itself.

Seeds and points are independent of each other, so any number of workers finds the same hit rates. With one worker
nothing is started and the jobs run here.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hybridstate.bench.serve import Bench, Subject
from hybridstate.bench.serving_setup import trace_of
from hybridstate.bench.serving_stats import statistics
from hybridstate.bench.sweep import Job, Options, Outcome
from hybridstate.bench.traces import Trace, control_for, longest
from hybridstate.errors import HybridStateError

BATCH_PROMPT: Final = 8_192
"""Prompt tokens of one prefill call at most; longer prompts run in several."""


@dataclass(frozen=True)
class Setting:
    """What a worker has to know to serve; everything can be sent to another process.

    Attributes:
        model, plan, dtype: what is loaded.
        gate_input: that selects units.
        device: `cpu` or `cuda`.
        trace, trace_file, conversations, scale: what is served.
        options: of the sweep.
        deadline: seconds of `time.time` after which no job begins, None for never.
    """

    model: str
    plan: str | None
    dtype: str
    gate_input: float | None
    device: str
    trace: str
    trace_file: Path | None
    conversations: int
    scale: float
    options: Options
    deadline: float | None = None


class Worker:
    """One model on one device."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting = setting
        self.subject = load_subject(setting, device)
        loaded = self.subject.loaded
        encode = loaded.encode if loaded.tokenizer is not None else None
        self.trace: Trace = trace_of(
            setting.trace,
            setting.trace_file,
            setting.conversations,
            scale=setting.scale,
            encode=encode,
            vocabulary=min(256, loaded.vocabulary),
        )
        options = setting.options
        words = {} if encode is None else {"encode": encode}
        self.control: Trace = control_for(options.clients, setting.scale, **words)
        self.length = max(longest(self.trace), longest(self.control) if options.control else 0)
        self._bench = Bench(
            self.subject,
            running=max(options.limits),
            length=self.length,
            chunk=min(BATCH_PROMPT, self.length),
        )

    def __call__(self, job: Job) -> Outcome | None:
        """The outcome, None after the deadline; a run that fails says why, and the others go on."""
        setting, case, options = self.setting, job.case, self.setting.options
        if setting.deadline is not None and time.time() > setting.deadline:
            return None
        try:
            run, cache, operations, engine = self._bench.serve(
                case.arm,
                job.pools,
                self.control if case.control else self.trace,
                options.load(case.limit),
                options.admission,
                job.seed,
            )
        except (HybridStateError, RuntimeError) as error:
            first = str(error).splitlines()[0] if str(error) else ""
            return Outcome({}, "", error=f"{type(error).__name__}: {first}")
        found = statistics(
            run, cache.counters, clients=options.clients, limit=case.limit, goal=options.goal
        )
        return Outcome(found, cache.digest, operations, engine)


def load_subject(setting: Setting, device: str) -> Subject:
    """The model with its plan and selections; an exported checkpoint brings its own plan."""
    from hybridstate.bench.cutoffs import selections_at
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.store import STATE_PLAN, read_plan
    from hybridstate.trajectories.model import load_model, torch_dtype

    checkpoint = open_checkpoint(setting.model, weights=True)
    plan = None if setting.plan is None else read_plan(setting.plan)
    if plan is None and STATE_PLAN in checkpoint.config:
        plan = read_plan(checkpoint.path)
    loaded = load_model(setting.model, device=device, dtype=torch_dtype(setting.dtype))
    cutoffs = setting.options.cutoffs
    chosen = selections_at(loaded, cutoffs, setting.gate_input)
    return Subject(loaded, plan, dict(zip(cutoffs, chosen, strict=True)))


_WORKER: dict[str, Worker] = {}
"""The worker of a started process, under its one key."""


def _begin(setting: Setting, devices: Any) -> None:
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the present device
    _WORKER["it"] = Worker(setting, str(device))


def _work(job: Job) -> Outcome | None:
    return _WORKER["it"](job)


class Workers:
    """Serves jobs on `count` devices.

    Args:
        setting: for each worker.
        here: the worker of this process, which serves alone where `count` is 1.
        count: processes.
    """

    def __init__(self, setting: Setting, here: Worker, count: int) -> None:
        self._here = here
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            devices = context.Manager().Queue()
            for number in range(count):
                devices.put(f"cuda:{number}" if setting.device == "cuda" else "cpu")
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._pool = ProcessPoolExecutor(
                count, mp_context=context, initializer=_begin, initargs=(setting, devices)
            )

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order of the jobs."""
        if self._pool is None:
            yield from map(self._here, jobs)
        else:
            yield from self._pool.map(_work, jobs)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
