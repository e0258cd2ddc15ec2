"""`bench_simulate` of `hybridstate.api`, as the list of its stages."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridstate.errors import SourceError, UsageError

if TYPE_CHECKING:
    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.serving_arms import Profile
    from hybridstate.bench.simulate import Simulation
    from hybridstate.bench.traces import Trace

    Progress = Callable[[str, int, int], None]

BF16_BYTES: Final = 2


def bench_simulate(
    model: str | Path | None = None,
    *,
    trace: str = "wildchat-shape",
    trace_file: Path | None = None,
    conversations: int = 256,
    arms: Sequence[str] | None = None,
    w_max: Sequence[int] | None = None,
    ratios: Sequence[float] | None = None,
    limits: Sequence[int] | None = None,
    clients: int = 256,
    think: float = 0.0,
    seeds: int = 5,
    policy: str = "lru",
    every: int = 0,
    budget_scope: str = "state",
    kv_bytes: int | None = None,
    tp: int = 1,
    balances: Sequence[str] | None = None,
    cost: Path | None = None,
    fit: Path | None = None,
    control: bool = True,
    progress: "Progress | None" = None,
) -> dict[str, Any]:
    """Serve conversations with the real prefix cache and predicted seconds, every arm in the same bytes.

    Imports neither torch nor transformers.

    Args:
        model: folder, Hub name or embedded name whose sizes and static horizons count; without one, synthetic horizons
            with Kimi-Linear's sizes and published retention.
        trace, trace_file, conversations: what is served, see `bench.traces`.
        arms: kinds of arms beside dense, see `bench.serving_arms`.
        w_max: cutoffs in tokens.
        ratios: working set over dense slots.
        limits: running requests at once; the first at every ratio, the others at the operating point.
        clients, think: conversations at once, and mean seconds before a client's next turn.
        seeds: orders of the conversations.
        policy: order of eviction.
        every: also keep a state every so many prompt tokens, 0 for none.
        budget_scope: `state` or `state+kv`.
        kv_bytes: attention bytes per token, from the config by default.
        tp, balances: ranks, and placements of the arms with a cutoff.
        cost: JSON of a cost model.
        fit: JSON of measured points; the cost model is fitted to half of them.
        control: whether prompts that share nothing run too.
        progress: called with (stage, done, total).

    Raises:
        UsageError: an option is out of range.
        SourceError: a file or the model cannot be read.
        UnsupportedModel, NumericError, PlanMismatch: as `analyze`.
    """
    from dataclasses import replace

    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.serving_arms import SCOPES, kimi_profile
    from hybridstate.bench.simulate import DEFAULT_ARMS, LIMITS, RATIOS, Options, Simulation
    from hybridstate.plan.placement import BALANCES
    from hybridstate.runtime.admission import Admission, Pools

    if budget_scope not in SCOPES:
        raise UsageError(f"--budget-scope takes {' or '.join(SCOPES)}", found=budget_scope)
    for balance in balances or ():
        if balance not in BALANCES:
            raise UsageError(f"--balance takes {', '.join(BALANCES)}", found=balance)
    if cost is not None and fit is not None:
        raise UsageError("a fit makes its own cost model", hint="give either --cost or --fit")
    if every < 0 or conversations < 1:
        raise UsageError("--every and --conversations must not be negative, nor the latter zero")
    Pools(native=1, policy=policy)
    options = Options(
        arms=tuple(arms or DEFAULT_ARMS),
        cutoffs=tuple(dict.fromkeys(w_max or (16, 64))),
        ratios=tuple(dict.fromkeys(ratios or RATIOS)),
        limits=tuple(dict.fromkeys(limits or LIMITS)),
        clients=clients,
        seeds=seeds,
        think=think,
        policy=policy,
        admission=Admission(every=every),
        scope="state+kv" if budget_scope == "state+kv" else "state",
        tp=tp,
        balances=tuple(b for b in BALANCES if b in (balances or ("off",))),
        control=control,
    )
    options.check()
    served = _trace(trace, trace_file, conversations)
    profile = (
        kimi_profile() if model is None else _profile(str(model), "hybrid" in options.balances)
    )
    if kv_bytes is not None:
        profile = replace(profile, kv_bytes=kv_bytes)
    model_of_cost = CostModel.default() if cost is None else CostModel.read(cost)
    fitted = None
    if fit is not None:
        simulation = Simulation(profile, served, model_of_cost, options)
        fitted, model_of_cost = _fitted(fit, simulation)
    result = Simulation(profile, served, model_of_cost, options, progress).run()
    hardware = {"device": "none", "name": platform.processor() or platform.machine()}
    return {**result, "fit": fitted, "device": hardware}


def _trace(name: str, file: Path | None, conversations: int) -> "Trace":
    from hybridstate.bench.traces import (
        FORMATS,
        GENERATED,
        MAX_PROMPT,
        no_sharing,
        read_trace,
        shared_prefix,
        wildchat_shape,
    )

    if name not in (*GENERATED, *FORMATS):
        raise UsageError(
            f"no trace is called {name!r}",
            hint=f"choose from {', '.join((*GENERATED, *FORMATS))}",
            found=name,
        )
    if name == "wildchat-shape" and file is not None:
        return read_trace(file, "messages", turns=4, prompt=MAX_PROMPT, limit=conversations)
    if name in FORMATS:
        if file is None:
            raise UsageError(f"--trace {name} needs --trace-file")
        style = {"sharegpt": "sharegpt", "messages": "messages", "mooncake": "mooncake"}[name]
        return read_trace(file, style, limit=conversations)  # type: ignore[arg-type]
    if file is not None:
        raise UsageError(f"--trace {name} is generated and reads no file")
    if name == "wildchat-shape":
        return wildchat_shape(conversations)
    if name == "no-sharing":
        return no_sharing(conversations)
    return shared_prefix(groups=max(1, conversations // 16), per_group=min(16, conversations))


def _profile(model: str, permuted: bool) -> "Profile":
    from hybridstate.bench.serving_arms import Profile
    from hybridstate.checkpoint import open_checkpoint
    from hybridstate.defaults import EPSILON
    from hybridstate.horizons.gate_input import resolve_gate_input
    from hybridstate.horizons.static import static_horizons
    from hybridstate.plan.placement import check_permutable

    checkpoint = open_checkpoint(model)
    if permuted:
        check_permutable(checkpoint)
    spec = checkpoint.spec
    gate_input, source = resolve_gate_input(checkpoint, given=None, measured=None)
    horizons = tuple(
        static_horizons(
            checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=spec.lower_bound,
            gate_input=gate_input,
            epsilon=EPSILON,
        )
        for layer in spec.layers
    )
    note = f"static horizons of the weights, gate input {gate_input:g} ({source})"
    attention = spec.num_layers - len(spec.layers)
    return Profile(
        checkpoint.name, note, False, spec, horizons, attention * kv_token_bytes(checkpoint.config)
    )


def kv_token_bytes(config: Mapping[str, Any]) -> int:
    """BF16 bytes that one full-attention block keeps per token; 0 where the config does not say."""
    text = config.get("text_config") or config
    latent = text.get("kv_lora_rank")
    if latent:
        return BF16_BYTES * (int(latent) + int(text.get("qk_rope_head_dim") or 0))
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    width = text.get("head_dim")
    if width is None and text.get("hidden_size") and text.get("num_attention_heads"):
        width = text["hidden_size"] // text["num_attention_heads"]
    return 2 * BF16_BYTES * int(heads) * int(width) if heads and width else 0


def _fitted(path: Path, simulation: "Simulation") -> tuple[dict[str, Any], "CostModel"]:
    """Fit on every other point of the file, predict the others with the same trace and options."""
    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.simulate import fit_and_predict

    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(
            f"cannot read measured points from {path.name}: {error}",
            hint="a JSON object with `points`, as a serving benchmark records them",
            file=str(path),
        ) from error

    def predict(point: Mapping[str, Any], cost: "CostModel") -> tuple[float, float]:
        simulation.cost = cost
        arms = {arm.name: arm for arm in (simulation.dense, *simulation.arms)}
        name = str(point.get("arm", "dense"))
        if name not in arms:
            raise SourceError(f"measured arm {name!r} is not simulated", hint="add it with --arm")
        found = simulation.point(
            arms[name], simulation.trace, float(point["ratio"]), int(point["limit"])
        )
        if "mean" not in found:
            raise SourceError(f"measured point cannot be simulated: {found['skipped']}")
        mean = found["mean"]
        return mean["mean_ttft_ms"] / 1e3, mean["hybridstate"]["token_hit_rate"]

    fitted = fit_and_predict(points, predict)
    return fitted, CostModel.from_json(fitted["cost_model"], path.name)
