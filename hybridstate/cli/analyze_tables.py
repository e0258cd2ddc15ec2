"""Tables of `hybridstate analyze`: model, horizons, retained units, bytes."""

from typing import TYPE_CHECKING

from hybridstate.cli.output import Output, counted

if TYPE_CHECKING:
    from hybridstate.plan.analysis import Analysis


def remarks(out: Output, analysis: "Analysis") -> None:
    """Notes and warnings of an analysis, on stderr."""
    source = analysis.source
    for note in source.notes:
        out.note(note)
    out.note(
        f"read {source.tensor_bytes:,} bytes in {source.tensors} decay tensors "
        f"of {source.checkpoint_bytes:,}"
    )
    if source.hub is not None:
        out.note(
            f"asked the Hub {source.hub.requests} times, received {source.hub.received:,} bytes"
        )
    for warning in analysis.warnings:
        out.warn(warning)


def analysis_tables(out: Output, analysis: "Analysis") -> None:
    """Model, horizons, retained units and bytes of one checkpoint."""
    spec, source = analysis.spec, analysis.source
    dtypes = ", ".join(f"{name} {'/'.join(found)}" for name, found in source.stored_dtypes.items())
    bound = "" if spec.lower_bound is None else f", lower bound {spec.lower_bound:g}"
    first = spec.layers[0]
    heads = (
        counted(first.value_heads, "head")
        if first.bundle == 1
        else f"{first.key_heads} key and {first.value_heads} value heads"
    )
    out.text(
        f"{source.name}: {spec.name}, {len(spec.layers)} of {spec.num_layers} layers linear, "
        f"{heads} of {first.key_dim} x {first.value_dim}"
    )
    out.text(
        f"{spec.gate} gate{bound}, gate input {analysis.gate_input:g} "
        f"({analysis.gate_input_source}; a larger one shortens every horizon), stored as {dtypes}"
    )
    tokens = analysis.quantiles
    out.table(
        f"horizon in tokens at which {analysis.epsilon:g} of the content is left",
        ("units", "shortest", "10 %", "median", "90 %", "longest", "infinite"),
        [
            (
                tokens["units"],
                *(_tokens(tokens[name]) for name in ("min", "p10", "median", "p90", "max")),
                tokens["infinite"],
            )
        ],
    )
    cutoffs = analysis.cutoffs
    out.table(
        f"retained units (one {'value head' if spec.unit == 'head' else 'key channel of a head'} each)",
        ("W_max", "retained", "share %", "W_replay", "per layer"),
        [
            (
                c.selection.w_max,
                sum(c.selection.counts),
                _fixed(100 * c.selection.fraction, 1),
                c.selection.w_replay,
                f"{min(c.selection.counts)}..{max(c.selection.counts)}",
            )
            for c in cutoffs
        ],
    )
    dense = cutoffs[0].accounting
    out.table(
        "checkpoint size, dense over compressed",
        ("W_max", "bytes", "full", "full padded", "temporal", "temporal padded"),
        [
            (
                c.selection.w_max,
                c.accounting.ragged_bytes,
                _ratio(c.accounting.ratio_full_ragged),
                _ratio(c.accounting.ratio_full_padded),
                _ratio(c.accounting.ratio_temporal_ragged),
                _ratio(c.accounting.ratio_temporal_padded),
            )
            for c in cutoffs
        ],
        note=f"dense: {dense.dense_bytes:,} bytes = {dense.temporal_dense_bytes:,} temporal (FP32) "
        f"+ {dense.conv_bytes:,} convolution (BF16); full ratios count both",
    )


def _tokens(value: float | int | None) -> float | str:
    return "inf" if value is None else float(value)


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"
