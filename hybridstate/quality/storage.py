"""Original against exported in the precisions they are served in: BF16 weights, and states in the packed pool.

Both runs follow the tokens that the original chose in float32, so every position is comparable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hybridstate.errors import NumericError
from hybridstate.plan.store import Plan
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.restore import capture
from hybridstate.trajectories.cache import decode, prefill
from hybridstate.trajectories.model import LoadedModel, load_model

BF16_ERROR_RATIO: Final = 1.05
"""BF16 logits of the exported model may be this much further from float32 than the original's."""

PACKED_ERROR: Final = 2e-4
"""Logits that two pools of FP16 rows may differ by: sums in another order round a few values the other way."""


CONTINUED: Final = frozenset({"LinearAttentionLayer", "DynamicLayer"})
"""Cache layers of transformers that the runtime takes over and continues."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first new token that two runs choose differently.

    `margin` is the distance of the two best float32 logits of the original there.
    """

    prompt: int
    step: int
    original: int
    exported: int
    margin: float


@dataclass(frozen=True, slots=True)
class Bf16Row:
    """Both models in BF16 against the original in float32.

    Attributes:
        original_error, exported_error: relative error of all logits.
        differing: new tokens that the two choose differently, of all of them.
        first: the first such token, None if they agree throughout.
    """

    original_error: float
    exported_error: float
    differing: int
    first: Divergence | None

    @property
    def ratio(self) -> float:
        """Exported error as a multiple of the original's."""
        return self.exported_error / self.original_error if self.original_error else 1.0


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The exported model on the plan's packed pool with every key row in FP16, the original on a dense FP16 pool.

    Attributes:
        logit_error: between the two; only the order of sums differs.
        storage_error: of the original's FP16 pool against its FP32 states, for scale.
        differing: tokens that the two choose differently, of all new ones.
        first: the first such token.
    """

    logit_error: float
    storage_error: float
    differing: int
    first: Divergence | None


def compare_bf16(
    original: str | Path,
    exported: str | Path,
    device: str,
    prompt: torch.Tensor,
    chosen: torch.Tensor,
    reference: torch.Tensor,
    *,
    report: Callable[[int, int], None],
) -> Bf16Row:
    """Run both models in BF16 on the same tokens.

    Args:
        prompt: `[B, T]`.
        chosen: `[B, N]`, new tokens of the original in float32.
        reference: its logits `[B, T + N, vocabulary]`: of the prompt, then of the new tokens.

    Raises:
        NumericError: the exported model is further from float32 than allowed.
    """
    runs = []
    for position, folder in enumerate((original, exported)):
        report(position, 2)
        loaded = load_model(str(folder), device=device, dtype=torch.bfloat16)
        runs.append(_logits(loaded, prompt, chosen))
        del loaded
    report(2, 2)
    new = slice(prompt.shape[1], None)
    before, after = (_relative(run, reference) for run in runs)
    differing, first = _divergence(runs[0][:, new], runs[1][:, new], reference[:, new])
    row = Bf16Row(before, after, differing, first)
    if not row.ratio <= BF16_ERROR_RATIO:
        raise NumericError(
            f"in BF16 the exported model is {after:.3e} from float32, the original {before:.3e}: "
            f"{row.ratio:.3f} times, at most {BF16_ERROR_RATIO} is allowed",
            found=row.ratio,
            expected=BF16_ERROR_RATIO,
        )
    return row


def compare_packed(
    original: LoadedModel,
    exported: LoadedModel,
    plan: Plan,
    prompt: torch.Tensor,
    chosen: torch.Tensor,
    reference: torch.Tensor,
) -> PackedRow | None:
    """Decode the original on a dense FP16 pool and the exported model on the packed one, quantisation off.

    Args:
        original, exported: float32 models; the same object may serve as both.
        prompt, chosen: see `compare_bf16`.
        reference: float32 logits of the new tokens after the first, `[B, N - 1, vocabulary]`.

    Returns:
        None where the runtime cannot continue the model's attention cache (indexers, sliding windows).

    Raises:
        NumericError: logits differ by more than rounding, or a token does.
    """
    _, cache = prefill(original, prompt[:, :1])
    if {type(layer).__name__ for layer in cache.layers} - CONTINUED:
        return None
    size = prompt.shape[0]
    dense = DecodeEngine(original, state="fp16", slots=size)
    packed = DecodeEngine(exported, state="damp", slots=size, plan=plan, unquantised=True)
    expected, found = (_pooled(engine, prompt, chosen) for engine in (dense, packed))
    differing, first = _divergence(expected, found, reference)
    row = PackedRow(_relative(found, expected), _relative(expected, reference), differing, first)
    if not row.logit_error <= PACKED_ERROR or (first is not None and first.margin > 1e-3):
        raise NumericError(
            f"with its states in the packed pool the exported model differs by {row.logit_error:.2e} "
            f"relative and in {differing} tokens, at most {PACKED_ERROR:.0e} and ties are allowed",
            found=row.logit_error,
            expected=PACKED_ERROR,
        )
    return row


def _logits(loaded: LoadedModel, prompt: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Float32 logits `[B, T + N, vocabulary]`: the prompt's, then those the new tokens are chosen from."""
    logits, cache = prefill(loaded, prompt, keep_logits=True)
    step, new = logits[:, -1], []
    for column in chosen.T:
        new.append(step.float().cpu())
        step = decode(loaded, column.to(loaded.device), cache)
    return torch.cat([logits.float().cpu(), torch.stack(new, 1)], 1)


def _pooled(engine: DecodeEngine, prompt: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Logits after each new token but the last, `[B, N - 1, vocabulary]`, states in the engine's pool."""
    loaded = engine.loaded
    _, cache = prefill(loaded, prompt)
    prefix = capture(loaded, prompt.to(loaded.device), cache)
    run = engine.start(prefix, room=chosen.shape[1])
    try:
        steps = [run.step(c.to(loaded.device)).float().cpu().clone() for c in chosen.T[:-1]]
    finally:
        run.close()
    return torch.stack(steps, 1)


def _divergence(
    original: torch.Tensor, exported: torch.Tensor, reference: torch.Tensor
) -> tuple[int, Divergence | None]:
    """How many greedy tokens differ between logits `[B, N, vocabulary]`, and the earliest of them."""
    mine, theirs = original.argmax(-1), exported.argmax(-1)
    differs = (mine != theirs).T.nonzero()  # by step, then by prompt
    if not len(differs):
        return 0, None
    step, prompt = (int(i) for i in differs[0])
    best = reference[prompt, step].topk(2).values
    return len(differs), Divergence(
        prompt,
        step,
        int(mine[prompt, step]),
        int(theirs[prompt, step]),
        float(best[0] - best[1]),
    )


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = torch.linalg.vector_norm((found - expected).double())
    return float(error / torch.linalg.vector_norm(expected.double()))
