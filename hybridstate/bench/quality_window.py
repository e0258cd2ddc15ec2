"""WR whose window holds the whole prefix is full recomputation: checked on the real cache before anything else."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from hybridstate.errors import NumericError
from hybridstate.quality.generation import Sampling, generate
from hybridstate.quality.questions import own_block
from hybridstate.quality.replay import (
    Replayed,
    ReuseArm,
    serve,
    stored_prefixes,
    without_cache,
)
from hybridstate.trajectories.cache import prefill
from hybridstate.trajectories.model import LoadedModel

LONGEST: Final = 513
"""Tokens of the prompts at most."""
SHORTEST: Final = 160
WHOLE_WINDOW: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative RMS of states after a replay of the whole prefix, against prefill."""


@torch.no_grad()
def whole_window(
    loaded: LoadedModel, arms: Sequence[ReuseArm], *, questions: int
) -> dict[str, Any] | None:
    """WR whose window holds the whole prefix is full recomputation (`n_p <= W_replay`); None without such an arm.

    Raises:
        NumericError: restored states differ from prefill by more than rounding.
    """
    wr = [arm for arm in arms if arm.policy == "wr" and arm.kind == "fp32"]
    window = max((arm.w_replay for arm in wr), default=0)
    tokens = min(window + 1, LONGEST)
    if tokens < SHORTEST:
        return None
    arm = next(arm for arm in wr if arm.w_replay == window)
    count = questions
    block = own_block(loaded, "registers", tokens=tokens, questions=count).at_the_end()
    chosen = (arms[0], ReuseArm("recompute", "recompute"), arm)
    prefix = stored_prefixes(loaded, block, [arm.storage], chunk=block.prefix, rows=count)[0]
    replayed = Replayed(loaded, prefix, count)
    served = [
        without_cache(loaded, block, prefix, rounds=1)
        if one.policy == "recompute"
        else serve(loaded, one, block, prefix, replayed, slots=count, rounds=1, seed=0)
        for one in chosen
    ]
    errors = [
        float((found - exact).norm() / exact.norm())
        for found, exact in zip(served[2].states, prefix.states, strict=True)
    ]
    limit = WHOLE_WINDOW[loaded.dtype]
    if not max(errors) <= limit:
        raise NumericError(
            f"{arm.name} replays all {block.prefix} tokens of a prefix and is {max(errors):.2e} from "
            f"recomputation, at most {limit:g} is rounding; nothing is reported",
            found=max(errors),
            expected=limit,
        )
    whole = prefill(loaded, torch.cat([block.context, block.suffix], 1))
    replies = generate(
        *(loaded, block, chosen, served), chunk=block.prefix, sampling=Sampling(), whole=whole
    )
    same = [(replies.tokens[2] == replies.tokens[n]).all(1).mean() for n in (0, 1)]
    omitted = 0 if arm.units is None else sum(len(rows) for rows in arm.units.omitted)
    return {
        "arm": arm.name,
        "window": window,
        "prefix_tokens": block.prefix,
        "omitted_units": omitted,
        "questions": count,
        "state_error": max(errors),
        "state_error_limit": limit,
        "same_reply_as_dense": float(same[0]),
        "same_reply_as_recompute": float(same[1]),
    }
