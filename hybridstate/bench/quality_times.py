"""Time from a request's arrival to its first token through the prefix cache, one request at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hybridstate.bench.timing import Samples, measure
from hybridstate.quality.questions import Block
from hybridstate.quality.replay import ArmCache, Replayed, ReuseArm, stored_prefixes
from hybridstate.runtime.restore import Prefix, resume
from hybridstate.trajectories.cache import forward, new_cache
from hybridstate.trajectories.model import LoadedModel


@torch.no_grad()
def first_token_times(
    loaded: LoadedModel, arms: Sequence[ReuseArm], block: Block, repeats: int
) -> dict[str, Any]:
    """Seconds per arm: match, load, replay or zero-fill, and the unseen tokens (`recompute`: the whole prompt).

    Arms take turns. Not timed: random masks, which cost what NR costs, and formats of the live state, which are
    simulated here. Attention keys of the prefix are in place, as in a paged cache.
    """
    one = block.first(1)
    prefix = stored_prefixes(loaded, one, [arms[0].storage], chunk=block.prefix, rows=1)[0]
    timed = [arm for arm in arms if arm.seed is None and arm.storage.exact]
    calls = {arm.name: _request(loaded, arm, one, prefix) for arm in timed}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 1):
        for name, call in calls.items():
            taken = measure(call, device=loaded.device, warmup=0, repeat=1).seconds
            found[name] += taken if number else ()
    return {
        "task": block.task,
        "prefix_tokens": block.prefix,
        "unseen_tokens": int(block.suffix.shape[1]),
        "seconds": {name: Samples(taken).to_json() for name, taken in found.items()},
    }


def _request(loaded: LoadedModel, arm: ReuseArm, block: Block, prefix: Prefix) -> Callable[[], int]:
    """One request of an arm on a warm cache."""
    suffix = block.suffix.to(loaded.device)
    if arm.policy == "recompute":
        prompt = torch.cat([block.context.to(loaded.device), suffix], 1)
        return lambda: int(
            forward(loaded, prompt, new_cache(loaded), logits_to_keep=1)[0, -1].argmax()
        )
    replayed = Replayed(loaded, prefix, 1, keep=False)
    cache = ArmCache(loaded, arm, block, prefix, replayed, slots=1, timed=True)
    cache.warm()

    @torch.no_grad()
    def run() -> int:
        lease = cache.cache.acquire(cache.prompts[0], block.budget)
        assert lease is not None, "the cache has room for one request"
        assert lease.hit is not None, "its prefix is cached"
        cache.cache.load(lease)
        slot = torch.tensor([lease.slot], device=loaded.device)
        past = resume(loaded, prefix.kv, *cache.pool.read(slot))
        token = int(forward(loaded, suffix, past, logits_to_keep=1)[0, -1].argmax())
        cache.cache.finish(lease)
        return token

    return run


def medians(ttft: dict[str, Any]) -> dict[str, float]:
    """Median seconds per arm."""
    return {name: float(np.median(x["samples"])) for name, x in ttft["seconds"].items()}
