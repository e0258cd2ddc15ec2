"""`hybridstate inspect`: what a checkpoint says of itself, from config and headers alone."""

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from hybridstate.cli.options import CacheDir, Json, LowerBound, Model, Offline, Quiet
from hybridstate.cli.output import Output, command, counted

if TYPE_CHECKING:
    from hybridstate.checkpoint.inspection import Inspection
    from hybridstate.families import ModelSpec

KINDS = {"gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention", "mamba2": "Mamba2"}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "inspect",
        short_help="Family, sizes, gate and stored dtypes, without reading a tensor.",
        epilog="Example: hybridstate inspect tiny-kda --headers",
    )(inspect)


def inspect(
    model: Model,
    headers: Annotated[
        bool, typer.Option("--headers", help="Also list every shard and every linear tensor.")
    ] = False,
    lower_bound: LowerBound = None,
    offline: Offline = False,
    cache_dir: CacheDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which architecture a checkpoint is, and how its linear-attention layers are stored.

    Reads config.json, the index and the header of each shard, and no byte of any tensor. Answers what the
    config alone cannot: dtypes on disk, tensor prefixes, quantised projections, re-split convolutions.
    """
    with command("inspect", model=model, json=json, quiet=quiet) as out:
        from hybridstate import api

        found = api.inspect(
            model,
            lower_bound=lower_bound,
            offline=offline,
            cache_dir=cache_dir,
            progress=out.progress,
        )
        for note in found.notes:
            out.note(note)
        for warning in found.warnings:
            out.warn(warning)
        _summary(out, found)
        _tensors(out, found)
        if headers:
            _headers(out, found)
        out.result(found.to_json(headers=headers))


def _summary(out: Output, found: "Inspection") -> None:
    spec = found.spec
    first = spec.layers[0]
    bound = "" if spec.lower_bound is None else f", lower bound {spec.lower_bound:g}"
    out.text(
        f"{found.name}: {spec.name} ({KINDS[spec.family.kind]}), {len(spec.layers)} of {spec.num_layers} layers "
        f"linear, {_heads(spec)} of {first.key_dim} x {first.value_dim}"
    )
    out.text(
        f"{spec.gate} gate{bound}; gate input {spec.default_gate_input:g} "
        f"({spec.default_gate_input_source}); convolution of {first.conv_width} taps over "
        f"{first.conv_channels:,} channels"
    )
    out.text(
        f"units: {sum(spec.units(layer) for layer in spec.layers):,} "
        f"{'heads' if spec.unit == 'head' else 'key channels'}, {spec.units(first):,} a layer; "
        f"linear blocks {_ranges(layer.index for layer in spec.layers)}"
    )
    out.text(f"good for: {_uses(spec)}")
    out.text(
        f"{counted(len(found.shards), 'shard')}, "
        f"{sum(shard.nbytes for shard in found.shards):,} bytes, of which {found.header_bytes:,} bytes of "
        f"headers and {found.tensor_bytes_read:,} bytes of tensors were read"
    )


def _heads(spec: "ModelSpec") -> str:
    first = spec.layers[0]
    if spec.family.kind == "mamba2":
        groups = "one group" if first.key_heads == 1 else f"{first.key_heads} groups"
        return f"{counted(first.value_heads, 'head')} in {groups}"
    if first.bundle == 1:
        return counted(first.value_heads, "head")
    return f"{first.key_heads} key and {first.value_heads} value heads"


def _uses(spec: "ModelSpec") -> str:
    if spec.family.analysis_only:
        return "analyze"
    if spec.family.runtime is None:
        return "analyze, export-plan without a calibration (transformers has no class for it)"
    return "analyze, calibrate, export-plan, bench"


def _tensors(out: Output, found: "Inspection") -> None:
    layers = len(found.spec.layers)
    out.table(
        f"tensors of a linear layer, below {found.spec.layers[0].prefix}",
        ("tensor", "dtype", "shape", "layers", "bytes"),
        [
            (
                kind.suffix,
                "/".join(kind.dtypes),
                " or ".join("x".join(map(str, shape)) for shape in kind.shapes),
                kind.layers,
                kind.nbytes,
            )
            for kind in found.kinds
        ],
        note=f"bytes: in all {layers} linear layers",
    )


def _headers(out: Output, found: "Inspection") -> None:
    out.table(
        "shards",
        ("file", "tensors", "of linear layers", "bytes"),
        [(s.file.name, s.tensors, s.linear_tensors, s.nbytes) for s in found.shards],
    )
    out.table(
        "tensors of linear layers",
        ("tensor", "dtype", "shape", "start", "end", "file"),
        [
            (
                name,
                entry.dtype,
                "x".join(map(str, entry.shape)),
                entry.start,
                entry.end,
                entry.file.name,
            )
            for name, entry in found.tensors
        ],
    )


def _ranges(numbers: Iterable[int]) -> str:
    """`0-2, 4-6, 8`."""
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        parts.append(f"{members[0]}" if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)
