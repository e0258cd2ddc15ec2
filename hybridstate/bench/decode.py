"""`bench decode`: time per output token with the recurrent state in the package's pool, dense or packed.

A batch of prose windows is prefilled, its states move into the pool, and the model decodes greedily. Before any time is
taken each format is checked (`decode_check`), and every run that is timed is checked again at its own batch size over
its first tokens: the captured step that is timed is the one that was compared. Between any two steps only the pool
may hold states. On a CPU the reference recurrence runs; those times say nothing about the kernels and are labelled
`reference`.

Of a packed state that is written at every L-th update a check covers more than L tokens, and a sample is the mean over
L consecutive steps: one of them writes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from hybridstate.bench.decode_check import check_state, checked_run
from hybridstate.bench.serving_setup import check_context
from hybridstate.bench.timing import Samples, device_record, synchroniser
from hybridstate.errors import UsageError
from hybridstate.kernels.ring_reference import LONGEST
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import STATE_PLAN, Plan
from hybridstate.quality.arms import cached_prefix
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.runtime.orders import planned_interval, stored_orders
from hybridstate.runtime.pool import STATE_FORMATS
from hybridstate.runtime.restore import Prefix
from hybridstate.runtime.step import StepModules
from hybridstate.trajectories.graphs import uses_fixed
from hybridstate.trajectories.model import LoadedModel

CHECK_TOKENS: Final = 16
CHECK_SEQUENCES: Final = 2
TIMED_CHECK_TOKENS: Final = 4
PREFILL_ROWS: Final = 32
CPU_BATCHES: Final = (1, 8)
GPU_BATCHES: Final = (1, 4, 16, 64, 256)

Progress = Callable[[str, int, int], None]
Format = tuple[str, int]
"""A state format and the updates between two writes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        states: formats to compare, in order.
        batches: batch sizes; `on` fills in what suits the device.
        input_tokens: prefilled tokens of every sequence.
        output_tokens: decoded and timed tokens.
        warmup: decoded and not timed before them.
        requantise_every: intervals at which `damp` is written that are also compared.
        k_hi: protected channels of `damp` without a plan.
        graph: capture the step in a CUDA graph where there is a GPU.
    """

    states: tuple[str, ...] = ("fp32", "damp")
    batches: tuple[int, ...] = ()
    input_tokens: int = 256
    output_tokens: int = 64
    warmup: int = 3
    requantise_every: tuple[int, ...] = ()
    k_hi: int | None = None
    graph: bool = True

    def given(self, states: Sequence[str] | None, batches: Sequence[int] | None) -> "Options":
        """The same with the lists that were given."""
        return replace(self, states=tuple(states or self.states), batches=tuple(batches or ()))

    def on(self, device: str) -> "Options":
        """The same with batch sizes for the device where none are given."""
        return replace(
            self, batches=self.batches or (GPU_BATCHES if device == "cuda" else CPU_BATCHES)
        )

    def formats(self, planned: int = 1) -> tuple[Format, ...]:
        """What is compared, `damp` at the plan's interval and at those of the options.

        Raises:
            UsageError: too few tokens for an interval.
        """
        found = [(state, planned if state == "damp" else 1) for state in self.states]
        found += [("damp", every) for every in self.requantise_every]
        longest = max(every for _, every in found)
        if self.output_tokens < longest:
            raise UsageError(
                f"{self.output_tokens} output tokens are fewer than the {longest} updates between two writes"
            )
        return tuple(dict.fromkeys(found))

    def check(self) -> None:
        """Refuse what cannot run.

        Raises:
            UsageError: naming the option.
        """
        unknown = [state for state in self.states if state not in STATE_FORMATS]
        if unknown or not self.states or len(set(self.states)) != len(self.states):
            raise UsageError(
                f"--state {unknown[0]} is not a format"
                if unknown
                else "--state given twice or not at all",
                hint=f"choose from {', '.join(STATE_FORMATS)}",
            )
        if min((*self.batches, self.output_tokens, self.input_tokens)) < 1 or self.warmup < 0:
            raise UsageError("batch sizes and token counts must be positive")
        wrong = [every for every in self.requantise_every if not 1 <= every <= LONGEST]
        if wrong:
            raise UsageError(f"--requantise-every {wrong[0]}: 1 to {LONGEST}")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Everything measured, as JSON-able values."""

    result: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return self.result


