"""The check before the time: engine logits against an independent simulation of the state format.

Tokens are teacher-forced. The simulation is plain transformers, whose FP32 states are rounded to the format where the
engine writes them, after every step or every L-th, in logical order and without the packer or the ring. A captured step
that disagrees is dropped for an eager one; an eager one that disagrees ends the bench.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from hybridstate.defaults import FP16_MAX
from hybridstate.errors import NumericError
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import (
    dequantise_groups,
    l2norm,
    quantise_groups,
    recurrent_step,
)
from hybridstate.kernels.ring_reference import LEAST_LOG_DECAY
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.runtime.orders import StoredOrder
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.trajectories.cache import decode, recurrent_states
from hybridstate.trajectories.model import LoadedModel, RecurrenceFn, swap

CHECK_ROWS: Final = 32
"""Sequences that are simulated at once."""

LOGIT_LIMIT: Final = {
    ("fp32", torch.float32): 1e-5,
    ("fp16", torch.float32): 1e-3,
    ("bf16", torch.float32): 1e-3,
    ("damp", torch.float32): 1e-3,
}
"""Largest relative RMS of logits against the simulation. Rounding flips of a 16-bit or INT8 state feed back;
a wrong channel order or a stale slot is above 1e-1."""
LOGIT_LIMIT_LOW: Final = 5e-2
"""The same where the model itself runs in 16 bits."""
ROW_FACTOR: Final = 2
"""The worst sequence may be this many times the limit away: flips fall on few of them."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A run that has passed, and may go on.

    Attributes:
        run: positioned after the forced tokens.
        found, expected: logits `[T, B, vocabulary]` of the run and of the simulation.
        error: relative RMS over all sequences.
        row_error: the same of the worst sequence.
        limit: of `error`.
        eager_because: why no graph is replayed, or None.
    """

    run: DecodeRun
    found: torch.Tensor
    expected: torch.Tensor
    error: float
    row_error: float
    limit: float
    eager_because: str | None

    def to_json(self) -> dict[str, Any]:
        """The check as plain values."""
        return {
            "logit_error": self.error,
            "logit_error_worst_row": self.row_error,
            "logit_limit": self.limit,
            "logit_limit_row": ROW_FACTOR * self.limit,
            "sequences": int(self.found.shape[1]),
            "tokens": int(self.found.shape[0] * self.found.shape[1]),
            "mode": self.run.mode,
            "eager_because": self.eager_because,
        }


def checked_run(
    engine: DecodeEngine,
    prefix: Prefix,
    forced: torch.Tensor,
    *,
    room: int = 0,
    eager_because: str | None = None,
) -> Checked:
    """Start a run, step it over the forced tokens `[B, T]`, compare every sequence with the simulation.

    Args:
        room: tokens that can follow.
        eager_because: a reason not to capture; None tries to.

    Raises:
        NumericError: eager steps differ by more than rounding.
    """
    loaded, steps = engine.loaded, forced.shape[1]
    expected = torch.cat(
        [
            simulated_logits(loaded, engine, prefix.rows(rows), forced[rows])
            for rows in (
                range(start, min(start + CHECK_ROWS, prefix.batch))
                for start in range(0, prefix.batch, CHECK_ROWS)
            )
        ],
        dim=1,
    )
    limit = LOGIT_LIMIT.get((engine.state, loaded.dtype), LOGIT_LIMIT_LOW)
    while True:
        run = engine.start(prefix, room=steps + room)
        eager_because = run.capture() if eager_because is None else eager_because
        found = _forced_logits(run, forced)
        error, row_error = errors(found, expected)
        if error <= limit and row_error <= ROW_FACTOR * limit:
            return Checked(run, found, expected, error, row_error, limit, eager_because)
        mode = run.mode
        run.close()
        if mode == "eager":
            break
        # a step that cannot be replayed is timed without a graph
        eager_because = f"captured steps are {max(error, row_error):.1e} from the simulated run"
    raise NumericError(
        f"{engine.label} on {engine.backend} ({mode}), batch {prefix.batch}: logits are {error:.2e} away from the "
        f"simulated run, the worst sequence {row_error:.2e}, at most {limit:.0e} and {ROW_FACTOR * limit:.0e}; "
        "nothing is reported",
        hint="this is a defect of the kernel, the plan's order or the engine",
        state=engine.label,
        batch=prefix.batch,
        found=error,
        expected=limit,
    )


def check_state(
    engine: DecodeEngine, prefix: Prefix, forced: torch.Tensor, *, eager_because: str | None = None
) -> dict[str, Any]:
    """One format on the forced tokens `[B, T]`, with its distance to FP32.

    Raises:
        NumericError: as `checked_run`.
    """
    checked = checked_run(engine, prefix, forced, eager_because=eager_because)
    plain = simulated_logits(engine.loaded, None, prefix, forced)
    checked.run.close()
    same = checked.found.argmax(-1) == checked.expected.argmax(-1)
    return {
        "state": engine.label,
        "backend": engine.backend,
        "backend_reason": engine.backend_reason,
        **checked.to_json(),
        "logit_distance_to_fp32": errors(checked.expected, plain)[0],
        "top1_agreement": float(same.double().mean()),
        "state_bytes_per_request": engine.pool.slot_bytes,
    }


def _forced_logits(run: DecodeRun, forced: torch.Tensor) -> torch.Tensor:
    """Logits `[T, B, vocabulary]` on the forced tokens; only the pool holds states in between."""
    logits = []
    for column in forced.to(run.engine.loaded.device).T:
        logits.append(run.step(column).clone())
        run.check_bytes()
    return torch.stack(logits)


def errors(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative RMS of logits `[T, B, vocabulary]` over everything, and of the worst sequence."""
    distance, size = (torch.zeros(found.shape[1], dtype=torch.float64) for _ in range(2))
    for mine, theirs in zip(
        found, expected, strict=True
    ):  # a step at a time: float64 of all is large
        distance += (mine.double() - theirs.double()).square().sum(-1).cpu()
        size += theirs.double().square().sum(-1).cpu()
    size = size.clamp_min(1e-60)
    return float((distance.sum() / size.sum()).sqrt()), float((distance / size).sqrt().max())


