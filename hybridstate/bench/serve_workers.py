"""Jobs of a serving sweep on several devices: one process and one GPU each.

Either every run has a device to itself: seeds and points are independent of each other, so any number of workers finds
the same hit rates, and with one worker nothing is started and the jobs run here. Or every run has all devices, one rank
each: this process is rank 0 and hands its jobs to the others, which serve them at the same time.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch

from hybridstate.bench.serve import Bench, Subject
from hybridstate.bench.serving_points import Outcome
from hybridstate.bench.serving_setup import trace_of
from hybridstate.bench.serving_stats import statistics
from hybridstate.bench.sweep import Job, Options
from hybridstate.bench.traces import Trace, control_for, longest
from hybridstate.errors import HybridStateError, NumericError, UsageError
from hybridstate.runtime.parallel import Ranks, shard

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
    """One model, or a rank's heads of it, on one device."""

    def __init__(self, setting: Setting, device: str, ranks: Ranks | None = None) -> None:
        self.setting = setting
        self.subject = load_subject(setting, device, ranks or Ranks())
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
        self.chunk = min(BATCH_PROMPT, self.length)
        self._bench = Bench(
            self.subject,
            running=max(options.limits),
            length=self.length,
            chunk=self.chunk,
        )

    @property
    def late(self) -> bool:
        """Whether no job begins any more."""
        return self.setting.deadline is not None and time.time() > self.setting.deadline

    def __call__(self, job: Job) -> Outcome | None:
        """The outcome, None after the deadline; a run that fails says why, and the others go on."""
        if self.late:
            return None
        try:
            return self.serve(job)
        except (HybridStateError, RuntimeError) as error:
            return Outcome({}, "", error=told(error))

    def close(self) -> None:
        """Give the engines up; a process group does not end before graphs that hold its collectives."""
        self._bench.close()

    def serve(self, job: Job) -> Outcome:
        """The outcome."""
        case, options = job.case, self.setting.options
        started = time.perf_counter()
        found = self._bench.serve(
            case.arm,
            job.pools,
            self.control if case.control else self.trace,
            options.load(case.limit),
            options.admission,
            job.seed,
        )
        numbers = statistics(
            found.run,
            found.cache.counters,
            clients=options.clients,
            limit=case.limit,
            goal=options.goal,
        )
        numbers["hybridstate"]["wall_s"] = time.perf_counter() - started
        return Outcome(numbers, found.cache.digest, found.outputs, found.operations, found.engine)


