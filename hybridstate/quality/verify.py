"""Original against exported: every tensor accounted for, and the same numbers from both models.

The exported checkpoint moves heads, key channels and value dims of the state and nothing else, so in exact arithmetic
logits are equal and each state is the original's in stored order (value scales are no part of it). Float sums change
their order, hence a tolerance. Both models see real text; the exported one is driven with the
original's tokens and must choose each of them itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from hybridstate.checkpoint import Checkpoint, open_checkpoint
from hybridstate.errors import NumericError, PlanMismatch
from hybridstate.families import LinearLayer
from hybridstate.plan.compare import verify_against
from hybridstate.plan.store import Plan, read_plan
from hybridstate.quality.storage import (
    BF16_ERROR_RATIO,
    Bf16Row,
    PackedRow,
    compare_bf16,
    compare_packed,
)
from hybridstate.trajectories.cache import decode, prefill, recurrent_states
from hybridstate.trajectories.model import LoadedModel, load_model
from hybridstate.trajectories.prompts import heldout_text, prefixes
from hybridstate.weights.fold import changed
from hybridstate.weights.orders import layer_orders
from hybridstate.weights.permute import layer_moves

Progress = Callable[[str, int, int], None]

MAX_RELATIVE_ERROR: Final = 1e-5
"""Largest float32 difference, relative to the norm, that reordered sums may cause."""

FOLDED_ERROR: Final = 2.0**-6
"""The same where the output norm was folded into a 16-bit projection, whose entries were then rounded anew (at most
half a unit in the last place, 2^-9 in BF16, in every layer; a wrong order errs by about 1). The bytes are compared
exactly, and `--value-order common` folds nothing and keeps the first bound."""

SYNTHETIC_SEED: Final = 0
"""Of the random token ids used where a model has no tokenizer."""


@dataclass(frozen=True, slots=True)
class TensorAccount:
    """What became of every tensor: byte-equal, or exactly the planned permutation."""

    same: int
    moved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative error of one layer's state against the permuted original, worst of both times."""

    index: int
    state_error: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `verify`; it exists only if every check passed.

    Attributes:
        original, exported: the two folders.
        device, dtype: where and in what the models ran.
        text: what they read: `held-out prose`, or random ids where there is no tokenizer.
        prompts, prompt_tokens, new_tokens: how much of it, and how many greedy tokens followed.
        tensors: account of every tensor.
        logit_error: largest relative error of the prompts' and the new tokens' logits.
        smallest_margin: smallest gap between the two best logits at a new token.
        layers: state errors after prompt and new tokens.
        folded: an output norm was folded into a 16-bit projection, so float32 is compared within `FOLDED_ERROR`.
        differing: new tokens that the two choose differently; only such a fold may have any.
        bf16: both models in BF16, None if that was left out.
        packed: both models with their states in the runtime's pool, None where the plan packs none.
    """

    original: str
    exported: str
    device: str
    dtype: str
    text: str
    prompts: int
    prompt_tokens: int
    new_tokens: int
    tensors: TensorAccount
    logit_error: float
    smallest_margin: float
    layers: tuple[LayerError, ...]
    folded: bool = False
    differing: int = 0
    bf16: Bf16Row | None = None
    packed: PackedRow | None = None

    @property
    def bound(self) -> float:
        """What float32 logits and states were held to."""
        return FOLDED_ERROR if self.folded else MAX_RELATIVE_ERROR

    @property
    def state_error(self) -> float:
        """The largest of the layers' state errors."""
        return max(layer.state_error for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """All fields, with the largest state error and the bound."""
        return asdict(self) | {
            "tensors": {"same": self.tensors.same, "moved": list(self.tensors.moved)},
            "layers": [asdict(layer) for layer in self.layers],
            "state_error": self.state_error,
            "max_relative_error": self.bound,
            "identical_tokens": self.differing == 0,
            "bf16": self.bf16
            and asdict(self.bf16) | {"ratio": self.bf16.ratio, "max_ratio": BF16_ERROR_RATIO},
        }


@dataclass(frozen=True, slots=True)
class _Run:
    """Numbers of one model on the prompts; tensors on the CPU."""

    prompt_logits: torch.Tensor  # [B, T, vocabulary]
    new_logits: torch.Tensor  # [B, N, vocabulary]
    states: tuple[tuple[torch.Tensor, ...], ...]  # (after prompt, after new tokens) x layers


def verify(
    original: str | Path,
    exported: str | Path,
    *,
    device: str = "cpu",
    prompts: int = 4,
    prompt_tokens: int = 192,
    new_tokens: int = 32,
    bf16: bool = True,
    progress: Progress | None = None,
) -> Verification:
    """Compare an exported checkpoint with its original: float32, then BF16, then the packed pool.

    Args:
        device: where both run, one after the other; `auto` takes a GPU if there is one.
        prompts, prompt_tokens, new_tokens: how much text, and how many greedy tokens follow.
        bf16: also load both in BF16.
        progress: called with (stage, done, total).

    Raises:
        PlanMismatch: the folders are not the two checkpoints of one plan, or a tensor differs.
        NumericError: a state, a logit or a token differs; names the layer and the number.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # TF32 convolutions would hide the comparison behind their own error of 1e-3
    with torch.backends.cudnn.flags(allow_tf32=False):
        sizes = (prompts, prompt_tokens, new_tokens)
        return _verify(original, exported, device, sizes, bf16, progress)


def _verify(
    original: str | Path,
    exported: str | Path,
    device: str,
    sizes: tuple[int, int, int],
    bf16: bool,
    progress: Progress | None,
) -> Verification:
    prompts, prompt_tokens, new_tokens = sizes
    source = open_checkpoint(original, weights=True)
    target = open_checkpoint(exported, weights=True)
    plan = read_plan(target.path)
    _expect(plan, source, "original")
    _expect(plan, target, "exported")
    account = account_tensors(plan, source, target, progress=progress)
    reference = load_model(str(original), device=device, dtype=torch.float32)
    tokens, text = _prompt(reference, prompts, prompt_tokens)
    first = _run(reference, tokens, None, new_tokens, _report(progress, "original"))
    spec = reference.spec
    folded = _folds_16_bit(plan, source)
    bound = FOLDED_ERROR if folded else MAX_RELATIVE_ERROR
    candidate = load_model(str(exported), device=device, dtype=torch.float32)
    chosen = first.new_logits.argmax(-1)
    second = _run(candidate, tokens, chosen, new_tokens, _report(progress, "exported"))
    layers = tuple(
        _compare_states(
            plan,
            layer,
            [states[layer.ordinal] for states in first.states],
            [states[layer.ordinal] for states in second.states],
            bound,
        )
        for layer in spec.layers
    )
    logit_error = max(
        _relative(second.prompt_logits, first.prompt_logits),
        _relative(second.new_logits, first.new_logits),
    )
    if not logit_error <= bound:
        raise NumericError(
            f"logits of the exported model differ from {source.name} by {logit_error:.2e} relative, "
            f"at most {bound:.0e} is allowed",
            hint="export again; if it stays, report a bug with both config.json files",
            found=logit_error,
            expected=bound,
        )
    differing = int((second.new_logits.argmax(-1) != chosen).sum())
    if not folded:
        _compare_tokens(second.new_logits.argmax(-1), first.new_logits)
    packed = None
    precision = plan.document.precision
    if precision is not None and new_tokens > 1:
        # a fold's rounding is in the weights: the recurrence is then compared on the same weights
        base = candidate if folded else reference
        packed = compare_packed(base, candidate, plan, tokens, chosen, first.new_logits[:, 1:])
    ran_on = str(candidate.device)
    del reference, candidate
    low = None
    if bf16:
        logits = torch.cat([first.prompt_logits, first.new_logits], 1)
        report = _report(progress, "bf16")
        low = compare_bf16(original, exported, device, tokens, chosen, logits, report=report)
    return Verification(
        original=str(original),
        exported=str(exported),
        device=ran_on,
        dtype="float32",
        text=text,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        tensors=account,
        logit_error=logit_error,
        smallest_margin=float(_margins(first.new_logits).min()),
        layers=layers,
        folded=folded,
        differing=differing,
        bf16=low,
        packed=packed,
    )


def account_tensors(
    plan: Plan, original: Checkpoint, exported: Checkpoint, *, progress: Progress | None = None
) -> TensorAccount:
    """Check every tensor's bytes: equal to the original's, or to their planned permutation.

    Raises:
        PlanMismatch: naming the first tensor that is neither.
    """
    missing = sorted(original.entries.keys() ^ exported.entries.keys())
    if missing:
        side = "original" if missing[0] in original.entries else "exported"
        raise PlanMismatch(
            f"{missing[0]} is only in the {side} checkpoint ({len(missing)} such tensors)",
            tensor=missing[0],
        )
    spec = original.spec
    orders = layer_orders(plan, spec)
    moves = {
        move.name: move
        for layer, order in zip(spec.layers, orders, strict=True)
        for move in layer_moves(spec, layer, order, original.shapes)
        if not move.still
    }
    for done, (name, entry) in enumerate(sorted(original.entries.items()), start=1):
        other = exported.entries[name]
        expected = changed(original, moves[name]) if name in moves else original.read_raw(name)
        shape = moves[name].shape_after(entry.shape) if name in moves else entry.shape
        if (other.dtype, other.shape) != (entry.dtype, shape):
            raise PlanMismatch(
                f"{name} is {other.dtype} {list(other.shape)} in the exported checkpoint, "
                f"expected {entry.dtype} {list(shape)}",
                tensor=name,
            )
        if exported.read_raw(name) != expected:
            raise PlanMismatch(
                f"{name} of the exported checkpoint is neither the original's nor its planned "
                "permutation",
                hint="export again",
                tensor=name,
                file=str(other.file),
            )
        if progress is not None:
            progress("tensors", done, len(original.entries))
    return TensorAccount(len(original.entries) - len(moves), tuple(sorted(moves)))


def _folds_16_bit(plan: Plan, original: Checkpoint) -> bool:
    """Whether an output norm was folded into a projection that cannot hold the product exactly."""
    spec = original.spec
    return any(
        move.norm is not None and original.entries[move.name].dtype in ("BF16", "F16")
        for layer, order in zip(spec.layers, layer_orders(plan, spec), strict=True)
        if order.fold
        for move in layer_moves(spec, layer, order, original.shapes)
    )


def _expect(plan: Plan, checkpoint: Checkpoint, wanted: str) -> None:
    found = verify_against(plan, checkpoint)
    model = plan.document.model
    if found != wanted and model.exported != model.original:
        raise PlanMismatch(
            f"{checkpoint.name} is the {found} checkpoint of this plan, expected the {wanted} one",
            hint="hybridstate verify ORIGINAL EXPORTED",
            model=checkpoint.name,
            found=found,
            expected=wanted,
        )


def _prompt(loaded: LoadedModel, count: int, length: int) -> tuple[torch.Tensor, str]:
    """Token ids `[count, length]` and what they are."""
    if loaded.tokenizer is not None:
        ids = prefixes(loaded.encode, heldout_text(), count=count, tokens=length)
        return torch.from_numpy(ids), "held-out prose"
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    generator = np.random.Generator(np.random.PCG64(SYNTHETIC_SEED))
    random = generator.integers(0, vocabulary, (count, length))
    return torch.from_numpy(random), "synthetic: random token ids, the model has no tokenizer"


def _run(
    loaded: LoadedModel,
    prompt: torch.Tensor,
    forced: torch.Tensor | None,
    new_tokens: int,
    report: Callable[[int, int], None],
) -> _Run:
    """Prompt, then new tokens: greedy, or those of `forced` `[B, N]`."""
    report(0, new_tokens + 1)
    logits, cache = prefill(loaded, prompt, keep_logits=True)
    after_prompt = _copies(cache)
    step, new = logits[:, -1], []
    for position in range(new_tokens):
        new.append(step.float().cpu())
        token = step.argmax(-1) if forced is None else forced[:, position]
        report(position + 1, new_tokens + 1)
        step = decode(loaded, token.to(loaded.device), cache)
    report(new_tokens + 1, new_tokens + 1)
    states = (after_prompt, _copies(cache))
    return _Run(logits.float().cpu(), torch.stack(new, dim=1), states)


def _copies(cache: Any) -> tuple[torch.Tensor, ...]:
    return tuple(state.detach().float().cpu().clone() for state in recurrent_states(cache))


def _compare_states(
    plan: Plan,
    layer: LinearLayer,
    originals: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    bound: float = MAX_RELATIVE_ERROR,
) -> LayerError:
    stored = plan.array(layer.index, "key_order")
    values = plan.array(layer.index, "value_order")
    heads = plan.head_order(layer.index, "exported")
    worst = 0.0
    for before, after in zip(originals, found, strict=True):
        expected = before
        if stored is not None and plan.absorbs_keys:
            index = torch.from_numpy(stored.astype(np.int64))[None, :, :, None]
            expected = before.gather(2, index.expand_as(before))
        if values is not None and plan.absorbs_values:
            columns = torch.from_numpy(values.astype(np.int64))[None, :, None, :]
            expected = expected.gather(3, columns.expand_as(expected))
        if heads is not None:
            expected = expected[:, torch.from_numpy(heads)]
        worst = max(worst, _relative(after, expected))
    if not worst <= bound:
        raise NumericError(
            f"layer {layer.index}: the exported state differs from the permuted original by "
            f"{worst:.2e} relative, at most {bound:.0e} is allowed",
            layer=layer.index,
            found=worst,
            expected=bound,
        )
    return LayerError(layer.index, worst)


def _compare_tokens(found: torch.Tensor, logits: torch.Tensor) -> None:
    differs = (found != logits.argmax(-1)).nonzero()
    if not len(differs):
        return
    prompt, step = (int(i) for i in differs[0])
    margin = float(_margins(logits)[prompt, step])
    raise NumericError(
        f"prompt {prompt}, new token {step}: the exported model chooses {int(found[prompt, step])}, "
        f"the original {int(logits[prompt, step].argmax())} (its two best logits are {margin:.2e} "
        "apart)",
        prompt=prompt,
        step=step,
        margin=margin,
        differing=len(differs),
    )


def _margins(logits: torch.Tensor) -> torch.Tensor:
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; NaN if either is not finite."""
    error = torch.linalg.vector_norm((found - expected).double())
    scale = torch.linalg.vector_norm(expected.double())
    return float(error / scale) if scale else float(error)


def _report(progress: Progress | None, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: None if progress is None else progress(stage, done, total)