def run_decode(
    loaded: LoadedModel,
    options: Options,
    prose: str,
    *,
    plan: Plan | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """Check every format, then time every format at every batch size.

    Raises:
        NumericError: a check failed; nothing is reported then.
        PlanMismatch: the plan is for another model.
    """
    options.check()
    report: Progress = progress or (lambda _stage, _done, _total: None)
    formats = options.formats(planned_interval(plan))
    checked = max(_checked(every, CHECK_TOKENS) for _, every in formats)
    count = max((*options.batches, CHECK_SEQUENCES))
    whole = options.input_tokens + checked + options.warmup + options.output_tokens
    check_context(loaded.checkpoint.config, whole, "--input-tokens and --output-tokens")
    tokens = windows(loaded, prose, options.input_tokens + checked, count)
    checks = []
    modules = StepModules(loaded) if uses_fixed(loaded) else None
    first = tokens[:CHECK_SEQUENCES]
    prefix = cached_prefix(loaded, first[:, : options.input_tokens], rows=PREFILL_ROWS)
    forced = first[:, options.input_tokens :]
    asked = None if options.graph else "not asked for"
    for number, form in enumerate(formats):
        engine = _engine(loaded, form, CHECK_SEQUENCES, plan, options, modules)
        shown = forced[:, : _checked(form[1], CHECK_TOKENS)]
        checks.append(check_state(engine, prefix, shown, eager_because=asked))
        report("checks", number + 1, len(formats))
    rows, total = [], len(options.batches) * len(formats)
    for batch in options.batches:
        prefix = cached_prefix(loaded, tokens[:batch, : options.input_tokens], rows=PREFILL_ROWS)
        forced = tokens[:batch, options.input_tokens :]
        for form, check in zip(formats, checks, strict=True):
            engine = _engine(loaded, form, batch, plan, options, modules)
            shown = forced[:, : _checked(form[1], TIMED_CHECK_TOKENS)]
            rows.append(_timed(engine, prefix, shown, options, check["eager_because"]))
            report("decoding", len(rows), total)
    return Decoded(
        {
            "model": loaded.checkpoint.name,
            "checkpoint": _ran(loaded, plan),
            "device": device_record(loaded.device),
            "protocol": {
                "device": str(loaded.device),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "input_tokens": options.input_tokens,
                "output_tokens": options.output_tokens,
                "checked_tokens": TIMED_CHECK_TOKENS,
                "warmup_tokens": options.warmup,
                "plan_digest": plan.digest if plan is not None else None,
                "key_order": _key_order(loaded, plan, ringed=any(n > 1 for _, n in formats)),
            },
            "checks": checks,
            "rows": rows,
            "speedups": _speedups(rows),
        }
    )


def _engine(
    loaded: LoadedModel,
    form: Format,
    slots: int,
    plan: Plan | None,
    options: Options,
    modules: StepModules | None,
) -> DecodeEngine:
    state, every = form
    return DecodeEngine(
        loaded,
        state=state,
        slots=slots,
        plan=plan if state == "damp" else None,
        k_hi=options.k_hi,
        requantise_every=every,
        modules=modules,
    )


def _checked(every: int, tokens: int) -> int:
    """Tokens of a check: `tokens`, or some after the first write of an interval."""
    return tokens if every == 1 else max(tokens, every + 2)


def _ran(loaded: LoadedModel, plan: Plan | None) -> str:
    """Which checkpoint ran: `as given`, or the `original` or `exported` one of a plan, also without `--plan`."""
    if STATE_PLAN in loaded.checkpoint.config:
        return f"exported, folder {loaded.checkpoint.path.name}"
    return "as given" if plan is None else verify_against(plan, loaded.checkpoint)


def _key_order(loaded: LoadedModel, plan: Plan | None, *, ringed: bool) -> str:
    """Where the packed state's channel order comes from; `ringed`: some states have a ring."""
    if plan is None:
        return "first channels protected"
    if any(order.key is not None for order in stored_orders(plan, loaded)[0]):
        return "plan, gathered by the kernel" + (", before it where there is a ring" * ringed)
    exported = verify_against(plan, loaded.checkpoint) == "exported"
    return "exported weights" if exported else "plan, which moves nothing"


def windows(loaded: LoadedModel, prose: str, length: int, count: int) -> torch.Tensor:
    """Prose windows int64 `[count, length]`, spread evenly; they overlap if need be."""
    ids = loaded.encode(prose)
    if len(ids) < length + count:
        raise UsageError(f"the held-out prose has {len(ids)} tokens, {length + count} are needed")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts])