@torch.no_grad()
def simulated_logits(
    loaded: LoadedModel, engine: DecodeEngine | None, prefix: Prefix, forced: torch.Tensor
) -> torch.Tensor:
    """Logits `[T, B, vocabulary]` of plain transformers on the forced tokens `[B, T]`.

    With an engine, states are rounded to its format after the prefill and where it writes them.
    """
    # the pool keeps windows in the model's dtype, the prefix in BF16: both runs start from the latter
    past = resume(loaded, prefix.kv, prefix.states, prefix.conv)
    if engine is None:
        return torch.stack([decode(loaded, column, past) for column in forced.T])
    with swap(loaded, decode=simulated_recurrence(engine, past)):
        return torch.stack([decode(loaded, column, past) for column in forced.T])


def simulated_recurrence(engine: DecodeEngine, past: Any) -> RecurrenceFn:
    """The decode function of plain transformers that stores states as the engine does; `past` is rounded at once.

    Between two writes of an engine with a ring the inputs are what is rounded (`_ringed`).
    """
    for ordinal, held in enumerate(recurrent_states(past)):
        held.copy_(rounded(held, engine, ordinal))
    updates = [0] * len(engine.pool.layouts)

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
        every = engine.pool.every
        if every > 1:
            g = _ring_gate(g)
        o, new = recurrent_step(q, k, v, g, beta, initial_state)
        if every > 1:
            new = _ringed(new, k, g, initial_state, engine.orders[ordinal])
        updates[ordinal] += 1
        return o, rounded(new, engine, ordinal) if updates[ordinal] % every == 0 else new

    return step


def _ring_gate(g: torch.Tensor) -> torch.Tensor:
    """Log decays `[B, H]` or `[B, H, K]` as a ring takes them; those per channel in FP16."""
    g = g.float().clamp_min(LEAST_LOG_DECAY)
    return g.half().float() if g.dim() == 3 else g


def _ringed(
    new: torch.Tensor, k: torch.Tensor, g: torch.Tensor, old: torch.Tensor, order: StoredOrder
) -> torch.Tensor:
    """The state after an update whose normalised k and pseudo value are rounded to FP16, the latter in stored units."""
    key = l2norm(k.float()).repeat_interleave(new.shape[1] // k.shape[1], 1)[..., None]
    aged = old * (g[..., None] if g.dim() == 3 else g[..., None, None]).exp()
    size = key.square().sum(2, keepdim=True).clamp_min(1e-30)
    written = (key * (new - aged)).sum(2, keepdim=True) / size
    scaled, undo = _scaled(written, order)
    return aged + key.half().float() * undo(_half(scaled))


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
    result = torch.where(protected[None, :, :, None], _half(scaled), low)
    return undo(result)


def _half(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP16, saturating as packed rows and rings do."""
    return x.clamp(-FP16_MAX, FP16_MAX).half().float()


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
