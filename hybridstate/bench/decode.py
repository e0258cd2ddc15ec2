"""`bench decode`: time per output token with the recurrent state in our pool, dense or packed.

A batch of prose windows is prefilled, its states move into the pool, and the model decodes greedily. Before any time is
taken each format is checked on teacher-forced tokens: `fp32` against plain transformers, the others against plain
transformers whose FP32 states are rounded to the format after every step, in logical order and without our packer.
On a CPU the reference recurrence runs; those times say nothing about the kernels and are labelled `reference`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from hybridstate.bench.timing import Samples, device_record, synchroniser
from hybridstate.errors import NumericError, UsageError
from hybridstate.kernels import update
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import dequantise_groups, quantise_groups, recurrent_step
from hybridstate.plan.store import Plan
from hybridstate.quality.arms import cached_prefix
from hybridstate.runtime.engine import DecodeEngine, DecodeRun, StoredOrder
from hybridstate.runtime.pool import STATE_FORMATS
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.trajectories.cache import decode, recurrent_states
from hybridstate.trajectories.model import LoadedModel, swap

CHECK_TOKENS: Final = 16
CHECK_SEQUENCES: Final = 2
PREFILL_ROWS: Final = 32
CPU_BATCHES: Final = (1, 8)
GPU_BATCHES: Final = (1, 4, 16, 64, 256)

LOGIT_LIMIT: Final = {
    ("fp32", torch.float32): 1e-5,
    ("fp16", torch.float32): 1e-3,
    ("bf16", torch.float32): 1e-3,
    ("damp", torch.float32): 1e-3,
}
"""Largest relative RMS of logits against the check's reference. Rounding flips of a 16-bit or INT8 state feed back;
a wrong channel order or a stale slot is above 1e-1."""
LOGIT_LIMIT_LOW: Final = 5e-2
"""The same where the model itself runs in 16 bits."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Attributes:
        states: formats to compare, in order.
        batches: batch sizes; `on` fills in what suits the device.
        input_tokens: prefilled tokens of every sequence.
        output_tokens: decoded and timed tokens.
        warmup: decoded and not timed before them.
        k_hi: protected channels of `damp` without a plan.
        graph: capture the step in a CUDA graph where there is a GPU.
    """

    states: tuple[str, ...] = ("fp32", "damp")
    batches: tuple[int, ...] = ()
    input_tokens: int = 256
    output_tokens: int = 64
    warmup: int = 3
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
    tokens = _windows(loaded, prose, options)
    checks = []
    for number, state in enumerate(options.states):
        checks.append(check_state(loaded, state, _plan_for(state, plan), tokens, options))
        report("checks", number + 1, len(options.states))
    rows, total = [], len(options.batches) * len(options.states)
    captured = {check["state"]: check["mode"] == "cuda-graph" for check in checks}
    for batch in options.batches:
        context = tokens[:batch, : options.input_tokens]
        prefix = cached_prefix(loaded, context, rows=PREFILL_ROWS)
        for state in options.states:
            chosen = replace(options, graph=captured[state])
            rows.append(_timed(loaded, state, _plan_for(state, plan), prefix, chosen))
            report("decoding", len(rows), total)
    return Decoded(
        {
            "model": loaded.checkpoint.name,
            "device": device_record(loaded.device),
            "protocol": {
                "device": str(loaded.device),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "input_tokens": options.input_tokens,
                "output_tokens": options.output_tokens,
                "warmup_tokens": options.warmup,
                "plan_digest": plan.digest if plan is not None else None,
                "key_order": "plan" if plan is not None else "first channels protected",
            },
            "checks": checks,
            "rows": rows,
            "speedups": _speedups(rows),
        }
    )


def _plan_for(state: str, plan: Plan | None) -> Plan | None:
    return plan if state == "damp" else None


def _windows(loaded: LoadedModel, prose: str, options: Options) -> torch.Tensor:
    """Prose windows int64 `[largest batch, input + check]`, spread evenly; they overlap if need be."""
    length = options.input_tokens + CHECK_TOKENS
    count = max((*options.batches, CHECK_SEQUENCES))
    ids = loaded.encode(prose)
    if len(ids) < length + count:
        raise UsageError(f"the held-out prose has {len(ids)} tokens, {length + count} are needed")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.tensor([ids[start : start + length] for start in starts])


# -- correctness --------------------------------------------------------------------------------


def check_state(
    loaded: LoadedModel, state: str, plan: Plan | None, tokens: torch.Tensor, options: Options
) -> dict[str, Any]:
    """Teacher-forced logits of the engine against an independent simulation of the format.

    Raises:
        NumericError: the logits differ by more than rounding.
    """
    tokens = tokens[:CHECK_SEQUENCES]
    context, forced = tokens[:, : options.input_tokens], tokens[:, options.input_tokens :]
    prefix = cached_prefix(loaded, context, rows=len(tokens))
    engine = DecodeEngine(loaded, state=state, slots=len(tokens), plan=plan, k_hi=options.k_hi)
    expected = simulated_logits(loaded, engine, prefix, forced)
    plain = simulated_logits(loaded, None, prefix, forced)
    limit = LOGIT_LIMIT.get((state, loaded.dtype), LOGIT_LIMIT_LOW)
    found, mode, eager_because = _forced_logits(engine, prefix, forced, graph=options.graph)
    error = _relative(found, expected)
    if mode != "eager" and not error <= limit:
        # a step that cannot be replayed is timed without a graph; the kernel itself is judged below
        eager_because = f"captured steps are {error:.1e} from the simulated run"
        found, mode, _ = _forced_logits(engine, prefix, forced, graph=False)
        error = _relative(found, expected)
    if not error <= limit:
        raise NumericError(
            f"{state} on {engine.backend} ({mode}): logits are {error:.2e} away from the simulated run, "
            f"at most {limit:.0e}; nothing is reported",
            hint="this is a defect of the kernel, the plan's order or the engine",
            state=state,
            found=error,
            expected=limit,
        )
    return {
        "state": state,
        "backend": engine.backend,
        "backend_reason": update.backend_reason(loaded.device, engine.pool.layouts[0]),
        "mode": mode,
        "eager_because": eager_because,
        "logit_error": error,
        "logit_limit": limit,
        "logit_distance_to_fp32": _relative(expected, plain),
        "top1_agreement": float((found.argmax(-1) == expected.argmax(-1)).double().mean()),
        "tokens": CHECK_TOKENS * len(tokens),
        "state_bytes_per_request": engine.pool.slot_bytes,
    }


def _forced_logits(
    engine: DecodeEngine, prefix: Prefix, forced: torch.Tensor, *, graph: bool
) -> tuple[torch.Tensor, str, str | None]:
    """Logits `[T, B, vocabulary]` of the engine on forced tokens, how it ran, and why not captured."""
    run = engine.start(prefix, room=forced.shape[1])
    eager_because = run.capture() if graph else "not asked for"
    columns = forced.to(engine.loaded.device).T
    logits = torch.stack([run.step(column).clone() for column in columns])
    run.check_bytes()
    mode = run.mode
    run.close()
    return logits, mode, eager_because


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


@torch.no_grad()
def simulated_logits(
    loaded: LoadedModel, engine: DecodeEngine | None, prefix: Prefix, forced: torch.Tensor
) -> torch.Tensor:
    """Logits `[T, B, vocabulary]` of plain transformers on the forced tokens `[B, T]`.

    With an engine, states are rounded to its format after the prefill and after every step.
    """
    # the pool keeps windows in the model's dtype, the prefix in BF16: both runs start from the latter
    past = resume(loaded, prefix.kv, prefix.states, prefix.conv)
    if engine is None:
        return torch.stack([decode(loaded, column, past) for column in forced.T])
    for ordinal, held in enumerate(recurrent_states(past)):
        held.copy_(rounded(held, engine, ordinal))

    def step(
        ordinal: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert initial_state is not None
        o, new = recurrent_step(q, k, v, g, beta, initial_state)
        return o, rounded(new, engine, ordinal)

    with swap(loaded, decode=step):
        return torch.stack([decode(loaded, column, past) for column in forced.T])


def rounded(state: torch.Tensor, engine: DecodeEngine, ordinal: int) -> torch.Tensor:
    """A state `[B, H, K, V]` in model order after one trip through the engine's format."""
    layout = engine.pool.layouts[ordinal]
    if not isinstance(layout, PackedLayout):
        return state.to(layout.dtype).float()
    order = engine.orders[ordinal]
    scaled, undo = _scaled(state, order)
    protected = torch.zeros(state.shape[1:3], dtype=torch.bool, device=state.device)
    chosen = (
        order.key[:, : layout.k_hi]
        if order.key is not None
        else torch.arange(layout.k_hi, device=state.device).expand(state.shape[1], -1)
    )
    protected.scatter_(1, chosen, True)
    low = dequantise_groups(*quantise_groups(scaled, layout.group), layout.group)
    result = torch.where(protected[None, :, :, None], scaled.half().float(), low)
    return undo(result)