# -- time ---------------------------------------------------------------------------------------


def _timed(
    engine: DecodeEngine,
    prefix: Prefix,
    forced: torch.Tensor,
    options: Options,
    eager_because: str | None,
) -> dict[str, Any]:
    """Check a run on the forced tokens, then time the same run."""
    room = options.warmup + options.output_tokens
    checked = checked_run(engine, prefix, forced, room=room, eager_because=eager_because)
    run, pool, batch = checked.run, engine.pool, prefix.batch
    samples = step_samples(run, forced[:, -1].to(prefix.tokens.device), options)
    moved = batch * pool.step_bytes
    calls = max(engine.update_calls)
    per_channel = engine.loaded.spec.unit == "channel"
    row = {
        "state": engine.label,
        "requantise_every": pool.every,
        "batch": batch,
        "backend": engine.backend,
        "mode": run.mode,
        "eager_because": checked.eager_because,
        "check": checked.to_json(),
        "layout_id": pool.layouts[0].layout_id,
        "update_calls_per_layer_per_step": calls,
        "kernel_launches_per_layer_per_step": 0 if engine.backend == "reference" else calls,
        "torch_gathers_per_layer_per_step": max(
            order.gathers(per_channel=per_channel) for order in engine.orders
        ),
        "state_bytes_per_request": pool.slot_bytes,
        "temporal_bytes_per_request": pool.temporal_bytes,
        "ring_bytes_per_request": pool.ring_bytes,
        "pool_bytes": pool.nbytes,
        "pool_bytes_between_steps": pool.held_bytes,
        "steps_with_pool_checked": forced.shape[1] + room,
        "state_bytes_moved_per_step": moved,
        "whole_step_state_gb_per_s": moved / samples.median / 1e9,
        "tpot_s": samples.to_json(),
    }
    run.close()
    return row


def step_samples(
    run: DecodeRun,
    token: torch.Tensor,
    options: Options,
    after: Callable[[], None] | None = None,
) -> Samples:
    """Wall time of a step, greedy tokens, the device synchronised around each: of every timed step, or with a ring of L
    updates the mean of every L.

    After each step, outside the clock, only the pool may hold states; `after` is called after every timed one.
    """
    settle = synchroniser(run.engine.loaded.device)
    seconds = []
    for number in range(options.warmup + options.output_tokens):
        settle()
        start = time.perf_counter()
        token = run.step(token).argmax(-1)
        settle()
        if number >= options.warmup:
            seconds.append(time.perf_counter() - start)
            if after is not None:
                after()
        run.check_bytes()
    every = run.engine.pool.every
    starts = range(0, len(seconds) - every + 1, every)
    return Samples([sum(seconds[n : n + every]) / every for n in starts])


def _speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median TPOT of FP32 over each other format at the same batch."""
    base = {r["batch"]: r["tpot_s"]["median"] for r in rows if r["state"] == "fp32"}
    return [
        {
            "batch": r["batch"],
            "state": r["state"],
            "fp32_over_this": base[r["batch"]] / r["tpot_s"]["median"],
        }
        for r in rows
        if r["state"] != "fp32" and r["batch"] in base
    ]
