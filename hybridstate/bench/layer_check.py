"""The check of a full-size model with random weights: module by module, on the inputs of the plain model.

Through tens of random blocks and their routers a rounding grows until logits say little. So the plain model runs first,
its states rounded to the format where the engine writes them; then every mixer and feed-forward of the engine's step is
given the input of the plain one and has to produce its output, and the pool the plain states. What a module adds can be
small beside what it is added to, so outputs are compared before the addition. A captured step has to repeat the eager
one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from hybridstate.bench.decode_check import simulated_recurrence
from hybridstate.errors import NumericError
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.trajectories.cache import decode, recurrent_states
from hybridstate.trajectories.model import LoadedModel, swap

ROW_ERROR: Final = 5e-2
"""Relative error that a row of a module's output may have in 16 bits."""
MEDIAN_ERROR: Final = 2e-2
"""The same of the median row of the worst module."""
RIGHT_ROWS: Final = 0.8
"""Share of rows within `ROW_ERROR`: a near tie between two experts may go either way, a defect hits every row."""
STATE_ERROR: Final = 3e-2
"""Relative RMS of a layer's states after the checked tokens."""
GRAPH_ERROR: Final = 2e-2
"""Relative RMS between a captured and an eager step from the same states, in the median row."""


@dataclass(slots=True)
class Trace:
    """Inputs and outputs of every module `[R, D]` per token, logits per token, and the last states on the host."""

    inputs: list[list[Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def plain_trace(engine: DecodeEngine, prefix: Prefix, forced: Tensor) -> Trace:
    """Plain transformers on the forced tokens `[R, T]`, states rounded to the engine's format."""
    loaded, trace = engine.loaded, Trace()
    past = resume(loaded, prefix.kv, prefix.states, prefix.conv)
    with swap(loaded, decode=simulated_recurrence(engine, past)):
        for column in forced.T:
            with _watched(loaded, trace, None):
                trace.logits.append(decode(loaded, column, past))
    trace.states = [state.cpu() for state in recurrent_states(past)]
    return trace


@torch.no_grad()
def check_blocks(run: DecodeRun, plain: Trace, forced: Tensor) -> dict[str, Any]:
    """Step an eager run over the forced tokens `[B, T]`, its first rows on the plain modules' inputs.

    Raises:
        NumericError: a module, a state or the output layer differs by more than rounding.
    """
    engine, found = run.engine, Trace()
    rows = min(len(forced), len(plain.logits[0]))
    for token, column in enumerate(forced.to(engine.loaded.device).T):
        with _watched(engine.loaded, found, [x[:rows] for x in plain.inputs[token]]):
            found.logits.append(run.step(column).clone())
        run.check_bytes()
    errors = torch.stack(
        [
            torch.stack(
                [_row_errors(a[:rows], b[:rows]) for a, b in zip(mine, theirs, strict=True)]
            )
            for mine, theirs in zip(found.outputs, plain.outputs, strict=True)
        ]
    )  # [T, modules, rows]
    states, _ = engine.pool.read(run.slots[:rows])
    state_error = max(
        float((a - b[:rows].to(a.device)).norm() / b[:rows].norm().clamp_min(1e-30))
        for a, b in zip(states, plain.states, strict=True)
    )
    logit_rows = torch.stack(
        [_row_errors(a[:rows], b[:rows]) for a, b in zip(found.logits, plain.logits, strict=True)]
    )
    result: dict[str, Any] = {
        "rows": rows,
        "tokens": int(forced.shape[1]),
        "modules": errors.shape[1],
        "module_error_median_worst": float(errors.median(-1).values.max()),
        "module_rows_within": float((errors <= ROW_ERROR).double().mean()),
        "state_error_worst": state_error,
        "logit_error_median": float(logit_rows.median()),
        "limits": {
            "row": ROW_ERROR,
            "median": MEDIAN_ERROR,
            "rows_within": RIGHT_ROWS,
            "state": STATE_ERROR,
        },
    }
    if not (
        result["module_error_median_worst"] <= MEDIAN_ERROR
        and result["module_rows_within"] >= RIGHT_ROWS
        and state_error <= STATE_ERROR
        and result["logit_error_median"] <= ROW_ERROR
    ):
        medians = errors.median(-1).values.amax(0)
        names = [name for name, _ in checked_modules(engine.loaded)]
        worst = ", ".join(
            f"{names[n]} {float(medians[n]):.1e}" for n in medians.argsort().flip(0)[:4]
        )
        raise NumericError(
            f"{engine.label} on {engine.backend}, batch {len(forced)}: from the plain model are {worst}; states "
            f"{state_error:.1e}, {100 * result['module_rows_within']:.0f} % of rows within {ROW_ERROR:.0e}, logits "
            f"{result['logit_error_median']:.1e}; nothing is reported",
            hint="this is a defect of a kernel or the engine",
            state=engine.label,
            found={k: v for k, v in result.items() if k != "limits"},
        )
    return result


@torch.no_grad()
def check_graph(run: DecodeRun, tokens: Tensor) -> float:
    """Error of one captured step of `tokens [B]` against the eager one from the same states; neither is kept."""
    assert run.graph is not None
    run.load(tokens)
    with run.undone():
        eager = run.eager_logits().clone()
    with run.undone():
        run.graph()
        captured = run.replayed_logits().clone()
    return float(_row_errors(captured, eager).median())


def _row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each row; infinite where anything is not finite."""
    error: Tensor = (found.float() - expected.float()).norm(dim=-1)
    error = error / expected.float().norm(dim=-1).clamp_min(1e-30)
    return error.nan_to_num(torch.inf, torch.inf).cpu()


def checked_modules(loaded: LoadedModel) -> list[tuple[str, Any]]:
    """Mixers and feed-forwards in order, with their names: what a decoder layer holds beside its norms."""
    return [
        (f"layers.{index}.{name}", child)
        for index, block in enumerate(loaded.model.get_decoder().layers)
        for name, child in block.named_children()
        if "norm" not in name
    ]


@contextmanager
def _watched(loaded: LoadedModel, trace: Trace, given: list[Tensor] | None) -> Iterator[None]:
    """Record inputs and outputs of every module `[B, D]`; the first rows of inputs are replaced by `given`."""
    modules = [module for _, module in checked_modules(loaded)]
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if given is not None:
            x = x.clone()
            x[: len(given[0]), 0] = given[len(inputs)]
        inputs.append(x[:, 0])
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def after(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[:, 0])

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    trace.inputs.append(inputs)
    trace.outputs.append(outputs)
