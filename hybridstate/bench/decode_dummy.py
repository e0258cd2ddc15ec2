"""`bench decode --dummy`: a step of a full-size model with SYNTHETIC weights, timed per format, batch and component.

Before a run is timed its modules are checked against the plain model at its own batch size (`layer_check`), and the
captured step against the eager one. Steps are taken apart after all were timed: a profiler that has run once stays
attached to the driver and slows every later replay (by 1 ms of 23 on an H200). Beside the time stand the bytes that the
step moves, of experts those that the timed steps used, at the bandwidth of an in-place pass on the same device, and the
update alone on the run's own pool.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from hybridstate.bench.components import ExpertCount, memory_bandwidth, profiled, step_bytes
from hybridstate.bench.decode import (
    PREFILL_ROWS,
    Decoded,
    Format,
    Options,
    Progress,
    step_samples,
    windows,
)
from hybridstate.bench.layer_check import GRAPH_ERROR, Trace, check_blocks, check_graph, plain_trace
from hybridstate.bench.serving_setup import check_context
from hybridstate.bench.timing import device_record, measure_launches
from hybridstate.errors import NumericError, UsageError
from hybridstate.quality.arms import cached_prefix
from hybridstate.runtime.engine import DecodeEngine, DecodeRun
from hybridstate.runtime.restore import Prefix
from hybridstate.runtime.step import StepModules
from hybridstate.trajectories.dummy import LABEL
from hybridstate.trajectories.model import LoadedModel

CHECK_ROWS: Final = 16
"""Sequences whose blocks are compared."""
CHECK_TOKENS: Final = 2
PAPER_CUT: Final = {"Qwen3.6-35B-A3B": 0.190, "Kimi-Linear-48B-A3B": 0.145}
"""TPOT cut of the packed state at batch 256 that DAMP reports for the trained models (section 6.3)."""
LEAST_SHARE: Final = 0.9
"""Share of the isolated saving that has to arrive in the step."""

Report = Callable[[dict[str, Any]], None]
Failed = Callable[[str, int, Exception], None]
GoOn = Callable[[str], bool]
"""Whether there is time left for another `decoding` or `components`."""


def run_dummy_decode(
    loaded: LoadedModel,
    options: Options,
    prose: str,
    *,
    progress: Progress | None = None,
    report: Report | None = None,
    failed: Failed | None = None,
    go_on: GoOn | None = None,
) -> Decoded:
    """Check and time every format at every batch size, the largest batch first.

    Then the steps are taken apart: FP32 and the packed state first, then its rings, then the other formats.

    Args:
        report: called with every row as it is measured.
        failed: called with format, batch and error where a row cannot be measured, which then is left out; None raises.
        go_on: asked before every row and every step that is taken apart; after a no the result has what was measured.

    Raises:
        UsageError: the weights are not synthetic.
        NumericError: a check failed; nothing more is reported then.
    """
    options.check()
    if not loaded.synthetic:
        raise UsageError("synthetic weights only: leave --dummy out")
    step: Progress = progress or (lambda _stage, _done, _total: None)
    batches, formats = sorted(options.batches, reverse=True), options.formats()
    rows = max(CHECK_ROWS, batches[0])
    checked = {every: max(CHECK_TOKENS, every + 1) for _, every in formats}
    length = options.input_tokens + max(checked.values())
    whole_length = length + options.warmup + options.output_tokens
    check_context(loaded.checkpoint.config, whole_length, "--input-tokens and --output-tokens")
    tokens = windows(loaded, prose, length, rows)
    step("prefill", 0, 1)
    whole = cached_prefix(loaded, tokens[:, : options.input_tokens], rows=PREFILL_ROWS)
    step("prefill", 1, 1)
    forced = tokens[:, options.input_tokens :]
    modules = StepModules(loaded)
    step("modules", 1, 1)
    traces: dict[Format, Trace] = {}
    bandwidth = memory_bandwidth(loaded.device) if loaded.device.type == "cuda" else None
    measured: list[dict[str, Any]] = []
    timed: list[tuple[Format, dict[str, Any]]] = []
    engine: DecodeEngine | None = None
    left_out: list[str] = []
    done = 0

    def time_left(stage: str) -> bool:
        if go_on is None or go_on(stage):
            return True
        left_out.append(stage)
        return False

    def planned() -> Iterator[tuple[int, Prefix, Format]]:
        for batch in batches:
            prefix = whole if batch == whole.batch else whole.rows(range(batch))
            for form in formats:
                yield batch, prefix, form

    def make(form: Format, slots: int) -> DecodeEngine:
        return DecodeEngine(
            loaded,
            state=form[0],
            slots=slots,
            k_hi=options.k_hi,
            requantise_every=form[1],
            modules=modules,
        )

    for batch, prefix, form in planned():
        if not time_left("decoding"):
            break
        state, every = form
        shown = forced[:, : checked[every]]
        try:
            if form not in traces:
                engine = make(form, 1)
                first = whole.rows(range(CHECK_ROWS))
                traces[form] = plain_trace(engine, first, shown[:CHECK_ROWS])
                del first
            engine = make(form, batch)
            row = _row(engine, prefix, shown[:batch], traces[form], options, bandwidth)
        except (NumericError, RuntimeError) as error:
            if failed is None:
                raise
            failed(state, batch, error)
            continue
        finally:
            engine = None
            gc.collect()
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()
        measured.append(row)
        timed.append((form, row))
        if report is not None:
            report(row)
        done += 1
        step("decoding", done, len(batches) * len(formats))
    timed.sort(key=lambda item: _urgency(item[0]))
    for done, (form, row) in enumerate(timed, 1):
        if not time_left("components"):
            break
        batch = row["batch"]
        prefix = whole if batch == whole.batch else whole.rows(range(batch))
        _take_apart(make(form, batch), prefix, forced[:batch, :CHECK_TOKENS], row, options)
        gc.collect()
        step("components", done, len(timed))
    return Decoded(
        {
            "model": loaded.checkpoint.name,
            "synthetic": True,
            "label": LABEL,
            "checkpoint": "as given",
            "device": device_record(loaded.device),
            "bandwidth_bytes_per_s": bandwidth,
            "replaced_modules": modules.replaced,
            "kept_modules": modules.refused.reasons,
            "protocol": {
                "device": str(loaded.device),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "input_tokens": options.input_tokens,
                "output_tokens": options.output_tokens,
                "checked_tokens": CHECK_TOKENS,
                "warmup_tokens": options.warmup,
                "plan_digest": None,
                "key_order": "first channels protected",
            },
            "checks": [],
            "rows": measured,
            "speedups": speedups(measured),
            "savings": savings(loaded, measured),
            **({"stopped": "deadline", "left_out": left_out} if left_out else {}),
        }
    )


def _urgency(form: Format) -> int:
    """Steps of which formats are taken apart first."""
    state, every = form
    return 2 if state in ("bf16", "fp16") else int(every > 1)


def _row(
    engine: DecodeEngine,
    prefix: Prefix,
    forced: torch.Tensor,
    plain: Trace,
    options: Options,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Check one run and time it."""
    loaded, pool, batch = engine.loaded, engine.pool, prefix.batch
    room = forced.shape[1] + options.warmup + options.output_tokens
    run = engine.start(prefix, room=room, fixed=True)
    check = check_blocks(run, plain, forced)
    last = forced[:, -1].to(loaded.device)
    because: str | None = "not asked for"
    count = ExpertCount(loaded.model)
    if options.graph:
        with count.watching():
            because = run.capture()
    if run.graph is not None:
        check["graph_error"] = check_graph(run, last)
        if check["graph_error"] > GRAPH_ERROR:
            raise NumericError(
                f"{engine.label}, batch {batch}: a captured step is {check['graph_error']:.1e} from the eager one, "
                f"at most {GRAPH_ERROR:.0e}; nothing is reported",
                state=engine.label,
                batch=batch,
            )
    with count.watching() if run.graph is None else nullcontext():
        samples = step_samples(run, last, options, count.add)
    held = run.line_bytes
    length = prefix.length + forced.shape[1] + options.output_tokens // 2
    lines = held * length // run.line_tokens
    moved = step_bytes(loaded, engine, batch, lines, count.nbytes)
    row: dict[str, Any] = {
        "state": engine.label,
        "requantise_every": pool.every,
        "batch": batch,
        "backend": engine.backend,
        "mode": run.mode,
        "eager_because": because,
        "replaced_modules": engine.modules.replaced,
        "kept_modules": engine.modules.refused.reasons,
        "check": check,
        "layout_id": pool.layouts[0].layout_id,
        "state_bytes_per_request": pool.slot_bytes,
        "temporal_bytes_per_request": pool.temporal_bytes,
        "ring_bytes_per_request": pool.ring_bytes,
        "state_bytes_moved_per_step": moved["states"],
        "whole_step_state_gb_per_s": moved["states"] / samples.median / 1e9,
        "experts_used": count.to_json(),
        "bytes": moved,
        "bytes_s": None if bandwidth is None else sum(moved.values()) / bandwidth,
        "state_share_of_bytes": moved["states"] / sum(moved.values()),
        "tpot_s": samples.to_json(),
        "isolated_update": _isolated(engine, run),
        "device_bytes": torch.cuda.max_memory_allocated() if loaded.device.type == "cuda" else None,
        "components": None,
        "experts_used_profiled": None,
        "longest": [],
    }
    run.close()
    return row


