"""The arms of a reuse experiment, and running all of them on the same cached prefixes.

Every arm but `recompute` goes the whole way: checkpoint bytes, a poisoned slot, the load policy, then the suffix. Arms
share one prefill per prefix and are stacked along the batch; arms that do the same to the same units run once. Masks of
an arm are fixed before any case is seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hybridstate.errors import NumericError
from hybridstate.quality.reuse import Cases, divergence, score, top1_agreement
from hybridstate.runtime.pool import StatePool
from hybridstate.runtime.restore import (
    Prefix,
    Units,
    capture,
    join,
    load,
    refresh,
    replay,
    resume_slots,
    store,
    zero_fill,
)
from hybridstate.trajectories.cache import new_cache, prefill
from hybridstate.trajectories.model import LoadedModel

Policy = Literal["dense", "recompute", "nr", "wr"]

Step = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve a request on a cached prefix.

    Attributes:
        name: unique, e.g. `nr-64`, `random-64-1234`.
        policy: what happens to omitted units; `dense` retains all, `recompute` reads the prefix again.
        units: what the checkpoint retains; None for `recompute`, which has none.
        checkpoint_bytes: exact length of its checkpoint, 0 for `recompute`.
        w_max: cutoff, None where there is none.
        w_replay: most tokens replayed (`wr`), before the prefix length caps it.
        seed: of a random mask.
    """

    name: str
    policy: Policy
    units: Units | None
    checkpoint_bytes: int
    w_max: int | None = None
    w_replay: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one arm did on every case of one kind, in case order; float64 `[N]` each.

    `top1` is the share of scored positions whose most likely token is the dense restore's.
    """

    exact: NDArray[np.float64]
    bits: NDArray[np.float64]
    kl: NDArray[np.float64]
    top1: NDArray[np.float64]


class Outcomes:
    """Results by arm and kind, filled in any order of cases."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], dict[int, tuple[float, ...]]] = {}

    def add(self, arm: str, cases: Cases, *columns: NDArray[np.float64]) -> None:
        """Add columns exact, bits, KL and top-1 agreement of some cases."""
        rows = self._values.setdefault((arm, cases.kind), {})
        for number, *values in zip(cases.numbers, *columns, strict=True):
            rows[number] = tuple(map(float, values))

    def alias(self, arm: str, same_as: str) -> None:
        """Give `arm` the results of another arm that did exactly the same."""
        for (name, kind), rows in list(self._values.items()):
            if name == same_as:
                self._values[arm, kind] = rows

    def get(self, arm: str, kind: str) -> Outcome:
        """All cases of a kind, in order of their numbers."""
        rows = self._values[arm, kind]
        table = np.array([rows[number] for number in sorted(rows)], dtype=np.float64)
        return Outcome(*table.T)

    def covers(self, arm: str) -> bool:
        """Whether the arm has a result for every case that any arm has: else means would be over other questions."""
        cases = {key: rows.keys() for key, rows in self._values.items()}
        return bool(cases) and all(
            cases.get((arm, kind), set()) >= rows for (_, kind), rows in cases.items()
        )

    def kinds(self) -> tuple[str, ...]:
        """Kinds in order of appearance."""
        return tuple(dict.fromkeys(kind for _, kind in self._values))


def cached_prefix(loaded: LoadedModel, context: torch.Tensor, *, rows: int) -> Prefix:
    """Prefill contexts `[B, n_p]`, `rows` sequences at a time, and capture what they leave."""
    parts = []
    for start in range(0, len(context), rows):
        tokens = context[start : start + rows]
        _, past = prefill(loaded, tokens)
        parts.append(capture(loaded, tokens, past))
    return parts[0] if len(parts) == 1 else join(parts)


def run_arms(
    loaded: LoadedModel,
    arms: Sequence[Arm],
    cases: Cases,
    pool: StatePool,
    outcomes: Outcomes,
    *,
    done: Step,
) -> None:
    """Run every arm on one batch of cases; the first arm must be `dense`, the reference of all KL.

    Args:
        pool: FP32 slots; as many sequences run at once as it has slots.
        outcomes: receives the results.
        done: called with the number of (arm, case) pairs finished.

    Raises:
        NumericError: a checkpoint's length differs from its accounting, or a slot kept poison.
    """
    if arms[0].policy != "dense":
        raise NumericError("the first arm must be the dense restore")
    prefix = cached_prefix(loaded, cases.context, rows=pool.slots)
    windows = {min(a.w_replay, prefix.length) for a in arms if a.policy == "wr"} - {0}
    replayed = {window: _replay_all(loaded, prefix, window, pool.slots) for window in windows}
    reference: torch.Tensor | None = None
    same = twins(arms)
    for arm, group in _stacks(
        [arm for arm in arms if arm.name not in same], len(cases), pool.slots
    ):
        rows = [row for _, row in group]
        chosen = cases.rows(rows)
        if arm.policy == "recompute":
            scores = score(loaded, new_cache(loaded), chosen, seen=prefix.length)
        else:
            past = _restored(loaded, prefix, group, replayed, pool)
            scores = score(loaded, past, chosen)
        if reference is None:
            reference = torch.empty(
                (len(cases), *scores.log_probs.shape[1:]), device=scores.log_probs.device
            )
        index = torch.tensor(rows, device=reference.device)
        if arm.policy == "dense":
            reference[index] = scores.log_probs
        kl = divergence(reference[index], scores.log_probs)
        top1 = top1_agreement(reference[index], scores.log_probs)
        for position, (member, row) in enumerate(group):
            part = slice(position, position + 1)
            columns = (scores.exact[part], scores.bits[part], kl[part], top1[part])
            outcomes.add(member.name, cases.rows([row]), *columns)
        done(len(group))
    for name, original in same.items():
        outcomes.alias(name, original)
        done(len(cases))