def told(error: Exception) -> str:
    """An error in one line."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}"


def load_subject(setting: Setting, device: str, ranks: Ranks) -> Subject:
    """The model with its plan and selections; an exported checkpoint brings its own plan.

    Raises:
        PlanMismatch: the plan is for another model, also where no arm needs it.
    """
    from hybridstate.bench.cutoffs import selections_at
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.plan.compare import verify_against
    from hybridstate.plan.store import STATE_PLAN, read_plan
    from hybridstate.trajectories.model import load_model, torch_dtype

    checkpoint = open_checkpoint(setting.model, weights=True)
    plan = None if setting.plan is None else read_plan(setting.plan)
    if plan is None and STATE_PLAN in checkpoint.config:
        plan = read_plan(checkpoint.path)
    if plan is not None:
        verify_against(plan, checkpoint)
    loaded = load_model(setting.model, device=device, dtype=torch_dtype(setting.dtype))
    cutoffs = setting.options.cutoffs
    chosen = selections_at(loaded, cutoffs, setting.gate_input)
    selections = dict(zip(cutoffs, chosen, strict=True))
    return Subject(shard(loaded, ranks), plan, selections, ranks)


_WORKER: dict[str, Worker] = {}
"""The worker of a started process, under its one key."""


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C from their first line on; their parent ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only started processes have a parent to follow"
    sentinel = parent.sentinel

    def follow() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _begin(setting: Setting, devices: Any) -> None:
    _end_with_parent()
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the present device
    _WORKER["it"] = Worker(setting, str(device))


def _work(job: Job) -> Outcome | None:
    return _WORKER["it"](job)


class Peers:
    """The other ranks of this process, which is rank 0: one process each, on CUDA with a GPU each.

    A job that fails on any rank ends them all: the others may wait for it in the middle of a layer.

    Args:
        setting: for every rank.
    """

    def __init__(self, setting: Setting) -> None:
        self._folder = tempfile.TemporaryDirectory()
        meeting, size = Path(self._folder.name) / "meeting", setting.options.tp
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._pipes, self._processes = [], []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            given = (replace(setting, deadline=None), rank, meeting, theirs)
            process = context.Process(target=_serve_rank, args=given, daemon=True)
            with _deaf():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.device = _rank_device(setting, 0)
        try:
            for pipe in self._pipes:
                pipe.recv()  # a process that ended before would be waited for
            self.ranks = Ranks.join(0, size, self.device, meeting)
        except (RuntimeError, EOFError) as error:
            said = self._said(f"the ranks did not meet: {told(error)}")
            self._end()
            raise NumericError(said) from error

    def serve(self, here: Worker, job: Job) -> Outcome | None:
        """The outcome of a job on all ranks, None after the deadline.

        Raises:
            NumericError: a rank failed.
        """
        if here.late:
            return None
        try:
            for pipe in self._pipes:
                pipe.send(job)
            outcome = here.serve(job)
            failed = [pipe.recv() for pipe in self._pipes]
        except (HybridStateError, RuntimeError, OSError, EOFError) as error:
            raise NumericError(self._said(f"rank 0: {told(error)}")) from error
        for rank, said in enumerate(failed, 1):
            if said is not None:
                raise NumericError(f"rank {rank}: {said}")
        return outcome

    def _said(self, here: str) -> str:
        """What other ranks told of their failure, else `here`."""
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                said = pipe.recv() if pipe.poll(SAID_WITHIN) else None
            except (EOFError, OSError):
                said = "its process ended"
            if said is not None:
                return f"rank {rank}: {said}"
        return here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        """End the processes.

        Behind a failure GPUs may wait in a collective for ever, and so would the end of its process group; that is
        left to the end of this process.
        """
        for pipe in self._pipes:
            pipe.close()
        if kind is None or self.device.type != "cuda":
            self.ranks.leave()
        self._end()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(SAID_WITHIN)
            process.terminate()
        self._folder.cleanup()


SAID_WITHIN: Final = 10.0
"""Seconds that a failing or ending rank is given."""


def _rank_device(setting: Setting, rank: int) -> torch.device:
    """The device of a rank, the present one from here on."""
    if setting.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)  # kernels are launched on the present device
    return device


def _serve_rank(setting: Setting, rank: int, meeting: Path, pipe: Any) -> None:
    """The process of a rank other than 0: serve jobs until the pipe closes; None when ready and for each, else why."""
    _end_with_parent()
    device = _rank_device(setting, rank)
    pipe.send(None)
    ranks = Ranks.join(rank, setting.options.tp, device, meeting)
    try:
        worker = Worker(setting, str(device), ranks)
        while True:
            worker.serve(pipe.recv())
            pipe.send(None)
    except EOFError:
        worker.close()
    except (HybridStateError, RuntimeError) as error:
        with suppress(OSError):  # rank 0 may have failed as well
            pipe.send(told(error))
    ranks.leave()


class Workers:
    """Serves jobs on `count` devices, or on those of all ranks.

    Args:
        setting: for each worker.
        here: the worker of this process, which serves alone where `count` is 1.
        count: processes.
        peers: the other ranks, with `count` 1.
    """

    def __init__(
        self, setting: Setting, here: Worker, count: int, peers: Peers | None = None
    ) -> None:
        self._here, self._peers = here, peers
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            devices = context.SimpleQueue()
            for number in range(count):
                devices.put(f"cuda:{number}" if setting.device == "cuda" else "cpu")
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            self._pool = ProcessPoolExecutor(
                count, mp_context=context, initializer=_begin, initargs=(setting, devices)
            )
            with _deaf():
                self._pool.submit(int)  # the first call starts all processes

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order of the jobs."""
        if self._peers is not None:
            for job in jobs:
                yield self._peers.serve(self._here, job)
        elif self._pool is None:
            yield from map(self._here, jobs)
        else:
            try:
                yield from self._pool.map(_work, jobs)
            except BrokenProcessPool as error:
                raise UsageError(
                    "a worker process ended before its run: killed, or out of memory",
                    hint="run fewer --workers; --resume continues from what was written",
                ) from error

    def close(self) -> None:
        """End the processes: after their present runs, or at once where Ctrl-C is what ends them."""
        if self._pool is not None:
            if isinstance(sys.exception(), KeyboardInterrupt):
                for process in list((self._pool._processes or {}).values()):
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)
