"""Original against exported in the precisions they are served in: BF16 weights, and states in the packed pool.

Both runs follow the tokens that the original chose in float32, so every position is comparable.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from hybridstate.errors import NumericError
from hybridstate.plan.store import Plan
from hybridstate.runtime.engine import DecodeEngine
from hybridstate.runtime.restore import capture
from hybridstate.trajectories.cache import decode, linear_layers, prefill
from hybridstate.trajectories.model import LoadedModel, load_model

BF16_ERROR_RATIO: Final = 1.05
"""BF16 logits of the exported model may be this much further from float32 than the original's."""

PACKED_ERROR: Final = 2e-4
"""Logits that two pools of FP16 rows may differ by: sums in another order round a few values the other way."""


RECURRENCE_ERROR: Final = 1e-5
"""Logits that two FP32 pools may differ by, one of them in the plan's orders and scales."""

SCALED_RATIO: Final = 10.0
"""Value scales round other FP16 values: the error against FP32 may be this multiple of the plain FP16 pool's, whose
luck on few tokens varies that much in small random models. What proves the recurrence is `RECURRENCE_ERROR`."""


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
    """The exported model on the runtime's pools, in the plan's orders and scales and without its INT8 error.

    Attributes:
        recurrence_error: FP32 states in stored coordinates against the original's FP32 states (DAMP Eq. 17, 18).
        logit_error: packed pool with every key row in FP16 against the original's dense FP16 pool; only the order of
            sums differs, and with value scales also which values FP16 rounds.
        scaled: the plan has value scales.
        storage_error: of the original's FP16 pool against its FP32 pool, for scale.
        differing: tokens that the two choose differently, of all new ones.
        first: the first such token.
    """

    recurrence_error: float
    logit_error: float
    scaled: bool
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
) -> PackedRow:
    """Decode both models on the runtime's pools, quantisation off: FP32 states, then FP16 ones, the plan's packed.

    Args:
        original, exported: float32 models; the same object may serve as both.
        prompt, chosen: see `compare_bf16`.
        reference: float32 logits of the new tokens after the first, `[B, N - 1, vocabulary]`, for the margin.

    Raises:
        NumericError: logits differ by more than rounding, or a token does.
    """
    size = prompt.shape[0]

    def logits(loaded: LoadedModel, state: str, plan: Plan | None) -> torch.Tensor:
        engine = DecodeEngine(loaded, state=state, slots=size, plan=plan, unquantised=bool(plan))
        return _pooled(engine, prompt, chosen)

    exact = logits(original, "fp32", None)
    recurrence = _relative(logits(exported, "fp32", plan), exact)
    if not recurrence <= RECURRENCE_ERROR:
        raise NumericError(
            f"with FP32 states in stored coordinates the exported model differs by {recurrence:.2e} relative, at most "
            f"{RECURRENCE_ERROR:.0e} is allowed",
            found=recurrence,
            expected=RECURRENCE_ERROR,
        )
    expected, found = logits(original, "fp16", None), logits(exported, "damp", plan)
    storage, precision = _relative(expected, exact), plan.document.precision
    scaled = precision is not None and precision.value_scale
    error, bound = _relative(found, expected), PACKED_ERROR
    compared = error
    if scaled:
        compared, bound = _relative(found, exact), SCALED_RATIO * storage
    differing, first = _divergence(expected, found, reference)
    if not compared <= bound or (first is not None and first.margin > max(1e-3, bound)):
        raise NumericError(
            f"with its states in the packed pool the exported model differs by {compared:.2e} "
            f"relative and in {differing} tokens, at most {bound:.0e} and ties are allowed",
            found=compared,
            expected=bound,
        )
    return PackedRow(recurrence, error, scaled, storage, differing, first)


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
    # a checkpoint rounds windows to BF16, which tips over on sums in another order: keep them as they are
    windows = zip(linear_layers(cache), loaded.spec.layers, strict=True)
    exact = (layer.conv_states[0][..., 1 - spec.conv_width :].clone() for layer, spec in windows)
    prefix = replace(prefix, conv=tuple(exact))
    run = engine.start(prefix, room=chosen.shape[1], past=cache)
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