def twins(arms: Sequence[Arm]) -> dict[str, str]:
    """Arms that repeat an earlier one, with its name: equal masks, or every unit retained."""
    seen: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for arm in arms:
        units = arm.units
        dense = units is not None and units.complete and arm.policy in ("nr", "wr")
        policy = "dense" if dense else arm.policy
        window = arm.w_replay if policy == "wr" else 0
        masks = () if units is None else tuple(m.cpu().numpy().tobytes() for m in units.masks)
        key = (policy, window, masks)
        if key in seen:
            found[arm.name] = seen[key]
        else:
            seen[key] = arm.name
    return found


def _stacks(arms: Sequence[Arm], cases: int, slots: int) -> list[tuple[Arm, list[tuple[Arm, int]]]]:
    """Batches of (arm, row), at most `slots` long; dense first and alone, recompute alone."""
    stacks: list[tuple[Arm, list[tuple[Arm, int]]]] = []
    alone = [arm for arm in arms if arm.policy in ("dense", "recompute")]
    mixed = [
        (arm, row)
        for arm in arms
        if arm.policy not in ("dense", "recompute")
        for row in range(cases)
    ]
    for pairs in [*([(arm, row) for row in range(cases)] for arm in alone), mixed]:
        for start in range(0, len(pairs), slots):
            group = pairs[start : start + slots]
            stacks.append((group[0][0], group))
    return stacks


def _replay_all(
    loaded: LoadedModel, prefix: Prefix, window: int, rows: int
) -> tuple[torch.Tensor, ...]:
    parts = [
        replay(loaded, prefix.rows(range(start, min(start + rows, prefix.batch))), window)
        for start in range(0, prefix.batch, rows)
    ]
    return tuple(torch.cat(layer) for layer in zip(*parts, strict=True))


def _restored(
    loaded: LoadedModel,
    prefix: Prefix,
    group: Sequence[tuple[Arm, int]],
    replayed: dict[int, tuple[torch.Tensor, ...]],
    pool: StatePool,
) -> object:
    """Checkpoint, load and apply the policy for every pair; a cache that continues all of them."""
    slots = pool.alloc(len(group))
    if slots is None:
        raise NumericError(f"{len(group)} sequences for {pool.available} free slots")
    for place, (arm, row) in enumerate(group):
        buffer = store(prefix, row, retained_by(arm))
        check_length(buffer, arm)
        restore_into(buffer, arm, pool, slots[place : place + 1], replayed, prefix.length, row)
    kv = prefix.rows([row for _, row in group]).kv
    past = resume_slots(loaded, kv, pool, slots)
    pool.free(slots)
    return past


def restore_into(
    buffer: torch.Tensor,
    arm: Arm,
    pool: StatePool,
    slot: torch.Tensor,
    replayed: dict[int, tuple[torch.Tensor, ...]],
    length: int,
    row: int,
) -> None:
    """Load one checkpoint into a slot (`[1]`) and settle its omitted units by the arm's policy."""
    units = retained_by(arm)
    load(buffer, units, pool, int(slot))
    window = min(arm.w_replay, length)
    if arm.policy == "wr" and window:
        states = [state[row : row + 1] for state in replayed[window]]
        refresh(pool, slot, units, states)
    else:
        zero_fill(pool, slot, units)


def retained_by(arm: Arm) -> Units:
    """The units of an arm that restores a checkpoint."""
    if arm.units is None:
        raise NumericError(f"arm {arm.name} has no checkpoint")
    return arm.units


def check_length(buffer: torch.Tensor, arm: Arm) -> None:
    """The checkpoint is exactly as long as the accounting says.

    Raises:
        NumericError: it is not.
    """
    if buffer.numel() != arm.checkpoint_bytes or buffer.dtype != torch.uint8:
        raise NumericError(
            f"arm {arm.name}: checkpoint of {buffer.numel()} bytes, accounted {arm.checkpoint_bytes}",
            found=buffer.numel(),
            expected=arm.checkpoint_bytes,
        )
