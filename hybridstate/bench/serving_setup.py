"""What `bench serve` and `bench simulate` share: options, traces, profiles, and fits from recorded files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hybridstate.bench.recorded_form import Number, Positive, Recorded, check
from hybridstate.checkpoint.documents import read_object, result_of
from hybridstate.errors import HybridStateError, SourceError, UsageError, reading

if TYPE_CHECKING:
    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.serving_arms import Profile
    from hybridstate.bench.sweep import Options
    from hybridstate.bench.traces import Encode, Trace
    from hybridstate.checkpoint import Checkpoint

BF16_BYTES: Final = 2
MAX_SCALE: Final = 1.0

MOST_SEEDS: Final = 1_000
"""Orders of the conversations: as many as a calibration takes."""

MOST_CONVERSATIONS: Final = 1_000_000
"""Of a trace: more than any recorded one has; an order of them all is kept per seed."""


class _Noted(Recorded):
    note: str


class _Protocol(Recorded):
    tp: Positive
    backend: str


class _Seconds(Recorded):
    median: Number


class _Exchange(Recorded):
    """A row of `bench exchange`."""

    w_max: Positive
    checkpoints: Positive
    mode: str
    remote_bytes: Number
    store_s: _Seconds
    load_s: _Seconds


class _Exchanges(Recorded):
    protocol: _Protocol
    exchange: list[_Exchange]


def make_options(
    *,
    arms: Sequence[str] | None,
    w_max: Sequence[int] | None,
    ratios: Sequence[float] | None,
    limits: Sequence[int] | None,
    clients: int,
    think: float,
    seeds: int,
    policy: str,
    every: int,
    budget_scope: str,
    tp: int = 1,
    balances: Sequence[str] | None = None,
    control: bool = True,
) -> "Options":
    """Options of a sweep from those of a verb.

    Raises:
        UsageError: one is out of range.
    """
    from hybridstate.bench.serving_arms import SCOPES
    from hybridstate.bench.sweep import DEFAULT_ARMS, LIMITS, MOST_SLOTS, RATIOS, Options
    from hybridstate.plan.placement import BALANCES
    from hybridstate.runtime.admission import Admission, Pools

    if budget_scope not in SCOPES:
        raise UsageError(f"--budget-scope takes {' or '.join(SCOPES)}", found=budget_scope)
    for balance in balances or ():
        if balance not in BALANCES:
            raise UsageError(f"--balance takes {', '.join(BALANCES)}", found=balance)
    if seeds > MOST_SEEDS:
        raise UsageError(f"--seeds must be at most {MOST_SEEDS:,}, found {seeds}", found=seeds)
    if every < 0:
        raise UsageError("--every must not be negative", found=every)
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
    if max(options.limits) > MOST_SLOTS:
        raise UsageError(
            f"--limit {max(options.limits):,}: every running request has a slot, at most {MOST_SLOTS:,}",
            hint=f"{clients:,} clients have no more requests than that at once",
            found=max(options.limits),
        )
    return options


def trace_of(
    name: str,
    file: Path | None,
    conversations: int,
    *,
    scale: float = 1.0,
    encode: "Encode | None" = None,
    vocabulary: int = 256,
) -> "Trace":
    """A trace by name.

    Args:
        file: of recorded conversations.
        conversations: at most so many.
        scale: lengths over the published ones.
        encode: text to tokens, bytes by default.
        vocabulary: of tokens that stand for hashes.

    Raises:
        UsageError: an unknown name, a missing or a useless file, or a scale that is none.
        SourceError: the file cannot be read.
    """
    from hybridstate.bench.traces import (
        FORMATS,
        GENERATED,
        MAX_CONTEXT,
        MAX_PROMPT,
        MAX_REPLY,
        byte_tokens,
        generated,
        read_trace,
        scaled,
    )

    if conversations < 1:
        raise UsageError("--conversations must be at least 1", found=conversations)
    if conversations > MOST_CONVERSATIONS:
        raise UsageError(
            f"--conversations must be at most {MOST_CONVERSATIONS:,}, found {conversations}",
            found=conversations,
        )
    if not 0 < scale <= MAX_SCALE:
        raise UsageError("--scale is above 0 and at most 1", found=scale)
    if name not in (*GENERATED, *FORMATS):
        raise UsageError(
            f"no trace is called {name!r}",
            hint=f"choose from {', '.join((*GENERATED, *FORMATS))}",
            found=name,
        )
    words = encode or byte_tokens
    context, reply = scaled(scale, MAX_CONTEXT, 64), scaled(scale, MAX_REPLY, 4)
    if name == "wildchat-shape" and file is not None:
        prompt = (scaled(scale, MAX_PROMPT[0]), scaled(scale, MAX_PROMPT[1]))
        return read_trace(
            file,
            "messages",
            encode=words,
            turns=4,
            prompt=prompt,
            context=context,
            reply=reply,
            limit=conversations,
        )
    if name in FORMATS:
        if file is None:
            raise UsageError(f"--trace {name} needs --trace-file")
        return read_trace(
            file,
            name,  # type: ignore[arg-type]
            encode=words,
            context=context,
            reply=reply,
            limit=conversations,
            vocabulary=vocabulary,
        )
    if file is not None:
        raise UsageError(f"--trace {name} is generated and reads no file")
    return generated(name, conversations, scale=scale, encode=words)


def fitting_scale(positions: int | None) -> float:
    """The largest of 1, 1/2, 1/4 ... at which the published contexts fit into a model's positions."""
    from hybridstate.bench.traces import MAX_CONTEXT

    scale = MAX_SCALE
    while positions and scale * MAX_CONTEXT > positions:
        scale /= 2
    return scale


