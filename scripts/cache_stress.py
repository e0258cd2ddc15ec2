"""Stress of the prefix cache, recorded: 100,000 operations without tensors, 2,000 on each embedded model.

    python scripts/cache_stress.py -o benchmarks/cache-stress.json
    python scripts/cache_stress.py --model tiny-gdn -o gdn.json     each model in a process of its own,
    python scripts/cache_stress.py --join gdn.json --join kda.json -o benchmarks/cache-stress.json

Without tensors every operation is followed by `free + cached + active == size` for each pool, and every loaded slot is
compared with the prefix it should hold. On a model every greedy reply is compared with a run without a cache; freed
slots are NaN, so a slot that is read too late cannot pass. The arm `tight` runs several requests at once on pools
without room for them, hits states whose demotion is under way, and breaks states that the cache then has to refuse. Any
failure ends the script; nothing is written then.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hybridstate.provenance import environment, readable_json  # noqa: E402
from hybridstate.runtime.admission import Admission, Pools  # noqa: E402
from hybridstate.trajectories.model import LoadedModel, load_model  # noqa: E402
from tests.runtime.cache_stress import Stress  # noqa: E402
from tests.runtime.cached_model import CachedModel, compare_outputs  # noqa: E402
from tests.runtime.model_stress import LateStore, ModelStress  # noqa: E402
from tests.runtime.test_prefix_cache_stress import ARMS  # noqa: E402

MODEL_ARMS = {
    "two-tier": (Pools(native=6, packed=6, watermark=1), 0),
    "replay": (Pools(native=2, packed=9), 64),
}
"""Pools and replay window; with a window every other unit is omitted, and the window covers every prefix."""

TIGHT = Pools(native=4, packed=2, watermark=1)
TIGHT_SHARE = 3
"""Pools of the arm of several requests at once; its operations are smaller, one step of a request each, so it does this
many times what the arms above do together."""


def without_tensors(operations: int, seed: int) -> list[dict[str, Any]]:
    """The same number of operations on every arm."""
    found = []
    for arm, pools in ARMS.items():
        stress = Stress(seed, pools)
        started = time.perf_counter()
        for number in range(operations):
            stress.operate()
            if number % 16 == 0:
                stress.cache.audit()
        stress.drain()
        found.append(
            {
                "arm": arm,
                "operations": stress.done,
                "counters": stress.cache.counters.to_json(),
                "reclamations": stress.cache.tiers.reclamations,
                "while_moving": stress.while_moving,
                "leaked_slots": 0,  # drain refuses anything else
                "seconds": round(time.perf_counter() - started, 2),
            }
        )
        print(f"{arm}: {operations} operations, {found[-1]['seconds']} s", flush=True)
    return found


def on_model(name: str, operations: int, seed: int) -> list[dict[str, Any]]:
    """The operations are shared among the arms of `MODEL_ARMS`; `tight` has its own."""
    from tests.runtime.test_tensor_store import alternate

    loaded = load_model(name)
    found = []
    alone: dict[bytes, tuple[list[int], list[float]]] = {}
    for arm, (pools, window) in MODEL_ARMS.items():
        engine = CachedModel(
            loaded,
            pools,
            Admission(shortest=1),
            retained=alternate(loaded.spec) if window else None,
            window=window,
            alone=alone,
        )
        share = operations // len(MODEL_ARMS)
        started = time.perf_counter()

        def say(number: int, arm: str = arm) -> None:
            if number % 100 == 0:
                print(f"{name} {arm}: {number}", flush=True)

        compared = compare_outputs(engine, share, seed=seed, progress=say)
        found.append(_entry(name, arm, share, compared, engine, started))
    found.append(tight(name, loaded, TIGHT_SHARE * operations, seed, alone))
    return found


def tight(
    name: str,
    loaded: LoadedModel,
    operations: int,
    seed: int,
    alone: dict[bytes, tuple[list[int], list[float]]],
) -> dict[str, Any]:
    """Several requests at once, refused for lack of room and for broken states, on states being demoted."""
    engine = CachedModel(loaded, TIGHT, Admission(shortest=1), store=LateStore, alone=alone)
    started = time.perf_counter()

    def say(number: int) -> None:
        if number % 500 == 0:
            print(f"{name} tight: {number}", flush=True)

    seen = ModelStress(engine, seed).run(operations, say)
    entry = _entry(name, "tight", operations, seen.replies, engine, started)
    met = {key: value for key, value in asdict(seen).items() if key != "replies"}
    counters = engine.cache.counters
    for what, found in (
        ("full pool", counters.skipped_full),
        ("state that is not finite", counters.skipped_nonfinite),
        ("hit while demoting", seen.while_moving),
        ("hit whose transfer ended before its load", seen.overtaken),
    ):
        if not found:
            raise SystemExit(f"{name} tight: no {what}; more operations are needed")
    return {**entry, "met": met}


def _entry(
    name: str, arm: str, operations: int, compared: int, engine: CachedModel, started: float
) -> dict[str, Any]:
    print(f"{name} {arm}: {compared} replies compared", flush=True)
    return {
        "model": name,
        "arm": arm,
        "operations": operations,
        "replies_compared": compared,
        "replies_that_differ": 0,  # the run refuses any
        "starts": engine.tiers,
        "counters": engine.cache.counters.to_json(),
        "leaked_slots": 0,
        "seconds": round(time.perf_counter() - started, 2),
    }


def joined(paths: list[Path]) -> dict[str, Any]:
    """Runs of different models with the same seed, code and versions as one; their parts without tensors have to be
    equal."""
    documents = [json.loads(path.read_text()) for path in paths]
    first = documents[0]
    for other in documents[1:]:
        if other["seed"] != first["seed"] or _decided(other) != _decided(first):
            raise SystemExit("these runs decided otherwise with the same seed")
        if other["provenance"] != first["provenance"]:
            raise SystemExit("these runs are of different code or versions")
    models = [entry for document in documents for entry in document["models"]]
    return {**first, "models": models}


def _decided(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "seconds"} for e in document["without_tensors"]]


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--operations", type=int, default=100_000, help="without tensors, all arms")
    parser.add_argument("--model-operations", type=int, default=2_000, help="on each model")
    parser.add_argument("--model", action="append", help="folder or embedded name, repeatable")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--join", type=Path, action="append", help="recorded runs to put together")
    options = parser.parse_args()
    began = environment(device="cpu")  # of the code that runs, whatever is committed meanwhile
    result = (
        joined(options.join)
        if options.join
        else {
            "without_tensors": without_tensors(options.operations // len(ARMS), options.seed),
            "models": [
                entry
                for name in options.model or ("tiny-gdn", "tiny-kda")
                for entry in on_model(name, options.model_operations, options.seed)
            ],
            "seed": options.seed,
            "provenance": began,
        }
    )
    options.output.write_bytes(readable_json(result))


if __name__ == "__main__":
    main()