def _take_apart(
    engine: DecodeEngine,
    prefix: Prefix,
    forced: torch.Tensor,
    row: dict[str, Any],
    options: Options,
) -> None:
    """Add the components of a timed row's step from a run of its own, behind the tokens that the timed steps followed.

    `experts_used_profiled` says of which experts those components are.
    """
    # replays are undone, but they write keys and values
    room = forced.shape[1] + options.warmup + engine.pool.every + 1
    run = engine.start(prefix, room=room, fixed=True)
    count = ExpertCount(engine.loaded.model)
    with count.watching():
        run.capture()
    for column in forced[:, :-1].to(engine.loaded.device).T:
        run.step(column)
    token = forced[:, -1].to(engine.loaded.device)
    for _ in range(options.warmup):
        token = run.step(token).argmax(-1)
    run.load(token)
    row.update(profiled(run, row["tpot_s"]["median"]) or {})
    if run.graph is not None:
        count.add()
    row["experts_used_profiled"] = count.to_json()
    run.close()


def _isolated(engine: DecodeEngine, run: DecodeRun) -> dict[str, Any] | None:
    """The update of every layer, one after another and nothing between, on the run's own states.

    Gates come from raw projections, as in the step; with a ring every layer runs a whole interval. Run it last: the
    states are not those of any text afterwards.
    """
    loaded = engine.loaded
    launches: list[Callable[[], Any]] = []
    for layer in loaded.spec.layers:
        step = engine.modules.linear.get(layer.ordinal)
        if step is None:
            return None
        generator = torch.Generator().manual_seed(layer.ordinal)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            drawn = torch.randn((len(run.slots), *shape), generator=generator)
            return drawn.to(loaded.device, loaded.dtype)

        q, k = (draw(layer.key_heads, layer.key_dim) for _ in range(2))
        v = draw(layer.value_heads, layer.value_dim)
        decay = draw(*loaded.spec.decay_shape(layer))
        strength = draw(layer.value_heads)
        launches.append(
            partial(engine.update, layer.ordinal, q, k, v, decay, strength, run.slots, step.fusion)
        )
    graph = loaded.device.type == "cuda" and engine.backend != "reference"
    whole = launches * engine.pool.every
    samples = measure_launches(whole, device=loaded.device, graph=graph, warmup=2, repeat=10)
    return {"layers": len(launches), "per_layer_s": samples.to_json()}