def context_limit(config: Mapping[str, Any]) -> int | None:
    """Positions that a model was trained for, as its config says; None where it does not."""
    text = config.get("text_config") or config
    for key in ("max_position_embeddings", "model_max_length"):
        if isinstance(text.get(key), int):
            return int(text[key])
    return None


def check_context(config: Mapping[str, Any], tokens: int, asked: str) -> None:
    """Refuse sequences longer than the positions that a model has.

    Args:
        tokens: of the longest sequence.
        asked: the options that ask for it.

    Raises:
        UsageError: they are too many.
    """
    limit = context_limit(config)
    if limit is not None and tokens > limit:
        raise UsageError(f"{asked}: {tokens:,} tokens, the model has {limit:,} positions")


def profile_of(checkpoint: "Checkpoint", *, gate_input: float | None = None) -> "Profile":
    """Sizes and static horizons of a checkpoint."""
    from hybridstate.bench.serving_arms import Profile
    from hybridstate.defaults import EPSILON
    from hybridstate.horizons.gate_input import resolve_gate_input
    from hybridstate.horizons.static import static_horizons

    spec = checkpoint.spec
    a_s, source = resolve_gate_input(checkpoint, given=gate_input, measured=None)
    horizons = tuple(
        static_horizons(
            checkpoint.decay(layer),
            gate=spec.gate,
            lower_bound=spec.lower_bound,
            gate_input=a_s,
            epsilon=EPSILON,
        )
        for layer in spec.layers
    )
    note = f"static horizons of the weights, gate input {a_s:g} ({source})"
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


def recorded_fit(
    path: Path, trace: "Trace", options: "Options", model: str
) -> "tuple[dict[str, Any], CostModel]":
    """Fit on every other point of a recorded `bench serve`, predict the others with the same trace and options.

    Raises:
        SourceError: the file holds no measured points, or they were measured on another trace or model than the one
            that is simulated.
    """
    from hybridstate.bench.serving_form import ResultToFit

    hint = "give a document of `bench serve`, as it was written"
    with reading(path, f"cannot read measured points from {path.name}", hint=hint):
        document = result_of(read_object(path))
        check(ResultToFit, document)
        points = [point for point in document["points"] if "skipped" not in point]
        measured = document.get("model", model)
        given = document.get("trace")
        check(_Noted | None, given, "trace")
        note = "" if given is None else str(given["note"])
    if measured != model:
        raise SourceError(
            f"{path.name} was measured on {measured}, not on {model}",
            hint="simulate that model, or give another model's cost_model as --cost FILE",
            file=str(path),
            found=measured,
            expected=model,
        )
    if given is not None and given != trace.to_json():
        raise SourceError(
            f"{path.name} was measured on another trace: {note}",
            hint="give the same --trace, --conversations and --scale",
            file=str(path),
        )
    for name, ours in (
        ("clients", options.clients),
        ("think_s", options.think),
        ("policy", options.policy),
    ):
        if document.get(name, ours) != ours:
            raise SourceError(
                f"{path.name} was measured with {name} {document[name]}, not {ours}",
                hint="give the same --clients, --think and --policy",
                file=str(path),
            )
    failed = f"cannot fit the points of {path.name}"
    with reading(path, failed, hint=hint):
        try:
            return fit_points(points, trace, options, path.name)
        except HybridStateError as error:  # of points, pools and rows that stand in the file
            raise ValueError(error.message) from error


def fit_points(
    points: Sequence[Mapping[str, Any]], trace: "Trace", options: "Options", source: str
) -> "tuple[dict[str, Any], CostModel]":
    """The fit of measured points, and the cost model of it."""
    from hybridstate.bench.cost_model import CostModel
    from hybridstate.bench.simulate import fit_and_predict, predict

    fitted = fit_and_predict(points, lambda point, cost: predict(point, trace, cost, options))
    return fitted, CostModel.from_json(fitted["cost_model"], source)


def with_exchange(cost: "CostModel", path: Path) -> "CostModel":
    """The cost model with a measured exchange between ranks, from a recorded `bench exchange`.

    An exchange is what a placement adds to the store or load of the same number of checkpoints without one; its bytes
    are the mean of the ranks, so a busier rank counts with a slope that is rather too steep.

    Raises:
        SourceError: the file holds no such measurements.
    """
    from hybridstate.bench.cost_model import fit

    hint = "give a document of `bench exchange`, as it was written"
    with reading(path, f"cannot read exchanges from {path.name}", hint=hint):
        document = result_of(read_object(path))
        check(_Exchanges, document)
        protocol, rows = document["protocol"], document["exchange"]
        ranks, backend = protocol["tp"], protocol["backend"]
        alone = {(r["w_max"], r["checkpoints"]): r for r in rows if r["mode"] == "off"}
        found = [
            [row["remote_bytes"] / ranks, row[kind]["median"] - alone[key][kind]["median"]]
            for row in rows
            if row["remote_bytes"] and (key := (row["w_max"], row["checkpoints"])) in alone
            for kind in ("store_s", "load_s")
        ]
    longer = [row for row in found if row[1] > 0]
    fitted = fit({"exchange": longer}, path.name)
    if "exchange" not in fitted.errors:
        raise SourceError(
            f"{path.name} holds {len(longer)} exchanges that took longer than none, a fit needs three",
            hint="measure with more than one cutoff, --balance off and another one",
            file=str(path),
        )
    return replace(
        cost,
        source=f"{cost.source}; exchange: {len(longer)} measured between {ranks} ranks ({backend})",
        coefficients={**cost.coefficients, "exchange": fitted.coefficients["exchange"]},
        errors={**cost.errors, "exchange": fitted.errors["exchange"]},
    )
