"""`bench exchange`: the placement that `analyze` prints, carried out between real processes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridstate.api.analysis import analyze
from hybridstate.defaults import W_MAX
from hybridstate.errors import UsageError

if TYPE_CHECKING:
    from hybridstate.bench.exchange import Exchanged

    Progress = Callable[[str, int, int], None]


def bench_exchange(
    model: str | Path,
    *,
    tp: int = 2,
    w_max: Sequence[int] | None = None,
    balance: Sequence[str] | None = None,
    checkpoints: Sequence[int] | None = None,
    repeats: int = 20,
    device: str = "auto",
    progress: "Progress | None" = None,
) -> "Exchanged":
    """Slots gained and seconds spent when checkpoints are placed over tensor-parallel ranks.

    Args:
        model: folder, Hub name or embedded name; only its decay parameters are read.
        tp: ranks, one process and on CUDA one GPU each.
        w_max: cutoffs in tokens.
        balance: of `off`, `storage`, `hybrid`; all by default.
        checkpoints: how many travel together, 1 and 8 by default.
        repeats: timed stores and loads.
        device: `auto`, `cpu` or `cuda`.
        progress: called with (stage, done, total).

    Raises:
        UsageError, PlanMismatch, NumericError, MissingRequirement: see `bench.exchange.run_exchange`.
    """
    from typing import cast

    from hybridstate.bench.exchange import run_exchange
    from hybridstate.bench.timing import device_record
    from hybridstate.plan.placement import BALANCES, Balance
    from hybridstate.trajectories.model import torch_device

    target = torch_device(device)
    unknown = [mode for mode in balance or () if mode not in BALANCES]
    if unknown:
        raise UsageError(f"--balance takes {', '.join(BALANCES)}, found {unknown[0]!r}")
    found = analyze(model, w_max=tuple(dict.fromkeys(w_max or W_MAX)), tp=tp)
    return run_exchange(
        found.source.name,
        found.spec,
        [cutoff.selection for cutoff in found.cutoffs],
        tp=tp,
        modes=tuple(cast("Balance", mode) for mode in dict.fromkeys(balance or BALANCES)),
        checkpoints=tuple(dict.fromkeys(checkpoints or (1, 8))),
        device=target.type,
        hardware=device_record(target),
        repeats=repeats,
        progress=progress,
    )