def speedups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median TPOT of FP32 over each other format at the same batch."""
    base = {r["batch"]: r["tpot_s"]["median"] for r in rows if r["state"] == "fp32"}
    return [
        {
            "batch": r["batch"],
            "state": r["state"],
            "fp32_over_this": base[r["batch"]] / r["tpot_s"]["median"],
        }
        for r in rows
        if r["state"] != "fp32" and r["batch"] in base
    ]


def savings(loaded: LoadedModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the packed state saves of a step, beside the isolated saving, the bytes and the paper's figure."""
    name = str(loaded.checkpoint.path.name)
    base = {r["batch"]: r for r in rows if r["state"] == "fp32"}
    found = []
    for row in rows:
        plain = base.get(row["batch"])
        if row["state"] != "damp" or plain is None:
            continue
        before, after = plain["tpot_s"]["median"], row["tpot_s"]["median"]
        # greedy tokens of two formats choose other experts, which no format saves
        saved_bytes = sum(n - row["bytes"][k] for k, n in plain["bytes"].items() if k != "experts")
        parts = plain["components"]
        alone = None
        if plain["isolated_update"] and row["isolated_update"]:
            each = [r["isolated_update"]["per_layer_s"]["median"] for r in (plain, row)]
            alone = plain["isolated_update"]["layers"] * (each[0] - each[1])
        found.append(
            {
                "batch": row["batch"],
                "fp32_tpot_s": before,
                "damp_tpot_s": after,
                "saved_s": before - after,
                "isolated_saving_s": alone,
                "share_of_isolated": None if not alone else (before - after) / alone,
                "least_share": LEAST_SHARE,
                "tpot_cut": 1 - after / before,
                "paper_tpot_cut": PAPER_CUT.get(name) if row["batch"] == 256 else None,
                "cut_by_bytes": saved_bytes / sum(plain["bytes"].values()),
                "recurrent_share": None
                if parts is None
                else parts["recurrent update"]["s"] / before,
                "state_share_of_bytes": plain["state_share_of_bytes"],
            }
        )
    return found