def _scaled(
    state: torch.Tensor, order: StoredOrder
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Value columns in stored order and divided by c, and the way back."""
    if order.value is None and order.scale is None:
        return state, lambda x: x
    columns = order.value
    if columns is not None:
        state = state.gather(3, columns[None, :, None, :].expand_as(state))
    scale = 1.0 if order.scale is None else order.scale[None, :, None, :]

    def undo(x: torch.Tensor) -> torch.Tensor:
        x = x * scale
        if columns is None:
            return x
        return torch.empty_like(x).scatter_(3, columns[None, :, None, :].expand_as(x), x)

    return state / scale, undo


# -- time ---------------------------------------------------------------------------------------


def _timed(
    loaded: LoadedModel, state: str, plan: Plan | None, prefix: Prefix, options: Options
) -> dict[str, Any]:
    engine = DecodeEngine(loaded, state=state, slots=prefix.batch, plan=plan, k_hi=options.k_hi)
    run = engine.start(prefix, room=options.warmup + options.output_tokens)
    eager_because = run.capture() if options.graph else "see the checks"
    seconds = _step_seconds(run, prefix, options)
    samples = Samples(seconds)
    pool, batch = engine.pool, prefix.batch
    moved = 2 * batch * pool.temporal_bytes
    row = {
        "state": state,
        "batch": batch,
        "backend": engine.backend,
        "mode": run.mode,
        "eager_because": eager_because,
        "layout_id": pool.layouts[0].layout_id,
        "state_bytes_per_request": pool.slot_bytes,
        "temporal_bytes_per_request": pool.temporal_bytes,
        "pool_bytes": pool.nbytes,
        "state_bytes_moved_per_step": moved,
        "state_gb_per_s": moved / samples.median / 1e9,
        "tpot_s": samples.to_json(),
    }
    run.check_bytes()
    run.close()
    return row


def _step_seconds(run: DecodeRun, prefix: Prefix, options: Options) -> list[float]:
    """Wall time of every timed step, greedy tokens, the device synchronised around each."""
    settle = synchroniser(prefix.tokens.device)
    token = prefix.tokens[:, -1]
    seconds = []
    for number in range(options.warmup + options.output_tokens):
        settle()
        start = time.perf_counter()
        token = run.step(token).argmax(-1)
        settle()
        if number >= options.warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


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
